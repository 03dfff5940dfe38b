import threading

import pytest
import torch

from mless.kernels.threads import has_own_thread_count, threads_of


@pytest.mark.parametrize("each", [1, 2])
def test_every_thread_has_its_number_and_the_caller_keeps_its_own(each: int) -> None:
    if not has_own_thread_count():
        pytest.skip("this build of torch has one number for all threads")
    before, there = torch.get_num_threads(), threading.Barrier(3)
    torch.set_num_threads(3)
    try:
        pool = threads_of(3, each, "some")
        assert pool is not None

        def number() -> int:
            there.wait(timeout=60)  # else one thread might answer three times
            return torch.get_num_threads()

        assert [one.result() for one in [pool.submit(number) for _ in range(3)]] == [each] * 3
        assert torch.get_num_threads() == 3
        pool.shutdown()
    finally:
        torch.set_num_threads(before)


def test_where_no_thread_can_be_started_there_is_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start, started = torch.get_num_threads(), threading.Thread.start, []

    def once(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(start(self))

    monkeypatch.setattr(threading.Thread, "start", once)
    assert threads_of(3, 1, "some") is None
    assert torch.get_num_threads() == before
