"""The beginning of an answer whose prompt takes values of another run: keys and values for the slots, and the first token's logits.

A patch may stand at a prompt's last token, so the whole prompt runs here, alone, by the model's own forward with its cuts and patches.
From then on it is a row like any other.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mless.capture.cutting import cut_attached
from mless.capture.following import PADDING
from mless.capture.patching import (
    Place,
    RecordedRun,
    aligned,
    inserts,
    numbered,
    patch_attached,
    places_of,
    record_prompts,
    recorded,
)
from mless.capture.positions import check_reach, own_positions
from mless.changes import NAMED_SPANS
from mless.engines.base import Changes
from mless.engines.slots import Beginning
from mless.errors import UnsupportedArchitecture
from mless.models import LoadedModel
from mless.values import Prompt

#: Attention that repeats its own bits; cuDNN's need not.
_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, eq=False)
class Start:
    """Where a patched prompt's answer starts: keys and values of its slots, the spans of these, and the logits of its first token."""

    beginning: Beginning
    labels: list[int]
    logits: Float[Tensor, " vocabulary"]


def puts_in(changes: Changes) -> bool:
    """Whether a filler's keys and values are put into a prompt without it."""
    source = changes.source
    return source is not None and any(inserts(one, changes.prompt, source) for one in changes.patch)


def layers_put_in(model: LoadedModel, changes: Changes) -> list[int]:
    """The layers that get them."""
    source = changes.source
    assert source is not None
    own = [one for one in changes.patch if inserts(one, changes.prompt, source)]
    return sorted({layer for one in own for layer in numbered(model.model, one.part, one.layers)})


def started(model: LoadedModel, changes: Changes) -> Start:
    """Run a prompt with its cuts and patches, alone, and the run before it that the values come from."""
    prompt = changes.prompt
    runs = _source(model, changes)
    every: list[Place] = [("keys-values", layer) for layer in range(1, model.layers + 1)]
    with ExitStack() as stack:
        _enter(stack, model, changes, runs)
        # Entered last, so it sees what the others leave.
        recorder = stack.enter_context(recorded(model, every, [prompt]))
        logits = _logits(model, prompt)
        (run,) = recorder.runs()
    beginning: Beginning = []
    for layer in range(1, model.layers + 1):
        keys, values = (one.transpose(0, 1) for one in run.of("keys-values", layer))
        beginning.append((keys, values))
    if not puts_in(changes):
        return Start(beginning, prompt.span_ids, logits)
    return _with_filler(model, changes, runs[0], beginning, logits)


def logits_after(model: LoadedModel, changes: Changes, made: list[int]) -> Float[Tensor, " vocabulary"]:
    """The next token's logits by the model's own forward with the cuts and patches, without a cache: what slots must give too."""
    with ExitStack() as stack:
        _enter(stack, model, changes, _source(model, changes))
        return _logits(model, changes.prompt, made)


def _source(model: LoadedModel, changes: Changes) -> list[RecordedRun]:
    if not changes.patch:
        return []
    assert changes.source is not None
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(_REPEATABLE))
        if changes.source_cut:
            stack.enter_context(cut_attached(model, changes.source_cut, [changes.source]))
        return record_prompts(model, places_of(model.model, changes.patch), [changes.source])


def _enter(stack: ExitStack, model: LoadedModel, changes: Changes, runs: list[RecordedRun]) -> None:
    if changes.cut:
        stack.enter_context(cut_attached(model, changes.cut, [changes.prompt]))
    if changes.patch:
        stack.enter_context(patch_attached(model, changes.patch, [changes.prompt], runs))


@torch.inference_mode()
def _logits(model: LoadedModel, prompt: Prompt, made: list[int] | None = None) -> Float[Tensor, " vocabulary"]:
    """Of the token after the prompt and what was made so far."""
    made = made or []
    check_reach(model, [prompt])
    positions = own_positions(model, [prompt], len(prompt))
    ids = torch.tensor([[*prompt.token_ids, *made]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if positions is not None:
        after = torch.arange(1, len(made) + 1)[None] + positions[:, -1:]
        given["position_ids"] = torch.cat([positions, after], dim=1)
    sent = {name: one.to(model.device) for name, one in given.items()}
    with sdpa_kernel(_REPEATABLE):
        return model.model(**sent, use_cache=False).logits[0, -1]


def _with_filler(
    model: LoadedModel, changes: Changes, run: RecordedRun, own: Beginning, logits: Float[Tensor, " vocabulary"]
) -> Start:
    """A row as with the filler: its keys and values lie where they lie there. Which layers see them is up to `SlotCuts`."""
    prompt, source = changes.prompt, changes.source
    assert source is not None
    ours, theirs = (torch.from_numpy(one.copy()).to(model.device) for one in aligned(prompt, source, NAMED_SPANS))
    filler = torch.tensor(source.positions("filler"), device=model.device)
    layers = layers_put_in(model, changes)
    beginning: Beginning = []
    for layer, pair in enumerate(own, start=1):
        laid: list[Tensor] = []
        for which, held in enumerate(pair):
            row = held.new_zeros(held.shape[0], len(source), held.shape[2])
            row[:, theirs.to(held.device)] = held[:, ours.to(held.device)]
            if layer in layers:
                put = run.of("keys-values", layer)[which].transpose(0, 1)
                row[:, filler.to(held.device)] = put[:, filler.to(put.device)].to(held.device)
            laid.append(row)
        beginning.append((laid[0], laid[1]))
    labels = [PADDING if at in set(filler.tolist()) else label for at, label in enumerate(source.span_ids)]
    return Start(beginning, labels, logits)


def refuse_windows(model: LoadedModel, length: int) -> None:
    """Refuse to put keys in where a window ends inside a row: a row in slots lies as with the filler, so it would see other tokens."""
    config = model.model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if isinstance(window, int) and window < length:
        raise UnsupportedArchitecture(
            f"{model.label} has layers that see {window} tokens, fewer than the {length} of the longest prompt with its answer: answers cannot be drawn with "
            "a filler's keys put into a prompt without it; use mless run likelihood for it"
        )
