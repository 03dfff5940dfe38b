"""The forest of models and its tables: what they show, hostile names, one model, two models, and the same bytes every time."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from test_accuracy_tables import cells, check_latex

from mless.figures import compared, draw
from mless.figures.compared import Digits, content_of, csv_of, lines_of, table_of
from mless.figures.forest import draw_forest, write_comparison
from mless.figures.style import applied
from mless.figures.tabular import latex, markdown
from mless.results.comparing import Comparison, compare
from mless.values import FigureSpec
from several_models import answered, likelihoods

HOSTILE = "[\x07100%] of A_B & C# {x} \\y ~ ^ $z$ | <i> `q` 模 **b** \u202e"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("answers")
    return [answered(root, f"model-{n}", n) for n in range(5)]


@pytest.fixture(scope="module")
def found(paths: list[Path]) -> Comparison:
    return compare(paths, conditions=["mful"], by=["activation", "size"])


def texts(comparison: Comparison) -> list[str]:
    with applied():
        figure = draw_forest(comparison).figure
        return [text.get_text() for axes in figure.axes for text in (*axes.get_yticklabels(), axes.xaxis.label)]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_have_the_decimals_their_intervals_deserve(tmp_path: Path):
    def digits(half: float, number: int) -> Digits:
        rows = [{"condition": "mless", "metric": "solution", "n": 40, "delta": 0.1, "lo": 0.1 - half, "hi": 0.1 + half}]
        return Digits.of(compare([likelihoods(tmp_path / str(number), rows)]))

    assert [digits(half, n).number(0.1) for n, half in enumerate((0.5, 0.03, 0.0012, 1e-9))] == [
        "+0.10",
        "+0.100",
        "+0.1000",
        "+0.100000",
    ]
    one = digits(0.03, 9)
    assert [one.number(value) for value in (-0.1234, 0.0, -0.0001, math.nan)] == ["−0.123", "0.000", "0.000", "–"]
    assert one.effect(0.1, 0.05, 0.15) == "+0.100 [+0.050, +0.150]"
    assert one.effect(0.1, math.nan, math.nan) == "+0.100"


def test_the_words(found: Comparison):
    lines = lines_of(found)
    assert lines[0] == "Δ pass@1 (points), against none: 5 models, 60 items of arithmetic-1"
    pooled = found.blocks[0].pooled
    assert re.fullmatch(r"mful: mean −\d+\.\d \[−\d+\.\d, [−+]?\d+\.\d\], p [<=] 0\.\d+", lines[1])
    assert f"{100 * pooled.mean:.1f}".replace("-", "−") in lines[1]
    assert f"τ² = {10_000 * pooled.tau2:.3g}" in lines[2]  # in points
    assert "I² = " in lines[2]
    assert "a further model: [" in lines[2]
    assert re.search(r"by activation: SiLU .* \(3\), GELU .* \(2\); p = ", lines[3])
    assert re.search(r"by size: −\d.* \[.*\] for every tenfold size; p ", lines[4])


def test_a_share_of_nearly_all_is_not_all():
    assert [compared._share_words(value) for value in (0.0, 0.004, 0.5, 0.998, 1.0)] == [  # pyright: ignore[reportPrivateUsage]
        "I² = 0 %", "I² < 1 %", "I² = 50 %", "I² > 99 %", "I² = 100 %",
    ]  # fmt: skip


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_the_table(found: Comparison):
    table = table_of(found)
    assert table.heads == ("model", "activation", "size", "items", "Δ pass@1 (points)", "weight, %")
    rows = [[cell.text for cell in row] for row in table.rows]
    assert [row[0] for row in rows] == [
        *(f"model-{n}" for n in range(5)), "mean of 5 models", "a further model", "activation SiLU (3 models)", "activation GELU (2 models)",
    ]  # fmt: skip
    assert [row[1] for row in rows[:5]] == ["SiLU", "GELU"] * 2 + ["SiLU"]
    assert [row[2] for row in rows[:5]] == ["10M", "100M", "1B", "10B", "100B"]
    assert sum(float(row[-1]) for row in rows[:5]) == pytest.approx(100, abs=0.3)
    assert all(cell.marked for cell in (table.rows[5][0], table.rows[5][4]))
    body = cells(markdown(table))
    assert len(body) == 1 + len(rows)
    assert len({len(line) for line in body}) == 1
    assert body[6][0] == "**mean of 5 models**"


def test_the_numbers_with_every_digit(found: Comparison):
    rows = list(csv.DictReader(io.StringIO(csv_of(found))))
    models = [row for row in rows if row["row"] == "model"]
    assert [float(row["value"]) for row in models] == [row.reading.value for row in found.blocks[0].rows]
    assert [row["label"] for row in models] == [f"model-{n}" for n in range(5)]
    [mean] = [row for row in rows if row["row"] == "mean"]
    pooled = found.blocks[0].pooled
    for name in ("lo", "hi", "p", "tau2", "tau2_lo", "tau2_hi", "i2", "q_p", "predicted_lo"):
        assert float(mean[name]) == getattr(pooled, name)
    assert float(mean["value"]) == pooled.mean
    assert [row["label"] for row in rows if row["row"] == "kind"] == ["activation SiLU", "activation GELU"]
    [slope] = [row for row in rows if row["row"] == "slope"]
    assert float(slope["value"]) == found.blocks[0].by["size"].slope
    assert content_of(found)["rows"][0]["label"] == "model-0"


def test_several_conditions_have_a_column(paths: list[Path]):
    table = table_of(compare(paths, conditions=["all"]))
    assert table.heads[:2] == ("condition", "model")
    assert [row[0].text for row in table.rows] == ["mless"] * 7 + ["mful"] * 7 + ["random"] * 7


def test_hostile_names_break_nothing(tmp_path: Path):
    (tmp_path / "a").mkdir()
    paths = [answered(tmp_path / "a", f"{HOSTILE} {n}", n, items=30, task="t_1%") for n in range(3)]
    file = tmp_path / "models.csv"
    rows = "".join(f'"{HOSTILE.replace(chr(34), chr(34) * 2)} {n}",{"|&%_"[n]}\n' for n in range(3))
    file.write_text(f"model,<b>\n{rows}", encoding="utf-8")
    found = compare(paths, conditions=["all"], by=["<b>"], models=file)
    written = {path.name: path for path in write_comparison(found, tmp_path / "out")}
    assert set(written) == {"compare.md", "compare.csv", "compare.tex", "forest.png", "forest.svg"}
    body = cells(written["compare.md"].read_text(encoding="utf-8"))
    assert len({len(line) for line in body}) == 1
    text = written["compare.md"].read_text(encoding="utf-8")
    assert "<i>" not in text.replace("\\<i\\>", "")
    assert "\x07" not in text
    assert "\u202e" not in text
    tex = written["compare.tex"].read_text(encoding="utf-8")
    check_latex(tex.replace(r"$\tau$$^{2}$", "").replace(r"$^{2}$", "").replace(r"\tau", ""))
    with (written["compare.csv"]).open(encoding="utf-8", newline="") as stream:
        labels = {row["label"] for row in csv.DictReader(stream) if row["row"] == "model"}
    assert labels == {f"{HOSTILE} {n}" for n in range(3)}  # in data nothing is escaped
    svg = written["forest.svg"].read_text(encoding="utf-8")
    assert "\x07" not in svg
    assert "\\x07" in svg
    assert not [text for text in texts(found) if "\x07" in text or "\u202e" in text]


def test_greek_letters_are_printed_by_latex(paths: list[Path], found: Comparison):
    text = latex(table_of(found), "compare")
    assert r"$\tau$$^{2}$ = " in text
    assert text.isascii()


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_names_every_line(found: Comparison):
    shown = texts(found)
    # models of a kind stand together, then their mean
    left = [text for text in shown if text.startswith(("model-", "SiLU", "GELU", "mean", "a further"))]
    assert left == [
        "model-0", "model-2", "model-4", "SiLU, mean of 3", "model-1", "model-3", "GELU, mean of 2", "mean of 5 models", "a further model",
    ]  # fmt: skip
    digits, pooled = Digits.of(found), found.blocks[0].pooled
    assert digits.effect(pooled.mean, pooled.lo, pooled.hi) in shown
    assert "Δ pass@1 (points)" in shown


def test_the_picture_shows_the_numbers(found: Comparison):
    """Marks lie at the effects, the diamond spans the mean's interval, and everything lies inside the axes."""
    with applied():
        axes = draw_forest(found).figure.axes[0]
    middle = [100 * row.reading.value for row in found.blocks[0].rows]
    drawn = [float(line.get_xdata()[0]) for line in axes.get_lines() if line.get_marker() == "s"]
    assert sorted(drawn) == pytest.approx(sorted(middle))
    sizes = {float(line.get_xdata()[0]): line.get_markersize() for line in axes.get_lines() if line.get_marker() == "s"}
    by_weight = sorted(found.blocks[0].rows, key=lambda row: row.weight)
    assert sizes[100 * by_weight[0].reading.value] < sizes[100 * by_weight[-1].reading.value]
    pooled = found.blocks[0].pooled
    corners = [patch.get_xy()[:, 0] for patch in axes.patches]
    assert any([min(xs), max(xs)] == pytest.approx([100 * pooled.lo, 100 * pooled.hi]) for xs in corners)
    low, high = axes.get_xlim()
    every = [100 * end for row in found.blocks[0].rows for end in (row.reading.lo, row.reading.hi)]
    assert low < min([0.0, *every, 100 * pooled.predicted_lo])
    assert high > max([0.0, *every, 100 * pooled.predicted_hi])


