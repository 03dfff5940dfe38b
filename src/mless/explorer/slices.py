"""Slices of large tables: one item, one head of all items, sums over a whole condition; never a whole table in memory.

Tables of units are read by row groups, whose pages have checksums. Curves over all items are sums that a thread adds up, so that the page
gets what is there at once, and the rest as it comes.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from jaxtyping import Float, Float32, Float64, Int

from mless.errors import BadFolder, MlessError
from mless.explorer.folders import Folder
from mless.results import sealing
from mless.results.folder import ResultFolder
from mless.results.growing import grew
from mless.results.grown import Piece
from mless.results.tables import TableGate
from mless.stats.intervals import student
from mless.study.identity import unit_name
from mless.values import MASS_NAMES, SPAN_NAMES, Prompt, Span

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

QUERIES = ("original", "later")
#: Query sets in the order in which tables have them.
_STORED = ("later", "original")
#: Sums of all conditions together may take this much memory; of a larger model one layer at a time is summed up. It is less than what a
#: `Kept` holds, so that sums which a page shows side by side do not push each other out before they are complete.
_SUM_BYTES = 48 << 20
#: Sums that are not complete and are still added up. Those asked for longest ago are dropped first.
_WAITING = 12
#: Rows of items' shares that are read at once.
_SHARES_ROWS = 1 << 17
#: Seconds that a page waits for sums to be complete: where fewer than so many items are there, and where it can be given something.
_WAIT_FIRST, _ENOUGH, _WAIT_MORE = 0.1, 2, 0.02
#: A larger file of prompts is read row by row.
_PROMPTS_BYTES = 16 << 20
_COLUMNS = ["condition", "item", "layer", "head", "queries", "received", "mass"]


def unit_of(condition: str, number: int) -> str:
    """The unit of an item, numbered from 1."""
    return unit_name(condition, number - 1)


# ---- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """One prompt as stored, its tokens' texts, and the index of each one's span in `SPAN_NAMES`."""

    prompt: Prompt
    texts: tuple[str, ...]

    @property
    def spans(self) -> list[int]:
        return [SPAN_NAMES.index(span.name) for span in self.prompt.spans for _ in range(span.start, span.stop)]


def tokens_of(folder: Folder, condition: str, item: str) -> Tokens | None:
    """One prompt; None where it is not stored."""
    rows = _prompt_rows(folder, condition, item)
    if not len(rows):
        return None
    row = rows.slice(0, 1).to_pylist()[0]
    spans = tuple(Span(one["name"], one["start"], one["stop"]) for one in row["spans"])
    return Tokens(Prompt(item, condition, tuple(row["token_ids"]), spans, ""), tuple(row["tokens"]))


def _prompt_rows(folder: Folder, condition: str, item: str) -> pa.Table:
    """The row of a prompt. A table that fits is kept as a whole, since it lies in one row group."""
    columns = ["condition", "item", "spans", "token_ids", "tokens"]
    where = (pc.field("condition") == condition) & (pc.field("item") == item)
    if (folder.path / "prompts.parquet").stat().st_size > _PROMPTS_BYTES:
        return folder.table("prompts", columns, where)

    def read() -> tuple[pa.Table, dict[tuple[str, str], int]]:
        table = folder.table("prompts", columns).combine_chunks()
        keys = zip(table["condition"].to_pylist(), table["item"].to_pylist(), strict=True)
        return table, {key: at for at, key in enumerate(keys)}

    table, places = folder.kept("prompts", read, lambda found: found[0].nbytes + 200 * len(found[1]))
    at = places.get((condition, item))
    return table.slice(at or 0, 0 if at is None else 1)


def _originals(folder: Folder, condition: str) -> dict[str, Int[np.ndarray, " original"]]:
    """Item → the positions of its original tokens."""

    def read() -> dict[str, Int[np.ndarray, " original"]]:
        rows = folder.table("prompts", ["item", "spans"], pc.field("condition") == condition).to_pylist()
        return {
            row["item"]: np.concatenate(
                [np.arange(one["start"], one["stop"]) for one in row["spans"] if one["name"] != "filler"]
                or [np.arange(0)]
            )
            for row in rows
        }

    return folder.kept(("originals", condition), read, lambda found: sum(one.nbytes for one in found.values()) + 4096)


# ---- one item --------------------------------------------------------------------------------------------------------

#: Reads row groups, each of them on one core. Few threads that stay: memory that one of them has freed is not used by another.
READERS = ThreadPoolExecutor(2, thread_name_prefix="mless-slices")


def received(
    folder: Folder, condition: str, number: int, layer: int, head: int, queries: str
) -> Float64[np.ndarray, " tokens"] | None:
    """What each token of one prompt receives in one head; None where it is not stored."""
    found = _of_unit(folder, "attention", condition, number, layer)
    one = (pc.field("queries") == queries) & (pc.field("head") == head)
    return _first(found.filter(one & (pc.field("layer") == layer)))


def even(
    folder: Folder, condition: str, number: int, layer: int, queries: str
) -> Float64[np.ndarray, " tokens"] | None:
    """What each token would receive from a head that spreads evenly; None where it is not stored."""
    if not folder.has("dilution"):
        return None
    found = _of_unit(folder, "dilution", condition, number, layer)
    return _first(found.filter((pc.field("queries") == queries) & (pc.field("layer") == layer)))


def _first(rows: pa.Table) -> Float64[np.ndarray, " tokens"] | None:
    return rows["received"][0].values.to_numpy(zero_copy_only=False).astype(np.float64) if len(rows) else None


def _of_unit(folder: Folder, table: str, condition: str, number: int, layer: int) -> pa.Table:
    """The rows of one item in a layer, and in those that are stored beside it."""
    columns = ["condition", "item", "layer", *(["head"] if table == "attention" else []), "queries", "received"]
    item = folder.study.items[number - 1]
    if not _grown(folder, table):
        where = (pc.field("condition") == condition) & (pc.field("item") == item) & (pc.field("layer") == layer)
        return folder.table(table, columns, where)

    gate = TableGate(folder.path / f"{table}.parquet", folder.about(), whole=False)
    unit = unit_of(condition, number)
    grown = _opened(folder).grown(table, _units(folder))

    def read(group: int) -> pa.Table:
        piece = gate.read(lambda: grown.piece(group, columns))
        rows = next(rows for name, rows in piece.apart() if name == unit)
        # A copy, so that the other units of the row group are not kept with it.
        return gate.check_rows(rows.take(pa.array(np.arange(len(rows)))))

    # A row group holds several layers. All are kept, since another one is often asked for next.
    with _SUMMING.aside():
        found = [
            folder.kept(("unit", table, unit, group), lambda group=group: read(group), lambda rows: rows.nbytes + 1024)
            for group in grown.numbers_of(unit, layer)
        ]
    if not any(layer in pc.unique(rows["layer"]).to_pylist() for rows in found):
        raise BadFolder(f"{folder.path}: {table}.parquet holds no layer {layer} of {condition!r}; run the study again")
    return pa.concat_tables(found)


def _grown(folder: Folder, table: str) -> bool:
    """Whether a table can be read unit by unit, without being read as a whole first."""
    file = folder.path / f"{table}.parquet"
    return folder.kept(("grew", table), lambda: table in (folder.about().get("footers") or {}) and grew(file))


def _opened(folder: Folder) -> ResultFolder:
    """The folder with its tables of units open."""
    return folder.kept("opened", lambda: ResultFolder(folder.path))


def _units(folder: Folder) -> list[str]:
    study = folder.study
    return folder.kept(
        "units", lambda: [unit_of(one, n) for one in study.conditions for n in range(1, len(study.items) + 1)]
    )


# ---- shares of every item --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Every item's λ and ε in every head, and the even spread's λ: condition × queries × layer × head (0 = the layer) × item."""

    conditions: list[str]
    layers: list[int]
    heads: list[int]
    values: Float32[np.ndarray, "numbers conditions queries layers heads items"]

    def of(self, condition: str, queries: str, layer: int, head: int) -> Float32[np.ndarray, "numbers items"] | None:
        """λ, ε and the even spread's λ by item; None where they were not measured."""
        if condition not in self.conditions or layer not in self.layers or head not in self.heads:
            return None
        where = (
            self.conditions.index(condition),
            QUERIES.index(queries),
            self.layers.index(layer),
            self.heads.index(head),
        )
        return self.values[(slice(None), *where)]


