"""What the page of a cause study says in tables: the ladder, the cells that matter, the published chain."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mless.report.kinds import page_with
from mless.results.cause_rows import LINKS, STEPS, CauseCell, CauseLink, LadderStep
from mless.results.caused import (
    CHANGE_WORDS,
    DIRECTION_WORDS,
    LINK_WORDS,
    STEP_WORDS,
    StoredCause,
    place_of,
    share_words,
    shown_at,
)
from mless.results.nats import METRICS_OF_CHANGE, around, signed, unit_of_change

#: Cells of the map that the page lists; cause.parquet has all.
MOST = 24


def metrics_of(stored: StoredCause) -> list[dict[str, Any]]:
    """The tables of each metric."""
    steps, cells, links = stored.steps(), stored.cells(), stored.links()
    found: list[dict[str, Any]] = []
    there = {row.metric for row in (*steps, *cells, *links)}
    for metric in [name for name in METRICS_OF_CHANGE if name in there]:
        own = [row for row in cells if row.metric == metric]
        shown = sorted((row for row in own if shown_at(row.p_adjusted)), key=lambda row: -abs(row.effect))
        found.append(
            {
                "name": metric,
                "words": METRICS_OF_CHANGE[metric].words,
                "unit": unit_of_change(metric),
                "steps": list(_steps(row for row in steps if row.metric == metric)),
                "cells": [_of(row, place_of(row)) for row in shown[:MOST]],
                "shown": len(shown),
                "all_cells": len(own),
                "links": list(_links(row for row in links if row.metric == metric)),
            }
        )
    return found


def _steps(rows: Iterable[LadderStep]) -> Iterable[dict[str, Any]]:
    """Against none, in the ladder's order; then the changes that add up."""
    there = list(rows)
    for step in STEPS:
        for row in there:
            if row.step == step and row.against == "none":
                yield _said(row, STEP_WORDS[step]) | {"against": "none", "p_adjusted": None}
    for step, words in CHANGE_WORDS.items():
        for row in there:
            if row.step == step and row.adds_up:
                against = "all − question − answer + nobody" if row.against is None else row.against
                yield _said(row, words) | {"against": against, "p_adjusted": row.p_adjusted}


def _links(rows: Iterable[CauseLink]) -> Iterable[dict[str, Any]]:
    there = {(row.link, row.direction): row for row in rows}
    for link in LINKS:
        for direction in DIRECTION_WORDS:
            if (row := there.get((link, direction))) is not None:
                yield _of(row, LINK_WORDS[link]) | {"note": row.note or ""}


def _of(row: CauseCell | CauseLink, words: str) -> dict[str, Any]:
    found = _said(row, words) | {"direction": DIRECTION_WORDS[row.direction], "share": share_words(row)}
    return found | {"p_adjusted": row.p_adjusted if isinstance(row, CauseCell) else None}


def _said(row: LadderStep | CauseCell | CauseLink, words: str) -> dict[str, Any]:
    change = row.delta if isinstance(row, LadderStep) else row.effect
    return {
        "words": words,
        "change": signed(change, row.metric) + around(row.lo, row.hi, row.metric),
        "p": row.p,
        "n": row.n,
        "skewed": not isinstance(row, CauseLink) and row.skewed,
    }


def _parts(folder: Path) -> tuple[StoredCause, str, dict[str, Any]]:
    stored = StoredCause.open(folder)
    return stored, "cause.html", {"metrics": metrics_of(stored)}


PAGE = page_with("cause", _parts)
