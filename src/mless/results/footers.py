"""Parquet footers: several files written one after the other become one file with one footer.

A footer is Thrift in its compact form (https://parquet.apache.org/docs/file-format/metadata/). Only places in the file are changed; all else
is copied as it is. A study has thousands of columns in row groups, so bytes are passed over and not made into objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

_MAGIC = b"PAR1"
#: Thrift's types in compact form. The first two are a field's value themselves.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)
_NUMBERS = (_I16, _I32, _I64)

#: Fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData, by their numbers in parquet.thrift.
_SCHEMA, _ROWS, _ROW_GROUPS, _KEY_VALUES = 2, 3, 4, 5
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7
_META_DATA, _CHUNK_OFFSETS = 3, (2, 4, 6)  # file_offset, offset_index_offset, column_index_offset
_PAGE_OFFSETS = (9, 10, 11, 14)  # data page, index page, dictionary page, bloom filter
#: A row group's number has 16 bits with a sign. It may be left out.
_MOST_ORDINALS = 1 << 15


class NoFooter(ValueError):
    """What is there is no Parquet footer, or not one that pyarrow writes."""


def footer_bytes(content: bytes) -> bytes:
    """The footer of a Parquet file that is in memory."""
    length = int.from_bytes(content[-8:-4], "little")
    if content[-4:] != _MAGIC or length + 8 > len(content):
        raise NoFooter("it does not end as a Parquet file does")
    return content[-8 - length : -8]


def schema_of(footer: bytes) -> bytes:
    """What a footer says of the columns. Files that are to be one must say the same."""
    try:
        return next(footer[at:stop] for number, _, _, at, stop in _fields(footer, 0) if number == _SCHEMA)
    except (IndexError, StopIteration):
        raise NoFooter("it is cut short, or lacks what pyarrow writes") from None


def joined(footers: Sequence[tuple[int, bytes]], facts: Mapping[str, str]) -> bytes:
    """The end of a file that holds these files one after the other: where each begins, and its footer. `facts` become its key-value metadata,
    beside those of the first file that are not mless's own.
    """
    try:
        return _joined(footers, facts)
    except (IndexError, KeyError):
        raise NoFooter("it is cut short, or lacks what pyarrow writes") from None


def _joined(footers: Sequence[tuple[int, bytes]], facts: Mapping[str, str]) -> bytes:
    groups: list[bytes] = []
    rows = 0
    for start, footer in footers:
        fields = {number: (at, stop) for number, _, _, at, stop in _fields(footer, 0)}
        rows += _number(footer, fields[_ROWS][0])[0]
        at, count, _ = _list(footer, fields[_ROW_GROUPS][0])
        for _ in range(count):
            moved, at = _moved_group(footer, at, start, len(groups))
            groups.append(moved)
    first = footers[0][1]
    parts: list[bytes] = []
    for number, _, head, at, stop in _fields(first, 0):
        parts.append(first[head:at])
        if number == _ROWS:
            parts.append(_varint(rows << 1))
        elif number == _ROW_GROUPS:
            parts += [_list_head(len(groups), _STRUCT), *groups]
        elif number == _KEY_VALUES:
            parts.append(_key_values(first, at, facts))
        else:
            parts.append(first[at:stop])
    whole = b"".join([*parts, b"\0"])
    return whole + len(whole).to_bytes(4, "little") + _MAGIC


def _moved_group(footer: bytes, at: int, by: int, ordinal: int) -> tuple[bytes, int]:
    """A row group that lies so many bytes later, and where the next one begins."""
    parts: list[bytes] = []
    copied = at

    def put(start: int, stop: int, number: int | None) -> None:
        nonlocal copied
        parts.append(footer[copied:start])
        if number is not None:
            parts.append(_varint(number << 1))
        copied = stop

    def shift(start: int, stop: int) -> None:
        # An offset of 0 says that there is none: no page begins before the file's first four bytes.
        if (found := _number(footer, start)[0]) > 0:
            put(start, stop, found + by)

    end = at
    for number, _, head, start, stop in _fields(footer, at):
        end = stop
        if number == _COLUMNS:
            place, count, _ = _list(footer, start)
            for _ in range(count):
                place = _shift_chunk(footer, place, shift)
        elif number == _GROUP_OFFSET:
            shift(start, stop)
        elif number == _ORDINAL:
            if ordinal < _MOST_ORDINALS:
                put(start, stop, ordinal)
            else:
                put(head, stop, None)
    end += 1  # the byte that ends a struct
    parts.append(footer[copied:end])
    return b"".join(parts), end


def _shift_chunk(footer: bytes, at: int, shift: Callable[[int, int], None]) -> int:
    """Shift the places of one column in a row group; where the next one begins."""
    end = at
    for number, _, _, start, stop in _fields(footer, at):
        end = stop
        if number in _CHUNK_OFFSETS:
            shift(start, stop)
        elif number == _META_DATA:
            for inner, _, _, begin, over in _fields(footer, start):
                if inner in _PAGE_OFFSETS:
                    shift(begin, over)
    return end + 1


def _key_values(footer: bytes, at: int, facts: Mapping[str, str]) -> bytes:
    place, count, _ = _list(footer, at)
    kept: list[bytes] = []
    for _ in range(count):
        begin = place
        fields = {number: start for number, _, _, start, _ in _fields(footer, begin)}
        place = _skip(footer, begin, _STRUCT)
        length, text = _unsigned(footer, fields[1])
        if not footer[text : text + length].startswith(b"mless."):
            kept.append(footer[begin:place])
    own = [b"\x18" + _text(name) + b"\x18" + _text(value) + b"\0" for name, value in facts.items()]
    return b"".join([_list_head(len(kept) + len(own), _STRUCT), *kept, *own])


# ---- Thrift ----------------------------------------------------------------------------------------------------------


def _fields(content: bytes, at: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, type, and where head, value and end of each field of the struct at `at` lie."""
    number = 0
    while head := content[at]:
        begin, kind = at, head & 15
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _number(content, at)
        stop = _skip(content, at, kind)
        yield number, kind, begin, at, stop
        at = stop


