"""Models put together: published numbers, brute force, few models, and the coverages that docs/statistics.md quotes (-s)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import chdtri, fdtrc, ndtr, ndtri, stdtr, stdtrit

from mless.errors import BadData, BadStudy
from mless.stats import by_kind, by_number, random_effects

checked = settings(deadline=None, derandomize=True, max_examples=30)

#: Thirteen trials of the BCG vaccine (Colditz et al. 1994): ill and well with vaccine, ill and well without, latitude, way of allocation.
TRIALS = [
    (4, 119, 11, 128, 44, "random"), (6, 300, 29, 274, 55, "random"), (3, 228, 11, 209, 42, "random"),
    (62, 13536, 248, 12619, 52, "random"), (33, 5036, 47, 5761, 13, "alternate"), (180, 1361, 372, 1079, 44, "alternate"),
    (8, 2537, 10, 619, 19, "random"), (505, 87886, 499, 87892, 13, "random"), (29, 7470, 45, 7232, 27, "random"),
    (17, 1699, 65, 1600, 42, "systematic"), (186, 50448, 141, 27197, 18, "systematic"), (5, 2493, 3, 2338, 33, "systematic"),
    (27, 16886, 29, 17825, 33, "systematic"),
]  # fmt: skip
LATITUDE = np.array([float(trial[4]) for trial in TRIALS])
ALLOCATION = [trial[5] for trial in TRIALS]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def log_risks() -> tuple[np.ndarray, np.ndarray]:
    effects = [math.log((a / (a + b)) / (c / (c + d))) for a, b, c, d, *_ in TRIALS]
    errors = [math.sqrt(1 / a - 1 / (a + b) + 1 / c - 1 / (c + d)) for a, b, c, d, *_ in TRIALS]
    return np.array(effects), np.array(errors)


def log_odds() -> tuple[np.ndarray, np.ndarray]:
    effects = [math.log(a * d / (b * c)) for a, b, c, d, *_ in TRIALS]
    return np.array(effects), np.array([math.sqrt(1 / a + 1 / b + 1 / c + 1 / d) for a, b, c, d, *_ in TRIALS])


# ---- published numbers -----------------------------------------------------------------------------------------------


def test_the_vaccine_trials_as_published():
    """Viechtbauer (2010), Journal of Statistical Software 36(3), works these trials: τ² 0.3132 [0.1197, 1.1115], mean −0.7145, I² 92.22 %."""
    found = random_effects(*log_risks())
    assert found.k == 13
    assert [found.mean, found.tau2, found.tau2_lo, found.tau2_hi] == pytest.approx(
        [-0.7145, 0.3132, 0.1197, 1.1115], abs=6e-5
    )
    assert found.i2 == pytest.approx(0.9222, abs=6e-5)
    assert found.q == pytest.approx(152.2330, abs=6e-5)
    # Hartung and Knapp's, which take τ² for known: −1.1084 to −0.3206
    assert [found.lo, found.hi] == pytest.approx([-1.1084, -0.3206], abs=0.02)
    assert found.hi - found.lo > 1.1084 - 0.3206
    assert found.error == pytest.approx((found.hi - found.lo) / 2 / stdtrit(12, 0.975))


def test_the_interval_of_tau2_as_published_for_odds():
    """metafor-project.org, analyses:vanhouwelingen2002: 0.1302 to 1.1812 by the Q-profile method."""
    found = random_effects(*log_odds())
    assert [found.tau2_lo, found.tau2_hi] == pytest.approx([0.1302, 1.1812], abs=6e-5)


def test_the_slope_over_latitude_as_published():
    """With latitude as a moderator: slope −0.0291, τ² left 0.0764 (Viechtbauer 2010)."""
    found = by_number(*log_risks(), LATITUDE)
    assert [found.slope, found.tau2] == pytest.approx([-0.0291, 0.0764], abs=1e-4)
    assert found.slope_lo < found.slope < found.slope_hi < 0
    assert found.free == 11
    # Hartung and Knapp's p is 0.0046. The trials' errors differ by up to 14 times, and then it is too small too often.
    assert 0.0046 < found.p < 0.05


# ---- brute force -----------------------------------------------------------------------------------------------------


def likelihood(y: np.ndarray, v: np.ndarray, x: np.ndarray, tau2: float) -> float:
    """The restricted log-likelihood with whole matrices, as it is defined."""
    matrix = np.diag(v + tau2)
    inverse = np.linalg.inv(matrix)
    information = x.T @ inverse @ x
    left = y - x @ np.linalg.solve(information, x.T @ inverse @ y)
    return -0.5 * (np.log(np.linalg.det(matrix)) + np.log(np.linalg.det(information)) + left @ inverse @ left)


def root(function: Callable[[float], float], highest: float) -> float:
    found: Any = brentq(function, 0.0, highest)
    return float(found)


def slow_p(y: np.ndarray, v: np.ndarray, places: int = 100) -> Callable[[float], float]:
    """The p of a value of the mean: τ² found by bisection for each of many quantiles of χ², and the mean of the plain p."""

    def at(tau2: float) -> tuple[float, float, float]:
        w = 1 / (v + tau2)
        mean = float((w * y).sum() / w.sum())
        return mean, 1 / math.sqrt(w.sum()), float((w * (y - mean) ** 2).sum())

    means, widths = np.zeros(places), np.zeros(places)
    alone = at(0.0)[2]
    for place, wanted in enumerate(chdtri(len(y) - 1, (np.arange(places) + 0.5) / places)):
        tau2 = 0.0
        if alone > wanted:
            tau2 = root(lambda tau2, wanted=wanted: at(tau2)[2] - wanted, 1e12 * float(v.max() + np.ptp(y) ** 2))
        means[place], widths[place], _ = at(tau2)
        widths[place] *= min(1.0, max(1 / 3, math.sqrt(alone / wanted)))
    return lambda value: float(np.mean(2 * ndtr(-np.abs(means - value) / widths)))


@checked
@given(st.integers(0, 10_000), st.integers(2, 8), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([1e-3, 1.0, 50.0]))
def test_no_other_tau2_is_likelier(seed: int, k: int, tau: float, unit: float):
    random = rng(seed)
    errors = unit * random.uniform(0.3, 2, size=k)
    effects = unit * tau * random.normal(size=k) + errors * random.normal(size=k)
    found, x = random_effects(effects, errors), np.ones((k, 1))
    best = likelihood(effects, errors**2, x, found.tau2)
    for other in [0.0, *(unit**2 * np.geomspace(1e-4, 30, 200))]:
        assert best >= likelihood(effects, errors**2, x, other) - 1e-7
    # the mean, its p and its interval by their definitions
    w = 1 / (errors**2 + found.tau2)
    assert found.mean == pytest.approx((w * effects).sum() / w.sum())
    p_of = slow_p(effects, errors**2)
    assert [p_of(found.lo), p_of(found.hi), p_of(0.0)] == pytest.approx([0.05, 0.05, found.p], abs=0.004)
    assert found.error == pytest.approx((found.hi - found.lo) / 2 / float(stdtrit(k - 1, 0.975)))
    assert found.weights == pytest.approx(w / w.sum())


def test_equal_errors_give_students_t_and_fishers_f():
    """What the τ² that fit add up to, where it is known."""
    y, s = log_risks()[0], np.full(13, 0.01)
    found = random_effects(y, s)
    half = float(stdtrit(12, 0.975)) * y.std(ddof=1) / math.sqrt(13)
    assert [found.mean, found.lo, found.hi] == pytest.approx([y.mean(), y.mean() - half, y.mean() + half])
    assert found.p == pytest.approx(2 * stdtr(12, y.mean() / y.std(ddof=1) * math.sqrt(13)))
    groups = [y[[kind == name for kind in ALLOCATION]] for name in ("random", "alternate", "systematic")]
    within = sum(((one - one.mean()) ** 2).sum() for one in groups)
    between = sum(len(one) * (one.mean() - y.mean()) ** 2 for one in groups)
    assert by_kind(y, s, ALLOCATION).p == pytest.approx(fdtrc(2, 10, between / 2 / (within / 10)))


def test_kinds_are_a_regression_on_kinds():
    y, s = log_risks()
    found = by_kind(y, s, ALLOCATION)
    x = np.array([[kind == name for name in ("random", "alternate", "systematic")] for kind in ALLOCATION], float)
    best = likelihood(y, s**2, x, found.tau2)
    assert all(best >= likelihood(y, s**2, x, other) - 1e-9 for other in np.geomspace(1e-4, 5, 300))
    w = 1 / (s**2 + found.tau2)
    for group in found.groups:
        mine = np.array([kind == group.name for kind in ALLOCATION])
        assert group.k == mine.sum()
        assert group.mean == pytest.approx((w * y)[mine].sum() / w[mine].sum())
    assert [group.name for group in found.groups] == ["random", "alternate", "systematic"]
    assert (found.free, found.p > 0.3) == (10, True)


def test_two_kinds_are_a_slope_between_them():
    y, s = log_risks()
    kinds = ["far" if latitude > 30 else "near" for latitude in LATITUDE]
    as_number = by_number(y, s, np.array([float(kind == "far") for kind in kinds]))
    as_kinds = by_kind(y, s, kinds)
    far, near = as_kinds.groups
    assert as_number.slope == pytest.approx(far.mean - near.mean)
    assert as_number.p == pytest.approx(as_kinds.p)
    assert as_number.tau2 == pytest.approx(as_kinds.tau2, rel=1e-4)


def test_units_and_order_do_not_matter():
    y, s = log_risks()
    plain, scaled = random_effects(y, s), random_effects(1e-4 * y, 1e-4 * s)
    assert [scaled.mean, scaled.lo, scaled.hi] == pytest.approx([1e-4 * plain.mean, 1e-4 * plain.lo, 1e-4 * plain.hi])
    assert [scaled.tau2, scaled.tau2_hi, scaled.i2, scaled.p] == pytest.approx(
        [1e-8 * plain.tau2, 1e-8 * plain.tau2_hi, plain.i2, plain.p], rel=1e-4
    )
    order = rng().permutation(13)
    mixed = random_effects(y[order], s[order])
    assert [mixed.mean, mixed.tau2] == pytest.approx([plain.mean, plain.tau2], rel=1e-6)
    large = by_number(y, s, 1e9 * LATITUDE)
    assert 1e9 * large.slope == pytest.approx(by_number(y, s, LATITUDE).slope)


def test_a_prediction_against_plain_draws():
    """The same with random numbers, a million of them, and τ² found by bisection for each of a thousand."""
    y, s = log_risks()
    found, random = random_effects(y, s), rng(1)

    def q(tau2: float) -> float:
        w = 1 / (s**2 + tau2)
        return float((w * (y - (w * y).sum() / w.sum()) ** 2).sum())

    drawn: list[np.ndarray] = []
    for wanted in random.chisquare(12, size=1000):
        tau2 = 0.0 if q(0.0) <= wanted else root(lambda at, wanted=wanted: q(at) - wanted, 1e4)
        w = 1 / (s**2 + tau2)
        mean, error = (w * y).sum() / w.sum(), math.sqrt(q(tau2) / 12 / w.sum())
        at = random.random(1000)
        wide = np.maximum(error * np.abs(stdtrit(12, at)), np.abs(ndtri(at)) / math.sqrt(w.sum()))
        drawn.append(mean + np.sign(at - 0.5) * wide + math.sqrt(tau2) * random.normal(size=1000))
    lo, hi = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    assert [found.predicted_lo, found.predicted_hi] == pytest.approx([lo, hi], abs=0.04)
    assert found.predicted_lo < found.lo < found.hi < found.predicted_hi


# ---- few models ------------------------------------------------------------------------------------------------------


def test_one_model_says_nothing_of_others():
    found = random_effects(np.array([0.3]), np.array([0.1]))
    assert (found.k, found.mean, found.weights.tolist()) == (1, 0.3, [1.0])
    for name in ("error", "lo", "hi", "p", "tau2", "tau2_lo", "tau2_hi", "i2", "q", "predicted_lo", "predicted_hi"):
        assert math.isnan(getattr(found, name)), name


def test_two_models_have_one_degree_of_freedom():
    found = random_effects(np.array([0.2, 0.4]), np.array([0.1, 0.1]))
    # equal errors: the mean of two, t with one degree of freedom
    half = 12.706204736432095 * math.sqrt(0.01)
    assert [found.mean, found.lo, found.hi] == pytest.approx([0.3, 0.3 - half, 0.3 + half])
    assert found.tau2 == pytest.approx(0.02 - 0.01, rel=1e-5)  # what is seen less what the errors explain
    assert math.isnan(found.predicted_lo)
    assert math.isnan(found.predicted_hi)
    assert found.tau2_lo == 0


def test_models_that_agree_by_luck_are_known_no_better_than_a_third_of_their_errors():
    found = random_effects(np.full(4, 0.25), np.full(4, 0.1))
    half = 1.959963984540054 * 0.1 / 2 / 3
    assert [found.lo, found.hi] == pytest.approx([0.25 - half, 0.25 + half])
    assert [found.mean, found.tau2, found.i2, found.q, found.q_p] == [0.25, 0, 0, 0, 1]
    # a further model is known no better than all of their errors allow
    assert [found.predicted_lo, found.predicted_hi] == pytest.approx([0.25 - 3 * half, 0.25 + 3 * half], abs=0.002)
    assert found.p == pytest.approx(math.erfc(15 / math.sqrt(2)))
    assert random_effects(np.zeros(3), np.ones(3)).p == 1
    kinds = by_kind(np.full(4, 0.25), np.full(4, 0.1), ["a", "a", "b", "b"])
    assert kinds.p == 1
    assert kinds.groups[0].hi - kinds.groups[0].mean == pytest.approx(1.96 * 0.1 / math.sqrt(2) / 3, rel=1e-4)


def test_an_interval_of_a_very_low_level_is_the_estimate():
    """Of all τ² that fit, few give just this mean; so its own p is below 0.98."""
    found = random_effects(np.array([0.0, 1.0]), np.array([1.0, 0.1]), level=0.02)
    assert found.lo == found.mean == found.hi


def test_a_moderator_with_too_few_models_gives_no_test():
    y, s = np.array([0.1, 0.4]), np.array([0.1, 0.1])
    found = by_kind(y, s, ["silu", "gelu"])
    assert [(one.name, one.k, one.mean) for one in found.groups] == [("silu", 1, 0.1), ("gelu", 1, 0.4)]
    assert math.isnan(found.p)
    assert math.isnan(found.groups[0].lo)
    assert all(math.isnan(value) for value in dataclasses.astuple(by_number(y, s, np.array([1.0, 2.0])))[2:6])
    # the same number for every model explains nothing
    assert math.isnan(by_number(np.ones(4), np.ones(4), np.full(4, 7.0)).slope)
    # one kind only: its mean, and nothing to compare
    alone = by_kind(*log_risks(), ["all"] * 13)
    mine, pooled = alone.groups[0], random_effects(*log_risks())
    assert [mine.mean, mine.lo, mine.hi] == pytest.approx([pooled.mean, pooled.lo, pooled.hi], rel=1e-4)
    assert math.isnan(alone.p)


def test_what_cannot_be_pooled_is_refused():
    good = np.array([0.1, 0.2]), np.array([0.1, 0.1])
    with pytest.raises(BadData, match="no effects: at least one model expected"):
        random_effects(np.zeros(0), np.zeros(0))
    with pytest.raises(BadData, match="a standard error for every effect expected; got 1 for 2"):
        random_effects(good[0], good[1][:1])
    with pytest.raises(BadData, match=r"model 2 \(numbered from 1\): the effect is nan"):
        random_effects(np.array([0.1, math.nan]), good[1])
    for error in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BadData, match=r"model 1 .*: the standard error is .*, expected a finite number above 0"):
            random_effects(good[0], np.array([error, 0.1]))
    with pytest.raises(BadData, match="a value of the moderator for every model expected; got 3 for 2 models"):
        by_kind(*good, ["a", "b", "c"])
    with pytest.raises(BadData, match="a finite number for every model expected; got inf"):
        by_number(*good, np.array([1.0, math.inf]))
    with pytest.raises(BadStudy, match="level must lie between 0 and 1"):
        random_effects(*good, level=95.0)
    with pytest.raises(BadStudy, match="level must lie between 0 and 1"):
        by_kind(*good, ["a", "a"], level=95.0)


# ---- coverage: what docs/statistics.md quotes ------------------------------------------------------------------------

#: Standard errors of models on the same items: alike, up to three times each other, up to eleven times.
ERRORS = {"alike": 0.0, "to-3": 0.55, "to-11": 1.2}


def simulated(k: int, tau: float, errors: str, sets: int) -> dict[str, float]:
    """How often each interval holds the truth: the mean, τ², and a further model's effect."""
    random = rng(100 * k + int(10 * tau))
    held = dict.fromkeys(("mean", "tau2", "next"), 0)
    for _ in range(sets):
        s = np.exp(random.uniform(-ERRORS[errors], ERRORS[errors], k))
        found = random_effects(tau * random.normal(size=k) + s * random.normal(size=k), s)
        held["mean"] += found.lo <= 0 <= found.hi
        held["tau2"] += found.tau2_lo <= tau**2 <= found.tau2_hi
        held["next"] += found.predicted_lo <= tau * random.normal() <= found.predicted_hi
    return {name: count / sets for name, count in held.items()}


