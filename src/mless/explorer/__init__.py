"""The explorer: result folders in a browser, on this machine, or as one file that works from disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mless.explorer.server import Running

__all__ = ["show"]


def show(
    results: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, port: int = 0, browser: bool = True
) -> Running:
    """Serve result folders on this machine and open a browser. The server runs until `stop()` is called or the process ends.

    `address` of what is returned is the page's address; it has a random token, and only this machine can open it.
    """
    from mless.explorer.folders import Folders
    from mless.explorer.server import Running

    given = [results] if isinstance(results, str | os.PathLike) else list(results)
    running = Running(Folders([Path(one) for one in given]), port)
    if browser:
        import webbrowser

        webbrowser.open(running.address)
    return running
