"""A decoding step between its matrix products, in few kernels: attention over the filled cache, norms, rotations, gates.

A step of many small kernels mostly waits for kernel launches. Every row has its own programs, in an order that depends on its own length,
without atomics. So its bits are the same alone, beside others and every time.
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# (a jitted function is Triton's language rather than Python's)

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = tl.constexpr(1.4426950408889634)
#: Cache slots per program; a row's parts are joined in order.
_PART = 128


def attends(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> bool:
    """Whether `attention` can be used: one token per row, one mask for all heads, power-of-two sizes, and few query heads per key head."""
    most = 128 if q.dtype == torch.float32 else 256  # of what fits into a small GPU's shared memory

    def power(size: int) -> bool:
        return 16 <= size <= most and size & (size - 1) == 0

    groups = q.shape[1] // keys.shape[1]
    side_by_side = all(one.stride(-1) == 1 for one in (q, keys, values, mask))
    alike = q.dtype == keys.dtype == values.dtype and mask.shape[:3] == (q.shape[0], 1, 1)
    sizes = power(q.shape[-1]) and power(values.shape[-1])
    return q.is_cuda and q.shape[2] == 1 and sizes and groups <= 64 and side_by_side and alike


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which may differ from the tensors'."""

    @functools.wraps(function)
    def on_its_device(first: Tensor, *others: Any) -> Any:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            return function(first, *others)

    return on_its_device


@_guarded
def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, at: Tensor, scale: float) -> Tensor:
    """Attention of one token a row (rows × heads × 1 × dim) to its slots up to its own, `at`; rows × 1 × heads × dim.

    `mask` (rows × 1 × 1 × slots) is added to the scores.
    """
    rows, heads, _, dim = q.shape
    kv_heads, length, width = keys.shape[1], keys.shape[2], values.shape[3]
    parts = triton.cdiv(length, _PART)
    partial = torch.empty(rows, heads, parts, width, device=q.device)
    levels = torch.empty(rows, heads, parts, 2, device=q.device)
    out = torch.empty(rows, 1, heads, width, dtype=q.dtype, device=q.device)
    groups = heads // kv_heads
    _attention_kernel[(rows, kv_heads, parts)](
        q, keys, values, mask, at, partial, levels, float(scale), heads, parts,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        mask.stride(0), at.stride(0),
        GROUPS=groups, PADDED=max(16, triton.next_power_of_2(groups)), DIM=dim, WIDTH=width, PART=_PART, BN=64,
        EXACT=q.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    _join_kernel[(rows, heads)](
        partial, levels, at, out, heads, parts, at.stride(0), WIDTH=width, PART=_PART, num_warps=1
    )
    return out


@_guarded
def store(key_states: Tensor, value_states: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> None:
    """Write one token a row (rows × heads × 1 × dim) to its slot of the cache."""
    key_states, value_states = (one if one.stride(-1) == 1 else one.contiguous() for one in (key_states, value_states))
    rows, heads, _, dim = key_states.shape
    width = value_states.shape[3]
    _store_kernel[(rows, heads)](
        key_states, value_states, keys, values, at, dim, width,
        key_states.stride(0), key_states.stride(1), value_states.stride(0), value_states.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2), at.stride(0),
        BLOCK=triton.next_power_of_2(max(dim, width)), num_warps=1,
    )  # fmt: skip


@_guarded
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps), rounded, times weight."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _norm_kernel[(x.numel() // size,)](
        x, weight, out, size, float(eps), BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
    return out


