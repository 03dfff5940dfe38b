"""An activation study in words: what each condition changes, layer by layer, and what that means for the published claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mless.errors import BadFolder
from mless.results.folder import ResultFolder
from mless.results.schemas import TOKEN_CLASSES
from mless.results.wording import p_words, random_is_yardstick
from mless.stats import can_reject, items_needed
from mless.values import condition_of, condition_words, counted, named_layers


def activation_lines(path: Path) -> list[str]:
    """A line per condition, then the published claim, then the limits."""
    folder = ResultFolder(path)
    about = folder.about() or {}
    conditions: dict[str, dict[str, Any]] = about["conditions"]
    layers: list[int] = about["layers"]
    rows = _changes(folder, tokens="all")
    if not rows and len(conditions) > 1:
        raise BadFolder(f"{path}: activations.parquet holds no rows; run the study again")
    found = {(row["condition"], row["metric"], row["layer"]): row for row in rows}
    items = len(about["items"])
    lines = [
        f"{about['model']['label']}, {counted(items, 'item')} of {about['task']}, {about['prompt']} prompts; activations of the original "
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
    return lines + _limits(rows, layers) + _class_limits(_changes(folder, layer=layers[0], metric="near_zero"), layers)


def _changes(folder: ResultFolder, **where: Any) -> list[dict[str, Any]]:
    """Rows of activations.parquet whose columns have the values given."""
    filters = [(name, "==", value) for name, value in where.items()]
    rows: list[dict[str, Any]] = folder.read_table("activations", filters=filters).to_pylist()
    return rows


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
                parts.append(f"{words} {verdict} in {named_layers(named)}")
    others = [
        layer
        for layer in layers[1:]
        if all(found[name, metric, layer]["verdict"] == "unchanged" for metric in ("near_zero", "variance"))
    ]
    if others:
        parts.append(f"neither changes in {named_layers(others)}")
    return "; ".join(parts)


def _share(row: Mapping[str, Any]) -> str:
    """``4.12 → 3.95 %, −0.17 points [−0.20, −0.14], p = 0.001 (drops)``."""
    if row["difference"] is None:
        return "undefined"
    interval = f" [{_signed(100 * row['lo'])}, {_signed(100 * row['hi'])}]" if row["lo"] is not None else ""
    return f"{100 * row['none']:.2f} → {100 * row['value']:.2f} %, {_signed(100 * row['difference'])} points{interval}{_p(row)} ({row['verdict']})"


def _ratio(row: Mapping[str, Any], what: str) -> str:
    """``variance × 1.03 [1.02, 1.04], p = 0.001 (unchanged)``."""
    if row["difference"] is None:
        return f"{what} undefined"
    interval = f" [{math.exp(row['lo']):.3f}, {math.exp(row['hi']):.3f}]" if row["lo"] is not None else ""
    return f"{what} × {math.exp(row['difference']):.3f}{interval}{_p(row)} ({row['verdict']})"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _p(row: Mapping[str, Any]) -> str:
    return "" if row["p_adjusted"] is None else f", {p_words(row['p_adjusted'])}"


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
        line += f" It holds in {named_layers(also)} too."
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
    """ARM beside the filler that it should imitate."""
    parts: list[str] = []
    for condition in (name, "mless"):
        near, variance = (found.get((condition, metric, layer)) for metric in ("near_zero", "variance"))
        if near is None or variance is None or not near["none"] or variance["difference"] is None:
            continue
        parts.append(
            f"{condition} has near-zero share × {near['value'] / near['none']:.2f} and variance × {math.exp(variance['difference']):.2f}"
        )
    return f"ARM beside filler, layer {layer}: {'; '.join(parts) or 'undefined'}."


def _class_limits(rows: Sequence[Mapping[str, Any]], layers: Sequence[int]) -> list[str]:
    """Token classes that too few items have, where the number of items itself would be enough."""
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
        f"{counted(len(layers), 'layer')} (it takes {items_needed(len(layers))})."
    ]


def _limits(rows: Sequence[Mapping[str, Any]], layers: Sequence[int]) -> list[str]:
    items = max((row["n_items"] for row in rows), default=0)
    lines: list[str] = []
    if rows and items < 2:
        lines.append("An interval and a test take at least 2 items; here nothing can be decided.")
    elif rows and not can_reject(items, len(layers)):
        lines.append(
            f"{items} items are too few for the sign-flip test ever to reject after Holm over {counted(len(layers), 'layer')} (it takes "
            f"{items_needed(len(layers))}); the intervals stand, the p-values cannot."
        )
    zero = sorted({row["layer"] for row in rows if row["threshold"] == 0})
    if zero:
        lines.append(
            f"In {named_layers(zero)} half of the activations are exactly 0, so τ is 0 and near zero means zero."
        )
    return lines
