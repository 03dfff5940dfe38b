"""Weights stored in 16 bits and used as float32, so that a large model fits on a processor without 16-bit units.

Every operation on such a weight gets a float32 copy of it, which is freed afterwards; rows of an embedding are looked up first. The results
are those of the model loaded in float32, bit for bit, because 16-bit numbers are float32 numbers too. Such weights are read and never
written to: a write would go to the copy, so it is refused. A state dict holds the 16-bit numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: Smaller weights (norms, biases) are simply kept in float32.
_SMALL = 1 << 16
_NARROW = (torch.bfloat16, torch.float16)
_TENSOR: Any = Tensor
#: Operations that select a part of a weight stay in 16 bits, so unused experts are never widened.
_LOOKS: set[Any] = {
    *(getattr(_TENSOR, name) for name in "__getitem__ detach t transpose requires_grad_".split()),
    _TENSOR.T.__get__,
    _TENSOR.data.__get__,
}
#: What asks about a weight and computes nothing.
_ASKS: set[Any] = {
    *(
        getattr(_TENSOR, name)
        for name in "size dim numel nelement stride storage_offset is_contiguous data_ptr".split()
    ),
    *(
        getattr(_TENSOR, name)
        for name in "element_size is_floating_point is_complex untyped_storage is_inference".split()
    ),
    *(getattr(_TENSOR, name) for name in "__len__ __hash__".split()),
    *(getattr(_TENSOR, name).__get__ for name in "shape ndim device layout is_leaf requires_grad grad nbytes".split()),
    *(getattr(_TENSOR, name).__get__ for name in "is_meta is_cuda is_cpu is_sparse is_quantized".split()),
}
#: Products keep no reference to their weight, so its float32 copy can reuse the last one's memory. New memory would take longer than
#: widening.
_PRODUCTS: set[Any] = {nn.functional.linear, torch.addmm, torch.matmul}
#: Weights of more numbers than this (256 MB) get their own memory, freed at once.
_REUSED = 1 << 26
_REUSE = threading.local()
_SETS_DATA: Any = _TENSOR.data.__set__


class Narrow(Tensor):
    """A 16-bit weight that reports float32 and is widened whenever it is used."""

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.float32

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is Tensor.__deepcopy__:
            copied: Tensor = _narrow(raw(args[0]).clone())
            if isinstance(args[0], nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=False)
            args[1][id(args[0])] = copied
            return copied
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            if func in _ASKS:
                return func(*args, **given)
            if func in _LOOKS and isinstance(args[0], Narrow):
                return _narrow(func(raw(args[0]), *args[1:], **given))
            if func is nn.functional.embedding:
                return _looked_up(*args, **given)
            if func in _PRODUCTS and not given and not torch.is_grad_enabled():
                return _multiplied(func, args)
            if written := _written(func, args, given):
                raise RuntimeError(  # no TypeError: of `weight *= 2` torch would make `weight = weight * 2`
                    f"{written} would write to a float32 copy of a weight kept in 16 bits; load with dtype float32 to change weights"
                )
            if func == _SETS_DATA and isinstance(args[0], Narrow):
                return None  # to what it is already, as `model.to("cpu")` does
            return func(*map(_wide, args), **{name: _wide(value) for name, value in given.items()})

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Narrow({raw(self)!r}, computes in float32)"


def raw(weight: Tensor) -> Tensor:
    """The 16-bit numbers themselves; other tensors as they are."""
    if not isinstance(weight, Narrow):
        return weight
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return weight.as_subclass(Tensor)


def widened(weight: Tensor) -> Tensor:
    """The float32 weight, for callers that use it several times: it is widened once."""
    return raw(weight).float() if isinstance(weight, Narrow) else weight


def keep_narrow(model: nn.Module) -> None:
    """Make every 16-bit weight of the model compute in float32. Tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
                if weight is None or isinstance(weight, Narrow) or weight.dtype not in _NARROW:
                    continue
                if id(weight) not in made:
                    made[id(weight)] = _parameter(weight)
                module._parameters[name] = made[id(weight)]  # pyright: ignore[reportPrivateUsage]
            if any(isinstance(weight, Narrow) for weight in module._parameters.values()):  # pyright: ignore[reportPrivateUsage]
                module.register_state_dict_post_hook(_as_kept)
            for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
                if buffer is not None and buffer.dtype in _NARROW:
                    module._buffers[name] = buffer.float()  # pyright: ignore[reportPrivateUsage]


@contextmanager
def as_stored() -> Generator[None]:
    """Inside the block transformers loads weights in the dtypes that the checkpoint has them in, whatever dtype the model is built in.

    Values computed while the model is built (scales, tables) have that dtype; weights stored wide stay wide.
    """
    from transformers import PreTrainedModel

    planned: Any = getattr(PreTrainedModel, "_get_dtype_plan", None)

    def plan(self: Any, dtype: Any) -> dict[str, None]:
        return {"*": None}

    if (
        planned is None
    ):  # another version of transformers: everything is float32 then, which is correct but takes more memory
        yield
        return
    PreTrainedModel._get_dtype_plan = plan  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = planned  # pyright: ignore[reportPrivateUsage]


def _as_kept(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict holds the 16-bit numbers with their own dtype, because saving reads a tensor's memory by its dtype."""
    for name in module._parameters:  # pyright: ignore[reportPrivateUsage]
        if isinstance(weight := state.get(prefix + name), Narrow):
            state[prefix + name] = raw(weight)


def _written(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> str | None:
    """The name of an operation that would write to a narrow weight."""
    name = str(getattr(func, "__name__", ""))
    if isinstance(given.get("out"), Narrow):
        return f"{name} with out="
    if not args or not isinstance(args[0], Narrow):
        return None
    if func == _SETS_DATA:
        new: Tensor = args[1]
        same = new.dtype == torch.float32 and new.device == args[0].device and new.shape == args[0].shape
        return None if same and torch.equal(widened(args[0]), widened(new)) else "setting data"
    return name if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else None


def _parameter(weight: Tensor) -> nn.Parameter:
    if weight.numel() < _SMALL or weight.ndim < 2:
        return nn.Parameter(weight.detach().float(), requires_grad=False)
    return nn.Parameter(_narrow(weight.detach()), requires_grad=False)


def _narrow(numbers: Tensor) -> Narrow:
    return numbers.as_subclass(Narrow)


def _wide(value: Any) -> Any:
    if isinstance(value, Narrow):
        return widened(value)
    if type(value) in (list, tuple) and any(isinstance(one, Narrow) for one in value):
        return type(value)(map(_wide, value))
    return value


def _multiplied(product: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    narrow = [one for one in args if isinstance(one, Narrow)]
    if len(narrow) > 1 or not narrow[0].is_contiguous() or narrow[0].numel() > _REUSED:
        return product(*map(_wide, args))
    weight = raw(narrow[0])
    memory: Tensor | None = getattr(_REUSE, "memory", None)
    if memory is None or memory.numel() < weight.numel() or memory.device != weight.device:
        with torch.inference_mode(
            False
        ):  # memory that was made inside inference mode could not be written to outside of it
            memory = _REUSE.memory = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
    wide = memory[: weight.numel()].view(weight.shape).copy_(weight)
    return product(*(wide if isinstance(one, Narrow) else one for one in args))


def _looked_up(input: Tensor, weight: Tensor, *args: Any, **given: Any) -> Tensor:
    return nn.functional.embedding(input, raw(weight), *args, **given).float()
