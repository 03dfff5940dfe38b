"""Doses in words: which lengths change anything, whether more is more, whether there is a best length, and what it does to other items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mless.results.folder import ResultFolder
from mless.results.nats import around, signed, unit_of_change
from mless.results.placed import PUBLISHED_DOSES, shown_metrics
from mless.results.wording import p_words
from mless.values import condition_of, condition_words, counted

ALPHA = 0.05

Row = Mapping[str, Any]


def dose_lines(path: Path) -> list[str]:
    """An opening line, a line for each curve, the cell that was chosen, what was published, and the limits."""
    folder = ResultFolder(path)
    about = folder.about() or {}
    points: list[Row] = folder.read_table("dose").to_pylist()
    tests: list[Row] = folder.read_table("dose_tests").to_pylist()
    lengths = sorted({row["length"] for row in points})
    metrics = shown_metrics({row["metric"] for row in points})
    fillers, placements = (list(dict.fromkeys(row[name] for row in tests)) for name in ("filler", "placement"))
    lines = [
        f"{about['model']['label']}, {counted(len(about['items']), 'item')} of {about['task']}: {', '.join(fillers)} in "
        f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]:,} tokens, {' and '.join(placements)}, by likelihood"
    ]
    for metric in metrics:
        of_metric = [row for row in tests if row["metric"] == metric]
        for test in of_metric:
            own = [row for row in points if all(row[name] == test[name] for name in ("metric", "filler", "placement"))]
            lines.append(_curve(test, own, about["conditions"]))
        lines += [_chosen(row) for row in of_metric if row["chosen"]]
    return [*lines, PUBLISHED_DOSES, *_limits(len(fillers) * len(placements))]


def _curve(test: Row, points: Sequence[Row], conditions: Mapping[str, Any]) -> str:
    metric, unit = test["metric"], unit_of_change(test["metric"])
    one = points[-1]
    what = condition_words(condition_of(one["condition"], conditions[one["condition"]]))
    longest = f"{signed(one['delta'], metric)}{around(one['lo'], one['hi'], metric)} {unit} at {one['length']:,} tokens"
    sure = [row for row in points if row["p_adjusted"] is not None and row["p_adjusted"] <= ALPHA]
    ups, downs = ([row["length"] for row in sure if side * row["delta"] > 0] for side in (1, -1))
    said = [
        f"{word} at {', '.join(f'{n:,}' for n in some)}" for word, some in (("rises", ups), ("drops", downs)) if some
    ]
    changes = (
        f"{' and '.join(said)} tokens (Holm over the lengths)" if said else "no length is shown to differ from none"
    )
    slope = f"slope {signed(test['slope'], metric)}{around(test['slope_lo'], test['slope_hi'], metric)} a doubling, {p_words(test['slope_p_adjusted'])}"
    return f"{metric}, {test['filler']} (up to {what}): {changes}; {longest}; {slope}; {_peak(test)}"


def _peak(test: Row) -> str:
    p = test["peak_p_adjusted"]
    if p is None:
        return "whether there is a peak is not known: items are too few, or do not vary"
    if not test["peak_length"]:
        return "no length in between is better than both ends"
    found = "a peak" if p <= ALPHA else "no peak shown"
    return f"{found}: {counted(test['peak_length'], 'token')} against none and the longest, {p_words(p)}"


def _chosen(row: Row) -> str:
    metric = row["metric"]
    if row["test_delta"] is None:
        return f"{metric}: no best length, because the items are too few to be divided"
    return (
        f"{metric}, the best cell on {row['dev_n']:,} dev items: {row['filler']}, {counted(row['best_length'], 'token')} {row['placement']} "
        f"({signed(row['dev_delta'], metric)}, which flatters it); on the {row['test_n']:,} other items {signed(row['test_delta'], metric)}"
        f"{around(row['test_lo'], row['test_hi'], metric)} {unit_of_change(metric)}, {p_words(row['test_p'])}"
    )


def _limits(curves: int) -> list[str]:
    said = [f"p of slopes and peaks are Holm's over the {curves} curves of a metric"] if curves > 1 else []
    return [
        *said,
        "a peak that is not shown may still be there: a length in between has to beat both ends, and the best one seen need not be the best there is",
    ]
