"""How much faster a study is measured by 2 or 4 workers than by one, each with as many threads; the tables must be equal.

    python benchmarks/workers.py                                       1, 2 and 4 workers with 4 threads each: needs 16 cores
    python benchmarks/workers.py --workers 1 2 --threads 1 --limit 6

The study is `quick` on the CPU. Compared is `rate`: prompts a second between the first result and the last, once all workers are at work. `whole` is
the command from its start to its tables, with the start of Ray and the loading of every worker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mless.guarded import usable_cores

#: Part of the prompts at either end during which not all workers have something to do.
_EDGE = 0.25


def run(asked: argparse.Namespace, workers: int, out: Path) -> dict[str, Any]:
    """One whole study in a process of its own; when each prompt was done is read from its progress."""
    code = (
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from mless.study import load_study, run_study\n"
        "from mless.study.bench import Silent, Workers\n"
        "class Steps(Silent):\n"
        "    times = []\n"
        "    def step(self, what, done, total, workers=''): self.times.append((time.monotonic(), done, what))\n"
        "where, threads, model, data, limit, out = json.loads(sys.argv[1])\n"
        "fields = {'model': model, 'data': data, 'limit': limit, 'device': 'cpu', 'dtype': 'float32'}\n"
        "spec = load_study('quick', fields, ['batch_size=4'])\n"
        "run_study(spec, Path(out), Steps(), workers=Workers(where, threads))\n"
        "print(json.dumps(Steps.times))\n"
    )
    given = json.dumps([str(workers), asked.threads, asked.model, asked.data, asked.limit, str(out)])
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    steps: list[tuple[float, int, str]] = json.loads(done.stdout.strip().splitlines()[-1])
    # The last thing that has steps is the measuring.
    doing = steps[-1][2].split(",")[0]
    times = [(when, number) for when, number, what in steps if what.startswith(f"{doing},")]
    total = times[-1][1]
    middle = [(when, number) for when, number in times if _EDGE * total <= number <= (1 - _EDGE) * total]
    (first, low), (last, high) = middle[0], middle[-1]
    tables = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(out.glob("*.parquet")))).hexdigest()
    return {
        "workers": workers,
        "threads": asked.threads,
        "prompts": total,
        "rate": round((high - low) / (last - first), 2),
        "whole_s": round(time.perf_counter() - began, 1),
        **json.loads((out / "study.json").read_text())["timings"],
        "tables": tables[:16],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    needed = max(asked.workers) * asked.threads
    if needed > usable_cores():
        print(f"{needed} threads on {usable_cores()} cores: this says little of the workers", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for workers in asked.workers:
            row = run(asked, workers, Path(place) / str(workers))
            row = {
                "what": "quick by workers",
                "model": asked.model,
                "date": time.strftime("%Y-%m-%d"),
                "torch": torch.__version__,
                "cpu": platform.machine(),
                "cores": usable_cores(),
                **row,
            }
            rows.append(row | {"over_first": round(row["rate"] / rows[0]["rate"], 2) if rows else 1.0})
            print(json.dumps(rows[-1]), flush=True)
    if len({row["tables"] for row in rows}) != 1:
        raise SystemExit("the tables differ between numbers of workers")
    if asked.json:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
