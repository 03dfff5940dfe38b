"""Items answered under two conditions, and every table that they may give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

checked = settings(deadline=None, derandomize=True, max_examples=30)
outcomes = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40)
SIZES = [30, 200, 500]
SHARES = [0.05, 0.3, 0.7, 0.95]
CORRELATIONS = [0.3, 0.7]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def pair(gained: int, lost: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two conditions over n items; those that do not change are right and wrong in turn."""
    rest = np.arange(n - gained - lost) % 2 == 0
    yes, no = np.ones(n, dtype=bool), np.zeros(n, dtype=bool)
    return np.concatenate([no[:gained], yes[:lost], rest]), np.concatenate([yes[:gained], no[:lost], rest])


def columns(pairs: list[tuple[bool, bool]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, dtype=bool)
    return both[:, 0], both[:, 1]


def change_chances(p: float, correlation: float, effect: float) -> tuple[float, float]:
    """The chances of a gain and of a loss when accuracies p and p + effect correlate over items."""
    q = p + effect
    both = min(p * q + correlation * math.sqrt(p * (1 - p) * q * (1 - q)), p, q)
    return q - both, p - both


def tables(n: int, gain: float, loss: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every (gained, lost) of n items that is not hopelessly unlikely, and its chance."""
    from scipy.special import gammaln, xlogy

    reach = [int(n * c + 8 * math.sqrt(n * c) + 8) for c in (gain, loss)]
    gained, lost = (grid.ravel() for grid in np.mgrid[0 : min(reach[0], n) + 1, 0 : min(reach[1], n) + 1])
    kept = gained + lost <= n
    gained, lost = gained[kept], lost[kept]
    same = n - gained - lost
    log = gammaln(n + 1) - gammaln(gained + 1) - gammaln(lost + 1) - gammaln(same + 1)
    chance = np.exp(log + xlogy(gained, gain) + xlogy(lost, loss) + xlogy(same, 1 - gain - loss))
    likely = chance > 1e-12
    assert chance[likely].sum() == pytest.approx(1, abs=1e-6)
    return gained[likely], lost[likely], chance[likely]
