"""ARM: the pure function against a transcription of its definition, and its place in real models of several families."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jaxtyping import config
from peft import LoraConfig, get_peft_model
from scipy.stats import kstest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, pipeline

from engines.tiny_answerers import answering, ids_of
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.models.activations import activation_points
from mless.redistribution import arm, attach_arm, attached, redistribute, uniform
from mless.values import arm_settings, arm_words

# ---- the definition, written down once more --------------------------------------------------------------------------


def by_definition(
    values: list[float],
    *,
    c: float | None = None,
    fraction: float | None = None,
    p_min: float = 0.02,
    p_max: float = 0.25,
    p1: float = 99.5,
) -> tuple[list[int], float, float]:
    """Which values of a pool are chosen, and how far positive and negative ones may go; loops and NumPy's float32, nothing of ours."""
    n = len(values)
    sizes = [np.float32(abs(value)) for value in values]
    if fraction is None:
        assert c is not None
        median = sorted(sizes)[(n - 1) // 2]
        mad = sorted(abs(size - median) for size in sizes)[(n - 1) // 2]
        epsilon = np.float32(1.4826 * c) * mad
        share = sum(1 for size in sizes if size < epsilon) / n
        fraction = min(max(share, p_min), p_max)
    k = max(1, round(fraction * n))
    chosen = sorted(range(n), key=lambda unit: (sizes[unit], unit))[:k]
    # Linear between the two values that the place lies between.
    ordered = sorted(values)
    place = (n - 1) * p1 / 100
    low = math.floor(place)
    top = ordered[low] + (ordered[min(low + 1, n - 1)] - ordered[low]) * (place - low)
    return sorted(chosen), max(top, 0.0), max(-ordered[0], 0.0)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


@contextmanager
def unchecked() -> Generator[None]:
    """As people run it: conftest.py has every annotated function checked while it runs."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


def silu_like(*shape: int, seed: int = 0) -> Tensor:
    return nn.functional.silu(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.5)


CHOICES = [
    {"c": 0.13},
    {"c": 0.32, "p1": 90.0},
    {"c": 0.0},
    {"c": 9.0},
    {"fraction": 0.25, "p1": 85.0},
    {"fraction": 0.4, "p1": 100.0},
]


@pytest.mark.parametrize("rule", ["replace", "add"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_tensor_scope_is_the_published_definition(choice, rule):
    a = silu_like(3, 40, 130)
    new = redistribute(a, **choice, scope="tensor", rule=rule)
    flat, out = a.flatten(), new.flatten()
    chosen, top, bottom = by_definition(flat.tolist(), **choice)
    rest = torch.ones(len(flat), dtype=torch.bool)
    rest[chosen] = False
    assert torch.equal(bits(out[rest]), bits(flat[rest]))
    changed = (out != flat).nonzero().flatten().tolist()
    assert set(changed) <= set(chosen)
    # A draw is 0 once in 65,536 times, and only then is nothing added.
    assert len(changed) >= len(chosen) - 3
    old = flat[chosen].numpy()
    drawn = out[chosen].numpy() - (0 if rule == "replace" else old)
    slack = 1e-6
    positive = old >= 0
    assert (drawn[positive] >= -slack).all()
    assert (drawn[positive] <= top + slack).all()
    assert (drawn[~positive] <= slack).all()
    assert (drawn[~positive] >= -bottom - slack).all()
    # The magnitudes: as uniform as those of Python's own generator, in both ranges.
    theirs = random.Random(7)
    for mine, bound in ((drawn[positive] / top, 1), (-drawn[~positive] / bottom, 1)):
        assert len(mine) > 50
        assert kstest(mine, "uniform", args=(0, bound)).pvalue > 1e-3
        assert kstest(mine, [theirs.random() for _ in mine]).pvalue > 1e-3


def test_the_number_chosen_is_clipped_to_its_bounds():
    a = silu_like(1, 1, 1000)
    sizes = {c: int((redistribute(a, c=c) != a).sum()) for c in (0.0, 0.13, 9.0)}
    assert sizes[0.0] == 20
    assert 20 < sizes[0.13] < 250
    assert sizes[9.0] == 250


def test_at_least_one_value_is_chosen():
    a = torch.tensor([[[3.0, -2.0, 1.0, -4.0]]])
    new = redistribute(a, fraction=0.01)
    assert (new != a).tolist() == [[[False, False, True, False]]]


def test_of_equals_the_first_units_are_chosen():
    a = torch.tensor([[[2.0, -1.0, 1.0, -1.0, 1.0, 5.0, -6.0, 7.0]]])
    new = redistribute(a, fraction=0.25)
    assert (new != a).tolist() == [[[False, True, True, False, False, False, False, False]]]


def test_zero_counts_as_positive():
    a = torch.tensor([[[0.0, -0.0, 3.0, 4.0, -5.0, 6.0]]])
    new = redistribute(a, fraction=0.34, seed=1)
    assert (new[0, 0, :2] > 0).all()


# ---- properties ------------------------------------------------------------------------------------------------------

# Few different values, so that there are ties, zeros of both signs and rows without a positive one.
VALUES = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5]), st.floats(-100, 100, width=32))
SETTINGS = st.one_of(
    st.fixed_dictionaries({"c": st.floats(0, 3)}), st.fixed_dictionaries({"fraction": st.floats(0.01, 0.99)})
)


@st.composite
def pools(draw):
    rows, tokens, units = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 24))
    return torch.from_numpy(draw(arrays(np.float32, (rows, tokens, units), elements=VALUES)))


@settings(max_examples=60, deadline=None)
@given(
    a=pools(),
    choice=SETTINGS,
    p1=st.floats(0.5, 100),
    scope=st.sampled_from(["token", "sequence", "tensor"]),
    rule=st.sampled_from(["replace", "add"]),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_exactly_the_k_smallest_are_drawn_anew_and_nothing_else(a, choice, p1, scope, rule, seed, data):
    rows, tokens, units = a.shape
    real = torch.from_numpy(data.draw(arrays(np.bool_, (rows, tokens))))
    poisoned = torch.where(real[..., None], a, torch.tensor(math.nan))
    new = redistribute(poisoned, **choice, p1=p1, scope=scope, rule=rule, seed=seed, real=real)
    share = uniform(torch.full((rows,), seed), torch.arange(tokens).expand(rows, tokens), units)
    expected = poisoned.clone()
    keep = {
        "token": [[(r, t)] for r in range(rows) for t in range(tokens)],
        "sequence": [[(r, t) for t in range(tokens)] for r in range(rows)],
        "tensor": [[(r, t) for r in range(rows) for t in range(tokens)]],
    }
    for pool in keep[scope]:
        places = [(r, t, u) for r, t in pool if real[r, t] for u in range(units)]
        if not places:
            continue
        chosen, top, bottom = by_definition([float(a[place]) for place in places], **choice, p1=p1)
        for index in chosen:
            place = places[index]
            old = float(a[place])
            drawn = -float(share[place]) * bottom if old < 0 else float(share[place]) * top
            expected[place] = drawn if rule == "replace" else old + drawn
            assert new[place] <= 0 if old < 0 else new[place] >= 0
        rest = [place for index, place in enumerate(places) if index not in set(chosen)]
        for place in rest:
            assert bits(new[place].reshape(1)) == bits(a[place].reshape(1))
    torch.testing.assert_close(new, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(bits(new[~real]), bits(poisoned[~real]))


@settings(max_examples=30, deadline=None)
@given(a=pools(), choice=SETTINGS, seed=st.integers(0, 2**40))
def test_a_token_by_itself_gives_what_it_gives_among_others(a, choice, seed):
    whole = redistribute(a, **choice, seed=seed)
    for r in range(a.shape[0]):
        for t in range(a.shape[1]):
            alone = redistribute(a[r : r + 1, t : t + 1], **choice, seed=seed, positions=torch.tensor([[t]]))
            assert torch.equal(bits(alone), bits(whole[r : r + 1, t : t + 1]))


def test_padding_enters_no_statistic():
    a = silu_like(2, 6, 40)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    for scope in ("sequence", "tensor"):
        one, other = a.clone(), a.clone()
        one[~real], other[~real] = 1e4, 0.0
        first, second = (redistribute(x, fraction=0.3, scope=scope, real=real) for x in (one, other))
        assert torch.equal(first[real], second[real])
        assert (first[~real] == 1e4).all()
    with_pads = redistribute(a, fraction=0.3, scope="sequence", real=real)
    assert torch.equal(with_pads[1:, :4], redistribute(a[1:, :4], fraction=0.3, scope="sequence"))


def test_what_is_drawn_is_a_function_of_seed_position_and_unit():
    seeds, positions = torch.tensor([3, 3, 4, 3 + (1 << 40)]), torch.tensor([[0, 1, 2]]).expand(4, 3)
    share = uniform(seeds, positions, 5000)
    assert torch.equal(share, uniform(seeds, positions, 5000))
    assert torch.equal(share[0], share[1])
    assert torch.equal(share[0, 1, :7], uniform(torch.tensor([3]), torch.tensor([[1]]), 7)[0, 0])
    # Two sequences of 5,000 draws of 16 bits agree in few places; so do a sequence and itself moved by one unit.
    different = [share[0, 0], share[0, 1], share[0, 2], share[2, 0], share[3, 0], share[0, 0].roll(1)]
    for i, one in enumerate(different):
        for other in different[:i]:
            assert (one == other).sum() < 5
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.06


def test_the_draws_are_uniform():
    share = uniform(torch.arange(20), torch.arange(50).expand(20, 50), 101)
    assert 0 <= share.min() <= share.max() < 1
    for part in (share, share[..., ::2], share[..., 1::2], share[:, :, 0], share[0], share[:, 0]):
        assert kstest(part.flatten().numpy(), "uniform").pvalue > 1e-3


def test_a_row_s_own_seed_stands_in_for_the_settings():
    a = silu_like(1, 5, 64).expand(3, 5, 64)
    new = redistribute(a, c=0.13, seed=9, seeds=torch.tensor([9, 10, 9]))
    assert torch.equal(new[0], redistribute(a[:1], c=0.13, seed=9)[0])
    assert torch.equal(new[0], new[2])
    assert not torch.equal(new[0], new[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_keep_what_is_not_chosen(dtype):
    a = silu_like(2, 3, 200).to(dtype)
    new = redistribute(a, fraction=0.25)
    assert new.dtype == dtype
    changed = new != a
    assert (changed.sum(-1) >= 48).all()
    assert (changed.sum(-1) <= 50).all()
    largest = a.abs().masked_fill(~changed, -1).amax(-1)
    smallest = a.abs().masked_fill(changed, math.inf).amin(-1)
    assert (largest <= a.abs().sort(-1).values[..., 49]).all()
    assert (smallest >= 0).all()


def test_the_input_is_left_as_it_is_and_may_be_empty():
    a = silu_like(1, 3, 8)
    before = a.clone()
    redistribute(a, c=0.1)
    assert torch.equal(a, before)
    assert redistribute(a[:, :0], c=0.1).shape == (1, 0, 8)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"c": -0.1}, "c must be 0 or more, got -0.1"),
        ({"c": math.nan}, "c must be 0 or more, got nan"),
        ({"fraction": 0.0}, "fraction must lie between 0 and 1, both excluded, got 0.0"),
        ({"fraction": 1.0}, "fraction must lie between 0 and 1, both excluded, got 1.0"),
        ({"p1": 0.0}, "p1 is a percentile above 0 and at most 100, got 0.0"),
        ({"p1": 100.5}, "at most 100, got 100.5"),
        ({"c": 0.1, "fraction": 0.2}, "give one of them"),
        ({"scope": "batch"}, "no scope 'batch'; there are: token, sequence, tensor"),
        ({"rule": "multiply"}, "no ARM rule 'multiply'; there are: replace, add"),
        ({"preset": "gpt-9"}, "no preset 'gpt-9'.*qwen2.5-math-7b"),
        ({"layers": [4]}, "no layer 4: layers 1 to 3 are there"),
        ({"layers": [0]}, "no layer 0: layers are numbered from 1"),
        ({"layers": [1, 1]}, "named twice for one layer"),
        ({"layers": []}, "at least one layer"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused_before_the_model_is_touched(parameters, says):
    model = answering("llama").model
    with unchecked(), pytest.raises(BadStudy, match=says), arm(model, **parameters):
        pass
    assert untouched(model)


def test_the_pure_function_refuses_what_it_cannot_read():
    a = silu_like(2, 3, 8)
    with unchecked(), pytest.raises(BadStudy, match=r"rows × tokens × units, got torch.float32 of shape \(3, 8\)"):
        redistribute(a[0], c=0.1)
    with unchecked(), pytest.raises(BadStudy, match=r"real must have the shape \(2, 3\), got \(2, 2\)"):
        redistribute(a, c=0.1, real=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(BadStudy, match="settings or their fields, got both: c"):
        redistribute(a, arm_settings(), c=0.1)


def test_variants_say_whose_scope_and_rule():
    released = arm_settings(preset="qwen2.5-math-7b", variant="released")
    assert released == arm_settings(c=0.1, p1=95.0, scope="tensor", rule="replace")
    assert arm_settings(variant="paper") == arm_settings(scope="tensor", rule="add")
    assert arm_settings(variant="row-stable") == arm_settings()
    assert arm_settings(variant="paper", scope="token") == arm_settings(rule="add")
    assert arm_words(released) == "ARM with c 0.1, p1 95, layer 1, scope tensor, the released variant"
    assert arm_words(arm_settings()) == "ARM with c 0.13, p1 99.5, layer 1"
    with pytest.raises(BadStudy, match="no variant 'release' of ARM; there are: row-stable, released, paper"):
        arm_settings(variant="release")


def test_presets_are_table_9_and_may_be_changed():
    assert arm_settings(preset="Qwen/Qwen2.5-Math-7B") == arm_settings(c=0.1, p1=95.0)
    assert arm_settings(preset="gemma-3-4b-it", c=0.2, layers=2) == arm_settings(c=0.2, p1=85.0, layers=[2])


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_mixture_of_experts_is_refused_by_name(family):
    model = answering(family).model
    with pytest.raises(
        UnsupportedArchitecture, match=rf"{type(model).__name__}: layer 1 is a mixture of experts \(mlp.experts\)"
    ):
        attach_arm(model, c=0.13)
    assert untouched(model)


# ---- in a model ------------------------------------------------------------------------------------------------------


def untouched(model: nn.Module) -> bool:
    """No hook and no replaced forward anywhere."""
    return not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in model.modules()
    )


def batch_of(*prompts: tuple[int, ...], left: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids, mask = (
        torch.zeros(len(prompts), longest, dtype=torch.long),
        torch.zeros(len(prompts), longest, dtype=torch.long),
    )
    for row, prompt in enumerate(prompts):
        places = slice(longest - len(prompt), longest) if left else slice(0, len(prompt))
        ids[row, places], mask[row, places] = torch.tensor(prompt), 1
    return ids, mask


def greedy(model: Any, prompts: list[tuple[int, ...]], new: int = 8) -> list[tuple[int, ...]]:
    """By transformers' own generate, padded on the left."""
    ids, mask = batch_of(*prompts, left=True)
    made = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0)
    return [tuple(row) for row in made[:, ids.shape[1] :].tolist()]


def greedy_on_the_right(model: Any, prompts: list[tuple[int, ...]], new: int = 8) -> list[tuple[int, ...]]:
    """Padded on the right, a whole forward for every token."""
    so_far = list(prompts)
    for _ in range(new):
        ids, mask = batch_of(*so_far, left=False)
        logits = model(input_ids=ids, attention_mask=mask).logits
        so_far = [(*row, int(logits[i, len(row) - 1].argmax())) for i, row in enumerate(so_far)]
    return [after[len(before) :] for before, after in zip(prompts, so_far, strict=True)]


@pytest.fixture(scope="module")
def llama():
    return answering("llama", intermediate_size=256).model


IDS = torch.tensor([ids_of(12)])


@torch.inference_mode()
def logits_of(model: Any, ids: Tensor = IDS, **given: Any) -> Tensor:
    return model(input_ids=ids, **given).logits


@torch.inference_mode()
def test_answers_do_not_depend_on_the_batch(llama):
    prompts = [ids_of(4 + (7 * n) % 19, n) for n in range(16)]
    plain = greedy(llama, prompts)
    with arm(llama, c=0.32, p1=99.5, layers=[1, 2], seed=5):
        alone = [greedy(llama, [prompt])[0] for prompt in prompts]
        assert sum(a != b for a, b in zip(alone, plain, strict=True)) > 8
        assert len(set(alone)) > 8
        assert greedy(llama, prompts) == alone
        assert [row for at in range(0, 16, 4) for row in greedy(llama, prompts[at : at + 4])] == alone
        order = random.Random(1).sample(range(16), 16)
        assert greedy(llama, [prompts[n] for n in order]) == [alone[n] for n in order]
        assert greedy_on_the_right(llama, prompts) == alone
        assert greedy_on_the_right(llama, prompts[3:7]) == alone[3:7]
    assert greedy(llama, prompts) == plain


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_prefill_and_decoding_equal_one_whole_forward(family):
    model = answering(family).model
    with arm(model, c=0.32, layers=[1, 2]):
        whole = model(input_ids=IDS).logits
        first = model(input_ids=IDS[:, :7], use_cache=True)
        cache, parts = first.past_key_values, [first.logits]
        for at in range(7, 12):
            step = model(input_ids=IDS[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            parts.append(step.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)
    # What pools tokens cannot have this, so the test can fail.
    with arm(model, c=0.32, layers=[1, 2], scope="sequence"):
        whole, half = model(input_ids=IDS).logits, model(input_ids=IDS[:, :7]).logits
        assert not torch.allclose(half, whole[:, :7], rtol=1e-3, atol=1e-4)


FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text", "gemma2", "phi3", "gpt2", "gpt_neox", "opt"]


def heard_at(model: Any, layer: int, ids: Tensor, mask: Tensor) -> Tensor:
    heard: list[Tensor] = []
    point = activation_points(model, [layer])[0]
    hook = point.act.register_forward_hook(lambda module, args, output: heard.append(output.clone()))
    try:
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask)
    finally:
        hook.remove()
    return heard[0].reshape(*ids.shape, -1)


@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_s_activations_become_what_redistribute_makes_of_them(family, scope):
    model = answering(family).model
    ids, mask = batch_of(ids_of(9, 1), ids_of(5, 2), left=True)
    plain = heard_at(model, 1, ids, mask)
    with arm(model, c=0.2, p1=95.0, scope=scope, seed=3):
        changed = heard_at(model, 1, ids, mask)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = redistribute(plain, c=0.2, p1=95.0, scope=scope, seed=3, real=mask.bool(), positions=positions)
    assert torch.equal(changed, expected)
    assert not torch.equal(changed, plain)
    assert untouched(model)


def test_layers_draw_apart():
    model = answering("llama").model
    mask = torch.ones_like(IDS)
    plain = heard_at(model, 2, IDS, mask)
    with arm(model, fraction=0.25, layers=[2]):
        second = heard_at(model, 2, IDS, mask)
    as_first = redistribute(plain, fraction=0.25)
    assert torch.equal(second != plain, as_first != plain)
    assert not torch.equal(second, as_first)


@pytest.mark.parametrize("early", [True, False])
def test_another_hook_hears_the_redistributed_values_whenever_it_came(llama, early):
    heard: list[Tensor] = []
    act = llama.model.layers[0].mlp.act_fn
    listen = lambda module, args, output: heard.append(output)  # noqa: E731
    plain = heard_at(llama, 1, IDS, torch.ones_like(IDS))
    hook = act.register_forward_hook(listen) if early else None
    with arm(llama, fraction=0.25):
        hook = hook or act.register_forward_hook(listen)
        logits_of(llama)
    hook.remove()
    assert torch.equal(heard[0], redistribute(plain, fraction=0.25))


def test_leaving_by_any_road_gives_the_model_back(llama):
    before = logits_of(llama)
    with arm(llama, c=0.3, layers=[1, 3]):
        assert not torch.equal(logits_of(llama), before)
        assert not untouched(llama)
    assert untouched(llama)
    assert torch.equal(logits_of(llama), before)
    with pytest.raises(KeyError), attached(llama, arm_settings(c=0.3)):
        raise KeyError
    assert untouched(llama)
    handle = attach_arm(llama, c=0.3)
    assert not torch.equal(logits_of(llama), before)
    handle.detach()
    handle.detach()
    assert untouched(llama)
    assert torch.equal(logits_of(llama), before)


def test_a_forward_that_fails_leaves_nothing_behind(llama):
    with arm(llama, c=0.3):
        good = logits_of(llama)
        with pytest.raises(IndexError):
            logits_of(llama, torch.tensor([[1, 2, 9999]]))
        # An MLP by itself, after a forward that broke off: it is not taken for a part of that forward.
        assert llama.model.layers[0].mlp(torch.randn(1, 2, 48)).shape == (1, 2, 48)
        assert torch.equal(logits_of(llama), good)


def test_arm_twice_on_one_layer_is_refused_and_on_two_layers_is_not(llama):
    before = logits_of(llama)
    with arm(llama, c=0.3, layers=[1, 2]):
        once = logits_of(llama)
        with pytest.raises(BadStudy, match=r"ARM is in layer 2 already.*detach\(\)"), arm(llama, c=0.1, layers=[2, 3]):
            pass
        assert torch.equal(logits_of(llama), once)
        with arm(llama, c=0.3, layers=[3]):
            assert not torch.equal(logits_of(llama), once)
        assert torch.equal(logits_of(llama), once)
    assert torch.equal(logits_of(llama), before)
    first, second = attach_arm(llama, c=0.3, layers=[1]), attach_arm(llama, c=0.3, layers=[2])
    first.detach()
    second.detach()
    assert untouched(llama)
    assert torch.equal(logits_of(llama), before)


def test_the_same_seed_gives_the_same_answer_and_another_one_another(llama):
    found = []
    for seed in (1, 1, 2):
        with arm(llama, c=0.3, seed=seed):
            found.append(logits_of(llama))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_rows_may_have_seeds_of_their_own(llama):
    with arm(llama, c=0.3, seed=8):
        expected = logits_of(llama)
    twice = IDS.expand(2, -1)
    with arm(llama, c=0.3) as handle:
        handle.rows(seeds=torch.tensor([7, 8]))
        both = logits_of(llama, twice)
    torch.testing.assert_close(both[1:], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(both[:1], expected, rtol=1e-4, atol=1e-5)


def test_sequence_scope_knows_padding_from_the_mask(llama):
    short, long = ids_of(6, 1), ids_of(11, 2)
    with arm(llama, c=0.3, scope="sequence"):
        alone = logits_of(llama, torch.tensor([short]))
        for left in (True, False):
            ids, mask = batch_of(short, long, left=left)
            both = logits_of(llama, ids, attention_mask=mask)
            torch.testing.assert_close(both[:1][mask[:1].bool()], alone[0], rtol=1e-3, atol=1e-4)
            # The decoder called by itself, its arguments by place and not by name
            inner = llama.model(ids, mask)[0]
            torch.testing.assert_close(llama.lm_head(inner), both, rtol=1e-3, atol=1e-4)


def test_sequence_scope_refuses_a_ready_made_mask(llama):
    whole = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    before = logits_of(llama)
    with (
        arm(llama, c=0.3, scope="sequence"),
        pytest.raises(
            UnsupportedArchitecture, match=r"scope 'sequence' must know which tokens are padding.*2-D attention_mask"
        ),
    ):
        logits_of(llama, attention_mask=whole)
    with arm(llama, c=0.3):
        torch.testing.assert_close(logits_of(llama, attention_mask=whole), logits_of(llama), rtol=1e-4, atol=1e-5)
    assert torch.equal(logits_of(llama), before)


# ---- where people already work ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh(request):
    """A model for itself, with nothing compiled before or after, and without the checks of shapes, which no compiler sees through."""
    torch.compiler.reset()
    with unchecked():
        yield answering("llama", intermediate_size=128, num_hidden_layers=getattr(request, "param", 1)).model
    torch.compiler.reset()


COMPILED = pytest.mark.parametrize(
    ("fresh", "backend"),
    [(1, "eager"), *(pytest.param(2, backend, marks=pytest.mark.slow) for backend in ("eager", "aot_eager"))],
    indirect=["fresh"],
)


@pytest.mark.slow
@COMPILED
def test_a_model_compiled_before_attaching(fresh, backend):
    plain = logits_of(fresh)
    with arm(fresh, c=0.3):
        expected = logits_of(fresh)
    compiled = torch.compile(fresh, backend=backend)
    torch.testing.assert_close(logits_of(compiled), plain)
    with arm(compiled, c=0.3):
        torch.testing.assert_close(logits_of(compiled), expected)
    torch.testing.assert_close(logits_of(compiled), plain)


@COMPILED
def test_a_model_compiled_beneath_before_attaching(fresh, backend):
    plain = logits_of(fresh)
    with arm(fresh, c=0.3):
        expected = logits_of(fresh)
    fresh.model = torch.compile(fresh.model, backend=backend)
    torch.testing.assert_close(logits_of(fresh), plain)
    with arm(fresh, c=0.3):
        torch.testing.assert_close(logits_of(fresh), expected)
    torch.testing.assert_close(logits_of(fresh), plain)


@pytest.mark.slow
def test_a_model_compiled_while_attached(fresh):
    plain = logits_of(fresh)
    with arm(fresh, c=0.3):
        expected = logits_of(fresh)
        compiled = torch.compile(fresh, backend="eager")
        torch.testing.assert_close(logits_of(compiled), expected)
    torch.testing.assert_close(logits_of(compiled), plain)


def test_a_model_compiled_in_place(fresh):
    plain = logits_of(fresh)
    with arm(fresh, c=0.3):
        expected = logits_of(fresh)
    fresh.compile(backend="eager")
    torch.testing.assert_close(logits_of(fresh), plain)
    with arm(fresh, c=0.3):
        torch.testing.assert_close(logits_of(fresh), expected)
    torch.testing.assert_close(logits_of(fresh), plain)


ONE_GRAPH = """
import sys
import torch
from torch._dynamo.testing import CompileCounter
from tiny_answerers import answering, ids_of
from mless.redistribution import arm

model, counter = answering("llama", num_hidden_layers=int(sys.argv[1])).model, CompileCounter()
prompts = [torch.tensor([ids_of(length)]) for length in (5, 6, 11)]
compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
with torch.inference_mode():
    with arm(model, c=0.3):
        expected = [model(input_ids=ids).logits for ids in prompts]
    with arm(compiled, c=0.3):
        for ids, logits in zip(prompts, expected, strict=True):
            torch.testing.assert_close(compiled(input_ids=ids).logits, logits)
print(counter.frame_count)
"""


@pytest.mark.parametrize("layers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_compiled_model_stays_one_graph_for_every_length(layers):
    # In a process of its own: here the classes themselves are checked, and a compiler breaks its graph at that.
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here / 'engines'}"}
    done = subprocess.run(
        [sys.executable, "-c", ONE_GRAPH, layers], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("mode", "in_place"),
    [
        ("reduce-overhead", True),
        ("max-autotune", False),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("reduce-overhead", False), ("max-autotune", True))),
    ],
)
def test_captured_graphs_are_refused(fresh, mode, in_place):
    if in_place:
        fresh.compile(mode=mode)
        compiled = fresh
    else:
        compiled = torch.compile(fresh, mode=mode)
    with pytest.raises(UnsupportedArchitecture, match=r"captured graphs.*attach ARM before compiling"):
        attach_arm(compiled, c=0.3)
    assert untouched(fresh)


@torch.inference_mode()
def test_in_generate_and_in_a_pipeline(llama):
    vocabulary = {f"w{n}": n for n in range(97)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    prompt = ids_of(9)
    text = " ".join(f"w{n}" for n in prompt)
    pipe = pipeline("text-generation", model=llama, tokenizer=tokenizer, device="cpu")

    def said() -> list[str]:
        made = pipe(text, max_new_tokens=8, do_sample=False, return_full_text=False)
        return made[0]["generated_text"].split()

    plain = said()
    with arm(pipe.model, c=0.3, layers=[1, 2]):
        # Id 0 is padding, which a pipeline does not show.
        assert said() == [f"w{n}" for n in greedy(llama, [prompt])[0] if n] != plain
    assert said() == plain


@torch.inference_mode()
def test_in_a_model_with_adapters(fresh):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(fresh, lora).eval()
    plain = logits_of(adapted)
    with arm(adapted, c=0.3):
        with_arm = logits_of(adapted)
        with pytest.raises(BadStudy, match="in layer 1 already"):
            attach_arm(fresh, c=0.3)
    assert torch.equal(logits_of(adapted), plain)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits_of(merged), plain, rtol=1e-3, atol=1e-4)
    with arm(merged, c=0.3):
        torch.testing.assert_close(logits_of(merged), with_arm, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(with_arm, plain, rtol=1e-3, atol=1e-4)


def test_gradients_pass_through(llama):
    model = answering("llama").model
    with arm(model, fraction=0.25):
        model(input_ids=IDS).logits.square().sum().backward()
    gradient = model.model.layers[0].mlp.gate_proj.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0
