"""What is planned is what the comparison does: power, chances of the verdicts and items for equivalence, by simulation.

The rule is written down once more here, for many runs at once (`by_hand`); that it is the rule of `comparing.compare` is tested run by run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mless import stats
from mless.stats import paired
from mless.study.accuracy import comparing
from mless.study.accuracy.comparing import Answered, compare

NAMES = ("mless", "mful", "random", "other")
VERDICTS = ("rises", "drops", "equivalent", "undecided")
MARGIN = 0.02


def run_of(correct: np.ndarray) -> Answered:
    right = correct if correct.ndim == 2 else correct[:, None]
    texts = np.full(right.shape, "", dtype=object)
    return Answered(right, np.zeros_like(right), np.ones_like(right), np.ones(right.shape), texts, texts)


def compared(runs: dict[str, np.ndarray], **changes: Any) -> dict[str, dict[str, Any]]:
    """The pass@1 rows by condition, as a study computes them."""
    asked: dict[str, Any] = {
        "votes": (), "again": "none-again" if "none-again" in runs else None, "ks": [1], "margin": MARGIN, "dev_share": 0.0, "seed": 0,
    }  # fmt: skip
    items = [str(n) for n in range(len(runs["none"]))]
    rows = compare({name: run_of(one) for name, one in runs.items()}, items, None, **(asked | changes))
    return {row["condition"]: row for row in rows if row["metric"] == "pass@1"}


def drawn(
    rng: np.random.Generator, shape: tuple[int, ...], effect: float, changed: float, again: float, conditions: int
) -> dict[str, np.ndarray]:
    """none, none-again and conditions of which the first moves accuracy by `effect`; `changed` and `again` are shares of items.

    The two runs of none differ on `again` of the items, any condition and one of them on `changed`.
    """
    none = rng.random(shape) < 0.5
    by_itself = rng.random(shape) < again
    runs = {"none": none, "none-again": none ^ by_itself}
    for number, name in enumerate(NAMES[:conditions]):
        up = 0.5 + (effect if number == 0 else 0.0) / (2 * changed)
        # where the two runs agree the condition leaves both at such a rate that it differs from either on `changed` of all items
        leaves = (changed - again / 2) / (1 - again)
        moved = rng.random(shape) < np.where(none, 2 * leaves * (1 - up), 2 * leaves * up)
        # where they differ it goes with the one that is right as often as it gains
        runs[name] = np.where(by_itself, rng.random(shape) < up, none ^ moved)
    return runs


def by_hand(runs: dict[str, np.ndarray], primary: str | None = None) -> np.ndarray:
    """The verdict on `mless` of each run (first axis): McNemar against both, Holm, the A/A difference, equivalence."""
    none, again = runs["none"], runs["none-again"]
    n = none.shape[1]

    def counts(base: np.ndarray, one: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (~base & one).sum(1), (base & ~one).sum(1)

    def p_of(one: np.ndarray) -> np.ndarray:
        return np.maximum(*(paired.mcnemar_p(*counts(base, one), "exact") for base in (none, again)))

    names = [name for name in runs if name not in ("none", "none-again") and not (primary and name != primary)]
    p = np.stack([p_of(runs[name]) for name in names], axis=1)
    mine = p[:, names.index("mless")]
    # Holm: each p smaller than mine must have been rejected at its step, and so must mine
    m = len(names)
    steps = np.sort(p, axis=1) * (m - np.arange(m))
    adjusted = np.minimum(np.maximum.accumulate(steps, axis=1), 1)
    rank = (p < mine[:, None]).sum(1)
    claimed = adjusted[np.arange(len(p)), rank] <= 0.05
    gained, lost = counts(none, runs["mless"])
    by_itself = again.sum(1) - none.sum(1)
    claimed &= np.abs(gained - lost) > np.abs(by_itself)
    equal = paired.equivalence_p(gained, lost, n, MARGIN) <= 0.05
    return np.where(claimed, np.where(gained > lost, "rises", "drops"), np.where(equal, "equivalent", "undecided"))


def planned(
    n: int, changed: float, again: float, conditions: int, primary: str | None
) -> tuple[float, float, stats.Again | None]:
    each = 0.05 if primary else 0.05 / conditions
    both = stats.Again.planned(changed, again)
    return stats.smallest_detectable_effect(n, changed, alpha=each, again=both), each, both


CASES = pytest.mark.parametrize(
    ("n", "changed", "again", "conditions", "primary"),
    [
        pytest.param(200, 0.2, 0.0, 1, None, id="one-condition"),
        pytest.param(200, 0.2, 0.0, 3, None, id="three-conditions"),
        pytest.param(200, 0.2, 0.0, 4, None, id="four-conditions"),
        pytest.param(200, 0.2, 0.15, 1, None, id="A/A-not-zero"),
        pytest.param(200, 0.2, 0.15, 4, None, id="four-conditions-A/A-not-zero"),
        pytest.param(200, 0.2, 0.15, 4, "mless", id="primary-of-four-A/A-not-zero"),
        pytest.param(900, 0.04, 0.01, 3, None, id="equivalence-in-reach"),
    ],
)


@CASES
def test_an_effect_is_found_as_often_as_planned(
    n: int, changed: float, again: float, conditions: int, primary: str | None
):
    effect, each, both = planned(n, changed, again, conditions, primary)
    rng = np.random.default_rng(n + conditions)
    found = (by_hand(drawn(rng, (4000, n), effect, changed, again, conditions), primary) == "rises").mean()
    alone = stats.smallest_detectable_effect(n, changed)
    less = stats.mcnemar_power(n, alone, changed, each, again=both)
    print(
        f"n={n} changed={changed} A/A={again} m={conditions} {primary=}: ±{effect:.3f} found in {found:.3f}; ±{alone:.3f} in {less:.2f}"
    )
    assert found == pytest.approx(0.8, abs=0.02)


@CASES
def test_verdicts_without_an_effect_are_as_likely_as_planned(
    n: int, changed: float, again: float, conditions: int, primary: str | None
):
    _, each, both = planned(n, changed, again, conditions, primary)
    chances = stats.verdict_chances(n, changed, MARGIN, alpha_each=each, again=both)
    assert sum(getattr(chances, one) for one in VERDICTS) == pytest.approx(1)
    found = by_hand(drawn(np.random.default_rng(n), (4000, n), 0.0, changed, again, conditions), primary)
    for verdict in VERDICTS:
        assert (found == verdict).mean() == pytest.approx(getattr(chances, verdict), abs=0.02), verdict


@pytest.mark.parametrize("changed", [0.02, 0.084, 0.1])
def test_equivalence_is_shown_as_often_as_planned(changed: float):
    n = stats.items_for_equivalence(MARGIN, changed)
    cells = [changed / 2, changed / 2, 1 - changed]
    gained, lost, _ = np.random.default_rng(n).multinomial(n, cells, size=20_000).T
    found = (paired.equivalence_p(gained, lost, n, MARGIN) <= 0.05).mean()
    print(f"{changed=}: {n} items, equivalent {found:.3f}")
    assert found == pytest.approx(0.8, abs=0.02)


def only_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes the time of a comparison and does not enter its verdict."""
    monkeypatch.setattr(comparing, "_smallest_effect", lambda *_: math.nan)
    monkeypatch.setattr(comparing, "_interval_of_all", lambda *_: (math.nan, math.nan))


