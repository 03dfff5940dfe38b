"""A ratio of two paired means, as the share of an effect that is left: its interval holds over items (docs/cause.md).

Fieller's way: a ratio θ is refused where the mean of part − θ · whole is shown not to be 0. The interval is what is not refused. The mean's own
interval is that of `intervals`, which allows for skewed items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from mless.stats.intervals import mean_intervals

#: Doublings of a bracket, and halvings of it: far beyond what a float64 can tell apart.
_DOUBLINGS, _HALVINGS = 60, 60


@dataclass(frozen=True, slots=True)
class Ratios:
    """Each row's mean part over its mean whole. All three are NaN where the whole is not shown to differ from 0: then no ratio is known."""

    value: Float64[np.ndarray, " rows"]
    lo: Float64[np.ndarray, " rows"]
    hi: Float64[np.ndarray, " rows"]
    n: Int[np.ndarray, " rows"]
    known: Bool[np.ndarray, " rows"]


def ratios_of_means(
    part: Float[np.ndarray, "items rows"], whole: Float[np.ndarray, "items rows"], level: float = 0.95
) -> Ratios:
    """Items that are NaN on either side are left out of that row."""
    lost = np.isnan(part) | np.isnan(whole)
    above, below = (np.where(lost, np.nan, side).astype(np.float64) for side in (part, whole))
    of_whole = mean_intervals(below, level)
    with np.errstate(invalid="ignore"):
        known = (of_whole.lo > 0) | (of_whole.hi < 0)
    # A whole below 0 is turned over, with its part: the ratio stays.
    turned = np.where(of_whole.mean < 0, -1.0, 1.0)
    above, below = above[:, known] * turned[known], below[:, known] * turned[known]
    value, lo, hi = (np.full(part.shape[1], np.nan) for _ in range(3))
    found = mean_intervals(above, level).mean / mean_intervals(below, level).mean
    value[known] = found
    hi[known] = _end(above, below, found, level)
    lo[known] = -_end(-above, below, -found, level)
    return Ratios(value, lo, hi, of_whole.n, known)


def _end(
    part: Float64[np.ndarray, "items rows"],
    whole: Float64[np.ndarray, "items rows"],
    start: Float64[np.ndarray, " rows"],
    level: float,
) -> Float64[np.ndarray, " rows"]:
    """The largest ratio that is not refused, above one that is not."""

    def refused(ratio: Float64[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        return mean_intervals(part - ratio * whole, level).hi < 0

    step = np.maximum(np.abs(start), 1.0)
    inside, outside = start, start + step
    for _ in range(_DOUBLINGS):
        still = ~refused(outside)
        if not still.any():
            break
        inside = np.where(still, outside, inside)
        step = step * 2
        outside = np.where(still, outside + step, outside)
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        out = refused(middle)
        inside, outside = np.where(out, inside, middle), np.where(out, middle, outside)
    return inside
