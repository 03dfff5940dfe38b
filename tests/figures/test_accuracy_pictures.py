"""Pictures of answers: the same bytes each time, the A/A control beside every change, and errors that name the way out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mless.errors import BadFolder, BadStudy
from mless.figures import check, draw, style
from mless.figures.sampled import draw_sweep
from mless.results.answers import StoredAnswers, best_on_dev, read_accuracy
from mless.study import available_studies, load_study
from mless.study.conditions import conditions_of
from mless.study.showing import figure_spec
from mless.study.spec import AccuracyTable
from mless.values import Condition, FigureSpec, Panel, counted
from synthetic import write_answers, write_folder

FIVE = ("none", "none-again", "mless", "mful", "random")
LENGTHS = tuple(Condition(f"mless-{n}", "repeat", " /", n) for n in (10, 25, 40, 55, 70))
SWEPT = ("none", "none-again", *(one.name for one in LENGTHS))
BARS = FigureSpec("bars", "bars", (), FIVE)
SWEEP = FigureSpec("fig8", "sweep", (), SWEPT)
DIVERSITY = FigureSpec("fig6", "diversity", (), ("none", "mless"))
FIG10 = FigureSpec("fig10", "conditions", (Panel("Qwen2.5-Math-7B", 1, 3),), ("none", "mless", "mful"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mful makes it much worse, the rest changes little; three items differ in the A/A control."""
    return write_answers(tmp_path_factory.mktemp("answers") / "small", items=90, effects={"mful": -0.4}, noise=3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, the A/A control at zero."""
    path = tmp_path_factory.mktemp("answers") / "llama"
    return write_answers(path, name="llama", label="Llama-3.1-8B-Instruct", items=40, accuracy=0.3, seed=5)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "swept"
    settings = AccuracyTable(dev_share=0.5)
    given = ("none", "none-again", *LENGTHS)
    return write_answers(path, items=80, conditions=given, effects={"mless-40": 0.2}, settings=settings)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "sampled"
    settings = AccuracyTable(samples=4, temperature=0.5, top_p=0.95, k=[1, 3])
    return write_answers(path, items=30, conditions=("none", "none-again", "mless"), settings=settings)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "attention"
    return write_folder(path, label="Qwen2.5-Math-7B", layers=1, heads=4, items=12)


def svg(spec: FigureSpec, folders: list[Path], out: Path, **options: object) -> list[str]:
    [path] = draw(spec, folders, formats=["svg"], out=out, **options)  # pyright: ignore[reportArgumentType]
    return texts(path)


def texts(path: Path) -> list[str]:
    """What stands in the picture as text, line by line."""
    root = ElementTree.parse(path).getroot()
    return ["".join(e.itertext()).replace("\u00a0", " ") for e in root.iter("{http://www.w3.org/2000/svg}text")]


def rows(folder: Path, **wanted: object) -> list[dict[str, object]]:
    found = pq.read_table(folder / "accuracy.parquet").to_pylist()
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


KINDS = ("bars", "sweep", "diversity", "conditions")


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("bars", ["png", "svg"]),
        *((kind, ["svg"]) for kind in KINDS[1:]),
        *(pytest.param(kind, ["png", "svg"], marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_same_input_same_bytes(
    kind: str,
    formats: list[str],
    folder: Path,
    other: Path,
    swept: Path,
    sampled: Path,
    attention: Path,
    tmp_path: Path,
) -> None:
    spec, given = {
        "bars": (BARS, [folder, other]),
        "sweep": (SWEEP, [swept]),
        "diversity": (DIVERSITY, [sampled]),
        "conditions": (FIG10, [folder, attention, other]),
    }[kind]
    first = draw(spec, given, formats=formats, out=tmp_path / "a")
    assert [path.name for path in first] == [f"{spec.id}.{form}" for form in formats]
    for form in formats:  # alone or beside another
        [again] = draw(spec, given, formats=[form], out=tmp_path / "b")
        assert again.read_bytes() == (tmp_path / "a" / again.name).read_bytes()


# ---- bars ----------------------------------------------------------------------------------------------------------------


def test_bars_of_one_model(folder: Path, tmp_path: Path) -> None:
    found = svg(BARS, [folder], tmp_path)
    text = " ".join(found)
    for label in ("w/o", "w/o again", "w/ Mless", "w/ Mful", "Accuracy (%)", "Δ against w/o (points)"):
        assert label in found
    for row in rows(folder):
        assert f"{100 * float(str(row['value'])):.1f}" in found
    [mful] = rows(folder, condition="mful")
    assert mful["verdict"] == "drops"
    assert f"−{-100 * float(str(mful['delta'])):.1f}*" in found
    assert "p < 0.001" in found
    assert "SmolLM2-135M-Instruct on arithmetic-1. n = 90 items" in text
    assert "exact McNemar against none and none again" in text
    [again] = rows(folder, condition="none-again")
    aa = f"{100 * float(str(again['delta'])):+.1f}".replace("-", "−")
    assert f"A/A (w/o again): {aa} points." in text
    assert "engine hf (row-stable, 16 slots)." in text
    assert "Cut off:" in text
    assert "no answer found:" in text


def test_bars_of_two_models_have_a_legend_and_both_controls(folder: Path, other: Path, tmp_path: Path) -> None:
    found = svg(BARS, [folder, other], tmp_path)
    text = " ".join(found)
    assert found.count("w/o") == 1  # in the legend, not under every bar
    assert "SmolLM2-135M-Instruct" in text
    assert "Llama-3.1-8B-Instruct" in text
    assert "n = 90 / 40 items" in text
    assert re.search(r"A/A \(w/o again\): \S+ / 0\.0 points", text)


def test_the_control_is_shown_where_a_figure_does_not_name_it(folder: Path, tmp_path: Path) -> None:
    assert "w/o again" in svg(FigureSpec("f", "bars", (), ("none", "mless")), [folder], tmp_path)


def lossy(path: Path, **shares: tuple[float, float]) -> Path:
    """A folder in which conditions lost so many answers: cut off, no answer."""
    table = pq.read_table(path / "accuracy.parquet")
    rows = table.to_pylist()
    for row in rows:
        row["truncated"], row["no_answer"] = shares.get(row["condition"].replace("-", "_"), (0.0, 0.0))
    pq.write_table(table.from_pylist(rows, table.schema), path / "accuracy.parquet")
    return path


@pytest.mark.parametrize("models", [1, 3])
def test_bars_show_what_each_condition_lost(models: int, tmp_path: Path) -> None:
    paths = [
        lossy(
            write_answers(tmp_path / f"{n}", items=20, label=f"Model {n}", seed=n),
            mless=(0.241, 0.232 + n / 10),
            mful=(0.003, 0.999),
        )
        for n in range(models)
    ]
    found = svg(BARS, paths, tmp_path)
    assert {"cut off %", "no answer %"} <= set(found)
    if models == 1:
        assert {"24.1", "23.2", "0.3", "99.9"} <= set(found)
    else:  # less room
        assert found.count("24") == 3
        assert {"23", "33", "43"} <= set(found)
        assert (found.count("<1"), found.count(">99")) == (3, 3)  # neither nothing nor all


def test_a_rate_that_is_not_known_is_no_zero(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=12)
    table = pq.read_table(path / "accuracy.parquet")
    rows = [{**row, "truncated": None} for row in table.to_pylist()]
    pq.write_table(table.from_pylist(rows, table.schema), path / "accuracy.parquet")
    assert svg(BARS, [path], tmp_path).count("–") >= 5


def test_a_change_of_zero_has_no_sign(other: Path, attention: Path, tmp_path: Path) -> None:
    for found in (svg(BARS, [other], tmp_path), svg(FIG10, [other, attention], tmp_path)):
        assert "0.0" in found
        assert not [text for text in found if re.search(r"[+−-]0\.0\b", text)]


def test_a_run_without_control_says_so(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=20, conditions=("none", "mless"))
    text = " ".join(svg(FigureSpec("f", "bars", (), ("none", "mless")), [path], tmp_path))
    assert "No A/A control was run." in text
    assert "exact McNemar against none, Holm" in text


def test_a_vote_is_named_by_its_metric(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=20, conditions=("none", "none-again", "self-consistency"))
    found = svg(FigureSpec("f", "bars", (), ("none", "self-consistency")), [path], tmp_path)
    assert "(maj@5)" in " ".join(found)


@pytest.mark.parametrize("items", [1, 2])
def test_few_items_are_drawn(items: int, tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=items)
    assert f"n = {counted(items, 'item')}" in " ".join(svg(BARS, [path], tmp_path))


def test_same_model_twice_is_told_apart(folder: Path, tmp_path: Path) -> None:
    twin = write_answers(tmp_path / "chat", items=20)
    found = svg(BARS, [folder, twin], tmp_path)
    assert {"small", "chat"} <= set(found)
    task = write_answers(tmp_path / "task", items=20, task="gsm8k")
    assert {"arithmetic-1", "gsm8k"} <= set(svg(BARS, [folder, task], tmp_path))


def test_odd_names_neither_break_the_picture_nor_its_svg(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=12, label="a<b>&\x07 $x$ 模型", task="t_%<i>")
    text = " ".join(svg(BARS, [path], tmp_path))
    assert "a<b>&\\x07 $x$ \\u6a21" in text
    assert "t_%<i>" in text


def test_many_conditions_keep_their_names(tmp_path: Path) -> None:
    many = [Condition(f"filler-number-{n}", "repeat", f" {n}", 5) for n in range(14)]
    path = write_answers(tmp_path / "r", items=12, conditions=("none", "none-again", *many))
    found = svg(FigureSpec("f", "bars", (), ("none", *(one.name for one in many))), [path], tmp_path)
    assert {one.name for one in many} <= set(found)  # too long to be broken into lines, so they are turned and whole


# ---- by length -------------------------------------------------------------------------------------------------------------


def test_sweep_marks_the_choice_of_dev_and_its_value_on_test(swept: Path, tmp_path: Path) -> None:
    found = svg(SWEEP, [swept], tmp_path)
    text = " ".join(found)
    for tick in ("10", "25", "40", "55", "70", "Filler length (tokens)", "chosen on dev", "on test"):
        assert tick in found
    _, conditions, _ = read_accuracy(swept)
    best = best_on_dev(pq.read_table(swept / "accuracy.parquet"), conditions)
    length = best.condition.removeprefix("mless-")
    [test] = rows(swept, condition=best.condition, split="test", metric="pass@1")
    delta = f"{100 * float(str(test['delta'])):+.1f}".replace("-", "−")
    value, lo, hi = (f"{100 * float(str(test[key])):.1f}" for key in ("value", "lo", "hi"))
    said = f"Chosen on the dev items (n = {best.dev['n']}) out of 5: {length} tokens; on the test items (n = {test['n']}) {value} % [{lo}, {hi}]"
    assert f"{said}, Δ {delta} points" in text
    assert f"(one comparison, not adjusted): {best.verdict}." in text
    assert "Accuracy, dev split (%)" in found
    assert "A/A (w/o again): 0.0 points." in text


def test_sweep_over_all_items_where_nothing_is_chosen(tmp_path: Path) -> None:
    given = ("none", "none-again", *LENGTHS)
    paths = [
        write_answers(tmp_path / label, items=20, conditions=given, label=label, seed=seed)
        for seed, label in enumerate(("Small", "Large"))
    ]
    found = svg(SWEEP, paths, tmp_path)
    assert {"Small", "Large", "Accuracy (%)"} <= set(found)
    assert "chosen on dev" not in found


def test_sweep_shows_what_each_length_lost(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=20, conditions=("none", "none-again", *LENGTHS))
    found = svg(SWEEP, [lossy(path, mless_40=(0.8, 0.4))], tmp_path)
    assert {"cut off", "no answer", "w/o again"} <= set(found)
    assert "Cut off: 0.0–80.0 %; no answer found: 0.0–40.0 %." in " ".join(found)
    with style.applied():
        picture = draw_sweep([StoredAnswers.open(path)], SWEPT)
    _, cut, none = picture.figure.axes
    assert [np.asarray(axes.lines[0].get_ydata()).tolist() for axes in (cut, none)] == [
        [0, 0, 0, 80, 0, 0],
        [0, 0, 0, 40, 0, 0],
    ]  # by length


def test_sweep_needs_lengths(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"a sweep needs none and one filler at two lengths or more .*mless run fig8"):
        draw(FigureSpec("fig8", "sweep", (), FIVE), [folder], out=tmp_path)


# ---- diversity ---------------------------------------------------------------------------------------------------------------


def test_diversity_beside_pass_at_k(sampled: Path, tmp_path: Path) -> None:
    found = svg(DIVERSITY, [sampled], tmp_path)
    assert {"pass@1", "pass@3", "2-gram diversity", "w/o", "w/o again", "w/ Mless"} <= set(found)
    assert "n = 30 items, 4 samples each" in " ".join(found)
    assert "tokens per answer: w/o " in " ".join(found)


def test_diversity_shows_what_each_condition_lost(tmp_path: Path) -> None:
    settings = AccuracyTable(samples=4, temperature=0.5, k=[1, 3])
    path = write_answers(tmp_path / "r", items=12, conditions=("none", "none-again", "mless"), settings=settings)
    found = svg(DIVERSITY, [lossy(path, none=(0.01, 0.02), none_again=(0.03, 0.04), mless=(0.97, 0.98))], tmp_path)
    assert {"cut off", "no answer", "1.0", "2.0", "3.0", "4.0", "97.0", "98.0"} <= set(found)


def test_diversity_needs_samples(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"no diversity in accuracy\.parquet: .*several samples .*accuracy\.samples=4"):
        draw(DIVERSITY, [folder], out=tmp_path)


# ---- both halves -------------------------------------------------------------------------------------------------------------


def test_fig10_whole(folder: Path, other: Path, attention: Path, tmp_path: Path) -> None:
    png, drawn = draw(FIG10, [attention, folder, other], out=tmp_path)
    found = texts(drawn)
    assert {"w/ Mless", "w/ Mful", "w/o again", "None", "Mless", "Mful"} <= set(found)
    assert found.count("Average attention on Head 3") == 2
    text = " ".join(found)
    assert "Left: arithmetic-1. n = 90 / 40 items" in text
    assert "Right: Qwen2.5-Math-7B, layer 1." in text
    with Image.open(png) as image:
        assert image.width == pytest.approx(7.2 * 200, abs=2)
        assert re.match("Accuracy by condition: SmolLM2-135M-Instruct.*; Received attention", str(image.info["Title"]))


def test_fig10_draws_the_half_it_is_given(folder: Path, attention: Path, tmp_path: Path) -> None:
    left = svg(FIG10, [folder], tmp_path)
    assert "Accuracy (%)" in left
    assert "Token Position" not in left
    right = svg(FIG10, [attention], tmp_path)
    assert "Token Position" in right
    assert "Accuracy (%)" not in right


def test_fig10_of_one_prompt_takes_no_answers(folder: Path, attention: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"--item shows one prompt's attention; leave out the folders of answers"):
        draw(FIG10, [folder, attention], item="1", out=tmp_path)


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bars", "sweep", "diversity", "table"])
def test_a_folder_of_attention_has_no_answers(kind: str, attention: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BadFolder, match=r"holds no accuracy\.parquet: its study measured attention.*mless run accuracy"
    ):
        draw(FigureSpec("f", kind, (), FIVE), [attention], out=tmp_path)  # pyright: ignore[reportArgumentType]


def test_a_folder_of_answers_has_no_attention(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"no attention\.parquet"):
        draw(FigureSpec("f", "heads", (Panel("x", 1, 1),)), [folder], out=tmp_path)


@pytest.mark.parametrize("options", [{"layer": 1}, {"heads": "1"}, {"item": "1"}], ids=str)
def test_options_of_attention_are_refused(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"figure bars takes no --\w+: it shows answers and not attention; leave it out"):
        check(BARS, **options)  # pyright: ignore[reportArgumentType]


def test_a_condition_that_was_not_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"no condition 'rephrased' in this folder; it holds none, none-again, mless"):
        draw(FigureSpec("f", "bars", (), ("rephrased",)), [folder], out=tmp_path)


@pytest.mark.parametrize("damage", ["gone", "running", "cut", "column", "empty"])
def test_damaged_tables_are_named(damage: str, tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=12)
    file = path / "accuracy.parquet"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage in ("column", "empty"):
        table = pq.read_table(file)
        pq.write_table(table.drop_columns(["aa_delta"]) if damage == "column" else table.slice(0, 0), file)
    else:
        file.unlink()
        if damage == "running":
            (path / "units").mkdir()
    expected = {
        "gone": r"no accuracy\.parquet; Make it with",
        "running": r"still under way or was interrupted",
        "cut": r"accuracy\.parquet cannot be read \(.*\); remove it and run the study again",
        "column": r"accuracy\.parquet has no column 'aa_delta'",
        "empty": r"accuracy\.parquet has no rows; expected at least one; remove it and run the study again",
    }[damage]
    with pytest.raises(BadFolder, match=expected):
        draw(BARS, [path], out=tmp_path)


# ---- the studies ---------------------------------------------------------------------------------------------------------------


def test_every_figure_of_answers_has_its_study() -> None:
    found = available_studies()
    kinds = {
        "accuracy": "bars", "fig6": "diversity", "fig8": "sweep", "fig10-bars": "bars", "table1": "table", "table4": "table", "table5": "table",
    }  # fmt: skip
    for name, kind in kinds.items():
        spec = found[name]
        assert spec.accuracy is not None
        assert spec.title
        shown = figure_spec(spec)
        assert (shown.id, shown.kind) == (name, kind)
        run = {condition.name: condition for condition in conditions_of(spec)}
        assert set(shown.conditions) <= set(run)
        assert run["none-again"].again  # the control is on by default
        if name != "accuracy":
            assert (spec.prompt, spec.accuracy.max_new_tokens) == ("raw", 2048)
    lengths = [condition.length for condition in conditions_of(load_study("fig8")) if condition.length]
    assert lengths == [10, 25, 40, 55, 70]
    assert {condition.placement for condition in conditions_of(load_study("table4"))} == {
        "before-system", "before-question", "end", "anywhere",
    }  # fmt: skip
    _, items = load_study("accuracy").load_items()
    assert len(items) >= 200


def test_no_torch(folder: Path, sampled: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, mless.figures, mless.report\n"
        "from mless.values import FigureSpec\n"
        "a, b, out = map(pathlib.Path, sys.argv[1:])\n"
        "shown = ('none', 'none-again', 'mless')\n"
        "mless.figures.draw(FigureSpec('table4', 'table', (), shown), [a], out=out)\n"
        "assert 'matplotlib' not in sys.modules, 'a table needs no matplotlib'\n"
        "mless.figures.draw(FigureSpec('bars', 'bars', (), shown), [a], formats=['svg'], out=out)\n"
        "mless.figures.draw(FigureSpec('fig6', 'diversity', (), shown), [b], formats=['png'], out=out)\n"
        "mless.report.write_report(a, verdict=[])\n"
        "print(sorted({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder, sampled, tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_study_json_without_engine_is_drawn(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=12)
    about = json.loads((path / "study.json").read_text(encoding="utf-8"))
    del about["engine"]
    (path / "study.json").write_text(json.dumps(about), encoding="utf-8")
    assert "engine hf." in " ".join(svg(BARS, [path], tmp_path))
