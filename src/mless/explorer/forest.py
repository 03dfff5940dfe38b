"""One effect in several models: `mless compare` over the folders that measured the same thing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

from mless.errors import MlessError
from mless.explorer.asking import NotThere, Query, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.measures import readout_rows
from mless.explorer.views import Chosen, View
from mless.results.comparing import Block, Comparison, compare
from mless.results.escaping import visible
from mless.results.readouts import READOUTS, Scale, readouts_of


def comparison_rows(found: Comparison) -> dict[str, Any]:
    """A comparison as JSON, in the numbers that are shown."""
    return {
        "words": found.words,
        "readout": found.readout,
        "metric": found.metric,
        "layer": found.layer,
        "task": found.task,
        "items": found.items,
        "models": found.models,
        "nothing": found.scale.nothing,
        "ratio": found.scale.ratio,
        "change": found.scale.change,
        "blocks": [_block(block, found.scale) for block in found.blocks],
    }


def _block(block: Block, scale: Scale) -> dict[str, Any]:
    def shown(value: float) -> float | None:
        return scale.shown(value) if math.isfinite(value) else None

    pooled = block.pooled
    mean = {name: shown(getattr(pooled, name)) for name in ("mean", "lo", "hi", "predicted_lo", "predicted_hi")}
    rows = [
        {
            "label": visible(row.label, keep=""),
            "folder": visible(row.folder.name, keep=""),
            "n": row.reading.n,
            "weight": row.weight,
            **{name: shown(getattr(row.reading, name)) for name in ("value", "lo", "hi")},
        }
        for row in block.rows
    ]
    more = {name: getattr(pooled, name) for name in ("k", "p", "tau2", "i2")}
    return {"condition": block.condition, "rows": rows, "pooled": mean | more if pooled.k > 1 else None}


def _finished(folder: Folder) -> bool:
    try:
        return bool(folder.about().get("complete", True))
    except MlessError:
        return False


def alike(folders: Folders, folder: Folder) -> list[Folder]:
    """The finished folders that measured what this one did."""
    return [one for one in folders if _finished(one) and one.measured == folder.measured]


def fitting(first: Folder, others: list[Folder], readout: str) -> tuple[list[Folder], list[dict[str, Any]]]:
    """Those that can be compared with the first, and why each of the others cannot."""
    kept, refused = [first], []
    for one in others:
        if one.number == first.number:
            continue
        try:
            compare([folder.path for folder in [*kept, one]], readout=readout, conditions=["all"])
        except MlessError as fault:
            refused.append(
                {"folder": one.number, "name": visible(one.name, keep=""), "why": visible(str(fault), keep="")}
            )
        else:
            kept.append(one)
    return kept, refused


def _forest(query: Query) -> dict[str, Any]:
    first = query.folder()
    names = list(readouts_of(first.measured))
    if not names:
        raise NotThere(
            f"a study of {first.measured} has no effect that can be compared over models; there is {', '.join(READOUTS)}"
        )
    readout = query.word("readout", names, default=names[0])
    kept, refused = first.kept(
        ("fitting", readout, tuple(one.state() for one in query.folders)),
        lambda: fitting(first, alike(query.folders, first), readout),
    )
    conditions = [
        name
        for name, one in first.study.conditions.items()
        if name != "none" and not one.get("again") and all(name in folder.study.conditions for folder in kept)
    ]
    condition = query.word("condition", ["all", *conditions], default="all")
    row = READOUTS.get(readout)
    metrics = row.metrics(first.study, conditions[0])
    metric = query.word("metric", metrics, default=metrics[0])
    layer = query.whole("layer", 1, 100_000) if query.has("layer") and row.by_layer else None
    try:
        found = compare([one.path for one in kept], readout=readout, conditions=[condition], metric=metric, layer=layer)
    except MlessError as fault:
        raise NotThere(str(fault)) from None
    command = ["mless", "compare", *(one.place for one in kept), "--readout", readout]
    command += ["--condition", condition, *(["--metric", metric] if len(metrics) > 1 else [])]
    return comparison_rows(found) | {
        "readouts": readout_rows(names, first.study, conditions[0]),
        "metrics": metrics,
        "conditions": conditions,
        "condition": condition,
        "layers": first.about().get("layers") if row.by_layer else None,
        "refused": refused,
        "command": visible(shlex.join([*command, *(["--layer", str(layer)] if layer else [])]), keep=""),
    }


def _of(folder: Folder) -> bool:
    return bool(readouts_of(folder.measured)) and any(
        name != "none" and not one.get("again") for name, one in folder.study.conditions.items()
    )


def _exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
    for folder in filter(_of, filter(_finished, folders)):
        yield request_text("forest", folder=folder.number)
        for name in readouts_of(folder.measured):
            yield request_text("forest", folder=folder.number, readout=name)


VIEW = View("Forest", {"forest": _forest}, of=_of, exported=_exported)
