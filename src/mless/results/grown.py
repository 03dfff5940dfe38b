"""Reading a table that was stored unit by unit: one item with all heads, or one head with all items, without the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mless import gates
from mless.guarded import usable_cores
from mless.results.growing import INDEX, is_part

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


@dataclass(frozen=True)
class Piece:
    """One row group: the rows of some units, in some of the layers."""

    units: list[str]
    rows: list[int]
    table: pa.Table

    def apart(self) -> Iterator[tuple[str, pa.Table]]:
        """Each unit with its rows."""
        at = 0
        for unit, length in zip(self.units, self.rows, strict=True):
            yield unit, self.table.slice(at, length)
            at += length


class NotAsListed(Exception):
    """The table's row groups are not those of its index. The text says how."""


class GrownTable:
    """A finished table, opened once. Tables of folders before format 4 have no index: each of their row groups is a unit, in the order of `units`."""

    def __init__(self, file: Path, units: Sequence[str]) -> None:
        import pyarrow.parquet as pq

        self._file = file
        self._metadata: pq.FileMetaData = pq.read_metadata(file)
        #: By row group: its units, and their rows.
        self._groups = self._listed(units)
        if len(self._groups) != self._metadata.num_row_groups:
            raise NotAsListed(
                f"has {self._metadata.num_row_groups} row groups where its index lists {len(self._groups)}"
            )
        for number, (_, rows) in enumerate(self._groups):
            if sum(rows) != self._metadata.row_group(number).num_rows:
                raise NotAsListed(f"has other rows in row group {number} than its index lists")
        self._where: dict[str, list[int]] = {}
        for number, (names, _) in enumerate(self._groups):
            for unit in names:
                self._where.setdefault(unit, []).append(number)
        if self._where.keys() != set(units):
            raise NotAsListed(f"holds {len(self._where)} units that are not the {len(units)} of its study")

    def _listed(self, units: Sequence[str]) -> list[tuple[list[str], list[int]]]:
        """The units and rows of each row group, by the table's index; without one, by the order of the units."""
        written = (self._metadata.metadata or {}).get(INDEX.encode())
        if written is None:
            groups: int = self._metadata.num_row_groups
            if groups != len(units):
                raise NotAsListed(f"has {groups} parts where its study has {len(units)} units")
            return [([unit], [self._metadata.row_group(n).num_rows]) for n, unit in enumerate(units)]
        content = gates.json_of(written.decode(errors="replace"), lambda why: NotAsListed(f"has an index that {why}"))
        if not isinstance(content, list):
            raise NotAsListed("has an index that is no list")
        found: list[tuple[list[str], list[int]]] = []
        for part in content:
            if not isinstance(part, dict) or not is_part(part.get("units"), part.get("rows")):
                raise NotAsListed("has an index that is not one of mless")
            found += [(part["units"], rows) for rows in part["rows"]]
        return found

    def _opened(self) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self._file, metadata=self._metadata, page_checksum_verification=True)

    def _piece(self, opened: pq.ParquetFile, number: int, columns: Sequence[str] | None) -> Piece:
        units, rows = self._groups[number]
        table = opened.read_row_group(number, columns=list(columns) if columns else None, use_threads=False)
        return Piece(units, rows, table)

    def unit(self, unit: str, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a unit. Only the row groups that hold some of them are read."""
        import pyarrow as pa

        if unit not in self._where:
            raise NotAsListed(f"holds no unit {unit}")
        pieces = self._read(self._where[unit], columns)
        return pa.concat_tables([rows for piece in pieces for name, rows in piece.apart() if name == unit])

    def pieces(
        self, columns: Sequence[str] | None = None, *, layer: int | None = None, units: Container[str] | None = None
    ) -> Iterator[Piece]:
        """Row groups in the order of the file, read by as many threads as there are cores; with `layer` or `units` those that hold some of these."""
        return self._read(self.numbers(layer=layer, units=units), columns)

    def numbers(self, *, layer: int | None = None, units: Container[str] | None = None) -> list[int]:
        """The numbers of the row groups that hold some of these, for `piece`."""
        return [
            number
            for number, (names, _) in enumerate(self._groups)
            if (units is None or any(name in units for name in names)) and (layer is None or self._holds(number, layer))
        ]

    def numbers_of(self, unit: str, layer: int) -> list[int]:
        """The numbers of the row groups that hold a layer of a unit."""
        return [number for number in self._where.get(unit, ()) if self._holds(number, layer)]

    def piece(self, number: int, columns: Sequence[str]) -> Piece:
        """One row group, read by this thread: for those who must not take much memory at once."""
        with self._opened() as opened:
            return self._piece(opened, number, columns)

    def each(self, columns: Sequence[str], use: Callable[[Piece], None]) -> None:
        """Every row group once, in any order; `use` is called in the thread that read it."""
        for _ in self._read(range(len(self._groups)), columns, use):
            pass

    def _holds(self, number: int, layer: int) -> bool:
        group = self._metadata.row_group(number)
        at = self._metadata.schema.names.index("layer")
        found = group.column(at).statistics
        return found is None or not found.has_min_max or found.min <= layer <= found.max

    def _read(
        self, numbers: Sequence[int], columns: Sequence[str] | None, use: Callable[[Piece], None] | None = None
    ) -> Iterator[Piece]:
        """Some row groups in order; those that are used at once are not kept."""
        threads = max(1, min(len(numbers), usable_cores()))
        # A file that is open reads one row group at a time, so each thread opens its own.
        share = max(1, min(8, len(numbers) // threads))
        chunks = [numbers[at : at + share] for at in range(0, len(numbers), share)]

        def read(chunk: Sequence[int]) -> list[Piece]:
            with self._opened() as opened:
                if use is None:
                    return [self._piece(opened, number, columns) for number in chunk]
                for number in chunk:
                    use(self._piece(opened, number, columns))
                return []

        if threads < 2:
            for chunk in chunks:
                yield from read(chunk)
            return
        with ThreadPoolExecutor(threads) as pool:
            waiting = deque(pool.submit(read, chunk) for chunk in chunks[: 2 * threads])
            following = iter(chunks[2 * threads :])
            while waiting:
                found = waiting.popleft().result()
                if (chunk := next(following, None)) is not None:
                    waiting.append(pool.submit(read, chunk))
                yield from found
