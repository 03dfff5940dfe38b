"""Reading a finished result folder, only as much of it as a picture or a page needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from jaxtyping import Float, Float64

from mless.errors import BadFolder, BadStudy
from mless.results.folder import ResultFolder
from mless.results.inspecting import no_result_folder
from mless.results.manifest import measured_in
from mless.results.nats import LIKELIHOOD_METRICS
from mless.results.schemas import Effect
from mless.results.tables import TableGate
from mless.values import MASS_NAMES, Prompt, QuerySet, Span, format_numbers, pick_item

#: Pages are read with their checksums; those of older folders have none.
_PARQUET = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """One prompt as stored: its spans and, where asked for, its tokens' texts."""

    item: str
    spans: tuple[Span, ...]
    tokens: tuple[str, ...] = ()

    @property
    def original(self) -> list[int]:
        """Positions of all tokens but the filler."""
        return [i for span in self.spans if span.name != "filler" for i in range(span.start, span.stop)]

    @property
    def filler(self) -> tuple[tuple[int, int], ...]:
        """Where filler runs: (start, stop) pairs."""
        return tuple((span.start, span.stop) for span in self.spans if span.name == "filler")


def read_about(path: Path) -> dict[str, Any]:
    about = ResultFolder(path).about()
    if about is None:
        raise no_result_folder(path)
    return about


def read_measured(path: Path, wanted: str, what: str) -> dict[str, Any]:
    """``study.json`` of a folder that measured this; `what` are the results that any other folder lacks."""
    about = read_about(path)
    if (measured := measured_in(about)) != wanted:
        raise BadFolder(
            f"{path} holds no {what}: its study measured {measured}; `mless run {wanted} --out …` makes a folder that does"
        )
    return about


def holds_answers(path: Path) -> bool:
    """Whether the folder's study measured answers. A folder without results is refused."""
    about = read_about(path)
    measured = measured_in(about)
    # Folders not written by mless may only hold the table.
    return measured == "accuracy" or (measured == "attention" and (path / "accuracy.parquet").exists())


