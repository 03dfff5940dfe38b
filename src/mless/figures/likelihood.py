"""Pictures of log-probabilities: what each condition changes, with its interval, and where along the reference solution it does so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mless.errors import BadFolder
from mless.figures import style
from mless.figures.accuracy import caption_of, labels_of, legend_columns, looks_of, together, with_control
from mless.figures.style import PAGE_WIDTH, SMALL, Picture
from mless.results.along import FEWEST, binned, bins_of, fewest
from mless.results.figure_kinds import Drawing
from mless.results.nats import LIKELIHOOD_METRICS, signed, size, unit_of_change
from mless.results.reading import StoredLikelihood
from mless.results.schemas import Effect
from mless.results.wording import condition_name, p_value

#: Metrics with a panel, where they were measured.
SHOWN = ("solution", "contrast", "answer", "choice", "margin")
#: Panels side by side; more go below.
ACROSS = 3
#: Inches of one condition's row.
ROW = 0.24
#: How lines differ once all colours are used.
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
#: Bins that have a panel of their own: the first eight tokens.
FIRST = 4
#: Changes on an axis.
_SIGNED = FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if round(value, 9) else "0")
#: Rows of tokens under one another, where one item is shown; a longer solution has more tokens in each.
MOST_ROWS = 6


@dataclass(frozen=True, slots=True)
class Compared:
    """A folder's conditions that are compared with `none`, the A/A control first."""

    folder: StoredLikelihood
    label: str
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        return style.shown(self.label.replace("\n", ", "))

    def name_of(self, condition: str) -> str:
        return style.shown(condition_name(condition, [self.folder]))


def _compared(given: Drawing) -> list[Compared]:
    """What the figure asks for and was run; everything where it asks for nothing by name."""
    folders = [StoredLikelihood.open(path) for path in given.paths]
    found: list[Compared] = []
    for folder, label in zip(folders, labels_of(folders), strict=True):
        run = folder.run_of(given.spec.conditions) if given.spec.conditions else list(folder.conditions)
        names = [name for name in with_control(folder, run) if name != "none"]
        if not set(names) - {folder.control}:
            raise BadFolder(
                f"{folder.path}: nothing to compare with none among {', '.join(run)}; run the study with --conditions none,mless"
            )
        found.append(Compared(folder, label, tuple(names)))
    return found


def _colours(groups: Sequence[Compared]) -> dict[str, str]:
    """As in the pictures of accuracy; the A/A control is grey."""
    names = list(dict.fromkeys(name for group in groups for name in group.names))
    looks = looks_of(names, [group.folder for group in groups])
    controls = {group.folder.control for group in groups}
    return {name: "0.45" if name in controls else look["facecolor"] for name, look in looks.items()}


def _about(groups: Sequence[Compared]) -> str:
    """``SmolLM2 on gsm8k.``; of several folders only what they were asked, since their names stand in the picture."""
    tasks = list(dict.fromkeys(group.folder.task for group in groups))
    return f"{groups[0].folder.label} on {tasks[0]}." if len(groups) == 1 else f"{', '.join(tasks)}."


def _add_caption(figure: Figure, note: str) -> None:
    """A condition's name stays on one line."""
    style.add_caption(figure, together(note).replace("w/ ", "w/\u00a0"))


# ---- effects ---------------------------------------------------------------------------------------------------------


