"""Attention with some of its edges cut, between named spans in named layers and heads (docs/cause.md).

A cut is a table of spans × spans. Where a layer attends causally, tokens of one span see whole runs of earlier tokens, so each run is an ordinary
causal attention over the keys that are left: no mask for each pair, and no more products than uncut. Elsewhere (windows, caches, soft caps)
the edges are removed from the layer's own mask.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from mless import limits
from mless.capture.following import PADDING, Follower, Places
from mless.capture.forwards import attention_of, by_heads, chosen_kernel, weighed
from mless.capture.seam import Call, Change, GivenMask, LazyMask, Mask, attended, attending, changing, heads_of
from mless.changes import ANSWER, GROUPS, NAMED_SPANS, Cut, spans_of
from mless.errors import BadPrompt, BadStudy
from mless.models import LoadedModel
from mless.models.seams import among, attention_layers
from mless.values import Prompt, numbers_of

#: Masks of at most so many queries are made once for all layers.
_QUERIES = 2048
#: More heads than a layer has.
_HEADS = 1000
#: Widest heads of torch's flash attention.
_WIDEST = 256

Table = Bool[np.ndarray, "queries keys"]


@dataclass(frozen=True, eq=False)
class Edges:
    """What some heads of a layer have cut: spans × spans, by where the weight goes. `heads` are numbered from 0; None: all of them."""

    heads: tuple[int, ...] | None
    rest: Table
    sink: Table

    @property
    def any(self) -> bool:
        return bool(self.rest.any() or self.sink.any())


def no_edges() -> Table:
    """Spans × spans, padding last; nothing is cut."""
    return np.zeros((PADDING + 1, PADDING + 1), bool)


def edges_of(cuts: Sequence[Cut], model: nn.Module, heads: int) -> dict[int, list[Edges]]:
    """By layer what is cut there, in groups of heads that are cut alike. Layers and heads that the model lacks are refused."""
    there = attention_layers(model)
    found: dict[int, list[Edges]] = {}
    by_layer: dict[int, list[tuple[Cut, frozenset[int]]]] = {}
    every = frozenset(range(heads))
    for cut in cuts:
        layers = there if cut.layers == "all" else numbers_of(cut.layers, max(there), "layer")
        named = every if cut.heads is None else frozenset(one - 1 for one in numbers_of(cut.heads, heads, "head"))
        for layer in among(there, layers, type(model).__name__):
            by_layer.setdefault(layer, []).append((cut, named))
    for layer, cuts_here in by_layer.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for head in range(heads):
            own = tuple(at for at, (_, named) in enumerate(cuts_here) if head in named)
            groups.setdefault(own, []).append(head)
        found[layer] = [
            _joined([cuts_here[at][0] for at in own], None if len(some) == heads else tuple(some))
            for own, some in groups.items()
        ]
    return found


def _joined(cuts: Sequence[Cut], heads: tuple[int, ...] | None) -> Edges:
    tables: dict[str, Table] = {"rest": no_edges(), "sink": no_edges()}
    for cut in cuts:
        at = np.ix_(*([NAMED_SPANS.index(name) for name in spans_of(names)] for names in (cut.queries, cut.keys)))
        tables[cut.to][at] = True
    # An edge that is cut both ways is gone before its weight could go anywhere.
    return Edges(heads, tables["rest"], tables["sink"] & ~tables["rest"])


# ---- which prompts can be cut ------------------------------------------------------------------------------------------


def check_cuts(cuts: Sequence[Cut], prompt: Prompt, *, answer: bool = True) -> None:
    """Refuse cuts that mean nothing in a prompt. `answer`: tokens follow it."""
    where = f"item {prompt.item!r}, condition {prompt.condition!r}"
    there = {*(span.name for span in prompt.spans), *(["answer"] if answer else [])}
    for cut in cuts:
        for what, names in (("queries", cut.queries), ("keys", cut.keys)):
            for name in names:
                if name not in there and name not in GROUPS:
                    raise BadPrompt(
                        f"{where}: the cut names {what} = {name!r}, but the prompt has no such span; it has: "
                        f"{', '.join(one for one in NAMED_SPANS if one in there)}"
                    )
        if cut.to == "sink" and prompt.spans[0].name in spans_of(cut.keys):
            raise BadPrompt(
                f"{where}: the cut sends the weight of {prompt.spans[0].name!r} to the sink, but the first token, which takes it where there is no learned "
                'sink, is cut too; use to = "rest"'
            )
    for some in _at_once(tuple(cuts)):
        _refuse_blind(some, prompt, where, answer=answer)


@functools.cache
def _at_once(cuts: tuple[Cut, ...]) -> list[list[Cut]]:
    """The cuts that some head of some layer has together."""

    def numbers(text: str | None, most: int, what: str) -> frozenset[int]:
        return frozenset(numbers_of("all" if text is None else text, most, what))

    where = [(numbers(one.layers, limits.LAYERS.value, "layer"), numbers(one.heads, _HEADS, "head")) for one in cuts]
    # Between the places where one of them begins or ends, all are alike.
    layers, heads = (
        {at for some in axis for at in some if at - 1 not in some}
        | {at + 1 for some in axis for at in some if at + 1 not in some}
        for axis in (tuple(zip(*where, strict=True)) or ((), ()))
    )
    found = {
        tuple(n for n, (own, of) in enumerate(where) if layer in own and head in of)
        for layer in layers
        for head in heads
    }
    return [[cuts[n] for n in some] for some in sorted(found) if some]


def _refuse_blind(cuts: Sequence[Cut], prompt: Prompt, where: str, *, answer: bool) -> None:
    """Refuse cuts that leave a token nothing to see but itself. The prompt's first token never sees more."""
    edges = _joined(cuts, None)
    gone = edges.rest | edges.sink
    spans = [(span.name, span.start, len(span)) for span in prompt.spans]
    before: list[int] = []
    for name, start, size in [*spans, *([(ANSWER, len(prompt), 2)] if answer else [])]:
        own = NAMED_SPANS.index(name)
        # Later tokens of a span see the same and more.
        for at in range(start, start + min(size, 2)):
            if before and gone[own, before].all():
                which = "the first of" if at == start else "of"
                raise BadPrompt(
                    f"{where}: the cut leaves token {at}, {which} {name!r}, nothing to see but itself; leave it a span that comes before"
                )
            before.append(own)


