"""Where a model's activations are: the module of each layer whose output is act(gate(x)) or act(fc(x)).

transformers gives every MLP a module for its non-linearity, under a handful of names. What is found is checked, not believed: a layer with
none, with several, or with one that other layers share is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from mless.errors import BadStudy, UnsupportedArchitecture

#: What families call the module: act_fn, act, activation_fn, activation, activation_function, gelu_impl.
_CALLED = re.compile(r"(act|act_fn|activation|activation_fn|activation_function|gelu_impl|ffn_act)")
_ELSEWHERE = re.compile(r"attn|attention|router|gate_fn|mixer|norm", re.IGNORECASE)
#: Towers that read pictures or sound, and encoders: they may have more layers than the decoder beside them.
_BESIDE = re.compile(r"vision|visual|image|audio|speech|encoder", re.IGNORECASE)


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


def decoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the decoder's layers, and the layers: the longest list of like modules that holds MLPs or attention."""
    found: list[tuple[int, nn.Module, nn.ModuleList]] = []
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if (
                isinstance(child, nn.ModuleList)
                and len(child)
                and not _BESIDE.search(f"{path}.{name}")
                and any(_attends(name) for name, _ in child[0].named_modules())
            ):
                found.append((len(child), module, child))
    if not found:
        raise UnsupportedArchitecture(
            f"{type(model).__name__}: no list of decoder layers was found, so its activations cannot be told layer from layer; see "
            "docs/adding-a-model.md"
        )
    _, owner, layers = max(found, key=lambda one: one[0])
    return owner, layers


def _attends(name: str) -> bool:
    return re.search("attn|attention", name, re.IGNORECASE) is not None


def activation_points(model: nn.Module, layers: list[int] | tuple[int, ...]) -> list[ActivationPoint]:
    """The activation of each of the layers (numbered from 1); what cannot be placed is refused by name."""
    _, modules = decoder_of(model)
    for layer in layers:
        if not 1 <= layer <= len(modules):
            raise BadStudy(f"no layer {layer}: layers 1 to {len(modules)} are there (numbered from 1)")
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
        parts = path.split(".")
        if _CALLED.fullmatch(parts[-1]) and not any(_ELSEWHERE.search(part) for part in parts[:-1]):
            found.append((path, module))
    experts = [
        path
        for path, module in block.named_modules()
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    ]
    if experts:
        raise UnsupportedArchitecture(
            f"{family}: layer {layer} is a mixture of experts ({experts[0]}), whose tokens share no row of activations; only layers with one MLP are "
            "measured and changed: choose others with --layers"
        )
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


def _is_gated(owner: nn.Module) -> bool:
    """By its code, not by its children's names: some families multiply or drop something on the way between the same projections."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    known, code = LlamaMLP.forward.__code__, getattr(type(owner).forward, "__code__", None)
    return code is not None and (code.co_code, code.co_names) == (known.co_code, known.co_names)
