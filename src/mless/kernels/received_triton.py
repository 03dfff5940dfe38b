"""Received attention in Triton, for every mask that is made of intervals, every head size and every score transformation.

One program is a block of keys of one head. It goes through the later queries, computes their scores again, and sums exp(score − lse). No T
× T matrix, no atomics: one program adds a key's sum in the order of queries, so its bits depend on its own row only. Where scores are only
scaled and no key is hidden, `received_hopper` does the same with the GPU's own instructions.
"""

# pyright: basic, reportCallIssue=false
# (a jitted function is Triton's language rather than Python's)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mless.kernels.signature import Intervals, Sums

_LOG2E = 1.4426950408889634
_C_LOG2E = tl.constexpr(_LOG2E)
#: Lengths are not specialised for multiples of 16: the values would be spread over threads differently and added in another order.
_LENGTHS = ["HEADS", "QUERIES", "KEYS"]
#: Keys that one program adds up for the mass, and how many of them together.
_STRETCH, _TOGETHER = 4096, 512


def received(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    visible: Intervals,
    sets: Tensor,
    spans: Tensor,
    n_spans: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    lse: Tensor | None = None,
    quick: bool = False,
) -> Sums:
    asked = visible.asked(sets)
    # Expanded from one, or just one: it is summed once.
    single = sets.shape[1] == 1 or sets.stride(1) == 0
    members = sets[:, :1] if single else sets
    q, k = _readable(q), _readable(k)
    score = _Score(q, k, scale, softcap, bias)
    with torch.cuda.device(q.device) if q.is_cuda else _NoDevice():
        if lse is None:
            lse = _lse(q, k, score, visible, sinks)
        lse = lse.float().contiguous()
        if quick:
            from mless.kernels import received_hopper

            sums, own = received_hopper.sums(q, k, scale, members, asked.end, lse)
        else:
            sums, own = _sums(q, k, score, visible, members, lse)
        mass = _mass(sums, own, lse, members, asked.size, spans, n_spans, sinks)
    return Sums(sums.expand(-1, sets.shape[1], -1, -1) if single else sums, asked.counts, mass)


class _NoDevice:
    """Without a GPU (Triton's interpreter) there is no device to choose."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Score:
    """How a score is made from a query and a key, as arguments of the kernels."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None) -> None:
        dim = q.shape[-1]
        first = 1 << (dim.bit_length() - 1)
        rest = dim - first
        if bias is not None:
            bias = bias.expand(q.shape[0], q.shape[1], *bias.shape[2:])
        self.pointers = (q, k, bias)
        self.strides = (*q.stride()[:3], *k.stride()[:3], *(bias.stride() if bias is not None else (0, 0, 0, 0)))
        self.numbers = (
            float(scale),
            float(softcap or 0.0),
            q.shape[1],
            q.shape[1] // k.shape[1],
            q.shape[2],
            k.shape[2],
        )
        # A dimension that is no power of two is taken in two parts; a dot product needs 16 at least.
        self.constants: dict[str, Any] = {
            "DIM": dim,
            "FIRST": max(16, first),
            "REST": max(16, 1 << (rest - 1).bit_length()) if rest else 0,
            "CAP": softcap is not None,
            "BIAS": bias is not None,
            "EXACT": q.dtype == torch.float32,
        }
        wide = q.dtype == torch.float32 or dim > 128
        self.block = 32 if wide else 64
        self.options = {"num_warps": 4, "num_stages": 1 if wide else 2}