def first_cut(cuts: Sequence[Cut], prompt: Prompt) -> int:
    """The first token of the prompt that loses an edge, and at the latest the one that the answer's first token is predicted from."""
    found = [len(prompt) - 1]
    for cut in cuts:
        keys = [span.start for span in prompt.spans if span.name in spans_of(cut.keys)]
        for span in prompt.spans:
            # A token sees earlier ones, and never loses itself.
            if keys and span.name in spans_of(cut.queries) and min(keys) + 1 < span.stop:
                found.append(max(span.start, min(keys) + 1))
    return min(found)


# ---- masks -----------------------------------------------------------------------------------------------------------------


class EdgeMask(GivenMask):
    """A layer's mask without the cut edges, the same for all heads."""

    def __init__(self, base: Mask, edges: Table, places: Places, offset: int) -> None:
        self._under, self._edges, self._places, self._offset = base, edges, places, offset
        self._whole: Tensor | None = None
        self._tables: dict[torch.device, Tensor] = {}
        self._others: dict[int, tuple[Mask, EdgeMask]] = {}
        self.plain_causal = self.causal_for_real = False

    @property
    def where(self) -> tuple[Places, int]:
        """The places it is about, and that of the first key."""
        return self._places, self._offset

    @property
    def base(self) -> Mask:
        return self._under.base

    def on(self, other: Mask) -> EdgeMask:
        # One for all layers with the same two masks.
        if id(other) not in self._others:
            made = EdgeMask(self._under.on(other), self._edges, self._places, self._offset)
            self._others[id(other)] = other, made
        return self._others[id(other)][1]

    def windowed(self, size: int) -> EdgeMask:
        return EdgeMask(self._under.windowed(size), self._edges, self._places, self._offset)

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch #heads rows keys"]:
        if self._places.tokens > _QUERIES:
            return self._block(first, last)
        if self._whole is None:
            self._whole = self._block(0, self._places.tokens)
        return self._whole[:, :, first:last]

    def _block(self, first: int, last: int) -> Bool[Tensor, "batch #heads rows keys"]:
        seen = self._under(first, last)
        return seen & ~self.cut(first, last, seen.shape[-1], seen.device)

    def cut(self, first: int, last: int, keys: int, device: torch.device) -> Bool[Tensor, "batch 1 rows keys"]:
        """Which of the pairs are cut."""
        labels = self._places.labels_on(device)
        if device not in self._tables:
            self._tables[device] = torch.from_numpy(self._edges).to(device)
        query = torch.arange(first, last, device=device) + self._places.before
        key = torch.arange(keys, device=device) + self._offset
        of_query = labels[:, query].long()
        # A static cache has room for tokens to come.
        of_key = labels[:, key.clamp(max=labels.shape[1] - 1)].long().masked_fill(key >= labels.shape[1], PADDING)
        # Spans × keys first: one row of it for each query.
        rows = self._tables[device][:, of_key].transpose(0, 1)
        found = rows.gather(1, of_query[..., None].expand(-1, -1, keys))
        return (found & (query[:, None] != key))[:, None]

    def attended(self, call: Call) -> Tensor | None:
        if not serves(call, self._under):
            return None
        runs = self._places.kept(("runs", self._edges.tobytes()), lambda: runs_of(self._places.labels, self._edges))
        if runs is None:
            return None
        if not call.query.is_cuda:
            return _by_parts(call, runs)
        device = call.query.device
        plan = self._places.kept(
            ("plan", self._edges.tobytes(), device), lambda: _gathered(runs, self._places.tokens, device)
        )
        return _by_flash(call, plan)


