"""The slots themselves: who sees what, where keys go, attention against its definition, and a model left as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_answerers import answering
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mless.engines.slots import (
    Layout,
    SlotCache,
    attend,
    row_by_row_experts,
    rows_are_apart,
    slot_attention,
)
from mless.errors import UnsupportedArchitecture
from mless.models.experts import has_experts


def layout_of(at: list[list[int]], hidden: list[list[int]] | None = None) -> Layout:
    layout = Layout()
    layout.at = torch.tensor(at)
    layout.hidden = torch.tensor(hidden) if hidden is not None else None
    return layout


def causal(_row: Any, _head: Any, query: Any, key: Any) -> Any:
    return key <= query


def window_of(size: int) -> Any:
    def sees(_row: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - size)

    return sees


# ---- what is read ------------------------------------------------------------------------------------------------------


def test_a_row_is_read_as_far_as_its_own_length_says() -> None:
    layout = layout_of([[3], [0], [64], [127], [63], [300], [383], [384], [900]])
    layout.look(960)
    ends = [64, 64, 128, 128, 64, 384, 384, 512, 960]
    assert [end for rows, end in layout.filled for _ in range(rows.start, rows.stop)] == ends
    assert [rows.start for rows, _ in layout.filled] == [0, 2, 4, 5, 7, 8]
    layout = layout_of([[5]] * 20)
    layout.look(40)
    assert layout.filled == [(slice(0, 20), 40)]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_what_is_read_holds_the_row_and_little_more(lasts: list[int]) -> None:
    layout = layout_of([[last] for last in lasts])
    layout.look(10_000)
    ends = [end for rows, end in layout.filled for _ in range(rows.start, rows.stop)]
    assert len(ends) == len(lasts)
    for last, end in zip(lasts, ends, strict=True):
        assert last < end <= max(64, 1.5 * (last + 1) + 64)
        assert end % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3, 7])
def test_rows_of_a_call_are_apart(dtype: torch.dtype, groups: int) -> None:
    assert rows_are_apart(empty_cache(700, dtype), {groups})


def test_rows_that_are_not_apart_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any layer, and for any number of heads that share a key."""
    for kind in (
        lambda q, k: len(k) > 8,
        lambda q, k: len(k) == 7 and k.shape[1] == 5,
        lambda q, k: len(k) == 2 and q.shape[1] == 35,
    ):

        def louder(query: Any, key: Any, value: Any, mask: Any, scale: float, kind: Any = kind) -> Any:
            return attend(query, key, value, mask, scale) * (1 + 1e-6 * kind(query, key))

        with monkeypatch.context() as patch:
            patch.setattr("mless.engines.slots.attend", louder)
            assert not rows_are_apart(empty_cache(700, torch.float32, 3, 5), {1, 7})


def empty_cache(length: int, dtype: torch.dtype, *kv_heads: int) -> SlotCache:
    heads = kv_heads or (3,)
    cache = SlotCache(len(heads), length, Layout())
    for layer, n in zip(cache.slot_layers, heads, strict=True):
        layer.lazy_initialization(*(torch.zeros(2, n, 1, 64, dtype=dtype) for _ in range(2)))
    return cache


# ---- who sees what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_the_mask_is_the_rule_written_out(window: int | None) -> None:
    at, hidden, keys = [[0, 1, 2, 3], [5, 6, 7, 8], [9, 9, 10, 11]], [[0, 0], [2, 6], [10, 12]], 13
    rule = causal if window is None else window_of(window)
    made = layout_of(at, hidden).mask(rule, keys, torch.float32)
    assert made.shape == (3, 1, 4, keys)
    for row, (start, stop) in enumerate(hidden):
        for n, query in enumerate(at[row]):
            for key in range(keys):
                inside = start <= query < stop
                sees = key <= query and (window is None or key > query - window)
                sees = sees and (inside or not start <= key < stop)
                assert made[row, 0, n, key] == (0.0 if sees else -math.inf), (row, query, key)


def test_a_row_that_sees_nothing_is_never_made() -> None:
    for window in (causal, window_of(1)):
        mask = layout_of([[0, 3, 8]], [[3, 8]]).mask(window, 16, torch.bfloat16)
        assert mask.dtype == torch.bfloat16
        assert torch.isfinite(mask).any(-1).all()


# ---- where keys go -----------------------------------------------------------------------------------------------------


def filled(layers: int = 2, rows: int = 3, length: int = 8) -> tuple[SlotCache, Layout]:
    layout = layout_of([[0]] * rows)
    cache = SlotCache(layers, length, layout)
    assert not cache.ready
    for layer in range(layers):
        cache.update(torch.zeros(rows, 2, 1, 4), torch.zeros(rows, 2, 1, 3), layer)
    assert cache.ready
    return cache, layout


def test_each_row_writes_at_its_own_place_and_nowhere_else() -> None:
    cache, layout = filled()
    layout.at = torch.tensor([[4, 5], [0, 1], [7, 6]])
    keys, values = torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2, 3)
    seen_keys, seen_values = cache.update(keys, values, 1)
    for row, places in enumerate(layout.at.tolist()):
        for n, place in enumerate(places):
            assert torch.equal(seen_keys[row, :, place], keys[row, :, n])
            assert torch.equal(seen_values[row, :, place], values[row, :, n])
        others = [place for place in range(8) if place not in places]
        assert not seen_keys[row, :, others].any()
    assert not cache.slot_layers[0].pair[0].any()


