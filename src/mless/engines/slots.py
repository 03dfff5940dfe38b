"""A cache of fixed slots and the attention over it: what makes a row's numbers independent of its neighbours.

A row's token n always sits at cache slot n of its own row, whatever the other rows hold, and every forward has one of a few fixed shapes. A
`Layout` says where each row is; transformers' static cache moves all rows together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache
from transformers.cache_utils import StaticLayer

from mless import kernels
from mless.capture import copies
from mless.capture.following import followed
from mless.capture.seam import changed
from mless.engines.cuts import SlotCuts
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.models.experts import has_experts
from mless.models.seams import configs_of, own_attention

#: Keywords of attention calls that say nothing about the result.
_SILENT = (
    *("position_ids", "is_causal", "sliding_window", "cache", "use_cache", "layer_idx"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
)


def _read(last: int) -> int:
    """How many slots a CPU reads for a row whose last token is at `last`.

    Rounded up to few different numbers: at most 50 % or 64 slots too many.
    """
    step = max(64, 1 << max(0, last.bit_length() - 2))
    return (last // step + 1) * step


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """A few numbers copied to the device without waiting for it."""
    return copies.sent(torch.tensor(values, dtype=dtype), device)


class Layout:
    """Where the tokens of the current forward are: for each row the cache slots it writes, and the hidden slots."""

    def __init__(self) -> None:
        self.at: Int[Tensor, "rows tokens"] | None = None
        self.hidden: Int[Tensor, "rows 2"] | None = None
        #: Where edges of attention are cut: which, and the span of each slot.
        self.cuts: SlotCuts | None = None
        self.labels: Int8[Tensor, "rows slots"] | None = None
        #: How the last attention call was computed.
        self.served = ""
        #: Query heads per key head, in all attention calls so far.
        self.groups: set[int] = set()
        #: For a decoding step on a CPU: (neighbouring rows, slots they read). Empty where all slots are read.
        self.filled: list[tuple[slice, int]] = []

    def look(self, length: int) -> None:
        """Find how far the cache is filled. The rest is masked, and reading it would be most of a step's work.

        How many slots a row reads depends on its own length alone. Neighbouring rows that read equally many are read together.
        """
        assert self.at is not None
        self.filled = []
        for row, last in enumerate(self.at.amax(-1).tolist()):
            end, begin = min(length, _read(last)), row
            if self.filled and self.filled[-1][1] == end:
                begin = self.filled.pop()[0].start
            self.filled.append((slice(begin, row + 1), end))

    def mask(self, mask_function: Any, keys: int, dtype: torch.dtype) -> Float[Tensor, "rows 1 tokens keys"]:
        """What is added to the scores: 0 where a token sees a slot, −∞ where not. Made once for all layers with the same mask."""
        assert self.at is not None
        rows = torch.arange(self.at.shape[0], device=self.at.device)[:, None, None, None]
        query = self.at[:, None, :, None]
        key = torch.arange(keys, device=self.at.device)[None, None, None, :]
        seen = mask_function(rows, torch.zeros_like(rows[:1]), query, key)
        if self.hidden is not None:
            start, stop = self.hidden[:, 0, None, None, None], self.hidden[:, 1, None, None, None]
            # Hidden filler is seen by filler only (a token must see something).
            seen = seen & ~((key >= start) & (key < stop) & ~((query >= start) & (query < stop)))
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


class SlotLayer(StaticLayer):
    """transformers' static layer, but each row writes where `layout` says."""

    def __init__(self, length: int, layout: Layout) -> None:
        super().__init__(max_cache_len=length)
        self._layout = layout

    @property
    def pair(self) -> tuple[Float[Tensor, "rows heads length dim"], Float[Tensor, "rows heads length value_dim"]]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.pair
        assert self._layout.at is not None
        at = self._layout.at.to(keys.device)
        if at.shape[1] == 1 and kernels.triton_serves(keys):
            from mless.kernels import decoding_triton

            decoding_triton.store(key_states, value_states, keys, values, at)
            return keys, values
        rows = torch.arange(at.shape[0], device=at.device)[:, None]
        keys[rows, :, at] = key_states.transpose(1, 2)
        values[rows, :, at] = value_states.transpose(1, 2)
        return keys, values

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.max_cache_len, 0


#: Keys and values of one row's first tokens, layer by layer.
Beginning = list[tuple[Float[Tensor, "heads tokens dim"], Float[Tensor, "heads tokens value_dim"]]]