@dataclass(frozen=True, slots=True)
class StoredStudy:
    """A finished result folder of one study of one model, whatever it measured."""

    path: Path
    about: Mapping[str, Any]

    @property
    def study(self) -> Mapping[str, Any]:
        """The study as it was run, every field of it."""
        found: Any = self.about.get("study")
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def model(self) -> Mapping[str, Any]:
        """What study.json says of the model."""
        found: Any = self.about.get("model")
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {"name": str(found)}

    @property
    def label(self) -> str:
        """The model's name as people read it."""
        return str(self.model.get("label") or self.model.get("name") or "model")

    @property
    def task(self) -> str:
        """The data set's name."""
        return str(self.about.get("task") or self.study.get("data") or "task")

    @property
    def title(self) -> str:
        """The model and its task."""
        return f"{self.label} on {self.task}"

    @property
    def conditions(self) -> Mapping[str, Mapping[str, Any]]:
        """Condition name → how it changes the prompt."""
        return cast("dict[str, dict[str, Any]]", self.about.get("conditions") or {})

    @property
    def control(self) -> str | None:
        """The A/A control: the condition that is `none` once more."""
        return next((name for name, about in self.conditions.items() if about.get("again")), None)

    @property
    def items(self) -> list[str]:
        """Item ids, in the study's order."""
        return [str(item) for item in cast("list[object]", self.about.get("items") or [])]

    def need_conditions(self, wanted: Sequence[str]) -> None:
        """Refuse to draw conditions that were not run."""
        missing = [name for name in wanted if name not in self.conditions]
        if missing:
            raise BadFolder(
                f"{self.path}: no condition {', '.join(map(repr, missing))} in this folder; it holds "
                f"{', '.join(self.conditions) or 'none'}. {self._way_out()}"
            )

    def run_of(self, wanted: Sequence[str]) -> list[str]:
        """Those of the conditions that were run here; a folder with none of them is refused."""
        found = [name for name in wanted if name in self.conditions]
        if not found:
            self.need_conditions(wanted)
        return found

    def item_id(self, wanted: str) -> str:
        """An item by its number in the study (from 1) or by its id."""
        return pick_item(self.items, wanted, str(self.path))

    def table(
        self, name: str, columns: Sequence[str], where: ds.Expression | None = None, *, newer: Sequence[str] = ()
    ) -> pa.Table:
        """The named columns of the rows that match, and those of the `newer` columns that exist. Nothing else is read."""
        file = self.path / f"{name}.parquet"
        if not file.exists():
            running = (self.path / "units").is_dir()
            cause = (
                "its run is still under way or was interrupted; the same command finishes it"
                if running
                else self._way_out()
            )
            raise BadFolder(f"{self.path}: no {name}.parquet; {cause}")
        ResultFolder(self.path).check_tables((name,), self.about)
        gate = TableGate(file, self.about)
        data = ds.dataset(file, format=_PARQUET)
        missing = [column for column in columns if column not in data.schema.names]
        if missing:
            raise BadFolder(f"{file} has no column {', '.join(map(repr, missing))}; {self._way_out()}")
        there = [column for column in newer if column in data.schema.names]
        wanted = [*columns, *there]
        found = gate.read(lambda: data.to_table(columns=gate.with_places(wanted), filter=where))
        return gate.in_order(gate.check_rows(found), wanted)

    def has_tokens(self) -> bool:
        """Whether the prompts are stored token by token; those sent to a server as text are not."""
        file = self.path / "prompts.parquet"
        if not file.exists():
            return False
        ResultFolder(self.path).check_tables(("prompts",), self.about)
        return {"spans", "tokens"} <= set(ds.dataset(file, format="parquet").schema.names)

    def _way_out(self) -> str:
        name = str(self.model.get("name") or "…")
        return f"Make it with `mless figure … --model {name}` (which runs what the figure needs) or `mless run … --model {name}`"


