"""What is compiled ahead runs beside the caller, and no fault of it reaches the caller."""

from __future__ import annotations

import threading

from mless.kernels import in_background


def test_calls_run_in_their_order_beside_the_caller() -> None:
    begun, seen = threading.Event(), list[tuple[int, bool]]()

    def call(number: int) -> None:
        begun.wait(timeout=60)
        seen.append((number, threading.current_thread() is threading.main_thread()))

    thread = in_background(lambda: call(1), lambda: call(2))
    assert seen == []
    begun.set()
    thread.join(timeout=60)
    assert seen == [(1, False), (2, False)]


def test_a_call_that_fails_leaves_the_others_and_the_caller_alone() -> None:
    seen: list[int] = []

    def fails() -> None:
        raise RuntimeError("no compiler")

    in_background(fails, lambda: seen.append(1)).join(timeout=60)
    assert seen == [1]
