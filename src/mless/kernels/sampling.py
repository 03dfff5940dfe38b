"""The next token of every row: temperature, top-k, top-p, and a draw by the inverse distribution function.

The same cuts as transformers' `generate`, in the same order. One thing is fixed here that they leave to a sort: of equal tokens at the cut
of p the later ones stay.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from mless.kernels.choosing import triton_serves

#: A sum within this distance of the cut of p counts as on it; otherwise rounding would decide. Ten equal tokens and p = 0.9 leave nine.
CLOSE = 1e-6


def drawn(
    logits: Float[Tensor, "rows vocabulary"],
    draws: Float64[Tensor, "rows 1"],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Tensor, " rows"]:
    """A token for each row, by its number in [0, 1) from `draws`.

    A `top_k` of 0 takes all. A row's token does not depend on the other rows.
    """
    if triton_serves(logits):
        from mless.kernels import sampling_triton

        return sampling_triton.drawn(logits, draws, temperature, top_k, top_p, close=CLOSE)
    # Relative to the highest score, so that it stays finite at any temperature.
    scores = logits.float()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if top_k and top_k < scores.shape[-1]:
        lowest = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if top_p < 1:
        values, order = scores.sort(stable=True)
        gone = torch.softmax(values, dim=-1).double().cumsum(-1) <= 1 - top_p + CLOSE
        gone[:, -1] = False
        scores = scores.masked_fill(gone.scatter(1, order, gone), -torch.inf)
    cumulative = torch.softmax(scores, dim=-1).double().cumsum(-1)
    found = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)[:, 0]
    return found.clamp(max=scores.shape[-1] - 1)
