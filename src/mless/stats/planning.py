"""Planning a paired comparison, and the rules that keep it fair (docs/accuracy-statistics.md).

What a run of so many items can show, how likely each verdict is, and how many items an effect or equivalence needs. Also when an effect may
be claimed, and on which items choices may be made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int

from mless.errors import BadStudy
from mless.stats.paired import McNemar, binomial_tail, equivalence_p, mcnemar_p
from mless.stats.shares import smallest_p

#: What a paired comparison says. Only *equivalent* means "no effect that matters".
ChangeVerdict = Literal["rises", "drops", "equivalent", "undecided"]

#: Points of the midpoint rule in `_both_reject`; doubling them moves a power by less than 1e-4.
_POINTS = 400
#: Equivalence within less than a tenth of a point is not planned for.
SMALLEST_MARGIN = 0.001


@dataclass(frozen=True, slots=True)
class Again:
    """What power needs to know of the A/A control, one answer per item.

    `changed`: the share of items judged differently from `none-again`. `from_both`: the share judged differently from both runs of `none`.
    """

    changed: float
    from_both: float

    @classmethod
    def planned(cls, changed_share: float, again_share: float) -> Again | None:
        """Before a run: two equal runs of `none` differ from each other on `again_share` of the items. None where on no item."""
        _shares(changed_share, 0.05)
        if not 0 <= again_share <= 2 * changed_share:
            raise BadStudy(
                f"the share of items that change by themselves (A/A) must lie in 0 to twice the share that changes ({changed_share}); got {again_share}"
            )
        # an item where the two runs differ differs from the condition in exactly one of them
        return cls(changed_share, changed_share - again_share / 2) if again_share else None


@dataclass(frozen=True, slots=True)
class Chances:
    """How likely each verdict is; they sum to 1."""

    rises: float
    drops: float
    equivalent: float
    undecided: float


# ---- one answer per item ---------------------------------------------------------------------------------------------


class _Changes:
    """McNemar's test of n items over every number of them that may change: all that does not depend on the effect."""

    def __init__(self, n: int, share: float, alpha: float, test: McNemar) -> None:
        from scipy.special import gammaln, xlog1py, xlogy

        self.n, self.share = n, share
        # at least eight standard deviations either way: the rest is below 1e-12
        middle, reach = n * share, 8 * math.sqrt(n * share * (1 - share)) + 20
        self.changed = np.arange(max(0, math.floor(middle - reach)), min(n, math.ceil(middle + reach)) + 1)
        log_choose = gammaln(n + 1) - gammaln(self.changed + 1) - gammaln(n - self.changed + 1)
        self.chance = np.exp(log_choose + xlogy(self.changed, share) + xlog1py(n - self.changed, -share))
        self.most = _largest_rejecting(self.changed, alpha, test)

    def at_most(self, lost: Int[np.ndarray, " rows"], effect: float) -> Float64[np.ndarray, " rows"]:
        """By the number of items that change: the chance of that number, and of at most so many of them being lost."""
        loss = 0.5 - effect / (2 * self.share) if self.share else 0.5
        return self.chance * binomial_tail(lost, self.changed, loss)

    def rejects_upwards(self, effect: float) -> float:
        """The chance that the test rejects and more items are gained than lost."""
        return min(float(self.at_most(self.most, effect).sum()), 1.0)


def mcnemar_power(
    n: int,
    effect: float,
    changed_share: float,
    alpha: float = 0.05,
    *,
    test: McNemar = "exact",
    again: Again | None = None,
) -> float:
    """The chance that McNemar's test of n items rejects when accuracy moves by `effect` and `changed_share` of items change.

    Exact: over every number of items that may change, and every way they may split. With `again` it is the chance that the test
    rejects against both runs of `none` and Δ exceeds the A/A difference (`_both_reject`, no longer exact). Of m conditions
    under Holm, `alpha` is α/m: a condition has that level where no other one has an effect, and a larger one otherwise.
    """
    _shares(changed_share, alpha)
    limit = _largest_effect(changed_share, again)
    if not abs(effect) <= limit:
        raise BadStudy(f"effect: at most the share of items that change ({limit}) expected; got {effect}")
    return math.nan if n < 2 else _power_of(n, changed_share, alpha, test, again)(effect)


