"""Answers in pairs: counts, filters, search, order, pages, one item."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from judged_answers import answers_of, pair, rows_of, write_folder
from mless.errors import MlessError
from mless.explorer.asking import NotThere, read_request
from mless.explorer.folders import Folders
from mless.explorer.views import Chosen, answer, view
from mless.results.schemas import ANSWERS
from synthetic import write_answers

Ask = Callable[..., dict[str, Any]]


def asking(*paths: Path) -> Ask:
    folders = Folders(list(paths))
    return lambda path, **values: answer(folders, path, {key: str(value) for key, value in values.items()})


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Twelve items: 3 turn right, 2 turn wrong; of the rest 4 stay right and 3 stay wrong."""
    none, mless = pair(3, 2, 12)
    return asking(write_folder(tmp_path_factory.mktemp("known") / "folder", answers_of({"none": none, "mless": mless})))


def test_counts_are_those_of_the_pairs(known: Ask) -> None:
    found = known("answers")
    assert found["counts"] == {"right": 3, "wrong": 2, "stayed-right": 4, "stayed-wrong": 3, "stayed-mixed": 0}
    assert (found["condition"], found["against"], found["found"], found["items"]) == ("mless", "none", 12, 12)
    (row,) = found["overview"]
    assert (row["right"], row["wrong"], row["metric"]) == (3, 2, "pass@1")
    assert row["delta"] == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    ("turned", "items"),
    [("right", [0, 1, 2]), ("wrong", [3, 4]), ("changed", [0, 1, 2, 3, 4]), ("stayed-right", [5, 7, 9, 11]), ("stayed-wrong", [6, 8, 10])],
)  # fmt: skip
def test_filter_by_what_turned(known: Ask, turned: str, items: list[int]) -> None:
    assert [row["item"] for row in known("answers", turned=turned)["rows"]] == [f"q{n:04d}" for n in items]


def test_a_row_says_both_results(known: Ask) -> None:
    row = known("answers", turned="wrong")["rows"][0]
    assert row["before"]["extracted"] == "42"
    assert row["after"]["extracted"] == "1000"
    assert (row["before"]["score"], row["after"]["score"], row["reference"]) == (1.0, 0.0, "42")


def test_search_finds_text_result_and_id(known: Ask) -> None:
    assert known("answers", search="IT IS 1000")["found"] == 8
    assert [row["item"] for row in known("answers", search="q0007")["rows"]] == ["q0007"]
    assert known("answers", search="% _ .*")["rows"] == []


def test_the_other_way_round(known: Ask) -> None:
    assert known("answers", condition="none", against="mless")["counts"]["wrong"] == 3


def test_order_and_pages(tmp_path: Path) -> None:
    ask = asking(write_answers(tmp_path / "folder", items=120))
    pages = [ask("answers", page=n) for n in (1, 2, 3, 99)]
    assert [len(one["rows"]) for one in pages] == [50, 50, 20, 20]
    assert [one["page"] for one in pages] == [1, 2, 3, 3]
    lengths = [row["after"]["tokens"] for row in ask("answers", sort="longest")["rows"]]
    assert lengths == sorted(lengths, reverse=True)
    kinds = [row["turned"] for row in ask("answers", sort="turned", turned="changed", all=1)["rows"]]
    assert kinds == sorted(kinds, key=["right", "wrong"].index)
    assert len(ask("answers", all=1)["rows"]) == 120


def test_unknown_tokens_come_last(tmp_path: Path) -> None:
    rows = [
        one | {"n_tokens": None if n == 0 else 5 + n}
        for name in ("none", "mless")
        for n, one in enumerate(rows_of(name, np.array([True, False, True])))
    ]
    import pyarrow as pa

    ask = asking(write_folder(tmp_path / "folder", pa.Table.from_pylist(rows, ANSWERS)))
    assert [row["item"] for row in ask("answers", sort="shortest")["rows"]] == ["q0001", "q0002", "q0000"]
    assert [row["item"] for row in ask("answers", sort="longest")["rows"]] == ["q0002", "q0001", "q0000"]


