"""Pictures of a whole model: the map of retained shares, their course over the layers, and where attention goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mless.errors import BadFolder
from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.figure_kinds import Drawing
from mless.results.reading import StoredResults
from mless.stats import Margins
from mless.values import MASS_NAMES, QuerySet, format_numbers

#: A retained share inside these margins counts as 1; outside, it *drops* or *rises*.
MARGINS = (Margins().drop, Margins().rise)


def map_of(given: Drawing) -> Picture:
    return draw_map(_opened(given), given.spec.conditions, given.queries)


def retained_of(given: Drawing) -> Picture:
    return draw_retained(_opened(given), given.spec.conditions, given.queries)


def mass_of(given: Drawing) -> Picture:
    return draw_mass(_opened(given), given.spec.conditions, given.layer or 1)


def _opened(given: Drawing) -> list[StoredResults]:
    return [StoredResults.open(path) for path in given.paths]


# Over 60 lines: one picture from top to bottom.
def draw_map(folders: Sequence[StoredResults], conditions: Sequence[str], queries: QuerySet) -> Picture:
    """Layer × head, one panel per condition with filler, one row of panels per folder; in ε where the folders have it, else in λ."""
    found = [_by_condition(folder, conditions, queries) for folder in folders]
    by_exponent = _all_have_exponents(found)
    left_out: list[str] = []
    if by_exponent:
        # A condition that inserts nothing has no ε.
        left_out = list(dict.fromkeys(name for own in found for name, rows in own if not _has_exponents(rows)))
        found = [[(name, rows) for name, rows in own if _has_exponents(rows)] for own in found]
    column = "epsilon" if by_exponent else "retained"
    grids = [
        [_grid(folder, rows, name, column) for name, rows in own] for folder, own in zip(folders, found, strict=True)
    ]
    names = [[name for name, _ in own] for own in found]
    across = max(len(row) for row in grids)
    scale = _Exponents.of(grids) if by_exponent else _Shares.of(grids)

    heights = [min(6.6, max(1.2, max(len(grid.layers) for grid in row) * 0.15)) for row in grids]
    widest = max(len(grid.heads) for row in grids for grid in row)
    width = min(PAGE_WIDTH, max(3.4, 1.3 + across * max(1.5, widest * 0.15 + 0.55)))
    figure = style.new_figure(width, sum(heights) + 0.85 + 0.35 * len(grids))
    places = figure.add_gridspec(len(grids), across, height_ratios=heights)
    named = len(folders) > 1 or across == 1
    titles = style.fit_titles(
        [
            (folder.label if named else "", style.short(name))
            for folder, row in zip(folders, names, strict=True)
            for name in row
        ],
        (width - 1.0) / across - 0.15,
    )
    image = None
    every: list[Axes] = []
    for row, folder in enumerate(folders):
        for at, grid in enumerate(grids[row]):
            axes = figure.add_subplot(places[row, at])
            every.append(axes)
            cell = ((width - 1.0) / across / len(grid.heads), heights[row] / len(grid.layers))
            image = _draw_cells(axes, grid, scale, cell)
            style.set_title(axes, titles[folder.label if named else "", style.short(names[row][at])])
            axes.set_xlabel("Head")
            if at == 0:
                axes.set_ylabel("Layer")
            elif grid.layers == grids[row][0].layers:
                axes.tick_params(labelleft=False)
    assert image is not None
    bar = figure.colorbar(image, ax=every, extend="both", shrink=min(1.0, 2.4 / sum(heights)), aspect=16, pad=0.02)
    ticks = scale.ticks()
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.set_label(scale.label)
    bar.outline.set_linewidth(0.5)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    note = f"{scale.note} Dot: λ undecided at 95 %."
    if any(not np.isfinite(grid.values).all() for row in grids for grid in row):
        note += " Grey: not measured."
    if left_out:
        note += f" Without dilution, so without ε: {style.shown(', '.join(left_out))}."
    if not named:
        note = f"{style.shown(folders[0].label)}. {note}"
    style.add_caption(figure, note + _queries_note(queries))
    reading = (
        "One cell per attention head, layer 1 at the top. Orange: the question's tokens receive less attention with filler than without; "
        "purple: more; white: no change."
    )
    return Picture(
        figure,
        style.shown(f"{scale.label} by head: " + ", ".join(f.label for f in folders)),
        style.shown(f"{reading} {note}"),
    )


def draw_retained(folders: Sequence[StoredResults], conditions: Sequence[str], queries: QuerySet) -> Picture:
    """The layers' retained share and dilution exponent with their intervals; of several folders the exponent alone, because λ follows the prompts' length."""
    found = [
        [(name, [r for r in rows if r["head"] == 0]) for name, rows in _by_condition(folder, conditions, queries)]
        for folder in folders
    ]
    with_exponents = _all_have_exponents(found)
    panels: list[tuple[int, bool]] = []
    for row in range(len(folders)):
        if len(folders) == 1 or not with_exponents:
            panels.append((row, False))
        if with_exponents:
            panels.append((row, True))
    heights = [1.9 if exponent and len(folders) == 1 else 2.5 for _, exponent in panels]
    figure = style.new_figure(PAGE_WIDTH * (0.75 if len(folders) == 1 else 1.0), 0.75 + sum(heights))
    places = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    drawn: dict[str, str] = {}
    compared: list[Axes] = []
    every = [sorted({int(r["layer"]) for _, rows in own for r in rows}) for own in found]
    for place, (row, exponent) in enumerate(panels):
        axes = figure.add_subplot(places[place, 0])
        colours = {name: style.colour(name, tuple(conditions)) for name, _ in found[row]}
        drawn |= {style.short(name): colour for name, colour in colours.items()}
        (_put_exponents if exponent else _put_shares)(axes, found[row], colours, every[row])
        layers = every[row]
        axes.set_xlim(min(layers, default=1) - 0.6, max(layers, default=1) + 0.6)
        ticks = style.numbers_to_label(layers, 16)
        axes.set_xticks([layers[i] for i in ticks], [str(layers[i]) for i in ticks])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("Layer")
        if exponent:
            compared.append(axes)
        if place == 0 or len(folders) > 1:
            label = folders[row].label
            style.set_title(axes, style.fit_titles([(label, "")], 4.0)[label, ""])
    # Exponents are there to be compared between folders, so they share their axis.
    reaches = [axes.get_ylim() for axes in compared]
    for axes in compared:
        axes.set_ylim(min(low for low, _ in reaches), max(high for _, high in reaches))
    handles: list[Artist] = [
        Line2D([], [], color=colour, marker="o", markersize=3, label=name) for name, colour in drawn.items()
    ]
    handles.append(Line2D([], [], color="0.35", linestyle=(0, (4, 2)), label="uniform dilution"))
    if any(not exponent for _, exponent in panels):
        handles.append(Patch(facecolor="0.5", alpha=0.2, label=f"{MARGINS[0]:g}–{MARGINS[1]:g}"))
    figure.legend(handles=handles, loc="outside upper center", ncols=5, handlelength=1.8, columnspacing=1.4)
    note = "Received attention of the question's tokens, with filler against without; mean over a layer's heads, bars: 95 % intervals over items."
    if with_exponents:
        note += f" {EXPONENT_NOTE}"
    note += " Dashed: evenly spread attention." + _queries_note(queries)
    if len(folders) > 1 and with_exponents:
        note += " λ is not shown: it depends on the prompts' length."
    style.add_caption(figure, note)
    reading = ""
    if any(not exponent for _, exponent in panels):
        reading += "A layer whose whole bar lies below the grey margin drops, above it rises. "
    reading += "How far a layer departs from the dashed line is the model's own doing."
    name = "Retained share" if any(not exponent for _, exponent in panels) else "Dilution exponent"
    return Picture(figure, style.shown(f"{name} by layer: " + ", ".join(f.label for f in folders)), f"{reading} {note}")


#: What ε is, in a caption's few words.
EXPONENT_NOTE = "ε = log λ / log λ of an even spread: 0 nothing lost, 1 as a head that spreads evenly."

_Rows = Sequence[tuple[str, Sequence[dict[str, Any]]]]


def _put_shares(axes: Axes, found: _Rows, colours: dict[str, str], every: Sequence[int]) -> None:
    """λ by layer, uniform dilution dashed, the margins shaded."""
    axes.axhspan(*MARGINS, facecolor="0.5", alpha=0.15, linewidth=0, zorder=0.5)
    axes.axhline(1.0, color="0.4", linewidth=0.6, zorder=1)
    same = len(found) > 1 and _same_uniform([rows for _, rows in found])
    for number, (name, rows) in enumerate(found):
        at, shift = _put_points(
            axes, rows, ("retained", "lo", "hi"), colours[name], _shift(number, found, every), every
        )
        if same and number:
            continue  # fillers of one length dilute alike: one grey line instead of one on top of the other
        uniform = np.array([_number(r["uniform"]) for r in rows])
        dashes: dict[str, Any] = {
            "color": "0.35" if same else colours[name],
            "linestyle": (0, (4, 2)),
            "linewidth": 0.9,
        }
        if len(every) == 1:
            axes.hlines(uniform, at - shift - 0.1, at - shift + 0.1, **dashes)
        else:
            axes.plot(at - shift, uniform, **dashes)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), high)
    axes.set_ylabel("Retained share λ")


def _put_exponents(axes: Axes, found: _Rows, colours: dict[str, str], every: Sequence[int]) -> None:
    """ε by layer; 0 is nothing lost, dashed 1 an even spread."""
    axes.axhline(0.0, color="0.4", linewidth=0.6, zorder=1)
    axes.axhline(1.0, color="0.35", linestyle=(0, (4, 2)), linewidth=0.9, zorder=1)
    for number, (name, rows) in enumerate(found):
        columns = ("epsilon", "epsilon_lo", "epsilon_hi")
        _put_points(axes, rows, columns, colours[name], _shift(number, found, every), every)
    axes.set_ylabel("Dilution exponent ε")


def _shift(number: int, found: _Rows, every: Sequence[int]) -> float:
    # Side by side, so that intervals of one layer do not hide one another.
    return (number - (len(found) - 1) / 2) * (0.16 if len(every) <= 40 else 0.0)


def _put_points(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    columns: tuple[str, str, str],
    colour: str,
    shift: float,
    every: Sequence[int],
) -> tuple[np.ndarray, float]:
    """Values with their intervals, and their places with the offset from their layer."""
    at = np.array([float(r["layer"]) for r in rows]) + shift
    value, lo, hi = (np.array([_number(r[key]) for r in rows]) for key in columns)
    axes.vlines(at, lo, hi, color=colour, linewidth=1.1, alpha=0.75)
    axes.plot(at, value, color=colour, marker="o", markersize=2.6 if len(every) <= 40 else 1.6, linewidth=0.9)
    return at, shift


def _has_exponents(rows: Sequence[dict[str, Any]]) -> bool:
    return any(row["epsilon"] is not None for row in rows)


def _all_have_exponents(found: Sequence[_Rows]) -> bool:
    """Whether every folder has a condition with ε; one made before there was one does not."""
    return all(any(_has_exponents(rows) for _, rows in own) for own in found)


def draw_mass(folders: Sequence[StoredResults], conditions: Sequence[str], layer: int) -> Picture:
    """Stacked bars: the spans an original token's attention goes to, one bar per condition."""
    found: list[dict[str, dict[str, float]]] = []
    for folder in folders:
        run = folder.run_of(conditions)
        folder.need_layer(layer, folder.captured())
        found.append(folder.mass(run, layer))
        missing = [name for name in run if name not in found[-1]]
        if missing:
            raise BadFolder(
                f"{folder.path}: no mass stored for {', '.join(missing)} in layer {layer}; run the study again"
            )
    heights = [0.45 + 0.34 * len(mass) for mass in found]
    figure = style.new_figure(PAGE_WIDTH * 0.8, 0.95 + sum(heights))
    places = figure.add_gridspec(len(folders), 1, height_ratios=heights)
    used = [name for name in MASS_NAMES if any(bar.get(name, 0) > 0 for mass in found for bar in mass.values())]
    for row, (folder, mass) in enumerate(zip(folders, found, strict=True)):
        axes = figure.add_subplot(places[row, 0])
        left = np.zeros(len(mass))
        at = np.arange(len(mass))
        for name in used:
            share = np.array([bar.get(name, 0.0) for bar in mass.values()])
            colour = style.SPAN_COLOURS[name]
            axes.barh(at, share, left=left, height=0.72, color=colour, edgecolor="white", linewidth=0.8)
            for place, (start, part) in enumerate(zip(left, share, strict=True)):
                if part >= 0.045:
                    dark = name in ("question", "sink")
                    axes.text(
                        start + part / 2, place, f"{100 * part:.0f} %", ha="center", va="center_baseline", fontsize=SMALL,
                        color="white" if dark else "black",
                    )  # fmt: skip
            left += share
        axes.set_yticks(at, [style.short(name) for name in mass], fontsize=style.NORMAL)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        style.set_title(axes, style.fit_titles([(folder.label, f"Layer {layer}")], 4.0)[folder.label, f"Layer {layer}"])
    handles = [Patch(facecolor=style.SPAN_COLOURS[name], label=name) for name in used]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=len(handles),
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.3,
    )
    note = "Where an original token's attention goes (its own position included): mean over original tokens, heads and items."
    style.add_caption(figure, note)
    reading = "One bar per condition; what the filler takes is missing from the other spans."
    title = f"Attention mass by span, layer {layer}: " + ", ".join(f.label for f in folders)
    return Picture(figure, style.shown(title), f"{reading} {note}")


