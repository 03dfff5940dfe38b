"""Reading a finished result folder, only as much of it as a picture or a page needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from jaxtyping import Float

from mless import store, tasks
from mless.errors import BadFolder, BadStudy
from mless.stats import majority_at_k
from mless.study.accuracy import ACCURACY, BestOnDev, best_on_dev, read_accuracy
from mless.values import MASS_NAMES, QuerySet, Span, format_numbers, pick_item


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


def _about(path: Path) -> dict[str, Any]:
    about = store.ResultFolder(path).manifest()
    if about is None:
        raise BadFolder(f"{path} holds no study.json, so it is no result folder; `mless run … --out {path}` makes one")
    return about


def holds_answers(path: Path) -> bool:
    """Whether the folder's study measured answers and not attention; what is no result folder is refused."""
    about = _about(path)
    if about.get("measures") == "tune":
        return False  # its inner folders do
    study: Any = about.get("study")
    asked = isinstance(study, dict) and cast("dict[str, Any]", study).get("accuracy") is not None
    return asked or (path / "accuracy.parquet").exists()


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
    def conditions(self) -> Mapping[str, Mapping[str, Any]]:
        """Condition name → how it changes the prompt."""
        return cast("dict[str, dict[str, Any]]", self.about.get("conditions") or {})

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
        """Those of the conditions that were run here; a folder that holds none of them is refused."""
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
        """The named columns of the rows that match, never more of the file than that; of the `newer` ones those that are there."""
        file = self.path / f"{name}.parquet"
        if not file.exists():
            running = (self.path / "units").is_dir()
            cause = (
                "its run is still under way or was interrupted; the same command finishes it"
                if running
                else self._way_out()
            )
            raise BadFolder(f"{self.path}: no {name}.parquet; {cause}")
        try:
            data = ds.dataset(file, format="parquet")
            missing = [column for column in columns if column not in data.schema.names]
            if missing:
                raise BadFolder(f"{file} has no column {', '.join(map(repr, missing))}; {self._way_out()}")
            there = [column for column in newer if column in data.schema.names]
            return data.to_table(columns=[*columns, *there], filter=where)
        except (OSError, pa.ArrowException) as fault:
            cause = str(fault).partition("\n")[0]
            raise BadFolder(f"{file} cannot be read ({cause}); remove it and run the study again") from None

    def has_tokens(self) -> bool:
        """Whether the prompts are stored token by token; those sent to a server as text are not."""
        file = self.path / "prompts.parquet"
        try:
            return file.exists() and {"spans", "tokens"} <= set(ds.dataset(file, format="parquet").schema.names)
        except (OSError, pa.ArrowException):
            return True  # whoever reads it is told what is wrong with it

    def _way_out(self) -> str:
        name = str(self.model.get("name") or "…")
        return f"Make it with `mless figure … --model {name}` (which runs what the figure needs) or `mless run … --model {name}`"


