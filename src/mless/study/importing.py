"""Per-item results of other programs → a folder of answers like any other: paired differences, tests, figures, report.

Read are lm-evaluation-harness's samples (the JSONL of ``--log_samples``, or what `simple_evaluate` returns) and Inspect's logs (.json and
.eval). They are already judged; nothing is graded again. Neither program has to be installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from mless import gates, tasks
from mless.errors import BadData, BadStudy
from mless.results.folder import ResultFolder
from mless.results.schemas import ANSWERS
from mless.study.accuracy.tables import accuracy_table
from mless.study.bench import Outcome
from mless.study.conditions import check_name, is_name
from mless.study.foreign import Results, Scored, read_results
from mless.study.identity import check_same, digest, recorded, slug
from mless.study.spec import AccuracyTable
from mless.values import USUAL_MARGIN, Condition, condition_of, stored_condition

#: Inspect's letters and words for right and wrong; N is no answer.
_INSPECT_VALUES = {"C": 1, "I": 0, "N": 0, "true": 1, "yes": 1, "false": 0, "no": 0}


# Over 60 lines: the steps of one import, in their order.
def import_results(
    results: Sequence[str | Path] | Mapping[str, Any],
    out: Path | None = None,
    *,
    metric: str | None = None,
    task: str | None = None,
    model: str | None = None,
    margin: float = USUAL_MARGIN,
    primary: str | None = None,
    seed: int = 0,
) -> Outcome:
    """Compare results of lm-eval or Inspect, one per condition, item by item, and write them as a folder of answers.

    `results` are files, as ``FILE`` or ``NAME=FILE``, or a mapping from names to files or to what `simple_evaluate` returned. One of them
    must be called ``none``, the baseline; one called ``none-again`` is its A/A control. `metric` is the name of a score that is 0 or 1 for
    every item. `task` chooses among several tasks. `model` names the model where the files do not. `primary` is the condition that is
    tested alone, the others by Holm among themselves.
    """
    if not 0 < margin < 1:
        raise BadStudy(f"the margin is a share between 0 and 1, got {margin}; 0.02 is two points")
    named = _named(results, task)
    if "none" not in named:
        got = ", ".join(f"{name} ({one.source})" for name, one in named.items()) or "nothing"
        raise BadData(
            f"differences are taken against the condition 'none'; got {got}: say which file is the baseline, as none=FILE"
        )
    metric = _metric(named, metric)
    _check_items(named)
    label = model or _agreed(named, "model", "--model") or "unknown-model"
    called = task or _agreed(named, "task", "--task") or "imported"
    conditions = {name: _condition(name, one) for name, one in named.items()}
    answers = pa.Table.from_pylist(
        [
            _answer(row, metric, name, one) | {"model": label, "task": called}
            for name, one in named.items()
            for row in one.rows
        ],
        schema=ANSWERS,
    )
    if len(named) < 2:
        raise BadData(
            f"only the baseline was given ({named['none'].source}); add a result to compare it with, as mless=FILE"
        )
    compared = [name for name, one in conditions.items() if name != "none" and not one.again]
    if primary is not None and primary not in compared:
        raise BadStudy(f"primary: {primary!r} is not compared with none here; name one of {', '.join(compared)}")
    settings = _settings(named["none"], margin)
    table = accuracy_table(answers, conditions, settings, seed=seed, primary=primary)
    path = out if out is not None else Path("results") / f"imported-{slug(called)}-{slug(label)}"
    chosen = {"metric": metric, "task": task, "model": model, "primary": primary}
    chosen |= {"margin": margin if margin != USUAL_MARGIN else None, "seed": seed or None}
    command = _command(named, path, **chosen)
    about = _about(named, metric, label, called, conditions, settings, seed, primary, command)
    folder = ResultFolder(path)
    stored = folder.about()
    if stored is not None:
        check_same(folder, stored, about["identity"], about["study"]["name"], about["measures"])
    else:
        folder.check_free()
    with folder.writing():
        folder.sweep()
        folder.write_table("answers", answers)
        folder.write_table("accuracy", table)
        folder.write_manifest(about | {"complete": True})
    return Outcome(folder.path, len(answers), len(answers))


# ---- what is given -----------------------------------------------------------------------------------------------------


def _named(results: Sequence[str | Path] | Mapping[str, Any], task: str | None) -> dict[str, Results]:
    """Results by condition, `none` first."""
    pairs: list[tuple[str | None, Any]]
    if isinstance(results, Mapping):
        pairs = list(results.items())
    else:
        pairs = [_split(str(given)) for given in results]
    found: dict[str, Results] = {}
    for given, where in pairs:
        one = read_results(where, given or "given results", task)
        name = given or (one.condition or {}).get("name") or _stem(one.source)
        check_name(name, "give NAME=FILE")
        if name in found:
            raise BadData(
                f"two results are called {name!r}: {found[name].source} and {one.source}; tell them apart with NAME=FILE"
            )
        found[name] = one
    programs = sorted({one.program for one in found.values()})
    if len(programs) > 1:
        raise BadData(
            f"results of one program can be compared, got {' and '.join(programs)}: they may judge the same answer differently"
        )
    return dict(sorted(found.items(), key=lambda pair: {"none": 0, "none-again": 1}.get(pair[0], 2)))


def _split(given: str) -> tuple[str | None, str]:
    name, sign, file = given.partition("=")
    return (name, file) if sign and is_name(name) and not os.path.exists(given) else (None, given)


def _stem(source: str) -> str:
    return slug(Path(source).name.rsplit(".", 1)[0].removeprefix("samples_"))


# ---- one metric, the same items ----------------------------------------------------------------------------------------


def _metric(named: Mapping[str, Results], asked: str | None) -> str:
    """The score that is compared. One that was not asked for is taken only where there is no other."""
    shared = [name for name in named["none"].metrics if all(name in one.metrics for one in named.values())]
    there = ", ".join(shared) or "; ".join(f"{name}: {', '.join(one.metrics)}" for name, one in named.items())
    if asked is not None:
        short = [name for name in shared if name.partition(",")[0] == asked]
        if asked not in shared and len(short) != 1:
            what = "is there under several filters" if short else "is not in every file"
            raise BadData(f"metric {asked!r} {what}; there are: {there}")
        return asked if asked in shared else short[0]
    if len(shared) != 1:
        what = "several metrics are" if shared else "no metric is"
        raise BadData(f"{what} in every file; choose one with --metric: {there}")
    return shared[0]


def _right(row: Scored, metric: str, source: str) -> bool:
    value = row.scores.get(metric)
    if isinstance(value, str):
        value = _INSPECT_VALUES.get(value, _INSPECT_VALUES.get(value.lower(), value))
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    others = [name for name, one in row.scores.items() if name != metric and one in (0, 1, "C", "I")]
    way = f"; those that are: {', '.join(others)}" if others else ""
    where = f"{source}, item {gates.shown(row.item)}: {gates.shown(metric)} is {gates.shown(value)}"
    raise BadData(f"{where}, and only a score that is 0 or 1 for every item can be tested by pairs{way}")


def _check_items(named: Mapping[str, Results]) -> None:
    base = named["none"]
    for one in named.values():
        seen: set[tuple[str, int]] = set()
        for row in one.rows:
            if (row.item, row.sample) in seen:
                epoch = f", epoch {row.sample + 1}" if row.sample else ""
                raise BadData(f"{one.source}: item {row.item!r}{epoch} is there twice; each is to be there once")
            seen.add((row.item, row.sample))
    expected = {(row.item, row.sample): row.mark for row in base.rows}
    for name, one in named.items():
        there = {(row.item, row.sample): row.mark for row in one.rows}
        if odd := sorted(expected.keys() ^ there.keys()):
            who, other = (base, one) if odd[0] in expected else (one, base)
            raise BadData(
                f"only the same items can be paired: item {odd[0][0]!r} is in {who.source}, but not in {other.source} ({len(odd)} such; none has "
                f"{len(expected):,}, {name} {len(there):,}); run both with the same --limit"
            )
        for key, mark in there.items():
            if mark != expected[key]:
                raise BadData(
                    f"item {key[0]!r} is one thing in {base.source} and another in {one.source}: they are not of the same data"
                )


def _agreed(named: Mapping[str, Results], what: str, option: str) -> str | None:
    """What the files that say it agree on."""
    said = list(dict.fromkeys(value for one in named.values() if (value := getattr(one, what)) is not None))
    if len(said) > 1:
        raise BadData(
            f"results of one {what} expected, got {', '.join(said)}; if they are one, say what it is called: {option} NAME"
        )
    return said[0] if said else None


# ---- as a study has it -------------------------------------------------------------------------------------------------


def _condition(name: str, one: Results) -> Condition:
    """The condition as mless's own model stored it. For other results only the name is known."""
    again = name == "none-again"
    if one.condition is None or again:
        return Condition(name, "none", again=again)
    stored = one.condition
    if stored.get("format", 1) < 2 and stored.get("placement") == "end":
        # Written by an older mless, whose `end` was the prompt's last place.
        stored = {**stored, "placement": "before-answer"}
    return condition_of(name, stored)


