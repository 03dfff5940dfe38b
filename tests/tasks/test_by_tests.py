"""Answers that are code: how they are found in a text, made into a program, and judged once each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mless.errors import BadData
from mless.tasks import GRADERS, extract, load_items
from mless.tasks.grading.by_tests import Problem, PythonTests, program
from sandboxed import sandbox  # noqa: F401

PROMPT = 'import math\n\n\ndef area(r):\n    """Of a circle of radius r."""\n'
TEST = "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n"
PROBLEM = Problem(PROMPT, TEST, "area")
REFERENCE = json.dumps({"prompt": PROMPT, "test": TEST, "entry_point": "area"})


@pytest.mark.parametrize(
    ("text", "found", "how"),
    [
        ("Here:\n```python\ndef f():\n    return 1\n```\nDone.", "def f():\n    return 1\n", "code"),
        ("```\nx = 1\n```\n```py\ndef f(): pass\n```\n```python\nf()\n```", "def f(): pass\n", "code"),
        ("```bash\npip install x\n```\n```python\nx = 2\n```", "x = 2\n", "code"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1", "code"),
        ("    return 1\n", "    return 1\n", "code"),
        (" \n", None, "none"),
    ],
)
def test_code_in_a_text(text: str, found: str | None, how: str) -> None:
    one = extract(text, ("code",))
    assert (one.text, one.how) == (found, how)


@pytest.mark.parametrize(
    ("answer", "made"),
    [
        ("def area(r):\n    return 0\n", "import math\n\n\n\ndef area(r):\n    return 0\n\n"),
        ("    return math.pi\n", f"{PROMPT}    return math.pi\n\n"),
        ("return math.pi\n", f"{PROMPT}    return math.pi\n\n"),
        ("    return 1\n\nprint(area(2))\ndef other(): pass\n", f"{PROMPT}    return 1\n\n\n"),
        (
            "x = r\nif r:\n    x = 1\nreturn x\nprint(1)\n",
            f"{PROMPT}    x = r\n    if r:\n        x = 1\n    return x\n\n",
        ),
        ("while True:\n    pass\n", f"{PROMPT}    while True:\n        pass\n\n"),
        ("x = r\n    return x\n", f"{PROMPT}    x = r\n    return x\n\n"),
        ("if r:\n        return 1\n    return 2\n", f"{PROMPT}    if r:\n        return 1\n    return 2\n\n"),
        ("return (\n    1\n)\n", f"{PROMPT}    return (\n    1\n)\n\n"),
        ("x = [\n    r\n]\nreturn x\n", f"{PROMPT}    x = [\n        r\n    ]\n    return x\n\n"),
        ("x = r\n    return x\n\n# So:\ny = area(2)\n", f"{PROMPT}    x = r\n    return x\n\n\n"),
        (
            "default = 1\nprinted = default\nreturn printed\n",
            f"{PROMPT}    default = 1\n    printed = default\n    return printed\n\n",
        ),
    ],
    ids=[
        "the whole function",
        "a completion",
        "without its indentation",
        "with more behind it",
        "a body at the margin",
        "a body of one block at the margin",
        "a body whose first line lost its indentation",
        "a block whose first line lost its indentation",
        "a bracket that closes at the margin",
        "a bracket at the margin in a body at the margin",
        "a first line that lost its indentation, with other code behind the function",
        "names that begin as an end does",
    ],
)
def test_programs(answer: str, made: str) -> None:
    assert program(answer, PROBLEM) == made


@pytest.mark.parametrize("reference", ["5", "[]", "{}", json.dumps({"prompt": "x", "test": "y"}), "{"])
def test_what_is_no_problem_is_refused(reference: str) -> None:
    with pytest.raises(BadData, match="needs the fields prompt, test, entry_point of every problem"):
        PythonTests().grade("x", reference)


def test_no_answer_runs_nothing() -> None:
    assert PythonTests().grade(None, REFERENCE).why == "no answer"


def test_it_is_in_the_table_and_says_that_it_runs_code() -> None:
    maker = GRADERS.get("python-tests")
    assert maker is PythonTests
    assert maker.runs_code


@pytest.mark.usefixtures("sandbox")
def test_each_distinct_answer_is_judged_once() -> None:
    right, wrong = "    return math.pi * r * r\n", "    return 3 * r * r\n"
    heard: list[tuple[int, int]] = []
    with PythonTests() as grader:
        pairs = [(right, REFERENCE), (wrong, REFERENCE), (right, REFERENCE), (None, REFERENCE)]
        grades = grader.grade_many(pairs, lambda done, total: heard.append((done, total)))
    assert [(one.correct, one.why) for one in grades] == [
        (True, "the tests passed"),
        (False, "a test failed"),
        (True, "the tests passed"),
        (False, "no answer"),
    ]
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_problems_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"task_id": "a", "canonical_solution": "x"} | json.loads(REFERENCE)))
    (item,) = load_items(str(file))[1]
    assert (item.id, item.question) == ("a", PROMPT)
    assert json.loads(item.answer or "") == json.loads(REFERENCE)
