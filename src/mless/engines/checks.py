"""What the engine `hf` refuses, and how its numbers are compared with the model's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mless.capture.cutting import check_cuts
from mless.capture.patching import check_patch
from mless.engines.base import Decoding, Request
from mless.engines.patched import logits_after, puts_in, refuse_windows
from mless.engines.prefill import positions_of
from mless.errors import BadStudy, EngineFault, ProofFailed
from mless.models import LoadedModel

#: Largest allowed difference between logits in slots and those of the model's own forward, as a share of their size: rounding only.
_FORWARD = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}


def check_room(model: LoadedModel, requests: Sequence[Request], decoding: Decoding, length: int, reach: int) -> None:
    """Refuse what rows of `length` slots cannot hold, and positions from `reach` on."""
    for request in requests:
        if not request.token_ids:
            raise EngineFault(f"item {request.item!r}: the hf engine takes token ids, and this request has none")
        if request.arm is not None and request.arm.scope != "token":
            raise BadStudy(
                f"condition {request.condition!r}: ARM with scope {request.arm.scope!r} pools the tokens of a call, so an answer would depend on its "
                "neighbours; use scope token here, or mless.arm around a generate of your own"
            )
        prompt = slots_of(request)
        if prompt + decoding.max_new_tokens > length:
            raise EngineFault(
                f"item {request.item!r} under {request.condition!r} needs {prompt + decoding.max_new_tokens} cache slots ({prompt} tokens and "
                f"{decoding.max_new_tokens} new ones), but this engine has {length}; make it with a larger length"
            )
        if (last := positions_of(request)[-1] + decoding.max_new_tokens) > reach:
            raise BadStudy(
                f"item {request.item!r} under {request.condition!r} reaches position {last}, but {model.label} has {reach}; use a "
                "smaller --max-new-tokens, or a shorter filler"
            )


def slots_of(request: Request) -> int:
    """How many slots the prompt takes: as many as it has tokens, and more where a filler's keys are put in."""
    changes = request.changes
    filled = changes.source if changes is not None and puts_in(changes) else None
    return len(request.token_ids) if filled is None else len(filled)


def check_changes(model: LoadedModel, request: Request, length: int) -> None:
    """Refuse cuts and patches that mean nothing in the prompt, or that rows of up to `length` tokens cannot have."""
    changes, where = request.changes, f"item {request.item!r} under {request.condition!r}"
    if changes is None:
        return
    if changes.prompt.token_ids != request.token_ids:
        raise EngineFault(f"{where}: its cuts and patches are for a prompt of other tokens; give the prompt's own")
    check_cuts(changes.cut, changes.prompt)
    if not changes.patch:
        return
    if changes.source is None:
        raise EngineFault(f"{where} takes values from another run, but no prompt of that run is given")
    if request.arm is not None or request.hidden is not None or changes.source.hidden:
        raise BadStudy(
            f"{where} takes values from another run, which goes together neither with ARM nor with hidden filler; cut the filler instead: "
            'cut = [{ queries = "original,answer", keys = "filler" }]'
        )
    for patch in changes.patch:
        check_patch(patch, changes.prompt, changes.source)
    if puts_in(changes):
        refuse_windows(model, length)


def has_own_forward(request: Request) -> bool:
    """Whether the model's own forward can say what a request's logits are."""
    moved = request.position_ids is not None and request.changes is None
    return not moved and request.hidden is None and request.arm is None


def gap_of(model: LoadedModel, request: Request, trace: Float[Tensor, "tokens vocabulary"], step: int) -> float:
    """How far a step's logits are from those of the model's own forward without slots, as a share of their size."""
    ours, made = trace[step], trace[:step].max(-1).indices.tolist()
    if request.changes is not None:
        theirs = logits_after(model, request.changes, made).float()
    else:
        ids = torch.tensor([[*request.token_ids, *made]], device=model.device)
        with torch.inference_mode():
            theirs = model.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    centred = theirs - theirs.mean()
    gap = float((ours.float() - theirs).norm() / centred.norm().clamp(min=torch.finfo(torch.float32).tiny))
    if not gap <= _FORWARD[model.dtype]:
        raise ProofFailed(
            f"{model.label}: decoding in slots gives other logits than the model's own forward (by {gap:.2g} of their size, "
            f"{_FORWARD[model.dtype]:g} allowed in {model.dtype}); this family needs --engine vllm or openai"
        )
    return gap
