"""A table read in batches, each checked: whatever its size, only a few thousand rows are in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from mless.explorer.folders import Folder
from mless.explorer.slices import check_digest
from mless.results.tables import TableGate

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

ROWS = 4096


def batches(
    folder: Folder, table: str, columns: Sequence[str], *, newer: Sequence[str] = (), only: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The named columns, and those of the `newer` columns that exist, in the order of the file; at least one batch.

    `only` are the conditions whose rows are given.
    """
    file = folder.path / f"{table}.parquet"
    gate = TableGate(file, folder.about(), whole=False)
    folder.kept(("digest", table), lambda: check_digest(folder, file))
    with gate.read(lambda: pq.ParquetFile(file, page_checksum_verification=True)) as opened:
        there = opened.schema_arrow.names
        if missing := [name for name in columns if name not in there]:
            raise gate.refuse(f"has no column {', '.join(map(repr, missing))}")
        wanted = [*columns, *(name for name in newer if name in there)]
        steps = gate.read(lambda: opened.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False))
        empty = True
        while (batch := gate.read(lambda: next(steps, None))) is not None:
            empty = False
            rows = pa.Table.from_batches([batch])
            if only is not None:
                rows = rows.filter(pc.is_in(rows["condition"], value_set=pa.array(only, pa.string())))
            yield gate.check_rows(rows).select(wanted)
        if empty:
            yield pa.Table.from_batches([], pa.schema([opened.schema_arrow.field(name) for name in wanted]))
