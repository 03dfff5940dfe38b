"""Answers judged → accuracies with their intervals, paired differences and tests: `accuracy.parquet`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mless import tasks
from mless.errors import BadData, BadFolder, BadStudy
from mless.store import ResultFolder
from mless.study.comparing import AccuracyVerdict, Run, compare, p_of_row, verdict_of
from mless.study.spec import AccuracyTable
from mless.values import Condition, condition_of

#: One row per answer. `reference` is the task's own answer, `how` the extraction rule that found the answer, `disagree` where the string and
#: the symbolic rule judged differently. `stated`: whether the text presents the answer as its result, or it was guessed (docs/extraction.md);
#: null where there is no answer.
ANSWERS = pa.schema(
    [
        ("model", pa.string()),
        ("task", pa.string()),
        ("condition", pa.string()),
        ("item", pa.string()),
        ("sample", pa.int32()),
        ("seed", pa.int64()),
        ("text", pa.string()),
        ("extracted", pa.string()),
        ("correct", pa.bool_()),
        ("why", pa.string()),
        ("n_tokens", pa.int32()),
        ("finish", pa.string()),
        ("reference", pa.string()),
        ("how", pa.string()),
        ("disagree", pa.bool_()),
        ("cluster", pa.string()),
        ("stated", pa.bool_()),
    ]
)

#: One row per condition, metric and split. Shares are 0…1. `p` is against `none`; `p_again` against `none-again`, null where that was not run;
#: `p_adjusted` is Holm's over the conditions, of the larger of the two (of the primary condition, which is tested alone, just the larger).
#: `alpha` is what that p is held to where no other condition has an effect, and `mde` the smallest effect that so many items could have shown by
#: this test with 80 % power. `delta_lo_all` and `delta_hi_all` hold for all conditions of the metric at once. `aa_delta` is the A/A difference of the
#: same metric, beside every delta. Null where a number has no meaning (delta of `none`).
ACCURACY = pa.schema(
    [
        ("model", pa.string()),
        ("task", pa.string()),
        ("condition", pa.string()),
        ("split", pa.string()),  # all | dev | test
        ("metric", pa.string()),  # pass@1, pass@4, maj@8, diversity
        ("n", pa.int32()),
        ("value", pa.float64()),
        ("lo", pa.float64()),
        ("hi", pa.float64()),
        ("sd", pa.float64()),  # over samples (seeds), null with one
        ("delta", pa.float64()),
        ("delta_lo", pa.float64()),
        ("delta_hi", pa.float64()),
        ("p", pa.float64()),
        ("p_again", pa.float64()),
        ("p_adjusted", pa.float64()),
        ("mde", pa.float64()),
        ("aa_delta", pa.float64()),
        ("gained", pa.int32()),
        ("lost", pa.int32()),
        ("equivalence_p", pa.float64()),
        ("verdict", pa.string()),  # rises | drops | equivalent | undecided; null for the controls
        ("truncated", pa.float64()),
        ("no_answer", pa.float64()),
        ("tokens", pa.float64()),  # mean number of tokens per answer
        ("samples", pa.int32()),
        ("changed_text", pa.float64()),  # share of answers whose text is not none's
        ("alpha", pa.float64()),
        ("delta_lo_all", pa.float64()),
        ("delta_hi_all", pa.float64()),
        ("stated", pa.float64()),  # share of answers that state a result; stated + guessed + no_answer = 1
        ("guessed", pa.float64()),
        ("stated_delta", pa.float64()),
        ("stated_delta_lo", pa.float64()),
        ("stated_delta_hi", pa.float64()),
        ("delta_both", pa.float64()),  # delta = delta_both + delta_form
        ("delta_both_lo", pa.float64()),
        ("delta_both_hi", pa.float64()),
        ("delta_form", pa.float64()),
        ("delta_form_lo", pa.float64()),
        ("delta_form_hi", pa.float64()),
        ("both_n", pa.int32()),  # pairs of answers stated under both, and how many of them are right before and after
        ("both_before", pa.int32()),
        ("both_after", pa.int32()),
        ("both_delta", pa.float64()),  # (both_after − both_before) / both_n
        ("both_delta_lo", pa.float64()),
        ("both_delta_hi", pa.float64()),
        ("mostly_form", pa.bool_()),  # delta_form has the sign of delta and is larger than delta_both
    ]
)

#: Where study.json says which primary condition was named when the first answer was drawn; older folders have no such entry.
FIRST_PRIMARY = "primary_at_first_answer"
#: Of so few items that changed no split gives an exact p of 0.05: 2 · 2⁻⁵ is 0.06.
FEWEST_CHANGES = 6


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

    Every condition is compared with `none`, item by item, and with the A/A control where there is one (`Condition.again`). One that
    votes (`Condition.samples`) has the metric maj@N, and its delta is against `none`'s pass@1: "greedy, or the majority of 8?" is one
    row, in the same family as the pass@1 of the others. Every random number is drawn for its own cell, so another condition
    changes only what depends on how many there are: the Holm-adjusted p, `alpha`, `mde` and the intervals for all at once. Of the
    `primary` condition it changes the last alone, and so never the verdict.
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
    return pa.Table.from_pylist(
        [names | {key: _plain(value) for key, value in row.items()} for row in rows], schema=ACCURACY
    )


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


# ---- reading the answers ---------------------------------------------------------------------------------------------


def _by_condition(
    answers: pa.Table, conditions: Mapping[str, Condition]
) -> tuple[dict[str, Run], list[str], list[str] | None]:
    """Every condition's answers in the same order of items, the items, and their cluster keys where there are any."""
    there: list[str] = answers.column("condition").unique().to_pylist()
    if "none" not in conditions or "none" not in there:
        raise BadStudy(
            f"accuracies are compared with condition 'none', which was not run (there are: {', '.join(sorted(there)) or 'no answers'}); "
            "add it to the study's conditions"
        )
    _refuse_strangers(answers, there, conditions)
    told = _tells_stated(answers)
    ordered = answers.sort_by([(name, "ascending") for name in ("condition", "item", "sample")])
    runs: dict[str, Run] = {}
    known: dict[str, str | None] = {}
    # `none` first: it is what the others are held against
    for name in sorted(conditions, key=lambda name: name != "none"):
        mine = ordered.filter(pc.field("condition") == name)
        items = _checked_items(name, mine, list(known))
        of_item = dict(zip(mine.column("item").to_pylist(), mine.column("cluster").to_pylist(), strict=True))
        for item, cluster in of_item.items():
            if known.setdefault(item, cluster) != cluster:
                raise BadData(
                    f"condition {name!r}, item {item!r}: its cluster is {cluster!r}, but {known[item]!r} under 'none'; an item has one cluster"
                )
        run = runs[name] = _run_of(mine, len(items), stated=told)
        drawn, wanted = run.correct.shape[1], conditions[name].samples or runs["none"].correct.shape[1]
        if drawn != wanted:
            why = "it votes over" if conditions[name].samples else "'none' has"
            raise BadData(
                f"condition {name!r} has {drawn} samples per item, but {why} {wanted}; run the study again, so that all are drawn"
            )
    clusters = None
    if any(cluster is not None for cluster in known.values()):
        # an item by itself must not fall in with a cluster that is called as it is
        clusters = [f"{item} (by itself)" if cluster is None else cluster for item, cluster in known.items()]
    return {name: runs[name] for name in conditions}, list(known), clusters


