"""Tiny random models and tokenizers on disk: real files of every kind that a name can lead to, made in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

LAYERS = 6
VOCABULARY = 512
INDEX = "model.safetensors.index.json"
_SENTENCES = [
    "The harbour was quiet in the early morning and the boats moved slowly.",
    "A farmer has 12 apples / 3 pears; how many pieces of fruit does he have?",
    "You are a careful assistant: think it over, then answer.",
]
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    # Ten times the usual spread: with it attention is far from even, so that a wrong layer shows.
    "initializer_range": 0.2,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES, num_key_value_heads=2),
    "qwen2": lambda: Qwen2Config(**_SIZES, num_key_value_heads=2),
    "gemma3_text": lambda: Gemma3TextConfig(**_SIZES, num_key_value_heads=2, head_dim=8, sliding_window=16),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=256, initializer_range=0.2
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES),
}


def save_tokenizer(folder: Path, *, bos: bool = False, size: int = VOCABULARY, template: str | None = None) -> Path:
    """A byte-level BPE tokenizer; with `bos` it puts <s> in front, as a model trained with one asks for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _SENTENCES,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def save_model(folder: Path, family: str = "llama", *, shard: str = "1GB", bos: bool = True, **changes: Any) -> Path:
    """A folder with config, safetensors (with their language-model head) and tokenizer."""
    config = CONFIGS[family]()
    config.tie_word_embeddings = False
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return save_tokenizer(folder, bos=bos)


def save_many_modal(folder: Path, *, old_names: bool) -> Path:
    """Gemma 3 with eyes; `old_names` as checkpoints of before transformers 4.52 called their tensors."""
    config = Gemma3Config(
        text_config=CONFIGS["gemma3_text"]().to_dict(),
        vision_config=SiglipVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=8,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ).to_dict(),
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    model.save_pretrained(folder, max_shard_size="1KB")
    merged: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        merged |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink()
    merged = {_named(key, old_names): value for key, value in merged.items()}
    files = {key: f"model-{n:05d}.safetensors" for n, key in enumerate(sorted(merged), start=1)}
    for key, file in files.items():
        save_file({key: merged[key].contiguous()}, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return save_tokenizer(folder, bos=True)


def _named(key: str, old: bool) -> str:
    bare = key.removeprefix("model.")
    if bare.startswith("language_model."):
        bare = "language_model." + bare.removeprefix("language_model.").removeprefix("model.")
    if old:
        return bare.replace("language_model.", "language_model.model.", 1)
    return f"model.{bare}"


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def write_gguf(path: Path, *, layers: int = 2, architecture: str = "llama", add_bos: bool = False) -> Path:
    """A tiny Llama as llama.cpp would store it, unquantised, with the tokenizer inside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden, heads, kv_heads, inner = 32, 4, 2, 48
    tokenizer = json.loads((save_tokenizer(path.parent / "own-tokenizer") / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    for file in (path.parent / "own-tokenizer").iterdir():
        file.unlink()
    (path.parent / "own-tokenizer").rmdir()
    out = GGUFWriter(path, architecture)
    out.add_name("Tiny Llama")
    out.add_context_length(256)
    out.add_embedding_length(hidden)
    out.add_block_count(layers)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(hidden // heads)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    out.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    out.add_add_bos_token(add_bos)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        value = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.2, shape)
        out.add_tensor(name, value.astype(np.float32))

    add("token_embd.weight", len(tokens), hidden)
    add("output.weight", len(tokens), hidden)
    add("output_norm.weight", hidden)
    for n in range(layers):
        add(f"blk.{n}.attn_norm.weight", hidden)
        add(f"blk.{n}.ffn_norm.weight", hidden)
        add(f"blk.{n}.attn_q.weight", hidden, hidden)
        add(f"blk.{n}.attn_k.weight", kv_heads * (hidden // heads), hidden)
        add(f"blk.{n}.attn_v.weight", kv_heads * (hidden // heads), hidden)
        add(f"blk.{n}.attn_output.weight", hidden, hidden)
        add(f"blk.{n}.ffn_gate.weight", inner, hidden)
        add(f"blk.{n}.ffn_up.weight", inner, hidden)
        add(f"blk.{n}.ffn_down.weight", hidden, inner)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
