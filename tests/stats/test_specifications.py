"""Many specifications of one comparison: each by itself, the joint test against slow ways and by simulation, and what settings move."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mless.errors import BadData
from mless.stats.intervals import mean_intervals
from mless.stats.shares import sign_flip
from mless.stats.specifications import Joint, each_specification, joint_test, setting_effects

MARGIN = 0.5


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def items_of(
    draw: np.random.Generator, n: int, effects: np.ndarray, *, shared: float = 0.8, shape: str = "normal"
) -> np.ndarray:
    """Items whose changes have something in common in all specifications."""
    noise = draw.standard_t(3, (2, n, len(effects))) if shape == "heavy" else draw.normal(0, 1, (2, n, len(effects)))
    return effects + math.sqrt(shared) * noise[0][:, :1] + math.sqrt(1 - shared) * noise[1]


def jointly(changes: np.ndarray, seed: int = 0, flips: int = 999) -> Joint:
    return joint_test(changes, each_specification(changes, MARGIN, rng(seed)), rng(seed), flips=flips)


# ---- one by one ------------------------------------------------------------------------------------------------------


def test_each_specification_is_judged_by_itself() -> None:
    changes = items_of(rng(1), 40, np.array([1.5, 0.0, -1.5, 0.2]))
    changes[3, 1] = np.nan
    found = each_specification(changes, MARGIN, rng())
    around = mean_intervals(changes)
    assert [one.n for one in found] == [40, 39, 40, 40]
    assert [one.delta for one in found] == around.mean.tolist()
    assert [(one.lo, one.hi) for one in found] == list(zip(around.lo.tolist(), around.hi.tolist(), strict=True))
    assert [one.p for one in found] == sign_flip(changes, rng()).p.tolist()
    assert (found[0].verdict, found[2].verdict) == ("rises", "drops")


def test_a_change_too_small_to_matter_is_equivalent() -> None:
    changes = items_of(rng(2), 200, np.zeros(1))
    assert [one.verdict for one in each_specification(changes, 0.5, rng())] == ["equivalent"]
    assert [one.verdict for one in each_specification(changes, 0.01, rng())] == ["undecided"]


# ---- jointly ---------------------------------------------------------------------------------------------------------


def test_with_few_items_all_patterns_are_taken_as_the_slow_way_does() -> None:
    changes = items_of(rng(3), 8, np.array([1.2, 0.4, 0.0, -0.3, 0.9]))
    changes[2, 3] = np.nan
    found = jointly(changes)
    rises, drops, medians = [], [], []
    for signs in itertools.product((1.0, -1.0), repeat=8):
        rows = each_specification(changes * np.array(signs)[:, None], MARGIN, rng())
        rises.append(sum(one.verdict == "rises" for one in rows))
        drops.append(sum(one.verdict == "drops" for one in rows))
        medians.append(abs(float(np.median([one.delta for one in rows]))))
    assert found.p_rises == pytest.approx(np.mean(np.array(rises) >= rises[0]))
    assert found.p_drops == pytest.approx(np.mean(np.array(drops) >= drops[0]))
    assert found.p_median == pytest.approx(np.mean(np.array(medians) >= medians[0] - 1e-12))
    either = np.maximum(rises, drops)
    assert found.p_either == pytest.approx(np.mean(either >= either[0]))
    assert found.rises_by_chance == pytest.approx(np.mean(rises))
    assert found.rises_limit == np.quantile(rises, 0.95, method="higher")


def test_an_effect_in_every_specification_is_found_and_counted() -> None:
    found = jointly(items_of(rng(4), 40, np.full(12, 1.0)))
    assert (found.rises, found.drops, found.specifications, found.n) == (12, 0, 12, 40)
    assert found.p_rises < 0.01
    assert found.p_median < 0.01
    assert found.p_drops == 1.0
    assert found.lowest <= found.median <= found.highest


def test_specifications_that_are_copies_of_one_are_no_further_evidence() -> None:
    """Of one specification with p = 0.03, fifty copies all rise, and jointly p stays what it was."""
    one = items_of(rng(11), 30, np.array([0.0]))
    one += 2.3 * one.std(ddof=1) / math.sqrt(30) - one.mean()
    alone = each_specification(one, MARGIN, rng())[0]
    assert (alone.verdict, 0.01 < alone.p < 0.05) == ("rises", True)
    found = jointly(np.repeat(one, 50, axis=1), flips=4000)
    assert found.rises == 50
    assert found.p_median == pytest.approx(alone.p, abs=0.01)
    assert found.p_rises > 0.01


@pytest.mark.parametrize(("shape", "shared"), [("normal", 0.8), ("heavy", 0.8), ("normal", 0.0)])
def test_the_joint_test_holds_its_level(shape: str, shared: float) -> None:
    """Where nothing has an effect, p ≤ 0.05 in 5 of 100 data sets, whether specifications overlap much or not at all."""
    draw, sets = rng(5), 300
    found = [jointly(items_of(draw, 20, np.zeros(9), shared=shared, shape=shape), n, 199) for n in range(sets)]
    # 0.05 + 3 standard errors of 300 data sets
    for name in ("p_rises", "p_drops", "p_either", "p_median"):
        assert np.mean([getattr(one, name) <= 0.05 for one in found]) <= 0.088, name
    # and the median's p is not idle: ties are rare
    assert np.mean([one.p_median <= 0.5 for one in found]) == pytest.approx(0.5, abs=0.1)


def test_too_few_items_are_not_tested() -> None:
    found = jointly(np.ones((1, 3)))
    assert (found.n, found.specifications, found.undecided) == (1, 3, 3)
    assert math.isnan(found.p_rises)
    assert math.isnan(found.p_median)


def test_no_change_anywhere_is_no_finding() -> None:
    found = jointly(np.zeros((20, 4)))
    assert (found.rises, found.p_rises, found.p_median) == (0, 1.0, 1.0)


# ---- settings --------------------------------------------------------------------------------------------------------

GRID = list(itertools.product(("chat", "raw"), ("a", "b", "c")))
SETTINGS = {"template": [one for one, _ in GRID], "system": [one for _, one in GRID], "dtype": ["float32"] * 6}


def test_in_a_full_grid_a_values_mean_is_the_plain_mean() -> None:
    changes = items_of(rng(6), 30, np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
    found = setting_effects(changes, SETTINGS, ["rises"] * 3 + ["undecided"] * 3, rng(), flips=999)
    assert list(found) == ["template", "system"]
    means = changes.mean(axis=0)
    assert found["template"].values == pytest.approx({"chat": means[:3].mean(), "raw": means[3:].mean()})
    assert found["system"].values == pytest.approx(
        {"a": means[::3].mean(), "b": means[1::3].mean(), "c": means[2::3].mean()}
    )
    assert found["template"].range == pytest.approx(abs(means[:3].mean() - means[3:].mean()))
    assert found["template"].p < 0.01 < found["system"].p
    assert (found["template"].turned, found["template"].pairs) == (3, 3)
    assert (found["system"].turned, found["system"].pairs) == (0, 6)


def test_a_grid_with_gaps_is_balanced() -> None:
    """Plain means would give the effect of the template to the system text."""
    effects = np.array([5.0 * (template == "chat") for template, _ in GRID])
    kept = [0, 1, 2, 5]  # raw with c alone
    settings = {name: [values[at] for at in kept] for name, values in SETTINGS.items()}
    found = setting_effects(np.tile(effects[kept], (10, 1)), settings, ["rises"] * 4, rng(), flips=99)
    assert found["template"].range == pytest.approx(5.0)
    assert found["system"].range == pytest.approx(0.0, abs=1e-9)


def test_settings_that_change_together_have_no_numbers_of_their_own() -> None:
    """An engine that computes elsewhere has no dtype: what it does is not laid to the dtype."""
    items = np.random.default_rng(0).normal(size=(20, 1))
    changes = items + np.array([[0.0, 0.0, 1.0]])
    settings = {"dtype": ["float32", "bfloat16", None], "engine": ["hf", "hf", "openai"]}
    found = setting_effects(changes, settings, ["undecided"] * 3, rng(), flips=999)
    assert found["dtype"].range == pytest.approx(0.0, abs=1e-9)
    assert found["engine"].range == pytest.approx(1.0)
    both = {"template": ["chat", "raw"], "system": ["a", "b"]}
    confounded = setting_effects(changes[:, 1:], both, ["undecided"] * 2, rng(), flips=999)
    for one in confounded.values():
        assert np.isnan([one.range, one.p, *one.values.values()]).all()
        assert one.pairs == 0


def test_the_test_of_a_setting_holds_its_level() -> None:
    draw = rng(7)
    found = [
        setting_effects(items_of(draw, 20, np.full(6, 0.7)), SETTINGS, ["rises"] * 6, draw, flips=199)
        for _ in range(200)
    ]
    for name in ("template", "system"):
        assert np.mean([one[name].p <= 0.05 for one in found]) <= 0.096  # 0.05 + 3 standard errors


def test_a_setting_that_changes_no_item_has_no_range() -> None:
    changes = np.repeat(items_of(rng(8), 16, np.array([0.3, 0.0])), 3, axis=1)
    settings = {"template": ["chat"] * 3 + ["raw"] * 3, "grader": ["a", "b", "c"] * 2}
    found = setting_effects(changes, settings, ["undecided"] * 6, rng(), flips=199)
    assert (found["grader"].range, found["grader"].p) == (0.0, 1.0)


def test_settings_without_several_values_move_nothing() -> None:
    assert setting_effects(np.zeros((5, 1)), {"template": ["chat"]}, ["undecided"], rng()) == {}
    assert math.isnan(
        setting_effects(np.zeros((1, 2)), {"template": ["chat", "raw"]}, ["rises"] * 2, rng())["template"].p
    )


def test_what_is_no_table_of_changes_is_refused() -> None:
    with pytest.raises(BadData, match=r"specification 2, item 1 \(numbered from 1\): the value is infinite"):
        each_specification(np.array([[0.0, np.inf]]), MARGIN, rng())
    with pytest.raises(BadData, match="a row for each of 2 specifications expected, got 0"):
        joint_test(np.zeros((4, 2)), [], rng())
    with pytest.raises(BadData, match="settings: a value for each of 2 specifications expected"):
        setting_effects(np.zeros((4, 2)), {"template": ["chat"]}, [], rng())
