"""Threads in which torch's operations run in a fixed number of threads each, whatever it is elsewhere in the process."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch


@functools.cache
def has_own_thread_count() -> bool:
    """Whether each thread has its own number of threads for operations; in other backends it is global."""
    return "backend: OpenMP" in torch.__config__.parallel_info()


def threads_of(count: int, each: int, name: str) -> ThreadPoolExecutor | None:
    """So many threads, whose operations run in `each` threads; None where no more threads can start."""
    ready = threading.Barrier(count + 1, timeout=60)

    def begin() -> None:
        # A thread that has never read the number takes the last one set anywhere.
        torch.set_num_threads(each)
        torch.get_num_threads()
        ready.wait()

    here = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, name, begin)
    try:
        for _ in range(count):
            pool.submit(int)
        ready.wait()
    except (RuntimeError, threading.BrokenBarrierError):
        ready.abort()
        pool.shutdown(wait=False)
        return None
    finally:
        torch.set_num_threads(here)  # what it also sets for threads to come
    return pool
