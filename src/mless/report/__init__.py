"""The page of a result folder: one self-contained, escaped HTML file, composed from the store only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless.report.kinds import page_of
from mless.results.folder import write_atomically

if TYPE_CHECKING:
    from mless.results.reading import StoredStudy

__all__ = ["draw_standard", "publish", "summary", "write_report"]


def publish(folder: Path, fresh: bool, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder's page and its standard figures. Made again where the results are `fresh` or the page is missing."""
    page = Path(folder) / "report.html"
    if fresh or not page.exists():
        from mless.study import verdict_lines

        path = Path(folder)
        # What the page says is read first, so that a damaged folder is refused before anything is drawn.
        lines, parts = verdict_lines(path), page_of(path).parts(path)
        say("drawing")
        for inner in page_of(path).inside:
            publish(path / inner, fresh=True)
        draw_standard(path)
        _write(path, lines, parts)
    return page


def summary(folder: Path) -> dict[str, Any]:
    """What the folder says, for other programs: its verdict in words, and its main table."""
    from mless.study import verdict_lines

    folder = Path(folder)
    said = {"folder": str(folder), "report": str(folder / "report.html"), "verdict": verdict_lines(folder)}
    return said | page_of(folder).summary(folder)


def draw_standard(folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """The figures that every folder of its kind gets."""
    return page_of(Path(folder)).draw_standard(Path(folder), formats)


def write_report(folder: Path, *, verdict: Sequence[str]) -> Path:
    """Write ``report.html`` into `folder`: the verdict in words, what was run, pictures, tables, one prompt, the method.

    It needs no network and runs no script. Data are shown as text, never as markup.
    """
    return _write(Path(folder), verdict, page_of(Path(folder)).parts(Path(folder)))


def _write(folder: Path, verdict: Sequence[str], parts: tuple[StoredStudy, str, dict[str, Any]]) -> Path:
    # jinja2 and pyarrow load here and not at the top: `import mless` must stay cheap.
    from mless.report.page import render

    opened, template, more = parts
    write_atomically(folder / "report.html", render(opened, verdict, template, more).encode("utf-8"))
    return folder / "report.html"
