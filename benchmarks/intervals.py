"""How often nominal 95 % intervals of a mean cover it, by method, shape of the items and their number; the table of docs/statistics.md.

python benchmarks/intervals.py    prints the table as Markdown (fixed seeds; a minute or two)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from mless.stats.intervals import mean_intervals

REPEATS, RESAMPLES, AT_ONCE = 4000, 2000, 500
COUNTS = (8, 12, 24, 60)
Bounds = tuple[np.ndarray, np.ndarray]
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def odd_ones(far: float) -> Draw:
    """One item in twenty lies `far` standard deviations of the others away."""
    return lambda rng, size: rng.normal(size=size) + far * (rng.random(size) < 0.05)


SHAPES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, size: rng.normal(size=size), 0.0),
    "lognormal, σ = 0.5": (lambda rng, size: rng.lognormal(0, 0.5, size=size), math.exp(0.125)),
    "lognormal, σ = 1": (lambda rng, size: rng.lognormal(0, 1, size=size), math.exp(0.5)),
    "5 % outliers, 5 sd": (odd_ones(5), 0.25),
    "5 % outliers, 7 sd": (odd_ones(7), 0.35),
    "5 % outliers, 10 sd": (odd_ones(10), 0.5),
}


def intervals(values: np.ndarray) -> dict[str, Bounds]:
    """Every method's bounds for each column."""
    n = len(values)
    values = np.sort(values, axis=0)
    mean, t = values.mean(0), float(stdtrit(n - 1, 0.975))
    away = values - mean
    sd = values.std(0, ddof=1)
    error = sd / math.sqrt(n)
    skewness = (away**3).mean(0) / (away**2).mean(0) ** 1.5 * math.sqrt(n * (n - 1)) / (n - 2)
    a = skewness / math.sqrt(n)

    def hall(x: float) -> np.ndarray:
        root = np.cbrt(1 + a * (x - a / 6))
        return 3 * (x - a / 6) / (root * root + root + 1)

    rng = np.random.default_rng(n)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)
    means = counts @ away / n
    spread = np.sqrt(np.maximum(counts @ away**2 / n - means**2, 0) * n / (n - 1))
    tiny = spread <= 1e-9 * sd  # every item the same: as far out as can be
    studentised = np.where(tiny, np.sign(means) * 1e9, means * math.sqrt(n) / np.where(tiny, 1.0, spread))
    ranked = np.sort(studentised, axis=0)
    edge = RESAMPLES // 40
    far = np.sort(np.abs(studentised), axis=0)[-2 * edge]

    below = np.clip((means < 0).mean(0), 1 / RESAMPLES, 1 - 1 / RESAMPLES)
    bias, acceleration = ndtri(below), (away**3).sum(0) / (6 * (away**2).sum(0) ** 1.5)
    sorted_means = np.sort(means, axis=0)

    def bca(level: float) -> np.ndarray:
        z = bias + ndtri(level)
        at = np.clip((ndtr(bias + z / (1 - acceleration * z)) * RESAMPLES).astype(int), 0, RESAMPLES - 1)
        return mean + sorted_means[at, np.arange(values.shape[1])]

    ours = mean_intervals(values)
    middle = mean + skewness * sd / (6 * n)
    return {
        "Student's t": (mean - t * error, mean + t * error),
        "Johnson's t": (middle - t * error, middle + t * error),
        "BCa bootstrap": (bca(0.025), bca(0.975)),
        "bootstrap-t": (mean - ranked[-edge] * error, mean - ranked[edge - 1] * error),
        "bootstrap-t, symmetric": (mean - far * error, mean + far * error),
        "Hall's limits": (mean - hall(t) * error, mean - hall(-t) * error),
        "**Hall's, no nearer than t (used)**": (ours.lo, ours.hi),
    }


def coverage() -> dict[tuple[str, str, int], float]:
    """(shape, method, n) → the share of data sets whose interval holds the true mean."""
    found: dict[tuple[str, str, int], float] = {}
    for shape, (draw, true) in SHAPES.items():
        for n in COUNTS:
            values = draw(np.random.default_rng(n), (n, REPEATS))
            for first in range(0, REPEATS, AT_ONCE):
                for method, (lo, hi) in intervals(values[:, first : first + AT_ONCE]).items():
                    held = float(np.sum((lo <= true) & (true <= hi))) / REPEATS
                    found[shape, method, n] = found.get((shape, method, n), 0.0) + held
    return found


def main() -> None:
    found = coverage()
    methods = list(dict.fromkeys(method for _, method, _ in found))
    print("| method | " + " | ".join(SHAPES) + " |")
    print("|---" * (len(SHAPES) + 1) + "|")
    for method in methods:
        cells = [" / ".join(f"{100 * found[shape, method, n]:.0f}" for n in COUNTS) for shape in SHAPES]
        print(f"| {method} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
