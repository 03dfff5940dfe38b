"""Dose curves: bands that cover all doses at once, slope, peak and the best dose, against slow ways and by simulation.

The rates are those that the simulations print; CONTRIBUTING.md says how to run one test.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mless.errors import BadData
from mless.stats.dose import best_dose, dose_curve, find_peak, simultaneous
from mless.stats.intervals import interval_p, mean_intervals
from mless.stats.shares import holm, sign_flip

DOSES = (1, 2, 4, 8, 16, 32, 63, 126, 251, 501, 1000)
FLAT = np.zeros(len(DOSES))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def items_of(
    draw: np.random.Generator, n: int, means: np.ndarray, shape: str = "normal", alike: float = 0.7
) -> np.ndarray:
    """Items whose doses have something in common; `skewed`: a few items change much more than the others. `heavy`: some change much, either way."""
    common, own = draw.normal(size=(n, 1)), draw.normal(size=(n, len(means)))
    noise = math.sqrt(alike) * common + math.sqrt(1 - alike) * own
    if shape == "skewed":
        noise = (np.exp(0.8 * noise) - math.exp(0.32)) / 1.4
    if shape == "very skewed":
        noise = np.exp(noise) - math.exp(0.5)
    if shape == "heavy":
        noise = noise / np.sqrt(draw.chisquare(3, (n, 1)) / 3)
    return means + noise


# ---- against slow ways ---------------------------------------------------------------------------------------------------


def test_a_curve_is_every_dose_by_itself_and_a_wider_band_around_it() -> None:
    changes = items_of(rng(1), 40, np.linspace(0, 1, len(DOSES)))
    changes[3, 2] = np.nan
    curve = dose_curve(changes, DOSES, rng())
    known = np.delete(changes, 3, axis=0)
    found = mean_intervals(known)
    assert curve.n == 39
    assert np.array_equal(curve.mean, found.mean)
    assert np.array_equal(curve.lo, found.lo)
    assert (curve.lo_all < curve.lo).all()
    assert (curve.hi_all > curve.hi).all()
    bonferroni = mean_intervals(known, 1 - 0.05 / len(DOSES))
    assert (curve.lo_all > bonferroni.lo).all()
    assert (curve.hi_all < bonferroni.hi).all()
    flipped = np.fmax(sign_flip(known, rng()).p, interval_p(known))
    assert curve.p == pytest.approx(flipped, abs=0.01)
    assert (curve.p_adjusted >= curve.p).all()


def test_a_slope_is_the_mean_of_every_items_own_line() -> None:
    changes = items_of(rng(2), 20, 0.3 * np.log2(1 + np.array(DOSES)))
    x = np.log2(1 + np.array([0, *DOSES]))
    each = [np.polyfit(x, [0.0, *row], 1)[0] for row in changes]
    slope = dose_curve(changes, DOSES, rng()).slope
    assert slope.value == pytest.approx(np.mean(each))
    expected = mean_intervals(np.array(each)[:, None])
    assert (slope.lo, slope.hi) == pytest.approx((expected.lo[0], expected.hi[0]))
    assert slope.lo < 0.3 < slope.hi
    assert slope.p < 1e-4


def test_a_peak_is_a_dose_that_beats_both_ends() -> None:
    hump = np.array([0, 0, 0.5, 2, 2, 0.5, 0, 0, 0, 0, 0])
    found = dose_curve(items_of(rng(3), 60, hump), DOSES, rng()).peak
    assert found.dose in (8, 16)
    assert found.p < 0.001
    # a curve that rises and stays there has no peak, and one that only falls none either
    for means in (np.minimum(np.arange(11) / 4, 1.0), -np.arange(11) / 10):
        assert dose_curve(items_of(rng(4), 60, means), DOSES, rng()).peak.p > 0.05


def test_the_best_dose_is_chosen_on_dev_items_and_judged_on_the_others() -> None:
    changes = items_of(rng(5), 50, FLAT)
    dev = np.arange(50) < 20
    changes[:20, 4] += 3
    changes[7, 0] = np.nan
    found = best_dose(changes, DOSES, dev, rng())
    assert (found.dose, found.dev_items, found.items) == (16, 19, 30)
    assert found.value == pytest.approx(changes[20:, 4].mean())
    assert found.dev == pytest.approx(changes[:20, 4][np.arange(20) != 7].mean())
    assert math.isnan(best_dose(changes[:20], DOSES, dev[:20], rng()).value)


def test_few_items_and_items_that_do_not_vary() -> None:
    one = dose_curve(np.ones((1, 2)), (1, 2), rng())
    assert np.isnan(one.lo_all).all()
    assert math.isnan(one.peak.p)
    same = dose_curve(np.zeros((5, 3)), (1, 2, 3), rng())
    assert (same.lo_all == 0).all()
    assert (same.hi_all == 0).all()
    assert (same.peak.p, same.peak.dose) == (1.0, 0)


def test_items_that_all_change_alike_have_no_p_of_a_peak() -> None:
    """No chance is left to compare with: that is no proof that there is no peak."""
    found = find_peak(np.tile([1.0, 2.0, 0.5], (20, 1)), (1, 2, 4), rng())
    assert np.isnan(found.p)
    assert find_peak(np.zeros((20, 3)), (1, 2, 4), rng()).p == 1


@pytest.mark.parametrize(
    ("changes", "doses", "message"),
    [
        (np.zeros((3, 0)), (), r"no doses: a curve has at least one above 0"),
        (np.zeros((3, 2)), (1,), r"doses: one for each of 2 columns expected, above 0 and rising; got 1"),
        (np.zeros((3, 2)), (2, 1), r"above 0 and rising; got 2, 1"),
        (np.zeros((3, 2)), (0, 1), r"above 0 and rising; got 0, 1"),
        (np.array([[0.0, np.inf]]), (1, 2), r"dose 2, item 1 \(numbered from 1\): the value is inf"),
    ],
)
def test_what_is_no_curve_is_refused(changes: np.ndarray, doses: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadData, match=message):
        dose_curve(changes, doses, rng())
    with pytest.raises(BadData, match=message):
        best_dose(changes, doses, np.arange(len(changes)) < 1, rng())


# ---- calibrated by simulation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "n"),
    [
        ("normal", 24),
        pytest.param("normal", 100, marks=pytest.mark.slow),
        ("skewed", 24),
        pytest.param("skewed", 60, marks=pytest.mark.slow),
        pytest.param("skewed", 100, marks=pytest.mark.slow),
        pytest.param("heavy", 24, marks=pytest.mark.slow),
    ],
)
def test_the_band_covers_all_doses_at_once(shape: str, n: int) -> None:
    draw, again, covered, alone, sets = rng(n + 1), rng(1), 0, 0, 600
    means = np.linspace(-1, 1, len(DOSES))
    for _ in range(sets):
        values = items_of(draw, n, means, shape)
        lo, hi = simultaneous(values, again)
        covered += bool(((lo <= means) & (means <= hi)).all())
        single = mean_intervals(values)
        alone += bool(((single.lo <= means) & (means <= single.hi)).all())
    print(f"{shape}, {n} items: the band covers {covered / sets:.3f}, intervals of one dose {alone / sets:.3f}")
    # 93 to 97 %, and one sd of 600 sets more: ±0.009
    assert 0.92 <= covered / sets <= 0.98
    assert alone / sets < covered / sets - 0.02


@pytest.mark.parametrize(
    ("shape", "alike"),
    [
        pytest.param("skewed", 0.3, marks=pytest.mark.slow),
        pytest.param("skewed", 0.95, marks=pytest.mark.slow),
        ("very skewed", 0.7),
    ],
)
def test_the_band_covers_24_skewed_items_however_doses_move_together(shape: str, alike: float) -> None:
    draw, again, covered, sets = rng(24), rng(1), 0, 600
    for _ in range(sets):
        lo, hi = simultaneous(items_of(draw, 24, FLAT, shape, alike), again)
        covered += bool(((lo <= 0) & (hi >= 0)).all())
    print(f"24 items, {shape}, {alike} in common: the band covers {covered / sets:.3f}")
    assert 0.92 <= covered / sets <= 0.98


def test_very_few_items_have_bonferronis_limits() -> None:
    """Samples of so few items are too often all alike; the band stays finite."""
    values = items_of(rng(6), 5, FLAT)
    lo, hi = simultaneous(values, rng())
    bonferroni = mean_intervals(values, 1 - 0.05 / len(DOSES))
    assert np.array_equal(lo, bonferroni.lo)
    assert np.array_equal(hi, bonferroni.hi)


@pytest.mark.parametrize("shape", ["normal", "skewed"])
@pytest.mark.parametrize("truth", ["flat", "saturates", "falls after none"])
def test_a_peak_is_not_found_where_there_is_none(shape: str, truth: str) -> None:
    """A flat curve; one whose plateau is as good as its end; one that none itself is the best of."""
    means = {"flat": FLAT, "saturates": np.minimum(np.arange(11) / 5, 1.0), "falls after none": -0.1 * np.arange(11)}[
        truth
    ]
    draw, sets = rng(7), 500
    found = [find_peak(items_of(draw, 40, means, shape), DOSES, draw).p for _ in range(sets)]
    rate = float(np.mean(np.array(found) <= 0.05))
    print(f"{truth}, {shape}: a peak is claimed in {rate:.3f}")
    assert rate <= 0.03


def test_few_items_whose_deviations_can_all_point_one_way_are_not_sure_of_a_peak() -> None:
    """One sign pattern in 32 gives a t of 9.8 by chance; the observed one is 8."""
    away = np.array([-1, -1, -1, 1.5, 1.5])
    items = np.stack([1 + 0.204 * away, np.zeros(5)], axis=1)
    assert find_peak(items, [1, 2], rng()).p == pytest.approx(1 / 32, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "n"),
    [
        pytest.param("normal", 24, marks=pytest.mark.slow),
        ("skewed", 24),
        pytest.param("very skewed", 100, marks=pytest.mark.slow),
    ],
)
def test_a_flat_curve_is_hardly_ever_said_to_change(shape: str, n: int) -> None:
    """The sign-flip test alone takes skewed items for an effect; the interval's p stands beside it."""
    draw, sets, said, flipped = rng(9), 150, 0, 0
    for _ in range(sets):
        values = items_of(draw, n, FLAT, shape)
        said += bool((dose_curve(values, DOSES, draw, flips=2000).p_adjusted <= 0.05).any())
        flipped += bool((holm(sign_flip(values, draw, flips=2000).p) <= 0.05).any())
    print(
        f"flat, {shape}, {n} items: some length is said to change in {said / sets:.3f}, by flips alone {flipped / sets:.3f}"
    )
    assert said / sets <= 0.08
    assert shape == "normal" or flipped > said


