"""The map: every layer and head of every condition at once; for activations every layer and set of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mless.explorer.asking import NotThere, Query, numbers, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.slices import QUERIES, sums
from mless.explorer.views import Chosen, View
from mless.results.escaping import visible
from mless.results.reading import StoredActivations
from mless.results.wording import random_is_yardstick
from mless.stats import METRICS as _CHANGED
from mless.values import MASS_NAMES

METRICS = list(_CHANGED)
_NUMBERS = ("retained", "lo", "hi", "epsilon", "epsilon_lo", "epsilon_hi", "p", "p_adjusted", "uniform", "n_items")
_CHANGES = ("value", "none", "difference", "lo", "hi", "p_adjusted", "n_items")


def _has_map(folder: Folder) -> bool:
    if not folder.about().get("complete", True):
        return False
    return folder.has("retained") or (folder.measured == "activations" and folder.has("activations"))


def _map(query: Query) -> Mapping[str, Any]:
    folder = query.folder()
    if folder.has("retained"):
        queries = query.word("queries", QUERIES, default="original")
        return folder.kept(("map", queries), lambda: _shares(folder, queries), lambda found: 1 << 20)
    if folder.measured == "activations" and folder.has("activations"):
        metric = query.word("metric", METRICS, default=METRICS[0])
        scale = query.word("scale", _scales(folder), default=_scales(folder)[0])
        return folder.kept(("map", metric, scale), lambda: _activations(folder, metric, scale), lambda found: 1 << 18)
    raise NotThere(f"{folder.name} holds no map: its study measured {folder.measured}")


def _shares(folder: Folder, queries: str) -> dict[str, Any]:
    stored = folder.attention
    rows = [row for row in stored.retained(queries) if row["condition"] in stored.conditions]  # pyright: ignore[reportArgumentType]
    layers = sorted({row["layer"] for row in rows})
    heads = sorted({row["head"] for row in rows} - {0})
    conditions: list[dict[str, Any]] = []
    for name in stored.conditions:
        mine = {(row["layer"], row["head"]): row for row in rows if row["condition"] == name}
        if mine:
            conditions.append(
                {
                    "name": name,
                    "label": visible(name, keep=""),
                    "beside": random_is_yardstick(name, stored.conditions),
                    "heads": _grid(mine, layers, heads, _NUMBERS),
                    "layers": _grid(mine, layers, [0], _NUMBERS),
                }
            )
    return {
        "kind": "heads",
        "table": "retained",
        "queries": queries,
        "layers": layers,
        "columns": heads,
        "conditions": conditions,
        "curves": folder.has("attention"),
        "spans": list(MASS_NAMES) if folder.has("attention", "prompts") else [],
    }


def _grid(
    rows: Mapping[tuple[Any, Any], Mapping[str, Any]],
    layers: Sequence[Any],
    columns: Sequence[Any],
    wanted: Sequence[str],
) -> dict[str, list[Any]]:
    """Each number of each cell, layer by layer."""
    cells = [rows.get((layer, column), {}) for layer in layers for column in columns]
    found: dict[str, list[Any]] = {
        name: numbers([float("nan") if (value := cell.get(name)) is None else value for cell in cells])
        for name in wanted
    }
    return found | {"verdict": [cell.get("verdict") for cell in cells]}


def _mass(query: Query) -> Mapping[str, Any]:
    """Where attention goes in every head: means over the items that were read so far."""
    folder = query.folder()
    if not folder.has("attention", "prompts"):
        raise NotThere(f"{folder.name} holds no attention and prompts, so nothing is known of where attention goes")
    names = list(folder.study.conditions)
    added = sums(folder, names)
    if added is None:
        raise NotThere(
            f"{folder.name} is too large for a map of mass; open a head, or `mless figure mass` for one layer"
        )
    found: list[dict[str, Any]] = []
    for name, one in zip(names, added, strict=True):
        # Before the sums are: what is added meanwhile is then asked for again.
        so_far, complete = one.read, one.complete
        mass = one.mass()
        found.append(
            {
                "name": name,
                "label": visible(name, keep=""),
                "read": so_far,
                "complete": complete,
                "mass": {span: numbers(mass[..., at].reshape(-1)) for at, span in enumerate(MASS_NAMES)},
            }
        )
    return {"items": len(folder.study.items), "conditions": found, "complete": all(one["complete"] for one in found)}


# ---- activations -----------------------------------------------------------------------------------------------------


def _scales(folder: Folder) -> list[str]:
    return folder.kept(
        "scales", lambda: list(dict.fromkeys(folder.table("activations", ["scale"])["scale"].to_pylist()))
    )


def _activations(folder: Folder, metric: str, scale: str) -> dict[str, Any]:
    stored = StoredActivations(folder.path, folder.about())
    rows = [row for row in stored.changes(metric=metric, scale=scale) if row["condition"] in stored.conditions]
    layers = sorted({row["layer"] for row in rows})
    columns = list(dict.fromkeys(row["tokens"] for row in rows))
    conditions: list[dict[str, Any]] = []
    for name in stored.conditions:
        mine = {(row["layer"], row["tokens"]): row for row in rows if row["condition"] == name}
        if mine:
            conditions.append(
                {"name": name, "label": visible(name, keep=""), "heads": _grid(mine, layers, columns, _CHANGES)}
            )
    return {
        "kind": "activations",
        "table": "activations",
        "metric": metric,
        "metrics": METRICS,
        "scale": scale,
        "scales": _scales(folder),
        "layers": layers,
        "columns": columns,
        "conditions": conditions,
    }


def _exported(folders: Folders, chosen: Chosen) -> Iterable[str]:
    for folder in folders:
        if not _has_map(folder):
            continue
        if folder.has("retained"):
            yield from (request_text("map", folder=folder.number, queries=queries) for queries in QUERIES)
            if folder.has("attention", "prompts"):
                yield request_text("map/mass", folder=folder.number)
        else:
            yield request_text("map", folder=folder.number)
            for metric in METRICS:
                yield from (
                    request_text("map", folder=folder.number, metric=metric, scale=scale) for scale in _scales(folder)
                )


VIEW = View("Map", {"map": _map, "map/mass": _mass}, of=_has_map, exported=_exported)
