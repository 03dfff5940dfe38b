"""A named filler among arbitrary edits: items × edits, both of them samples (docs/statistics.md, *Items and edits*).

Every number of `edits` is the difference from `none` that one edit makes to one item. Edits are drawn from many that could have been tried,
as items are; a named filler is fixed. So what is said of it, beside an edit in general, has to hold over both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

from mless.errors import BadData
from mless.stats.intervals import moments, reach_of, sample_skewness, tilt
from mless.stats.paired import normal_quantile, same_items

#: Half an edit below and half an edit above all others keep a percentile's interval open where all edits lie on one side.
_PSEUDO = 0.5


@dataclass(frozen=True, slots=True)
class Placed:
    """A named filler among the edits, over the items that have a value under it and under every edit.

    `specific` is its Δ minus the mean Δ of the edits. `percentile` is the share of edits whose mean Δ lies below, ties counting half. Both
    intervals hold over items and edits. `p` = (1 + edits at least as far from the edits' mean) / (edits + 1).
    """

    n: int
    delta: float
    specific: float
    specific_lo: float
    specific_hi: float
    percentile: float
    percentile_lo: float
    percentile_hi: float
    p: float


@dataclass(frozen=True, slots=True)
class Crossed:
    """The mean Δ of an arbitrary edit, with an interval over items and edits; how edits differ; and where named fillers lie.

    `sd` is the standard deviation between edits with the noise of finitely many items removed, `sd_seen` that of the means as they are.
    """

    n: int
    edits: int
    mean: float
    lo: float
    hi: float
    sd: float
    sd_seen: float
    means: Float64[np.ndarray, " edits"]
    placed: dict[str, Placed]


def place_among(
    edits: Float[np.ndarray, "items edits"],
    fillers: Mapping[str, Float[np.ndarray, " some"]],
    rng: np.random.Generator,
    *,
    level: float = 0.95,
    reps: int = 10_000,
) -> Crossed:
    """What an arbitrary edit does, and how each named filler differs from that.

    An item without a value under some edit is left out altogether, one without a value under a filler is left out for that filler.
    """
    normal_quantile(level)
    if reps < 1000:
        raise ValueError(f"reps must be at least 1,000 for the tails to be there, got {reps}")
    if not edits.shape[1]:
        raise BadData("no edits: a named filler is placed among at least one arbitrary edit")
    table = _finite(edits, [f"edit {at + 1}" for at in range(edits.shape[1])])
    there = np.asarray(~np.isnan(table).any(axis=1))
    # away from one of the values, so that values that are all equal differ by exactly 0
    origin = float(table[there][0, 0]) if there.any() else 0.0
    table = table - origin
    known = table[there]
    mean, lo, hi = (origin + one for one in _interval(known, None, level))
    means = origin + known.mean(axis=0) if len(known) else np.full(table.shape[1], np.nan)
    seen, noise = _between(known)
    # the same random numbers for each, so that further fillers change nothing
    seed = int(rng.integers(2**63))
    placed = {
        name: _place(table, there, values, name, origin, np.random.default_rng(seed), level, reps)
        for name, values in fillers.items()
    }
    sd = math.nan if math.isnan(seen) else math.sqrt(max(seen - noise, 0.0))
    return Crossed(len(known), table.shape[1], mean, lo, hi, sd, math.sqrt(seen), means, placed)


def _place(
    table: Float64[np.ndarray, "items edits"],
    there: Bool[np.ndarray, " items"],
    values: Float[np.ndarray, " some"],
    name: str,
    origin: float,
    rng: np.random.Generator,
    level: float,
    reps: int,
) -> Placed:
    same_items(len(table), len(values))
    mine = _finite(values[:, None], [name])[:, 0] - origin
    both = there & ~np.isnan(mine)
    known, filler = table[both], mine[both]
    n, count = known.shape
    if not n:
        return Placed(0, *[math.nan] * 8)
    means, delta = known.mean(axis=0), float(filler.mean())
    specific, lo, hi = _interval(known, filler, level)
    centre = float(means.mean())
    # far enough from rounding that an edit equal to the filler counts as one
    slack = 1e-12 * max(float(np.abs(known).max()), float(np.abs(filler).max()))
    far = int(np.count_nonzero(np.abs(means - centre) >= abs(delta - centre) - slack))
    away = means - delta
    share = float((away < -slack).sum() + 0.5 * (np.abs(away) <= slack).sum()) / count
    ends = _percentile_interval(known, filler, share, rng, level, reps)
    return Placed(n, origin + delta, specific, lo, hi, share, *ends, (1 + far) / (count + 1))


def _interval(
    edits: Float64[np.ndarray, "items edits"], filler: Float64[np.ndarray, " items"] | None, level: float
) -> tuple[float, float, float]:
    """The mean over items and edits, or a filler's mean minus that, with an interval over both.

    With d = a + b + c for the effects of item, edit and both together, the variance of the mean is σ_a²/n + σ_b²/K + σ_c²/(nK). The items'
    means vary by σ_a² + σ_c²/K, the edits' means by σ_b² + σ_c²/n. So the sum of their squared standard errors holds σ_c²/(nK) twice, and it
    is subtracted once. Degrees of freedom by Satterthwaite; skewness of items and of edits as in `intervals`.
    """
    n, count = edits.shape
    by_item = edits.mean(axis=1) if filler is None else filler - edits.mean(axis=1)
    value = float(by_item.mean()) if n else math.nan
    if n < 2 or count < 2:
        return value, math.nan, math.nan
    by_edit = edits.mean(axis=0) if filler is None else -edits.mean(axis=0)
    together = _both(edits) / (n * count)
    parts = [(moments(one[:, None]), one.shape[0]) for one in (by_item, by_edit)]
    errors = [float(found[1][0]) ** 2 for found, _ in parts]
    variance = max(sum(errors) - together, *errors)
    if variance == 0:
        return value, value, value
    free = variance**2 / (
        errors[0] ** 2 / (n - 1) + errors[1] ** 2 / (count - 1) + together**2 / ((n - 1) * (count - 1))
    )
    # the skewness of a sum of independent means: third moments add up
    a = np.zeros(1)
    for (_, error, size, deviations), _ in parts:
        a += tilt(sample_skewness(deviations, size), size) * (error**2 / variance) ** 1.5
    from scipy.special import stdtrit

    # Subtracting a part can only lower the degrees of freedom by chance, so they are at least those of the smaller sample. Of two items or edits
    # Satterthwaite's are too many: one is left.
    fewest = min(n, count)
    t = np.array([float(stdtrit(1 if fewest == 2 else max(free, fewest - 1), (1 + level) / 2))])
    below, above = (float(side[0]) * math.sqrt(variance) for side in reach_of(a, t))
    return value, value - below, value + above


def _both(edits: Float64[np.ndarray, "items edits"]) -> float:
    """The mean square of what neither the item nor the edit explains."""
    n, count = edits.shape
    rest = edits - edits.mean(axis=1, keepdims=True) - edits.mean(axis=0, keepdims=True) + edits.mean()
    return float((rest**2).sum()) / ((n - 1) * (count - 1))


def _between(edits: Float64[np.ndarray, "items edits"]) -> tuple[float, float]:
    """The variance of the edits' means, and the part of it that comes from having finitely many items."""
    n, count = edits.shape
    if n < 2 or count < 2:
        return math.nan, math.nan
    return float(edits.mean(axis=0).var(ddof=1)), _both(edits) / n


def _percentile_interval(
    edits: Float64[np.ndarray, "items edits"],
    filler: Float64[np.ndarray, " items"],
    share: float,
    rng: np.random.Generator,
    level: float,
    reps: int,
) -> tuple[float, float]:
    """By drawing items and edits anew, of the share of all edits that lie truly below; it holds the share seen.

    Other items would move the filler beside the edits' mean: by how much is drawn as the interval of `specific` has it over items, skewness
    included. The edits' means lie further apart than the edits do, because items are few. They are drawn together by what that leaves of their
    spread, itself drawn as far as K means tell it. Then the edits get random weights, with half an edit more at either end; as only their order
    beside the filler counts, that is a draw from a beta distribution.
    """
    n, count = edits.shape
    seen, noise = _between(edits)
    if math.isnan(seen):
        return math.nan, math.nan
    mean, error, size, deviations = moments((filler - edits.mean(axis=1))[:, None])
    t = rng.standard_t(n - 1, reps)
    below, above = reach_of(np.repeat(tilt(sample_skewness(deviations, size), size), reps), np.abs(t))
    place = mean + error * np.where(t > 0, -below, above)
    left = 1 - (noise / seen if seen else 0.0) * rng.chisquare(count - 1, reps) / (count - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        place = np.nan_to_num(place / np.sqrt(np.maximum(left, 0.0)))
    means = edits.mean(axis=0)
    ordered = np.sort(means - means.mean())
    under = (np.searchsorted(ordered, place) + np.searchsorted(ordered, place, "right")) / 2  # ties half
    drawn = rng.beta(under + _PSEUDO, count - under + _PSEUDO)
    lo, hi = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return min(float(lo), share), max(float(hi), share)


def _finite(values: Float[np.ndarray, "items rows"], names: list[str]) -> Float64[np.ndarray, "items rows"]:
    bad = np.argwhere(np.isinf(values))
    if len(bad):
        item, at = bad[0]
        raise BadData(
            f"{names[at]}, item {item + 1} (numbered from 1): the value is {values[item, at]}, expected a finite number ({len(bad)} such); an "
            "item without a value is to be NaN, which leaves it out"
        )
    return values.astype(np.float64)
