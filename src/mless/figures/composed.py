"""The published pictures whose left half shows accuracy and whose right half shows attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mless.errors import BadStudy
from mless.figures import accuracy, attention, style
from mless.figures.panels import ChosenPanel, choose_panels
from mless.figures.style import PAGE_WIDTH, Picture
from mless.results.answers import StoredAnswers
from mless.results.figure_kinds import Drawing
from mless.results.reading import StoredResults, holds_answers
from mless.values import QuerySet

#: Left, right; the rest is between them.
SHARES = (0.5, 0.5)


def draw_conditions(given: Drawing) -> Picture:
    """Curves by condition, bars of answers, or both, as the folders have it."""
    answered = [path for path in given.paths if holds_answers(path)]
    graded = [StoredAnswers.open(path) for path in answered]
    attended = replace(given, paths=[path for path in given.paths if path not in answered])
    if graded and not attended.paths:
        return accuracy.draw_bars(graded, given.spec.conditions)
    if not graded:
        return attention.draw_panels(given)
    folders = [StoredResults.open(path) for path in attended.paths]
    chosen = choose_panels(given.spec, folders, layer=given.layer, heads=given.heads)
    if given.item is not None:
        raise BadStudy(
            f"figure {given.spec.id} with --item shows one prompt's attention; leave out the folders of answers, or leave out --item"
        )
    return draw_composed(graded, chosen, given.spec.conditions, queries=given.queries, omit_first=given.omit_first)


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
