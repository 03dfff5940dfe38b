"""A process that tells how often it was asked, and dies of some questions or waits: the grader's worker, or one that starts at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mless.tasks.grading import worker

#: Answers that end the process, by what happens to it.
DIES, HANGS, EATS = "13+u", "13+v", "13+w"
#: The first process that is asked this, with a path behind it, leaves its number there and hangs; later ones answer.
WAITS = "13+z"


def kill_waiting(sign: Path) -> None:
    """Kill the process that waits, once it does."""
    until = time.monotonic() + 120
    while not (waiting := _waiting(sign)):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(int(waiting[0].name.rpartition("-")[2]), signal.SIGKILL)


def _waiting(sign: Path) -> list[Path]:
    return list(sign.parent.glob(f"{sign.name}-*"))


def by_terms(given: str, reference: str) -> dict[str, Any]:
    """The grader's answers to sums, without the second that importing its libraries takes."""
    if given.strip() == reference:
        return {"grade": [True, "same text"]}
    same = sorted(given.split("+")) == sorted(reference.split("+"))
    return {"grade": [same, "same value" if same else "other value"]}


def prepare(judged: Callable[[str, str], dict[str, Any]] | None = None) -> Callable[[str, str], dict[str, Any]]:
    judged, asked = judged or worker.prepare(), 0

    def answer(given: str, reference: str) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if given == DIES:
            os._exit(1)
        if given == HANGS:
            time.sleep(600)
        if given == WAITS and not _waiting(Path(reference)):
            Path(f"{reference}-{os.getpid()}").mkdir()  # it may write no file
            time.sleep(600)
        if given == EATS:
            raise MemoryError
        return judged(given, reference) | {"pid": os.getpid(), "asked": asked}

    return answer
