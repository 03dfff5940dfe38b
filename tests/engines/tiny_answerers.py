"""Tiny random models with a language-model head, and what transformers' own generate answers with them. No network, no files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mless.engines.base import Request
from mless.models import LoadedModel
from tiny import BASE
from tiny import FAMILIES as _ATTENTION_FAMILIES

#: They differ in windows, caps, sinks, positions, experts and in how their layers are written.
FAMILIES: dict[str, dict[str, Any]] = _ATTENTION_FAMILIES | {
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 0, 1]},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
CONTEXT = 512


class Letters:
    """A tokenizer of the fewest words: a token is a letter. Id 0 is special and is not shown."""

    eos_token_id: int | None = None

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(chr(0x30 + i) for i in ids if i or not skip_special_tokens)


def answering(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> LoadedModel:
    """Embeddings are untied and attention is sharpened: else greedy decoding of a random model repeats its last token for ever."""
    torch.manual_seed(seed)
    settings = (
        BASE | FAMILIES.get(family, {}) | {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False} | changes
    )
    if family == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        names |= {"max_position_embeddings": "n_positions"}
        settings = {names.get(key, key): value for key, value in settings.items()}
    # No token ends an answer unless a test says so.
    settings = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None} | settings
    config = AutoConfig.for_model(family, **settings)
    implementation = "eager" if family in ("gpt_oss", "gemma2") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
                weight.mul_(6.0)
            if "sinks" in name:
                weight.normal_()
    model.to(dtype)
    return LoadedModel(
        name=family,
        label=f"tiny-{family}",
        family=family,
        model=model,
        tokenizer=Letters(),
        layers=config.num_hidden_layers,
        loaded_layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        context=settings.get("max_position_embeddings", settings.get("n_positions")),
        device=torch.device("cpu"),
        dtype=str(dtype).removeprefix("torch."),
        fingerprint="tiny",
        tokenizer_fingerprint="tiny",
        omit_first=False,
    )


def ids_of(length: int, seed: int = 0, vocabulary: int = BASE["vocab_size"]) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(1, vocabulary, (length,), generator=generator).tolist())


def asked(*lengths: int, **others: Any) -> list[Request]:
    """One request for each prompt length, with random tokens."""
    return [Request("none", str(n), 0, n, ids_of(length, n), **others) for n, length in enumerate(lengths)]


@torch.inference_mode()
def by_transformers(model: LoadedModel, ids: tuple[int, ...], new: int, **given: Any) -> tuple[int, ...]:
    """What its own generate says of the prompt alone."""
    tokens = torch.tensor([ids], device=model.device)
    made = model.model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new, **given
    )
    return tuple(made[0, len(ids) :].tolist())
