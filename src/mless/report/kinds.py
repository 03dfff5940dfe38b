"""The one table of pages: for each measurement the summary, the figures and the template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless.figures import draw
from mless.registry import Registry
from mless.results.folder import ResultFolder
from mless.values import FigureSpec

if TYPE_CHECKING:
    from mless.results.reading import StoredStudy
    from mless.study.bench import Measurement


@dataclass(frozen=True, slots=True)
class Page:
    """One kind of page.

    `summary` is for other programs. `draw_standard` makes the pictures that every folder of the kind gets. `parts` gives the opened folder,
    the template, and the values that only this template needs. `inside` are inner folders with a page of their own.
    """

    summary: Callable[[Path], dict[str, Any]]
    draw_standard: Callable[[Path, Sequence[str]], list[Path]]
    parts: Callable[[Path], tuple[StoredStudy, str, dict[str, Any]]]
    inside: tuple[str, ...] = ()


PAGES: Registry[Page] = Registry(
    "pages",
    "page",
    {
        "attention": "mless.report.attention:PAGE",
        "activations": "mless.report.activations:PAGE",
        "affine": "mless.report.affine:PAGE",
        "likelihood": "mless.report.likelihood:PAGE",
        "accuracy": "mless.report.answers:PAGE",
        "tune": "mless.report.tuning:PAGE",
        "cause": "mless.report.cause:PAGE",
    },
    wants="an mless.report.kinds.Page",
    fits=lambda one: isinstance(one, Page),
)


def page_of(folder: Path) -> Page:
    """The page of a folder. A measurement without a page of its own gets the verdict, its conditions and its figures."""
    # pyarrow loads here and not at the top: `import mless.report` must stay cheap.
    from mless.results.manifest import measured_in
    from mless.results.reading import read_about

    measured = measured_in(read_about(folder))
    return PAGES.get(measured) if measured in PAGES else page_with(measured)


def page_with(measured: str, parts: Callable[[Path], tuple[StoredStudy, str, dict[str, Any]]] | None = None) -> Page:
    """A page with the figures and the summary that the measurement names, and these parts."""

    def summary(folder: Path) -> dict[str, Any]:
        return {table: ResultFolder(folder).read_table(table).to_pylist() for table in _kind(measured).summed_up}

    def draw_standard(folder: Path, formats: Sequence[str]) -> list[Path]:
        from mless.results.reading import StoredStudy, read_about

        about = read_about(folder)
        shown = tuple(StoredStudy(folder, about).conditions)
        names = _kind(measured).figures_of(about)
        return [file for name in names for file in draw(FigureSpec(name, name, (), shown), [folder], formats=formats)]

    return Page(summary, draw_standard, parts or _plain)


def _kind(measured: str) -> type[Measurement]:
    from mless.study.kinds import MEASUREMENTS

    return MEASUREMENTS.get(measured)


def _plain(folder: Path) -> tuple[StoredStudy, str, dict[str, Any]]:
    from mless.results.reading import StoredStudy, read_about

    return StoredStudy(folder, read_about(folder)), "page.html", {}