@pytest.mark.parametrize(
    ("again", "primary"), [(0.0, None), (0.15, "mless"), pytest.param(0.15, None, marks=pytest.mark.slow)]
)
def test_the_rule_by_hand_is_the_rule_of_the_comparison(
    again: float, primary: str | None, monkeypatch: pytest.MonkeyPatch
):
    only_verdicts(monkeypatch)
    found: list[str] = []
    for n, changed, effect in ((200, 0.2, 0.1), (600, 0.02, 0.0)):
        runs = drawn(np.random.default_rng(1), (12, n), effect, changed, min(again, changed), 3)
        rules = by_hand(runs, primary)
        one_by_one = [
            compared({name: run[at] for name, run in runs.items()}, primary=primary)["mless"]["verdict"]
            for at in range(12)
        ]
        assert one_by_one == rules.tolist()
        found += one_by_one
    assert {"rises", "equivalent", "undecided"} <= set(found)


@pytest.mark.slow
@CASES
def test_a_whole_comparison_finds_as_often_as_planned(
    n: int, changed: float, again: float, conditions: int, primary: str | None, monkeypatch: pytest.MonkeyPatch
):
    """The same through `comparing.compare`, and for both: the effect that could be shown, and none."""
    only_verdicts(monkeypatch)
    effect, each, both = planned(n, changed, again, conditions, primary)
    sets = 3000
    for size in (effect, 0.0):
        chances = stats.verdict_chances(n, changed, MARGIN, effect=size, alpha_each=each, again=both)
        runs = drawn(np.random.default_rng(n), (sets, n), size, changed, again, conditions)
        found = [
            compared({name: run[at] for name, run in runs.items()}, primary=primary)["mless"]["verdict"]
            for at in range(sets)
        ]
        for verdict in VERDICTS:
            assert found.count(verdict) / sets == pytest.approx(getattr(chances, verdict), abs=0.02), verdict


