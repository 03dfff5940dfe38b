"""The worker: a separate Python process that exchanges JSON lines, so that it shares nothing with this one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, Literal, cast

from mless.errors import MlessError
from mless.tasks.grading.reading import Reading, approximates, read

_START_SECONDS = 120.0
#: The variables that the worker inherits: where libraries lie and how text is written. No key is among them.
_INHERITED = (
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "SYSTEMROOT",
    "TMPDIR",
    "TEMP",
    "TMP",
)
# The same mless as here, by its place: no folder that it lies in needs to be on the worker's path.
_START = """
import importlib.util, json, sys
path, home, limit, memory = json.loads(sys.argv[1])
sys.path[:] = path + [one for one in sys.path if one not in path]
spec = importlib.util.spec_from_file_location("mless", home + "/__init__.py", submodule_search_locations=[home])
sys.modules["mless"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["mless"])
from mless.tasks.grading.worker import serve
serve(limit, memory)
"""
Fault = Literal["words", "long", "time", "memory", "crash", "reference", "answer", "off"]


class Worker:
    """The parent's end."""

    def __init__(self, limit: float, memory: int) -> None:
        self._limit = limit
        start = [_import_path(), str(Path(__file__).parents[2]), limit, memory]
        self._process = subprocess.Popen(
            # As -I, which would also ignore PYTHONHASHSEED; no other variable for Python is passed on.
            [sys.executable, "-P", "-s", "-c", _START, json.dumps(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(sys.executable).anchor,
            env=_environment(),
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A thread, because no portable call waits on a pipe for so many seconds.
        self._reader = threading.Thread(
            target=_forward_lines, args=(self._stream("stdout"), self._replies), daemon=True
        )
        self._reader.start()
        greeting = self._reply(_START_SECONDS)
        if greeting != {"ready": True}:
            self.end()
            cause = str(greeting.get("fault", "it did not start")) if isinstance(greeting, dict) else "it did not start"
            raise MlessError(
                f"symbolic grading needs math-verify, but its worker failed: {cause}; "
                "pip install math-verify, or grade by text alone with Grader(symbolic=False)"
            )

    def _stream(self, name: Literal["stdin", "stdout"]) -> IO[bytes]:
        return cast("IO[bytes]", getattr(self._process, name))

    def ask(self, answer: str, reference: str) -> bool | Fault:
        try:
            self._stream("stdin").write(json.dumps([answer, reference]).encode() + b"\n")
            self._stream("stdin").flush()
        except OSError:
            return "crash"
        reply = self._reply(self._limit)
        if reply is None:
            return "time"
        return reply.get("equal", reply.get("fault", "crash"))

    def _reply(self, seconds: float) -> dict[str, Any] | None:
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else {}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for name in ("stdin", "stdout"):
            with contextlib.suppress(OSError):  # unsent bytes of a question to a dead worker
                self._stream(name).close()


def _import_path() -> list[str]:
    """This process's path without the working directory: what lies there (a json.py, a re.py) must not run."""
    here = os.path.realpath(os.curdir)
    return [os.path.abspath(path) for path in sys.path if path and os.path.realpath(path) != here]


def _environment() -> dict[str, str]:
    """A clean environment. Hash order changes sympy's choices, so it is fixed."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def _forward_lines(stream: IO[bytes], replies: queue.SimpleQueue[str]) -> None:
    for line in stream:
        replies.put(line.decode())
    replies.put("")


def serve(limit: float, memory: int) -> None:
    """The worker's end: questions on standard input, one JSON line each, until it closes."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies

    def say(**reply: object) -> None:
        print(json.dumps(reply), file=out, flush=True)

    try:
        import sympy.core.random as chance
        from math_verify.grader import verify
    except Exception as fault:  # noqa: BLE001  whatever it is, the parent must hear of it
        say(fault=f"{type(fault).__name__}: {fault}")
        return
    import logging
    import signal

    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it answers through a pipe and writes no file
    timer = getattr(signal, "setitimer", None)
    _symbolic(verify, "x+1", "1+x")  # the parser builds its tables on first use; that time must not count for a pair
    say(ready=True)
    for line in sys.stdin:
        answer, reference = json.loads(line)
        if timer is not None:
            # If the parent is killed, this process must not run on: by default the alarm ends it.
            timer(signal.ITIMER_REAL, 2 * limit + 1)
        chance.seed(0)
        try:
            verdict = _symbolic(verify, answer, reference)
        except MemoryError:
            verdict = "memory"
        if timer is not None:
            timer(signal.ITIMER_REAL, 0)
        say(**({"equal": verdict} if isinstance(verdict, bool) else {"fault": verdict}))


def _symbolic(verify: Callable[..., bool], answer: str, reference: str) -> bool | Fault:
    try:
        gold = _parsed(reference)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  latex2sympy raises whatever it meets, RecursionError too
        return "reference"
    try:
        given = _parsed(answer)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001
        return "answer"
    reading = read(answer)
    if reading.digits and "%" not in reference and bool(getattr(gold, "is_number", False)):
        return _near(reading, gold)
    options: dict[str, Any] = {"float_rounding": 12, "allow_set_relation_comp": True, "timeout_seconds": None}
    try:
        return bool(verify(gold, given, **options, raise_on_error=True))
    except MemoryError:
        raise
    except RecursionError:
        return "crash"
    except Exception:  # noqa: BLE001  how math-verify meets two things that cannot be compared
        return False


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex
    from sympy import I, Symbol

    rules = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    latex = normalize_latex(text, rules)
    found: Any = latex2sympy(
        latex,
        is_real=not should_treat_as_complex(latex),
        convert_degrees=False,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    if found is None:
        raise ValueError("nothing read")
    # latex2sympy leaves i a symbol. As an index it stays one.
    if re.search(r"(?<![A-Za-z\\_])i(?![A-Za-z])", text) and not re.search(r"\\(?:sum|prod)|_\{?i", text):
        names = {
            symbol: I
            for symbol in getattr(found, "free_symbols", ())
            if isinstance(symbol, Symbol) and symbol.name == "i"
        }
        if names:
            found = found.subs(names)
    return found


def _near(answer: Reading, gold: Any) -> bool:
    """A decimal against an exact value such as a root: math-verify would round both at a fixed place, however small they are."""
    from sympy import Float, Rational

    assert answer.number is not None
    if bool(gold.has(Float)):
        return Fraction(str(gold)) == answer.number if gold.is_Float else False
    value = gold.doit().evalf(len(answer.text) + 20)
    if not value.is_Float and not value.is_Rational:
        return False
    exact: Any = Rational(value)
    return approximates(answer, Fraction(int(exact.p), int(exact.q)))
