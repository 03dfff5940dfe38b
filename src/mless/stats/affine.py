"""One λ and one σ for a head, how much of a displacement they explain, and how alike the displacements are (docs/affine.md).

A row is a head. Everything is computed from sums over an item's tokens, so no token's vector is kept. Residuals of a fit are exact. Items
are the sampling unit: tokens of one item are never counted as further observations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64

from mless.errors import BadStudy
from mless.stats.intervals import is_skewed, reach, sample_skewness, student

FitVerdict = Literal["holds", "partly", "fails", "undecided"]
FIT_VERDICTS: tuple[FitVerdict, ...] = get_args(FitVerdict)


@dataclass(frozen=True, slots=True)
class Intervals:
    """A value for each row with its 95 % interval over items; `lo` and `hi` are NaN where fewer than two items count.

    `skewed`: a few items decide the row, and the interval may cover less than it says (docs/statistics.md).
    """

    value: Float64[np.ndarray, " rows"]
    lo: Float64[np.ndarray, " rows"]
    hi: Float64[np.ndarray, " rows"]
    skewed: Bool[np.ndarray, " rows"]


@dataclass(frozen=True, slots=True)
class AffineSums:
    """Sums over tokens of one item, or of many: of 1, ‖o‖², ‖d‖², o·d, o and d, where d = o′ − o."""

    n: Float64[np.ndarray, " rows"]
    outputs: Float64[np.ndarray, " rows"]
    moves: Float64[np.ndarray, " rows"]
    product: Float64[np.ndarray, " rows"]
    output: Float64[np.ndarray, "rows dim"]
    displacement: Float64[np.ndarray, "rows dim"]

    def __add__(self, other: AffineSums) -> AffineSums:
        return AffineSums(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class AffineMap:
    """o′ ≈ scale · o + shift, one of each per row; NaN where there was nothing to fit."""

    scale: Float64[np.ndarray, " rows"]
    shift: Float64[np.ndarray, "rows dim"]


def halves(ids: Sequence[str], seed: int) -> Bool[np.ndarray, " items"]:
    """Which items the map is fitted on: half of them (the smaller half of an odd number), the rest are for scoring.

    Items are ranked by a hash of (seed, id), so their order in the data does not matter.
    """
    ranked = sorted(
        range(len(ids)),
        key=lambda n: (hashlib.blake2b(f"{seed}\naffine\n{ids[n]}".encode(), digest_size=8).digest(), n),
    )
    fitted = np.zeros(len(ids), dtype=np.bool_)
    fitted[ranked[: len(ids) // 2]] = True
    return fitted


def fit_affine(sums: AffineSums) -> AffineMap:
    """The least-squares scale (one number) and shift (one vector) of every row.

    With d = o′ − o, minimising Σ‖d − (λ − 1)·o − σ‖² gives λ − 1 = Σ(o − ō)·(d − d̄) / Σ‖o − ō‖² and σ = d̄ − (λ − 1)·ō. Where the outputs
    do not vary, λ cannot be separated from σ and is set to 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, move = sums.output / sums.n[:, None], sums.displacement / sums.n[:, None]
        spread = sums.outputs - sums.n * (mean * mean).sum(-1)
        together = sums.product - sums.n * (mean * move).sum(-1)
        slope = np.where(spread > 1e-12 * sums.outputs, together / spread, 0.0)
        slope = np.where(sums.n > 0, slope, np.nan)
    return AffineMap(1 + slope, move - slope[:, None] * mean)


def affine_residual(fit: AffineMap, sums: AffineSums) -> Float64[np.ndarray, " rows"]:
    """Σ‖o′ − λ·o − σ‖² over the tokens behind `sums`, which need not be those of the fit."""
    slope, shift = fit.scale - 1, fit.shift
    left = (
        sums.moves
        + slope**2 * sums.outputs
        - 2 * slope * sums.product
        + sums.n * (shift * shift).sum(-1)
        - 2 * (shift * sums.displacement).sum(-1)
        + 2 * slope * (shift * sums.output).sum(-1)
    )
    return np.maximum(left, 0.0)  # a sum of squares; rounding may put an exact fit a hair below zero


