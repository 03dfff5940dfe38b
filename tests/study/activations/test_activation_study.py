"""A study of activations run for real: its tables against numbers computed anew, resuming, refusals, and what it says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats as scipy_stats

import mless
from interrupted import table_replaced, take_apart
from mless.errors import BadAttention, BadStudy
from mless.models import LoadedModel
from mless.report import publish, summary
from mless.results.folder import ResultFolder
from mless.results.schemas import TOKEN_CLASSES, TOKENS
from mless.stats import METRICS
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.activations.classes import token_classes, token_texts
from mless.study.activations.words import activation_lines
from spelling import byte_level, model_folder

TABLES = ("prompts", "activation_items", "activation_histograms", "activations")
CONDITIONS = ["none", "mless", "random", "arm"]
ITEMS, LAYERS, UNITS = 9, 2, 48


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def run_tiny(model: Path, out: Path, **changes: Any) -> Outcome:
    chosen = {"model": str(model), "limit": ITEMS, "length": 7, "conditions": ",".join(CONDITIONS), **changes}
    return run_study(load_study("activations", chosen), out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    path = tmp_path_factory.mktemp("activations") / "results"
    assert run_tiny(tiny, path) == Outcome(path, ITEMS * len(CONDITIONS), ITEMS * len(CONDITIONS))
    return path


#: For what does not hang on the numbers.
FEW: dict[str, Any] = {"limit": 4, "conditions": "none,mless,arm"}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    path = tmp_path_factory.mktemp("few") / "results"
    run_tiny(tiny, path, **FEW)
    return path


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, pl.DataFrame]:
    return {name: pl.DataFrame(ResultFolder(folder).read_table(name)) for name in TABLES}


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return mless.load(str(tiny))


def stored(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.parquet").read_bytes() for name in TABLES}


# ---- the file contract ---------------------------------------------------------------------------------------------------

COMMON = {"model": pl.String, "task": pl.String, "condition": pl.String}
METRIC_COLUMNS = dict.fromkeys(METRICS, pl.Float64)
COUNTS = dict.fromkeys(("linear", "zoom", "positive", "negative"), pl.List(pl.Int64))
CONTRACT: dict[str, dict[str, Any]] = {
    "activations": {
        "layer": pl.Int32, "tokens": pl.String, "metric": pl.String, "scale": pl.String, "value": pl.Float64, "none": pl.Float64,
        "difference": pl.Float64, "lo": pl.Float64, "hi": pl.Float64, "p": pl.Float64, "p_adjusted": pl.Float64, "n_items": pl.Int32,
        "verdict": pl.String, "threshold": pl.Float64, "levene": pl.Float64,
    },
    "activation_items": {
        "item": pl.String, "layer": pl.Int32, "tokens": pl.String, "n_tokens": pl.Int32, "units": pl.Int32, "threshold": pl.Float64,
        "width": pl.Float64, "median": pl.Float64, "mad": pl.Float64, **METRIC_COLUMNS, "mean": pl.Float64, "deviation": pl.Float64,
    },
    "activation_histograms": {
        "item": pl.String, "layer": pl.Int32, "width": pl.Float64, **COUNTS, "zeros": pl.Int64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRACT)
def test_tables_have_the_contracts_columns(tables: dict[str, pl.DataFrame], name: str) -> None:
    assert dict(tables[name].schema) == COMMON | CONTRACT[name]
    assert tables[name]["task"].unique().to_list() == ["bundled"]


def test_every_row_is_there_once(tables: dict[str, pl.DataFrame]) -> None:
    changes = tables["activations"]
    assert changes.select("condition", "layer", "tokens", "metric").n_unique() == changes.height
    assert changes.height == (len(CONDITIONS) - 1) * LAYERS * len(TOKENS) * len(METRICS)
    assert tables["activation_items"].height == len(CONDITIONS) * ITEMS * LAYERS * len(TOKENS)
    assert tables["activation_histograms"].height == len(CONDITIONS) * ITEMS * LAYERS


def test_provenance_says_what_was_measured(folder: Path) -> None:
    about = json.loads((folder / "study.json").read_text())
    assert about["measures"] == "activations"
    assert about["proofs"]["output unchanged"] is True
    assert about["conditions"]["arm"]["arm"]["layers"] == [1]


# ---- the numbers, computed anew ------------------------------------------------------------------------------------------


def values_of(model: LoadedModel, tables: dict[str, pl.DataFrame], condition: str, layer: int) -> list[np.ndarray]:
    """act(gate(x)) of every item's original tokens, from the projection itself."""
    kept: list[torch.Tensor] = []
    gate = model.model.get_submodule(f"layers.{layer - 1}.mlp.gate_proj")
    handle = gate.register_forward_hook(lambda module, given, output: kept.append(output.detach()))
    found: list[np.ndarray] = []
    for row in tables["prompts"].filter(pl.col("condition") == condition).iter_rows(named=True):
        with torch.inference_mode():
            model.model(input_ids=torch.tensor([row["token_ids"]]))
        original = [i for span in row["spans"] if span["name"] != "filler" for i in range(span["start"], span["stop"])]
        found.append(torch.nn.functional.silu(kept.pop())[0, original].numpy())
    handle.remove()
    return found


