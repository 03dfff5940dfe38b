"""Answers tables with known truth, and the folder that a finished accuracy study leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mless.results.folder import ResultFolder
from mless.results.schemas import ANSWERS
from mless.study.accuracy.tables import accuracy_table
from mless.study.spec import AccuracyTable
from mless.values import Condition

KNOWN = {
    "none": Condition("none", "none"),
    "none-again": Condition("none-again", "none", again=True),
    "mless": Condition("mless", "repeat", " /", 55),
    "mful": Condition("mful", "repeat", " he", 55),
    "random": Condition("random", "text", length=55),
    "other": Condition("other", "none", system="Think."),
    "vote": Condition("vote", "none", samples=8, temperature=0.7),
    "short": Condition("short", "repeat", " /", 10),
    "long": Condition("long", "repeat", " /", 100),
}


#: study.json of a folder that measured attention, with what every reader needs.
WITHOUT_ANSWERS: dict[str, Any] = {
    "study": {"name": "quick", "accuracy": None}, "conditions": {"none": {"kind": "none"}}, "items": ["1"], "task": "t",
    "prompt": "raw", "model": {"label": "m"},
}  # fmt: skip


def of(*names: str) -> dict[str, Condition]:
    return {name: KNOWN[name] for name in names}


def pair(gained: int, lost: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two conditions over n items; those that do not change are right and wrong in turn."""
    rest = np.arange(n - gained - lost) % 2 == 0
    yes, no = np.ones(n, dtype=bool), np.zeros(n, dtype=bool)
    return np.concatenate([no[:gained], yes[:lost], rest]), np.concatenate([yes[:gained], no[:lost], rest])


def rows_of(
    condition: str, correct: np.ndarray, clusters: list[str] | None = None, **changed: Any
) -> list[dict[str, Any]]:
    """One row per item and sample. A right answer says so in its text, a wrong one is a number of its own for each sample."""
    matrix = correct[:, None] if correct.ndim == 1 else correct
    found: list[dict[str, Any]] = []
    for (n, sample), right in np.ndenumerate(matrix):
        answer = "42" if right else str(1000 + sample)
        found.append(
            {
                "model": "m", "task": "t", "condition": condition, "item": f"q{n:04d}", "sample": sample, "seed": sample,
                "text": f"it is {answer}", "extracted": answer, "correct": bool(right), "why": "", "n_tokens": 10, "finish": "stop",
                "reference": "42", "how": "number", "disagree": False, "cluster": clusters[n] if clusters else None,
            }
            | changed
        )  # fmt: skip
    return found


def answers_of(judged: Mapping[str, np.ndarray], clusters: list[str] | None = None) -> pa.Table:
    rows = [row for name, correct in judged.items() for row in rows_of(name, correct, clusters)]
    return pa.Table.from_pylist(rows, schema=ANSWERS)


def asked_for(answers: pa.Table, **settings: Any) -> AccuracyTable:
    """Settings that draw as many samples as `none` has here."""
    samples = 1 + max(row["sample"] for row in answers.to_pylist() if row["condition"] == "none")
    return AccuracyTable(**({"samples": samples, "temperature": 0.7 if samples > 1 else 0.0} | settings))


def table_of(
    judged: Mapping[str, np.ndarray], clusters: list[str] | None = None, *, seed: int = 0, **settings: Any
) -> pa.Table:
    answers = answers_of(judged, clusters)
    return accuracy_table(answers, of(*judged), asked_for(answers, **settings), seed=seed)


def row_of(table: pa.Table, condition: str, metric: str = "pass@1", split: str = "all") -> dict[str, Any]:
    found = [
        row
        for row in table.to_pylist()
        if (row["condition"], row["metric"], row["split"]) == (condition, metric, split)
    ]
    assert len(found) == 1
    return found[0]


def write_folder(path: Path, answers: pa.Table, about_engine: dict[str, Any] | None = None, **settings: Any) -> Path:
    """As the runner leaves it."""
    asked = asked_for(answers, **settings)
    names = answers.column("condition").unique().to_pylist()
    folder = ResultFolder(path)
    folder.write_manifest(
        {
            "study": {"name": "accuracy", "accuracy": asked.model_dump()},
            "task": "t",
            "model": {"label": "m"},
            "conditions": {name: asdict(KNOWN[name]) for name in names},
            "engine": about_engine or {"engine": "hf", "mode": "row-stable", "slots": 16},
            "items": sorted(set(answers.column("item").to_pylist())),
            "seeds": {"study": 0},
        }
    )
    folder.write_table("answers", answers)
    folder.write_table("accuracy", accuracy_table(answers, of(*names), asked, seed=0))
    return path
