"""How far ARM's parameters matter (fig12): paired Δ over (c, p1), over fractions, and over p_min and p_max."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from mless.errors import BadFolder
from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results import wording
from mless.results.answers import ALPHA, StoredTuning
from mless.results.figure_kinds import Drawing
from mless.results.schemas import Tried
from mless.values import ArmSettings, arm_of, named_layers

#: Purple is worse and orange better; both are told apart by every kind of colour vision, and grey is what was not tried.
COLOURS = "PuOr_r"
#: Cells side by side; panels for which there is no room go below.
ACROSS = 8
#: Signs of a title that fit above one cell.
SIGNS = 14


@dataclass(frozen=True, slots=True)
class Grid:
    """One panel: settings that differ in two parameters only, by their values (down, across)."""

    title: str
    down: str
    across: str
    cells: dict[tuple[float, float], Tried]

    @property
    def values(self) -> tuple[list[float], list[float]]:
        return sorted({down for down, _ in self.cells}), sorted({across for _, across in self.cells})


def sensitivity_of(given: Drawing) -> Picture:
    return draw_sensitivity(given.paths)


def draw_sensitivity(paths: Sequence[Path]) -> Picture:
    """Δ of every setting tried, on the dev items of the last rung it was in; the chosen one framed."""
    folders = [StoredTuning.open(Path(path)) for path in paths]
    grids = [grids_of(folder) for folder in folders]
    lines = [(folder, line) for folder, found in zip(folders, grids, strict=True) for line in _lines(found)]
    wide = max(4, *(sum(map(_width, found)) for _, found in lines))
    heights = [
        0.8
        + 0.15 * max(1 + _title(grid).count("\n") for grid in found)
        + 0.4 * max(2, *(len(grid.values[0]) for grid in found))
        for _, found in lines
    ]
    figure = style.new_figure(PAGE_WIDTH * min(1.0, 0.35 + 0.11 * wide), sum(heights) + 0.95)
    rows = figure.add_gridspec(len(lines), 1, height_ratios=heights)
    reach = max(0.01, *(abs(row.delta) for found in grids for one in found for row in one.cells.values()))
    norm = Normalize(-125 * reach, 125 * reach)  # the ends of the colour map are too dark to tell apart
    for number, (folder, found) in enumerate(lines):
        # cells are as wide in a short line as in a long one
        ratios = [_width(grid) for grid in found]
        rest = wide - sum(ratios)
        places = rows[number].subgridspec(
            1, len(ratios) + (rest > 0), width_ratios=[*ratios, *([rest] if rest else [])]
        )
        panels = [figure.add_subplot(places[0, column]) for column in range(len(found))]
        for panel, one in zip(panels, found, strict=True):
            _put_grid(panel, one, folder.chosen, norm)
        last = max(folder.rows(), key=lambda row: row.rung)
        bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=panels[-1], fraction=0.12, pad=0.06, aspect=14)
        bar.set_label(
            f"Δ points against none\n({wording.percent(last.none)} % of {last.n:,} dev items)", fontsize=SMALL
        )
        if len(folders) > 1 and number == [one for one, _ in lines].index(folder):
            whose = style.shown(f"{folder.label} on {folder.task}")
            panels[0].set_title(f"{whose}\n{panels[0].get_title()}", fontsize=style.NORMAL)
    figure.legend(handles=_handles(grids), loc="outside upper center", ncols=3, handlelength=1.3, columnspacing=1.6)
    note = " ".join(_words(folder) for folder in folders)
    style.add_caption(figure, note)
    title = "Accuracy over ARM's parameters: " + "; ".join(f"{one.label} on {one.task}" for one in folders)
    reading = (
        "Each cell is a setting of ARM: its accuracy minus none's on the same dev items, in points, and on how many items. A cell is chosen for "
        "being the highest, so its own number flatters it; what it is worth is its Δ on the test items, in the caption."
    )
    return Picture(figure, style.shown(title), style.shown(f"{reading} {note}"))


def _width(grid: Grid) -> int:
    return max(2, len(grid.values[1]))  # a single column still has a title and an axis to show


def _title(grid: Grid) -> str:
    return textwrap.fill(style.shown(grid.title), SIGNS * _width(grid))


def _lines(grids: Sequence[Grid]) -> list[list[Grid]]:
    found: list[list[Grid]] = []
    for grid in grids:
        if found and sum(map(_width, [*found[-1], grid])) <= ACROSS:
            found[-1].append(grid)
        else:
            found.append([grid])
    return found


def grids_of(folder: StoredTuning) -> list[Grid]:
    """(c, p1) and (fraction, p1) for each choice of layers, rule, scope and seed, then (p_min, p_max). Every setting is in one of them.

    A single cell is no grid, so it has a panel only where no other shows it.
    """
    tried = folder.tried()
    by_c = [row for row in tried if row.c is not None]
    usual = Counter(row.bounds for row in by_c).most_common(1)[0][0] if by_c else None
    kinds = {row.condition: _Kind.of(folder, row) for row in tried}
    every = list(dict.fromkeys(kinds.values()))
    found: list[Grid] = []
    for kind in every:
        where = kind.words()
        here = [row for row in tried if kinds[row.condition] == kind]
        of_c = {(row.c, row.p1): row for row in here if row.c is not None and row.bounds == usual}
        of_fraction = {(row.fraction, row.p1): row for row in here if row.fraction is not None}
        found.append(Grid(f"c and p1, {where}", "c", "p1 (percentile)", of_c))
        found.append(Grid(f"fraction and p1, {where}", "fraction", "p1 (percentile)", of_fraction))
    for at in dict.fromkeys((row.c, row.p1, kinds[row.condition]) for row in by_c):
        c, p1, kind = at
        bounds = {row.bounds: row for row in by_c if (row.c, row.p1, kinds[row.condition]) == at}
        where = "" if len(every) == 1 else f", {kind.words()}"
        found.append(Grid(f"bounds of the share, at c {c:g}, p1 {p1:g}{where}", "p_min", "p_max", bounds))
    shown = [grid for grid in found if grid.cells]
    if not shown:
        raise BadFolder(f"{folder.path}: tuning.parquet holds no setting to show; run the same command again")
    seen = {row.condition for grid in shown if len(grid.cells) > 1 for row in grid.cells.values()}
    kept: list[Grid] = []
    for grid in shown:
        names = {row.condition for row in grid.cells.values()}
        if len(names) > 1 or not names <= seen:
            kept.append(grid)
            seen |= names
    return kept


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the settings of a panel have in common beside its two parameters."""

    layers: tuple[int, ...]
    rule: str
    scope: str
    seed: int

    @classmethod
    def of(cls, folder: StoredTuning, row: Tried) -> _Kind:
        arm: ArmSettings = arm_of(folder.about["conditions"][row.condition]["arm"])
        return cls(arm.layers, arm.rule, arm.scope, arm.seed)

    def words(self) -> str:
        """The layers, and what else is not usual."""
        usual = ArmSettings(c=0.0)
        parts = [named_layers(self.layers)]
        for name in ("rule", "scope", "seed"):
            if getattr(self, name) != getattr(usual, name):
                parts.append(f"{name} {getattr(self, name)}")
        return ", ".join(parts)


