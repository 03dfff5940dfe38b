"""Studies by real workers: a Ray cluster of three nodes on this machine, whose workers, nodes and driver are killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray
THREADS = {"OMP_NUM_THREADS": "1"}
#: One prompt in a group, so that there are many groups.
QUICK = ("quick", "--model", "smollm2", "--limit", "6", "--set", "batch_size=1")
ANSWERS = ("accuracy", "--model", "smollm2", "--data", "arithmetic:1:6", "--max-new-tokens", "8")


def environment() -> dict[str, str]:
    return {**os.environ, **THREADS, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


def command(study: Sequence[str], out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "mless", "run", *study, "--out", str(out), *more]


def run(study: Sequence[str], out: Path, *more: str, wanted: int = 0) -> str:
    """What a whole run writes on standard error."""
    done = subprocess.run(command(study, out, *more), env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == wanted, done.stderr[-3000:]
    return done.stderr


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.parquet"))}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, str]]:
    """The tables of studies that one process measured."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for study in (QUICK, ANSWERS):
        out = tmp_path_factory.mktemp("alone") / "r"
        run(study, out)
        found[study] = digests(out)
    return found


@pytest.fixture
def cluster() -> Generator[Any]:
    """Three nodes with a processor each."""
    for name, value in environment().items():
        os.environ[name] = value
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports] an extra

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def stored(out: Path) -> int:
    """Bytes of the largest table, in either of its places: more of them are more units."""
    for place in (out / "units", out):
        try:
            return (place / "attention.parquet").stat().st_size
        except OSError:
            continue
    return 0


def wait_for_more(out: Path, than: int, driver: subprocess.Popen[str]) -> int:
    """Wait until more is stored; how much it is then."""
    until = time.monotonic() + 300
    while (now := stored(out)) <= than:
        assert driver.poll() is None, "the study ended before it was disturbed"
        assert time.monotonic() < until, "nothing more was stored"
        time.sleep(0.02)
    return now


def workers() -> list[int]:
    """Processes that measure."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cmdline").read_bytes().startswith(b"ray::_Actor"):
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("study", [QUICK, ANSWERS], ids=["quick", "accuracy"])
def test_the_tables_do_not_depend_on_the_workers(
    study: tuple[str, ...], alone: dict[tuple[str, ...], dict[str, str]], cluster: Any, tmp_path: Path
) -> None:
    said = {
        where: run(study, tmp_path / str(at), "--workers", where, "--worker-threads", "1")
        for at, where in enumerate(["1", "2", cluster.address])
    }
    for at, where in enumerate(said):
        assert digests(tmp_path / str(at)) == alone[study], where
    assert "workers: 3 processes with 1 threads each" in said[cluster.address]


def test_nodes_and_workers_that_die_hang_or_come_change_nothing(
    alone: dict[tuple[str, ...], dict[str, str]], cluster: Any, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    more = ("--workers", cluster.address, "--worker-threads", "1", "--worker-limit", "30")
    driver = subprocess.Popen(command(QUICK, out, *more), env=environment(), stderr=subprocess.PIPE, text=True)
    now = wait_for_more(out, 0, driver)
    cluster.remove_node(sorted(cluster.worker_nodes, key=id)[0], allow_graceful=False)
    cluster.add_node(num_cpus=1)
    now = wait_for_more(out, now, driver)
    os.kill(workers()[0], signal.SIGKILL)
    wait_for_more(out, now, driver)
    stopped = workers()[0]
    os.kill(stopped, signal.SIGSTOP)
    _, said = driver.communicate(timeout=600)
    assert driver.returncode == 0, said[-3000:]
    assert digests(out) == alone[QUICK]
    assert said.count("is gone") >= 2


@pytest.mark.parametrize("moments", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_driver_loses_nothing(
    alone: dict[tuple[str, ...], dict[str, str]], cluster: Any, tmp_path: Path, moments: int
) -> None:
    out, rng = tmp_path / "r", random.Random(moments)
    more = ("--workers", cluster.address, "--worker-threads", "1")
    now = 0
    for _ in range(moments):
        driver = subprocess.Popen(command(QUICK, out, *more), env=environment(), stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 240
        while driver.poll() is None and stored(out) <= now and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        if driver.poll() is not None:
            break
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate()
        assert stored(out) >= now
        now = stored(out)
    run(QUICK, out, *more)
    assert digests(out) == alone[QUICK]


def test_workers_with_other_versions_are_refused_or_said(cluster: Any, tmp_path: Path) -> None:
    other = tmp_path / "other" / "scipy-99.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: scipy\nVersion: 99.0\n")
    path = os.pathsep.join([str(other.parent), os.environ.get("PYTHONPATH", "")])
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
    more = ("--workers", cluster.address, "--worker-threads", "1")
    # The first one to be ready may be any of them: the study is refused, or goes on without the one that differs.
    said = subprocess.run(
        command(QUICK, tmp_path / "first", *more), env=environment(), capture_output=True, text=True, timeout=900
    ).stderr
    assert "version of scipy" in said
    assert "--mixed" in said
    said = run(QUICK, tmp_path / "r", *more, "--mixed")
    assert "numbers depend on who measured a group" in said


def test_a_cluster_that_cannot_be_reached(tmp_path: Path) -> None:
    said = run(QUICK, tmp_path / "r", "--workers", "127.0.0.1:1", wanted=2)
    assert "no Ray cluster that takes this process at 127.0.0.1:1" in said
    assert not (tmp_path / "r").exists()


def test_study_json_names_the_workers(tmp_path: Path) -> None:
    run(("quick", "--model", "smollm2", "--limit", "2", "--layers", "1"), tmp_path / "r", "--workers", "1")
    about = json.loads((tmp_path / "r" / "study.json").read_text())
    assert [worker["device"] for worker in about["workers"]] == ["cpu"]
