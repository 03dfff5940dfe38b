"""A likelihood study: what each condition does to each metric, items ranked by their change, and one solution token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from jaxtyping import Float64

from mless.explorer.asking import NotThere, Query, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.listing import page_of
from mless.explorer.questions import prompt_of
from mless.explorer.views import Chosen, View
from mless.results.along import binned, bins_of
from mless.results.nats import LIKELIHOOD_METRICS, unit_of_change, weighed
from mless.results.reading import StoredLikelihood

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

SORTS = ("rises", "drops", "size", "item")
#: Tokens of a solution, and texts scored after a prompt, that are shown.
MOST_TOKENS, MOST_CANDIDATES = 20_000, 64
TEXT = 4000


def _stored(folder: Folder) -> StoredLikelihood:
    return StoredLikelihood(folder.path, folder.about())


def _compared(folder: StoredLikelihood) -> list[str]:
    """Conditions that have a change, the usual one first chosen."""
    return [name for name in folder.conditions if name != "none"]


def _usual(folder: StoredLikelihood) -> str:
    others = [name for name in _compared(folder) if name != folder.control] or _compared(folder)
    return next((name for name in (folder.study.get("primary"), "mless") if name in others), others[0])


def _effects(query: Query) -> dict[str, Any]:
    """Every effect of the folder, and a page of items ranked by one condition's change of one metric."""
    folder = _stored(query.folder())
    effects, tokens = folder.effects(), folder.solution_length()
    metrics = list(dict.fromkeys(row.metric for row in effects))
    conditions = _compared(folder)
    condition = query.word("condition", conditions, default=_usual(folder))
    metric = query.word("metric", metrics, default=metrics[0])
    return {
        "title": folder.title,
        "control": folder.control,
        "condition": condition,
        "metric": metric,
        "metrics": [
            {
                "name": name,
                "words": LIKELIHOOD_METRICS[name].words,
                "unit": unit_of_change(name),
                "by": 100.0 if LIKELIHOOD_METRICS[name].share else 1.0,
            }
            for name in metrics
        ],
        "conditions": conditions,
        "effects": [
            {key: value for key, value in asdict(row).items() if key not in ("model", "task")}
            | {"words": weighed(row.metric, row.delta, tokens) if row.verdict in ("rises", "drops") else ""}
            for row in effects
        ],
        "scored": _scored(metrics),
        "solutions": "solution" in metrics,
        **_ranked(folder, condition, metric, query),
    }


#: What is scored, by the metrics that say something of it.
_SCORED = {
    "the reference solution": ("solution",),
    "the answer": ("answer", "contrast", "answer-after-solution"),
    "the options": ("choice", "choice-normalised", "margin", "margin-normalised"),
}


def _scored(metrics: Collection[str]) -> str:
    """``the reference solution and the answer``: what of each item a folder has log-probabilities of."""
    found = [words for words, about in _SCORED.items() if set(about) & set(metrics)]
    return " and ".join([", ".join(found[:-1]), *found[-1:]] if len(found) > 1 else found)


def _ranked(folder: StoredLikelihood, condition: str, metric: str, query: Query) -> dict[str, Any]:
    where = (pc.field("condition") == condition) & (pc.field("metric") == metric)
    table = folder.table("likelihood", ["item", "value", "delta", "n_tokens"], where)
    every = table["delta"].to_numpy().astype(np.float64)
    if text := query.text("search").strip()[:200]:
        table = table.filter(pc.match_substring(table["item"], text, ignore_case=True))
    delta = table["delta"].to_numpy().astype(np.float64)
    places = pc.index_in(table["item"], value_set=pa.array(folder.items, pa.string())).to_numpy(zero_copy_only=False)
    sort = query.word("sort", SORTS, default="rises")
    key = {"rises": -delta, "drops": delta, "size": -np.abs(delta), "item": places}[sort]
    order = np.argsort(key, kind="stable")
    at = page_of(query, len(order))
    rows = table.take(pa.array(order[at.start : at.stop])).to_pylist()
    return {
        "sort": sort,
        "found": len(order),
        "page": at.page,
        "pages": at.pages,
        "rows": [
            {
                "item": row["item"],
                "number": int(number) + 1,
                "value": row["value"],
                "none": row["value"] - row["delta"],
                "delta": row["delta"],
                "tokens": row["n_tokens"],
            }
            for row, number in zip(rows, places[order[at.start : at.stop]], strict=True)
        ],
        "limits": None if not len(every) else [float(np.nanmin(every)), float(np.nanmax(every))],
    }


def _along(query: Query) -> dict[str, Any]:
    """Where along the solution one condition changes it: the mean over items in bins of 1, 1, 2, 4, 8 … tokens."""
    here = query.folder()
    folder = _stored(here)
    condition = query.word("condition", _compared(folder), default=_usual(folder))
    found: dict[str, Any] = {"title": folder.title, "condition": condition, "items": 0, "bins": []}
    if not here.has("tokens"):
        return found
    return found | here.kept(("along", condition), lambda: _bins(folder.solution_changes([condition])[condition]))


def _bins(deltas: Mapping[str, Float64[np.ndarray, " _"]]) -> dict[str, Any]:
    if not deltas:
        return {}
    mean, places = binned(deltas), bins_of(max(map(len, deltas.values())))
    bins = [
        {"first": first, "last": last, "delta": mean.mean[at], "lo": mean.lo[at], "hi": mean.hi[at], "n": mean.n[at]}
        for at, (first, last) in enumerate(places)
        if not np.isnan(mean.mean[at])
    ]
    return {"items": len(deltas), "bins": bins}


