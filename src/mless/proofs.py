"""Checked when a model is about to be measured: an instrument that is wrong for this model must say so, not print numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mless import kernels
from mless.capture import capturing
from mless.errors import ProofFailed
from mless.models import LoadedModel
from mless.values import QUERY_SETS, Prompt, head_name

#: Ours and eager start from the same queries and keys and both work in fp32, whatever the model's dtype.
_RECEIVED = 1e-4
#: How far two forwards of one model may differ, as a share of the largest hidden state.
_FORWARD = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
#: Long enough for a whole ordinary prompt, short enough for eager's matrices.
_TOKENS = 512


def prove(
    model: LoadedModel,
    prompt: Prompt,
    layers: Sequence[int],
    kernel: Callable[..., kernels.Sums] = kernels.received,
) -> dict[str, Any]:
    """Four checks on the front of a real prompt; raises `ProofFailed`, else says how well each held.

    received:    our sums against the family's own eager attention, given the same queries and keys
    forward:     the model computes the same with the instrument on as without it
    causality:   another last token leaves every earlier hidden state as it was
    restoration: after the instrument is taken off, the model's outputs are the same bits as before
    """
    tokens = torch.tensor([prompt.token_ids[:_TOKENS]], device=model.device)
    before = _hidden(model, tokens)
    matrices: dict[int, Tensor] = {}

    def witness(
        layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Mapping[str, Any]
    ) -> None:
        if layer in layers:
            matrices[layer] = _eager_matrix(model, module, q, k, v, mask, given)

    with capturing(model.model, layers=layers, kernel=kernel) as recorder:
        recorder.witness = witness
        inside = _hidden(model, tokens)
        recorder.witness = None
        sums = {layer: found.received[0, QUERY_SETS.index("later")].double() for layer, found in recorder.sums.items()}
        causality = _gap(inside[:, :-1], _hidden(model, _other_last(model, tokens))[:, :-1])
    if not torch.equal(before, _hidden(model, tokens)):
        raise ProofFailed(
            f"{model.label}: taking the instrument off did not give back the model's own outputs; please report this"
        )
    forward = _gap(before, inside)
    if not forward <= _FORWARD[model.dtype]:
        raise ProofFailed(
            f"{model.label}: the instrument changes the model's hidden states (by {forward:.2g} of their size); see docs/adding-a-model.md"
        )
    if not causality <= _FORWARD[model.dtype]:
        raise ProofFailed(
            f"{model.label}: a changed last token moved earlier hidden states (by {causality:.2g} of their size): the model looks ahead, so "
            "what a token received cannot be told; see docs/adding-a-model.md"
        )
    return {
        "received": _compare(model, sums, matrices, layers),
        "forward": forward,
        "causality": causality,
        "restoration": "same bits",
        "tokens": tokens.shape[1],
    }


def _hidden(model: LoadedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model.model(input_ids=tokens, use_cache=False).last_hidden_state


def _other_last(model: LoadedModel, tokens: Tensor) -> Tensor:
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.model.get_input_embeddings().num_embeddings
    return changed


def _gap(first: Tensor, second: Tensor) -> float:
    if not first.numel():
        return 0.0
    return float((first - second).abs().max() / first.abs().max())


def _eager_matrix(
    model: LoadedModel, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Mapping[str, Any]
) -> Tensor:
    """The attention matrix by the family's own eager function, in fp32: eager in bf16 rounds its scores to 8 bits."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ProofFailed(
            f"{model.family!r} has no eager attention to hold our numbers against, so they cannot be proved; see docs/adding-a-model.md"
        )
    visible = mask(0, q.shape[2])
    additive = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return eager(module, q.float(), k.float(), v.float(), additive, **given)[1][0].double()


def _compare(
    model: LoadedModel, sums: Mapping[int, Tensor], matrices: Mapping[int, Tensor], layers: Sequence[int]
) -> float:
    worst = 0.0
    for layer in layers:
        truth = torch.tril(matrices[layer], diagonal=-1).sum(-2)
        error = (sums[layer] - truth).abs() / truth.clamp(min=1.0)
        found = float(error.max())
        if not found <= _RECEIVED:
            head = int(error.amax(-1).argmax()) + 1
            raise ProofFailed(
                f"{model.label} {head_name(layer, head)}: received attention differs from eager attention by {found:.2g}, "
                f"more than {_RECEIVED:g} allowed; this family needs an adapter, see docs/adding-a-model.md"
            )
        worst = max(worst, found)
    return worst
