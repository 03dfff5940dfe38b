"""Replies → answers: what was found in each, whether it is right and why, and the table that compares the conditions."""

from __future__ import annotations

from collections.abc import Sequence

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
    by_id = {item.id: item for item in items}
    references = {item.id: (item.answer or "") if by_tests else reference_of(item) for item in items}
    rows = replies.to_pylist()
    found = [tasks.extract(row["text"], rules) for row in rows]

    def step(done: int, total: int) -> None:
        if progress is not None:
            progress.step("judging", done, total)

    with maker() as grader:
        pairs = [(one, references[row["item"]]) for one, row in zip(found, rows, strict=True)]
        grades = grader.grade_many(pairs, step)
    for row, one, grade in zip(rows, found, grades, strict=True):
        row |= {
            "extracted": one.text,
            "correct": grade.correct,
            "why": grade.why,
            "how": one.how,
            "disagree": grade.disagree,
            "stated": one.stated,
        }
        row |= {"reference": references[row["item"]], "cluster": by_id[row["item"]].cluster}
    return pa.Table.from_pylist(rows, schema=ANSWERS)


def _rules_of(task: str) -> tuple[tasks.Rule, ...]:
    """By the task's name; arithmetic-2 and gsm8k_test are arithmetic and gsm8k."""
    return next((rules for name, rules in tasks.TASK_RULES.items() if task.startswith(name)), tasks.DEFAULT_RULES)


def reference_of(item: Item) -> str:
    """The answer itself, where the data give a worked solution that ends in it (GSM8K's ``#### 18``)."""
    answer = (item.answer or "").strip()
    return tasks.extract(answer, ("hashes", "boxed")).text or answer
