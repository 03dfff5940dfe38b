"""How numbers and names of accuracy results are written: the same in pictures, tables and pages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mless import values
from mless.conditions import EDITS
from mless.results.answers import BestOnDev, StoredAnswers, p_of_row
from mless.results.escaping import visible
from mless.results.reading import StoredStudy
from mless.results.schemas import Accuracy
from mless.values import condition_of

#: As the published tables number them.
PLACEMENTS = {
    "before-system": "① before system",
    "before-question": "② before question",
    "end": "③ end",
    "before-answer": "⑤ before the answer",
    "anywhere": "④ anywhere",
}


# ---- numbers -------------------------------------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    """``0.639`` → ``63.9``."""
    return "–" if share is None else f"{100 * share:.1f}"


def whole_percent(share: float | None) -> str:
    """``0.239`` → ``24``, for narrow places; only 0 is written as 0."""
    if share is None:
        return "–"
    rounded = round(100 * share)
    return "<1" if share and not rounded else ">99" if share < 1 and rounded == 100 else str(rounded)


def points(delta: float | None) -> str:
    """``-0.012`` → ``−1.2``: percentage points with their sign; 0 has none."""
    if delta is None:
        return "–"
    text = f"{100 * delta:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def percent_interval(row: Accuracy) -> str:
    return interval(row.lo, row.hi).strip()


def points_interval(row: Accuracy) -> str:
    return interval(row.delta_lo, row.delta_hi, signed=True).strip()


def form_part(row: Accuracy) -> str:
    """How much of Δ is form, with its interval; "mostly" as in the verdict."""
    if row.delta_form is None:
        return "–"
    around = interval(row.delta_form_lo, row.delta_form_hi, signed=True)
    return f"{points(row.delta_form)}{around}{', mostly' if mostly_form(asdict(row)) else ''}"


def share(value: float | None) -> str:
    """``12.3 %``."""
    return "–" if value is None else f"{percent(value)} %"


def interval(lo: float | None, hi: float | None, *, signed: bool = False) -> str:
    """`` [−1.0, +7.6]``; nothing where there is none."""
    if lo is None or hi is None:
        return ""
    return f" [{points(lo)}, {points(hi)}]" if signed else f" [{percent(lo)}, {percent(hi)}]"


def p_value(p: float | None) -> str:
    """``< 0.001``, ``0.012``, ``0.34``."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def p_words(p: float | None) -> str:
    """``p < 0.001``, ``p = 0.012``."""
    shown = p_value(p)
    return "p unknown" if p is None else f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def mostly_form(row: Mapping[str, Any]) -> bool:
    """Whether a Δ is called mostly form: form is its larger part, and Δ or the form part is more than chance."""
    lo, hi = row.get("delta_form_lo"), row.get("delta_form_hi")
    clear = row["verdict"] in ("rises", "drops") or (lo is not None and hi is not None and (lo > 0 or hi < 0))
    return bool(row.get("mostly_form")) and clear


def p_of(row: Accuracy) -> float | None:
    """The p of a row by itself, before it is adjusted."""
    return None if row.p is None else p_of_row(asdict(row))


def p_claimed(row: Accuracy) -> float | None:
    """The p for a finding: adjusted over the conditions, or the plain p of a row in no family."""
    return row.p if row.p_adjusted is None else row.p_adjusted


def significant(row: Accuracy) -> bool:
    """As the verdict has it: a small p, and a change larger than the A/A control's."""
    return row.verdict in ("rises", "drops")


# ---- names ---------------------------------------------------------------------------------------------------------------

_NAMES = {
    "none": "w/o",
    "mless": "w/ Mless",
    "mful": "w/ Mful",
    "random": "w/ random text",
    "arm": "w/ ARM",
    "mless-arm": "w/ Mless + ARM",
}


def condition_name(condition: str, folders: Sequence[StoredStudy]) -> str:
    """``mless`` → ``w/ Mless``, as the published bars have it; other names as they are."""
    if any(folder.control == condition for folder in folders):
        return "w/o again"
    return _NAMES.get(condition, visible(condition, keep=""))


def filler_shown(about: Mapping[str, Any]) -> str:
    """The filler in quotes, with every character visible: ``" /"``, ``"\\n"``."""
    filler = about.get("filler")
    if about.get("kind") == "text":
        return "natural text"
    if about.get("kind") == "tokens":
        return "random tokens"
    if about.get("kind") in EDITS:
        return EDITS[str(about["kind"])].what
    if filler is None:
        return "–"
    quoted = visible(json.dumps(str(filler), ensure_ascii=False), keep="")
    return quoted if len(quoted) <= 24 else quoted[:22] + "…" + '"'


def condition_words(about: Mapping[str, Any]) -> str:
    """What a stored condition does to the prompt or the model. For imported results that do not say it, their source."""
    if about.get("imported") and not about.get("recorded", about.get("told")):
        return visible(f"as in {about['imported']}", keep="")
    return visible(values.condition_words(condition_of(str(about.get("name") or ""), about)), keep="")


