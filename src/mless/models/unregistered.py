"""Families whose attention does not go through transformers' registry: how our attention gets their queries, keys and values.

Each function here replaces a method of a family's attention module inside `seams.own_attention`. It gets `attend` (with the signature of
the registry's functions), the module, and the method's arguments. Projections, rotation and cache stay in the module. A row in
`adapters.py` says which function serves which module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mless.errors import UnsupportedArchitecture

#: As a function of transformers' attention registry: (module, query, key, value, mask, scaling=, …) → (batch × queries × heads × dim, None).
Attend = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Own:
    """In modules of the class `module` of transformers.models (``"gptj.GPTJAttention"``), `function` stands in for `method`."""

    module: str
    method: str
    function: Callable[..., Any]


def attn(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    """GPT-J's `_attn` and similar ones; some keep queries and keys in fp32 whatever the model's dtype."""
    scale: float = module.scale_attn if hasattr(module, "scale_attn") else module.norm_factor
    out, _ = attend(
        module, query, key, value.to(query.dtype), mask, scaling=1.0 / scale, dropout=_dropout(module)
    )  # fmt: skip
    return out.to(value.dtype).transpose(1, 2), None


def gpt_neo(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None
) -> tuple[Tensor, None]:
    """No scale; every other layer has a window, which its model's mask does not know of."""
    window = module.config.window_size if module.attention_type == "local" else None
    out, _ = attend(module, query, key, value, mask, scaling=1.0, window=window, dropout=_dropout(module))
    return out.transpose(1, 2), None


def openai_gpt(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, padding: Any = None, matrices: bool = False
) -> list[Tensor]:
    """The first GPT passes transposed keys, applies causality itself, and its mask is for padding only."""
    mask = None
    if padding is not None:
        mask = (padding == 0) & (module.bias[:, :, : query.shape[2], : key.shape[3]] > 0)
    scale = value.shape[-1] ** -0.5 if module.scale else 1.0
    out, _ = attend(module, query, key.transpose(-1, -2), value, mask, scaling=scale, dropout=_dropout(module))
    return [out.transpose(1, 2), *([out.new_zeros(0)] if matrices else [])]


def bloom(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    bias = module.beta * alibi.view(query.shape[0], module.num_heads, -1, key.shape[2])
    out, _ = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.inv_norm_factor,
        position_bias=bias.expand(-1, -1, query.shape[2], -1),
        dropout=_dropout(module),
    )
    return module.dense(out.flatten(2)) + residual, None


def mpt(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (_by_head(part, module.n_heads) for part in fused.chunk(3, dim=2))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    bias = None
    if position_bias is not None:
        bias = position_bias[None, :, :, -key.shape[2] :].expand(-1, -1, query.shape[2], -1)
    dropout = float(module.attn_dropout_p)
    out, _ = attend(
        module, query, key, value, attention_mask, scaling=module.softmax_scale, position_bias=bias, dropout=dropout
    )  # fmt: skip
    return module.out_proj(out.flatten(2)), None


def falcon(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Any = None,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Its model has put ALiBi into the mask by now."""
    parts = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in parts)
    if alibi is None:
        rotate: Any = importlib.import_module(type(module).__module__).apply_rotary_pos_emb
        query, key = rotate(query, key, *(position_embeddings or ()))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    dropout = _dropout(module)
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.inv_norm_factor, dropout=dropout)
    return module.dense(out.flatten(2)), None


def xglm(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if key_value_states is not None:
        raise UnsupportedArchitecture(
            "XGLM was given an encoder's states to attend to; only decoders by themselves are measured"
        )
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (_by_head(project(hidden_states), module.num_heads) for project in projections)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.scaling, dropout=float(module.dropout))
    return module.out_proj(out.flatten(2)), None


def git(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    projections = (module.query, module.key, module.value)
    query, key, value = (_by_head(project(hidden_states), module.num_attention_heads) for project in projections)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    scale = module.attention_head_size**-0.5
    out, _ = attend(module, query, key, value, attention_mask, scaling=scale, dropout=module.dropout.p)
    return out.flatten(2), None


def hrm_text(model: Any) -> dict[int, Any]:
    """Two stacks that run in turns, the lower one several times per run of the upper one. Every run of a layer counts as a layer."""
    model = getattr(model, "model", model)
    runs = [model.L_module] * model.config.L_cycles + [model.H_module]
    modules = [block.self_attn for stack in runs * model.config.H_cycles for block in stack.layers]
    return dict(enumerate(modules, start=1))


def _by_head(states: Tensor, heads: int) -> Tensor:
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def _dropout(module: Any) -> float:
    layer = getattr(module, "attn_dropout", None) or getattr(module, "attention_dropout", None)
    return layer.p if isinstance(layer, torch.nn.Dropout) else 0.0
