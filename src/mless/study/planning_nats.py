"""The plan of a likelihood study, from a finished one: how its items vary says what more or fewer of them can show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mless import limits, stats
from mless.errors import BadData, BadStudy
from mless.gates import check_count
from mless.registry import near
from mless.results.folder import ResultFolder
from mless.results.nats import LIKELIHOOD_METRICS, signed, weighed
from mless.values import counted


# Over 60 lines: one plan, and most of it names what it returns.
def plan_nats(
    pilot: Path,
    items: int | None,
    effect: float | None,
    metric: str | None = None,
    power: float = 0.8,
    alpha: float = 0.05,
    conditions: int | None = None,
    margin: float | None = None,
) -> dict[str, Any]:
    """What `items` can show in a metric, and how many an effect or equivalence takes, if items vary as in the `pilot`.

    `effect` and `margin` are in the metric's unit; without them the pilot's own margin is taken for both. The condition whose items vary most
    decides. Each of `conditions` (default: as in the pilot) is planned at Holm's first step, alpha / conditions.
    """
    check_count(items, "items", limits.PLANNED_ITEMS, BadStudy)
    if not 0 < alpha < power < 1:
        raise BadStudy(f"power must lie between alpha and 1, as 0.8 does; got {power:g} (alpha {alpha:g})")
    folder = ResultFolder(pilot)
    about = folder.about() or {}
    values = folder.read_table("likelihood", columns=["condition", "metric", "delta"]).to_pylist()
    judged = {(row["condition"], row["metric"]): row for row in folder.read_table("effects").to_pylist()}
    tested = [
        name for name in LIKELIHOOD_METRICS if any(row["metric"] == name and row["verdict"] for row in judged.values())
    ]
    if not tested:
        raise BadStudy(f"the pilot {pilot} compares no condition with none; run it with one more")
    metric = metric or tested[0]
    if metric not in tested:
        raise BadStudy(f"metric: no {metric!r}{near(metric, tested)} in the pilot {pilot}; it has {', '.join(tested)}")
    mine = {row["condition"]: row for (_, name), row in judged.items() if name == metric and row["verdict"]}
    margin = margin if margin is not None else float(next(iter(mine.values()))["margin"])
    wanted = effect if effect is not None else margin
    for what, number in (("margin", margin), ("effect", wanted)):
        if not 0 < number < math.inf:
            raise BadStudy(f"{what}: a number above 0 expected, in {LIKELIHOOD_METRICS[metric].unit}; got {number:g}")
    count = len(mine) if conditions is None else conditions
    check_count(count, "conditions compared with none", limits.CONDITIONS, BadStudy)
    each = alpha / count
    plans: dict[str, stats.PilotPlan] = {}
    for name in mine:
        deltas = np.array([row["delta"] for row in values if row["condition"] == name and row["metric"] == metric])
        try:
            plans[name] = stats.items_from_pilot(deltas, wanted, power, each)
        except BadData as fault:
            raise BadStudy(f"the pilot {pilot}, condition {name!r}: {fault}") from None
    hardest = max(plans, key=lambda name: (plans[name].cautious, plans[name].sd))
    found = plans[hardest]
    detectable = None
    if items is not None:
        shown = stats.smallest_detectable_mean(items, found.sd, power, each) if items > 1 else math.nan
        detectable = None if math.isnan(shown) else shown
    return {
        "items": items,
        "metric": metric,
        "unit": LIKELIHOOD_METRICS[metric].unit,
        "effect": wanted,
        "margin": margin,
        "power": power,
        "alpha": alpha,
        "conditions": count,
        "alpha_each": each,
        "condition": hardest,
        "sd": found.sd,
        "detectable": detectable,
        "items_needed": found.items,
        "items_cautious": found.cautious,
        "items_for_equivalence": stats.items_for_equal_means(margin, found.sd, power, alpha),
        "pilot": {
            "folder": str(pilot),
            "model": about["model"]["label"],
            "task": about["task"],
            "items": found.pilot,
            "sd": {name: one.sd for name, one in plans.items()},
        },
    }


def plan_nats_lines(found: Mapping[str, Any]) -> list[str]:
    """What `plan_nats` found, in words, its main sentence first."""
    metric, unit = found["metric"], "points" if LIKELIHOOD_METRICS[found["metric"]].share else found["unit"]

    def size(number: float) -> str:
        return signed(number, metric).removeprefix("+")

    parts: list[str] = []
    if found["items"] is not None:
        can = f"±{size(found['detectable'])} {unit}" if found["detectable"] is not None else "nothing"
        parts.append(f"{counted(found['items'], 'item')} can show {can}")
    parts.append(f"±{size(found['effect'])} {unit} needs about {counted(found['items_needed'], 'item')}")
    more = (
        f" ({found['items_cautious']:,} if the pilot's items vary less than others)"
        if found["items_cautious"] > found["items_needed"]
        else ""
    )
    pilot = found["pilot"]
    lines = [
        f"{metric}: {'; '.join(parts)}{more}",
        f"Paired items, {100 * found['power']:.3g} % power, α = {found['alpha']:g}; each of {counted(found['conditions'], 'condition')} under Holm: p ≤ "
        f"{found['alpha_each']:.3g} where no other one has an effect",
        f"To show that there is no effect (equivalent, within ±{size(found['margin'])} {unit}) takes about "
        f"{counted(found['items_for_equivalence'], 'item')}.",
        f"Pilot: {pilot['model']}, {counted(pilot['items'], 'item')} of {pilot['task']}; items vary most under {found['condition']} (sd {size(found['sd'])})",
    ]
    said = weighed(metric, found["effect"], 200.0)
    return (
        [*lines, f"±{size(found['effect'])} {unit}: {said}."]
        if said and not LIKELIHOOD_METRICS[metric].share
        else lines
    )
