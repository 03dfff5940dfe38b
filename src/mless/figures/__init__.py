"""Stored tables in, one picture or table out. Torch never gets loaded here; matplotlib only when something is drawn."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mless.errors import BadFolder, BadStudy
from mless.results.folder import write_atomically
from mless.values import ANSWER_KINDS, INSIDE_KINDS, QUERY_SETS, FigureSpec, QuerySet

if TYPE_CHECKING:
    from mless.figures.style import Picture

__all__ = ["FORMATS", "TABLE_FORMATS", "check", "default_formats", "draw"]

FORMATS: tuple[str, ...] = ("png", "svg", "pdf")
TABLE_FORMATS: tuple[str, ...] = ("md", "csv", "tex")


def default_formats(spec: FigureSpec) -> tuple[str, ...]:
    """What is written unless told otherwise."""
    return TABLE_FORMATS if spec.kind == "table" else ("png", "svg")


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

    `layer` and `heads` (numbered from 1; ``"2,5"``, ``"all"`` or ``"most-shifted:3"``) replace the published ones, `item` (its number
    from 1, or its id) shows one prompt instead of the mean, and `omit_first` leaves out the first token, as the study says by default.
    Folders of answers and of attention may be given together where a figure has a half of each. `formats` are png, svg and pdf for a
    picture, md, csv and tex for a table. The same input gives the same bytes.
    """
    if not folders:
        raise BadStudy(f"figure {spec.id}: no result folder given; `mless figure {spec.id} --model …` makes one")
    formats = default_formats(spec) if formats is None else formats
    check(spec, layer=layer, heads=heads, item=item, queries=queries, formats=formats, out=out)
    paths = [Path(folder) for folder in folders]
    target = Path(out) if out is not None else paths[0] / "figures"
    if spec.kind == "table":
        from mless.figures.tables import write_tables

        return write_tables(spec.id, paths, target, formats, conditions=spec.conditions)

    # matplotlib and pyarrow load here and not at the top: `import mless` must stay cheap.
    from mless.figures import style

    with style.applied():
        if spec.kind in ANSWER_KINDS:
            picture = _of_answers(spec, paths)
        elif spec.kind in INSIDE_KINDS:
            picture = _of_insides(spec, paths, layer=layer)
        else:
            picture = _of_attention(
                spec, paths, layer=layer, heads=heads, item=item, queries=queries, omit_first=omit_first
            )
        style.settle(picture)
        rendered = {kind: style.render(picture, kind) for kind in formats}
    written: list[Path] = []
    for kind, content in rendered.items():
        write_atomically(target / f"{spec.id}.{kind}", content)
        written.append(target / f"{spec.id}.{kind}")
    return written


def _of_answers(spec: FigureSpec, paths: Sequence[Path]) -> Picture:
    from mless.figures import accuracy
    from mless.results.answers import StoredAnswers

    folders = [StoredAnswers.open(path) for path in paths]
    if spec.kind == "sweep":
        return accuracy.draw_sweep(folders, spec.conditions)
    if spec.kind == "diversity":
        return accuracy.draw_diversity(folders, spec.conditions)
    return accuracy.draw_bars(folders, spec.conditions)


def _of_insides(spec: FigureSpec, paths: Sequence[Path], *, layer: int | None) -> Picture:
    if spec.kind == "displacement":
        from mless.figures.affine import draw_displacement

        return draw_displacement(paths, spec.conditions, layer=layer)
    if spec.kind == "activations":
        from mless.figures.activations import draw_activations

        return draw_activations(paths, spec.conditions, layer=layer)
    if spec.kind == "classes":
        from mless.figures.activations import draw_classes

        return draw_classes(paths, spec.conditions, layer=layer)
    from mless.figures.tuning import draw_sensitivity

    return draw_sensitivity(paths)


def _of_attention(
    spec: FigureSpec,
    paths: Sequence[Path],
    *,
    layer: int | None,
    heads: str | None,
    item: str | None,
    queries: QuerySet,
    omit_first: bool | None,
) -> Picture:
    from mless.figures import accuracy, attention, composed, overview
    from mless.figures.panels import choose_panels
    from mless.results.answers import StoredAnswers
    from mless.results.reading import StoredResults, holds_answers

    answered = [path for path in paths if spec.kind == "conditions" and holds_answers(path)]
    folders = [StoredResults.open(path) for path in paths if path not in answered]
    if spec.kind == "map":
        return overview.draw_map(folders, spec.conditions, queries)
    if spec.kind == "retained":
        return overview.draw_retained(folders, spec.conditions, queries)
    if spec.kind == "mass":
        return overview.draw_mass(folders, spec.conditions, layer or 1)
    graded = [StoredAnswers.open(path) for path in answered]
    if graded and not folders:
        return accuracy.draw_bars(graded, spec.conditions)
    chosen = choose_panels(spec, folders, layer=layer, heads=heads)
    if graded:
        if item is not None:
            raise BadStudy(
                f"figure {spec.id} with --item shows one prompt's attention; leave out the folders of answers, or leave out --item"
            )
        return composed.draw_composed(graded, chosen, spec.conditions, queries=queries, omit_first=omit_first)
    return attention.draw_curves(spec.kind, chosen, spec.conditions, item=item, queries=queries, omit_first=omit_first)


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
    """Refuse what `draw` could not draw or write whatever the results are; before a run it spares the wait."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", spec.id):
        raise BadStudy(f"figure id {spec.id!r} becomes a file name: letters, digits, dot, dash and underscore only")
    _check_formats(spec, default_formats(spec) if formats is None else formats)
    if queries not in QUERY_SETS:
        raise BadStudy(f"no query set {queries!r}; there are: {', '.join(QUERY_SETS)}")
    takes: dict[str, tuple[str, ...]] = {"map": (), "retained": (), "mass": ("--layers",)}
    takes |= dict.fromkeys(ANSWER_KINDS, ()) | dict.fromkeys(INSIDE_KINDS, ("--layers",)) | {"sensitivity": ()}
    for option, value in (("--layers", layer), ("--heads", heads), ("--item", item)):
        if value is not None and option not in takes.get(spec.kind, ("--layers", "--heads", "--item")):
            why = (
                "it shows answers and not attention"
                if spec.kind in ANSWER_KINDS
                else f"a {spec.kind} picture shows all of them"
            )
            raise BadStudy(f"figure {spec.id} takes no {option}: {why}; leave it out")
    if out is not None:
        _check_writable(out)


def _check_formats(spec: FigureSpec, formats: Sequence[str]) -> None:
    table = spec.kind == "table"
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
    """Tried, not asked: what permissions say and what a file system does are two things. Leaves nothing behind."""
    there = out
    try:
        there = next(place for place in (out, *out.absolute().parents) if place.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".mless-"):
            pass
    except OSError as fault:
        raise BadFolder(f"cannot write pictures to {out} ({there}: {fault.strerror}); choose another --out") from None
