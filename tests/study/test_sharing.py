"""Groups handed out to workers: every result once, whatever happens to the workers. Time is simulated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mless.errors import BadAttention, BadCluster
from mless.study.sharing import Answered, Failed, Joined, Sharing, in_a_line
from simulated_workers import Event, Habits, SimulatedCrew

ROUGH = Habits(dies=0.03, hangs=0.01, answers_twice=0.1)


def share(crew: SimulatedCrew, tasks: int, **limits: float) -> tuple[Sharing[int, int], list[tuple[int, int]]]:
    sharing: Sharing[int, int] = Sharing(crew, list(range(tasks)), **{"limit": 200.0, "tries": 8, **limits})
    return sharing, list(sharing.results())


def assert_each_once(found: Sequence[tuple[int, int]], tasks: int) -> None:
    assert sorted(found) == [(number, number * number) for number in range(tasks)]


@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_workers_that_die_hang_and_answer_twice(seed: int) -> None:
    sharing, found = share(SimulatedCrew(1000, seed, ROUGH), 3000)
    assert_each_once(found, 3000)
    assert sharing.twice > 100
    assert sharing.lost > 50


@given(
    st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 40), st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 1)
)
@settings(max_examples=60, deadline=None)
def test_every_result_comes_once(seed: int, workers: int, tasks: int, dies: float, hangs: float, twice: float) -> None:
    habits = Habits(dies=dies, hangs=hangs, answers_twice=twice)
    _, found = share(SimulatedCrew(workers, seed, habits), tasks, tries=1000)
    assert_each_once(found, tasks)


def test_workers_that_come_later_are_used_and_those_that_are_gone_are_said() -> None:
    crew, lines = SimulatedCrew(1, 0, Habits(replaced_after=None)), list[str]()
    sharing: Sharing[int, int] = Sharing(crew, list(range(40)), say=lines.append)
    found: list[tuple[int, int]] = []
    for number, result in sharing.results():
        found.append((number, result))
        if len(found) == 5:
            crew.add()
        if len(found) == 12:
            crew.kill("worker-1")
    assert_each_once(found, 40)
    assert lines == ["worker worker-1 is gone (killed); 2 groups are given to others"]
    assert sum(worker == "worker-2" for worker, _ in crew.asked) > 20


def test_a_worker_that_hangs_is_ended_and_its_groups_are_given_to_others() -> None:
    class Hanging(SimulatedCrew):
        def ask(self, worker: str, number: int, task: int) -> None:
            if worker != "worker-1":
                super().ask(worker, number, task)

    lines: list[str] = []
    sharing: Sharing[int, int] = Sharing(Hanging(2, 0, Habits()), list(range(30)), say=lines.append, limit=100.0)
    assert_each_once(list(sharing.results()), 30)
    assert lines == ["worker worker-1 is gone (no answer within 100 s); 2 groups are given to others"]


def test_idle_workers_take_what_a_slow_one_has_not_answered() -> None:
    """The last groups: one worker has some, and the other none."""

    class Slow(SimulatedCrew):
        def ask(self, worker: str, number: int, task: int) -> None:
            super().ask(worker, number, task)
            if worker == "worker-1":
                self._busy_until[worker] += 1000.0

    crew = Slow(2, 3, Habits(seconds=1.0))
    sharing, found = share(crew, 9, limit=10_000.0)
    assert_each_once(found, 9)
    assert crew.now() < 50
    assert sharing.lost == 0


def test_a_group_that_kills_every_worker_ends_the_study() -> None:
    class Deadly(SimulatedCrew):
        def ask(self, worker: str, number: int, task: int) -> None:
            begins = max(self.now(), self._busy_until.get(worker, 0.0))
            super().ask(worker, number, task)
            if number == 3 and worker in self._busy_until:
                self.kill(worker, begins)

    with pytest.raises(
        BadCluster, match=r"^group 4 of 10 has cost 3 workers, the last of them worker-\d+ \(killed\); .*stored"
    ):
        share(Deadly(4, 0, Habits()), 10, tries=3)


@pytest.mark.parametrize("workers", [0, 2], ids=["none ever came", "all are gone"])
def test_without_workers_it_ends_after_a_while(workers: int) -> None:
    crew = SimulatedCrew(workers, 0, Habits(dies=1.0, replaced_after=None))
    with pytest.raises(BadCluster, match=r"^no worker for 60 s, and 5 groups are left; what was measured is stored"):
        share(crew, 5, patience=60.0)
    assert crew.now() < 200


def test_a_fault_of_the_measuring_ends_the_study() -> None:
    class Failing(SimulatedCrew):
        def events(self, seconds: float) -> Sequence[Event]:
            return [Joined("worker-1")] if not self.asked else [Failed("worker-1", 0, BadAttention("not finite"))]

    with pytest.raises(BadAttention, match="not finite"):
        share(Failing(0, 0, Habits()), 3)


class OneBroken(SimulatedCrew):
    """The first worker cannot do anything: its GPU has a fault that stays."""

    def ask(self, worker: str, number: int, task: int) -> None:
        super().ask(worker, number, task)
        if worker == "worker-1":
            self._coming = [one for one in self._coming if not self._lost(one, worker, 0.0)]
            self._at(self.now() + 0.1, Failed(worker, number, RuntimeError("CUDA error")))


def test_a_worker_that_fails_is_ended_and_the_others_go_on() -> None:
    said: list[str] = []
    sharing: Sharing[int, int] = Sharing(OneBroken(3, 0, Habits()), list(range(30)), say=said.append)
    assert_each_once(list(sharing.results()), 30)
    assert said == [
        "worker worker-1 is gone (it could not measure group 1: RuntimeError: CUDA error); 2 groups are given to others"
    ]


class Steady(SimulatedCrew):
    """Every group takes ten seconds, the second worker's two hundred."""

    def ask(self, worker: str, number: int, task: int) -> None:
        self.asked.append((worker, number))
        self._busy_until[worker] = max(self.now(), self._busy_until[worker]) + (200 if worker == "worker-2" else 10)
        self._at(self._busy_until[worker], Answered(worker, number, task * task))


