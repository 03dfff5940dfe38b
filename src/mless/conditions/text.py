"""``text``: natural text, cut to `length` tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mless.conditions.base import Kind, seeded
from mless.errors import BadPrompt

if TYPE_CHECKING:
    from mless.values import Condition


class Text(Kind):
    """Sentences in the item's own order; where they run out, again in another order."""

    inserts = True
    own = True

    def ids(
        self, tokenizer: Any, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]
    ) -> tuple[int, ...]:
        found: list[int] = []
        rounds = _rounds(sentences, seeded(seed, "text", item))
        while len(found) < condition.length:
            found += tokenizer(f" {next(rounds)}", add_special_tokens=False).input_ids
        return tuple(found[: condition.length])

    def text(self, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]) -> str:
        found: list[str] = []
        rounds = _rounds(sentences, seeded(seed, "text", item))
        while len(found) < condition.length:
            found += next(rounds).split()
        return " ".join(found[: condition.length])

    def words(self, condition: Condition) -> str:
        return f"{condition.length} tokens of natural text, {condition.placement}"


def _rounds(sentences: Sequence[str], rng: random.Random) -> Iterator[str]:
    """All sentences, shuffled again every time."""
    if not any(sentence.strip() for sentence in sentences):
        raise BadPrompt("natural-text filler needs sentences, and none were given")
    while True:
        order = list(sentences)
        rng.shuffle(order)
        yield " ".join(order)


TEXT = Text()
