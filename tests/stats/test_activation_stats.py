"""Streamed statistics of activations, each held against the plain way of computing it from all values at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats as scipy_stats

from mless.errors import BadAttention
from mless.stats import Margins, near_zero_of, paired_change
from mless.stats.activations import (
    METRICS,
    NearZero,
    TokenStatistics,
    count_values,
    gini_of_sorted,
    levene,
    linear_edges,
    log_edges,
    metrics_of,
    pooled_moments,
    token_statistics,
    zoom_edges,
)


def silu(x: np.ndarray) -> np.ndarray:
    return (x / (1 + np.exp(-x))).astype(np.float32)


@pytest.fixture
def values() -> np.ndarray:
    return silu(np.random.default_rng(0).normal(0, 1.3, (23, 157)))


# ---- tokens --------------------------------------------------------------------------------------------------------------


def test_token_statistics_are_those_of_each_row(values: np.ndarray) -> None:
    found = token_statistics(values, [0.01, 0.02, 0.04])
    exact = values.astype(np.float64)
    assert found.units == 157
    assert len(found) == 23
    np.testing.assert_allclose(found.mean, exact.mean(1))
    np.testing.assert_allclose(found.m2, ((exact - exact.mean(1, keepdims=True)) ** 2).sum(1))
    np.testing.assert_allclose(found.l1, np.abs(exact).sum(1))
    np.testing.assert_allclose(found.l2, np.linalg.norm(exact, axis=1))
    for at, threshold in enumerate((0.01, 0.02, 0.04)):
        np.testing.assert_array_equal(found.near_zero[:, at], (np.abs(exact) <= threshold).sum(1))


def test_a_threshold_of_zero_counts_zeros() -> None:
    found = token_statistics(np.array([[0.0, -0.0, 1.0, -2.0]], np.float32), [0.0])
    assert found.near_zero.tolist() == [[2]]


def test_gini_is_the_mean_difference_of_pairs(values: np.ndarray) -> None:
    magnitude = np.abs(values.astype(np.float64))
    pairs = np.abs(magnitude[:, :, None] - magnitude[:, None, :]).mean((1, 2)) / (2 * magnitude.mean(1))
    np.testing.assert_allclose(gini_of_sorted(np.sort(magnitude, 1)), pairs)


def test_gini_at_its_ends() -> None:
    rows = np.array([[2.0, 2, 2, 2], [0, 0, 0, 5], [0, 0, 0, 0]])
    found = gini_of_sorted(rows)
    np.testing.assert_allclose(found[:2], [0, 0.75], atol=1e-15)
    assert np.isnan(found[2])


@pytest.mark.parametrize("offset", [0.0, 1e4], ids=["centred", "far-from-zero"])
def test_pooled_moments_are_those_of_all_values(values: np.ndarray, offset: float) -> None:
    values = (values + np.float32(offset)).astype(np.float32)
    # in blocks, as they come
    parts = [token_statistics(values[a : a + 5], [0.0]) for a in range(0, 23, 5)]
    rows = TokenStatistics.joined(parts)
    chosen = np.arange(23) % 3 != 0
    for pick in (None, chosen):
        kept = values.astype(np.float64)[slice(None) if pick is None else pick].ravel()
        found = pooled_moments(rows, pick)
        assert found.n == kept.size
        assert found.mean == pytest.approx(kept.mean(), rel=1e-12)
        assert found.variance == pytest.approx(kept.var(), rel=1e-9)
        assert found.m3 == pytest.approx(((kept - kept.mean()) ** 3).sum(), rel=1e-6)
        assert found.kurtosis == pytest.approx(scipy_stats.kurtosis(kept, fisher=False), rel=1e-6)


def test_tokens_that_are_not_there_have_no_metrics(values: np.ndarray) -> None:
    metrics, moments = metrics_of(token_statistics(values, [0.01, 0.02, 0.04]), np.zeros(23, bool))
    assert moments.n == 0
    assert metrics.keys() == METRICS.keys()
    assert all(np.isnan(value) for value in metrics.values())


def test_metrics_are_shares_of_values_and_means_over_tokens(values: np.ndarray) -> None:
    chosen = np.arange(23) < 7
    metrics, _ = metrics_of(token_statistics(values, [0.01, 0.02, 0.04]), chosen)
    kept = values[:7].astype(np.float64)
    assert metrics["near_zero"] == (np.abs(kept) <= 0.02).mean()
    assert metrics["near_zero_half"] == (np.abs(kept) <= 0.01).mean()
    assert metrics["near_zero_double"] == (np.abs(kept) <= 0.04).mean()
    assert metrics["l1"] == pytest.approx(np.abs(kept).sum(1).mean())
    assert metrics["l2"] == pytest.approx(np.linalg.norm(kept, axis=1).mean())
    assert metrics["variance"] == pytest.approx(kept.var())


# ---- histograms ----------------------------------------------------------------------------------------------------------


def test_bins_hold_what_numpy_counts(values: np.ndarray) -> None:
    width = 0.0203
    found = count_values(values, width)
    flat = values.ravel()
    for counts, edges in ((found.linear, linear_edges(width)), (found.zoom, zoom_edges(width))):
        assert counts.sum() == flat.size
        inside = np.histogram(flat, edges)[0]
        # an edge that float32 puts a hair's breadth elsewhere moves a value to the neighbour
        assert np.abs(np.cumsum(counts[1:-1] - inside)).max() <= 1
        assert counts[0] == pytest.approx((flat < edges[0]).sum(), abs=1)
        assert counts[-1] == pytest.approx((flat >= edges[-1]).sum(), abs=1)
    np.testing.assert_array_equal(found.positive[1:-1], np.histogram(flat[flat > 0], log_edges())[0])
    np.testing.assert_array_equal(found.negative[1:-1], np.histogram(-flat[flat < 0], log_edges())[0])
    assert found.zeros + found.positive.sum() + found.negative.sum() == flat.size


def test_zeros_of_either_sign_and_values_beyond_every_edge() -> None:
    given = np.array([[0.0, -0.0, 1e-12, -1e-12, 1e6, -1e6, 2.0**16, 2.0**-24]], np.float32)
    found = count_values(given, 0.5)
    assert found.zeros == 2
    assert (found.positive[0], found.positive[-1], found.negative[0], found.negative[-1]) == (1, 2, 1, 1)
    assert found.positive[1] == 1  # 2⁻²⁴ is the first edge and belongs to the bin above it
    assert (found.linear[0], found.linear[-1]) == (1, 2)


def test_the_zoom_loses_no_value_at_its_edges() -> None:
    below, above = (np.nextafter(np.float32(5), np.float32(to)) for to in (0, 9))
    given = np.array([[-above, -5, -below, -4.9, 0, below, 5, above, 7, -7]], np.float32)
    found = count_values(given, 1.0)
    assert found.zoom.sum() == found.linear.sum() == given.size
    middle = len(found.linear) // 2
    assert (
        (found.zoom[0], found.zoom[-1])
        == (found.linear[: middle - 5].sum(), found.linear[middle + 5 :].sum())
        == (2, 3)
    )
    assert (found.zoom[1], found.zoom[-2]) == (2, 1)  # −5 and its neighbour; the neighbour of 5


def test_counts_of_blocks_add_up(values: np.ndarray) -> None:
    whole, parts = count_values(values, 0.02), count_values(values[:9], 0.02) + count_values(values[9:], 0.02)
    for name in ("linear", "zoom", "positive", "negative", "zeros"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


# ---- the threshold -------------------------------------------------------------------------------------------------------


def from_all(values: np.ndarray) -> tuple[float, float]:
    """Lower medians by sorting."""
    magnitude = np.sort(np.abs(values.ravel()))
    middle = (len(magnitude) - 1) // 2
    median = magnitude[middle]
    return float(median), float(np.sort(np.abs(magnitude - median))[middle])


def streamed(values: dict[int, np.ndarray], size: int = 6) -> dict[int, NearZero]:
    passes = 0

    def stream(take: Callable[[int, np.ndarray], None]) -> None:
        nonlocal passes
        passes += 1
        for layer, mine in values.items():
            for first in range(0, len(mine), size):
                take(layer, mine[first : first + size])

    found = near_zero_of(list(values), stream)
    assert passes == 4
    return found


RNG = np.random.default_rng(7)
DISTRIBUTIONS = {
    "silu": silu(RNG.normal(0, 1, (40, 33))),
    "even-count": silu(RNG.normal(0, 1, (40, 32))),
    "wide": (RNG.lognormal(0, 6, (30, 31)) * RNG.choice([-1, 1], (30, 31))).astype(np.float32),
    "narrow-around-one": (1 + RNG.normal(0, 1e-6, (30, 31))).astype(np.float32),
    "few-levels": RNG.integers(-3, 4, (30, 31)).astype(np.float32),
    "bfloat16": (silu(RNG.normal(0, 1, (40, 33))).view(np.int32) & np.int32(-65536)).view(np.float32),
    "one-value": np.array([[0.25]], np.float32),
    "two-values": np.array([[0.25, -4.0]], np.float32),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_streamed_threshold_is_exact(name: str) -> None:
    values = DISTRIBUTIONS[name]
    median, mad = from_all(values)
    found = streamed({3: values})[3]
    assert (found.median, found.mad) == (median, mad)
    assert found.threshold == 1.4826 * mad * 0.1
    assert found.width > 0


def test_layers_do_not_mix() -> None:
    both = {1: DISTRIBUTIONS["silu"], 4: DISTRIBUTIONS["silu"] * np.float32(8)}
    found = streamed(both)
    assert found[4].threshold == pytest.approx(8 * found[1].threshold)


def test_where_half_of_the_values_are_zero_the_threshold_is_and_bins_still_have_a_width() -> None:
    relu = np.maximum(RNG.normal(-0.3, 1, (50, 40)), 0).astype(np.float32)
    found = streamed({1: relu})[1]
    assert (found.median, found.mad, found.threshold) == (0, 0, 0)
    assert found.width == pytest.approx(0.1 * np.median(relu[relu > 0]), rel=0.01)
    assert streamed({1: np.zeros((3, 4), np.float32)})[1].width == 1.0


# ---- pairs ---------------------------------------------------------------------------------------------------------------


def changes(rng: np.random.Generator, items: int = 12, rows: int = 3) -> tuple[np.ndarray, np.ndarray]:
    none = rng.lognormal(0, 0.4, (items, rows))
    return none * np.exp(rng.normal([0.3, 0.0, -0.3], 0.05, (items, rows))), none


def test_log_ratios_have_students_interval_and_an_exact_p() -> None:
    values, none = changes(np.random.default_rng(1))
    found = paired_change(values, none, np.random.default_rng(0), scale="log ratio")
    logs = np.log(values / none)
    for row in range(3):
        expected = scipy_stats.ttest_1samp(logs[:, row], 0).confidence_interval()
        assert (found.lo[row], found.hi[row]) == pytest.approx((expected.low, expected.high))
    np.testing.assert_allclose(found.difference, logs.mean(0))
    np.testing.assert_allclose(found.value, values.mean(0))
    assert found.p[0] == found.p[2] == 2 / 2**12  # every item points the same way
    assert found.p_adjusted[0] == pytest.approx(3 * found.p[0])
    assert found.verdict == ["rises", "unchanged", "drops"]


def test_differences_are_judged_beside_the_mean_without() -> None:
    rng = np.random.default_rng(2)
    none = 0.05 + rng.normal(0, 0.004, (20, 3))
    values = none + rng.normal([-0.01, 0.0, 0.01], 0.0005, (20, 3))
    found = paired_change(values, none, rng, scale="difference")
    assert found.verdict == ["drops", "unchanged", "rises"]
    assert found.difference == pytest.approx([-0.01, 0, 0.01], abs=5e-4)
    wide = paired_change(values, none, rng, scale="difference", margins=Margins(0.5, 1.5, (0.6, 1.4)))
    assert wide.verdict == ["unchanged"] * 3


def test_an_item_without_such_tokens_is_left_out_of_that_row_alone() -> None:
    values, none = changes(np.random.default_rng(3))
    values[4, 1] = np.nan
    none[5, 1] = 0.0  # no log ratio
    found = paired_change(values, none, np.random.default_rng(0), scale="log ratio")
    assert found.n.tolist() == [12, 10, 12]
    kept = [item for item in range(12) if item not in (4, 5)]
    assert found.difference[1] == pytest.approx(np.log(values[kept, 1] / none[kept, 1]).mean())
    assert found.value[1] == pytest.approx(values[kept, 1].mean())


@pytest.mark.parametrize("items", [0, 1])
def test_too_few_items_decide_nothing(items: int) -> None:
    values, none = changes(np.random.default_rng(4), items)
    found = paired_change(values, none, np.random.default_rng(0), scale="difference")
    assert np.isnan(found.lo).all()
    assert np.isnan(found.p).all()
    assert found.verdict == ["undecided"] * 3


def test_nothing_without_gives_no_verdict() -> None:
    rng = np.random.default_rng(0)
    found = paired_change(rng.normal(0.1, 0.01, (9, 1)), np.zeros((9, 1)), rng, scale="difference")
    assert found.verdict == ["undecided"]
    assert found.difference[0] == pytest.approx(0.1, abs=0.02)


def test_infinite_values_are_refused_by_name() -> None:
    values, none = changes(np.random.default_rng(4))
    values[3, 2] = np.inf
    with pytest.raises(BadAttention, match="item 4"):
        paired_change(values, none, np.random.default_rng(0), scale="difference")


def test_levene_as_scipy_computes_it_from_all_values() -> None:
    rng = np.random.default_rng(5)
    with_, without = rng.normal(0.3, 1.2, 500), rng.normal(0.2, 1.0, 500)

    def of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.array([[np.abs(values - values.mean()).mean()]]), np.array([[values.var()]])

    (d1, v1), (d0, v0) = of(with_), of(without)
    found = levene(np.array([500.0]), (d1, d0), (v1, v0))
    assert found[0, 0] == pytest.approx(scipy_stats.levene(with_, without, center="mean").statistic)
