"""A result folder: units while a study runs, Parquet tables when it is done, and where it all came from.

A unit exists whole or not at all (temporary name, sync, rename), so a killed run loses at most the unit it was computing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless.errors import BadFolder

if TYPE_CHECKING:
    import pyarrow as pa

#: The file contract's number; a folder with a higher one was made by a newer mless.
FORMAT = 1


def write_atomically(path: Path, content: bytes) -> None:
    """Whole or not at all, and on the disk before the name appears."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _publish(Path(partial), path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


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


def _encode(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


class ResultFolder:
    """One study's results on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- provenance

    def manifest(self) -> dict[str, Any] | None:
        """study.json, or None where there is none yet. A broken or newer one is an error."""
        file = self.path / "study.json"
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError:
            return None
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
        return content

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
            raise BadFolder(
                f"unit {path} cannot be read ({str(fault).splitlines()[0]}); remove that file and run again"
            ) from None

    def write_table(self, name: str, table: pa.Table) -> None:
        write_atomically(self.path / f"{name}.parquet", _encode(table))

    def merge(self, name: str, keys: Sequence[str]) -> None:
        """All units of a table, in `keys`' order, as one file; one unit in memory at a time."""
        import pyarrow.parquet as pq

        handle, partial = tempfile.mkstemp(dir=self.path, prefix=f".{name}.", suffix=".partial")
        os.close(handle)
        writer: pq.ParquetWriter | None = None
        try:
            for key in keys:
                table = self.read_unit(name, key)
                writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
                writer.write_table(table)
            if writer is None:
                raise BadFolder(f"{self.path} has no units of {name}; run the study again")
            writer.close()
            descriptor = os.open(partial, os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)
            _publish(Path(partial), self.path / f"{name}.parquet")
        finally:
            Path(partial).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a killed writer left half-written."""
        for partial in self.path.rglob(".*.partial"):
            partial.unlink(missing_ok=True)

    # ---- one writer at a time

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold the folder. A second run on it is told so; a killed one's hold ends with its process."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                pass  # no flock on Windows: units are still whole or absent, the work is merely done twice
            except OSError:
                raise BadFolder(
                    f"another mless is writing {self.path}; wait for it to end, or choose another --out"
                ) from None
            yield
        finally:
            os.close(descriptor)