def test_several_samples(tmp_path: Path) -> None:
    none = np.array([[True, True], [True, False], [False, False], [True, False]])
    mless = np.array([[True, False], [False, True], [False, False], [True, True]])
    ask = asking(write_folder(tmp_path / "folder", answers_of({"none": none, "mless": mless})))
    found = ask("answers")
    assert found["counts"] == {"right": 1, "wrong": 1, "stayed-right": 0, "stayed-wrong": 1, "stayed-mixed": 1}
    item = ask("answers/item", item="q0000")
    assert (item["samples"], item["sample"]) == (2, 2), "the first sample whose judgement differs is shown"
    assert item["before"]["correct"]
    assert not item["after"]["correct"]
    assert ask("answers/item", item="q0000", sample=1)["after"]["correct"]


def test_one_item_in_full(tmp_path: Path) -> None:
    folder = write_answers(tmp_path / "folder", items=30, effects={"mless": 0.4})
    ask = asking(folder)
    item = ask("answers", turned="right")["rows"][0]["item"]
    found = ask("answers/item", item=item, condition="mless")
    assert found["turned"] == "right"
    assert found["question"].startswith("What is ")
    assert found["before"]["why"] in ("differ", "no answer")
    assert found["after"]["why"] == "equal"
    assert found["after"]["how"] == "boxed"
    assert found["grader"]
    texts = ["".join(text for kind, text in found["diff"] if kind != left) for left in ("new", "gone")]
    assert found["reference"] in texts[1]
    assert [len(text) for text in texts] == [found["before"]["length"], found["after"]["length"]]
    assert {one["condition"] for one in found["others"]} == {"none", "none-again", "mless", "mful", "random"}


def test_stated_and_guessed_are_told_where_stored(tmp_path: Path) -> None:
    import pyarrow as pa

    rows = [
        one | {"stated": stated, "disagree": name == "mless"}
        for name in ("none", "mless")
        for one, stated in zip(rows_of(name, np.array([True, True, False])), (True, False, None), strict=True)
    ]
    ask = asking(write_folder(tmp_path / "folder", pa.Table.from_pylist(rows, ANSWERS)))
    assert [ask("answers/item", item=f"q000{n}")["after"]["stated"] for n in range(3)] == [True, False, None]
    assert ask("answers/item", item="q0000")["after"]["disagree"]
    assert [row["after"]["stated"] for row in ask("answers")["rows"]] == [True, False, None]


def test_neighbours_follow_the_filter(known: Ask) -> None:
    assert known("answers/near", item="q0001", turned="right") == {
        "place": 2, "found": 3, "previous": "q0000", "next": "q0002",
    }  # fmt: skip
    assert known("answers/near", item="q0011", turned="right")["place"] is None


def test_two_models_item_by_item(tmp_path: Path) -> None:
    """Which items did one get wrong and the other not."""
    model = {"name": "other", "label": "Other", "fingerprint": "00" * 16}
    paths = [
        write_answers(tmp_path / "a", items=40, seed=1),
        write_answers(tmp_path / "b", items=40, seed=2, label="Other", about={"model": model}),
    ]
    ask = asking(*paths)
    found = ask("answers", folder=2, other=1, condition="mless", against="mless", turned="wrong")
    assert not found["own"]
    for row in found["rows"]:
        assert (row["before"]["score"], row["after"]["score"]) == (1.0, 0.0)
        one = ask("answers/item", folder=2, other=1, condition="mless", against="mless", item=row["item"])
        assert one["before"]["correct"]
        assert not one["after"]["correct"]
    assert found["counts"]["wrong"] == len(found["rows"]) > 0


def test_other_questions_are_refused(tmp_path: Path) -> None:
    paths = [write_answers(tmp_path / "a", items=10), write_answers(tmp_path / "b", items=10, task="arithmetic-2")]
    with pytest.raises(MlessError, match=r"tasks are arithmetic-1 and arithmetic-2.*give folders of one data set"):
        asking(*paths)("answers", folder=2, other=1)


