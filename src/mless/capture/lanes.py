"""Rows that run side by side on a CPU: a lane is a model of the same weights with its own modules, used by one thread at a time.

Two threads with a row each are quicker than two threads that share each product of one row, and on a busy machine many times as quick: no thread
waits for another after each product. The lanes share their weights, and where that is of use a second copy of them in the layout that MKL
multiplies from (`kernels.packed`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

from mless.capture.branching import Branches
from mless.capture.scoring import Scorer
from mless.errors import is_out_of_memory
from mless.kernels.packed import PackedWeights
from mless.kernels.threads import has_own_thread_count, threads_of
from mless.models import LoadedModel
from mless.models.seams import replaced_forward
from mless.models.twins import twin
from mless.models.widening import Narrow

Task = TypeVar("Task")
Found = TypeVar("Found")
Entered = TypeVar("Entered")

#: More would take more memory, and wait for Python.
_MOST = 4


@dataclass(frozen=True)
class Lane:
    model: LoadedModel
    scorer: Scorer


def lanes_here() -> int:
    """How many rows may run side by side on this machine's CPU: as many as leave fewest of its threads without work, and few of them."""
    threads = torch.get_num_threads()
    if threads < 2 or not has_own_thread_count():
        return 1
    return max(range(2, min(_MOST, threads) + 1), key=lambda lanes: (threads // lanes * lanes, lanes))


class Lanes:
    """The loaded model and, on a CPU with several threads, others of the same weights.

    Where there are several, every row runs in as many threads as a lane has, even one that runs alone: other numbers of threads have other bits.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._lanes = [Lane(model, Scorer(model))]
        self._pool: ThreadPoolExecutor | None = None
        #: Set where no further task is to begin.
        self._ended = threading.Event()
        #: Ends the products with packed weights.
        self._unpack = ExitStack()

    @property
    def first(self) -> Lane:
        """The one with the loaded model itself."""
        return self._lanes[0]

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def packed(self) -> bool:
        """Whether products are made with packed weights."""
        return self.first.scorer.packed is not None

    def open(self, row: Branches) -> None:
        """Make the other lanes, where there may be some, and pack the weights, where that is of use.

        All lanes must give this row the same bits at the same time, else there is one; and with packed weights the bits that it has without.
        """
        model = self.first.model
        if model.device.type != "cpu" or model.placed is not None:
            return
        # 16-bit weights that are widened for a product need memory for it in every lane.
        widened = any(isinstance(one, Narrow) for one in model.model.parameters())
        self._widen(1 if widened else lanes_here())
        plain = self._bits(row)
        if plain is None:
            self.close()
            plain = self._bits(row)
        self._pack()
        if self.packed and (plain is None or self._bits(row) != plain):
            self.unpack()

    def _widen(self, count: int) -> None:
        model = self.first.model
        for _ in range(count - 1):
            other = twin(model.model)
            if other is None:
                self.close()
                return
            own = replace(model, model=other)
            self._lanes.append(Lane(own, Scorer(own)))
        if count > 1:
            self._pool = threads_of(count, torch.get_num_threads() // count, "mless-lane")
            if self._pool is None:
                self.close()

    def _bits(self, row: Branches) -> list[bytes] | None:
        """The row's bits; None where the lanes differ or one fails. All of them score it at the same time."""
        begun = threading.Barrier(len(self._lanes))

        def scored(lane: Lane, _: None, number: int) -> list[bytes]:
            begun.wait(timeout=60)  # so that each lane has the row once
            return [text.tobytes() for text in lane.scorer([row])[0].texts]

        try:
            found = [bits for _, bits in self.each(range(len(self._lanes)), scored, lambda _: nullcontext())]
        except Exception as fault:
            if is_out_of_memory(fault) and len(self._lanes) == 1:
                raise
            return None  # the model itself has scored this row before
        return found[0] if all(bits == found[0] for bits in found) else None

    def _pack(self) -> None:
        weights = PackedWeights(self.first.model.model.modules())
        for lane in self._lanes if weights else ():
            head = lane.model.model.get_output_embeddings()
            lane.scorer.packed = weights
            for module in lane.model.model.modules():
                # What the head computes is the scorer's.
                if weights.has(module) and module is not head:
                    self._unpack.enter_context(replaced_forward(module, partial(weights.product, module)))

    def unpack(self) -> None:
        """Products are made without packed weights from now on. They have the same bits, and their memory is given back."""
        self._unpack.close()
        for lane in self._lanes:
            lane.scorer.packed = None

    def each(
        self,
        tasks: Sequence[Task],
        run: Callable[[Lane, Entered, Task], Found],
        entering: Callable[[Lane], AbstractContextManager[Entered]],
    ) -> Iterator[tuple[Task, Found]]:
        """Every task with what `run` found, as they are done; they begin in their order. A lane is inside `entering` meanwhile.

        Where one fails, or the caller ends, no further task begins.
        """
        if self._pool is None:
            with entering(self.first) as entered:
                for task in tasks:
                    yield task, run(self.first, entered, task)
            return
        yield from self._shared_out(self._pool, tasks, run, entering)

    def _shared_out(
        self,
        pool: ThreadPoolExecutor,
        tasks: Sequence[Task],
        run: Callable[[Lane, Entered, Task], Found],
        entering: Callable[[Lane], AbstractContextManager[Entered]],
    ) -> Generator[tuple[Task, Found]]:
        left, ended = deque(tasks), threading.Event()
        self._ended = ended
        answers: SimpleQueue[tuple[Task, Found] | BaseException] = SimpleQueue()

        def work(lane: Lane) -> None:
            try:
                with entering(lane) as entered:
                    while not ended.is_set():
                        try:
                            task = left.popleft()
                        except IndexError:
                            return
                        answers.put((task, run(lane, entered, task)))
            except BaseException as fault:  # noqa: BLE001 - the caller raises it
                ended.set()
                answers.put(fault)

        working: list[Future[None]] = []
        try:
            working += (pool.submit(work, lane) for lane in self._lanes[: len(tasks)])
            for _ in range(len(tasks)):
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            ended.set()
            wait(working)

    def forget(self) -> None:
        """Let go of what was kept to compare with."""
        for lane in self._lanes:
            lane.scorer.forget()

    def close(self) -> None:
        """Only the first one is left, as it was. Rows under way end before."""
        self._ended.set()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        self.unpack()
        self.forget()
        del self._lanes[1:]
