"""``edit-…``: arbitrary edits of a prompt, to compare a named filler with. One edit is the same `length` tokens for all items.

An edit depends on the tokenizer, the length and the condition's own seed. A longer edit of the same seed begins with the shorter one, so where
an emoji is several tokens the last one may be cut.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mless.conditions.base import Kind, refuse_filler, seeded
from mless.conditions.repeat import filler_unit
from mless.conditions.text import shuffled_ids, shuffled_words
from mless.conditions.tokens import plain_tokens
from mless.errors import BadPrompt

if TYPE_CHECKING:
    from mless.values import Condition

#: No slash: that is the filler which edits are compared with. No angle or vertical bars: templates write their marks with them.
_PUNCTUATION = (*".,;:!?-_*#&%@~+=^$()[]{}'\"", " .", " ,", " -", " :", " (", " *", "...")
_NEWLINES = ("\n", "\n\n", "\n\n\n", "\r\n", "\n ", "\n\t")
_SPACES = (" ", "  ", "   ", "    ", "\t", "\t\t", " \t", "\t ")
_EMOJI = tuple("😀😂😍😎😭😡🙏👍👏💪👀🎉🎈🎁🎵🎯🏆🚀🚗🚲🌍🌙🌈🌊🌵🌻🍀🍎🍕🍩🐶🐱🐢🐝🐙🦋🔥💧💡📌📎📦🔑🔔⏰⚡⭐❄")


class Edit(Kind, ABC):
    """A kind of arbitrary edit. `what` says it in a verdict."""

    inserts = True
    takes_seed = True

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what

    def check(self, condition: Condition) -> None:
        super().check(condition)
        refuse_filler(condition, "draws its filler")

    @abstractmethod
    def drawn(self, tokenizer: Any, length: int, rng: random.Random, sentences: Sequence[str]) -> tuple[int, ...]:
        """The edit's ids."""

    def ids(
        self, tokenizer: Any, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]
    ) -> tuple[int, ...]:
        return self.drawn(tokenizer, condition.length, self._generator(condition), sentences)

    def listed(self, tokenizer: Any, condition: Condition, sentences: Sequence[str]) -> tuple[int, ...]:
        return self.drawn(tokenizer, condition.length, self._generator(condition), sentences)

    def words(self, condition: Condition) -> str:
        return f"{condition.length} tokens, {self.what}, drawn with seed {condition.seed or 0}, {condition.placement}"

    def _generator(self, condition: Condition) -> random.Random:
        return seeded(condition.seed or 0, self.name, "all items")


class _Tokens(Edit):
    """Plain tokens of the vocabulary: `length` of them, or one again and again."""

    def __init__(self, name: str, what: str, *, one: bool) -> None:
        super().__init__(name, what)
        self._one = one

    def drawn(self, tokenizer: Any, length: int, rng: random.Random, sentences: Sequence[str]) -> tuple[int, ...]:
        return plain_tokens(tokenizer, rng, 1) * length if self._one else plain_tokens(tokenizer, rng, length)

    def not_as_text(self, condition: Condition) -> str | None:
        return " draws tokens from a vocabulary, and the server's is not known"


class _Signs(Edit):
    """Signs of one sort in a random order. Each is encoded by itself, so that neighbours never merge."""

    def __init__(self, name: str, what: str, signs: Sequence[str]) -> None:
        super().__init__(name, what)
        self._signs = tuple(signs)

    def drawn(self, tokenizer: Any, length: int, rng: random.Random, sentences: Sequence[str]) -> tuple[int, ...]:
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        known = [unit for sign in self._signs if (unit := _unit(tokenizer, sign, {*added, *tokenizer.all_special_ids}))]
        if not known:
            raise BadPrompt(
                f"this tokenizer has no tokens for {self.what}, which edits of kind {self.name} are made of; leave that kind out"
            )
        found: list[int] = []
        while len(found) < length:
            found += rng.choice(known)
        return tuple(found[:length])

    def not_as_text(self, condition: Condition) -> str | None:
        if any(sign.strip() for sign in self._signs):
            return None
        return f": {self.what} are blank, and many servers' templates trim blanks from a message"

    def text(self, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]) -> str:
        rng = self._generator(condition)
        return "".join(rng.choice(self._signs) for _ in range(condition.length))


class _Words(Edit):
    """Sentences in a random order, or their words."""

    def __init__(self, name: str, what: str, *, single: bool) -> None:
        super().__init__(name, what)
        self._single = single

    def drawn(self, tokenizer: Any, length: int, rng: random.Random, sentences: Sequence[str]) -> tuple[int, ...]:
        return shuffled_ids(tokenizer, self._parts(sentences), rng, length)

    def text(self, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]) -> str:
        return shuffled_words(self._parts(sentences), self._generator(condition), condition.length)

    def _parts(self, sentences: Sequence[str]) -> Sequence[str]:
        if not self._single:
            return sentences
        words = (word.strip(".,;:!?'\"").lower() for sentence in sentences for word in sentence.split())
        return [word for word in words if word]


def _unit(tokenizer: Any, sign: str, special: set[int]) -> tuple[int, ...]:
    """The ids of a sign; none where the tokenizer cannot write it."""
    try:
        unit = filler_unit(tokenizer, sign)
    except BadPrompt:
        return ()
    return () if special & set(unit) else unit


#: By the names that studies use, in the order in which placebos take turns.
EDITS: dict[str, Edit] = {
    kind.name: kind
    for kind in (
        _Tokens("edit-random-tokens", "random tokens", one=False),
        _Tokens("edit-one-token", "one random token repeated", one=True),
        _Signs("edit-punctuation", "punctuation", _PUNCTUATION),
        _Signs("edit-newlines", "line breaks", _NEWLINES),
        _Signs("edit-spaces", "spaces", _SPACES),
        _Signs("edit-emoji", "emoji", _EMOJI),
        _Words("edit-sentences", "sentences", single=False),
        _Words("edit-shuffled-words", "shuffled words", single=True),
    )
}
