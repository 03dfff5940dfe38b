"""Replies → answers: what was found in each, whether it is right and why, and the table that compares the conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from mless import tasks
from mless.results.schemas import ANSWERS
from mless.study.accuracy.tables import accuracy_table
from mless.study.bench import Bench, Progress
from mless.study.spec import AccuracyTable
from mless.values import Item

#: Increased when extraction or grading changes, so that a stored folder is judged again by the same command.
JUDGING = 4


def write_judged(bench: Bench, replies: pa.Table, settings: AccuracyTable) -> None:
    """Judge all replies and write answers.parquet and accuracy.parquet."""
    answers = judged(replies, bench.items, bench.task, settings, bench.progress)
    bench.folder.write_table("answers", answers)
    by_name = {condition.name: condition for condition in bench.conditions}
    spec = bench.spec
    table = accuracy_table(answers, by_name, settings, seed=spec.seed, primary=spec.primary)
    bench.folder.write_table("accuracy", table)


def judged(
    replies: pa.Table, items: Sequence[Item], task: str, settings: AccuracyTable, progress: Progress | None = None
) -> pa.Table:
    """Every reply with the answer found in it, whether it is right, and why it was judged so."""
    maker, by_tests = tasks.GRADERS.get(settings.grader), settings.runs_code
    rules: Sequence[tasks.Rule] = settings.rules or getattr(maker, "rules", None) or _rules_of(task)
    clusters = {item.id: item.cluster for item in items}
    references = {item.id: (item.answer or "") if by_tests else tasks.reference_of(item) for item in items}
    asked: list[str] = replies.column("item").to_pylist()
    # One text at a time: all of them as Python's strings would be held beside the table.
    found = [tasks.extract(text.as_py(), rules) for text in replies.column("text")]

    def step(done: int, total: int) -> None:
        # Drawing a bar takes as long as a plain answer's judgement.
        if progress is not None and (done == total or done % max(1, total // 1_000) == 0):
            progress.step("judging", done, total)

    with maker() as grader:
        grades = grader.grade_many([(one, references[item]) for one, item in zip(found, asked, strict=True)], step)
    made: dict[str, list[Any]] = {
        "extracted": [one.text for one in found],
        "correct": [grade.correct for grade in grades],
        "why": [grade.why for grade in grades],
        "how": [one.how for one in found],
        "disagree": [grade.disagree for grade in grades],
        "stated": [one.stated for one in found],
        "reference": [references[item] for item in asked],
        "cluster": [clusters[item] for item in asked],
    }
    columns = [pa.array(made[one.name], one.type) if one.name in made else replies.column(one.name) for one in ANSWERS]
    return pa.table(columns, schema=ANSWERS).combine_chunks()


def _rules_of(task: str) -> tuple[tasks.Rule, ...]:
    """By the task's name; arithmetic-2 and gsm8k_test are arithmetic and gsm8k."""
    return next((rules for name, rules in tasks.TASK_RULES.items() if task.startswith(name)), tasks.DEFAULT_RULES)
