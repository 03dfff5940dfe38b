"""Studies by real workers: a Ray cluster of three nodes on this machine, whose workers, nodes and driver are killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spelling import model_folder

pytestmark = pytest.mark.ray
#: One prompt in a group, so that there are many groups.
QUICK = ("quick", "--model", "smollm2", "--limit", "6", "--layers", "1-12", "--set", "batch_size=1")
SMALL = ("quick", "--model", "smollm2", "--limit", "2", "--layers", "1-2", "--set", "batch_size=1")
TUNE = ("tune", "--data", "arithmetic:1:8", "--c", "0.05", "--p1", "95", "--method", "grid", "--max-new-tokens", "2")
ANSWERS = ("accuracy", "--model", "smollm2", "--data", "arithmetic:1:6", "--max-new-tokens", "8")
#: With solutions, so that a group needs the states of another: distributions are compared with those of `none`.
LIKELIHOOD = ("likelihood", "--model", "smollm2", "--data", str(Path(__file__).with_name("sums.jsonl")),
              "--conditions", "none,mless,position-only,arm", "--set", "likelihood.others=2")  # fmt: skip


def environment(threads: int = 1) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


def command(study: Sequence[str], out: Path, *more: str) -> list[str]:
    what = ("run", *study) if study[0] != "tune" else study
    return [sys.executable, "-m", "mless", *what, "--out", str(out), *more]


def run(study: Sequence[str], out: Path, *more: str, wanted: int = 0, threads: int = 1) -> str:
    """What a whole run writes on standard error."""
    made = command(study, out, *more)
    done = subprocess.run(made, env=environment(threads), capture_output=True, text=True, timeout=900)
    assert done.returncode == wanted, done.stderr[-3000:]
    return done.stderr


def digests(folder: Path) -> dict[str, str]:
    """Of all tables, those of inner studies too."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.parquet"))
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, str]]:
    """The tables of studies that one process measured."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for study in (QUICK, ANSWERS, LIKELIHOOD):
        out = tmp_path_factory.mktemp("alone") / "r"
        run(study, out)
        found[study] = digests(out)
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """Three nodes with a processor each."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    # A cluster takes a token and makes none; a file of this user's may not be there.
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-token-of-these-tests")
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


