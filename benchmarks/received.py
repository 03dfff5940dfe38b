"""What capturing received attention costs on a CUDA device: a whole forward with it over the same forward without, and the kernel alone.

    python benchmarks/received.py [--shapes qwen2.5-7b] [--tokens 512x8,8192,32768,131072] [--json FILE]
    python benchmarks/received.py --scaling [--json FILE]      cost against tokens, heads, batch and layers instead

Correctness comes first: against fp64 given the same 16-bit queries and keys, by the kernel alone and inside a captured model; the same
bits over ten runs and for a row alone or in a batch of 16. Then one JSON line per row, and a table. Every head of every layer is captured;
weights are random, shapes are the models'. Plain, ours and plain again take turns, so that a ratio is of one moment. Ours is what a study
runs, which ends with the last layer's attention; `whole_ratio` is of a forward that is captured and goes on to its end.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModel, Gemma3TextConfig, LlamaConfig, Qwen2Config

from mless import kernels
from mless.capture import capturing

SHAPES: dict[str, Any] = {
    "qwen2.5-7b": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
        max_position_embeddings=131072,
    ),
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "gemma3-4b": Gemma3TextConfig(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        vocab_size=262208, sliding_window=1024, max_position_embeddings=131072,
    ),
}  # fmt: skip


def model_of(name: str, attention: str = "sdpa", layers: int | None = None) -> nn.Module:
    config = SHAPES[name]
    config = type(config)(
        **{**config.to_dict(), **({"num_hidden_layers": layers, "layer_types": None} if layers else {})}
    )
    return built(config, attention)


def built(config: Any, attention: str) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return AutoModel.from_config(config, attn_implementation=attention).eval()
    finally:
        torch.set_default_dtype(torch.float32)


# ---- the gate --------------------------------------------------------------------------------------------------------


def heads(rows: int, tokens: int, n: int = 28, kv: int = 4, dim: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a model leaves them, with scores as large as trained heads have."""
    made = [torch.randn(rows, tokens, h, dim, device="cuda", dtype=torch.bfloat16) for h in (n, kv, kv)]
    return (made[0] * 2).transpose(1, 2), made[1].transpose(1, 2), made[2].transpose(1, 2)


def asked_of(real: Tensor, two: bool = False) -> dict[str, Any]:
    """The mask, the sets and the spans, which all layers of a forward have in common."""
    starts = torch.zeros(real.shape, dtype=torch.int32, device=real.device)
    second = real & (torch.arange(real.shape[1], device=real.device) % 3 != 0)
    sets = torch.stack([real, second], 1) if two else real[:, None].expand(-1, 2, -1)
    visible = kernels.Intervals(starts, real.shape[1], whole=True)
    return {"visible": visible, "sets": sets, "spans": torch.zeros_like(real, dtype=torch.long), "n_spans": 1}


def summed(q: Tensor, k: Tensor, real: Tensor, lse: Tensor | None = None, two: bool = False) -> kernels.Sums:
    return kernels.received(q, k, scale=q.shape[-1] ** -0.5, lse=lse, **asked_of(real, two))


