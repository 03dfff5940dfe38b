"""ARM in a model that vLLM has loaded into this process: the fused activation of a layer's MLP is replaced, and later restored.

vLLM's MLPs compute act(gate) · up in one module, from [tokens, 2 · units], with the tokens of all rows in one line. The replacement
redistributes act(gate) before the product. A token's position comes from the forward's argument. A module cannot know a token's request, so
every row draws with the settings' seed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from mless.errors import EngineFault
from mless.models.activations import ActivationPoint, activation_points, decoder_of
from mless.redistribution import of_layer, redistribute
from mless.values import ArmSettings


def refuse(settings: ArmSettings, parallel: Any) -> None:
    """Refuse what vLLM cannot do with any model; `parallel` is vLLM's parallel_config."""
    if parallel.world_size > 1:
        raise divided(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    if settings.scope != "token":
        raise EngineFault(
            f"ARM with scope {settings.scope!r} pools the tokens of a call, and vLLM divides rows into calls as it likes; use scope 'token', "
            "or --engine hf"
        )


def divided(tensor: int, pipeline: int) -> EngineFault:
    return EngineFault(
        f"ARM takes its statistics over all units of a layer, and tensor parallel {tensor} × pipeline parallel {pipeline} divides them among "
        "processes; run vLLM on one device, or use --engine hf"
    )


def fused_points(model: nn.Module, layers: tuple[int, ...]) -> list[ActivationPoint]:
    """The fused activation of each of the layers; a layer computed otherwise is refused by name."""
    from vllm.model_executor.layers.activation import (  # pyright: ignore[reportMissingImports]
        GeluAndMul,
        SiluAndMul,
    )

    points = activation_points(model, layers)
    _, blocks = decoder_of(model)
    for point in points:
        experts = [name for name, _ in blocks[point.layer - 1].named_modules() if "experts" in name or "moe" in name]
        children = dict(point.owner.named_children())
        if experts:
            found = f"is a mixture of experts ({experts[0]})"
        # Exactly these classes: similar ones clamp, or take gate and up in the other order.
        elif type(point.act) not in (SiluAndMul, GeluAndMul):
            found = f"has {type(point.act).__name__} for its activation ({point.path})"
        elif not {"gate_up_proj", "down_proj"} <= children.keys():
            found = f"has an MLP of {', '.join(children)}"
        else:
            continue
        raise EngineFault(
            f"{type(model).__name__}: layer {point.layer} {found}, and in vLLM ARM can be placed only in MLPs with gate_up_proj, down_proj and "
            "SiluAndMul or GeluAndMul between them; use --engine hf"
        )
    return points


class PlacedArm:
    """ARM in a model of vLLM's. `require_run` raises if a forward ran without it."""

    def __init__(self, model: nn.Module, settings: ArmSettings) -> None:
        self.positions: Int[Tensor, " tokens"] | None = None
        self._points = fused_points(model, settings.layers)
        # The whole model, because vLLM calls the inner decoder without running its hooks.
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._modules = [_Redistributing(self, point, settings) for point in self._points]
        for point, module in zip(self._points, self._modules, strict=True):
            setattr(point.owner, point.path.rpartition(".")[2], module)

    def require_run(self) -> None:
        """Check that ARM ran: a model compiled earlier would answer without it, like the baseline."""
        for point, module in zip(self._points, self._modules, strict=True):
            if not module.ran:
                raise EngineFault(
                    f"ARM was put into layer {point.layer} and vLLM answered without running it: compiled graphs, or a layer that text does not pass; "
                    "no such answer is kept; use --engine hf"
                )

    def remove(self) -> None:
        """Put the model's own activations back."""
        self._hook.remove()
        for point in self._points:
            setattr(point.owner, point.path.rpartition(".")[2], point.act)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        # With three position rows (time, height, width), all are the same for text.
        self.positions = positions[0] if positions is not None and positions.ndim == 2 else positions


@contextmanager
def placed(model: nn.Module, settings: ArmSettings) -> Generator[PlacedArm]:
    """Inside the block vLLM's `model` runs with ARM; afterwards, even on error, it is as before."""
    arm = PlacedArm(model, settings)
    try:
        yield arm
    finally:
        arm.remove()


class _Redistributing(nn.Module):
    """act(gate), redistributed, times up."""

    def __init__(self, arm: PlacedArm, point: ActivationPoint, settings: ArmSettings) -> None:
        super().__init__()
        self._arm, self._layer = arm, point.layer
        self._settings = of_layer(settings, point.layer)
        #: None for SiLU, else how GELU is computed.
        self._approximate: str | None = getattr(point.act, "approximate", None)
        self.ran = False

    def forward(self, x: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens units"]:
        positions = self._arm.positions
        if positions is None or x.shape[:-1] != positions.shape:
            said = "no positions" if positions is None else f"positions of shape {tuple(positions.shape)}"
            raise EngineFault(
                f"ARM: layer {self._layer}'s MLP was given tokens of shape {tuple(x.shape[:-1])} in a forward with {said}; use --engine hf"
            )
        self.ran = True
        gate, up = x.chunk(2, dim=-1)
        a = functional.silu(gate) if self._approximate is None else functional.gelu(gate, approximate=self._approximate)
        # All rows count as one row here: without row seeds only positions differ.
        return redistribute(a[None], self._settings, positions=positions[None].to(torch.long))[0] * up
