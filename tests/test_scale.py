"""docs/scale.md says what benchmarks/cost.py calculates, and that agrees with the runs that were measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _printed() -> list[str]:
    made = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cost.py")], capture_output=True, text=True, check=True
    )
    return [line for line in made.stdout.splitlines() if line]


def test_the_page_says_what_is_calculated() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    printed = _printed()
    assert len(printed) > 25
    assert [line for line in printed if line not in page] == []


def test_what_no_constant_was_taken_from_is_within_a_quarter() -> None:
    """But for the run that compiles its kernels."""
    lines = [line for line in _printed() if line.startswith("| H200")]
    off = [int(found[1]) for line in lines if (found := re.search(r"([+-]\d+)% \|$", line))]
    assert len(off) > 5
    assert [one for one in off if abs(one) > 25] == [-42]
