"""Paired accuracy with one answer per item: intervals, McNemar's test, equivalence (docs/accuracy-statistics.md).

An item is right or wrong under each condition, and both conditions ask the same items. So each item is compared with itself. Fewer than two
items give no interval and no p (NaN). A missing answer counts as wrong. A NaN means lost data and is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from mless.errors import BadData, BadStudy
from mless.stats.shares import Estimate

#: What a run reports: `exact` holds its level always; `mid-p` holds it on average and finds a little more.
McNemar = Literal["exact", "mid-p"]


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Accuracy after minus before, with its interval; `gained` items went from wrong to right, `lost` the other way."""

    value: float
    lo: float
    hi: float
    n: int
    gained: int
    lost: int

    @property
    def changed_share(self) -> float:
        """The share of items that changed, as `smallest_detectable_effect` takes it; NaN without items."""
        return (self.gained + self.lost) / self.n if self.n else math.nan


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided tests against ±margin; `lo` to `hi` is the interval that `equivalent` asks to lie inside."""

    p: float
    equivalent: bool
    value: float
    lo: float
    hi: float
    margin: float


def accuracy_interval(
    correct: Bool[np.ndarray, " items"] | Float[np.ndarray, " items"], level: float = 0.95
) -> Estimate:
    """The share of right answers with Wilson's interval."""
    z = normal_quantile(level)
    right = zero_or_one(correct, "the condition")
    n = len(right)
    share = float(right.mean()) if n else math.nan
    if n < 2:
        return Estimate(share, math.nan, math.nan, n)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # at 0 and 1 the bound is the share itself, which rounding would miss by 1e-17
    lo = 0.0 if share == 0 else centre - half
    return Estimate(share, lo, 1.0 if share == 1 else centre + half, n)


def paired_difference(
    before: Bool[np.ndarray, " before"] | Float[np.ndarray, " before"],
    after: Bool[np.ndarray, " after"] | Float[np.ndarray, " after"],
    level: float = 0.95,
) -> PairedDifference:
    """Δ accuracy, after minus before, with Tango's score interval."""
    z = normal_quantile(level)
    gained, lost, n = _changes(before, after)
    if n < 2:
        return PairedDifference((gained - lost) / n if n else math.nan, math.nan, math.nan, n, gained, lost)
    lo, hi = _tango(np.array([gained]), np.array([lost]), n, z)
    return PairedDifference((gained - lost) / n, float(lo[0]), float(hi[0]), n, gained, lost)


def mcnemar_exact(
    before: Bool[np.ndarray, " before"] | Float[np.ndarray, " before"],
    after: Bool[np.ndarray, " after"] | Float[np.ndarray, " after"],
) -> float:
    """Two-sided exact McNemar test: among the changed items, do gains and losses differ by more than chance?"""
    gained, lost, n = _changes(before, after)
    return float(mcnemar_p(np.array([gained]), np.array([lost]), "exact")[0]) if n >= 2 else math.nan


def mcnemar_mid_p(
    before: Bool[np.ndarray, " before"] | Float[np.ndarray, " before"],
    after: Bool[np.ndarray, " after"] | Float[np.ndarray, " after"],
) -> float:
    """The mid-p McNemar test: as `mcnemar_exact`, but what was observed counts by half."""
    gained, lost, n = _changes(before, after)
    return float(mcnemar_p(np.array([gained]), np.array([lost]), "mid-p")[0]) if n >= 2 else math.nan


def equivalence(
    before: Bool[np.ndarray, " before"] | Float[np.ndarray, " before"],
    after: Bool[np.ndarray, " after"] | Float[np.ndarray, " after"],
    margin: float,
    level: float = 0.95,
) -> Equivalence:
    """TOST for one answer per item: is Δ shown to lie within ±margin? By Tango's score, at α = 1 − level.

    The same is said by the interval of level 1 − 2α lying inside ±margin; with level 0.95 that is the 90 % one.
    """
    z = one_sided_quantile(level)
    if not 0 < margin < 1:
        raise BadStudy(f"margin must lie between 0 and 1, as 0.02 (two points) does; got {margin}")
    gained, lost, n = _changes(before, after)
    if n < 2:
        value = (gained - lost) / n if n else math.nan
        return Equivalence(math.nan, False, value, math.nan, math.nan, margin)
    p = float(equivalence_p(np.array([gained]), np.array([lost]), n, margin)[0])
    lo, hi = _tango(np.array([gained]), np.array([lost]), n, z)
    return Equivalence(p, p <= 1 - level, (gained - lost) / n, float(lo[0]), float(hi[0]), margin)


def equivalence_p(
    gained: Int[np.ndarray, " tables"], lost: Int[np.ndarray, " tables"], n: int, margin: float
) -> Float64[np.ndarray, " tables"]:
    """The larger p of the two one-sided score tests against −margin and +margin, for many tables of n items at once."""
    from scipy.special import ndtr

    below = _tango_score(gained, lost, n, np.full(len(gained), -margin))
    above = _tango_score(gained, lost, n, np.full(len(gained), margin))
    return np.maximum(ndtr(-below), ndtr(above))


