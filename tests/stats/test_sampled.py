"""Several answers per item: plain transcriptions, and the coverages that docs/accuracy-statistics.md quotes (-s).

What is simulated allows in the default tier for the error of a quick look; the slow tier makes the quoted numbers.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from accuracy_data import SHARES, SIZES, checked, pair, rng
from hypothesis import assume, given
from hypothesis import strategies as st

from mless.errors import BadData, BadStudy
from mless.stats import (
    bigram_diversity,
    cluster_difference,
    majority_at_k,
    mcnemar_exact,
    over_seeds,
    pass_at_k,
    pass_at_k_by_item,
    sampled,
    sign_flip,
)

# ---- several answers per item ----------------------------------------------------------------------------------------


def simulated(
    n: int, p: float, samples: int, sets: int, draws: np.random.Generator, push: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Right answers of `samples`, sets × items, before and after; items differ (beta, within-item correlation 0.5)."""
    ability = draws.beta(p, 1 - p, size=(sets, n))
    return draws.binomial(samples, ability), draws.binomial(samples, pushed(ability, push))


def pushed(ability: np.ndarray, push: float) -> np.ndarray:
    """Every item's log-odds moved by `push`."""
    return ability * math.exp(push) / (1 - ability + ability * math.exp(push))


def unpacked(counts: np.ndarray, samples: int) -> np.ndarray:
    """items × samples with so many right."""
    return np.arange(samples) < counts[:, None]


@cache
def mean_push(p: float, push: float) -> float:
    ability = rng(0).beta(p, 1 - p, size=4_000_000)
    return float((pushed(ability, push) - ability).mean()) if push else 0.0


def cluster_coverage(n: int, p: float, push: float, sets: int, samples: int = 4) -> float:
    draws = rng(n + int(100 * p))
    before, after = simulated(n, p, samples, sets, draws, push)
    truth = mean_push(p, push)
    covered = 0
    for b, a in zip(before, after, strict=True):
        found = cluster_difference(unpacked(b, samples), unpacked(a, samples), draws, reps=1000, flips=100)
        covered += found.lo <= truth <= found.hi
    return covered / sets


def pass_coverage(n: int, p: float, k: int, sets: int, samples: int = 8) -> float:
    draws = rng(n + int(100 * p) + k)
    right, _ = simulated(n, p, samples, sets, draws)
    truth = 1 - math.prod((1 - p + i) / (1 + i) for i in range(k))  # the beta's k-th moment
    found = [pass_at_k(unpacked(counts, samples), k, draws, reps=1000) for counts in right]
    return sum(e.lo <= truth <= e.hi for e in found) / sets


#: Simulating many items takes most of the time, and 30 are where an interval fails first.
SIZES_30_QUICK = [30, *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES if n != 30)]
QUICK = 300
QUOTED = 3000

#: What the interval may cover at least and at most; wider where few items change, as the page says.
WIDE_AT_30 = (0.93, 0.995)


def within(found: float, lo: float, hi: float, sets: int) -> bool:
    """Three standard deviations of Monte-Carlo error allowed for."""
    slack = 3 * math.sqrt(0.95 * 0.05 / sets)
    return lo - slack <= found <= hi + slack


@pytest.mark.parametrize("sets", [QUICK, pytest.param(QUOTED, marks=pytest.mark.slow)], ids=["quick", "quoted"])
@pytest.mark.parametrize(
    ("p", "push"),
    [
        pytest.param(p, push, marks=[] if (p, push) in ((0.3, 0.5), (0.95, 0.0)) else pytest.mark.slow)
        for p in SHARES
        for push in (0.0, 0.5)
    ],
)
@pytest.mark.parametrize("n", SIZES_30_QUICK)
def test_cluster_coverage(n: int, p: float, push: float, sets: int):
    covered = cluster_coverage(n, p, push, sets)
    print(f"cluster bootstrap n={n} p={p} push={push}: {covered:.2%} of {sets}")
    few = n == 30 and p in (0.05, 0.95)
    assert within(covered, *(WIDE_AT_30 if few else (0.93, 0.97)), sets)


