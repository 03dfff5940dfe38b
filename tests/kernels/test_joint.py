"""Attention and what its keys receive at once, on a CPU, against both computed in double precision."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from mless import kernels
from mless.kernels import joint, reference

#: heads, key heads, tokens, head size, value size: before, at and beyond the border of small blocks, and groups that divide no block evenly
SIZES = {
    "one token": (3, 1, 1, 16, 16),
    "GQA3": (6, 2, 700, 64, 64),
    "GQA7": (14, 2, 640, 64, 64),
    "MHA, values differ": (4, 4, 333, 80, 48),
    "MQA, a border": (4, 1, 512, 32, 32),
    "MLA": (2, 2, 130, 192, 128),
}


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def given(
    heads: int, kv: int, tokens: int, dim: int, width: int, *, rows: int = 1, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + dim)
    shapes = ((heads, dim), (kv, dim), (kv, width))
    q, k, v = (torch.randn(rows, tokens, n, wide, generator=generator).transpose(1, 2) for n, wide in shapes)
    return q * size, k, v


#: From which key on a query sees: what a window, a chunk, a document, padding on the left leave.
MASKS = {
    "a window": lambda at: (at - 99).clamp(min=0),
    "a narrow window": lambda at: (at - 1).clamp(min=0),
    "itself only": lambda at: at,
    "chunks": lambda at: at // 170 * 170,
    "documents": lambda at: torch.where(at < 90, 0, torch.where(at < 601, 90, 601)),
    "padding on the left": lambda at: torch.where(at < 237, at, 237),
}


def asked(lengths: list[int], *, two: bool = True, mask: str | None = None) -> dict[str, object]:
    tokens = max(lengths)
    at = torch.arange(tokens)
    real = at < torch.tensor(lengths)[:, None]
    sets = torch.stack([real, real & (at % 3 != 1)], 1) if two else real[:, None].expand(-1, 2, -1)
    starts = torch.zeros(len(lengths), tokens, dtype=torch.int32)
    if mask is not None:
        # Behind a row's end it sees itself only, as capturing has it.
        starts = torch.where(real, MASKS[mask](at), at).int()
    visible = kernels.Intervals(starts, tokens, whole=mask is None)
    # Spans of a token do not depend on how long the batch is.
    return {"visible": visible, "sets": sets, "spans": (at % 5).expand(len(lengths), -1), "n_spans": 5}


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Any = None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    keys, values = (one.double().repeat_interleave(groups, 1) for one in (k, v))
    scores = q.double() @ keys.transpose(-1, -2) * scale
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() if visible is None else visible(0, q.shape[2])
    return (torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ values).transpose(1, 2)


@functools.cache
def truth(size: str, *, two: bool = True, mask: str | None = None) -> tuple[Tensor, kernels.Sums]:
    """Both in double precision. It takes twenty times as long as what is tested, so that both numbers of threads have one."""
    q, k, v = given(*SIZES[size])
    what = asked([q.shape[2]], two=two, mask=mask)
    received = reference.received(q, k, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    return attention(q, k, v, 0.2, what["visible"] if mask else None), received


@pytest.mark.parametrize("two", [True, False], ids=["two sets", "one set"])
@pytest.mark.parametrize("size", SIZES)
def test_both_are_right(size: str, two: bool, threads: int) -> None:
    q, k, v = given(*SIZES[size])
    what = asked([q.shape[2]], two=two)
    out, sums = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    attended, wanted = truth(size, two=two)
    torch.testing.assert_close(out.double(), attended, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.received.double(), wanted.received.double(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(sums.mass.double(), wanted.mass.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(sums.counts, wanted.counts)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", ["GQA3", "MQA, a border"])
def test_what_a_mask_hides_is_neither_looked_at_nor_added(mask: str, size: str, threads: int) -> None:
    q, k, v = given(*SIZES[size])
    what = asked([q.shape[2]], mask=mask)
    out, sums = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    attended, wanted = truth(size, mask=mask)
    torch.testing.assert_close(out.double(), attended, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.received.double(), wanted.received.double(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(sums.mass.double(), wanted.mass.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(sums.counts, wanted.counts)


def test_a_process_may_have_another_device_for_its_default() -> None:
    q, k, v = given(*SIZES["GQA3"])
    what = asked([q.shape[2]], mask="a window")
    here, sums = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        there, others = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    assert torch.equal(there, here)
    assert torch.equal(others.received, sums.received)


def test_a_windows_cost_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = given(4, 2, 2000, 16, 16)
    widths: list[int] = []
    memory = joint._memory

    def watched(what: str, *shape: int) -> Tensor:
        widths.extend([shape[-1]] if what == "scores" else [])
        return memory(what, *shape)

    monkeypatch.setattr(joint, "_memory", watched)
    joint.attended(q, k, v, scale=0.2, **asked([2000], mask="a window"))  # pyright: ignore[reportArgumentType]
    assert max(widths) <= 100 + 16 + 128


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many key heads each pass over a prompt was for."""
    passes: list[int] = []
    added = joint._Prompts._added
    monkeypatch.setattr(
        joint._Prompts, "_added", lambda self, heads: (passes.append(len(heads)), added(self, heads))[1]
    )
    return passes


