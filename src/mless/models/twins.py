"""A second model of the same weights, for another thread."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

from torch import nn


def twin(model: nn.Module) -> nn.Module | None:
    """Modules and configs of its own, and the same weights in memory; None of a model that cannot have one.

    Instruments set attributes of modules and configs, so two threads that use instruments need a model each.
    """
    if any(_holds_a_closure(module) for module in model.modules()):
        return None
    shared: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, shared)
    except Exception:  # noqa: BLE001 - a module of somebody else's may hold anything
        return None


def _holds_a_closure(module: nn.Module) -> bool:
    """Whether it holds a function that may know the module itself: a copy would still use the first one's."""
    own = vars(module)
    hooks = [
        hook
        for name, held in own.items()
        if name.endswith("_hooks") and isinstance(held, dict)
        for hook in held.values()
    ]
    return any(isinstance(one, FunctionType) and one.__closure__ for one in (*own.values(), *hooks))