def random_is_yardstick(name: str, conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether `random` is a yardstick for a condition: natural text of the same length in the same place."""
    mine, text = conditions.get(name), conditions.get("random")
    if mine is None or text is None or name == "random":
        return False
    return all(mine.get(key) == text.get(key) for key in ("length", "placement"))


# ---- notes under a table or picture -------------------------------------------------------------------------------------


def drawn_words(folders: Sequence[StoredAnswers]) -> str:
    """``Greedy, at most 256 new tokens; engine hf (row-stable, 16 slots).``"""
    decoding = " / ".join(dict.fromkeys(filter(None, map(decoding_of, folders))))
    engines = "; ".join(dict.fromkeys(map(_engine, folders)))
    return visible("; ".join(filter(None, (decoding, engines))), keep="") + "."


def _engine(folder: StoredAnswers) -> str:
    engine = folder.engine
    name = engine.get("engine") or folder.settings.get("engine") or "unknown"
    slots = engine.get("slots")
    more = ", ".join(str(part) for part in (engine.get("mode"), f"{slots} slots" if slots else None) if part)
    return f"engine {name}" + (f" ({more})" if more else "")


def decoding_of(folder: StoredAnswers) -> str:
    """``Greedy, at most 256 new tokens``."""
    table = folder.settings
    if not table:
        return ""
    if folder.engine.get("drawn"):
        return str(folder.engine["drawn"]).capitalize()
    warm = float(table.get("temperature") or 0)
    drawn = f"Temperature {warm:g}, top-p {float(table.get('top_p') or 1):g}" if warm else "Greedy"
    return f"{drawn}, at most {table.get('max_new_tokens', '?')} new tokens"


def items_words(rows: Sequence[Accuracy]) -> str:
    """``n = 200 items``, or the numbers of all that are shown."""
    counts = list(dict.fromkeys(f"{row.n:,}" for row in rows))
    samples = sorted({row.samples or 1 for row in rows})
    each = (
        f", {'–'.join(dict.fromkeys((str(samples[0]), str(samples[-1]))))} samples each" if samples[-1:] > [1] else ""
    )
    return f"n = {' / '.join(counts)} item{'' if counts == ['1'] else 's'}{each}"


def statistics_words(folders: Sequence[StoredAnswers], rows: Sequence[Accuracy]) -> str:
    """Which interval and which test: both follow from how many answers an item has and whether items are related."""
    sampled = any(not _one_answer(row) for row in rows)
    single = any(_one_answer(row) for row in rows)
    related = any(folder.settings.get("cluster_field") for folder in folders)
    unit = "cluster" if related else "item"
    several = f"{unit} bootstrap", f"sign-flip over {unit}s"
    if related or not single:
        intervals, tests = several
    elif not sampled:
        intervals, tests = "Wilson for an accuracy, Tango for a paired Δ", "exact McNemar"
    else:
        intervals = f"Wilson and Tango (paired Δ) for one answer or vote per item, {several[0]} for several"
        tests = f"exact McNemar or {several[1]}"
    both = any(row.p_again is not None for row in rows)
    against = "none and none again (the larger)" if both else "none"
    named = list(dict.fromkeys(str(folder.study["primary"]) for folder in folders if folder.study.get("primary")))
    alone = f" but {' / '.join(named)}, the primary condition, which is tested alone" if named else ""
    return (
        f"95 % intervals: {intervals}; p: {tests} against {against}, Holm over the conditions{visible(alone, keep='')}"
    )


def _one_answer(row: Accuracy) -> bool:
    """Whether each item is just right or wrong: one answer, or one vote over its answers."""
    kind, _, k = row.metric.partition("@")
    return row.metric != "diversity" and (row.samples or 1) // (int(k) if kind == "maj" else 1) == 1


def choice_words(best: BestOnDev, called: str) -> str:
    """A choice made on dev items, and its result on the test items."""
    test = Accuracy(**best.test)
    return (
        f"chosen on the dev items (n = {best.dev['n']:,}) out of {best.among}: {called}; on the test items (n = {test.n:,}) "
        f"{percent(test.value)} % {percent_interval(test)}, Δ {points(test.delta)} points {points_interval(test)}, "
        f"{p_words(best.p)} (one comparison, not adjusted): {best.verdict}."
    )


def rates_words(rows: Sequence[Accuracy]) -> str:
    """Cut off and no answer, over all that is shown."""
    return f"Cut off: {_range([r.truncated for r in rows])}; no answer found: {_range([r.no_answer for r in rows])}."


def _range(shares: Sequence[float | None]) -> str:
    known = [100 * share for share in shares if share is not None]
    if not known:
        return "not known"
    low, high = f"{min(known):.1f}", f"{max(known):.1f}"
    return f"{low} %" if low == high else f"{low}–{high} %"


def smallest_words(rows: Sequence[Accuracy]) -> str:
    """The effect that so many items could have shown."""
    known = [100 * row.mde for row in rows if row.mde is not None]
    if not known:
        return ""
    low, high = f"{min(known):.1f}", f"{max(known):.1f}"
    return f"Smallest Δ these items could have shown with 80 % power: {low if low == high else f'{low}–{high}'} points."
