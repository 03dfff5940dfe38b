"""Judged answers of every condition, paired by item → one row of numbers per condition, split and metric.

Which statistic is taken where is decided here; the statistics themselves are `mless.stats`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from mless import stats
from mless.errors import BadStudy

Split = Literal["all", "dev", "test"]
AccuracyVerdict = Literal["rises", "drops", "equivalent", "undecided"]

ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """One condition's answers, items by samples; the items are in every condition in the same order."""

    correct: Bool[np.ndarray, "items samples"]
    truncated: Bool[np.ndarray, "items samples"]
    answered: Bool[np.ndarray, "items samples"]
    tokens: Float[np.ndarray, "items samples"]
    texts: np.ndarray
    extracted: np.ndarray


@dataclass(frozen=True, slots=True)
class _Metric:
    """An item's scores: right or wrong for each sample (or vote), or one number. They are what is compared.

    `against` is the metric of `none` that it is compared with, and so its family. `drawn` and `k` are what the interval of pass@k is
    made of; a number that is no pass@k has no `drawn`. NaN: undefined for the item.
    """

    against: str
    scores: Bool[np.ndarray, "items votes"] | Float[np.ndarray, "items one"]
    drawn: Bool[np.ndarray, "items samples"] | None = None
    k: int = 1

    def at(self, items: Int[np.ndarray, " some"] | Bool[np.ndarray, " all"]) -> _Metric:
        return _Metric(self.against, self.scores[items], None if self.drawn is None else self.drawn[items], self.k)

    @property
    def one_answer(self) -> bool:
        return self.scores.dtype == np.bool_ and self.scores.shape[1] == 1

    @property
    def by_item(self) -> Float[np.ndarray, " items"]:
        # rounded, so that 2/3 − 1/3 and 1/3 are one change and not two
        return np.round(self.scores.mean(axis=1), 12)


