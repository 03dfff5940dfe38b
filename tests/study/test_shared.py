"""A study by real workers in this process, without Ray: the same bytes, whoever dies or answers twice."""

from __future__ import annotations

import errno
import functools
import json
import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from heard import Heard
from mless import capture
from mless.errors import BadFolder, BadStudy
from mless.study import load_study, measuring, run_study
from mless.study.bench import Composed, Job, Measurement, Silent, Workers
from mless.study.kinds import MEASUREMENTS, measurement_of
from mless.study.shared import Sent, Shared, shared_out
from mless.study.sharing import Answered, Failed, Joined, Left
from mless.study.worker import Described, Measured, Started, Worker
from spelling import model_folder

STUDIES: dict[str, dict[str, Any]] = {
    "quick": {"limit": 3, "length": 5, "conditions": "none,mless", "prompt": "raw", "batch_size": 1},
    "activations": {"limit": 3, "length": 5, "prompt": "raw", "batch_size": 1},
    "affine": {"limit": 3, "length": 5, "prompt": "raw"},
    "likelihood": {"limit": 4, "length": 5, "conditions": "none,mless,arm", "data": "arithmetic:1:4", "prompt": "raw"},
    "accuracy": {"limit": 4, "length": 5, "conditions": "none,mless", "data": "arithmetic:1:4", "prompt": "raw"},
}


class InThisProcess:
    """Two workers. The second one dies after so many answers, and every answer comes twice; all of it travels as bytes."""

    def __init__(self, job: Job, dies_after: int = 2) -> None:
        self._workers = {name: Worker(pickle.loads(pickle.dumps(replace(job, progress=Silent()))), 1) for name in "ab"}
        self._left = dies_after
        self._events: list[Any] = []

    def lead(self) -> Described:
        return self._workers["a"].describe()

    def start(self, stored: Mapping[str, Any] | None, given: Mapping[str, Any], *, resumed: bool) -> Started:
        found = self._workers["a"].start(stored, resumed, given)
        if found.again is not None:
            return found
        assert self._workers["b"].start(dict(found.about), True, found.given).identity == found.identity
        self._events = [Joined("a"), Joined("b")]
        return found

    def ask(self, worker: str, number: int, task: Sent) -> None:
        if worker == "b":
            self._left -= 1
            if self._left < 0:
                self._events.append(Left("b", "killed"))
                return
        found = pickle.loads(pickle.dumps(self._workers[worker].measure(*task)))
        self._events += [Answered(worker, number, found)] * 2

    def events(self, seconds: float) -> Sequence[Joined | Left | Answered[Measured] | Failed]:
        found, self._events = self._events, []
        return found

    def end(self, worker: str) -> None:
        raise AssertionError("nobody hangs")

    def now(self) -> float:
        return 0.0

    def coming(self) -> dict[str, str]:
        return {}

    def known(self) -> list[dict[str, str]]:
        return [{"where": name} for name in "ab"]

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def spec_of(name: str, tiny: Path, **changes: Any) -> Any:
    more = {"accuracy.max_new_tokens": 4} if name == "accuracy" else {}
    return load_study(name, {"model": str(tiny), **STUDIES[name], **more, **changes})


def shared(name: str, tiny: Path, out: Path, crew: type[InThisProcess] = InThisProcess, **changes: Any) -> list[str]:
    """Run a study by workers; what was said."""
    told = Heard()
    job = Job(spec_of(name, tiny, **changes), out, told)
    measuring.run(shared_out(measurement_of(job.spec), crew(job), Workers("2")), job)
    return told.lines