def shares(folder: Folder) -> Shares | None:
    """The numbers behind retained.parquet, one per item; None in folders that do not store them."""
    if not folder.has("shares"):
        return None
    return folder.kept(
        "shares", lambda: READERS.submit(_read_shares, folder).result(), lambda found: found.values.nbytes
    )


def _read_shares(folder: Folder) -> Shares:
    """In batches: the table's columns would take many times the memory of the numbers that are kept."""
    file = folder.path / "shares.parquet"
    gate = TableGate(file, folder.about(), whole=False)
    check_digest(folder, file)
    study = folder.study
    conditions = [one for one in study.conditions if one != "none"]
    captured = folder.kept("captured", lambda: folder.attention.captured())
    layers, heads = sorted(captured), [0, *sorted({head for found in captured.values() for head in found})]
    shape = (len(conditions), len(QUERIES), len(layers), len(heads), len(study.items))
    if np.prod(shape, dtype=float) > 8 * gate.read(lambda: pq.read_metadata(file)).num_rows + 100_000:
        raise gate.refuse("has far fewer rows than the conditions, layers, heads and items of study.json")
    values = np.full((3, int(np.prod(shape))), np.nan, np.float32)
    seen = np.zeros(values.shape[1], np.bool_)
    names = ["condition", "item", "queries"]
    columns = [*names, "layer", "head", "retained", "epsilon", "uniform"]
    rows = 0
    with gate.read(lambda: pq.ParquetFile(file, read_dictionary=names, page_checksum_verification=True)) as opened:
        if odd := [name for name in columns if opened.schema_arrow.names.count(name) != 1]:
            raise gate.refuse(f"has no column {odd[0]!r}, or has it twice")
        steps = gate.read(lambda: opened.iter_batches(_SHARES_ROWS, columns=columns, use_threads=False))
        while (batch := gate.read(lambda: next(steps, None))) is not None:
            flat = np.ravel_multi_index(
                (
                    _indices(batch["condition"], conditions, gate),
                    _indices(batch["queries"], QUERIES, gate),
                    _numbered(batch["layer"], layers, gate),
                    _numbered(batch["head"], heads, gate),
                    _indices(batch["item"], study.items, gate),
                ),
                shape,
            )
            for at, name in enumerate(("retained", "epsilon", "uniform")):
                values[at, flat] = batch[name].to_numpy(zero_copy_only=False)
            seen[flat] = True
            rows += batch.num_rows
    if np.count_nonzero(seen) != rows:
        raise gate.refuse("has a row twice")
    pa.default_memory_pool().release_unused()
    return Shares(conditions, layers, heads, values.reshape(3, *shape))


