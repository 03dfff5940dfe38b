"""Answers judged → accuracies with their intervals, paired differences and tests: `accuracy.parquet`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mless import tasks
from mless.errors import BadData, BadStudy
from mless.results.schemas import ACCURACY, table_of_rows
from mless.study.accuracy.comparing import Answered, compare
from mless.study.spec import AccuracyTable
from mless.values import Condition

# ---- the table -------------------------------------------------------------------------------------------------------


def accuracy_table(
    answers: pa.Table,
    conditions: Mapping[str, Condition],
    settings: AccuracyTable,
    *,
    seed: int,
    primary: str | None = None,
) -> pa.Table:
    """From `ANSWERS` to `ACCURACY`, whatever the order of the rows (docs/accuracy-statistics.md says what each column is).

    Every condition is compared with `none`, item by item, and with the A/A control where there is one (`Condition.again`). A condition that
    votes (`Condition.samples`) has the metric maj@N, and its delta is against `none`'s pass@1. It is in the same family as the pass@1 of
    the others. Random numbers are drawn per cell. So one more condition changes only what depends on their number: the Holm-adjusted p,
    `alpha`, `mde` and the intervals for all at once. For the `primary` condition it changes only those intervals, never the verdict.
    """
    runs, items, clusters = _by_condition(answers, conditions)
    rows = compare(
        runs,
        items,
        clusters,
        votes={name for name, one in conditions.items() if one.samples is not None},
        again=next((name for name, one in conditions.items() if one.again), None),
        ks=settings.k,
        margin=settings.margin,
        dev_share=settings.dev_share,
        seed=seed,
        primary=primary,
    )
    names = {name: answers.column(name)[0].as_py() for name in ("model", "task")}
    return table_of_rows([names | row for row in rows], ACCURACY)


# ---- reading the answers ---------------------------------------------------------------------------------------------


def _by_condition(
    answers: pa.Table, conditions: Mapping[str, Condition]
) -> tuple[dict[str, Answered], list[str], list[str] | None]:
    """Every condition's answers in the same order of items, the items, and their cluster keys where there are any."""
    there: list[str] = answers.column("condition").unique().to_pylist()
    if "none" not in conditions or "none" not in there:
        raise BadStudy(
            f"accuracies are compared with condition 'none', which was not run (there are: {', '.join(sorted(there)) or 'no answers'}); "
            "add it to the study's conditions"
        )
    _refuse_unknown_answers(answers, there, conditions)
    known_stated = _has_stated(answers)
    ordered = answers.sort_by([(name, "ascending") for name in ("condition", "item", "sample")])
    runs: dict[str, Answered] = {}
    known: dict[str, str | None] = {}
    # `none` first: the others are compared with it
    for name in sorted(conditions, key=lambda name: name != "none"):
        mine = ordered.filter(pc.field("condition") == name)
        items = _same_items(name, mine, list(known))
        of_item = dict(zip(mine.column("item").to_pylist(), mine.column("cluster").to_pylist(), strict=True))
        for item, cluster in of_item.items():
            if known.setdefault(item, cluster) != cluster:
                raise BadData(
                    f"condition {name!r}, item {item!r}: its cluster is {cluster!r}, but {known[item]!r} under 'none'; an item has one cluster"
                )
        run = runs[name] = _run_of(mine, len(items), stated=known_stated)
        drawn, wanted = run.correct.shape[1], conditions[name].samples or runs["none"].correct.shape[1]
        if drawn != wanted:
            why = "it votes over" if conditions[name].samples else "'none' has"
            raise BadData(
                f"condition {name!r} has {drawn} samples per item, but {why} {wanted}; run the study again, so that all are drawn"
            )
    clusters = None
    if any(cluster is not None for cluster in known.values()):
        # an item without a cluster must not join a cluster of the same name
        clusters = [f"{item} (by itself)" if cluster is None else cluster for item, cluster in known.items()]
    return {name: runs[name] for name in conditions}, list(known), clusters


