"""The one table of figure kinds: what each shows and takes, and where the function that draws it is.

It lies below `study`, which refuses a figure that a run could not show, and below `figures`, which draws it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mless.registry import Registry, found_at
from mless.values import FigureSpec, QuerySet

Shows = Literal["attention", "answers", "other"]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A requested figure: what it shows, from which folders, and what the user chose instead of the published settings."""

    spec: FigureSpec
    paths: list[Path]
    layer: int | None = None
    heads: str | None = None
    item: str | None = None
    queries: QuerySet = "original"
    omit_first: bool | None = None


@dataclass(frozen=True, slots=True)
class FigureKind:
    """A kind of figure. `draws` is a function of a `Drawing` that returns a picture, or where it is found (``module:function``).

    A `table` is no picture: its function takes the drawing, a folder and formats, writes files there, and returns their paths.
    """

    draws: Callable[..., Any] | str
    shows: Shows = "other"
    takes: tuple[str, ...] = ()  # of --layers, --heads and --item
    table: bool = False
    overview: bool = False  # shows only those of its conditions that were run
    one_layer: bool = False  # shows one layer: the one asked for, else the study's first
    compares: bool = False  # a condition without filler has nothing to show
    counts_arm: bool = False  # shows conditions with ARM, which insert nothing

    def function(self) -> Callable[..., Any]:
        return found_at(self.draws) if isinstance(self.draws, str) else self.draws


def _curves(draws: str, *, compares: bool = False) -> FigureKind:
    takes = ("--layers", "--heads", "--item")
    return FigureKind(draws, "attention", takes, one_layer=True, compares=compares)


def _of_layer(draws: str, shows: Shows = "other", *, overview: bool = False, counts_arm: bool = False) -> FigureKind:
    return FigureKind(draws, shows, ("--layers",), one_layer=True, overview=overview, counts_arm=counts_arm)


FIGURES: Registry[FigureKind] = Registry(
    "figures",
    "kind of figure",
    {
        "heads": _curves("mless.figures.attention:draw_panels"),
        "layers": _curves("mless.figures.attention:draw_panels"),
        "conditions": _curves("mless.figures.composed:draw_conditions"),
        "versus": _curves("mless.figures.attention:draw_panels", compares=True),
        "map": FigureKind("mless.figures.overview:map_of", "attention", overview=True, compares=True),
        "retained": FigureKind("mless.figures.overview:retained_of", "attention", overview=True, compares=True),
        "mass": _of_layer("mless.figures.overview:mass_of", "attention", overview=True),
        "bars": FigureKind("mless.figures.accuracy:bars_of", "answers"),
        "sweep": FigureKind("mless.figures.sampled:sweep_of", "answers"),
        "diversity": FigureKind("mless.figures.sampled:diversity_of", "answers"),
        "table": FigureKind("mless.figures.tables:write_drawing", "answers", table=True),
        "effects": FigureKind("mless.figures.likelihood:effects_of", "answers", overview=True),
        "along": FigureKind("mless.figures.likelihood:along_of", "answers", ("--item",), overview=True),
        "displacement": _of_layer("mless.figures.affine:displacement_of"),
        "activations": _of_layer("mless.figures.activations:activations_of", counts_arm=True),
        "classes": _of_layer("mless.figures.activations:classes_of", counts_arm=True),
        "dose": FigureKind("mless.figures.dose:dose_of", overview=True),
        "placebo": FigureKind("mless.figures.placebo:placebo_of", overview=True),
        "specification": FigureKind("mless.figures.specification:specification_of", overview=True),
        "ladder": FigureKind("mless.figures.cause:ladder_of", overview=True),
        "cause": FigureKind("mless.figures.cause:cause_of", overview=True),
        "chain": FigureKind("mless.figures.cause:chain_of", overview=True),
        "sensitivity": FigureKind("mless.figures.tuning:sensitivity_of"),
        "forest": FigureKind("mless.figures.forest:forest_of"),
    },
    wants="an mless.results.figure_kinds.FigureKind",
    fits=lambda one: isinstance(one, FigureKind),
)
