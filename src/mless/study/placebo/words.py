"""Placebos in words: what an arbitrary edit does, and where each named filler lies among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mless.results.folder import ResultFolder
from mless.results.nats import around, signed, unit_of_change
from mless.results.placed import ordinal, shown_metrics
from mless.results.wording import p_words
from mless.study.placebo.tables import ALPHA
from mless.values import condition_of, condition_words, counted

Row = Mapping[str, Any]

_VERDICTS = {
    "rises": "above what an arbitrary edit does",
    "drops": "below what an arbitrary edit does",
    "equivalent": "no different from an arbitrary edit",
    "undecided": "not told apart from an arbitrary edit",
}


def placebo_lines(path: Path) -> list[str]:
    """An opening line, what an arbitrary edit does, a line for each filler, and the limits."""
    folder = ResultFolder(path)
    about = folder.about() or {}
    rows: list[Row] = folder.read_table("placebo").to_pylist()
    metrics = shown_metrics({row["metric"] for row in rows})
    first = rows[0]
    fillers = list(dict.fromkeys(row["condition"] for row in rows))
    one = about["conditions"][fillers[0]]
    lines = [
        f"{about['model']['label']}, {counted(len(about['items']), 'item')} of {about['task']}: {', '.join(fillers)} among {first['edits']} arbitrary edits of "
        f"{one['length']} tokens, {one['placement']}, by {' and '.join(about['inner'])}"
    ]
    lines += [_arbitrary(next(row for row in rows if row["metric"] == metric)) for metric in metrics]
    for name in fillers:
        own = {row["metric"]: row for row in rows if row["condition"] == name}
        what = condition_words(condition_of(name, about["conditions"][name]))
        lines.append(f"{name} ({what}): {'; '.join(_place(own[metric]) for metric in metrics if metric in own)}")
    return [*lines, *_limits(first["edits"], fillers)]


def _arbitrary(row: Row) -> str:
    metric = row["metric"]
    mean = f"{signed(row['edits_mean'], metric)}{around(row['edits_lo'], row['edits_hi'], metric)} {unit_of_change(metric)}"
    spread = signed(row["edits_sd"], metric).lstrip("+")
    return f"An arbitrary edit changes {metric} by {mean} on average; between-edit sd {spread}"


def _place(row: Row) -> str:
    metric = row["metric"]
    ends = row["percentile_lo"], row["percentile_hi"]
    between = "" if None in ends else f" [{ordinal(ends[0])}, {ordinal(ends[1])}]"
    specific = f"{signed(row['specific'], metric)}{around(row['specific_lo'], row['specific_hi'], metric)} {unit_of_change(metric)}"
    return (
        f"{metric} {signed(row['delta'], metric)}{around(row['delta_lo'], row['delta_hi'], metric)}, {ordinal(row['percentile'])} percentile of "
        f"{row['edits']} edits{between}; filler-specific Δ {specific}, {p_words(row['p'])}: {_VERDICTS[row['verdict']]}"
    )


def _limits(edits: int, fillers: Sequence[str]) -> list[str]:
    said: list[str] = []
    smallest = 1 / (edits + 1)
    if smallest > ALPHA:
        said.append(
            f"with {edits} edits p is never below {smallest:.2f}, so no filler can stand out; take at least {round(1 / ALPHA) - 1} edits"
        )
    if len(fillers) > 1:
        said.append(
            f"each p is of one filler by itself; of {len(fillers)} fillers one stands out by chance more often than 1 in 20"
        )
    said.append("intervals of the edits' mean, of percentiles and of filler-specific Δ hold over items and edits")
    return said
