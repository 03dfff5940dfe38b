"""A forest of models: each model's effect with its interval, the mean as a diamond, and where a further model may lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Polygon
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from mless.figures import compared, style, write_picture
from mless.figures.compared import Digits
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.comparing import Block, Comparison, compare
from mless.results.figure_kinds import Drawing
from mless.results.folder import write_atomically

#: Inches: a line of the picture, what its axis, title and caption need, and the room for names.
_LINE, _FRAME, _NAMES = 0.205, 1.15, 2.0
#: Sizes of the marks of the lightest and the heaviest model.
_LIGHTEST, _HEAVIEST = 2.5, 6.5
_DARK, _PALE = "0.2", "0.55"

READING = (
    "Squares: one model each with its 95 % interval over items, larger the more it weighs in the mean. Diamond: the random-effects mean over "
    "models with its interval. Thin line below: where a further model's effect is expected. Vertical line: no effect."
)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the picture. `kind`: heading, model, mean, part (the mean of some models) or further."""

    kind: str
    label: str
    value: float = math.nan
    lo: float = math.nan
    hi: float = math.nan
    weight: float = 0.0
    colour: str = _DARK


def forest_of(given: Drawing) -> Picture:
    """The kind of figure: every condition of the study but none, by the usual readout, over the given folders."""
    wanted = [name for name in given.spec.conditions if name != "none"]
    return draw_forest(compare(given.paths, conditions=wanted or None))


def draw_forest(comparison: Comparison) -> Picture:
    """One picture of all conditions that were compared."""
    lines = _lines(comparison)
    figure = style.new_figure(PAGE_WIDTH, _FRAME + _LINE * len(lines))
    axes = figure.subplots()
    _put_lines(axes, comparison, lines)
    _name_lines(axes, comparison, lines)
    _scale(axes, comparison, lines)
    note = style.shown(compared.caption_of(comparison))
    style.add_caption(figure, _unbroken(note))
    title = style.shown(f"{comparison.words} by model: {', '.join(block.condition for block in comparison.blocks)}")
    return Picture(figure, title, f"{READING} {note}")


