"""How an effect depends on a dose: bands that hold for all doses at once, slope, peak, and the best dose on other items (docs/dose.md).

A row is an item, a column a dose; every number is the item's difference from dose 0. Items with a value that is missing (NaN) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

from mless.errors import BadData
from mless.stats.intervals import mean_intervals, moments, reach, sample_skewness, tilt
from mless.stats.shares import holm, larger_p

#: Random signs, or samples of items, for the largest t: its 97.5 % quantile is then known to about 0.05 (normal items) or 0.2 (24 lognormal ones).
_DRAWS = 4_000
#: Where few items change, many samples hold none of them and so do not vary. A sample counts as having at least this share of all items' variance.
_LEAST = 0.1
#: Signs leave the sum of squares as it is, so t is what it would be observed as. This only keeps items that are all alike from a division by 0.
_NOT_ZERO = 1e-30
#: Numbers drawn at a time, in arrays of 16 MiB, whatever the number of items.
_DRAWN_AT_ONCE = 1 << 21
#: Fewer items than this are not drawn again: too often all that are drawn would be alike.
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Slope:
    """The mean over items of each item's slope over log2(1 + dose), dose 0 included: the change per doubling."""

    value: float
    lo: float
    hi: float
    p: float


@dataclass(frozen=True, slots=True)
class Peak:
    """Whether some dose in between is better than none and than the largest dose. `dose` is the best one seen, 0 where there is none."""

    dose: int
    p: float


@dataclass(frozen=True, slots=True)
class BestDose:
    """The dose with the largest mean on dev items, and what it does to the others."""

    dose: int
    dev_items: int
    dev: float
    items: int
    value: float
    lo: float
    hi: float
    p: float


@dataclass(frozen=True, slots=True)
class DoseCurve:
    """Means by dose. `lo` and `hi` hold for one dose, `lo_all` and `hi_all` for all of them at once; `p_adjusted` is Holm's over the doses."""

    n: int
    mean: Float64[np.ndarray, " doses"]
    lo: Float64[np.ndarray, " doses"]
    hi: Float64[np.ndarray, " doses"]
    lo_all: Float64[np.ndarray, " doses"]
    hi_all: Float64[np.ndarray, " doses"]
    skewed: Bool[np.ndarray, " doses"]
    p: Float64[np.ndarray, " doses"]
    p_adjusted: Float64[np.ndarray, " doses"]
    slope: Slope
    peak: Peak


def dose_curve(
    changes: Float[np.ndarray, "items doses"],
    doses: Sequence[int],
    rng: np.random.Generator,
    *,
    level: float = 0.95,
    flips: int = 100_000,
) -> DoseCurve:
    """The curve of one filler at one place. `doses` are above 0 and rise; dose 0 is the baseline."""
    known = _complete(changes, doses)
    found = mean_intervals(known, level)
    lo_all, hi_all = simultaneous(known, rng, level)
    p = larger_p(known, rng, flips=flips, alpha=1 - level)
    slope = _slope(known, doses, rng, level, flips)
    return DoseCurve(
        len(known),
        found.mean,
        found.lo,
        found.hi,
        lo_all,
        hi_all,
        found.skewed,
        p,
        holm(p),
        slope,
        find_peak(known, doses, rng),
    )


def simultaneous(
    values: Float64[np.ndarray, "items rows"], rng: np.random.Generator, level: float = 0.95
) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    """Limits for the means of all rows at once: a bootstrap-t of the largest t over rows, each side by itself.

    Items are drawn with replacement. Where they are skewed, t reaches further on one side than on the other, and the samples show by how
    much. Neighbouring doses move together, so this is narrower than Bonferroni's limits, which suppose the worst; below 8 items it is those.
    It is never narrower than for one row.
    """
    mean, error, n, deviations = moments(values)
    rows, items = values.shape[1], len(values)
    if items < 2 or not rows:
        nothing = np.full(rows, np.nan)
        return nothing, nothing.copy()
    skewness = sample_skewness(deviations, n)
    if items < _FEWEST:
        below, above = reach(skewness, n, 1 - (1 - level) / rows)
    else:
        below, above = reach(skewness, n, level)
        most, least = _extremes(deviations, rng)
        below, above = (
            np.fmax(below, np.quantile(most, (1 + level) / 2)),
            np.fmax(above, -np.quantile(least, (1 - level) / 2)),
        )
    return mean - below * error, mean + above * error


def best_dose(
    changes: Float[np.ndarray, "items doses"],
    doses: Sequence[int],
    dev: Bool[np.ndarray, " items"],
    rng: np.random.Generator,
    *,
    level: float = 0.95,
    flips: int = 100_000,
) -> BestDose:
    """The best dose of the dev items, judged on the others. One dose is judged there, so its p needs no correction for those tried."""
    _check(changes, doses)
    there = ~np.isnan(changes).any(axis=1)
    chosen_on, judged_on = (changes[there & side].astype(np.float64) for side in (dev, ~dev))
    if not len(chosen_on) or not len(judged_on):
        return BestDose(0, len(chosen_on), math.nan, len(judged_on), *[math.nan] * 4)
    means = chosen_on.mean(axis=0)
    at = int(means.argmax())
    mine = judged_on[:, [at]]
    found = mean_intervals(mine, level)
    p = float(larger_p(mine, rng, flips=flips, alpha=1 - level)[0])
    numbers = float(found.mean[0]), float(found.lo[0]), float(found.hi[0]), p
    return BestDose(doses[at], len(chosen_on), float(means[at]), len(judged_on), *numbers)


