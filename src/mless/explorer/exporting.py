"""The explorer as one file: the page, its modules put together, and a bounded number of answers. It works from disk, without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mless.errors import BadFolder, BadStudy, MlessError
from mless.explorer.asking import NotThere, read_request
from mless.explorer.folders import Folders
from mless.explorer.server import page_files
from mless.explorer.views import VIEWS, Chosen, answer, view
from mless.results.escaping import visible
from mless.results.folder import write_atomically
from mless.values import parse_numbers

_FIRST = "main.js"
_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([a-z_]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) ([A-Za-z_]+)", re.MULTILINE)
_LEFT = re.compile(r"^\s*(?:import|export)\b", re.MULTILINE)
_MEGABYTE = 1_000_000
_START = "start"
#: A page that may be a part is made within so many seconds, or little more; and all of a larger table of attention is not read for it.
_PART_SECONDS = 20.0
_LONG_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Exported:
    """A page that is ready to be written: its text, how many views (answers to requests) it holds, and what of which folder is damaged and so not in it."""

    text: bytes
    views: int
    damaged: tuple[str, ...] = ()

    @property
    def megabytes(self) -> float:
        return len(self.text) / _MEGABYTE


def compose(
    results: Sequence[str | os.PathLike[str]],
    *,
    items: str = "1-3",
    heads: int = 3,
    max_mb: float = 30,
    part: bool = False,
) -> Exported:
    """The page with all maps and verdicts, lists of answers, texts of some, and the strips of these items in the most shifted heads of each layer.

    Nothing is written. What is damaged is left out, and the page says so; where nothing is sound, the export is refused.

    Refused where it would be larger than `max_mb` megabytes. With `part` it holds what fits and is made in seconds, and says that it is a part.
    """
    folders = Folders([Path(one) for one in results], patient=True, elsewhere=True)
    if folders.lacking:
        raise BadFolder("; ".join(folders.lacking))
    faults = Faults(folders)
    cards: list[dict[str, Any]] = answer(folders, _START, {})["folders"]
    if all(one["state"] == "refused" for one in cards):
        raise BadFolder(f"nothing can be exported: {'; '.join(one['why'] for one in cards)}")
    chosen = Chosen(_items(items, folders, faults), heads)
    limit, until = int(max_mb * _MEGABYTE), time.monotonic() + _PART_SECONDS
    size, parts, left_out = len(_page({})), dict[str, str](), 0
    for request in _requests(folders, chosen, faults):
        if part and (size > limit or time.monotonic() > until or _is_long(folders, request)):
            left_out += 1
            continue
        found = _encoded(folders, request, faults)
        if found is None:
            continue
        size += len(request) + len(found) + 6
        if part and size > limit:
            left_out += 1
            continue
        parts[request] = found
        if size > limit:
            raise BadStudy(
                f"the page would be larger than {max_mb:g} MB: it holds {len(parts)} views so far, and there are more; choose fewer items (--items 1), "
                f"fewer heads (--heads 1) or fewer folders, or allow more with --max-mb {max_mb * 4:g}"
            )
    # The start comes last, since it says what was found to be damaged, and what is not in it.
    parts[_START] = _start(folders, faults, left_out)
    return Exported(_page(parts), len(parts), faults.said())


def _is_long(folders: Folders, request: str) -> bool:
    """Whether a request has to read all of a large table of attention."""
    path, values = read_request(request)
    if path not in ("map/mass", "head/curve"):
        return False
    file: Path = folders[int(values["folder"]) - 1].path / "attention.parquet"
    return file.stat().st_size > _LONG_BYTES


class Faults:
    """What of which folder cannot be read. A folder's path is not in it: the page is read elsewhere."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._found: dict[int, dict[str, MlessError]] = {}

    def note(self, number: int, fault: MlessError) -> str:
        """Keep a fault; what is said of it."""
        words = self.without_paths(visible(str(fault), keep=""))
        self._found.setdefault(number, {})[words] = fault
        return words

    def of(self, number: int) -> list[str]:
        return list(self._found.get(number, ()))

    def said(self) -> tuple[str, ...]:
        return tuple(
            f"{visible(folder.name, keep='')}: {why}" for folder in self._folders for why in self.of(folder.number)
        )

    def without_paths(self, text: str, written: Callable[[str], str] = str) -> str:
        """A text in which each folder is named, and not where it is on this machine. `written` is how the text has been written."""
        names = {
            form(str(path)): form(folder.name)
            for folder in self._folders
            for path in (folder.path.absolute(), folder.path.resolve())
            for form in (written, lambda one: written(visible(one, keep="")))
            if folder.name
        }
        for path in sorted(names, key=len, reverse=True):
            text = text.replace(path, names[path])
        return text


