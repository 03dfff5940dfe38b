"""A filler among edits: each number against a transcription, what is refused, and the coverages that docs/statistics.md quotes (-s)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import ndtr

from mless.errors import BadData, BadStudy
from mless.stats import place_among
from mless.stats.intervals import mean_intervals


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn(items: int, edits: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = rng(seed)
    table = random.normal(size=(items, 1)) + 0.5 * random.normal(size=edits) + 0.7 * random.normal(size=(items, edits))
    return table, 0.4 + table.mean(axis=1) + 0.3 * random.normal(size=items)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_the_mean_and_the_specific_effect_by_hand():
    """Two items and two edits, so that everything can be followed: d = [[0, 2], [1, 7]], filler [3, 5]."""
    found = place_among(np.array([[0.0, 2.0], [1.0, 7.0]]), {"f": np.array([3.0, 5.0])}, rng())
    assert (found.n, found.edits, found.mean) == (2, 2, 2.5)
    assert found.means.tolist() == [0.5, 4.5]
    # rest: ±1 in every cell, so its mean square is 4; the edits' means vary by 8, of which 4/2 is noise
    assert (found.sd_seen, found.sd) == (pytest.approx(math.sqrt(8)), pytest.approx(math.sqrt(6)))
    # items' means 1 and 4: 4.5/2; edits' means: 8/2; both together: 4/4
    variance = 2.25 + 4 - 1
    free = 1  # of two items and edits
    from scipy.stats import t

    half = t.ppf(0.975, free) * math.sqrt(variance)
    assert [found.lo, found.hi] == pytest.approx([2.5 - half, 2.5 + half])
    one = found.placed["f"]
    assert (one.n, one.delta, one.specific, one.percentile) == (2, 4.0, 1.5, 0.5)
    # filler − items' means: 2 and 1, so 0.5/2
    variance = 0.25 + 4 - 1
    variance = max(variance, 4)  # never less than either part alone
    half = t.ppf(0.975, free) * math.sqrt(variance)
    assert [one.specific_lo, one.specific_hi] == pytest.approx([1.5 - half, 1.5 + half])
    assert one.p == 1.0  # both edits lie 2 from their mean, the filler 1.5


def test_the_percentile_counts_ties_half_and_p_counts_edits_as_far_away():
    edits = np.tile([-2.0, -1.0, 0.0, 1.0, 2.0], (6, 1)) + np.arange(6)[:, None]
    fillers = {"tied": edits[:, 3], "top": edits[:, 4] + 1, "middle": edits[:, 2] + 0.5, "lowest": edits[:, 0] - 9}
    found = place_among(edits, fillers, rng()).placed
    assert {name: one.percentile for name, one in found.items()} == {
        "tied": 0.7,
        "top": 1.0,
        "middle": 0.6,
        "lowest": 0.0,
    }
    # distances from the mean, 2.5: edits 2, 1, 0, 1, 2
    assert {name: one.p for name, one in found.items()} == pytest.approx(
        {"tied": 5 / 6, "top": 1 / 6, "middle": 5 / 6, "lowest": 1 / 6}
    )
    assert [one.specific for one in found.values()] == pytest.approx([1, 3, 0.5, -11])


def test_where_all_edits_lie_on_one_side_the_interval_stays_open():
    edits = np.tile(np.linspace(-1, 1, 40), (50, 1)) + rng().normal(size=(50, 1))
    found = place_among(edits, {"far": edits[:, 0] + 9}, rng()).placed["far"]
    assert (found.percentile, found.percentile_hi) == (1.0, 1.0)
    # none of 40 above: the share above may still be some per cent (exactly: 1 − 0.025^(1/40) = 8.8 %)
    assert 0.91 < found.percentile_lo < 0.96


def test_with_many_edits_that_are_alike_the_interval_is_that_of_the_items():
    """Where edits do not differ, a filler's specific Δ is a plain mean over items."""
    random = rng(5)
    base = random.normal(size=(60, 1))
    edits, filler = np.repeat(base, 40, axis=1), base[:, 0] + random.normal(0.2, 0.5, size=60)
    found = place_among(edits, {"f": filler}, rng())
    plain = mean_intervals(filler[:, None] - base)
    one = found.placed["f"]
    assert [one.specific_lo, one.specific_hi] == pytest.approx([plain.lo[0], plain.hi[0]])
    assert (found.sd, found.sd_seen) == (0, pytest.approx(0, abs=1e-12))
    # and the other way round: with nothing to learn from items, it is the mean over edits
    effects = random.normal(size=40)
    found = place_among(np.tile(effects, (60, 1)), {"f": np.zeros(60)}, rng())
    plain = mean_intervals(effects[:, None])
    assert [found.lo, found.hi] == pytest.approx([plain.lo[0], plain.hi[0]])
    assert found.sd == pytest.approx(effects.std(ddof=1))


