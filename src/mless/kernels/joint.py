"""Attention and what its keys receive of it, from one computation of the scores; for CPUs.

On a CPU the scores are what costs: a second pass over them takes a sixth of a forward. So here the forward's own softmax is added up while
it lies in the cache, a block of queries at a time with the keys that they see: one matmul makes the scores, 2^x the weights, a second
matmul the output, and a product with the query sets the sums. It takes about as long as attention alone does.

Where a block begins, and by which operations it is computed, depends on its place in the prompt only: a prompt has the same bits alone and
in any batch that is padded on the right.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mless.kernels.signature import Intervals, Sums, mass_of

#: Queries in a block, the heads of a key head counted together, so that a core's cache holds them with a thousand keys or two; and up to
#: where blocks are smaller, which else would lie beyond the diagonal for the most part.
_ROWS, _EARLY = 384, 512
#: Where keys that no query of a block sees are left out: at multiples of that.
_ALIGNED = 16
#: Late blocks are dealt out among so many sums, which are added in their order at the end. It is part of what is computed.
_DEALT = 4
#: More workers than that would wait for Python.
_WORKERS = 16
#: Numbers that a thread keeps of each kind from call to call.
_KEPT = 1 << 22
#: A query's weights are 2^score as it is where they add up to no more than that, and to no less than its inverse; that leaves room for
#: values as large and as small again. Elsewhere the largest score is subtracted first.
_STEEP = 2.0**60
_LOG2E = math.log2(math.e)
#: Whatever a process has for defaults.
_KIND: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def serves(q: Tensor, k: Tensor, v: Tensor, visible: Intervals) -> bool:
    """On a CPU, for a whole prompt, where nobody wants gradients."""
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
    """Attention to what `visible` says of every query, in a set or not; and what `kernels.received` says of it."""
    batch, heads, tokens, _ = q.shape
    # Two sets that are one tensor are summed once.
    apart = sets[:, :1] if sets.stride(1) == 0 else sets
    out = torch.empty(batch, tokens, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    sums = torch.empty(batch, apart.shape[1], heads, tokens, **_KIND)
    own = torch.empty(batch, heads, tokens, **_KIND)
    with torch.inference_mode():  # what is kept from call to call is used in that mode only
        for b in range(batch):
            sums[b], own[b] = _Prompt(q[b], k[b], v[b], scale, visible.on_host[b], apart[b], out[b]).computed()
    n_sets = sets.shape[1]
    counts = visible.asked(sets).counts
    mass = mass_of(sums[:, -1] + own, spans, n_spans, apart[:, -1])
    return out, Sums(sums.expand(-1, n_sets, -1, -1), counts, mass)


class _Prompt:
    """One row of a batch, as far as the last block reaches."""

    def __init__(
        self,
        q: Float[Tensor, "heads tokens dim"],
        k: Float[Tensor, "kv_heads tokens dim"],
        v: Float[Tensor, "kv_heads tokens value_dim"],
        scale: float,
        starts: Int[np.ndarray, " tokens"],
        sets: Bool[Tensor, "sets tokens"],
        out: Float[Tensor, "tokens heads value_dim"],
    ) -> None:
        self.kv_heads, self.tokens, dim = k.shape
        self.groups = q.shape[0] // self.kv_heads
        self.starts = starts
        self.blocks = _blocks(self.tokens, self.groups)
        end = sum(self.blocks[-1])
        self.queries = q.unflatten(0, (self.kv_heads, self.groups))
        self.keys = _memory("keys", self.kv_heads, end, dim)
        self.values = _memory("values", self.kv_heads, end, v.shape[-1])
        for ours, given in ((self.keys, k), (self.values, v)):
            ours[:, : self.tokens] = given
            ours[:, self.tokens :] = 0.0
        self.keys.mul_(scale * _LOG2E)
        self.members = torch.zeros(sets.shape[0], end, **_KIND)
        self.members[:, : self.tokens] = sets
        # Of each query: 2^score of itself, and of everything that it sees.
        self.own, self.total = (torch.empty(self.kv_heads, self.groups, end, **_KIND) for _ in range(2))
        self.steep: Tensor | None = None
        self.out = out.unflatten(1, (self.kv_heads, self.groups)).permute(1, 2, 0, 3)

    def computed(self) -> tuple[Float[Tensor, "sets heads tokens"], Float[Tensor, "heads tokens"]]:
        """The sums of each set, and each token's own share of its attention where it is in the last set. `out` is written."""
        sums = self._added(range(self.kv_heads))
        self.steep = ((self.total > 1 / _STEEP) & (self.total < _STEEP)).logical_not_()
        if again := self.steep.flatten(1).any(-1).nonzero()[:, 0].tolist():
            # Queries that are not steep get the bits that they had: nothing is subtracted from their scores.
            sums[again] = self._added(again)[again]
        own = self.own / self.total * self.members[-1]
        return sums.movedim(2, 0).flatten(1, 2)[..., : self.tokens], own.flatten(0, 1)[..., : self.tokens]

    def _added(self, heads: Sequence[int]) -> Float[Tensor, "kv_heads groups sets tokens"]:
        """The sums of these key heads' heads; others' are not to be read."""
        shape = (self.kv_heads, self.groups, *self.members.shape)
        sums = torch.zeros(shape, **_KIND)
        early = [block for block in self.blocks if block[0] < _EARLY]
        late = self.blocks[len(early) :]
        for block in early:  # they are small: all heads together
            self._add(slice(0, self.kv_heads), block, sums)
        if late:
            dealt = torch.zeros(_DEALT, *shape, **_KIND)

            def some(task: tuple[int, int]) -> None:
                first, head = task
                with torch.inference_mode():  # it holds for one thread, and workers are others
                    for block in late[first::_DEALT]:
                        self._add(slice(head, head + 1), block, dealt[first])

            workers = min(torch.get_num_threads(), _WORKERS) if _threads_are_their_own() else 1
            pool = _pool(workers) if workers > 1 else None
            for _ in (pool.map if pool else map)(some, [(first, head) for first in range(_DEALT) for head in heads]):
                pass
            for part in dealt:
                sums += part
        return sums

    def _add(self, heads: slice, block: tuple[int, int], sums: Float[Tensor, "kv_heads groups sets tokens"]) -> None:
        """One block of queries of some key heads' heads, with all keys from the first that one of them sees up to its own last one."""
        first, rows = block
        end, at, real = first + rows, slice(first, first + rows), slice(first, min(first + rows, self.tokens))
        begin = int(self.starts[first]) // _ALIGNED * _ALIGNED
        seen, mine = slice(begin, end), slice(first - begin, end - begin)
        keys, values = self.keys[heads, seen], self.values[heads, seen]
        lanes = (len(keys), self.groups, rows)
        queries = _memory("queries", *lanes, keys.shape[-1])
        if real.stop < end:
            queries.zero_()
        queries[:, :, : real.stop - first] = self.queries[heads, :, real]
        p = _memory("scores", *lanes, end - begin)
        weights = torch.bmm(queries.flatten(1, 2), keys.mT, out=p.flatten(1, 2))
        # A token's own score is for itself, and those of what comes later are for nobody.
        corner = p[..., mine]
        own = corner.diagonal(dim1=-2, dim2=-1).clone()
        corner += _later(rows)
        if (hidden := self._hidden(begin, real, rows)) is not None:
            p[..., : hidden.shape[1]].masked_fill_(hidden, -math.inf)
        if self.steep is not None:
            top = torch.maximum(p.amax(-1), own).where(self.steep[heads, :, at], 0.0)
            p.sub_(top[..., None])
            own.sub_(top)
        own.exp2_()
        total = torch.sum(weights.exp2_(), -1, out=_memory("total", *weights.shape[:2])).view_as(own).add_(own)
        self.own[heads, :, at], self.total[heads, :, at] = own, total
        out = torch.bmm(weights, values, out=_memory("out", *weights.shape[:2], values.shape[-1])).view(*lanes, -1)
        out.addcmul_(own[..., None], values[:, None, mine]).div_(total[..., None])
        self.out[heads, :, real] = out[:, :, : real.stop - first]
        sent = (self.members[:, at] / total[:, :, None]).flatten(0, 1)
        added = torch.bmm(sent, p.flatten(0, 1), out=_memory("sums", *sent.shape[:2], end - begin))
        sums[heads, ..., seen] += added.view(*lanes[:2], -1, end - begin)

    def _hidden(self, begin: int, real: slice, rows: int) -> Bool[Tensor, "rows keys"] | None:
        """Of the keys from `begin` on, those that a window, a chunk or a document hides from these queries; None where it hides none."""
        starts = self.starts[real]
        if starts[-1] <= begin:
            return None
        # Queries beyond the prompt may see anything.
        hidden = torch.zeros(rows, int(starts[-1]) - begin, dtype=torch.bool, device="cpu")
        hidden[: len(starts)] = torch.from_numpy(np.arange(begin, starts[-1]) < starts[:, None])
        return hidden


