"""Lanes: threads with a model each, of the same weights."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mless
from mless.capture import lanes as of_lanes
from mless.capture.branching import Branches, branches
from mless.capture.lanes import Lane, Lanes
from mless.kernels.packed import PackedWeights
from mless.kernels.threads import has_own_thread_count
from mless.models import LoadedModel, describe, load, widening
from mless.models.twins import twin
from spelling import model_folder

pytestmark = pytest.mark.skipif(not has_own_thread_count(), reason="this build of torch has one number for all threads")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 3))
    yield torch.get_num_threads()
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return load(describe(str(model_folder(tmp_path / "tiny"))), head=True, dtype="float32")


@pytest.fixture
def row(model: LoadedModel) -> Branches:
    (prompt,) = mless.prompts(model, ["How many are 2 and 3?"], "none")
    return branches(prompt, [[5, 6, 7], [5, 8]])


@pytest.fixture
def lanes(model: LoadedModel, row: Branches, threads: int) -> Iterator[Lanes]:
    made = Lanes(model)
    made.open(row)
    yield made
    made.close()


@contextmanager
def entering(lane: Lane) -> Generator[None]:
    yield


@pytest.mark.parametrize(("threads", "count"), [(1, 1), (2, 2), (5, 4), (6, 3), (9, 3), (16, 4)], indirect=["threads"])
def test_there_are_up_to_four_and_few_threads_without_one(lanes: Lanes, threads: int, count: int) -> None:
    assert len(lanes) == count
    assert torch.get_num_threads() == threads
    found = [number for _, number in lanes.each(range(count), lambda *_: torch.get_num_threads(), entering)]
    assert found == [threads if count == 1 else threads // count] * count


def test_a_row_has_the_same_bits_in_every_lane(lanes: Lanes, row: Branches, threads: int) -> None:
    there = threading.Barrier(threads)

    def scored(lane: Lane, _: None, number: int) -> list[bytes]:
        there.wait(timeout=60)
        return [text.tobytes() for text in lane.scorer([row])[0].texts]

    found = [bits for _, bits in lanes.each(range(threads), scored, entering)]
    assert found == [found[0]] * threads


def test_every_task_is_done_once_and_each_lane_is_entered_once(lanes: Lanes, threads: int) -> None:
    entered: list[int] = []

    @contextmanager
    def noting(lane: Lane) -> Generator[str]:
        entered.append(id(lane.model.model))
        yield "inside"

    found = dict(lanes.each(range(50), lambda lane, inside, task: (inside, task * task), noting))
    assert found == {task: ("inside", task * task) for task in range(50)}
    assert len(entered) == len(set(entered)) == threads


@pytest.mark.parametrize("where", ["task", "entering"])
def test_a_fault_is_the_callers_and_no_further_task_begins(lanes: Lanes, where: str) -> None:
    begun: list[int] = []

    @contextmanager
    def failing(lane: Lane) -> Generator[None]:
        if where == "entering":
            raise ValueError("no")
        yield

    def run(lane: Lane, _: None, task: int) -> None:
        begun.append(task)
        if task == 5:
            raise ValueError("no")
        threading.Event().wait(0.01)

    with pytest.raises(ValueError, match="no"):
        list(lanes.each(range(1000), run, failing))
    assert len(begun) < 1000
    # They can be used again.
    assert dict(lanes.each([1], lambda *_: 2, entering)) == {1: 2}


def test_where_the_caller_ends_the_lanes_do(lanes: Lanes) -> None:
    begun: list[int] = []

    def run(lane: Lane, _: None, task: int) -> None:
        begun.append(task)
        threading.Event().wait(0.01)

    some = lanes.each(range(1000), run, entering)
    next(iter(some))
    some.close()  # pyright: ignore[reportAttributeAccessIssue]
    done = len(begun)
    assert done < 1000
    threading.Event().wait(0.05)
    assert len(begun) == done


def test_lanes_that_work_end_before_the_model_is_as_it_was(model: LoadedModel, row: Branches, threads: int) -> None:
    """Whoever asked may still hold what it was given, as a fault's traceback does."""
    lanes = Lanes(model)
    lanes.open(row)
    begun, going_on = list[int](), threading.Event()

    def run(lane: Lane, _: None, task: int) -> None:
        begun.append(task)
        going_on.wait(60)

    some = lanes.each(range(1000), lambda lane, entered, task: run(lane, entered, task) if task else None, entering)
    next(iter(some))
    threading.Timer(0.1, going_on.set).start()
    lanes.close()
    assert len(begun) <= threads
    assert len(lanes) == 1
    assert not [one for one in threading_names() if one.startswith("mless-lane")]
    some.close()  # pyright: ignore[reportAttributeAccessIssue]