@_guarded
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of both: x · cos + (−x₂, x₁) · sin, for one token per row (rows × heads × 1 × dim)."""
    rows, heads, _, dim = q.shape
    kv_heads = k.shape[1]
    # As the model leaves them: heads side by side.
    turned_q = torch.empty(rows, 1, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    turned_k = torch.empty(rows, 1, kv_heads, dim, dtype=k.dtype, device=k.device).transpose(1, 2)
    _rotary_kernel[(rows, heads + kv_heads)](
        q, k, cos, sin, turned_q, turned_k, heads, kv_heads, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
        HALF=dim // 2, num_warps=1,
    )  # fmt: skip
    return turned_q, turned_k


@_guarded
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate), rounded, times up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _gated_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024, num_warps=4)
    return out


@_guarded
def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """One vector times three matrices (outputs × inputs) at once; each alone would be too small to keep a GPU's memory busy."""
    size, sizes = x.numel(), [weight.shape[0] for weight in weights]
    out = torch.empty(sum(sizes), dtype=x.dtype, device=x.device)
    rows = 4
    pointers = [
        one
        for weight, bias in zip(weights, biases, strict=True)
        for one in (weight, bias if bias is not None else weight)
    ]
    _products_kernel[(sum(triton.cdiv(n, rows) for n in sizes),)](
        x.contiguous(), *pointers, out, *sizes, size,
        BIASED=tuple(bias is not None for bias in biases), ROWS=rows, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return list(out.split(sizes))


# ---- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _attention_kernel(
    q, keys, values, mask, at, partial, levels, scale, heads, parts,
    q_r, q_h, k_r, k_h, k_t, v_r, v_h, v_t, mask_r, at_r,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    part = tl.program_id(2)
    last = tl.load(at + row * at_r).to(tl.int32)
    begin = part * PART
    if begin <= last:
        group = tl.arange(0, PADDED)
        dims = tl.arange(0, DIM)
        wide = tl.arange(0, WIDTH)
        head = kv * GROUPS + group
        real = group < GROUPS
        asked = tl.load(q + row * q_r + head[:, None] * q_h + dims[None, :], mask=real[:, None], other=0.0)
        keys += row * k_r + kv * k_h
        values += row * v_r + kv * v_h
        mask += row * mask_r
        top = tl.full((PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        out = tl.zeros((PADDED, WIDTH), tl.float32)
        for first in range(begin, tl.minimum(begin + PART, last + 1), BN):
            slot = first + tl.arange(0, BN)
            there = slot <= last
            k = tl.load(keys + slot[:, None] * k_t + dims[None, :], mask=there[:, None], other=0.0)
            if EXACT:
                s = tl.dot(asked, tl.trans(k), input_precision="ieee")
            else:
                s = tl.dot(asked, tl.trans(k))
            s = (s * scale + tl.load(mask + slot, mask=there, other=float("-inf")).to(tl.float32)[None, :]) * _LOG2E
            higher = tl.maximum(top, tl.max(s, axis=1))
            known = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - known[:, None])
            shrink = tl.exp2(top - known)
            total = total * shrink + tl.sum(p, axis=1)
            v = tl.load(values + slot[:, None] * v_t + wide[None, :], mask=there[:, None], other=0.0)
            if EXACT:
                out = out * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
            else:
                out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            top = higher
        base = (row * heads + head) * parts + part
        tl.store(partial + base[:, None] * WIDTH + wide[None, :], out, mask=real[:, None])
        tl.store(levels + base * 2, top, mask=real)
        tl.store(levels + base * 2 + 1, total, mask=real)


@triton.jit
def _join_kernel(partial, levels, at, out, heads, parts, at_r, WIDTH: tl.constexpr, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    last = tl.load(at + row * at_r).to(tl.int32)
    wide = tl.arange(0, WIDTH)
    base = (row * heads + head) * parts
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    found = tl.zeros((WIDTH,), tl.float32)
    for part in range(last // PART + 1):
        level = tl.load(levels + (base + part) * 2)
        higher = tl.maximum(top, level)
        known = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = tl.exp2(top - known), tl.exp2(level - known)
        total = total * old + tl.load(levels + (base + part) * 2 + 1) * new
        found = found * old + tl.load(partial + (base + part) * WIDTH + wide) * new
        top = higher
    tl.store(out + (row * heads + head) * WIDTH + wide, (found / total).to(out.dtype.element_ty))


@triton.jit
def _store_kernel(
    key_states, value_states, keys, values, at, dim, width, ks_r, ks_h, vs_r, vs_h, k_r, k_h, k_t, v_r, v_h, v_t, at_r,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(at + row * at_r)
    i = tl.arange(0, BLOCK)
    k = tl.load(key_states + row * ks_r + head * ks_h + i, mask=i < dim)
    tl.store(keys + row * k_r + head * k_h + slot * k_t + i, k, mask=i < dim)
    v = tl.load(value_states + row * vs_r + head * vs_h + i, mask=i < width)
    tl.store(values + row * v_r + head * v_h + slot * v_t + i, v, mask=i < width)


@triton.jit
def _norm_kernel(x, weight, out, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < size
    value = tl.load(x + row * size + i, mask=there, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / size + eps)
    kind = out.dtype.element_ty
    rounded = (value * scale).to(kind).to(tl.float32)
    tl.store(
        out + row * size + i, (rounded * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)).to(kind), mask=there
    )


@triton.jit
def _rotary_kernel(
    q, k, cos, sin, turned_q, turned_k, heads, kv_heads, q_r, q_h, k_r, k_h, cos_r, sin_r, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    is_q = head < heads
    kv = head - heads
    source = q + row * q_r + head * q_h
    target = turned_q + (row * heads + head) * 2 * HALF
    if not is_q:
        source = k + row * k_r + kv * k_h
        target = turned_k + (row * kv_heads + kv) * 2 * HALF
    kind = turned_q.dtype.element_ty
    first = tl.load(source + i).to(tl.float32)
    second = tl.load(source + HALF + i).to(tl.float32)
    # Round after each product and sum, as the model does.
    for half in tl.static_range(2):
        c = tl.load(cos + row * cos_r + half * HALF + i).to(tl.float32)
        s = tl.load(sin + row * sin_r + half * HALF + i).to(tl.float32)
        own = first if half == 0 else second
        other = -second if half == 0 else first
        one = (own * c).to(kind).to(tl.float32)
        two = (other * s).to(kind).to(tl.float32)
        tl.store(target + half * HALF + i, (one + two).to(kind))


@triton.jit
def _gated_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    kind = out.dtype.element_ty
    g = tl.load(gate + i, mask=there, other=0.0).to(tl.float32)
    act = (g / (1 + tl.exp2(-g * _LOG2E))).to(kind).to(tl.float32)
    tl.store(out + i, (act * tl.load(up + i, mask=there, other=0.0).to(tl.float32)).to(kind), mask=there)


@triton.jit
def _products_kernel(
    x, weight_a, bias_a, weight_b, bias_b, weight_c, bias_c, out, n_a, n_b, n_c, size,
    BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    blocks_a, blocks_b = tl.cdiv(n_a, ROWS), tl.cdiv(n_b, ROWS)
    if index < blocks_a:
        _product(x, weight_a, bias_a, out, index, n_a, size, BIASED[0], ROWS, BLOCK)
    elif index < blocks_a + blocks_b:
        _product(x, weight_b, bias_b, out + n_a, index - blocks_a, n_b, size, BIASED[1], ROWS, BLOCK)
    else:
        _product(x, weight_c, bias_c, out + n_a + n_b, index - blocks_a - blocks_b, n_c, size, BIASED[2], ROWS, BLOCK)


@triton.jit
def _product(x, weight, bias, out, index, n, size, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = index * ROWS + tl.arange(0, ROWS)
    there = row < n
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        w = tl.load(
            weight + row[:, None].to(tl.int64) * size + i[None, :],
            mask=there[:, None] & (i < size)[None, :],
            other=0.0,
        )
        total += w.to(tl.float32) * tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)[None, :]
    value = tl.sum(total, axis=1)
    if BIASED:
        value += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, value.to(out.dtype.element_ty), mask=there)