def test_rows_are_read_written_taken_over_and_cleared_one_by_one() -> None:
    cache, _ = filled()
    other = SlotCache(2, 6, Layout()).shaped_like(cache, 2)
    assert [tuple(keys.shape) for keys, _ in (layer.pair for layer in other.slot_layers)] == [(2, 2, 6, 4)] * 2
    beginning = [(torch.randn(2, 3, 4), torch.randn(2, 3, 3)) for _ in range(2)]
    other.write(1, beginning)
    for (keys, values), (k, v) in zip(other.read(1, 3), beginning, strict=True):
        assert torch.equal(keys, k)
        assert torch.equal(values, v)
    cache.take_over(2, other, 1, 5)
    for (keys, values), (k, v) in zip(cache.read(2, 8), beginning, strict=True):
        assert torch.equal(keys[:, :3], k)
        assert torch.equal(values[:, :3], v)
        assert not keys[:, 3:].any()
    assert not any(keys.any() or values.any() for row in (0, 1) for keys, values in cache.read(row, 8))
    cache.slot_layers[0].pair[1][2, 0, 7] = math.nan
    cache.clear([2])
    assert not any(keys.any() or values.any() for keys, values in cache.read(2, 8))


def test_what_is_read_is_a_copy() -> None:
    cache, _ = filled()
    kept = cache.read(0, 8)
    cache.slot_layers[0].pair[0][0] = 1.0
    assert not kept[0][0].any()


# ---- attention ---------------------------------------------------------------------------------------------------------


def by_definition(q: Any, k: Any, v: Any, mask: Any, scale: float, softcap: Any, sinks: Any) -> torch.Tensor:
    """Head by head, row by row, in double precision."""
    rows, heads, tokens, _ = q.shape
    out = torch.zeros(rows, tokens, heads, v.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            own = head // (heads // k.shape[1])
            scores = q[row, head].double() @ k[row, own].double().T * scale
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            weight = (scores + mask[row, 0].double()).exp()
            total = weight.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].double().exp())
            out[row, :, head] = weight / total @ v[row, own].double()
    return out


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "capped"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "dims"),
    [(4, 4, 1, (8, 8)), (6, 2, 1, (8, 8)), (6, 2, 5, (8, 8)), (4, 1, 3, (12, 8)), (2, 2, 33, (16, 16))],
    ids=["H4-T1", "H6-KV2-T1", "H6-KV2-T5", "H4-KV1-T3-V8", "H2-T33"],
)
def test_attention_is_its_definition(heads, kv_heads, tokens, dims, with_sinks, softcap) -> None:
    torch.manual_seed(0)
    rows, keys = 3, 40
    q = torch.randn(rows, heads, tokens, dims[0])
    k, v = torch.randn(rows, kv_heads, keys, dims[0]), torch.randn(rows, kv_heads, keys, dims[1])
    at = torch.stack([torch.arange(tokens) + start for start in (0, 2, 6)])
    layout = layout_of(at.tolist(), [[0, 0], [1, 3], [2, 4]])
    mask = layout.mask(window_of(9), keys, torch.float32)
    sinks = torch.randn(heads) if with_sinks else None
    made = attend(q, k, v, mask, 0.3, softcap, sinks)
    torch.testing.assert_close(made.double(), by_definition(q, k, v, mask, 0.3, softcap, sinks), atol=1e-5, rtol=1e-5)


# ---- a model left as it was --------------------------------------------------------------------------------------------


def state(model: nn.Module) -> tuple[Any, ...]:
    return (
        [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        [m.config._experts_implementation for m in model.modules() if hasattr(m, "config")],
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
    )


def test_inside_it_is_ours_and_afterwards_as_before_even_after_a_fault() -> None:
    model = answering("llama").model
    before = state(model)
    with slot_attention(model, Layout()):
        name = model.config._attn_implementation
        assert name in AttentionInterface._global_mapping
        assert name in AttentionMaskInterface._global_mapping  # without it causality would be lost silently
        with slot_attention(model, Layout()):
            assert model.config._attn_implementation != name
        assert model.config._attn_implementation == name
    assert state(model) == before
    with pytest.raises(KeyError), slot_attention(model, Layout()):
        raise KeyError
    assert state(model) == before


def test_experts_are_asked_row_by_row_inside_and_as_before_afterwards() -> None:
    model, plain = answering("qwen3_moe").model, answering("llama").model
    assert has_experts(model)
    assert not has_experts(plain)
    before = state(model), state(plain)
    with row_by_row_experts(model), row_by_row_experts(plain):
        assert model.config._experts_implementation == "batched_mm"
        assert state(plain) == before[1]
    with pytest.raises(KeyError), row_by_row_experts(model):
        raise KeyError
    assert (state(model), state(plain)) == before


def test_attention_with_something_unknown_is_refused_by_name() -> None:
    model = answering("llama").model
    with slot_attention(model, Layout()):
        call: Any = AttentionInterface._global_mapping[model.config._attn_implementation]
    q = k = v = torch.randn(1, 2, 1, 8)
    mask = torch.zeros(1, 1, 1, 1)
    quiet = {"sliding_window": 4, "is_causal": True, "position_bias": None, "output_router_logits": False}
    out, weights = call(model, q, k, v, mask, dropout=0.0, **quiet)
    assert (out.shape, weights) == ((1, 1, 2, 8), None)
    with pytest.raises(
        UnsupportedArchitecture, match=r"LlamaForCausalLM passes 'position_bias' to its attention.*--engine vllm"
    ):
        call(model, q, k, v, mask, position_bias=torch.ones(1))
