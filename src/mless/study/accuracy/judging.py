"""Replies → answers: what was found in each, whether it is right and why, and the table that compares the conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

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
    pairs = _Pairs(replies.column("text"), rules, [references[item] for item in asked])

    def step(done: int, total: int) -> None:
        # Drawing a bar takes as long as a plain answer's judgement.
        if progress is not None and (done == total or done % max(1, total // 1_000) == 0):
            progress.step("judging", done, total)

    with maker() as grader:
        grades = grader.grade_many(pairs, step)
    found = pairs.found
    made: dict[str, list[Any]] = {
        "extracted": [one.text for one in found],
        "correct": [grade.correct for grade in grades],
        "why": [grade.why for grade in grades],
        "how": [one.how for one in found],
        "disagree": [grade.disagree for grade in grades],
        "stated": [one.stated for one in found],
        "reference": pairs.references,
        "cluster": [clusters[item] for item in asked],
    }
    columns = [pa.array(made[one.name], one.type) if one.name in made else replies.column(one.name) for one in ANSWERS]
    return pa.table(columns, schema=ANSWERS).combine_chunks()


class _Pairs(Sequence[tuple[tasks.Extracted, str]]):
    """Answers with their references. Each answer is found when its pair is asked for, so that a grader's workers can start meanwhile."""

    def __init__(self, texts: pa.ChunkedArray, rules: Sequence[tasks.Rule], references: list[str]) -> None:
        self._texts, self._rules, self.references = texts, rules, references
        self._found: list[tasks.Extracted] = []

    @property
    def found(self) -> list[tasks.Extracted]:
        # One text at a time: all of them as Python's strings would be held beside the table.
        self._found += (tasks.extract(text.as_py(), self._rules) for text in self._texts[len(self._found) :])
        return self._found

    def __len__(self) -> int:
        return len(self.references)

    @overload
    def __getitem__(self, place: int) -> tuple[tasks.Extracted, str]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[tasks.Extracted, str]]: ...
    def __getitem__(self, place: int | slice) -> tuple[tasks.Extracted, str] | list[tuple[tasks.Extracted, str]]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        return self.found[place], self.references[place]

    def __iter__(self) -> Iterator[tuple[tasks.Extracted, str]]:
        for place, text in enumerate(self._texts):
            if place == len(self._found):
                self._found.append(tasks.extract(text.as_py(), self._rules))
            yield self._found[place], self.references[place]


def _rules_of(task: str) -> tuple[tasks.Rule, ...]:
    """By the task's name; arithmetic-2 and gsm8k_test are arithmetic and gsm8k."""
    return next((rules for name, rules in tasks.TASK_RULES.items() if task.startswith(name)), tasks.DEFAULT_RULES)