class _Grid:
    """Shares or exponents as layer × head, and which heads are undecided."""

    def __init__(self, layers: list[int], heads: list[int]) -> None:
        self.layers = layers
        self.heads = heads
        self.values: Float[np.ndarray, "layers heads"] = np.full((len(layers), len(heads)), np.nan)
        self.undecided: Bool[np.ndarray, "layers heads"] = np.zeros((len(layers), len(heads)), dtype=bool)


def _grid(folder: StoredResults, rows: Sequence[dict[str, Any]], condition: str, column: str) -> _Grid:
    rows = [row for row in rows if row["head"] > 0]
    if not rows:
        raise BadFolder(
            f"{folder.path}: retained.parquet holds no heads of condition {condition!r}; run the study again"
        )
    highest = max(int(folder.model.get("heads") or 0), max(int(row["head"]) for row in rows))
    grid = _Grid(sorted({int(row["layer"]) for row in rows}), list(range(1, highest + 1)))
    for row in rows:
        at = grid.layers.index(int(row["layer"])), int(row["head"]) - 1
        grid.values[at] = _number(row[column])
        grid.undecided[at] = row["verdict"] == "undecided"
    return grid


@dataclass(frozen=True, slots=True)
class _Shares:
    """Colours of λ: by its log, so that halving and doubling are equally strong."""

    limit: float
    label: str = "Retained share"
    note: str = "Retained share of the question's received attention, with filler against without; 1 = unchanged."

    @classmethod
    def of(cls, grids: Sequence[Sequence[_Grid]]) -> _Shares:
        values = np.concatenate([grid.values.ravel() for row in grids for grid in row])
        logs = np.abs(np.log2(values[np.isfinite(values) & (values > 0)]))
        return cls(_end_of_scale(logs, math.log2(1.5)))

    def placed(self, values: Float[np.ndarray, "layers heads"]) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log2(values)

    def ticks(self) -> dict[float, str]:
        return {math.log2(x): f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in _ratio_ticks(self.limit)}


