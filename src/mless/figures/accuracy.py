"""Pictures of accuracy: bars by condition, accuracy by filler length, pass@k beside the diversity of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.errors import BadFolder
from mless.figures import style
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results import wording
from mless.results.answers import BestOnDev, StoredAnswers, shown_rows
from mless.results.schemas import Accuracy

#: Bars this far apart, in inches, have room above them for a p-value, for a number, for a number that is turned.
WORDS_PITCH, NUMBER_PITCH, TURNED_PITCH = 0.52, 0.27, 0.12
#: Below it a whole per cent stands upright.
RATE_PITCH = 0.2
#: How a bar or line is told from others when the colours have all been used.
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
    "Top: share of items answered right under each condition, whiskers 95 % intervals; below each bar the share of answers that were cut off, "
    "and of those in which no answer was found. Bottom: the change against no filler, item by item; "
    "the grey mark is the same prompts run again, and a change no larger than that is no finding."
)


def bars_title(groups: Sequence[Group]) -> str:
    return style.shown(
        "Accuracy by condition: " + "; ".join(dict.fromkeys(g.label.replace("\n", ", ") for g in groups))
    )


def groups_of(folders: Sequence[StoredAnswers], conditions: Sequence[str]) -> list[Group]:
    """Per folder the rows of the conditions asked for that were run, named by what tells the folders apart."""
    rows = [_rows(folder, conditions) for folder in folders]
    return [Group(*parts) for parts in zip(folders, _labels(folders), rows, strict=True)]


def _labels(folders: Sequence[StoredAnswers]) -> list[str]:
    """The model's name, with the task below it and then the folder's name where that is what differs."""
    labels = [folder.label for folder in folders]
    if len({folder.task for folder in folders}) > 1:
        labels = [f"{folder.label}\n{folder.task}" for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [f"{label}\n{folder.path.name}" for label, folder in zip(labels, folders, strict=True)]
    return labels


def _rows(folder: StoredAnswers, conditions: Sequence[str]) -> dict[str, Accuracy]:
    found = shown_rows(folder.accuracy(), folder.conditions)
    run = [name for name in _with_control(folder, folder.run_of(conditions)) if name in found]
    if not run:
        raise BadFolder(
            f"{folder.path}: accuracy.parquet holds none of {', '.join(conditions)} over all items; run the study again"
        )
    return {name: found[name] for name in run}


def _with_control(folder: StoredAnswers, conditions: Sequence[str]) -> list[str]:
    """The A/A control stands beside `none` wherever accuracy is shown, also where a figure does not name it."""
    named = [name for name in conditions if name != folder.control]
    at = named.index("none") + 1 if "none" in named else 0
    return [*named[:at], *([folder.control] if folder.control else []), *named[at:]]


def put_bars(place: FigureBase, groups: Sequence[Group], width: float) -> None:
    """Draw the bars, what was cut off or gave no answer, and the strip of changes into a figure or a part of one, `width` inches wide."""
    names = list(dict.fromkeys(name for group in groups for name in group.rows))
    looks = _looks(names, [group.folder for group in groups])
    at = _places(groups)
    slots = max(max(places.values()) for places in at) + 1
    pitch = (width - 0.6) / slots
    grid = place.add_gridspec(3, 1, height_ratios=[1.6, 0.22 if pitch >= RATE_PITCH else 0.4, 1.0])
    bars, rates, strip = (place.add_subplot(grid[line, 0]) for line in range(3))
    for group, places in zip(groups, at, strict=True):
        for name, row in group.rows.items():
            _put_bar(bars, places[name], row, looks[name], pitch)
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
    _room_above(bars, [row for group in groups for row in group.rows.values()], pitch)
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
            ncols=_columns(handles, width),
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
        _control_words([group.control for group in groups]),
        wording.smallest_words(rows),
        wording.rates_words(rows),
        wording.drawn_words(folders),
    ]
    return _caption(said)


def _caption(said: Sequence[str]) -> str:
    return style.shown(" ".join(filter(None, said)))


def together(note: str) -> str:
    """A line that begins with a per cent sign looks like a slip, so it does not leave its number."""
    return note.replace(" %", "\u00a0%")


def _control_words(controls: Sequence[Accuracy | None]) -> str:
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


def _looks(names: Sequence[str], folders: Sequence[StoredAnswers]) -> dict[str, dict[str, Any]]:
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


def _put_bar(axes: Axes, at: float, row: Accuracy, look: Mapping[str, Any], pitch: float) -> None:
    if row.value is None:
        return
    axes.bar(at, 100 * row.value, width=0.82, **look)
    if row.lo is not None and row.hi is not None:
        for colour, width in (("white", 2.2), ("0.15", 0.9)):  # a dark line with a light rim is seen on every bar
            axes.vlines(at, 100 * row.lo, 100 * row.hi, color=colour, linewidth=width)
    _write(axes, at, 100 * _top(row), wording.percent(row.value), pitch)


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
        _write(axes, at, min(ends) if below else max(ends), text, pitch, below=below)


def _put_rates(axes: Axes, group: Group, places: Mapping[str, float], pitch: float) -> None:
    """Two numbers under each bar: bars are only worth comparing where as many answers came to an end."""
    said = wording.percent if pitch >= WORDS_PITCH else wording.whole_percent
    for name, row in group.rows.items():
        for line, share in ((1, row.truncated), (0, row.no_answer)):
            axes.text(
                places[name], line, said(share), ha="center", va="center", fontsize=min(SMALL, 68 * pitch),
                rotation=0 if pitch >= RATE_PITCH else 90,
            )  # fmt: skip


def _write(axes: Axes, at: float, end: float, text: str, pitch: float, *, below: bool = False) -> None:
    """Beyond the end of a whisker; turned where bars are narrow, and left out where they are too narrow even for that."""
    if pitch >= TURNED_PITCH:
        axes.annotate(
            text, (at, end), xytext=(0, -2.5 if below else 1.5), textcoords="offset points", ha="center",
            va="top" if below else "bottom", fontsize=SMALL, linespacing=1.05, rotation=0 if pitch >= NUMBER_PITCH else 90,
        )  # fmt: skip


def _room_above(axes: Axes, rows: Sequence[Accuracy], pitch: float) -> None:
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
    told = f" ({', '.join(sorted(metrics))})" if metrics - usual and usual else ""
    return style.shown(wording.condition_name(name, [group.folder for group in groups])) + told


def _metrics_word(groups: Sequence[Group]) -> str:
    found = list(dict.fromkeys(row.metric for group in groups for row in group.rows.values()))
    base = {row.metric for group in groups for row in group.rows.values() if row.condition == "none"}
    return (
        f"Accuracy, {found[0]}" if len(found) == 1 and found != ["pass@1"] else "Accuracy" if base else ", ".join(found)
    )


def _broken(label: str, room: float) -> str:
    return "\n".join(style.wrapped(style.shown(line), room) for line in label.split("\n"))


def _columns(handles: Sequence[Patch | Line2D], width: float) -> int:
    """As many entries side by side as the picture's width has room for."""
    widths = [style.text_width(str(handle.get_label()), style.NORMAL) + 0.38 for handle in handles]
    return len(handles) if sum(widths) <= width else max(1, int(width / max(widths)))


