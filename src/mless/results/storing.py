"""Stores units in the order of the study, in whatever order they come. The order makes the finished tables the same, byte for byte, after a
kill, after damage, and with any number of workers.

Some consecutive units are a part of a table. A part is appended once all of its units are there and all parts before it. A unit that waits
for too long becomes a file of its own, so that a kill does not lose it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mless.errors import BadFolder, BadPlugin
from mless.results.growing import OtherColumns, Sealed, encode_part, part_key
from mless.results.units import Expected, UnitGate

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.results.folder import ResultFolder

#: A part has at most so many units and, unless a single one has more, so many tokens: one item is read with few others.
_UNITS_IN_PART, _TOKENS_IN_PART = 8, 4096
#: A row group has about so many values: one layer is read with few others.
_VALUES_IN_GROUP = 1 << 20
#: Seconds after which a unit that waits for its part is written to a file, and bytes that may wait; what comes on top becomes a file at once.
PATIENCE = 5.0
_WAITING = 1 << 30

#: A unit's tables by their names, or a function that makes them.
Tables = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


def made(tables: Tables) -> Mapping[str, Any]:
    return tables() if callable(tables) else tables


def in_parts(units: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Units (a name, and the tokens of its prompt) in parts of a few that follow one another, always the same for the same study."""
    parts: list[list[str]] = []
    tokens = 0
    for unit, more in units:
        if not parts or len(parts[-1]) == _UNITS_IN_PART or tokens + more > _TOKENS_IN_PART:
            parts.append([])
            tokens = 0
        parts[-1].append(unit)
        tokens += more
    return parts


@dataclass(frozen=True)
class Ready:
    """Units that can be stored: the part of that number, or one by itself. Those without tables here are files."""

    units: Mapping[str, Tables | None]
    part: int | None


@dataclass(frozen=True)
class Encoded:
    """The same with its tables, and the bytes of its part by table. These are made later where some of its units are files."""

    ready: Ready
    tables: Mapping[str, Mapping[str, Any]]
    parts: Mapping[str, Sealed] | None


@dataclass(frozen=True)
class _Waiting:
    """A unit in memory: when it came, and its bytes; of one whose tables are made later these are not known."""

    since: float
    tables: Tables
    bytes: int