def _put_grid(axes: Axes, grid: Grid, chosen: str, norm: Normalize) -> None:
    down, across = grid.values
    colours = mpl.colormaps[COLOURS]
    for y, low in enumerate(down):
        for x, high in enumerate(across):
            row = grid.cells.get((low, high))
            shade: Any = "0.93" if row is None else colours(norm(100 * row.delta))
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=shade, edgecolor="white", linewidth=1.2))
            if row is None:
                continue
            ink = "white" if _lightness(shade) < 0.5 else "black"
            sure = row.p_adjusted is not None and row.p_adjusted <= ALPHA
            axes.text(
                x, y + 0.08, f"{wording.points(row.delta)}{'*' if sure else ''}", ha="center", va="bottom", color=ink,
                fontsize=style.TITLE, fontweight="bold" if sure else "normal",
            )  # fmt: skip
            axes.text(x, y - 0.1, f"n = {row.n:,}", ha="center", va="top", color=ink, fontsize=6)
            if row.condition == chosen:
                # on the cell's edge, between it and the white lines, where it is seen on any colour
                frame = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=2.2)
                axes.add_patch(frame).set(zorder=3, clip_on=False)
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(-0.5, len(down) - 0.5)
    axes.set_xticks(range(len(across)), [f"{value:g}" for value in across])
    axes.set_yticks(range(len(down)), [f"{value:g}" for value in down])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel(grid.across)
    axes.set_ylabel(grid.down)
    axes.set_title(_title(grid), fontsize=style.NORMAL)


def _lightness(colour: Any) -> float:
    red, green, blue = colour[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _handles(grids: Sequence[Sequence[Grid]]) -> list[Any]:
    cells = [row for found in grids for grid in found for row in grid.cells.values()]
    handles: list[Any] = [Rectangle((0, 0), 1, 1, fill=False, edgecolor="black", linewidth=1.8, label="chosen")]
    if any(row.p_adjusted is not None and row.p_adjusted <= ALPHA for row in cells):
        marker: dict[str, Any] = {"color": "black", "linestyle": "none", "marker": "*", "markersize": 6}
        handles.append(Line2D([], [], label="differs from none after Holm over all settings", **marker))
    if any(len(grid.cells) < len(grid.values[0]) * len(grid.values[1]) for found in grids for grid in found):
        handles.append(Rectangle((0, 0), 1, 1, facecolor="0.93", label="not tried"))
    return handles


def _words(folder: StoredTuning) -> str:
    """What was chosen, out of how many, and what it is worth where nothing was chosen."""
    test, tuning = folder.on_test(), folder.tuning
    best = folder.best()
    share = f"c {best.c:g}" if best.c is not None else f"fraction {best.fraction:g}"
    p = wording.p_value(wording.p_of(test))
    sizes = [str(n) for n in dict.fromkeys(row.n for row in folder.rows())]
    how = f"halving, {', '.join(sizes)} dev items" if len(sizes) > 1 else f"grid, {sizes[0]} dev items"
    return (
        f"{style.shown(folder.label)} on {style.shown(folder.task)}: {tuning['tried']} settings ({how}). Chosen: {share}, p1 {best.p1:g}, "
        f"{_Kind.of(folder, best).words()}; on the {test.n:,} test items Δ {wording.points(test.delta)} points "
        f"{wording.points_interval(test)}, p {p if p.startswith('<') else f'= {p}'} (one comparison): {test.verdict}."
    )