@pytest.mark.parametrize(("k", "tau"), [(3, 1.0), (10, 0.3)])
def test_coverage_over_models(k: int, tau: float):
    found = simulated(k, tau, "to-3", 250)
    print(f"models, k = {k}, τ = {tau}: {found}")
    # 250 sets: ±0.014, one sd
    assert 0.91 <= found["mean"] <= 0.985
    assert 0.91 <= found["tau2"] <= 0.99
    assert 0.91 <= found["next"] <= 0.995


@pytest.mark.parametrize(
    ("taus", "errors"),
    [
        pytest.param((0.0, 0.3), "to-3", marks=pytest.mark.slow),
        ((0.0, 0.3), "to-11"),
        ((1.0, 3.0), "to-3"),
        pytest.param((1.0, 3.0), "to-11", marks=pytest.mark.slow),
    ],
)
def test_the_mean_is_covered_in_93_to_97_percent(taus: tuple[float, float], errors: str):
    """Two to ten models. All of one kind: the same interval as `random_effects` has, without the time of a prediction."""
    random, held, sets = rng(7), 0, 0
    for k in (2, 3, 5, 10):
        for tau in taus:
            for _ in range(100):
                s = np.exp(random.uniform(-ERRORS[errors], ERRORS[errors], k))
                (found,) = by_kind(tau * random.normal(size=k) + s * random.normal(size=k), s, ["all"] * k).groups
                held += found.lo <= 0 <= found.hi
                sets += 1
    print(f"models, τ = {taus}, errors {errors}: the mean is covered in {held / sets:.3f} of {sets} sets")
    # 800 sets: ±0.007, one sd
    assert 0.93 <= held / sets <= 0.97


