"""Likelihood on a GPU: rows run together there, and still no bit of one depends on the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from interrupted import take_apart
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study
from spelling import model_folder

pytestmark = pytest.mark.gpu
CONDITIONS = "none,mless,random,question-twice,position-only,masked-filler,arm"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", context=1024, **shape)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {"question": f"What is {n} + {n + 10}?" * (1 + n % 7), "answer": str(2 * n + 10), "solution": f"{'Add. ' * n} \\boxed{{{2 * n + 10}}}."}
        for n in range(40)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(model: Path, data: Path, out: Path, **changes: object) -> dict[str, pl.DataFrame]:
    chosen = {
        "model": str(model),
        "data": str(data),
        "conditions": CONDITIONS,
        "device": "cuda",
        "length": 7,
        **changes,
    }
    run_study(load_study("likelihood", chosen), out)
    return {
        name: pl.DataFrame(ResultFolder(out).read_table(name)) for name in ("scores", "likelihood", "tokens", "effects")
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_control_differs_in_no_bit(tiny: Path, task: Path, tmp_path: Path, dtype: str) -> None:
    found = run(tiny, task, tmp_path / "r", dtype=dtype)
    again = found["likelihood"].filter(condition="none-again")
    assert again.height > 200
    assert again["delta"].unique().to_list() == [0.0]
    assert found["tokens"].filter(condition="none-again")["kl"].unique().to_list() == [0.0]
    about = json.loads((tmp_path / "r" / "study.json").read_text())
    assert about["proofs"]["neighbours"] == "same bits"
    assert about["proofs"]["texts"] == "in one row"


def test_fewer_items_and_a_resumed_run_have_the_same_bits(tiny: Path, task: Path, tmp_path: Path) -> None:
    whole = run(tiny, task, tmp_path / "r", dtype="bfloat16")
    few = run(tiny, task, tmp_path / "few", dtype="bfloat16", limit=9)
    mine = whole["scores"].filter(pl.col("item").is_in([str(n + 1) for n in range(9)]))
    columns = ["condition", "item", "metric", "value"]
    assert few["scores"].select(columns).sort(columns[:3]).equals(mine.select(columns).sort(columns[:3]))
    shutil.copytree(tmp_path / "r", tmp_path / "again")
    take_apart(tmp_path / "again")
    for unit in ("mless-00002", "none-00001", "arm-00003", "none-again-00007"):
        for file in (tmp_path / "again" / "units").rglob(f"{unit}*"):
            file.unlink()
    again = run(tiny, task, tmp_path / "again", dtype="bfloat16")
    assert again["scores"].equals(whole["scores"])
    assert again["effects"].equals(whole["effects"])


def test_numbers_are_those_of_the_cpu(tiny: Path, task: Path, tmp_path: Path) -> None:
    there = run(tiny, task, tmp_path / "gpu", dtype="float32", limit=8)["scores"]
    here = run(tiny, task, tmp_path / "cpu", dtype="float32", limit=8, device="cpu")["scores"]
    columns = ["condition", "item", "metric"]
    both = there.join(here, on=columns)
    # ARM redistributes by rank: where two values are nearly equal, another device may choose the other one.
    plain = both.filter(pl.col("condition") != "arm")
    assert plain.height > 300
    gap = (plain["value"] - plain["value_right"]).abs() / plain["value"].abs().clip(1.0, None)
    assert gap.max() < 1e-4
