"""The specification curve: one comparison in every specification, sorted by its change, above a matrix of the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.figure_kinds import Drawing
from mless.results.nats import METRICS_OF_CHANGE, signed, unit_of_change
from mless.results.placed import shown_metrics
from mless.results.specification_rows import Specification, SpecificationTest
from mless.results.specified import SETTINGS, StoredMultiverse, tally, varied
from mless.results.wording import p_words

#: Inches of the upper panel, and of a row of the matrix.
CURVE, ROW = 1.7, 0.145
#: Verdicts differ in colour and in mark.
LOOKS: dict[str, tuple[str, str]] = {
    "rises": (style.BLUE, "^"), "drops": (style.VERMILLION, "v"), "equivalent": (style.GREEN, "s"), "undecided": ("#8C8C8C", "o"),
}  # fmt: skip
_SIGNED = FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if round(value, 9) else "0")


@dataclass(frozen=True, slots=True)
class Panel:
    """One condition by one metric in one folder, its specifications sorted by Δ."""

    folder: StoredMultiverse
    rows: list[Specification]
    test: SpecificationTest
    settings: Mapping[str, list[str]]

    @property
    def by(self) -> float:
        return 100.0 if METRICS_OF_CHANGE[self.test.metric].share else 1.0


def specification_of(given: Drawing) -> Picture:
    """A curve with its matrix for each condition and metric: metrics side by side, conditions and folders below each other."""
    folders = [StoredMultiverse.open(path) for path in given.paths]
    bands = [band for folder in folders for band in _panels(folder)]
    across = max(map(len, bands))
    lines = [max(sum(map(len, panel.settings.values())) + len(panel.settings) for panel in band) for band in bands]
    height = sum(CURVE + ROW * max(n, 1) + 0.75 for n in lines) + 0.95
    width = PAGE_WIDTH * (0.72 if across == 1 else 1.0)
    figure = style.new_figure(width, height)
    ratios = [part for n in lines for part in (CURVE, ROW * max(n, 1))]
    grid = figure.add_gridspec(2 * len(bands), across, height_ratios=ratios)
    room = (width - 0.6) / across - 1.2
    for deep, band in enumerate(bands):
        for number, panel in enumerate(band):
            upper = figure.add_subplot(grid[2 * deep, number])
            lower = figure.add_subplot(grid[2 * deep + 1, number], sharex=upper)
            size = _mark_size(len(panel.rows), room)
            _put_curve(upper, panel, size)
            _title(upper, panel, folders=len(folders))
            _put_matrix(lower, panel, size)
    handles = [
        Line2D([], [], label=word, color=colour, marker=mark, markersize=4, linewidth=1.0)
        for word, (colour, mark) in LOOKS.items()
        if any(row.verdict == word for band in bands for panel in band for row in panel.rows)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handlelength=1.6, columnspacing=1.4)
    note = _note(bands)
    style.add_caption(figure, style.shown(note))
    title = "One comparison in many specifications: " + "; ".join(folder.title for folder in folders)
    return Picture(figure, style.shown(title), style.shown(f"{_READING} {note}"))


_READING = (
    "Each mark of the upper panels is one specification: the mean change against none, with its 95 % interval over items, sorted. The dots below it say "
    "which value of each setting it has. A setting that decides has its dots of one value on one side."
)


def _panels(folder: StoredMultiverse) -> list[list[Panel]]:
    rows, tests = folder.specifications(), folder.tests()
    metrics = shown_metrics({test.metric for test in tests})
    bands: list[list[Panel]] = []
    for condition in dict.fromkeys(test.condition for test in tests):
        bands.append([])
        for test in sorted(tests, key=lambda test: metrics.index(test.metric) if test.metric in metrics else -1):
            if test.condition != condition or test.metric not in metrics:
                continue
            own = [
                row for row in rows if (row.condition, row.metric) == (condition, test.metric) and row.delta is not None
            ]
            own.sort(key=lambda row: (row.delta, row.specification))
            in_order = sorted(own, key=lambda row: row.specification)
            bands[-1].append(Panel(folder, own, test, varied(in_order)))
    return bands


def _mark_size(count: int, room: float) -> float:
    """Points: marks do not touch, and are neither huge nor gone."""
    return min(4.5, max(1.2, 0.8 * 72 * room / max(count, 1)))


def _put_curve(axes: Axes, panel: Panel, size: float) -> None:
    axes.axhline(0, color="0.25", linewidth=0.6, zorder=1)
    for at, row in enumerate(panel.rows):
        colour, mark = LOOKS[row.verdict or "undecided"]
        if row.lo is not None and row.hi is not None:
            axes.vlines(
                at,
                panel.by * row.lo,
                panel.by * row.hi,
                color=colour,
                linewidth=min(1.2, size / 3),
                alpha=0.55,
                zorder=2,
            )
        axes.plot(
            at, panel.by * (row.delta or 0.0), marker=mark, markersize=size, color=colour, linestyle="none", zorder=3
        )
    median = panel.by * panel.test.median
    axes.axhline(median, color="0.35", linewidth=0.7, linestyle=(0, (3, 2)), zorder=1)
    axes.annotate(
        "median", (1.0, median), xycoords=("axes fraction", "data"), xytext=(2, 0), textcoords="offset points", va="center", fontsize=6,
        color="0.4",
    )  # fmt: skip
    axes.set_xlim(-0.7, len(panel.rows) - 0.3)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))
    axes.yaxis.set_major_formatter(_SIGNED)
    axes.set_ylabel(f"Δ {unit_of_change(panel.test.metric)}")


def _title(axes: Axes, panel: Panel, *, folders: int) -> None:
    whose = f"{panel.folder.title}, " if folders > 1 else ""
    test = panel.test
    axes.set_title(
        "\n".join(
            style.shown(text)
            for text in (
                f"{whose}{test.condition}: {test.metric}",
                f"rises in {test.rises} of {test.specifications}, drops in {test.drops}",
            )
        ),
        fontsize=style.NORMAL,
    )


def _put_matrix(axes: Axes, panel: Panel, size: float) -> None:
    """A row for each value of each setting that varies; the setting's name above its values."""
    places: list[float] = []
    names: list[str] = []
    y = 0.0
    for setting, values in panel.settings.items():
        places.append(y)
        names.append(SETTINGS[setting])
        for value in values:
            y += 1
            places.append(y)
            names.append(f"{style.cut(style.shown(value), 0.95)}  ")
            axes.axhline(y, color="0.93", linewidth=0.5, zorder=1)
            for at, row in enumerate(panel.rows):
                if getattr(row, setting) == value:
                    colour = LOOKS[row.verdict or "undecided"][0]
                    axes.plot(at, y, marker="s", markersize=min(size, 3.4), color=colour, linestyle="none", zorder=2)
        y += 1
    axes.set_ylim(max(y, 1) - 0.5, -0.6)
    axes.set_yticks(places, names, fontsize=6.2)
    headings = {SETTINGS[setting] for setting in panel.settings}
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        if name in headings:
            label.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)
    if not panel.settings:
        axes.set_yticks([])
        axes.annotate(
            "one specification", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", fontsize=SMALL
        )
    axes.set_xlabel(f"{len(panel.rows)} specifications, sorted by Δ" if len(panel.rows) > 1 else "", fontsize=SMALL)


