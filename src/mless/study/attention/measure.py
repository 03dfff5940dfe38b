"""An attention study: what every prompt's tokens receive, and which heads lose it to the filler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mless.results.storing import Tables
from mless.results.units import Expected, in_order
from mless.study.attention.tables import Sums, share_tables, unit_tables
from mless.study.attention.words import attention_lines
from mless.study.bench import Bench, Group, Measurement, Unit
from mless.study.changing import prove_changes, refuse_put_in, refuse_several_softmaxes
from mless.study.spec import StudySpec
from mless.study.subject import Subject
from mless.values import QUERY_SETS, Condition, Item

if TYPE_CHECKING:
    from mless.capture import Pending


def _tables(pending: Pending, row: int, names: Mapping[str, str]) -> dict[str, pa.Table]:
    return unit_tables(pending.row(row), names)


class AttentionMeasurement(Measurement):
    doing = "attention"
    unit_tables = ("dilution", "attention")
    merged = unit_tables
    tables = ("prompts", *unit_tables, "retained", "shares")
    sources = ("prompts", *unit_tables)
    unit_format = 2
    takes_cuts = True
    takes_patches = True

    def __init__(self, spec: StudySpec) -> None:
        super().__init__(spec)
        self._kernels: set[str] = set()
        self._sums: Sums | None = None

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
        proofs |= prove_changes(bench.model, bench.conditions, bench.prompts or {})
        bench.progress.say(
            f"proofs hold: received attention as eager's to {proofs['received']:.1g}, causal, model restored"
        )
        return proofs

    def check(self, conditions: Sequence[Condition], items: Sequence[Item]) -> None:
        refuse_several_softmaxes(conditions, "to read what tokens receive from")

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Tables]]:
        from mless.capture import received_later

        batch = [unit.prompt for unit in group.units if unit.prompt is not None]
        pending = received_later(bench.model, batch, layers=bench.layers, heads=bench.some_heads)
        self._kernels.update(pending.computed_by.values())
        for row, unit in enumerate(group.units):
            yield unit, partial(_tables, pending, row, bench.names)

    def expected(self, bench: Bench, unit: Unit, table: str, found: pa.Table) -> Expected:
        assert unit.prompt is not None
        if table == "dilution":
            places, lists = in_order(("layer", "queries"), bench.layers, QUERY_SETS), ("received",)
        else:
            places = in_order(("layer", "head", "queries"), bench.layers, bench.heads, QUERY_SETS)
            lists = ("received", "n")
        return Expected(bench.texts_of(unit), places, dict.fromkeys(lists, len(unit.prompt)))

    def prepare(self, bench: Bench) -> None:
        refuse_put_in(bench.conditions, bench.prompts or {}, "has no token that could receive")
        self._sums = Sums(bench)

    def seen(self, bench: Bench, unit: Unit, tables: Mapping[str, pa.Table]) -> None:
        assert self._sums is not None
        for name in self.unit_tables:
            self._sums.add(name, unit.condition.name, unit.number, tables[name])

    def finish(self, bench: Bench) -> None:
        for name, table in share_tables(bench, self._sums or Sums(bench)).items():
            bench.folder.write_table(name, table)

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return attention_lines(path)
