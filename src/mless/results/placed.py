"""Reading fillers among arbitrary edits and in many lengths, and how they are said: the same in verdicts and pictures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mless.results.nats import METRICS_OF_CHANGE
from mless.results.reading import StoredStudy, read_measured
from mless.results.schemas import DosePoint, DoseTest, PlacedFiller

#: What words and pictures are about, where it was measured.
_SHOWN = ("solution", "contrast", "pass@1")
#: And where none of these was, the first of these.
_ELSE = ("choice", "answer", *METRICS_OF_CHANGE)

#: What the paper found by accuracy: another readout, and beside a curve of nats only for its direction.
PUBLISHED_DOSES = (
    "published, by accuracy and not by nats: lengths of 10 to 70 tokens (fig8) and other signs (table 5) were tried; on MATH-500 "
    "Qwen2.5-Math-7B has 72.4 % without filler, 75.0 % with slashes before the question, 69.6 % before the system text, "
    "51.2 % anywhere and 0 % at the end (table 4)"
)


def shown_metrics(there: Collection[str]) -> list[str]:
    """The metrics that words and pictures are about."""
    return [name for name in _SHOWN if name in there] or [name for name in _ELSE if name in there][:1]


def ordinal(share: float) -> str:
    """``0.61`` → ``61st``."""
    number = round(100 * share)
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(frozen=True, slots=True)
class StoredPlacebo(StoredStudy):
    """A folder that `mless run placebo` made."""

    @classmethod
    def open(cls, path: Path) -> StoredPlacebo:
        return cls(path, read_measured(path, "placebo", "fillers among arbitrary edits"))

    def placed(self) -> list[PlacedFiller]:
        """The rows of ``placebo.parquet``."""
        names = [one.name for one in fields(PlacedFiller)]
        return [PlacedFiller(**row) for row in self.table("placebo", names).to_pylist()]

    def edits(self) -> list[dict[str, Any]]:
        """Condition, kind, metric and mean change of every edit."""
        return self.table("edits", ["condition", "kind", "metric", "delta"]).to_pylist()


@dataclass(frozen=True, slots=True)
class StoredDose(StoredStudy):
    """A folder that `mless run dose` made."""

    @classmethod
    def open(cls, path: Path) -> StoredDose:
        return cls(path, read_measured(path, "dose", "fillers by length"))

    def points(self) -> list[DosePoint]:
        """The rows of ``dose.parquet``."""
        names = [one.name for one in fields(DosePoint)]
        return [DosePoint(**row) for row in self.table("dose", names).to_pylist()]

    def tests(self) -> list[DoseTest]:
        """The rows of ``dose_tests.parquet``."""
        names = [one.name for one in fields(DoseTest)]
        return [DoseTest(**row) for row in self.table("dose_tests", names).to_pylist()]
