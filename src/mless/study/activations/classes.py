"""Token classes by rule, from the tokens' texts alone: digits, operators, conjunctions, other (listed in docs/activations.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mless.results.schemas import TokenClass

_DIGITS = re.compile(r"[.,]*\d[\d.,]*")
#: Signs, and what LaTeX and plain English call them. A slash, a star or a dash always counts: the rules do not see meaning.
OPERATOR_SIGNS = "+-−–*/=<>^%×÷·⋅∗±∓√≤≥≠≈∑∏∫∘"
OPERATOR_WORDS = frozenset(
    "plus minus times divided multiplied percent frac dfrac sqrt cdot div pm leq geq neq le ge sum prod int".split()
)
CONJUNCTIONS = frozenset(
    "and or nor but yet so if then because since although though while whereas when whenever unless until whether than hence "
    "therefore thus however".split()
)
#: In English these are words of another kind; only after a backslash are they operators.
_LATEX_ONLY = frozenset("le ge sum prod int div pm".split())


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Each token's text with the space it begins with, which some tokenizers' decoders leave out."""
    texts: list[str] = []
    for token, piece in zip(token_ids, tokenizer.convert_ids_to_tokens(list(token_ids)), strict=True):
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        spaced = isinstance(piece, str) and piece.startswith(("▁", "Ġ")) and not text[:1].isspace()
        texts.append(f" {text}" if spaced else text)
    return texts


def token_classes(texts: Sequence[str]) -> list[TokenClass]:
    """The class of every token of a text; a word counts only as a whole, so that the end of "thousand" is no conjunction."""
    found: list[TokenClass] = []
    for i, text in enumerate(texts):
        bare = text.strip()
        before = texts[i - 1] if i else ""
        after = texts[i + 1] if i + 1 < len(texts) else ""
        begins = text[:1].isspace() or not before[-1:].isalpha()
        whole = begins and not (text[-1:].isalpha() and after[:1].isalpha())
        word = bare.lower().removeprefix("\\")
        command = bare.startswith("\\") or (before.endswith("\\") and not text[:1].isspace())
        if _DIGITS.fullmatch(bare):
            found.append("digits")
        elif (bare and all(sign in OPERATOR_SIGNS for sign in bare)) or (
            whole and word in OPERATOR_WORDS and (command or word not in _LATEX_ONLY)
        ):
            found.append("operators")
        elif whole and word in CONJUNCTIONS and not command:
            found.append("conjunctions")
        else:
            found.append("other")
    return found
