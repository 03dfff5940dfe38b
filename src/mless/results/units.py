"""The gate for what units hold: each has the columns and rows that the others have.

A checksum shows that a unit is as it was written. Whether it can be one of this study's is asked here: another program may have written it,
and what reads units relies on their shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

#: Columns that tell a unit's rows from each other, and are the same in every unit.
_PLACES = ("layer", "head", "queries", "tokens", "sample")
#: A table with this column holds chosen tokens, so each unit has rows of its own.
_CHOSEN = "token"


def shape_of(table: pa.Table) -> tuple[object, ...] | None:
    """What is alike in all units of a table; None where its values are broken."""
    try:
        table.validate(full=True)
    except pa.ArrowException:
        return None
    parts: list[object] = [len(table) > 0, str(table.schema)]
    for at, name in enumerate(table.column_names if len(table) else ()):
        column = table.column(at)  # a name may stand twice
        if not pa.types.is_floating(column.type):
            parts.append((name, column.null_count > 0))
        if pa.types.is_list(column.type):
            parts.append((name, len(pc.unique(pc.list_value_length(column))) > 1))
        if name in ("condition", "item") and pa.types.is_string(column.type):
            parts.append((name, len(pc.unique(column)) > 1))
        if name in _PLACES and _CHOSEN not in table.column_names:
            parts.append((name, hash(str(column.to_pylist()))))  # not the rows: there may be thousands of units
    return tuple(parts)


def odd_ones(shapes: Mapping[str, tuple[object, ...] | None]) -> list[str]:
    """Of the units of one table, those that are unlike most. A condition may have nothing to store: then none of its units has rows."""
    counted = {True: Counter[object](), False: Counter[object]()}
    with_rows = {_condition(key) for key, shape in shapes.items() if shape is not None and shape[0]}
    for shape in shapes.values():
        if shape is not None:
            counted[bool(shape[0])][shape] += 1
    usual = {filled: found.most_common(1)[0][0] for filled, found in counted.items() if found}
    return [key for key, shape in shapes.items() if shape is None or shape != usual[_condition(key) in with_rows]]


def _condition(key: str) -> str:
    """A unit's key without the item's number at its end."""
    return key.rpartition("-")[0]
