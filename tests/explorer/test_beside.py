"""From a prompt's attention to its answer and back; and what is said of the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mless.explorer.folders import Folders
from mless.explorer.views import answer
from mless.values import Condition
from paired_folders import SYSTEM, change_study, write_pair
from stored_attention import write_attention
from synthetic import write_answers, write_likelihood

STRIP = {"folder": "1", "condition": "mless", "layer": "1", "head": "2", "item": "5"}
ANSWER = {"folder": "2", "condition": "mless", "item": "sum-005"}


def test_a_strip_leads_to_its_answer_and_the_answer_back(tmp_path: Path) -> None:
    folders = Folders(write_pair(tmp_path))
    strip = answer(folders, "strip", STRIP)
    assert strip["answers"] == [{"folder": 2, "name": "answers", "condition": "mless", "differs": []}]
    told = answer(folders, "answers/item", {**ANSWER, "item": strip["id"]})
    # Head 2 of layer 1 is the one that such folders shift most.
    (back,) = told["strips"]
    assert {key: str(back[key]) for key in STRIP} == STRIP
    assert answer(folders, "strip", {key: str(back[key]) for key in STRIP})["item"] == "sum-005"


@pytest.mark.parametrize(
    "other",
    [{"model": {"name": "qwen"}}, {"task": "gsm8k"}, {"model": {"layers": 4}}],
    ids=["another model", "another task", "other layers"],
)
def test_what_is_not_the_same_item_is_not_linked(tmp_path: Path, other: dict[str, Any]) -> None:
    folders = Folders(write_pair(tmp_path, **other))
    assert answer(folders, "strip", STRIP)["answers"] == []
    assert answer(folders, "answers/item", ANSWER)["strips"] == []


def test_another_prompt_of_the_same_item_is_linked_and_named(tmp_path: Path) -> None:
    attention, answers = write_pair(tmp_path)
    change_study(answers, system="Be brief.")
    folders = Folders([attention, answers])
    (found,) = answer(folders, "strip", STRIP)["answers"]
    assert found["differs"] == ["system text ('Please reason step by step.' and 'Be brief.')"]
    assert len(answer(folders, "answers/item", ANSWER)["strips"][0]["differs"]) == 1


def test_a_condition_or_an_item_that_only_one_has_is_not_linked(tmp_path: Path) -> None:
    attention, answers = write_pair(tmp_path)
    folders = Folders([attention, answers])
    assert answer(folders, "strip", STRIP | {"condition": "random"})["answers"] == []
    about = json.loads((answers / "study.json").read_text())
    (answers / "study.json").write_text(json.dumps(about | {"complete": False}))
    assert answer(folders, "strip", STRIP)["answers"] == []


def test_a_damaged_folder_beside_hides_nothing(tmp_path: Path) -> None:
    attention, answers = write_pair(tmp_path)
    (answers / "study.json").write_text("{")
    found = answer(Folders([attention, answers]), "strip", STRIP)
    assert (found["answers"], found["item"]) == ([], "sum-005")


# ---- the system text -----------------------------------------------------------------------------------------------------


def test_the_system_text_is_said_with_the_strip_the_answer_and_the_likelihood(tmp_path: Path) -> None:
    folders = Folders([*write_pair(tmp_path), write_likelihood(tmp_path / "likelihood", items=4)])
    raw = {"kind": "plain text, before the question", "system": SYSTEM}
    assert answer(folders, "strip", STRIP)["prompt"] == raw
    told = answer(folders, "answers/item", ANSWER)
    assert (told["prompt"], told["prompt_against"]) == (raw, raw)
    # A folder of before does not say it.
    assert answer(folders, "likelihood/item", {"folder": "3", "item": "sum-001"})["prompt"]["system"] is None


def test_a_condition_with_a_system_text_of_its_own_says_that(tmp_path: Path) -> None:
    other = Condition("other", "none", system="Only the number.")
    path = write_answers(tmp_path / "answers", items=6, conditions=(Condition("none", "none"), other))
    change_study(path, system=SYSTEM)
    told = answer(Folders([path]), "answers/item", {"item": "sum-001", "condition": "other"})
    assert (told["prompt"]["system"], told["prompt_against"]["system"]) == ("Only the number.", SYSTEM)


def test_a_folder_alone_links_nothing(tmp_path: Path) -> None:
    folders = Folders([write_attention(tmp_path / "quick", items=5, layers=1, heads=2)])
    assert answer(folders, "strip", STRIP)["answers"] == []
