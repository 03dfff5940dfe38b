"""Pictures of activations: their histogram and what a condition changes in it (fig4), near-zero shares by token class (fig7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.errors import BadFolder
from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.figure_kinds import Drawing
from mless.results.reading import StoredActivations
from mless.results.schemas import TOKEN_CLASSES
from mless.stats.activations import LOG_PARTS, ZOOM_PARTS, ZOOM_REACH, linear_edges, log_edges, zoom_edges
from mless.values import counted

#: The small panels of fig4: metric, title, whether its change is shown in points of a share.
_SMALL = (
    ("near_zero", "near-zero share", "points"),
    ("l1", "L1 norm", "%"),
    ("l2", "L2 norm", "%"),
    ("gini", "Gini", "Δ × 100"),
    ("variance", "variance", "%"),
)
#: Bins of |a| with fewer values than this say nothing about a ratio.
_FEWEST = 200


# ---- fig4 ----------------------------------------------------------------------------------------------------------------


def activations_of(given: Drawing) -> Picture:
    return draw_activations(given.paths, given.spec.conditions, layer=given.layer)


def classes_of(given: Drawing) -> Picture:
    return draw_classes(given.paths, given.spec.conditions, layer=given.layer)


def draw_activations(paths: Sequence[Path], conditions: Sequence[str], *, layer: int | None = None) -> Picture:
    """Histograms of act(gate) with each condition, at zero and by magnitude, and what changes in a layer; over the layers where there are several."""
    folders = [StoredActivations.open(path) for path in paths]
    layer = layer or 1
    by_layer = len(folders) == 1 and len(folders[0].layers) > 1
    figure = style.new_figure(PAGE_WIDTH, 0.62 + len(folders) * (3.75 + (1.75 if by_layer else 0)))
    parts = figure.subfigures(len(folders), 1, squeeze=False)[:, 0]
    drawn: dict[str, str] = {}
    for part, folder in zip(parts, folders, strict=True):
        folder.need_layer(layer)
        run = folder.run_of(conditions)
        if "none" not in run:
            run = ["none", *run]
        compared = [name for name in run if name != "none"]
        heights = [2.0, 1.5, *([1.5] if by_layer else [])]
        places = part.add_gridspec(len(heights), 1, height_ratios=heights)
        part.suptitle(
            style.shown(f"{folder.label}, layer {layer}, n = {counted(len(folder.items), 'item')}"),
            fontsize=style.TITLE,
        )
        for name in run:
            drawn[style.short(name) if not folder.with_arm(name) else _arm_name(name)] = _colour(name)
        counts = {name: folder.counts(name, layer) for name in run}
        _draw_histograms(part, places[0, 0], counts, [name for name in run if folder.with_arm(name)])
        rows = [row for row in folder.changes(tokens="all") if row["condition"] in compared]
        _draw_small(part, places[1, 0], [row for row in rows if row["layer"] == layer], compared, folder)
        if by_layer:
            _draw_layers(part, places[2, 0], rows, compared, folder)
    handles = [Line2D([], [], color=colour, linewidth=1.6, label=name) for name, colour in drawn.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, handlelength=1.6, columnspacing=1.4)
    note = (
        "Activations act(gate) of the original tokens. τ: a tenth of the robust spread of |a| without filler; |a| ≤ τ is near zero (grey). "
        "Changes against the same items without: mean and 95 % interval over items; an arrow stands for a value beyond the axis."
    )
    style.add_caption(figure, note)
    reading = (
        "Above: all activations of the layer, those near zero, and how often each magnitude occurs beside how often it occurs without. "
        "Below: paired changes; an interval that does not cross the line differs from no change."
    )
    title = f"Activations in layer {layer}: " + ", ".join(folder.label for folder in folders)
    return Picture(figure, style.shown(title), style.shown(f"{reading} {note}"))


def _colour(condition: str) -> str:
    return style.colour(condition, ("arm", "mless-arm", condition))


def _arm_name(condition: str) -> str:
    return {"arm": "ARM", "mless-arm": "Mless + ARM"}.get(condition, style.shown(condition))


def _called(condition: str, folder: StoredActivations) -> str:
    return _arm_name(condition) if folder.with_arm(condition) else style.short(condition)


def _draw_histograms(
    part: SubFigure, place: Any, counts: Mapping[str, Mapping[str, np.ndarray]], with_arm: Sequence[str]
) -> None:
    places = place.subgridspec(1, 3, width_ratios=[1.15, 1, 1.15])
    whole, zoom, change = (part.add_subplot(places[0, i]) for i in range(3))
    width = float(counts["none"]["width"][0])
    total = {name: float(found["linear"].sum()) for name, found in counts.items()}
    edges = linear_edges(width)
    # Without the outer millionth of the values, which would turn the rest into a spike.
    shares = {name: found["linear"][1:-1] / total[name] for name, found in counts.items()}
    kept = np.flatnonzero(np.max(list(shares.values()), axis=0) > 1e-6)
    first, last = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, len(edges) - 1)
    group = max(1, (last - first) // 70)
    zero = len(edges) // 2
    first = zero - math.ceil((zero - first) / group) * group
    last = zero + math.ceil((last - zero) / group) * group
    for name, share in shares.items():
        padded = np.pad(share, (max(0, -first), max(0, last - len(share))))[
            max(first, 0) : max(first, 0) + last - first
        ]
        density = padded.reshape(-1, group).sum(axis=1) / (group * width)
        _steps(whole, (np.arange(first, last + 1, group) - zero) * width, density, name)
    whole.set_yscale("log")
    whole.yaxis.set_major_formatter(FuncFormatter(_power))
    low = min(float(line[line > 0].min()) for line in shares.values()) / width
    whole.set_ylim(bottom=max(low / 2, 1e-7 / width))
    whole.set_xlabel("activation a")
    whole.set_ylabel("density")
    whole.set_title("all values")
    near = zoom_edges(1.0)
    for name, found in counts.items():
        _steps(zoom, near, found["zoom"][1:-1] / total[name] * ZOOM_PARTS * 100, name)
    zoom.axvspan(-1, 1, facecolor="0.5", alpha=0.15, linewidth=0, zorder=0.5)
    zoom.set_xlim(-ZOOM_REACH, ZOOM_REACH)
    zoom.set_ylim(bottom=0)
    zoom.set_xlabel("a / τ")
    zoom.set_ylabel("% of values per τ")
    zoom.set_title("at zero")
    _draw_ratio(change, counts, width, with_arm)
    for axes in (whole, zoom):
        axes.xaxis.set_major_locator(MaxNLocator(5))


def _steps(axes: Axes, edges: np.ndarray, values: np.ndarray, name: str) -> None:
    if name == "none":
        axes.stairs(values, edges, fill=True, facecolor=_colour(name), alpha=0.22, linewidth=0)
    axes.stairs(values, edges, color=_colour(name), linewidth=0.9, baseline=None)


def _draw_ratio(
    axes: Axes, counts: Mapping[str, Mapping[str, np.ndarray]], width: float, with_arm: Sequence[str]
) -> None:
    """Frequency of each magnitude relative to `none`, by half octaves; the filler conditions set the axis."""
    joined = LOG_PARTS // 2

    def octaves(found: Mapping[str, np.ndarray]) -> np.ndarray:
        both = found["positive"][1:-1] + found["negative"][1:-1]
        return both.reshape(-1, joined).sum(axis=1)

    edges = log_edges()[::joined]
    without = octaves(counts["none"])
    enough = without >= _FEWEST
    middle = np.sqrt(edges[:-1] * edges[1:])
    reach = 0.4
    for name, found in counts.items():
        if name == "none":
            continue
        ratio = np.where(enough, octaves(found) / np.maximum(without, 1), np.nan)
        axes.plot(middle, ratio, color=_colour(name), marker=".", markersize=2.5)
        if name not in with_arm:
            known = ratio[np.isfinite(ratio) & (ratio > 0) & (middle > width / 8)]
            reach = max(reach, 1.15 * float(np.abs(np.log2(known)).max(initial=0.0)))
    axes.axhline(1.0, color=_colour("none"), linewidth=0.9)
    axes.axvspan(float(edges[0]), width, facecolor="0.5", alpha=0.15, linewidth=0, zorder=0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_power))
    axes.set_yscale("log", base=2)
    reach = min(reach, 4.0)
    axes.set_ylim(2.0**-reach, 2.0**reach)
    ticks = (1, 0.8, 1.25) if reach < 0.8 else (1, 0.6, 0.8, 1.25, 1.6) if reach < 1 else (1, 0.5, 2, 0.25, 4, 0.1, 10)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    shown = middle[enough]
    if len(shown):
        axes.set_xlim(max(shown[0], width / 64) / 1.3, shown[-1] * 1.3)
    axes.set_xlabel("magnitude |a|")
    axes.set_ylabel("× as often as without")
    axes.set_title("by magnitude")


def _change(row: Mapping[str, Any], key: str) -> float:
    """A change as it is drawn: per cent of the size without, or points of a share."""
    value = row[key]
    return 100 * (math.exp(value) - 1) if row["scale"] == "log ratio" else 100 * value


def _reach(rows: Sequence[Mapping[str, Any]], folder: StoredActivations, margin: float = 0.15) -> tuple[float, float]:
    """The axis limits, set by the filler conditions: ARM changes so much more that filler would be a flat line."""
    filler = [row for row in rows if not folder.with_arm(row["condition"])] or list(rows)
    ends = [_change(row, key) for row in filler for key in ("lo", "hi", "difference") if not math.isnan(row[key])]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = max((high - low) * margin, 1e-3)
    return low - room, high + room


def _points(
    axes: Axes, at: Sequence[float], rows: Sequence[Mapping[str, Any]], limits: tuple[float, float], *, large: bool
) -> None:
    """A mean with its interval for each row; beyond the axis an arrow, with the number where there is room."""
    low, high = limits
    for place, row in zip(at, rows, strict=True):
        value, lo, hi = (_change(row, key) for key in ("difference", "lo", "hi"))
        colour = _colour(row["condition"])
        if math.isnan(value):
            continue
        if low <= value <= high:
            axes.vlines(place, max(low, lo), min(high, hi), color=colour, linewidth=1.3) if not math.isnan(lo) else None
            axes.plot([place], [value], color=colour, marker="o", markersize=3.2 if large else 2.2)
            continue
        up = value > high
        edge = high - 0.035 * (high - low) if up else low + 0.035 * (high - low)
        axes.plot([place], [edge], color=colour, marker="^" if up else "v", markersize=3.6 if large else 2.6)
        if large:
            text = f"{value:+.3g}".replace("-", "−")
            axes.annotate(
                text, (place, edge), xytext=(0, -5 if up else 5), textcoords="offset points", ha="center", va="top" if up else "bottom",
                fontsize=SMALL, color=colour,
            )  # fmt: skip


def _draw_small(
    part: SubFigure, place: Any, rows: Sequence[Mapping[str, Any]], compared: Sequence[str], folder: StoredActivations
) -> None:
    places = place.subgridspec(1, len(_SMALL))
    for column, (metric, title, unit) in enumerate(_SMALL):
        axes = part.add_subplot(places[0, column])
        mine = [row for name in compared for row in rows if (row["condition"], row["metric"]) == (name, metric)]
        limits = _reach(mine, folder, 0.3)
        axes.axhline(0.0, color="0.35", linewidth=0.7, zorder=1)
        axes.set_ylim(*limits)
        axes.set_xlim(-0.7, len(compared) - 0.3)
        _points(axes, [float(compared.index(row["condition"])) for row in mine], mine, limits, large=True)
        axes.set_xticks([])
        axes.grid(visible=False, axis="x")
        axes.set_title(f"{title}, {unit}", fontsize=SMALL)
        if column == 0:
            axes.set_ylabel("change against none")
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
        axes.yaxis.set_major_formatter(FuncFormatter(_signed))


def _power(value: float, _: Any = None) -> str:
    """``0.001`` → ``10⁻³``; matplotlib's own would need its mathematical text, which is off because a token may be a dollar sign."""
    exponent = round(math.log10(value)) if value > 0 else 0
    plain = 0 <= exponent <= 2 or exponent == -1
    return f"{value:g}" if plain else "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _signed(value: float, _: Any = None) -> str:
    return f"{value:+g}".replace("-", "−") if value else "0"


