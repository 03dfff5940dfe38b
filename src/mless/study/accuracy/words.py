"""accuracy.parquet and answers.parquet in words: the verdict of an accuracy study."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from mless import tasks
from mless.errors import BadData, BadStudy
from mless.results.answers import ALPHA, best_on_dev, headlines, read_accuracy
from mless.results.folder import ResultFolder
from mless.results.schemas import ACCURACY
from mless.results.wording import condition_words as stored_words
from mless.results.wording import interval, mostly_form, p_words, points, share
from mless.values import Condition, condition_words, counted

#: Key in study.json: the primary condition named when the first answer was drawn. Older folders lack it.
FIRST_PRIMARY = "primary_at_first_answer"
#: With so few changed items the exact p is never below 0.05: 2 · 2⁻⁵ = 0.06.
FEWEST_CHANGES = 6
#: Why an answer, or its reference, was compared as text though it may be mathematics.
_UNREAD = [tasks.NOTES[key] for key in ("long", "time", "memory", "crash", "reference", "answer")]


def accuracy_lines(path: Path) -> list[str]:
    """What was asked, a line per condition, the A/A control, and the limits."""
    about, conditions, rows = read_accuracy(path)
    settings: dict[str, Any] = about["study"]["accuracy"]
    heads = {row["condition"]: row for row in headlines(rows)}
    again = next((name for name in heads if conditions[name].again), None)
    compared = [name for name in heads if name not in ("none", again)]
    lines = [_opening(about, settings, heads["none"])]
    primary: str | None = about["study"].get("primary")
    by_holm = [name for name in compared if name != primary]
    lines += [
        f"{name} ({stored_words(about['conditions'][name])}): "
        + _result(heads[name], settings["margin"], family=len(by_holm), primary=name == primary)
        for name in heads
        if name != again
    ]
    lines += _primary_changed(about, primary)
    lines += _further_metrics(rows, compared, primary)
    lines += _at_once(heads, compared)
    lines.append(_control(heads.get(again or ""), about, settings))
    if any(row["split"] == "dev" for row in rows) and compared:
        lines += _choice(rows, conditions, settings["margin"])
    lines += population_lines(str(about["task"]), heads["none"]["n"])
    lines += _power(heads, compared, primary)
    lines += _losses(heads, settings)
    lines += guessed_lines(heads)
    judged = ResultFolder(path).read_table("answers", columns=["condition", "text", "disagree", "why"])
    lines += _form(heads, judged)
    disagree = judged.column("disagree")
    differing = disagree.to_pylist().count(True)
    if about.get("imported"):
        engine: Mapping[str, Any] = about["engine"]
        return [
            *lines,
            f"Right and wrong are as {engine['engine']} judged them ({engine['metric']}).",
            *_warnings(heads, compared),
        ]
    if settings.get("grader", tasks.DEFAULT_GRADER) != tasks.DEFAULT_GRADER:
        return [
            *lines,
            f"Right and wrong are as the grader {settings['grader']!r} judged them.",
            *_warnings(heads, compared),
        ]
    lines.append(
        f"The string and the symbolic rule judged {differing:,} of {len(disagree):,} answers differently"
        + ("; answers.parquet says why each was judged as it was." if differing else ".")
    )
    if unread := sum(any(note in why for note in _UNREAD) for why in judged.column("why").to_pylist()):
        lines.append(
            f"{unread:,} of {len(disagree):,} answers could not be read as mathematics (or their reference could not) and were compared as text."
        )
    return lines + _warnings(heads, compared)


def _opening(about: Mapping[str, Any], settings: Mapping[str, Any], none: Mapping[str, Any]) -> str:
    engine: Mapping[str, Any] = about.get("engine") or {}
    slots = engine.get("slots")
    divided = engine.get("tensor_parallel") or 1
    details = [
        engine.get("mode"),
        f"S = {slots}" if slots else None,
        f"tensor parallel {divided}" if divided > 1 else None,
    ]
    shown = ", ".join(str(one) for one in details if one)
    drawn = engine.get("drawn") or (f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy")
    samples = f"{none['samples']} samples" if none["samples"] > 1 else "1 answer"
    return (
        f"{about['model']['label']}, {counted(none['n'], 'item')} of {about['task']}, engine "
        f"{engine.get('engine', settings['engine'])}{f' ({shown})' if shown else ''}, {drawn}, {samples} per item; accuracy = share judged "
        "right, with 95 % interval"
    )


def _result(row: Mapping[str, Any], margin: float, *, family: int, primary: bool = False) -> str:
    text = "" if row["metric"] == "pass@1" else f"{row['metric']} "
    text += f"{100 * row['value']:.1f} %{interval(row['lo'], row['hi'])}"
    if row["sd"] is not None:
        text += f", sd over {row['samples']} seeds {100 * row['sd']:.1f}"
    if row["delta"] is None:
        return text
    against = "" if row["metric"] == "pass@1" else " against none's pass@1"
    text += f"; Δ {points(row['delta'])} points{interval(row['delta_lo'], row['delta_hi'], signed=True)}{against}"
    if row["aa_delta"] is not None:
        text += f" (A/A {points(row['aa_delta'])})"
    if row["p"] is not None:
        text += f", {p_words(row['p'])}"
        if row["p_again"] is not None and row["p_again"] != row["p"]:
            text += f" and against none-again {p_words(row['p_again'])}"
        if primary:
            text += ", tested alone as the primary condition"
        elif family > 1 and row["p_adjusted"] is not None:
            text += f", after Holm {p_words(row['p_adjusted'])}"
    return f"{text}: {_words(row, row['p_adjusted'], row['verdict'], margin)}{form_words(row)}"


def change_words(row: Mapping[str, Any]) -> str:
    """``Δ +3.3 points [−1.0, +7.6], p = 0.12``, without a verdict."""
    text = f"Δ {points(row['delta'])} points{interval(row['delta_lo'], row['delta_hi'], signed=True)}"
    return text if row["p"] is None else f"{text}, {p_words(row['p'])}"


def _words(row: Mapping[str, Any], p: float | None, verdict: str, margin: float) -> str:
    around = f"±{100 * margin:g} points"
    if verdict == "equivalent":
        return (
            f"no effect: a change of more than {around} is excluded (equivalence test, {p_words(row['equivalence_p'])})"
        )
    if verdict == "undecided" and p is not None and p <= ALPHA:
        return "undecided: the same prompts differ by as much among themselves (A/A)"
    if verdict == "undecided":
        return f"undecided: neither a change is shown, nor that it stays within {around}"
    return f"accuracy {verdict}"


def _primary_changed(about: Mapping[str, Any], primary: str | None) -> list[str]:
    """A line for a primary condition that was named or changed after answers existed: it may have been chosen by looking."""
    if about.get("imported"):
        if primary is None:
            return []
        return [
            f"The primary condition, {primary}, was named when the results were imported: their answers were there before."
        ]
    before: str | None = about.get(FIRST_PRIMARY)
    if before == primary:
        return []
    now = f"now it is {primary}" if primary is not None else "now none is named"
    then = f"it was {before}" if before is not None else "none was named"
    return [
        f"The primary condition was changed after answers were drawn: {then}, {now}. A condition chosen after a look at the answers "
        "rejects more often than its p says; the test that was planned is the earlier one."
    ]


def _at_once(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str]) -> list[str]:
    """What holds for all conditions together, by simultaneous intervals. Older folders have none."""
    rows = [heads[name] for name in compared if heads[name].get("delta_lo_all") is not None]
    if len(rows) < 2:
        return []
    shown = ", ".join(
        f"{row['condition']}{interval(row['delta_lo_all'], row['delta_hi_all'], signed=True)}" for row in rows
    )
    line = f"Read together, the Δ of all {len(rows)} conditions lie in (95 % for all at once, Bonferroni): {shown}"
    if all(row["delta_lo_all"] <= 0 <= row["delta_hi_all"] for row in rows):
        largest = max(max(-row["delta_lo_all"], row["delta_hi_all"]) for row in rows)
        line += f"; beyond ±{100 * largest:.1f} points a change is excluded for every one of them"
    return [line]


def _further_metrics(
    rows: Sequence[Mapping[str, Any]], compared: Sequence[str], primary: str | None = None
) -> list[str]:
    """pass@k, maj@k and diversity in a line each; the vote of a condition has its own line already."""
    lines: list[str] = []
    here = [row for row in rows if row["split"] == "all" and row["metric"] != "pass@1"]
    for metric in dict.fromkeys(row["metric"] for row in here if row["condition"] == "none"):
        of = {row["condition"]: row for row in here if row["metric"] == metric}
        shown = [f"none {share(of['none']['value'])}"]
        for name in compared:
            if (row := of.get(name)) is not None and row["delta"] is not None:
                how = "tested alone" if name == primary else "after Holm"
                tested = f", {how} {p_words(row['p_adjusted'])}" if row["p_adjusted"] is not None else ""
                shown.append(f"{name} {share(row['value'])} (Δ {points(row['delta'])}{tested}, {row['verdict']})")
        again = (
            of["none"]["aa_delta"]
            if of["none"]["aa_delta"] is not None
            else next((r["aa_delta"] for r in of.values()), None)
        )
        control = f" (A/A {points(again)})" if again is not None else ""
        lines.append(f"{'2-gram diversity' if metric == 'diversity' else metric}{control}: {'; '.join(shown)}")
    return lines


def _control(again: Mapping[str, Any] | None, about: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    if again is None:
        return "No A/A control (none-again) was run, so how far the same prompts differ by themselves is not known."
    moved, n = again["gained"] + again["lost"], again["n"]
    mode = (about.get("engine") or {}).get("mode")
    text = f"A/A: none-again differs on {moved:,} of {counted(n, 'item')}, Δ {points(again['delta'])}"
    if not moved and not again["changed_text"]:
        return f"{text}: {mode + ' ' if mode else ''}decoding repeats itself"
    text += f"{interval(again['delta_lo'], again['delta_hi'], signed=True)}, and {share(again['changed_text'])} of the answers read otherwise"
    if settings["temperature"] == 0 and mode is not None:
        return (
            f"{text}: {mode} decoding should have repeated itself and did not, so do not trust this run before you know why "
            "(another device, another version?)"
        )
    return f"{text}: an effect needs rejection against both none and none-again, and a Δ no larger than this is none"


def _choice(rows: Sequence[Mapping[str, Any]], conditions: Mapping[str, Condition], margin: float) -> list[str]:
    try:
        best = best_on_dev(pa.Table.from_pylist([dict(row) for row in rows], schema=ACCURACY), conditions)
    except BadStudy:
        return []  # only votes were compared: there was nothing to choose
    dev, test = best.dev, best.test
    p = f", {p_words(best.p)}" if best.p is not None else ""
    control = f" (A/A {points(test['aa_delta'])})" if test["aa_delta"] is not None else ""
    return [
        f"Chosen on {counted(dev['n'], 'dev item')}, out of {best.among}: {best.condition} ({condition_words(conditions[best.condition])}); on the "
        f"{counted(test['n'], 'test item')} Δ = {points(test['delta'])} points{interval(test['delta_lo'], test['delta_hi'], signed=True)}{control}{p}: "
        f"{_words(test, best.p, best.verdict, margin)}"
    ]


def _power(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str], primary: str | None) -> list[str]:
    shown = [f"{name} ±{100 * heads[name]['mde']:.1f}" for name in compared if heads[name]["mde"] is not None]
    unknown = [name for name in compared if heads[name]["mde"] is None]
    if not compared:
        return []
    text = f"{', '.join(shown)} points" if shown else ""
    if unknown:
        text += f"{'; ' if shown else ''}{', '.join(unknown)}: too few items changed for any"
    if any(heads[name].get("alpha") is None for name in compared):
        # older folders counted one comparison against one run of none
        holm = f"; Holm over {len(compared)} conditions asks for somewhat more" if len(compared) > 1 else ""
        return [f"Smallest effect that so many items could have shown (80 % power, one comparison): {text}{holm}"]
    noisy = any(heads[name]["p_again"] is not None and heads[name]["p_again"] != heads[name]["p"] for name in compared)
    asked = [f"p ≤ {_levels(heads, compared, primary)}"] if len(compared) > 1 else []
    asked += ["against both runs of none"] if noisy else []
    by = f", by the test that was used: {', '.join(asked)}" if asked else ""
    return [f"Smallest effect that so many items could have shown (80 % power{by}): {text}"]


def _levels(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str], primary: str | None) -> str:
    """``0.0167 (Holm over 3)``, or ``0.05 (primary) and 0.025 (Holm over 2)``."""
    others = [name for name in compared if name != primary]
    parts = [f"{heads[name]['alpha']:.3g} (primary)" for name in compared if name == primary]
    if others:
        how = f"Holm over {len(others)}" if len(others) > 1 else "the other one"
        parts.append(f"{heads[others[0]]['alpha']:.3g} ({how})")
    return " and ".join(parts)


def _losses(heads: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Truncation and missing answers, said as soon as one condition has more than 5 % of them."""
    lines: list[str] = []
    for column, what, way_out in (
        (
            "truncated",
            f"Cut off at {settings['max_new_tokens']:,} tokens",
            "; --max-new-tokens gives more room",
        ),
        ("no_answer", "No answer found, which counts as wrong", ""),
    ):
        known = {name: row[column] for name, row in heads.items() if row[column] is not None}
        if any(value > 0.05 for value in known.values()):
            shares = ", ".join(f"{name} {share(value)}" for name, value in known.items())
            lines.append(f"{what}: {shares}{way_out}")
    return lines


