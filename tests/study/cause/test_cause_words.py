"""What a cause study's verdict says beside its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cause_folders import write_cause
from mless.results.caused import StoredCause
from mless.results.nats import around, signed
from mless.study.cause.words import cause_lines


def test_a_metric_that_the_verdict_is_not_about_is_named_where_it_changes(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "r", layers=2, metrics=("contrast", "answer"))
    [whole] = [row for row in StoredCause.open(path).steps() if (row.metric, row.step) == ("answer", "all") and row.against == "none"]  # fmt: skip
    number = signed(whole.delta, "answer") + around(whole.lo, whole.hi, "answer")
    assert f"the filler changes other metrics too, see the page: answer {number} nats" in cause_lines(path)
    unchanged = write_cause(tmp_path / "s", layers=2, metrics=("contrast", "answer"), whole=0.0)
    assert not any("other metrics" in line for line in cause_lines(unchanged))


@pytest.mark.parametrize("items", [4, 12])
def test_a_ladder_of_too_few_items_says_so(tmp_path: Path, items: int) -> None:
    lines = cause_lines(write_cause(tmp_path / "r", layers=1, items=items, of=("ladder",)))
    few = f"with {items} items none of the 5 changes of a ladder can be shown (it takes 8)"
    assert (few in lines) == (items == 4)
