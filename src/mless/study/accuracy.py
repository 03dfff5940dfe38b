"""Answers judged → accuracies with their intervals, paired differences and tests: `accuracy.parquet`, and what it says in words."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
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
from mless.study.comparing import ALPHA, AccuracyVerdict, Run, compare, p_of_row, verdict_of
from mless.study.form import form_words, guessed_lines
from mless.study.form import interval as _interval
from mless.study.form import points as _points
from mless.study.form import share as _share
from mless.study.population import population_lines
from mless.study.spec import AccuracyTable
from mless.values import Condition, condition_of, condition_words

#: Why an answer, or its reference, was compared as text though it may be mathematics.
_UNREAD = [tasks.NOTES[key] for key in ("long", "time", "memory", "crash", "reference", "answer")]
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


# ---- in words --------------------------------------------------------------------------------------------------------


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
    return _headlines(read_accuracy(path)[2])


def _headlines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["split"] == "all":
            first.setdefault(row["condition"], {**row, "accuracy": row["value"]})
    return list(first.values())


def accuracy_lines(path: Path) -> list[str]:
    """What was asked, a line per condition, the A/A control, and what limits it all."""
    about, conditions, rows = read_accuracy(path)
    settings: dict[str, Any] = about["study"]["accuracy"]
    heads = {row["condition"]: row for row in _headlines(rows)}
    again = next((name for name in heads if conditions[name].again), None)
    compared = [name for name in heads if name not in ("none", again)]
    lines = [_opening(about, settings, heads["none"])]
    primary: str | None = about["study"].get("primary")
    by_holm = [name for name in compared if name != primary]
    lines += [
        f"{name} ({_told(name, about, conditions)}): "
        + _result(heads[name], settings["margin"], family=len(by_holm), primary=name == primary)
        for name in heads
        if name != again
    ]
    lines += _primary_changed(about, primary)
    lines += _further_metrics(rows, compared, primary)
    lines += _at_once(heads, compared)
    lines.append(_control(heads.get(again or ""), about, settings))
    if any(row["split"] == "dev" for row in rows) and compared:
        lines += _choice(rows, conditions, settings["margin"])
    lines += population_lines(str(about["task"]), heads["none"]["n"])
    lines += _power(heads, compared)
    lines += _losses(heads, settings)
    lines += guessed_lines(heads)
    judged = ResultFolder(path).read_table("answers", columns=["condition", "text", "disagree", "why"])
    lines += _form(heads, judged)
    disagree = judged.column("disagree")
    differing = disagree.to_pylist().count(True)
    if about.get("imported"):
        engine: Mapping[str, Any] = about["engine"]
        return [
            *lines,
            f"Right and wrong are as {engine['engine']} judged them ({engine['metric']}).",
            *_warnings(heads, compared),
        ]
    lines.append(
        f"The string and the symbolic rule judged {differing:,} of {len(disagree):,} answers differently"
        + ("; answers.parquet says why each was judged as it was." if differing else ".")
    )
    if unread := sum(any(note in why for note in _UNREAD) for why in judged.column("why").to_pylist()):
        lines.append(
            f"{unread:,} of {len(disagree):,} answers could not be read as mathematics (or their reference could not) and were compared as text."
        )
    return lines + _warnings(heads, compared)


def _opening(about: Mapping[str, Any], settings: Mapping[str, Any], none: Mapping[str, Any]) -> str:
    engine: Mapping[str, Any] = about.get("engine") or {}
    slots = engine.get("slots")
    details = [engine.get("mode"), f"S = {slots}" if slots else None]
    shown = ", ".join(str(one) for one in details if one)
    drawn = engine.get("drawn") or (f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy")
    samples = f"{none['samples']} samples" if none["samples"] > 1 else "1 answer"
    return (
        f"{about['model']['label']}, {none['n']:,} item{'s' if none['n'] != 1 else ''} of {about['task']}, engine "
        f"{engine.get('engine', settings['engine'])}{f' ({shown})' if shown else ''}, {drawn}, {samples} per item; accuracy = share judged "
        "right, with 95 % interval"
    )


def _told(name: str, about: Mapping[str, Any], conditions: Mapping[str, Condition]) -> str:
    """What a condition is; of imported results that do not say it, where they came from."""
    stored: Mapping[str, Any] = about["conditions"][name]
    return (
        f"as in {stored['imported']}"
        if stored.get("imported") and not stored["told"]
        else condition_words(conditions[name])
    )


def _result(row: Mapping[str, Any], margin: float, *, family: int, primary: bool = False) -> str:
    text = "" if row["metric"] == "pass@1" else f"{row['metric']} "
    text += f"{100 * row['value']:.1f} %{_interval(row['lo'], row['hi'])}"
    if row["sd"] is not None:
        text += f", sd over {row['samples']} seeds {100 * row['sd']:.1f}"
    if row["delta"] is None:
        return text
    against = "" if row["metric"] == "pass@1" else " against none's pass@1"
    text += f"; Δ {_points(row['delta'])} points{_interval(row['delta_lo'], row['delta_hi'], signed=True)}{against}"
    if row["aa_delta"] is not None:
        text += f" (A/A {_points(row['aa_delta'])})"
    if row["p"] is not None:
        text += f", {_p(row['p'])}"
        if row["p_again"] is not None and row["p_again"] != row["p"]:
            text += f" and against none-again {_p(row['p_again'])}"
        if primary:
            text += ", tested alone as the primary condition"
        elif family > 1 and row["p_adjusted"] is not None:
            text += f", after Holm {_p(row['p_adjusted'])}"
    return f"{text}: {_words(row, row['p_adjusted'], row['verdict'], margin)}{form_words(row)}"


def change_words(row: Mapping[str, Any]) -> str:
    """``Δ +3.3 points [−1.0, +7.6], p = 0.12``, without a verdict."""
    text = f"Δ {_points(row['delta'])} points{_interval(row['delta_lo'], row['delta_hi'], signed=True)}"
    return text if row["p"] is None else f"{text}, {_p(row['p'])}"


def points_words(share: float) -> str:
    """``+3.3``, in points."""
    return _points(share)


def _words(row: Mapping[str, Any], p: float | None, verdict: str, margin: float) -> str:
    around = f"±{100 * margin:g} points"
    if verdict == "equivalent":
        return f"no effect: a change of more than {around} is excluded (equivalence test, {_p(row['equivalence_p'])})"
    if verdict == "undecided" and p is not None and p <= ALPHA:
        return "undecided: the same prompts differ by as much among themselves (A/A)"
    if verdict == "undecided":
        return f"undecided: neither a change is shown, nor that it stays within {around}"
    return f"accuracy {verdict}"


def _primary_changed(about: Mapping[str, Any], primary: str | None) -> list[str]:
    """A primary condition that was named, or named otherwise, after answers were there: a choice that may have been made by looking."""
    if about.get("imported"):
        if primary is None:
            return []
        return [
            f"The primary condition, {primary}, was named when the results were imported: their answers were there before."
        ]
    before: str | None = about.get(FIRST_PRIMARY)
    if before == primary:
        return []
    now = f"now it is {primary}" if primary is not None else "now none is named"
    then = f"it was {before}" if before is not None else "none was named"
    return [
        f"The primary condition was changed after answers were drawn: {then}, {now}. A condition chosen after a look at the answers "
        "rejects more often than its p says; the test that was planned is the earlier one."
    ]


def _at_once(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str]) -> list[str]:
    """What may be said of all conditions together, by intervals that hold at once. Folders of before have none."""
    rows = [heads[name] for name in compared if heads[name].get("delta_lo_all") is not None]
    if len(rows) < 2:
        return []
    shown = ", ".join(
        f"{row['condition']}{_interval(row['delta_lo_all'], row['delta_hi_all'], signed=True)}" for row in rows
    )
    largest = max(max(-row["delta_lo_all"], row["delta_hi_all"]) for row in rows)
    return [
        f"Read together, the Δ of all {len(rows)} conditions lie in (95 % for all at once, Bonferroni): {shown}; beyond ±{100 * largest:.1f} points "
        "a change is excluded for every one of them"
    ]


def _further_metrics(
    rows: Sequence[Mapping[str, Any]], compared: Sequence[str], primary: str | None = None
) -> list[str]:
    """pass@k, maj@k and diversity in a line each; the vote of a condition has its own line already."""
    lines: list[str] = []
    here = [row for row in rows if row["split"] == "all" and row["metric"] != "pass@1"]
    for metric in dict.fromkeys(row["metric"] for row in here if row["condition"] == "none"):
        of = {row["condition"]: row for row in here if row["metric"] == metric}
        shown = [f"none {_share(of['none']['value'])}"]
        for name in compared:
            if (row := of.get(name)) is not None and row["delta"] is not None:
                how = "tested alone" if name == primary else "after Holm"
                tested = f", {how} {_p(row['p_adjusted'])}" if row["p_adjusted"] is not None else ""
                shown.append(f"{name} {_share(row['value'])} (Δ {_points(row['delta'])}{tested}, {row['verdict']})")
        again = (
            of["none"]["aa_delta"]
            if of["none"]["aa_delta"] is not None
            else next((r["aa_delta"] for r in of.values()), None)
        )
        control = f" (A/A {_points(again)})" if again is not None else ""
        lines.append(f"{'2-gram diversity' if metric == 'diversity' else metric}{control}: {'; '.join(shown)}")
    return lines


def _control(again: Mapping[str, Any] | None, about: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    if again is None:
        return "No A/A control (none-again) was run, so how far the same prompts differ by themselves is not known."
    moved, n = again["gained"] + again["lost"], again["n"]
    mode = (about.get("engine") or {}).get("mode")
    text = f"A/A: none-again differs on {moved:,} of {n:,} items, Δ {_points(again['delta'])}"
    if not moved and not again["changed_text"]:
        return f"{text}: {mode + ' ' if mode else ''}decoding repeats itself"
    text += f"{_interval(again['delta_lo'], again['delta_hi'], signed=True)}, and {_share(again['changed_text'])} of the answers read otherwise"
    if settings["temperature"] == 0 and mode is not None:
        return (
            f"{text}: {mode} decoding should have repeated itself and did not, so do not trust this run before you know why "
            "(another device, another version?)"
        )
    return f"{text}: an effect needs rejection against both none and none-again, and a Δ no larger than this is none"


def _choice(rows: Sequence[Mapping[str, Any]], conditions: Mapping[str, Condition], margin: float) -> list[str]:
    try:
        best = best_on_dev(pa.Table.from_pylist([dict(row) for row in rows], schema=ACCURACY), conditions)
    except BadStudy:
        return []  # only votes were compared: there was nothing to choose
    dev, test = best.dev, best.test
    p = f", {_p(best.p)}" if best.p is not None else ""
    control = f" (A/A {_points(test['aa_delta'])})" if test["aa_delta"] is not None else ""
    return [
        f"Chosen on {dev['n']:,} dev items, out of {best.among}: {best.condition} ({condition_words(conditions[best.condition])}); on the "
        f"{test['n']:,} test items Δ = {_points(test['delta'])} points{_interval(test['delta_lo'], test['delta_hi'], signed=True)}{control}{p}: "
        f"{_words(test, best.p, best.verdict, margin)}"
    ]


def _power(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str]) -> list[str]:
    shown = [f"{name} ±{100 * heads[name]['mde']:.1f}" for name in compared if heads[name]["mde"] is not None]
    unknown = [name for name in compared if heads[name]["mde"] is None]
    if not compared:
        return []
    text = f"{', '.join(shown)} points" if shown else ""
    if unknown:
        text += f"{'; ' if shown else ''}{', '.join(unknown)}: too few items changed for any"
    if any(heads[name].get("alpha") is None for name in compared):
        # a folder of before counted one comparison against one run of none
        holm = f"; Holm over {len(compared)} conditions asks for somewhat more" if len(compared) > 1 else ""
        return [f"Smallest effect that so many items could have shown (80 % power, one comparison): {text}{holm}"]
    noisy = any(heads[name]["p_again"] is not None and heads[name]["p_again"] != heads[name]["p"] for name in compared)
    asked = [f"p ≤ {_levels(heads, compared)}"] if len(compared) > 1 else []
    asked += ["against both runs of none"] if noisy else []
    by = f", by the test that was used: {', '.join(asked)}" if asked else ""
    return [f"Smallest effect that so many items could have shown (80 % power{by}): {text}"]


def _levels(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str]) -> str:
    """``0.0167 (Holm over 3)``, or ``0.05 (primary) and 0.025 (Holm over 2)``."""
    counts = Counter(sorted((heads[name]["alpha"] for name in compared), reverse=True))
    return " and ".join(
        f"{alpha:.3g} ({f'Holm over {count}' if count > 1 else 'one condition alone'})"
        for alpha, count in counts.items()
    )


def _losses(heads: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Truncation and missing answers, said as soon as one condition has more than 5 % of them."""
    lines: list[str] = []
    for column, what, way_out in (
        (
            "truncated",
            f"Cut off at {settings['max_new_tokens']:,} tokens",
            "; --max-new-tokens gives more room",
        ),
        ("no_answer", "No answer found, which counts as wrong", ""),
    ):
        if any(row[column] > 0.05 for row in heads.values()):
            shares = ", ".join(f"{name} {_share(row[column])}" for name, row in heads.items())
            lines.append(f"{what}: {shares}{way_out}")
    return lines