def _slope(
    known: Float64[np.ndarray, "items doses"], doses: Sequence[int], rng: np.random.Generator, level: float, flips: int
) -> Slope:
    x = np.log2(1 + np.array([0, *doses], np.float64))
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    each = (known @ weights[1:])[:, None]  # dose 0 adds 0: it is the baseline
    found = mean_intervals(each, level)
    p = float(larger_p(each, rng, flips=flips, alpha=1 - level)[0])
    return Slope(float(found.mean[0]), float(found.lo[0]), float(found.hi[0]), p)


def find_peak(known: Float64[np.ndarray, "items doses"], doses: Sequence[int], rng: np.random.Generator) -> Peak:
    """A dose in between has to be better than both ends, so the smaller of its two t counts; of these the largest is the statistic.

    If no dose is better than both ends, each has at least one comparison without an effect. So the statistic is at most the largest t of
    these, and p is the share of random signs whose largest t over all comparisons reaches it.
    """
    if len(known) < 2 or len(doses) < 2:
        return Peak(0, math.nan)
    inner = known[:, :-1]
    both = np.concatenate([inner, inner - known[:, -1:]], axis=1)
    mean, error, n, deviations = moments(both)
    if ((error == 0) & (mean != 0)).any():
        return Peak(0, math.nan)  # items that all change alike have no chance to compare with
    a = tilt(sample_skewness(deviations, n), n)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        t = mean / error
        # Skewed items: as `intervals.tail_p` has it. Where nothing changes there is nothing to compare.
        t = np.nan_to_num(np.fmin(t, t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6), nan=0.0, posinf=0.0, neginf=0.0)
    smaller = np.minimum(*np.split(t, 2))
    at = int(smaller.argmax())
    if smaller[at] <= 0:
        return Peak(0, 1.0)
    largest = _largest_t(deviations, rng)
    return Peak(doses[at], float((1 + np.count_nonzero(largest >= smaller[at])) / (len(largest) + 1)))


def _largest_t(
    deviations: Float64[np.ndarray, "items rows"], rng: np.random.Generator
) -> Float64[np.ndarray, " draws"]:
    """The largest t over rows when every item's deviations keep or change their sign together."""
    n = len(deviations)
    squares = (deviations**2).sum(axis=0)
    varies = squares > 0
    if not varies.any():
        return np.zeros(1)
    used, squares = deviations[:, varies], squares[varies]
    drawn: list[Float64[np.ndarray, " draws"]] = []
    for count in _at_a_time(n):
        signs = rng.integers(0, 2, (count, n)) * 2.0 - 1
        drawn.append(_t_of(signs @ used / n, squares, _NOT_ZERO * squares, n).max(axis=1))
    return np.concatenate(drawn)


def _extremes(
    deviations: Float64[np.ndarray, "items rows"], rng: np.random.Generator
) -> tuple[Float64[np.ndarray, " draws"], Float64[np.ndarray, " draws"]]:
    """The largest and the smallest t over rows, in samples of the items with replacement."""
    n = len(deviations)
    squares = (deviations**2).sum(axis=0)
    varies = squares > 0
    if not varies.any():
        return np.zeros(1), np.zeros(1)
    used, squares = deviations[:, varies], squares[varies]
    most: list[Float64[np.ndarray, " draws"]] = []
    least: list[Float64[np.ndarray, " draws"]] = []
    for count in _at_a_time(n):
        # how often each item is drawn; the same as a multinomial draw, many times as fast
        places = rng.integers(0, n, (count, n)) + n * np.arange(count)[:, None]
        times = np.bincount(places.ravel(), minlength=count * n).reshape(count, n).astype(np.float64)
        t = _t_of(times @ used / n, times @ used**2, _LEAST * squares, n)
        most.append(t.max(axis=1))
        least.append(t.min(axis=1))
    return np.concatenate(most), np.concatenate(least)


def _at_a_time(items: int) -> list[int]:
    at_once = max(1, _DRAWN_AT_ONCE // items)
    return [min(at_once, _DRAWS - start) for start in range(0, _DRAWS, at_once)]


def _t_of(
    means: Float64[np.ndarray, "draws rows"],
    sums: Float64[np.ndarray, "*draws rows"],
    least: Float64[np.ndarray, " rows"],
    n: int,
) -> Float64[np.ndarray, "draws rows"]:
    """t of drawn deviations, from their means and sums of squares; these are at least `least`, because draws may not vary at all."""
    return means / np.sqrt(np.maximum(sums - n * means**2, least) / (n - 1) / n)


def _complete(changes: Float[np.ndarray, "items doses"], doses: Sequence[int]) -> Float64[np.ndarray, "some doses"]:
    _check(changes, doses)
    return changes[~np.isnan(changes).any(axis=1)].astype(np.float64)


def _check(changes: Float[np.ndarray, "items doses"], doses: Sequence[int]) -> None:
    if not len(doses):
        raise BadData("no doses: a curve has at least one above 0")
    if len(doses) != changes.shape[1] or list(doses) != sorted(set(doses)) or doses[0] < 1:
        raise BadData(
            f"doses: one for each of {changes.shape[1]} columns expected, above 0 and rising; got {', '.join(map(str, doses))}"
        )
    bad = np.argwhere(np.isinf(changes))
    if len(bad):
        item, at = bad[0]
        raise BadData(
            f"dose {doses[at]}, item {item + 1} (numbered from 1): the value is {changes[item, at]}, expected a finite number ({len(bad)} such); an "
            "item without a value is to be NaN, which leaves it out"
        )
