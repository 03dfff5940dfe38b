"""Paired accuracy with several samples per item: cluster bootstrap, pass@k, votes, seeds (docs/accuracy-statistics.md).

Samples of an item are not further items. The item, or the cluster of related items, is the unit of comparison. As with one answer, fewer
than two of them give no interval and no p, and a missing answer is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

from mless.errors import BadData, BadStudy
from mless.stats.paired import (
    Equivalence,
    equivalence,
    normal_quantile,
    one_sided_quantile,
    same_items,
    zero_or_one,
)
from mless.stats.shares import Estimate, sign_flip

#: Half an item at either end keeps an interval open where all items agree (with one sample: Jeffreys' interval).
_PSEUDO = 0.5

#: Bootstrap weights drawn at a time: 16 MiB, whatever the number of items.
_WEIGHTS_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True)
class ClusterDifference:
    """The mean over items of after minus before, its bootstrap interval and its sign-flip p.

    `sd` is such that sd / √n is the standard error of `value` (n items; clusters taken into account). `exact` and
    `smallest` are the sign-flip test's: all sign patterns were counted, and no p below `smallest` was possible.
    """

    value: float
    lo: float
    hi: float
    p: float
    sd: float
    n: int
    clusters: int
    exact: bool
    smallest: float


@dataclass(frozen=True, slots=True)
class ClusterSpread:
    """What `smallest_detectable_mean` takes: the number of clusters, the sd of their differences, `again` and `ties`.

    `again` is the sd of the differences from `none-again`, and their correlation with those from `none`. `ties` is half the step
    between two means that the sign-flip test can tell apart: a tie counts against rejection, and costs an effect about so much.
    """

    clusters: int
    sd: float
    again: tuple[float, float] | None
    ties: float = 0.0


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """The accuracy of each seed, their mean and standard deviation (NaN with one seed)."""

    mean: float
    sd: float
    by_seed: Float64[np.ndarray, " seeds"]


@dataclass(frozen=True, slots=True)
class Majority:
    """maj@k: whether each group's vote is right, and over the groups the mean accuracy and its standard deviation."""

    mean: float
    sd: float
    right: Bool[np.ndarray, "items groups"]


def cluster_difference(
    before: Bool[np.ndarray, "items samples"] | Float[np.ndarray, "items samples"],
    after: Bool[np.ndarray, "after_items after_samples"] | Float[np.ndarray, "after_items after_samples"],
    rng: np.random.Generator,
    clusters: Sequence[str] | Sequence[int] | None = None,
    level: float = 0.95,
    *,
    reps: int = 10_000,
    flips: int = 100_000,
) -> ClusterDifference:
    """The mean over items of (mean of the samples after − before), for several samples per item.

    The interval is an item bootstrap with random weights, the p a sign-flip test. With `clusters` (a group key per item: variants of one
    question, one source text) both take whole clusters. The numbers of samples may differ. Values need only be finite: tokens per answer
    are compared in the same way.
    """
    normal_quantile(level)
    sums, sizes = _cluster_sums(before, after, clusters)
    n, groups = int(sizes.sum()), len(sums)
    value = float(sums.sum() / n) if n else math.nan
    if groups < 2:
        return ClusterDifference(value, math.nan, math.nan, math.nan, math.nan, n, groups, True, math.nan)
    # with a fixed sign and sorted, so that swapping the conditions or reordering items changes nothing
    side = -1.0 if value < 0 else 1.0
    order = np.lexsort((sizes, side * sums))
    sums, sizes = side * sums[order], sizes[order]
    test = sign_flip(sums[:, None], rng, flips=flips)
    moved = sums[sums != 0]
    # half a typical change either way, for items that were not asked
    change = math.sqrt(float((moved**2).mean())) if len(moved) else float(sizes.mean())
    lo, hi = _bootstrap(sums, sizes, (-change, change), float(sizes.mean()), level, rng, reps)
    if side < 0:
        lo, hi = -hi, -lo
    error = _standard_error(sums, sizes)
    p, smallest = float(test.p[0]), test.smallest
    return ClusterDifference(value, lo, hi, p, error * math.sqrt(n), n, groups, test.exact, smallest)


