"""The judgement of a pair: by text, then by numbers, then by symbolic value."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from mless.tasks.grading.base import Grade
from mless.tasks.grading.parts import aligned, shape, shapes_differ, value_side
from mless.tasks.grading.reading import MAX_NUMBER, Reading, approximates, bare, read, words_of

#: Why the symbolic rule has no verdict.
Fault = Literal["words", "long", "time", "memory", "crash", "reference", "answer", "off"]
#: Compares two formulas, answer and reference, by value.
Symbolic = Callable[[str, str], "bool | Fault"]

#: Longer texts are compared as text only: no reference is so long, and parsing time grows faster than length.
MAX_SYMBOLIC = 2_000

#: Notes in `Grade.why` that say why the symbolic rule has no verdict; count by them.
NOTES = {
    "off": "symbolic grading is off: compared as text",
    "words": "words: compared as text",
    "long": "too long for symbolic grading: compared as text",
    "time": "symbolic grading ran out of time: compared as text",
    "memory": "symbolic grading ran out of memory: compared as text",
    "crash": "symbolic grading crashed: compared as text",
    "reference": "reference not parsed: compared as text",
    "answer": "answer not parsed: compared as text",
}


_OPTION = re.compile(r"\(?([A-J])[.):]\s+\S")
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(\d+)", re.ASCII)
_TWO_NUMBERS = re.compile(r"(?<![_^\d])\d+ \d")  # latex2sympy would multiply them


def _same_number(answer: Reading, reference: Reading) -> bool:
    a, r = answer.number, reference.number
    if a is None or r is None:
        return False
    if answer.percent == reference.percent:
        return a == r
    # "What percent …" is answered 50, 50% or 0.5.
    return a == r or (a / 100 == r if answer.percent else a == r / 100)


def _same_with_decimal_comma(answer: Reading, reference: Reading) -> bool:
    """1000,99 beside 1000.99. What may be a thousands separator (1,234) is one."""
    for one, other in ((answer, reference), (reference, answer)):
        match = _DECIMAL_COMMA.fullmatch(bare(one.source)) if len(one.source) <= MAX_NUMBER else None
        if match and other.number is not None and other.digits and one.percent == other.percent:
            thousands = len(match[2]) == 3 and 1 <= len(match[1].lstrip("+-")) <= 3 and match[1].lstrip("+-")[0] != "0"
            if not thousands and Fraction(f"{match[1]}.{match[2]}") == other.number:
                return True
    return False


def _option(answer: str, reference: Reading) -> str:
    """The letter of "C. x = 42" where the other side is a letter alone."""
    match = _OPTION.match(bare(answer)) if len(reference.text) == 1 and "A" <= reference.text <= "J" else None
    return match[1] if match else ""


def _units_differ(answer: Reading, reference: Reading) -> bool:
    return (
        bool(answer.unit and reference.unit)
        and answer.unit != reference.unit
        and "unit" not in (answer.unit, reference.unit)
    )


def judge(answer: str, reference: str, symbolic: Symbolic | None) -> Grade:
    """Judges an answer that is there. `symbolic` is asked only where text and numbers do not say; None leaves that rule out."""
    a, r = read(answer), read(reference)
    # 100,200,300 is a number, unless the reference is a list of three.
    if a.merged != r.merged and "list" in (shape(a.text)[0], shape(r.text)[0]):
        a, r = read(answer, thousands=False), read(reference, thousands=False)
    if not a.text and not r.text:  # nothing but layout: a full stop is no comma
        same = bare(answer) == bare(reference)
        return Grade(same, "same text" if same else "other text", None, same, False)
    if a.text == r.text and a.percent == r.percent and not _units_differ(a, r):
        return Grade(True, "same text", None, True, False)
    if letter := _option(answer, r) or _option(reference, a):
        same = letter in (a.text, r.text)
        return Grade(same, "same letter" if same else "other letter", None, same, False)
    value, wanted = value_side(a, r), value_side(r, a)
    # Of "total = 100" only the value is compared, so that its word does not count.
    one, two = value or a, wanted or r
    if one.words is not None or two.words is not None:
        same = words_of(one.source) == words_of(two.source)
        return Grade(same, f"{'same' if same else 'other'} text; {NOTES['words']}", None, same, False)
    if a.based or r.based:
        same = a.based == r.based
        return Grade(same, "same digits in the same base" if same else "other digits or base", None, same, False)
    if _units_differ(a, r):
        return Grade(False, f"other unit: {_short(a.unit)}, not {_short(r.unit)}", None, False, False)
    if value is None or wanted is None:
        return Grade(False, "an equation against a value", None, False, False)
    if _units_differ(value, wanted):
        return Grade(False, f"other unit: {_short(value.unit)}, not {_short(wanted.unit)}", None, False, False)
    return _compare(value, wanted, symbolic)


def _compare(a: Reading, r: Reading, symbolic: Symbolic | None) -> Grade:
    if a.number is not None and r.number is not None:
        if _same_number(a, r):
            return Grade(True, "same number", True, True, False)
        if not r.digits and r.number.denominator > 1 and a.percent == r.percent and approximates(a, r.number):
            return Grade(True, f"same number to {a.digits} digits", True, False, True)
        return Grade(False, "other number", False, False, False)
    if _same_with_decimal_comma(a, r):
        return Grade(True, "same number, with a decimal comma", True, True, False)
    a, r, repeats = aligned(a, r)
    repeated = "; what it repeats counts once" if repeats else ""
    if a.text and a.text == r.text and a.percent == r.percent:
        return Grade(True, f"same text{repeated}", None, True, False)
    if shapes_differ(a.text, r.text):
        return Grade(False, "another kind or number of elements", None, False, False)
    verdict = _by_value(a, r, symbolic)
    if isinstance(verdict, bool):
        return Grade(verdict, f"same value{repeated}" if verdict else "other value", verdict, False, verdict)
    return Grade(False, f"other text; {NOTES[verdict]}", None, False, False)


def _by_value(a: Reading, r: Reading, symbolic: Symbolic | None) -> bool | Fault:
    """The symbolic verdict, or why there is none."""
    if symbolic is None:
        return "off"
    if max(len(a.text), len(r.text)) > MAX_SYMBOLIC:
        return "long"
    one_percent = a.percent != r.percent
    answer, reference = (side.text + (r"\%" if one_percent and side.percent else "") for side in (a, r))
    if _TWO_NUMBERS.search(reference):
        return "reference"
    return "answer" if _TWO_NUMBERS.search(answer) else symbolic(answer, reference)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
