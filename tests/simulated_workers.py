"""Workers that are slow, die, hang, answer twice and come later, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from mless.study.bench import Job, Silent
from mless.study.shared import Sent
from mless.study.sharing import Answered, Failed, Joined, Left
from mless.study.worker import Described, Measured, Started, Worker

#: Seconds for which a worker loads before it joins.
LOADS = 60.0

Event = Joined | Left | Answered[Any] | Failed


@dataclass(frozen=True)
class Habits:
    """Chances for each task, and how long one takes in the mean."""

    seconds: float = 10.0
    dies: float = 0.0
    hangs: float = 0.0
    answers_twice: float = 0.0
    #: A worker that is gone is replaced after so many seconds.
    replaced_after: float | None = 30.0


class SimulatedCrew:
    """A crew for `Sharing` whose clock jumps from event to event."""

    def __init__(self, workers: int, seed: int, habits: Habits) -> None:
        self._random = random.Random(seed)
        self._habits = habits
        self._time = 0.0
        self._coming: list[tuple[float, int, Event]] = []
        self._count = 0
        self._made = 0
        #: When each living worker will have done what it was asked.
        self._busy_until: dict[str, float] = {}
        #: Workers that died or were ended, and answers that come a second time.
        self.lost = self.twice = 0
        #: Who was asked what.
        self.asked: list[tuple[str, int]] = []
        for _ in range(workers):
            self.add()

    def add(self, after: float = 0.0) -> str:
        self._made += 1
        name = f"worker-{self._made}"
        self._at(self._time + after, Joined(name))
        return name

    def _at(self, when: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._coming, (when, self._count, event))

    # ---- what `Sharing` calls

    def now(self) -> float:
        return self._time

    def coming(self) -> dict[str, str]:
        """Those that load: nobody knows of them earlier."""
        return {
            event.worker: "loading"
            for when, _, event in self._coming
            if isinstance(event, Joined) and when <= self._time + LOADS
        }

    def ask(self, worker: str, number: int, task: Any) -> None:
        self.asked.append((worker, number))
        if self._busy_until.get(worker, inf) == inf:
            return  # it died, and nobody knows yet; or it hangs
        draw, habits = self._random, self._habits
        start = max(self._time, self._busy_until[worker])
        stop = start + draw.lognormvariate(0.0, 0.7) * habits.seconds
        if draw.random() < habits.dies:
            self.kill(worker, draw.uniform(start, stop))
        elif draw.random() < habits.hangs:
            self._busy_until[worker] = inf
        else:
            self._busy_until[worker] = stop
            found = self.done(task)
            self._at(stop, Answered(worker, number, found))
            if draw.random() < habits.answers_twice:
                self.twice += 1
                self._at(stop + draw.expovariate(1 / 20), Answered(worker, number, found))

    def done(self, task: Any) -> Any:
        """What a worker makes of a task."""
        return task * task

    def kill(self, worker: str, when: float | None = None) -> None:
        """The worker dies, now or then. What it was doing is lost, and that it is gone is known a little later."""
        when = self._time if when is None else when
        self.lost += 1
        self._busy_until.pop(worker, None)
        self._coming = [one for one in self._coming if not self._lost(one, worker, when)]
        heapq.heapify(self._coming)
        self._at(when + self._random.expovariate(1.0), Left(worker, "killed"))
        if self._habits.replaced_after is not None:
            self.add(when - self._time + self._habits.replaced_after)

    @staticmethod
    def _lost(coming: tuple[float, int, Event], worker: str, when: float) -> bool:
        time, _, event = coming
        return isinstance(event, Answered) and event.worker == worker and time >= when

    def end(self, worker: str) -> None:
        self.lost += 1
        self._busy_until.pop(worker, None)
        if self._habits.replaced_after is not None:
            self.add(self._habits.replaced_after)

    def events(self, seconds: float) -> Sequence[Event]:
        until = self._time + seconds
        if not self._coming or self._coming[0][0] > until:
            self._time = until
            return []
        self._time = max(self._time, self._coming[0][0])
        found: list[Event] = []
        while self._coming and self._coming[0][0] <= self._time:
            event = heapq.heappop(self._coming)[2]
            if isinstance(event, Joined):
                self._busy_until[event.worker] = self._time
            found.append(event)
        return found


class SimulatedStudy(SimulatedCrew):
    """The same for a whole study. All workers share one real one, which measures each group once."""

    def __init__(self, real: RealWorker, workers: int, seed: int, habits: Habits) -> None:
        super().__init__(0, seed, habits)
        self._real, self._workers = real, workers

    def lead(self) -> Described:
        return self._real.worker.describe()

    def start(self, stored: Mapping[str, Any] | None, given: Mapping[str, Any], *, resumed: bool) -> Started:
        for _ in range(self._workers):
            self.add()
        return self._real.worker.start(stored, resumed, given)

    def done(self, task: Sent) -> Measured:
        return self._real.measure(task)

    def known(self) -> list[dict[str, str]]:
        return []

    def close(self) -> None: ...


class RealWorker:
    """A worker of a study that remembers what it has measured."""

    def __init__(self, job: Job) -> None:
        self.worker = Worker(replace(job, progress=Silent()), 1)
        self._found: dict[tuple[str, ...], Measured] = {}

    def measure(self, task: Sent) -> Measured:
        keys = tuple(task[0])
        if keys not in self._found:
            self._found[keys] = self.worker.measure(*task)
        return self._found[keys]
