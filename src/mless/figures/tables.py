"""Accuracy as tables: Markdown to read, LaTeX to print, CSV with every digit."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mless.conditions import inserts, repeats
from mless.errors import BadFolder, BadStudy
from mless.figures.tabular import Cell, Table, latex, markdown
from mless.figures.tuned import parameters_table
from mless.results import wording
from mless.results.answers import StoredAnswers, shown_rows
from mless.results.figure_kinds import Drawing
from mless.results.folder import write_atomically
from mless.results.schemas import Accuracy

#: The tables that have a layout of their own; any other id gets one row per condition, split and metric.
BY_MODEL = ("table1", "table2", "table3")
BY_PLACEMENT, BY_FILLER, PARAMETERS = "table4", "table5", "table9"
#: One row per condition: its headline (pass@1, or its vote), or what solving an item in k tries comes to.
BY_HEADLINE, BY_PASSES = ("table6", "table7"), "table8"
#: What table 1 says of each task.
BY_MODEL_HEADS = ("w/o", "w/", "Δ points", "A/A", "p (Holm)", "cut off %", "no answer %")


def write_drawing(given: Drawing, out: Path, formats: Sequence[str]) -> list[Path]:
    return write_tables(given.spec.id, given.paths, out, formats, conditions=given.spec.conditions)


def write_tables(
    spec_id: str,
    folders: Sequence[Path],
    out: Path,
    formats: Sequence[str] = ("md", "csv", "tex"),
    *,
    conditions: Sequence[str] = (),
) -> list[Path]:
    """Write ``<out>/<spec_id>.<format>`` from the folders' accuracy.parquet.

    ``table1`` to ``table3`` have a row per model (and condition) and columns per task. ``table4`` names conditions by their placement,
    ``table5`` by their filler. ``table6`` and ``table7`` have a row per condition, ``table8`` one per condition and pass@k. Any other id is
    the plain table: a row per condition, split and metric. `conditions` are those to show, in their order; all unless given, and the A/A
    control always. CSV has all of accuracy.parquet's columns for the conditions shown, and every digit. ``table9`` is of ARM's parameters,
    from the folders of `mless tune`.
    """
    if not folders:
        raise BadStudy(f"table {spec_id}: no result folder given; `mless run accuracy --out …` makes one")
    if spec_id == PARAMETERS:
        table, digits = parameters_table([Path(folder) for folder in folders])
    else:
        opened = [StoredAnswers.open(Path(folder)) for folder in folders]
        shown = [_Shown(folder, _kept(folder, conditions)) for folder in opened]
        table = _by_model(spec_id, shown) if spec_id in BY_MODEL else _by_condition(spec_id, shown)
        digits = _csv(shown)
    writers: dict[str, Callable[[], str]] = {
        "md": lambda: markdown(table),
        "csv": lambda: digits,
        "tex": lambda: latex(table, spec_id),
    }
    unknown = [kind for kind in formats if kind not in writers]
    if unknown or not formats:
        raise BadStudy(f"no table format {unknown[0] if unknown else ''!r}; there are: {', '.join(writers)}")
    written: list[Path] = []
    for kind, text in {kind: writers[kind]() for kind in formats}.items():
        write_atomically(out / f"{spec_id}.{kind}", text.encode("utf-8", "backslashreplace"))
        written.append(out / f"{spec_id}.{kind}")
    return written


@dataclass(frozen=True, slots=True)
class _Shown:
    folder: StoredAnswers
    rows: list[Accuracy]


def _kept(folder: StoredAnswers, conditions: Sequence[str]) -> list[Accuracy]:
    """The rows of the conditions asked for, in the order asked for, `none` and the control first."""
    rows = folder.accuracy()
    wanted = folder.run_of(conditions) if conditions else list(folder.conditions)
    first = [name for name in ("none", folder.control) if name is not None]
    if conditions and not set(wanted) - set(first):
        asked = ", ".join(name for name in conditions if name not in first)
        raise BadStudy(
            f"{folder.path} was run without {asked}, so the table would have nothing to compare; it holds {', '.join(folder.conditions)}: run the "
            "table's own study for this model, or see the folder's figures/accuracy.md"
        )
    order = list(dict.fromkeys([*first, *wanted]))
    kept = [row for name in order for row in rows if row.condition == name]
    if not any(row.split == "all" for row in kept):
        raise BadFolder(f"{folder.path}: accuracy.parquet holds none of {', '.join(order)}; run the study again")
    return kept


# ---- a row per condition -------------------------------------------------------------------------------------------------


def _by_condition(spec_id: str, shown: Sequence[_Shown]) -> Table:
    """Table 4, table 5 and the plain one differ in the names of conditions; the plain one has every split and metric.

    Tables 4 and 5 invite a choice, so below all items they show the test items, on which no choice was made.
    """
    labelled = {BY_PLACEMENT: "placement", BY_FILLER: "filler"}.get(spec_id)
    if labelled:
        rows = [(one, row) for split in ("all", "test") for one in shown for row in _headlines(one, split)]
    elif spec_id in BY_HEADLINE:
        rows = [(one, row) for one in shown for row in _headlines(one)]
    elif spec_id == BY_PASSES:
        rows = [(one, row) for one in shown for row in _passes(one)]
    else:
        rows = [(one, row) for one in shown for row in one.rows]
    every = [row for _, row in rows]
    models = len(shown) > 1
    tasks = len({one.folder.task for one in shown}) > 1
    splits = len({row.split for row in every}) > 1
    metrics = len({row.metric for row in every}) > 1
    sampled = any((row.samples or 1) > 1 for row in every)
    formed = any(row.stated is not None for row in every)
    heads = [
        *(["model"] if models else []), *(["task"] if tasks else []), labelled or "condition", *(["prompt"] if not labelled else []),
        *(["items of"] if splits else []), *(["metric"] if metrics else []), "n", "accuracy %", *(["sd"] if sampled else []),
        "Δ points", "A/A", "p", "p (Holm)", "detectable ±", "changed", *(["of Δ form"] if formed else []),
        "cut off %", "no answer %", *(["guessed %"] if formed else []), "verdict",
    ]  # fmt: skip
    body: list[tuple[Cell, ...]] = []
    for one, row in rows:
        about = one.folder.conditions.get(row.condition, {})
        control = row.condition == one.folder.control
        cells = [
            *([Cell(one.folder.label)] if models else []),
            *([Cell(one.folder.task)] if tasks else []),
            _name(labelled, row.condition, about, control=control),
            *([Cell(wording.condition_words(about))] if not labelled else []),
            *([Cell(row.split)] if splits else []),
            *([Cell(row.metric)] if metrics else []),
            Cell(f"{row.n:,}"),
            Cell(f"{wording.percent(row.value)} {wording.percent_interval(row)}".strip()),
            *([Cell(wording.percent(row.sd))] if sampled else []),
            Cell(
                f"{wording.points(row.delta)} {wording.points_interval(row)}".strip(), marked=wording.significant(row)
            ),
            Cell("–" if row.condition == "none" else wording.points(row.aa_delta)),
            Cell(wording.p_value(wording.p_of(row))),
            Cell(wording.p_value(row.p_adjusted)),
            Cell(wording.percent(row.mde)),
            Cell("–" if row.gained is None or row.lost is None else f"+{row.gained} −{row.lost}"),
            *([Cell(wording.form_part(row))] if formed else []),
            Cell(wording.percent(row.truncated)),
            Cell(wording.percent(row.no_answer)),
            *([Cell(wording.percent(row.guessed))] if formed else []),
            Cell(row.verdict or "–"),
        ]
        body.append(tuple(cells))
    words = {"model", "task", "placement", "filler", "condition", "prompt", "items of", "metric", "verdict"}
    aligned = "".join("l" if head in words else "r" for head in heads)
    return Table(tuple(heads), aligned, tuple(body), _caption(shown, every, _choices(labelled, shown)))


def _choices(labelled: str | None, shown: Sequence[_Shown]) -> str:
    """Which condition the dev items choose in each folder that has such items, and its worth on the test items."""
    said: list[str] = []
    for one in shown:
        best = one.folder.chosen({row.condition for row in one.rows})
        if best is not None:
            called = _name(labelled, best.condition, one.folder.conditions[best.condition], control=False).text
            words = wording.choice_words(best, called)
            who = f"{one.folder.label} on {one.folder.task}: " if len(shown) > 1 else ""
            said.append(who + words if who else words[0].upper() + words[1:])
    if not said:
        return ""
    return " ".join(
        [
            *said,
            "Rows of test: all conditions on the items that nothing was chosen on; their p (Holm) and verdict are for a look at all of them.",
        ]
    )


def _headlines(one: _Shown, split: str = "all") -> list[Accuracy]:
    found = shown_rows(one.rows, one.folder.conditions, split)
    return [found[name] for name in dict.fromkeys(row.condition for row in one.rows) if name in found]


def _passes(one: _Shown) -> list[Accuracy]:
    """The pass@k of all items, by k; a condition that votes over its samples has none."""
    found = [row for row in one.rows if row.split == "all" and row.metric.startswith("pass@")]
    if not any(row.metric != "pass@1" for row in found):
        raise BadFolder(
            f"{one.folder.path}: no pass@k beyond pass@1, which takes several samples per item; run the study with --samples 4 --temperature 0.5 "
            "--k 1,3"
        )
    return sorted(found, key=lambda row: int(row.metric.partition("@")[2]))


def _name(labelled: str | None, condition: str, about: Mapping[str, Any], *, control: bool) -> Cell:
    if control:
        return Cell("none again (A/A)" if labelled else condition)
    if labelled == "placement" and inserts(about.get("kind")):
        where = str(about.get("placement"))
        return Cell(wording.PLACEMENTS.get(where, where))
    if labelled == "filler" and repeats(about.get("kind")):
        return Cell(wording.filler_shown(about), code=True)
    if labelled == "filler" and inserts(about.get("kind")):
        return Cell(wording.filler_shown(about))
    return Cell(condition)


# ---- a row per model -----------------------------------------------------------------------------------------------------


def _by_model(spec_id: str, shown: Sequence[_Shown]) -> Table:
    """Models down, tasks across: without, with, the change, the A/A control's, p, and what of both was cut off or gave no answer."""
    found: dict[tuple[str, str, str], tuple[Accuracy, Accuracy]] = {}
    for one in shown:
        rows = {row.condition: row for row in _headlines(one)}
        compared = [name for name in rows if name not in ("none", one.folder.control)]
        if "none" not in rows or not compared:
            raise BadFolder(
                f"{one.folder.path}: {spec_id} compares none with another condition; it holds {', '.join(rows) or 'neither'}"
            )
        for name in compared:
            key = (one.folder.label, name, one.folder.task)
            if key in found:
                raise BadStudy(
                    f"{spec_id}: two folders hold {one.folder.label} on {one.folder.task} under {name!r}, and there is one cell for it; give one of them"
                )
            found[key] = rows["none"], rows[name]
    tasks = list(dict.fromkeys(task for _, _, task in found))
    lines = list(dict.fromkeys((label, name) for label, name, _ in found))
    several = len({name for _, name in lines}) > 1
    body: list[tuple[Cell, ...]] = []
    for label, name in lines:
        cells = [Cell(label), *([Cell(wording.condition_name(name, ()))] if several else [])]
        for task in tasks:
            none, row = found.get((label, name, task), (None, None))
            if none is None or row is None:
                cells += [Cell("")] * len(BY_MODEL_HEADS)
                continue
            cells += [
                Cell(wording.percent(none.value)),
                Cell(wording.percent(row.value)),
                Cell(
                    f"{wording.points(row.delta)} {wording.points_interval(row)}".strip(),
                    marked=wording.significant(row),
                ),
                Cell(wording.points(row.aa_delta)),
                Cell(wording.p_value(row.p_adjusted)),
                Cell(f"{wording.percent(none.truncated)} / {wording.percent(row.truncated)}"),
                Cell(f"{wording.percent(none.no_answer)} / {wording.percent(row.no_answer)}"),
            ]
        body.append(tuple(cells))
    with_filler = "w/" if several else wording.condition_name(lines[0][1], ())
    left = ["model", *(["condition"] if several else [])]
    heads = (*left, *[with_filler if head == "w/" else head for head in BY_MODEL_HEADS] * len(tasks))
    groups = (("", len(left)), *((task, len(BY_MODEL_HEADS)) for task in tasks))
    every = [row for pair in found.values() for row in pair]
    aligned = "l" * len(left) + "r" * len(BY_MODEL_HEADS) * len(tasks)
    both = "Cut off and no answer in their columns: w/o, then w/."
    return Table(heads, aligned, tuple(body), _caption(shown, every, both), groups)


