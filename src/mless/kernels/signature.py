"""What every implementation takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor


@runtime_checkable
class Visible(Protocol):
    """Which keys the queries ``first … last − 1`` can see. Asked block by block, so no T × T mask need exist."""

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch #heads rows keys"]: ...


@dataclass(frozen=True)
class Sums:
    """What one attention call yields.

    received: Σ P[i, j] over the queries i of each set that come later than j and can see it
    counts:   how many such queries there are
    mass:     where a query of the *last* set sends its attention, the diagonal included: one share per span id, then the
              learned sink; the mean over that set's queries
    """

    received: Float[Tensor, "batch sets heads keys"]
    counts: Int[Tensor, "batch sets keys"]
    mass: Float[Tensor, "batch heads spans_and_sink"]
