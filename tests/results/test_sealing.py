"""A unit is refused when any bit of it is changed, and when it is another one than it should be."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mless.results.sealing import Damaged, check, decode, digest_of, encode, key_in

KEY = {"study": "0123456789abcdef", "table": "t", "unit": "none-00001"}
TABLE = pa.table(
    {
        "n": pa.array(range(40), pa.int32()),
        "name": ["a", "b"] * 20,
        "received": [[0.5, None, 1.0]] * 40,
        "m": [None] * 40,
    }
)


def test_a_sealed_table_is_plain_parquet() -> None:
    content = encode(TABLE, KEY)
    assert pq.read_table(pa.BufferReader(content)).equals(TABLE)
    found = decode(content, KEY)
    assert found.equals(TABLE)
    assert found.schema.metadata is None
    assert key_in(content) == KEY
    assert encode(TABLE, KEY) == content


def test_no_bit_can_be_changed() -> None:
    """All of them: data, dictionaries, statistics, the footer, the digest itself."""
    content = encode(TABLE.slice(0, 2), KEY)
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            check(bytes(changed))


def test_a_file_without_a_seal_or_cut_short() -> None:
    rng = random.Random(0)
    content = encode(TABLE, KEY)
    for part in (
        b"",
        b"PAR1",
        encode(TABLE),
        content[:-1],
        *(content[: rng.randrange(len(content))] for _ in range(20)),
    ):
        with pytest.raises(Damaged, match="checksum"):
            decode(part, KEY)


@pytest.mark.parametrize("name", list(KEY))
def test_another_unit_in_its_place(name: str) -> None:
    with pytest.raises(Damaged, match=rf"it holds another unit: {name} '{KEY[name]}' instead of 'other'"):
        decode(encode(TABLE, KEY), KEY | {name: "other"})


def test_the_digest_of_json_does_not_depend_on_its_spacing_or_order() -> None:
    assert digest_of({"a": [1, 2.5], "b": {"c": "ü"}}) == digest_of({"b": {"c": "ü"}, "a": [1, 2.5]})
    assert digest_of({"a": 1}) != digest_of({"a": 1.0})
