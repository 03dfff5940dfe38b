"""Result folders of several models: real studies on tiny random models, and answers and likelihoods that look like real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import scipy.stats

import mless
from mless.results.schemas import EFFECTS, LIKELIHOOD, table_of_rows
from models.tiny_models import save_model
from synthetic import write_answers

FAMILIES = ("llama", "qwen2", "gpt2", "gpt_neox")


def measured(root: Path, study: str, families: Sequence[str] = FAMILIES, **changes: Any) -> dict[str, Path]:
    """Family → the folder of a study of a tiny random model of it."""
    settings = {
        "limit": 5,
        "length": 5,
        "prompt": "raw",
        "system": "Think.",
        "conditions": ["none", "mless", "mful"],
    } | changes
    found: dict[str, Path] = {}
    for family in families:
        model = save_model(root / "models" / f"tiny-{family}", family)
        found[family] = mless.run(study, root / f"{study}-{family}", model=str(model), **settings).folder
    return found


def answered(root: Path, label: str, number: int = 0, *, about: Mapping[str, Any] | None = None, **more: Any) -> Path:
    """A folder of answers of one of several models, which differ in label, fingerprint and luck."""
    model = {
        "name": f"org/{label}", "label": label, "family": ("llama", "gpt2")[number % 2], "layers": 30, "heads": 9, "fingerprint": f"{number:032x}",
        "activation": ("silu", "gelu_new")[number % 2], "parameters": 10 ** (7 + number),
    }  # fmt: skip
    effects = {"mless": 0.03 * number, "mful": -0.05 * number}
    return write_answers(
        root / f"answers-{number}",
        label=label,
        effects=effects,
        seed=number,
        about={"model": model} | dict(about or {}),
        **more,
    )


def likelihoods(
    path: Path, rows: Sequence[Mapping[str, Any]], *, label: str = "model", about: Mapping[str, Any] | None = None
) -> Path:
    """A folder with effects.parquet and likelihood.parquet, as a likelihood study leaves it. Its items vary as the intervals say."""
    common = {"model": label, "task": "gsm8k", "none": -1.0, "value": -0.9, "p": 0.01, "p_adjusted": 0.02, "mde": 0.1}
    common |= {"equivalent_p": 0.5, "skewed": False, "verdict": "rises"}
    path.mkdir(parents=True)
    pq.write_table(table_of_rows([common | dict(row) for row in rows], EFFECTS), path / "effects.parquet")
    changes = {(str(row["condition"]), str(row["metric"])): _varying(row) for row in rows}
    for (_, metric), found in tuple(changes.items()):
        changes.setdefault(("none", metric), [0.0] * len(found))
    items = [
        {
            "model": label,
            "task": "gsm8k",
            "condition": condition,
            "item": str(number),
            "metric": metric,
            "value": change - 1.0,
            "delta": change,
            "n_tokens": 1,
        }
        for (condition, metric), found in changes.items()
        for number, change in enumerate(found)
    ]
    pq.write_table(table_of_rows(items, LIKELIHOOD), path / "likelihood.parquet")
    conditions = {"none": {"kind": "none"}} | {
        row["condition"]: {"kind": "repeat", "filler": " /", "length": 55, "placement": "before-question"}
        for row in rows
    }
    told = {
        "format": 2, "measures": "likelihood", "complete": True, "task": "gsm8k", "prompt": "chat", "items": [str(n) for n in range(40)],
        "study": {"name": "likelihood", "seed": 0, "likelihood": {"others": 16, "engine": "hf"}}, "conditions": conditions, "seeds": {"study": 0},
        "model": {"name": label, "label": label, "fingerprint": label}, **(about or {}),
    }  # fmt: skip
    (path / "study.json").write_text(json.dumps(told), encoding="utf-8")
    return path


def _varying(row: Mapping[str, Any]) -> list[float]:
    """Changes of `n` items, as many above the mean as below, whose mean has the row's 95 % interval."""
    n, away = row["n"], 0.0
    if row["lo"] is not None:
        error = (row["hi"] - row["lo"]) / 2 / float(scipy.stats.t.ppf(0.975, n - 1))
        away = error * math.sqrt(n * (n - 1) / (2 * (n // 2)))
    return [row["delta"] + away * sign for sign in [1, -1] * (n // 2) + [0] * (n % 2)]
