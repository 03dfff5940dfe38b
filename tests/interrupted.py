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

from mless.results.folder import ResultFolder
from mless.results.schemas import REPLIES
from mless.study.identity import unit_name
from mless.study.kinds import MEASUREMENTS


def put_units_back(path: Path) -> None:
    """Write the units of a finished folder from its tables. Those of an affine study hold more than its tables do: `units_kept` is for them."""
    folder = ResultFolder(path)
    about = folder.manifest()
    assert about is not None
    merged = MEASUREMENTS.get(about["measures"]).merged
    answers = None if merged else folder.read_table("answers", columns=REPLIES.names)
    places = [(condition, number) for condition in about["conditions"] for number in range(len(about["items"]))]
    for at, (condition, number) in enumerate(places):
        key = unit_name(condition, number)
        found = {table: folder.read_part(table, at, len(places)) for table in merged}
        if answers is not None:
            mine = (pc.field("condition") == condition) & (pc.field("item") == about["items"][number])
            found = {"replies": answers.filter(mine).cast(REPLIES)}
        folder.write_unit(found, key)


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
        for newer in ("tables", "tables_next"):
            about.pop(newer, None)
        (path / "study.json").write_text(json.dumps(about | {"format": number}))


@contextmanager
def units_kept() -> Generator[None]:
    """A study that ends in here keeps its units."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ResultFolder, "drop_units", lambda self: None)
        yield
