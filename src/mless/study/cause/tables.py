"""From each item's change in every run to ladder.parquet, cause.parquet and chain.parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float64

from mless.results.cause_rows import CAUSE, CHAIN, DIRECTIONS, LADDER, STEPS
from mless.results.schemas import table_of_rows
from mless.stats.intervals import mean_intervals
from mless.stats.ratios import ratios_of_means
from mless.stats.shares import holm, larger_p
from mless.study.cause.cells import Runs
from mless.study.composing import Changes

#: A filler that nobody sees changes nothing but the rounding. Where it changes no item by more (nats, or nats a token), nothing is claimed of it.
_ROUNDING = 1e-3

Row = dict[str, Any]
Column = Float64[np.ndarray, " items"]

#: Each change of the ladder as a sum of steps: (step, against, whether the whole is the sum of it and others).
_CHANGES: tuple[tuple[str, str | None, bool], ...] = (
    ("positions", "none", True),
    ("nobody", "none", False),
    ("question", "none", False),
    ("answer", "none", False),
    ("all", "none", False),
    ("nobody", "positions", True),
    ("question", "nobody", True),
    ("answer", "nobody", True),
    ("interaction", None, True),
)


def tables_of_changes(
    changes: Changes, runs: Runs, names: Mapping[str, str], *, seed: int, flips: int = 100_000
) -> Mapping[str, pa.Table]:
    """`changes` has a column for each of the runs' conditions, in their order."""
    ladder, cells, chain = list[Row](), list[Row](), list[Row]()
    for number, (metric, table) in enumerate(changes.items()):
        own = {**names, "condition": runs.filler.name, "metric": metric}
        by_name: dict[str, Column] = {one.name: column for one, column in zip(runs.conditions(), table.T, strict=True)}
        by_name["none"] = np.where(np.isnan(by_name[runs.filler.name]), np.nan, 0.0)
        rng = np.random.default_rng([seed, number])
        ladder += [own | row for row in _ladder(by_name, runs, rng, flips)]
        cells += [own | row for row in _cells(by_name, runs, rng, flips)]
        chain += [own | row for row in _chain(by_name, runs, rng, flips)]
    return {
        "ladder": table_of_rows(ladder, LADDER),
        "cause": table_of_rows(cells, CAUSE),
        "chain": table_of_rows(chain, CHAIN),
    }


def _tested(columns: Sequence[Column], rng: np.random.Generator, flips: int, names: Sequence[str]) -> list[Row]:
    """Mean, interval and p of each column of items. Both the sign-flip test and the interval have to reject: items may be skewed."""
    values = np.stack(columns, axis=1)
    found = mean_intervals(values)
    p = larger_p(values, rng, flips=flips, names=names)
    return [
        {"n": int(found.n[at]), "mean": float(found.mean[at]), "lo": float(found.lo[at]), "hi": float(found.hi[at])}
        | {"skewed": bool(found.skewed[at]), "p": float(p[at])}
        for at in range(values.shape[1])
    ]


def _corrected(rows: Sequence[Row]) -> None:
    for row, p in zip(rows, holm(np.array([row["p"] for row in rows], np.float64)).tolist(), strict=True):
        row["p_adjusted"] = p


def _ladder(by_name: Mapping[str, Column], runs: Runs, rng: np.random.Generator, flips: int) -> list[Row]:
    if not runs.ladder:
        return []
    at = {"none": by_name["none"], "all": by_name[runs.filler.name]}
    at |= {step: by_name[one.name] for step, one in runs.ladder.items()}
    columns = [
        at["all"] - at["question"] - at["answer"] + at["nobody"] if against is None else at[step] - at[against]
        for step, against, _ in _CHANGES
    ]
    rows: list[Row] = []
    tested = _tested(columns, rng, flips, [f"{step} against {against}" for step, against, _ in _CHANGES])
    for (step, against, adds_up), change, found in zip(_CHANGES, columns, tested, strict=True):
        if (step, against) == ("nobody", "positions") and not (np.abs(change) > _ROUNDING).any():
            found["p"] = 1.0
        rows.append({"step": step, "against": against, "adds_up": adds_up, "delta": found.pop("mean"), **found})
    rows = [row for row in rows if row["n"]]
    _corrected([row for row in rows if row["adds_up"]])
    return sorted(rows, key=lambda row: STEPS.index(row["step"]))


def _effect(by_name: Mapping[str, Column], runs: Runs, name: str, direction: str, base: str) -> tuple[Column, Column]:
    """What the patch does, and the whole that it is a share of; item by item."""
    patched, filler, start = by_name[name], by_name[runs.filler.name], by_name[base]
    return (patched - start if direction == "in" else filler - patched), filler - start


def _shares(parts: Sequence[Column], wholes: Sequence[Column]) -> list[Row]:
    part, whole = np.stack(parts, axis=1), np.stack(wholes, axis=1)
    found, around = ratios_of_means(part, whole), mean_intervals(np.where(np.isnan(part), np.nan, whole))
    return [
        {"share": float(found.value[at]), "share_lo": float(found.lo[at]), "share_hi": float(found.hi[at])}
        | {"whole": float(around.mean[at]), "whole_lo": float(around.lo[at]), "whole_hi": float(around.hi[at])}
        for at in range(part.shape[1])
    ]


def _cells(by_name: Mapping[str, Column], runs: Runs, rng: np.random.Generator, flips: int) -> list[Row]:
    if not runs.cells:
        return []
    both = [_effect(by_name, runs, one.condition.name, one.direction, one.base) for one in runs.cells]
    parts, wholes = [part for part, _ in both], [whole for _, whole in both]
    rows: list[Row] = []
    tested = _tested(parts, rng, flips, [one.condition.name for one in runs.cells])
    for one, found, share in zip(runs.cells, tested, _shares(parts, wholes), strict=True):
        place = {"layer": one.layer, "part": one.part, "head": one.head, "direction": one.direction, "base": one.base}
        rows.append(place | {"effect": found.pop("mean"), **found, **share})
    rows = [row for row in rows if row["n"]]
    _corrected(rows)
    return rows


def _chain(by_name: Mapping[str, Column], runs: Runs, rng: np.random.Generator, flips: int) -> list[Row]:
    if not runs.chain:
        return []
    links = [(link, direction, one.name) for (link, direction), one in runs.chain.items()]
    arm = runs.arm
    links += [("arm", "in", arm.name)] if arm is not None else []
    both = {(link, way): _effect(by_name, runs, name, way, "none") for link, way, name in links}
    for way in DIRECTIONS:
        through = ("both", way) if ("both", way) in both else ("attention-output", way)
        part, whole = both[through]
        both["elsewhere", way] = whole - part, whole
    parts, wholes = [part for part, _ in both.values()], [whole for _, whole in both.values()]
    rows: list[Row] = []
    tested = _tested(parts, rng, flips, [" ".join(key) for key in both])
    for (link, way), found, share in zip(both, tested, _shares(parts, wholes), strict=True):
        said: Row = {}
        if runs.moved is not None:
            said["moved"] = {"arm": runs.moved.arm, "mlp-activation": runs.moved.filler}.get(link)
            said["note"] = runs.moved.note if link == "arm" else None
        rows.append({"link": link, "direction": way, "effect": found.pop("mean"), **found, **share, **said})
    return [row for row in rows if row["n"]]
