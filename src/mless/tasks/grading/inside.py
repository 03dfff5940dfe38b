"""What runs inside the sandboxes, by itself (`sandbox` sends this file's text there): no import but Python's own library.

Two processes in two sandboxes, joined by two pipes. The *answerer* holds the answer's code. The *checker* holds the problem's tests, and
calls the answer's function through the pipes. Only values pass: numbers, texts, lists and so on, written as JSON and built anew by the
checker. So all that an answer can do to the verdict is to return values. What it prints, patches, forks, or how it ends does not reach the
checker: it shares no interpreter, no process tree, no file and no socket with it, and never sees the tests.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

#: Bytes of one message; a longer one is a fault of the answer.
MOST_BYTES = 1 << 20
#: Values inside values inside values.
MOST_DEPTH = 60
#: Elements that are taken from an iterator, which may never end.
MOST_ELEMENTS = 100_000


class AnswerFault(Exception):
    """The answer did not give a value: it raised something, ended, or sent what is no message."""


# ---- values as JSON --------------------------------------------------------------------------------------------------


def packed(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it. Subclasses become the plain type, so that none of their methods is ever called by a test."""
    if depth > MOST_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return ["s", str.__str__(value)]
    if isinstance(value, int):
        return ["i", format(int.__int__(value), "x")]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return ["d", [[packed(key, depth + 1), packed(pairs[key], depth + 1)] for key in pairs]]
    for kind, sign in ((list, "l"), (tuple, "t"), (set, "S"), (frozenset, "F")):
        if isinstance(value, kind):
            return [sign, [packed(one, depth + 1) for one in cast("list[Any]", value)]]
    if isinstance(value, (range, deque)) or hasattr(value, "__next__") or type(value).__name__.startswith("dict_"):
        taken: list[Any] = []
        for one in cast("Iterator[Any]", value):
            if len(taken) == MOST_ELEMENTS:
                raise ValueError("an iterator without an end")
            taken.append(packed(one, depth + 1))
        return ["n", taken]
    raise TypeError(f"a value of type {type(value).__name__}")


def unpacked(value: Any, depth: int = 0) -> Any:
    """The value that `packed` wrote; anything else is refused."""
    if depth > MOST_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    sign, *rest = value
    one: Any = rest[0]
    if sign == "s":
        return str(one)
    if sign == "i":
        return int(one, 16)
    if sign == "f":
        return float.fromhex(one)
    if sign == "c":
        return complex(float.fromhex(one), float.fromhex(rest[1]))
    if sign == "b":
        return bytes.fromhex(one)
    if sign == "d":
        return {unpacked(key, depth + 1): unpacked(inner, depth + 1) for key, inner in one}
    kinds: dict[str, Callable[[Any], Any]] = {"l": list, "t": tuple, "S": set, "F": frozenset, "n": iter}
    return kinds[sign]([unpacked(inner, depth + 1) for inner in one])


class Messages:
    """JSON lines over two file descriptors."""

    def __init__(self, read: int, write: int) -> None:
        self._read = io.FileIO(read)
        self._write, self._waiting = write, b""

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MOST_BYTES:
            raise ValueError("a value of more than a megabyte")
        while data:
            data = data[os.write(self._write, data) :]

    def receive(self) -> Any:
        while b"\n" not in self._waiting:
            part = self._read.read(65536)
            if not part:
                raise EOFError
            self._waiting += part
            if len(self._waiting) > MOST_BYTES:
                raise ValueError("a message of more than a megabyte")
        line, _, self._waiting = self._waiting.partition(b"\n")
        return json.loads(line)


# ---- the answer's side -----------------------------------------------------------------------------------------------


def answer(job: dict[str, Any]) -> None:
    """Run the answer's code, then call its function as often as asked."""
    messages = Messages(os.dup(0), os.dup(1))
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _limit(job)
    names: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(job["code"], "answer", "exec"), names)
        function: Any = names[job["entry"]]
        messages.send({"ready": True})
        while True:
            asked = messages.receive()
            given, named = unpacked(asked[0]), unpacked(asked[1])
            messages.send({"value": packed(function(*given, **named))})
    except EOFError:
        return
    except BaseException as fault:  # noqa: BLE001 - whatever it is, it is what the answer did
        messages.send({"fault": f"{type(fault).__name__}: {fault}"[:200]})


def _limit(job: dict[str, Any]) -> None:
    import resource

    for name, value in job["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(kind, (value, value))


# ---- the tests' side -------------------------------------------------------------------------------------------------


def check(job: dict[str, Any]) -> None:
    """Run the tests. The verdict goes to a descriptor that the answer's sandbox does not have."""
    messages, verdict = Messages(os.dup(0), os.dup(1)), int(job["verdict"])
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _limit(job)
    calls = 0

    def heard() -> dict[str, Any]:
        try:
            said = messages.receive()
        except EOFError:
            raise AnswerFault("the answer's process ended") from None
        except (ValueError, RecursionError):
            raise AnswerFault("the answer's process sent what is no value") from None
        if not isinstance(said, dict) or "fault" in said:
            fault = cast("dict[str, Any]", said).get("fault") if isinstance(said, dict) else None
            raise AnswerFault(str(fault or "the answer's process sent what is no value")[:200])
        return cast("dict[str, Any]", said)

    def candidate(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        try:
            messages.send([packed(given), packed(named)])
        except OSError:
            raise AnswerFault("the answer's process ended") from None
        said = heard()
        try:
            return unpacked(said["value"])
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
            raise AnswerFault("the answer's process sent what is no value") from None

    try:
        heard()
        # The prompt itself, with an empty body: some tests use its other functions.
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(job["prompt"] + "\n    pass\n", "prompt", "exec"), names)
        names[job["entry"]] = candidate  # some tests call it by its name
        exec(compile(job["test"], "tests", "exec"), names)
        names["check"](candidate)
        said = {"passed": calls > 0, "why": "the tests passed" if calls else "the tests never call the function"}
    except AnswerFault as fault:
        said = {"passed": False, "why": str(fault)}
    except AssertionError:
        said = {"passed": False, "why": "a test failed"}
    except BaseException as fault:  # noqa: BLE001 - a value of another type than the tests expect
        said = {"passed": False, "why": f"a test failed with {type(fault).__name__}"}
    os.write(verdict, json.dumps(said).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    with open("/job.json", encoding="utf-8") as file:
        _job: dict[str, Any] = json.load(file)
    (check if sys.argv[1] == "check" else answer)(_job)
