"""`mless compare`: one effect of several models, from their result folders, put together (docs/compare.md).

Folders are compared only if they asked the same: same items, same prompts, same condition, same settings. What differs is refused by name.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mless import gates, stats
from mless.errors import BadData, BadFolder, BadStudy
from mless.limits import STUDY_BYTES
from mless.registry import near
from mless.results.reading import StoredStudy, measured_in, read_about
from mless.results.readouts import CIRCUMSTANCES, READOUTS, Reading, Readout, Scale, readouts_of
from mless.values import Shown

#: Of a stored condition, what has to agree. ARM's parameters are chosen for each model; ids of a filler belong to a tokenizer.
_OF_CONDITION = (
    "kind", "filler", "length", "placement", "hidden", "system", "question", "samples", "temperature", "seed", "cut",
    "patch",
)  # fmt: skip
_CHECKSUMS = ("questions or answers", "reference solutions or options")
_ONE_STUDY = "compare folders of one study, run for each model: mless run STUDY --model …"


@dataclass(frozen=True, slots=True)
class Row:
    """One model under one condition. `weight` is its share in the mean; `moderators` what `--by` named, as it is shown."""

    label: str
    folder: Path
    reading: Reading
    weight: float
    moderators: dict[str, str]


@dataclass(frozen=True, slots=True)
class Block:
    """One condition: its row in every model, the mean over models, and by which properties models differ."""

    condition: str
    rows: tuple[Row, ...]
    pooled: stats.Pooled
    by: dict[str, stats.Moderated]


@dataclass(frozen=True, slots=True)
class Comparison(Shown):
    """What `compare` found: the readout, what it was read from, and a block a condition."""

    readout: str
    metric: str
    layer: int | None
    task: str
    items: int
    scale: Scale
    blocks: tuple[Block, ...]

    @property
    def models(self) -> int:
        return len(self.blocks[0].rows)

    @property
    def words(self) -> str:
        """``dilution exponent ε, layer 1``; ``Δ solution (nats a token)``."""
        place = f", layer {self.layer}" if self.layer is not None else ""
        return f"{self.scale.words}{place}{f' ({self.scale.unit})' if self.scale.unit else ''}"


def compare(
    paths: Sequence[Path],
    *,
    readout: str | None = None,
    conditions: Sequence[str] | None = None,
    metric: str | None = None,
    layer: int | None = None,
    by: Sequence[str] = (),
    models: Path | None = None,
) -> Comparison:
    """One effect in the result folders of several models, with its random-effects mean.

    `readout` is a name of the table of readouts, by default the usual one for what was measured. `conditions` are compared with none one by
    one: by default the primary one, mless, or the first; ``["all"]`` is every one that all folders have. `layer` is numbered from 1. `by`
    names properties of models: `activation`, `family`, `size`, another field that study.json has of a model, or a column of the CSV file
    `models`, which has a column `model`.
    """
    folders = [_opened(path) for path in paths]
    if not folders:
        raise BadStudy("no result folder given; mless compare RESULT RESULT …")
    name, row = _chosen(folders, readout)
    if layer is not None and not row.by_layer:
        raise BadStudy(f"--layer: {name} has no layers; leave it out")
    wanted = _conditions(folders, conditions)
    _check_fit(folders, row, wanted, layer)
    _check_once(folders)
    used = _metric(folders, row, name, wanted, metric)
    labels = _labels(folders)
    moderators = {one: _moderator(one, folders, models) for one in dict.fromkeys(by)}
    blocks = tuple(_block(folders, labels, row, condition, used, layer, moderators) for condition in wanted)
    first = folders[0]
    task = str(first.about.get("task") or first.study.get("data") or "task")
    return Comparison(name, used, layer, task, len(first.items), row.scale(used), blocks)


def _block(
    folders: Sequence[StoredStudy],
    labels: Sequence[str],
    row: Readout,
    condition: str,
    metric: str,
    layer: int | None,
    moderators: Mapping[str, Sequence[str | float]],
) -> Block:
    found = [row.read(folder, condition, metric, layer) for folder in folders]
    for label, reading in zip(labels, found, strict=True):
        if not math.isfinite(reading.value) or (len(found) > 1 and not 0 < reading.error < math.inf):
            raise BadData(
                f"{label}, condition {condition!r}: the effect is {reading.value:g} with a standard error of {reading.error:g} over "
                f"{reading.n} items, which cannot be weighed against other models; expected at least two items that differ. Leave its folder out, "
                "or choose another --condition"
            )
    effects, errors = (np.array([getattr(one, name) for one in found]) for name in ("value", "error"))
    # one model is only shown, so it needs no error
    pooled = stats.random_effects(effects, errors if len(found) > 1 else np.ones(1))
    by = {
        name: stats.by_number(effects, errors, np.array(values, np.float64))
        if _numeric(values)
        else stats.by_kind(effects, errors, [str(value) for value in values])
        for name, values in moderators.items()
        if len(found) > 1
    }
    rows = tuple(
        Row(
            label,
            folder.path,
            reading,
            float(weight),
            {name: _said(name, values[at]) for name, values in moderators.items()},
        )
        for at, (label, folder, reading, weight) in enumerate(zip(labels, folders, found, pooled.weights, strict=True))
    )
    return Block(condition, rows, pooled, by)


# ---- what is compared ------------------------------------------------------------------------------------------------


def _opened(path: Path) -> StoredStudy:
    about = read_about(Path(path))
    if measured_in(about) == "tune":
        raise BadFolder(f"{path} holds a tuning, whose answers lie in folders of their own; give {Path(path) / 'test'}")
    if about.get("complete", True) is False:
        raise BadFolder(f"{path}: its study is not finished; run the same command again to complete it")
    return StoredStudy(Path(path), about)


def _chosen(folders: Sequence[StoredStudy], asked: str | None) -> tuple[str, Readout]:
    """The readout, checked against what every folder measured."""
    usual = readouts_of(measured_in(folders[0].about))
    if asked is None and not usual:
        raise BadFolder(
            f"{folders[0].path} measured {measured_in(folders[0].about)}, of which nothing can be compared; there are the readouts "
            f"{', '.join(READOUTS)}"
        )
    name = asked if asked is not None else usual[0]
    row = READOUTS.get(name)
    for folder in folders:
        measured = measured_in(folder.about)
        if measured != row.measured:
            there = ", ".join(readouts_of(measured)) or "nothing that can be compared"
            raise BadFolder(
                f"{folder.path} holds no {name}: its study measured {measured}, of which there is {there}; choose it with --readout, or make a "
                f"folder with `mless run {row.measured if row.measured != 'attention' else 'quick'} --model …`"
            )
    return name, row


def _conditions(folders: Sequence[StoredStudy], asked: Sequence[str] | None) -> list[str]:
    """The conditions to compare: those asked for, all that every folder has, or the usual one."""
    common = [
        name
        for name, about in folders[0].conditions.items()
        if name != "none" and not about.get("again") and all(name in folder.conditions for folder in folders)
    ]
    if asked and list(asked) != ["all"]:
        for name in asked:
            if name == "none":
                raise BadStudy("--condition none: every condition is compared with none; name another one")
            for folder in folders:
                folder.need_conditions([name])
        return list(dict.fromkeys(asked))
    if not common:
        each = "; ".join(f"{folder.path}: {', '.join(folder.conditions)}" for folder in folders[:6])
        raise BadFolder(
            f"the folders have no condition in common that could be compared with none ({each}); {_ONE_STUDY}"
        )
    if asked:
        return common
    primary = folders[0].study.get("primary")
    return [next((name for name in (primary, "mless") if name in common), common[0])]


def _metric(folders: Sequence[StoredStudy], row: Readout, name: str, wanted: Sequence[str], asked: str | None) -> str:
    """The metric: the one asked for, or the usual one of those that every folder has for every condition."""
    there = [row.metrics(folder, condition) for folder in folders for condition in wanted]
    common = [metric for metric in there[0] if all(metric in some for some in there)]
    if asked is not None and asked not in common:
        for folder in folders:
            for condition in wanted:
                known = row.metrics(folder, condition)
                if asked not in known:
                    raise BadStudy(
                        f"{folder.path}: no metric {asked!r}{near(asked, known)} of {name} for condition {condition!r}; it has "
                        f"{', '.join(known) or 'none'}"
                    )
    if not common:
        raise BadFolder(f"the folders have no metric of {name} in common; {_ONE_STUDY}")
    return common[0] if asked is None else asked


def _labels(folders: Sequence[StoredStudy]) -> list[str]:
    """The models' names; with the folder's where two models have one name."""
    names = [folder.label for folder in folders]
    return [
        f"{name} ({folder.path.name})" if names.count(name) > 1 else name
        for name, folder in zip(names, folders, strict=True)
    ]


# ---- whether they fit ------------------------------------------------------------------------------------------------


def _check_fit(folders: Sequence[StoredStudy], row: Readout, wanted: Sequence[str], layer: int | None) -> None:
    first = folders[0]
    for other in folders[1:]:
        different = list(differences(asked_by(first, row, wanted, layer), asked_by(other, row, wanted, layer)).values())
        if different:
            more = f"; and {len(different) - 4} more" if len(different) > 4 else ""
            raise BadFolder(
                f"{other.path} does not fit {first.path}: they differ in {'; '.join(different[:4])}{more}. Their effects would not be of one thing; "
                f"{_ONE_STUDY}"
            )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """What differs between what two studies asked (`asked_of`), each in words."""
    different = [key for key in dict.fromkeys((*mine, *theirs)) if mine.get(key) != theirs.get(key)]
    if "items" in different:  # checksums are over all items, so other items change them too
        different = [key for key in different if key not in _CHECKSUMS]
    return {key: _difference(key, mine.get(key), theirs.get(key)) for key in different}


def asked_of(folder: StoredStudy, wanted: Sequence[str]) -> dict[str, Any]:
    """What a folder's study asked under these conditions, whatever it measured, by name."""
    about, study = folder.about, folder.study
    found: dict[str, Any] = {
        "task": about.get("task"),
        "items": folder.items,
        "kind of prompt": about.get("prompt"),
        "system text": study.get("system"),
        "seed": (about.get("seeds") or {}).get("study", study.get("seed")),
    }
    identity = about.get("identity") or {}
    if "data" in identity:
        found["questions or answers"] = identity["data"]
    if "solutions" in identity:
        found["reference solutions or options"] = identity["solutions"]
    for name in wanted:
        condition = folder.conditions[name]
        found |= {f"{key} of condition {name}": condition.get(key) or None for key in _OF_CONDITION}
        found[f"ARM in condition {name}"] = bool(condition.get("arm"))
    return found


