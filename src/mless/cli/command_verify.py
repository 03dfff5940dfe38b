"""`mless verify`: whether a result folder is whole, and whether a sample of it comes out again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mless.cli.options import Json, TrustRemoteCode
from mless.cli.printing import print_json, print_verdict
from mless.cli.progress import ProgressBar
from mless.errors import BadFolder


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of `verify`, in the order of its help."""

    sample: Annotated[
        int, typer.Option(help="How many units to compute again, where model and data are at hand; 0 for none.")
    ] = 3
    seed: Annotated[int, typer.Option(help="Which units are drawn for that.")] = 0
    trust_remote_code: TrustRemoteCode = False
    as_json: Json = False


def verify(result: Annotated[Path, typer.Argument(help="A result folder.")], options: VerifyOptions) -> None:
    """Say whether a result folder is whole and who made it from what, and compute a sample of it again. Exit code 2 unless it is whole."""
    from mless.study import verifying

    bar = ProgressBar(quiet=options.as_json)
    bar.checked()  # there is no run to check
    try:
        found = verifying.verify(
            result, sample=options.sample, seed=options.seed, progress=bar, trust_remote_code=options.trust_remote_code
        )
    finally:
        bar.stop()
    if options.as_json:
        print_json(found.content())
    else:
        print_verdict(verifying.verification_lines(found))
    if not found.good:
        raise BadFolder(verifying.way_out(found))