def _answer(row: Scored, metric: str, condition: str, one: Results) -> dict[str, Any]:
    right = _right(row, metric, one.source)
    why = f"{metric} = {row.scores[metric]}, by {one.program}"
    kept = {
        key: getattr(row, key)
        for key in ("item", "sample", "text", "extracted", "n_tokens", "finish", "reference", "how")
    }
    kept |= {"condition": condition, "seed": 0, "correct": right, "why": why, "disagree": False, "cluster": None}
    return kept | {"stated": stated_of(row)}


def stated_of(row: Scored) -> bool | None:
    """Whether the text states the answer that the other program took from it; null where that is not known.

    The program found the answer by a rule of its own. It is stated where our rules find the same one and call it stated. Likelihoods of
    given choices have no text, and for an answer in words there is no rule.
    """
    answer = (row.extracted or "").strip()
    if not answer or row.how.startswith("likeliest"):
        return None
    letter = re.fullmatch(r"\(?[A-Za-z]\)?", answer)
    if letter is None and not any(sign.isdigit() for sign in answer):
        return None
    found = tasks.extract(row.text, ("choice",) if letter else tasks.DEFAULT_RULES)
    if found.text is None:
        return False
    same = answer == row.text.strip() or tasks.vote_of(found.text) == tasks.vote_of(
        answer.strip("()").upper() if letter else answer
    )
    return bool(found.stated) and same


