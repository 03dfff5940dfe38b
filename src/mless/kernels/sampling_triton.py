"""The next token of every row in one or two kernels: temperature, top-k, top-p, and a draw by the inverse distribution function.

transformers sorts the whole vocabulary for every row. Here a row's program finds the cuts without sorting, two bits of the score at a time.
The same tokens stay: all as high as the k-th, of those the likeliest, and of equal ones at the cut the later ones. For a small k, many
programs first search a part of the vocabulary each for candidates, and the row's program looks only at these. Nothing is shared between
rows, so a row's token does not depend on the others.
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
# (a jitted function is Triton's language rather than Python's)

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634
#: Largest inverse temperature that is still a float: the highest token then has weight 1, all others 0.
_LARGEST_INVERSE = 1e30
#: Scores that a program looks at together.
_BLOCK = 4096
#: Blocks loaded ahead: a program alone on its multiprocessor would otherwise wait for each of them.
_STAGES = 4
#: Tokens of a part, and the most candidates for the k highest that a part may name.
_PART = 8192
_NAMED = 1024
#: By dtype: the bits, without the sign, in which two scores can differ as 32-bit floats, and the number of bit pairs.
_BITS = {torch.bfloat16: (0x7FFF0000, 8), torch.float16: (0x7FFFE000, 10), torch.float32: (0x7FFFFFFF, 16)}


def drawn(logits: Tensor, draws: Tensor, temperature: float, top_k: int, top_p: float, *, close: float) -> Tensor:
    """A token for each row of `logits` (rows × vocabulary), by its number from [0, 1) in `draws` (rows × 1, fp64).

    A sum that is within `close` of the cut of p counts as on it.
    """
    logits = logits if logits.dtype in _BITS else logits.float()
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, size = logits.shape
    flip, pairs = _BITS[logits.dtype]
    bits = {"FLIP": flip, "PAIRS": pairs}
    out = torch.empty(rows, dtype=torch.long, device=logits.device)
    parts = triton.cdiv(size, _PART)
    # Twice as many as needed, because ties with the last are named too.
    named = 2 * triton.next_power_of_2(max(1, top_k))
    in_parts = top_k > 0 and named <= _NAMED and parts * named < size // 2
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        values, places, counts = logits, out, out  # not read, unless there are parts
        if in_parts:
            values = torch.empty(rows, parts * named, dtype=logits.dtype, device=logits.device)
            places = torch.empty(rows, parts * named, dtype=torch.int32, device=logits.device)
            counts = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
            _named_kernel[(rows, parts)](
                logits, values, places, counts, size, logits.stride(0), top_k,
                NAMED=named, PART=_PART, **bits, num_warps=16,
            )  # fmt: skip
        _drawn_kernel[(rows,)](
            logits, values, places, counts, draws.contiguous(), out, size, logits.stride(0),
            min(_LOG2E / temperature, _LARGEST_INVERSE), top_k, 1 - top_p + close, parts,
            IN_PARTS=in_parts, NAMED=named, MANY=triton.next_power_of_2(parts),
            CUT_K=0 < top_k < size, CUT_P=top_p < 1, BLOCK=_BLOCK, STAGES=_STAGES, **bits, num_warps=16,
        )  # fmt: skip
    return out


@triton.jit
def _scores(logits, at, size):
    """Scores of a block of the vocabulary; minus infinity past its end."""
    return tl.load(logits + at, mask=at < size, other=float("-inf")).to(tl.float32) + 0.0  # there is one zero


@triton.jit
def _ordered(x, FLIP: tl.constexpr):
    """Integers that sort like the scores."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & FLIP)


@triton.jit
def _raised(lowest, unit, one, two, three, top_k):
    """The k-th highest with two more bits, from the counts that reach the next three numbers."""
    digit = (tl.sum(one, axis=0) >= top_k).to(tl.int32) + (tl.sum(two, axis=0) >= top_k).to(tl.int32)
    return lowest + unit * (digit + (tl.sum(three, axis=0) >= top_k).to(tl.int32))


