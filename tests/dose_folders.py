"""Folders of `mless run dose` from numbers that are drawn, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mless.study.dose.tables import tables_of_changes
from mless.study.grids import dose_conditions, dose_lengths
from mless.values import Condition
from written_folders import write_folder

FILLERS = {"mless": Condition("mless", "repeat", " /", 55), "mful": Condition("mful", "repeat", " he", 55)}
SCALES = {"solution": 0.004, "contrast": 0.1, "choice": 0.05}


def write_dose(
    path: Path,
    *,
    label: str = "SmolLM2-135M-Instruct",
    metrics: Sequence[str] = ("solution", "contrast"),
    fillers: Sequence[str] = ("mless", "mful"),
    placements: Sequence[str] = ("before-question", "before-answer"),
    most: int = 1000,
    points: int = 11,
    items: int = 60,
    seed: int = 1,
) -> Path:
    """Before the question the effect grows with the length; before the answer it has a peak; of all fillers but the first there is none."""
    rng = np.random.default_rng(seed)
    cells = dose_conditions(dose_lengths(most, points), [FILLERS[name] for name in fillers], placements)
    named = {one.name: one for one in cells[1:]}
    changes = {}
    for metric in metrics:
        by = SCALES[metric] * np.array([_effect(one, fillers[0], most) for one in named.values()])
        noise = rng.normal(0, 1, (items, 1)) + rng.normal(0, 0.7, (items, len(named)))
        changes[metric] = by + SCALES[metric] * noise
    dev = np.arange(items) % 2 == 0
    tables = tables_of_changes(changes, named, {"model": label, "task": "gsm8k"}, dev, seed=0)
    about = {
        "complete": True,
        "measures": "dose",
        "study": {"name": "dose", "seed": 0},
        "items": [str(number) for number in range(items)],
        "task": "gsm8k",
        "model": {"label": label},
        "inner": ["likelihood"],
        "conditions": {one.name: asdict(one) for one in cells},
    }
    return write_folder(path, about, tables)


def _effect(one: Condition, first: str, most: int) -> float:
    if not one.name.startswith(first):
        return 0.0
    share = np.log2(1 + one.length) / np.log2(1 + most)
    return float(2 * share if one.placement == "before-question" else 12 * share * (0.8 - share))