# ---- accuracy by filler length ---------------------------------------------------------------------------------------------


#: What is shown beside every accuracy.
RATES: tuple[tuple[str, Callable[[Accuracy], float | None]], ...] = (
    ("cut off", lambda row: row.truncated),
    ("no answer", lambda row: row.no_answer),
)
#: How a value on the test split is drawn.
TESTED: dict[str, Any] = {"marker": "D", "markersize": 4, "markerfacecolor": "white", "zorder": 5}


@dataclass(frozen=True, slots=True)
class Choice:
    """The length that was best on the dev split, and what it and `none` reach on the test split."""

    length: int
    best: BestOnDev
    tested: Accuracy
    none: Accuracy


@dataclass(frozen=True, slots=True)
class Sweep:
    """One line: the conditions of one folder that differ in nothing but their filler's length, `none` at 0."""

    folder: StoredAnswers
    label: str
    rows: Mapping[int, Accuracy]
    control: Accuracy | None
    split: str
    choice: Choice | None


def draw_sweep(folders: Sequence[StoredAnswers], conditions: Sequence[str]) -> Picture:
    """Accuracy over filler length, one line per model; where there are two splits, the choice on dev and its value on test."""
    labels = [label.replace("\n", ", ") for label in _labels(folders)]
    sweeps = [
        sweep for folder, label in zip(folders, labels, strict=True) for sweep in _sweeps(folder, conditions, label)
    ]
    width = PAGE_WIDTH * 0.68
    figure = style.new_figure(width, 4.6 + 0.16 * len(sweeps))
    grid = figure.add_gridspec(3, 1, height_ratios=[3.2, 1.1, 1.1])
    axes = figure.add_subplot(grid[0, 0])
    below = [figure.add_subplot(grid[line, 0], sharex=axes) for line in (1, 2)]
    palette = (style.BLUE, style.VERMILLION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY, style.BLACK)
    handles: list[Any] = []
    for number, sweep in enumerate(sweeps):
        colour, marker = palette[number % len(palette)], MARKERS[number % len(MARKERS)]
        _put_sweep(axes, sweep, colour, marker)
        for strip, (_, share) in zip(below, RATES, strict=True):
            _put_sweep_rate(strip, sweep, share, colour, marker)
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=3.5, label=style.shown(sweep.label)))
    lengths = sorted({length for sweep in sweeps for length in sweep.rows})
    axes.set_xticks(lengths, [str(length) if length else "0\n(w/o)" for length in lengths])
    for one in (axes, below[0]):
        one.tick_params(axis="x", labelbottom=False)
    span = max(lengths) or 1
    axes.set_xlim(-0.04 * span, 1.05 * span)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], min_n_ticks=3))
    for strip, (name, _) in zip(below, RATES, strict=True):
        top = max(1.0, 1.12 * strip.dataLim.y1)
        strip.set_ylim(-0.08 * top, top)  # so that marks at zero are whole
        strip.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10], min_n_ticks=2))
        strip.set_ylabel(f"{name}\n(%)", fontsize=SMALL)
    below[-1].set_xlabel("Filler length (tokens)")
    figure.align_ylabels()
    split = sweeps[0].split
    axes.set_ylabel("Accuracy (%)" if split == "all" else f"Accuracy, {split} split (%)")
    if any(sweep.control is not None for sweep in sweeps):
        handles.append(Patch(facecolor="0.5", alpha=0.3, label="w/o to w/o again (A/A)"))
        again: dict[str, Any] = {"color": "0.4", "linestyle": "none", "marker": "x"}
        handles.append(Line2D([], [], markersize=5, label="w/o again", **again))
    if any(sweep.choice is not None for sweep in sweeps):
        shape: dict[str, Any] = {"color": "0.3", "linestyle": "none"}
        handles.append(Line2D([], [], marker="*", markersize=8, label="chosen on dev", **shape))
        handles.append(Line2D([], [], marker="D", markersize=4, markerfacecolor="white", label="on test", **shape))
    figure.legend(
        handles=handles, loc="outside upper center", ncols=_columns(handles, width), handlelength=1.6, columnspacing=1.4
    )
    note = _sweep_note(sweeps)
    style.add_caption(figure, together(note))
    title = "Accuracy by filler length: " + "; ".join(sweep.label for sweep in sweeps)
    reading = (
        "Accuracy against the number of filler tokens, band: 95 % interval; below, the share of answers that were cut off and of those in which "
        "no answer was found. The grey band lies between the two runs without filler; "
        "a best length chosen by looking is only worth what it reaches on items it was not chosen on."
    )
    return Picture(figure, style.shown(title), style.shown(f"{reading} {note}"))


