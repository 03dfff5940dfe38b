"""A scoped instrument around a loaded model: what every attention head's tokens receive, without a T × T matrix.

It attaches through transformers' two registries, attention *and* mask (an attention name without a mask entry silently loses
causality), and takes both away again on exit. The forward itself stays SDPA's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mless import kernels
from mless.errors import BadAttention, BadPrompt, BadStudy, UnsupportedArchitecture
from mless.kernels.streaming import BLOCK_ELEMENTS
from mless.models import LoadedModel
from mless.models.seams import own_attention
from mless.values import MASS_NAMES, QUERY_SETS, SPAN_NAMES, Prompt, head_name

#: Keyword arguments of an attention call that change nothing the statistic depends on, or that the mask already expresses.
_HARMLESS = frozenset(
    "sliding_window is_causal position_ids cache_position use_cache output_attentions output_hidden_states return_dict "
    "output_router_logits layer_idx past_key_values cache_params deterministic max_length num_items_in_batch "
    "position_embeddings target_dtype implementation head_mask input_ids".split()
)
_ROWS_AT_ONCE = 4096


class LazyMask:
    """What a layer's queries can see, evaluated block by block.

    transformers hands the mask through the model to the attention call, as it does flex attention's `BlockMask`. A model that
    computes with it on the way gets the ordinary boolean tensor, so nothing is silently lost.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._whole: Tensor | None = None
        padding: Tensor | None = arguments.get("attention_mask")
        local: int | None = arguments.get("local_size")
        unpadded = padding is None or bool(padding.all())
        self.queries: int = arguments["q_length"]
        self.keys: int = arguments["kv_length"]
        square = self.queries == self.keys and not arguments.get("q_offset") and not arguments.get("kv_offset")
        full = arguments.get("mask_function") is causal_mask_function or (local is not None and self.keys <= local)
        self.plain_causal: bool = unpadded and square and full and bool(arguments.get("allow_is_causal_skip", True))

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch #heads rows keys"]:
        whole = dict(self._arguments)
        q_offset = whole.pop("q_offset", 0)
        whole |= {"q_length": last - first, "q_offset": q_offset + first, "allow_is_causal_skip": False}
        block = sdpa_mask(**whole)
        assert block is not None  # only a skipped mask is None, and skipping is off
        return block

    @property
    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = self(0, self.queries)
        return self._whole

    def __getitem__(self, index: Any) -> Tensor:
        return self.whole[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.whole if isinstance(value, LazyMask) else value

        return func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})


class _GivenMask:
    """A mask the model built or changed itself, as a tensor."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask
        self.plain_causal = False

    def __call__(self, first: int, last: int, /) -> Tensor:
        return self._mask[:, :, first:last]


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
    #: Told of every recorded attention call once it is done: layer, module, q, k, v, mask, keywords, output. The proofs watch with it.
    witness: Callable[..., None] | None = None
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

    def _sets_and_spans(self, mask: LazyMask | _GivenMask, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
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

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "batch heads queries dim"],
        k: Float[Tensor, "batch kv_heads keys dim"],
        mask: LazyMask | _GivenMask,
        score: Mapping[str, Any],
    ) -> None:
        if layer not in self.layers:
            return
        if q.shape[2] != k.shape[2]:
            raise UnsupportedArchitecture(
                f"layer {layer} attends from {q.shape[2]} queries to {k.shape[2]} keys; capture needs the whole prompt in one "
                "forward: call the model with use_cache=False"
            )
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
    numbers = {id(module): n for n, module in enumerate(attention_modules(model), start=1)}

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layer = numbers.get(id(module))
        if layer is None:
            raise UnsupportedArchitecture(
                f"{type(module).__name__} computes attention outside the numbered layers; see docs/adding-a-model.md"
            )
        refuse_unknown(module, dropout, others)
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        mask, bias = mask_of(attention_mask, module, query, key)
        score = {"scale": scale, "softcap": softcap, "sinks": s_aux, "bias": bias}
        recorder(layer, query, key, mask, score)
        if softcap is not None or s_aux is not None or bias is not None:
            out = _own_forward(query, key, value, mask, score)
        else:
            out = _sdpa_forward(module, query, key, value, mask, scale)
        if recorder.witness is not None and layer in recorder.layers:
            given = {"scaling": scale, "softcap": softcap, "s_aux": s_aux, **others}
            known = {name: what for name, what in given.items() if what is not None}
            recorder.witness(layer, module, query, key, value, mask, known, out)
        return out, None

    def mask(**arguments: Any) -> LazyMask:
        return LazyMask(arguments)

    with own_attention(model, attention, mask):
        yield recorder


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The decoder's attention modules in layer order: those called attention that know their `layer_idx`."""
    found: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        called = path.rsplit(".", 1)[-1] + type(module).__name__
        if isinstance(number, int) and re.search("attn|attention", called, re.IGNORECASE):
            found.setdefault(number, module)
    if not found or sorted(found) != list(range(len(found))):
        raise UnsupportedArchitecture(
            f"{type(model).__name__}: no attention modules with a layer number were found, so received attention cannot be "
            "told layer from layer; see docs/adding-a-model.md"
        )
    return [found[n] for n in sorted(found)]


