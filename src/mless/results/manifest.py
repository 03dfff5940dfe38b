"""The shape of study.json, declared once. Behind this gate every field has its type, and a reader finds what it needs.

Fields that are not declared are kept as they are: a newer version may have added them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mless import gates
from mless.conditions import CONDITION_KINDS
from mless.errors import BadFolder, MlessError
from mless.limits import SEED
from mless.values import Placement, Scope, arm_of, condition_of

_WAY_OUT = "the file was damaged or changed: restore it from a copy, remove the folder and run the study again, or choose another --out"

_Count = Annotated[int, Field(ge=0, le=SEED.value)]
_Whole = Annotated[int, Field(ge=1, le=2**31)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Table = dict[str, Any]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Arm(_Shape):
    layers: Annotated[list[_Whole], Field(min_length=1)]
    c: _Finite | None = None
    fraction: _Finite | None = None
    p_min: _Finite = 0.02
    p_max: _Finite = 0.25
    p1: _Finite = 99.5
    scope: Scope = "token"
    rule: str = ""
    seed: _Count = 0


class _Condition(_Shape):
    name: str | None = None
    kind: str
    filler: str | None = None
    length: _Count | None = None
    placement: Placement | None = None
    hidden: bool = False
    system: str | None = None
    question: str | None = None
    samples: _Whole | None = None
    temperature: Annotated[_Finite, Field(ge=0)] | None = None
    again: bool = False
    arm: _Arm | None = None
    seed: _Count | None = None
    filler_ids: list[_Count] | None = None
    imported: str | None = None
    recorded: bool = False
    told: bool = False  # the same in folders of before


class _Accuracy(_Shape):
    engine: str | None = None
    mode: str | None = None
    slots: _Whole | None = None
    max_new_tokens: _Whole | None = None
    temperature: Annotated[_Finite, Field(ge=0)] | None = None
    top_p: Annotated[_Finite, Field(gt=0, le=1)] | None = None
    samples: _Whole | None = None
    margin: _Share | None = None
    dev_share: _Share | None = None
    cluster_field: str | None = None
    grader: str | None = None


class _Study(_Shape):
    name: str | None = None
    title: str | None = None
    model: str | None = None
    data: str | None = None
    prompt: str | None = None
    primary: str | None = None
    placement: str | None = None
    seed: _Count | None = None
    condition: dict[str, _Table] | None = None
    accuracy: _Accuracy | None = None
    tune: _Table | None = None
    affine: _Table | None = None
    activations: _Table | None = None
    options: _Table | None = None


class _Model(_Shape):
    name: str | None = None
    label: str | None = None
    family: str | None = None
    fingerprint: str | None = None
    activation: str | None = None
    parameters: _Count | None = None
    layers: _Whole | None = None
    heads: _Whole | None = None


class _Engine(_Shape):
    engine: str | None = None
    mode: str | None = None
    metric: str | None = None
    drawn: str | None = None
    slots: _Whole | None = None
    computing: _Table | None = None


class _Tuning(_Shape):
    chosen: str
    tried: _Whole
    rungs: Annotated[list[_Whole], Field(min_length=1)]
    dev: list[str]
    test: list[str]
    transfer: dict[str, Annotated[str, Field(pattern=r"^transfer-[A-Za-z0-9._-]+$")]]


class _Manifest(_Shape):
    format: Annotated[int, Field(ge=1)]
    units_format: Annotated[int, Field(ge=1)] | None = None
    mless: str | None = None
    measures: str | None = None
    complete: bool = False
    study: _Study | None = None
    task: str | None = None
    prompt: Literal["chat", "user", "raw", "text"] | None = None
    conditions: dict[str, _Condition] | None = None
    items: list[str] | None = None
    model: _Model | None = None
    tokenizer: _Table | None = None
    identity: dict[str, str] | None = None
    analysis: str | None = None
    command: list[str] | str | None = None
    layers: list[_Whole] | None = None
    heads: list[_Whole] | None = None
    omit_first: bool = False
    units: _Count | None = None
    seeds: dict[str, _Count] | None = None
    engine: _Engine | None = None
    tuning: _Tuning | None = None
    questions: dict[str, str] | None = None
    imported: dict[str, _Table] | None = None
    implementations: dict[str, str | list[str]] | None = None
    proofs: _Table | None = None
    timings: dict[str, _Finite] | None = None
    versions: dict[str, str] | None = None
    transfers: list[str] | None = None
    trust_remote_code: bool = False
    workers: list[dict[str, str]] | None = None
    primary_at_first_answer: str | None = None
    tables: dict[str, str] | None = None
    tables_next: dict[str, str] | None = None
    footers: dict[str, str] | None = None


#: Fields that a reader needs, by what was measured. A name with a dot lies inside another.
_NEEDED = ("study", "conditions", "items", "task", "model.label")
_NEEDED_BY: dict[str, tuple[str, ...]] = {
    "attention": ("prompt",),
    "activations": ("prompt", "layers"),
    "affine": ("prompt",),
    "accuracy": tuple(f"study.accuracy.{name}" for name in ("engine", "temperature", "margin", "samples", "max_new_tokens")),
}  # fmt: skip


def measured_in(about: Mapping[str, Any]) -> str:
    """What a stored study measured; folders of older versions say it by their fields."""
    if about.get("measures"):
        return str(about["measures"])
    return "accuracy" if (about.get("study") or {}).get("accuracy") else "attention"


def check_shape(content: Mapping[str, Any], file: Path) -> None:
    """Refuse a field of another type than declared, or a condition that could not have been run."""
    try:
        _Manifest.model_validate(content)
    except ValidationError as fault:
        raise BadFolder(f"{file}: {first_fault(fault)}; {_WAY_OUT}") from None
    except RecursionError:
        raise BadFolder(f"{file} is nested too deeply; {_WAY_OUT}") from None
    for name, one in (content.get("conditions") or {}).items():
        where = f"{file}: conditions.{gates.shown(name, 60)}"
        check_condition(name, one, lambda why, where=where: BadFolder(f"{where}{why}; {_WAY_OUT}"))


def check_condition(name: str, stored: Any, refuse: Callable[[str], MlessError]) -> None:
    """Refuse a stored condition that could not have been run; the message continues its name."""
    try:
        _Condition.model_validate(stored)
        # A kind from outside mless may not be at hand; the reader that needs it says so.
        if stored.get("kind") in CONDITION_KINDS:
            condition_of(name, _spoken(stored))
        elif stored.get("arm"):
            arm_of(stored["arm"])
    except ValidationError as fault:
        raise refuse(f".{first_fault(fault)}") from None
    except (MlessError, TypeError) as fault:
        raise refuse(f": {fault}") from None


def check_needed(content: Mapping[str, Any], measured: str, file: Path) -> None:
    """Refuse a study.json that lacks what every reader of such a folder uses."""
    needed = [*_NEEDED, *_NEEDED_BY.get(measured, ())]
    if content.get("complete"):
        needed += ["units"] if content.get("identity") else []
        needed += ["tuning"] if measured == "tune" else []
        needed += ["engine.engine", "engine.metric"] if content.get("imported") else []
    for name in needed:
        if _at(content, name) is None:
            raise BadFolder(f"{file}: the field {name} is missing; {_WAY_OUT}")
    if not content["items"]:
        raise BadFolder(f"{file}: items: expected the ids of at least one item, found none; {_WAY_OUT}")
    if len(set(content["items"])) < len(content["items"]):
        raise BadFolder(f"{file}: items: an id is there twice; {_WAY_OUT}")
    known = content["conditions"]
    if measured != "tune" and "none" not in known:
        raise BadFolder(f"{file}: conditions: expected 'none' among them, found {_listed(known)}; {_WAY_OUT}")
    if measured == "tune" and content.get("complete"):
        _check_choice(content, file)


def _check_choice(content: Mapping[str, Any], file: Path) -> None:
    chosen: str = content["tuning"]["chosen"]
    if not (content["conditions"].get(chosen) or {}).get("arm"):
        raise BadFolder(
            f"{file}: tuning.chosen: expected one of the conditions with ARM, found {gates.shown(chosen)}; {_WAY_OUT}"
        )


def _at(content: Any, name: str) -> Any:
    for part in name.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _spoken(one: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields that are null: they stand for the default."""
    return {key: value for key, value in one.items() if value is not None}


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(gates.shown(name, 40) for name in list(names)[:8]) or "none at all"