def effects_of(given: Drawing) -> Picture:
    """Conditions as rows, a panel for each metric; folders as groups of rows."""
    groups = _compared(given)
    rows = [{(row.metric, row.condition): row for row in group.folder.effects()} for group in groups]
    metrics = [name for name in SHOWN if any(metric == name for found in rows for metric, _ in found)]
    across = min(ACROSS, len(metrics))
    deep = -(-len(metrics) // across)
    headed = len(groups) > 1
    places = _places(groups, headed=headed)
    last = max(place for found in places for place in found.values())
    width = PAGE_WIDTH * (0.62, 0.8, 1.0)[across - 1]
    figure = style.new_figure(width, deep * (0.75 + ROW * (last + 1.5)) + 0.95)
    grid = figure.add_gridspec(deep, across)
    colours = _colours(groups)
    for number, metric in enumerate(metrics):
        axes = figure.add_subplot(grid[divmod(number, across)])
        for group, found, at in zip(groups, rows, places, strict=True):
            shown = {name: found[metric, name] for name in group.names if (metric, name) in found}
            _put_effects(axes, group, shown, at, colours)
        _finish_panel(axes, metric, last)
        _name_rows(axes, groups, places, headed=headed, named=number % across == 0)
    shown = [row for found, group in zip(rows, groups, strict=True) for row in _of(found, metrics, group.names)]
    handles = _marks_explained(groups, shown)
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=legend_columns(handles, width),
        handlelength=1.3,
        columnspacing=1.3,
    )
    note = _effects_note(groups, shown)
    _add_caption(figure, note)
    title = "Change of log-probabilities by condition: " + "; ".join(group.title for group in groups)
    return Picture(figure, style.shown(title), style.shown(f"{_EFFECTS_READING} {note}"))


_EFFECTS_READING = (
    "Each row is a condition: its change against no filler, whiskers 95 % intervals over items; right of 0 the text becomes likelier. "
    "Contrast is the answer's change less that of other answers in the same prompt, so form is taken out of it."
)


def _of(found: Mapping[tuple[str, str], Effect], metrics: Sequence[str], names: Sequence[str]) -> list[Effect]:
    return [found[metric, name] for metric in metrics for name in names if (metric, name) in found]


def _places(groups: Sequence[Compared], *, headed: bool) -> list[dict[str, float]]:
    """Where each condition's row stands, from the top; a folder's name has a row above its own."""
    found: list[dict[str, float]] = []
    start = 0.0
    for group in groups:
        start += headed
        found.append({name: start + number for number, name in enumerate(group.names)})
        start += len(group.names) + 0.4 * headed
    return found


def _scale(metric: str) -> float:
    return 100.0 if LIKELIHOOD_METRICS[metric].share else 1.0


def _put_effects(
    axes: Axes, group: Compared, rows: Mapping[str, Effect], at: Mapping[str, float], colours: Mapping[str, str]
) -> None:
    margins = {row.margin for row in rows.values()} - {None}
    for margin in margins:  # one, unless a table was put together from several
        reach = _scale(next(iter(rows.values())).metric) * float(margin or 0)
        ends = (min(at.values()) - 0.5, max(at.values()) + 0.5)
        axes.fill_betweenx(ends, [-reach] * 2, [reach] * 2, color="0.5", alpha=0.18, linewidth=0, zorder=0.5)
    for name, row in rows.items():
        by = _scale(row.metric)
        colour, y = colours[name], at[name]
        if row.lo is not None and row.hi is not None and math.isfinite(row.lo) and math.isfinite(row.hi):
            axes.hlines(y, by * row.lo, by * row.hi, color=colour, linewidth=1.3)
        axes.plot(by * row.delta, y, **_mark(row, control=name == group.folder.control), **_ink(row, colour))
        p = "" if row.verdict is None else p_value(row.p_adjusted) + ("†" if row.skewed else "")
        axes.annotate(
            p, (1.0, y), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points", va="center_baseline", fontsize=SMALL,
            color="0.3",
        )  # fmt: skip


def _mark(row: Effect, *, control: bool) -> dict[str, Any]:
    """Round: rises, drops or undecided; square: equivalent; the A/A control is a diamond."""
    marker = "D" if control else "s" if row.verdict == "equivalent" else "o"
    return {"marker": marker, "markersize": {"o": 4.6, "s": 4.0, "D": 3.2}[marker], "linestyle": "none", "zorder": 3}


