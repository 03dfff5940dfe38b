"""A forward that starts at a later layer: earlier ones hand on what they computed in a run of the same tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from mless.capture.patching import RecordedRun
from mless.models.activations import layer_modules


@contextmanager
def starting(model: nn.Module, first: int, runs: Sequence[RecordedRun], count: int, length: int) -> Generator[None]:
    """Inside the block layers before `first` are not computed. They hand on the residual stream that the runs of the same rows have after layer
    `first` − 1. `count` rows of `length` tokens; what fills them up is zero, and no real token sees it.
    """
    with ExitStack() as stack:
        if first > 1:
            before = [run.of("residual", first - 1)[0] for run in runs]
            given = before[0].new_zeros(count, length, before[0].shape[-1])
            for row, values in enumerate(before):
                given[row, : len(values)] = values
            for module in layer_modules(model, range(1, first)).values():
                stack.enter_context(_handing_on(module, given))
        yield


@contextmanager
def _handing_on(module: nn.Module, given: Tensor) -> Generator[None]:
    own = vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        return given

    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


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
