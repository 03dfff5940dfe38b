"""Digests of files are remembered, and a file that was changed or replaced is hashed again."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from mless.models import hashing
from mless.models.hashing import hash_file, hash_parts


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember files that were written just now too."""
    monkeypatch.setattr(hashing, "_SETTLED_NS", -(10**9))


class Hashed:
    def __init__(self) -> None:
        self.bytes: list[int] = []

    def __call__(self, more: int, hashed: bool) -> None:
        self.bytes.append(more if hashed else 0)


def test_the_digest_is_sha256(tmp_path: Path) -> None:
    content = os.urandom(5_000_000)
    (tmp_path / "f").write_bytes(content)
    reached = Hashed()
    assert hash_file(tmp_path / "f", tmp_path / "memory", reached) == hashlib.sha256(content).hexdigest()
    assert sum(reached.bytes) == len(content)
    parts = {"a": (0, 7), "b": (7, 4_999_000), "none": (9, 9)}
    expected = {name: hashlib.sha256(content[start:stop]).hexdigest() for name, (start, stop) in parts.items()}
    assert hash_parts(tmp_path / "f", parts, tmp_path / "memory", reached) == expected


def test_a_file_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    hash_file(tmp_path / "f", tmp_path / "memory", Hashed())
    assert not (tmp_path / "memory").exists()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", ["in place", "copied with its times", "renamed"])
def test_a_file_of_the_same_size_and_time_is_hashed_again(tmp_path: Path, how: str) -> None:
    file, other, memory = tmp_path / "f", tmp_path / "other", tmp_path / "memory"
    file.write_bytes(b"first")
    before = hash_file(file, memory, Hashed())
    assert list(memory.iterdir())
    stat = file.stat()
    if how == "in place":
        file.write_bytes(b"other")
    else:
        other.write_bytes(b"other")
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        (shutil.copy2 if how == "copied with its times" else os.replace)(other, file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert hash_file(file, memory, Hashed()) == hashlib.sha256(b"other").hexdigest() != before


@pytest.mark.usefixtures("at_once")
def test_what_is_remembered_is_not_read_again_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"first")
    hash_file(tmp_path / "f", tmp_path / "memory", Hashed())
    (record,) = (tmp_path / "memory").iterdir()
    right = hashlib.sha256(b"first").hexdigest()
    record.write_text(record.read_text().replace(right, "0" * 64))
    assert hash_file(tmp_path / "f", tmp_path / "memory", Hashed()) == "0" * 64
    assert hash_file(tmp_path / "f", tmp_path / "memory", Hashed(), anew=True) == right


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("content", ["", "[]", "{", "null", '{"state": []}', "[" * 100_000])
def test_a_broken_memory_only_costs_time(tmp_path: Path, content: str) -> None:
    (tmp_path / "f").write_bytes(b"first")
    first = hash_file(tmp_path / "f", tmp_path / "memory", Hashed())
    (record,) = (tmp_path / "memory").iterdir()
    record.write_text(content)
    assert hash_file(tmp_path / "f", tmp_path / "memory", Hashed()) == first
    shutil.rmtree(tmp_path / "memory")
    (tmp_path / "memory").write_text("a file in its place")
    assert hash_file(tmp_path / "f", tmp_path / "memory", Hashed()) == first