def _refuse_strangers(answers: pa.Table, there: Sequence[str], conditions: Mapping[str, Condition]) -> None:
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


def _checked_items(name: str, mine: pa.Table, expected: Sequence[str]) -> list[str]:
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


def _tells_stated(answers: pa.Table) -> bool:
    """Whether the table says of every answer if it was stated: older ones do not, nor do imported answers in words."""
    if "stated" not in answers.column_names or answers.column("stated").null_count == len(answers):
        return False
    unknown = pc.field("extracted").is_valid() & pc.field("stated").is_null()
    return not len(answers.filter(unknown))


def _run_of(mine: pa.Table, items: int, *, stated: bool) -> Run:
    def column(name: str) -> list[Any]:
        return mine.column(name).to_pylist()

    def objects(values: Sequence[str | None]) -> np.ndarray:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array.reshape(items, -1)

    return Run(
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
    return tasks.vote_of(answer)


# ---- a choice made by looking ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BestOnDev:
    """The condition that dev items chose, its rows on either split, and what the test items say of it.

    One condition is tested on the test items, so `p` (the larger of those against `none` and `none-again`) is not adjusted; the
    `p_adjusted` of its row is for those who look at all conditions there.
    """

    condition: str
    among: int
    dev: dict[str, Any]
    test: dict[str, Any]
    p: float | None
    verdict: AccuracyVerdict


def best_on_dev(table: pa.Table, conditions: Mapping[str, Condition]) -> BestOnDev:
    """The condition with the highest pass@1 on the dev items (of equals the smallest p, then the first), and its test row."""
    rows: list[dict[str, Any]] = table.filter(pc.field("metric") == "pass@1").to_pylist()
    of = {(row["condition"], row["split"]): row for row in rows}
    if ("none", "dev") not in of:
        raise BadStudy(
            "no items were set apart to choose on; run the study with --set accuracy.dev_share=0.5 for a dev and a test split"
        )
    candidates = [name for name, one in conditions.items() if not one.again and name != "none" and (name, "dev") in of]
    if not candidates:
        raise BadStudy(f"nothing to choose from: of the conditions {', '.join(conditions)} none is compared by pass@1")
    # min keeps the first of equals
    best = min(candidates, key=lambda name: (-of[name, "dev"]["value"], _or(of[name, "dev"]["p"], 1.0)))
    test = of[best, "test"]
    p = None if test["p"] is None else p_of_row(test)
    return BestOnDev(
        best, len(candidates), of[best, "dev"], test, p, verdict_of(test, p) if p is not None else "undecided"
    )


def _or(value: float | None, instead: float) -> float:
    return instead if value is None else value


# ---- the table read back ---------------------------------------------------------------------------------------------


def read_accuracy(path: Path) -> tuple[dict[str, Any], dict[str, Condition], list[dict[str, Any]]]:
    """study.json, the conditions and the rows of accuracy.parquet of a finished accuracy study."""
    folder = ResultFolder(path)
    about = folder.manifest()
    if about is not None and not (about.get("study") or {}).get("accuracy"):
        raise BadFolder(
            f"{path} holds no answers: its study measured attention; give the folder of a study with [accuracy], as `mless run accuracy` makes it"
        )
    rows: list[dict[str, Any]] = folder.read_table("accuracy").to_pylist()
    conditions = {name: condition_of(name, one) for name, one in (about or {})["conditions"].items()}
    return about or {}, conditions, rows


def accuracy_rows(path: Path) -> list[dict[str, Any]]:
    """One row per condition over all items, for a table on the screen: pass@1, or the vote where the condition votes."""
    return headlines(read_accuracy(path)[2])


def headlines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per condition over all items."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["split"] == "all":
            first.setdefault(row["condition"], {**row, "accuracy": row["value"]})
    return list(first.values())
