"""What is compiled ahead runs beside the caller, and no fault of it reaches the caller."""

from __future__ import annotations

import threading

from mless.kernels import compiled_ahead


def test_calls_run_in_their_order_beside_the_caller() -> None:
    begun, seen = threading.Event(), list[tuple[int, bool]]()

    def call(number: int) -> None:
        begun.wait(timeout=60)
        seen.append((number, threading.current_thread() is threading.main_thread()))

    thread = compiled_ahead(lambda: call(1), lambda: call(2))
    assert seen == []
    begun.set()
    thread.join(timeout=60)
    assert seen == [(1, False), (2, False)]


def test_a_call_that_fails_leaves_the_others_and_the_caller_alone() -> None:
    seen: list[int] = []

    def fails() -> None:
        raise RuntimeError("no compiler")

    compiled_ahead(fails, lambda: seen.append(1)).join(timeout=60)
    assert seen == [1]
