"""The gate for tables: other columns, types, rows or values than a table can have are refused by name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mless.errors import BadFolder, NoMemory
from mless.figures import draw
from mless.results.folder import ResultFolder
from mless.results.reading import StoredResults, read_prompts
from mless.results.tables import SHAPES, TableGate
from mless.study import verdict_lines
from mless.study.kinds import MEASUREMENTS
from mless.values import FigureSpec
from synthetic import write_answers, write_folder

Change = Callable[[pa.Table], pa.Table]


def put(column: str, values: Callable[[int], pa.Array]) -> Change:
    return lambda table: table.set_column(table.column_names.index(column), column, values(len(table)))


def cell(column: str, value: Any) -> Change:
    """The first row's cell replaced."""

    def change(table: pa.Table) -> pa.Table:
        at = table.column_names.index(column)
        values = [value, *table.column(at).to_pylist()[1:]]
        return table.set_column(at, column, pa.array(values, table.column(at).type))

    return change


def respan(table: pa.Table) -> pa.Table:
    spans = table["spans"].to_pylist()
    spans[0][0]["stop"] += 1
    return table.set_column(table.column_names.index("spans"), "spans", pa.array(spans, table["spans"].type))


def shorten(table: pa.Table) -> pa.Table:
    kept = table["received"].to_pylist()
    kept[0] = kept[0][:-1]
    return table.set_column(table.column_names.index("received"), "received", pa.array(kept, table["received"].type))


def respoiled(folder: Path, table: str, change: Change) -> Path:
    file = folder / f"{table}.parquet"
    pq.write_table(change(pq.read_table(file)), file)
    return file


FAULTS: list[tuple[str, Change, str]] = [
    ("retained", lambda table: table.drop_columns(["verdict"]), "has no column 'verdict'"),
    ("retained", lambda table: table.slice(0, 0), "has no rows; expected at least one"),
    ("retained", lambda table: pa.concat_tables([table, table]), "has a row twice (condition 'mless', layer 1"),
    ("retained", lambda table: table.append_column("verdict", table["verdict"]), "has the column 'verdict' twice"),
    ("retained", put("layer", lambda n: pa.array(["1"] * n)), "another type: expected int32, found string"),
    ("retained", put("lo", lambda n: pa.array([2**62] * n, pa.timestamp("ms"))), "expected double, found timestamp[ms]"),
    ("retained", put("uniform", lambda n: pa.array([math.inf] * n)), "has a number in 'uniform' that is not finite"),
    ("retained", cell("verdict", "\x1b[2Jevil"), "in 'verdict'; expected one of"),
    ("retained", cell("verdict", None), "has a row without 'verdict'"),
    ("retained", cell("queries", "evil"), "has 'evil' in 'queries'; expected one of later, original"),
    ("retained", cell("condition", "evil"), "has 'evil' in 'condition'; expected one of study.json's conditions"),
    ("retained", cell("layer", 0), "has 0 in 'layer'; expected at least 1"),
    ("retained", cell("layer", 9), "has layer 9; the model in study.json has 1 layers"),
    ("retained", cell("p", 1.5), "has 1.5 in 'p'; expected at most 1"),
    ("prompts", respan, "has spans that do not lie one behind the other"),
    ("prompts", cell("item", "evil"), "has 'evil' in 'item'; expected one of study.json's items"),
    ("attention", shorten, "whose prompt has"),
    ("attention", put("received", lambda n: pa.array([[math.inf]] * n, pa.list_(pa.float32()))), "not finite"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "change", "why"), FAULTS, ids=[f"{one[0]}: {one[2]}"[:60] for one in FAULTS])
def test_a_table_with_something_else_is_refused_by_name(table: str, change: Change, why: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "r", layers=1, heads=2, items=3)
    file = respoiled(folder, table, change)

    def read() -> None:
        verdict_lines(folder)
        opened = StoredResults.open(folder)
        opened.prompts(["none", "mless"])
        opened.received(["none", "mless"], [1], [1, 2], "original")
        opened.mass(["none", "mless"], 1)
        read_prompts(ResultFolder(folder))

    with pytest.raises(BadFolder, match=re.escape(why)) as refused:
        read()
    assert str(refused.value).startswith(str(file))
    assert "remove it and run" in str(refused.value)


