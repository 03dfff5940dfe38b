"""Requests: how the page asks for data. The server and an exported file are asked with the same text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import parse_qsl, quote

import numpy as np

from mless.errors import MlessError
from mless.explorer.folders import Folder, Folders

_LONGEST = 4096


class NotThere(MlessError):
    """A request for something that is not there. The page shows the text."""


def request_text(path: str, **values: object) -> str:
    """``map?condition=mless&folder=1``: the one spelling of a request. `source.js` writes the same."""
    # encodeURIComponent leaves these signs, and Python's quote is told to.
    pairs = [
        f"{quote(key, safe='')}={quote(str(value), safe=chr(33) + chr(39) + '()*')}"
        for key, value in sorted(values.items())
    ]
    return path + ("?" + "&".join(pairs) if pairs else "")


def read_request(text: str) -> tuple[str, dict[str, str]]:
    """Path and values of a request's text."""
    path, _, rest = text.partition("?")
    return path, dict(parse_qsl(rest, keep_blank_values=True))


class Query:
    """The values of a request, each read as what it must be. What does not fit is `NotThere`."""

    def __init__(self, folders: Folders, values: Mapping[str, str]) -> None:
        self.folders = folders
        self._values = dict(values)
        if any(len(key) + len(value) > _LONGEST for key, value in self._values.items()):
            raise NotThere(f"a value of the request is too long; expected at most {_LONGEST} characters")

    def folder(self) -> Folder:
        """The folder with the number `folder`, 1 otherwise."""
        return self.folders[self.whole("folder", 1, len(self.folders), default=1) - 1]

    def whole(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        """A whole number in a range."""
        given = self._values.get(name)
        if given is None and default is not None:
            return default
        is_whole = given is not None and given.isascii() and given.isdecimal() and len(given) <= 12
        if given is None or not is_whole or not low <= int(given) <= high:
            raise NotThere(f"{name}: expected a whole number from {low} to {high}, found {_shown(given)}")
        return int(given)

    def word(self, name: str, among: Sequence[str], *, default: str | None = None) -> str:
        """One of some known words."""
        given = self._values.get(name, default)
        if given is None or given not in among:
            raise NotThere(f"{name}: expected {_listed(among)}, found {_shown(given)}")
        return given

    def text(self, name: str, default: str = "") -> str:
        """Any text, for searching. It is compared only; nothing is opened by it."""
        return self._values.get(name, default)

    def has(self, name: str) -> bool:
        return name in self._values


def _shown(given: str | None) -> str:
    return "nothing" if given is None else repr(given[:60])


def _listed(among: Sequence[str]) -> str:
    return "one of " + ", ".join(map(repr, among[:12])) + (", …" if len(among) > 12 else "")


def plain(value: Any) -> Any:
    """As JSON can hold it: numbers that are none are null, arrays are lists."""
    if isinstance(value, Numbers):
        return value
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in cast("dict[object, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("Sequence[Any]", value)]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Numbers(list["float | None"]):
    """Numbers that JSON can hold as they are."""


def numbers(values: Any, digits: int = 5) -> Numbers:
    """Numbers with so many significant digits, null where there is none: short, since a page shows no more."""
    found = np.asarray(values, float).tolist()
    return Numbers(float(f"{one:.{digits}g}") if math.isfinite(one) else None for one in found)
