"""Planning a paired comparison, and the rules that keep it fair (docs/accuracy-statistics.md).

What a run of so many items could show, how many items an effect needs, when an effect may be claimed, and on which
items choices may be made by looking.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from mless.errors import BadStudy
from mless.stats.paired import McNemar, binomial_tail, mcnemar_p


def mcnemar_power(
    n: int, effect: float, changed_share: float, alpha: float = 0.05, *, test: McNemar = "exact"
) -> float:
    """The chance that McNemar's test of n items rejects when accuracy moves by `effect` and `changed_share` of items change.

    Exact: over every number of items that may change, and every way they may split.
    """
    _shares(changed_share, alpha)
    if not abs(effect) <= changed_share:
        raise BadStudy(f"effect: at most the share of items that change ({changed_share}) expected; got {effect}")
    if n < 2:
        return math.nan
    from scipy.special import gammaln, xlog1py, xlogy

    # eight standard deviations and some either way: what is left out is below 1e-12
    middle, reach = n * changed_share, 8 * math.sqrt(n * changed_share * (1 - changed_share)) + 20
    changed = np.arange(max(0, math.floor(middle - reach)), min(n, math.ceil(middle + reach)) + 1)
    log_choose = gammaln(n + 1) - gammaln(changed + 1) - gammaln(n - changed + 1)
    chance = np.exp(log_choose + xlogy(changed, changed_share) + xlog1py(n - changed, -changed_share))
    most = _largest_rejecting(changed, alpha, test)
    up = 0.5 + effect / (2 * changed_share) if changed_share else 0.5
    rejects = binomial_tail(most, changed, up) + binomial_tail(most, changed, 1 - up)
    return float(min((chance * rejects).sum(), 1.0))


def smallest_detectable_effect(
    n: int, changed_share: float, power: float = 0.8, alpha: float = 0.05, *, test: McNemar = "exact"
) -> float:
    """The smallest |Δ accuracy| that McNemar's test of n items finds with `power`, if `changed_share` of items change.

    NaN where even changes that all go one way would not be found so often.
    """
    _a_power(power, alpha)
    if n < 2 or not mcnemar_power(n, changed_share, changed_share, alpha, test=test) >= power:
        return math.nan
    lo, hi = 0.0, changed_share
    while hi - lo > 1e-7:
        middle = (lo + hi) / 2
        if mcnemar_power(n, middle, changed_share, alpha, test=test) >= power:
            hi = middle
        else:
            lo = middle
    return hi


def items_for_effect(
    effect: float, changed_share: float, power: float = 0.8, alpha: float = 0.05, *, test: McNemar = "exact"
) -> int:
    """How many items McNemar's test needs to find `effect` with `power`, if `changed_share` of items change."""
    _a_power(power, alpha)
    _shares(changed_share, alpha)
    size = abs(effect)
    if not 1e-3 <= size <= changed_share:
        raise BadStudy(
            f"effect: at least 0.001 and at most the share of items that change ({changed_share}) expected, as 0.02 (two points) is "
            f"where a tenth changes; got {effect}"
        )
    enough = 2
    while mcnemar_power(enough, size, changed_share, alpha, test=test) < power:
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if mcnemar_power(middle, size, changed_share, alpha, test=test) >= power:
            enough = middle
        else:
            too_few = middle
    return enough


