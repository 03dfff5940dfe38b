"""What a whole study costs over the plain forwards of its prompts, in one run: loading, measuring, finishing, drawing; then reading.

    python benchmarks/study.py --shapes qwen2.5-7b --tokenizer FOLDER --data math500.jsonl [--json FILE]    on a GPU
    python benchmarks/study.py --model smollm2                                                              on a CPU

The plain forwards are those of the same prompts by transformers' own model, sorted by length, 16 in a batch. Weights of `--shapes` are random
and are written to a folder first, so that the study loads them as it would any other. The first of its times is of the second of two passes,
so that neither pays for what a process does only once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from received import SHAPES

import mless
from mless.report import publish
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study
from mless.study.bench import Silent
from mless.values import Prompt


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def random_folder(shapes: str, tokenizer: Path, where: Path) -> Path:
    """A model with these shapes, random weights in bf16, and another model's tokenizer."""
    from transformers import AutoModelForCausalLM

    where = where.with_name(f"{where.name}-{tokenizer.name}")
    if where.exists():
        return where
    made = where.with_name(f"{where.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shapes], dtype=torch.bfloat16)
    model.save_pretrained(made)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "vocab", "merges", "special", "chat_template", "added")):
            shutil.copy(file, made)
    made.rename(where)  # whole, or not at all
    # A study waits until its files are on the disk, and they would wait for the model's bytes.
    os.sync()
    del model
    torch.cuda.empty_cache()
    return where


def plain_forwards(model: mless.LoadedModel, prompts: Sequence[Prompt], at_once: int) -> float:
    """Seconds that the model alone takes for these prompts."""
    ordered = sorted(prompts, key=len)
    batches = [ordered[at : at + at_once] for at in range(0, len(ordered), at_once)]

    def forwards() -> None:
        with torch.inference_mode():
            for batch in batches:
                longest = max(map(len, batch))
                ids = torch.zeros(len(batch), longest, dtype=torch.long)
                real = torch.zeros(len(batch), longest, dtype=torch.long)
                for row, prompt in enumerate(batch):
                    ids[row, : len(prompt)] = torch.tensor(prompt.token_ids)
                    real[row, : len(prompt)] = 1
                model.model(input_ids=ids.to(model.device), attention_mask=real.to(model.device), use_cache=False)

    timed(forwards)
    return timed(forwards)[0]


class Memory:
    """The most memory that this process had while the block ran, in bytes above what it had at its begin."""

    def __enter__(self) -> Memory:
        self.began = self.most = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        """Without pages of files, which the system may take back."""
        words = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(words.get("RssAnon", words["VmRSS"]).split()[0])

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def more(self) -> int:
        return self.most - self.began


class Steps(Silent):
    """When the model was loaded."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.lines: list[tuple[float, str]] = []

    def say(self, line: str) -> None:
        self.lines.append((time.perf_counter(), line))


def reading(folder: Path, units: list[str]) -> dict[str, float]:
    """Milliseconds for one item with all heads, and for one head of all items of a condition, each from a folder that was just opened."""
    about = ResultFolder(folder).manifest() or {}
    layer, head = about["layers"][len(about["layers"]) // 2], about["heads"][0]
    of_condition = set(units[: len(about["items"])])

    def one_item() -> int:
        return len(ResultFolder(folder).grown("attention", units).unit(units[len(units) // 2]))

    def one_head() -> int:
        from mless.results.tables import pc

        grown = ResultFolder(folder).grown("attention", units)
        found = 0
        for piece in grown.pieces(["layer", "head", "queries", "received"], layer=layer, units=of_condition):
            where = pc.and_(pc.equal(piece.table["layer"], layer), pc.equal(piece.table["head"], head))
            found += len(piece.table.filter(where))
        return found

    def best(work: Callable[[], int]) -> float:
        return round(1000 * min(timed(work)[0] for _ in range(5)), 1)

    return {"one_item_ms": best(one_item), "one_head_ms": best(one_head)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--work", type=Path, help="where folders are made; a temporary one by default")
    parser.add_argument("--keep", action="store_true", help="keep the result folder")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[16, 1],
        help="sizes of the plain forwards' batches; the first is compared",
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    work = asked.work or Path(tempfile.mkdtemp())
    model = asked.model
    if asked.shapes:
        model = str(random_folder(asked.shapes, asked.tokenizer, work / asked.shapes))
    spec = load_study("quick", {"model": model, "data": asked.data, "limit": asked.limit}, asked.sets)
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)

    loaded = mless.load(model)
    _, items = spec.load_items()
    prompts = [one for name in spec.conditions for one in mless.prompts(loaded, items, name, prompt=spec.prompt)]
    plain = {f"plain_{at_once}_s": round(plain_forwards(loaded, prompts, at_once), 2) for at_once in asked.batches}
    del loaded
    torch.cuda.empty_cache()

    steps = Steps()
    with Memory() as memory:
        whole, outcome = timed(lambda: run_study(spec, out, steps))
        drawing, _ = timed(lambda: publish(outcome.folder, fresh=True))
    ran = pq.read_table(out / "prompts.parquet", columns=["token_ids"])["token_ids"].to_pylist()
    assert sorted(ran) == sorted(list(one.token_ids) for one in prompts), (
        "the plain forwards were not of the study's prompts"
    )
    about = json.loads((out / "study.json").read_text())
    table = out / "attention.parquet"
    units = [f"{name}-{number + 1:05d}" for name in about["conditions"] for number in range(len(about["items"]))]
    floats = 4 * sum(len(one) for one in prompts) * len(about["layers"]) * len(about["heads"]) * 2
    after = whole - about["timings"]["load_s"] + drawing
    row = {
        "what": f"{spec.name}, {len(prompts)} prompts",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "model": asked.shapes or Path(model).name,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
        "tokens": sum(map(len, prompts)),
        "units": len(prompts),
        "group_tokens": about["group_tokens"],
        **plain,
        **about["timings"],
        "whole_s": round(whole, 2),
        "drawing_s": round(drawing, 2),
        "after_loading_s": round(after, 2),
        "ratio": round(after / next(iter(plain.values())), 2),
        "folder_over_floats": round(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / floats, 3),
        "table_gb": round(table.stat().st_size / 1e9, 3),
        "memory_gb": round(memory.more / 1e9, 2),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        **reading(out, units),
    }
    print(json.dumps(row))
    if asked.json:
        asked.json.write_text(json.dumps(row) + "\n")
    width = max(map(len, row))
    for name, value in row.items():
        print(f"{name:<{width}}  {value}", file=sys.stderr)
    for when, line in steps.lines:
        print(f"{when - steps.began:8.2f} s  {line}", file=sys.stderr)
    if not asked.keep:
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
