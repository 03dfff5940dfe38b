"""ARM's rules: what becomes of a value that is redistributed. One table, which the plain path and the GPU's kernel both ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mless.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ArmRule:
    """The new value as a function of the old one and the one drawn: ``new(old, drawn)``, on tensors of fp32, value by value.

    `kernel` names what the Triton kernel does for this rule. None: it has nothing for it, and `new` is used on every device.
    """

    new: Callable[[Tensor, Tensor], Tensor]
    kernel: Literal["replace", "add"] | None = None


def _replaced(old: Tensor, drawn: Tensor) -> Tensor:
    return drawn


def _added(old: Tensor, drawn: Tensor) -> Tensor:
    return old + drawn


ARM_RULES: Registry[ArmRule] = Registry(
    "arm_rules",
    "ARM rule",
    {"replace": ArmRule(_replaced, kernel="replace"), "add": ArmRule(_added, kernel="add")},
    wants="an mless.arm_rules.ArmRule",
    fits=lambda one: isinstance(one, ArmRule),
)