def _power_of(
    n: int, changed_share: float, alpha: float, test: McNemar, again: Again | None
) -> Callable[[float], float]:
    """Power by effect; what does not depend on the effect is computed once."""
    first = _Changes(n, changed_share, alpha, test)
    if again is None:
        return lambda effect: min(first.rejects_upwards(effect) + first.rejects_upwards(-effect), 1.0)
    _check_again(changed_share, again)
    second = first if again.changed == changed_share else _Changes(n, again.changed, alpha, test)

    def power(effect: float) -> float:
        return min(sum(_both_upwards(first, second, again, side * effect) for side in (1, -1)), 1.0)

    return power


def _both_upwards(first: _Changes, second: _Changes, again: Again, effect: float, above: float = 0.0) -> float:
    """The chance that McNemar's test rejects upwards against both runs and Δ exceeds the A/A difference.

    `above` leaves out that upper part of Δ's distribution.
    """
    up, up_again = first.rejects_upwards(effect), second.rejects_upwards(effect)
    spread = math.sqrt(max(first.share - effect**2, 0.0))
    spread_again = math.sqrt(max(second.share - effect**2, 0.0))
    if not spread or not spread_again:
        return max(min(up, up_again) - above, 0.0)
    # (condition − none)(condition − none-again) is 1 on the items that differ from both and 0 on the others
    correlation = (again.from_both - effect**2) / (spread * spread_again)
    root = math.sqrt(first.n)
    return _both_reject(up, up_again, correlation, root * effect / spread, spread / spread_again, above)


def _both_reject(
    up: float, up_again: float, correlation: float, distance: float, ratio: float, above: float = 0.0
) -> float:
    """The chance of rejecting upwards against both runs of none with |Δ| above the A/A difference.

    Each test rejects with its own exact chance (`up`, `up_again`). Their joint chance is that of two normal variables with the correlation
    of the two differences. `distance` is the effect in standard errors of Δ, `ratio` the first difference's spread over the second's. |Δ| >
    |A/A| means 0 < Δ_again < 2Δ.
    """
    if correlation >= 1 - 1e-9:
        return max(min(up, up_again) - above, 0.0)
    if up <= above or up_again <= 0:
        return 0.0
    from scipy.special import ndtr, ndtri

    tail = above + (up - above) * (np.arange(_POINTS) + 0.5) / _POINTS
    first: Float64[np.ndarray, " points"] = -ndtri(tail)
    left = math.sqrt(1 - max(correlation, -1 + 1e-9) ** 2)
    # Δ_again < 2Δ, in standard errors of Δ_again from its mean
    highest = 2 * ratio * (distance + first) - ratio * distance
    lowest = -float(ndtri(min(up_again, 1.0)))
    inside = ndtr((highest - correlation * first) / left) - ndtr((lowest - correlation * first) / left)
    return float((up - above) * np.maximum(inside, 0.0).mean())


def smallest_detectable_effect(
    n: int,
    changed_share: float,
    power: float = 0.8,
    alpha: float = 0.05,
    *,
    test: McNemar = "exact",
    again: Again | None = None,
) -> float:
    """The smallest |Δ accuracy| that McNemar's test of n items finds with `power`, if `changed_share` of items change.

    `alpha` and `again` as in `mcnemar_power`. NaN where even changes that all go one way would not be found so often.
    """
    _a_power(power, alpha)
    _shares(changed_share, alpha)
    if n < 2:
        return math.nan
    found_by = _power_of(n, changed_share, alpha, test, again)
    lo, hi = 0.0, _largest_effect(changed_share, again)
    if not found_by(hi) >= power:
        return math.nan
    while hi - lo > 1e-7:
        middle = (lo + hi) / 2
        if found_by(middle) >= power:
            hi = middle
        else:
            lo = middle
    return hi


def items_for_effect(
    effect: float,
    changed_share: float,
    power: float = 0.8,
    alpha: float = 0.05,
    *,
    test: McNemar = "exact",
    again: Again | None = None,
) -> int:
    """How many items McNemar's test needs to find `effect` with `power`, if `changed_share` of items change."""
    _a_power(power, alpha)
    _shares(changed_share, alpha)
    size, limit = abs(effect), _largest_effect(changed_share, again)
    if not 1e-3 <= size <= limit:
        raise BadStudy(
            f"effect: at least 0.001 and at most the share of items that change ({limit}) expected, as 0.02 (two points) is "
            f"where a tenth changes; got {effect}"
        )
    return first_with(power, lambda n: _power_of(n, changed_share, alpha, test, again)(size))


