"""Units with checksums that fit, and with columns or rows that their study does not store."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest

from mless.errors import BadFolder
from mless.results.folder import ResultFolder
from mless.results.schemas import CANDIDATES, REPLIES, SCORES, SOLUTION_TOKENS
from mless.results.units import Expected, in_order

_ROW = {"model": "m", "task": "t", "condition": "none", "item": "a", "seed": 1, "text": "so", "n_tokens": 2}
_GOOD = pa.Table.from_pylist([_ROW | {"sample": n, "finish": "stop"} for n in range(3)], schema=REPLIES)
_EXPECTED = Expected({"condition": "none", "item": "a"}, in_order(("sample",), range(3)))


def _with(name: str, values: pa.Array) -> pa.Table:
    return _GOOD.set_column(_GOOD.column_names.index(name), name, values)


_NOT_TEXT = pa.StringArray.from_buffers(3, pa.py_buffer(bytes(8) + b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
ODD: dict[str, tuple[pa.Table, str]] = {
    "no rows": (_GOOD.slice(0, 0), "has other rows than its study measures: expected 3, by 'sample'"),
    "fewer rows": (_GOOD.slice(0, 2), "has other rows"),
    "a row twice": (pa.concat_tables([_GOOD, _GOOD.slice(0, 1)]), "has a row twice"),
    "another order": (_GOOD.take(pa.array([1, 0, 2])), "has other rows"),
    "a column less": (_GOOD.drop_columns(["text"]), "has no column 'text'"),
    "a column more": (
        _GOOD.append_column("x", pa.array([1, 2, 3])),
        r"has the columns .*, x \(int64\); expected model",
    ),
    "a column twice": (_GOOD.append_column("text", _GOOD["text"]), "has the column 'text' twice"),
    "another type": (_with("sample", pa.array(["0", "1", "2"])), "has a column 'sample' of another type"),
    "another width": (_with("sample", pa.array([0, 1, 2], pa.int64())), "has the columns"),
    "a text missing": (_with("text", pa.array(["x", None, "y"])), "has a row without 'text'"),
    "another condition": (_with("condition", pa.array(["none", "mless", "none"])), "has 'mless' in 'condition'"),
    "broken text": (_with("text", _NOT_TEXT), "is damaged"),
}


def _stored(tmp_path: Path, table: pa.Table, name: str = "replies") -> ResultFolder:
    folder = ResultFolder(tmp_path / "r")
    folder.write_manifest({})
    folder.write_unit({name: table}, "none-1")
    return folder


@pytest.mark.parametrize("odd", ODD)
def test_a_unit_that_no_study_stores_is_refused_by_name_and_stays(odd: str, tmp_path: Path) -> None:
    table, says = ODD[odd]
    folder = _stored(tmp_path, table)
    with pytest.raises(BadFolder, match=rf"unit .*none-1\.parquet {says}.*; remove that file and run the same command"):
        folder.refuse_damaged(["replies"], "none-1", lambda name, found: _EXPECTED)
    assert folder.has_unit(["replies"], "none-1"), "it is not measured anew without a word"


def test_what_may_be_missing_may_be_missing(tmp_path: Path) -> None:
    nothing = _with("n_tokens", pa.nulls(3, pa.int32()))
    assert _stored(tmp_path, nothing).refuse_damaged(["replies"], "none-1", lambda name, found: _EXPECTED) == []


def test_lists_are_as_long_as_expected(tmp_path: Path) -> None:
    folder = _stored(tmp_path, pa.table({"own": [[1], [1, 2]]}), "own")
    expected = Expected({}, {}, {"own": 1})
    with pytest.raises(BadFolder, match="has 2 values in 'own'; expected 1"):
        folder.refuse_damaged(["own"], "none-1", lambda name, found: expected)


def test_a_table_from_outside_may_hold_anything(tmp_path: Path) -> None:
    folder = _stored(tmp_path, pa.table({"layer": [1, 1], "sample": [None, 3]}), "own")
    assert folder.refuse_damaged(["own"], "none-1") == []


_SCORED = {
    "scores": pa.Table.from_pylist([_ROW | {"metric": one, "value": -1.0} for one in ("solution", "answer")], schema=SCORES),
    "tokens": pa.Table.from_pylist([_ROW | {"position": n, "token": 7, "logp": -1.0} for n in range(3)], schema=SOLUTION_TOKENS),
    "candidates": pa.Table.from_pylist([_ROW | {"number": n, "role": "other", "logp": -math.inf} for n in range(2)], schema=CANDIDATES),
}  # fmt: skip
_PLACES = {
    "scores": {"metric": ["solution", "answer"]},
    "tokens": {"position": range(3), "token": [7, 7, 7]},
    "candidates": {"number": range(2), "role": ["other", "other"], "text": ["so", "so"]},
}
ODD_SCORES: list[tuple[str, str, object, str]] = [
    ("scores", "metric", "evil", "has 'evil' in 'metric'; expected one of solution"),
    ("scores", "value", None, "has a row without 'value'"),
    ("scores", "item", "b", "has 'b' in 'item'; expected 'a'"),
    ("tokens", "token", 8, "has other rows than its study measures: expected 3, by 'token' in order"),
    ("tokens", "logp", 0.1, "has 0.1 in 'logp'; expected at most 0"),
    ("candidates", "role", "evil", "has 'evil' in 'role'; expected one of answer, other, option"),
    ("candidates", "role", "answer", "by 'role' in order"),
    ("candidates", "text", "no", "by 'text' in order"),
]


@pytest.mark.parametrize(
    ("name", "column", "value", "why"), ODD_SCORES, ids=[f"{one[0]} {one[1]}" for one in ODD_SCORES]
)
def test_units_of_log_probabilities(name: str, column: str, value: object, why: str, tmp_path: Path) -> None:
    def expecting(table: str, found: pa.Table) -> Expected:
        return Expected({"condition": "none", "item": "a"}, _PLACES[table])

    good = _SCORED[name]
    assert _stored(tmp_path / "good", good, name).refuse_damaged([name], "none-1", expecting) == []
    values = [value, *good.column(column).to_pylist()[1:]]
    odd = good.set_column(good.column_names.index(column), column, pa.array(values, good.schema.field(column).type))
    with pytest.raises(BadFolder, match=why):
        _stored(tmp_path / "odd", odd, name).refuse_damaged([name], "none-1", expecting)
