"""How a valid file is spoiled, by seed. New fields, columns and files are reached by themselves: nothing is named here."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

#: Values that nobody expects, put in the place of any other.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**18, 10**30, -(10**30), 0.5, -0.5, 1e308, math.nan, math.inf, "", "x", "none", "evil",
    "\x00", "a\x00b", "\x1b[2J\x1b]0;owned\x07", "\u202e", "../../../etc/passwd", "-1", "1e999", "NaN", "x" * 300, "x" * 100_000, "\U0001f600",
    [], {}, [None], [[]], [0], [-1], ["x"], [{}], {"": None}, {"x": {}}, {"x": [1]}, {"kind": "evil"}, "DEEP", "HALF", "DIGITS",
)  # fmt: skip


def _dumped(content: Any, indent: int | None = None) -> str:
    """JSON with what Python does not write by itself: half characters, numbers of 5,000 digits, deep nests."""
    return _blown_up(json.dumps(content, indent=indent, ensure_ascii=False))


def _blown_up(text: str) -> str:
    text = text.replace('"HALF"', '"\\ud800"').replace('"DIGITS"', "9" * 5000)
    return text.replace('"DEEP"', "[" * 3000 + "]" * 3000)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside."""
    found: list[tuple[Any, Any]] = []
    left: list[Any] = [value]
    while left:
        one = left.pop()
        keys: list[Any] = list(one) if isinstance(one, dict) else list(range(len(one))) if isinstance(one, list) else []
        found += [(one, key) for key in keys]
        left += [one[key] for key in keys if isinstance(one[key], dict | list)]
    return found


def spoil_value(content: Any, rng: random.Random) -> Any:
    """One field dropped, replaced, doubled, renamed, wrapped or put elsewhere."""
    places = _places(content)
    if not places or rng.random() < 0.03:
        return rng.choice(VALUES)
    # fields near the root are few, and matter most
    where, key = rng.choice(places if rng.random() < 0.6 else places[: max(1, len(content))])
    how = rng.randrange(6)
    if how == 0:
        del where[key]
    elif how == 1 and isinstance(where, dict):
        cast("dict[str, Any]", where)[f"{key}x"] = where.pop(key)
    elif how == 2:
        where[key] = [where[key]]
    elif how == 3:
        other, name = rng.choice(places)
        where[key] = json.loads(json.dumps(other[name]))
    else:
        where[key] = rng.choice(VALUES)
    return content


def spoil_json(path: Path, rng: random.Random) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = spoil_value(content, rng)
    path.write_text(_dumped(content), encoding="utf-8", errors="surrogatepass")


def spoil_text(path: Path, rng: random.Random) -> None:
    """A JSON text that is broken as a text: a key twice, no UTF-8, cut, something behind it."""
    raw = path.read_bytes()
    how = rng.randrange(6)
    if how == 0:
        raw = raw.replace(b"{", b'{"x": 1, "x": 2, ', 1)
    elif how == 1:
        raw = raw[: rng.randrange(len(raw))]
    elif how == 2:
        raw = b"\xff\xfe" + raw
    elif how == 3:
        raw = raw + raw
    elif how == 4:
        raw = rng.choice((b"", b"\x00", b"null", b"[]", b"{}", b'"x"', b"3", b"[" * 100_000, b'{"a":' * 100_000))
    else:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    path.write_bytes(raw)


def spoil_lines(path: Path, rng: random.Random) -> None:
    """One line of JSONL spoiled, dropped, doubled or moved."""
    rows = path.read_text().splitlines()
    at = rng.randrange(len(rows))
    how = rng.randrange(5)
    if how == 0:
        del rows[at]
    elif how == 1:
        rows.insert(at, rows[at])
    elif how == 2:
        rows[at] = rows[at][: rng.randrange(len(rows[at]))]
    else:
        # sometimes in every line alike, as another version of a program would
        every = rng.random() < 0.4
        state = rng.getstate()
        for n in range(len(rows)) if every else (at,):
            rng.setstate(state)
            rows[n] = _dumped(spoil_value(json.loads(rows[n]), rng))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8", errors="surrogatepass")


