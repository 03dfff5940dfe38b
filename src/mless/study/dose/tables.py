"""From each item's change in every cell to dose.parquet and dose_tests.parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64

from mless import stats
from mless.results.folder import ResultFolder
from mless.results.schemas import DOSE, DOSE_TESTS, plain, table_of_rows
from mless.stats.dose import best_dose, dose_curve
from mless.study.composing import Changes, changes_in
from mless.values import Condition

Row = dict[str, Any]


def dose_tables(
    inner: Mapping[str, ResultFolder],
    cells: Mapping[str, Condition],
    *,
    dev_share: float,
    seed: int,
    flips: int,
) -> Mapping[str, pa.Table]:
    """Every metric of the inner folder."""
    about = inner["likelihood"].about() or {}
    names = {"model": about["model"]["label"], "task": about["task"]}
    changes = changes_in(inner, about["items"], list(cells))
    dev = stats.split_items(about["items"], dev_share, seed)
    return tables_of_changes(changes, cells, names, dev, seed=seed, flips=flips)


def tables_of_changes(
    changes: Changes,
    cells: Mapping[str, Condition],
    names: Mapping[str, str],
    dev: Bool[np.ndarray, " items"],
    *,
    seed: int,
    flips: int = 100_000,
) -> Mapping[str, pa.Table]:
    """Each curve's points and tests; `changes` has a column for each cell."""
    places = list(cells)
    curves: dict[tuple[str, str], list[str]] = {}
    for name, cell in cells.items():
        filler = name.removesuffix(f"-{cell.length}-{cell.placement}")
        curves.setdefault((filler, cell.placement), []).append(name)
    points, tests = list[Row](), list[Row]()
    for number, (metric, table) in enumerate(changes.items()):
        of_metric: list[Row] = []
        for at, ((filler, placement), cell_names) in enumerate(curves.items()):
            own = {**names, "metric": metric, "filler": filler, "placement": placement}
            mine = table[:, [places.index(name) for name in cell_names]]
            rng = np.random.default_rng([seed, number, at])
            found, test = _curve(mine, [cells[name].length for name in cell_names], dev, rng, flips)
            points += [own | {"condition": name} | row for name, row in zip(cell_names, found, strict=False)]
            of_metric += [own | {"condition": filler} | test] if test else []
        _correct(of_metric)
        tests += of_metric
    return {"dose": table_of_rows(points, DOSE), "dose_tests": table_of_rows(tests, DOSE_TESTS)}


def _curve(
    changes: Float64[np.ndarray, "items doses"],
    lengths: Sequence[int],
    dev: Bool[np.ndarray, " items"],
    rng: np.random.Generator,
    flips: int,
) -> tuple[list[Row], Row | None]:
    curve = dose_curve(changes, lengths, rng, flips=flips)
    if not curve.n:
        return [], None
    columns = ("lo", "hi", "lo_all", "hi_all", "p", "p_adjusted")
    points = [
        {"length": length, "n": curve.n, "delta": float(curve.mean[at]), "skewed": bool(curve.skewed[at])}
        | {name: float(getattr(curve, name)[at]) for name in columns}
        for at, length in enumerate(lengths)
    ]
    best = best_dose(changes, lengths, dev, rng, flips=flips)
    slope = {
        "slope": curve.slope.value,
        "slope_lo": curve.slope.lo,
        "slope_hi": curve.slope.hi,
        "slope_p": curve.slope.p,
    }
    peak = {"peak_length": curve.peak.dose, "peak_p": curve.peak.p}
    dev_items = {"best_length": best.dose, "dev_n": best.dev_items, "dev_delta": best.dev}
    others = {"test_n": best.items, "test_delta": best.value, "test_lo": best.lo, "test_hi": best.hi, "test_p": best.p}
    return points, {"n": curve.n} | slope | peak | dev_items | others


def _correct(rows: Sequence[Row]) -> None:
    """Several curves are several tests: Holm over those of a metric. And one of them is the best on the dev items."""
    for name in ("slope_p", "peak_p"):
        adjusted = stats.holm(np.array([row[name] for row in rows], np.float64))
        for row, p in zip(rows, adjusted.tolist(), strict=True):
            row[f"{name}_adjusted"] = p
    known = [row["dev_delta"] for row in rows if plain(row["dev_delta"]) is not None]
    for row in rows:
        row["chosen"] = bool(known) and row["dev_delta"] == max(known)
