"""Where an answer is found in a text, and that no text is too hostile to be read."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mless import tasks
from mless.errors import BadStudy
from mless.tasks.extracting import (
    _NUMBER,
    DEFAULT_RULES,
    EXTRACTION_RULES,
    NO_ANSWER,
    TASK_RULES,
    Extracted,
    Rule,
    boxed,
    choice,
    extract,
    formula,
    hashes,
    number,
)
from outside import Outside

# Text out of the signs that the rules look for, so that random text gets past their first character.
pieces = st.sampled_from(
    [*"{}\\$#.,-%/()AB 15\n", "\\boxed", "\\fbox{", "####", "answer is ", "\\frac{1}{2}", "1,234", "\\text{"]
)
texts = st.one_of(st.text(), st.lists(pieces, max_size=60).map("".join))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so it is $\boxed{42}$.", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5", "5"),
        (r"is $\boxed 5$.", "5"),
        (r"\boxed 3/4, as", "3/4"),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x = \fbox{}}", r"x = \fbox{}"),
        (r"{{ \boxed{5}", "5"),
        (r"}} \boxed{5}", "5"),
        (r"\boxed{3} … so \boxed{5", "3"),
        (r"\boxed{5", None),
        (r"\boxed{\{5}\}", r"\{5"),
        (r"\boxed{5\}", None),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed", None),
        (r"\boxedtext{5}", None),
        (r"a boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_complete_box(text: str, found: str | None) -> None:
    assert boxed(text).text == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} and \boxed{2} and \boxed{3}", "1, 2, 3"),
        (r"\boxed{1},\boxed{2}", "1, 2"),
        (r"$\boxed{1}\boxed{2}$", "1, 2"),
        (r"\(\boxed{1}\) or \(\boxed{-2}\).", "1, -2"),
        (r"\[ \boxed{(2, 2) } \quad \text{and} \quad \boxed{ (6, 2)} \]", "(2, 2), (6, 2)"),
        (r"\boxed{1} apple and \boxed{2} pears", "1, 2"),
        (r"\boxed{3} \text{ for part (a) and } \boxed{4}", "3, 4"),
        (r"\( y_1 = \boxed{x^2} \) and \( y_2 = \boxed{x + 2} \)", "x^2, x + 2"),
        (r"$a=\boxed 5$ and $b = \boxed{6}$", "5, 6"),
        (r"\boxed{7}, \boxed{7}", "7"),
        # A correction, a conclusion, another sentence, another paragraph: the last box alone.
        (r"\boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{1} is wrong and \boxed{2}", "2"),
        (r"\boxed{1}, so \boxed{2}", "2"),
        (r"not \boxed{1} but \boxed{2}", "2"),
        (r"\boxed{1}. And \boxed{2}", "2"),
        (r"$x = \boxed{3}$ and $y = \boxed{4}$, so the sum is $\boxed{7}$", "7"),
        (r"\boxed{1} one two three four five and \boxed{2}", "2"),
        ("\\boxed{1},\n\n\\boxed{2}", "2"),
        ("\\boxed{1}\n\\boxed{2}", "2"),
        (r"\boxed{1}" + " " * 100 + r"and \boxed{2}", "2"),
    ],
)
def test_boxes_that_are_joined_are_one_answer(text: str, found: str) -> None:
    assert boxed(text).text == found


@pytest.mark.parametrize(
    ("text", "found", "stated"),
    [
        (r"Therefore $x \geq 5$ is the solution.", r"x \geq 5", False),
        (r"so the pair is \( (7, 6) \).", "(7, 6)", False),
        (r"\[ a = 3, \] hence $$ [0, 1) $$ it is", "[0, 1)", False),
        (r"$\frac{1}{2}.$", r"\frac{1}{2}", True),
        (r"The answer is $(0, 1)$. I hope that $x > 7$ is clear.", "(0, 1)", True),
        (r"The answer is 7.78, for $x = 3$.", "7.78", True),
        ("$1$\n\n$2$", "2", False),
        # A number that comes later, and names that are passed over.
        (r"The largest $n$ with $n < 35$ was 34.", "34", False),
        (r"34 is the largest $n$.", "34", False),
        (r"$(7, 6)$ solves it for $f(x)$ and $(x, y)$", "(7, 6)", False),
        (r"it was $\frac12$, or 50%", "50%", False),
        # Dollars that are money.
        ("It costs $5 and then $7, so 12 in all", "12", False),
        ("He has $10,200 + $255 = $10,455. The final answer is $10,455$.", "10,455", True),
        (r"paid $3 for one and $\$4$ for two", r"\$4", False),
        ("just 7", "7", False),
        ("$$", None, None),
        ("nothing here", None, None),
        ("an open $x + ", None, None),
        (r"\( \)", None, None),
    ],
)
def test_the_formula_or_number_that_is_the_answer(text: str, found: str | None, stated: bool | None) -> None:
    assert (formula(text).text, formula(text).stated) == (found, stated)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9 * 2 = $<<9*2=18>>18\n#### 18", "18"),
        ("#### 1,234", "1,234"),
        ("####-5", "-5"),
        ("#### $18 dollars", "$18"),
        ("#### **18**", "18"),
        ("#### $18$", "$18"),
        ("#### 18.\nBye 7", "18"),
        ("#### 3\n#### 4", "4"),
        ("#### 3. Then add 4", None),
        ("#### Step 3", None),
        ("### 18", None),
        ("####", None),
    ],
)
def test_the_number_behind_four_hashes(text: str, found: str | None) -> None:
    assert hashes(text).text == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 3 days and 12 hours.", "12"),
        ("That is $1,234.50.", "$1,234.50"),
        ("from 5-3", "3"),
        ("it is -3", "-3"),
        ("it is −3", "−3"),
        ("a debt of -$5", "-$5"),
        ("7/8 of H2O", "7/8"),
        ("12 / 5", "12 / 5"),
        ("about 50%", "50%"),
        (r"about 50 \%", r"50 \%"),
        (".5", ".5"),
        ("x2", None),
        ("10^5", "10^5"),
        ("none at all", None),
    ],
)
def test_the_last_number(text: str, found: str | None) -> None:
    assert number(text).text == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so $\frac{3}{4}$", r"\frac{3}{4}"),
        (r"so $-\dfrac{3}{4}$", r"-\dfrac{3}{4}"),
        (r"so $1\frac{3}{4}$", r"1\frac{3}{4}"),
        (r"so $\frac34$", r"\frac34"),
        (r"$\frac{3}{4}$, or 0.75", "0.75"),
    ],
)
def test_a_latex_fraction_counts_as_a_number_when_asked(text: str, found: str) -> None:
    assert number(text, latex=True).text == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is B.", "B"),
        ("The answer is (b), not (C).", "B"),
        ("**Answer: D**", "D"),
        (r"Answer: $\boxed{\text{(E)}}$", "E"),
        ("The correct option is A because", "A"),
        ("Is the answer A? No, the answer is C", "C"),
        ("B", "B"),
        ("(B)", "B"),
        ("b.", "B"),
        (r"\text{(C)}", "C"),
        ("First (A), then (D) fits best", "D"),
        ("D. the last one", "D"),
        ("A. one\nB. two", None),
        ("The answer is Bob", None),
        ("The answer is A+B", None),
        ("F", "F"),
        ("The answer is I think B", None),
        ("A man", None),
    ],
)
def test_the_choice(text: str, found: str | None) -> None:
    assert choice(text).text == found


def test_rules_apply_in_their_order() -> None:
    text = "#### 3\n\\boxed{4} and 5"
    orders: list[tuple[Rule, ...]] = [("hashes", "boxed"), ("boxed", "hashes"), ("number",)]
    assert [extract(text, rules).text for rules in orders] == list("345")
    assert extract("just 7", ("boxed", "number")) == Extracted("7", "number", 5, 6, stated=False)
    assert extract("just 7", ("boxed",)) == extract("just 7", ()) == NO_ANSWER
    assert NO_ANSWER.text is None
    assert NO_ANSWER.how == "none"
    assert extract("#### 18 apples, so 4").text == "4"
    assert extract("#### 18 apples\nso 4").text == "18"
    assert all(set(rules) <= set(EXTRACTION_RULES) for rules in TASK_RULES.values())


def test_a_truncated_solution_has_no_answer_where_a_box_was_asked_for() -> None:
    assert extract("We add 3 and 4, which gives 7, so that", TASK_RULES["math500"]) == NO_ANSWER


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(
        BadStudy, match=r"no extraction rule 'box' \(did you mean 'boxed'\?\); there are: boxed, hashes, "
    ):
        extract("5", ("box",))


SHOUTED = """
import mless
from mless.tasks import Extracted

