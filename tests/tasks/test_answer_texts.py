"""Answers in a task's own form, the reasoning before them, and other items' answers beside them."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mless.tasks import (
    AnswerKind,
    AnswerPool,
    answer_kind,
    answer_text,
    load_items,
    other_answers,
    reasoning,
    reference_of,
    vote_of,
)
from mless.values import Item

DATA = Path(os.environ.get("MLESS_DATA") or Path(__file__).parents[3] / "shared" / "data")
CODE = json.dumps({"prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"})
OPTIONS = ("three", "four", "five")


def item(answer: str | None = None, solution: str | None = None, id: str = "1") -> Item:
    return Item(id, "q", answer, None, solution)


# --- the answer's own text ---


@pytest.mark.parametrize(
    ("task", "asked", "text"),
    [
        ("gsm8k_test", item("9 + 9 = <<9+9=18>>18\n#### 18"), "#### 18"),
        ("gsm8k", item("18"), "#### 18"),
        ("mine", item("so\n#### 1,000"), "#### 1,000"),
        ("math500", item(r"\frac{1}{2}", r"so $\boxed{\frac{1}{2}}$."), r"\boxed{\frac{1}{2}}"),
        ("math500", item(r"\boxed{5}"), r"\boxed{5}"),
        ("aime24", item("025"), r"\boxed{025}"),
        ("bundled", item("25"), r"\boxed{25}"),
        ("arithmetic-2", item("7"), r"\boxed{7}"),
        ("mine", item("  7 "), r"\boxed{7}"),
        ("mine", Item("1", "q", "1", None, None, OPTIONS, 1), r"\boxed{B}"),
        ("gsm8k", Item("1", "q", "C", None, None, OPTIONS, 2), r"\boxed{C}"),
        ("mine", Item("1", "q", None, None, None, OPTIONS), None),
        ("humaneval", item(CODE), None),
        ("mine", item(CODE), None),
        ("mine", item(), None),
        ("mine", item("  "), None),
        ("gsm8k", item(""), None),
    ],
)
def test_the_answer_in_the_tasks_form(task: str, asked: Item, text: str | None) -> None:
    assert answer_text(task, asked) == text


def test_a_system_text_without_a_box_gets_the_answer_alone() -> None:
    assert answer_text("arithmetic-1", item("7"), system="Reply with the result and nothing else.") == "7"
    assert answer_text("arithmetic-1", item("7"), system="Put it within \\boxed{}.") == r"\boxed{7}"
    assert answer_text("gsm8k", item("7"), system="Reply with the result and nothing else.") == "#### 7"


# --- the reasoning before it ---


@pytest.mark.parametrize(
    ("solution", "before"),
    [
        (r"so $x = \boxed{5}$.", "so $x = "),
        (r"so \boxed {5}", "so "),
        (r"so \fbox{5}", "so "),
        (r"so \boxed 5", "so "),
        (r"so \boxed{\frac{1}{\sqrt{2}}} and done", "so "),
        (r"first \boxed{4}. No: it is \boxed{5}.", r"first \boxed{4}. No: it is "),
        (r"so \boxed{1} and \boxed{2}", "so "),  # one answer in two boxes
        (r"so \fbox{\boxed{5}}", "so "),
        (r"so \boxed{5} is it, not \boxed{6", "so "),  # the last is cut off
        ("9 * 2 = 18\n#### 18", "9 * 2 = 18\n"),
        ("#### Step 1\nfoo\n#### 18", "#### Step 1\nfoo\n"),
        ("#### Step 1\nfoo \\boxed{18}", "#### Step 1\nfoo "),
        ("east\n#### east", "east\n"),
        (r"\boxed{5}", ""),
        ("no box here", None),
        (None, None),
    ],
)
def test_reasoning_ends_where_the_answer_begins(solution: str | None, before: str | None) -> None:
    assert reasoning(item("5", solution)) == before


_INNER = st.recursive(
    st.text("ab1+ ", min_size=1, max_size=4),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: rf"\frac{{{''.join(parts)}}}"),
    max_leaves=6,
)


@given(
    before=st.text(st.characters(exclude_characters="\\{}#", exclude_categories=["Cs"])),
    sign=st.sampled_from([r"\boxed", r"\boxed ", r"\fbox", r"\\boxed"]),
    content=_INNER.filter(str.strip),
    after=st.text(st.characters(exclude_characters="\\{}#", exclude_categories=["Cs"])),
)
def test_cut_and_rest_are_the_solution(before: str, sign: str, content: str, after: str) -> None:
    solution = f"{before}{sign}{{{content}}}{after}"
    found = reasoning(item("x", solution))
    assert found == before
    rest = solution[len(before) :]
    assert rest.startswith(sign)
    assert rest.count("{") == rest.count("}")


@given(st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", "####", " ", "5", "\n", "a", "\\"])).map("".join))
def test_no_solution_is_too_odd(solution: str) -> None:
    found = reasoning(item("x", solution))
    assert found is None or solution.startswith(found)
    if found is not None:
        assert re.match(r"\\\\?(boxed|fbox)|####", solution[len(found) :])


# --- kinds ---


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("18", "integer"),
        ("-3", "integer"),
        ("$18", "integer"),
        (r"\$18", "integer"),
        ("1,000", "integer"),
        ("1{,}000", "integer"),
        (r"50\%", "integer"),
        (r"90^\circ", "integer"),
        (r"10 \text{ cm}", "integer"),
        ("0.5", "decimal"),
        (".35625", "decimal"),
        (r"0.\overline{3}", "decimal"),
        ("1/2", "fraction"),
        (r"\frac{1}{2}", "fraction"),
        (r"-\dfrac12", "fraction"),
        (r"1\frac{4}{5}", "fraction"),
        ("B", "letter"),
        ("(A)", "letter"),
        ("B.", "letter"),
        (r"\text{(B)}", "letter"),
        (r"\textbf{C}", "letter"),
        ("(1,2)", "tuple"),
        (r"(-\infty, 3]", "tuple"),
        ("1, -2", "tuple"),
        (r"\{1, 2\}", "tuple"),
        ("x^2+1", "expression"),
        (r"3\sqrt{2}", "expression"),
        ("2^{10}", "expression"),
        (r"3 \times 10^8", "expression"),
        ("52_8", "expression"),
        ("x", "expression"),
        (r"\text{east}", "text"),
        ("Evelyn", "text"),
    ],
)
def test_kinds(answer: str, kind: AnswerKind) -> None:
    assert answer_kind(answer) == kind


@given(st.text(max_size=40))
def test_any_text_is_of_some_kind(answer: str) -> None:
    assert answer_kind(answer) in ("integer", "decimal", "fraction", "letter", "tuple", "expression", "text")


# --- other answers ---


def test_other_answers_are_of_the_same_kind_and_form() -> None:
    answers = ["7", r"\frac{1}{2}", "12", "1/3", "x^2", "9", r"\text{(B)}"]
    items = [item(answer, id=str(n)) for n, answer in enumerate(answers)]
    assert set(other_answers("mine", items, 0)) == {r"\boxed{12}", r"\boxed{9}"}
    assert other_answers("mine", items, 1) == (r"\boxed{1/3}",)
    assert other_answers("mine", items, 4) == ()
    assert other_answers("mine", items, 6) == ()
    assert set(other_answers("gsm8k", items, 0)) == {"#### 12", "#### 9"}
    assert set(other_answers("mine", items, 0, system="Just the result.")) == {"12", "9"}


def test_what_is_equal_is_no_other_answer() -> None:
    def others(*answers: str) -> set[str]:
        return set(other_answers("mine", [item(answer, id=str(n)) for n, answer in enumerate(answers)], 0))

    assert others("1/2", r"\frac{1}{2}", r"\frac{2}{4}", "1/3") == {r"\boxed{1/3}"}
    assert others("50", r"50\%", "$50", "60", "60 dollars") == {r"\boxed{60}"}
    assert others("1, -2", "-2, 1", "(1, -2)") == {r"\boxed{(1, -2)}"}
    assert others("B", r"\text{(B)}", "(C)", r"\text{(C)}") == {r"\boxed{(C)}"}


def test_other_options_are_the_other_answers() -> None:
    items = [Item(str(n), "q", "B", None, None, OPTIONS, 1) for n in range(3)]
    assert set(other_answers("mine", items, 0)) == {r"\boxed{A}", r"\boxed{C}"}
    assert len(other_answers("mine", items, 0, k=1)) == 1
    # Its letters are no answers of others.
    assert other_answers("mine", [*items, item("D", id="9")], 3) == ()


def test_items_without_an_answer_have_no_others() -> None:
    items = [item(None, id="0"), item("7", id="1"), item("8", id="2")]
    assert other_answers("mine", items, 0) == ()
    assert other_answers("mine", items, 1) == (r"\boxed{8}",)
    assert other_answers("humaneval", [item(CODE), item(CODE, id="2")], 0) == ()
    assert other_answers("mine", items, 1, k=0) == ()


_ANSWERS = st.one_of(
    st.integers(-200, 200).map(str),
    st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.sampled_from(["x^2", "2 x", "(A)", "B", "east", "(1, 2)", "1, 2", "2, 1", "50%", "", "  "]),
)


@given(answers=st.lists(_ANSWERS, min_size=1, max_size=40), k=st.integers(1, 20), seed=st.integers(0, 5))
def test_properties_of_other_answers(answers: list[str], k: int, seed: int) -> None:
    items = [item(answer, id=f"i{n}") for n, answer in enumerate(answers)]
    shuffled = random.Random(seed).sample(items, len(items))
    pool, again = AnswerPool("mine", items), AnswerPool("mine", shuffled)
    for number, one in enumerate(items):
        found = pool.others(number, k, seed)
        assert found == again.others(shuffled.index(one), k, seed)
        assert len(found) <= k
        votes = [vote_of(text.removeprefix("\\boxed{").removesuffix("}")) for text in found]
        assert len(set(votes)) == len(votes)
        assert vote_of(reference_of(one)) not in votes
        assert all(answer_kind(text[7:-1]) == answer_kind(one.answer or "") for text in found)


@given(st.lists(st.integers(1, 99_999), min_size=20, max_size=60, unique=True), st.integers(100_000, 200_000))
def test_another_item_changes_one_other_answer_at_most(numbers: list[int], new: int) -> None:
    items = [item(str(number), id=str(number)) for number in numbers]
    assume(len(items) > 17)
    before, after = AnswerPool("mine", items), AnswerPool("mine", [item(str(new), id="new"), *items])
    for number in range(len(items)):
        assert len(set(before.others(number)) - set(after.others(number + 1))) <= 1


def test_the_draw_is_seeded_random_and_prefers_like_lengths() -> None:
    items = [item(str(number), id=str(number)) for number in range(1, 3000)]
    pool = AnswerPool("mine", items)
    assert pool.others(49) == pool.others(49) != pool.others(49, seed=1)
    assert pool.others(49) != pool.others(48)
    lengths = [len(text) - len(r"\boxed{}") for number in range(9, 99) for text in pool.others(number, seed=3)]
    assert lengths.count(2) > 0.3 * len(lengths)  # 3 % of all answers have two digits
    assert set(lengths) >= {1, 2, 3}
    # No answer is drawn for many items while others never are.
    times = [text for number in range(999, 1999) for text in pool.others(number)]
    counts = [times.count(rf"\boxed{{{number}}}") for number in range(1000, 1100)]
    assert max(counts) < 40
    assert sum(counts) > 100


# --- the published data ---


@pytest.mark.parametrize(
    ("source", "items", "solutions", "cut", "answers", "short"),
    [
        ("math500", 500, 500, 500, 500, 17),
        ("gsm8k", 1319, 1319, 1319, 1319, 0),
        ("aime24", 30, 30, 29, 30, 0),
        ("aime25", 30, 0, 0, 30, 0),
        ("humaneval", 164, 0, 0, 0, 164),
    ],
)
def test_the_published_answers(source: str, items: int, solutions: int, cut: int, answers: int, short: int) -> None:
    if not DATA.is_dir() or not any(DATA.glob(f"{source}*")):
        pytest.skip(f"{source} is not here; point MLESS_DATA at a folder that has it")
    task, found = load_items(source, data_folder=DATA)
    texts = [answer_text(task, one) for one in found]
    pool = AnswerPool(task, found)
    assert len(found) == items
    assert sum(one.solution is not None for one in found) == solutions
    assert sum(reasoning(one) is not None for one in found) == cut
    assert sum(text is not None for text in texts) == answers
    assert sum(len(pool.others(number)) < 16 for number in range(len(found))) == short
    assert not any("<<" in (one.solution or "") for one in found)
    if task == "gsm8k_test":
        assert texts[0] == "#### 18"
        assert found[0].solution is not None
        assert found[0].solution.startswith("Janet sells 16 - 3 - 4 = 9 duck eggs a day.\nShe makes 9 * 2 = $18 every")
        assert all(
            one.solution is not None and one.solution.endswith(text or "?")
            for one, text in zip(found, texts, strict=True)
        )
