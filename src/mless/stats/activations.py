"""Statistics of activations from blocks of tokens × units, each read once: moments, norms, Gini, counts near zero, histograms.

Per token everything is exact; tokens are pooled afterwards (docs/activations.md). The near-zero threshold is a median absolute deviation
over more values than fit in memory. It is found by counting bit patterns of float32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int64

from mless.stats.shares import Margins, Verdict, band, holm, sign_flip
from mless.values import MAD_TO_SD

Change = Literal["difference", "log ratio"]

#: τ is this share of MAD_TO_SD · MAD(|a|), as published; the near-zero shares at τ/2, τ and 2τ are given.
NEAR_ZERO = 0.1
FACTORS: tuple[float, ...] = (0.5, 1.0, 2.0)

#: The metrics, and how an item is compared with itself: shares by their difference, sizes by the log of their ratio.
METRICS: dict[str, Change] = {
    "near_zero": "difference",
    "near_zero_half": "difference",
    "near_zero_double": "difference",
    "l1": "log ratio",
    "l2": "log ratio",
    "gini": "difference",
    "variance": "log ratio",
    "kurtosis": "log ratio",
}

#: Bins are counted in widths of τ: linear ones from −1000 to 1000, the zoom from −5 to 5 in tenths.
LINEAR_REACH, ZOOM_REACH, ZOOM_PARTS = 1000, 5, 10
#: Logarithmic bins: four in each octave of |a| from 2⁻²⁴ to 2¹⁶.
LOG_FROM, LOG_TO, LOG_PARTS = -24, 16, 4
#: How many bins `Counts` has of each kind, with the open ones at both ends.
BINS = {
    "linear": 2 * LINEAR_REACH + 2,
    "zoom": 2 * ZOOM_REACH * ZOOM_PARTS + 2,
    **dict.fromkeys(("positive", "negative"), LOG_PARTS * (LOG_TO - LOG_FROM) + 2),
}

# Non-negative float32 numbers sort like their bits read as an integer. The first pass counts by the upper 16 of the 31 bits. The second
# counts the lower 15 among values with the median's upper bits.
_LOW_BITS = 15
_UPPER, _LOWER = 1 << (31 - _LOW_BITS), 1 << _LOW_BITS


# ---- one block: tokens × units -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """What each token's activations are like: their moments about their own mean, norms, Gini, and how many are near zero."""

    units: int
    mean: Float64[np.ndarray, " tokens"]
    m2: Float64[np.ndarray, " tokens"]
    m3: Float64[np.ndarray, " tokens"]
    m4: Float64[np.ndarray, " tokens"]
    l1: Float64[np.ndarray, " tokens"]
    l2: Float64[np.ndarray, " tokens"]
    gini: Float64[np.ndarray, " tokens"]
    near_zero: Int64[np.ndarray, "tokens thresholds"]

    def __len__(self) -> int:
        return len(self.mean)

    @staticmethod
    def joined(parts: Sequence[TokenStatistics]) -> TokenStatistics:
        """The tokens of several blocks, one after the other."""
        names = ("mean", "m2", "m3", "m4", "l1", "l2", "gini", "near_zero")
        return TokenStatistics(parts[0].units, *(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def token_statistics(values: Float32[np.ndarray, "tokens units"], thresholds: Sequence[float]) -> TokenStatistics:
    """A block's tokens, each for itself. A value counts as near zero if |a| ≤ the threshold, so that a threshold of 0 counts zeros."""
    units = values.shape[1]
    exact = values.astype(np.float64)
    mean = exact.mean(axis=1)
    centred = exact - mean[:, None]
    squares = centred * centred
    magnitude = np.abs(values)
    magnitude.sort(axis=1)
    ordered = magnitude.astype(np.float64)
    near = np.stack([np.count_nonzero(ordered <= threshold, axis=1) for threshold in thresholds], axis=1)
    return TokenStatistics(
        units,
        mean,
        squares.sum(axis=1),
        (squares * centred).sum(axis=1),
        (squares * squares).sum(axis=1),
        ordered.sum(axis=1),
        np.sqrt((ordered * ordered).sum(axis=1)),
        gini_of_sorted(ordered),
        near.astype(np.int64),
    )


def gini_of_sorted(ordered: Float64[np.ndarray, "rows values"]) -> Float64[np.ndarray, " rows"]:
    """Gini of each row of magnitudes in ascending order: 0 where all are alike, 1 − 1/n where one has everything; NaN where all are 0."""
    n = ordered.shape[1]
    total = ordered.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (ordered * (2.0 * np.arange(1, n + 1) - n - 1)).sum(axis=1) / (n * total)


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums of powers of deviations from the mean, of any number of values."""

    n: int
    mean: float
    m2: float
    m3: float
    m4: float

    @property
    def variance(self) -> float:
        """The mean squared deviation; the values are all there are, so it is not divided by n − 1."""
        return self.m2 / self.n if self.n else math.nan

    @property
    def kurtosis(self) -> float:
        """The fourth moment over the squared variance: 3 for a normal distribution."""
        return self.n * self.m4 / self.m2**2 if self.m2 > 0 else math.nan


def pooled_moments(rows: TokenStatistics, chosen: Bool[np.ndarray, " tokens"] | None = None) -> Moments:
    """The moments of all values of the chosen tokens, from each token's own."""
    pick = slice(None) if chosen is None else chosen
    mean, m2, m3, m4 = rows.mean[pick], rows.m2[pick], rows.m3[pick], rows.m4[pick]
    if not len(mean):
        return Moments(0, math.nan, math.nan, math.nan, math.nan)
    units, middle = rows.units, float(mean.mean())
    d = mean - middle
    return Moments(
        units * len(mean),
        middle,
        float((m2 + units * d**2).sum()),
        float((m3 + 3 * d * m2 + units * d**3).sum()),
        float((m4 + 4 * d * m3 + 6 * d**2 * m2 + units * d**4).sum()),
    )


# ---- histograms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """How many values fall into each bin; the first and the last bin of each kind are open. `zeros` are in neither `positive` nor `negative`."""

    linear: Int64[np.ndarray, " linear"]
    zoom: Int64[np.ndarray, " zoom"]
    positive: Int64[np.ndarray, " octaves"]
    negative: Int64[np.ndarray, " octaves"]
    zeros: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.linear + other.linear,
            self.zoom + other.zoom,
            self.positive + other.positive,
            self.negative + other.negative,
            self.zeros + other.zeros,
        )


def count_values(values: Float32[np.ndarray, "tokens units"], width: float) -> Counts:
    """A block's values by bins: linear ones of `width`, a tenth of it in the zoom, and quarters of an octave of |a|."""
    flat = values.reshape(-1)
    # In single precision, like the values; edges are then rounded to float32, which no picture shows.
    steps = flat * np.float32(1 / width)
    at_zero = steps[(steps >= -ZOOM_REACH) & (steps < ZOOM_REACH)]
    zoom = _linear(at_zero * np.float32(ZOOM_PARTS), ZOOM_REACH * ZOOM_PARTS)
    zoom[0] += np.count_nonzero(steps < -ZOOM_REACH)
    zoom[-1] += np.count_nonzero(steps >= ZOOM_REACH)
    octaves = LOG_PARTS * (LOG_TO - LOG_FROM)
    # A float32's exponent and the first two bits after it are the quarter of the octave it lies in, its first bit is the sign.
    bits = flat.view(np.int32)
    place = ((bits & 0x7FFFFFFF) >> 21) - (LOG_PARTS * (LOG_FROM + 127) - 1)
    np.clip(place, 0, octaves + 1, out=place)
    place += (bits < 0) * np.int32(octaves + 2)
    positive, negative = np.bincount(place, minlength=2 * (octaves + 2)).reshape(2, -1)
    zero = flat == 0
    zeros, minus = int(np.count_nonzero(zero)), int(np.count_nonzero(bits[zero] < 0))
    positive[0] -= zeros - minus
    negative[0] -= minus
    return Counts(_linear(steps, LINEAR_REACH), zoom, positive, negative, zeros)


def _linear(steps: Float32[np.ndarray, " values"], reach: int) -> Int64[np.ndarray, " bins"]:
    """Counts of whole steps from −reach to reach, with an open bin at either end."""
    places = np.floor(steps)
    np.clip(places, -reach - 1, reach, out=places)
    return np.bincount(places.astype(np.int32) + np.int32(reach + 1), minlength=2 * reach + 2)


def linear_edges(width: float) -> Float64[np.ndarray, " edges"]:
    """The edges between the linear bins; the first bin lies below the first edge, the last above the last."""
    return np.arange(-LINEAR_REACH, LINEAR_REACH + 1) * width


def zoom_edges(width: float) -> Float64[np.ndarray, " edges"]:
    """The edges between the bins at zero."""
    return np.arange(-ZOOM_REACH * ZOOM_PARTS, ZOOM_REACH * ZOOM_PARTS + 1) * (width / ZOOM_PARTS)


def log_edges() -> Float64[np.ndarray, " edges"]:
    """The edges between the bins of |a|: 1, 1.25, 1.5 and 1.75 times each power of two, whatever the data."""
    quarters = np.arange(LOG_PARTS * (LOG_TO - LOG_FROM) + 1)
    return 2.0 ** (LOG_FROM + quarters // LOG_PARTS) * (1 + quarters % LOG_PARTS / LOG_PARTS)


# ---- the threshold of near zero ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NearZero:
    """The lower median of |a|, the lower median of its absolute deviation from it, τ, and the width of the linear bins.

    The width is τ; where τ is 0, as it is when half of the values are exactly 0, it is a tenth of a typical other magnitude.
    """

    median: float
    mad: float
    threshold: float
    width: float


class _MedianSearch:
    """The exact lower median of non-negative float32 numbers, read twice."""

    def __init__(self) -> None:
        self.upper = np.zeros(_UPPER, np.int64)
        self._lower = np.zeros(_LOWER, np.int64)
        self._bin: int | None = None
        self._left = 0

    def add(self, values: Float32[np.ndarray, " values"]) -> None:
        bits = values.view(np.int32)
        if self._bin is None:
            self.upper += np.bincount(bits >> _LOW_BITS, minlength=_UPPER)
        else:
            here = bits[(bits >> _LOW_BITS) == self._bin]
            self._lower += np.bincount(here & (_LOWER - 1), minlength=_LOWER)

    def narrow(self) -> None:
        """After the first pass: which upper bits the median has, and its rank among the values that share them."""
        total = int(self.upper.sum())
        if not total:
            raise ValueError("no values passed by, so there is no median")
        self._bin, self._left = _rank(self.upper, (total - 1) // 2)

    def found(self) -> float:
        assert self._bin is not None
        low, _ = _rank(self._lower, self._left)
        return _value(self._bin << _LOW_BITS | low)


def _rank(counts: Int64[np.ndarray, " bins"], rank: int) -> tuple[int, int]:
    """The bin that holds the value of that rank (from 0), and its rank inside the bin."""
    cumulated = np.cumsum(counts)
    at = int(np.searchsorted(cumulated, rank, side="right"))
    return at, rank - (int(cumulated[at - 1]) if at else 0)


def _value(bits: int) -> float:
    return float(np.array([bits], np.int32).view(np.float32)[0])


def near_zero_of(
    layers: Sequence[int], stream: Callable[[Callable[[int, Float32[np.ndarray, "tokens units"]], None]], None]
) -> dict[int, NearZero]:
    """τ = 1.4826 · MAD(|a|) · 0.1 of each layer, exact, however many values there are.

    `stream(take)` calls `take(layer, values)` for every block of every layer. It is called four times and must give the same values each
    time. Medians are lower ones, as ARM's are; deviations are rounded to float32.
    """

    def median(transform: Callable[[int, Float32[np.ndarray, " values"]], Float32[np.ndarray, " values"]]):
        searches = {layer: _MedianSearch() for layer in layers}

        def take(layer: int, values: Float32[np.ndarray, "tokens units"]) -> None:
            searches[layer].add(transform(layer, np.abs(values.reshape(-1))))

        stream(take)
        for search in searches.values():
            search.narrow()
        stream(take)
        return searches

    first = median(lambda _, magnitude: magnitude)
    medians = {layer: search.found() for layer, search in first.items()}
    second = median(lambda layer, magnitude: np.abs(magnitude - np.float32(medians[layer])))
    found: dict[int, NearZero] = {}
    for layer in layers:
        mad = second[layer].found()
        threshold = MAD_TO_SD * mad * NEAR_ZERO
        width = threshold
        if not width:
            others = first[layer].upper.copy()
            others[0] = 0  # zeros, and magnitudes smaller than any activation
            total = int(others.sum())
            width = NEAR_ZERO * _value(_rank(others, (total - 1) // 2)[0] << _LOW_BITS) if total else 1.0
        found[layer] = NearZero(medians[layer], mad, threshold, width)
    return found


# ---- pairs of items ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairedChange:
    """A metric in some rows (layers), with a condition against without: means, the change with its interval and test, and its verdict."""

    value: Float64[np.ndarray, " rows"]
    none: Float64[np.ndarray, " rows"]
    difference: Float64[np.ndarray, " rows"]
    lo: Float64[np.ndarray, " rows"]
    hi: Float64[np.ndarray, " rows"]
    p: Float64[np.ndarray, " rows"]
    p_adjusted: Float64[np.ndarray, " rows"]
    n: Int[np.ndarray, " rows"]
    verdict: list[Verdict]


def paired_change(
    values: Float64[np.ndarray, "items rows"],
    none: Float64[np.ndarray, "items rows"],
    rng: np.random.Generator,
    *,
    scale: Change,
    margins: Margins | None = None,
    flips: int = 100_000,
    names: Sequence[str] | None = None,
) -> PairedChange:
    """What a condition changes, item by item: differences or log ratios, t interval, sign-flip, Holm over the rows.

    The items are the sample; values inside one are not independent. An item that is undefined on either side (or 0, where a log is taken)
    is left out of that row, and `n` says how many are left. A verdict asks how large the change is beside the mean without: margins are
    shares of it, on either scale.
    """
    margins = margins or Margins()
    if scale == "log ratio":
        with np.errstate(divide="ignore", invalid="ignore"):
            changes = np.where((values > 0) & (none > 0), np.log(values / none), np.nan)
    else:
        changes = values - none
    known = ~np.isnan(changes)
    interval = band(changes)
    test = sign_flip(changes, rng, flips=flips, names=names)
    mean_value, mean_none = (_mean(np.where(known, side, np.nan)) for side in (values, none))
    if scale == "log ratio":
        low, high = np.exp(interval.lo), np.exp(interval.hi)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = ((mean_none + bound) / mean_none for bound in (interval.lo, interval.hi))
    verdicts: list[Verdict] = [
        margins.verdict(float(a), float(b)) if math.isfinite(a) and math.isfinite(b) else "undecided"
        for a, b in zip(low, high, strict=True)
    ]
    return PairedChange(
        mean_value, mean_none, interval.mean, interval.lo, interval.hi, test.p, holm(test.p), test.n, verdicts
    )


def _mean(values: Float64[np.ndarray, "items rows"]) -> Float64[np.ndarray, " rows"]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nansum(values, axis=0) / np.count_nonzero(~np.isnan(values), axis=0)


def levene(
    n: Float64[np.ndarray, " items"],
    deviation: tuple[Float64[np.ndarray, "items rows"], Float64[np.ndarray, "items rows"]],
    variance: tuple[Float64[np.ndarray, "items rows"], Float64[np.ndarray, "items rows"]],
) -> Float64[np.ndarray, "items rows"]:
    """Levene's W of two groups of n values each, from their mean absolute deviations and their variances.

    A description, not a test: values of one prompt are not independent, and with a hundred thousand of them any W is "significant".
    """
    (first, second), size = deviation, n[:, None]
    within = variance[0] - first**2 + variance[1] - second**2
    with np.errstate(divide="ignore", invalid="ignore"):
        return (size - 1) * (first - second) ** 2 / within


def metrics_of(rows: TokenStatistics, chosen: Bool[np.ndarray, " tokens"]) -> tuple[dict[str, float], Moments]:
    """The metrics of the chosen tokens: shares of values near zero, norms and Gini as means over tokens, moments of all their values."""
    moments = pooled_moments(rows, chosen)
    names = ("near_zero_half", "near_zero", "near_zero_double")
    if not chosen.any():
        return dict.fromkeys(METRICS, math.nan), moments
    shares = rows.near_zero[chosen].sum(axis=0) / moments.n
    gini = rows.gini[chosen]
    return {
        **{name: float(share) for name, share in zip(names, shares, strict=True)},
        "l1": float(rows.l1[chosen].mean()),
        "l2": float(rows.l2[chosen].mean()),
        "gini": float(gini[~np.isnan(gini)].mean()) if not np.isnan(gini).all() else math.nan,
        "variance": moments.variance,
        "kurtosis": moments.kurtosis,
    }, moments
