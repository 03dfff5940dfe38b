"""Where a model's activations are: the module of each layer whose output is act(gate(x)) or act(fc(x)).

transformers gives every MLP a module for its non-linearity, under a handful of names. The result is checked: a layer with no such module,
with several, or with one that other layers share is refused by name.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from mless.errors import BadStudy, UnsupportedArchitecture
from mless.models.adapters import family_of

#: What families call the module: act_fn, act, activation_fn, activation, activation_function, gelu_impl, intermediate_act_fn.
_CALLED = re.compile(r"(act|act_fn|activation|activation_fn|activation_function|gelu_impl|ffn_act|intermediate_act_fn)")
_PLAIN = (nn.ReLU, nn.GELU, nn.SiLU)
_ELSEWHERE = re.compile(r"attn|attention|router|gate_fn|mixer|mamba|temporal|norm", re.IGNORECASE)
#: Parts that read pictures or sound; they may have more layers than the decoder.
_BESIDE = re.compile(r"vision|visual|image|audio|speech", re.IGNORECASE)


@dataclass(frozen=True)
class ActivationPoint:
    """`act` is the module whose output is the activation; `owner` the one it belongs to, as `path` names it in the layer.

    `gated` says that the owner's forward is down_proj(act_fn(gate_proj(x)) · up_proj(x)) and nothing more.
    """

    layer: int
    path: str
    act: nn.Module
    owner: nn.Module
    gated: bool


#: By model: what `decoder_of` found. It looks at every module, and a study with patches asks for every forward.
_DECODERS: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], weakref.ref[nn.ModuleList]]] = (
    weakref.WeakKeyDictionary()
)


def decoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the decoder's layers, and the layers: the longest list of like modules that holds MLPs or attention."""
    if model in _DECODERS:
        owner, layers = (one() for one in _DECODERS[model])
        # Layers may have been put into another list since.
        if owner is not None and layers is not None and any(layers is child for child in owner.children()):
            return owner, layers  # pyright: ignore[reportReturnType]
    owner, layers = _find_decoder(model)
    _DECODERS[model] = weakref.ref(owner), weakref.ref(layers)
    return owner, layers


def _find_decoder(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    lists = [
        (f"{path}.{name}", module, child)
        for path, module in model.named_modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and not _BESIDE.search(f"{path}.{name}")
    ]
    # A decoder may be called encoder (in GIT). Where there is another list, that one is used.
    found = [
        ("encoder" not in where.lower(), len(layers), owner, layers)
        for where, owner, layers in lists
        if _attend(layers)
    ]
    if not found:
        raise UnsupportedArchitecture(
            f"{type(model).__name__}: no list of decoder layers was found, so its activations cannot be assigned to layers; see "
            "docs/adding-a-model.md"
        )
    _, _, owner, layers = max(found, key=lambda one: one[:2])
    return owner, layers


def _attend(layers: nn.ModuleList) -> bool:
    """Whether there is attention in one of the layers; in a hybrid model it need not be the first."""
    if any(re.search("attn|attention", path, re.IGNORECASE) for path, _ in layers.named_modules()):
        return True
    from mless.models.seams import attends

    return any(attends(module) for module in layers.modules())


def activation_points(model: nn.Module, layers: list[int] | tuple[int, ...]) -> list[ActivationPoint]:
    """The activation of each of the layers (numbered from 1); what cannot be placed is refused by name."""
    _, modules = decoder_of(model)
    _check_there(layers, len(modules))
    points = [_point(type(model).__name__, layer, modules[layer - 1]) for layer in layers]
    for point in points:
        for other, block in enumerate(modules, start=1):
            if other != point.layer and any(module is point.act for module in block.modules()):
                raise UnsupportedArchitecture(
                    f"{type(model).__name__}: layers {point.layer} and {other} share one activation module, so they cannot be told apart; see "
                    "docs/adding-a-model.md"
                )
    return points


def _point(family: str, layer: int, block: nn.Module) -> ActivationPoint:
    found: list[tuple[str, nn.Module]] = []
    for path, module in block.named_modules():
        where, _, name = path.rpartition(".")
        owner = block.get_submodule(where)
        # CTRL's stands between two matrices in a list and has no name.
        called = _CALLED.fullmatch(name) or (isinstance(owner, nn.Sequential) and isinstance(module, _PLAIN))
        # Nemotron-H calls all of a layer's parts mixer, its MLPs too.
        mlp = where == "mixer" and type(owner).__name__.endswith("MLP")
        if called and (mlp or not _ELSEWHERE.search(where)):
            found.append((path, module))
    experts = [
        path
        for path, module in block.named_modules()
        if (hasattr(module, "has_gate") and hasattr(module, "is_transposed")) or path.split(".")[-1] == "experts"
    ]
    if experts:
        raise UnsupportedArchitecture(
            f"{family}: layer {layer} is a mixture of experts ({experts[0]}), whose tokens share no row of activations; only layers with one MLP are "
            "measured and changed: choose others with --layers"
        )
    # Gemma 3n and 4 have a second one in the layer itself, for their per-layer inputs.
    if len(found) > 1 and len(inner := [one for one in found if "." in one[0]]) == 1:
        found = inner
    if len(found) != 1:
        what = (
            "no module for the MLP's non-linearity"
            if not found
            else f"several activations ({', '.join(p for p, _ in found)})"
        )
        raise UnsupportedArchitecture(
            f"{family}: layer {layer} has {what}, so its activation cannot be placed; see docs/adding-a-model.md"
        )
    path, act = found[0]
    owner = block.get_submodule(path.rpartition(".")[0])
    return ActivationPoint(layer, path, act, owner, _is_gated(owner))


def _check_there(layers: Sequence[int], there: int) -> None:
    for layer in layers:
        if not 1 <= layer <= there:
            raise BadStudy(f"no layer {layer}: layers 1 to {there} are there (numbered from 1)")


#: What families call a layer's MLP, dense or a mixture of experts, among the layer's own parts.
_MLP = re.compile(r"mlp|feed_?forward|ffn|ff|moe|block_sparse_moe")


def mlp_modules(model: nn.Module, layers: Sequence[int]) -> dict[int, nn.Module]:
    """The MLP of each of the layers (numbered from 1), whose output is added to the residual stream."""
    found: dict[int, nn.Module] = {}
    for layer, block in layer_modules(model, layers).items():
        own = {name: part for name, part in block.named_children() if _MLP.fullmatch(name)}
        if len(own) != 1:
            what = f"several MLPs ({', '.join(own)})" if own else "no MLP as a part of its own"
            raise UnsupportedArchitecture(
                f"{type(model).__name__}: layer {layer} has {what}, so there is no single mlp-output; choose other layers or another part"
            )
        (found[layer],) = own.values()
    return found


def layer_modules(model: nn.Module, layers: Sequence[int]) -> dict[int, nn.Module]:
    """The modules of the layers (numbered from 1), whose output is the residual stream."""
    if family_of(getattr(getattr(model, "config", None), "model_type", "")).layers is not None:
        raise UnsupportedArchitecture(
            f"{type(model).__name__}: one module serves several layers, so what one of them hands on cannot be told apart; patch attention-output instead"
        )
    _, modules = decoder_of(model)
    _check_there(layers, len(modules))
    return {layer: modules[layer - 1] for layer in layers}


def _is_gated(owner: nn.Module) -> bool:
    """Decided by the code, not by the names of its children: some families add other steps between the same projections."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    known, code = LlamaMLP.forward.__code__, getattr(type(owner).forward, "__code__", None)
    return code is not None and (code.co_code, code.co_names) == (known.co_code, known.co_names)
