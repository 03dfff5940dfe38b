"""Paired effects of conditions on a value per item, such as nats: interval, tests, equivalence, verdict (docs/statistics.md).

Every item is compared with itself under `none`. NaN: the item has no value there, and is left out of that condition only. Fewer than two
items (or clusters of related items) give no interval and no p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float64

from mless.errors import BadData, BadStudy
from mless.stats.intervals import interval_p, mean_intervals, moments, reach, sample_skewness, student, tail_p, tilt
from mless.stats.paired import same_items
from mless.stats.planning import ChangeVerdict, change_verdict, first_with, items_for_mean, smallest_detectable_mean
from mless.stats.shares import holm, sign_flip, smallest_p

Keys = Sequence[str] | Sequence[int]

#: Φ⁻¹(0.8): a cautious plan takes the spread that is exceeded with a chance of a fifth, given the pilot.
_CAUTION = 0.8416

#: Equivalence is a claim about one side at a time, so it cannot balance a tail that items show too little of with the other side. The sample's
#: skewness is multiplied by this. With 1 it was claimed at the margin in up to 8 % of sets of 24 and more skewed items, with 1.5 in at most 5.1 %.
_ONE_SIDE = 1.5


@dataclass(frozen=True, slots=True)
class PairedEffect:
    """What a condition does to one metric, over the items that have a value under it and under `none`.

    `p` is the sign-flip test's, `p_interval` the p at which the interval ends at 0, `p_again` the larger of the two against the A/A control.
    `p_adjusted` is Holm's over the largest of them: all have to reject. `alpha` is the level for that p where no other condition has an
    effect, and `mde` the smallest effect that is then found with 80 % power. `skewed`: a few items decide the interval. The A/A control has
    only the first half.
    """

    n: int
    clusters: int
    value: float
    none: float
    delta: float
    lo: float
    hi: float
    skewed: bool
    p: float
    p_interval: float
    p_again: float = math.nan
    p_adjusted: float = math.nan
    alpha: float = math.nan
    equivalent_p: float = math.nan
    mde: float = math.nan
    verdict: ChangeVerdict | None = None


@dataclass(frozen=True, slots=True)
class PilotPlan:
    """How many items an effect takes if they vary as the pilot's; `cautious` if they vary as much as the pilot still allows."""

    items: int
    cautious: int
    sd: float
    pilot: int


@dataclass(frozen=True, slots=True)
class _Change:
    """The differences of one condition from one baseline (items, or scores of clusters), and its two tests."""

    scores: Float64[np.ndarray, " clusters"]
    p: float
    p_interval: float

    @property
    def largest(self) -> float:
        return math.nan if math.isnan(self.p) else max(self.p, self.p_interval)


def paired_effects(
    none: Float[np.ndarray, " items"],
    conditions: Mapping[str, Float[np.ndarray, " some"]],
    rng: np.random.Generator,
    *,
    margin: float,
    clusters: Keys | None = None,
    again: str | None = None,
    primary: str | None = None,
    flips: int = 100_000,
    alpha: float = 0.05,
) -> dict[str, PairedEffect]:
    """Every condition against `none` in one metric, which is the family that Holm's correction is over.

    `margin`: a change smaller than this would not matter, in the metric's unit. `clusters` gives related items a common key. `again` is the
    A/A control: it is in no family, and an effect has to be found against it too, and be larger than its own. `primary` is tested alone.
    """
    names = list(conditions)
    _check(names, margin, again, primary, alpha)
    base = _finite(none, "none")
    if not names:
        return {}
    values = {name: _finite(conditions[name], name, len(base)) for name in names}
    baselines = [base] if again is None else [base, values[again]]
    changes = _changes([values[name] - one for one in baselines for name in names], clusters, rng, flips, alpha)
    first = dict(zip(names, changes, strict=False))
    second = dict(zip(names, changes[len(names) :], strict=False))
    effects = {name: _by_itself(values[name], base, first[name], 1 - alpha) for name in names}
    by_itself = effects[again].delta if again is not None else 0.0
    for group in ([primary] if primary is not None else [], [name for name in names if name not in (again, primary)]):
        each = alpha / max(len(group), 1)
        claims = [np.fmax(first[name].largest, second[name].largest if second else math.nan) for name in group]
        for name, p in zip(group, holm(np.array(claims, np.float64)).tolist(), strict=True):
            mine, twice = first[name], second.get(name)
            same = float(equivalence_of_means(mine.scores[:, None], margin)[0])
            effects[name] = replace(
                effects[name],
                p_again=math.nan if twice is None else twice.largest,
                p_adjusted=p,
                alpha=each,
                equivalent_p=same,
                mde=_smallest(mine.scores, None if twice is None else twice.scores, each, flips),
                verdict=change_verdict(effects[name].delta, p, same, by_itself=by_itself, alpha=alpha),
            )
    return effects


