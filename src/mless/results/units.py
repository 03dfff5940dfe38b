"""The gate for what units hold. A checksum shows that a unit is as it was written, not that mless wrote it.

Only what is known before a unit is measured is asked, and never what other units hold: a unit that this study stored always passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pyarrow as pa

from mless.errors import BadFolder
from mless.results import schemas
from mless.results.shapes import SHAPES, Shape
from mless.results.tables import TableGate, pc

#: Tables of units by name. One that a measurement from outside mless stores is only checked to be sound Parquet.
_SHAPES: dict[str, Shape] = {
    **{
        name: replace(SHAPES[name], by_token=(), of_study=False)
        for name in ("attention", "dilution", "activation_items", "activation_histograms")
    },
    "affine_items": Shape(schemas.AFFINE_SUMS, ("layer", "head"), of_study=False, finite=False),
    "affine_points": Shape(schemas.AFFINE_VECTORS, ("layer", "head", "token"), of_study=False, finite=False),
    # A log of 0 is infinite, and a unit that was stored always passes.
    **{name: replace(SHAPES[name], of_study=False, finite=False) for name in ("scores", "tokens", "candidates")},
    "replies": Shape(schemas.REPLIES, ("sample",), empty=SHAPES["answers"].empty, of_study=False),
}


@dataclass(frozen=True)
class Expected:
    """What is known of a unit's table: texts that all rows have, the columns that tell the rows apart with their values, and how long lists are."""

    texts: Mapping[str, str]
    places: Mapping[str, Sequence[object]]
    lengths: Mapping[str, int] = field(default_factory=dict[str, int])


#: What is known of a table, by its name and its rows, whose columns are known to be right; None where nothing is.
Expecting = Callable[[str, pa.Table], Expected | None]


def in_order(names: Sequence[str], *values: Iterable[object]) -> dict[str, list[object]]:
    """Columns that hold every combination, the last one fastest."""
    rows = list(product(*values))
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


class UnitGate(TableGate):
    """One unit's table, which was read already."""

    def __init__(self, file: Path, table: str) -> None:
        self._file, self.about, self._shape = file, {}, _SHAPES.get(table)

    def refuse(self, why: str) -> BadFolder:
        return BadFolder(f"unit {self._file} {why}; remove that file and run the same command again")

    def check(self, table: pa.Table, expecting: Callable[[pa.Table], Expected | None]) -> None:
        """Refuse a table that would break what is made of it."""
        if self._shape is not None and not table.schema.equals(self._shape.columns):
            self._check_types(table.schema)
            raise self.refuse(f"has the columns {_listed(table.schema)}; expected {_listed(self._shape.columns)}")
        self.check_rows(table)
        expected = expecting(table)
        if expected is None:
            return
        for name, text in expected.texts.items():
            self._check_texts(name, table.column(name), text.__eq__, repr(text))
        for name, values in expected.places.items():
            if table.column(name).to_pylist() != list(values):
                raise self.refuse(
                    f"has other rows than its study measures: expected {len(values)}, by {name!r} in order"
                )
        for name, length in expected.lengths.items():
            if found := set(pc.unique(pc.list_value_length(table.column(name))).to_pylist()) - {length}:
                raise self.refuse(f"has {found.pop()} values in {name!r}; expected {length}")


def _listed(columns: pa.Schema) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in columns)
