"""Graders of published evaluations that know less than `math-verify`: the same text, or the same number."""

from __future__ import annotations

import math
import re

from mless.errors import BadData
from mless.tasks.extracting import Extracted
from mless.tasks.grading.base import AnswerGrader, Grade, text_of

#: What harnesses drop before they compare: dollars, thousands separators, per cent signs, blanks. Another comma is none of these: "1, 2" is no 12.
_DROPPED = re.compile(r"\\[!,;$%]|[\s$%]|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
#: A number by itself, or a quotient of two.
_NUMBER = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,3})?", re.ASCII)
#: Numbers differ where they differ by more than this, as a share of the larger one.
_SAME = 1e-6


class ExactMatch(AnswerGrader):
    """Right where answer and reference are the same characters, but for blanks around them and a full stop behind."""

    def grade(self, extracted: Extracted | str | None, reference: str) -> Grade:
        answer = _checked(extracted, reference)
        if answer is None:
            return Grade(False, "no answer", None, None, False)
        same = _bare(answer) == _bare(reference)
        return Grade(same, "same characters" if same else "other characters", None, same, False)


class Numeric(AnswerGrader):
    """Right where both are numbers and differ by at most a millionth; currency, separators and per cent signs are dropped. Words are wrong."""

    def grade(self, extracted: Extracted | str | None, reference: str) -> Grade:
        answer = _checked(extracted, reference)
        if answer is None:
            return Grade(False, "no answer", None, None, False)
        mine, wanted = _number(answer), _number(reference)
        if mine is None or wanted is None:
            return Grade(False, f"the {'answer' if mine is None else 'reference'} is no number", None, False, False)
        same = math.isclose(mine, wanted, rel_tol=_SAME)
        return Grade(same, "same number" if same else "other number", None, same, False)


def _checked(extracted: Extracted | str | None, reference: str) -> str | None:
    """The answer's text; None where there is none."""
    if not reference.strip():
        raise BadData("grading: the reference answer is empty; remove the item, or say --answer-field NAME")
    answer = text_of(extracted)
    return answer if answer.strip() else None


def _bare(text: str) -> str:
    return text.strip().removesuffix(".").rstrip()


def _number(text: str) -> float | None:
    parts = _DROPPED.sub("", _bare(text)).replace("−", "-").split("/")
    if len(parts) > 2 or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    top, below = float(parts[0]), float(parts[1]) if len(parts) == 2 else 1.0
    # 1e999 is infinite as a float, and two such numbers need not be the same.
    return top / below if below and math.isfinite(top) and math.isfinite(below) else None
