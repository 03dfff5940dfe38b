"""Effects of several models put together: random-effects mean, how models differ, and by what (docs/statistics.md, *Many models*).

Model i has an effect y_i with a standard error s_i over its items. Its true effect is drawn around the mean of all models with variance τ².
So an interval of the mean holds for models like these, and not only for these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float64

from mless.errors import BadData
from mless.stats.paired import normal_quantile

#: A standard error below this share of the largest one is rounding, and would have all the weight.
_SMALLEST = 1e-8
#: An interval is at least so much of the plain one at τ² = 0. With all of it, models that hardly differ would be covered in 99 %.
_FLOOR = 1 / 3
#: The τ² that fit are taken at evenly spaced normal quantiles of Q, so far out and so far apart.
_OUT, _APART = 8.0, 0.1
#: More than Newton's steps have ever needed.
_STEPS = 100
#: Points of a prediction, and the root of x⁴ = x + 1: its powers place points evenly in a cube.
_POINTS, _EVEN = 4096, 1.2207440846057596


@dataclass(frozen=True, slots=True)
class Pooled:
    """The mean effect of k models, and how far models differ.

    `lo` to `hi` is the interval of the mean over all τ² that fit, as `p` is (`error` is half its width over t). `predicted_lo` to
    `predicted_hi` is that of a further model's effect. `tau2` (REML, with a Q-profile interval) is the
    variance between models, `i2` its share in all variance that is seen, `q` and `q_p` the test of "no difference between models". `weights`
    sum to 1. NaN: k is too small to tell.
    """

    k: int
    mean: float
    error: float
    lo: float
    hi: float
    p: float
    tau2: float
    tau2_lo: float
    tau2_hi: float
    i2: float
    q: float
    q_p: float
    predicted_lo: float
    predicted_hi: float
    weights: Float64[np.ndarray, " models"]


@dataclass(frozen=True, slots=True)
class Subgroup:
    """The mean effect of the models of one kind, with the variance between models that all kinds share."""

    name: str
    k: int
    mean: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Moderated:
    """Whether models differ by a property. By kinds: each kind's mean. By a number: the slope, effect a unit.

    `p` tests "it makes no difference", over all τ² that fit; `free` are the degrees of freedom that tell them. `tau2` is the variance between
    models that is left.
    """

    k: int
    groups: tuple[Subgroup, ...] = ()
    slope: float = math.nan
    slope_lo: float = math.nan
    slope_hi: float = math.nan
    p: float = math.nan
    free: int = 0
    tau2: float = math.nan


@dataclass(frozen=True, slots=True)
class _Fit:
    """A weighted regression: its coefficients with τ² by REML, and what it is at each τ² that fits, with how likely that τ² is.

    At the true τ² coefficients are normal around the truth with covariance (XᵀWX)⁻¹, and Q is χ². So the p of a value is the mean of the
    plain p over τ², each as likely as its Q. With equal errors that is Student's t and Fisher's F. With one estimate of τ² instead, the weights
    would pass for known, which covers too little where models' errors differ much.
    """

    tau2: float
    beta: Float64[np.ndarray, " columns"]
    free: int
    likely: Float64[np.ndarray, " places"]
    betas: Float64[np.ndarray, "places columns"]
    covariances: Float64[np.ndarray, "places columns columns"]

    def between(self, column: int, level: float) -> tuple[float, float]:
        """The values of a coefficient whose p is above 1 − level."""
        from scipy.optimize import brentq
        from scipy.special import ndtr

        centres, errors = self.betas[:, column], np.sqrt(self.covariances[:, column, column])

        def above(value: float) -> float:
            return float(self.likely @ (2 * ndtr(-np.abs(centres - value) / errors))) - (1 - level)

        # the estimate by REML need not have the largest p
        estimate = float(self.beta[column])
        start = max([estimate, *centres.tolist()], key=above)
        if above(start) <= 0:
            return estimate, estimate  # so low a level that nothing is inside

        def end(direction: int) -> float:
            step = float(errors.min())
            while above(start + direction * step) > 0:
                step *= 2
            found: Any = brentq(above, start, start + direction * step, xtol=1e-12 * step)
            return float(found)

        return min(end(-1), estimate), max(end(1), estimate)

    def p(self, contrast: Float64[np.ndarray, "rows columns"]) -> float:
        """The test that all rows of the contrast are 0; NaN without rows."""
        from scipy.special import chdtrc

        if not len(contrast):
            return math.nan
        away = self.betas @ contrast.T
        solved = np.linalg.solve(contrast @ self.covariances @ contrast.T, away[..., None])[..., 0]
        return float(self.likely @ chdtrc(len(contrast), (away * solved).sum(axis=1)))


def random_effects(
    effects: Float[np.ndarray, " models"], errors: Float[np.ndarray, " as_many"], level: float = 0.95
) -> Pooled:
    """The random-effects mean of the models' effects, each with its standard error.

    One model has a mean and no interval: nothing is known of others. Two have an interval with one degree of freedom and no prediction.
    """
    y, v = _checked(effects, errors)
    normal_quantile(level)
    k = len(y)
    nan = math.nan
    if k < 2:
        return Pooled(k, float(y[0]), nan, nan, nan, nan, nan, nan, nan, nan, nan, nan, nan, nan, np.ones(1))
    from scipy.special import chdtrc, stdtrit

    fit = _fit(y, v, np.ones((k, 1)))
    mean_lo, mean_hi = fit.between(0, level)
    weights = 1 / (v + fit.tau2)
    q = float(_means(y, v, np.zeros(1))[1][0])
    lo, hi = _profile(y, v, level)
    further = _predicted(y, v, level) if k > 2 else (nan, nan)
    return Pooled(
        k=k,
        mean=float(fit.beta[0]),
        error=(mean_hi - mean_lo) / 2 / float(stdtrit(k - 1, (1 + level) / 2)),
        lo=mean_lo,
        hi=mean_hi,
        p=fit.p(np.ones((1, 1))),
        tau2=fit.tau2,
        tau2_lo=lo,
        tau2_hi=hi,
        i2=fit.tau2 / (fit.tau2 + _typical(v)),
        q=q,
        q_p=float(chdtrc(k - 1, q)),
        predicted_lo=further[0],
        predicted_hi=further[1],
        weights=weights / weights.sum(),
    )


def by_kind(
    effects: Float[np.ndarray, " models"],
    errors: Float[np.ndarray, " as_many"],
    kinds: Sequence[str],
    level: float = 0.95,
) -> Moderated:
    """The mean of every kind of model, and whether they differ. All kinds share one τ²: few models each cannot tell their own."""
    y, v = _checked(effects, errors)
    normal_quantile(level)
    _as_many(kinds, y)
    names = list(dict.fromkeys(kinds))
    counts = [sum(kind == name for kind in kinds) for name in names]
    k, groups = len(y), len(names)
    if k <= groups:
        alone = [float(y[[kind == name for kind in kinds]][0]) for name in names]
        found = tuple(Subgroup(name, 1, value, math.nan, math.nan) for name, value in zip(names, alone, strict=True))
        return Moderated(k, found)
    fit = _fit(y, v, np.array([[float(kind == name) for name in names] for kind in kinds]))
    found = tuple(
        Subgroup(name, count, float(fit.beta[at]), *fit.between(at, level))
        for at, (name, count) in enumerate(zip(names, counts, strict=True))
    )
    contrast = np.concatenate([np.eye(groups - 1), -np.ones((groups - 1, 1))], axis=1)
    return Moderated(k, found, p=fit.p(contrast), free=fit.free, tau2=fit.tau2)


def by_number(
    effects: Float[np.ndarray, " models"],
    errors: Float[np.ndarray, " as_many"],
    numbers: Float[np.ndarray, " numbers"],
    level: float = 0.95,
) -> Moderated:
    """How the effect changes with a number, such as the logarithm of a model's size. Three models at least have an interval."""
    y, v = _checked(effects, errors)
    normal_quantile(level)
    _as_many(numbers, y)
    if not np.isfinite(numbers).all():
        raise BadData(f"a finite number for every model expected; got {numbers[~np.isfinite(numbers)][0]}")
    x = numbers.astype(np.float64)
    if len(y) < 3 or np.ptp(x) == 0:
        return Moderated(len(y))
    # in units of its own spread, so that a number such as 7e9 loses no digits
    centre, scale = float(np.median(x)), float(np.ptp(x))
    fit = _fit(y, v, np.stack([np.ones(len(x)), (x - centre) / scale], axis=1))
    slope, (lo, hi) = float(fit.beta[1]) / scale, fit.between(1, level)
    p = fit.p(np.array([[0.0, 1.0]]))
    return Moderated(len(y), (), slope, lo / scale, hi / scale, p, fit.free, fit.tau2)


