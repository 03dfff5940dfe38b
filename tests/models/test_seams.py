"""Where a model's attention is found, and that it is found anew after the model was changed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from tiny_models import LAYERS, save_model
from torch import nn

import mless
from mless.models.seams import attention_modules, replaced_forward


def test_a_module_that_was_replaced_is_found(tmp_path: Path) -> None:
    model = mless.load(str(save_model(tmp_path / "tiny", "llama"))).model
    before = attention_modules(model)
    assert list(before) == list(range(1, LAYERS + 1))
    assert attention_modules(model) == before
    layers = model.get_decoder().layers
    new = type(layers[2].self_attn)(model.config, 2)
    layers[2].self_attn = new
    assert attention_modules(model) == before | {3: new}


def test_layers_that_were_put_in_or_taken_out_are_noticed(tmp_path: Path) -> None:
    model = mless.load(str(save_model(tmp_path / "tiny", "llama"))).model
    before = attention_modules(model)
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:4]
    assert list(attention_modules(model)) == [1, 2, 3, 4]
    decoder.layers.append(nn.Identity())
    assert list(attention_modules(model)) == [1, 2, 3, 4]
    last = type(decoder.layers[0])(model.config, 5)
    decoder.layers.append(last)
    assert attention_modules(model) == {layer: before[layer] for layer in (1, 2, 3, 4)} | {6: last.self_attn}


def test_a_model_is_not_kept_by_what_is_known_of_it(tmp_path: Path) -> None:
    loaded = mless.load(str(save_model(tmp_path / "tiny", "gpt2")))
    attention_modules(loaded.model)
    gone = weakref.ref(loaded.model)
    del loaded
    gc.collect()
    assert gone() is None


def test_what_is_returned_may_be_changed(tmp_path: Path) -> None:
    model = mless.load(str(save_model(tmp_path / "tiny", "qwen2"))).model
    attention_modules(model).clear()
    assert len(attention_modules(model)) == LAYERS
    with torch.inference_mode():
        assert model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.shape[1] == 3


def test_a_forward_is_as_before_even_after_an_error() -> None:
    def broken(given: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("inside")

    plain, own = nn.Linear(2, 2), nn.Linear(2, 2)
    own.forward = lambda given: given + 1
    for module in (plain, own):
        before = vars(module).get("forward")
        with pytest.raises(RuntimeError, match="inside"), replaced_forward(module, broken):
            module(torch.ones(2))
        assert vars(module).get("forward") is before
    assert (own(torch.ones(2)) == 2).all()
