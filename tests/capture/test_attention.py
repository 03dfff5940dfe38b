"""The instrument on real attention: tiny random models of each family, and the embedded model."""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import AutoConfig, AutoModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from mless import kernels
from mless.capture import attention, capturing, forwards, received
from mless.errors import BadAttention, BadPrompt, BadStudy, UnsupportedArchitecture
from mless.kernels import reference, streaming
from mless.models.seams import attention_modules
from mless.redistribution import arm
from mless.values import Prompt, Span
from models.walking import build
from tiny import FAMILIES, prompt_of, tiny, wrapped

PROMPTS = [
    prompt_of(("start", 1), ("system", 6), ("filler", 9), ("question", 14), ("end", 3), seed=1),
    prompt_of(("system", 3), ("filler", 9), ("system", 1), ("question", 5), seed=2, item="2"),
    prompt_of(("system", 4), ("question", 21), seed=3, item="3", condition="none"),
]


def eager_matrices(model, prompt: Prompt) -> list[torch.Tensor]:
    config = model.model.config
    before, config._attn_implementation = config._attn_implementation, "eager"
    try:
        with torch.inference_mode():
            given = {} if prompt.position_ids is None else {"position_ids": torch.tensor([prompt.position_ids])}
            ids = torch.tensor([prompt.token_ids])
            out = model.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, output_attentions=True, **given
            )
    finally:
        config._attn_implementation = before
    return [matrix[0].double() for matrix in out.attentions]


def from_matrix(p: torch.Tensor, prompt: Prompt, visible: torch.Tensor):
    """Received means (later, original), n and mass straight from an attention matrix."""
    below = torch.tril(torch.ones_like(visible, dtype=torch.bool), -1) & visible
    members = torch.zeros(2, len(prompt), dtype=torch.bool)
    members[0] = True
    members[1, prompt.original] = True
    n = (members[:, :, None] & below[None]).sum(1)
    sums = torch.einsum("sq,hqk->shk", members.double(), p * below)
    means = (sums / torch.where(n > 0, n, torch.nan)[:, None]).numpy()
    rows = p[:, prompt.original].mean(1)
    mass = torch.stack(
        [rows[:, prompt.positions(name)].sum(-1) for name in ("start", "system", "filler", "question", "end")], -1
    )
    return means, n.numpy(), mass.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_received_and_mass_equal_the_models_own_eager_attention(family):
    model = tiny(family)
    for prompt, ours in zip(PROMPTS, received(model, PROMPTS), strict=True):
        windows = [
            7 if kind == "sliding_attention" else None
            for kind in getattr(model.model.config, "layer_types", None) or [None] * 3
        ]
        if family == "mistral":
            windows = [11] * 3
        for layer, matrix in enumerate(eager_matrices(model, prompt)):
            t = torch.arange(len(prompt))
            visible = t[:, None] >= t
            if windows[layer]:
                visible &= t[:, None] - t < windows[layer]
            means, n, mass = from_matrix(matrix, prompt, visible)
            np.testing.assert_allclose(ours.received[:, layer], means, atol=1e-5)
            np.testing.assert_array_equal(ours.n[:, layer], n)
            np.testing.assert_allclose(ours.mass[layer][:, :5], mass, atol=1e-5)
            np.testing.assert_allclose(ours.mass[layer].sum(-1), 1, atol=1e-5)
    assert (ours.mass[..., 5] > 0).all() == (family == "gpt_oss")  # a learned sink takes its share, and only there


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_equals_the_reference_kernel(family):
    model = tiny(family, seed=5)
    ours = list(received(model, PROMPTS))
    truth = list(received(model, PROMPTS, kernel=reference.received))
    for a, b in zip(ours, truth, strict=True):
        np.testing.assert_allclose(a.received, b.received, atol=1e-5)
        np.testing.assert_allclose(a.mass, b.mass, atol=1e-5)
        np.testing.assert_allclose(a.uniform, b.uniform, atol=1e-5)
        np.testing.assert_array_equal(a.n, b.n)