def ratio_of_sums(
    part: Float64[np.ndarray, "items rows"], whole: Float64[np.ndarray, "items rows"], level: float = 0.95
) -> Intervals:
    """Σ part / Σ whole over items, both ≥ 0, with an interval from the delete-one jackknife of its log.

    An item with NaN, or without any `whole`, is left out of its row. On the log, because a ratio of sums of squares is skewed and cannot
    fall below 0. Remaining skewness widens the side of the long tail (`intervals.reach`). Where Σ part = 0, the ratio and both bounds are
    0.
    """
    there = ~(np.isnan(part) | np.isnan(whole)) & (whole > 0)
    a, b = np.where(there, part, 0.0), np.where(there, whole, 0.0)
    n = there.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = a.sum(axis=0) / b.sum(axis=0)
        without = np.where(there, np.log(_sums_without_each(a) / _sums_without_each(b)), 0.0)
        middle = without.sum(axis=0) / n
        # leaving an item out moves the ratio in the opposite direction
        influence = np.where(there, middle - without, np.nan)
        # not times (n − 1)/n: a few items with much weight make the plain jackknife too small
        error = np.sqrt(np.where(there, influence**2, 0.0).sum(axis=0))
        skewness = sample_skewness(influence, n)
        below, above = reach(skewness, n, level)
        # limited to finite numbers, where a single item decides
        lo, hi = (np.exp(np.clip(np.log(value) + step, -700, 700)) for step in (-below * error, above * error))
    nothing = (n > 1) & (a.sum(axis=0) == 0)
    known = (n > 1) & np.isfinite(error)
    lo, hi = (np.where(nothing, 0.0, np.where(known, bound, np.nan)) for bound in (lo, hi))
    return Intervals(np.where(n > 0, value, np.nan), lo, hi, is_skewed(skewness, n))


def _sums_without_each(values: Float64[np.ndarray, "items rows"]) -> Float64[np.ndarray, "items rows"]:
    """The sum of all other items, added directly: subtracting a huge item from the total would lose digits."""
    nothing = np.zeros_like(values[:1])
    before = np.concatenate([nothing, np.cumsum(values, axis=0)])[:-1]
    after = np.concatenate([nothing, np.cumsum(values[::-1], axis=0)])[:-1][::-1]
    return (before + after)[: len(values)]


def explained(
    left: Float64[np.ndarray, "items rows"], moves: Float64[np.ndarray, "items rows"], level: float = 0.95
) -> Intervals:
    """R² = 1 − Σ left / Σ‖o′ − o‖²: 1 where the prediction is exact, 0 where it is as far off as no change at all, below 0 where worse."""
    ratio = ratio_of_sums(left, moves, level)
    return Intervals(1 - ratio.value, 1 - ratio.hi, 1 - ratio.lo, ratio.skewed)


def cosine_across_items(
    directions: Float64[np.ndarray, "items rows heads"],
    along: Float64[np.ndarray, "items rows heads"],
    count: Float64[np.ndarray, "items rows heads"],
    level: float = 0.95,
) -> Intervals:
    """The mean cosine between the displacements of two tokens of two different items, over a row's heads, with a jackknife interval.

    With U_k the sum of the unit vectors of item k's displacements and S = ΣU_k: `directions` is ‖U_k‖², `along` is U_k·S, `count` their
    number. Pairs within an item share their context and are left out: (‖S‖² − Σ‖U_k‖²) / (N² − Σn_k²). Heads of a row are pooled, each
    with pairs of its own.
    """
    total, own, tokens, squares = along.sum(0), directions.sum(0), count.sum(0), (count**2).sum(0)
    there = (count > 0).any(axis=-1)
    n = there.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = (total - own).sum(-1) / (tokens**2 - squares).sum(-1)
        pairs = ((tokens - count) ** 2 - (squares - count**2)).sum(-1)
        left_out = np.where(there, (total - own - 2 * along + 2 * directions).sum(-1) / pairs, 0.0)
        spread = np.where(there, (left_out - left_out.sum(axis=0) / n) ** 2, 0.0).sum(axis=0) * (n - 1) / n
        half = np.where(n > 2, student(n, level) * np.sqrt(spread), np.nan)
    value = np.where(n > 1, value, np.nan)
    return Intervals(
        value, np.maximum(value - half, -1.0), np.minimum(value + half, 1.0), np.zeros(len(value), np.bool_)
    )


def fit_verdict(lo: float, hi: float, holds: float = 0.9) -> FitVerdict:
    """What an interval of R² says of a form: *holds* (lo ≥ `holds`), *fails* (hi ≤ 0: no better than no change), *partly* (inside), or *undecided*.

    NaN bounds say nothing.
    """
    if not 0 < holds <= 1:
        raise BadStudy(f"affine.holds is an R² above 0 and at most 1, as 0.9 is; got {holds}")
    if math.isnan(lo) or math.isnan(hi):
        return "undecided"
    if lo >= holds:
        return "holds"
    if hi <= 0:
        return "fails"
    return "partly" if lo > 0 and hi < holds else "undecided"
