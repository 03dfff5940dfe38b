"""The metrics of a likelihood study, and how their numbers are written: the same in verdicts, pictures and pages."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LikelihoodMetric:
    """What a metric is, in words that follow "the"; `share`: a number from 0 to 1, and no nats."""

    words: str
    unit: str
    share: bool = False


#: In the order of tables and pages.
LIKELIHOOD_METRICS: dict[str, LikelihoodMetric] = {
    "solution": LikelihoodMetric("reference solution", "nats a token"),
    "contrast": LikelihoodMetric("answer against other answers", "nats"),
    "answer": LikelihoodMetric("answer right after the prompt", "nats"),
    "answer-after-solution": LikelihoodMetric("answer after the solution's reasoning", "nats"),
    "choice": LikelihoodMetric("right option chosen", "share", share=True),
    "choice-normalised": LikelihoodMetric("right option chosen, by nats a character", "share", share=True),
    "margin": LikelihoodMetric("right option against the best other", "nats"),
    "margin-normalised": LikelihoodMetric("right option against the best other", "nats a character"),
    "kl": LikelihoodMetric("distance of next-token distributions from none's", "nats a token"),
    "entropy": LikelihoodMetric("entropy of next-token distributions", "nats a token"),
    "top-1 agreement": LikelihoodMetric("same most likely token as none", "share", share=True),
}

#: And what is counted in answers drawn, which placebos are compared by too.
METRICS_OF_CHANGE = LIKELIHOOD_METRICS | {"pass@1": LikelihoodMetric("right answers drawn", "share", share=True)}


def signed(value: float | None, metric: str) -> str:
    """``+0.0029``, ``−1.04``, and for shares points: ``+1.2``."""
    if value is None or math.isnan(value):
        return "–"
    if METRICS_OF_CHANGE[metric].share:
        text = f"{100 * value:+.1f}"
    else:
        text = f"{value:+.{digits(metric)}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def level(value: float | None, metric: str) -> str:
    """A value and no change: ``−1.5658``, and for shares per cent: ``63.9 %``."""
    if value is None or math.isnan(value):
        return "–"
    if LIKELIHOOD_METRICS[metric].share:
        return f"{100 * value:.1f} %"
    return f"{value:.{digits(metric)}f}".replace("-", "−")


def size(value: float | None, metric: str) -> str:
    """A change without its sign: ``0.0029``, and for shares points: ``1.2``."""
    return signed(None if value is None else abs(value), metric).lstrip("+")


def unit_of_change(metric: str) -> str:
    """What a Δ is counted in: ``nats a token``, ``points``."""
    return "points" if METRICS_OF_CHANGE[metric].share else METRICS_OF_CHANGE[metric].unit


def digits(metric: str) -> int:
    """Digits after the point: effects on a whole solution are small when said by the token."""
    return 4 if METRICS_OF_CHANGE[metric].unit in ("nats a token", "nats a character") else 3


def around(lo: float | None, hi: float | None, metric: str) -> str:
    """`` [+0.0018, +0.0040]``; nothing where there is no interval."""
    if lo is None or hi is None or math.isnan(lo) or math.isnan(hi):
        return ""
    return f" [{signed(lo, metric)}, {signed(hi, metric)}]"


def times(nats: float) -> str:
    """``1.8 × as likely``: what so many nats do to a probability."""
    factor = math.exp(min(abs(nats), 700.0))
    if factor < 1.005:
        return "as likely as before"
    shown = (
        f"{factor:.2f}"
        if factor < 1.095
        else f"{factor:.1f}"
        if factor < 9.95
        else f"{factor:,.0f}"
        if factor < 1e6
        else f"{factor:.0e}"
    )
    return f"{shown} × as likely" if nats > 0 else f"{shown} × less likely"


def weighed(metric: str, delta: float, tokens: float | None) -> str:
    """A change as a person can weigh it; empty for what is no probability."""
    if metric == "solution" and tokens:
        return f"a solution of {tokens:,.0f} tokens becomes {times(delta * tokens)}"
    if metric in ("answer", "answer-after-solution"):
        return f"the answer becomes {times(delta)}"
    if metric == "contrast":
        return f"against other answers it becomes {times(delta)}"
    return ""
