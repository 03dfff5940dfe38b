"""`mless doctor`: what is here, what is missing, and the command that mends it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

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
    from mless.study.health import findings, works

    found = []
    for one in findings(self_test=self_test):
        found.append(one)
        if not as_json:
            mark, mend = "found  " if one.found else "missing", "" if one.found or not one.mend else f" -> {one.mend}"
            print(plain(f"{mark}  {one.name}: {one.says}{mend}"), flush=True)
    good = works(found)
    if as_json:
        print_json({"works": good, "parts": [asdict(one) for one in found]})
    else:
        print(f"\n{'The core works.' if good else 'The core does not work: see the lines marked missing.'}")
    if not good:
        raise typer.Exit(2)
