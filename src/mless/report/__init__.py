"""The page of a result folder: one self-contained, escaped HTML file, composed from the store only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mless.figures import draw
from mless.store import write_atomically
from mless.values import FigureSpec

__all__ = ["draw_standard", "write_report"]


def draw_standard(folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """The figures every study gets: the most shifted heads of its first layer, shares by layer and head, and where attention goes."""
    from mless.figures.folder import StoredResults

    opened = StoredResults.open(Path(folder))
    with_filler = [name for name, about in opened.conditions.items() if about.get("kind") != "none"]
    if not with_filler:
        return []
    shown = tuple(opened.conditions)
    first = min(opened.captured())
    curves = FigureSpec("attention", "heads", (), ("none", with_filler[0]))
    written = draw(curves, [folder], layer=first, heads="most-shifted:3", formats=formats)
    written += draw(FigureSpec("retained", "retained", (), shown), [folder], formats=formats)
    written += draw(FigureSpec("map", "map", (), shown), [folder], formats=formats)
    written += draw(FigureSpec("mass", "mass", (), shown), [folder], layer=first, formats=formats)
    return written


def write_report(folder: Path, *, verdict: Sequence[str]) -> Path:
    """Write ``report.html`` into `folder`: the verdict in words, what was run, pictures, tables, one prompt, the method.

    It needs no network and runs no script; whatever stands in the data is shown as text, never as markup.
    """
    # jinja2 and pyarrow load here and not at the top: `import mless` must stay cheap.
    from mless.figures.folder import StoredResults
    from mless.report.page import render

    opened = StoredResults.open(Path(folder))
    target = opened.path / "report.html"
    write_atomically(target, render(opened, verdict).encode("utf-8"))
    return target