def write(exported: Exported, out: Path) -> None:
    """Write the page, whole or not at all."""
    write_atomically(out, exported.text)


def _items(given: str, folders: Folders, faults: Faults) -> dict[int, tuple[int, ...]]:
    """Items such as 1-3,7 by folder. A folder with fewer items holds those it has, so that several can be exported at once."""
    counts: dict[int, int] = {}
    for folder in folders:
        try:
            counts[folder.number] = len(folder.about().get("items") or ())
        except MlessError as fault:
            faults.note(folder.number, fault)
    asked = [] if given == "none" else parse_numbers(given, max(counts.values()), "item", "the largest folder's")
    return {number: tuple(one for one in asked if one <= count) for number, count in counts.items()}


def _requests(folders: Folders, chosen: Chosen, faults: Faults) -> Iterator[str]:
    """What each view asks for, but for the start. Of a folder that is damaged the other views, and the other folders, are asked all the same."""
    for name in VIEWS:
        made = view(name).exported
        sound: list[int] = []
        for folder in folders:
            try:
                list(made(folders.only([folder.number]), chosen))
                sound.append(folder.number)
            except MlessError as fault:
                faults.note(folder.number, fault)
        yield from (one for one in dict.fromkeys(made(folders.only(sound), chosen)) if one != _START)


def _encoded(folders: Folders, request: str, faults: Faults) -> str | None:
    """An answer as JSON that can stand inside a page; None where there is nothing to answer. A fault is an answer too: the page shows it."""
    path, values = read_request(request)
    found: dict[str, Any]
    try:
        found = answer(folders, path, values)
    except NotThere:
        return None
    except MlessError as fault:
        found = {"error": faults.note(int(values.get("folder", values.get("heads", 1))), fault)}
    return _written(found, faults)


def _start(folders: Folders, faults: Faults, left_out: int) -> str:
    """The start of the page, with what is damaged of each folder, and how many views are not in it."""
    found = answer(folders, _START, {})
    for one in found["folders"]:
        one["damaged"] = [] if one["state"] == "refused" else faults.of(one["number"])
    return _written(found | {"left_out": left_out}, faults)


def _written(found: Mapping[str, Any], faults: Faults) -> str:
    return faults.without_paths(_json(found), lambda text: _json(text)[1:-1])


def _json(value: Any) -> str:
    """No sign of it ends a script or begins markup."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- the page --------------------------------------------------------------------------------------------------------


def _page(answers: Mapping[str, str]) -> bytes:
    files = {name: content.decode() for name, content in page_files().items()}
    script, style = bundle(files), files["style.css"] + files["results.css"]
    for name, text in (("script", script), ("style", style)):
        assert f"</{name}" not in text.lower()  # it would end too early
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'sha256-{_hash(style)}'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    data = "{" + ",".join(f"{_json(request)}:{content}" for request, content in answers.items()) + "}"
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>mless</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        "<noscript>This page needs JavaScript.</noscript>\n"
    )
    end = (
        f'\n<script id="answers" type="application/json">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )
    return (head + end).encode()


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def bundle(files: Mapping[str, str]) -> str:
    """The modules as one script: each becomes a function that is called once, those it imports before it."""
    order: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules import each other in a circle: {' → '.join((*above, name))}")
        if name not in order:
            for _, wanted in _IMPORT.findall(files[name]):
                visit(wanted, (*above, name))
            order.append(name)

    visit(_FIRST, ())
    return '"use strict";\n' + "\n".join(_wrapped(name, files[name]) for name in order)


def _wrapped(name: str, text: str) -> str:
    exports = _EXPORT.findall(text)
    text = _IMPORT.sub(lambda found: f"const {{ {found[1].replace(' as ', ': ')} }} = {_variable(found[2])};", text)
    text = _EXPORT.sub(lambda found: found[0].removeprefix("export "), text)
    if (left := _LEFT.search(text)) is not None:
        raise ValueError(f"{name}: this import or export is not understood: {text[left.start() :].strip()[:80]!r}")
    return f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _variable(name: str) -> str:
    return "module_" + name.removesuffix(".js")
