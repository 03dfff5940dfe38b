"""An activation study: what a condition does to the values behind the MLPs' non-linearities, layer by layer, tested item by item."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from mless.errors import BadFolder, BadStudy
from mless.stats import METRICS, NearZero, can_reject, items_needed, near_zero_of, paired_change
from mless.stats.activations import FACTORS, Counts, TokenStatistics, count_values, levene, metrics_of, token_statistics
from mless.store import ResultFolder
from mless.study.classes import TOKEN_CLASSES, token_classes, token_texts
from mless.study.running import Bench
from mless.study.verdict import random_is_yardstick
from mless.values import Condition, Prompt, condition_of, condition_words, format_numbers

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.capture import Rows
    from mless.study.spec import ActivationsTable

#: Of which tokens a row speaks: all original ones, those of the question, and the classes, which partition the first.
TOKENS: tuple[str, ...] = ("all", "question", *TOKEN_CLASSES)

#: The tables beside activations.parquet.
ITEMS, HISTOGRAMS = "activation_items", "activation_histograms"


def _schema(*fields: tuple[str, Any]) -> pa.Schema:
    import pyarrow as pa

    common = [(name, pa.string()) for name in ("model", "task", "condition")]
    return pa.schema([*common, *fields])


def item_schema() -> pa.Schema:
    """A row per item, layer and set of tokens; null where the item has no such tokens."""
    import pyarrow as pa

    return _schema(
        ("item", pa.string()), ("layer", pa.int32()), ("tokens", pa.string()), ("n_tokens", pa.int32()), ("units", pa.int32()),
        ("threshold", pa.float64()), ("width", pa.float64()), ("median", pa.float64()), ("mad", pa.float64()),
        *((metric, pa.float64()) for metric in METRICS), ("mean", pa.float64()), ("deviation", pa.float64()),
    )  # fmt: skip


def histogram_schema() -> pa.Schema:
    """A row per item and layer: counts of its original tokens' values."""
    import pyarrow as pa

    counts = pa.list_(pa.int64())
    return _schema(
        ("item", pa.string()), ("layer", pa.int32()), ("width", pa.float64()), ("linear", counts), ("zoom", counts),
        ("positive", counts), ("negative", counts), ("zeros", pa.int64()),
    )  # fmt: skip


def change_schema() -> pa.Schema:
    """activations.parquet: a row per condition, layer, set of tokens and metric, against `none`."""
    import pyarrow as pa

    numbers = ("value", "none", "difference", "lo", "hi", "p", "p_adjusted")
    return _schema(
        ("layer", pa.int32()), ("tokens", pa.string()), ("metric", pa.string()), ("scale", pa.string()),
        *((name, pa.float64()) for name in numbers), ("n_items", pa.int32()), ("verdict", pa.string()),
        ("threshold", pa.float64()), ("levene", pa.float64()),
    )  # fmt: skip


