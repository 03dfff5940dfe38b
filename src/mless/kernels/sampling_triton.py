"""The next token of every row in one kernel: temperature, the k highest, the likeliest p, and a draw by the inverse of the distribution.

transformers' warpers sort the whole vocabulary for every row; here a row's program finds where the cuts lie, two bits of the score a
time, and never sorts. Which tokens stay is theirs: all that are as high as the k-th, and of those the likeliest, of equals at the cut the
later ones. Every row has a program of its own, so its token does not depend on the others.
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

from mless.kernels.sampling import CLOSE

_LOG2E = 1.4426950408889634
#: A temperature's inverse that is still a float: the highest token weighs 1 then, and all others nothing.
_WARMEST = 1e30
#: Scores that a program looks at together.
_BLOCK = 4096
#: Blocks that are on their way at a time: a program alone on its multiprocessor would else wait for every one of them.
_STAGES = 4


def drawn(logits: Tensor, draws: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """A token for each row of `logits` (rows × vocabulary), by its number from [0, 1) in `draws` (rows × 1, fp64)."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.long, device=logits.device)
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        _drawn_kernel[(rows,)](
            logits, draws.contiguous(), out, size, logits.stride(0), min(_LOG2E / temperature, _WARMEST), top_k,
            1 - top_p + CLOSE,
            CUT_K=0 < top_k < size, CUT_P=top_p < 1, BLOCK=_BLOCK, STAGES=_STAGES, num_warps=16,
        )  # fmt: skip
    return out


@triton.jit
def _scores(logits, at, size):
    """Scores of a block of the vocabulary; minus infinity past its end."""
    return tl.load(logits + at, mask=at < size, other=float("-inf")).to(tl.float32) + 0.0  # there is one zero


@triton.jit
def _ordered(x):
    """Whole numbers in the order of the scores."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _shares(x, key, top, lowest, warmth):
    """What a token weighs, the highest 1; nothing where it is cut off."""
    return tl.where(key >= lowest, tl.exp2((x - top) * warmth), 0.0)


@triton.jit
def _staying(x, top, cut, warmth, gone, equals, CUT_P: tl.constexpr):
    """What the tokens of a block weigh that stay, of those at the cut all but the first ones; and how many stood there up to now."""
    key = _ordered(x)
    share = _shares(x, key, top, cut, warmth)
    if CUT_P:
        met = (key == cut).to(tl.int32)
        share = tl.where((met > 0) & (equals + tl.cumsum(met, axis=0) <= gone), 0.0, share)
        equals += tl.sum(met, axis=0)
    return share, equals


@triton.jit(do_not_specialize=["warmth", "top_k", "rest"])
def _drawn_kernel(
    logits, draws, out, size, row_stride, warmth, top_k, rest,
    CUT_K: tl.constexpr, CUT_P: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lane = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        highest = tl.maximum(highest, _scores(logits, first + lane, size))
    top = tl.max(highest, axis=0)

    # The k-th highest: the largest number that k of them reach, two bits at a time.
    lowest = tl.full((), -(1 << 31), tl.int32)
    if CUT_K:
        for step in range(16):
            unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
            one = tl.zeros((BLOCK,), tl.int32)
            two = tl.zeros((BLOCK,), tl.int32)
            three = tl.zeros((BLOCK,), tl.int32)
            for first in tl.range(0, size, BLOCK, num_stages=STAGES):
                at = first + lane
                key = tl.where(at < size, _ordered(_scores(logits, at, size)), -(1 << 31))
                one += (key >= lowest + unit).to(tl.int32)
                two += (key >= lowest + 2 * unit).to(tl.int32)
                three += (key >= lowest + 3 * unit).to(tl.int32)
            digit = (tl.sum(one, axis=0) >= top_k).to(tl.int32) + (tl.sum(two, axis=0) >= top_k).to(tl.int32)
            lowest += unit * (digit + (tl.sum(three, axis=0) >= top_k).to(tl.int32))

    # The likeliest p: what weighs no more than the rest goes, from the lowest on. The cut is the largest number below which there is no more.
    cut = lowest
    gone = tl.full((), 0, tl.int32)
    if CUT_P:
        whole = tl.zeros((BLOCK,), tl.float32)
        for first in tl.range(0, size, BLOCK, num_stages=STAGES):
            x = _scores(logits, first + lane, size)
            whole += _shares(x, _ordered(x), top, lowest, warmth)
        budget = tl.sum(whole.to(tl.float64), axis=0) * rest
        cut = tl.full((), -(1 << 31), tl.int32)
        below = tl.full((), 0.0, tl.float64)
        for step in range(16):
            unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
            first_sum = tl.zeros((BLOCK,), tl.float32)
            second_sum = tl.zeros((BLOCK,), tl.float32)
            third_sum = tl.zeros((BLOCK,), tl.float32)
            for first in tl.range(0, size, BLOCK, num_stages=STAGES):
                x = _scores(logits, first + lane, size)
                key = _ordered(x)
                share = _shares(x, key, top, lowest, warmth)
                first_sum += tl.where(key < cut + unit, share, 0.0)
                second_sum += tl.where(key < cut + 2 * unit, share, 0.0)
                third_sum += tl.where(key < cut + 3 * unit, share, 0.0)
            a = tl.sum(first_sum.to(tl.float64), axis=0)
            b = tl.sum(second_sum.to(tl.float64), axis=0)
            c = tl.sum(third_sum.to(tl.float64), axis=0)
            below = tl.where(c <= budget, c, tl.where(b <= budget, b, tl.where(a <= budget, a, below)))
            cut += unit * ((a <= budget).to(tl.int32) + (b <= budget).to(tl.int32) + (c <= budget).to(tl.int32))
        all_below = cut > _ordered(top)
        cut = tl.minimum(cut, _ordered(top))
        value = (cut ^ ((cut >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        each = tl.exp2((value - top) * warmth).to(tl.float64)
        # Of those that stand at the cut so many go, too, the first ones; the last of them stays, whatever rounding says.
        equal = tl.zeros((BLOCK,), tl.int32)
        for first in tl.range(0, size, BLOCK, num_stages=STAGES):
            at = first + lane
            equal += ((_ordered(_scores(logits, at, size)) == cut) & (at < size)).to(tl.int32)
        most = tl.sum(equal, axis=0) - 1
        beyond = tl.where(all_below, most.to(tl.float64), (budget - below) / each)
        gone = tl.minimum(beyond, most.to(tl.float64)).to(tl.int32)

    # What stays, in the vocabulary's order; then the place where the draw falls.
    total = tl.full((), 0.0, tl.float64)
    equals = tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        x = _scores(logits, first + lane, size)
        share, equals = _staying(x, top, cut, warmth, gone, equals, CUT_P)
        total += tl.sum(share.to(tl.float64), axis=0)
    target = tl.load(draws + row) * total
    passed = tl.full((), 0.0, tl.float64)
    equals = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        at = first + lane
        x = _scores(logits, at, size)
        share, equals = _staying(x, top, cut, warmth, gone, equals, CUT_P)
        upto = passed + tl.cumsum(share.to(tl.float64), axis=0)
        found += tl.sum(((upto <= target) & (at < size)).to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(share > 0, at, 0), axis=0))
        passed += tl.sum(share.to(tl.float64), axis=0)
    # Rounding may leave the target at the very end.
    tl.store(out + row, tl.minimum(found, last).to(tl.int64))