class CutMask(GivenMask):
    """A layer's mask where heads are cut differently, or weight goes to the sink: no single mask says it."""

    alike = False

    def __init__(self, base: Mask, groups: Sequence[Edges], places: Places, offset: int) -> None:
        self._under, self._groups, self._places, self._offset = base, groups, places, offset
        self.plain_causal = self.causal_for_real = False

    @property
    def base(self) -> Mask:
        return self._under.base

    def on(self, other: Mask) -> CutMask:
        return CutMask(self._under.on(other), self._groups, self._places, self._offset)

    def windowed(self, size: int) -> CutMask:
        return CutMask(self._under.windowed(size), self._groups, self._places, self._offset)

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch heads rows keys"]:
        seen = self._under(first, last)
        parts = [
            (one.heads, seen & ~self._edge(one).cut(first, last, seen.shape[-1], seen.device)) for one in self._groups
        ]
        if parts[0][0] is None:
            return parts[0][1]
        heads = sum(len(some or ()) for some, _ in parts)
        whole = seen.expand(-1, heads, -1, -1).clone()
        for some, mask in parts:
            whole[:, list(some or ())] = mask
        return whole

    def _edge(self, one: Edges) -> EdgeMask:
        return EdgeMask(self._under, one.rest | one.sink, self._places, self._offset)

    def attended(self, call: Call) -> Tensor:
        if self._groups[0].heads is None:
            return self._of_group(call, self._groups[0])
        parts = [self._of_group(by_heads(call, one.heads or ()), one) for one in self._groups]
        order = np.argsort([head for one in self._groups for head in one.heads or ()])
        return torch.cat(parts, dim=2).index_select(2, torch.from_numpy(order).to(call.query.device))

    def _of_group(self, call: Call, one: Edges) -> Tensor:
        if not one.any:
            return attention_of(replace(call, mask=self._under))
        mask = EdgeMask(self._under, one.rest, self._places, self._offset) if one.rest.any() else self._under
        if not one.sink.any():
            return attention_of(replace(call, mask=mask))
        sent = EdgeMask(mask, one.sink, self._places, self._offset)
        return to_sink(replace(call, mask=mask), sent)


