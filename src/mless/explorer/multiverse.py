"""One comparison in many specifications, as `mless run multiverse` left it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mless.explorer.asking import Query, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.measures import metric_rows, row_of
from mless.explorer.views import Chosen, View
from mless.results.specified import SETTINGS, StoredMultiverse, tally, varied

#: Specifications of one curve that are drawn.
MOST = 5000


def _multiverse(query: Query) -> dict[str, Any]:
    """The specification curve of every condition and metric, sorted by Δ, with the settings that vary."""
    folder = query.folder()
    stored = StoredMultiverse(folder.path, folder.about())
    rows, tests = stored.specifications(), stored.tests()
    curves: list[dict[str, Any]] = []
    for test in tests:
        own = [row for row in rows if (row.condition, row.metric) == (test.condition, test.metric)]
        known = sorted((row for row in own if row.delta is not None), key=lambda row: (row.delta, row.specification))
        curves.append(
            {
                "condition": test.condition,
                "metric": test.metric,
                "test": row_of(test),
                "words": tally(test),
                "varied": varied(sorted(known, key=lambda row: row.specification)),
                "rows": [row_of(row) for row in known[:MOST]],
                "reasons": sorted({row.reason for row in own if row.delta is None and row.reason}),
            }
        )
    return {
        "title": stored.title,
        "metrics": metric_rows({test.metric for test in tests}),
        "conditions": list(dict.fromkeys(test.condition for test in tests)),
        "settings": dict(SETTINGS),
        "curves": curves,
        "effects": [row_of(row) for row in stored.settings()],
    }


def _of(folder: Folder) -> bool:
    return folder.measured == "multiverse" and folder.has("specifications", "specification_tests")


def _exported(folders: Folders, chosen: Chosen) -> Iterator[str]:
    return (request_text("multiverse", folder=folder.number) for folder in folders if _of(folder))


VIEW = View("Multiverse", {"multiverse": _multiverse}, of=_of, exported=_exported)
