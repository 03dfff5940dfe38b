"""A table that grows while its study runs: sealed parts one after the other in one file, and at the end one footer over all of them.

A part holds the rows of some units. It is a whole Parquet file with a checksum inside, behind 16 bytes that say how long it is. A part that
a killed run left unfinished is found by that and cut off. In the finished table row groups lie where they were written: nothing is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mless.errors import BadFolder
from mless.results import footers, sealing

if TYPE_CHECKING:
    import pyarrow as pa

#: Parquet's own first bytes, and those before every part.
_FIRST, _MARK = b"PAR1", b"mless.pt"
_HEAD = len(_MARK) + 8
#: The finished table's index: which units lie in which row groups.
INDEX = "mless.units"
_AT_ONCE = 1 << 20
#: After so many damaged places the rest of a file counts as damaged.
_DAMAGED_PARTS = 64


@dataclass(frozen=True)
class Part:
    """Some units' rows: where they lie in the file, and the rows of each unit in each of its row groups."""

    start: int
    length: int
    units: list[str]
    rows: list[list[int]]


@dataclass
class Recovered:
    """Places in a growing table that were not taken over: whole parts that are not in their turn, and what is damaged or of another study."""

    loose: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    damaged: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(frozen=True)
class Sealed:
    """A part's bytes, its units, and the rows of each unit in each of its row groups."""

    content: bytes
    units: list[str]
    rows: list[list[int]]


class OtherColumns(Exception):
    """A unit has other columns than those before it. The text names the unit."""


def grew(table: Path) -> bool:
    """Whether a table was written as its units came, so that it can go on growing. Those before format 4 were not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return INDEX.encode() in (pq.read_metadata(table).metadata or {})
    except (OSError, pa.ArrowException, ValueError):
        return False


def stored_units(path: Path) -> int:
    """How many units a growing table holds, by what its parts say of themselves. Quick, and so nothing is checked: for showing only."""
    import pyarrow as pa

    count, at = 0, len(_FIRST)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while at + _HEAD < size:
                file.seek(at)
                head = file.read(_HEAD)
                stop = at + _HEAD + int.from_bytes(head[len(_MARK) :], "little")
                if head[: len(_MARK)] != _MARK or stop > size:
                    break
                file.seek(stop - 8)
                length = min(int.from_bytes(file.read(4), "little") + 8, stop - at - _HEAD)
                file.seek(stop - length)
                count += len(json.loads(sealing.key_in(_FIRST + file.read(length))["units"]))
                at = stop
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        pass  # what was counted so far is shown
    return count


def part_key(study: str, table: str, units: Sequence[str]) -> dict[str, str]:
    """What a part says of itself, but for its rows."""
    return {"study": study, "table": table, "units": json.dumps(list(units))}


def encode_part(units: Mapping[str, pa.Table], layers_at_once: int, key: Mapping[str, str]) -> Sealed:
    """Units of one table as a sealed part. Where the rows belong to layers, so many layers are a row group, so that they can be read apart."""
    import pyarrow as pa

    plain = [_plain(table) for table in units.values()]
    cut = [_by_layers(table, layers_at_once) for table in plain]
    if len({len(pieces) for pieces in cut}) > 1:
        cut = [[table] for table in plain]  # units with other layers than their neighbours cannot be cut alike
    groups = list(zip(*cut, strict=True))
    rows = [[len(piece) for piece in group] for group in groups]
    whole = [pa.concat_tables(group).combine_chunks() for group in groups]
    return Sealed(sealing.encode(whole, {**key, "rows": json.dumps(rows)}), list(units), rows)


def _plain(table: pa.Table) -> pa.Table:
    """The same rows with the same bytes, whether they were just made or read from a file, where what is inside a list has another name."""
    import pyarrow as pa

    def plain(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind):
            return pa.list_(plain(kind.value_type))
        if pa.types.is_struct(kind):
            return pa.struct([(one.name, plain(one.type)) for one in kind])
        return kind

    # Most tables are plain, and there are thousands of them.
    if table.schema.metadata is None and all(_is_plain(one) for one in table.schema):
        return table
    wanted = pa.schema([(one.name, plain(one.type)) for one in table.schema])
    return table if str(table.schema) == str(wanted) else table.cast(wanted)


def _is_plain(column: pa.Field) -> bool:
    import pyarrow as pa

    return column.nullable and column.metadata is None and not pa.types.is_nested(column.type)


def _by_layers(table: pa.Table, at_once: int) -> list[pa.Table]:
    """A unit's rows cut wherever so many layers are complete; its rows are in the order of the layers."""
    import numpy as np

    if "layer" not in table.column_names or not len(table):
        return [table]
    layer = table.column("layer").to_numpy()
    if not np.issubdtype(layer.dtype, np.integer) or (np.diff(layer) < 0).any():
        return [table]
    starts = np.flatnonzero(np.diff(layer, prepend=layer[0] - 1))[::at_once].tolist()
    return [table.slice(a, b - a) for a, b in zip(starts, [*starts[1:], len(table)], strict=True)]


