"""What the driver of a study takes: 1,000 fake workers, whose tables are as large as real ones, and the driver's own code.

    python benchmarks/driver.py                        all of it, some minutes
    python benchmarks/driver.py --shapes 28x28 --workers 1000 --items 200

Nothing is measured by a model. The driver reads the tokenizer, hands groups out, takes tables, encodes, writes and syncs them, and finishes the
folder, as in `mless run quick --workers`. Workers answer in simulated time (tests/simulated_workers.py): they are slow, die, hang and answer
twice. So the driver is never idle, and its own seconds are what is timed. The gate: every unit is in the finished table once.

*writing*: units and MB of received attention a second that the one writer takes, by the model's layers and heads.
*memory*: the same study with more and more workers; and with a first group that comes last, so that all others wait for it.
*sharing*: groups a second that are handed out and taken, without tables.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from mless.guarded import usable_cores
from mless.results.folder import ResultFolder
from mless.study import load_study, measuring
from mless.study.attention.tables import unit_tables
from mless.study.bench import Job, Workers
from mless.study.kinds import measurement_of
from mless.study.rendering import write_prompts
from mless.study.shared import Sent, shared_out
from mless.study.sharing import ANSWERS_AT_ONCE, Answered, Sharing
from mless.study.worker import Described, Measured, Started, of_all
from mless.values import MASS_NAMES, QUERY_SETS
from simulated_workers import Event, Habits, SimulatedCrew
from spelling import model_folder
from study import Memory

#: Chances for each group. A group may cost three workers before a study ends, so they are small.
ROUGH = Habits(seconds=10.0, dies=0.003, hangs=0.001, answers_twice=0.1)


class Tables:
    """Tables of a unit as they come from a worker: those of its prompt's length as bytes, with the unit's names."""

    def __init__(self, layers: int, heads: int) -> None:
        self.layers, self.heads = layers, heads
        self.made = cache(self._made)
        self._draw = np.random.default_rng(0)

    def _made(self, tokens: int, filler: bool) -> bytes:
        draw = np.random.default_rng(tokens)
        shape = (len(QUERY_SETS), self.layers, self.heads, tokens)
        n = np.broadcast_to(np.arange(tokens - 1, -1, -1), (len(QUERY_SETS), self.layers, tokens)).copy()
        if filler:
            n[1] = np.maximum(n[1] - tokens // 3, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            even = np.where(n > 0, 1 / n, np.nan).astype(np.float32)
            received = np.where(n[:, :, None] > 0, draw.exponential(size=shape) / tokens, np.nan).astype(np.float32)
        found = SimpleNamespace(
            received=received, n=n, uniform=even, layers=range(1, self.layers + 1), heads=range(1, self.heads + 1),
            mass=draw.dirichlet(np.ones(len(MASS_NAMES)), (self.layers, self.heads)), prompt=SimpleNamespace(condition="", item=""),
        )  # fmt: skip
        return pickle.dumps(unit_tables(found, dict.fromkeys(("model", "task"), "")), protocol=5)  # pyright: ignore[reportArgumentType]

    def of(self, names: Mapping[str, str], prompt: Any) -> dict[str, pa.Table]:
        found: dict[str, pa.Table] = {}
        for table, rows in pickle.loads(self.made(len(prompt), prompt.condition != "none")).items():
            texts = {**names, "condition": prompt.condition, "item": prompt.item}
            columns = {name: pa.repeat(pa.scalar(text), len(rows)) for name, text in texts.items()}
            # Numbers of two units never repeat, or they would take less room than real ones.
            flat = rows["received"].combine_chunks()
            scaled = pc.multiply(flat.values, pa.scalar(self._draw.uniform(0.5, 1.0), pa.float32()))
            columns["received"] = pa.ListArray.from_arrays(flat.offsets, scaled)
            found[table] = pa.table({name: columns.get(name, rows[name]) for name in rows.column_names})
        return found


class FakeWorkers(SimulatedCrew):
    """Simulated workers of a study. A result comes into being when the driver takes it: until then it is on the worker's machine."""

    def __init__(self, job: Job, tables: Tables, workers: int, seed: int, habits: Habits, *, first_last: bool) -> None:
        super().__init__(0, seed, habits)
        self._workers, self._tables, self._first_last = workers, tables, first_last
        measurement = measurement_of(job.spec)
        self._bench, _ = measuring.opened(measurement, job)
        subject = self._bench.subject
        assert subject is not None
        subject.load_tokenizer()
        self._bench.prompts = write_prompts(measurement, self._bench, subject).prompts
        self.units = {unit.key: unit for unit in self._bench.units()}
        self._model = {name: subject.known(name) for name in ("fingerprint", "tokenizer_fingerprint")}
        #: Seconds that making the tables took, which are not the driver's, and results that came.
        self.making = self.making_cpu = 0.0
        self.results = 0
        self._later: list[Event] = []

    def lead(self) -> Described:
        return Described("a fake", {}, of_all(), "cuda", "none", self._model)

    def start(self, stored: Mapping[str, Any] | None, given: Mapping[str, Any], *, resumed: bool) -> Started:
        for _ in range(self._workers):
            self.add()
        return Started({}, {"proofs": {}, "omit_first": False, "group_tokens": self._bench.group_tokens}, [])

    def ask(self, worker: str, number: int, task: Sent) -> None:
        before = self._busy_until.get(worker)
        super().ask(worker, number, task)
        if self._first_last and number == 0 and before is not None:
            self._coming = [one for one in self._coming if getattr(one[2], "number", None) != 0]
            self._at(2000.0, Answered(worker, 0, task))

    def done(self, task: Sent) -> Sent:
        return task

    def events(self, seconds: float) -> Sequence[Event]:
        found = self._later or super().events(seconds)
        given: list[Event] = []
        self._later = []
        answers = 0
        for event in found:
            if isinstance(event, Answered):
                answers += 1
                if answers > ANSWERS_AT_ONCE:
                    self._later.append(event)
                    continue
                event = Answered(event.worker, event.number, self._measured(event.found))
            given.append(event)
        return given

    def _measured(self, task: Sent) -> Measured:
        began, busy = time.perf_counter(), time.thread_time()
        units = [(key, self._tables.of(self._bench.names, self.units[key].prompt)) for key in task[0]]
        self.making += time.perf_counter() - began
        self.making_cpu += time.thread_time() - busy
        self.results += 1
        return Measured(units, {"received": ["fake"]})

    def known(self) -> list[dict[str, str]]:
        return []

    def close(self) -> None: ...