@pytest.mark.parametrize(("value", "items", "edits"), [(0.25, 5, 4), (0.1, 7, 3), (0.1, 7, 6)])
def test_all_equal_is_a_point(value: float, items: int, edits: int):
    found = place_among(np.full((items, edits), value), {"f": np.full(items, value)}, rng())
    assert [found.mean, found.lo, found.hi, found.sd] == [value, value, value, 0]
    one = found.placed["f"]
    assert [one.specific, one.specific_lo, one.specific_hi, one.percentile, one.p] == [0, 0, 0, 0.5, 1]


def test_the_unit_does_not_matter():
    edits, filler = drawn(20, 8)
    one, small = (place_among(unit * edits, {"f": unit * filler}, rng()).placed["f"] for unit in (1.0, 1e-13))
    assert [small.percentile, small.percentile_lo, small.percentile_hi, small.p] == pytest.approx(
        [one.percentile, one.percentile_lo, one.percentile_hi, one.p]
    )


def test_two_edits_have_an_interval_of_one_degree_of_freedom():
    """Two edits hardly tell how edits vary; Satterthwaite's degrees of freedom would cover 88 %."""
    found = covered(24, 2, SPREADS["edits-1"], ("normal", "normal"), 300)
    print(f"items × edits, 24 × 2: {found}")
    assert found["mean"] >= 0.93
    assert found["specific"] >= 0.93


def test_items_without_a_value_are_left_out():
    edits, filler = drawn(12, 6)
    gaps, holes = edits.copy(), filler.copy()
    gaps[3, 2], holes[7] = math.nan, math.nan
    found = place_among(gaps, {"f": holes, "whole": filler}, rng())
    assert (found.n, found.placed["f"].n, found.placed["whole"].n) == (11, 10, 11)
    fewer = place_among(np.delete(edits, [3, 7], axis=0), {"f": np.delete(filler, [3, 7])}, rng())
    assert dataclasses.astuple(found.placed["f"]) == pytest.approx(dataclasses.astuple(fewer.placed["f"]))


def test_order_and_company_do_not_matter():
    edits, filler = drawn(20, 8)
    one = place_among(edits, {"f": filler}, rng()).placed["f"]
    beside = place_among(edits, {"other": filler + 1, "f": filler}, rng()).placed["f"]
    assert one == beside
    mixed = place_among(edits[:, rng(1).permutation(8)], {"f": filler}, rng()).placed["f"]
    assert dataclasses.astuple(mixed) == pytest.approx(dataclasses.astuple(one), abs=1e-9)
    mirrored = place_among(-edits, {"f": -filler}, rng()).placed["f"]
    assert [mirrored.specific_lo, mirrored.specific_hi] == pytest.approx([-one.specific_hi, -one.specific_lo])
    assert [mirrored.percentile, mirrored.p] == pytest.approx([1 - one.percentile, one.p])
    assert mirrored.percentile_lo == pytest.approx(1 - one.percentile_hi, abs=0.01)


# ---- too little, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("items", "edits"), [(0, 3), (1, 3), (3, 1)], ids=["no-items", "one-item", "one-edit"])
def test_too_few_items_or_edits_have_no_interval(items: int, edits: int):
    table, filler = drawn(items, edits)
    found = place_among(table, {"f": filler}, rng())
    one = found.placed["f"]
    assert (found.n, found.edits) == (items, edits)
    for value in (found.lo, found.hi, found.sd, one.specific_lo, one.specific_hi, one.percentile_lo, one.percentile_hi):
        assert math.isnan(value)
    assert math.isnan(found.mean) == math.isnan(one.specific) == (items == 0)
    assert items == 0 or one.p in {k / (edits + 1) for k in range(1, edits + 2)}
    if not items:
        assert all(math.isnan(value) for value in dataclasses.astuple(one)[1:])


