"""A likelihood study in words: what each condition does to solution and answer, how sure that is, and how much of it is form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mless.results.folder import ResultFolder
from mless.results.nats import LIKELIHOOD_METRICS, around, signed, size, unit_of_change, weighed
from mless.results.reading import StoredLikelihood
from mless.results.wording import p_words
from mless.values import condition_of, condition_words, counted

#: What a condition's line is about, where the study has it; the first two carry the verdict.
_SAID = ("solution", "contrast", "answer", "answer-after-solution", "choice")

Row = Mapping[str, Any]


def likelihood_lines(path: Path) -> list[str]:
    """An opening line, a line for each condition, the A/A control, what a smaller effect would take, and the limits."""
    folder = ResultFolder(path)
    about = folder.about() or {}
    rows: list[Row] = folder.read_table("effects").to_pylist()
    tokens = StoredLikelihood.open(path).solution_length()
    conditions: Mapping[str, Any] = about["conditions"]
    found = [
        f"{about['model']['label']}, {counted(len(about['items']), 'item')} of {about['task']}: log-probabilities of {_read(rows)}"
    ]
    for name, stored in conditions.items():
        own = {row["metric"]: row for row in rows if row["condition"] == name}
        if name == "none" or stored.get("again"):
            continue
        said = condition_words(condition_of(name, stored))
        found.append(
            f"{name} ({said}): {'; '.join(_effect(own[metric], tokens) for metric in _SAID if metric in own)}{_form(own)}"
        )
    return [*found, *_control(rows, conditions), *_smallest(rows), *_limits(about, rows)]


def _read(rows: Sequence[Row]) -> str:
    there = {row["metric"] for row in rows}
    said = [LIKELIHOOD_METRICS[name].words for name in ("solution", "answer", "choice") if name in there]
    return " and ".join(said) or "nothing"


def _effect(row: Row, tokens: float | None) -> str:
    metric = row["metric"]
    number = f"{signed(row['delta'], metric)}{around(row['lo'], row['hi'], metric)}"
    verdict = row["verdict"] or "not tested"
    said = f"{metric} {verdict}, {number} {unit_of_change(metric)}, {p_words(row['p_adjusted'])}"
    more = (
        weighed(metric, row["delta"], tokens)
        if verdict in ("rises", "drops") and metric in ("solution", "contrast")
        else ""
    )
    return f"{said} ({more})" if more else said


def _form(own: Mapping[str, Row]) -> str:
    """How much of the answer's change other answers share: form, and nothing about this answer."""
    if "answer" not in own or "contrast" not in own:
        return ""
    change, shared = own["answer"]["delta"], own["answer"]["delta"] - own["contrast"]["delta"]
    if own["answer"]["verdict"] not in ("rises", "drops") or change == 0 or shared / change <= 0.5:
        return ""
    return f"; most of the answer's {signed(change, 'answer')} is form: other answers change by {signed(shared, 'answer')} too"


def _control(rows: Sequence[Row], conditions: Mapping[str, Any]) -> list[str]:
    own = [row for row in rows if conditions[row["condition"]].get("again")]
    if not own:
        return []
    moved = [row for row in own if row["delta"]]
    if not moved:
        return ["A/A control (none once more, in another order): no number differs"]
    worst = max(moved, key=lambda row: abs(row["delta"]))
    return [
        f"A/A control (none once more, in another order): differs by up to {signed(worst['delta'], worst['metric'])} ({worst['metric']})"
    ]


def _smallest(rows: Sequence[Row]) -> list[str]:
    """The smallest effect that so many items show."""
    said: list[str] = []
    for metric in ("solution", "contrast"):
        sizes = [row["mde"] for row in rows if row["metric"] == metric and row["mde"] is not None]
        if sizes:
            said.append(f"{metric} {size(min(sizes), metric)} to {size(max(sizes), metric)} {unit_of_change(metric)}")
    return [f"smallest effects that these items show with 80 % power: {'; '.join(said)}"] if said else []


def without_distributions(engine: str) -> str:
    return f"the engine {engine} tells of given tokens only, so kl, entropy and top-1 agreement are left out"


def _limits(about: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    said = [
        f"{counted(n, 'item')} of {len(about['items'])}: {what}" for what, n in (about.get("lacking") or {}).items()
    ]
    if not any(row["metric"] == "solution" for row in rows):
        said.append("the items have no reference solutions, so only answers are scored; --solution-field names theirs")
    if engine := about.get("engine"):
        said.append(
            f"{without_distributions(engine.get('engine', 'unknown'))}; its promise: {engine.get('promise', 'nothing')}"
        )
    said.append("a likelier answer is not yet a right one: mless run accuracy draws answers")
    return said