@dataclass(frozen=True, slots=True)
class _Exponents:
    """Colours of ε, turned round: what is lost is drawn on the side where a small λ is."""

    limit: float
    label: str = "Dilution exponent ε"
    note: str = (
        "ε = log λ / log λ of an even spread: 0 = the question lost nothing to the filler, 1 = as much as in a head that spreads evenly, "
        "below 0 = it gained."
    )

    @classmethod
    def of(cls, grids: Sequence[Sequence[_Grid]]) -> _Exponents:
        values = np.concatenate([grid.values.ravel() for row in grids for grid in row])
        return cls(_end_of_scale(np.abs(values[np.isfinite(values)]), 1.0))

    def placed(self, values: Float[np.ndarray, "layers heads"]) -> np.ndarray:
        return -values

    def ticks(self) -> dict[float, str]:
        step = next(
            step
            for step in (0.5, 1.0, 2.0, 5.0, 10.0, 10.0 ** math.ceil(math.log10(self.limit)))
            if self.limit / step < 4
        )
        count = int(self.limit / step)
        return {-x * step: f"{x * step:g}".replace("-", "−") for x in range(-count, count + 1)}


def _end_of_scale(sizes: Float[np.ndarray, " values"], least: float) -> float:
    # The scale ends at the 99th percentile, marked by arrows, because a few extreme heads would pale all others. It has a minimum width, so
    # that noise does not look like an effect.
    return max(float(np.quantile(sizes, 0.99)) if sizes.size else 0.0, least)


