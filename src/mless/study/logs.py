"""The gate for logs of other programs: lm-evaluation-harness's samples and Inspect's logs, with the shape that is read of them.

What passes has its types and is within its limits. Fields that are not declared are not read.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mless import gates
from mless.errors import BadData
from mless.limits import LOG_BYTES, LOG_ENTRIES, LOG_TEXT
from mless.results.manifest import check_condition, first_fault

_GIVE = "give lm-eval's samples_*.jsonl, or an Inspect log (.eval or .json)"
#: zstd's number among a zip archive's compression methods.
_ZSTD = 93
_Text = Annotated[str, Field(max_length=LOG_TEXT.value)]
_Id = Annotated[str, Field(min_length=1, max_length=10_000)] | Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Whole = Annotated[int, Field(ge=1, lt=2**31)]
_Heat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Row = list[Any] | tuple[Any, ...]
_Table = dict[str, Any]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


# ---- lm-evaluation-harness -------------------------------------------------------------------------------------------


class _Sample(_Shape):
    """One line of --log_samples; in memory, tuples for lists."""

    doc_id: _Id
    arguments: dict[str, _Table] | list[_Row] | tuple[_Row, ...]
    resps: _Row
    metrics: Annotated[list[str], Field(min_length=1)]
    filter: str = "none"
    doc_hash: str | None = None

    @model_validator(mode="after")
    def _has_requests(self) -> _Sample:
        requests = [list(one.values()) if isinstance(one, dict) else one for one in _each(self.arguments)]
        if not requests or not all(requests):
            raise ValueError("at least one request, with its prompt")
        if len(requests[0]) > 1 and isinstance(requests[0][1], str):
            if len(self.resps) != len(requests) or not all(len(one) > 1 for one in requests):
                raise ValueError(f"as many responses as choices ({len(requests)})")
            if not all(_is_number(first(one)) for one in self.resps):
                raise ValueError("a log-likelihood for each choice")
        return self


def _each(given: Any) -> list[Any]:
    return list(given.values()) if isinstance(given, dict) else list(given)


def first(value: Any) -> Any:
    """The first thing in lists within lists."""
    while isinstance(value, list | tuple):
        inner = cast("list[Any]", value)
        value = inner[0] if inner else None
    return value


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and float(value) < math.inf  # a choice may have -inf; NaN is not less
    except (TypeError, ValueError, OverflowError):
        return False


class _Drawing(_Shape):
    """How an answer was drawn."""

    temperature: _Heat | None = None
    max_gen_toks: _Whole | None = None
    do_sample: bool = True


def check_drawing(given: Mapping[str, Any], source: str) -> None:
    _check(_Drawing, given, f"{source}: the arguments of sample 1")


def check_sample(sample: Any, source: str, number: int) -> None:
    """Refuse what is no sample of lm-eval's."""
    held = gates.an_object(sample, lambda why: BadData(f"{source}: sample {number} {why}; {_GIVE}"))
    missing = [key for key in ("doc_id", "arguments", "resps", "metrics") if key not in held]
    if missing:
        there = ", ".join(gates.shown(key, 40) for key in list(held)[:8])
        raise BadData(
            f"{source}: a sample has no {missing[0]!r}, so it is not lm-eval's (it has: {there or 'nothing'}); expected --log_samples' JSONL"
        )
    _check(_Sample, held, f"{source}: sample {number}")


# ---- Inspect ---------------------------------------------------------------------------------------------------------


class _Config(_Shape):
    temperature: _Heat | None = None
    max_tokens: _Whole | None = None


class _Plan(_Shape):
    config: _Config | None = None


class _Eval(_Shape):
    task: str | None = None
    model: str | None = None
    model_generate_config: _Config | None = None


class _Error(_Shape):
    message: str | None = None


class _Part(_Shape):
    text: _Text | None = None


class _Message(_Shape):
    content: _Text | list[_Part] | None = None


class _Choice(_Shape):
    message: _Message
    stop_reason: str | None = None


class _Usage(_Shape):
    output_tokens: _Count | None = None


class _Output(_Shape):
    completion: _Text | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    metadata: _Table | None = None


class _Score(_Shape):
    value: str | float | bool | dict[str, Any] | list[Any] | None = None
    answer: str | float | None = None


class _Asked(_Shape):
    """One sample of a log."""

    id: _Id
    epoch: _Whole = 1
    input: _Text | list[_Message] | None = None
    target: _Text | list[_Text] | None = None
    attachments: dict[str, _Text] | None = None
    output: _Output | None = None
    scores: dict[str, _Score] | None = None
    error: _Error | None = None


