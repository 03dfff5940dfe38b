"""A listener to a run."""

from __future__ import annotations


class Heard:
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, what: str, done: int, total: int, workers: str = "") -> None: ...

    def checked(self) -> None: ...
