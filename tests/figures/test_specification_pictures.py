"""The specification curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mless.errors import BadFolder
from mless.figures import draw, style
from mless.figures.specification import specification_of
from mless.results.figure_kinds import Drawing
from mless.values import FigureSpec
from specified_folders import write_multiverse
from synthetic import write_folder

SPEC = FigureSpec("specification", "specification")


def picture(*paths: Path) -> style.Picture:
    with style.applied():
        return specification_of(Drawing(SPEC, list(paths)))


def test_a_curve_above_a_matrix_of_the_settings(tmp_path: Path) -> None:
    drawn = picture(write_multiverse(tmp_path / "x"))
    curve, matrix, *rest = drawn.figure.axes
    assert len(rest) == 2
    assert curve.get_title() == "mless: solution\nrises in 6 of 12, drops in 0"
    heights = [float(np.asarray(line.get_ydata())[0]) for line in curve.lines if line.get_linestyle() == "None"]
    assert len(heights) == 12
    assert heights == sorted(heights)
    labels = [tick.get_text().strip() for tick in matrix.get_yticklabels()]
    assert labels == [
        "template",
        "chat",
        "raw",
        "system text",
        "study",
        "helpful",
        "none",
        "dtype",
        "float32",
        "bfloat16",
    ]
    dots = [line for line in matrix.lines if line.get_marker() == "s"]
    assert len(dots) == 12 * 3  # a dot for each setting of each specification
    # the rows of the template chat are those that rise
    chat = sorted(
        float(np.asarray(line.get_xdata())[0]) for line in dots if float(np.asarray(line.get_ydata())[0]) == 1
    )
    assert chat == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    assert "6 left out" in drawn.description
    assert "The same in all: engine hf." in drawn.description


def test_conditions_and_folders_lie_below_each_other(tmp_path: Path) -> None:
    one = write_multiverse(tmp_path / "a", conditions=["mless", "mful"], metrics=["solution"])
    other = write_multiverse(tmp_path / "b", label="Other", metrics=["pass@1"], extraction=["task"], grader=["numeric"])
    drawn = picture(one, other)
    assert [axes.get_title().split("\n")[0] for axes in drawn.figure.axes[::2]] == [
        "SmolLM2-135M-Instruct on gsm8k, mless: solution",
        "SmolLM2-135M-Instruct on gsm8k, mful: solution",
        "Other on gsm8k, mless: pass@1",
    ]
    assert drawn.figure.axes[4].get_ylabel() == "Δ points"


def test_one_specification_has_no_matrix(tmp_path: Path) -> None:
    path = write_multiverse(tmp_path / "x", template=["chat"], system=["none"], dtype=["float32"], metrics=["solution"])
    drawn = picture(path)
    assert [text.get_text() for text in drawn.figure.axes[1].texts] == ["one specification"]


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    path = write_multiverse(tmp_path / "x", items=10)
    first, second = (draw(SPEC, [path], out=tmp_path / name, formats=["png", "svg"]) for name in ("one", "two"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"holds no specifications: its study measured attention"):
        picture(write_folder(tmp_path / "x"))
