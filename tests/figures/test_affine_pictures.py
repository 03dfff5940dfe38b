"""fig3 from stored results: the same bytes each time, the head that moves most, and errors that name the way out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from interrupted import table_replaced
from mless.errors import BadFolder, BadStudy
from mless.figures import check, draw, style
from mless.figures.affine import draw_displacement
from mless.study import load_study, run_study
from mless.study.showing import single_layer
from mless.values import FigureSpec
from spelling import model_folder
from synthetic import write_folder

SHOWN = ("none", "mless", "random", "position-only")
FIG3 = FigureSpec("fig3", "displacement", (), SHOWN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("affine")
    changes = {"model": str(model_folder(place / "tiny")), "limit": 6, "length": 7}
    return run_study(load_study("fig3", changes), place / "results").folder


def texts(path: Path) -> str:
    return re.sub(r"<[^>]*>", " ", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("again", ["svg", pytest.param("png", marks=pytest.mark.slow)])
def test_the_same_bytes_each_time_and_a_caption_of_its_own(folder, tmp_path, again):
    first = draw(FIG3, [folder], formats=("png", "svg"), out=tmp_path / "a")
    assert [path.name for path in first] == ["fig3.png", "fig3.svg"]
    (alone,) = draw(FIG3, [folder], formats=(again,), out=tmp_path / "b")
    assert alone.read_bytes() == (tmp_path / "a" / alone.name).read_bytes()
    with Image.open(first[0]) as image:
        assert image.info["Title"].startswith("How filler moves attention outputs: tiny L1H")
        assert "n = 6 items (3 scored)" in image.info["Description"]


def test_it_names_layer_head_plane_and_controls(folder, tmp_path):
    (path,) = draw(FIG3, [folder], layer=2, formats=("svg",), out=tmp_path)
    drawn = texts(path)
    rows = pl.read_parquet(folder / "affine.parquet")
    heads = rows.filter((pl.col("condition") == "mless") & (pl.col("layer") == 2) & (pl.col("head") > 0))
    most = heads.sort("displacement")["head"][-1]
    for name in ("Mless", "Random sentence", "position-only"):
        assert f"L2H{most}: {name}" in drawn
    assert "Along the mean shift by Mless" in drawn
    assert drawn.count("of the outputs’ variance") == 3
    assert "Positions alone" in drawn
    row = heads.row(by_predicate=pl.col("head") == most, named=True)
    assert f"λ = {row['lambda_constant']:.2f}, R² = {row['r2_constant']:.2f}".replace("-", "−") in drawn


def test_several_models_and_one_layer(folder, tmp_path):
    one = tmp_path / "one-layer"
    shutil.copytree(folder, one)
    for name in ("affine", "affine_points"):
        table = pl.read_parquet(folder / f"{name}.parquet").filter(pl.col("layer") == 2)
        table_replaced(one, name, table.to_arrow())
    with style.applied():
        single = draw_displacement([one], SHOWN, layer=None)
        both = draw_displacement([folder, one], SHOWN, layer=2)
    assert "L2H" in single.title
    assert len(single.figure.get_axes()) == 3 + 3  # by-layer panels of one layer: a single row of them
    assert both.title.count("tiny") == 2


def test_an_r_squared_far_below_zero_is_marked_at_the_edge(folder, tmp_path):
    low = tmp_path / "low"
    shutil.copytree(folder, low)
    columns = [f"r2_measured{bound}" for bound in ("", "_lo", "_hi")]
    rows = pl.read_parquet(folder / "affine.parquet").with_columns(pl.lit(-1e9).alias(name) for name in columns)
    table_replaced(low, "affine", rows.to_arrow())
    with style.applied():
        picture = draw_displacement([low], SHOWN, layer=1)
    (axes,) = [axes for axes in picture.figure.get_axes() if axes.get_title().startswith("Own λ = Z/Z′")]
    assert axes.get_ylim()[0] > -1
    marked = [line for line in axes.get_lines() if line.get_marker() == "v" and len(line.get_xdata())]
    assert len(marked) == 3


def test_conditions_that_were_not_run_are_left_out(folder):
    with style.applied():
        picture = draw_displacement([folder], ("none", "mless", "position-only", "mful-twice"), layer=None)
    titles = [axes.get_title() for axes in picture.figure.get_axes()]
    assert sum("H" in title and ":" in title for title in titles) == 2


def test_what_cannot_be_drawn_is_told(folder, tmp_path):
    with pytest.raises(
        BadStudy, match=r"layer 7 was not measured in .*: it holds layers 1–2; choose one of them with --layers"
    ):
        draw(FIG3, [folder], layer=7, out=tmp_path)
    with pytest.raises(BadFolder, match=r"holds no attention outputs.*mless run affine"):
        draw(FIG3, [write_folder(tmp_path / "attention")], out=tmp_path)
    with pytest.raises(BadStudy, match="only none was run"):
        draw(FigureSpec("fig3", "displacement", (), ("none",)), [folder], out=tmp_path)
    with pytest.raises(BadStudy, match="takes no --heads"):
        check(FIG3, heads="1")
    with pytest.raises(BadStudy, match="shows one layer"):
        single_layer(load_study("fig3", {"layers": "1-2", "figure.layers": "1-2"}))
