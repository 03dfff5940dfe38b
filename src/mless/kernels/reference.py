"""The reference: every attention matrix in double precision, straight from the definition. Slow and large on purpose."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mless.kernels.signature import Sums, Visible


def probabilities(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    *,
    scale: float,
    visible: Visible,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None,
) -> tuple[Float[Tensor, "batch heads queries keys"], Float[Tensor, "batch heads queries"]]:
    """The attention matrix and each query's probability of the learned sink (0 without one)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    mask = visible(0, q.shape[2])
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = torch.full_like(scores[..., :1], float("-inf"))
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand_as(sink)
    full = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)
    # A query that sees nothing (padding) has no distribution: 0, so that it adds nothing to any sum.
    full = torch.where(mask.any(-1, keepdim=True), full, torch.zeros_like(full))
    return full[..., :-1], full[..., -1]


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
    """`lse` is not used here; other implementations may use it."""
    p, sink = probabilities(q, k, scale=scale, visible=visible, softcap=softcap, sinks=sinks, bias=bias)
    n_queries, n_keys = p.shape[-2:]
    offset = n_keys - n_queries  # with a cache the queries are the last tokens
    later = (torch.arange(n_queries)[:, None] + offset > torch.arange(n_keys)).to(p.device)
    seen = (visible(0, n_queries) & later)[:, :1]
    members = sets.double()
    sums = torch.einsum("bsq,bhqk->bshk", members, p * later)
    counts = torch.einsum("bsq,bqk->bsk", members, seen[:, 0].double()).long()
    span_shares = torch.stack([(p * (spans == s)[:, None, None, :]).sum(-1) for s in range(n_spans)] + [sink], dim=-1)
    last = members[:, -1]
    mass = torch.einsum("bq,bhqm->bhm", last, span_shares) / last.sum(-1).clamp(min=1)[:, None, None]
    return Sums(sums, counts, mass)
