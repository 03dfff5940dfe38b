"""How much filler, and where: curves of Δ by length, as `mless run dose` left them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mless.explorer.asking import Query, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.measures import metric_rows, row_of
from mless.explorer.views import Chosen, View
from mless.results.placed import PUBLISHED_DOSES, StoredDose


def _dose(query: Query) -> dict[str, Any]:
    """Points and tests of every filler, place and metric."""
    folder = query.folder()
    stored = StoredDose(folder.path, folder.about())
    points = stored.points()
    return {
        "title": stored.title,
        "metrics": metric_rows({row.metric for row in points}),
        "points": [row_of(row) for row in sorted(points, key=lambda row: row.length)],
        "tests": [row_of(row) for row in stored.tests()],
        "published": PUBLISHED_DOSES,
    }


def _of(folder: Folder) -> bool:
    return folder.measured == "dose" and folder.has("dose", "dose_tests")


def _exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
    return (request_text("dose", folder=folder.number) for folder in folders if _of(folder))


VIEW = View("Dose", {"dose": _dose}, of=_of, exported=_exported)
