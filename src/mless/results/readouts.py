"""What can be compared over models: the one table of readouts. Each reads a condition's effect, with its standard error, from a folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
from jaxtyping import Float64

from mless import stats
from mless.errors import BadFolder, BadStudy
from mless.registry import Registry
from mless.results.answers import metric_shown
from mless.results.nats import LIKELIHOOD_METRICS, unit_of_change
from mless.results.reading import StoredStudy
from mless.results.schemas import Accuracy, columns_of, plain
from mless.stats.intervals import mean_intervals, moments, student
from mless.values import format_numbers

#: Its functions are made when it is imported, so no type checker knows them.
pc: Any = pyarrow.compute

#: Fields of a study's own table that say what computed or fetched, not what was measured.
CIRCUMSTANCES = frozenset(
    "engine mode slots tensor_parallel script base_url concurrency timeout retries margin again k dev_share batch_size".split()
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How an effect is written. A `ratio` is computed as a logarithm; anything else is shown times `factor`, in its unit. `meaning` is a
    sentence: what its values mean.
    """

    words: str
    unit: str = ""
    ratio: bool = False
    factor: float = 1.0
    meaning: str = ""

    @property
    def change(self) -> bool:
        """Whether it is a difference from none, written with its sign."""
        return self.words.startswith("Δ")

    @property
    def nothing(self) -> float:
        """What is shown where there is no effect."""
        return 1.0 if self.ratio else 0.0

    def shown(self, value: float) -> float:
        if not self.ratio:
            return value * self.factor
        return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Reading:
    """A condition's effect in one folder, as it is computed with: of a ratio, the logarithm."""

    value: float
    error: float
    lo: float
    hi: float
    n: int


@dataclass(frozen=True, slots=True)
class Readout:
    """A row of the table. `read` takes the folder, the condition, the metric and the layer (None: all that were measured).

    `measured` is what a study has to have measured. `metrics` names those that a folder has for a condition, the usual one first. `own` is
    the study's table whose settings have to agree between folders, `fields` are further fields of the study.
    """

    measured: str
    read: Callable[[StoredStudy, str, str, int | None], Reading]
    metrics: Callable[[StoredStudy, str], list[str]]
    scale: Callable[[str], Scale]
    own: str | None = None
    fields: tuple[str, ...] = ()
    by_layer: bool = False


# ---- attention -------------------------------------------------------------------------------------------------------


def _lambda(folder: StoredStudy, condition: str, metric: str, layer: int | None) -> Reading:
    """log λ: of a layer the mean of its heads' λ, of the model the mean over all heads."""
    shares = _grid(folder, "shares", "retained", condition, layer, heads=True)
    with np.errstate(divide="ignore"):
        logs = np.log(shares)  # of a question that kept nothing −inf, which the statistics refuse
    found, scores = stats.layer_share(logs)
    error = float(moments(scores[:, None])[1][0])
    value, lo, hi = (math.log(end) if end > 0 else -math.inf for end in (found.value, found.lo, found.hi))
    return Reading(value, error, lo, hi, found.n)


def _epsilon(folder: StoredStudy, condition: str, metric: str, layer: int | None) -> Reading:
    return _mean_over_layers(_grid(folder, "shares", "epsilon", condition, layer, heads=False))


# ---- activations -----------------------------------------------------------------------------------------------------


def _activations(folder: StoredStudy, condition: str, metric: str, layer: int | None) -> Reading:
    """The change of a metric over all original tokens: a difference of shares, or the log of a ratio of sizes."""
    after, before = (
        _grid(folder, "activation_items", metric, name, layer, heads=False) for name in (condition, "none")
    )
    if stats.METRICS[metric] == "difference":
        return _mean_over_layers(after - before)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _mean_over_layers(np.where((after > 0) & (before > 0), np.log(after / before), np.nan))