def to_sink(call: Call, sent: EdgeMask) -> Float[Tensor, "batch queries heads dim"]:
    """Attention by the call's mask; the weight of the edges that `sent` cuts goes to the layer's learned sink, else to the first key left."""

    def moved(first: int, p: Tensor, seen: Tensor) -> Tensor:
        gone = sent.cut(first, first + p.shape[2], p.shape[3], p.device) & seen
        kept = p.masked_fill(gone, 0.0)
        if call.score["sinks"] is not None:
            return kept
        # argmax of booleans: the first key that is seen and not cut; a token itself never is.
        left = (seen & ~gone).byte().argmax(-1, keepdim=True).expand(*p.shape[:3], 1)
        return kept.scatter_add(-1, left, p.masked_fill(~gone, 0.0).sum(-1, keepdim=True))

    # A mask made of intervals would give blocks of near keys only, and places are counted from the first one.
    whole = call.mask if isinstance(call.mask, EdgeMask) else EdgeMask(call.mask, no_edges(), *sent.where)
    return weighed(replace(call, mask=whole), moved)


# ---- causal attention by runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """Tokens `first … last − 1` of a row that see the earlier tokens `kept`, and each other causally."""

    first: int
    last: int
    kept: Int64[np.ndarray, " _"]


def runs_of(labels: Int8[np.ndarray, "rows tokens"], edges: Table) -> list[list[Run]] | None:
    """Each row's runs; None where tokens of a run do not see each other."""
    found: list[list[Run]] = []
    for one in labels:
        if (runs := _runs_of(one, edges)) is None:
            return None
        found.append(runs)
    return found


def _runs_of(labels: Int8[np.ndarray, " tokens"], edges: Table) -> list[Run] | None:
    borders = [0, *(np.flatnonzero(labels[1:] != labels[:-1]) + 1).tolist(), len(labels)]
    found: list[Run] = []
    for first, last in pairwise(borders):
        own = labels[first]
        if edges[own, own] and last - first > 1:
            return None
        kept = np.flatnonzero(~edges[own, labels[:first]])
        if found and _goes_on(found[-1], first, kept):
            found[-1] = Run(found[-1].first, last, found[-1].kept)
        else:
            found.append(Run(first, last, kept))
    return found


def _goes_on(run: Run, first: int, kept: Int64[np.ndarray, " _"]) -> bool:
    """Whether tokens from `first` on, which see `kept`, see just what the run before saw, and that run."""
    return np.array_equal(kept, np.concatenate([run.kept, np.arange(run.first, first)]))


def serves(call: Call, base: Mask) -> bool:
    """Whether the call is a causal attention of whole rows, by nothing but a scaled softmax."""
    q, k, v = call.query, call.key, call.value
    plain = all(call.score[name] is None for name in ("softcap", "sinks", "bias"))
    if not plain or not isinstance(base, LazyMask) or q.shape[2] != k.shape[2] or q.shape[-1] != v.shape[-1]:
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v)):
        return False
    if q.is_cuda:
        fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= _WIDEST
        if not fits or not _flash_agrees(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[-1]):
            return False
    elif (
        q.device.type != "cpu"
        or q.dtype != torch.float32
        or q.shape[-1] % 8
        or chosen_kernel(q, k, v, call.score["scale"], causal=True) != SDPBackend.FLASH_ATTENTION.value
    ):
        return False
    return base.causal_for_real


