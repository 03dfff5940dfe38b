"""fig4 and fig7 from a study of activations: what they say, that they are the same bytes every time, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from PIL import Image

from interrupted import about_changed, table_replaced
from mless.errors import BadFolder, BadStudy
from mless.figures import draw, style
from mless.figures.activations import draw_activations, draw_classes
from mless.results.reading import StoredActivations
from mless.study import load_study, run_study
from mless.study.showing import check_figure
from mless.values import FigureSpec
from spelling import model_folder
from synthetic import write_folder

SHOWN = ("none", "mless", "random", "arm")
FIG4, FIG7 = FigureSpec("fig4", "activations", (), SHOWN), FigureSpec("fig7", "classes", (), SHOWN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    model = model_folder(root / "tiny")
    changes = {"model": str(model), "limit": 7, "length": 7, "conditions": ",".join(SHOWN)}
    return run_study(load_study("activations", changes), root / "results").folder


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def titles(figure: Any) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


@pytest.mark.parametrize("again", ["svg", pytest.param("png", marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", [FIG4, FIG7], ids=["fig4", "fig7"])
def test_pictures_are_written_and_do_not_change(folder: Path, tmp_path: Path, spec: FigureSpec, again: str) -> None:
    first = draw(spec, [folder], layer=1, out=tmp_path / "a")
    assert [path.name for path in first] == [f"{spec.id}.png", f"{spec.id}.svg"]
    (alone,) = draw(spec, [folder], layer=1, formats=[again], out=tmp_path / "b")
    assert alone.read_bytes() == (tmp_path / "a" / alone.name).read_bytes()
    with Image.open(first[0]) as image:
        assert "layer 1: tiny" in image.info["Title"]
        assert "95 % interval over items" in image.info["Description"]
        assert image.size[0] == round(style.PAGE_WIDTH * style.DPI)
        assert np.asarray(image.convert("L")).std() > 10


def test_fig4_has_its_panels_and_says_model_layer_and_n(folder: Path) -> None:
    with style.applied():
        figure = draw_activations([folder], SHOWN, layer=2).figure
    assert titles(figure) == [
        "all values", "at zero", "by magnitude", "near-zero share, points", "L1 norm, %", "L2 norm, %", "Gini, Δ × 100", "variance, %",
        "near-zero share by layer, points", "variance by layer, %",
    ]  # fmt: skip
    found = texts(figure)
    assert "tiny, layer 2, n = 7 items" in found
    assert {"None", "Mless", "Random sentence", "ARM"} <= set(found)
    assert not [text for text in found if "mathdefault" in text]


def test_fig4_draws_the_stored_counts(folder: Path) -> None:
    opened = StoredActivations.open(folder)
    counts = opened.counts("mless", 1)
    table = pl.read_parquet(folder / "activation_histograms.parquet").filter(condition="mless", layer=1)
    assert counts["zoom"].tolist() == np.sum(table["zoom"].to_list(), axis=0).tolist()
    total = sum(opened.tokens(1)[name] for name in ("all",)) * 48
    assert counts["linear"].sum() == total
    with style.applied():
        zoom = draw_activations([folder], ("none", "mless"), layer=1).figure.axes[1]
    drawn = [patch for patch in zoom.patches if isinstance(patch, StepPatch)][-1].get_data().values
    np.testing.assert_allclose(drawn, counts["zoom"][1:-1] / total * 1000)


def test_fig4_shows_arm_beyond_the_axis_as_an_arrow_with_its_number(folder: Path) -> None:
    rows = StoredActivations.open(folder).changes(condition="arm", layer=1, tokens="all", metric="near_zero")
    with style.applied():
        axes = draw_activations([folder], SHOWN, layer=1).figure.axes[3]
    low, high = axes.get_ylim()
    value = 100 * rows[0]["difference"]
    assert not low <= value <= high
    assert f"{value:+.3g}".replace("-", "−") in [text.get_text() for text in axes.texts]
    assert "v" in [str(line.get_marker()) for line in axes.lines]


def test_several_folders_stand_below_one_another(folder: Path) -> None:
    with style.applied():
        both = draw_activations([folder, folder], SHOWN, layer=1).figure
        classes = draw_classes([folder, folder], SHOWN, layer=1).figure
    assert len(both.axes) == 16  # without the panels by layer
    assert len(classes.axes) == 4


def test_fig7_says_how_many_tokens_a_class_has_and_which_has_none(folder: Path) -> None:
    with style.applied():
        figure = draw_classes([folder], SHOWN, layer=1).figure
    left, right = figure.axes
    items = pl.read_parquet(folder / "activation_items.parquet").filter(condition="none", layer=1)
    labels = [label.get_text() for label in left.get_xticklabels()]
    for label, name in zip(labels, ("digits", "operators", "conjunctions", "other"), strict=True):
        own = items.filter(tokens=name)["n_tokens"]
        assert label == f"{name}\n{own.sum():,} tokens\n{(own > 0).sum()} items"
    missing = [
        name
        for name in ("digits", "operators", "conjunctions", "other")
        if not items.filter(tokens=name)["n_tokens"].sum()
    ]
    assert sum("no such" in text.get_text() for text in (*left.texts, *right.texts)) == 2 * len(missing)
    # bars are the stored shares
    row = StoredActivations.open(folder).changes(condition="mless", layer=1, tokens="other", metric="near_zero")[0]
    heights = [bar.get_height() for bar in left.patches]
    assert any(abs(height - 100 * row["value"]) < 1e-9 for height in heights)
    assert any(abs(height - 100 * row["none"]) < 1e-9 for height in heights)


def test_activations_that_are_mostly_zero_can_be_drawn(folder: Path, tmp_path: Path) -> None:
    """As after a ReLU: nothing negative, half of the values 0, τ = 0."""
    other = tmp_path / "relu"
    shutil.copytree(folder, other)
    counts = pl.read_parquet(other / "activation_histograms.parquet").with_columns(
        negative=pl.col("negative").list.eval(pl.element() * 0), zeros=pl.lit(10**5, pl.Int64)
    )
    table_replaced(other, "activation_histograms", counts.to_arrow())
    changes = pl.read_parquet(other / "activations.parquet").with_columns(threshold=pl.lit(0.0))
    table_replaced(other, "activations", changes.to_arrow())
    spec = FigureSpec("fig4", "activations", (), ("none", "mless"))
    assert len(draw(spec, [other], layer=1, formats=["png"], out=tmp_path / "out")) == 1


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FIG4, FIG7], ids=["fig4", "fig7"])
def test_a_layer_that_was_not_measured(folder: Path, spec: FigureSpec) -> None:
    with pytest.raises(BadStudy, match=r"no layer 9 in tiny: its layers are 1 to 2"):
        draw(spec, [folder], layer=9)


def test_a_layer_that_was_left_out(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "one"
    shutil.copytree(folder, other)
    with about_changed(other) as about:
        about["layers"] = [1]
    with pytest.raises(BadStudy, match=r"layer 2 was not measured in .*: it holds layers 1; .*--layers 2"):
        draw(FIG4, [other], layer=2)


def test_a_folder_of_attention_is_refused(tmp_path: Path) -> None:
    other = write_folder(tmp_path / "attention", about={"measures": "attention"})
    with pytest.raises(BadFolder, match=r"holds no activations: its study measured attention; `mless run activations"):
        draw(FIG4, [other], layer=1)
    with pytest.raises(BadFolder, match=r"no study\.json"):
        draw(FIG7, [tmp_path], layer=1)


def test_conditions_that_were_not_run(folder: Path) -> None:
    with pytest.raises(BadFolder, match="no condition 'mful'"):
        draw(FigureSpec("fig4", "activations", (), ("mful",)), [folder], layer=1)
    with pytest.raises(BadFolder, match="nothing to compare with none"):
        draw(FigureSpec("fig7", "classes", (), ("none",)), [folder], layer=1)


def test_a_table_without_the_layers_histogram(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "cut"
    shutil.copytree(folder, other)
    counts = pl.read_parquet(other / "activation_histograms.parquet").filter(pl.col("layer") == 2)
    table_replaced(other, "activation_histograms", counts.to_arrow())
    with pytest.raises(BadFolder, match="no histogram of 'none' in layer 1"):
        draw(FIG4, [other], layer=1)


def test_heads_and_items_are_no_options_of_these_figures(folder: Path) -> None:
    for option in ({"heads": "1"}, {"item": "1"}):
        with pytest.raises(BadStudy, match="takes no --"):
            draw(FIG4, [folder], layer=1, **option)


@pytest.mark.parametrize("name", ["fig4", "fig7"])
def test_the_study_of_a_figure_shows_arm_alone_too(name: str) -> None:
    check_figure(load_study(name), 30, 9)
    only = load_study(name, {"conditions": "none,arm"}, ["figure.conditions=none,arm"])
    check_figure(only, 30, 9)
    nothing = load_study(name, {"conditions": "none"}, ["figure.conditions=none"])
    with pytest.raises(BadStudy, match="has nothing to show"):
        check_figure(nothing, 30, 9)
