"""Layer 1 of a 70B model fits a laptop: 30 shards are named, two exist, and the peak stays under 6 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import INDEX, save_tokenizer
from transformers import LlamaConfig

HIDDEN, INNER, KEYS, WORDS, LAYERS = 8192, 28672, 1024, 128256, 80
LAYER = {
    "input_layernorm.weight": [HIDDEN],
    "self_attn.q_proj.weight": [HIDDEN, HIDDEN],
    "self_attn.k_proj.weight": [KEYS, HIDDEN],
    "self_attn.v_proj.weight": [KEYS, HIDDEN],
    "self_attn.o_proj.weight": [HIDDEN, HIDDEN],
    "post_attention_layernorm.weight": [HIDDEN],
    "mlp.gate_proj.weight": [INNER, HIDDEN],
    "mlp.up_proj.weight": [INNER, HIDDEN],
    "mlp.down_proj.weight": [HIDDEN, INNER],
}
FIRST, SECOND = "model-00001-of-00030.safetensors", "model-00002-of-00030.safetensors"


def write_bf16(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file written block by block, so that the test itself needs no memory to speak of."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(len(shapes))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = 2 * int(torch.Size(shape).numel())
            if len(shape) == 1:
                file.write(torch.ones(shape).bfloat16().view(torch.int16).numpy().tobytes())
                continue
            # A block of its own for every tensor: were q and k one block, every token would look at itself alone.
            block = (torch.randn(1 << 23, generator=generator) * 0.02).bfloat16().view(torch.int16).numpy().tobytes()
            while left:
                left -= file.write(block[:left])


@pytest.fixture
def seventy(tmp_path: Path) -> Path:
    folder = tmp_path / "Llama-70B-shaped"
    folder.mkdir()
    LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=WORDS, max_position_embeddings=131072, tie_word_embeddings=False, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    save_tokenizer(folder, bos=True)
    names = {"model.embed_tokens.weight": FIRST}
    for n in range(LAYERS):
        for place, key in enumerate(LAYER):
            # Layer 1 straddles the first two shards, as a limit on the shards' size makes it.
            shard = (1 if place < 5 else 2) if n == 0 else min(29, 2 + n * 27 // LAYERS + 1)
            names[f"model.layers.{n}.{key}"] = f"model-{shard:05d}-of-00030.safetensors"
    names |= {
        "model.norm.weight": "model-00029-of-00030.safetensors",
        "lm_head.weight": "model-00030-of-00030.safetensors",
    }
    assert len(set(names.values())) == 30
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 141_107_412_992}, "weight_map": names}))
    shapes = {"model.embed_tokens.weight": [WORDS, HIDDEN]} | {f"model.layers.0.{k}": s for k, s in LAYER.items()}
    for file in (FIRST, SECOND):
        write_bf16(folder / file, {key: shape for key, shape in shapes.items() if names[key] == file})
    return folder


@pytest.mark.slow
def test_layer_1_of_a_70b_model_runs_on_a_cpu_under_6_gb(seventy: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mless.cli",
        "run",
        "quick",
        "--model",
        str(seventy),
        "--layers",
        "1",
        "--limit",
        "2",
    ]
    command += ["--conditions", "none,mless", "--device", "cpu", "--out", str(tmp_path / "out"), "--json"]
    with (tmp_path / "stdout").open("w") as out, (tmp_path / "stderr").open("w") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, (tmp_path / "stderr").read_text()
    said = json.loads((tmp_path / "stdout").read_text())
    assert [row["layer"] for row in said["layers"]] == [1]
    peak = usage.ru_maxrss * 1024
    print(f"peak {peak / 1e9:.2f} GB, {usage.ru_utime + usage.ru_stime:.0f} s of processor time")
    assert peak < 6e9
