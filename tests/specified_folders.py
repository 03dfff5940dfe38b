"""Folders of `mless run multiverse` from numbers that are drawn, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mless.study.multiverse.tables import Cell, cells_of, tables_of_changes
from mless.study.spec import MultiverseTable
from mless.values import Condition
from written_folders import write_folder

CONDITIONS = {"mless": Condition("mless", "repeat", " /", 55), "mful": Condition("mful", "repeat", " he", 55)}
SCALES = {"solution": 0.004, "contrast": 0.1, "pass@1": 0.05}


def write_multiverse(
    path: Path,
    *,
    label: str = "SmolLM2-135M-Instruct",
    metrics: Sequence[str] = ("solution", "contrast"),
    conditions: Sequence[str] = ("mless",),
    left_out: str | None = "user",
    items: int = 40,
    seed: int = 1,
    **settings: Any,
) -> Path:
    """With a chat template there is an effect, in plain text there is none, and of the template `left_out` there are no numbers."""
    rng = np.random.default_rng(seed)
    by = {"accuracy" if name == "pass@1" else "likelihood" for name in metrics}
    chosen: dict[str, Any] = {"dtype": ["float32", "bfloat16"], "by": sorted(by, reverse=True)} | settings
    cells = cells_of(MultiverseTable(**chosen))
    reasons = {cell.folder: "no such template here" for cell in cells if cell.template == left_out}
    changes: dict[Cell, dict[str, np.ndarray]] = {}
    common = rng.normal(0, 1, (items, len(conditions)))
    for cell in cells:
        if cell.folder not in reasons:
            own = [name for name in metrics if (name == "pass@1") == (cell.readout == "accuracy")]
            effect = 0.9 if cell.template == "chat" else 0.0
            noise = common + rng.normal(0, 0.6, (items, len(conditions)))
            changes[cell] = {name: SCALES[name] * (effect + noise) for name in own}
    names = {"model": label, "task": "gsm8k"}
    tables = tables_of_changes(changes, cells, reasons, list(conditions), names, lambda metric: SCALES[metric], seed=0)
    about = {
        "complete": True,
        "measures": "multiverse",
        "study": {"name": "multiverse", "seed": 0},
        "items": [str(number) for number in range(items)],
        "task": "gsm8k",
        "model": {"label": label},
        "inner": sorted({cell.folder for cell in changes}),
        "conditions": {name: asdict(CONDITIONS.get(name) or Condition(name, "none")) for name in ("none", *conditions)},
    }
    return write_folder(path, about, tables)
