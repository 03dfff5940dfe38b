"""What a command prints at its end: JSON, or a verdict, a table and where the report is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mless.cli.streams import console
from mless.results.escaping import visible, visible_json

if TYPE_CHECKING:
    from rich.table import Table


def plain(text: str) -> str:
    """The text on one line: what cannot be seen is escaped, so that a sign in a file name cannot move the cursor."""
    return visible(text, keep="")


def print_json(content: object) -> None:
    print(visible_json(json.dumps(content, ensure_ascii=False)))


def print_result(folder: Path, page: Path, note: str, *, as_json: bool, **more: object) -> None:
    """What a finished result folder shows, and where its page is; `more` goes into the JSON only."""
    from mless.report import summary
    from mless.results.reading import holds_answers

    content = summary(folder)
    if as_json:
        print_json(content | more)
        return
    print_verdict(content["verdict"], note)
    if holds_answers(folder):
        _print_accuracy(folder)
    print(f"\nreport: {plain(str(page))}")


def print_verdict(lines: list[str], note: str = "") -> None:
    out = console()
    head, *rest = lines
    out.print("")
    # Wrapped at the terminal's width; in a pipe or a file a sentence stays on its line.
    for line in (f"{head}{f' ({note})' if note else ''}", *(f"• {line}" for line in rest)):
        out.print(plain(line), soft_wrap=not out.is_terminal)


def _print_accuracy(folder: Path) -> None:
    """The table of an accuracy study: shares in per cent, differences in points."""
    from rich.table import Table

    from mless.results.answers import accuracy_rows
    from mless.results.wording import mostly_form, p_value

    def number(value: float | None, form: str = ".1f", scale: float = 100.0) -> str:
        if value is None:
            return "–"
        return format(value * scale, form).replace("-", "−") if value else "0.0"

    def between(lo: float | None, hi: float | None, form: str = ".1f") -> str:
        return "" if lo is None else f" [{number(lo, form)}, {number(hi, form)}]"

    columns = (
        "condition",
        "n",
        "accuracy, %",
        "Δ, points",
        "A/A Δ",
        "p",
        "p (Holm)",
        "detectable ±",
        "cut off, %",
        "no answer, %",
        "guessed, %",
        "of Δ form",
        "tokens",
        "verdict",
    )
    table = Table(*columns, box=None, pad_edge=False)
    for row in accuracy_rows(folder):
        metric = "" if row["metric"] == "pass@1" else f" ({row['metric']})"
        table.add_row(
            plain(row["condition"] + metric), str(row["n"]), number(row["value"]) + between(row["lo"], row["hi"]),
            number(row["delta"], "+.1f") + between(row["delta_lo"], row["delta_hi"], "+.1f"), number(row["aa_delta"], "+.1f"),
            p_value(row["p"]), p_value(row["p_adjusted"]), number(row["mde"]), number(row["truncated"]),
            number(row["no_answer"]), number(row.get("guessed")),
            number(row.get("delta_form"), "+.1f") + (", mostly" if mostly_form(row) else ""), number(row["tokens"], ".0f", 1.0), plain(row["verdict"] or ""),
        )  # fmt: skip
    _print_wide(table)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], aligned: str) -> None:
    """A table of texts; `aligned` is l or r per column."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head, side in zip(heads, aligned, strict=True):
        table.add_column(plain(head), justify="right" if side == "r" else "left")
    for row in rows:
        table.add_row(*map(plain, row))
    _print_wide(table)


def _print_wide(table: Table) -> None:
    # Broken cells cannot be read, so without a terminal the table gets the width it needs.
    out = console()
    if not out.is_terminal:
        out = console(width=max(out.width, console(width=1000).measure(table).maximum))
    out.print("")
    out.print(table)
