"""A prompt with several texts after it: who follows whom, and who sees whom."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mless.capture.branching import branches
from tiny import prompt_of

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6)


@given(prompt=st.integers(1, 4), texts=TEXTS)
def test_each_text_is_predicted_on_its_way_and_beginnings_are_there_once(prompt: int, texts: list[list[int]]) -> None:
    row = branches(prompt_of(("question", prompt)), texts)
    for text, predictions in zip(texts, row.texts, strict=True):
        assert row.predicted[predictions].tolist() == text
        origin = row.origin[predictions]
        assert row.ids[origin[1:]].tolist() == text[:-1]
        assert row.parent[origin[1:]].tolist() == origin[:-1].tolist()
        assert row.depth[origin].tolist() == list(range(prompt - 1, prompt - 1 + len(text)))
    # A last token that no other text goes on from is only predicted.
    assert len(row) == prompt + len({tuple(text[:n]) for text in texts for n in range(1, len(text))})
    assert len(row.predicted) == len({tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)})


@given(prompt=st.integers(1, 4), texts=TEXTS)
def test_a_token_sees_its_own_way_and_nothing_else(prompt: int, texts: list[list[int]]) -> None:
    row = branches(prompt_of(("question", prompt)), texts)
    for token in range(len(row)):
        way, at = set[int](), token
        while at >= 0:
            way.add(at)
            at = int(row.parent[at])
        assert {other for other in range(len(row)) if other <= token < row.end[other]} == way


def test_one_text_is_no_branch() -> None:
    assert not branches(prompt_of(("question", 3)), [[1, 2], [1], [2]]).branched
    assert branches(prompt_of(("question", 3)), [[1, 2], [2, 2]]).branched


def test_a_text_longer_than_pythons_stack() -> None:
    text = list(range(5000))
    row = branches(prompt_of(("question", 1)), [text, [7]])
    assert row.predicted[row.texts[0]].tolist() == text
    assert len(row) == 5000


def test_positions_go_on_from_the_prompts_own() -> None:
    from dataclasses import replace

    prompt = replace(prompt_of(("question", 3)), position_ids=(0, 10, 11))
    texts = [[5, 6, 8], [7, 9]]
    row = branches(prompt, texts)
    assert row.positions.tolist() == [0, 10, 11, 12, 13, 12]
    assert np.array_equal(branches(prompt_of(("question", 3)), texts).positions, [0, 1, 2, 3, 4, 3])
