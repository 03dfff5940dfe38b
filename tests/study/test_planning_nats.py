"""`mless plan` from a pilot by likelihood: what so many items can show, checked by simulation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mless import stats
from mless.cli import app
from mless.errors import BadStudy
from mless.study import load_study, run_study
from mless.study.planning_nats import plan_nats, plan_nats_lines
from spelling import model_folder


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pilot")
    data = place / "sums.jsonl"
    rows = [
        {"question": f"{n} + 10?", "answer": str(n + 10), "solution": f"It is \\boxed{{{n + 10}}}."} for n in range(9)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = model_folder(place / "tiny", context=1024)
    chosen: dict[str, Any] = {"model": str(model), "data": str(data), "length": 5, "conditions": "none,mless,random"}
    run_study(load_study("likelihood", chosen), place / "r")
    return place / "r"


def test_a_plan_is_made_of_how_items_vary(pilot: Path) -> None:
    found = plan_nats(pilot, 500, 0.01, "solution")
    assert found["conditions"] == 2
    assert found["alpha_each"] == 0.025
    assert found["sd"] == max(found["pilot"]["sd"].values())
    assert found["detectable"] == stats.smallest_detectable_mean(500, found["sd"], 0.8, 0.025)
    lines = plan_nats_lines(found)
    assert lines[0].startswith("solution: 500 items can show ±")
    assert "needs about" in lines[0]


def test_the_command_says_it_and_writes_json(pilot: Path) -> None:
    said = CliRunner().invoke(app, ["plan", "--items", "100", "--pilot", str(pilot), "--metric", "contrast"])
    assert said.exit_code == 0, said.output
    assert said.stdout.startswith("contrast: 100 items can show ±")
    written = CliRunner().invoke(app, ["plan", "--pilot", str(pilot), "--json"])
    assert json.loads(written.stdout)["metric"] == "solution"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metric": "contrst"}, "did you mean 'contrast'"),
        ({"effect": -1.0}, "effect: a number above 0 expected, in nats a token"),
        ({"margin": 0.0}, "margin: a number above 0 expected"),
        ({"power": 0.01}, "power must lie between alpha and 1"),
        ({"items": 0}, "items"),
    ],
)
def test_what_cannot_be_planned_is_refused(pilot: Path, changes: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"items": 100, "effect": None} | changes
    with pytest.raises(BadStudy, match=why):
        plan_nats(pilot, **given)


def test_equivalence_is_shown_as_often_as_planned() -> None:
    n = stats.items_for_equal_means(0.1, 0.5, 0.8, 0.05)
    rng = np.random.default_rng(0)
    shown = stats.equivalence_of_means(rng.normal(0, 0.5, (n, 4000)), 0.1) <= 0.05
    assert shown.mean() == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("option", ["--changed=0.1", "--again=0.1", "--primary"])
def test_options_for_answers_are_refused(pilot: Path, option: str) -> None:
    said = CliRunner().invoke(app, ["plan", "--pilot", str(pilot), option])
    assert said.exit_code != 0
    assert "leave it out" in str(said.exception) + said.output


def test_a_metric_needs_a_pilot() -> None:
    said = CliRunner().invoke(app, ["plan", "--items", "10", "--metric", "contrast"])
    assert "needs a pilot" in str(said.exception) + said.output
