"""Reading what a filler's effect is made of, and how it is said: the same in verdicts and pictures."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from mless.results.cause_rows import CauseCell, CauseLink, LadderStep
from mless.results.reading import StoredStudy, read_measured

ALPHA = 0.05
#: From so many times the effect on, a share is not said in per cent.
_TIMES = 10

#: The steps of the ladder in words.
STEP_WORDS = {
    "positions": "positions moved, no filler",
    "nobody": "filler there, seen by nobody",
    "question": "seen by the question only",
    "answer": "seen by the answer only",
    "all": "seen by all",
    "interaction": "what does not add up",
}
#: The five changes that add up to the whole effect, by the step that each leads to.
CHANGE_WORDS = {
    "positions": "positions move",
    "nobody": "a filler is there, unseen",
    "question": "the question sees it",
    "answer": "the answer sees it",
    "interaction": "what does not add up",
}
PART_WORDS = {
    "residual": "residual stream",
    "attention-output": "attention output",
    "mlp-output": "MLP output",
    "mlp-activation": "MLP activation",
    "keys-values": "keys and values",
}
LINK_WORDS = {
    "attention-output": "through layer 1's attention output",
    "mlp-activation": "through the first MLP's activation",
    "both": "through both",
    "elsewhere": "elsewhere",
    "arm": "ARM in layer 1, to compare",
}
DIRECTION_WORDS = {"in": "put in", "out": "taken out"}


@dataclass(frozen=True, slots=True)
class StoredCause(StoredStudy):
    """A folder that `mless run cause` made."""

    @classmethod
    def open(cls, path: Path) -> StoredCause:
        return cls(path, read_measured(path, "cause", "what a filler's effect is made of"))

    def steps(self) -> list[LadderStep]:
        """The rows of ``ladder.parquet``."""
        names = [one.name for one in fields(LadderStep)]
        return [LadderStep(**row) for row in self.table("ladder", names).to_pylist()]

    def cells(self) -> list[CauseCell]:
        """The rows of ``cause.parquet``."""
        names = [one.name for one in fields(CauseCell)]
        return [CauseCell(**row) for row in self.table("cause", names).to_pylist()]

    def links(self) -> list[CauseLink]:
        """The rows of ``chain.parquet``."""
        names = [one.name for one in fields(CauseLink)]
        return [CauseLink(**row) for row in self.table("chain", names).to_pylist()]


def shown_at(p_adjusted: float | None) -> bool:
    """Whether it is shown, after Holm's correction."""
    return p_adjusted is not None and p_adjusted <= ALPHA


def share_words(row: CauseCell | CauseLink) -> str:
    """``24 % [12, 38]``, from ten times the effect on ``122 × [92, 171]``, or that no share is known."""
    if row.share is None:
        return "no share"
    scale, unit, digits = (1, "×", 1) if abs(row.share) >= _TIMES else (100, "%", 0)

    def number(share: float) -> str:
        text = f"{scale * share:.{digits}f}"
        return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")

    ends = "" if row.share_lo is None or row.share_hi is None else f" [{number(row.share_lo)}, {number(row.share_hi)}]"
    return f"{number(row.share)} {unit}{ends}"


def place_of(cell: CauseCell) -> str:
    """``layer 3, attention output of head 2``."""
    head = "" if cell.head is None else f" of head {cell.head}"
    return f"layer {cell.layer}, {PART_WORDS[cell.part]}{head}"
