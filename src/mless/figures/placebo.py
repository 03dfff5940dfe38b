"""Named fillers among arbitrary edits: how the edits' effects spread, and where each filler lies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.conditions import EDITS
from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.figure_kinds import Drawing
from mless.results.nats import METRICS_OF_CHANGE, signed, unit_of_change
from mless.results.placed import StoredPlacebo, ordinal, shown_metrics
from mless.results.schemas import PlacedFiller
from mless.results.wording import p_value

#: Inches of a row, and of a dot with the room around it.
ROW, DOT = 0.24, 0.07
#: Kinds of edits differ in colour and in mark.
MARKS: tuple[tuple[str, str], ...] = (
    (style.BLUE, "o"), (style.PURPLE, "s"), (style.SKY, "^"), (style.BLACK, "D"), ("#7A5C00", "v"), (style.YELLOW, "P"), ("#8C8C8C", "X"), ("white", "*"),
)  # fmt: skip
_SIGNED = FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if round(value, 9) else "0")


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric of one folder: its edits as (kind, Δ), its fillers."""

    folder: StoredPlacebo
    metric: str
    edits: list[tuple[str, float]]
    fillers: list[PlacedFiller]

    @property
    def by(self) -> float:
        return 100.0 if METRICS_OF_CHANGE[self.metric].share else 1.0

    def reach(self) -> tuple[float, float]:
        """The smallest and the largest number to be shown."""
        ends = [row.delta_lo for row in self.fillers] + [row.delta_hi for row in self.fillers]
        ends += [row.delta for row in self.fillers] + [delta for _, delta in self.edits]
        ends += [self.fillers[0].edits_lo, self.fillers[0].edits_hi, 0.0]
        known = [self.by * end for end in ends if end is not None and math.isfinite(end)]
        room = 0.05 * (max(known) - min(known)) or 1.0
        return min(known) - room, max(known) + room


def placebo_of(given: Drawing) -> Picture:
    """A panel for each metric; a row of panels for each folder."""
    folders = [StoredPlacebo.open(path) for path in given.paths]
    panels = [_panels(folder) for folder in folders]
    across = max(map(len, panels))
    width = PAGE_WIDTH * (0.66, 0.86, 1.0)[min(across, 3) - 1]
    room = (width - 1.3) / across - 0.75  # inches of a panel: row names on the left, percentiles on the right
    stacks = [[_stacked(panel, room) for panel in found] for found in panels]
    tall = [max(max(at for *_, at in stack) for stack in found) * DOT / ROW for found in stacks]
    rows = [top + len(found[0].fillers) + 2.2 for top, found in zip(tall, panels, strict=True)]
    figure = style.new_figure(width, ROW * sum(rows) + 0.75 * len(folders) + 1.1)
    grid = figure.add_gridspec(len(folders), across, height_ratios=rows)
    kinds = {kind: MARKS[number % len(MARKS)] for number, kind in enumerate(EDITS)}
    for deep, found in enumerate(panels):
        for number, panel in enumerate(found):
            axes = figure.add_subplot(grid[deep, number])
            _put_edits(axes, panel, stacks[deep][number], kinds)
            _put_fillers(axes, panel)
            _finish(axes, panel, top=tall[deep] + 1.2, named=number == 0, whose=len(folders) > 1 and number == 0)
    seen = list(dict.fromkeys(kind for found in panels for panel in found for kind, _ in panel.edits))
    handles = [_handle(EDITS[kind].what, *kinds[kind]) for kind in EDITS if kind in seen]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(len(handles), 4), handletextpad=0.2, columnspacing=1.2
    )
    note = _note(panels)
    style.add_caption(figure, style.shown(note))
    title = "Fillers among arbitrary edits: " + "; ".join(one.title for one in folders)
    return Picture(figure, style.shown(title), style.shown(f"{_READING} {note}"))


_READING = (
    "Each dot is an arbitrary edit of the prompt: its mean change against no filler. Below are the mean of the edits and the named fillers, with "
    "95 % intervals. A filler that does what any edit does lies among the dots."
)


def _panels(folder: StoredPlacebo) -> list[Panel]:
    placed, edits = folder.placed(), folder.edits()
    return [
        Panel(
            folder,
            metric,
            [(str(row["kind"]), float(row["delta"])) for row in edits if row["metric"] == metric],
            [row for row in placed if row.metric == metric],
        )
        for metric in shown_metrics({row.metric for row in placed})
    ]


def _stacked(panel: Panel, room: float) -> list[tuple[str, float, int]]:
    """Every edit's kind, Δ and place in its stack, from 1. Dots that would overlap lie on each other."""
    low, high = panel.reach()
    bins = max(1, int(room / DOT))
    filled: Counter[int] = Counter()
    found: list[tuple[str, float, int]] = []
    for kind, delta in sorted(panel.edits, key=lambda one: one[1]):
        place = int((panel.by * delta - low) / (high - low) * bins)
        filled[place] += 1
        found.append((kind, low + (place + 0.5) * (high - low) / bins, filled[place]))
    return found


