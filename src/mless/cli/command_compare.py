"""`mless compare`: one effect in the result folders of several models, put together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mless.cli.options import Json
from mless.cli.printing import plain, print_json, print_table, print_verdict


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of `compare`, in the order of its help."""

    readout: Annotated[
        str | None,
        typer.Option(
            help="epsilon, lambda, activations, accuracy or likelihood; the usual one of the folders otherwise."
        ),
    ] = None
    condition: Annotated[
        list[str] | None,
        typer.Option(
            help="Compared with none; may be given several times, or all. The primary one or mless otherwise."
        ),
    ] = None
    metric: Annotated[
        str | None, typer.Option(help="Of activations, accuracy or likelihood: as near_zero, pass@1, solution.")
    ] = None
    layer: Annotated[int | None, typer.Option(min=1, help="One layer instead of the mean over all measured ones.")] = (
        None
    )
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="A property that models may differ by: activation, family, size, or a column of --models; may be given several times."
        ),
    ] = None
    models: Annotated[
        Path | None, typer.Option(help="CSV file of properties, for --by: a column model, and one a property.")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for compare.md, compare.csv, compare.tex and the picture forest."),
    ] = None
    as_json: Json = False


def compare(
    results: Annotated[list[Path], typer.Argument(help="Result folders of one study, one for each model.")],
    *,
    options: CompareOptions,
) -> None:
    """Put the effects of several models together: a row a model, their random-effects mean, how far they differ and by what."""
    from mless.figures import compared
    from mless.results import comparing

    found = comparing.compare(
        results,
        readout=options.readout,
        conditions=options.condition,
        metric=options.metric,
        layer=options.layer,
        by=options.by or (),
        models=options.models,
    )
    written: list[Path] = []
    if options.out is not None:
        from mless.figures.forest import write_comparison

        written = write_comparison(found, options.out)
    lines = compared.lines_of(found)
    if options.as_json:
        print_json(compared.content_of(found) | {"words": lines, "files": [str(path) for path in written]})
        return
    print_verdict(lines)
    table = compared.table_of(found)
    print_table(table.heads, [[cell.text for cell in row] for row in table.rows], table.aligned)
    if written:
        print()
    for path in written:
        print(f"{'figure' if path.stem == 'forest' else 'table'}: {plain(str(path))}")
