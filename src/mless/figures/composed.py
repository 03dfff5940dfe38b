"""The published pictures whose left half shows accuracy and whose right half shows attention."""

from __future__ import annotations

from collections.abc import Sequence

from mless.figures import accuracy, attention, style
from mless.figures.panels import ChosenPanel
from mless.figures.style import PAGE_WIDTH, Picture
from mless.results.answers import StoredAnswers
from mless.values import QuerySet

#: Left, right; the rest is between them.
SHARES = (0.5, 0.5)


def draw_composed(
    folders: Sequence[StoredAnswers],
    panels: Sequence[ChosenPanel],
    conditions: Sequence[str],
    *,
    queries: QuerySet,
    omit_first: bool | None,
) -> Picture:
    """Left the accuracy of each model under the conditions and the A/A control, right the curves of one head under them."""
    groups = accuracy.groups_of(folders, conditions)
    plots = attention.plan_curves(panels, conditions, queries=queries, omit_first=omit_first)
    figure = style.new_figure(PAGE_WIDTH, attention.grid_height(plots, 1) + 0.75)
    left, right = figure.subfigures(1, 2, width_ratios=list(SHARES), squeeze=False)[0]
    accuracy.put_bars(left, groups, PAGE_WIDTH * SHARES[0])
    curves = attention.put_curves(right, plots, PAGE_WIDTH * SHARES[1], queries)
    note = f"Left: {accuracy.bars_note(groups)} Right: {curves}"
    style.add_caption(figure, accuracy.together(note))
    reading = f"Left half. {accuracy.READING} Right half. {attention.READING['conditions']}"
    title = f"{accuracy.bars_title(groups)}; {attention.curves_title(panels)}"
    return Picture(figure, title, style.shown(f"{reading} {note}"))