def test_what_cannot_be_placed_is_refused():
    edits, filler = drawn(5, 4)
    with pytest.raises(BadData, match="no edits: a named filler is placed among at least one"):
        place_among(edits[:, :0], {"f": filler}, rng())
    with pytest.raises(BadData, match="differ in their items: 5 before, 4 after"):
        place_among(edits, {"f": filler[:4]}, rng())
    edits[2, 1] = math.inf
    with pytest.raises(
        BadData, match=r"edit 2, item 3 \(numbered from 1\): the value is inf, expected a finite number"
    ):
        place_among(edits, {}, rng())
    filler[0] = -math.inf
    with pytest.raises(BadData, match="slashes, item 1 "):
        place_among(drawn(5, 4)[0], {"slashes": filler}, rng())
    with pytest.raises(BadStudy, match="level must lie between 0 and 1"):
        place_among(drawn(5, 4)[0], {}, rng(), level=95.0)


# ---- coverage: what docs/statistics.md quotes ------------------------------------------------------------------------

Shape = Callable[[np.random.Generator, int], np.ndarray]
_SIGMA = 0.75


def _lognormal(random: np.random.Generator, size: int) -> np.ndarray:
    """Mean 0, sd 1, skewness 3.3."""
    spread = math.sqrt((math.exp(_SIGMA**2) - 1) * math.exp(_SIGMA**2))
    return (random.lognormal(0, _SIGMA, size) - math.exp(_SIGMA**2 / 2)) / spread


def _below(shape: str, z: float) -> float:
    """The share of all edits that lie below z."""
    if shape == "normal":
        return float(ndtr(z))
    value = z * math.sqrt((math.exp(_SIGMA**2) - 1) * math.exp(_SIGMA**2)) + math.exp(_SIGMA**2 / 2)
    return float(ndtr(math.log(value) / _SIGMA))


SHAPES: dict[str, Shape] = {"normal": lambda random, size: random.normal(size=size), "skewed": _lognormal}
#: Standard deviations: items, edits, both together. In the last row edits differ less than 100 items can show (1/√100).
SPREADS = {
    "edits-0.3": (1.0, 0.3, 0.5),
    "edits-1": (1.0, 1.0, 0.5),
    "edits-0": (1.0, 0.0, 0.5),
    "edits-0.02": (0.3, 0.02, 1.0),
}


def covered(
    items: int, edits: int, spreads: tuple[float, float, float], shapes: tuple[str, str], sets: int, *, z: float = 0.8
) -> dict[str, float]:
    """How often each interval holds the truth; the filler lies `z` standard deviations of the edits above their mean."""
    random, of_items, of_edits = rng(items + edits), SHAPES[shapes[0]], SHAPES[shapes[1]]
    by_item, by_edit, by_both = spreads
    true = by_edit * z
    held = dict.fromkeys(("mean", "specific", "percentile"), 0)
    for _ in range(sets):
        item = by_item * of_items(random, items)
        both = by_both * random.normal(size=(items, edits))
        table = 0.3 + item[:, None] + by_edit * of_edits(random, edits) + both
        filler = 0.3 + true + 0.7 * item + 0.5 * of_items(random, items)
        found = place_among(table, {"f": filler}, random, reps=1000)
        one = found.placed["f"]
        held["mean"] += found.lo <= 0.3 <= found.hi
        held["specific"] += one.specific_lo <= true <= one.specific_hi
        held["percentile"] += one.percentile_lo <= _below(shapes[1], z) <= one.percentile_hi
    return {name: count / sets for name, count in held.items()}


@pytest.mark.parametrize("spreads", SPREADS)
@pytest.mark.parametrize("shapes", [("normal", "normal"), ("skewed", "skewed")], ids=["normal", "skewed"])
def test_coverage_over_items_and_edits(spreads: str, shapes: tuple[str, str]):
    found = covered(100, 40, SPREADS[spreads], shapes, 400)
    print(f"items × edits, 100 × 40, {shapes[0]}, {spreads}: {found}")
    # 400 sets: ±0.011, one sd
    assert 0.92 <= found["mean"] <= 0.98
    assert 0.92 <= found["specific"] <= 0.98
    if SPREADS[spreads][1]:  # without a spread there is no percentile
        assert 0.92 <= found["percentile"] <= 0.985  # a share of 40 edits moves by steps