@pytest.mark.parametrize(
    ("table", "change", "why"),
    [
        ("accuracy", cell("metric", "evil@\x1b"), "expected pass@k, maj@k or diversity"),
        ("accuracy", cell("n", -3), "has -3 in 'n'; expected at least 1"),
        ("accuracy", cell("split", "evil"), "in 'split'; expected one of all, dev, test"),
        ("answers", put("text", lambda n: pa.array([b"x"] * n)), "expected string, found binary"),
        ("answers", cell("correct", None), "has a row without 'correct'"),
        ("answers", lambda table: pa.concat_tables([table, table.slice(0, 1)]), "has a row twice"),
    ],
)
def test_tables_of_answers(table: str, change: Change, why: str, tmp_path: Path) -> None:
    folder = write_answers(tmp_path / "r", items=12)
    respoiled(folder, table, change)
    with pytest.raises(BadFolder, match=re.escape(why)):
        verdict_lines(folder)


def test_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    folder = write_answers(tmp_path / "r", items=12)
    count = pq.read_metadata(folder / "answers.parquet").num_rows
    offsets = np.arange(count + 1, dtype=np.int32)
    bad = pa.StringArray.from_buffers(count, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"\xff" * count))
    respoiled(folder, "answers", put("text", lambda _: bad))
    with pytest.raises(BadFolder, match=r"answers\.parquet is damaged .*UTF8"):
        verdict_lines(folder)


@pytest.mark.parametrize("place", ["pipe", "folder", "empty", "garbage"])
def test_something_else_in_a_tables_place(place: str, tmp_path: Path) -> None:
    folder = write_answers(tmp_path / "r", items=12)
    file = folder / "answers.parquet"
    file.unlink()
    if place == "pipe":
        os.mkfifo(file)
    elif place == "folder":
        file.mkdir()
    else:
        file.write_bytes(b"" if place == "empty" else os.urandom(500))
    with pytest.raises(BadFolder, match=r"answers\.parquet (is a (pipe|folder), not a file|cannot be read)"):
        verdict_lines(folder)


def test_a_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "r", layers=1, heads=2, items=3)
    column = pa.array(np.zeros(rows := 20_000_000, np.int8))
    file = folder / "retained.parquet"
    pq.write_table(pa.table({"condition": column}), file, row_group_size=rows, max_rows_per_page=rows)
    with pytest.raises(BadFolder, match=r"values in .* bytes; expected at most 4,096 values a byte"):
        verdict_lines(folder)


def test_wider_types_and_further_columns_are_taken(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "r", layers=1, heads=2, items=3)
    told = verdict_lines(folder)

    def widen(table: pa.Table) -> pa.Table:
        fields = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in table.schema]
        return table.cast(pa.schema(fields)).append_column("later", pa.array([2**62] * len(table), pa.timestamp("ms")))

    respoiled(folder, "retained", widen)
    assert verdict_lines(folder) == told
    assert draw(FigureSpec("map", "map", (), ("none", "mless")), [folder], formats=["svg"])


def test_every_table_of_a_measurement_is_declared() -> None:
    tables = {table for name in MEASUREMENTS for table in MEASUREMENTS.get(name).tables}
    assert tables <= SHAPES.keys()


def test_a_table_that_memory_is_refused_for_is_not_called_damaged(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "r", layers=1, heads=2, items=3)
    about = ResultFolder(folder).about()
    assert about is not None
    gate = TableGate(folder / "retained.parquet", about)
    with pytest.raises(
        NoMemory, match=r"retained\.parquet cannot be read \(.*\); give this command more memory"
    ) as refused:
        gate.read(lambda: pa.allocate_buffer(1 << 60))
    assert "remove" not in str(refused.value)