def spoil_archive(path: Path, rng: random.Random) -> None:
    """An entry of a zip archive spoiled, dropped, doubled or blown up."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(files) if rng.random() < 0.7 else ["header.json"])
    how = rng.randrange(6)
    if how == 0:
        del files[name]
    elif how == 1:
        files[name] = b"[" * 100_000
    elif how == 2:
        files["samples/bomb_epoch_1.json"] = b"0" * (1 << 27)
    elif how == 3:
        files[f"samples/../../{name}"] = files[name]
    else:
        files[name] = _dumped(spoil_value(json.loads(files[name]), rng)).encode("utf-8", "surrogatepass")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for one, content in files.items():
            archive.writestr(one, content)


# ---- tables ----------------------------------------------------------------------------------------------------------


def spoil_table(path: Path, rng: random.Random) -> None:
    """A Parquet table that is Parquet still: columns, types, rows or cells are others."""
    table = pq.ParquetFile(path).read()
    name = rng.choice(table.column_names)
    at = table.column_names.index(name)
    count = len(table)
    odd: tuple[Callable[[], pa.Array], ...] = (
        lambda: pa.array([rng.choice(("", "x", "\x1b[2J", "none", "a" * 10_000, "\x00"))] * count, pa.string()),
        lambda: pa.array([rng.choice((-1, 0, 2**31, 2**62))] * count, pa.int64()),
        lambda: pa.array([rng.choice((math.nan, math.inf, -math.inf, 1e300, -1.0))] * count, pa.float64()),
        lambda: pa.nulls(count),
        lambda: pa.nulls(count, table.column(at).type),
        lambda: pa.array([2**62] * count, pa.timestamp("ms")),
        lambda: pa.array([2**30] * count, pa.date32()),
        lambda: pa.array([2**62] * count, pa.duration("s")),
        lambda: pa.array([b"\xff\xfe"] * count, pa.binary()),
        lambda: pa.array([[]] * count, pa.list_(pa.int32())),
        lambda: pa.array([[[1]]] * count, pa.list_(pa.list_(pa.int32()))),
        lambda: pa.array([{"a": 1}] * count, pa.struct([("a", pa.int32())])),
        lambda: pa.array([True] * count),
        lambda: _not_text(count),
    )
    how = rng.randrange(10)
    if how == 0:
        table = table.drop_columns([name])
    elif how == 1:
        table = table.slice(0, 0)
    elif how == 2:
        table = pa.concat_tables([table, table.slice(0, 1)])
    elif how == 3:
        table = table.slice(0, max(1, count // 2))
    elif how == 4:
        table = table.append_column(name, table.column(at))
    elif how == 5 and count:
        table = table.take(pa.array(rng.sample(range(count), count)))
    elif how == 6 and count:
        table = _with_cell(table, at, rng)
    else:
        table = table.set_column(at, name, rng.choice(odd)())
    pq.write_table(table, path, row_group_size=rng.choice((None, max(1, count), 1)), store_schema=rng.random() < 0.5)


def _with_cell(table: pa.Table, at: int, rng: random.Random) -> pa.Table:
    """One cell taken from another row, or null."""
    values = table.column(at).to_pylist()
    values[rng.randrange(len(values))] = rng.choice((None, *values[:3]))
    return table.set_column(at, table.column_names[at], pa.array(values, table.column(at).type))


def _not_text(count: int) -> pa.Array:
    """Strings that are no UTF-8, which Parquet stores as they are."""
    offsets = struct.pack(f"<{count + 1}i", *range(count + 1))
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(b"\xff" * count))


def spoil_units(path: Path, rng: random.Random) -> None:
    """A unit of an unfinished folder: its bytes, its place, another unit in its place, or too many."""
    units = sorted(path.glob("*/*.parquet"))
    one, other = rng.sample(units, 2)
    how = rng.randrange(8)
    if how == 0:
        shutil.copy(other, one)
    elif how == 1:
        spoil_entry(one, rng)
    elif how == 2:
        spoil_table(one, rng)
    elif how == 3:
        one.rename(
            one.with_name(
                rng.choice(("x.parquet", "none-99999.parquet", ".parquet", "\x1b[2J.parquet", "a\nb.parquet"))
            )
        )
    elif how == 4:
        shutil.rmtree(one.parent)
        rng.choice(
            (lambda: one.parent.mkdir(), lambda: one.parent.write_text("x"), lambda: one.parent.symlink_to(path))
        )()
    elif how == 5:
        for each in units:
            spoil_bytes(each, rng)
    else:
        spoil_bytes(one, rng)


def spoil_sealed_units(path: Path, rng: random.Random) -> None:
    """A unit with other columns, types, rows or cells, and a checksum that fits."""
    from mless.results import sealing

    one = rng.choice(sorted(path.glob("*/*.parquet")))
    key = sealing.key_in(one.read_bytes())
    spoil_table(one, rng)
    one.write_bytes(sealing.encode(pq.ParquetFile(one).read(), key))


# ---- bytes and entries -----------------------------------------------------------------------------------------------


def spoil_bytes(path: Path, rng: random.Random) -> None:
    """Bits flipped, bytes cut off, doubled or zeroed."""
    raw = bytearray(path.read_bytes())
    how = rng.randrange(6)
    if how == 0:
        raw = raw[: rng.randrange(len(raw))]
    elif how == 1:
        raw = raw + raw
    elif how == 2:
        at = rng.randrange(len(raw))
        raw[at : at + 64] = bytes(64)
    elif how == 3:
        raw = bytearray(rng.randbytes(len(raw)))
    else:
        # headers and footers, where the sizes stand, more often than numbers
        edge = rng.choice((64, 1024, len(raw)))
        for _ in range(rng.choice((1, 1, 4, 32))):
            at = rng.randrange(min(edge, len(raw)))
            at = at if rng.random() < 0.5 else len(raw) - 1 - at
            raw[at] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(raw))


def spoil_header(path: Path, rng: random.Random) -> None:
    """The JSON header of a safetensors file; sometimes its length too."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = spoil_value(json.loads(raw[8 : 8 + size]), rng)
    text = _dumped(header).encode("utf-8", "surrogatepass")
    said = rng.choice((len(text), len(text), len(text), 0, 1, 2**63, len(text) + 1, 10**9))
    path.write_bytes(said.to_bytes(8, "little") + text + raw[8 + size :])