def lines_of(crew: SimulatedCrew, tasks: int) -> list[str]:
    """What is said of the workers whenever nothing happens and after each result."""
    lines: list[str] = []
    sharing: Sharing[int, int] = Sharing(crew, list(range(tasks)), idle=lambda: lines.append(sharing.now()))
    lines.append(sharing.now())
    for _ in sharing.results():
        lines.append(sharing.now())
    return lines


def test_few_workers_are_named_with_what_each_does() -> None:
    crew = Steady(2, 0, Habits())
    crew.add(15.0)
    lines = lines_of(crew, 40)
    assert lines[0] == "3 workers: worker-1 loading, worker-2 loading, worker-3 loading"
    # A worker has two groups at once, and does the first of them.
    assert "3 workers: worker-1 group 1, worker-2 group 2, worker-3 loading" in lines
    assert "3 workers: worker-1 group 3, worker-2 group 2, worker-3 loading" in lines
    assert "3 workers: worker-1 group 3, worker-2 group 2, worker-3 group 6" in lines
    assert any("worker-2 group 2 for 2 min" in line for line in lines)


def test_many_workers_are_counted() -> None:
    crew = Steady(60, 0, Habits())
    for _ in range(4):
        crew.add(55.0)
    lines = lines_of(crew, 600)
    assert lines[0] == "64 workers: 64 loading"
    assert lines[1] == "64 workers: 60 measuring, 4 loading"
    assert "64 workers: 64 measuring, one group for 1 min" in lines
    assert max(map(len, lines)) < 80


def test_one_worker_and_none() -> None:
    assert in_a_line({"1": "loading"}) == "1 worker: 1 loading"
    assert in_a_line({}) == "0 workers"
