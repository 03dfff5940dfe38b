"""Hostile GGUF headers: refused in words, before any library reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_gguf

from mless.errors import UnknownModel
from mless.models import describe
from mless.models.gguf_gate import check_gguf


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def with_field(good: bytes, added: bytes) -> bytes:
    (count,) = struct.unpack_from("<Q", good, 16)
    return good[:16] + struct.pack("<Q", count + 1) + added + good[24:]


def with_count(good: bytes, name: bytes, value: int) -> bytes:
    """Another value for a field of 32 bits."""
    at = good.index(name) + len(name) + 4
    return good[:at] + struct.pack("<I", value) + good[at + 4 :]


LLAMA = struct.pack("<Q", 5) + b"llama"
FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda good: b"", "it is empty"),
    "only a name": (lambda good: b"GGUF", "4 values follow at byte 4 of 4"),
    "another file": (lambda good: b"PK34" * 20, "does not begin with GGUF"),
    "version": (lambda good: good[:4] + struct.pack("<I", 99) + good[8:], "its version is 99; expected 2 or 3"),
    "tensors": (lambda good: good[:8] + struct.pack("<Q", 2**63) + good[16:], "limit gguf-entries"),
    "fields": (lambda good: good[:16] + struct.pack("<Q", 2**63) + good[24:], "limit gguf-entries"),
    "cut in the header": (lambda good: good[:200], "values follow at byte"),
    "cut in the data": (lambda good: good[: len(good) // 2], "lies beyond the file's end"),
    "layers": (
        lambda good: with_count(good, b"llama.block_count", 2**31),
        "llama.block_count is 2,147,483,648; expected at most 1,000",
    ),
    "heads": (lambda good: with_count(good, b"llama.attention.head_count", 2**30), "limit config-count"),
    "width": (lambda good: with_count(good, b"llama.embedding_length", 2**31), "limit config-width"),
    "name": (lambda good: good.replace(b"general.architecture", b"general.\xff\xfechitecture", 1), "is not UTF-8"),
    "name twice": (lambda good: with_field(good, field(b"general.architecture", 8, LLAMA)), "is there twice"),
    "list without end": (
        lambda good: with_field(good, field(b"x.y", 9, struct.pack("<IQ", 0, 9_000_000))),
        "values follow",
    ),
    "list of lists": (
        lambda good: with_field(good, field(b"x.y", 9, struct.pack("<IQ", 9, 2))),
        "a list of an unknown type, 9",
    ),
    "type": (lambda good: with_field(good, field(b"x.y", 77, b"")), "a value of an unknown type, 77"),
}


@pytest.mark.parametrize(("spoil", "why"), FAULTS.values(), ids=FAULTS)
def test_headers(good: bytes, tmp_path: Path, spoil: Callable[[bytes], bytes], why: str) -> None:
    file = tmp_path / "t.gguf"
    file.write_bytes(spoil(good))
    with pytest.raises(UnknownModel, match="is not a readable GGUF file, or is cut short") as refused:
        check_gguf(file, "t.gguf")
    assert why in str(refused.value)


def test_a_good_one(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.gguf").write_bytes(good)
    check_gguf(tmp_path / "t.gguf", "t.gguf")


def test_the_gate_stands_before_the_conversion(good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "t.gguf").write_bytes(with_count(good, b"llama.block_count", 2**31))
    with pytest.raises(UnknownModel, match=r"block_count is 2,147,483,648; expected at most 1,000 layers"):
        describe(str(tmp_path / "t.gguf"))


def test_long_lists_are_passed_over_and_longer_ones_refused(tmp_path: Path) -> None:
    def written(count: int) -> Path:
        path = tmp_path / f"{count}.gguf"
        name = b"tokenizer.ggml.scores"
        head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(name)) + name + struct.pack("<IIQ", 9, 0, count)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + count)
        return path

    check_gguf(written(10_000_000), "long")
    with pytest.raises(UnknownModel, match=r"'tokenizer\.ggml\.scores' lists 10,000,001 values; expected"):
        check_gguf(written(10_000_001), "longer")
