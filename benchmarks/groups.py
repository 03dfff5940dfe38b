"""Whether a study's numbers depend on the groups in which its prompts run, and on the version of mless that ran them.

    python benchmarks/groups.py --model FOLDER --data math500.jsonl --limit 32 [--before SRC] [--json FILE]

In each dtype the study `quick` runs three times: in groups, prompt by prompt, and by the mless in `--before` (a `src` folder of another
version). The largest and the root mean square difference of all received attention is printed, beside that which eager attention itself
shows between batches of 1, of 16 and of 64. In float32 each is also held against eager attention in float64, one row at a time
(transformers' norms, softmax and rotations stay in float32 there), which tells how far any float32 run is from the true numbers.
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

from mless.models.locating import locate

RUN = """
import json, sys
from pathlib import Path
from mless.study import load_study, run_study
chosen, sets, out = json.loads(sys.argv[1])
run_study(load_study("quick", chosen, sets), Path(out))
"""


Key = tuple[str, str, int, int, str]


def received(folder: Path) -> dict[Key, np.ndarray]:
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


def eager(model: str, dtype: str, prompts: Sequence[Sequence[int]], rows_at_once: int) -> list[np.ndarray]:
    """What every token receives by eager attention, layers by heads by tokens for each prompt, in batches of like length."""
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
            later = torch.arange(size - 1, -1, -1, device=device)  # nobody looks back at the last token: 0 / 0
            square = (weights[row, :, :size, :size].double() for weights in out.attentions)
            of_layers = [(one.sum(1) - one.diagonal(dim1=1, dim2=2)) / later for one in square]
            found.append(torch.stack(of_layers).cpu().numpy())
        return found

    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    found: dict[int, np.ndarray] = {}
    for at in range(0, len(order), rows_at_once):
        chosen = order[at : at + rows_at_once]
        found.update(zip(chosen, sums([prompts[number] for number in chosen]), strict=True))
    return [found[number] for number in range(len(prompts))]


def against_exact(
    rows: dict[Key, np.ndarray], names: Sequence[tuple[str, str]], exact: Sequence[np.ndarray]
) -> dict[str, float]:
    """The difference of a study's rows from `exact`, whose prompts are named by condition and item."""
    of = dict(zip(names, exact, strict=True))
    return difference(
        (one, of[key[0], key[1]][key[2] - 1, key[3] - 1]) for key, one in rows.items() if key[4] == "later"
    )


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
    folder = str(locate(asked.model).folder)
    for dtype in asked.dtypes:
        with tempfile.TemporaryDirectory() as work:

            def run(name: str, sets: list[str], src: Path | None = None, work: str = work, dtype: str = dtype) -> Path:
                out = Path(work) / name
                environment = {**os.environ, "PYTHONPATH": f"{src}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
                given = json.dumps([{**chosen, "dtype": dtype}, sets, str(out)])
                subprocess.run([sys.executable, "-c", RUN, given], check=True, env=environment if src else None)
                return out

            first = run("groups", [])
            grouped = received(first)
            made = pq.read_table(first / "prompts.parquet", columns=["condition", "item", "token_ids"]).to_pylist()
            others = {"prompt by prompt": received(run("alone", ["batch_size=1"]))}
            if asked.before:
                others["the other mless"] = received(run("before", [], asked.before.resolve()))
        names = [(one["condition"], one["item"]) for one in made]
        prompts = [one["token_ids"] for one in made]
        for name, there in others.items():
            assert there.keys() == grouped.keys(), "other rows"
            add(dtype, name, difference((grouped[key], there[key]) for key in grouped))
        alone = eager(folder, dtype, prompts, 1)
        for size in (16, 64):
            batch = eager(folder, dtype, prompts, size)
            add(dtype, f"eager attention, 1 row and {size}", difference(zip(alone, batch, strict=True)))
        if dtype == "float32":
            exact = eager(folder, "float64", prompts, 1)
            add(dtype, "groups and float64", against_exact(grouped, names, exact))
            for name, there in others.items():
                add(dtype, f"{name} and float64", against_exact(there, names, exact))
            add(dtype, "eager attention, 1 row, and float64", difference(zip(alone, exact, strict=True)))
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