def truth(q: Tensor, k: Tensor) -> Tensor:
    """Received attention of one row in fp64, by blocks of queries."""
    _, n, tokens, dim = q.shape
    out = torch.zeros(n, tokens, dtype=torch.float64, device=q.device)
    for h in range(n):
        key = k[0, h * k.shape[1] // n].double()
        for first in range(0, tokens, 2048):
            at = torch.arange(first, min(first + 2048, tokens), device=q.device)
            s = q[0, h, at].double() @ key[: at[-1] + 1].T * dim**-0.5
            j = torch.arange(s.shape[1], device=q.device)
            p = torch.softmax(s.masked_fill(j > at[:, None], -torch.inf), -1).masked_fill_(j >= at[:, None], 0)
            out[h, : s.shape[1]] += p.sum(0)
    return out


def gate() -> dict[str, float]:
    """No speed on a wrong kernel."""
    torch.manual_seed(1)
    errors: dict[str, float] = {}
    for tokens, n, kv, dim in (
        (1000, 28, 4, 128),
        (8192, 4, 2, 128),
        (20000, 2, 1, 128),
        (4096, 4, 2, 64),
        (4096, 2, 2, 256),
    ):
        q, k, v = heads(1, tokens, n, kv, dim)
        real = torch.ones(1, tokens, dtype=torch.bool, device="cuda")
        expected = truth(q, k)
        lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=dim**-0.5)[1]
        for name, given in {"own lse": None, "flash's lse": lse}.items():
            got = summed(q, k, real, given).received[0, 0].double()
            errors[f"{tokens}, head size {dim}, {name}"] = float((got - expected).norm() / expected.norm())
    if not max(errors.values()) <= 1e-6:
        sys.exit(f"the kernel is not within 1e-6 of fp64: {errors}")
    errors["a captured model"] = captured_error()
    if not errors["a captured model"] <= 1e-6:
        sys.exit(f"what a captured model gives is not within 1e-6 of fp64: {errors}")
    lengths = torch.tensor([1, 63, 64, 65, 127, 200, 333, 512, 700, 900, 1000, 1023, 1024, 40, 800, 960], device="cuda")
    q, k, _ = heads(16, 1024)
    real = torch.arange(1024, device="cuda") < lengths[:, None]
    together = summed(q, k, real, two=True)
    for _ in range(9):
        again = summed(q, k, real, two=True)
        if not (torch.equal(again.received, together.received) and torch.equal(again.mass, together.mass)):
            sys.exit("the same call gave other bits")
    for row, size in enumerate(lengths.tolist()):
        alone = summed(q[row : row + 1, :, :size], k[row : row + 1, :, :size], real[row : row + 1, :size], two=True)
        if not torch.equal(alone.received[0], together.received[row, :, :, :size]):
            sys.exit(f"row {row} has other bits alone than among 16")
        if not torch.equal(alone.mass[0], together.mass[row]):
            sys.exit(f"row {row} has another mass alone than among 16")
    return errors


def captured_error() -> float:
    """The worst layer of a small model at head size 128, whose forward hands out its own log-sum-exp, against fp64 from its own queries and keys."""
    config = Qwen2Config(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000
    )  # fmt: skip
    model = built(config, "sdpa")
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(call: Any, out: Tensor) -> None:
        seen[call.layer] = call.query, call.key

    with capturing(model, layers=range(1, 4)) as recorder:
        recorder.on_call = watch
        model(input_ids=torch.randint(0, 1000, (1, 3000), device="cuda"), use_cache=False)
        found = dict(recorder.sums)
    errors: list[float] = []
    for layer, (q, k) in seen.items():
        expected = truth(q, k)
        got = found[layer].received[0, 0].to("cuda").double()
        errors.append(float((got - expected).norm() / expected.norm()))
    return max(errors)


# ---- times -----------------------------------------------------------------------------------------------------------