class _Log(_Shape):
    """A log without its samples."""

    status: str | None = None
    eval: _Eval
    error: _Error | None = None
    plan: _Plan | None = None
    samples: list[Any] | None = None


def check_log(content: Mapping[str, Any], source: str) -> None:
    """Refuse what is no log of Inspect's, sample by sample."""
    _check(_Log, content, source)
    for number, sample in enumerate(content.get("samples") or (), 1):
        _check(_Asked, sample, f"{source}: sample {number}")


def check_stored_condition(condition: Any, source: str) -> None:
    """Refuse a condition that mless itself cannot have written into a log."""
    check_condition("mless", condition, lambda why: BadData(f"{source}: mless_condition{why}; {_GIVE}"))


def _check(shape: type[_Shape], content: Any, where: str) -> None:
    try:
        shape.model_validate(content)
    except ValidationError as fault:
        raise BadData(f"{where}: {first_fault(fault)}; the log is damaged or of another kind: {_GIVE}") from None


# ---- files -----------------------------------------------------------------------------------------------------------


def read_log(path: Path) -> bytes:
    return gates.read_bytes(path, LOG_BYTES, lambda why: BadData(f"{path} {why}; {_GIVE}"))


def an_object(raw: bytes, path: Path, line: int | None = None) -> dict[str, Any]:
    """A JSON object of a log. NaN is taken: Python's programs write it for a score that is none."""
    where = f"{path}{f', line {line}' if line else ''}"

    def refuse(why: str) -> BadData:
        return BadData(f"{where} is no JSON that can be read: {why}; {_GIVE}")

    content = gates.json_of(gates.text_of(raw, refuse), refuse, finite=False)
    if not isinstance(content, dict):
        raise BadData(f"{where}: an object was expected, not {gates.kind_of(content)}; {_GIVE}")
    return cast("dict[str, Any]", content)


def unzipped(path: Path) -> dict[str, Any]:
    """An .eval log as its .json would be: the header, and one file per sample."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            _check_entries(archive, path)
            if "header.json" not in names:
                raise BadData(
                    f"{path} has no header.json: the eval did not finish; finish it with: inspect eval-retry {path}"
                )
            samples = [name for name in names if name.startswith("samples/") and name.endswith(".json")]
            content = an_object(_entry(archive, "header.json"), path)
            return content | {"samples": [an_object(_entry(archive, name), path) for name in samples]}
    # RuntimeError: an encrypted entry; the others come from an entry that is damaged.
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, zlib.error, EOFError, ValueError) as fault:
        raise BadData(
            f"{path} is no Inspect log that can be read ({fault}); an .eval is a zip archive, and this one may be damaged: convert it with: "
            f"inspect log convert --to json --output-dir DIR {path}"
        ) from None


def _check_entries(archive: zipfile.ZipFile, path: Path) -> None:
    """An archive is not larger than a log may be, whatever its compression, and has each entry once."""
    entries = archive.infolist()
    if len(entries) > LOG_ENTRIES.value:
        raise BadData(f"{path} has {len(entries):,} entries; expected {LOG_ENTRIES}")
    if len({entry.filename for entry in entries}) < len(entries):
        raise BadData(f"{path} has an entry twice, so it is damaged or no log; {_GIVE}")
    if (total := sum(entry.file_size for entry in entries)) > LOG_BYTES.value:
        raise BadData(f"{path} unpacks to {total:,} bytes; expected {LOG_BYTES}")


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """One file of an archive. Inspect compresses with zstd, which Python's zipfile reads from 3.14 on, and pyarrow in every version."""
    entry = archive.getinfo(name)
    if entry.compress_type != _ZSTD:
        with archive.open(name) as stream:
            # Not more than the directory says, which was compared with the limit.
            found = stream.read(entry.file_size + 1)
    else:
        found = _zstd(archive, entry)
    if len(found) != entry.file_size:
        raise zipfile.BadZipFile(f"entry {name!r} is not as long as the archive says")
    return found


def _zstd(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    import pyarrow as pa

    assert archive.fp is not None
    # The local header has its own lengths of name and extra field, at bytes 26 and 28; the content comes right behind them.
    archive.fp.seek(entry.header_offset)
    header = archive.fp.read(30)
    archive.fp.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
    packed = archive.fp.read(entry.compress_size)
    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        found = stream.read(entry.file_size + 1)
    if len(found) == entry.file_size and zlib.crc32(found) != entry.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {entry.filename!r}")
    return found