def threshold_of(pooled: np.ndarray) -> float:
    magnitude = np.sort(np.abs(pooled.ravel()))
    middle = (len(magnitude) - 1) // 2
    return 1.4826 * 0.1 * float(np.sort(np.abs(magnitude - magnitude[middle]))[middle])


@pytest.mark.parametrize("layer", [1, 2])
def test_items_have_the_numbers_of_their_original_tokens(
    tables: dict[str, pl.DataFrame], loaded: LoadedModel, layer: int
) -> None:
    tau = threshold_of(np.concatenate(values_of(loaded, tables, "none", layer)))
    for condition in ("none", "mless"):
        rows = tables["activation_items"].filter(
            (pl.col("condition") == condition) & (pl.col("layer") == layer) & (pl.col("tokens") == "all")
        )
        assert rows["threshold"].to_numpy() == pytest.approx(tau, rel=1e-5)
        for row, values in zip(rows.iter_rows(named=True), values_of(loaded, tables, condition, layer), strict=True):
            exact = values.astype(np.float64)
            assert (row["n_tokens"], row["units"]) == values.shape
            assert row["near_zero"] == pytest.approx((np.abs(exact) <= tau).mean(), abs=2 / exact.size)
            assert row["near_zero_double"] == pytest.approx((np.abs(exact) <= 2 * tau).mean(), abs=2 / exact.size)
            assert row["l1"] == pytest.approx(np.abs(exact).sum(1).mean(), rel=1e-5)
            assert row["l2"] == pytest.approx(np.linalg.norm(exact, axis=1).mean(), rel=1e-5)
            assert row["variance"] == pytest.approx(exact.var(), rel=1e-5)
            assert row["kurtosis"] == pytest.approx(scipy_stats.kurtosis(exact, None, fisher=False), rel=1e-4)
            assert row["deviation"] == pytest.approx(np.abs(exact - exact.mean()).mean(), rel=1e-5)


def test_changes_are_paired_by_item(tables: dict[str, pl.DataFrame]) -> None:
    items = tables["activation_items"].filter((pl.col("tokens") == "all") & (pl.col("layer") == 1))
    with_, none = (
        items.filter(pl.col("condition") == name).sort("item")["variance"].to_numpy() for name in ("mless", "none")
    )
    row = tables["activations"].filter(condition="mless", layer=1, tokens="all", metric="variance").row(0, named=True)
    logs = np.log(with_ / none)
    interval = scipy_stats.ttest_1samp(logs, 0).confidence_interval()
    assert (row["difference"], row["lo"], row["hi"]) == pytest.approx((logs.mean(), interval.low, interval.high))
    assert row["n_items"] == ITEMS
    signs = np.array([[1 - 2 * (k >> i & 1) for i in range(ITEMS)] for k in range(2**ITEMS)])
    assert row["p"] == pytest.approx(np.mean(np.abs(signs @ logs) >= abs(logs.sum()) - 1e-12))
    assert row["levene"] >= 0


def test_tokens_before_the_filler_do_not_change(tables: dict[str, pl.DataFrame]) -> None:
    """What the filler cannot reach is the same to the bit, so the pairs are aligned."""
    counts = tables["activation_histograms"].filter(pl.col("layer") == 1)
    per_item = {
        name: counts.filter(pl.col("condition") == name).sort("item")["linear"].list.sum().to_list()
        for name in ("none", "mless", "arm")
    }
    tokens = (
        tables["activation_items"].filter(condition="none", layer=1, tokens="all").sort("item")["n_tokens"].to_list()
    )
    assert per_item["none"] == per_item["mless"] == per_item["arm"] == [n * UNITS for n in tokens]


