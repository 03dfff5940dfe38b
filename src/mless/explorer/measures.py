"""Rows of tables as the page gets them, and metrics with their units."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from mless.results.nats import METRICS_OF_CHANGE, unit_of_change
from mless.results.placed import shown_metrics
from mless.results.reading import StoredStudy
from mless.results.readouts import READOUTS


def metric_rows(there: Collection[str]) -> list[dict[str, Any]]:
    """Each metric in words, with its unit and the factor it is shown times; those that pictures are about first."""
    first = shown_metrics(there)
    rest = [name for name in METRICS_OF_CHANGE if name in there and name not in first]
    return [
        {
            "name": name,
            "words": METRICS_OF_CHANGE[name].words,
            "unit": unit_of_change(name),
            "by": 100.0 if METRICS_OF_CHANGE[name].share else 1.0,
        }
        for name in [*first, *rest]
    ]


def readout_rows(names: Sequence[str], study: StoredStudy, condition: str) -> list[dict[str, str]]:
    """Each readout by its name for the command, and in words."""
    found: list[dict[str, str]] = []
    for name in names:
        row = READOUTS.get(name)
        scale = row.scale(row.metrics(study, condition)[0])
        found.append({"name": name, "words": scale.words, "meaning": scale.meaning})
    return found


def row_of(row: Any) -> dict[str, Any]:
    """A row of a table without the names that every row has."""
    return {key: value for key, value in asdict(row).items() if key not in ("model", "task")}