@dataclass(frozen=True, slots=True)
class StoredResults(StoredStudy):
    """A folder that holds attention."""

    @classmethod
    def open(cls, path: Path) -> StoredResults:
        """Read ``study.json``; a folder without one, a broken one or one of a newer version is refused."""
        return cls(path, read_about(path))

    @property
    def omit_first(self) -> bool:
        """Whether the study leaves the first token (the attention sink) out of its curves."""
        return bool(self.about.get("omit_first", False))

    def captured(self) -> dict[int, list[int]]:
        """Layer → heads whose attention is stored."""
        layers, heads = (self.about.get(name) for name in ("layers", "heads"))
        if isinstance(layers, list) and isinstance(heads, list):
            return {int(layer): [int(head) for head in heads] for layer in cast("list[int]", layers)}
        # A folder that does not say so is asked row by row.
        pairs = self.table("attention", ["layer", "head"]).group_by(["layer", "head"]).aggregate([])
        found: dict[int, list[int]] = {}
        for layer, head in sorted(zip(pairs["layer"].to_pylist(), pairs["head"].to_pylist(), strict=True)):
            found.setdefault(int(layer), []).append(int(head))
        return found

    def need_head(self, layer: int, head: int, captured: Mapping[int, Sequence[int]]) -> None:
        """Refuse a layer or head the model does not have or the study did not capture, naming what there is."""
        self.need_layer(layer, captured)
        way_out = "choose others with --heads, such as --heads most-shifted:3"
        highest = int(self.model.get("heads") or 0)
        if highest and not 1 <= head <= highest:
            raise BadStudy(f"no head {head} in {self.label}: its heads are 1 to {highest} (numbered from 1); {way_out}")
        if head not in captured[layer]:
            raise BadStudy(
                f"head {head} of layer {layer} was not captured in {self.path}: it holds heads "
                f"{format_numbers(captured[layer])}; {way_out}"
            )

    def need_layer(self, layer: int, captured: Mapping[int, Sequence[int]]) -> None:
        """Refuse a layer the model does not have or the study did not capture."""
        highest = int(self.model.get("layers") or 0)
        if highest and not 1 <= layer <= highest:
            raise BadStudy(
                f"no layer {layer} in {self.label}: its layers are 1 to {highest} (numbered from 1); choose with --layers"
            )
        if layer not in captured:
            raise BadStudy(
                f"layer {layer} was not captured in {self.path}: it holds layers {format_numbers(list(captured)) or 'none'}; "
                f"choose one of them with --layers, or run the study again with --layers {layer}"
            )

    def prompts(
        self, conditions: Sequence[str], *, item: str | None = None, tokens: bool = False
    ) -> dict[str, dict[str, StoredPrompt]]:
        """Condition → item → its prompt."""
        where = pc.field("condition").isin(list(conditions))
        if item is not None:
            where = where & (pc.field("item") == item)
        columns = ["condition", "item", "spans", *(["tokens"] if tokens else [])]
        found: dict[str, dict[str, StoredPrompt]] = {}
        for row in self.table("prompts", columns, where).to_pylist():
            spans = tuple(Span(span["name"], span["start"], span["stop"]) for span in row["spans"])
            prompt = StoredPrompt(row["item"], spans, tuple(row.get("tokens") or ()))
            found.setdefault(row["condition"], {})[row["item"]] = prompt
        return found

    def received(
        self,
        conditions: Sequence[str],
        layers: Sequence[int],
        heads: Sequence[int],
        queries: QuerySet,
        *,
        item: str | None = None,
    ) -> dict[tuple[str, int, int], dict[str, Float[np.ndarray, " tokens"]]]:
        """(condition, layer, head) → item → attention received by each token; NaN where no query sees it."""
        where = (
            pc.field("condition").isin(list(conditions))
            & pc.field("layer").isin([int(layer) for layer in layers])
            & pc.field("head").isin([int(head) for head in heads])
            & (pc.field("queries") == queries)
        )
        if item is not None:
            where = where & (pc.field("item") == item)
        table = self.table("attention", ["condition", "item", "layer", "head", "received"], where)
        found: dict[tuple[str, int, int], dict[str, Float[np.ndarray, " tokens"]]] = {}
        for condition, name, layer, head, values in zip(
            *(table[column].to_pylist() for column in ("condition", "item", "layer", "head")),
            table["received"],
            strict=True,
        ):
            curve = values.values.to_numpy(zero_copy_only=False).astype(np.float64)
            found.setdefault((condition, layer, head), {})[name] = curve
        return found

    def retained(self, queries: QuerySet) -> list[dict[str, Any]]:
        """The rows of ``retained.parquet`` of one query set."""
        columns = [
            "condition", "layer", "head", "retained", "lo", "hi", "p", "p_adjusted", "n_items", "uniform", "verdict",
        ]  # fmt: skip
        # Older folders have no dilution exponent; it is None then.
        newer = ["epsilon", "epsilon_lo", "epsilon_hi", "skewed"]
        rows = self.table("retained", columns, pc.field("queries") == queries, newer=newer).to_pylist()
        return [dict.fromkeys(newer) | row for row in cast("list[dict[str, Any]]", rows)]

    def mass(self, conditions: Sequence[str], layer: int) -> dict[str, dict[str, float]]:
        """Condition → where an original query's attention goes in `layer`, mean over heads and items."""
        where = (
            pc.field("condition").isin(list(conditions))
            & (pc.field("layer") == layer)
            & (pc.field("queries") == "original")
        )
        rows = self.table("attention", ["condition", "mass"], where).to_pylist()
        found: dict[str, dict[str, float]] = {}
        for condition in conditions:
            stored = [row["mass"] for row in rows if row["condition"] == condition and row["mass"] is not None]
            if stored:
                found[condition] = {
                    name: float(np.mean([row.get(name) or 0.0 for row in stored])) for name in MASS_NAMES
                }
        return found