def equivalence_of_means(scores: Float64[np.ndarray, "items rows"], margin: float) -> Float64[np.ndarray, " rows"]:
    """The larger p of the two one-sided tests against ±margin, by the limits of `mean_intervals` with more skewness.

    p ≤ α says that an interval of level 1 − 2α lies inside the margin. Differences that are all exactly 0 have p = 0. Where all are equal
    and not 0 there is no spread to judge by: NaN.
    """
    mean, error, n, deviations = moments(scores)
    a, free = _ONE_SIDE * tilt(sample_skewness(deviations, n), n), n - 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.maximum(tail_p((margin + mean) / error, a, free), tail_p((margin - mean) / error, -a, free))
    p[error == 0] = np.nan
    p[(error == 0) & (mean == 0)] = 0.0
    return p


def items_from_pilot(
    differences: Float[np.ndarray, " items"],
    effect: float,
    power: float = 0.8,
    alpha: float = 0.05,
    *,
    clusters: Keys | None = None,
) -> PilotPlan:
    """How many items find a mean difference of `effect` with `power`, from the differences that a pilot found, item by item.

    Of m conditions under Holm, `alpha` is α/m. With `clusters` it is the number of items in clusters as large as the pilot's.
    """
    known = _finite(differences, "the pilot")
    scores = cluster_scores(known[:, None], clusters)[0][:, 0]
    scores, items = scores[~np.isnan(scores)], int(np.count_nonzero(~np.isnan(known)))
    units = len(scores)
    if units < 4:
        raise BadData(
            f"a pilot of at least 4 items (or clusters) with a value expected, to see how they vary; got {units}"
        )
    away = scores - scores.mean()
    variance = float((away**2).sum()) / (units - 1)
    if variance == 0:
        raise BadData(
            f"all {units} differences of the pilot are {scores[0]:g}: nothing varies, so there is nothing to plan with; take other items or a "
            "larger pilot"
        )
    # the error of log s², by the pilot's own kurtosis
    kurtosis = units * float((away**4).sum()) / float((away**2).sum()) ** 2
    error = math.sqrt(max(kurtosis - (units - 3) / units, 0.0) / (units - 1))
    sd = math.sqrt(variance)
    size = items / units
    plain, cautious = (
        math.ceil(size * items_for_mean(effect, spread, power, alpha))
        for spread in (sd, sd * math.exp(_CAUTION * error / 2))
    )
    return PilotPlan(plain, cautious, sd, items)


