"""A ratio of paired means: its value, its interval against Fieller's formula, how often that holds, and when nothing is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mless.stats.intervals import mean_intervals
from mless.stats.ratios import ratios_of_means

ROWS = 2_000


def fieller(part: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """The formula of Fieller (1954) with Student's t, as the textbooks have it."""
    n, t = len(part), stats.t.ppf(0.975, len(part) - 1)
    (a, b), (aa, ab, bb) = (part.mean(), whole.mean()), np.cov(part, whole)[[0, 0, 1], [0, 1, 1]] / n
    q = b * b - t * t * bb
    middle, root = a * b - t * t * ab, np.sqrt((a * b - t * t * ab) ** 2 - q * (a * a - t * t * aa))
    return (middle - root) / q, (middle + root) / q


def test_it_is_fiellers_set_where_items_are_not_skewed() -> None:
    """Symmetric items have no skewness, so the mean's interval is Student's."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(20, 2))
    both = np.concatenate([half, -half])
    part, whole = both @ [0.3, 0.2] + 0.5, both @ [0.1, 0.4] + 1.0
    found = ratios_of_means(part[:, None], whole[:, None])
    assert found.value[0] == pytest.approx(0.5)
    assert (found.lo[0], found.hi[0]) == pytest.approx(fieller(part, whole), abs=1e-9)


@pytest.mark.parametrize("n", [5, 24, 100])
def test_the_ends_are_where_the_mean_begins_to_differ_from_nothing(n: int) -> None:
    """Asked of the items themselves: at an end the mean's interval ends at 0, and further out it leaves 0 aside."""
    rng = np.random.default_rng(n)
    whole = 3 + rng.standard_t(5, size=(n, 200))
    part = 0.4 * whole + rng.exponential(size=(n, 200)) - 1
    part[0, :20] = np.nan
    found = ratios_of_means(part, whole)
    part, whole, lo, hi = part[:, found.known], whole[:, found.known], found.lo[found.known], found.hi[found.known]
    assert len(lo) > 100
    scale = np.nanmax(np.abs(part), axis=0)
    np.testing.assert_allclose(mean_intervals(part - hi * whole).hi / scale, 0, atol=1e-9)
    np.testing.assert_allclose(mean_intervals(part - lo * whole).lo / scale, 0, atol=1e-9)
    for step in (1e-6, 1, 1e3, 1e9):
        assert (mean_intervals(part - (hi + step) * whole).hi < 0).mean() > 0.98
        assert (mean_intervals(part - (lo - step) * whole).lo > 0).mean() > 0.98


@pytest.mark.parametrize("n", [24, 100])
@pytest.mark.parametrize("shape", ["normal", "skewed", "heavy"])
@pytest.mark.parametrize("true", [0.0, 0.4, 1.0])
def test_intervals_hold_in_95_of_100(n: int, shape: str, true: float) -> None:
    rng = np.random.default_rng(int(n + 10 * true))
    draw = {
        "normal": lambda: rng.normal(size=(n, ROWS)),
        "skewed": lambda: rng.exponential(size=(n, ROWS)) - 1,
        "heavy": lambda: rng.standard_t(4, size=(n, ROWS)),
    }[shape]
    whole = 1.5 + draw()
    part = true * whole + 0.5 * draw()
    found = ratios_of_means(part, whole)
    held = ((found.lo <= true) & (true <= found.hi))[found.known].mean()
    assert found.known.mean() > 0.9
    assert 0.93 <= held <= 0.98


def test_a_whole_that_may_be_nothing_gives_no_ratio() -> None:
    rng = np.random.default_rng(1)
    whole = rng.normal(size=(24, 200))
    found = ratios_of_means(whole * 0.5, whole)
    assert 0.02 <= found.known.mean() <= 0.10  # chance alone
    assert np.isnan(found.value[~found.known]).all()
    assert np.isnan(found.lo[~found.known]).all()
    assert np.isnan(found.hi[~found.known]).all()


@settings(max_examples=20, deadline=None)
@given(
    factor=st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1e-6), seed=st.integers(0, 2**32 - 1), ratio=st.floats(-3, 3)
)
def test_units_do_not_matter_and_a_share_of_the_whole_is_found_exactly(factor: float, seed: int, ratio: float) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.normal(5.0, 1.0, size=(12, 1))
    part = ratio * whole + rng.normal(size=(12, 1))
    one, other = ratios_of_means(part, whole), ratios_of_means(factor * part, factor * whole)
    for name in ("value", "lo", "hi"):
        assert getattr(other, name)[0] == pytest.approx(getattr(one, name)[0], rel=1e-6, abs=1e-6)
    assert one.lo[0] <= one.value[0] <= one.hi[0]
    exact = ratios_of_means(ratio * whole, whole)
    assert (exact.lo[0], exact.value[0], exact.hi[0]) == pytest.approx((ratio,) * 3, abs=1e-6)


def test_an_item_without_one_side_is_left_out() -> None:
    whole = np.array([[1.0], [1.2], [0.9], [np.nan], [1.1]])
    part = np.array([[0.5], [0.7], [np.nan], [9.0], [0.6]])
    found = ratios_of_means(part, whole)
    assert found.n[0] == 3
    assert found.value[0] == pytest.approx(1.8 / 3.3)
