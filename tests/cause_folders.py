"""Folders of `mless run cause` from numbers that are drawn, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mless.changes import Part
from mless.study.cause.cells import Moved, Runs, cells, chain, ladder
from mless.study.cause.tables import tables_of_changes
from mless.values import ArmSettings, Condition
from written_folders import write_folder

SCALES = {"solution": 0.02, "contrast": 0.4, "answer": 0.4, "pass@1": 0.05}
FILLER = Condition("mless", "repeat", " /", 55)


def write_cause(
    path: Path,
    *,
    label: str = "SmolLM2-135M-Instruct",
    metrics: Sequence[str] = ("solution", "contrast"),
    layers: int = 12,
    parts: Sequence[Part] = ("attention-output", "mlp-output", "residual"),
    heads: Sequence[int] = (),
    items: int = 40,
    whole: float = 2.0,
    activation: bool = True,
    seed: int = 1,
    of: Sequence[str] = ("ladder", "map", "chain"),
) -> Path:
    """Most of the effect is the question's; in the map layer 3's attention output carries it, and every later residual stream.

    `of`: which of the three the study has. `whole`: the effect in units of the items' spread; at 0 there is none, and no share is known.
    """
    rng = np.random.default_rng(seed)
    places = cells(FILLER, range(1, layers + 1), parts, heads, ("all",)) if "map" in of else []
    moved = Moved(0.42, 0.31, ArmSettings(fraction=0.3), "ARM moves them by 0.31 at most, and the filler by 0.42")
    links = chain(FILLER, ("all",), activation=activation) if "chain" in of else {}
    runs = Runs(FILLER, ladder(FILLER) if "ladder" in of else {}, places, links, moved if activation else None)
    share = {"positions": 0.1, "seen-by-nobody": 0.15, "seen-by-question": 0.8, "seen-by-answer": 0.3, "mless": 1.0}
    for one in places:
        carried = {"attention-output": 0.7 * (one.layer == 3), "residual": 0.9 * (one.layer >= 3)}.get(one.part, 0.0)
        if one.head is not None:
            carried *= one.head == 2
        share[one.condition.name] = carried if one.direction == "in" else 1 - carried
    changes = {}
    for metric in metrics:
        by = whole * SCALES[metric] * np.array([share.get(one.name, 0.05) for one in runs.conditions()])
        noise = rng.normal(0, 1, (items, 1)) * by / max(whole, 1) + SCALES[metric] * rng.normal(
            0, 0.3, (items, len(by))
        )
        changes[metric] = by + noise
    tables = tables_of_changes(changes, runs, {"model": label, "task": "gsm8k"}, seed=0)
    about = {
        "complete": True,
        "measures": "cause",
        "study": {"name": "cause", "seed": 0, "cause": {"of": list(of)}},
        "items": [str(number) for number in range(items)],
        "task": "gsm8k",
        "model": {"label": label, "layers": layers},
        "inner": ["likelihood"],
        "conditions": {one.name: asdict(one) for one in (Condition("none", "none"), *runs.conditions())},
    }
    return write_folder(path, about, tables)
