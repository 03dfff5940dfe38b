"""Where a number comes from: the table's file and digest, what computed it, and the command that makes it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from mless.errors import MlessError
from mless.explorer.asking import Query, request_text
from mless.explorer.folders import Folder, Folders
from mless.explorer.start import command_of
from mless.explorer.views import Chosen, View
from mless.report.facts import words_of
from mless.results.escaping import visible


def _proof(query: Query) -> Mapping[str, Any]:
    folder = query.folder()
    about = folder.about()
    digests: Mapping[str, str] = about.get("tables") or {}
    tables = {
        visible(file.stem, keep=""): digests.get(file.stem)
        for file in sorted(folder.path.glob("*.parquet"))
        if file.is_file()
    }
    path = folder.place
    return {
        "path": visible(path, keep=""),
        "tables": tables,
        "model": visible(folder.study.label, keep=""),
        "implementations": _said(about.get("implementations")),
        "engine": _said(about.get("engine")),
        "device": _said(about.get("device")),
        "command": command_of(folder),
        "verify": visible(shlex.join(["mless", "verify", path]), keep=""),
    }


def _said(value: object) -> str | None:
    return visible(words_of(value), keep="") if value else None


def _exported(folders: Folders, chosen: Chosen) -> Iterable[str]:
    return [request_text("proof", folder=folder.number) for folder in folders if _readable(folder)]


def _readable(folder: Folder) -> bool:
    try:
        return bool(folder.about())
    except MlessError:
        return False


VIEW = View("Proof", {"proof": _proof}, exported=_exported)