def test_neither_items_nor_edits_alone_would_do():
    """What the interval over both is for: the usual ones cover far less."""
    random, sets = rng(3), 300
    held = np.zeros(2)
    for _ in range(sets):
        item = random.normal(size=(100, 1))
        table = item + 0.3 * random.normal(size=40) + 0.5 * random.normal(size=(100, 40))
        by_item = mean_intervals(0.7 * item - table.mean(axis=1)[:, None])
        by_edit = mean_intervals(table.mean(axis=0)[:, None])
        held += [by_item.lo[0] <= 0 <= by_item.hi[0], by_edit.lo[0] <= 0 <= by_edit.hi[0]]
    print(f"over items alone {held[0] / sets:.2f}, over edits alone {held[1] / sets:.2f}")
    assert (held / sets < 0.85).all()


def test_the_sd_between_edits_is_that_of_the_edits():
    random, sets = rng(4), 300
    for true in (0.0, 0.1, 0.5):
        tables = [
            random.normal(size=(50, 1)) + true * random.normal(size=40) + random.normal(size=(50, 40))
            for _ in range(sets)
        ]
        found = [place_among(table, {}, random) for table in tables]
        squares = np.mean([one.sd_seen**2 for one in found]), np.mean([one.sd**2 for one in found])
        print(f"sd between edits {true}: {math.sqrt(squares[1]):.3f}, as seen {math.sqrt(squares[0]):.3f}")
        assert squares[0] == pytest.approx(true**2 + 1 / 50, rel=0.05)
        assert math.sqrt(squares[1]) == pytest.approx(true, abs=0.05 if true < 0.1 else 0.02)


def test_p_of_a_filler_that_is_one_of_the_edits():
    """Drawn like the edits, a filler is called unlike them about as often as p says."""
    random, sets = rng(6), 20_000
    means = random.normal(size=(sets, 41))
    centre = means[:, :40].mean(axis=1)
    far = (np.abs(means[:, :40] - centre[:, None]) >= np.abs(means[:, 40] - centre)[:, None]).sum(axis=1)
    rate = np.mean((1 + far) / 41 <= 0.05)
    print(f"p ≤ 0.05 of a filler that is an edit: {rate:.3f} (2/41 = {2 / 41:.3f})")
    assert 0.045 <= rate <= 0.06
    edits = np.tile(means[0, :40], (3, 1))
    assert place_among(edits, {"f": np.full(3, means[0, 40])}, rng()).placed["f"].p == pytest.approx((1 + far[0]) / 41)


@pytest.mark.slow
@pytest.mark.parametrize("spreads", SPREADS)
@pytest.mark.parametrize(
    "shapes", [("normal", "normal"), ("skewed", "normal"), ("normal", "skewed"), ("skewed", "skewed")]
)
@pytest.mark.parametrize(("items", "edits"), [(24, 40), (100, 10), (100, 40), (500, 40)])
def test_coverage_over_items_and_edits_at_length(items: int, edits: int, spreads: str, shapes: tuple[str, str]):
    found = covered(items, edits, SPREADS[spreads], shapes, 1000)
    print(f"items × edits, {items} × {edits}, {'/'.join(shapes)}, {spreads}: {found}")
    # ten skewed edits do not show how skewed they are
    least = 0.915 if (edits, shapes[1]) == (10, "skewed") else 0.925
    assert least <= found["mean"] <= 0.98
    assert least <= found["specific"] <= 0.98
    if SPREADS[spreads][1]:
        assert 0.92 <= found["percentile"] <= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("z", [0.0, 2.5])
@pytest.mark.parametrize("spreads", ["edits-0.3", "edits-1", "edits-0.02"])
@pytest.mark.parametrize("items", [24, 100, 500])
def test_coverage_of_a_percentile_elsewhere(items: int, spreads: str, z: float):
    found = covered(items, 40, SPREADS[spreads], ("normal", "normal"), 600, z=z)
    print(f"percentile, {items} × 40, {spreads}, {z} sd above: {found['percentile']:.3f}")
    assert 0.9 <= found["percentile"] <= 0.995
