"""Named fillers among arbitrary edits, as `mless run placebo` left them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mless.conditions import EDITS
from mless.explorer.asking import Query, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.measures import metric_rows, row_of
from mless.explorer.views import Chosen, View
from mless.results.placed import StoredPlacebo

#: Characters of an edit's text that are shown.
_TEXT = 120


def _placebo(query: Query) -> dict[str, Any]:
    """Every edit's Δ with its text, and the fillers."""
    folder = query.folder()
    stored = StoredPlacebo(folder.path, folder.about())
    placed = stored.placed()
    rows: list[dict[str, Any]] = stored.table(
        "edits", ["condition", "kind", "metric", "delta", "lo", "hi", "text"]
    ).to_pylist()
    return {
        "title": stored.title,
        "metrics": metric_rows({row.metric for row in placed}),
        "fillers": [row_of(row) for row in placed],
        "kinds": {name: one.what for name, one in EDITS.items()},
        "edits": [row | {"text": str(row["text"] or "")[:_TEXT]} for row in rows],
    }


def _of(folder: Folder) -> bool:
    return folder.measured == "placebo" and folder.has("placebo", "edits")


def _exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
    return (request_text("placebo", folder=folder.number) for folder in folders if _of(folder))


VIEW = View("Placebo", {"placebo": _placebo}, of=_of, exported=_exported)
