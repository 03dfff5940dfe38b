"""Pictures of received attention by position: heads, layers, conditions, versus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D

from mless.figures import style
from mless.figures.curves import Curve, Measured, measure
from mless.figures.panels import ChosenPanel, choose_panels
from mless.figures.style import BLUE, ORANGE, PAGE_WIDTH, SMALL, VERMILLION, Picture
from mless.results.along import FEWEST
from mless.results.figure_kinds import Drawing
from mless.results.reading import StoredResults
from mless.values import QuerySet

#: Panels side by side; more go below.
ACROSS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """One curve's condition, its name in the legend, its colour."""

    condition: str
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class Plot:
    """One pair of axes. Plots of one column share the y-axis."""

    column: int
    measured: Measured
    layer: int
    head: int
    lines: tuple[Line, ...]
    curves: tuple[Curve, ...]
    aligned: bool
    title: tuple[str, str]
    filler_label: str | None = None


def draw_panels(given: Drawing) -> Picture:
    """One kind of curves, from folders of attention."""
    folders = [StoredResults.open(path) for path in given.paths]
    chosen = choose_panels(given.spec, folders, layer=given.layer, heads=given.heads)
    return draw_curves(
        given.spec.kind,
        chosen,
        given.spec.conditions,
        item=given.item,
        queries=given.queries,
        omit_first=given.omit_first,
    )


def draw_curves(
    kind: str,
    panels: Sequence[ChosenPanel],
    conditions: Sequence[str],
    *,
    item: str | None,
    queries: QuerySet,
    omit_first: bool | None,
) -> Picture:
    """One of the published kinds of curve pictures, from the panels' folders."""
    plots = _measured_plots(kind, panels, conditions, item=item, queries=queries, omit_first=omit_first)
    if item is None:
        columns = len({plot.column for plot in plots})
        across = min(1 if kind == "conditions" and len(panels) == 1 else ACROSS, columns)
        width = PAGE_WIDTH if across > 1 else PAGE_WIDTH * 0.62
        figure = style.new_figure(width, grid_height(plots, across))
        _fill_grid(figure, plots, across, width)
    else:
        figure = _draw_stack(plots)
    _add_legend(figure, plots)
    note = _caption(kind, plots, queries)
    style.add_caption(figure, note)
    return Picture(figure, curves_title(panels), style.shown(f"{READING[kind]} {note}"))


def curves_title(panels: Sequence[ChosenPanel]) -> str:
    """What the curves are of."""
    title = "; ".join(dict.fromkeys(f"{p.folder.label} Layer {p.layer} Head {p.head}" for p in panels))
    return style.shown(f"Received attention: {title}")


def plan_curves(
    panels: Sequence[ChosenPanel], conditions: Sequence[str], *, queries: QuerySet, omit_first: bool | None
) -> list[Plot]:
    """The plots of a `conditions` picture, to be put into a part of another one."""
    return _measured_plots("conditions", panels, conditions, item=None, queries=queries, omit_first=omit_first)


def put_curves(place: FigureBase, plots: Sequence[Plot], width: float, queries: QuerySet) -> str:
    """Draw them one below the other into a part of a figure, `width` inches wide; the caption is given back."""
    _fill_grid(place, plots, 1, width)
    _add_legend(place, plots)
    return _caption("conditions", plots, queries)


def _measured_plots(
    kind: str,
    panels: Sequence[ChosenPanel],
    conditions: Sequence[str],
    *,
    item: str | None,
    queries: QuerySet,
    omit_first: bool | None,
) -> list[Plot]:
    read: dict[int, Measured] = {}
    for panel in panels:
        if id(panel.folder) not in read:
            heads = list(dict.fromkeys((other.layer, other.head) for other in panels if other.folder is panel.folder))
            read[id(panel.folder)] = measure(panel.folder, conditions, heads, queries, item=item, omit_first=omit_first)
    return [
        plot
        for column, panel in enumerate(panels)
        for plot in _plots_of(kind, column, panel, read[id(panel.folder)], conditions)
    ]


READING = {
    "heads": "Attention each token receives from later tokens, one column per head. Top: the original tokens only, without and with "
    "filler, aligned by dropping the filler; where the second line lies below the first, the filler drew attention away. Bottom: the "
    "full sequence with filler, its span shaded.",
    "layers": "Attention each original token receives in one head of successive layers, without and with filler, aligned by dropping the "
    "filler. The published claim is a drop in layer 1 and no regular change from layer 2 on.",
    "conditions": "Attention each token receives in one head. Top: the original tokens only, aligned by dropping the filler. Bottom: the "
    "full sequence, the filler's span shaded. If only the first filler lowers the curve, the effect is special to it.",
    "versus": "Attention each token receives along the full sequence, with meaningless filler and with a random sentence of the same "
    "length in its place, the span shaded. Where the lines agree outside the span, any inserted text would have done the same.",
}