@pytest.mark.parametrize("sets", [QUICK, pytest.param(QUOTED, marks=pytest.mark.slow)], ids=["quick", "quoted"])
@pytest.mark.parametrize(
    ("p", "k"),
    [
        pytest.param(p, k, marks=[] if (p, k) in ((0.05, 1), (0.7, 4)) else pytest.mark.slow)
        for p in SHARES
        for k in (1, 4)
    ],
)
@pytest.mark.parametrize("n", SIZES_30_QUICK)
def test_pass_at_k_coverage(n: int, p: float, k: int, sets: int):
    covered = pass_coverage(n, p, k, sets)
    print(f"pass@{k} n={n} p={p}: {covered:.2%} of {sets}")
    few = n == 30 and p in (0.05, 0.95)
    assert within(covered, *(WIDE_AT_30 if few else (0.93, 0.97)), sets)


def test_a_t_interval_of_pass_at_k_covers_less():
    from scipy.special import stdtrit

    right, _ = simulated(30, 0.05, 8, 10_000, rng(3))
    means, half = right.mean(axis=1) / 8, stdtrit(29, 0.975) * right.std(axis=1, ddof=1) / 8 / math.sqrt(30)
    covered = float(np.mean(np.abs(means - 0.05) <= half))
    print(f"t interval of pass@1, n=30 p=0.05: {covered:.1%}")
    assert covered < 0.88


@pytest.mark.parametrize("p", SHARES)
@pytest.mark.parametrize("n", [30, *(pytest.param(n, marks=pytest.mark.slow) for n in (200, 500))])
def test_sign_flip_on_item_means_keeps_its_level(n: int, p: float):
    draws = rng(n + int(100 * p))
    rejected, sets = 0, 0
    for _ in range(20):  # few rows at a time, because their number sets the number of flips
        before, after = simulated(n, p, 4, 100, draws)
        rejected += int(np.count_nonzero(sign_flip((after - before).T / 4.0, draws, flips=1).p <= 0.05))
        sets += 100
    share = rejected / sets
    print(f"sign-flip n={n} p={p}: rejects {share:.2%}")
    # with four changed items of 30 there are 16 sign patterns: p ≤ 0.05 hardly exists
    few = n == 30 and p in (0.05, 0.95)
    assert within(share, 0.0 if few else 0.03, 0.05 if few else 0.07, sets)


@pytest.mark.parametrize(("n", "lo", "hi"), [(30, 0.65, 0.85), (200, 0.91, 0.98)], ids=["n30", "n200"])
def test_rare_great_changes_are_where_the_bootstrap_fails(n: int, lo: float, hi: float):
    """One item in 25 turns certain, the others stay: 30 items often hold none, and nothing in them tells of it."""
    draws = rng(1)
    ability = draws.beta(0.05, 0.95, size=(400, n))
    turned = np.where(draws.random(ability.shape) < 0.04 / 0.95, 1.0, ability)
    covered = 0
    for b, a in zip(draws.binomial(16, ability), draws.binomial(16, turned), strict=True):
        found = cluster_difference(unpacked(b, 16), unpacked(a, 16), draws, reps=1000, flips=100)
        covered += found.lo <= 0.04 <= found.hi
    print(f"cluster bootstrap, rare great changes, n={n}: {covered / 400:.1%}")
    assert lo < covered / 400 < hi


def test_related_items_need_their_cluster_key():
    draws = rng(2)
    keys = np.repeat(np.arange(40), 5)
    inside = {"items": 0, "clusters": 0}
    rejected = {"items": 0, "clusters": 0}
    for _ in range(300):
        ability, push = draws.uniform(0.2, 0.8, size=40), draws.normal(0, 0.15, size=40)
        before = draws.random((200, 4)) < ability[keys, None]
        after = draws.random((200, 4)) < np.clip(ability + push, 0, 1)[keys, None]
        for name, clusters in (("items", None), ("clusters", keys.tolist())):
            found = cluster_difference(before, after, draws, clusters, reps=1000, flips=400)
            inside[name] += found.lo <= 0 <= found.hi
            rejected[name] += found.p <= 0.05
            assert (found.n, found.clusters) == (200, 200 if clusters is None else 40)
    print(f"clusters of 5: coverage {inside}, rejections {rejected} of 300")
    assert 0.91 <= inside["clusters"] / 300 <= 0.985
    assert 0.015 <= rejected["clusters"] / 300 <= 0.09
    assert inside["items"] / 300 < 0.88


