"""Units come in any order; the tables are the same."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growing_tables import behind_its_mark, forged, grow, parts_of, put_ready, write_as_format_3
from mless.errors import BadFolder
from mless.results import storing
from mless.results.folder import ResultFolder
from mless.results.schemas import lists
from mless.results.storing import Store, in_parts

UNITS = [f"none-{n:05d}" for n in range(1, 8)]
TABLES = ("big", "small")


def rows(unit: str, name: str) -> pa.Table:
    size = 4 if name == "big" else 2
    return pa.table({"layer": pa.array([1] * size, pa.int32()), "text": [f"{name} {unit} {n}" for n in range(size)]})


def tables(unit: str) -> dict[str, pa.Table]:
    return {name: rows(unit, name) for name in TABLES}


def new_store(path: Path) -> Store:
    folder = ResultFolder(path)
    folder.take_units_of({"study": "mine"})
    return Store(folder, TABLES, parts_of(UNITS, 2))


def finished(path: Path, store: Store) -> dict[str, bytes]:
    put_ready(store)
    store.finish()
    return {name: (path / f"{name}.parquet").read_bytes() for name in TABLES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "r"
    store = new_store(path)
    for unit in UNITS:
        store.add(unit, tables(unit))
    return finished(path, store)


def test_in_any_order_the_tables_are_the_same(whole: dict[str, bytes], tmp_path: Path) -> None:
    for seed in range(12):
        order, path = random.Random(seed).sample(UNITS, len(UNITS)), tmp_path / str(seed)
        store = new_store(path)
        for unit in order:
            store.add(unit, lambda unit=unit: tables(unit))
            put_ready(store, at_once=seed % 2 == 0)
        assert finished(path, store) == whole
        assert not list((path / "units").rglob("*.parquet"))


@pytest.mark.parametrize("patience", [0.0, 1000.0], ids=["as files", "in memory"])
def test_stopped_at_any_moment_it_goes_on_to_the_same_tables(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr(storing, "PATIENCE", patience)
    order = random.Random(5).sample(UNITS, len(UNITS))
    for stop in range(len(UNITS) + 1):
        path = tmp_path / str(stop)
        first = new_store(path)
        for unit in order[:stop]:
            first.add(unit, tables(unit))
            put_ready(first)
        first.close()
        second = recovered(path)
        for unit in UNITS:
            if not second.has(unit):
                second.add(unit, tables(unit))
                put_ready(second)
        assert finished(path, second) == whole


def recovered(path: Path) -> Store:
    store = new_store(path)
    assert store.recover(lambda unit, table, found: None) == []
    for unit in UNITS:
        if all((path / "units" / name / f"{unit}.parquet").exists() for name in TABLES):
            store.take_file(unit)
    return store


def test_one_table_ahead_of_the_other_is_no_matter(whole: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "r"
    store = new_store(path)
    for unit in UNITS[:4]:
        store.add(unit, tables(unit))
    put_ready(store)
    store.close()
    small = path / "units" / "small.parquet"
    small.write_bytes(small.read_bytes()[:-5])
    second = recovered(path)
    assert [second.has(unit) for unit in UNITS[:4]] == [True, True, False, False]
    for unit in UNITS[2:]:
        second.add(unit, tables(unit))
    assert finished(path, second) == whole


def test_a_damaged_part_is_said_and_set_aside_and_later_ones_wait(whole: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "r"
    store = new_store(path)
    for unit in UNITS:
        store.add(unit, tables(unit))
    put_ready(store)
    store.close()
    big = path / "units" / "big.parquet"
    content = bytearray(big.read_bytes())
    content[len(content) // 2] ^= 4
    big.write_bytes(content)
    second = new_store(path)
    (line,) = second.recover(lambda unit, table, found: None)
    assert (
        line
        == "a part of units/big.parquet is damaged, or belongs to another study; set aside as set-aside/units/big.parquet"
    )
    assert (path / "set-aside" / "units" / "big.parquet").stat().st_size > 100
    for unit in UNITS:
        second.add(unit, tables(unit))
    assert finished(path, second) == whole


def test_a_part_that_names_other_units_is_set_aside(whole: dict[str, bytes], tmp_path: Path) -> None:
    """A unit's name becomes a file's. One that the study does not have is never used."""
    path = tmp_path / "r"
    first = new_store(path)
    for unit in UNITS[:2]:
        first.add(unit, tables(unit))
    put_ready(first)
    first.close()
    big, study = path / "units" / "big.parquet", first.folder.study
    content = forged(["../../x"], rows("x", "big"), study=study, table="big")
    big.write_bytes(big.read_bytes() + behind_its_mark(content))
    second = new_store(path)
    (line,) = second.recover(lambda unit, table, found: pytest.fail(unit) if unit not in UNITS else None)
    assert line.startswith("a part of units/big.parquet is damaged, or belongs to another study; set aside as")
    assert (path / "set-aside" / "units" / "big.parquet").read_bytes() == behind_its_mark(content)
    assert not list(tmp_path.rglob("x.parquet"))
    for unit in UNITS[2:]:
        second.add(unit, tables(unit))
    assert finished(path, second) == whole


def test_a_table_of_before_stays_in_its_place_until_another_is_whole(whole: dict[str, bytes], tmp_path: Path) -> None:
    """It has no index, so it cannot go on growing."""
    path = tmp_path / "r"
    path.mkdir()
    write_as_format_3(path / "big.parquet", [rows(unit, "big") for unit in UNITS])
    content = (path / "big.parquet").read_bytes()
    store = new_store(path)
    assert store.recover(lambda unit, table, found: None) == []
    assert (path / "big.parquet").read_bytes() == content
    assert not any(store.has(unit) for unit in UNITS)
    for unit in UNITS:
        store.add(unit, tables(unit))
    assert finished(path, store) == whole


def test_a_part_with_other_rows_than_its_study_measures_is_refused(tmp_path: Path) -> None:
    from mless.results.units import Expected

    path = tmp_path / "r"
    store = new_store(path)
    for unit in UNITS:
        store.add(unit, tables(unit))
    put_ready(store)
    store.close()
    with pytest.raises(
        BadFolder,
        match=r"big\.parquet \(none-00001\) has other rows than its study measures: expected 3, by 'layer' in order",
    ):
        new_store(path).recover(lambda unit, table, found: Expected({}, {"layer": [1, 2, 3]}))


def test_a_part_that_could_not_be_handed_over_is_given_again(whole: dict[str, bytes], tmp_path: Path) -> None:
    """As where the user interrupts a run that waits for room in the queue."""
    path = tmp_path / "r"
    store = new_store(path)
    for unit in UNITS:
        store.add(unit, tables(unit))
    first = next(store.ready())
    assert next(store.ready()).part == first.part == 0
    assert finished(path, store) == whole


def test_tables_that_lack_units_get_no_place(tmp_path: Path) -> None:
    store = new_store(tmp_path / "r")
    for unit in UNITS[:2]:
        store.add(unit, tables(unit))
    put_ready(store)
    with pytest.raises(BadFolder, match=r"lacks units of its study; run the same command again"):
        store.finish()


def test_a_run_that_ended_between_its_tables_and_its_last_word_keeps_them(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "r"
    store = new_store(path)
    for unit in UNITS:
        store.add(unit, tables(unit))
    assert finished(path, store) == whole
    again = recovered(path)
    assert all(again.has(unit) for unit in UNITS)
    assert finished(path, again) == whole


def test_a_folder_in_a_growing_tables_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r" / "units" / "big.parquet").mkdir(parents=True)
    with pytest.raises(BadFolder, match=r"big\.parquet .*remove it"):
        new_store(tmp_path / "r").recover(lambda unit, table, found: None)


def test_tables_that_do_not_grow_are_files_at_once(tmp_path: Path) -> None:
    store = Store(ResultFolder(tmp_path / "r"), (), [])
    for unit in UNITS[:2]:
        store.add(unit, tables(unit))
        put_ready(store)
    there = sorted(path.relative_to(tmp_path / "r" / "units").as_posix() for path in tmp_path.rglob("*.parquet"))
    assert there == [f"{name}/{unit}.parquet" for name, unit in itertools.product(TABLES, UNITS[:2])]


@given(st.lists(st.integers(1, 6000), max_size=60))
@settings(max_examples=60)
def test_parts_hold_every_unit_once_in_order_and_are_small(lengths: list[int]) -> None:
    units = [(f"u{n}", length) for n, length in enumerate(lengths)]
    parts = in_parts(units)
    assert [unit for part in parts for unit in part] == [name for name, _ in units]
    by_name = dict(units)
    for part in parts:
        assert 1 <= len(part) <= 8
        assert len(part) == 1 or sum(by_name[unit] for unit in part) <= 4096


# ---- reading -------------------------------------------------------------------------------------------------------------


def layered(unit: str) -> pa.Table:
    layers = pa.array([layer for layer in range(1, 5) for _ in range(3)], pa.int32())
    numbers = np.random.default_rng(ord(unit)).random((12, 70_000), dtype=np.float32)
    return pa.table({"unit": [unit] * 12, "layer": layers, "numbers": lists(numbers, pa.float32())})


def test_one_unit_and_one_layer_are_read_without_the_rest(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "r")
    folder.write_manifest({})
    units = {unit: layered(unit) for unit in "abcde"}
    grow(folder, "own", units)
    folder.write_manifest(folder.manifest() or {})
    table = ResultFolder(folder.path).grown("own", list(units))
    for unit, expected in units.items():
        assert table.unit(unit) == expected
        assert folder.read_part("own", unit, list(units)) == expected
    pieces = list(table.pieces(["unit", "layer"], layer=3, units={"a", "e"}))
    assert [piece.units for piece in pieces] == [["a", "b"], ["e"]]
    assert [sorted(set(piece.table["layer"].to_pylist())) for piece in pieces] == [[3, 4], [1, 2, 3, 4]]
    seen: list[tuple[str, int]] = []
    table.each(["layer"], lambda piece: seen.extend((unit, len(rows)) for unit, rows in piece.apart()))
    assert {unit: sum(n for name, n in seen if name == unit) for unit in units} == dict.fromkeys(units, 12)


def test_a_table_with_other_units_than_its_study_has_is_refused(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "r")
    folder.write_manifest({})
    grow(folder, "own", {unit: layered(unit) for unit in "ab"})
    folder.write_manifest(folder.manifest() or {})
    with pytest.raises(BadFolder, match=r"own\.parquet holds 2 units that are not the 3 of its study"):
        folder.grown("own", ["a", "b", "c"])
    content = bytearray((folder.path / "own.parquet").read_bytes())
    content[-40] ^= 1
    (folder.path / "own.parquet").write_bytes(content)
    with pytest.raises(BadFolder, match=r"own\.parquet is damaged.*checksum is not the one in study\.json"):
        ResultFolder(folder.path).grown("own", ["a", "b"])


def test_a_page_that_was_changed_is_found_when_it_is_read(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "r")
    folder.write_manifest({})
    grow(folder, "own", {unit: layered(unit) for unit in "ab"})
    folder.write_manifest(folder.manifest() or {})
    content = bytearray((folder.path / "own.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (folder.path / "own.parquet").write_bytes(content)
    with pytest.raises(BadFolder, match=r"own\.parquet cannot be read"):
        ResultFolder(folder.path).read_part("own", "a", ["a", "b"])


def test_a_table_of_before_has_one_unit_in_each_row_group(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "r")
    folder.path.mkdir()
    units = {unit: layered(unit) for unit in "abc"}
    write_as_format_3(folder.path / "own.parquet", list(units.values()))
    (folder.path / "study.json").write_text('{"format": 2}')
    for unit, expected in units.items():
        assert folder.read_part("own", unit, list(units)) == expected
    with pytest.raises(BadFolder, match=r"own\.parquet has 3 parts where its study has 2 units"):
        ResultFolder(folder.path).read_part("own", "a", ["a", "b"])
