"""Received attention of every head of a prompt that is run in parts with a cache: time and memory.

    python benchmarks/long_prompts.py [--tokens 1048576] [--part 16384] [--device cuda] [--json FILE]

Llama-3.2-1B shapes (16 layers × 32 heads of size 64, 8 key heads), random weights, bf16. Correctness first: a short prompt in parts and whole
must have the same sums in layer 1, up to the rounding of its queries and keys in products of other shapes; at the end each head's masses must
add up to 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, LlamaConfig

from mless.capture import capturing
from mless.capture.attention import _run_in_parts
from mless.models import LoadedModel


def random_model(device: torch.device, context: int) -> LoadedModel:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
        max_position_embeddings=context,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return LoadedModel(
        name="random", label="Llama-3.2-1B shapes", family="llama", model=model, tokenizer=None, layers=16, loaded_layers=16, heads=32,
        context=context, device=device, dtype="bfloat16", fingerprint="", tokenizer_fingerprint="", omit_first=True,
    )  # fmt: skip


def captured(model: LoadedModel, ids: Tensor, part: int | None) -> tuple[dict[int, Any], float, set[str]]:
    device, tokens = model.device, ids.shape[1]
    sets = torch.ones(1, 1, tokens, dtype=torch.bool, device=device).expand(-1, 2, -1)
    spans = torch.zeros(1, tokens, dtype=torch.long, device=device)
    with torch.inference_mode(), capturing(model.model, layers=range(1, 17)) as recorder:
        recorder.expect(sets, spans, in_parts=part is not None)
        begin = time.perf_counter()
        if part is None:
            recorder.run(input_ids=ids.to(device), use_cache=False)
        else:
            _run_in_parts(model, recorder, ids, part)
            recorder.joined()
        recorder.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return dict(recorder.sums), time.perf_counter() - begin, set(recorder.computed_by.values())


def gate(model: LoadedModel, part: int) -> float:
    ids = torch.randint(0, 1000, (1, 3 * part + 100), generator=torch.Generator().manual_seed(1))
    parts, _, _ = captured(model, ids, part)
    whole, _, _ = captured(model, ids, None)
    a, b = (found[1].received[:, 0].double().cpu() for found in (parts, whole))
    error = float((a - b).norm() / b.norm())
    if not error <= 1e-4:
        sys.exit(f"layer 1's sums in parts are not those of the whole prompt: {error:.1e} apart")
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--part", type=int, default=16384)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is here; for a short prompt: --device cpu --tokens 2048 --part 512")
    model = random_model(device, max(asked.tokens, 4 * asked.part))
    row: dict[str, Any] = {"what": "a prompt in parts", "tokens": asked.tokens, "part": asked.part}
    row["parts_against_whole"] = gate(model, min(asked.part, 4096))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 1000, (1, asked.tokens), generator=torch.Generator().manual_seed(2))
    sums, took, by = captured(model, ids, asked.part)
    row["seconds"], row["computed_by"] = round(took, 1), sorted(by)
    if device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    row["cache_gib"] = round(asked.tokens * 16 * 2 * 8 * 64 * 2 / 2**30, 1)
    row["mass_off_1"] = max(float((found.mass.sum(-1) - 1).abs().max()) for found in sums.values())
    if not row["mass_off_1"] <= 1e-4:
        sys.exit(f"masses do not add up to 1: {row['mass_off_1']:.1e} off")
    row |= {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    row["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print("  ".join(f"{name} {value}" for name, value in row.items()))
    if asked.json:
        asked.json.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
