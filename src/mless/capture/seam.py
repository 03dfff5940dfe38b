"""Where both attention instruments attach to a model: each attention call of a numbered layer is understood or refused.

It uses transformers' two registries, attention *and* mask, and removes both entries on exit. (An attention name without a mask entry
silently loses causality.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from mless import kernels
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.models.seams import attention_modules, own_attention, split_heads

#: Keyword arguments of an attention call that change nothing the statistic depends on, or that the mask already expresses.
_HARMLESS = frozenset(
    "sliding_window is_causal position_ids cache_position use_cache output_attentions output_hidden_states return_dict "
    "output_router_logits layer_idx past_key_values cache_params deterministic max_length num_items_in_batch "
    "position_embeddings target_dtype implementation head_mask input_ids".split()
)


class Change:
    """What is changed about a model's attention calls, whichever instrument computes them."""

    def before(self, call: Call) -> Call:
        """The call to compute instead."""
        return call

    def after(self, call: Call, out: Float[Tensor, "batch queries heads value_dim"]) -> Tensor:
        """What the model gets instead of the call's output."""
        return out


#: By a model's first attention module, which it has in common with its decoder: the changes in force, the first one entered first; and how
#: many blocks of `attending` it is in.
_CHANGES: weakref.WeakKeyDictionary[nn.Module, list[Change]] = weakref.WeakKeyDictionary()
_ATTENDED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@contextmanager
def changing(model: nn.Module, change: Change) -> Generator[None]:
    """Inside the block every attention call of the model that an instrument computes is changed so."""
    changes = _CHANGES.setdefault(_first(model), [])
    changes.append(change)
    try:
        yield
    finally:
        changes.remove(change)


def changed(model: nn.Module) -> bool:
    """Whether changes are in force."""
    # Asked for every decoding step: a search of all modules would take longer than a small layer.
    return any(_CHANGES.values()) and bool(_CHANGES.get(_first(model)))


def attended(model: nn.Module) -> bool:
    """Whether an instrument computes the model's attention."""
    return bool(_ATTENDED.get(_first(model)))


def _first(model: nn.Module) -> nn.Module:
    return next(iter(attention_modules(model).values()))


class OwnWay:
    """What all masks offer. A mask that removes edges overrides it."""

    #: Whether all heads see the same and attend by a plain softmax over what they see.
    alike: bool = True

    @property
    def base(self) -> Any:
        """The mask without the edges that were removed."""
        return self

    def on(self, other: Any) -> Any:
        """The same edges removed from another mask."""
        return other

    def attended(self, call: Call) -> Tensor | None:
        """Attention by this mask, where it knows a better way than a mask for each pair; else None."""
        return None


