"""The one table of views: name → what it shows of which folders, the data its page asks for, and what an export holds of it.

A new view is one file here with a `VIEW`, one file in `page/` with the same name, and a row in `VIEWS` and in `page/views.js`. Views of one
study may share a file; `module:NAME` says which of its views is meant.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mless.explorer.asking import NotThere, Query, plain
from mless.explorer.folders import Folder, Folders

#: What answers a request: values that JSON can hold, or that `plain` makes so.
Answering = Callable[[Query], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What an export holds beside maps and answers: these items (numbers from 1) by folder, and so many heads of each layer and condition."""

    items: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    heads: int = 3


@dataclass(frozen=True, slots=True)
class View:
    """One view. `data` are the requests it answers, by path. `of` says whether a folder has something for it. `exported` are the requests
    (`request_text`) that an exported file answers.
    """

    title: str
    data: Mapping[str, Answering]
    of: Callable[[Folder], bool] = lambda folder: False
    exported: Callable[[Folders, Chosen], Iterable[str]] = lambda folders, chosen: ()


#: In the order of the page's menu.
VIEWS: dict[str, str] = {
    "start": "mless.explorer.start",
    "map": "mless.explorer.map",
    "head": "mless.explorer.head",
    "strip": "mless.explorer.strip",
    "answers": "mless.explorer.answers",
    "likelihood": "mless.explorer.likelihood",
    "dose": "mless.explorer.dose",
    "placebo": "mless.explorer.placebo",
    "multiverse": "mless.explorer.multiverse",
    "ladder": "mless.explorer.cause:LADDER",
    "causes": "mless.explorer.cause:CAUSES",
    "chain": "mless.explorer.cause:CHAIN",
    "forest": "mless.explorer.forest",
    "between": "mless.explorer.between",
    "proof": "mless.explorer.proof",
}


def view(name: str) -> View:
    module, _, wanted = VIEWS[name].partition(":")
    return getattr(importlib.import_module(module), wanted or "VIEW")


def views_of(folder: Folder) -> list[str]:
    """The views that have something to show of a folder."""
    return [name for name in VIEWS if view(name).of(folder)]


def answer(folders: Folders, path: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The heart: what a request is answered, from stored results only. The first part of `path` is the view's name."""
    name = path.partition("/")[0]
    answering = view(name).data.get(path) if name in VIEWS else None
    if answering is None:
        raise NotThere(f"no such request: {path[:80]!r}; the page of this mless asks for others")
    return plain(dict(answering(Query(folders, values))))