def test_cluster_difference_is_the_mean_over_items():
    draws = rng(3)
    before, after = draws.random((40, 3)) < 0.4, draws.random((40, 5)) < 0.6
    found = cluster_difference(before, after, rng())
    items = after.mean(axis=1) - before.mean(axis=1)
    assert found.value == pytest.approx(items.mean())
    assert found.sd == pytest.approx(items.std(ddof=1))
    assert (found.n, found.clusters) == (40, 40)
    assert found.p == pytest.approx(sign_flip(items[:, None], rng(9)).p[0], abs=0.003)
    # unequal clusters: items count equally, not clusters
    keys = [f"c{i}" for i in [*range(17), *range(10), *range(8), *range(5)]]
    grouped = cluster_difference(before, after, rng(), keys)
    assert grouped.value == pytest.approx(items.mean())
    assert (grouped.clusters, grouped.exact) == (17, True)
    resampled = rng(5).integers(0, 17, size=(20_000, 17))
    names = sorted(set(keys))
    sums = np.array([items[[k == name for k in keys]].sum() for name in names])
    sizes = np.array([keys.count(name) for name in names])
    bootstrap = sums[resampled].sum(axis=1) / sizes[resampled].sum(axis=1)
    assert grouped.sd / math.sqrt(40) == pytest.approx(bootstrap.std(), rel=0.25)


def test_with_one_sample_the_sign_flip_test_is_mcnemars():
    for gained, lost in ((1, 7), (3, 3), (0, 6), (9, 2)):
        before, after = pair(gained, lost, 20)
        found = cluster_difference(before[:, None], after[:, None], rng(), reps=1000)
        assert found.exact
        assert found.p == pytest.approx(mcnemar_exact(before, after))


def test_pass_at_one_with_one_sample_is_near_jeffreys():
    from scipy.stats import beta

    for right in (0, 3, 100):
        found = pass_at_k((np.arange(200) < right)[:, None], 1, rng(), reps=100_000)
        lo, hi = beta.ppf([0.025, 0.975], right + 0.5, 200 - right + 0.5)
        assert found.hi == pytest.approx(hi, rel=0.05)
        assert found.lo == pytest.approx(lo if right else 0.0, rel=0.05)


