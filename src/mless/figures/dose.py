"""How much filler, and where: change of log-probabilities by length, a line for each placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.figures import style
from mless.figures.style import PAGE_WIDTH, Picture
from mless.results.figure_kinds import Drawing
from mless.results.nats import METRICS_OF_CHANGE, unit_of_change
from mless.results.placed import PUBLISHED_DOSES, StoredDose, shown_metrics
from mless.results.schemas import DosePoint, DoseTest

ALPHA = 0.05
#: A placement keeps its colour and mark in every picture.
PLACES: dict[str, tuple[str, str]] = {
    "before-system": (style.BLUE, "s"), "before-question": (style.VERMILLION, "o"), "end": (style.GREEN, "^"), "before-answer": (style.PURPLE, "D"),
    "anywhere": (style.ORANGE, "v"),
}  # fmt: skip
_SIGNED = FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if round(value, 9) else "0")


@dataclass(frozen=True, slots=True)
class Panel:
    """One filler by one metric in one folder: a curve for each placement."""

    folder: StoredDose
    metric: str
    filler: str
    curves: dict[str, list[DosePoint]]
    tests: dict[str, DoseTest]

    @property
    def by(self) -> float:
        return 100.0 if METRICS_OF_CHANGE[self.metric].share else 1.0


def dose_of(given: Drawing) -> Picture:
    """Fillers side by side, metrics and folders below each other."""
    folders = [StoredDose.open(path) for path in given.paths]
    rows = [row for folder in folders for row in _panels(folder)]
    across = max(map(len, rows))
    width = PAGE_WIDTH * (0.6, 0.9, 1.0)[min(across, 3) - 1]
    figure = style.new_figure(width, 1.9 * len(rows) + 1.3)
    grid = figure.add_gridspec(len(rows), across)
    for deep, row in enumerate(rows):
        first: Axes | None = None
        for number, panel in enumerate(row):
            axes = figure.add_subplot(grid[deep, number], sharey=first)
            first = first or axes
            for placement in panel.curves:
                _put_curve(axes, panel, placement)
            last = deep == len(rows) - 1
            _finish(axes, panel, named=number == 0, last=last, whose=len(folders) > 1)
    seen = [name for name in PLACES if any(name in panel.curves for row in rows for panel in row)]
    handles: list[Any] = [
        Line2D([], [], label=name, color=PLACES[name][0], marker=PLACES[name][1], markersize=4) for name in seen
    ]
    handles.append(Patch(facecolor="0.5", alpha=0.2, label="95 % band, all lengths at once"))
    shape: dict[str, Any] = {"color": "0.3", "linestyle": "none"}
    handles.append(Line2D([], [], marker="*", markersize=8, label="best on dev items: Δ of the others", **shape))
    figure.legend(handles=handles, loc="outside upper center", ncols=2, handlelength=1.8, columnspacing=1.4)
    note = _note(folders, rows)
    style.add_caption(figure, style.shown(note))
    title = "Change of log-probabilities by length of the filler: " + "; ".join(one.title for one in folders)
    return Picture(figure, style.shown(title), style.shown(f"{_READING} {note}"))


_READING = (
    "Each line is a filler at one place of the prompt: its mean change against no filler, by length. Bands hold for all lengths of a line at once. "
    "The best length chosen by looking is only worth what it does to items it was not chosen on."
)


def _panels(folder: StoredDose) -> list[list[Panel]]:
    points, tests = folder.points(), folder.tests()
    fillers = list(dict.fromkeys(row.filler for row in points))
    rows: list[list[Panel]] = []
    for metric in shown_metrics({row.metric for row in points}):
        rows.append([])
        for filler in fillers:
            curves: dict[str, list[DosePoint]] = {}
            for row in points:
                if (row.metric, row.filler) == (metric, filler):
                    curves.setdefault(row.placement, []).append(row)
            mine = {row.placement: row for row in tests if (row.metric, row.filler) == (metric, filler)}
            rows[-1].append(Panel(folder, metric, filler, curves, mine))
    return rows


def _x(length: int) -> float:
    return math.log2(1 + length)


def _put_curve(axes: Axes, panel: Panel, placement: str) -> None:
    points = sorted(panel.curves[placement], key=lambda row: row.length)
    colour, marker = PLACES[placement]
    x = [0.0, *(_x(row.length) for row in points)]
    axes.plot(x, [0.0, *(panel.by * row.delta for row in points)], color=colour, zorder=2)
    known = [row for row in points if row.lo_all is not None and row.hi_all is not None]
    if known:
        low, high = ([0.0, *(panel.by * (getattr(row, name) or 0.0) for row in known)] for name in ("lo_all", "hi_all"))
        along = [0.0, *(_x(row.length) for row in known)]
        axes.fill_between(along, low, high, color=colour, alpha=0.16, linewidth=0, zorder=1)
    for row in points:
        sure = row.p_adjusted is not None and row.p_adjusted <= ALPHA
        axes.plot(
            _x(row.length), panel.by * row.delta, marker=marker, markersize=3.6, color=colour, markerfacecolor=colour if sure else "white",
            linestyle="none", zorder=3,
        )  # fmt: skip
    test = panel.tests.get(placement)
    if test is not None and test.chosen and test.test_delta is not None:
        at = _x(test.best_length) + 0.18
        if test.test_lo is not None and test.test_hi is not None:
            axes.vlines(at, panel.by * test.test_lo, panel.by * test.test_hi, color="0.3", linewidth=1.0, zorder=4)
        axes.plot(at, panel.by * test.test_delta, marker="*", markersize=8, color="0.3", linestyle="none", zorder=5)


def _finish(axes: Axes, panel: Panel, *, named: bool, last: bool, whose: bool) -> None:
    axes.axhline(0, color="0.25", linewidth=0.6, zorder=1)
    lengths = sorted({row.length for curve in panel.curves.values() for row in curve})
    shown = [0, *lengths] if len(lengths) <= 9 else [0, *lengths[::-2][::-1]]
    axes.set_xticks([_x(length) for length in shown], [f"{length:,}" for length in shown])
    axes.set_xlim(-0.2, _x(lengths[-1]) + 0.4)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))
    axes.yaxis.set_major_formatter(_SIGNED)
    axes.tick_params(axis="y", labelleft=named)
    axes.set_ylabel(f"{panel.metric}, Δ {unit_of_change(panel.metric)}" if named else "")
    axes.set_xlabel("filler (tokens)" if last else "")
    title = f"{panel.folder.title}, {panel.filler}" if whose else panel.filler
    axes.set_title(style.cut(style.shown(title), 3.0), fontsize=style.NORMAL)


def _note(folders: Sequence[StoredDose], rows: Sequence[Sequence[Panel]]) -> str:
    points = [point for row in rows for panel in row for curve in panel.curves.values() for point in curve]
    counts = sorted({point.n for point in points})
    items = "–".join(dict.fromkeys((f"{counts[0]:,}", f"{counts[-1]:,}")))
    marks = "Filled marks: differs from none, p ≤ 0.05 after Holm over the lengths of a line."
    if any(point.skewed for point in points):
        marks += " A few items decide some of the points, whose bands are then too narrow."
    said = PUBLISHED_DOSES[0].upper() + PUBLISHED_DOSES[1:]
    return f"{'; '.join(folder.title for folder in folders)}: n = {items} items. {marks} {said}."
