"""Checksums: a unit carries its own, study.json carries its own and those of the tables.

They find damage: a flipped bit, a cut file, a file put in another's place. They do not find forgery: a person who writes new numbers can write
new checksums too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless import gates

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


def encode(table: pa.Table, key: Mapping[str, str] | None = None) -> bytes:
    """A table as Parquet with page checksums. With a `key` it is sealed: the key and a digest of every byte are inside."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(table)
        if key is not None:
            writer.add_key_value_metadata({_KEY: json.dumps(key, sort_keys=True), _SEAL: _OPEN.decode()})
    content = sink.getvalue().to_pybytes()
    if key is None:
        return content
    # Pages have checksums, Parquet's footer has none. So the digest is of the whole file with zeros in the digest's place.
    start, stop = _place(content)
    return content[:start] + hashlib.sha256(content).hexdigest().encode() + content[stop:]


def decode(content: bytes, key: Mapping[str, str]) -> pa.Table:
    """The table in a sealed file; refused where a bit is changed, or where it is another one than `key` says."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check(content)
    file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
    inside: dict[str, str] = json.loads((file.metadata.metadata or {})[_KEY.encode()])
    if inside != dict(key):
        raise Damaged(f"it holds another unit: {_difference(key, inside)}")
    table = file.read()
    kept = {name: value for name, value in (table.schema.metadata or {}).items() if not name.startswith(b"mless.")}
    return table.replace_schema_metadata(kept or None)


def check(content: bytes) -> None:
    """Raise `Damaged` unless every byte of a sealed file is as it was written."""
    try:
        start, stop = _place(content)
    except LookupError:
        raise Damaged("it is cut short, damaged, or was not written by this mless: it has no checksum") from None
    total = hashlib.sha256(content[:start] + _OPEN + content[stop:]).hexdigest()
    if total.encode() != content[start:stop]:
        raise Damaged("it is damaged: its checksum does not match its content")


def key_in(content: bytes) -> dict[str, str]:
    """The key inside a sealed file whose seal was checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return json.loads((pq.read_metadata(pa.BufferReader(content)).metadata or {})[_KEY.encode()])


def _place(content: bytes) -> tuple[int, int]:
    """Where the seal's digest is written: in the footer, so the last such place."""
    found = list(_WRITTEN.finditer(content, max(0, content.rfind(_SEAL.encode()))))
    if not found:
        raise LookupError
    return found[-1].span(1)


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

    def digest(self, path: Path) -> str:
        where, state = os.path.realpath(path), gates.state_of(path)
        known = self._found.get(where)
        if known is None or known[0] != state:
            known = self._found[where] = (state, digest_of_file(path))
        return known[1]
