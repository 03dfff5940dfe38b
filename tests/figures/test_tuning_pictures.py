"""fig12 and table 9 from what `mless tune` leaves: which cells, which is framed, what is marked, and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from mless.errors import BadFolder
from mless.figures import draw, style
from mless.figures.tables import write_tables
from mless.figures.tuned import parameters_table
from mless.figures.tuning import draw_sensitivity, grids_of
from mless.results.answers import StoredTuning
from mless.values import ARM_PRESETS, ArmSettings, FigureSpec
from synthetic import write_answers, write_folder, write_tuning


def grid(
    cs: Sequence[float] = (0.05, 0.13), p1s: Sequence[float] = (90.0, 99.5)
) -> list[tuple[ArmSettings, float, float]]:
    return [
        (ArmSettings(c=c, p1=p1), 0.01 * n - 0.01, 0.02 if n == 0 else 1.0)
        for n, (c, p1) in enumerate((c, p) for c in cs for p in p1s)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bounds = [
        (ArmSettings(c=0.05, p1=90.0, p_min=low, p_max=high), 0.02, 1.0) for low, high in ((0.02, 0.5), (0.1, 0.5))
    ]
    return write_tuning(tmp_path / "tuned", [*grid(), *bounds])


def test_the_panels_are_c_by_p1_and_the_bounds(folder: Path):
    found = grids_of(StoredTuning.open(folder))
    assert [(grid.down, grid.across) for grid in found] == [("c", "p1 (percentile)"), ("p_min", "p_max")]
    assert found[0].values == ([0.05, 0.13], [90.0, 99.5])
    # the centre belongs to both; (0.1, 0.25) was not tried
    assert found[1].values == ([0.02, 0.1], [0.25, 0.5])
    assert set(found[1].cells) == {(0.02, 0.25), (0.02, 0.5), (0.1, 0.5)}


def test_layers_and_fractions_have_panels_of_their_own(tmp_path: Path):
    more = [(ArmSettings(fraction=f, p1=90.0, layers=(2, 3)), 0.0, 1.0) for f in (0.1, 0.25)]
    found = grids_of(StoredTuning.open(write_tuning(tmp_path / "t", [*grid(), *more])))
    assert [grid.title for grid in found] == ["c and p1, layer 1", "fraction and p1, layers 2–3"]


def test_settings_that_differ_in_rule_scope_or_seed_have_panels_of_their_own(tmp_path: Path):
    other = [
        (ArmSettings(c=0.05, p1=90.0, rule="add"), 0.01, 1.0),
        (ArmSettings(c=0.13, p1=90.0, rule="add"), 0.02, 1.0),
        (ArmSettings(c=0.05, p1=90.0, scope="sequence"), 0.03, 1.0),
        (ArmSettings(c=0.05, p1=90.0, seed=3), 0.04, 1.0),
        (ArmSettings(c=0.32, p1=85.0, p_max=0.4), 0.05, 1.0),
    ]
    found = grids_of(StoredTuning.open(write_tuning(tmp_path / "t", [*grid(), *other])))
    # each setting once, under its own Δ
    assert sorted(row.condition for one in found for row in one.cells.values()) == [f"s{n}" for n in range(1, 10)]
    assert [(one.title, len(one.cells)) for one in found] == [
        ("c and p1, layer 1", 4),
        ("c and p1, layer 1, rule add", 2),
        ("c and p1, layer 1, scope sequence", 1),
        ("c and p1, layer 1, seed 3", 1),
        ("bounds of the share, at c 0.32, p1 85, layer 1", 1),
    ]


def test_a_cell_shows_the_last_rung_its_setting_was_in(tmp_path: Path):
    found = grids_of(StoredTuning.open(write_tuning(tmp_path / "t", grid(), rungs=2)))
    assert {key: row.n for key, row in found[0].cells.items()} == {
        (0.05, 90.0): 80, (0.05, 99.5): 80, (0.13, 90.0): 40, (0.13, 99.5): 40,
    }  # fmt: skip


def test_the_picture_frames_the_choice_marks_what_is_sure_and_says_the_baseline(folder: Path):
    with style.applied():
        picture = draw_sensitivity([folder])
    panels = picture.figure.axes
    texts = [text.get_text() for panel in panels for text in panel.texts]
    assert "−1.0*" in texts  # the one whose p after Holm is 0.02
    assert "0.0" in texts
    assert sum("*" in text for text in texts) == 2  # it stands in both panels
    frames = [
        patch
        for panel in panels[:2]
        for patch in panel.patches
        if isinstance(patch, Rectangle) and not patch.get_fill()
    ]
    assert len(frames) == 2
    assert any("55.0 % of 40 dev items" in panel.get_ylabel() for panel in panels)
    assert "6 settings" in picture.description
    assert (
        "on the 60 test items Δ +5.0 points [−4.0, +14.0], p = 0.31 (one comparison): undecided" in picture.description
    )


def test_the_same_folder_gives_the_same_bytes(folder: Path, tmp_path: Path):
    spec = FigureSpec("fig12", "sensitivity")
    first, second = (draw(spec, [folder], formats=["svg"], out=tmp_path / name)[0] for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size > 5000


def test_table9_puts_the_chosen_below_the_published(tmp_path: Path):
    here = write_tuning(tmp_path / "a", grid(), label="Qwen2.5-Math-7B", task="math500")
    other = write_tuning(tmp_path / "b", [(ArmSettings(fraction=0.1, p1=85.0), 0.1, 1.0)])
    table, _ = parameters_table([here, other])
    rows = [[cell.text for cell in row] for row in table.rows]
    assert [(row[0], row[1]) for row in rows][1:4] == [
        ("qwen2.5-math-7b", "published"), ("Qwen2.5-Math-7B", "chosen here"), ("qwen2.5-7b-instruct", "published"),
    ]  # fmt: skip
    assert len(rows) == len(ARM_PRESETS) + 2
    assert rows[2][3:9] == ["0.05", "–", "0.02", "0.25", "90", "1"]
    assert rows[2][9:] == ["4", "40", "−1.0", "60", "+5.0 [−4.0, +14.0]", "0.31", "undecided"]
    assert rows[-1][3:6] == ["–", "0.1", "–"]  # a fraction has no bounds
    written = write_tables("table9", [here, other], tmp_path / "out")
    assert [path.name for path in written] == ["table9.md", "table9.csv", "table9.tex"]
    digits = list(csv.DictReader(written[1].read_text().splitlines()))
    assert digits[2]["dev_delta"] == "-0.01"
    assert digits[2]["test_p"] == "0.31"
    assert digits[0]["dev_delta"] == ""


def test_other_folders_are_refused_with_the_way_out(folder: Path, tmp_path: Path):
    answers = write_answers(tmp_path / "answers", items=20)
    with pytest.raises(BadFolder, match=r"holds no tuning of ARM's parameters; `mless tune --out …`"):
        draw(FigureSpec("fig12", "sensitivity"), [answers])
    with pytest.raises(BadFolder, match=r"holds no tuning"):
        write_tables("table9", [write_folder(tmp_path / "attention", items=3)], tmp_path)
    with pytest.raises(BadFolder, match=r"holds a tuning, whose answers lie in folders of their own; give .*test"):
        write_tables("table2", [folder], tmp_path)
    unfinished = write_tuning(tmp_path / "unfinished", grid(), complete=False)
    with pytest.raises(BadFolder, match=r"its tuning is not finished"):
        draw(FigureSpec("fig12", "sensitivity"), [unfinished])
    assert json.loads((folder / "study.json").read_text())["complete"]