def _plots_of(kind: str, column: int, panel: ChosenPanel, measured: Measured, conditions: Sequence[str]) -> list[Plot]:
    about = measured.folder.conditions
    filled = [name for name in conditions if about[name].get("kind") != "none"]
    where = f"Layer {panel.layer} Head {panel.head}"
    title = (measured.folder.label, where)

    def plot(lines: Sequence[Line], *, aligned: bool, title: tuple[str, str], filler: str | None = None) -> Plot:
        curves = tuple(measured.curve(line.condition, panel.layer, panel.head, aligned=aligned) for line in lines)
        return Plot(column, measured, panel.layer, panel.head, tuple(lines), curves, aligned, title, filler)

    if kind == "heads":
        spare = [VERMILLION, style.GREEN, ORANGE, *style.OTHERS]
        lines = [
            Line(name, f"w/ {style.long(name)}", spare[filled.index(name) % len(spare)])
            if name in filled
            else Line(name, f"w/o {style.long(filled[0]) if filled else 'filler'}", BLUE)
            for name in conditions
        ]
        full = [line for line in lines if line.condition in filled]
        label = style.long(filled[0]) if len(filled) == 1 else "Inserted tokens"
        return [
            plot(lines, aligned=True, title=title),
            *([plot(full, aligned=False, title=("", ""), filler=label)] if full else []),
        ]
    if kind == "layers":
        spare = [ORANGE, style.GREEN, VERMILLION, *style.OTHERS]
        lines = [
            Line(name, style.short(name), spare[filled.index(name) % len(spare)] if name in filled else BLUE)
            for name in conditions
        ]
        return [plot(lines, aligned=True, title=title)]
    if kind == "versus":
        spare = [BLUE, ORANGE, style.GREEN, VERMILLION, *style.OTHERS]
        lines = [Line(name, style.long(name), spare[i % len(spare)]) for i, name in enumerate(filled)]
        return [plot(lines, aligned=False, title=title, filler="Inserted tokens")]
    lines = [Line(name, style.short(name), style.colour(name, tuple(conditions))) for name in conditions]
    full = [line for line in lines if line.condition in filled]
    named = ("", f"Average attention on Head {panel.head}")
    return [
        plot(lines, aligned=True, title=named),
        *([plot(full, aligned=False, title=named, filler="Inserted tokens")] if full else []),
    ]


def _in_columns(plots: Sequence[Plot]) -> list[list[Plot]]:
    return [list(group) for _, group in groupby(plots, lambda plot: plot.column)]


