"""Which implementation computes a call: the quickest that is correct for it."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mless.errors import BadStudy
from mless.kernels import joint, streaming
from mless.kernels.signature import Intervals, Sums, Visible

Implementation = Literal["streaming", "triton", "hopper"]
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def triton_serves(held: Tensor) -> bool:
    """Whether our kernels can run on this tensor's device: Triton is installed and supports the GPU (Ampere and later)."""
    return _HAS_TRITON and held.is_cuda and torch.cuda.get_device_capability(held.device) >= (8, 0)


def implementation(q: Tensor, k: Tensor, visible: Visible, sets: Tensor, *, plain: bool = True) -> Implementation:
    """`plain`: nothing but a scale is done to the scores (no soft cap, no bias)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (
        not (triton_serves(q) or (interpreted and _HAS_TRITON))
        or not isinstance(visible, Intervals)
        or sets.shape[1] > 2
    ):
        return "streaming"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or k.dtype != q.dtype or q.shape[2] == 0:
        return "streaming"
    if interpreted and q.dtype == torch.bfloat16:
        return "streaming"  # Triton's interpreter multiplies bf16 numbers by their bits (triton-lang/triton#11584)
    if not interpreted and plain and visible.whole:
        from mless.kernels import received_hopper

        if received_hopper.fits(q, k):
            return "hopper"
    return "triton"


def _refuse_rounded_products(device: torch.device) -> None:
    """Refuse if torch is set to round fp32 before products. The setting belongs to the whole process, so we do not change it."""
    kind = "cuda" if device.type == "cuda" else "mkldnn"
    precision = getattr(getattr(getattr(torch.backends, kind), "matmul", None), "fp32_precision", "none")
    if precision not in ("none", "ieee") and _rounds(device, precision):
        raise BadStudy(
            f"torch multiplies fp32 matrices in {precision} on {device.type} here, which would move received attention by up to a thousandth; "
            "measure with torch.set_float32_matmul_precision('highest')"
        )


@functools.cache
def _rounds(device: torch.device, precision: str) -> bool:
    """Whether the setting of that name does anything on this device; on many it does not."""
    # The routine depends on the shapes: a plain product may be exact where a batched one is rounded.
    for shape in ((64, 64), (256, 256), (4, 40, 64), (1, 4, 40, 64), (2, 8, 256, 64)):
        ones = torch.full(shape, 1 + 2**-12, dtype=torch.float32, device=device)
        if float((ones @ ones.transpose(-1, -2)).min()) < shape[-1] * (1 + 2**-12):
            return True
    return False


@torch.no_grad()  # no gradients: a graph would keep every layer's queries in memory
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
    """Sums of attention received per key, by query set, and mass by span.

    The queries are the last of the keys' tokens. A second set must be a part of the first. `lse` is the forward's own log-sum-exp of each
    query's scores (a learned sink in it), in fp32; without it one more pass computes it. Two equal sets (an expanded tensor) are summed
    once.
    """
    score: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "bias": bias}
    chosen = implementation(q, k, visible, sets, plain=softcap is None and bias is None)
    if chosen == "streaming":
        _refuse_rounded_products(q.device)
        return streaming.received(
            q, k, scale=scale, visible=visible, sets=sets, spans=spans, n_spans=n_spans, lse=lse, **score
        )  # fmt: skip
    from mless.kernels import received_triton

    assert isinstance(visible, Intervals)
    return received_triton.received(
        q, k, scale=scale, visible=visible, sets=sets, spans=spans, n_spans=n_spans, lse=lse, quick=chosen == "hopper", **score
    )  # fmt: skip


def attended(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    scale: float,
    visible: Visible,
    sets: Bool[Tensor, "batch sets queries"],
    spans: Int[Tensor, "batch keys"],
    n_spans: int,
) -> tuple[Float[Tensor, "batch queries heads value_dim"], Sums] | None:
    """Attention and its `received` at once, where that is quicker than one after the other; else None."""
    if not isinstance(visible, Intervals) or not joint.serves(q, k, v, visible):
        return None
    _refuse_rounded_products(q.device)
    return joint.attended(q, k, v, scale=scale, visible=visible, sets=sets, spans=spans, n_spans=n_spans)