def _ink(row: Effect, colour: str) -> dict[str, Any]:
    """Filled where something changes; the control is filled too, because nothing is asked of it."""
    hollow = row.verdict in ("undecided", "equivalent")
    return {
        "color": colour,
        "markerfacecolor": "white" if hollow else colour,
        "markeredgewidth": 1.1 if hollow else 0.6,
    }


def _finish_panel(axes: Axes, metric: str, last: float) -> None:
    axes.axvline(0, color="0.25", linewidth=0.6, zorder=1)
    axes.set_ylim(last + 0.7, -1.0)
    axes.margins(x=0.06)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10], min_n_ticks=3))
    axes.xaxis.set_major_formatter(_SIGNED)
    axes.set_xlabel(f"Δ {unit_of_change(metric)}")
    axes.set_title(metric, fontweight="bold", fontsize=style.NORMAL, pad=13.0)
    for text, x, y, aside in ((LIKELIHOOD_METRICS[metric].words, 0.5, 3.0, "center"), ("p", 1.0, -7.0, "left")):
        axes.annotate(
            text, (x, 1.0), xycoords="axes fraction", xytext=(3.0 * (aside == "left"), y), textcoords="offset points", ha=aside, va="bottom",
            fontsize=SMALL, color="0.3",
        )  # fmt: skip


def _name_rows(
    axes: Axes, groups: Sequence[Compared], places: Sequence[Mapping[str, float]], *, headed: bool, named: bool
) -> None:
    at = [place for found in places for place in found.values()]
    names = [style.cut(group.name_of(name), 1.5) for group in groups for name in group.names]
    axes.set_yticks(at, names if named else [""] * len(names), fontsize=style.NORMAL)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for group, found in zip(groups, places, strict=True):
        if headed and named:
            # Over the panels, where their row is empty; beside them it would take their room.
            axes.text(
                0.0, min(found.values()) - 1, style.cut(group.title, 4.0), transform=axes.get_yaxis_transform(), va="center_baseline",
                fontweight="bold", zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            ).set_in_layout(False)  # fmt: skip


def _marks_explained(groups: Sequence[Compared], rows: Sequence[Effect]) -> list[Patch | Line2D]:
    """Only what is in the picture."""
    verdicts = {row.verdict for row in rows}
    controls = {group.folder.control for group in groups}
    handles: list[Patch | Line2D] = []
    for label, marker, face, there in (
        ("rises or drops", "o", "0.2", verdicts & {"rises", "drops"}),
        ("undecided", "o", "white", "undecided" in verdicts),
        ("equivalent", "s", "white", "equivalent" in verdicts),
        ("w/o again (A/A)", "D", "0.45", controls - {None}),
    ):
        if there:
            edge = face if face != "white" else "0.2"
            handles.append(
                Line2D([], [], linestyle="none", marker=marker, markersize=4.4, markerfacecolor=face, markeredgecolor=edge, label=label)
            )  # fmt: skip
    return [*handles, Patch(facecolor="0.5", alpha=0.18, label="± margin: would not matter")]


def _effects_note(groups: Sequence[Compared], rows: Sequence[Effect]) -> str:
    counts = sorted({row.n for row in rows})
    items = f"n = {'–'.join(dict.fromkeys((f'{counts[0]:,}', f'{counts[-1]:,}')))} items"
    tested = [row for row in rows if row.verdict is not None]
    again = " and none again" if any(row.p_again is not None for row in tested) else ""
    said = [
        f"{_about(groups)} {items}. Δ against none{again}, item by item, with 95 % intervals over items; p by sign flips and by the interval "
        "(the largest), Holm over the conditions of a metric.",
        _control_words(groups, rows),
        f"Margins: {margins}." if (margins := _sizes(rows, "margin")) else "",
        f"Smallest Δ these items show with 80 % power: {sizes}." if (sizes := _sizes(tested, "mde")) else "",
        "†: a few items decide the interval." if any(row.skewed for row in tested) else "",
    ]
    return caption_of(said)


