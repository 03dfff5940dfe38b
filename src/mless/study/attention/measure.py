"""An attention study: what every prompt's tokens receive, and which heads lose it to the filler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from mless.results.units import Expected, in_order
from mless.study.attention.tables import share_tables, unit_tables
from mless.study.attention.words import attention_lines
from mless.study.bench import Bench, Group, Measurement, Unit
from mless.study.spec import StudySpec
from mless.study.subject import Subject
from mless.values import QUERY_SETS


class AttentionMeasurement(Measurement):
    doing = "attention"
    unit_tables = ("dilution", "attention")
    merged = unit_tables
    tables = ("prompts", *unit_tables, "retained", "shares")
    sources = ("prompts", *unit_tables)
    unit_format = 2

    def __init__(self, spec: StudySpec) -> None:
        super().__init__(spec)
        self._kernels: set[str] = set()

    @property
    def implementations(self) -> dict[str, str | list[str]]:
        # `joint` also computes the attention; with the other kernels SDPA does.
        forward = {"joint" if kernel == "joint" else "sdpa" for kernel in self._kernels}
        return {"forward": sorted(forward), "received": sorted(self._kernels)}

    def layers(self, subject: Subject) -> list[int]:
        return subject.attending(super().layers(subject))

    def prove(self, bench: Bench) -> dict[str, Any]:
        from mless.proofs import prove

        proofs = prove(bench.model, bench.prompts_of(bench.conditions[-1].name)[0], bench.layers)
        bench.progress.say(
            f"proofs hold: received attention as eager's to {proofs['received']:.1g}, causal, model restored"
        )
        return proofs

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Mapping[str, pa.Table]]]:
        from mless.capture import received

        batch = [unit.prompt for unit in group.units if unit.prompt is not None]
        found = received(bench.model, batch, layers=bench.layers, heads=bench.some_heads, batch_size=len(batch))
        for unit, attention in zip(group.units, found, strict=True):
            self._kernels.update(attention.computed_by.values())
            yield unit, unit_tables(attention, bench.names)

    def expected(self, bench: Bench, unit: Unit, table: str, found: pa.Table) -> Expected:
        assert unit.prompt is not None
        if table == "dilution":
            places, lists = in_order(("layer", "queries"), bench.layers, QUERY_SETS), ("received",)
        else:
            places = in_order(("layer", "head", "queries"), bench.layers, bench.heads, QUERY_SETS)
            lists = ("received", "n")
        return Expected(bench.texts_of(unit), places, dict.fromkeys(lists, len(unit.prompt)))

    def finish(self, bench: Bench) -> None:
        for name, table in share_tables(bench).items():
            bench.folder.write_table(name, table)

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return attention_lines(path)
