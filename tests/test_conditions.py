"""The table of condition kinds, and a kind from outside the package."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import mless
from mless.conditions import CONDITION_KINDS, Kind, inserts
from mless.errors import BadPlugin, BadPrompt, BadStudy
from mless.integrations.filling import fill
from mless.models import LoadedModel
from mless.prompting import build_messages, build_prompts, shared_beginning, with_filler_ids
from mless.study.conditions import conditions_of
from mless.values import Condition, Item, condition_words
from outside import Outside

#: Filler that counts, and begins at a number of the item's own.
COUNTING = """
import mless
from mless.conditions import Kind
from mless.conditions.base import seeded

class Counting(Kind):
    inserts = True
    own = True

    def text(self, condition, *, item, seed, sentences):
        first = seeded(seed, "counting", item).randrange(10)
        return " ".join(str(first + n) for n in range(condition.length))

    def ids(self, tokenizer, condition, *, item, seed, sentences):
        text = self.text(condition, item=item, seed=seed, sentences=sentences)
        return tuple(tokenizer(" " + text, add_special_tokens=False).input_ids[: condition.length])

    def words(self, condition):
        return f"{condition.length} tokens of counting, {condition.placement}"

mless.register("condition_kinds", "counting", Counting())
"""
ITEMS = [Item("a", "How much is 1 + 1?"), Item("b", "Find the sum of two and three.")]


def test_the_kinds_that_come_with_mless() -> None:
    assert CONDITION_KINDS.names()[:5] == ["none", "repeat", "text", "tokens", "shift"]
    assert [name for name in CONDITION_KINDS.names()[:5] if inserts(name)] == ["repeat", "text", "tokens"]
    assert [name for name in CONDITION_KINDS.names()[:5] if CONDITION_KINDS.get(name).own] == ["text", "tokens"]
    assert [name for name in CONDITION_KINDS.names()[:5] if CONDITION_KINDS.get(name).moves] == ["shift"]
    assert not inserts(None)


def test_unknown_kinds_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        BadStudy,
        match=r"condition 'mless': no condition kind 'repeet' \(did you mean 'repeat'\?\); there are: none, repeat, text, tokens, shift",
    ):
        Condition("mless", "repeet", " /", 7)
    with pytest.raises(
        BadPlugin, match=r"condition kind 'counting' must be an object of a class of mless\.conditions\.Kind"
    ):
        mless.register("condition_kinds", "counting", Kind)  # the class is no object of itself


def test_a_kind_from_outside(outside: Outside, embedded: LoadedModel) -> None:
    outside.write("counting", COUNTING)
    importlib.import_module("counting")
    condition = Condition("counted", "counting", length=6)
    tokenizer: Any = embedded.tokenizer
    assert condition.inserts
    assert condition_words(condition) == "6 tokens of counting, before-question"
    assert with_filler_ids(tokenizer, [condition]) == [condition]
    prompts = list(build_prompts(tokenizer, ITEMS, condition, kind="chat", seed=3))
    fillers = [[prompt.token_ids[i] for i in prompt.positions("filler")] for prompt in prompts]
    assert [len(filler) for filler in fillers] == [6, 6]
    assert fillers[0] != fillers[1]
    for prompt, bare in zip(
        prompts, build_prompts(tokenizer, ITEMS, Condition("none", "none"), kind="chat"), strict=True
    ):
        assert mless.align(bare, prompt)
        assert shared_beginning(prompt, condition) == prompt.positions("filler")[0]
    (conversation, _) = build_messages(ITEMS, condition, seed=3)
    assert conversation[1][1].endswith(" How much is 1 + 1?")
    assert conversation[1][1][0].isdigit()
    ids = tokenizer("What is 2 + 2?", add_special_tokens=False).input_ids
    assert fill(tokenizer, "What is 2 + 2?", ids, None, condition, seed=3, key="a").count == 6
    with pytest.raises(BadStudy, match="condition 'counted': length must be at least 1 token, got 0"):
        Condition("counted", "counting")
    code = "from mless.values import Condition, condition_words; print(condition_words(Condition('c', 'counting', length=2)))"
    assert outside.in_another_process(code) == "2 tokens of counting, before-question"


def test_a_study_takes_a_kind_from_outside(outside: Outside) -> None:
    outside.write("counting", COUNTING)
    outside.name_plugins("counting")
    (outside.folder / "own.toml").write_text(
        'conditions = ["none", "counted"]\n[condition.counted]\nkind = "counting"\n'
    )
    study = mless.load_study(str(outside.folder / "own.toml"))
    assert [condition.kind for condition in conditions_of(study)] == ["none", "counting"]


def test_filler_without_a_text_is_refused_in_a_conversation(outside: Outside) -> None:
    class Silent(Kind):
        inserts = True

    mless.register("condition_kinds", "silent", Silent())
    with pytest.raises(
        BadPrompt, match="condition 's' inserts token ids and does not say how they are written as text; use"
    ):
        list(build_messages(ITEMS, Condition("s", "silent", length=2)))
