"""What a command says while it works: lines and a bar on standard error."""

from __future__ import annotations

import time
from typing import Any

from mless.cli.printing import plain
from mless.cli.streams import console


class ProgressBar:
    """Lines and a bar with ETA on standard error; the bar appears once something has taken a second.

    Without a terminal, lines wait until the run has passed its checks. If the input is wrong, the message about it is then
    the only line.
    """

    def __init__(self, quiet: bool) -> None:
        self._console = console(stderr=True, quiet=quiet)
        self._bar: Any = None
        self._task: Any = None
        self._began = time.monotonic()
        self._held: list[str] | None = None if self._console.is_terminal else []

    def say(self, line: str) -> None:
        if self._held is not None:
            self._held.append(line)
        else:
            self._console.print(plain(line), soft_wrap=not self._console.is_terminal)

    def checked(self) -> None:
        """Print the lines that waited; from now on none waits."""
        held, self._held = self._held or [], None
        for line in held:
            self.say(line)

    def step(self, what: str, done: int, total: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self._bar is None:
            if time.monotonic() - self._began < 1 or done == total:
                return
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(
                *columns, TextColumn("ETA"), TimeRemainingColumn(), console=self._console, transient=True,
                disable=not self._console.is_terminal,  # a bar cannot be redrawn in a file or a log
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(plain(what), total=total)
        self._bar.update(self._task, description=plain(what), completed=done, total=total)
        if done == total:
            self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._began = time.monotonic()
