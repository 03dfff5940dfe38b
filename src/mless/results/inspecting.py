"""Every file of a result folder looked at: which are whole, which are damaged, and which do not belong to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mless import gates
from mless.errors import BadFolder, first_line
from mless.limits import TABLE_BYTES
from mless.results.folder import SEALED, ResultFolder, is_taken

#: What a finished folder holds beside its tables.
_KNOWN = ("study.json", ".lock", "figures", "report.html", "units", "set-aside")


@dataclass
class Findings:
    """What was found in a folder; `about` is study.json where it can be trusted."""

    about: Mapping[str, Any] | None = None
    tables: int = 0
    units: int = 0
    damaged: list[str] = field(default_factory=list[str])
    left_over: list[str] = field(default_factory=list[str])
    #: Result folders inside this one.
    inner: list[Path] = field(default_factory=list[Path])

    @property
    def sealed(self) -> bool:
        """Whether the folder was made with checksums."""
        return self.about is None or self.about["format"] >= SEALED

    @property
    def complete(self) -> bool:
        return self.about is not None and bool(self.about.get("complete", True))


def no_result_folder(path: Path) -> BadFolder:
    """A folder without study.json: what it holds instead decides what is to be done."""
    if inside := _results_in(path):
        way = f"result folders lie in it, give one or more of them: {', '.join(map(str, inside[:3]))}{', …' * (len(inside) > 3)}"
    elif tables := sorted(file.name for file in path.glob("*.parquet")):
        way = f"{tables[0]} is there without the study.json it belongs to: copy that too, or run the study again into another folder"
    else:
        way = "give a folder that `mless run` made" if is_taken(path) else f"`mless run … --out {path}` makes one"
    return BadFolder(f"{path} holds no study.json, so it is no result folder; {way}")


def _results_in(path: Path) -> list[Path]:
    """Folders one level below that have a study.json."""
    try:
        return sorted(entry for entry in path.iterdir() if (entry / "study.json").is_file())
    except OSError:
        return []


def inspect_folder(path: Path, step: Callable[[str, int, int], None] = lambda what, done, total: None) -> Findings:
    """Read every table and unit of a folder, and compare each with its checksum."""
    folder, found = ResultFolder(path), Findings()
    try:
        found.about = folder.manifest()
    except BadFolder as fault:
        found.damaged.append(str(fault))
        return found
    if found.about is None:
        raise no_result_folder(path)
    tables = _tables(path, found)
    units, growing = sorted((path / "units").glob("*/*.parquet")), sorted((path / "units").glob("*.parquet"))
    for done, table in enumerate(tables, start=1):
        _look(found, lambda name=table: _check_table(folder, name, found.about or {}))
        found.tables += 1
        step("checking", done, len(tables) + len(units))
    for done, unit in enumerate(units, start=1):
        _look(found, lambda file=unit: _check_unit(folder, file, sealed=found.sealed))
        found.units += 1
        step("checking", len(tables) + done, len(tables) + len(units))
    for file in growing:
        _look(found, lambda file=file: _check_growing(folder, file, found))
    _look_around(path, found, tables)
    return found


def _tables(path: Path, found: Findings) -> list[str]:
    about = found.about or {}
    if not found.sealed:
        return sorted(file.stem for file in path.glob("*.parquet"))
    return sorted({**about.get("tables", {}), **about.get("tables_next", {})})


def _check_table(folder: ResultFolder, table: str, about: Mapping[str, Any]) -> None:
    if not folder.has_tables((table,)):
        raise BadFolder(
            f"{folder.path / table}.parquet is missing; restore it from a copy, or run the same command again"
        )
    folder.check_tables((table,), about)
    if about["format"] < SEALED:
        folder.read_table(table)  # all that can be said of it is that it can be read


def _check_growing(folder: ResultFolder, file: Path, found: Findings) -> None:
    """Count the units of a table that grows. A part that a killed run was writing is no damage."""
    gates.check_file(file, TABLE_BYTES, lambda why: BadFolder(f"{file} {why}; run the same command again"))
    table = folder.growing(file.stem)
    there = table.look()
    found.units += len(table.units)
    if there.damaged:
        raise BadFolder(
            f"{file} has {len(there.damaged)} damaged parts, or parts of another study; run the same command again, and they are measured anew"
        )


def _check_unit(folder: ResultFolder, file: Path, *, sealed: bool) -> None:
    if sealed:
        folder.read_unit(file.parent.name, file.stem)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    def refuse(why: str) -> BadFolder:
        return BadFolder(f"unit {file} {why}; restore it from a copy: a folder of an older mless is not continued")

    gates.check_file(file, TABLE_BYTES, refuse)
    try:
        with pq.ParquetFile(file) as opened:
            for _ in opened.iter_batches():  # all that can be said of it is that it can be read
                pass
    except (OSError, pa.ArrowException, ValueError, OverflowError) as fault:
        raise refuse(f"cannot be read ({first_line(fault)})") from None


def _look(found: Findings, check: Callable[[], object]) -> None:
    try:
        check()
    except BadFolder as fault:
        found.damaged.append(str(fault))


def _look_around(path: Path, found: Findings, tables: list[str]) -> None:
    """What else lies there."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and (entry / "study.json").exists():
            found.inner.append(entry)
        elif entry.name == "set-aside":
            found.left_over.append("set-aside/: damaged or foreign units that were measured anew")
        elif entry.name == "units" and found.complete:
            removed = "; the same command removes them" if found.sealed else ""
            found.left_over.append(f"units/: the tables hold them{removed}")
        elif entry.name.endswith(".partial"):
            found.left_over.append(f"{entry.name}: left by a killed run")
        elif entry.name not in _KNOWN and (entry.suffix != ".parquet" or entry.stem not in tables):
            found.left_over.append(f"{entry.name}: not listed in study.json")