class LazyMask(OwnWay):
    """What a layer's queries can see, evaluated block by block.

    transformers hands the mask through the model to the attention call, as it does flex attention's `BlockMask`. A model that
    computes with it on the way gets the ordinary boolean tensor, so nothing is silently lost.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._whole: Tensor | None = None
        self._device: torch.device | None = None
        self._elsewhere: dict[torch.device, LazyMask] = {}
        self._windows: dict[int, LazyMask] = {}
        self._intervals: dict[torch.device, kernels.Intervals | None] = {}
        self.queries: int = arguments["q_length"]
        self.keys: int = arguments["kv_length"]

    # Looked at only where it is asked for: on a GPU that waits for all that runs there.

    @cached_property
    def _unpadded(self) -> bool:
        padding: Tensor | None = self._arguments.get("attention_mask")
        # What a mask is too short for is hidden.
        return padding is None or (padding.shape[-1] >= self.keys and bool(padding.all()))

    @property
    def _causal(self) -> bool:
        local: int | None = self._arguments.get("local_size")
        offset = int(self._arguments.get("q_offset") or 0)
        full = self._arguments.get("mask_function") is causal_mask_function
        full = full or (local is not None and self.keys <= local)
        # The queries are the last of the keys' tokens: with a cache there are more keys than queries.
        causal = full and self.keys - self.queries == offset and not self._arguments.get("kv_offset")
        return causal and bool(self._arguments.get("allow_is_causal_skip", True) or offset)

    @cached_property
    def plain_causal(self) -> bool:
        return self._causal and not self._arguments.get("q_offset") and self._unpadded

    @cached_property
    def causal_for_real(self) -> bool:
        """With padding on the right a real token sees just what it would without: itself and everything before."""
        if not self._causal or self._unpadded:
            return self._causal
        padding: Tensor | None = self._arguments.get("attention_mask")
        if self._arguments.get("q_offset") or padding is None or padding.ndim != 2 or padding.shape[1] < self.keys:
            return False
        return not bool((padding[:, 1:] > padding[:, :-1]).any())

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch #heads rows keys"]:
        whole = dict(self._arguments)
        q_offset = whole.pop("q_offset", 0)
        whole |= {"q_length": last - first, "q_offset": q_offset + first, "allow_is_causal_skip": False}
        block = sdpa_mask(**whole)
        assert block is not None  # only a skipped mask is None, and skipping is off
        return block if self._device is None else block.to(self._device)

    @property
    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Whether a query sees a key, from row, head and their two places; padding is not part of it."""
        return self._arguments.get("mask_function", causal_mask_function)

    @property
    def key_offset(self) -> int:
        """The place of the first key; above 0 where a cache has dropped earlier ones."""
        return int(self._arguments.get("kv_offset") or 0)

    def windowed(self, size: int) -> LazyMask:
        """The same with a sliding window that the model's mask does not know of; one for all layers that ask."""
        if size not in self._windows:
            window = sliding_window_causal_mask_function(size)
            base = self._arguments.get("mask_function", causal_mask_function)
            if base is causal_mask_function:
                changed = {"mask_function": window, "local_size": size}
            else:
                changed = {"mask_function": and_masks(base, window)}
            self._windows[size] = LazyMask({**self._arguments, **changed})
            self._windows[size]._device = self._device
        return self._windows[size]

    def real(self, device: torch.device) -> Bool[Tensor, "batch queries"]:
        """Which queries are no padding, by the model's own mask."""
        padding: Tensor | None = self._arguments.get("attention_mask")
        if padding is not None and padding.ndim == 2 and padding.shape[1] == self.keys:
            return padding[:, self.keys - self.queries :].to(device, torch.bool)
        return torch.ones(self._arguments["batch_size"], self.queries, dtype=torch.bool, device=device)

    def intervals(self, device: torch.device) -> kernels.Intervals | None:
        """The mask as intervals, where it is one for every real query; shared by all layers."""
        if device not in self._intervals:
            if self.causal_for_real:
                starts = torch.zeros(self._arguments["batch_size"], self.queries, dtype=torch.int32, device=device)
                self._intervals[device] = kernels.Intervals(starts, self.keys, whole=True)
            else:
                self._intervals[device] = kernels.intervals(self, self.real(device), self.keys)
        return self._intervals[device]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """MPT converts its mask to booleans; this one is boolean already. A spread model's hooks send masks to each layer's device."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        if dtype not in (None, torch.bool):
            return self.whole.to(*args, **kwargs)
        return self if device is None else self._on(device)

    def _on(self, device: torch.device) -> LazyMask:
        """The same for a layer on another device, where its blocks are sent; one for all layers there."""
        own: Tensor | None = self._arguments.get("attention_mask")
        here = self._device or torch.device(self._arguments.get("device") or (own.device if own is not None else "cpu"))
        if device == here:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = other = LazyMask(self._arguments)
            other._device = device
        return self._elsewhere[device]

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


class GivenMask(OwnWay):
    """A mask the model built or changed itself, as a tensor."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask
        self.plain_causal = self.causal_for_real = False

    def __call__(self, first: int, last: int, /) -> Tensor:
        return self._mask[:, :, first:last]

    def intervals(self, device: torch.device) -> None:
        """Padding rows of a mask may hold anything, and which rows are padding is not known."""

    def windowed(self, size: int) -> GivenMask:
        queries, keys = self._mask.shape[-2:]
        far = torch.ones(queries, keys, dtype=torch.bool, device=self._mask.device).tril(keys - queries - size)
        return GivenMask(self._mask & ~far)


