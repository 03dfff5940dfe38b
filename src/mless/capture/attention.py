"""A scoped instrument around a loaded model: what every attention head's tokens receive, without a T × T matrix.

The forward itself stays SDPA's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mless import kernels
from mless.capture.seam import Call, Mask, attending
from mless.errors import BadAttention, BadPrompt, BadStudy, UnsupportedArchitecture
from mless.kernels.streaming import BLOCK_ELEMENTS
from mless.models import LoadedModel
from mless.values import MASS_NAMES, QUERY_SETS, SPAN_NAMES, Prompt, head_name

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Attention:
    """One prompt's capture: what each token received, for both query sets, and where the original queries looked.

    `received` is a mean, NaN where `n` is 0; `uniform` is the same statistic for a head that spreads evenly over what it sees.
    Axes named *sets* follow `QUERY_SETS`; layers and heads are those asked for, in order.
    """

    prompt: Prompt
    layers: list[int]
    heads: list[int]
    received: Float32[np.ndarray, "sets layers heads tokens"]
    n: Int[np.ndarray, "sets layers tokens"]
    uniform: Float32[np.ndarray, "sets layers tokens"]
    mass: Float32[np.ndarray, "layers heads spans_and_sink"]


@dataclass
class Recorder:
    """What the attention calls of the forwards inside a `capturing` block left behind, layer by layer."""

    layers: frozenset[int]
    heads: list[int] | None
    kernel: Callable[..., kernels.Sums]
    #: Told of every recorded attention call and its output once it is done. The proofs watch with it.
    witness: Callable[[Call, Tensor], None] | None = None
    sums: dict[int, kernels.Sums] = field(default_factory=dict[int, kernels.Sums])
    uniform: dict[int, kernels.Sums] = field(default_factory=dict[int, kernels.Sums])
    _announced: tuple[Tensor, Tensor] | None = None
    _even: tuple[object, kernels.Sums] | None = None

    def expect(self, sets: Bool[Tensor, "batch sets tokens"], spans: Int[Tensor, "batch tokens"]) -> None:
        """Name the query sets and the spans of the batch that the next forward runs.

        Without it every real token is an original one and there is a single span.
        """
        self.sums.clear()
        self.uniform.clear()
        self._even = None
        self._announced = (sets, spans)

    def _sets_and_spans(self, mask: Mask, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        if self._announced is not None:
            sets, spans = self._announced
            if tuple(sets.shape[::2]) != (rows, tokens):
                raise BadPrompt(
                    f"the forward ran {rows} rows of {tokens} tokens, but {sets.shape[0]} rows of {sets.shape[2]} were announced"
                )
            return sets, spans
        # A real token sees itself, padding sees nothing or is seen by nobody.
        blocks = [(first, min(first + _ROWS_AT_ONCE, tokens)) for first in range(0, tokens, _ROWS_AT_ONCE)]
        real = torch.cat([mask(a, b)[:, 0, :, a:b].diagonal(dim1=-2, dim2=-1) for a, b in blocks], dim=1)
        return real[:, None].expand(-1, len(QUERY_SETS), -1), torch.zeros_like(real, dtype=torch.long)

    def __call__(self, call: Call) -> None:
        layer, q, k, mask, score = call.layer, call.query, call.key, call.mask, call.score
        if layer not in self.layers:
            return
        call.refuse_cache()
        if self._announced is not None and layer in self.sums:
            raise BadPrompt(f"layer {layer} ran again, but only one forward was announced; call expect() before each")
        sets, spans = (part.to(q.device) for part in self._sets_and_spans(mask, q.shape[0], q.shape[2]))
        common: dict[str, Any] = {"visible": mask, "sets": sets, "spans": spans, "n_spans": len(SPAN_NAMES)}
        # Layers that see alike share one mask object, so the yardstick and the counts are computed once for all of them.
        if self._even is None or self._even[0] is not mask:
            even = torch.zeros(q.shape[0], 1, q.shape[2], 1, device=q.device)
            self._even = (mask, self.kernel(even, even, scale=1.0, **common))
        self.uniform[layer] = self._even[1]
        if self.heads is not None:
            q, k, score = _only(q, k, score, self.heads)
        sums = self.kernel(q, k, **common, **score)
        finite = torch.isfinite(sums.received).all(-1).all(1) & torch.isfinite(sums.mass).all(-1)
        if not bool(finite.all()):
            bad = int((~finite).any(0).nonzero()[0, 0])
            head = self.heads[bad] if self.heads is not None else bad + 1
            raise BadAttention(
                f"attention is not finite (NaN or infinite) in {head_name(layer, head)}; the weights or the dtype break it: "
                "try --dtype float32, or check the checkpoint"
            )
        self.sums[layer] = sums


def _only(
    q: Tensor, k: Tensor, score: Mapping[str, Any], heads: Sequence[int]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The asked heads' queries with one key head each; `heads` are numbered from 1."""
    if max(heads) > q.shape[1]:
        raise BadStudy(f"no head {max(heads)}: this model's heads are 1 to {q.shape[1]} (numbered from 1)")
    at = torch.tensor([head - 1 for head in heads], device=q.device)
    chosen = dict(score)
    for name, axis in (("sinks", 0), ("bias", 1)):
        values: Tensor | None = chosen.get(name)
        if values is not None and values.shape[axis] == q.shape[1]:
            chosen[name] = values.index_select(axis, at)
    return q[:, at], k[:, at // (q.shape[1] // k.shape[1])], chosen


@contextmanager
def capturing(
    model: nn.Module,
    *,
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    kernel: Callable[..., kernels.Sums] = kernels.received,
) -> Generator[Recorder]:
    """Inside the block, forwards of `model` leave their received-attention sums in the yielded `Recorder`.

    The model's attention implementation and both registries are as before once the block is left, by whatever road.
    """
    recorder = Recorder(frozenset(layers), list(heads) if heads is not None else None, kernel)

    def attend(call: Call) -> Tensor:
        recorder(call)
        plain = all(call.score[name] is None for name in ("softcap", "sinks", "bias"))
        out = _sdpa_forward(call) if plain else _own_forward(call)
        if recorder.witness is not None and call.layer in recorder.layers:
            recorder.witness(call, out)
        return out

    with attending(model, attend):
        yield recorder


def _sdpa_forward(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    def sdpa(q: Tensor, mask: Tensor | None, causal: bool | None = None) -> Tensor:
        scale = call.score["scale"]
        return sdpa_attention_forward(call.module, q, call.key, call.value, mask, scaling=scale, is_causal=causal)[0]

    if call.mask.plain_causal:
        return sdpa(call.query, None, causal=True)
    # Long prompts: a mask for some thousand rows at a time, never the whole square.
    size = call.query.shape[2]
    blocks = [(first, min(first + _ROWS_AT_ONCE, size)) for first in range(0, size, _ROWS_AT_ONCE)]
    out = [sdpa(call.query[:, :, first:last], call.mask(first, last)) for first, last in blocks]
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _own_forward(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """Soft caps, sinks and score biases, which SDPA does not know: the same softmax, by blocks of rows."""
    query, key, score = call.query, call.key, call.score
    groups = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(groups, 1).float().transpose(-1, -2)
    values = call.value.repeat_interleave(groups, 1)
    out: list[Tensor] = []
    rows = max(16, BLOCK_ELEMENTS // (query.shape[0] * query.shape[1] * key.shape[2]))
    for first in range(0, query.shape[2], rows):
        last = min(first + rows, query.shape[2])
        scores = query[:, :, first:last].float() @ keys * score["scale"]
        if score["softcap"] is not None:
            scores = torch.tanh(scores / score["softcap"]) * score["softcap"]
        if score["bias"] is not None:
            scores = scores + score["bias"][:, :, first:last].float()
        scores = scores.masked_fill(~call.mask(first, last), torch.finfo(torch.float32).min)
        if score["sinks"] is not None:
            sink = score["sinks"].float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        p = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        out.append((p.to(values.dtype) @ values).transpose(1, 2))
    return torch.cat(out, dim=1).contiguous()


def received(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_size: int = 1,
    kernel: Callable[..., kernels.Sums] = kernels.received,
) -> Iterator[Attention]:
    """Received attention of each prompt, in order.

    Batches are padded on the right; `batch_size` 1, the default, makes a prompt's numbers independent of every other prompt.
    """
    asked = list(layers) if layers is not None else list(range(1, model.loaded_layers + 1))
    for layer in asked:
        if not 1 <= layer <= model.loaded_layers:
            raise BadStudy(f"no layer {layer}: layers 1 to {model.loaded_layers} are loaded (numbered from 1)")
    which = list(heads) if heads is not None else list(range(1, model.heads + 1))
    if not asked or not which:
        raise BadStudy("no layer or no head was asked for; leave layers and heads out for all of them")
    for head in which:
        if not 1 <= head <= model.heads:
            raise BadStudy(f"no head {head}: this model's heads are 1 to {model.heads} (numbered from 1)")
    with capturing(model.model, layers=asked, heads=heads, kernel=kernel) as recorder:
        for at in range(0, len(prompts), batch_size):
            batch = prompts[at : at + batch_size]
            for prompt in batch:
                if len(prompt) > model.context:
                    raise BadPrompt(
                        f"item {prompt.item!r} is {len(prompt)} tokens under condition {prompt.condition!r}, but {model.label} takes "
                        f"{model.context}; leave it out (--limit), shorten it, or use a smaller --length"
                    )
            longest = max(map(len, batch))
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            real = torch.zeros(len(batch), longest, dtype=torch.bool)
            sets = torch.zeros(len(batch), len(QUERY_SETS), longest, dtype=torch.bool)
            spans = torch.zeros(len(batch), longest, dtype=torch.long)
            for row, prompt in enumerate(batch):
                ids[row, : len(prompt)] = torch.tensor(prompt.token_ids)
                real[row, : len(prompt)] = True
                sets[row, 0, : len(prompt)] = True
                sets[row, 1, prompt.original] = True
                spans[row, : len(prompt)] = torch.tensor(prompt.span_ids)
            recorder.expect(sets, spans)
            with torch.inference_mode():
                padding = None if bool(real.all()) else real.to(model.device).long()
                model.model(input_ids=ids.to(model.device), attention_mask=padding, use_cache=False)
            missing = sorted(set(asked) - set(recorder.sums))
            if missing:
                raise UnsupportedArchitecture(
                    f"{model.family!r} did not compute layer {missing[0]}'s attention through transformers' attention registry, so "
                    "it cannot be measured; see docs/adding-a-model.md"
                )
            yield from (_of_row(recorder, row, prompt, asked, which) for row, prompt in enumerate(batch))


def _of_row(recorder: Recorder, row: int, prompt: Prompt, layers: list[int], heads: list[int]) -> Attention:
    size = len(prompt)

    def stack(pick: Callable[[int], Tensor]) -> np.ndarray:
        return torch.stack([pick(layer) for layer in layers]).cpu().numpy()

    sums = stack(lambda layer: recorder.sums[layer].received[row, ..., :size].float()).swapaxes(0, 1)
    even = stack(lambda layer: recorder.uniform[layer].received[row, :, 0, :size].float()).swapaxes(0, 1)
    n = stack(lambda layer: recorder.uniform[layer].counts[row, :, :size]).swapaxes(0, 1)
    mass = stack(lambda layer: recorder.sums[layer].mass[row].float())
    divisor = np.where(n > 0, n, np.nan).astype(np.float32)
    assert mass.shape[-1] == len(MASS_NAMES)
    return Attention(prompt, layers, heads, sums / divisor[:, :, None], n.astype(np.int32), even / divisor, mass)