def _control_words(groups: Sequence[Compared], rows: Sequence[Effect]) -> str:
    own = [row for row in rows if row.condition in {group.folder.control for group in groups}]
    if not own:
        return "No A/A control was run."
    worst = max(own, key=lambda row: abs(row.delta) / (row.margin or 1.0))
    if not worst.delta:
        return "A/A (w/o again): no number differs."
    return (
        f"A/A (w/o again): up to {signed(worst.delta, worst.metric)} {unit_of_change(worst.metric)} ({worst.metric})."
    )


def _sizes(rows: Sequence[Effect], column: str) -> str:
    """``solution 0.0003–0.0139 nats a token; contrast …``: the range of a column, by metric."""
    said: list[str] = []
    for metric in dict.fromkeys(row.metric for row in rows):
        every: list[float | None] = [getattr(row, column) for row in rows if row.metric == metric]
        found = [one for one in every if one is not None]
        if found:
            ends = dict.fromkeys((size(min(found), metric), size(max(found), metric)))
            said.append(f"{metric} {'–'.join(ends)} {unit_of_change(metric)}")
    return "; ".join(said)


# ---- along the solution ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """Δ log p of every token of the solutions: condition → item → its tokens. A control that changes nothing is left out."""

    group: Compared
    deltas: Mapping[str, Mapping[str, Float64[np.ndarray, " tokens"]]]

    @property
    def items(self) -> list[str]:
        return list(next(iter(self.deltas.values())))

    @property
    def longest(self) -> int:
        return max(map(len, next(iter(self.deltas.values())).values()))


def along_of(given: Drawing) -> Picture:
    """The mean over items by position in the solution, or one item token by token."""
    courses = [_course(group, given.item) for group in _compared(given)]
    return _draw_mean(courses) if given.item is None else _draw_item(courses)


def _course(group: Compared, item: str | None) -> Course:
    folder = group.folder
    chosen = None if item is None else folder.item_id(item)
    deltas = folder.solution_changes(group.names, item=chosen)
    if not any(deltas.values()):
        if chosen is not None and folder.solution_length() is not None:
            raise BadFolder(f"{folder.path}: item {chosen!r} has no reference solution; choose another with --item")
        raise BadFolder(
            f"{folder.path}: its items have no reference solutions, so there is nothing along which to draw; name their field with "
            "--solution-field and run the study again, or draw its effects: mless figure effects"
        )
    still = folder.control is not None and not any(one.any() for one in deltas.get(folder.control, {}).values())
    return Course(group, {name: own for name, own in deltas.items() if not (still and name == folder.control)})


def _draw_mean(courses: Sequence[Course]) -> Picture:
    """Two panels a folder: the first tokens change by much more than the others, so each part has a scale of its own."""
    drawn = [_drawn(course) for course in courses]
    parts = [(0, FIRST), (FIRST, max(drawn))] if max(drawn) > FIRST else [(0, max(drawn))]
    width = PAGE_WIDTH * (1.0 if len(parts) > 1 else 0.62)
    figure = style.new_figure(width, 0.85 + 2.4 * len(courses))
    grid = figure.add_gridspec(len(courses), len(parts), width_ratios=[stop - start for start, stop in parts])
    looks = _line_looks(courses)
    for column, (start, stop) in enumerate(parts):
        every: list[Axes] = []
        for row, (course, last) in enumerate(zip(courses, drawn, strict=True)):
            if start >= last:
                continue
            axes = figure.add_subplot(grid[row, column])
            every.append(axes)
            _put_bins(axes, course, looks, start, min(stop, last))
            axes.set_xlim(start - 0.5, stop - 0.5)
            if not column:
                axes.set_ylabel("Δ log p against w/o (nats)")
                if len(courses) > 1:
                    axes.set_title(course.group.title, loc="left", fontweight="bold")
        _share_y(every)
        every[-1].set_xlabel("Token of the reference solution")
    _add_legend(figure, courses, looks, width)
    counts = " / ".join(dict.fromkeys(str(len(course.items)) for course in courses))
    few = " / ".join(dict.fromkeys(str(fewest(len(course.items))) for course in courses))
    half = " (half of them)" if any(fewest(len(course.items)) < FEWEST for course in courses) else ""
    note = caption_of(
        [
            f"{_about([course.group for course in courses])} Mean over n = {counts} items of an item's mean Δ log p in the bin, with its 95 % "
            f"band over items. Below each bin: how many solutions reach it; cut where fewer than {few}{half} do.",
            "The two parts have different scales." if len(parts) > 1 else "",
            _still_words(courses),
        ]
    )
    _add_caption(figure, note)
    return _picture(figure, courses, f"{_ALONG_READING} {note}")