# ---- how it is written ---------------------------------------------------------------------------------------------------


def _caption(shown: Sequence[_Shown], rows: Sequence[Accuracy], more: str = "") -> str:
    folders = [one.folder for one in shown]
    about = ""
    if len(shown) == 1:
        about = f"{wording.visible(folders[0].label, keep='')} on {wording.visible(folders[0].task, keep='')}. "
    bold = (
        " Bold: p ≤ 0.05 after Holm and a Δ larger than A/A's." if any(wording.significant(row) for row in rows) else ""
    )
    whole = [row for row in rows if row.split == "all"]
    said = [
        f"{about}{wording.items_words(whole)}; {wording.statistics_words(folders, rows)}.",
        more,
        wording.rates_words(whole),
        f"{wording.drawn_words(folders)}{bold}",
    ]
    return " ".join(filter(None, said))


def _csv(shown: Sequence[_Shown]) -> str:
    """Every column of accuracy.parquet, and what tells conditions and folders apart; numbers with all their digits."""
    names = [field.name for field in fields(Accuracy)]
    described = ("kind", "filler", "length", "placement", "arm")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*names, *described, "engine", "mode", "slots"])
    for one in shown:
        engine = one.folder.engine
        for row in one.rows:
            about = one.folder.conditions.get(row.condition, {})
            values: list[object] = [getattr(row, name) for name in names]
            # JSON, so that a newline or a space at the edge survives every reader.
            values += [
                json.dumps(about[key], ensure_ascii=False)
                if key in ("filler", "arm") and about.get(key)
                else about.get(key)
                for key in described
            ]
            writer.writerow([*values, engine.get("engine"), engine.get("mode"), engine.get("slots")])
    return stream.getvalue()
