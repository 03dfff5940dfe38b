"""Finished folders as an interrupted run leaves them, and as older versions left theirs: with units."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from growing_tables import write_as_format_3
from mless.results import sealing
from mless.results.folder import ResultFolder
from mless.results.schemas import REPLIES
from mless.results.storing import Encoded, Store
from mless.study.identity import unit_name
from mless.study.kinds import MEASUREMENTS


def put_units_back(path: Path) -> None:
    """Write the units of a finished folder from its tables. Those of an affine study hold more than its tables do: `units_kept` is for them."""
    folder = ResultFolder(path)
    about = folder.manifest()
    assert about is not None
    merged = MEASUREMENTS.get(about["measures"]).merged
    answers = None if merged else folder.read_table("answers", columns=REPLIES.names)
    places = _places(about)
    for condition, number in places:
        key = unit_name(condition, number)
        found = {table: folder.read_part(table, key, [unit_name(*place) for place in places]) for table in merged}
        if answers is not None:
            mine = (pc.field("condition") == condition) & (pc.field("item") == about["items"][number])
            found = {"replies": answers.filter(mine).cast(REPLIES)}
        folder.write_unit(found, key)


def _places(about: dict[str, Any]) -> list[tuple[str, int]]:
    return [(condition, number) for condition in about["conditions"] for number in range(len(about["items"]))]


def as_of_format_3(path: Path) -> None:
    """Make a finished folder one of format 3: each unit is a row group, in the order of the study. Its prompts must have run one by one."""
    folder = ResultFolder(path)
    about = folder.manifest()
    assert about is not None
    assert about["study"]["batch_size"] == 1
    merged, units = MEASUREMENTS.get(about["measures"]).merged, [unit_name(*place) for place in _places(about)]
    for name in about["tables"]:
        whole = [folder.read_table(name)] if name not in merged else []
        write_as_format_3(path / f"{name}.parquet", whole or [folder.read_part(name, unit, units) for unit in units])
    digests = {name: sealing.digest_of_file(path / f"{name}.parquet") for name in about["tables"]}
    del about["footers"], about["group_tokens"], about["study"]["group_tokens"]
    at = about["command"].index("batch_size=1")
    del about["command"][at - 1 : at + 1]
    with format_3():
        ResultFolder(path).write_manifest(about | {"tables": digests})


@contextmanager
def format_3() -> Generator[None]:
    """What is written in here is of format 3."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mless.results.folder.FORMAT", 3)
        yield


def take_apart(path: Path) -> ResultFolder:
    """A finished folder as a run leaves it that is killed after its last unit: units, no tables, not complete."""
    put_units_back(path)
    return not_finished(path)


def not_finished(path: Path) -> ResultFolder:
    """Take away the tables of a folder that has units."""
    for table in path.glob("*.parquet"):
        table.unlink()
    with about_changed(path) as about:
        about["complete"] = False
        about.pop("tables", None)
        about.pop("footers", None)
    return ResultFolder(path)


def table_replaced(path: Path, name: str, table: pa.Table) -> None:
    """Another table in a finished folder, as if its study had stored that one."""
    folder = ResultFolder(path)
    about = folder.manifest()
    assert about is not None
    folder.write_table(name, table)
    folder.write_manifest(about)


@contextmanager
def about_changed(path: Path, *, number: int | None = None) -> Generator[dict[str, Any]]:
    """What a folder's study.json says, to be changed and written as mless writes it; with `number` as an older format, without checksums."""
    about = ResultFolder(path).manifest()
    assert about is not None
    yield about
    if number is None:
        ResultFolder(path).write_manifest(about)
    else:
        for newer in ("tables", "tables_next", "footers"):
            about.pop(newer, None)
        (path / "study.json").write_text(json.dumps(about | {"format": number}))


@contextmanager
def units_kept() -> Generator[None]:
    """A study that ends in here keeps its units."""
    with pytest.MonkeyPatch.context() as patched:
        put = Store.put

        def put_and_keep(self: Store, encoded: Encoded) -> None:
            """A part's units are files too."""
            put(self, encoded)
            for unit, tables in encoded.tables.items():
                self.folder.write_unit(tables, unit)

        patched.setattr(ResultFolder, "drop_units", lambda self: None)
        patched.setattr(Store, "put", put_and_keep)
        yield
