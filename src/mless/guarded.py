"""A separate Python process that answers questions as JSON lines, within limits on time and memory. It shares nothing with this one.

What it runs is a module of mless with a function `prepare`, which returns the function that answers one question.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal, cast

from mless.errors import MlessError

_START_SECONDS = 120.0
#: The variables that the process inherits: where libraries lie, and how text and times are written. No key is among them.
_INHERITED = (
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "SYSTEMROOT",
    "TMPDIR",
    "TEMP",
    "TMP",
    "TZ",
)
# The same mless as here, by its place: no folder that it lies in needs to be on the process's path.
_START = """
import importlib.util, json, sys
path, home, module, limit, memory = json.loads(sys.argv[1])
sys.path[:] = path + [one for one in sys.path if one not in path]
spec = importlib.util.spec_from_file_location("mless", home + "/__init__.py", submodule_search_locations=[home])
sys.modules["mless"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["mless"])
from mless.guarded import serve
serve(module, limit, memory)
"""


class Guarded:
    """The parent's end. `limit` is in seconds per question, `memory` in bytes (where the system can limit it).

    `failed` makes the error of a process that does not start, from its cause.
    """

    def __init__(self, module: str, limit: float, memory: int, failed: Callable[[str], MlessError]) -> None:
        self._limit = limit
        start = [_import_path(), str(Path(__file__).parent), module, limit, memory]
        self._process = subprocess.Popen(
            # As -I, which would also ignore PYTHONHASHSEED; no other variable for Python is passed on.
            [sys.executable, "-P", "-s", "-c", _START, json.dumps(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(sys.executable).anchor,
            env=_environment(),
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A thread, because no portable call waits on a pipe for so many seconds.
        self._reader = threading.Thread(
            target=_forward_lines, args=(self._stream("stdout"), self._replies), daemon=True
        )
        self._reader.start()
        greeting = self._reply(_START_SECONDS)
        if greeting != {"ready": True}:
            self.end()
            cause = str(greeting.get("fault", "it did not start")) if isinstance(greeting, dict) else "it did not start"
            raise failed(cause)

    def _stream(self, name: Literal["stdin", "stdout"]) -> IO[bytes]:
        return cast("IO[bytes]", getattr(self._process, name))

    def ask(self, *question: object) -> dict[str, Any]:
        """The answer; `fault` in it is ``time``, ``memory`` or ``crash`` where there is none. After these `end` it."""
        try:
            self._stream("stdin").write(json.dumps(question).encode() + b"\n")
            self._stream("stdin").flush()
        except OSError:
            return {"fault": "crash"}
        reply = self._reply(self._limit)
        return {"fault": "time"} if reply is None else reply or {"fault": "crash"}

    def _reply(self, seconds: float) -> dict[str, Any] | None:
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else {}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for name in ("stdin", "stdout"):
            with contextlib.suppress(OSError):  # unsent bytes of a question to a dead process
                self._stream(name).close()


def _import_path() -> list[str]:
    """This process's path without the working directory: what lies there (a json.py, a re.py) must not run."""
    here = os.path.realpath(os.curdir)
    return [os.path.abspath(path) for path in sys.path if path and os.path.realpath(path) != here]


def _environment() -> dict[str, str]:
    """A clean environment. Hash order changes sympy's choices, so it is fixed."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def _forward_lines(stream: IO[bytes], replies: queue.SimpleQueue[str]) -> None:
    for line in stream:
        replies.put(line.decode())
    replies.put("")


def serve(module: str, limit: float, memory: int) -> None:
    """The process's end: questions on standard input, one JSON line each, until it closes."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies

    def say(**reply: object) -> None:
        print(json.dumps(reply), file=out, flush=True)

    try:
        answer: Callable[..., dict[str, Any]] = importlib.import_module(module).prepare()
    except Exception as fault:  # noqa: BLE001  whatever it is, the parent must hear of it
        say(fault=f"{type(fault).__name__}: {fault}")
        return
    import logging
    import signal

    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it answers through a pipe and writes no file
    timer = getattr(signal, "setitimer", None)
    say(ready=True)
    for line in sys.stdin:
        question = json.loads(line)
        if timer is not None:
            # If the parent is killed, this process must not run on: by default the alarm ends it.
            timer(signal.ITIMER_REAL, 2 * limit + 1)
        try:
            reply = answer(*question)
        except MemoryError:
            reply = {"fault": "memory"}
        if timer is not None:
            timer(signal.ITIMER_REAL, 0)
        say(**reply)
