"""Pictures are made from stored results: the same bytes each time, text as text, and errors that name the way out."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mless.errors import BadFolder, BadStudy
from mless.figures import check, draw
from mless.study import load_study
from mless.study.showing import figure_spec
from mless.values import FigureSpec, Panel
from synthetic import write_folder

ALL = ("none", "mless", "mful", "random")


def panels(model: str, *heads: int, layer: int = 1) -> tuple[Panel, ...]:
    return tuple(Panel(model, layer, head) for head in heads)


HEADS = FigureSpec("fig15", "heads", panels("Qwen2.5-Math-7B", 2, 5, 9))
LAYERS = FigureSpec("fig9", "layers", tuple(Panel("Qwen2.5-Math-7B", layer, 4) for layer in (1, 2, 3)))
CONDITIONS = FigureSpec("fig10", "conditions", panels("Qwen2.5-Math-7B", 4), ("none", "mless", "mful"))
VERSUS = FigureSpec(
    "fig11", "versus", panels("Qwen2.5-Math-7B", 1) + panels("Llama-3.1-8B-Instruct", 3), ("mless", "random")
)
SPECS = [
    HEADS,
    LAYERS,
    CONDITIONS,
    VERSUS,
    FigureSpec("map", "map", (), ALL),
    FigureSpec("retained", "retained", (), ALL),
    FigureSpec("mass", "mass", (), ALL),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("results") / "smollm2")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six items, one layer captured of thirty, first token left out."""
    path = tmp_path_factory.mktemp("results") / "small"
    return write_folder(path, label="Tiny", name="tiny", layers=30, captured=[1], heads=4, items=6, omit_first=True)


def texts(svg: Path) -> list[str]:
    """What stands in the picture as text, line by line."""
    root = ElementTree.parse(svg).getroot()
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def svg(spec: FigureSpec, folders: list[Path], out: Path, **options: object) -> list[str]:
    [path] = draw(spec, folders, formats=["svg"], out=out, **options)  # pyright: ignore[reportArgumentType]
    return texts(path)


Shown = Callable[[FigureSpec], list[str]]


