"""The driver's whole loop with a thousand workers that are slow, die, hang and answer twice: every unit is stored once. Time is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mless
from mless.results import storing
from mless.results.folder import ResultFolder
from mless.study import load_study, measuring, run_study
from mless.study.bench import Bench, Group, Job, Measurement, Unit, Workers
from mless.study.kinds import MEASUREMENTS, measurement_of
from mless.study.shared import shared_out
from simulated_workers import Habits, RealWorker, SimulatedStudy
from spelling import model_folder

ROUGH = Habits(dies=0.02, hangs=0.005, answers_twice=0.2)
ITEMS = 120


class Tokens(Measurement):
    """A prompt's tokens: two rows each, so that units can be told apart and mixed up."""

    unit_tables = ("tokens",)
    merged = unit_tables
    tables = ("prompts", "tokens")
    sources = tables

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Mapping[str, Any]]]:
        for unit in group.units:
            assert unit.prompt is not None
            row = {**bench.names, **bench.texts_of(unit), "ids": list(unit.prompt.token_ids)}
            yield unit, {"tokens": pa.Table.from_pylist([row | {"layer": 1}, row | {"layer": 2}])}

    def finish(self, bench: Bench) -> None: ...


class Place:
    """The study's model, one real worker for all, and the tables of one process."""

    def __init__(self, folder: Path) -> None:
        self.model = model_folder(folder / "tiny")
        self.real = RealWorker(self.job(folder / "none"))
        self.expected = folder / "alone" / "tokens.parquet"
        run_study(self.job(folder / "alone").spec, folder / "alone")

    def job(self, out: Path) -> Job:
        given = {"model": str(self.model), "measures": "tokens", "data": f"arithmetic:5:{ITEMS}", "length": 3}
        return Job(load_study("quick", given | {"conditions": "none,mless", "prompt": "raw", "batch_size": 1}), out)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    before = dict(MEASUREMENTS._added)  # pyright: ignore[reportPrivateUsage]
    mless.register("measurements", "tokens", Tokens)
    yield Place(tmp_path_factory.mktemp("driving"))
    MEASUREMENTS._added = before  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_rough_workers_lose_and_double_nothing(
    seed: int, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed < 2:  # hardly anything may wait in memory: what comes out of turn goes through files
        monkeypatch.setattr(storing, "_WAITING", 2000)
    files: list[str] = []
    take_file = ResultFolder.write_unit

    def counted(self: ResultFolder, tables: Mapping[str, pa.Table], unit: str) -> None:
        files.append(unit)
        take_file(self, tables, unit)

    monkeypatch.setattr(ResultFolder, "write_unit", counted)
    crew, job = SimulatedStudy(place.real, 1000, seed, ROUGH), place.job(tmp_path / "out")
    outcome = measuring.run(shared_out(measurement_of(job.spec), crew, Workers("1000", limit=200.0)), job)
    assert outcome.computed == 2 * ITEMS
    assert crew.lost > 0
    assert crew.twice > 0
    assert (len(files) > ITEMS) == (seed < 2)
    assert (tmp_path / "out" / "tokens.parquet").read_bytes() == place.expected.read_bytes()


def test_the_tables_hold_each_unit_once(place: Place) -> None:
    """The tables that the others are compared with."""
    found = pq.read_table(place.expected, columns=["condition", "item", "layer"]).to_pylist()
    rows = [(row["condition"], row["item"], row["layer"]) for row in found]
    assert len(rows) == len(set(rows)) == 2 * ITEMS * 2
