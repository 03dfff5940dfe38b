"""fig3: how filler moves a head's attention outputs in a plane, and what the affine forms explain of it, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from mless.conditions import inserts
from mless.errors import BadFolder, BadStudy
from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.figure_kinds import Drawing
from mless.results.reading import StoredResults, StoredStudy
from mless.values import counted, format_numbers, head_name

#: A lower R² is drawn at the edge with its own mark; its true value would flatten all others.
LOWEST = -0.6

#: Small panels by layer: column of affine.parquet, title, what its axis says.
PANELS: tuple[tuple[str, str, str], ...] = (
    ("r2_constant", "One λ and one σ per head", "R²"),
    ("r2_measured", "Own λ = Z/Z′ and σ (dashes: after positions)", "R²"),
    ("r2_kept", "Own λ = share left, and σ", "R²"),
    ("r2_position", "Positions alone", "R²"),
    ("lambda", "λ = Z/Z′ (dashes: share left)", "λ"),
    ("cosine", "Consistency of the shifts", "Mean cosine"),
)
#: What is drawn dashed beside it: the same form started from the outputs at the new positions; the share of attention the filler leaves.
DASHED = {"r2_measured": "r2_shifted", "lambda": "kept"}
_BOUNDS = ("", "_lo", "_hi")


@dataclass(frozen=True)
class _Shown:
    """What one folder's part of the picture shows."""

    folder: StoredStudy
    conditions: list[str]
    layer: int
    head: int
    #: Condition → layer → its row of affine.parquet (head 0), and condition → the row of the head shown.
    layers: dict[str, dict[int, Mapping[str, Any]]]
    of_head: dict[str, Mapping[str, Any]]
    points: dict[str, dict[str, np.ndarray]]


def displacement_of(given: Drawing) -> Picture:
    return draw_displacement(given.paths, given.spec.conditions, layer=given.layer)