def _blocks(tokens: int, groups: int) -> list[tuple[int, int]]:
    """First query and number of queries of each block; the last may reach beyond the prompt."""
    found: list[tuple[int, int]] = []
    first = 0
    while first < tokens:
        # Far on in a long prompt fewer, so that a worker's scores stay at 32 MB or so.
        lanes = min(_ROWS, 2 * _KEPT // (first + 128))
        found.append((first, max(16, min(64 if first < _EARLY else 128, lanes // groups) // 16 * 16)))
        first += found[-1][1]
    return found


@functools.cache
def _later(rows: int) -> Float[Tensor, "rows rows"]:
    """Added to a block's last scores: a token's own, and those of what comes later, count for nothing."""
    return torch.full((rows, rows), -math.inf, **_KIND).triu()


_LOCAL = threading.local()


def _memory(what: str, *shape: int) -> Float[Tensor, " ..."]:
    """Memory of the thread's own that stays, unless it is much: new pages cost more than what is computed in them."""
    size = math.prod(shape)
    held: Tensor | None = getattr(_LOCAL, what, None)
    if held is None or held.numel() < size:
        held = torch.empty(size, **_KIND)
        setattr(_LOCAL, what, held if size <= _KEPT else None)
    return held[:size].view(shape)


@functools.cache
def _threads_are_their_own() -> bool:
    """Whether each thread says for itself in how many its operations run; with other backends it is one number for all."""
    return "backend: OpenMP" in torch.__config__.parallel_info()


_POOLS: dict[tuple[int, int], ThreadPoolExecutor] = {}
_MAKING = threading.Lock()


def _pool(workers: int) -> ThreadPoolExecutor | None:
    """Threads whose operations run in one thread each; None where there can be no more threads."""
    with _MAKING:
        key = (os.getpid(), workers)  # a process that was forked has none of its parent's threads
        if key not in _POOLS:
            made = _made(workers)
            if made is None:
                return None
            for old in _POOLS.values():
                old.shutdown(wait=False)
            _POOLS.clear()
            _POOLS[key] = made
        return _POOLS[key]


def _made(workers: int) -> ThreadPoolExecutor | None:
    ready = threading.Barrier(workers + 1, timeout=60)

    def alone() -> None:
        # A thread that has not asked for the number takes what was last set anywhere.
        torch.set_num_threads(1)
        torch.get_num_threads()
        ready.wait()

    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "mless-attention", alone)
    try:
        for _ in range(workers):
            pool.submit(int)
        ready.wait()
    except (RuntimeError, threading.BrokenBarrierError):
        ready.abort()
        pool.shutdown(wait=False)
        return None
    finally:
        torch.set_num_threads(threads)  # what it also sets for threads to come
    return pool
