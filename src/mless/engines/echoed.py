"""Log-probabilities of given tokens in the answer of ``/completions`` with ``echo`` and ``logprobs``, checked to be those of the tokens that were sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

#: Tokens that a server draws beside those that it echoes. Many refuse to draw none.
DRAWN = 1
#: Servers write this where a probability is zero, because JSON has no infinity.
_ZERO = -9999.0
#: log p may lie above 0 by so much: rounding.
_ROUNDING = 1e-3
_MARK = "token_id:"


class NotEchoed(Exception):
    """The answer does not hold the log-probabilities that were asked for; the message continues the server's name."""


@dataclass(frozen=True, slots=True)
class Echo:
    """log p of the tokens asked about, and their texts where the server gives them."""

    logp: tuple[float, ...]
    texts: tuple[str, ...] | None


def read_echo(body: Mapping[str, Any], ids: Sequence[int], first: int) -> Echo:
    """What an answer to the prompt `ids` says of the tokens from number `first` on."""
    choices: Any = body.get("choices")
    choice: Any = choices[0] if isinstance(choices, list) and choices else None
    given: Any = cast("dict[str, Any]", choice).get("logprobs") if isinstance(choice, dict) else None
    values, texts = _lists(given)
    if values is None:
        raise NotEchoed("gives no log-probabilities (no logprobs in its answer)")
    if len(values) <= DRAWN < len(ids):
        raise NotEchoed(
            f"ignores echo: it gives {len(values)} log-probability, of what it drew, and none of the {len(ids)} tokens that were sent"
        )
    counted = _prompt_tokens(body)
    if not len(ids) <= len(values) <= len(ids) + DRAWN or counted not in (None, len(ids)):
        has = (
            f"counts {counted} tokens" if counted not in (None, len(ids)) else f"gives {len(values)} log-probabilities"
        )
        raise NotEchoed(
            f"{has} where {len(ids)} tokens were sent and at most {DRAWN} is drawn: it makes other tokens of them"
        )
    asked = values[first : len(ids)]
    if any(value is None for value in asked):
        raise NotEchoed(
            f"gives null as the log-probability of {sum(v is None for v in asked)} of the {len(asked)} tokens asked about"
        )
    if wrong := [value for value in asked if not _is_log_probability(value)]:
        raise NotEchoed(f"gives {wrong[0]!r:.60} as a log-probability; expected a finite number of at most 0")
    own = texts[first : len(ids)] if texts is not None and len(texts) == len(values) else None
    named = own is not None and all(isinstance(text, str) for text in own)
    return Echo(tuple(float(value) for value in asked), tuple(cast("list[str]", own)) if named else None)


def unlike(texts: Sequence[str], ids: Sequence[int], tokenizer: Any) -> tuple[str, str] | None:
    """A token's text by the server and by the tokenizer, where most of them differ: it is then another tokenizer. None where they agree.

    A server may write a token as text, as its vocabulary has it, or by its number. Parts of a letter and blanks are no evidence.
    """
    pairs = [(text, *_written(token, tokenizer)) for text, token in zip(texts, ids, strict=True)]
    telling = [
        pair for pair in pairs if pair[0].startswith(_MARK) or (pair[1].strip() and "\ufffd" not in pair[0] + pair[1])
    ]
    wrong = [pair for pair in telling if pair[0].strip() not in (*(text.strip() for text in pair[1:3]), pair[3])]
    return (wrong[0][0], wrong[0][1]) if 2 * len(wrong) > len(telling) else None


def _written(token: int, tokenizer: Any) -> tuple[str, str, str]:
    return str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token)), f"{_MARK}{token}"


def _lists(given: Any) -> tuple[list[Any] | None, list[Any] | None]:
    """Log-probabilities and texts, as completions write them, or as chats do."""
    if not isinstance(given, dict):
        return None, None
    fields = cast("dict[str, Any]", given)
    if isinstance(values := fields.get("token_logprobs"), list):
        texts = fields.get("tokens")
        return cast("list[Any]", values), cast("list[Any]", texts) if isinstance(texts, list) else None
    if isinstance(content := fields.get("content"), list):
        entries = [cast("dict[str, Any]", one) if isinstance(one, dict) else {} for one in cast("list[Any]", content)]
        return [one.get("logprob") for one in entries], [one.get("token") for one in entries]
    return None, None


def _prompt_tokens(body: Mapping[str, Any]) -> int | None:
    usage = body.get("usage")
    count = cast("dict[str, Any]", usage).get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _is_log_probability(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and _ZERO < value <= _ROUNDING
