"""Checkpoints that torchao quantised are read as they are. Needs torchao (pip install torchao), which is no part of mless."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from mless.models import load
from mless.models.quiet import quiet_transformers
from mless.proofs import prove, prove_reading
from models.tiny_models import save_tokenizer
from models.walking import save
from tiny import prompt_of

pytest.importorskip("torchao")
PROMPT = prompt_of(("system", 7), ("filler", 4), ("question", 12), seed=1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")  # torchao's own
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("int8")
        save("llama", plain)
        settings = TorchAoConfig(Int8WeightOnlyConfig(version=2))
        AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=settings, dtype=torch.bfloat16
        ).save_pretrained(folder)  # fmt: skip
    return save_tokenizer(folder, bos=True)


@pytest.mark.parametrize("layers", [None, 2])
def test_int8_weights_stay_int8_and_the_proofs_hold(quantised, layers):
    model = load(str(quantised), layers=layers)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert type(weight).__name__ == "Int8Tensor"
    assert model.dtype == "bfloat16"
    assert len(model.model.layers) == model.loaded_layers == (layers or 4)
    every = list(range(1, model.loaded_layers + 1))
    assert prove(model, PROMPT, every)["received"] < 1e-5
    assert prove_reading(model, PROMPT, every)["output unchanged"]


def test_it_answers_too(quantised):
    model = load(str(quantised), head=True)
    with torch.inference_mode():
        assert model.model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 400)
