"""The proofs hold where the instrument is right, and fail by name where it, or the model, is not."""

from __future__ import annotations

import pytest
import torch

from mless.capture import affine, forwards
from mless.capture import attention as capture
from mless.capture.branching import branches
from mless.capture.scoring import Scorer
from mless.errors import BadAttention, ProofFailed
from mless.kernels import streaming
from mless.models.activations import activation_points
from mless.proofs import prove, prove_outputs, prove_reading, prove_scores
from tiny import BASE, FAMILIES, prompt_of, tiny
from units import bf16_units

#: A real model's products in bf16 take minutes where they are emulated.
EMBEDDED = ["float32", pytest.param("bfloat16", marks=[pytest.mark.slow, bf16_units])]
PROMPT = prompt_of(("start", 1), ("system", 6), ("filler", 9), ("question", 30), seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_hold_for_each_family(family, dtype):
    result = prove(tiny(family, dtype=dtype), PROMPT, [1, 2, 3])
    assert result["received"] < 1e-4
    assert result["causality"] < 1e-2


@pytest.mark.parametrize("dtype", EMBEDDED)
def test_they_hold_for_the_embedded_model(dtype):
    import mless

    model = mless.load("smollm2", layers=6, dtype=dtype)
    (prompt,) = mless.prompts(model, mless.items(limit=1), "mless")
    assert prove(model, prompt, range(1, 7))["received"] < 1e-4


def test_a_wrong_kernel_is_found_out():
    def a_little_off(*args, **kwargs):
        sums = streaming.received(*args, **kwargs)
        sums.received[:, :, -1] *= 1.01
        return sums

    with pytest.raises(ProofFailed, match=r"L1H4: received attention differs from eager"):
        prove(tiny("llama"), PROMPT, [1], kernel=a_little_off)


def test_a_mask_that_loses_a_window_is_found_out(monkeypatch):
    """Eager sees the mask as given; a model whose attention ignores it would disagree with its own forward."""
    model = tiny("mistral")
    monkeypatch.setattr(capture, "sdpa_forward", lambda call: forwards.sdpa_attention_forward(
        call.module, call.query, call.key, call.value, None, scaling=call.score["scale"], is_causal=True)[0])  # fmt: skip
    with pytest.raises(ProofFailed, match=r"layer 1: its attention output differs from eager's"):
        prove(model, PROMPT, [1], kernel=streaming.received)


@pytest.mark.parametrize("road", ["jointly", "sdpa"])
@pytest.mark.parametrize("dtype", EMBEDDED)
def test_an_attention_output_left_out_in_the_last_layer_is_found_out(dtype, road, monkeypatch):
    """One token's hidden state is far larger than the rest in a real model; a check against the largest would see nothing."""
    import mless

    model = mless.load("smollm2", layers=6, dtype=dtype)
    (prompt,) = mless.prompts(model, mless.items(limit=1), "mless")
    jointly = capture.Recorder.jointly
    sdpa, with_lse = capture.sdpa_forward, capture.forward_with_lse

    def lazy(self, call, *, recorded):
        return jointly(self, call, recorded=recorded) * (call.layer != 6) if road == "jointly" else None

    def lazy_with_lse(call):
        found = with_lse(call)
        return found and (found[0] * (call.layer != 6), found[1])

    monkeypatch.setattr(capture.Recorder, "jointly", lazy)
    monkeypatch.setattr(capture, "sdpa_forward", lambda call: sdpa(call) * (call.layer != 6))
    monkeypatch.setattr(capture, "forward_with_lse", lazy_with_lse)
    with pytest.raises(ProofFailed, match="layer 6: its attention output differs"):
        prove(model, prompt, [6])


def test_nan_outside_attention_is_no_defect_of_the_instrument():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(BadAttention, match=r"not finite.*--dtype float32"):
        prove(model, PROMPT, [1])


def test_a_one_token_prompt_can_be_proved():
    assert prove(tiny("llama"), prompt_of(("question", 1)), [1, 2])["causality"] == 0


def test_a_model_that_looks_ahead_is_found_out(monkeypatch):
    model = tiny("llama")
    norm = model.model.norm
    model.model.norm = torch.nn.Module()
    model.model.norm.forward = lambda x: norm(x) + x.mean(1, keepdim=True)  # every token sees the mean of all
    with pytest.raises(ProofFailed, match="looks ahead"):
        prove(model, PROMPT, [1])


def test_a_machine_that_does_not_repeat_its_last_bit_is_told_from_that():
    model = tiny("llama")
    calls = iter(range(100))
    inner = model.model.norm.forward
    model.model.norm.forward = lambda x: inner(x) * (1 + 1e-7 * (next(calls) == 3))
    assert "does not repeat" in prove(model, PROMPT, [1])["restoration"]


def test_a_model_that_is_not_given_back_is_found_out():
    model = tiny("llama")
    calls = iter(range(100))
    inner = model.model.norm.forward
    model.model.norm.forward = lambda x: inner(x) + 1e-2 * (next(calls) == 3)
    with pytest.raises(ProofFailed, match="did not give back"):
        prove(model, PROMPT, [1])


# ---- attention outputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_captured_is_eagers_output_and_enters_the_projection(family):
    found = prove_outputs(tiny(family), PROMPT, [1, 2, 3])
    assert found["captured"] < 1e-5
    assert found["entering"] < 1e-5
    assert found["forward"] < 1e-4
    assert found["restoration"] == "same bits"


def test_a_wrong_softmax_is_found_out(monkeypatch):
    honest = affine.attention_outputs
    monkeypatch.setattr(affine, "attention_outputs", lambda *a, **k: honest(*a, **{**k, "scale": k["scale"] * 1.01}))
    with pytest.raises(ProofFailed, match="layer 1: the captured attention output differs from eager"):
        prove_outputs(tiny("llama"), PROMPT, [1, 2, 3])


def test_heads_out_of_order_are_found_out():
    model = tiny("llama")
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_pre_hook(lambda module, given: (given[0].roll(12, dims=-1),))
    with pytest.raises(ProofFailed, match="layer 2: what enters the output projection differs from eager"):
        prove_outputs(model, PROMPT, [1, 2, 3])


# ---- activations -----------------------------------------------------------------------------------------------------------


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.model.modules())


