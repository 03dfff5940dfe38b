"""Generated arithmetic: its answers, its determinism, and the end of its supply."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mless.errors import BadData
from mless.tasks import arithmetic, distinct_questions

difficulties = st.integers(1, 6)
seeds = st.integers(0, 2**32)

# Each story, recognised by its words alone and solved from the numbers in it, apart from the code that wrote it.
STORIES = [
    (r"(\d+) boxes with (\d+) \w+ each and then gives (\d+)", lambda a, b, c: a * b - c),
    (
        r"with (\d+) passengers.* (\d+) people get off and (\d+) get on.* another (\d+)",
        lambda a, b, c, d: a - b + c - d,
    ),
    (r"costs (\d+) euros .* and (\d+) euros .* do (\d+) adults and (\d+) ch", lambda a, b, c, d: a * c + b * d),
    (r"plants (\d+) rows .* with (\d+) plants .* row (\d+) plants die", lambda a, b, c: a * b - a * c),
    (r"read (\d+) pages .* has (\d+) pages, .* (\d+) pages a day for (\d+)", lambda a, b, c, d: b - (a + c * d)),
    (r"bakes (\d+) trays .* with (\d+) .* bags of (\d+)", lambda a, b, c: a * b / c),
    (r"has (\d+) singers, .* has (twice|three times|four times|five times) .* concert (\d+) of", None),
    (r"saves (\d+) euros a week for (\d+) weeks, .* for (\d+) euros .* gets (\d+)", lambda a, b, c, d: a * b - c + d),
    (r"rope of (\d+) metres is cut into (\d+) .* by (\d+) metres", lambda a, b, c: a / b - c),
]
TIMES = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}


def solve(question: str) -> float:
    if expression := re.fullmatch(r"What is ([\d+\-×() ]+)\?", question):
        return eval(expression[1].replace("×", "*"))
    (found,) = [(match, by) for pattern, by in STORIES if (match := re.search(pattern, question))]
    match, by = found
    if by is None:
        return int(match[1]) + int(match[1]) * TIMES[match[2]] - int(match[3])
    return by(*map(int, match.groups()))


@given(difficulty=difficulties, seed=seeds)
@settings(max_examples=60, deadline=None)
def test_answers_are_exact_and_questions_distinct(difficulty: int, seed: int) -> None:
    items = arithmetic(60, difficulty, seed)
    assert len({item.question for item in items}) == len({item.id for item in items}) == 60
    for item in items:
        assert item.answer is not None
        assert re.fullmatch(r"-?\d+", item.answer)
        assert solve(item.question) == int(item.answer), item
        if difficulty == 4:
            assert int(item.answer) >= 0, item


@given(difficulty=difficulties, seed=seeds, count=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_same_seed_same_set_and_a_shorter_set_begins_the_longer(difficulty: int, seed: int, count: int) -> None:
    assert arithmetic(count, difficulty, seed) == arithmetic(40, difficulty, seed)[:count]


@given(difficulty=difficulties, seed=seeds)
@settings(max_examples=30, deadline=None)
def test_seeds_differ(difficulty: int, seed: int) -> None:
    one, other = (arithmetic(30, difficulty, s) for s in (seed, seed + 1))
    assert [item.question for item in one] != [item.question for item in other]


def test_pinned_so_that_no_platform_or_release_changes_a_published_set() -> None:
    assert [(i.id, i.question, i.answer) for i in arithmetic(3, 3)] == [
        ("arithmetic-3-0001", "What is 14 × 6 + 44?", "128"),
        ("arithmetic-3-0002", "What is 53 × 4 - 25?", "187"),
        ("arithmetic-3-0003", "What is 24 × 17?", "408"),
    ]


@pytest.mark.parametrize(
    ("difficulty", "forms"),
    [
        (1, {"d + d", "d - d"}),
        (2, {"d + d", "d - d", "d × d", "dd + dd", "dd - dd"}),
        (3, {"dd × dd", "dd × d + dd", "dd × d - dd", "(dd + dd) × d", "(dd - dd) × d"}),
    ],
)
def test_forms_of_each_difficulty(difficulty: int, forms: set[str]) -> None:
    questions = [item.question for item in arithmetic(200, difficulty)]
    assert {re.sub(r"\d", "d", q.removeprefix("What is ").removesuffix("?")) for q in questions} == forms


def test_word_problems_use_every_story_and_have_two_or_three_steps() -> None:
    questions = [item.question for item in arithmetic(300, 4)]
    for pattern, _ in STORIES:
        assert any(re.search(pattern, question) for question in questions), pattern
    for question in questions:
        assert not re.search(r"\b[01] [a-z]+s\b", question), question  # no "1 boxes"
        numbers = re.findall(r"\d+|twice|(?:three|four|five) times", question)
        assert 3 <= len(numbers) <= 4, question


def test_the_whole_supply_can_be_asked_for_but_no_more() -> None:
    assert len({item.question for item in arithmetic(200, 1)}) == 200
    with pytest.raises(BadData, match="difficulty 1 has only 200 distinct questions, so it cannot give 201"):
        arithmetic(201, 1)
    assert len({item.question for item in arithmetic(16_500, 2)}) == 16_500
    with pytest.raises(BadData, match="only 16500 distinct"):
        arithmetic(16_501, 2)


@pytest.mark.parametrize("difficulty", [0, 7, -1])
def test_bad_difficulty(difficulty: int) -> None:
    with pytest.raises(BadData, match=f"no arithmetic of difficulty {difficulty}: difficulties are 1 to 6"):
        arithmetic(10, difficulty)


@pytest.mark.parametrize("count", [0, -3])
def test_bad_count(count: int) -> None:
    with pytest.raises(BadData, match=f"at least 1 question, got {count}"):
        arithmetic(count)


def test_every_difficulty_tells_how_many_questions_it_has() -> None:
    sizes = {difficulty: distinct_questions(difficulty) for difficulty in range(1, 7)}
    assert (sizes[1], sizes[2], sizes[5], sizes[6]) == (200, 16_500, 20_000, 4_000)
    assert min(sizes[3], sizes[4]) > 100_000
    # all of them can be had, each once
    assert len({item.question for item in arithmetic(4_000, 6)}) == 4_000
    with pytest.raises(
        BadData, match="difficulty 6 has only 4000 distinct questions, so it cannot give 4001; ask for fewer"
    ):
        arithmetic(4_001, 6)
    with pytest.raises(BadData, match="no arithmetic of difficulty 7: difficulties are 1 to 6"):
        distinct_questions(7)
