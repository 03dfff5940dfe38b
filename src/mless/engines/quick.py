"""A quicker decoding step.

On a GPU norms, rotations and gated MLPs are one kernel each. On a CPU weights are laid out once for its matrix units.

Nothing here depends on a model family. A module or function is replaced when the kernel gives the same result up to rounding, on random
numbers of the model's sizes. Everything else stays.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mless import kernels
from mless.models import processor
from mless.models.placing import is_spread

_LOCK = threading.Lock()
#: Sizes of the random numbers: a limit, an offset or a floor of the module would show at one of them.
_SIZES = (1e-3, 1.0, 1e3)
#: Two roundings to the model's dtype may differ by one step each.
_STEPS = 4.0
#: Largest size of the second copy of a CPU model's linear weights.
_PACKED_BYTES = 2 << 30


@contextmanager
def quick_steps(model: nn.Module, rows: int = 1) -> Generator[None]:
    """Inside the block, forwards of one token per row use the replacements; afterwards the model is as before.

    The replacements own no memory, so a graph captured inside stays valid after the block.
    """
    if not kernels.triton_serves(next(model.parameters())):
        yield
        return
    # One at a time: a module's functions are shared by all models of its family.
    with _LOCK, ExitStack() as stack:
        found = ((module, _norm_of(module) or _gate_of(module)) for module in model.modules())
        single = [(module, forward) for module, forward in found if forward is not None]
        joined = [one for module in model.modules() for one in _joined_of(module)] if rows == 1 else []
        stack.enter_context(replacing(single + joined))
        for name in {type(module).__module__ for module in model.modules()}:
            holder: Any = sys.modules.get(name)
            own = getattr(holder, "apply_rotary_pos_emb", None)
            if own is not None and (turned := _rotary_of(own, model)) is not None:
                holder.apply_rotary_pos_emb = turned
                stack.callback(setattr, holder, "apply_rotary_pos_emb", own)
        yield


Replaced = list[tuple[nn.Module, Callable[[Tensor], Tensor]]]


@contextmanager
def replacing(replaced: Replaced) -> Generator[None]:
    """Inside the block these modules use the given forwards. A module whose forward was already replaced (by ARM) keeps it."""
    ours = [(module, forward) for module, forward in replaced if "forward" not in vars(module)]
    try:
        for module, forward in ours:
            module.forward = forward
        yield
    finally:
        for module, _ in ours:
            vars(module).pop("forward", None)


def packed_products(model: nn.Module, rows: int) -> Replaced:
    """Linear layers for products with so many rows, their weights laid out as the CPU's matrix units read them.

    Otherwise every product lays its weights out again, which takes as long as a small product. This needs a second copy of the weights, so
    large models are left out.
    """
    if is_spread(model):
        return []  # its weights are put into the modules anew for each forward
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not processor.here().computes("bfloat16"):
        return []
    found = [module for module in model.modules() if type(module) is nn.Linear and not _has_hooks(module)]
    if sum(module.weight.nbytes for module in found) > _PACKED_BYTES:
        return []
    proved: dict[tuple[int, ...], bool] = {}
    packed: Replaced = []
    for module in found:
        forward = _packed(module, rows)
        shape = (*module.weight.shape, getattr(module, "bias", None) is None)
        if shape not in proved:
            proved[shape] = _agree(forward, module, module.weight, rows)
        if proved[shape]:
            packed.append((module, forward))
    return packed


def _packed(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    with torch.inference_mode():
        weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
    bias, own = module.bias, module.forward

    def forward(x: Tensor) -> Tensor:
        if x.numel() != rows * module.in_features:
            return own(x)
        out = torch.ops.mkldnn._linear_pointwise(x.reshape(rows, -1), weight, bias, "none", [], "")
        return out.reshape(*x.shape[:-1], -1)

    return forward


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    # Large numbers may overflow in 16 bits; then both must, at the same places.
    finite = theirs.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return False
    a, b = (one.float().masked_fill(~finite, 0.0) for one in (ours, theirs))
    size = b.abs().clamp(min=b.abs().mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((a - b).abs() / size).max()) <= _STEPS * torch.finfo(theirs.dtype).eps


def _tried(what: Callable[[], bool]) -> bool:
    """Whether it is the same; False where it cannot be called."""
    try:
        with torch.inference_mode():
            return what()
    except (TypeError, ValueError, RuntimeError, AttributeError, *_of_triton()):
        return False


def _agree(ours: Callable[[Tensor], Tensor], own: Callable[[Tensor], Tensor], weight: Tensor, rows: int = 4) -> bool:
    """Whether both give the same for inputs of the weight's width, small and large."""
    x = _random(rows, 1, weight.shape[-1], like=weight)
    return all(_tried(lambda size=size: _same(ours(x * size), own(x * size))) for size in _SIZES)


