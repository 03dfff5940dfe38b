"""Checks before a model is measured: an instrument that is wrong for this model must fail, not print numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from mless import kernels
from mless.capture import activations, affine, capturing
from mless.capture.branching import Branches
from mless.capture.scoring import Scorer, Scores
from mless.capture.seam import Call
from mless.errors import BadAttention, ProofFailed, UnsupportedArchitecture, first_line
from mless.kernels.reference import probabilities
from mless.models import LoadedModel
from mless.models.activations import activation_points
from mless.models.adapters import own_of
from mless.models.seams import attention_layers, attention_modules, registered
from mless.values import QUERY_SETS, Prompt, head_name

#: Ours and eager start from the same queries, keys and values and both work in fp32, whatever the model's dtype.
_IN_FP32 = 1e-4
#: How far an attention's output in the model's dtype, and a token's hidden state, may be from the other computation's, as a share of its
#: own size.
_OUTPUT = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
_HIDDEN = {"float32": 1e-3, "bfloat16": 2e-1, "float16": 5e-2}
#: What two plain forwards may differ by where the machine's own arithmetic does not repeat.
_RESTORED = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
#: How far a log-probability may be from the same one computed another way, in nats.
_LOG_P = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
#: Long enough for a whole ordinary prompt, short enough for eager's matrices.
_TOKENS = 512
#: Texts after a prompt that are compared in one row and in rows of their own.
_TEXTS = 4
#: Activations are compared value by value, so a few tokens are enough.
_READING_TOKENS = 64


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
    restoration: after the instrument is taken off, the model's outputs are as before, to the bit where the machine repeats its bits
    """
    tokens = torch.tensor([prompt.token_ids[:_TOKENS]], device=model.device)
    before = _hidden(model, tokens)
    worst = {"received": 0.0, "output": 0.0}
    with capturing(model.model, layers=layers, kernel=kernel) as recorder:

        def on_call(call: Call, out: Tensor) -> None:
            recorder.finish()  # numbers that are not finite are said to be so
            # Layer by layer, so that one layer's matrices are in memory at a time.
            eager_out, matrix = _eager(model, call)
            ours = recorder.sums[call.layer].received[0, QUERY_SETS.index("later")]
            worst["received"] = max(worst["received"], _check_received(model, call.layer, ours, matrix))
            found = _check_output(model, call.layer, "its attention output", out, eager_out, _OUTPUT[model.dtype])
            worst["output"] = max(worst["output"], found)

        # Given, not derived from the mask: where an indexer chooses a query's keys, a real token may not see itself.
        every = torch.ones(1, len(QUERY_SETS), tokens.shape[1], dtype=torch.bool, device=model.device)
        recorder.expect(every, torch.zeros_like(tokens))
        recorder.on_call = on_call
        inside = _hidden(model, tokens)
        recorder.on_call = None
        recorder.expect(every, torch.zeros_like(tokens))
        changed = _hidden(model, _other_last(model, tokens))
    _check_finite(model, before)
    restored = _check_restored(model, before, _hidden(model, tokens))
    forward = _check_forward(model, before, inside)
    if not (causality := state_gap(inside[:, :-1], changed[:, :-1])) <= _HIDDEN[model.dtype]:
        raise ProofFailed(
            f"{model.label}: a changed last token moved earlier hidden states (by {causality:.2g} of their size): the model looks ahead, so "
            "what a token received cannot be told; see docs/adding-a-model.md"
        )
    return {**worst, "forward": forward, "causality": causality, "restoration": restored, "tokens": tokens.shape[1]}


