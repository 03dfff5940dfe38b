"""Prompts in groups of like length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mless.study.grouping import in_batches, in_groups
from mless.values import WHOLE_PROMPT


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 1000))
def test_groups_hold_every_prompt_once_and_keep_to_the_budget(lengths: list[int], tokens: int) -> None:
    groups = in_groups(lengths, tokens)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[number] for number in group) * len(group) <= tokens
        assert [lengths[number] for number in group] == sorted(lengths[number] for number in group)


def test_prompts_of_like_length_run_together() -> None:
    lengths = [10, 100] * 8
    assert in_groups(lengths, 400) == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]


def test_a_prompt_that_is_too_long_for_one_forward_is_alone() -> None:
    lengths = [10, WHOLE_PROMPT + 1, 20, WHOLE_PROMPT + 2]
    assert in_groups(lengths, 10 * WHOLE_PROMPT) == [[0, 2], [1], [3]]
    assert in_batches(lengths, 4) == [[0], [1], [2], [3]]
