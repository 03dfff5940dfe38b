"""What the driver does with its workers, with a stand-in for Ray that runs them in this process. `test_cluster.py` has the real one."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heard import Heard
from mless.errors import BadCluster
from mless.study import load_study, run_study
from mless.study.bench import Workers
from mless.study.worker import Described, Worker
from spelling import model_folder


class RayError(Exception): ...


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class Ref:
    found: Any = None
    fault: Exception | None = None


class Called:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *given: Any) -> Ref:
        try:
            return Ref(self._method(*given))
        except RayError as fault:
            return Ref(fault=fault)
        except Exception as fault:  # noqa: BLE001 whatever a worker raises comes back to the driver
            return Ref(fault=RayTaskError(fault))


class Handle:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Called:
        return Called(getattr(self._actor, name))


class StandIn:
    """Ray as far as mless uses it: every call is done at once, on one machine."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.ended = 0
        self.in_use = False
        self.needs: list[dict[str, Any]] = []

    def is_initialized(self) -> bool:
        return self.in_use

    def init(self, *_: Any, **__: Any) -> None: ...

    def shutdown(self) -> None:
        self.ended += 1

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "one", "Alive": True, "Resources": self.cluster_resources()}]

    def remote(self, kind: Any) -> Any:
        def options(**needs: Any) -> Any:
            self.needs.append(needs)
            return SimpleNamespace(remote=lambda *given: Handle(kind(*given)))

        return SimpleNamespace(options=options)

    def wait(self, refs: list[Ref], *, num_returns: int, timeout: float, fetch_local: bool) -> Any:
        assert not fetch_local, "results are to wait on the workers' machines"
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        if ref.fault is not None:
            raise ref.fault
        return ref.found

    def kill(self, actor: Handle) -> None: ...

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "one")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):  # a worker sets them for its process
        monkeypatch.setenv(name, "1" if name == "OMP_NUM_THREADS" else "PASSIVE")
    made = StandIn()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def run(
    tiny: Path, out: Path, where: str = "2", threads: int = 1, device: str = "auto", spread: bool = False, **asked: Any
) -> list[str]:
    """Run a small study by workers, two unless others are asked for; what was said."""
    given = {"limit": 3, "length": 5, "conditions": "none,mless", "prompt": "raw", "batch_size": 1, "device": device}
    given |= {"device_map": "auto"} if spread else {}
    told = Heard()
    run_study(load_study("quick", {"model": str(tiny), **given}), out, told, workers=Workers(where, threads, **asked))
    return told.lines


def second_differs(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The second worker that loads says something else of itself."""
    described: list[Described] = []
    describe = Worker.describe

    def other(self: Worker) -> Described:
        found = describe(self)
        described.append(found)
        if len(described) == 1:
            return found
        return replace(found, **{name: {**getattr(found, name), **more} for name, more in changes.items()})

    monkeypatch.setattr(Worker, "describe", other)


def test_the_study_is_measured_and_ray_is_ended(ray: StandIn, tiny: Path, tmp_path: Path) -> None:
    said = run(tiny, tmp_path / "r")
    assert "workers: 2 processes with 1 thread each" in said
    assert json.loads((tmp_path / "r" / "study.json").read_text())["complete"]
    assert ray.ended == 1


def test_other_weights_are_never_taken(
    ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_differs(monkeypatch, identity={"model's weights": "others"})
    with pytest.raises(BadCluster, match=r"it measures something else \(model's weights\)\. Give all workers the same"):
        run(tiny, tmp_path / "r", mixed=True)


def test_other_versions_are_refused(ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second_differs(monkeypatch, versions={"scipy": "99"})
    with pytest.raises(BadCluster, match=r"differs from the first one in version of scipy; .* or add --mixed"):
        run(tiny, tmp_path / "r")


def test_other_versions_are_taken_where_that_is_asked_for(
    ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_differs(monkeypatch, versions={"scipy": "99"})
    said = run(tiny, tmp_path / "mixed", mixed=True)
    assert any("version of scipy: numbers depend on who measured a group" in line for line in said)


def test_ray_that_somebody_else_uses_is_left_alone(ray: StandIn, tiny: Path, tmp_path: Path) -> None:
    ray.in_use = True
    with pytest.raises(BadCluster, match="this process uses Ray already"):
        run(tiny, tmp_path / "r")
    assert ray.ended == 0


def test_why_no_worker_could_begin_is_said(
    ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Worker) -> Described:
        raise RayError("the process was ended by signal 9")

    monkeypatch.setattr(Worker, "describe", dies)
    monkeypatch.setattr("mless.study.cluster._LOOK", 0.0)
    with pytest.raises(
        BadCluster,
        match=r"^no worker has begun: those that tried have failed; .*; worker \d+: the process was ended by signal 9$",
    ):
        run(tiny, tmp_path / "r")


def test_a_worker_that_never_begins_is_given_up(
    ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for the second one, and the first one dies: this must end."""
    pending = Ref()

    def wait(refs: list[Ref], *, num_returns: int, timeout: float, fetch_local: bool) -> Any:
        return [ref for ref in refs if ref is not pending][:num_returns], []

    measure = Called.remote

    def second_hangs(self: Called, *given: Any) -> Ref:
        name = self._method.__name__
        if name == "load" and len(ray.needs) > 1:
            return pending
        return Ref(fault=RayError("its machine is gone")) if name == "measure" else measure(self, *given)

    clock = iter(range(0, 10**9, 30))
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(Called, "remote", second_hangs)
    monkeypatch.setattr("mless.study.cluster.RayWorkers.now", lambda self: float(next(clock)))
    with pytest.raises(BadCluster, match=r"^(no worker for 300 s|group 1 of 6 has cost)"):
        run(tiny, tmp_path / "r", limit=600.0)


def test_workers_with_gpus_need_no_processors_of_their_own(
    ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may give a job fewer processors than GPUs."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0, "GPU": 2.0})
    said = run(tiny, tmp_path / "r")
    assert "workers: 2 GPUs" in said
    assert ray.needs == [{"num_gpus": 1, "num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}] * 2


@pytest.mark.parametrize("where", ["0", "x", "two words:1", "host:port"])
def test_what_names_no_workers_is_refused(where: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BadCluster, match=r"^--workers .*HOST:PORT"):
        run(tiny, tmp_path / "r", where)
    assert not (tmp_path / "r").exists()


def test_a_machine_too_small_for_a_worker_is_said(
    ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    needs = "it needs 4 processors of one machine, and the largest has"
    with pytest.raises(BadCluster, match=f"^there is no room for a worker: {needs} 2; --worker-threads 2 fits$"):
        run(tiny, tmp_path / "r", "head:6379", threads=4)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(BadCluster, match=f"{needs} 0; join a machine that gives Ray some"):
        run(tiny, tmp_path / "r", "head:6379", threads=4)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    with pytest.raises(BadCluster, match=r"it needs 2 GPUs of one machine, and the largest has 1; ask for fewer$"):
        run(tiny, tmp_path / "r", "head:6379", gpus=2, spread=True)


@pytest.mark.parametrize(
    ("gpus", "device", "why"), [(0.0, "auto", "there is none"), (1.0, "cpu", "--device cpu uses none")]
)
def test_gpus_that_no_worker_gets_are_refused(
    ray: StandIn, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: float, device: str, why: str
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": gpus})
    with pytest.raises(
        BadCluster, match=f"^--worker-gpus 1, but no worker gets a GPU: {why}; leave --worker-gpus out$"
    ):
        run(tiny, tmp_path / "r", device=device, gpus=1)
    assert ray.ended == 1
    assert not (tmp_path / "r").exists()
