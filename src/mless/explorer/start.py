"""The first view: every folder's verdict, conditions, A/A control and where it came from; a running study as it is now."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, cast

import pyarrow.compute as pc

from mless import __version__
from mless.errors import MlessError
from mless.explorer.asking import Query, request_text
from mless.explorer.folders import Folder
from mless.explorer.views import View, views_of
from mless.report.facts import words_of
from mless.results.escaping import visible
from mless.results.folder import ResultFolder
from mless.results.growing import stored_units
from mless.results.nats import unit_of_change
from mless.results.reading import StoredStudy, read_about
from mless.results.wording import condition_words

#: Inner studies whose items a composed study's numbers are made from.
_INNER = ("likelihood", "accuracy")


def _start(query: Query) -> Mapping[str, Any]:
    return {"mless": __version__, "folders": [_shown(folder) for folder in query.folders]}


def _shown(folder: Folder) -> dict[str, Any]:
    """One folder's card. A folder that is refused says why, and the others are shown all the same."""
    base: dict[str, Any] = {
        "number": folder.number,
        "name": visible(folder.name, keep=""),
        "path": visible(folder.place, keep=""),
    }
    try:
        about = folder.about()
        if not about.get("complete", True):
            return base | _unfinished(folder)
        return base | folder.kept("start", lambda: _finished(folder))
    except MlessError as fault:
        return base | {"state": "refused", "why": visible(str(fault), keep="")}


def _finished(folder: Folder) -> dict[str, Any]:
    from mless.study import verdict_lines

    return _common(folder) | {
        "state": "finished",
        "verdict": [visible(line, keep="") for line in verdict_lines(folder.path)],
        "control": _control(folder),
        "views": views_of(folder),
    }


def _unfinished(folder: Folder) -> dict[str, Any]:
    """A study that runs, or that was interrupted: how many of its units are stored."""
    study = folder.study
    stored = _units_stored(folder.path)
    total = len(study.items) * len(study.conditions)
    return _common(folder) | {
        "state": "running" if ResultFolder(folder.path).is_being_written() else "interrupted",
        "stored": stored,
        "units": total,
        "verdict": [],
        "views": [],
    }


def _units_stored(path: Path) -> int:
    """How many units the fullest table has: in files of their own, and in the table that grows."""
    alone: dict[str, int] = {}
    try:
        for entry in (path / "units").iterdir():
            if entry.is_symlink():
                continue
            found = len(list(entry.glob("*.parquet"))) if entry.is_dir() else stored_units(entry)
            alone[entry.stem] = alone.get(entry.stem, 0) + found
    except OSError:
        return 0
    return max(alone.values(), default=0)


def _control(folder: Folder) -> str | None:
    """What the A/A control, `none` once more, differs by: of the folder, or of the inner study that its numbers are made from."""
    if found := _control_of(folder.study):
        return found
    # Looked for by what mless itself calls them: a name in a file may lead anywhere.
    for name in _INNER:
        where = folder.path / name
        if where.is_symlink() or not (where / "study.json").is_file():
            continue
        try:
            found = _control_of(StoredStudy(where, read_about(where)))
        except MlessError:  # `mless verify` says what is wrong with it
            continue
        if found:
            return f"{found} (of the inner study {name})"
    return None


def _control_of(study: StoredStudy) -> str | None:
    name = study.control
    if name is None:
        return None
    where = pc.field("condition") == name
    if (study.path / "effects.parquet").is_file():
        rows = study.table("effects", ["metric", "delta", "lo", "hi"], where).to_pylist()
        found = [
            f"{row['metric']} {_by(row['delta'], row['lo'], row['hi'], 4)} {unit_of_change(row['metric'])}"
            for row in rows
        ]
    elif (study.path / "accuracy.parquet").is_file():
        rows = study.table("accuracy", ["metric", "delta", "delta_lo", "delta_hi"], where).to_pylist()
        found = [
            f"{row['metric']} {_by(_points(row['delta']), _points(row['delta_lo']), _points(row['delta_hi']), 1)} points"
            for row in rows
        ]
    else:
        return None
    if rows and not any(value for row in rows for key, value in row.items() if key != "metric"):
        return f"A/A control {visible(name, keep='')}, none once more: no number differs from none's."
    return f"A/A control {visible(name, keep='')}, none once more, differs from none by: {'; '.join(found) or 'nothing measured'}."


