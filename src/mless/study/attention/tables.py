"""From what one prompt's tokens receive to the tables of an attention study."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float

from mless import stats
from mless.guarded import usable_cores
from mless.results.schemas import RETAINED, SHARES, lists, matrix, table_of_columns, table_of_rows
from mless.study.bench import Bench
from mless.values import MASS_NAMES, QUERY_SETS, Prompt, head_name

if TYPE_CHECKING:
    from mless.capture import Attention

Names = Mapping[str, str]

#: Rows of `shares` that are made at once. A column of texts holds at most 2 GiB; beyond that Arrow counts wrongly, and says nothing.
_ROWS_AT_ONCE = 1 << 22


def unit_tables(attention: Attention, names: Names) -> dict[str, pa.Table]:
    """One prompt's rows: received attention per layer, head and query set, and the even-spread yardstick per layer."""
    sets, layers, heads, tokens = attention.received.shape
    rows = layers * heads * sets
    received = attention.received.transpose(1, 2, 0, 3).reshape(rows, tokens)
    n = np.broadcast_to(attention.n.transpose(1, 0, 2)[:, None], (layers, heads, sets, tokens)).reshape(rows, tokens)
    mass = np.broadcast_to(attention.mass[:, :, None], (layers, heads, sets, len(MASS_NAMES))).reshape(rows, -1)
    common = {
        **names,
        "condition": attention.prompt.condition,
        "item": attention.prompt.item,
    }
    table = pa.table(
        {
            **_repeated(common, rows),
            **_places(tuple(attention.layers), tuple(attention.heads)),
            "received": lists(received.astype(np.float32, copy=False), pa.float32()),
            "n": lists(n.astype(np.int32, copy=False), pa.int32()),
            "mass": pa.StructArray.from_arrays(
                [pa.array(mass[:, m].astype(np.float32, copy=False)) for m in range(len(MASS_NAMES))], list(MASS_NAMES)
            ),
        }
    )
    even = attention.uniform.transpose(1, 0, 2).reshape(layers * sets, tokens)
    yardstick = pa.table(
        {
            **_repeated(common, layers * sets),
            **_places(tuple(attention.layers), None),
            "received": lists(even.astype(np.float32, copy=False), pa.float32()),
        }
    )
    return {"dilution": yardstick, "attention": table}


@functools.lru_cache(maxsize=8)
def _places(layers: tuple[int, ...], heads: tuple[int, ...] | None) -> dict[str, pa.Array]:
    """The columns that tell a unit's rows apart, the same for every unit."""
    columns = {"layer": layers, "head": heads, "queries": QUERY_SETS}
    used = {name: values for name, values in columns.items() if values is not None}
    grid = np.indices([len(values) for values in used.values()]).reshape(len(used), -1)
    kinds = {"layer": pa.int32(), "head": pa.int32(), "queries": pa.string()}
    return {
        name: pa.array([values[at] for at in grid[axis]], kinds[name])
        for axis, (name, values) in enumerate(used.items())
    }


def _repeated(texts: Mapping[str, str], rows: int) -> dict[str, pa.Array]:
    return {name: pa.repeat(pa.scalar(text, pa.string()), rows) for name, text in texts.items()}


def question_sums(received: Float[np.ndarray, "*rows tokens"], prompt: Prompt) -> Float[np.ndarray, "*rows"]:
    """Σ received over the question's tokens that a later token can see; NaN where there is none."""
    question = received[..., prompt.positions("question")].astype(np.float64)
    missing = np.isnan(question)
    return np.where(missing.all(axis=-1), np.nan, np.where(missing, 0.0, question).sum(axis=-1))


class Sums:
    """What the question's tokens receive in sum: by table and condition, for every item, layer and so on.

    Kept as units come. Those that an earlier run stored are read from the tables, each number once.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        layers, heads, sets = len(bench.layers), len(bench.heads), len(QUERY_SETS)
        self._places = {layer: number for number, layer in enumerate(bench.layers)}
        shapes = {"attention": (layers, heads, sets), "dilution": (layers, sets)}
        self._found = {
            table: {one.name: np.full((len(bench.items), *shape), np.nan) for one in bench.conditions}
            for table, shape in shapes.items()
        }
        self._kept: dict[str, set[tuple[str, int]]] = {table: set() for table in shapes}

    def add(self, table: str, condition: str, number: int, rows: pa.Table) -> None:
        """A unit's rows, of all layers."""
        self._put(table, condition, number, rows)
        self._kept[table].add((condition, number))

    def _put(self, table: str, condition: str, number: int, rows: pa.Table) -> None:
        sums = question_sums(matrix(rows, "received"), self._bench.prompts_of(condition)[number])
        layers = rows.column("layer")
        first, last = self._places[layers[0].as_py()], self._places[layers[-1].as_py()]
        there = self._found[table][condition][number, first : last + 1]
        there[...] = sums.reshape(there.shape)

    def of(self, table: str) -> dict[str, Float[np.ndarray, "items *shape"]]:
        """By condition, the sums of every unit."""
        if len(self._kept[table]) < len(self._bench.conditions) * len(self._bench.items):
            self._bench.each_unit(table, ("layer", "received"), partial(self._put, table))
        return self._found[table]