def asked_by(folder: StoredStudy, row: Readout, wanted: Sequence[str], layer: int | None) -> dict[str, Any]:
    """The same, with the settings of what is read out."""
    study = folder.study
    found = asked_of(folder, wanted)
    for field in row.fields:
        if field != "layers" or layer is None:
            found[field] = study.get(field)
    own: Any = study.get(row.own) if row.own is not None else None
    if isinstance(own, dict):
        found |= {f"{row.own}.{key}": value for key, value in own.items() if key not in CIRCUMSTANCES}
    return found


def _difference(name: str, mine: Any, theirs: Any) -> str:
    if name == "items" and isinstance(mine, list) and isinstance(theirs, list):
        at = next((n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
        where = (
            f"; number {at + 1} is {gates.shown(mine[at], 40)} and {gates.shown(theirs[at], 40)}"
            if at is not None
            else ""
        )
        return f"items ({len(mine)} and {len(theirs)}{where})"
    if name in _CHECKSUMS:
        return f"{name} of items with the same ids"
    if name == "layers":
        mine, theirs = ("all" if one is None else one for one in (mine, theirs))
    return f"{name} ({_short(mine)} and {_short(theirs)})"


def _short(value: Any) -> str:
    return gates.shown(value, 60) if isinstance(value, str) else gates.shown(json.dumps(value), 60)


def _check_once(folders: Sequence[StoredStudy]) -> None:
    """One model is one observation, however often it was measured."""
    seen: dict[str, StoredStudy] = {}
    for folder in folders:
        known = str(folder.model.get("fingerprint") or folder.model.get("name"))
        if (other := seen.get(known)) is not None:
            raise BadFolder(
                f"{folder.path} and {other.path} hold the same model ({folder.label}) with the same settings; it counts once, so leave one of them out"
            )
        seen[known] = folder


# ---- properties of models --------------------------------------------------------------------------------------------

_KINDS = {"silu": "SiLU", "swish": "SiLU", "relu": "ReLU", "relu2": "ReLU²"}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kmbtKMBT]?)\s*")
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _moderator(name: str, folders: Sequence[StoredStudy], models: Path | None) -> list[str | float]:
    """A property of every model: from the CSV file where it has that column, else from study.json."""
    table = _models_table(models) if models is not None else {}
    in_file = any(name in row for row in table.values())
    found = [_from_file(name, folder, table, models) if in_file else _from_about(name, folder) for folder in folders]
    if name == "activation":
        return [_activation_kind(str(value)) for value in found]
    if name == "size":
        return [_size(value, folder) for value, folder in zip(found, folders, strict=True)]
    numbers = [_number(value) for value in found]
    return [str(value) for value in found] if None in numbers else [float(number or 0.0) for number in numbers]