def _of_triton() -> tuple[type[Exception], ...]:
    """Triton's own error, raised for a kernel that does not fit the GPU."""
    if importlib.util.find_spec("triton") is None:
        return ()
    from triton.errors import TritonError

    return (TritonError,)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]


def _random(*shape: int, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(5)
    return torch.randn(*shape, generator=generator, device=like.device).to(like.dtype)


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    from mless.kernels import decoding_triton

    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    own, scale = module.forward, weight

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != scale.dtype or hidden_states.shape[-1] != scale.shape[-1]:
            return own(hidden_states)
        return decoding_triton.rms_norm(hidden_states, scale, eps)

    return forward if _agree(forward, own, weight) else None


def _gate_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    from mless.kernels import decoding_triton

    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    if not all(isinstance(part, nn.Module) for part in parts) or "SiLU" not in type(parts[3]).__name__:
        return None
    gate, up, down, act = parts
    own = module.forward

    def forward(x: Tensor) -> Tensor:
        # Hooks on the activation must still be called.
        if _has_hooks(act):
            return own(x)
        return down(decoding_triton.gated(gate(x), up(x)))

    weight = next(gate.parameters())
    return forward if weight.ndim == 2 and _agree(forward, own, weight) else None


def _joined_of(module: nn.Module) -> Replaced:
    """Queries, keys and values of a single row by one kernel: the call for queries computes all three."""
    from mless.kernels import decoding_triton

    parts: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    if not all(type(part) is nn.Linear and not _has_hooks(part) for part in parts):
        return []
    # Quantised layers are linear layers too, but have no plain weights that a kernel could read.
    held = [one for part in parts for one in (part.weight, part.bias) if one is not None]
    if not all(type(one) is nn.Parameter and one.is_contiguous() for one in held):
        return []
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    if len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) > 1:
        return []
    owns = [part.forward for part in parts]
    made: list[tuple[Tensor, list[Tensor]]] = []

    def first(x: Tensor) -> Tensor:
        made.clear()
        if x.numel() != weights[0].shape[1] or x.dtype != weights[0].dtype:
            return owns[0](x)
        made.append((x, decoding_triton.products(x, weights, biases)))
        return made[0][1][0].view(*x.shape[:-1], -1)

    def later(which: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if not made or made[0][0] is not x:
                return owns[which](x)
            return made[0][1][which].view(*x.shape[:-1], -1)

        return forward

    forwards = [first, later(1), later(2)]
    for forward, own in zip(forwards, owns, strict=True):
        if not _agree(lambda x, forward=forward: (first(x), forward(x))[1], own, weights[0], rows=1):
            return []
    made.clear()
    return list(zip(parts, forwards, strict=True))


def _rotary_of(own: Callable[..., Any], model: nn.Module) -> Callable[..., Any] | None:
    from mless.kernels import decoding_triton

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = q.ndim == 4 and q.shape[2] == 1 and cos.ndim == 3 and cos.shape[:2] == (q.shape[0], 1)
        halves = q.shape[-1] == cos.shape[-1] == k.shape[-1] and q.shape[-1] & (q.shape[-1] - 1) == 0
        ours = q.is_cuda and not torch.is_grad_enabled() and q.stride(-1) == k.stride(-1) == cos.stride(-1) == 1
        if args or kwargs or not whole or not halves or not ours or not q.dtype == k.dtype == cos.dtype == sin.dtype:
            return own(q, k, cos, sin, *args, **kwargs)
        return decoding_triton.rotary(q, k, cos, sin)

    like = next(model.parameters())
    q, k = (_random(3, 1, heads, 64, like=like).transpose(1, 2) for heads in (4, 2))
    angle = _random(3, 1, 64, like=like).float()
    cos, sin = angle.cos().to(like.dtype), angle.sin().to(like.dtype)
    same = _tried(lambda: all(_same(a, b) for a, b in zip(turned(q, k, cos, sin), own(q, k, cos, sin), strict=True)))
    return turned if same else None
