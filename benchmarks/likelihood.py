"""What a whole likelihood study costs over the plain forwards of the same rows, in one run.

    python benchmarks/likelihood.py --shapes qwen2.5-7b --tokenizer FOLDER --data math500.jsonl [--json FILE]    on a GPU
    python benchmarks/likelihood.py --model smollm2 --data gsm8k --limit 100                                     on a CPU

A row is a prompt with all texts that are scored after it, and the plain forwards are those of just these tokens, sorted by length, in the best
of several sizes of batches, after the four longest batches to warm up. They are timed twice: the model as it is called, which gives logits (`ratio`), and
its decoder alone, without the head (`ratio_decoder`). No forward can do without the head where log-probabilities are wanted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from received import SHAPES

import mless
from mless.report import publish
from mless.study import load_study, run_study
from mless.study.bench import Job
from mless.study.kinds import measurement_of
from mless.study.measuring import opened
from mless.study.rendering import write_prompts
from study import Memory, Steps, random_folder, timed


def rows_of(spec: mless.study.spec.StudySpec, work: Path) -> tuple[mless.LoadedModel, list[list[int]]]:  # pyright: ignore[reportAttributeAccessIssue]
    """The model, and the tokens of all rows of the study."""
    from mless.capture.branching import branches

    job, measurement = Job(spec, work / "none"), measurement_of(spec)
    bench, _ = opened(measurement, job)
    assert bench.subject is not None
    # Not `measurement.load`, which would have kernels compiled before the study's clock begins.
    bench.subject.load(job.progress, head=True)
    bench.prompts = write_prompts(measurement, bench, bench.subject).prompts
    measurement.prepare(bench)
    texts = measurement._texts  # pyright: ignore[reportAttributeAccessIssue]
    rows = [
        branches(unit.prompt, texts[unit.number].ids()).ids.tolist()
        for unit in bench.units()
        if unit.prompt is not None
    ]
    return bench.model, rows


def plain_forwards(
    called: Callable[..., object], rows: Sequence[Sequence[int]], at_once: int, device: torch.device
) -> float:
    ordered = sorted(rows, key=len)

    def forwards(longest: int = 0) -> None:
        with torch.inference_mode():
            for at in range(0, len(ordered), at_once)[-longest:]:
                batch = ordered[at : at + at_once]
                ids = torch.zeros(len(batch), len(batch[-1]), dtype=torch.long)
                real = torch.zeros_like(ids)
                for row, tokens in enumerate(batch):
                    ids[row, : len(tokens)] = torch.tensor(tokens)
                    real[row, : len(tokens)] = 1
                mask = None if bool(real.all()) else real.to(device)
                called(input_ids=ids.to(device), attention_mask=mask, use_cache=False)

    timed(lambda: forwards(4))  # the longest: memory that grows while it is timed takes seconds
    return timed(forwards)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="gsm8k")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--work", type=Path, help="where folders are made; a temporary one by default")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--batches", type=int, nargs="+", default=None, help="sizes of the plain forwards' batches")
    parser.add_argument("--whole-model-only", action="store_true", help="do not time the decoder alone")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    work = asked.work or Path(tempfile.mkdtemp())
    model = str(random_folder(asked.shapes, asked.tokenizer, work / asked.shapes)) if asked.shapes else asked.model
    spec = load_study("likelihood", {"model": model, "data": asked.data, "limit": asked.limit}, asked.sets)
    loaded, rows = rows_of(spec, work)
    sizes = asked.batches or ([8, 16] if loaded.device.type == "cuda" else [1])
    decoder = loaded.model.get_decoder()
    alone: dict[int, float] = {}
    if not asked.whole_model_only:
        alone = {size: plain_forwards(decoder, rows, size, loaded.device) for size in sizes}
    whole_model = {size: plain_forwards(loaded.model, rows, size, loaded.device) for size in sizes}
    del loaded, decoder
    torch.cuda.empty_cache()
    out, steps = work / "out", Steps()
    shutil.rmtree(out, ignore_errors=True)
    with Memory() as memory:
        whole, outcome = timed(lambda: run_study(spec, out, steps))
        drawing, _ = timed(lambda: publish(outcome.folder, fresh=True))
    about = json.loads((out / "study.json").read_text())
    after = whole - about["timings"]["load_s"] + drawing
    row = {
        "what": f"{spec.name}, {len(rows)} rows",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "model": asked.shapes or Path(model).name,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
        "items": len(about["items"]),
        "conditions": len(about["conditions"]),
        "tokens": sum(map(len, rows)),
        **{f"decoder_{size}_s": round(seconds, 2) for size, seconds in alone.items()},
        **{f"plain_{size}_s": round(seconds, 2) for size, seconds in whole_model.items()},
        **about["timings"],
        "drawing_s": round(drawing, 2),
        "after_loading_s": round(after, 2),
        "ratio": round(after / min(whole_model.values()), 2),
        **({"ratio_decoder": round(after / min(alone.values()), 2)} if alone else {}),
        "memory_gb": round(memory.more / 1e9, 2),
    }
    print(json.dumps(row))
    if asked.json:
        asked.json.write_text(json.dumps(row) + "\n")
    for when, line in steps.lines:
        print(f"{when - steps.began:8.2f} s  {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
