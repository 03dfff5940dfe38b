"""The grader's worker, as a process that tells how often it was asked, and dies of some questions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from mless.tasks.grading import worker

#: Answers that end the process, by what happens to it.
DIES, HANGS, EATS = "13+u", "13+v", "13+w"


def prepare() -> Callable[[str, str], dict[str, Any]]:
    judged, asked = worker.prepare(), 0

    def answer(given: str, reference: str) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if given == DIES:
            os._exit(1)
        if given == HANGS:
            time.sleep(600)
        if given == EATS:
            raise MemoryError
        return judged(given, reference) | {"pid": os.getpid(), "asked": asked}

    return answer