def _note(bands: Sequence[Sequence[Panel]]) -> str:
    said: list[str] = []
    for band in bands:
        for panel in band:
            test = panel.test
            words = f"{test.condition}, {test.metric}: {tally(test)}; median Δ {signed(test.median, test.metric)} ({_p(test.p_median)})"
            if max(test.rises, test.drops):
                words += f"; so many one way: {_p(test.p_either)}"
            said.append(words + (f"; {test.left_out} left out" if test.left_out else ""))
    panels = [panel for band in bands for panel in band]
    counts = sorted({row.n for panel in panels for row in panel.rows if row.n})
    items = "–".join(dict.fromkeys((f"{counts[0]:,}", f"{counts[-1]:,}"))) if counts else "0"
    return (
        f"n = {items} items. {'. '.join(said)}. {_fixed(panels)}Colours: each specification by itself at p ≤ 0.05. Specifications share their items; "
        "the p here flip the signs of items in all of them at once."
    )


def _p(p: float | None) -> str:
    return "not tested" if p is None or math.isnan(p) else p_words(p)


def _fixed(panels: Sequence[Panel]) -> str:
    """The settings that have one value in all specifications."""
    found: dict[str, Any] = {}
    for name, words in SETTINGS.items():
        values = {getattr(row, name) for panel in panels for row in panel.rows} - {None}
        if len(values) == 1:
            found[words] = values.pop()
    return f"The same in all: {', '.join(f'{words} {value}' for words, value in found.items())}. " if found else ""