def _sweeps(folder: StoredAnswers, conditions: Sequence[str], label: str) -> list[Sweep]:
    rows = folder.accuracy()
    split = "dev" if any(row.split == "dev" for row in rows) else "all"
    found = shown_rows(rows, folder.conditions, split)
    tested = shown_rows(rows, folder.conditions, "test") if split == "dev" else {}
    run = [name for name in folder.run_of(conditions) if name in found]
    lines = folder.swept(run)
    if not lines or "none" not in found:
        raise BadFolder(
            f"{folder.path}: a sweep needs none and one filler at two lengths or more among {', '.join(conditions)}; it holds "
            f"{', '.join(run) or 'none of them'}. `mless run fig8` makes such a folder"
        )
    sweeps: list[Sweep] = []
    for line in lines:
        names = {0: "none", **line}
        about = folder.conditions[line[max(line)]]
        more = f", {wording.filler_shown(about)} {about.get('placement')}" if len(lines) > 1 else ""
        sweeps.append(
            Sweep(
                folder,
                f"{label}{more}",
                {length: found[name] for length, name in names.items()},
                found.get(folder.control or ""),
                split,
                _choice(folder, names, tested) if tested else None,
            )
        )
    return sweeps


def _choice(folder: StoredAnswers, names: Mapping[int, str], tested: Mapping[str, Accuracy]) -> Choice | None:
    """The length that the dev items choose, by the rule that the verdict goes by."""
    best = folder.chosen(names.values())
    if best is None:
        return None
    length = next(length for length, name in names.items() if name == best.condition)
    return Choice(length, best, tested[best.condition], tested["none"])


