"""A result folder: units while a study runs, Parquet tables when it is done, and where it all came from.

A unit exists whole or not at all (temporary name, sync, rename), so a killed run loses at most the unit it was computing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless import gates
from mless.errors import BadFolder
from mless.limits import MANIFEST_BYTES, TABLE_BYTES
from mless.results import sealing

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mless.results.tables import TableGate
    from mless.results.units import Expecting

#: The file contract's number; a folder with a higher one was made by a newer mless. Since 2 placement `end` is the end of the user's turn,
#: and raw prompts have a token boundary before the line break. Since 3 units, tables and study.json have checksums, and weights are known by
#: all of their bytes.
FORMAT = 3
#: Folders from this format on have checksums. Older ones open without.
SEALED = 3

_LOCK, _ASIDE = ".lock", "set-aside"
_TABLES, _NEXT = "tables", "tables_next"
_WAY_OUT = "restore it from a copy, or remove it and run the same command again"
_CHECKED = sealing.Checked()


def write_atomically(path: Path, content: bytes) -> None:
    """Whole or not at all, and on the disk before the name appears."""
    with _refusals(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, content)


def _write(path: Path, content: bytes) -> None:
    with _refusals(path), _partial(path) as partial:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _publish(partial, path)


@contextmanager
def _partial(path: Path) -> Generator[Path]:
    """A file beside `path` to write to; gone afterwards unless it was renamed."""
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


def no_result_folder(path: Path) -> BadFolder:
    return BadFolder(f"{path} holds no study.json, so it is no result folder; `mless run … --out {path}` makes one")


def _is_trace(entry: Path) -> bool:
    if entry.name == "units" and entry.is_dir():
        return all(file.suffix in (".parquet", ".partial") for file in entry.rglob("*") if not file.is_dir())
    return entry.name in (_LOCK, _ASIDE) or (entry.name.startswith(".") and entry.name.endswith(".partial"))


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
        self._study: str | None = None
        #: Digests of the tables that this object has written.
        self._written: dict[str, str] = {}
        self._lock: int | None = None
        #: Whether study.json was read or written, so that it must be there.
        self._begun = False
        #: Merged tables that are open: which file it was, its gate, and the file.
        self._parts: dict[str, tuple[tuple[int, ...], TableGate, pq.ParquetFile]] = {}

    # ---- provenance

    def manifest(self) -> dict[str, Any] | None:
        """study.json, or None where there is none yet. A broken or newer one is an error."""
        file = self.path / "study.json"
        try:
            file.lstat()
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise BadFolder(f"{self.path} is a file, not a result folder; choose another --out") from None
        except (OSError, ValueError) as fault:
            cause = getattr(fault, "strerror", None) or fault
            raise BadFolder(f"{file} cannot be read ({cause}); choose another --out") from None
        way_out = "the folder is damaged: remove it, or choose another --out"
        # mless writes NaN where a number of its own record is none.
        content = gates.read_json(
            file, MANIFEST_BYTES, lambda why: BadFolder(f"{file} is not readable JSON: {why}; {way_out}"), finite=False
        )
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise BadFolder(f"{file} was not written by mless; choose another --out")
        if content["format"] > FORMAT:
            raise BadFolder(
                f"{self.path} was made by a newer mless ({content.get('mless', 'unknown')}, format {content['format']}); this one reads "
                f"format {FORMAT}: upgrade mless, or choose another --out"
            )
        stated = content.pop(sealing.OWN_DIGEST, None)
        # One flipped bit can change the format's number or this field, never both.
        if (stated is not None or content["format"] >= SEALED) and stated != sealing.digest_of(content):
            raise BadFolder(
                f"{file} is damaged, or was changed by hand: its checksum does not match its content; restore it from a copy, or remove the "
                "folder and run the study again"
            )
        self._begun = True
        # pydantic loads here and not at the top: `import mless` must stay cheap.
        from mless.results.manifest import check_shape

        check_shape(content, file)
        return _with_todays_names(content)

    def about(self) -> dict[str, Any] | None:
        """study.json with every field that readers of such a folder need, or None where there is none yet."""
        from mless.results.manifest import check_needed, measured_in

        content = self.manifest()
        if content is not None:
            check_needed(content, measured_in(content), self.path / "study.json")
        return content

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Write study.json, with the digests of the tables and of itself."""
        replaced = {key: value for key, value in (content.get(_NEXT) or {}).items() if key not in self._written}
        self._write_manifest(content, {**(content.get(_TABLES) or {}), **self._written}, replaced)

    def _write_manifest(
        self, content: Mapping[str, Any], tables: Mapping[str, str], following: Mapping[str, str]
    ) -> None:
        listed = {_TABLES: tables, _NEXT: {k: v for k, v in following.items() if tables.get(k) != v}}
        kept = {key: value for key, value in content.items() if key not in (*listed, sealing.OWN_DIGEST)}
        # As JSON gives it back: keys are texts there, and tuples are lists.
        about = json.loads(json.dumps({**kept, "format": FORMAT} | {k: v for k, v in listed.items() if v}))
        sealed = {"format": FORMAT, sealing.OWN_DIGEST: sealing.digest_of(about), **about}
        written = json.dumps(sealed, indent=1, ensure_ascii=False).encode()
        self._check_readable(about, len(written))
        self._put(self.path / "study.json", written)
        self._begun = True

    def _check_readable(self, about: Mapping[str, Any], size: int) -> None:
        """Refuse to write what could not be read again, before anything is computed."""
        from mless.results.manifest import check_shape

        if size > MANIFEST_BYTES.value:
            raise BadFolder(
                f"{self.path / 'study.json'} would have {size:,} bytes; expected {MANIFEST_BYTES}: run fewer or shorter questions"
            )
        check_shape(about, self.path / "study.json")

    def require(self, table: str) -> Path:
        """The path of a finished table, once it is known to be whole."""
        return self._required(table)[0]

    def _required(self, table: str) -> tuple[Path, Mapping[str, Any]]:
        """The same, and study.json."""
        file = self.path / f"{table}.parquet"
        about = self.manifest()
        if about is None:
            raise BadFolder(
                f"{self.path} is no result folder (it has no study.json); make one with: mless run STUDY --out {self.path}"
            )
        if not file.exists():
            raise BadFolder(
                f"{self.path} has no {file.name}: its run did not finish; run the same command again to complete it"
            )
        self.check_tables((table,), about)
        return file, about

    def check_tables(self, tables: Sequence[str], about: Mapping[str, Any]) -> None:
        """Refuse tables that are not those study.json lists by their digests, and tables that hold something else than they should.

        Folders of before have no digests.
        """
        from mless.results.tables import TableGate

        for table in tables:
            file = self.path / f"{table}.parquet"
            gates.check_file(file, TABLE_BYTES, lambda why, file=file: BadFolder(f"{file} {why}; {_WAY_OUT}"))
            if about.get("format", 0) >= SEALED:
                self._check_digest(table, about)
            TableGate(file, about)

    def _check_digest(self, table: str, about: Mapping[str, Any]) -> None:
        file = self.path / f"{table}.parquet"
        known = [self._written.get(table), *((about.get(key) or {}).get(table) for key in (_TABLES, _NEXT))]
        if not any(known):
            raise BadFolder(
                f"{file} is not among the tables that study.json lists: its run did not finish, or it was put there later; run the same "
                "command again"
            )
        try:
            found = _CHECKED.digest(file)
        except OSError as fault:
            raise BadFolder(f"{file} cannot be read ({fault.strerror}); {_WAY_OUT}") from None
        if found not in known:
            raise BadFolder(
                f"{file} is damaged, or not the table that was stored: its checksum is not the one in study.json; {_WAY_OUT}"
            )

    def check_free(self) -> None:
        """Refuse a folder that holds no study but other files. Files left by a run killed at its start do not count."""
        if self.path.exists() and any(not _is_trace(entry) for entry in self.path.iterdir()):
            raise BadFolder(f"{self.path} is not empty and holds no study.json; choose another --out")

    def discard(self) -> None:
        """Take away everything a run wrote, and the folder if nothing else is in it. Call it inside `writing`."""
        for table in self.path.glob("*.parquet"):
            table.unlink()
        self.drop_units()
        self.sweep()
        self._begun = False
        for name in ("study.json", _LOCK):
            (self.path / name).unlink(missing_ok=True)
        if self.path.exists() and not any(self.path.iterdir()):
            self.path.rmdir()

    def read_table(
        self, table: str, *, columns: Sequence[str] | None = None, filters: Sequence[tuple[str, str, Any]] | None = None
    ) -> pa.Table:
        """A finished table, or those columns and rows of it."""
        import pyarrow.parquet as pq

        from mless.results.tables import TableGate, declared

        file, about = self._required(table)
        gate = TableGate(file, about)
        kept = list(columns) if columns else declared(table, pq.read_schema(file).names)
        wanted = list(filters) if filters else None
        return gate.check_rows(
            gate.read(lambda: pq.read_table(file, columns=kept, filters=wanted, page_checksum_verification=True))
        )

    # ---- units

    def unit_path(self, table: str, key: str) -> Path:
        return self.path / "units" / table / f"{key}.parquet"

    def has_unit(self, tables: Sequence[str], key: str) -> bool:
        return all(self.unit_path(table, key).exists() for table in tables)

    def write_unit(self, tables: Mapping[str, pa.Table], key: str) -> None:
        for name, table in tables.items():
            self._put(self.unit_path(name, key), sealing.encode(table, self._inside(name, key)))

    def _inside(self, table: str, key: str) -> dict[str, str]:
        """What a unit says of itself, so that another one in its place is noticed."""
        if self._study is None:
            self.take_units_of((self.manifest() or {}).get("identity") or {})
        return {"study": str(self._study), "table": table, "unit": key}

    def take_units_of(self, identity: Mapping[str, str]) -> None:
        """Units are written and read as those of the study with this identity; until this is called, of the one in study.json."""
        self._study = sealing.digest_of(identity)[:16]

    def read_unit(self, table: str, key: str) -> pa.Table:
        path = self.unit_path(table, key)
        try:
            return self._decoded(path, table, key)
        except sealing.Damaged as fault:
            raise BadFolder(
                f"unit {path} is refused: {fault}; run the same command again, and it is measured anew"
            ) from None

    def _decoded(self, path: Path, table: str, key: str) -> pa.Table:
        return sealing.decode(gates.read_bytes(path, TABLE_BYTES, sealing.Damaged), self._inside(table, key))

    def refuse_damaged(
        self, tables: Sequence[str], key: str, expected: Expecting = lambda table, found: None
    ) -> list[str]:
        """Set aside what lies in a unit's place and is not that unit; what was found, in words. One that is whole and holds something else than
        its study stores is an error: nobody knows who wrote it.
        """
        from mless.results.units import UnitGate

        said: list[str] = []
        for table in tables:
            path = self.unit_path(table, key)
            try:
                found = self._decoded(path, table, key)
                UnitGate(path, table).check(found, lambda found, table=table: expected(table, found))
            except sealing.Damaged as fault:
                said.append(
                    f"unit {path.relative_to(self.path)} is refused: {fault}; set aside as {self.set_aside(path)}"
                )
        return said

    def set_aside(self, path: Path) -> Path:
        """Move something out of the way, without losing it; where it is now, seen from the folder."""
        place = self.path / _ASIDE / path.relative_to(self.path)
        with _refusals(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            number = 1
            while os.path.lexists(free := place.with_name(place.name + (f".{number}" if number > 1 else ""))):
                number += 1
            path.rename(free)
        return free.relative_to(self.path)

    def write_table(self, name: str, table: pa.Table) -> None:
        content = sealing.encode(table)
        self._announce(name, hashlib.sha256(content).hexdigest())
        self._put(self.path / f"{name}.parquet", content)

    def _announce(self, name: str, digest: str) -> None:
        """Before a finished folder's table is replaced study.json gets its digest beside the old one: a kill leaves one of the two tables."""
        about = self.manifest() if (self.path / "study.json").exists() else None
        listed: dict[str, str] = (about or {}).get(_TABLES) or {}
        finished = about is not None and about["format"] >= SEALED and about.get("complete", True)
        if about is not None and finished and listed.get(name) != digest:
            self._write_manifest(about, listed, {**about.get(_NEXT, {}), name: digest})
        self._written[name] = digest

    def _put(self, path: Path, content: bytes) -> None:
        self._make_room(path)
        _write(path, content)

    def _make_room(self, path: Path) -> None:
        """Make the folders inside this one. This one itself is made by `writing`: if it is gone since, nothing is written."""
        with _refusals(path):
            if self._lock is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                return
            if not self._is_held():
                raise BadFolder(
                    f"{self.path} was removed or replaced while its study ran, and what was stored in it with it; run the same command again: "
                    "it starts from the beginning"
                )
            for parent in reversed(path.relative_to(self.path).parents[:-1]):
                (self.path / parent).mkdir(exist_ok=True)

    def _is_held(self) -> bool:
        """Whether the lock file that this object holds is still the folder's, and study.json still there."""
        assert self._lock is not None
        try:
            there = os.lstat(self.path / _LOCK)
            if self._begun:
                os.lstat(self.path / "study.json")
        except OSError:
            return False
        held = os.fstat(self._lock)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def merge(self, name: str, keys: Sequence[str]) -> None:
        """Merge all units of a table into one file, in the order of `keys`, with one unit in memory at a time."""
        import pyarrow.parquet as pq

        if not keys:
            raise BadFolder(f"{self.path} has no units of {name}; run the study again")
        path = self.path / f"{name}.parquet"
        self._make_room(path)
        with _refusals(path), _partial(path) as partial:
            first = self.read_unit(name, keys[0])
            with pq.ParquetWriter(partial, first.schema, compression="zstd", write_page_checksum=True) as writer:
                for key in keys:
                    table = self.read_unit(name, key)
                    if table.schema != first.schema:
                        raise BadFolder(
                            f"unit {self.unit_path(name, key)} has other columns than {self.unit_path(name, keys[0]).name}; remove the one that is "
                            "wrong, or both, and run the same command again"
                        )
                    writer.write_table(table, row_group_size=max(1, len(table)))  # one group, so `read_part` finds it
            descriptor = os.open(partial, os.O_RDWR)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._announce(name, sealing.digest_of_file(partial))
            _publish(partial, path)

    def read_part(self, table: str, number: int, parts: int) -> pa.Table:
        """The rows of one unit in a table merged from so many; each unit is one row group."""
        import pyarrow.parquet as pq

        from mless.results.tables import TableGate

        file = self.path / f"{table}.parquet"
        # Checked and opened once: a study reads thousands of parts of one file.
        before, gate, opened = self._parts.get(table) or (None, None, None)
        if before is None or gate is None or opened is None or not file.exists() or before != gates.state_of(file):
            file, about = self._required(table)
            gate, opened = TableGate(file, about), pq.ParquetFile(file, page_checksum_verification=True)
            self._parts[table] = (gates.state_of(file), gate, opened)
        if opened.num_row_groups != parts:
            raise BadFolder(
                f"{file} has {opened.num_row_groups} parts where its study has {parts} units; run the study again with another --out"
            )
        return gate.check_rows(gate.read(lambda: opened.read_row_group(number)))

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

    def is_being_written(self) -> bool:
        """Whether a running study holds the lock. Nothing is made or changed; where there are no locks nobody knows, and it is False."""
        try:
            import fcntl

            # A pipe in the lock's place must not be waited for.
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (ImportError, OSError, ValueError):
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def _refuse_links(self) -> None:
        """A folder of someone else may hold links, and what is written through them lands anywhere. Tables and study.json replace a link."""
        inside = [self.path / name for name in (_LOCK, "units", _ASIDE, f"{_ASIDE}/units")]
        for entry in [*inside, *(entry for folder in inside if folder.is_dir() for entry in folder.iterdir())]:
            if entry.is_symlink():
                way_out = "remove the link" if entry.name == _LOCK else "move what it points to to this place"
                raise BadFolder(
                    f"{entry} is a symbolic link, and mless writes units and its lock only inside the result folder; {way_out}, or choose another "
                    "--out"
                )

    @contextmanager
    def writing(self) -> Generator[None]:
        """Lock the folder. A second run gets an error; the lock of a killed run ends with its process."""
        if gates.not_text(os.path.abspath(self.path)):
            raise BadFolder(
                f"{gates.shown(os.path.abspath(self.path))} holds bytes that are no UTF-8 text, which tables cannot be written under; choose another --out"
            )
        with _refusals(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            # A link that appears just now must not be followed either: its target would be made.
            follow_none: int = getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | follow_none, 0o666)
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
            self._lock = descriptor
            yield
        finally:
            self._lock = None
            os.close(descriptor)
