"""A table read in batches, each checked: whatever its size, only a few thousand rows are in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from mless.explorer.folders import Folder
from mless.explorer.slices import check_digest
from mless.results.tables import TableGate

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

ROWS = 4096
#: Rows that are kept with one that was asked for: its neighbours are often asked for next.
BLOCK = 256


def batches(
    folder: Folder,
    table: str,
    columns: Sequence[str],
    *,
    newer: Sequence[str] = (),
    where: Callable[[pa.Table], Any] | None = None,
) -> Iterator[pa.Table]:
    """The named columns, and those of the `newer` columns that exist, in the order of the file; at least one batch.

    With `where` only rows for which it is true are checked and given.
    """
    gate = _gate(folder, table)
    empty = True
    for _, rows in _raw(folder, gate, table, columns, newer):
        empty = False
        yield gate.check_rows(rows if where is None else rows.filter(where(rows))).select(rows.column_names)
    if empty:
        raise gate.refuse("has no rows; expected at least one")


def of_conditions(names: Sequence[str]) -> Callable[[pa.Table], Any]:
    """Rows of these conditions, for `batches`."""
    return lambda rows: pc.is_in(rows["condition"], value_set=pa.array(names, pa.string()))


def rows_at(
    folder: Folder, table: str, columns: Sequence[str], places: Sequence[int], *, newer: Sequence[str] = ()
) -> pa.Table:
    """Rows by their number in the file, in the order of `places`. The file is read up to the last of them, once: their blocks are kept."""
    wanted = sorted({place // BLOCK for place in places})
    key = ("block", table, tuple(columns))
    made: dict[int, pa.Table] = {}

    def block(number: int) -> pa.Table:
        if number not in made:
            made.update(_blocks(folder, table, columns, newer, [one for one in wanted if one not in made]))
        return made[number]

    found = {
        number: folder.kept((*key, number), lambda number=number: block(number), lambda rows: rows.nbytes + 1024)
        for number in wanted
    }
    parts = [found[place // BLOCK].slice(place % BLOCK, 1) for place in places]
    return pa.concat_tables(parts) if parts else _nothing(folder, table, columns, newer)


def _blocks(
    folder: Folder, table: str, columns: Sequence[str], newer: Sequence[str], wanted: Sequence[int]
) -> dict[int, pa.Table]:
    gate = _gate(folder, table)
    found: dict[int, pa.Table] = {}
    for first, rows in _raw(folder, gate, table, columns, newer):
        for number in wanted:
            start = number * BLOCK - first
            if 0 <= start < len(rows):
                # A copy, so that the rest of the batch is not kept with it.
                some = rows.take(pa.array(np.arange(start, min(start + BLOCK, len(rows)))))
                found[number] = gate.check_rows(some).select(rows.column_names)
        if len(found) == len(wanted):
            return found
    raise gate.refuse("has fewer rows than before")


def _nothing(folder: Folder, table: str, columns: Sequence[str], newer: Sequence[str]) -> pa.Table:
    return next(batches(folder, table, columns, newer=newer)).slice(0, 0)


def _gate(folder: Folder, table: str) -> TableGate:
    file = folder.path / f"{table}.parquet"
    gate = TableGate(file, folder.about(), whole=False)
    folder.kept(("digest", table), lambda: check_digest(folder, file))
    return gate


def _raw(
    folder: Folder, gate: TableGate, table: str, columns: Sequence[str], newer: Sequence[str]
) -> Iterator[tuple[int, pa.Table]]:
    """Batches as they are stored, each with the number of its first row."""
    file = folder.path / f"{table}.parquet"
    with gate.read(lambda: pq.ParquetFile(file, page_checksum_verification=True)) as opened:
        there = opened.schema_arrow.names
        if missing := [name for name in columns if name not in there]:
            raise gate.refuse(f"has no column {', '.join(map(repr, missing))}")
        wanted = [*columns, *(name for name in newer if name in there)]
        if twice := [name for name in wanted if there.count(name) > 1]:
            raise gate.refuse(f"has the column {twice[0]!r} twice")
        steps = gate.read(lambda: opened.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False))
        first = 0
        while (batch := gate.read(lambda: next(steps, None))) is not None:
            yield first, pa.Table.from_batches([batch]).select(wanted)
            first += batch.num_rows