_SIZES = {"l1": "L1 norm", "l2": "L2 norm", "gini": "Gini coefficient", "variance": "variance", "kurtosis": "kurtosis"}


def _activations_scale(metric: str) -> Scale:
    if metric.startswith("near_zero"):
        more = metric.removeprefix("near_zero").replace("_half", " (τ/2)").replace("_double", " (2τ)")
        return Scale(f"Δ share of activations near zero{more}", "points", factor=100.0)
    if stats.METRICS[metric] == "difference":
        return Scale(f"Δ {_SIZES[metric]} of activations")
    return Scale(f"{_SIZES[metric]} of activations, with / without", ratio=True)


# ---- answers ---------------------------------------------------------------------------------------------------------


def _accuracy_rows(folder: StoredStudy, condition: str) -> list[Accuracy]:
    where = (pc.field("condition") == condition) & (pc.field("split") == "all")
    rows = folder.table("accuracy", columns_of(Accuracy, newer=False), where).to_pylist()
    return [Accuracy(**{key: plain(value) for key, value in row.items()}) for row in rows]


def _accuracy(folder: StoredStudy, condition: str, metric: str, layer: int | None) -> Reading:
    row = next(row for row in _accuracy_rows(folder, condition) if row.metric == metric)
    wide = 1.959963984540054
    own = folder.study.get("accuracy")
    related = isinstance(own, dict) and bool(cast("dict[str, Any]", own).get("cluster_field"))
    if related or (row.samples or 1) > 1:
        # These intervals are resampled, and as wide as Student's t has them.
        wide = float(student(np.array([row.n]), 0.95)[0])
    return _from_interval(row.delta, row.delta_lo, row.delta_hi, row.n, wide)


def _accuracy_metrics(folder: StoredStudy, condition: str) -> list[str]:
    rows = [row for row in _accuracy_rows(folder, condition) if row.delta is not None]
    first = metric_shown(rows, folder.conditions.get(condition, {}))
    return list(dict.fromkeys([*([first] if first else []), *(row.metric for row in rows)]))


# ---- likelihood ------------------------------------------------------------------------------------------------------

#: Which metric is taken where none is named: of the answer beside others, since nats a token of a solution are of other tokens in each model.
_USUAL = ("contrast", "solution", "answer")


def _likelihood(folder: StoredStudy, condition: str, metric: str, layer: int | None) -> Reading:
    """From the items themselves: of skewed items the stored interval is not as wide above as below, so it shows no standard error."""
    where = (pc.field("condition") == condition) & (pc.field("metric") == metric)
    change = folder.table("likelihood", ["delta"], where)["delta"].to_numpy().astype(np.float64)
    return _mean_over_layers(change[:, None])


def _likelihood_metrics(folder: StoredStudy, condition: str) -> list[str]:
    rows = folder.table("effects", ["metric", "delta"], pc.field("condition") == condition).to_pylist()
    there = [str(row["metric"]) for row in cast("list[dict[str, Any]]", rows) if row["delta"] is not None]
    return [*(name for name in _USUAL if name in there), *(name for name in there if name not in _USUAL)]


def _likelihood_scale(metric: str) -> Scale:
    return Scale(f"Δ {metric}", unit_of_change(metric), factor=100.0 if LIKELIHOOD_METRICS[metric].share else 1.0)


# ---- the table -------------------------------------------------------------------------------------------------------


def _only(name: str) -> Callable[[StoredStudy, str], list[str]]:
    return lambda folder, condition: [name]


def _constant(scale: Scale) -> Callable[[str], Scale]:
    return lambda metric: scale