def _drawn(course: Course) -> int:
    """How many bins have enough items."""
    bins = bins_of(course.longest)
    lengths = np.array([len(own) for own in next(iter(course.deltas.values())).values()])
    return max(1, sum(int((lengths >= first).sum()) >= fewest(len(course.items)) for first, _ in bins))


_ALONG_READING = (
    "How much likelier each token of the reference solution becomes against no filler, by its position in the solution: bins of 1, 1, 2, 4, 8 … "
    "tokens. Above 0 the condition helps there."
)


def _picture(figure: Figure, courses: Sequence[Course], said: str) -> Picture:
    title = "Δ log p along the reference solution: " + "; ".join(course.group.title for course in courses)
    return Picture(figure, style.shown(title), style.shown(said))


def _still_words(courses: Sequence[Course]) -> str:
    left_out = [one for one in courses if one.group.folder.control and one.group.folder.control not in one.deltas]
    return "A/A (w/o again): no token differs." if left_out else ""


def _line_looks(courses: Sequence[Course]) -> dict[str, dict[str, Any]]:
    """A colour and a dash for each condition; dashes differ once colours repeat."""
    colours = _colours([course.group for course in courses])
    used: dict[str, int] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for course in courses for name in course.deltas):
        number = used.get(colours[name], 0)
        used[colours[name]] = number + 1
        found[name] = {"color": colours[name], "linestyle": DASHES[number % len(DASHES)]}
    return found


def _put_bins(axes: Axes, course: Course, looks: Mapping[str, Mapping[str, Any]], start: int, stop: int) -> None:
    """Bins `start` to `stop`."""
    bins = bins_of(course.longest)[start:stop]
    axes.axhline(0, color="0.25", linewidth=0.6, zorder=1)
    counts = np.zeros(len(bins), int)
    for number, name in enumerate(course.deltas):
        found = binned(course.deltas[name])
        mean, lo, hi, counts = (np.asarray(part)[start:stop] for part in (found.mean, found.lo, found.hi, found.n))
        # Side by side, so that one condition's marks do not hide another's.
        shift = (number - (len(course.deltas) - 1) / 2) * min(0.12, 0.6 / len(course.deltas))
        at = np.arange(start, stop) + shift
        colour = looks[name]["color"]
        axes.fill_between(at, lo, hi, color=colour, alpha=0.12 if len(course.deltas) <= 3 else 0.06, linewidth=0)
        axes.vlines(at, lo, hi, color=colour, linewidth=0.8, alpha=0.7)
        axes.plot(at, mean, **looks[name], marker="o", markersize=2.8, linewidth=1.0)
    words = [str(first) if first == last else f"{first}–{last}" for first, last in bins]
    reached = [f"n = {n}" if not at else str(n) for at, n in enumerate(counts.tolist())]
    axes.set_xticks(range(start, stop), [f"{one}\n{n}" for one, n in zip(words, reached, strict=True)])
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3))
    axes.yaxis.set_major_formatter(_SIGNED)


