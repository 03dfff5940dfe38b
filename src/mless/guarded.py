"""A separate Python process that answers questions as JSON lines, within limits on time and memory. It shares nothing with this one.

What it runs is a module of mless with a function `prepare`, which returns the function that answers one question. `Replaced` is such a
process that is started again after a fault; `ask_all` shares many questions out among several.
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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, cast

from mless.errors import MlessError

_START_SECONDS = 120.0
#: Faults after which a process is not to be used again.
_ENDING = ("time", "memory", "crash")
#: Questions that are sent together, at most, and their bytes: a pipe holds 64 KB, and a process that is busy does not empty it.
_BATCH = 128
_BATCH_BYTES = 1 << 14
#: Answers are handed over together, and at least this often.
_HAND_OVER_SECONDS = 0.2
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

    `failed` makes the error of a process that does not start, from its cause. It is raised at the first question, so that a process can be
    killed while it starts.
    """

    def __init__(self, module: str, limit: float, memory: int, failed: Callable[[str], MlessError]) -> None:
        self._limit, self._failed = limit, failed
        self._greeted = False
        start = [_import_path(), str(Path(__file__).parent), module, limit, memory]
        try:
            self._process = subprocess.Popen(
                # As -I, which would also ignore PYTHONHASHSEED; no other variable for Python is passed on.
                [sys.executable, "-P", "-s", "-c", _START, json.dumps(start)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path(sys.executable).anchor,
                env=_environment(),
            )
        except OSError as fault:
            raise failed(f"no process could be started: {fault.strerror or fault}") from None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A thread, because no portable call waits on a pipe for so many seconds.
        self._reader = threading.Thread(
            target=_forward_lines, args=(self._stream("stdout"), self._replies), daemon=True
        )
        try:
            self._reader.start()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _greet(self) -> None:
        """Wait until it has started."""
        greeting = self._reply(_START_SECONDS)
        if greeting != {"ready": True}:
            cause = greeting.get("fault") if greeting else None
            raise self._failed(str(cause or "it did not start"))
        self._greeted = True

    def _stream(self, name: Literal["stdin", "stdout"]) -> IO[bytes]:
        return cast("IO[bytes]", getattr(self._process, name))

    def ask_in_turn(self, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """The answers to questions that are sent together, in order, each within the limit.

        `fault` in an answer is ``time``, ``memory`` or ``crash`` where there is none; that is the last one, and `end` has to follow. `end` has to
        follow as well where not every answer was taken. Together the lines must fit into a pipe, which is read between two answers only.
        """
        if not self._greeted:
            self._greet()
        try:
            self._stream("stdin").write(b"".join(lines))
            self._stream("stdin").flush()
        except OSError:
            yield {"fault": "crash"}
            return
        for _ in lines:
            reply = self._reply(self._limit)
            reply = {"fault": "time"} if reply is None else reply or {"fault": "crash"}
            yield reply
            if reply.get("fault") in _ENDING:
                return

    def _reply(self, seconds: float) -> dict[str, Any] | None:
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else {}

    def kill(self) -> None:
        """A thread that waits for an answer gets a fault, and has to `end` it."""
        self._process.kill()

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._reader.join()
        for name in ("stdin", "stdout"):
            with contextlib.suppress(OSError):  # unsent bytes of a question to a dead process
                self._stream(name).close()


class Replaced:
    """A guarded process that starts when it is first asked, or at `begin`, and again after a fault. For one thread at a time."""

    def __init__(self, start: Callable[[], Guarded]) -> None:
        self._start = start
        self.process: Guarded | None = None
        self._stopped = False

    def begin(self) -> None:
        """Starts it now, for questions that come later. Why it does not start is said at the first one."""
        with contextlib.suppress(MlessError):
            self.process = self.process or self._start()

    def ask(self, *question: object) -> dict[str, Any]:
        return next(self.ask_in_turn([_line(question)]))

    def ask_in_turn(self, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """The answer to every question, in order. A fault is the answer to its own question only."""
        done, again = 0, False
        try:
            while done < len(lines) and not self._stopped:
                if self.process is None:
                    self.process = self._start()
                    if self._stopped:
                        return
                for reply in self.process.ask_in_turn(lines[done:]):
                    fault = reply.get("fault")
                    if fault in _ENDING:
                        self.end()
                    # It may have died from an earlier question or from outside; only a fresh process's death is due to this one.
                    again = fault in ("memory", "crash") and not again
                    if again:
                        break
                    done += 1
                    yield reply
        finally:
            # An answer that nobody took, because of an interrupt or a timeout of the caller's, would be taken for that to the next question.
            if done < len(lines):
                self.end()

    def stop(self) -> None:
        """From another thread: no more answers. The thread that asks has to `end` it."""
        self._stopped = True
        if process := self.process:
            process.kill()

    def end(self) -> None:
        """The next question would start another."""
        if self.process is not None:
            self.process.end()
            self.process = None


#: A batch's answers with the first one's place; at a thread's end None, or the fault that ended it.
_Answers = queue.SimpleQueue[tuple[int, list[dict[str, Any]]] | BaseException | None]


def ask_all(
    workers: Sequence[Replaced], questions: Sequence[Sequence[object]], take: Callable[[int, dict[str, Any]], None]
) -> None:
    """Shares the questions out among the workers, and ends them. `take` gets each one's place and answer, as they come, in this thread.

    Processes that do not start leave their questions to the others. Where none starts, that is an error.
    """
    answers: _Answers = queue.SimpleQueue()
    batches = _Batches(questions, len(workers))

    threads: list[threading.Thread] = []
    left = len(questions)
    try:
        for worker in workers:
            thread = threading.Thread(target=_work, args=(worker, batches, answers), daemon=True)
            thread.start()
            threads.append(thread)
        working = len(threads)
        while left and working:
            batch = answers.get()
            if isinstance(batch, BaseException):
                raise batch
            if batch is None:
                working -= 1
                continue
            first, taken = batch
            left -= len(taken)
            for place, answer in enumerate(taken, first):
                take(place, answer)
        # What processes gave back that did not start: one more is tried, and says why.
        for first, lines in iter(batches.next, None):
            for place, answer in enumerate(workers[0].ask_in_turn(lines), first):
                take(place, answer)
    finally:
        batches.stop()
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.end()


def _work(worker: Replaced, batches: _Batches, answers: _Answers) -> None:
    """A thread's part: ask batch after batch, and say at the end that it has ended, or why."""
    fault: BaseException | None = None
    try:
        for first, lines in iter(batches.next, None):
            place, taken, since = first, list[dict[str, Any]](), time.monotonic()
            try:
                for answer in worker.ask_in_turn(lines):
                    taken.append(answer)
                    # Several at once: to wake the thread that takes them costs as much as judging a plain answer.
                    if time.monotonic() - since > _HAND_OVER_SECONDS:
                        answers.put((place, taken))
                        place, taken, since = place + len(taken), [], time.monotonic()
            except MlessError:
                batches.give_back(place + len(taken), lines[place + len(taken) - first :])
                return
            finally:
                answers.put((place, taken))
    except BaseException as caught:  # noqa: BLE001  the thread that waits for answers must hear of it
        fault = caught
    finally:
        worker.end()
        answers.put(fault)


class _Batches:
    """Hands out questions that are sent together, as lines: many at first, so that no process waits, and one by one towards the end."""

    def __init__(self, questions: Sequence[Sequence[object]], processes: int) -> None:
        self._questions = questions
        self._processes = processes
        self._next = 0
        self._returned: list[tuple[int, list[bytes]]] = []
        self._lock = threading.Lock()

    def next(self) -> tuple[int, list[bytes]] | None:
        """The first one's place, and the lines; None at the end."""
        with self._lock:
            if self._returned:
                return self._returned.pop()
            first, lines, size = self._next, list[bytes](), 0
            left = len(self._questions) - first
            for question in self._questions[first : first + max(1, min(_BATCH, left // (4 * self._processes)))]:
                line = _line(question)
                size += len(line)
                if lines and size > _BATCH_BYTES:
                    break
                lines.append(line)
            self._next += len(lines)
            return (first, lines) if lines else None

    def give_back(self, first: int, lines: list[bytes]) -> None:
        """Questions that were handed out and not asked."""
        with self._lock:
            self._returned.append((first, lines))

    def stop(self) -> None:
        with self._lock:
            self._next = len(self._questions)
            self._returned.clear()


def usable_cores() -> int:
    """The cores that this process may use: by its affinity, and by its container's share of time."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit ("max")
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split())
        cores = min(cores, -(-quota // period))
    return max(1, cores)


def _line(question: Sequence[object]) -> bytes:
    return json.dumps(question).encode() + b"\n"


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
