"""The command as people meet it: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mless
from mless import cli
from spelling import CHATML, byte_level, model_folder

HTML = '<script>alert("1")</script><img src=x onerror=alert(2)> \x07\x1b[2J\u202e How many?'


@dataclass
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLESS_DATA", raising=False)

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["mless", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return Result(left.value.code if isinstance(left.value.code, int) else 0, said.out, said.err)

    return run


def external(*words: str, cwd: Path) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "mless.cli", *words], capture_output=True, text=True, cwd=cwd, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def stored(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished result folder of the tiny model."""
    out = tmp_path_factory.mktemp("stored") / "r"
    conditions = ["none", "mless", "mful", "random"]
    return mless.run("quick", out, model=str(tiny), limit=3, length=5, conditions=conditions, prompt="raw").folder


def small(tiny: Path) -> list[str]:
    return ["--model", str(tiny), "--limit", "3", "--length", "5", "--prompt", "raw", "--conditions", "none,mless"]


def lines_of(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def refused(result: Result, *words: str) -> None:
    """Exit code 2, nothing on standard output, one line on standard error that says all of this."""
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("mless: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    assert result.err.rstrip("\n").isprintable()
    for word in words:
        assert word in result.err, result.err


# ---- bad input ---------------------------------------------------------------------------------------------------------------

QUESTION = json.dumps({"question": "What is 1 + 1?"})
CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown model": (["--model", "smolm2"], ["no model 'smolm2'", "did you mean 'smollm2'", "a hub id", "GGUF"]),
    "model not at hand": (["--model", "no-such/model"], ["'no-such/model' is not on this machine", "hf download no-such/model"]),
    "unknown condition": (["--conditions", "none,mles"], ["no condition 'mles'", "did you mean 'mless'"]),
    "unknown layer": (["--layers", "3"], ["no layer 3: this model's layers are 1 to 2 (numbered from 1)"]),
    "layer 0": (["--layers", "0"], ["no layer 0", "1 to 2 (numbered from 1)"]),
    "unknown head": (["--heads", "5"], ["no head 5: this model's heads are 1 to 4 (numbered from 1)"]),
    "heads that are no numbers": (["--heads", "most-shifted:3"], ["heads: cannot read 'most-shifted:3'", "such as 1-4,7"]),
    "unknown placement": (["--placement", "middle"], ["before-system", "got 'middle'"]),
    "unknown prompt kind": (["--prompt", "tchat"], ["'auto', 'chat' or 'raw'", "got 'tchat'"]),
    "no chat template": (["--prompt", "chat"], ["has no chat template", "use --prompt raw, or --tokenizer with a template"]),
    "empty filler": (["--filler", ""], ["repeats a filler, but none is given"]),
    "length 0": (["--length", "0"], ["field 'length'", "greater than or equal to 1"]),
    "length that is no number": (["--length", "long"], ["Invalid value for '--length'", "--help"]),
    "prompt too long": (["--length", "600"], ["tokens under condition 'mless'", "takes 512", "smaller --length"]),
    "no such data": (["--data", "nowhere.jsonl"], ["no data file or data set 'nowhere.jsonl'"]),
    "unknown device": (["--device", "abacus"], ["no device 'abacus'", "--device cpu"]),
    "unknown dtype": (["--dtype", "int8"], ["'float32'", "got 'int8'"]),
    "unknown option": (["--lenght", "3"], ["--lenght", "--length", "--help"]),
    "unknown field": (["--set", "lenght=3"], ["no field 'lenght' (did you mean 'length'?)"]),
    "set without value": (["--set", "length"], ["--set takes key=value"]),
    "negative seed": (["--seed", "-1"], ["field 'seed'", "greater than or equal to 0"]),
    "margins out of range": (["--set", "margins.drop=2"], ["margin drop must lie above 0"]),
    "no such tokenizer": (["--tokenizer", "nowhere"], ["--tokenizer", "nowhere"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "filler", "words"),
    [
        (r"\n", "\n", r"mless (5 × '\n', before-question)"),
        (r"\\n", "\\n", r"tokens, '\\n' (2 tokens) repeated"),
        (" #x", " #x", "5 tokens, ' #x' ("),
    ],
)
def test_fillers_as_they_are_typed(
    command: Command, tiny: Path, tmp_path: Path, typed: str, filler: str, words: str
) -> None:
    done = command("run", "quick", *small(tiny), "--length", "5", "--filler", typed, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert words in done.out
    told = json.loads((tmp_path / "out" / "study.json").read_text())["conditions"]["mless"]
    assert told["filler"] == filler
    assert byte_level().decode(told["filler_ids"]) == filler


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_leaves_nothing(command: Command, tiny: Path, tmp_path: Path, case: str) -> None:
    options, words = CASES[case]
    refused(command("run", "quick", *small(tiny), *options, "--out", tmp_path / "out"), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["d.jsonl' is empty"]),
        ([QUESTION, '{"question": "half'], ["d.jsonl' line 2: broken JSON"]),
        (
            [QUESTION, "", '{"answer": "2"}'],
            ["d.jsonl' line 3: no field 'question'", "fields there: 'answer'", "--question-field"],
        ),
        ([QUESTION, '{"question": " "}'], ["d.jsonl' line 2: 'question' is empty", "remove the row"]),
        ([QUESTION, '{"question": "a \\ud83d"}'], ["line 2", "half a character"]),
    ],
    ids=["empty", "broken-line", "missing-field", "empty-question", "half-character"],
)
def test_bad_data_names_the_line(
    command: Command, tiny: Path, tmp_path: Path, rows: Sequence[str], words: list[str]
) -> None:
    path = lines_of(tmp_path / "d.jsonl", *rows)
    refused(command("run", "quick", *small(tiny), "--data", path, "--out", tmp_path / "out"), *words)
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_studies(command: Command, tmp_path: Path) -> None:
    refused(command("run", "quik"), "no study 'quik' (did you mean 'quick'?)", "or give a .toml file")
    refused(command("figure", "fig99"), "no study 'fig99'", "fig20")
    refused(command("figure", "quick"), "study 'quick' is for no figure", "mless studies")
    refused(command("figure", "quick", "--heads", "1"), "study 'quick' is for no figure")
    refused(command("walk"), "walk", "--help")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_template(command: Command, tiny: Path, tmp_path: Path) -> None:
    chatty = model_folder(tmp_path / "chatty", template=CHATML)
    out = tmp_path / "out"
    words = ["run", "quick", "--model", chatty, "--prompt", "chat", "--tokenizer", tiny, "--out", out]
    refused(command(*words), "chatty has no chat template", "use --prompt raw")
    assert not out.exists()
    assert "yes (prompt auto = chat)" in command("models", tiny, "--tokenizer", chatty).out


@pytest.mark.parametrize("question", ["a ~ b", "fine"], ids=["in-every-item", "in-a-later-item"])
def test_nan_in_the_attention(command: Command, tmp_path: Path, question: str) -> None:
    model = model_folder(tmp_path / "broken", broken="~")
    data = lines_of(tmp_path / "d.jsonl", json.dumps({"question": question}), json.dumps({"question": "a ~ b"}))
    # without --json the lines of a run under way come before the fault of a later item
    result = command("run", "quick", *small(model), "--data", data, "--out", tmp_path / "out", "--json")
    refused(result, "not finite", "--dtype float32, or check the checkpoint")
    assert not (tmp_path / "out").exists()


def test_folders_of_another_study_or_version(command: Command, tiny: Path, tmp_path: Path, stored: Path) -> None:
    result = command("run", "quick", *small(tiny), "--out", stored)
    refused(result, "holds another study ('quick'): it differs in conditions;", "choose another --out")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "study.json").write_text('{"format": 99, "mless": "7.0"}')
    refused(command("run", "quick", *small(tiny), "--out", newer), "made by a newer mless (7.0, format 99)", "upgrade")
    refused(command("figure", "mass", newer), "made by a newer mless (7.0, format 99)")
    refused(command("figure", "mass", tmp_path / "nowhere"), "no study.json")
    (tmp_path / "file").write_text("x")
    refused(command("run", "quick", *small(tiny), "--out", tmp_path / "file"), "is a file, not a result folder")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "newer", "study.json"]


