"""`mless doctor`: every part with a way to mend it, no secrets, and exit code 0 where the core works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Command

from mless.study import health


@dataclass
class Disk:
    free: int = 100 * 10**9


def _parts(command: Command, *words: str) -> tuple[int, dict[str, dict[str, object]]]:
    result = command("doctor", "--json", *words)
    return result.code, {part["name"]: part for part in json.loads(result.out)["parts"]}


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Disks with as much room as a test says, whatever this machine has."""
    found, real = Disk(), shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real(folder)._replace(free=found.free))
    return found


def test_a_full_disk_is_named(command: Command, disk: Disk) -> None:
    disk.free = 10**6
    assert "to mend: disk, working folder, disk, temporary folder" in command("doctor", "--no-self-test").out


def test_it_names_every_part_and_how_to_mend_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("MLESS_CACHE", str(Path.cwd() / "cache"))
    result = command("doctor", "--no-self-test")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[-1] == "The core works."
    for line in filter(None, lines[:-1]):
        assert line.startswith(("found     ", "optional  ")), "what nobody needs is no fault"
        assert " -> " not in line
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
        "explorer (mless show)",
        "Ray (--workers)",
        "Inspect",
    ):
        assert f"  {name}" in result.out
    assert "sk-very" not in result.out
    assert "optional  cache: ~/cache will be made" in result.out, "the home folder is not named"
    assert not Path("cache").exists(), "a look makes nothing"
    Path("cache").mkdir()
    assert "found     cache: ~/cache\n" in command("doctor", "--no-self-test").out


def test_parts_that_are_missing(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MLESS_DATA", str(tmp_path / "gone"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "file"))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, parts = _parts(command, "--no-self-test")
    assert code == 2, "without a cache nothing can be converted"
    assert "apt-get install bubblewrap" in str(parts["sandbox for code"]["mend"])
    assert parts["sandbox for code"]["optional"]
    assert parts["explorer (mless show)"]["says"] == "uvicorn not installed"
    assert parts["explorer (mless show)"]["mend"] == "pip install 'mless[show]'"
    assert "gone, which is not there" in str(parts["data"]["says"])
    assert "MLESS_CACHE" in str(parts["cache"]["mend"])
    assert not parts["cache"]["found"]


_BROKEN: dict[str, tuple[str, str]] = {
    "ends": ("#!/bin/sh\nexit 0\n", "install it anew (apt-get install --reinstall bubblewrap)"),
    "no program": ("\x00", "install it anew (apt-get install --reinstall bubblewrap)"),
    "no namespaces": ("#!/bin/sh\necho 'bwrap: No permissions' >&2; exit 1\n", "allow user namespaces ("),
}


@pytest.mark.parametrize("broken", _BROKEN)
def test_a_sandbox_that_is_installed_and_does_not_work(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content, mend = _BROKEN[broken]
    (tmp_path / "bwrap").write_text(content)
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (one,) = (health._looked_at(part) for part in health._parts() if part.name == "sandbox for code")
    assert not one.found
    assert one.optional
    assert one.mend.startswith(mend)


def test_nothing_mends_a_machine_whose_calls_cannot_be_filtered(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    (line,) = [line for line in command("doctor", "--no-self-test").out.splitlines() if "  sandbox for code" in line]
    assert line.endswith("can be filtered, and this is riscv64")


@pytest.mark.parametrize(
    ("entry", "says"),
    [("folder", "holds no data file (.jsonl, "), ("file", "is a file, not a folder"), ("gone", "is not there")],
)
def test_data_that_is_named_and_not_there(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLESS_DATA", str(tmp_path / entry))
    result = command("doctor", "--no-self-test")
    (line,) = [line for line in result.out.splitlines() if "  data: " in line]
    assert line.startswith("missing   data: MLESS_DATA names ")
    assert says in line
    assert "export" not in line, "it is set already"
    assert " -> put " in line
    assert result.out.splitlines()[-1] == "The core works; to mend: data."


def test_a_machine_without_the_embedded_model(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_EMBEDDED", "a-package-that-nobody-installs")
    code, parts = _parts(command)
    assert code == 0
    assert parts["embedded model"]["optional"]
    assert parts["self-test"]["says"] == "not run, because the embedded model is not installed"


@pytest.mark.slow  # a whole run in another process, with a limit on its time
def test_the_self_test_runs_a_study() -> None:
    one = health._looked_at(health._SELF_TEST)
    assert one.found, one
    assert one.says.startswith("quick on two questions: mless (55 × ' /', before-question): layer 1 drops")


def test_a_self_test_that_fails_or_hangs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def says() -> str:
        one = health._looked_at(health._SELF_TEST)
        assert not one.found
        assert one.core
        return one.says

    monkeypatch.setattr(health, "SELF_TEST_SECONDS", 0.01)
    assert says() == "not finished within 0.01 s"
    monkeypatch.setattr(health, "SELF_TEST_SECONDS", 120)
    monkeypatch.setenv("MLESS_CACHE", "/dev/null/x")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert says() == "exit code 1: no message"
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert says().startswith("FileNotFoundError: ")
    monkeypatch.setattr("sys.executable", "/bin/true")
    assert says().startswith("JSONDecodeError: "), "it ended well and printed nothing"
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert says().startswith("FileNotFoundError: ")


@pytest.mark.parametrize(
    "modules",
    [
        ("torch", "pydantic"),  # the package that most others need, and one that few do
        # Each takes seconds.
        *(pytest.param((one.partition(".")[0],), marks=pytest.mark.slow) for one in health._CORE.values()),
    ],
    ids=" and ".join,
)
def test_a_core_package_that_cannot_be_imported(modules: tuple[str, ...], tmp_path: Path) -> None:
    """It is installed, and broken: a file of its name on the path fails in its place."""
    for module in modules:
        (tmp_path / f"{module}.py").write_text("raise ImportError('broken on purpose')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mless", "doctor", "--no-self-test"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (2, "")
    for name in (module.replace("_", "-") for module in modules):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"missing   {name}: ")]
        assert "is installed, but cannot be imported (ImportError: broken on purpose)" in line
        assert line.endswith(f" -> pip install --force-reinstall {name}")
    assert "disk, working folder: " in done.stdout, "the other parts are looked at too"
    assert done.stdout.splitlines()[-1].startswith("The core does not work")


def test_a_package_that_is_not_there() -> None:
    part = health._Part("gone", lambda: health._package("gone", "gone_for_good"), "pip install gone")
    assert health._looked_at(part).says == "cannot be imported (ModuleNotFoundError: No module named 'gone_for_good')"


def test_folders_that_are_gone_or_closed(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setenv("MLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLESS_DATA", "a" * 5000)  # a name no system takes; a closed folder would be open to root
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    work.rmdir()
    code, parts = _parts(command, "--no-self-test")
    monkeypatch.chdir(tmp_path)
    assert code == 0, "neither is needed by the core"
    assert str(parts["disk, temporary folder"]["says"]).startswith("FileNotFoundError: ")
    assert "export TMPDIR=DIR" in str(parts["disk, temporary folder"]["mend"])
    assert str(parts["disk, working folder"]["says"]).startswith("FileNotFoundError: ")
    assert not parts["data"]["found"]
    assert not parts["data"]["optional"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_data_that_may_not_be_read(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o300)
    monkeypatch.setenv("MLESS_DATA", str(closed))
    _, parts = _parts(command, "--no-self-test")
    closed.chmod(0o700)
    assert str(parts["data"]["says"]).startswith("PermissionError: ")
