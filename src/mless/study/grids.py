"""Many conditions at once: arbitrary edits as placebos, and a filler in many lengths and places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mless import gates, limits
from mless.conditions import EDITS
from mless.errors import BadStudy
from mless.registry import near
from mless.values import PLACEMENTS, Condition, Placement

#: Seeds of edits are this times the study's seed, plus the edit's number: studies with other seeds share no edit.
_SEEDS_APART = limits.CONDITIONS.value


def placebo_conditions(
    k: int = 40,
    length: int = 55,
    placement: str = "before-question",
    seed: int = 0,
    kinds: Sequence[str] = tuple(EDITS),
) -> list[Condition]:
    """`k` arbitrary edits of `length` tokens at `placement`, as ``edit-01-random-tokens``; the kinds take turns.

    More edits begin with the same ones. `check_distinct` tells whether they are different to a tokenizer.
    """
    gates.check_count(k, "placebos: edits", limits.CONDITIONS, BadStudy)
    gates.check_count(length, "placebos: length", limits.FILLER, BadStudy)
    for kind in kinds:
        if kind not in EDITS:
            raise BadStudy(f"placebos: no kind of edit {kind!r}{near(kind, EDITS)}; there are: {', '.join(EDITS)}")
    if not kinds or len(set(kinds)) < len(kinds):
        raise BadStudy(f"placebos: name each kind of edit once, and at least one; got {', '.join(kinds) or 'none'}")
    where = _placement("placebos", placement)
    made: list[Condition] = []
    for number in range(1, k + 1):
        kind = kinds[(number - 1) % len(kinds)]
        name = f"edit-{number:02d}-{kind.removeprefix('edit-')}"
        own = (seed * _SEEDS_APART + number) % limits.SEED.value
        made.append(Condition(name, kind, None, length, where, seed=own))
    return made


def check_distinct(conditions: Sequence[Condition]) -> None:
    """Refuse two edits that are the same tokens at the same place; their ids must be known (`prompting.with_filler_ids`)."""
    seen: dict[tuple[object, ...], str] = {}
    for one in conditions:
        if one.of_kind.takes_seed and one.filler_ids is not None:
            same = seen.setdefault((one.placement, one.filler_ids), one.name)
            if same != one.name:
                raise BadStudy(
                    f"conditions {same!r} and {one.name!r} are the same {one.length} tokens to this tokenizer, so they are one edit and not two; "
                    "use longer edits, fewer of them, other kinds, or another seed"
                )


def dose_lengths(most: int = 1000, points: int = 11) -> tuple[int, ...]:
    """0, and up to `points` lengths from 1 to `most` with equal ratios, rounded: 0, 1, 2, 4, 8, 16, 32, 63, 126, 251, 501, 1000."""
    gates.check_count(most, "dose: the longest length", limits.FILLER, BadStudy)
    gates.check_count(points, "dose: lengths", limits.CONDITIONS, BadStudy, least=2)
    return (0, *sorted({round(most ** (n / (points - 1))) for n in range(points)}))


def dose_conditions(
    lengths: Sequence[int], fillers: Sequence[Condition], placements: Sequence[str] = ("before-question",)
) -> list[Condition]:
    """Every filler in every length at every placement, as ``mless-16-before-answer``; length 0 is `none`, once and first.

    Of `fillers` everything but name, length and placement is kept. Texts and random tokens of a longer filler begin with the shorter one's.
    """
    if not lengths or not fillers or not placements:
        raise BadStudy("dose: name at least one length, one filler and one placement")
    cells = len(set(lengths) - {0}) * len(fillers) * len(placements)
    if cells + 1 > limits.CONDITIONS.value:
        raise BadStudy(
            f"dose: {len(lengths)} lengths × {len(fillers)} fillers × {len(placements)} placements are {cells:,} conditions besides none; "
            f"expected {limits.CONDITIONS}; leave some out"
        )
    for length in lengths:
        gates.check_count(length, "dose: length", limits.FILLER, BadStudy, least=0)
    places = [_placement("dose", placement) for placement in placements]
    for one in fillers:
        if not one.of_kind.placed:
            raise BadStudy(
                f"dose: condition {one.name!r} inserts nothing, so it has no length; name a filler, as mless"
            )
    for what, given in (("length", lengths), ("filler", [one.name for one in fillers]), ("placement", placements)):
        if twice := [one for n, one in enumerate(given) if one in given[:n]]:
            raise BadStudy(f"dose: {what} {twice[0]} is named twice; name each once")
    found = [Condition("none", "none")] if 0 in lengths else []
    for one in fillers:
        for placement in places:
            for length in sorted(set(lengths) - {0}):
                name = f"{one.name}-{length}-{placement}"
                gates.check_count(len(name), f"condition name {gates.shown(name, 60)}", limits.NAME, BadStudy)
                found.append(replace(one, name=name, length=length, placement=placement, filler_ids=None))
    return found


def _placement(what: str, name: str) -> Placement:
    if name not in PLACEMENTS:
        raise BadStudy(f"{what}: no placement {name!r}{near(name, PLACEMENTS)}; there are: {', '.join(PLACEMENTS)}")
    return name
