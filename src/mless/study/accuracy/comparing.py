"""Judged answers of every condition, paired by item → one row of numbers per condition, split and metric.

The choice of statistic is made here; the statistics themselves are in `mless.stats`.
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
from mless.results.answers import ALPHA, p_of_row, verdict_of

Split = Literal["all", "dev", "test"]


@dataclass(frozen=True, slots=True)
class Answered:
    """One condition's answers, items by samples; the items are in every condition in the same order."""

    correct: Bool[np.ndarray, "items samples"]
    truncated: Bool[np.ndarray, "items samples"]
    answered: Bool[np.ndarray, "items samples"]
    tokens: Float[np.ndarray, "items samples"]
    texts: np.ndarray
    extracted: np.ndarray
    #: False where there is no answer; None where it is not known.
    stated: Bool[np.ndarray, "items samples"] | None = None


@dataclass(frozen=True, slots=True)
class _Metric:
    """An item's scores: right or wrong for each sample (or vote), or one number. They are what is compared.

    `against` is the metric of `none` that it is compared with, and so its family. `drawn` and `k` give the interval of pass@k; other
    metrics have no `drawn`. NaN: undefined for the item.
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
    """A row in the making. `signs`: by column, the sums whose sign-flip p is not yet computed.

    `compared` are the values behind its Δ: `none`, `none-again` where it was run, and the condition. None where there is no Δ.
    """

    row: dict[str, Any]
    family: str
    signs: dict[str, Float[np.ndarray, " clusters"]]
    compared: tuple[_Metric, _Metric | None, _Metric] | None = None


def compare(
    runs: Mapping[str, Answered],
    items: Sequence[str],
    clusters: Sequence[str] | None,
    *,
    votes: Collection[str],
    again: str | None,
    ks: Sequence[int],
    margin: float,
    dev_share: float,
    seed: int,
    primary: str | None = None,
) -> list[dict[str, Any]]:
    """Rows by condition, split and metric; a column that has no meaning in a row is NaN, None or not there.

    `votes` are the conditions whose samples are put to the vote, `again` is the A/A control, `primary` is tested alone.
    """
    ks = _numbers_of_samples(ks, runs["none"].correct.shape[1])
    measured = {name: _metrics(run, ks, votes=name in votes) for name, run in runs.items()}
    rows: list[dict[str, Any]] = []
    for split, at in _splits(items, clusters, dev_share, seed).items():
        block = _Block(split, at, [clusters[int(n)] for n in at] if clusters else None, margin, seed)
        rows += _rows(block, runs, measured, again, primary)
    order = {name: n for n, name in enumerate(runs)}
    return sorted(rows, key=lambda row: order[row["condition"]])


def _rows(
    block: _Block,
    runs: Mapping[str, Answered],
    measured: Mapping[str, Mapping[str, _Metric]],
    again: str | None,
    primary: str | None,
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
            if metric == "pass@1":
                cell.row |= _parts(runs["none"], run, block, name)
            _test(cell, "p", base, mine, block)
            if name == again:
                cell.row["equivalence_p"] = None  # no effect is tested here
                continue
            second = measured[again][mine.against].at(block.items) if again is not None else None
            if second is not None:
                _test(cell, "p_again", second, mine, block)
            cell.compared = base, second, mine
    _flip_signs(cells, block)
    by_itself = {cell.family: cell.row["delta"] for cell in cells if cell.row["condition"] == again}
    for cell in cells:
        cell.row["aa_delta"] = by_itself.get(cell.family)
    for family in dict.fromkeys(cell.family for cell in cells):
        _judge_family([cell for cell in cells if cell.family == family and cell.compared is not None], block, primary)
    return [cell.row for cell in cells]


def _about(run: Answered, none: Answered, items: Int[np.ndarray, " some"]) -> dict[str, Any]:
    """Columns of a condition other than its accuracy."""
    comparable = run is not none and run.texts.shape == none.texts.shape
    stated = None if run.stated is None else run.stated[items]
    return {
        "truncated": float(run.truncated[items].mean()),
        "no_answer": float((~run.answered[items]).mean()),
        "stated": None if stated is None else float(stated.mean()),
        "guessed": None if stated is None else float((run.answered[items] & ~stated).mean()),
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
    """The bootstrap of a difference, applied to 2·share − 1 against 0. For items of 0 and 1 it equals that of pass@k."""
    there = ~np.isnan(values)
    kept = values[there]
    if not len(kept):
        return stats.Estimate(math.nan, math.nan, math.nan, 0)
    signed = 2 * kept[:, None] - 1
    rng = block.rng(*cell, "value")
    found = stats.cluster_difference(np.zeros_like(signed), signed, rng, block.keys(there), flips=1)
    value = float(kept.mean())
    lo, hi = (min(max((1 + end) / 2, 0.0), 1.0) if not math.isnan(end) else end for end in (found.lo, found.hi))
    # as in `pass_at_k`: at 0 and 1 all weighted values lie on one side of the estimate
    return stats.Estimate(value, lo if value else min(lo, 0.0), hi if value < 1 else max(hi, 1.0), len(kept))


def _difference(before: _Metric, after: _Metric, block: _Block, *cell: str) -> dict[str, Any]:
    """Δ with its interval, the items that moved, and the equivalence test."""
    before, after, keys = _defined(block, before, after)
    accuracy = before.drawn is not None and after.drawn is not None
    if _one_answer(before, after, keys):
        equal = stats.equivalence(before.scores[:, 0], after.scores[:, 0], block.margin).p
    else:
        equal = stats.cluster_equivalence(before.scores, after.scores, block.margin, keys).p if accuracy else None
    found = _interval(before, after, keys, block, 1 - ALPHA, *cell)
    moved = np.round(after.by_item - before.by_item, 9)
    return {
        "delta": found.value,
        "delta_lo": found.lo,
        "delta_hi": found.hi,
        "gained": int(np.count_nonzero(moved > 0)) if accuracy else None,
        "lost": int(np.count_nonzero(moved < 0)) if accuracy else None,
        "equivalence_p": equal,
    }


def _defined(block: _Block, before: _Metric, after: _Metric) -> tuple[_Metric, _Metric, list[str] | None]:
    """Both without the items for which one is undefined, and the cluster keys of the others."""
    there = ~np.isnan(before.by_item) & ~np.isnan(after.by_item)
    return before.at(there), after.at(there), block.keys(there)


def _one_answer(before: _Metric, after: _Metric, keys: list[str] | None) -> bool:
    return keys is None and before.one_answer and after.one_answer


def _interval(
    before: _Metric, after: _Metric, keys: list[str] | None, block: _Block, level: float, *cell: str
) -> stats.PairedDifference | stats.ClusterDifference:
    if _one_answer(before, after, keys):
        return stats.paired_difference(before.scores[:, 0], after.scores[:, 0], level)
    # the same random weights at every level, so that a wider interval holds the narrower one
    return stats.cluster_difference(before.scores, after.scores, block.rng(*cell, "delta"), keys, level, flips=1)


def _smallest_effect(cell: _Cell, block: _Block, alpha: float) -> float:
    """The smallest effect that the row's test finds with 80 % power at level `alpha`.

    Where `none-again` was run and differs from `none`, the test is rejection against both.
    """
    assert cell.compared is not None
    none, again, mine = cell.compared
    before, after, keys = _defined(block, none, mine)
    n = len(before.scores)
    if _one_answer(before, after, keys):
        off = before.scores[:, 0] != after.scores[:, 0]
        off_again = off if again is None else again.scores[:, 0] != after.scores[:, 0]
        counts = (int(np.count_nonzero(some)) for some in (off, off_again, off & off_again))
        return _smallest_of_counts(n, *counts, alpha)
    there = ~np.isnan(none.by_item) & ~np.isnan(mine.by_item)
    there &= ~np.isnan(again.by_item) if again is not None else True
    none, again, mine = none.at(there), again.at(there) if again is not None else None, mine.at(there)
    spread = stats.cluster_spread(none.scores, mine.scores, again.scores if again else None, block.keys(there))
    # without any spread the smallest effect is unknown
    if not spread.sd > 0:
        return math.nan
    return stats.smallest_detectable_mean(spread.clusters, spread.sd, alpha=alpha, again=spread.again, ties=spread.ties)


@functools.lru_cache(maxsize=1024)  # slow, and depends on the counts only
def _smallest_of_counts(n: int, changed: int, changed_again: int, from_both: int, alpha: float) -> float:
    if not n:
        return math.nan
    again = None
    if from_both < max(changed, changed_again):
        again = stats.Again(changed_again / n, from_both / n)
    return stats.smallest_detectable_effect(n, changed / n, alpha=alpha, again=again)


def _parts(none: Answered, run: Answered, block: _Block, condition: str) -> dict[str, Any]:
    """Δ = the part where both state a result + form. Sample s is paired with sample s."""
    if none.stated is None or run.stated is None or none.correct.shape != run.correct.shape:
        return {}
    at = block.items
    found = stats.decompose(
        none.correct[at],
        run.correct[at],
        none.stated[at],
        run.stated[at],
        block.rng(condition, "pass@1", "form"),
        block.clusters,
    )
    row: dict[str, Any] = {"both_n": found.n_both, "both_before": found.before, "both_after": found.after}
    for name, part in (
        ("stated_delta", found.stated),
        ("delta_both", found.both),
        ("delta_form", found.form),
        ("both_delta", found.given_both),
    ):
        row |= {name: part.value, f"{name}_lo": part.lo, f"{name}_hi": part.hi}
    return row | {"mostly_form": found.mostly_form}


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
    """The test of `cluster_difference` for all rows at once, because drawing the signs is slow.

    The signs depend on the number of clusters only. So further rows change no p, and where none-again equals none, p_again = p.
    """
    waiting = [(cell, column) for cell in cells for column in cell.signs]
    if waiting:
        table = np.stack([cell.signs[column] for cell, column in waiting], axis=1)
        for (cell, column), p in zip(waiting, stats.sign_flip(table, block.rng("signs")).p, strict=True):
            cell.row[column] = float(p)


def _judge_family(cells: Sequence[_Cell], block: _Block, primary: str | None) -> None:
    """Verdicts on the conditions that are compared by one metric, and what depends on how many there are.

    The primary condition is tested alone, the others by Holm among themselves. `alpha` is the level for a row's p where no other condition
    has an effect (Holm's first step). The intervals `_all` hold together at 95 % (Bonferroni).
    """
    first = [cell for cell in cells if cell.row["condition"] == primary]
    for group in (first, [cell for cell in cells if cell not in first]):
        adjusted = stats.holm(np.array([p_of_row(cell.row) for cell in group], np.float64))
        for cell, p in zip(group, adjusted, strict=True):
            row = cell.row
            row["alpha"] = ALPHA / len(group)
            row["mde"] = _smallest_effect(cell, block, row["alpha"])
            row["p_adjusted"] = float(p)
            row["verdict"] = verdict_of(row, float(p))
            row["delta_lo_all"], row["delta_hi_all"] = _interval_of_all(cell, block, len(cells))


def _interval_of_all(cell: _Cell, block: _Block, conditions: int) -> tuple[float, float]:
    row = cell.row
    if conditions == 1 or math.isnan(row["delta_lo"]):
        return row["delta_lo"], row["delta_hi"]
    assert cell.compared is not None
    before, after, keys = _defined(block, cell.compared[0], cell.compared[2])
    found = _interval(before, after, keys, block, 1 - ALPHA / conditions, row["condition"], row["metric"])
    return found.lo, found.hi


def _metrics(run: Answered, ks: Sequence[int], *, votes: bool) -> dict[str, _Metric]:
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
        # a vote is compared with a single answer, which is the user's alternative
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
