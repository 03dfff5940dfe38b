"""A table of cells, written as Markdown to read or as LaTeX to print."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mless.results import wording


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell says. `code` is a text of the prompt, shown character by character; `marked` cells are bold."""

    text: str
    code: bool = False
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table before it is written. `groups` are headings over so many columns each, left to right; `aligned` is l or r per column."""

    heads: tuple[str, ...]
    aligned: str
    rows: tuple[tuple[Cell, ...], ...]
    caption: str
    groups: tuple[tuple[str, int], ...] = ()


def markdown(table: Table) -> str:
    groups = [name for name, count in table.groups for _ in range(count)] or [""] * len(table.heads)
    heads = [" ".join(filter(None, pair)) for pair in zip(map(_md, groups), map(_md, table.heads), strict=True)]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join('---' if side == 'l' else '--:' for side in table.aligned)}|"]
    lines += [f"| {' | '.join(map(_md_cell, row))} |" for row in table.rows]
    return "\n".join([*lines, "", _md(table.caption), ""])


def _md_cell(cell: Cell) -> str:
    if cell.code:
        # A fence longer than any run of backticks inside; a bar ends a cell even in code.
        longest = max((len(run) for run in re.findall(r"`+", cell.text)), default=0)
        fence, edge = "`" * (longest + 1), " " if "`" in cell.text else ""
        return f"{fence}{edge}{cell.text}{edge}{fence}".replace("|", "\\|")
    text = _md(cell.text)
    return f"**{text}**" if cell.marked and text else text


def _md(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no end of a cell."""
    return (
        re.sub(r"([\\`*_{}<>|\[\]#~&])", r"\\\1", wording.visible(text, keep=""))
        .replace("\\[", "[")
        .replace("\\]", "]")
    )


# Quotes by their codes, because OT1 has no named straight ones and some pairs of signs become one. A bracket or a star that begins a row
# would be taken for an argument of the line break before it.
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': r"{\char34}", "`": r"{\char96}", "Δ": r"$\Delta$", "−": "$-$", "±": r"$\pm$", "≤": r"$\leq$", "–": "--", "×": r"$\times$",
    "…": r"\ldots{}", "①": "(1)", "②": "(2)", "③": "(3)", "④": "(4)", "\u00a0": "~", "[": "{[}", "*": "{*}",
    "λ": r"$\lambda$", "ε": r"$\varepsilon$", "τ": r"$\tau$", "²": r"$^{2}$",
}  # fmt: skip


def _tex(text: str) -> str:
    """Text that LaTeX prints as it is; a sign beyond ASCII that it may not know is written as its code."""
    return "".join(
        _TEX.get(sign) or (sign if sign.isascii() else _TEX["\\"] + _code(sign))
        for sign in wording.visible(text, keep="")
    )


def _code(sign: str) -> str:
    return f"u{ord(sign):04x}"


def _tex_cell(cell: Cell) -> str:
    text = _tex(cell.text)
    if cell.code:
        return r"\texttt{" + text.replace(" ", r"\textvisiblespace{}") + "}"
    return rf"\textbf{{{text}}}" if cell.marked and text else text


def latex(table: Table, spec_id: str) -> str:
    """A float with booktabs' rules, made smaller where it is wider than the page."""
    lines = [
        r"% needs \usepackage{booktabs,graphicx}",
        r"\begin{table*}",
        r"\centering",
        rf"\caption{{{_tex(table.caption)}}}",
        rf"\label{{tab:{spec_id}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{@{{}}{table.aligned}@{{}}}}",
        r"\toprule",
    ]
    if table.groups:
        lines.append(" & ".join(_heading(name, count) for name, count in table.groups) + r" \\")
        start = 1
        for name, count in table.groups:
            if name:
                lines.append(rf"\cmidrule(lr){{{start}-{start + count - 1}}}")
            start += count
    lines += [" & ".join(map(_tex, table.heads)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(_tex_cell, row)) + r" \\" for row in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table*}", ""])


def _heading(name: str, count: int) -> str:
    return rf"\multicolumn{{{count}}}{{c}}{{{_tex(name)}}}" if name else " & ".join([""] * count)
