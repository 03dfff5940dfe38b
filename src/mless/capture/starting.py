"""A forward that starts at a later layer, and at a later token: what is before has the values of a run of the same tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mless.capture.patching import RecordedRun
from mless.capture.seam import Call, Change, changing
from mless.models.activations import layer_modules
from mless.models.seams import replaced_forward


@contextmanager
def starting(
    model: nn.Module, first: int, runs: Sequence[RecordedRun], count: int, length: int, skipped: int = 0
) -> Generator[None]:
    """Inside the block layers before `first` are not computed. They hand on the residual stream that the runs of the same rows have after layer
    `first` − 1. `count` rows of `length` tokens; what fills them up is zero, and no real token sees it.

    `skipped`: so many tokens, the first ones, are not computed either. A forward of the others (`Scorer`) sees their keys and values in the runs.
    """
    with ExitStack() as stack:
        if skipped:
            stack.enter_context(changing(model, _Earlier(runs, count, skipped)))
        if first > 1:
            held = [run.of("residual", first - 1)[0] for run in runs]
            given = held[0].new_zeros(count, length - skipped, held[0].shape[-1])
            for row, values in enumerate(held):
                given[row, : len(values) - skipped] = values[skipped:]
            for module in layer_modules(model, range(1, first)).values():
                stack.enter_context(replaced_forward(module, lambda *_, **__: given))
        yield


class _Earlier(Change):
    """Puts the keys and values of tokens that are not computed before those of the others. Rows beyond the runs only fill the batch."""

    def __init__(self, runs: Sequence[RecordedRun], count: int, skipped: int) -> None:
        self._runs, self._count, self._skipped = runs, count, skipped

    def before(self, call: Call) -> Call:
        whole: list[Tensor] = []
        for which, own in enumerate((call.key, call.value)):
            earlier = own.new_zeros(self._count, self._skipped, own.shape[1], own.shape[3])
            for row, run in enumerate(self._runs):
                earlier[row] = run.of("keys-values", call.layer)[which][: self._skipped]
            whole.append(torch.cat([earlier.transpose(1, 2), own], dim=2))
        return replace(call, key=whole[0], value=whole[1])


@contextmanager
def watched(model: nn.Module, layers: Sequence[int]) -> Generator[dict[int, bool]]:
    """Inside the block it is noted whether each layer returns the residual stream and nothing beside it, so that it can be handed on."""
    alone: dict[int, bool] = {}

    def seen(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            alone[layer] = isinstance(output, Tensor) and output.ndim == 3

        return hook

    with ExitStack() as stack:
        for layer, module in layer_modules(model, layers).items():
            stack.callback(module.register_forward_hook(seen(layer)).remove)
        yield alone
