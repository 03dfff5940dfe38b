"""What a filler's effect is made of, as `mless run cause` left it: the ladder, the map of layers and parts, the published chain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mless.explorer.asking import Query, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.measures import metric_rows, row_of
from mless.explorer.views import Answering, Chosen, View
from mless.results.cause_rows import LINKS, STEPS
from mless.results.caused import (
    CHANGE_WORDS,
    DIRECTION_WORDS,
    LINK_WORDS,
    PART_WORDS,
    STEP_WORDS,
    StoredCause,
    shown_at,
)


def _stored(query: Query) -> StoredCause:
    folder = query.folder()
    return StoredCause(folder.path, folder.about())


def _row(row: Any, p: float | None) -> dict[str, Any]:
    return row_of(row) | {"sure": shown_at(p)}


def _ladder(query: Query) -> dict[str, Any]:
    """Every rung and every change that adds up, by metric."""
    stored = _stored(query)
    steps = stored.steps()
    return {
        "title": stored.title,
        "metrics": metric_rows({row.metric for row in steps}),
        "rungs": [[step, STEP_WORDS[step]] for step in STEPS if step != "interaction"],
        "changes": list(CHANGE_WORDS.items()),
        "steps": [_row(row, row.p_adjusted) for row in steps],
    }


def _causes(query: Query) -> dict[str, Any]:
    """Every cell of the map. Rows are parts, and heads where the part is taken head by head."""
    stored = _stored(query)
    cells = stored.cells()
    parts = list(dict.fromkeys(row.part for row in cells))
    rows = sorted({(parts.index(row.part), row.head or 0) for row in cells})
    return {
        "title": stored.title,
        "metrics": metric_rows({row.metric for row in cells}),
        "layers": sorted({row.layer for row in cells}),
        "rows": [[parts[part], head or None] for part, head in rows],
        "parts": {part: PART_WORDS[part] for part in parts},
        "directions": DIRECTION_WORDS,
        "bases": {"none": "none", "positions": STEP_WORDS["positions"]},
        "cells": [_row(row, row.p_adjusted) for row in cells],
    }


def _chain(query: Query) -> dict[str, Any]:
    """Every link, and the whole effect that they are shares of."""
    stored = _stored(query)
    links = stored.links()
    wholes = [row for row in stored.steps() if (row.step, row.against) == ("all", "none")]
    return {
        "title": stored.title,
        "metrics": metric_rows({row.metric for row in links}),
        "links": [[link, LINK_WORDS[link]] for link in LINKS if any(row.link == link for row in links)],
        "directions": DIRECTION_WORDS,
        "rows": [_row(row, row.p) for row in links],
        "wholes": [row_of(row) for row in wholes],
    }


def _view(title: str, name: str, answering: Answering, *tables: str) -> View:
    def of(folder: Folder) -> bool:
        return folder.measured == "cause" and folder.has(*tables)

    def exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
        return (request_text(name, folder=folder.number) for folder in folders if of(folder))

    return View(title, {name: answering}, of=of, exported=exported)


LADDER = _view("Ladder", "ladder", _ladder, "ladder")
CAUSES = _view("Causes", "causes", _causes, "cause")
CHAIN = _view("Chain", "chain", _chain, "chain", "ladder")
