"""Rows of tables as the page gets them, and metrics with their units."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from mless.results.nats import METRICS_OF_CHANGE, unit_of_change
from mless.results.placed import shown_metrics


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


def row_of(row: Any) -> dict[str, Any]:
    """A row of a table without the names that every row has."""
    return {key: value for key, value in asdict(row).items() if key not in ("model", "task")}
