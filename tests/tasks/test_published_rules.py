"""Extraction rules and graders as published evaluations have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mless.errors import BadData
from mless.tasks import EXTRACTION_RULES, GRADERS, extract

TEXT = "There are 3 bags of 4. The answer is 12. Check: 12 / 4 = 3."


@pytest.mark.parametrize(
    ("rule", "text", "found", "stated"),
    [
        ("last-number", TEXT, "3", False),
        ("first-number", TEXT, "3", False),
        ("answer-is", TEXT, "12", True),
        ("answer-is", "Answer: 5, no. The answer is $1,200 in all, of 3.", "$1,200", True),
        ("answer-is", "ANSWER  IS -2", "-2", True),
        ("answer-is", "5 is the result", None, None),
        ("answer-is", "7. The answer is", None, None),
        ("last-number", "no number", None, None),
        ("first-number", "", None, None),
        ("last-number", r"It is \frac{1}{2}", r"\frac{1}{2}", False),
    ],
)
def test_where_a_rule_finds_its_number(rule: str, text: str, found: str | None, stated: bool | None) -> None:
    got = EXTRACTION_RULES.get(rule)(text)
    assert (got.text, got.stated) == (found, stated)
    assert got.how == ("none" if found is None else rule)
    if found is not None:
        assert text[got.start : got.stop] == found


def test_rules_are_tried_one_after_the_other() -> None:
    assert extract(TEXT, ["boxed", "answer-is", "last-number"]).text == "12"
    assert extract("so 5", ["boxed", "answer-is", "last-number"]).how == "last-number"


@given(st.text(alphabet="answer is:05.,-/$%\\ \n{}"))
def test_no_text_raises(text: str) -> None:
    for rule in ("last-number", "first-number", "answer-is"):
        found = EXTRACTION_RULES.get(rule)(text)
        if found.text is None:
            continue
        for grader in ("exact-match", "numeric"):
            with GRADERS.get(grader)() as judge:
                judge.grade(found, "5")


@pytest.mark.parametrize(
    ("grader", "answer", "reference", "right", "why"),
    [
        ("exact-match", " 12. ", "12", True, "same characters"),
        ("exact-match", "12.0", "12", False, "other characters"),
        ("exact-match", "1,200", "1200", False, "other characters"),
        ("exact-match", None, "12", False, "no answer"),
        ("numeric", "12.0", "12", True, "same number"),
        ("numeric", "$1,200", "1200", True, "same number"),
        ("numeric", r"\$1{,}200", "1200", False, "the answer is no number"),
        ("numeric", r"50\%", "50", True, "same number"),
        ("numeric", "1/4", "0.25", True, "same number"),
        ("numeric", "1/0", "0.25", False, "the answer is no number"),
        ("numeric", "−3", "-3", True, "same number"),
        ("numeric", "13", "12", False, "other number"),
        ("numeric", "12 apples", "12", False, "the answer is no number"),
        ("numeric", "12", "x + 1", False, "the reference is no number"),
        ("numeric", "1, 2", "12", False, "the answer is no number"),
        ("numeric", "3,5", "35", False, "the answer is no number"),
        ("numeric", "1,234,567", "1234567", True, "same number"),
        ("numeric", "1e999", "1e998", False, "the answer is no number"),
        ("numeric", " ", "12", False, "no answer"),
    ],
)  # fmt: skip
def test_what_a_grader_says(grader: str, answer: str | None, reference: str, right: bool, why: str) -> None:
    with GRADERS.get(grader)() as judge:
        found = judge.grade(answer, reference)
    assert (found.correct, found.why, found.disagree) == (right, why, False)


@pytest.mark.parametrize("grader", ["exact-match", "numeric"])
def test_an_empty_reference_is_refused(grader: str) -> None:
    with GRADERS.get(grader)() as judge, pytest.raises(BadData, match="the reference answer is empty; remove the item"):
        judge.grade("1", " ")
