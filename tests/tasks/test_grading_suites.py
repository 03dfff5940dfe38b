"""The public suites: few differences, each with who is right, and the page that says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_grading", ROOT / "docs" / "make_grading.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks itself up by its module's name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "make_grading", module)
        spec.loader.exec_module(module)
    return module


def test_a_part_of_the_public_suites_is_graded_as_said() -> None:
    """Every case in which one of the two is said to be wrong, and some of the others."""
    script = _script()
    cases = [case for n, case in enumerate(script.cases()) if case.right or n % 6 == 0]
    assert {case.suite for case in cases} == set(script.SUITES)
    grades = script.grades(cases)
    assert [case for case, grade in zip(cases, grades, strict=True) if case.equal != grade.correct] == [
        case for case in cases if case.right
    ]


@pytest.mark.slow
def test_the_public_suites_are_graded_as_the_page_says() -> None:
    script = _script()
    cases = script.cases()
    assert len(cases) == len({(case.suite, case.answer, case.reference) for case in cases}) >= 370
    assert {case.suite for case in cases} == set(script.SUITES)
    grades = script.grades(cases)
    differ = [case for case, grade in zip(cases, grades, strict=True) if case.equal != grade.correct]
    assert len(differ) <= 0.03 * len(cases)
    # Whoever is said to be right is said so of a difference, and of every one.
    assert differ == [case for case in cases if case.right]
    assert all(case.because for case in differ)
    assert all(grade.why for grade in grades)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.page_with(script.block(cases, grades)) == page, "run: python docs/make_grading.py"
