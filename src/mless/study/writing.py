"""Stores what was measured while the next group is measured: tables are made and encoded by some threads, and written by one.

Only a few units wait at a time, so memory stays bounded: where writing is slower than measuring, measuring waits. What was handed in is
stored even if the measuring is then interrupted; after a fault of the writing itself nothing more is.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from mless.guarded import usable_cores

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")

#: More threads than this keep the interpreter's lock from the thread that starts the GPU's kernels (benchmarks/tried.md).
_MOST_THREADS = 4
#: For so long a thread may keep the interpreter's lock while others want it; Python's own 5 ms are as long as a layer takes.
_SWITCH_SECONDS = 0.0005


class _Switching:
    """Python's switch interval is the whole process's: it is short while anything is being written, and then as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open, self._usual = 0, 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._open:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._usual))
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                sys.setswitchinterval(self._usual)


_SWITCHING = _Switching()


class Writing(Generic[_Given, _Made]):
    """A queue behind which `make` runs in several threads, and `store` in one, in the order in which things were handed in."""

    def __init__(
        self, make: Callable[[_Given], _Made], store: Callable[[_Made], None], *, measuring_here: bool = True
    ) -> None:
        """Without `measuring_here` this process has nothing else to do, so all of its cores make."""
        self._make, self._store = make, store
        threads = max(1, min(_MOST_THREADS, usable_cores() // 2) if measuring_here else usable_cores())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mless-encoding")
        self._waiting: queue.Queue[Future[_Made] | None] = queue.Queue()
        self._room = threading.Semaphore(min(3 * threads, threads + 8))
        self._fault: BaseException | None = None
        self._writer = threading.Thread(target=self._write, name="mless-writing", daemon=True)

    def __enter__(self) -> Writing[_Given, _Made]:
        # The thread that measures waits so long for one of these whenever torch has let go of the interpreter, as it does in every call.
        _SWITCHING.begin()
        self._writer.start()
        return self

    def put(self, given: _Given) -> None:
        """Hand something in. Waits while too much is under way; raises what went wrong with something earlier."""
        self._room.acquire()
        if self._fault is not None:
            self._room.release()
            raise self._fault
        self._waiting.put(self._pool.submit(self._make, given))

    def _write(self) -> None:
        while (future := self._waiting.get()) is not None:
            try:
                if self._fault is None:
                    self._store(future.result())
            except BaseException as fault:  # noqa: BLE001 raised again where the results are handed in
                self._fault = fault
            finally:
                self._room.release()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.put(None)
        try:
            # A second interrupt must not leave a thread behind that goes on writing.
            while self._writer.is_alive():
                with contextlib.suppress(KeyboardInterrupt):
                    self._writer.join()
            self._pool.shutdown()
        finally:
            _SWITCHING.end()
        if self._fault is not None and fault is None:
            raise self._fault
