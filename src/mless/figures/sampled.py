"""Accuracy by filler length, and what several samples show: pass@k, votes and diversity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mless.errors import BadFolder
from mless.figures import style
from mless.figures.accuracy import (
    MARKERS,
    NUMBER_PITCH,
    caption_of,
    control_words,
    labels_of,
    legend_columns,
    looks_of,
    put_bar,
    room_above,
    together,
    with_control,
    write_number,
)
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results import wording
from mless.results.answers import BestOnDev, StoredAnswers, shown_rows
from mless.results.figure_kinds import Drawing
from mless.results.schemas import Accuracy


def sweep_of(given: Drawing) -> Picture:
    return draw_sweep([StoredAnswers.open(path) for path in given.paths], given.spec.conditions)


def diversity_of(given: Drawing) -> Picture:
    return draw_diversity([StoredAnswers.open(path) for path in given.paths], given.spec.conditions)


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
    labels = [label.replace("\n", ", ") for label in labels_of(folders)]
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
        handles=handles,
        loc="outside upper center",
        ncols=legend_columns(handles, width),
        handlelength=1.6,
        columnspacing=1.4,
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
    """The length that the dev items choose, by the same rule as the verdict."""
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
    """The chosen length and `none` on the test split, drawn a little beside the dev split's line."""
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
    said.append(control_words([sweep.control for sweep in sweeps]))
    said.append(wording.rates_words(rows))
    said.append(wording.drawn_words(folders))
    return caption_of(said)


# ---- pass@k and diversity ----------------------------------------------------------------------------------------------------


def draw_diversity(folders: Sequence[StoredAnswers], conditions: Sequence[str]) -> Picture:
    """pass@k, the share of an item's 2-grams that are different, and what was cut off or gave no answer; one row of panels per folder."""
    width = PAGE_WIDTH
    wide, narrow = 0.44, 0.2  # of the width, for bars that are so many and so few
    figure = style.new_figure(width, 0.95 + 2.1 * len(folders))
    grid = figure.add_gridspec(len(folders), 3, width_ratios=[wide, narrow, narrow * 1.15])
    shown: list[Accuracy] = []
    names = list(dict.fromkeys(name for folder in folders for name in with_control(folder, folder.run_of(conditions))))
    looks = looks_of(names, folders)
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
        handles=handles,
        loc="outside upper center",
        ncols=legend_columns(handles, width),
        handlelength=1.3,
        columnspacing=1.4,
    )
    mean = {name: [row.tokens for row in shown if row.condition == name and row.tokens is not None] for name in names}
    lengths = ", ".join(
        f"{wording.condition_name(name, folders)} {np.mean(found):.0f}" for name, found in mean.items() if found
    )
    note = caption_of(
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
                put_bar(axes, number * step + names.index(row.condition), row, looks[row.condition], pitch)
    room_above(axes, [row for row in rows if row.metric in metrics], pitch)
    _name_groups(axes, ["" if metric == "diversity" else metric for metric in metrics], len(names))


def _put_bar_rates(axes: Axes, rows: Sequence[Accuracy], looks: Mapping[str, Mapping[str, Any]], room: float) -> None:
    """Bars of the shares cut off and without answer, conditions side by side. They count answers, whatever the metric."""
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
                write_number(axes, at, 100 * value, wording.percent(value), pitch)
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
