"""Studies whose answers are code: allowed by the user only, and with the known pass@k."""

from __future__ import annotations

import json
import os
from math import comb
from pathlib import Path

import polars as pl
import pytest

from mless.errors import BadStudy
from mless.study import Outcome, load_study, run_study
from sandboxed import sandbox  # noqa: F401

DATA = Path(os.environ.get("MLESS_DATA") or Path(__file__).parents[4] / "shared" / "data") / "humaneval.jsonl"
RIGHT, WRONG = (
    "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```",
    "```python\ndef add(a, b):\n    return a - b\n```",
)


def _problem(name: str) -> dict[str, str]:
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
    prompt = f'def add(a, b):\n    """The sum ({name})."""\n'
    return {
        "task_id": name,
        "prompt": prompt,
        "test": test,
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
    }


def _run(
    folder: Path, problems: list[dict[str, str]], script: object, *, run_code: bool = True, **changes: object
) -> Outcome:
    data = folder / "humaneval-own.jsonl"
    data.write_text("\n".join(json.dumps(one) for one in problems))
    (folder / "script.json").write_text(json.dumps(script))
    chosen = {
        "model": "scripted",
        "data": str(data),
        "conditions": "none,mless",
        "accuracy.again": False,
        "accuracy.engine": "scripted",
    }
    chosen |= {"accuracy.script": str(folder / "script.json"), "accuracy.max_new_tokens": 1000}
    chosen |= {key.replace("__", "."): value for key, value in changes.items()}
    return run_study(load_study("accuracy", chosen), folder / "r", run_code=run_code)


def test_code_runs_only_where_the_user_allows_it(tmp_path: Path) -> None:
    with pytest.raises(
        BadStudy, match=r"'python-tests' runs the code that the model writes, which must be allowed: --run-code"
    ):
        _run(tmp_path, [_problem("a")], {"*": RIGHT}, run_code=False)
    assert not (tmp_path / "r").exists()


def test_a_study_file_cannot_allow_it(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('run_code = true\ndata = "humaneval"\n[accuracy]\n')
    with pytest.raises(BadStudy, match=r"only the --run-code flag on the command line can do that"):
        load_study(str(tmp_path / "s.toml"))


@pytest.mark.usefixtures("sandbox")
def test_pass_at_k_of_scripted_answers(tmp_path: Path) -> None:
    script = {"always": RIGHT, "never": WRONG, "sometimes": [RIGHT, WRONG]}
    problems = [_problem(name) for name in script]
    _run(tmp_path, problems, script, accuracy__samples=6, accuracy__temperature=0.8, accuracy__k=[1, 3])
    answers = pl.read_parquet(tmp_path / "r" / "answers.parquet")
    assert (answers["correct"] == (answers["text"] == RIGHT)).all()
    assert set(answers["why"]) == {"the tests passed", "a test failed"}
    none = answers.filter(pl.col("condition") == "none")
    sometimes = int(none.filter(pl.col("item") == "sometimes")["correct"].sum())
    table = pl.read_parquet(tmp_path / "r" / "accuracy.parquet").filter(pl.col("condition") == "none")
    for k in (1, 3):
        (value,) = table.filter(pl.col("metric") == f"pass@{k}")["value"].to_list()
        assert value == pytest.approx((1 + 0 + 1 - comb(6 - sometimes, k) / comb(6, k)) / 3)
    command = json.loads((tmp_path / "r" / "study.json").read_text())["command"]
    assert "--run-code" in command


@pytest.mark.slow
@pytest.mark.usefixtures("sandbox")
@pytest.mark.skipif(not DATA.exists(), reason="the published problems are not here")
def test_the_published_solutions_pass_and_empty_ones_do_not(tmp_path: Path) -> None:
    problems = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
    script = {
        "none": {one["task_id"]: one["canonical_solution"] for one in problems},
        "mless": {one["task_id"]: "    return None\n" for one in problems},
    }
    _run(tmp_path, problems, script)
    table = pl.read_parquet(tmp_path / "r" / "accuracy.parquet")
    assert dict(table.filter(pl.col("metric") == "pass@1").select("condition", "value").iter_rows()) == {
        "none": 1.0,
        "mless": 0.0,
    }
