"""Tables of accuracy: Markdown that renders, LaTeX that compiles, CSV with every digit, whatever the names hold."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mless.errors import BadFolder, BadStudy
from mless.figures import check, draw
from mless.figures.tables import write_tables
from mless.results.answers import best_on_dev, read_accuracy
from mless.results.schemas import ACCURACY, Accuracy
from mless.results.wording import p_value
from mless.study.loading import load_study
from mless.study.spec import AccuracyTable
from mless.values import PLACEMENTS, ArmSettings, Condition, FigureSpec
from synthetic import write_answers, write_folder

ODD = (
    " /",
    " \\",
    " ?",
    " %",
    " &",
    " #",
    "_",
    "$",
    "{",
    "}",
    "~",
    "^",
    "|",
    "`",
    '"',
    "'",
    "<b>",
    "\n",
    " ",
    "\x07",
    "模",
    "[",
    "*",
)
FILLERS = tuple(Condition(f"f{n}", "repeat", filler, 55) for n, filler in enumerate(ODD))
PLACED = tuple(Condition(f"at-{place}", "repeat", " /", 55, place) for place in PLACEMENTS if place != "before-answer")
LAST = Condition("last", "repeat", " /", 55, "before-answer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("answers") / "r", items=90, effects={"mful": -0.4}, noise=3)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "odd"
    label, task = "[100%] of A_B & C# {x} \\y ~ ^ $z$ | <i> `q` \x07 模", "t_1%"
    return write_answers(path, items=20, conditions=("none", "none-again", *FILLERS), label=label, task=task)


def cells(markdown: str) -> list[list[str]]:
    """The table's rows, split where GitHub's Markdown ends a cell: at a bar with no backslash before it."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in markdown.splitlines()
        if line.startswith("|") and not re.fullmatch(r"[|:-]+", line)
    ]


