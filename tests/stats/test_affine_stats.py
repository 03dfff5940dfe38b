"""The affine fit and its scores, against the obvious computation on the vectors themselves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mless.errors import BadStudy
from mless.stats import (
    AffineSums,
    affine_residual,
    cosine_across_items,
    explained,
    fit_affine,
    fit_verdict,
    halves,
    ratio_of_sums,
)


def sums_of(o: np.ndarray, after: np.ndarray) -> AffineSums:
    """Of heads × tokens × dim."""
    d = after - o
    n = np.full(o.shape[0], float(o.shape[1]))
    return AffineSums(n, (o**2).sum((1, 2)), (d**2).sum((1, 2)), (o * d).sum((1, 2)), o.sum(1), d.sum(1))


def vectors(rng: np.random.Generator, heads: int = 3, tokens: int = 40, dim: int = 5) -> tuple[np.ndarray, np.ndarray]:
    o = rng.normal(size=(heads, tokens, dim)) + rng.normal(size=(heads, 1, dim))
    return o, 0.7 * o + rng.normal(size=(heads, 1, dim)) + 0.3 * rng.normal(size=o.shape)


def test_the_fit_is_least_squares():
    o, after = vectors(np.random.default_rng(0))
    fit = fit_affine(sums_of(o, after))
    for head in range(len(o)):
        tokens, dim = o[head].shape
        # unknowns: λ, then σ; one equation per token and dimension
        design = np.column_stack([o[head].ravel(), np.tile(np.eye(dim), (tokens, 1))])
        solution = np.linalg.lstsq(design, after[head].ravel(), rcond=None)[0]
        np.testing.assert_allclose(fit.scale[head], solution[0], rtol=1e-10)
        np.testing.assert_allclose(fit.shift[head], solution[1:], rtol=1e-9)


def test_what_is_left_on_other_items_is_exact():
    rng = np.random.default_rng(1)
    fit = fit_affine(sums_of(*vectors(rng)))
    o, after = vectors(rng, tokens=17)
    direct = ((after - fit.scale[:, None, None] * o - fit.shift[:, None]) ** 2).sum((1, 2))
    np.testing.assert_allclose(affine_residual(fit, sums_of(o, after)), direct, rtol=1e-10)


def test_sums_of_two_items_are_those_of_both():
    rng = np.random.default_rng(2)
    (a, b), (c, d) = vectors(rng), vectors(rng, tokens=9)
    whole, parts = sums_of(np.concatenate([a, c], 1), np.concatenate([b, d], 1)), sums_of(a, b) + sums_of(c, d)
    for name in AffineSums.__slots__:
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12)


def test_an_exact_map_is_found_and_leaves_nothing():
    rng = np.random.default_rng(3)
    o = rng.normal(size=(2, 30, 4))
    shift = rng.normal(size=(2, 1, 4))
    sums = sums_of(o, 0.4 * o + shift)
    fit = fit_affine(sums)
    np.testing.assert_allclose(fit.scale, 0.4, rtol=1e-12)
    np.testing.assert_allclose(fit.shift, shift[:, 0], rtol=1e-10)
    assert (affine_residual(fit, sums) < 1e-12 * sums.moves).all()


def test_outputs_that_do_not_vary_have_a_shift_and_no_scale():
    o = np.ones((1, 6, 3))
    fit = fit_affine(sums_of(o, o + 2))
    assert fit.scale[0] == 1
    np.testing.assert_allclose(fit.shift[0], 2)


def test_nothing_to_fit_is_nan():
    fit = fit_affine(sums_of(np.zeros((1, 0, 3)), np.zeros((1, 0, 3))))
    assert np.isnan(fit.scale).all()
    assert np.isnan(fit.shift).all()


# ---- ratios ---------------------------------------------------------------------------------------------------------------------


def test_ratio_and_its_jackknife_by_hand():
    part, whole = np.array([[1.0], [2.0], [3.0]]), np.array([[4.0], [4.0], [4.0]])
    found = ratio_of_sums(part, whole)
    moved = np.log([5 / 8, 4 / 8, 3 / 8])  # without each in turn
    moved = moved.mean() - moved
    error = math.sqrt((moved**2).sum())
    # Hall's limits with a third moment of three items, written out; t with 2 degrees of freedom
    t, skewness = 4.302652729911275, (moved**3).mean() / (moved**2).mean() ** 1.5 * math.sqrt(6)
    a = skewness * (1 + 5 / 3) / math.sqrt(3)
    below, above = (3 * (np.cbrt(1 + s * (t - s / 6)) - 1) / s for s in (a, -a))
    assert skewness > 0
    assert below < t < above
    np.testing.assert_allclose([found.value[0], found.lo[0], found.hi[0]], np.exp([0, -t * error, above * error]) / 2)


def test_r_squared_turns_the_ratio_round():
    part, whole = np.array([[1.0], [2.0], [4.0]]), np.array([[4.0], [5.0], [6.0]])
    ratio, found = ratio_of_sums(part, whole), explained(part, whole)
    assert (found.value, found.lo, found.hi) == (1 - ratio.value, 1 - ratio.hi, 1 - ratio.lo)


def test_items_that_are_missing_or_do_not_move_are_left_out():
    rng = np.random.default_rng(4)
    part, whole = rng.uniform(1, 2, (5, 1)), rng.uniform(3, 4, (5, 1))
    kept = ratio_of_sums(part, whole)
    more = ratio_of_sums(np.vstack([part, [[np.nan]], [[0.0]]]), np.vstack([whole, [[3.0]], [[0.0]]]))
    for name in ("value", "lo", "hi"):
        np.testing.assert_allclose(getattr(more, name), getattr(kept, name))


@pytest.mark.parametrize("items", [0, 1])
def test_fewer_than_two_items_have_no_interval(items):
    found = ratio_of_sums(np.ones((items, 1)), np.full((items, 1), 2.0))
    assert np.isnan(found.lo[0])
    assert np.isnan(found.hi[0])
    assert (found.value[0] == 0.5) == (items == 1)


def test_nothing_left_is_exactly_explained():
    found = explained(np.zeros((3, 1)), np.ones((3, 1)))
    assert (found.value[0], found.lo[0], found.hi[0]) == (1, 1, 1)


@pytest.mark.parametrize("items", [12, 24])
def test_coverage_of_the_ratio(items):
    """Items differ in size and in how much is left of them; the true ratio is that of the means."""
    rng = np.random.default_rng(5)
    whole = rng.gamma(6, size=(items, 20_000))
    part = whole * rng.beta(2, 6, size=whole.shape)
    found = ratio_of_sums(part, whole)
    covered = float(((found.lo < 0.25) & (found.hi > 0.25)).mean())
    assert 0.94 < covered < 0.97, covered


def test_an_item_that_outweighs_all_others_leaves_an_interval_that_says_so():
    part = np.array([[1e44], [1.0], [2.0], [3.0]])
    found = ratio_of_sums(part, np.full((4, 1), 5.0))
    assert found.value[0] == pytest.approx(5e42)
    assert found.lo[0] < 1 < 1e100 < found.hi[0] < np.inf


def test_a_level_outside_its_range_is_refused():
    with pytest.raises(BadStudy, match="level must lie between 0 and 1"):
        ratio_of_sums(np.ones((3, 1)), np.ones((3, 1)), level=95.0)


# ---- cosines --------------------------------------------------------------------------------------------------------------------


def parts(items: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From each item's unit vectors (heads × tokens × dim) what the function takes, for one row of those heads."""
    sums = np.stack([one.sum(1) for one in items])
    count = np.array([[one.shape[1]] * one.shape[0] for one in items], dtype=float)
    return (sums**2).sum(-1)[:, None], (sums * sums.sum(0)).sum(-1)[:, None], count[:, None]