def cluster_equivalence(
    before: Bool[np.ndarray, "items samples"] | Float[np.ndarray, "items samples"],
    after: Bool[np.ndarray, "after_items after_samples"] | Float[np.ndarray, "after_items after_samples"],
    margin: float,
    clusters: Sequence[str] | Sequence[int] | None = None,
    level: float = 0.95,
) -> Equivalence:
    """TOST for several samples per item: Student's t on the clusters, at α = 1 − level."""
    one_sided_quantile(level)
    if not 0 < margin < math.inf:
        raise BadStudy(f"margin must be above 0, as 0.02 (two points) is; got {margin}")
    from scipy.special import stdtr, stdtrit

    sums, sizes = _cluster_sums(before, after, clusters)
    value = float(sums.sum() / sizes.sum()) if len(sums) else math.nan
    if len(sums) < 2:
        return Equivalence(math.nan, False, value, math.nan, math.nan, margin)
    error, free = _standard_error(sums, sizes), len(sums) - 1
    nearest = margin - abs(value)
    if (
        error == 0 and not sums.any() and margin < 1
    ):  # nothing changed: no spread for t, but so many items did not change
        nothing = np.zeros(len(sums), dtype=np.bool_)
        return equivalence(nothing, nothing, margin, level)
    if error == 0:  # all moved alike: no spread to judge by, and that is no proof
        return Equivalence(math.nan, False, value, math.nan, math.nan, margin)
    p = float(stdtr(free, -nearest / error))
    half = float(stdtrit(free, level)) * error
    return Equivalence(p, p <= 1 - level, value, value - half, value + half, margin)


def cluster_spread(
    none: Bool[np.ndarray, "items samples"] | Float[np.ndarray, "items samples"],
    after: Bool[np.ndarray, "after_items after_samples"] | Float[np.ndarray, "after_items after_samples"],
    again: Bool[np.ndarray, "again_items again_samples"] | Float[np.ndarray, "again_items again_samples"] | None = None,
    clusters: Sequence[str] | Sequence[int] | None = None,
) -> ClusterSpread:
    """How far the differences from `none`, and from `none-again` where it is given, vary over clusters: what power depends on."""
    sums, sizes = _cluster_sums(none, after, clusters)
    groups = len(sums)
    if groups < 2:
        return ClusterSpread(groups, math.nan, None)
    # flipping a sign moves the sum by twice a difference, and all differences are multiples of `_common_step`
    ties = _common_step(sums) / float(sizes.sum())
    # so that sd / √clusters is the standard error of the mean over items: the clusters are what is counted
    sd = _standard_error(sums, sizes) * math.sqrt(groups)
    if again is None:
        return ClusterSpread(groups, sd, None, ties)
    second, _ = _cluster_sums(again, after, clusters)
    apart, apart_again = (some - sizes * (some.sum() / sizes.sum()) for some in (sums, second))
    scale = math.sqrt(float((apart**2).sum()) * float((apart_again**2).sum()))
    if scale < 1e-20:
        return ClusterSpread(groups, sd, None, ties)
    correlation = float((apart * apart_again).sum()) / scale
    return ClusterSpread(groups, sd, (_standard_error(second, sizes) * math.sqrt(groups), correlation), ties)


def pass_at_k(
    correct: Bool[np.ndarray, "items samples"] | Float[np.ndarray, "items samples"],
    k: int,
    rng: np.random.Generator,
    level: float = 0.95,
    *,
    reps: int = 10_000,
) -> Estimate:
    """The chance that one of k samples is right: the mean of `pass_at_k_by_item`, with an item-bootstrap interval."""
    normal_quantile(level)
    by_item = np.sort(pass_at_k_by_item(correct, k))
    n = len(by_item)
    if n < 2:
        return Estimate(float(by_item[0]) if n else math.nan, math.nan, math.nan, n)
    lo, hi = _bootstrap(by_item, np.ones(n), (0.0, 1.0), 1.0, level, rng, reps)
    value = float(by_item.mean())
    # at 0 and 1 every weighting lies on one side of the estimate, which still belongs to its interval
    return Estimate(value, 0.0 if value == 0 else lo, 1.0 if value == 1 else hi, n)