def _item(query: Query) -> dict[str, Any]:
    """One item: every token of its solution with its log p without and with, and what else was scored."""
    folder = _stored(query.folder())
    item = query.text("item")
    if item not in folder.items:
        raise NotThere(
            f"item: no {item[:60]!r} here; there are {len(folder.items):,}, the first is {folder.items[0][:60]!r}"
        )
    conditions = _compared(folder)
    condition = query.word("condition", conditions, default=_usual(folder))
    found: dict[str, Any] = {
        "title": folder.title,
        "item": item,
        "number": folder.items.index(item) + 1,
        "items": len(folder.items),
        "condition": condition,
        "conditions": conditions,
        "tokens": [],
        "left_out": 0,
        "candidates": [],
        "scores": _scores(folder, item, condition),
        "question": _question(folder, item),
        "prompt": prompt_of(query.folder(), condition),
        "solutions": any(row.metric == "solution" for row in folder.effects()),
    }
    if (folder.path / "tokens.parquet").exists():
        tokens = _tokens(folder, item, condition)
        found["tokens"], found["left_out"] = tokens[:MOST_TOKENS], max(0, len(tokens) - MOST_TOKENS)
    if (folder.path / "candidates.parquet").exists():
        before, after = (folder.candidates(name, item) for name in ("none", condition))
        found["candidates"] = [
            {
                "role": old["role"],
                "text": old["text"][:TEXT],
                "tokens": old["n_tokens"],
                "none": old["logp"],
                "value": new["logp"],
                "delta": new["logp"] - old["logp"],
            }
            for old, new in list(zip(before, after, strict=False))[:MOST_CANDIDATES]
        ]
    return found


def _tokens(folder: StoredLikelihood, item: str, condition: str) -> list[dict[str, Any]]:
    where = (pc.field("item") == item) & pc.field("condition").isin(["none", condition])
    columns = ["condition", "position", "text", "logp", "entropy", "kl", "agree"]
    rows: list[dict[str, Any]] = folder.table("tokens", columns, where).to_pylist()
    by_place: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_place.setdefault(row["position"], {})[row["condition"]] = row
    found: list[dict[str, Any]] = []
    for place, both in sorted(by_place.items()):
        if not {"none", condition} <= set(both):
            continue
        old, new = both["none"], both[condition]
        found.append(
            {
                "position": place,
                "text": old["text"],
                "none": old["logp"],
                "value": new["logp"],
                "delta": new["logp"] - old["logp"],
                "entropy": new["entropy"],
                "kl": new["kl"],
                "agree": new["agree"],
            }
        )
    return found


def _scores(folder: StoredLikelihood, item: str, condition: str) -> list[dict[str, Any]]:
    where = (pc.field("item") == item) & (pc.field("condition") == condition)
    rows: list[dict[str, Any]] = folder.table("likelihood", ["metric", "value", "delta", "n_tokens"], where).to_pylist()
    order = list(LIKELIHOOD_METRICS)
    return [
        {
            "metric": row["metric"],
            "none": row["value"] - row["delta"],
            "value": row["value"],
            "delta": row["delta"],
            "tokens": row["n_tokens"],
            "unit": unit_of_change(row["metric"]),
            "by": 100.0 if LIKELIHOOD_METRICS[row["metric"]].share else 1.0,
        }
        for row in sorted(rows, key=lambda row: order.index(row["metric"]))
    ]


def _question(folder: StoredLikelihood, item: str) -> str | None:
    """The item's prompt without filler, where it is stored."""
    asked: Any = folder.about.get("questions")
    if isinstance(asked, dict) and item in asked:
        return str(asked[item])[:TEXT]
    if not (folder.path / "prompts.parquet").exists():
        return None
    where = (pc.field("condition") == "none") & (pc.field("item") == item)
    rows: list[dict[str, Any]] = folder.table("prompts", ["text"], where).to_pylist()
    return str(rows[0]["text"])[:TEXT] if rows else None


# ---- the export ------------------------------------------------------------------------------------------------------------

#: Items whose tokens an exported file holds for each condition: those that change most.
EXPORTED_ITEMS = 12


def _of(folder: Folder) -> bool:
    return folder.measured == "likelihood" and folder.has("effects", "likelihood") and bool(_compared(_stored(folder)))


def _exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
    for folder in filter(_of, folders):
        stored = _stored(folder)
        number = folder.number
        yield request_text("likelihood", all=1, folder=number)
        for condition in _compared(stored):
            if folder.has("tokens"):
                yield request_text("likelihood/along", condition=condition, folder=number)
            for metric in dict.fromkeys(row.metric for row in stored.effects()):
                yield request_text("likelihood", all=1, condition=condition, folder=number, metric=metric)
        named = [stored.items[at - 1] for at in chosen.items.get(number, ()) if at <= len(stored.items)]
        for condition in _compared(stored):
            deltas = stored.deltas(condition, "solution") or stored.deltas(condition, "answer")
            most = sorted(deltas, key=lambda item: -abs(deltas[item]))
            for item in dict.fromkeys([*named, *most[:EXPORTED_ITEMS]]):
                yield request_text("likelihood/item", condition=condition, folder=number, item=item)


VIEW = View(
    "Likelihood",
    {"likelihood": _effects, "likelihood/along": _along, "likelihood/item": _item},
    of=_of,
    exported=_exported,
)
