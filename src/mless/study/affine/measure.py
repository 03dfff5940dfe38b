"""A study of the affine map: is a head's output with filler λ·(output without) + σ? The definitions are in docs/affine.md."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mless.errors import BadStudy
from mless.results.units import Expected, in_order
from mless.study.affine.tables import item_table, judge_table, vector_table, write_tables
from mless.study.affine.words import affine_lines
from mless.study.bench import Bench, Group, Measurement, Unit
from mless.study.changing import loaded_cuts, prove_changes, refuse_several_softmaxes
from mless.study.spec import AffineTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition, Item

#: So many tokens, over all items, are kept as vectors for the picture of a head.
POINTS = 72


class AffineMeasurement(Measurement):
    doing = "affine"
    #: Units hold vectors. The finished tables hold only summaries and points, so no unit table is merged.
    unit_tables = ("affine_items", "affine_points")
    tables = ("prompts", "affine_items", "affine_points", "affine")
    sources = tables
    takes_arm = False
    why_no_arm = ": both prompts of a pair run in one forward, and none must run without it"
    takes_cuts = True
    attaches_changes = True
    why_no_changes = ": λ and σ say what a filler does to the softmaxes of one run, and a patched run is made of two"
    judged_by = ("margins",)

    def __init__(self, spec: StudySpec) -> None:
        super().__init__(spec)
        self._table = spec.affine or AffineTable()

    @property
    def implementations(self) -> dict[str, str | list[str]]:
        return {"forward": "fp32 softmax by blocks of rows, the prompts of a pair as rows of one forward"}

    def check(self, conditions: Sequence[Condition], items: Sequence[Item]) -> None:
        refuse_several_softmaxes(conditions, "to tell the filler's part of")
        for condition in conditions:
            # `none` is shifted by nothing and holds no filler, so no token comes after one.
            if condition.cut and condition.kind == "none" and self._table.tokens == "after":
                raise BadStudy(
                    f"condition {condition.name!r} cuts attention and inserts no filler, and tokens after a filler are compared; use --set "
                    "affine.tokens=original"
                )

    def layers(self, subject: Subject) -> list[int]:
        return subject.attending(super().layers(subject))

    def prove(self, bench: Bench) -> dict[str, Any]:
        from mless.proofs import prove_outputs

        longest = max((bench.prompts_of(one.name)[0] for one in bench.conditions), key=len)
        proofs = prove_outputs(bench.model, longest, bench.layers)
        proofs |= prove_changes(bench.model, bench.conditions, bench.prompts or {})
        bench.progress.say(
            f"proofs hold: attention outputs as eager's to {proofs['captured']:.1g}, model restored ({proofs['restoration']})"
        )
        return proofs

    def groups(self, bench: Bench, missing: Sequence[Unit]) -> Iterator[Group]:
        """A pair is a forward of its own."""
        return (Group([unit]) for unit in missing)

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Mapping[str, pa.Table]]]:
        from mless.capture import displacement

        for unit in group.units:
            found = None
            # `none` is what the others are compared with; it runs beside each of them.
            if unit.condition.name != "none":
                assert unit.prompt is not None
                found = displacement(
                    bench.model,
                    bench.prompts_of("none")[unit.number],
                    unit.prompt,
                    layers=bench.layers,
                    heads=bench.some_heads,
                    tokens=self._table.tokens,
                    points=_points_of(unit.number, len(bench.items)),
                    rng=_rng(bench.spec.seed, unit.prompt.item),
                    cuts=loaded_cuts(unit.condition, bench.model),
                )
            tables = {"affine_items": item_table(found, bench.names), "affine_points": vector_table(found, bench.names)}
            yield unit, tables

    def expected(self, bench: Bench, unit: Unit, table: str, found: pa.Table) -> Expected:
        heads = len(bench.layers) * len(bench.heads)
        layers = bench.layers if unit.condition.name != "none" else []
        if table == "affine_items":
            return Expected(bench.texts_of(unit), in_order(("layer", "head"), layers, bench.heads))
        tokens = found.column("token").to_pylist()[: len(found) // heads]  # those that were chosen
        return Expected(bench.texts_of(unit), in_order(("layer", "head", "token"), layers, bench.heads, tokens))

    def finish(self, bench: Bench) -> None:
        write_tables(bench, self._table)

    def judge_again(self, bench: Bench) -> None:
        bench.folder.write_table("affine", judge_table(bench.folder.read_table("affine"), bench.spec.margins_of()))

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return affine_lines(path)


def _points_of(number: int, items: int) -> int:
    """How many tokens of the item are kept as vectors, so that all together are about `POINTS`."""
    each = max(1, math.ceil(POINTS / items))
    return each if number * each < POINTS else 0


def _rng(seed: int, item: str) -> np.random.Generator:
    """The item's seed: its tokens are the same under every condition, whatever the other items are."""
    return np.random.default_rng(
        int.from_bytes(hashlib.blake2b(f"{seed}\n{item}".encode(), digest_size=8).digest(), "big")
    )
