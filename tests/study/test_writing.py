"""Results are made and stored beside the measuring, in order, and nothing that was handed in is lost."""

from __future__ import annotations

import sys
import threading

import pytest

from mless.study import writing
from mless.study.writing import Writing


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "usable_cores", lambda: 8)


def test_things_are_stored_in_the_order_in_which_they_were_handed_in() -> None:
    first = threading.Event()
    stored: list[int] = []

    def make(number: int) -> int:
        if number == 0:
            assert first.wait(30)  # the others are made before it
        else:
            first.set()
        return number * number

    with Writing(make, stored.append) as queue:
        for number in range(50):
            queue.put(number)
    assert stored == [n * n for n in range(50)]


def test_threads_take_turns_more_often_while_anything_is_written_and_as_before_afterwards() -> None:
    usual = sys.getswitchinterval()
    one, other = (Writing(int, lambda _: None) for _ in range(2))
    one.__enter__()
    short = sys.getswitchinterval()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() == short < usual
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual


def test_only_some_wait_at_a_time() -> None:
    go, made, lock = threading.Event(), list[int](), threading.Lock()

    def make(number: int) -> int:
        with lock:
            made.append(number)
        assert go.wait(30)
        return number

    stored: list[int] = []
    with Writing(make, stored.append) as queue:
        for number in range(12):  # three for each of the four threads
            queue.put(number)
        full = threading.Thread(target=queue.put, args=(12,))
        full.start()
        full.join(0.2)
        assert full.is_alive(), "the thirteenth has to wait"
        go.set()
        full.join()
    assert stored == list(range(13))


@pytest.mark.parametrize("where", ["make", "store"])
def test_a_fault_is_raised_where_things_are_handed_in_and_nothing_is_stored_after_it(where: str) -> None:
    stored: list[int] = []

    def make(number: int) -> int:
        if where == "make" and number == 3:
            raise OSError("no room")
        return number

    def store(number: int) -> None:
        if where == "store" and number == 3:
            raise OSError("no room")
        stored.append(number)

    def hand_in() -> None:
        with Writing(make, store) as queue:
            for number in range(1000):
                queue.put(number)

    with pytest.raises(OSError, match="no room"):
        hand_in()
    assert stored == [0, 1, 2]


def test_an_interrupt_loses_nothing_that_was_handed_in() -> None:
    stored: list[int] = []

    def hand_in() -> None:
        with Writing(lambda number: number, stored.append) as queue:
            for number in range(10):
                queue.put(number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hand_in()
    assert stored == list(range(10))