def _draw_cells(axes: Axes, grid: _Grid, scale: _Shares | _Exponents, cell: tuple[float, float]) -> Any:
    placed = np.ma.masked_invalid(scale.placed(grid.values))
    axes.set_facecolor("0.82")
    across, down = len(grid.heads), len(grid.layers)
    image = axes.pcolormesh(
        np.arange(across + 1) - 0.5, np.arange(down + 1) - 0.5, placed, cmap="PuOr", norm=Normalize(-scale.limit, scale.limit),
        edgecolors="white" if min(cell) > 0.09 else "none", linewidth=0.4, rasterized=across * down > 3000,
    )  # fmt: skip
    y, x = np.nonzero(grid.undecided)
    # Sized by the cell, so that the dots stay marks and never cover the colour.
    size = min(2.6, max(0.5, min(cell) * 72 * 0.28))
    axes.plot(
        x,
        y,
        linestyle="none",
        marker="o",
        markersize=size,
        markeredgewidth=0,
        color="0.25",
        rasterized=across * down > 3000,
    )
    heads = style.numbers_to_label(grid.heads, max(2, int(cell[0] * across / 0.2)))
    layers = style.numbers_to_label(grid.layers, max(2, int(cell[1] * down / 0.14)))
    axes.set_xticks(heads, [str(grid.heads[i]) for i in heads])
    axes.set_yticks(layers, [str(grid.layers[i]) for i in layers])
    axes.set_xlim(-0.5, across - 0.5)
    axes.set_ylim(down - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(length=1.5)
    return image


def _ratio_ticks(limit: float) -> list[float]:
    """Round ratios and their reciprocals, far enough apart on a log scale that ends at ±`limit` (log2)."""
    chosen: list[float] = []
    for ratio in (1024, 256, 64, 16, 8, 4, 3, 2, 1.5, 1.2, 1.1, 1.05):
        place = math.log2(ratio)
        if limit / 4 <= place <= limit and (not chosen or math.log2(chosen[-1]) - place >= limit / 4):
            chosen.append(float(ratio))
    return [*(1 / ratio for ratio in chosen), 1.0, *reversed(chosen)]


def _by_condition(
    folder: StoredResults, conditions: Sequence[str], queries: QuerySet
) -> list[tuple[str, list[dict[str, Any]]]]:
    """The conditions with filler that were run, each with its rows of retained.parquet sorted by layer and head."""
    wanted = [name for name in folder.run_of(conditions) if folder.conditions[name].get("kind") != "none"]
    rows = sorted(folder.retained(queries), key=lambda row: (row["layer"], row["head"]))
    found = [(name, [row for row in rows if row["condition"] == name]) for name in wanted]
    if not wanted or any(not rows for _, rows in found):
        empty = ", ".join(repr(name) for name, rows in found if not rows) or "a condition with filler"
        held = format_numbers(sorted({int(row["layer"]) for row in rows})) or "none"
        raise BadFolder(
            f"{folder.path}: retained.parquet holds no rows of {empty} with queries {queries!r} (layers it holds: {held}); "
            f"run the study again with that condition"
        )
    return found


def _same_uniform(conditions: Sequence[Sequence[dict[str, Any]]]) -> bool:
    first, *others = [{row["layer"]: _number(row["uniform"]) for row in rows} for rows in conditions]
    return all(
        other.keys() == first.keys() and all(math.isclose(other[layer], first[layer], rel_tol=1e-3) for layer in first)
        for other in others
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _queries_note(queries: QuerySet) -> str:
    return "" if queries == "original" else " Queries: every later token."