def test_zoom_and_near_zero_agree(tables: dict[str, pl.DataFrame]) -> None:
    keys = ["condition", "item", "layer"]
    both = tables["activation_histograms"].join(tables["activation_items"].filter(tokens="all"), on=keys)
    for row in both.iter_rows(named=True):
        near = sum(row["zoom"][41:61])  # −τ to τ, after the open bin
        assert near == pytest.approx(row["near_zero"] * row["n_tokens"] * row["units"], abs=2)


def test_arm_takes_values_away_from_zero(tables: dict[str, pl.DataFrame]) -> None:
    row = tables["activations"].filter(condition="arm", layer=1, tokens="all", metric="near_zero").row(0, named=True)
    assert row["hi"] < 0
    assert row["verdict"] == "drops"


def test_classes_partition_the_original_tokens_and_are_the_same_in_a_pair(tables: dict[str, pl.DataFrame]) -> None:
    items = tables["activation_items"].filter(pl.col("layer") == 1)
    wide = items.pivot("tokens", index=["condition", "item"], values="n_tokens")
    assert (wide.select(pl.sum_horizontal(TOKEN_CLASSES)).to_series() == wide["all"]).all()
    assert wide.drop("condition").unique().height == ITEMS
    empty = items.filter(pl.col("n_tokens") == 0)
    assert empty.height
    assert empty["near_zero"].is_null().all()


# ---- resuming ------------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_by_the_stored_threshold(
    few: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "again"
    shutil.copytree(few, again)
    units = take_apart(again)
    for key in ("none-00001", "none-00004", "mless-00002", "arm-00003"):
        units.unit_path("activation_items", key).unlink()
    monkeypatch.setattr("mless.study.activations.measure.near_zero_of", None)  # to find it anew would fail
    assert run_tiny(tiny, again, **FEW).computed == 12  # the groups that lack some
    assert stored(again) == stored(few)


NARROW: dict[str, Any] = {"margins.drop": 0.9999, "margins.rise": 1.0001, "margins.same": [0.99999, 1.00001]}