def _indices(column: pa.DictionaryArray, wanted: Sequence[str], gate: TableGate) -> Int[np.ndarray, " rows"]:
    """For each row the place of its text in a list."""
    known = {text: at for at, text in enumerate(wanted)}
    places = np.array([known.get(text, -1) for text in column.dictionary.to_pylist()], np.int64)
    if column.indices.null_count or (found := places[column.indices.to_numpy()]).min(initial=0) < 0:
        raise gate.refuse("has a name that study.json does not list")
    return found


def _numbered(column: pa.Array, wanted: Sequence[int], gate: TableGate) -> Int[np.ndarray, " rows"]:
    """For each row the place of its number in a list."""
    places = np.full(max(wanted) + 1, -1, np.int64)
    places[wanted] = np.arange(len(wanted))
    given = np.asarray(column)
    if column.null_count or given.min(initial=0) < 0 or given.max(initial=0) >= len(places):
        raise gate.refuse("has a layer or head that was not captured")
    if (found := places[given]).min(initial=0) < 0:
        raise gate.refuse("has a layer or head that was not captured")
    return found


def check_digest(folder: Folder, file: Path) -> None:
    """Refuse a table that is not the one study.json lists. Folders of before list none."""
    about = folder.about()
    known = [(about.get(key) or {}).get(file.stem) for key in ("tables", "tables_next")]
    if any(known) and sealing.digest_of_file(file) not in known:
        raise BadFolder(
            f"{file} is damaged, or not the table that was stored: its checksum is not the one in study.json; restore it from a copy, or remove it "
            "and run the same command again"
        )


# ---- sums over all items ---------------------------------------------------------------------------------------------


