"""Runs one case: spoil a copy, give it to the command in a forked process, and see how that ends."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from cases import Case
from ground import words
from serving import serving
from spoiling import copy_of

#: A command that takes longer hangs.
SECONDS = 20
_MESSAGE = 3000


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is None where it was killed for its time."""

    code: int | None
    said: str
    seconds: float
    changed: list[str]
    #: Tables that a run which ended well did not give as they should be.
    wrong: list[str] = field(default_factory=list[str])

    def faults(self) -> list[str]:
        """What a command must never do, whatever it is given."""
        if self.code is None:
            return [f"ran longer than {SECONDS} s"]
        last = self.said.rstrip("\n").rsplit("\n", 1)[-1]
        found: list[str] = []
        if "Traceback (most recent call last)" in self.said or self.code not in (0, 2):
            found.append(f"ended with {self.code} and a traceback: {last[:300]}")
        elif self.code == 2:
            if not last.startswith("mless: "):
                found.append(f"refused without a message: {last[:200]}")
            if len(last) > _MESSAGE or not last.isprintable():
                found.append(f"a message that is long or not plain: {last[:200]!r}")
            found += [f"left something behind or changed it: {name}" for name in self.changed[:3]]
        found += [f"another table than an undisturbed run gives: {name}" for name in self.wrong]
        if any(not sign.isprintable() and sign not in "\n\t" for sign in self.said):
            found.append("wrote a control character to the terminal")
        return found


def prepare() -> None:
    """Import what the commands import, so that a forked process begins at once."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import mless.cli
    import mless.figures.attention
    import mless.report.page
    import mless.study.accuracy.measure
    import mless.study.affine.measure
    import mless.study.attention.measure
    import mless.study.importing
    import mless.study.likelihood.measure
    import mless.study.tuning.measure  # noqa: F401

    torch.set_num_threads(1)


def run_case(case: Case, ground: Path, place: Path) -> Ended:
    place.mkdir(parents=True)
    spoiled = copy_of(ground / case.row.source, place / Path(case.row.source).name)
    case.row.spoil(spoiled / case.file if case.file else spoiled, case.rng)
    if case.row.reseal:
        reseal(spoiled)
    # A run again draws the page anew where it is missing.
    if spoiled.is_dir() and case.file != "report.html" and case.seed % 2:
        (spoiled / "report.html").unlink(missing_ok=True)
    before = contents(place)
    with serving(spoiled) if case.row.served else contextlib.nullcontext("") as address:
        command = words(case.command, x=spoiled, g=ground, o=place / "out", u=address)
        code, said, seconds = forked(command, place)
    after = contents(place)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if case.row.keeps:
        names = [name for name in names if name.endswith(".partial")]
    wrong = _other_tables(spoiled, ground / case.row.same_as) if case.row.same_as and code == 0 else []
    return Ended(code, said, seconds, names, wrong if command[0] in ("run", "tune") else [])


def _other_tables(made: Path, undisturbed: Path) -> list[str]:
    files = undisturbed.glob("*.parquet")
    return [
        file.name
        for file in files
        if not (made / file.name).is_file() or (made / file.name).read_bytes() != file.read_bytes()
    ]


def reseal(folder: Path) -> None:
    """Checksums that fit what is there now, as whoever changes a folder by hand and knows mless would write them."""
    import json

    from mless.results import sealing

    try:
        about = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return
    if not isinstance(about, dict):
        return
    if isinstance(about.get("tables"), dict):
        for name in list(about["tables"]):
            file = folder / f"{name}.parquet"
            if file.is_file():
                about["tables"][name] = sealing.digest_of_file(file)
    about.pop(sealing.OWN_DIGEST, None)
    about[sealing.OWN_DIGEST] = sealing.digest_of(about)
    (folder / "study.json").write_text(json.dumps(about), encoding="utf-8")


def contents(place: Path) -> dict[str, str]:
    """Every entry and its digest; a lock, which every run makes, does not count."""
    found: dict[str, str] = {}
    for path in place.rglob("*"):
        name = str(path.relative_to(place))
        if path.name == ".lock" or name.startswith("cwd"):
            continue
        if path.is_symlink() or not path.is_file():
            found[name] = f"{path.lstat().st_mode}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def forked(command: list[str], place: Path) -> tuple[int | None, str, float]:
    """The command in a process of its own; it is killed after `SECONDS`."""
    (place / "cwd").mkdir()
    output = place / "cwd" / ".said"
    began = time.monotonic()
    child = child_of(command, place / "cwd", output)
    code: int | None = None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        # On a busy machine a command may wait long for its turn: it hangs if it computes for so long, or if it sleeps.
        waited = time.monotonic() - began
        if waited > SECONDS and (_computed(child) > SECONDS or waited > 6 * SECONDS):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    said = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return code, said, time.monotonic() - began


def child_of(command: list[str], folder: Path, output: Path) -> int:
    """The number of a process that runs the command in `folder` and leaves what it said in `output`."""
    child = os.fork()
    if child == 0:
        _child(command, folder, output)
    return child


def _computed(child: int) -> float:
    """Seconds of processor time of a process."""
    words = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _child(command: list[str], folder: Path, output: Path) -> None:
    """Never returns."""
    from mless import cli

    code = 70
    text = io.StringIO()
    try:
        os.chdir(folder)
        sys.argv = ["mless", *command]
        with redirect_stdout(text), redirect_stderr(text):
            cli.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    except BaseException:  # noqa: BLE001 — what no command may let out is what is looked for
        code = 1
        text.write(traceback.format_exc())
    finally:
        output.write_text(text.getvalue(), encoding="utf-8", errors="backslashreplace")
        os._exit(code)