def prove_outputs(model: LoadedModel, prompt: Prompt, layers: Sequence[int]) -> dict[str, Any]:
    """The same for attention outputs.

    captured:    our outputs against the family's own eager attention, given the same queries, keys, values and mask
    entering:    what the output projection is really handed, head after head, against the same
    forward:     as in `prove`
    restoration: as in `prove`
    """
    tokens = torch.tensor([prompt.token_ids[:_TOKENS]], device=model.device)
    worst = {"captured": 0.0, "entering": 0.0}
    expected: dict[int, Tensor] = {}

    def watcher(call: Call, outputs: affine.Outputs) -> None:
        eager = _eager(model, call)[0]
        what, ours = "the captured attention output", outputs.o.transpose(1, 2)
        worst["captured"] = max(worst["captured"], _check_output(model, call.layer, what, ours, eager, _IN_FP32))
        expected[call.layer] = eager.flatten(2)

    def entering(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            # Each layer's matrices go as soon as they are compared.
            theirs, got = expected.pop(layer), given[0].reshape(1, tokens.shape[1], -1)
            if got.shape != theirs.shape:
                raise ProofFailed(
                    f"{model.label} layer {layer}: its output projection takes {got.shape[-1]} numbers per token, but its heads put out "
                    f"{theirs.shape[-1]}; this family needs an adapter, see docs/adding-a-model.md"
                )
            found = _check_output(model, layer, "what enters the output projection", got, theirs, _OUTPUT[model.dtype])
            worst["entering"] = max(worst["entering"], found)

        return hook

    before = _hidden(model, tokens)
    _check_finite(model, before)
    modules = attention_modules(model.model)
    with ExitStack() as stack:
        for layer in attention_layers(model.model, layers):
            handle = _output_projection(model, modules[layer]).register_forward_pre_hook(entering(layer))
            stack.callback(handle.remove)
        with affine.watching(model.model, layers, torch.zeros_like(tokens, dtype=torch.bool), watcher):
            inside = _hidden(model, tokens)
    after = _hidden(model, tokens)
    forward = _check_forward(model, before, inside)
    restored = _check_restored(model, before, after)
    return {**worst, "forward": forward, "restoration": restored, "tokens": tokens.shape[1]}


def prove_reading(model: LoadedModel, prompt: Prompt, layers: Sequence[int]) -> dict[str, Any]:
    """The same for activations: reading them changes no bit of the model's output, and leaves nothing behind.

    And the model uses the value that is read: a gated MLP's output, computed again from it, equals the model's.
    """
    tokens = torch.tensor([prompt.token_ids[:_READING_TOKENS]], device=model.device)
    points = activation_points(model.model, list(layers))
    activation: dict[int, Tensor] = {}
    worst = 0.0
    gated = [point for point in points if point.gated]

    def hooks() -> list[int]:
        return [len(point.act._forward_hooks) for point in points]  # pyright: ignore[reportPrivateUsage]

    def check(layer: int, owner: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def compare(module: nn.Module, given: Any, output: Any) -> None:
            nonlocal worst
            again = owner.down_proj(activation.pop(layer) * owner.up_proj(given[0]))  # pyright: ignore[reportCallIssue]
            error = float((again.float() - output.float()).abs().max() / output.float().abs().max().clamp(min=1e-30))
            worst = max(worst, error)

        return compare

    attached, before = hooks(), _hidden(model, tokens)
    with ExitStack() as stack:
        for point in gated:
            stack.callback(point.owner.register_forward_hook(check(point.layer, point.owner)).remove)
        with activations.watching(model.model, layers, lambda layer, values: activation.update({layer: values})):
            inside = _hidden(model, tokens)
    after = _hidden(model, tokens)
    # Two forwards of a machine that does not repeat itself may differ in a last bit (`_check_restored`).
    if (gap := state_gap(before, inside)) > _RESTORED[model.dtype]:
        raise ProofFailed(
            f"{model.label}: its output changed while its activations were read (by {gap:.2g} of a token's size); they cannot be trusted"
        )
    if state_gap(before, after) > _RESTORED[model.dtype] or hooks() != attached:
        raise ProofFailed(f"{model.label}: the model is not as before once its activations were read")
    # Two ways to compute the same product may differ only by rounding in the model's dtype.
    if worst > 64 * torch.finfo(inside.dtype).eps:
        raise ProofFailed(
            f"{model.label}: an MLP's output differs by {worst:.1g} (relative) from the one computed from the activation that was read, so that is "
            "not what the MLP goes on with; see docs/adding-a-model.md"
        )
    return {"output unchanged": True, "restored": True} | ({"MLP computed anew": worst} if gated else {})


def prove_scores(
    model: LoadedModel,
    scorer: Scorer,
    together: Sequence[Branches],
    apart: Sequence[Branches],
    shape: tuple[int, int] | None,
) -> dict[str, Any]:
    """The same for log-probabilities of texts after a prompt.

    head:       log p of a text in a row of its own against the model's own forward, whole
    texts:      whether all texts after a prompt may share a row: the longest get the same numbers as in rows of their own
    neighbours: a row has the same bits alone and with others, in another place; `shape` is rows × tokens of the forwards to come
    """
    longest = sorted(range(len(apart)), key=lambda at: len(apart[at]), reverse=True)[:_TEXTS]
    alone = {at: scorer([apart[at]])[0] for at in longest}
    head = _check_scores(model, scorer, apart[longest[0]], alone[longest[0]])
    try:
        first_gap = gap = _gap_together(scorer, together, alone)
        if not gap <= _LOG_P[model.dtype]:
            # Once more: a study keeps what is found here, and numbers that do not repeat must not decide it.
            gap = _gap_together(scorer, together, {at: scorer([apart[at]])[0] for at in longest})
        why = None if gap <= _LOG_P[model.dtype] else f"in one row they differ by {gap:.2g} nats"
    except UnsupportedArchitecture as fault:
        first_gap, gap, why = math.nan, math.nan, first_line(fault)
    found: dict[str, Any] = {"head": head, "texts": "in one row" if why is None else "in rows of their own"}
    found |= {"gap": gap} if why is None else {"why": why}
    if first_gap > _LOG_P[model.dtype] >= gap:
        found["gap that did not repeat"] = first_gap
    rows = together if why is None else apart[:1]
    if shape is not None:
        found["neighbours"] = _check_neighbours(model, scorer, rows[0], apart, shape)
    return found


def _gap_together(scorer: Scorer, together: Sequence[Branches], alone: Mapping[int, Scores]) -> float:
    """How far the numbers of texts in one row are from those in rows of their own."""
    shared = scorer(together)[0].texts
    return max((_apart(one.texts[0], shared[at]) for at, one in alone.items()), default=0.0)


def _check_scores(model: LoadedModel, scorer: Scorer, row: Branches, found: Scores) -> float:
    gap = _apart(found.texts[0], _own_scores(model, row))
    if gap <= _LOG_P[model.dtype]:
        return gap
    # Numbers that do not come out a second time are no fault of the family.
    if _apart(scorer([row])[0].texts[0], _own_scores(model, row)) <= _LOG_P[model.dtype]:
        raise ProofFailed(
            f"{model.label}: log-probabilities differed by {gap:.2g} nats from those of the model's own forward, and agreed when both were run a second time "
            f"on {model.device}: this machine, or this model, does not repeat its numbers; run the command again, and if it fails again, elsewhere"
        )
    raise ProofFailed(
        f"{model.label}: log-probabilities differ by {gap:.2g} nats from those of the model's own forward, more than {_LOG_P[model.dtype]:g} allowed in "
        f"{model.dtype}; this family cannot be scored, see docs/adding-a-model.md"
    )


def _own_scores(model: LoadedModel, row: Branches) -> Float64[np.ndarray, " predictions"]:
    """The same log-probabilities by the model's own forward, whole."""
    ids, predicted = (torch.from_numpy(one).to(model.device) for one in (row.ids[None], row.predicted))
    more = (
        {}
        if row.prompt.position_ids is None
        else {"position_ids": torch.from_numpy(row.positions)[None].to(model.device)}
    )
    with torch.inference_mode():
        called = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more)
        logits = called.logits[0, len(row.prompt) - 1 :][: len(predicted)]
        return logits.float().log_softmax(-1).gather(-1, predicted[:, None])[:, 0].double().cpu().numpy()


def _apart(first: Float64[np.ndarray, " _"], second: Float64[np.ndarray, " _"]) -> float:
    return float(np.abs(first - second).max()) if len(first) else 0.0


def _check_neighbours(
    model: LoadedModel, scorer: Scorer, row: Branches, others: Sequence[Branches], shape: tuple[int, int]
) -> str:
    count, length = shape
    if count < 2:
        return "rows run alone"
    beside = [other for other in others if len(other) <= length][: count - 1]
    (alone,) = scorer([row], count=count, length=length)
    among = scorer([*beside, row], count=count, length=length)[-1]
    if any((a != b).any() for a, b in zip(alone.texts, among.texts, strict=True)):
        raise ProofFailed(
            f"{model.label}: a row's log-probabilities have other bits beside other rows than alone, on {model.device} in {model.dtype}; try --dtype "
            "float32, or --set group_tokens=1, which runs rows one by one"
        )
    return "same bits"


def _hidden(model: LoadedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model.model(input_ids=tokens, use_cache=False).last_hidden_state


def _other_last(model: LoadedModel, tokens: Tensor) -> Tensor:
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.model.get_input_embeddings().num_embeddings
    return changed


def state_gap(first: Tensor, second: Tensor) -> float:
    """The relative change of a token's hidden state, mean over tokens.

    Per token, because some hidden states are a hundred times larger and would hide the rest. The mean, because in a mixture of experts
    rounding can send one token to another expert and change it completely.
    """
    if not first.numel():
        return 0.0
    change = (first.float() - second.float()).norm(dim=-1)
    return float((change / first.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)).mean())


def _check_finite(model: LoadedModel, hidden: Tensor) -> None:
    if not bool(torch.isfinite(hidden).all()):
        raise BadAttention(
            f"{model.label}'s hidden states are not finite (NaN or infinite) after layer {model.loaded_layers}; the weights or the dtype "
            "break it: try --dtype float32, or check the checkpoint"
        )


def _check_forward(model: LoadedModel, before: Tensor, inside: Tensor) -> float:
    allowed = _HIDDEN[model.dtype]
    if not (gap := state_gap(before, inside)) <= allowed:
        raise ProofFailed(
            f"{model.label}: the instrument changes the model's hidden states (by {gap:.2g} of a token's size, {allowed:g} allowed in "
            f"{model.dtype}); see docs/adding-a-model.md"
        )
    return gap


def _check_restored(model: LoadedModel, before: Tensor, after: Tensor) -> str:
    if torch.equal(before, after):
        return "same bits"
    # Seen once in some hundred runs on a busy CPU: a plain forward that does not repeat its own last bit.
    if not (gap := state_gap(before, after)) <= _RESTORED[model.dtype]:
        raise ProofFailed(
            f"{model.label}: taking the instrument off did not give back the model's own outputs (they differ by {gap:.2g} of a token's "
            "size); please report this"
        )
    return f"to {gap:.1g} (this machine does not repeat a forward bit for bit)"


def _output_projection(model: LoadedModel, module: nn.Module) -> nn.Module:
    """The last part of an attention module that multiplies by a matrix; norms have vectors."""
    found = [part for part in module.children() if getattr(getattr(part, "weight", None), "ndim", 0) == 2]
    if not found:
        raise UnsupportedArchitecture(
            f"{model.family!r}: {type(module).__name__} has no output projection of its own, so its heads' outputs cannot be proved; see "
            "docs/adding-a-model.md"
        )
    return found[-1]


def _eager(model: LoadedModel, call: Call) -> tuple[Tensor, Tensor]:
    """Output and matrix by the family's own eager function, in fp32: eager in bf16 rounds its scores to 8 bits."""
    q, k, v = call.query.float(), call.key.float(), call.value.float()
    eager: Any = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if own_of(call.module) is not None and not registered(call.module):
        # Such a family has no function to ask. `forward` checks the row's scale, mask and bias against the family's own code.
        matrix, _ = probabilities(q, k, visible=call.mask, **call.score)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return (matrix @ values.double()).transpose(1, 2).float(), matrix
    if eager is None:
        raise ProofFailed(
            f"{model.family!r} has no eager attention to hold our numbers against, so they cannot be proved; see docs/adding-a-model.md"
        )
    visible = call.mask(0, q.shape[2])
    additive = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, torch.finfo(torch.float32).min)
    out, matrix = eager(call.module, q, k, v, additive, **call.given)
    if call.score["sinks"] is not None and bool((matrix.sum(-1) > 1 - _IN_FP32).all()):
        # Granite lets its sink scale the output and returns the matrix as it was before; the output's own check shows that it does.
        matrix = matrix * (1 - probabilities(q, k, visible=call.mask, **call.score)[1][..., None])
    return out, matrix


def _check_received(model: LoadedModel, layer: int, ours: Tensor, matrix: Tensor) -> float:
    truth = torch.tril(matrix[0].double(), diagonal=-1).sum(-2)
    error = (ours.double() - truth).abs() / truth.clamp(min=1.0)
    found = float(error.max())
    if not found <= _IN_FP32:
        head = int(error.amax(-1).argmax()) + 1
        raise ProofFailed(
            f"{model.label} {head_name(layer, head)}: received attention differs from eager attention by {found:.2g}, "
            f"more than {_IN_FP32:g} allowed; this family needs an adapter, see docs/adding-a-model.md"
        )
    return found


def _check_output(model: LoadedModel, layer: int, what: str, ours: Tensor, eager: Tensor, allowed: float) -> float:
    found = float((ours.float() - eager).norm() / eager.norm().clamp(min=torch.finfo(torch.float32).tiny))
    if not found <= allowed:
        raise ProofFailed(
            f"{model.label} layer {layer}: {what} differs from eager's by {found:.2g} of its size, more than {allowed:g} allowed in "
            f"{model.dtype}; this family needs an adapter, see docs/adding-a-model.md"
        )
    return found
