"""Where a model's weights lie: on one device, or its layers over GPUs, CPU memory and disk by transformers' own dispatch.

Dispatch means accelerate's hooks. A layer in CPU memory or on disk is computed on a GPU all the same: its weights are copied there for each
forward and dropped afterwards. Outside of a forward such weights are on the device `meta` and have no numbers. Without a GPU the CPU
computes, and layers may lie on disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mless.errors import BadStudy, UnsupportedArchitecture, first_line
from mless.models.locating import Say, silent
from mless.values import check_device_map, named_layers

#: A layer's number in the name of a weight.
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
#: Where Linux keeps what a container or a batch job may take.
_CGROUP = Path("/sys/fs/cgroup")
#: Of memory that is free and not bounded by the user, this share may hold weights. transformers takes the same.
_SHARE = 0.9


@dataclass(frozen=True)
class Place:
    """Where a model is to go. `bounds` are bytes by device (None: as much as there is) where its layers may be spread; else it is None."""

    device: torch.device
    bounds: Mapping[str, int | None] | None = None

    @property
    def mapped(self) -> bool:
        return self.bounds is not None

    def options(self, needed: int, folder: Path, label: str) -> dict[str, Any]:
        """What `from_pretrained` is told, for weights of so many bytes; weights that are too many for all bounds are refused at once."""
        if self.bounds is None:
            return {}
        room = _room(self.bounds)
        if "disk" not in self.bounds and needed > sum(room.values()):
            raise _too_large(label, needed, room)
        given = {int(name.removeprefix("cuda:")) if ":" in name else name: size for name, size in room.items()}
        # Weights that transformers has to convert are written there if they stay on disk.
        return {"device_map": "auto", "max_memory": given, "offload_folder": str(folder / "converted")}

    def taken(
        self, model: nn.Module, needed: int, label: str, say: Say = silent
    ) -> tuple[torch.device, dict[str, str]]:
        """The device that takes a loaded model's input, and which of its parts lie where."""
        assert self.bounds is not None
        device, held = _main_device(model), _held(model)
        if "disk" in held and "disk" not in self.bounds:
            raise _too_large(label, needed, _room(self.bounds))
        if device.type != self.device.type:
            raise BadStudy(
                f"--device-map auto: nothing of {label} fits into the GPU memory that it may take "
                f"({_shown(_room(self.bounds))}); allow more with --device-memory, or use --device cpu"
            )
        if is_spread(model):
            _try_out(model, device, label)
        say(f"placed: {'; '.join(f'{parts} on {where}' for where, parts in held.items())}")
        return device, held


def chosen(device: str, device_map: str | None, memory: str | None) -> Place:
    """The place for what was asked; what contradicts itself, or is not there, is refused."""
    bounds = check_device_map(device_map, device, memory)
    place = _device(device)
    if bounds is None:
        return Place(place)
    there = [*(f"cuda:{number}" for number in range(torch.cuda.device_count())), "cpu", "disk"]
    if missing := [name for name in bounds if name not in there]:
        raise BadStudy(f"--device-memory names {missing[0]!r}, but this machine has {', '.join(there)}")
    _require_accelerate()
    return Place(place, bounds)


def size(tensors: Mapping[str, Any], kept: torch.dtype | None) -> int:
    """The bytes that weights take in memory, by their files' headers: in the dtype `kept`, or as stored."""
    stored = (one["data_offsets"] for one in tensors.values())
    if kept is None:
        return sum(last - first for first, last in stored)
    return sum(math.prod(one["shape"]) for one in tensors.values()) * kept.itemsize


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate's hooks move inputs or weights of the model between devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def _device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(1, device=device).item()  # the meta device has room but no numbers
    except (RuntimeError, AssertionError) as fault:
        raise BadStudy(f"no device {asked!r} on this machine ({first_line(fault)}); try --device cpu") from None
    return device


def _try_out(model: nn.Module, device: torch.device, label: str) -> None:
    """Run one token. Some families use a module's weights without calling it, and then no hook brings them in.

    torch computes with such weights, and where their result only chooses experts it is lost without an error. So each use is refused.
    """
    try:
        with torch.inference_mode(), _WithNumbers():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    except _WithoutNumbers as fault:
        raise UnsupportedArchitecture(
            f"{label}: its code uses weights past the hooks that bring them in from CPU memory or disk (in {fault}); it can be spread over GPUs "
            "only: allow more with --device-memory"
        ) from None
    except (NotImplementedError, RuntimeError) as fault:
        raise UnsupportedArchitecture(
            f"{label} does not run when it is spread ({first_line(fault)}); leave --device-map out, or load fewer layers with --layers"
        ) from fault


