"""Conditions with cuts and patches in an accuracy study: answers that must equal each other, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from heard import Heard
from interrupted import take_apart
from mless.capture import cutting
from mless.engines import slots
from mless.errors import BadPrompt, BadStudy, ProofFailed
from mless.study import load_study, run_study, verdict_lines
from spelling import CHATML, model_folder
from study.accuracy.test_answering import sharpened

FILLER = {"filler": " /", "length": 5}
ARM = {"c": None, "fraction": 0.3, "p1": 99.0, "layers": [1]}
DECLARED: dict[str, dict[str, Any]] = {
    "nobody": FILLER | {"cut": [{"queries": "original,answer", "keys": "filler"}]},
    "answer-cut": FILLER
    | {"cut": [{"queries": "end,answer", "keys": "system,question", "layers": "2-", "heads": "1-2"}]},
    "put-in": {"patch": [{"from": "mless", "part": "residual"}]},
    "keys": {"kind": "shift", "length": 5, "patch": [{"from": "mless", "part": "keys-values", "at": "filler"}]},
    "of-cut": {"patch": [{"from": "nobody", "part": "mlp-output", "layers": "1", "at": "question,end"}]},
    "vote": FILLER | {"cut": [{"queries": "answer", "keys": "question"}], "samples": 3, "temperature": 0.9},
    "with-arm": FILLER | {"arm": ARM, "cut": [{"queries": "question", "keys": "filler", "to": "sink"}]},
}
CONDITIONS = ["none", "mless", "masked-filler", *DECLARED]
ITEMS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpened(model_folder(tmp_path_factory.mktemp("models") / "tiny", template=CHATML))


def run(tiny: Path, out: Path, **changes: Any) -> Heard:
    heard = Heard()
    chosen: dict[str, Any] = {
        "model": str(tiny),
        "data": f"arithmetic:1:{ITEMS}",
        "conditions": CONDITIONS,
        "condition": DECLARED,
        "length": 5,
        "dtype": "float32",
        "accuracy": {"slots": 8, "max_new_tokens": 8},
    }
    run_study(load_study("accuracy", chosen | changes), out, heard)
    return heard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    out = tmp_path_factory.mktemp("changed") / "results"
    run(tiny, out)
    return out


def answers(folder: Path, condition: str) -> list[str]:
    return (
        pl.read_parquet(folder / "answers.parquet").filter(condition=condition).sort("item", "sample")["text"].to_list()
    )


def test_answers_that_must_be_the_same(folder: Path) -> None:
    assert answers(folder, "nobody") == answers(folder, "masked-filler")
    assert answers(folder, "keys") == answers(folder, "mless")
    assert answers(folder, "none-again") == answers(folder, "none")
    # All residual streams of the prompt are taken, so its first token is the other condition's.
    firsts = zip(answers(folder, "put-in"), answers(folder, "mless"), strict=True)
    assert all(ours[:1] == theirs[:1] for ours, theirs in firsts)


def test_each_other_change_is_another_run(folder: Path) -> None:
    same = [
        (one, other)
        for one in ("nobody", "answer-cut", "put-in", "of-cut", "with-arm")
        for other in ("none", "mless")
        if answers(folder, one) == answers(folder, other)
    ]
    assert not same
    assert len(answers(folder, "vote")) == 3 * ITEMS
    assert len(set(answers(folder, "vote"))) > ITEMS


def test_study_json_and_verdict_say_what_was_changed_and_proved(folder: Path) -> None:
    about = json.loads((folder / "study.json").read_text())
    assert about["conditions"]["put-in"]["patch"][0]["source"] == "mless"
    assert "cut" not in about["conditions"]["mless"]
    assert about["proofs"]["cuts of nobody"]["output"] < 1e-5
    assert about["proofs"]["patches"] == {"own": 0.0, "values": 0.0}
    assert about["engine"]["self_check"]["forward"] < 1e-3
    said = "\n".join(verdict_lines(folder))
    assert "end+answer → system+question cut in layers 2-, heads 1-2" in said
    assert "residual of mless in all layers everywhere" in said


def test_a_resumed_study_has_the_same_answers(tiny: Path, folder: Path, tmp_path: Path) -> None:
    again = shutil.copytree(folder, tmp_path / "again")
    take_apart(again)
    for unit in ("nobody-00002", "of-cut-00001", "vote-00003", "keys-00002", "none-00003"):
        for file in (again / "units").rglob(f"{unit}*"):
            file.unlink()
    run(tiny, again)
    for name in ("prompts", "answers", "accuracy"):
        assert (again / f"{name}.parquet").read_bytes() == (folder / f"{name}.parquet").read_bytes(), name


def test_without_the_changed_conditions_the_others_are_the_same(tiny: Path, folder: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "plain", conditions=["none", "mless"])
    for condition in ("none", "mless"):
        assert answers(tmp_path / "plain", condition) == answers(folder, condition)


@pytest.mark.parametrize(
    ("condition", "more", "why"),
    [
        ({"cut": [{"queries": "answer", "keys": "filler"}]}, {}, "keys = 'filler', but the prompt has no such span"),
        ({"cut": [{"queries": "answer", "keys": "system", "layers": "9"}]}, {}, "condition 'mine', cut: no layer 9"),
        ({"cut": [{"queries": "answer", "keys": "system", "heads": "9"}]}, {}, "condition 'mine', cut: no head 9"),
        ({"cut": [{"queries": "answer", "keys": "original"}]}, {}, "the first of 'answer', nothing to see but itself"),
        ({"patch": [{"from": "mless", "part": "residual", "at": "answer"}]}, {}, "but answers are drawn, and another"),
        ({"patch": [{"from": "question-twice", "part": "residual"}]}, {}, "do not hold the same original tokens"),
        (
            {"patch": [{"from": "masked-filler", "part": "residual"}]},
            {},
            r"joined with hidden filler \(masked-filler\)",
        ),
        ({"arm": ARM, "patch": [{"from": "mless", "part": "residual"}]}, {}, "runs with ARM and takes values from"),
        (
            {"cut": [{"queries": "answer", "keys": "system"}]},
            {"accuracy": {"engine": "vllm"}},
            "'mine' cuts attention or takes values from another run, which engine 'vllm' cannot do; use --engine hf",
        ),
        (
            {"patch": [{"from": "mless", "part": "residual"}]},
            {"accuracy": {"engine": "openai", "base_url": "http://127.0.0.1:9/v1"}},
            "which engine 'openai' cannot do",
        ),
        (
            {"patch": [{"from": "mless", "part": "residual"}]},
            {"accuracy": {"engine": "scripted", "script": "none.json"}},
            "which engine 'scripted' cannot do",
        ),
    ],
)
def test_bad_input_is_refused_by_name_before_anything_runs(
    tiny: Path, tmp_path: Path, condition: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    conditions = ["none", "mless", "masked-filler", "question-twice", "mine"]
    with pytest.raises((BadStudy, BadPrompt), match=why):
        run(tiny, tmp_path / "out", conditions=conditions, condition={"mine": condition}, **more)
    assert not (tmp_path / "out" / "units").exists()


def test_a_seam_that_does_not_cut_is_found_before_the_first_answer(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model's own forward by its proofs, in slots by comparing with it."""
    some = {"conditions": ["none", "nobody"], "data": "arithmetic:1:2"}
    with monkeypatch.context() as broken:
        broken.setattr(slots.SlotCuts, "masks", lambda self, module, mask, *_: (mask, None))
        with pytest.raises(ProofFailed, match="decoding in slots gives other logits than the model's own forward"):
            run(tiny, tmp_path / "slots", **some)
    monkeypatch.setattr(cutting.EdgeMask, "attended", lambda *_: None)
    monkeypatch.setattr(cutting.EdgeMask, "_block", lambda self, first, last: self._under(first, last))
    with pytest.raises(ProofFailed, match="attention with its edges cut differs from the definition"):
        run(tiny, tmp_path / "seam", **some)
    assert not (tmp_path / "seam").exists()
