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
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from interrupted import table_replaced
from mless.errors import BadFolder, NoMemory
from mless.figures import draw
from mless.results.folder import ResultFolder
from mless.results.reading import StoredLikelihood, StoredResults, read_prompts
from mless.results.shapes import SHAPES
from mless.results.tables import TableGate
from mless.study import verdict_lines
from mless.study.kinds import MEASUREMENTS
from mless.values import FigureSpec
from synthetic import write_answers, write_folder, write_likelihood

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


def without_last(**wanted: str) -> Change:
    """The last of the rows with these values left out."""

    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        at = max(n for n, row in enumerate(rows) if all(row[name] == value for name, value in wanted.items()))
        return table.take([n for n in range(len(table)) if n != at])

    return change


LIKELIHOOD_FAULTS: list[tuple[str, Change, str]] = [
    ("scores", cell("metric", "evil"), "has 'evil' in 'metric'; expected one of solution, contrast, answer"),
    ("scores", cell("value", None), "has a row without 'value'"),
    ("scores", cell("value", math.inf), "has a number in 'value' that is not finite"),
    ("scores", lambda table: table.slice(0, 0), "has no rows; expected at least one"),
    ("scores", lambda table: pa.concat_tables([table, table.slice(0, 1)]), "has a row twice (condition 'none', item 'sum-001'"),
    ("scores", without_last(condition="mless"), "under 4 of 5 conditions; expected the same under all"),
    ("scores", cell("n_tokens", 9999), "n_tokens 9999 under 1 of 5 conditions"),
    ("likelihood", cell("delta", None), "has a row without 'delta'"),
    ("likelihood", without_last(condition="none"), "under 4 of 5 conditions"),
    ("tokens", cell("logp", 0.5), "has 0.5 in 'logp'; expected at most 0"),
    ("tokens", cell("logp", None), "has a row without 'logp'"),
    ("tokens", cell("position", -1), "has -1 in 'position'; expected at least 0"),
    ("tokens", cell("agree", 2.0), "has 2.0 in 'agree'; expected at most 1"),
    ("tokens", cell("token", 12345), "token 12345, text ' ' under 1 of 5 conditions"),
    ("tokens", lambda table: table.filter(pc.field("position") != 1), "the last at position 61; expected 0, 1, 2 …"),
    ("tokens", lambda table: table.filter(pc.field("condition") != "mful"), "has no row of condition 'mful'"),
    ("tokens", lambda table: table.drop_columns(["logp"]), "has no column 'logp'"),
    ("candidates", cell("role", "evil"), "has 'evil' in 'role'; expected one of answer, other, option"),
    ("candidates", cell("text", "another answer"), "text 'another answer'"),
    ("candidates", cell("item", "evil"), "has 'evil' in 'item'; expected one of study.json's items"),
    ("effects", cell("verdict", "evil"), "has 'evil' in 'verdict'; expected one of"),
    ("effects", cell("delta", None), "has a row without 'delta'"),
    ("effects", cell("n", 0), "has 0 in 'n'; expected at least 1"),
    ("effects", cell("equivalent_p", 1.5), "has 1.5 in 'equivalent_p'; expected at most 1"),
    ("effects", cell("margin", -0.1), "has -0.1 in 'margin'; expected at least 0"),
    ("effects", cell("skewed", None), "has a row without 'skewed'"),
    ("effects", without_last(condition="mless"), "rows; expected 4 condition × 6 metric = 24"),
    ("effects", lambda table: table.filter(pc.field("condition") != "mful"), "has no row of condition 'mful'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "change", "why"), LIKELIHOOD_FAULTS, ids=[f"{one[0]}: {one[2]}"[:60] for one in LIKELIHOOD_FAULTS]
)
def test_tables_of_log_probabilities(table: str, change: Change, why: str, tmp_path: Path) -> None:
    folder = write_likelihood(tmp_path / "r", items=4)
    file = folder / f"{table}.parquet"
    # Its checksum fits: whoever forges a table can write that too.
    table_replaced(folder, table, change(pq.read_table(file)))

    def read() -> None:
        opened = StoredLikelihood.open(folder)
        opened.effects()
        opened.deltas("mless", "solution")
        opened.solutions(["none", "mless"])
        opened.candidates("none", "sum-001")
        ResultFolder(folder).read_table("scores")

    with pytest.raises(BadFolder, match=re.escape(why)) as refused:
        read()
    assert str(refused.value).startswith(str(file))


def test_items_without_solutions_or_without_answers_leave_a_table_empty(tmp_path: Path) -> None:
    plain = StoredLikelihood.open(write_likelihood(tmp_path / "a", items=4, solutions=False))
    assert plain.solutions(["none", "mless"]) == {"none": {}, "mless": {}}
    assert plain.solution_length() is None
    told = StoredLikelihood.open(write_likelihood(tmp_path / "b", items=4, answers=False))
    assert told.candidates("none", "sum-001") == []
    assert {row.metric for row in told.effects()} == {"solution", "kl", "entropy", "top-1 agreement"}


def test_a_folder_whose_tokens_have_no_texts_is_read(tmp_path: Path) -> None:
    folder = write_likelihood(tmp_path / "r", items=4)
    table_replaced(folder, "tokens", pq.read_table(folder / "tokens.parquet").drop_columns(["text"]))
    opened = StoredLikelihood.open(folder)
    assert list(opened.solutions(["mless"])["mless"]) == ["sum-001", "sum-002", "sum-003"]
    with pytest.raises(BadFolder, match="has no column 'text'"):
        opened.solution_tokens("sum-001")


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