def shouted(text):
    loud = [word for word in text.split() if word.isupper()]
    return Extracted(loud[-1], "shouted", text.rindex(loud[-1]), len(text), stated=True) if loud else Extracted(None, "none")

mless.register("extraction_rules", "shouted", shouted)
"""


def test_a_rule_from_outside(outside: Outside) -> None:
    outside.write("shouting", SHOUTED)
    importlib.import_module("shouting")
    assert extract("it is FIVE", ("boxed", "shouted")).text == "FIVE"
    assert extract("it is five", ("boxed", "shouted", "number")) == NO_ANSWER
    code = "from mless.tasks import extract; print(extract('it is FIVE', ('shouted',)).text)"
    assert outside.in_another_process(code) == "FIVE"


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_no_text_raises_and_what_is_found_stands_in_it(text: str) -> None:
    for rule in EXTRACTION_RULES:
        for latex in (False, True):
            found = number(text, latex=True) if latex and rule == "number" else extract(text, (rule,))
            if found.text is None:
                assert found == NO_ANSWER
                continue
            assert found.how == rule
            assert found.stated is not None
            assert found.stated or rule in ("formula", "number", "choice", "last-number", "first-number")
            assert found.text.strip() != ""
            assert found.text == found.text.strip() or rule == "code", "only code keeps its indentation"
            there = text[found.start : found.stop]
            if rule == "boxed" and found.text != there:  # several boxes
                assert all(part in there for part in found.text.split(", "))
            else:
                assert found.text == (there.upper() if rule == "choice" else there)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\fbox{\ }", None),
        (r"\boxed{4\ }", "4"),
        (r"\boxed{4 \ \ }", "4"),
        (r"\boxed{4}, \boxed{\ }", "4"),
        (r"\boxed{4\\ }", r"4\\"),
    ],
)
def test_latexs_own_space_is_no_part_of_an_answer(text: str, answer: str | None) -> None:
    assert boxed(text).text == answer


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_reading_an_answer_again_changes_nothing(text: str) -> None:
    for rule in ("number", "choice"):
        if (found := extract(text, (rule,)).text) is not None:
            assert extract(found, (rule,)).text == found
    if (found := boxed(text).text) is not None:
        assert boxed(f"\\boxed{{{found}}} ").text is not None
        if "\\" not in found:
            assert boxed(f"\\boxed{{{found}}}").text == found


@given(
    inner=st.recursive(
        st.text("ab1+ ", max_size=5), lambda part: st.lists(part, max_size=3).map(lambda p: "{" + "".join(p) + "}")
    )
)
@settings(max_examples=200, deadline=None)
def test_balanced_content_comes_back_whole(inner: str) -> None:
    assert boxed(f"so $\\boxed{{{inner}}}$ holds").text == (inner.strip() or None)


CASES: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("extraction_cases.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['rule']}-{case['text'][:40]!r}")
def test_what_a_reader_would_say(case: dict[str, Any]) -> None:
    rules: tuple[Rule, ...] = DEFAULT_RULES if case["rule"] == "number" else ("choice",)
    found = extract(case["text"], rules)
    assert (found.text, found.stated) == (case["found"], case["stated"])
    # what is found as stated is what a reader says; a guess stands where a reader finds no result
    agrees = case["found"] == case["reader"] if case["stated"] else case["reader"] is None
    assert agrees != ("differs" in case)


def test_few_of_the_cases_differ_from_a_reader() -> None:
    assert len(CASES) >= 100
    assert len({(case["rule"], case["text"]) for case in CASES}) == len(CASES)
    differing = [case for case in CASES if "differs" in case]
    assert len(differing) <= 5
    page = (Path(__file__).parents[2] / "docs" / "extraction.md").read_text("utf-8")
    assert all(case["text"] in page for case in differing), "docs/extraction.md lists what the rules read differently"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 1/2", "7/2"),
        ("The answer is 1e5.", "100000"),
        ("at 10:30", "10:30"),
        ("The answer is 3½.", "7/2"),
        ("Le résultat est 1\u202f234.", "1234"),
        ("The answer is 6 × 10^3.", "6000"),
        ("The total is $1{,}234$.", "1234"),
        ("Das Ergebnis ist 1.234.567.", "1234567"),
        ("The total is ₹12,34,567.", "₹1234567"),
    ],
)
def test_what_is_found_has_the_value_a_reader_gives_it(text: str, value: str) -> None:
    found = extract(text)
    assert found.text is not None
    assert tasks.vote_of(found.text) == tasks.vote_of(value)


def test_gsm8ks_own_solutions() -> None:
    file = Path(os.environ.get("MLESS_DATA") or Path(__file__).parents[3] / "shared" / "data") / "gsm8k_test.jsonl"
    if not file.is_file():
        pytest.skip(f"no {file}")
    rule = last = 0
    with tasks.Grader(limit=20) as grader:
        for line in file.read_text("utf-8").splitlines():
            solution, _, answer = json.loads(line)["answer"].rpartition("####")
            text = re.sub(r"<<.*?>>", "", solution).strip()
            numbers = [match[0] for match in _NUMBER.finditer(text)]
            rule += grader.grade(number(text), answer.strip()).correct
            last += bool(numbers) and grader.grade(numbers[-1], answer.strip()).correct
    # docs/extraction.md has these figures
    assert (rule, last) == (1_296, 1_282)


def test_a_result_far_from_the_end_is_still_found() -> None:
    text = "The answer is 42. " + "Then add 3 to it, and so on and so forth. " * 300
    assert extract(text) == Extracted("42", "number", 14, 16, stated=True)
    # of very many numbers only the last are looked at; the last one is then a guess
    assert extract("The answer is 42. " + "7 and " * 1_000).stated is False


HOSTILE = [
    "{", "}", "\\", "1", "1,", "111,", "#", "####", "#### ", "\\boxed", "\\boxed{", "\\boxed ", "\\boxed{a}", "\\boxed{a} and ", "\\boxed{{", " ", "\n",
    "answer ", "answer is ", "(", "A", "A.\n", "a1", "-", "$", "-$", "\\frac", "\\frac{1}{", "1/", ".1", "%", "1 /", "\\text{", "\\\\boxed", "(A", "*",
    "= 1 ", "is 1, ", "so 1. ", "because 1 ", "1 234 ", "wait, 1 ", "1:", "1e", "1^", "the answer to 1 ", "B is correct ", "not B ", "total of ", "1. ",
    "\\(", "\\(1\\)", "$1$", "$a b ", "$$", "answer is $1$ ",
]  # fmt: skip


def lines_run(text: str) -> int:
    """How many lines of Python the rules run over `text`."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        extract(text, ("boxed", "hashes", "number", "choice"))
        number(text, latex=True)
        extract(text, ("formula",))
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("times", [150, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", HOSTILE, ids=repr)
def test_work_grows_no_faster_than_the_text(unit: str, times: int) -> None:
    once, twice = lines_run(unit * times), lines_run(unit * 2 * times)
    assert twice <= 2.1 * once + 100


@pytest.mark.parametrize("size", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", HOSTILE, ids=repr)
def test_tens_of_kilobytes_are_read_at_once(unit: str, size: int) -> None:
    # Inside a regular expression no line is counted; one that backtracked here would take minutes, not seconds.
    for text in (unit * (size // len(unit)), unit * (size // len(unit)) + "}"):
        assert isinstance(extract(text, ("boxed", "hashes", "number", "choice")), Extracted)
        assert isinstance(number(text, latex=True), Extracted)
        assert isinstance(extract(text, ("formula",)), Extracted)


def test_the_default_finds_all_but_letters() -> None:
    assert "choice" not in DEFAULT_RULES
