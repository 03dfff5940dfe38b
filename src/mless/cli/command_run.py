"""`mless run`: measure what a study asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from mless.cli.groups import StudyField, study_changes, study_options
from mless.cli.measuring import measure_and_print
from mless.cli.options import (
    AnswerField,
    ComputeOptions,
    DataOptions,
    FillerOptions,
    Layers,
    LoadingOptions,
    Model,
    OutputOptions,
    Primary,
    PromptOptions,
    Sets,
    SolutionField,
    WorkerOptions,
)
from mless.cli.progress import ProgressBar


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are generated."""

    engine: Annotated[
        str | None,
        typer.Option(help="Answers: hf, vllm, openai, or scripted. Likelihood: hf, vllm, or openai."),
        StudyField(),
    ] = None
    base_url: Annotated[
        str | None,
        typer.Option(help="Answers, likelihood: the openai engine's server, as http://localhost:8000/v1."),
        StudyField(),
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Answers: where an answer is cut off."), StudyField("accuracy.max_new_tokens")
    ] = None
    samples: Annotated[
        int | None, typer.Option(help="Answers: how many are drawn per item."), StudyField("accuracy.samples")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Answers: 0 is greedy."), StudyField("accuracy.temperature")
    ] = None
    top_p: Annotated[float | None, typer.Option(help="Answers: nucleus sampling."), StudyField("accuracy.top_p")] = None
    k: Annotated[
        str | None, typer.Option("--k", help="Answers: pass@k and maj@k, as 1,4,8."), StudyField("accuracy.k")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `run`, in the order of its help."""

    model: Model = None
    loading: LoadingOptions
    data: DataOptions
    prompts: PromptOptions
    conditions: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: none, mless, mful, random, random-tokens, position-only, arm, mless-arm, or a study's own; for answers also "
            "plan-and-solve, rephrased, question-twice, masked-filler, self-consistency."
        ),
        StudyField(),
    ] = None
    inserted: FillerOptions
    layers: Layers = None
    heads: Annotated[str | None, typer.Option(help="Heads to store: all, 1, or 1-3,7."), StudyField()] = None
    compute: ComputeOptions
    system: Annotated[str | None, typer.Option(help="The system text, in place of the study's."), StudyField()] = None
    answer_field: AnswerField = None
    solution_field: SolutionField = None
    answers: AnswerOptions
    # No study field: a study file must not be able to allow it.
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Answers: run the code that the model writes, in a sandbox (humaneval).")
    ] = False
    primary: Primary = None
    shared: WorkerOptions
    sets: Sets = None
    output: OutputOptions


def run(
    study: Annotated[str, typer.Argument(help="A study's name (see: mless studies) or a TOML file.")] = "quick",
    *,
    options: RunOptions,
) -> None:
    """Run a study, or what is missing of it, and print its verdict."""
    from mless.study import Outcome, load_study, run_study

    def measure(bar: ProgressBar) -> Outcome:
        spec = load_study(study, study_changes(options), options.sets or (), options=study_options(options))
        trust = options.loading.trust_remote_code
        return run_study(
            spec,
            options.output.out,
            bar,
            trust_remote_code=trust,
            run_code=options.run_code,
            workers=options.shared.asked(),
        )

    measure_and_print(measure, workers=options.shared.workers is not None, as_json=options.output.as_json)
