"""From units of the affine map to its tables: the fit, what it leaves, and where the picture's points lie (docs/affine.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mless import stats
from mless.errors import BadFolder
from mless.results.schemas import (
    AFFINE,
    AFFINE_ITEMS,
    AFFINE_POINTS,
    AFFINE_SCALARS,
    FORMS,
    lists,
    matrix,
    table_of_rows,
)
from mless.study.bench import Bench
from mless.study.spec import AffineTable
from mless.values import Condition

if TYPE_CHECKING:
    from mless.capture import Displacement

_VECTORS = ("output", "displacement", "direction")
_KEPT = ("before", "after", "measured")


# ---- units -----------------------------------------------------------------------------------------------------------


def _lists(values: np.ndarray | None, kind: pa.DataType) -> pa.Array:
    return pa.array([], pa.list_(kind)) if values is None else lists(values, kind)


def item_table(found: Displacement | None, names: Mapping[str, str]) -> pa.Table:
    """One row per layer and head: the sums over the item's tokens."""
    count = 0 if found is None else len(found.layers) * len(found.heads)
    columns = _place(found, names, 1)
    columns["n_tokens"] = pa.array([0 if found is None else found.tokens] * count, pa.int32())
    for name in AFFINE_SCALARS:
        columns[name] = pa.array(np.zeros(0) if found is None else found.sums[name].ravel(), pa.float64())
    for name in _VECTORS:
        columns[name] = _lists(None if found is None else getattr(found, name).reshape(count, -1), pa.float64())
    return pa.table(columns)