def clocked(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def on_device(call: Callable[[], object], calls: int = 12) -> float:
    """Milliseconds per call of many in a row, so that launching is hidden behind computing."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def peak(call: Callable[[], object]) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clocked(call))
    return {name: statistics.median(found) for name, found in times.items()}


def forward_row(model: nn.Module, ids: Tensor, rounds: int, layers: int) -> dict[str, Any]:
    def plain() -> None:
        model(input_ids=ids, use_cache=False)

    def ours() -> None:
        with capturing(model, layers=range(1, layers + 1)) as recorder:
            recorder.run(input_ids=ids, use_cache=False)

    memory = {"plain": peak(plain), "ours": peak(ours)}
    times: dict[str, list[float]] = {"plain": [], "ours": [], "whole": []}
    times |= {"one": [], "again": []} if rounds > 1 else {}
    every = range(1, layers + 1)
    captured = {"plain": None, "ours": every, "whole": every, "one": range(2, 3), "again": None}
    # One round more to warm up, but where a round takes half a minute: there the peaks have done that.
    for at in range(rounds + 1 if rounds > 1 else 1):
        for name, found in times.items():
            # A study enters the block once for all of its prompts.
            with capturing(model, layers=captured[name]) if captured[name] else nullcontext() as recorder:
                # Ours is what a study does: nothing after the last layer's attention. The others end as the model ends.
                run = recorder.run if name == "ours" else model
                took = clocked(partial(run, input_ids=ids, use_cache=False))
            if at or rounds == 1:
                found.append(took)
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {
        "plain_ms": round(middle["plain"], 2),
        "ours_ms": round(middle["ours"], 2),
        "ratio": round(middle["ours"] / middle["plain"], 4),
        **{
            name: round(middle[which] / middle["plain"], 4)
            for name, which in {"whole_ratio": "whole", "one_layer_ratio": "one", "noise": "again"}.items()
            if which in middle
        },
        "plain_gib": round(memory["plain"], 3),
        "ours_gib": round(memory["ours"], 3),
        "memory_ratio": round(memory["ours"] / memory["plain"], 4),
    }


def first_layer_row(shape: str, tokens: int, plain_ms: float) -> dict[str, Any]:
    """What `--layers 1` runs: a model of which the first layer alone was loaded, captured, over the whole plain forward."""
    model = model_of(shape, layers=1)
    ids = torch.randint(0, 1000, (1, tokens), device="cuda")
    with capturing(model, layers=[1]) as recorder:
        took = [clocked(lambda: recorder.run(input_ids=ids, use_cache=False)) for _ in range(6)]
    ms = statistics.median(took[1:])
    return {"ms": round(ms, 2), "of_a_whole_forward": round(ms / plain_ms, 4)}


def scaling_rows() -> Iterator[dict[str, Any]]:
    """One thing grows at a time. `per_unit`: time over what the mathematics says (tokens², heads, rows, layers), the largest of a group being 1.

    Where little is computed, starting it takes longer: the smallest sizes show that.
    """

    def group(
        name: str, sizes: Sequence[int], unit: Callable[[int], float], ms: Callable[[int], float]
    ) -> Iterator[dict[str, Any]]:
        took = {size: ms(size) for size in sizes}
        last = took[sizes[-1]] / unit(sizes[-1])
        for size in sizes:
            row = {"what": "scaling", "in": name, "size": size, "ms": round(took[size], 3)}
            yield row | {"per_unit": round(took[size] / unit(size) / last, 3)}

    def kernel(tokens: int = 16384, n: int = 28, rows: int = 1) -> float:
        q, k, v = heads(rows, tokens, n, max(1, n // 7), 128)
        real = torch.ones(rows, tokens, dtype=torch.bool, device="cuda")
        lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=128**-0.5)[1]
        one = asked_of(real)
        kernels.received(q, k, scale=128**-0.5, lse=lse, **one)
        return on_device(lambda: kernels.received(q, k, scale=128**-0.5, lse=lse, **one), 6)

    yield from group("tokens", (4096, 8192, 16384, 32768, 65536), lambda size: size**2, lambda size: kernel(size))
    yield from group("heads", (7, 14, 28, 56), lambda size: size, lambda size: kernel(n=size))
    yield from group("rows", (1, 2, 4, 8), lambda size: size, lambda size: kernel(tokens=8192, rows=size))
    model, ids = model_of("qwen2.5-7b"), torch.randint(0, 1000, (1, 16384), device="cuda")

    def forward(layers: int) -> float:
        with capturing(model, layers=range(1, layers + 1)) if layers else nullcontext():
            return statistics.median(clocked(lambda: model(input_ids=ids, use_cache=False)) for _ in range(5))

    forward(28)
    plain = forward(0)
    yield {"what": "scaling", "in": "captured layers", "size": 0, "ms": round(plain, 3), "per_unit": None}
    yield from group("captured layers", (7, 14, 28), lambda size: size, lambda size: forward(size) - plain)


def kernel_row(tokens: int, n: int, kv: int, dim: int) -> dict[str, Any]:
    q, k, v = heads(1, tokens, n, kv, dim)
    real = torch.ones(1, tokens, dtype=torch.bool, device="cuda")
    scale = dim**-0.5
    lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[1]

    one, both = asked_of(real), asked_of(real, two=True)

    def sdpa(backend: SDPBackend) -> Callable[[], object]:
        def call() -> None:
            with sdpa_kernel(backend):
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

        return call

    calls = {
        "flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "one set": lambda: kernels.received(q, k, scale=scale, lse=lse, **one),
        "two sets": lambda: kernels.received(q, k, scale=scale, lse=lse, **both),
    }
    for call in calls.values():
        call()
    times = {name: on_device(call) for name, call in calls.items()}
    rate = n * tokens * tokens * dim / 1e9  # half of the square, two operations for each product
    return {
        "flash_ms": round(times["flash"], 3),
        "cudnn_ms": round(times["cudnn"], 3),
        "one_set_ms": round(times["one set"], 3),
        "two_sets_ms": round(times["two sets"], 3),
        "one_over_flash": round(times["one set"] / times["flash"], 3),
        "two_over_flash": round(times["two sets"] / times["flash"], 3),
        "one_over_cudnn": round(times["one set"] / times["cudnn"], 3),
        "tflops": round(rate / times["one set"]),
    }


def sustained_rows(seconds: float = 1.0) -> Iterator[dict[str, Any]]:
    """What the chip keeps up: at its power limit the clock falls. On zeros it is not at that limit, and a plain product takes no exponential."""
    tokens, n = 32768, 28
    q, k, v = heads(1, tokens, n)
    real = torch.ones(1, tokens, dtype=torch.bool, device="cuda")
    lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=128**-0.5)[1]
    one = asked_of(real)
    zeros = torch.zeros_like(q), torch.zeros_like(k)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    share = n * tokens * tokens * 128 / (2 * 8192**3)  # of one product of these: as many operations as the kernel's
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "the kernel": (lambda: kernels.received(q, k, scale=128**-0.5, lse=lse, **one), 1.0),
        "the kernel on zeros": (lambda: kernels.received(*zeros, scale=128**-0.5, lse=lse, **one), 1.0),
        "a bf16 product of as many operations": (lambda: a @ b, share),
    }
    for name, (call, factor) in calls.items():
        call()
        burst = on_device(call, 4)
        ms = on_device(call, max(4, int(1e3 * seconds / burst)))
        yield {"what": "sustained", "of": name, "tokens": tokens, "ms": round(ms * factor, 3)}


def ceilings() -> dict[str, Any]:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(1 << 31, device="cuda", dtype=torch.int8)
    into = torch.empty_like(big)
    times = in_turns({"matmul": lambda: a @ b, "copy": lambda: into.copy_(big)}, 12)
    return {
        "matmul_tflops": round(2 * 8192**3 / times["matmul"] / 1e9),
        "copy_tb_s": round(2 * big.numel() / times["copy"] / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen2.5-7b")
    parser.add_argument("--tokens", default="512x8,8192,32768,131072")
    parser.add_argument("--kernel-tokens", default="8192,32768,131072")
    parser.add_argument("--eager", default="512x8,2048,8192", help="where HF eager is tried too")
    parser.add_argument(
        "--scaling", action="store_true", help="cost against tokens, heads, batch and layers, and nothing else"
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks/received.py measures the CUDA kernels, and no CUDA device is here; on a CPU: python benchmarks/received_cpu.py"
        )
    import triton  # what has no CUDA device has no Triton either

    about = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row | about)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if asked.json:
            asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))

    with torch.inference_mode():
        errors = gate()
        tell({"what": "gate", "worst_relative_error": max(errors.values())})
        tell({"what": "ceilings"} | ceilings())
        if asked.scaling:
            for row in scaling_rows():
                tell(row)
            return
        if asked.kernel_tokens:
            for row in sustained_rows():
                tell(row)
        for shape in asked.shapes.split(","):
            config = SHAPES[shape]
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            for tokens in map(int, filter(None, asked.kernel_tokens.split(","))):
                sizes = (tokens, config.num_attention_heads, config.num_key_value_heads, dim)
                tell({"what": "kernel", "shapes": shape, "tokens": tokens} | kernel_row(*sizes))
            model = model_of(shape)
            for size in filter(None, asked.tokens.split(",")):
                tokens, batch = (int(part) for part in (f"{size}x1").split("x")[:2])
                ids = torch.randint(0, 1000, (batch, tokens), device="cuda")
                rounds = max(1, min(9, 130_000 // (batch * tokens)))
                row = forward_row(model, ids, rounds, config.num_hidden_layers)
                tell({"what": "forward", "shapes": shape, "tokens": tokens, "batch": batch} | row)
                if size == "8192":
                    first = first_layer_row(shape, tokens, row["plain_ms"])
                    tell({"what": "the first layer alone, captured", "shapes": shape, "tokens": tokens} | first)
            del model
            model = model_of(shape, "eager") if asked.eager else None
            for size in filter(None, asked.eager.split(",")):
                tokens, batch = (int(part) for part in (f"{size}x1").split("x")[:2])
                ids = torch.randint(0, 1000, (batch, tokens), device="cuda")

                def eager(model=model, ids=ids) -> list[Tensor]:
                    found = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
                    return [torch.tril(p, -1).float().sum(-2) for p in found]

                try:
                    used = peak(eager)
                    tell(
                        {
                            "what": "eager",
                            "shapes": shape,
                            "tokens": tokens,
                            "batch": batch,
                            "ms": round(clocked(eager), 1),
                            "gib": round(used, 1),
                        }
                    )
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    tell(
                        {
                            "what": "eager",
                            "shapes": shape,
                            "tokens": tokens,
                            "batch": batch,
                            "ms": None,
                            "gib": "out of memory",
                        }
                    )
                    break
            del model


if __name__ == "__main__":
    main()