def _put_sweep(axes: Axes, sweep: Sweep, colour: str, marker: str) -> None:
    lengths = sorted(sweep.rows)
    rows = [sweep.rows[length] for length in lengths]
    value, lo, hi = (
        np.array([np.nan if (v := getattr(row, name)) is None else 100 * v for row in rows])
        for name in ("value", "lo", "hi")
    )
    at = np.array(lengths, dtype=float)
    if sweep.control is not None and sweep.control.value is not None:
        low, high = sorted((float(value[0]), 100 * sweep.control.value))
        axes.fill_between([at[0], at[-1]], [low] * 2, [high] * 2, color="0.5", alpha=0.3, linewidth=0, zorder=0.8)
    axes.axhline(float(value[0]), color=colour, linewidth=0.7, linestyle=(0, (4, 2)), alpha=0.8, zorder=1)
    axes.fill_between(at, lo, hi, color=colour, alpha=0.13, linewidth=0)
    axes.plot(at, value, color=colour, marker=marker, markersize=3.5, linewidth=1.1)
    if sweep.choice is None:
        return
    best = lengths.index(sweep.choice.length)
    axes.plot(
        at[best],
        value[best],
        marker="*",
        markersize=9,
        color=colour,
        markeredgecolor="white",
        markeredgewidth=0.5,
        zorder=4,
    )
    for place, row in _tested(sweep, sweep.choice):
        if row.value is not None:
            if row.lo is not None and row.hi is not None:
                axes.vlines(place, 100 * row.lo, 100 * row.hi, color=colour, linewidth=1.0, zorder=4)
            axes.plot(place, 100 * row.value, markeredgecolor=colour, **TESTED)


def _tested(sweep: Sweep, choice: Choice) -> list[tuple[float, Accuracy]]:
    """Where the chosen length and `none` stand on the test split: a little beside the dev split's line, so as not to lie on it."""
    beside = 0.018 * max(sweep.rows)
    return [(choice.length + beside, choice.tested), (beside, choice.none)]


def _put_sweep_rate(
    axes: Axes, sweep: Sweep, share: Callable[[Accuracy], float | None], colour: str, marker: str
) -> None:
    """What of the answers was cut off, or gave no answer, under the conditions of one line and in its control."""

    def percent(row: Accuracy) -> float:
        return np.nan if (value := share(row)) is None else 100 * value

    lengths = sorted(sweep.rows)
    values = [percent(sweep.rows[length]) for length in lengths]
    axes.plot(lengths, values, color=colour, marker=marker, markersize=3, linewidth=0.9)
    if sweep.control is not None:
        axes.plot(0, percent(sweep.control), color="0.4", marker="x", markersize=5, linestyle="none", zorder=4)
    if sweep.choice is not None:
        for place, row in _tested(sweep, sweep.choice):
            axes.plot(place, percent(row), markeredgecolor=colour, **TESTED)


def _sweep_note(sweeps: Sequence[Sweep]) -> str:
    folders = list({id(sweep.folder): sweep.folder for sweep in sweeps}.values())
    rows = [row for sweep in sweeps for row in sweep.rows.values()]
    tasks = ", ".join(dict.fromkeys(folder.task for folder in folders))
    to_choose = " to choose on" if sweeps[0].choice is not None else ""
    said = [f"{tasks}. {wording.items_words(rows)}{to_choose}; {wording.statistics_words(folders, rows)}."]
    for sweep in sweeps:
        if sweep.choice is not None:
            words = wording.choice_words(sweep.choice.best, f"{sweep.choice.length} tokens")
            said.append(f"{sweep.label}: {words}" if len(sweeps) > 1 else words[0].upper() + words[1:])
    said.append(_control_words([sweep.control for sweep in sweeps]))
    said.append(wording.rates_words(rows))
    said.append(wording.drawn_words(folders))
    return _caption(said)


# ---- pass@k and diversity ----------------------------------------------------------------------------------------------------


