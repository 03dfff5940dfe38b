"""Which of a model's layers have attention, and the one place where it is replaced by ours and restored."""

from __future__ import annotations

import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from mless.errors import BadStudy, UnsupportedArchitecture
from mless.models.adapters import family_of, own_of
from mless.values import format_numbers

_serial = itertools.count(1)
#: The children of a model, and of each module on the way to its attention modules.
_Held = tuple[tuple[nn.Module | None, ...], list[tuple[nn.Module, tuple[nn.Module | None, ...]]]]
#: By model: its configs, and its modules outside the registry with their family's rows.
_PLACES: weakref.WeakKeyDictionary[nn.Module, tuple[dict[int, Any], list[tuple[nn.Module, Any]]]] = (
    weakref.WeakKeyDictionary()
)
#: By model: its attention modules by layer, and what the modules on the way to them hold. To find them takes a millisecond, and a study asks
#: several times for each of thousands of forwards.
_FOUND: weakref.WeakKeyDictionary[nn.Module, tuple[dict[int, nn.Module], _Held]] = weakref.WeakKeyDictionary()
#: Towers that read pictures or sound, beside the decoder.
_OTHER_INPUTS = re.compile(r"vision|visual|image|audio|speech", re.IGNORECASE)
#: A layer's place in the list of layers, for modules that do not know their number.
_PLACE = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")


