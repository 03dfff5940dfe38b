"""The real command, killed at random moments and started again: the tables come out as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mless.study import load_study, run_study

TABLES = ("prompts", "attention", "dilution", "retained")


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mless.cli", "run", "quick", "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(out: Path, *options: str) -> None:
    process = start(out, *options)
    _, errors = process.communicate(timeout=540)
    assert process.returncode == 0, errors


def files(out: Path) -> int:
    return sum(1 for path in out.rglob("*") if path.is_file()) if out.exists() else 0


def kill_when(process: subprocess.Popen[str], out: Path, count: int, delay: float) -> bool:
    """Kill it `delay` seconds after the folder holds `count` files; False when it ended by itself before."""
    while files(out) < count and process.poll() is None:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def manifest(out: Path) -> dict[str, Any]:
    about = json.loads((out / "study.json").read_text())
    del about["timings"]
    assert str(out) in about["command"]
    about["command"].remove(str(out))
    return about


def assert_same_results(one: Path, other: Path) -> None:
    for name in TABLES:
        assert (one / f"{name}.parquet").read_bytes() == (other / f"{name}.parquet").read_bytes(), name
    assert manifest(one) == manifest(other)
    assert not list(other.rglob("*.partial"))


def kill_and_rerun(out: Path, options: tuple[str, ...], kills: int, most_files: int, seed: int) -> None:
    """One folder, killed again and again: each new run goes on from what the killed one left."""
    rng = random.Random(seed)
    killed = 0
    for _ in range(4 * kills):
        if killed == kills:
            break
        if rng.random() < 0.2:  # while Python starts, the model loads, the proofs run
            count, delay = 0, rng.uniform(0, 5)
        else:  # while units and tables are written
            count, delay = files(out) + rng.randint(1, 1 + most_files // kills), rng.uniform(0, 0.05)
        died = kill_when(start(out, *options), out, min(count, most_files - 1), delay)
        killed += died
        if not died:
            shutil.rmtree(out)  # it was done before its moment came: begin anew
        for path in (out / "units").rglob("*.parquet"):
            if not path.name.startswith("."):
                assert pq.read_table(path).num_rows > 0
    assert killed == kills


def test_killed_at_random_moments(tmp_path: Path) -> None:
    options = ("--layers", "1", "--limit", "6", "--conditions", "none,mless")
    whole = tmp_path / "whole"
    spec = load_study("quick", {"layers": "1", "limit": 6, "conditions": "none,mless"})
    run_study(spec, whole)
    # two files a unit, twelve units, study.json, .lock, four tables
    kill_and_rerun(tmp_path / "killed", options, kills=3, most_files=30, seed=1)
    run_study(spec, tmp_path / "killed")  # what the command runs, without another start of Python
    assert_same_results(whole, tmp_path / "killed")


@pytest.mark.slow
def test_killed_at_twenty_random_moments_with_every_layer(tmp_path: Path) -> None:
    options = ("--limit", "6")
    finish(tmp_path / "whole", *options)
    for seed in range(4):
        killed = tmp_path / f"killed-{seed}"
        kill_and_rerun(killed, options, kills=5, most_files=54, seed=seed)
        finish(killed, *options)
        assert_same_results(tmp_path / "whole", killed)


def test_interrupted_by_the_user(tmp_path: Path) -> None:
    options = ("--layers", "1", "--limit", "8", "--conditions", "none,mless,mful", "--set", "length=100")
    out = tmp_path / "out"
    # A process started in a shell's background is born deaf to Ctrl-C; this one listens, whoever starts the tests.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from mless.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", "quick", "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while files(out) < 6 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert output == ""
    assert errors.splitlines()[-1] == ("mless: interrupted; what is stored stays, the same command goes on from there")
    assert "Traceback" not in errors
    assert not json.loads((out / "study.json").read_text())["complete"]
    stored = len(list((out / "units" / "attention").glob("*.parquet")))
    assert 0 < stored < 24
    outcome = run_study(
        load_study("quick", {"layers": "1", "limit": 8, "conditions": "none,mless,mful"}, ["length=100"]), out
    )
    assert outcome.units == 24
    assert (
        24 - stored <= outcome.computed <= 24 - stored + 1
    )  # a unit is two files; of the last one only the first may be there
    assert all((out / f"{name}.parquet").exists() for name in TABLES)
