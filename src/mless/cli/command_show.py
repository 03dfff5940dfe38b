"""`mless show`: result folders in the browser."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mless.cli.printing import plain


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The options of `show`, in the order of its help."""

    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 for a free one.")] = 0
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False


def show(
    results: Annotated[list[Path], typer.Argument(help="Result folders; one that is being written is shown live.")],
    options: ShowOptions,
) -> None:
    """Look around in result folders, in a browser on this machine (mless[show]). Ctrl-C ends it."""
    # Arrow's own pools keep what was freed: a fifth more memory over a large folder (benchmarks/README.md).
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from mless.explorer import show as serve

    running = serve(results, port=options.port, browser=not options.no_browser)
    for why in running.lacking:
        print(f"not shown: {plain(why)}", flush=True)
    print(f"explorer: {plain(running.address)} (only this machine can open it; Ctrl-C ends it)", flush=True)
    try:
        running.wait()
    except KeyboardInterrupt:
        print("ended")
    finally:
        running.stop()
