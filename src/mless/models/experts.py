"""Whether a model is a mixture of experts: rows that choose the same expert share its products."""

from __future__ import annotations

from torch import nn


def has_experts(model: nn.Module) -> bool:
    # Attributes that transformers' decorator sets on expert layers.
    return any(hasattr(module, "is_transposed") and hasattr(module, "has_gate") for module in model.modules())