class _ChosenMask(GivenMask):
    """A mask of which each query sees only the keys that an indexer chose for it (DeepSeek's sparse attention)."""

    def __init__(self, mask: LazyMask | GivenMask, chosen: Int[Tensor, "batch queries chosen"], keys: int) -> None:
        self._seen, self._chosen, self._keys = mask, chosen.long(), keys
        self.plain_causal = self.causal_for_real = False

    def __call__(self, first: int, last: int, /) -> Tensor:
        chosen = self._chosen[:, first:last]
        picked = torch.zeros(*chosen.shape[:2], self._keys, dtype=torch.bool, device=chosen.device)
        return self._seen(first, last) & picked.scatter_(-1, chosen, True)[:, None]


Mask = LazyMask | GivenMask


@dataclass(frozen=True)
class Call:
    """One attention call of a numbered layer."""

    layer: int
    module: nn.Module
    query: Float[Tensor, "batch heads queries dim"]
    key: Float[Tensor, "batch kv_heads keys dim"]
    value: Float[Tensor, "batch kv_heads keys value_dim"]
    mask: Mask
    #: scale, softcap, sinks and bias: what makes scores of queries and keys, by the names the kernels use.
    score: dict[str, Any]
    #: The keywords as the model gave them, for its family's own eager attention.
    given: dict[str, Any]
    #: A second call of the layer with the same queries and keys but other values (DiffLlama): the matrix is the same.
    again: bool = False
    #: How many of the keys, the last ones, are no tokens of the forward's own rows (a patch put them in).
    put_in: int = 0

    @property
    def seen(self) -> kernels.Intervals | None:
        """What every real query sees, where that is an interval of the keys for each."""
        return self.mask.intervals(self.query.device)

    def refuse_several_softmaxes(self) -> None:
        if not self.mask.alike:
            raise BadStudy(
                f"layer {self.layer}: a cut by head, or one that sends weight to the sink, leaves no single softmax to read attention from; cut all heads "
                'with to = "rest", or read likelihood instead'
            )

    def refuse_other_keys(self, expected: int) -> None:
        """`expected` keys: the prompt's tokens so far, and nothing else."""
        if getattr(self.module, "compressor", None) is not None:
            raise UnsupportedArchitecture(
                f"layer {self.layer}: {type(self.module).__name__} adds keys that stand for several tokens each, so what one token received cannot "
                "be told; see docs/adding-a-model.md"
            )
        if self.key.shape[2] == expected:
            return
        if expected == self.query.shape[2]:
            raise UnsupportedArchitecture(
                f"layer {self.layer} attends from {self.query.shape[2]} queries to {self.key.shape[2]} keys; capture needs the whole prompt in "
                "one forward: call the model with use_cache=False"
            )
        raise UnsupportedArchitecture(
            f"layer {self.layer}: {type(self.module).__name__} has {self.key.shape[2]} keys after {expected} tokens, so it does not keep the "
            "earlier parts of a long prompt; give part=… at least the prompt's length, or shorten it"
        )


