"""One row per model family: what cannot be read off the model itself.

A family without a row works too if its attention goes through transformers' registry and the proofs hold at load time; a row
adds what only people know. See docs/adding-a-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """
    label:       the family's name for people
    omit_first:  figures leave the first token out, as published: it is the attention sink and flattens the rest
    bos:         the model was trained with a beginning-of-sequence token, so a tokenizer that adds none is at fault
    """

    label: str
    omit_first: bool = False
    bos: bool = False


FAMILIES: dict[str, Family] = {
    "gemma": Family("Gemma", omit_first=True, bos=True),
    "gemma2": Family("Gemma 2", omit_first=True, bos=True),
    "gemma3_text": Family("Gemma 3", omit_first=True, bos=True),
    "gpt2": Family("GPT-2"),
    "gpt_neox": Family("GPT-NeoX"),
    "gpt_oss": Family("gpt-oss"),
    "llama": Family("Llama", omit_first=True),
    "mistral": Family("Mistral", bos=True),
    "phi3": Family("Phi-3"),
    "qwen2": Family("Qwen 2"),
    "qwen3": Family("Qwen 3"),
    "smollm3": Family("SmolLM3"),
}


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, Family(model_type))
