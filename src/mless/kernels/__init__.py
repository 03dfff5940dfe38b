"""Sums of received attention from queries and keys: one signature, several implementations.

`reference` makes every matrix in double precision; the others are tested against it. `streaming` works in blocks on any device and never
holds more than a block of rows. `received_triton` runs on GPUs, and `received_hopper` is its quick path there. `received` chooses, and
`implementation` says what it would choose. On a CPU `joint` computes the forward's attention and the sums at once (`attended`). `drawn`
chooses the next token of each row, `described` says what it is chosen from, and how far that is from what is `Kept`. A GPU's kernels may be
compiled `in_background`.
"""

from __future__ import annotations

from mless.kernels.ahead import in_background
from mless.kernels.choosing import attended, implementation, received, triton_serves
from mless.kernels.distributions import Kept, compile_described, described
from mless.kernels.sampling import drawn
from mless.kernels.signature import Intervals, Sums, Visible, intervals

__all__ = [
    "Intervals",
    "Kept",
    "Sums",
    "Visible",
    "attended",
    "compile_described",
    "described",
    "drawn",
    "implementation",
    "in_background",
    "intervals",
    "received",
    "triton_serves",
]