def test_half_a_unit_that_is_damaged_too_is_measured_anew(few: Path, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    shutil.copytree(few, out)
    units = take_apart(out)
    units.unit_path("activation_histograms", "none-00001").unlink()
    units.unit_path("activation_items", "none-00001").write_bytes(b"PAR1")
    assert run_tiny(tiny, out, **FEW).computed == 4
    assert stored(out) == stored(few)


def test_other_margins_and_flips_need_no_model(
    few: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, fresh = tmp_path / "again", tmp_path / "fresh"
    shutil.copytree(few, again)
    run_tiny(tiny, fresh, **FEW, **NARROW, flips=200_000)
    monkeypatch.setattr("mless.models.load", None)  # to load a model would fail
    assert run_tiny(tiny, again, **FEW, **NARROW, flips=200_000) == Outcome(again, 0, 12)
    assert stored(again) == stored(fresh) != stored(few)
    verdicts = pl.read_parquet(again / "activations.parquet")["verdict"]
    assert verdicts.to_list() != pl.read_parquet(few / "activations.parquet")["verdict"].to_list()
    assert verdict_lines(again) == verdict_lines(fresh)
    assert run_tiny(tiny, again, **FEW).fresh  # and back
    assert stored(again) == stored(few)


def test_a_missing_table_of_changes_is_made_without_a_model(
    few: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "again"
    shutil.copytree(few, again)
    (again / "activations.parquet").unlink()
    monkeypatch.setattr("mless.models.load", None)
    assert run_tiny(tiny, again, **FEW) == Outcome(again, 0, 12)
    assert stored(again) == stored(few)


def test_a_second_run_from_nothing_gives_the_same_tables(few: Path, tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "second", **FEW)
    assert stored(tmp_path / "second") == stored(few)


def test_a_finished_folder_is_not_computed_again(folder: Path, tiny: Path) -> None:
    assert run_tiny(tiny, folder) == Outcome(folder, 0, ITEMS * len(CONDITIONS), fresh=False)


def test_batches_give_the_same_numbers_to_rounding(few: Path, tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "batched", **FEW, batch_size=4)
    a, b = (pl.DataFrame(ResultFolder(path).read_table("activation_items")) for path in (few, tmp_path / "batched"))
    for metric in ("l1", "variance", "gini"):
        np.testing.assert_allclose(b[metric].drop_nulls(), a[metric].drop_nulls(), rtol=1e-4)


# ---- what is refused -----------------------------------------------------------------------------------------------------


def test_heads_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"belong to a layer and not to its heads, got --heads 1; leave it out"):
        run_tiny(tiny, tmp_path / "heads", heads="1")
    assert not (tmp_path / "heads").exists()


def test_numbers_that_break_are_refused_before_anything_is_stored(tmp_path: Path) -> None:
    broken = model_folder(tmp_path / "broken", broken=" step")
    with pytest.raises(BadAttention, match=r"not finite .* in layer 1, at token \d+ of item 'bundled-\d+'"):
        run_tiny(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_condition_whose_filler_breaks_the_model_names_it(tmp_path: Path) -> None:
    broken = model_folder(tmp_path / "broken", broken=" he")
    with pytest.raises(BadAttention, match=r"condition 'mful': the activation is not finite"):
        run_tiny(broken, tmp_path / "out", conditions="none,mful")
    assert not (tmp_path / "out").exists()


def test_conditions_for_answers_are_refused(tiny: Path, tmp_path: Path) -> None:
    own = {"condition": {"hidden": {"filler": " /", "hidden": True}}}
    with pytest.raises(BadStudy, match="condition 'hidden' is for answers"):
        run_tiny(tiny, tmp_path / "out", conditions="none,hidden", **own)


def test_positions_alone_are_a_condition(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "out", conditions="none,position-only", layers="1-2", limit=3)
    rows = pl.read_parquet(tmp_path / "out" / "activation_items.parquet").filter(pl.col("layer") == 2)
    moved, none = (rows.filter(pl.col("condition") == name)["l1"].to_list() for name in ("position-only", "none"))
    assert len(moved) == len(none) > 0
    assert moved != none


# ---- what it says --------------------------------------------------------------------------------------------------------


def test_the_verdict_names_conditions_layers_and_the_claim(folder: Path) -> None:
    lines = verdict_lines(folder)
    assert lines == activation_lines(folder)
    assert lines[0].startswith("tiny, 9 items of bundled")
    assert re.search(r"^mless \(7 × ' /', before-question\): layer 1: near-zero share .* points \[.*\]", lines[1])
    assert "ARM with c 0.13, p1 99.5, layer 1" in lines[3]
    assert lines[4].startswith("The published claim (layer 1: near-zero values rarer, variance up)")
    assert "Natural text of the same length" in lines[4]
    assert lines[5].startswith("ARM beside filler, layer 1: arm has near-zero share × 0")


def rewritten(folder: Path, out: Path, **columns: Any) -> list[str]:
    """The verdict of the folder with layer 1's rows of mless changed: metric → columns."""
    shutil.copytree(folder, out)
    table = pl.read_parquet(out / "activations.parquet")
    for metric, changes in columns.items():
        mine = (pl.col("condition") == "mless") & (pl.col("layer") == 1) & (pl.col("metric") == metric)
        table = table.with_columns(
            [pl.when(mine).then(pl.lit(value)).otherwise(pl.col(name)).alias(name) for name, value in changes.items()]
        )
    table_replaced(out, "activations", table.to_arrow())
    return activation_lines(out)


FELL = {"difference": -0.01, "lo": -0.012, "hi": -0.008, "p_adjusted": 0.01, "verdict": "drops"}
ROSE = {"difference": 0.2, "lo": 0.15, "hi": 0.25, "p_adjusted": 0.01, "verdict": "rises"}
BIT_UP = {"difference": 0.01, "lo": 0.005, "hi": 0.015, "p_adjusted": 0.01, "verdict": "unchanged"}
BIT_DOWN = {"difference": -0.01, "lo": -0.015, "hi": -0.005, "p_adjusted": 0.01, "verdict": "unchanged"}
SAME = {"difference": 0.0, "lo": -0.01, "hi": 0.01, "p_adjusted": 1.0, "verdict": "unchanged"}
OPEN = {"difference": 0.0, "lo": -0.5, "hi": 0.5, "p_adjusted": 1.0, "verdict": "undecided"}


@pytest.mark.parametrize(
    ("near_zero", "variance", "says"),
    [
        (FELL, ROSE, "holds here: near-zero values rarer: yes; variance up: yes."),
        (BIT_DOWN, ROSE, "holds here in direction, but only just"),
        (BIT_DOWN, BIT_DOWN, "holds here by half"),
        (BIT_UP, SAME, "does not hold here"),
        (ROSE, BIT_DOWN, "does not hold here: near-zero values rarer: no, the opposite; variance up: no, the opposite, by little"),
        (FELL, OPEN, "is undecided here"),
    ],
    ids=["holds", "faintly", "half", "not", "opposite", "undecided"],
)  # fmt: skip
def test_the_claim_in_words(folder: Path, tmp_path: Path, near_zero: Any, variance: Any, says: str) -> None:
    lines = rewritten(folder, tmp_path / "changed", near_zero=near_zero, variance=variance)
    assert says in next(line for line in lines if line.startswith("The published claim"))


def test_too_few_items_are_said_to_be_too_few(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "five", limit=5, conditions="none,mless")
    assert activation_lines(tmp_path / "five")[-1].startswith(
        "5 items are too few for the sign-flip test ever to reject after Holm over 2 layers (it takes 7)"
    )
    run_tiny(tiny, tmp_path / "one", limit=1, conditions="none,mless")
    assert "at least 2 items" in activation_lines(tmp_path / "one")[-1]


def test_a_class_that_few_items_have_is_said_to_decide_nothing(folder: Path) -> None:
    items = pl.read_parquet(folder / "activations.parquet").filter(condition="mless", layer=1, metric="near_zero")
    few = {row["tokens"]: row["n_items"] for row in items.iter_rows(named=True) if row["n_items"] < 7}
    assert 0 < len(few) < 4
    line = activation_lines(folder)[-1]
    assert line.startswith("Items with such tokens: " + ", ".join(f"{name} {n}" for name, n in few.items()))
    assert "no p could come out small after Holm over 2 layers (it takes 7)" in line


def test_the_claim_needs_layer_one_and_the_published_place(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "two", layers="2", limit=2, conditions="none,mless")
    assert "layer 1, which was not measured" in activation_lines(tmp_path / "two")[2]
    run_tiny(tiny, tmp_path / "end", layers="1", limit=2, conditions="none,mless", placement="end")
    assert "this one stands end" in activation_lines(tmp_path / "end")[2]


def test_without_a_condition_there_is_nothing_to_compare(tiny: Path, tmp_path: Path) -> None:
    run_tiny(tiny, tmp_path / "none", limit=2, conditions="none")
    assert len(activation_lines(tmp_path / "none")) == 1
    assert publish(tmp_path / "none", fresh=True).exists()


def test_the_page_and_the_summary(few: Path, tmp_path: Path) -> None:
    here = tmp_path / "page"
    shutil.copytree(few, here)
    page = publish(here, fresh=True).read_text(encoding="utf-8")
    assert "What changes" in page
    assert "near-zero share in % by token class" in page
    assert page.count("<figure") == 2
    assert "nan" not in re.sub(r"data:image/png;base64,[^\"]*", "", page)
    told = summary(here)
    assert len(told["activations"]) == 2 * LAYERS * len(METRICS)
    json.dumps(told)


# ---- token classes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "classes"),
    [
        (["12", " 3.5", "1,000", " x2", " 4th"], "digits digits digits other other"),
        (["+", " =", "/", " <=", "×", " a-", "\\"], "operators operators operators operators operators other other"),
        ([" four", " times", " 3", " plus", " sum"], "other operators digits operators other"),
        (["\\", "frac", "{", "1", "}", "\\", "sum", "\\", "and"], "other operators other digits other other operators other other"),
        ([" and", " Or", " thous", "and", " but", "ter", " so", "."], "conjunctions conjunctions other other other other conjunctions other"),
        (["and", " if", "\n", "", " "], "conjunctions conjunctions other other other"),
    ],
    ids=["digits", "signs", "words", "latex", "whole-words", "edges"],
)  # fmt: skip
def test_classes_by_rule(texts: list[str], classes: str) -> None:
    assert token_classes(texts) == classes.split()


def test_a_tokenizer_that_drops_the_space_still_begins_a_word() -> None:
    class Drops:
        def decode(self, ids: list[int], **_: Any) -> str:
            return ["rye", "and", "wheat"][ids[0]]

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["▁rye", "▁and", "▁wheat"][i] for i in ids]

    texts = token_texts(Drops(), [0, 1, 2])
    assert texts == [" rye", " and", " wheat"]
    assert token_classes(texts)[1] == "conjunctions"
    assert token_texts(byte_level(), byte_level()(" a b").input_ids)[0].startswith(" ")