def _skip(content: bytes, at: int, kind: int) -> int:
    """Where a value ends."""
    if kind in _NUMBERS:
        while content[at] & 0x80:
            at += 1
        return at + 1
    if kind == _STRUCT:
        while head := content[at]:
            at += 1
            if not head >> 4:
                at = _skip(content, at, _I16)
            at = _skip(content, at, head & 15)
        return at + 1
    if kind == _BINARY:
        length, at = _unsigned(content, at)
        return at + length
    if kind in (_LIST, _SET):
        at, count, inside = _list(content, at)
        if inside in (_TRUE, _FALSE, _BYTE):
            return at + count
        for _ in range(count):
            at = _skip(content, at, inside)
        return at
    if kind in (_TRUE, _FALSE):
        return at
    if kind in (_BYTE, _DOUBLE):
        return at + (1 if kind == _BYTE else 8)
    raise NoFooter(f"it has a value of type {kind}")


def _list(content: bytes, at: int) -> tuple[int, int, int]:
    """Where a list's first element lies, how many there are, and of which type."""
    head = content[at]
    count, at = (head >> 4, at + 1) if head >> 4 < 15 else _unsigned(content, at + 1)
    return at, count, head & 15


def _unsigned(content: bytes, at: int) -> tuple[int, int]:
    """A number without a sign, and what comes behind it."""
    total, shift = 0, 0
    while (part := content[at]) & 0x80:
        total |= (part & 0x7F) << shift
        shift += 7
        at += 1
    return total | part << shift, at + 1


def _number(content: bytes, at: int) -> tuple[int, int]:
    found, at = _unsigned(content, at)
    return (found >> 1) ^ -(found & 1), at


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _list_head(count: int, kind: int) -> bytes:
    return bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + _varint(count)


def _text(value: str) -> bytes:
    written = value.encode()
    return _varint(len(written)) + written
