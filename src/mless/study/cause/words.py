"""A cause study in words: who has to see the filler, which parts of which layers carry it, and how much of it the published chain explains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mless.results.cause_rows import CauseCell, CauseLink, LadderStep
from mless.results.caused import CHANGE_WORDS, DIRECTION_WORDS, LINK_WORDS, StoredCause, place_of, share_words, shown_at
from mless.results.nats import around, signed, unit_of_change
from mless.results.placed import shown_metrics
from mless.results.wording import p_words
from mless.stats.shares import can_reject, items_needed
from mless.values import condition_of, condition_words, counted, named_layers

#: How many cells of a map are named.
_NAMED = 5
#: With fewer items, if they are skewed, more than 5 % of maps without a cause name a cell (docs/statistics.md).
_ENOUGH = 24


def cause_lines(path: Path) -> list[str]:
    """An opening line, then for each metric the ladder, the map and the chain, and the limits."""
    stored = StoredCause.open(path)
    about = stored.about
    steps, cells, links = stored.steps(), stored.cells(), stored.links()
    rows = [*steps, *cells, *links]
    filler = rows[0].condition
    what = condition_words(condition_of(filler, about["conditions"][filler]))
    lines = [
        f"{about['model']['label']}, {counted(len(about['items']), 'item')} of {about['task']}: what the effect of {filler} ({what}) is made of, by "
        f"{' and '.join(about['inner'])}"
    ]
    shown = shown_metrics({row.metric for row in rows})
    for metric in shown:
        lines += _ladder([row for row in steps if row.metric == metric])
        lines += _map([row for row in cells if row.metric == metric])
        lines += _chain([row for row in links if row.metric == metric], about.get("layer_1_moved"))
    items = len(about["items"])
    return [
        *lines,
        *_others(shown, steps),
        *_limits(shown, steps, cells, items),
        *_hybrid(about.get("layers_without_attention") or []),
    ]


def _number(row: LadderStep) -> str:
    return f"{signed(row.delta, row.metric)}{around(row.lo, row.hi, row.metric)}"


def _ladder(rows: Sequence[LadderStep]) -> list[str]:
    if not rows:
        return []
    by = {(row.step, row.against): row for row in rows}
    whole = by["all", "none"]
    metric = whole.metric
    changes = {CHANGE_WORDS[row.step]: row for row in rows if row.adds_up}
    said = [
        f"{words} {_number(row)}{f' ({p_words(row.p_adjusted)})' if shown_at(row.p_adjusted) else ''}"
        for words, row in changes.items()
    ]
    total = f"{_number(whole)} {unit_of_change(metric)}, {p_words(whole.p)}"
    return [f"{metric}, the ladder: in all {total}. That is the sum of five changes: {'; '.join(said)}"]


def _map(rows: Sequence[CauseCell]) -> list[str]:
    lines: list[str] = []
    for direction, words in DIRECTION_WORDS.items():
        own = [row for row in rows if row.direction == direction]
        if not own:
            continue
        shown = sorted((row for row in own if shown_at(row.p_adjusted)), key=lambda row: -abs(row.effect))
        unknown = sum(row.share is None for row in own)
        blank = (
            f"; no shares, because the interval of the whole effect holds 0 ({unknown} of {len(own)} cells)"
            if unknown
            else ""
        )
        if not shown:
            lines.append(f"{own[0].metric}, the map, {words}: of {len(own)} cells none is shown to matter{blank}")
            continue
        named = "; ".join(f"{place_of(row)} {_amount(row)}" for row in shown[:_NAMED])
        more = f"; and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        lines.append(
            f"{own[0].metric}, the map, {words}: {len(shown)} of {len(own)} cells matter: {named}{more}{blank}"
        )
    return lines


def _amount(row: CauseCell) -> str:
    number = f"{signed(row.effect, row.metric)}{around(row.lo, row.hi, row.metric)}"
    return f"{share_words(row)}, {number}" if row.share is not None else number


def _chain(rows: Sequence[CauseLink], moved: object) -> list[str]:
    if not rows:
        return []
    metric = rows[0].metric
    lines: list[str] = []
    by = {(row.link, row.direction): row for row in rows}
    for direction, words in DIRECTION_WORDS.items():
        own = [
            by[link, direction]
            for link in ("attention-output", "mlp-activation", "elsewhere")
            if (link, direction) in by
        ]
        if all(row.share is None for row in own):
            lines.append(
                f"{metric}, the published chain, {words}: no shares, because the interval of the whole effect holds 0"
            )
            continue
        said = "; ".join(f"{LINK_WORDS[row.link]} {share_words(row)}" for row in own)
        lines.append(f"{metric}, the published chain, {words}: {said}")
    arm = by.get(("arm", "in"))
    if arm is not None:
        share = "" if arm.share is None else f"; of the filler's effect {share_words(arm)}"
        reach = arm.note or "it moves layer 1's activations as far as the filler does"
        lines.append(
            f"{metric}, ARM in layer 1 to compare: {signed(arm.effect, metric)}{around(arm.lo, arm.hi, metric)} {unit_of_change(metric)}{share}; {reach}"
        )
    if isinstance(moved, str):
        lines.append(f"{metric}, the chain has no activation of the first MLP: {moved}")
    return lines


def _others(shown: Sequence[str], steps: Sequence[LadderStep]) -> list[str]:
    """Metrics that the verdict is not about, but that the filler changes."""
    named = [
        f"{row.metric} {_number(row)} {unit_of_change(row.metric)}"
        for row in steps
        if (row.step, row.against) == ("all", "none") and row.metric not in shown and shown_at(row.p)
    ]
    return [f"the filler changes other metrics too, see the page: {'; '.join(named)}"] if named else []


def _hybrid(layers: Sequence[int]) -> list[str]:
    if not layers:
        return []
    return [
        f"{named_layers(layers)} without softmax attention: nothing can be cut there, so what the ladder calls unseen still reaches later tokens "
        "through them; the map has no attention of theirs"
    ]


def _limits(shown: Sequence[str], steps: Sequence[LadderStep], cells: Sequence[CauseCell], items: int) -> list[str]:
    said = [
        "shares need not add up to 100 %: where either of two ways is enough, taking one out changes nothing (docs/cause.md)"
    ]
    if cells:
        of_one = sum(row.metric == cells[0].metric for row in cells)
        said.append(f"cells matter where p ≤ 0.05 after Holm over the {of_one} of a metric")
        few, metric = min((row.n, row.metric) for row in cells if row.metric in shown)
        if not can_reject(few, of_one):
            said.append(
                f"with {counted(few, 'item')} no cell of so many can be shown to matter, whatever they do (it takes {items_needed(of_one)}), and "
                "intervals of so few say little"
            )
        elif few < _ENOUGH:
            known = "" if few == items else f" ({few} of the {items} have a {metric})"
            said.append(
                f"with {counted(few, 'item')} a map may claim too much where items are skewed{known}; take at least {_ENOUGH}"
            )
    changes = len(CHANGE_WORDS)
    if steps and not can_reject(few := min(row.n for row in steps if row.metric in shown), changes):
        said.append(
            f"with {counted(few, 'item')} none of the {changes} changes of a ladder can be shown (it takes {items_needed(changes)})"
        )
    if steps:
        said.append("the question is all of the prompt after the filler; p of the five changes are Holm's")
    return said
