"""Kernels compiled ahead on a GPU: a machine's first study would wait several seconds for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


def in_background(*calls: Callable[[], object]) -> threading.Thread:
    """Runs the calls one after another in a thread, while the caller does something else. Each launches a kernel once, and so has it compiled.

    The caller joins the thread before anything that a launch would disturb, as the capture of a graph.
    """

    def run() -> None:
        for call in calls:
            with suppress(Exception):  # the study itself launches the kernel later, and gets the fault
                call()

    # No daemon: a process that ends while Triton compiles would crash.
    thread = threading.Thread(target=run, name="mless-kernels")
    thread.start()
    return thread