def write_comparison(comparison: Comparison, out: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """The tables ``compare.md``, ``.csv`` and ``.tex``, and the picture ``forest``, in `out`."""
    written: list[Path] = []
    for name, text in compared.files_of(comparison).items():
        write_atomically(out / name, text.encode())
        written.append(out / name)
    return written + write_picture(lambda: draw_forest(comparison), out, "forest", formats)


def _unbroken(note: str) -> str:
    """A number stays on the line of its sign."""
    return note.replace(" %", "\u00a0%").replace(" = ", "\u00a0=\u00a0").replace(" < ", "\u00a0<\u00a0")


# ---- what stands where -----------------------------------------------------------------------------------------------


def _lines(comparison: Comparison) -> list[_Line]:
    names = tuple(block.condition for block in comparison.blocks)
    if comparison.models == 1:
        rows = [(block.condition, block.rows[0].reading) for block in comparison.blocks]
        return [
            _Line("model", style.short(name), one.value, one.lo, one.hi, 1.0, style.colour(name, names))
            for name, one in rows
        ]
    found: list[_Line] = []
    for block in comparison.blocks:
        if len(comparison.blocks) > 1:
            found.append(_Line("heading", style.shown(block.condition)))
        found += _block_lines(block, style.colour(block.condition, names))
    return found


def _block_lines(block: Block, colour: str) -> list[_Line]:
    """The models, those of a kind together where kinds are compared, then the mean and a further model."""
    heaviest = max(row.weight for row in block.rows)
    models = [
        _Line("model", style.shown(row.label), one.value, one.lo, one.hi, row.weight / heaviest, colour)
        for row in block.rows
        for one in (row.reading,)
    ]
    kinds = next(((name, by) for name, by in block.by.items() if len(by.groups) > 1 and by.free), None)
    found: list[_Line] = []
    if kinds is None:
        found += models
    else:
        name, by = kinds
        for group in by.groups:
            mine = [line for line, row in zip(models, block.rows, strict=True) if row.moderators[name] == group.name]
            label = style.shown(f"{group.name}, mean of {group.k}")
            found += [*mine, _Line("part", label, group.mean, group.lo, group.hi, colour=_PALE)]
    pooled = block.pooled
    found.append(_Line("mean", f"mean of {pooled.k} models", pooled.mean, pooled.lo, pooled.hi))
    if not math.isnan(pooled.predicted_lo):
        found.append(_Line("further", "a further model", math.nan, pooled.predicted_lo, pooled.predicted_hi))
    return found


def _put_lines(axes: Axes, comparison: Comparison, lines: list[_Line]) -> None:
    shown = comparison.scale.shown
    for at, line in enumerate(lines):
        y, ends = -at, (shown(line.lo), shown(line.hi))
        if line.kind in ("mean", "part") and not math.isnan(line.lo):
            middle, half = shown(line.value), 0.32 if line.kind == "mean" else 0.22
            corners = [(ends[0], y), (middle, y + half), (ends[1], y), (middle, y - half)]
            axes.add_patch(Polygon(corners, closed=True, facecolor=line.colour, edgecolor=line.colour, linewidth=0.8))
        elif line.kind == "further":
            axes.hlines(y, *ends, color=_DARK, linewidth=0.8, linestyles=(0, (4, 2)))
            axes.plot(ends, (y, y), linestyle="none", marker="|", markersize=5, color=_DARK, markeredgewidth=0.8)
        elif line.kind in ("model", "part", "mean"):
            size = _LIGHTEST + (_HEAVIEST - _LIGHTEST) * math.sqrt(line.weight)
            square = line.kind == "model"
            axes.plot(
                shown(line.value), y, marker="s" if square else "D", markersize=size if square else _LIGHTEST, color=line.colour, markeredgewidth=0
            )  # fmt: skip
            if not math.isnan(line.lo):  # over the mark, which may be wider than a narrow interval
                axes.hlines(y, *ends, color=_DARK, linewidth=0.9, zorder=3)
                axes.plot(
                    ends,
                    (y, y),
                    linestyle="none",
                    marker="|",
                    markersize=2.6,
                    color=_DARK,
                    markeredgewidth=0.9,
                    zorder=3,
                )


def _name_lines(axes: Axes, comparison: Comparison, lines: list[_Line]) -> None:
    """Names on the left, numbers on the right."""
    digits, places = Digits.of(comparison), [-at for at in range(len(lines))]
    labels = [style.cut(line.label, _NAMES) for line in lines]
    numbers = [
        "" if line.kind == "heading"
        else digits.between(line.lo, line.hi) if line.kind == "further"
        else digits.effect(line.value, line.lo, line.hi)
        for line in lines
    ]  # fmt: skip
    right = axes.twinx()
    for side, texts in ((axes, labels), (right, numbers)):
        side.set_ylim(-len(lines) + 0.35, 0.65)
        side.set_yticks(places, texts, fontsize=SMALL)
        side.tick_params(axis="y", length=0)
        side.grid(visible=False, axis="y")
        side.spines["left"].set_visible(False)
        for line, text in zip(lines, side.get_yticklabels(), strict=True):
            if line.kind in ("heading", "mean"):
                text.set_fontweight("bold")
            elif line.kind in ("part", "further"):
                text.set_color("0.35")
    right.spines[:].set_visible(False)
    for at, line in enumerate(lines):
        if line.kind == "mean":
            axes.axhline(-at + 0.5, color="0.75", linewidth=0.6, zorder=0.5)


def _scale(axes: Axes, comparison: Comparison, lines: list[_Line]) -> None:
    scale = comparison.scale
    known = [scale.shown(end) for line in lines for end in (line.lo, line.value, line.hi) if not math.isnan(end)]
    reach = [scale.nothing, *(end for end in known if math.isfinite(end) and (end > 0 or not scale.ratio))]
    low, high = min(reach), max(reach)
    axes.axvline(scale.nothing, color="0.25", linewidth=0.8, zorder=0.6)
    if scale.ratio:
        axes.set_xscale("log")
        room = (high / low) ** 0.06 if high > low else 1.1
        axes.set_xlim(low / room, high * room)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        room = 0.06 * (high - low) or 1.0
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
        axes.xaxis.set_major_formatter(
            FuncFormatter(
                lambda value, _: (
                    f"{value:{'+' if scale.change else ''}g}".replace("-", "−") if round(value, 12) else "0"
                )
            )
        )
    axes.set_xlabel(style.shown(comparison.words))
