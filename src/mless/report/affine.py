"""What the page and the summary of a study of the affine map say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mless.conditions import inserts, only_moves
from mless.figures import draw
from mless.report.kinds import Page
from mless.results.folder import ResultFolder
from mless.results.reading import StoredResults, StoredStudy
from mless.values import FigureSpec

#: Conditions beside which there is room for a field of arrows.
FIELDS = 3


def summary(folder: Path) -> dict[str, Any]:
    """Every layer's row of affine.parquet, for other programs."""
    return {"layers": ResultFolder(folder).read_table("affine", filters=[("head", "==", 0)]).to_pylist()}


def draw_standard(folder: Path, formats: Sequence[str]) -> list[Path]:
    """fig3 for the first measured layer: the first fillers, and the position control where it was run."""
    about = ResultFolder(folder).about() or {}
    kinds = {name: condition.get("kind") for name, condition in about.get("conditions", {}).items()}
    controls = [name for name, kind in kinds.items() if only_moves(kind)][:1]
    fillers = [name for name, kind in kinds.items() if inserts(kind)]
    # Natural text is the yardstick, so it is shown beside the first filler.
    first = [*fillers[:1], *[name for name in fillers[1:] if kinds[name] == "text"], *fillers[1:]]
    fields = [*list(dict.fromkeys(first))[: FIELDS - len(controls)], *controls]
    if not fields:
        return []
    return draw(FigureSpec("displacement", "displacement", (), ("none", *fields)), [folder], formats=formats)


def page(folder: Path) -> tuple[StoredStudy, str, dict[str, Any]]:
    """The opened folder, its template, and what the template needs beyond what every page has."""
    opened = StoredResults.open(folder)
    rows = ResultFolder(folder).read_table("affine").to_pylist()
    shown: list[dict[str, Any]] = [{**row, **{name: _interval(row, name) for name in _SHOWN}} for row in rows]
    parts = [
        {
            "condition": condition,
            "layers": [row for row in shown if row["condition"] == condition and row["head"] == 0],
            "heads": [row for row in shown if row["condition"] == condition and row["head"] > 0],
        }
        for condition in dict.fromkeys(row["condition"] for row in rows)
    ]
    table: Any = opened.study.get("affine") or {}
    settings = {"affine": parts, "holds": table.get("holds", 0.9), "tokens": table.get("tokens", "after")}
    return StoredStudy(opened.path, opened.about), "affine.html", settings


_SHOWN = (
    "displacement",
    "r2_constant",
    "r2_measured",
    "r2_kept",
    "r2_shifted",
    "r2_position",
    "position_share",
    "lambda",
    "kept",
    "cosine",
)


#: The column that says whether a few items decide the number.
_MARKED_BY = {"r2_constant": "skewed", "lambda": "lambda_skewed"}


def _interval(row: dict[str, Any], name: str) -> str:
    value, lo, hi = row[name], row[f"{name}_lo"], row[f"{name}_hi"]
    if value is None:
        return "–"
    # Folders of older versions have no marks.
    mark = " †" if row.get(_MARKED_BY.get(name, "")) else ""
    return _short(value) + (f" [{_short(lo)}, {_short(hi)}]{mark}" if lo is not None else "")


def _short(value: float) -> str:
    if math.isnan(value):
        return "–"
    return (f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e5 else f"{value:.0e}").replace(
        "-", "−"
    )


PAGE = Page(summary, draw_standard, page)
