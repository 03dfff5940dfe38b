"""What a study shows: the figure it is for, and whether a model of so many layers and heads can show it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mless.errors import BadStudy
from mless.results.figure_kinds import FIGURES
from mless.study.conditions import condition_named, conditions_of
from mless.study.spec import FigureTable, StudySpec
from mless.values import FigureSpec, Panel, format_numbers, matched_models, parse_numbers


def figure_spec(spec: StudySpec, highest: int = 10_000) -> FigureSpec:
    """The figure, with the requested layers instead of the published ones; `highest` is the model's last layer, where known."""
    if spec.figure is None:
        raise BadStudy(f"study {spec.name!r} is for no figure; `mless studies` shows which are")
    table = spec.figure
    panels = [Panel(panel.model, panel.layer, panel.head) for panel in table.panels]
    if table.layers is not None and panels:
        if table.layers.strip() == "all":
            raise BadStudy(f"{spec.name} shows layers side by side; name them, as --layers 1-3")
        chosen = parse_numbers(table.layers, highest, "layer")
        if table.kind == "layers":
            panels = [Panel(panels[0].model, layer, panels[0].head) for layer in chosen]
        elif len(chosen) == 1:
            panels = [Panel(panel.model, chosen[0], panel.head) for panel in panels]
        else:
            raise BadStudy(f"{spec.name} shows one layer, got --layers {table.layers}; give one number")
    return FigureSpec(spec.name, table.kind, tuple(panels), tuple(table.conditions))


def single_layer(spec: StudySpec, highest: int = 10_000) -> int | None:
    """The one layer shown by a picture that has no published panels: the one asked for, else the study's first."""
    if spec.figure is None or spec.figure.panels:
        return None
    kind = FIGURES.get(spec.figure.kind)
    if not kind.one_layer:
        if spec.figure.layers is not None and (kind.shows == "answers" or not kind.overview):
            raise BadStudy(f"figure {spec.name} takes no --layers: it shows answers and not attention; leave it out")
        return None
    if spec.figure.layers is None:
        return parse_numbers(spec.layers, highest, "layer")[0]
    chosen = parse_numbers(spec.figure.layers, highest, "layer")
    if len(chosen) != 1:
        raise BadStudy(f"{spec.name} shows one layer, got --layers {spec.figure.layers}; give one number")
    return chosen[0]


def check_figure(spec: StudySpec, layers: int = 0, heads: int = 0) -> None:
    """Fail before the run, not after it, when the study cannot show its figure on a model of that many layers and heads."""
    if spec.figure is None or spec.tune is not None:  # of a tuning study the settings are shown, not its conditions
        return
    _check_shown_conditions(spec, spec.figure)
    if spec.accuracy is not None:
        return
    layer = single_layer(spec, layers)
    panels = figure_spec(spec, layers).panels
    for shown in [layer] if layer is not None else [panel.layer for panel in panels]:
        if shown > layers:
            raise BadStudy(
                f"{spec.name} shows layer {shown}, but this model's layers are 1 to {layers}; choose with --layers"
            )
        if shown not in (run := parse_numbers(spec.layers, 10_000, "layer")):
            raise BadStudy(
                f"{spec.name} shows layer {shown}, but would measure {format_numbers(run)}; choose with --layers"
            )
    if FIGURES.get(spec.figure.kind).overview:
        return
    if spec.figure.heads is None:
        wanted = [panel.head for panel in panels]
    elif re.fullmatch(r"\s*most-shifted(:[1-9]\d*)?\s*", spec.figure.heads):
        wanted = []
    else:
        wanted = parse_numbers(spec.figure.heads, heads, "head")
    for head in wanted:
        if head > heads:
            count = len(panels) if spec.figure.kind == "heads" else 1
            raise BadStudy(
                f"{spec.name} shows head {head}, but this model's heads are 1 to {heads} (numbered from 1); "
                f"choose some: --heads most-shifted:{count}, or a list such as --heads 1,{heads}"
            )
        if head not in (run := parse_numbers(spec.heads, heads, "head")):
            raise BadStudy(
                f"{spec.name} shows head {head}, but would store {format_numbers(run)}; choose with --heads or --set heads={head}"
            )


def _check_shown_conditions(spec: StudySpec, table: FigureTable) -> None:
    run = {condition.name: condition.kind for condition in conditions_of(spec)}
    shown = list(dict.fromkeys(table.conditions))
    for name in shown:
        condition_named(spec, name)  # a misspelt name gets an error of its own
    missing = [name for name in shown if name not in run]
    kept = [name for name in shown if name in run]
    kind = FIGURES.get(table.kind)
    if missing and not kind.overview:
        raise BadStudy(
            f"{spec.name} shows {', '.join(map(repr, missing))}, but would run {', '.join(run)} only; add it with --set conditions=…, "
            f"or leave it out: --set figure.conditions={','.join(kept) or ','.join(run)}"
        )
    if kind.shows == "answers":
        return
    # ARM inserts nothing, and changes activations all the same.
    filled = [name for name in kept if (name if kind.counts_arm else run[name]) != "none"]
    heads = table.heads or ("" if table.panels else "most-shifted")
    compares = kind.compares or (table.kind != "mass" and "most-shifted" in heads)
    if not (filled if compares else kept):
        raise BadStudy(
            f"{spec.name} has nothing to show: of its conditions {', '.join(shown) or '(none named)'}, none "
            f"{'with filler ' if compares else ''}is run; name some that are: --set figure.conditions={','.join(run)}"
        )


def for_models(spec: StudySpec, models: Sequence[str]) -> list[StudySpec]:
    """The study for each of several models, each with the figure panels it stands for."""
    if spec.figure is None or not spec.figure.panels:
        return [spec.model_copy(update={"model": model}) for model in models]
    found: list[StudySpec] = []
    for model, published in zip(models, matched_models(published_models(spec), [[m] for m in models]), strict=True):
        panels = [panel for panel in spec.figure.panels if panel.model == published]
        figure = spec.figure.model_copy(update={"panels": panels})
        found.append(spec.model_copy(update={"model": model, "figure": figure}))
    return found


def published_models(spec: StudySpec) -> list[str]:
    """The models a figure was published for, in order."""
    if spec.figure is None:
        return []
    return list(dict.fromkeys([*spec.figure.models, *(panel.model for panel in spec.figure.panels)]))