def pass_at_k_by_item(
    correct: Bool[np.ndarray, "items samples"] | Float[np.ndarray, "items samples"], k: int
) -> Float64[np.ndarray, " items"]:
    """1 − C(n−c, k) / C(n, k) for each item with c of n samples right: unbiased for any k ≤ n."""
    samples = correct.shape[1]
    _k_of(k, samples, "pass")
    right = np.count_nonzero(zero_or_one(correct, "the condition"), axis=1)
    # exact integers, divided once: no product of n factors to lose digits in
    whole = math.comb(samples, k)
    by_count = np.array([1 - math.comb(samples - count, k) / whole for count in range(samples + 1)])
    return by_count[right]


def over_seeds(
    correct: Bool[np.ndarray, "items seeds"] | Float[np.ndarray, "items seeds"],
) -> OverSeeds:
    """Accuracy of each column (a seed), their mean and standard deviation: how far one seed alone can be trusted."""
    right = zero_or_one(correct, "the condition")
    if right.size == 0:
        return OverSeeds(math.nan, math.nan, np.full(right.shape[1], np.nan))
    by_seed = right.mean(axis=0)
    return OverSeeds(float(by_seed.mean()), _sd(by_seed), by_seed)


def majority_at_k(
    answers: Sequence[Sequence[str | None]],
    correct: Bool[np.ndarray, "items samples"] | Float[np.ndarray, "items samples"],
    k: int,
) -> Majority:
    """maj@k: the vote of each k samples. `answers` are the extracted ones, None where there is none.

    Samples 1…k are the first group, k+1…2k the second, and so on; what does not fill a group is left out. No answer
    casts no vote; a group without any vote is wrong. Ties go to the answer given first. That is fixed and fair, because the first sample is
    as likely right as any other. A vote is right if its first sample was.
    """
    right = zero_or_one(correct, "the condition")
    items, samples = right.shape
    _k_of(k, samples, "maj")
    if len(answers) != items:
        raise BadData(f"majority_at_k: answers of {len(answers)} items, but {items} were graded")
    groups = samples // k
    won = np.zeros((items, groups), dtype=np.bool_)
    for item, given in enumerate(answers):
        if len(given) != samples:
            raise BadData(f"item {item + 1} (numbered from 1): {len(given)} answers, but {samples} were graded")
        for group in range(groups):
            here = range(group * k, (group + 1) * k)
            votes = Counter(given[s] for s in here if given[s] is not None)
            if votes:
                # a Counter keeps the order of first sight, and max takes the first of equals
                winner = max(votes, key=votes.__getitem__)
                won[item, group] = right[item, next(s for s in here if given[s] == winner)]
    if not items:
        return Majority(math.nan, math.nan, won)
    by_group = won.mean(axis=0)
    return Majority(float(by_group.mean()), _sd(by_group), won)


def bigram_diversity(texts: Sequence[str]) -> float:
    """Distinct 2-grams / all 2-grams over the answers of one item; NaN where no answer has two words.

    Words are what `str.split()` gives: runs between whitespace, case and punctuation kept. No 2-gram crosses answers.
    """
    pairs = [pair for text in texts for pair in itertools.pairwise(text.split())]
    return len(set(pairs)) / len(pairs) if pairs else math.nan


def _cluster_sums(
    before: np.ndarray, after: np.ndarray, clusters: Sequence[str] | Sequence[int] | None
) -> tuple[Float64[np.ndarray, " clusters"], Float64[np.ndarray, " clusters"]]:
    """Per cluster: the sum of its items' differences, and how many items it has."""
    same_items(len(before), len(after))
    differences = _item_means(after, "after") - _item_means(before, "before")
    if clusters is None:
        return differences, np.ones(len(differences))
    if len(clusters) != len(differences):
        raise BadData(f"clusters: a key for every item expected; got {len(clusters)} keys for {len(differences)} items")
    _, at = np.unique(np.asarray(clusters), return_inverse=True)
    groups = int(at.max(initial=-1)) + 1
    sums = np.bincount(at, weights=differences, minlength=groups)
    # rounded: the order of the items must not show in the last digit, where ties are decided
    return np.round(sums, 12), np.bincount(at, minlength=groups).astype(np.float64)


