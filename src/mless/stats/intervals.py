"""Intervals for a mean over few items that may be skewed: Student's t, widened on the long side (docs/statistics.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from mless.errors import BadStudy

#: A small sample underestimates skewness, so it is multiplied by 1 + this / n.
_SHOWN_TOO_LITTLE = 5.0

#: |z| of the sample's skewness beyond which a row is marked: normal items give that once in 1,000 rows.
_MARKED_FROM = 3.2905

#: From so many items on, no row is marked: every shape tried was covered (benchmarks/intervals.py).
ENOUGH_ITEMS = 60

#: The normal approximation of the skewness's distribution begins here.
_FEWEST_TO_MARK = 8


@dataclass(frozen=True, slots=True)
class MeanIntervals:
    """The mean of each row with its interval; bounds are NaN where n < 2. `skewed`: a few items decide this row."""

    mean: Float64[np.ndarray, " rows"]
    lo: Float64[np.ndarray, " rows"]
    hi: Float64[np.ndarray, " rows"]
    n: Int[np.ndarray, " rows"]
    skewed: Bool[np.ndarray, " rows"]


def mean_intervals(values: Float[np.ndarray, "items rows"], level: float = 0.95) -> MeanIntervals:
    """Mean over each row's items that are not NaN, with an interval that allows for skewed items."""
    mean, error, n, deviations = moments(values.astype(np.float64))
    skewness = sample_skewness(deviations, n)
    below, above = reach(skewness, n, level)
    with np.errstate(over="ignore"):
        return MeanIntervals(mean, mean - below * error, mean + above * error, n, is_skewed(skewness, n))


