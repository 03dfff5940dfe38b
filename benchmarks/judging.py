"""How many answers a second are judged with 1, 2, 4, … workers, over distinct scripted answers, in one run.

    python benchmarks/judging.py                          20,000 answers; workers up to the number of usable cores
    python benchmarks/judging.py --answers 400 --workers 1,2
    python benchmarks/judging.py --study 160000           a whole study of so many scripted answers: stored, judged, compared, reported

Correctness comes first: the table of answers must have the same bytes with every number of workers, and the right answers must be judged right.
Timed is what a study does with its replies: answers are found in the texts, judged, and put in a table; the start of the workers is inside. Of 20
answers 13 are numbers or fractions, one is words, and six need the symbolic rule. One JSON line per row with --json FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import resource
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import mless
from mless.guarded import usable_cores
from mless.results import sealing
from mless.results.schemas import REPLIES
from mless.study.accuracy.judging import judged
from mless.study.spec import AccuracyTable
from mless.tasks import Grader
from mless.values import Item


def pair(n: int) -> tuple[str, str, bool]:
    """The n-th answer, its reference, and whether they are equal."""
    k, kind = n + 11, n % 20
    other = k + 1
    if kind < 8:
        return str(k), str(k if kind % 2 else other), bool(kind % 2)
    if kind < 13:
        return rf"\frac{{{2 * k}}}{{14}}", rf"\frac{{{k if kind % 2 else other}}}{{7}}", bool(kind % 2)
    return [
        (f"{k}+x", f"x+{k}", True),
        (rf"{k}\pi", rf"{other}\pi", False),
        (rf"{k}\sqrt{{3}}", rf"\sqrt{{{3 * k * k}}}", True),
        (rf"\frac{{x+{k}}}{{2}}", rf"\frac{{{k}+x}}{{2}}", True),
        (rf"\frac{{x+{k}}}{{2}}", rf"\frac{{x+{other}}}{{2}}", False),
        (f"x^2+{k}x", f"x(x+{k})", True),
        (rf"\text{{house number {k}}}", rf"\text{{house number {other}}}", False),
    ][kind - 13]


def scripted(answers: int) -> tuple[pa.Table, list[Item], list[bool]]:
    common = {"model": "scripted", "task": "own", "condition": "none", "sample": 0, "n_tokens": 200, "finish": "stop"}
    rows: list[dict[str, Any]] = []
    items: list[Item] = []
    equal: list[bool] = []
    for n in range(answers):
        answer, reference, same = pair(n)
        text = f"{'We take what is given and go on from there. ' * 20}So the answer is $\\boxed{{{answer}}}$."
        rows.append(common | {"item": str(n), "seed": n, "text": text})
        items.append(Item(str(n), "?", reference))
        equal.append(same)
    return pa.Table.from_pylist(rows, schema=REPLIES), items, equal


def whole_study(answers: int, work: Path) -> dict[str, Any]:
    """A study of sums under four conditions, each question answered four times by a script: the seconds of its steps, and its page's size."""
    from mless.report import publish
    from mless.study import load_study, run_study

    samples, conditions = 4, ("none", "none-again", "mless", "random")
    items = answers // (samples * len(conditions))
    script = work / "script.json"
    script.write_text(json.dumps({"*": f"{'We take what is given and go on from there. ' * 20}So the answer is 42."}))
    given = {
        "model": "scripted",
        "data": f"arithmetic:5:{items}",
        "conditions": ",".join(conditions),
        "accuracy.samples": samples,
        "accuracy.temperature": 0.7,
    }
    spec = load_study("accuracy", given | {"accuracy.engine": "scripted", "accuracy.script": str(script)})
    began = time.perf_counter()
    outcome = run_study(spec, work / "out")
    ran = time.perf_counter()
    publish(outcome.folder, fresh=True)
    reported = time.perf_counter()
    about = json.loads((outcome.folder / "study.json").read_text())
    rows = pq.read_metadata(outcome.folder / "answers.parquet").num_rows
    sizes = {file.name: file.stat().st_size for file in outcome.folder.rglob("*") if file.is_file()}
    return {
        "what": "whole study", "answers": rows, "units": outcome.units, "answering_s": about["timings"]["measure_s"],
        "judging_and_comparing_s": about["timings"]["finish_s"], "run_s": round(ran - began, 2), "reporting_s": round(reported - ran, 2),
        "report_mb": round(sizes["report.html"] / 1e6, 2), "study_json_mb": round(sizes["study.json"] / 1e6, 2),
        "folder_mb": round(sum(sizes.values()) / 1e6, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument(
        "--workers", help="numbers of workers, such as 1,2,4; the first one is what the others are compared with"
    )
    parser.add_argument("--study", type=int, metavar="ANSWERS", help="a whole study instead")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cores = usable_cores()
    doubled = [2**n for n in range(cores.bit_length()) if 2**n < cores]
    counts = [int(n) for n in asked.workers.split(",")] if asked.workers else [*doubled, cores]
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": platform.machine(),
        "cores": cores,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    if asked.study:
        with tempfile.TemporaryDirectory() as work:
            row = whole_study(asked.study, Path(work)) | about
        print(*(f"{name:<24} {value}" for name, value in row.items()), sep="\n")
        if asked.json:
            asked.json.write_text(json.dumps(row) + "\n")
        return
    replies, items, equal = scripted(asked.answers)
    told: list[dict[str, Any]] = []
    digests: set[str] = set()
    for count in counts:
        mless.register("graders", f"workers-{count}", partial(Grader, workers=count))
        begin, busy = time.perf_counter(), time.process_time()
        table = judged(replies, items, "own", AccuracyTable(grader=f"workers-{count}"))
        took, busy = time.perf_counter() - begin, time.process_time() - busy
        digests.add(hashlib.sha256(sealing.encode(table)).hexdigest())
        wrong = [n for n, correct in enumerate(table.column("correct").to_pylist()) if correct != equal[n]]
        if len(digests) > 1:
            sys.exit(f"the table with {count} workers is another than with {counts[0]}")
        if wrong:
            sys.exit(f"{len(wrong)} answers are misjudged, the first is {pair(wrong[0])}")
        told.append(
            {
                "what": "judged",
                "workers": count,
                "answers": asked.answers,
                "seconds": round(took, 2),
                "answers_per_s": round(asked.answers / took, 1),
                "ratio": round(told[0]["seconds"] / took, 2) if told else 1.0,
                "own_cpu_seconds": round(busy, 2),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "worker_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
            }
            | about
        )
        row = told[-1]
        print(
            f"{count:3} workers  {asked.answers:7,} answers in {took:8.2f} s  {row['answers_per_s']:9,.1f} a second  {row['ratio']:6.2f} × "
            f"{counts[0]}   this process: {busy:.1f} s busy, {row['peak_mb']:,} MB; a worker: {row['worker_peak_mb']:,} MB",
            flush=True,
        )
        if asked.json:
            asked.json.write_text("".join(json.dumps(row) + "\n" for row in told))


if __name__ == "__main__":
    main()
