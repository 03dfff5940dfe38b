"""From each item's scores to likelihood.parquet and effects.parquet: every condition against `none`, metric by metric."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float64

from mless.results.nats import LIKELIHOOD_METRICS
from mless.results.schemas import EFFECTS, LIKELIHOOD, table_of_rows
from mless.stats.effects import paired_effects
from mless.study.bench import Bench
from mless.study.spec import LikelihoodTable

#: Metrics that are compared with `none` by their definition: how far they are from it is described, and nothing is tested.
DESCRIBED = ("kl", "top-1 agreement")


def write_effects(bench: Bench, settings: LikelihoodTable) -> None:
    scores = bench.folder.read_table("scores")
    items = {item.id: number for number, item in enumerate(bench.items)}
    names = [condition.name for condition in bench.conditions]
    metrics = [name for name in LIKELIHOOD_METRICS if name in set(scores.column("metric").to_pylist())]
    values = np.full((len(metrics), len(names), len(items)), np.nan)
    tokens = np.zeros((len(metrics), len(items)), np.int64)
    place = {name: at for at, name in enumerate(names)}, {name: at for at, name in enumerate(metrics)}
    for row in scores.to_pylist():
        condition, metric, item = place[0][row["condition"]], place[1][row["metric"]], items[row["item"]]
        values[metric, condition, item] = row["value"]
        tokens[metric, item] = row["n_tokens"]
    bench.folder.write_table(
        "likelihood", table_of_rows(list(_rows(bench, metrics, names, values, tokens)), LIKELIHOOD)
    )
    found = [
        row for at, metric in enumerate(metrics) for row in _effects(bench, settings, metric, at, names, values[at])
    ]
    bench.folder.write_table("effects", table_of_rows(found, EFFECTS))


def _rows(bench: Bench, metrics: list[str], names: list[str], values: np.ndarray, tokens: np.ndarray) -> Any:
    for c, condition in enumerate(names):
        for i, item in enumerate(bench.items):
            for m, metric in enumerate(metrics):
                if not np.isnan(values[m, c, i]):
                    own = {"condition": condition, "item": item.id, "metric": metric, "n_tokens": int(tokens[m, i])}
                    yield {**bench.names, **own, "value": values[m, c, i], "delta": values[m, c, i] - values[m, 0, i]}


def _effects(
    bench: Bench,
    settings: LikelihoodTable,
    metric: str,
    number: int,
    names: list[str],
    values: Float64[np.ndarray, "conditions items"],
) -> Any:
    margin = settings.margin_of(metric)
    again = next((condition.name for condition in bench.conditions if condition.again), None)
    found = paired_effects(
        values[0],
        {name: values[at] for at, name in enumerate(names) if at},
        np.random.default_rng([bench.spec.seed, number]),
        margin=margin,
        again=again,
        flips=bench.spec.flips,
    )
    for name, effect in found.items():
        row = {**bench.names, "condition": name, "metric": metric, "margin": margin, **asdict(effect)}
        if metric in DESCRIBED:
            row |= dict.fromkeys(("p", "p_again", "p_adjusted", "alpha", "equivalent_p", "mde", "margin", "verdict"))
        yield row
