"""`mless figure`: what it draws, from which folders, and what it refuses before anything is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from command_line import Command, refused


def test_a_figure_out_of_range_is_refused_before_the_run(command: Command, tmp_path: Path) -> None:
    result = command("figure", "fig15", "--model", "smollm2")
    refused(
        result, "fig15 shows head 17", "heads are 1 to 9 (numbered from 1)", "--heads most-shifted:3", "--heads 1,9"
    )
    refused(command("figure", "fig15", "--model", "smollm2", "--heads", "10"), "no head 10", "1 to 9")
    refused(
        command("figure", "fig9", "--model", "smollm2", "--heads", "1", "--layers", "29-31"), "no layer 31", "1 to 30"
    )
    refused(command("figure", "fig15", "--model", "smollm2", "--format", "gif"), "'gif'", "png, svg, pdf")
    refused(command("figure", "fig15", "--model", "smollm2", "--queries", "all"), "'all'", "later, original")
    refused(command("figure", "map", "--model", "smollm2", "--heads", "1"), "figure map takes no --heads")
    refused(command("figure", "mass", "--model", "smollm2", "--layers", "1-3"), "mass shows one layer")
    refused(command("figure", "map", "--model", "smollm2", "--item", "1"), "figure map takes no --item")
    refused(command("figure", "attention", "--model", "smollm2", "--item", "99"), "no item '99' in bundled", "1 to 24")
    refused(command("figure", "attention", "--model", "smollm2", "--format", ","), "no figure format given")
    result = command("figure", "fig10", "--model", "smollm2", "--heads", "1", "--set", "conditions=none,mless")
    refused(result, "fig10 shows 'mful', but would run none, mless only", "--set figure.conditions=none,mless")
    several = ["--model", "smollm2", "--model", "smollm2", "--model", "no-such/model"]
    refused(command("figure", "fig2", *several, "--heads", "1"), "'no-such/model' is not on this machine")
    assert list(tmp_path.iterdir()) == []


def test_pictures_that_cannot_be_written_are_refused_before_the_run(
    command: Command, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    for out in ("file", "file/deeper", "/proc/none"):
        result = command("figure", "attention", "--model", tiny, "--out", out)
        refused(result, f"cannot write pictures to {out}", "choose another --out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_figures_folder_that_holds_another_study(command: Command, tiny: Path, stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path / "results" / "attention-tiny")
    result = command("figure", "attention", "--model", tiny)
    refused(
        result, "results/attention-tiny holds the study 'quick', and you ask for 'attention';",
        "remove that folder, or run the study with: mless run attention --out DIR",
        "mless figure attention DIR",
    )  # fmt: skip


def test_a_published_model_that_is_not_here(command: Command, tmp_path: Path) -> None:
    result = command("figure", "fig15")
    refused(
        result,
        "fig15 was published for Qwen/Qwen2.5-Math-7B",
        "hf download Qwen/Qwen2.5-Math-7B",
        "mless figure fig15 --model smollm2 --heads most-shifted:3",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_figure_for_a_model_of_ones_own(command: Command, tiny: Path, tmp_path: Path) -> None:
    words = [
        "figure",
        "fig15",
        "--model",
        tiny,
        "--heads",
        "most-shifted:2",
        "--limit",
        "3",
        "--length",
        "5",
        "--format",
        "svg",
    ]
    result = command(*words)
    assert result.code == 0, result.err
    (made,) = tmp_path.glob("results/fig15-tiny-*/figures/fig15.svg")
    assert f"figure: {made.relative_to(tmp_path)}" in result.out
    assert "layer 1 " in result.out
    before = made.read_bytes()
    content = json.loads(command(*words, "--json").out)
    assert content["files"] == [str(made.relative_to(tmp_path))]
    assert made.read_bytes() == before  # the same input gives the same bytes


def test_figures_from_folders(command: Command, stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(stored, other)
    for name, options in {
        "fig11": ["--heads", "2"],
        "fig10": ["--heads", "1"],
        "map": [],
    }.items():
        result = command(
            "figure", name, stored, *([other] if name == "fig11" else []), *options, "--out", "p", "--format", "svg"
        )
        assert result.code == 0, result.err
        assert (tmp_path / "p" / f"{name}.svg").stat().st_size > 1000
    options = ["--layers", "1-2", "--heads", "3", "--item", "2", "--out", "p", "--format", "png"]
    whole = command("figure", "fig9", stored, *options)
    assert whole.code == 0, whole.err
    assert (tmp_path / "p" / "fig9.png").read_bytes()[:4] == b"\x89PNG"
    refused(command("figure", "fig15", stored, "--heads", "7"), "no head 7", "1 to 4")
    refused(command("figure", "fig15", stored, "--heads", "1", "--item", "9"), "no item '9'", "1 to 3")


def test_figures_of_a_layer_and_of_conditions_asked_for(command: Command, tiny: Path, tmp_path: Path) -> None:
    words = ["--model", tiny, "--limit", "3", "--length", "5", "--format", "svg", "--out", "p"]
    result = command("figure", "attention", *words, "--layers", "2")
    assert result.code == 0, result.err
    assert "Layer 2 Head" in (tmp_path / "p" / "attention.svg").read_text(encoding="utf-8")
    result = command("figure", "mass", *words, "--set", "conditions=none,mless")
    assert result.code == 0, result.err
    assert ">Mful<" not in (tmp_path / "p" / "mass.svg").read_text(encoding="utf-8")


def test_a_damaged_table_is_named(command: Command, stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(stored, other)
    file = other / "retained.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    refused(
        command("figure", "map", other),
        "retained.parquet is damaged, or not the table that was stored",
        "restore it from a copy, or remove it",
    )


def test_mass_of_another_layer_is_another_picture(command: Command, stored: Path, tmp_path: Path) -> None:
    for layer in (1, 2):
        result = command("figure", "mass", stored, "--layers", layer, "--out", f"p{layer}", "--format", "svg")
        assert result.code == 0, result.err
    assert (tmp_path / "p1" / "mass.svg").read_bytes() != (tmp_path / "p2" / "mass.svg").read_bytes()


def test_run_of_a_figures_study_asks_nothing_of_its_heads(command: Command, tiny: Path, tmp_path: Path) -> None:
    """Only `figure` draws the published heads; `run` measures, and such a folder serves any choice of heads later."""
    words = ["run", "fig15", "--model", tiny, "--limit", "2", "--length", "5", "--out", tmp_path / "out"]
    assert command(*words).code == 0
    assert command("figure", "fig15", tmp_path / "out", "--heads", "1,4", "--format", "svg").code == 0
