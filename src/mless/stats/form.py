"""How much of a change in accuracy is form: answers that state their result more or less often (docs/accuracy-statistics.md).

An answer that states no result is judged by a guess, mostly wrong. A condition that only makes a model state its result moves accuracy without
any better answer. So Δ is split over the items: Δ = Δ_both + Δ_form, where Δ_both counts the items stated under both conditions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from mless.errors import BadData
from mless.stats.paired import paired_difference
from mless.stats.sampled import cluster_difference


@dataclass(frozen=True, slots=True)
class Part:
    """A difference with its interval."""

    value: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The parts of Δ: `both` + `form`. `stated` is the change of the share that states a result.

    Of the `n_both` pairs of answers stated under both, `before` and `after` are right; `given_both` is the change among these alone.
    """

    both: Part
    form: Part
    stated: Part
    n_both: int
    before: int
    after: int
    given_both: Part

    @property
    def mostly_form(self) -> bool:
        """Whether the form's part has the sign of Δ and is the larger one."""
        delta = self.both.value + self.form.value
        return delta * self.form.value > 0 and abs(self.form.value) > abs(self.both.value) + 1e-12


def decompose(
    before: Bool[np.ndarray, "items samples"],
    after: Bool[np.ndarray, "items samples"],
    before_stated: Bool[np.ndarray, "items samples"],
    after_stated: Bool[np.ndarray, "items samples"],
    rng: np.random.Generator,
    clusters: Sequence[str] | None = None,
    level: float = 0.95,
) -> Decomposition:
    """Right and stated (no answer is not stated) before and after, sample by sample, → the parts of Δ with their intervals.

    With one answer per item and no clusters the intervals are Tango's, else a bootstrap of whole items or clusters, as for Δ itself.
    """
    shapes = {before.shape, after.shape, before_stated.shape, after_stated.shape}
    if len(shapes) > 1:
        raise BadData(
            f"answers are paired sample by sample, so all tables must have one shape; got {', '.join(map(str, sorted(shapes)))}"
        )
    both = before_stated & after_stated
    keys: Sequence[str] | Sequence[int] | None = clusters
    items, samples = before.shape

    def part(was: np.ndarray, is_now: np.ndarray, keys: Sequence[str] | Sequence[int] | None) -> Part:
        if keys is None and was.shape[1] == 1:
            found = paired_difference(was[:, 0], is_now[:, 0], level)
        else:
            found = cluster_difference(was, is_now, rng, keys, level, flips=1)
        return Part(found.value, found.lo, found.hi)

    # The pairs stated under both, one row each; those of an item stay together.
    at = np.nonzero(both)
    if clusters is not None:
        keys_of_pairs: Sequence[str] | Sequence[int] | None = [clusters[item] for item in at[0].tolist()]
    else:
        keys_of_pairs = at[0].tolist() if samples > 1 else None
    empty = Part(math.nan, math.nan, math.nan)
    return Decomposition(
        both=part(before & both, after & both, keys),
        form=part(before & ~both, after & ~both, keys),
        stated=part(before_stated, after_stated, keys),
        n_both=int(both.sum()),
        before=int((before & both).sum()),
        after=int((after & both).sum()),
        given_both=part(before[at][:, None], after[at][:, None], keys_of_pairs) if items and both.any() else empty,
    )
