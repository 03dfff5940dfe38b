"""Sums of a prompt that is too long for one forward."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from mless import kernels


class Parts:
    """Sums of a prompt that runs part by part, each part's queries with all keys so far."""

    def __init__(self, sets: Bool[Tensor, "batch sets tokens"]) -> None:
        #: How many have run.
        self.tokens = 0
        self._all = sets.shape[2]
        self._single = sets.stride(1) == 0
        self._members = sets[:, -1].sum(-1).clamp(min=1)
        self._sums: list[Tensor] = []

    def add(self, sums: kernels.Sums, even: kernels.Sums, sets: Bool[Tensor, "batch sets queries"]) -> None:
        # Two sets that are one take the memory of one.
        received = sums.received[:, :1] if self._single else sums.received
        mass = sums.mass * sets[:, -1].sum(-1)[:, None, None]
        found = [received, even.received, even.counts, mass]
        if not self._sums:
            shapes = [(*part.shape[:-1], self._all) for part in found[:3]]
            self._sums = [part.new_zeros(shape) for part, shape in zip(found, shapes, strict=False)]
            self._sums.append(torch.zeros_like(mass))
        for whole, part in zip(self._sums, found, strict=True):
            whole[..., : part.shape[-1]] += part
        self.tokens += sets.shape[2]

    def whole(self) -> tuple[kernels.Sums, kernels.Sums]:
        received, even, counts, mass = self._sums
        sets = counts.shape[1]
        received = received.expand(-1, sets, -1, -1)
        return (
            kernels.Sums(received, counts, mass / self._members[:, None, None]),
            kernels.Sums(even, counts, mass[:, :1, :0]),
        )
