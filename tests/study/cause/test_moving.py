"""How far a filler moves layer 1's activations, against a hook written by hand; and the ARM that moves them as far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mless.models import LoadedModel
from mless.redistribution import redistribute
from mless.study.cause import moving
from mless.values import Prompt, arm_seed, arm_settings
from tiny import prompt_of, tiny

#: Questions of several lengths, so that a forward of all of them is padded.
QUESTIONS = (6, 3, 11, 8)


def pair(number: int, question: int) -> tuple[Prompt, Prompt]:
    """An item's prompt without filler, and with it."""
    filled = prompt_of(("start", 2), ("system", 4), ("filler", 5), ("question", question), ("end", 3))
    tokens = tuple((token * (number + 2)) % 90 + 5 for token in filled.token_ids)
    filled = replace(filled, item=f"item-{number}", token_ids=tokens)
    plain = prompt_of(("start", 2), ("system", 4), ("question", question), ("end", 3), condition="none")
    return replace(plain, item=filled.item, token_ids=tuple(tokens[at] for at in filled.original)), filled


def activations(model: LoadedModel, prompt: Prompt) -> torch.Tensor:
    """What the first MLP's non-linearity gives at each token of the prompt alone."""
    held: list[torch.Tensor] = []
    first: Any = model.model.get_decoder().layers[0]
    hook = first.mlp.act_fn.register_forward_hook(lambda module, given, output: held.append(output[0]))
    with hook, torch.inference_mode():
        model.model(input_ids=torch.tensor([prompt.token_ids]), use_cache=False)
    return held[0]


def by_hand(change: Sequence[torch.Tensor]) -> float:
    """How far a token's activations move, over the tokens of all items."""
    return math.sqrt(torch.cat(list(change)).square().sum() / sum(map(len, change)))


@pytest.fixture(params=[4096, 75], ids=["one forward", "forwards of three items and of one"])
def tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(moving, "_TOKENS", request.param)
    return request.param


def test_they_are_moved_by_what_forwards_of_one_item_say(tokens: int) -> None:
    model = tiny("llama")
    without, prompts = zip(*(pair(number, size) for number, size in enumerate(QUESTIONS)), strict=True)
    longest = max(map(len, prompts))
    assert tokens // longest in (3, 163), "the forwards are not those that the test is about"
    plain = [activations(model, prompt) for prompt in without]
    filled = [
        activations(model, prompt)[list(prompt.original)] - before
        for prompt, before in zip(prompts, plain, strict=True)
    ]

    moved = moving.equal_arm(model, without, prompts, arm_settings())

    assert moved.filler == pytest.approx(by_hand(filled), rel=1e-5)
    assert moved.note is None
    assert moved.settings.layers == (1,)
    arm = [
        redistribute(values[None], moved.settings, seeds=torch.tensor([arm_seed(prompt.item, moved.settings.seed)]))[0]
        - values
        for prompt, values in zip(without, plain, strict=True)
    ]
    assert moved.arm == pytest.approx(by_hand(arm), rel=1e-5)
    assert moved.arm == pytest.approx(moved.filler, rel=0.02)


def test_it_is_said_where_arm_cannot_move_them_as_far() -> None:
    model = tiny("llama")
    without = [pair(number, size)[0] for number, size in enumerate(QUESTIONS)]

    # What is to be reached is no change at all.
    moved = moving.equal_arm(model, without, without, arm_settings())

    assert moved.filler < 1e-4 < moved.arm
    assert moved.note is not None
    assert "ARM comes no nearer than" in moved.note