def spoil_entry(path: Path, rng: random.Random) -> None:
    """Something else in the file's place: a folder, a link, a pipe, a device, nothing."""
    how = rng.randrange(8)
    path.unlink()
    if how == 0:
        path.mkdir()
    elif how == 1:
        path.symlink_to(path.parent / "nowhere")
    elif how == 2:
        path.symlink_to(path)
    elif how == 3:
        os.mkfifo(path)
    elif how == 4:
        path.symlink_to("/dev/zero")
    elif how == 5:
        path.write_bytes(b"")
    elif how == 6:
        path.symlink_to(path.parent, target_is_directory=True)


def spoil_toml(path: Path, rng: random.Random) -> None:
    """One value of a TOML file replaced, or the text broken."""
    rows = path.read_text().splitlines()
    values = (
        "0", "-1", "1e999", "nan", "inf", '""', '"x"', "[]", "{}", "true", "10000000000000000000000000000000", "9" * 5000, '"\\u0000"', '"\\u001b[2J"',
        "[" * 3000, "1979-05-27", "[[1]]", '{a = 1}', "-9223372036854775808", '"' + "x" * 100_000 + '"', '"../../x"', "1000000000", '["none", "none"]',
    )  # fmt: skip
    given = [n for n, row in enumerate(rows) if "=" in row]
    at = rng.choice(given)
    name = rows[at].partition("=")[0].strip()
    how = rng.randrange(6)
    if how == 0:
        rows.insert(at, rows[at])
    elif how == 1:
        rows[at] = f"{name}x = 1"
    elif how == 2:
        rows.append(
            f"[{rng.choice(('condition.short', 'accuracy', 'tune', 'figure', 'arm', 'margins', 'x', 'condition'))}]"
        )
        rows.append(f"{rng.choice(('length', 'engine', 'kind', 'c', 'layers', 'x'))} = {rng.choice(values)}")
    else:
        rows[at] = f"{name} = {rng.choice(values)}"
    path.write_text("\n".join(rows) + "\n")


#: Chat templates that loop, grow, reach for Python's insides, call what is not there, or say nothing.
_TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 10 ** 9 }}", "{{ 'x' * 10 ** 12 }}", "{{ 9 ** 9 ** 9 }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os }}",
    "{{ messages[0]['content'].format(messages) }}", "{{ raise_exception('\x1b[2J no') }}", "{{ nothing.at.all }}", "{% if %}", "", "\x1b[2J\x07",
    "{{ strftime_now('%Y' * 100000) }}", "{{ messages | tojson(indent=10 ** 9) }}", "{{ range(10 ** 18) }}", "{% set ns = namespace(x='a') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}", "{{ bos_token }}", "{{ 'a' | center(10 ** 10) }}",
)  # fmt: skip


def spoil_template(path: Path, rng: random.Random) -> None:
    """Another template in its place, or a piece of it cut out."""
    text = path.read_text()
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        text = text[:at] + text[at + rng.randrange(1, 20) :]
    else:
        text = rng.choice(_TEMPLATES)
    path.write_text(text)