def _item_means(values: np.ndarray, what: str) -> Float64[np.ndarray, " items"]:
    numbers = values.astype(np.float64)
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        item, sample = bad[0]
        raise BadData(
            f"{what}, item {item + 1}, sample {sample + 1} (numbered from 1): the value is {numbers[item, sample]}, expected a "
            f"finite number ({len(bad)} such); an answer that is missing is wrong, which is 0"
        )
    if numbers.shape[1] == 0 and len(numbers):
        raise BadData(f"{what}: at least one sample per item expected, got none")
    # rounded, so that 2/3 − 1/3 and 1/3 are one change and not two
    return np.round(numbers.mean(axis=1), 12) if len(numbers) else np.zeros(0)


def _standard_error(sums: Float64[np.ndarray, " clusters"], sizes: Float64[np.ndarray, " clusters"]) -> float:
    """Of Σ sums / Σ sizes, to first order."""
    groups = len(sums)
    residues = sums - sizes * (sums.sum() / sizes.sum())
    spread = float((residues**2).sum()) * groups / (groups - 1)
    # below rounding there is no spread
    return math.sqrt(spread) / float(sizes.sum()) if spread > 1e-20 else 0.0


def _common_step(sums: Float64[np.ndarray, " clusters"]) -> float:
    """The largest common divisor of all of them (with 4 samples 0.25); 0 where there is none."""
    step = 0.0
    for value in np.unique(np.round(np.abs(sums[sums != 0]), 9)):
        rest = float(value)
        while rest > 1e-6:  # Euclid's algorithm
            step, rest = rest, abs(math.remainder(step, rest))
        if step < 1e-3:
            return 0.0
    return step


def _bootstrap(
    sums: Float64[np.ndarray, " clusters"],
    sizes: Float64[np.ndarray, " clusters"],
    ends: tuple[float, float],
    size: float,
    level: float,
    rng: np.random.Generator,
    reps: int,
) -> tuple[float, float]:
    """Interval of Σ sums / Σ sizes by the Bayesian bootstrap, with half a cluster of `size` at either of `ends`.

    The quantiles lie further out than `level`, by the ratio of t to the normal (Hesterberg's expansion), because the bootstrap's spread is
    too small by √((n−1)/(n+1)).
    """
    if reps < 1000:
        raise ValueError(f"reps must be at least 1,000 for the tails to be there, got {reps}")
    from scipy.special import ndtr, stdtrit

    # equal clusters share one gamma weight, so the cost depends on the number of different values
    kinds, counts = np.unique(np.stack([sums, sizes]), axis=1, return_counts=True)
    totals = np.concatenate([kinds[0], ends])
    weights_of = np.concatenate([kinds[1], [size, size]])
    shape = np.concatenate([counts, [_PSEUDO, _PSEUDO]])
    means: list[Float64[np.ndarray, " reps"]] = []
    at_once = max(1, _WEIGHTS_AT_ONCE // len(shape))
    for start in range(0, reps, at_once):
        weights = rng.standard_gamma(shape, size=(min(at_once, reps - start), len(shape)))
        means.append((weights @ totals) / (weights @ weights_of))
    n = len(sums)
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * math.sqrt((n + 1) / (n - 1))
    outside = float(ndtr(-reach))
    lo, hi = np.quantile(np.concatenate(means), [outside, 1 - outside])
    return float(lo), float(hi)


def _sd(values: Float64[np.ndarray, " seeds"]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _k_of(k: int, samples: int, name: str) -> None:
    if k < 1:
        raise BadStudy(f"{name}@k: k must be at least 1, got {k}")
    if k > samples:
        raise BadStudy(
            f"{name}@{k} needs at least {k} samples per item, there are {samples}; draw more samples or take k ≤ {samples}"
        )
