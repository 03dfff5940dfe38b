"""Blockwise torch: any device, memory of a block of query rows, key heads never expanded."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mless.kernels.signature import Sums, Visible

#: Most score elements held at once (batch × heads × rows × keys), 64 MB in fp32.
BLOCK_ELEMENTS = 1 << 24


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
) -> Sums:
    batch, heads, n_queries, _ = q.shape
    kv_heads, n_keys = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    offset = n_keys - n_queries
    device = q.device
    # bf16 scores would round each logit to 8 bits; the products are exact in fp32, so only the sum is rounded.
    q = q.float() * scale
    k_t = k.float().transpose(-1, -2)
    members = sets.float()
    one_hot = torch.nn.functional.one_hot(spans.long(), n_spans).float()
    sums = torch.zeros(batch, sets.shape[1], heads, n_keys, device=device)
    counts = torch.zeros(batch, sets.shape[1], n_keys, dtype=torch.long, device=device)
    mass = torch.zeros(batch, heads, n_spans + 1, device=device)
    rows = max(16, min(n_queries, BLOCK_ELEMENTS // max(1, batch * heads * n_keys)))
    for first in range(0, n_queries, rows):
        last = min(first + rows, n_queries)
        end = min(n_keys, offset + last)  # causal: later keys are seen by nobody in this block
        mask = visible(first, last)[..., :end]
        block = q[:, :, first:last].unflatten(1, (kv_heads, groups)).flatten(2, 3)
        scores = (block @ k_t[..., :end]).unflatten(2, (groups, last - first)).flatten(1, 2)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias[:, :, first:last, :end].float()
        scores = scores.masked_fill(~mask, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks.float()[None, :, None, None])
        top = top.clamp(min=torch.finfo(torch.float32).min)  # a row that sees nothing: exp(-inf), not NaN
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        sink = torch.zeros_like(total)
        if sinks is not None:
            sink = torch.exp(sinks.float()[None, :, None, None] - top)
            total = total + sink
        total = total.clamp(min=torch.finfo(torch.float32).tiny)
        p = weights.div_(total)
        sink = (sink / total).squeeze(-1)
        of_last = members[:, -1, first:last]
        mass[..., :-1] += torch.einsum("bhk,bkm->bhm", torch.einsum("bq,bhqk->bhk", of_last, p), one_hot[:, :end])
        mass[..., -1] += torch.einsum("bq,bhq->bh", of_last, sink)
        later = torch.arange(first, last, device=device)[:, None] + offset > torch.arange(end, device=device)
        p = p.masked_fill_(~later, 0.0)
        sums[..., :end] += torch.einsum("bsq,bhqk->bshk", members[..., first:last], p)
        seen = (mask[:, 0] & later).float()  # exact: a block has far fewer than 2^24 rows
        counts[..., :end] += torch.einsum("bsq,bqk->bsk", members[..., first:last], seen).long()
    mass /= members[:, -1].sum(-1).clamp(min=1)[:, None, None]
    return Sums(sums, counts, mass)
