"""The gate for GGUF files: the header is read once, in plain steps, before any library reads it. No count in it is trusted."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mless import gates, limits
from mless.errors import UnknownModel
from mless.gates import Refuse, shown
from mless.limits import Limit

_STRING, _ARRAY = 8, 9
#: Of each type of value: how struct names it.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
#: Metadata fields that say how much will be built; the family's name stands before the dot.
_COUNTS: tuple[tuple[re.Pattern[str], Limit], ...] = (
    (re.compile(r".+\.(block_count|leading_dense_block_count|nextn_predict_layers)"), limits.LAYERS),
    (re.compile(r".+\.(\w*head_count\w*|expert_\w*count)"), limits.COUNT),
    (re.compile(r".+\.(\w+_length|vocab_size|dimension_count)"), limits.WIDTH),
)
_MOST_SIDES = 8


def check_gguf(path: Path, name: str) -> None:
    """Refuse a file whose header is cut short, counts more than there is, or describes a model larger than any."""

    def refuse(message: str) -> UnknownModel:
        return UnknownModel(f"{shown(name)} is not a readable GGUF file, or is cut short ({message}); fetch it again")

    gates.check_file(path, Limit("", 1 << 62, "bytes", ""), refuse)
    if not path.stat().st_size:
        raise refuse("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _Header(content, refuse).check()


class _Header:
    def __init__(self, content: mmap.mmap, refuse: Refuse) -> None:
        self._content, self._refuse, self._at, self._order = content, refuse, 0, "<"

    def check(self) -> None:
        if self._bytes(4) != b"GGUF":
            raise self._refuse("it does not begin with GGUF")
        version = self._number("I")
        if version and not version & 0xFFFF:
            self._order, version = ">", version >> 24  # written on a machine with the other order of bytes
        if version not in (2, 3):
            raise self._refuse(f"its version is {version}; expected 2 or 3")
        tensors, fields = self._number("Q"), self._number("Q")
        for count, what in ((tensors, "tensors"), (fields, "fields")):
            if count > limits.GGUF_ENTRIES.value:
                raise self._refuse(f"it says it has {count:,} {what}; expected {limits.GGUF_ENTRIES}")
        self._each(fields, self._field)
        self._each(tensors, self._tensor)

    def _each(self, count: int, take: Callable[[], str]) -> None:
        seen: set[str] = set()
        for _ in range(count):
            name = take()
            if name in seen:
                raise self._refuse(f"{shown(name, 60)} is there twice")
            seen.add(name)

    def _field(self) -> str:
        name = self._name()
        limit = next((limit for pattern, limit in _COUNTS if pattern.fullmatch(name)), None)
        value = self._value(name, self._number("I"), kept=limit is not None)
        for one in value if isinstance(value, list) else [value]:
            if limit is not None and isinstance(one, int) and not 0 <= one <= limit.value:
                raise self._refuse(f"{name} is {one:,}; expected {limit}")
        return name

    def _value(self, name: str, kind: int, *, kept: bool) -> Any:
        """The value; of an array its numbers, where they are to be `kept`."""
        if kind in _FORMATS:
            return self._number(_FORMATS[kind])
        if kind == _STRING:
            return self._bytes(self._number("Q"))
        if kind != _ARRAY:
            raise self._refuse(f"{shown(name, 60)} has a value of an unknown type, {kind}")
        kind, count = self._number("I"), self._number("Q")
        if count > limits.GGUF_VALUES.value:
            raise self._refuse(f"{shown(name, 60)} lists {count:,} values; expected {limits.GGUF_VALUES}")
        if kind == _STRING:
            for _ in range(self._fits(count, 8)):
                self._bytes(self._number("Q"))
            return None
        if kind not in _FORMATS:
            raise self._refuse(f"{shown(name, 60)} is a list of an unknown type, {kind}")
        size = struct.calcsize(_FORMATS[kind])
        if not kept:
            self._at += self._fits(count, size) * size
            return None
        raw = self._bytes(self._fits(count, size) * size)
        return list(struct.unpack(f"{self._order}{count}{_FORMATS[kind]}", raw))

    def _tensor(self) -> str:
        name = self._name()
        sides = self._number("I")
        if sides > _MOST_SIDES:
            raise self._refuse(f"tensor {shown(name, 60)} has {sides:,} sides; expected at most {_MOST_SIDES}")
        for _ in range(sides):
            if (side := self._number("Q")) > limits.WIDTH.value:
                raise self._refuse(f"tensor {shown(name, 60)} has a side of {side:,}; expected {limits.WIDTH}")
        self._number("I")
        if self._number("Q") > len(self._content):
            raise self._refuse(f"tensor {shown(name, 60)} lies beyond the file's end")
        return name

    def _name(self) -> str:
        raw = self._bytes(self._number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._refuse(f"the name {shown(raw, 60)} is not UTF-8") from None

    def _fits(self, count: int, size: int) -> int:
        """`count`, where so many values of at least `size` bytes can follow."""
        if count * size > len(self._content) - self._at:
            raise self._refuse(f"it says that {count:,} values follow at byte {self._at:,} of {len(self._content):,}")
        return count

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._at += self._fits(count, 1)
        return self._content[start : self._at]

    def _number(self, kind: str) -> Any:
        return struct.unpack(self._order + kind, self._bytes(struct.calcsize(kind)))[0]
