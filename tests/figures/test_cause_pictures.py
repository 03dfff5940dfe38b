"""The pictures of what a filler's effect is made of: ladder, map and chain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection, QuadMesh
from matplotlib.lines import Line2D

from cause_folders import write_cause
from mless.errors import BadFolder
from mless.figures import draw, style
from mless.figures.cause import cause_of, chain_of, ladder_of
from mless.results.caused import StoredCause, shown_at
from mless.results.figure_kinds import FIGURES, Drawing
from mless.results.folder import ResultFolder
from mless.results.nats import signed
from mless.values import FigureSpec
from synthetic import write_folder

KINDS: dict[str, Callable[[Drawing], style.Picture]] = {"ladder": ladder_of, "cause": cause_of, "chain": chain_of}


def picture(kind: str, *paths: Path) -> style.Picture:
    with style.applied():
        return KINDS[kind](Drawing(FigureSpec(kind, kind), list(paths)))


def marks(axes: Axes, marker: str | None = None) -> list[Line2D]:
    return [
        line
        for line in axes.lines
        if line.get_linestyle() == "None" and line.get_marker() != "None" and (marker in (None, line.get_marker()))
    ]


def place(line: Line2D) -> tuple[float, float]:
    x, y = np.asarray(line.get_xydata())[0]
    return float(x), float(y)


def names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def words(drawn: style.Picture) -> str:
    """All that is written in a picture."""
    return " ".join(text.get_text() for text in drawn.figure.findobj(lambda one: hasattr(one, "get_text")))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownLambdaType, reportUnknownVariableType, reportUnknownMemberType]


def share_grid(axes: Axes) -> np.ma.MaskedArray[Any, Any]:
    [mesh] = [one for one in axes.collections if isinstance(one, QuadMesh)]
    found = mesh.get_array()
    assert found is not None
    return np.ma.asarray(found)


# ---- ladder ----------------------------------------------------------------------------------------------------------


def test_every_rung_and_every_change_is_a_mark_with_its_number(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", metrics=("solution", "contrast", "pass@1"), layers=2)
    drawn = picture("ladder", path)
    panels = drawn.figure.axes
    assert [axes.get_title() for axes in panels] == ["solution", "contrast", "pass@1"]
    assert names(panels[0]) == [
        "change against none", "positions moved, no filler", "filler there, seen by nobody", "seen by the question only", "seen by the answer only",
        "seen by all", "seen by all is the sum of", "positions move", "a filler is there, unseen", "the question sees it", "the answer sees it",
        "what does not add up",
    ]  # fmt: skip
    assert panels[2].get_xlabel() == "Δ points"
    steps = [row for row in StoredCause.open(path).steps() if row.metric == "contrast"]
    rungs = [place(line)[0] for line in marks(panels[1], "D")]
    assert rungs == [row.delta for row in steps if row.against == "none"]
    changes = [place(line)[0] for line in marks(panels[1], "o")]
    assert changes == [row.delta for row in steps if row.adds_up]
    assert sum(changes) == pytest.approx(rungs[-1])
    assert "n = 40 items" in drawn.description


def test_a_change_is_filled_where_it_is_shown(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", metrics=("contrast",), layers=1)
    faces = [line.get_markerfacecolor() for line in marks(picture("ladder", path).figure.axes[0], "o")]
    shown = [shown_at(row.p_adjusted) for row in StoredCause.open(path).steps() if row.adds_up]
    assert set(shown) == {True, False}
    assert faces == [style.VERMILLION if one else "white" for one in shown]


# ---- map -------------------------------------------------------------------------------------------------------------


def test_the_map_has_a_cell_for_every_layer_and_part_in_both_directions(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", layers=12)
    drawn = picture("cause", path)
    panels = [axes for axes in drawn.figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [
        "solution: put in", "solution: taken out", "contrast: put in", "contrast: taken out",
    ]  # fmt: skip
    assert names(panels[0]) == ["attention output", "MLP output", "residual stream"]
    stored = StoredCause.open(path).cells()
    for axes, (metric, way) in zip(
        panels, [("solution", "in"), ("solution", "out"), ("contrast", "in"), ("contrast", "out")], strict=True
    ):
        own = {(cell.part, cell.layer): cell for cell in stored if (cell.metric, cell.direction) == (metric, way)}
        expected = [
            [own[part, layer].share for layer in range(1, 13)] for part in ("attention-output", "mlp-output", "residual")
        ]  # fmt: skip
        assert share_grid(axes).tolist() == expected
        assert len(marks(axes, "o")) == sum(shown_at(cell.p_adjusted) for cell in own.values()) > 0
    assert "colours end at −100 % and 100 %" in words(drawn)


def test_colours_end_earlier_where_every_share_is_small(tmp_path: Path) -> None:
    drawn = picture("cause", write_cause(tmp_path / "x", layers=1, seed=3))
    assert "colours end at −50 % and 50 %" in words(drawn)
    assert share_grid(drawn.figure.axes[0]).shape == (3, 1)


def test_a_map_without_an_effect_is_hatched_and_says_so(tmp_path: Path) -> None:
    drawn = picture("cause", write_cause(tmp_path / "x", whole=0.0, layers=4, metrics=("contrast",)))
    panels = [axes for axes in drawn.figure.axes if axes.get_title()]
    for axes in panels:
        assert bool(np.ma.getmaskarray(share_grid(axes)).all())
        [hatched] = [one for one in axes.collections if isinstance(one, PatchCollection)]
        assert len(hatched.get_paths()) == 12
        assert hatched.get_hatch()
        assert "no share is known: the whole" in axes.texts[0].get_text()
    assert "Hatched: the whole effect's interval holds 0, so no share is known." in drawn.description


def test_heads_are_rows_of_their_own(tmp_path: Path) -> None:
    drawn = picture("cause", write_cause(tmp_path / "x", heads=(1, 2, 3), layers=6, metrics=("contrast",)))
    axes = drawn.figure.axes[0]
    assert names(axes)[:4] == [
        "attention output, head 1", "attention output, head 2", "attention output, head 3", "MLP output",
    ]  # fmt: skip
    assert share_grid(axes)[1, 2] > 0.5 > abs(float(share_grid(axes)[0, 2]))
    assert "Grey: not measured." not in drawn.description


def test_eighty_layers_lie_below_each_other_with_few_numbers(tmp_path: Path) -> None:
    drawn = picture("cause", write_cause(tmp_path / "x", layers=80, items=12, metrics=("contrast",)))
    above, below = [axes for axes in drawn.figure.axes if axes.get_title()]
    assert above.get_subplotspec().rowspan.start < below.get_subplotspec().rowspan.start  # pyright: ignore[reportOptionalMemberAccess]
    numbers = [label.get_text() for label in above.get_xticklabels()]
    assert (numbers[0], numbers[-1]) == ("1", "80")
    assert 10 < len(numbers) < 30


def test_keys_and_values_have_another_base_and_it_is_said(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", layers=2, parts=("residual", "keys-values"))
    assert "against none, for keys and values against positions moved." in picture("cause", path).description
    only = write_cause(tmp_path / "y", layers=2, parts=("keys-values",))
    assert "Shares are of the effect against positions moved." in picture("cause", only).description


# ---- chain -----------------------------------------------------------------------------------------------------------


def test_the_chain_has_three_numbers_in_both_directions_and_arm_beside(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", layers=1, metrics=("contrast",))
    drawn = picture("chain", path)
    axes = drawn.figure.axes[0]
    assert names(axes) == [
        "through layer 1's attention output", "through the first MLP's activation", "elsewhere", "ARM in layer 1, to compare",
    ]  # fmt: skip
    links = [row for row in StoredCause.open(path).links() if row.link != "both"]
    assert len(links) == 7
    for way, marker in (("in", "o"), ("out", "s")):
        assert {place(line)[0] for line in marks(axes, marker)} == {row.share for row in links if row.direction == way}
    filled = [line.get_markerfacecolor() != "white" for line in marks(axes)]
    assert filled == [shown_at(row.p) for row in links]
    assert "Elsewhere: what is left when both parts are patched at once." in drawn.description
    [note] = [row.note for row in links if row.link == "arm"]
    assert note
    assert f"{note}." in drawn.description
    assert "by 0.42 (root mean square) with the filler, by 0.31 with ARM" in drawn.description


def test_a_chain_without_an_effect_is_blank_and_says_so(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", whole=0.0, layers=1, metrics=("contrast",))
    drawn = picture("chain", path)
    axes = drawn.figure.axes[0]
    assert marks(axes) == []
    [whole] = [row.delta for row in StoredCause.open(path).steps() if row.step == "all"]
    said = axes.texts[0].get_text().replace("\n", " ")
    assert said.startswith(f"no share is known: the whole effect, {signed(whole, 'contrast')} [")
    assert "Blank: the whole effect's interval holds 0" in drawn.description


def test_a_model_without_activations_to_patch_says_where_they_are_counted(tmp_path: Path) -> None:
    drawn = picture("chain", write_cause(tmp_path / "x", layers=1, activation=False, metrics=("contrast",)))
    assert names(drawn.figure.axes[0]) == ["through layer 1's attention output", "elsewhere"]
    assert "MLP activation cannot be patched, so elsewhere holds it too" in drawn.description


def test_a_share_beyond_the_edge_is_an_arrow_and_it_is_said(tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", layers=1, metrics=("contrast",))
    change(path, "chain", share=9.0, share_lo=-7.0, share_hi=20.0)
    drawn = picture("chain", path)
    axes = drawn.figure.axes[0]
    assert len(marks(axes, ">")) == 7
    assert axes.get_xlim()[1] < 3
    assert "900 %" in words(drawn)
    assert "What lies beyond the edges is cut." in drawn.description


# ---- all three -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_folders_lie_below_each_other(kind: str, tmp_path: Path) -> None:
    paths = [
        write_cause(tmp_path / "a", layers=2, metrics=("contrast",)),
        write_cause(tmp_path / "b", layers=3, metrics=("solution", "contrast"), label="Other", whole=0.0),
    ]
    drawn = picture(kind, *paths)
    titles = [axes.get_title().split("\n")[0] for axes in drawn.figure.axes if "\n" in axes.get_title()]
    assert list(dict.fromkeys(titles)) == ["SmolLM2-135M-Instruct on gsm8k", "Other on gsm8k"]
    assert "Other on gsm8k, filler mless" in drawn.description


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_cannot_be_drawn_are_escaped_and_cut(kind: str, tmp_path: Path) -> None:
    label = "<b>\u202e$x_1$\n" + "a long name " * 40
    paths = [write_cause(tmp_path / name, layers=2, label=label) for name in ("a", "b")]
    with style.applied():
        drawn = KINDS[kind](Drawing(FigureSpec(kind, kind), paths))
        style.settle(drawn)
        assert style.render(drawn, "svg")
    assert "\\u202e$x_1$\\na long" in drawn.title
    titles = [axes.get_title().split("\n")[0] for axes in drawn.figure.axes if "\n" in axes.get_title()]
    assert titles
    assert all(title.endswith("…") and "\u202e" not in title for title in titles)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_folder_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", layers=3, items=9)
    first, second = (
        draw(FigureSpec(kind, kind), [path], out=tmp_path / name, formats=["png", "svg"]) for name in ("one", "two")
    )
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


@pytest.mark.parametrize("kind", KINDS)
def test_another_folder_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"its study measured attention; `mless run cause --out …` makes a folder"):
        picture(kind, write_folder(tmp_path / "x"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_table_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", layers=1)
    change(path, kind, keep=0)
    with pytest.raises(BadFolder, match=rf"{kind}\.parquet has no rows; expected at least one; .*run the study again"):
        picture(kind, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_that_nobody_knows_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = write_cause(tmp_path / "x", layers=1, metrics=("contrast",))
    change(path, kind, metric="nonsense")
    with pytest.raises(BadFolder, match=rf"{kind}\.parquet .*'nonsense'"):
        picture(kind, path)


def test_the_table_of_kinds_finds_them() -> None:
    assert {kind: FIGURES.get(kind).function() for kind in KINDS} == KINDS


def change(path: Path, table: str, keep: int | None = None, **columns: float | str) -> None:
    """Write a table of the folder anew, with its first rows only or with these values in every row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = ResultFolder(path)
    about = folder.about()
    assert about is not None
    rows = pq.read_table(path / f"{table}.parquet")
    made = pa.Table.from_pylist([row | columns for row in rows.to_pylist()][:keep], rows.schema)
    with folder.writing():
        folder.write_table(table, made)
        folder.write_manifest(about)
