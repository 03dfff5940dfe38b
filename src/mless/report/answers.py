"""What the page of an accuracy study says: its numbers, and the items whose answers changed, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mless.figures import draw
from mless.report.kinds import Page
from mless.results import wording
from mless.results.answers import StoredAnswers, shown_rows
from mless.results.folder import ResultFolder
from mless.results.schemas import Answer
from mless.values import FigureSpec

#: Changed items shown for each condition, in each direction.
MOST = 10
#: Of a longer text the middle is left out: characters kept at either end.
ANSWER_KEPT, QUESTION_KEPT, SHORT_KEPT = (2000, 1000), (1200, 300), (160, 40)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two answers to an item. `share` says how many of its samples are right, where it has several."""

    correct: bool
    share: str
    extracted: str | None
    how: str
    why: str
    n_tokens: int | None
    cut_off: bool
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """An item whose answer changed."""

    item: str
    question: str
    reference: str
    before: Side
    after: Side


@dataclass(frozen=True, slots=True)
class Changes:
    """The items that a condition changed: how many each way, and those that are shown."""

    condition: str
    gained_count: int
    lost_count: int
    gained: list[Change]
    lost: list[Change]


def answer_parts(folder: StoredAnswers) -> dict[str, Any]:
    """What the template of an accuracy study needs beyond what every page has."""
    rows = folder.accuracy()
    heads = list(shown_rows(rows, folder.conditions).values())
    return {
        "imported": folder.engine.get("engine") if folder.about.get("imported") else None,
        "accuracy": heads,
        "further": [row for row in rows if row not in heads],
        "statistics": f"{wording.items_words(heads)}; {wording.statistics_words([folder], heads)}. {wording.drawn_words([folder])}",
        "changed": changes_of(folder),
        "most": MOST,
    }


def changes_of(folder: StoredAnswers) -> list[Changes]:
    """For each condition the items that became right and those that became wrong, in the study's order."""
    if not (folder.path / "answers.parquet").exists() or "none" not in folder.conditions:
        return []
    before = folder.scores("none")
    found: list[Changes] = []
    compared = [name for name in folder.conditions if name != "none"]
    for condition in sorted(compared, key=lambda name: name == folder.control):  # the control last
        after = folder.scores(condition)
        # Rounded, so that 2/3 and 1 − 1/3 are no change.
        moved = {
            item: round(after[item] - before[item], 9) for item in folder.items if item in before and item in after
        }
        gained = [item for item, change in moved.items() if change > 0]
        lost = [item for item, change in moved.items() if change < 0]
        kept = [*gained[:MOST], *lost[:MOST]]
        texts = folder.questions(kept), folder.answers("none", kept), folder.answers(condition, kept)
        found.append(
            Changes(
                condition,
                len(gained),
                len(lost),
                [_change(item, *texts, became=True) for item in gained[:MOST]],
                [_change(item, *texts, became=False) for item in lost[:MOST]],
            )
        )
    return found


def _change(
    item: str,
    questions: Mapping[str, str],
    before: Mapping[str, Sequence[Answer]],
    after: Mapping[str, Sequence[Answer]],
    *,
    became: bool,
) -> Change:
    return Change(
        item,
        shortened(questions.get(item, ""), QUESTION_KEPT),
        shortened(after[item][0].reference, SHORT_KEPT),
        _side(before[item], right=not became),
        _side(after[item], right=became),
    )


def _side(answers: Sequence[Answer], *, right: bool) -> Side:
    """Of several samples the first that shows the change."""
    one = next((answer for answer in answers if answer.correct == right), answers[0])
    several = f"{sum(answer.correct for answer in answers)} of {len(answers)} samples right" if len(answers) > 1 else ""
    return Side(
        one.correct,
        several,
        None if one.extracted is None else shortened(one.extracted, SHORT_KEPT),
        one.how,
        shortened(one.why, SHORT_KEPT),
        one.n_tokens,
        one.finish == "length",
        shortened(one.text, ANSWER_KEPT),
    )


def shortened(text: str, kept: tuple[int, int]) -> str:
    """Both ends of a long text, and how much is left out between them."""
    head, tail = kept
    left_out = len(text) - head - tail
    return text if left_out <= 40 else f"{text[:head]} … {left_out:,} characters left out … {text[-tail:]}"


# ---- the page --------------------------------------------------------------------------------------------------------


def _summary(folder: Path) -> dict[str, Any]:
    """Every row of accuracy.parquet."""
    return {"accuracy": ResultFolder(folder).read_table("accuracy").to_pylist()}


def _draw_standard(path: Path, formats: Sequence[str]) -> list[Path]:
    """Bars and the table of accuracy, accuracy by length where lengths differ, pass@k and diversity where there are several samples."""
    folder = StoredAnswers.open(path)
    shown = tuple(folder.conditions)
    written = draw(FigureSpec("accuracy", "bars", (), shown), [path], formats=formats)
    written += draw(FigureSpec("accuracy", "table", (), shown), [path])
    if folder.swept():
        written += draw(FigureSpec("lengths", "sweep", (), shown), [path], formats=formats)
    if any(row.metric == "diversity" and row.condition == "none" for row in folder.accuracy()):
        written += draw(FigureSpec("diversity", "diversity", (), shown), [path], formats=formats)
    return written


def _parts(folder: Path) -> tuple[StoredAnswers, str, dict[str, Any]]:
    opened = StoredAnswers.open(folder)
    return opened, "answers.html", answer_parts(opened)


PAGE = Page(_summary, _draw_standard, _parts)
