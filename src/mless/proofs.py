"""Checked when a model is about to be measured: an instrument that is wrong for this model must say so, not print numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mless.capture import capturing, received
from mless.errors import ProofFailed
from mless.models import LoadedModel
from mless.values import Prompt, Span, head_name

#: Eager attention rounds its scores to the model's dtype before the softmax; ours keeps fp32, so bf16 differs by its rounding.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
#: Long enough for a whole ordinary prompt, short enough for eager's matrices.
_TOKENS = 512


def prove(model: LoadedModel, prompt: Prompt, layers: Sequence[int]) -> dict[str, Any]:
    """Three checks on the front of a real prompt; raises `ProofFailed`, else says how well each held.

    received:    our sums against the model's own eager attention matrices
    causality:   another last token leaves every earlier hidden state as it was
    restoration: after the instrument is taken off, the model's outputs are the same bits as before
    """
    ids = prompt.token_ids[:_TOKENS]
    short = Prompt(prompt.item, prompt.condition, ids, (Span("question", 0, len(ids)),), "")
    tokens = torch.tensor([ids], device=model.device)
    before = _hidden(model, tokens)
    ours = next(received(model, [short], layers=layers))
    after = _hidden(model, tokens)
    if not torch.equal(before, after):
        raise ProofFailed(
            f"{model.label}: taking the instrument off did not give back the model's own outputs; please report this"
        )
    return {
        "received": _against_eager(model, tokens, ours.received[0], ours.n[0], layers),
        "causality": _causality(model, tokens, layers),
        "restoration": "same bits",
        "tokens": len(ids),
    }


def _hidden(model: LoadedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model.model(input_ids=tokens, use_cache=False).last_hidden_state


def _against_eager(
    model: LoadedModel, tokens: Tensor, means: np.ndarray, n: np.ndarray, layers: Sequence[int]
) -> float:
    config = model.model.config
    implementation = config._attn_implementation
    try:
        config._attn_implementation = "eager"
        with torch.inference_mode():
            matrices = model.model(input_ids=tokens, use_cache=False, output_attentions=True).attentions
    finally:
        config._attn_implementation = implementation
    if not matrices or any(matrix is None for matrix in matrices):
        raise ProofFailed(
            f"{model.family!r} returns no eager attention to hold our numbers against, so they cannot be proved; see docs/adding-a-model.md"
        )
    worst = 0.0
    for at, layer in enumerate(layers):
        matrix = matrices[layer - 1][0].double()
        truth = torch.tril(matrix, diagonal=-1).sum(-2).cpu().numpy()
        got = np.nan_to_num(means[at]) * n[at]
        error = np.abs(got - truth) / np.maximum(1.0, truth)
        if not error.max() <= _TOLERANCE[model.dtype]:
            head = int(error.max(-1).argmax()) + 1
            raise ProofFailed(
                f"{model.label} {head_name(layer, head)}: received attention differs from eager attention by {error.max():.2g}, "
                f"more than {_TOLERANCE[model.dtype]:g} allowed in {model.dtype}; this family needs an adapter, see docs/adding-a-model.md"
            )
        worst = max(worst, float(error.max()))
    return worst


def _causality(model: LoadedModel, tokens: Tensor, layers: Sequence[int]) -> float:
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.model.get_input_embeddings().num_embeddings
    with capturing(model.model, layers=layers):
        first, second = _hidden(model, tokens), _hidden(model, changed)
    gap = float((first[:, :-1] - second[:, :-1]).abs().max() / first.abs().max())
    if not gap <= _TOLERANCE[model.dtype]:
        raise ProofFailed(
            f"{model.label}: a changed last token moved earlier hidden states (by {gap:.2g} of their size): the model looks ahead, so "
            "what a token received cannot be told; see docs/adding-a-model.md"
        )
    return gap
