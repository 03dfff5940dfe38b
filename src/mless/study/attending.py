"""An attention study: what every prompt's tokens receive, and which heads lose it to the filler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from mless.study import tables
from mless.study.running import Bench
from mless.values import Condition, Prompt


class AttentionMeasurement:
    def __init__(self) -> None:
        self.measures = "attention"
        self.unit_tables: tuple[str, ...] = ("dilution", "attention")
        self.tables: tuple[str, ...] = ("prompts", *self.unit_tables, "retained", "shares")
        self.unit_format = 2
        self._kernels: set[str] = set()

    @property
    def implementations(self) -> dict[str, str | list[str]]:
        # `joint` computes the attention itself; beside all others it is SDPA's.
        forward = {"joint" if kernel == "joint" else "sdpa" for kernel in self._kernels}
        return {"forward": sorted(forward), "received": sorted(self._kernels)}

    def prove(self, bench: Bench) -> dict[str, Any]:
        from mless.proofs import prove

        proofs = prove(bench.model, bench.prompts[bench.conditions[-1].name][0], bench.layers)
        bench.told.say(
            f"proofs hold: received attention as eager's to {proofs['received']:.1g}, causal, model restored"
        )
        return proofs

    def units(self, bench: Bench, condition: Condition, batch: Sequence[Prompt]) -> Iterator[dict[str, pa.Table]]:
        from mless.capture import received

        for attention in received(
            bench.model, batch, layers=bench.layers, heads=bench.some_heads, batch_size=len(batch)
        ):
            self._kernels.update(attention.computed_by.values())
            yield tables.unit_tables(attention, bench.names)

    def finish(self, bench: Bench) -> None:
        found = tables.share_tables(
            bench.folder,
            bench.prompts,
            bench.spec,
            bench.names,
            unit_key=bench.key,
            layers=bench.layers,
            heads=bench.heads,
        )
        for name, table in found.items():
            bench.folder.write_table(name, table)
