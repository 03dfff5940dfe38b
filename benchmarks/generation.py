"""How many tokens a second the row-stable engine makes beside transformers' own `generate`, in one run.

    python benchmarks/generation.py                       on a CUDA device: Qwen2.5-7B shapes, random weights, 200-token prompts
    python benchmarks/generation.py --cpu [--prompts 200] on a CPU: SmolLM2 on MATH-500 prompts (MLESS_DATA names the folder)

Correctness comes first: the engine shows its promise (`self_check`), and its greedy tokens must be the same for a prompt alone and among others.
Generated tokens over total time, prefill included. One JSON line per row with --json FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from mless.engines.base import Decoding, Request
from mless.engines.hf import HfEngine
from mless.models import LoadedModel


class _NoTokenizer:
    """Random weights have nothing to say."""

    eos_token_id = None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def random_model() -> LoadedModel:
    config = Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
        max_position_embeddings=8192, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return LoadedModel(
        name="random", label="Qwen2.5-7B shapes", family="qwen2", model=model, tokenizer=_NoTokenizer(), layers=28, loaded_layers=28, heads=28,
        context=8192, device=torch.device("cuda"), dtype="bfloat16", fingerprint="", tokenizer_fingerprint="", omit_first=True,
    )  # fmt: skip


def random_requests(n: int, tokens: int) -> list[Request]:
    rng = random.Random(1)
    return [Request("none", str(i), 0, i, tuple(rng.randrange(1000, 100000) for _ in range(tokens))) for i in range(n)]


def gate(engine: HfEngine, requests: Sequence[Request]) -> None:
    engine.self_check(requests)
    few = Decoding(max_new_tokens=12)
    together = {reply.item: reply.token_ids for reply in engine.generate(requests, few)}
    for request in requests[:3]:
        alone = next(iter(engine.generate([request], few)))
        if alone.token_ids != together[request.item]:
            sys.exit(f"prompt {request.item} has other tokens alone than among {len(requests)}")


def ours(engine: HfEngine, requests: Sequence[Request], decoding: Decoding) -> tuple[int, float]:
    _wait(engine._model.device)
    begin = time.perf_counter()
    made = sum(reply.n_tokens for reply in engine.generate(requests, decoding))
    _wait(engine._model.device)
    return made, time.perf_counter() - begin


def theirs(model: Any, requests: Sequence[Request], new: int, batch: int, pad: int) -> tuple[int, float]:
    """transformers' generate, greedy, prompts in batches of like length, padded on the left."""
    device = next(model.parameters()).device
    settings = GenerationConfig(
        max_new_tokens=new, do_sample=False, pad_token_id=pad, eos_token_id=model.generation_config.eos_token_id
    )
    order = sorted(requests, key=lambda request: len(request.token_ids), reverse=True)
    _wait(device)
    begin, made = time.perf_counter(), 0
    ends = settings.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    for at in range(0, len(order), batch):
        rows = [request.token_ids for request in order[at : at + batch]]
        longest = max(map(len, rows))
        ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()
        for row in out:
            made += next((n + 1 for n, token in enumerate(row) if token in ends), len(row))
    _wait(device)
    return made, time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def on_gpu(tell: Any, new: int) -> None:
    model = random_model()
    prompts = random_requests(128, 200)
    for rows in (128, 1):
        with HfEngine(model, length=200 + new, slots=rows) as engine:
            gate(engine, prompts[:rows])
            made, took = ours(engine, prompts[:rows], Decoding(new))
            tell("ours, row-stable", rows, made, took)
            sampled = Decoding(new, temperature=1.0, top_p=0.95, top_k=50)
            next(iter(engine.generate(prompts[:1], replace(sampled, max_new_tokens=1))))
            made, took = ours(engine, prompts[:rows], sampled)
            tell("ours, row-stable, sampled (top-k 50, top-p 0.95)", rows, made, took)
    for rows, few in ((128, 64), (1, 64)):
        theirs(model.model, prompts[:rows], 4, rows, 0)
        made, took = theirs(model.model, prompts[:rows], few, rows, 0)
        tell(f"transformers generate ({few} new tokens)", rows, made, took)


def on_cpu(tell: Any, new: int, prompts: int, batches: Sequence[int], dtypes: Sequence[str]) -> None:
    import mless

    folder = os.environ.get("MLESS_DATA")
    if not folder:
        sys.exit("MLESS_DATA must name the folder that holds math500.jsonl")
    lines = (Path(folder) / "math500.jsonl").read_text(encoding="utf-8").splitlines()[:prompts]
    questions = [json.loads(line)["problem"] for line in lines]
    for dtype in dtypes:
        model = mless.load("smollm2", head=True, dtype=dtype, device="cpu")
        requests = []
        for i, question in enumerate(questions):
            ids = model.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            requests.append(Request("none", str(i), 0, i, tuple(ids)))
        longest = max(len(request.token_ids) for request in requests)
        with HfEngine(model, length=longest + new, most=len(requests)) as engine:
            gate(engine, requests[:12])
            made, took = ours(engine, requests, Decoding(new))
            tell(f"ours, row-stable, {dtype}", engine.slots, made, took)
        for batch in batches:
            made, took = theirs(model.model, requests, new, batch, model.tokenizer.pad_token_id or 0)
            tell(f"transformers generate, {dtype}", batch, made, took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batches", default="8,32,64")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not asked.cpu and not torch.cuda.is_available():
        sys.exit("no CUDA device is here; on a CPU: python benchmarks/generation.py --cpu")
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if not asked.cpu else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    told: list[dict[str, Any]] = []

    def tell(what: str, rows: int, made: int, took: float) -> None:
        told.append(
            {
                "what": what,
                "rows": rows,
                "tokens": made,
                "seconds": round(took, 2),
                "tokens_per_s": round(made / took, 1),
            }
            | about
        )
        print(f"{what:48} rows {rows:4}  {made:7} tokens in {took:8.2f} s   {made / took:9.1f} tokens/s", flush=True)
        if asked.json:
            asked.json.write_text("".join(json.dumps(row) + "\n" for row in told))

    if asked.cpu:
        on_cpu(
            tell,
            asked.new_tokens or 128,
            asked.prompts,
            [int(n) for n in asked.batches.split(",")],
            asked.dtypes.split(","),
        )
    else:
        on_gpu(tell, asked.new_tokens or 512)


if __name__ == "__main__":
    main()
