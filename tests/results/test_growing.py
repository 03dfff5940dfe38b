"""A growing table is whole up to its last whole part, whatever ended the run that wrote it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from growing_tables import behind_its_mark, forged, sealed_again, with_a_map, write_as_format_3
from mless.errors import BadFolder
from mless.results.growing import GrowingTable, OtherColumns, Sealed, encode_part, part_key

PARTS = [["a", "b"], ["c", "d"], ["e"]]


def rows(unit: str) -> pa.Table:
    layers = [1, 1, 2, 2, 3, 3]
    texts = [f"{unit} {n}" for n in range(6)]
    numbers = [[0.5 * ord(unit), float(n)] for n in range(6)]
    return pa.table(
        {"layer": pa.array(layers, pa.int32()), "text": texts, "numbers": pa.array(numbers, pa.list_(pa.float32()))}
    )


def sealed(part: list[str], study: str = "s") -> Sealed:
    return encode_part({unit: rows(unit) for unit in part}, 2, part_key(study, "t", part))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.parquet"


def grown(path: Path, parts: list[list[str]], study: str = "s") -> GrowingTable:
    table = GrowingTable(path, "t", lambda: study)
    for part in parts:
        table.append(sealed(part))
    table.sync()
    table.close()
    return table


def again(path: Path, study: str = "s") -> tuple[GrowingTable, list[bytes], list[bytes]]:
    table = GrowingTable(path, "t", lambda: study)
    found = table.look(PARTS)
    loose, damaged = ([table.bytes_of(place) for place in places] for places in (found.loose, found.damaged))
    table.cut()
    return table, loose, damaged


def test_a_finished_table_holds_every_part_in_row_groups_of_some_layers(path: Path) -> None:
    grown(path, PARTS).finish()
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        layers = [file.read_row_group(n)["layer"].unique().to_pylist() for n in range(file.num_row_groups)]
        assert layers == [[1, 2], [3]] * 3
        assert sorted(file.read()["text"].to_pylist()) == sorted(f"{u} {n}" for u in "abcde" for n in range(6))


def test_units_are_read_from_it_while_it_grows(path: Path) -> None:
    table = grown(path, PARTS)
    assert table.units == ["a", "b", "c", "d", "e"]
    assert table.read_units(1) == {"c": rows("c"), "d": rows("d")}


def test_a_run_that_goes_on_writes_the_same_bytes(path: Path, tmp_path: Path) -> None:
    whole = grown(tmp_path / "whole.parquet", PARTS).finish()
    grown(path, PARTS[:1])
    table, loose, damaged = again(path)
    assert (table.units, loose, damaged) == (["a", "b"], [], [])
    for part in PARTS[1:]:
        table.append(sealed(part))
    table.close()
    assert table.finish() == whole
    assert path.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_cut_anywhere_the_whole_parts_before_it_are_kept(path: Path) -> None:
    content = (grown(path, PARTS), path.read_bytes())[1]
    ends = [part.start + part.length for part in grown(path, PARTS).parts]
    rng = random.Random(0)
    for cut in [0, 1, 3, 4, 5, *(rng.randrange(len(content)) for _ in range(40)), *ends]:
        path.write_bytes(content[:cut])
        table, loose, damaged = again(path)
        assert len(table.parts) == sum(end <= cut for end in ends)
        assert (loose, damaged) == ([], []), "what a killed run was writing is nothing to speak of"
        for part in PARTS[len(table.parts) :]:
            table.append(sealed(part))
        table.close()
        assert path.read_bytes() == content


def test_a_flipped_bit_costs_its_own_part_only(path: Path) -> None:
    table = grown(path, PARTS)
    content, starts = path.read_bytes(), [part.start for part in table.parts]
    rng = random.Random(1)
    for _ in range(60):
        at = rng.randrange(4, len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        found, loose, damaged = again(path)
        hit = max((n for n, start in enumerate(starts) if start - 16 <= at), default=0)
        assert found.units == [unit for part in PARTS[:hit] for unit in part]
        kept = [list(found.units_in(one)) for one in loose]
        assert kept == PARTS[hit + 1 :]
        # The last part may look like one that was being written; nothing is set aside then.
        assert len(damaged) == 1 or hit == 2


def test_parts_of_another_study_are_not_taken(path: Path) -> None:
    grown(path, PARTS)
    table, loose, damaged = again(path, study="another")
    assert (table.units, loose) == ([], [])
    assert len(damaged) == 3


def test_parts_in_another_order_wait(path: Path) -> None:
    grown(path, [PARTS[1], PARTS[0]])
    table, loose, damaged = again(path)
    assert (table.units, damaged) == ([], [])
    assert [list(table.units_in(one)) for one in loose] == [PARTS[1], PARTS[0]]


def test_a_finished_table_goes_on_growing(path: Path) -> None:
    """A run may end after its tables have their footers and before its study is complete."""
    content = (grown(path, PARTS), path.read_bytes())[1]
    grown(path, PARTS).finish()
    table, loose, damaged = again(path)
    assert (table.units, loose, damaged) == (["a", "b", "c", "d", "e"], [], [])
    assert path.read_bytes() == content


@pytest.mark.parametrize("ends", ["behind the file", "at its end"])
def test_after_many_marks_without_parts_the_rest_is_damaged(path: Path, ends: str) -> None:
    """Each mark may ask for the rest of the file to be read, so they are counted. What is not looked at is kept all the same."""
    marks = 2_000
    lengths = [1 << 62 if ends == "behind the file" else 16 * left for left in reversed(range(marks))]
    content = b"".join(b"mless.pt" + length.to_bytes(8, "little") for length in lengths)
    path.write_bytes(b"PAR1" + content + behind_its_mark(sealed(PARTS[0]).content))
    table, loose, damaged = again(path)
    assert (table.units, loose) == ([], [])
    assert len(damaged) == 65
    assert b"PAR1" + b"".join(damaged) == b"PAR1" + content + behind_its_mark(sealed(PARTS[0]).content)


@pytest.mark.parametrize(
    "said",
    [
        {"units": "3"},
        {"units": '["a", "a"]'},
        {"units": '["a", "../../x"]'},
        {"rows": "[[7, -1]]"},
        {"rows": "[[1]]"},
        {"rows": "{"},
        {"rows": "[]"},
        {"rows": "[[6, 5]]"},
        {"rows": "[[6, 7]]"},
        {"rows": "[[3, 3], [3, 3]]"},
    ],
    ids=str,
)
def test_a_part_that_says_something_else_of_itself_is_damaged(path: Path, said: dict[str, str]) -> None:
    content = forged(["a", "b"], pa.concat_tables([rows("a"), rows("b")]), **said)
    path.write_bytes(b"PAR1" + behind_its_mark(content))
    table, loose, damaged = again(path)
    assert (table.units, loose, len(damaged)) == ([], [], 1)


def test_a_part_without_row_groups_is_damaged(path: Path) -> None:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows("a").schema) as writer:
        key = {**part_key("s", "t", ["a", "b"]), "rows": "[]"}
        writer.add_key_value_metadata({"mless.unit": json.dumps(key), "mless.sha256": "0" * 64})
    path.write_bytes(b"PAR1" + behind_its_mark(sealed_again(sink.getvalue().to_pybytes())))
    table, loose, damaged = again(path)
    assert (table.units, loose, len(damaged)) == ([], [], 1)


def test_a_part_with_other_columns_is_damaged(path: Path) -> None:
    grown(path, PARTS[:1])
    other = pa.concat_tables([rows("c"), rows("d")]).append_column("more", pa.array([1] * 12))
    path.write_bytes(path.read_bytes() + behind_its_mark(forged(PARTS[1], other)))
    table, loose, damaged = again(path)
    assert (table.units, loose, len(damaged)) == (PARTS[0], [], 1)


@pytest.mark.parametrize("first", [True, False], ids=["before the columns", "behind them"])
def test_a_part_whose_footer_pyarrow_never_writes_is_damaged(path: Path, first: bool) -> None:
    """pyarrow reads it. Found only when the table is finished, it would end the run after everything was measured."""
    content = with_a_map(sealed(PARTS[0]).content, first=first)
    assert len(pq.read_table(pa.BufferReader(content))) == 12
    path.write_bytes(b"PAR1" + behind_its_mark(content))
    table, loose, damaged = again(path)
    assert (table.units, loose, damaged) == ([], [], [behind_its_mark(content)])


def test_a_part_whose_pages_cannot_be_read_is_named(path: Path) -> None:
    """Its seal is good, so it was not damaged but written by something else."""
    content = bytearray(sealed(PARTS[0]).content)
    content[60] ^= 1
    path.write_bytes(b"PAR1" + behind_its_mark(sealed_again(bytes(content))))
    table, _, _ = again(path)
    with pytest.raises(
        BadFolder, match=r"a part of .*t\.parquet is refused: it cannot be read: .*; remove that file and"
    ):
        table.read_units(0)


def test_a_whole_table_of_before_is_no_unfinished_part(path: Path) -> None:
    """Its first bytes are not those of a part: it is kept as it is, and not cut off as what a killed run was writing."""
    write_as_format_3(path, [rows(unit) for unit in "abcde"])
    content = path.read_bytes()
    table, loose, damaged = again(path)
    assert (table.units, loose, b"".join(damaged)) == ([], [], content[4:])


def test_units_with_other_columns_are_refused(path: Path) -> None:
    table = grown(path, PARTS[:1])
    other = {
        "c": rows("c").append_column("more", pa.array([1] * 6)),
        "d": rows("d").append_column("more", pa.array([1] * 6)),
    }
    with pytest.raises(OtherColumns, match=r"^c$"):
        table.append(encode_part(other, 2, part_key("s", "t", ["c", "d"])))
    table.append(sealed(PARTS[1]))
    table.close()
    assert again(path)[0].units == ["a", "b", "c", "d"]


def test_a_write_that_fails_leaves_the_parts_before_it(path: Path) -> None:
    import resource

    grown(path, PARTS[:1])
    size = path.stat().st_size
    table, _, _ = again(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            table.append(sealed(PARTS[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    table.append(sealed(PARTS[1]))
    table.close()
    assert again(path)[0].units == ["a", "b", "c", "d"]
