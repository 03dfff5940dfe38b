"""The one table of graders."""

from __future__ import annotations

from collections.abc import Callable

from mless.registry import Registry
from mless.tasks.grading.base import AnswerGrader
from mless.tasks.grading.by_tests import PythonTests
from mless.tasks.grading.grader import Grader
from mless.tasks.grading.plain import ExactMatch, Numeric

DEFAULT_GRADER = "math-verify"
#: For code: the problem's own tests.
CODE_GRADER = "python-tests"

#: What grades answers, by name: a class, or any function without arguments that makes a grader.
GRADERS: Registry[Callable[[], AnswerGrader]] = Registry(
    "graders",
    "grader",
    {DEFAULT_GRADER: Grader, CODE_GRADER: PythonTests, "exact-match": ExactMatch, "numeric": Numeric},
    wants="a class of mless.tasks.AnswerGrader, or a function that makes one",
    fits=lambda one: issubclass(one, AnswerGrader) if isinstance(one, type) else callable(one),
)
