"""What a filler's effect is made of: who has to see it (ladder), through which part it acts (map), and the published chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.cause_rows import DIRECTIONS, LINKS, STEPS, CauseCell, CauseLink, LadderStep
from mless.results.caused import (
    ALPHA,
    CHANGE_WORDS,
    DIRECTION_WORDS,
    LINK_WORDS,
    PART_WORDS,
    STEP_WORDS,
    StoredCause,
    shown_at,
)
from mless.results.figure_kinds import Drawing
from mless.results.nats import METRICS_OF_CHANGE, around, signed, unit_of_change
from mless.results.placed import shown_metrics

#: Inches of a row with a name.
ROW = 0.2
_SIGNED = FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if abs(value) > 5e-10 else "0")
_PERCENT = FuncFormatter(lambda value, _: _percent(value))
_NO_SHARE = "the whole effect's interval holds 0, so no share is known"


def _percent(share: float) -> str:
    """``0.7`` → ``70 %``."""
    text = f"{100 * share:.0f}"
    return f"{'0' if text == '-0' else text} %".replace("-", "−")


def _opened(given: Drawing) -> list[StoredCause]:
    return [StoredCause.open(path) for path in given.paths]


def _by(metric: str) -> float:
    return 100.0 if METRICS_OF_CHANGE[metric].share else 1.0


def _of_whom(folders: Sequence[StoredCause], rows: Iterable[LadderStep | CauseCell | CauseLink]) -> str:
    """``SmolLM2 on gsm8k, filler mless, n = 40 items``."""
    rows = list(rows)
    counts = sorted({row.n for row in rows})
    fillers = ", ".join(dict.fromkeys(row.condition for row in rows))
    items = "–".join(dict.fromkeys(f"{count:,}" for count in (counts[0], counts[-1])))
    titles = "; ".join(style.cut(style.shown(folder.title), 3.4) for folder in folders)
    return f"{titles}, filler {fillers}: n = {items} items."


def _finished(figure: Figure, what: str, folders: Sequence[StoredCause], reading: str, note: str) -> Picture:
    """The picture with its caption, and in words."""
    style.add_caption(figure, style.shown(note).replace(" %", "\u00a0%"))  # a number and its sign stay on one line
    title = f"{what}: " + "; ".join(one.title for one in folders)
    return Picture(figure, style.shown(title), style.shown(f"{reading} {note}"))


def _interval(axes: Axes, y: float, ends: tuple[float | None, float | None], by: float, colour: str) -> None:
    lo, hi = ends
    if lo is not None and hi is not None:
        axes.hlines(y, by * lo, by * hi, color=colour, linewidth=1.3, zorder=2)


def _beside(axes: Axes, y: float, text: str) -> None:
    """A number right of the panel, in its row."""
    axes.annotate(
        text, (1.0, y), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points", va="center_baseline", fontsize=SMALL,
        color="0.3",
    )  # fmt: skip


def _titled(axes: Axes, folder: StoredCause, rest: str, *, whose: bool, room: float) -> None:
    lines = [style.cut(style.shown(folder.title), room), rest] if whose else [rest]
    axes.set_title("\n".join(lines), fontsize=style.NORMAL)


# ---- ladder ----------------------------------------------------------------------------------------------------------

_LADDER_READING = (
    "Above, the mean change against no filler at each rung: positions moved only, then the filler there and seen by nobody, by the question, by the "
    "answer, by all. Below, the five changes whose sum is the last rung."
)
_RUNGS, _SUM = "change against none", "seen by all is the sum of"


def _mark(colour: str, marker: str = "o", *, filled: bool = True) -> dict[str, Any]:
    return {
        "marker": marker, "markersize": 4.0 if marker == "D" else 4.8, "color": colour, "markerfacecolor": colour if filled else "white",
        "markeredgewidth": 1.1, "linestyle": "none", "zorder": 3,
    }  # fmt: skip


def ladder_of(given: Drawing) -> Picture:
    """Metrics side by side, folders below each other."""
    folders = _opened(given)
    found: list[list[tuple[str, list[LadderStep]]]] = []
    for folder in folders:
        steps = folder.steps()
        found.append(
            [
                (metric, [row for row in steps if row.metric == metric])
                for metric in shown_metrics({row.metric for row in steps})
            ]
        )
    across = max(map(len, found))
    width = PAGE_WIDTH * (0.66, 0.9, 1.0)[min(across, 3) - 1]
    lines = len(STEP_WORDS) - 1 + len(CHANGE_WORDS) + 2
    figure = style.new_figure(width, (ROW * lines + 0.75) * len(folders) + 1.0)
    grid = figure.add_gridspec(len(folders), across)
    for deep, (folder, panels) in enumerate(zip(folders, found, strict=True)):
        for number, (metric, rows) in enumerate(panels):
            axes = figure.add_subplot(grid[deep, number])
            _put_ladder(axes, metric, rows, named=number == 0)
            _titled(axes, folder, metric, whose=len(folders) > 1 and number == 0, room=width / across)
    handles = [
        Line2D([], [], label="mean change against none", **_mark("0.35", "D")),
        Line2D([], [], label="a change of the sum, p ≤ 0.05", **_mark(style.VERMILLION)),
        Line2D([], [], label="not shown to differ from 0", **_mark(style.VERMILLION, filled=False)),
    ]
    # One metric leaves no room for three side by side.
    figure.legend(
        handles=handles, loc="outside upper center", ncols=3 if across > 1 else 1, handletextpad=0.2, columnspacing=1.2
    )
    every = [row for panels in found for _, rows in panels for row in rows]
    note = (
        f"{_of_whom(folders, every)} Mean changes with 95 % intervals over items. Filled: p ≤ 0.05 after Holm over the five changes of a metric; "
        "hollow: not. "
    )
    if any(row.skewed for row in every):
        note += "A few items decide some of the means, whose intervals are then too narrow. "
    note += "A hidden filler's weight goes to the other tokens, so hiding it is a change too."
    return _finished(figure, "The ladder of who sees the filler", folders, _LADDER_READING, note)


def _put_ladder(axes: Axes, metric: str, rows: Sequence[LadderStep], *, named: bool) -> None:
    by, names = _by(metric), list[tuple[float, str]]()
    rungs = {row.step: row for row in rows if row.against == "none"}
    changes = {row.step: row for row in rows if row.adds_up}
    y = 0.0
    for heading, words, own in (
        (_RUNGS, {step: STEP_WORDS[step] for step in STEPS if step != "interaction"}, rungs),
        (_SUM, CHANGE_WORDS, changes),
    ):
        names.append((y, heading))
        axes.axhline(y, color="0.85", linewidth=0.6, zorder=1)
        for step, said in words.items():
            y += 1
            names.append((y, said))
            if (row := own.get(step)) is None:
                continue
            rung = own is rungs
            colour = "0.35" if rung else style.VERMILLION
            _interval(axes, y, (row.lo, row.hi), by, colour)
            filled = rung or shown_at(row.p_adjusted)
            axes.plot(by * row.delta, y, **_mark(colour, "D" if rung else "o", filled=filled))
            _beside(axes, y, signed(row.delta, metric))
        y += 1
    axes.axvline(0, color="0.25", linewidth=0.6, zorder=1)
    axes.set_ylim(y - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_yticks([place for place, _ in names], [said for _, said in names] if named else [""] * len(names))
    if named:
        for label in axes.get_yticklabels():
            if label.get_text() in (_RUNGS, _SUM):
                label.set_color("0.45")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=2))
    axes.xaxis.set_major_formatter(_SIGNED)
    axes.set_xlabel(f"Δ {unit_of_change(metric)}")


# ---- map -------------------------------------------------------------------------------------------------------------

_MAP_READING = (
    "One cell per layer and part. Put in: the run without filler takes the part's value from the run with it; the share of the effect that this "
    "gives. Taken out: the run with filler takes the value from the run without it; the share that is lost. Purple: the filler's way; orange: the other way."
)
#: Panels of more layers lie below each other.
_BESIDE = 20


@dataclass(frozen=True, slots=True)
class Panel:
    """One direction of one metric of one folder, as rows of (part, head) × layers."""

    folder: StoredCause
    metric: str
    direction: str
    layers: list[int]
    rows: list[tuple[str, int | None]]
    cells: dict[tuple[str, int | None, int], CauseCell]

    @property
    def names(self) -> list[str]:
        return [PART_WORDS[part] + ("" if head is None else f", head {head}") for part, head in self.rows]

    def shares(self) -> Float[np.ndarray, "rows layers"]:
        return self._grid(lambda cell: math.nan if cell.share is None else cell.share, math.nan)

    def blank(self) -> Bool[np.ndarray, "rows layers"]:
        """Measured, but no share is known."""
        return self._grid(lambda cell: cell.share is None, False)

    def sure(self) -> Bool[np.ndarray, "rows layers"]:
        return self._grid(lambda cell: shown_at(cell.p_adjusted), False)

    def _grid(self, of: Callable[[CauseCell], Any], nothing: Any) -> np.ndarray:
        found = ((self.cells.get((*row, layer)) for layer in self.layers) for row in self.rows)
        return np.array([[nothing if cell is None else of(cell) for cell in row] for row in found])


def cause_of(given: Drawing) -> Picture:
    """A row of panels for each metric of each folder: put in, taken out. Those of many layers lie below each other."""
    folders = _opened(given)
    pairs = [pair for folder in folders for pair in _pairs(folder)]
    panels = [panel for pair in pairs for panel in pair]
    stacked = max(len(panel.layers) for panel in panels) > _BESIDE
    across = 1 if stacked else max(map(len, pairs))
    rows = [[panel] for panel in panels] if stacked else pairs
    heights = [max(0.5, min(7.5, 0.17 * max(len(panel.rows) for panel in row))) for row in rows]
    wide = max(len(panel.layers) for panel in panels) * 0.3
    width = min(PAGE_WIDTH, max(4.6 if len(folders) == 1 else 6.2, 1.7 + across * max(1.2, wide)))
    tall = sum(heights) + 0.52 * len(rows) + 1.7
    figure = style.new_figure(width, tall)
    grid = figure.add_gridspec(len(rows), across, height_ratios=heights)
    known = np.concatenate([panel.shares().ravel() for panel in panels])
    limit = 1.0 if (np.abs(known[np.isfinite(known)]) > 0.5).any() else 0.5
    room = (width - 1.5) / across - 0.1
    drawn: list[tuple[Axes, Any]] = []
    for deep, row in enumerate(rows):
        for number, panel in enumerate(row):
            axes = figure.add_subplot(grid[deep, number])
            image = _put_cells(axes, panel, limit, (room / len(panel.layers), heights[deep] / len(panel.rows)))
            drawn.append((axes, image))
            labelled = number == 0 or panel.rows != row[0].rows
            axes.tick_params(labelleft=labelled)
            said = f"{panel.metric}: {DIRECTION_WORDS[panel.direction]}"
            _titled(axes, panel.folder, said, whose=len(folders) > 1, room=room)
            if deep == len(rows) - 1:
                axes.set_xlabel("layer")
    bar = figure.colorbar(
        drawn[0][1], ax=[axes for axes, _ in drawn], location="top", extend="both", fraction=0.2 / tall, shrink=min(1.0, 3.2 / (width - 1.5)),
        aspect=34, pad=0.12 / tall,
    )  # fmt: skip
    ticks = [part * limit for part in (-1, -0.5, 0, 0.5, 1)]
    bar.set_ticks(ticks, labels=[_percent(one) for one in ticks])
    ends = f"{_percent(-limit)} and {_percent(limit)}"
    bar.set_label(f"share of the filler's effect; colours end at {ends}")
    bar.outline.set_linewidth(0.5)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return _finished(
        figure, "Layers and parts the effect passes through", folders, _MAP_READING, _map_note(folders, panels)
    )


def _pairs(folder: StoredCause) -> list[list[Panel]]:
    cells = folder.cells()
    layers = sorted({cell.layer for cell in cells})
    rows = list(dict.fromkeys((cell.part, cell.head) for cell in cells))
    # Heads of a part stand together, whatever order the rows have.
    parts = list(dict.fromkeys(part for part, _ in rows))
    rows.sort(key=lambda row: (parts.index(row[0]), row[1] or 0))
    found: list[list[Panel]] = []
    for metric in shown_metrics({cell.metric for cell in cells}):
        own = [cell for cell in cells if cell.metric == metric]
        found.append(
            [
                Panel(folder, metric, way, layers, rows, {(c.part, c.head, c.layer): c for c in own if c.direction == way})
                for way in DIRECTIONS
            ]
        )  # fmt: skip
    return found


def _put_cells(axes: Axes, panel: Panel, limit: float, cell: tuple[float, float]) -> Any:
    shares, blank = panel.shares(), panel.blank()
    down, across = shares.shape
    many = across * down > 3000
    axes.set_facecolor("0.82")
    image = axes.pcolormesh(
        np.arange(across + 1) - 0.5, np.arange(down + 1) - 0.5, np.ma.masked_invalid(shares), cmap="PuOr", norm=Normalize(-limit, limit),
        edgecolors="white" if min(cell) > 0.09 else "none", linewidth=0.4, rasterized=many,
    )  # fmt: skip
    boxes = [Rectangle((x - 0.5, y - 0.5), 1, 1) for y, x in np.argwhere(blank).tolist()]
    if boxes:
        axes.add_collection(
            PatchCollection(boxes, facecolor="white", edgecolor="0.7", hatch="/////", linewidth=0.0, rasterized=many)
        )
    if blank.any() and blank.sum() == len(panel.cells):
        one = next(iter(panel.cells.values()))
        whole = f"{signed(one.whole, panel.metric)}{around(one.whole_lo, one.whole_hi, panel.metric)}"
        axes.text(
            (across - 1) / 2, (down - 1) / 2, style.wrapped(f"no share is known: the whole effect is {whole} {unit_of_change(panel.metric)}", 2.2),
            ha="center", va="center", fontsize=SMALL, zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    size = min(3.0, max(0.8, min(cell) * 72 * 0.3))
    for y, x in np.argwhere(panel.sure()).tolist():
        dark = not blank[y, x] and abs(shares[y, x]) > 0.55 * limit
        axes.plot(
            x, y, linestyle="none", marker="o", markersize=size, markeredgewidth=0, color="white" if dark else "0.15", rasterized=many, zorder=4
        )  # fmt: skip
    layers = style.numbers_to_label(panel.layers, max(2, int(cell[0] * across / 0.2)))
    names = style.numbers_to_label(list(range(1, down + 1)), max(2, int(cell[1] * down / 0.12)))
    axes.set_xticks(layers, [str(panel.layers[at]) for at in layers])
    axes.set_yticks(names, [panel.names[at] for at in names])
    axes.set_xlim(-0.5, across - 0.5)
    axes.set_ylim(down - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(length=1.5)
    return image


def _map_note(folders: Sequence[StoredCause], panels: Sequence[Panel]) -> str:
    cells = [cell for panel in panels for cell in panel.cells.values()]
    bases = list(dict.fromkeys(cell.base for cell in cells))
    note = f"{_of_whom(folders, cells)} {_base_words(bases)} "
    note += "Dot: the patch changes the metric, p ≤ 0.05 after Holm over all cells of a metric; no dot: not shown. "
    if any(cell.share is None for cell in cells):
        note += f"Hatched: {_NO_SHARE}. "
    if any(len(panel.cells) < len(panel.rows) * len(panel.layers) for panel in panels):
        note += "Grey: not measured. "
    return note + "Shares need not add up to 100 %: each part also hands on what earlier parts gave it."


def _base_words(bases: Sequence[str]) -> str:
    if "positions" in bases and len(bases) > 1:
        return "Shares are of the effect against none, for keys and values against positions moved."
    return f"Shares are of the effect against {'positions moved' if 'positions' in bases else 'none'}."


# ---- chain -----------------------------------------------------------------------------------------------------------

_CHAIN_READING = (
    "How much of the filler's effect passes through layer 1's attention output, through the first MLP's activation, and elsewhere. Put in: the share "
    "that the part alone gives. Taken out: the share that is lost without it. ARM is beside it to compare."
)
#: A direction keeps its colour and mark.
_WAYS = {"in": (style.BLUE, "o"), "out": (style.ORANGE, "s")}
#: The links that are drawn: `both` only says what `elsewhere` is the rest of.
_DRAWN = tuple(link for link in LINKS if link != "both")
#: Shares outside of this are cut, or one wide interval would make the others dots.
_ENDS = (-1.5, 2.5)


def chain_of(given: Drawing) -> Picture:
    """Metrics side by side, folders below each other."""
    folders = _opened(given)
    found: list[list[tuple[str, list[CauseLink]]]] = []
    for folder in folders:
        links = folder.links()
        found.append(
            [
                (metric, [row for row in links if row.metric == metric and row.link in _DRAWN])
                for metric in shown_metrics({row.metric for row in links})
            ]
        )
    across = max(map(len, found))
    width = PAGE_WIDTH * (0.72, 0.9, 1.0)[min(across, 3) - 1]
    heights = [ROW * 2 * len({row.link for _, rows in panels for row in rows}) for panels in found]
    figure = style.new_figure(width, sum(heights) + 0.75 * len(folders) + 1.25)
    grid = figure.add_gridspec(len(folders), across, height_ratios=heights)
    cut = False
    for deep, (folder, panels) in enumerate(zip(folders, found, strict=True)):
        wholes = {row.metric: row for row in folder.steps() if (row.step, row.against) == ("all", "none")}
        for number, (metric, rows) in enumerate(panels):
            axes = figure.add_subplot(grid[deep, number])
            cut |= _put_links(axes, rows, wholes.get(metric), named=number == 0)
            _titled(axes, folder, metric, whose=len(folders) > 1 and number == 0, room=width / across)
    handles = [
        Line2D([], [], label=DIRECTION_WORDS[way], **_mark(colour, mark)) for way, (colour, mark) in _WAYS.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, handletextpad=0.2, columnspacing=1.2)
    note = _chain_note(folders, [row for panels in found for _, rows in panels for row in rows], cut=cut)
    return _finished(figure, "The published chain", folders, _CHAIN_READING, note)


def _put_links(axes: Axes, rows: Sequence[CauseLink], whole: LadderStep | None, *, named: bool) -> bool:
    """Whether something lies outside of the picture."""
    links = [link for link in _DRAWN if any(row.link == link for row in rows)]
    known = [row for row in rows if row.share is not None]
    ends = [end for row in known for end in (row.share, row.share_lo, row.share_hi) if end is not None]
    low, high = min([0.0, *ends]), max([1.0, *ends])
    room = 0.06 * (min(high, _ENDS[1]) - max(low, _ENDS[0]))
    reach = max(low, _ENDS[0]) - room, min(high, _ENDS[1]) + room
    axes.axvspan(0, 1, facecolor="0.5", alpha=0.08, linewidth=0, zorder=0.5)
    for at in (0, 1):
        axes.axvline(at, color="0.25" if at == 0 else "0.6", linewidth=0.6, zorder=1)
    if "arm" in links:
        axes.axhline(links.index("arm") - 0.5, color="0.85", linewidth=0.6, zorder=1)
    for row in known:
        assert row.share is not None
        colour, mark = _WAYS[row.direction]
        alone = len([one for one in rows if one.link == row.link]) == 1
        y = links.index(row.link) + (0.0 if alone else {"in": -0.19, "out": 0.19}[row.direction])
        _interval(axes, y, (row.share_lo, row.share_hi), 1.0, colour)
        inside = reach[0] <= row.share <= reach[1]
        look = _mark(colour, mark if inside else "<" if row.share < reach[0] else ">", filled=shown_at(row.p))
        axes.plot(min(max(row.share, reach[0]), reach[1]), y, clip_on=False, **look)
        _beside(axes, y, _percent(row.share))
    if not known:
        said = f"no share is known: the whole effect{_whole_words(whole)} may be 0"
        axes.text(
            0.5, (len(links) - 1) / 2, style.wrapped(said, 1.5), ha="center", va="center", fontsize=SMALL, zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axes.set_xlim(*reach)
    axes.set_ylim(len(links) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(links)), [LINK_WORDS[link] for link in links] if named else [""] * len(links))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=2))
    axes.xaxis.set_major_formatter(_PERCENT)
    axes.set_xlabel("share of the effect")
    return any(not reach[0] <= end <= reach[1] for end in ends)


def _whole_words(whole: LadderStep | None) -> str:
    if whole is None:
        return ""
    return f", {signed(whole.delta, whole.metric)}{around(whole.lo, whole.hi, whole.metric)} {unit_of_change(whole.metric)},"


def _chain_note(folders: Sequence[StoredCause], rows: Sequence[CauseLink], *, cut: bool) -> str:
    note = f"{_of_whom(folders, rows)} Shares of the effect against none, 95 % intervals over items. "
    note += f"Filled: the part changes the metric, p ≤ {ALPHA:g}, each by itself; hollow: not shown. "
    if any(row.link == "mlp-activation" for row in rows):
        note += "Elsewhere: what is left when both parts are patched at once. "
    else:
        note += "This model's MLP activation cannot be patched, so elsewhere holds it too. "
    if cut:
        note += "What lies beyond the edges is cut. "
    if any(row.share is None for row in rows):
        note += f"Blank: {_NO_SHARE}. "
    for folder, said in dict.fromkeys((row.model, _arm_words(row, rows)) for row in rows if row.link == "arm"):
        note += f"{folder + ': ' if len(folders) > 1 else ''}{said} "
    return note + "Shares need not add up to 100 %: what passes through the first part may pass through the second too."


def _arm_words(arm: CauseLink, rows: Sequence[CauseLink]) -> str:
    """How far ARM and the filler move layer 1's activations, and what is to be said of it."""
    filler = next((row.moved for row in rows if row.model == arm.model and row.link == "mlp-activation"), None)
    said = ""
    if arm.moved is not None and filler is not None:
        said = f"Layer 1's activations move by {filler:.3g} (root mean square) with the filler, by {arm.moved:.3g} with ARM. "
    note = f"{arm.note.rstrip('.')}." if arm.note else ""
    return (said + note[:1].upper() + note[1:]).strip()