class ActivationMeasurement:
    """Reads activations of original tokens, keeps numbers per token while a layer runs and per item afterwards."""

    def __init__(self, table: ActivationsTable) -> None:
        self.table = table
        self.measures = "activations"
        self.unit_tables: tuple[str, ...] = (ITEMS, HISTOGRAMS)
        self.tables: tuple[str, ...] = ("prompts", *self.unit_tables, "activations")
        self.unit_format = 1
        self.implementations = {"activations": "forward hooks", "threshold": "exact, by counting float32 bits"}
        self._near: dict[int, NearZero] = {}
        self._sets: dict[tuple[int, ...], dict[str, np.ndarray]] = {}

    # ---- before anything is stored

    def prove(self, bench: Bench) -> dict[str, Any]:
        from mless.proofs import prove_reading

        if bench.spec.heads.strip() != "all":
            raise BadStudy(
                f"activations belong to a layer and not to its heads, got --heads {bench.spec.heads}; leave it out"
            )
        proofs = prove_reading(bench.model, bench.prompts[bench.conditions[-1].name][0], bench.layers)
        bench.told.say("proofs hold: reading the activations changes no bit of the output, and leaves nothing behind")
        self._near = _stored_near_zero(bench) or self._find_near_zero(bench)
        return proofs

    def _find_near_zero(self, bench: Bench) -> dict[int, NearZero]:
        """τ of every layer from all `none` prompts: it must be known before the first value is counted."""
        from mless.capture import read_activations

        prompts, size = bench.prompts["none"], bench.spec.batch_size
        done = 0

        def stream(take: Any) -> None:
            nonlocal done

            def hand_on(_: int, rows: Rows) -> None:
                for block in rows.blocks():
                    take(rows.layer, block)

            for first in range(0, len(prompts), size):
                batch = prompts[first : first + size]
                read_activations(bench.model, batch, layers=bench.layers, take=hand_on)
                done += len(batch)
                bench.told.step("threshold of near zero, none", done, 4 * len(prompts))

        return near_zero_of(bench.layers, stream)

    # ---- one prompt

    def units(self, bench: Bench, condition: Condition, batch: Sequence[Prompt]) -> Iterator[dict[str, pa.Table]]:
        from mless.capture import read_activations

        found: list[list[dict[str, Any]]] = [[] for _ in batch]
        counted: list[list[dict[str, Any]]] = [[] for _ in batch]

        def take(row: int, rows: Rows) -> None:
            prompt = batch[row]
            near = self._near[rows.layer]
            names = {**bench.names, "condition": condition.name, "item": prompt.item, "layer": rows.layer}
            measured, counts, deviation = _measure(rows, near)
            about = {"threshold": near.threshold, "width": near.width, "median": near.median, "mad": near.mad}
            for tokens, chosen in self._token_sets(bench, prompt).items():
                metrics, moments = metrics_of(measured, chosen)
                known = {"n_tokens": int(chosen.sum()), "units": measured.units, "mean": moments.mean}
                spread = {"deviation": deviation if tokens == "all" else None}
                found[row].append({**names, "tokens": tokens, **known, **about, **metrics, **spread})
            parts = {name: getattr(counts, name).tolist() for name in ("linear", "zoom", "positive", "negative")}
            counted[row].append({**names, "width": near.width, **parts, "zeros": counts.zeros})

        read_activations(bench.model, batch, layers=bench.layers, take=take)
        for row in range(len(batch)):
            yield {ITEMS: _table(found[row], item_schema()), HISTOGRAMS: _table(counted[row], histogram_schema())}

    def _token_sets(self, bench: Bench, prompt: Prompt) -> dict[str, np.ndarray]:
        """Which of the prompt's original tokens belong to each set; the same for both prompts of a pair."""
        original = prompt.original
        ids = tuple(prompt.token_ids[i] for i in original)
        if ids not in self._sets:
            classes = np.array(token_classes(token_texts(bench.model.tokenizer, ids)))
            asked = np.isin(original, prompt.positions("question"))
            every = {"all": np.ones(len(ids), bool), "question": asked}
            self._sets[ids] = every | {name: classes == name for name in TOKEN_CLASSES}
        return self._sets[ids]

    # ---- all of them

    def finish(self, bench: Bench) -> None:
        stored = bench.folder.read_table(ITEMS)
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
        bench.folder.write_table("activations", _table(rows, change_schema()))


def _measure(rows: Rows, near: NearZero) -> tuple[TokenStatistics, Counts, float]:
    """Each token's statistics, the histogram of all, and their mean absolute deviation from the mean of all."""
    parts: list[TokenStatistics] = []
    counts: Counts | None = None
    for block in rows.blocks():
        parts.append(token_statistics(block, [factor * near.threshold for factor in FACTORS]))
        here = count_values(block, near.width)
        counts = here if counts is None else counts + here
    assert counts is not None  # a prompt has tokens
    measured = TokenStatistics.joined(parts)
    centre = float(measured.mean.mean())
    away = sum(float(np.abs(block.astype(np.float64) - centre).sum()) for block in rows.blocks())
    return measured, counts, away / (len(measured) * measured.units)


def _stored_near_zero(bench: Bench) -> dict[int, NearZero] | None:
    """What a killed run had found: its units carry it, so a resumed one counts by the very same numbers."""
    keys = bench.keys()
    for key in keys:
        if bench.folder.has_unit((ITEMS,), key):
            rows = bench.folder.read_unit(ITEMS, key).to_pylist()
            names = ("median", "mad", "threshold", "width")
            found = {
                row["layer"]: NearZero(*(row[name] for name in names)) for row in rows if row.get("tokens") == "all"
            }
            return found if set(bench.layers) <= found.keys() else None
    return None


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value

    return pa.Table.from_pylist([{name: plain(value) for name, value in row.items()} for row in rows], schema)


# ---- in words ------------------------------------------------------------------------------------------------------------


