"""The sandbox: right code passes, wrong code does not, no attack gets anywhere, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent

import pytest

from mless.tasks.grading import inside
from mless.tasks.grading.sandbox import Limits, NoSandbox, require_sandbox, run_tests, seccomp_filter
from sandboxed import sandbox  # noqa: F401

ATTACKS: dict[str, str] = tomllib.loads((Path(__file__).parent / "code_attacks.toml").read_text("utf-8"))
PROMPT, TEST = 'def attack():\n    """Attack."""\n', "def check(candidate):\n    assert candidate() is True\n"
#: An attack that runs out of time has not passed, so a slow machine cannot make this fail.
SHORT = Limits(wall=4.0, cpu=1, memory=1 << 28)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("code", "passed", "why"),
    [
        ("def double(x): return [y * 2 for y in x]", True, "the tests passed"),
        ("def double(x): return [y + 2 for y in x]", False, "a test failed"),
        ("def double(x): return None", False, "a test failed"),
        ("def double(x): return 1 / 0", False, "ZeroDivisionError: division by zero"),
        ("def double(x): return [y * 2 for y in x", False, "SyntaxError"),
        ("def triple(x): return x", False, "KeyError: 'double'"),
        ("import math, re, collections, heapq, random, datetime, hashlib, json\ndef double(x): return [y * 2 for y in x]", True, "the tests passed"),
        ("print('noise')\ndef double(x):\n    print(x)\n    return list(map(lambda y: y * 2, x))", True, "the tests passed"),
    ],
)  # fmt: skip
def test_verdicts(code: str, passed: bool, why: str) -> None:
    test = "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n    assert double([]) == []\n"
    found = run_tests(code, "double", 'def double(x):\n    """Twice."""\n', test)
    assert found[0] is passed
    assert found[1].startswith(why)


@pytest.mark.usefixtures("sandbox")
def test_a_test_that_never_calls_the_function_is_passed_by_none() -> None:
    found = run_tests("def attack(): return True", "attack", PROMPT, "def check(candidate):\n    pass\n")
    assert found == (False, "the tests never call the function")


@pytest.mark.usefixtures("sandbox")
def test_tests_may_use_the_prompts_other_functions() -> None:
    prompt = 'def twice(x):\n    return 2 * x\n\ndef half(x):\n    """Half."""\n'
    test = "def check(candidate):\n    assert candidate(twice(4)) == 4\n"
    assert run_tests(prompt + "    return x // 2\n", "half", prompt, test) == (True, "the tests passed")


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(10**40), 1.5, float("inf"), 2j, "ü\ud800", b"x", [1, [2]], (1, (2,)), {"a": {1: 2}}, {1, 2}, frozenset({3})],
    ids=repr,
)  # fmt: skip
def test_values_pass_as_they_are(value: object) -> None:
    back = inside.unpacked(inside.packed(value))
    assert back == value
    assert type(back) is type(value)


def test_values_of_other_classes_become_plain_or_are_refused() -> None:
    class Odd(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert type(inside.unpacked(inside.packed(Odd(3)))) is int
    assert list(inside.unpacked(inside.packed(range(3)))) == [0, 1, 2]
    assert inside.unpacked(inside.packed(range(3))) != [0, 1, 2]
    with pytest.raises(TypeError, match="a value of type object"):
        inside.packed(object())


# ---- attacks ----


@contextlib.contextmanager
def _listening(folder: Path) -> Iterator[tuple[dict[str, str], list[socket.socket]]]:
    """Sockets that an attack would reach if it could, and what to fill in for them."""
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        named, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        name = f"mless-test-{os.getpid()}"
        named.bind(str(folder / "s"))
        abstract.bind(f"\0{name}")
        sockets = [tcp, named, abstract]
        for one in sockets:
            one.listen()
            one.setblocking(False)
        (folder / "secret").write_text("secret")
        places = {"tcp": str(tcp.getsockname()[1]), "unix": str(folder / "s"), "abstract": f"\\0{name}"}
        places |= {"marker": str(folder / "marker"), "secret": str(folder / "secret"), "parent": str(os.getpid())}
        yield places, sockets


@pytest.mark.usefixtures("sandbox")
def test_no_attack_passes_or_leaves_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ATTACKS) >= 60
    assert run_tests("def attack(): return True", "attack", PROMPT, TEST) == (True, "the tests passed")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-0123456789")
    with _listening(tmp_path) as (places, sockets):

        def verdict(body: str) -> tuple[bool, str]:
            for name, place in places.items():
                body = body.replace(f"@{name}@", place)
            return run_tests(
                f"def attack():\n{indent(body, '    ')}\n    return False\n", "attack", PROMPT, TEST, SHORT
            )

        with ThreadPoolExecutor(4) as pool:
            verdicts = dict(zip(ATTACKS, pool.map(verdict, ATTACKS.values()), strict=True))
        for one in sockets:
            with pytest.raises(BlockingIOError):
                one.accept()
    assert {name: why for name, (passed, why) in verdicts.items() if passed} == {}
    assert {path.name for path in tmp_path.iterdir()} == {"s", "secret"}
    # The attack must have run: a mistake in its code would be no attack.
    assert {name: why for name, (_, why) in verdicts.items() if "SyntaxError" in why or "NameError" in why} == {}


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.usefixtures("sandbox")
def test_a_process_that_is_killed_leaves_none_behind() -> None:
    code = (
        "from mless.tasks.grading.sandbox import run_tests\nprint('begins', flush=True)\n"
        f"run_tests('def attack():\\n    while True: pass\\n', 'attack', {PROMPT!r}, {TEST!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        # Two sandboxes, each of an outer bubblewrap, one inside and a Python.
        while len(started := _descendants(process.pid)) < 6:
            assert time.monotonic() < deadline, started
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    while left := [pid for pid in started if _alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


# ---- where there is none ----


def test_without_bubblewrap_code_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSandbox, match=r"bwrap is not installed; install it \(apt-get install bubblewrap\)"):
        require_sandbox()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", r"cannot make a sandbox here \(bwrap: No permissions.*allow user namespaces"),
        ("exit 0", r"sandbox does not work here \(the tests' process ended\)"),
    ],
    ids=["namespaces refused", "does nothing"],
)  # fmt: skip
def test_a_sandbox_that_cannot_be_made_is_refused_not_weakened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, says: str
) -> None:
    program = tmp_path / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NoSandbox, match=says):
        require_sandbox()


def test_a_machine_whose_calls_cannot_be_filtered_is_refused() -> None:
    assert len(seccomp_filter("x86_64")) % 8 == len(seccomp_filter("aarch64")) % 8 == 0
    with pytest.raises(NoSandbox, match=r"only on x86_64 and aarch64.*this is riscv64"):
        seccomp_filter("riscv64")
