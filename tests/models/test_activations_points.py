"""Where a model's activations are found, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from engines.tiny_answerers import answering
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.models.activations import activation_points, decoder_of

GATED = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text", "gemma2"]


@pytest.mark.parametrize("family", [*GATED, "phi3", "gpt2", "gpt_neox", "opt"])
def test_every_layer_s_activation_is_found(family):
    model = answering(family).model
    points = activation_points(model, [1, 2, 3])
    assert [point.layer for point in points] == [1, 2, 3]
    assert len({id(point.act) for point in points}) == 3
    owner, layers = decoder_of(model)
    for point, block in zip(points, layers, strict=True):
        assert block.get_submodule(point.path) is point.act
        assert point.act in point.owner.children()
        assert point.gated == (family in GATED)
    assert any(child is layers for child in owner.children())


@torch.inference_mode()
@pytest.mark.parametrize("family", GATED)
def test_gated_means_what_it_says(family):
    mlp: Any = activation_points(answering(family).model, [1])[0].owner
    x = torch.randn(2, 3, 48)
    assert torch.equal(mlp(x), mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)))


@pytest.mark.parametrize("other", [FalconH1MLP, Gemma3nTextMLP])
def test_the_same_projections_with_something_between_them_are_not_gated(other):
    model: Any = answering("llama").model
    # Its own weights do not matter here; its forward does.
    model.model.layers[0].mlp.__class__ = other
    assert not activation_points(model, [1])[0].gated
    assert activation_points(model, [2])[0].gated


def test_a_tower_for_pictures_is_not_taken_for_the_decoder():
    text = Gemma3TextConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8
    )
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=5, num_attention_heads=2, image_size=28, patch_size=14
    )
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    _, layers = decoder_of(model)
    assert len(layers) == 2
    assert type(activation_points(model, [2])[0].owner).__name__ == "Gemma3MLP"


def test_a_layer_that_is_not_there():
    with pytest.raises(BadStudy, match="no layer 9: layers 1 to 3 are there"):
        activation_points(answering("llama").model, [1, 9])


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_are_refused_by_name(family):
    model = answering(family).model
    says = rf"{type(model).__name__}: layer 2 is a mixture of experts \(mlp.experts\)"
    with pytest.raises(UnsupportedArchitecture, match=says):
        activation_points(model, [2])


class Block(nn.Module):
    """A layer whose non-linearity is a function in its code, unless modules are given."""

    def __init__(self, **activations: nn.Module) -> None:
        super().__init__()
        self.self_attn = nn.Linear(4, 4)
        self.up = nn.Linear(4, 4)
        for name, module in activations.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(self.self_attn(x)))


class Homemade(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)


def test_a_layer_without_a_module_for_its_non_linearity_is_refused_by_name():
    with pytest.raises(UnsupportedArchitecture, match=r"Homemade: layer 1 has no module.*adding-a-model\.md"):
        activation_points(Homemade(Block(), Block()), [1])


def test_a_layer_with_several_activations_is_refused_by_name():
    block = Block(act=nn.SiLU(), activation=nn.GELU())
    with pytest.raises(UnsupportedArchitecture, match=r"layer 1 has several activations \(act, activation\)"):
        activation_points(Homemade(block), [1])


def test_layers_that_share_their_activation_are_refused_by_name():
    shared = nn.SiLU()
    model = Homemade(Block(act=shared), Block(act=shared))
    with pytest.raises(UnsupportedArchitecture, match="layers 1 and 2 share one activation module"):
        activation_points(model, [1, 2])


def test_a_model_without_layers_is_refused_by_name():
    with pytest.raises(UnsupportedArchitecture, match="Linear: no list of decoder layers"):
        activation_points(nn.Linear(2, 2), [1])


def test_an_activation_that_another_layer_has_too_is_refused_though_one_layer_was_asked_for():
    model = answering("llama").model
    model.model.layers[2].mlp.act_fn = model.model.layers[0].mlp.act_fn
    with pytest.raises(UnsupportedArchitecture, match="layers 1 and 3 share one activation module"):
        activation_points(model, [1])
