"""`mless tune`: choose ARM's parameters for a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from mless.cli.groups import StudyField, study_changes, study_options
from mless.cli.measuring import measure_and_print
from mless.cli.options import (
    AnswerField,
    ComputeOptions,
    DataOptions,
    LoadingOptions,
    Model,
    OutputOptions,
    PromptOptions,
    Sets,
    WorkerOptions,
)
from mless.cli.progress import ProgressBar


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """The settings to try."""

    c: Annotated[str | None, typer.Option("--c", help="Values of c to try, as 0.05,0.13."), StudyField("tune.c")] = None
    fraction: Annotated[
        str | None, typer.Option(help="Fractions to try in c's place, as 0.1,0.25."), StudyField("tune.fraction")
    ] = None
    p1: Annotated[
        str | None,
        typer.Option("--p1", help="Percentiles to try with each of them, as 90,99.5."),
        StudyField("tune.p1"),
    ] = None
    layers: Annotated[
        str | None,
        typer.Option(help="Layers to try, each alternative by itself: 1,2,1-3 are three, 1+5 is one."),
        StudyField("tune.layers"),
    ] = None
    p_min: Annotated[
        str | None,
        typer.Option(help="Lower bounds of the share, tried at the study's c and p1."),
        StudyField("tune.p_min"),
    ] = None
    p_max: Annotated[
        str | None, typer.Option(help="Upper bounds, tried with each lower one."), StudyField("tune.p_max")
    ] = None


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `tune`, in the order of its help."""

    model: Model = None
    loading: LoadingOptions
    data: DataOptions
    answer_field: AnswerField = None
    prompts: PromptOptions
    grid: GridOptions
    method: Annotated[
        str | None,
        typer.Option(help="halving (rungs of growing dev items) or grid (all settings on all dev items)."),
        StudyField("tune.method"),
    ] = None
    dev_share: Annotated[
        float | None, typer.Option(help="Share of the items to choose on."), StudyField("tune.dev_share")
    ] = None
    transfer: Annotated[
        list[str] | None,
        typer.Option(help="Other data to try the chosen setting on; may be given several times."),
        StudyField("tune.transfer"),
    ] = None
    engine: Annotated[str | None, typer.Option(help="hf, vllm, or scripted."), StudyField("accuracy.engine")] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Where an answer is cut off."), StudyField("accuracy.max_new_tokens")
    ] = None
    compute: ComputeOptions
    shared: WorkerOptions
    sets: Sets = None
    output: OutputOptions


def tune(
    study: Annotated[
        str, typer.Argument(help="A study with [accuracy]: its name (see: mless studies) or a TOML file.")
    ] = "tune",
    *,
    options: TuneOptions,
) -> None:
    """Choose ARM's parameters on some items, and say on the others what the choice is worth."""
    from mless.study import Outcome, load_study
    from mless.study.running import run_tuning

    changes = study_changes(options)
    if study_changes(options.grid):
        # A grid given on the command line replaces the study's whole grid.
        empty: dict[str, list[str]] = {f"tune.{one.name}": [] for one in fields(GridOptions)} | {"tune.settings": []}
        changes = empty | changes

    def measure(bar: ProgressBar) -> Outcome:
        spec = load_study(study, changes, options.sets or (), options=study_options(options))
        trust, workers = options.loading.trust_remote_code, options.shared.asked()
        return run_tuning(spec, options.output.out, bar, trust_remote_code=trust, workers=workers)

    measure_and_print(measure, workers=options.shared.workers is not None, as_json=options.output.as_json)