def _sums(
    q: Tensor, k: Tensor, score: _Score, visible: Intervals, members: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The sums of each set, and each key's own share of its own attention in the last."""
    batch, heads, _, _ = q.shape
    keys, n_sets = k.shape[2], members.shape[1]
    sums = torch.empty(batch, n_sets, heads, keys, device=q.device)
    own = torch.empty(batch, heads, keys, device=q.device)
    weights = members.contiguous().view(torch.int8)
    grid = (triton.cdiv(keys, score.block), batch * heads)
    _sums_kernel[grid](
        *score.pointers, lse, weights, visible.starts, visible.ends, sums, own, *score.strides, *score.numbers,
        SETS=n_sets, BM=score.block, BN=score.block, **score.constants, **score.options,
    )  # fmt: skip
    return sums, own


def _lse(q: Tensor, k: Tensor, score: _Score, visible: Intervals, sinks: Tensor | None) -> Tensor:
    batch, heads, queries, _ = q.shape
    lse = torch.empty(batch, heads, queries, device=q.device)
    grid = (triton.cdiv(queries, score.block), batch * heads)
    _lse_kernel[grid](
        *score.pointers, lse, visible.starts, sinks.float().contiguous() if sinks is not None else None, *score.strides, *score.numbers,
        BM=score.block, BN=score.block, **score.constants, **score.options,
    )  # fmt: skip
    return lse


def _mass(
    sums: Tensor,
    own: Tensor,
    lse: Tensor,
    members: Tensor,
    size: Tensor,
    spans: Tensor,
    n_spans: int,
    sinks: Tensor | None,
) -> Tensor:
    """Where the last set's attention goes: what each span's keys received, their own shares included.

    In separate kernels, because PyTorch's reductions add in another order for another batch. First stretches of keys, then their sums, one
    after the other.
    """
    batch, n_sets, heads, keys = sums.shape
    stretches, width = -(-keys // _STRETCH), 1 << n_spans.bit_length()
    parts = torch.empty(batch * heads, stretches, width, device=sums.device)
    mass = torch.empty(batch, heads, n_spans + 1, device=sums.device)
    _parts_kernel[(batch * heads, stretches)](
        sums, own, lse, members.contiguous().view(torch.int8), spans.contiguous(), sinks.float().contiguous() if sinks is not None else None,
        parts, heads, keys, lse.shape[2], SETS=n_sets, SPANS=n_spans, STRETCH=_STRETCH, BLOCK=_TOGETHER, WIDTH=width, num_warps=4,
    )  # fmt: skip
    _mass_kernel[(batch * heads,)](parts, size, mass, heads, stretches, SPANS=n_spans, WIDTH=width, num_warps=1)
    return mass


# ---- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _part(base, rows, stride, there, begin, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """WIDTH columns from `begin` of some rows, zero beyond the last."""
    columns = begin + tl.arange(0, WIDTH)
    mask = there[:, None] & (columns < DIM)[None, :]
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _tanh(x):
    """tanh, right to a few parts in 10⁷: near zero by a series, where the quotient of exponentials would lose digits."""
    size = tl.abs(x)
    e = tl.exp2(size * (-2 * _C_LOG2E))
    far = (1 - e) / (1 + e)
    y = x * x
    near = size * (1 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885))))
    found = tl.where(size < 0.25, near, far)
    return tl.where(x < 0, -found, found)


