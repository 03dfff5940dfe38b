"""Tokenizers of different habits and a tiny model to go with them, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mless.prompting import SYSTEM_TEXT

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As Llama 3's: BOS in the template, and every text trimmed.
TRIMS = (
    "<s>{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As Gemma's first: no system role, texts trimmed.
NO_SYSTEM = (
    "<s>{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Leaves the system text out without a word.
FORGETS_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)

_WORDS = Regex(r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_TEXT = [f"{SYSTEM_TEXT}\nFind the sum of a. / / he he the a //////// ////////\n\n", f"{SYSTEM_TEXT}\n\n"] * 5


@cache
def byte_level(template: str | None = None, *, bos: bool = False, trim_offsets: bool = False) -> Any:
    """Byte-level BPE that takes line breaks into the punctuation before them (".\\n" is one token), as Qwen's does."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Split(_WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    core.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    core.post_processor = processors.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@cache
def with_a_prefix(template: str | None = None) -> Any:
    """Characters with bytes to fall back on, and a blank before every text, as Llama 2's; ".\\n" is one token here too."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = ["Find", " the", " sum", " /", "he", " he", ".\n", ".\n\n", "\n\n", "a", " a"]
    lines = [*SYSTEM_TEXT, *pieces] * 5
    trained.train_from_iterator(
        [line.replace(" ", "\u2581") for line in lines],
        trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])  # pyright: ignore[reportAttributeAccessIssue]
    # The bytes are plain entries of the vocabulary, no added tokens: text that spells one out is text.
    content = json.loads(trained.to_str())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    core = Tokenizer.from_str(json.dumps(content))
    core.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def model_folder(
    path: Path,
    *,
    template: str | None = None,
    context: int = 512,
    broken: str | None = None,
    seed: int = 0,
    **shape: Any,
) -> Path:
    """A tiny random Llama of 2 layers and 4 heads, or another `shape`, with its tokenizer; `broken` is a token whose embedding is NaN."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level(template)
    torch.manual_seed(seed)
    usual: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=context, **(usual | shape))
    model = LlamaForCausalLM(config)
    if broken is not None:
        (token,) = tokenizer(broken, add_special_tokens=False).input_ids
        with torch.no_grad():
            model.model.embed_tokens.weight[token] = float("nan")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def spelled(tokenizer: Any, token: int) -> bytes:
    """The bytes one token of a byte-level tokenizer stands for."""
    if token in tokenizer.added_tokens_decoder:
        return tokenizer.added_tokens_decoder[token].content.encode()
    return bytes(_byte_of()[sign] for sign in tokenizer.convert_ids_to_tokens(token))


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for signs from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