def grid_height(plots: Sequence[Plot], across: int) -> float:
    """Inches that the plots take with `across` columns side by side."""
    columns = _in_columns(plots)
    return 0.75 + -(-len(columns) // across) * max(map(len, columns)) * 1.65


def _fill_grid(figure: FigureBase, plots: Sequence[Plot], across: int, width: float) -> None:
    """Columns side by side, each column's plots below one another; after `across` columns a new block of rows."""
    columns = _in_columns(plots)
    deep = max(len(column) for column in columns)
    blocks = -(-len(columns) // across)
    grid = figure.add_gridspec(blocks * deep, across)
    room = width / across - 0.47  # what tick labels leave of a column
    titles = style.fit_titles([plot.title for plot in plots], room)
    for number, column in enumerate(columns):
        block, place = divmod(number, across)
        top = _top(column)
        for row, plot in enumerate(column):
            axes = figure.add_subplot(grid[block * deep + row, place])
            _draw_plot(axes, plot, top)
            style.nice_ticks(axes, x=6 if across > 2 else 8)
            _decorate(axes, plot, titles[plot.title], room)
            axes.set_xlabel("Token Position")
            if place == 0:
                axes.set_ylabel("Average Attention Weight", fontsize=SMALL)


def _draw_stack(plots: Sequence[Plot]) -> Figure:
    """One prompt: every plot takes the full width, with the tokens' text on its axis."""
    labels = [plot.measured.tokens(plot.lines[0].condition, aligned=plot.aligned) for plot in plots]
    longest = max(max(len(curve.at) for curve in plot.curves) for plot in plots)
    width = style.labelled_width(longest)
    figure = style.new_figure(width, 0.7 + 2.05 * len(plots))
    grid = figure.add_gridspec(len(plots), 1)
    titles = style.fit_titles([plot.title for plot in plots], width - 0.7)
    for row, (plot, tokens) in enumerate(zip(plots, labels, strict=True)):
        axes = figure.add_subplot(grid[row, 0])
        _draw_plot(axes, plot, _top([other for other in plots if other.column == plot.column]))
        style.nice_ticks(axes)
        _decorate(axes, plot, titles[plot.title], width - 0.7)
        at = _label_places(plot, tokens, room=width - 0.7)
        axes.set_xticks(at, [style.shown_token(tokens[i]) for i in at], rotation=90, fontsize=SMALL)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("Attention Weight")
    return figure


def _label_places(plot: Plot, tokens: dict[int, str], room: float) -> list[int]:
    """Positions whose token is written out: the highest spikes first."""
    heights: dict[int, float] = {}
    shown = 1
    for curve in plot.curves:
        shown = max(shown, len(curve.at))
        for position, value in zip(curve.at.tolist(), np.nan_to_num(curve.mean).tolist(), strict=True):
            heights[position] = max(heights.get(position, 0.0), value)
    return style.label_places({at: height for at, height in heights.items() if at in tokens}, shown, room)


def _top(plots: Sequence[Plot]) -> float:
    return max((curve.top for plot in plots for curve in plot.curves), default=0.0) * 1.06 or 1.0


def _draw_plot(axes: Axes, plot: Plot, top: float) -> None:
    first, last = np.inf, -np.inf
    for line, curve in zip(plot.lines, plot.curves, strict=True):
        axes.fill_between(curve.at, 0, curve.mean, color=line.colour, alpha=0.07, linewidth=0)
        if np.isfinite(curve.lo).any():
            axes.fill_between(curve.at, curve.lo, curve.hi, color=line.colour, alpha=0.2, linewidth=0)
        axes.plot(curve.at, curve.mean, color=line.colour, linewidth=0.9, solid_joinstyle="round")
        if curve.at.size:
            first, last = min(first, float(curve.at[0])), max(last, float(curve.at[-1]))
    if np.isfinite(first):
        axes.set_xlim(first - 0.5, last + 0.5)
    axes.set_ylim(0, top)


def _decorate(axes: Axes, plot: Plot, title: style.Title, width: float) -> None:
    place = None if plot.filler_label is None else plot.measured.filler([line.condition for line in plot.lines])
    if any(plot.title):
        style.set_title(axes, title, pad=15.0 if place else 5.0)
    if place is None or plot.filler_label is None:
        return
    left, right = axes.get_xlim()
    for start, stop in place.runs:
        axes.axvspan(
            max(start - 0.5, left),
            min(stop - 0.5, right),
            facecolor="0.5",
            alpha=0.07 if place.varies else 0.16,
            linewidth=0,
            zorder=0.5,
        )
    label = plot.filler_label
    if place.varies:
        label += " (varies)"
    elif place.share < 1:
        label += " (most items)"
    middle = (min(start for start, _ in place.runs) + max(stop for _, stop in place.runs)) / 2 - 0.5
    half = style.text_width(label, SMALL) / 2 / width * (right - left)
    middle = min(max(middle, left + half), right - half) if 2 * half < right - left else (left + right) / 2
    axes.annotate(
        label,
        (middle, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=SMALL,
        color="0.3",
    )


def _add_legend(figure: FigureBase, plots: Sequence[Plot]) -> None:
    lines = list(dict.fromkeys((line.label, line.colour) for plot in plots for line in plot.lines))
    handles = [Line2D([], [], color=colour, linewidth=1.6, label=label) for label, colour in lines]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(len(handles), 4), handlelength=1.6, columnspacing=1.6
    )


def _caption(kind: str, plots: Sequence[Plot], queries: QuerySet) -> str:
    measured = list({id(plot.measured): plot.measured for plot in plots}.values())
    said: list[str] = []
    if kind == "conditions":
        said.append(
            "; ".join(dict.fromkeys(f"{style.shown(p.measured.folder.label)}, layer {p.layer}" for p in plots)) + "."
        )
    if measured[0].one:
        names = [found.items[0] for found in measured]
        said.append("One prompt: " + ", ".join(dict.fromkeys(f"item {style.shown(name)}" for name in names)) + ".")
    else:
        counts = list(dict.fromkeys(str(len(found.items)) for found in measured))
        fewest = list(dict.fromkeys(str(found.fewest) for found in measured))
        half = " (half of them)" if any(found.fewest < FEWEST for found in measured) else ""
        banded = any(len(found.items) > 1 for found in measured)
        said.append(
            f"Mean of n = {' / '.join(counts)} items{' with its 95 % band over items' if banded else ''}; "
            f"n(t) = {' / '.join(_items_along(plots, found) for found in measured)} items, "
            f"cut where fewer than {' / '.join(fewest)}{half} remain."
        )
    said.append(
        "Queries: original tokens only." if queries == "original" else "Queries: every later token, filler included."
    )
    if any(found.first for found in measured):
        who = (
            ""
            if all(found.first for found in measured)
            else " of " + ", ".join(style.shown(f.folder.label) for f in measured if f.first)
        )
        said.append(f"First token{who} left out (attention sink).")
    return " ".join(said)


def _items_along(plots: Sequence[Plot], measured: Measured) -> str:
    """``24 down to 10``: the number of items behind the drawn means, from most to fewest."""
    drawn = [curve.n[np.isfinite(curve.mean)] for p in plots if p.measured is measured for curve in p.curves]
    counts = np.concatenate(drawn) if drawn else np.zeros(0, dtype=int)
    if not counts.size:
        return "0"
    most, fewest = int(counts.max()), int(counts.min())
    return str(most) if most == fewest else f"{most} down to {fewest}"
