"""The one reader for files and JSON from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mless import gates, limits
from mless.errors import BadData

LIMIT = limits.Limit("test", 400_000, "bytes", "for the test")


def refusal(path: Path) -> str:
    with pytest.raises(BadData) as refused:
        gates.read_json(path, LIMIT, BadData)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400
    return str(refused.value)


def test_what_is_right_passes_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('\ufeff{"a": [1, 2.5, "é\\ud83d\\ude00", null, true], "b": {"a": 1}}', encoding="utf-8")
    assert gates.read_json(file, LIMIT, BadData) == {"a": [1, 2.5, "é😀", None, True], "b": {"a": 1}}
    assert gates.json_of("[Infinity]", BadData, finite=False) == [float("inf")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param("[" * 150_000 + "]" * 150_000, "nested too deeply; expected at most 100 levels", id="deep list"),
        pytest.param('{"a":' * 60_000 + "1" + "}" * 60_000, "nested too deeply", id="deep object"),
        pytest.param("[" * 101 + "]" * 101, "nested too deeply", id="one too deep"),
        pytest.param('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice in one object", id="twice"),
        pytest.param('{"a": NaN}', "NaN is no number", id="NaN"),
        pytest.param('{"a": -Infinity}', "-Infinity is no number", id="Infinity"),
        pytest.param('{"a": 1e999}', "the number 1e999 is too large", id="1e999"),
        pytest.param("9" * 5000, "a number of 5,000 digits; expected at most 400 digits", id="digits"),
        pytest.param('["\\ud800"]', "is half a character", id="half"),
        pytest.param('{"\\udc00x": 1}', "is half a character", id="half in a name"),
        pytest.param(b'{"a": "\xff"}', "line 1: byte 0xff is not UTF-8", id="bytes"),
        pytest.param(b"\x00" * 10, "broken JSON: Expecting value", id="NUL"),
        pytest.param("", "broken JSON", id="empty"),
        pytest.param("[1] [2]", "Extra data (column 5)", id="more"),
        pytest.param(" " * 400_001, "has 400,001 bytes; expected at most 400,000 bytes (limit test", id="size"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: str | bytes, why: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert why in refusal(file)


def test_a_depth_of_exactly_the_limit_is_taken() -> None:
    assert gates.json_of("[" * 100 + "]" * 100, BadData)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name, why in [
        ("", "is a folder, not a file"),
        ("pipe", "is a pipe, not a file"),
        ("zero", "is a device, not a file"),
        ("round", "cannot be read (Too many levels of symbolic links)"),
        ("absent", "is not there"),
        ("a\0b", "embedded null"),
        ("x" * 5000, "cannot be read (File name too long)"),
    ]:
        assert why in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "is no valid TOML"),
        ("a = ", "is no valid TOML"),
        ("a = 1\na = 2", "is no valid TOML"),
    ],
)
def test_toml(text: str, why: str) -> None:
    with pytest.raises(BadData, match=why):
        gates.toml_of(text, BadData)


def test_a_number_too_long_to_write_out_is_still_refused() -> None:
    with pytest.raises(BadData, match=r"rows: expected at most 400,000 bytes .* got a number of about 5,001 digits"):
        gates.check_count(10**5000, "rows", LIMIT, BadData)


def test_halves_in_content_that_was_never_text() -> None:
    for content in ({"a": "\ud800"}, {"a": [{"\udfff": 1}]}):
        with pytest.raises(BadData, match="is half a character"):
            gates.check_content(content, BadData)
    gates.check_content({"a": ["ü", 1, None]}, BadData)


def test_every_limit_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "limits.md").read_text("utf-8")
    for name, one in limits.LIMITS.items():
        assert f"| `{name}` | {one.value:,} {one.unit}".rstrip() + f" | {one.why} |" in page