def test_a_property_with_the_name_of_a_column_does_not_replace_it(paths: list[Path], tmp_path: Path):
    models = tmp_path / "models.csv"
    models.write_text("model,weight\n" + "".join(f"model-{n},{('heavy', 'light')[n % 2]}\n" for n in range(5)))
    comparison = compare(paths, conditions=["mful"], by=["weight"], models=models)
    rows = [row for row in csv.DictReader(io.StringIO(csv_of(comparison))) if row["row"] == "model"]
    assert sum(float(row["weight"]) for row in rows) == pytest.approx(1)
    assert {row["by weight"] for row in rows} == {"heavy", "light"}


def ratio(root: Path, number: int, **numbers: Any) -> Path:
    rows = [{"condition": name, "metric": "kl", "n": 40, **numbers} for name in ("mless", "mful")]
    return likelihoods(root / str(number), rows, label=f"m{number}")


def test_one_model_is_a_row_a_condition(tmp_path: Path):
    found = compare([ratio(tmp_path, 1, delta=0.1, lo=0.05, hi=0.15)], conditions=["all"])
    assert [text for text in texts(found) if text][:2] == ["Mless", "Mful"]
    assert not [text for text in texts(found) if "mean" in text]
    assert lines_of(found)[-1] == "One model says nothing of others; give the folders of more."
    assert len(table_of(found).rows) == 2
    assert "One model says nothing of others" in table_of(found).caption


def test_two_models_predict_nothing(tmp_path: Path):
    found = compare(
        [ratio(tmp_path, n, delta=0.1 * n, lo=0.1 * n - 0.05, hi=0.1 * n + 0.05) for n in (1, 2)], by=["name"]
    )
    lines = lines_of(found)
    assert "two models predict no further one" in lines[2]
    assert lines[3].endswith("too few models for a test")
    assert lines[-1] == "Two models leave one degree of freedom, so the interval of their mean is wide."
    assert not [text for text in texts(found) if "further" in text]
    assert not [row for row in table_of(found).rows if row[0].text.startswith("name ")]


def test_the_kind_of_figure_and_the_same_bytes(paths: list[Path], tmp_path: Path):
    spec = FigureSpec("forest", "forest", (), ("none", "mful"))
    first = draw(spec, paths, out=tmp_path / "1", formats=("png", "svg", "pdf"))
    second = write_comparison(compare(paths, conditions=["mful"]), tmp_path / "2", ("png", "svg", "pdf"))
    for path in first:
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()
    assert {path.name for path in second} >= {"forest.png", "forest.svg", "forest.pdf"}
