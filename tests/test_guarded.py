"""Guarded processes together: every question is answered once, and a process that fails costs its own question only."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guarded_worker import DIES, EATS, HANGS, WAITS, kill_waiting
from mless.errors import MlessError
from mless.guarded import Guarded, Replaced, ask_all, usable_cores

LIMIT = 2.5


class Starts:
    """Starts real processes, and keeps them to look at."""

    def __init__(self, *modules: str, limit: float = LIMIT) -> None:
        self.modules = modules  # of the first ones; those after them answer
        self.limit = limit
        self.made: list[Guarded] = []
        self._lock = threading.Lock()

    def __call__(self) -> Guarded:
        with self._lock:
            module = dict(enumerate(self.modules)).get(len(self.made), "adding_worker")
            self.made.append(Guarded(module, self.limit, 2 << 30, MlessError))
            return self.made[-1]

    @property
    def alive(self) -> int:
        return sum(one._process.poll() is None for one in self.made)


@pytest.fixture
def starts() -> Starts:
    return Starts()


def sums(n: int) -> list[tuple[str, str]]:
    return [(f"{k}+x", f"x+{k}") for k in range(1, n + 1)]


def asked(starts: Starts, questions: list[tuple[str, str]], processes: int) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}

    def take(place: int, answer: dict[str, Any]) -> None:
        assert place not in found
        found[place] = answer

    ask_all([Replaced(starts) for _ in range(processes)], questions, take)
    assert starts.alive == 0
    return [found[place] for place in range(len(questions))]


def said(answers: list[dict[str, Any]]) -> list[str]:
    return [one["grade"][1] if "grade" in one else one["fault"] for one in answers]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_question_reaches_one_process_once(starts: Starts, processes: int) -> None:
    answers = asked(starts, sums(50), processes)
    assert said(answers) == ["same value"] * 50
    assert len(starts.made) == processes
    reached = {one["pid"]: max(other["asked"] for other in answers if other["pid"] == one["pid"]) for one in answers}
    assert sum(reached.values()) == 50
    assert len(reached) == processes


def test_faults_are_the_answers_to_their_own_questions_only(starts: Starts) -> None:
    questions = sums(40)
    faults = {7: (DIES, "crash"), 20: (HANGS, "time"), 21: (EATS, "memory"), 39: (DIES, "crash")}
    for place, (question, _) in faults.items():
        questions[place] = (question, "x+1")
    answers = said(asked(starts, questions, 2))
    assert {place: answers[place] for place in faults} == {place: fault for place, (_, fault) in faults.items()}
    assert {answer for place, answer in enumerate(answers) if place not in faults} == {"same value"}
    # two at first; after a death or a full memory a fresh process is asked again, and it is replaced too where questions are left
    assert len(starts.made) >= 2 + 1 + 2 + 2


def test_a_process_that_is_killed_from_outside_is_replaced_and_costs_nothing(tmp_path: Path) -> None:
    starts, found, sign = Starts(limit=300.0), dict[int, str](), tmp_path / "waits"

    def take(place: int, answer: dict[str, Any]) -> None:
        if not found:
            kill_waiting(sign)
        found[place] = said([answer])[0]

    ask_all([Replaced(starts) for _ in range(2)], [(WAITS, str(sign)), *sums(120)], take)
    assert found.pop(0) == "other value"
    assert set(found) == set(range(1, 121))
    assert set(found.values()) == {"same value"}
    assert len(starts.made) == 3


def test_a_question_that_was_interrupted_does_not_answer_the_next_one() -> None:
    """As by a caller's own timeout: what it did not wait for must not be taken for another answer."""
    one = Replaced(Starts(limit=300.0))
    assert said([one.ask("1+x", "x+1")]) == ["same value"]

    def interrupt(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(TimeoutError):
            one.ask(HANGS, "x")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert said([one.ask("1+x", "x+2"), one.ask("2+x", "x+2"), one.ask("3+x", "x+1")]) == [
        "other value", "same value", "other value",
    ]  # fmt: skip
    several = one.ask_in_turn([b'["1+x", "x+1"]\n', b'["1+x", "x+2"]\n'])
    assert said([next(several)]) == ["same value"]
    several.close()
    assert said([one.ask("5+x", "x+5")]) == ["same value"]
    one.end()


def test_what_a_process_does_not_start_for_is_left_to_the_others() -> None:
    starts = Starts("no_such_module_at_all", limit=300.0)
    assert said(asked(starts, sums(60), 2)) == ["same value"] * 60
    alone = Starts("no_such_module_at_all", limit=300.0)
    assert said(asked(alone, sums(6), 1)) == ["same value"] * 6
    assert len(alone.made) == 2


def test_more_than_a_pipe_holds_is_sent_in_parts(starts: Starts) -> None:
    long = [(f"{k}" + " " * 30_000, f"{k}") for k in range(12)]
    assert said(asked(starts, [(HANGS, "x"), *long], 1)) == ["time"] + ["same text"] * 12


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_no_process_behind(starts: Starts, fault: type[BaseException]) -> None:
    def take(place: int, answer: dict[str, Any]) -> None:
        raise fault

    with pytest.raises(fault):
        ask_all([Replaced(starts) for _ in range(2)], [*sums(60), (HANGS, "x")], take)
    assert starts.alive == 0


def test_processes_that_do_not_start_are_said_once() -> None:
    starts = Starts(*["no_such_module_at_all"] * 10)
    with pytest.raises(MlessError, match="No module named 'no_such_module_at_all'"):
        ask_all([Replaced(starts) for _ in range(3)], sums(30), lambda place, answer: None)


def test_nothing_to_ask_starts_nothing(starts: Starts) -> None:
    assert asked(starts, [], 2) == []
    assert starts.made == []


def test_one_process_is_replaced_after_a_fault(starts: Starts) -> None:
    one = Replaced(starts)
    assert one.process is None
    assert said([one.ask("1+x", "x+1"), one.ask(DIES, "x"), one.ask("2+x", "x+2")]) == [
        "same value",
        "crash",
        "same value",
    ]
    assert len(starts.made) == 3  # the second was fresh, and died too
    one.end()
    assert starts.alive == 0


def test_usable_cores_are_those_that_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[..., str] = Path.read_text

    def limited(to: str) -> None:
        monkeypatch.setattr(Path, "read_text", lambda path, **how: to if path.name == "cpu.max" else read(path, **how))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    limited("max 100000\n")
    assert usable_cores() == 6
    limited("250000 100000\n")
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