def items_for_equivalence(
    margin: float, changed_share: float, power: float = 0.8, alpha: float = 0.05, *, effect: float = 0.0
) -> int:
    """How many items the equivalence test needs to say "within ±margin" with `power`, if Δ is `effect` and `changed_share` change."""
    _a_power(power, alpha)
    _shares(changed_share, alpha)
    _a_margin(margin)
    if not abs(effect) < margin:
        raise BadStudy(f"effect: inside the margin of ±{margin} expected, else it cannot be shown to be; got {effect}")

    def chance(n: int) -> float:
        changes = _Changes(n, changed_share, alpha, "exact")
        return _equivalent(changes, _least_equivalent(changes, margin, alpha), effect)

    return first_with(power, chance)


def first_with(power: float, power_at: Callable[[int], float]) -> int:
    """A number of items with so much power, where one item fewer has less."""
    enough = 2
    while power_at(enough) < power:
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if power_at(middle) >= power:
            enough = middle
        else:
            too_few = middle
    return enough


def verdict_chances(
    n: int,
    changed_share: float,
    margin: float,
    *,
    effect: float = 0.0,
    alpha: float = 0.05,
    alpha_each: float | None = None,
    again: Again | None = None,
) -> Chances:
    """How likely each verdict on n items is, one answer each, if accuracy moves by `effect`.

    A change is claimed at `alpha_each` (α/m of m conditions under Holm; `alpha` where not given), by exact McNemar, and with `again`
    against both runs of `none`. Equivalence is tested against `none` at `alpha`, and said only where no change is claimed.
    """
    _shares(changed_share, alpha)
    each = alpha if alpha_each is None else alpha_each
    _shares(0.0, each)
    _a_margin(margin)
    limit = _largest_effect(changed_share, again)
    if not abs(effect) <= limit:
        raise BadStudy(f"effect: at most the share of items that change ({limit}) expected; got {effect}")
    if n < 2:
        return Chances(0.0, 0.0, 0.0, 1.0)
    first = _Changes(n, changed_share, each, "exact")
    least = _least_equivalent(first, margin, alpha)
    second = first
    if again is not None:
        _check_again(changed_share, again)
        second = first if again.changed == changed_share else _Changes(n, again.changed, each, "exact")

    def claimed(towards: float) -> tuple[float, float]:
        """The chance of claiming a change upwards, and of that with a Δ inside the equivalence test's bounds."""
        up = first.rejects_upwards(towards)
        far = float(first.at_most(np.minimum(first.most, least - 1), towards).sum())  # Δ outside those bounds
        if again is None:
            return up, max(up - far, 0.0)
        within = _both_upwards(first, second, again, towards, above=far) if up > far else 0.0
        return _both_upwards(first, second, again, towards), within

    rises, rises_inside = claimed(effect)
    drops, drops_inside = claimed(-effect)
    equivalent = max(_equivalent(first, least, effect) - rises_inside - drops_inside, 0.0)
    return Chances(rises, drops, equivalent, max(1 - rises - drops - equivalent, 0.0))


def _equivalent(changes: _Changes, least: Int[np.ndarray, " rows"], effect: float) -> float:
    """The chance that the equivalence test says "within ±margin": at least `least` items are lost, and as many gained."""
    outside = changes.at_most(least - 1, effect) + changes.at_most(least - 1, -effect)
    return float(np.where(2 * least <= changes.changed, changes.chance - outside, 0.0).sum())