def spoil_csv(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    rows = raw.splitlines()
    how = rng.randrange(5)
    if how == 0:
        rows[rng.randrange(len(rows))] += b",more,fields"
    elif how == 1:
        rows[0] = rng.choice((b"", b"id,id,id", b"a,b", b"question"))
    elif how == 2:
        rows[rng.randrange(len(rows))] = b'"never closed'
    elif how == 3:
        rows[1] = b"q0,\x00\x1b[2J," + b"9" * 5000
    else:
        rows[1] = b"\xff" + rows[1]
    path.write_bytes(b"\n".join(rows) + b"\n")


#: Parts of a tokenizer that hang, panic, cut, pad or swallow text.
_PARTS: tuple[dict[str, Any], ...] = (
    {"normalizer": {"type": "Prepend", "prepend": "z" * 1_000_000}}, {"normalizer": {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}}, {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$("}}},
    {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}}},
    {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}}, {"decoder": None}, {"model": {"type": "Evil"}},
    {"padding": {"strategy": {"Fixed": 100000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
    {"added_tokens": [{"id": 10**6, "content": "What", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}]},
)  # fmt: skip


def spoil_tokenizer(path: Path, rng: random.Random) -> None:
    """Parts of a tokenizer.json that are valid each, and make no tokenizer."""
    content = json.loads(path.read_text())
    for part in rng.sample(_PARTS, rng.choice((1, 1, 1, 2))):
        content |= part
    path.write_text(json.dumps(content))


#: Lines of a reply's head that no server should send.
_HEADS = (
    "Content-Length: 5", "Content-Length: 99999999", "Content-Length: -1", "Content-Length: x", "Content-Length: 10\r\nContent-Length: 20",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Content-Encoding: gzip", "Content-Encoding: deflate", "Content-Encoding: br",
    "Content-Type: text/html", "Content-Type: \x1b[2J", "X: " + "x" * 1_000_000, "\r\n".join(f"X-{n}: {n}" for n in range(5_000)), "no colon at all",
    "Retry-After: nan", "Retry-After: -5", "Retry-After: 1e999", "Retry-After: Fri, 99 Foo 99999 99:99:99 GMT", "Set-Cookie: a=b", "\x00: \x00",
    "Location: file:///etc/passwd", "Upgrade: websocket", "Connection: close", "Content-Type: application/json; charset=utf-7",
)  # fmt: skip
_STATUS = (
    "HTTP/1.1 100 Continue", "HTTP/1.1 101 Switching Protocols", "HTTP/1.1 204 No Content", "HTTP/1.1 206 Partial", "HTTP/1.1 301 Moved",
    "HTTP/1.1 302 Found", "HTTP/1.1 308 Moved", "HTTP/1.1 400 Bad", "HTTP/1.1 401 No", "HTTP/1.1 404 No", "HTTP/1.1 418 \x1b[2J", "HTTP/1.1 429 Slow",
    "HTTP/1.1 500 Oops", "HTTP/1.1 501 No", "HTTP/1.1 999 What", "HTTP/1.1 20 OK", "HTTP/9.9 200 OK", "HTTP/1.0 200 OK", "HTTP/1.1 200", "garbage", "",
    "ICY 200 OK", "HTTP/1.1 99999999999 OK", "HTTP/2 200",
)  # fmt: skip
#: Texts in the place of a body; `DEEP`, `HALF` and `DIGITS` are written as everywhere.
_BODIES = (
    "", "{", "null", "[]", "3", '"x"', "<html><title>\x1b[2J</title>", '{"choices": "DEEP"}', '{"choices": [{"text": "HALF"}]}', '{"choices": []}',
    '{"choices": [{"text": "x", "text": "y"}]}', '{"choices": [{"text": "\x00\x07"}]}', "\x00" * 1000, "5\r\nhello\r\nzz\r\n", "ffffffffffffffff\r\n",
    '{"error": {"message": "\x1b[2J"}}', '{"error": "DEEP"}', '{"choices": [{"text": "x"}], "usage": {"completion_tokens": "DIGITS"}}', "\xff\xfe{}",
    '{"choices": [{"text": NaN}]}', '{"choices": {"0": {"text": "x"}}}', "data: {}\n\n" * 1000, "0\r\n\r\n", "-1\r\nx\r\n",
)  # fmt: skip
#: How a reply is sent: as one, byte by byte, each line of the head again and again, never, cut in the middle, and a second one behind it.
HOWS = ("whole", "trickle", "trickle-body", "continue", "silent", "cut", "twice", "reset", "flood", "giant")


def spoil_reply(path: Path, rng: random.Random) -> None:
    """A server's reply: its JSON most often, else its head, its bytes, or the way it is sent."""
    reply = json.loads(path.read_text())
    how, text = rng.randrange(10), None
    if how < 5:
        for _ in range(rng.choice((1, 1, 2, 4))):
            reply["body"] = spoil_value(reply["body"], rng)
    elif how == 5:
        text = rng.choice(_BODIES)
    elif how == 6:
        reply["head"][0] = rng.choice(_STATUS)
    elif how == 7:
        reply["head"] += rng.sample(_HEADS, rng.choice((1, 1, 2)))
    else:
        reply["how"] = rng.choice(HOWS[1:])
    reply["text"] = _blown_up(_dumped(reply["body"]) if text is None else text)
    path.write_text(json.dumps(reply))


def copy_of(source: Path, place: Path) -> Path:
    """A copy to spoil; tables and weights are linked until they are written."""
    if source.is_dir():
        shutil.copytree(source, place)
    else:
        shutil.copy(source, place)
    return place