def unit(rng: np.random.Generator, heads: int, tokens: int) -> np.ndarray:
    raw = rng.normal(size=(heads, tokens, 4)) + 0.8
    return raw / np.linalg.norm(raw, axis=-1, keepdims=True)


def brute_force(items: list[np.ndarray]) -> float:
    cosines = [
        (a[head] @ b[head].T).ravel() for a, b in itertools.combinations(items, 2) for head in range(items[0].shape[0])
    ]
    return float(np.concatenate(cosines).mean())


@pytest.mark.parametrize("heads", [1, 3])
def test_cosine_is_the_mean_over_pairs_of_tokens_of_different_items(heads):
    rng = np.random.default_rng(6)
    items = [unit(rng, heads, tokens) for tokens in (5, 8, 3, 7)]
    found = cosine_across_items(*parts(items))
    np.testing.assert_allclose(found.value[0], brute_force(items))
    without = np.array([brute_force(items[:n] + items[n + 1 :]) for n in range(4)])
    half = 3.182446305284263 * math.sqrt(3 / 4 * ((without - without.mean()) ** 2).sum())  # t, 3 degrees of freedom
    np.testing.assert_allclose(
        [found.lo[0], found.hi[0]], np.clip([found.value[0] - half, found.value[0] + half], -1, 1)
    )


def test_cosine_of_one_item_is_undefined_and_of_equal_shifts_is_one():
    one = cosine_across_items(*parts([unit(np.random.default_rng(7), 1, 5)]))
    assert np.isnan(one.value[0])
    same = np.tile(np.array([0.6, 0.8]), (1, 4, 1))
    found = cosine_across_items(*parts([same, same, same]))
    np.testing.assert_allclose([found.value[0], found.lo[0], found.hi[0]], 1)


# ---- halves and verdicts ----------------------------------------------------------------------------------------------------------


def test_half_of_the_items_whatever_their_order():
    ids = [f"item {n}" for n in range(9)]
    fitted = halves(ids, 0)
    assert fitted.sum() == 4
    chosen = {name for name, is_fitted in zip(ids, fitted, strict=True) if is_fitted}
    turned = halves(ids[::-1], 0)
    assert {name for name, is_fitted in zip(ids[::-1], turned, strict=True) if is_fitted} == chosen
    assert any((halves(ids, seed) != fitted).any() for seed in range(1, 4))


@pytest.mark.parametrize(
    ("lo", "hi", "word"),
    [
        (0.9, 0.95, "holds"),
        (0.89, 0.95, "undecided"),
        (0.2, 0.5, "partly"),
        (-0.1, 0.5, "undecided"),
        (-3.0, 0.0, "fails"),
        (math.nan, 0.5, "undecided"),
    ],
)
def test_verdict_words(lo, hi, word):
    assert fit_verdict(lo, hi) == word


def test_a_bar_outside_its_range_is_refused():
    with pytest.raises(BadStudy, match=r"affine.holds is an R²"):
        fit_verdict(0.1, 0.2, holds=0.0)
