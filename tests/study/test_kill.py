"""The command, killed at random moments and started again: the tables come out as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mless.cli import main
from mless.study import load_study, run_study
from spelling import model_folder

TABLES = ("prompts", "attention", "dilution", "retained")


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mless.cli", "run", "quick", "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Forked:
    """The command in a process forked off one that has imported everything and computed nothing, because importing takes seconds."""

    def __init__(self, out: Path, *options: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["mless.study.attention", "transformers.models.llama.modeling_llama", "tokenizers", "test_kill"]
        )
        self._process = context.Process(target=_command, args=(out, *options), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        self._process.join()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _command(out: Path, *options: str) -> None:
    os.nice(3)  # whoever is to kill it comes first; much more, and a busy machine never lets it begin
    sys.argv = ["mless", "run", "quick", "--out", str(out), *options]
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        main()


def finish(out: Path, *options: str) -> None:
    process = start(out, *options)
    _, errors = process.communicate(timeout=540)
    assert process.returncode == 0, errors


def files(out: Path) -> int:
    return sum(1 for path in out.rglob("*") if path.is_file()) if out.exists() else 0


def kill_when(process: subprocess.Popen[str] | Forked, out: Path, count: int, delay: float) -> bool:
    """Kill it `delay` seconds after the folder holds `count` files; False when it ended by itself before."""
    while files(out) < count and process.poll() is None:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def manifest(out: Path) -> dict[str, Any]:
    about = json.loads((out / "study.json").read_text())
    del about["timings"], about["sha256"]
    assert str(out) in about["command"]
    about["command"].remove(str(out))
    return about


def assert_same_results(one: Path, other: Path) -> None:
    for name in TABLES:
        assert (one / f"{name}.parquet").read_bytes() == (other / f"{name}.parquet").read_bytes(), name
    assert manifest(one) == manifest(other)
    assert not list(other.rglob("*.partial"))


def kill_and_rerun(
    run: Callable[..., subprocess.Popen[str] | Forked],
    out: Path,
    options: tuple[str, ...],
    *,
    kills: int,
    most_files: int,
    seed: int,
    seconds: float,
) -> None:
    """One folder, killed again and again: each new run goes on from what the killed one left. It starts within some seconds."""
    rng = random.Random(seed)
    killed = 0
    for _ in range(4 * kills):
        if killed == kills:
            break
        if rng.random() < 0.2:  # while Python starts, the model loads, the proofs run
            count, delay = 0, rng.uniform(0, seconds)
        else:  # while units and tables are written
            count, delay = files(out) + rng.randint(1, 1 + most_files // kills), rng.uniform(0, 0.05)
        died = kill_when(run(out, *options), out, min(count, most_files - 1), delay)
        killed += died
        if not died:
            shutil.rmtree(out)  # it was done before its moment came: begin anew
        for path in (out / "units").rglob("*.parquet"):
            if not path.name.startswith("."):
                assert pq.read_table(path).num_rows > 0
    assert killed == kills


def test_killed_at_random_moments(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path / "tiny"))
    chosen = {"model": model, "prompt": "raw", "length": 5, "limit": 12, "conditions": "none,mless"}
    options = tuple(word for name, value in chosen.items() for word in (f"--{name}", str(value)))
    whole = tmp_path / "whole"
    spec = load_study("quick", chosen)
    run_study(spec, whole)
    # two files a unit, twenty-four units, study.json, .lock, four tables
    kill_and_rerun(Forked, tmp_path / "killed", options, kills=2, most_files=54, seed=1, seconds=1)
    run_study(spec, tmp_path / "killed")  # what the command runs, without another start of Python
    assert_same_results(whole, tmp_path / "killed")


@pytest.mark.slow
def test_killed_at_twenty_random_moments_with_every_layer(tmp_path: Path) -> None:
    options = ("--limit", "6")
    finish(tmp_path / "whole", *options)
    for seed in range(4):
        killed = tmp_path / f"killed-{seed}"
        kill_and_rerun(start, killed, options, kills=5, most_files=54, seed=seed, seconds=5)
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