class Store:
    """The tables of a study's units while it runs. `parts` names all units, in the order of the finished tables."""

    def __init__(self, folder: ResultFolder, tables: Sequence[str], parts: Sequence[Sequence[str]]) -> None:
        self.folder, self._parts = folder, [list(part) for part in parts] if tables else []
        self._turns = {unit: at for at, unit in enumerate(unit for part in self._parts for unit in part)}
        self._tables = {name: folder.growing(name) for name in tables}
        #: Units that an earlier run left in each table, and those that are in all of them.
        self._grown: dict[str, set[str]] = {}
        self._stored: set[str] = set()
        #: Units that are files, and units in memory with the time at which they came.
        self._files: set[str] = set()
        self._waiting: dict[str, _Waiting] = {}
        self._bytes_waiting = 0
        self._following = 0

    def has(self, unit: str) -> bool:
        """Whether the unit is in the tables, or in a file that was found to be whole."""
        return unit in self._stored or unit in self._files

    def in_tables(self, unit: str) -> bool:
        return unit in self._stored

    # ---- what an earlier run left

    def recover(self, expecting: Callable[[str, str, pa.Table], Expected | None]) -> list[str]:
        """Take over the parts that are whole; what was found wrong, in words. `expecting` says what is known of a unit's table.

        Parts behind a damaged one become files: they wait for their turn.
        """
        said: list[str] = []
        for name, growing in self._tables.items():
            self.folder.take_back(name, growing)
            with self.folder.refusals(growing.path):
                found = growing.look(self._parts)
            for place in found.damaged:
                aside = self.folder.set_content_aside(growing.path, growing.bytes_of(place))
                where = growing.path.relative_to(self.folder.path)
                said.append(f"a part of {where} is damaged, or belongs to another study; set aside as {aside}")
            for number in range(len(growing.parts)):
                self._check(name, growing.read_units(number), expecting)
            for place in found.loose:
                units = growing.units_in(growing.bytes_of(place))
                self._check(name, units, expecting)
                for unit, rows in units.items():
                    self.folder.write_unit({name: rows}, unit)
            with self.folder.refusals(growing.path):
                growing.cut()  # only now: what was behind is safe
            self._grown[name] = set(growing.units)
        self._stored = set.intersection(*self._grown.values()) if self._grown else set()
        self._following = sum(set(part) <= self._stored for part in self._parts)
        return said

    def _check(
        self,
        table: str,
        units: Mapping[str, pa.Table],
        expecting: Callable[[str, str, pa.Table], Expected | None],
    ) -> None:
        for unit, rows in units.items():
            where = self.folder.path / "units" / f"{table}.parquet ({unit})"
            UnitGate(where, table).check(rows, lambda rows, unit=unit: expecting(unit, table, rows))

    def table_has(self, table: str, unit: str) -> bool:
        """Whether one of the growing tables holds the unit."""
        return unit in self._grown.get(table, ())

    def take_file(self, unit: str) -> None:
        """The unit is a file that was found to be whole."""
        self._files.add(unit)

    # ---- in the order of the study

    def add(self, unit: str, tables: Tables) -> None:
        """Take a unit that was measured."""
        self._drop(unit)
        size = 0 if callable(tables) else sum(table.nbytes for table in tables.values())
        self._waiting[unit] = _Waiting(time.monotonic(), tables, size)
        self._bytes_waiting += size

    def _drop(self, unit: str) -> None:
        if (one := self._waiting.pop(unit, None)) is not None:
            self._bytes_waiting -= one.bytes

    def ready(self, *, at_once: bool = False) -> Iterator[Ready]:
        """What can be stored now: parts, and units that waited for too long or are too many; `at_once` all that wait.

        What is given counts as handed over only when the next one is asked for, so that nothing is lost if it could not be taken.
        """
        while self._following < len(self._parts):
            part = self._parts[self._following]
            if not all(unit in self._waiting or unit in self._files for unit in part):
                break
            yield Ready(
                {unit: self._waiting[unit].tables if unit in self._waiting else None for unit in part}, self._following
            )
            self._following += 1
            for unit in part:
                self._drop(unit)
        # Without tables that grow there is nothing to wait for.
        late = time.monotonic() - (PATIENCE if self._tables and not at_once else 0.0)
        while (unit := self._too_long(late)) is not None:
            yield Ready({unit: self._waiting[unit].tables}, None)
            self._drop(unit)
            if unit not in self._stored:
                self._files.add(unit)

    def _too_long(self, late: float) -> str | None:
        """A unit that cannot wait: it came before that moment, or there is no room for it."""
        oldest = next(iter(self._waiting), None)
        if oldest is None or self._waiting[oldest].since <= late:
            return oldest
        newest = next(reversed(self._waiting))
        if newest in self._stored:  # it is in the tables already, so it has no turn
            return newest
        return max(self._waiting, key=lambda unit: self._turns.get(unit, 0)) if self._bytes_waiting > _WAITING else None

    def encode(self, ready: Ready, look: Callable[[str, Mapping[str, Any]], None]) -> Encoded:
        """Make tables and bytes of it; `look` sees each unit's tables first. Several threads may do this at once."""
        tables = {unit: made(found) for unit, found in ready.units.items() if found is not None}
        for unit, found in tables.items():
            look(unit, found)
        # A file may still be on its way to the disk. The one writer reads it.
        whole = ready.part is not None and len(tables) == len(ready.units)
        return Encoded(ready, tables, self._bytes(tables) if whole else None)

    def _bytes(self, units: Mapping[str, Mapping[str, Any]]) -> dict[str, Sealed]:
        found: dict[str, Sealed] = {}
        for name in self._tables:
            mine = {unit: tables[name] for unit, tables in units.items()}
            found[name] = encode_part(mine, _layers_at_once(mine), part_key(self.folder.study, name, list(mine)))
        return found

    def put(self, encoded: Encoded) -> None:
        """Store it. It is on the disk when this returns. One thread does this, in the order of `ready`."""
        ready, tables = encoded.ready, encoded.tables
        for unit, found in tables.items():
            # Of a unit that is in the tables, only what does not grow is stored.
            grown = ready.part is not None or unit in self._stored
            alone = {name: rows for name, rows in found.items() if not grown or name not in self._tables}
            if alone:
                self.folder.write_unit(alone, unit)
        if ready.part is None:
            return
        parts = encoded.parts or self._bytes({unit: tables.get(unit) or self._read(unit) for unit in ready.units})
        for name, growing in self._tables.items():
            # A kill may have left one table a part ahead of the others.
            if len(growing.parts) == ready.part:
                self.folder.written(growing, partial(self._append, name, parts[name]))
            assert len(growing.parts) > ready.part, "parts come in order"
        for growing in self._tables.values():
            self.folder.written(growing, growing.sync)
        for unit in self._files.intersection(ready.units):
            for name in self._tables:
                self.folder.unit_path(name, unit).unlink(missing_ok=True)

    def _append(self, name: str, sealed: Sealed) -> None:
        try:
            self._tables[name].append(sealed)
        except OtherColumns as fault:
            raise BadPlugin(
                f"table {name!r}: unit {fault} has other columns, or columns of another type, than the units before it; every unit needs the same"
            ) from None

    def _read(self, unit: str) -> dict[str, Any]:
        """A unit that an earlier run stored: a file, or in a table that is ahead of the others."""
        found: dict[str, Any] = {}
        for name, growing in self._tables.items():
            if self.folder.has_unit((name,), unit):
                found[name] = self.folder.read_unit(name, unit)
            else:
                number = next(n for n, part in enumerate(growing.parts) if unit in part.units)
                found[name] = growing.read_units(number)[unit]
        return found

    def close(self) -> None:
        for growing in self._tables.values():
            growing.close()

    def finish(self) -> None:
        """Give the growing tables their footers and their places in the folder."""
        for growing in self._tables.values():
            if len(growing.parts) < len(self._parts):
                raise BadFolder(f"{growing.path} lacks units of its study; run the same command again")
        for name, growing in self._tables.items():
            growing.close()
            self.folder.publish(name, growing)


def _layers_at_once(part: Mapping[str, pa.Table]) -> int:
    first = next(iter(part.values()))
    if "layer" not in first.column_names or not len(first):
        return 1
    layers = len(first.column("layer").unique())
    a_layer = sum(map(_values, part.values())) / layers
    return max(1, min(layers, int(_VALUES_IN_GROUP / max(1.0, a_layer))))


def _values(table: pa.Table) -> int:
    """Numbers of the longest column: rows, or the lists' lengths summed up."""
    import pyarrow as pa

    lists = [column for column in table.itercolumns() if pa.types.is_list(column.type)]
    return max([len(table), *(sum(_elements(chunk) for chunk in column.chunks) for column in lists)])


def _elements(chunk: pa.ListArray) -> int:
    offsets = chunk.offsets
    return offsets[-1].as_py() - offsets[0].as_py()
