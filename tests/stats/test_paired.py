"""One answer per item: each notion against a plain transcription or statsmodels, and what docs/accuracy-statistics.md quotes (-s).

Coverage and level are summed over every possible table and carry no Monte-Carlo error.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from accuracy_data import CORRELATIONS, SHARES, SIZES, change_chances, checked, columns, outcomes, pair, rng, tables
from hypothesis import assume, given
from hypothesis import strategies as st

from mless.stats import (
    accuracy_interval,
    cluster_equivalence,
    equivalence,
    mcnemar_exact,
    mcnemar_mid_p,
    paired,
    paired_difference,
)

# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (1, 30), (150, 500), (3, 7)])
def test_wilson_agrees_with_statsmodels(right: int, n: int):
    from statsmodels.stats.proportion import proportion_confint

    for level in (0.8, 0.95, 0.99):
        found = accuracy_interval(np.arange(n) < right, level)
        assert (found.lo, found.hi) == pytest.approx(proportion_confint(right, n, 1 - level, "wilson"), abs=1e-12)
        assert (found.value, found.n) == (right / n, n)
        assert found.lo <= found.value <= found.hi


@pytest.mark.parametrize("n", SIZES)
def test_wilson_coverage(n: int):
    from scipy.stats import binom

    found = [accuracy_interval(np.arange(n) < right) for right in range(n + 1)]
    lo, hi = np.array([e.lo for e in found]), np.array([e.hi for e in found])
    for p in SHARES:
        covered = float(binom.pmf(np.arange(n + 1), n, p)[(lo <= p) & (p <= hi)].sum())
        print(f"Wilson n={n} p={p}: {covered:.2%}")
        # the lattice of 30 items gives 92.98 % at p = 0.3, 93.0 % when rounded as quoted
        assert 0.9295 <= covered <= 0.97


# ---- one answer per item ---------------------------------------------------------------------------------------------


def tango_transcribed(gained: int, lost: int, n: int, difference: float) -> float:
    """Tango's score with the likelihood maximised by a search instead of by the quadratic's root."""
    from scipy.optimize import minimize_scalar
    from scipy.special import xlogy

    least, most = max(0.0, -difference), (1 - difference) / 2

    def minus_log_likelihood(loss: float) -> float:
        gain = max(loss + difference, 0.0)
        return -float(xlogy(gained, gain) + xlogy(lost, loss) + xlogy(n - gained - lost, max(1 - gain - loss, 1e-300)))

    loss = minimize_scalar(minus_log_likelihood, bounds=(least, most), method="bounded", options={"xatol": 1e-12}).x
    return (gained - lost - n * difference) / math.sqrt(n * (2 * loss + difference - difference**2))


@pytest.mark.parametrize(("gained", "lost", "n"), [(1, 7, 21), (40, 20, 160), (3, 3, 10), (0, 4, 30), (12, 0, 12)])
def test_the_bounds_are_where_tangos_score_is_the_quantile(gained: int, lost: int, n: int):
    found = paired_difference(*pair(gained, lost, n))
    assert (found.value, found.gained, found.lost, found.n) == ((gained - lost) / n, gained, lost, n)
    assert found.changed_share == pytest.approx((gained + lost) / n)
    assert tango_transcribed(gained, lost, n, found.lo) == pytest.approx(1.959964, abs=1e-3)
    if gained < n:
        assert tango_transcribed(gained, lost, n, found.hi) == pytest.approx(-1.959964, abs=1e-3)


def test_tables_at_the_edge():
    z2 = 1.959963984540054**2
    none = paired_difference(*pair(0, 0, 30))
    assert (none.lo, none.value, none.hi) == pytest.approx((-z2 / (30 + z2), 0, z2 / (30 + z2)))
    every = paired_difference(*pair(30, 0, 30))
    assert (every.value, every.hi) == (1.0, 1.0)
    assert every.lo == pytest.approx(1 - 2 * z2 / (30 + z2), abs=1e-9)
    assert paired_difference(*pair(0, 30, 30)).lo == -1.0
    assert mcnemar_exact(*pair(0, 0, 30)) == mcnemar_mid_p(*pair(0, 0, 30)) == 1.0
    assert mcnemar_exact(*pair(30, 0, 30)) == pytest.approx(2 * 0.5**30)
    assert mcnemar_mid_p(*pair(30, 0, 30)) == pytest.approx(0.5**30)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 7), (7, 1), (5, 5), (40, 20), (0, 6)])
def test_mcnemar_agrees_with_statsmodels_and_scipy(gained: int, lost: int):
    from scipy.stats import binom, binomtest
    from statsmodels.stats.contingency_tables import mcnemar

    before, after = pair(gained, lost, 100)
    counts = [[int(np.sum((before == b) & (after == a))) for a in (True, False)] for b in (True, False)]
    assert mcnemar_exact(before, after) == pytest.approx(mcnemar(counts, exact=True).pvalue)
    if gained + lost:
        assert mcnemar_exact(before, after) == pytest.approx(binomtest(gained, gained + lost).pvalue)
        # the score at 0 is McNemar's statistic without correction
        score = paired._tango_score(np.array([gained]), np.array([lost]), 100, np.zeros(1))[0]
        assert score**2 == pytest.approx(mcnemar(counts, exact=False, correction=False).statistic)
    half = binom.pmf(min(gained, lost), gained + lost, 0.5)
    expected = 1.0 if gained == lost else 2 * binom.cdf(min(gained, lost), gained + lost, 0.5) - half
    assert mcnemar_mid_p(before, after) == pytest.approx(expected)


@checked
@given(outcomes, st.randoms(use_true_random=False))
def test_paired_difference_has_its_symmetries(pairs: list[tuple[bool, bool]], shuffler):
    before, after = columns(pairs)
    plain, swapped = paired_difference(before, after), paired_difference(after, before)
    assert [plain.value, plain.lo, plain.hi] == pytest.approx([-swapped.value, -swapped.hi, -swapped.lo], abs=1e-9)
    wrong = paired_difference(~before, ~after)  # counting errors instead of right answers
    assert [plain.value, plain.lo, plain.hi] == pytest.approx([-wrong.value, -wrong.hi, -wrong.lo], abs=1e-9)
    assert -1 <= plain.lo <= plain.value <= plain.hi <= 1
    wide = paired_difference(before, after, 0.99)
    assert wide.lo <= plain.lo
    assert plain.hi <= wide.hi
    mixed = pairs.copy()
    shuffler.shuffle(mixed)
    assert paired_difference(*columns(mixed)) == plain
    assert paired_difference(before.astype(np.float32), after.astype(float)) == plain
    for test in (mcnemar_exact, mcnemar_mid_p):
        assert test(before, after) == test(after, before) == test(*columns(mixed))
    assert 0 < mcnemar_mid_p(before, after) <= mcnemar_exact(before, after) <= 1


@checked
@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_one_more_gain_moves_everything_up(gained: int, lost: int, same: int):
    n = gained + lost + same + 2
    less, more = paired_difference(*pair(gained, lost, n)), paired_difference(*pair(gained + 1, lost, n))
    assert less.lo < more.lo
    assert less.hi <= more.hi
    if gained >= lost:
        for test in (mcnemar_exact, mcnemar_mid_p):
            assert test(*pair(gained + 1, lost, n)) <= test(*pair(gained, lost, n))


@pytest.mark.parametrize("effect", [0.0, 0.04], ids=["null", "4-points"])
@pytest.mark.parametrize("p", SHARES)
@pytest.mark.parametrize("n", SIZES)
def test_tango_coverage(n: int, p: float, effect: float):
    for correlation in CORRELATIONS:
        truth = effect if p < 0.9 else -effect
        gain, loss = change_chances(p, correlation, truth)
        gained, lost, chance = tables(n, gain, loss)
        lo, hi = paired._tango(gained, lost, n, 1.959963984540054)
        covered = float(chance[(lo <= truth + 1e-9) & (truth <= hi + 1e-9)].sum())
        changes = n * (gain + loss)
        print(f"Tango n={n} p={p} effect={truth} correlation={correlation} ({changes:.1f} change): {covered:.2%}")
        # below five changes to be expected the interval is cautious: there is too little to be wrong about
        assert 0.93 <= covered <= (0.97 if changes >= 5 else 1.0)


def newcombe(both: np.ndarray, gained: np.ndarray, lost: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Newcombe's method 10: Wilson's bounds of the two accuracies, squared and added, with the corrected φ."""
    z2, neither = 1.959963984540054**2, n - both - gained - lost

    def wilson(right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        share = right / n
        half = np.sqrt(z2 * share * (1 - share) / n + z2**2 / (4 * n * n)) / (1 + z2 / n)
        centre = (share + z2 / (2 * n)) / (1 + z2 / n)
        return share, share - (centre - half), centre + half - share

    (p, below_p, above_p), (q, below_q, above_q) = wilson(both + gained), wilson(both + lost)
    product = both * neither - gained * lost
    product = np.where(product > n / 2, product - n / 2, np.minimum(product, 0))
    size = np.sqrt((both + gained) * (lost + neither) * (both + lost) * (gained + neither * 1.0))
    phi = np.divide(product, size, out=np.zeros(len(size)), where=size > 0)
    lo = p - q - np.sqrt(below_p**2 - 2 * phi * below_p * above_q + above_q**2)
    return lo, p - q + np.sqrt(above_p**2 - 2 * phi * above_p * below_q + below_q**2)


def test_newcombe_is_more_cautious_than_tango():
    for n, p in itertools.product(SIZES, SHARES[:2]):
        gain, loss = change_chances(p, 0.7, 0.0)
        both, gained, lost, _ = rng(n).multinomial(n, [p - loss, gain, loss, 1 - p - gain], size=20_000).T
        covered = {}
        for name, (lo, hi) in {
            "Tango": paired._tango(gained, lost, n, 1.959963984540054),
            "Newcombe": newcombe(both, gained, lost, n),
        }.items():
            covered[name] = float(np.mean((lo <= 1e-9) & (hi >= -1e-9)))
        print(f"n={n} p={p} correlation 0.7:", {name: f"{share:.1%}" for name, share in covered.items()})
        assert covered["Newcombe"] >= covered["Tango"] - 0.002
    # a textbook table, Newcombe (1998): 36 of 50 both right, 12 gained, 2 lost
    assert np.ravel(newcombe(*(np.array([k]) for k in (36, 12, 2)), 50)) == pytest.approx([0.0569, 0.3404], abs=1e-3)


@pytest.mark.parametrize("p", SHARES)
@pytest.mark.parametrize("n", SIZES)
def test_mcnemar_keeps_its_level(n: int, p: float):
    for correlation in CORRELATIONS:
        gain, loss = change_chances(p, correlation, 0.0)
        gained, lost, chance = tables(n, gain, loss)
        exact = float(chance[paired.mcnemar_p(gained, lost, "exact") <= 0.05].sum())
        mid_p = float(chance[paired.mcnemar_p(gained, lost, "mid-p") <= 0.05].sum())
        changes = 2 * n * gain
        print(
            f"McNemar n={n} p={p} correlation={correlation} ({changes:.1f} change): exact {exact:.2%}, mid-p {mid_p:.2%}"
        )
        assert exact <= 0.05
        assert exact <= mid_p <= 0.055
        # five changes are the fewest that can reject at all
        if changes >= 8:
            assert mid_p >= 0.03


def test_mid_p_is_at_most_a_little_above_its_level_anywhere():
    worst = 0.0
    for n in (10, 30, 100):
        for share in np.linspace(0.02, 1, 50):
            gained, lost, chance = tables(n, share / 2, share / 2)
            worst = max(worst, float(chance[paired.mcnemar_p(gained, lost, "mid-p") <= 0.05].sum()))
    print(f"mid-p, the most it rejects under the null: {worst:.2%}")
    assert worst < 0.065


# ---- equivalence -----------------------------------------------------------------------------------------------------


@checked
@given(outcomes, st.floats(0.01, 0.9), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_equivalence_is_the_narrower_interval_inside_the_margin(
    pairs: list[tuple[bool, bool]], margin: float, level: float
):
    found = equivalence(*columns(pairs), margin, level)
    inside = paired_difference(*columns(pairs), 1 - 2 * (1 - level))
    assert (found.lo, found.hi, found.value) == pytest.approx((inside.lo, inside.hi, inside.value))
    assume(min(abs(found.lo + margin), abs(found.hi - margin)) > 1e-6)
    assert found.equivalent == (-margin < inside.lo and inside.hi < margin)
    assert equivalence(*columns(pairs)[::-1], margin, level).p == pytest.approx(found.p, abs=1e-9)
    wider = min(margin * 1.5, 0.95)
    assert equivalence(*columns(pairs), wider, level).p <= found.p + 1e-9


@pytest.mark.parametrize("clustered", [False, True], ids=["items", "samples"])
def test_tost_agrees_with_statsmodels(clustered: bool):
    from statsmodels.stats.weightstats import ttost_paired

    draws = rng(4)
    samples = 4 if clustered else 1
    before = draws.random((2000, samples)) < 0.6
    after = np.where(draws.random((2000, samples)) < 0.9, before, draws.random((2000, samples)) < 0.6)
    b, a = before.mean(axis=1), after.mean(axis=1)
    for margin in (0.005, 0.01, 0.02, 0.03):
        theirs = ttost_paired(a, b, -margin, margin)[0]
        assert cluster_equivalence(before, after, margin).p == pytest.approx(theirs, rel=1e-6)
        if not clustered:
            # score and t agree as n grows
            assert equivalence(before[:, 0], after[:, 0], margin).p == pytest.approx(theirs, abs=0.005)


@pytest.mark.parametrize("n", SIZES)
def test_equivalence_keeps_its_level(n: int):
    # the truth sits on the margin: claiming "no effect" is then the error
    for margin, share in ((0.05, 0.1), (0.05, 0.3), (0.1, 0.3)):
        gained, lost, chance = tables(n, (share + margin) / 2, (share - margin) / 2)
        ends = np.full(len(gained), margin)
        p = np.maximum(*(_upper(sign * paired._tango_score(gained, lost, n, -sign * ends)) for sign in (1, -1)))
        claimed = float(chance[p <= 0.05].sum())
        print(f"TOST n={n} margin={margin} {share:.0%} change: claims {claimed:.2%}")
        assert claimed <= 0.06


def _upper(z: np.ndarray) -> np.ndarray:
    from scipy.special import ndtr

    return ndtr(-z)


def test_equivalence_when_nothing_changed():
    same = rng().random(500) < 0.5
    found = equivalence(same, same, 0.02)
    assert found.equivalent
    assert found.value == 0
    assert cluster_equivalence(np.tile(same[:, None], 3), np.tile(same[:, None], 3), 0.02) == found
    assert not equivalence(same[:30], same[:30], 0.02).equivalent  # 30 items cannot exclude two points
    assert math.isnan(cluster_equivalence(np.zeros((9, 2)), np.ones((9, 2)), 0.5).p)