def read_changes(path: Path, **where: Any) -> list[dict[str, Any]]:
    """Rows of activations.parquet, those whose columns have the values given."""
    rows: list[dict[str, Any]] = (
        ResultFolder(path)
        .read_table("activations", filters=[(name, "==", value) for name, value in where.items()] or None)
        .to_pylist()
    )
    return rows


def activation_lines(path: Path) -> list[str]:
    """A line per condition, then what it means for the published claim, then what limits it."""
    about = ResultFolder(path).manifest() or {}
    conditions: dict[str, dict[str, Any]] = about["conditions"]
    layers: list[int] = about["layers"]
    rows = read_changes(path, tokens="all")
    if not rows and len(conditions) > 1:
        raise BadFolder(f"{path}: activations.parquet holds no rows; run the study again")
    found = {(row["condition"], row["metric"], row["layer"]): row for row in rows}
    items = len(about["items"])
    lines = [
        f"{about['model']['label']}, {items} item{'s' if items != 1 else ''} of {about['task']}, {about['prompt']} prompts; activations of the original "
        "tokens with each condition against none"
    ]
    shown = [name for name in conditions if name != "none"]
    for name in shown:
        lines.append(
            f"{name} ({condition_words(condition_of(name, conditions[name]))}): {_sentence(found, name, layers)}"
        )
    if "mless" in conditions:
        lines.append(_claim(found, conditions, layers))
    for name in shown:
        changed = [layer for layer in (conditions[name].get("arm") or {}).get("layers", ()) if layer in layers]
        if changed and conditions[name]["kind"] == "none":
            lines.append(_arm(found, name, changed[0]))
    return (
        lines + _limits(rows, layers) + _class_limits(read_changes(path, layer=layers[0], metric="near_zero"), layers)
    )


Found = Mapping[tuple[str, str, int], Mapping[str, Any]]


def _sentence(found: Found, name: str, layers: Sequence[int]) -> str:
    first = layers[0]
    parts = [
        f"layer {first}: near-zero share {_share(found[name, 'near_zero', first])}; {_ratio(found[name, 'variance', first], 'variance')}"
    ]
    for metric, words in (("near_zero", "near-zero"), ("variance", "variance")):
        for verdict in ("drops", "rises"):
            named = [layer for layer in layers[1:] if found[name, metric, layer]["verdict"] == verdict]
            if named:
                parts.append(f"{words} {verdict} in layer{'s' if len(named) > 1 else ''} {format_numbers(named)}")
    others = [
        layer
        for layer in layers[1:]
        if all(found[name, metric, layer]["verdict"] == "unchanged" for metric in ("near_zero", "variance"))
    ]
    if others:
        parts.append(f"neither changes in layer{'s' if len(others) > 1 else ''} {format_numbers(others)}")
    return "; ".join(parts)


def _share(row: Mapping[str, Any]) -> str:
    """``4.12 → 3.95 %, −0.17 points [−0.20, −0.14], p 0.001 (drops)``."""
    if row["difference"] is None:
        return "undefined"
    interval = f" [{_signed(100 * row['lo'])}, {_signed(100 * row['hi'])}]" if row["lo"] is not None else ""
    return f"{100 * row['none']:.2f} → {100 * row['value']:.2f} %, {_signed(100 * row['difference'])} points{interval}{_p(row)} ({row['verdict']})"


def _ratio(row: Mapping[str, Any], what: str) -> str:
    """``variance × 1.03 [1.02, 1.04], p 0.001 (unchanged)``."""
    if row["difference"] is None:
        return f"{what} undefined"
    interval = f" [{math.exp(row['lo']):.3f}, {math.exp(row['hi']):.3f}]" if row["lo"] is not None else ""
    return f"{what} × {math.exp(row['difference']):.3f}{interval}{_p(row)} ({row['verdict']})"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _p(row: Mapping[str, Any]) -> str:
    p = row["p_adjusted"]
    return "" if p is None else ", p < 0.001" if p < 0.001 else f", p {p:.3f}"