def _from_about(name: str, folder: StoredStudy) -> str | float:
    value: Any = folder.model.get("parameters" if name == "size" else name)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    known = [key for key, one in folder.model.items() if isinstance(one, str | int | float)]
    raise BadStudy(
        f"{folder.path} does not say the {name} of {folder.label}{near(name, known)}; give it in a file: --models models.csv, with the columns model and "
        f"{name}"
    )


def _from_file(name: str, folder: StoredStudy, table: Mapping[str, Mapping[str, str]], file: Path | None) -> str:
    names = [folder.label, str(folder.model.get("name") or ""), str(folder.model.get("name") or "").rpartition("/")[2]]
    row = next((table[one.casefold()] for one in names if one.casefold() in table), None)
    if row is None:
        raise BadData(
            f"{file} has no row for the model {folder.label!r}{near(folder.label, table)} of {folder.path}; its column `model` has "
            f"{', '.join(list(table)[:8])}"
        )
    if not row.get(name, "").strip():
        raise BadData(f"{file}: the model {folder.label!r} has no value in the column {name!r}; fill it in")
    return row[name].strip()


def _models_table(file: Path) -> dict[str, dict[str, str]]:
    """The rows of a CSV file by its column `model`, in small letters."""

    def refuse(why: str) -> BadData:
        return BadData(
            f"{file} {why}; expected a CSV file with a column `model` and one for each property, as activation"
        )

    text = gates.read_text(file, STUDY_BYTES, refuse)
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as fault:
        raise refuse(f"cannot be read ({fault})") from None
    heads = [head.strip() for head in lines[0]] if lines else []
    if "model" not in heads:
        raise refuse(f"has no column `model`, only {', '.join(heads[:8]) or 'nothing'}")
    if len(set(heads)) < len(heads):
        raise refuse("has a column twice")
    found: dict[str, dict[str, str]] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in line):
            continue
        if len(line) != len(heads):
            raise refuse(f"has {len(line)} cells in line {number} and {len(heads)} columns")
        row = dict(zip(heads, line, strict=True))
        key = row["model"].strip().casefold()
        if key in found:
            raise refuse(f"has the model {row['model'].strip()!r} twice")
        found[key] = row
    return found


def _activation_kind(name: str) -> str:
    """``gelu_pytorch_tanh`` → ``GELU``: variants of one function are one kind."""
    plain = name.strip().lower()
    return "GELU" if "gelu" in plain else _KINDS.get(plain, name)


def _size(value: str | float, folder: StoredStudy) -> float:
    """log₁₀ of the number of parameters; 7B and 135M are read too."""
    match = _SIZE.fullmatch(str(value))
    number = float(match[1]) * _THOUSANDS[match[2].lower()] if match else 0.0
    if number <= 0:
        raise BadData(
            f"size of {folder.label}: a number of parameters, as 7B or 135M, expected; got {gates.shown(value, 60)}"
        )
    return math.log10(number)


def _number(value: str | float) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _numeric(values: Iterable[str | float]) -> bool:
    return all(isinstance(value, float) for value in values)


def _said(name: str, value: str | float) -> str:
    if isinstance(value, str):
        return value
    if name != "size":
        return f"{value:.4g}"
    letter = next(
        letter for letter in ("t", "b", "m", "k", "") if value >= math.log10(_THOUSANDS[letter]) or not letter
    )
    return f"{10**value / _THOUSANDS[letter]:.3g}{letter.upper()}"
