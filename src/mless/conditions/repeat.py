"""``repeat``: the filler's tokens again and again, cut to `length` of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mless.conditions.base import Kind, refuse_surrogates
from mless.errors import BadPrompt, BadStudy

if TYPE_CHECKING:
    from mless.values import Condition

#: Texts that a filler is encoded after. Some tokenizers put a blank before what they are given; after other text they do not.
_CARRIERS = ("a", ".", "1", "\u4e2d")


class Repeat(Kind):
    """One filler, the same for every item."""

    inserts = True

    def check(self, condition: Condition) -> None:
        super().check(condition)
        if not condition.filler:
            raise BadStudy(
                f'condition {condition.name!r} repeats a filler, but none is given; add filler = " /" or --filler'
            )

    def ids(
        self, tokenizer: Any, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]
    ) -> tuple[int, ...]:
        unit = self.unit(tokenizer, condition)
        return (unit * -(-condition.length // len(unit)))[: condition.length]

    def unit(self, tokenizer: Any, condition: Condition) -> tuple[int, ...]:
        return filler_unit(tokenizer, condition.filler or "")

    def not_as_text(self, condition: Condition) -> str | None:
        if (condition.filler or "").strip():
            return None
        return f": filler {condition.filler!r} is blank, and many servers' templates trim blanks from a message"

    def text(self, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]) -> str:
        return (condition.filler or "") * condition.length

    def words(self, condition: Condition) -> str:
        each = len(condition.filler_ids or (0,))
        if each > 1:
            return f"{condition.length} tokens, {condition.filler!r} ({each} tokens) repeated, {condition.placement}"
        return f"{condition.length} × {condition.filler!r}, {condition.placement}"


def filler_unit(tokenizer: Any, filler: str) -> tuple[int, ...]:
    """The ids of one filler, as it stands after other text. They are repeated as they are, so a row of fillers never merges."""
    refuse_surrogates(filler, f"filler {filler!r}")
    for carrier in _CARRIERS:
        alone: list[int] = tokenizer(carrier, add_special_tokens=False).input_ids
        both: list[int] = tokenizer(carrier + filler, add_special_tokens=False).input_ids
        if alone and len(both) > len(alone) and both[: len(alone)] == alone:
            return tuple(both[len(alone) :])
    unit: list[int] = tokenizer(filler, add_special_tokens=False).input_ids
    if not unit:
        raise BadPrompt(
            f"filler {filler!r} has no token in this tokenizer's vocabulary; take another one, such as ' /'"
        )
    return tuple(unit)


REPEAT = Repeat()
