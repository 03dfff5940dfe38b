"""An answer's structure, from brackets, commas and equals signs: its kind, its parts, and the value that it names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from mless.tasks.grading.reading import TOKEN, Reading, read

_OPENS = ("(", "[", r"\{", "{")
_CLOSES = (")", "]", r"\}", "}")

Shape = Literal["set", "tuple", "interval", "list", "other"]


def shape(text: str) -> tuple[Shape, int]:
    """What the brackets around the whole say it is, and its number of elements."""
    depth = 0
    top = inner = 0
    closes_early = False
    tokens: list[str] = TOKEN.findall(text)
    for place, token in enumerate(tokens):
        if token in _OPENS:
            depth += 1
        elif token in _CLOSES:
            depth -= 1
            closes_early |= depth == 0 and place < len(tokens) - 1
        elif token == ",":
            top += depth == 0
            inner += depth == 1
    if top:
        return "list", top + 1
    if closes_early or not tokens or not inner:
        return ("set", inner + 1) if tokens and not closes_early and tokens[0] == r"\{" else ("other", 1)
    ends = tokens[0] + tokens[-1]
    kinds: dict[str, Shape] = {r"\{\}": "set", "()": "tuple", "[]": "interval", "[)": "interval", "(]": "interval"}
    return kinds.get(ends, "other"), inner + 1


def shapes_differ(answer: str, reference: str) -> bool:
    """Where math-verify would take a set for a tuple, or one element for several."""
    (one, n), (two, m) = shape(answer), shape(reference)
    if {one, two} == {"set", "tuple"}:
        return True
    if n == m or re.search(r"\\(?:pm|le|ge|cup|in)(?![a-z])|[<>=]", answer + reference):
        return False
    return {one, two} <= {"list", "tuple"} or {one, two} == {"list", "other"}


def split(text: str, separator: str = ",") -> list[str]:
    """The parts between the separators that stand outside of all brackets."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token in TOKEN.findall(text):
        depth += (token in _OPENS) - (token in _CLOSES)
        if token == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return ["".join(part).strip() for part in parts]


def aligned(answer: Reading, reference: Reading) -> tuple[Reading, Reading, bool]:
    """Both sides, ready to compare: a list beside a tuple is ordered, and an answer may repeat an element.

    What the reference says twice counts twice. The third value tells whether elements of the answer were dropped.
    """
    repeats = False
    (one, n), (two, m) = shape(answer.text), shape(reference.text)
    if one == "list" and two in ("list", "set") and n > m:
        elements = list(dict.fromkeys(split(answer.text)))
        if len(elements) >= m > 1:
            repeats = len(elements) < n
            answer = replace(answer, text=", ".join(elements))
    if {one, two} == {"list", "tuple"} and n == m:
        if one == "list":
            answer = replace(answer, text=f"({answer.text})")
        else:
            reference = replace(reference, text=f"({reference.text})")
    return answer, reference, repeats


# --- named values ---

_MEMBER = re.compile(r"[A-Za-z]\\in ?")
_INDEX = re.compile(r"_\w|_\{[^{}]{1,20}\}")
_FUNCTION_OF = re.compile(r"(?<=[A-Za-z'])\([\w, ]{1,12}\)")
_RATIO = re.compile(r"\\frac\{[A-Za-z]{1,4}\}\{[A-Za-z]{1,4}\}|(?<![A-Za-z])[A-Za-z]{1,4}/[A-Za-z]{1,4}")
_LETTER = re.compile(r"[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CONSTANT = re.compile(r"(?<![A-Za-z])[ei](?![A-Za-z])")
_OPERATOR = re.compile(r"[-+/^\d]|\\(?:cdot|frac|sqrt)")
_ROOTS = re.compile(r"([A-Za-z])_\{?(\d)\}?")


def _names(text: str) -> bool:
    """Whether it is a name of something (x, f(x), AB, |AB|, x_1, a/b, (p, q), a word) and not something computed."""
    plain = _RATIO.sub("N", _FUNCTION_OF.sub("", _INDEX.sub("", text)))
    return bool(re.search(r"[A-Za-z]", plain)) and not _OPERATOR.search(plain)


def _has_variables(text: str) -> bool:
    return bool(_LETTER.search(_CONSTANT.sub("", _COMMAND.sub("", re.sub(r"\\text\{[^{}]*\}", "", text)))))


def _named(text: str) -> tuple[str, str] | None:
    """The name and the value of "name = … = value"; None where it is an equation to be solved."""
    sides = split(text, "=")
    if len(sides) == 1:
        return "", text
    *earlier, last = sides
    if names := [side for side in earlier if _names(side)]:
        return names[0], last
    if len(sides) == 2 and _names(last):
        return last, sides[0]
    # 3 + 4 = 7
    return None if any(_has_variables(side) for side in sides) else ("", last)


def value_side(one: Reading, other: Reading) -> Reading | None:
    """`one` without the name it gives its value, where `other` is a bare value; None where it is an equation to be solved."""
    if "=" not in one.text and r"\in" not in one.text:
        return one
    text = _MEMBER.sub("", one.text, count=1) if _MEMBER.match(one.text) and r"\in" not in other.text else one.text
    if "=" in text and "=" not in other.text:
        found = [_unnamed(part) for part in split(text)]
        pairs = [pair for pair in found if pair is not None]
        if len(pairs) < len(found):
            return None
        text = ", ".join(value for _, value in pairs)
        if _ordered([name for name, _ in pairs]):
            text = f"({text})"
    if text == one.text:
        return one
    # Read again: what was an equation may now be a number with a unit.
    again = read(text)
    return replace(again, unit=again.unit or one.unit, percent=again.percent or one.percent)


def _unnamed(part: str) -> tuple[str, str] | None:
    """As `_named`; of a tuple "(p=5, q=2)" every element."""
    if shape(part)[0] != "tuple" or not all("=" in inner for inner in split(part[1:-1])):
        return _named(part)
    pairs = [_named(inner) for inner in split(part[1:-1])]
    values = [pair[1] for pair in pairs if pair is not None]
    return ("", f"({', '.join(values)})") if len(values) == len(pairs) else None


def _ordered(names: list[str]) -> bool:
    """Values of different things have an order (AB = 4, CD = 5); several of one thing are a set (x = 1, x = 2; x_1, x_2)."""
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        return False
    roots = [_ROOTS.fullmatch(name) for name in names]
    numbered = [match for match in roots if match]
    return not (
        len(numbered) == len(names)
        and len({match[1] for match in numbered}) == 1
        and [int(match[2]) for match in numbered] == list(range(1, len(names) + 1))
    )
