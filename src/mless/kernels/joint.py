"""Attention and the sums its keys receive, from one computation of the scores; for CPUs.

On a CPU scores are expensive: a second pass over them takes a sixth of a forward. So the forward's own softmax is summed while it is in the
cache, one block of queries at a time: matmul → scores, 2^x → weights, matmul → output, product with the query sets → sums. It takes about
as long as attention alone.

A block's start and operations depend only on its place in the prompt. So a prompt has the same bits alone and in any batch padded on the
right.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mless.kernels.signature import Intervals, Sums, mass_of
from mless.kernels.threads import has_own_thread_count, threads_of

#: Queries in a block, all heads of a key head together: with one or two thousand keys they fit a core's cache. Up to the second number
#: blocks are smaller, because most of a large one would lie beyond the diagonal.
_ROWS, _EARLY = 384, 512
#: Early blocks of several key heads and prompts are computed together, up to so many scores.
_CELLS = 1 << 19
#: Tokens of short prompts that are prepared together.
_TOGETHER = 4096
#: Unseen keys of a block are skipped in multiples of this.
_ALIGNED = 16
#: Blocks, early and late ones separately, go to so many partial sums, which are added in order at the end. It is part of what is computed.
_PARTIAL_SUMS = 4
#: More workers than that would wait for Python.
_WORKERS = 16
#: Numbers of each kind that a thread keeps between calls.
_KEPT = 1 << 22
#: A query's weights are 2^score without a shift where their sum lies between 1/_STEEP and _STEEP. That leaves room for values as large and
#: as small. Elsewhere the largest score is subtracted first.
_STEEP = 2.0**60
_LOG2E = math.log2(math.e)
#: Whatever a process has for defaults.
_KIND: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def serves(q: Tensor, k: Tensor, v: Tensor, visible: Intervals) -> bool:
    """On a CPU, for a whole prompt, without gradients."""
    graded = torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v))
    known = q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return q.device.type == "cpu" and known and not graded and 0 < q.shape[2] == k.shape[2] == visible.keys


@torch.no_grad()
def attended(
    q: Float[Tensor, "batch heads tokens dim"],
    k: Float[Tensor, "batch kv_heads tokens dim"],
    v: Float[Tensor, "batch kv_heads tokens value_dim"],
    *,
    scale: float,
    visible: Intervals,
    sets: Bool[Tensor, "batch sets tokens"],
    spans: Int[Tensor, "batch tokens"],
    n_spans: int,
) -> tuple[Float[Tensor, "batch tokens heads value_dim"], Sums]:
    """Attention by `visible` for every query, in a set or not; and the result of `kernels.received`."""
    batch, heads, tokens, _ = q.shape
    # Two sets that are one tensor are summed once.
    apart = sets[:, :1] if sets.stride(1) == 0 else sets
    out = torch.empty(batch, tokens, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    sums = torch.empty(batch, apart.shape[1], heads, tokens, **_KIND)
    own = torch.empty(batch, heads, tokens, **_KIND)
    # Short prompts spend most time on setup, so rows with the same mask are computed together.
    together = max(1, _TOGETHER // tokens) if visible.whole else 1
    with torch.inference_mode():  # memory kept between calls is used in this mode only
        for first in range(0, batch, together):
            at = slice(first, first + together)
            prompts = _Prompts(q[at], k[at], v[at], scale, visible.on_host[first], apart[at], out[at])
            sums[at], own[at] = prompts.computed()
    n_sets = sets.shape[1]
    counts = visible.asked(sets).counts
    mass = mass_of(sums[:, -1] + own, spans, n_spans, apart[:, -1])
    return out, Sums(sums.expand(-1, n_sets, -1, -1), counts, mass)


class _Prompts:
    """Rows of a batch whose queries have the same starts, up to the end of the last block. A lane is a key head of one row."""

    def __init__(
        self,
        q: Float[Tensor, "rows heads tokens dim"],
        k: Float[Tensor, "rows kv_heads tokens dim"],
        v: Float[Tensor, "rows kv_heads tokens value_dim"],
        scale: float,
        starts: Int[np.ndarray, " tokens"],
        sets: Bool[Tensor, "rows sets tokens"],
        out: Float[Tensor, "rows tokens heads value_dim"],
    ) -> None:
        rows, self.kv_heads, self.tokens, dim = k.shape
        self.groups = q.shape[1] // self.kv_heads
        self.starts = starts
        self.blocks = _blocks(self.tokens, self.groups)
        end, lanes = sum(self.blocks[-1]), rows * self.kv_heads
        self.queries = _memory("queries", lanes, end, self.groups, dim)
        # Transposed: a product with a transposed view takes longer, and on aarch64 threads wait for each other in it.
        self.keys = _memory("keys", lanes, dim, end)
        self.values = _memory("values", lanes, end, v.shape[-1])
        grouped = q.unflatten(1, (self.kv_heads, self.groups)).transpose(2, 3)
        for ours, given in ((self.queries, grouped), (self.keys.mT, k), (self.values, v)):
            ours.unflatten(0, (rows, self.kv_heads))[:, :, : self.tokens] = given
            ours[:, self.tokens :] = 0.0
        self.keys.mul_(scale * _LOG2E)
        self.members = torch.zeros(rows, sets.shape[1], end, **_KIND)
        self.members[..., : self.tokens] = sets
        # Per query: 2^score of itself, Σ 2^score over what it sees, and the values weighted by it.
        self.own, self.total = (torch.empty(lanes, end, self.groups, **_KIND) for _ in range(2))
        self.weighed = _memory("weighed", lanes, end, self.groups, v.shape[-1])
        self.steep: Tensor | None = None
        self.out = out.unflatten(2, (self.kv_heads, self.groups))

    def computed(self) -> tuple[Float[Tensor, "rows sets heads tokens"], Float[Tensor, "rows heads tokens"]]:
        """The sums of each set, and each token's own share of its attention where it is in the last set. `out` is written."""
        sums = self._added(range(len(self.keys)))
        least, most = map(float, torch.aminmax(self.total))
        if not (least > 1 / _STEEP and most < _STEEP):
            self.steep = ((self.total > 1 / _STEEP) & (self.total < _STEEP)).logical_not_()
            again = self.steep.flatten(1).any(-1).nonzero()[:, 0].tolist()
            # Queries that are not steep keep their bits: nothing is subtracted from their scores.
            sums[again] = self._added(again)[again]
        weighed = self.weighed.div_(self.total[..., None]).unflatten(0, (-1, self.kv_heads))
        self.out.copy_(weighed[:, :, : self.tokens].transpose(1, 2))
        own = self.own.div_(self.total)[:, : self.tokens].mT.unflatten(0, (-1, self.kv_heads)).flatten(1, 2)
        sums = sums[..., : self.tokens].unflatten(0, (-1, self.kv_heads)).movedim(3, 1).flatten(2, 3)
        return sums, own * self.members[:, -1:, : self.tokens]

    def _added(self, lanes: Sequence[int]) -> Float[Tensor, "lanes groups sets tokens"]:
        """The sums of these lanes; those of other lanes are not valid."""
        early = [block for block in self.blocks if block[0] < _EARLY]
        shape = (len(self.keys), self.groups, self.members.shape[1])
        tasks: list[tuple[slice, list[tuple[int, int]], Tensor]] = []
        parts: list[Tensor] = []
        # The longest tasks first, so that all workers end at about the same time.
        for blocks in (self.blocks[len(early) :], early):
            chunks = dict.fromkeys(self._chunk(lane, blocks) for lane in lanes) if blocks else {}
            for first in reversed(range(min(_PARTIAL_SUMS, len(blocks)))):
                parts.append(torch.zeros(*shape, sum(blocks[-1]), **_KIND))
                tasks += [(slice(*chunk), blocks[first::_PARTIAL_SUMS], parts[-1]) for chunk in chunks]

        def add(task: tuple[slice, list[tuple[int, int]], Tensor]) -> Iterator[None]:
            chunk, blocks, part = task
            for block in blocks:
                with torch.inference_mode():  # it holds for one thread, and workers are others
                    self._add(chunk, block, part)
                yield

        scores = len(lanes) * self.groups * sum(rows * (at + rows - int(self.starts[at])) for at, rows in self.blocks)
        _do(add, tasks, _useful(scores * (self.keys.shape[1] + self.values.shape[-1])))
        sums = torch.zeros(*shape, self.members.shape[-1], **_KIND)
        for part in reversed(parts):
            sums[..., : part.shape[-1]] += part
        return sums

    def _chunk(self, lane: int, blocks: list[tuple[int, int]]) -> tuple[int, int]:
        """First and last of the lanes that these blocks are computed for together: whole rows, or lanes of the same row."""
        early = blocks[0][0] < _EARLY
        size = max(1, _CELLS // (self.groups * blocks[0][1] * min(_EARLY, sum(blocks[-1])))) if early else 1
        if size >= self.kv_heads:
            size -= size % self.kv_heads
            first = lane // size * size
            return first, min(first + size, len(self.keys))
        row = lane // self.kv_heads * self.kv_heads
        first = row + (lane - row) // size * size
        return first, min(first + size, row + self.kv_heads)

    def _add(self, chunk: slice, block: tuple[int, int], sums: Float[Tensor, "lanes groups sets tokens"]) -> None:
        """One block of queries of some lanes, with all keys from the first that one of them sees up to its own last one."""
        first, rows = block
        end = first + rows
        begin = int(self.starts[first]) // _ALIGNED * _ALIGNED
        at, seen = slice(first, end), slice(begin, end)
        lanes = chunk.stop - chunk.start
        p = _memory("scores", lanes, rows, self.groups, end - begin)
        weights = p.flatten(1, 2)
        torch.bmm(self.queries[chunk, at].flatten(1, 2), self.keys[chunk, :, seen], out=weights)
        corner = p[..., first - begin :]
        corner += _later(rows)
        if (hidden := self._hidden(begin, slice(first, min(end, self.tokens)), rows)) is not None:
            p[..., : hidden.shape[-1]].masked_fill_(hidden, -math.inf)
        if self.steep is not None:
            p.sub_(p.amax(-1, keepdim=True).where(self.steep[chunk, at, :, None], 0.0))
        weights.exp2_()
        total = torch.sum(p, -1, out=self.total[chunk, at])
        torch.bmm(weights, self.values[chunk, seen], out=self.weighed[chunk, at].flatten(1, 2))
        # What a token gives itself is not received.
        itself = corner.diagonal(dim1=1, dim2=3)
        self.own[chunk, at] = itself.mT
        itself.zero_()
        # A chunk is some key heads of one row, or all of several rows.
        prompts = slice(chunk.start // self.kv_heads, (chunk.stop - 1) // self.kv_heads + 1)
        members = self.members[prompts, None, None, :, at]
        sent = (members / total.unflatten(0, (len(members), -1)).movedim(2, 3)[:, :, :, None]).flatten(0, 1)
        for lane, into in enumerate(sums[chunk, ..., seen]):
            into.baddbmm_(sent[lane], p[lane].transpose(0, 1))

    def _hidden(self, begin: int, real: slice, rows: int) -> Bool[Tensor, "rows 1 keys"] | None:
        """Keys from `begin` on that a window, a chunk or a document hides from these queries; None where none is hidden."""
        starts = self.starts[real]
        if starts[-1] <= begin:
            return None
        # Queries beyond the prompt may see anything.
        hidden = torch.zeros(rows, 1, int(starts[-1]) - begin, dtype=torch.bool, device="cpu")
        hidden[: len(starts), 0] = torch.from_numpy(np.arange(begin, starts[-1]) < starts[:, None])
        return hidden


def _blocks(tokens: int, groups: int) -> list[tuple[int, int]]:
    """First query and number of queries of each block; the last may reach beyond the prompt."""
    found: list[tuple[int, int]] = []
    first = 0
    while first < tokens:
        # Fewer late in a long prompt, so that a worker's scores stay near 32 MB.
        lanes = min(_ROWS, 2 * _KEPT // (first + 128))
        found.append((first, max(16, min(64 if first < _EARLY else 128, lanes // groups) // 16 * 16)))
        first += found[-1][1]
    return found


@functools.cache
def _later(rows: int) -> Float[Tensor, "rows 1 rows"]:
    """Added to a block's last scores: −∞ for later keys."""
    return torch.full((rows, rows), -math.inf, **_KIND).triu(1)[:, None]


_LOCAL = threading.local()


def _memory(what: str, *shape: int) -> Float[Tensor, " ..."]:
    """The thread's own reusable memory, unless it is large: new pages cost more than the computation."""
    size = math.prod(shape)
    held: Tensor | None = getattr(_LOCAL, what, None)
    if held is None or held.numel() < size:
        held = torch.empty(size, **_KIND)
        setattr(_LOCAL, what, held if size <= _KEPT else None)
    return held[:size].view(shape)


_POOLS: dict[tuple[int, int], ThreadPoolExecutor] = {}
_MAKING = threading.Lock()


def _useful(work: int) -> int:
    """How many workers help for so many multiplications: they share Python's lock, so more of them wait longer."""
    return max(2, math.isqrt(work >> 27))


def _do(one: Callable[[Any], Iterator[None]], tasks: Sequence[Any], most: int) -> None:
    """Run every task, spread over as many threads as torch has, at most `most`.

    Where one fails, or Ctrl-C is pressed, all end at their next step.
    """
    left = deque(tasks)
    ended = threading.Event()

    def next_one() -> Any:
        try:
            return left.popleft()
        except IndexError:
            return None

    def some() -> None:
        try:
            while not ended.is_set() and (task := next_one()) is not None:
                for _ in one(task):
                    if ended.is_set():
                        return
        except BaseException:
            ended.set()
            raise

    working: list[Future[None]] = []
    try:
        working += _begun(some, min(most, len(tasks)))
        if not working:
            some()
        for each in working:
            each.result()
    except BaseException:
        ended.set()
        # Workers that still run use this thread's memory, so it must not be used again.
        _LOCAL.__dict__.clear()
        wait(working)
        raise


def _begun(work: Callable[[], None], most: int) -> list[Future[None]]:
    """Start `work` in as many threads as torch has; in none where it has only one, or where no more can start."""
    workers = min(torch.get_num_threads(), _WORKERS) if has_own_thread_count() else 1
    begun: list[Future[None]] = []
    # A single task uses one worker too: operations in several threads may have other bits.
    while workers > 1 and len(begun) < min(workers, most) and (pool := _pool(workers)) is not None:
        try:
            begun.append(pool.submit(work))
        except RuntimeError:
            # Another thread with another number of workers may have closed this pool. If not, no pool begins anything any more.
            if _POOLS.get((os.getpid(), workers)) is pool:
                break
    return begun


def _pool(workers: int) -> ThreadPoolExecutor | None:
    """Threads whose operations run in one thread each; None where no more threads can start."""
    with _MAKING:
        key = (os.getpid(), workers)  # a process that was forked has none of its parent's threads
        if key not in _POOLS:
            made = threads_of(workers, 1, "mless-attention")
            if made is None:
                return None
            for old in _POOLS.values():
                old.shutdown(wait=False)
            _POOLS.clear()
            _POOLS[key] = made
        return _POOLS[key]
