"""A finished study in words and numbers, as ready to say *unchanged* as *drops*."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mless.stats import VERDICTS, can_reject, items_needed
from mless.store import ResultFolder
from mless.values import condition_of, condition_words, format_numbers

_PLURAL = {"drops": "drop", "rises": "rise", "unchanged": "unchanged", "undecided": "undecided"}


def verdict_lines(path: Path) -> list[str]:
    """One line per condition, then what it means for the published claim, then what limits it; of answers or of attention."""
    folder = ResultFolder(path)
    measures = (folder.manifest() or {}).get("measures")
    if measures == "activations":
        from mless.study.activating import activation_lines

        return activation_lines(path)
    if measures == "affine":
        from mless.study.affine import affine_lines

        return affine_lines(path)
    if measures == "tune":
        from mless.study.tuning import tuning_lines

        return tuning_lines(path)
    if ((folder.manifest() or {}).get("study") or {}).get("accuracy"):
        from mless.study.accuracy import accuracy_lines

        return accuracy_lines(path)
    rows: list[dict[str, Any]] = folder.read_table("retained", filters=[("queries", "==", "original")]).to_pylist()
    about = folder.manifest() or {}
    conditions: dict[str, dict[str, Any]] = about["conditions"]
    by_condition = {name: [row for row in rows if row["condition"] == name] for name in conditions if name != "none"}
    lines = [
        f"{about['model']['label']}, {len(about['items'])} item{'s' if len(about['items']) != 1 else ''} of {about['task']}, {about['prompt']} prompts; "
        "retained share = attention the question's tokens receive with filler over without"
    ]
    for name, mine in by_condition.items():
        yardstick = by_condition["random"] if random_is_yardstick(name, conditions) else []
        lines.append(f"{name} ({condition_words(condition_of(name, conditions[name]))}): {_sentence(mine, yardstick)}")
    if "mless" in by_condition:
        text = by_condition["random"] if random_is_yardstick("mless", conditions) else []
        lines.append(_claim(by_condition["mless"], conditions["mless"]["placement"], text))
    measured, there = len(about.get("heads", [])), about["model"].get("heads", 0)
    if measured < there:
        lines.append(f"Only {measured} of {there} heads were measured; what is said of a layer is said of these.")
    lines += _limits(rows, by_condition)
    return lines


def random_is_yardstick(name: str, conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether `random` is a yardstick for a condition: natural text of the same length in the same place."""
    mine, text = conditions.get(name), conditions.get("random")
    if mine is None or text is None or name == "random":
        return False
    return all(mine.get(key) == text.get(key) for key in ("length", "placement"))


def _sentence(rows: list[dict[str, Any]], yardstick: list[dict[str, Any]]) -> str:
    layers = {row["layer"]: row for row in rows if row["head"] == 0}
    first = min(layers)
    parts = [_layer_in_full(layers[first], rows, yardstick)]
    for verdict in VERDICTS:
        named = [layer for layer, row in layers.items() if layer != first and row["verdict"] == verdict]
        if named:
            shares = [layers[layer]["retained"] for layer in named if layers[layer]["retained"] is not None]
            word = verdict if len(named) == 1 else _PLURAL[verdict]
            extent = ""
            if verdict != "unchanged" and shares:
                low, high = f"{min(shares):.2f}", f"{max(shares):.2f}"
                extent = f" ({low})" if low == high else f" ({low}–{high})"
            if verdict == "unchanged":
                heads = [row for row in rows if row["layer"] in named and row["head"] > 0]
                moved = sum(row["verdict"] in ("drops", "rises") for row in heads)
                extent = f" ({moved} of {len(heads)} heads are not)" if moved else ""
            parts.append(f"layer{'s' if len(named) > 1 else ''} {format_numbers(named)} {word}{extent}")
    return "; ".join(parts)


def _layer_in_full(row: dict[str, Any], rows: list[dict[str, Any]], yardstick: list[dict[str, Any]]) -> str:
    heads = [other for other in rows if other["layer"] == row["layer"] and other["head"] > 0]
    same = sum(other["verdict"] == row["verdict"] for other in heads)
    yardsticks = [f"uniform dilution {row['uniform']:.2f}"] if row["uniform"] is not None else []
    for other in yardstick:
        if other["layer"] == row["layer"] and other["head"] == 0 and other["retained"] is not None:
            yardsticks.append(f"random text {other['retained']:.2f}")
    if row["retained"] is None:
        return f"layer {row['layer']} undecided: the share is undefined (nobody later sees the question)"
    interval = f" [{row['lo']:.2f}, {row['hi']:.2f}]" if row["lo"] is not None else ""
    return (
        f"layer {row['layer']} {row['verdict']}: {same} of {len(heads)} heads, retained share {row['retained']:.2f}{interval}"
        + (f" ({', '.join(yardsticks)})" if yardsticks else "")
    )


def _claim(rows: list[dict[str, Any]], placement: str, text: list[dict[str, Any]]) -> str:
    """The published claim: with filler before the question layer 1 drops, from layer 2 on there is no regular change."""
    if placement != "before-question":
        return f"The published claim is about filler before the question; this one stands {placement}."
    layers = {row["layer"]: row["verdict"] for row in rows if row["head"] == 0}
    if 1 not in layers:
        return "The published claim is about layer 1, which was not measured."
    words = {
        "drops": "holds here: layer 1 loses attention to the filler",
        "unchanged": "does not hold here: layer 1 keeps its attention",
        "rises": "does not hold here: layer 1's attention on the question rises",
        "undecided": "is undecided here: the interval is too wide to say",
    }
    later = [layer for layer, verdict in layers.items() if layer > 1 and verdict in ("drops", "rises")]
    rest = f"; later layers that change too: {format_numbers(later)}" if later else ""
    mine = next(row for row in rows if row["layer"] == 1 and row["head"] == 0)
    for row in text:
        # Without this a reader would take for the filler's doing what any inserted text does.
        if (
            row["layer"] == 1
            and row["head"] == 0
            and mine["verdict"] == row["verdict"] == "drops"
            and row["lo"] <= mine["hi"]
        ):
            rest += f"; natural text of the same length takes {'more' if row['hi'] < mine['lo'] else 'as much'} ({row['retained']:.2f})"
    return f"The published claim (layer 1 drops) {words[layers[1]]}{rest}."


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