def smallest_detectable_mean(n: int, sd: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """The same for several samples per item: by the t test, `sd` being `ClusterDifference.sd` or a pilot's."""
    _a_power(power, alpha)
    _shares(0.0, alpha)
    if not 0 <= sd < math.inf:
        raise BadStudy(f"sd must be a finite number, at least 0; got {sd}")
    if n < 2:
        return math.nan
    from scipy.special import nctdtr, stdtrit

    free = n - 1
    edge = float(stdtrit(free, 1 - alpha / 2))
    lo, hi = 0.0, 1.0
    while 1 - float(nctdtr(free, hi, edge)) < power:
        hi *= 2
    while hi - lo > 1e-9 * hi:
        middle = (lo + hi) / 2
        if 1 - float(nctdtr(free, middle, edge)) >= power:
            hi = middle
        else:
            lo = middle
    return hi * sd / math.sqrt(n)


def _largest_rejecting(changed: Int[np.ndarray, " rows"], alpha: float, test: McNemar) -> Int[np.ndarray, " rows"]:
    """The most items on the smaller side with which the test still rejects; −1 where it never does. By bisection."""
    from scipy.special import ndtri

    lo, hi = np.full(len(changed), -1), changed // 2 + 1

    def rejects(most: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        return (most < 0) | (mcnemar_p(np.maximum(most, 0), changed - np.maximum(most, 0), test) <= alpha)

    # the normal distribution is right to one or two; where it is not, the whole range stays
    guess = np.floor((changed - ndtri(1 - alpha / 2) * np.sqrt(changed)) / 2).astype(lo.dtype)
    near, far = np.clip(guess - 3, lo, hi - 1), np.clip(guess + 3, lo + 1, hi)
    lo, hi = np.where(rejects(near), near, lo), np.where(rejects(np.minimum(far, changed // 2)), hi, far)
    while np.any(hi - lo > 1):
        middle = np.clip((lo + hi) // 2, lo, hi)
        yes = rejects(np.minimum(middle, changed // 2))
        lo, hi = np.where(yes, middle, lo), np.where(yes, hi, middle)
    return lo


# ---- rules of a fair comparison --------------------------------------------------------------------------------------


def p_of_both(p_none: float, p_again: float) -> float:
    """The p of "differs from `none` and from `none-again`": the larger one. NaN where either is missing.

    Claiming both at α needs no correction (an intersection–union test). Where A/A is zero item by item the two are equal, and
    nothing is lost. Holm over conditions takes these p.
    """
    for name, p in (("p against none", p_none), ("p against none-again", p_again)):
        if not (math.isnan(p) or 0 <= p <= 1):
            raise ValueError(f"{name} must lie in 0 to 1 or be NaN; got {p}")
    return math.nan if math.isnan(p_none) or math.isnan(p_again) else max(p_none, p_again)


def needs_both(p_none: float, p_again: float, alpha: float = 0.05) -> bool:
    """Whether an effect may be claimed: rejected against both runs of the same prompts; never with a missing p."""
    _shares(0.0, alpha)
    return p_of_both(p_none, p_again) <= alpha


def split_items(ids: Sequence[str], share: float, seed: int) -> Bool[np.ndarray, " items"]:
    """Which items are the dev split, where choices are made by looking; the others are the test split.

    An item's side hangs on (seed, id) alone, so adding, removing or reordering items moves no other. Equal ids fall on one
    side: give the cluster keys for ids to keep related items together. `share` is met on average.
    """
    if not 0 < share < 1:
        raise BadStudy(f"share must lie between 0 and 1, as 0.2 does; got {share}")
    edge = int(share * 2**64)
    dev = np.array([_hash_of(seed, name) < edge for name in ids], dtype=np.bool_)
    if len(dev) and dev.all() | ~dev.any():
        empty, full = ("test", "dev") if dev.all() else ("dev", "test")
        raise BadStudy(
            f"all {len(dev)} items fall into the {full} split and none into {empty} (share {share}, seed {seed}); take more items or "
            "another seed"
        )
    return dev


def _hash_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=8).digest(), "big")


# ---- what is refused -------------------------------------------------------------------------------------------------


def _shares(changed_share: float, alpha: float) -> None:
    if not 0 <= changed_share <= 1:
        raise BadStudy(f"changed_share must lie in 0 to 1, as 0.1 does; got {changed_share}")
    if not 0 < alpha < 1:
        raise BadStudy(f"alpha must lie between 0 and 1, as 0.05 does; got {alpha}")


def _a_power(power: float, alpha: float) -> None:
    if not alpha < power < 1:
        raise BadStudy(f"power must lie between alpha and 1, as 0.8 does; got {power} (alpha {alpha})")
