"""Stored tables in, one picture or table out. Torch never gets loaded here; matplotlib only when something is drawn."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mless.errors import BadFolder, BadStudy
from mless.results.figure_kinds import FIGURES, Drawing
from mless.results.folder import write_atomically
from mless.values import QUERY_SETS, FigureSpec, QuerySet

if TYPE_CHECKING:
    from mless.figures.style import Picture

__all__ = ["FORMATS", "TABLE_FORMATS", "check", "default_formats", "draw", "write_picture"]

FORMATS: tuple[str, ...] = ("png", "svg", "pdf")
TABLE_FORMATS: tuple[str, ...] = ("md", "csv", "tex")


def default_formats(spec: FigureSpec) -> tuple[str, ...]:
    """What is written unless told otherwise."""
    return TABLE_FORMATS if FIGURES.get(spec.kind).table else ("png", "svg")


def draw(
    spec: FigureSpec,
    folders: Sequence[Path],
    *,
    layer: int | None = None,
    heads: str | None = None,
    item: str | None = None,
    queries: QuerySet = "original",
    omit_first: bool | None = None,
    formats: Sequence[str] | None = None,
    out: Path | None = None,
) -> list[Path]:
    """Draw `spec` from stored results and write ``<out>/<id>.<format>`` (``<first folder>/figures`` unless told otherwise).

    `layer` and `heads` (numbered from 1; ``"2,5"``, ``"all"`` or ``"most-shifted:3"``) replace the published ones. `item` (its number from
    1, or its id) shows one prompt instead of the mean. `omit_first` leaves out the first token; by default the study decides. Folders of
    answers and of attention may be given together where a figure has a half of each. `formats` are png, svg and pdf for a picture, md, csv
    and tex for a table. The same input gives the same bytes.
    """
    if not folders:
        raise BadStudy(f"figure {spec.id}: no result folder given; `mless figure {spec.id} --model …` makes one")
    formats = default_formats(spec) if formats is None else formats
    check(spec, layer=layer, heads=heads, item=item, queries=queries, formats=formats, out=out)
    paths = [Path(folder) for folder in folders]
    target = Path(out) if out is not None else paths[0] / "figures"
    kind = FIGURES.get(spec.kind)
    drawing = Drawing(spec, paths, layer, heads, item, queries, omit_first)
    if kind.table:
        return kind.function()(drawing, target, formats)

    return write_picture(lambda: kind.function()(drawing), target, spec.id, formats)


def write_picture(draws: Callable[[], Picture], target: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """Draw a picture and write ``<target>/<name>.<format>``; nothing is written unless all of it was drawn."""
    # matplotlib and pyarrow load here and not at the top: `import mless` must stay cheap.
    from mless.figures import style

    with style.applied():
        picture = draws()
        style.settle(picture)
        rendered = {kind: style.render(picture, kind) for kind in formats}
    written: list[Path] = []
    for kind, content in rendered.items():
        write_atomically(target / f"{name}.{kind}", content)
        written.append(target / f"{name}.{kind}")
    return written


def check(
    spec: FigureSpec,
    *,
    layer: int | None = None,
    heads: str | None = None,
    item: str | None = None,
    queries: str = "original",
    formats: Sequence[str] | None = None,
    out: Path | None = None,
) -> None:
    """Refuse what `draw` could never draw or write; called before a run, so that it fails early."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", spec.id):
        raise BadStudy(f"figure id {spec.id!r} becomes a file name: letters, digits, dot, dash and underscore only")
    _check_formats(spec, default_formats(spec) if formats is None else formats)
    if queries not in QUERY_SETS:
        raise BadStudy(f"no query set {queries!r}; there are: {', '.join(QUERY_SETS)}")
    kind = FIGURES.get(spec.kind)
    for option, value in (("--layers", layer), ("--heads", heads), ("--item", item)):
        if value is not None and option not in kind.takes:
            why = (
                "it shows answers and not attention"
                if kind.shows == "answers"
                else f"a {spec.kind} picture shows all of them"
            )
            raise BadStudy(f"figure {spec.id} takes no {option}: {why}; leave it out")
    if out is not None:
        _check_writable(out)


def _check_formats(spec: FigureSpec, formats: Sequence[str]) -> None:
    table = FIGURES.get(spec.kind).table
    known, others = (TABLE_FORMATS, FORMATS) if table else (FORMATS, TABLE_FORMATS)
    there_are = f"there are: {', '.join(known)}"
    if not formats:
        raise BadStudy(f"no figure format given; {there_are}")
    for kind in formats:
        if kind in others:
            what = "a table" if table else "a picture"
            raise BadStudy(f"{spec.id} is {what} and cannot be written as {kind!r}; {there_are}")
        if kind not in known:
            raise BadStudy(f"no figure format {kind!r}; {there_are}")


def _check_writable(out: Path) -> None:
    """Tries to write, because permissions alone do not tell whether a file system allows it. Leaves nothing behind."""
    there = out
    try:
        there = next(place for place in (out, *out.absolute().parents) if place.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".mless-"):
            pass
    except OSError as fault:
        raise BadFolder(f"cannot write pictures to {out} ({there}: {fault.strerror}); choose another --out") from None