def test_a_backend_that_sdpa_does_not_choose_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in torch 2.7, whose kernel for CPUs does not know heads that share keys and reads beyond them.
    model = tiny("qwen3", seed=5)
    assert model.model.config.num_key_value_heads < model.heads
    truth = list(received(model, PROMPTS, kernel=reference.received))

    def grouped_by_mathematics(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> int:
        return (SDPBackend.FLASH_ATTENTION if q.shape[1] == k.shape[1] else SDPBackend.MATH).value

    def unfit(*_: Any, **__: Any) -> None:
        pytest.fail("SDPA did not choose it")

    monkeypatch.setattr(torch, "_fused_sdp_choice", grouped_by_mathematics)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", unfit)
    for a, b in zip(received(model, PROMPTS, kernel=reference.received), truth, strict=True):
        np.testing.assert_allclose(a.received, b.received, atol=1e-5)
        np.testing.assert_allclose(a.mass, b.mass, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_equals_one_by_one(family):
    model = tiny(family, seed=2)
    alone, together = list(received(model, PROMPTS)), list(received(model, PROMPTS, batch_size=3))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a.received, b.received, atol=1e-5)
        np.testing.assert_allclose(a.mass, b.mass, atol=1e-5)
        np.testing.assert_array_equal(a.n, b.n)


MOVED = [replace(p, position_ids=tuple(n + 30 * (n >= 5) for n in range(len(p)))) for p in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_shifted_positions_give_what_eager_gives_for_them(family):
    model = tiny(family)
    alone = list(received(model, MOVED))
    together = list(received(model, [*MOVED, *PROMPTS], batch_size=6))
    in_parts = list(received(model, MOVED, part=9))
    for prompt, plain, ours, batched, parts in zip(
        MOVED, received(model, PROMPTS), alone, together, in_parts, strict=False
    ):
        for layer, matrix in enumerate(eager_matrices(model, prompt)):
            below = torch.tril(torch.ones(len(prompt), len(prompt)), -1)
            sums = (matrix * below).sum(1).numpy()
            np.testing.assert_allclose(np.nan_to_num(ours.received[0, layer] * ours.n[0, layer]), sums, atol=1e-5)
        np.testing.assert_allclose(batched.received, ours.received, atol=1e-5)
        np.testing.assert_allclose(parts.received, ours.received, atol=1e-5)
        np.testing.assert_array_equal(ours.n, plain.n)  # positions change no mask
        assert not np.allclose(ours.received[0], plain.received[0], atol=1e-5, equal_nan=True)


def test_positions_beyond_the_context_are_refused():
    model = tiny("llama")
    far = replace(PROMPTS[0], position_ids=tuple(n + model.context for n in range(len(PROMPTS[0]))))
    with pytest.raises(BadPrompt, match=rf"item '1' reaches position {model.context + 32} .*takes {model.context}"):
        next(received(model, [far]))


def test_left_padding_gives_the_same_sums():
    model = tiny("llama")
    prompt = PROMPTS[0]
    (alone,) = received(model, [prompt])
    pad = 8
    size = len(prompt) + pad
    ids = torch.zeros(1, size, dtype=torch.long)
    ids[0, pad:] = torch.tensor(prompt.token_ids)
    real = (torch.arange(size) >= pad)[None]
    sets = torch.zeros(1, 2, size, dtype=torch.bool)
    sets[0, 0, pad:] = True
    sets[0, 1, [pad + i for i in prompt.original]] = True
    spans = torch.zeros(1, size, dtype=torch.long)
    spans[0, pad:] = torch.tensor(prompt.span_ids)
    positions = (torch.arange(size) - pad).clamp(min=0)[None]
    with capturing(model.model, layers=[1, 2, 3]) as recorder, torch.inference_mode():
        recorder.expect(sets, spans)
        model.model(input_ids=ids, attention_mask=real.long(), position_ids=positions, use_cache=False)
    for layer in (1, 2, 3):
        sums = recorder.sums[layer]
        means = sums.received[0] / sums.counts[0].clamp(min=1)[:, None]
        np.testing.assert_allclose(means[..., pad:].numpy(), np.nan_to_num(alone.received[:, layer - 1]), atol=1e-5)
        np.testing.assert_allclose(sums.mass[0].numpy(), alone.mass[layer - 1], atol=1e-5)


def test_chosen_layers_and_heads_are_those_of_the_whole():
    model = tiny("qwen2")
    whole, part = next(received(model, PROMPTS[:1])), next(received(model, PROMPTS[:1], layers=[2], heads=[4, 1]))
    np.testing.assert_allclose(part.received[:, 0], whole.received[:, 1][:, [3, 0]], atol=1e-7)
    assert (part.layers, part.heads) == ([2], [4, 1])


def test_filler_queries_count_only_in_the_later_set():
    model = tiny("llama")
    (ours,) = received(model, [PROMPTS[0]])
    fillers = len(PROMPTS[0].positions("filler"))
    first_system = PROMPTS[0].positions("system")[0]
    later, original = ours.n[:, 0, first_system]
    assert later - original == fillers
    assert np.isnan(ours.received[:, :, :, -1]).all()  # nobody comes after the last token
    assert not np.isnan(ours.received[:, :, :, :-1]).any()


def test_uniform_dilution_has_its_closed_form():
    model = tiny("gpt2")
    (ours,) = received(model, [PROMPTS[2]])
    size = len(PROMPTS[2])
    want = [np.mean([1 / (i + 1) for i in range(j + 1, size)]) for j in range(size - 1)]
    np.testing.assert_allclose(ours.uniform[1, 0, :-1], want, rtol=1e-5)


def test_the_instrument_comes_off_also_after_an_exception():
    model = tiny("llama")
    names = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    tokens = torch.tensor([PROMPTS[0].token_ids])
    before = model.model(input_ids=tokens).last_hidden_state
    model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("in the middle")))
    with pytest.raises(RuntimeError, match="in the middle"), capturing(model.model, layers=[1]):
        model.model(input_ids=tokens, use_cache=False)
    model.model.layers[1]._forward_pre_hooks.clear()
    assert model.model.config._attn_implementation == "sdpa"
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == names
    assert torch.equal(model.model(input_ids=tokens).last_hidden_state, before)


