"""Folders of `mless run placebo` from numbers that are drawn, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mless.study.grids import placebo_conditions
from mless.study.placebo.tables import tables_of_changes
from mless.values import Condition
from written_folders import write_folder

FILLERS = (Condition("mless", "repeat", " /", 55), Condition("mful", "repeat", " he", 55), Condition("random", "text", None, 55))  # fmt: skip
#: Between-edit sd, and the mean of all edits.
SPREADS = {"solution": (0.004, -0.002), "contrast": (0.08, 0.03), "pass@1": (0.02, -0.01), "choice": (0.02, 0.0)}
MARGINS = {"solution": 0.005, "contrast": 0.1, "pass@1": 0.02, "choice": 0.02}


def write_placebo(
    path: Path,
    *,
    label: str = "SmolLM2-135M-Instruct",
    metrics: Sequence[str] = ("solution", "contrast"),
    edits: int = 40,
    items: int = 60,
    specific: Sequence[float] = (4.0, -1.0, 0.0),
    seed: int = 1,
) -> Path:
    """`specific` says how many between-edit sds each filler lies above the mean of all edits."""
    rng = np.random.default_rng(seed)
    drawn = placebo_conditions(edits)
    changes = {}
    for metric in metrics:
        sd, mean = SPREADS[metric]
        effects = np.concatenate([rng.normal(mean, sd, edits), mean + sd * np.array(specific)])
        by_item = rng.normal(0, 3 * sd, (items, 1)) + rng.normal(0, 2 * sd, (items, edits + len(FILLERS)))
        changes[metric] = effects + by_item
    names = {"model": label, "task": "gsm8k"}
    fillers = [one.name for one in FILLERS]
    tables = tables_of_changes(changes, drawn, fillers, names, MARGINS.__getitem__, None, seed=0)
    conditions = [Condition("none", "none"), *FILLERS, *drawn]
    about = {
        "complete": True,
        "measures": "placebo",
        "study": {"name": "placebo", "seed": 0},
        "items": [str(number) for number in range(items)],
        "task": "gsm8k",
        "model": {"label": label},
        "inner": ["likelihood"],
        "conditions": {one.name: asdict(one) for one in conditions},
    }
    return write_folder(path, about, tables)
