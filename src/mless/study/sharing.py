"""Shares a study's groups out among workers, and takes their results in any order, each group's once.

Workers may be slow, die, hang, answer twice, or come while the study runs. What a worker that is gone had not answered is given to another. The
numbers do not depend on who measured a group, so neither does what is stored.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

from mless.errors import BadCluster, MlessError

Task = TypeVar("Task")
Found = TypeVar("Found")
_Task = TypeVar("_Task", contravariant=True)

#: Answers that a crew gives at once. The others wait where they were made, and those who made them are asked for no more: so the driver's memory
#: does not grow with the number of workers.
ANSWERS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is ready."""

    worker: str


@dataclass(frozen=True, slots=True)
class Left:
    """A worker is gone: it died, or its machine did."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Answered(Generic[Found]):
    worker: str
    number: int
    found: Found


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker could not do its task, and lives."""

    worker: str
    number: int
    fault: Exception


@runtime_checkable
class Crew(Protocol[_Task, Found]):
    """Workers, wherever they are. They do what they are asked one after the other."""

    def ask(self, worker: str, number: int, task: _Task) -> None:
        """Give a worker a task. Returns at once."""
        ...

    def events(self, seconds: float) -> Sequence[Joined | Left | Answered[Found] | Failed]:
        """What has happened since the last call, with at most `ANSWERS_AT_ONCE` answers; where nothing has, it is waited for, at most so long."""
        ...

    def coming(self) -> Mapping[str, str]:
        """Workers that are on their way and have not joined yet, and what each does meanwhile, such as loading."""
        ...

    def end(self, worker: str) -> None:
        """End a worker that hangs. It may answer all the same; `Left` need not follow."""
        ...

    def now(self) -> float:
        """Seconds since some moment, by the driver's clock alone: those of other machines may differ."""
        ...


#: Workers of which each is named, and seconds after which it is said how long a group has taken.
_NAMED, _LONG = 4, 60.0


@dataclass
class _Worker:
    #: What it has been asked and has not answered, in order, and since when it does the first of it.
    asked: list[int] = field(default_factory=list[int])
    since: float = 0.0


