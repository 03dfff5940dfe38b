"""Which tokens of a prompt patches may change, and from which on a row has to be computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mless.capture.pairing import first_patched
from mless.changes import Patch
from mless.values import Prompt, Span

ALL = (Patch("mlp-output"),)


def prompt(start: list[int], filler: list[int], question: list[int]) -> Prompt:
    spans: list[Span] = []
    at = 0
    for name, ids in (("start", start), ("filler", filler), ("question", question)):
        if ids:
            spans.append(Span(name, at, at + len(ids)))
        at += len(ids)
    return Prompt("item", "condition", (*start, *filler, *question), tuple(spans), "")


def test_tokens_that_both_prompts_begin_with_are_left_out() -> None:
    plain, filled = prompt([1, 2], [], [3, 4, 5]), prompt([1, 2], [9, 9], [3, 4, 5])
    assert first_patched(ALL, plain, filled) == 2
    assert first_patched(ALL, filled, plain) == 4  # its filler has no partner, so nothing of it is patched


def test_filler_that_is_the_next_token_too_moves_the_question_all_the_same() -> None:
    """Both prompts begin with 1, 2, 3; but the third token is a question's in one, and a filler's in the other."""
    plain, filled = prompt([1, 2], [], [3, 4, 5]), prompt([1, 2], [3, 3], [3, 4, 5])
    assert first_patched(ALL, plain, filled) == 2
    assert first_patched(ALL, filled, plain) == 4


def test_a_first_token_that_changes_leaves_nothing_out() -> None:
    plain, filled = prompt([], [], [3, 4]), prompt([], [9], [3, 4])
    assert first_patched(ALL, plain, filled) == 0
    assert first_patched(ALL, filled, plain) == 1
    one = prompt([], [], [3])
    assert first_patched(ALL, one, prompt([], [9], [3])) == 0


def test_the_last_token_is_always_computed_because_the_answer_is_predicted_from_it() -> None:
    plain, filled = prompt([1, 2], [], [3, 4, 5]), prompt([1, 2], [9, 9], [3, 4, 5])
    assert first_patched((Patch("mlp-output", at="answer"),), plain, filled) == 4


def test_positions_count_as_tokens_do() -> None:
    plain = prompt([1, 2], [], [3, 4, 5])
    moved = replace(plain, position_ids=(0, 1, 7, 8, 9))
    assert first_patched(ALL, plain, moved) == 2
    assert first_patched(ALL, moved, plain) == 2


@pytest.mark.parametrize("patch", [Patch("keys-values"), Patch("keys-values", layers="1", at="question")])
def test_keys_are_seen_by_tokens_that_have_no_patch(patch: Patch) -> None:
    plain = prompt([1, 2], [], [3, 4, 5])
    assert first_patched((patch,), plain, replace(plain, position_ids=(0, 1, 7, 8, 9))) == 0


def test_a_runs_own_values_need_all_of_its_tokens() -> None:
    plain = prompt([1, 2], [], [3, 4, 5])
    assert first_patched(ALL, plain, plain) == 0