@pytest.fixture(scope="module")
def shown(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What stands in a picture of `folder`; each is drawn once for all tests that only read it."""
    return functools.cache(lambda spec: svg(spec, [folder], tmp_path_factory.mktemp("shown")))


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=[] if spec in (CONDITIONS, SPECS[4]) else [pytest.mark.slow]) for spec in SPECS],
    ids=lambda spec: spec.kind,
)
def test_same_input_same_bytes_whatever_is_written_beside_it(spec: FigureSpec, folder: Path, tmp_path: Path) -> None:
    first = draw(spec, [folder], out=tmp_path / "a")
    [alone] = draw(spec, [folder], formats=["svg"], out=tmp_path / "b")
    assert [path.name for path in first] == [f"{spec.id}.png", f"{spec.id}.svg"]
    assert first[1].read_bytes() == alone.read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in first)


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=[] if spec is SPECS[5] else [pytest.mark.slow]) for spec in SPECS],
    ids=lambda spec: spec.kind,
)
def test_a_png_is_the_same_twice(spec: FigureSpec, folder: Path, tmp_path: Path) -> None:
    [first] = draw(spec, [folder], formats=["png"], out=tmp_path / "a")
    [again] = draw(spec, [folder], formats=["png"], out=tmp_path / "b")
    assert first.read_bytes() == again.read_bytes()


def test_pdf_on_request_is_the_same_twice(folder: Path, tmp_path: Path) -> None:
    [first] = draw(CONDITIONS, [folder], formats=["pdf"], out=tmp_path / "a")
    [again] = draw(CONDITIONS, [folder], formats=["pdf"], out=tmp_path / "b")
    assert first.read_bytes().startswith(b"%PDF")
    assert first.read_bytes() == again.read_bytes()
    assert b"CreationDate" not in first.read_bytes()


def test_default_place_is_the_first_folders_figures(small: Path) -> None:
    spec = FigureSpec("mass", "mass")
    assert draw(spec, [small], formats=["svg"]) == [small / "figures" / "mass.svg"]


def test_png_is_at_200_dpi_and_says_what_it_shows(folder: Path, tmp_path: Path) -> None:
    [path] = draw(HEADS, [folder], formats=["png"], out=tmp_path)
    with Image.open(path) as image:
        assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        assert image.width == pytest.approx(7.2 * 200, abs=2)
        assert "Software" not in image.info
        assert "one column per head" in image.info["Description"]
        assert "SmolLM2-135M-Instruct Layer 1 Head 9" in image.info["Title"]


def test_heads_picture(shown: Shown) -> None:
    found = shown(HEADS)
    for head in (2, 5, 9):
        assert f"SmolLM2-135M-Instruct Layer 1 Head {head}" in found
    assert found.count("w/o Meaningless tokens") == 1
    assert found.count("w/ Meaningless tokens") == 1
    assert found.count("Meaningless tokens") == 3  # each column's shaded span
    assert "Average Attention Weight" in found
    assert found.count("Token Position") == 6
    assert "Mean of n = 12 items" in " ".join(found)
    assert "cut where fewer than 10 remain" in " ".join(found)
    assert "n(t) = 12 down to 10 items" in " ".join(found)


def test_layers_picture(shown: Shown) -> None:
    found = shown(LAYERS)
    assert {"None", "Mless"} <= set(found)
    for layer in (1, 2, 3):
        assert f"SmolLM2-135M-Instruct Layer {layer} Head 4" in found


def test_conditions_picture(shown: Shown) -> None:
    found = shown(CONDITIONS)
    assert found.count("Average attention on Head 4") == 2
    assert {"None", "Mless", "Mful"} <= set(found)
    assert "SmolLM2-135M-Instruct, layer 1." in " ".join(found)


def test_versus_picture_takes_one_folder_per_model(folder: Path, small: Path, tmp_path: Path) -> None:
    found = svg(VERSUS, [folder, small], tmp_path)
    assert {"Meaningless tokens", "Random sentence"} <= set(found)
    assert "SmolLM2-135M-Instruct Layer 1 Head 1" in found  # the first model's panel
    assert "Tiny Layer 1 Head 3" in found  # the second's
    assert "First token of Tiny left out" in " ".join(found)


@pytest.mark.parametrize(
    "order", [(1, 2, 0), *(pytest.param(one, marks=pytest.mark.slow) for one in ((0, 1, 2), (2, 1, 0)))], ids=str
)
def test_three_models_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    spec = figure_spec(load_study("fig2"))
    labels = [panel.model.rsplit("/", 1)[-1] for panel in spec.panels]
    folders = [write_folder(tmp_path / name, label=name, name=name, layers=1, heads=27, items=2) for name in labels]
    drawn, png = draw(spec, [folders[i] for i in order], formats=["svg", "png"], out=tmp_path)
    text = " ".join(sorted({text.replace("\n", " ") for text in texts(drawn)}))
    with Image.open(png) as image:
        title = str(image.info["Title"])
    heads = [f"{labels[i]} Layer 1 Head {(22, 27, 3)[i]}" for i in order]
    assert title == "Received attention: " + "; ".join(heads)
    assert all(label in text for label in labels)


def test_one_folder_takes_the_panels_of_the_model_it_is(tmp_path: Path) -> None:
    llama = write_folder(tmp_path / "llama", label="meta-llama/llama-3.1-8b-instruct", layers=1, heads=4, items=2)
    other = write_folder(tmp_path / "other", label="Other", layers=1, heads=4, items=2)
    assert any("Layer 1 Head 3" in text for text in svg(VERSUS, [llama], tmp_path))
    found = svg(VERSUS, [other], tmp_path)
    assert "Other Layer 1 Head 1" in found
    assert not any("Head 3" in text for text in found)


@pytest.mark.parametrize("spec", SPECS[4:], ids=lambda spec: spec.kind)
def test_overviews_name_every_condition(spec: FigureSpec, shown: Shown) -> None:
    found = shown(spec)
    assert {"Mless", "Mful", "Random sentence"} <= set(found)


def test_yardstick_and_spans_are_named(shown: Shown, folder: Path, tmp_path: Path) -> None:
    assert "uniform dilution" in shown(SPECS[5])
    assert {"SmolLM2-135M-Instruct Layer 2", "filler"} <= set(svg(SPECS[6], [folder], tmp_path, layer=2))


@pytest.mark.parametrize("spec", SPECS[4:], ids=lambda spec: spec.kind)
def test_overviews_show_the_conditions_that_were_run(spec: FigureSpec, small: Path, tmp_path: Path) -> None:
    part = write_folder(tmp_path / "r", layers=1, heads=3, items=2, conditions=("none", "mless"))
    found = svg(spec, [part], tmp_path)
    assert "Mless" in " ".join(found)
    assert "Mful" not in " ".join(found)
    assert "Mful" in " ".join(svg(spec, [part, small], tmp_path))  # each folder shows what it holds
    with pytest.raises(BadFolder, match=r"no condition 'mful', 'random' in this folder; it holds none, mless\."):
        draw(FigureSpec(spec.id, spec.kind, (), ("mful", "random")), [part], out=tmp_path)


def test_map_and_layers_are_drawn_in_exponents_where_there_are_any(tmp_path: Path) -> None:
    """In ε; of folders from before there was one, alone or beside others, in λ; layers of one folder in both."""
    two = ("none", "mless")
    new = write_folder(tmp_path / "new", layers=2, heads=2, conditions=two, attention=False)
    old = write_folder(tmp_path / "old", layers=2, heads=2, conditions=two, attention=False, exponents=False)
    map_spec, layers = FigureSpec("map", "map", (), two), FigureSpec("retained", "retained", (), two)
    expected = {
        (map_spec, (new,)): ("Dilution exponent ε", "Retained share"),
        (map_spec, (old,)): ("Retained share", "Dilution exponent ε"),
        (map_spec, (new, old)): ("Retained share", "Dilution exponent ε"),
        (layers, (new, new)): ("Dilution exponent ε", "Retained share λ"),
        (layers, (old,)): ("Retained share λ", "Dilution exponent ε"),
        (layers, (new, old)): ("Retained share λ", "Dilution exponent ε"),
    }
    for (spec, folders), (shown, missing) in expected.items():
        found = svg(spec, list(folders), tmp_path)
        assert shown in found
        assert missing not in found
    both = svg(layers, [new], tmp_path)
    assert "Dilution exponent ε" in both
    assert "Retained share λ" in both


def test_a_condition_without_dilution_is_left_out_of_the_map_and_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "r", layers=2, attention=False)
    rows = pq.read_table(folder / "retained.parquet").to_pylist()
    without = {"epsilon": None, "epsilon_lo": None, "epsilon_hi": None}
    rows = [row | without if row["condition"] == "mful" else row for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), folder / "retained.parquet")
    found = svg(FigureSpec("map", "map", (), ALL), [folder], tmp_path)
    assert "Without dilution, so without ε: mful." in " ".join(found)
    alone = svg(FigureSpec("map", "map", (), ("none", "mful")), [folder], tmp_path)
    assert "Retained share" in alone


def test_map_scales_to_80_layers_of_64_heads(tmp_path: Path) -> None:
    few = ("none", "mless")
    big = write_folder(tmp_path / "big", layers=80, heads=64, items=1, conditions=few, attention=False)
    found = svg(FigureSpec("map", "map", (), ALL), [big], tmp_path)
    assert {"1", "80", "60"} <= set(found)
    assert "undecided" in " ".join(found)


def test_heads_of_the_users_choice(folder: Path, tmp_path: Path) -> None:
    found = svg(HEADS, [folder], tmp_path, heads="1,3", layer=2)
    assert [text for text in found if "Head" in text] == [f"SmolLM2-135M-Instruct Layer 2 Head {h}" for h in (1, 3)]


def test_most_shifted_heads(folder: Path, tmp_path: Path) -> None:
    rows = pq.read_table(folder / "retained.parquet").to_pylist()
    shares = {
        row["head"]: abs(1 - row["retained"])
        for row in rows
        if row["condition"] == "mless" and row["layer"] == 1 and row["head"] and row["queries"] == "original"
    }
    drawn = [int(text.split()[-1]) for text in svg(HEADS, [folder], tmp_path, heads="most-shifted:3") if "Head" in text]
    assert drawn == sorted(sorted(shares, key=lambda head: -shares[head])[:3])


def test_heads_override_reaches_every_folder(folder: Path, small: Path, tmp_path: Path) -> None:
    found = svg(VERSUS, [folder, small], tmp_path, heads="2")
    assert {"SmolLM2-135M-Instruct Layer 1 Head 2", "Tiny Layer 1 Head 2"} <= set(found)


@pytest.mark.parametrize("spec", SPECS[:4], ids=lambda spec: spec.kind)
def test_every_kind_of_curve_says_how_many_items_it_is_made_of(spec: FigureSpec, shown: Shown) -> None:
    assert "n(t) = 12 down to 10 items" in " ".join(shown(spec))


def test_few_items_are_cut_below_half_and_said_so(small: Path, tmp_path: Path) -> None:
    found = " ".join(svg(FigureSpec("fig", "heads", panels("x", 1)), [small], tmp_path))
    assert re.search(r"n = 6 items .* fewer than 3 \(half of them\) remain", found)


@pytest.mark.parametrize(("asked", "said"), [(None, True), (False, False), (True, True)])
def test_first_token(small: Path, tmp_path: Path, asked: bool | None, said: bool) -> None:
    found = " ".join(svg(FigureSpec("fig", "heads", panels("x", 1)), [small], tmp_path, omit_first=asked))
    assert ("First token left out" in found) == said
    assert ("0.3" in found) != said  # the sink's height is on the axis only when it is drawn


def test_query_set_is_said(folder: Path, tmp_path: Path) -> None:
    assert "every later token" in " ".join(svg(CONDITIONS, [folder], tmp_path, queries="later"))


def test_spans_that_differ_are_said_to_vary(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=1, heads=2, items=12, placement="anywhere", conditions=("none", "mless"))
    assert "Meaningless tokens (varies)" in svg(FigureSpec("f", "heads", panels("x", 1)), [path], tmp_path)


def test_one_item_shows_its_tokens(tmp_path: Path) -> None:
    odd = "$a\x07中" + "long" * 9
    two = ("none", "mless")
    path = write_folder(tmp_path / "r", layers=1, heads=2, items=["a", "b/7"], token=odd, conditions=two, length=5)
    spec = FigureSpec("f", "heads", panels("x", 2))
    by_number = svg(spec, [path], tmp_path, item="2")
    assert by_number == svg(spec, [path], tmp_path, item="b/7")
    assert any("item b/7" in text for text in by_number)
    assert {"sys1", "prime"} & set(by_number)
    assert "$a\\x07\\u4e2d"[:11] + "…" in by_number  # shown escaped and shortened, no mathtext, no missing glyph
    assert "Mean of" not in " ".join(by_number)


@pytest.mark.parametrize("spec", [replace(LAYERS, panels=LAYERS.panels[:1]), CONDITIONS], ids=lambda spec: spec.kind)
def test_one_item_of_every_kind(spec: FigureSpec, folder: Path, tmp_path: Path) -> None:
    assert "One prompt: item math-0." in " ".join(svg(spec, [folder], tmp_path, item="1"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": "10"}, r"no head 10: .* 1 to 9 \(numbered from 1\).*most-shifted:3"),
        ({"heads": "0"}, r"1 to 9 \(numbered from 1\)"),
        ({"heads": "first"}, r"cannot read 'first'"),
        ({"heads": "most-shifted:0"}, r"at least one head"),
        ({"layer": 4}, r"no layer 4 in SmolLM2-135M-Instruct: its layers are 1 to 3 \(numbered from 1\)"),
        ({"item": "13"}, r"no item '13' .* 1 to 12, or an id such as 'math-0'"),
        ({"formats": ["gif"]}, r"no figure format 'gif'; there are: png, svg, pdf"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_out_of_range_names_the_range(folder: Path, tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(BadStudy, match=message):
        draw(HEADS, [folder], out=tmp_path, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_published_heads_a_model_lacks(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"no head 28 in SmolLM2-135M-Instruct: its heads are 1 to 9.*most-shifted:3"):
        draw(FigureSpec("fig15", "heads", panels("Qwen2.5-Math-7B", 28)), [folder], out=tmp_path)


def test_layer_not_captured(small: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"layer 7 was not captured .* holds layers 1; choose one of them with --layers"):
        draw(FigureSpec("f", "heads", panels("x", 1)), [small], layer=7, out=tmp_path)


def test_option_a_kind_does_not_take(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"figure map takes no --item"):
        draw(FigureSpec("map", "map"), [folder], item="1", out=tmp_path)


def test_missing_condition_and_table(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=1, heads=4, items=2, conditions=("none", "mless"))
    with pytest.raises(
        BadFolder, match=r"no condition 'random' .* holds none, mless\. .*mless figure .* --model smollm2"
    ):
        draw(VERSUS, [path], out=tmp_path)
    (path / "attention.parquet").unlink()
    with pytest.raises(BadFolder, match=r"no attention\.parquet; .*mless run"):
        draw(HEADS, [path], out=tmp_path)
    (path / "units").mkdir()
    with pytest.raises(BadFolder, match=r"still under way or was interrupted"):
        draw(HEADS, [path], out=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "noise"])
@pytest.mark.parametrize("table", ["attention", "prompts", "retained"])
def test_damaged_tables_are_named(table: str, damage: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=1, heads=2, items=4)
    file = path / f"{table}.parquet"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:  # the pages, while the footer that names them is whole
        content[4 : len(content) // 2] = b"\xa5" * (len(content) // 2 - 4)
    file.write_bytes(content)
    spec = SPECS[4] if table == "retained" else FigureSpec("f", "heads", panels("x", 1))
    with pytest.raises(BadFolder, match=rf"{table}\.parquet cannot be read \(.*\); remove it and run the study again"):
        draw(spec, [path], out=tmp_path)


def test_a_place_that_cannot_be_written_to(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc/none/here")):
        for attempt in (lambda out=out: check(HEADS, out=out), lambda out=out: draw(HEADS, [folder], out=out)):
            with pytest.raises(BadFolder, match=r"cannot write pictures to .*; choose another --out"):
                attempt()
    check(HEADS, out=tmp_path / "new" / "er")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_result_folder(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match="no result folder"):
        draw(HEADS, [tmp_path / "nowhere"])
    with pytest.raises(BadFolder, match=r"no study\.json"):
        draw(HEADS, [tmp_path])
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(BadFolder, match="not readable JSON"):
        draw(HEADS, [tmp_path])
    (tmp_path / "study.json").write_text(json.dumps({"format": 99, "mless": "9.0"}))
    with pytest.raises(BadFolder, match=r"newer mless \(9\.0, format 99\); this one reads format \d"):
        draw(HEADS, [tmp_path])


def test_odd_names_neither_break_the_picture_nor_its_svg(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", label="a<b>&\x07 $x$ 模型", layers=1, heads=2, items=2)
    found = svg(FigureSpec("f", "heads", panels("x", 1)), [path], tmp_path)
    assert any("a<b>&\\x07 $x$ \\u6a21" in text for text in found)


def test_users_matplotlib_settings_are_left_alone(folder: Path, tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 31.0, "axes.grid": True}):
        [styled] = draw(CONDITIONS, [folder], formats=["svg"], out=tmp_path / "a")
        assert mpl.rcParams["font.size"] == 31.0
    [plain] = draw(CONDITIONS, [folder], formats=["svg"], out=tmp_path / "b")
    assert styled.read_bytes() == plain.read_bytes()


def test_no_torch(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, mless.figures, mless.report\n"
        "assert not {'matplotlib', 'pyarrow', 'jinja2'} & set(sys.modules), 'heavy modules load late'\n"
        "from mless.values import FigureSpec\n"
        "folder, out = map(pathlib.Path, sys.argv[1:])\n"
        "mless.figures.draw(FigureSpec('mass', 'mass'), [folder], formats=['svg'], out=out)\n"
        "mless.figures.draw(FigureSpec('f', 'heads'), [folder], formats=['png'], out=out)\n"
        "print(sorted({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, small, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
