"""Workers on this machine or on a cluster, by Ray.

The driver starts them, gives them the study, and learns from Ray when one is gone. No dashboard is started and no usage is reported; whoever
wants to join needs the cluster's token.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mless.errors import BadCluster, MlessError, first_line
from mless.guarded import usable_cores
from mless.study.bench import Job, Silent, Workers
from mless.study.identity import is_circumstance
from mless.study.shared import Sent, unlike
from mless.study.sharing import ANSWERS_AT_ONCE, Answered, Failed, Joined, Left, in_a_line
from mless.study.spec import StudySpec
from mless.study.worker import Described, Measured, Started

#: What every process of a study needs before it imports torch; the command sets the same.
_ENVIRONMENT = (
    "OMP_WAIT_POLICY",
    "MKL_DYNAMIC",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MLESS_CACHE",
    "MLESS_PLUGINS",
    "HF_HUB_OFFLINE",
)
#: Threads of a worker of a cluster, unless asked for.
_THREADS = 4
#: Seconds in which a cluster's head has to be reached.
_REACH = 10.0
#: Seconds between two looks at how many workers the cluster has room for.
_LOOK = 2.0


class _Actor:
    """What runs in a worker's process. The environment is set before anything imports torch."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._worker: Any = None

    def load(self, job: Job, threads: int) -> tuple[Described, str]:
        """What it has loaded, and the id of its machine."""
        import ray  # pyright: ignore[reportMissingImports] an extra

        from mless.study.worker import Worker

        self._worker = Worker(job, threads)
        return self._worker.describe(), ray.get_runtime_context().get_node_id()

    def start(self, stored: Mapping[str, Any] | None, resumed: bool, given: Mapping[str, Any]) -> Started:
        return self._worker.start(stored, resumed, given)

    def measure(self, keys: Sequence[str], width: int | None) -> Measured:
        return self._worker.measure(keys, width)


@dataclass
class _Known:
    """A worker: its actor, since when it loads or checks, and what it said of itself once it has loaded."""

    actor: Any
    since: float
    described: Described | None = None
    machine: str = ""
    joined: bool = False


@dataclass(frozen=True)
class _Asked:
    worker: str
    what: Literal["load", "start", "measure"]
    number: int = -1