def items_for_equal_means(margin: float, sd: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """How many items show with `power` that a mean difference lies within ±margin, if it is 0 and differences have this `sd`.

    Both one-sided tests have to reject: the chance of that is 2·Φ(√n·margin / sd − t) − 1, where t is Student's quantile at 1 − alpha.
    """
    if not (0 < margin < math.inf and 0 < sd < math.inf):
        raise BadStudy(f"margin and sd must be finite numbers above 0; got {margin} and {sd}")
    if not 0 < alpha < power < 1:
        raise BadStudy(f"power must lie between alpha and 1, and alpha above 0; got {power} and {alpha}")
    from scipy.special import ndtr, stdtrit

    def chance(n: int) -> float:
        return float(2 * ndtr(math.sqrt(n) * margin / sd - stdtrit(n - 1, 1 - alpha)) - 1)

    return first_with(power, chance)


def cluster_scores(
    differences: Float64[np.ndarray, "items rows"], clusters: Keys | None
) -> tuple[Float64[np.ndarray, "clusters rows"], Float64[np.ndarray, "clusters rows"]]:
    """Scores and sums of every cluster; without `clusters` both are the differences. NaN where a cluster has no item.

    The scores' mean is the mean over items, and their spread / √clusters is its standard error, to first order: with G clusters, N items
    and mean m, a cluster with n items of sum S has the score m + (S − n·m)·G/N.
    """
    if clusters is None:
        return differences, differences
    if len(clusters) != len(differences):
        raise BadData(f"clusters: a key for every item expected; got {len(clusters)} keys for {len(differences)} items")
    _, at = np.unique(np.asarray(clusters), return_inverse=True)
    there = ~np.isnan(differences)
    sums, away, sizes = np.zeros((3, int(at.max(initial=-1)) + 1, differences.shape[1]))
    # away from a column's first item: equal items then have scores without any spread
    origin = differences[there.argmax(axis=0), np.arange(differences.shape[1])] if len(differences) else 0.0
    np.add.at(sums, at, np.where(there, differences, 0.0))
    np.add.at(away, at, np.where(there, differences - origin, 0.0))
    np.add.at(sizes, at, there.astype(np.float64))
    known = sizes > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = away.sum(axis=0) / sizes.sum(axis=0)
        scores = origin + mean + (away - sizes * mean) * (known.sum(axis=0) / sizes.sum(axis=0))
    # clusters of one item are the items, to the last digit
    scores = np.where(sizes.max(axis=0, initial=0) == 1, sums, scores)
    return np.where(known, scores, np.nan), np.where(known, sums, np.nan)


def _changes(
    differences: Sequence[Float64[np.ndarray, " items"]],
    clusters: Keys | None,
    rng: np.random.Generator,
    flips: int,
    alpha: float,
) -> list[_Change]:
    """Differences with their tests. All share the random signs, so equal differences have equal p."""
    both = [cluster_scores(one[:, None], clusters) for one in differences]
    flipped = sign_flip(np.concatenate([sums for _, sums in both], axis=1), rng, flips=flips, alpha=alpha).p
    found: list[_Change] = []
    # one by one: sums over a table's rows may differ in the last digit from those over one of its columns
    for (scores, _), p in zip(both, flipped.tolist(), strict=True):
        # without a spread the sign-flip test decides alone
        found.append(_Change(scores[:, 0], p, float(interval_p(scores)[0])))
    return found


def _by_itself(
    values: Float64[np.ndarray, " items"], base: Float64[np.ndarray, " items"], change: _Change, level: float
) -> PairedEffect:
    """A condition without what depends on the others."""
    found = mean_intervals(change.scores[:, None], level)
    there = ~np.isnan(values) & ~np.isnan(base)
    return PairedEffect(
        n=int(there.sum()),
        clusters=int(found.n[0]),
        value=float(values[there].mean()) if there.any() else math.nan,
        none=float(base[there].mean()) if there.any() else math.nan,
        delta=float(found.mean[0]),
        lo=float(found.lo[0]),
        hi=float(found.hi[0]),
        skewed=bool(found.skewed[0]),
        p=change.p,
        p_interval=change.p_interval,
    )


def _smallest(
    scores: Float64[np.ndarray, " clusters"], again: Float64[np.ndarray, " clusters"] | None, alpha: float, flips: int
) -> float:
    """The smallest effect that is found with 80 % power, up or down; NaN where nothing varies, or where so few items never reject.

    An effect towards the short tail of skewed items is harder to show by as much as the interval reaches further there.
    """
    there = ~np.isnan(scores) & (True if again is None else ~np.isnan(again))
    mine, n = scores[there], int(there.sum())
    if n < 2 or not np.ptp(mine) or smallest_p(n, flips=flips, alpha=alpha) > alpha:
        return math.nan
    both = None
    if again is not None and np.ptp(again[there]) and not np.array_equal(again[there], mine):
        both = float(again[there].std(ddof=1)), float(np.corrcoef(mine, again[there])[0, 1])
    _, error, count, deviations = moments(mine[:, None])
    further = np.maximum(*reach(sample_skewness(deviations, count), count, 1 - alpha)) - student(count, 1 - alpha)
    return smallest_detectable_mean(n, float(mine.std(ddof=1)), alpha=alpha, again=both) + float((further * error)[0])


# ---- what is refused -------------------------------------------------------------------------------------------------


def _check(names: Sequence[str], margin: float, again: str | None, primary: str | None, alpha: float) -> None:
    if not 0 < alpha < 1:
        raise BadStudy(f"alpha must lie between 0 and 1, as 0.05 does; got {alpha}")
    if not 0 < margin < math.inf:
        raise BadStudy(f"margin must be a finite number above 0, in the metric's unit; got {margin}")
    for name, role in ((again, "again"), (primary, "primary")):
        if name is not None and name not in names:
            raise BadStudy(
                f"{role}: one of the conditions {', '.join(names) or '(there are none)'} expected; got {name!r}"
            )
    if again is not None and again == primary:
        raise BadStudy(f"primary: {primary!r} is the A/A control, which is not tested; name another condition")


def _finite(values: Float[np.ndarray, " items"], name: str, items: int | None = None) -> Float64[np.ndarray, " items"]:
    same_items(len(values) if items is None else items, len(values))
    bad = np.flatnonzero(np.isinf(values))
    if len(bad):
        raise BadData(
            f"{name}, item {bad[0] + 1} (numbered from 1): the value is {values[bad[0]]}, expected a finite number ({len(bad)} such); an item "
            "without a value is to be NaN, which leaves it out"
        )
    return values.astype(np.float64)