def first_fault(fault: ValidationError) -> str:
    """The first field that is wrong: where it is, what was expected, what was found."""
    found = fault.errors(include_url=False)[0]
    where = ".".join(str(part) for part in found["loc"] if not str(part).startswith(("function-", "constrained-")))
    where = where if len(where) <= 120 else f"{where[:119]}…"
    if found["type"] == "missing":
        return f"the field {where} is missing"
    where = f"{where}: " if where else ""  # a fault of the whole has no field
    expected = found["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{where}expected {expected}, found {_found(found['input'])}"


def _found(value: Any) -> str:
    if isinstance(value, str):
        return gates.shown(value, 60)
    if isinstance(value, int | float):
        return gates.shown_number(value) if isinstance(value, int) else str(value)
    return gates.kind_of(value)


def with_todays_names(content: dict[str, Any]) -> dict[str, Any]:
    """An older study.json with today's names. Its format number stays, because its prompts differ from today's.

    Before format 2 `end` was the prompt's last place: in a chat prompt of ids, after the assistant's header, now called `before-answer`. In
    a raw prompt both are the same place. For a server `end` was the end of the user's message, as it is now.
    """
    if content["format"] >= 2 or content.get("prompt") in ("raw", "text"):
        return content
    study: dict[str, Any] = content.get("study") or {}
    for one in (study, *(study.get("condition") or {}).values(), *(content.get("conditions") or {}).values()):
        if one.get("placement") == "end":
            one["placement"] = "before-answer"
    if "command" in content:
        content["command"] = [
            re.sub(r"(?<=placement=)(\"?)end\b", r"\1before-answer", word) for word in content["command"]
        ]
    return content
