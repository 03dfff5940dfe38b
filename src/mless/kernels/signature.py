"""What every implementation takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int32
from torch import Tensor

#: Keys are cut off at multiples of this, so that kernels with blocks of keys get the same blocks.
_ALIGNED = 128
#: Most mask elements read at once.
_ELEMENTS = 1 << 26


@runtime_checkable
class Visible(Protocol):
    """Which keys the queries ``first … last − 1`` can see. Asked block by block, so no T × T mask need exist."""

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch #heads rows keys"]: ...


@dataclass(frozen=True)
class Sums:
    """What one attention call yields.

    received: Σ P[i, j] over the queries i of each set that come later than j and can see it
    counts:   how many such queries there are
    mass:     where a query of the *last* set sends its attention, the diagonal included: one share per span id, then the
              learned sink; the mean over that set's queries
    """

    received: Float[Tensor, "batch sets heads keys"]
    counts: Int[Tensor, "batch sets keys"]
    mass: Float[Tensor, "batch heads spans_and_sink"]

    @property
    def apart(self) -> Float[Tensor, "batch sets_that_differ heads keys"]:
        """`received` as stored: once, where both sets are equal."""
        return self.received[:, :1] if self.received.stride(1) == 0 else self.received


@dataclass(frozen=True)
class Asked:
    """What follows from query sets and a mask, whatever the scores are.

    even:   `received` of a head that spreads evenly over what it sees
    counts: `Sums.counts`
    end:    the place after the first set's last query
    size:   how many queries the last set has
    """

    even: Float64[Tensor, "batch sets keys"]
    counts: Int[Tensor, "batch sets keys"]
    end: Int32[Tensor, " batch"]
    size: Int[Tensor, " batch"]


@dataclass(eq=False)
class Intervals:
    """A mask in which every query sees the keys from its start to itself: causal, sliding, chunked, packed and padded prompts.

    The queries are the last of the keys' tokens. `starts` never falls from one query to the next, so the queries that see a key are an
    interval too.
    """

    starts: Int32[Tensor, "batch queries"]
    keys: int
    #: True where every start is 0: nothing hides a key from later queries.
    whole: bool = False
    _asked: tuple[Tensor, Asked] | None = field(default=None, repr=False)
    _near: dict[tuple[int, int], tuple[slice, Tensor]] = field(
        default_factory=dict[tuple[int, int], tuple[slice, Tensor]], repr=False
    )

    @property
    def offset(self) -> int:
        """The first query's place among the keys."""
        return self.keys - self.starts.shape[1]

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch 1 rows keys"]:
        return self._mask(first, last, slice(0, self.keys))

    def _mask(self, first: int, last: int, keys: slice) -> Bool[Tensor, "batch 1 rows some_keys"]:
        place = torch.arange(keys.start, keys.stop, device=self.starts.device)
        at = torch.arange(first, last, device=place.device)[:, None] + self.offset
        return ((place <= at) & (place >= self.starts[:, first:last, None]))[:, None]

    def near(self, first: int, last: int) -> tuple[slice, Bool[Tensor, "batch 1 rows seen"]]:
        """The keys that any of the queries ``first … last − 1`` sees, and which of them each sees; kept for the next layer, if small."""
        if (found := self._near.get((first, last))) is not None:
            return found
        keys = slice(int(self._firsts[first]) // _ALIGNED * _ALIGNED, last + self.offset)
        found = keys, (seen := self._mask(first, last, keys))
        if seen.numel() + sum(mask.numel() for _, mask in self._near.values()) <= _ELEMENTS:
            self._near[first, last] = found
        return found

    @cached_property
    def widest(self) -> int:
        """Most keys that a query sees."""
        queries = self.starts.shape[1]
        return int((np.arange(queries) + self.offset + 1 - self._firsts).max()) if queries else 0

    @cached_property
    def _firsts(self) -> Int[np.ndarray, " queries"]:
        """The first key that a query of any row sees."""
        return self.on_host.min(0)

    @cached_property
    def on_host(self) -> Int[np.ndarray, "batch queries"]:
        """`starts` on the host."""
        return np.zeros(self.starts.shape, dtype=np.int32) if self.whole else self.starts.cpu().numpy()

    @cached_property
    def ends(self) -> Int32[Tensor, "batch keys"]:
        """The query after the last one that sees each key."""
        batch, queries = self.starts.shape
        if self.whole:
            return torch.full((batch, self.keys), queries, dtype=torch.int32, device=self.starts.device)
        keys = torch.arange(self.keys, dtype=torch.int32, device=self.starts.device).expand(batch, -1)
        return torch.searchsorted(self.starts, keys.contiguous(), right=True, out_int32=True)

    def asked(self, sets: Bool[Tensor, "batch sets queries"]) -> Asked:
        """What follows from this mask and these sets alone; kept, since one forward's layers share both."""
        if self._asked is not None and self._asked[0] is sets:
            return self._asked[1]
        queries = torch.arange(sets.shape[-1], device=sets.device)
        seen = (queries + self.offset - self.starts + 1).clamp(min=1)
        first = (torch.arange(self.keys, device=sets.device) + 1 - self.offset).clamp(0, sets.shape[-1])
        last = torch.maximum(self.ends.long(), first)

        def between(values: Tensor) -> Tensor:
            """Sums over the queries that see a key, by differences of running sums."""
            sums = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
            at = [index.expand(*sums.shape[:2], -1) for index in (last[:, None], first)]
            return sums.gather(-1, at[0]) - sums.gather(-1, at[1])

        found = Asked(
            even=between(sets.double() / seen[:, None]),
            counts=between(sets.long()),
            end=(sets[:, 0] * (queries + 1)).amax(-1).int() if len(queries) else sets.new_zeros(sets.shape[0]).int(),
            size=sets[:, -1].sum(-1),
        )
        self._asked = (sets, found)
        return found


def intervals(visible: Visible, members: Bool[Tensor, "batch queries"], keys: int) -> Intervals | None:
    """The mask as intervals; None where it is not made of intervals. Only `members` are read; what padding sees does not matter."""
    if isinstance(visible, Intervals):
        return visible
    batch, queries = members.shape
    rows = max(16, _ELEMENTS // max(1, batch * keys))
    starts: list[Tensor] = []
    fits = torch.ones((), dtype=torch.bool, device=members.device)
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        block = visible(first, last).to(members.device)
        if block.shape[1] != 1:
            return None
        seen = block[:, 0].expand(batch, -1, -1)
        begin = seen.view(torch.uint8).argmax(-1)  # the first of them, as bytes: four times as many fit
        at = torch.arange(first, last, device=seen.device) + keys - queries
        # No holes: as many keys up to itself as places from its first key on. Nothing later: no other keys.
        past = seen.tril(first + keys - queries)
        fits &= (((past.sum(-1) == at - begin + 1) & (past == seen).all(-1)) | ~members[:, first:last]).all()
        starts.append(begin)
    begin = torch.cat(starts, dim=1).int().masked_fill(~members, 0)
    rising = begin.cummax(-1).values
    fits &= ((rising == begin) | ~members).all()
    if not bool(fits):
        return None
    whole = not bool(rising.any())
    if not whole:
        # Queries before a row's first member or after its last get the latest starts that do not make `starts` fall, so that other rows
        # need not look further back.
        place = torch.arange(queries, device=members.device)
        own = (place + keys - queries).int().expand(batch, -1)
        last = (members * (place + 1)).amax(-1, keepdim=True)
        first = rising.gather(1, members.byte().argmax(-1, keepdim=True))
        rising = torch.where(place >= last, own, torch.maximum(rising, torch.minimum(own, first)))
    return Intervals(rising.contiguous(), keys, whole=whole)


def mass_of(
    sent: Float[Tensor, "batch heads keys"],
    spans: Int[Tensor, "batch keys"],
    n_spans: int,
    members: Bool[Tensor, "batch queries"],
    to_sink: Float[Tensor, "batch heads queries"] | None = None,
) -> Float[Tensor, "batch heads spans_and_sink"]:
    """Mass by span on a CPU, from what each key got from the last set's queries, the diagonal included.

    Keys are added in order, and zeros after the last change nothing: the same bits for every length of padding.
    """
    mass = torch.zeros(*sent.shape[:2], n_spans + 1, dtype=torch.float64, device=sent.device)
    mass.scatter_add_(-1, spans.long()[:, None].expand_as(sent), sent.double())
    if to_sink is not None:
        mass[..., -1] = to_sink.double().cumsum(-1)[..., -1:].sum(-1)
    return (mass / members.sum(-1).clamp(min=1)[:, None, None]).float()
