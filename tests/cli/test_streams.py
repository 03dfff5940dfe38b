"""What reaches the terminal: no control character from outside, and no traceback where writing fails."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_line import Command

from mless.cli import streams
from mless.cli.printing import print_json, print_verdict
from mless.cli.progress import ProgressBar

#: C0, DEL, C1, bidi overrides, a zero width sign, a line separator; and markup that is not ours.
EVIL = "\x1b]0;owned\x07\x1b[31m\x7f\x9b2J\u202e\u2066\u200b\u2028\r[bold]x[/bold][/nothing]"
#: Raw signs that no output may hold, whatever it says.
RAW = ("\x1b]", "\x1b[31m", "\x07", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b", "\u2028")


def _mless(*words: object, **how: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mless", *map(str, words)]
    return subprocess.run(command, check=False, **{"stderr": subprocess.PIPE, **how})  # pyright: ignore


def _on_a_terminal(code: str) -> str:
    """What a terminal gets from Python code."""
    ours, theirs = pty.openpty()
    heard = bytearray()

    def listen() -> None:
        try:
            while part := os.read(ours, 65536):
                heard.extend(part)
        except OSError:  # how Linux says that the other side has gone
            pass

    listener = threading.Thread(target=listen)
    listener.start()
    with subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
    listener.join()
    os.close(ours)
    return heard.decode()


def test_every_road_is_behind_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    with streams.guarded():
        print(EVIL)
        print(EVIL, file=sys.stderr)
        print_verdict([EVIL, EVIL], note=EVIL)
        bar = ProgressBar(quiet=False)
        bar.say(EVIL)
        bar.checked()
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": EVIL}))
        print_json({EVIL: EVIL})
    said = capsys.readouterr()
    for sign in (*RAW, "\x1b", "\r"):
        assert sign not in said.out + said.err, repr(sign)
    assert said.out.count("[bold]x[/bold][/nothing]") >= 5, "markup is shown, not obeyed"
    assert json.loads(said.out.splitlines()[-1]) == {EVIL: EVIL}, "JSON keeps its content"


def test_a_bar_and_a_verdict_on_a_terminal_are_plain_too() -> None:
    code = (
        f"evil = {EVIL!r}\n"
        "from mless.cli import streams; from mless.cli.progress import ProgressBar; from mless.cli.printing import print_verdict\n"
        "with streams.guarded():\n"
        "    bar = ProgressBar(quiet=False); bar._began -= 5\n"
        "    bar.say(evil); bar.step(evil, 1, 9); bar.step(evil, 2, 9, evil); bar.stop(); print_verdict([evil, evil])\n"
    )
    shown = _on_a_terminal(code)
    assert "owned" in shown
    for sign in RAW:
        assert sign not in shown, repr(sign)


_WORKERS = (
    "from mless.cli.progress import ProgressBar\n"
    "bar = ProgressBar(quiet=False); bar._began -= 5\n"
    "bar.step('measuring, mless', 1, 9, '2 workers: 1 group 3, 2 loading')\n"
    "bar.step('measuring, mless', 2, 9, '2 workers: 1 group 4, 2 group 3'); bar._bar and bar._bar.refresh(); bar.stop()\n"
    "bar.checked(); bar.say('done')\n"
)


def test_the_bar_says_what_the_workers_do_and_a_log_does_not() -> None:
    shown = _on_a_terminal(_WORKERS)
    assert "measuring, mless" in shown
    assert "2/9" in shown
    assert "2 workers: 1 group 4, 2 group 3" in shown
    logged = subprocess.run([sys.executable, "-c", _WORKERS], capture_output=True, text=True, check=True)
    assert (logged.stdout, logged.stderr) == ("", "done\n")


def test_a_models_name_cannot_write_escapes(command: Command, tiny: Path, tmp_path: Path) -> None:
    evil = tmp_path / f"evil{EVIL.replace('/', '')}"
    shutil.copytree(tiny, evil)
    for words in (["models", evil], ["models", evil, "--json"], ["models", f"{evil}x"]):
        result = command(*words)
        assert result.code == (2 if words[1] != evil else 0), result.err
        for sign in (*RAW, "\x1b"):
            assert sign not in result.out + result.err, repr(sign)


def test_a_defect_shows_its_traceback_behind_the_gate(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr("mless.study.available_studies", broken)
    result = command("studies")
    assert result.code == 1
    assert "Traceback" in result.err
    assert "please report it" in result.err
    assert "\x1b" not in result.err


#: What we print ourselves, and what the library of the command prints; each is a start of Python.
PRINTED = [["studies"], ["--help"]]


@pytest.mark.parametrize("words", [*PRINTED, pytest.param(["studies", "--json"], marks=pytest.mark.slow)], ids=" ".join)
def test_a_closed_pipe_ends_quietly(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = _mless(*words, stdout=write)
    assert (done.returncode, done.stderr) == (streams.CLOSED_PIPE, b"")
    os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [*PRINTED, pytest.param(["--version"], marks=pytest.mark.slow)], ids=" ".join)
def test_a_full_disk_is_said(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = _mless(*words, stdout=full)
    assert done.returncode == 2
    assert done.stderr == (
        b"mless: cannot write to standard output: No space left on device; what is stored stays, run it again\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_that_cannot_be_said_is_an_exit_code() -> None:
    with open("/dev/full", "wb") as full:
        assert _mless("studies", stdout=full, stderr=full).returncode == 2


C_LOCALE = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"PYTHONIOENCODING": "ascii"}, ["run", "quïck"]),
        (C_LOCALE, ["studies"]),
        pytest.param(C_LOCALE, ["run", "quïck"], marks=pytest.mark.slow),
        pytest.param(C_LOCALE, ["plan", "--items", "99"], marks=pytest.mark.slow),
    ],
)
def test_an_ascii_terminal_gets_ascii(given: dict[str, str], words: list[str]) -> None:
    done = _mless(*words, stdout=subprocess.PIPE, env={**os.environ, **given})
    assert b"Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()
    assert done.returncode == (2 if "quïck" in words else 0), done.stderr


def test_a_gate_may_outlive_its_stream() -> None:
    """Python flushes a stream that nobody holds any more, and reports what that raises."""
    stream = io.StringIO()
    gate = streams.Gate(stream, "output")
    gate.write("said")
    stream.close()
    gate.flush()
    gate.close()


def test_without_a_terminal_a_line_says_how_far_a_step_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = ProgressBar(quiet=False)
    bar.step("units", 1, 3)  # too early
    monkeypatch.setattr("mless.cli.progress._EVERY_S", 0.0)
    bar.step("units", 2, 3)  # the input may still be refused
    bar.checked()
    bar.step("units", 2, 3)
    bar.step("units", 3, 3)  # the next line says it
    assert capsys.readouterr().err == "units: 2 of 3\n"
