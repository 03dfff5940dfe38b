"""The picture of fillers among arbitrary edits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D

from mless.conditions import EDITS
from mless.errors import BadFolder
from mless.figures import draw, style
from mless.figures.placebo import placebo_of
from mless.results.figure_kinds import Drawing
from mless.values import FigureSpec
from placed_folders import write_placebo
from synthetic import write_folder

SPEC = FigureSpec("placebo", "placebo")


def picture(*paths: Path) -> style.Picture:
    with style.applied():
        return placebo_of(Drawing(SPEC, list(paths)))


def place(line: Line2D) -> tuple[float, float]:
    x, y = np.asarray(line.get_xydata())[0]
    return float(x), float(y)


def test_every_edit_is_a_dot_and_every_filler_a_row(tmp_path: Path) -> None:
    drawn = picture(write_placebo(tmp_path / "x", metrics=["solution", "contrast", "pass@1"]))
    panels = drawn.figure.axes
    assert [axes.get_title().split("\n")[0] for axes in panels] == ["solution", "contrast", "pass@1"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        "40 edits",
        "their mean",
        "mless",
        "mful",
        "random",
    ]
    assert panels[2].get_xlabel() == "Δ points against none"
    for axes in panels:
        dots = [line for line in axes.lines if line.get_marker() != "None" and place(line)[1] < 0]
        assert len(dots) == 40
        assert len(set(map(place, dots))) == 40
    legend = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert legend == [kind.what for kind in EDITS.values()]
    assert "n = 60 items × 40 edits" in drawn.description


def test_folders_are_rows_of_panels(tmp_path: Path) -> None:
    paths = [write_placebo(tmp_path / "a"), write_placebo(tmp_path / "b", label="Other", edits=8, seed=2)]
    drawn = picture(*paths)
    assert len(drawn.figure.axes) == 4
    assert drawn.figure.axes[2].get_title().startswith("Other on gsm8k\n")
    assert drawn.figure.axes[2].get_yticklabels()[0].get_text() == "8 edits"


def test_a_mark_is_filled_where_a_filler_is_told_apart(tmp_path: Path) -> None:
    drawn = picture(write_placebo(tmp_path / "x", metrics=["solution"], specific=(6.0, 0.0, 0.0)))
    faces = [
        line.get_markerfacecolor()
        for line in drawn.figure.axes[0].lines
        if line.get_marker() == "o" and place(line)[1] > 1
    ]
    assert faces == [style.VERMILLION, "white", "white"]


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    path = write_placebo(tmp_path / "x", edits=5, items=4)
    first, second = (draw(SPEC, [path], out=tmp_path / name, formats=["png", "svg"]) for name in ("one", "two"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"holds no fillers among arbitrary edits: its study measured attention"):
        picture(write_folder(tmp_path / "x"))