def _refuse_unknown_answers(answers: pa.Table, there: Sequence[str], conditions: Mapping[str, Condition]) -> None:
    for column in ("model", "task"):
        several = answers.column(column).unique().to_pylist()
        if len(several) > 1:
            raise BadData(f"answers of one {column} expected; got {', '.join(map(str, several))}: make a table of each")
    for name in there:
        if name not in conditions:
            raise BadData(
                f"answers of condition {name!r}, which the study does not have; it has: {', '.join(conditions)}"
            )
    for name in conditions:
        if name not in there:
            raise BadData(f"condition {name!r} has no answers; run the study again to complete it")
    controls = [name for name, condition in conditions.items() if condition.again]
    if len(controls) > 1:
        raise BadStudy(f"one A/A control (again = true) expected; got {', '.join(controls)}: leave out all but one")
    if controls and conditions[controls[0]].samples is not None:
        raise BadStudy(
            f"the A/A control {controls[0]!r} is `none` once more, so it cannot vote; take away its samples = {conditions[controls[0]].samples}"
        )
    if answers.column("correct").null_count:
        row = answers.filter(pc.field("correct").is_null()).slice(0, 1).to_pylist()[0]
        raise BadData(
            f"condition {row['condition']!r}, item {row['item']!r}, sample {row['sample']}: not judged; an answer that is missing is wrong, "
            "not null"
        )


def _same_items(name: str, mine: pa.Table, expected: Sequence[str]) -> list[str]:
    """The condition's items, each with the same samples once, and the same items as `none`'s (`expected`, empty for `none`)."""
    keys = list(zip(mine.column("item").to_pylist(), mine.column("sample").to_pylist(), strict=True))
    for one, following in itertools.pairwise(keys):
        if one == following:
            raise BadData(
                f"condition {name!r}, item {one[0]!r}, sample {one[1]}: answered twice; each is to be there once"
            )
    items = list(dict.fromkeys(item for item, _ in keys))
    if expected and (odd := sorted(set(items) ^ set(expected))):
        where = "has it and 'none' has not" if odd[0] not in expected else "lacks it and 'none' has it"
        raise BadData(
            f"the conditions differ in their items: {odd[0]!r}: {name!r} {where} ({len(odd)} such); only the same items can be paired: run "
            "the study again to complete it"
        )
    samples = sorted({sample for _, sample in keys})
    if len(keys) != len(items) * len(samples):
        given = set(keys)
        item, sample = next((i, s) for i in items for s in samples if (i, s) not in given)
        raise BadData(
            f"condition {name!r}, item {item!r}: sample {sample} is missing; run the study again to complete it"
        )
    return items


def _has_stated(answers: pa.Table) -> bool:
    """Whether the table has `stated` for every answer. Older tables and imported answers in words do not."""
    if "stated" not in answers.column_names or answers.column("stated").null_count == len(answers):
        return False
    unknown = pc.field("extracted").is_valid() & pc.field("stated").is_null()
    return not len(answers.filter(unknown))


def _run_of(mine: pa.Table, items: int, *, stated: bool) -> Answered:
    def column(name: str) -> list[Any]:
        return mine.column(name).to_pylist()

    def objects(values: Sequence[str | None]) -> np.ndarray:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array.reshape(items, -1)

    return Answered(
        np.array(column("correct"), np.bool_).reshape(items, -1),
        np.array([finish == "length" for finish in column("finish")], np.bool_).reshape(items, -1),
        np.array([answer is not None for answer in column("extracted")], np.bool_).reshape(items, -1),
        # A server may not say how many tokens an answer had.
        np.array([np.nan if n is None else n for n in column("n_tokens")], np.float64).reshape(items, -1),
        objects([text or "" for text in column("text")]),
        objects([None if answer is None else _vote(answer) for answer in column("extracted")]),
        np.array([bool(one) for one in column("stated")], np.bool_).reshape(items, -1) if stated else None,
    )


@functools.lru_cache(maxsize=1 << 16)  # the same answers are read for every split and every comparison
def _vote(answer: str) -> str:
    # Code is no value: the same text is the same vote.
    return answer if "\n" in answer else tasks.vote_of(answer)
