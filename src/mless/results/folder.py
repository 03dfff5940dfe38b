"""A result folder: units while a study runs, Parquet tables when it is done, and where it all came from.

A unit that is stored is whole, in a file of its own or in a growing table, so a killed run loses only what was on its way to the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mless import gates
from mless.errors import BadFolder
from mless.limits import MANIFEST_BYTES, TABLE_BYTES
from mless.results import sealing

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.results.growing import GrowingTable
    from mless.results.grown import GrownTable, Piece
    from mless.results.units import Expecting

#: The file contract's number; a folder with a higher one was made by a newer mless. Since 2 placement `end` is the end of the user's turn,
#: and raw prompts have a token boundary before the line break. Since 3 units, tables and study.json have checksums, and weights are known by
#: all of their bytes. Since 4 tables of units are written as the units come, several units and some layers in a row group.
FORMAT = 4
#: Folders from this format on have checksums. Older ones open without.
SEALED = 3
#: From this format on prompts run in groups, and tables of units hold several in a row group.
GROUPED = 4

_LOCK, _ASIDE = ".lock", "set-aside"
_TABLES, _NEXT, _FOOTERS = "tables", "tables_next", "footers"
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
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    partial.touch(exist_ok=False)  # and not mkstemp, whose files are private: results are as readable as any other file
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


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
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _damaged(file: Path) -> BadFolder:
    return BadFolder(
        f"{file} is damaged, or not the table that was stored: its checksum is not the one in study.json; {_WAY_OUT}"
    )


def is_taken(path: Path) -> bool:
    """Whether a study cannot begin there. Files left by a run killed at its start do not count."""
    return path.exists() and (not path.is_dir() or any(not _is_trace(entry) for entry in path.iterdir()))


def _is_trace(entry: Path) -> bool:
    if entry.name == "units" and entry.is_dir():
        return all(file.suffix in (".parquet", ".partial") for file in entry.rglob("*") if not file.is_dir())
    return entry.name in (_LOCK, _ASIDE) or (entry.name.startswith(".") and entry.name.endswith(".partial"))


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
        #: Digests of the footers of those among them that grew.
        self._footers: dict[str, str] = {}
        #: Tables of units that are open, and which file each was.
        self._grown: dict[str, tuple[tuple[int, ...], GrownTable]] = {}

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
        from mless.results.manifest import check_shape, with_todays_names

        check_shape(content, file)
        return with_todays_names(content)

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
        before = {name: digest for name, digest in (content.get(_FOOTERS) or {}).items() if name not in self._written}
        footers = {**before, **self._footers}
        listed = {_TABLES: tables, _NEXT: {k: v for k, v in following.items() if tables.get(k) != v}, _FOOTERS: footers}
        kept = {key: value for key, value in content.items() if key not in (*listed, sealing.OWN_DIGEST)}
        # As JSON gives it back: keys are texts there, and tuples are lists.
        about = json.loads(json.dumps({**kept, "format": FORMAT} | {k: v for k, v in listed.items() if v}))
        sealed = {"format": FORMAT, sealing.OWN_DIGEST: sealing.digest_of(about), **about}
        written = json.dumps(sealed, indent=1, ensure_ascii=False).encode()
        self._check_readable(about, len(written))
        self.put(self.path / "study.json", written)
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
        about = self._of_table(table)
        self.check_tables((table,), about)
        return self.path / f"{table}.parquet", about

    def _of_table(self, table: str) -> Mapping[str, Any]:
        """study.json, once it is known that there is such a table."""
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
        return about

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
            raise _damaged(file)

    def check_free(self) -> None:
        """Refuse a folder that holds no study but other files."""
        if is_taken(self.path):
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
        there = pq.read_schema(file).names
        kept = list(columns) if columns else declared(table, there) or there
        wanted = list(filters) if filters else None
        read = gate.with_places(kept)
        found = gate.read(lambda: pq.read_table(file, columns=read, filters=wanted, page_checksum_verification=True))
        return gate.in_order(gate.check_rows(found), kept)

    # ---- units

    def unit_path(self, table: str, key: str) -> Path:
        return self.path / "units" / table / f"{key}.parquet"

    def has_unit(self, tables: Sequence[str], key: str) -> bool:
        return all(self.unit_path(table, key).exists() for table in tables)

    def write_unit(self, tables: Mapping[str, pa.Table], key: str) -> None:
        for name, table in tables.items():
            self.put(self.unit_path(name, key), sealing.encode(table, self._inside(name, key)))

    def _inside(self, table: str, key: str) -> dict[str, str]:
        """What a unit says of itself, so that another one in its place is noticed."""
        return {"study": self.study, "table": table, "unit": key}

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
        free = self._free_aside(path)
        with _refusals(free):
            path.rename(free)
        return free.relative_to(self.path)

    def set_content_aside(self, path: Path, content: bytes) -> Path:
        """The same for some of a file's bytes."""
        free = self._free_aside(path)
        _write(free, content)
        return free.relative_to(self.path)

    def _free_aside(self, path: Path) -> Path:
        place = self.path / _ASIDE / path.relative_to(self.path)
        with _refusals(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            number = 1
            while os.path.lexists(free := place.with_name(place.name + (f".{number}" if number > 1 else ""))):
                number += 1
        return free

    def write_table(self, name: str, table: pa.Table) -> None:
        content = sealing.encode(table)
        self._announce(name, hashlib.sha256(content).hexdigest())
        self.put(self.path / f"{name}.parquet", content)

    def _announce(self, name: str, digest: str) -> None:
        """Before a finished folder's table is replaced study.json gets its digest beside the old one: a kill leaves one of the two tables."""
        self._footers.pop(name, None)
        about = self.manifest() if (self.path / "study.json").exists() else None
        listed: dict[str, str] = (about or {}).get(_TABLES) or {}
        finished = about is not None and about["format"] >= SEALED and about.get("complete", True)
        if about is not None and finished and listed.get(name) != digest:
            self._write_manifest(about, listed, {**about.get(_NEXT, {}), name: digest})
        self._written[name] = digest

    def put(self, path: Path, content: bytes) -> None:
        """Write a file of this folder, whole or not at all."""
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
            if not path.parent.is_dir():
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

    # ---- tables that grow while a study runs

    @property
    def study(self) -> str:
        """What units say of the study that they belong to."""
        if self._study is None:
            self.take_units_of((self.manifest() or {}).get("identity") or {})
        return str(self._study)

    def growing(self, table: str) -> GrowingTable:
        from mless.results.growing import GrowingTable

        return GrowingTable(self.path / "units" / f"{table}.parquet", table, lambda: self.study)

    def any_unit(self, table: str, keys: Sequence[str]) -> pa.Table | None:
        """The rows of one of the units that an unfinished study has stored; None where there is none."""
        growing = self.growing(table)
        growing.look()
        if growing.parts:
            return next(iter(growing.read_units(0).values()))
        key = next((key for key in keys if self.has_unit((table,), key)), None)
        return None if key is None else self.read_unit(table, key)

    def take_back(self, name: str, growing: GrowingTable) -> None:
        """A run that ended after a table got its place, but before its study was complete, left it there: it goes on growing.

        Refused where something else than a plain file is in its place.
        """
        from mless.results.growing import grew

        table = self.path / f"{name}.parquet"
        if not os.path.lexists(growing.path) and table.is_file() and not table.is_symlink() and grew(table):
            self._make_room(growing.path)
            with _refusals(growing.path):
                table.rename(growing.path)
        if os.path.lexists(growing.path):
            gates.check_file(
                growing.path,
                TABLE_BYTES,
                lambda why: BadFolder(f"{growing.path} {why}; remove it and run the same command again"),
            )

    def written(self, growing: GrowingTable, write: Callable[[], None]) -> None:
        """Write to a growing table. A refusal is one line of error, and what is stored stays."""
        self._make_room(growing.path)
        with _refusals(growing.path):
            write()

    @contextmanager
    def refusals(self, path: Path) -> Generator[None]:
        """A file of this folder that cannot be written is one line of error."""
        with _refusals(path):
            yield

    def publish(self, name: str, growing: GrowingTable) -> None:
        """Give a growing table its footer and its place: from then on it is a table of the finished folder."""
        path = self.path / f"{name}.parquet"
        self._make_room(path)
        with _refusals(path):
            finished = growing.finish()
            self._announce(name, finished.digest)
            self._footers[name] = finished.footer
            _publish(growing.path, path)
            _CHECKED.note(path, finished.digest)

    def grown(self, table: str, units: Sequence[str]) -> GrownTable:
        """A finished table that can be read unit by unit; `units` are all of its study's, in order.

        Only its footer is compared with study.json here. Its pages have checksums, which are compared when they are read.
        """
        from mless.results.grown import GrownTable, NotAsListed
        from mless.results.tables import TableGate

        file = self.path / f"{table}.parquet"
        before, opened = self._grown.get(table) or (None, None)
        if before is None or opened is None or not file.exists() or before != gates.state_of(file):
            about = self._of_table(table)
            footer = self._footers.get(table) or (about.get(_FOOTERS) or {}).get(table)
            if footer is None:
                self.check_tables((table,), about)
            elif sealing.digest_of_footer(file) != footer:
                raise _damaged(file)
            try:
                opened = TableGate(file, about, whole=False).read(lambda: GrownTable(file, units))
            except NotAsListed as fault:
                raise BadFolder(f"{file} {fault}; {_WAY_OUT}") from None
            self._grown[table] = (gates.state_of(file), opened)
        return opened

    def each_piece(
        self, table: str, units: Sequence[str], columns: Sequence[str], use: Callable[[Piece], None]
    ) -> None:
        """Every row group of a finished table of units once; `use` is called in several threads."""
        from mless.results.tables import TableGate

        found = self.grown(table, units)
        gate = TableGate(self.path / f"{table}.parquet", self.manifest() or {}, whole=False)
        gate.read(lambda: found.each(columns, use))

    def read_part(self, table: str, unit: str, units: Sequence[str]) -> pa.Table:
        """The rows of one unit of a finished table."""
        from mless.results.tables import TableGate

        found = self.grown(table, units)
        gate = TableGate(self.path / f"{table}.parquet", self.manifest() or {}, whole=False)
        return gate.check_rows(gate.read(lambda: found.unit(unit)))

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
