"""Reading what `mless tune` left, and table 9: ARM's parameters as published and as chosen here."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import cast

from mless.figures.tabular import Cell, Table
from mless.results import wording
from mless.results.answers import StoredTuning
from mless.results.schemas import Accuracy, Tried
from mless.values import ARM_PRESETS, ArmSettings, format_numbers

# ---- table 9 ---------------------------------------------------------------------------------------------------------

HEADS = (
    "model", "parameters", "task", "c", "fraction", "p_min", "p_max", "p1", "layers", "settings tried", "dev n", "dev Δ points", "test n",
    "test Δ points", "p", "verdict",
)  # fmt: skip
#: What table 9 was published for.
PUBLISHED_TASK = "MATH-500"


def parameters_table(paths: Sequence[Path]) -> tuple[Table, str]:
    """Table 9, and the same as CSV with every digit: what was published, and below a model's name what was chosen for it here."""
    folders = [StoredTuning.open(path) for path in paths]
    own = {id(folder): folder for folder in folders}
    lines: list[tuple[str, StoredTuning | None, ArmSettings | None]] = []
    for name, settings in ARM_PRESETS.items():
        lines.append((name, None, settings))
        for key, folder in list(own.items()):
            if folder.label.lower() == name:
                lines.append((folder.label, own.pop(key), None))
    lines += [(folder.label, folder, None) for folder in own.values()]
    body = tuple(
        _published(name, settings) if settings is not None else _chosen(cast("StoredTuning", folder))
        for name, folder, settings in lines
    )
    aligned = "".join("l" if head in ("model", "parameters", "task", "verdict") else "r" for head in HEADS)
    marked = any(cell.marked for row in body for cell in row)
    caption = (
        "Parameters of ARM: as published (how they were chosen is not known), and as chosen here, on dev items by paired Δ against none. "
        "A setting was chosen for its dev Δ, so that is no result. The test Δ, with its 95 % interval, is that of the chosen setting on "
        "items that nothing was chosen on. Its p is of one comparison and needs no correction."
        + (" Bold: p ≤ 0.05 and a Δ larger than A/A's." if marked else "")
    )
    return Table(HEADS, aligned, body, caption), _csv(lines)


def _published(name: str, settings: ArmSettings) -> tuple[Cell, ...]:
    return (Cell(name), Cell("published"), Cell(PUBLISHED_TASK), *_parameters(settings), *[Cell("–")] * 7)


def _parameters(one: ArmSettings | Tried) -> list[Cell]:
    by_c = one.c is not None
    return [
        Cell(_number(one.c)),
        Cell(_number(one.fraction)),
        Cell(_number(one.p_min if by_c else None)),
        Cell(_number(one.p_max if by_c else None)),
        Cell(_number(one.p1)),
        Cell(format_numbers(one.layers)),
    ]


def _chosen(folder: StoredTuning) -> tuple[Cell, ...]:
    best = folder.best()
    test = folder.on_test()
    return (
        Cell(folder.label),
        Cell("chosen here"),
        Cell(folder.task),
        *_parameters(best),
        Cell(str(folder.tuning["tried"])),
        Cell(f"{best.n:,}"),
        Cell(wording.points(best.delta)),
        Cell(f"{test.n:,}"),
        Cell(f"{wording.points(test.delta)} {wording.points_interval(test)}".strip(), marked=wording.significant(test)),
        Cell(wording.p_value(wording.p_of(test))),
        Cell(test.verdict or "–"),
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _csv(lines: Sequence[tuple[str, StoredTuning | None, ArmSettings | None]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = ("c", "fraction", "p_min", "p_max", "p1")
    numbers = [field.name for field in fields(Accuracy) if field.name not in ("model", "task", "condition", "split")]
    dev = ("n", "none", "value", "delta", "delta_lo", "delta_hi", "p", "p_adjusted")
    writer.writerow(
        ["model", "parameters", "task", *names, "layers", "tried", *(f"dev_{name}" for name in dev)]
        + [f"test_{name}" for name in numbers]
    )
    for name, folder, settings in lines:
        best = settings or cast("StoredTuning", folder).best()
        row: list[object] = [
            name,
            "published" if folder is None else "chosen here",
            PUBLISHED_TASK if folder is None else folder.task,
        ]
        row += [getattr(best, key) for key in names] + [" ".join(map(str, best.layers))]
        if folder is None:
            row += [None] * (1 + len(dev) + len(numbers))
        else:
            test = folder.on_test()
            row += [
                folder.tuning["tried"],
                *(getattr(best, key) for key in dev),
                *(getattr(test, key) for key in numbers),
            ]
        writer.writerow(row)
    return stream.getvalue()