def interval_of_moments(
    mean: Float64[np.ndarray, " rows"],
    second: Float64[np.ndarray, " rows"],
    third: Float64[np.ndarray, " rows"],
    n: Int[np.ndarray, " rows"],
    level: float,
) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    """The ends of `mean_intervals` where the items themselves are not at hand: from each row's mean and central moments (sums over n)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = third / second**1.5 * _from_few(n)
        error = np.sqrt(second / (n - 1))
    below, above = reach(_skewness_or_none(found, n), n, level)
    return mean - below * error, mean + above * error


def moments(
    values: Float64[np.ndarray, "items rows"],
) -> tuple[
    Float64[np.ndarray, " rows"],
    Float64[np.ndarray, " rows"],
    Int[np.ndarray, " rows"],
    Float64[np.ndarray, "items rows"],
]:
    """Mean, its standard error, n, and each item's deviation (NaN where the item is missing)."""
    there = ~np.isnan(values)
    n = there.sum(axis=0)
    if values.shape[0] == 0:
        nothing = np.full(values.shape[1], np.nan)
        return nothing, nothing.copy(), n, values
    # deviations from a column's first item: equal items then have a spread of exactly zero
    origin = values[there.argmax(axis=0), np.arange(values.shape[1])]
    from_origin = np.where(there, values - origin, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0/0 is how n < 2 becomes NaN
        shift = from_origin.sum(axis=0) / n
        deviations = np.where(there, from_origin - shift, np.nan)
        variance = np.where(there, deviations**2, 0.0).sum(axis=0) / (n - 1)
        error = np.sqrt(variance / n)
    return origin + shift, error, n, deviations


def student(n: Int[np.ndarray, " rows"], level: float) -> Float64[np.ndarray, " rows"]:
    """Student's two-sided quantile for n items; NaN where n < 2."""
    if not 0 < level < 1:
        raise BadStudy(f"level must lie between 0 and 1, as 0.95 does; got {level}")
    # not scipy.stats: its import alone takes longer than everything this module computes
    from scipy.special import stdtrit

    return np.asarray(stdtrit(n - 1, (1 + level) / 2))


def sample_skewness(
    deviations: Float64[np.ndarray, "items rows"], n: Int[np.ndarray, " rows"]
) -> Float64[np.ndarray, " rows"]:
    """Adjusted Fisher-Pearson skewness of each row; 0 where it has none: fewer than 3 items, or all equal."""
    there = ~np.isnan(deviations)
    with np.errstate(divide="ignore", invalid="ignore"):
        # by the largest first, because a cube could overflow
        largest = np.where(there, np.abs(deviations), 0.0).max(axis=0, initial=0.0)
        scaled = np.where(there, deviations / largest, 0.0)
        second, third = (scaled**2).sum(axis=0) / n, (scaled**3).sum(axis=0) / n
        found = third / second**1.5 * _from_few(n)
    return _skewness_or_none(found, n)


def _from_few(n: Int[np.ndarray, " rows"]) -> Float64[np.ndarray, " rows"]:
    """The adjusted skewness over the plain one."""
    return np.sqrt(n * (n - 1.0)) / (n - 2.0)


def _skewness_or_none(found: Float64[np.ndarray, " rows"], n: Int[np.ndarray, " rows"]) -> Float64[np.ndarray, " rows"]:
    return np.where((n > 2) & np.isfinite(found), found, 0.0)


def reach(
    skewness: Float64[np.ndarray, " rows"], n: Int[np.ndarray, " rows"], level: float
) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    """How many standard errors an interval reaches below and above the mean: Hall's limits, and Student's where those are nearer.

    Hall (1992): g(t) = t + a·t²/3 + a²·t³/27 + a/6 with a = skewness/√n removes skewness to first order. It can be solved for t. It
    lengthens the side of the long tail and shortens the other. The other side stays at Student's limit, because one unusual item may make a
    symmetric row look skewed.
    """
    return reach_of(tilt(skewness, n), student(n, level))


def tilt(skewness: Float64[np.ndarray, " rows"], n: Int[np.ndarray, " rows"]) -> Float64[np.ndarray, " rows"]:
    """The skewness of a mean of n items: Hall's a, with the sample's skewness enlarged because few items show too little of it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return skewness * (1 + _SHOWN_TOO_LITTLE / n) / np.sqrt(n)


def reach_of(
    a: Float64[np.ndarray, " rows"], t: Float64[np.ndarray, " rows"]
) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    """`reach` for an estimate of skewness `a` whose Student's quantile is `t`."""
    return np.fmax(t, _undo_skewness(t, a)), np.fmax(t, _undo_skewness(t, -a))


def tail_p(
    distance: Float64[np.ndarray, " rows"], a: Float64[np.ndarray, " rows"], free: Float64[np.ndarray, " rows"]
) -> Float64[np.ndarray, " rows"]:
    """The one-sided p at which the interval's lower end lies `distance` standard errors below the mean: `reach_of` inverted.

    For the upper end give −a. `free` are Student's degrees of freedom.
    """
    from scipy.special import stdtr

    with np.errstate(invalid="ignore", over="ignore"):
        hall = distance + a * distance**2 / 3 + a**2 * distance**3 / 27 + a / 6
    return np.asarray(stdtr(free, -np.fmin(distance, hall)))


def interval_p(values: Float64[np.ndarray, "items rows"]) -> Float64[np.ndarray, " rows"]:
    """The p at which each row's interval ends at 0. Where nothing varies it is 1 for a mean of 0, and else 0."""
    mean, error, n, deviations = moments(values)
    a = tilt(sample_skewness(deviations, n), n) * np.sign(mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.minimum(2 * tail_p(np.abs(mean) / error, a, n - 1.0), 1.0)
    return np.where(error == 0, np.where(mean == 0, 1.0, 0.0), p)


def _undo_skewness(g: Float64[np.ndarray, " rows"], a: Float64[np.ndarray, " rows"]) -> Float64[np.ndarray, " rows"]:
    """The t for which Hall's g(t) is `g`."""
    rest = g - a / 6
    root = np.cbrt(1 + a * rest)
    return 3 * rest / (root * root + root + 1)  # = 3 · (root − 1) / a, without its 0/0


def is_skewed(skewness: Float64[np.ndarray, " rows"], n: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
    """Rows to mark: a skewness that normal items hardly ever show, in a sample too small for a reliable interval.

    The skewness is made a standard normal z by D'Agostino's (1970) transformation.
    """
    m = np.maximum(n, _FEWEST_TO_MARK).astype(np.float64)
    plain = skewness * (m - 2) / np.sqrt(m * (m - 1))
    scaled = plain * np.sqrt((m + 1) * (m + 3) / (6 * (m - 2)))
    kurtosis = 3 * (m * m + 27 * m - 70) * (m + 1) * (m + 3) / ((m - 2) * (m + 5) * (m + 7) * (m + 9))
    width: Any = np.sqrt(2 * (kurtosis - 1)) - 1
    z = np.arcsinh(scaled / np.sqrt(2 / (width - 1))) / np.sqrt(np.log(width) / 2)
    return (n >= _FEWEST_TO_MARK) & (n < ENOUGH_ITEMS) & (np.abs(z) > _MARKED_FROM)
