"""Many correlations at once: they are right, and their p hold."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from mless.stats.associated import associations


def test_a_correlation_is_that_of_the_ranks() -> None:
    rng = np.random.default_rng(3)
    values, change = rng.lognormal(size=(40, 5)), rng.choice([-1.0, 0.0, 1.0], 40)
    found = associations(values, change, rng)
    for column in range(5):
        r, p = scipy.stats.pearsonr(scipy.stats.rankdata(values[:, column]), change)
        assert found.r[column] == pytest.approx(r)
        assert found.p[column] == pytest.approx(p)
    assert (found.p_adjusted >= found.p).all()


def test_nothing_is_found_in_noise_and_a_true_one_is() -> None:
    """The largest of 200 columns of noise: p ≤ 0.05 in about 5 % of studies, and Holm's no more often."""
    rng = np.random.default_rng(5)
    largest, adjusted = [], []
    for _ in range(200):
        change = rng.choice([-1.0, 0.0, 1.0], 30, p=[0.15, 0.7, 0.15])
        found = associations(rng.normal(size=(30, 50)), change, rng, permutations=199)
        largest.append(found.largest_p <= 0.05)
        adjusted.append(np.nanmin(found.p_adjusted) <= 0.05)
    assert 0.01 <= np.mean(largest) <= 0.10
    assert np.mean(adjusted) <= 0.10
    change = rng.choice([-1.0, 0.0, 1.0], 60)
    values = rng.normal(size=(60, 50))
    values[:, 7] += 2 * change
    found = associations(values, change, rng)
    assert int(np.nanargmin(found.p_adjusted)) == 7
    assert found.p_adjusted[7] < 0.001
    assert found.largest_p == pytest.approx(1 / 2001)


def test_what_cannot_be_correlated_is_nan() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(10, 3))
    values[4, 1] = np.nan
    values[:, 2] = 1.0
    found = associations(values, rng.choice([-1.0, 1.0], 10), rng)
    assert np.isnan(found.r).tolist() == [False, True, True]
    assert np.isnan(found.p_adjusted).tolist() == [False, True, True]
    same = associations(values, np.zeros(10), rng)
    assert np.isnan(same.r).all()
    assert np.isnan(same.largest_p)
    assert np.isnan(associations(values[:, 1:], rng.choice([-1.0, 1.0], 10), rng).largest_p)