# ---- the regression --------------------------------------------------------------------------------------------------


def _fit(
    y: Float64[np.ndarray, " models"], v: Float64[np.ndarray, " models"], x: Float64[np.ndarray, "models columns"]
) -> _Fit:
    """Weighted least squares with weights 1/(s² + τ²), τ² by restricted maximum likelihood."""
    tau2 = _reml(y, v, x)
    free = len(y) - x.shape[1]
    q_drawn, likely = _quantiles(free)
    fitting = _tau2_at(y, v, x, q_drawn)
    betas, inverses, _ = _solve(y, v + fitting[:, None], x)
    _, _, left = _solve(y, v[None, :], x)
    # models that agree better than their errors say: errors are then taken to be smaller, all by one factor
    smaller = np.clip(float((left**2 / v).sum()) / q_drawn, _FLOOR**2, 1.0)
    beta = _solve(y, v[None, :] + tau2, x)[0][0]
    return _Fit(tau2, beta, free, likely, betas, inverses * smaller[:, None, None])


def _solve(
    y: Float64[np.ndarray, " models"],
    variance: Float64[np.ndarray, "places models"],
    x: Float64[np.ndarray, "models columns"],
) -> tuple[
    Float64[np.ndarray, "places columns"],
    Float64[np.ndarray, "places columns columns"],
    Float64[np.ndarray, "places models"],
]:
    """The coefficients, (XᵀWX)⁻¹, and what is left of each model, for many variances at once."""
    weighted = x / variance[..., None]
    inverse = np.linalg.inv(weighted.swapaxes(1, 2) @ x)
    beta = (inverse @ (weighted * y[:, None]).sum(axis=1)[..., None])[..., 0]
    return beta, inverse, y - beta @ x.T