def vector_table(found: Displacement | None, names: Mapping[str, str]) -> pa.Table:
    """One row per layer, head and token kept."""
    points = 0 if found is None else len(found.points)
    columns = _place(found, names, points)
    count = len(columns["layer"])
    tokens = np.zeros(0, np.int32) if found is None or not points else np.tile(found.points, count // points)
    columns["token"] = pa.array(tokens.astype(np.int32))
    for name in _KEPT:
        values = None if found is None or not points else getattr(found, name).reshape(count, -1)
        columns[name] = _lists(values, pa.float32())
    return pa.table(columns)


def _place(found: Displacement | None, names: Mapping[str, str], each: int) -> dict[str, pa.Array]:
    layers, heads = (found.layers, found.heads) if found is not None else ([], [])
    grid = [(layer, head) for layer in layers for head in heads for _ in range(each)]
    said = {"model": names["model"], "task": names["task"]}
    said |= (
        {"condition": found.prompt.condition, "item": found.prompt.item}
        if found is not None
        else {"condition": "", "item": ""}
    )
    columns = {name: pa.array([value] * len(grid), pa.string()) for name, value in said.items()}
    columns["layer"] = pa.array([layer for layer, _ in grid], pa.int32())
    columns["head"] = pa.array([head for _, head in grid], pa.int32())
    return columns


# ---- what is made of them --------------------------------------------------------------------------------------------


def _read(
    bench: Bench, name: str, condition: Condition, number: int, vectors: Sequence[str], width: int | None
) -> pa.Table:
    """A unit's table. Its vectors are as wide as those of the others, or as the first one where there is no `width` yet."""
    table = bench.read_unit(name, condition.name, number)
    for column in vectors if table.num_rows else ():
        lengths = [len(values) for values in table.column(column)]
        width = lengths[0] if width is None else width
        if set(lengths) != {width}:
            raise BadFolder(
                f"{bench.folder.path}: the unit of item {number + 1} under {condition.name!r} has vectors of other lengths than the others in "
                f"{column!r} (expected {width}); remove its file under units/{name} and run the same command again"
            )
    return table


@dataclass(frozen=True)
class _Pooled:
    """A condition's items, read twice, one at a time: first for the fit and the mean direction, then for the residuals."""

    condition: Condition
    fitted: np.ndarray
    fit: stats.AffineMap
    mean_move: np.ndarray
    #: By name, items × heads of all layers in order.
    sums: dict[str, np.ndarray]

    @staticmethod
    def read(bench: Bench, condition: Condition, fitted: np.ndarray, width: int | None) -> _Pooled:
        def unit(number: int) -> pa.Table:
            return _read(bench, "affine_items", condition, number, _VECTORS, width)

        total: dict[bool, stats.AffineSums] = {}
        direction: Any = 0.0
        for number, half in enumerate(fitted):
            table = unit(number)
            width = matrix(table, "direction").shape[1]
            sums = _affine_sums(table)
            total[bool(half)] = total[bool(half)] + sums if bool(half) in total else sums
            direction = direction + matrix(table, "direction")
        every = total[False] + total[True] if len(total) == 2 else next(iter(total.values()))
        # A single item cannot be split into a fitted and a scored half.
        nothing = every.n * np.nan
        fit = stats.fit_affine(total[True]) if True in total else stats.AffineMap(nothing, every.output * np.nan)
        found: dict[str, list[np.ndarray]] = {}
        for number in range(len(fitted)):
            table = unit(number)
            own = matrix(table, "direction")
            item = {name: table.column(name).to_numpy() for name in (*AFFINE_SCALARS, "n_tokens")}
            item |= {
                "left_constant": stats.affine_residual(fit, _affine_sums(table)),
                "directions": (own * own).sum(-1),
                "along": (own * direction).sum(-1),
            }
            for name, values in item.items():
                found.setdefault(name, []).append(values)
        with np.errstate(invalid="ignore"):
            mean_move = every.displacement / every.n[:, None]
        return _Pooled(condition, fitted, fit, mean_move, {name: np.stack(rows) for name, rows in found.items()})

    def item_table(self, bench: Bench) -> pa.Table:
        """What each item says of each head by itself."""
        n = np.where(self.sums["n_tokens"] > 0, self.sums["n_tokens"], np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = {
                "lambda": np.exp(self.sums["log_lambda"] / n),
                "kept": np.exp(self.sums["log_kept"] / n),
                "moves": self.sums["moves"],
                "outputs": self.sums["outputs"],
                "r2_constant": 1 - self.sums["left_constant"] / self.sums["moves"],
                **{form: 1 - self.sums[left] / self.sums["moves"] for form, left in FORMS.items()},
                "position_share": self.sums["moves_position"] / self.sums["moves"],
            }
        places = [(layer, head) for layer in bench.layers for head in bench.heads]
        rows = [
            {
                **bench.names,
                "condition": self.condition.name,
                "item": item.id,
                "layer": layer,
                "head": head,
                "half": "fit" if self.fitted[k] else "score",
                "n_tokens": self.sums["n_tokens"][k, h],
                **{name: array[k, h] for name, array in values.items()},
            }
            for k, item in enumerate(bench.items)
            for h, (layer, head) in enumerate(places)
        ]
        return table_of_rows(rows, AFFINE_ITEMS)

    def rows(self, bench: Bench, table: AffineTable) -> list[dict[str, Any]]:
        """A row per head and, as head 0, per layer: a layer's sums are its heads' together, its λ their geometric mean."""
        shape = (len(self.fitted), len(bench.layers), len(bench.heads))
        by_head = {name: values.reshape(shape[0], -1, 1) for name, values in self.sums.items()}
        by_layer = {name: values.reshape(shape) for name, values in self.sums.items()}
        every = [(layer, 0) for layer in bench.layers] + [
            (layer, head) for layer in bench.layers for head in bench.heads
        ]
        parts = [self._columns(bench, table, groups) for groups in (by_layer, by_head)]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        scale = self.fit.scale.reshape(shape[1:])
        with np.errstate(invalid="ignore", divide="ignore"):
            size = np.sqrt(self.sums["outputs"].sum(0) / self.sums["n_tokens"].sum(0))
            shift = (np.linalg.norm(self.fit.shift, axis=-1) / size).reshape(shape[1:])
        columns["lambda_constant"] = np.concatenate([scale.mean(1), scale.ravel()])
        columns["sigma_constant"] = np.concatenate([shift.mean(1), shift.ravel()])
        return [
            {
                **bench.names,
                "condition": self.condition.name,
                "layer": layer,
                "head": head,
                **{name: values[n] for name, values in columns.items()},
            }
            for n, (layer, head) in enumerate(every)
        ]

    def _columns(self, bench: Bench, table: AffineTable, groups: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Columns of rows that are groups of heads: items × rows × heads in, one value per row out."""
        tokens = groups["n_tokens"].max(-1)
        n = np.where(tokens > 0, tokens, np.nan)[..., None]
        pooled = {name: values.sum(-1) for name, values in groups.items()}
        moves = pooled["moves"]
        scored = np.where(self.fitted[:, None], np.nan, moves)
        columns: dict[str, np.ndarray] = {}

        def put(name: str, found: stats.Intervals) -> None:
            columns.update({name: found.value, f"{name}_lo": found.lo, f"{name}_hi": found.hi})

        for form, left in FORMS.items():
            put(form, stats.explained(pooled[left], moves))
        constant = stats.explained(pooled["left_constant"], scored)
        put("r2_constant", constant)
        columns["skewed"] = constant.skewed
        put("position_share", stats.ratio_of_sums(pooled["moves_position"], moves))
        size = stats.ratio_of_sums(moves, pooled["outputs"])
        put("displacement", stats.Intervals(np.sqrt(size.value), np.sqrt(size.lo), np.sqrt(size.hi), size.skewed))
        put("cosine", stats.cosine_across_items(groups["directions"], groups["along"], groups["directed"]))
        logs = {name: (groups[f"log_{name}"] / n).mean(-1) for name in ("lambda", "kept")}
        shares = {name: _shares(values) for name, values in logs.items()}
        for name, found in shares.items():
            put(name, found)
        columns["lambda_skewed"] = shares["lambda"].skewed
        # Compared with predicting no change: is the residual smaller? Items that were fitted on have no say.
        with np.errstate(divide="ignore", invalid="ignore"):
            remains = np.log(np.maximum(pooled["left_constant"] / scored, 1e-12))
        rng = np.random.default_rng([bench.spec.seed, 3])
        for prefix, values in (("lambda_", logs["lambda"]), ("", remains)):
            p = stats.sign_flip(values, rng, flips=bench.spec.flips).p
            columns[f"{prefix}p"], columns[f"{prefix}p_adjusted"] = p, stats.holm(p)
        margins, holds = bench.spec.margins_of(), table.holds
        columns["lambda_verdict"] = np.array(
            [margins.verdict(lo, hi) for lo, hi in zip(columns["lambda_lo"], columns["lambda_hi"], strict=True)]
        )
        for name, form in (("verdict", "r2_constant"), ("verdict_measured", "r2_measured")):
            bounds = zip(columns[f"{form}_lo"], columns[f"{form}_hi"], strict=True)
            columns[name] = np.array([stats.fit_verdict(lo, hi, holds) for lo, hi in bounds])
        columns["n_items"] = (moves > 0).sum(0)
        columns["n_scored"] = (scored > 0).sum(0)
        columns["n_tokens"] = tokens.sum(0).astype(int)
        return columns


def _affine_sums(table: pa.Table) -> stats.AffineSums:
    scalars = [table.column(name).to_numpy() for name in ("outputs", "moves", "product")]
    vectors = [matrix(table, name) for name in ("output", "displacement")]
    return stats.AffineSums(table.column("n_tokens").to_numpy().astype(np.float64), *scalars, *vectors)


def _shares(logs: np.ndarray) -> stats.Intervals:
    found = stats.retained_shares(logs)
    value, lo, hi = (np.array([getattr(one, name) for one in found], np.float64) for name in ("value", "lo", "hi"))
    return stats.Intervals(value, lo, hi, np.array([one.skewed for one in found], np.bool_))


# ---- the picture's points --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planes:
    """For every head the two directions its picture shows, and how much of the outputs' variance lies along each.

    x: the mean displacement of the reference condition (the first that inserts something). y: the first principal component of the outputs
    without filler, at right angles to x. All conditions are shown in the same plane.
    """

    axes: np.ndarray
    spread: np.ndarray

    @staticmethod
    def of(shown: _Vectors, mean_move: np.ndarray) -> _Planes:
        heads, _, dim = shown.before.shape
        axes, spread = np.zeros((heads, 2, dim)), np.full((heads, 2), np.nan)
        for h in range(heads if shown.before.shape[1] else 0):
            centred = shown.before[h] - shown.before[h].mean(0)
            length = float(np.linalg.norm(mean_move[h]))
            first = mean_move[h] / length if length > 0 else _component(centred)
            axes[h] = first, _component(centred - np.outer(centred @ first, first))
            whole = float((centred**2).sum())
            if whole > 0:
                spread[h] = [float(((centred @ axis) ** 2).sum()) / whole for axis in axes[h]]
        return _Planes(axes, spread)


def _component(values: np.ndarray) -> np.ndarray:
    """The first principal component; its largest part is positive, so that the picture does not flip from run to run."""
    component = np.linalg.svd(values, full_matrices=False)[2][0]
    return component * (1 if component[np.abs(component).argmax()] >= 0 else -1)


@dataclass(frozen=True)
class _Vectors:
    """A condition's kept tokens, heads of all layers × tokens × dim."""

    condition: str
    items: list[str]
    tokens: np.ndarray
    before: np.ndarray
    after: np.ndarray
    measured: np.ndarray

    @staticmethod
    def read(bench: Bench, condition: Condition, width: int) -> _Vectors:
        heads = len(bench.layers) * len(bench.heads)
        items: list[str] = []
        tokens: list[int] = []
        kept: dict[str, list[np.ndarray]] = {name: [] for name in _KEPT}
        for number, item in enumerate(bench.items):
            table = _read(bench, "affine_points", condition, number, _KEPT, width)
            if not table.num_rows:
                continue
            each = table.num_rows // heads
            items += [item.id] * each
            tokens += table.column("token").to_pylist()[:each]
            for name in _KEPT:
                kept[name].append(matrix(table, name).reshape(heads, each, -1).astype(np.float64))
        arrays = {
            name: np.concatenate(parts, axis=1) if parts else np.zeros((heads, 0, 1)) for name, parts in kept.items()
        }
        return _Vectors(condition.name, items, np.array(tokens, np.int64), **arrays)

    def drawn(self, bench: Bench, planes: _Planes, fit: stats.AffineMap, fitted: np.ndarray) -> pa.Table:
        """Where each point lies in its head's plane: before, after, and where the two forms put it."""
        places = [(layer, head) for layer in bench.layers for head in bench.heads]
        half = dict(zip((item.id for item in bench.items), np.where(fitted, "fit", "score"), strict=True))
        rows: list[dict[str, Any]] = []
        for h, (layer, head) in enumerate(places if self.items else []):
            constant = fit.scale[h] * self.before[h] + fit.shift[h]
            sets = {"": self.before[h], "_after": self.after[h], "_measured": self.measured[h], "_constant": constant}
            flat = {name: values @ planes.axes[h].T for name, values in sets.items()}
            move = self.after[h] - self.before[h]
            with np.errstate(divide="ignore", invalid="ignore"):
                share = ((move @ planes.axes[h].T) ** 2).sum(0) / (move**2).sum()
            for n, item in enumerate(self.items):
                row = {
                    **bench.names,
                    "condition": self.condition,
                    "item": item,
                    "layer": layer,
                    "head": head,
                    "token": self.tokens[n],
                    "half": half[item],
                }
                for name, values in flat.items():
                    row |= {f"x{name}": values[n, 0], f"y{name}": values[n, 1]}
                row |= {
                    "x_outputs": planes.spread[h, 0],
                    "y_outputs": planes.spread[h, 1],
                    "x_moves": share[0],
                    "y_moves": share[1],
                }
                rows.append(row)
        return table_of_rows(rows, AFFINE_POINTS)


# ---- tables ----------------------------------------------------------------------------------------------------------


def judge_table(found: pa.Table, margins: stats.Margins) -> pa.Table:
    """affine.parquet with λ judged by other margins; its numbers stay."""
    verdicts = [
        margins.verdict(math.nan if lo is None else lo, math.nan if hi is None else hi)
        for lo, hi in zip(found.column("lambda_lo").to_pylist(), found.column("lambda_hi").to_pylist(), strict=True)
    ]
    at = found.schema.get_field_index("lambda_verdict")
    return found.set_column(at, found.schema.field(at), pa.array(verdicts, pa.string()))


def _joined(tables: Sequence[pa.Table], order: Mapping[str, int], empty: pa.Table) -> pa.Table:
    """In the conditions' order, whichever came first here."""
    ranked = sorted((one for one in tables if one.num_rows), key=lambda one: order[one.column("condition")[0].as_py()])
    return pa.concat_tables(ranked) if ranked else empty


def write_tables(bench: Bench, table: AffineTable) -> None:
    """Write affine.parquet and the tables of summaries and points, with one condition in memory at a time."""
    items: list[pa.Table] = []
    points: list[pa.Table] = []
    rows: list[dict[str, Any]] = []
    fitted = stats.halves([item.id for item in bench.items], bench.spec.seed)
    planes: _Planes | None = None
    width: int | None = None
    reference = [c for c in bench.conditions if c.inserts] or bench.conditions[1:]
    for condition in [*reference, *(c for c in bench.conditions if c not in reference and c.name != "none")]:
        pooled = _Pooled.read(bench, condition, fitted, width)
        width = pooled.mean_move.shape[1]
        rows += pooled.rows(bench, table)
        items.append(pooled.item_table(bench))
        shown = _Vectors.read(bench, condition, pooled.mean_move.shape[1])
        if planes is None:
            planes = _Planes.of(shown, pooled.mean_move)
        points.append(shown.drawn(bench, planes, pooled.fit, fitted))
    order = {condition.name: n for n, condition in enumerate(bench.conditions)}
    rows.sort(key=lambda row: (order[row["condition"]], row["layer"], row["head"]))
    bench.folder.write_table("affine", table_of_rows(rows, AFFINE))
    bench.folder.write_table("affine_items", _joined(items, order, AFFINE_ITEMS.empty_table()))
    bench.folder.write_table("affine_points", _joined(points, order, AFFINE_POINTS.empty_table()))
