"""Intervals of means over few, skewed items: Hall's limits against a transcription, the mark, and the coverages docs/statistics.md quotes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mless.stats import dilution_exponents, explained, layer_exponents, mean_exponents
from mless.stats.intervals import ENOUGH_ITEMS, is_skewed, mean_intervals, moments, reach, sample_skewness, student

checked = settings(deadline=None, derandomize=True, max_examples=40)
items = st.lists(st.floats(-5, 5), min_size=2, max_size=20).map(np.array)

# ---- the limits ------------------------------------------------------------------------------------------------------


def test_symmetric_items_have_students_interval():
    found = mean_intervals(np.array([[1.0], [2.0], [3.0]]))
    half = 4.302652729911275 / math.sqrt(3)  # t(0.975, 2), sd 1
    np.testing.assert_allclose([found.mean[0], found.lo[0], found.hi[0]], [2, 2 - half, 2 + half], rtol=1e-9)


@checked
@given(st.floats(-12, 12), st.integers(3, 200), st.floats(0.5, 0.999))
def test_the_limits_undo_halls_transformation(skewness: float, n: int, level: float):
    count = np.array([n])
    t, a = float(student(count, level)[0]), skewness * (1 + 5 / n) / math.sqrt(n)
    below, above = (float(side[0]) for side in reach(np.array([skewness]), count, level))

    def hall(x: float) -> float:
        return x + a * x**2 / 3 + a**2 * x**3 / 27 + a / 6

    # a limit that is not Student's is Hall's, and Student's is taken only where Hall's is nearer
    for side, sign in ((below, 1), (above, -1)):
        assert side >= t
        if side > t:
            assert sign * hall(sign * side) == pytest.approx(t, rel=1e-6, abs=1e-9)
        else:
            assert sign * hall(sign * t) >= t * (1 - 1e-9)


@checked
@given(items, st.floats(0.01, 100), st.floats(-3, 3), st.randoms(use_true_random=False))
def test_order_unit_and_sign_do_not_matter(values: np.ndarray, factor: float, shift: float, shuffler):
    order = list(range(len(values)))
    shuffler.shuffle(order)
    table = np.stack([values, values[order], factor * values + shift, -values], axis=1)
    found = mean_intervals(table)
    scale = max(1.0, float(np.nanmax(np.abs(found.hi - found.lo))))
    want = [found.lo[0], found.hi[0]]
    assert [found.lo[1], found.hi[1]] == pytest.approx(want, abs=1e-6 * scale)
    assert [found.lo[2], found.hi[2]] == pytest.approx([factor * x + shift for x in want], abs=1e-5 * scale * factor)
    assert [found.lo[3], found.hi[3]] == pytest.approx([-want[1], -want[0]], abs=1e-6 * scale)
    # a row does not see its neighbours
    assert mean_intervals(table[:, :1]).hi[0] == pytest.approx(found.hi[0], rel=1e-9)


def test_rows_with_missing_items_are_as_if_alone():
    values = np.random.default_rng(0).lognormal(size=(12, 3))
    values[3:7, 1] = math.nan
    values[:, 2] = math.nan
    found = mean_intervals(values)
    alone = mean_intervals(np.delete(values[:, 1:2], range(3, 7), axis=0))
    assert (found.lo[1], found.hi[1]) == pytest.approx((alone.lo[0], alone.hi[0]))
    assert found.n.tolist() == [12, 8, 0]
    assert np.isnan([found.mean[2], found.lo[2], found.hi[2]]).all()
    assert mean_intervals(np.empty((0, 2))).n.tolist() == [0, 0]


def test_equal_items_and_huge_ones():
    point = mean_intervals(np.full((13, 1), 0.1))
    assert point.lo[0] == point.mean[0] == point.hi[0]
    huge = mean_intervals(np.array([[1e150], [0.0], [-1e150], [5e149]]))
    assert np.isfinite([huge.lo[0], huge.hi[0]]).all()


# ---- the mark --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 12, 24, 59])
def test_the_mark_is_dagostinos_test_at_one_in_a_thousand(n: int):
    from scipy.stats import skewtest

    values = np.random.default_rng(n).lognormal(0, 0.6, size=(n, 400))
    _, _, count, deviations = moments(values)
    found = is_skewed(sample_skewness(deviations, count), count)
    np.testing.assert_array_equal(found, skewtest(values).pvalue < 0.001)
    assert found.any()
    assert not found.all()


@pytest.mark.parametrize("n", [3, 7, ENOUGH_ITEMS, 200])
def test_nothing_is_marked_where_the_mark_has_no_meaning(n: int):
    values = np.zeros((n, 1))
    values[0] = 1.0
    assert not mean_intervals(values).skewed[0]


def test_normal_items_are_hardly_ever_marked():
    values = np.random.default_rng(1).normal(size=(24, 20_000))
    assert mean_intervals(values).skewed.mean() < 0.003


# ---- coverage: what docs/statistics.md quotes; the table there is made by benchmarks/intervals.py ----------------------

Shape = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def odd_ones(far: float) -> Shape:
    """One item in twenty lies `far` standard deviations of the others away."""
    return lambda rng, size: rng.normal(size=size) + far * (rng.random(size) < 0.05)


SHAPES: dict[str, tuple[Shape, float]] = {
    "normal": (lambda rng, size: rng.normal(size=size), 0.0),
    "lognormal-0.5": (lambda rng, size: rng.lognormal(0, 0.5, size=size), math.exp(0.125)),
    "lognormal-1": (lambda rng, size: rng.lognormal(0, 1, size=size), math.exp(0.5)),
    "outliers-5sd": (odd_ones(5), 0.25),
}
REPS = 20_000  # Monte-Carlo error, one sd: 0.0015


@pytest.mark.parametrize("n", [8, 12, 24, 60])
@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_of_a_mean(shape: str, n: int):
    draw, true = SHAPES[shape]
    found = mean_intervals(draw(np.random.default_rng(n), (n, REPS)))
    coverage = np.mean((found.lo <= true) & (true <= found.hi))
    print(f"mean, {shape}, n = {n}: {coverage:.3f}")
    assert 0.93 <= coverage <= 0.97


@pytest.mark.parametrize("n", [8, 24])
def test_coverage_where_no_method_reaches_it(n: int):
    """Where the odd items are so far off that a sample without them cannot know of them, coverage is less, and the docs say so."""
    found = mean_intervals(odd_ones(10)(np.random.default_rng(n), (n, REPS)))
    coverage = (found.lo <= 0.5) & (found.hi >= 0.5)
    print(
        f"mean, outliers of 10 sd, n = {n}: {coverage.mean():.3f}; among marked rows {coverage[found.skewed].mean():.3f}"
    )
    assert 0.75 < coverage.mean() < 0.93


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_coverage_of_the_exponent_at_24_items(shape: str, sign: int):
    """Through what a study does: log λ of three heads and of an even spread, per item, to a layer's ε with interval."""
    rng, reps, n = np.random.default_rng(24), 5000, 24
    draw, true = SHAPES[shape]
    even = rng.uniform(-1.2, -0.2, size=(n, reps))  # items of different lengths
    exponent = 0.4 + 0.1 * sign * (draw(rng, (n, reps)) - true)
    heads = np.array([0.5, 1.0, 1.5]) * exponent[..., None] + 0.02 * rng.normal(size=(n, reps, 3))
    found = mean_exponents(layer_exponents(dilution_exponents(heads * even[..., None], even)))
    coverage = np.mean([one.lo <= 0.4 <= one.hi for one in found])
    print(f"ε, {shape}, n = 24: {coverage:.3f}")
    assert 0.93 <= coverage <= 0.97


