"""A ratio of two paired means, as the share of an effect that is left: its interval holds over items (docs/cause.md).

Fieller's way: a ratio θ is refused where the mean of part − θ · whole is shown not to be 0. The interval is what is not refused. The mean's own
interval is that of `intervals`, which allows for skewed items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from mless.stats.intervals import interval_of_moments, mean_intervals, moments

#: Where the search for an end looks first, in units of its items.
_STEPS = 2.0 ** (np.arange(121) / 2)

#: Halvings of what is left: far beyond what a float64 can tell apart.
_HALVINGS = 60


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
    hi[known] = found + _reach(above - found * below, below, level)
    lo[known] = found - _reach(found * below - above, below, level)
    return Ratios(value, lo, hi, of_whole.n, known)


def _reach(
    rest: Float64[np.ndarray, "items rows"], whole: Float64[np.ndarray, "items rows"], level: float
) -> Float64[np.ndarray, " rows"]:
    """The largest x for which the mean of rest − x · whole is not shown to be below 0. `rest` has a mean of 0.

    The mean and its central moments are polynomials in x, so a step of the search costs no pass over the items.
    """
    line = _Line.of(rest, whole)
    inside, outside = np.zeros(whole.shape[1]), np.ones(whole.shape[1])
    # Where items are very skewed, what is refused may have a gap. Therefore the search goes all the way out.
    for far in _STEPS:
        left = ~(line.upper_end(np.full(len(inside), far), level) < 0)
        inside, outside = np.where(left, far, inside), np.where(left, far * _STEPS[1], outside)
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        out = line.upper_end(middle, level) < 0
        inside, outside = np.where(out, inside, middle), np.where(out, middle, outside)
    return inside * line.unit


@dataclass(frozen=True, slots=True)
class _Line:
    """Items that are a − x · b: their mean and central moments for any x.

    Both sides are measured by their largest |deviation|, because a cube could overflow. `unit` is an x of 1 in the items' own units.
    """

    means: tuple[Float64[np.ndarray, " rows"], ...]
    second: tuple[Float64[np.ndarray, " rows"], ...]
    third: tuple[Float64[np.ndarray, " rows"], ...]
    n: Int[np.ndarray, " rows"]
    unit: Float64[np.ndarray, " rows"]

    @classmethod
    def of(cls, a: Float64[np.ndarray, "items rows"], b: Float64[np.ndarray, "items rows"]) -> _Line:
        (mean_a, u, size_a, n), (mean_b, v, size_b, _) = (_deviations(side) for side in (a, b))
        mean = [np.sum(one, axis=0) / n for one in (u * u, u * v, v * v, u**3, u * u * v, u * v * v, v**3)]
        return cls((mean_a / size_a, mean_b / size_b), tuple(mean[:3]), tuple(mean[3:]), n, size_a / size_b)

    def upper_end(self, x: Float64[np.ndarray, " rows"], level: float) -> Float64[np.ndarray, " rows"]:
        """Where the mean's interval ends above."""
        (a, b), (aa, ab, bb), (aaa, aab, abb, bbb) = self.means, self.second, self.third
        second = np.maximum(aa - 2 * x * ab + x * x * bb, 0.0)
        third = aaa - 3 * x * aab + 3 * x * x * abb - x**3 * bbb
        return interval_of_moments(a - x * b, second, third, self.n, level)[1]


def _deviations(
    side: Float64[np.ndarray, "items rows"],
) -> tuple[
    Float64[np.ndarray, " rows"],
    Float64[np.ndarray, "items rows"],
    Float64[np.ndarray, " rows"],
    Int[np.ndarray, " rows"],
]:
    """Mean, deviations over their size (0 where the item is missing), that size, and n."""
    mean, _, n, away = moments(side)
    away = np.nan_to_num(away)
    size = np.abs(away).max(axis=0, initial=0.0)
    size = np.where(size == 0, 1.0, size)
    return mean, away / size, size, n
