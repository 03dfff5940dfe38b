"""Grades: every written pair as labelled, MATH-500 equal to itself, and no answer that hangs or kills a run."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import guarded_worker
from mless.errors import BadData, BadStudy, MlessError
from mless.tasks import vote_of
from mless.tasks.extracting import NO_ANSWER, Extracted, extract
from mless.tasks.grading import MAX_SYMBOLIC, NOTES, Grade, Grader, worker

LIMIT = 1.5
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pair:
    answer: str
    reference: str
    equal: bool
    note: str


PAIRS = [Pair(**json.loads(line)) for line in (HERE / "grading_pairs.jsonl").read_text(encoding="utf-8").splitlines()]

#: What is equal and not seen to be: units are not converted, degrees inside a function are read as radians,
#: words have no synonyms, a column is no tuple, and four letters in a row are a word.
#: Each is graded wrong on the strict side; should one be mended, it moves to the pairs.
KNOWN_LIMITS = [
    (r"500 \text{ cm}", r"5 \text{ m}"),
    (r"\sin 30^\circ", r"\frac{1}{2}"),
    ("2x = 10", "x = 5"),
    ("five", "5"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)"),
    ("abcd", "dcba"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(limit=20) as one:
        yield one


def test_there_are_enough_pairs_of_both_kinds() -> None:
    assert len(PAIRS) == len({(pair.answer, pair.reference) for pair in PAIRS}) >= 300
    assert sum(pair.equal for pair in PAIRS) >= 150
    assert sum(not pair.equal for pair in PAIRS) >= 150
    # The authors' rule, either in the other, is wrong on this many.
    traps = [p for p in PAIRS if not p.equal and (p.answer in p.reference or p.reference in p.answer)]
    assert len(traps) >= 60


def _some_of_each_kind(most: int) -> list[Pair]:
    """So many pairs of every note and label."""
    kinds: dict[tuple[str, bool], list[Pair]] = {}
    for pair in PAIRS:
        kinds.setdefault((pair.note, pair.equal), []).append(pair)
    return [pair for kind in kinds.values() for pair in kind[:most]]


@pytest.mark.parametrize(
    ("pairs", "by_symbols"),
    [(_some_of_each_kind(2), 20), pytest.param(PAIRS, 60, marks=pytest.mark.slow)],
    ids=["of each kind", "all"],
)
def test_pairs_are_graded_as_labelled(grader: Grader, pairs: list[Pair], by_symbols: int) -> None:
    grades = grader.grade_many([(pair.answer, pair.reference) for pair in pairs])
    wrong = [(pair, grade.why) for pair, grade in zip(pairs, grades, strict=True) if grade.correct != pair.equal]
    assert not wrong
    for grade in grades:
        assert grade.why
        assert grade.correct == bool(grade.string or grade.symbolic)
        assert grade.disagree == (grade.symbolic is not None and grade.symbolic != grade.string)
    # The labels would be met by text alone in part only; the rest is what the symbolic rule is for.
    assert sum(grade.disagree for grade in grades) >= by_symbols


@pytest.mark.parametrize("answer", ["1.234.567", "12,34,567", "+1.234.567", "12,34,567 apples"])
def test_groups_as_written_elsewhere(grader: Grader, answer: str) -> None:
    assert grader.grade(answer, "1234567").correct
    assert not grader.grade(answer, "1234568").correct


def test_a_list_stays_one_beside_a_list(grader: Grader) -> None:
    assert grader.grade("100, 10, 5", "5,10,100").correct
    assert not grader.grade("1.234", "1234").correct
    assert not grader.grade("1,23,45", "12345").correct


def test_known_limits_are_as_stated(grader: Grader) -> None:
    assert [pair for pair in KNOWN_LIMITS if grader.grade(*pair).correct] == []


@pytest.mark.parametrize("every", [25, pytest.param(4, marks=pytest.mark.slow)])
def test_grades_do_not_depend_on_the_order_of_pairs(grader: Grader, every: int) -> None:
    some = [pair for pair in PAIRS if not pair.note.startswith("other number")][::every]
    random.Random(5).shuffle(some)
    expected = {(p.answer, p.reference): grader.grade(p.answer, p.reference) for p in some}
    with Grader(limit=20) as other:
        for pair in sorted(some, key=lambda pair: pair.answer):
            assert other.grade(pair.answer, pair.reference) == expected[pair.answer, pair.reference]


def test_every_math500_reference_equals_itself(grader: Grader) -> None:
    folder = Path(os.environ.get("MLESS_DATA") or HERE.parents[2] / "shared" / "data")
    file = folder / "math500.jsonl"
    if not file.is_file():
        pytest.skip(f"no {file}")
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 500
    heard: list[tuple[int, int]] = []
    grades = grader.grade_many(
        [(extract(rf"Thus $\boxed{{{answer}}}$.", ("boxed",)), answer) for answer in answers],
        progress=lambda done, of: heard.append((done, of)),
    )
    assert [answer for answer, grade in zip(answers, grades, strict=True) if not grade.correct] == []
    distinct = len(set(answers))
    assert heard == [(done, distinct) for done in range(1, distinct + 1)]


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        (None, "5", Grade(False, "no answer", None, None, False)),
        ("", "5", Grade(False, "no answer", None, None, False)),
        (" \n", "5", Grade(False, "no answer", None, None, False)),
        (NO_ANSWER, "5", Grade(False, "no answer", None, None, False)),
        (Extracted("5", "number"), "5", Grade(True, "same text", None, True, False)),
        ("0.5", "1/2", Grade(True, "same number", True, True, False)),
        ("0.333333", "1/3", Grade(True, "same number to 6 digits", True, False, True)),
        ("2", "12", Grade(False, "other number", False, False, False)),
        ("1+x", "x+1", Grade(True, "same value", True, False, True)),
        ("2+x", "x+1", Grade(False, "other value", False, False, False)),
        ("5 m", r"5\text{ cm}", Grade(False, "other value", False, False, False)),
        (r"5\text{ m}", r"5\text{ cm}", Grade(False, "other unit: m, not cm", None, False, False)),
        ("west", r"\text{east}", Grade(False, f"other text; {NOTES['words']}", None, False, False)),
        ("x+1=5", "5", Grade(False, "an equation against a value", None, False, False)),
        ("1000,99", "1000.99", Grade(True, "same number, with a decimal comma", True, True, False)),
        ("2, 3, 2", "2, 3", Grade(True, "same text; what it repeats counts once", None, True, False)),
        ("2, 1+x, 2", "1+x, 2", Grade(True, "same value; what it repeats counts once", True, False, True)),
        ("C. x = 42", "C", Grade(True, "same letter", None, True, False)),
        ("B. x = 42", "C", Grade(False, "other letter", None, False, False)),
        ("(1,2,3)", "(1,2)", Grade(False, "another kind or number of elements", None, False, False)),
        ("3", r"\frac{x}{", Grade(False, f"other text; {NOTES['reference']}", None, False, False)),
        (r"\frac{x}{", "3", Grade(False, f"other text; {NOTES['answer']}", None, False, False)),
        (r"\frac{x}{", r"\frac{x}{", Grade(True, "same text", None, True, False)),
    ],
)  # fmt: skip
def test_every_grade_says_why(grader: Grader, answer: Extracted | str | None, reference: str, expected: Grade) -> None:
    assert grader.grade(answer, reference) == expected


# --- what hostile answers may do ---

HOSTILE = {
    "tower": r"9^{9^{9^9}}",
    "factorial": "100000000!",
    "power": r"(x+1)^{100000}",
    "braces": "{" * 900 + "1" + "}" * 900,
    "fractions": r"\frac{1}{" * 150 + "1" + "}" * 150,
    "roots": r"\sqrt{" * 300 + "2" + "}" * 300,
    "powers": "x^" * 900 + "2",
    "integral": r"\int_0^{10^{10}} e^{-x^{x}} dx",
    "code": "__import__('os').system('exit')",
    "null": "\x00",
    "surrogate": "\ud800x+1",
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Grader]:
    with Grader(limit=LIMIT) as one:
        yield one


#: What hangs in other ways than the tower and the braces do: each costs the limit and a new worker.
HANGING = ("factorial", "power", "fractions", "powers", "integral")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in HANGING else n for n in HOSTILE])
def test_a_hostile_answer_ends_within_the_limit_and_the_next_is_graded_right(impatient: Grader, name: str) -> None:
    place = list(HOSTILE).index(name)
    # Pairs not seen before, so that the worker is there and asked.
    assert impatient.grade(f"{place}+y", f"y+{place}").correct
    grade = impatient.grade(HOSTILE[name], "x+2")
    assert not grade.correct
    assert impatient.grade(f"{place + 3}+x", f"x+{place + 3}") == Grade(True, "same value", True, False, True)
    if name == "tower":
        assert grade.why == f"other text; {NOTES['time']}"
        assert impatient.grade(HOSTILE[name], HOSTILE[name]).correct


def test_what_ran_out_of_time_once_is_not_tried_again(impatient: Grader) -> None:
    first = impatient.grade(HOSTILE["tower"], "x+3")
    assert NOTES["time"] in first.why
    assert impatient.grade(HOSTILE["tower"], "x+3") == first
    assert impatient._worker.process is None  # or the second would have started one


LONG = [
    "{", "}", "\\", "1", "1,", "111,", "x+", "\\frac", "\\sqrt(", "\\text{", "\\text{a}", "$", "-$", "x$", "a ", ", ", "_{",
                 "^\\circ", "\\!", "(", "cm ", "5 cm ", "x=", "=", " ", "-", "\\text{a ", "1 ", "\\begin{", "x\\in", "%", "and ", "\\pm",
]  # fmt: skip


@pytest.mark.parametrize("size", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", LONG, ids=repr)
def test_tens_of_kilobytes_are_compared_as_text(unit: str, size: int) -> None:
    text = unit * (size // len(unit)) + "1"
    with Grader(limit=1.0) as grader:
        assert not grader.grade(text, "2").correct  # what is quadratic would take minutes


def test_too_long_for_the_parser_is_said() -> None:
    with Grader() as grader:
        assert grader.grade("x+" * MAX_SYMBOLIC + "1", "x").why == f"other text; {NOTES['long']}"
        assert grader._worker.process is None


def test_memory_is_limited() -> None:
    if sys.platform != "linux":
        pytest.skip("RLIMIT_AS is Linux's")
    memory = 300 * 1024**2
    with Grader(limit=20, memory=memory) as grader:
        assert grader.grade("1+x", "x+1").correct
        assert grader._worker.process is not None
        limits = Path(f"/proc/{grader._worker.process._process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
        assert line.split()[3:5] == [str(memory)] * 2
        # An integer of 512 MB. math-verify swallows the MemoryError and calls the two different; all that is asked is that nothing dies.
        assert not grader.grade(r"2^{2^{32}} + x", "x+2").correct
        assert grader.grade("2+x", "x+2").correct


def test_a_worker_killed_from_outside_costs_nothing(grader: Grader) -> None:
    assert grader.grade("31+x", "x+31").correct
    assert grader._worker.process is not None
    grader._worker.process._process.kill()
    grader._worker.process._process.wait()
    assert grader.grade("32+x", "x+32") == Grade(True, "same value", True, False, True)


@pytest.mark.slow
def test_a_pair_that_crashes_a_fresh_worker_is_compared_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "__name__", guarded_worker.__name__)
    with Grader() as grader:
        assert grader.grade(guarded_worker.DIES, "x+41").why == f"other text; {NOTES['crash']}"
        assert grader.grade("42+x", "x+42").correct


def test_the_worker_is_lazy_and_ends_with_the_grader() -> None:
    with Grader() as grader:
        assert grader.grade("5", "5").correct
        assert grader._worker.process is None
        assert grader.grade("1+x", "x+1").correct
        assert grader._worker.process is not None
        process = grader._worker.process._process
        assert process.poll() is None
    assert process.poll() is not None
    assert grader._worker.process is None


def test_the_worker_and_this_module_import_neither_torch_nor_sympy_early() -> None:
    code = (
        "import sys, mless.tasks.grading.worker as w; print(sorted({'sympy', 'torch', 'math_verify'} & set(sys.modules)));"
        "from math_verify.grader import verify; print(w._symbolic(verify, 'x+1', '1+x'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True False"]


def test_without_the_symbolic_rule_it_says_so() -> None:
    with Grader(symbolic=False) as grader:
        assert grader.grade("1+x", "x+1") == Grade(False, f"other text; {NOTES['off']}", None, False, False)
        assert grader.grade("0.5", r"\frac12").correct


def test_a_missing_math_verify_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such thing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Grader() as grader, pytest.raises(MlessError, match=r"no such thing.*pip install math-verify"):
        grader.grade("1+x", "x+1")


def test_what_cannot_be_graded_is_refused() -> None:
    with Grader() as grader, pytest.raises(BadData, match="reference answer is empty"):
        grader.grade("5", " ")
    with pytest.raises(BadStudy, match="got 0"):
        Grader(limit=0)


texts = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from([*"{}\\$.,-%/()[]=_^ 15xi", "\\frac", "\\text{", "\\sqrt", "1,234", "\\{", "\\}", " cm", "and", "\\pm", "°"]),
        max_size=20,
    ).map("".join),
)  # fmt: skip


@given(answer=texts, reference=texts)
@settings(max_examples=150, deadline=None)
def test_no_text_raises_and_each_equals_itself(answer: str, reference: str) -> None:
    with Grader(symbolic=False) as grader:
        if reference.strip():
            grade = grader.grade(answer, reference)
            assert isinstance(grade, Grade)
            assert grader.grade(reference, reference).correct
            assert grader.grade(f" ${reference}$ ", reference).correct or "$" in reference or "\\" in reference
            if answer.strip():
                assert (
                    grade.correct == grader.grade(reference, answer).correct
                    # A decimal stands for a root, not a root for a decimal; an answer may repeat itself, a reference means it.
                    or re.search("digits|repeats", grade.why + grader.grade(reference, answer).why)
                )


@given(a=st.fractions(max_denominator=1000), b=st.fractions(max_denominator=1000))
@settings(max_examples=100, deadline=None)
def test_numbers_are_equal_exactly_when_they_are(a: object, b: object) -> None:
    with Grader(symbolic=False) as grader:
        assert grader.grade(str(a), str(b)).correct == (a == b)
        above, _, below = str(a).partition("/")
        assert grader.grade(rf"\dfrac{{{above}}}{{{below or 1}}}", str(a)).correct


@given(whole=st.integers(-(10**15), 10**15))
@settings(max_examples=100, deadline=None)
def test_thousands_separators_and_decimals_change_nothing(whole: int) -> None:
    with Grader(symbolic=False) as grader:
        for form in (f"{whole:,}", f"{whole}.0", f"${whole}$", f"{whole:,}".replace(",", "{,}"), f"x = {whole}"):
            assert grader.grade(form, str(whole)).correct
        assert not grader.grade(str(whole + 1), str(whole)).correct


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", r"\dfrac12", True),
        ("18", "18.0", True),
        ("$18$", "18", True),
        ("50%", "50", False),
        ("x+1", "x + 1", True),
        ("12", "21", False),
        (r"\text{east}", "west", False),
    ],
)
def test_answers_vote_by_what_they_are_worth(one: str, other: str, same: bool) -> None:
    assert (vote_of(one) == vote_of(other)) is same