def configs_of(model: nn.Module) -> dict[int, Any]:
    """Every config in the model that says how attention is computed, by identity; several modules may share one."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return {id(config): config for config in found if hasattr(config, "_attn_implementation")}


def registered(module: nn.Module) -> bool:
    """Whether the module computes attention through transformers' registry.

    Decided by its code, because linear attention has similar names.
    """
    return _registered(type(module))


@cache
def _registered(kind: type) -> bool:
    # Whole models name the registry too, where they choose implementations.
    own = [one for one in kind.__mro__ if one.__module__ not in ("transformers.modeling_utils", nn.Module.__module__)]
    methods = [inspect.unwrap(what) for one in own for what in vars(one).values() if inspect.isfunction(what)]
    return any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods)


def attends(module: nn.Module) -> bool:
    """Whether the module computes softmax self-attention that ours can replace."""
    return (registered(module) and "Cross" not in type(module).__name__) or own_of(module) is not None


def check_heads(model: nn.Module, heads: int, name: str) -> None:
    """Refuse a model whose attention shows fewer heads than its config: parts of it are in other processes (tensor parallel)."""
    for path, module in model.named_modules():
        shown = _shown_heads(module) if attends(module) else None
        if shown is not None and shown < heads:
            raise split_heads(f"{name!r}: {path}", shown, heads)


def split_heads(where: str, shown: int, heads: int) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{where} shows {shown} heads, and the config says {heads}: the others may be in other processes (tensor parallel), so they would be left out "
        'silently; load the model whole, as mless.load(…, device_map="auto") does'
    )


def _shown_heads(module: nn.Module) -> int | None:
    """The fewest heads that the module's own counts and its query weights speak of; None where they say nothing."""
    counts = [getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "n_heads", "n_head")]
    found = [one for one in counts if isinstance(one, int)]
    query, width = getattr(module, "q_proj", None), getattr(module, "head_dim", None)
    # Quantised weights may be packed, and then have other shapes.
    if isinstance(query, nn.Linear) and isinstance(width, int) and width > 0 and query.weight.is_floating_point():
        found.append(query.weight.shape[0] // width)
    return min(found, default=None)


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The decoder's softmax attention modules by layer, numbered from 1. Other layers of a hybrid model are not among them.

    One module may serve several layers, and is then called by them in order.
    """
    known = _FOUND.get(model)
    if known is None or not _still_holds(model, known[1]):
        known = _FOUND[model] = _search(model)
    return dict(known[0])


def _still_holds(model: nn.Module, held: _Held) -> bool:
    """Whether nothing on the way to the attention modules was replaced, added or removed since they were found."""
    own, others = held
    return _parts(model) == own and all(_parts(one) == theirs for one, theirs in others)


def _parts(module: nn.Module) -> tuple[nn.Module | None, ...]:
    # Not children(), which takes eight times as long.
    return tuple(vars(module)["_modules"].values())


def _search(model: nn.Module) -> tuple[dict[int, nn.Module], _Held]:
    layers_of = family_of(getattr(getattr(model, "config", None), "model_type", "")).layers
    if layers_of is not None:
        there = layers_of(model)
        return there, _on_the_way(model, there.values())
    found: dict[int, nn.Module] = {}
    places = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if attends(module) and not _OTHER_INPUTS.search(path)
    ]
    for path, module in places:
        number = getattr(module, "layer_idx", None)
        shared = sum(other is module for _, other in places) > 1
        if shared or not isinstance(number, int) or number < 0:
            place = _PLACE.search(path)
            number = int(place[1]) if place else None
        if number is not None:
            found.setdefault(number + 1, module)
    if not found:
        raise UnsupportedArchitecture(
            f"{type(model).__name__}: no attention modules were found that have a layer number and compute through transformers' attention "
            "registry, and its family has no row that says how to reach them; see docs/adding-a-model.md"
        )
    return dict(sorted(found.items())), _on_the_way(model, found.values())


def _on_the_way(model: nn.Module, found: Iterable[nn.Module]) -> _Held:
    """What is not the model itself is kept with its children: a value of a weak dictionary must not hold its key."""
    wanted, between = {id(one) for one in found}, list[nn.Module]()

    def leads(module: nn.Module) -> bool:
        # All are asked: one that leads there says nothing of the next.
        ahead = [leads(one) for one in module.children()]
        if any(ahead) and module is not model:
            between.append(module)
        return any(ahead) or id(module) in wanted

    leads(model)
    return _parts(model), [(one, _parts(one)) for one in between]


def attention_layers(model: nn.Module, asked: Sequence[int] | None = None) -> list[int]:
    """The layers asked for, by default all that have attention; one that has none is refused by name."""
    return among(list(attention_modules(model)), asked, type(model).__name__)


def among(there: list[int], asked: Sequence[int] | None, name: str) -> list[int]:
    for layer in asked or ():
        if layer not in there:
            if not there or not 1 <= layer <= max(there):
                raise BadStudy(
                    f"no layer {layer} with attention in {name}: its attention layers are {format_numbers(there)} (numbered from 1)"
                )
            raise BadStudy(
                f"layer {layer} of {name} is no softmax attention, so nothing can be received there; its attention layers are "
                f"{format_numbers(there)} (numbered from 1): choose among them with --layers"
            )
    return there if asked is None else list(asked)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Inside the block the module computes this. Afterwards, even on error, it is as before."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def own_attention(model: nn.Module, attention: Callable[..., Any], mask: Callable[..., Any]) -> Generator[None]:
    """Inside the block the model computes attention by `attention` with masks by `mask`.

    Both at once: an attention name without a mask entry silently loses causality. Modules outside the registry are reached by their
    family's row. Afterwards, even on error, the model and both registries are as before.
    """
    name = f"mless-{next(_serial)}"
    # Entered for every decoding step: searching all modules each time would cost more than a small layer.
    if model not in _PLACES:
        rows = [(module, own) for module in model.modules() if not registered(module) and (own := own_of(module))]
        _PLACES[model] = (configs_of(model), rows)
    configs, rows = _PLACES[model]
    before = {key: config._attn_implementation for key, config in configs.items()}
    replaced: list[tuple[nn.Module, str, Any]] = []
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    try:
        for config in configs.values():
            config._attn_implementation = name
        for module, own in rows:
            # accelerate's hooks are in a forward of the module's own, which calls this one.
            hooked = own.method == "forward" and hasattr(module, "_hf_hook")
            method = "_old_forward" if hooked else own.method
            if hooked or method not in vars(module):
                replaced.append((module, method, vars(module).get(method)))
                setattr(module, method, partial(own.function, attention, module))
        yield
    finally:
        for module, method, before_us in replaced:
            if before_us is None:
                delattr(module, method)
            else:
                setattr(module, method, before_us)
        for key, config in configs.items():
            config._attn_implementation = before[key]
        # The registries offer no way to take a global name out again.
        AttentionInterface._global_mapping.pop(name, None)  # pyright: ignore[reportPrivateUsage]
        AttentionMaskInterface._global_mapping.pop(name, None)  # pyright: ignore[reportPrivateUsage]
