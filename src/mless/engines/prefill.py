"""Prefill of prompts: a few at a time, and each shared beginning only once.

What could change a prompt's bits (padded length, number of rows, shared beginning) depends on that prompt alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mless.capture.following import PADDING
from mless.engines.base import Request
from mless.engines.cuts import SlotCuts, labels_of
from mless.engines.slots import Beginning, Layout, SlotCache, slot_attention
from mless.models import LoadedModel
from mless.models.experts import has_experts
from mless.redistribution import ArmHandle

#: A prompt's new tokens are padded to a multiple of the first, its cache to one of the second.
CHUNK, BUCKET = 32, 64
#: (tokens, rows) prefilled at once, at most. With fewer a GPU is mostly idle, and a CPU reads all weights for little work.
_AT_ONCE = {"cuda": (4096, 8), "cpu": (256, 8)}
#: Shared beginnings kept: there are about as many as conditions.
_PREFIXES = 32


class Prefill:
    """Keys and values of prompts, in caches shaped like the engine's own (`cache`)."""

    def __init__(self, model: LoadedModel, cache: SlotCache) -> None:
        self._model = model
        self._cache = cache
        # Prompts prefilled together would share the products of their experts.
        self._at_once = (1, 1) if has_experts(model.model) else _AT_ONCE.get(model.device.type, (1, 1))
        self._layout = Layout()
        #: What is cut in the prefills to come.
        self.cuts: SlotCuts | None = None
        self._prefixes: OrderedDict[tuple[Any, ...], Beginning] = OrderedDict()
        # Prompts come sorted by shape, the longest first, so one cache is kept, and reused while the shape stays.
        self._prompt_cache: tuple[tuple[int, int], SlotCache] | None = None

    def try_largest(self, length: int) -> None:
        """Run the longest prefill and the largest cache now, so that memory does not run out in the middle of a run."""
        self.run([], (length, length), None)
        self.run([], (length, 1), None)
        self._prompt_cache = None

    def shape(self, request: Request) -> tuple[int, int]:
        """Cache length and number of new tokens of a prompt's prefill, both padded: functions of the prompt alone.

        Its last token is left to the first decoding step, so that prefill needs no logits.
        """
        shared = _shared(request)
        new = math.ceil((len(request.token_ids) - 1 - shared) / CHUNK) * CHUNK
        return math.ceil((shared + new) / BUCKET) * BUCKET, new

    def _rows(self, new: int) -> int:
        """The fixed number of rows of a prefill with so many new tokens; unused rows are dummies."""
        tokens, most = self._at_once
        return max(1, min(most, tokens // max(new, 1)))

    def rows_together(self, request: Request) -> int:
        return self._rows(self.shape(request)[1])

    def run(self, group: Sequence[Request], shape: tuple[int, int], arm: ArmHandle | None) -> SlotCache:
        """Keys and values of some prompts of one shape, all but their last tokens; always the same number of rows."""
        bucket, new = shape
        rows = self._rows(new)
        if self._prompt_cache is None or self._prompt_cache[0] != (bucket, rows):
            self._prompt_cache = None  # before the next one gets its memory
            empty = SlotCache(self._model.layers, bucket, self._layout)
            self._prompt_cache = (bucket, rows), empty.shaped_like(self._cache, rows)
        cache = self._prompt_cache[1]
        cache.clear(range(rows))
        ids = torch.zeros(rows, new, dtype=torch.long)
        at = torch.arange(new).expand(rows, -1).clone()
        # Padding has position 0: no token sees it, and past the context some models have no positions.
        positions = torch.zeros_like(at)
        hidden = torch.zeros(rows, 2, dtype=torch.long)
        for row, request in enumerate(group):
            shared = _shared(request)
            rest = request.token_ids[shared:-1]
            ids[row, : len(rest)] = torch.tensor(rest)
            at[row] += shared
            positions[row, : len(rest)] = torch.tensor(positions_of(request)[shared:-1])
            hidden[row] = torch.tensor(request.hidden or (0, 0))
            if shared:
                cache.write(row, self._beginning(request, shared, arm))
        if new:
            seeds = [arm_seed(request) for request in group] + [0] * (rows - len(group))
            # Rows that only fill the batch have no span, and see all.
            spans = [*map(spans_of, group), *[[PADDING] * bucket] * (rows - len(group))]
            self._fill(cache, ids, at, positions, hidden, spans, seeds, arm)
        return cache

    def _beginning(self, request: Request, shared: int, arm: ArmHandle | None) -> Beginning:
        """Keys and values of a beginning that other prompts share; computed once, in a row of its own."""
        position_ids = positions_of(request)[:shared]
        hidden = request.hidden if request.hidden is not None and request.hidden[0] < shared else None
        spans = spans_of(request)[:shared]
        cut = None if self.cuts is None else (self.cuts.cuts, tuple(spans))
        key = (request.token_ids[:shared], tuple(position_ids), hidden, cut)
        if key not in self._prefixes:
            padded = math.ceil(shared / CHUNK) * CHUNK
            ids = torch.zeros(1, padded, dtype=torch.long)
            ids[0, :shared] = torch.tensor(request.token_ids[:shared])
            at = torch.arange(padded)[None]
            positions = torch.zeros_like(at)
            positions[0, :shared] = torch.tensor(position_ids)
            cache = SlotCache(self._model.layers, padded, self._layout).shaped_like(self._cache, 1)
            hidden_here = torch.tensor([list(hidden or (0, 0))])
            self._fill(cache, ids, at, positions, hidden_here, [spans], [0], arm)
            self._prefixes[key] = cache.read(0, shared)
            while len(self._prefixes) > _PREFIXES:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(key)
        return self._prefixes[key]

    def _fill(
        self,
        cache: SlotCache,
        ids: Int[Tensor, "rows new"],
        at: Int[Tensor, "rows new"],
        positions: Int[Tensor, "rows new"],
        hidden: Int[Tensor, "rows 2"],
        spans: Sequence[Sequence[int]],
        seeds: Sequence[int],
        arm: ArmHandle | None,
    ) -> None:
        device = self._model.device
        if arm is not None:
            arm.rows(seeds=torch.tensor(seeds, device=device), positions=at.to(device))
        self._layout.at, self._layout.hidden = at.to(device), hidden.to(device)
        self._layout.cuts = self.cuts
        if self.cuts is not None:
            self._layout.labels = labels_of(spans, cache.slot_layers[0].max_cache_len).to(device)
        whole = self._model.model
        inner = whole.get_decoder()  # without the head: prefill needs no logits
        with torch.inference_mode(), slot_attention(whole, self._layout):
            inner(input_ids=ids.to(device), position_ids=positions.to(device), past_key_values=cache, use_cache=True)


def _shared(request: Request) -> int:
    """How many of a prompt's first tokens are shared with others. With ARM none, because ARM draws per row."""
    return min(request.shared, len(request.token_ids) - 1) if request.arm is None else 0


def arm_seed(request: Request) -> int:
    """ARM's seed: the request's seed mixed with the setting's."""
    own = request.arm.seed if request.arm is not None else 0
    return (request.seed + own * 0x9E3779B97F4A7C15) & ((1 << 62) - 1)


def spans_of(request: Request) -> list[int]:
    """The span of each of the prompt's tokens, as a number; known where its run is changed."""
    return request.changes.prompt.span_ids if request.changes is not None else []


def positions_of(request: Request) -> Sequence[int]:
    return request.position_ids if request.position_ids is not None else range(len(request.token_ids))