@functools.lru_cache(maxsize=64)  # depends on the degrees of freedom only
def _quantiles(free: int) -> tuple[Float64[np.ndarray, " places"], Float64[np.ndarray, " places"]]:
    """Values of χ², far into both tails, and how likely each is."""
    from scipy.special import chdtri, ndtr

    at = np.arange(-_OUT, _OUT + _APART / 2, _APART)
    likely = np.exp(-(at**2) / 2)
    return chdtri(free, ndtr(at)), likely / likely.sum()


def _tau2_at(
    y: Float64[np.ndarray, " models"],
    v: Float64[np.ndarray, " models"],
    x: Float64[np.ndarray, "models columns"],
    q: Float64[np.ndarray, " places"],
) -> Float64[np.ndarray, " places"]:
    """The τ² at which Q is each `q`; 0 where it is below that without any.

    By Newton's steps on 1/Q. It is concave and nearly straight, so steps from 0 never go too far.
    """
    tau2 = np.zeros(len(q))
    for _ in range(_STEPS):
        variance = v + tau2[:, None]
        weighted = _solve(y, variance, x)[2] / variance
        here = (weighted**2 * variance).sum(axis=1)
        far = here > q * (1 + 1e-9)
        if not far.any():
            break
        tau2[far] += ((here / q - 1) * here)[far] / (weighted**2).sum(axis=1)[far]
    return tau2


def _reml(
    y: Float64[np.ndarray, " models"], v: Float64[np.ndarray, " models"], x: Float64[np.ndarray, "models columns"]
) -> float:
    """The τ² ≥ 0 at which the restricted likelihood is highest."""
    from scipy.optimize import minimize_scalar

    # in units of the variance that is seen, so that nats a token and points of accuracy are searched alike
    _, _, plain = _solve(y, np.ones((1, len(y))), x)
    unit = float((plain**2).sum()) / (len(y) - x.shape[1]) + float(v.mean())

    small, within = y / math.sqrt(unit), v / unit

    def loss(tau2: Float64[np.ndarray, " places"]) -> Float64[np.ndarray, " places"]:
        """−2 log likelihood, for many τ² at once."""
        variance = within + tau2[:, None]
        weighted = x / variance[..., None]
        information = weighted.swapaxes(1, 2) @ x
        beta = np.linalg.solve(information, (weighted * small[:, None]).sum(axis=1)[..., None])
        left = small - (x @ beta)[..., 0]
        return np.log(variance).sum(axis=1) + np.linalg.slogdet(information)[1] + (left**2 / variance).sum(axis=1)

    # several hills are possible: look at a grid first, and refine around its lowest place
    grid = np.concatenate([[0.0], np.geomspace(min(1e-6, 1e-3 * float(within.min())), 10.0, 120)])
    at = int(np.argmin(loss(grid)))
    if at == 0:
        return 0.0
    around = float(grid[at - 1]), float(grid[min(at + 1, len(grid) - 1)])
    found = minimize_scalar(
        lambda tau2: float(loss(np.array([tau2]))[0]), bounds=around, method="bounded", options={"xatol": 1e-12}
    )
    return float(found.x) * unit


# ---- how far models differ -------------------------------------------------------------------------------------------