@pytest.mark.parametrize("n", [8, 12, 24, 60])
@pytest.mark.parametrize("shape", ["even", "lognormal-moves", "lognormal-left", "outliers-5sd"])
def test_coverage_of_an_affine_r_squared(shape: str, n: int):
    rng = np.random.default_rng(n)
    spread = {
        "even": (0.3, 0.3),
        "lognormal-moves": (1.0, 0.3),
        "lognormal-left": (0.3, 1.0),
        "outliers-5sd": (0.3, 0.3),
    }
    of_moves, of_left = spread[shape]
    moves = rng.lognormal(0, of_moves, size=(n, REPS))
    share = 0.2 * rng.lognormal(0, of_left, size=(n, REPS))
    mean_share = 0.2 * math.exp(of_left**2 / 2)
    if shape == "outliers-5sd":
        # 5 sd of a lognormal share: √(e^σ² − 1) of its mean each
        far = 1 + 5 * math.sqrt(math.exp(of_left**2) - 1)
        share *= np.where(rng.random(size=(n, REPS)) < 0.05, far, 1.0)
        mean_share *= 0.95 + 0.05 * far
    true = 1 - mean_share
    found = explained(share * moves, moves)
    coverage = np.mean((found.lo <= true) & (true <= found.hi))
    print(f"R², {shape}, n = {n}: {coverage:.3f}")
    assert 0.93 <= coverage <= 0.975
