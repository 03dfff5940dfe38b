"""Many conditions at once: arbitrary edits as placebos."""

from __future__ import annotations

from collections.abc import Sequence

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


def _placement(what: str, name: str) -> Placement:
    if name not in PLACEMENTS:
        raise BadStudy(f"{what}: no placement {name!r}{near(name, PLACEMENTS)}; there are: {', '.join(PLACEMENTS)}")
    return name
