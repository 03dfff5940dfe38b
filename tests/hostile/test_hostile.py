"""Spoiled files of every kind, given to every command: it ends with 0, or with 2 and a message, soon, and leaves nothing half-written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cases import Case, a_sample, all_cases
from ground import make
from running import prepare, run_case

FEWEST = 1_500
#: These draw pages or import tokenizers for seconds; the slow tier has every case.
LONG = ("activations-units", "tokenizer")
AT_ONCE = [case for case in a_sample(20) if case.row.name not in LONG]


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make(tmp_path_factory.mktemp("hostile") / "ground")
    prepare()
    return made


def test_there_are_enough_cases_and_no_name_twice() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)) >= FEWEST


@pytest.mark.parametrize("case", AT_ONCE, ids=lambda case: case.name)
def test_a_sample_of_hostile_cases(case: Case, ground: Path, tmp_path: Path) -> None:
    ended = run_case(case, ground, tmp_path / "here")
    assert ended.faults() == [], ended.said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_hostile_case(case: Case, ground: Path, tmp_path: Path) -> None:
    ended = run_case(case, ground, tmp_path / "here")
    shutil.rmtree(tmp_path / "here")
    assert ended.faults() == [], ended.said[-3000:]
