"""From each item's change under fillers and edits to placebo.parquet and edits.parquet."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from mless.results.folder import ResultFolder
from mless.results.schemas import EDIT_MEANS, PLACEBO, table_of_rows
from mless.stats.crossed import Placed, place_among
from mless.stats.intervals import mean_intervals
from mless.stats.planning import ChangeVerdict
from mless.study.composing import Changes, changes_in
from mless.values import Condition, condition_of

ALPHA = 0.05


def placebo_tables(
    inner: Mapping[str, ResultFolder],
    edit_names: Collection[str],
    margin_of: Callable[[str], float],
    tokenizer: Any,
    *,
    seed: int,
) -> Mapping[str, pa.Table]:
    """Every metric of the inner folders; all conditions but the edits are fillers."""
    about = next(iter(inner.values())).about() or {}
    conditions = [condition_of(name, one) for name, one in about["conditions"].items() if name != "none"]
    conditions = [one for one in conditions if not one.again]
    edits = [one for one in conditions if one.name in edit_names]
    fillers = [one for one in conditions if one not in edits]
    names = {"model": about["model"]["label"], "task": about["task"]}
    changes = changes_in(inner, about["items"], [one.name for one in (*edits, *fillers)])
    return tables_of_changes(changes, edits, [one.name for one in fillers], names, margin_of, tokenizer, seed=seed)


def tables_of_changes(
    changes: Changes,
    edits: Sequence[Condition],
    fillers: Sequence[str],
    names: Mapping[str, str],
    margin_of: Callable[[str], float],
    tokenizer: Any,
    *,
    seed: int,
) -> Mapping[str, pa.Table]:
    """Each filler among the edits, and the edits themselves; `changes` has the edits' columns first."""
    placed: list[dict[str, Any]] = []
    means: list[dict[str, Any]] = []
    for number, (metric, table) in enumerate(changes.items()):
        own = {**names, "metric": metric}
        rng = np.random.default_rng([seed, number])
        placed += _placed(table, fillers, len(edits), margin_of(metric), rng, own)
        means += _means(table[:, : len(edits)], edits, tokenizer, own)
    return {"placebo": table_of_rows(placed, PLACEBO), "edits": table_of_rows(means, EDIT_MEANS)}


def _placed(
    table: np.ndarray, fillers: Sequence[str], edits: int, margin: float, rng: np.random.Generator, own: dict[str, str]
) -> list[dict[str, Any]]:
    named = {name: table[:, edits + at] for at, name in enumerate(fillers)}
    crossed = place_among(table[:, :edits], named, rng)
    around = mean_intervals(table[:, edits:])
    rows: list[dict[str, Any]] = []
    for at, (name, one) in enumerate(crossed.placed.items()):
        if not one.n:
            continue
        of_edits = {
            "edits_mean": crossed.mean,
            "edits_lo": crossed.lo,
            "edits_hi": crossed.hi,
            "edits_sd": crossed.sd,
        }
        ends = {"delta_lo": float(around.lo[at]), "delta_hi": float(around.hi[at])}
        said = {"edits": crossed.edits, "margin": margin, "verdict": verdict_of(one, margin)}
        rows.append(own | {"condition": name} | asdict(one) | ends | of_edits | said)
    return rows


def verdict_of(placed: Placed, margin: float) -> ChangeVerdict:
    """Both p and the interval have to tell a filler from an arbitrary edit. *Equivalent*: the whole interval lies inside the margin."""
    if math.isnan(placed.specific_lo):
        return "undecided"
    if placed.p <= ALPHA and (placed.specific_lo > 0 or placed.specific_hi < 0):
        return "rises" if placed.specific > 0 else "drops"
    return "equivalent" if -margin < placed.specific_lo and placed.specific_hi < margin else "undecided"


def _means(table: np.ndarray, edits: Sequence[Condition], tokenizer: Any, own: dict[str, str]) -> list[dict[str, Any]]:
    found = mean_intervals(table)
    rows: list[dict[str, Any]] = []
    for at, one in enumerate(edits):
        if not found.n[at]:
            continue
        ids = one.filler_ids
        text = None if ids is None or tokenizer is None else tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        numbers = {"n": int(found.n[at]), "delta": float(found.mean[at]), "lo": float(found.lo[at]), "hi": float(found.hi[at])}  # fmt: skip
        what = {"condition": one.name, "kind": one.kind, "ids": None if ids is None else list(ids), "text": text}
        rows.append(own | what | numbers)
    return rows