def test_the_forward_inside_is_the_plain_forward_up_to_rounding_whatever_is_recorded():
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    inside, found = {}, {}
    with torch.inference_mode():
        plain = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        for layers in ((1, 3), (3,), (1, 2, 3)):
            with capturing(model.model, layers=layers) as recorder:
                inside[layers] = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            assert sorted(recorder.sums) == list(layers)
            assert set(recorder.computed_by.values()) == {"joint"}
            found[layers] = recorder.sums[3].received
    torch.testing.assert_close(inside[(3,)], plain, rtol=2e-6, atol=2e-6)
    for layers in inside:
        assert torch.equal(inside[layers], inside[(3,)])
        assert torch.equal(found[layers], found[(3,)])


@pytest.mark.parametrize("layers", [[1], [3]])
@pytest.mark.parametrize("more", [1, 3])
def test_a_forward_with_a_cache_is_refused_whatever_is_recorded(layers, more):
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    with torch.inference_mode(), capturing(model.model, layers=layers):
        cache = model.model(input_ids=tokens, use_cache=True).past_key_values
        with pytest.raises(UnsupportedArchitecture, match=rf"layer {layers[0]} attends from {more} queries"):
            model.model(input_ids=tokens[:, :more], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [[1], [3, 1], [1, 2, 3]])
def test_a_forward_that_ends_with_its_last_layer_gives_the_same_bits(family, layers):
    model = tiny(family)
    tokens = torch.tensor([PROMPTS[0].token_ids])
    sums = []
    for ends in (False, True):
        with torch.inference_mode(), capturing(model.model, layers=layers) as recorder:
            (recorder.run if ends else model.model)(input_ids=tokens, use_cache=False)
        assert sorted(recorder.sums) == sorted(layers)
        sums.append(recorder.sums)
    for layer in layers:
        for name in ("received", "counts", "mass"):
            assert torch.equal(getattr(sums[0][layer], name), getattr(sums[1][layer], name)), (layer, name)


@pytest.mark.parametrize(("layers", "ran"), [([1], [1, 0, 0]), ([2], [1, 1, 0]), (None, [1, 1, 1])])
def test_what_comes_after_the_last_layers_attention_is_not_run(layers, ran):
    model = tiny("llama")
    attended, followed = [0, 0, 0], [0, 0, 0]
    hooks = []
    for at, layer in enumerate(model.model.layers):

        def count(*_, at=at, of):
            of[at] += 1

        hooks.append(layer.self_attn.register_forward_hook(partial(count, of=attended)))
        hooks.append(layer.mlp.register_forward_hook(partial(count, of=followed)))
    before = [dict(layer.self_attn._forward_hooks) for layer in model.model.layers]
    found = received(model, PROMPTS[1:], layers=layers)
    next(found)
    assert attended == followed == [1, 1, 1], "a model's first forward shows that no layer runs twice"
    attended[:] = followed[:] = [0, 0, 0]
    next(found)
    found.close()
    assert attended == ran
    assert followed == [*ran[1:], 0], "the last one's MLP is of no use"
    assert [dict(layer.self_attn._forward_hooks) for layer in model.model.layers] == before


def test_a_fault_in_a_forward_that_may_end_early_is_told_and_leaves_no_hook():
    model = tiny("llama")
    first, last = model.model.layers[0].self_attn, model.model.layers[2].self_attn
    broken = first.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("in the middle")))
    with pytest.raises(RuntimeError, match="in the middle"):
        next(received(model, PROMPTS[:1]))
    broken.remove()
    assert not last._forward_hooks
    assert next(received(model, PROMPTS[:1])).layers == [1, 2, 3]


def test_a_forward_that_may_end_early_and_would_record_nothing_is_refused():
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    with capturing(model.model, layers=[]) as recorder, pytest.raises(BadStudy, match="no layer is recorded"):
        recorder.run(input_ids=tokens, use_cache=False)
    with capturing(model.model, layers=[1]) as recorder:
        pass
    with pytest.raises(BadStudy, match=r"block has been left.*call run\(\) inside it"):
        recorder.run(input_ids=tokens, use_cache=False)


