"""The gate for tables: every column has its type, no value is out of its range, every key is there once.

The columns are those of `schemas`; here stands what their values may be. Columns that are not declared, and tables of measurements from
outside mless, are only checked to be sound Parquet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from mless import gates
from mless.errors import BadFolder, NoMemory, is_out_of_memory
from mless.limits import KEYED_ROWS, TABLE_BYTES, TABLE_ROWS, VALUES_PER_BYTE, WHOLE_TABLE
from mless.results.growing import INDEX
from mless.results.shapes import AMONG, BOUNDS, SHAPES
from mless.values import SPAN_NAMES

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

Read = TypeVar("Read")
_WAY_OUT = "remove it and run the study again"
#: What the rows of a table of units are ordered by.
_PLACE = ("condition", "item")
_METRIC = r"^((pass|maj)@[1-9][0-9]{0,8}|diversity)$"


#: Files that were checked, by what changes when they are written anew; the prompts' lengths of each that has prompts.
_CHECKED: dict[Path, tuple[object, ...]] = {}
_LENGTHS: dict[Path, tuple[tuple[object, ...], dict[tuple[str, str], int]]] = {}


def _state_of(file: Path, about: Mapping[str, Any]) -> tuple[object, ...]:
    return (*gates.state_of(file), len(about.get("conditions") or ()), len(about.get("items") or ()))


def note_written(file: Path, about: Mapping[str, Any]) -> None:
    """This process has just made the table from numbers of its own, so it need not be checked."""
    _CHECKED[file] = _state_of(file, about)


class TableGate:
    """One table's file, checked before and after it is read."""

    def __init__(self, file: Path, about: Mapping[str, Any], *, whole: bool = True) -> None:
        """Check the file, its columns and its keys, once for as long as it does not change. Without `whole` only rows that are read are checked."""
        self._file, self.about = file, about
        self._shape = SHAPES.get(file.stem)
        gates.check_file(file, TABLE_BYTES, self.refuse)
        if whole and _CHECKED.get(file) != (state := _state_of(file, about)):
            self._check_file()
            _CHECKED[file] = state

    def refuse(self, why: str) -> BadFolder:
        return BadFolder(f"{self._file} {why}; {_WAY_OUT}")

    # ---- before it is read

    def _check_file(self) -> None:
        """It is Parquet with a plausible number of rows, its columns have their types, and no row is there twice."""
        opened = self.read(lambda: pq.ParquetFile(self._file))
        with opened:
            self._check_size(opened.metadata, self._file.stat().st_size)
            self._check_types(self.read(lambda: opened.schema_arrow))
            self._check_all(opened)

    def _check_all(self, opened: pq.ParquetFile) -> None:
        """Every declared value of a table that fits into memory; of a larger one the keys, and the rest when it is read."""
        if self._shape is None:
            return
        found = opened.metadata
        size = sum(found.row_group(n).total_byte_size for n in range(found.num_row_groups))
        if size <= WHOLE_TABLE.value:
            kept = declared(self._file.stem, opened.schema_arrow.names)
        elif found.num_rows <= KEYED_ROWS.value:
            kept = list(self._shape.key)
        else:
            return
        table = self.check_rows(self.read(lambda: opened.read(columns=kept)))
        if self._shape.grid:
            self._check_grid(table)
        if (further := _FURTHER.get(self._file.stem)) is not None:
            further(self, table)

    def read(self, reads: Callable[[], Read]) -> Read:
        """What `reads` returns; a fault of Parquet becomes a refusal."""
        try:
            return reads()
        except (OSError, pa.ArrowException, ValueError, OverflowError) as fault:
            why = f"cannot be read ({_first_line(fault)})"
            if is_out_of_memory(fault):
                # It may be good, so it is not to be removed.
                raise NoMemory(
                    f"{self._file} {why}; give this command more memory, and `mless verify {self._file.parent}` says whether the folder is whole"
                ) from None
            raise self.refuse(why) from None

    def _may_be_empty(self) -> bool:
        """Points are chosen, and there may be none to choose; none alone is compared with nothing; and items may have no solution, or no answer."""
        alone = set(self.about.get("conditions") or ()) == {"none"}
        # A grid of one specification has no setting with several values.
        some = ("affine_points", "tokens", "candidates", "specification_settings")
        return self._file.stem in some or (alone and self._file.stem in _COMPARED) or self._is_left_out()

    def _is_left_out(self) -> bool:
        """Whether a cause study was not asked for this table."""
        cause = (self.about.get("study") or {}).get("cause")
        asked = cause.get("of") if isinstance(cause, dict) else None
        name = {"ladder": "ladder", "cause": "map", "chain": "chain"}.get(self._file.stem)
        return isinstance(asked, list) and name is not None and name not in asked

    def _check_size(self, found: pq.FileMetaData, size: int) -> None:
        if found.num_rows < 1 and not self._may_be_empty():
            raise self.refuse("has no rows; expected at least one")
        groups = [found.row_group(n) for n in range(found.num_row_groups)]
        values = sum(group.column(n).num_values for group in groups for n in range(group.num_columns))
        if found.num_rows > TABLE_ROWS.value or any(group.num_rows < 0 for group in groups):
            raise self.refuse(f"says it has {found.num_rows:,} rows; expected {TABLE_ROWS}")
        if values > 1_000_000 and values > size * VALUES_PER_BYTE.value:
            raise self.refuse(f"says it has {values:,} values in {size:,} bytes; expected {VALUES_PER_BYTE}")

    def _check_types(self, found: pa.Schema) -> None:
        for column in self._shape.columns if self._shape else ():
            there = [one for one in found if one.name == column.name]
            if len(there) > 1:
                raise self.refuse(f"has the column {column.name!r} twice")
            if not there:
                if self._shape and column.name in self._shape.newer:
                    continue
                raise self.refuse(f"has no column {column.name!r}")
            if not _fits(there[0].type, column.type):
                raise self.refuse(
                    f"has a column {column.name!r} of another type: expected {column.type}, found {there[0].type}"
                )

    # ---- what was read of it

    @functools.cached_property
    def _written(self) -> pq.FileMetaData:
        return self.read(lambda: pq.read_metadata(self._file))

    @property
    def grew(self) -> bool:
        """Whether its units were stored as they came, and not in the order of conditions and items."""
        return INDEX.encode() in (self._written.metadata or {})

    def with_places(self, columns: Sequence[str]) -> list[str]:
        """The columns to read so that the rows can be put in order."""
        there = self._written.schema.to_arrow_schema().names if self.grew else ()
        return [*columns, *(name for name in _PLACE if name in there and name not in columns)]

    def in_order(self, table: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Rows in the order of the study's conditions and items, with these columns; inside a unit they are in order."""
        listed = (list(self.about.get("conditions") or ()), list(self.about.get("items") or ()))
        places = {
            name: pc.index_in(table.column(name), value_set=pa.array(wanted, pa.string()))
            for name, wanted in zip(_PLACE, listed, strict=True)
            if self.grew and name in table.column_names
        }
        if places:
            order = pc.sort_indices(pa.table(places), [(name, "ascending") for name in places]).to_numpy()
            # Mostly they are in order, and a table is not copied for nothing.
            if (order[1:] < order[:-1]).any():
                table = table.take(order)
        return table.select(list(columns))

    def check_rows(self, table: pa.Table) -> pa.Table:
        """The table, once every value in it is known to be right."""
        try:
            table.validate(full=True)
        except pa.ArrowException as fault:
            raise self.refuse(f"is damaged ({_first_line(fault)})") from None
        if self._shape is None:
            return table
        for name in table.column_names:
            if name in self._shape.columns.names:
                self._check_column(name, table.column(name))
        if set(self._shape.key) <= set(table.column_names):
            self._check_key(table)
        if self._shape.of_study:
            self._check_names(table)
        if self._file.stem == "prompts":
            self._check_prompts(table)
        if {*self._shape.by_token} & set(table.column_names) and {"condition", "item"} <= set(table.column_names):
            self._check_lengths(table)
        return self._as_declared(table)

    def _as_declared(self, table: pa.Table) -> pa.Table:
        """Whole numbers in a column of fractions as such: other tools write them so."""
        assert self._shape is not None
        for at, name in enumerate(table.column_names):
            wanted = self._shape.columns.field(name).type if name in self._shape.columns.names else None
            if wanted is not None and pa.types.is_floating(wanted) and pa.types.is_integer(table.column(at).type):
                table = table.set_column(at, name, pc.cast(table.column(at), wanted, safe=False))
        return table

    def _check_column(self, name: str, values: pa.ChunkedArray) -> None:
        assert self._shape is not None
        declared = self._shape.columns.field(name).type
        may_be_null = name not in self._shape.filled if pa.types.is_floating(declared) else name in self._shape.empty
        if values.null_count and not may_be_null:
            raise self.refuse(f"has a row without {name!r}")
        if pa.types.is_struct(declared):
            for part in declared:
                self._check_numbers(f"{name}.{part.name}", pc.struct_field(values, part.name))
        elif pa.types.is_list(declared):
            inner = pc.list_flatten(values)
            if pa.types.is_integer(declared.value_type) or pa.types.is_string(declared.value_type):
                if inner.null_count:
                    raise self.refuse(f"has an empty value in {name!r}")
            elif pa.types.is_floating(declared.value_type):
                self._check_numbers(name, inner)
            if name in ("linear", "zoom", "positive", "negative"):
                self._check_equal_lengths(name, values)
        elif pa.types.is_floating(declared) or pa.types.is_integer(declared):
            self._check_numbers(name, values)
        elif few := self._shape.among.get(name) or AMONG.get(name):
            self._check_texts(name, values, few.__contains__, f"one of {', '.join(few)}")
        elif name == "metric" and "split" in self._shape.columns.names:
            odd = pc.invert(pc.match_substring_regex(values, _METRIC))
            if pc.any(odd).as_py():
                shown = gates.shown(pc.filter(values, odd)[0].as_py(), 60)
                raise self.refuse(f"has a metric {shown}; expected pass@k, maj@k or diversity")

    def _check_texts(self, name: str, values: pa.ChunkedArray, fits: Callable[[str], bool], wanted: str) -> None:
        for one in pc.unique(values).to_pylist():
            if one is not None and not fits(one):
                raise self.refuse(f"has {gates.shown(one, 60)} in {name!r}; expected {wanted}")

    def _check_numbers(self, name: str, values: pa.ChunkedArray | pa.Array) -> None:
        if pa.types.is_null(values.type):
            return
        # A bound may be too large for a float.
        bound = name in ("lo", "hi") or (self._shape is not None and not self._shape.finite)
        if not bound and pa.types.is_floating(values.type) and pc.any(pc.is_inf(values)).as_py():
            raise self.refuse(f"has a number in {name!r} that is not finite")
        low, high = BOUNDS.get(name, (None, None))
        if low is None and high is None:
            return
        found = pc.min_max(values).as_py()
        for bound, edge, beyond in ((low, found["min"], -1), (high, found["max"], 1)):
            if bound is not None and edge is not None and beyond * edge > beyond * bound:
                word = "at least" if beyond < 0 else "at most"
                raise self.refuse(f"has {edge} in {name!r}; expected {word} {bound:g}")

    def _check_equal_lengths(self, name: str, values: pa.ChunkedArray) -> None:
        if len(pc.unique(pc.list_value_length(values))) > 1:
            raise self.refuse(f"has lists of several lengths in {name!r}; expected one length")

    def _check_key(self, table: pa.Table) -> None:
        assert self._shape is not None
        key = list(self._shape.key)
        counted = table.select(key).group_by(key).aggregate([([], "count_all")])
        if len(counted) < len(table):
            twice = counted.filter(pc.field("count_all") > 1).slice(0, 1).select(key).to_pylist()[0]
            row = ", ".join(f"{name} {gates.shown(value, 40)}" for name, value in twice.items())
            raise self.refuse(f"has a row twice ({row})")

    def _check_grid(self, table: pa.Table) -> None:
        assert self._shape is not None
        sizes = {name: pc.count_distinct(table.column(name)).as_py() for name in self._shape.key}
        if len(table) != math.prod(sizes.values()):
            shown = " × ".join(f"{size} {name}" for name, size in sizes.items())
            raise self.refuse(f"has {len(table):,} rows; expected {shown} = {math.prod(sizes.values()):,}")
        self.check_there(table, "condition", set(self.about.get("conditions") or ()) - {"none"})
        if "item" in self._shape.key:
            self.check_there(table, "item", self.about.get("items") or ())

    def check_there(self, table: pa.Table, column: str, wanted: Iterable[str]) -> None:
        """Refuse a table that lacks rows of something that study.json lists."""
        found = set(pc.unique(table.column(column)).to_pylist())
        if missing := sorted(set(wanted) - found):
            raise self.refuse(f"has no row of {column} {gates.shown(missing[0], 60)}, which study.json lists")

    def _check_names(self, table: pa.Table) -> None:
        """Conditions and items are those of study.json; layers and heads are the model's."""
        for column, listed in (("condition", "conditions"), ("item", "items")):
            known = self.about.get(listed)
            if known is None or column not in table.column_names:
                continue
            names = set(known)
            self._check_texts(column, table.column(column), names.__contains__, f"one of study.json's {listed}")
        for column, most in (("layer", "layers"), ("head", "heads")):
            highest = (self.about.get("model") or {}).get(most)
            if highest and column in table.column_names and len(table):
                found = pc.max(table.column(column)).as_py()
                if found is not None and found > highest:
                    raise self.refuse(f"has {column} {found}; the model in study.json has {highest} {most}")

    def _check_prompts(self, table: pa.Table) -> None:
        """Spans lie one behind the other, and there are as many tokens as ids."""
        there = [name for name in ("token_ids", "spans", "tokens") if name in table.column_names]
        if not there:
            return
        counted = [pc.list_value_length(table[name]).to_pylist() for name in there if name != "spans"]
        spans = table["spans"].to_pylist() if "spans" in there else [None] * len(table)
        for row, *counts in zip(spans, *counted, strict=True):
            lengths = set(counts)
            at = 0
            for span in row or ():
                if span is None or span["name"] not in SPAN_NAMES or span["start"] != at or (span["stop"] or 0) < at:
                    raise self.refuse(
                        f"has spans that do not lie one behind the other, or of an unknown name ({gates.shown(span, 80)})"
                    )
                at = span["stop"]
            if "spans" in there:
                lengths.add(at)
            if len(lengths) > 1:
                raise self.refuse(f"has a prompt of {min(lengths)} and of {max(lengths)} tokens, by different columns")

    def _check_lengths(self, table: pa.Table) -> None:
        """Lists by token are as long as the item's prompt."""
        assert self._shape is not None
        prompts = _prompt_lengths(self._file.with_name("prompts.parquet"), self.about)
        for name in self._shape.by_token if prompts else ():
            if name not in table.column_names:
                continue
            columns = {
                "condition": table["condition"],
                "item": table["item"],
                "length": pc.list_value_length(table[name]),
            }
            for row in pa.table(columns).group_by(["condition", "item", "length"]).aggregate([]).to_pylist():
                wanted = prompts.get((row["condition"], row["item"]))
                if wanted != row["length"]:
                    where = f"item {gates.shown(row['item'], 60)} under {gates.shown(row['condition'], 60)}"
                    raise self.refuse(
                        f"has {row['length']} values in {name!r} for {where}, whose prompt has {wanted or 'no'} tokens"
                    )


# ---- what only some tables need --------------------------------------------------------------------------------------


def _check_answers(gate: TableGate, table: pa.Table) -> None:
    """Every condition has every item, each with samples 0, 1, 2 …"""
    gate.check_there(table, "condition", gate.about.get("conditions") or ())
    items = len(gate.about.get("items") or ())
    rows = table.group_by("condition").aggregate([("sample", "max"), ("item", "count_distinct"), ("item", "count")])
    for row in rows.to_pylist():
        wanted = row["item_count_distinct"] * (row["sample_max"] + 1)
        if row["item_count"] != wanted or (items and row["item_count_distinct"] != items):
            raise gate.refuse(
                f"has {row['item_count']:,} answers under {gates.shown(row['condition'], 60)}; expected one for each of {items:,} items and "
                f"{row['sample_max'] + 1:,} samples"
            )


def _check_accuracy(gate: TableGate, table: pa.Table) -> None:
    """Every condition has a row over all items, and what was chosen among on dev items is there on test items."""
    whole = table.filter(pc.field("split") == "all")
    gate.check_there(whole, "condition", gate.about.get("conditions") or ())
    split: dict[str, set[tuple[str, str]]] = {"dev": set(), "test": set()}
    for row in table.select(["split", "condition", "metric"]).to_pylist():
        if row["split"] in split:
            split[row["split"]].add((row["condition"], row["metric"]))
    if split["dev"] != split["test"]:
        odd = sorted(split["dev"] ^ split["test"])[0]
        raise gate.refuse(f"has {gates.shown(' '.join(odd), 80)} on only one of dev and test; expected both")
    if whole.filter(pc.field("metric") != "diversity")["samples"].null_count:
        raise gate.refuse("has a row without 'samples'")


def _check_tuning(gate: TableGate, table: pa.Table) -> None:
    """Settings are those of study.json, the chosen one among them, and the first rung has them all."""
    first = table.filter(pc.field("rung") == 1)
    with_arm = [name for name, one in (gate.about.get("conditions") or {}).items() if one.get("arm")]
    gate.check_there(first, "condition", with_arm)
    if odd := sorted(set(pc.unique(table["condition"]).to_pylist()) - set(with_arm)):
        raise gate.refuse(f"has a setting {gates.shown(odd[0], 60)} that study.json does not list with ARM")


def _check_tuned(gate: TableGate, table: pa.Table) -> None:
    """The chosen setting and `none` have their row on the test items."""
    chosen = (gate.about.get("tuning") or {}).get("chosen")
    test = table.filter((pc.field("split") == "test") & (pc.field("metric") == "pass@1"))
    gate.check_there(test, "condition", ["none", *([chosen] if chosen else [])])


def _check_scored(gate: TableGate, table: pa.Table) -> None:
    """Every condition has the same rows: what is scored does not depend on it."""
    if not table.num_rows:
        return
    conditions = list(gate.about.get("conditions") or ())
    gate.check_there(table, "condition", conditions)
    same = [name for name in _SCORED if name in table.column_names]
    counted = table.select(same).group_by(same).aggregate([([], "count_all")])
    odd = counted.filter(pc.field("count_all") != len(conditions)) if conditions else counted.slice(0, 0)
    if odd.num_rows:
        first = odd.slice(0, 1).to_pylist()[0]
        row = ", ".join(f"{name} {gates.shown(first[name], 40)}" for name in same)
        raise gate.refuse(
            f"has {row} under {first['count_all']} of {len(conditions)} conditions; expected the same under all"
        )


def _check_solutions(gate: TableGate, table: pa.Table) -> None:
    """And every solution has tokens 0, 1, 2 …"""
    _check_scored(gate, table)
    for row in (
        table.group_by(["condition", "item"]).aggregate([("position", "max"), ("position", "count")]).to_pylist()
    ):
        if row["position_max"] + 1 != row["position_count"]:
            where = f"item {gates.shown(row['item'], 60)} under {gates.shown(row['condition'], 60)}"
            raise gate.refuse(
                f"has {row['position_count']} tokens for {where}, the last at position {row['position_max']}; expected 0, 1, 2 …"
            )


#: What tells the rows of one condition apart, and is the same under every condition.
_SCORED = ("item", "metric", "position", "token", "number", "role", "text", "n_tokens")

#: Tables with rows for those conditions alone that are compared with none.
_COMPARED = ("retained", "shares", "activations", "affine", "effects")

_FURTHER: dict[str, Callable[[TableGate, pa.Table], None]] = {
    "answers": _check_answers,
    "accuracy": _check_accuracy,
    "tuning": _check_tuning,
    "tuned": _check_tuned,
    "scores": _check_scored,
    "likelihood": _check_scored,
    "candidates": _check_scored,
    "tokens": _check_solutions,
}


def declared(table: str, found: Iterable[str]) -> list[str] | None:
    """The columns that are declared and there; None for a table from outside mless, which is read whole."""
    shape = SHAPES.get(table)
    return None if shape is None else [name for name in shape.columns.names if name in set(found)]


def _prompt_lengths(file: Path, about: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """(condition, item) → the number of its prompt's tokens; empty where no prompts are stored as tokens."""
    if not file.exists():
        return {}
    gate = TableGate(file, about)
    state = gates.state_of(file)
    if file not in _LENGTHS or _LENGTHS[file][0] != state:
        with pq.ParquetFile(file) as opened:
            if "token_ids" not in opened.schema_arrow.names:
                return {}
            table = gate.check_rows(gate.read(lambda: opened.read(columns=["condition", "item", "token_ids"])))
        lengths = pc.list_value_length(table["token_ids"]).to_pylist()
        keys = zip(table["condition"].to_pylist(), table["item"].to_pylist(), strict=True)
        _LENGTHS[file] = state, dict(zip(keys, lengths, strict=True))
    return _LENGTHS[file][1]


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column is of the kind declared. Other widths are taken: other tools write 64 bits, or null where all values are."""
    kinds = pa.types
    if kinds.is_null(found):
        return True
    if kinds.is_list(wanted):
        lists = kinds.is_list(found) or kinds.is_large_list(found)
        return lists and _fits(found.value_type, wanted.value_type)
    if kinds.is_struct(wanted):
        if not kinds.is_struct(found):
            return False
        there: dict[str, pa.DataType] = {part.name: part.type for part in found}
        return len(there) == found.num_fields and all(
            part.name in there and _fits(there[part.name], part.type) for part in wanted
        )
    if kinds.is_string(wanted):
        return kinds.is_string(found) or kinds.is_large_string(found)
    if kinds.is_floating(wanted):
        return kinds.is_floating(found) or kinds.is_integer(found)
    return kinds.is_integer(found) if kinds.is_integer(wanted) else found == wanted


def _first_line(fault: BaseException) -> str:
    return gates.shown(str(fault).partition("\n")[0], 200)
