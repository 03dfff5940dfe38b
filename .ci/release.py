"""Cut and build a release.

python .ci/release.py cut 0.2.0     write the version where it stands: the package, CITATION.cff and CHANGELOG.md
python .ci/release.py build [OUT]   wheel and sdist of the last commit, built twice in two places; they must have the same bytes
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _replaced(path: Path, pattern: str, by: str) -> None:
    text, count = re.subn(pattern, by, path.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    if not count:
        raise SystemExit(f"{path.name} has no line that reads {pattern}")
    path.write_text(text, encoding="utf-8")


def cut(version: str, *, root: Path = ROOT, day: str | None = None) -> None:
    """Give what is unreleased this version and date. Nothing is committed."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"a version has three numbers, as in 0.2.0; got {version!r}")
    day = day or time.strftime("%Y-%m-%d", time.gmtime())
    changes = root / "CHANGELOG.md"
    if f"## [{version}]" in changes.read_text(encoding="utf-8"):
        raise SystemExit(f"CHANGELOG.md has {version} already")
    _replaced(changes, r"^## \[Unreleased\]$", f"## [Unreleased]\n\n## [{version}] - {day}")
    _replaced(root / "src" / "mless" / "__init__.py", r'^__version__ = ".*"$', f'__version__ = "{version}"')
    _replaced(root / "CITATION.cff", r"^version: .*$", f"version: {version}")
    _replaced(root / "CITATION.cff", r"^date-released: .*$", f'date-released: "{day}"')


def build(out: Path) -> list[Path]:
    """Build the last commit into `out`, which must be the same to the byte from two folders."""
    first, second = (_built() for _ in range(2))
    if first != second:
        differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        raise SystemExit(f"two builds of the same commit differ: {', '.join(differing)}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name, content in first.items():
        (out / name).write_bytes(content)
    sums = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in first.items()]
    (out / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    return sorted(out.iterdir())


def _built() -> dict[str, bytes]:
    """The files of one build, from what the last commit holds: nothing else that lies in the working tree gets in."""
    day = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "mless", Path(folder) / "made"
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(source)]
        done = subprocess.run(
            command, env={**os.environ, "SOURCE_DATE_EPOCH": day}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}the build failed")
        return {path.name: path.read_bytes() for path in sorted(made.iterdir())}


def main(words: Sequence[str]) -> int:
    match words:
        case ["cut", version]:
            cut(version)
            print(f"{version}: look at `git diff`, then commit")
        case ["build", *rest] if len(rest) <= 1:
            for path in build(Path(rest[0]) if rest else ROOT / "dist"):
                print(path)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
