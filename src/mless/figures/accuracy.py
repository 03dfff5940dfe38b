"""Pictures of accuracy: bars by condition, accuracy by filler length, pass@k beside the diversity of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.errors import BadFolder
from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results import wording
from mless.results.answers import StoredAnswers, shown_rows
from mless.results.figure_kinds import Drawing
from mless.results.reading import StoredStudy
from mless.results.schemas import Accuracy

#: Distance of bars in inches that leaves room above them for a p-value, a number, a turned number.
WORDS_PITCH, NUMBER_PITCH, TURNED_PITCH = 0.52, 0.27, 0.12
#: Below it a whole per cent stands upright.
RATE_PITCH = 0.2
#: How bars or lines differ once all colours are used.
HATCHES = ("", "////", "....", "xxxx")
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True, slots=True)
class Group:
    """The bars of one model on one task."""

    folder: StoredAnswers
    label: str
    rows: Mapping[str, Accuracy]

    @property
    def control(self) -> Accuracy | None:
        """The A/A control's row."""
        return self.rows.get(self.folder.control or "")


# ---- bars ----------------------------------------------------------------------------------------------------------------


def bars_of(given: Drawing) -> Picture:
    return draw_bars([StoredAnswers.open(path) for path in given.paths], given.spec.conditions)


def draw_bars(folders: Sequence[StoredAnswers], conditions: Sequence[str]) -> Picture:
    """Accuracy per condition with its interval; below, each condition's paired change against `none`, beside the A/A control's."""
    groups = groups_of(folders, conditions)
    slots = sum(len(group.rows) for group in groups) + len(groups) - 1
    width = PAGE_WIDTH * (0.62 if slots <= 6 else 1.0)
    figure = style.new_figure(width, 4.4)
    put_bars(figure, groups, width)
    note = bars_note(groups)
    style.add_caption(figure, together(note))
    return Picture(figure, bars_title(groups), style.shown(f"{READING} {note}"))


READING = (
    "Top: share of items answered right under each condition, whiskers 95 % intervals. Below each bar: the shares of answers that were cut off, "
    "and in which no answer was found. Bottom: the change against no filler, item by item; "
    "the grey mark is the same prompts run again, and a change no larger than that is no finding."
)


def bars_title(groups: Sequence[Group]) -> str:
    return style.shown(
        "Accuracy by condition: " + "; ".join(dict.fromkeys(g.label.replace("\n", ", ") for g in groups))
    )


def groups_of(folders: Sequence[StoredAnswers], conditions: Sequence[str]) -> list[Group]:
    """Per folder the rows of the requested conditions that were run, named by what differs between folders."""
    rows = [_rows(folder, conditions) for folder in folders]
    return [Group(*parts) for parts in zip(folders, labels_of(folders), rows, strict=True)]


def labels_of(folders: Sequence[StoredStudy]) -> list[str]:
    """The model's name, with the task below it and then the folder's name where that is what differs."""
    labels = [folder.label for folder in folders]
    if len({folder.task for folder in folders}) > 1:
        labels = [f"{folder.label}\n{folder.task}" for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [f"{label}\n{folder.path.name}" for label, folder in zip(labels, folders, strict=True)]
    return labels


def _rows(folder: StoredAnswers, conditions: Sequence[str]) -> dict[str, Accuracy]:
    found = shown_rows(folder.accuracy(), folder.conditions)
    run = [name for name in with_control(folder, folder.run_of(conditions)) if name in found]
    if not run:
        raise BadFolder(
            f"{folder.path}: accuracy.parquet holds none of {', '.join(conditions)} over all items; run the study again"
        )
    return {name: found[name] for name in run}


def with_control(folder: StoredStudy, conditions: Sequence[str]) -> list[str]:
    """The A/A control stands beside `none` wherever accuracy is shown, also where a figure does not name it."""
    named = [name for name in conditions if name != folder.control]
    at = named.index("none") + 1 if "none" in named else 0
    return [*named[:at], *([folder.control] if folder.control else []), *named[at:]]


def put_bars(place: FigureBase, groups: Sequence[Group], width: float) -> None:
    """Draw the bars, the shares cut off and without answer, and the strip of changes into a figure or a part of it, `width` inches wide."""
    names = list(dict.fromkeys(name for group in groups for name in group.rows))
    looks = looks_of(names, [group.folder for group in groups])
    at = _places(groups)
    slots = max(max(places.values()) for places in at) + 1
    pitch = (width - 0.6) / slots
    grid = place.add_gridspec(3, 1, height_ratios=[1.6, 0.22 if pitch >= RATE_PITCH else 0.4, 1.0])
    bars, rates, strip = (place.add_subplot(grid[line, 0]) for line in range(3))
    for group, places in zip(groups, at, strict=True):
        for name, row in group.rows.items():
            put_bar(bars, places[name], row, looks[name], pitch)
        _put_rates(rates, group, places, pitch)
        _put_changes(strip, group, places, looks, pitch)
    for axes in (bars, rates, strip):
        axes.set_xlim(-0.7, slots - 0.3)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0)
    for axes in (bars, strip):
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))
    rates.set(xticks=[], ylim=(-0.5, 1.5), facecolor="0.96")
    rates.set_yticks([1, 0], ["cut off %", "no answer %"])
    rates.tick_params(axis="y", length=0)
    rates.grid(visible=False)
    rates.spines[:].set_visible(False)
    room_above(bars, [row for group in groups for row in group.rows.values()], pitch)
    bars.set_xticks([])
    bars.set_ylabel(f"{_metrics_word(groups)} (%)")
    strip.axhline(0, color="0.25", linewidth=0.6, zorder=1)
    reach = max(*map(abs, strip.get_ylim()), 0.5)
    # Words stand beyond the whiskers; turned ones, and those of two lines, need more room there.
    starred = any(wording.significant(row) for group in groups for row in group.rows.values())
    room = 2.5 if pitch < NUMBER_PITCH else 2.0 if starred and pitch >= WORDS_PITCH else 1.3
    strip.set_ylim(-reach * room, reach * room)
    strip.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if round(value, 6) else "0")
    )
    strip.set_ylabel("Δ against w/o (points)", fontsize=SMALL)
    if len(groups) == 1:
        _name_bars(strip, at[0], pitch, groups[0])
    else:
        middles = [(min(p.values()) + max(p.values())) / 2 for p in at]
        room = (width - 0.6) / len(groups) - 0.08
        strip.set_xticks(middles, [_broken(group.label, room) for group in groups], fontsize=SMALL)
        handles = [Patch(**looks[name], label=_legend_name(name, groups)) for name in names]
        place.legend(
            handles=handles,
            loc="outside upper center",
            ncols=legend_columns(handles, width),
            handlelength=1.3,
            columnspacing=1.2,
        )