# Over 60 lines: one attention call from its arguments to its output.
@contextmanager
def attending(
    model: nn.Module, attend: Callable[[Call], Float[Tensor, "batch queries heads value_dim"]]
) -> Generator[None]:
    """Inside the block `attend` computes the model's attention. What it does not know is refused first.

    Afterwards, even on error, the model's attention implementation and both registries are as before.
    """
    # A module that serves several layers (HRM-Text) is called by them in order.
    numbers: dict[int, list[int]] = {}
    modules = attention_modules(model)
    for layer, module in modules.items():
        numbers.setdefault(id(module), []).append(layer)
    own = next(iter(modules.values()))
    heads = heads_of(model)
    # A weak reference: a layer's queries take much of a forward's memory.
    before: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}

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
        position_bias: Tensor | None = None,
        indices: Tensor | None = None,
        window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        turns = numbers.get(id(module))
        if turns is None:
            raise UnsupportedArchitecture(
                f"{type(module).__name__} computes attention outside the numbered layers; see docs/adding-a-model.md"
            )
        _refuse_unknown(module, dropout, others)
        asked = before.pop(id(module), None)
        again = asked is not None and asked[0]() is query and asked[1]() is key
        if not again:
            before[id(module)] = (weakref.ref(query), weakref.ref(key))
            turns.append(turns.pop(0))
        layer = turns[-1]
        if query.shape[1] < heads:
            raise split_heads(f"layer {layer} of {type(model).__name__}", query.shape[1], heads)
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        mask, bias = mask_of(attention_mask, module, query, key)
        if window is not None:
            mask = mask.windowed(window)
        if indices is not None:
            mask = _ChosenMask(mask, indices, key.shape[2])
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        score = {"scale": scale, "softcap": softcap, "sinks": s_aux, "bias": bias}
        given = {"scaling": scale, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, **others}
        known = {name: what for name, what in given.items() if what is not None}
        call = Call(layer, module, query, key, value, mask, score, known, again)
        changes = _CHANGES.get(own, ())
        for change in changes:
            call = change.before(call)
        out = attend(call)
        for change in changes:
            out = change.after(call, out)
        return out, None

    def mask(**arguments: Any) -> LazyMask:
        return LazyMask(arguments)

    def begin(*_: Any) -> None:
        # The forward before may have ended anywhere.
        for turns in numbers.values():
            turns.sort()
        before.clear()

    begins = model.register_forward_pre_hook(begin)
    _ATTENDED[own] = _ATTENDED.get(own, 0) + 1
    try:
        with own_attention(model, attention, mask):
            yield
    finally:
        begins.remove()
        _ATTENDED[own] -= 1


def heads_of(model: nn.Module) -> int:
    """The number of heads by the model's config; 0 where it says none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def _refuse_unknown(module: nn.Module, dropout: float, others: Mapping[str, Any]) -> None:
    if dropout and module.training:
        raise UnsupportedArchitecture("attention dropout is on: call model.eval() before capturing")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedArchitecture(
            f"{type(module).__name__} attends in both directions; only causal decoders are measured"
        )
    if others.get("block_indices") is not None:
        raise _different_keys(module)  # MiniMax M3 chooses blocks of keys for each group of heads
    unknown = sorted(name for name, value in others.items() if name not in _HARMLESS and value is not None)
    if unknown:
        raise UnsupportedArchitecture(
            f"{type(module).__name__} passes {', '.join(map(repr, unknown))} to its attention, which this tool does not know "
            "and will not ignore; see docs/adding-a-model.md"
        )


def _different_keys(module: nn.Module) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{type(module).__name__}'s heads see different keys, so n would differ from head to head; see docs/adding-a-model.md"
    )


def mask_of(given: Any, module: nn.Module, query: Tensor, key: Tensor) -> tuple[Mask, Tensor | None]:
    if isinstance(given, LazyMask):
        return given, None
    if given is None:
        lengths = {"batch_size": query.shape[0], "q_length": query.shape[2], "kv_length": key.shape[2]}
        lengths["q_offset"] = key.shape[2] - query.shape[2]
        return LazyMask({**lengths, "mask_function": causal_mask_function, "device": query.device}), None
    if isinstance(given, Tensor) and given.ndim == 4:
        if given.dtype == torch.bool and given.shape[1] > 1 and not bool((given == given[:, :1]).all()):
            raise _different_keys(module)
        if given.dtype == torch.bool:
            return GivenMask(given[:, :1].expand(query.shape[0], -1, -1, -1)), None
        hidden = given <= torch.finfo(given.dtype).min / 2
        mask, _ = mask_of(~hidden, module, query, key)
        bias = given.masked_fill(hidden, 0.0)
        return mask, bias if bool(bias.any()) else None
    raise UnsupportedArchitecture(
        f"{type(module).__name__} passes a mask of type {type(given).__name__}; see docs/adding-a-model.md"
    )
