"""A comparison of models in words and as tables: Markdown to read, LaTeX to print, CSV with every digit."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import Any

from mless.figures.tabular import Cell, Table, latex, markdown
from mless.results.comparing import Block, Comparison
from mless.results.wording import p_words, whole_percent
from mless.values import counted

READING = "Intervals are 95 %: of a model over its items, of the mean over models and all τ² that fit."


# ---- numbers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Digits:
    """Writes the effects of a comparison, all with as many decimals as its usual interval deserves."""

    comparison: Comparison
    decimals: int

    @classmethod
    def of(cls, comparison: Comparison) -> Digits:
        shown = comparison.scale.shown
        ends = [(shown(row.reading.lo), shown(row.reading.hi)) for block in comparison.blocks for row in block.rows]
        widths = sorted(hi - lo for lo, hi in ends if math.isfinite(hi - lo) and hi > lo)
        half = widths[len(widths) // 2] / 2 if widths else 0.01
        return cls(comparison, min(max(1 - math.floor(math.log10(half)), 1), 6))

    def number(self, value: float) -> str:
        """``+0.0031``, ``−1.2``; of a ratio ``0.83``."""
        if math.isnan(value):
            return "–"
        scale = self.comparison.scale
        at = scale.shown(value)
        if not math.isfinite(at) or at >= 1e9:
            return f"{at:.3g}"
        text = f"{at:+.{self.decimals}f}" if scale.change else f"{at:.{self.decimals}f}"
        return (text[1:] if not float(text) and text[0] in "+-" else text).replace("-", "−")

    def between(self, lo: float, hi: float) -> str:
        return "" if math.isnan(lo) or math.isnan(hi) else f"[{self.number(lo)}, {self.number(hi)}]"

    def effect(self, value: float, lo: float, hi: float) -> str:
        return f"{self.number(value)} {self.between(lo, hi)}".strip()


def plain_number(value: float) -> str:
    """Three digits, with a true minus."""
    return "–" if math.isnan(value) else f"{value:.3g}".replace("-", "−")


# ---- words -----------------------------------------------------------------------------------------------------------


def lines_of(comparison: Comparison) -> list[str]:
    """What was found, its main sentence first."""
    digits = Digits.of(comparison)
    found = [heading(comparison)]
    for block in comparison.blocks:
        found += [f"{block.condition}: {line}" for line in block_words(comparison, block, digits)]
    if comparison.models == 1:
        found.append("One model says nothing of others; give the folders of more.")
    elif comparison.models == 2:
        found.append("Two models leave one degree of freedom, so the interval of their mean is wide.")
    return found


def heading(comparison: Comparison) -> str:
    return f"{comparison.words}, against none: {counted(comparison.models, 'model')}, {counted(comparison.items, 'item')} of {comparison.task}"


def block_words(comparison: Comparison, block: Block, digits: Digits) -> list[str]:
    """The mean, how far models differ, what a further model may show, and each property."""
    found, scale = block.pooled, comparison.scale
    if found.k == 1:
        one = block.rows[0].reading
        return [digits.effect(one.value, one.lo, one.hi)]
    on = " (of its logarithm)" if scale.ratio else ""
    unit = scale.factor**2 if not scale.ratio else 1.0
    spread = digits.between(found.predicted_lo, found.predicted_hi)
    lines = [
        f"mean {digits.effect(found.mean, found.lo, found.hi)}, {p_words(found.p)}",
        f"between models τ² = {plain_number(unit * found.tau2)} [{plain_number(unit * found.tau2_lo)}, {plain_number(unit * found.tau2_hi)}]{on}, "
        f"{_share_words(found.i2)}, {p_words(found.q_p)} for no difference; "
        + (f"a further model: {spread}" if spread else "two models predict no further one"),
    ]
    return lines + [f"by {name}: {moderator_words(comparison, block, name, digits)}" for name in block.by]


def moderator_words(comparison: Comparison, block: Block, name: str, digits: Digits) -> str:
    found, scale = block.by[name], comparison.scale
    if found.groups:
        each = ", ".join(f"{one.name} {digits.effect(one.mean, one.lo, one.hi)} ({one.k})" for one in found.groups)
        if len(found.groups) == 1:
            return f"{each}; only one kind, so nothing to compare"
        return f"{each}; {_test_words(found.p)}"
    if math.isnan(found.slope):
        return "no slope: at least three models with different values are needed"
    unit = scale.factor if not scale.ratio else 1.0
    each = "tenfold size" if name == "size" else f"unit of {name}"
    ends = " [" + ", ".join(_signed(unit * end) for end in (found.slope_lo, found.slope_hi)) + "]"
    logs = " (of its logarithm)" if scale.ratio else ""
    return f"{_signed(unit * found.slope)}{ends} for every {each}{logs}; {_test_words(found.p)}"


def _share_words(i2: float) -> str:
    shown = whole_percent(i2)
    return f"I² {shown[0]} {shown[1:]} %" if shown[0] in "<>" else f"I² = {shown} %"


def _test_words(p: float) -> str:
    return "too few models for a test" if math.isnan(p) else f"{p_words(p)} for no difference"


def _signed(value: float) -> str:
    text = plain_number(value)
    return text if text.startswith(("−", "–")) or not value else f"+{text}"


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_of(comparison: Comparison) -> Table:
    """A row a model (and condition), then the mean, a further model, and the kinds of models."""
    digits = Digits.of(comparison)
    several = len(comparison.blocks) > 1
    named = list(comparison.blocks[0].rows[0].moderators)
    heads = (*(("condition",) if several else ()), "model", *named, "items", comparison.words, "weight, %")
    aligned = "l" * (1 + several + len(named)) + "rrr"
    body: list[tuple[Cell, ...]] = []
    for block in comparison.blocks:
        first = (Cell(block.condition),) if several else ()
        for row in block.rows:
            one = row.reading
            weight = f"{100 * row.weight:.1f}" if block.pooled.k > 1 else "–"
            effect = digits.effect(one.value, one.lo, one.hi)
            body.append(
                (
                    *first,
                    Cell(row.label),
                    *(Cell(row.moderators[name]) for name in named),
                    Cell(f"{one.n:,}"),
                    Cell(effect),
                    Cell(weight),
                )
            )
        for label, effect, marked in _summary(block, digits):
            empty = [Cell("") for _ in named]
            body.append((*first, Cell(label, marked=marked), *empty, Cell(""), Cell(effect, marked=marked), Cell("")))
    return Table(heads, aligned, tuple(body), caption_of(comparison))


def _summary(block: Block, digits: Digits) -> list[tuple[str, str, bool]]:
    """Rows under the models: label, effect, and whether it is bold."""
    found = block.pooled
    if found.k == 1:
        return []
    rows = [(f"mean of {found.k} models", digits.effect(found.mean, found.lo, found.hi), True)]
    if not math.isnan(found.predicted_lo):
        rows.append(("a further model", digits.between(found.predicted_lo, found.predicted_hi), False))
    for name, by in block.by.items():
        rows += [
            (f"{name} {one.name} ({counted(one.k, 'model')})", digits.effect(one.mean, one.lo, one.hi), False)
            for one in by.groups
            if by.free  # kinds of one model each are the rows above once more
        ]
    return rows


def caption_of(comparison: Comparison) -> str:
    """What a table or picture says under itself."""
    digits = Digits.of(comparison)
    said = [f"{heading(comparison)}."]
    if comparison.models > 1:
        for block in comparison.blocks:
            _, between, *_ = block_words(comparison, block, digits)
            told = [
                f"by {name}: {moderator_words(comparison, block, name, digits)}"
                for name, by in block.by.items()
                if by.free
            ]
            name = f"{block.condition}: " if len(comparison.blocks) > 1 else ""
            said.append(f"{name}{'; '.join([between if name else between[0].upper() + between[1:], *told])}.")
        said.append(READING)
    else:
        said.append("Intervals are 95 %, over items. One model says nothing of others.")
    if len(comparison.blocks) == 1:
        said[0] = f"{comparison.blocks[0].condition}, {said[0]}"
    return " ".join(said)


_COLUMNS = (
    "row", "condition", "label", "readout", "metric", "layer", "task", "scale", "n", "value", "error", "lo", "hi", "weight", "p", "tau2",
    "tau2_lo", "tau2_hi", "i2", "q", "q_p", "predicted_lo", "predicted_hi", "folder",
)  # fmt: skip


def _column(moderator: str) -> str:
    """A property of models with the name of a column has another one."""
    return f"by {moderator}" if moderator in _COLUMNS else moderator


def csv_of(comparison: Comparison) -> str:
    """Every number as it is computed with (of a ratio, its logarithm), a row a model, mean and kind."""
    columns = (*_COLUMNS, *(_column(name) for name in comparison.blocks[0].rows[0].moderators))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows_of(comparison):
        writer.writerow(
            {key: "" if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
        )
    return stream.getvalue()


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """The numbers of a comparison, for other programs."""
    common: dict[str, Any] = {
        "readout": comparison.readout, "metric": comparison.metric, "layer": comparison.layer, "task": comparison.task,
        "scale": "log ratio" if comparison.scale.ratio else "difference",
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    for block in comparison.blocks:
        here = common | {"condition": block.condition}
        for row in block.rows:
            one = {name: getattr(row.reading, name) for name in ("n", "value", "error", "lo", "hi")}
            about = {"label": row.label, "folder": str(row.folder), "weight": row.weight}
            moderators = {_column(name): value for name, value in row.moderators.items()}
            found.append({"row": "model"} | here | about | one | moderators)
        pooled = block.pooled
        if pooled.k > 1:
            names = (
                "error",
                "lo",
                "hi",
                "p",
                "tau2",
                "tau2_lo",
                "tau2_hi",
                "i2",
                "q",
                "q_p",
                "predicted_lo",
                "predicted_hi",
            )
            mean = {"row": "mean", "label": f"mean of {pooled.k} models", "n": pooled.k, "value": pooled.mean}
            found.append(here | mean | {name: getattr(pooled, name) for name in names})
        for name, by in block.by.items():
            kinds = [(f"{name} {one.name}", one.k, one.mean, one.lo, one.hi) for one in by.groups]
            slope = [(f"{name}: slope", by.k, by.slope, by.slope_lo, by.slope_hi)] if not by.groups else []
            for label, count, value, lo, hi in (*kinds, *slope):
                more = {
                    "row": "kind" if by.groups else "slope",
                    "label": label,
                    "n": count,
                    "value": value,
                    "lo": lo,
                    "hi": hi,
                }
                found.append(here | more | {"p": by.p, "tau2": by.tau2})
    return found


def content_of(comparison: Comparison) -> dict[str, Any]:
    """For JSON: the same rows without what is no number, and the words."""
    rows = [
        {key: value for key, value in row.items() if not (isinstance(value, float) and not math.isfinite(value))}
        for row in rows_of(comparison)
    ]
    return {
        "readout": comparison.readout,
        "metric": comparison.metric,
        "models": comparison.models,
        "items": comparison.items,
        "rows": rows,
    }


def files_of(comparison: Comparison) -> dict[str, str]:
    """``compare.md``, ``compare.csv`` and ``compare.tex``: name → text."""
    table = table_of(comparison)
    return {"compare.md": markdown(table), "compare.csv": csv_of(comparison), "compare.tex": latex(table, "compare")}
