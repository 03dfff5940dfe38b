"""The page of a result folder: one self-contained, escaped HTML file, composed from the store only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless.figures import draw
from mless.results.folder import ResultFolder, write_atomically
from mless.values import FigureSpec

if TYPE_CHECKING:
    from mless.results.answers import StoredAnswers

__all__ = ["draw_standard", "publish", "summary", "write_report"]


def publish(folder: Path, fresh: bool, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder's page, with its standard figures: made where the results are `fresh` or it is missing, else as it stands."""
    page = Path(folder) / "report.html"
    if fresh or not page.exists():
        from mless.study import verdict_lines

        lines = verdict_lines(Path(folder))
        say("drawing")
        draw_standard(folder)
        write_report(folder, verdict=lines)
    return page


def summary(folder: Path) -> dict[str, Any]:
    """What the folder says, for other programs: its verdict in words, and every layer's retained share or every condition's accuracy."""
    from mless.results.reading import holds_answers
    from mless.study import verdict_lines

    folder = Path(folder)
    told = {"folder": str(folder), "report": str(folder / "report.html"), "verdict": verdict_lines(folder)}
    inside = _of_insides(folder)
    if inside is not None:
        return told | inside.summary(folder)
    if holds_answers(folder):
        return told | {"accuracy": ResultFolder(folder).read_table("accuracy").to_pylist()}
    rows = ResultFolder(folder).read_table("retained", filters=[("queries", "==", "original"), ("head", "==", 0)])
    return told | {"layers": rows.to_pylist()}


def draw_standard(folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """The figures every study gets.

    Of attention: the most shifted heads of its first layer, shares by layer and head, and where attention goes. Of answers: bars and the
    table of accuracy, accuracy by length where lengths differ, pass@k and diversity where there are several samples.
    """
    from mless.results.answers import StoredAnswers
    from mless.results.reading import StoredResults, holds_answers

    inside = _of_insides(Path(folder))
    if inside is not None:
        return inside.draw_standard(Path(folder), formats)
    if holds_answers(Path(folder)):
        return _draw_answers(StoredAnswers.open(Path(folder)), formats)
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


def _of_insides(folder: Path) -> Any:
    """The module for folders that measured something behind attention: its `summary(folder)`, `draw_standard(folder, formats)` and
    `page(folder)` (the opened folder, the template, what the template needs); None for the other folders.
    """
    measures = (ResultFolder(folder).manifest() or {}).get("measures")
    if measures == "activations":
        from mless.report import activations

        return activations
    if measures == "affine":
        from mless.report import affine

        return affine
    if measures == "tune":
        from mless.report import tuning

        return tuning
    return None


def _draw_answers(folder: StoredAnswers, formats: Sequence[str]) -> list[Path]:
    shown = tuple(folder.conditions)
    written = draw(FigureSpec("accuracy", "bars", (), shown), [folder.path], formats=formats)
    written += draw(FigureSpec("accuracy", "table", (), shown), [folder.path])
    if folder.swept():
        written += draw(FigureSpec("lengths", "sweep", (), shown), [folder.path], formats=formats)
    if any(row.metric == "diversity" and row.condition == "none" for row in folder.accuracy()):
        written += draw(FigureSpec("diversity", "diversity", (), shown), [folder.path], formats=formats)
    return written


def write_report(folder: Path, *, verdict: Sequence[str]) -> Path:
    """Write ``report.html`` into `folder`: the verdict in words, what was run, pictures, tables, one prompt, the method.

    It needs no network and runs no script; whatever stands in the data is shown as text, never as markup.
    """
    # jinja2 and pyarrow load here and not at the top: `import mless` must stay cheap.
    from mless.report.page import render
    from mless.results.answers import StoredAnswers
    from mless.results.reading import StoredResults, holds_answers

    path = Path(folder)
    target = path / "report.html"
    inside = _of_insides(path)
    if inside is not None:
        opened, template, parts = inside.page(path)
        write_atomically(target, render(opened, verdict, template, parts).encode("utf-8"))
        return target
    opened = StoredAnswers.open(path) if holds_answers(path) else StoredResults.open(path)
    write_atomically(target, render(opened, verdict).encode("utf-8"))
    return target
