"""A study of the affine map run for real: its tables against the vectors themselves, what a resumed run gives, and what it says."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from interrupted import not_finished, table_replaced, units_kept
from mless import report
from mless.capture import displacement
from mless.errors import BadFolder, BadStudy
from mless.models import describe, load
from mless.results.folder import ResultFolder
from mless.stats import halves
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.direct import items, prompts
from spelling import model_folder

TABLES = ("affine", "affine_items", "affine_points", "prompts")
CONDITIONS = ["none", "mless", "random", "position-only"]
SMALL: dict[str, Any] = {"limit": 6, "length": 7, "conditions": ",".join(CONDITIONS), "prompt": "raw"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def run_tiny(model: Path, out: Path, *sets: str, **changes: Any) -> Path:
    return run_study(load_study("affine", {"model": str(model), **SMALL, **changes}, sets), out).folder


@pytest.fixture(scope="module")
def with_units(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished folder that still has its units."""
    with units_kept():
        return run_tiny(model, tmp_path_factory.mktemp("affine") / "results")


@pytest.fixture(scope="module")
def folder(with_units: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "results"
    shutil.copytree(with_units, path)
    ResultFolder(path).drop_units()
    return path


@pytest.fixture(scope="module")
def affine(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "affine.parquet")


@pytest.fixture(scope="module")
def vectors(model: Path) -> dict[str, dict[str, np.ndarray]]:
    """Item → o and o′ of every token compared under mless, layers × heads × tokens × dim."""
    loaded = load(describe(str(model)), layers=[1, 2])
    questions = items(limit=6)
    pairs = zip(
        prompts(loaded, questions, "none", prompt="raw"),
        prompts(loaded, questions, "mless", prompt="raw", length=7),
        strict=True,
    )
    found = [displacement(loaded, a, b, layers=[1, 2], points=10_000) for a, b in pairs]
    return {one.prompt.item: {"o": one.before.astype(float), "after": one.after.astype(float)} for one in found}


def tables_of(path: Path) -> dict[str, bytes]:
    return {name: (path / f"{name}.parquet").read_bytes() for name in TABLES}


# ---- the tables ---------------------------------------------------------------------------------------------------------


def test_a_row_for_every_layer_and_head_of_every_condition_with_something_to_compare(folder, affine):
    rows = affine.select("condition", "layer", "head").rows()
    assert rows == [
        (condition, layer, head) for condition in CONDITIONS[1:] for layer in (1, 2) for head in (0, 1, 2, 3, 4)
    ]
    assert affine["n_items"].to_list() == [6] * len(rows)
    assert set(affine["n_scored"]) == {3}
    assert {"model", "task"} <= set(affine.columns)
    per_item = pl.read_parquet(folder / "affine_items.parquet")
    assert per_item.height == 3 * 6 * 2 * 4
    assert per_item.group_by("half").len().sort("half").rows() == [("fit", 72), ("score", 72)]
    points = pl.read_parquet(folder / "affine_points.parquet")
    assert points.group_by("condition", "layer", "head").len()["len"].to_list() == [72] * (3 * 2 * 4)
    assert not any("list" in str(kind).lower() for kind in points.dtypes)  # two dimensions, no vectors


def test_constant_map_is_fitted_on_one_half_and_scored_on_the_other(affine, vectors):
    names = list(vectors)
    fitted = dict(zip(names, halves(names, 0), strict=True))
    for layer in (1, 2):
        left = moved = 0.0
        for head in range(1, 5):
            o, after = (
                {name: one[key][layer - 1, head - 1] for name, one in vectors.items()} for key in ("o", "after")
            )
            chosen = [name for name in names if fitted[name]]
            x, y = np.concatenate([o[n] for n in chosen]), np.concatenate([after[n] for n in chosen])
            scale = ((x - x.mean(0)) * (y - y.mean(0))).sum() / ((x - x.mean(0)) ** 2).sum()
            shift = y.mean(0) - scale * x.mean(0)
            rest = [name for name in names if not fitted[name]]
            mine_left = sum(((after[n] - scale * o[n] - shift) ** 2).sum() for n in rest)
            mine_moved = sum(((after[n] - o[n]) ** 2).sum() for n in rest)
            left, moved = left + mine_left, moved + mine_moved
            row = affine.row(
                by_predicate=(pl.col("condition") == "mless") & (pl.col("layer") == layer) & (pl.col("head") == head),
                named=True,
            )
            assert row["lambda_constant"] == pytest.approx(scale, rel=1e-4)
            assert row["r2_constant"] == pytest.approx(1 - mine_left / mine_moved, abs=1e-4)
            assert row["r2_constant_lo"] < row["r2_constant"] < row["r2_constant_hi"] <= 1
        whole = affine.row(
            by_predicate=(pl.col("condition") == "mless") & (pl.col("layer") == layer) & (pl.col("head") == 0),
            named=True,
        )
        assert whole["r2_constant"] == pytest.approx(1 - left / moved, abs=1e-4)


def test_cosine_and_size_are_those_of_the_displacements(affine, vectors):
    o, move = (
        [one[key][0, 2] - (one["o"][0, 2] if key == "after" else 0) for one in vectors.values()]
        for key in ("o", "after")
    )
    unit = [one / np.linalg.norm(one, axis=1, keepdims=True) for one in move]
    cosines = np.concatenate([(a @ b.T).ravel() for n, a in enumerate(unit) for b in unit[n + 1 :]])
    row = affine.row(
        by_predicate=(pl.col("condition") == "mless") & (pl.col("layer") == 1) & (pl.col("head") == 3), named=True
    )
    assert row["cosine"] == pytest.approx(cosines.mean(), abs=1e-4)
    size = np.sqrt(sum((one**2).sum() for one in move) / sum((one**2).sum() for one in o))
    assert row["displacement"] == pytest.approx(size, rel=1e-4)
    assert row["n_tokens"] == sum(map(len, o))


def test_positions_are_told_apart_from_filler(affine):
    layer = affine.filter((pl.col("layer") == 1) & (pl.col("head") == 0))
    filled = layer.filter(pl.col("condition") != "position-only")
    assert (filled["r2_shifted"] > 1 - 1e-8).all()  # exact in layer 1
    assert (filled["kept"] < 1).all()
    control = layer.row(by_predicate=pl.col("condition") == "position-only", named=True)
    assert [control[name] for name in ("r2_shifted", "position_share", "r2_kept")] == [None] * 3
    assert control["kept"] == 1
    mless = layer.row(by_predicate=pl.col("condition") == "mless", named=True)
    share = (control["displacement"] / mless["displacement"]) ** 2  # same place, same length: the same positions
    assert mless["position_share"] == pytest.approx(share, rel=1e-3)


def test_points_lie_where_the_forms_put_them(folder):
    points = pl.read_parquet(folder / "affine_points.parquet")
    shown = points.filter((pl.col("condition") == "mless") & (pl.col("layer") == 1) & (pl.col("head") == 1))
    assert shown["item"].n_unique() == 6
    row = shown.row(0, named=True)
    assert 0 < row["x_outputs"] + row["y_outputs"] <= 1
    # x runs along the mean displacement, so nearly all of the mean is along x
    moved = shown.select(dx=pl.col("x_after") - pl.col("x"), dy=pl.col("y_after") - pl.col("y")).mean().row(0)
    assert moved[0] > 3 * abs(moved[1])
    same = points.filter(pl.col("condition") != "mless").select("condition", "item", "token", "layer", "head", "x", "y")
    joined = shown.select("item", "token", "layer", "head", "x", "y").join(same, on=["item", "token", "layer", "head"])
    assert joined.height == 2 * 72  # the same tokens in the same plane under every condition
    np.testing.assert_allclose(joined["x"], joined["x_right"], atol=1e-5)


# ---- resuming -----------------------------------------------------------------------------------------------------------


def test_a_run_that_lost_units_and_tables_ends_with_the_same_bytes(folder, with_units, model, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(with_units, out)
    for lost in ("mless-00002", "random-00006", "position-only-00001"):
        not_finished(out).unit_path("affine_items", lost).unlink()
    outcome = run_study(load_study("affine", {"model": str(model), **SMALL}), out)
    assert outcome.computed == 3
    assert tables_of(out) == tables_of(folder)
    assert not (out / "units").exists()
    assert run_study(load_study("affine", {"model": str(model), **SMALL}), out).computed == 0


def test_items_without_points_are_kept(model, tmp_path):
    """With 25 items the last one stores no point for the picture."""
    many = {"limit": None, "data": "arithmetic:1:25", "conditions": "none,mless", "layers": "1"}
    with units_kept():
        out = run_tiny(model, tmp_path / "r", **many)
    units = not_finished(out)
    assert (
        units.read_unit("affine_points", "mless-00025").num_rows
        == 0
        < units.read_unit("affine_points", "mless-00024").num_rows
    )
    assert run_study(load_study("affine", {"model": str(model), **SMALL, **many}), out).computed == 0
    assert not (out / "set-aside").exists()


def _longer(table: pa.Table, name: str) -> pa.Table:
    values = [[*one, 0.0] for one in table[name].to_pylist()]
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize("name", ["affine_items", "affine_points"])
def test_forged_units_are_refused_by_name(model, tmp_path, name):
    out = tmp_path / "r"
    with units_kept():
        run_tiny(model, out, limit=2, conditions="none,mless")
    units = not_finished(out)
    table = units.read_unit(name, "mless-00002")
    again = functools.partial(run_tiny, model, out, limit=2, conditions="none,mless")
    units.write_unit({name: table.slice(1)}, "mless-00002")
    with pytest.raises(
        BadFolder, match=rf"unit .*{name}/mless-00002.parquet has other rows .*; remove that file and run"
    ):
        again()
    units.write_unit({name: _longer(table, "direction" if name == "affine_items" else "after")}, "mless-00002")
    with pytest.raises(
        BadFolder, match=rf"item 2 under 'mless' has vectors of other lengths.*remove its file under units/{name}"
    ):
        again()
    units.unit_path(name, "mless-00002").unlink()
    again()


def test_other_margins_need_no_model(folder, model, tmp_path, monkeypatch):
    narrow = {"margins.drop": 0.9999, "margins.rise": 1.0001, "margins.same": [0.99999, 1.00001]}
    again, fresh = tmp_path / "again", tmp_path / "fresh"
    shutil.copytree(folder, again)
    run_tiny(model, fresh, **narrow)
    monkeypatch.setattr("mless.models.load", None)  # to load a model would fail
    outcome = run_study(load_study("affine", {"model": str(model), **SMALL, **narrow}), again)
    assert outcome == Outcome(again, 0, 24)
    assert tables_of(again) == tables_of(fresh) != tables_of(folder)
    assert verdict_lines(again) == verdict_lines(fresh)
    run_tiny(model, again)  # and back
    assert tables_of(again) == tables_of(folder)
    # What else is judged is judged from the units, which are gone.
    with pytest.raises(BadFolder, match="it differs in affine; choose another --out"):
        run_tiny(model, again, "affine.holds=0.5")
    with pytest.raises(BadFolder, match="it differs in flips; choose another --out"):
        run_tiny(model, again, flips=200_000)


# ---- settings and bad input -----------------------------------------------------------------------------------------------


def test_all_original_tokens_on_request(affine, model, tmp_path):
    every = pl.read_parquet(
        run_tiny(model, tmp_path / "all", "affine.tokens=original", conditions="none,mless") / "affine.parquet"
    )
    after = affine.filter(pl.col("condition") == "mless")
    assert (every["n_tokens"] > after["n_tokens"]).all()
    np.testing.assert_allclose(
        every["r2_measured"], after["r2_measured"], rtol=1e-4
    )  # what does not move counts in neither sum
    # one map for tokens that move and tokens that do not: worse than for those that move alone
    assert (every.filter(pl.col("head") == 0)["r2_constant"] < after.filter(pl.col("head") == 0)["r2_constant"]).all()


def test_filler_that_nothing_comes_after(model, tmp_path):
    path = run_tiny(model, tmp_path / "end", limit=4, conditions="none,mless", placement="end")
    rows = pl.read_parquet(path / "affine.parquet")
    assert rows["r2_constant"].null_count() == rows.height
    assert set(rows["n_items"]) == {0}
    assert set(rows["verdict"]) == {"undecided"}
    assert any("nothing moved" in line for line in verdict_lines(path))
    report.publish(path, fresh=True)


def test_a_single_item_has_values_and_no_intervals(model, tmp_path):
    path = run_tiny(model, tmp_path / "one", limit=1, conditions="none,mless")
    row = pl.read_parquet(path / "affine.parquet").row(0, named=True)
    assert row["r2_measured"] is not None
    assert [row[name] for name in ("r2_measured_lo", "r2_constant", "cosine", "p")] == [None] * 4
    assert any("at least 4 items" in line for line in verdict_lines(path))


def test_arm_is_refused_by_name_before_anything_is_loaded():
    with pytest.raises(BadStudy, match=r"condition 'arm' runs the model with ARM.*mless run activations"):
        run_study(load_study("affine", {"conditions": "none,mless,arm", "model": "no/such-model"}))


def test_a_bar_outside_its_range_is_refused():
    with pytest.raises(BadStudy, match=r"affine\.holds"):
        load_study("affine", {}, ["affine.holds=1.5"])


# ---- in words -------------------------------------------------------------------------------------------------------------


def test_the_verdict_says_what_holds_and_what_limits_it(folder):
    head, *lines = verdict_lines(folder)
    assert "6 items" in head
    mless = next(line for line in lines if line.startswith("mless (7 × ' /', before-question)"))
    for words in ("layer 1 moves by", "one λ (", "R²", "positions alone", "mean cosine"):
        assert words in mless
    assert next(
        line
        for line in lines
        if line.startswith("position-only (positions moved on by 7, before-question, no token inserted")
    )
    assert any(line.startswith("The published claim (o′ ≈ λ·o + σ, mless)") for line in lines)
    assert "3 scored items are too few" in lines[-1]


def test_the_claim_follows_the_numbers(folder, tmp_path):
    """A folder whose layer 1 is explained by one λ and σ says so; the tables are the only source."""
    out = tmp_path / "told"
    shutil.copytree(folder, out)
    for verdict, words in (
        ("holds", "holds here"),
        ("fails", "does not hold here"),
        ("undecided", "is undecided here"),
    ):
        rows = pl.read_parquet(folder / "affine.parquet").with_columns(verdict=pl.lit(verdict))
        table_replaced(out, "affine", rows.to_arrow())
        assert any(words in line for line in verdict_lines(out))


def test_the_page_and_the_summary(folder):
    page = report.publish(folder, fresh=True).read_text(encoding="utf-8")
    assert "The affine map" in page
    assert "<script" not in page
    assert page.count("data:image/png") == 1
    told = report.summary(folder)
    assert len(told["layers"]) == 3 * 2
    assert told["verdict"] == verdict_lines(folder)
    json.dumps(told)
    assert ResultFolder(folder).manifest()["proofs"]["captured"] < 1e-5
