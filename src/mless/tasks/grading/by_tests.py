"""Answers that are Python code: right where the problem's own tests pass, run in a sandbox.

A problem is JSON with HumanEval's fields: `prompt` (a function's head and docstring), `test` (a function `check`) and `entry_point` (the
function's name). An answer is the whole function or a completion of the prompt; `program` says how they are told apart.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from mless.errors import BadData
from mless.guarded import usable_cores
from mless.tasks.extracting import Extracted
from mless.tasks.grading.base import AnswerGrader, Grade, distinct_pairs, text_of
from mless.tasks.grading.sandbox import Limits, require_sandbox, run_tests

#: A problem's fields, in this order.
PROBLEM_FIELDS = ("prompt", "test", "entry_point")
#: Sandboxes at once, at most: each has two processes.
_MOST_AT_ONCE = 16
# Where a completion's function has ended: the next thing at the margin, as the published evaluation stops.
_AFTER_FUNCTION = re.compile(r"^(?:def|class|if|print|assert|@|```|#)", re.MULTILINE)
# The same for a body that stands at the margin itself.
_AFTER_BODY = re.compile(r"^(?:(?:def|class|if\s+__name__|print|assert)\b|@|```)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Problem:
    """What an answer is run with."""

    prompt: str
    test: str
    entry_point: str

    @classmethod
    def read(cls, reference: str) -> Problem:
        try:
            fields: Any = json.loads(reference)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            fields = {}
        values = [cast("dict[str, Any]", fields).get(name) for name in PROBLEM_FIELDS]
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise BadData(
                f"grading by tests needs the fields {', '.join(PROBLEM_FIELDS)} of every problem, as HumanEval has them; take such a file, or "
                "another grader"
            )
        problem = cls(*cast("list[str]", values))
        if not problem.entry_point.isidentifier():
            raise BadData(f"entry_point must be the name of a function, got {problem.entry_point[:80]!r}")
        return problem


def program(answer: str, problem: Problem) -> str:
    """The code to run.

    An answer that defines the function gets what stands above the function in the prompt (imports, other functions). Any other is a
    completion: the prompt goes before it, and it ends where something begins at the margin. A body that stands at the margin is moved in.
    """
    begins = re.compile(
        rf"^(?:async\s+)?def\s+{re.escape(problem.entry_point)}\b|^{re.escape(problem.entry_point)}\s*=", re.MULTILINE
    )
    if begins.search(answer):
        head = begins.search(problem.prompt)
        return f"{problem.prompt[: head.start()] if head else ''}\n{answer}\n"
    if not answer[:1].isspace():
        body = answer[: end.start()] if (end := _AFTER_BODY.search(answer)) else answer
        if _stands_at_the_margin(body):
            return f"{problem.prompt}{textwrap.indent(body, '    ')}\n"
        answer = (
            f"    {answer}"  # the prompt's last line break and the first indentation may have been taken for blanks
        )
    end = _AFTER_FUNCTION.search(answer)
    return f"{problem.prompt}{answer[: end.start()] if end else answer}\n"


def _stands_at_the_margin(body: str) -> bool:
    """Whether it is a whole body without its indentation, not one whose first line alone has lost it, with other code behind it."""
    first, *others = [line for line in body.splitlines() if line.strip() and line[0] != "#"] or [""]
    if not others:
        return False
    if any(re.match(r"(?:return|yield)\b", line) for line in others):  # these stand in functions only
        return True
    indentation = len(others[0]) - len(others[0].lstrip())
    return indentation <= 4 if first.rstrip().endswith(":") else indentation == 0


class PythonTests(AnswerGrader):
    """Runs the tests of each problem on the answer's code; each distinct pair once, several at a time."""

    runs_code: ClassVar[bool] = True
    rules: ClassVar[tuple[str, ...] | None] = ("code",)

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._known: dict[tuple[str, str], Grade] = {}

    @classmethod
    def require(cls) -> None:
        require_sandbox()

    def grade(self, extracted: Extracted | str | None, reference: str) -> Grade:
        answer = text_of(extracted)
        problem = Problem.read(reference)
        if not answer.strip():
            return Grade(False, "no answer")
        key = answer, reference
        if key not in self._known:
            code = program(answer, problem)
            self._known[key] = Grade(*run_tests(code, problem.entry_point, problem.prompt, problem.test, self._limits))
        return self._known[key]

    def grade_many(
        self, pairs: Sequence[tuple[Extracted | str | None, str]], progress: Callable[[int, int], None] | None = None
    ) -> list[Grade]:
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, usable_cores())) as pool:
            runs = [pool.submit(self.grade, answer, reference) for answer, reference in distinct_pairs(pairs)]
            try:
                for done, run in enumerate(as_completed(runs), 1):
                    run.result()
                    if progress is not None:
                        progress(done, len(runs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [self.grade(extracted, reference) for extracted, reference in pairs]
