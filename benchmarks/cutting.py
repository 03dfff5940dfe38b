"""What cuts cost: a forward with edges of attention cut over the same forward without, in one run.

    python benchmarks/cutting.py [--shapes qwen2.5-7b] [--tokens 512x8,8192] [--json FILE]    on a GPU
    python benchmarks/cutting.py --model smollm2 --tokens 2048                                on a CPU

Each row is a prompt with a filler of 55 tokens before the question, and an answer of a quarter of the row. Plain, cut and plain again take
turns, so that a ratio is of one moment; the median of the turns is told. Three cuts: the filler seen by nobody, the answer cut from the filler in all
layers, and the same in the second half of the layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from received import SHAPES, model_of

import mless
from mless.capture.cutting import cut_attached
from mless.values import Prompt, Span

CUTS: dict[str, Callable[[int], mless.Cut]] = {
    "seen by nobody": lambda layers: mless.Cut("original,answer", "filler"),
    "not by the answer": lambda layers: mless.Cut("answer", "filler"),
    "not by the answer, later half": lambda layers: mless.Cut("answer", "filler", layers=f"{layers // 2 + 1}-"),
}


def prompt_of(tokens: int, vocabulary: int) -> tuple[Prompt, list[int]]:
    """A prompt of three quarters of the row, and the row's tokens."""
    made = [(7 * at + 11) % min(vocabulary, 5000) for at in range(tokens)]
    known, system, filler = tokens * 3 // 4, tokens // 8, 55
    ends = [("system", system), ("filler", system + filler), ("question", known - 4), ("end", known)]
    spans, start = list[Span](), 0
    for name, stop in ends:
        spans.append(Span(name, start, stop))  # pyright: ignore[reportArgumentType]
        start = stop
    return Prompt("1", "mless", tuple(made[:known]), tuple(spans), ""), made


def seconds(run: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measured(model: Any, layers: int, rows: int, tokens: int, turns: int, device: torch.device) -> list[dict[str, Any]]:
    prompt, made = prompt_of(tokens, model.config.vocab_size)
    ids = torch.tensor([made] * rows, device=device)

    def forward() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)

    found: list[dict[str, Any]] = []
    for name, cut in CUTS.items():
        ratios: list[float] = []
        plain = 0.0
        for turn in range(turns + 2):
            before = seconds(forward)
            with cut_attached(model, [cut(layers)], [prompt] * rows) as handle:
                handle.rows([prompt] * rows, [tokens] * rows)
                with_cut = seconds(forward)
            plain = (before + seconds(forward)) / 2
            if turn > 1:
                ratios.append(with_cut / plain)
        found.append(
            {"cut": name, "rows": rows, "tokens": tokens, "plain_ms": round(1000 * plain, 2)}
            | {"ratio": round(statistics.median(ratios), 3), "worst": round(max(ratios), 3)}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=sorted(SHAPES))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", default=None)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.shapes:
        model, device = model_of(asked.shapes), torch.device("cuda")
        layers = SHAPES[asked.shapes].num_hidden_layers
    else:
        loaded = mless.load(asked.model)
        model, device, layers = loaded.model, loaded.device, loaded.layers
    lines: list[str] = []
    for text in (asked.tokens or ("512x8,8192" if device.type == "cuda" else "2048")).split(","):
        tokens, _, rows = text.partition("x")
        for row in measured(model, layers, int(rows or 1), int(tokens), asked.turns, device):
            own = {"what": "cuts", "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
            own["model"] = asked.shapes or asked.model
            own["device"] = (
                torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
            )
            lines.append(json.dumps(own | row))
            print(lines[-1], flush=True)
    if asked.json:
        asked.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