def _draw_layers(
    part: SubFigure, place: Any, rows: Sequence[Mapping[str, Any]], compared: Sequence[str], folder: StoredActivations
) -> None:
    places = place.subgridspec(1, 2)
    layers = folder.layers
    for column, (metric, title) in enumerate(
        (("near_zero", "near-zero share by layer, points"), ("variance", "variance by layer, %"))
    ):
        axes = part.add_subplot(places[0, column])
        mine = [row for row in rows if row["metric"] == metric]
        limits = _reach(mine, folder)
        axes.axhline(0.0, color="0.35", linewidth=0.7, zorder=1)
        axes.set_ylim(*limits)
        for number, name in enumerate(compared):
            own = sorted((row for row in mine if row["condition"] == name), key=lambda row: row["layer"])
            shift = (number - (len(compared) - 1) / 2) * (0.17 if len(layers) <= 40 else 0.0)
            at = [row["layer"] + shift for row in own]
            line = [_change(row, "difference") for row in own]
            inside = [value if limits[0] <= value <= limits[1] else math.nan for value in line]
            axes.plot(at, inside, color=_colour(name), linewidth=0.6, alpha=0.7)
            _points(axes, at, own, limits, large=False)
        axes.set_xlim(layers[0] - 0.7, layers[-1] + 0.7)
        ticks = style.numbers_to_label(layers, 12)
        axes.set_xticks([layers[i] for i in ticks], [str(layers[i]) for i in ticks])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("Layer")
        axes.set_title(title, fontsize=SMALL)
        if column == 0:
            axes.set_ylabel("change against none")
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
        axes.yaxis.set_major_formatter(FuncFormatter(_signed))


