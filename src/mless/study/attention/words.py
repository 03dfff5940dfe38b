"""A finished attention study in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mless.results.folder import ResultFolder
from mless.results.wording import random_is_yardstick
from mless.stats import VERDICTS, can_reject, items_needed
from mless.values import condition_of, condition_words, counted, named_layers

#: Mark of an interval that a few items decide (docs/statistics.md).
SKEWED = " (skewed: a few items decide this interval)"

_PLURAL = {"drops": "drop", "rises": "rise", "unchanged": "unchanged", "undecided": "undecided"}


def attention_lines(path: Path) -> list[str]:
    """One line per condition, then the published claim, then the limits."""
    folder = ResultFolder(path)
    rows: list[dict[str, Any]] = folder.read_table("retained", filters=[("queries", "==", "original")]).to_pylist()
    about = folder.about() or {}
    conditions: dict[str, dict[str, Any]] = about["conditions"]
    by_condition = {name: [row for row in rows if row["condition"] == name] for name in conditions if name != "none"}
    has_epsilon = any(row.get("epsilon") is not None for row in rows)
    lines = [
        f"{about['model']['label']}, {counted(len(about['items']), 'item')} of {about['task']}, {about['prompt']} prompts; "
        "retained share λ = attention the question's tokens receive with filler over without"
        + (
            "; ε, the mean over heads of log λ / log λ of an even spread: 0 nothing lost, 1 as a head that spreads evenly"
            if has_epsilon
            else ""
        )
    ]
    for name, mine in by_condition.items():
        yardstick = by_condition["random"] if random_is_yardstick(name, conditions) else []
        lines.append(f"{name} ({condition_words(condition_of(name, conditions[name]))}): {_sentence(mine, yardstick)}")
    if "mless" in by_condition:
        text = by_condition["random"] if random_is_yardstick("mless", conditions) else []
        depth = about["model"].get("layers")
        lines.append(_claim(by_condition["mless"], conditions["mless"]["placement"], text, depth))
    measured, there = len(about.get("heads", [])), about["model"].get("heads", 0)
    if measured < there:
        lines.append(f"Only {measured} of {there} heads were measured; what is said of a layer is said of these.")
    lines += _limits(rows, by_condition)
    return lines


def _sentence(rows: list[dict[str, Any]], yardstick: list[dict[str, Any]]) -> str:
    layers = {row["layer"]: row for row in rows if row["head"] == 0}
    first = min(layers)
    parts = [_layer_in_full(layers[first], rows, yardstick)]
    for verdict in VERDICTS:
        named = [row for layer, row in layers.items() if layer != first and row["verdict"] == verdict]
        if named:
            numbers = [row["layer"] for row in named]
            word = verdict if len(named) == 1 else _PLURAL[verdict]
            where = f"{named_layers(numbers)} {word}"
            sizes = _sizes(named)
            if verdict == "unchanged":
                heads = [row for row in rows if row["layer"] in numbers and row["head"] > 0]
                moved = sum(row["verdict"] in ("drops", "rises") for row in heads)
                sizes += _small_moves(named) + (
                    f"; {moved} of their {len(heads)} heads drop or rise by themselves" if moved else ""
                )
            parts.append(where + (f" ({sizes})" if sizes else ""))
    return "; ".join(parts)


def _sizes(rows: list[dict[str, Any]]) -> str:
    """From the smallest to the largest share, then exponent, of some layers."""
    found = [
        _from_to([row[name] for row in rows if row.get(name) is not None], word)
        for name, word in (("retained", "λ"), ("epsilon", "ε"))
    ]
    return ", ".join(part for part in found if part)


def _from_to(values: list[float], word: str) -> str:
    if not values:
        return ""
    low, high = _short(min(values)), _short(max(values))
    return f"{word} {low}" if low == high else f"{word} {low} to {high}"


def _short(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")


def _interval(row: Mapping[str, Any], name: str, lo: str, hi: str) -> str:
    bounds = f" [{_short(row[lo])}, {_short(row[hi])}]" if row[lo] is not None else ""
    return _short(row[name]) + bounds


def _small_moves(rows: list[dict[str, Any]]) -> str:
    """How many *unchanged* layers still differ from 1 (Holm over the layers), and by how much at most."""
    moved = [row for row in rows if row["p_adjusted"] is not None and row["p_adjusted"] < 0.05]
    if not moved:
        return ""
    most = max(abs(row["retained"] - 1) for row in moved)
    # rounded first: 0.03 × 100 is a little more than 3
    return (
        f"; {len(moved)} of {len(rows)} surely differ from 1, but by less than {math.floor(round(100 * most, 6)) + 1} %"
    )


def _layer_in_full(row: dict[str, Any], rows: list[dict[str, Any]], yardstick: list[dict[str, Any]]) -> str:
    heads = [other for other in rows if other["layer"] == row["layer"] and other["head"] > 0]
    same = sum(other["verdict"] == row["verdict"] for other in heads)
    yardsticks = [f"uniform dilution {row['uniform']:.2f}"] if row["uniform"] is not None else []
    for other in yardstick:
        if other["layer"] == row["layer"] and other["head"] == 0 and other["retained"] is not None:
            exponent = f", ε {_short(other['epsilon'])}" if other.get("epsilon") is not None else ""
            yardsticks.append(f"random text {other['retained']:.2f}{exponent}")
    if row["retained"] is None:
        return f"layer {row['layer']} undecided: the share is undefined (no later token sees the question)"
    exponent = ""
    if row.get("epsilon") is not None:
        exponent = f"ε {_interval(row, 'epsilon', 'epsilon_lo', 'epsilon_hi')}, "
    return (
        f"layer {row['layer']} {row['verdict']}, {same} of {len(heads)} heads: {exponent}"
        f"retained share {_interval(row, 'retained', 'lo', 'hi')}{SKEWED if row.get('skewed') else ''}"
        + (f" ({'; '.join(yardsticks)})" if yardsticks else "")
    )


def _claim(rows: list[dict[str, Any]], placement: str, text: list[dict[str, Any]], there: int | None) -> str:
    """The published claim has two halves: with filler before the question layer 1 drops; from layer 2 on there is no regular change.

    *Holds*: layer 1 drops and every later layer is unchanged. *Holds in part*: layer 1 drops and at most a tenth of the later layers drop or
    rise. An undecided layer could be either; a verdict is given only where that makes no difference.
    """
    if placement != "before-question":
        return f"The published claim is about filler before the question; this one stands {placement}."
    layers = {row["layer"]: row for row in rows if row["head"] == 0}
    if 1 not in layers:
        return "The published claim is about layer 1, which was not measured."
    later = {layer: row["verdict"] for layer, row in layers.items() if layer > 1}
    return f"{_CLAIM} {_halves(layers[1]['verdict'], later, there)}{_text_takes(layers[1], text)}."


_CLAIM = "The published claim (layer 1 drops, later layers do not change)"


def _halves(first: str, later: dict[int, str], there: int | None) -> str:
    """Whether both halves of the claim hold, in words."""
    changed = {verdict: [n for n, v in later.items() if v == verdict] for verdict in ("drops", "rises")}
    open_ones = [n for n, v in later.items() if v == "undecided"]
    count = sum(map(len, changed.values()))
    named = " and ".join(
        f"{named_layers(numbers)} {verdict if len(numbers) == 1 else _PLURAL[verdict]}"
        for verdict, numbers in changed.items()
        if numbers
    )
    of = f"{count} of {len(later)} later layers"
    model, few_of_all = "this model", False
    if later and there is not None and len(later) < there - 1:
        of += f" measured (of {there - 1})"
        model = "the layers measured"
        # More than a tenth of all later layers change, whatever the others do; or it may be only these.
        few_of_all = count * 10 <= there - 1
    if first == "undecided":
        if count * 10 > len(later) and not few_of_all:
            return f"does not hold for this model: its second half does not, {of} change: {named}; layer 1 is undecided"
        return "is undecided for this model: layer 1's interval is too wide to say"
    if first != "drops":
        kept = "layer 1 keeps its attention" if first == "unchanged" else "layer 1's attention on the question rises"
        return f"does not hold for this model: {kept}" + (f"; {of} change too: {named}" if count else "")
    if not later:
        return (
            "was tested in its first half only, which holds for this model: layer 1 drops. No later layer was measured"
        )
    if count * 10 > len(later):
        if few_of_all:
            return f"is open for this model: layer 1 drops, so its first half holds; of its second, {of} change: {named}, and the others may not"
        return f"does not hold for this model: layer 1 drops, so its first half holds; its second does not, {of} change: {named}"
    unsure = f"; undecided: {named_layers(open_ones)}" if open_ones else ""
    if (count + len(open_ones)) * 10 > len(later):
        known = f"{of} change: {named}" if count else f"{of} are known to change"
        return f"is undecided for {model}: layer 1 drops, {known}, but too many are undecided to say{unsure}"
    if count or open_ones:
        known = f"{of} change: {named}" if count else f"{of} change for certain"
        return f"holds in part for {model}: layer 1 drops, {known}{unsure}"
    return f"holds for {model}: layer 1 drops, and {of} change"


def _text_takes(mine: Mapping[str, Any], text: list[dict[str, Any]]) -> str:
    """What natural text in the filler's place takes from layer 1. It separates the filler's effect from that of any text."""
    for row in text:
        if (
            row["layer"] == 1
            and row["head"] == 0
            and mine["verdict"] == row["verdict"] == "drops"
            and row["lo"] <= mine["hi"]
        ):
            # Both measures must agree: λ averages shares over heads, ε their logarithms.
            by_share = row["hi"] < mine["lo"]
            ends = (row.get("epsilon_lo"), mine.get("epsilon_hi"))
            by_exponent = ends[0] is None or ends[1] is None or ends[0] > ends[1]
            how = "more" if by_share and by_exponent else "as much"
            exponent = f", ε {_short(row['epsilon'])}" if row.get("epsilon") is not None else ""
            return f"; natural text of the same length takes {how} (λ {row['retained']:.2f}{exponent})"
    return ""


def _limits(rows: list[dict[str, Any]], by_condition: dict[str, list[dict[str, Any]]]) -> list[str]:
    family = max((sum(row["head"] > 0 for row in mine) for mine in by_condition.values()), default=0)
    items = max((row["n_items"] for row in rows), default=0)
    if family and items < 2:
        return ["An interval and a test take at least 2 items whose share is defined; here nothing can be decided."]
    if family and not can_reject(items, family):
        return [
            f"{items} items are too few for the sign-flip test ever to reject after Holm over {family} rows "
            f"(it takes {items_needed(family)}); the intervals stand, the p-values cannot."
        ]
    return []