def _share_y(every: Sequence[Axes]) -> None:
    """One scale for all, so that they can be compared."""
    reaches = [axes.get_ylim() for axes in every]
    for axes in every:
        axes.set_ylim(min(low for low, _ in reaches), max(high for _, high in reaches))


def _add_legend(
    figure: Figure, courses: Sequence[Course], looks: Mapping[str, Mapping[str, Any]], width: float
) -> None:
    folders = [course.group.folder for course in courses]
    handles = [
        Line2D([], [], linewidth=1.6, label=style.shown(condition_name(name, folders)), **look)
        for name, look in looks.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=legend_columns(handles, width),
        handlelength=1.8,
        columnspacing=1.4,
    )


def _draw_item(courses: Sequence[Course]) -> Picture:
    """Every token's Δ, with its text on the axis; long solutions go on in further rows."""
    rows = [(course, *part) for course in courses for part in _parts(course.longest)]
    width = style.labelled_width(max(stop - start for _, start, stop in rows))
    figure = style.new_figure(width, 0.85 + 1.75 * len(rows))
    grid = figure.add_gridspec(len(rows), 1)
    looks = _line_looks(courses)
    every: list[Axes] = []
    for row, (course, start, stop) in enumerate(rows):
        axes = figure.add_subplot(grid[row, 0])
        every.append(axes)
        _put_tokens(axes, course, looks, start, stop, width - 0.7)
        if len(courses) > 1 and start == 0:
            style.set_title(axes, (course.group.title, style.TITLE))
    _share_y(every)
    _add_legend(figure, courses, looks, width)
    named = ", ".join(dict.fromkeys(course.items[0] for course in courses))
    sums = "; ".join(
        f"{course.group.name_of(name)} {signed(float(own[course.items[0]].sum()), 'answer')}"
        for course in courses
        for name, own in course.deltas.items()
    )
    note = caption_of(
        [
            f"{_about([course.group for course in courses])} One item: {named}. Sum over the solution, in nats: {sums}.",
            _still_words(courses),
        ]
    )
    _add_caption(figure, note)
    reading = "How much likelier each token of one reference solution becomes against no filler. Above 0 the condition helps there."
    return _picture(figure, courses, f"{reading} {note}")


def _parts(tokens: int) -> list[tuple[int, int]]:
    """Rows of about the same length, as few as have room for every token's text."""
    count = min(MOST_ROWS, -(-tokens // style.MOST_LABELS))
    step = -(-tokens // count)
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _put_tokens(
    axes: Axes, course: Course, looks: Mapping[str, Mapping[str, Any]], start: int, stop: int, room: float
) -> None:
    tokens = course.group.folder.solution_tokens(course.items[0])
    axes.axhline(0, color="0.25", linewidth=0.6, zorder=1)
    heights = dict.fromkeys(range(start, stop), 0.0)
    at = np.arange(start, stop)
    for name, own in course.deltas.items():
        here = own[course.items[0]][start:stop]
        axes.plot(at, here, **looks[name], marker="o", markersize=2.0, linewidth=0.9)
        heights = {
            place: max(heights[place], abs(value)) for place, value in zip(at.tolist(), here.tolist(), strict=True)
        }
    # Rows are equally long, also the last one.
    step = _parts(course.longest)[0][1]
    axes.set_xlim(start - 0.5, start + step - 0.5)
    shown = style.label_places(heights, step, room)
    axes.set_xticks(shown, [style.shown_token(tokens[place]) for place in shown], rotation=90, fontsize=SMALL)
    axes.annotate(
        f"tokens {start + 1}–{stop}", (1.0, 1.0), xycoords="axes fraction", ha="right", va="bottom", fontsize=SMALL, color="0.3"
    )  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], min_n_ticks=3))
    axes.yaxis.set_major_formatter(_SIGNED)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("Δ log p (nats)")