@pytest.mark.parametrize("shift", [400.0, -400.0], ids=["large", "small"])
def test_scores_beyond_the_range_of_floats(shift: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = given(6, 2, 700, 64, 64)
    q[..., 0] += shift
    k[..., 0] = 10.0
    what, passes = asked([700]), counted(monkeypatch)
    out, sums = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    assert passes == [2, 2]
    # A score of a thousand is right to a ten-thousandth in fp32, and so is its exponential.
    wanted = reference.received(q, k, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(sums.received.double(), wanted.received.double(), rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(out.double(), attention(q, k, v, 0.2), rtol=5e-3, atol=5e-3)


def test_some_steep_queries_leave_the_others_bits_alone(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = given(9, 3, 700, 64, 64)
    steep = torch.rand(700, generator=torch.Generator().manual_seed(1)) < 0.02
    assert 0 < int(steep.sum()) < 40
    large = q.clone()
    large[:, :3, steep] *= 100.0  # heads of the first key head
    what, passes = asked([700]), counted(monkeypatch)
    plain, _ = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    out, sums = joint.attended(large, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    assert passes == [3, 3, 1]
    assert torch.equal(out[0, ~steep], plain[0, ~steep])
    assert torch.equal(out[0, :, 3:], plain[0, :, 3:])
    wanted = reference.received(large, k, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(sums.received.double(), wanted.received.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_lose_nothing_but_the_rounding_of_the_output(dtype: torch.dtype) -> None:
    q, k, v = (one.to(dtype) for one in given(*SIZES["GQA3"]))
    what = asked([q.shape[2]])
    out, sums = joint.attended(q, k, v, scale=0.125, **what)  # pyright: ignore[reportArgumentType]
    exact, same = joint.attended(q.float(), k.float(), v.float(), scale=0.125, **what)  # pyright: ignore[reportArgumentType]
    assert torch.equal(out, exact.to(dtype))
    assert torch.equal(sums.received, same.received)


@pytest.mark.parametrize("mask", [None, "a window", "documents"])
@pytest.mark.parametrize("size", [1.0, 40.0], ids=["plain", "steep"])
def test_a_prompt_has_the_same_bits_alone_and_in_a_batch(size: float, mask: str | None, threads: int) -> None:
    lengths = [700, 1, 513, 64, 640]
    q, k, v = given(6, 2, 700, 64, 64, rows=5, size=size)
    what = asked(lengths, mask=mask)
    out, sums = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    for row, n in enumerate(lengths):
        one = slice(row, row + 1)
        alone, its = joint.attended(q[one, :, :n], k[one, :, :n], v[one, :, :n], scale=0.2, **asked([n], mask=mask))  # pyright: ignore[reportArgumentType]
        assert torch.equal(alone[0], out[row, :n])
        assert torch.equal(its.received[0], sums.received[row, ..., :n])
        assert torch.equal(its.mass[0], sums.mass[row])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "longest"),
    [
        (9, 3, 32, 130), (8, 8, 32, 130), (8, 1, 32, 130), (9, 3, 64, 150), (4, 2, 128, 300), (4, 2, 64, 600),
        pytest.param(32, 32, 32, 130, marks=pytest.mark.slow), pytest.param(40, 1, 32, 130, marks=pytest.mark.slow),
        pytest.param(14, 2, 64, 450, marks=pytest.mark.slow), pytest.param(28, 4, 128, 200, marks=pytest.mark.slow),
    ],
    ids=["GQA", "MHA", "MQA", "of 64", "of 128", "longer", "MHA, many", "MQA, many", "many of 64", "many of 128"],
)  # fmt: skip
def test_short_prompts_that_begin_together_have_the_same_bits_alone(
    heads: int, kv_heads: int, dim: int, longest: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [longest, 1, 16, 64, 65, longest - 1, *range(2, longest - 10, longest // 5)]
    monkeypatch.setattr(joint, "_TOGETHER", 8 * longest)
    assert len(lengths) * longest > joint._TOGETHER
    q, k, v = given(heads, kv_heads, longest, dim, dim, rows=len(lengths))
    what = asked(lengths)
    out, sums = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    wanted = reference.received(q, k, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(sums.received.double(), wanted.received.double(), rtol=2e-6, atol=2e-6)
    for row, n in enumerate(lengths):
        one = slice(row, row + 1)
        alone, its = joint.attended(q[one, :, :n], k[one, :, :n], v[one, :, :n], scale=0.2, **asked([n]))  # pyright: ignore[reportArgumentType]
        assert torch.equal(alone[0], out[row, :n])
        assert torch.equal(its.received[0], sums.received[row, ..., :n])
        assert torch.equal(its.mass[0], sums.mass[row])


def test_threads_change_no_bit_of_what_workers_compute_and_stay_as_they_were() -> None:
    q, k, v = given(9, 3, 1500, 64, 64)
    before = torch.get_num_threads()
    found = []
    try:
        for n in (2, 3):
            torch.set_num_threads(n)
            found.append(joint.attended(q, k, v, scale=0.2, **asked([1500])))  # pyright: ignore[reportArgumentType]
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)
    (one, its), (other, others) = found
    assert torch.equal(one, other)
    assert torch.equal(its.received, others.received)


def test_it_serves_whole_prompts_without_gradients_only() -> None:
    q, k, v = given(*SIZES["GQA3"])
    visible = asked([700])["visible"]
    assert isinstance(visible, kernels.Intervals)
    assert joint.serves(q, k, v, visible)
    assert not joint.serves(q[:, :, 10:], k, v, visible)
    assert not joint.serves(q.double(), k, v, visible)
    assert not joint.serves(q.requires_grad_(), k, v, visible)
    with torch.no_grad():
        assert joint.serves(q, k, v, visible)
    q = q.detach()
    assert joint.serves(q, k, v, kernels.Intervals(torch.arange(700, dtype=torch.int32)[None], 700))
    assert not joint.serves(q, k, v, kernels.Intervals(visible.starts, 710, whole=True))


def test_it_works_in_every_mode_one_after_the_other() -> None:
    """What is kept between calls was made in one mode and is used in another."""
    q, k, v = given(*SIZES["GQA3"])
    what = asked([700])
    with torch.inference_mode():
        first, _ = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        second, _ = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    third, _ = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    second += 1  # an ordinary tensor


def test_without_threads_of_its_own_it_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = given(9, 3, 900, 64, 64)
    with_threads = joint.attended(q, k, v, scale=0.2, **asked([900]))  # pyright: ignore[reportArgumentType]
    for name, instead in (("has_own_thread_count", lambda: False), ("_pool", lambda workers: None)):
        with monkeypatch.context() as patch:
            patch.setattr(joint, name, instead)
            out, sums = joint.attended(q, k, v, scale=0.2, **asked([900]))  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(out, with_threads[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sums.received, with_threads[1].received, rtol=1e-6, atol=1e-6)


def test_a_fault_in_a_worker_is_the_callers(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    q, k, v = given(9, 3, 900, 64, 64)
    add = joint._Prompts._add

    def faulty(self: object, heads: slice, block: tuple[int, int], sums: Tensor) -> None:
        if block[0] > 700:
            raise MemoryError("no room")
        add(self, heads, block, sums)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(joint._Prompts, "_add", faulty)
    with pytest.raises(MemoryError, match="no room"):
        joint.attended(q, k, v, scale=0.2, **asked([900]))  # pyright: ignore[reportArgumentType]
    monkeypatch.undo()
    out, _ = joint.attended(q, k, v, scale=0.2, **asked([900]))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(out.double(), attention(q, k, v, 0.2), rtol=1e-5, atol=1e-5)


def test_where_a_task_fails_the_others_end_at_their_next_step(threads: int) -> None:
    begun: list[int] = []
    steps: list[int] = []
    at_work: set[int] = set()

    def one(task: int) -> Iterator[None]:
        begun.append(task)
        at_work.add(task)
        try:
            for _ in range(100):
                if task == 1:
                    raise IndexError("no such thing")
                time.sleep(0.01)
                steps.append(task)
                yield
        finally:
            at_work.discard(task)

    with pytest.raises(IndexError, match="no such thing"):
        joint._do(one, [0, 1, 2, 3] if threads > 1 else [1, 2], 9)
    assert not at_work
    assert len(begun) <= threads
    assert len(steps) <= 2 * threads


def test_a_pool_that_another_thread_has_ended_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        q, k, v = given(9, 3, 900, 64, 64)
        out, sums = joint.attended(q, k, v, scale=0.2, **asked([900]))  # pyright: ignore[reportArgumentType]
        pool, there = joint._pool, joint._pool(3)
        assert there is not None
        given_out: list[object] = []

        def ended_meanwhile(workers: int) -> ThreadPoolExecutor | None:
            if not given_out:
                given_out.append(there)
                there.shutdown()
                joint._POOLS.clear()
                return there
            return pool(workers)

        monkeypatch.setattr(joint, "_pool", ended_meanwhile)
        again, same = joint.attended(q, k, v, scale=0.2, **asked([900]))  # pyright: ignore[reportArgumentType]
        assert given_out
        assert torch.equal(again, out)
        assert torch.equal(same.received, sums.received)
    finally:
        torch.set_num_threads(before)


def test_where_no_pool_begins_anything_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ThreadPoolExecutor(3)
    ended.shutdown()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(joint, "_POOLS", {(os.getpid(), 3): ended})
    done: list[int] = []
    joint._do(lambda task: iter(done.append(task) for _ in range(1)), [3, 1, 2], 9)  # pyright: ignore[reportArgumentType]
    assert done == [3, 1, 2]


def test_two_threads_may_ask_at_once(threads: int) -> None:
    given_of = [given(9, 3, tokens, 64, 64) for tokens in (900, 700)]

    def of(which: int) -> Tensor:
        q, k, v = given_of[which]
        return joint.attended(q, k, v, scale=0.2, **asked([q.shape[2]]))[0]  # pyright: ignore[reportArgumentType]

    alone = [of(0), of(1)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for which, found in enumerate(pool.map(of, (0, 1))):
                assert torch.equal(found, alone[which])


def test_a_long_prompts_blocks_shrink_and_cover_it() -> None:
    for groups in (1, 3, 7, 64):
        blocks = joint._blocks(200_000, groups)
        assert [first for first, _ in blocks] == [
            0,
            *torch.tensor([rows for _, rows in blocks]).cumsum(0).tolist()[:-1],
        ]
        assert sum(blocks[-1]) >= 200_000
        assert all(rows % 16 == 0 for _, rows in blocks)
        assert max(groups * rows * (first + rows) for first, rows in blocks) <= max(1 << 24, groups * 16 * 200_100)
        assert joint._blocks(5000, groups) == blocks[: len(joint._blocks(5000, groups))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lay_in_its_memory_reaches_no_number(dtype: torch.dtype, threads: int) -> None:
    q, k, v = (one.to(dtype) for one in given(*SIZES["GQA3"]))
    what = asked([700])
    out, sums = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    # Scores that are no numbers are left behind in every thread.
    bad, _ = joint.attended(q, k * torch.nan, v * torch.nan, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    assert torch.isnan(bad).all()
    again, same = joint.attended(q, k, v, scale=0.2, **what)  # pyright: ignore[reportArgumentType]
    assert torch.equal(again, out)
    assert torch.equal(same.received, sums.received)
