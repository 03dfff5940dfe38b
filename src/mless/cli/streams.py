"""The one way to the terminal: nothing from outside gets a control character through, and faults of writing have names.

`guarded` puts a gate in front of standard output and standard error, so that warnings, logs and tracebacks pass it too. Only rich writes
past it, because colours and bars are control sequences of our own; what rich is given is made plain first (`printing`).
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Generator
from typing import Any, cast

from mless.errors import MlessError
from mless.results.escaping import visible

#: What a shell reports for a tool that a closed pipe ended (128 + SIGPIPE), as for `yes | head`.
CLOSED_PIPE = 141
# For terminals that show ASCII only.
_ASCII = {
    "–": "-",
    "—": "-",
    "−": "-",
    "•": "*",
    "…": "...",
    "×": "x",
    "·": ".",
    "“": '"',
    "”": '"',
    "’": "'",
    "±": "+-",
}


class OutputClosed(Exception):
    """The reader has gone, as `head` does. No fault of anyone's."""


class OutputFault(MlessError):
    """Standard output or standard error cannot be written, as on a full disk."""


def _in_ascii(fault: UnicodeError) -> tuple[str, int]:
    assert isinstance(fault, UnicodeEncodeError)
    signs = fault.object[fault.start : fault.end]
    return "".join(_ASCII.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs), fault.end


codecs.register_error("mless.ascii", _in_ascii)


class Gate(io.TextIOBase):
    """A text stream before another. `trusted` passes everything on; otherwise what cannot be seen is escaped."""

    def __init__(self, inner: Any, name: str, *, trusted: bool = False) -> None:
        self.inner, self.label, self.trusted = inner, name, trusted

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.inner, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self.inner.isatty()

    def fileno(self) -> int:
        return self.inner.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        shown = text if self.trusted else visible(text)
        if shown:  # typer writes nothing to learn what a stream takes, and swallows the fault of a full disk
            with self._named_faults():
                self.inner.write(shown)
        return len(text)

    def flush(self) -> None:
        # Python flushes a gate once more when it goes, and by then the stream may be closed; since 3.13 it reports the fault.
        if not getattr(self.inner, "closed", False):
            with self._named_faults():
                self.inner.flush()

    @contextlib.contextmanager
    def _named_faults(self) -> Generator[None]:
        fault: Exception | None = None
        try:
            yield
        except BrokenPipeError:
            fault = OutputClosed()
        except OSError as error:
            fault = OutputFault(
                f"cannot write to standard {self.label}: {error.strerror}; what is stored stays, run it again"
            )
        if fault is not None:
            self._abandon()
            raise fault

    def _abandon(self) -> None:
        """What is left in the buffer goes nowhere. Else Python would fail once more when it ends."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.inner.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def guarded() -> Generator[None]:
    """Standard output and standard error behind gates, inside the block."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            utf8 = codecs.lookup(stream.encoding).name == "utf-8"
            stream.reconfigure(errors="backslashreplace" if utf8 else "mless.ascii")
    sys.stdout, sys.stderr = (
        Gate(stream, name) if stream is not None else io.StringIO()  # pyright: ignore[reportUnnecessaryComparison]
        for stream, name in zip(before, ("output", "error"), strict=True)
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def console(*, stderr: bool = False, **more: Any) -> Any:
    """A rich console past the gate. What is printed on it must be made plain before."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, Gate):
        stream = Gate(stream.inner, stream.label, trusted=True)
    return Console(file=cast("Any", stream), highlight=False, markup=False, emoji=False, **more)
