"""Every statistical notion once: shares, intervals, sign-flip tests, families, verdicts, bands (docs/statistics.md).

The data are logs of shares, one per item. NaN: the item's share is undefined, and it is left out of that row only. Fewer than two items
give no interval and no p (NaN, never 0). Infinities are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Float64, Int

from mless.errors import BadAttention, BadStudy
from mless.stats.intervals import (
    MeanIntervals,
    interval_p,
    is_skewed,
    mean_intervals,
    moments,
    reach,
    sample_skewness,
    student,
)

Verdict = Literal["drops", "rises", "unchanged", "undecided"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

#: In units of Σ|log λ_item|: equal sums added in another order differ by some 1e-16, really different ones by far more.
_TIE = 1e-12

#: A smaller |log λ_uniform| is no yardstick: ε would divide by rounding (nothing inserted, or the filler is not seen).
LEAST_DILUTION = 0.05

#: Up to so many items all 2ⁿ sign patterns cost less than 100,000 random ones (see `_exact_p`).
EXACT_UP_TO = 26

#: A sum of random signs reaches so many times the root of its squares with a chance below 4e-22 (Hoeffding). No pattern that is drawn
#: does, so there is no need to look.
_OUT_OF_REACH = 10.0

#: Sign patterns drawn at a time and rows compared at a time: 8 MiB of sums, whatever the study's size.
_FLIPS_AT_ONCE = 4096
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval and the number of items behind it; `lo` and `hi` are NaN where n < 2.

    `skewed`: a few items decide it, and the interval may cover less than it says (docs/statistics.md).
    """

    value: float
    lo: float
    hi: float
    n: int
    skewed: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """The mean over items at every position, with an interval for each position by itself; NaN bounds where n < 2."""

    mean: Float64[np.ndarray, " positions"]
    lo: Float64[np.ndarray, " positions"]
    hi: Float64[np.ndarray, " positions"]
    n: Int[np.ndarray, " positions"]


@dataclass(frozen=True, slots=True)
class SignFlip:
    """p of each row, and `smallest`: the smallest p possible in this table.

    `exact` says that every row's p is; `flips` is the number of random sign patterns drawn for those that are not.
    """

    p: Float64[np.ndarray, " rows"]
    exact: bool
    smallest: float
    n: Int[np.ndarray, " rows"]
    flips: int


# ---- intervals -------------------------------------------------------------------------------------------------------


def retained_share(logs: Float[np.ndarray, " items"], level: float = 0.95, *, name: str = "the row") -> Estimate:
    """A head's λ = exp(mean of log λ_item), with an interval on the log that allows for skewed items."""
    return retained_shares(logs[:, None], level, names=[name])[0]


def retained_shares(
    logs: Float[np.ndarray, "items rows"], level: float = 0.95, *, names: Sequence[str] | None = None
) -> list[Estimate]:
    """`retained_share` of every row at once."""
    _refuse_infinities(logs, names)
    return _estimates(mean_intervals(logs, level), exp=True)


def layer_share(
    logs: Float[np.ndarray, "items heads"], level: float = 0.95, *, names: Sequence[str] | None = None
) -> tuple[Estimate, Float64[np.ndarray, " items"]]:
    """A layer's λ = the mean of its heads' λ, with a delta-method interval on the log, and the item scores behind it.

    The heads of an item are not independent, so items are the sampling unit: item i's score is the first-order
    influence Σ_h w_h log λ_ih with w_h = λ_h / Σλ. The scores come back recentred on log λ, as the sign-flip test of a
    layer takes them. A head's λ uses all of that head's items, so the layer's λ is the mean of the heads as shown. A score, and so `n`,
    needs an item that is defined in every head. A head defined for no item is left out.
    """
    _refuse_infinities(logs, names)
    present = ~np.isnan(logs).all(axis=0)
    if not present.any():
        return Estimate(math.nan, math.nan, math.nan, 0), np.full(logs.shape[0], np.nan)
    used = logs[:, present].astype(np.float64)
    head_means = moments(used)[0]
    # exp after subtracting the largest: the weights are right even where a λ itself would overflow
    top = float(head_means.max())
    relative = np.exp(head_means - top)
    log_share = top + math.log(float(relative.mean()))
    # not a matmul: BLAS may round equal rows differently, and equal items must give a spread of exactly zero
    scores = (used * (relative / relative.sum())).sum(axis=1)
    mean, error, n, deviations = moments(scores[:, None])
    skewness = sample_skewness(deviations, n)
    below, above = reach(skewness, n, level)
    centre = np.array([log_share])
    found = MeanIntervals(centre, centre - below * error, centre + above * error, n, is_skewed(skewness, n))
    return _estimates(found, exp=True)[0], (scores - mean[0]) + log_share


