"""`mless doctor`: every part with a way to mend it, no secrets, and exit code 0 where the core works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command

from mless.study import health


def _parts(command: Command, *words: str) -> tuple[int, dict[str, dict[str, object]]]:
    result = command("doctor", "--json", *words)
    return result.code, {part["name"]: part for part in json.loads(result.out)["parts"]}


def test_it_names_every_part_and_how_to_mend_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("MLESS_CACHE", str(Path.cwd() / "cache"))
    result = command("doctor", "--no-self-test")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[-1] == "The core works."
    for line in filter(None, lines[:-1]):
        assert line.startswith(("found    ", "missing  "))
        assert (" -> " in line) == line.startswith("missing"), "what is missing has a way out"
    for name in (
        "Python",
        "torch",
        "processor",
        "GPU",
        "memory",
        "disk",
        "cache",
        "data",
        "sandbox for code",
        "Inspect",
    ):
        assert f"  {name}" in result.out
    assert "sk-very" not in result.out
    assert "found    cache: ~/cache" in result.out, "the home folder is not named"


def test_parts_that_are_missing(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MLESS_DATA", str(tmp_path / "gone"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "file"))
    code, parts = _parts(command, "--no-self-test")
    assert code == 2, "without a cache nothing can be converted"
    assert "apt-get install bubblewrap" in str(parts["sandbox for code"]["mend"])
    assert "MLESS_DATA is no folder" in str(parts["data"]["says"])
    assert "MLESS_CACHE" in str(parts["cache"]["mend"])
    assert not parts["cache"]["found"]


@pytest.mark.slow  # a whole run in another process, with a limit on its time
def test_the_self_test_runs_a_study() -> None:
    one = health._self_test()
    assert one.found, one
    assert one.says.startswith("quick on two questions: ")


def test_a_self_test_that_fails_or_hangs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SELF_TEST_SECONDS", 0.01)
    assert health._self_test().says == "not finished within 0.01 s"
    monkeypatch.setattr(health, "SELF_TEST_SECONDS", 120)
    monkeypatch.setenv("MLESS_CACHE", "/dev/null/x")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert health._self_test().says == "exit code 1: no message"