def _points(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _by(value: float | None, lo: float | None, hi: float | None, digits: int) -> str:
    if value is None:
        return "–"
    around = "" if lo is None or hi is None else f" [{lo:+.{digits}f}, {hi:+.{digits}f}]"
    return f"{value:+.{digits}f}{around}".replace("-", "−")


def _common(folder: Folder) -> dict[str, Any]:
    study = folder.study
    about = study.about
    return {
        "title": visible(str(study.study.get("title") or study.study.get("name") or "study"), keep=""),
        "model": visible(study.label, keep=""),
        "task": visible(study.task, keep=""),
        "measured": str(about.get("measures") or "attention"),
        "items": len(study.items),
        "conditions": [
            {"name": visible(name, keep=""), "words": _words_of(one), "control": name == study.control}
            for name, one in study.conditions.items()
        ],
        "facts": _facts(folder),
        "command": command_of(folder),
    }


def _words_of(condition: Mapping[str, Any]) -> str:
    try:
        return condition_words(condition)
    except (MlessError, TypeError, ValueError, KeyError):
        return str(condition.get("kind") or "–")


def command_of(folder: Folder) -> str:
    """The command the folder was made with, where it is stored; else one that makes such a folder."""
    study = folder.study
    command = study.about.get("command")
    if isinstance(command, list) and command:
        parts = [_placed(folder, str(part)) for part in cast("list[object]", command)]
        return visible(shlex.join(parts), keep="")
    # Older folders hold it as one text. Any other text is not shown as a command to type.
    if isinstance(command, str) and re.fullmatch(r"mless [\w./~=:,@%+ -]+", command):
        return " ".join(_placed(folder, part) for part in command.split(" "))
    name = str(study.study.get("name") or "quick")
    model = _placed(folder, str(study.model.get("name") or "…"))
    return visible(shlex.join(["mless", "run", name, "--model", model]), keep="")


def _placed(folder: Folder, text: str) -> str:
    """A text that may be a path, or an option with one. On another machine only the last part of a path says something."""
    option, _, value = text.rpartition("=")
    if not folder.elsewhere or not (Path(value).is_absolute() or PureWindowsPath(value).is_absolute()):
        return text
    return f"{option}=" * bool(option) + (PureWindowsPath(value).name or value)


def _facts(folder: Folder) -> list[list[str]]:
    """Where the numbers come from, by study.json. What it does not say is left out."""
    study = folder.study
    about, model = study.about, study.model
    size = f"{model['layers']} layers × {model['heads']} heads" if model.get("layers") and model.get("heads") else None
    known: list[tuple[str, object]] = [
        ("model", model.get("name")),
        ("architecture", ", ".join(filter(None, (str(model.get("family") or ""), size)))),
        ("weights", model.get("fingerprint")),
        ("data", study.study.get("data") or about.get("task")),
        ("prompt", about.get("prompt")),
        ("seeds", about.get("seeds")),
        ("device", about.get("device")),
        ("implementations", about.get("implementations")),
        ("proofs", about.get("proofs")),
        ("versions", about.get("versions")),
        ("made with", f"mless {about.get('mless', 'unknown')}, format {about.get('format')}"),
    ]
    return [
        [name, visible(_placed(folder, words_of(value)), keep="")]
        for name, value in known
        if value not in (None, "", [], {})
    ]


VIEW = View(
    "Start",
    {"start": _start},
    of=lambda folder: True,
    exported=lambda folders, chosen: [request_text("start")],
)
