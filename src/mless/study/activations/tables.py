"""From each item's numbers to activations.parquet: every metric of every layer and set of tokens against `none`, with its test."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float64

from mless.results.schemas import ACTIVATIONS, TOKENS, table_of_rows
from mless.stats import METRICS, paired_change
from mless.stats.activations import levene
from mless.study.bench import Bench


def change_table(bench: Bench) -> pa.Table:
    """A row per condition, layer, set of tokens and metric."""
    stored = bench.folder.read_table("activation_items")
    shape = (len(bench.conditions), len(bench.items), len(bench.layers), len(TOKENS))

    def column(name: str) -> Float64[np.ndarray, "conditions items layers tokens"]:
        return stored.column(name).to_numpy().astype(np.float64).reshape(shape)

    columns = {name: column(name) for name in (*METRICS, "n_tokens", "units", "threshold", "deviation")}
    thresholds = columns["threshold"][0, 0, :, 0]
    rows: list[dict[str, Any]] = []
    for c, condition in enumerate(bench.conditions):
        if condition.name == "none":
            continue
        size = columns["n_tokens"][0, :, 0, 0] * columns["units"][0, :, 0, 0]
        spread, variance = (
            (columns[name][c, :, :, 0], columns[name][0, :, :, 0]) for name in ("deviation", "variance")
        )
        with np.errstate(invalid="ignore"):
            described = np.median(levene(size, spread, variance), axis=0)
        for t, tokens in enumerate(TOKENS):
            for m, (metric, scale) in enumerate(METRICS.items()):
                change = paired_change(
                    columns[metric][c, :, :, t],
                    columns[metric][0, :, :, t],
                    np.random.default_rng([bench.spec.seed, t, m]),
                    scale=scale,
                    margins=bench.spec.margins_of(),
                    flips=bench.spec.flips,
                    names=[f"{metric} of layer {layer}" for layer in bench.layers],
                )
                for at, layer in enumerate(bench.layers):
                    numbers = ("value", "none", "difference", "lo", "hi", "p", "p_adjusted")
                    rows.append(
                        {
                            **bench.names,
                            "condition": condition.name,
                            "layer": layer,
                            "tokens": tokens,
                            "metric": metric,
                            "scale": scale,
                            **{name: float(getattr(change, name)[at]) for name in numbers},
                            "n_items": int(change.n[at]),
                            "verdict": change.verdict[at],
                            "threshold": float(thresholds[at]),
                            "levene": float(described[at]) if (tokens, metric) == ("all", "variance") else math.nan,
                        }
                    )
    return table_of_rows(rows, ACTIVATIONS)
