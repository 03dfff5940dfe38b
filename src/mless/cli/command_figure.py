"""`mless figure`: draw a published figure from stored results, and measure first where there are none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mless.cli.groups import StudyField, study_changes, study_options
from mless.cli.options import (
    ComputeOptions,
    DataOptions,
    FillerOptions,
    Json,
    Layers,
    LoadingOptions,
    PromptOptions,
    Sets,
)
from mless.cli.printing import plain, print_json, print_verdict
from mless.cli.progress import ProgressBar
from mless.errors import BadFolder, BadStudy, MlessError

if TYPE_CHECKING:
    from mless.study import StudySpec


@dataclass(frozen=True, kw_only=True)
class DrawingOptions:
    """What is drawn, and into which files."""

    item: Annotated[str | None, typer.Option(help="One prompt instead of the mean: its number from 1, or its id.")] = (
        None
    )
    queries: Annotated[str, typer.Option(help="original (fair comparison) or later (as published).")] = "original"
    omit_first: Annotated[
        bool | None,
        typer.Option("--omit-first/--keep-first", help="Leave out the first token (default: for Llama and Gemma)."),
    ] = None
    bars: Annotated[
        bool, typer.Option("--bars", help="fig10: draw the answers for its left half too (a whole accuracy study).")
    ] = False
    formats: Annotated[
        str | None, typer.Option("--format", help="Comma-separated: png, svg, pdf; for tables md, csv, tex.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """The options of `figure`, in the order of its help."""

    # No study field: each model is a run of its own.
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="As in run; may be given several times for figures that compare models."),
    ] = None
    loading: LoadingOptions
    data: DataOptions
    prompts: PromptOptions
    inserted: FillerOptions
    layers: Annotated[Layers, StudyField("figure.layers")] = None
    heads: Annotated[
        str | None, typer.Option(help="Heads to show: a list, or most-shifted:3."), StudyField("figure.heads")
    ] = None
    drawing: DrawingOptions
    compute: ComputeOptions
    sets: Sets = None
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the pictures (figures/ in the first result folder otherwise)."),
    ] = None
    as_json: Json = False


def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="fig2 … fig4, fig6 … fig20, table1 … table9, map, retained, mass, effects or along; `mless studies` lists all."
        ),
    ],
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Result folders to draw from; without any, the study is run.")
    ] = None,
    *,
    options: FigureOptions,
) -> None:
    """Draw a published figure, for the published models or for yours; runs what is not stored yet."""
    from mless.figures import check, default_formats, draw
    from mless.report import write_report
    from mless.study import load_study, verdict_lines
    from mless.study.showing import figure_spec, single_layer

    drawing = options.drawing
    changes = study_changes(options)
    sets = options.sets or []
    # In a figure with two halves, settings for answers belong to the half made of answers.
    of_attention = [text for text in sets if not (drawing.bars and text.startswith("accuracy."))]
    spec = load_study(name, changes, of_attention, options=study_options(options))
    shown = figure_spec(spec)
    left = _left_half(spec, options, sets) if drawing.bars else None
    choices: dict[str, Any] = {
        "layer": single_layer(spec),
        "heads": spec.figure.heads if spec.figure else None,
        "item": drawing.item,
        "queries": drawing.queries,
        "formats": default_formats(shown) if drawing.formats is None else _listed(drawing.formats),
        "out": options.out,
    }
    check(shown, **choices)
    bar = ProgressBar(quiet=options.as_json)
    used = list(folders or []) or _run_for_figure(spec, options, bar)
    if left is not None:
        used += _run_for_figure(left, options, bar)
    elif spec.figure is not None and spec.figure.bars and not folders:
        bar.say(
            f"{name}: the half made of attention; --bars draws the answers of its other half too, for which a model must answer them"
        )
    # First, so that a damaged folder is refused before anything is drawn.
    verdicts = {str(folder): verdict_lines(folder) for folder in used}
    written = draw(shown, used, omit_first=drawing.omit_first, **choices)
    bar.checked()
    for folder in used if not folders else ():
        write_report(folder, verdict=verdicts[str(folder)])
    if options.as_json:
        print_json({"figure": name, "files": [str(path) for path in written], "verdicts": verdicts})
        return
    for lines in verdicts.values():
        print_verdict(lines)
    print()
    for path in written:
        print(f"figure: {plain(str(path))}")


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _left_half(spec: StudySpec, options: FigureOptions, sets: list[str]) -> StudySpec:
    """The accuracy study that belongs to a figure with two halves."""
    from mless.study import load_study

    if spec.figure is None or spec.figure.bars is None:
        raise BadStudy(f"--bars is for figures with a half made of answers (fig10); {spec.name} has none")
    changes = study_changes(options)
    kept = {key: value for key, value in changes.items() if key != "layers" and not key.startswith("figure.")}
    of_answers = [text for text in sets if not text.startswith(("figure.", "layers", "heads"))]
    return load_study(spec.figure.bars, kept, of_answers, options=study_options(options))


def _run_for_figure(spec: StudySpec, options: FigureOptions, bar: ProgressBar) -> list[Path]:
    """The result folders of a figure's models; every model is checked before the first one is run."""
    from mless.models import describe
    from mless.study import run_study
    from mless.study.showing import check_figure, for_models, published_models

    remote = options.loading.trust_remote_code
    models = options.model or published_models(spec) or [spec.model]
    specs = for_models(spec, models)
    try:
        if options.drawing.item is not None:
            spec.check_item(options.drawing.item)
        for one in specs if len(specs) > 1 and spec.accuracy is None else ():
            described = describe(one.model, trust_remote_code=remote, say=bar.say)
            check_figure(one, described.layers, described.heads)
        return [run_study(one, None, bar, for_figure=True, trust_remote_code=remote).folder for one in specs]
    except BadFolder as fault:
        raise BadFolder(
            f"{fault} (mless figure keeps its results under results/; remove that folder, or run the study with: mless run {spec.source} "
            f"--out DIR and then mless figure {spec.source} DIR)"
        ) from None
    except MlessError as fault:
        if options.model or not published_models(spec):
            raise
        raise type(fault)(
            f"{spec.name} was published for {', '.join(models)}: {fault}; or draw it for a model you have: "
            f"mless figure {spec.source} --model smollm2{' --heads most-shifted:3' if spec.figure and spec.figure.panels else ''}"
        ) from None
    finally:
        bar.stop()
