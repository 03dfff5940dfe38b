"""The numbers behind live pictures are those of the tables: doses, placebos, specifications, forests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from dose_folders import write_dose
from mless.explorer.asking import NotThere, read_request
from mless.explorer.folders import Folders
from mless.explorer.views import Chosen, answer, view, views_of
from mless.results.comparing import compare
from mless.results.placed import StoredDose, StoredPlacebo
from mless.results.specified import StoredMultiverse
from placed_folders import write_placebo
from specified_folders import write_multiverse
from synthetic import write_answers, write_likelihood


def test_dose(tmp_path: Path) -> None:
    path = write_dose(tmp_path / "dose", points=5, items=30)
    folders = Folders([path])
    assert "dose" in views_of(folders[0])
    found = answer(folders, "dose", {})
    stored = StoredDose.open(path)
    assert len(found["points"]) == len(stored.points())
    assert {(row["condition"], row["metric"], row["delta"]) for row in found["points"]} == {
        (row.condition, row.metric, row.delta) for row in stored.points()
    }
    assert [row["length"] for row in found["points"]] == sorted(row["length"] for row in found["points"])
    assert [row["chosen"] for row in found["tests"]] == [row.chosen for row in stored.tests()]
    assert found["metrics"][0] == {"name": "solution", "words": "reference solution", "unit": "nats a token", "by": 1.0}


def test_placebo(tmp_path: Path) -> None:
    path = write_placebo(tmp_path / "placebo", edits=24, items=20, metrics=("contrast", "pass@1"))
    found = answer(Folders([path]), "placebo", {})
    stored = StoredPlacebo.open(path)
    assert [row["delta"] for row in found["edits"]] == [row["delta"] for row in stored.edits()]
    assert [row["percentile"] for row in found["fillers"]] == [row.percentile for row in stored.placed()]
    assert {row["kind"] for row in found["edits"]} <= set(found["kinds"])
    assert {one["name"]: one["by"] for one in found["metrics"]} == {"contrast": 1.0, "pass@1": 100.0}
    assert all(len(row["text"]) <= 120 for row in found["edits"])


def test_multiverse(tmp_path: Path) -> None:
    path = write_multiverse(tmp_path / "multiverse", conditions=("mless", "mful"), items=20)
    found = answer(Folders([path]), "multiverse", {})
    stored = StoredMultiverse.open(path)
    assert found["conditions"] == ["mless", "mful"]
    for curve in found["curves"]:
        deltas = [row["delta"] for row in curve["rows"]]
        assert deltas == sorted(deltas)
        own = [
            row
            for row in stored.specifications()
            if (row.condition, row.metric) == (curve["condition"], curve["metric"])
        ]
        assert len(deltas) == sum(row.delta is not None for row in own) < len(own)
        assert curve["reasons"] == ["no such template here"]
        assert list(curve["varied"]) == ["template", "system", "dtype"]


def test_forest_is_mless_compare(tmp_path: Path) -> None:
    paths = [
        write_likelihood(
            tmp_path / f"{number}; a name", items=20, seed=number, label=f"M{number}", about={"model": {"label": f"M{number}", "name": f"m{number}"}}
        )
        for number in range(3)
    ]  # fmt: skip
    found = answer(Folders(paths), "forest", {})
    said = compare(paths, conditions=["all"])
    assert (found["readout"], found["metric"], found["models"]) == (said.readout, said.metric, 3)
    for block, real in zip(found["blocks"], said.blocks, strict=True):
        assert block["pooled"]["mean"] == pytest.approx(real.pooled.mean)
        assert [row["value"] for row in block["rows"]] == pytest.approx([row.reading.value for row in real.rows])
    assert found["refused"] == []
    assert shlex.split(found["command"])[:5] == ["mless", "compare", *map(str, paths)]
    one = answer(Folders(paths), "forest", {"condition": "mful", "metric": "answer"})
    assert ([block["condition"] for block in one["blocks"]], one["metric"]) == (["mful"], "answer")


def test_folders_that_do_not_fit_a_forest_are_named_with_the_reason(tmp_path: Path) -> None:
    """Another task, the same model twice, and another measurement, which is not even asked."""
    first = write_likelihood(tmp_path / "first", items=12)
    task = write_likelihood(tmp_path / "task", items=12, task="math500", about={"model": {"label": "B", "name": "b"}})
    twice = write_likelihood(tmp_path / "twice", items=12)
    answers = write_answers(tmp_path / "answers", items=12)
    found = answer(Folders([first, task, twice, answers]), "forest", {})
    assert found["models"] == 1
    assert [one["name"] for one in found["refused"]] == ["task", "twice"]
    assert "they differ in task ('gsm8k_test' and 'math500')" in found["refused"][0]["why"]
    assert "hold the same model" in found["refused"][1]["why"]


def test_a_study_without_effects_has_no_forest(tmp_path: Path) -> None:
    folders = Folders([write_dose(tmp_path / "dose", points=3, items=12)])
    assert "forest" not in views_of(folders[0])
    with pytest.raises(NotThere, match="a study of dose has no effect that can be compared"):
        answer(folders, "forest", {})


@pytest.mark.parametrize("name", ["dose", "placebo", "multiverse"])
def test_another_study_is_refused_by_name(tmp_path: Path, name: str) -> None:
    from mless.errors import MlessError

    folders = Folders([write_answers(tmp_path / "answers", items=5)])
    assert name not in views_of(folders[0])
    with pytest.raises(MlessError, match=r"no .*\.parquet"):
        answer(folders, name, {})


def test_exports_hold_their_pictures(tmp_path: Path) -> None:
    folders = Folders(
        [
            write_dose(tmp_path / "dose", points=3, items=12),
            write_placebo(tmp_path / "placebo", edits=8, items=12),
            write_multiverse(tmp_path / "multiverse", items=12),
            write_likelihood(tmp_path / "likelihood", items=8),
        ]
    )
    asked = [
        one for name in ("dose", "placebo", "multiverse", "forest") for one in view(name).exported(folders, Chosen())
    ]
    assert asked == ["dose?folder=1", "placebo?folder=2", "multiverse?folder=3", "forest?folder=4", "forest?folder=4&readout=likelihood"]  # fmt: skip
    for one in asked:
        json.dumps(answer(folders, *read_request(one)), allow_nan=False)
