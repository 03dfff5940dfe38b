"""What the page of an attention study says: every layer's and head's retained share beside its yardsticks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mless.figures import draw
from mless.report.kinds import Page
from mless.results.folder import ResultFolder
from mless.results.reading import StoredResults
from mless.results.wording import random_is_yardstick
from mless.values import FigureSpec


def _summary(folder: Path) -> dict[str, Any]:
    """Every layer's retained share."""
    rows = ResultFolder(folder).read_table("retained", filters=[("queries", "==", "original"), ("head", "==", 0)])
    return {"layers": rows.to_pylist()}


def _draw_standard(folder: Path, formats: Sequence[str]) -> list[Path]:
    """The most shifted heads of the first layer, shares by layer and head, and where attention goes."""
    opened = StoredResults.open(folder)
    with_filler = [name for name, about in opened.conditions.items() if about.get("kind") != "none"]
    if not with_filler:
        return []
    shown = tuple(opened.conditions)
    first = min(opened.captured())
    curves = FigureSpec("attention", "heads", (), ("none", with_filler[0]))
    written = draw(curves, [folder], layer=first, heads="most-shifted:3", formats=formats)
    written += draw(FigureSpec("retained", "retained", (), shown), [folder], formats=formats)
    written += draw(FigureSpec("map", "map", (), shown), [folder], formats=formats)
    return written + draw(FigureSpec("mass", "mass", (), shown), [folder], layer=first, formats=formats)


def _parts(folder: Path) -> tuple[StoredResults, str, dict[str, Any]]:
    opened = StoredResults.open(folder)
    return opened, "attention.html", {"retained": _retained(opened)}


def _retained(folder: StoredResults) -> list[dict[str, Any]]:
    """For each condition its layers and its heads; nothing where the study measured no attention."""
    if not (folder.path / "retained.parquet").exists():
        return []
    rows = sorted(folder.retained("original"), key=lambda row: (row["layer"], row["head"]))
    text = {(row["layer"], row["head"]): row for row in rows if row["condition"] == "random"}
    found: list[dict[str, Any]] = []
    for condition in dict.fromkeys([*folder.conditions, *(row["condition"] for row in rows)]):
        beside = bool(text) and random_is_yardstick(condition, folder.conditions)
        own: list[dict[str, Any]] = [
            {**row, **_beside(text.get((row["layer"], row["head"])))} for row in rows if row["condition"] == condition
        ]
        if own:
            found.append(
                {
                    "condition": condition,
                    "beside_random": beside,
                    "exponent": any(row["epsilon"] is not None for row in own),
                    "layers": [row for row in own if row["head"] == 0],
                    "heads": [row for row in own if row["head"] > 0],
                }
            )
    return found


def _beside(text: dict[str, Any] | None) -> dict[str, Any]:
    """What natural text does in a row's place."""
    return {"random": text and text["retained"], "random_epsilon": text and text["epsilon"]}


PAGE = Page(_summary, _draw_standard, _parts)
