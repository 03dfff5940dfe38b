"""`mless plan`: the sentence of the issue, the share taken from a pilot, and what is refused.

Not test_planning.py: stats has one, and test modules share one namespace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import synthetic
from judged_answers import answers_of, pair, write_folder
from mless import stats
from mless.errors import BadFolder, BadStudy
from mless.study.planning import plan, plan_lines


def test_the_sentence_of_the_issue():
    lines = plan_lines(plan(500, None, None, None, conditions=1))
    assert lines[0] == "500 items can show ±4.1 points; ±2 needs about 2,043; assuming 10 % of items change"
    assert lines[1] == "Exact McNemar test of paired items, one answer each, 80 % power, α = 0.05"
    assert lines[2] == (
        "If there is no effect, 500 items say equivalent (within ±2 points) in 0.1 % of runs, undecided in 96.3 %, rises or drops in 3.7 %; to say "
        "equivalent takes about 2,162 items (80 % power)."
    )
    assert "--pilot FOLDER" in lines[3]


def test_unless_told_otherwise_the_plan_is_for_the_conditions_of_the_study_accuracy():
    found = plan(500, None, None, None)
    assert (found["conditions"], found["alpha_each"]) == (3, 0.05 / 3)
    lines = plan_lines(found)
    assert lines[0] == "500 items can show ±4.6 points; ±2 needs about 2,691; assuming 10 % of items change"
    assert lines[1].endswith("; each of 3 conditions under Holm: p ≤ 0.0167 where no other one has an effect")


def test_a_primary_condition_is_planned_for_alone():
    found = plan(500, None, None, None, primary=True)
    assert found["detectable"] == stats.smallest_detectable_effect(500, 0.1)
    assert found["detectable_others"] == stats.smallest_detectable_effect(500, 0.1, alpha=0.025)
    assert plan_lines(found)[1].endswith(
        "; for the primary condition, which is tested alone (under Holm each of the other 2 can show ±4.4 points)"
    )
    assert found["items_needed"] == 2043


def test_an_a_a_difference_costs_items():
    found = plan(500, 0.02, None, None, again=0.05, conditions=1, margin=0.03)
    both = stats.Again.planned(0.1, 0.05)
    assert found["detectable"] == stats.smallest_detectable_effect(500, 0.1, again=both)
    assert found["items_needed"] == stats.items_for_effect(0.02, 0.1, again=both) > 2043
    assert found["power_here"] == stats.mcnemar_power(500, 0.02, 0.1, again=both)
    assert found["items_for_equivalence"] == stats.items_for_equivalence(0.03, 0.1)
    chances = stats.verdict_chances(500, 0.1, 0.03, again=both)
    assert found["without_effect"] == {
        name: getattr(chances, name) for name in ("rises", "drops", "equivalent", "undecided")
    }
    assert plan_lines(found)[1].endswith("; against both runs of none, which differ on 5 % of items (A/A)")


def test_an_effect_and_a_share_of_ones_own():
    found = plan(500, 0.03, 0.2, None, conditions=1)
    assert found["detectable"] == stats.smallest_detectable_effect(500, 0.2)
    assert found["items_needed"] == stats.items_for_effect(0.03, 0.2)
    assert found["power_here"] == stats.mcnemar_power(500, 0.03, 0.2)
    assert (found["changed_from"], found["pilot"]) == ("given", None)
    lines = plan_lines(plan(500, 0.03, 0.2, None))
    assert lines[0].endswith("; if 20 % of items change")
    assert lines[3].startswith("500 items would find ±3 points in ")
    without = plan_lines(plan(None, 0.02, None, None, conditions=1))
    assert without[0] == "±2 points needs about 2,043 items; assuming 10 % of items change"
    assert without[2].startswith(
        "To show that there is no effect (equivalent, within ±2 points) takes about 2,162 items"
    )


def test_several_comparisons_share_alpha():
    found = plan(500, None, None, None, conditions=4)
    assert found["detectable"] == stats.smallest_detectable_effect(500, 0.1, alpha=0.0125)
    assert found["items_needed"] == stats.items_for_effect(0.02, 0.1, alpha=0.0125)
    assert "each of 4 conditions under Holm: p ≤ 0.0125" in plan_lines(found)[1]


def test_power_and_alpha_of_ones_own():
    found = plan(500, None, 0.1, None, power=0.9, alpha=0.01, conditions=1)
    assert found["detectable"] == stats.smallest_detectable_effect(500, 0.1, 0.9, 0.01)
    assert "90 % power, α = 0.01" in plan_lines(plan(500, None, 0.1, None, power=0.9, alpha=0.01))[1]


def test_too_few_items_and_too_few_changes():
    assert plan_lines(plan(30, None, 0.1, None))[0].startswith("30 items can show nothing: too few would change")
    assert plan(30, None, 0.1, None)["detectable"] is None
    alone = plan_lines(plan(1, None, None, None))
    assert alone[0].startswith("1 item can show nothing")
    assert any(line.startswith("If there is no effect, 1 item says equivalent (") for line in alone)
    some = plan_lines(plan(2, None, None, None))
    assert any(line.startswith("If there is no effect, 2 items say equivalent (") for line in some)
    few = plan(5000, None, 0.01, None)
    assert (few["effect"], few["items_needed"]) == (None, None)
    assert plan_lines(plan(5000, None, 0.01, None))[1] == "±2 points cannot come about where only 1 % of items change."


def test_a_plan_can_be_written_as_json(tmp_path: Path):
    for found in (plan(500, 0.02, None, None), plan(30, None, 0.1, None), plan(500, None, None, pilot(tmp_path))):
        assert json.loads(json.dumps(found, allow_nan=False)) == found


# ---- pilots ----------------------------------------------------------------------------------------------------------


def pilot(path: Path, again: int = 0, n: int = 200) -> Path:
    """mless changes 24 items, mful 10, the control `again`."""
    none, mless = pair(gained=14, lost=10, n=n)
    mful, control = none.copy(), none.copy()
    mful[30:40] = ~mful[30:40]
    control[:again] = ~control[:again]
    return write_folder(path, answers_of({"none": none, "none-again": control, "mless": mless, "mful": mful}))


def test_the_share_of_a_pilot_is_its_largest(tmp_path: Path):
    found = plan(500, None, None, pilot(tmp_path, again=4))
    assert (found["changed"], found["changed_from"]) == (0.12, "pilot")
    assert found["pilot"]["shares"] == {"mless": 0.12, "mful": 0.05}
    assert (found["pilot"]["largest"], found["pilot"]["again"], found["pilot"]["by_itself"]) == ("mless", 0.02, False)
    both = stats.Again.planned(0.12, 0.02)
    assert found["detectable"] == stats.smallest_detectable_effect(500, 0.12, alpha=0.05 / 3, again=both)
    lines = plan_lines(plan(500, None, None, tmp_path))
    assert lines[0].endswith("; if 12 % of items change, as in the pilot")
    assert lines[-1] == "Pilot: m, 200 items of t; changed: mless 12 %, mful 5 %; A/A: 2 %"


def test_a_control_that_changes_more_is_planned_with_and_told(tmp_path: Path):
    found = plan(500, None, None, pilot(tmp_path, again=40))
    assert (found["changed"], found["pilot"]["by_itself"]) == (0.2, True)
    lines = plan_lines(plan(500, None, None, tmp_path))
    assert "A/A: 20 %" in lines[-2]
    assert "(A/A) change as many items as any condition or more, so the plan uses that share" in lines[-1]


def test_samples_of_a_pilot_count_as_single_answers(tmp_path: Path):
    rng = np.random.default_rng(0)
    none, after, voted = rng.random((50, 4)) < 0.5, rng.random((50, 4)) < 0.5, rng.random((50, 8)) < 0.5
    path = write_folder(tmp_path, answers_of({"none": none, "mless": after, "vote": voted}), samples=4)
    found = plan(500, None, None, path)
    assert found["pilot"]["shares"] == {"mless": pytest.approx((none != after).mean())}
    lines = plan_lines(plan(500, None, None, path))
    assert any("A/A: not run" in line for line in lines)
    assert lines[-1].startswith("A share seen in 50 items is rough; plan with a larger one too: --changed ")


def test_a_pilot_that_says_nothing(tmp_path: Path):
    none, _ = pair(0, 0, 20)
    same = write_folder(tmp_path / "a", answers_of({"none": none, "none-again": none, "mless": none}))
    with pytest.raises(
        BadStudy, match=r"none of 20 items changed under any condition.*larger pilot, or give --changed"
    ):
        plan(500, None, None, same)
    alone = write_folder(tmp_path / "b", answers_of({"none": none}))
    with pytest.raises(BadStudy, match="compares no condition with 'none'"):
        plan(500, None, None, alone)


def test_a_pilot_that_is_none(tmp_path: Path):
    with pytest.raises(BadFolder, match="no result folder"):
        plan(500, None, None, tmp_path)
    attention = synthetic.write_folder(tmp_path / "r", layers=1, heads=2, items=3)
    with pytest.raises(BadFolder, match="holds no answers"):
        plan(500, None, None, attention)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"items": None}, r"number of items \(--items 500\), from an effect"),
        ({"items": 0}, "items: expected at least 1, got 0"),
        ({"items": 10**18}, r"items: expected at most 10,000,000 items \(limit planned-items.*got 1000000000000000000"),
        ({"items": 10**30}, "limit planned-items"),
        ({"conditions": 10**18}, "limit conditions"),
        ({"effect": 2.0}, r"effect: a share from 0\.001 to 1 expected, as 0\.02 is for ±2 points; got 2"),
        ({"effect": -0.02}, "effect: a share"),
        ({"effect": float("nan")}, "effect: a share .* got nan"),
        ({"effect": 0.2}, r"cannot move by 20\.0 points where only 10 % of items change \(assumed\).*--changed 0\.2"),
        ({"changed": 0.0}, "changed: a share above 0 and at most 1"),
        ({"changed": 1.5}, r"changed: .* got 1\.5"),
        ({"conditions": 0}, "conditions compared with none: expected at least 1, got 0"),
        ({"again": -0.1}, r"again: a share from 0 to 1 expected.*got -0\.1"),
        ({"again": 0.15}, r"asked again change 15 % of items \(A/A\), so a condition changes no less.*--changed 0\.15"),
        ({"margin": 0.0}, r"margin: a share of at least 0\.001 and below 1 expected.*got 0"),
        ({"margin": 0.0005}, r"margin: a share of at least 0\.001 .*got 0\.0005"),
        ({"alpha": 1.0}, "alpha must lie between 0 and 1"),
        ({"power": 0.01}, "power must lie between alpha and 1"),
        ({"changed": 0.1, "pilot": Path("somewhere")}, "--changed or from --pilot; give one"),
    ],
)
def test_refused(asked: dict[str, Any], message: str):
    with pytest.raises(BadStudy, match=message):
        plan(**({"items": 500, "effect": None, "changed": None, "pilot": None} | asked))
