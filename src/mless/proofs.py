"""Checked when a model is about to be measured: an instrument that is wrong for this model must say so, not print numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mless import kernels
from mless.capture import capturing
from mless.errors import BadAttention, ProofFailed
from mless.models import LoadedModel
from mless.values import QUERY_SETS, Prompt, head_name

#: Ours and eager start from the same queries and keys and both work in fp32, whatever the model's dtype.
_RECEIVED = 1e-4
#: How far an attention's output, and a token's hidden state, may be from the other computation's, as a share of its own size.
_OUTPUT = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
_HIDDEN = {"float32": 1e-3, "bfloat16": 2e-1, "float16": 5e-2}
#: What two plain forwards may differ by where the machine's own arithmetic does not repeat.
_RESTORED = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
#: Long enough for a whole ordinary prompt, short enough for eager's matrices.
_TOKENS = 512


def prove(
    model: LoadedModel,
    prompt: Prompt,
    layers: Sequence[int],
    kernel: Callable[..., kernels.Sums] = kernels.received,
) -> dict[str, Any]:
    """Checks on the front of a real prompt; raises `ProofFailed`, else says how well each held.

    received:    our sums against the family's own eager attention, given the same queries, keys and mask
    output:      the attention's output, likewise
    forward:     the model's hidden states are the same with the instrument on as without it
    causality:   another last token leaves every earlier hidden state as it was
    restoration: after the instrument is taken off, the model's outputs are as before, to the bit where the machine repeats itself
    """
    tokens = torch.tensor([prompt.token_ids[:_TOKENS]], device=model.device)
    before = _hidden(model, tokens)
    worst = {"received": 0.0, "output": 0.0}
    with capturing(model.model, layers=layers, kernel=kernel) as recorder:

        def witness(
            layer: int,
            module: nn.Module,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: Any,
            given: Mapping[str, Any],
            out: Tensor,
        ) -> None:
            # Layer by layer, so that one layer's matrices are in memory at a time.
            eager_out, matrix = _eager(model, module, q, k, v, mask, given)
            ours = recorder.sums[layer].received[0, QUERY_SETS.index("later")]
            worst["received"] = max(worst["received"], _check_received(model, layer, ours, matrix))
            worst["output"] = max(worst["output"], _check_output(model, layer, out, eager_out))

        recorder.witness = witness
        inside = _hidden(model, tokens)
        recorder.witness = None
        changed = _hidden(model, _other_last(model, tokens))
    if not bool(torch.isfinite(before).all()):
        raise BadAttention(
            f"{model.label}'s hidden states are not finite (NaN or infinite) after layer {model.loaded_layers}; the weights or the dtype "
            "break it: try --dtype float32, or check the checkpoint"
        )
    after = _hidden(model, tokens)
    restored = "same bits"
    if not torch.equal(before, after):
        # Seen once in some hundred runs on a busy CPU: a plain forward that does not repeat its own last bit.
        if not (gap := _gap(before, after)) <= _RESTORED[model.dtype]:
            raise ProofFailed(
                f"{model.label}: taking the instrument off did not give back the model's own outputs (they differ by {gap:.2g} of a token's "
                "size); please report this"
            )
        restored = f"to {gap:.1g} (this machine does not repeat a forward bit for bit)"
    allowed = _HIDDEN[model.dtype]
    if not (forward := _gap(before, inside)) <= allowed:
        raise ProofFailed(
            f"{model.label}: the instrument changes the model's hidden states (by {forward:.2g} of a token's size, {allowed:g} allowed in "
            f"{model.dtype}); see docs/adding-a-model.md"
        )
    if not (causality := _gap(inside[:, :-1], changed[:, :-1])) <= allowed:
        raise ProofFailed(
            f"{model.label}: a changed last token moved earlier hidden states (by {causality:.2g} of their size): the model looks ahead, so "
            "what a token received cannot be told; see docs/adding-a-model.md"
        )
    return {**worst, "forward": forward, "causality": causality, "restoration": restored, "tokens": tokens.shape[1]}


def _hidden(model: LoadedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model.model(input_ids=tokens, use_cache=False).last_hidden_state


def _other_last(model: LoadedModel, tokens: Tensor) -> Tensor:
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.model.get_input_embeddings().num_embeddings
    return changed


def _gap(first: Tensor, second: Tensor) -> float:
    """The relative change of a token's hidden state, mean over tokens.

    Per token, because some have hidden states a hundred times larger, which would hide the rest; the mean, because in a mixture of
    experts a rounding can send one token to another expert, and that token then changes altogether.
    """
    if not first.numel():
        return 0.0
    change = (first.float() - second.float()).norm(dim=-1)
    return float((change / first.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)).mean())


def _eager(
    model: LoadedModel, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and matrix by the family's own eager function, in fp32: eager in bf16 rounds its scores to 8 bits."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ProofFailed(
            f"{model.family!r} has no eager attention to hold our numbers against, so they cannot be proved; see docs/adding-a-model.md"
        )
    visible = mask(0, q.shape[2])
    additive = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, torch.finfo(torch.float32).min)
    out, matrix = eager(module, q.float(), k.float(), v.float(), additive, **given)
    return out, matrix[0].double()


def _check_received(model: LoadedModel, layer: int, ours: Tensor, matrix: Tensor) -> float:
    truth = torch.tril(matrix, diagonal=-1).sum(-2)
    error = (ours.double() - truth).abs() / truth.clamp(min=1.0)
    found = float(error.max())
    if not found <= _RECEIVED:
        head = int(error.amax(-1).argmax()) + 1
        raise ProofFailed(
            f"{model.label} {head_name(layer, head)}: received attention differs from eager attention by {found:.2g}, "
            f"more than {_RECEIVED:g} allowed; this family needs an adapter, see docs/adding-a-model.md"
        )
    return found


def _check_output(model: LoadedModel, layer: int, ours: Tensor, eager: Tensor) -> float:
    found = float((ours.float() - eager).norm() / eager.norm().clamp(min=torch.finfo(torch.float32).tiny))
    if not found <= _OUTPUT[model.dtype]:
        raise ProofFailed(
            f"{model.label} layer {layer}: its attention output differs from eager's by {found:.2g} of its size, more than "
            f"{_OUTPUT[model.dtype]:g} allowed in {model.dtype}; this family needs an adapter, see docs/adding-a-model.md"
        )
    return found
