"""A measurement whose groups are measured by workers. This process has the tokenizer, but not the model; it alone writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mless.errors import BadCluster
from mless.results.storing import Tables
from mless.study.bench import Bench, Group, Measurement, Progress, StartAgain, Unit, Workers
from mless.study.identity import is_circumstance
from mless.study.sharing import Crew, Sharing
from mless.study.subject import Subject
from mless.study.worker import Described, Measured, Started, of_all

#: Answers that are given to a worker at once, where the engine does not say how many it draws at a time.
_ANSWERS = 16

#: Seconds between two looks at what the workers do.
_LOOK = 0.5

#: A group, as it is sent: names of its units, and their number at once where it differs from the usual.
Sent = tuple[list[str], int | None]


@runtime_checkable
class Ready(Crew[Sent, Measured], Protocol):
    """Workers that have a study's model."""

    def lead(self) -> Described:
        """What the first worker that is ready has loaded."""
        ...

    def start(self, stored: Mapping[str, Any] | None, given: Mapping[str, Any], *, resumed: bool) -> Started:
        """Let one worker check the instrument, and the others as it did. From then on they can be asked. What they had been asked is forgotten."""
        ...

    def known(self) -> list[dict[str, str]]:
        """Every worker that has measured, for study.json."""
        ...

    def close(self) -> None: ...


class Shared(Measurement):
    """What differs from the measurement in this process; a class of both is made by `shared_out`."""

    measures_here = False
    workers: Ready
    asked: Workers
    _lead: Described
    _about: Mapping[str, Any]
    _earlier: list[dict[str, str]]
    _again: Mapping[str, Any] | None
    _used: dict[str, str | list[str]]
    _sharing: Sharing[Sent, Measured] | None = None
    _now: str = ""
    _looked: float = 0.0

    def load(self, subject: Subject, layers: Sequence[int], progress: Progress) -> None:
        subject.load_tokenizer()
        self._lead = self.workers.lead()
        subject.elsewhere = self._lead.model
        self._used, self._again, self._about, self._earlier = {}, None, {}, []

    def identity_loaded(self, bench: Bench) -> dict[str, str]:
        bench.device = self._lead.device
        found = super().identity_loaded(bench)
        return found | {name: value for name, value in self._lead.identity.items() if is_circumstance(name)}

    def check_loaded(self, bench: Bench, identity: Mapping[str, str]) -> None:
        """What study.json will say of this process must be true of the workers."""
        other = [name for name, value in identity.items() if self._lead.identity.get(name, value) != value]
        versions = unlike(self._lead.versions, of_all())
        if other or (versions and not self.asked.mixed):
            what = ", ".join([*sorted(other), *(f"version of {name}" for name in versions)])
            raise BadCluster(
                f"the worker on {self._lead.where} differs from this process in {what}; give both the same model files and versions"
                f"{'' if other else ', or add --mixed'}"
            )

    def start(self, bench: Bench, stored: Mapping[str, Any] | None, *, resumed: bool) -> dict[str, str]:
        # After StartAgain nothing is stored, but it is known what to start with.
        stored = stored if self._again is None else self._again
        found = self.workers.start(stored, self.to_hand_on(bench), resumed=resumed)
        for line in found.said:
            bench.progress.say(line)
        if found.again is not None:
            self._again = found.again
            raise StartAgain
        earlier = list((stored or {}).get("workers") or [])
        super().resume(bench, found.about)  # as if an earlier run had recorded it
        self.take_over(found.given)
        self._about, self._earlier = found.about, earlier
        return dict(found.identity)

    def resume(self, bench: Bench, stored: Mapping[str, Any]) -> None:
        super().resume(bench, stored)
        self._about, self._earlier = stored, list(stored.get("workers") or [])

    def about(self, bench: Bench) -> dict[str, Any]:
        here, there = super().about(bench), self._about
        more = {name: there[name] for name in ("omit_first", "group_tokens", "device") if name in there}
        known = [*self._earlier, *self.workers.known()]
        return {**more, **here, "workers": [one for at, one in enumerate(known) if one not in known[:at]]}

    @property
    def implementations(self) -> Mapping[str, str | list[str]]:
        return {**super().implementations, **self._used}

    def run_groups(
        self,
        bench: Bench,
        groups: Sequence[Group],
        here: Callable[[Group], Iterator[tuple[Unit, Tables]]],
        halved: Callable[[str], None],
        idle: Callable[[], None],
    ) -> Iterator[tuple[Group, Iterator[tuple[Unit, Tables]]]]:
        groups = [piece for group in groups for piece in self._pieces(group)]
        units = {unit.key: unit for group in groups for unit in group.units}
        sent: list[Sent] = [([unit.key for unit in group.units], group.width) for group in groups]
        self._sharing = Sharing(self.workers, sent, say=bench.progress.say, idle=idle, limit=self.asked.limit)
        for number, found in self._sharing.results():
            for line in found.halved:
                halved(line)
            for line in found.said:
                bench.progress.say(line)
            if found.again is not None:
                self._again = found.again
                raise StartAgain
            for what, by in found.implementations.items():
                before = self._used.get(what, [])
                self._used[what] = by if isinstance(by, str) else sorted({*before, *by})
            yield groups[number], ((units[key], tables) for key, tables in found.units)

    def workers_now(self) -> str:
        # A thousand workers are not counted for each of their units.
        if self._sharing is not None and time.monotonic() - self._looked >= _LOOK:
            self._now, self._looked = self._sharing.now(), time.monotonic()
        return self._now

    def workers_known(self) -> int:
        return len(self.workers.known())

    def _pieces(self, group: Group) -> list[Group]:
        """The group, or parts of it where this does not change its numbers."""
        if not self.apart:
            return [group]
        engine: Mapping[str, Any] = self._about.get("engine") or {}
        size = int(engine.get("slots") or engine.get("max_num_seqs") or _ANSWERS)
        return [Group(group.units[at : at + size], group.width) for at in range(0, len(group.units), size)]


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names under which the two differ."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def shared_out(measurement: Measurement, workers: Ready, asked: Workers) -> Measurement:
    """The same measurement, with workers that measure."""
    kind = type(f"Shared{type(measurement).__name__}", (Shared, type(measurement)), {})
    found = kind(measurement.spec)
    found.workers, found.asked = workers, asked
    return found