def draw_displacement(paths: Sequence[Path], conditions: Sequence[str], *, layer: int | None) -> Picture:
    """Before, after and predicted outputs of the head that moves most in `layer` (the first measured by default), then every layer in numbers.

    One block of panels per folder. Points are of items that the constant map was not fitted on.
    """
    shown = [_shown(path, conditions, layer) for path in paths]
    rows = 1 if all(len(one.layers[name]) == 1 for one in shown for name in one.conditions) else 2
    height = 2.75 + 1.55 * rows
    figure = style.new_figure(PAGE_WIDTH, (height + 0.1) * len(shown) + 0.95)
    blocks: Any = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for block, one in zip(blocks, shown, strict=True):
        block.suptitle(
            f"{style.shown(one.folder.label)}, {counted(_items(one, 'n_items'), 'item')}", fontsize=style.TITLE
        )
        _draw_block(block, one, rows)
    names = list(dict.fromkeys(name for one in shown for name in one.conditions))
    handles = [
        Line2D([], [], color=style.colour(name, tuple(conditions)), marker="o", markersize=3, label=style.short(name))
        for name in names
    ]
    handles += [
        Line2D(
            [],
            [],
            color="0.55",
            marker="o",
            markerfacecolor="white",
            markersize=3.4,
            linestyle="none",
            label="without filler",
        ),
        Line2D([], [], color="black", marker="x", markersize=3.4, linestyle="none", label="λ·o + σ, one per head"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handlelength=1.4, columnspacing=1.2)
    note = _note(shown)
    style.add_caption(figure, note)
    title = "How filler moves attention outputs: " + ", ".join(
        f"{one.folder.label} {head_name(one.layer, one.head)}" for one in shown
    )
    reading = (
        "Top: each arrow is one token, from its output without filler to its output with it. A cross at the arrow's tip: one λ and one σ "
        "for the whole head predict it. Below, by layer: how much of the displacement each form explains."
    )
    return Picture(figure, style.shown(title), style.shown(f"{reading} {note}"))


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _shown(path: Path, conditions: Sequence[str], layer: int | None) -> _Shown:
    opened = StoredResults.open(path)
    folder = StoredStudy(opened.path, opened.about)
    if folder.about.get("measures") != "affine":
        raise BadFolder(
            f"{path} holds no attention outputs (it measures {folder.about.get('measures') or 'answers'}); make one with: mless run affine"
        )
    run = [name for name in folder.run_of(conditions) if name != "none"]
    if not run:
        raise BadStudy(
            f"{path}: of {', '.join(conditions)} only none was run, and nothing moves by itself; name others: --set figure.conditions=…"
        )
    columns = [
        "condition",
        "layer",
        "head",
        "lambda_constant",
        "displacement",
        "n_items",
        "n_scored",
        "n_tokens",
    ]
    columns += [*DASHED.values(), *(name + bound for name, _, _ in PANELS for bound in _BOUNDS)]
    rows = folder.table("affine", columns).to_pylist()
    held = sorted({int(row["layer"]) for row in rows})
    chosen = held[0] if layer is None and held else layer
    if chosen is None or chosen not in held:
        raise BadStudy(
            f"layer {chosen} was not measured in {path}: it holds layers {format_numbers(held) or 'none'}; choose one of them with --layers"
        )
    points = {
        name: folder.table(
            "affine_points",
            _POINT,
            (pc.field("condition") == name) & (pc.field("layer") == chosen) & (pc.field("half") == "score"),
        )
        for name in run
    }
    head = _most_moved(rows, run, chosen)
    at = {
        name: {int(row["layer"]): row for row in rows if row["condition"] == name and row["head"] == 0} for name in run
    }
    own = {row["condition"]: row for row in rows if row["layer"] == chosen and row["head"] == head}
    kept = {name: table.filter(pc.field("head") == head).to_pydict() for name, table in points.items()}
    arrays = {name: {key: np.array(values) for key, values in found.items()} for name, found in kept.items()}
    return _Shown(folder, run, chosen, head, at, own, arrays)


_POINT = [
    "head",
    "x",
    "y",
    "x_after",
    "y_after",
    "x_constant",
    "y_constant",
    "x_outputs",
    "y_outputs",
    "x_moves",
    "y_moves",
]


def _most_moved(rows: Sequence[Mapping[str, Any]], run: Sequence[str], layer: int) -> int:
    """The head whose outputs move most, as a share of their size, under the first condition shown."""
    heads = [row for row in rows if row["layer"] == layer and row["head"] > 0 and row["condition"] == run[0]]
    moved = {int(row["head"]): _value(row["displacement"]) for row in heads}
    known = {head: size for head, size in moved.items() if not math.isnan(size)}
    return max(known, key=lambda head: (known[head], -head)) if known else min(moved, default=1)


def _value(number: float | None) -> float:
    return math.nan if number is None else float(number)


# ---- drawing ---------------------------------------------------------------------------------------------------------


def _draw_block(block: Figure | SubFigure, one: _Shown, rows: int) -> None:
    fields = one.conditions[:3]
    outer = block.add_gridspec(2, 1, height_ratios=[2.6, 1.45 * rows])
    above = outer[0].subgridspec(1, len(fields))
    limits = _limits([one.points[name] for name in fields])
    first = one.points[fields[0]]
    titles = style.fit_titles([("", _field_title(one, name)) for name in fields], PAGE_WIDTH / len(fields) - 0.3)
    shift = f"Along the mean shift by {style.short(_reference(one))}"
    for n, name in enumerate(fields):
        axes = block.add_subplot(above[0, n])
        _draw_field(axes, one, name, limits)
        style.set_title(axes, titles["", _field_title(one, name)])
        axes.set_xlabel(f"{shift}\n({_percent(first, 'x_outputs')} of the outputs’ variance)", fontsize=SMALL)
        if n == 0:
            axes.set_ylabel(
                f"Outputs’ first component across it\n({_percent(first, 'y_outputs')} of their variance)",
                fontsize=SMALL,
            )
        else:
            axes.tick_params(labelleft=False)
    below = outer[1].subgridspec(rows, 3)
    for n, (column, title, label) in enumerate(PANELS if rows == 2 else PANELS[:3]):
        axes = block.add_subplot(below[n // 3, n % 3])
        _draw_layers(axes, one, column)
        axes.set_title(title, fontsize=SMALL, pad=3.0)
        axes.set_ylabel(label, fontsize=SMALL)
        if n // 3 == rows - 1:
            axes.set_xlabel("Layer", fontsize=SMALL)


def _reference(one: _Shown) -> str:
    """The condition whose mean displacement gives the plane: the first of the study that inserts something."""
    with_filler = [name for name, about in one.folder.conditions.items() if inserts(about.get("kind"))]
    return with_filler[0] if with_filler else next(name for name in one.folder.conditions if name != "none")


def _field_title(one: _Shown, name: str) -> str:
    return f"{head_name(one.layer, one.head)}: {style.short(name)}"


def _percent(points: Mapping[str, np.ndarray], name: str) -> str:
    values = points[name]
    share = float(values[0]) if len(values) and values[0] is not None else math.nan
    return "–" if math.isnan(share) else f"{100 * share:.0f} %"


def _limits(fields: Sequence[Mapping[str, np.ndarray]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The same for all panels and both directions, so that lengths can be compared; with room for the text at the foot."""
    ends: list[tuple[float, float]] = []
    for axis in "xy":
        values = np.concatenate([one[axis + name].astype(float) for one in fields for name in _MARKS])
        values = values[np.isfinite(values)]
        ends.append((float(values.min()), float(values.max())) if values.size else (0.0, 1.0))
    (left, right), (low, high) = ends
    across, up = right - left, high - low
    side = max(across * 1.1, up * 1.45) or 1.0
    top = high + max(0.06 * side, min((side - up) / 2, side * 0.75 - up))
    middle = (left + right) / 2
    return (middle - side / 2, middle + side / 2), (top - side, top)


_MARKS = ("", "_after", "_constant")


def _draw_field(axes: Axes, one: _Shown, name: str, limits: tuple[tuple[float, float], tuple[float, float]]) -> None:
    points, colour = one.points[name], style.colour(name, tuple(one.folder.conditions))
    x, y, x_after, y_after, x_fit, y_fit = (
        points[key].astype(float) for key in ("x", "y", "x_after", "y_after", "x_constant", "y_constant")
    )
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])
    axes.set_aspect("equal", adjustable="box")
    axes.axhline(0, color="0.7", linewidth=0.5, zorder=1)
    axes.axvline(0, color="0.7", linewidth=0.5, zorder=1)
    axes.plot(
        x,
        y,
        linestyle="none",
        marker="o",
        markersize=2.8,
        markerfacecolor="white",
        markeredgecolor="0.55",
        markeredgewidth=0.7,
        zorder=2,
    )
    axes.quiver(
        x, y, x_after - x, y_after - y, angles="xy", scale_units="xy", scale=1, color=colour, alpha=0.75, width=0.005, headwidth=4.2,
        headlength=4.6, headaxislength=4.2, zorder=3,
    )  # fmt: skip
    # The residual between the arrow's tip and the prediction.
    axes.plot(np.stack([x_after, x_fit]), np.stack([y_after, y_fit]), color="0.35", linewidth=0.4, zorder=3.5)
    axes.plot(x_fit, y_fit, linestyle="none", marker="x", markersize=2.8, markeredgewidth=0.7, color="black", zorder=4)
    row = one.of_head.get(name)
    lines: list[str] = []
    if row is not None:
        lines.append(f"λ = {_text(row['lambda_constant'])}, R² = {_text(row['r2_constant'])}")
        lines.append(f"cosine {_text(row['cosine'])}")
    if len(points["x_moves"]):
        inside = sum(float(points[key][0]) for key in ("x_moves", "y_moves") if points[key][0] is not None)
        lines.append(f"{100 * inside:.0f} % of the shift in this plane")
    label = axes.text(
        0.03, 0.03, "\n".join(lines), transform=axes.transAxes, va="bottom", ha="left", fontsize=SMALL, linespacing=1.25,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5}, zorder=5,
    )  # fmt: skip
    label.set_in_layout(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))


def _text(number: float | None) -> str:
    value = _value(number)
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


def _draw_layers(axes: Axes, one: _Shown, column: str) -> None:
    squared = column.startswith("r2_")
    every = sorted({layer for name in one.conditions for layer in one.layers[name]})
    axes.axhline(0.0 if column != "lambda" else 1.0, color="0.4", linewidth=0.6, zorder=1)
    drawn = [
        name for name in one.conditions if any(one.layers[name][at][column] is not None for at in one.layers[name])
    ]
    for number, name in enumerate(drawn):
        rows = [one.layers[name][at] for at in sorted(one.layers[name])]
        colour = style.colour(name, tuple(one.folder.conditions))
        at = np.array([float(row["layer"]) for row in rows])
        at = at + (number - (len(drawn) - 1) / 2) * (0.2 if len(every) <= 40 else 0.0)
        value, lo, hi = (np.array([_value(row[column + bound]) for row in rows]) for bound in _BOUNDS)
        size = 2.2 if len(every) <= 40 else 1.4
        if squared:
            below = value < LOWEST
            axes.plot(
                at[below],
                np.full(below.sum(), LOWEST),
                linestyle="none",
                marker="v",
                markersize=2.6,
                color=colour,
                zorder=4,
            )
            value = np.where(below, np.nan, value)
            lo = np.maximum(lo, LOWEST)
            hi = np.where(below, np.maximum(hi, LOWEST), hi)
        axes.vlines(at, lo, hi, color=colour, linewidth=0.9, alpha=0.7)
        axes.plot(at, value, color=colour, marker="o", markersize=size, linewidth=0.7)
        if column in DASHED:
            beside = np.array([_value(row[DASHED[column]]) for row in rows])
            if np.isfinite(beside).any() and not np.allclose(beside, 1.0):
                beside = np.where(beside < LOWEST, np.nan, beside)
                axes.plot(at, beside, color=colour, linestyle=(0, (2, 1.5)), linewidth=0.9)
    if squared:
        axes.set_ylim(LOWEST - 0.04, 1.06)
        axes.set_yticks([-0.5, 0.0, 0.5, 1.0], ["−0.5", "0", "0.5", "1"])
    elif column == "cosine":
        low, _ = axes.get_ylim()
        axes.set_ylim(min(low, -0.04), 1.04)
    else:
        low, high = axes.get_ylim()
        axes.set_ylim(max(0.0, low), high)
    axes.set_xlim(min(every) - 0.7, max(every) + 0.7)
    ticks = style.numbers_to_label(every, 8)
    axes.set_xticks([every[i] for i in ticks], [str(every[i]) for i in ticks])
    axes.grid(visible=False, axis="x")


def _note(shown: Sequence[_Shown]) -> str:
    counts = " / ".join(
        dict.fromkeys(f"{counted(_items(one, 'n_items'), 'item')} ({_items(one, 'n_scored')} scored)" for one in shown)
    )
    return (
        f"o = a head's attention output before the projection, original tokens after the filler; n = {counts}. Arrows: tokens of scored items, from "
        "o without filler to o′ with it; the head that moves most. R² = 1 − Σ‖o′ − prediction‖² / Σ‖o′ − o‖², pooled over a layer's heads; bars: "
        f"95 % over items (jackknife); ▼: below {str(LOWEST).replace('-', '−')}. One λ and σ are fitted on half of the items and scored on the others."
    )


def _items(one: _Shown, column: str) -> int:
    return max((int(row[column]) for rows in one.layers.values() for row in rows.values()), default=0)