def band(values: Float[np.ndarray, "items positions"], level: float = 0.95) -> Band:
    """The mean over items at each aligned position, with a pointwise t interval over the items that reach it."""
    _refuse_infinities(values, None, row="position", what="value")
    mean, error, n, _ = moments(values.astype(np.float64))
    half = student(n, level) * error
    return Band(mean, mean - half, mean + half, n)


def dilution_exponents(
    logs: Float[np.ndarray, "items layers heads"], even: Float[np.ndarray, "items layers"]
) -> Float64[np.ndarray, "items layers heads"]:
    """ε_item = log λ_item / log λ_uniform,item of every head; NaN where the yardstick is too near to 1 to divide by.

    0: nothing lost; 1: as much as a head loses that spreads evenly; below 0: the question gained.
    """
    yardstick = np.where(np.abs(even) >= LEAST_DILUTION, even, np.nan)
    return logs / yardstick[..., None]


def layer_exponents(epsilons: Float[np.ndarray, "items layers heads"]) -> Float64[np.ndarray, "items layers"]:
    """A layer's ε_item: the mean over its heads, item by item.

    An item needs every head that is defined for any item; otherwise items would be means of different heads.
    """
    present = ~np.isnan(epsilons).all(axis=0)
    count = present.sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return np.where(present, epsilons, 0.0).sum(axis=-1) / np.where(count > 0, count, np.nan)


def mean_exponents(epsilons: Float[np.ndarray, "items rows"], level: float = 0.95) -> list[Estimate]:
    """ε of every row: the mean over items, with the interval of the shares."""
    _refuse_infinities(epsilons, None, what="dilution exponent")
    return _estimates(mean_intervals(epsilons, level), exp=False)


def _estimates(found: MeanIntervals, *, exp: bool) -> list[Estimate]:
    bounds = np.stack([found.mean, found.lo, found.hi])
    if exp:
        with np.errstate(over="ignore", under="ignore"):  # a bound too large for a float is inf
            bounds = np.exp(bounds)
    return [
        Estimate(float(value), float(lo), float(hi), int(n), bool(skewed))
        for (value, lo, hi), n, skewed in zip(bounds.T, found.n, found.skewed, strict=True)
    ]


def _refuse_infinities(
    values: Float[np.ndarray, "items rows"],
    names: Sequence[str] | None,
    *,
    row: str = "row",
    what: str = "log of the share",
) -> None:
    if names is not None and len(names) != values.shape[1]:
        raise ValueError(f"{len(names)} names for {values.shape[1]} rows")
    found = np.argwhere(np.isinf(values))
    if len(found):
        item, at = found[0]
        where = names[at] if names is not None else f"{row} {at + 1}"
        raise BadAttention(
            f"{where}, item {item + 1} (numbered from 1): the {what} is {values[item, at]}, expected a finite number "
            f"({len(found)} such); an item whose share is undefined is to be NaN, which leaves it out"
        )


# ---- the sign-flip test ----------------------------------------------------------------------------------------------


