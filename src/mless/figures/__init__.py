"""One table in, one picture out: the figures of a result folder. Torch never gets loaded here; matplotlib only when something is drawn."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mless.errors import BadFolder, BadStudy
from mless.store import write_atomically
from mless.values import QUERY_SETS, FigureSpec, QuerySet

__all__ = ["FORMATS", "check", "draw"]

FORMATS: tuple[str, ...] = ("png", "svg", "pdf")


def draw(
    spec: FigureSpec,
    folders: Sequence[Path],
    *,
    layer: int | None = None,
    heads: str | None = None,
    item: str | None = None,
    queries: QuerySet = "original",
    omit_first: bool | None = None,
    formats: Sequence[str] = ("png", "svg"),
    out: Path | None = None,
) -> list[Path]:
    """Draw `spec` from stored results and write ``<out>/<id>.<format>`` (``<first folder>/figures`` unless told otherwise).

    `layer` and `heads` (numbered from 1; ``"2,5"``, ``"all"`` or ``"most-shifted:3"``) replace the published ones, `item` (its number
    from 1, or its id) shows one prompt instead of the mean, and `omit_first` leaves out the first token, as the study says by default.
    The same input gives the same bytes.
    """
    if not folders:
        raise BadStudy(f"figure {spec.id}: no result folder given; `mless figure {spec.id} --model …` makes one")
    check(spec, layer=layer, heads=heads, item=item, queries=queries, formats=formats, out=out)

    # matplotlib and pyarrow load here and not at the top: `import mless` must stay cheap.
    from mless.figures import attention, overview, style
    from mless.figures.folder import StoredResults
    from mless.figures.panels import choose_panels

    opened = [StoredResults.open(Path(folder)) for folder in folders]
    with style.applied():
        if spec.kind == "map":
            picture = overview.draw_map(opened, spec.conditions, queries)
        elif spec.kind == "retained":
            picture = overview.draw_retained(opened, spec.conditions, queries)
        elif spec.kind == "mass":
            picture = overview.draw_mass(opened, spec.conditions, layer or 1)
        else:
            chosen = choose_panels(spec, opened, layer=layer, heads=heads)
            picture = attention.draw_curves(
                spec.kind, chosen, spec.conditions, item=item, queries=queries, omit_first=omit_first
            )
        style.settle(picture)
        rendered = {kind: style.render(picture, kind) for kind in formats}

    target = Path(out) if out is not None else opened[0].path / "figures"
    written: list[Path] = []
    for kind, content in rendered.items():
        write_atomically(target / f"{spec.id}.{kind}", content)
        written.append(target / f"{spec.id}.{kind}")
    return written


def check(
    spec: FigureSpec,
    *,
    layer: int | None = None,
    heads: str | None = None,
    item: str | None = None,
    queries: str = "original",
    formats: Sequence[str] = ("png", "svg"),
    out: Path | None = None,
) -> None:
    """Refuse what `draw` could not draw or write whatever the results are; before a run it spares the wait."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", spec.id):
        raise BadStudy(f"figure id {spec.id!r} becomes a file name: letters, digits, dot, dash and underscore only")
    if not formats:
        raise BadStudy(f"no figure format given; there are: {', '.join(FORMATS)}")
    for kind in formats:
        if kind not in FORMATS:
            raise BadStudy(f"no figure format {kind!r}; there are: {', '.join(FORMATS)}")
    if queries not in QUERY_SETS:
        raise BadStudy(f"no query set {queries!r}; there are: {', '.join(QUERY_SETS)}")
    takes: dict[str, tuple[str, ...]] = {"map": (), "retained": (), "mass": ("--layers",)}
    for option, value in (("--layers", layer), ("--heads", heads), ("--item", item)):
        if value is not None and option not in takes.get(spec.kind, ("--layers", "--heads", "--item")):
            raise BadStudy(f"figure {spec.id} takes no {option}: a {spec.kind} picture shows all of them; leave it out")
    if out is not None:
        _check_writable(out)


def _check_writable(out: Path) -> None:
    """Tried, not asked: what permissions say and what a file system does are two things. Leaves nothing behind."""
    there = out
    try:
        there = next(place for place in (out, *out.absolute().parents) if place.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".mless-"):
            pass
    except OSError as fault:
        raise BadFolder(f"cannot write pictures to {out} ({there}: {fault.strerror}); choose another --out") from None
