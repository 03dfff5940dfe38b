"""One row per model family: what cannot be read from the model itself.

A family without a row works too if its attention goes through transformers' registry and the proofs hold at load time. A row adds what only
people know, and how to reach attention outside the registry. See docs/adding-a-model.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mless.models import unregistered
from mless.models.unregistered import Own


@dataclass(frozen=True, slots=True)
class Family:
    """
    label:       the family's name for people
    omit_first:  figures leave the first token out, as published: it is the attention sink and flattens the rest
    bos:         the model was trained with a beginning-of-sequence token, so a tokenizer that adds none is at fault
    attention:   how its attention is reached, where it does not go through transformers' registry
    layers:      which module computes which layer's attention, where the modules do not say
    """

    label: str
    omit_first: bool = False
    bos: bool = False
    attention: Own | None = None
    layers: Callable[[Any], dict[int, Any]] | None = None


FAMILIES: dict[str, Family] = {
    "bloom": Family("BLOOM", attention=Own("bloom.BloomAttention", "forward", unregistered.bloom)),
    "codegen": Family("CodeGen", attention=Own("codegen.CodeGenAttention", "_attn", unregistered.attn)),
    "falcon": Family("Falcon", attention=Own("falcon.FalconAttention", "forward", unregistered.falcon)),
    "gemma": Family("Gemma", omit_first=True, bos=True),
    "gemma2": Family("Gemma 2", omit_first=True, bos=True),
    "gemma3_text": Family("Gemma 3", omit_first=True, bos=True),
    "git": Family("GIT", attention=Own("git.GitSelfAttention", "forward", unregistered.git)),
    "gpt2": Family("GPT-2"),
    "gpt_neo": Family("GPT-Neo", attention=Own("gpt_neo.GPTNeoSelfAttention", "_attn", unregistered.gpt_neo)),
    "gpt_neox": Family("GPT-NeoX"),
    "gpt_neox_japanese": Family(
        "GPT-NeoX Japanese", attention=Own("gpt_neox_japanese.GPTNeoXJapaneseAttention", "_attn", unregistered.attn)
    ),
    "gpt_oss": Family("gpt-oss"),
    "gptj": Family("GPT-J", attention=Own("gptj.GPTJAttention", "_attn", unregistered.attn)),
    "hrm_text": Family("HRM-Text", layers=unregistered.hrm_text),
    "llama": Family("Llama", omit_first=True),
    "mistral": Family("Mistral", bos=True),
    "mpt": Family("MPT", attention=Own("mpt.MptAttention", "forward", unregistered.mpt)),
    "openai-gpt": Family("GPT", attention=Own("openai.Attention", "_attn", unregistered.openai_gpt)),
    "phi3": Family("Phi-3"),
    "qwen2": Family("Qwen 2"),
    "qwen3": Family("Qwen 3"),
    "smollm3": Family("SmolLM3"),
    "xglm": Family("XGLM", attention=Own("xglm.XGLMAttention", "forward", unregistered.xglm)),
}


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, Family(model_type))


def activation_of(config: Any) -> str | None:
    """The non-linearity of a model's MLPs as its config names it (silu, gelu_pytorch_tanh); None where it does not say."""
    found = (getattr(config, name, None) for name in _ACTIVATION_FIELDS)
    return next((name for name in found if isinstance(name, str)), None)


_ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "activation")
_OWN = {own.module: own for family in FAMILIES.values() if (own := family.attention) is not None}


def own_of(module: object) -> Own | None:
    """How to reach an attention module outside the registry; None for every other module."""
    home, _, rest = type(module).__module__.partition("transformers.models.")
    return None if home else _OWN.get(f"{rest.split('.')[0]}.{type(module).__name__}")