def children(process: int) -> list[int]:
    """All processes below this one. Others on this machine may use Ray as well."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = list[int](), [process]
    while new := [one for one, parent in parents.items() if parent in new]:
        found += new
    return found


def is_running(process: int) -> bool:
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers() -> list[int]:
    """Processes that measure."""
    found: list[int] = []
    for process in children(os.getpid()):
        with suppress(OSError):
            if (Path("/proc") / str(process) / "cmdline").read_bytes().startswith(b"ray::_Actor"):
                found.append(process)
    return found


@pytest.mark.parametrize("study", [QUICK, ANSWERS, LIKELIHOOD], ids=["quick", "accuracy", "likelihood"])
def test_the_tables_do_not_depend_on_the_workers(
    study: tuple[str, ...], alone: dict[tuple[str, ...], dict[str, str]], cluster: Any, tmp_path: Path
) -> None:
    said = {
        where: run(study, tmp_path / str(at), "--workers", where, "--worker-threads", "1")
        for at, where in enumerate(["1", "2", cluster.address])
    }
    for at, where in enumerate(said):
        assert digests(tmp_path / str(at)) == alone[study], where
    assert "workers: 3 processes with 1 thread each" in said[cluster.address]


@pytest.mark.parametrize(
    "study",
    [
        ("multiverse", "--set", "multiverse.template=chat,raw", "--set", "multiverse.system=study"),
        ("dose", "--set", "dose.most=8", "--set", "dose.points=3", "--set", "dose.placements=before-question"),
        ("placebo", "--set", "placebo.edits=2"),
    ],
    ids=lambda study: study[0],
)
def test_studies_of_studies_do_not_depend_on_the_workers(study: tuple[str, ...], tmp_path: Path) -> None:
    sums = Path(__file__).with_name("sums.jsonl")
    whole = (*study, "--model", "smollm2", "--data", str(sums), "--set", "likelihood.others=2")
    run(whole, tmp_path / "alone")
    said = run(whole, tmp_path / "two", "--workers", "2", "--worker-threads", "1")
    assert "workers: 2 processes with 1 thread each" in said
    assert digests(tmp_path / "two") == digests(tmp_path / "alone")


def test_patched_rows_run_side_by_side_in_workers_too(tmp_path: Path) -> None:
    # With two threads two rows run at a time, here and in each worker; patched rows are grouped otherwise there.
    sums = Path(__file__).with_name("sums.jsonl")
    sets = ("cause.of=ladder,map", "cause.every=15", "cause.parts=residual,keys-values", "likelihood.others=2")
    whole = ("cause", "--model", "smollm2", "--data", str(sums), *(word for one in sets for word in ("--set", one)))
    run(whole, tmp_path / "alone", threads=2)
    said = run(whole, tmp_path / "two", "--workers", "2", "--worker-threads", "2", threads=2)
    assert "workers: 2 processes with 2 threads each" in said
    found: list[int] = []
    for where in ("alone", "two"):
        proofs = json.loads((tmp_path / where / "likelihood" / "study.json").read_text())["proofs"]
        found.append(proofs["rows side by side"])
    assert found[0] == found[1]
    if found == [1, 1]:
        pytest.skip("rows do not run side by side on this machine")
    assert digests(tmp_path / "two") == digests(tmp_path / "alone")


def test_nodes_and_workers_that_die_hang_or_come_change_nothing(
    alone: dict[tuple[str, ...], dict[str, str]], cluster: Any, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    more = ("--workers", cluster.address, "--worker-threads", "1", "--worker-limit", "90")
    driver = subprocess.Popen(
        command(QUICK, out, *more), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    now = wait_for_more(out, 0, driver)
    cluster.remove_node(sorted(cluster.worker_nodes, key=id)[0], allow_graceful=False)
    cluster.add_node(num_cpus=1)
    now = wait_for_more(out, now, driver)
    os.kill(workers()[0], signal.SIGKILL)
    wait_for_more(out, now, driver)
    stopped = workers()[0]
    os.kill(stopped, signal.SIGSTOP)
    printed, said = driver.communicate(timeout=600)
    assert driver.returncode == 0, said[-3000:]
    assert digests(out) == alone[QUICK]
    assert said.count("is gone") >= 2
    assert "raylet" not in printed + said  # what Ray itself prints of it


@pytest.mark.parametrize("moments", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_driver_loses_nothing(
    alone: dict[tuple[str, ...], dict[str, str]], cluster: Any, tmp_path: Path, moments: int
) -> None:
    """At random moments: while it starts, while it measures, while it makes its tables."""
    out, rng = tmp_path / "r", random.Random(moments)
    more = ("--workers", cluster.address, "--worker-threads", "1")
    began = time.monotonic()
    run(QUICK, out, *more)
    whole = time.monotonic() - began
    killed = 0
    while killed < moments:
        if (out / "study.json").exists() and json.loads((out / "study.json").read_text())["complete"]:
            assert digests(out) == alone[QUICK]
            shutil.rmtree(out)
        driver = subprocess.Popen(
            command(QUICK, out, *more), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Half of them once something is stored: the start takes most of a run's time.
        until, before = time.monotonic() + rng.random() * whole, stored(out)
        while killed % 2 and driver.poll() is None and stored(out) <= before and time.monotonic() < until + 60:
            time.sleep(0.01)
        time.sleep(rng.random() * whole / 10 if killed % 2 else max(0.0, until - time.monotonic()))
        now = stored(out)
        killed += driver.poll() is None
        driver.kill()
        driver.wait()
        assert stored(out) >= now
    run(QUICK, out, *more)
    assert digests(out) == alone[QUICK]


@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "only the command"])
def test_an_interrupted_command_leaves_no_process_and_what_was_stored(
    alone: dict[tuple[str, ...], dict[str, str]], tmp_path: Path, whole_group: bool
) -> None:
    out, more = tmp_path / "r", ("--workers", "2", "--worker-threads", "1")
    # A shell that starts pytest in the background has it ignore interrupts, and what it starts would inherit that.
    driver = subprocess.Popen(
        command(QUICK, out, *more), env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    now = wait_for_more(out, 0, driver)
    started = children(driver.pid)
    # A terminal interrupts the command and everything it started.
    (os.killpg if whole_group else os.kill)(driver.pid, signal.SIGINT)
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == 130, said[-3000:]
    assert said.splitlines()[-1] == "mless: interrupted; what is stored stays, the same command goes on from there"
    assert len(started) > 4  # Ray's own and two workers
    until = time.monotonic() + 60
    while left := [process for process in started if is_running(process)]:
        assert time.monotonic() < until, f"these were left: {left}"
        time.sleep(0.1)
    assert stored(out) >= now
    run(QUICK, out, *more)
    assert digests(out) == alone[QUICK]


@pytest.mark.parametrize("name", ["raylet", "ray::DashboardAgent"])
def test_without_ray_on_this_machine_the_command_says_so_and_goes_on_later(
    alone: dict[tuple[str, ...], dict[str, str]], tmp_path: Path, name: str
) -> None:
    """Without its agent Ray ends its own process in good order; that process killed ends the command itself."""
    out, more = tmp_path / "r", ("--workers", "2", "--worker-threads", "1")
    driver = subprocess.Popen(command(QUICK, out, *more), env=environment(), stderr=subprocess.PIPE, text=True)
    now = wait_for_more(out, 0, driver)
    named = [process for process in children(driver.pid) if is_named(process, name)]
    assert len(named) == 1
    os.kill(named[0], signal.SIGKILL)
    _, said = driver.communicate(timeout=300)
    assert driver.returncode not in (0, 130), said[-3000:]
    assert "Ray on this machine is gone" in said
    assert "same command" in said
    assert stored(out) >= now
    run(QUICK, out, *more)
    assert digests(out) == alone[QUICK]


def is_named(process: int, name: str) -> bool:
    try:
        first = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return False
    return first.rpartition("/")[2].startswith(name)


#: Runs a small study whose first worker is killed once it has loaded.
_DIES_EARLY = r"""
import os, re, signal, sys
from pathlib import Path
from mless.study import load_study, measuring
from mless.study.bench import Job, Workers
from mless.study.cluster import RayWorkers
from mless.study.kinds import measurement_of
from mless.study.shared import shared_out
from heard import Heard

