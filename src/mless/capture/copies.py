"""Copies between a CPU and a GPU that do not wait for what runs there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def sent(made: Tensor, device: torch.device) -> Tensor:
    """The same on that device. To a GPU it goes without waiting for what runs there; a copy from pageable memory would wait."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def leaving(found: Tensor) -> Tensor:
    """A copy in the CPU's memory; where it comes from a GPU, it is complete only once all that was started there is done."""
    return found.detach().to("cpu", non_blocking=True)


class Started:
    """All that was started until now on the GPUs of these tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._passed: list[torch.cuda.Event] = []
        for device in {one.device for one in tensors if one.is_cuda}:
            with torch.cuda.device(device):
                self._passed.append(torch.cuda.Event())
                self._passed[-1].record()

    def wait(self) -> None:
        """Until it is done."""
        for one in self._passed:
            one.synchronize()
