"""What a whole cause study costs over plain forwards, in one run: its time over (layers × parts × 2 + 2) plain forwards an item.

    python benchmarks/cause.py --shapes qwen2.5-7b --tokenizer FOLDER --data gsm8k.jsonl --limit 24 [--json FILE]    on a GPU
    python benchmarks/cause.py --model smollm2 --data gsm8k --limit 24                                              on a CPU

A plain forward is that of a row of the likelihood readout, the prompt with all texts that are scored after it: the mean of the rows with and
without filler, sorted by length, in the best of several sizes of batches. The study has all layers, three parts and both directions, and the
ladder and the chain beside them, which the limit does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from likelihood import plain_forwards, rows_of
from received import SHAPES

from mless.report import publish
from mless.study import load_study, run_study
from study import Memory, Steps, random_folder, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="gsm8k")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--work", type=Path, help="where folders are made; a temporary one by default")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--batches", type=int, nargs="+", default=None, help="sizes of the plain forwards' batches")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    work = asked.work or Path(tempfile.mkdtemp())
    model = str(random_folder(asked.shapes, asked.tokenizer, work / asked.shapes)) if asked.shapes else asked.model
    chosen = {"model": model, "data": asked.data, "limit": asked.limit}
    own = [one for one in asked.sets if not one.startswith("cause.")]
    two = load_study("likelihood", chosen | {"conditions": ["none", "mless"]}, [*own, "likelihood.again=false"])
    loaded, rows = rows_of(two, work)
    sizes = asked.batches or ([8, 16] if loaded.device.type == "cuda" else [1])
    plain = {size: plain_forwards(loaded.model, rows, size, loaded.device) / len(rows) for size in sizes}
    layers = loaded.layers
    del loaded
    torch.cuda.empty_cache()
    kept = Path(os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    before = _entries(kept)
    spec = load_study("cause", chosen, asked.sets)
    assert spec.cause is not None
    out, steps = work / "out", Steps()
    shutil.rmtree(out, ignore_errors=True)
    with Memory() as memory:
        whole, outcome = timed(lambda: run_study(spec, out, steps))
        drawing, _ = timed(lambda: publish(outcome.folder, fresh=True))
    about, inner = (json.loads((out / where / "study.json").read_text()) for where in (".", "likelihood"))
    items, mapped = len(about["items"]), len(range(0, layers, spec.cause.every))
    forwards = (mapped * len(spec.cause.parts) * 2 + 2) * items
    after = whole - inner["timings"]["load_s"] + drawing
    row = {
        "what": f"cause, {items} items, {mapped} of {layers} layers × {len(spec.cause.parts)} parts × 2",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "model": asked.shapes or Path(model).name,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
        "tokens_a_row": round(sum(map(len, rows)) / len(rows)),
        "conditions": len(inner["conditions"]),
        "patched_runs": inner["proofs"]["patched runs"],
        **{f"plain_{size}_ms": round(1000 * seconds, 2) for size, seconds in plain.items()},
        "forwards": forwards,
        **inner["timings"],
        "after_loading_s": round(after, 2),
        "ratio": round(after / (forwards * min(plain.values())), 2),
        "memory_gb": round(memory.more / 1e9, 2),
        "compiles": _entries(kept) > before,  # a machine's first study does; kernels are kept for later ones
    }
    print(json.dumps(row))
    if asked.json:
        asked.json.write_text(json.dumps(row) + "\n")
    for when, line in steps.lines:
        print(f"{when - steps.began:8.2f} s  {line}", file=sys.stderr)


def _entries(cache: Path) -> int:
    """How many kernels Triton has kept."""
    return sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0


if __name__ == "__main__":
    main()
