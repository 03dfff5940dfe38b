"""Blockwise torch: any device, memory of a tile of scores, key heads never expanded.

Per tile three passes over scores that stay in the cache: a matmul whose last column subtracts the log-sum-exp, 2^x in place, and a matmul
with the query sets that sums over queries. Everything else (a token's own attention, spans, counts) is made of vectors.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mless.kernels.signature import Intervals, Sums, Visible, mass_of

#: Most score elements held at once (batch × heads × rows × keys), 64 MB in fp32.
BLOCK_ELEMENTS = 1 << 24
#: A CPU's tile: rows of scores (all heads of a key head together) and keys; fits two cores' caches.
CPU_ROWS, CPU_KEYS = 768, 512
#: Without a log-sum-exp, a tile with all of a query's keys saves the second matmul, which gains more than the cache.
CPU_KEYS_AT_FIRST = 2048
DEVICE_ROWS = 256

#: Scores are in base 2. MKL's e^x takes 200 times as long where it underflows; 2^x does not.
_LOG2E = math.log2(math.e)
#: Maximum of a query that sees nothing: finite, because −∞ − (−∞) is NaN.
_LEAST = -1e30


def received(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    *,
    scale: float,
    visible: Visible,
    sets: Bool[Tensor, "batch sets queries"],
    spans: Int[Tensor, "batch keys"],
    n_spans: int,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None,
    lse: Float[Tensor, "batch heads queries"] | None = None,
) -> Sums:
    """As `kernels.received`. No query may see a later key."""
    batch, n_keys = q.shape[0], k.shape[2]
    softcap = softcap * _LOG2E if softcap is not None else None
    sinks = sinks.float() * _LOG2E if sinks is not None else None
    bias = bias.expand(batch, -1, -1, -1) if bias is not None else None
    if not isinstance(visible, Intervals) or q.device.type != "cpu":
        counts = visible.asked(sets).counts if isinstance(visible, Intervals) else None
        return _Work(q, k, scale, visible, sets, softcap, sinks, bias, lse, counts).summed(spans, n_spans)
    counts = visible.asked(sets).counts
    # One row after the other, each up to its own last query, so every bit is the same alone and in any batch.
    offset = n_keys - q.shape[2]
    sums: list[Tensor] = []
    mass: list[Tensor] = []
    for b in range(batch):
        asked = sets[b, 0].nonzero()
        length = int(asked[-1]) + 1 if len(asked) else min(1, q.shape[2])
        row, queries, keys = slice(b, b + 1), slice(length), slice(offset + length)
        mask = Intervals(visible.starts[row, queries], offset + length, visible.whole)
        work = _Work(
            q[row, :, queries], k[row, :, keys], scale, mask, sets[row, :, queries], softcap, sinks,
            bias[row, :, queries, keys] if bias is not None else None,
            lse[row, :, queries] if lse is not None else None,
            counts[row, :, keys],
        )  # fmt: skip
        part = work.summed(spans[row, keys], n_spans)
        sums.append(torch.nn.functional.pad(part.received, (0, n_keys - offset - length)))
        mass.append(part.mass)
    return Sums(torch.cat(sums), counts, torch.cat(mass))


class _Work:
    """Rows of a batch that are computed together: their queries in blocks, the heads of a key head side by side."""

    # Over 60 lines: one layout of blocks, which no part of it can be read without.
    def __init__(
        self,
        q: Float[Tensor, "batch heads queries dim"],
        k: Float[Tensor, "batch kv_heads keys dim"],
        scale: float,
        visible: Visible,
        sets: Bool[Tensor, "batch sets queries"],
        softcap: float | None,
        sinks: Float[Tensor, " heads"] | None,
        bias: Float[Tensor, "batch #heads queries keys"] | None,
        lse: Float[Tensor, "batch heads queries"] | None,
        counts: Int[Tensor, "batch sets keys"] | None,
    ) -> None:
        self.batch, self.heads, self.n_queries, self.dim = q.shape
        self.kv_heads, self.n_keys = k.shape[1:3]
        self.groups = self.heads // self.kv_heads
        self.offset = self.n_keys - self.n_queries
        self.visible, self.sets, self.softcap, self.sinks, self.bias = visible, sets, softcap, sinks, bias
        self.known = lse is not None
        self.on_cpu = q.device.type == "cpu"
        self._cut(q.device)
        padded = self.blocks * self.rows

        # Two sets that are one tensor are summed once.
        self.apart = sets[:, :1] if sets.stride(1) == 0 else sets
        members = torch.zeros(self.batch, self.apart.shape[1], padded, device=q.device)
        members[..., : self.n_queries] = self.apart
        by_block = members.unflatten(2, (self.blocks, self.rows)).permute(2, 0, 1, 3)
        heads = by_block[:, :, None].expand(-1, -1, self.heads, -1, -1)
        self.weights = heads.reshape(self.blocks, self.batch * self.heads, -1, self.rows)
        self.busy = by_block[:, :, 0].flatten(1).any(-1).tolist() if self.on_cpu else [True] * self.blocks

        shape = (self.blocks, self.batch, self.kv_heads, self.groups, self.rows)
        self.log_sums = torch.zeros(shape, device=q.device)
        # bf16 scores would round each logit to 8 bits; the products are exact in fp32, so only the sum is rounded.
        self.queries = torch.empty(*shape, self.dim + 1, device=q.device)
        self.queries[-1] = 0.0
        self._fill(self.queries[..., : self.dim], q)
        if lse is not None:
            self._fill(self.log_sums[..., None], (lse.float() * _LOG2E)[..., None])
        # Values of padding must not reach a sum, not even as 0 × NaN.
        if not self.on_cpu or not bool(sets[:, 0].all()):
            outside = (by_block[:, :, 0] == 0)[:, :, None, None]
            self.queries.masked_fill_(outside[..., None], 0.0)
            self.log_sums.masked_fill_(outside, 0.0)
        folded = self.known and softcap is None
        self.queries[..., self.dim] = -self.log_sums if folded else 0.0

        self.keys = torch.empty(self.batch, self.kv_heads, self.offset + padded, self.dim + 1, device=q.device)
        real = self.keys[:, :, : self.n_keys]
        real[..., : self.dim] = k
        real[..., : self.dim] *= scale * _LOG2E
        self.keys[:, :, self.n_keys :] = 0.0
        self.keys[..., self.dim] = 1.0
        if counts is not None:
            self.counts = counts
            seen = counts[:, 0] > 0
            seen[:, self.offset :] |= sets[:, 0]
            if not self.on_cpu or not bool(seen.all()):
                real.masked_fill_(~seen[:, None, :, None], 0.0)
        else:
            self.counts = torch.zeros(self.batch, self.apart.shape[1], self.n_keys, dtype=torch.long, device=q.device)
        self.own = torch.zeros(self.blocks, self.batch * self.heads, self.rows, device=q.device)
        self.to_sink = torch.zeros_like(self.own)
        self.sums = torch.zeros(self.batch * self.heads, self.apart.shape[1], self.offset + padded, device=q.device)
        self.later = torch.full((self.rows, self.rows), -math.inf, device=q.device).triu(1)
        self.buffer = torch.empty(0, device=q.device)

    def _cut(self, device: torch.device) -> None:
        """Blocks of queries count from the first one; tiles of keys count back from a block's own last key."""
        # A mask or bias that differs between rows or heads is applied to all of them at once.
        alike = isinstance(self.visible, Intervals) and self.bias is None
        if device.type == "cpu":
            # Short prompts: smaller blocks, so that less lies beyond the diagonal, and more heads at once.
            fine = max(64, self.n_queries // 8)
            self.rows = max(16, min(256, fine, CPU_ROWS // self.groups) // 16 * 16)
            self.width = CPU_KEYS if self.known else CPU_KEYS_AT_FIRST
            tile = self.groups * self.rows * min(self.n_keys, CPU_KEYS)
            self.at_once = max(1, CPU_ROWS * CPU_KEYS // tile) if alike else self.kv_heads * self.batch
        else:
            self.rows = max(1, min(DEVICE_ROWS, self.n_queries))
            self.width = BLOCK_ELEMENTS // max(1, self.batch * self.heads * self.rows)
            self.at_once = self.kv_heads * self.batch
        self.width = max(self.width, self.rows)
        self.blocks = max(1, -(-self.n_queries // self.rows))

    def _fill(self, blocks: Tensor, values: Float[Tensor, "batch heads queries size"]) -> None:
        values = values.unflatten(1, (self.kv_heads, self.groups))
        blocks = blocks.permute(1, 2, 3, 0, 4, 5)
        whole = self.n_queries // self.rows
        blocks[:, :, :, :whole] = values[:, :, :, : whole * self.rows].unflatten(3, (whole, self.rows))
        if whole < self.blocks:
            rest = self.n_queries - whole * self.rows
            blocks[:, :, :, whole, :rest] = values[:, :, :, whole * self.rows :]

    def summed(self, spans: Int[Tensor, "batch keys"], n_spans: int) -> Sums:
        begins, full = self._starts()
        for block in range(self.blocks):
            mask = self._mask(block)
            if not self.busy[block]:
                continue
            end = self.offset + (block + 1) * self.rows
            edges = [*range(end, begins[block], -self.width), begins[block]]
            tiles = [(a, b) for b, a in pairwise(edges)][::-1]
            for item in range(0, self.batch * self.kv_heads, self.at_once):
                part = _QueryBlock(self, block, item, mask, full[block])
                if not self.known and len(tiles) > 1:
                    part.find_log_sums(tiles)
                for a, b in tiles:
                    part.add(a, b, at_once=not self.known and len(tiles) == 1)
        return self._result(spans, n_spans)

    def _starts(self) -> tuple[list[int], list[int]]:
        """Per block of queries: the first key that any of them sees, and the first key from which all see."""
        if not isinstance(self.visible, Intervals) or self.visible.whole:
            return [0] * self.blocks, [0] * self.blocks
        short = self.blocks * self.rows - self.n_queries
        found: list[list[int]] = []
        for outside, best in ((self.n_keys, torch.amin), (0, torch.amax)):
            starts = self.visible.starts.where(self.sets[:, 0], outside)
            starts = torch.nn.functional.pad(starts, (0, short), value=outside).unflatten(1, (self.blocks, self.rows))
            found.append(best(starts, (0, 2)).tolist())
        last = [self.offset + block * self.rows for block in range(self.blocks)]
        return [min(start, own) // 16 * 16 for start, own in zip(found[0], last, strict=True)], found[1]

    def _mask(self, block: int) -> Bool[Tensor, "batch 1 #groups rows keys"] | None:
        """This block of a mask that is not made of intervals. Each query is read once, and the counts come from it."""
        if isinstance(self.visible, Intervals):
            return None
        first = block * self.rows
        last = min(first + self.rows, self.n_queries)
        mask = self.visible(first, last)
        keys = torch.arange(self.n_keys, device=mask.device)
        seen = (
            (mask[:, 0] & (keys < keys[self.offset + first : self.offset + last, None]))
            .float()
            .expand(self.batch, -1, -1)
        )  # exact: far fewer than 2^24 rows
        self.counts += (self.apart[..., first:last].float() @ seen).long()
        # Non-queries see nothing: otherwise 0 × a NaN in the padding would be NaN.
        mask = mask & self.sets[:, None, 0, first:last, None]
        mask = torch.nn.functional.pad(mask, (0, self.keys.shape[2] - self.n_keys, 0, first + self.rows - last))
        return mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (self.kv_heads, self.groups))

    def _in_order(self, by_block: Float[Tensor, "blocks batch_heads rows"]) -> Float[Tensor, "batch heads queries"]:
        return by_block.movedim(0, 1).reshape(self.batch, self.heads, -1)[..., : self.n_queries]

    def _result(self, spans: Int[Tensor, "batch keys"], n_spans: int) -> Sums:
        sums = self.sums.view(self.batch, self.heads, -1, self.sums.shape[-1])[..., : self.n_keys]
        sent = sums[:, :, -1].clone()
        sent[..., self.offset :] += self._in_order(self.own)
        share = self._in_order(self.to_sink) if self.sinks is not None else None
        if self.on_cpu:
            mass = mass_of(sent, spans, n_spans, self.apart[:, -1], share)
        else:
            mass = torch.zeros(self.batch, self.heads, n_spans + 1, device=sums.device)
            mass[..., :-1] = sent @ torch.nn.functional.one_hot(spans.long(), n_spans).float()
            if share is not None:
                mass[..., -1] = share.sum(-1)
            mass /= self.apart[:, -1].sum(-1).clamp(min=1)[:, None, None]
        n_sets = self.sets.shape[1]
        return Sums(sums.transpose(1, 2).expand(-1, n_sets, -1, -1), self.counts.expand(-1, n_sets, -1), mass)


class _QueryBlock:
    """One block of queries of some key heads."""

    def __init__(self, work: _Work, block: int, item: int, mask: Tensor | None, full: int) -> None:
        self.work, self.block, self.mask, self.full = work, block, mask, full
        items = slice(item, item + work.at_once)
        self.queries = work.queries[block].flatten(0, 1)[items].flatten(1, 2)
        self.keys = work.keys.flatten(0, 1)[items]
        self.log_sums = work.log_sums[block].flatten(0, 1)[items].flatten(1, 2)[..., None]
        heads = slice(item * work.groups, (item + work.at_once) * work.groups)
        self.weights = work.weights[block, heads]
        self.sums, self.own, self.to_sink = work.sums[heads], work.own[block, heads], work.to_sink[block, heads]
        self.sinks: Tensor | None = None
        if work.sinks is not None:
            sinks = work.sinks.repeat(work.batch)[heads, None].expand(-1, work.rows)
            self.sinks = sinks.reshape(self.log_sums.shape)
        self.end = work.offset + (block + 1) * work.rows

    def scores(self, a: int, b: int) -> Float[Tensor, "items group_rows keys"]:
        """Less the log-sum-exp, where it is known, and -inf where nothing is seen."""
        work = self.work
        shape = (*self.queries.shape[:2], b - a)
        size = math.prod(shape)
        if work.buffer.numel() < size:
            work.buffer = torch.empty(size, device=work.buffer.device)
        scores = torch.bmm(self.queries, self.keys[:, a:b].mT, out=work.buffer[:size].view(shape))
        if work.softcap is not None:
            scores.div_(work.softcap).tanh_().mul_(work.softcap)
            scores.sub_(self.log_sums)
        by_row = scores.view(-1, work.groups, work.rows, b - a)
        if b == self.end:
            by_row[..., -work.rows :] += work.later
        if isinstance(work.visible, Intervals) and self.full > a:
            self._hide_before(by_row, a, b)
        if work.bias is not None:
            first, last = self.block * work.rows, min((self.block + 1) * work.rows, work.n_queries)
            bias = work.bias[:, :, first:last, a:b]
            bias = bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (work.kv_heads, work.groups))
            by_row = by_row.view(work.batch, work.kv_heads, work.groups, work.rows, b - a)
            by_row[..., : last - first, : work.n_keys - a] += bias.float() * _LOG2E
        if self.mask is not None:
            by_row = by_row.view(work.batch, work.kv_heads, work.groups, work.rows, b - a)
            by_row.masked_fill_(~self.mask[..., a:b], -math.inf)
        return scores

    def _hide_before(self, by_row: Tensor, a: int, b: int) -> None:
        work = self.work
        assert isinstance(work.visible, Intervals)
        starts = work.visible.starts[:, self.block * work.rows : (self.block + 1) * work.rows]
        before = torch.arange(a, b, device=starts.device) < starts[..., None]
        # On a CPU there is one row of a batch at a time.
        seen = by_row.unflatten(0, (work.batch, -1))[:, :, :, : starts.shape[1]]
        seen.masked_fill_(before[:, None, None], -math.inf)

    def _top(self, scores: Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True).clamp_(min=_LEAST)
        return top if self.sinks is None else torch.maximum(top, self.sinks)

    def _with_sink(self, total: Tensor, top: Tensor) -> Tensor:
        return total if self.sinks is None else total + torch.exp2(self.sinks - top)

    def find_log_sums(self, tiles: list[tuple[int, int]]) -> None:
        """One more pass for the log-sum-exp, where the forward gave none and one tile does not hold all keys."""
        top = torch.full_like(self.log_sums, _LEAST) if self.sinks is None else self.sinks
        total = torch.zeros_like(top)
        for a, b in tiles:
            scores = self.scores(a, b)
            higher = torch.maximum(top, self._top(scores))
            total = total * torch.exp2(top - higher) + scores.sub_(higher).exp2_().sum(-1, keepdim=True)
            top = higher
        tiny = torch.finfo(torch.float32).tiny
        self.log_sums.copy_(top + self._with_sink(total, top).clamp_(min=tiny).log2())
        if self.work.softcap is None:
            self.queries[..., -1:] = -self.log_sums

    def add(self, a: int, b: int, *, at_once: bool) -> None:
        """`at_once`: the tile holds all keys of its queries, and their log-sum-exp is not yet known."""
        work = self.work
        scores, weights = self.scores(a, b), self.weights
        if at_once:
            top = self._top(scores)
            scores.sub_(top).exp2_()
            total = self._with_sink(scores.sum(-1, keepdim=True), top).clamp_(min=torch.finfo(torch.float32).tiny)
            self.log_sums.copy_(top + total.log2())
            weights = weights / total.view(len(weights), 1, work.rows)
        else:
            scores.exp2_()
        p = scores.view(len(weights), work.rows, b - a)
        if b == self.end:
            if self.sinks is not None:
                share = torch.exp2(self.sinks - self.log_sums).view_as(self.to_sink)
                self.to_sink.copy_(share * self.weights[:, -1])
            own = p[..., -work.rows :].diagonal(dim1=-2, dim2=-1)
            self.own.copy_(own * weights[:, -1])
            own.zero_()
        self.sums[..., a:b] += torch.bmm(weights, p)
