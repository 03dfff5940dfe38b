"""A thing of every kind added from outside the package, each in one file: those that CONTRIBUTING.md shows, and the example measurement.

They run in one process of their own, which finds them by MLESS_PLUGINS alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from spelling import model_folder

ROOT = Path(__file__).parent.parent
NAMES = {"graders": "exact", "condition_kinds": "once", "engines": "parrot", "figures": "dot", "arm_rules": "mean"}

SCRIPT = """
import sys
import mless
from mless.report import publish

model, out = sys.argv[1:]
answers = {"model": "any", "data": "arithmetic:1:4", "conditions": "none,mless", "accuracy.engine": "parrot", "accuracy.grader": "exact"}
mless.run("accuracy", f"{out}/answers", **answers)
small = {"model": model, "layers": "1-2", "limit": 3, "prompt": "raw"}
mless.run("activations", f"{out}/arm", conditions="none,arm", **{"arm.rule": "mean", "arm.c": 0.5}, **small)
own = mless.run(f"{out}/own.toml", f"{out}/own", **small).folder
mless.draw(mless.FigureSpec("dot", "dot"), [own])
publish(mless.run(f"{out}/norms.toml", f"{out}/norms", **small).folder, fresh=True)
"""

OWN = """
conditions = ["none", "one"]
[condition.one]
kind = "once"
filler = " /"
length = 3
"""


def shown_files() -> dict[str, str]:
    """The files that CONTRIBUTING.md shows, by the name they register."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    return {found[1]: block for block in blocks if (found := re.search(r'mless\.register\("\w+", "([\w-]+)"', block))}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("added")
    for name, text in shown_files().items():
        (place / f"added_{name}.py").write_text(text)
    (place / "own.toml").write_text(OWN)
    (place / "norms.toml").write_text((ROOT / "examples" / "norms" / "norms.toml").read_text())
    plugins = ",".join([*(f"added_{name}" for name in shown_files()), "residual_norms"])
    paths = [str(place), str(ROOT / "examples" / "norms"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model_folder(place / "model")), str(place)],
        env={**os.environ, "MLESS_PLUGINS": plugins, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return place


def test_every_table_has_its_file_in_the_document() -> None:
    assert set(shown_files()) == set(NAMES.values())
    assert all(len(text.splitlines()) <= 22 for text in shown_files().values())


def test_an_engine_and_a_grader(ran: Path) -> None:
    answers = pl.read_parquet(ran / "answers" / "answers.parquet")
    assert answers["text"].to_list() == answers["item"].to_list()
    assert set(answers["why"]) == {"other letters"}
    about = json.loads((ran / "answers" / "study.json").read_text())
    assert (about["engine"]["engine"], about["implementations"]["grading"]) == ("parrot", "exact")


def test_a_condition_kind_and_a_figure_kind(ran: Path) -> None:
    prompts = pl.read_parquet(ran / "own" / "prompts.parquet").filter(pl.col("condition") == "one")
    spans = [{span["name"]: span["stop"] - span["start"] for span in row} for row in prompts["spans"].to_list()]
    assert [row["filler"] for row in spans] == [3, 3, 3]
    assert (ran / "own" / "figures" / "dot.png").exists()


def test_a_rule_of_arm(ran: Path) -> None:
    about = json.loads((ran / "arm" / "study.json").read_text())
    assert about["conditions"]["arm"]["arm"]["rule"] == "mean"
    changed = pl.read_parquet(ran / "arm" / "activations.parquet").filter(pl.col("metric") == "variance")
    assert changed["difference"].abs().max() > 0


def test_a_measurement_with_table_verdict_and_figure(ran: Path) -> None:
    rows = pl.read_parquet(ran / "norms" / "norms.parquet")
    assert rows.select("condition", "layer").rows() == [
        (condition, layer) for condition in ("mless", "mful", "random") for layer in (1, 2)
    ]
    assert (rows["lo"] <= rows["ratio"]).all()
    assert (ran / "norms" / "figures" / "norms.svg").exists()
    page = (ran / "norms" / "report.html").read_text("utf-8")
    assert "length of the residual stream" in page
    assert "mless: layer 1 ×" in page


def test_without_them_the_names_are_unknown() -> None:
    import mless

    with pytest.raises(mless.MlessError, match="no engine 'parrot'; there are: hf, vllm, openai, scripted"):
        mless.load_study("accuracy", {"accuracy.engine": "parrot"})
