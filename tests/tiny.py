"""Tiny random models of each family, wrapped as the package wraps loaded ones. No network, no files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mless.models import LoadedModel
from mless.values import Prompt, Span, SpanName

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 11},
    # the window is shorter than the prompts, and one layer in three is global
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,  # low, so that the cap bites
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 7,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {},
    "gpt_neox": {},
}


def tiny(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, head: bool = False, **changes: Any
) -> LoadedModel:
    """With `head` it has its language-model head, too."""
    torch.manual_seed(seed)
    settings = BASE | FAMILIES.get(family, {}) | changes
    if family == "gpt2":
        settings = {
            "vocab_size": settings["vocab_size"],
            "n_embd": settings["hidden_size"],
            "n_layer": settings["num_hidden_layers"],
            "n_head": settings["num_attention_heads"],
            "n_positions": settings["max_position_embeddings"],
        }
    config = AutoConfig.for_model(family, **settings)
    implementation = "eager" if family in ("gpt_oss", "gemma2") else "sdpa"
    kind = AutoModelForCausalLM if head else AutoModel
    model = kind.from_config(config, attn_implementation=implementation, dtype=dtype).eval()
    # Fresh weights are near zero, which makes every attention nearly even and every test easy; sharpen it.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name and "wte" not in name:
                weight.mul_(6.0)
            if "sinks" in name:
                weight.normal_()
    return wrapped(model, family)


def wrapped(model: Any, family: str) -> LoadedModel:
    """A model as the package wraps one that it has loaded."""
    config = model.config.get_text_config()
    return LoadedModel(
        name=family,
        label=f"tiny-{family}",
        family=family,
        model=model,
        tokenizer=None,
        layers=config.num_hidden_layers,
        loaded_layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        context=BASE["max_position_embeddings"],
        device=torch.device("cpu"),
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint="tiny",
        tokenizer_fingerprint="tiny",
        omit_first=False,
    )


def prompt_of(*parts: tuple[SpanName, int], seed: int = 0, item: str = "1", condition: str = "mless") -> Prompt:
    """Random ids in the given spans: ``prompt_of(("system", 5), ("filler", 4), ("question", 9))``."""
    generator = torch.Generator().manual_seed(seed)
    spans: list[Span] = []
    for name, size in parts:
        start = spans[-1].stop if spans else 0
        spans.append(Span(name, start, start + size))
    ids = torch.randint(0, BASE["vocab_size"], (spans[-1].stop,), generator=generator)
    return Prompt(item, condition, tuple(ids.tolist()), tuple(spans), "")
