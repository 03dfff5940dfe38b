"""The rows of a cause study's tables: every column stated once (docs/cause.md)."""

from __future__ import annotations

from dataclasses import dataclass

from mless.results.schemas import schema_of

#: The steps of the ladder, in order: who sees the filler. `interaction` is what does not add up.
STEPS = ("positions", "nobody", "question", "answer", "all", "interaction")
#: ``in``: the filler's value is put into the run without it. ``out``: it is taken out of the run with it.
DIRECTIONS = ("in", "out")
#: The links of the published chain, in order; `arm` is beside it, to compare with.
LINKS = ("attention-output", "mlp-activation", "both", "elsewhere", "arm")


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One row of ``ladder.parquet``: the change of one metric from one step of the ladder to another, item by item.

    `against` is the earlier step, or ``none``; ``interaction`` = all − question − answer + nobody has none. `adds_up`: one of the five changes
    whose sum is the whole effect; `p_adjusted` is Holm's over these. `condition` is the filler's name.
    """

    model: str
    task: str
    condition: str
    metric: str
    step: str
    against: str | None
    adds_up: bool
    n: int
    delta: float
    lo: float | None
    hi: float | None
    skewed: bool
    p: float | None
    p_adjusted: float | None


@dataclass(frozen=True, slots=True)
class CauseCell:
    """One row of ``cause.parquet``: a part of a layer takes its value from the other run, by one metric.

    `whole` is the filler's effect against `base`. `effect` is what the patch does: put in, its change from the base; taken out, how much of the
    filler's value is lost. `share` = mean effect / mean whole, null where the whole's interval holds 0. `p` is of the effect, `p_adjusted`
    Holm's over all cells of the metric. `head` is null where the part is taken whole.
    """

    model: str
    task: str
    condition: str
    metric: str
    layer: int
    part: str
    head: int | None
    direction: str
    base: str
    n: int
    whole: float
    whole_lo: float | None
    whole_hi: float | None
    effect: float
    lo: float | None
    hi: float | None
    skewed: bool
    p: float | None
    p_adjusted: float | None
    share: float | None
    share_lo: float | None
    share_hi: float | None


@dataclass(frozen=True, slots=True)
class CauseLink:
    """One row of ``chain.parquet``: how much of the filler's effect passes through a link of the published chain, in layer 1.

    ``both`` has the attention output and the MLP's activation of layer 1, ``elsewhere`` is the rest of the whole. ``arm`` is ARM in layer 1 and no
    patch; `moved` is the root mean square change of layer 1's activations that the filler makes (of ARM: that ARM makes), and `note` says
    where ARM could not be made to move them as far.
    """

    model: str
    task: str
    condition: str
    metric: str
    link: str
    direction: str
    n: int
    effect: float
    lo: float | None
    hi: float | None
    p: float | None
    share: float | None
    share_lo: float | None
    share_hi: float | None
    moved: float | None
    note: str | None


LADDER = schema_of(LadderStep)
CAUSE = schema_of(CauseCell)
CHAIN = schema_of(CauseLink)
