"""Tables of units, stored as a study stores them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mless.results import sealing
from mless.results.folder import ResultFolder
from mless.results.storing import Store


def grow(folder: ResultFolder, name: str, units: Mapping[str, pa.Table], *, in_part: int = 2) -> None:
    """A finished table of these units, in their order."""
    store = Store(folder, [name], parts_of(list(units), in_part))
    for unit, table in units.items():
        store.add(unit, {name: table})
    put_ready(store)
    store.finish()


def parts_of(units: Sequence[str], in_part: int) -> list[list[str]]:
    return [list(units[at : at + in_part]) for at in range(0, len(units), in_part)]


def put_ready(store: Store, *, at_once: bool = False) -> None:
    for ready in list(store.ready(at_once=at_once)):
        store.put(store.encode(ready, lambda unit, tables: None))


def forged(names: Sequence[str], whole: pa.Table, **said: str) -> bytes:
    """A part of table t of study s, with a good seal, that may say something else of itself."""
    even = [len(whole) // len(names)] * len(names)
    key = {"study": "s", "table": "t", "units": json.dumps(list(names)), "rows": json.dumps([even])}
    return sealing.encode([whole], key | said)


def behind_its_mark(part: bytes) -> bytes:
    """A part as it stands in the file."""
    return b"mless.pt" + len(part).to_bytes(8, "little") + part


def sealed_again(content: bytes) -> bytes:
    """A part that was changed, with the seal of what it holds now."""
    place = list(re.finditer(rb"mless\.sha256\x18\x40([0-9a-f]{64})", content))[-1].span(1)
    opened = content[: place[0]] + b"0" * 64 + content[place[1] :]
    return content[: place[0]] + hashlib.sha256(opened).hexdigest().encode() + content[place[1] :]


def with_a_map(content: bytes, *, first: bool) -> bytes:
    """A part whose footer has one field more, sealed again: an empty map, which pyarrow passes over and never writes."""
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[begin:-8]
    footer = b"\x0b\0\0" + footer if first else footer[:-1] + b"\x1b\0" + footer[-1:]
    return sealed_again(content[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def write_as_format_3(path: Path, tables: Sequence[pa.Table]) -> None:
    """A table as it was written before format 4: each unit, in the order of the study, is a row group, and no index says so."""
    plain = [table.replace_schema_metadata(None) for table in tables]  # it holds the index of where they were read from
    with pq.ParquetWriter(path, plain[0].schema, compression="zstd", write_page_checksum=True) as writer:
        for table in plain:
            writer.write_table(table, row_group_size=max(1, len(table)))