class Dying(RayWorkers):
    def lead(self):
        found = super().lead()
        os.kill(int(re.search(r"process (\d+)", found.where)[1]), signal.SIGKILL)
        return found

told, asked = Heard(), Workers("2", threads=1)
job = Job(load_study("quick", {"model": "smollm2", "limit": 2, "layers": "1-2", "batch_size": 1}), Path(sys.argv[1]), told)
workers = Dying(job, asked)
try:
    measuring.run(shared_out(measurement_of(job.spec), workers, asked), job)
finally:
    workers.close()
print(*told.lines, sep="\n")
"""


def test_a_worker_that_dies_between_loading_and_starting(tmp_path: Path) -> None:
    run(SMALL, tmp_path / "alone")
    done = subprocess.run(
        [sys.executable, "-c", _DIES_EARLY, str(tmp_path / "r")],
        env=environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "worker 1 is gone before it began" in done.stdout or "worker 2 is gone before it began" in done.stdout
    assert digests(tmp_path / "r") == digests(tmp_path / "alone")


def test_tuning_by_workers_chooses_the_same(tmp_path: Path) -> None:
    study = (*TUNE, "--model", str(model_folder(tmp_path / "tiny")), "--prompt", "raw", "--set", "accuracy.slots=4")
    run(study, tmp_path / "alone")
    run(study, tmp_path / "r", "--workers", "2", "--worker-threads", "1")
    assert len(digests(tmp_path / "alone")) > 4
    assert digests(tmp_path / "r") == digests(tmp_path / "alone")


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


def test_clocks_that_differ_change_nothing(
    alone: dict[tuple[str, ...], dict[str, str]], cluster: Any, tmp_path: Path
) -> None:
    """A machine whose clock is a day ahead, and one whose clock is a day behind."""
    for at, hours in enumerate((24, -24)):
        place = tmp_path / f"clock{at}"
        place.mkdir()
        shifted = f"import time\n_before = time.time\ntime.time = lambda: _before() + {3600 * hours}\n"
        (place / "sitecustomize.py").write_text(shifted + "print('shifted', file=open(__file__ + '.used', 'w'))\n")
        path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
    said = run(QUICK, tmp_path / "r", "--workers", cluster.address, "--worker-threads", "1", "--worker-limit", "120")
    assert "workers: 5 processes" in said
    assert "is gone" not in said
    assert digests(tmp_path / "r") == alone[QUICK]
    assert all((tmp_path / f"clock{at}" / "sitecustomize.py.used").exists() for at in range(2))


def test_a_model_that_is_spread_in_every_worker(cluster: Any, tmp_path: Path) -> None:
    """Two workers with two GPUs each, as far as Ray knows; the model's layers lie in memory and on disk."""
    cluster.add_node(num_cpus=2, num_gpus=4)
    study = ("quick", "--model", "smollm2", "--limit", "2", "--layers", "1-4", "--set", "batch_size=1")
    study = (*study, "--device-map", "auto", "--device-memory", "cpu=150MB,disk")
    run(study, tmp_path / "alone")
    said = run(study, tmp_path / "r", "--workers", cluster.address, "--worker-gpus", "2", "--worker-threads", "1")
    assert "workers: 2 with 2 GPUs each" in said
    assert digests(tmp_path / "r") == digests(tmp_path / "alone")
    placed = json.loads((tmp_path / "r" / "study.json").read_text())["device"]["placed"]
    assert "disk" in placed


def test_a_cluster_that_cannot_be_reached(tmp_path: Path) -> None:
    said = run(QUICK, tmp_path / "r", "--workers", "127.0.0.1:1", wanted=2)
    assert "no Ray cluster that takes this process at 127.0.0.1:1" in said
    assert not (tmp_path / "r").exists()


def test_study_json_names_the_workers(tmp_path: Path) -> None:
    run(("quick", "--model", "smollm2", "--limit", "2", "--layers", "1"), tmp_path / "r", "--workers", "1")
    about = json.loads((tmp_path / "r" / "study.json").read_text())
    assert [worker["device"] for worker in about["workers"]] == ["cpu"]