class Sums:
    """Received attention of a condition's items by aligned position, added up while it is read: mean and band of every head."""

    def __init__(self, folder: Folder, condition: str, layers: Sequence[int], heads: Sequence[int]) -> None:
        self.folder, self.condition = folder, condition
        self.layers, self.heads = list(layers), list(heads)
        self.read = 0
        self.steps = 0
        self.complete = False
        self.fault: MlessError | None = None
        self.asked = 0
        self.ready = threading.Condition()
        self._originals = _originals(folder, condition)
        longest = max((len(one) for one in self._originals.values()), default=0)
        # A row is a layer, head and query set, in the order in which tables have them.
        rows = len(self.layers) * len(self.heads) * len(_STORED)
        self._total, self._squares = np.zeros((rows, longest)), np.zeros((rows, longest))
        self._n = np.zeros((rows, longest), np.int32)
        self._mass, self._mass_n = np.zeros((rows, len(MASS_NAMES))), np.zeros(rows, np.int64)
        self._units: dict[str, int] = {}
        self._steps = self._pieces()

    @property
    def nbytes(self) -> int:
        return self._total.nbytes * 2 + self._n.nbytes

    def step(self) -> None:
        """Read some more."""
        self.steps += 1
        try:
            rows = next(self._steps, None)
            if rows is None:
                self.complete = True
                pa.default_memory_pool().release_unused()
            else:
                self._add(rows)
        except MlessError as fault:
            self.fault, self.complete = fault, True
        except BaseException:
            # A defect: whoever waits must not wait for ever.
            self.fault = BadFolder(
                f"{self.folder.path}: its attention could not be added up; see what the terminal shows"
            )
            self.complete = True
            raise
        finally:
            with self.ready:
                self.ready.notify_all()

    def _pieces(self) -> Iterator[pa.Table]:
        folder = self.folder
        one = self.layers[0] if len(self.layers) == 1 else None
        if not _grown(folder, "attention"):
            where = pc.field("condition") == self.condition
            yield folder.table("attention", _COLUMNS, where if one is None else where & (pc.field("layer") == one))
            return
        gate = TableGate(folder.path / "attention.parquet", folder.about(), whole=False)
        grown = _opened(folder).grown("attention", _units(folder))
        mine = {unit_of(self.condition, n) for n in range(1, len(folder.study.items) + 1)}
        for group in grown.numbers(layer=one, units=mine):
            piece = gate.read(lambda group=group: grown.piece(group, _COLUMNS))
            checked = Piece(piece.units, piece.rows, gate.check_rows(piece.table))
            for unit, rows in checked.apart():
                if unit in mine:
                    yield rows if one is None else rows.filter(pc.field("layer") == one)
            # What was freed goes back to the system: each thread would keep its own share of it.
            del piece, checked
            pa.default_memory_pool().release_unused()

    def _add(self, table: pa.Table) -> None:
        """Add rows of one or more items."""
        items = table["item"].combine_chunks().dictionary_encode()
        ends = np.flatnonzero(np.diff(items.indices.to_numpy())) + 1
        for start, stop in itertools.pairwise([0, *ends.tolist(), len(items)]):
            if stop > start:
                self._add_item(items[start].as_py(), table.slice(start, stop - start).combine_chunks())

    def _add_item(self, item: str, rows: pa.Table) -> None:
        keep = self._originals.get(item)
        if keep is None:
            return
        query = pc.index_in(rows["queries"], value_set=pa.array(_STORED)).to_numpy()
        layer = np.searchsorted(self.layers, rows["layer"].to_numpy())
        head = np.searchsorted(self.heads, rows["head"].to_numpy())
        at = self._row(query, layer, head)
        # Mostly they lie one behind the other, and are then added in place.
        where = slice(int(at[0]), int(at[-1]) + 1) if (np.diff(at) == 1).all() else at
        flat = rows["received"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        values = np.take(flat.reshape(len(rows), -1), keep, axis=1).astype(np.float64)
        seen = np.isfinite(values)
        values[~seen] = 0.0
        width = slice(0, len(keep))
        self._total[where, width] += values
        self._n[where, width] += seen
        values *= values
        self._squares[where, width] += values
        mass = rows["mass"].combine_chunks()
        parts = np.stack([pc.fill_null(pc.struct_field(mass, [name]), 0.0).to_numpy() for name in MASS_NAMES], axis=1)
        known = np.asarray(mass.is_valid())
        self._mass[where] += np.where(known[:, None], parts, 0.0)
        self._mass_n[where] += known
        # An item's layers may lie in several row groups: it counts once all of them are there.
        done = self._units[item] = self._units.get(item, 0) + len(rows)
        self.read += done == len(self._total)

    def _row(self, query: Any, layer: Any, head: Any) -> Any:
        return (layer * len(self.heads) + head) * len(_STORED) + query

    def curve(self, queries: str, layer: int, head: int) -> dict[str, Any]:
        """Mean, 95 % band and number of items at each aligned position, over the items read so far."""
        at = self._row(_STORED.index(queries), self.layers.index(layer), self.heads.index(head))
        n = self._n[at]
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = self._total[at] / n
            spread = np.sqrt(np.maximum(self._squares[at] - n * mean * mean, 0) / (n - 1))
        half = student(n, 0.95) * spread / np.sqrt(np.maximum(n, 1))
        return {"mean": mean, "lo": mean - half, "hi": mean + half, "n": n}

    def mass(self) -> Float[np.ndarray, "layers heads spans"]:
        """Where attention of original tokens goes in every head, mean over the items read so far."""
        mine = slice(_STORED.index("original"), None, len(_STORED))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self._mass[mine] / self._mass_n[mine, None]
        return found.reshape(len(self.layers), len(self.heads), len(MASS_NAMES))


class Summing:
    """The thread that adds up. What was asked for last comes first."""

    def __init__(self) -> None:
        self._sums: list[Sums] = []
        self._lock = threading.Condition()
        self._clock = 0
        #: Slices that pages wait for.
        self._reading = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def aside(self) -> Generator[None]:
        """While a slice is read for a page that waits, nothing is added up."""
        with self._lock:
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1
                self._lock.notify_all()

    def want(self, wanted: Sequence[Sums]) -> None:
        """Ask for sums, before all that were asked for earlier. Those asked for together are added up side by side."""
        with self._lock:
            self._clock += 1
            for one in wanted:
                one.asked = self._clock
            new = [one for one in wanted if one not in self._sums and not one.complete]
            room = max(0, _WAITING - len(new))
            self._sums = [*sorted(self._sums, key=lambda one: -one.asked)[:room], *new]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="mless-sums")
                self._thread.start()
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._sums = [one for one in self._sums if not one.complete]
                while self._reading or not self._sums:
                    self._lock.wait()
                    self._sums = [one for one in self._sums if not one.complete]
                first = max(self._sums, key=lambda one: (one.asked, -one.steps))
            try:
                first.step()
            except Exception:  # noqa: BLE001 - a defect: it is shown, and the thread goes on with the others
                traceback.print_exc()


