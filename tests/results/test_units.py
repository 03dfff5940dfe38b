"""Units with checksums that fit, and with columns or rows that the others do not have."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from mless.results.folder import ResultFolder
from mless.results.units import odd_ones, shape_of

_GOOD = pa.table({"condition": ["none"] * 4, "layer": [1, 1, 2, 2], "head": [1, 2, 1, 2], "x": [0.1, None, 0.3, 0.4]})
ODD = {
    "no rows": _GOOD.slice(0, 0),
    "fewer rows": _GOOD.slice(0, 2),
    "a row twice": pa.concat_tables([_GOOD, _GOOD.slice(0, 1)]),
    "another order": _GOOD.take(pa.array([1, 0, 2, 3])),
    "a column less": _GOOD.drop_columns(["x"]),
    "a column twice": _GOOD.append_column("x", _GOOD["x"]),
    "another type": _GOOD.set_column(1, "layer", pa.array(["1", "1", "2", "2"])),
    "a condition of lists": _GOOD.set_column(0, "condition", pa.array([[1]] * 4)),
    "a condition missing": _GOOD.set_column(0, "condition", pa.array(["none", None, "none", "none"])),
    "two conditions": _GOOD.set_column(0, "condition", pa.array(["none", "mless", "none", "none"])),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_unit_is_set_aside(odd: str, tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "r")
    folder.write_manifest({})
    for number in (1, 2, 3):
        folder.write_unit({"own": ODD[odd] if number == 1 else _GOOD}, f"none-{number}")
    keys = ["none-1", "none-2", "none-3"]
    said = folder.refuse_odd(["own"], keys)
    assert list(said) == ["none-1"], "the first one is no measure for the others"
    assert (
        "its columns or rows are not those of the other units; set aside as set-aside/units/own/none-1"
        in said["none-1"]
    )
    assert not folder.has_unit(["own"], "none-1")
    assert folder.refuse_odd(["own"], keys[1:]) == {}


def test_values_that_are_broken_have_no_shape() -> None:
    not_text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    assert shape_of(pa.table({"text": not_text})) is None
    assert odd_ones({"none-1": None}) == ["none-1"]


def test_a_condition_without_rows_and_prompts_of_several_lengths_are_like_the_others() -> None:
    filled = {f"mless-{n}": shape_of(pa.table({"layer": [1], "received": [[0.5] * n]})) for n in (1, 2, 3)}
    empty = shape_of(pa.table({"layer": [1], "received": [[0.5]]}).slice(0, 0))
    assert odd_ones(filled | {"none-1": empty, "none-2": empty}) == []
    assert odd_ones(filled | {"mless-4": empty}) == ["mless-4"]
    chosen = {f"mless-{n}": shape_of(pa.table({"layer": [1], "token": [n]})) for n in (1, 2, 3)}
    assert odd_ones(chosen) == []