@dataclass(frozen=True, slots=True)
class _Block:
    """The items of one split, their cluster keys, and what all its cells share."""

    split: Split
    items: Int[np.ndarray, " some"]
    clusters: list[str] | None
    margin: float
    seed: int

    def rng(self, *cell: str) -> np.random.Generator:
        name = "\n".join(("accuracy", self.split, *cell)).encode()
        return np.random.default_rng([self.seed, int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")])

    def keys(self, kept: Bool[np.ndarray, " all"]) -> list[str] | None:
        return None if self.clusters is None else [key for key, keep in zip(self.clusters, kept, strict=True) if keep]


@dataclass(slots=True)
class _Cell:
    """A row being made; `signs` are the sums whose sign-flip p are still to come, by column."""

    row: dict[str, Any]
    family: str
    signs: dict[str, Float[np.ndarray, " clusters"]]


def compare(
    runs: Mapping[str, Run],
    items: Sequence[str],
    clusters: Sequence[str] | None,
    *,
    votes: Collection[str],
    again: str | None,
    ks: Sequence[int],
    margin: float,
    dev_share: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Rows by condition, split and metric; a column that has no meaning in a row is NaN, None or not there.

    `votes` are the conditions whose samples are put to the vote, `again` is the A/A control.
    """
    ks = _numbers_of_samples(ks, runs["none"].correct.shape[1])
    measured = {name: _metrics(run, ks, votes=name in votes) for name, run in runs.items()}
    rows: list[dict[str, Any]] = []
    for split, at in _splits(items, clusters, dev_share, seed).items():
        block = _Block(split, at, [clusters[int(n)] for n in at] if clusters else None, margin, seed)
        rows += _rows(block, runs, measured, again)
    order = {name: n for n, name in enumerate(runs)}
    return sorted(rows, key=lambda row: order[row["condition"]])


def _rows(
    block: _Block, runs: Mapping[str, Run], measured: Mapping[str, Mapping[str, _Metric]], again: str | None
) -> list[dict[str, Any]]:
    cells: list[_Cell] = []
    for name, run in runs.items():
        about = _about(run, runs["none"], block.items) | {"condition": name, "split": block.split}
        for metric, whole in measured[name].items():
            mine = whole.at(block.items)
            cell = _Cell({"metric": metric, **about, **_level(mine, block, name, metric)}, mine.against, {})
            cells.append(cell)
            base = measured["none"].get(mine.against)
            if metric == "diversity" and run.correct.shape != runs["none"].correct.shape:
                base = None  # it falls with the number of answers
            if name == "none" or base is None:
                continue
            base = base.at(block.items)
            cell.row |= _difference(base, mine, block, name, metric)
            _test(cell, "p", base, mine, block)
            if name == again:
                cell.row |= {"mde": None, "equivalence_p": None}  # nobody looks for an effect here
            elif again is not None:
                _test(cell, "p_again", measured[again][mine.against].at(block.items), mine, block)
    _flip_signs(cells, block)
    by_itself = {cell.family: cell.row["delta"] for cell in cells if cell.row["condition"] == again}
    for cell in cells:
        cell.row["aa_delta"] = by_itself.get(cell.family)
    _adjust([cell for cell in cells if cell.row["condition"] not in ("none", again)])
    return [cell.row for cell in cells]


def _about(run: Run, none: Run, items: Int[np.ndarray, " some"]) -> dict[str, Any]:
    """What is said of a condition beside its accuracy."""
    comparable = run is not none and run.texts.shape == none.texts.shape
    return {
        "truncated": float(run.truncated[items].mean()),
        "no_answer": float((~run.answered[items]).mean()),
        "tokens": float(run.tokens[items].mean()),
        "samples": run.correct.shape[1],
        "changed_text": float((run.texts[items] != none.texts[items]).mean()) if comparable else None,
    }


def _level(metric: _Metric, block: _Block, *cell: str) -> dict[str, Any]:
    """A condition's own number: Wilson for one answer per item, else a bootstrap of items or clusters."""
    several = metric.scores.dtype == np.bool_ and metric.scores.shape[1] > 1
    sd = stats.over_seeds(metric.scores).sd if several else None
    if block.clusters is None and metric.drawn is not None:
        if metric.one_answer:
            found = stats.accuracy_interval(metric.scores[:, 0])
        else:
            found = stats.pass_at_k(metric.drawn, metric.k, block.rng(*cell, "value"))
    else:
        found = _mean_of_shares(metric.by_item, block, *cell)
    return {"n": found.n, "value": found.value, "lo": found.lo, "hi": found.hi, "sd": sd}


def _mean_of_shares(values: Float[np.ndarray, " items"], block: _Block, *cell: str) -> stats.Estimate:
    """The bootstrap of a difference, of 2·share − 1 from 0: with single items of 0 and 1 it is that of pass@k."""
    there = ~np.isnan(values)
    kept = values[there]
    if not len(kept):
        return stats.Estimate(math.nan, math.nan, math.nan, 0)
    signed = 2 * kept[:, None] - 1
    rng = block.rng(*cell, "value")
    found = stats.cluster_difference(np.zeros_like(signed), signed, rng, block.keys(there), flips=1)
    value = float(kept.mean())
    lo, hi = (min(max((1 + end) / 2, 0.0), 1.0) if not math.isnan(end) else end for end in (found.lo, found.hi))
    # as in `pass_at_k`: at 0 and 1 every weighting lies on one side of the estimate
    return stats.Estimate(value, lo if value else min(lo, 0.0), hi if value < 1 else max(hi, 1.0), len(kept))


def _difference(before: _Metric, after: _Metric, block: _Block, *cell: str) -> dict[str, Any]:
    """Δ with its interval, the items that moved, the smallest effect that could have been shown, and the equivalence test."""
    there = ~np.isnan(before.by_item) & ~np.isnan(after.by_item)
    before, after, keys = before.at(there), after.at(there), block.keys(there)
    accuracy = before.drawn is not None and after.drawn is not None
    n = len(before.scores)
    if keys is None and before.one_answer and after.one_answer:
        was, is_now = before.scores[:, 0], after.scores[:, 0]
        found = stats.paired_difference(was, is_now)
        mde = _smallest_effect(n, found.gained + found.lost)
        equal = stats.equivalence(was, is_now, block.margin).p
    else:
        found = stats.cluster_difference(before.scores, after.scores, block.rng(*cell, "delta"), keys, flips=1)
        # with no spread at all nothing can be said of what would have been found; df is the clusters', not the items'
        scaled = found.sd * math.sqrt(found.clusters / n) if n else math.nan
        mde = stats.smallest_detectable_mean(found.clusters, scaled) if scaled > 0 else math.nan
        equal = stats.cluster_equivalence(before.scores, after.scores, block.margin, keys).p if accuracy else None
    moved = np.round(after.by_item - before.by_item, 9)
    return {
        "delta": found.value,
        "delta_lo": found.lo,
        "delta_hi": found.hi,
        "mde": mde,
        "gained": int(np.count_nonzero(moved > 0)) if accuracy else None,
        "lost": int(np.count_nonzero(moved < 0)) if accuracy else None,
        "equivalence_p": equal,
    }


@functools.lru_cache(maxsize=1024)  # by far the dearest number of a greedy run, and it hangs on two counts only
def _smallest_effect(n: int, changed: int) -> float:
    return stats.smallest_detectable_effect(n, changed / n) if n else math.nan


def _test(cell: _Cell, column: str, before: _Metric, after: _Metric, block: _Block) -> None:
    """McNemar's p at once; a sign-flip p waits, because all rows of a split can share the signs."""
    if block.clusters is None and before.one_answer and after.one_answer:
        cell.row[column] = stats.mcnemar_exact(before.scores[:, 0], after.scores[:, 0])
        return
    change = after.by_item - before.by_item
    if block.clusters is not None:
        _, at = np.unique(np.asarray(block.clusters), return_inverse=True)
        there = ~np.isnan(change)
        sums = np.bincount(at, weights=np.where(there, change, 0.0))
        change = np.where(np.bincount(at, weights=there) > 0, np.round(sums, 12), np.nan)
    cell.signs[column] = change


def _flip_signs(cells: Sequence[_Cell], block: _Block) -> None:
    """The test of `cluster_difference`, for all rows at once: drawing the signs is what takes the time.

    The signs hang on the number of clusters alone, so further rows change no p, and where none-again is none, p_again is p.
    """
    waiting = [(cell, column) for cell in cells for column in cell.signs]
    if waiting:
        table = np.stack([cell.signs[column] for cell, column in waiting], axis=1)
        for (cell, column), p in zip(waiting, stats.sign_flip(table, block.rng("signs")).p, strict=True):
            cell.row[column] = float(p)


def _adjust(cells: Sequence[_Cell]) -> None:
    """Holm over the conditions that are compared by one metric, and the verdicts."""
    for family in dict.fromkeys(cell.family for cell in cells):
        rows = [cell.row for cell in cells if cell.family == family and "p" in cell.row]
        adjusted = stats.holm(np.array([p_of_row(row) for row in rows], np.float64))
        for row, p in zip(rows, adjusted, strict=True):
            row["p_adjusted"] = float(p)
            row["verdict"] = verdict_of(row, float(p))


def p_of_row(row: Mapping[str, Any]) -> float:
    """Against `none`, and against `none-again` where that was run: the larger."""
    p, p_again = row["p"], row.get("p_again")
    return stats.p_of_both(p, p_again) if p_again is not None else p


def verdict_of(row: Mapping[str, Any], p: float) -> AccuracyVerdict:
    """What a row says at that p, be it adjusted or not."""
    delta, by_itself = row["delta"], abs(row.get("aa_delta") or 0.0)
    # what the same prompts do by themselves is no finding, whatever its p
    if p <= ALPHA and abs(delta) > by_itself + 1e-12:
        return "rises" if delta > 0 else "drops"
    equal = row.get("equivalence_p")
    return "equivalent" if equal is not None and equal <= ALPHA else "undecided"


def _metrics(run: Run, ks: Sequence[int], *, votes: bool) -> dict[str, _Metric]:
    """The headline first: pass@1, or the vote of all samples."""
    samples = run.correct.shape[1]
    found: dict[str, _Metric] = {}
    if not votes:
        found["pass@1"] = _Metric("pass@1", run.correct, run.correct)
        for k in ks:
            by_item = stats.pass_at_k_by_item(run.correct, k)[:, None]
            found[f"pass@{k}"] = _Metric(f"pass@{k}", by_item, run.correct, k)
    for k in [samples] if votes else ks:
        right = stats.majority_at_k(run.extracted.tolist(), run.correct, k).right
        # a vote is held against a single answer, because that is the choice its user has
        found[f"maj@{k}"] = _Metric("pass@1" if votes else f"maj@{k}", right, right)
    if samples > 1:
        diversity = np.array([stats.bigram_diversity(texts) for texts in run.texts.tolist()], np.float64)
        found["diversity"] = _Metric("diversity", diversity[:, None])
    return found


def _numbers_of_samples(ks: Sequence[int], samples: int) -> list[int]:
    for k in ks:
        if k < 1:
            raise BadStudy(f"accuracy.k: numbers of samples, from 1 on, expected; got {k}")
        if k > samples:
            raise BadStudy(
                f"pass@{k} and maj@{k} need at least {k} samples per item, there are {samples}; draw more with --samples {k} "
                f"(and a temperature above 0), or take k ≤ {samples}"
            )
    return sorted({k for k in ks if k > 1})


def _splits(
    items: Sequence[str], clusters: Sequence[str] | None, dev_share: float, seed: int
) -> dict[Split, Int[np.ndarray, " some"]]:
    found: dict[Split, Int[np.ndarray, " some"]] = {"all": np.arange(len(items))}
    if dev_share > 0:
        dev = stats.split_items(clusters or items, dev_share, seed)
        found |= {"dev": np.flatnonzero(dev), "test": np.flatnonzero(~dev)}
    return found