def draw_diversity(folders: Sequence[StoredAnswers], conditions: Sequence[str]) -> Picture:
    """pass@k, the share of an item's 2-grams that are different, and what was cut off or gave no answer; one row of panels per folder."""
    width = PAGE_WIDTH
    wide, narrow = 0.44, 0.2  # of the width, for bars that are so many and so few
    figure = style.new_figure(width, 0.95 + 2.1 * len(folders))
    grid = figure.add_gridspec(len(folders), 3, width_ratios=[wide, narrow, narrow * 1.15])
    shown: list[Accuracy] = []
    names = list(dict.fromkeys(name for folder in folders for name in _with_control(folder, folder.run_of(conditions))))
    looks = _looks(names, folders)
    for line, folder in enumerate(folders):
        rows = [row for row in folder.accuracy() if row.split == "all" and row.condition in names]
        passes = list(dict.fromkeys(row.metric for row in rows if row.metric.startswith("pass@")))
        if not passes or not any(row.metric == "diversity" for row in rows):
            raise BadFolder(
                f"{folder.path}: no {'pass@k' if not passes else 'diversity'} in accuracy.parquet: it takes several samples per item; "
                f"run the study with --set accuracy.samples=4 --set accuracy.temperature=0.5 --set accuracy.k=1,3"
            )
        shown += rows
        left, middle, right = (figure.add_subplot(grid[line, column]) for column in range(3))
        _put_metrics(left, rows, passes, looks, room=width * wide)
        _put_metrics(middle, rows, ["diversity"], looks, room=width * narrow)
        _put_bar_rates(right, rows, looks, room=width * narrow * 1.15)
        left.set_ylabel("Items solved (%)")
        middle.set_ylabel("Different 2-grams (%)")
        right.set_ylabel("Answers (%)")
        title = f"{folder.label} on {folder.task}"
        style.set_title(left, style.fit_titles([(title, "")], width * wide)[title, ""])
        style.set_title(middle, ("2-gram diversity", style.TITLE))
        style.set_title(right, ("Cut off, no answer", style.TITLE))
    handles = [Patch(**looks[name], label=style.shown(wording.condition_name(name, folders))) for name in names]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=_columns(handles, width), handlelength=1.3, columnspacing=1.4
    )
    mean = {name: [row.tokens for row in shown if row.condition == name and row.tokens is not None] for name in names}
    lengths = ", ".join(
        f"{wording.condition_name(name, folders)} {np.mean(found):.0f}" for name, found in mean.items() if found
    )
    note = _caption(
        [
            f"{wording.items_words(shown)}; whiskers: 95 % intervals by item bootstrap.",
            f"Diversity falls with length; tokens per answer: {lengths or 'not known'}.",
            wording.rates_words(shown),
            wording.drawn_words(folders),
        ]
    )
    style.add_caption(figure, together(note))
    reading = (
        "Left: the chance that one of k answers to an item is right. Middle: of all pairs of neighbouring words in an item's answers, the share "
        "that are different. A condition that only makes answers more varied raises both as k grows. Right: the share of "
        "answers that were cut off, and of those in which no answer was found."
    )
    title = "pass@k and 2-gram diversity: " + ", ".join(folder.label for folder in folders)
    return Picture(figure, style.shown(title), style.shown(f"{reading} {note}"))


def _put_metrics(
    axes: Axes, rows: Sequence[Accuracy], metrics: Sequence[str], looks: Mapping[str, Mapping[str, Any]], room: float
) -> None:
    """Bars by metric, in each the conditions side by side."""
    names = list(looks)
    step = len(names) + 0.9
    pitch = room / (step * len(metrics))
    for number, metric in enumerate(metrics):
        for row in rows:
            if row.metric == metric:
                _put_bar(axes, number * step + names.index(row.condition), row, looks[row.condition], pitch)
    _room_above(axes, [row for row in rows if row.metric in metrics], pitch)
    _name_groups(axes, ["" if metric == "diversity" else metric for metric in metrics], len(names))


def _put_bar_rates(axes: Axes, rows: Sequence[Accuracy], looks: Mapping[str, Mapping[str, Any]], room: float) -> None:
    """Bars of what was cut off and of what gave no answer, in each the conditions side by side; they are of answers, whatever the metric."""
    names = list(looks)
    step = len(names) + 0.9
    pitch = room / (step * len(RATES))
    of = {row.condition: row for row in rows}
    highest = 0.0
    for number, (_, share) in enumerate(RATES):
        for name, row in of.items():
            value = share(row)
            if value is not None:
                at = number * step + names.index(name)
                axes.bar(at, 100 * value, width=0.82, **looks[name])
                _write(axes, at, 100 * value, wording.percent(value), pitch)
                highest = max(highest, 100 * value)
    axes.set_ylim(0, max(1.0, highest * (1.12 if pitch >= NUMBER_PITCH else 1.25)))
    _name_groups(axes, [name for name, _ in RATES], len(names))


def _name_groups(axes: Axes, labels: Sequence[str], bars: int) -> None:
    """Name each group of bars, and leave a slot free between groups."""
    step = bars + 0.9
    axes.set_xticks([number * step + (bars - 1) / 2 for number in range(len(labels))], labels)
    axes.set_xlim(-0.7, step * len(labels) - 1.2)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))