def _means(
    y: Float64[np.ndarray, " models"], v: Float64[np.ndarray, " models"], tau2: Float64[np.ndarray, " places"]
) -> tuple[Float64[np.ndarray, " places"], Float64[np.ndarray, " places"], Float64[np.ndarray, " places"]]:
    """The weighted mean, Cochran's Q and the sum of weights, with each τ² added to every variance.

    Q falls as τ² grows, and is χ² with k − 1 degrees of freedom at the true τ².
    """
    weights = 1 / (v + tau2[:, None])
    total = weights.sum(axis=1)
    mean = (weights * y).sum(axis=1) / total
    return mean, (weights * (y - mean[:, None]) ** 2).sum(axis=1), total


def _profile(y: Float64[np.ndarray, " models"], v: Float64[np.ndarray, " models"], level: float) -> tuple[float, float]:
    """The τ² at which Q is no longer too large, and not yet too small (Viechtbauer 2007)."""
    from scipy.special import chdtri

    free, tail = len(y) - 1, (1 - level) / 2
    lo, hi = _tau2_at(y, v, np.ones((len(y), 1)), chdtri(free, np.array([tail, 1 - tail]))).tolist()
    return lo, hi


def _predicted(
    y: Float64[np.ndarray, " models"], v: Float64[np.ndarray, " models"], level: float
) -> tuple[float, float]:
    """Where a further model's effect lies, over all τ² that these models allow (Nagashima, Noma and Furukawa 2019).

    τ² is as likely as Q is at it; given τ², the mean varies by Hartung and Knapp's t and the further model by τ. With one estimate of τ²
    instead, which is often 0, the interval would be too narrow.
    """
    k = len(y)
    q_drawn, t_drawn, own, z_drawn = _drawn(k)
    tau2 = _tau2_at(y, v, np.ones((k, 1)), q_drawn)
    mean, q, weight = _means(y, v, tau2)
    wide = np.maximum(np.abs(t_drawn) * np.sqrt(q / (k - 1)), np.abs(own)) / np.sqrt(weight)
    drawn = mean + np.copysign(wide, t_drawn) + z_drawn * np.sqrt(tau2)
    lo, hi = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(lo), float(hi)


@functools.lru_cache(maxsize=64)  # slow, and depends on k only
def _drawn(k: int) -> tuple[Float64[np.ndarray, " points"], ...]:
    """χ² and t with k − 1 degrees of freedom, a normal number at t's place, and another one, at fixed points that fill a cube evenly."""
    from scipy.special import chdtri, ndtri, stdtrit

    at = (0.5 + np.arange(1, _POINTS + 1)[:, None] / _EVEN ** np.arange(1, 4)) % 1
    return chdtri(k - 1, at[:, 0]), stdtrit(k - 1, at[:, 1]), ndtri(at[:, 1]), ndtri(at[:, 2])


def _typical(v: Float64[np.ndarray, " models"]) -> float:
    """The variance within a typical model (Higgins and Thompson), which I² sets beside τ²."""
    weights = np.sort(v.min() / v)
    # (Σw)² − Σw² as a sum of products, because one model may have nearly all the weight
    pairs = 2 * float((weights[1:] * np.cumsum(weights)[:-1]).sum())
    return float(v.min()) * (len(v) - 1) * float(weights.sum()) / pairs


# ---- what is refused -------------------------------------------------------------------------------------------------


def _checked(
    effects: Float[np.ndarray, " models"], errors: Float[np.ndarray, " as_many"]
) -> tuple[Float64[np.ndarray, " models"], Float64[np.ndarray, " models"]]:
    if len(effects) != len(errors):
        raise BadData(f"a standard error for every effect expected; got {len(errors)} for {len(effects)}")
    if not len(effects):
        raise BadData("no effects: at least one model expected")
    for at, (effect, error) in enumerate(zip(effects.tolist(), errors.tolist(), strict=True)):
        if not math.isfinite(effect):
            raise BadData(f"model {at + 1} (numbered from 1): the effect is {effect}, expected a finite number")
        if not 0 < error < math.inf:
            raise BadData(
                f"model {at + 1} (numbered from 1): the standard error is {error}, expected a finite number above 0; a model whose items do not "
                "vary cannot be weighed against others"
            )
    y, s = effects.astype(np.float64), errors.astype(np.float64)
    if s.min() < _SMALLEST * s.max() or not 1e-150 < s.max() < 1e150:
        raise BadData(
            f"standard errors from {s.min():g} to {s.max():g}: the smallest is expected to be at least {_SMALLEST:g} of the largest, and that to lie "
            "between 1e-150 and 1e150; a model whose items do not vary cannot be weighed against others: leave it out"
        )
    return y, s**2


def _as_many(given: Sequence[str] | Float[np.ndarray, " some"], y: Float64[np.ndarray, " models"]) -> None:
    if len(given) != len(y):
        raise BadData(f"a value of the moderator for every model expected; got {len(given)} for {len(y)} models")
