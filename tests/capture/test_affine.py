"""Attention outputs and how filler moves them, on tiny random models of each family: against eager attention, and where the form is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from mless.capture import affine, displacement
from mless.capture.affine import attention_outputs
from mless.changes import Cut
from mless.errors import BadAttention, BadPrompt, BadStudy, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.values import Prompt, Span
from tiny import FAMILIES, prompt_of, tiny

WITH = prompt_of(("start", 1), ("system", 6), ("filler", 9), ("question", 14), ("end", 3), seed=1)
WITHOUT = Prompt(
    "1",
    "none",
    tuple(WITH.token_ids[i] for i in WITH.original),
    (Span("start", 0, 1), Span("system", 1, 7), Span("question", 7, 21), Span("end", 21, 24)),
    "",
)
SHIFTED = Prompt("1", "position-only", WITHOUT.token_ids, WITHOUT.spans, "", tuple(n + 9 * (n >= 7) for n in range(24)))
LAYERS = [1, 2, 3]
#: Families by name, with windows as long as the prompts: what a window hides from the filler's run it does not hide from the other.
UNWINDOWED: dict[str, dict[str, Any]] = {
    name: {"layer_types": ["full_attention"] * 3} if "layer_types" in FAMILIES[name] else {} for name in FAMILIES
} | {"mistral": {"sliding_window": None}}


def without_positions() -> LoadedModel:
    """GPT-2 that cannot tell one position from another."""
    model = tiny("gpt2")
    with torch.no_grad():
        model.model.wpe.weight.zero_()
    return model


# ---- the outputs themselves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "bias"])
@pytest.mark.parametrize("rows", [1 << 24, 1], ids=["one-block", "many-blocks"])
def test_outputs_equal_the_formula(extra, rows, monkeypatch):
    monkeypatch.setattr(affine, "BLOCK_ELEMENTS", rows)
    torch.manual_seed(0)
    t, heads, groups = 37, 6, 3
    q, k, v = torch.randn(2, heads, t, 8), torch.randn(2, heads // groups, t, 8), torch.randn(2, heads // groups, t, 5)
    at = torch.arange(t)
    seen = ((at[:, None] >= at) & (at[:, None] - at < 11))[None, None].repeat(2, 1, 1, 1)
    filler = torch.zeros(2, t, dtype=torch.bool)
    filler[1, 9:20] = True
    score: dict[str, Any] = {
        "softcap": 2.0 if extra == "softcap" else None,
        "sinks": torch.randn(heads) if extra == "sinks" else None,
        "bias": torch.randn(1, heads, t, t) if extra == "bias" else None,
    }
    found = attention_outputs(q, k, v, visible=lambda a, b: seen[:, :, a:b], filler=filler, scale=0.6, **score)

    keys, values = k.repeat_interleave(groups, 1).double(), v.repeat_interleave(groups, 1).double()
    s = q.double() @ keys.transpose(-1, -2) * 0.6
    s = torch.tanh(s / 2) * 2 if extra == "softcap" else s
    s = s + score["bias"].double() if extra == "bias" else s
    e = torch.where(seen, s.exp(), 0.0)
    z = e.sum(-1) + (score["sinks"].double().exp()[None, :, None] if extra == "sinks" else 0.0)
    p = e / z[..., None]
    torch.testing.assert_close(found.o.double(), p @ values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_z.double(), z.log(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.sigma.double(), (p * filler[:, None, None]) @ values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.mass.double(), (p * filler[:, None, None]).sum(-1), atol=1e-5, rtol=1e-5)


def test_scores_too_large_for_exp_leave_the_denominators_finite():
    q = torch.full((1, 1, 4, 8), 30.0)
    found = attention_outputs(
        q, q, q, visible=lambda a, b: torch.ones(1, 1, 4, 4).tril()[:, :, a:b].bool(),
        filler=torch.zeros(1, 4, dtype=torch.bool), scale=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(found.log_z[0, 0], 7200 + np.log([1, 2, 3, 4]), rtol=1e-6)


# ---- where the form is exact -------------------------------------------------------------------------------------------------


def test_without_positions_the_measured_form_is_exact_in_layer_1_and_only_there():
    found = displacement(without_positions(), WITHOUT, WITH, layers=LAYERS)
    left = np.sqrt(found.sums["left_measured"] / found.sums["moves"])
    assert (left[0] < 1e-5).all()
    assert (left[1] > 1e-2).all()  # layer 2's keys and values have moved
    np.testing.assert_allclose(found.sums["log_lambda"][0], found.sums["log_kept"][0], atol=1e-5)


@pytest.mark.parametrize("family", UNWINDOWED)
def test_with_positions_allowed_for_it_is_exact_in_layer_1_of_every_family(family):
    found = displacement(tiny(family, **UNWINDOWED[family]), WITHOUT, WITH, layers=[1])
    left = np.sqrt(found.sums["left_shifted"] / found.sums["moves"])
    assert (left < 1e-5).all()
    assert (found.sums["left_measured"] > 1e-4 * found.sums["moves"]).all()  # positions do matter here


def test_a_window_shorter_than_the_prompt_breaks_it():
    found = displacement(tiny("mistral"), WITHOUT, WITH, layers=[1])
    assert (found.sums["left_shifted"] > 1e-2 * found.sums["moves"]).all()


def test_moved_positions_are_passed_to_the_model_and_not_taken_for_two_texts():
    model = tiny("llama")
    pair = displacement(model, WITHOUT, SHIFTED, layers=LAYERS)
    beside = displacement(model, WITHOUT, WITH, layers=LAYERS)
    np.testing.assert_allclose(pair.sums["moves"], beside.sums["moves_position"], rtol=1e-4)
    assert (pair.sums["moves"] > 0).all()
    assert np.isnan(pair.sums["left_shifted"]).all()  # nothing was inserted, so there is nothing to allow for
    still = displacement(without_positions(), WITHOUT, SHIFTED, layers=LAYERS)
    np.testing.assert_allclose(still.sums["moves"], 0, atol=1e-8)


# ---- the sums ---------------------------------------------------------------------------------------------------------------


def test_sums_are_those_of_the_vectors():
    found = displacement(tiny("qwen2"), WITHOUT, WITH, layers=LAYERS, points=99)
    o, after, measured = (getattr(found, name).astype(np.float64) for name in ("before", "after", "measured"))
    move = after - o
    assert found.tokens == o.shape[2] == 17  # the question and the end; what stands before the filler cannot move
    assert list(found.points) == list(range(7, 24))
    np.testing.assert_allclose(found.output, o.sum(2), atol=1e-5)
    np.testing.assert_allclose(found.displacement, move.sum(2), atol=1e-5)
    np.testing.assert_allclose(found.direction, (move / np.linalg.norm(move, axis=-1, keepdims=True)).sum(2), atol=1e-4)
    expected = {
        "outputs": (o**2).sum((2, 3)),
        "moves": (move**2).sum((2, 3)),
        "product": (o * move).sum((2, 3)),
        "left_measured": ((after - measured) ** 2).sum((2, 3)),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found.sums[name], values, rtol=1e-4, err_msg=name)
    assert (found.sums["directed"] == 17).all()


def test_all_original_tokens_add_those_that_do_not_move():
    model = tiny("llama")
    after = displacement(model, WITHOUT, WITH, layers=LAYERS)
    every = displacement(model, WITHOUT, WITH, layers=LAYERS, tokens="original")
    assert (after.tokens, every.tokens) == (17, 24)
    np.testing.assert_allclose(every.sums["moves"], after.sums["moves"], rtol=1e-6)
    np.testing.assert_allclose(every.sums["left_measured"], after.sums["left_measured"], rtol=1e-6)
    np.testing.assert_allclose(every.sums["log_lambda"], after.sums["log_lambda"], atol=1e-4)
    assert (every.sums["directed"] == 17).all()
    assert (every.sums["outputs"] > after.sums["outputs"]).all()


def test_chosen_layers_and_heads_are_those_of_the_whole():
    model = tiny("gemma2")
    whole = displacement(model, WITHOUT, WITH, layers=LAYERS)
    part = displacement(model, WITHOUT, WITH, layers=[2], heads=[4, 1])
    assert (part.layers, part.heads) == ([2], [4, 1])
    for name, values in part.sums.items():
        np.testing.assert_allclose(values[0], whole.sums[name][1][[3, 0]], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(part.output[0], whole.output[1][[3, 0]], rtol=1e-6)


def test_denominators_further_apart_than_a_number_can_hold_stay_numbers():
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(100)
            layer.self_attn.k_proj.weight.mul_(100)
    found = displacement(model, WITHOUT, WITH, layers=LAYERS, points=5)
    assert np.abs(found.sums["log_lambda"]).max() > 1e4
    assert all(np.isfinite(values).all() for values in found.sums.values())
    assert np.isfinite(found.measured).all()


def test_filler_at_the_end_moves_nothing():
    last = Prompt("1", "mless", (*WITHOUT.token_ids, 5, 5), (*WITHOUT.spans, Span("filler", 24, 26)), "")
    found = displacement(tiny("llama"), WITHOUT, last, layers=[1], points=3)
    assert found.tokens == 0
    assert (found.sums["moves"] == 0).all()
    assert found.before.shape[2] == 0


def test_the_tokens_kept_depend_on_the_generator_alone():
    model = tiny("llama")
    first, again, other = (
        displacement(model, WITHOUT, WITH, layers=[1], points=4, rng=np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert list(first.points) == list(again.points) != list(other.points)


# ---- faults -----------------------------------------------------------------------------------------------------------------


def test_the_model_is_as_before_afterwards_even_after_a_fault():
    model = tiny("llama")
    registered = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    with torch.no_grad():
        model.model.embed_tokens.weight[WITH.token_ids[-1]] = float("nan")
    with pytest.raises(BadAttention, match=r"not finite .* in L1H1.*--dtype float32"):
        displacement(model, WITHOUT, WITH, layers=LAYERS)
    assert model.model.config._attn_implementation == "sdpa"
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == registered


def test_a_model_without_position_ids_is_refused_by_name():
    model = tiny("llama")
    model.model.forward = lambda input_ids, attention_mask=None, use_cache=False: None
    with pytest.raises(UnsupportedArchitecture, match="'llama' takes no position ids"):
        displacement(model, WITHOUT, WITH, layers=[1])


def test_bad_input_is_told():
    model = tiny("llama")
    with pytest.raises(BadStudy, match="no layer 4: the loaded layers are 1 to 3"):
        displacement(model, WITHOUT, WITH, layers=[4])
    with pytest.raises(BadPrompt, match="do not hold the same original tokens"):
        displacement(model, prompt_of(("system", 4), ("question", 20), seed=3, condition="none"), WITH, layers=[1])
    far = Prompt(
        "1", "position-only", WITHOUT.token_ids, WITHOUT.spans, "", tuple(n + 240 * (n >= 7) for n in range(24))
    )
    with pytest.raises(BadPrompt, match=r"reaches position 263 .*but tiny-llama takes 256"):
        displacement(model, WITHOUT, far, layers=[1])


# ---- with edges cut ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_filler_that_nobody_sees_moves_outputs_by_positions_alone(family):
    model = tiny(family, **UNWINDOWED[family])
    found, plain = (
        displacement(model, WITHOUT, WITH, layers=LAYERS, cuts=cuts) for cuts in ([Cut("original", "filler")], [])
    )
    assert (found.sums["left_position"] < 1e-8 * plain.sums["moves"]).all()
    np.testing.assert_allclose(found.sums["moves"], found.sums["moves_position"], rtol=1e-4)
    assert (found.sums["log_kept"] == 0.0).all()  # none of its weight is taken
    # The other rows of the forward are not cut.
    assert np.array_equal(found.output, plain.output)
    assert np.array_equal(found.sums["moves_position"], plain.sums["moves_position"])


def test_a_cut_in_later_layers_leaves_the_first_as_it_was():
    model = tiny("qwen2")
    cuts = [Cut("question", "filler", layers="2")]
    found, plain = (displacement(model, WITHOUT, WITH, layers=LAYERS, cuts=some) for some in (cuts, []))
    assert np.array_equal(found.displacement[0], plain.displacement[0])
    assert not np.allclose(found.displacement[1], plain.displacement[1])
    assert (found.sums["log_kept"][1] > plain.sums["log_kept"][1]).all()


def test_cuts_that_leave_no_single_softmax_are_refused():
    for cut in (Cut("question", "filler", heads=1), Cut("question", "filler", to="sink")):
        with pytest.raises(BadStudy, match="a cut by head, or one that sends weight to the sink"):
            displacement(tiny("llama"), WITHOUT, WITH, layers=LAYERS, cuts=[cut])
