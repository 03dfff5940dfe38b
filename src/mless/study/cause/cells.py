"""The runs of a cause study as conditions: who sees the filler, and which part of which layer takes the other run's value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mless.changes import Cut, Part, Patch
from mless.results.cause_rows import DIRECTIONS
from mless.values import ArmSettings, Condition

#: The one layer of the published chain.
FIRST = 1
#: What a patch of keys and values starts from: keys hold positions, so both runs must have the same.
POSITIONS = "positions"
#: ARM beside the chain.
ARM = "arm-equal"


@dataclass(frozen=True, slots=True)
class Cell:
    """One patched run: a part of a layer, of one head or whole, put in or taken out."""

    layer: int
    part: Part
    head: int | None
    direction: str
    #: The run without the filler, as a condition's name.
    base: str
    condition: Condition


def ladder(filler: Condition) -> dict[str, Condition]:
    """The steps between `none` and the filler, by name. The question's tokens are all of the prompt that come after the filler."""
    seen = {"nobody": "original,answer", "question": "answer", "answer": "original"}
    found = {
        POSITIONS: Condition(POSITIONS, "shift", None, filler.length, filler.placement)
    }  # no token more, but all later ones stand where they would
    return found | {
        name: replace(filler, name=f"seen-by-{name}", cut=(Cut(cut, "filler"),)) for name, cut in seen.items()
    }


def cells(
    filler: Condition, layers: Sequence[int], parts: Sequence[Part], heads: Sequence[int], at: Sequence[str]
) -> list[Cell]:
    """Every layer × part × direction, and every head of attention outputs where heads are asked for."""
    return [
        cell(filler, layer, part, head, direction, at)
        for layer in layers
        for part in parts
        for head in ((*heads,) if heads and part == "attention-output" else (None,))
        for direction in DIRECTIONS
    ]


def cell(
    filler: Condition, layer: int, part: Part, head: int | None, direction: str, at: Sequence[str] = ("all",)
) -> Cell:
    """One run, and what it is compared with."""
    of_head = "" if head is None else f"-h{head}"
    name = f"{direction}-{part}-{layer}{of_head}"
    keys = part == "keys-values"
    base = POSITIONS if keys else "none"
    if direction == "in":
        start = Condition(name, "shift", None, filler.length, filler.placement) if keys else Condition(name, "none")
        source = filler.name
    else:
        start, source = replace(filler, name=name), base
    spans = ("original", "answer") if keys and direction == "out" else tuple(at)
    heads = None if head is None else str(head)
    made = replace(start, patch=(Patch(part, str(layer), spans, heads, source),))
    if keys and direction == "out":
        # The filler's own keys have no value in a run without it: they are taken away.
        made = replace(made, cut=(Cut("original,answer", "filler", str(layer)),))
    return Cell(layer, part, head, direction, base, made)


def chain(filler: Condition, at: Sequence[str], *, activation: bool) -> dict[tuple[str, str], Condition]:
    """Layer 1's attention output, its MLP's activation, and both at once: (link, direction) → run. `activation`: the model has the second."""
    found: dict[tuple[str, str], Condition] = {}
    for direction in DIRECTIONS:
        first = cell(filler, FIRST, "attention-output", None, direction, at).condition
        found["attention-output", direction] = first
        if activation:
            second = cell(filler, FIRST, "mlp-activation", None, direction, at).condition
            found["mlp-activation", direction] = second
            both = (*first.patch, *second.patch)
            found["both", direction] = replace(first, name=f"{direction}-both-{FIRST}", patch=both)
    return found


@dataclass(frozen=True, slots=True)
class Moved:
    """How far a token's activations of layer 1 are from those without filler (L2; root mean square over original tokens), and ARM that moves them
    as far.
    """

    filler: float
    arm: float
    settings: ArmSettings
    #: Where ARM could not be made to move them as far.
    note: str | None


@dataclass(frozen=True)
class Runs:
    """All runs of a study: the steps of the ladder, the cells of the map, and the links of the chain by name and direction."""

    filler: Condition
    ladder: Mapping[str, Condition]
    cells: Sequence[Cell]
    chain: Mapping[tuple[str, str], Condition]
    moved: Moved | None = None

    @property
    def arm(self) -> Condition | None:
        """ARM in layer 1, beside the chain."""
        return None if self.moved is None or not self.chain else Condition(ARM, "none", arm=self.moved.settings)

    def conditions(self) -> list[Condition]:
        """Each once, but `none`, in the order of the columns of a table of changes."""
        found = [self.filler, *self.ladder.values()]
        if any(one.base == POSITIONS for one in self.cells):
            found.append(ladder(self.filler)[POSITIONS])
        found += [*(one.condition for one in self.cells), *self.chain.values(), *([self.arm] if self.arm else [])]
        return list({one.name: one for one in reversed(found)}.values())[::-1]