# ---- fig7 ----------------------------------------------------------------------------------------------------------------


def draw_classes(paths: Sequence[Path], conditions: Sequence[str], *, layer: int | None = None) -> Picture:
    """The share of near-zero activations by token class, and what each condition changes in it, with intervals over items."""
    folders = [StoredActivations.open(path) for path in paths]
    layer = layer or 1
    figure = style.new_figure(PAGE_WIDTH, 0.75 + 2.55 * len(folders))
    parts = figure.subfigures(len(folders), 1, squeeze=False)[:, 0]
    drawn: dict[str, str] = {}
    for part, folder in zip(parts, folders, strict=True):
        folder.need_layer(layer)
        run = folder.run_of(conditions)
        compared = [name for name in run if name != "none"]
        if not compared:
            raise BadFolder(
                f"{folder.path}: nothing to compare with none; name a condition that was run: {', '.join(folder.conditions)}"
            )
        for name in ["none", *compared]:
            drawn[_called(name, folder)] = _colour(name)
        rows = [row for row in folder.changes(layer=layer, metric="near_zero") if row["condition"] in compared]
        part.suptitle(
            style.shown(f"{folder.label}, layer {layer}, n = {counted(len(folder.items), 'item')}"),
            fontsize=style.TITLE,
        )
        places = part.add_gridspec(1, 2)
        left, right = (part.add_subplot(places[0, i]) for i in range(2))
        _draw_class_shares(left, rows, compared, folder.tokens(layer))
        _draw_class_changes(right, rows, compared, folder)
    handles = [Patch(facecolor=colour, label=name) for name, colour in drawn.items()]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=6, handlelength=1.0, handleheight=1.0, columnspacing=1.4
    )
    note = (
        "Share of activations with |a| ≤ τ among the original tokens of each class, mean over the items that have such tokens. "
        "τ: a tenth of the robust spread of |a| without filler. Right: change against the same items without, 95 % interval over items; "
        "an arrow stands for a value beyond the axis."
    )
    style.add_caption(figure, note)
    reading = "Left: one group of bars per token class. Right: an interval that does not cross the line differs from no change."
    title = f"Near-zero activations by token class, layer {layer}: " + ", ".join(folder.label for folder in folders)
    return Picture(figure, style.shown(title), style.shown(f"{reading} {note}"))


