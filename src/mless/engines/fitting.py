"""What a model asks of an engine that decodes it: how many rows fit, how far they may reach, and which tokens end an answer."""

from __future__ import annotations

import math
from typing import Any

from mless.models import LoadedModel

#: Largest default cache on a CPU. A GPU raises an error when its memory is full.
_CPU_CACHE_BYTES = 3 << 30


def default_slots(model: LoadedModel, length: int, most: int | None = None) -> int:
    """128; fewer for few requests, or where a CPU's cache would be too large. Always a power of two."""
    wanted = 128 if most is None else min(128, max(8, 1 << (most - 1).bit_length()))
    if model.device.type != "cpu":
        return wanted
    config = model.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * model.layers * heads * width * length * model.model.dtype.itemsize
    return max(8, min(wanted, 1 << int(math.log2(max(1, _CPU_CACHE_BYTES // row)))))


def one_scale(model: LoadedModel) -> int:
    """The length up to which all rows have one rotary scale. Beyond it, the longest row would set the scale of the others."""
    rope: Any = getattr(model.model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or model.context
    return model.context


def ends_of(model: LoadedModel) -> set[int]:
    """The tokens that end an answer: by the checkpoint's generation config, the config and the tokenizer."""
    found: set[int] = set()
    for holder in (getattr(model.model, "generation_config", None), model.model.config, model.tokenizer):
        given: Any = getattr(holder, "eos_token_id", None)
        found |= set(given if isinstance(given, list | tuple) else [] if given is None else [given])
    return found or {-1}
