"""How far a filler moves layer 1's activations, against a hook written by hand; and the ARM that moves them as far."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mless.models import LoadedModel
from mless.study.cause.moving import equal_arm
from mless.values import Prompt, arm_settings
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


def test_the_filler_moves_them_by_what_single_forwards_say() -> None:
    model = tiny("llama")
    without, prompts = zip(*(pair(number, size) for number, size in enumerate(QUESTIONS)), strict=True)
    differences = [
        activations(model, filled)[list(filled.original)] - activations(model, plain)
        for plain, filled in zip(without, prompts, strict=True)
    ]
    by_hand = math.sqrt(torch.cat(differences).square().sum() / sum(map(len, differences)))

    moved = equal_arm(model, without, prompts, arm_settings())

    assert by_hand > 0
    assert moved.filler == pytest.approx(by_hand, rel=1e-5)
    assert moved.arm == pytest.approx(moved.filler, rel=0.02) or moved.note
    assert moved.settings.layers == (1,)