@triton.jit
def _scores(
    q0, q1, k0, k1, bias, rows, keys, here, there, bias_q, bias_k, scale, softcap,
    REST: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Scores of a block of queries and a block of keys, times log2(e)."""
    if EXACT:
        s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if REST > 0:
            s += tl.dot(q1, tl.trans(k1), input_precision="ieee")
    else:
        s = tl.dot(q0, tl.trans(k0))
        if REST > 0:
            s = tl.dot(q1, tl.trans(k1), s)
    if CAP:
        s = _tanh(s * (scale / softcap)) * softcap
    else:
        if not BIAS:
            return s * (scale * _C_LOG2E)
        s = s * scale
    if BIAS:
        at = bias + rows[:, None].to(tl.int64) * bias_q + keys[None, :].to(tl.int64) * bias_k
        s += tl.load(at, mask=here[:, None] & there[None, :], other=0.0).to(tl.float32)
    return s * _C_LOG2E


@triton.jit(do_not_specialize=_LENGTHS)
def _sums_kernel(
    q, k, bias, lse, weights, starts, ends, sums, own,
    q_b, q_h, q_t, k_b, k_h, k_t, bias_b, bias_h, bias_q, bias_k, scale, softcap, HEADS, GROUPS, QUERIES, KEYS,
    SETS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    CAP: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    b, h = pair // HEADS, pair % HEADS
    keys = tl.program_id(0) * BN + tl.arange(0, BN)
    there = keys < KEYS
    k += b * k_b + (h // GROUPS) * k_h
    k0 = _part(k, keys, k_t, there, 0, FIRST, DIM)
    k1 = k0
    if REST > 0:
        k1 = _part(k, keys, k_t, there, FIRST, REST, DIM)
    q += b * q_b + h * q_h
    if BIAS:
        bias += b * bias_b + h * bias_h
    lse += pair * QUERIES
    starts += b * QUERIES
    weights += b * SETS * QUERIES
    offset = KEYS - QUERIES
    received = tl.zeros((BN,), tl.float32)
    second = tl.zeros((BN,), tl.float32)
    diagonal = tl.zeros((BN,), tl.float32)
    # From the query that is the first key itself to the last that sees the last key.
    begin = tl.maximum(tl.program_id(0) * BN - offset, 0)
    last = tl.minimum(tl.program_id(0) * BN + BN, KEYS) - 1
    end = tl.load(ends + b * KEYS + last)
    for at in range(begin, end, BM):
        rows = at + tl.arange(0, BM)
        here = rows < QUERIES
        q0 = _part(q, rows, q_t, here, 0, FIRST, DIM)
        q1 = q0
        if REST > 0:
            q1 = _part(q, rows, q_t, here, FIRST, REST, DIM)
        s = _scores(
            q0, q1, k0, k1, bias, rows, keys, here, there, bias_q, bias_k, scale, softcap, REST, CAP, BIAS, EXACT
        )
        start = tl.load(starts + rows, mask=here, other=0)
        weight = tl.load(weights + rows, mask=here, other=0) != 0
        level = tl.load(lse + rows, mask=here, other=0.0) * _C_LOG2E
        place = rows + offset
        seen = (keys[None, :] >= start[:, None]) & weight[:, None]
        p = tl.where(seen & (keys[None, :] <= place[:, None]), tl.exp2(s - level[:, None]), 0.0)
        later = tl.where(keys[None, :] < place[:, None], p, 0.0)
        received += tl.sum(later, axis=0)
        self = p - later
        if SETS == 2:
            weight2 = tl.load(weights + QUERIES + rows, mask=here, other=0) != 0
            second += tl.sum(tl.where(weight2[:, None], later, 0.0), axis=0)
            self = tl.where(weight2[:, None], self, 0.0)
        diagonal += tl.sum(self, axis=0)
    sums += (b * SETS * HEADS + h) * KEYS
    tl.store(sums + keys, received, mask=there)
    if SETS == 2:
        tl.store(sums + HEADS.to(tl.int64) * KEYS + keys, second, mask=there)
    tl.store(own + pair * KEYS + keys, diagonal, mask=there)


@triton.jit(do_not_specialize=_LENGTHS)
def _lse_kernel(
    q, k, bias, lse, starts, sinks,
    q_b, q_h, q_t, k_b, k_h, k_t, bias_b, bias_h, bias_q, bias_k, scale, softcap, HEADS, GROUPS, QUERIES, KEYS,
    BM: tl.constexpr, BN: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    CAP: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    b, h = pair // HEADS, pair % HEADS
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    here = rows < QUERIES
    q += b * q_b + h * q_h
    k += b * k_b + (h // GROUPS) * k_h
    if BIAS:
        bias += b * bias_b + h * bias_h
    q0 = _part(q, rows, q_t, here, 0, FIRST, DIM)
    q1 = q0
    if REST > 0:
        q1 = _part(q, rows, q_t, here, FIRST, REST, DIM)
    offset = KEYS - QUERIES
    start = tl.load(starts + b * QUERIES + rows, mask=here, other=KEYS)
    place = rows + offset
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if sinks is not None:
        # The learned sink takes part in the softmax like one more key.
        top = tl.zeros((BM,), tl.float32) + tl.load(sinks + h) * _C_LOG2E
        total = tl.full((BM,), 1.0, tl.float32)
    begin = tl.min(start, axis=0) // BN * BN
    for at in range(begin, tl.minimum(tl.program_id(0) * BM + BM + offset, KEYS), BN):
        keys = at + tl.arange(0, BN)
        there = keys < KEYS
        k0 = _part(k, keys, k_t, there, 0, FIRST, DIM)
        k1 = k0
        if REST > 0:
            k1 = _part(k, keys, k_t, there, FIRST, REST, DIM)
        s = _scores(
            q0, q1, k0, k1, bias, rows, keys, here, there, bias_q, bias_k, scale, softcap, REST, CAP, BIAS, EXACT
        )
        seen = (keys[None, :] >= start[:, None]) & (keys[None, :] <= place[:, None])
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        # A row that has seen nothing yet: −∞ − (−∞) would be NaN.
        known = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - known) + tl.sum(tl.exp2(s - known[:, None]), axis=1)
        top = higher
    tl.store(lse + pair * QUERIES + rows, (top + tl.log2(total)) / _C_LOG2E, mask=here)


@triton.jit(do_not_specialize=_LENGTHS)
def _parts_kernel(
    sums, own, lse, weights, spans, sinks, parts, HEADS, KEYS, QUERIES,
    SETS: tl.constexpr, SPANS: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """By span what a stretch of keys got, and what the queries at the same places gave to the sink."""
    pair = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * STRETCH
    b, h = pair // HEADS, pair % HEADS
    sums += ((b * SETS + SETS - 1) * HEADS + h) * KEYS
    own += pair * KEYS
    spans += b * KEYS
    weights += (b * SETS + SETS - 1) * QUERIES
    lse += pair * QUERIES
    column = tl.arange(0, WIDTH)
    # Places apart until the end: threads meet once.
    found = tl.zeros((WIDTH, BLOCK), tl.float32)
    for at in tl.static_range(0, STRETCH, BLOCK):
        places = begin + at + tl.arange(0, BLOCK)
        there = places < KEYS
        got = tl.load(sums + places, mask=there, other=0.0) + tl.load(own + places, mask=there, other=0.0)
        span = tl.load(spans + places, mask=there, other=-1)
        found += tl.where(span[None, :] == column[:, None], got[None, :], 0.0)
        if sinks is not None:
            here = places < QUERIES
            weight = tl.load(weights + places, mask=here, other=0) != 0
            level = tl.load(lse + places, mask=here, other=0.0)
            share = tl.where(weight, tl.exp2((tl.load(sinks + h) - level) * _C_LOG2E), 0.0)
            found += tl.where(column[:, None] == SPANS, share[None, :], 0.0)
    tl.store(parts + (pair * tl.num_programs(1) + tl.program_id(1)) * WIDTH + column, tl.sum(found, axis=1))


@triton.jit(do_not_specialize=["HEADS", "STRETCHES"])
def _mass_kernel(parts, size, mass, HEADS, STRETCHES, SPANS: tl.constexpr, WIDTH: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    found = tl.zeros((WIDTH,), tl.float32)
    for at in range(STRETCHES):
        found += tl.load(parts + (pair * STRETCHES + at) * WIDTH + column)
    members = tl.maximum(tl.load(size + pair // HEADS), 1).to(tl.float32)
    tl.store(mass + pair * (SPANS + 1) + column, found / members, mask=column <= SPANS)
