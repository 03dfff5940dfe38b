"""`mless export`: the explorer of result folders as one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mless.cli.printing import plain


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `export`, in the order of its help."""

    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write, such as page.html.")]
    items: Annotated[str, typer.Option(help="Items whose prompts are in it: 1-3,7, all, or none.")] = "1-3"
    heads: Annotated[
        int, typer.Option(min=0, help="Heads of each layer and condition that can be opened: those furthest from 1.")
    ] = 3
    max_mb: Annotated[float, typer.Option(min=0.1, max=500, help="Refuse to write a larger file.")] = 30


def export(
    results: Annotated[list[Path], typer.Argument(help="Result folders.")],
    *,
    options: ExportOptions,
) -> None:
    """Write the explorer of result folders as one file that works from disk without a network: all maps and verdicts, some items' prompts and answers."""
    from mless.explorer import exporting

    made = exporting.compose(results, items=options.items, heads=options.heads, max_mb=options.max_mb)
    for one in made.damaged:
        print(f"left out, damaged: {plain(one)}", flush=True)
    print(f"{plain(str(options.out))}: {made.megabytes:.1f} MB, {made.views} views", flush=True)
    exporting.write(made, options.out)
    print(f"page: {plain(str(options.out))}")
