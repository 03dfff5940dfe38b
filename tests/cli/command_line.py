"""What the tests of the command share: how its result is held, and how a refusal looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


def small(tiny: Path) -> list[str]:
    """Options that make a run of a second."""
    return ["--model", str(tiny), "--limit", "3", "--length", "5", "--prompt", "raw", "--conditions", "none,mless"]


def lines_of(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def refused(result: Result, *words: str) -> None:
    """Exit code 2, nothing on standard output, one line on standard error that says all of this."""
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("mless: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    assert result.err.rstrip("\n").isprintable()
    for word in words:
        assert word in result.err, result.err
