"""The tables of benchmarks/README.md: made from the recorded rows, and a new run is kept beside the old ones."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def place(tmp_path) -> Path:
    """A copy of the page, of what makes it and of what it is made from."""
    for name in ("tables.py", "README.md"):
        shutil.copy(BENCHMARKS / name, tmp_path / name)
    shutil.copytree(BENCHMARKS / "results", tmp_path / "results")
    return tmp_path


def _made(place: Path, *asked: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(place / "tables.py"), *asked], capture_output=True, text=True, check=False
    )


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _line(place: Path, begins: str) -> str:
    return next(
        line for line in (place / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith(begins)
    )


def test_tables_are_what_the_recorded_rows_say():
    made = _made(BENCHMARKS, "--check")
    assert made.returncode == 0, made.stderr


def test_every_recorded_row_says_which_run_it_is_of_and_with_what_it_was_measured():
    files = list((BENCHMARKS / "results").glob("????-??-??-*.jsonl"))
    assert len(files) == len(list((BENCHMARKS / "results").iterdir())) > 5
    for file in files:
        for row in _rows(file):
            assert all((row["run"], row["what"], row["torch"], row.get("device") or row["cpu"])), f"{file.name}: {row}"


def test_a_number_typed_over_is_noticed_and_put_right(place):
    page = place / "README.md"
    right = page.read_text(encoding="utf-8")
    line = _line(place, "| H200, tokens a second, 1 row ")
    page.write_text(right.replace(line, line.replace("205", "905")), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != right
    assert _made(place, "--check").returncode == 1
    assert _made(place).returncode == 0
    assert page.read_text(encoding="utf-8") == right


def test_a_new_run_gets_the_next_number_and_a_missed_aim_shows(place, tmp_path):
    before = _rows(place / "results" / "2026-11-15-h200-generation.jsonl")
    new = {"what": "ours, row-stable", "rows": 1, "tokens_per_s": 150.4, "torch": "9", "date": "2031-02-03"}
    (tmp_path / "new.jsonl").write_text(json.dumps(new) + "\n")
    made = _made(place, "--record", str(tmp_path / "new.jsonl"), "--as", "h200-generation")
    assert made.returncode == 0, made.stderr
    run = max(row["run"] for row in before) + 1
    assert _rows(place / "results" / "2031-02-03-h200-generation.jsonl") == [{**new, "run": run}]
    assert _rows(place / "results" / "2026-11-15-h200-generation.jsonl") == before
    line = _line(place, "| H200, tokens a second, 1 row ")
    assert "· 150 |" in line
    assert f"in {run - 1} of {run} runs" in line
    assert _made(place, "--check").returncode == 0


def test_a_run_without_peers_is_kept_and_says_nothing_of_them(place, tmp_path):
    rows = [row for row in _rows(place / "results" / "2026-11-16-cpu-received.jsonl") if row["run"] == 6]
    ours = [row for row in rows if row["what"] not in ("TransformerLens", "nnterp")]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ours))
    before = [
        _line(place, f"| CPU, {what} over {whom}, 2,048 tokens ")
        for what, whom in (("fastest peer", "ours"), ("ours", "plain"))
    ]
    made = _made(place, "--record", str(tmp_path / "new.jsonl"), "--as", "cpu-received")
    assert made.returncode == 0, made.stderr
    assert _line(place, "| CPU, fastest peer over ours, 2,048 tokens ") == before[0]
    assert _line(place, "| CPU, ours over plain, 2,048 tokens ").count("·") == before[1].count("·") + 1


def test_what_was_never_measured_is_not_reached(place):
    for file in (place / "results").glob("*cpu-generation*"):
        file.unlink()
    assert _made(place).returncode == 0
    assert _line(place, "| CPU, tokens over the best `generate`'s, bf16 ").endswith("| not measured |")


ROW = '{"what": "a", "torch": "9"}'


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("", "h200-generation", "holds no rows"),
        ("{no json", "h200-generation", "one JSON object per line"),
        ('{"foo": 1}', "h200-generation", "has no `what`"),
        ("[3]", "h200-generation", "has no `what`"),
        (ROW, "foo", "MACHINE-BENCHMARK"),
        (ROW, "h200-recieved", "MACHINE-BENCHMARK"),
        ('{"what": "ours, row-stable", "torch": "9", "rows": 1}', "h200-generation", "not kept"),
    ],
)
def test_what_is_no_run_is_not_kept(place, tmp_path, text, name, says):
    (tmp_path / "new.jsonl").write_text(text)
    before = sorted((place / "results").iterdir())
    made = _made(place, "--record", str(tmp_path / "new.jsonl"), "--as", name)
    assert made.returncode == 1
    assert says in made.stderr
    assert sorted((place / "results").iterdir()) == before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("<!-- table ARM -->", "", "each of these tables once"),
        ("<!-- table ARM -->", "<!-- table AMR -->", "each of these tables once"),
        ("<!-- end -->", "", "no <!-- end -->"),
    ],
)
def test_a_page_that_lost_a_mark_is_left_as_it_is(place, old, new, says):
    page = place / "README.md"
    page.write_text(page.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    made = _made(place)
    assert made.returncode == 1
    assert says in made.stderr
    assert page.read_text(encoding="utf-8") == before


def test_ratios_of_the_kernel_follow_from_its_times():
    """What a row says of itself must agree with what else it says."""
    tables = runpy.run_path(str(BENCHMARKS / "tables.py"))
    for row in tables["rows_of"]("h200-received", "kernel"):
        assert row["one_over_flash"] == pytest.approx(row["one_set_ms"] / row["flash_ms"], abs=2e-3)
    for row in tables["rows_of"]("h200-received", "forward"):
        assert row["ratio"] == pytest.approx(row["ours_ms"] / row["plain_ms"], abs=2e-4)
        assert row["memory_ratio"] == pytest.approx(row["ours_gib"] / row["plain_gib"], abs=1e-3)


@pytest.mark.parametrize("name", ["received", "generation", "arm", "long_prompts"])
def test_without_a_cuda_device_a_benchmark_says_so_in_a_line(name, monkeypatch):
    script = str(BENCHMARKS / f"{name}.py")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(script, run_name="__main__")
    # Python prints such a text on standard error and ends with 1.
    assert isinstance(left.value.code, str)
    assert "CUDA" in left.value.code
    assert "\n" not in left.value.code
