"""Guarded processes together: every question is answered once, and a process that fails costs its own question only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guarded_worker import DIES, EATS, HANGS
from mless.errors import MlessError
from mless.guarded import Guarded, Replaced, ask_all, usable_cores

LIMIT = 4.0


class Starts:
    """Starts real processes, and keeps them to look at."""

    def __init__(self, module: str = "guarded_worker") -> None:
        self.module = module
        self.made: list[Guarded] = []

    def __call__(self) -> Guarded:
        self.made.append(Guarded(self.module, LIMIT, 2 << 30, MlessError))
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

    ask_all(starts, questions, processes, take)
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


def test_a_process_that_is_killed_from_outside_is_replaced_and_costs_nothing(starts: Starts) -> None:
    found: dict[int, str] = {}

    def take(place: int, answer: dict[str, Any]) -> None:
        if not found:
            starts.made[0]._process.kill()
        found[place] = said([answer])[0]

    ask_all(starts, sums(120), 2, take)
    assert set(found) == set(range(120))
    assert set(found.values()) == {"same value"}
    assert len(starts.made) == 3


def test_more_than_a_pipe_holds_is_sent_in_parts(starts: Starts) -> None:
    long = [(f"{k}" + " " * 30_000, f"{k}") for k in range(12)]
    assert said(asked(starts, [(HANGS, "x"), *long], 1)) == ["time"] + ["same text"] * 12


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_no_process_behind(starts: Starts, fault: type[BaseException]) -> None:
    def take(place: int, answer: dict[str, Any]) -> None:
        raise fault

    with pytest.raises(fault):
        ask_all(starts, [*sums(60), (HANGS, "x")], 2, take)
    assert starts.alive == 0


def test_processes_that_do_not_start_are_said_once() -> None:
    starts = Starts("no_such_module_at_all")
    with pytest.raises(MlessError, match="No module named 'no_such_module_at_all'"):
        ask_all(starts, sums(30), 3, lambda place, answer: None)


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
