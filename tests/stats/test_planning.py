"""Planning: power against simulation, the plans that docs/accuracy-statistics.md quotes (-s), and the rules of a fair comparison."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from accuracy_data import checked, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from mless.errors import BadStudy
from mless.stats import (
    Again,
    McNemar,
    items_for_effect,
    items_for_equivalence,
    mcnemar_power,
    needs_both,
    p_of_both,
    paired,
    planning,
    smallest_detectable_effect,
    smallest_detectable_mean,
    split_items,
    verdict_chances,
)

# ---- planning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", ["exact", "mid-p"])
@pytest.mark.parametrize(
    ("n", "effect", "share"), [(30, 0.2, 0.3), (200, 0.06, 0.1), (500, 0.04, 0.1), (500, 0.0, 0.1), (40, 0.5, 1.0)]
)
def test_power_agrees_with_simulation(n: int, effect: float, share: float, test: McNemar):
    sets = 40_000
    cells = [(share + effect) / 2, (share - effect) / 2, 1 - share]
    gained, lost, _ = rng(n).multinomial(n, cells, size=sets).T
    simulated = float(np.mean(paired.mcnemar_p(gained, lost, test) <= 0.05))
    power = mcnemar_power(n, effect, share, test=test)
    print(f"power of {test}, n={n} effect={effect} share={share}: {power:.3f}, simulated {simulated:.3f}")
    assert power == pytest.approx(simulated, abs=4 * math.sqrt(0.25 / sets))
    assert mcnemar_power(n, -effect, share, test=test) == pytest.approx(power)


@pytest.mark.parametrize("alpha", [0.5, 0.05, 0.001, 1e-9])
@pytest.mark.parametrize("test", ["exact", "mid-p"])
def test_the_rejecting_tables_are_found(alpha: float, test: McNemar):
    changed = np.arange(300)
    most = planning._largest_rejecting(changed, alpha, test)
    for d, k in zip(changed, most, strict=True):
        p = paired.mcnemar_p(np.arange(d // 2 + 1), d - np.arange(d // 2 + 1), test)
        assert k == np.count_nonzero(p <= alpha) - 1


def test_the_plan_that_the_issue_quotes():
    exact, mid_p = (smallest_detectable_effect(500, 0.1, test=test) for test in ("exact", "mid-p"))
    print(f"500 items, a tenth changes: exact ±{exact:.4f}, mid-p ±{mid_p:.4f}")
    assert (round(100 * exact, 1), round(100 * mid_p, 1)) == (4.1, 3.9)
    assert (items_for_effect(0.02, 0.1), items_for_effect(0.02, 0.1, test="mid-p")) == (2043, 1949)
    # the usual formula, for which ±4.0 and 2,000 are quoted
    usual = (1.959964 * math.sqrt(0.1) + 0.841621 * math.sqrt(0.1 - 0.04**2)) / math.sqrt(500)
    assert usual == pytest.approx(0.0395, abs=1e-4)


@settings(checked, max_examples=12)
@given(st.integers(20, 600), st.floats(0.05, 1), st.sampled_from(["exact", "mid-p"]))
def test_plans_fit_together(n: int, share: float, test: McNemar):
    effect = smallest_detectable_effect(n, share, test=test)
    if math.isnan(effect):
        assert mcnemar_power(n, share, share, test=test) < 0.8
        return
    assert mcnemar_power(n, effect, share, test=test) >= 0.8
    assert mcnemar_power(n, effect - 1e-5, share, test=test) < 0.8
    assert smallest_detectable_effect(n, share, power=0.7, test=test) <= effect
    assert smallest_detectable_effect(n, share, alpha=0.1, test=test) <= effect
    needed = items_for_effect(effect, share, test=test)
    # power is a saw in n, the more so where all items change: a tooth earlier or later is the same plan
    assert needed <= 1.15 * n + 4
    assert mcnemar_power(needed, effect, share, test=test) >= 0.8 > mcnemar_power(needed - 1, effect, share, test=test)


def test_a_larger_study_finds_less():
    effects = [smallest_detectable_effect(n, 0.1) for n in (100, 200, 500, 1000, 2000, 5000)]
    assert all(a > b for a, b in itertools.pairwise(effects))
    assert math.isnan(smallest_detectable_effect(30, 0.1))  # three changes never reject
    assert math.isnan(smallest_detectable_effect(500, 0.0))
    assert math.isnan(smallest_detectable_effect(1, 0.5))
    assert math.isnan(mcnemar_power(1, 0.1, 0.5))


def test_smallest_detectable_mean_agrees_with_statsmodels():
    from statsmodels.stats.power import TTestPower

    for n in (10, 30, 500):
        theirs = TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8, alternative="two-sided")
        assert smallest_detectable_mean(n, 0.3) == pytest.approx(0.3 * theirs, rel=1e-4)
    assert smallest_detectable_mean(50, 0.0) == 0
    assert math.isnan(smallest_detectable_mean(1, 0.3))


@pytest.mark.parametrize(("n", "share", "effect"), [(40, 0.2, 0.0), (40, 0.2, 0.1), (300, 0.02, 0.005), (12, 1.0, 0.3)])
def test_chances_of_the_verdicts_are_summed_over_every_table(n: int, share: float, effect: float):
    """Without an A/A difference they are exact: every number of gains and losses, judged one by one."""
    up, down = (share + effect) / 2, (share - effect) / 2
    gained, lost = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    gained, lost = (one[gained + lost <= n] for one in (gained, lost))
    same = n - gained - lost
    rest = 0.0 if share == 1 else math.log(1 - share)
    log = np.array(
        [math.lgamma(n + 1) - sum(math.lgamma(k + 1) for k in one) for one in zip(gained, lost, same, strict=True)]
    )
    chance = np.exp(log + gained * math.log(up) + lost * math.log(down) + same * rest) * ((share < 1) | (same == 0))
    claimed = paired.mcnemar_p(gained, lost, "exact") <= 0.02
    equal = ~claimed & (paired.equivalence_p(gained, lost, n, 0.1) <= 0.05)
    found = verdict_chances(n, share, 0.1, effect=effect, alpha_each=0.02)
    assert found.rises == pytest.approx(chance[claimed & (gained > lost)].sum(), abs=1e-9)
    assert found.drops == pytest.approx(chance[claimed & (gained < lost)].sum(), abs=1e-9)
    assert found.equivalent == pytest.approx(chance[equal].sum(), abs=1e-9)
    assert found.undecided == pytest.approx(1 - found.rises - found.drops - found.equivalent)


def test_the_numbers_of_the_issue():
    assert verdict_chances(500, 0.1, 0.02).equivalent == pytest.approx(0.0007, abs=1e-4)
    # about 1,850 for the 8.4 % that changed there
    assert (items_for_equivalence(0.02, 0.084), items_for_equivalence(0.02, 0.1)) == (1827, 2162)
    alone = smallest_detectable_effect(500, 0.1)
    powers = [mcnemar_power(500, alone, 0.1, 0.05 / m) for m in (3, 4)]
    print(f"±{alone:.4f} under Holm of 3 and 4: {powers}")
    assert [round(power, 2) for power in powers] == [0.66, 0.61]


def test_a_run_of_none_that_repeats_itself_costs_nothing():
    assert Again.planned(0.1, 0.0) is None
    same = Again(0.1, 0.1)
    for effect in (0.0, 0.03, 0.1):
        assert mcnemar_power(200, effect, 0.1, again=same) == pytest.approx(mcnemar_power(200, effect, 0.1))
    noisy = [mcnemar_power(200, 0.06, 0.1, again=Again.planned(0.1, share)) for share in (0.02, 0.05, 0.1, 0.2)]
    assert all(a > b for a, b in itertools.pairwise([mcnemar_power(200, 0.06, 0.1), *noisy]))
    quiet, both = smallest_detectable_mean(60, 0.3), smallest_detectable_mean(60, 0.3, again=(0.3, 0.5))
    assert smallest_detectable_mean(60, 0.3, again=(0.3, 1.0)) == pytest.approx(quiet)
    assert quiet < both
    assert smallest_detectable_mean(60, 0.3, ties=0.01) == pytest.approx(quiet + 0.01)


@settings(checked, max_examples=20)
@given(st.integers(2, 400), st.floats(0.01, 1), st.floats(0, 1), st.floats(-1, 1), st.sampled_from([0.05, 0.0125]))
def test_chances_are_chances(n: int, share: float, by_itself: float, effect: float, each: float):
    again = Again.planned(share, 2 * share * by_itself * 0.99)
    found = verdict_chances(n, share, 0.05, effect=effect * share, alpha_each=each, again=again)
    parts = [found.rises, found.drops, found.equivalent, found.undecided]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(1)
    mirrored = verdict_chances(n, share, 0.05, effect=-effect * share, alpha_each=each, again=again)
    assert (mirrored.rises, mirrored.equivalent) == (pytest.approx(found.drops), pytest.approx(found.equivalent))
    power = mcnemar_power(n, effect * share, share, each, again=again)
    assert power == pytest.approx(found.rises + found.drops)
    assert power <= mcnemar_power(n, effect * share, share, each) + 1e-9


def test_what_chances_refuse():
    for margin in (0.0, 0.0005, 1.0, math.nan):
        with pytest.raises(BadStudy, match=r"margin must be at least 0\.001 and below 1, as 0\.02"):
            verdict_chances(100, 0.1, margin)
        with pytest.raises(BadStudy, match=r"margin must be at least 0\.001 and below 1, as 0\.02"):
            items_for_equivalence(margin, 0.1)
    with pytest.raises(BadStudy, match="at most the share of items that change"):
        verdict_chances(100, 0.1, 0.02, effect=0.2)
    with pytest.raises(BadStudy, match="alpha must lie between 0 and 1"):
        verdict_chances(100, 0.1, 0.02, alpha_each=0.0)
    with pytest.raises(BadStudy, match=r"0 to twice the share that changes \(0\.1\); got 0\.3"):
        Again.planned(0.1, 0.3)
    with pytest.raises(BadStudy, match=r"again\.from_both: at most the smaller"):
        mcnemar_power(100, 0.05, 0.1, again=Again(0.2, 0.15))
    seldom = Again(0.05, 0.04)
    for refused in (
        lambda: mcnemar_power(500, 0.08, 0.1, again=seldom),
        lambda: mcnemar_power(500, -0.08, 0.1, again=seldom),
        lambda: items_for_effect(0.08, 0.1, again=seldom),
        lambda: verdict_chances(500, 0.1, 0.02, effect=0.08, again=seldom),
    ):
        with pytest.raises(BadStudy, match=r"at most the share of items that change \(0\.05\) expected.*got -?0\.08"):
            refused()
    assert 0 < mcnemar_power(500, 0.05, 0.1, again=seldom) <= 1
    with pytest.raises(BadStudy, match="inside the margin"):
        items_for_equivalence(0.02, 0.1, effect=0.02)
    assert verdict_chances(1, 0.1, 0.02).undecided == 1


# ---- rules of a fair comparison --------------------------------------------------------------------------------------


def test_an_effect_needs_both():
    assert needs_both(0.01, 0.04)
    assert not needs_both(0.01, 0.06)
    assert not needs_both(0.01, math.nan)
    assert needs_both(0.04, 0.04, alpha=0.04)
    assert p_of_both(0.01, 0.2) == p_of_both(0.2, 0.01) == 0.2
    with pytest.raises(ValueError, match="p against none-again"):
        p_of_both(0.1, 1.2)


def test_needing_both_keeps_the_level_when_the_runs_themselves_wander():
    """none, none-again and the condition are three runs of one distribution: one test is at its level, both are below."""
    draws = rng(6)
    ability = draws.beta(0.5, 0.5, size=(4000, 300))
    none, again, condition = (draws.random(ability.shape) < ability for _ in range(3))
    p = [
        paired.mcnemar_p((condition & ~other).sum(axis=1), (~condition & other).sum(axis=1), "mid-p")
        for other in (none, again)
    ]
    one, both = float(np.mean(p[0] <= 0.05)), float(np.mean(np.maximum(*p) <= 0.05))
    print(f"under the null: against none {one:.2%}, against both {both:.2%}")
    assert 0.03 <= one <= 0.07
    assert both < 0.025


def test_the_split_hangs_on_seed_and_id_alone():
    ids = [f"math/{i}" for i in range(2000)]
    dev = split_items(ids, 0.2, 1)
    assert 0.17 < dev.mean() < 0.23
    side = dict(zip(ids, dev, strict=True))
    more = [*(f"new/{i}" for i in range(500)), *reversed(ids)]
    for name, at in zip(more, split_items(more, 0.2, 1), strict=True):
        assert side.get(name, at) == at
    larger = split_items(ids, 0.5, 1)
    assert larger[dev].all()  # a larger dev split keeps what it had
    other = split_items(ids, 0.2, 2)
    assert 0.01 < (other & dev).mean() < 0.08
    # pinned: another release must not move the items of a stored study
    assert split_items([str(i) for i in range(12)], 0.5, 0).astype(int).tolist() == PINNED
    twice = split_items(["a", "b", "a", "c", "d", "e"], 0.5, 3)
    assert twice[0] == twice[2]


PINNED = [0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1]


def test_a_split_with_an_empty_side_is_refused():
    with pytest.raises(BadStudy, match="all 2 items fall into the test split and none into dev"):
        split_items(["a", "b"], 0.001, 0)
    with pytest.raises(BadStudy, match="none into test"):
        split_items(["a", "b"], 0.999, 0)
    with pytest.raises(BadStudy, match="share must lie between 0 and 1"):
        split_items(["a"], 1.0, 0)
    assert len(split_items([], 0.5, 0)) == 0
