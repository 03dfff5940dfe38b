"""`mless run` as people meet it: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import Command, lines_of, refused, small

from spelling import CHATML, byte_level, model_folder

HTML = '<script>alert("1")</script><img src=x onerror=alert(2)> \x07\x1b[2J\u202e How many?'


# ---- bad input ---------------------------------------------------------------------------------------------------------------

QUESTION = json.dumps({"question": "What is 1 + 1?"})
CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown model": (["--model", "smolm2"], ["no model 'smolm2'", "did you mean 'smollm2'", "a hub id", "GGUF"]),
    "model not at hand": (["--model", "no-such/model"], ["'no-such/model' is not on this machine", "hf download no-such/model"]),
    "unknown condition": (["--conditions", "none,mles"], ["no condition 'mles'", "did you mean 'mless'"]),
    "condition for answers": (["--conditions", "none,masked-filler"], ["is for studies that draw answers", "mless run accuracy"]),
    "unknown layer": (["--layers", "3"], ["no layer 3: this model's layers are 1 to 2 (numbered from 1)"]),
    "layer 0": (["--layers", "0"], ["no layer 0", "1 to 2 (numbered from 1)"]),
    "unknown head": (["--heads", "5"], ["no head 5: this model's heads are 1 to 4 (numbered from 1)"]),
    "heads that are no numbers": (["--heads", "most-shifted:3"], ["heads: cannot read 'most-shifted:3'", "such as 1-4,7"]),
    "unknown placement": (["--placement", "middle"], ["before-system", "got 'middle'"]),
    "unknown prompt kind": (["--prompt", "tchat"], ["mless: --prompt: input should be 'auto', 'chat', 'user' or 'raw', got 'tchat'"]),
    "no chat template": (["--prompt", "chat"], ["has no chat template", "use --prompt raw, or --tokenizer with a template"]),
    "empty filler": (["--filler", ""], ["repeats a filler, but none is given"]),
    "length 0": (["--length", "0"], ["mless: --length: input should be greater than or equal to 1, got 0"]),
    "limit -1": (["--limit", "-1"], ["mless: --limit: input should be", "got -1"]),
    "length set to 0": (["--set", "length=0"], ["mless: --set length: input should be", "got 0"]),
    "length that is no number": (["--length", "long"], ["mless: --length takes a whole number, got 'long' (see: ", "--help"]),
    "length=long": (["--length=long"], ["mless: --length takes a whole number, got 'long'"]),
    "prompt too long": (["--length", "600"], ["tokens under condition 'mless'", "takes 512", "smaller --length"]),
    "no such data": (["--data", "nowhere.jsonl"], ["no data file or data set 'nowhere.jsonl'"]),
    "unknown device": (["--device", "abacus"], ["no device 'abacus'", "--device cpu"]),
    "unknown dtype": (["--dtype", "int8"], ["'float32'", "got 'int8'"]),
    "unknown option": (["--lenght", "3"], ["--lenght", "--length", "--help"]),
    "unknown field": (["--set", "lenght=3"], ["no field 'lenght' (did you mean 'length'?)"]),
    "set without value": (["--set", "length"], ["--set takes key=value"]),
    "negative seed": (["--seed", "-1"], ["--seed: ", "greater than or equal to 0"]),
    "margins out of range": (["--set", "margins.drop=2"], ["margin drop must lie above 0"]),
    "no such tokenizer": (["--tokenizer", "nowhere"], ["--tokenizer", "nowhere"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "filler", "words"),
    [
        pytest.param(r"\n", "\n", r"mless (5 × '\n', before-question)", marks=pytest.mark.slow),
        (r"\\n", "\\n", r"tokens, '\\n' (2 tokens) repeated"),
        pytest.param(" #x", " #x", "5 tokens, ' #x' (", marks=pytest.mark.slow),
    ],
)
def test_fillers_as_they_are_typed(
    command: Command, tiny: Path, tmp_path: Path, typed: str, filler: str, words: str
) -> None:
    done = command("run", "quick", *small(tiny), "--length", "5", "--filler", typed, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert words in done.out
    condition = json.loads((tmp_path / "out" / "study.json").read_text())["conditions"]["mless"]
    assert condition["filler"] == filler
    assert byte_level().decode(condition["filler_ids"]) == filler


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
    result = command("run", "accuracy", "--model", tiny, "--out", stored)
    refused(result, f"{stored} holds the study 'quick', and you ask for 'accuracy'; choose another --out")
    assert "differs" not in result.err
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
    loading, prompts = first.err.splitlines()[:2]
    assert loading == "loading tiny, layers 1–2 of 2"
    assert prompts.startswith("prompts: raw; system text: 'Please reason step by step")
    made = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"retained.png", "retained.svg", "map.png", "mass.svg"} <= made
    second = command(*words)
    assert second.code == 0
    assert "(already stored)" in second.out
    assert second.err == ""
    assert "(already stored; no workers started)" in command(*words, "--workers", "2").out
    verdict = [line for line in first.out.splitlines() if line.startswith("•")]
    assert [line for line in second.out.splitlines() if line.startswith("•")] == verdict
    content = json.loads(command(*words, "--json").out)
    assert [f"• {line}" for line in content["verdict"][1:]] == verdict
    assert content["units_computed"] == 0
    assert content["folder"] == str(tmp_path / "out")
    assert {(row["layer"], row["head"], row["queries"]) for row in content["layers"]} == {
        (1, 0, "original"),
        (2, 0, "original"),
    }
    again = json.loads((tmp_path / "out" / "study.json").read_text())["command"]
    assert again[0] == "mless"
    assert "(already stored)" in command(*again[1:]).out


@pytest.fixture(scope="module")
def real_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run without --out by the real command, and where it was run. Most of its time is the import of torch and transformers."""
    where = tmp_path_factory.mktemp("real")
    words = [sys.executable, "-m", "mless.cli", "run", "quick", *small(tiny), "--json"]
    return where, subprocess.run(words, capture_output=True, text=True, cwd=where, check=False)


def test_the_real_command_keeps_standard_output_clean(
    real_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """As another process, where every library's own chatter would show."""
    done = real_run[1]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["units_computed"] == 6


def test_a_folder_is_found_for_a_run_that_names_none(
    command: Command,
    tiny: Path,
    real_run: tuple[Path, subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(real_run[0])
    (made,) = Path("results").iterdir()
    assert made.name.startswith("quick-tiny-")
    assert command("run", "quick", *small(tiny)).out.count("already stored") == 1
    assert list(Path("results").iterdir()) == [made]


def test_remote_code_is_typed_never_read(command: Command, tiny: Path, tmp_path: Path) -> None:
    lines_of(tmp_path / "own.toml", "trust_remote_code = true")
    for words in (["own.toml"], ["quick", "--set", "trust_remote_code=true"]):
        result = command("run", *words, "--model", tiny, "--out", "out")
        refused(result, "only the --trust-remote-code flag on the command line can do that")
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]
