"""A scoped instrument around a loaded model: its activations, as each layer's non-linearity returns them, one layer at a time.

Forward hooks only read; they are removed at the end of the block, even on error. A hook's values are reduced before the next layer runs, so
only one layer's activations of one batch are held.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from mless.capture.positions import check_reach, own_positions
from mless.errors import BadAttention, BadStudy, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.models.activations import activation_points
from mless.values import Prompt

#: Values handed over at a time: their copies in double precision are some tens of megabytes, whatever the prompt's length.
BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class Rows:
    """The activations of one prompt's original tokens in one layer. They belong to the forward, so use them at once."""

    layer: int
    prompt: Prompt
    values: Float[Tensor, "tokens units"]

    def blocks(self) -> Iterator[Float32[np.ndarray, "tokens units"]]:
        """The original tokens in order, some at a time, as float32 on the host; what is not finite is refused by name."""
        at = torch.tensor(self.prompt.original, device=self.values.device)
        size = max(1, BLOCK_VALUES // self.values.shape[1])
        for first in range(0, len(at), size):
            block = self.values.index_select(0, at[first : first + size]).float().cpu().numpy()
            if not np.isfinite(block).all():
                bad = self.prompt.original[first + int(np.argwhere(~np.isfinite(block))[0, 0])]
                raise BadAttention(
                    f"the activation is not finite (NaN or infinite) in layer {self.layer}, at token {bad} of item {self.prompt.item!r}; "
                    "try --dtype float32, or check the checkpoint"
                )
            yield block


@contextmanager
def watching(
    model: nn.Module, layers: Sequence[int], seen: Callable[[int, Float[Tensor, "*shape units"]], None]
) -> Generator[None]:
    """Inside the block every forward calls ``seen(layer, values)`` for each layer's activation.

    A model changed by ARM is read as changed if ARM was attached before.
    """
    points = activation_points(model, list(layers))

    def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def call_seen(module: nn.Module, given: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise UnsupportedArchitecture(
                    f"{type(module).__name__} of layer {layer} returns {type(output).__name__} and no tensor; see docs/adding-a-model.md"
                )
            seen(layer, output.detach())

        return call_seen

    handles = [point.act.register_forward_hook(hook(point.layer)) for point in points]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def read_activations(
    model: LoadedModel, batch: Sequence[Prompt], *, layers: Sequence[int], take: Callable[[int, Rows], None]
) -> None:
    """One forward of the batch, padded on the right; `take(row, rows)` gets every prompt's original tokens in every layer."""
    layers = model.numbered(layers)
    if not layers:
        raise BadStudy("no layer was asked for; name some, or leave layers out for all of them")
    check_reach(model, batch)
    longest = max(map(len, batch))
    positions = own_positions(model, batch, longest)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    real = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, prompt in enumerate(batch):
        ids[row, : len(prompt)] = torch.tensor(prompt.token_ids)
        real[row, : len(prompt)] = 1
    read: set[int] = set()

    def seen(layer: int, values: Tensor) -> None:
        # Some families flatten rows and tokens before their MLP; any other number of values is an error.
        if values.ndim < 2 or values.numel() != ids.numel() * values.shape[-1]:
            raise UnsupportedArchitecture(
                f"{model.family!r}: the activation of layer {layer} has the shape {tuple(values.shape)}, expected one row for each of {ids.numel()} "
                "tokens; see docs/adding-a-model.md"
            )
        if layer in read:
            raise UnsupportedArchitecture(
                f"{model.family!r} runs the activation of layer {layer} more than once in a forward, so its values cannot be told apart; see "
                "docs/adding-a-model.md"
            )
        read.add(layer)
        by_row = values.reshape(len(batch), longest, values.shape[-1])
        for row, prompt in enumerate(batch):
            take(row, Rows(layer, prompt, by_row[row, : len(prompt)]))

    padding = None if bool(real.all()) and positions is None else real.to(model.device)
    moved = {} if positions is None else {"position_ids": positions.to(model.device)}
    with watching(model.model, layers, seen), torch.inference_mode():
        model.model(input_ids=ids.to(model.device), attention_mask=padding, use_cache=False, **moved)
    missing = sorted(set(layers) - read)
    if missing:
        raise UnsupportedArchitecture(
            f"{model.family!r} did not call the activation module of layer {missing[0]}, so it cannot be measured; see docs/adding-a-model.md"
        )