@dataclass(frozen=True, slots=True)
class StoredActivations(StoredStudy):
    """A folder that holds activations."""

    @classmethod
    def open(cls, path: Path) -> StoredActivations:
        """Read ``study.json``; a folder that measured something else is refused."""
        about = read_about(path)
        if about.get("measures") != "activations":
            raise BadFolder(
                f"{path} holds no activations: its study measured {about.get('measures') or 'something else'}; `mless run activations --out …` makes "
                "one that does"
            )
        return cls(path, about)

    @property
    def layers(self) -> list[int]:
        """The layers measured."""
        return [int(layer) for layer in self.about.get("layers") or ()]

    def need_layer(self, layer: int) -> None:
        """Refuse a layer that was not measured, naming what there is."""
        highest = int(self.model.get("layers") or 0)
        if highest and not 1 <= layer <= highest:
            raise BadStudy(
                f"no layer {layer} in {self.label}: its layers are 1 to {highest} (numbered from 1); choose with --layers"
            )
        if layer not in self.layers:
            raise BadStudy(
                f"layer {layer} was not measured in {self.path}: it holds layers {format_numbers(self.layers) or 'none'}; choose one of them with "
                f"--layers, or run the study again with --layers {layer}"
            )

    def with_arm(self, condition: str) -> bool:
        return self.conditions[condition].get("arm") is not None

    def changes(self, **where: Any) -> list[dict[str, Any]]:
        """Rows of activations.parquet whose columns have the values given; a number that is none is NaN."""
        columns = [
            "condition", "layer", "tokens", "metric", "scale", "value", "none", "difference", "lo", "hi", "p_adjusted", "n_items", "verdict",
            "threshold",
        ]  # fmt: skip
        wanted = None
        for name, value in where.items():
            one = pc.field(name) == value
            wanted = one if wanted is None else wanted & one
        rows: list[dict[str, Any]] = self.table("activations", columns, wanted).to_pylist()
        numbers = ("value", "none", "difference", "lo", "hi", "p_adjusted")
        return [row | {name: math.nan if row[name] is None else row[name] for name in numbers} for row in rows]

    def counts(self, condition: str, layer: int) -> dict[str, Float64[np.ndarray, " bins"]]:
        """The histogram of a condition's activations in a layer: counts summed over items, by kind of bins."""
        kinds = ["linear", "zoom", "positive", "negative"]
        where = (pc.field("condition") == condition) & (pc.field("layer") == layer)
        table = self.table("activation_histograms", [*kinds, "zeros", "width"], where)
        if not table.num_rows:
            raise BadFolder(f"{self.path}: no histogram of {condition!r} in layer {layer}; run the study again")
        found = {
            kind: table[kind]
            .combine_chunks()
            .flatten()
            .to_numpy()
            .reshape(table.num_rows, -1)
            .sum(axis=0)
            .astype(float)
            for kind in kinds
        }
        return (
            found
            | {name: np.array([float(table[name].to_numpy().sum())]) for name in ("zeros",)}
            | {"width": np.array([float(table["width"][0].as_py())])}
        )

    def tokens(self, layer: int) -> dict[str, int]:
        """How many tokens of each set all items have together."""
        where = (pc.field("condition") == "none") & (pc.field("layer") == layer)
        found: dict[str, int] = {}
        for row in self.table("activation_items", ["tokens", "n_tokens"], where).to_pylist():
            found[row["tokens"]] = found.get(row["tokens"], 0) + int(row["n_tokens"])
        return found


