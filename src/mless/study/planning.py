"""What a run of so many items can show, how likely each verdict is, and how many items an effect or equivalence needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mless import limits, stats
from mless.errors import BadStudy
from mless.gates import check_count
from mless.values import USUAL_MARGIN, counted

#: Assumed where neither a share nor a pilot is given; the output says so.
ASSUMED_CHANGED = 0.1
#: The effect that is planned for beside the one that so many items can show.
USUAL_EFFECT = 0.02


# Over 60 lines: one plan, and most of it names what it returns.
def plan(
    items: int | None,
    effect: float | None,
    changed: float | None,
    pilot: Path | None,
    power: float = 0.8,
    alpha: float = 0.05,
    conditions: int | None = None,
    *,
    primary: bool = False,
    again: float | None = None,
    margin: float = USUAL_MARGIN,
) -> dict[str, Any]:
    """By the exact McNemar test of one answer per item: what `items` can show, how likely each verdict is, and the items it takes.

    `effect` and `changed` (the share of items that change at all, in either direction) are shares, 0.02 for two points. A `pilot` is
    the folder of a finished accuracy study, whose share is taken. `conditions` is the number compared with none (default: as in the study
    `accuracy`). Each is planned at Holm's first step, alpha / conditions: its level where no other condition has an effect. With `primary`
    the plan is for the primary condition, which is tested alone. `again` is the share of items that the same prompts asked again judge
    otherwise; an effect then needs rejection against both runs. `detectable` is None where so many items can show nothing, `items_needed`
    where there is no effect to plan for.
    """
    conditions = _usual_conditions() if conditions is None else conditions
    _check(items, effect, changed, power, alpha, conditions, again, margin)
    if changed is not None and pilot is not None:
        raise BadStudy("the share of items that change comes from --changed or from --pilot; give one of them")
    found = _from_pilot(pilot) if pilot is not None else None
    share = found["share"] if found else ASSUMED_CHANGED if changed is None else changed
    source = "pilot" if found else "assumed" if changed is None else "given"
    if effect is not None and effect > share + 1e-12:
        raise BadStudy(
            f"accuracy cannot move by {_points(effect)} points where only {_percent(share)} of items change ({source}); plan for a smaller "
            f"effect, or give a larger share: --changed {effect:g}"
        )
    by_itself: float = again if again is not None else (found["again"] or 0.0) if found else 0.0
    if by_itself > share:
        raise BadStudy(
            f"the same prompts asked again change {_percent(by_itself)} of items (A/A), so a condition changes no less; give a larger "
            f"share: --changed {by_itself:g}"
        )
    each = alpha if primary else alpha / conditions
    both = stats.Again.planned(share, by_itself)
    # a default effect that is impossible here is not planned for
    wanted = effect if effect is not None else USUAL_EFFECT if share >= USUAL_EFFECT else None
    detectable = math.nan if items is None else stats.smallest_detectable_effect(items, share, power, each, again=both)
    others = math.nan
    if items is not None and primary and conditions > 1:
        others = stats.smallest_detectable_effect(items, share, power, alpha / (conditions - 1), again=both)
    chances = None
    if items is not None:
        chances = asdict(stats.verdict_chances(items, share, margin, alpha=alpha, alpha_each=each, again=both))
    return {
        "items": items,
        "effect": wanted,
        "changed": share,
        "changed_from": source,
        "power": power,
        "alpha": alpha,
        "conditions": conditions,
        "primary": primary,
        "again": by_itself,
        "alpha_each": each,
        "test": "exact McNemar",
        "detectable": None if math.isnan(detectable) else detectable,
        "detectable_others": None if math.isnan(others) else others,
        "items_needed": None if wanted is None else stats.items_for_effect(wanted, share, power, each, again=both),
        "power_here": stats.mcnemar_power(items, effect, share, each, again=both)
        if items and items > 1 and effect
        else None,
        "margin": margin,
        "without_effect": chances,
        "items_for_equivalence": stats.items_for_equivalence(margin, share, power, alpha),
        "pilot": found,
    }


def is_likelihood(pilot: Path) -> bool:
    """Whether a result folder holds log-probabilities, which are planned by how they vary."""
    from mless.results.manifest import measured_in
    from mless.results.reading import read_about

    return measured_in(read_about(pilot)) == "likelihood"


def plan_lines(found: Mapping[str, Any]) -> list[str]:
    """What `plan` found, in words, its main sentence first."""
    items, power, alpha = (found[key] for key in ("items", "power", "alpha"))
    share, wanted = _percent(found["changed"]), found["effect"]
    parts: list[str] = []
    if items is not None:
        count = counted(items, "item")
        if found["detectable"] is not None:
            parts.append(f"{count} can show ±{_points(found['detectable'])} points")
        else:
            parts.append(f"{count} can show nothing: too few would change, even if all went one way")
    if wanted is not None:
        unit = "" if items is not None else " points"
        needs = f"{found['items_needed']:,}{'' if items is not None else ' items'}"
        parts.append(f"±{_points(wanted, exact=True)}{unit} needs about {needs}")
    how = {"assumed": f"assuming {share} of items change", "given": f"if {share} of items change"}
    lines = [f"{'; '.join(parts)}; {how.get(found['changed_from'], f'if {share} of items change, as in the pilot')}"]
    if wanted is None:
        lines.append(
            f"±{_points(USUAL_EFFECT, exact=True)} points cannot come about where only {share} of items change."
        )
    lines.append(
        f"Exact McNemar test of paired items, one answer each, {_percent(power)} power, α = {alpha:g}{_tested_with(found)}"
    )
    lines += _verdict_chances(found)
    if wanted is not None and found["power_here"] is not None:
        lines.append(
            f"{items:,} items would find ±{_points(wanted, exact=True)} points in {_percent(found['power_here'])} of runs."
        )
    if found["changed_from"] == "assumed":
        lines.append(
            "The share is an assumption; a small run gives a better one: --pilot FOLDER, or state it: --changed 0.2"
        )
    return lines + (_pilot_lines(found) if found["pilot"] else [])


def _usual_conditions() -> int:
    """How many conditions the study `accuracy` compares with none."""
    from mless.study.conditions import conditions_of
    from mless.study.loading import load_study

    return sum(one.name != "none" and not one.again for one in conditions_of(load_study("accuracy")))


def _tested_with(found: Mapping[str, Any]) -> str:
    """Which conditions are tested beside the one planned for, and against what."""
    conditions, others = found["conditions"], found["detectable_others"]
    text = ""
    if found["primary"]:
        text = "; for the primary condition, which is tested alone"
        if conditions > 1 and found["items"] is not None:
            shown = f"can show ±{_points(others)} points" if others is not None else "can show nothing"
            text += (
                f" (the other one {shown})"
                if conditions == 2
                else f" (under Holm each of the other {conditions - 1} {shown})"
            )
    elif conditions > 1:
        text = f"; each of {conditions} conditions under Holm: p ≤ {found['alpha_each']:.3g} where no other one has an effect"
    if found["again"]:
        text += f"; against both runs of none, which differ on {_percent(found['again'])} of items (A/A)"
    return text


def _verdict_chances(found: Mapping[str, Any]) -> list[str]:
    """How likely each verdict is without an effect, and how many items show equivalence."""
    within = f"within ±{_points(found['margin'], exact=True)} points"
    takes = f"about {counted(found['items_for_equivalence'], 'item')} ({_percent(found['power'])} power)"
    chances = found["without_effect"]
    if chances is None:
        return [f"To show that there is no effect (equivalent, {within}) takes {takes}."]
    changes = chances["rises"] + chances["drops"]
    return [
        f"If there is no effect, {found['items']:,} item{'s say' if found['items'] != 1 else ' says'} equivalent ({within}) in "
        f"{100 * chances['equivalent']:.1f} % of runs, undecided in {100 * chances['undecided']:.1f} %, "
        f"rises or drops in {100 * changes:.1f} %; to say equivalent takes {takes}."
    ]


def _check(
    items: int | None,
    effect: float | None,
    changed: float | None,
    power: float,
    alpha: float,
    conditions: int,
    again: float | None,
    margin: float,
) -> None:
    if items is None and effect is None:
        raise BadStudy(
            "a plan starts from a number of items (--items 500), from an effect (--effect 0.02), or from both"
        )
    check_count(items, "items", limits.PLANNED_ITEMS, BadStudy)
    # comparisons are written so that NaN fails them
    if effect is not None and not 1e-3 <= effect <= 1:
        raise BadStudy(f"effect: a share from 0.001 to 1 expected, as 0.02 is for ±2 points; got {effect:g}")
    if changed is not None and not 0 < changed <= 1:
        raise BadStudy(f"changed: a share above 0 and at most 1 expected, as 0.1 is for a tenth; got {changed:g}")
    check_count(conditions, "conditions compared with none", limits.CONDITIONS, BadStudy)
    if again is not None and not 0 <= again <= 1:
        raise BadStudy(f"again: a share from 0 to 1 expected, as 0.02 is for one item in fifty; got {again:g}")
    if not stats.SMALLEST_MARGIN <= margin < 1:
        raise BadStudy(
            f"margin: a share of at least {stats.SMALLEST_MARGIN} and below 1 expected, as 0.02 is for ±2 points; got {margin:g}"
        )
    if not 0 < alpha < 1:
        raise BadStudy(f"alpha must lie between 0 and 1, as 0.05 does; got {alpha:g}")
    if not alpha < power < 1:
        raise BadStudy(f"power must lie between alpha and 1, as 0.8 does; got {power:g} (alpha {alpha:g})")


# ---- what a pilot says -----------------------------------------------------------------------------------------------


def _from_pilot(path: Path) -> dict[str, Any]:
    """The share of answers judged differently from `none`, by condition; the plan uses the largest.

    With several samples it is the share of (item, sample) pairs, which is what one answer per item would show. The A/A control shows how
    often items change by themselves, so no smaller share is assumed.
    """
    from mless.results.answers import read_accuracy
    from mless.results.folder import ResultFolder

    about, conditions, _ = read_accuracy(path)
    rows = ResultFolder(path).read_table("answers", columns=["condition", "item", "sample", "correct"]).to_pylist()
    judged: dict[str, dict[tuple[str, int], bool]] = {}
    for row in rows:
        judged.setdefault(row["condition"], {})[row["item"], row["sample"]] = row["correct"]
    none = judged["none"]
    shares = {
        name: sum(right != none[key] for key, right in mine.items()) / len(mine)
        for name, mine in judged.items()
        if name != "none" and conditions[name].samples is None
    }
    control = next((shares.pop(name) for name in list(shares) if conditions[name].again), None)
    if not shares and control is None:
        raise BadStudy(f"the pilot {path} compares no condition with 'none'; run it with one more, or give --changed")
    largest = max(shares, key=shares.__getitem__) if shares else None
    share = max([*shares.values(), control or 0.0])
    if share == 0:
        raise BadStudy(
            f"in the pilot {path} none of {len(about['items']):,} items changed under any condition, so it gives no share to plan with; take a "
            "larger pilot, or give --changed 0.05"
        )
    return {
        "folder": str(path),
        "model": about["model"]["label"],
        "task": about["task"],
        "items": len(about["items"]),
        "shares": shares,
        "largest": largest,
        "again": control,
        "by_itself": control is not None and control >= max(shares.values(), default=0.0),
        "share": share,
    }


def _pilot_lines(found: Mapping[str, Any]) -> list[str]:
    pilot = found["pilot"]
    shown = ", ".join(f"{name} {_percent(share)}" for name, share in pilot["shares"].items())
    control = "not run" if pilot["again"] is None else _percent(pilot["again"])
    lines = [
        f"Pilot: {pilot['model']}, {counted(pilot['items'], 'item')} of {pilot['task']}; changed: {shown or '–'}; A/A: {control}"
    ]
    if pilot["by_itself"]:
        lines.append(
            "The same prompts asked again (A/A) change as many items as any condition or more, so the plan uses that share. Most of it is noise, "
            "which several samples per item would lessen."
        )
    if pilot["items"] < 100:
        lines.append(
            f"A share seen in {counted(pilot['items'], 'item')} is rough; plan with a larger one too: --changed {min(1.0, 2 * pilot['share']):.2g}"
        )
    return lines


def _points(share: float, *, exact: bool = False) -> str:
    return f"{100 * share:g}" if exact else f"{100 * share:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
