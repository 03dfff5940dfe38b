"""An activation study: what a condition does to the values behind the MLPs' non-linearities, layer by layer, tested item by item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mless.errors import BadStudy
from mless.results.schemas import ACTIVATION_HISTOGRAMS, ACTIVATION_ITEMS, TOKEN_CLASSES, TOKENS, table_of_rows
from mless.results.units import Expected, in_order
from mless.stats import NearZero, near_zero_of
from mless.stats.activations import BINS, FACTORS, Counts, TokenStatistics, count_values, metrics_of, token_statistics
from mless.study.activations.classes import token_classes, token_texts
from mless.study.activations.tables import change_table
from mless.study.activations.words import activation_lines
from mless.study.bench import Bench, Group, Measurement, Unit
from mless.study.changing import prove_changes
from mless.study.spec import StudySpec
from mless.values import Condition, Item, Prompt

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.capture import Rows


class ActivationMeasurement(Measurement):
    """Reads activations of original tokens, keeps numbers per token while a layer runs and per item afterwards."""

    doing = "activations"
    unit_tables = ("activation_items", "activation_histograms")
    merged = unit_tables
    tables = ("prompts", *unit_tables, "activations")
    sources = ("prompts", *unit_tables)
    takes_cuts = True
    takes_patches = True

    def __init__(self, spec: StudySpec) -> None:
        super().__init__(spec)
        self._near: dict[int, NearZero] = {}
        self._sets: dict[tuple[int, ...], dict[str, np.ndarray]] = {}

    @property
    def implementations(self) -> dict[str, str | list[str]]:
        return {"activations": "forward hooks", "threshold": "exact, by counting float32 bits"}

    def check(self, conditions: Sequence[Condition], items: Sequence[Item]) -> None:
        if self.spec.heads.strip() != "all":
            raise BadStudy(
                f"activations belong to a layer and not to its heads, got --heads {self.spec.heads}; leave it out"
            )

    # ---- before anything is stored

    def prove(self, bench: Bench) -> dict[str, Any]:
        from mless.proofs import prove_reading

        proofs = prove_reading(bench.model, bench.prompts_of(bench.conditions[-1].name)[0], bench.layers)
        proofs |= prove_changes(bench.model, bench.conditions, bench.prompts or {})
        bench.progress.say(
            "proofs hold: reading the activations changes no bit of the output, and leaves nothing behind"
        )
        self._near = self._near or _stored_near_zero(bench) or self._find_near_zero(bench)
        return proofs

    def to_hand_on(self, bench: Bench) -> dict[str, Any]:
        return {"near": self._near or _stored_near_zero(bench) or {}}

    def take_over(self, given: Mapping[str, Any]) -> None:
        self._near = dict(given.get("near") or {})

    def _find_near_zero(self, bench: Bench) -> dict[int, NearZero]:
        """τ of every layer from all `none` prompts: it must be known before the first value is counted."""
        from mless.capture import read_activations

        prompts = bench.prompts_of("none")
        done = 0

        def stream(take: Any) -> None:
            nonlocal done

            def collect(_: int, rows: Rows) -> None:
                for block in rows.blocks():
                    take(rows.layer, block)

            for numbers in bench.grouped(list(map(len, prompts))):
                batch = [prompts[number] for number in numbers]
                read_activations(bench.model, batch, layers=bench.layers, take=collect)
                done += len(batch)
                bench.progress.step("threshold of near zero, none", done, 4 * len(prompts))

        return near_zero_of(bench.layers, stream)

    # ---- one prompt

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Mapping[str, pa.Table]]]:
        from mless.capture import read_activations

        batch = [unit.prompt for unit in group.units if unit.prompt is not None]
        found: list[list[dict[str, Any]]] = [[] for _ in batch]
        counted: list[list[dict[str, Any]]] = [[] for _ in batch]

        def take(row: int, rows: Rows) -> None:
            prompt = batch[row]
            near = self._near[rows.layer]
            names = {**bench.names, "condition": prompt.condition, "item": prompt.item, "layer": rows.layer}
            measured, counts, deviation = _measure(rows, near)
            about = {"threshold": near.threshold, "width": near.width, "median": near.median, "mad": near.mad}
            for tokens, chosen in self._token_sets(bench, prompt).items():
                metrics, moments = metrics_of(measured, chosen)
                known = {"n_tokens": int(chosen.sum()), "units": measured.units, "mean": moments.mean}
                spread = {"deviation": deviation if tokens == "all" else None}
                found[row].append({**names, "tokens": tokens, **known, **about, **metrics, **spread})
            parts = {name: getattr(counts, name).tolist() for name in BINS}
            counted[row].append({**names, "width": near.width, **parts, "zeros": counts.zeros})

        read_activations(bench.model, batch, layers=bench.layers, take=take)
        for row, unit in enumerate(group.units):
            yield (
                unit,
                {
                    "activation_items": table_of_rows(found[row], ACTIVATION_ITEMS),
                    "activation_histograms": table_of_rows(counted[row], ACTIVATION_HISTOGRAMS),
                },
            )

    def expected(self, bench: Bench, unit: Unit, table: str, found: pa.Table) -> Expected:
        texts = bench.texts_of(unit)
        if table == "activation_items":
            return Expected(texts, in_order(("layer", "tokens"), bench.layers, TOKENS))
        return Expected(texts, in_order(("layer",), bench.layers), BINS)

    def finish(self, bench: Bench) -> None:
        bench.folder.write_table("activations", change_table(bench))

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return activation_lines(path)

    def _token_sets(self, bench: Bench, prompt: Prompt) -> dict[str, np.ndarray]:
        """Which of the prompt's original tokens belong to each set; the same for both prompts of a pair."""
        original = prompt.original
        ids = tuple(prompt.token_ids[i] for i in original)
        if ids not in self._sets:
            classes = np.array(token_classes(token_texts(bench.model.tokenizer, ids)))
            asked = np.isin(original, prompt.positions("question"))
            every = {"all": np.ones(len(ids), bool), "question": asked}
            self._sets[ids] = every | {name: classes == name for name in TOKEN_CLASSES}
        return self._sets[ids]


def _measure(rows: Rows, near: NearZero) -> tuple[TokenStatistics, Counts, float]:
    """Each token's statistics, the histogram of all, and their mean absolute deviation from the mean of all."""
    parts: list[TokenStatistics] = []
    counts: Counts | None = None
    for block in rows.blocks():
        parts.append(token_statistics(block, [factor * near.threshold for factor in FACTORS]))
        here = count_values(block, near.width)
        counts = here if counts is None else counts + here
    assert counts is not None  # a prompt has tokens
    measured = TokenStatistics.joined(parts)
    centre = float(measured.mean.mean())
    away = sum(float(np.abs(block.astype(np.float64) - centre).sum()) for block in rows.blocks())
    return measured, counts, away / (len(measured) * measured.units)


def _stored_near_zero(bench: Bench) -> dict[int, NearZero] | None:
    """The thresholds of a killed run, read from its units, so that a resumed run uses the same numbers."""
    stored = bench.folder.any_unit("activation_items", [unit.key for unit in bench.units()])
    if stored is None:
        return None
    names = ("median", "mad", "threshold", "width")
    rows = stored.to_pylist()
    found = {row["layer"]: NearZero(*(row[name] for name in names)) for row in rows if row.get("tokens") == "all"}
    whole = all(value is not None for near in found.values() for value in astuple(near))
    return found if whole and set(bench.layers) <= found.keys() else None
