"""Folders side by side, and heads' shifts against items that turned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import rankdata

import mless
from mless.errors import MlessError
from mless.explorer.asking import NotThere, read_request
from mless.explorer.between import LEAST_TURNED
from mless.explorer.folders import Folders
from mless.explorer.views import Chosen, answer, view
from mless.results.schemas import SHARES, table_of_rows
from spelling import model_folder
from synthetic import write_answers, write_folder, write_likelihood

MODEL = {"name": "smollm2", "label": "SmolLM2", "family": "llama", "layers": 3, "heads": 4, "fingerprint": "9f" * 16}


def attention(path: Path, items: list[str], moved: dict[str, float] | None = None, **about: Any) -> Path:
    """Shares of 3 layers × 4 heads; in L2H3 the shift follows `moved`."""
    rng = np.random.default_rng(0)
    told = {
        "model": MODEL,
        "task": "arithmetic-1",
        "prompt": "raw",
        "layers": [1, 2, 3],
        "heads": [1, 2, 3, 4],
        "complete": True,
    } | about
    write_folder(path, items=items, layers=3, heads=4, attention=False, about=told)
    rows = []
    for item in items:
        for layer in (1, 2, 3):
            for head in range(5):
                value = float(np.exp(rng.normal(-0.2, 0.1)))
                if moved and (layer, head) == (2, 3):
                    value = float(np.exp(-0.2 + 0.3 * moved[item] + rng.normal(0, 0.02)))
                for condition in ("mless", "mful", "random"):
                    for queries in ("original", "later"):
                        rows.append(
                            {"model": "smollm2", "task": "arithmetic-1", "condition": condition, "item": item, "layer": layer, "head": head,
                             "queries": queries, "retained": value, "uniform": 0.7, "epsilon": np.log(value) / np.log(0.7)}
                        )  # fmt: skip
    pq.write_table(table_of_rows(rows, SHARES), path / "shares.parquet")
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("pair")
    answers = write_answers(root / "answers", items=60, effects={"mless": 0.3}, about={"model": MODEL})
    found = answer(Folders([answers]), "answers", {"condition": "mless", "all": "1"})
    moved = {row["item"]: row["after"]["score"] - row["before"]["score"] for row in found["rows"]}
    return Folders([attention(root / "attention", list(moved), moved), answers])


def test_a_head_that_follows_what_turned_is_found(pair: Folders) -> None:
    found = answer(pair, "between/heads", {"heads": "1", "answers": "2"})
    best = max(found["rows"], key=lambda row: abs(row["r"]))
    assert (best["layer"], best["head"]) == (2, 3)
    assert best["p_adjusted"] < 0.01
    assert (found["count"], found["n"], found["condition"]) == (12, 60, "mless")
    assert found["adjusted"] == 1
    assert found["largest_p"] < 0.01
    assert found["chance"] == pytest.approx(0.6)
    answers = answer(pair, "answers", {"folder": "2"})
    assert (found["right"], found["wrong"]) == (answers["counts"]["right"], answers["counts"]["wrong"])


def test_head_beside_head_is_the_ratio_over_the_items_that_both_have(tmp_path: Path) -> None:
    items = [f"q{n}" for n in range(24)]
    one = attention(tmp_path / "one", items)
    other = attention(tmp_path / "other", items[4:], dict.fromkeys(items, -1.0))
    folders = Folders([one, other])
    found = answer(folders, "between/pair", {"folder": "1", "other": "2"})
    assert (found["n"], found["condition"], len(found["rows"])) == (20, "mless", 12)
    (moved,) = [row for row in found["rows"] if row["p_adjusted"] <= 0.05 and (row["layer"], row["head"]) == (2, 3)]

    def own(folder: Path) -> dict[str, float]:
        rows = pq.read_table(folder / "shares.parquet").to_pylist()
        wanted = {"layer": 2, "head": 3, "condition": "mless", "queries": "original"}
        return {row["item"]: np.log(row["retained"]) for row in rows if wanted.items() <= row.items()}

    logs = [own(folder) for folder in (one, other)]
    apart = [logs[1][item] - logs[0][item] for item in items[4:]]
    assert moved["ratio"] == pytest.approx(np.exp(np.mean(apart)))
    assert moved["lo"] < moved["ratio"] < moved["hi"] < 1
    assert moved["first"] == pytest.approx(np.exp(np.mean([logs[0][item] for item in items[4:]])))


def test_heads_of_models_with_other_numbers_of_them_have_no_partner(pair: Folders, tmp_path: Path) -> None:
    items = [f"q{n}" for n in range(12)]
    folders = Folders(
        [attention(tmp_path / "one", items), attention(tmp_path / "other", items, model=MODEL | {"heads": 8})]
    )
    with pytest.raises(NotThere, match="SmolLM2 has 3 layers of 4 heads, SmolLM2 3 of 8: no head has a partner"):
        answer(folders, "between/pair", {"folder": "1", "other": "2"})
    with pytest.raises(NotThere, match="two folders of attention"):
        answer(pair, "between/pair", {"folder": "1", "other": "2"})


def test_layers_that_differ_are_named(tmp_path: Path) -> None:
    items = [f"q{n}" for n in range(12)]
    one, other = (attention(tmp_path / name, items) for name in ("one", "other"))
    about = json.loads((other / "study.json").read_text())
    about["study"]["layers"] = [1, 2]
    (other / "study.json").write_text(json.dumps(about))
    (_, second) = answer(Folders([one, other]), "between", {"readout": "epsilon"})["folders"]
    assert any("layers (" in words and "[1, 2]" in words for words in second["differs"])


def test_pairs_are_offered(pair: Folders) -> None:
    (one,) = answer(pair, "between", {})["turned"]
    assert (one["heads"], one["answers"]) == (1, 2)
    assert one["conditions"] == ["mless", "random"], "mful has another filler in the two folders"


def test_a_pair_that_was_really_run(tmp_path: Path) -> None:
    """Attention and answers of one tiny model: what a person would give to `mless show`. The two studies read other parts of its weights."""
    items = [{"id": f"q{n}", "question": f"What is {n} + {n % 7}?", "answer": "0"} for n in range(1, 25)]
    given: dict[str, Any] = {
        "model": str(model_folder(tmp_path / "model")), "prompt": "raw", "system": "Reply.", "length": 5, "conditions": ["none", "mless"],
    }  # fmt: skip

    def answered(name: str) -> Path:
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in items))
        given["data"] = str(data)
        return mless.run("accuracy", tmp_path / name, **given, **{"accuracy.max_new_tokens": 24}).folder

    # A random model is never right by itself. So the reference is what it says without filler, and for every third item what it says with.
    said = pq.read_table(answered("first") / "answers.parquet").to_pylist()
    for place, row in enumerate(items):
        condition = "none" if place % 3 else "mless"
        mine = next(one for one in said if one["item"] == row["id"] and one["condition"] == condition)
        row["answer"] = mine["extracted"] or "0"
    answers = answered("items")
    heads = mless.run("quick", tmp_path / "heads", **given).folder
    folders = Folders([heads, answers])
    (pair,) = answer(folders, "between", {})["turned"]
    assert pair["conditions"] == ["mless"]
    found = answer(folders, "between/heads", {"heads": "1", "answers": "2"})
    counts = answer(folders, "answers", {"folder": "2"})["counts"]
    assert (found["right"], found["wrong"]) == (counts["right"], counts["wrong"])
    assert found["right"] + found["wrong"] >= LEAST_TURNED
    assert (found["n"], found["count"]) == (24, 8)
    change = {
        row["item"]: row["after"]["score"] - row["before"]["score"]
        for row in answer(folders, "answers", {"folder": "2", "all": "1"})["rows"]
    }
    shares = pq.read_table(heads / "shares.parquet").to_pylist()
    for row in found["rows"]:
        mine = {
            one["item"]: np.log(one["retained"])
            for one in shares
            if (one["condition"], one["queries"], one["layer"], one["head"])
            == ("mless", "original", row["layer"], row["head"])
        }
        ranks = rankdata([mine[item] for item in change])
        assert row["r"] == pytest.approx(np.corrcoef(ranks, list(change.values()))[0, 1], abs=1e-6)


def test_an_older_folder_that_does_not_count_parameters_fits(tmp_path: Path) -> None:
    answers = write_answers(tmp_path / "answers", items=20, about={"model": MODEL | {"parameters": 134515008}})
    folders = Folders(
        [attention(tmp_path / "attention", [f"sum-{n + 1:03d}" for n in range(20)], model=MODEL), answers]
    )
    # Not refused as another model's; so few turned that nothing can be said of heads.
    with pytest.raises(NotThere, match="of the 20 common items turned"):
        answer(folders, "between/heads", {"heads": "1", "answers": "2"})


@pytest.mark.parametrize(
    ("about", "items", "match"),
    [
        ({"model": MODEL | {"name": "qwen", "label": "Qwen"}}, 20, r"are of two models: Qwen and SmolLM2 \(name qwen and name smollm2\)"),
        ({"model": MODEL | {"revision": "11"}}, 20, r"are of two models: SmolLM2 and SmolLM2 \(revision 11 and revision None\)"),
        ({"prompt": "chat"}, 20, "they differ in kind of prompt"),
        ({"task": "gsm8k"}, 20, "they differ in task"),
        ({}, 4, "have 4 items in common; expected at least 10"),
    ],
)  # fmt: skip
def test_pairs_that_do_not_fit_are_refused(tmp_path: Path, about: dict[str, Any], items: int, match: str) -> None:
    answers = write_answers(tmp_path / "answers", items=20, about={"model": MODEL})
    folders = Folders([attention(tmp_path / "attention", [f"sum-{n + 1:03d}" for n in range(items)], **about), answers])
    with pytest.raises(MlessError, match=match):
        answer(folders, "between/heads", {"heads": "1", "answers": "2"})
    (one,) = answer(folders, "between", {})["turned"]
    assert "conditions" not in one
    assert one["why"]


def test_too_few_turned_items_are_refused(tmp_path: Path) -> None:
    answers = write_answers(tmp_path / "answers", items=12, about={"model": MODEL}, accuracy=0.999)
    folders = Folders([attention(tmp_path / "attention", [f"sum-{n + 1:03d}" for n in range(12)]), answers])
    with pytest.raises(NotThere, match="of the 12 common items turned under 'mless'; expected at least 4"):
        answer(folders, "between/heads", {"heads": "1", "answers": "2"})


def test_the_wrong_kind_of_folder_is_refused(pair: Folders) -> None:
    with pytest.raises(NotThere, match="a folder of attention expected"):
        answer(pair, "between/heads", {"heads": "2", "answers": "1"})
    with pytest.raises(NotThere, match="heads: expected a whole number"):
        answer(pair, "between/heads", {"answers": "1"})


def test_layers_stand_side_by_side_and_what_differs_is_said(tmp_path: Path) -> None:
    items = [f"q{n}" for n in range(12)]
    first = attention(tmp_path / "first", items)
    other = attention(tmp_path / "other", items, model=MODEL | {"label": "Other", "fingerprint": "11" * 16})
    about = json.loads((other / "study.json").read_text())
    about["conditions"]["mless"]["length"] = 10
    (other / "study.json").write_text(json.dumps(about))
    elsewhere = attention(tmp_path / "elsewhere", items, task="gsm8k")
    found = answer(Folders([first, other, elsewhere]), "between", {})
    assert (found["readout"], found["condition"]) == ("epsilon", "mless")
    one, two, three = found["folders"]
    assert [row["layer"] for row in one["layers"]] == [1, 2, 3]
    assert two["differs"] == ["length of condition mless ('55' and '10')"]
    assert "does not fit" in three["why"]
    assert "they differ in task" in three["why"]
    assert one["all"]["lo"] < one["all"]["value"] < one["all"]["hi"]
    assert [(row["name"], row["words"]) for row in found["readouts"]] == [
        ("epsilon", "dilution exponent ε"),
        ("lambda", "retained share λ"),
    ]
    assert all(row["meaning"] for row in found["readouts"])
    assert answer(Folders([first, other]), "forest", {})["readouts"] == found["readouts"]
    ratio = answer(Folders([first, other]), "between", {"readout": "lambda"})
    assert 0 < ratio["folders"][0]["all"]["value"] < 1


def test_other_measurements_are_only_named(tmp_path: Path) -> None:
    folders = Folders([write_likelihood(tmp_path / "a", items=8), write_answers(tmp_path / "b", items=8)])
    found = answer(folders, "between", {})
    assert [one["name"] for one in found["folders"]] == ["a"]
    assert [(one["name"], one["measured"]) for one in found["elsewhere"]] == [("b", "accuracy")]


def test_an_export_of_two_folders_holds_them_side_by_side(pair: Folders) -> None:
    requests = list(view("between").exported(pair, Chosen()))
    assert "between/heads?answers=2&condition=mless&heads=1" in requests
    for one in requests:
        json.dumps(answer(pair, *read_request(one)), allow_nan=False)
    assert list(view("between").exported(Folders([pair[0].path]), Chosen())) == []


def test_a_damaged_folder_does_not_hide_the_others(tmp_path: Path) -> None:
    good, bad = write_likelihood(tmp_path / "good", items=8), write_likelihood(tmp_path / "bad", items=8)
    pq.write_table(pa.table({"x": [1]}), bad / "likelihood.parquet")
    found = answer(Folders([good, bad]), "between", {})
    assert "value" in found["folders"][0]["all"]
    assert "is damaged, or not the table that was stored" in found["folders"][1]["why"]