def sign_flip(
    logs: Float[np.ndarray, "items rows"],
    rng: np.random.Generator,
    *,
    flips: int = 100_000,
    exact_up_to: int = EXACT_UP_TO,
    alpha: float = 0.05,
    names: Sequence[str] | None = None,
) -> SignFlip:
    """Two-sided sign-flip test of each row: is the mean of log λ_item 0?

    A row of n ≤ `exact_up_to` items is compared with all 2ⁿ sign patterns. A longer row uses at least `flips` random patterns, p = (b + 1)
    / (m + 1); more where Holm over so many rows could otherwise not reject at `alpha`. Every row sees the same random signs. Rows with n <
    2 are NaN.
    """
    if exact_up_to > 40:
        raise ValueError(f"exact_up_to must be at most 40 items (2⁴⁰ sign patterns), got {exact_up_to}")
    _refuse_infinities(logs, names)
    flips = _random_flips(logs.shape[1], flips, alpha)
    there = ~np.isnan(logs)
    n = there.sum(axis=0)
    p = np.full(logs.shape[1], np.nan)
    # a missing item adds 0 whichever sign it draws, so the same patterns serve every row
    used = np.where(there, logs, 0.0).astype(np.float64)
    # in units of Σ|log λ_item| rounding is absolute; by the largest first, because that sum could overflow
    tiny = np.finfo(np.float64).tiny
    used /= np.abs(used).max(axis=0, initial=tiny)
    used /= np.maximum(np.abs(used).sum(axis=0), tiny)

    floors = np.array([smallest_p(int(k), logs.shape[1], flips=flips, exact_up_to=exact_up_to, alpha=alpha) for k in n])
    by_all = (n >= 2) & (n <= exact_up_to)
    by_chance = (n >= 2) & ~by_all
    for row in np.flatnonzero(by_all):
        p[row] = _exact_p(used[there[:, row], row])
    if by_chance.any():
        # a row's own signs and their opposite always count: draws that missed them must not go below 2/2ⁿ
        p[by_chance] = np.maximum(_random_p(used[:, by_chance], flips, rng), floors[by_chance])
    smallest = float(floors[n >= 2].min()) if (n >= 2).any() else math.nan
    return SignFlip(p, not by_chance.any(), smallest, n, flips if by_chance.any() else 0)


def larger_p(
    values: Float64[np.ndarray, "items rows"],
    rng: np.random.Generator,
    *,
    flips: int = 100_000,
    alpha: float = 0.05,
    names: Sequence[str] | None = None,
) -> Float64[np.ndarray, " rows"]:
    """The larger p of the sign-flip test, which takes skewed items for an effect, and of the interval of each row's mean."""
    return np.fmax(sign_flip(values, rng, flips=flips, alpha=alpha, names=names).p, interval_p(values))


def _exact_p(row: Float64[np.ndarray, " items"]) -> float:
    """The share of all 2ⁿ sign patterns whose |sum| is at least the observed one.

    A pattern's sum = one of 2^(n/2) sums of the first half of the items + one of the second half. With the latter sorted, those that reach
    far enough are counted by bisection. So 2²⁴ patterns take 2¹² steps.
    """
    needed = abs(float(row.sum())) - _TIE
    if needed <= 0:
        return 1.0
    first, second = (_signed_sums(half) for half in np.array_split(row, 2))
    reach = len(second) * len(first) - int(np.searchsorted(second, needed - first).sum())
    return 2 * reach / 2 ** len(row)  # twice: for every pattern its opposite reaches as far below zero


def _signed_sums(values: Float64[np.ndarray, " items"]) -> Float64[np.ndarray, " patterns"]:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return np.sort(sums)


def _random_p(
    used: Float64[np.ndarray, "items rows"], flips: int, rng: np.random.Generator
) -> Float64[np.ndarray, " rows"]:
    items, rows = used.shape
    needed = np.abs(used.sum(axis=0)) - _TIE
    as_large = np.zeros(rows, dtype=np.int64)
    near = np.flatnonzero(needed <= _OUT_OF_REACH * np.sqrt((used**2).sum(axis=0)))
    for start in range(0, flips, _FLIPS_AT_ONCE):
        # Drawn even if no row needs them: what is drawn next must not depend on these rows.
        drawn = rng.integers(0, 2, size=(min(_FLIPS_AT_ONCE, flips - start), items), dtype=np.int8)
        signs = 1.0 - 2.0 * drawn if len(near) else drawn
        for first in range(0, len(near), _ROWS_AT_ONCE):
            block = near[first : first + _ROWS_AT_ONCE]
            flipped = used[:, block].T @ signs.T
            np.abs(flipped, out=flipped)
            as_large[block] += np.count_nonzero(flipped >= needed[block, None], axis=1)
    return (as_large + 1) / (flips + 1)


def smallest_p(
    n: int, rows: int = 1, *, flips: int = 100_000, exact_up_to: int = EXACT_UP_TO, alpha: float = 0.05
) -> float:
    """The smallest p that `sign_flip` can give a row of n items in a table of `rows`; NaN where n < 2."""
    if n < 2:
        return math.nan
    return 2.0 ** (1 - n) if n <= exact_up_to else max(2.0 ** (1 - n), 1 / (_random_flips(rows, flips, alpha) + 1))


