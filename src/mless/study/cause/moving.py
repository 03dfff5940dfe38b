"""How far a filler moves layer 1's activations, and ARM that moves them as far: the comparison in the published chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from jaxtyping import Float

from mless.study.cause.cells import FIRST, Moved
from mless.values import ArmSettings, Prompt, arm_of, arm_seed

if TYPE_CHECKING:
    from torch import Tensor

    from mless.models import LoadedModel

#: Items that it is found on: their activations are held at once.
MOST_ITEMS = 64
#: The smallest and the largest share of values that ARM is tried with, and how often the range between them is halved.
_LEAST, _MOST, _HALVINGS = 0.001, 0.99, 14
#: Tokens of one forward, padding included: enough for several items, and little memory.
_TOKENS = 4096
#: Nearer than this, as a share of the filler's, counts as equal.
_NEAR = 0.02


def moved_of(stored: dict[str, Any]) -> Moved:
    """As study.json has it."""
    return Moved(stored["filler"], stored["arm"], arm_of(stored["settings"]), stored["note"])


def begin_compiling(model: LoadedModel, settings: ArmSettings) -> Thread | None:
    """On a GPU begin to compile what `equal_arm` will need. Prompts are rendered meanwhile."""
    from mless import kernels
    from mless.redistribution import compile_redistribution

    if model.device.type != "cuda":
        return None
    by_share = replace(settings, c=None, fraction=_MOST, layers=(FIRST,))
    return kernels.in_background(partial(compile_redistribution, model, by_share, attached=False))


def equal_arm(model: LoadedModel, without: Sequence[Prompt], prompts: Sequence[Prompt], settings: ArmSettings) -> Moved:
    """ARM with `settings` but for its share of values, which is chosen so that it moves layer 1's activations as far as the filler does."""
    import torch

    from mless.capture.pairing import aligned

    held: list[Tensor] = []
    total, tokens = 0.0, 0
    for plain, prompt, values, other in _activations_of_both(model, without[:MOST_ITEMS], prompts[:MOST_ITEMS]):
        ours, theirs = (
            torch.from_numpy(at.copy()) for at in aligned(plain, prompt, ("start", "system", "question", "end"))
        )
        before, after = values.index_select(0, ours.to(model.device)), other.index_select(0, theirs.to(model.device))
        total, tokens = total + _squares(after, before), tokens + len(before)
        held.append(before)
    wanted = math.sqrt(total / tokens)
    seeds = [arm_seed(prompt.item, settings.seed) for prompt in without[:MOST_ITEMS]]
    best = _share_for(wanted, lambda share: _by_arm(held, seeds, tokens, replace(settings, c=None, fraction=share)))
    chosen = replace(settings, c=None, fraction=best, layers=(FIRST,))
    reached = _by_arm(held, seeds, tokens, chosen)
    near = abs(reached - wanted) <= _NEAR * wanted
    note = None if near else f"ARM comes no nearer than {reached:.3g} to the {wanted:.3g} that the filler moves them by"
    return Moved(wanted, reached, chosen, note)


def _activations_of_both(
    model: LoadedModel, without: Sequence[Prompt], prompts: Sequence[Prompt]
) -> Iterator[tuple[Prompt, Prompt, Float[Tensor, "tokens units"], Float[Tensor, "more units"]]]:
    """Each item's prompt without and with filler, and layer 1's activations in both.

    Several items share a forward: a GPU plans its attention anew for every length.
    """
    from mless.capture.patching import record_prompts

    each = max(1, _TOKENS // max(map(len, (*without, *prompts))))
    for first in range(0, len(prompts), each):
        both = without[first : first + each], prompts[first : first + each]
        before, after = (record_prompts(model, [("mlp-activation", FIRST)], some) for some in both)
        for plain, prompt, *runs in zip(*both, before, after, strict=True):
            values, other = (run.of("mlp-activation", FIRST)[0] for run in runs)
            yield plain, prompt, values, other


def _share_for(wanted: float, moved: Callable[[float], float]) -> float:
    low, high = _LEAST, _MOST
    if moved(low) >= wanted:
        return low
    if moved(high) <= wanted:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if moved(middle) < wanted else (low, middle)
    # The share of values is a step function of what is asked for: of the two sides of a step the nearer one.
    return min((round(low, 4), round(high, 4)), key=lambda share: abs(moved(share) - wanted))


def _by_arm(
    held: Sequence[Float[Tensor, "tokens units"]], seeds: Sequence[int], tokens: int, settings: ArmSettings
) -> float:
    import torch

    from mless.redistribution import redistribute

    total = 0.0
    for values, seed in zip(held, seeds, strict=True):
        own = torch.tensor([seed], device=values.device)
        total += _squares(redistribute(values[None], settings, seeds=own)[0], values)
    return math.sqrt(total / tokens)


def _squares(first: Float[Tensor, "tokens units"], second: Float[Tensor, "tokens units"]) -> float:
    return float((first.float() - second.float()).square().sum())