def _by_parts(call: Call, runs: Sequence[Sequence[Run]]) -> Float[Tensor, "batch queries heads dim"]:
    """On a CPU: a row's run over earlier keys and over itself, joined by their log-sum-exps."""
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    scale = call.score["scale"]
    out = torch.empty_like(call.query)
    for row, of_row in enumerate(runs):
        q, k, v = (one[row : row + 1] for one in (call.query, call.key, call.value))
        for run in of_row:
            at = slice(run.first, run.last)
            own, lse = attend(q[:, :, at], k[:, :, at], v[:, :, at], 0.0, True, scale=scale)
            if len(run.kept):
                kept = torch.from_numpy(run.kept)
                past, before = attend(
                    q[:, :, at], k.index_select(2, kept), v.index_select(2, kept), 0.0, False, scale=scale
                )
                both = torch.logaddexp(before, lse)
                own = past * (before - both).exp()[..., None] + own * (lse - both).exp()[..., None]
            out[row : row + 1, :, at] = own
    return out.transpose(1, 2).contiguous()


@dataclass(eq=False)
class _Gathered:
    """Which tokens are the keys of each run, all rows one after another, for one call of flash attention."""

    keys: Int64[Tensor, " keys"]
    to_queries: Tensor
    to_keys: Tensor
    most_queries: int
    most_keys: int


def _gathered(runs: Sequence[Sequence[Run]], tokens: int, device: torch.device) -> _Gathered:
    keys: list[np.ndarray] = []
    queries, lengths = [0], [0]
    for row, of_row in enumerate(runs):
        for run in of_row:
            keys.append(row * tokens + np.concatenate([run.kept, np.arange(run.first, run.last)]))
            queries.append(run.last - run.first)
            lengths.append(len(keys[-1]))
    to_queries, to_keys = (torch.tensor(np.cumsum(one), dtype=torch.int32, device=device) for one in (queries, lengths))
    every = torch.from_numpy(np.concatenate(keys)).to(device)
    return _Gathered(every, to_queries, to_keys, max(queries), max(lengths))


def _by_flash(call: Call, plan: _Gathered) -> Float[Tensor, "batch queries heads dim"]:
    """On a GPU: every run is a sequence of its own in one call, its queries the last of its keys."""
    rows, heads, tokens, dim = call.query.shape
    q, k, v = (one.transpose(1, 2).reshape(rows * tokens, -1, dim) for one in (call.query, call.key, call.value))
    return _flash(q, k, v, plan, call.score["scale"]).reshape(rows, tokens, heads, dim)


def _flash(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    plan: _Gathered,
    scale: float,
) -> Float[Tensor, "tokens heads dim"]:
    keys, values = k.index_select(0, plan.keys), v.index_select(0, plan.keys)
    lengths = plan.to_queries, plan.to_keys, plan.most_queries, plan.most_keys
    return torch.ops.aten._flash_attention_forward(q, keys, values, *lengths, 0.0, True, False, scale=scale)[0]


