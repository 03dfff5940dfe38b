"""Products with float32 weights on a CPU, with the weights kept in the layout that MKL multiplies from.

Otherwise MKL copies a weight into that layout in every product, which takes a quarter of the time where rows have some hundred tokens. The bits
are those of torch's own product. That is asked at the first product of each size, and torch's own is used for sizes where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

#: Bytes of weights that may be kept a second time: those of models up to half a billion weights.
_MOST = 2 << 30
#: Bytes that a processor reads at once.
_LINE = 64
#: The layout is made for products of about so many rows, and serves all others.
_ROWS = 256


class PackedWeights:
    """Weights of some modules a second time; of none where that is of no use: too many, on another processor, with another build of torch."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        weights = {id(one.weight): one.weight for one in modules if _may_be_packed(one)}
        self._packed: dict[int, Tensor] = {}
        #: The weights themselves, so that no other one gets the id of one of them.
        self._weights = list(weights.values())
        #: By size, places in memory and number of threads: whether the bits are those of torch's own product.
        self._same: dict[tuple[Any, ...], bool] = {}
        self._multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor] | None = None
        if sum(one.nbytes for one in self._weights) > _MOST or not torch.backends.mkl.is_available():
            return
        try:
            self._multiply = torch.ops.mkl._mkl_linear.default
            self._packed = {key: _reordered(one) for key, one in weights.items()}
        except (AttributeError, RuntimeError):  # a build of torch without it, or memory for half of them
            self._packed = {}

    def __bool__(self) -> bool:
        return bool(self._packed)

    def has(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and id(module.weight) in self._packed

    def product(self, module: nn.Linear, given: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
        """What the module computes of these rows."""
        weight = module.weight
        bias = cast("Tensor | None", module.bias)
        rows = given.shape[:-1].numel()
        # What MKL may choose its way by. It does not look at the numbers.
        places = weight.data_ptr() % _LINE, given.data_ptr() % _LINE
        size = *weight.shape, rows, bias is None, *places, torch.get_num_threads()
        same = self._same.get(size)
        if self._multiply is None or same is False or given.dtype != torch.float32 or not rows:
            return functional.linear(given, weight, bias)
        found = self._multiply(given, self._packed[id(weight)], weight, bias, rows)
        if same is None:
            own = functional.linear(given, weight, bias)
            self._same[size] = torch.equal(found, own)
            return own
        return found


def _reordered(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), _ROWS)


def _may_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A plain product: nothing is around it, and its weight is float32 and lies here."""
    weight = getattr(module, "weight", None)
    return (
        type(module) is nn.Linear
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.is_cpu
        and weight.is_contiguous()
        and "forward" not in vars(module)
    )
