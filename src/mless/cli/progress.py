"""What a command says while it works: lines and a bar on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mless.cli.printing import plain
from mless.cli.streams import console

if TYPE_CHECKING:
    from rich.console import RenderableType


#: Without a terminal, so many seconds lie between two lines that say how far a step is.
_EVERY_S = 30.0


class ProgressBar:
    """Lines and a bar with ETA on standard error; the bar appears once something has taken a second.

    Without a terminal, lines wait until the run has passed its checks. If the input is wrong, the message about it is then
    the only line. In place of the bar there is a line from time to time.
    """

    def __init__(self, quiet: bool) -> None:
        self._console = console(stderr=True, quiet=quiet)
        self._bar: Any = None
        self._task: Any = None
        self._began = self._told = time.monotonic()
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

    def step(self, what: str, done: int, total: int, workers: str = "") -> None:
        if not self._console.is_terminal:
            if self._held is None and time.monotonic() - self._told >= _EVERY_S and done < total:
                self._told = time.monotonic()
                self.say(f"{what}: {done:,} of {total:,}")
            return
        if self._bar is None:
            if time.monotonic() - self._began < 1 or done == total:
                return
            self._bar = _new_bar(self._console)
            self._bar.start()
            self._task = self._bar.add_task(plain(what), total=total, workers="")
        self._bar.update(self._task, description=plain(what), completed=done, total=total, workers=plain(workers))
        if done == total:
            self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._began = time.monotonic()


def _new_bar(console: Any) -> Any:
    """A bar, and below it a line about workers where there is something to say of them."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class WithWorkers(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            for task in self.tasks:
                if task.fields["workers"]:
                    yield Text(task.fields["workers"], no_wrap=True, overflow="ellipsis")

    return WithWorkers(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("ETA"), TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip
