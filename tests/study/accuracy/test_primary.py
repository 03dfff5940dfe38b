"""A study that names its primary condition: its verdict does not depend on what else is run, and a later change is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from interrupted import table_replaced, take_apart
from judged_answers import answers_of, pair, write_folder
from mless.errors import BadStudy
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study
from mless.study.accuracy.words import FIRST_PRIMARY, accuracy_lines
from mless.study.bench import Outcome
from mless.study.conditions import conditions_of

ITEMS = 40


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Forty questions, and a script in which slashes mend nine of them and spoil one; other conditions change a few."""
    rows = [{"id": f"q{n}", "question": f"What is {n} + 0?", "answer": str(n)} for n in range(ITEMS)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = {f"q{n}": rf"\boxed{{{n}}}" for n in range(ITEMS)}

    def but(*wrong: int) -> dict[str, str]:
        return right | {f"q{n}": r"\boxed{-1}" for n in wrong}

    script = {
        "none": but(*range(12)),
        "mless": but(9, 10, 11, 30),
        "mful": but(*range(10), 20, 21),
        "random": but(*range(11), 25),
        "rephrased": but(*range(2, 12)),
    }
    (tmp_path / "script.json").write_text(json.dumps(script))
    return tmp_path


def run(files: Path, out: str, conditions: str, **changes: Any) -> Outcome:
    chosen: dict[str, Any] = {"data": str(files / "items.jsonl"), "conditions": conditions, "length": 5}
    chosen |= {"accuracy.engine": "scripted", "accuracy.script": str(files / "script.json")} | changes
    return run_study(load_study("accuracy", chosen), files / out)


def row_of(folder: Path, condition: str = "mless") -> dict[str, Any]:
    rows = pq.read_table(folder / "accuracy.parquet").to_pylist()
    return next(row for row in rows if row["condition"] == condition and row["metric"] == "pass@1")


@pytest.mark.parametrize(
    ("company", "unnamed"),
    [
        pytest.param("mful", "rises", marks=pytest.mark.slow),
        ("mful,random", "undecided"),
        pytest.param("mful,random,rephrased", "undecided", marks=pytest.mark.slow),
    ],
)
def test_its_verdict_is_the_same_whatever_else_is_in_the_study(files: Path, company: str, unnamed: str):
    alone = row_of(run(files, "alone", "none,mless", primary="mless").folder)
    assert (alone["p"], alone["verdict"]) == (pytest.approx(22 / 1024), "rises")
    mine = row_of(run(files, "r", f"none,mless,{company}", primary="mless").folder)
    same = [key for key in mine if not key.endswith("_all")]
    assert {key: mine[key] for key in same} == {key: alone[key] for key in same}
    # without a primary, enough company takes the finding away
    assert row_of(run(files, "r", f"none,mless,{company}").folder)["verdict"] == unnamed


def test_the_words_and_the_folder_say_which_is_primary(files: Path):
    folder = run(files, "r", "none,mless,mful,random", primary="mless").folder
    lines = accuracy_lines(folder)
    assert "tested alone as the primary condition: accuracy rises" in lines[2]
    assert "after Holm" in lines[3]
    assert not any("changed after answers" in line for line in lines)
    assert any("p ≤ 0.05 (primary) and 0.025 (Holm over 2)" in line for line in lines)
    about = ResultFolder(folder).manifest() or {}
    assert (about["study"]["primary"], about[FIRST_PRIMARY]) == ("mless", "mless")


def test_a_later_change_computes_no_answer_and_is_said(files: Path):
    first = run(files, "r", "none,mless,mful,random")
    assert row_of(first.folder)["verdict"] == "undecided"
    again = run(files, "r", "none,mless,mful,random", primary="mless")
    assert (again.computed, again.fresh) == (0, True)
    assert row_of(first.folder)["verdict"] == "rises"
    lines = accuracy_lines(first.folder)
    assert sum("changed after answers were drawn: none was named, now it is mless." in line for line in lines) == 1
    assert (ResultFolder(first.folder).manifest() or {})[FIRST_PRIMARY] is None
    run(files, "r", "none,mless,mful,random")
    assert row_of(first.folder)["verdict"] == "undecided"
    assert not any("changed after answers" in line for line in accuracy_lines(first.folder))


def test_a_run_that_goes_on_keeps_what_stood_at_its_first_answer(files: Path):
    folder = run(files, "r", "none,mless,mful", primary="mful", limit=4).folder
    take_apart(folder).unit_path("replies", "mless-00001").unlink()
    about = ResultFolder(folder).manifest() or {}
    assert run(files, "r", "none,mless,mful", primary="mless", limit=4).computed == 1
    assert (ResultFolder(folder).manifest() or {})[FIRST_PRIMARY] == "mful"
    assert any("it was mful, now it is mless." in line for line in accuracy_lines(folder))
    # before the first answer it may still be chosen
    take_apart(folder).drop_units()
    ResultFolder(folder).write_manifest(about)
    run(files, "r", "none,mless,mful", primary="mless", limit=4)
    assert (ResultFolder(folder).manifest() or {})[FIRST_PRIMARY] == "mless"


@pytest.mark.parametrize(
    ("study", "primary", "message"),
    [
        ("accuracy", "mles", r"'mles' is no condition of this study \(did you mean 'mless'\?\); .* compared with none: mless, mful, random"),
        ("accuracy", "none", r"'none' is what the others are compared with; name one of"),
        ("accuracy", "none-again", r"'none-again' is what the others are compared with"),
        ("quick", "mless", r"for studies that compare answers, and 'quick' draws none"),
        ("tune", "arm", r"a tuning tests the one setting that it chose: leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_primary_is_refused(study: str, primary: str, message: str):
    with pytest.raises(BadStudy, match=message):
        conditions_of(load_study(study, {}, [f"primary={primary}"]))


def test_a_folder_of_before_still_opens(tmp_path: Path):
    """Without the columns and the entry that came with the primary condition."""
    before, after = pair(gained=20, lost=5, n=200)
    path = write_folder(tmp_path, answers_of({"none": before, "mless": after, "mful": before}))
    table = pq.read_table(path / "accuracy.parquet").drop_columns(["alpha", "delta_lo_all", "delta_hi_all"])
    table_replaced(path, "accuracy", table)
    lines = accuracy_lines(path)
    assert any("(80 % power, one comparison): mless ±" in line for line in lines)
    assert any(line.endswith("Holm over 2 conditions asks for somewhat more") for line in lines)
    assert not any("Read together" in line or "primary" in line for line in lines)
