"""Whether a study's numbers depend on the groups in which its prompts run, and on the version of mless that ran them.

    python benchmarks/groups.py --model FOLDER --data math500.jsonl --limit 32 [--before SRC] [--json FILE]

In each dtype the study `quick` runs three times: in groups, prompt by prompt, and by the mless in `--before` (a `src` folder of another
version). The largest and the root mean square difference of all received attention is printed, beside that which eager attention itself
shows between batches of 1 and of 16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

import mless
from mless.models.locating import locate
from mless.study import load_study

RUN = """
import json, sys
from pathlib import Path
from mless.study import load_study, run_study
chosen, sets, out = json.loads(sys.argv[1])
run_study(load_study("quick", chosen, sets), Path(out))
"""


def received(folder: Path) -> dict[tuple[str, str, int, int, str], np.ndarray]:
    """What each token received, by condition, item, layer, head and set of queries."""
    found = {}
    keys = ["condition", "item", "layer", "head", "queries"]
    for batch in pq.ParquetFile(folder / "attention.parquet").iter_batches(columns=[*keys, "received"]):
        named = zip(*(batch.column(key).to_pylist() for key in keys), strict=True)
        rows = batch.column("received")
        for number, name in enumerate(named):
            found[name] = np.asarray(rows[number].values)
    return found


def difference(pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    most, squares, count = 0.0, 0.0, 0
    for one, other in pairs:
        apart = np.abs(one.astype(np.float64) - other)
        apart = apart[np.isfinite(one) & np.isfinite(other)]
        most = max(most, float(apart.max(initial=0)))
        squares += float((apart**2).sum())
        count += apart.size
    return {"most": most, "rms": (squares / max(1, count)) ** 0.5}


def eager(model: str, dtype: str, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """What eager attention differs by between batches of 1 and of 16 rows."""
    from transformers import AutoModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="eager").to(device)

    def sums(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        longest = max(map(len, rows))
        ids, real = torch.zeros(2, len(rows), longest, dtype=torch.long, device=device)
        for row, one in enumerate(rows):
            ids[row, : len(one)] = torch.tensor(one)
            real[row, : len(one)] = 1
        with torch.inference_mode():
            out = loaded(input_ids=ids, attention_mask=real, use_cache=False, output_attentions=True)
        found = []
        for row, one in enumerate(rows):
            size = len(one)
            seen = torch.arange(size, 0, -1, device=device)
            of_layers = [weights[row, :, :size, :size].double().sum(1) / seen for weights in out.attentions]
            found.append(torch.stack(of_layers).cpu().numpy())
        return found

    ordered = sorted(prompts, key=len)
    together = [one for at in range(0, len(ordered), 16) for one in sums(ordered[at : at + 16])]
    return difference((sums([one])[0], both) for one, both in zip(ordered, together, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []

    def add(dtype: str, against: str, apart: dict[str, float]) -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "device": device}
        rows.append({"what": f"{dtype}, {against}", "model": Path(asked.model).name, **about, **apart})
        print(json.dumps(rows[-1]), flush=True)

    chosen = {"model": asked.model, "data": asked.data, "limit": asked.limit}
    spec = load_study("quick", chosen, [])
    loaded = mless.load(asked.model, layers=1)
    _, items = spec.load_items()
    prompts = [one.token_ids for name in spec.conditions for one in mless.prompts(loaded, items, name)]
    folder = str(locate(asked.model).folder)
    del loaded
    for dtype in asked.dtypes:
        with tempfile.TemporaryDirectory() as work:

            def run(name: str, sets: list[str], src: Path | None = None, work: str = work, dtype: str = dtype) -> Path:
                out = Path(work) / name
                environment = {**os.environ, "PYTHONPATH": f"{src}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
                given = json.dumps([{**chosen, "dtype": dtype}, sets, str(out)])
                subprocess.run([sys.executable, "-c", RUN, given], check=True, env=environment if src else None)
                return out

            grouped = received(run("groups", []))
            others = {"prompt by prompt": run("alone", ["batch_size=1"])}
            if asked.before:
                others["the other mless"] = run("before", [], asked.before.resolve())
            for name, other in others.items():
                there = received(other)
                assert there.keys() == grouped.keys(), "other rows"
                apart = difference((grouped[key], there[key]) for key in grouped)
                add(dtype, name, apart)
        add(dtype, "eager attention, 1 row and 16", eager(folder, dtype, prompts))
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