def test_mde_is_that_of_the_test_in_use():
    runs = drawn(np.random.default_rng(4), (300,), 0.05, 0.2, 0.1, 4)
    rows = compared(runs)
    mine, none, again = runs["mless"], runs["none"], runs["none-again"]
    both = stats.Again((mine != again).mean(), ((mine != again) & (mine != none)).mean())
    row = rows["mless"]
    assert row["alpha"] == 0.0125
    assert row["mde"] == stats.smallest_detectable_effect(300, (mine != none).mean(), alpha=0.0125, again=both)
    alone = compared({name: runs[name] for name in ("none", "none-again", "mless")})["mless"]
    assert alone["alpha"] == 0.05
    assert alone["mde"] < row["mde"]
    # where A/A is zero the second run costs nothing
    quiet = compared({"none": none, "none-again": none, "mless": mine})["mless"]
    assert quiet["mde"] == stats.smallest_detectable_effect(300, (mine != none).mean())


@pytest.mark.parametrize("noisy", [False, True], ids=["A/A-zero", "A/A-not-zero"])
def test_an_effect_on_several_samples_is_found_as_often_as_planned(noisy: bool):
    """Sign-flip against both runs of none, at the level of three conditions: all runs are rows of one test."""
    rng = np.random.default_rng(8)
    n, samples, sets = 50, 4, 400

    def means(effect: float) -> list[np.ndarray]:
        ability = rng.uniform(0.2, 0.8 - effect, (n, sets))
        found = [(rng.random((samples, n, sets)) < ability + shift).mean(0) for shift in (0.0, 0.0, effect)]
        return [found[0], found[1] if noisy else found[0], found[2]]

    none, again, mine = means(0.1)
    spreads = [stats.cluster_spread(none[:, [at]], mine[:, [at]], again[:, [at]]) for at in range(60)]
    at_level = [
        stats.smallest_detectable_mean(n, one.sd, alpha=0.05 / 3, again=one.again, ties=one.ties) for one in spreads
    ]
    mde = float(np.mean(at_level))
    none, again, mine = means(mde)
    p = [stats.sign_flip(np.round(mine - base, 12), np.random.default_rng(0)).p for base in (none, again)]
    moved, by_itself = np.abs((mine - none).mean(0)), np.abs((again - none).mean(0))
    found = float(((np.maximum(*p) <= 0.05 / 3) & (moved > by_itself + 1e-12)).mean())
    print(f"several samples, A/A {'not ' if noisy else ''}zero: ±{mde:.3f} found in {found:.3f}")
    assert found == pytest.approx(0.8, abs=0.02 + 2 * math.sqrt(0.16 / sets))