def _form(heads: Mapping[str, Mapping[str, Any]], answers: pa.Table) -> list[str]:
    """A line where the answers differ in form, which changes accuracy without better or worse reasoning."""
    lines: list[str] = []
    lengths = {name: row["tokens"] for name, row in heads.items() if row["tokens"] is not None}
    if lengths and max(lengths.values()) > 1.5 * max(1.0, min(lengths.values())):
        shown = ", ".join(f"{name} {tokens:.0f}" for name, tokens in lengths.items())
        lines.append(
            f"The answers differ in form: {shown} tokens on average. A condition that makes a model answer more briefly, or not stray, moves "
            "accuracy without better reasoning; read some side by side in the report"
        )
    texts: dict[str, list[str]] = {name: [] for name in heads}
    for condition, text in zip(
        answers.column("condition").to_pylist(), answers.column("text").to_pylist(), strict=True
    ):
        texts[condition].append(text)
    empty = {name: sum(not text.strip() for text in those) / max(1, len(those)) for name, those in texts.items()}
    if any(part > 0.2 for part in empty.values()):
        shown = ", ".join(f"{name} {share(part)}" for name, part in empty.items())
        lines.append(f"Empty answers: {shown}. The model stops at once; it may want its chat template (--prompt chat)")
    return lines