@dataclass(frozen=True, slots=True)
class StoredLikelihood(StoredStudy):
    """A folder that holds log-probabilities of solutions and answers."""

    @classmethod
    def open(cls, path: Path) -> StoredLikelihood:
        """Read ``study.json``; a folder that measured something else is refused."""
        return cls(path, read_measured(path, "likelihood", "log-probabilities"))

    def effects(self) -> list[Effect]:
        """The rows of ``effects.parquet``, metrics in the order of pages, conditions in the study's."""
        rows = [Effect(**row) for row in self.table("effects", [one.name for one in fields(Effect)]).to_pylist()]
        metrics, conditions = list(LIKELIHOOD_METRICS), list(self.conditions)
        return sorted(rows, key=lambda row: (metrics.index(row.metric), conditions.index(row.condition)))

    def solution_length(self) -> float | None:
        """How many tokens a reference solution has, in the median; None where there are none."""
        where = (pc.field("condition") == "none") & (pc.field("metric") == "solution")
        counts = self.table("likelihood", ["n_tokens"], where)["n_tokens"].to_numpy()
        return float(np.median(counts)) if len(counts) else None

    def deltas(self, condition: str, metric: str) -> dict[str, float]:
        """Item → its change against `none`."""
        where = (pc.field("condition") == condition) & (pc.field("metric") == metric)
        rows = self.table("likelihood", ["item", "delta"], where)
        return dict(zip(rows["item"].to_pylist(), rows["delta"].to_pylist(), strict=True))

    def solutions(
        self, conditions: Sequence[str], *, item: str | None = None
    ) -> dict[str, dict[str, Float64[np.ndarray, " tokens"]]]:
        """Condition → item → log p of each token of its reference solution. Items without one are left out."""
        where = pc.field("condition").isin(list(conditions))
        if item is not None:
            where = where & (pc.field("item") == item)
        table = self.table("tokens", ["condition", "item", "position", "logp"], where)
        table = table.sort_by([(name, "ascending") for name in ("condition", "item", "position")])
        first = np.flatnonzero(table["position"].to_numpy() == 0)
        names = table.select(["condition", "item"]).take(pa.array(first)).to_pylist()
        found: dict[str, dict[str, Float64[np.ndarray, " tokens"]]] = {name: {} for name in conditions}
        # Before the first token of the first solution there is nothing.
        for row, logp in zip(names, np.split(table["logp"].to_numpy(), first)[1:], strict=True):
            found[row["condition"]][row["item"]] = logp
        return {name: {one: mine[one] for one in self.items if one in mine} for name, mine in found.items()}

    def solution_changes(
        self, conditions: Sequence[str], *, item: str | None = None
    ) -> dict[str, dict[str, Float64[np.ndarray, " tokens"]]]:
        """Condition → item → the change against `none` of each token of its reference solution."""
        read = self.solutions(["none", *conditions], item=item)
        none = read["none"]
        return {name: {one: logp - none[one] for one, logp in read[name].items() if one in none} for name in conditions}

    def solution_tokens(self, item: str) -> list[str]:
        """The texts of the tokens of an item's reference solution."""
        where = (pc.field("condition") == "none") & (pc.field("item") == item)
        rows = self.table("tokens", ["position", "text"], where).sort_by([("position", "ascending")])
        return rows["text"].to_pylist()

    def candidates(self, condition: str, item: str) -> list[dict[str, Any]]:
        """What else was scored after an item's prompt: its answer, other items' answers, its options."""
        where = (pc.field("condition") == condition) & (pc.field("item") == item)
        rows = self.table("candidates", ["number", "role", "text", "logp", "n_tokens"], where)
        return rows.sort_by([("number", "ascending")]).to_pylist()


def read_prompts(folder: ResultFolder) -> dict[str, list[Prompt]]:
    """Condition → its prompts, as they were written."""
    found: dict[str, list[Prompt]] = {}
    for row in folder.read_table("prompts", columns=["condition", "item", "token_ids", "spans", "text"]).to_pylist():
        spans = tuple(Span(span["name"], span["start"], span["stop"]) for span in row["spans"])
        prompt = Prompt(row["item"], row["condition"], tuple(row["token_ids"]), spans, row["text"])
        found.setdefault(prompt.condition, []).append(prompt)
    return found
