"""`mless import`: the same statistics for results of another harness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from mless.cli.options import OutputOptions, Primary
from mless.cli.printing import print_result
from mless.values import USUAL_MARGIN


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The options of `import`, in the order of its help."""

    metric: Annotated[
        str | None, typer.Option(help="The score to compare, 0 or 1 for every item: exact_match, acc …")
    ] = None
    task: Annotated[str | None, typer.Option(help="Which task of a file with several; else what it is called.")] = None
    model: Annotated[str | None, typer.Option(help="What the model is called, where the files do not say.")] = None
    margin: Annotated[float, typer.Option(help="A change smaller than this would not matter, as a share.")] = (
        USUAL_MARGIN
    )
    primary: Primary = None
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0
    output: OutputOptions


def import_(
    results: Annotated[
        list[str],
        typer.Argument(
            help="FILE or NAME=FILE, one per condition, none among them: lm-eval's samples_*.jsonl, or Inspect's .eval or .json logs."
        ),
    ],
    *,
    options: ImportOptions,
) -> None:
    """Compare per-item results of lm-evaluation-harness or Inspect by the same statistics, and print the verdict."""
    from mless.report import publish
    from mless.study.importing import import_results

    outcome = import_results(
        results,
        options.output.out,
        metric=options.metric,
        task=options.task,
        model=options.model,
        margin=options.margin,
        primary=options.primary,
        seed=options.seed,
    )
    page = publish(outcome.folder, fresh=True)
    print_result(outcome.folder, page, f"{outcome.units} answers imported", as_json=options.output.as_json)