def _of_class(rows: Sequence[Mapping[str, Any]], tokens: str, condition: str) -> Mapping[str, Any] | None:
    return next((row for row in rows if (row["tokens"], row["condition"]) == (tokens, condition)), None)


def _draw_class_shares(
    axes: Axes, rows: Sequence[Mapping[str, Any]], compared: Sequence[str], tokens: Mapping[str, int]
) -> None:
    bars = ["none", *compared]
    thick = 0.8 / len(bars)
    labels: list[str] = []
    for place, kind in enumerate(TOKEN_CLASSES):
        one = _of_class(rows, kind, compared[0])
        items = int(one["n_items"]) if one is not None else 0
        labels.append(f"{kind}\n{counted(tokens.get(kind, 0), 'token')}\n{counted(items, 'item')}")
        if not items:
            axes.text(place, 0, "no such\ntokens", ha="center", va="bottom", fontsize=SMALL, color="0.4")
            continue
        for number, name in enumerate(bars):
            row = _of_class(rows, kind, compared[0] if name == "none" else name)
            height = math.nan if row is None else row["none" if name == "none" else "value"]
            axes.bar(place + (number - (len(bars) - 1) / 2) * thick, 100 * height, thick * 0.92, color=_colour(name))
    axes.set_xticks(range(len(TOKEN_CLASSES)), labels)
    axes.set_xlim(-0.5, len(TOKEN_CLASSES) - 0.5)
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("near-zero share, %")


def _draw_class_changes(
    axes: Axes, rows: Sequence[Mapping[str, Any]], compared: Sequence[str], folder: StoredActivations
) -> None:
    mine = [row for row in rows if row["tokens"] in TOKEN_CLASSES and row["n_items"]]
    limits = _reach(mine, folder, 0.2)
    axes.axhline(0.0, color="0.35", linewidth=0.7, zorder=1)
    axes.set_ylim(*limits)
    for place, kind in enumerate(TOKEN_CLASSES):
        own = [row for name in compared for row in mine if (row["tokens"], row["condition"]) == (kind, name)]
        at = [
            place + (compared.index(row["condition"]) - (len(compared) - 1) / 2) * 0.62 / len(compared) for row in own
        ]
        _points(axes, at, own, limits, large=True)
        if not own:
            axes.text(place, 0, "no such\ntokens", ha="center", va="center", fontsize=SMALL, color="0.4")
    axes.set_xticks(range(len(TOKEN_CLASSES)), list(TOKEN_CLASSES))
    axes.set_xlim(-0.5, len(TOKEN_CLASSES) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("change against none, points")
    axes.yaxis.set_major_locator(MaxNLocator(6, min_n_ticks=3))
    axes.yaxis.set_major_formatter(FuncFormatter(_signed))
