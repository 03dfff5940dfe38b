"""Every kind of study, killed again and again at random moments: it ends with the tables of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ground import STUDIES, make, study
from running import child_of, prepare

KILLS = 20  # of each of the five kinds
IN_A_ROW = 5


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make(tmp_path_factory.mktemp("undisturbed") / "ground")
    prepare()
    return made


def files(out: Path) -> int:
    """The files there, and every four kilobytes of a table that grows."""
    # os.walk passes over folders that go away meanwhile
    there = [Path(folder) / name for folder, _, names in os.walk(out) for name in names]
    size = 0
    for path in there:
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.parent.name == "units" else 0
    return len(there) + size // 4096


def killed(command: list[str], out: Path, place: Path, rng: Random) -> bool:
    """Kill the command as it starts, loads, measures, writes or draws; False where it was done before."""
    count, delay = (
        (0, rng.uniform(0, 3)) if rng.random() < 0.2 else (files(out) + rng.randint(1, 8), rng.uniform(0, 0.1))
    )
    child = child_of(command, place, place / ".said")
    began = time.monotonic()
    while files(out) < count and time.monotonic() - began < 60 and not _ended(child):
        time.sleep(0.002)
    time.sleep(delay)
    if _ended(child):
        return False
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _ended(child: int) -> bool:
    """Whether it has ended; it stays to be waited for."""
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None


def finished(command: list[str], place: Path) -> None:
    child = child_of(command, place, place / ".said")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (place / ".said").read_text()


def stored(folder: Path) -> dict[str, Any]:
    """Tables bit by bit, and study.json without what may differ: times, places, and the digest of these."""
    found: dict[str, Any] = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*.parquet")
        if "set-aside" not in file.parts
    }
    for file in folder.rglob("study.json"):
        about = json.loads(file.read_text())
        kept = {key: value for key, value in about.items() if key not in ("timings", "command", "sha256")}
        found[str(file.relative_to(folder))] = kept
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_killed_at_twenty_moments_ends_with_the_same_bits(kind: str, undisturbed: Path, tmp_path: Path) -> None:
    rng = Random(kind)
    out = tmp_path / "out"
    command = study(kind, undisturbed, out)
    kills = 0
    for _ in range(4 * KILLS):
        died = killed(command, out, tmp_path, rng)
        kills += died
        if not died or kills % IN_A_ROW == 0:
            finished(command, tmp_path)
            assert stored(out) == stored(undisturbed / kind)
            assert not list(out.rglob("*.partial"))
            shutil.rmtree(out)
        if kills == KILLS:
            break
    assert kills == KILLS