class GrowingTable:
    """The file of one table while its study runs. One thread writes it. `study` names the study, which may be known only once it has started."""

    def __init__(self, path: Path, table: str, study: Callable[[], str]) -> None:
        self.path = path
        self._table, self._study = table, study
        self.parts: list[Part] = []
        #: Where each part begins, and its footer.
        self._footers: list[tuple[int, bytes]] = []
        #: How many units are in it.
        self.count = 0
        self._columns: bytes | None = None
        self._total = hashlib.sha256(_FIRST)
        self._end = len(_FIRST)
        self._file: int | None = None

    @property
    def units(self) -> list[str]:
        return [unit for part in self.parts for unit in part.units]

    # ---- what is there

    def look(self, wanted: Sequence[Sequence[str]] | None = None) -> Recovered:
        """Take over the parts that an earlier run wrote: the `wanted` ones up to the first that is not there, or all, in whatever order.

        Nothing is changed. `cut` removes what is behind the parts that were taken.
        """
        found = Recovered()
        if self.path.exists():
            known = {unit for part in wanted or () for unit in part}
            with self.path.open("rb") as file:
                self._walk(file, os.fstat(file.fileno()).st_size, found, wanted, known)
        return found

    def _turn(self, sealed: Sealed, wanted: Sequence[Sequence[str]] | None, known: set[str]) -> bool | None:
        """Whether a part is the one that follows; None where it holds units or columns that its study does not have."""
        if self._columns not in (None, footers.schema_of(footers.footer_bytes(sealed.content))):
            return None
        if wanted is None:
            return True
        if not known.issuperset(sealed.units):
            return None
        return sealed.units == list(next(iter(wanted[len(self.parts) : len(self.parts) + 1]), []))

    def cut(self) -> None:
        """Remove everything behind the last part."""
        if self.path.exists():
            os.truncate(self.path, self._end if self.parts else 0)

    def _walk(
        self, file: BinaryIO, size: int, found: Recovered, wanted: Sequence[Sequence[str]] | None, known: set[str]
    ) -> None:
        at, whole = len(_FIRST), file.read(len(_FIRST)) == _FIRST
        while at < size and not _is_footer(file, at, size):
            file.seek(at)
            head = file.read(_HEAD)
            stop = at + _HEAD + int.from_bytes(head[len(_MARK) :], "little")
            there = head[: len(_MARK)] == _MARK and stop <= size
            sealed = self._sealed(file.read(stop - at - _HEAD)) if there else None
            follows = self._turn(sealed, wanted, known) if sealed is not None else None
            if sealed is not None and follows is not None:
                whole = whole and follows
                if whole:
                    self._take(sealed)
                else:
                    found.loose.append((at + _HEAD, stop))
                at = stop
                continue
            # A file with many of them is not one of mless, and to look for more takes longer and longer.
            many = len(found.damaged) >= _DAMAGED_PARTS
            later = None if many else _next_mark(file, at + 1, size)
            # The last part without an end is what a killed run was writing. What does not begin as one was not written here.
            if many or later is not None or stop <= size or not _MARK.startswith(head[: len(_MARK)]):
                found.damaged.append((at, size if later is None else later))
            whole = False
            at = size if later is None else later

    def bytes_of(self, place: tuple[int, int]) -> bytes:
        """Some bytes of the file, as `look` names them."""
        with self.path.open("rb") as file:
            file.seek(place[0])
            return file.read(place[1] - place[0])

    def _sealed(self, content: bytes) -> Sealed | None:
        """A part that was read; None where it is damaged, holds other rows than it says, or belongs to another study."""
        import pyarrow as pa

        try:
            sealing.check(content)
            said = sealing.key_in(content)
            units, rows = json.loads(said["units"]), json.loads(said["rows"])
            fits = is_part(units, rows) and list(map(sum, rows)) == sealing.rows_in(content)
            footers.joined([(0, footers.footer_bytes(content))], {})  # as `finish` will
        except (sealing.Damaged, ValueError, KeyError, TypeError, OSError, RecursionError, pa.ArrowException):
            return None
        mine = said.get("study") == self._study() and said.get("table") == self._table
        return Sealed(content, units, rows) if mine and fits else None

    def _take(self, sealed: Sealed) -> None:
        start = self._end + _HEAD
        footer = self._footer(sealed)
        self._columns = footers.schema_of(footer)
        self.parts.append(Part(start, len(sealed.content), sealed.units, sealed.rows))
        self._footers.append((start, footer))
        self.count += len(sealed.units)
        self._total.update(_head(sealed.content))
        self._total.update(sealed.content)
        self._end = start + len(sealed.content)

    def _footer(self, sealed: Sealed) -> bytes:
        """The part's footer, once it is known to have the columns of those before it."""
        footer = footers.footer_bytes(sealed.content)
        if self._columns not in (None, footers.schema_of(footer)):
            raise OtherColumns(sealed.units[0])
        return footer

    # ---- writing

    def append(self, sealed: Sealed) -> None:
        """Write a part behind the others. It is safe once `sync` returns."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            if not self.parts:
                os.truncate(self._file, 0)
                _write_all(self._file, _FIRST)
                _sync_folder(self.path.parent)  # its name must outlast a loss of power too
                _sync_folder(self.path.parent.parent)
            os.lseek(self._file, self._end, os.SEEK_SET)
        self._footer(sealed)
        try:
            _write_all(self._file, _head(sealed.content))
            _write_all(self._file, sealed.content)
        except OSError:
            # No room for it: what is there stays whole, and the next one goes behind it.
            os.truncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
            raise
        self._take(sealed)

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def finish(self) -> Finished:
        """Write the footer. The file is then a Parquet table."""
        index = json.dumps([{"units": part.units, "rows": part.rows} for part in self.parts], separators=(",", ":"))
        end = footers.joined(self._footers, {INDEX: index})
        with self.path.open("r+b") as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(end)
            file.flush()
            os.fsync(file.fileno())
        total = self._total.copy()
        total.update(end)
        return Finished(total.hexdigest(), hashlib.sha256(end).hexdigest())

    # ---- reading

    def read_units(self, number: int) -> dict[str, pa.Table]:
        """The rows of each unit of a part."""
        part = self.parts[number]
        with self.path.open("rb") as file:
            file.seek(part.start)
            return self.units_in(file.read(part.length))

    def units_in(self, content: bytes) -> dict[str, pa.Table]:
        """The same of a part's bytes."""
        try:
            sealed = self._sealed(content)
            if sealed is None:
                raise sealing.Damaged("it is damaged, or belongs to another study")
            return split(sealing.decode(content, sealing.key_in(content)), sealed.units, sealed.rows)
        except sealing.Damaged as fault:
            raise BadFolder(
                f"a part of {self.path} is refused: {fault}; remove that file and run the same command again"
            ) from None


