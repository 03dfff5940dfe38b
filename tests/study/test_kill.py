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
from mless.results.folder import ResultFolder
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


def progress(out: Path) -> int:
    """How far a run is: the files that it has written, and every two kilobytes of the tables that grow."""
    names = [Path(folder) / name for folder, _, names in os.walk(out) for name in names]
    size = 0
    for path in names:
        with contextlib.suppress(OSError):  # it may be renamed just now
            size += path.stat().st_size if path.parent.name == "units" else 0
    return len(names) + size // 2048


def kill_when(process: subprocess.Popen[str] | Forked, out: Path, count: int, delay: float) -> bool:
    """Kill it `delay` seconds after it has come so far; False when it ended by itself before."""
    while progress(out) < count and process.poll() is None:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def progress_of_tables(whole: Path) -> int:
    """The `progress` of a run that has measured everything."""
    return 4 + sum((whole / f"{name}.parquet").stat().st_size for name in ("attention", "dilution")) // 2048


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
    most: int,
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
            count, delay = progress(out) + rng.randint(1, 1 + most // kills), rng.uniform(0, 0.05)
        died = kill_when(run(out, *options), out, min(count, most - 1), delay)
        killed += died
        if not died:
            shutil.rmtree(out)  # it was done before its moment came: begin anew
        for path in (out / "units").glob("*/*.parquet"):
            if not path.name.startswith("."):
                assert pq.read_table(path).num_rows > 0
    assert killed == kills


def test_killed_at_random_moments(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path / "tiny"))
    chosen = {"model": model, "prompt": "raw", "length": 5, "limit": 12, "conditions": "none,mless"}
    options = (
        *(word for name, value in chosen.items() for word in (f"--{name}", str(value))),
        "--set",
        "group_tokens=200",
    )
    whole = tmp_path / "whole"
    spec = load_study("quick", chosen, ["group_tokens=200"])
    run_study(spec, whole)
    kill_and_rerun(Forked, tmp_path / "killed", options, kills=2, most=progress_of_tables(whole), seed=1, seconds=1)
    run_study(spec, tmp_path / "killed")  # what the command runs, without another start of Python
    assert_same_results(whole, tmp_path / "killed")


@pytest.mark.slow
def test_killed_at_twenty_random_moments_with_every_layer(tmp_path: Path) -> None:
    options = ("--limit", "6")
    finish(tmp_path / "whole", *options)
    for seed in range(4):
        killed = tmp_path / f"killed-{seed}"
        kill_and_rerun(
            start, killed, options, kills=5, most=progress_of_tables(tmp_path / "whole"), seed=seed, seconds=5
        )
        finish(killed, *options)
        assert_same_results(tmp_path / "whole", killed)


#: The command, which in its fifth group makes a file and waits there for Ctrl-C. A process started in a shell's background is born deaf to
#: that; this one listens, whoever starts the tests.
_WAITING = """
import itertools, signal, sys, time
from pathlib import Path
from mless import capture
from mless.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)
run, groups, there = capture.received_later, itertools.count(1), Path(sys.argv.pop(1))

def received_later(*given, **named):
    if next(groups) == 5:
        there.touch()
        time.sleep(600)
    return run(*given, **named)

capture.received_later = received_later
main()
"""


def test_interrupted_by_the_user(tmp_path: Path) -> None:
    options = (
        "--layers",
        "1",
        "--limit",
        "8",
        "--conditions",
        "none,mless,mful",
        "--set",
        "length=100",
        "--set",
        "batch_size=2",
    )
    out, waits = tmp_path / "out", tmp_path / "waits"
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITING, str(waits), "run", "quick", "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not waits.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert output == ""
    assert errors.splitlines()[-1] == ("mless: interrupted; what is stored stays, the same command goes on from there")
    assert "Traceback" not in errors
    assert not json.loads((out / "study.json").read_text())["complete"]
    table = ResultFolder(out).growing("attention")
    table.look()
    stored = len(table.units) + len(list((out / "units" / "attention").glob("*.parquet")))
    assert stored == 8, "what was measured before is stored"
    outcome = run_study(
        load_study(
            "quick", {"layers": "1", "limit": 8, "conditions": "none,mless,mful"}, ["length=100", "batch_size=2"]
        ),
        out,
    )
    assert outcome.units == 24
    assert outcome.computed == 24 - stored
    assert all((out / f"{name}.parquet").exists() for name in TABLES)