def _warnings(heads: Mapping[str, Mapping[str, Any]], compared: Sequence[str]) -> list[str]:
    lines: list[str] = []
    none = heads["none"]
    if none["n"] < 2:
        lines.append("An interval and a test take at least 2 items; here nothing can be decided.")
    elif none["value"] <= 0.05 or none["value"] >= 0.95:
        where, word, other = ("floor", "drop", "easier") if none["value"] <= 0.05 else ("ceiling", "rise", "harder")
        lines.append(
            f"none is right on {share(none['value'])} of the answers: at the {where} no {word} can be shown and little else; take {other} items"
        )
    few = [name for name in compared if heads[name]["gained"] + heads[name]["lost"] < FEWEST_CHANGES]
    if few and none["n"] >= 2:
        counts = ", ".join(f"{name} {heads[name]['gained'] + heads[name]['lost']}" for name in few)
        lines.append(
            f"Items that changed: {counts}; fewer than {FEWEST_CHANGES} can never reject, so of these only 'no effect' could be shown"
        )
    return lines


# ---- form: stated or guessed -----------------------------------------------------------------------------------------


def form_words(row: Mapping[str, Any]) -> str:
    """How much of a Δ is form, after its verdict. Empty where all answers state a result, or where it is not known."""
    if row.get("delta_form") is None or not (
        row["delta_form"] or row["stated_delta"] or row["delta_both"] != row["delta"]
    ):
        return ""
    several = row["samples"] > 1
    what = "pairs of answers" if several else "items"
    form = f"{points(row['delta_form'])} points{interval(row['delta_form_lo'], row['delta_form_hi'], signed=True)}"
    both = f"{points(row['delta_both'])}{interval(row['delta_both_lo'], row['delta_both_hi'], signed=True)}"
    right = f"{row['both_before']:,} → {row['both_after']:,} right"
    if not mostly_form(row):
        rest = f"; where both state a result ({row['both_n']:,} {what}) it is {both}: {right}" if row["both_n"] else ""
        return f". Form gives {form}{rest}"
    text = (
        f". Most of this Δ is form: {form} come from {what} where a result is not stated under both (stated in {share(row['stated'])} of the "
        f"answers, {points(row['stated_delta'])} points{interval(row['stated_delta_lo'], row['stated_delta_hi'], signed=True)}); "
    )
    if not row["both_n"]:
        return text + f"there are no {what} where both state one"
    among = f"{points(row['both_delta'])} points{interval(row['both_delta_lo'], row['both_delta_hi'], signed=True)}"
    return text + f"{both} from the {row['both_n']:,} {what} where both state one: {right}, {among} among these"


def guessed_lines(heads: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many answers state no result, said as soon as one condition has more than 5 % of them."""
    shares = {name: row.get("guessed") for name, row in heads.items()}
    if not any(one is not None and one > 0.05 for one in shares.values()):
        return []
    shown = ", ".join(f"{name} {share(one)}" for name, one in shares.items())
    return [f"Answers that state no result, where the last number, letter or formula was taken as a guess: {shown}"]


# ---- a sample, or all there are --------------------------------------------------------------------------------------


def population_lines(task: str, n: int) -> list[str]:
    """A line where all questions of a generated task were asked: the intervals then say nothing about further questions."""
    match = re.fullmatch(r"arithmetic-([0-9]{1,9})", task)
    if match is None:
        return []
    try:
        distinct = tasks.distinct_questions(int(match[1]))
    except BadData:  # a folder of another version, with a difficulty that is not known here
        return []
    if n < distinct:
        return []
    return [
        f"These {n:,} items are all that {task} has, so intervals and p do not speak of a larger set. They say how much the "
        "numbers would vary if the questions were a random draw from many like these. To sample from a larger set: --data arithmetic:5:COUNT "
        f"({tasks.distinct_questions(5):,} questions)"
    ]