def test_the_plain_interval_covers_less():
    """What the τ² that fit are for: with five models the usual interval is too narrow."""
    random, sets, held = rng(5), 300, np.zeros(2)
    for _ in range(sets):
        s = np.exp(random.uniform(-0.55, 0.55, 5))
        y = random.normal(size=5) + s * random.normal(size=5)
        found = random_effects(y, s)
        plain = 1.96 * math.sqrt(1 / (1 / (s**2 + found.tau2)).sum())
        held += [found.lo <= 0 <= found.hi, abs(found.mean) <= plain]
    print(f"five models: over the τ² that fit {held[0] / sets:.3f}, plain {held[1] / sets:.3f}")
    assert held[1] / sets < 0.92 < held[0] / sets


def test_a_moderator_that_makes_no_difference_is_hardly_ever_found():
    random, sets = rng(9), 300
    kinds, sizes = ["silu"] * 5 + ["gelu"] * 4, np.linspace(-1, 1, 9)
    by = np.zeros(2)
    for _ in range(sets):
        s = np.exp(random.uniform(-0.55, 0.55, 9))
        y = 0.7 * random.normal(size=9) + s * random.normal(size=9)
        by += [by_kind(y, s, kinds).p <= 0.05, by_number(y, s, sizes).p <= 0.05]
    print(f"moderators without an effect: by kind {by[0] / sets:.3f}, by number {by[1] / sets:.3f}")
    assert (by / sets <= 0.08).all()