def test_who_keeps_the_sums_does_not_keep_the_model():
    model = tiny("llama").model
    with torch.inference_mode(), capturing(model, layers=[1]) as recorder:
        recorder.run(input_ids=torch.tensor([PROMPTS[0].token_ids]), use_cache=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert recorder.sums[1].received.shape[-1] == len(PROMPTS[0])


class Twice(torch.nn.ModuleList):
    """A looped model's layers."""

    def __getitem__(self, index):
        return [*self, *self] if isinstance(index, slice) else super().__getitem__(index)


@pytest.mark.parametrize("layers", [[1], [2], None])
def test_a_model_that_runs_a_layer_twice_is_refused_whichever_is_recorded(layers):
    model = tiny("llama")
    model.model.layers = Twice(model.model.layers)
    with pytest.raises(UnsupportedArchitecture, match="layer 1 ran more than once in a forward"):
        next(received(model, PROMPTS[:1], layers=layers))


def test_a_forward_whose_attention_another_block_takes_is_refused():
    model, tokens = tiny("llama").model, torch.tensor([PROMPTS[0].token_ids])
    refused = pytest.raises(UnsupportedArchitecture, match=r"layer 1's attention.*another capturing block lies inside")
    with torch.inference_mode(), capturing(model, layers=[1]) as outer, capturing(model, layers=[1]), refused:
        outer.run(input_ids=tokens, use_cache=False)


@pytest.mark.parametrize("layers", [[1], [2, 1], None])
def test_layers_that_share_a_module_are_told_apart_also_after_a_forward_that_ended_early(layers):
    model = wrapped(build("hrm_text").model, "hrm_text")
    assert len({id(module) for module in attention_modules(model.model).values()}) < len(attention_modules(model.model))
    alone = [next(received(model, [prompt], layers=layers)) for prompt in PROMPTS]
    for one, other in zip(alone, received(model, PROMPTS, layers=layers), strict=True):
        np.testing.assert_array_equal(one.received, other.received)
    parts = next(received(model, PROMPTS[:1], layers=layers, part=11))
    np.testing.assert_allclose(parts.received, alone[0].received, rtol=0, atol=2e-5)


def test_arm_is_in_a_forward_that_ends_early_and_knows_that_it_has_ended():
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    (without,) = received(model, PROMPTS[:1], layers=[2])
    with arm(model, c=0.3, layers=[1]), torch.inference_mode():
        mlp, few = model.model.layers[0].mlp, torch.randn(1, 5, model.model.config.hidden_size)
        alone = mlp(few)
        (within,) = received(model, PROMPTS[:1], layers=[2])
        assert torch.equal(mlp(few), alone), "the forward's rows are not those of what is called next"
        with capturing(model.model, layers=[2]) as recorder:
            model.model(input_ids=tokens, use_cache=False)
        whole = recorder.sums[2].received[0, 0]
    assert not np.array_equal(within.received[0, 0], without.received[0, 0], equal_nan=True)
    n = recorder.sums[2].counts[0, 0]
    np.testing.assert_allclose(within.received[0, 0][:, n > 0], (whole / n)[:, n > 0].numpy(), rtol=1e-5)


def test_asked_for_some_heads_two_sets_that_are_one_take_the_memory_of_one():
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    with torch.inference_mode():
        with capturing(model.model, layers=[1]) as recorder:
            model.model(input_ids=tokens, use_cache=False)
            whole = recorder.sums[1].received
        with capturing(model.model, layers=[1], heads=[2, 4]) as recorder:
            model.model(input_ids=tokens, use_cache=False)
            some = recorder.sums[1].received
    assert some.stride(1) == whole.stride(1) == 0
    assert torch.equal(some, whole[:, :, [1, 3]])


@pytest.mark.parametrize("heads", [[0], [-1], [1, 5]])
@pytest.mark.parametrize("kernel", [kernels.received, streaming.received])
def test_heads_that_are_not_there_are_refused_and_not_counted_from_the_end(heads, kernel):
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    with (
        torch.inference_mode(),
        pytest.raises(BadStudy, match=rf"no head {heads[-1]}: this model's heads are 1 to 4"),
        capturing(model.model, layers=[1], heads=heads, kernel=kernel),
    ):
        model.model(input_ids=tokens, use_cache=False)


@pytest.mark.parametrize("layer", [0, 9])
def test_layers_that_are_not_there_are_refused(layer):
    with (
        pytest.raises(BadStudy, match=rf"no layer {layer} with attention in LlamaModel: its attention layers are 1–3"),
        capturing(tiny("llama").model, layers=[layer]),
    ):
        pass


#: Every family with every side, and either kernel with each of both.
WINDOWED = list(itertools.product(["gemma3_text", "gemma2", "gpt_oss"], ["none", "left", "right"]))


@pytest.mark.parametrize(
    ("family", "side", "kernel"),
    [
        pytest.param(*case, kernel, marks=[pytest.mark.slow] * ((n + by) % 2))
        for n, case in enumerate(WINDOWED)
        for by, kernel in enumerate([kernels.received, streaming.received])
    ],
)
def test_windows_are_looked_through_block_by_block(family, side, kernel, monkeypatch):
    """More blocks of queries than one, whose windows begin at other keys; rows of other lengths."""
    monkeypatch.setattr(forwards, "BLOCK_ELEMENTS", 2 * 4 * 700 * 256)
    looked: list[slice] = []
    near = kernels.Intervals.near

    def watched(self, first, last):
        keys, mask = near(self, first, last)
        looked.append(keys)
        return keys, mask

    monkeypatch.setattr(kernels.Intervals, "near", watched)
    model = tiny(family, sliding_window=40, max_position_embeddings=1024)
    ids = torch.randint(5, 90, (2, 700), generator=torch.Generator().manual_seed(3))
    padding = torch.ones(2, 700, dtype=torch.long)
    if side == "left":
        padding[1, :333] = 0
    if side == "right":
        padding[1, 333:] = 0
    real = padding.bool()
    with torch.inference_mode():
        plain = model.model(input_ids=ids, attention_mask=padding, use_cache=False).last_hidden_state
        with capturing(model.model, layers=[1, 3], kernel=kernel) as recorder:
            ours = model.model(input_ids=ids, attention_mask=padding, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours[real], plain[real], rtol=1e-4, atol=1e-5)
    assert set(recorder.sums) == {1, 3}
    assert torch.isfinite(ours).all()
    if set(recorder.computed_by.values()) == {"joint"}:
        assert (family, kernel) == ("gemma3_text", kernels.received)
        return  # its own blocks: tests/kernels/test_joint.py
    # 40 keys and what aligning them adds, besides the block's own.
    windows = {keys.start for keys in looked if keys.stop - keys.start <= 256 + 40 + 128}
    assert windows >= {0, 128, 384}


def test_a_local_layers_window_does_not_join_documents():
    """GPT-Neo's local layers bring a window of their own; what the model's mask hides stays hidden."""
    config = AutoConfig.for_model(
        "gpt_neo", vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=9,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    tokens = torch.tensor([PROMPTS[0].token_ids])
    places = (torch.arange(tokens.shape[1]) % 14)[None]
    with torch.inference_mode():
        plain = model(input_ids=tokens, position_ids=places, use_cache=False).last_hidden_state
        with capturing(model, layers=[2]):
            inside = model(input_ids=tokens, position_ids=places, use_cache=False).last_hidden_state
    torch.testing.assert_close(inside, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["window", "window and sinks", "packed", "no diagonal"])
def test_the_forward_does_not_depend_on_the_sets(case):
    """What a token sees is the mask's to say: also for tokens that are in no query set."""
    tokens = torch.tensor([PROMPTS[0].token_ids])
    size = tokens.shape[1]
    model = tiny({"window": "mistral", "window and sinks": "gpt_oss"}.get(case, "gemma3_text"), sliding_window=7)
    given = {}
    sets = torch.ones(1, 2, size, dtype=torch.bool)
    sets[:, :, size // 3 : size - 2] = False
    if case in ("packed", "no diagonal"):
        causal = torch.ones(size, size, dtype=torch.bool).tril(0 if case == "packed" else -1)
        causal[0, 0] = True
        if case == "packed":
            causal[size // 2 :, : size // 3] = False
        given = {"attention_mask": causal[None, None]}
    with torch.inference_mode():
        plain = model.model(input_ids=tokens, use_cache=False, **given).last_hidden_state
        for announced in (False, True):
            with capturing(model.model, layers=[2]) as recorder:
                if announced:
                    recorder.expect(sets, torch.zeros(1, size, dtype=torch.long))
                inside = model.model(input_ids=tokens, use_cache=False, **given).last_hidden_state
            torch.testing.assert_close(inside, plain, rtol=1e-5, atol=1e-5)


def test_with_another_kernel_the_forward_inside_is_the_plain_forward_bit_for_bit():
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    with torch.inference_mode():
        plain = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        with capturing(model.model, layers=[1, 3], kernel=streaming.received) as recorder:
            inside = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert torch.equal(plain, inside)
    assert set(recorder.computed_by.values()) == {"streaming"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_inside_agrees_with_eager(family):
    """Soft caps and sinks run through our own softmax; the hidden states must not move."""
    model = tiny(family)
    tokens = torch.tensor([PROMPTS[0].token_ids])
    config = model.model.config
    before, config._attn_implementation = config._attn_implementation, "eager"
    with torch.inference_mode():
        eager = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        config._attn_implementation = before
        with capturing(model.model, layers=[1]):
            inside = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(inside, eager, atol=2e-4, rtol=1e-4)


def test_long_windowed_prompts_are_masked_block_by_block(monkeypatch):
    monkeypatch.setattr(forwards, "ROWS_AT_ONCE", 10)
    sdpa, asked = forwards._by_sdpa, []

    def counted(module, q, *others, **options):
        asked.append(q.shape[2])
        return sdpa(module, q, *others, **options)

    monkeypatch.setattr(forwards, "_by_sdpa", counted)
    model = tiny("mistral")
    blocks = next(received(model, PROMPTS[:1], kernel=streaming.received))
    assert max(asked) == 10
    assert len(asked) > 3
    monkeypatch.undo()
    whole = next(received(model, PROMPTS[:1], kernel=streaming.received))
    np.testing.assert_allclose(blocks.received, whole.received, atol=1e-5)


def test_what_is_not_understood_is_refused_by_name():
    model = tiny("llama")
    tokens = torch.tensor([PROMPTS[0].token_ids])
    with capturing(model.model, layers=[1]), pytest.raises(UnsupportedArchitecture, match="'colour'"):
        model.model(input_ids=tokens, use_cache=False, colour="blue")
    cache = model.model(input_ids=tokens, use_cache=True).past_key_values
    with capturing(model.model, layers=[1]), pytest.raises(UnsupportedArchitecture, match="use_cache=False"):
        model.model(input_ids=tokens[:, :1], past_key_values=cache)
    with capturing(model.model, layers=[1]) as recorder:
        recorder.expect(torch.ones(1, 2, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.long))
        with pytest.raises(BadPrompt, match="announced"):
            model.model(input_ids=tokens, use_cache=False)


def test_a_model_outside_the_registry_is_refused_by_name():
    model = tiny("llama")
    config = AutoConfig.for_model("xlm", vocab_size=97, emb_dim=32, n_layers=2, n_heads=4)
    object.__setattr__(model, "model", AutoModel.from_config(config).eval())
    object.__setattr__(model, "family", "xlm")
    object.__setattr__(model, "loaded_layers", 2)
    with pytest.raises(UnsupportedArchitecture, match=r"XLMModel: no attention modules.*no row.*adding-a-model\.md"):
        list(received(model, PROMPTS[:1]))


def test_attention_in_both_directions_is_refused():
    model = tiny("llama")
    for module in model.model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(UnsupportedArchitecture, match="both directions"):
        list(received(model, PROMPTS[:1]))


def test_nan_in_the_attention_is_named():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[:12] = float("nan")
    with pytest.raises(BadAttention, match=r"not finite.*L2H1.*float32"):
        list(received(model, PROMPTS[:1]))


@pytest.mark.parametrize("layers", [2, "2", [2, 2], (2,)])
@pytest.mark.parametrize("heads", [3, "3", [3, 3]])
def test_one_layer_and_head_may_be_named_in_any_way(layers, heads):
    model = tiny("llama")
    (plain,) = received(model, PROMPTS[:1], layers=[2], heads=[3])
    (named,) = received(model, PROMPTS[:1], layers=layers, heads=heads)
    assert (named.layers, named.heads) == ([2], [3])
    np.testing.assert_array_equal(named.received, plain.received)


def test_what_is_no_list_of_prompts_is_refused(monkeypatch):
    """Without the checks of conftest.py, which see an argument before the functions do."""
    for name in ("_batches", "_forward"):
        monkeypatch.setattr(attention, name, inspect.unwrap(getattr(attention, name)))
    unchecked = inspect.unwrap(received)
    with pytest.raises(BadPrompt, match=r"put it in a list$"):
        list(unchecked(tiny("llama"), prompt_of(("question", 3))))
    with pytest.raises(BadPrompt, match=r"mless\.prompts\(.*got str$"):
        list(unchecked(tiny("llama"), ["2 + 2 ="]))


def test_a_layer_that_was_not_loaded_is_told_from_one_that_is_not_there():
    cut = replace(tiny("llama"), layers=30)
    with pytest.raises(
        BadStudy, match=r"the loaded layers are 1 to 3.*of the model's 30 mless.load\(…, layers=…\) loads more"
    ):
        list(received(cut, PROMPTS[:1], layers=4))
    with pytest.raises(BadStudy, match=r"the loaded layers are 1 to 3 \(numbered from 1\)$"):
        list(received(tiny("llama"), PROMPTS[:1], layers=4))


def test_a_block_takes_one_layer_and_one_head():
    model = tiny("llama")
    with capturing(model.model, layers=2, heads=3) as recorder, torch.inference_mode():
        model.model(input_ids=torch.tensor([PROMPTS[0].token_ids]), use_cache=False)
    assert recorder.sums[2].received.shape[2] == 1


def test_ranges_are_named():
    model = tiny("llama")
    with pytest.raises(BadStudy, match="no layer 4: the loaded layers are 1 to 3"):
        list(received(model, PROMPTS[:1], layers=[4]))
    with pytest.raises(BadStudy, match="no head 5: this model's heads are 1 to 4"):
        list(received(model, PROMPTS[:1], heads=[5]))
    long = prompt_of(("question", 300))
    with pytest.raises(BadPrompt, match=r"300 tokens.*takes 256"):
        list(received(model, [long]))


def our_matrices(model, prompt: Prompt) -> dict[int, torch.Tensor]:
    """Every layer's attention matrix, by the reference from the queries, keys and masks that the instrument sees."""
    found: dict[int, torch.Tensor] = {}

    def on_call(call, out):
        scale = call.score["scale"]
        found[call.layer] = reference.probabilities(call.query, call.key, scale=scale, visible=call.mask)[0][0]

    with capturing(model.model, layers=[1, 2]) as recorder, torch.inference_mode():
        recorder.on_call = on_call
        recorder.run(input_ids=torch.tensor([prompt.token_ids]), use_cache=False)
    return found


def ratio_spread(model, layer: int, without: Prompt, with_filler: Prompt) -> float:
    """How far P′/P is from constant over the question's keys, worst over heads and queries."""
    p, p_filler = our_matrices(model, without)[layer], our_matrices(model, with_filler)[layer]
    worst = 0.0
    pairs = list(zip(without.positions("question"), with_filler.positions("question"), strict=True))
    for at in range(4, len(pairs)):
        i, i_filler = pairs[at]
        keys, keys_filler = [a for a, _ in pairs[: at + 1]], [b for _, b in pairs[: at + 1]]
        ratio = p_filler[:, i_filler, keys_filler] / p[:, i, keys]
        worst = max(worst, float((ratio.amax(-1) / ratio.amin(-1) - 1).max()))
    return worst


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_oracle_in_layer_one_every_question_key_loses_alike(family):
    """RoPE sees only distances, which filler before the question leaves alone: P′/P is one number per query, in layer 1."""
    model = tiny(family, seed=7)
    with_filler = prompt_of(("system", 6), ("filler", 9), ("question", 14), seed=4)
    ids = tuple(with_filler.token_ids[i] for i in with_filler.original)
    without = Prompt("1", "none", ids, (Span("system", 0, 6), Span("question", 6, 20)), "")
    assert ratio_spread(model, 1, without, with_filler) < 1e-4
    assert ratio_spread(model, 2, without, with_filler) > 1e-2


def test_the_oracle_on_the_embedded_model(embedded):
    from mless.study.direct import items, prompts

    questions = items(limit=1)
    (without,) = prompts(embedded, questions, prompt="raw")
    (with_filler,) = prompts(embedded, questions, "mless", prompt="raw")
    assert ratio_spread(embedded, 1, without, with_filler) < 1e-4
    assert ratio_spread(embedded, 2, without, with_filler) > 1e-2


def test_the_embedded_model_equals_the_reference(embedded):
    from mless.study.direct import items, prompts

    one = items(limit=1)
    rows = [*prompts(embedded, one, "mless", prompt="raw"), *prompts(embedded, one, prompt="chat")]
    some: dict[str, Any] = {"layers": [1, 2, 15, 30]}
    ours = list(received(embedded, rows, **some))
    truth = list(received(embedded, rows, kernel=reference.received, **some))
    batched = list(received(embedded, rows, batch_size=2, **some))
    for a, b, c in zip(ours, truth, batched, strict=True):
        np.testing.assert_allclose(a.received, b.received, atol=1e-5)
        np.testing.assert_allclose(a.mass, b.mass, atol=1e-5)
        np.testing.assert_allclose(a.received, c.received, atol=1e-5)
        np.testing.assert_allclose(a.mass.sum(-1), 1, atol=1e-5)


def test_heads_that_see_different_keys_are_refused():
    from mless.capture.seam import mask_of

    mask = torch.ones(1, 2, 3, 3, dtype=torch.bool).tril()
    q = k = torch.zeros(1, 2, 3, 4)
    same, bias = mask_of(mask, torch.nn.Identity(), q, k)
    assert same(0, 3).shape == (1, 1, 3, 3)
    assert bias is None
    mask[0, 1, 2, 0] = False
    with pytest.raises(UnsupportedArchitecture, match="see different keys"):
        mask_of(mask, torch.nn.Identity(), q, k)


def test_forwards_that_were_not_announced_are_each_measured_by_their_own_padding():
    model = tiny("llama")
    ids = torch.arange(1, 13).reshape(2, 6)
    short = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    with capturing(model.model, layers=[1]) as recorder, torch.inference_mode():
        model.model(input_ids=ids, attention_mask=short, use_cache=False)
        assert recorder.sums[1].counts[:, 0].tolist() == [[1, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]]
        model.model(input_ids=ids, use_cache=False)
        assert recorder.sums[1].counts[:, 0].tolist() == [[5, 4, 3, 2, 1, 0]] * 2
        model.model(input_ids=ids[:1, :3], use_cache=False)
        assert recorder.sums[1].counts[:, 0].tolist() == [[2, 1, 0]]
        recorder.expect(torch.ones(1, 2, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.long))
        model.model(input_ids=ids[:1, :3], use_cache=False)
        with pytest.raises(BadPrompt, match=r"only one forward was announced; call expect\(\)"):
            model.model(input_ids=ids[:1, :3], use_cache=False)


@pytest.mark.parametrize("family", ["llama", "qwen3"], ids=["without-its-lse", "with-its-lse"])
def test_padding_on_the_right_needs_no_mask(family, monkeypatch):
    """A real token sees what it would see without it, so the causal forward serves."""
    sdpa = forwards._by_sdpa

    def causal_only(module, q, k, v, mask, **options):
        assert mask is None, "a masked forward"
        return sdpa(module, q, k, v, mask, **options)

    model = tiny(family, seed=3)
    alone = [next(received(model, [prompt])) for prompt in PROMPTS]
    ids = torch.zeros(3, 33, dtype=torch.long)
    real = torch.zeros(3, 33, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)], real[row, : len(prompt)] = torch.tensor(prompt.token_ids), 1
    with torch.inference_mode():
        masked = model.model(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
        monkeypatch.setattr(forwards, "_by_sdpa", causal_only)
        with capturing(model.model, layers=[1], kernel=streaming.received):
            ours = model.model(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours[real.bool()], masked[real.bool()], rtol=1e-5, atol=1e-5)
    for one, row in zip(alone, received(model, PROMPTS, batch_size=3), strict=True):
        np.testing.assert_allclose(row.received, one.received, atol=1e-6)
        np.testing.assert_allclose(row.mass, one.mass, atol=1e-6)
        np.testing.assert_array_equal(row.uniform, one.uniform)
        np.testing.assert_array_equal(row.n, one.n)
    # Not so on the left, where a real token must not see it.
    with (
        capturing(model.model, layers=[1], kernel=streaming.received),
        torch.inference_mode(),
        pytest.raises(AssertionError, match="a masked forward"),
    ):
        model.model(input_ids=ids.flip(1), attention_mask=real.flip(1), use_cache=False)


def test_what_computed_a_layer_is_told():
    for family, by in {"llama": "joint", "gemma3_text": "joint", "gemma2": "streaming"}.items():
        model = tiny(family)
        (ours,) = received(model, PROMPTS[:1], layers=[1, 3])
        assert ours.computed_by == {1: by, 3: by}
    (truth,) = received(model, PROMPTS[:1], layers=[2], kernel=reference.received)
    assert truth.computed_by == {2: "reference"}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_forward_keeps_no_queries_alive(family):
    """A layer's queries and keys are a good part of the memory a forward needs; only numbers per token are kept."""
    model = tiny(family)
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def on_call(call, out):
        nonlocal most
        seen.extend(weakref.ref(x) for x in (call.query, call.key, call.value, out))
        most = max(most, sum(x() is not None for x in seen))

    gc.collect()
    gc.disable()  # what goes only when the collector comes by has not gone in time
    try:
        with capturing(model.model, layers=[1, 2, 3]) as recorder, torch.inference_mode():
            recorder.on_call = on_call
            model.model(input_ids=torch.tensor([PROMPTS[0].token_ids]), use_cache=False)
            assert len(seen) == 12
            assert not [x for x in seen if x() is not None]
            assert sorted(recorder.sums) == [1, 2, 3]
    finally:
        gc.enable()
    assert most == 4  # one layer's at a time


def test_every_layer_has_the_yardstick_of_its_own_mask():
    """Of three layers the first and the last see 7 tokens; the second sees all."""
    (ours,) = received(tiny("gemma3_text"), [PROMPTS[2]])
    size = len(PROMPTS[2])
    for layer, window in enumerate((7, size, 7)):
        reach = [range(j + 1, min(size, j + window)) for j in range(size)]
        assert ours.n[0, layer].tolist() == [len(queries) for queries in reach]
        even = [np.mean([1 / min(i + 1, window) for i in queries]) for queries in reach[:-1]]
        np.testing.assert_allclose(ours.uniform[0, layer, :-1], even, rtol=1e-6)


def test_shares_are_taken_of_pairs_only():
    from mless.study.direct import retained

    model = tiny("llama")
    one = list(received(model, [prompt_of(("system", 4), ("question", 9), seed=1, condition="none")], layers=[1]))
    other = list(received(model, [prompt_of(("system", 4), ("filler", 5), ("question", 9), seed=2)], layers=[1]))
    with pytest.raises(BadPrompt, match="do not hold the same original tokens"):
        retained(one, other)
    with pytest.raises(BadStudy, match="no layer or no head"):
        list(received(model, PROMPTS[:1], heads=[]))


def test_shares_are_of_iterators_too_and_of_the_same_layers_and_heads_only():
    from mless.study.direct import retained

    model = tiny("llama")
    pairs = []
    for seed in range(3):
        ids = prompt_of(("system", 4), ("question", 9), seed=seed).token_ids
        for filler in (0, 5):
            tokens = [*ids[:4], *[7] * filler, *ids[4:]]
            spans = [
                Span("system", 0, 4),
                *([Span("filler", 4, 9)] if filler else []),
                Span("question", 4 + filler, 13 + filler),
            ]
            condition = "mless" if filler else "none"
            pairs.append(Prompt(str(seed), condition, tuple(tokens), tuple(spans), ""))
    without, filled = pairs[::2], pairs[1::2]
    shares = retained(received(model, without, layers=[1]), received(model, filled, layers=[1]))
    assert [(share.layer, share.head) for share in shares] == [(1, head) for head in range(model.heads + 1)]
    with pytest.raises(BadStudy, match=r"layers 1 with heads 1–4 and layers 1–3 with heads 2: give received"):
        retained(received(model, without, layers=[1]), received(model, filled, heads=2))
