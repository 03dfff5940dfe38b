"""A study of the affine map in words: how far λ·o + σ explains what the filler does to a head's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mless import stats
from mless.conditions import only_moves
from mless.results.folder import ResultFolder
from mless.values import condition_of, condition_words, counted, head_name, named_layers


def affine_lines(path: Path) -> list[str]:
    """One line per condition, then the published claim, then the limits."""
    folder = ResultFolder(path)
    rows: list[dict[str, Any]] = folder.read_table("affine").to_pylist()
    about = folder.about() or {}
    conditions: dict[str, dict[str, Any]] = about["conditions"]
    by_condition = {name: [row for row in rows if row["condition"] == name] for name in conditions if name != "none"}
    count = len(about["items"])
    lines = [
        f"{about['model']['label']}, {counted(count, 'item')} of {about['task']}, {about['prompt']} prompts; o = a head's attention "
        "output before the projection, R² = how much of its displacement by the filler a form explains"
    ]
    lines += [
        f"{name} ({condition_words(condition_of(name, conditions[name]))}): {_sentence(mine)}"
        for name, mine in by_condition.items()
    ]
    claimed = next(
        (
            name
            for name in ("mless", *by_condition)
            if name in by_condition and not only_moves(conditions[name]["kind"])
        ),
        None,
    )
    if claimed is not None:
        lines.append(_claim(claimed, by_condition[claimed]))
    measured, there = len(about.get("heads", [])), about["model"].get("heads", 0)
    if measured < there:
        lines.append(f"Only {measured} of {there} heads were measured; what is said of a layer is said of these.")
    return lines + _limits(by_condition)


def _number(row: Mapping[str, Any], name: str) -> str:
    value, lo, hi = (row[name + bound] for bound in ("", "_lo", "_hi"))
    said, bounds = _short(value), [_short(lo), _short(hi)]
    return said if lo is None or bounds == [said, said] else f"{said} [{bounds[0]}, {bounds[1]}]"


def _short(value: float | None) -> str:
    """Two decimals. Very bad predictions are cut off, and 1 is written only for 1 up to rounding."""
    if value is None:
        return "undefined"
    if value < -10:
        return "below −10"
    nearly = f"{value:.2f}" == "1.00" and 1 - value > 1e-6
    return ("> 0.99" if nearly else f"{value:.2f}").replace("-", "−")


def _sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first layer in full, the others by their verdicts."""
    layers = [row for row in rows if row["head"] == 0]
    first = min(layers, key=lambda row: row["layer"])
    if not first["n_items"]:
        return "nothing moved: no original token comes after what was inserted"
    parts = [
        f"layer {first['layer']} moves by {_number(first, 'displacement')} of its size, mean cosine of the shifts {_number(first, 'cosine')}",
        f"one λ ({_short(first['lambda_constant'])}) and σ per head: R² {_number(first, 'r2_constant')}, {first['verdict']}",
        f"each token's own λ = Z/Z′ ({_number(first, 'lambda')}) and σ: R² {_number(first, 'r2_measured')}, {first['verdict_measured']}",
    ]
    if first["r2_position"] is not None:
        parts.append(
            f"own λ = the share the filler leaves ({_number(first, 'kept')}) and σ: R² {_number(first, 'r2_kept')}; positions alone: R² "
            f"{_number(first, 'r2_position')}, then own λ = Z/Z′ and σ: R² {_number(first, 'r2_shifted')}"
        )
    for verdict in stats.FIT_VERDICTS:
        named = [row for row in layers if row is not first and row["verdict"] == verdict]
        if named:
            values = [row["r2_constant"] for row in named if row["r2_constant"] is not None]
            extent = f" (R² {_short(min(values))} to {_short(max(values))})" if values else ""
            numbers = [row["layer"] for row in named]
            parts.append(f"{named_layers(numbers)}: one λ and σ {_WORDS[verdict]}{extent}")
    return "; ".join(parts)


_WORDS = {"holds": "hold", "partly": "hold in part", "fails": "fail", "undecided": "undecided"}


def _claim(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The published claim: with filler, a token's output in layer 1 is λ·(output without) + σ."""
    row = next((row for row in rows if row["layer"] == 1 and row["head"] == 0), None)
    if row is None:
        return "The published claim is about layer 1, which was not measured."
    most = "most" if (row["r2_constant"] or 0) >= 0.5 else "less than half"
    words = {
        "holds": "holds here: one λ and one σ per head give layer 1's outputs",
        "partly": f"holds in part here: one λ and one σ per head explain {most} of what moves in layer 1",
        "fails": "does not hold here: one λ and one σ per head are no better than no change",
        "undecided": "is undecided here: the interval is too wide to say",
    }
    heads = [other for other in rows if other["layer"] == 1 and other["head"] > 0 and other["r2_constant"] is not None]
    ranked = sorted(heads, key=lambda other: other["r2_constant"])
    spread = ""
    if len(ranked) > 1:
        low, high = ranked[0], ranked[-1]
        spread = (
            f" (heads from {_short(low['r2_constant'])} in {head_name(1, low['head'])} to {_short(high['r2_constant'])} in "
            f"{head_name(1, high['head'])})"
        )
    rest = ""
    if row["r2_shifted"] is not None and row["r2_shifted"] > 0.99:
        rest = "; the form with each token's own λ and σ is exact there once the tokens' new positions are allowed for"
    return f"The published claim (o′ ≈ λ·o + σ, {name}) {words[row['verdict']]}{spread}{rest}."


def _limits(by_condition: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    family = max((sum(row["head"] > 0 for row in rows) for rows in by_condition.values()), default=0)
    scored = max((row["n_scored"] for rows in by_condition.values() for row in rows), default=0)
    if family and scored < 2:
        return [
            "One λ and σ are fitted on half of the items and scored on the others; that takes at least 4 items for an interval."
        ]
    if family and not stats.can_reject(scored, family):
        return [
            f"{scored} scored items are too few for the sign-flip test of single heads ever to reject after Holm over {family} rows (it takes "
            f"{stats.items_needed(family)}). The intervals stand, the p-values of heads cannot."
        ]
    return []
