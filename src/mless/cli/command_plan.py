"""`mless plan`: what a run of so many items can show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mless.cli.options import Json
from mless.cli.printing import plain, print_json
from mless.errors import BadStudy
from mless.values import USUAL_MARGIN


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `plan`, in the order of its help."""

    items: Annotated[int | None, typer.Option(help="How many items the run would have.")] = None
    data: Annotated[str | None, typer.Option(help="Count the items of this data set instead.")] = None
    effect: Annotated[float | None, typer.Option(help="The effect to plan for, as a share: 0.02 is two points.")] = None
    changed: Annotated[
        float | None, typer.Option(help="Share of items whose judgement changes at all (0.1 is assumed otherwise).")
    ] = None
    pilot: Annotated[Path | None, typer.Option(help="Take that share from this result folder.")] = None
    power: Annotated[float, typer.Option(help="How often the effect is to be found.")] = 0.8
    alpha: Annotated[float, typer.Option(help="Level of the test.")] = 0.05
    conditions: Annotated[
        int | None,
        typer.Option(
            "--conditions",
            "--tests",
            help="How many conditions are compared with none; as in the study accuracy (3) otherwise.",
        ),
    ] = None
    primary: Annotated[bool, typer.Option("--primary", help="Plan for a primary condition, which is tested alone.")] = (
        False
    )
    again: Annotated[
        float | None,
        typer.Option(
            help="Share of items that the same prompts asked again judge otherwise (A/A); the pilot's, or 0 as row-stable decoding has it."
        ),
    ] = None
    margin: Annotated[
        float | None,
        typer.Option(
            help=f"A change smaller than this would not matter, as a share; at least 0.001 ({USUAL_MARGIN} unless given)."
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            help="With a pilot by likelihood: the metric to plan for, as contrast; --effect and --margin are in its unit."
        ),
    ] = None
    as_json: Json = False


def plan(*, options: PlanOptions) -> None:
    """Say before a run what effect so many items can show, how likely each verdict is, and how many items it takes."""
    from mless.study import planning

    items = options.items
    if options.data is not None:
        if items is not None:
            raise BadStudy("--items and --data both say how many items there are; give one of them")
        from mless.tasks import load_items

        items = len(load_items(options.data)[1])
    if options.pilot is not None and planning.is_likelihood(options.pilot):
        _plan_nats(options, items)
        return
    if options.metric is not None:
        raise BadStudy(
            "--metric is for a plan by likelihood, which needs a pilot: --pilot FOLDER, made by mless run likelihood"
        )
    found = planning.plan(
        items,
        options.effect,
        options.changed,
        options.pilot,
        options.power,
        options.alpha,
        options.conditions,
        primary=options.primary,
        again=options.again,
        margin=USUAL_MARGIN if options.margin is None else options.margin,
    )
    if options.as_json:
        print_json(found)
        return
    for line in planning.plan_lines(found):
        print(plain(line))


def _plan_nats(options: PlanOptions, items: int | None) -> None:
    """The same for log-probabilities: how the pilot's items vary says it all."""
    from mless.study.planning_nats import plan_nats, plan_nats_lines

    for name, given in (
        ("--changed", options.changed),
        ("--again", options.again),
        ("--primary", options.primary or None),
    ):
        if given is not None:
            raise BadStudy(
                f"{name} is for answers that are right or wrong, and the pilot has log-probabilities; leave it out"
            )
    assert options.pilot is not None
    found = plan_nats(
        options.pilot,
        items,
        options.effect,
        options.metric,
        options.power,
        options.alpha,
        options.conditions,
        options.margin,
    )
    if options.as_json:
        print_json(found)
        return
    for line in plan_nats_lines(found):
        print(plain(line))
