"""`mless doctor`: what is here, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from mless.cli.options import Json
from mless.cli.printing import plain, print_json


def doctor(
    *,
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Run a small study too (two minutes at most).")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what mless finds on this machine, and how to mend what is missing. A report of a defect should hold this."""
    health = _health()
    found = []
    for one in health.findings(self_test=self_test):
        found.append(one)
        if not as_json:
            print(plain(_line(one)), flush=True)
    good = health.works(found)
    if as_json:
        print_json({"works": good, "parts": [asdict(one) for one in found]})
    else:
        print(f"\n{_verdict(found, good)}")
    if not good:
        raise typer.Exit(2)


def _verdict(found: list[Any], good: bool) -> str:
    if not good:
        return "The core does not work: see the lines marked missing."
    faults = [one.name for one in found if not one.found and not one.optional]
    return f"The core works; to mend: {', '.join(faults)}." if faults else "The core works."


def _line(one: Any) -> str:
    mark = "found" if one.found else "optional" if one.optional else "missing"
    way = "" if not one.mend else f" (to have it: {one.mend})" if one.optional else f" -> {one.mend}"
    return f"{mark:8}  {one.name}: {one.says}{way}"


def _health() -> ModuleType:
    """The module that looks. Where a package is broken mless.study cannot be imported, but this module of it needs none: its file is loaded."""
    try:
        from mless.study import health
    except Exception:  # noqa: BLE001 - a broken package may fail in any way
        import mless

        spec = importlib.util.spec_from_file_location(
            "mless_health", Path(str(mless.__file__)).parent / "study" / "health.py"
        )
        assert spec is not None
        assert spec.loader is not None
        health = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(health)
    return health
