"""One of several workers of a study: it has the model, and measures the groups it is given. It stores nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mless import __version__
from mless.results.storing import made
from mless.study.bench import Group, Job, StartAgain
from mless.study.halving import measured
from mless.study.identity import versions
from mless.study.kinds import measurement_of
from mless.study.measuring import opened
from mless.study.rendering import write_prompts


@dataclass(frozen=True)
class Described:
    """What a worker has loaded, to be compared with the others'."""

    where: str
    identity: Mapping[str, str]
    versions: Mapping[str, Any]
    device: str
    #: What computes: a processor with its threads, or a GPU by its name.
    hardware: str
    model: Mapping[str, str | None]


@dataclass(frozen=True)
class Started:
    """What a worker's checks found: more of the study's identity, and what study.json says of the instrument."""

    identity: Mapping[str, str]
    about: Mapping[str, Any]
    said: list[str]
    #: What the others take over, and, where it must start again, with what.
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    again: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Measured:
    """A group's tables by unit, what computed them, and what has to be said."""

    units: list[tuple[str, Mapping[str, Any]]]
    implementations: Mapping[str, str | list[str]]
    halved: list[str] = field(default_factory=list[str])
    said: list[str] = field(default_factory=list[str])
    #: Set where nothing can be kept: what all workers have to start again with.
    again: Mapping[str, Any] | None = None


def of_all() -> dict[str, str]:
    """Versions that must agree."""
    return versions() | {"mless": __version__}


class _Lines:
    """Keeps what is said, for the driver to say."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def step(self, what: str, done: int, total: int, workers: str = "") -> None: ...

    def checked(self) -> None: ...

    def taken(self) -> list[str]:
        said, self.said = self.said, []
        return said


class Worker:
    """A study's model in a process of its own."""

    def __init__(self, job: Job, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._lines = _Lines()
        # It writes nothing, so its folder does not exist.
        job = replace(job, out=Path(os.devnull) / "none", progress=self._lines, workers=None)
        self._measurement = measurement = measurement_of(job.spec)
        self._bench, identity = opened(measurement, job)
        subject = self._bench.subject
        assert subject is not None
        measurement.load(subject, self._bench.layers, self._lines)
        self._bench.prompts = write_prompts(measurement, self._bench, subject).prompts
        measurement.prepare(self._bench)
        self._identity = identity | measurement.identity_loaded(self._bench)
        self._units = {unit.key: unit for unit in self._bench.units()}

    def describe(self) -> Described:
        bench = self._bench
        assert bench.subject is not None
        model = {name: bench.subject.known(name) for name in ("fingerprint", "tokenizer_fingerprint")}
        device, hardware = _computes(bench.model.device if bench.has_model else None)
        return Described(f"{platform.node()}, process {os.getpid()}", self._identity, of_all(), device, hardware, model)

    def start(self, stored: Mapping[str, Any] | None, resumed: bool, given: Mapping[str, Any]) -> Started:
        """Check the instrument. A worker may be asked again, with other settings."""
        measurement, bench = self._measurement, self._bench
        measurement.stop()
        measurement.take_over(given)
        try:
            found = measurement.start(bench, stored, resumed=resumed)
        except StartAgain:
            return Started({}, {}, self._lines.taken(), {}, measurement.to_start_with())
        return Started(found, measurement.about(bench), self._lines.taken(), measurement.to_hand_on(bench))

    def measure(self, keys: Sequence[str], width: int | None) -> Measured:
        """The tables of these units, which are a group."""
        group, halved = Group([self._units[key] for key in keys], width), list[str]()
        try:
            found = [
                (unit.key, made(tables))
                for unit, tables in measured(self._measurement, self._bench, group, halved.append)
            ]
        except StartAgain:
            return Measured([], {}, halved, self._lines.taken(), self._measurement.to_start_with())
        return Measured(found, self._measurement.implementations, halved, self._lines.taken())


def _computes(device: Any) -> tuple[str, str]:
    """The kind of a device, and what it is; an engine that loads the model by itself takes the GPU where there is one."""
    import torch

    from mless.models import processor

    if (device is None or device.type == "cuda") and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name(device)
    here = ", ".join(f"{name} {value}" for name, value in sorted(processor.here().about().items()))
    return "cpu" if device is None else device.type, f"{here}, {torch.get_num_threads()} threads"
