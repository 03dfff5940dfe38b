"""Reading answers: which were right, what each condition's accuracy is, what was chosen, and the folders that `mless tune` left."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mless import stats, tasks
from mless.errors import BadFolder, BadStudy
from mless.results.folder import ResultFolder
from mless.results.reading import StoredStudy, holds_answers, measured_in, read_about
from mless.results.schemas import ACCURACY, Accuracy, Answer, Tried, columns_of, plain
from mless.values import Condition, condition_of

ALPHA = 0.05


# ---- what a row says -------------------------------------------------------------------------------------------------


def p_of_row(row: Mapping[str, Any]) -> float:
    """Against `none`, and against `none-again` where that was run: the larger."""
    p, p_again = row["p"], row.get("p_again")
    return stats.p_of_both(p, p_again) if p_again is not None else p


def verdict_of(row: Mapping[str, Any], p: float) -> stats.ChangeVerdict:
    """What a row says at this p, adjusted or not."""
    by_itself = row.get("aa_delta") or 0.0
    return stats.change_verdict(row["delta"], p, row.get("equivalence_p"), by_itself=by_itself, alpha=ALPHA)


# ---- a choice made by looking ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BestOnDev:
    """The condition that dev items chose, its rows on either split, and what the test items say of it.

    Only one condition is tested on the test items, so `p` (the larger of those against `none` and `none-again`) is not adjusted. The row's
    `p_adjusted` is for readers who look at all conditions.
    """

    condition: str
    among: int
    dev: dict[str, Any]
    test: dict[str, Any]
    p: float | None
    verdict: stats.ChangeVerdict


def best_on_dev(table: pa.Table, conditions: Mapping[str, Condition]) -> BestOnDev:
    """The condition with the highest pass@1 on the dev items (of equals the smallest p, then the first), and its test row."""
    rows: list[dict[str, Any]] = table.filter(pc.field("metric") == "pass@1").to_pylist()
    of = {(row["condition"], row["split"]): row for row in rows}
    if ("none", "dev") not in of:
        raise BadStudy(
            "no items were set apart to choose on; run the study with --set accuracy.dev_share=0.5 for a dev and a test split"
        )
    candidates = [name for name, one in conditions.items() if not one.again and name != "none" and (name, "dev") in of]
    if not candidates:
        raise BadStudy(f"nothing to choose from: of the conditions {', '.join(conditions)} none is compared by pass@1")
    # min keeps the first of equals
    best = min(candidates, key=lambda name: (-of[name, "dev"]["value"], _or(of[name, "dev"]["p"], 1.0)))
    test = of[best, "test"]
    p = None if test["p"] is None else p_of_row(test)
    return BestOnDev(
        best, len(candidates), of[best, "dev"], test, p, verdict_of(test, p) if p is not None else "undecided"
    )


def _or(value: float | None, instead: float) -> float:
    return instead if value is None else value


# ---- the table read back ---------------------------------------------------------------------------------------------


def read_accuracy(path: Path) -> tuple[dict[str, Any], dict[str, Condition], list[dict[str, Any]]]:
    """study.json, the conditions and the rows of accuracy.parquet of a finished accuracy study."""
    folder = ResultFolder(path)
    about = folder.about()
    if about is not None and not (about.get("study") or {}).get("accuracy"):
        raise BadFolder(
            f"{path} holds no answers: its study measured {measured_in(about)}; give the folder of a study with [accuracy], as `mless run accuracy` makes it"
        )
    rows: list[dict[str, Any]] = folder.read_table("accuracy").to_pylist()
    conditions = {name: condition_of(name, one) for name, one in (about or {})["conditions"].items()}
    return about or {}, conditions, rows


def accuracy_rows(path: Path) -> list[dict[str, Any]]:
    """One row per condition over all items, for a table on the screen: pass@1, or the vote where the condition votes."""
    return headlines(read_accuracy(path)[2])


def headlines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per condition over all items."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["split"] == "all":
            first.setdefault(row["condition"], {**row, "accuracy": row["value"]})
    return list(first.values())


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


# ---- folders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredAnswers(StoredStudy):
    """A folder that holds answers and their accuracy."""

    @classmethod
    def open(cls, path: Path) -> StoredAnswers:
        """Read ``study.json``; a folder without answers is refused."""
        if not holds_answers(path):
            measured = measured_in(read_about(path))
            if measured == "tune":
                raise BadFolder(
                    f"{path} holds a tuning, whose answers lie in folders of their own; give {path / 'test'}"
                )
            raise BadFolder(
                f"{path} holds no accuracy.parquet: its study measured {measured}; `mless run accuracy --out …` makes one with answers"
            )
        return cls(path, read_about(path))

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

    def accuracy(self) -> list[Accuracy]:
        """The rows of ``accuracy.parquet``, conditions in the study's order; a number that is not one is None."""
        order = {name: place for place, name in enumerate(self.conditions)}
        rows: list[Accuracy] = []
        for row in self.table(
            "accuracy", columns_of(Accuracy, newer=False), newer=columns_of(Accuracy, newer=True)
        ).to_pylist():
            rows.append(Accuracy(**{key: plain(value) for key, value in row.items()}))
        if not rows:
            raise BadFolder(f"{self.path}: accuracy.parquet holds no rows; run the study again")
        return sorted(
            rows, key=lambda row: order.get(row.condition, len(order))
        )  # stable: metrics and splits stay as stored

    def chosen(self, among: Collection[str]) -> BestOnDev | None:
        """What the dev items choose among these conditions, and its test result; None where there was no choice."""
        _, conditions, rows = read_accuracy(self.path)
        table = pa.Table.from_pylist(rows, schema=ACCURACY)
        try:
            best = best_on_dev(table, {name: one for name, one in conditions.items() if name in among})
        except BadStudy:
            return None  # no items were set apart, or only votes were compared
        return best if best.among > 1 else None

    def swept(self, among: Sequence[str] | None = None) -> list[dict[int, str]]:
        """Conditions that differ only in the filler's length, as length → name; each line has at least two lengths."""
        lines: dict[tuple[object, ...], dict[int, str]] = {}
        for name in self.conditions if among is None else among:
            about = self.conditions[name]
            if about.get("kind") != "none" and about.get("length") and about.get("samples") is None:
                alike = (
                    "kind",
                    "filler",
                    "placement",
                    "hidden",
                    "system",
                    "question",
                    "temperature",
                    "seed",
                    "cut",
                    "patch",
                )
                lines.setdefault(tuple(json.dumps(about.get(part)) for part in alike), {})[int(about["length"])] = name
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
            votes = {
                item: stats.majority_at_k([said[item]], np.array([right[item]]), len(right[item])) for item in right
            }
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
        """Item → its question as in the prompt without filler; the whole prompt where the question's span is unknown.

        Without stored prompts (a server makes them itself) it is the task's question, which study.json keeps.
        """
        asked_of: Any = self.about.get("questions")
        stored = cast("dict[str, Any]", asked_of) if isinstance(asked_of, dict) else {}
        found = {item: str(stored[item]) for item in items if item in stored}
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


