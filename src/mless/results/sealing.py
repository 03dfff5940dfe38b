"""Checksums: a unit carries its own, study.json carries its own and those of the tables.

They find damage: a flipped bit, a cut file, a file put in another's place. They do not find forgery: a person who writes new numbers can write
new checksums too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless import gates
from mless.errors import first_line

if TYPE_CHECKING:
    import pyarrow as pa

#: The field of study.json that holds the digest of all the others.
OWN_DIGEST = "sha256"
_KEY, _SEAL = "mless.unit", "mless.sha256"
_OPEN = b"0" * 64
#: As Parquet's footer writes the seal: its name, the type and length of its value, its value.
_WRITTEN = re.compile(re.escape(_SEAL.encode()) + rb"\x18\x40([0-9a-f]{64})", re.DOTALL)
_AT_ONCE = 1 << 22


class Damaged(Exception):
    """A file is not what was written. The text says how that was found."""


def digest_of(content: Mapping[str, Any]) -> str:
    """The digest of JSON content, whatever its spacing and its order of keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_AT_ONCE):
            total.update(part)
    return total.hexdigest()


def digest_of_footer(path: Path) -> str:
    """The digest of a Parquet file's footer, from its first byte to the file's last."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little") + 8
        file.seek(max(0, size - length))
        return hashlib.sha256(file.read()).hexdigest()


def encode(table: pa.Table | Sequence[pa.Table], key: Mapping[str, str] | None = None) -> bytes:
    """A table as Parquet with page checksums; several are its row groups. With a `key` it is sealed: the key and a digest of every byte are
    inside.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    pieces = list(table) if isinstance(table, Sequence) else [table]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, pieces[0].schema, **_encoding(pieces[0].schema)) as writer:
        for piece in pieces:
            writer.write_table(piece, row_group_size=max(1, len(piece)))
        if key is not None:
            writer.add_key_value_metadata({_KEY: json.dumps(key, sort_keys=True), _SEAL: _OPEN.decode()})
    content = memoryview(sink.getvalue())
    if key is None:
        return bytes(content)
    # Pages have checksums, Parquet's footer has none. So the digest is of the whole file with zeros in the digest's place.
    start, stop = _place(content)
    return b"".join((content[:start], hashlib.sha256(content).hexdigest().encode(), content[stop:]))


def _encoding(columns: pa.Schema) -> dict[str, Any]:
    """How columns are written. The bytes of a measured number look random but for the first, so these are written together.

    Lists of whole numbers repeat from row to row, which is found without a dictionary. Columns of numbers with a fraction have no statistics:
    nobody looks for such a number.
    """
    import pyarrow as pa

    leaves = dict(_leaves(columns))
    split = {path: "BYTE_STREAM_SPLIT" for path, kind in leaves.items() if pa.types.is_floating(kind)}
    return {
        "compression": "zstd",
        "write_page_checksum": True,
        "column_encoding": split or None,
        "use_dictionary": [path for path in leaves if path not in split and not path.endswith(".element")] or False,
        "write_statistics": [path for path in leaves if path not in split] or False,
    }


def _leaves(fields: Iterable[pa.Field], before: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """Every column of single values inside these, by its path in Parquet."""
    import pyarrow as pa

    for field in fields:
        path, kind = before + field.name, field.type
        while pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        if pa.types.is_struct(kind):
            yield from _leaves(kind, f"{path}.")
        else:
            yield path, kind


def decode(content: bytes, key: Mapping[str, str]) -> pa.Table:
    """The table in a sealed file; refused where a bit is changed, or where it is another one than `key` says."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check(content)
    try:
        inside = key_in(content)
        table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
    except (OSError, KeyError, ValueError, pa.ArrowException) as fault:
        raise Damaged(f"it cannot be read: {first_line(fault)}") from None
    if inside != dict(key):
        raise Damaged(f"it holds another unit: {_difference(key, inside)}")
    kept = {name: value for name, value in (table.schema.metadata or {}).items() if not name.startswith(b"mless.")}
    return table.replace_schema_metadata(kept or None)


def check(content: bytes) -> None:
    """Raise `Damaged` unless every byte of a sealed file is as it was written."""
    seen = memoryview(content)
    try:
        start, stop = _place(seen)
    except LookupError:
        raise Damaged("it is cut short, damaged, or was not written by this mless: it has no checksum") from None
    total = hashlib.sha256(seen[:start])
    total.update(_OPEN)
    total.update(seen[stop:])
    if total.hexdigest().encode() != content[start:stop]:
        raise Damaged("it is damaged: its checksum does not match its content")


def key_in(content: bytes) -> dict[str, str]:
    """The key inside a sealed file whose seal was checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return json.loads((pq.read_metadata(pa.BufferReader(content)).metadata or {})[_KEY.encode()])


def rows_in(content: bytes) -> list[int]:
    """How many rows each row group has, by the footer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = pq.read_metadata(pa.BufferReader(content))
    return [found.row_group(number).num_rows for number in range(found.num_row_groups)]


def _place(content: memoryview) -> tuple[int, int]:
    """Where the seal's digest is written: in the footer, the last such place."""
    length = int.from_bytes(content[-8:-4], "little") + 8
    before = max(0, len(content) - length)
    found = list(_WRITTEN.finditer(content[before:]))
    if not found:
        raise LookupError
    start, stop = found[-1].span(1)
    return before + start, before + stop


def _difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} {found.get(name)!r} instead of {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    )


class Checked:
    """Which files were found to be whole, so that each is read once for it in a process, and again only after a change."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[int, ...], str]] = {}

    def note(self, path: Path, digest: str) -> None:
        """This process has just written the file."""
        self._found[os.path.realpath(path)] = (gates.state_of(path), digest)

    def digest(self, path: Path) -> str:
        where, state = os.path.realpath(path), gates.state_of(path)
        known = self._found.get(where)
        if known is None or known[0] != state:
            known = self._found[where] = (state, digest_of_file(path))
        return known[1]