def tables(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.parquet"))}


def identity(folder: Path) -> dict[str, str]:
    return json.loads((folder / "study.json").read_text())["identity"]


@pytest.mark.parametrize("name", STUDIES)
def test_the_tables_are_those_of_one_process(name: str, tiny: Path, tmp_path: Path) -> None:
    run_study(spec_of(name, tiny), tmp_path / "alone")
    shared(name, tiny, tmp_path / "shared")
    assert tables(tmp_path / "shared") == tables(tmp_path / "alone")
    assert identity(tmp_path / "shared") == identity(tmp_path / "alone")
    about = [json.loads((tmp_path / where / "study.json").read_text()) for where in ("shared", "alone")]
    assert about[0].pop("workers") == [{"where": "a"}, {"where": "b"}]
    for one in about:
        for field in ("command", "timings", "sha256"):
            one.pop(field)
    assert about[0] == about[1]


def test_one_goes_on_where_the_others_were_killed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared("quick", tiny, tmp_path / "whole")

    def killed(self: InThisProcess, seconds: float) -> Any:
        found = events(self, seconds)
        if any(isinstance(one, Answered) and one.number == 5 for one in found):
            raise KeyboardInterrupt
        return found

    events = InThisProcess.events
    with monkeypatch.context() as scope:
        scope.setattr(InThisProcess, "events", killed)
        with pytest.raises(KeyboardInterrupt):
            shared("quick", tiny, tmp_path / "r")
    shutil.copytree(tmp_path / "r", tmp_path / "again")
    assert run_study(spec_of("quick", tiny), tmp_path / "r").computed < 6
    assert tables(tmp_path / "r") == tables(tmp_path / "whole")
    shared("quick", tiny, tmp_path / "again")
    assert tables(tmp_path / "again") == tables(tmp_path / "whole")


def test_study_json_names_a_worker_before_its_units_are_stored(tiny: Path, tmp_path: Path) -> None:
    """The driver is killed; another run, with other workers, must know of these."""

    class Killed(InThisProcess):
        answered: ClassVar[dict[str, None]] = {}

        def events(self, seconds: float) -> Any:
            if len(self.answered) == 2:
                raise KeyboardInterrupt
            found = super().events(seconds)
            self.answered.update(dict.fromkeys(one.worker for one in found if isinstance(one, Answered)))
            return found

        def known(self) -> list[dict[str, str]]:
            return [{"where": name} for name in self.answered]

    with pytest.raises(KeyboardInterrupt):
        shared("quick", tiny, tmp_path / "r", Killed)
    about = json.loads((tmp_path / "r" / "study.json").read_text())
    assert about["workers"] == [{"where": "a"}, {"where": "b"}]


def test_a_worker_out_of_memory_runs_its_group_in_halves(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = capture.received_later

    def little_memory(model: Any, prompts: Any, **named: Any) -> Any:
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return run(model, prompts, **named)

    monkeypatch.setattr(capture, "received_later", little_memory)
    said = shared("quick", tiny, tmp_path / "shared", batch_size=3)
    assert (
        sum(line.startswith("out of memory with 3 prompts at once: this group runs in halves.") for line in said) == 2
    )
    assert json.loads((tmp_path / "shared" / "study.json").read_text())["groups_halved"] == 2
    run_study(spec_of("quick", tiny, batch_size=3), tmp_path / "alone")
    assert tables(tmp_path / "shared") == tables(tmp_path / "alone")


def test_a_full_disk_loses_only_what_was_under_way(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared("quick", tiny, tmp_path / "whole")
    sync, left = os.fsync, [6]

    def full(file: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    with monkeypatch.context() as scope:
        scope.setattr(os, "fsync", full)
        with pytest.raises(BadFolder, match="No space left on device; fix that and run the same command again"):
            shared("quick", tiny, tmp_path / "r")
    assert not json.loads((tmp_path / "r" / "study.json").read_text())["complete"]
    shared("quick", tiny, tmp_path / "r")
    assert tables(tmp_path / "r") == tables(tmp_path / "whole")


def test_an_idle_worker_takes_over_what_a_slow_one_has(tiny: Path, tmp_path: Path) -> None:
    class Slow(InThisProcess):
        """The second worker takes two groups and never answers."""

        given: ClassVar[list[tuple[str, int]]] = []

        def ask(self, worker: str, number: int, task: Sent) -> None:
            self.given.append((worker, number))
            if worker == "a":
                super().ask(worker, number, task)

    run_study(spec_of("quick", tiny), tmp_path / "alone")
    shared("quick", tiny, tmp_path / "shared", Slow)
    assert tables(tmp_path / "shared") == tables(tmp_path / "alone")
    stuck = {number for worker, number in Slow.given if worker == "b"}
    assert len(stuck) == 2
    assert stuck <= {number for worker, number in Slow.given if worker == "a"}


@pytest.mark.parametrize("answers", [0, 1], ids=["as it starts", "as it measures"])
def test_workers_that_run_out_of_memory_all_start_again_with_fewer_slots(
    answers: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {"data": "arithmetic:1:12", "limit": 12}
    run_study(spec_of("accuracy", tiny, **many, **{"accuracy.slots": 4}), tmp_path / "alone")
    measured = 0

    class Short(InThisProcess):
        """Memory runs out once so many groups have been answered."""

        def ask(self, worker: str, number: int, task: Sent) -> None:
            nonlocal measured
            super().ask(worker, number, task)
            measured += 1

    real = LlamaForCausalLM.forward
    refused: list[int] = []

    @functools.wraps(real)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = kwargs["input_ids"].shape[0]
        if rows > 4 and measured >= answers:
            refused.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    said = shared("accuracy", tiny, tmp_path / "shared", Short, **many, **{"accuracy.slots": 8})
    assert set(refused) == {8}
    assert [line for line in said if line.startswith("out of memory with 8 slots: going on with 4; ")]
    assert tables(tmp_path / "shared") == tables(tmp_path / "alone")
    assert identity(tmp_path / "shared") == identity(tmp_path / "alone")


def test_answers_of_a_server_are_not_shared_out(tmp_path: Path) -> None:
    spec = load_study(
        "accuracy",
        {
            "model": "served",
            "data": "arithmetic:1:4",
            "accuracy.engine": "openai",
            "accuracy.base_url": "http://127.0.0.1:1/v1",
        },
    )
    with pytest.raises(BadStudy, match="--workers"):
        run_study(spec, tmp_path / "r", workers=Workers("2"))


@pytest.mark.parametrize("name", [name for name in MEASUREMENTS if not issubclass(MEASUREMENTS.get(name), Composed)])
def test_no_measurement_uses_names_of_the_shared_one(name: str) -> None:
    """The two become one class, so what one keeps must not replace what the other does."""
    kind, study = MEASUREMENTS.get(name), {"attention": "quick"}.get(name, name)
    own = {*vars(kind(load_study(study))), *vars(kind)} - set(dir(Measurement))
    assert not own & ({*vars(Shared), *Shared.__annotations__} - set(dir(Measurement)))