def split(table: pa.Table, units: Sequence[str], rows: Sequence[Sequence[int]]) -> dict[str, pa.Table]:
    """The rows of each unit, from all row groups of a part."""
    import pyarrow as pa

    found: dict[str, list[pa.Table]] = {unit: [] for unit in units}
    at = 0
    for group in rows:
        for unit, length in zip(units, group, strict=True):
            found[unit].append(table.slice(at, length))
            at += length
    return {unit: pa.concat_tables(pieces) for unit, pieces in found.items()}


@dataclass(frozen=True)
class Finished:
    """Digests of a finished table: of the whole file, and of its footer alone."""

    digest: str
    footer: str


def is_part(units: object, rows: object) -> bool:
    """Whether these are names of units, each once, and the rows of each in every row group."""
    return (
        isinstance(units, list)
        and isinstance(rows, list)
        and all(isinstance(unit, str) for unit in units)
        and len(set(units)) == len(units) > 0
        and len(rows) > 0
        and all(isinstance(group, list) and len(group) == len(units) for group in rows)
        and all(type(count) is int and count >= 0 for group in rows for count in group)
    )


def _is_footer(file: BinaryIO, at: int, size: int) -> bool:
    """Whether the rest of the file is the footer of a finished table."""
    if size - at < 8:
        return False
    file.seek(size - 8)
    end = file.read(8)
    return end[4:] == _FIRST and at + int.from_bytes(end[:4], "little") + 8 == size


def _next_mark(file: BinaryIO, at: int, size: int) -> int | None:
    """Where the next part may begin."""
    while at < size:
        file.seek(at)
        block = file.read(_AT_ONCE)
        if (found := block.find(_MARK)) >= 0:
            return at + found
        at += max(1, len(block) - len(_MARK) + 1) if len(block) > len(_MARK) else len(block) or 1
    return None


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _head(content: bytes) -> bytes:
    return _MARK + len(content).to_bytes(8, "little")


def _write_all(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