def _claim(found: Found, conditions: Mapping[str, Mapping[str, Any]], layers: Sequence[int]) -> str:
    """The published claim: with filler before the question, layer 1's near-zero values are rarer and its variance is larger."""
    if conditions["mless"]["placement"] != "before-question":
        return f"The published claim is about filler before the question; this one stands {conditions['mless']['placement']}."
    if 1 not in layers:
        return "The published claim is about layer 1, which was not measured."
    parts = [
        _half(found["mless", "near_zero", 1], "near-zero values rarer", "drops"),
        _half(found["mless", "variance", 1], "variance up", "rises"),
    ]
    words = {word for word, _ in parts}
    said = (
        "holds here"
        if words == {"holds"}
        else "holds here in direction, but only just"
        if words <= {"holds", "small"}
        else "does not hold here"
        if words <= {"opposite", "unchanged"}
        else "is undecided here"
        if "undecided" in words
        else "holds here by half"
    )
    line = f"The published claim (layer 1: near-zero values rarer, variance up) {said}: {'; '.join(text for _, text in parts)}."
    also = [
        layer
        for layer in layers
        if layer > 1
        and _half(found["mless", "near_zero", layer], "", "drops")[0] == "holds"
        and _half(found["mless", "variance", layer], "", "rises")[0] == "holds"
    ]
    if also:
        line += f" It holds in layer{'s' if len(also) > 1 else ''} {format_numbers(also)} too."
    if random_is_yardstick("mless", conditions):
        near, spread = (found["random", metric, 1] for metric in ("near_zero", "variance"))
        if near["lo"] is not None and spread["lo"] is not None:
            line += (
                f" Natural text of the same length there: near-zero share {_signed(100 * near['difference'])} points "
                f"[{_signed(100 * near['lo'])}, {_signed(100 * near['hi'])}], variance × {math.exp(spread['difference']):.3f} "
                f"[{math.exp(spread['lo']):.3f}, {math.exp(spread['hi']):.3f}]."
            )
    return line


def _half(row: Mapping[str, Any], words: str, wanted: str) -> tuple[str, str]:
    """One half of the claim. It *holds* with the interval beyond the margin and p at most 0.05 after Holm; *small*: p alone."""
    if row["difference"] is None or row["lo"] is None or row["p_adjusted"] is None:
        return "undecided", f"{words}: undecided"
    rejected = row["p_adjusted"] <= 0.05
    if rejected and row["verdict"] == wanted:
        return "holds", f"{words}: yes"
    if rejected and (row["difference"] < 0) == (wanted == "drops"):
        return "small", f"{words}: yes, but not by a margin that matters"
    if rejected:
        return "opposite", f"{words}: no, the opposite{', by little' if row['verdict'] == 'unchanged' else ''}"
    if row["verdict"] == "unchanged":
        return "unchanged", f"{words}: no, unchanged"
    return "undecided", f"{words}: undecided"


def _arm(found: Found, name: str, layer: int) -> str:
    """ARM beside what it is to imitate."""
    told: list[str] = []
    for condition in (name, "mless"):
        near, variance = (found.get((condition, metric, layer)) for metric in ("near_zero", "variance"))
        if near is None or variance is None or not near["none"] or variance["difference"] is None:
            continue
        told.append(
            f"{condition} has near-zero share × {near['value'] / near['none']:.2f} and variance × {math.exp(variance['difference']):.2f}"
        )
    return f"ARM beside filler, layer {layer}: {'; '.join(told) or 'undefined'}."


def _class_limits(rows: Sequence[Mapping[str, Any]], layers: Sequence[int]) -> list[str]:
    """Classes of tokens that no or hardly any item has; said where the items as such would do."""
    items = {row["tokens"]: row["n_items"] for row in rows}
    if not can_reject(items.get("all", 0), len(layers)):
        return []
    few = [
        f"{name} {items[name]}" for name in TOKEN_CLASSES if name in items and not can_reject(items[name], len(layers))
    ]
    if not few:
        return []
    return [
        f"Items with such tokens: {', '.join(few)}; of {'this class' if len(few) == 1 else 'these classes'} no p could come out small after Holm over "
        f"{len(layers)} layer{'s' if len(layers) > 1 else ''} (it takes {items_needed(len(layers))})."
    ]


def _limits(rows: Sequence[Mapping[str, Any]], layers: Sequence[int]) -> list[str]:
    items = max((row["n_items"] for row in rows), default=0)
    lines: list[str] = []
    if rows and items < 2:
        lines.append("An interval and a test take at least 2 items; here nothing can be decided.")
    elif rows and not can_reject(items, len(layers)):
        lines.append(
            f"{items} items are too few for the sign-flip test ever to reject after Holm over {len(layers)} layers (it takes "
            f"{items_needed(len(layers))}); the intervals stand, the p-values cannot."
        )
    zero = sorted({row["layer"] for row in rows if row["threshold"] == 0})
    if zero:
        lines.append(
            f"In layer{'s' if len(zero) > 1 else ''} {format_numbers(zero)} half of the activations are exactly 0, so τ is 0 and near zero means zero."
        )
    return lines
