"""``tokens``: `length` random tokens of the vocabulary."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mless.conditions.base import Kind, decoded, refuse_filler, seeded
from mless.errors import BadPrompt

if TYPE_CHECKING:
    from mless.values import Condition

#: What vocabularies keep for later or for bytes: <unused7>, <0x0A>, [PAD].
_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_TRIES = 1000


class Tokens(Kind):
    """Plain tokens drawn from the whole vocabulary, each as likely as any other; each item's own."""

    inserts = True
    own = True

    def check(self, condition: Condition) -> None:
        super().check(condition)
        refuse_filler(condition, "draws its tokens at random")

    def ids(
        self, tokenizer: Any, condition: Condition, *, item: str, seed: int, sentences: Sequence[str]
    ) -> tuple[int, ...]:
        return plain_tokens(tokenizer, seeded(seed, "tokens", item), condition.length)

    def not_as_text(self, condition: Condition) -> str | None:
        return " draws tokens from a vocabulary, and the server's is not known"

    def words(self, condition: Condition) -> str:
        return f"{condition.length} random tokens, {condition.placement}"


def plain_tokens(tokenizer: Any, rng: random.Random, count: int) -> tuple[int, ...]:
    """So many plain tokens of the vocabulary, each drawn by itself."""
    apart = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    found: list[int] = []
    for _ in range(_TRIES * count):
        token = rng.randrange(len(tokenizer))
        if token not in apart and _is_plain(tokenizer, token):
            found.append(token)
            if len(found) == count:
                return tuple(found)
    raise BadPrompt(
        f"{_TRIES * count:,} draws from this tokenizer's vocabulary gave {len(found)} plain tokens of {count}; use a repeated filler or natural text"
    )


def _is_plain(tokenizer: Any, token: int) -> bool:
    """Whether a token shows whole characters that can be seen: no part of a character, no blank, no name in brackets."""
    shown = decoded(tokenizer, [token]).strip()
    return bool(shown) and "\ufffd" not in shown and shown.isprintable() and not _MARKUP.fullmatch(shown)


TOKENS = Tokens()