def test_few_items_that_change_leave_the_other_lengths_their_band() -> None:
    """Most samples of items hold none of the two that change; the others' limits must not pay for it."""
    values = items_of(rng(10), 100, np.zeros(4))
    lone = values.copy()
    lone[:, 0] = 0.0
    lone[:2, 0] = 1.0
    lo, hi = simultaneous(lone, rng())
    one = mean_intervals(lone)
    assert (hi[1:] - one.mean[1:] < 2.5 * (one.hi - one.mean)[1:]).all()
    assert (one.mean[1:] - lo[1:] < 2.5 * (one.mean - one.lo)[1:]).all()
    assert hi[0] < 0.2


def test_the_chosen_dose_is_judged_without_flattery() -> None:
    """On noise the dev items' own interval misses 0 too often, and the other items' does not."""
    draw, sets = rng(8), 500
    dev = np.arange(60) % 2 == 0
    missed, flattered = 0, 0
    for _ in range(sets):
        values = items_of(draw, 60, FLAT, alike=0.3)
        found = best_dose(values, DOSES, dev, draw, flips=1000)  # its p is not looked at here
        missed += not found.lo <= 0 <= found.hi
        mine = mean_intervals(values[dev][:, [DOSES.index(found.dose)]])
        flattered += not mine.lo[0] <= 0 <= mine.hi[0]
    print(f"the other items' interval misses 0 in {missed / sets:.3f}, that of the dev items in {flattered / sets:.3f}")
    assert 0.03 <= missed / sets <= 0.07
    assert flattered / sets > 0.15
