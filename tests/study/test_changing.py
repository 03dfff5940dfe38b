"""Conditions with cuts and patches in studies that read prompts only: attention and activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from heard import Heard
from mless.capture import cutting
from mless.errors import BadPrompt, BadStudy, ProofFailed
from mless.study import load_study, run_study
from mless.study.verifying import verify
from spelling import model_folder

FILLER = {"filler": " /", "length": 5}
DECLARED: dict[str, dict[str, Any]] = {
    "unseen": FILLER | {"cut": [{"queries": "original", "keys": "filler", "layers": "2-"}]},
    "first-layer": {"patch": [{"from": "mless", "part": "residual", "layers": "1", "at": "original"}]},
    "activation": {"patch": [{"from": "unseen", "part": "mlp-activation", "layers": "1", "at": "original"}]},
}
SYSTEM = "Answer briefly."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def run(tiny: Path, out: Path, measures: str, conditions: str, **more: Any) -> None:
    own = {"activations": {}} if measures == "activations" else {}
    chosen = {
        "model": str(tiny),
        "limit": 4,
        "length": 5,
        "prompt": "raw",
        "system": SYSTEM,
        "condition": DECLARED,
    } | own
    run_study(load_study("quick", chosen | {"conditions": conditions} | more), out, Heard())


def test_attention_under_a_cut_and_under_a_patch(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "r", "attention", "none,mless,unseen,first-layer")
    rows = pl.read_parquet(tmp_path / "r" / "attention.parquet").filter(queries="original")
    mass = rows.with_columns(pl.col("mass").struct.field("filler").alias("to_filler"))
    cut = mass.filter(condition="unseen")
    assert cut.filter(layer=2)["to_filler"].max() == 0.0
    assert cut.filter(layer=1)["to_filler"].min() > 0.0
    # In the layers before the cut nothing is changed.
    both = (
        mass.filter(condition=name, layer=1).sort("item", "head")["received"].to_list() for name in ("mless", "unseen")
    )
    assert next(both) == next(both)
    # Another residual stream is another attention in the next layer, and the same in the first.
    none, patched = (
        {layer: mass.filter(condition=name, layer=layer).sort("item", "head")["received"].to_list() for layer in (1, 2)}
        for name in ("none", "first-layer")
    )
    assert none[1] == patched[1]
    assert none[2] != patched[2]
    retained = pl.read_parquet(tmp_path / "r" / "retained.parquet")
    assert set(retained["condition"]) == {"mless", "unseen", "first-layer"}


def test_activations_of_a_layer_that_takes_them_from_another_run(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "r", "activations", "none,mless,unseen,activation")
    items = pl.read_parquet(tmp_path / "r" / "activation_items.parquet").filter(tokens="all")
    names = ("none", "mless", "unseen", "activation")
    by = {
        (name, layer): items.filter(condition=name, layer=layer).sort("item")["mean"].to_list()
        for name in names
        for layer in (1, 2)
    }
    # The cut is behind the first layer, so there it changes nothing.
    assert by["unseen", 1] == pytest.approx(by["mless", 1], rel=1e-6)
    assert by["unseen", 2] != pytest.approx(by["mless", 2], rel=1e-6)
    assert by["activation", 1] == pytest.approx(by["unseen", 1], rel=1e-6)
    assert by["activation", 1] != pytest.approx(by["none", 1], rel=1e-6)
    assert by["activation", 2] != pytest.approx(by["none", 2], rel=1e-6)


@pytest.mark.parametrize(
    ("condition", "more", "why"),
    [
        (
            FILLER | {"cut": [{"queries": "answer", "keys": "filler"}]},
            {},
            "'mine', cut: it names the answer, but only prompts",
        ),
        (FILLER | {"cut": [{"queries": "question", "keys": "filler", "heads": 1}]}, {}, "cuts some heads only"),
        (FILLER | {"cut": [{"queries": "question", "keys": "filler", "to": "sink"}]}, {}, "sends weight to the sink"),
        (
            {"kind": "shift", "length": 5, "patch": [{"from": "mless", "part": "keys-values", "at": "filler"}]},
            {},
            "puts the filler's keys and values into a prompt without it, which has no token that could receive",
        ),
        (
            FILLER | {"cut": [{"queries": "question", "keys": "filler", "layers": "2"}]},
            {"layers": "1"},
            r"cut in layer 2 cannot change layers up to 1, which are all that is measured; add --layers 1-2",
        ),
    ],
)
def test_what_attention_cannot_be_read_under_is_refused(
    tiny: Path, tmp_path: Path, condition: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadStudy, match=why):
        run(tiny, tmp_path / "r", "attention", "none,mless,mine", condition={"mine": condition}, **more)


def test_layers_that_are_not_loaded_are_left_out(tiny: Path, tmp_path: Path) -> None:
    declared = {"mine": FILLER | {"cut": [{"queries": "question", "keys": "filler", "layers": "1-2"}]}}
    run(tiny, tmp_path / "r", "attention", "none,mine", condition=declared, layers="1")
    rows = pl.read_parquet(tmp_path / "r" / "attention.parquet").filter(condition="mine", queries="original")
    mass = rows.with_columns(pl.col("mass").struct.field("filler").alias("to_filler"))
    assert mass["layer"].unique().to_list() == [1]


def test_affine_under_a_cut(tiny: Path, tmp_path: Path) -> None:
    declared = DECLARED | {"nobody": FILLER | {"cut": [{"queries": "original", "keys": "filler"}]}}
    chosen = {"model": str(tiny), "limit": 4, "length": 5, "prompt": "raw", "system": SYSTEM, "condition": declared}
    conditions = ["none", "mless", "position-only", "unseen", "nobody"]
    run_study(load_study("affine", chosen | {"conditions": conditions}), tmp_path / "r", Heard())
    rows = pl.read_parquet(tmp_path / "r" / "affine.parquet").filter(pl.col("head") > 0).sort("layer", "head")
    by = {name: rows.filter(condition=name) for name in conditions[1:]}
    about = json.loads((tmp_path / "r" / "study.json").read_text())
    assert about["proofs"]["cuts of nobody"]["output"] < 1e-5
    # Nothing is cut before layer 2, and a filler that nobody sees only moves positions.
    first = [by[name].filter(layer=1)["displacement"].to_list() for name in ("mless", "unseen")]
    assert first[0] == first[1]
    assert (
        by["unseen"].filter(layer=2)["displacement"].to_list() != by["mless"].filter(layer=2)["displacement"].to_list()
    )
    assert by["nobody"]["displacement"].to_list() == pytest.approx(
        by["position-only"]["displacement"].to_list(), rel=1e-3
    )
    assert by["nobody"]["kept"].to_list() == pytest.approx([1.0] * len(by["nobody"]))


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        (DECLARED["first-layer"], "'mine' takes values from another run, which affine does not take: λ and σ say"),
        (
            FILLER | {"cut": [{"queries": "question", "keys": "filler", "heads": 1}]},
            "leaves no single softmax to tell the filler's",
        ),
        (
            {"cut": [{"queries": "question", "keys": "system"}]},
            "inserts no filler, and tokens after a filler are compared",
        ),
        (FILLER | {"cut": [{"queries": "answer", "keys": "filler"}]}, "it names the answer, but only prompts"),
        (FILLER | {"cut": [{"queries": "question", "keys": "filler", "layers": 9}]}, "'mine', cut: no layer 9"),
        (FILLER | {"cut": [{"queries": "end", "keys": "filler"}]}, "queries = 'end', but the prompt has no such span"),
    ],
)
def test_what_affine_cannot_be_read_under_is_refused(
    tiny: Path, tmp_path: Path, condition: dict[str, Any], why: str
) -> None:
    chosen = {"model": str(tiny), "limit": 4, "prompt": "raw", "system": SYSTEM, "condition": {"mine": condition}}
    with pytest.raises((BadStudy, BadPrompt), match=why):
        run_study(load_study("affine", chosen | {"conditions": ["none", "mless", "mine"]}), tmp_path / "r", Heard())
    assert not (tmp_path / "r" / "units").exists()


def test_what_is_computed_again_has_the_cuts_and_patches_too(tiny: Path, tmp_path: Path) -> None:
    """`mless verify` finds no difference, in measurements whose cuts are set around a group."""
    run(tiny, tmp_path / "r", "attention", "none,mless,unseen,first-layer", limit=2)
    found = verify(tmp_path / "r", sample=8)
    assert found.recomputed is not None
    assert found.recomputed.agrees, found.recomputed


@pytest.mark.parametrize("study", ["quick", "activations", "affine", "likelihood"])
def test_a_seam_that_does_not_cut_is_found_before_anything_is_stored(
    tiny: Path, tmp_path: Path, study: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of accuracy, whose slots have a seam of their own, accuracy/test_changed_answers.py says it."""
    monkeypatch.setattr(cutting.EdgeMask, "attended", lambda *_: None)
    monkeypatch.setattr(cutting.EdgeMask, "_block", lambda self, first, last: self._under(first, last))
    chosen = {"model": str(tiny), "limit": 2, "prompt": "raw", "system": SYSTEM, "condition": DECLARED}
    with pytest.raises(ProofFailed, match="attention with its edges cut differs from the definition"):
        run_study(load_study(study, chosen | {"conditions": ["none", "unseen"]}), tmp_path / "r", Heard())
    assert not (tmp_path / "r").exists()