def bars_note(groups: Sequence[Group]) -> str:
    """The caption: how many items, what the whiskers are, how the answers were drawn, what the items could have shown."""
    rows = [row for group in groups for row in group.rows.values()]
    folders = [group.folder for group in groups]
    names = list(dict.fromkeys(group.folder.label for group in groups))
    tasks = list(dict.fromkeys(group.folder.task for group in groups))
    subject = f"{', '.join(names)} on {tasks[0]}. " if len(groups) == 1 else f"{', '.join(tasks)}. "
    said = [
        f"{subject}{wording.items_words(rows)}; {wording.statistics_words(folders, rows)}.",
        "Star: p ≤ 0.05 and a Δ larger than A/A's."
        if any(wording.significant(row) for row in rows)
        else "No Δ has p ≤ 0.05 and is larger than A/A's.",
        control_words([group.control for group in groups]),
        wording.smallest_words(rows),
        wording.rates_words(rows),
        wording.drawn_words(folders),
    ]
    return caption_of(said)


def caption_of(said: Sequence[str]) -> str:
    return style.shown(" ".join(filter(None, said)))


def together(note: str) -> str:
    """Keep a per cent sign on the line of its number."""
    return note.replace(" %", "\u00a0%")


def control_words(controls: Sequence[Accuracy | None]) -> str:
    found = [wording.points(row.delta) for row in controls if row is not None]
    return f"A/A (w/o again): {' / '.join(found)} points." if found else "No A/A control was run."


def _places(groups: Sequence[Group]) -> list[dict[str, float]]:
    """Where each bar stands: side by side within a group, one slot free between groups."""
    found: list[dict[str, float]] = []
    start = 0.0
    for group in groups:
        found.append({name: start + place for place, name in enumerate(group.rows)})
        start += len(group.rows) + 0.9
    return found


