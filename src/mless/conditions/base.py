"""The base class of condition kinds. Prompts, words and checks use it; none of them knows kinds by name."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mless.errors import BadPrompt, BadStudy

if TYPE_CHECKING:
    from mless.values import Condition


class Kind:
    """A kind of condition. This one does nothing to a prompt; a kind of your own overrides what it changes.

    Anything random must be a function of (seed, item): `seeded` gives a generator for that.
    """

    #: It puts tokens into the prompt.
    inserts: bool = False
    #: Each item has filler of its own. Where not, the filler is the same for all items.
    own: bool = False
    #: Its conditions have a seed of their own, which their filler is drawn with.
    takes_seed: bool = False
    #: It changes at which positions tokens stand.
    moves: bool = False

    @property
    def placed(self) -> bool:
        """Whether a condition's placement means anything."""
        return self.inserts or self.moves

    def check(self, condition: Condition) -> None:
        """Refuse settings that make no sense. Here: a kind that is placed needs a length of at least one token."""
        if self.placed and condition.length < 1:
            raise BadStudy(f"condition {condition.name!r}: length must be at least 1 token, got {condition.length}")

    def ids(
        self, tokenizer: Any, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]
    ) -> tuple[int, ...]:
        """The ids that are put into the prompt of `item`; `sentences` are plain ones to cut text from."""
        return ()

    def unit(self, tokenizer: Any, condition: Condition) -> tuple[int, ...] | None:
        """The ids of one filler, where one filler is repeated; else None."""
        return None

    def listed(self, tokenizer: Any, condition: Condition, sentences: Sequence[str]) -> tuple[int, ...] | None:
        """The ids that study.json lists for the condition: here those of one filler. None where each item has its own."""
        return self.unit(tokenizer, condition)

    def positions(self, condition: Condition, count: int, at: int) -> tuple[int, ...] | None:
        """The positions of the prompt's `count` tokens; `at` is where the placement lies. None: 0, 1, 2, …"""
        return None

    def not_as_text(self, condition: Condition) -> str | None:
        """Why a conversation of plain text cannot hold it, to follow "condition 'x'"; None where it can."""
        if self.inserts and type(self).text is Kind.text:
            return " inserts token ids and does not say how they are written as text"
        return None

    def text(self, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]) -> str:
        """The filler as text, for servers that take no token ids: `length` counts fillers or words then."""
        return ""

    def words(self, condition: Condition) -> str:
        """What it does, for verdicts: "55 × ' /', before-question"; empty where it does nothing."""
        return ""


def seeded(seed: int, purpose: str, item: str) -> random.Random:
    """Random numbers that depend on these three alone, in any process."""
    # A string seed is hashed with sha512 inside `random`, so the draw is the same in every process.
    return random.Random(f"{seed}/{purpose}/{item}")


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of the ids, with every blank as it is."""
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def refuse_surrogates(text: str, what: str) -> None:
    """Refuse half a surrogate pair, which no tokenizer takes; it may come from a script or a broken command line."""
    if half := re.search("[\ud800-\udfff]", text):
        raise BadPrompt(f"{what}: {half[0]!r} is half a character (a lone surrogate), not text; remove it")


def refuse_filler(condition: Condition, because: str) -> None:
    """For kinds that take no filler text."""
    if condition.filler:
        raise BadStudy(
            f"condition {condition.name!r} {because}, so it takes no filler; got {condition.filler!r}, leave it out"
        )