@pytest.mark.parametrize(
    ("path", "values", "match"),
    [
        ("answers", {"condition": "mles"}, "condition: expected one of"),
        ("answers", {"turned": "left"}, "turned: expected one of"),
        ("answers", {"sort": "random"}, "sort: expected one of"),
        ("answers", {"page": "-1"}, "page: expected a whole number"),
        ("answers", {"folder": "2"}, "folder: expected a whole number from 1 to 1"),
        ("answers", {"other": "9"}, "other: expected a whole number from 1 to 1"),
        ("answers/item", {"item": "../../etc/passwd"}, "item: no '../../etc/passwd' here; there are 12"),
        ("answers/item", {"item": "q0000", "sample": "3"}, "sample: expected a whole number from 1 to 1"),
    ],
)
def test_what_is_not_there_is_refused(known: Ask, path: str, values: dict[str, str], match: str) -> None:
    with pytest.raises(NotThere, match=match):
        known(path, **values)


def test_hostile_texts_pass_as_texts(tmp_path: Path) -> None:
    text = "</script><img src=x onerror=alert(1)>\u202e\x07"
    ask = asking(write_answers(tmp_path / "folder", items=5, text=text))
    found = ask("answers/item", item="sum-001")
    assert "</script><img" in "".join(piece for _, piece in found["diff"])
    assert ask("answers", search="<img src=x")["found"] == 5


def test_an_exported_list_holds_all_and_the_turned_items(tmp_path: Path) -> None:
    folders = Folders([write_answers(tmp_path / "folder", items=80, effects={"mful": -0.3})])
    requests = list(view("answers").exported(folders, Chosen({1: (80,)})))
    assert len(set(requests)) == len(requests)
    answers = {one: answer(folders, *read_request(one)) for one in requests if "item=" not in one}
    for one in answers.values():
        assert len(one["rows"]) == 80
        turned = [row["item"] for row in one["rows"] if row["turned"] in ("right", "wrong")]
        for item in ["sum-080", *turned]:
            assert f"answers/item?condition={one['condition']}&folder=1&item={item}" in requests
    json.dumps(answers, allow_nan=False)


def test_the_list_is_made_without_texts_and_an_item_reads_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160,000 answers must not come into memory at once: batches are small, and the list asks for no texts."""
    from mless.explorer import batches as module

    read: list[str] = []
    rows: list[int] = []
    real = module._raw

    def watched(folder: Any, gate: Any, table: str, columns: Any, newer: Any) -> Any:
        read.extend([table] if "text" in columns else [])
        for first, batch in real(folder, gate, table, columns, newer):
            rows.append(len(batch))
            yield first, batch

    monkeypatch.setattr(module, "_raw", watched)
    ask = asking(write_answers(tmp_path / "folder", items=3000, conditions=("none", "mless", "mful")))
    ask("answers")
    assert read == ["prompts"], "the questions of one page"
    ask("answers/item", item="sum-100", condition="mless")
    ask("answers/item", item="sum-101", condition="mless")
    assert read == ["prompts", "answers"], "both conditions in one scan, and no more for the next item"
    ask("answers", search="plus 1", all=1)
    read.clear()
    ask("answers", search="plus 1", all=1)
    assert read == []
    assert max(rows) <= 4096


@pytest.mark.parametrize("item", [1, 255, 256, 257, 1300, 3000])
def test_the_texts_are_those_of_the_item(large: tuple[Ask, Path], item: int) -> None:
    ask, path = large
    name = f"sum-{item:03d}"
    found = ask("answers/item", item=name, condition="mful", against="mless")
    rows = pq.read_table(path / "answers.parquet").filter(pc.field("item") == name).to_pylist()
    texts = {row["condition"]: row["text"] for row in rows}
    for left, condition in (("new", "mless"), ("gone", "mful")):
        assert "".join(text for kind, text in found["diff"] if kind != left) == texts[condition]
    prompts = pq.read_table(path / "prompts.parquet").filter(pc.field("item") == name).to_pylist()
    asked = next(row["text"] for row in prompts if row["condition"] == "none")
    assert found["question"] in asked
    assert len(found["question"]) > 5


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ask, Path]:
    path = write_answers(tmp_path_factory.mktemp("large") / "folder", items=3000, conditions=("none", "mless", "mful"))
    return asking(path), path


def test_damaged_answers_are_refused(tmp_path: Path) -> None:
    none, mless = pair(3, 2, 12)
    path = write_folder(tmp_path / "folder", answers_of({"none": none, "mless": mless}))
    file = path / "answers.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(MlessError, match="is damaged, or not the table that was stored"):
        asking(path)("answers")