@pytest.mark.slow
@pytest.mark.parametrize("errors", ERRORS)
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("k", [2, 3, 5, 10, 20])
def test_coverage_over_models_at_length(k: int, tau: float, errors: str):
    found = simulated(k, tau, errors, 1500)
    print(f"models, k = {k}, τ = {tau}, errors {errors}: {found}")
    # 1,500 sets: ±0.006, one sd
    assert 0.93 <= found["mean"] <= 0.975
    assert 0.925 <= found["tau2"] <= 0.99
    assert k == 2 or (0.9 if errors == "to-11" else 0.925) <= found["next"] <= 1


# ---- errors of very different size -------------------------------------------------------------------------------------


def test_a_model_that_says_nothing_changes_nothing():
    """Ten models of an error of 0.05, and one whose error is ten thousand."""
    y = rng(2).normal(size=10)
    s = np.full(10, 0.05)
    alone, beside = random_effects(y, s), random_effects(np.append(y, 0.0), np.append(s, 1e4))
    assert [beside.mean, beside.tau2] == pytest.approx([alone.mean, alone.tau2], rel=1e-3)
    assert beside.predicted_hi - beside.predicted_lo == pytest.approx(alone.predicted_hi - alone.predicted_lo, rel=0.1)


def test_one_model_may_have_nearly_all_the_weight():
    y, s = np.array([0.2, 0.3, 0.5]), np.array([0.1, 0.1, 0.1])
    shares = [random_effects(y, np.array([one, *s[1:]])).i2 for one in (1e-5, 1e-7, 2e-9)]
    assert shares == pytest.approx([shares[0]] * 3, rel=1e-4)
    assert shares[0] > 0.5