_OF_ATTENTION = ("layers", "heads")
_EPSILON = Scale(
    "dilution exponent ε", meaning="At 0 the question's tokens lose nothing, at 1 as much as an even spread loses."
)
_SHARE = Scale("retained share λ", ratio=True, meaning="At 1 nothing changed, at 0.8 the question's tokens keep 80 %.")
READOUTS: Registry[Readout] = Registry(
    "readouts",
    "readout",
    {
        # ε first: it hardly depends on the prompts' length, so it compares models best
        "epsilon": Readout(
            "attention", _epsilon, _only("epsilon"), _constant(_EPSILON), fields=_OF_ATTENTION, by_layer=True
        ),
        "lambda": Readout(
            "attention", _lambda, _only("lambda"), _constant(_SHARE), fields=_OF_ATTENTION, by_layer=True
        ),
        "activations": Readout(
            "activations",
            _activations,
            lambda folder, condition: list(stats.METRICS),
            _activations_scale,
            own="activations",
            fields=("layers",),
            by_layer=True,
        ),
        "accuracy": Readout(
            "accuracy", _accuracy, _accuracy_metrics, lambda metric: Scale(f"Δ {metric}", "points", factor=100.0), own="accuracy"
        ),
        "likelihood": Readout("likelihood", _likelihood, _likelihood_metrics, _likelihood_scale, own="likelihood"),
    },
    wants="an mless.results.readouts.Readout",
    fits=lambda one: isinstance(one, Readout),
)  # fmt: skip


# ---- numbers by item -------------------------------------------------------------------------------------------------


def _grid(
    folder: StoredStudy, table: str, column: str, condition: str, layer: int | None, *, heads: bool
) -> Float64[np.ndarray, "items places"]:
    """A number by item, and by layer (and head, where `heads`); NaN where it is not defined."""
    where = pc.field("condition") == condition
    if table == "shares":
        where = (
            where & (pc.field("queries") == "original") & ((pc.field("head") > 0) if heads else (pc.field("head") == 0))
        )
    else:
        where = where & (pc.field("tokens") == "all")
    rows = folder.table(table, ["item", "layer", *(["head"] if heads else []), column], where)
    places: Any = np.stack([rows[name].to_numpy() for name in ("layer", "head") if name in rows.column_names], axis=1)
    if layer is not None:
        kept = places[:, 0] == layer
        if not kept.any():
            raise BadStudy(
                f"{folder.path} holds no layer {layer} of {folder.label}: it holds {format_numbers(np.unique(places[:, 0]).tolist()) or 'none'} "
                "(numbered from 1); choose another with --layer, or run its study with that layer"
            )
        rows, places = rows.filter(pa.array(kept)), places[kept]
    if not rows.num_rows:
        raise BadFolder(f"{folder.path}: {table}.parquet has no row of condition {condition!r}; run the study again")
    item = pc.index_in(rows["item"], value_set=pa.array(folder.items, pa.string())).to_numpy()
    found, at = np.unique(places, axis=0, return_inverse=True)
    grid = np.full((len(folder.items), len(found)), np.nan)
    grid[item, at.reshape(-1)] = rows[column].to_numpy().astype(np.float64)
    return grid


def _mean_over_layers(values: Float64[np.ndarray, "items layers"]) -> Reading:
    """The mean over layers (or over one number), item by item; an item needs every layer that is defined for any item."""
    present = ~np.isnan(values).all(axis=0)
    by_item = values[:, present].mean(axis=1) if present.any() else np.full(len(values), np.nan)
    found = mean_intervals(by_item[:, None])
    error = float(moments(by_item[:, None])[1][0])
    return Reading(float(found.mean[0]), error, float(found.lo[0]), float(found.hi[0]), int(found.n[0]))


def _from_interval(delta: float | None, lo: float | None, hi: float | None, n: int, wide: float) -> Reading:
    """The standard error of an effect whose 95 % interval reaches `wide` of them either way."""
    value, low, high = (math.nan if one is None else float(one) for one in (delta, lo, hi))
    return Reading(value, (high - low) / (2 * wide), low, high, n)


def readouts_of(measured: str) -> Sequence[str]:
    """The names of what can be compared of such a study, the usual one first."""
    return [name for name in READOUTS if READOUTS.get(name).measured == measured]
