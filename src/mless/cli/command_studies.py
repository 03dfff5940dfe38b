"""`mless studies`: the studies that come with mless."""

from __future__ import annotations

from mless.cli.options import Json
from mless.cli.printing import print_json
from mless.cli.streams import console


def studies(*, as_json: Json = False) -> None:
    """List the studies that come with mless."""
    from rich.table import Table

    from mless.study import available_studies
    from mless.study.showing import published_models

    found = available_studies()
    if as_json:
        print_json({name: spec.model_dump() for name, spec in found.items()})
        return
    table = Table("study", "what it shows", "published for", box=None, pad_edge=False)
    for name, spec in found.items():
        table.add_row(name, spec.title, ", ".join(published.rsplit("/", 1)[-1] for published in published_models(spec)))
    console().print(table)
