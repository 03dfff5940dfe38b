"""One comparison in many specifications: each by itself, all of them jointly, and what each setting moves (docs/multiverse.md).

A row is an item, a column a specification; every number is the item's change against `none` there. NaN: the item has no value.
Specifications share their items, so they are not independent. The joint test flips the sign of an item's changes in all specifications at
once, which keeps what they have in common (Simonsohn, Simmons & Nelson 2020, Nature Human Behaviour 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float, Float64

from mless.errors import BadData
from mless.stats.effects import equivalence_of_means
from mless.stats.intervals import interval_of_moments, mean_intervals
from mless.stats.planning import ChangeVerdict
from mless.stats.shares import sign_flip

#: Random sign patterns of the joint test: a p of 0.05 is then known to about 0.004.
JOINT_FLIPS = 10_000
#: With so few items all patterns are taken instead.
_ALL_PATTERNS_UP_TO = 12
#: Sums closer than this, as a share of the sum of all |changes|, are equal.
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Specified:
    """One specification by itself, as a paper that reports only this one would: no correction for the others."""

    n: int
    delta: float
    lo: float
    hi: float
    p: float
    skewed: bool
    verdict: ChangeVerdict


@dataclass(frozen=True, slots=True)
class Joint:
    """All specifications at once. `rises_by_chance` and `rises_limit` are mean and 95 % quantile of the number that rise where nothing has an effect.

    `p_rises`: where nothing has an effect, so many or more rise; `p_drops` likewise. `p_either` is for a side that is chosen by looking: so many
    rise, or so many drop. `p_median`: the median Δ is as far from 0, on either side.
    """

    n: int
    specifications: int
    rises: int
    drops: int
    equivalent: int
    undecided: int
    median: float
    lowest: float
    highest: float
    p_median: float
    p_rises: float
    p_drops: float
    p_either: float
    rises_by_chance: float
    rises_limit: int


@dataclass(frozen=True, slots=True)
class SettingEffect:
    """What one setting moves: the mean Δ at each of its values with the other settings balanced, and the largest difference between two.

    `p`: where the setting moves no item, the range is as large. `turned` of `pairs` specifications that differ in this setting alone have
    different verdicts.
    """

    values: Mapping[str, float]
    range: float
    p: float
    turned: int
    pairs: int


def each_specification(
    changes: Float[np.ndarray, "items specifications"],
    margin: float,
    rng: np.random.Generator,
    *,
    alpha: float = 0.05,
    flips: int = 100_000,
) -> list[Specified]:
    """Δ with its interval, p of the sign-flip test, and the verdict of every specification.

    *rises* and *drops*: p ≤ alpha, and the interval leaves out 0. *equivalent*: the two one-sided tests against ±margin reject. A change
    smaller than the margin would not matter.
    """
    values = _checked(changes)
    found = mean_intervals(values, 1 - alpha)
    p = sign_flip(values, rng, flips=flips, alpha=alpha).p
    same = equivalence_of_means(values, margin)
    rows: list[Specified] = []
    for at in range(values.shape[1]):
        mean, lo, hi = (float(one[at]) for one in (found.mean, found.lo, found.hi))
        verdict: ChangeVerdict = "undecided"
        if p[at] <= alpha and (lo > 0 or hi < 0):
            verdict = "rises" if mean > 0 else "drops"
        elif same[at] <= alpha:
            verdict = "equivalent"
        rows.append(Specified(int(found.n[at]), mean, lo, hi, float(p[at]), bool(found.skewed[at]), verdict))
    return rows


def joint_test(
    changes: Float[np.ndarray, "items specifications"],
    found: Sequence[Specified],
    rng: np.random.Generator,
    *,
    alpha: float = 0.05,
    flips: int = JOINT_FLIPS,
) -> Joint:
    """How many specifications rise and how far their median is from 0, against what chance gives with the same items and the same overlap.

    The null: no specification has an effect, so an item's changes, all together, are as likely with the other sign. A pattern's verdicts
    are those of `each_specification`.
    """
    values = _checked(changes)
    count = values.shape[1]
    if len(found) != count:
        raise BadData(f"a row for each of {count} specifications expected, got {len(found)}")
    verdicts = [one.verdict for one in found]
    means = np.array([one.delta for one in found], np.float64)
    tally = {name: verdicts.count(name) for name in ("rises", "drops", "equivalent", "undecided")}
    ends = [float(pick(means)) if count else math.nan for pick in (np.median, np.min, np.max)]
    used = int((~np.isnan(values)).any(axis=1).sum())
    if used < 2 or not count:
        return Joint(used, count, **tally, median=ends[0], lowest=ends[1], highest=ends[2], p_median=math.nan, p_rises=math.nan,
                     p_drops=math.nan, p_either=math.nan, rises_by_chance=math.nan, rises_limit=0)  # fmt: skip
    flipped = _Flipped.of(values, rng, flips)
    up, down = flipped.significant(alpha)
    rises, drops = up.sum(axis=1), down.sum(axis=1)
    medians = np.abs(np.median(flipped.means, axis=1))
    tie = _TIE * float(np.abs(flipped.scale).max())
    return Joint(
        used,
        count,
        **tally,
        median=ends[0],
        lowest=ends[1],
        highest=ends[2],
        p_median=flipped.share(medians >= abs(ends[0]) - tie),
        p_rises=flipped.share(rises >= tally["rises"]),
        p_drops=flipped.share(drops >= tally["drops"]),
        p_either=flipped.share(np.maximum(rises, drops) >= max(tally["rises"], tally["drops"])),
        rises_by_chance=float(rises.mean()),
        rises_limit=int(np.quantile(rises, 0.95, method="higher")),
    )


@dataclass(frozen=True, slots=True)
class _Flipped:
    """What items with other signs give: means, and sums of cubes for the skewness. Squares keep their sums."""

    means: Float64[np.ndarray, "patterns specifications"]
    cubes: Float64[np.ndarray, "patterns specifications"]
    squares: Float64[np.ndarray, " specifications"]
    n: np.ndarray
    #: The mean of each specification's |changes|.
    scale: Float64[np.ndarray, " specifications"]
    complete: bool

    @classmethod
    def of(cls, values: Float64[np.ndarray, "items specifications"], rng: np.random.Generator, flips: int) -> _Flipped:
        there = ~np.isnan(values)
        n = there.sum(axis=0)
        used = np.where(there, values, 0.0)
        complete = len(values) <= _ALL_PATTERNS_UP_TO
        blocks = list(_patterns(len(values), rng, flips, complete=complete))
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.concatenate([block @ used for block in blocks]) / n
            cubes = np.concatenate([block @ used**3 for block in blocks])
            return cls(means, cubes, (used**2).sum(axis=0), n, np.abs(used).sum(axis=0) / n, complete)

    def share(self, reached: Bool[np.ndarray, " patterns"]) -> float:
        """p: the observed signs are one of all patterns, and are added to random ones."""
        count = int(np.count_nonzero(reached))
        return count / len(reached) if self.complete else (count + 1) / (len(reached) + 1)

    def significant(
        self, alpha: float
    ) -> tuple[Bool[np.ndarray, "patterns specifications"], Bool[np.ndarray, "patterns specifications"]]:
        """Where a specification would rise or drop, had the items these signs: the rule of `each_specification`."""
        size = np.abs(self.means)
        most = int(alpha * len(size))
        # p ≤ alpha: at most so many patterns reach as far as this one, itself included
        edge = np.sort(size, axis=0)[-most - 1] if most < len(size) else np.zeros(size.shape[1])
        far = size > edge + _TIE * self.scale
        at, which = np.nonzero(far)
        lo, hi = self._interval(at, which, 1 - alpha)
        up, down = np.zeros(size.shape, np.bool_), np.zeros(size.shape, np.bool_)
        up[at, which], down[at, which] = lo > 0, hi < 0
        return up, down

    def _interval(
        self, at: np.ndarray, which: np.ndarray, level: float
    ) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
        """`mean_intervals` from sums: central moments of the flipped items."""
        n, mean = self.n[which], self.means[at, which]
        second = self.squares[which] / n - mean**2
        third = self.cubes[at, which] / n - 3 * mean * self.squares[which] / n + 2 * mean**3
        # rounding must not make a spread of items that are all equal
        second = np.where(second <= 1e-12 * self.squares[which] / n, 0.0, second)
        return interval_of_moments(mean, second, third, n, level)


def _patterns(
    items: int, rng: np.random.Generator, flips: int, *, complete: bool
) -> Iterator[Float64[np.ndarray, "patterns items"]]:
    """Signs of the items: all patterns, or random ones some at a time."""
    if complete:
        numbers = np.arange(2**items)[:, None]
        yield 1.0 - 2.0 * ((numbers >> np.arange(items)) & 1)
        return
    at_once = max(1, (1 << 21) // items)
    for start in range(0, flips, at_once):
        yield 1.0 - 2.0 * rng.integers(0, 2, (min(at_once, flips - start), items))


def setting_effects(
    changes: Float[np.ndarray, "items specifications"],
    settings: Mapping[str, Sequence[str | None]],
    verdicts: Sequence[str],
    rng: np.random.Generator,
    *,
    flips: int = JOINT_FLIPS,
) -> dict[str, SettingEffect]:
    """What each setting with two or more values moves. `settings` gives its value in every specification, None where it has none there.

    Means are those of an additive model, so a grid with gaps is balanced too; in a full grid they are plain means. Where a setting changes only
    together with another one, nobody can tell which of them it is: then there is no number. Items that lack a value in some specification are
    left out.
    """
    values = _checked(changes)
    if any(len(one) != values.shape[1] for one in settings.values()):
        raise BadData(f"settings: a value for each of {values.shape[1]} specifications expected")
    levels = {name: [one for one in dict.fromkeys(given) if one is not None] for name, given in settings.items()}
    levels = {name: some for name, some in levels.items() if len(some) > 1}
    if not levels:
        return {}
    known = values[~np.isnan(values).any(axis=1)]
    weights = _balanced(settings, levels)
    signs = (
        list(_patterns(len(known), rng, flips, complete=len(known) <= _ALL_PATTERNS_UP_TO)) if len(known) > 1 else []
    )
    # weights are computed, so equal changes give means that differ in the last digits
    noise = 1e-12 * float(np.abs(known).max(initial=0.0))
    found: dict[str, SettingEffect] = {}
    for name, some in levels.items():
        turned, pairs = _turned(name, settings, verdicts)
        if name not in weights:
            found[name] = SettingEffect(dict.fromkeys(some, math.nan), math.nan, math.nan, turned, pairs)
            continue
        by_item = known @ weights[name].T
        means = by_item.mean(axis=0) if len(known) else np.full(len(some), math.nan)
        away = by_item - by_item.mean(axis=1, keepdims=True)
        away[np.abs(away) <= noise] = 0.0
        width = float(np.ptp(means)) if not len(known) or np.ptp(means) > noise else 0.0
        p = _range_p(away, signs, complete=len(known) <= _ALL_PATTERNS_UP_TO) if signs else math.nan
        found[name] = SettingEffect(dict(zip(some, means.tolist(), strict=True)), width, p, turned, pairs)
    return found


def _balanced(
    settings: Mapping[str, Sequence[str | None]], levels: Mapping[str, Sequence[str]]
) -> dict[str, Float64[np.ndarray, "values specifications"]]:
    """Weights of the specifications in each value's mean: least squares with effects that sum to 0 in each setting.

    A setting is missing whose effects cannot be told from another one's.
    """
    columns = [np.ones(len(next(iter(settings.values()))))]
    places: dict[str, slice] = {}
    for name, some in levels.items():
        start = len(columns)
        marks = np.array([[value == one for one in some] for value in settings[name]], np.float64)
        columns += list((marks[:, :-1] - marks[:, -1:]).T)
        places[name] = slice(start, len(columns))
    design = np.stack(columns, axis=1)
    solved = np.linalg.pinv(design)
    # What the least squares can see of each coefficient: itself, unless another combination of settings looks the same.
    seen = solved @ design
    own = np.eye(len(columns))
    return {
        name: solved[0] + np.concatenate([solved[place], -solved[place].sum(axis=0, keepdims=True)])
        for name, place in places.items()
        if np.allclose(seen[place], own[place], atol=1e-8)
    }


def _range_p(
    away: Float64[np.ndarray, "items values"], signs: Sequence[Float64[np.ndarray, "patterns items"]], *, complete: bool
) -> float:
    """Sign flips of each item's deviations from its own mean over the values: has the range come by chance?"""
    seen = float(np.ptp(away.sum(axis=0)))
    tie = _TIE * float(np.abs(away).sum())
    ranges = np.concatenate([np.ptp(block @ away, axis=1) for block in signs])
    count = int(np.count_nonzero(ranges >= seen - tie))
    return count / len(ranges) if complete else (count + 1) / (len(ranges) + 1)


def _turned(name: str, settings: Mapping[str, Sequence[str | None]], verdicts: Sequence[str]) -> tuple[int, int]:
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for at, verdict in enumerate(verdicts):
        alike.setdefault(tuple(one[at] for other, one in settings.items() if other != name), []).append(verdict)
    pairs = [pair for some in alike.values() for pair in combinations(some, 2)]
    return sum(one != other for one, other in pairs), len(pairs)


def _checked(changes: Float[np.ndarray, "items specifications"]) -> Float64[np.ndarray, "items specifications"]:
    if np.isinf(changes).any():
        item, which = (int(one[0]) + 1 for one in np.nonzero(np.isinf(changes)))
        raise BadData(
            f"specification {which}, item {item} (numbered from 1): the value is infinite; an item without a value is to be NaN"
        )
    return changes.astype(np.float64)