def test_control_characters_in_a_message_are_shown_escaped(command: Command, tiny: Path, tmp_path: Path) -> None:
    refused(command("run", "quick", "--model", "no\x1b[2J\nmodel"), "\\x1b[2J")
    out = tmp_path / "bad\x07\x1bname"
    out.mkdir()
    (out / "x").touch()
    refused(command("run", "quick", *small(tiny), "--out", out), "bad\\x07\\x1bname is not empty")


def test_html_and_control_characters_in_the_data(command: Command, tiny: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"id": f"<b>{n}</b>\x1b", "question": f"{HTML} {n}"}) for n in range(2)]
    data = lines_of(tmp_path / "<i>evil.jsonl", *rows)
    result = command("run", "quick", *small(tiny), "--data", data, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "2 items of <i>evil" in result.out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for unsafe in ("<script>alert", "<img src=x", "\x07", "\x1b", "\u202e", "<b>0", "<i>evil"):
        assert unsafe not in page
    for shown in ("&lt;i&gt;evil", "\\x1b", "\\x07"):
        assert shown in page


# ---- what it prints ------------------------------------------------------------------------------------------------------------


def test_a_run_and_its_second(command: Command, tiny: Path, tmp_path: Path) -> None:
    words = ["run", "quick", *small(tiny), "--set", "margins.same=[0.5, 1.5]", "--out", tmp_path / "out"]
    first = command(*words)
    assert first.code == 0
    assert "tiny, 3 items of bundled, raw prompts; retained share λ = " in first.out
    assert "(6 of 6 units computed)" in first.out
    assert "• mless (5 × ' /', before-question): layer 1 " in first.out
    assert f"report: {tmp_path / 'out' / 'report.html'}" in first.out
    assert first.err.splitlines()[:2] == ["loading tiny, layers 1–2 of 2", "prompts: raw"]
    made = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"retained.png", "retained.svg", "map.png", "mass.svg"} <= made
    second = command(*words)
    assert second.code == 0
    assert "(already stored)" in second.out
    assert second.err == ""
    verdict = [line for line in first.out.splitlines() if line.startswith("•")]
    assert [line for line in second.out.splitlines() if line.startswith("•")] == verdict
    told = json.loads(command(*words, "--json").out)
    assert [f"• {line}" for line in told["verdict"][1:]] == verdict
    assert told["units_computed"] == 0
    assert told["folder"] == str(tmp_path / "out")
    assert {(row["layer"], row["head"], row["queries"]) for row in told["layers"]} == {
        (1, 0, "original"),
        (2, 0, "original"),
    }
    again = json.loads((tmp_path / "out" / "study.json").read_text())["command"]
    assert again[0] == "mless"
    assert "(already stored)" in command(*again[1:]).out


