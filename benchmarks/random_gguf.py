"""Write a GGUF with random weights in TinyLlama's shapes (1.1 billion parameters), to time its conversion and loading.

    python benchmarks/random_gguf.py OUT.gguf [--layers 22] [--type Q8_0]

The tokenizer is the embedded model's. The weights are scaled so that a forward stays finite; the model says nothing.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

from mless.models.locating import embedded_file

HIDDEN, HEADS, KV_HEADS, INNER = 2048, 32, 4, 5632


def write(path: Path, layers: int, kind: GGMLQuantizationType) -> None:
    file = embedded_file("smollm2")
    if file is None:
        raise SystemExit("the embedded model, whose tokenizer is used, is not installed; run: make install")
    fields = GGUFReader(file).fields

    def own(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    tokens: list[str] = own("tokens")
    out = GGUFWriter(path, "llama")
    out.add_name("Random 1.1B")
    out.add_context_length(2048)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(layers)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(tokens)
    out.add_token_types(own("token_type"))
    out.add_token_merges(own("merges"))
    out.add_bos_token_id(own("bos_token_id"))
    out.add_eos_token_id(own("eos_token_id"))
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            out.add_tensor(name, np.ones(shape, dtype=np.float32))
            return
        value = rng.standard_normal(shape, dtype=np.float32) / math.sqrt(shape[1])
        out.add_tensor(name, quantize(value, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for n in range(layers):
        add(f"blk.{n}.attn_norm.weight", HIDDEN)
        add(f"blk.{n}.ffn_norm.weight", HIDDEN)
        add(f"blk.{n}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{n}.attn_k.weight", KV_HEADS * (HIDDEN // HEADS), HIDDEN)
        add(f"blk.{n}.attn_v.weight", KV_HEADS * (HIDDEN // HEADS), HIDDEN)
        add(f"blk.{n}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{n}.ffn_gate.weight", INNER, HIDDEN)
        add(f"blk.{n}.ffn_up.weight", INNER, HIDDEN)
        add(f"blk.{n}.ffn_down.weight", HIDDEN, INNER)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument(
        "--type", default="Q8_0", help="a type that the gguf package can write: F32, F16, Q8_0, Q4_0, …"
    )
    given = parser.parse_args()
    write(given.out, given.layers, GGMLQuantizationType[given.type])