#: What the hooks themselves do with such tensors; it computes nothing.
_MOVES = (torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.detach)


class _WithoutNumbers(Exception):
    """A weight that is elsewhere was used."""


class _WithNumbers(TorchDispatchMode):
    """Refuses to compute with tensors that have no numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        used = (one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor))
        if getattr(func, "overloadpacket", None) not in _MOVES and any(one.is_meta for one in used):
            raise _WithoutNumbers(str(func))
        return func(*args, **(kwargs or {}))


def _require_accelerate() -> None:
    try:
        import accelerate as _  # noqa: F401
    except ImportError as fault:
        raise BadStudy(
            f"--device-map needs accelerate ({first_line(fault)}): pip install accelerate, or leave --device-map out"
        ) from None


def _room(bounds: Mapping[str, int | None]) -> dict[str, int]:
    """Bytes that weights may take, by device: as bounded, else most of what is free. GPUs come first, so that they are filled first."""
    import psutil

    room: dict[str, int] = {}
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"
        # What torch holds and does not use is free too.
        unused = torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
        free = torch.cuda.mem_get_info(number)[0] + unused
        bound = bounds.get(name)
        room[name] = int(free * _SHARE) if bound is None else min(bound, free)
    bound = bounds.get("cpu")
    left = _left_to_this_job()
    free = psutil.virtual_memory().available if left is None else min(psutil.virtual_memory().available, left)
    room["cpu"] = int(free * _SHARE) if bound is None else min(bound, free)
    return room


def _left_to_this_job() -> int | None:
    """Bytes of memory that a container or a batch job may still take; None where there is no such limit."""
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (_CGROUP / most).read_text(encoding="utf-8").strip()
            return int(limit) - int((_CGROUP / used).read_text(encoding="utf-8")) if limit.isdigit() else None
        except (OSError, ValueError):
            continue
    return None


def _shown(room: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**30:.3g} GiB" for name, size in room.items())


def _too_large(label: str, needed: int, room: Mapping[str, int]) -> BadStudy:
    return BadStudy(
        f"{label} does not fit even so: its weights take {needed / 2**30:.3g} GiB, whole layers at a time, and there are {_shown(room)} for them "
        "(room for one layer more is kept where layers are copied to); allow more with --device-memory, load fewer layers with --layers, or add "
        "disk to --device-memory: layers then stay in the checkpoint's files and are read for each forward, which is slow"
    )


def _main_device(model: nn.Module) -> torch.device:
    """Where the input goes: the hook of the whole model says it. A model without hooks is on one device."""
    hook = getattr(model, "_hf_hook", None)
    if hook is None:
        return next(model.parameters()).device
    device = hook.execution_device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _held(model: nn.Module) -> dict[str, str]:
    """The model's parts by where they lie, in words: ``{"cuda:0": "embed_tokens, layers 1–4", "cpu": "layers 5–8, norm"}``."""
    layers: dict[str, set[int]] = {}
    others: dict[str, dict[str, None]] = {}
    for name, device in _places(model):
        if (layer := LAYER.search(name)) is not None:
            layers.setdefault(device, set()).add(int(layer[1]) + 1)
        else:
            # The module's name: not the weight's, nor its number in a list.
            parts = [part for part in name.split(".")[:-1] if not part.isdecimal()]
            others.setdefault(device, {})[parts[-1] if parts else name] = None
    return {
        device: ", ".join(
            [*([named_layers(sorted(layers[device]))] if device in layers else []), *others.get(device, {})]
        )
        for device in dict.fromkeys([*layers, *others])
    }


def _places(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Where each weight lies when no forward runs."""
    placed: Mapping[str, Any] | None = getattr(model, "hf_device_map", None)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if placed is None:
            yield name, str(weight.device)
            continue
        # The longest name wins: a layer's entry counts before its list's.
        owner = max((one for one in placed if not one or name == one or name.startswith(f"{one}.")), key=len)
        device = placed[owner]
        yield name, f"cuda:{device}" if isinstance(device, int) else str(device)