def log_shares(with_filler: np.ndarray, without: np.ndarray) -> np.ndarray:
    """log λ_item; NaN where it is undefined. A question that receives nothing gives −inf, which the statistics refuse."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(without > 0, np.log(with_filler / without), np.nan)


def share_tables(bench: Bench, sums: Sums) -> dict[str, pa.Table]:
    """Each condition against `none`: `retained` (every head and layer, with interval, test, yardstick, verdict) and `shares` (every item)."""
    spec, layers, heads = bench.spec, bench.layers, bench.heads
    items = [item.id for item in bench.items]

    received, spread = sums.of("attention"), sums.of("dilution")
    base, base_even = received["none"], spread["none"]
    rows: list[dict[str, Any]] = []
    by_item: list[pa.Table] = [SHARES.empty_table()]

    def compared(asked: tuple[str, int]) -> tuple[list[dict[str, Any]], pa.Table]:
        """One condition and set of queries. Each has random numbers of its own, so they can be computed in any order."""
        condition, s = asked
        logs, logs_even = (
            log_shares(received[condition], base)[..., s],
            log_shares(spread[condition], base_even)[..., s],
        )
        rng = np.random.default_rng([spec.seed, s])
        found = share_rows(logs, logs_even, layers, heads, rng, margins=spec.margins_of(), flips=spec.flips)
        common = {**bench.names, "condition": condition, "queries": QUERY_SETS[s]}
        present = np.asarray(~np.isnan(logs).all(axis=0))
        at_once = max(1, _ROWS_AT_ONCE // (len(layers) * (len(heads) + 1)))
        pieces: list[pa.Table] = []
        for at in range(0, len(items), at_once):
            some = slice(at, at + at_once)
            shares = _item_shares(logs[some], logs_even[some], present, items[some], layers, heads)
            pieces.append(table_of_columns(common | shares, SHARES, len(shares["item"])))
        return [common | row for row in found], pa.concat_tables(pieces)

    compare = [(one.name, s) for one in bench.conditions if one.name != "none" for s in range(len(QUERY_SETS))]
    with ThreadPoolExecutor(max(1, min(len(compare), usable_cores()))) as pool:
        for found, shares in pool.map(compared, compare):
            rows += found
            by_item.append(shares)
    return {"retained": table_of_rows(rows, RETAINED), "shares": pa.concat_tables(by_item)}


def _item_shares(
    logs: Float[np.ndarray, "items layers heads"],
    logs_even: Float[np.ndarray, "items layers"],
    present: Bool[np.ndarray, "layers heads"],
    items: Sequence[str],
    layers: Sequence[int],
    heads: Sequence[int],
) -> dict[str, Any]:
    """λ, the yardstick and ε of every item, layer and head; head 0 is the mean over the layer's heads that are `present` in some item."""
    epsilons = stats.dilution_exponents(logs, logs_even)
    share = np.exp(logs)
    with np.errstate(invalid="ignore"):
        mean = np.where(present, share, 0.0).sum(-1) / np.where(present.any(-1), present.sum(-1), np.nan)
    shape = (len(items), len(layers), len(heads) + 1)
    grid = np.indices(shape).reshape(3, -1)
    return {
        "item": pa.array(items, pa.string()).take(pa.array(grid[0])),
        "layer": np.array(layers, np.int32)[grid[1]],
        "head": np.array([0, *heads], np.int32)[grid[2]],
        "retained": np.concatenate([mean[..., None], share], axis=-1).ravel(),
        "uniform": np.broadcast_to(np.exp(logs_even)[..., None], shape).ravel(),
        "epsilon": np.concatenate([stats.layer_exponents(epsilons)[..., None], epsilons], axis=-1).ravel(),
    }


def share_rows(
    logs: Float[np.ndarray, "items layers heads"],
    logs_even: Float[np.ndarray, "items layers"],
    layers: Sequence[int],
    heads: Sequence[int],
    rng: np.random.Generator,
    *,
    margins: stats.Margins,
    flips: int = 100_000,
) -> list[dict[str, Any]]:
    """From log λ_item of every head (and of an even spread): a row per layer (head 0) and per head."""
    items, n_layers, n_heads = logs.shape
    names = [head_name(layer, head) for layer in layers for head in heads]
    flat = logs.reshape(items, -1)
    test = stats.sign_flip(flat, rng, flips=flips, names=names)
    by_layer = [
        stats.layer_share(logs[:, at], names=names[at * n_heads : (at + 1) * n_heads]) for at in range(n_layers)
    ]
    layer_test = stats.sign_flip(np.stack([scores for _, scores in by_layer], axis=1), rng, flips=flips)
    adjusted, layer_adjusted = stats.holm(test.p), stats.holm(layer_test.p)
    by_head = stats.retained_shares(flat, names=names)
    epsilons = stats.dilution_exponents(logs, logs_even)
    head_epsilon = stats.mean_exponents(epsilons.reshape(items, -1))
    layer_epsilon = stats.mean_exponents(stats.layer_exponents(epsilons))
    uniform = stats.retained_shares(logs_even)

    def row(
        layer: int, head: int, share: stats.Estimate, epsilon: stats.Estimate, p: float, p_adjusted: float, even: float
    ) -> dict[str, Any]:
        return {
            "layer": layer,
            "head": head,
            "retained": share.value,
            "lo": share.lo,
            "hi": share.hi,
            "epsilon": epsilon.value,
            "epsilon_lo": epsilon.lo,
            "epsilon_hi": epsilon.hi,
            "epsilon_items": epsilon.n,
            "p": p,
            "p_adjusted": p_adjusted,
            "n_items": share.n,
            "uniform": even,
            "skewed": share.skewed or epsilon.skewed,
            "verdict": margins.verdict(share.lo, share.hi),
        }

    rows: list[dict[str, Any]] = []
    for at, layer in enumerate(layers):
        even = uniform[at].value
        p = float(layer_test.p[at]), float(layer_adjusted[at])
        rows.append(row(layer, 0, by_layer[at][0], layer_epsilon[at], *p, even))
        for h, head in enumerate(heads, start=at * n_heads):
            rows.append(row(layer, head, by_head[h], head_epsilon[h], float(test.p[h]), float(adjusted[h]), even))
    return rows
