"""The table of graders, and one from outside the package."""

from __future__ import annotations

import importlib

import pytest

import mless
from mless.errors import BadPlugin, BadStudy
from mless.tasks import DEFAULT_GRADER, GRADERS, AnswerGrader, Extracted, Grader
from outside import Outside

EXACT = """
import mless
from mless.tasks import AnswerGrader, Extracted, Grade

class Exact(AnswerGrader):
    def grade(self, extracted, reference):
        answer = extracted.text if isinstance(extracted, Extracted) else extracted
        return Grade(answer == reference, "same letters" if answer == reference else "other letters")

mless.register("graders", "exact", Exact)
"""


def test_the_grader_that_comes_with_mless() -> None:
    assert GRADERS.names()[0] == DEFAULT_GRADER == "math-verify"
    with GRADERS.get("math-verify")() as grader:
        assert isinstance(grader, Grader)
        assert [grade.correct for grade in grader.grade_many([("0.5", "1/2"), ("0.5", "1/3"), (None, "1")])] == [
            True,
            False,
            False,
        ]


def test_unknown_graders_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        BadStudy, match=r"no grader 'mathverify' \(did you mean 'math-verify'\?\); there are: math-verify"
    ):
        GRADERS.get("mathverify")
    with pytest.raises(BadPlugin, match=r"grader 'exact' must be a class of mless\.tasks\.AnswerGrader, .* got a list"):
        mless.register("graders", "exact", [])
    with pytest.raises(
        BadPlugin, match=r"grader 'exact' must be a class of mless\.tasks\.AnswerGrader, .* got builtins:int"
    ):
        mless.register("graders", "exact", int)


def test_a_grader_from_outside(outside: Outside) -> None:
    outside.write("exactly", EXACT)
    importlib.import_module("exactly")
    heard: list[tuple[int, int]] = []
    with GRADERS.get("exact")() as grader:
        assert isinstance(grader, AnswerGrader)
        pairs = [(Extracted("0.5", "number"), "1/2"), ("5", "5")]
        grades = grader.grade_many(pairs, lambda done, total: heard.append((done, total)))
    assert [(grade.correct, grade.why, grade.symbolic) for grade in grades] == [
        (False, "other letters", None),
        (True, "same letters", None),
    ]
    assert heard == [(1, 2), (2, 2)]
    code = "from mless.tasks import GRADERS; print(GRADERS.get('exact')().grade('5', '5').why)"
    assert outside.in_another_process(code) == "same letters"