@checked
@given(st.integers(2, 30), st.integers(0, 10**6))
def test_cluster_difference_has_its_symmetries(n: int, seed: int):
    draws = rng(seed)
    before, after = draws.random((n, 3)) < 0.5, draws.random((n, 3)) < 0.5
    assume(before.sum() != after.sum())
    keys = draws.integers(0, max(2, n // 2), size=n)
    assume(len(set(keys)) > 1)
    for clusters in (None, keys.tolist()):
        plain = cluster_difference(before, after, rng(), clusters, reps=1000, flips=200)
        swapped = cluster_difference(after, before, rng(), clusters, reps=1000, flips=200)
        assert [swapped.value, swapped.lo, swapped.hi, swapped.p] == pytest.approx(
            [-plain.value, -plain.hi, -plain.lo, plain.p], abs=1e-9
        )
        order = draws.permutation(n)
        moved = None if clusters is None else keys[order].tolist()
        mixed = cluster_difference(before[order], after[order], rng(), moved, reps=1000, flips=200)
        assert [mixed.lo, mixed.hi, mixed.p] == pytest.approx([plain.lo, plain.hi, plain.p], abs=1e-9)
        assert -1 <= plain.lo <= plain.hi <= 1


def test_the_same_rng_gives_the_same_numbers():
    before, after = rng(1).random((50, 4)) < 0.5, rng(2).random((50, 4)) < 0.5
    assert cluster_difference(before, after, rng(7)) == cluster_difference(before, after, rng(7))
    assert pass_at_k(before, 2, rng(7)) == pass_at_k(before, 2, rng(7))


def test_many_different_values_stay_within_memory(monkeypatch: pytest.MonkeyPatch):
    values = rng(1).random((300, 1))
    whole = cluster_difference(np.zeros((300, 1)), values, rng(), reps=2000, flips=100)
    monkeypatch.setattr(sampled, "_WEIGHTS_AT_ONCE", 5000)
    assert cluster_difference(np.zeros((300, 1)), values, rng(), reps=2000, flips=100) == whole


# ---- pass@k, maj@k, seeds, diversity ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "k"), [(1, 1), (5, 1), (5, 3), (6, 6), (8, 4)])
def test_pass_at_k_is_the_share_of_all_choices_of_k(samples: int, k: int):
    correct = rng(samples + 10).random((30, samples)) < rng(1).random((30, 1))
    brute = [
        np.mean([row[list(chosen)].any() for chosen in itertools.combinations(range(samples), k)]) for row in correct
    ]
    np.testing.assert_allclose(pass_at_k_by_item(correct, k), brute)
    found = pass_at_k(correct, k, rng())
    assert found.value == pytest.approx(np.mean(brute))
    assert found.lo < found.value < found.hi
    assert pass_at_k(correct[::-1], k, rng()) == found


@checked
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_pass_at_k_grows_with_k(samples: int, seed: int):
    correct = rng(seed).random((10, samples)) < 0.3
    values = np.array([pass_at_k_by_item(correct, k) for k in range(1, samples + 1)])
    assert (np.diff(values, axis=0) >= -1e-12).all()
    np.testing.assert_allclose(values[0], correct.mean(axis=1))
    np.testing.assert_array_equal(values[-1], correct.any(axis=1))


def test_pass_at_k_stays_exact_with_many_samples():
    correct = np.arange(1000)[None, :] < np.array([[1], [500]])
    assert pass_at_k_by_item(correct, 500) == pytest.approx([0.5, 1.0], rel=1e-12)


def test_k_beyond_the_samples_is_refused():
    with pytest.raises(BadStudy, match="pass@8 needs at least 8 samples per item, there are 4"):
        pass_at_k(np.zeros((3, 4)), 8, rng())
    with pytest.raises(BadStudy, match="maj@5 needs at least 5"):
        majority_at_k([["1"]], np.zeros((1, 1)), 5)
    with pytest.raises(BadStudy, match="k must be at least 1"):
        pass_at_k_by_item(np.zeros((3, 4)), 0)


def test_majority_at_k():
    answers = [
        ["7", "8", "7", "8", "8", "9"],  # right is 8: first group 7, second 8
        [None, "3", None, None, None, None],  # one vote is a majority; no vote is wrong
        ["1", "2", "2", "2", "1", "1"],
    ]
    correct = np.array([[0, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1]], dtype=float)
    found = majority_at_k(answers, correct, 3)
    assert found.right.tolist() == [[False, True], [True, False], [False, True]]
    assert found.mean == pytest.approx(0.5)
    assert found.sd == pytest.approx(np.std([1 / 3, 2 / 3], ddof=1))
    # two samples that differ are a tie, and the first given wins: maj@2 is then the first sample's accuracy
    assert majority_at_k([["a", "b"], ["b", "a"]], np.array([[1.0, 0.0], [0.0, 1.0]]), 2).right.tolist() == [
        [True],
        [False],
    ]
    four = majority_at_k(answers, correct, 4)  # two samples are left over
    assert four.right.shape == (3, 1)
    assert math.isnan(four.sd)
    one = majority_at_k(answers, correct, 1)
    assert one.mean == pytest.approx(correct.mean())
    np.testing.assert_array_equal(one.right, correct == 1)


def test_majority_refuses_what_does_not_fit():
    with pytest.raises(BadData, match="answers of 1 items, but 2 were graded"):
        majority_at_k([["1"]], np.zeros((2, 1)), 1)
    with pytest.raises(BadData, match=r"item 2 .*1 answers, but 2 were graded"):
        majority_at_k([["1", "2"], ["1"]], np.zeros((2, 2)), 1)


def test_over_seeds():
    found = over_seeds(np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))
    assert found.by_seed.tolist() == [1.0, 0.5, 0.5]
    assert found.mean == pytest.approx(2 / 3)
    assert found.sd == pytest.approx(np.std([1, 0.5, 0.5], ddof=1))
    assert math.isnan(over_seeds(np.ones((4, 1))).sd)


def test_bigram_diversity():
    assert bigram_diversity(["a b a b", "a b"]) == pytest.approx(2 / 4)  # ab ba ab, ab
    assert bigram_diversity(["the  cat\nsat", "The cat sat"]) == pytest.approx(
        3 / 4
    )  # case counts, kind of space does not
    assert bigram_diversity(["one two", "three four"]) == 1.0
    assert math.isnan(bigram_diversity(["word", "", "  "]))
    assert math.isnan(bigram_diversity([]))
