"""Likelihood: effects, items by rank, tokens of one solution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mless.explorer.asking import NotThere, read_request
from mless.explorer.folders import Folders
from mless.explorer.views import Chosen, answer, view, views_of
from mless.results.reading import StoredLikelihood
from synthetic import write_likelihood


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders([write_likelihood(tmp_path_factory.mktemp("likelihood") / "folder", items=60)])


def test_effects_are_those_of_the_table(folders: Folders) -> None:
    found = answer(folders, "likelihood", {})
    stored = StoredLikelihood.open(folders[0].path).effects()
    assert [(row["condition"], row["metric"], row["delta"]) for row in found["effects"]] == [
        (row.condition, row.metric, row.delta) for row in stored
    ]
    assert (found["condition"], found["metric"], found["control"]) == ("mless", "solution", "none-again")
    assert {row["verdict"] for row in found["effects"]} >= {"rises", "drops"}


def test_items_are_ranked(folders: Folders) -> None:
    for sort, sign in (("rises", -1), ("drops", 1)):
        rows = answer(folders, "likelihood", {"condition": "mful", "metric": "contrast", "sort": sort})["rows"]
        deltas = [sign * row["delta"] for row in rows]
        assert deltas == sorted(deltas)
    sizes = [abs(row["delta"]) for row in answer(folders, "likelihood", {"sort": "size"})["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    numbers = [row["number"] for row in answer(folders, "likelihood", {"sort": "item"})["rows"]]
    assert numbers == list(range(1, 51))
    last = answer(folders, "likelihood", {"sort": "item", "page": "2"})
    assert (last["pages"], [row["number"] for row in last["rows"]]) == (2, list(range(51, 60)))
    row = last["rows"][0]
    assert row["value"] - row["none"] == pytest.approx(row["delta"])


def test_along_the_solution_are_the_means_of_the_tokens(folders: Folders) -> None:
    found = answer(folders, "likelihood/along", {"condition": "mful"})
    deltas = StoredLikelihood.open(folders[0].path).solution_changes(["mful"])["mful"]
    assert [(row["first"], row["last"]) for row in found["bins"]][:4] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert found["items"] == len(deltas) > 50
    for row in found["bins"]:
        means = [own[row["first"] - 1 : row["last"]].mean() for own in deltas.values() if len(own) >= row["first"]]
        assert row["n"] == len(means) >= 10
        assert row["delta"] == pytest.approx(sum(means) / len(means))
        assert row["lo"] < row["delta"] < row["hi"]


def test_without_tokens_there_is_nothing_along_the_solution(tmp_path: Path) -> None:
    folder = write_likelihood(tmp_path / "folder")
    (folder / "tokens.parquet").unlink()
    assert answer(Folders([folder]), "likelihood/along", {})["bins"] == []


def test_search_by_id(folders: Folders) -> None:
    assert [row["item"] for row in answer(folders, "likelihood", {"search": "SUM-007"})["rows"]] == ["sum-007"]


def test_tokens_add_up_to_the_solution(folders: Folders) -> None:
    found = answer(folders, "likelihood/item", {"item": "sum-004", "condition": "mful"})
    assert [token["position"] for token in found["tokens"]] == list(range(len(found["tokens"])))
    mean = sum(token["delta"] for token in found["tokens"]) / len(found["tokens"])
    (solution,) = [row for row in found["scores"] if row["metric"] == "solution"]
    assert mean == pytest.approx(solution["delta"])
    for token in found["tokens"]:
        assert token["value"] - token["none"] == pytest.approx(token["delta"])
    roles = [one["role"] for one in found["candidates"]]
    assert roles == ["answer", "other", "other", "other", "other"]
    assert found["question"]


def test_an_item_without_solution_is_shown_without_tokens(folders: Folders) -> None:
    found = answer(folders, "likelihood/item", {"item": "sum-060"})
    assert (found["tokens"], found["candidates"], found["scores"]) == ([], [], [])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({}, "the reference solution and the answer"),
        ({"solutions": False}, "the answer"),
        ({"solutions": False, "choices": True}, "the answer and the options"),
        ({"choices": True}, "the reference solution, the answer and the options"),
    ],
    ids=["solutions", "answers", "options", "all"],
)
def test_what_was_scored_is_said_and_no_more(tmp_path: Path, made: dict[str, bool], words: str) -> None:
    folders = Folders([write_likelihood(tmp_path / "folder", items=6, **made)])
    found = answer(folders, "likelihood", {})
    has = made.get("solutions", True)
    assert (found["scored"], found["solutions"]) == (words, has)
    assert answer(folders, "likelihood/item", {"item": "sum-001"})["solutions"] is has


def test_the_range_of_all_items_does_not_depend_on_the_search(folders: Folders) -> None:
    every, one = (answer(folders, "likelihood", {"search": text}) for text in ("", "sum-007"))
    assert one["found"] == 1
    assert one["limits"] == every["limits"]
    assert every["limits"][0] < every["limits"][1]


def test_a_folder_without_tokens_is_shown(tmp_path: Path) -> None:
    path = write_likelihood(tmp_path / "folder", items=8)
    for name in ("tokens", "candidates", "prompts"):
        (path / f"{name}.parquet").unlink()
    folders = Folders([path])
    assert "likelihood" in views_of(folders[0])
    found = answer(folders, "likelihood/item", {"item": "sum-001"})
    assert (found["tokens"], found["candidates"], found["question"]) == ([], [], None)
    assert found["scores"]


@pytest.mark.parametrize(
    ("path", "values", "match"),
    [
        ("likelihood", {"metric": "answers"}, "metric: expected one of"),
        ("likelihood", {"sort": "up"}, "sort: expected one of"),
        ("likelihood/item", {"item": "sum"}, "item: no 'sum' here; there are 60, the first is 'sum-001'"),
        ("likelihood/item", {"item": "sum-001", "condition": "none"}, "condition: expected one of"),
    ],
)
def test_what_is_not_there_is_refused(folders: Folders, path: str, values: dict[str, str], match: str) -> None:
    with pytest.raises(NotThere, match=match):
        answer(folders, path, values)


def test_an_export_answers_what_its_page_asks(folders: Folders) -> None:
    requests = list(view("likelihood").exported(folders, Chosen({1: (5,)})))
    assert "likelihood?all=1&folder=1" in requests
    assert "likelihood?all=1&condition=mful&folder=1&metric=contrast" in requests
    assert "likelihood/item?condition=mless&folder=1&item=sum-005" in requests
    for one in requests[:12]:
        json.dumps(answer(folders, *read_request(one)), allow_nan=False)