@functools.cache
def _flash_agrees(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether torch's flash attention of several sequences is what runs mean, on random numbers; a mask for each pair is used where it is not."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    tokens = 200
    generator = torch.Generator(device).manual_seed(7)
    q, k, v = (
        torch.randn(2 * tokens, count, dim, generator=generator, device=device).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    runs = [
        [Run(0, 70, np.arange(0)), Run(70, 199, np.arange(3, 41)), Run(199, 200, np.arange(0, 150))],
        [Run(0, 1, np.arange(0)), Run(1, 200, np.arange(0))],
    ]
    seen = torch.zeros(2, 1, tokens, tokens, dtype=torch.bool)
    for row, of_row in enumerate(runs):
        for run in of_row:
            seen[row, 0, run.first : run.last, run.first : run.last] = True
            seen[row, 0, run.first : run.last, torch.from_numpy(run.kept)] = True
    seen = seen.tril().to(device)
    try:
        ours = _flash(q, k, v, _gathered(runs, tokens, device), dim**-0.5)
    except RuntimeError:
        return False
    by_row = [one.unflatten(0, (2, tokens)).transpose(1, 2).float() for one in (q, k, v)]
    by_row[1:] = [one.repeat_interleave(heads // kv_heads, 1) for one in by_row[1:]]
    weights = (by_row[0] @ by_row[1].mT * dim**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = (weights @ by_row[2]).transpose(1, 2).flatten(0, 1)
    return float((ours.float() - wanted).norm() / wanted.norm()) < 1e-2


# ---- in a model ------------------------------------------------------------------------------------------------------------


class CutHandle(Change):
    """Cuts in a model. `rows` names the prompts of the forwards to come."""

    def __init__(
        self, model: nn.Module, cuts: Sequence[Cut], prompts: Sequence[Prompt], *, answer: bool = True
    ) -> None:
        for one in cuts:
            if not isinstance(one, Cut):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BadStudy(f"a cut is mless.Cut(queries, keys, layers=…), got {type(one).__name__}")
        self.cuts, self._answer = tuple(cuts), answer
        self._heads = heads_of(model)
        if not self._heads and any(one.heads is not None for one in cuts):
            raise BadStudy(
                f"{type(model).__name__} does not say how many heads it has, so none can be cut apart; leave heads out"
            )
        self._by_layer = edges_of(cuts, model, self._heads or 1)
        self._check(prompts)
        self._follower = Follower(model, prompts)
        self._masks: dict[tuple[int, int, int], tuple[Mask, Mask]] = {}
        self._forward = -1

    def rows(self, prompts: Sequence[Prompt | None], lengths: Sequence[int] | None = None, before: int = 0) -> None:
        """The prompts of the forwards to come, one for each row; `lengths` and `before` as in `Follower.rows`. A row without a prompt has no cuts."""
        self._check(prompts)
        self._follower.rows(prompts, lengths, before=before)

    def _check(self, prompts: Sequence[Prompt | None]) -> None:
        for prompt in prompts:
            if prompt is not None:
                check_cuts(self.cuts, prompt, answer=self._answer)

    def stop(self) -> None:
        self._follower.stop()
        self._masks.clear()

    def before(self, call: Call) -> Call:
        groups = self._by_layer.get(call.layer)
        if groups is None:
            return call
        places = self._follower.places
        if self._forward != self._follower.forwards:
            self._masks.clear()
            self._forward = self._follower.forwards
        if len(groups) > 1 and call.query.shape[1] != self._heads:
            raise BadStudy(
                f"layer {call.layer} has {call.query.shape[1]} heads where the config says {self._heads}, so they cannot be cut apart; leave heads out"
            )
        base, keys = call.mask, call.key.shape[2]
        # The mask is kept beside what is made of it, so that its id is not given to another.
        key = (id(base), id(groups), keys)
        if key not in self._masks:
            offset = base.key_offset if isinstance(base, LazyMask) else max(0, places.total - keys)
            self._masks[key] = base, self._mask(base, groups, places, offset)
        return replace(call, mask=self._masks[key][1])

    @staticmethod
    def _mask(base: Mask, groups: Sequence[Edges], places: Places, offset: int) -> Mask:
        if len(groups) == 1 and not groups[0].sink.any():
            return EdgeMask(base, groups[0].rest, places, offset)
        return CutMask(base, groups, places, offset)


@contextmanager
def cut_attached(
    model: nn.Module | LoadedModel, cuts: Sequence[Cut], prompts: Sequence[Prompt], *, answer: bool = True
) -> Generator[CutHandle]:
    """Inside the block the cuts are in force in every forward of the model. `answer`: tokens may follow the prompts."""
    whole: nn.Module = model.model if isinstance(model, LoadedModel) else model
    handle = CutHandle(whole, cuts, prompts, answer=answer)
    with ExitStack() as stack:
        stack.callback(handle.stop)
        stack.enter_context(changing(whole, handle))
        if not attended(whole):
            stack.enter_context(attending(whole, attention_of))
        yield handle