def looks_of(names: Sequence[str], folders: Sequence[StoredStudy]) -> dict[str, dict[str, Any]]:
    """Each condition's colour, and a hatch where colours repeat; the control is hatched grey."""
    controls = {folder.control for folder in folders}
    others = [name for name in names if name not in style.COLOURS and name not in controls]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        if name in controls:
            found[name] = {"facecolor": "0.88", "edgecolor": "0.45", "hatch": "////", "linewidth": 0.5}
            continue
        hatch = HATCHES[others.index(name) // len(style.OTHERS) % len(HATCHES)] if name in others else ""
        colour = style.colour(name, tuple(others))
        found[name] = {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "linewidth": 0.5}
    return found


def put_bar(axes: Axes, at: float, row: Accuracy, look: Mapping[str, Any], pitch: float) -> None:
    if row.value is None:
        return
    axes.bar(at, 100 * row.value, width=0.82, **look)
    if row.lo is not None and row.hi is not None:
        for colour, width in (("white", 2.2), ("0.15", 0.9)):  # a dark line with a light rim is seen on every bar
            axes.vlines(at, 100 * row.lo, 100 * row.hi, color=colour, linewidth=width)
    write_number(axes, at, 100 * _top(row), wording.percent(row.value), pitch)


def _top(row: Accuracy) -> float:
    return next((end for end in (row.hi, row.value) if end is not None), 0.0)


def _put_changes(
    axes: Axes, group: Group, places: Mapping[str, float], looks: Mapping[str, Mapping[str, Any]], pitch: float
) -> None:
    control = group.control
    if control is not None and control.delta is not None:
        ends, by_itself = (min(places.values()) - 0.45, max(places.values()) + 0.45), 100 * abs(control.delta)
        axes.fill_between(ends, [-by_itself] * 2, [by_itself] * 2, color="0.5", alpha=0.18, linewidth=0, zorder=0.5)
    for name, row in group.rows.items():
        if row.delta is None or name == "none":
            continue
        colour = "0.45" if row is control else looks[name]["facecolor"]
        at = places[name]
        ends = [100 * end for end in (row.delta_lo, row.delta, row.delta_hi) if end is not None]
        axes.vlines(at, min(ends), max(ends), color=colour, linewidth=1.3)
        marker = "D" if row is control else "o"
        axes.plot(
            at,
            100 * row.delta,
            marker=marker,
            markersize=3.4,
            color=colour,
            markeredgecolor="white",
            markeredgewidth=0.4,
        )
        text = wording.points(row.delta)
        if wording.significant(row):
            p = wording.p_value(wording.p_claimed(row))
            text += f"*\np {p if p.startswith('<') else f'= {p}'}" if pitch >= WORDS_PITCH else "*"
        below = row.delta < 0
        write_number(axes, at, min(ends) if below else max(ends), text, pitch, below=below)


def _put_rates(axes: Axes, group: Group, places: Mapping[str, float], pitch: float) -> None:
    """Two numbers under each bar, because bars can be compared only where equally many answers ended."""
    said = wording.percent if pitch >= WORDS_PITCH else wording.whole_percent
    for name, row in group.rows.items():
        for line, share in ((1, row.truncated), (0, row.no_answer)):
            axes.text(
                places[name], line, said(share), ha="center", va="center", fontsize=min(SMALL, 68 * pitch),
                rotation=0 if pitch >= RATE_PITCH else 90,
            )  # fmt: skip


def write_number(axes: Axes, at: float, end: float, text: str, pitch: float, *, below: bool = False) -> None:
    """Beyond the end of a whisker; turned where bars are narrow, and left out where they are too narrow even for that."""
    if pitch >= TURNED_PITCH:
        axes.annotate(
            text, (at, end), xytext=(0, -2.5 if below else 1.5), textcoords="offset points", ha="center",
            va="top" if below else "bottom", fontsize=SMALL, linespacing=1.05, rotation=0 if pitch >= NUMBER_PITCH else 90,
        )  # fmt: skip


def room_above(axes: Axes, rows: Sequence[Accuracy], pitch: float) -> None:
    """From zero, since a bar's length is what is compared, to a little above what is written over the highest whisker."""
    room = 1.12 if pitch >= NUMBER_PITCH else 1.22
    axes.set_ylim(0, max([100 * _top(row) for row in rows], default=0.0) * room or 1.0)


def _name_bars(axes: Axes, places: Mapping[str, float], pitch: float, group: Group) -> None:
    names = [_legend_name(name, [group]) for name in places]
    room = pitch - 0.06
    broken = [style.wrapped(name, room) for name in names]
    lines = [line for name in broken for line in name.split("\n")]
    turned = any("…" in line or style.text_width(line, SMALL) > room for line in lines)
    axes.set_xticks(list(places.values()), names if turned else broken, fontsize=SMALL)
    if turned:
        for label in axes.get_xticklabels():
            label.set(rotation=32, ha="right", rotation_mode="anchor")


def _legend_name(name: str, groups: Sequence[Group]) -> str:
    metrics = {group.rows[name].metric for group in groups if name in group.rows}
    usual = {row.metric for group in groups for row in group.rows.values() if row.condition == "none"}
    suffix = f" ({', '.join(sorted(metrics))})" if metrics - usual and usual else ""
    return style.shown(wording.condition_name(name, [group.folder for group in groups])) + suffix


def _metrics_word(groups: Sequence[Group]) -> str:
    found = list(dict.fromkeys(row.metric for group in groups for row in group.rows.values()))
    base = {row.metric for group in groups for row in group.rows.values() if row.condition == "none"}
    return (
        f"Accuracy, {found[0]}" if len(found) == 1 and found != ["pass@1"] else "Accuracy" if base else ", ".join(found)
    )


def _broken(label: str, room: float) -> str:
    return "\n".join(style.wrapped(style.shown(line), room) for line in label.split("\n"))


def legend_columns(handles: Sequence[Patch | Line2D], width: float) -> int:
    """As many entries side by side as the picture's width has room for."""
    widths = [style.text_width(str(handle.get_label()), style.NORMAL) + 0.38 for handle in handles]
    return len(handles) if sum(widths) <= width else max(1, int(width / max(widths)))
