"""The gate for study.json: every field has its type, and a reader finds what it needs, or is told what is wrong where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mless.errors import BadFolder
from mless.report import summary
from mless.results.answers import StoredAnswers
from mless.results.folder import ResultFolder
from mless.results.reading import read_about
from mless.study import verdict_lines
from synthetic import write_answers, write_folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("answers") / "r", items=12)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("attention") / "r", layers=1, heads=2, items=3)


def changed(folder: Path, name: str, value: Any) -> None:
    """study.json with one field replaced; a dot leads inside, and None takes the field away."""
    about = json.loads((folder / "study.json").read_text())
    *way, last = name.split(".")
    inner = about
    for part in way:
        inner = inner[part]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    (folder / "study.json").write_text(json.dumps(about))


def copied(folder: Path, place: Path) -> Path:
    place.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("items", None, "the field items is missing"),
        ("items", {}, "items: expected a valid list, found an object"),
        ("items", [], "expected the ids of at least one item"),
        ("items", ["a", "a"], "an id is there twice"),
        ("items", [1, 2], r"items\.0: expected a valid string, found 1"),
        ("task", 3, "task: expected a valid string, found 3"),
        ("model", "smollm2", "model: expected "),
        ("model.label", None, r"the field model\.label is missing"),
        ("model.layers", -1, r"model\.layers: expected greater than or equal to 1, found -1"),
        ("model.layers", 10**30, r"model\.layers: expected less than or equal to"),
        ("conditions", [], "conditions: expected a valid dictionary, found a list"),
        ("conditions.none", None, "expected 'none' among them"),
        ("conditions.mless.length", "55", r"conditions\.mless\.length: expected a valid integer, found '55'"),
        ("conditions.mless.length", 0, "length must be at least 1 token"),
        ("conditions.mless.placement", "evil", r"conditions\.mless\.placement: expected 'before-system'"),
        ("conditions.mless.arm", {"layers": []}, r"conditions\.mless\.arm\.layers: expected "),
        ("conditions.mless.arm", {"layers": [1], "c": 0.1, "fraction": 0.1}, "give one of them"),
        ("conditions.mless.arm", {"layers": [1], "c": 0.1, "evil": 1}, "evil"),
        ("study.accuracy.margin", None, r"the field study\.accuracy\.margin is missing"),
        ("study.accuracy.temperature", "hot", r"study\.accuracy\.temperature: expected a valid number, found 'hot'"),
        ("engine.slots", 0, r"engine\.slots: expected greater than or equal to 1"),
        ("versions", {"torch": 2}, r"versions\.torch: expected a valid string"),
        ("complete", "yes", "complete: expected a valid boolean, found 'yes'"),
        ("units_format", "x", "units_format: expected a valid integer, found 'x'"),
    ],
)
def test_a_field_of_another_kind_is_named(name: str, value: Any, why: str, answers: Path, tmp_path: Path) -> None:
    folder = copied(answers, tmp_path / "r")
    changed(folder, name, value)
    for reads in (read_about, verdict_lines, summary, StoredAnswers.open):
        with pytest.raises(BadFolder, match=why) as refused:
            reads(folder)
        assert str(folder / "study.json") in str(refused.value)
        assert "restore it from a copy" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("prompt", None, "the field prompt is missing"),
        ("prompt", "evil", "prompt: expected 'chat', 'user', 'raw' or 'text', found 'evil'"),
        ("omit_first", 1, "omit_first: expected a valid boolean"),
    ],
)
def test_what_attention_needs(name: str, value: Any, why: str, attention: Path, tmp_path: Path) -> None:
    folder = copied(attention, tmp_path / "r")
    changed(folder, name, value)
    with pytest.raises(BadFolder, match=why):
        verdict_lines(folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 2, "format": 2}', "'format' stands twice in one object"),
        ('{"format": 2, "x": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
        ('{"format": 2, "x": "\\ud800"}', "half a character"),
        ('{"format": 2, "x": ' + "9" * 5000 + "}", "a number of 5,000 digits"),
        ('{"format": 0}', "format: expected greater than or equal to 1, found 0"),
    ],
)
def test_texts_that_python_would_stumble_over(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(BadFolder, match=why):
        ResultFolder(tmp_path).manifest()


def test_something_else_in_its_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "study.json")
    with pytest.raises(BadFolder, match=r"study\.json is not readable JSON: is a pipe, not a file"):
        ResultFolder(tmp_path).manifest()
    (tmp_path / "study.json").unlink()
    (tmp_path / "study.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadFolder, match=r"study\.json is not readable JSON: is not there"):
        ResultFolder(tmp_path).manifest()


def test_fields_of_a_newer_version_stay(answers: Path, tmp_path: Path) -> None:
    folder = copied(answers, tmp_path / "r")
    changed(folder, "later", {"made": ["up", None]})
    changed(folder, "conditions.mless.later", 1)
    assert read_about(folder)["later"] == {"made": ["up", None]}
    assert verdict_lines(folder) == verdict_lines(answers)


def test_a_condition_of_a_kind_that_is_not_at_hand_can_still_be_drawn(answers: Path, tmp_path: Path) -> None:
    folder = copied(answers, tmp_path / "r")
    changed(folder, "conditions.mful.kind", "my-own")
    assert StoredAnswers.open(folder).conditions["mful"]["kind"] == "my-own"