def _put_edits(
    axes: Axes, panel: Panel, stack: Sequence[tuple[str, float, int]], kinds: Mapping[str, tuple[str, str]]
) -> None:
    for kind, at, number in stack:
        axes.plot(at, -0.3 - number * DOT / ROW, **_look(*kinds[kind]))
    first = panel.fillers[0]
    if first.edits_lo is not None and first.edits_hi is not None:
        axes.hlines(0.5, panel.by * first.edits_lo, panel.by * first.edits_hi, color="0.35", linewidth=1.3)
    if first.edits_mean is not None:
        axes.plot(panel.by * first.edits_mean, 0.5, marker="D", markersize=4.0, color="0.35", linestyle="none")
        axes.axvline(panel.by * first.edits_mean, color="0.35", linewidth=0.7, linestyle=(0, (3, 2)), zorder=1)


def _put_fillers(axes: Axes, panel: Panel) -> None:
    names = tuple(row.condition for row in panel.fillers)
    for number, row in enumerate(panel.fillers):
        y, colour = number + 1.5, style.colour(row.condition, names)
        if row.delta_lo is not None and row.delta_hi is not None:
            axes.hlines(y, panel.by * row.delta_lo, panel.by * row.delta_hi, color=colour, linewidth=1.3)
        axes.axvline(panel.by * row.delta, color=colour, linewidth=0.8, alpha=0.45, zorder=1)
        apart = row.verdict in ("rises", "drops")
        face = colour if apart else "white"
        axes.plot(
            panel.by * row.delta, y, marker="o", markersize=4.8, color=colour, markerfacecolor=face, markeredgewidth=1.1, linestyle="none", zorder=3
        )  # fmt: skip
        axes.annotate(
            f"{ordinal(row.percentile)}, {p_value(row.p)}", (1.0, y), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
            va="center_baseline", fontsize=SMALL, color="0.3",
        )  # fmt: skip


def _finish(axes: Axes, panel: Panel, *, top: float, named: bool, whose: bool) -> None:
    axes.axvline(0, color="0.25", linewidth=0.6, zorder=1)
    axes.axhline(0, color="0.8", linewidth=0.6, zorder=1)
    axes.set_xlim(*panel.reach())
    axes.set_ylim(len(panel.fillers) + 1.1, -top)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=2))
    axes.xaxis.set_major_formatter(_SIGNED)
    axes.set_xlabel(f"Δ {unit_of_change(panel.metric)} against none")
    places = [-0.5 * top, 0.5, *(number + 1.5 for number in range(len(panel.fillers)))]
    names = [f"{len(panel.edits)} edits", "their mean", *(style.shown(row.condition) for row in panel.fillers)]
    axes.set_yticks(places, [style.cut(name, 1.1) for name in names] if named else [""] * len(names))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    lines = [panel.folder.title] if whose else []
    lines += [panel.metric, METRICS_OF_CHANGE[panel.metric].words]
    axes.set_title("\n".join(map(style.shown, lines)), fontsize=style.NORMAL)
    axes.annotate(
        "percentile, p", (1.0, 0.5), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points", va="center_baseline",
        fontsize=6, color="0.5",
    )  # fmt: skip


def _look(colour: str, marker: str) -> dict[str, Any]:
    size = 4.6 if marker in "*PX" else 3.6
    return {
        "marker": marker, "markersize": size, "color": colour, "markeredgewidth": 0.4, "markeredgecolor": "0.2", "linestyle": "none", "zorder": 2,
    }  # fmt: skip


def _handle(label: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], label=label, **_look(colour, marker))


def _note(panels: Sequence[Sequence[Panel]]) -> str:
    apart = any(row.verdict in ("rises", "drops") for found in panels for panel in found for row in panel.fillers)
    marks = "Filled: told apart from an arbitrary edit." if apart else "Hollow: not told apart from an arbitrary edit."
    how = "Fillers: 95 % intervals over items; the edits' mean: over items and edits."
    test = "p = (1 + edits at least as far from the edits' mean) / (edits + 1)."
    return " ".join([*map(_said, panels), how, marks, test])


def _said(panels: Sequence[Panel]) -> str:
    first = panels[0].fillers[0]
    spreads = [
        f"{panel.metric} {signed(panel.fillers[0].edits_sd, panel.metric).lstrip('+')} {unit_of_change(panel.metric)}"
        for panel in panels
    ]
    counts = sorted({row.n for panel in panels for row in panel.fillers})
    items = "–".join(dict.fromkeys((f"{counts[0]:,}", f"{counts[-1]:,}")))
    return f"{panels[0].folder.title}: n = {items} items × {first.edits} edits; between-edit sd {', '.join(spreads)}."
