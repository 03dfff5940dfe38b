"""Changes along a solution: by position, as the mean over items with its band. The same in pictures and in the explorer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64

from mless.stats import Band, band

#: A mean is shown where so many items remain.
FEWEST = 10


def bins_of(tokens: int) -> list[tuple[int, int]]:
    """Positions from 1, each bin twice as long as the one before: (1, 1), (2, 2), (3, 4), (5, 8) …"""
    found = [(1, 1)]
    while found[-1][1] < tokens:
        last = found[-1][1]
        found.append((last + 1, 2 * last))
    return found


def fewest(items: int) -> int:
    """As many items have to reach a bin; half of them, where there are fewer than usual."""
    return FEWEST if items >= FEWEST else max(1, -(-items // 2))


def binned(deltas: Mapping[str, Float64[np.ndarray, " _"]]) -> Band:
    """The mean over items of their mean Δ in each bin, with its 95 % band; NaN where too few items reach. `deltas`: of each item's tokens."""
    bins = bins_of(max(map(len, deltas.values())))
    values = np.full((len(deltas), len(bins)), np.nan)
    for row, own in zip(values, deltas.values(), strict=True):
        for at, (first, last) in enumerate(bins):
            if first <= len(own):
                row[at] = own[first - 1 : last].mean()
    found = band(values, 0.95)
    enough = np.asarray(found.n) >= fewest(len(deltas))
    mean, lo, hi = (np.where(enough, part, np.nan) for part in (found.mean, found.lo, found.hi))
    return Band(mean, lo, hi, found.n)
