"""Which conditions a study has: the built-in ones by name, and those that it declares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mless import gates, limits
from mless.errors import BadStudy
from mless.registry import near
from mless.study.spec import ConditionTable, StudySpec
from mless.values import Condition

#: Prompting baselines that insert nothing: they show what another prompt alone does.
PLAN_AND_SOLVE = (
    "Work out what the problem asks and write down a plan for solving it. Then follow the plan step by step and put your final answer "
    "within \\boxed{}."
)
REPHRASED = "Think the problem through, one step after another. Write the final answer inside \\boxed{}."

#: Built-in conditions of studies that draw answers. The filler of `masked-filler` is the study's.
_ANSWERS_ONLY = {
    "none-again": ConditionTable(kind="none", again=True),
    "plan-and-solve": ConditionTable(kind="none", system=PLAN_AND_SOLVE),
    "rephrased": ConditionTable(kind="none", system=REPHRASED),
    "question-twice": ConditionTable(kind="none", question="{question}\n\n{question}"),
    "masked-filler": ConditionTable(kind="repeat", hidden=True),
    "self-consistency": ConditionTable(kind="none", samples=8, temperature=0.7),
}


def is_name(text: str) -> bool:
    """Whether a condition may be called so."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None


def check_name(name: str, way_out: str = "give it another name") -> None:
    gates.check_count(len(name), f"condition name {gates.shown(name, 60)}", limits.NAME, BadStudy, least=0)
    if not is_name(name):
        raise BadStudy(
            f"condition name {name!r} becomes part of file names: letters, digits, dot, dash and underscore only; {way_out}"
        )


def conditions_of(spec: StudySpec) -> list[Condition]:
    """Resolved conditions, `none` first: every share is taken against it."""
    names = list(dict.fromkeys(spec.conditions))
    if "none" not in names:
        names.insert(0, "none")
    answers = spec.accuracy or spec.likelihood
    if answers is not None and answers.again and "none-again" not in names:
        names.append("none-again")
    names.sort(key=lambda name: {"none": 0, "none-again": 1}.get(name, 2))
    found = [condition_named(spec, name) for name in names]
    _check_sources(found)
    _check_primary(spec, found)
    return found


def _check_sources(conditions: Sequence[Condition]) -> None:
    """Patches take their values from conditions of the same study that are not patched themselves."""
    there = {one.name: one for one in conditions}
    for condition in conditions:
        for patch in condition.patch[:1]:
            source = there.get(patch.source)
            if source is None:
                raise BadStudy(
                    f"condition {condition.name!r} takes values from {patch.source!r}, which is no condition of this study"
                    f"{near(patch.source, there)}; add it to --conditions"
                )
            if source.patch or source.arm is not None:
                has = "patched itself" if source.patch else "run with ARM"
                raise BadStudy(
                    f"condition {condition.name!r} takes values from {patch.source!r}, which is {has}; take them from one that is not"
                )


def _check_primary(spec: StudySpec, conditions: Sequence[Condition]) -> None:
    """The primary condition is one of those that are compared with none."""
    if spec.primary is None:
        return
    if spec.accuracy is None:
        raise BadStudy(
            f"primary = {spec.primary!r} is for studies that compare answers, and {spec.name!r} draws none: leave it out, or use mless run accuracy"
        )
    compared = [one.name for one in conditions if one.name != "none" and not one.again]
    if spec.primary not in compared:
        control = any(one.name == spec.primary for one in conditions)
        why = "is what the others are compared with" if control else "is no condition of this study"
        raise BadStudy(
            f"primary: {spec.primary!r} {why}{near(spec.primary, compared) if not control else ''}; name one of those that are "
            f"compared with none: {', '.join(compared) or '(there is none: add one with --conditions)'}"
        )


def condition_named(spec: StudySpec, name: str) -> Condition:
    """A condition by its name: one of the study's own, or one that is built in."""
    built_in = _built_in(spec)
    if name in ("none", "none-again") and name in spec.condition:
        raise BadStudy(
            f"condition {name!r} is what every other one is measured against, so [condition.{name}] cannot change it; give yours another name"
        )
    table = spec.condition.get(name) or built_in.get(name)
    if table is None:
        if name in _ANSWERS_ONLY:
            raise BadStudy(
                f"condition {name!r} is for studies that draw answers, and {spec.name!r} draws none: leave it out, or use mless run accuracy"
            )
        known = [*built_in, *spec.condition]
        raise BadStudy(
            f"no condition {name!r}{near(name, known)}; there are: {', '.join(known)}, and those a study declares under [condition.NAME]"
        )
    check_name(name)
    changed = table.cut or table.patch
    plain = table.filler is None and (table.system or table.question or table.samples or table.arm or changed)
    kind = table.kind or ("none" if plain else "repeat")
    own: dict[str, Any] = {
        key: getattr(table, key) for key in ("hidden", "system", "question", "samples", "temperature", "again", "seed")
    }
    own["arm"] = table.arm.settings(spec.arm) if table.arm is not None else None
    own["cut"] = tuple(one.value() for one in table.cut)
    own["patch"] = tuple(one.value() for one in table.patch)
    if kind == "none":
        return Condition(name, "none", table.filler, table.length or 0, **own)
    length = table.length if table.length is not None else spec.length
    return Condition(name, kind, table.filler, length, table.placement or spec.placement, **own)


def _built_in(spec: StudySpec) -> dict[str, ConditionTable]:
    """What a name stands for unless the study declares it; further ones where answers are drawn."""
    built_in = {
        "none": ConditionTable(kind="none"),
        "mless": ConditionTable(kind="repeat", filler=spec.filler),
        "mful": ConditionTable(kind="repeat", filler=spec.meaningful),
        "random": ConditionTable(kind="text"),
        "random-tokens": ConditionTable(kind="tokens"),
        "position-only": ConditionTable(kind="shift"),
        "arm": ConditionTable(kind="none", arm=spec.arm),
        "mless-arm": ConditionTable(kind="repeat", filler=spec.filler, arm=spec.arm),
    }
    answers = _ANSWERS_ONLY | {"masked-filler": ConditionTable(kind="repeat", filler=spec.filler, hidden=True)}
    return built_in | (answers if spec.accuracy is not None or spec.likelihood is not None else {})
