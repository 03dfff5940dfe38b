"""The attention inside a `capturing` block: SDPA with its log-sum-exp where it gives one, or our own for what SDPA lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mless.capture.seam import Call
from mless.kernels.streaming import BLOCK_ELEMENTS

ROWS_AT_ONCE, _ROWS_AT_LEAST = 4096, 256


def forward_with_lse(
    call: Call,
) -> tuple[Float[Tensor, "batch queries heads dim"], Float[Tensor, "batch heads queries"]] | None:
    """SDPA's result by the backend it would choose, and that backend's log-sum-exp; None where it gives none."""
    q, k, v, scale = call.query, call.key, call.value, call.score["scale"]
    before = k.shape[2] - q.shape[2]
    if not call.mask.causal_for_real or q.shape[-1] % 8 or q.shape[-1] != v.shape[-1] or q.shape[2] < 2:
        return None
    own = _with_lse(q, k[:, :, before:], v[:, :, before:], scale, causal=True)
    if own is None:
        return None
    out, lse = own
    if before:
        # With a cache: the part from earlier keys, which every query sees, and the part from this forward's keys.
        past = _with_lse(q, k[:, :, :before], v[:, :, :before], scale, causal=False)
        if past is None:
            return None
        both = torch.logaddexp(past[1], lse)
        shares = [(part - both).exp()[..., None] for part in (past[1], lse)]
        out, lse = (past[0] * shares[0] + out * shares[1]).to(q.dtype), both
    return out.transpose(1, 2).contiguous(), lse


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Float[Tensor, "batch heads queries dim"], Float[Tensor, "batch heads queries"]] | None:
    ops = torch.ops.aten
    # In 16 bits the CPU's is right to 4 digits only.
    if not q.is_cuda and (q.device.type != "cpu" or q.dtype != torch.float32):
        return None
    chosen = chosen_kernel(q, k, v, scale, causal=causal)
    if not q.is_cuda:
        if chosen != SDPBackend.FLASH_ATTENTION.value:
            return None
        return ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        out, lse = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    elif chosen == SDPBackend.CUDNN_ATTENTION.value:
        out, lse = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    else:
        return None
    return out, lse.reshape(q.shape[:3])


def chosen_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, mask: Tensor | None = None) -> int:
    """The backend that SDPA would choose. Another one, called all the same, may read beyond the keys: torch 2.7's for CPUs does not know heads
    that share keys.
    """
    return torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])  # pyright: ignore[reportPrivateUsage]


def attention_of(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """The call's attention as the model itself computes it, by SDPA where that knows the scores."""
    plain = all(call.score[name] is None for name in ("softcap", "sinks", "bias"))
    return sdpa_forward(call) if plain else own_forward(call)


def sdpa_forward(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    if (out := call.mask.attended(call)) is not None:
        return out

    def sdpa(q: Tensor, keys: slice, mask: Tensor | None, causal: bool | None = None) -> Tensor:
        k, v = call.key[:, :, keys], call.value[:, :, keys]
        return _by_sdpa(call.module, q, k, v, mask, scaling=call.score["scale"], is_causal=causal)

    if call.mask.causal_for_real and call.query.shape[2] == call.key.shape[2]:
        return sdpa(call.query, slice(None), None, causal=True)
    rows = ROWS_AT_ONCE
    if (seen := call.seen) is not None:
        # Half as many queries as a window has keys: then only a third of the work is hidden.
        rows = min(rows, max(_ROWS_AT_LEAST, 1 << max(0, seen.widest // 2 - 1).bit_length()))
    out = [sdpa(call.query[:, :, first:last], keys, mask) for first, last, keys, mask in _blocks(call, rows)]
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _by_sdpa(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    is_causal: bool | None = None,
) -> Float[Tensor, "batch queries heads dim"]:
    shared = k.shape[1] != q.shape[1]
    # Where there is a mask, transformers repeats key heads on a CPU too, although SDPA's own kernel there need not.
    masked = shared and mask is not None and q.is_cpu
    # Some heads of the module, with a key head each: transformers would repeat key heads as often as for all of them.
    if not shared or (
        masked and chosen_kernel(q, k, v, scaling, causal=False, mask=mask) == SDPBackend.FLASH_ATTENTION.value
    ):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=bool(is_causal), scale=scaling, enable_gqa=shared
        )
        return out.transpose(1, 2).contiguous()
    return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, is_causal=is_causal)[0]


def _blocks(call: Call, rows: int) -> Iterator[tuple[int, int, slice, Tensor]]:
    """Blocks of queries, with the keys they need and which of these each sees; never the whole square."""
    seen = call.seen
    for first in range(0, call.query.shape[2], rows):
        last = min(first + rows, call.query.shape[2])
        keys, mask = seen.near(first, last) if seen is not None else (slice(None), call.mask(first, last))
        yield first, last, keys, mask


def own_forward(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """Soft caps, sinks and score biases, which SDPA does not know: the same softmax, by blocks of rows."""
    if (out := call.mask.attended(call)) is not None:
        return out
    return weighed(call, lambda first, p, seen: p)


def weighed(
    call: Call, change: Callable[[int, Float[Tensor, "batch heads rows keys"], Tensor], Tensor]
) -> Float[Tensor, "batch queries heads dim"]:
    """Values weighed by the softmax in fp32, by blocks of rows. `change(first, weights, seen)` gives the weights to use instead."""
    query, key, score = call.query, call.key, call.score
    groups = query.shape[1] // key.shape[1]
    every_key = key.repeat_interleave(groups, 1).float().transpose(-1, -2)
    values = call.value.repeat_interleave(groups, 1)
    out: list[Tensor] = []
    rows = max(16, BLOCK_ELEMENTS // (query.shape[0] * query.shape[1] * key.shape[2]))
    for first, last, keys, mask in _blocks(call, rows):
        scores = query[:, :, first:last].float() @ every_key[..., keys] * score["scale"]
        if score["softcap"] is not None:
            scores = torch.tanh(scores / score["softcap"]) * score["softcap"]
        if score["bias"] is not None:
            scores = scores + score["bias"][:, :, first:last, keys].float()
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        there = scores.shape[-1]
        if score["sinks"] is not None:
            sink = score["sinks"].float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        p = change(first, torch.softmax(scores, dim=-1)[..., :there], mask)
        out.append((p.to(values.dtype) @ values[:, :, keys]).transpose(1, 2))
    return torch.cat(out, dim=1).contiguous()


def by_heads(call: Call, at: Sequence[int]) -> Call:
    """The same call of some heads only, numbered from 0, with one key head each."""
    place = torch.tensor(at, device=call.query.device)
    each = call.query.shape[1] // call.key.shape[1]
    kept = {"query": call.query[:, place], "key": call.key[:, place // each], "value": call.value[:, place // each]}
    return replace(call, **kept, score=of_heads(call.score, place, call.query.shape[1]))


def of_heads(score: Mapping[str, Any], at: Tensor, heads: int) -> dict[str, Any]:
    """Sinks and biases of some heads out of so many."""
    chosen = dict(score)
    for name, axis in (("sinks", 0), ("bias", 1)):
        values: Tensor | None = chosen.get(name)
        if values is not None and values.shape[axis] == heads:
            chosen[name] = values.index_select(axis, at)
    return chosen
