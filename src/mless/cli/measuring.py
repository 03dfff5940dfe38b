"""What `run` and `tune` share: measure with a bar, publish the folder, print the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mless.cli.printing import print_result
from mless.cli.progress import ProgressBar

if TYPE_CHECKING:
    from mless.study import Outcome


def measure_and_print(measure: Callable[[ProgressBar], Outcome], *, workers: bool, as_json: bool) -> None:
    """Call what makes a result folder, draw its pictures and its page, and print what it shows; `workers` says that some were asked for."""
    from mless.report import publish

    bar = ProgressBar(quiet=as_json)
    try:
        outcome = measure(bar)
    finally:
        bar.stop()
    bar.checked()
    page = publish(outcome.folder, fresh=outcome.fresh, say=bar.say)
    note = f"{outcome.computed} of {outcome.units} units computed" if outcome.computed else "already stored"
    if workers and not outcome.computed and not outcome.fresh:
        note += "; no workers started"
    print_result(outcome.folder, page, note, as_json=as_json, units_computed=outcome.computed)
