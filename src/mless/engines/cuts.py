"""Cut edges of attention for rows in slots.

All rows of a group have the same cuts; their spans differ. So a cut is a table of spans × spans, and each slot has its span as a label in a
fixed place. Masks are made of both on the device, once for all layers that are cut alike, so that a captured step makes them anew each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor, nn

from mless.capture.cutting import Edges, edges_of, no_edges
from mless.capture.following import PADDING
from mless.capture.seam import heads_of
from mless.changes import ANSWER, NAMED_SPANS, Cut
from mless.errors import UnsupportedArchitecture
from mless.models.seams import attention_modules

_ANSWER = NAMED_SPANS.index(ANSWER)

#: Spans × spans, padding last.
_Table = Bool[Tensor, "queries keys"]


@dataclass(frozen=True, eq=False)
class _Cut:
    """One layer's cuts on the device: a table for each group of heads, and which group each head is of (None: there is one)."""

    rest: list[_Table]
    sink: list[_Table]
    of_head: Int[Tensor, " heads"] | None

    @property
    def sends(self) -> bool:
        return bool(self.sink)


def labels_of(rows: Sequence[Sequence[int]], slots: int) -> Int8[Tensor, "rows slots"]:
    """The span of each slot, from the spans of the rows' prompts, as numbers; what follows a prompt is the answer."""
    found = torch.full((len(rows), slots), _ANSWER, dtype=torch.int8)
    for row, spans in enumerate(rows):
        known = torch.tensor(spans[:slots], dtype=torch.int8)
        found[row, : len(known)] = known
    return found


class SlotCuts:
    """What is cut in each layer of a model.

    `put_in`: rows hold keys that are no token's, in slots whose label is padding. They are seen in these layers, and in no other.
    """

    def __init__(
        self, model: nn.Module, cuts: Sequence[Cut], device: torch.device, put_in: Sequence[int] | None = None
    ) -> None:
        self.cuts = tuple(cuts)
        modules = attention_modules(model)
        if len({id(module) for module in modules.values()}) < len(modules):
            raise UnsupportedArchitecture(
                f"{type(model).__name__} has one module for the attention of several layers, so answers cannot be drawn with some of them cut; use "
                "mless run likelihood"
            )
        # One object for all layers that are cut alike, so that their masks are made once.
        alike: dict[Any, _Cut] = {}
        self._by_module: dict[int, _Cut] = {}
        edges = edges_of(cuts, model, heads_of(model) or 1)
        if put_in is not None:
            edges |= {layer: _hiding(edges.get(layer)) for layer in modules if layer not in put_in}
        for layer, groups in edges.items():
            key = tuple((one.heads, one.rest.tobytes(), one.sink.tobytes()) for one in groups)
            if key not in alike:
                alike[key] = _on_device(groups, device)
            self._by_module[id(modules[layer])] = alike[key]
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}

    def begin(self) -> None:
        """Another forward begins: other masks."""
        self._made.clear()

    def masks(
        self,
        module: nn.Module,
        mask: Float[Tensor, "rows 1 tokens slots"],
        at: Int[Tensor, "rows tokens"],
        labels: Int8[Tensor, "rows slots"],
    ) -> tuple[Float[Tensor, "rows #heads tokens slots"], Bool[Tensor, "rows #heads tokens slots"] | None]:
        """The layer's mask without the edges that are gone, and the edges whose weight goes to the sink."""
        cut = self._by_module.get(id(module))
        if cut is None:
            return mask, None
        key = id(mask), id(cut)
        # The mask is kept beside what is made of it, so that its id is not given to another.
        if key not in self._made:
            self._made[key] = mask, *_masks(cut, mask, at.to(mask.device), labels.to(mask.device))
        return self._made[key][1:]


def _hiding(groups: Sequence[Edges] | None) -> list[Edges]:
    """The same, and padding cut from everything."""
    found: list[Edges] = []
    for one in groups or [Edges(None, no_edges(), no_edges())]:
        rest = one.rest.copy()
        rest[:, PADDING] = True
        found.append(replace(one, rest=rest))
    return found


def _on_device(groups: Sequence[Edges], device: torch.device) -> _Cut:
    rest = [torch.from_numpy(one.rest).to(device) for one in groups]
    sink = [torch.from_numpy(one.sink).to(device) for one in groups] if any(one.sink.any() for one in groups) else []
    if groups[0].heads is None:
        return _Cut(rest, sink, None)
    of_head = {head: number for number, one in enumerate(groups) for head in one.heads or ()}
    return _Cut(rest, sink, torch.tensor([of_head[head] for head in sorted(of_head)], device=device))


def _masks(cut: _Cut, mask: Tensor, at: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    slots = mask.shape[-1]
    spans = labels[:, :slots].long()
    of_query = spans.gather(1, at)[..., None].expand(-1, -1, slots)
    # A token always sees itself.
    others = at[..., None] != torch.arange(slots, device=at.device)

    def edges(tables: Sequence[Tensor]) -> Tensor:
        # Spans × slots first: one row of it for each query.
        found = [table.to(at.device)[:, spans].transpose(0, 1).gather(1, of_query) & others for table in tables]
        whole = torch.stack(found, dim=1)
        return whole if cut.of_head is None else whole.index_select(1, cut.of_head.to(at.device))

    gone = edges(cut.rest)
    left = mask.expand(-1, gone.shape[1], -1, -1).masked_fill(gone, -torch.inf)
    return left, edges(cut.sink) if cut.sends else None