def threading_names() -> list[str]:
    return [one.name for one in threading.enumerate()]


def test_weights_that_are_widened_for_each_product_have_one_lane(
    model: LoadedModel, row: Branches, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lane would need memory for them."""
    monkeypatch.setattr(widening, "_SMALL", 1)
    widening.keep_narrow(model.model.to(torch.bfloat16))
    assert any(isinstance(one, widening.Narrow) for one in model.model.parameters())
    lanes = Lanes(model)
    lanes.open(row)
    assert len(lanes) == 1
    assert not lanes.packed
    lanes.close()


@pytest.mark.parametrize("what", ["other bits", "fails", "no memory", "none", "no threads"])
def test_where_the_other_lanes_are_of_no_use_there_is_one(
    model: LoadedModel, row: Branches, threads: int, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    def other(own: Any) -> Any:
        if what == "none":
            return None
        found: Any = twin(own)
        if what == "other bits":
            found.lm_head.weight = torch.nn.Parameter(found.lm_head.weight * 1.5)
        elif what == "fails":
            found.model.layers = None
        elif what == "no memory":
            found.model.norm.forward = refuse
        return found

    monkeypatch.setattr(of_lanes, "twin", other)
    if what == "no threads":
        monkeypatch.setattr(of_lanes, "threads_of", lambda *_: None)
    lanes = Lanes(model)
    lanes.open(row)
    assert len(lanes) == 1
    ((_, number),) = lanes.each([0], lambda *_: torch.get_num_threads(), entering)
    assert number == threads


needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")


def bits(lanes: Lanes, row: Branches) -> list[list[bytes]]:
    def scored(lane: Lane, _: None, number: int) -> list[bytes]:
        return [text.tobytes() for text in lane.scorer([row])[0].texts]

    return [found for _, found in lanes.each(range(2 * len(lanes)), scored, entering)]


@pytest.fixture
def known(model: LoadedModel, row: Branches, threads: int, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The row's bits in lanes without packed weights."""
    plain = Lanes(model)
    with monkeypatch.context() as patched:
        patched.setattr(of_lanes, "PackedWeights", lambda _: [])
        plain.open(row)
    assert len(plain) == threads
    assert not plain.packed
    found = bits(plain, row)[0]
    plain.close()
    return found


@needs_mkl
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_packed_weights_give_the_bits_of_plain_ones(
    model: LoadedModel, row: Branches, threads: int, known: list[bytes]
) -> None:
    before = [dict(vars(module)) for module in model.model.modules()]
    lanes = Lanes(model)
    lanes.open(row)
    assert lanes.packed
    assert bits(lanes, row) == [known] * 2 * threads
    lanes.close()
    assert not lanes.packed
    # Nothing of it is left in the model.
    assert [dict(vars(module)) for module in model.model.modules()] == before
    assert bits(lanes, row) == bits(Lanes(model), row)


@needs_mkl
def test_packed_weights_are_given_back_where_memory_is_short(
    model: LoadedModel, row: Branches, threads: int, known: list[bytes]
) -> None:
    lanes = Lanes(model)
    lanes.open(row)
    lanes.unpack()
    assert not lanes.packed
    assert len(lanes) == threads
    assert bits(lanes, row) == [known] * 2 * threads
    lanes.close()


@needs_mkl
@pytest.mark.parametrize("what", ["other bits", "fails"])
def test_weights_that_give_other_bits_are_not_packed(
    model: LoadedModel,
    row: Branches,
    threads: int,
    known: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    def other(self: PackedWeights, module: torch.nn.Linear, given: torch.Tensor) -> torch.Tensor:
        if what == "fails":
            raise RuntimeError("no")
        return torch.nn.functional.linear(given, module.weight * 1.001, module.bias)

    monkeypatch.setattr(PackedWeights, "product", other)
    lanes = Lanes(model)
    lanes.open(row)
    assert not lanes.packed
    assert bits(lanes, row) == [known] * 2 * threads
    lanes.close()
