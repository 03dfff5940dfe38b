"""`mless compare`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command

from mless.results.comparing import compare
from several_models import answered


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("answers")
    return [answered(root, label, n, items=40) for n, label in enumerate(("model-0", "bad\x1b[31m\u202e", "model-2"))]


def test_a_table_a_mean_and_files(command: Command, paths: list[Path], tmp_path: Path):
    said = command("compare", *paths, "--by", "activation", "--out", "out")
    assert said.code == 0, said.err
    assert "Δ pass@1 (points), against none: 3 models, 40 items of arithmetic-1" in said.out
    assert "• mless: mean " in said.out
    assert "activation SiLU (2 models)" in said.out
    assert "\x1b" not in said.out
    assert "\\u202e" in said.out
    names = ["compare.md", "compare.csv", "compare.tex", "forest.png", "forest.svg"]
    assert [line.partition(": ")[2] for line in said.out.splitlines()[-5:]] == [f"out/{name}" for name in names]
    assert all((tmp_path / "out" / name).stat().st_size for name in names)


def test_json(command: Command, paths: list[Path]):
    said = command("compare", *paths, "--condition", "all", "--json")
    assert said.code == 0, said.err
    content = json.loads(said.out)
    assert (content["readout"], content["metric"], content["models"]) == ("accuracy", "pass@1", 3)
    means = {row["condition"]: row["value"] for row in content["rows"] if row["row"] == "mean"}
    blocks = compare(paths, conditions=["all"]).blocks
    assert means == {block.condition: block.pooled.mean for block in blocks}
    assert content["files"] == []


def test_options_reach_the_comparison(command: Command, paths: list[Path], tmp_path: Path):
    (tmp_path / "models.csv").write_text("model,year\nmodel-0,2024\nmodel-2,2026\n")
    said = command(
        "compare",
        paths[0],
        paths[2],
        "--by",
        "year",
        "--models",
        "models.csv",
        "--condition",
        "mful",
        "--condition",
        "random",
    )
    assert said.code == 0, said.err
    assert "by year: no slope: at least three models with different values are needed" in said.out
    assert "mful" in said.out
    assert "random" in said.out
    assert "mless" not in said.out.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--readout", "epsilon"], "holds no epsilon: its study measured accuracy"),
        (["--metric", "maj@3"], "no metric 'maj@3'"),
        (["--condition", "slashes"], "no condition 'slashes' in this folder"),
        (["--layer", "1"], "accuracy has no layers"),
        (["--layer", "0"], "Input should be greater than or equal to 1"),
        (["--by", "colour"], "does not say the colour of model-0"),
        (["--models", "no.csv", "--by", "size"], "no.csv is not there"),
    ],
)
def test_refusals_are_one_line(command: Command, paths: list[Path], words: list[str], match: str):
    said = command("compare", paths[0], paths[2], *words)
    assert said.code == 2
    assert said.out == ""
    assert match in said.err
    assert said.err.count("\n") == 1


def test_no_folder_and_no_result_folder(command: Command, tmp_path: Path):
    assert "Missing argument" in command("compare").err
    said = command("compare", tmp_path)
    assert (said.code, "holds no study.json" in said.err) == (2, True)
    assert f"`mless run … --out {tmp_path}` makes one" in said.err
    (tmp_path / "notes.txt").write_text("mine")
    said = command("compare", tmp_path)
    assert (said.code, "so it is no result folder; give a folder that `mless run` made" in said.err) == (2, True)


def test_a_place_that_cannot_be_written(command: Command, paths: list[Path], tmp_path: Path):
    (tmp_path / "taken").write_text("")
    said = command("compare", paths[0], paths[2], "--out", "taken")
    assert said.code == 2
    assert "cannot write" in said.err
