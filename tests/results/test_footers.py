"""Several Parquet files written one after the other become one."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mless.results.footers import NoFooter, footer_bytes, joined


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def one_after_the_other(files: list[bytes], between: bytes = b"") -> bytes:
    content, footers = bytearray(b"PAR1"), list[tuple[int, bytes]]()
    for file in files:
        content += between
        footers.append((len(content), footer_bytes(file)))
        content += file
    return bytes(content) + joined(footers, {"mless.units": "an index"})


ROWS = st.lists(
    st.tuples(st.integers(-(2**31), 2**31 - 1), st.text(max_size=5), st.lists(st.floats(width=32, allow_nan=False), max_size=4)),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(st.lists(ROWS, min_size=1, max_size=20), st.sampled_from([1, 2, 100]), st.sampled_from([True, False]))
@settings(max_examples=40)
def test_any_tables_are_one(parts: list[Any], in_group: int, dictionary: bool) -> None:
    kinds = pa.schema([("n", pa.int32()), ("text", pa.string()), ("numbers", pa.list_(pa.float32()))])
    tables = [pa.table([list(column) for column in zip(*rows, strict=True)], schema=kinds) for rows in parts]
    options: dict[str, Any] = {"row_group_size": in_group, "use_dictionary": dictionary, "compression": "zstd"}
    content = one_after_the_other(
        [written(table, write_page_checksum=True, **options) for table in tables], b"12345678"
    )
    with pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True) as whole:
        assert whole.read() == pa.concat_tables(tables)
        assert whole.metadata.num_rows == sum(map(len, tables))
        assert (whole.metadata.metadata or {})[b"mless.units"] == b"an index"
        at = 0
        for table in tables:  # row groups can be read one by one
            for first in range(0, len(table), in_group):
                assert whole.read_row_group(at) == table.slice(first, in_group)
                at += 1


def test_every_kind_of_column_and_index_is_moved() -> None:
    table = pa.table(
        {
            "flag": [True, False, None],
            "long": pa.array([2**62, -1, None], pa.int64()),
            "number": pa.array([1.5, float("nan"), None]),
            "inside": pa.array([{"a": 1.0, "b": [1, 2]}, None, {"a": None, "b": []}]),
            "bytes": pa.array([b"x", b"", None], pa.binary()),
        }
    )
    files = [written(table, write_page_index=True, bloom_filter_options=None) for _ in range(20)]
    with pq.ParquetFile(io.BytesIO(one_after_the_other(files))) as whole:
        assert whole.metadata.num_row_groups == 20
        for number in (0, 7, 19):
            found = whole.read_row_group(number)
            assert found.drop_columns("number") == table.drop_columns("number")
            np.testing.assert_array_equal(found["number"].to_numpy(), table["number"].to_numpy())


@pytest.mark.slow
def test_more_row_groups_than_sixteen_bits_number() -> None:
    file = written(pa.table({"n": [1]}))
    content = one_after_the_other([file] * 32_800)
    assert pq.read_metadata(io.BytesIO(content)).num_row_groups == 32_800


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1", b"something else entirely"])
def test_what_is_no_parquet_has_no_footer(content: bytes) -> None:
    with pytest.raises(NoFooter, match="does not end as a Parquet file does"):
        footer_bytes(content)


def test_a_footer_that_is_cut_short_is_refused() -> None:
    footer = footer_bytes(written(pa.table({"n": [1, 2, 3]})))
    with pytest.raises(NoFooter, match="is cut short, or lacks"):
        joined([(0, footer[: len(footer) // 2])], {})
