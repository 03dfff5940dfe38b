"""Whether heads whose attention shifts more belong to items whose answers turned: many correlations at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.stats
from jaxtyping import Float64

from mless.stats.shares import holm

#: Orders of the items that are tried for the largest correlation.
PERMUTATIONS = 2000


@dataclass(frozen=True, slots=True)
class Associations:
    """A correlation for each column. `largest_p`: how often items in random order have a correlation as large in any column.

    `r` is Pearson's, between the ranks of the column and the change. `p` is Student's of that r, `p_adjusted` Holm's over the columns. NaN where
    a column is constant or has a gap.
    """

    r: Float64[np.ndarray, " columns"]
    p: Float64[np.ndarray, " columns"]
    p_adjusted: Float64[np.ndarray, " columns"]
    largest_p: float
    n: int


def associations(
    values: Float64[np.ndarray, "items columns"],
    change: Float64[np.ndarray, " items"],
    rng: np.random.Generator,
    *,
    permutations: int = PERMUTATIONS,
) -> Associations:
    """Correlate every column's ranks with the change, over items. Ranks, because a few items can shift by far more than the others."""
    n = len(change)
    if n < 3 or change.std() == 0:
        nothing = np.full(values.shape[1], np.nan)
        return Associations(nothing, nothing, nothing, float("nan"), n)
    known = ~np.isnan(values).any(axis=0)
    ranks = np.full(values.shape, np.nan)
    if known.any():
        ranks[:, known] = scipy.stats.rankdata(values[:, known], axis=0)
    centred = ranks - ranks.mean(axis=0)
    length = np.sqrt((centred**2).sum(axis=0))
    scaled = np.divide(centred, length, out=np.full(values.shape, np.nan), where=length > 0)
    moved = change - change.mean()
    moved = moved / np.sqrt((moved**2).sum())
    r = np.clip(moved @ scaled, -1.0, 1.0)
    with np.errstate(divide="ignore"):
        t = r * np.sqrt((n - 2) / (1 - r**2))
    p = np.where(np.isnan(r), np.nan, 2 * scipy.stats.t.sf(np.abs(t), n - 2))
    used = scaled[:, ~np.isnan(r)]
    if not used.shape[1]:
        return Associations(r, p, holm(p), float("nan"), n)
    drawn = np.stack([rng.permutation(moved) for _ in range(permutations)])
    largest = np.abs(drawn @ used).max(axis=1)
    # equal but for rounding counts as equal
    as_large = int(np.count_nonzero(largest >= np.nanmax(np.abs(r)) - 1e-12))
    return Associations(r, p, holm(p), (1 + as_large) / (1 + permutations), n)