@triton.jit(do_not_specialize=["top_k"])
def _named_kernel(
    logits, values, places, counts, size, row_stride, top_k,
    FLIP: tl.constexpr, PAIRS: tl.constexpr, NAMED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """For a part of a row's vocabulary: the scores that reach its own k-th highest, in order, and their places.

    They include all of the k highest that lie in this part. There is room for NAMED of them, filled up with −∞; `counts` shows where that
    was too little.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = _scores(logits + row * row_stride, at, size)
    key = tl.where(at < size, _ordered(x, FLIP), -(1 << 31))
    lowest = tl.full((), -(1 << 31), tl.int32)
    for step in range(PAIRS):
        unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
        one = (key >= lowest + unit).to(tl.int32)
        two = (key >= lowest + 2 * unit).to(tl.int32)
        lowest = _raised(lowest, unit, one, two, (key >= lowest + 3 * unit).to(tl.int32), top_k)
    # What is minus infinity cannot be drawn.
    stays = (key >= lowest) & (x > float("-inf"))
    place = tl.cumsum(stays.to(tl.int32), axis=0) - 1
    count = tl.sum(stays.to(tl.int32), axis=0)
    slot = (row * tl.num_programs(1) + part) * NAMED
    kept = stays & (place < NAMED)
    tl.store(values + slot + place, x, mask=kept)
    tl.store(places + slot + place, at, mask=kept)
    lane = tl.arange(0, NAMED)
    tl.store(values + slot + lane, tl.full((NAMED,), float("-inf"), tl.float32), mask=lane >= count)
    # Where all weights are 0 (all hidden, or NaN) one of these is still taken, so it must be a token.
    tl.store(places + slot + lane, tl.zeros((NAMED,), tl.int32), mask=lane >= count)
    tl.store(counts + row * tl.num_programs(1) + part, count)


@triton.jit
def _shares(x, key, top, lowest, inverse):
    """A token's weight: 1 for the highest, 0 where it is cut off."""
    return tl.where(key >= lowest, tl.exp2((x - top) * inverse), 0.0)


@triton.jit
def _staying(x, top, cut, inverse, gone, equals, CUT_P: tl.constexpr, FLIP: tl.constexpr):
    """Weights of the tokens of a block that stay (at the cut, all but the first ones), and how many were at the cut so far."""
    key = _ordered(x, FLIP)
    share = _shares(x, key, top, cut, inverse)
    if CUT_P:
        met = (key == cut).to(tl.int32)
        share = tl.where((met > 0) & (equals + tl.cumsum(met, axis=0) <= gone), 0.0, share)
        equals += tl.sum(met, axis=0)
    return share, equals


# Over 60 lines: a kernel is one function.
@triton.jit(do_not_specialize=["inverse", "top_k", "rest", "parts"])
def _drawn_kernel(
    logits, values, places, counts, draws, out, size, row_stride, inverse, top_k, rest, parts,
    FLIP: tl.constexpr, PAIRS: tl.constexpr, IN_PARTS: tl.constexpr, NAMED: tl.constexpr, MANY: tl.constexpr,
    CUT_K: tl.constexpr, CUT_P: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    if IN_PARTS:
        # The candidates of the parts, unless a part had too many ties.
        lanes = tl.arange(0, MANY)
        fits = tl.max(tl.load(counts + row * parts + lanes, mask=lanes < parts, other=0), axis=0) <= NAMED
        places += row * parts * NAMED
        logits = tl.where(fits, values + row * parts * NAMED, logits)
        size = tl.where(fits, parts * NAMED, size)
    lane = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        highest = tl.maximum(highest, _scores(logits, first + lane, size))
    top = tl.max(highest, axis=0)

    # The k-th highest: the largest number that k of them reach, two bits at a time.
    lowest = tl.full((), -(1 << 31), tl.int32)
    if CUT_K:
        for step in range(PAIRS):
            unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
            one = tl.zeros((BLOCK,), tl.int32)
            two = tl.zeros((BLOCK,), tl.int32)
            three = tl.zeros((BLOCK,), tl.int32)
            for first in tl.range(0, size, BLOCK, num_stages=STAGES):
                at = first + lane
                key = tl.where(at < size, _ordered(_scores(logits, at, size), FLIP), -(1 << 31))
                one += (key >= lowest + unit).to(tl.int32)
                two += (key >= lowest + 2 * unit).to(tl.int32)
                three += (key >= lowest + 3 * unit).to(tl.int32)
            lowest = _raised(lowest, unit, one, two, three, top_k)

    # Top-p: remove tokens from the lowest up, at most 1 − p of the whole weight. The cut is the largest number with no more weight below
    # it.
    cut = lowest
    gone = tl.full((), 0, tl.int32)
    if CUT_P:
        whole = tl.zeros((BLOCK,), tl.float32)
        for first in tl.range(0, size, BLOCK, num_stages=STAGES):
            x = _scores(logits, first + lane, size)
            whole += _shares(x, _ordered(x, FLIP), top, lowest, inverse)
        budget = tl.sum(whole.to(tl.float64), axis=0) * rest
        cut = tl.full((), -(1 << 31), tl.int32)
        below = tl.full((), 0.0, tl.float64)
        for step in range(PAIRS):
            unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
            first_sum = tl.zeros((BLOCK,), tl.float32)
            second_sum = tl.zeros((BLOCK,), tl.float32)
            third_sum = tl.zeros((BLOCK,), tl.float32)
            for first in tl.range(0, size, BLOCK, num_stages=STAGES):
                x = _scores(logits, first + lane, size)
                key = _ordered(x, FLIP)
                share = _shares(x, key, top, lowest, inverse)
                first_sum += tl.where(key < cut + unit, share, 0.0)
                second_sum += tl.where(key < cut + 2 * unit, share, 0.0)
                third_sum += tl.where(key < cut + 3 * unit, share, 0.0)
            a = tl.sum(first_sum.to(tl.float64), axis=0)
            b = tl.sum(second_sum.to(tl.float64), axis=0)
            c = tl.sum(third_sum.to(tl.float64), axis=0)
            below = tl.where(c <= budget, c, tl.where(b <= budget, b, tl.where(a <= budget, a, below)))
            cut += unit * ((a <= budget).to(tl.int32) + (b <= budget).to(tl.int32) + (c <= budget).to(tl.int32))
        all_below = cut > _ordered(top, FLIP)
        cut = tl.minimum(cut, _ordered(top, FLIP))
        value = (cut ^ ((cut >> 31) & FLIP)).to(tl.float32, bitcast=True)
        each = tl.exp2((value - top) * inverse).to(tl.float64)
        # Of the tokens at the cut the first so many go too; the last always stays, whatever rounding gives.
        equal = tl.zeros((BLOCK,), tl.int32)
        for first in tl.range(0, size, BLOCK, num_stages=STAGES):
            at = first + lane
            equal += ((_ordered(_scores(logits, at, size), FLIP) == cut) & (at < size)).to(tl.int32)
        most = tl.sum(equal, axis=0) - 1
        beyond = tl.where(all_below, most.to(tl.float64), (budget - below) / each)
        gone = tl.minimum(beyond, most.to(tl.float64)).to(tl.int32)

    # What stays, in the vocabulary's order; then the place where the draw falls.
    total = tl.full((), 0.0, tl.float64)
    equals = tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        x = _scores(logits, first + lane, size)
        share, equals = _staying(x, top, cut, inverse, gone, equals, CUT_P, FLIP)
        total += tl.sum(share.to(tl.float64), axis=0)
    target = tl.load(draws + row) * total
    passed = tl.full((), 0.0, tl.float64)
    equals = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        at = first + lane
        x = _scores(logits, at, size)
        share, equals = _staying(x, top, cut, inverse, gone, equals, CUT_P, FLIP)
        upto = passed + tl.cumsum(share.to(tl.float64), axis=0)
        found += tl.sum(((upto <= target) & (at < size)).to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(share > 0, at, 0), axis=0))
        passed += tl.sum(share.to(tl.float64), axis=0)
    # Rounding may leave the target at the very end.
    token = tl.minimum(found, last)
    if IN_PARTS:
        token = tl.where(fits, tl.load(places + token, mask=fits, other=0), token)
    tl.store(out + row, token.to(tl.int64))
