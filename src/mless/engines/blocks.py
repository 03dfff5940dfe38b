"""Matrix products whose shape does not depend on the number of rows: batch-invariant decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mless.models.widening import widened

#: Rows of one matrix product in batch-invariant mode.
BLOCK = 16


class InBlocks(TorchFunctionMode):
    """Matrix products in blocks of `BLOCK` rows, so that each product has the same shape for any number of rows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            value, rest = args[0], [widened(one) if isinstance(one, Tensor) else one for one in args[1:]]
            flat = value.reshape(-1, value.shape[-1])
            blocks = [func(block, *rest, **(kwargs or {})) for block in flat.split(BLOCK)]
            return torch.cat(blocks).reshape(*value.shape[:-1], -1)
        if func is torch.addmm:  # GPT-2's own linear layer
            weight = widened(args[2])
            blocks = [func(args[0], block, weight, *args[3:], **(kwargs or {})) for block in args[1].split(BLOCK)]
            return torch.cat(blocks)
        return func(*args, **(kwargs or {}))
