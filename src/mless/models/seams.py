"""The one place where attention of ours is put into a transformers model, through its own registries, and taken out again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

_serial = itertools.count(1)


def configs_of(model: nn.Module) -> dict[int, Any]:
    """Every config in the model that says how attention is computed, by identity; several modules may share one."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return {id(config): config for config in found if hasattr(config, "_attn_implementation")}


@contextmanager
def own_attention(model: nn.Module, attention: Callable[..., Any], mask: Callable[..., Any]) -> Generator[None]:
    """Inside the block the model computes attention by `attention` with masks by `mask`.

    Both at once: an attention name without a mask entry silently loses causality. The model and both registries are as before once the
    block is left, by whatever road.
    """
    name = f"mless-{next(_serial)}"
    configs = configs_of(model)
    before = {key: config._attn_implementation for key, config in configs.items()}
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        # The registries offer no way to take a global name out again.
        AttentionInterface._global_mapping.pop(name, None)  # pyright: ignore[reportPrivateUsage]
        AttentionMaskInterface._global_mapping.pop(name, None)  # pyright: ignore[reportPrivateUsage]
