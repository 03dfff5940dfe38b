"""What the page and the summary of a likelihood study say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mless.conditions import inserts
from mless.figures import draw
from mless.report.answers import SHORT_KEPT, shortened
from mless.report.kinds import Page
from mless.results.nats import LIKELIHOOD_METRICS, around, level, signed, size, unit_of_change, weighed
from mless.results.reading import StoredLikelihood
from mless.results.schemas import Effect
from mless.stats.intervals import mean_intervals
from mless.values import FigureSpec

#: Options and other answers that are shown of the example.
MOST = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One condition's effect on a metric, as the page writes it."""

    condition: str
    n: int
    value: str
    none: str
    delta: str
    words: str
    p_adjusted: float | None
    smallest: str
    equivalent_p: float | None
    verdict: str | None
    skewed: bool


@dataclass(frozen=True, slots=True)
class Form:
    """How a condition's change of the answer divides: what other answers share with it, and what is this answer's own."""

    condition: str
    n: int
    answer: str
    form: str
    own: str
    share: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One text scored after the example's prompt."""

    role: str
    text: str
    n_tokens: int
    before: str
    after: str
    delta: str


# ---- the parts -------------------------------------------------------------------------------------------------------


def metrics_of(effects: Sequence[Effect], tokens: float | None) -> list[dict[str, Any]]:
    """A table for each metric."""
    found: list[dict[str, Any]] = []
    for metric in [name for name in LIKELIHOOD_METRICS if any(row.metric == name for row in effects)]:
        own = [row for row in effects if row.metric == metric]
        rows = [_row(one, tokens) for one in own]
        margins = dict.fromkeys(size(one.margin, metric) for one in own if one.margin is not None)
        found.append(
            {
                "name": metric,
                "words": LIKELIHOOD_METRICS[metric].words,
                "change": unit_of_change(metric),
                "margin": " or ".join(margins),
                "tested": any(row.verdict is not None for row in rows),
                "worded": any(row.words for row in rows),
                "rows": rows,
            }
        )
    return found


def _row(one: Effect, tokens: float | None) -> Row:
    metric = one.metric
    return Row(
        one.condition,
        one.n,
        level(one.value, metric),
        level(one.none, metric),
        signed(one.delta, metric) + around(one.lo, one.hi, metric),
        # A change that may be none is not put in words.
        weighed(metric, one.delta, tokens) if one.verdict in ("rises", "drops") else "",
        one.p_adjusted,
        size(one.mde, metric),
        one.equivalent_p,
        one.verdict,
        one.skewed,
    )


def forms_of(folder: StoredLikelihood, effects: Sequence[Effect]) -> list[Form]:
    """Over the items that have both an answer and other answers beside it."""
    verdicts = {row.condition: row.verdict for row in effects if row.metric == "answer"}
    found: list[Form] = []
    for condition in verdicts:
        answer, contrast = folder.deltas(condition, "answer"), folder.deltas(condition, "contrast")
        both = [item for item in answer if item in contrast]
        if condition == folder.control or not both:
            continue
        whole = np.array([answer[item] for item in both])
        own = np.array([contrast[item] for item in both])
        # A share of a change that may be nothing says nothing.
        sure = verdicts[condition] in ("rises", "drops") and whole.mean() != 0
        share = f"{100 * (whole - own).mean() / whole.mean():.0f} %".replace("-", "−") if sure else "–"
        found.append(Form(condition, len(both), _mean(whole), _mean(whole - own), _mean(own), share))
    return found


def _mean(changes: np.ndarray) -> str:
    found = mean_intervals(changes[:, None].astype(np.float64), 0.95)
    return signed(float(found.mean[0]), "answer") + around(float(found.lo[0]), float(found.hi[0]), "answer")


def example_of(folder: StoredLikelihood) -> dict[str, Any] | None:
    """The first item's answer, other answers and options, under `none` and under the first filler."""
    others = [name for name in folder.conditions if name not in ("none", folder.control)]
    fillers = [name for name in others if inserts(folder.conditions[name].get("kind"))]
    condition = next(iter([*fillers, *others]), None)
    if condition is None:
        return None
    for item in folder.items:
        before, after = folder.candidates("none", item), folder.candidates(condition, item)
        if before and len(before) == len(after):
            break
    else:
        return None
    pairs = list(zip(before, after, strict=True))
    changes = {
        role: [new["logp"] - old["logp"] for old, new in pairs if old["role"] == role] for role in ("answer", "other")
    }
    said: dict[str, str] = {}
    if changes["answer"] and changes["other"]:
        mine, shared = changes["answer"][0], float(np.mean(changes["other"]))
        said = {
            name: signed(one, "answer") for name, one in (("answer", mine), ("shared", shared), ("own", mine - shared))
        }
    shown = [_candidate(old, new) for old, new in pairs]
    return {
        "item": item,
        "condition": condition,
        "shown": shown[:MOST],
        "left_out": max(0, len(shown) - MOST),
        "changes": said,
    }


def _candidate(old: dict[str, Any], new: dict[str, Any]) -> Candidate:
    before, after = old["logp"], new["logp"]
    text = shortened(old["text"], SHORT_KEPT)
    return Candidate(
        old["role"],
        text,
        old["n_tokens"],
        level(before, "answer"),
        level(after, "answer"),
        signed(after - before, "answer"),
    )


# ---- the page --------------------------------------------------------------------------------------------------------


def _summary(folder: Path) -> dict[str, Any]:
    """Every row of effects.parquet."""
    return {"effects": [asdict(row) for row in StoredLikelihood.open(folder).effects()]}


def _draw_standard(path: Path, formats: Sequence[str]) -> list[Path]:
    """The effects, and where along the solution they come about if there are solutions."""
    folder = StoredLikelihood.open(path)
    if not set(folder.conditions) - {"none", folder.control}:
        return []
    kinds = ["effects", *(["along"] if folder.solution_length() is not None else [])]
    return [file for kind in kinds for file in draw(FigureSpec(kind, kind, (), ()), [path], formats=formats)]


def _parts(path: Path) -> tuple[StoredLikelihood, str, dict[str, Any]]:
    folder = StoredLikelihood.open(path)
    # The A/A control comes last, as on other pages.
    effects, tokens = (
        sorted(folder.effects(), key=lambda row: row.condition == folder.control),
        folder.solution_length(),
    )
    settings: Any = folder.study.get("likelihood") or {}
    lacking: Any = folder.about.get("lacking") or {}
    parts = {
        "metrics": metrics_of(effects, tokens),
        "tokens": tokens,
        "lacking": [(what, n) for what, n in lacking.items()],
        "total": len(folder.items),
        "forms": forms_of(folder, effects),
        "scored": example_of(folder),
        "others": settings.get("others", 16),
    }
    return folder, "likelihood.html", parts


PAGE = Page(_summary, _draw_standard, _parts)
