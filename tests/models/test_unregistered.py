"""Families outside transformers' attention registry: what reaches the instrument through their rows is what they compute with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import causal_mask_function

from mless.capture import LazyMask, capturing, received
from mless.capture.seam import mask_of
from mless.errors import ProofFailed, UnsupportedArchitecture
from mless.models import FAMILIES, LoadedModel, adapters
from mless.models.seams import attention_modules, own_attention
from mless.proofs import prove
from models.walking import build
from tiny import prompt_of, wrapped

PROMPTS = [
    prompt_of(("system", 7), ("filler", 4), ("question", 12), seed=1),
    prompt_of(("system", 3), ("filler", 9), ("question", 28), seed=2),
]
ROWS = sorted(kind for kind, family in FAMILIES.items() if family.attention is not None)
#: Configurations of them that compute otherwise.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "bias": True}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-multi-query": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "bloom-six-heads": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "mpt-clipped": ("mpt", {"attn_config": {"clip_qkv": 1.0, "alibi": True}}),
    "codegen-all-rotary": ("codegen", {"rotary_dim": 16}),
}


def loaded(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    kind, changes = VARIANTS.get(name, (name, {}))
    model = build(kind, **changes)
    return wrapped(getattr(model, model.base_model_prefix).to(dtype), kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*ROWS, *VARIANTS])
def test_the_proofs_hold(name, dtype):
    found = prove(loaded(name, dtype), PROMPTS[1], [1, 2, 3, 4])
    assert found["received"] < 1e-5
    assert found["forward"] < (1e-5 if dtype == torch.float32 else 1e-1)
    assert found["restoration"] == "same bits"


@pytest.mark.parametrize("name", [*ROWS, *VARIANTS])
def test_a_ragged_batch_gives_each_prompt_its_own_numbers(name):
    model = loaded(name)
    alone = [one for prompt in PROMPTS for one in received(model, [prompt])]
    together = list(received(model, PROMPTS, batch_size=2))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one.n, other.n)
        np.testing.assert_allclose(one.received, other.received, atol=2e-5)
        np.testing.assert_allclose(one.mass, other.mass, atol=2e-5)


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "mpt"])
def test_chosen_heads_are_those_of_all(name):
    model = loaded(name)
    (every,) = received(model, PROMPTS[:1])
    (some,) = received(model, PROMPTS[:1], heads=[2, 4])
    np.testing.assert_allclose(some.received, every.received[:, :, [1, 3]], atol=1e-6)


def test_gpt_neo_s_windows_are_seen():
    (found,) = received(loaded("gpt_neo"), PROMPTS[1:])
    n = found.n[0]
    assert n[0, 0] == n[2, 0] == len(PROMPTS[1]) - 1  # global
    assert n[1, 0] == n[3, 0] == 6  # a window of 7


def test_a_window_is_laid_over_a_mask_that_the_model_made_itself_alike():
    lazy = LazyMask(
        {"batch_size": 1, "q_length": 9, "kv_length": 9, "mask_function": causal_mask_function, "device": "cpu"}
    )
    given, _ = mask_of(lazy.whole, torch.nn.Identity(), torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4))
    assert torch.equal(given.windowed(3)(2, 9), lazy.windowed(3)(2, 9))
    assert lazy.windowed(3)(8, 9)[0, 0, 0].tolist() == [False] * 6 + [True] * 3


@pytest.mark.parametrize("name", ROWS)
def test_the_module_s_own_method_is_back_afterwards_by_whatever_road(name):
    model = loaded(name)
    method = FAMILIES[name].attention.method

    def interrupted() -> None:
        with capturing(model.model, layers=[1]):
            assert all(method in vars(module) for module in attention_modules(model.model).values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(method in vars(module) for module in model.model.modules())


def test_a_row_that_is_wrong_is_found_out(monkeypatch):
    """Ours agrees with the reference then, for both are told the same; the model's own code is what it disagrees with."""
    own = FAMILIES["bloom"].attention

    def without_alibi(attend, module, hidden_states, residual, alibi, attention_mask, **others):
        return own.function(attend, module, hidden_states, residual, alibi * 0, attention_mask, **others)

    monkeypatch.setitem(adapters._OWN, own.module, replace(own, function=without_alibi))
    with pytest.raises(ProofFailed, match="the instrument changes the model's hidden states"):
        prove(loaded("bloom"), PROMPTS[0], [1])


def test_dropout_is_refused():
    model = loaded("gptj")
    model.model.train()
    for module in attention_modules(model.model).values():
        module.attn_dropout.p = 0.1
    with pytest.raises(UnsupportedArchitecture, match=r"model\.eval\(\)"):
        list(received(model, PROMPTS[:1]))


def test_attention_of_another_kind_reaches_them_too():
    """The row-stable engine puts its own in; here one that says what it was given."""
    model = loaded("gptj")
    seen: list[tuple[int, ...]] = []

    def zero(module, query, key, value, mask, **others):
        seen.append(tuple(query.shape))
        return torch.zeros_like(value).transpose(1, 2), None

    with own_attention(model.model, zero, lambda **arguments: None), torch.inference_mode():
        model.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert seen == [(1, 4, 3, 16)] * 4