def _form(heads: Mapping[str, Mapping[str, Any]], answers: pa.Table) -> list[str]:
    """Whether the answers differ in form, which moves accuracy without any better or worse reasoning."""
    lines: list[str] = []
    lengths = {name: row["tokens"] for name, row in heads.items() if row["tokens"] is not None}
    if lengths and max(lengths.values()) > 1.5 * max(1.0, min(lengths.values())):
        shown = ", ".join(f"{name} {tokens:.0f}" for name, tokens in lengths.items())
        lines.append(
            f"The answers differ in form: {shown} tokens on average. A condition that makes a model answer more briefly, or not stray, moves "
            "accuracy without better reasoning; read some side by side in the report"
        )
    texts: dict[str, list[str]] = {name: [] for name in heads}
    for condition, text in zip(
        answers.column("condition").to_pylist(), answers.column("text").to_pylist(), strict=True
    ):
        texts[condition].append(text)
    empty = {name: sum(not text.strip() for text in those) / max(1, len(those)) for name, those in texts.items()}
    if any(share > 0.2 for share in empty.values()):
        shown = ", ".join(f"{name} {_share(share)}" for name, share in empty.items())
        lines.append(f"Empty answers: {shown}. The model stops at once; it may want its chat template (--prompt chat)")
    return lines


def _warnings(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str]) -> list[str]:
    lines: list[str] = []
    none = heads["none"]
    if none["n"] < 2:
        lines.append("An interval and a test take at least 2 items; here nothing can be decided.")
    elif none["value"] <= 0.05 or none["value"] >= 0.95:
        where, word, other = ("floor", "drop", "easier") if none["value"] <= 0.05 else ("ceiling", "rise", "harder")
        lines.append(
            f"none is right on {_share(none['value'])} of the answers: at the {where} no {word} can be shown and little else; take {other} items"
        )
    few = [name for name in compared if heads[name]["gained"] + heads[name]["lost"] < FEWEST_CHANGES]
    if few and none["n"] >= 2:
        counts = ", ".join(f"{name} {heads[name]['gained'] + heads[name]['lost']}" for name in few)
        lines.append(
            f"Items that changed: {counts}; fewer than {FEWEST_CHANGES} can never reject, so of these only 'no effect' could be shown"
        )
    return lines


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}" if value < 0.1 else f"p = {value:.2f}"