def _settings(none: Results, margin: float) -> AccuracyTable:
    """What is known of how the answers were drawn. Not validated: it is only a record."""
    samples = 1 + max(row.sample for row in none.rows)
    known: dict[str, Any] = {"samples": samples, "temperature": none.temperature or 0.0}
    if none.max_tokens is not None:
        known["max_new_tokens"] = none.max_tokens
    return AccuracyTable(margin=margin, again=False).model_copy(update=known)


def _about(
    named: Mapping[str, Results],
    metric: str,
    label: str,
    task: str,
    conditions: Mapping[str, Condition],
    settings: AccuracyTable,
    seed: int,
    primary: str | None,
    command: list[str],
) -> dict[str, Any]:
    base = named["none"]
    items = list(dict.fromkeys(row.item for row in base.rows))
    files = {name: one.digest for name, one in named.items()}
    study = {
        "name": "imported",
        "title": f"{metric} of {task}, as {base.program} scored it",
        "model": label,
        "data": task,
        "seed": seed,
        "primary": primary,
        "accuracy": settings.model_dump() | {"engine": base.program},
    }
    return {
        **recorded("accuracy", study, task, items),
        "identity": {
            "imported files": digest(files),
            "metric": digest(metric),
            "margin": digest(settings.margin),
            "seed": digest(seed),
        },
        "model": {"name": label, "label": label},
        "command": command,
        "conditions": {
            name: stored_condition(one)
            | {"imported": Path(named[name].source).name, "recorded": named[name].condition is not None}
            for name, one in conditions.items()
        },
        "questions": {row.item: row.question for row in base.rows},
        "engine": {"engine": base.program, "metric": metric, "drawn": base.drawn or None},
        "imported": {name: {"file": one.source, "sha256": one.digest} for name, one in named.items()},
        "implementations": {"engine": base.program, "grading": base.program},
        "units": sum(len(one.rows) for one in named.values()),
    }


def _command(named: Mapping[str, Results], out: Path, **chosen: object) -> list[str]:
    """What to type to get this folder again; of `chosen` options those that were given."""
    given: Iterable[str] = (f"{name}={one.source}" for name, one in named.items())
    options = [word for name, value in chosen.items() if value is not None for word in (f"--{name}", str(value))]
    return ["mless", "import", *given, *options, "--out", str(out)]