@pytest.mark.parametrize(
    ("family", "settings", "gated"),
    [
        ("llama", {}, True),
        ("gemma3_text", {}, True),
        ("phi3", {"pad_token_id": 0}, False),  # fused
        ("gpt2", {}, False),
        ("opt", {"dropout": 0.0, "pad_token_id": 0, "ffn_dim": 64, "word_embed_proj_dim": BASE["hidden_size"]}, False),
    ],
)
def test_reading_activations_changes_nothing(family, settings, gated):
    model = tiny(family, **settings)
    result = prove_reading(model, PROMPT, [1, 2, 3])
    assert result["output unchanged"] is result["restored"] is True
    assert ("MLP computed anew" in result) == gated
    assert hooks(model) == 0


def test_an_mlp_that_goes_on_with_something_else_is_found_out():
    model = tiny("llama")
    owner = activation_points(model.model, [2])[0].owner
    # The module is called, and then another non-linearity is used.
    owner.forward = lambda x: owner.down_proj(0.9 * owner.act_fn(owner.gate_proj(x)) * owner.up_proj(x))
    with pytest.raises(ProofFailed, match="not what the MLP goes on with"):
        prove_reading(model, PROMPT, [1, 2])
    assert hooks(model) == 0


def test_a_model_that_answers_otherwise_while_it_is_read_is_found_out():
    model = tiny("llama")
    act = activation_points(model.model, [1])[0].act
    plain = act.forward
    act.forward = lambda x: plain(x) + bool(act._forward_hooks)
    with pytest.raises(ProofFailed, match="changed while its activations were read"):
        prove_reading(model, PROMPT, [1])


@pytest.mark.parametrize(
    ("where", "times", "said"),
    [
        ("own", 1, r"agreed when both were run a second time on cpu: this machine, or this model, does not repeat"),
        ("scorer", 1, r"agreed when both were run a second time on cpu: this machine, or this model, does not repeat"),
        ("own", 9, r"differ by [\d.]+ nats from those of the model's own forward, .* this family cannot be scored"),
        ("own nan", 1, r"differed by nan nats .* agreed when both were run a second time"),
    ],
)
def test_scores_that_differ_once_are_no_fault_of_the_family(where, times, said):
    model, left = tiny("llama", head=True), [times]

    def own(module, args, given, output):
        # The scorer's call for the head has no attention mask.
        if "attention_mask" in given and left[0]:
            left[0] -= 1
            output.logits = output.logits * (float("nan") if where == "own nan" else 1.5)
        return output

    def scorers(module, args, given, output):
        # The scorer's forward comes first.
        if left[0]:
            left[0] -= 1
            output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    texts = [(5, 6, 7), (8, 9)]
    rows = [branches(PROMPT, texts)], [branches(PROMPT, [text]) for text in texts]
    assert prove_scores(model, Scorer(model), *rows, None)["head"] < 1e-4
    hooked, hook = (model.model.get_decoder(), scorers) if where == "scorer" else (model.model, own)
    with hooked.register_forward_hook(hook, with_kwargs=True), pytest.raises(ProofFailed, match=said):
        prove_scores(model, Scorer(model), *rows, None)


@pytest.mark.parametrize(("times", "found"), [(1, "in one row"), (9, "in rows of their own")], ids=["once", "always"])
def test_texts_that_differ_once_in_one_row_still_share_it(times, found):
    model, left = tiny("llama", head=True), [times]
    texts = [(5, 6, 7), (8, 9)]
    together, apart = [branches(PROMPT, texts)], [branches(PROMPT, [text]) for text in texts]

    def off(module, args, output):
        if output.last_hidden_state.shape[1] == len(together[0]) and left[0]:
            left[0] -= 1
            output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    assert len(together[0]) > max(map(len, apart))
    with model.model.get_decoder().register_forward_hook(off):
        proofs = prove_scores(model, Scorer(model), together, apart, None)
    assert proofs["texts"] == found
    assert (proofs.get("gap that did not repeat", 0.0) > 0) == (times == 1)
    assert left[0] == max(0, times - 2)