def _least_equivalent(changes: _Changes, margin: float, alpha: float) -> Int[np.ndarray, " rows"]:
    """The fewest items on the smaller side with which the equivalence test rejects; more than half where it never does."""
    lo, hi = np.full(len(changes.changed), -1), changes.changed // 2 + 1

    def rejects(fewer: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        return equivalence_p(changes.changed - fewer, fewer, changes.n, margin) <= alpha

    while np.any(hi - lo > 1):
        middle = (lo + hi) // 2
        yes = rejects(np.clip(middle, 0, changes.changed // 2))
        open_ = hi - lo > 1
        lo, hi = np.where(open_ & ~yes, middle, lo), np.where(open_ & yes, middle, hi)
    return hi


# ---- several samples per item ----------------------------------------------------------------------------------------


def smallest_detectable_mean(
    n: int,
    sd: float,
    power: float = 0.8,
    alpha: float = 0.05,
    *,
    again: tuple[float, float] | None = None,
    ties: float = 0.0,
) -> float:
    """The same for several samples per item: by the t test, `sd` being `ClusterDifference.sd` or a pilot's.

    `again` is the sd of the differences from `none-again`, and their correlation with those from `none`: then both must reject.
    `ties` is what coarse differences cost the sign-flip test (`ClusterSpread.ties`).
    """
    _a_power(power, alpha)
    _shares(0.0, alpha)
    for spread in (sd, again[0] if again is not None else sd):
        if not 0 <= spread < math.inf:
            raise BadStudy(f"sd must be a finite number, at least 0; got {spread}")
    if n < 2:
        return math.nan
    from scipy.special import nctdtr, stdtrit

    free = n - 1
    edge = float(stdtrit(free, 1 - alpha / 2))

    def found(distance: float) -> float:
        """Power at an effect of so many standard errors."""
        up = 1 - float(nctdtr(free, distance, edge))
        if again is None or not sd or not again[0]:
            return up
        ratio = sd / again[0]
        return _both_reject(up, 1 - float(nctdtr(free, distance * ratio, edge)), again[1], distance, ratio)

    lo, hi = 0.0, 1.0
    while found(hi) < power:
        hi *= 2
    while hi - lo > 1e-9 * hi:
        middle = (lo + hi) / 2
        if found(middle) >= power:
            hi = middle
        else:
            lo = middle
    return hi * sd / math.sqrt(n) + ties


def items_for_mean(effect: float, sd: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """How many items (clusters) the paired test of a mean needs to find `effect` with `power`, if differences vary by `sd`.

    Never fewer than the sign-flip test needs to reject at `alpha` at all.
    """
    _a_power(power, alpha)
    _shares(0.0, alpha)
    if not 0 < abs(effect) < math.inf:
        raise BadStudy(f"effect: a finite number other than 0 expected; got {effect}")
    if not 0 <= sd < math.inf:
        raise BadStudy(f"sd must be a finite number, at least 0; got {sd}")
    from scipy.special import nctdtr, stdtrit

    def power_at(n: int) -> float:
        if smallest_p(n, alpha=alpha) > alpha:
            return 0.0
        distance = abs(effect) * math.sqrt(n) / sd if sd else math.inf
        # so far from 0 that the non-central t has no more digits to give
        return 1.0 if distance > 30 else 1 - float(nctdtr(n - 1, distance, float(stdtrit(n - 1, 1 - alpha / 2))))

    return first_with(power, power_at)


def _largest_rejecting(changed: Int[np.ndarray, " rows"], alpha: float, test: McNemar) -> Int[np.ndarray, " rows"]:
    """The most items on the smaller side with which the test still rejects; −1 where it never does. By bisection."""
    from scipy.special import ndtri

    lo, hi = np.full(len(changed), -1), changed // 2 + 1

    def rejects(most: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        return (most < 0) | (mcnemar_p(np.maximum(most, 0), changed - np.maximum(most, 0), test) <= alpha)

    # the normal approximation is right to one or two; where not, search the whole range
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


def change_verdict(
    delta: float, p: float, equivalence: float | None, *, by_itself: float = 0.0, alpha: float = 0.05
) -> ChangeVerdict:
    """What a paired comparison says, at a p that is adjusted or not, and the p of its equivalence test (None or NaN: not tested).

    `by_itself` is the A/A difference: a change no larger than that is no finding.
    """
    if p <= alpha and abs(delta) > abs(by_itself) + 1e-12:
        return "rises" if delta > 0 else "drops"
    return "equivalent" if equivalence is not None and equivalence <= alpha else "undecided"


def split_items(ids: Sequence[str], share: float, seed: int) -> Bool[np.ndarray, " items"]:
    """Which items are the dev split, where choices are made by looking; the others are the test split.

    An item's side depends on (seed, id) only, so adding, removing or reordering items moves no other. Equal ids fall on one side: give the
    cluster keys for ids to keep related items together. `share` is met on average.
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


def _a_margin(margin: float) -> None:
    if not SMALLEST_MARGIN <= margin < 1:
        raise BadStudy(f"margin must be at least {SMALLEST_MARGIN} and below 1, as 0.02 (two points) is; got {margin}")


def _largest_effect(changed_share: float, again: Again | None) -> float:
    """Accuracy moves by no more than the share of items that change, against either run of `none`."""
    return changed_share if again is None else min(changed_share, again.changed)


def _check_again(changed_share: float, again: Again) -> None:
    _shares(again.changed, 0.05)
    if not -1e-12 <= again.from_both <= min(changed_share, again.changed) + 1e-12:
        raise BadStudy(
            f"again.from_both: at most the smaller of the two shares of items that change ({changed_share} and {again.changed}) expected; "
            f"got {again.from_both}"
        )


def _a_power(power: float, alpha: float) -> None:
    if not alpha < power < 1:
        raise BadStudy(f"power must lie between alpha and 1, as 0.8 does; got {power} (alpha {alpha})")
