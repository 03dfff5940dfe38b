"""Activations as they are read, against the same computed from the MLPs' own projections; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mless.capture import Rows, read_activations, watching
from mless.errors import BadAttention, BadPrompt, BadStudy, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.models.activations import activation_points
from mless.redistribution import attached, redistribute
from mless.values import ArmSettings, Prompt
from tiny import BASE, prompt_of, tiny

PROMPT = prompt_of(("start", 1), ("system", 5), ("filler", 4), ("question", 9), ("end", 2))


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


#: Family → the module whose output goes into the non-linearity, and the non-linearity.
FAMILIES: dict[str, tuple[str, Any]] = {
    "llama": ("layers.{}.mlp.gate_proj", functional.silu),
    "gemma3_text": ("layers.{}.mlp.gate_proj", gelu_new),
    "phi3": ("layers.{}.mlp.gate_up_proj", lambda x: functional.silu(x.chunk(2, dim=-1)[0])),  # fused
    "gpt2": ("h.{}.mlp.c_fc", gelu_new),
    "gpt_neox": ("layers.{}.mlp.dense_h_to_4h", functional.gelu),
    "opt": ("decoder.layers.{}.fc1", functional.relu),
}


def model_of(family: str) -> LoadedModel:
    if family == "opt":
        sizes = {"ffn_dim": 64, "word_embed_proj_dim": BASE["hidden_size"]}
        return tiny(family, dropout=0.0, pad_token_id=0, **sizes)
    return tiny(family, **({"pad_token_id": 0} if family == "phi3" else {}))


def read(model: LoadedModel, batch: list[Prompt], layers: list[int]) -> dict[tuple[int, int], np.ndarray]:
    found: dict[tuple[int, int], np.ndarray] = {}

    def take(row: int, rows: Rows) -> None:
        assert rows.prompt is batch[row]
        found[row, rows.layer] = np.concatenate(list(rows.blocks()))

    read_activations(model, batch, layers=layers, take=take)
    return found


def computed(model: LoadedModel, prompt: Prompt, family: str, layer: int) -> np.ndarray:
    """From the projection's output, the non-linearity written out here."""
    path, act = FAMILIES[family]
    kept: list[torch.Tensor] = []
    handle = model.model.get_submodule(path.format(layer - 1)).register_forward_hook(
        lambda module, given, output: kept.append(output.detach())
    )
    with torch.inference_mode():
        model.model(input_ids=torch.tensor([prompt.token_ids]))
    handle.remove()
    return act(kept[0]).reshape(len(prompt), -1)[prompt.original].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_the_non_linearity_returns(family: str) -> None:
    model = model_of(family)
    found = read(model, [PROMPT], [1, 3])
    assert found.keys() == {(0, 1), (0, 3)}
    for layer in (1, 3):
        assert len(found[0, layer]) == len(PROMPT) - 4  # the filler's own do not count
        np.testing.assert_allclose(found[0, layer], computed(model, PROMPT, family, layer), atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_padding_is_never_handed_over(family: str) -> None:
    model = model_of(family)
    batch = [PROMPT, prompt_of(("system", 3), ("question", 4), seed=1), prompt_of(("question", 30), seed=2)]
    together = read(model, batch, [2])
    for row, prompt in enumerate(batch):
        alone = read(model, [prompt], [2])[0, 2]
        assert together[row, 2].shape == alone.shape
        np.testing.assert_allclose(together[row, 2], alone, atol=2e-5)


def test_a_long_prompt_comes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    whole = read(model, [PROMPT], [1])[0, 1]
    monkeypatch.setattr("mless.capture.activations.BLOCK_VALUES", 3 * 64)
    sizes: list[int] = []

    def take(row: int, rows: Rows) -> None:
        blocks = list(rows.blocks())
        sizes.extend(len(block) for block in blocks)
        np.testing.assert_array_equal(np.concatenate(blocks), whole)

    read_activations(model, [PROMPT], layers=[1], take=take)
    assert sizes == [3, 3, 3, 3, 3, 2]


def test_half_precision_is_handed_over_as_it_is() -> None:
    found = read(tiny("llama", dtype=torch.bfloat16), [PROMPT], [1])[0, 1]
    assert found.dtype == np.float32
    assert not (found.view(np.int32) & 0xFFFF).any()


def test_with_arm_the_redistributed_values_are_read() -> None:
    model = tiny("llama")
    settings = ArmSettings(fraction=0.25, p1=90.0)
    prompt = prompt_of(("question", 11))
    plain = read(model, [prompt], [1])[0, 1]
    with attached(model.model, settings):
        changed = read(model, [prompt], [1])[0, 1]
    expected = redistribute(torch.from_numpy(plain)[None], settings)[0].numpy()
    np.testing.assert_allclose(changed, expected, atol=1e-6)
    assert (changed != plain).sum() == 11 * 16
    np.testing.assert_array_equal(read(model, [prompt], [1])[0, 1], plain)


# ---- the model is left as it was -----------------------------------------------------------------------------------------


def hooks(model: LoadedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.model.modules())


def output(model: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(input_ids=torch.tensor([PROMPT.token_ids]))[0].clone()


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_the_model_is_as_before(fails: bool) -> None:
    model = tiny("llama")
    before = output(model)

    def take(row: int, rows: Rows) -> None:
        if fails and rows.layer == 2:
            raise KeyError("of the caller's own")

    if fails:
        with pytest.raises(KeyError):
            read_activations(model, [PROMPT], layers=[1, 2, 3], take=take)
    else:
        read_activations(model, [PROMPT], layers=[1, 2, 3], take=take)
    assert hooks(model) == 0
    assert torch.equal(output(model), before)


# ---- what is refused -----------------------------------------------------------------------------------------------------


def broken_at(model: LoadedModel, token: int) -> Any:
    """The projection into layer 1's non-linearity is infinite at one token, and a hook to be removed."""

    def spoil(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        output[:, token, 7] = float("inf")
        return output

    return activation_points(model.model, [1])[0].owner.gate_proj.register_forward_hook(spoil)


def test_values_that_are_not_finite_are_refused_by_layer_token_and_item() -> None:
    model = tiny("llama")
    handle = broken_at(model, 12)
    with pytest.raises(BadAttention, match=r"not finite .* in layer 1, at token 12 of item '1'.*--dtype float32"):
        read(model, [PROMPT], [1])
    handle.remove()
    assert hooks(model) == 0


def test_filler_that_is_not_finite_is_nobodys_concern_in_its_own_layer() -> None:
    model = tiny("llama")
    broken_at(model, PROMPT.positions("filler")[1])
    assert np.isfinite(read(model, [PROMPT], [1])[0, 1]).all()


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"GptOss.*layer 1 is a mixture of experts .*--layers"):
        read(tiny("gpt_oss"), [PROMPT], [1])


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda owner, x: owner.down_proj(functional.silu(owner.gate_proj(x)) * owner.up_proj(x)), "did not call"),
        (lambda owner, x: owner.down_proj(owner.act_fn(owner.act_fn(owner.gate_proj(x)))), "more than once"),
        (lambda owner, x: x * owner.act_fn(owner.gate_proj(x[:, 1:])).mean(), "has the shape"),
    ],
    ids=["bypassed", "twice", "other-shape"],
)
def test_an_activation_module_that_is_used_otherwise_is_refused(broken: Any, says: str) -> None:
    model = tiny("llama")
    owner = activation_points(model.model, [2])[0].owner
    owner.forward = lambda x: broken(owner, x)  # type: ignore
    with pytest.raises(UnsupportedArchitecture, match=says):
        read(model, [PROMPT], [1, 2])
    assert hooks(model) == 0


def test_an_activation_that_is_no_tensor_is_refused() -> None:
    model = tiny("llama")
    act = activation_points(model.model, [1])[0].act
    act.forward = lambda x: (x,)  # type: ignore
    with (
        pytest.raises(UnsupportedArchitecture, match="returns tuple"),
        watching(model.model, [1], lambda layer, values: None),
    ):
        act(torch.zeros(1, 2, 3))


@pytest.mark.parametrize(
    ("layers", "says"), [([], "no layer was asked for"), ([4], "the loaded layers are 1 to 3"), ([0], "no layer 0")]
)
def test_layers_that_are_not_there(layers: list[int], says: str) -> None:
    with pytest.raises(BadStudy, match=says):
        read(tiny("llama"), [PROMPT], layers)


def test_a_prompt_that_is_too_long() -> None:
    with pytest.raises(BadPrompt, match="is 300 tokens"):
        read(tiny("llama"), [prompt_of(("question", 300))], [1])