def test_mde_of_several_samples_is_taken_from_their_spread():
    rng = np.random.default_rng(9)
    runs = {name: rng.random((40, 3)) < 0.5 for name in ("none", "none-again", "mless", "mful")}
    spread = stats.cluster_spread(runs["none"], runs["mless"], runs["none-again"])
    expected = stats.smallest_detectable_mean(40, spread.sd, alpha=0.025, again=spread.again, ties=spread.ties)
    assert compared(runs)["mless"]["mde"] == pytest.approx(expected)
    assert expected > stats.smallest_detectable_mean(40, spread.sd, alpha=0.025, ties=spread.ties)
    assert spread.ties == pytest.approx(1 / 3 / 40)


# ---- the primary condition -------------------------------------------------------------------------------------------


def test_the_primary_is_tested_alone_and_the_others_among_themselves():
    runs = drawn(np.random.default_rng(2), (200,), 0.1, 0.2, 0.1, 4)
    alone = compared({name: runs[name] for name in ("none", "none-again", "mless")})["mless"]
    rows = compared(runs, primary="mless")
    same = ("p", "p_again", "p_adjusted", "alpha", "mde", "verdict", "delta", "delta_lo", "delta_hi", "equivalence_p")
    assert {key: rows["mless"][key] for key in same} == {key: alone[key] for key in same}
    others = [name for name in NAMES if name != "mless"]
    holm = stats.holm(np.array([comparing.p_of_row(rows[name]) for name in others]))
    assert [rows[name]["p_adjusted"] for name in others] == holm.tolist()
    assert {rows[name]["alpha"] for name in others} == {0.05 / 3}


# ---- several intervals read together ---------------------------------------------------------------------------------


def test_intervals_of_all_conditions_are_wider_and_of_one_the_same():
    runs = drawn(np.random.default_rng(3), (200,), 0.1, 0.2, 0.0, 3)
    rows = compared(runs)
    for name in NAMES[:3]:
        whole = stats.paired_difference(runs["none"], runs[name], 1 - 0.05 / 3)
        assert (rows[name]["delta_lo_all"], rows[name]["delta_hi_all"]) == (whole.lo, whole.hi)
        assert whole.lo < rows[name]["delta_lo"] < rows[name]["delta_hi"] < whole.hi
    one = compared({name: runs[name] for name in ("none", "none-again", "mless")})["mless"]
    assert (one["delta_lo_all"], one["delta_hi_all"]) == (one["delta_lo"], one["delta_hi"])
    several = {name: np.stack([run, np.roll(run, 1)], axis=1) for name, run in runs.items()}
    row = compared(several)["mless"]
    assert row["delta_lo_all"] < row["delta_lo"] < row["delta_hi"] < row["delta_hi_all"]


def test_intervals_of_all_conditions_cover_at_once():
    """Four conditions without an effect: all four intervals hold 0 in at least 95 % of runs, single ones do not."""
    rng = np.random.default_rng(5)
    sets, n = 4000, 150
    hard = rng.beta(1, 1, (sets, n))
    none, *others = (rng.random((sets, n)) < hard for _ in range(5))
    inside: dict[str, float] = {}
    for which, level in {"single": 0.95, "all": 1 - 0.05 / 4}.items():
        holds = np.ones(sets, dtype=bool)
        for one in others:
            lo, hi = paired._tango((~none & one).sum(1), (none & ~one).sum(1), n, paired.normal_quantile(level))
            holds &= (lo <= 0) & (hi >= 0)
        inside[which] = float(holds.mean())
    print(inside)
    assert inside["all"] >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / sets)
    assert inside["single"] < 0.92
