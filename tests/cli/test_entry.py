"""The command as a whole: its help, words it does not know, and a quick start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command, refused

import mless
from mless.study import planning


def test_help_and_version(command: Command) -> None:
    assert command("--version").out == f"mless {mless.__version__}\n"
    for words in ([], ["--help"], ["-h"]):
        result = command(*words)
        assert (result.code, result.err) == (0, "")
        shown = " ".join(result.out.split())
        assert "Layers and heads are numbered from 1." in shown
        assert "Exit codes: 0 done; 1 a defect of mless" in shown
        assert "2 bad input" in shown
        assert "130 interrupted" in shown
        assert all(name in shown for name in ("run", "figure", "studies", "models"))
    for name in ("run", "figure", "studies", "models"):
        assert "Layers and heads are numbered from 1." in " ".join(command(name, "--help").out.split())


def test_unknown_studies(command: Command, tmp_path: Path) -> None:
    refused(command("run", "quik"), "no study 'quik' (did you mean 'quick'?)", "or give a .toml file")
    refused(command("figure", "fig99"), "no study 'fig99'", "fig20")
    refused(command("figure", "quick"), "study 'quick' is for no figure", "mless studies")
    refused(command("figure", "quick", "--heads", "1"), "study 'quick' is for no figure")
    refused(command("walk"), "walk", "--help")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_own_start_is_light() -> None:
    code = "import sys, mless.cli; print(sorted({'torch', 'transformers', 'scipy', 'pyarrow', 'matplotlib', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def as_installed(tmp_path: Path, *words: str, **variables: str) -> str:
    """What the installed command prints; the name it was called by matters here."""
    code = "import sys; sys.argv[0] = 'mless'; from mless.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "HOME": str(tmp_path), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_shells_complete_commands_and_options(tmp_path: Path) -> None:
    asks = {"_MLESS_COMPLETE": "complete_bash"}
    assert as_installed(tmp_path, **asks, COMP_WORDS="mless fig", COMP_CWORD="1").split() == ["figure"]
    options = as_installed(tmp_path, **asks, COMP_WORDS="mless run --max-new", COMP_CWORD="2").split()
    assert options == ["--max-new-tokens"]
    # Which shell it is called from is asked of the processes above, and there may be none.
    as_installed(tmp_path, "--install-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete_bash" in (tmp_path / ".bash_completions" / "mless.sh").read_text()
    assert "mless.sh" in (tmp_path / ".bashrc").read_text()


def test_words_that_are_no_text(command: Command, tmp_path: Path) -> None:
    """A file's name may hold any bytes; study.json and tables hold text."""
    name = os.fsdecode(b"m\xff")
    for words in (
        ["run", "quick", "--model", name],
        ["run", "quick", "--out", tmp_path / name],
        ["run", f"{name}.toml"],
        ["run", "quick", "--data", f"{name}.jsonl"],
        ["figure", "map", name],
        ["verify", name],
        ["import", f"none={name}"],
        ["models", name],
    ):
        refused(command(*words), "m\\udcff", "holds bytes that are no UTF-8 text", "rename the file or folder")
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_refused_is_no_defect(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan", lambda *words, **more: bytearray(1 << 60))
    refused(
        command("plan", "--items", "9"),
        "memory was refused (MemoryError)",
        "--set batch_size=1",
        "what is stored stays",
    )


@pytest.mark.parametrize("asked", ["99999999", "1" * 5000, "4,99999"])
def test_more_threads_than_any_machine_has(command: Command, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """OpenMP would end the process without a word."""
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    refused(command("studies"), "OMP_NUM_THREADS is '", "expected at most 4,096 threads", "or unset it")
    monkeypatch.setenv("OMP_NUM_THREADS", "00000000004,3")
    assert command("studies").code == 0
