"""From what one prompt's tokens receive to the tables of an attention study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from mless import stats
from mless.results.schemas import RETAINED, SHARES, lists, matrix, table_of_columns, table_of_rows
from mless.study.bench import Bench
from mless.values import MASS_NAMES, QUERY_SETS, Prompt, head_name

if TYPE_CHECKING:
    from mless.capture import Attention

Names = Mapping[str, str]


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
    grid = np.indices((layers, heads, sets)).reshape(3, -1)
    table = pa.table(
        {
            **_repeated(common, rows),
            "layer": pa.array(np.array(attention.layers, np.int32)[grid[0]]),
            "head": pa.array(np.array(attention.heads, np.int32)[grid[1]]),
            "queries": pa.array([QUERY_SETS[s] for s in grid[2]]),
            "received": lists(received.astype(np.float32), pa.float32()),
            "n": lists(n.astype(np.int32), pa.int32()),
            "mass": pa.StructArray.from_arrays(
                [pa.array(mass[:, m].astype(np.float32)) for m in range(len(MASS_NAMES))], list(MASS_NAMES)
            ),
        }
    )
    even = attention.uniform.transpose(1, 0, 2).reshape(layers * sets, tokens)
    both = np.indices((layers, sets)).reshape(2, -1)
    yardstick = pa.table(
        {
            **_repeated(common, layers * sets),
            "layer": pa.array(np.array(attention.layers, np.int32)[both[0]]),
            "queries": pa.array([QUERY_SETS[s] for s in both[1]]),
            "received": lists(even.astype(np.float32), pa.float32()),
        }
    )
    return {"dilution": yardstick, "attention": table}


def _repeated(texts: Mapping[str, str], rows: int) -> dict[str, pa.Array]:
    return {name: pa.array([text] * rows, pa.string()) for name, text in texts.items()}


def question_sums(received: Float[np.ndarray, "*rows tokens"], prompt: Prompt) -> Float[np.ndarray, "*rows"]:
    """Σ received over the question's tokens that a later token can see; NaN where there is none."""
    question = received[..., prompt.positions("question")].astype(np.float64)
    defined = ~np.isnan(question).all(axis=-1)
    return np.where(defined, np.nansum(question, axis=-1), np.nan)


def _stored_sums(table: pa.Table, prompt: Prompt) -> Float[np.ndarray, " rows"]:
    return question_sums(matrix(table, "received"), prompt)


def log_shares(with_filler: np.ndarray, without: np.ndarray) -> np.ndarray:
    """log λ_item; NaN where it is undefined. A question that receives nothing gives −inf, which the statistics refuse."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(without > 0, np.log(with_filler / without), np.nan)


def share_tables(bench: Bench) -> dict[str, pa.Table]:
    """Each condition against `none`: `retained` (every head and layer, with interval, test, yardstick, verdict) and `shares` (every item)."""
    spec, layers, heads = bench.spec, bench.layers, bench.heads
    items = [item.id for item in bench.items]

    def sums(name: str, condition: str, shape: tuple[int, ...]) -> np.ndarray:
        prompts = bench.prompts_of(condition)
        read = (_stored_sums(bench.read_unit(name, condition, n), prompt) for n, prompt in enumerate(prompts))
        return np.stack([found.reshape(shape) for found in read])

    full, even = (len(layers), len(heads), len(QUERY_SETS)), (len(layers), len(QUERY_SETS))
    base, base_even = sums("attention", "none", full), sums("dilution", "none", even)
    rows: list[dict[str, Any]] = []
    by_item: list[pa.Table] = [SHARES.empty_table()]
    for condition in (one.name for one in bench.conditions if one.name != "none"):
        logs = log_shares(sums("attention", condition, full), base)
        logs_even = log_shares(sums("dilution", condition, even), base_even)
        for s, queries in enumerate(QUERY_SETS):
            rng = np.random.default_rng([spec.seed, s])
            found = share_rows(
                logs[..., s], logs_even[..., s], layers, heads, rng, margins=spec.margins_of(), flips=spec.flips
            )
            common = {**bench.names, "condition": condition, "queries": queries}
            rows += [common | row for row in found]
            shares = _item_shares(logs[..., s], logs_even[..., s], items, layers, heads)
            by_item.append(table_of_columns(common | shares, SHARES, len(shares["item"])))
    return {"retained": table_of_rows(rows, RETAINED), "shares": pa.concat_tables(by_item)}


def _item_shares(
    logs: Float[np.ndarray, "items layers heads"],
    logs_even: Float[np.ndarray, "items layers"],
    items: Sequence[str],
    layers: Sequence[int],
    heads: Sequence[int],
) -> dict[str, Any]:
    """λ, the yardstick and ε of every item, layer and head; head 0 is the mean over the layer's heads."""
    epsilons = stats.dilution_exponents(logs, logs_even)
    share = np.exp(logs)
    present = ~np.isnan(logs).all(axis=0)
    with np.errstate(invalid="ignore"):
        mean = np.where(present, share, 0.0).sum(-1) / np.where(present.any(-1), present.sum(-1), np.nan)
    shape = (len(items), len(layers), len(heads) + 1)
    grid = np.indices(shape).reshape(3, -1)
    return {
        "item": np.array(items, object)[grid[0]],
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
