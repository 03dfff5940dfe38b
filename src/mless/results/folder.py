"""A result folder: units while a study runs, Parquet tables when it is done, and where it all came from.

A unit exists whole or not at all (temporary name, sync, rename), so a killed run loses at most the unit it was computing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless.errors import BadFolder

if TYPE_CHECKING:
    import pyarrow as pa

#: The file contract's number; a folder with a higher one was made by a newer mless. Since 2 placement `end` is the end of the user's turn,
#: and raw prompts have a token boundary before the line break.
FORMAT = 2

_LOCK = ".lock"


def write_atomically(path: Path, content: bytes) -> None:
    """Whole or not at all, and on the disk before the name appears."""
    with _refusals(path), _partial(path) as partial:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _publish(partial, path)


@contextmanager
def _partial(path: Path) -> Generator[Path]:
    """A file beside `path` to write to; gone afterwards unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _refusals(path: Path) -> Generator[None]:
    """A write that fails (no room, no permission) becomes one line of error. Work stored so far stays."""
    try:
        yield
    except OSError as fault:
        raise BadFolder(
            f"cannot write {path}: {fault.strerror or fault}; fix that and run the same command again, or choose another --out"
        ) from None


def _publish(partial: Path, path: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    partial.chmod(0o666 & ~mask)  # mkstemp's files are private; results are as readable as any other file
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_trace(entry: Path) -> bool:
    return entry.name == _LOCK or (entry.name.startswith(".") and entry.name.endswith(".partial"))


def _encode(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _with_todays_names(content: dict[str, Any]) -> dict[str, Any]:
    """An older study.json with today's names. Its format number stays, because its prompts differ from today's.

    Before format 2 `end` was the prompt's last place: in a chat prompt of ids, after the assistant's header, now called `before-answer`. In
    a raw prompt both are the same place. For a server `end` was the end of the user's message, as it is now.
    """
    if content["format"] >= 2 or content.get("prompt") in ("raw", "text"):
        return content
    study: dict[str, Any] = content.get("study") or {}
    for one in (study, *(study.get("condition") or {}).values(), *(content.get("conditions") or {}).values()):
        if one.get("placement") == "end":
            one["placement"] = "before-answer"
    if "command" in content:
        content["command"] = [
            re.sub(r"(?<=placement=)(\"?)end\b", r"\1before-answer", word) for word in content["command"]
        ]
    return content


class ResultFolder:
    """One study's results on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- provenance

    def manifest(self) -> dict[str, Any] | None:
        """study.json, or None where there is none yet. A broken or newer one is an error."""
        file = self.path / "study.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise BadFolder(f"{self.path} is a file, not a result folder; choose another --out") from None
        except OSError as fault:
            raise BadFolder(f"{file} cannot be read ({fault.strerror}); choose another --out") from None
        except ValueError:
            raise BadFolder(
                f"{file} is not readable JSON; the folder is damaged: remove it, or choose another --out"
            ) from None
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise BadFolder(f"{file} was not written by mless; choose another --out")
        if content["format"] > FORMAT:
            raise BadFolder(
                f"{self.path} was made by a newer mless ({content.get('mless', 'unknown')}, format {content['format']}); this one reads "
                f"format {FORMAT}: upgrade mless, or choose another --out"
            )
        return _with_todays_names(content)

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, **content}, indent=1, ensure_ascii=False)
        write_atomically(self.path / "study.json", text.encode())

    def require(self, table: str) -> Path:
        """The path of a finished table."""
        file = self.path / f"{table}.parquet"
        if self.manifest() is None:
            raise BadFolder(
                f"{self.path} is no result folder (it has no study.json); make one with: mless run STUDY --out {self.path}"
            )
        if not file.exists():
            raise BadFolder(
                f"{self.path} has no {file.name}: its run did not finish; run the same command again to complete it"
            )
        return file

    def holds_something_else(self) -> bool:
        """Whether the folder has no study but other files. Files left by a run killed at its start do not count."""
        if self.manifest() is not None or not self.path.exists():
            return False
        return any(not _is_trace(entry) for entry in self.path.iterdir())

    def discard(self) -> None:
        """Take away everything a run wrote, and the folder if nothing else is in it. Call it inside `writing`."""
        for table in self.path.glob("*.parquet"):
            table.unlink()
        self.drop_units()
        self.sweep()
        for name in ("study.json", _LOCK):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def read_table(
        self, table: str, *, columns: Sequence[str] | None = None, filters: Sequence[tuple[str, str, Any]] | None = None
    ) -> pa.Table:
        """A finished table, or those columns and rows of it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self.require(table)
        try:
            return pq.read_table(
                file, columns=list(columns) if columns else None, filters=list(filters) if filters else None
            )
        except (OSError, pa.ArrowException) as fault:
            raise BadFolder(
                f"{file} cannot be read ({str(fault).splitlines()[0]}); remove it and run the study again"
            ) from None

    # ---- units

    def unit_path(self, table: str, key: str) -> Path:
        return self.path / "units" / table / f"{key}.parquet"

    def has_unit(self, tables: Sequence[str], key: str) -> bool:
        return all(self.unit_path(table, key).exists() for table in tables)

    def write_unit(self, tables: Mapping[str, pa.Table], key: str) -> None:
        for name, table in tables.items():
            write_atomically(self.unit_path(name, key), _encode(table))

    def read_unit(self, table: str, key: str) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.unit_path(table, key)
        try:
            return pq.ParquetFile(path).read()
        except (OSError, pa.ArrowInvalid) as fault:
            cause = str(fault).partition("\n")[0]
            raise BadFolder(f"unit {path} cannot be read ({cause}); remove that file and run again") from None

    def write_table(self, name: str, table: pa.Table) -> None:
        write_atomically(self.path / f"{name}.parquet", _encode(table))

    def merge(self, name: str, keys: Sequence[str]) -> None:
        """Merge all units of a table into one file, in the order of `keys`, with one unit in memory at a time."""
        import pyarrow.parquet as pq

        if not keys:
            raise BadFolder(f"{self.path} has no units of {name}; run the study again")
        path = self.path / f"{name}.parquet"
        with _refusals(path), _partial(path) as partial:
            first = self.read_unit(name, keys[0])
            with pq.ParquetWriter(partial, first.schema, compression="zstd") as writer:
                for key in keys:
                    table = self.read_unit(name, key)
                    if table.schema != first.schema:
                        raise BadFolder(
                            f"unit {self.unit_path(name, key)} has other columns than the first; remove that file and run again"
                        )
                    writer.write_table(table, row_group_size=max(1, len(table)))  # one group, so `read_part` finds it
            descriptor = os.open(partial, os.O_RDWR)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _publish(partial, path)

    def read_part(self, table: str, number: int, parts: int) -> pa.Table:
        """The rows of one unit in a table merged from so many; each unit is one row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self.require(table)
        try:
            opened = pq.ParquetFile(file)
            if opened.num_row_groups != parts:
                raise BadFolder(
                    f"{file} has {opened.num_row_groups} parts where its study has {parts} units; run the study again with another --out"
                )
            return opened.read_row_group(number)
        except (OSError, pa.ArrowException) as fault:
            cause = str(fault).partition("\n")[0]
            raise BadFolder(f"{file} cannot be read ({cause}); remove it and run the study again") from None

    def has_tables(self, tables: Sequence[str]) -> bool:
        return all((self.path / f"{table}.parquet").exists() for table in tables)

    def has_units(self) -> bool:
        return (self.path / "units").exists()

    def drop_units(self) -> None:
        """Remove all units: the tables hold them, or they are not needed."""
        shutil.rmtree(self.path / "units", ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed writer left half-written."""
        for partial in self.path.rglob(".*.partial"):
            partial.unlink(missing_ok=True)

    # ---- one writer at a time

    @contextmanager
    def writing(self) -> Generator[None]:
        """Lock the folder. A second run gets an error; the lock of a killed run ends with its process."""
        with _refusals(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadFolder(
                    f"another mless is writing {self.path}; wait for it to end, or choose another --out"
                ) from None
            except (ImportError, OSError):
                pass  # Windows, or a file system without locks: units are still whole or absent, the work is merely done twice
            yield
        finally:
            os.close(descriptor)
