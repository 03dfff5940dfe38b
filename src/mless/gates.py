"""The one reader for files and JSON from outside. What it returns is whole, within its limits and plain.

A caller says with `refuse` which error its message becomes; the message continues "config.json of 'x' …".
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

from mless.errors import MlessError
from mless.limits import JSON_DEPTH, NUMBER_DIGITS, Limit

#: Makes the error of a message that continues a file's name, as "is a folder, not a file".
Refuse = Callable[[str], Exception]
_HALF = re.compile("[\ud800-\udfff]")
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def check_file(path: Path, limit: Limit, refuse: Refuse) -> None:
    """Refuse what is no plain file (a folder, a pipe, a device), cannot be opened, or is too large."""
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            found = next((name for is_kind, name in _KINDS if is_kind(about.st_mode)), "a device")
            raise refuse(f"is {found}, not a file")
        if about.st_size > limit.value:
            raise refuse(f"has {about.st_size:,} bytes; expected {limit}")
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise refuse("is not there") from None
    except (OSError, ValueError) as fault:  # ValueError: a name with NUL
        raise refuse(f"cannot be read ({getattr(fault, 'strerror', None) or fault})") from None


def state_of(path: Path) -> tuple[int, ...]:
    """What changes whenever a file is written or replaced; the last, ctime, cannot be set back as mtime can."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_bytes(path: Path, limit: Limit, refuse: Refuse) -> bytes:
    """The file's bytes. A pipe or device is refused before it is opened, because it may never end."""
    check_file(path, limit, refuse)
    try:
        return path.read_bytes()
    except OSError as fault:
        raise refuse(f"cannot be read ({fault.strerror})") from None


def read_text(path: Path, limit: Limit, refuse: Refuse) -> str:
    return text_of(read_bytes(path, limit, refuse), refuse)


def text_of(raw: bytes, refuse: Refuse) -> str:
    """UTF-8, without a byte order mark."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise refuse(f"line {line}: byte 0x{raw[fault.start]:02x} is not UTF-8; save the file as UTF-8") from None


def read_json(path: Path, limit: Limit, refuse: Refuse, *, finite: bool = True) -> Any:
    return json_of(read_text(path, limit, refuse), refuse, finite=finite)


def json_of(text: str, refuse: Refuse, *, finite: bool = True, where: str | None = None) -> Any:
    """JSON of limited depth, with no name twice in an object, no half characters and no numbers beyond a float's.

    `finite` refuses NaN and Infinity too. `where` replaces the line number in messages.
    """

    def at(message: str, line: int = 1) -> Exception:
        return refuse(f"{where or f'line {line}'}: {message}")

    def whole(digits: str) -> int:
        if len(digits) > NUMBER_DIGITS.value:
            raise at(f"broken JSON: a number of {len(digits):,} digits; expected {NUMBER_DIGITS}")
        return int(digits)

    def real(digits: str) -> float:
        if math.isinf(found := float(digits)):
            raise at(f"broken JSON: the number {digits[:40]} is too large")
        return found

    def named(word: str) -> float:
        if finite:
            raise at(f"{word} is no number of JSON; write a number, or leave it out")
        return float(word)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise at(f"{shown(twice)} stands twice in one object; remove one of them")
        return found

    try:
        content = json.loads(text, object_pairs_hook=once, parse_int=whole, parse_float=real, parse_constant=named)
    except json.JSONDecodeError as fault:
        hint = ""
        if fault.msg == "Extra data":
            hint = "; one object per line " + ("is expected" if where else "belongs into a .jsonl file")
        raise at(f"broken JSON: {fault.msg} (column {fault.colno}){hint}", fault.lineno) from None
    except RecursionError:
        raise at(_too_deep()) from None
    check_content(content, at, halves=_may_hold_halves(text))
    return content


def _too_deep() -> str:
    return f"broken JSON: nested too deeply; expected {JSON_DEPTH}"


def _may_hold_halves(text: str) -> bool:
    return re.search(r"\\u[dD][89a-fA-F]", text) is not None or not_text(text)


def check_content(content: Any, at: Refuse, *, halves: bool = True) -> None:
    """The depth, and with `halves` that no text holds half a character."""
    level: list[Any] = [content]
    for depth in range(JSON_DEPTH.value + 2):
        if not level:
            return
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += cast("dict[str, Any]", value).values()
                if halves:
                    inner += cast("dict[str, Any]", value)
            elif isinstance(value, list):
                inner += cast("list[Any]", value)
            elif halves and isinstance(value, str) and (half := _HALF.search(value)):
                raise at(f"{half[0]!r} is half a character (a lone surrogate), not text; remove or replace it")
        if depth == JSON_DEPTH.value and any(isinstance(value, dict | list) for value in level):
            raise at(_too_deep())
        level = inner


def toml_of(text: str, refuse: Refuse) -> dict[str, Any]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise refuse(f"is no valid TOML: {fault}") from None
    except RecursionError:
        raise refuse(f"is nested too deeply; expected {JSON_DEPTH}") from None
    except (ValueError, OverflowError) as fault:  # a number of thousands of digits, a date that does not exist
        raise refuse(f"is no valid TOML: {shown(fault, 100)}") from None
    check_content(content, refuse, halves=_may_hold_halves(text))
    return content


def not_text(text: str) -> bool:
    """Whether half a character (a lone surrogate) is in it: what Python makes of bytes that are no UTF-8, and no file takes."""
    return _HALF.search(text) is not None


def an_object(value: Any, refuse: Refuse) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(f"should hold an object, not {kind_of(value)}")
    return cast("dict[str, Any]", value)


def kind_of(value: Any) -> str:
    """What a value from JSON is, for a message."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def check_count(
    value: int | None, what: str, limit: Limit, error: Callable[[str], MlessError], *, least: int = 1
) -> None:
    """Refuse a count below `least` or above its limit; None is no count."""
    if value is not None and not least <= value <= limit.value:
        refuse_count(value, what, limit, error, least)


def refuse_count(value: int, what: str, limit: Limit, error: Callable[[str], MlessError], least: int) -> NoReturn:
    wanted = f"at least {least}" if value < least else str(limit)
    raise error(
        f"{what}: expected {wanted}, got {shown_number(value)}; give a {'larger' if value < least else 'smaller'} one"
    )


def shown_number(value: int) -> str:
    """A number for a message; Python refuses to write out one of thousands of digits."""
    bits = value.bit_length()
    return str(value) if bits < 200 else f"a number of about {int(bits * 0.30103) + 1:,} digits"


def shown(thing: object, width: int = 200) -> str:
    """For a message, on one line and never long: a number as it is, anything else quoted with its control characters escaped."""
    if isinstance(thing, bool | float) or thing is None:
        return str(thing)
    if isinstance(thing, int):
        return shown_number(thing)
    words = str(thing)
    return repr(words if len(words) <= width else f"{words[: width // 2 - 1]}…{words[1 - width // 2 :]}")