@dataclass(frozen=True, slots=True)
class StoredResults(StoredStudy):
    """A folder that holds attention."""

    @classmethod
    def open(cls, path: Path) -> StoredResults:
        """Read ``study.json``; a folder without one, a broken one or one of a newer version is refused."""
        return cls(path, _about(path))

    @property
    def omit_first(self) -> bool:
        """Whether the study leaves the first token (the attention sink) out of its curves."""
        return bool(self.about.get("omit_first", False))

    def captured(self) -> dict[int, list[int]]:
        """Layer → heads whose attention is stored."""
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
        # Folders made before there was a dilution exponent lack these; its value is then None.
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
class Accuracy:
    """One row of ``accuracy.parquet``: a condition's accuracy by one metric on one split, beside `none`'s. Shares are 0…1."""

    model: str
    task: str
    condition: str
    split: str
    metric: str
    n: int
    value: float | None
    lo: float | None
    hi: float | None
    sd: float | None
    delta: float | None
    delta_lo: float | None
    delta_hi: float | None
    p: float | None
    p_again: float | None
    p_adjusted: float | None
    mde: float | None
    aa_delta: float | None
    gained: int | None
    lost: int | None
    equivalence_p: float | None
    verdict: str | None
    truncated: float | None
    no_answer: float | None
    tokens: float | None
    samples: int | None
    changed_text: float | None
    # Older folders do not have these.
    alpha: float | None = None
    delta_lo_all: float | None = None
    delta_hi_all: float | None = None
    stated: float | None = None
    guessed: float | None = None
    stated_delta: float | None = None
    stated_delta_lo: float | None = None
    stated_delta_hi: float | None = None
    delta_both: float | None = None
    delta_both_lo: float | None = None
    delta_both_hi: float | None = None
    delta_form: float | None = None
    delta_form_lo: float | None = None
    delta_form_hi: float | None = None
    both_n: int | None = None
    both_before: int | None = None
    both_after: int | None = None
    both_delta: float | None = None
    both_delta_lo: float | None = None
    both_delta_hi: float | None = None
    mostly_form: bool | None = None

    @classmethod
    def columns(cls) -> list[str]:
        """The columns that every folder has."""
        return [field.name for field in fields(cls) if field.default is MISSING]

    @classmethod
    def newer(cls) -> list[str]:
        """The columns that older folders do not have."""
        return [field.name for field in fields(cls) if field.default is not MISSING]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as stored, and how it was judged."""

    item: str
    sample: int
    text: str
    extracted: str | None
    correct: bool
    why: str
    how: str
    reference: str
    n_tokens: int | None  # a server may not say
    finish: str


@dataclass(frozen=True, slots=True)
class StoredAnswers(StoredStudy):
    """A folder that holds answers and their accuracy."""

    @classmethod
    def open(cls, path: Path) -> StoredAnswers:
        """Read ``study.json``; a folder that measured attention is refused."""
        if not holds_answers(path):
            if _about(path).get("measures") == "tune":
                raise BadFolder(
                    f"{path} holds a tuning, whose answers lie in folders of their own; give {path / 'test'}"
                )
            raise BadFolder(
                f"{path} holds no accuracy.parquet: its study measured attention, not answers; `mless run accuracy --out …` makes one that does"
            )
        return cls(path, _about(path))

    @property
    def task(self) -> str:
        """The data set's name."""
        return str(self.about.get("task") or self.study.get("data") or "task")

    @property
    def engine(self) -> Mapping[str, Any]:
        """What study.json says of the engine that gave the answers."""
        found: Any = self.about.get("engine")
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The study's ``[accuracy]`` table."""
        found: Any = self.study.get("accuracy")
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def control(self) -> str | None:
        """The A/A control: the condition that is `none` once more."""
        return next((name for name, about in self.conditions.items() if about.get("again")), None)

    def accuracy(self) -> list[Accuracy]:
        """The rows of ``accuracy.parquet``, conditions in the study's order; a number that is not one is None."""
        order = {name: place for place, name in enumerate(self.conditions)}
        rows: list[Accuracy] = []
        for row in self.table("accuracy", Accuracy.columns(), newer=Accuracy.newer()).to_pylist():
            told: dict[str, Any] = {
                key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()
            }
            rows.append(Accuracy(**told))
        if not rows:
            raise BadFolder(f"{self.path}: accuracy.parquet holds no rows; run the study again")
        return sorted(
            rows, key=lambda row: order.get(row.condition, len(order))
        )  # stable: metrics and splits stay as stored

    def chosen(self, among: Collection[str]) -> BestOnDev | None:
        """What the dev items choose among these conditions, and what the test items say of it; None where nothing was to be chosen."""
        _, conditions, rows = read_accuracy(self.path)
        table = pa.Table.from_pylist(rows, schema=ACCURACY)
        try:
            best = best_on_dev(table, {name: one for name, one in conditions.items() if name in among})
        except BadStudy:
            return None  # no items were set apart, or only votes were compared
        return best if best.among > 1 else None

    def swept(self, among: Sequence[str] | None = None) -> list[dict[int, str]]:
        """Conditions that differ in nothing but the filler's length, as length → name; each such line has two lengths or more."""
        lines: dict[tuple[object, ...], dict[int, str]] = {}
        for name in self.conditions if among is None else among:
            about = self.conditions[name]
            if about.get("kind") != "none" and about.get("length") and about.get("samples") is None:
                alike = ("kind", "filler", "placement", "hidden", "system", "question", "temperature")
                lines.setdefault(tuple(about.get(part) for part in alike), {})[int(about["length"])] = name
        return [dict(sorted(line.items())) for line in lines.values() if len(line) > 1]

    def scores(self, condition: str) -> dict[str, float]:
        """Item → the share of its answers that are right; 0 or 1 by the vote where the condition votes."""
        columns = ["item", "sample", "correct", "extracted"]
        table = self.table("answers", columns, pc.field("condition") == condition).sort_by([("sample", "ascending")])
        right: dict[str, list[bool]] = {}
        said: dict[str, list[str | None]] = {}
        for item, correct, extracted in zip(
            *(table[column].to_pylist() for column in ("item", "correct", "extracted")), strict=True
        ):
            right.setdefault(item, []).append(bool(correct))
            said.setdefault(item, []).append(None if extracted is None else tasks.vote_of(extracted))
        if self.conditions.get(condition, {}).get("samples") is not None:
            votes = {item: majority_at_k([said[item]], np.array([right[item]]), len(right[item])) for item in right}
            return {item: vote.mean for item, vote in votes.items()}
        return {item: float(np.mean(found)) for item, found in right.items()}

    def answers(self, condition: str, items: Sequence[str]) -> dict[str, list[Answer]]:
        """Item → its answers under a condition, in the samples' order."""
        where = (pc.field("condition") == condition) & pc.field("item").isin(pa.array(items, pa.string()))
        found: dict[str, list[Answer]] = {}
        for row in self.table("answers", [field.name for field in fields(Answer)], where).to_pylist():
            texts: dict[str, Any] = {key: row[key] or "" for key in ("text", "why", "how", "reference", "finish")}
            kept: dict[str, Any] = {key: row[key] for key in ("sample", "extracted", "n_tokens")}
            one = Answer(row["item"], correct=bool(row["correct"]), **texts, **kept)
            found.setdefault(one.item, []).append(one)
        return {item: sorted(answers, key=lambda one: one.sample) for item, answers in found.items()}

    def questions(self, items: Sequence[str]) -> dict[str, str]:
        """Item → its question, as it stands in the prompt without filler; the whole prompt where the question cannot be told apart.

        Without stored prompts (a server makes them itself) it is the task's question, which study.json keeps.
        """
        asked_of: Any = self.about.get("questions")
        told = cast("dict[str, Any]", asked_of) if isinstance(asked_of, dict) else {}
        found = {item: str(told[item]) for item in items if item in told}
        if not (self.path / "prompts.parquet").exists():
            return found
        where = (pc.field("condition") == "none") & pc.field("item").isin(pa.array(items, pa.string()))
        columns = ["item", "text", *(["spans", "tokens"] if self.has_tokens() else [])]
        for row in self.table("prompts", columns, where).to_pylist():
            tokens: list[str] = row.get("tokens") or []
            spans: list[dict[str, Any]] = row.get("spans") or []
            asked = [slice(span["start"], span["stop"]) for span in spans if span["name"] == "question"]
            question = "".join("".join(tokens[place]) for place in asked).strip()
            # A token may hold half a character, which cannot be shown alone.
            found[row["item"]] = question if question and "\ufffd" not in question else row["text"]
        return found


def metric_shown(rows: Sequence[Accuracy], condition: Mapping[str, Any]) -> str | None:
    """The metric a condition is judged by: the vote where it votes over samples of its own, else pass@1, else its first."""
    found = [row.metric for row in rows if row.metric != "diversity"]
    votes = [metric for metric in found if metric.startswith("maj@")]
    if condition.get("samples") is not None and votes:
        return max(votes, key=_k)
    return "pass@1" if "pass@1" in found else min(found, key=lambda m: (not m.startswith("pass@"), _k(m)), default=None)


def _k(metric: str) -> int:
    number = metric.partition("@")[2]
    return int(number) if number.isdecimal() else 0


def shown_rows(
    rows: Sequence[Accuracy], conditions: Mapping[str, Mapping[str, Any]], split: str = "all"
) -> dict[str, Accuracy]:
    """Condition → the one row of it that a picture shows."""
    found: dict[str, Accuracy] = {}
    for name in dict.fromkeys(row.condition for row in rows):
        own = [row for row in rows if row.condition == name and row.split == split]
        metric = metric_shown(own, conditions.get(name, {}))
        row = next((row for row in own if row.metric == metric), None)
        if row is not None:
            found[name] = row
    return found