@dataclass(frozen=True, slots=True)
class StoredTuning(StoredStudy):
    """A folder that `mless tune` made."""

    @classmethod
    def open(cls, path: Path) -> StoredTuning:
        about = ResultFolder(path).about()
        if about is None or about.get("measures") != "tune":
            raise BadFolder(
                f"{path} holds no tuning of ARM's parameters; `mless tune --out …` makes a folder that does, and its inner folders are for the "
                "tables of accuracy"
            )
        if not about.get("complete"):
            raise BadFolder(f"{path}: its tuning is not finished; run the same command again to complete it")
        return cls(path, about)

    @property
    def tuning(self) -> dict[str, Any]:
        """What study.json says of the choice: chosen, tried, rungs, dev, test, transfer."""
        return cast("dict[str, Any]", self.about["tuning"])

    @property
    def chosen(self) -> str:
        return str(self.tuning["chosen"])

    def rows(self) -> list[Tried]:
        """Every setting and rung, in the order in which they were tried."""
        found: list[Tried] = []
        for row in self.table("tuning", [field.name for field in fields(Tried)]).to_pylist():
            values: dict[str, Any] = {**row, "layers": tuple(row["layers"])}
            found.append(Tried(**values))
        if not found:
            raise BadFolder(f"{self.path}: tuning.parquet holds no rows; run the same command again")
        return found

    def tried(self) -> list[Tried]:
        """Each setting once, by the last rung it was in."""
        return list({row.condition: row for row in self.rows()}.values())

    def best(self) -> Tried:
        """The chosen setting, on all dev items."""
        return next(row for row in self.tried() if row.condition == self.chosen)

    def accuracy(self) -> list[Accuracy]:
        """The chosen setting, `none` and the A/A control on the test items (split ``test``) and on other tasks (``all``)."""
        rows: list[Accuracy] = []
        for row in self.table(
            "tuned", columns_of(Accuracy, newer=False), newer=columns_of(Accuracy, newer=True)
        ).to_pylist():
            rows.append(Accuracy(**{key: plain(value) for key, value in row.items()}))
        return rows

    def on_test(self) -> Accuracy:
        """The chosen setting on the test items."""
        return next(
            row for row in self.accuracy() if (row.split, row.metric, row.condition) == ("test", "pass@1", self.chosen)
        )
