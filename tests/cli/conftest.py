"""The command in this process, a tiny model and a finished result folder of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import Command, Result

import mless
from mless import cli
from spelling import model_folder


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def stored(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished result folder of the tiny model; tests only read it."""
    out = tmp_path_factory.mktemp("stored") / "r"
    conditions = ["none", "mless", "mful", "random"]
    return mless.run("quick", out, model=str(tiny), limit=3, length=5, conditions=conditions, prompt="raw").folder
