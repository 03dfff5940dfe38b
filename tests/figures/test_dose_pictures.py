"""The picture of fillers by length and place."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dose_folders import write_dose
from mless.errors import BadFolder
from mless.figures import draw, style
from mless.figures.dose import dose_of
from mless.results.figure_kinds import Drawing
from mless.values import FigureSpec
from synthetic import write_folder

SPEC = FigureSpec("dose", "dose")


def picture(*paths: Path) -> style.Picture:
    with style.applied():
        return dose_of(Drawing(SPEC, list(paths)))


def test_a_panel_for_each_filler_and_a_line_for_each_placement(tmp_path: Path) -> None:
    drawn = picture(write_dose(tmp_path / "x"))
    panels = drawn.figure.axes
    assert [axes.get_title() for axes in panels] == ["mless", "mful"] * 2
    assert [axes.get_ylabel() for axes in panels[::2]] == ["solution, Δ nats a token", "contrast, Δ nats"]
    lines = [line for line in panels[0].lines if len(np.asarray(line.get_xdata())) == 12]
    assert [line.get_color() for line in lines] == [style.VERMILLION, style.PURPLE]
    for line in lines:
        places = np.asarray(line.get_xydata())
        assert places[0].tolist() == [0.0, 0.0]
        assert places[-1][0] == pytest.approx(math.log2(1001))
    assert "accuracy and not by nats" in drawn.description


def test_folders_lie_below_each_other(tmp_path: Path) -> None:
    one = write_dose(tmp_path / "a", metrics=["choice"])
    other = write_dose(tmp_path / "b", label="Other", fillers=["mless"], most=16, points=3)
    drawn = picture(one, other)
    assert [axes.get_title() for axes in drawn.figure.axes][2:] == ["Other on gsm8k, mless"] * 2
    assert drawn.figure.axes[0].get_ylabel() == "choice, Δ points"
    assert [tick.get_text() for tick in drawn.figure.axes[3].get_xticklabels()] == ["0", "1", "4", "16"]


def test_only_the_chosen_cell_has_a_star(tmp_path: Path) -> None:
    drawn = picture(write_dose(tmp_path / "x", metrics=["solution"]))
    stars = [sum(line.get_marker() == "*" for line in axes.lines) for axes in drawn.figure.axes]
    assert stars == [1, 0]


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    path = write_dose(tmp_path / "x", items=10)
    first, second = (draw(SPEC, [path], out=tmp_path / name, formats=["png", "svg"]) for name in ("one", "two"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"holds no fillers by length: its study measured attention"):
        picture(write_folder(tmp_path / "x"))