class RayWorkers:
    """The workers of one study."""

    def __init__(self, job: Job, asked: Workers) -> None:
        self._job, self._say, self._asked = job, job.progress.say, asked
        _check_where(asked.where)
        self._each = _gpus_each(job.spec, asked)
        self._ray: Any = None
        self._refs: dict[Any, _Asked] = {}
        self._known: dict[str, _Known] = {}
        self._events: list[Joined | Left | Answered[Measured] | Failed] = []
        #: Set once one worker has checked the instrument: what the others start with.
        self._started: Started | None = None
        self._first: Described | None = None
        self._history: dict[str, dict[str, str]] = {}
        self._made = self._failed = 0
        self._looked = 0.0
        #: Workers that are not alike, by machine: there is no use in starting them again. And why the last one could not begin.
        self._unlike: Counter[str] = Counter()
        self._why = ""

    def _connect(self) -> None:
        ray = _ray()
        self._fixed = _connect(ray, self._asked.where, self._job.spec.device, self._each)
        self._ray = ray  # from here on it is ours, and `close` ends it
        self._last_words = _LastWords()
        self._here = ray.get_runtime_context().get_node_id()
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        self._on_gpus = gpus > 0 and self._job.spec.device != "cpu"
        if self._asked.gpus is not None and not self._on_gpus:
            why = "--device cpu uses none" if gpus else "there is none"
            raise BadCluster(
                f"--worker-gpus {self._asked.gpus}, but no worker gets a GPU: {why}; leave --worker-gpus out"
            )
        here = self._fixed is not None and not self._on_gpus
        threads = max(1, usable_cores() // (self._fixed or 1)) if here else _THREADS
        self._threads = self._asked.threads or threads
        self._sent = _to_send(self._job)
        self._say(f"workers: {self._in_words(self._wanted())}")

    def _in_words(self, count: int) -> str:
        if not self._on_gpus:
            threads = "1 thread" if self._threads == 1 else f"{self._threads} threads"
            return f"1 process with {threads}" if count == 1 else f"{count} processes with {threads} each"
        if self._each > 1:
            return f"1 with {self._each} GPUs" if count == 1 else f"{count} with {self._each} GPUs each"
        return "1 GPU" if count == 1 else f"{count} GPUs"

    # ---- who is there

    def _wanted(self) -> int:
        """How many workers there is room for. A worker's processors and GPUs are those of one machine."""
        if self._fixed is not None:
            return self._fixed - self._unlike.total()
        what, each = ("GPU", self._each) if self._on_gpus else ("CPU", self._threads)
        machines = [node for node in self._ray.nodes() if node["Alive"]]
        room = {node["NodeID"]: int(node["Resources"].get(what, 0)) // each for node in machines}
        return sum(max(0, count - self._unlike[name]) for name, count in room.items())

    def _top_up(self) -> None:
        """Start workers where there is room: at the begin, for one that is gone, and on machines that came later."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        self._check_here()
        wanted = self._wanted()
        # One that cannot load would be started for ever.
        for _ in range(min(wanted - len(self._known), 3 * wanted + 3 - self._failed)):
            self._made += 1
            name = str(self._made)
            # Processors are not what limits workers with GPUs.
            needs = {"num_gpus": self._each, "num_cpus": 0} if self._on_gpus else {"num_cpus": self._threads}
            if self._fixed is not None and not self._on_gpus:
                needs = {"num_cpus": 1}  # Ray was started for just so many
            # Threads that spin while they wait take the processors from the other workers.
            environment = {"OMP_WAIT_POLICY": "PASSIVE"}
            environment |= {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            if not self._on_gpus:
                environment["OMP_NUM_THREADS"] = str(self._threads)
            actor = self._ray.remote(_Actor).options(max_restarts=0, max_task_retries=0, **needs).remote(environment)
            self._known[name] = _Known(actor, self.now())
            self._refs[actor.load.remote(self._sent, self._threads)] = _Asked(name, "load")

    def _check_here(self) -> None:
        """Refuse to wait for workers whose answers could not be fetched: they come through Ray's process on this machine."""
        if not any(node["Alive"] for node in self._ray.nodes() if node["NodeID"] == self._here):
            raise BadCluster(
                "Ray on this machine is gone, and answers of workers come through it; start it again (ray start, or nothing where --workers is a number) "
                "and give the same command: what is stored stays"
            )

    def _lose(self, name: str, why: str) -> None:
        known = self._known.get(name)
        if known is None:
            return
        self.end(name)
        self._failed += not known.joined
        if known.joined:
            self._events.append(Left(name, why))
        else:
            self._why = f"; worker {name}: {why}"
            self._say(f"worker {name} is gone before it began ({why})")

    def _look(self, seconds: float) -> None:
        """Take what has come in."""
        self._end_late()
        self._top_up()
        if not self._refs:
            time.sleep(min(seconds, 0.2))
            return
        # Not fetched: what is not taken now stays on its worker's machine.
        ready, _ = self._ray.wait(list(self._refs), num_returns=1, timeout=seconds, fetch_local=False)
        if ready:
            ready, _ = self._ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=False)
        answers = 0
        for ref in ready:
            asked = self._refs.get(ref)
            if asked is None:  # its worker was lost in this very loop
                continue
            answers += asked.what == "measure"
            if asked.what != "measure" or answers <= ANSWERS_AT_ONCE:
                del self._refs[ref]
                self._take(ref, asked)

    def _end_late(self) -> None:
        """Give up those that load or check for too long, or for which there never was room."""
        for name, known in list(self._known.items()):
            if not known.joined and self.now() - known.since > self._asked.limit:
                self._lose(name, f"it has not begun within {self._asked.limit:g} s (--worker-limit)")

    def _take(self, ref: Any, asked: _Asked) -> None:
        faults = self._ray.exceptions
        try:
            found = self._ray.get(ref, timeout=self._asked.limit)
        except faults.RayTaskError as fault:
            self._refuse(asked, fault.cause if isinstance(fault.cause, Exception) else fault)
        except faults.RayError as fault:  # it is gone, or what it had found is lost with its machine
            self._lose(asked.worker, first_line(fault))
        else:
            self._answer(asked, found)

    def _refuse(self, asked: _Asked, fault: Exception) -> None:
        """A worker says that it cannot."""
        if asked.what == "measure":
            self._events.append(Failed(asked.worker, asked.number, fault))
            return
        if self._first is None or (self._started is None and asked.what == "start"):
            raise (
                fault
                if isinstance(fault, MlessError)
                else BadCluster(f"worker {asked.worker} could not begin: {first_line(fault)}")
            )
        self._lose(asked.worker, first_line(fault))

    def _answer(self, asked: _Asked, found: Any) -> None:
        known = self._known.get(asked.worker)
        if asked.what == "measure":
            if known is not None and known.described is not None:
                self._history[asked.worker] = {"where": known.described.where, "device": known.described.device}
            self._events.append(Answered(asked.worker, asked.number, found))
        elif known is None:
            return
        elif asked.what == "load":
            described, known.machine = found
            known.described = described
            if self._first is None:
                self._first = described
            elif not self._fits(asked.worker, _differences(self._first, described)):
                return
            if self._started is not None:
                self._begin(asked.worker)
        elif self._started is not None:
            if found.again is not None:
                self._lose(asked.worker, "out of memory where the first one was not")
            elif self._fits(asked.worker, unlike(self._started.identity, found.identity)):
                known.joined, self._failed = True, 0
                self._events.append(Joined(asked.worker))

    def _fits(self, name: str, differences: Sequence[str]) -> bool:
        """Refuse a worker whose numbers would be others, or say what it costs."""
        if not differences:
            return True
        where = self._known[name].described
        line = f"worker {name} ({where.where if where else 'unknown'}) differs from the first one in {', '.join(differences)}"
        other = [what for what in differences if not _is_taken_mixed(what)]
        if other or not self._asked.mixed:
            line += (
                f": it measures something else ({', '.join(other)}). Give all workers the same files"
                if other
                else "; its numbers would differ in their last digits. Use workers that are alike, or add --mixed and accept that"
            )
            if self._started is None or not any(known.joined for known in self._known.values()):
                raise BadCluster(line)
            # It came later: the others go on.
            self._unlike[self._known[name].machine] += 1
            self._lose(name, line)
            self._failed -= 1
            return False
        self._say(f"{line}: numbers depend on who measured a group, and the same command may give others (--mixed)")
        return True

    def _begin(self, name: str) -> None:
        """Let a worker check the instrument, with what the first one had found."""
        assert self._started is not None
        known = self._known[name]
        known.joined, known.since = False, self.now()
        given = self._started
        self._refs[known.actor.start.remote(dict(given.about), True, given.given)] = _Asked(name, "start")

    # ---- for the study

    def lead(self) -> Described:
        if self._ray is None:
            self._connect()
        until = time.monotonic() + self._asked.limit
        while self._first is None:
            self._look(1.0)
            self._check_somebody(until)
            self._show()
        return self._first

    def _show(self) -> None:
        self._job.progress.step("starting workers", 0, max(1, len(self._known)), in_a_line(self.coming()))

    def _check_somebody(self, until: float) -> None:
        if not self._known and self._looked:
            self._check_room()
            raise BadCluster(
                f"no worker has begun: those that tried have failed; is mless installed there, in the same version?{self._why}"
            )
        if time.monotonic() > until:
            raise BadCluster(
                f"no worker has begun within {self._asked.limit:g} s; is there room for one ({self._needs()})? More time: --worker-limit{self._why}"
            )

    def _check_room(self) -> None:
        """Refuse a cluster of which no machine is large enough for one worker, with what fits."""
        if self._fixed is not None:
            return  # Ray was started for just so many
        what, each = ("GPU", self._each) if self._on_gpus else ("CPU", self._threads)
        largest = max((int(node["Resources"].get(what, 0)) for node in self._ray.nodes() if node["Alive"]), default=0)
        if largest >= each:
            return
        if self._on_gpus:
            way = "ask for fewer"
        elif largest:
            way = f"--worker-threads {largest} fits"
        else:
            way = "join a machine that gives Ray some (ray start --num-cpus)"
        raise BadCluster(
            f"there is no room for a worker: it needs {self._needs()}, and the largest has {largest}; {way}"
        )

    def _needs(self) -> str:
        if self._on_gpus:
            return "a GPU" if self._each == 1 else f"{self._each} GPUs of one machine"
        if self._fixed is not None:
            return f"{self._threads} threads"
        return "a processor" if self._threads == 1 else f"{self._threads} processors of one machine"

    def start(self, stored: Mapping[str, Any] | None, given: Mapping[str, Any], *, resumed: bool) -> Started:
        # What was asked before belongs to a round that is over.
        self._started, self._events = None, []
        self._refs = {ref: asked for ref, asked in self._refs.items() if asked.what == "load"}
        for known in self._known.values():
            known.joined, known.since = False, self.now()
        until = time.monotonic() + self._asked.limit
        while True:
            name = next((name for name, known in self._known.items() if known.described is not None), None)
            self._show()
            if name is None:
                self._look(1.0)
                self._check_somebody(until)
                continue
            ref = self._known[name].actor.start.remote(stored, resumed, given)
            try:
                found: Started = self._ray.get(ref, timeout=self._asked.limit)
            except self._ray.exceptions.RayTaskError as fault:
                self._refuse(_Asked(name, "start"), fault.cause if isinstance(fault.cause, Exception) else fault)
            except self._ray.exceptions.RayError as fault:
                self._lose(name, first_line(fault))
            else:
                break
        if found.again is not None:
            return found
        self._started = found
        self._job.progress.step("starting workers", 1, 1)  # the next bar is the study's
        self._known[name].joined = True
        self._events.append(Joined(name))
        for other, known in self._known.items():
            if other != name and known.described is not None:
                self._begin(other)
        return found

    def ask(self, worker: str, number: int, task: Sent) -> None:
        known = self._known.get(worker)
        if known is not None:  # else it was lost a moment ago, and `Left` follows
            self._refs[known.actor.measure.remote(*task)] = _Asked(worker, "measure", number)

    def events(self, seconds: float) -> Sequence[Joined | Left | Answered[Measured] | Failed]:
        if not self._events:
            self._look(seconds)
        found, self._events = self._events, []
        return found

    def end(self, worker: str) -> None:
        known = self._known.get(worker)
        if known is not None:
            with suppress(Exception):
                self._ray.kill(known.actor)
        self._known.pop(worker, None)
        self._refs = {ref: asked for ref, asked in self._refs.items() if asked.worker != worker}
        self._looked = 0.0

    def coming(self) -> Mapping[str, str]:
        return {
            name: "loading" if known.described is None else "checking"
            for name, known in self._known.items()
            if not known.joined
        }

    def now(self) -> float:
        return time.monotonic()

    def known(self) -> list[dict[str, str]]:
        return list(self._history.values())

    def close(self) -> None:
        """End the workers; a cluster that others started stays."""
        if self._ray is None:
            return
        try:
            for name in list(self._known):
                self.end(name)
            self._ray.shutdown()
        finally:  # a fault of Ray's is said too
            self._last_words.unsaid()


class _LastWords:
    """A line on standard error in case this process ends without one. A shell waits for that beside us.

    Ray ends this process at once where its own one on this machine dies, and no code of ours runs then.
    """

    _LINE = "mless ended without a word of its own: it was killed, or Ray on this machine is gone. What is stored stays; the same command goes on"
    _SCRIPT = 'trap "" INT TERM HUP; read -r ended || printf "%s\\n" "$1" >&2'

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no shell: then nothing is said
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", self._SCRIPT, "sh", self._LINE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def unsaid(self) -> None:
        """All is well, or the reason was said."""
        if self._shell is not None:
            with suppress(OSError):
                self._shell.communicate(b"ended\n")


def _check_where(workers: str) -> None:
    if workers.isdigit() and not int(workers):
        raise BadCluster(
            "--workers 0 leaves nobody to measure; give a number from 1 on, auto, or a cluster's HOST:PORT"
        )
    if not re.fullmatch(r"auto|\d+|[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+", workers):
        raise BadCluster(f"--workers {workers!r} is no number, not auto, and no HOST:PORT of a Ray cluster's head")


def _gpus_each(spec: StudySpec, asked: Workers) -> int:
    """GPUs of each worker: one, as many as vLLM divides a layer among, or as many as were asked for a model that is spread."""
    table, divided = (spec.asks[0], spec.asks[1].tensor_parallel) if spec.asks is not None else ("", None)
    each = asked.gpus or divided or 1
    if divided is not None and each != divided:
        raise BadCluster(
            f"--worker-gpus {each}, but {table}.tensor_parallel = {divided} divides each layer among {divided}; leave --worker-gpus out"
        )
    if each > 1 and divided is None and spec.device_map is None:
        raise BadCluster(
            f"--worker-gpus {each}, but a model lies on one GPU unless it is spread; add --device-map auto, or leave --worker-gpus out"
        )
    return each


def _to_send(job: Job) -> Job:
    """The study as it is sent: what lies on this machine by its whole path, and items that are read already."""
    from mless.models import EMBEDDED

    spec = job.spec
    changes = {
        name: os.path.abspath(Path(value).expanduser())  # links are kept: a model is known by its name
        for name in ("model", "tokenizer")
        if isinstance(value := getattr(spec, name), str) and value not in EMBEDDED and Path(value).expanduser().exists()
    }
    return replace(
        job, spec=spec.model_copy(update=changes), out=None, progress=Silent(), items=job.items or spec.load_items()
    )


_COMPUTES = "what it computes with"


def _differences(first: Described, other: Described) -> list[str]:
    found = unlike(first.identity, other.identity)
    if first.hardware != other.hardware:
        found.append(f"{_COMPUTES} ({other.hardware}, and not {first.hardware})")
    return found + [f"version of {name}" for name in unlike(first.versions, other.versions)]


def _is_taken_mixed(what: str) -> bool:
    """Whether workers that differ in this measure the same thing, but for last digits."""
    return is_circumstance(what) or what.startswith(("version of ", _COMPUTES))


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A thread of Ray's prints a paragraph on standard output for each worker that dies, even with log_to_driver off. A line of ours says it.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray  # pyright: ignore[reportMissingImports] an extra
    except ImportError:
        raise BadCluster("--workers needs Ray: pip install 'mless[ray]'") from None
    return ray


def _connect(ray: Any, workers: str, device: str, each: int) -> int | None:
    """Start Ray here for so many workers, or join a cluster; how many workers were asked for, None for as many as the cluster has room for."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if ray.is_initialized():
        raise BadCluster(
            "this process uses Ray already; call ray.shutdown() first, or run mless in a process of its own"
        )
    if device.startswith("cuda:"):
        raise BadCluster(
            f"--device {device} names one GPU, but a worker is given one by Ray; use --device cuda, or leave --workers out"
        )
    if workers == "auto" or workers.isdigit():
        import torch

        gpus = 0 if device == "cpu" else torch.cuda.device_count()
        if gpus and each > gpus:
            raise BadCluster(f"a worker is to have {each} GPUs, but this machine has {gpus}; ask for fewer")
        count = int(workers) if workers.isdigit() else gpus // each or max(1, usable_cores() // _THREADS)
        if gpus and count * each > gpus:
            needed = "one" if each == 1 else str(each)
            raise BadCluster(
                f"--workers {count}, but this machine has {gpus} GPUs, and each worker needs {needed}; or add --device cpu"
            )
        try:
            # "local": never one that runs on this machine already.
            ray.init("local", num_cpus=count, num_gpus=gpus, include_dashboard=False, **quiet)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as fault:
            raise BadCluster(f"Ray does not start here: {first_line(fault)}; `ray start --head` may say more") from None
        return count
    host, port = workers.rsplit(":", 1)
    try:
        # Ray itself would try for minutes.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH).close()
        ray.init(address=workers, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as fault:
        raise BadCluster(
            f"no Ray cluster that takes this process at {workers}: {first_line(fault)}; is its head running (ray start --head), has this machine joined "
            "it (ray start --address), and is the token the same (docs/cluster.md)?"
        ) from None
    return None
