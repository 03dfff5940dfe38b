"""ARM token by token on a GPU: activation, exact selection, replacement and the product with `up` in one program.

The statistics are order statistics of 16-bit floats, whose bits sort like the values. Each is found by bisection: count the values at or
below a probe, and halve the range. No sort, histogram, atomics or host sync: the same bits every time, also in a captured graph.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mless.arm_rules import ARM_RULES, ArmRule
from mless.errors import BadStudy
from mless.values import MAD_TO_SD, ArmSettings

Act = Literal["none", "silu", "gelu", "gelu_tanh"]
_ACTS: tuple[Act, ...] = ("none", "silu", "gelu", "gelu_tanh")
#: A count and a unit's number have 15 bits.
_MOST_UNITS = 32766


#: It exists for Linux only. Decided on import: a compiler that traces `fits` cannot trace a search for files.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def fits(activations: Tensor) -> bool:
    """Whether the kernel can run: bfloat16 on a CUDA device (or anywhere, under Triton's interpreter), an even number of units."""
    if activations.dtype != torch.bfloat16 or activations.requires_grad or activations.shape[-1] % 2:
        return False
    if not activations.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return _HAS_TRITON and activations.shape[-1] <= _MOST_UNITS


def serves(settings: ArmSettings, rule: ArmRule) -> bool:
    """Whether the kernel does what is asked: each token by itself, by a rule that it has."""
    return settings.scope == "token" and rule.kernel is not None


def activation_of(module: nn.Module) -> Act | None:
    """The non-linearity as the kernel knows it; None where it does not."""
    name = type(module).__name__
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name in ("GELUTanh", "PytorchGELUTanh") or (isinstance(module, nn.GELU) and module.approximate == "tanh"):
        return "gelu_tanh"
    if name == "GELUActivation" or isinstance(module, nn.GELU):
        return "gelu"
    return None


def rows(
    values: Float[Tensor, "rows tokens units"],
    settings: ArmSettings,
    *,
    positions: Int[Tensor, "rows tokens"] | None = None,
    seeds: Int[Tensor, " rows"] | None = None,
    up: Float[Tensor, "rows tokens units"] | None = None,
    act: Act = "none",
) -> Float[Tensor, "rows tokens units"]:
    """`act` of the values, redistributed token by token, times `up` where that is given. `serves` and `fits` must hold."""
    count, tokens, units = values.shape
    # The kernel would read past what is there.
    if positions is not None and positions.shape != (count, tokens):
        raise _wrong_shape("positions", positions, (count, tokens))
    if seeds is not None and seeds.shape != (count,):
        raise _wrong_shape("seeds", seeds, (count,))
    if up is not None and up.shape != values.shape:
        raise _wrong_shape("up", up, (count, tokens, units))
    factor, least, most = _bounds(settings, units)
    rule = ARM_RULES.get(settings.rule)
    if not serves(settings, rule):
        raise BadStudy(
            f"the kernel redistributes token by token and has rules of its own only; it has none for scope {settings.scope!r} and rule "
            f"{settings.rule!r}: use redistribute, which chooses"
        )
    # Compiled code uses the operator without tracing into it. Without a compiler its overhead would cost more than the kernel.
    run = _rows if torch.compiler.is_compiling() else _launched
    return run(
        values, up, positions, seeds, settings.seed, factor, least, most, settings.p1, rule.kernel == "add", _ACTS.index(act)
    )  # fmt: skip


def _bounds(settings: ArmSettings, units: int) -> tuple[float, int, int]:
    """epsilon / median deviation (−1 where the share is given), and the least and most units to choose."""
    if settings.fraction is not None:
        k = max(1, round(settings.fraction * units))
        return -1.0, k, k
    assert settings.c is not None
    least, most = (max(1, round(share * units)) for share in (settings.p_min, settings.p_max))
    return MAD_TO_SD * settings.c, least, most


def _wrong_shape(what: str, given: Tensor, shape: tuple[int, ...]) -> BadStudy:
    return BadStudy(f"redistribute: {what} must have the shape {shape}, got {tuple(given.shape)}")


def _launched(
    values: Tensor,
    up: Tensor | None,
    positions: Tensor | None,
    seeds: Tensor | None,
    seed: int,
    factor: float,
    least: int,
    most: int,
    p1: float,
    add: bool,
    act: int,
) -> Tensor:
    from mless.kernels.redistributing_triton import launch

    values = values.contiguous()
    out = torch.empty_like(values)
    launch(
        values,
        up.contiguous() if up is not None else None,
        positions.contiguous() if positions is not None else None,
        seeds.contiguous() if seeds is not None else None,
        out,
        seed=seed,
        factor=factor,
        least=least,
        most=most,
        p1=p1,
        add=add,
        act=_ACTS[act],
    )
    return out


_rows = torch.library.custom_op(
    "mless::redistribute_tokens",
    _launched,
    mutates_args=(),
    schema="(Tensor values, Tensor? up, Tensor? positions, Tensor? seeds, int seed, float factor, int least, int most, float p1, bool add, int act)"
    " -> Tensor",
)


@_rows.register_fake
def _(values: Tensor, *others: Any) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return torch.empty_like(values)