class SlotCache(Cache):
    """A cache of `SlotLayer`s whose rows can be read and written one by one."""

    def __init__(self, layers: int, length: int, layout: Layout) -> None:
        self.slot_layers = [SlotLayer(length, layout) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    @property
    def ready(self) -> bool:
        return all(layer.is_initialized for layer in self.slot_layers)

    @torch.inference_mode()
    def shaped_like(self, other: SlotCache, rows: int) -> SlotCache:
        """Allocate memory for so many rows, with `other`'s heads."""
        for layer, model in zip(self.slot_layers, other.slot_layers, strict=True):
            keys, values = model.pair
            layer.lazy_initialization(
                keys[:1, :, :1].expand(rows, -1, -1, -1), values[:1, :, :1].expand(rows, -1, -1, -1)
            )
        return self

    @torch.inference_mode()
    def read(self, row: int, tokens: int) -> Beginning:
        return [(keys[row, :, :tokens].clone(), values[row, :, :tokens].clone()) for keys, values in self._pairs()]

    @torch.inference_mode()
    def write(self, row: int, beginning: Beginning) -> None:
        for (keys, values), (k, v) in zip(self._pairs(), beginning, strict=True):
            keys[row, :, : k.shape[1]] = k
            values[row, :, : v.shape[1]] = v

    @torch.inference_mode()
    def take_over(self, row: int, source: SlotCache, source_row: int, tokens: int) -> None:
        for (keys, values), (k, v) in zip(self._pairs(), source._pairs(), strict=True):
            keys[row, :, :tokens] = k[source_row, :, :tokens]
            values[row, :, :tokens] = v[source_row, :, :tokens]

    @torch.inference_mode()
    def clear(self, rows: Sequence[int]) -> None:
        """Set rows to 0. Old values are masked, but a NaN would pass any mask."""
        pairs = self._pairs()
        at: dict[torch.device, Tensor] = {}
        for pair in pairs:
            for held in pair:
                if held.device not in at:
                    at[held.device] = sent(list(rows), held.device)
                held.index_fill_(0, at[held.device], 0)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [layer.pair for layer in self.slot_layers]


@contextmanager
def slot_attention(model: nn.Module, layout: Layout) -> Generator[None]:
    """Inside the block the model's attention and masks follow `layout`; afterwards both registries and the model are as before."""
    if changed(model) or followed(model):
        raise BadStudy(
            "cuts and patches are in force in the model, and the row-stable engine would answer without them; leave their block first, or call the "
            "model's own generate inside it"
        )
    kept: torch.dtype = next(model.parameters()).dtype
    if layout.cuts is not None:
        layout.cuts.begin()
    with own_attention(model, partial(_attention, layout), partial(_mask, layout, kept)):
        yield


def _attention(
    layout: Layout,
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
    unknown = sorted(key for key, what in others.items() if key not in _SILENT and what is not None)
    if unknown:
        raise UnsupportedArchitecture(
            f"{type(module).__name__} passes {', '.join(map(repr, unknown))} to its attention, which the row-stable engine does not know "
            "and will not ignore; use --engine vllm or --engine openai"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layout.groups.add(query.shape[1] // key.shape[1])
    sends: Tensor | None = None
    if layout.cuts is not None:
        assert layout.at is not None
        assert layout.labels is not None
        attention_mask, sends = layout.cuts.masks(module, attention_mask, layout.at, layout.labels)
    if softcap is not None or s_aux is not None or sends is not None:
        layout.served = "softmax of our own"
        return attend(query, key, value, attention_mask, scale, softcap, s_aux, sends), None
    if kernels.triton_serves(key) and layout.at is not None:
        from mless.kernels import decoding_triton

        if decoding_triton.attends(query, key, value, attention_mask):
            layout.served = "over the filled cache (own kernel), prefill by sdpa, memory-efficient"
            at = layout.at.to(key.device)
            return decoding_triton.attention(query, key, value, attention_mask, at, scale), None
    if layout.filled:
        layout.served = "sdpa over the filled cache"
        parts = [
            attend(query[rows], key[rows, :, :end], value[rows, :, :end], attention_mask[rows, ..., :end], scale)
            for rows, end in layout.filled
        ]
        return torch.cat(parts), None
    layout.served = "sdpa, memory-efficient" if key.is_cuda else "sdpa"
    return attend(query, key, value, attention_mask, scale), None


def rows_are_apart(cache: SlotCache, groups: Iterable[int]) -> bool:
    """Whether a row's attention has the same bits alone and with any rows beside it; tried on random numbers of the layers' shapes.

    `groups`: the numbers of query heads that share a key head.
    """
    pairs = [layer.pair for layer in cache.slot_layers]
    shapes = {(keys.shape[1:], values.shape[1:], keys.dtype) for keys, values in pairs}
    return all(_rows_are_apart(*shape, n) for shape in shapes for n in groups)


def _rows_are_apart(keys: Sequence[int], values: Sequence[int], dtype: torch.dtype, groups: int) -> bool:
    generator = torch.Generator().manual_seed(3)
    rows, length = 9, keys[1]
    k, v = (torch.randn(rows, *shape, generator=generator).to(dtype) for shape in (keys, values))
    q = torch.randn(rows, groups * keys[0], 1, keys[-1], generator=generator).to(dtype)
    for end in {min(length, _read(last)) for last in (1, 100, length // 2, length - 1)}:
        seen = torch.arange(end) <= torch.randint(0, end, (rows, 1), generator=generator)
        mask = torch.zeros(rows, 1, 1, end, dtype=dtype).masked_fill_(~seen[:, None, None], -torch.inf)
        together = attend(q, k[:, :, :end], v[:, :, :end], mask, 0.1)
        for some in (slice(0, 1), slice(3, 4), slice(8, 9), slice(2, 4), slice(1, 8)):
            if not torch.equal(attend(q[some], k[some, :, :end], v[some, :, :end], mask[some], 0.1), together[some]):
                return False
    return True


def _mask(layout: Layout, kept: torch.dtype, /, *, kv_length: int, mask_function: Any, **others: Any) -> Tensor:
    return layout.mask(mask_function, int(kv_length), kept)


@contextmanager
def row_by_row_experts(model: nn.Module) -> Generator[None]:
    """Inside the block each row multiplies with its own experts.

    Otherwise rows that chose the same expert share a product, and its shape depends on them.
    """
    configs = configs_of(model) if has_experts(model) else {}
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = "batched_mm"
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]


def attend(
    query: Float[Tensor, "rows heads tokens dim"],
    key: Float[Tensor, "rows kv_heads keys dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    mask: Float[Tensor, "rows #heads tokens keys"],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sends: Bool[Tensor, "rows #heads tokens keys"] | None = None,
) -> Float[Tensor, "rows tokens heads value_dim"]:
    """Softmax attention. Query heads that share a key head become further queries, so that no key is copied.

    `sends`: edges whose weight goes to the learned sink, else to the first key that is left.
    """
    rows, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    q = query.reshape(rows, kv_heads, groups * tokens, dim)

    def by_key_head(pairs: Tensor) -> Tensor:
        if pairs.shape[1] > 1:
            return pairs.reshape(rows, kv_heads, groups * tokens, -1)
        if tokens == 1 or groups == 1:  # with one token it already fits all heads
            return pairs
        return pairs[:, :, None].expand(rows, 1, groups, tokens, -1).reshape(rows, 1, groups * tokens, -1)

    mask = by_key_head(mask)
    if softcap is None and sinks is None and sends is None:
        # Not the default: on a GPU that is cuDNN, which does not repeat its own bits when decoding. This backend does.
        deliberate = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if query.is_cuda else nullcontext()
        with deliberate:
            out = nn.functional.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
    else:
        scores = (q.float() @ key.float().transpose(-1, -2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + mask.float()
        if sinks is not None:
            sink = sinks.float().reshape(1, kv_heads, groups, 1, 1).expand(rows, -1, -1, tokens, 1)
            scores = torch.cat([scores, sink.reshape(rows, kv_heads, groups * tokens, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        if sends is not None:
            weights = _sent_on(weights, mask > -torch.inf, by_key_head(sends), learned=sinks is not None)
        out = weights.to(value.dtype) @ value
    return out.reshape(rows, kv_heads * groups, tokens, -1).transpose(1, 2).contiguous()


def _sent_on(
    weights: Float[Tensor, "rows kv_heads queries keys"],
    seen: Bool[Tensor, "rows #kv_heads #queries keys"],
    sends: Bool[Tensor, "rows #kv_heads #queries keys"],
    *,
    learned: bool,
) -> Float[Tensor, "rows kv_heads queries keys"]:
    """Weights without those of `sends`. A learned sink adds nothing to the output; else the first key left takes them."""
    kept = weights.masked_fill(sends, 0.0)
    if learned:
        return kept
    # argmax of booleans: the first one.
    first = (seen & ~sends).byte().argmax(-1, keepdim=True).expand(*weights.shape[:3], 1)
    return kept.scatter_add(-1, first, weights.masked_fill(~sends, 0.0).sum(-1, keepdim=True))