def refuse_unknown(module: nn.Module, dropout: float, others: Mapping[str, Any]) -> None:
    if dropout and module.training:
        raise UnsupportedArchitecture("attention dropout is on: call model.eval() before capturing")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedArchitecture(
            f"{type(module).__name__} attends in both directions; only causal decoders are measured"
        )
    unknown = sorted(name for name, value in others.items() if name not in _HARMLESS and value is not None)
    if unknown:
        raise UnsupportedArchitecture(
            f"{type(module).__name__} passes {', '.join(map(repr, unknown))} to its attention, which this tool does not know "
            "and will not ignore; see docs/adding-a-model.md"
        )


def mask_of(given: Any, module: nn.Module, query: Tensor, key: Tensor) -> tuple[LazyMask | _GivenMask, Tensor | None]:
    if isinstance(given, LazyMask):
        return given, None
    if given is None:
        lengths = {"batch_size": query.shape[0], "q_length": query.shape[2], "kv_length": key.shape[2]}
        return LazyMask({**lengths, "mask_function": causal_mask_function, "device": query.device}), None
    if isinstance(given, Tensor) and given.ndim == 4:
        if given.dtype == torch.bool and given.shape[1] > 1 and not bool((given == given[:, :1]).all()):
            raise UnsupportedArchitecture(
                f"{type(module).__name__}'s heads see different keys, so n would differ from head to head; see docs/adding-a-model.md"
            )
        if given.dtype == torch.bool:
            return _GivenMask(given[:, :1].expand(query.shape[0], -1, -1, -1)), None
        hidden = given <= torch.finfo(given.dtype).min / 2
        mask, _ = mask_of(~hidden, module, query, key)
        bias = given.masked_fill(hidden, 0.0)
        return mask, bias if bool(bias.any()) else None
    raise UnsupportedArchitecture(
        f"{type(module).__name__} passes a mask of type {type(given).__name__}; see docs/adding-a-model.md"
    )


def _sdpa_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: LazyMask | _GivenMask, scale: float
) -> Float[Tensor, "batch queries heads dim"]:
    if mask.plain_causal:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scale, is_causal=True)[0]
    # Long prompts: a mask for some thousand rows at a time, never the whole square.
    blocks = [
        sdpa_attention_forward(
            module,
            query[:, :, first : first + _ROWS_AT_ONCE],
            key,
            value,
            mask(first, min(first + _ROWS_AT_ONCE, query.shape[2])),
            scaling=scale,
        )[0]
        for first in range(0, query.shape[2], _ROWS_AT_ONCE)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _own_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: LazyMask | _GivenMask, score: Mapping[str, Any]
) -> Float[Tensor, "batch queries heads dim"]:
    """Soft caps, sinks and score biases, which SDPA does not know: the same softmax, by blocks of rows."""
    groups = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(groups, 1).float().transpose(-1, -2)
    values = value.repeat_interleave(groups, 1)
    out: list[Tensor] = []
    rows = max(16, BLOCK_ELEMENTS // (query.shape[0] * query.shape[1] * key.shape[2]))
    for first in range(0, query.shape[2], rows):
        last = min(first + rows, query.shape[2])
        scores = query[:, :, first:last].float() @ keys * score["scale"]
        if score["softcap"] is not None:
            scores = torch.tanh(scores / score["softcap"]) * score["softcap"]
        if score["bias"] is not None:
            scores = scores + score["bias"][:, :, first:last].float()
        scores = scores.masked_fill(~mask(first, last), torch.finfo(torch.float32).min)
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
