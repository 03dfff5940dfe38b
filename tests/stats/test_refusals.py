"""Statistics of accuracy: what is refused, by name, and what too few items say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from accuracy_data import rng

from mless.errors import BadData, BadStudy
from mless.stats import (
    Estimate,
    accuracy_interval,
    cluster_difference,
    cluster_equivalence,
    equivalence,
    items_for_effect,
    majority_at_k,
    mcnemar_exact,
    mcnemar_mid_p,
    mcnemar_power,
    over_seeds,
    paired_difference,
    pass_at_k,
    smallest_detectable_effect,
    smallest_detectable_mean,
)


def test_a_nan_is_refused_by_item():
    broken = np.array([1.0, 0.0, math.nan])
    fine = np.zeros(3)
    with pytest.raises(BadData, match=r"the condition, item 3 \(numbered from 1\): correct is nan, expected 0 or 1"):
        accuracy_interval(broken)
    for compare in (paired_difference, mcnemar_exact, mcnemar_mid_p):
        with pytest.raises(BadData, match="after, item 3"):
            compare(fine, broken)
    with pytest.raises(BadData, match=r"before, item 1 .*correct is 0\.5"):
        equivalence(np.array([0.5, 1.0]), np.zeros(2), 0.1)
    with pytest.raises(BadData, match="before, item 3, sample 1"):
        cluster_difference(broken[:, None], fine[:, None], rng())
    with pytest.raises(BadData, match=r"item 3, sample 1 \(numbered from 1\): correct is nan"):
        pass_at_k(broken[:, None], 1, rng())
    with pytest.raises(BadData, match="at least one sample per item"):
        cluster_difference(np.zeros((3, 0)), np.zeros((3, 1)), rng())


def test_conditions_with_other_items_are_refused():
    for compare in (paired_difference, mcnemar_exact, mcnemar_mid_p):
        with pytest.raises(BadData, match="differ in their items: 3 before, 4 after"):
            compare(np.zeros(3), np.zeros(4))
    with pytest.raises(BadData, match="differ in their items"):
        cluster_difference(np.zeros((3, 2)), np.zeros((4, 2)), rng())
    with pytest.raises(BadData, match="got 2 keys for 3 items"):
        cluster_difference(np.zeros((3, 2)), np.zeros((3, 2)), rng(), ["a", "b"])


def test_values_out_of_range_are_refused():
    x = np.zeros(4)
    for bad in (0.0, 1.0, 95.0, math.nan):
        with pytest.raises(BadStudy, match="level"):
            accuracy_interval(x, bad)
        with pytest.raises(BadStudy, match="level"):
            equivalence(x, x, 0.1, bad)
        with pytest.raises(BadStudy, match="margin"):
            equivalence(x, x, bad if bad != 95.0 else -1.0)
        with pytest.raises(BadStudy, match="power"):
            smallest_detectable_effect(100, 0.1, power=bad)
        with pytest.raises(BadStudy, match="alpha"):
            mcnemar_power(100, 0.1, 0.1, alpha=bad)
    with pytest.raises(BadStudy, match="changed_share"):
        smallest_detectable_effect(100, 1.5)
    with pytest.raises(BadStudy, match="at most the share of items that change"):
        items_for_effect(0.2, 0.1)
    with pytest.raises(BadStudy, match=r"at least 0\.001"):
        items_for_effect(0.0, 0.1)
    with pytest.raises(BadStudy, match="at most the share"):
        mcnemar_power(100, 0.2, 0.1)
    with pytest.raises(BadStudy, match="sd must be"):
        smallest_detectable_mean(100, math.nan)
    with pytest.raises(BadStudy, match="margin"):
        cluster_equivalence(np.zeros((2, 1)), np.zeros((2, 1)), 0.0)
    with pytest.raises(ValueError, match="reps"):
        pass_at_k(np.zeros((3, 2)), 1, rng(), reps=10)


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_items_say_nothing(n: int):
    x, value = np.ones(n, dtype=bool), 1.0 if n else math.nan
    nan = math.nan

    def same(found: object, *expected: float) -> bool:
        return np.allclose(np.array(found, dtype=float), expected, equal_nan=True)

    accuracy = accuracy_interval(x)
    assert same([accuracy.value, accuracy.lo, accuracy.hi, accuracy.n], value, nan, nan, n)
    difference = paired_difference(~x, x)
    assert same([difference.value, difference.lo, difference.hi], value, nan, nan)
    assert same([mcnemar_exact(~x, x), mcnemar_mid_p(~x, x), equivalence(~x, x, 0.1).p], nan, nan, nan)
    grouped = cluster_difference(~x[:, None], x[:, None], rng())
    assert same([grouped.value, grouped.lo, grouped.hi, grouped.p, grouped.n], value, nan, nan, nan, n)
    one_cluster = cluster_difference(np.zeros((3, 1)), np.ones((3, 1)), rng(), ["a"] * 3)
    assert same([one_cluster.value, one_cluster.lo, one_cluster.p, one_cluster.clusters], 1, nan, nan, 1)
    assert math.isnan(cluster_equivalence(~x[:, None], x[:, None], 0.1).p)
    passed = pass_at_k(x[:, None], 1, rng())
    assert isinstance(passed, Estimate)
    assert same([passed.value, passed.lo, passed.hi], value, nan, nan)
    assert same([majority_at_k([["1"]] * n, x[:, None], 1).mean, over_seeds(x[:, None]).mean], value, value)
    assert math.isnan(paired_difference(~x, x).changed_share) == (n == 0)
