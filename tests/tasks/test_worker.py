"""The grader's worker starts isolated: nothing of the working directory and no key reaches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mless
from mless.tasks import Grader

ASKS = "from mless.tasks import Grader\nwith Grader() as one: print(one.grade('x+1', '1+x').why)"
#: Names that Python, mless or the worker import, early or late.
SHADOWS = (
    "json",
    "re",
    "mless",
    "torch",
    "sympy",
    "math_verify",
    "queue",
    "fractions",
    "typer",
    "rich",
    "sitecustomize",
)


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder in which every module leaves a trace when it is imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in SHADOWS:
        code = f"import pathlib\npathlib.Path({str(tmp_path)!r}, 'ran-{name}').touch()\nraise SystemExit(99)\n"
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return folder


def _run(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(Path(mless.__file__).parents[1]), **more}
    return subprocess.run([sys.executable, *words], cwd=folder, env=given, capture_output=True, text=True, check=False)


def _traces(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.glob("ran-*"))


def test_modules_in_the_working_directory_do_not_run_in_the_worker(trapped: Path) -> None:
    done = _run(trapped, "-P", "-c", ASKS)
    assert (done.stdout, _traces(trapped)) == ("same value\n", []), done.stderr


def test_nor_where_this_process_itself_has_that_directory_on_its_path(trapped: Path) -> None:
    first = "import sys; sys.path.insert(0, ''); sys.path.insert(0, '.'); sys.path.append(__import__('os').getcwd())\n"
    imported = "import mless.tasks, json, re, queue\n"
    done = _run(trapped, "-P", "-c", imported + first + ASKS)
    assert (done.stdout, _traces(trapped)) == ("same value\n", []), done.stderr


@pytest.mark.parametrize("module", ["mless", "mless.cli"])
def test_python_m_mless_takes_no_module_from_the_working_directory(trapped: Path, module: str) -> None:
    (trapped / "mless.py").unlink()  # Python itself would take this one for the command, before mless is asked
    (trapped / "sitecustomize.py").unlink()
    done = _run(trapped, "-m", module, "studies")
    assert (done.returncode, _traces(trapped)) == (0, []), done.stderr
    assert "quick" in done.stdout


def test_the_installed_command_takes_no_module_from_the_working_directory(trapped: Path) -> None:
    command = Path(sys.executable).parent / "mless"
    if not command.exists():
        pytest.skip("the command is not installed beside this Python")
    done = _run(trapped, str(command), "studies")
    assert (done.returncode, _traces(trapped)) == (0, []), done.stderr


def test_a_module_of_the_users_own_that_imports_mless_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import mless, beside\nprint(beside.SAYS)\n", encoding="utf-8")
    (tmp_path / "beside.py").write_text("SAYS = 'found'\n", encoding="utf-8")
    done = _run(tmp_path, "-m", "mine")
    assert done.stdout == "found\n", done.stderr


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_the_worker_inherits_no_key_and_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLESS_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "PYTHONSTARTUP", "PYTHONPATH", "LD_PRELOAD_NOT"):
        monkeypatch.setenv(name, "sk-secret-secret")
    with Grader() as grader:
        assert grader.grade("51+x", "x+51").correct
        assert grader._worker.process is not None
        process = Path(f"/proc/{grader._worker.process._process.pid}")
        environment = (process / "environ").read_bytes()
        assert b"sk-secret" not in environment
        assert b"PYTHONHASHSEED=0" in environment
        assert os.readlink(process / "cwd") == "/"
        limits = (process / "limits").read_text()
        assert next(line for line in limits.splitlines() if line.startswith("Max file size")).split()[3] == "0"
