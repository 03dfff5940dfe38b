"""Which words two texts share: a word diff that stays quick for texts of 10,000 words."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

#: In both texts, only in the first, only in the second.
Kind = Literal["same", "gone", "new"]

_WORD = re.compile(r"\s+|\w+|[^\w\s]")
#: Words of a gap between two anchors that difflib compares; it is quadratic. A longer gap is replaced as a whole.
_GAP = 600
#: Words of each text that are compared. What follows is shown as replaced.
MOST_WORDS = 40_000


def word_diff(before: str, after: str) -> list[tuple[Kind, str]]:
    """Both texts as pieces in order: `same` and `gone` are the first text, `same` and `new` the second.

    Words that occur once in both texts are anchors (patience diff); between them the words are compared one by one.
    """
    first, second = _WORD.findall(before), _WORD.findall(after)
    rest = ["".join(words[MOST_WORDS:]) for words in (first, second)]
    found: list[tuple[Kind, str]] = []
    pieces: list[tuple[Kind, Sequence[str]]] = list(_compared(first[:MOST_WORDS], second[:MOST_WORDS]))
    pieces.append(("gone", rest[:1]))
    pieces.append(("new", rest[1:]))
    for kind, words in pieces:
        text = "".join(words)
        if text and found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + text)
        elif text:
            found.append((kind, text))
    return found


def _compared(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[Kind, Sequence[str]]]:
    start = 0
    shorter = min(len(first), len(second))
    while start < shorter and first[start] == second[start]:
        start += 1
    end = 0
    while end < shorter - start and first[-1 - end] == second[-1 - end]:
        end += 1
    yield "same", first[:start]
    yield from _between(first[start : len(first) - end], second[start : len(second) - end])
    yield "same", first[len(first) - end :]


def _between(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[Kind, Sequence[str]]]:
    """Texts that begin and end differently."""
    a = b = 0
    for at, other in [*_anchors(first, second), (len(first), len(second))]:
        yield from _gap(first[a:at], second[b:other])
        yield "same", first[at : at + 1]
        a, b = at + 1, other + 1


def _gap(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[Kind, Sequence[str]]]:
    if not first or not second or max(len(first), len(second)) > _GAP:
        yield "gone", first
        yield "new", second
        return
    for what, a, a_end, b, b_end in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if what == "equal":
            yield "same", first[a:a_end]
        else:
            yield "gone", first[a:a_end]
            yield "new", second[b:b_end]


def _anchors(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Places of words that occur once in both, in the same order: the longest such run (Szymanski's patience sort)."""
    counts = Counter(first), Counter(second)
    places = {word: at for at, word in enumerate(second) if counts[1][word] == 1}
    pairs = [(at, places[word]) for at, word in enumerate(first) if counts[0][word] == 1 and word in places]
    tops: list[int] = []
    top_pairs: list[int] = []
    before: list[int] = []
    for number, (_, other) in enumerate(pairs):
        pile = bisect_left(tops, other)
        before.append(top_pairs[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [other]
        top_pairs[pile : pile + 1] = [number]
    found: list[tuple[int, int]] = []
    at = top_pairs[-1] if top_pairs else -1
    while at >= 0:
        found.append(pairs[at])
        at = before[at]
    return found[::-1]