@pytest.mark.parametrize("errors", [[1e-15, 0.1, 0.1], [1e-170, 1e-170, 1e-170], [1e160, 1e160, 1e160]])
def test_errors_that_are_rounding_are_refused(errors: list[float]):
    with pytest.raises(BadData, match=r"standard errors from .* leave it out"):
        random_effects(np.array([0.2, 0.3, 0.5]), np.array(errors))


def test_a_level_near_one_has_ends():
    found = random_effects(np.array([0.0, 1.0]), np.array([0.01, 0.01]), level=0.999)
    assert found.tau2_lo < found.tau2 < found.tau2_hi < math.inf
    assert math.isfinite(found.tau2_hi)


def test_a_low_level_has_the_values_with_the_largest_p():
    """The estimate by REML lies beside them here."""
    y = np.array([1.0076, -0.8878, 2.1808, 1.6901, 0.5499, -4.2823, 1.4107])
    s = np.array([7.95, 2.50, 0.1176, 0.620, 0.972, 9.49, 3.52])
    inner, outer = random_effects(y, s, level=0.6), random_effects(y, s, level=0.71)
    assert outer.lo <= inner.lo < inner.hi <= outer.hi
    assert inner.hi > 2.0
    assert inner.lo <= inner.mean <= inner.hi


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_a_number_may_have_any_unit(unit: float):
    y, s = log_risks()
    plain, scaled = by_number(y, s, LATITUDE), by_number(y, s, LATITUDE * unit)
    assert scaled.p == pytest.approx(plain.p)
    assert scaled.slope * unit == pytest.approx(plain.slope)


def test_a_level_such_as_95_is_refused_even_with_too_few_models():
    two = np.zeros(2), np.ones(2)
    for found in (lambda: by_kind(*two, ["a", "b"], level=95.0), lambda: by_number(*two, np.arange(2.0), level=95.0)):  # fmt: skip
        with pytest.raises(BadStudy, match="level must lie between 0 and 1"):
            found()