def _tango_score(
    gained: Int[np.ndarray, " tables"] | Float64[np.ndarray, " tables"],
    lost: Int[np.ndarray, " tables"] | Float64[np.ndarray, " tables"],
    n: int,
    difference: Float64[np.ndarray, " tables"],
) -> Float64[np.ndarray, " tables"]:
    """(Δ observed − difference) / its standard error if `difference` were the truth; falls as `difference` grows."""
    # the most likely chance of a loss, given gain − loss = `difference`: the larger root of a quadratic
    linear = (2 * n - gained + lost) * difference - gained - lost
    root = np.sqrt(np.maximum(linear**2 + 8 * n * lost * difference * (1 - difference), 0))
    loss = (root - linear) / (4 * n)
    variance = n * np.maximum(2 * loss + difference * (1 - difference), 0)
    distance = gained - lost - n * difference
    with np.errstate(divide="ignore", invalid="ignore"):  # at ±1 nothing varies
        return np.where(distance == 0, 0.0, distance / np.sqrt(variance))


def _tango(
    gained: Int[np.ndarray, " tables"], lost: Int[np.ndarray, " tables"], n: int, z: float
) -> tuple[Float64[np.ndarray, " tables"], Float64[np.ndarray, " tables"]]:
    """Where the score is z and −z, by bisection; both bounds at once."""
    observed, tables = (gained - lost) / n, len(gained)
    gains, losses = np.tile(gained, 2), np.tile(lost, 2)
    target = np.repeat([z, -z], tables)
    lo = np.concatenate([-np.ones(tables), observed])
    hi = np.concatenate([observed, np.ones(tables)])
    for _ in range(44):  # 2⁻⁴³ is 1e-13
        middle = (lo + hi) / 2
        above = _tango_score(gains, losses, n, middle) > target
        lo, hi = np.where(above, middle, lo), np.where(above, hi, middle)
    bound = (lo + hi) / 2
    return np.where(observed == -1, -1.0, bound[:tables]), np.where(observed == 1, 1.0, bound[tables:])


def mcnemar_p(
    gained: Int[np.ndarray, " tables"], lost: Int[np.ndarray, " tables"], test: McNemar
) -> Float64[np.ndarray, " tables"]:
    changed = gained + lost
    fewer = np.minimum(gained, lost)
    one_sided = binomial_tail(fewer, changed, 0.5)
    if test == "exact":
        return np.minimum(2 * one_sided, 1.0)
    return np.minimum(one_sided + binomial_tail(fewer - 1, changed, 0.5), 1.0)


def binomial_tail(k: Int[np.ndarray, " rows"], n: Int[np.ndarray, " rows"], p: float) -> Float64[np.ndarray, " rows"]:
    """P(X ≤ k) for X ~ binomial(n, p); 0 for k = −1."""
    from scipy.special import bdtr

    return np.where(k < 0, 0.0, bdtr(np.maximum(k, 0).astype(np.float64), n, p))


def _changes(before: np.ndarray, after: np.ndarray) -> tuple[int, int, int]:
    """Items gained, items lost, items."""
    was, is_now = zero_or_one(before, "before"), zero_or_one(after, "after")
    same_items(len(was), len(is_now))
    return int(np.count_nonzero(~was & is_now)), int(np.count_nonzero(was & ~is_now)), len(was)


# ---- what is refused -------------------------------------------------------------------------------------------------


def zero_or_one(values: np.ndarray, what: str) -> np.ndarray:
    if values.dtype == np.bool_:
        return values
    bad = np.argwhere((values != 0) & (values != 1))  # NaN is neither
    if len(bad):
        item, *sample = (int(at) for at in bad[0])
        place = f"item {item + 1}" + (f", sample {sample[0] + 1}" if sample else "")
        raise BadData(
            f"{what}, {place} (numbered from 1): correct is {values[tuple(bad[0])]}, expected 0 or 1 ({len(bad)} such); an answer that "
            "is missing is wrong, which is 0"
        )
    return values == 1


def same_items(before: int, after: int) -> None:
    if before != after:
        raise BadData(
            f"the conditions differ in their items: {before} before, {after} after; only the same items can be paired"
        )


def normal_quantile(level: float) -> float:
    if not 0 < level < 1:
        raise BadStudy(f"level must lie between 0 and 1, as 0.95 does; got {level}")
    from scipy.special import ndtri

    return float(ndtri((1 + level) / 2))


def one_sided_quantile(level: float) -> float:
    if not 0.5 < level < 1:
        raise BadStudy(f"level of an equivalence test must lie between 0.5 and 1, as 0.95 does; got {level}")
    from scipy.special import ndtri

    return float(ndtri(level))