def test_a_folder_is_found_for_a_run_that_names_none(command: Command, tiny: Path, tmp_path: Path) -> None:
    assert command("run", "quick", *small(tiny), "--json").err == ""
    (made,) = (tmp_path / "results").iterdir()
    assert made.name.startswith("quick-tiny-")
    assert command("run", "quick", *small(tiny)).out.count("already stored") == 1


def test_the_real_command_keeps_standard_output_clean(tiny: Path, tmp_path: Path) -> None:
    """As another process, where every library's own chatter would show."""
    done = external("run", "quick", *small(tiny), "--out", str(tmp_path / "out"), "--json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.count("\n") == 1
    assert json.loads(done.out)["units_computed"] == 6


def test_help_and_version(command: Command) -> None:
    assert command("--version").out == f"mless {mless.__version__}\n"
    for words in ([], ["--help"], ["-h"]):
        result = command(*words)
        assert (result.code, result.err) == (0, "")
        told = " ".join(result.out.split())
        assert "Layers and heads are numbered from 1." in told
        assert "Exit codes: 0 done; 1 a defect of mless" in told
        assert "2 bad input" in told
        assert "130 interrupted" in told
        assert all(name in told for name in ("run", "figure", "studies", "models"))
    for name in ("run", "figure", "studies", "models"):
        assert "Layers and heads are numbered from 1." in " ".join(command(name, "--help").out.split())


def test_studies(command: Command) -> None:
    result = command("studies")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines() if line.startswith(("quick", "fig"))][:2] == [
        "quick",
        "fig2",
    ]
    told = json.loads(command("studies", "--json").out)
    assert told["fig15"]["figure"]["panels"][0]["head"] == 17
    assert told["quick"]["length"] == 55


