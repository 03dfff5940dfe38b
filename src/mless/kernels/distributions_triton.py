"""Next-token distributions in one kernel: a program reads its row three times (highest, sum, entropy and distance) and writes four numbers."""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
# (a jitted function is Triton's language rather than Python's)

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Logits that a program looks at together, and blocks that are loaded ahead.
_BLOCK = 4096
_STAGES = 3
#: Triton would compile a kernel once in each thread that asks for it at the same time.
_COMPILING = threading.Lock()


def described(ours: Tensor, theirs: Tensor | None) -> Tensor:
    """4 × rows, fp32: log of the sum of e^logit, entropy, distance from `theirs` (rows × vocabulary), same likeliest token."""
    ours = ours if ours.stride(-1) == 1 else ours.contiguous()
    rows, size = ours.shape
    out = torch.full((4, rows), torch.nan, dtype=torch.float32, device=ours.device)
    beside = ours if theirs is None else theirs if theirs.stride(-1) == 1 else theirs.contiguous()
    assert beside.shape == ours.shape, (beside.shape, ours.shape)
    with _COMPILING, torch.cuda.device(ours.device) if ours.is_cuda else nullcontext():
        _described_kernel[(rows,)](
            ours, beside, out, size, ours.stride(0), beside.stride(0), rows,
            COMPARED=theirs is not None, BLOCK=_BLOCK, STAGES=_STAGES, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _logits(row, at, size):
    """Logits of a block of the vocabulary; minus infinity past its end."""
    return tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _highest(row, size, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The highest logit and its place; of equals the first."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        x = _logits(row, start + lane, size)
        place = tl.where(x > best, start + lane, place)
        best = tl.where(x > best, x, best)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, place, 2147483647), axis=0)


@triton.jit
def _log_sum(row, top, size, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """log Σ e^(logit − top)."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        total += tl.exp(_logits(row, start + lane, size) - top)
    return tl.log(tl.sum(total, axis=0))


@triton.jit
def _described_kernel(
    ours, theirs, out, size, our_stride, their_stride, rows,
    COMPARED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    mine, other = ours + number * our_stride, theirs + number * their_stride
    top, place = _highest(mine, size, BLOCK, STAGES)
    rest = _log_sum(mine, top, size, BLOCK, STAGES)
    if COMPARED:
        their_top, their_place = _highest(other, size, BLOCK, STAGES)
        their_rest = _log_sum(other, their_top, size, BLOCK, STAGES)
    lane = tl.arange(0, BLOCK)
    entropy = tl.zeros((BLOCK,), tl.float32)
    kl = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        # The highest first: of equal logits both differences are then the same to the last bit.
        log_p = (_logits(mine, start + lane, size) - top) - rest
        p = tl.exp(log_p)
        entropy -= tl.where(p == 0, 0.0, p * log_p)  # 0 · ∞ is no number
        if COMPARED:
            their_log_p = (_logits(other, start + lane, size) - their_top) - their_rest
            q = tl.exp(their_log_p)
            kl += tl.where(q == 0, 0.0, q * (their_log_p - log_p))
    tl.store(out + number, top + rest)
    tl.store(out + rows + number, tl.sum(entropy, axis=0))
    if COMPARED:
        tl.store(out + 2 * rows + number, tl.sum(kl, axis=0))
        tl.store(out + 3 * rows + number, (place == their_place).to(tl.float32))
