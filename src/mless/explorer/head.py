"""One head: its shares, its curve by position without and with filler, and its items by how far they shift."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mless.explorer.asking import NotThere, Query, numbers, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.slices import QUERIES, shares, sums
from mless.explorer.views import Chosen, View
from mless.results.along import fewest
from mless.results.escaping import visible
from mless.results.wording import random_is_yardstick


def asked_head(query: Query) -> tuple[Folder, str, int, int, str]:
    """Folder, condition, layer, head and query set of a request. A head that was not captured is not there."""
    folder = query.folder()
    if not folder.has("retained"):
        raise NotThere(f"{folder.name} holds no attention: its study measured {folder.measured}")
    condition = query.word("condition", [one for one in folder.study.conditions if one != "none"])
    layer, head = query.whole("layer", 1, 10_000), query.whole("head", 1, 10_000)
    captured = folder.kept("captured", lambda: folder.attention.captured())
    if head not in captured.get(layer, ()):
        raise NotThere(f"layer {layer} head {head} was not captured in {folder.name}")
    return folder, condition, layer, head, query.word("queries", QUERIES, default="original")


def _head(query: Query) -> Mapping[str, Any]:
    """The items of a head by shift: the furthest from 1 first."""
    folder, condition, layer, head, queries = asked_head(query)
    found = shares(folder)
    of = None if found is None else found.of(condition, queries, layer, head)
    study = folder.study
    beside = random_is_yardstick(condition, study.conditions)
    text = found.of("random", queries, layer, head) if found is not None and beside else None
    answer: dict[str, Any] = {
        "layer": layer,
        "head": head,
        "items": len(study.items),
        "prompts": folder.has("prompts"),
        "curves": folder.has("attention", "prompts"),
    }
    if of is None:
        return answer | {"shifts": None}
    with np.errstate(divide="ignore", invalid="ignore"):
        far = np.abs(np.log(of[0].astype(float)))
    order = np.argsort(np.where(np.isfinite(far), -far, np.inf), kind="stable")
    ids = study.items
    return answer | {
        "shifts": {
            "number": [int(at) + 1 for at in order],
            "item": [visible(ids[at], keep="") for at in order.tolist()],
            "retained": numbers(of[0][order]),
            "epsilon": numbers(of[1][order]),
            "uniform": numbers(of[2][order]),
            "random": None if text is None else numbers(text[0][order]),
        }
    }


def _curve(query: Query) -> Mapping[str, Any]:
    """Mean and band by aligned position, over the items read so far."""
    folder, condition, layer, head, queries = asked_head(query)
    study = folder.study
    names = {"without": "none", "with": condition}
    if random_is_yardstick(condition, study.conditions):
        names["text"] = "random"
    count = len(study.items)
    least = fewest(count)
    first = int(folder.attention.omit_first)
    curves: dict[str, Any] = {}
    read = []
    added = sums(folder, list(names.values()), layer)
    if added is None:
        raise NotThere(f"{folder.name} holds no attention by token and prompts, so it has no curves")
    for role, one in zip(names, added, strict=True):
        # Before the curve is: what is added meanwhile is then asked for again.
        so_far, complete = one.read, one.complete
        found = one.curve(queries, layer, head)
        read.append((so_far, complete))
        enough = found["n"] >= (least if complete else min(least, max(2, so_far // 2)))
        last = int(np.flatnonzero(enough).max(initial=first)) + 1
        curves[role] = {
            name: numbers(np.where(enough, found[name], np.nan)[first:last]) for name in ("mean", "lo", "hi")
        } | {"n": found["n"][first:last]}
    return {
        "first": first,
        "items": count,
        "read": min(one for one, _ in read),
        "complete": all(done for _, done in read),
        "curves": curves,
    }


def heads_shown(folder: Folder, chosen: Chosen) -> Iterator[tuple[str, int, int]]:
    """For each condition those heads of each layer whose shares are furthest from 1."""
    if not folder.about().get("complete", True) or not folder.has("retained"):
        return
    stored = folder.attention
    rows = [row for row in stored.retained("original") if row["head"] > 0 and row["retained"]]
    for condition in stored.conditions:
        mine = [row for row in rows if row["condition"] == condition]
        for layer in sorted({row["layer"] for row in mine}):
            here = [row for row in mine if row["layer"] == layer]
            far = sorted(here, key=lambda row: -abs(np.log(row["retained"])))
            yield from ((condition, layer, row["head"]) for row in far[: chosen.heads])


def furthest_head(folder: Folder, condition: str) -> tuple[int, int] | None:
    """Layer and head whose share is furthest from 1 under a condition; None where nothing was measured."""

    def find() -> tuple[int, int] | None:
        rows = [
            row
            for row in folder.attention.retained("original")
            if row["condition"] == condition and row["head"] > 0 and row["retained"]
        ]
        far = max(rows, key=lambda row: abs(np.log(row["retained"])), default=None)
        return None if far is None else (int(far["layer"]), int(far["head"]))

    return folder.kept(("furthest", condition), find)


def _exported(folders: Folders, chosen: Chosen) -> Iterable[str]:
    """All heads' items, and the curves of the heads that an export holds strips of."""
    for folder in folders:
        for condition, layer, head in heads_shown(folder, chosen):
            values = {
                "folder": folder.number,
                "condition": condition,
                "layer": layer,
                "head": head,
                "queries": "original",
            }
            yield request_text("head", **values)
            if folder.has("attention", "prompts"):
                yield request_text("head/curve", **values)


VIEW = View("Head", {"head": _head, "head/curve": _curve}, exported=_exported)