def driven(
    shapes: tuple[int, int], work: Path, *, workers: int, items: int, habits: Habits = ROUGH, seed: int = 0, group_tokens: int = 1024,
    first_last: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One study by fake workers, and what the driver took for it."""
    layers, heads = shapes
    model = work / f"model-{layers}x{heads}"
    if not model.exists():  # hardly any weights: it is never run
        model_folder(
            model,
            hidden_size=2 * heads,
            intermediate_size=4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
    given = {
        "model": str(model),
        "data": f"arithmetic:5:{items}",
        "length": 128,
        "prompt": "raw",
        "group_tokens": group_tokens,
    }
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    job = Job(load_study("quick", given), out)
    crew = FakeWorkers(job, Tables(layers, heads), workers, seed, habits, first_last=first_last)
    with Memory() as memory:
        began, busy = time.perf_counter(), time.process_time()
        outcome = measuring.run(shared_out(measurement_of(job.spec), crew, Workers(str(workers), limit=10.0**7)), job)
        whole, busy = time.perf_counter() - began, time.process_time() - busy
    about = ResultFolder(out).manifest() or {}
    found = pq.read_table(out / "attention.parquet", columns=["condition", "item"])
    counts = found.group_by(["condition", "item"]).aggregate([([], "count_all")])
    if outcome.computed != len(counts) or set(counts["count_all"].to_pylist()) != {layers * heads * len(QUERY_SETS)}:
        sys.exit(f"units are lost or doubled: {len(counts)} in the table, {outcome.computed} measured")
    own = about["timings"]["measure_s"] - crew.making
    tokens = sum(len(unit.prompt or ()) for unit in crew.units.values())
    floats = 8 * tokens * layers * heads
    row = {
        "layers": layers, "heads": heads, "workers": workers, "units": outcome.units, "tokens": tokens, "group_tokens": group_tokens,
        "results": crew.results, "lost": crew.lost, "floats_mb": round(floats / 1e6, 1),
        "folder_over_floats": round(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / floats, 3),
        "measure_s": about["timings"]["measure_s"], "making_s": round(crew.making, 2), "finish_s": about["timings"]["finish_s"],
        "whole_s": round(whole, 2), "cpu_s": round(busy - crew.making_cpu, 2), "units_per_s": round(outcome.units / own, 1),
        "mb_per_s": round(floats / own / 1e6, 1),
        "memory_mb": round(memory.most / 1e6),
    }  # fmt: skip
    shutil.rmtree(out)
    return row


def handed_out(workers: int, tasks: int, seed: int = 0) -> dict[str, Any]:
    """`Sharing` alone: groups a second, the simulation's own share included."""
    crew = SimulatedCrew(workers, seed, ROUGH)
    sharing: Sharing[int, int] = Sharing(crew, list(range(tasks)), limit=10.0**4, tries=8)
    began = time.perf_counter()
    found = sorted(sharing.results())
    took = time.perf_counter() - began
    if found != [(number, number * number) for number in range(tasks)]:
        sys.exit("groups are lost or doubled")
    return {"workers": workers, "tasks": tasks, "s": round(took, 2), "tasks_per_s": round(tasks / took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x28", "28x28", "80x64", "126x128"], help="layers x heads")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[10, 100, 1000], help="the last one is used for writing"
    )
    parser.add_argument("--items", type=int, default=100, help="questions; of large models fewer are taken")
    parser.add_argument("--work", type=Path, help="where folders are made; a temporary one by default")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    work = asked.work or Path(tempfile.mkdtemp())
    about = {
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cpu": platform.machine(), "cores": usable_cores(),
        "python": platform.python_version(),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []

    def tell(what: str, row: dict[str, Any]) -> None:
        rows.append({"what": what} | row | about)
        print(f"{what:8}", *(f"{name} {value:,}" for name, value in row.items()), sep="  ", flush=True)
        if asked.json:
            asked.json.write_text("".join(json.dumps(one) + "\n" for one in rows))

    for workers in (1000, 10_000):
        tell("sharing", handed_out(workers, 3 * workers))
    shapes = [(int(one.split("x")[0]), int(one.split("x")[1])) for one in asked.shapes]
    # First, as a process does not give back all that it had.
    for workers in asked.workers:
        tell("memory", driven((28, 28), work, workers=workers, items=asked.items))
    tell("waiting", driven((28, 28), work, workers=asked.workers[-1], items=asked.items, first_last=True))
    for one in shapes:
        # About as many bytes of each.
        items = max(8, min(asked.items, asked.items * 28 * 28 // (one[0] * one[1])))
        tell("writing", driven(one, work, workers=asked.workers[-1], items=items))
    if asked.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