def check_latex(text: str) -> None:
    """What can be checked without TeX: braces and environments closed, specials escaped, rows of one length, ASCII only."""
    assert text.isascii()
    body = re.sub(r"^% needs .*\n", "", text)
    body = body.replace("{!}{%\n", "{!}{\n")
    plain = re.sub(r"\\[\\%&#$_{}]", "", body)  # escaped specials and line ends
    assert not re.search(r"[%#~^_\"`]", plain), re.search(r".{20}[%#~^_\"`].{20}", plain, re.DOTALL)
    assert plain.count("$") % 2 == 0
    depth = 0
    for sign in plain:
        depth += (sign == "{") - (sign == "}")
        assert depth >= 0
    assert depth == 0
    assert re.findall(r"\\begin\{([^}]*)\}", body) == ["table*", "tabular"]
    assert re.findall(r"\\end\{([^}]*)\}", body) == ["tabular", "table*"]
    columns = re.search(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}", body)
    assert columns is not None
    lines = [line for line in body.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert len(lines) > 1
    for line in lines:
        assert len(re.findall(r"(?<!\\)&", line)) == len(columns[1]) - 1, line
        assert not line.lstrip().startswith(("[", "*"))
    known = {
        "begin", "end", "centering", "caption", "label", "resizebox", "ifdim", "width", "linewidth", "else", "fi", "toprule", "midrule",
        "bottomrule", "cmidrule", "multicolumn", "textbf", "texttt", "textvisiblespace", "textbackslash", "textasciitilde",
        "textasciicircum", "textless", "textgreater", "textbar", "char", "ldots", "Delta", "pm", "leq", "times",
    }  # fmt: skip
    # An escaped backslash is one command of these, so what is left are commands of ours.
    assert set(re.findall(r"\\([A-Za-z]+)", body.replace(r"\\", ""))) <= known


def test_every_column_of_the_contract_is_read() -> None:
    assert [field.name for field in fields(Accuracy)] == ACCURACY.names


def test_the_part_of_form_has_a_column_and_older_folders_have_none(folder: Path, tmp_path: Path) -> None:
    stored = pq.read_table(folder / "accuracy.parquet").to_pylist()
    for row in stored:
        row |= {"stated": 0.9, "guessed": 0.1}
        if row["condition"] == "mful":
            row |= {"delta_form": -0.125, "delta_form_lo": -0.2, "delta_form_hi": -0.05, "mostly_form": True}
    newer, older = tmp_path / "newer", tmp_path / "older"
    for path in (newer, older):
        shutil.copytree(folder, path)
    pq.write_table(pa.Table.from_pylist(stored, ACCURACY), newer / "accuracy.parquet")
    kept = ACCURACY.names[: ACCURACY.names.index("stated")]
    pq.write_table(pq.read_table(folder / "accuracy.parquet").select(kept), older / "accuracy.parquet")
    [path] = write_tables("accuracy", [newer], tmp_path / "a", ["md"])
    head, *body = cells(path.read_text(encoding="utf-8"))
    found = {row[0]: dict(zip(head, row, strict=True)) for row in body}
    assert found["mful"]["of Δ form"] == "−12.5 [−20.0, −5.0], mostly"
    assert (found["none"]["of Δ form"], found["none"]["guessed %"]) == ("–", "10.0")
    # a part of form that may be nothing, of a Δ that is undecided, is not called the most of it
    stored = [
        row | ({"verdict": "undecided", "delta_form_hi": 0.01} if row.get("delta_form") else {}) for row in stored
    ]
    pq.write_table(pa.Table.from_pylist(stored, ACCURACY), newer / "accuracy.parquet")
    [path] = write_tables("accuracy", [newer], tmp_path / "c", ["md"])
    assert "−12.5 [−20.0, +1.0] |" in path.read_text(encoding="utf-8")
    [path] = write_tables("accuracy", [older], tmp_path / "b", ["md"])
    head, *body = cells(path.read_text(encoding="utf-8"))
    assert "of Δ form" not in head
    assert len(body) == 5


@pytest.mark.parametrize("table", ["table1", "table4", "table5", "accuracy"])
def test_same_input_same_bytes(table: str, folder: Path, tmp_path: Path) -> None:
    spec = FigureSpec(table, "table", (), ("none", "none-again", "mless", "mful"))
    first, again = draw(spec, [folder], out=tmp_path / "a"), draw(spec, [folder], out=tmp_path / "b")
    assert [path.name for path in first] == [f"{table}.{kind}" for kind in ("md", "csv", "tex")]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    check_latex(first[2].read_text(encoding="utf-8"))


def test_the_plain_table_says_it_all(folder: Path, tmp_path: Path) -> None:
    [path] = write_tables("accuracy", [folder], tmp_path, ["md"])
    text = path.read_text(encoding="utf-8")
    head, *body = cells(text)
    assert head == [
        "condition", "prompt", "n", "accuracy %", "Δ points", "A/A", "p", "p (Holm)", "detectable ±", "changed", "cut off %", "no answer %", "verdict",
    ]  # fmt: skip
    assert [row[0] for row in body] == ["none", "none-again", "mless", "mful", "random"]
    stored = {row["condition"]: row for row in pq.read_table(folder / "accuracy.parquet").to_pylist()}
    for name, row in zip(stored, body, strict=True):
        assert row[3].startswith(f"{100 * stored[name]['value']:.1f} [")
        assert row[5] == ("–" if name == "none" else f"{100 * stored['mful']['aa_delta']:+.1f}".replace("-", "−"))
    assert body[3][4].startswith("**−")
    assert body[3][12] == "drops"
    assert body[2][1] == "55 × ' /', before-question"
    for said in (
        "n = 90 items",
        "engine hf (row-stable, 16 slots)",
        "Wilson",
        "Tango",
        "exact McNemar",
        "Holm",
        "Greedy",
    ):
        assert said in text


def test_table1_has_models_down_and_tasks_across(tmp_path: Path) -> None:
    wanted = [("Small_1", "math500"), ("Small_1", "aime24"), ("Large", "math500")]
    paths = [
        write_answers(
            tmp_path / f"{n}", items=20, label=label, task=task, conditions=("none", "none-again", "mless"), seed=n
        )
        for n, (label, task) in enumerate(wanted)
    ]
    written = draw(FigureSpec("table1", "table", (), ("none", "mless")), paths, out=tmp_path)
    head, *body = cells(written[0].read_text(encoding="utf-8"))
    told = ("w/o", "w/ Mless", "Δ points", "A/A", "p (Holm)", "cut off %", "no answer %")
    assert head[:8] == ["model", *(f"math500 {one}" for one in told)]
    assert [row[0] for row in body] == ["Small\\_1", "Large"]
    assert body[1][8:] == [""] * 7  # not run
    stored = {row["condition"]: row for row in pq.read_table(paths[0] / "accuracy.parquet").to_pylist()}
    none, mless = stored["none"], stored["mless"]
    assert body[0][5] == p_value(mless["p_adjusted"])
    assert body[0][6] == f"{100 * none['truncated']:.1f} / {100 * mless['truncated']:.1f}"
    assert body[0][7] == f"{100 * none['no_answer']:.1f} / {100 * mless['no_answer']:.1f}"
    text = written[2].read_text(encoding="utf-8")
    check_latex(text)
    assert r"\multicolumn{7}{c}{math500} & \multicolumn{7}{c}{aime24} \\" in text
    assert r"\cmidrule(lr){2-8}" in text
    assert r"\cmidrule(lr){9-15}" in text


def test_table1_refuses_two_folders_for_one_cell(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadStudy, match=r"two folders hold SmolLM2-135M-Instruct on arithmetic-1 under 'mless'"):
        write_tables("table1", [folder, folder], tmp_path, conditions=("none", "mless"))
    alone = write_answers(tmp_path / "alone", items=12, conditions=("none", "none-again"))
    with pytest.raises(BadFolder, match=r"table1 compares none with another condition; it holds none, none-again"):
        write_tables("table1", [alone], tmp_path)


def test_table4_names_the_placements(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=20, conditions=("none", "none-again", *PLACED, LAST))
    written = write_tables("table4", [path], tmp_path)
    head, *body = cells(written[0].read_text(encoding="utf-8"))
    assert head[0] == "placement"
    assert [row[0] for row in body] == [
        "none", "none again (A/A)", "① before system", "② before question", "③ end", "④ anywhere",
        "⑤ before the answer",
    ]  # fmt: skip
    check_latex(written[2].read_text(encoding="utf-8"))


@pytest.mark.parametrize(("table", "given"), [("table4", PLACED), ("table5", FILLERS[:4])])
def test_what_dev_items_choose_is_reported_on_test_items(
    table: str, given: tuple[Condition, ...], tmp_path: Path
) -> None:
    conditions = ("none", "none-again", *given)
    effects = {given[1].name: 0.3}
    path = write_answers(
        tmp_path / "r", items=60, conditions=conditions, effects=effects, settings=AccuracyTable(dev_share=0.5)
    )
    markdown, comma, latex = (one.read_text(encoding="utf-8") for one in write_tables(table, [path], tmp_path))
    stored = pq.read_table(path / "accuracy.parquet")
    best = best_on_dev(stored, read_accuracy(path)[1])
    head, *body = cells(markdown)
    of = [row[head.index("items of")] for row in body]
    assert of == ["all"] * 6 + ["test"] * 6  # two blocks, never mixed
    place = 8 + [one.name for one in given].index(best.condition)
    assert body[place][2:4] == [
        str(best.test["n"]),
        f"{100 * best.test['value']:.1f} [{100 * best.test['lo']:.1f}, {100 * best.test['hi']:.1f}]",
    ]
    called = {"table4": "② before question", "table5": '" \\\\\\\\"'}[table]
    assert best.condition == given[1].name
    said = (
        f"Chosen on the dev items (n = {best.dev['n']}) out of 4: {called}; on the test items (n = {best.test['n']}) "
    )
    assert f"{said}{100 * best.test['value']:.1f} % [" in markdown
    assert f"(one comparison, not adjusted): {best.verdict}." in markdown
    assert "n = 60 items;" in markdown
    assert "their p (Holm) and verdict are for a look at all of them" in markdown
    caption = next(line for line in latex.splitlines() if line.startswith(r"\caption"))
    assert f"on the test items (n = {best.test['n']}) {100 * best.test['value']:.1f} \\%" in caption
    assert f"not adjusted): {best.verdict}." in caption
    check_latex(latex)
    assert {row["split"] for row in csv.DictReader(comma.splitlines())} == {"all", "dev", "test"}


def test_nothing_is_said_of_a_choice_where_there_was_none(tmp_path: Path) -> None:
    whole = write_answers(tmp_path / "whole", items=20, conditions=("none", "none-again", *PLACED))
    one = write_answers(
        tmp_path / "one", items=20, conditions=("none", "none-again", "mless"), settings=AccuracyTable(dev_share=0.5)
    )
    for path in (whole, one):
        assert "hosen on" not in write_tables("table4", [path], tmp_path, ["md"])[0].read_text(encoding="utf-8")


def test_each_model_chooses_for_itself(tmp_path: Path) -> None:
    paths = [
        write_answers(
            tmp_path / label, items=40, label=label, conditions=("none", "none-again", *PLACED), seed=seed,
            settings=AccuracyTable(dev_share=0.5),
        )
        for seed, label in enumerate(("Small", "Large"))
    ]  # fmt: skip
    text = write_tables("table4", paths, tmp_path, ["md"])[0].read_text(encoding="utf-8")
    for label in ("Small", "Large"):
        assert f"{label} on arithmetic-1: chosen on the dev items" in text


def test_a_change_of_zero_has_no_sign(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=20, conditions=("none", "none-again", "mless"))
    for table in ("accuracy", "table1", "table4", "table5"):
        for one in write_tables(table, [path], tmp_path, ["md", "tex"]):
            text = one.read_text(encoding="utf-8")
            assert not re.search(r"(?<![\d.])[+−]0\.0\b|\$-\$0\.0\b", text), text


def test_table5_shows_every_sign_of_a_filler(odd: Path, tmp_path: Path) -> None:
    markdown, comma, latex = (path.read_text(encoding="utf-8") for path in write_tables("table5", [odd], tmp_path))
    head, *body = cells(markdown)
    assert head[0] == "filler"
    assert {len(row) for row in body} == {len(head)}
    shown = [row[0] for row in body[2:]]
    assert shown[:3] == ['`" /"`', '`" \\\\"`', '`" ?"`']
    assert shown[ODD.index("|")] == '`"\\|"`'
    assert shown[ODD.index("`")] == '`` "`" ``'
    assert shown[ODD.index("\n")] == '`"\\n"`'
    assert shown[ODD.index(" ")] == '`" "`'
    assert shown[ODD.index("\x07")] == '`"\\u0007"`'
    assert "\x07" not in markdown + latex
    check_latex(latex)
    assert r"\texttt{{\char34}\textvisiblespace{}\textbackslash{}\textbackslash{}{\char34}}" in latex
    assert r"{[}100\%] of A\_B \& C\# \{x\} \textbackslash{}y" in latex
    read = list(csv.DictReader(comma.splitlines()))
    assert [json.loads(row["filler"]) for row in read[2:]] == list(ODD)


def test_csv_has_every_column_and_digit(folder: Path, tmp_path: Path) -> None:
    [path] = write_tables("accuracy", [folder], tmp_path, ["csv"])
    read = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    stored = pq.read_table(folder / "accuracy.parquet").to_pylist()
    assert len(read) == len(stored)
    for row, kept in zip(read, stored, strict=True):
        assert all(row[key] == ("" if value is None else str(value)) for key, value in kept.items())
        assert (row["engine"], row["mode"], row["slots"]) == ("hf", "row-stable", "16")
    assert [row["placement"] for row in read if row["condition"] == "mless"] == ["before-question"]


def test_splits_and_metrics_get_columns_when_there_are_several(tmp_path: Path) -> None:
    settings = AccuracyTable(samples=4, temperature=0.5, k=[1, 3], dev_share=0.5)
    path = write_answers(tmp_path / "r", items=24, conditions=("none", "none-again", "mless"), settings=settings)
    written = write_tables("accuracy", [path], tmp_path)
    head, *body = cells(written[0].read_text(encoding="utf-8"))
    assert {"items of", "metric", "sd"} <= set(head)
    assert {row[head.index("items of")] for row in body} == {"all", "dev", "test"}
    assert {row[head.index("metric")] for row in body} == {"pass@1", "pass@3", "maj@3", "diversity"}
    assert "item bootstrap for several; p: exact McNemar or sign-flip over items" in written[0].read_text(
        encoding="utf-8"
    )
    check_latex(written[2].read_text(encoding="utf-8"))


def test_several_folders_name_their_models(folder: Path, tmp_path: Path) -> None:
    other = write_answers(tmp_path / "o", items=20, label="Other", task="gsm8k")
    head, *body = cells(write_tables("accuracy", [folder, other], tmp_path, ["md"])[0].read_text(encoding="utf-8"))
    assert head[:3] == ["model", "task", "condition"]
    assert {(row[0], row[1]) for row in body} == {("SmolLM2-135M-Instruct", "arithmetic-1"), ("Other", "gsm8k")}


def test_default_place_and_formats(folder: Path) -> None:
    written = draw(FigureSpec("table5", "table", (), ("none", "mless")), [folder])
    assert written == [folder / "figures" / f"table5.{kind}" for kind in ("md", "csv", "tex")]


def test_formats_of_the_other_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    table, picture = FigureSpec("table4", "table"), FigureSpec("bars", "bars")
    with pytest.raises(BadStudy, match=r"table4 is a table and cannot be written as 'png'; there are: md, csv, tex"):
        draw(table, [folder], formats=["md", "png"], out=tmp_path)
    with pytest.raises(BadStudy, match=r"bars is a picture and cannot be written as 'md'; there are: png, svg, pdf"):
        check(picture, formats=["md"])
    with pytest.raises(BadStudy, match=r"no figure format 'docx'; there are: md, csv, tex"):
        check(table, formats=["docx"])
    with pytest.raises(BadStudy, match=r"no table format 'png'; there are: md, csv, tex"):
        write_tables("table4", [folder], tmp_path, ["png"])
    with pytest.raises(BadStudy, match=r"no result folder given"):
        write_tables("table4", [], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_attention_has_no_table(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=1, heads=2, items=2)
    with pytest.raises(BadFolder, match=r"its study measured attention;"):
        write_tables("table1", [path], tmp_path)


# ---- tables with ARM -------------------------------------------------------------------------------------------------

ARM = ArmSettings(c=0.13, p1=99.5)
WITH_ARM = (
    "none",
    "none-again",
    "mless",
    Condition("arm", "none", arm=ARM),
    Condition("mless-arm", "repeat", " /", 55, arm=ARM),
    "self-consistency",
    Condition("arm-self-consistency", "none", samples=5, temperature=0.7, arm=ARM),
)


def shown_in(study: str) -> tuple[str, ...]:
    figure = load_study(study).figure
    assert figure is not None
    return tuple(figure.conditions)


def test_table2_and_table3_have_models_down_and_tasks_across(tmp_path: Path):
    sums = write_answers(tmp_path / "sums", items=60, conditions=WITH_ARM, effects={"arm": 0.35})
    more = write_answers(tmp_path / "more", items=40, conditions=WITH_ARM, task="aime24", seed=1)
    write_tables("table2", [sums, more], tmp_path, conditions=shown_in("table2"))
    rows = cells((tmp_path / "table2.md").read_text())
    assert rows[0][:3] == ["model", "arithmetic-1 w/o", "arithmetic-1 w/ ARM"]
    assert "aime24 w/ ARM" in rows[0]
    assert len(rows) == 2
    assert rows[1][3].startswith("**+")
    check_latex((tmp_path / "table2.tex").read_text())
    write_tables("table3", [sums, more], tmp_path, conditions=shown_in("table3"))
    assert [row[1] for row in cells((tmp_path / "table3.md").read_text())] == ["condition", "w/ Mless", "w/ ARM"]


def test_table6_holds_arm_and_votes_against_one_answer(tmp_path: Path):
    folder = write_answers(tmp_path / "r", items=60, conditions=WITH_ARM)
    write_tables("table6", [folder], tmp_path, conditions=shown_in("table6"))
    head, *rows = cells((tmp_path / "table6.md").read_text())
    assert [row[0] for row in rows] == [
        "none", "none-again", "mless", "arm", "mless-arm", "self-consistency", "arm-self-consistency",
    ]  # fmt: skip
    metric = {row[0]: row[head.index("metric")] for row in rows}
    assert (metric["arm"], metric["arm-self-consistency"]) == ("pass@1", "maj@5")
    words = {row[0]: row[head.index("prompt")] for row in rows}
    assert words["arm"] == "ARM with c 0.13, p1 99.5, layer 1"
    assert words["mless-arm"] == "55 × ' /', before-question, ARM with c 0.13, p1 99.5, layer 1"
    assert words["arm-self-consistency"].endswith("the vote of 5 samples at temperature 0.7")
    kept = {row["condition"]: row for row in csv.DictReader((tmp_path / "table6.csv").read_text().splitlines())}
    assert json.loads(kept["arm"]["arm"])["c"] == 0.13
    assert kept["mless"]["arm"] == ""


def test_table7_has_a_row_per_task_and_condition_and_takes_folders_without_a_control(tmp_path: Path):
    own = write_answers(tmp_path / "own", items=60, conditions=WITH_ARM[:4], task="gsm8k_test")
    imported = write_answers(tmp_path / "imported", items=50, conditions=("none", WITH_ARM[3]), task="boolq")
    write_tables("table7", [own, imported], tmp_path, conditions=shown_in("table7"))
    head, *rows = cells((tmp_path / "table7.md").read_text())
    assert head[:3] == ["model", "task", "condition"]
    assert [tuple(row[1:3]) for row in rows] == [
        ("gsm8k\\_test", "none"), ("gsm8k\\_test", "none-again"), ("gsm8k\\_test", "mless"), ("gsm8k\\_test", "arm"),
        ("boolq", "none"), ("boolq", "arm"),
    ]  # fmt: skip
    assert rows[-1][head.index("A/A")] == "–"


def test_table8_is_of_pass_at_k(tmp_path: Path):
    settings = AccuracyTable(samples=4, temperature=0.5, k=[1, 3])
    folder = write_answers(tmp_path / "r", items=50, conditions=("none", "none-again", WITH_ARM[3]), settings=settings)
    write_tables("table8", [folder], tmp_path, conditions=shown_in("table8"))
    head, *rows = cells((tmp_path / "table8.md").read_text())
    assert [(row[head.index("metric")], row[0]) for row in rows] == [
        (metric, name) for metric in ("pass@1", "pass@3") for name in ("none", "none-again", "arm")
    ]
    greedy = write_answers(tmp_path / "greedy", items=20, conditions=("none", "none-again", WITH_ARM[3]))
    with pytest.raises(BadFolder, match=r"no pass@k beyond pass@1, .* --samples 4"):
        write_tables("table8", [greedy], tmp_path, conditions=shown_in("table8"))
