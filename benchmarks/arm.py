"""What ARM costs: an MLP with it over the same MLP without, and a whole model's decoding step, in one run on one device.

    python benchmarks/arm.py [--layers 28] [--json FILE]

Correctness comes first: the kernel must choose and draw as the sorted path does, and the model must be as before afterwards. Then one JSON
line per row, and a table. Times are medians over many calls. With and without ARM take turns, so that a ratio is of one moment; a third turn,
again without, says how far such a ratio can be trusted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, StaticCache

from mless.redistribution import arm, redistribute
from mless.values import arm_settings

#: Qwen2.5-7B.
SHAPES = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def gate(device: torch.device) -> None:
    """No speed on a wrong kernel."""
    generator = torch.Generator(device).manual_seed(1)
    for units in (1536, 4864, 8960, 14336, 18944):
        for parameters in (
            {"c": 0.13},
            {"c": 0.32, "p1": 90.0},
            {"fraction": 0.25, "p1": 85.0},
            {"c": 0.1, "rule": "add"},
        ):
            for spread in (0.3, 1.0, 4.0):
                gates = torch.randn(3, 7, units, device=device, generator=generator) * spread
                a = torch.nn.functional.silu(gates.bfloat16())
                ours = redistribute(a, **parameters)
                sorted_path = redistribute(a.cpu(), **parameters)
                if not torch.equal(ours.cpu(), sorted_path):
                    wrong = int((ours.cpu() != sorted_path).sum())
                    sys.exit(
                        f"the kernel differs from the sorted path in {wrong} of {a.numel()} values: {units} units, {parameters}, {spread}"
                    )


def timed(calls: dict[str, Callable[[], object]], rounds: int = 30, inner: int = 10) -> dict[str, float]:
    """Milliseconds per call, the median over rounds in which all take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / inner)
    return {name: statistics.median(times) for name, times in found.items()}


def in_turns(
    model: Qwen2ForCausalLM, call: Callable[[], object], rounds: int = 10, inner: int = 10
) -> dict[str, float]:
    """As `timed`, of calls as they come from Python, without ARM, with it and again without."""
    found: dict[str, list[float]] = {"plain": [], "arm": [], "plain again": []}
    for _ in range(rounds):
        for name, times in found.items():
            with arm(model, c=0.13, p1=99.5) if name == "arm" else nullcontext():
                times.append(timed({name: call}, rounds=1, inner=inner)[name])
    return {name: statistics.median(times) for name, times in found.items()}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def model_of(layers: int, device: torch.device) -> Qwen2ForCausalLM:
    config = Qwen2Config(**SHAPES, num_hidden_layers=layers, max_position_embeddings=8192, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2ForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return model


def mlp_rows(model: Qwen2ForCausalLM, device: torch.device) -> list[dict[str, object]]:
    mlp = model.model.layers[0].mlp
    found: list[dict[str, object]] = []
    for name, shape in {"200 tokens": (1, 200), "4,096 tokens": (1, 4096), "128 rows × 1 token": (128, 1)}.items():
        # A normal gate, as a norm before it gives; zeros would be quicker than life.
        x = torch.randn(*shape, SHAPES["hidden_size"], device=device, dtype=torch.bfloat16)
        plain = captured(lambda x=x: mlp(x))
        before = mlp(x)
        with arm(model, c=0.13, p1=99.5):
            with_arm = captured(lambda x=x: mlp(x))
            assert not torch.equal(mlp(x), before)
        assert torch.equal(mlp(x), before)
        times = timed({"plain": plain, "arm": with_arm, "plain again": plain})
        found.append({"what": f"MLP, {name}, captured"} | ratio(times))
        found.append({"what": f"MLP, {name}, eager"} | ratio(in_turns(model, lambda x=x: mlp(x), rounds=30)))
    return found


def ratio(times: dict[str, float]) -> dict[str, float]:
    return {
        "plain_ms": round(times["plain"], 4),
        "arm_ms": round(times["arm"], 4),
        "ratio": round(times["arm"] / times["plain"], 4),
        "noise": round(times["plain again"] / times["plain"], 4),
    }


def decode_rows(model: Qwen2ForCausalLM, device: torch.device) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for rows in (1, 128):
        cache = StaticCache(config=model.config, max_cache_len=512)
        ids = torch.randint(0, SHAPES["vocab_size"], (rows, 200), device=device)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = ids[:, :1].clone()
        position = torch.full((rows, 1), 200, device=device)

        def step(token=token, position=position, cache=cache) -> object:
            return model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits

        def rewound(step=step, cache=cache) -> object:
            for layer in cache.layers:
                if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                    layer.cumulative_length.fill_(200)
            return step()

        call = rewound if any(hasattr(layer, "cumulative_length") for layer in cache.layers) else step
        plain_graph = captured(call)
        with arm(model, c=0.13, p1=99.5):
            arm_graph = captured(call)
        times = timed({"plain": plain_graph, "arm": arm_graph, "plain again": plain_graph}, rounds=20, inner=5)
        found.append({"what": f"decode, {rows} row(s), captured"} | ratio(times))
        found.append({"what": f"decode, {rows} row(s), eager"} | ratio(in_turns(model, call, inner=5)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/arm.py measures the CUDA kernel, and no CUDA device is here")
    device = torch.device("cuda")
    with torch.inference_mode():
        gate(device)
        print("gate: kernel and sorted path agree")
        model = model_of(asked.layers, device)
        rows = [*mlp_rows(model, device), *decode_rows(model, device)]
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "settings": str(arm_settings()),
    }
    lines = [json.dumps(row | about) for row in rows]
    if asked.json:
        asked.json.write_text("\n".join(lines) + "\n")
    for row in rows:
        print(
            f"{row['what']:38} plain {row['plain_ms']:9.4f} ms   arm {row['arm_ms']:9.4f} ms   ×{row['ratio']:.3f}   (plain again ×{row['noise']:.3f})"
        )


if __name__ == "__main__":
    main()