def can_reject(n: int, rows: int, alpha: float = 0.05, *, flips: int = 100_000, exact_up_to: int = EXACT_UP_TO) -> bool:
    """Whether a sign-flip test of n items, Holm-corrected over `rows` rows, can ever come out below `alpha`.

    It says what is possible when every item agrees, not what is likely.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    return n >= 2 and smallest_p(n, rows, flips=flips, exact_up_to=exact_up_to, alpha=alpha) * rows < alpha


def items_needed(rows: int, alpha: float = 0.05, *, flips: int = 100_000, exact_up_to: int = EXACT_UP_TO) -> int:
    """The smallest n for which `can_reject` holds; there always is one, because the random flips grow with the rows."""
    n = 2
    while not can_reject(n, rows, alpha, flips=flips, exact_up_to=exact_up_to):
        n += 1
    return n


def _random_flips(rows: int, flips: int, alpha: float) -> int:
    if flips < 1:
        raise ValueError(f"flips must be at least 1, got {flips}")
    if not 0 < alpha < 1:
        raise BadStudy(f"alpha must lie between 0 and 1, as 0.05 does; got {alpha}")
    return max(flips, math.ceil(4 * rows / alpha))


# ---- families --------------------------------------------------------------------------------------------------------


def holm(p: Float[np.ndarray, " rows"]) -> Float64[np.ndarray, " rows"]:
    """Holm's step-down adjusted p, against any false rejection in the family. NaN stays NaN and does not count."""
    order, ranked = _family(p)
    scaled = ranked * np.arange(len(ranked), 0, -1)
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def benjamini_hochberg(p: Float[np.ndarray, " rows"]) -> Float64[np.ndarray, " rows"]:
    """Benjamini and Hochberg's step-up adjusted p, against the share of false rejections. NaN as in `holm`."""
    order, ranked = _family(p)
    # divided before multiplied: n/n is then exactly 1, and the largest p stays what it was
    scaled = ranked * (len(ranked) / np.arange(1, len(ranked) + 1))
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return adjusted


def _family(p: Float[np.ndarray, " rows"]) -> tuple[Int[np.ndarray, " known"], Float64[np.ndarray, " known"]]:
    """Where the p that are not NaN stand, smallest first, and their values."""
    if np.any((p < 0) | (p > 1)):
        raise ValueError(f"p must lie in 0 to 1 or be NaN; got {p[(p < 0) | (p > 1)][0]}")
    order = np.argsort(p, kind="stable")[: int(np.count_nonzero(~np.isnan(p)))]  # NaN sort last
    return order, p[order].astype(np.float64)


# ---- verdicts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Margins:
    """How far from 1 a share must lie to be called changed, and how near to be called unchanged."""

    drop: float = 0.95
    rise: float = 1.05
    same: tuple[float, float] = (0.9, 1.1)

    def __post_init__(self) -> None:
        # comparisons are written so that NaN fails them
        if not 0 < self.drop <= 1:
            raise BadStudy(f"margin drop must lie above 0 and not above 1, as 0.95 does; got {self.drop}")
        if not 1 <= self.rise < math.inf:
            raise BadStudy(f"margin rise must be finite and at least 1, as 1.05 is; got {self.rise}")
        low, high = self.same
        if not (0 < low <= 1 <= high < math.inf and low < high):
            raise BadStudy(f"margin same must be two finite shares around 1, as (0.9, 1.1) are; got ({low}, {high})")

    def verdict(self, lo: float, hi: float) -> Verdict:
        """What an interval [lo, hi] of a retained share says; NaN bounds say nothing, which is *undecided*.

        *drops*: hi < drop. *rises*: lo > rise. *unchanged*: same[0] ≤ lo and hi ≤ same[1]. Checked in this order, because a narrow interval
        at 0.93 lies inside `same` but is a drop.
        """
        if lo > hi:
            raise ValueError(f"an interval runs from lo to hi; got lo = {lo} above hi = {hi}")
        if math.isnan(lo) or math.isnan(hi):
            return "undecided"
        if hi < self.drop:
            return "drops"
        if lo > self.rise:
            return "rises"
        if self.same[0] <= lo and hi <= self.same[1]:
            return "unchanged"
        return "undecided"
