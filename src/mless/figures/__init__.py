"""One table in, one picture out: the figures of a result folder. Torch never gets loaded here; matplotlib only when something is drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mless.errors import BadStudy
from mless.store import write_atomically
from mless.values import FigureSpec, QuerySet

__all__ = ["FORMATS", "draw", "mass", "retained_by_layer"]

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
    _check(spec, folders, formats, layer=layer, heads=heads, item=item)

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
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for kind, content in rendered.items():
        write_atomically(target / f"{spec.id}.{kind}", content)
        written.append(target / f"{spec.id}.{kind}")
    return written


def retained_by_layer(
    folder: Path,
    *,
    conditions: Sequence[str] = ("mless",),
    queries: QuerySet = "original",
    formats: Sequence[str] = ("png", "svg"),
    out: Path | None = None,
) -> list[Path]:
    """``retained``: every layer's retained share with its interval, beside uniform dilution and the margins of *unchanged*."""
    spec = FigureSpec("retained", "retained", conditions=tuple(conditions))
    return draw(spec, [folder], queries=queries, formats=formats, out=out)


def mass(
    folder: Path,
    *,
    layer: int = 1,
    conditions: Sequence[str] = ("none", "mless"),
    formats: Sequence[str] = ("png", "svg"),
    out: Path | None = None,
) -> list[Path]:
    """``mass``: where an original token's attention goes in one layer, for each condition."""
    spec = FigureSpec("mass", "mass", conditions=tuple(conditions))
    return draw(spec, [folder], layer=layer, formats=formats, out=out)


def _check(
    spec: FigureSpec,
    folders: Sequence[Path],
    formats: Sequence[str],
    *,
    layer: int | None,
    heads: str | None,
    item: str | None,
) -> None:
    """Refuse what cannot be drawn before anything is read."""
    if not folders:
        raise BadStudy(f"figure {spec.id}: no result folder given; `mless figure {spec.id} --model …` makes one")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", spec.id):
        raise BadStudy(f"figure id {spec.id!r} becomes a file name: letters, digits, dot, dash and underscore only")
    for kind in formats:
        if kind not in FORMATS:
            raise BadStudy(f"no figure format {kind!r}; there are: {', '.join(FORMATS)}")
    takes: dict[str, tuple[str, ...]] = {"map": (), "retained": (), "mass": ("--layers",)}
    for option, value in (("--layers", layer), ("--heads", heads), ("--item", item)):
        if value is not None and option not in takes.get(spec.kind, ("--layers", "--heads", "--item")):
            raise BadStudy(f"figure {spec.id} takes no {option}: a {spec.kind} picture shows all of them; leave it out")
