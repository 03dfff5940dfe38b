"""``text``: natural text, cut to `length` tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mless.conditions.base import Kind, seeded
from mless.errors import BadPrompt

if TYPE_CHECKING:
    from mless.values import Condition

#: Tokens that are encoded beyond those that are used: what follows a token may change it, but not from so far away.
_MARGIN = 32


class Text(Kind):
    """Sentences in the item's own order; where they run out, again in another order."""

    inserts = True
    own = True

    def ids(
        self, tokenizer: Any, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]
    ) -> tuple[int, ...]:
        return shuffled_ids(tokenizer, sentences, seeded(seed, "text", item), condition.length)

    def text(self, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]) -> str:
        return shuffled_words(sentences, seeded(seed, "text", item), condition.length)

    def words(self, condition: Condition) -> str:
        return f"{condition.length} tokens of natural text, {condition.placement}"


def shuffled_ids(tokenizer: Any, parts: Sequence[str], rng: random.Random, count: int) -> tuple[int, ...]:
    """The first `count` ids of the parts in a random order; where they run out, again in another order."""
    found: list[int] = []
    rounds = _rounds(parts, rng)
    while (missing := count - len(found)) > 0:
        found += _first_ids(tokenizer, next(rounds), missing)
    return tuple(found)


def shuffled_words(parts: Sequence[str], rng: random.Random, count: int) -> str:
    """The first `count` words of the same."""
    found: list[str] = []
    rounds = _rounds(parts, rng)
    while len(found) < count:
        found += " ".join(next(rounds)).split()
    return " ".join(found[:count])


def _first_ids(tokenizer: Any, sentences: Sequence[str], count: int) -> list[int]:
    """The first `count` ids of all sentences in a row, or all where they are fewer. No more of them is encoded than is needed."""
    words, taken = 0, 0
    while True:
        while taken < len(sentences) and words < count + _MARGIN:
            words += len(sentences[taken].split())
            taken += 1
        ids: list[int] = tokenizer(f" {' '.join(sentences[:taken])}", add_special_tokens=False).input_ids
        if taken == len(sentences) or len(ids) >= count + _MARGIN:
            return ids[:count]
        words = len(ids)  # its tokens reach over words


def _rounds(sentences: Sequence[str], rng: random.Random) -> Iterator[list[str]]:
    """All sentences, shuffled again every time."""
    if not any(sentence.strip() for sentence in sentences):
        raise BadPrompt("natural-text filler needs sentences, and none were given")
    while True:
        order = list(sentences)
        rng.shuffle(order)
        yield order


TEXT = Text()
