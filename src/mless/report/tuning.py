"""What the page of a tuning says: every setting that was tried, the choice, and what other items say of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mless.figures import draw
from mless.figures.tables import write_tables
from mless.report.kinds import Page
from mless.results import wording
from mless.results.answers import StoredTuning
from mless.results.folder import ResultFolder
from mless.values import FigureSpec


def summary(folder: Path) -> dict[str, Any]:
    """For other programs: the chosen setting, every row of tuning.parquet, and the rows of the test items and the other tasks."""
    opened = StoredTuning.open(folder)
    return {
        "chosen": {"condition": opened.chosen, **opened.conditions[opened.chosen]["arm"]},
        "tried": opened.tuning["tried"],
        "tuning": ResultFolder(folder).read_table("tuning").to_pylist(),
        "accuracy": ResultFolder(folder).read_table("tuned").to_pylist(),
    }


def draw_standard(folder: Path, formats: Sequence[str]) -> list[Path]:
    """The sensitivity picture and the parameters as a table; the test items get a page of their own in their folder."""
    # The table first: it needs more of the folder, so a damaged one is refused before anything is drawn.
    written = write_tables("table9", [folder], folder / "figures")
    return draw(FigureSpec("sensitivity", "sensitivity"), [folder], formats=formats) + written


def page(folder: Path) -> tuple[StoredTuning, str, dict[str, Any]]:
    """The opened folder, its template, and what the template needs."""
    opened = StoredTuning.open(folder)
    rows = opened.rows()
    intervals = [
        (
            f"[{wording.percent(row.lo)}, {wording.percent(row.hi)}]",
            f"[{wording.points(row.delta_lo)}, {wording.points(row.delta_hi)}]",
        )
        if row.lo is not None and row.delta_lo is not None
        else ("", "")
        for row in rows
    ]
    other = [row for row in opened.accuracy() if row.metric == "pass@1"]
    parts = {
        "chosen": opened.chosen,
        "tried": opened.tuning["tried"],
        "tuning": list(zip(rows, intervals, strict=True)),
        "rungs": len({row.rung for row in rows}),
        "words": {name: wording.condition_words(about) for name, about in opened.conditions.items()},
        "tuned": other,
        "transfer": opened.tuning["transfer"],
    }
    return opened, "tuning.html", parts


PAGE = Page(summary, draw_standard, page, inside=("test",))
