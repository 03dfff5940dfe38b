"""Filler put into a prompt that another program rendered stands where a study's filler stands."""

from __future__ import annotations

from typing import Any

import pytest

from mless.errors import BadPrompt
from mless.integrations.filling import Places, fill, find_places, key_of, recorded
from mless.prompting import SYSTEM_TEXT, build_prompts, encode
from mless.results.folder import FORMAT
from mless.values import PLACEMENTS, Condition, Item
from spelling import CHATML, NO_SYSTEM, TRIMS, byte_level, with_a_prefix

QUESTION = "Find the sum of a."
FILLERS = [Condition("f", "repeat", " /", 4), Condition("f", "repeat", "\n", 3), Condition("f", "repeat", " a sum", 5)]


def messages(system: bool = True) -> list[dict[str, str]]:
    first = [{"role": "system", "content": SYSTEM_TEXT}] if system else []
    return [*first, {"role": "user", "content": QUESTION}]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("filler", FILLERS, ids=lambda one: repr(one.filler))
@pytest.mark.parametrize("template", [CHATML, TRIMS], ids=["plain", "trims"])
def test_a_chat_prompt_is_filled_as_a_study_fills_it(template: str, filler: Condition, placement: Any) -> None:
    tokenizer = byte_level(template)

    def render(given: list[Any]) -> str:
        return tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)

    text = render(messages())
    ids = tokenizer(text, add_special_tokens=False).input_ids
    condition = Condition("f", "repeat", filler.filler, filler.length, placement)
    key = key_of(QUESTION)
    filled = fill(tokenizer, text, ids, find_places(render, messages(), text), condition, seed=3, key=key)
    (expected,) = build_prompts(tokenizer, [Item(key, QUESTION)], condition, kind="chat", seed=3)
    assert filled.token_ids == expected.token_ids


@pytest.mark.parametrize("placement", ["before-system", "before-question", "end", "before-answer"])
@pytest.mark.parametrize("tokenizer", [byte_level(), byte_level(bos=True, trim_offsets=True), with_a_prefix()])
def test_a_raw_prompt_is_filled_before_its_line_break(tokenizer: Any, placement: Any) -> None:
    text, front = f"{SYSTEM_TEXT}\n{QUESTION}", len(SYSTEM_TEXT)
    ids, extents = encode(tokenizer, text, special=True, split_at=front)
    condition = Condition("f", "repeat", " /", 4, placement)
    places = Places((front, len(text)), (0, front))
    filled = fill(tokenizer, text, ids, places, condition, seed=0, key="q", extents=extents)
    (expected,) = build_prompts(tokenizer, [Item("q", QUESTION)], condition, kind="raw")
    assert filled.token_ids == expected.token_ids


def test_without_a_template_the_end_is_the_last_place() -> None:
    tokenizer = byte_level()
    ids = tokenizer(QUESTION).input_ids
    for placement in ("end", "before-answer"):
        filled = fill(tokenizer, QUESTION, ids, None, Condition("f", "repeat", " /", 4, placement), seed=0, key="q")
        assert (filled.at, filled.count) == (len(ids), 4)
    with pytest.raises(BadPrompt, match="'s' shifts what comes after the question, which is nothing in this prompt"):
        fill(tokenizer, QUESTION, ids, None, Condition("s", "shift", None, 4, "end"), seed=0, key="q")


def test_a_shift_at_the_end_of_the_users_turn_moves_the_rest() -> None:
    tokenizer = byte_level(NO_SYSTEM)

    def render(given: list[Any]) -> str:
        return tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)

    asked = messages(system=False)
    text = render(asked)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    shift = Condition("s", "shift", None, 4, "end")
    filled = fill(tokenizer, text, ids, find_places(render, asked, text), shift, seed=0, key="q")
    moved = [n for n, place in enumerate(filled.position_ids or ()) if place != n]
    assert tokenizer.decode([ids[n] for n in moved]) == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_log_says_by_which_words_a_condition_is_told() -> None:
    assert recorded(Condition("f", "repeat", " /", 4, "end"))["format"] == FORMAT
