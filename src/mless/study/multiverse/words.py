"""A multiverse in words: in how many specifications a condition changes anything, whether chance gives as many, and which setting decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mless.results.nats import signed, size, unit_of_change
from mless.results.placed import shown_metrics
from mless.results.specification_rows import Specification, SpecificationSetting, SpecificationTest
from mless.results.specified import SETTINGS, StoredMultiverse, tally, varied
from mless.results.wording import p_words
from mless.values import condition_of, condition_words, counted

ALPHA = 0.05


def multiverse_lines(path: Path) -> list[str]:
    """An opening line, a line for each condition and metric, what was left out, and the limits."""
    folder = StoredMultiverse.open(path)
    rows, tests, settings = folder.specifications(), folder.tests(), folder.settings()
    about = folder.about
    conditions = list(dict.fromkeys(test.condition for test in tests))
    readouts = list(dict.fromkeys(row.readout for row in rows))
    lines = [
        f"{about['model']['label']}, {counted(len(about['items']), 'item')} of {about['task']}: {', '.join(conditions)} against none in "
        f"{_grid(rows, readouts)}"
    ]
    metrics = shown_metrics({test.metric for test in tests})
    for name in conditions:
        what = condition_words(condition_of(name, about["conditions"][name]))
        for test in tests:
            if test.condition == name and test.metric in metrics:
                own = [one for one in settings if (one.condition, one.metric) == (name, test.metric)]
                lines.append(f"{name} ({what}), {test.metric}: {_said(test, own)}")
    return [*lines, *_left_out(rows), *_limits(tests, readouts, rows)]


def _grid(rows: Sequence[Specification], readouts: Sequence[str]) -> str:
    said: list[str] = []
    for readout in readouts:
        own = [row for row in rows if row.readout == readout and row.reason is None]
        count = len({row.specification for row in own})
        crossed = " × ".join(counted(len(values), SETTINGS[name]) for name, values in varied(own).items())
        said.append(f"{counted(count, 'specification')} by {readout}{f' ({crossed})' if crossed else ''}")
    return " and ".join(said)


def _said(test: SpecificationTest, settings: Sequence[SpecificationSetting]) -> str:
    metric = test.metric
    median = f"median Δ {signed(test.median, metric)} {unit_of_change(metric)}, from {signed(test.lowest, metric)} to {signed(test.highest, metric)}"
    return "; ".join([tally(test), median, _jointly(test), *_most(settings)])


def _jointly(test: SpecificationTest) -> str:
    if test.p_median is None or test.p_either is None:
        return "jointly not tested: fewer than two items have a value"
    most = max(test.rises, test.drops)
    one_way = f"{most} or more go one way with {p_words(test.p_either)}, " if most else ""
    return f"jointly, if it did nothing anywhere: {one_way}a median as far from 0 with {p_words(test.p_median)}"


def _most(settings: Sequence[SpecificationSetting]) -> list[str]:
    known = [one for one in settings if one.range is not None]
    if not known:
        return []
    first = max(known, key=lambda one: one.range or 0.0)
    values = sorted((one for one in known if one.setting == first.setting), key=lambda one: one.delta or 0.0)
    ends = " to ".join(f"{signed(one.delta, one.metric)} with {one.value}" for one in (values[0], values[-1]))
    p = "" if first.range_p_adjusted is None else f", {p_words(first.range_p_adjusted)}"
    turned = f"; alone it turns the verdict in {first.turned} of {first.pairs} pairs" if first.pairs else ""
    return [
        f"the setting that moves it most: {SETTINGS[first.setting]} (range {size(first.range, first.metric)}: {ends}{p}){turned}"
    ]


def _left_out(rows: Sequence[Specification]) -> list[str]:
    """Each reason once, with the specifications it holds for."""
    found: dict[str, dict[int, Specification]] = {}
    for row in rows:
        if row.reason is not None:
            found.setdefault(row.reason, {})[row.specification] = row
    lines: list[str] = []
    for reason, some in found.items():
        names = list(dict.fromkeys(row.folder for row in some.values()))
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"left out, {counted(len(some), 'specification')} ({shown}): {reason}")
    return lines


def _limits(tests: Sequence[SpecificationTest], readouts: Sequence[str], rows: Sequence[Specification]) -> list[str]:
    said: list[str] = []
    if "accuracy" not in readouts:
        said.append(
            "extraction rule and grader concern drawn answers, so they are no settings of log-probabilities; with answers: --set "
            "multiverse.by=likelihood,accuracy"
        )
    if not varied([row for row in rows if row.reason is None]):
        said.append(
            "one specification alone was run, so nothing is said about settings; give several values of one, as multiverse.system"
        )
    fewest = min((test.n for test in tests), default=0)
    if 2 * 0.5**fewest > ALPHA:
        said.append(f"with {counted(fewest, 'item')} no specification can reach p ≤ {ALPHA:g}; take at least 6 items")
    said.append(
        "specifications share their items and are no independent studies, so their number is no vote; the joint p flips the sign of an item's change in all "
        "of them at once"
    )
    said.append(
        "verdicts are those of each specification by itself at p ≤ 0.05, as a paper that reports this one alone would have it"
    )
    return said