class Sharing(Generic[Task, Found]):
    """One study's tasks and who does them. Nothing is written here: the results go to the one who asks for them."""

    def __init__(
        self,
        crew: Crew[Task, Found],
        tasks: Sequence[Task],
        *,
        say: Callable[[str], None] = lambda line: None,
        idle: Callable[[], None] = lambda: None,
        at_once: int = 2,
        limit: float = 3600.0,
        tries: int = 3,
        patience: float = 300.0,
    ) -> None:
        """`at_once`: tasks that a worker has, so that it need not wait for the next one. `limit`: seconds for one of them. `tries`: workers that
        a task may cost. `patience`: seconds without any worker.
        """
        self._crew, self._tasks, self._say, self._idle = crew, tasks, say, idle
        self._at_once, self._limit, self._tries, self._patience = at_once, limit, tries, patience
        self._waiting = list(range(len(tasks)))  # a heap: what was given back goes first
        self._done: set[int] = set()
        self._workers: dict[str, _Worker] = {}
        #: Workers that have nothing to do, and those with room for more: the one for whom this is so for longest first.
        self._free: dict[str, None] = {}
        self._room: dict[str, None] = {}
        #: Who has been asked for a task and has not answered; tasks that were given out, and those of them that somebody had begun.
        self._held: dict[int, set[str]] = {}
        self._once: list[int] = []
        self._begun: list[int] = []
        self._deadlines: list[tuple[float, str]] = []
        self._cost: dict[int, int] = {}
        self._alone_since = crew.now()
        #: Results that came a second time, and workers that were lost.
        self.twice = self.lost = 0

    def results(self) -> Iterator[tuple[int, Found]]:
        """Every task's number and result, once each, as they come."""
        while len(self._done) < len(self._tasks):
            self._ask()
            events = self._crew.events(self._until_next())
            for event in events:
                match event:
                    case Joined(name):
                        self._join(name)
                    case Left(name, why):
                        self._lose(name, why)
                    case Failed(name, number, fault):
                        self._fail(name, number, fault)
                    case Answered(name, number, found):
                        if self._take(name, number):
                            yield number, found
            if not events:  # else one that has answered could be taken for one that hangs
                self._end_hanging()
                self._idle()
            self._check_alone()

    def now(self) -> str:
        """What the workers do now, in a line."""
        now, coming = self._crew.now(), self._crew.coming()
        few = len(self._workers) + len(coming) <= _NAMED
        doing, taken = dict[str, str](), [0.0]
        for name, worker in self._workers.items():
            doing[name] = "waiting"
            if worker.asked:
                taken.append(now - worker.since)
                doing[name] = f"group {worker.asked[0] + 1}{_since(taken[-1])}" if few else "measuring"
        longest = "" if few or not _since(max(taken)) else f", one group{_since(max(taken))}"
        return in_a_line(doing | dict(coming)) + longest

    # ---- who does what

    def _ask(self) -> None:
        """Every step costs the same with one worker as with thousands."""
        while (name := next(iter(self._free or self._room), None)) is not None:
            worker = self._workers[name]
            number = self._next_waiting()
            if number is None and not worker.asked:
                number = self._next_unanswered()
            if number is None:
                return
            if not worker.asked:
                self._begin(name, worker)
            worker.asked.append(number)
            self._held.setdefault(number, set()).add(name)
            self._place(name, worker)
            self._crew.ask(name, number, self._tasks[number])

    def _next_waiting(self) -> int | None:
        while self._waiting:
            if (number := heapq.heappop(self._waiting)) not in self._done:
                self._once.append(number)
                return number
        return None

    def _next_unanswered(self) -> int | None:
        """All are given out. An idle worker gets one that another has not answered yet, too: whoever is first counts."""
        while self._once:
            number = self._once.pop()  # those that were given out last may not have been begun
            if self._is_held_once(number):
                (holder,) = self._held[number]
                if self._workers[holder].asked[0] != number:
                    return number
                self._begun.append(number)
        while self._begun:
            if self._is_held_once(number := self._begun.pop()):
                return number
        return None

    def _is_held_once(self, number: int) -> bool:
        """Nobody is a third."""
        return number not in self._done and len(self._held.get(number, ())) == 1

    def _place(self, name: str, worker: _Worker) -> None:
        """Keep it among those that can be asked, or not."""
        self._free.pop(name, None)
        self._room.pop(name, None)
        if not worker.asked:
            self._free[name] = None
        elif len(worker.asked) < self._at_once:
            self._room[name] = None

    def _release(self, name: str, number: int) -> _Worker | None:
        """A worker is done with a task; None where it was not asked, or is gone."""
        worker = self._workers.get(name)
        if worker is None or number not in worker.asked:
            return None
        worker.asked.remove(number)
        self._held[number].discard(name)
        self._place(name, worker)
        return worker

    def _begin(self, name: str, worker: _Worker) -> None:
        worker.since = self._crew.now()
        heapq.heappush(self._deadlines, (worker.since + self._limit, name))

    def _take(self, name: str, number: int) -> bool:
        """Note an answer; whether it is the first to this task."""
        worker = self._release(name, number)
        if worker is not None and worker.asked:
            self._begin(name, worker)
        if number in self._done:
            self.twice += 1
            return False
        self._done.add(number)
        return True

    def _fail(self, name: str, number: int, fault: Exception) -> None:
        """A worker could not do it. What the user can mend is raised. Anything else may be that process's fault: it is ended, and another one tries."""
        if number in self._done:
            worker = self._release(name, number)
            if worker is not None and worker.asked:
                self._begin(name, worker)
            return
        if isinstance(fault, MlessError):
            raise fault
        self._crew.end(name)
        self._lose(name, f"it could not measure group {number + 1}: {type(fault).__name__}: {fault}")

    def _count_cost(self, number: int, last: str) -> None:
        self._cost[number] = self._cost.get(number, 0) + 1
        if self._cost[number] >= self._tries:
            raise BadCluster(
                f"group {number + 1} of {len(self._tasks)} has cost {self._tries} workers, the last of them {last}; what others measured is "
                "stored: mend that, or give more time (--worker-limit), then run the same command again"
            )

    # ---- who is there

    def _join(self, name: str) -> None:
        if name not in self._workers:
            self._workers[name] = _Worker()
            self._place(name, self._workers[name])

    def _lose(self, name: str, why: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        self._free.pop(name, None)
        self._room.pop(name, None)
        for number in worker.asked:
            self._held[number].discard(name)
        self.lost += 1
        left = [number for number in worker.asked if number not in self._done]
        self._say(f"worker {name} is gone ({why}); {_groups(len(left))} given to others")
        for number in left:
            heapq.heappush(self._waiting, number)
        if left and left[0] == worker.asked[0]:  # it was doing this one
            self._count_cost(left[0], f"{name} ({why})")
        self._alone_since = self._crew.now()

    def _end_hanging(self) -> None:
        now = self._crew.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            worker = self._workers.get(name)
            # It may have answered since, and begun another.
            if worker is not None and worker.asked and worker.since + self._limit <= now:
                self._crew.end(name)
                self._lose(name, f"no answer within {self._limit:g} s")

    def _until_next(self) -> float:
        """Seconds until somebody has to be looked at, at most one."""
        nearest = self._deadlines[0][0] - self._crew.now() if self._deadlines else 1.0
        return min(1.0, max(0.01, nearest))

    def _check_alone(self) -> None:
        if self._workers:
            return
        if self._crew.coming():
            self._alone_since = self._crew.now()
        if self._crew.now() - self._alone_since > self._patience and len(self._done) < len(self._tasks):
            raise BadCluster(
                f"no worker for {self._patience:g} s, and {_groups(len(self._tasks) - len(self._done))} left; what was measured is stored: start "
                "workers and run the same command again"
            )


def in_a_line(doing: Mapping[str, str]) -> str:
    """What workers do: of each where they are few, else how many do what."""
    parts = (
        [f"{name} {what}" for name, what in doing.items()]
        if len(doing) <= _NAMED
        else [f"{count} {what}" for what, count in Counter(doing.values()).items()]
    )
    return f"{len(doing)} worker{'' if len(doing) == 1 else 's'}{': ' if parts else ''}{', '.join(parts)}"


def _since(seconds: float) -> str:
    return f" for {seconds / 60:.0f} min" if seconds >= _LONG else ""


def _groups(count: int) -> str:
    return "1 group is" if count == 1 else f"{count} groups are"