_SUMMING = Summing()


def sums(folder: Folder, conditions: Sequence[str], layer: int | None = None) -> list[Sums] | None:
    """The sums of conditions; those of a large model are made for one layer, and there are none without a layer.

    Where nothing is there yet, waits a moment for a first part; with a folder that is patient until they are complete.
    """
    if not folder.has("attention", "prompts"):
        return None
    captured = folder.kept("captured", lambda: folder.attention.captured())
    heads = sorted({head for found in captured.values() for head in found})
    longest = max((len(one) for name in conditions for one in _originals(folder, name).values()), default=0)
    size = len(QUERIES) * len(captured) * len(heads) * longest * 20
    whole = size * len(folder.study.conditions) <= _SUM_BYTES
    if not whole and layer is None:
        return None
    layers = sorted(captured) if whole else [layer or 1]
    found = [
        folder.kept(
            ("sums", name, tuple(layers)),
            lambda name=name: Sums(folder, name, layers, heads),
            lambda one: one.nbytes,
        )
        for name in conditions
    ]
    _SUMMING.want(found)
    enough = min(_ENOUGH, len(folder.study.items))
    begun = all(one.read >= enough for one in found)
    until = None if folder.patient else time.monotonic() + (_WAIT_MORE if begun else _WAIT_FIRST)
    for one in found:
        with one.ready:
            one.ready.wait_for(lambda one=one: one.complete, until and max(0.0, until - time.monotonic()))
        if one.fault is not None:
            raise one.fault
    return found