def test_models(command: Command, tiny: Path) -> None:
    assert "smollm2" in command("models").out
    assert json.loads(command("models", "--json").out)["smollm2"] == "SmolLM2-135M-Instruct, embedded"
    told = json.loads(command("models", tiny, "--json").out)
    assert (told["model"], told["layers"], told["heads"], told["context"]) == ("tiny", 2, 4, 512)
    assert "no (prompt auto = raw)" in command("models", tiny).out
    refused(command("models", "nothing"), "no model 'nothing'")


# ---- figures ---------------------------------------------------------------------------------------------------------------------


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
        result, "results/attention-tiny holds another study", "remove that folder, or run the study with: mless run attention --out DIR",
        "mless figure attention DIR",
    )  # fmt: skip


def test_remote_code_is_typed_never_read(command: Command, tiny: Path, tmp_path: Path) -> None:
    lines_of(tmp_path / "own.toml", "trust_remote_code = true")
    for words in (["own.toml"], ["quick", "--set", "trust_remote_code=true"]):
        result = command("run", *words, "--model", tiny, "--out", "out")
        refused(result, "only the --trust-remote-code flag on the command line can do that")
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]


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
    told = json.loads(command(*words, "--json").out)
    assert told["files"] == [str(made.relative_to(tmp_path))]
    assert made.read_bytes() == before  # the same input gives the same bytes


def test_figures_from_folders(command: Command, stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(stored, other)
    for name, options in {
        "fig11": ["--heads", "2"],
        "fig10": ["--heads", "1"],
        "mass": ["--layers", "2"],
        "map": [],
    }.items():
        result = command(
            "figure", name, stored, *([other] if name == "fig11" else []), *options, "--out", "p", "--format", "svg"
        )
        assert result.code == 0, result.err
        assert (tmp_path / "p" / f"{name}.svg").stat().st_size > 1000
    whole = command("figure", "fig9", stored, "--layers", "1-2", "--heads", "3", "--item", "2", "--out", "p")
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
    refused(command("figure", "map", other), "retained.parquet cannot be read", "remove it and run the study again")


def test_mass_of_another_layer_is_another_picture(command: Command, stored: Path, tmp_path: Path) -> None:
    for layer in (1, 2):
        command("figure", "mass", stored, "--layers", layer, "--out", f"p{layer}", "--format", "svg")
    assert (tmp_path / "p1" / "mass.svg").read_bytes() != (tmp_path / "p2" / "mass.svg").read_bytes()


def test_run_of_a_figures_study_asks_nothing_of_its_heads(command: Command, tiny: Path, tmp_path: Path) -> None:
    """Only `figure` draws the published heads; `run` measures, and such a folder serves any choice of heads later."""
    words = ["run", "fig15", "--model", tiny, "--limit", "2", "--length", "5", "--out", tmp_path / "out"]
    assert command(*words).code == 0
    assert command("figure", "fig15", tmp_path / "out", "--heads", "1,4", "--format", "svg").code == 0


# ---- the door --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mless.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(mless, name) is not None
    assert name in dir(mless)


def test_the_door_is_sorted_and_closed() -> None:
    assert sorted(mless.__all__) == mless.__all__
    with pytest.raises(AttributeError, match="module 'mless' has no attribute 'nothing'; it has: ArmHandle, "):
        _ = mless.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_no_module_bears_the_name_of_a_public_function() -> None:
    modules = [module.name for module in pkgutil.walk_packages(mless.__path__, "mless.")]
    assert "mless.study.direct" in modules
    functions = {name for name in mless.__all__ if not isinstance(getattr(mless, name), type)}
    assert {"load", "prompts", "received", "retained", "run"} <= functions
    assert not {module for module in modules if module.rpartition(".")[2] in functions}
    for module in modules:
        if module.startswith("mless.integrations.") or module.endswith("_triton"):
            continue  # they need packages that are extras
        package: Any = importlib.import_module(module)
        shadowed = {name for name in getattr(package, "__all__", ()) if f"{module}.{name}" in modules}
        assert not shadowed, (module, shadowed)


def test_importing_is_light() -> None:
    heavy = "torch transformers scipy pyarrow matplotlib pydantic numpy typer rich jinja2"
    code = f"import sys, mless; dir(mless); print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_commands_own_start_is_light() -> None:
    code = "import sys, mless.cli; print(sorted({'torch', 'transformers', 'scipy', 'pyarrow', 'matplotlib', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
