"""A study from its name or its TOML file, with what the command line changes in it."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mless.errors import BadStudy
from mless.gates import check_content, kind_of, read_text, shown, shown_number, toml_of
from mless.limits import STUDY_BYTES
from mless.registry import near
from mless.study.showing import figure_spec
from mless.study.spec import StudySpec

#: What a study file must not set, because it may come from anyone. The user may set it on the command line.
_TYPED_ONLY = {"trust_remote_code": "--trust-remote-code", "run_code": "--run-code"}

#: Options of the command line that go into whichever of a study's tables names an engine.
OF_AN_ENGINE = ("engine", "base_url")


def available_studies() -> dict[str, StudySpec]:
    """The studies that come with the package, in reading order."""
    folder = resources.files("mless") / "studies"
    found = {
        entry.name.removesuffix(".toml"): _parse(entry.read_text(encoding="utf-8"), entry.name, {})
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(found.items(), key=lambda pair: (pair[0] != "quick", len(pair[0]), pair[0])))


def load_study(
    name: str,
    changes: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    *,
    server_named: bool | None = None,
    options: Mapping[str, str] | None = None,
) -> StudySpec:
    """A study by name or TOML path; `changes` are fields by name (`engine` and `base_url`: of the table that has
    them), `sets` are ``key=value`` texts, which win.

    `options` says which option of the command line a change came from: a refused value is then named by it, and not by a file.
    `server_named` says whether the user chose the server, where the changes do not tell: those of an inner study are made from a file.
    """
    spec = _loaded(name, dict(changes or {}), sets, options or {})
    if server_named is not None:
        spec._names_server = server_named  # pyright: ignore[reportPrivateUsage]
    return spec


def _loaded(name: str, changes: Mapping[str, Any], sets: Sequence[str], options: Mapping[str, str]) -> StudySpec:
    path = Path(name)
    if path.suffix == ".toml":
        if not os.path.lexists(path):
            raise BadStudy(f"no study file {shown(name)}; `mless studies` lists those that come with mless")
        text = read_text(path, STUDY_BYTES, lambda message: BadStudy(f"study file {shown(name)} {message}"))
        spec = _parse(text, name, changes, sets, options)
        spec._source = name  # pyright: ignore[reportPrivateUsage]
        return spec
    entry = resources.files("mless") / "studies" / f"{name}.toml"
    if not re.fullmatch(r"[\w.-]{1,100}", name) or not entry.is_file():
        known = list(available_studies())
        raise BadStudy(
            f"no study {shown(name)}{near(name, known)}; there are: {', '.join(known)}, or give a .toml file"
        )
    return _parse(entry.read_text(encoding="utf-8"), f"{name}.toml", changes, sets, options)


def _parse(
    text: str,
    source: str,
    changes: Mapping[str, Any],
    sets: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> StudySpec:
    fields = toml_of(text, lambda message: BadStudy(f"study {source} {message}"))
    fields.setdefault("name", Path(source).stem)
    as_written = validated(fields, source)
    asks = as_written.asks[0] if as_written.asks is not None else "accuracy"
    changes = {f"{asks}.{key}" if key in OF_AN_ENGINE else key: value for key, value in changes.items()}
    typed = {f"{asks}.{key}" if key in OF_AN_ENGINE else key: option for key, option in (options or {}).items()}
    for one in sets:
        key, value = _read_set(one)
        typed[key] = f"--set {key}"
        changes.pop(key, None)  # so that it is put last, and wins
        changes[key] = value
    if as_written.figure is None and any(key.partition(".")[0] == "figure" for key in changes):
        figure_spec(as_written)
    if as_written.accuracy is None and any(key.partition(".")[0] == "accuracy" for key in changes):
        raise BadStudy(
            f"study {as_written.name!r} measures {as_written.measured} and draws no answers; for answers "
            "use mless run accuracy, or a study file with [accuracy]"
        )
    for key, value in changes.items():
        _put(fields, key, value)
    spec = validated(fields, source, typed)
    spec._as_written = as_written.model_dump()  # pyright: ignore[reportPrivateUsage]
    places = [name for table in ("accuracy", "likelihood") for name in (table, f"{table}.base_url")]
    spec._names_server = not set(places).isdisjoint(changes)  # pyright: ignore[reportPrivateUsage]
    return spec


def validated(fields: Mapping[str, Any], source: str, typed: Mapping[str, str] | None = None) -> StudySpec:
    """A spec from its fields; a fault names the field, and the nearest one there is, or the option that was `typed` for it."""
    check_content(dict(fields), lambda message: BadStudy(f"study {source}: {message}"))
    try:
        return StudySpec.model_validate(dict(fields))
    except ValidationError as fault:
        # A misspelt field is lacking under its own name too.
        faults = fault.errors()
        first = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            *tables, last = map(str, first["loc"])
            if last in _TYPED_ONLY:
                raise BadStudy(
                    f"study {source} has no field {where!r}: only the {_TYPED_ONLY[last]} flag on the command line can do that"
                ) from None
            inside = _fields(tables)
            names = [".".join([*tables, name]) for name in inside]
            near = difflib.get_close_matches(last, inside, n=1)
            hint = f" (did you mean {'.'.join([*tables, near[0]])!r}?)" if near else ""
            raise BadStudy(f"study {source} has no field {where!r}{hint}; its fields are: {', '.join(names)}") from None
        message = first["msg"].removeprefix("Value error, ")
        if (
            isinstance(first.get("input"), dict) and first["type"] == "value_error"
        ):  # a rule of the whole table, which says what it got
            raise BadStudy(f"study {source}, [{where}]: {message}") from None
        # The fault may lie in an entry of a list that was typed.
        option = next((said for key, said in (typed or {}).items() if f"{where}.".startswith(f"{key}.")), None)
        place = option or f"study {source}, field {where!r}"
        raise BadStudy(f"{place}: {message[:1].lower()}{message[1:]}, got {_as_given(first.get('input'))}") from None


def _as_given(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return shown_number(value)
    # A refused list or table may hold a number that Python does not write out.
    return repr(value)[:200] if isinstance(value, str | float | bool | None) else kind_of(value)


def _fields(tables: Sequence[str]) -> list[str]:
    """The fields of the study, or of the inner table at the path `tables`."""
    place = _annotation(tables)
    return list(place.model_fields) if isinstance(place, type) and issubclass(place, BaseModel) else []


def _annotation(path: Sequence[str]) -> Any:
    """The type that the spec declares for a dotted field; None where it declares none. Optional types count as what they hold."""
    kind: Any = StudySpec
    for name in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(name)
            kind = field.annotation if field is not None else None
        elif get_origin(kind) in (dict, list, tuple):
            kind = get_args(kind)[-1]
        else:
            return None
        inner = [part for part in get_args(kind) if part is not type(None)]
        if get_origin(kind) in (Union, UnionType) and len(inner) == 1:
            kind = inner[0]
    return kind


def _read_set(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise BadStudy(f"--set takes key=value, as --set length=30; got {text!r}")
    kind = _annotation(key.strip().split("."))
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key.strip(), value  # a bare word is text, so that --set data=bundled needs no quotes
    if (kind is str or get_origin(kind) is Literal) and not isinstance(read, str):
        return key.strip(), value  # --set layers=1 and --set filler=0 mean the text
    return key.strip(), read


def write_sets(changed: Mapping[str, Any], inside: str = "") -> list[str]:
    """The ``key=value`` texts that `_read_set` reads back as `changed`."""
    texts: list[str] = []
    for name, value in changed.items():
        key = f"{inside}{name}"
        if isinstance(value, dict):
            texts += write_sets(cast("dict[str, Any]", value), f"{key}.")
        elif isinstance(value, str):
            plain = f"{key}={value}"
            texts.append(plain if _read_set(plain)[1] == value else f"{key}={_as_toml(value)}")
        elif value is not None:
            texts.append(f"{key}={_as_toml(value)}")
    return texts


def _as_toml(value: Any) -> str:
    """A value in one line. TOML has nothing for None, so such fields of a table are left out."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{_as_toml(key)} = {_as_toml(one)}" for key, one in fields if one is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_as_toml(one) for one in cast("Sequence[Any]", value)) + "]"
    # JSON leaves this one control character as it is, and TOML refuses it.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _put(fields: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if not rest:
        fields[head] = value
        return
    inner = fields.get(head)
    inner = dict(cast("dict[str, Any]", inner)) if isinstance(inner, dict) else {}
    _put(inner, rest, value)
    fields[head] = inner
