"""A scoped instrument around a loaded model: what every attention head's tokens receive, without a T × T matrix.

On a GPU the forward itself stays SDPA's (`forwards`). On a CPU attention and sums come from one computation where they can, in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn

from mless import kernels
from mless.capture.copies import Started, leaving, sent
from mless.capture.forwards import ROWS_AT_ONCE, forward_with_lse, of_heads, own_forward, sdpa_forward
from mless.capture.parts import Parts
from mless.capture.positions import check_reach, own_positions
from mless.capture.seam import Call, LazyMask, Mask, attending
from mless.errors import BadAttention, BadPrompt, BadStudy, UnsupportedArchitecture, first_line
from mless.models import LoadedModel
from mless.models.seams import among, attention_layers, attention_modules
from mless.values import MASS_NAMES, QUERY_SETS, SPAN_NAMES, WHOLE_PROMPT, Prompt, Shown, head_name, numbers_of

#: Tokens in the parts of a prompt that is too long for one forward.
_PART = 16384
#: Kinds of layers that see differently in one model: full, sliding, chunked.
_MASKS = 8
#: Numbers of one layer that stay on the GPU until the forward ends.
_KEPT_ON_DEVICE = 1 << 22


@dataclass(frozen=True)
class Attention(Shown):
    """One prompt's capture: what each token received, for both query sets, and where the original queries looked.

    `received` is a mean, NaN where `n` is 0; `uniform` is the same statistic for a head that spreads evenly over what it sees.
    The first axis is the query set: 0 all later tokens ("later"), 1 the original ones among them ("original"). Layers and heads are those
    asked for, in order.
    """

    prompt: Prompt
    layers: list[int]
    heads: list[int]
    received: Float32[np.ndarray, "sets layers heads tokens"]
    n: Int[np.ndarray, "sets layers tokens"]
    uniform: Float32[np.ndarray, "sets layers tokens"]
    mass: Float32[np.ndarray, "layers heads spans_and_sink"]
    #: By which kernel each layer's sums were computed; see docs/kernels.md.
    computed_by: dict[int, str]


@dataclass
class Recorder:
    """What the attention calls of the forwards inside a `capturing` block left behind, layer by layer."""

    layers: frozenset[int]
    heads: list[int] | None
    kernel: Callable[..., kernels.Sums]
    #: Called with every recorded attention call and its output. The proofs watch with it.
    on_call: Callable[[Call, Tensor], None] | None = None
    sums: dict[int, kernels.Sums] = field(default_factory=dict[int, kernels.Sums])
    uniform: dict[int, kernels.Sums] = field(default_factory=dict[int, kernels.Sums])
    #: How the sums of each layer were computed: a name of docs/kernels.md.
    computed_by: dict[int, str] = field(default_factory=dict[int, str])
    _announced: tuple[Tensor, Tensor] | None = None
    _seen: dict[object, _Seen] = field(default_factory=dict[object, "_Seen"])
    _totals: dict[int, Float[Tensor, " heads"]] = field(default_factory=dict[int, Tensor])
    _parts: dict[int, Parts] | None = None
    #: The model and the last recorded layer's attention, as long as the block lasts.
    _runs: tuple[nn.Module, nn.Module] | None = field(default=None, repr=False)
    #: Layers that a forward of `run` has reached, recorded or not.
    _passed: set[int] | None = None

    def run(self, **inputs: Any) -> None:
        """Run the model as far as needed: up to the attention of the last recorded layer.

        What follows (that layer's MLP, later layers, the head) changes none of the sums. There is no output. A model's first forward runs
        to its end, to find models that run a layer more than once.
        """
        if not self.layers:
            raise BadStudy("no layer is recorded, so there is nothing to run for; name some in capturing(…, layers=…)")
        if self._runs is None:
            raise BadStudy("the capturing block has been left, so nothing would be recorded; call run() inside it")
        model, last = self._runs
        self._passed = passed = set[int]()

        def end(*_: Any) -> None:
            if model in _SEEN_WHOLE and self.layers <= passed:
                raise _StopForward

        hook = last.register_forward_hook(end)
        try:
            model(**inputs)
            if missing := sorted(self.layers - passed):
                raise UnsupportedArchitecture(
                    f"{type(model).__name__} did not compute layer {missing[0]}'s attention through transformers' attention registry, so it cannot be "
                    "measured (or another capturing block lies inside this one); see docs/adding-a-model.md"
                )
            _SEEN_WHOLE.add(model)
        except _StopForward:
            pass
        finally:
            hook.remove()
            self._passed = None

    def passes(self, layer: int) -> None:
        """Note that a layer attends. In a forward of `run` it may do so once."""
        if self._passed is None:
            return
        if layer in self._passed:
            raise UnsupportedArchitecture(
                f"layer {layer} ran more than once in a forward, so what its tokens receive cannot be told; see docs/adding-a-model.md"
            )
        self._passed.add(layer)

    def expect(
        self, sets: Bool[Tensor, "batch sets tokens"], spans: Int[Tensor, "batch tokens"], *, in_parts: bool = False
    ) -> None:
        """Name the query sets and the spans of the batch that the next forward runs.

        Without it every real token is an original one and there is a single span. `in_parts`: several forwards with a cache run it, one
        part of its tokens after the other; `joined` ends them.
        """
        self.finish()
        self.sums.clear()
        self.uniform.clear()
        self._seen.clear()
        self._announced = (sets, spans)
        self._parts = {} if in_parts else None

    def joined(self) -> None:
        """Join the parts: their sums are those of the whole prompt."""
        self.finish()
        for layer, parts in (self._parts or {}).items():
            self.sums[layer], self.uniform[layer] = parts.whole()
        self._parts = None

    def _sets_and_spans(
        self, mask: Mask, rows: int, queries: int, tokens: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        if self._announced is not None:
            sets, spans = self._announced
            if sets.shape[0] == rows and self._parts is not None and tokens <= sets.shape[2]:
                return sets[:, :, tokens - queries : tokens], spans[:, :tokens]
            if tuple(sets.shape[::2]) != (rows, tokens):
                raise BadPrompt(
                    f"the forward ran {rows} rows of {tokens} tokens, but {sets.shape[0]} rows of {sets.shape[2]} were announced"
                )
            return sets, spans
        if mask.plain_causal:
            real = torch.ones(rows, tokens, dtype=torch.bool, device=device)
        else:
            # A real token sees itself; padding sees nothing, or no token sees it.
            blocks = [(first, min(first + ROWS_AT_ONCE, tokens)) for first in range(0, tokens, ROWS_AT_ONCE)]
            real = torch.cat([mask(a, b)[:, 0, :, a:b].diagonal(dim1=-2, dim2=-1) for a, b in blocks], dim=1)
        return real[:, None].expand(-1, len(QUERY_SETS), -1), torch.zeros_like(real, dtype=torch.long)

    def _seen_by(self, mask: Mask, q: Tensor, tokens: int) -> _Seen:
        """What a layer's queries see, and its yardstick; made once for all layers with the same mask."""
        key = ("causal", q.device, q.shape[0], q.shape[2], tokens) if mask.plain_causal else id(mask)
        if (found := self._seen.get(key)) is not None:
            return found
        rows, queries = q.shape[0], q.shape[2]
        sets, spans = self._sets_and_spans(mask, rows, queries, tokens, q.device)
        # An expanded tensor stays expanded: two equal sets are summed once.
        sets, spans = sets.to(q.device), spans.to(q.device)
        # Of the model's own mask it is known already, unless a set asks for padding.
        known = mask.causal_for_real or (
            isinstance(mask, LazyMask) and not bool((sets[:, 0] & ~mask.real(q.device)).any())
        )
        visible = (mask.intervals(q.device) if known else None) or kernels.intervals(mask, sets[:, 0], tokens)
        common: dict[str, Any] = {"visible": visible or mask, "sets": sets, "spans": spans, "n_spans": len(SPAN_NAMES)}
        if visible is not None:
            asked = visible.asked(sets)
            even = kernels.Sums(asked.even[:, :, None], asked.counts, torch.zeros(rows, 1, 0, device=q.device))
        else:
            flat = torch.zeros(rows, 1, tokens, 1, device=q.device)
            even = self.kernel(flat[:, :, tokens - queries :], flat, scale=1.0, **common)
        if len(self._seen) >= _MASKS:
            self._seen.clear()
        self._seen[key] = found = _Seen(mask, common, even)
        return found

    def __call__(self, call: Call, lse: Float[Tensor, "batch heads queries"] | None) -> None:
        """Compute and keep what a layer's keys received; `lse`: the forward's own log-sum-exp, where it has one."""
        q, k, score = call.query, call.key, call.score
        seen = self._begin(call)
        if self.heads is not None:
            q, k, score, lse = _only(q, k, score, lse, self.heads)
        sums = self.kernel(q, k, **seen.common, **score, lse=lse)
        if self.kernel is kernels.received:
            plain = score["softcap"] is None and score["bias"] is None
            visible, sets = seen.common["visible"], seen.common["sets"]
            by = kernels.implementation(q, k, visible, sets, plain=plain)
        else:
            by = self.kernel.__module__.rpartition(".")[-1]
        self._keep(call.layer, seen, sums, by)

    def jointly(self, call: Call, *, recorded: bool) -> Float[Tensor, "batch queries heads dim"] | None:
        """The attention itself, and its sums if asked for, where one computation gives both; None elsewhere.

        All layers go this way, so that a layer's numbers do not depend on which others are recorded.
        """
        if self.kernel is not kernels.received or call.query.device.type != "cpu":
            return None
        if call.query.shape[2] != call.key.shape[2] or (visible := call.seen) is None:
            return None
        if self._parts is not None:
            return None  # later parts could not go this way: one kernel for all of them
        seen = self._begin(call) if recorded else self._seen_by(call.mask, call.query, call.key.shape[2])
        if not call.mask.plain_causal and seen.common["visible"] is not visible:
            return None  # a set asks for padding, of which the mask says something else
        found = kernels.attended(call.query, call.key, call.value, scale=call.score["scale"], **seen.common)
        if found is None:
            return None
        out, sums = found
        if recorded:
            if self.heads is not None:
                at = torch.tensor(_from_zero(self.heads, call.query.shape[1]), device=out.device)
                received = sums.apart[:, :, at].expand(-1, sums.received.shape[1], -1, -1)
                sums = kernels.Sums(received, sums.counts, sums.mass[:, at])
            self._keep(call.layer, seen, sums, "joint")
        return out

    def _begin(self, call: Call) -> _Seen:
        layer, q, k = call.layer, call.query, call.key
        call.refuse_several_softmaxes()
        before = self._parts[layer].tokens if self._parts is not None and layer in self._parts else 0
        call.refuse_other_keys(before + q.shape[2])
        if self._announced is not None and layer in self.sums:
            raise BadPrompt(f"layer {layer} ran again, but only one forward was announced; call expect() before each")
        if self.heads is not None:
            _from_zero(self.heads, q.shape[1])
        return self._seen_by(call.mask, q, k.shape[2])

    def _keep(self, layer: int, seen: _Seen, sums: kernels.Sums, by: str) -> None:
        self.computed_by[layer] = by
        # One number that is not finite makes its head's total not finite. Earlier parts may be unchecked too.
        total = sums.apart.sum((0, 1, 3)) + sums.mass.sum((0, 2))
        self._totals[layer] = total + self._totals[layer] if layer in self._totals else total
        if self._parts is not None:
            assert self._announced is not None
            parts = self._parts.setdefault(layer, Parts(self._announced[0]))
            parts.add(sums, seen.even, seen.common["sets"])
        else:
            # A very long prompt's sums of all layers would be gigabytes; a layer of it takes far longer than the copy does.
            if sums.apart.numel() > _KEPT_ON_DEVICE:
                received = sums.apart.cpu().expand(-1, sums.received.shape[1], -1, -1)
                sums = kernels.Sums(received, sums.counts.cpu(), sums.mass.cpu())
            self.sums[layer], self.uniform[layer] = sums, seen.even

    def totals(self) -> dict[int, Float[Tensor, " heads"]]:
        """By layer, a number for each head that is finite where all of its numbers are. Who asks for them checks them."""
        found, self._totals = self._totals, {}
        return found

    def finish(self) -> None:
        """Refuse what is not finite. Only after the forward: on a GPU every check would wait for it."""
        refuse_infinite(self.totals(), self.heads)


def refuse_infinite(totals: Mapping[int, Float[Tensor, " heads"]], heads: Sequence[int] | None) -> None:
    for layer, total in totals.items():
        finite = torch.isfinite(total)
        if not bool(finite.all()):
            bad = int((~finite).nonzero()[0, 0])
            head = heads[bad] if heads is not None else bad + 1
            raise BadAttention(
                f"attention is not finite (NaN or infinite) in {head_name(layer, head)}; the weights or the dtype break it: "
                "try --dtype float32, or check the checkpoint"
            )


class _StopForward(Exception):
    """Ends a forward. No BaseException: torch runs hooks with `always_call` for an Exception only, and ARM has one."""


#: Models whose full forward inside a block ran each layer once.
_SEEN_WHOLE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class _Seen:
    mask: Mask  # kept, so that no other object gets its id
    common: dict[str, Any]
    even: kernels.Sums


def _only(
    q: Tensor, k: Tensor, score: Mapping[str, Any], lse: Tensor | None, heads: Sequence[int]
) -> tuple[Tensor, Tensor, dict[str, Any], Tensor | None]:
    """The asked heads' queries with one key head each; `heads` are numbered from 1."""
    at = torch.tensor(_from_zero(heads, q.shape[1]), device=q.device)
    chosen = of_heads(score, at, q.shape[1])
    return q[:, at], k[:, at // (q.shape[1] // k.shape[1])], chosen, lse[:, at] if lse is not None else None


def _from_zero(heads: Sequence[int], there: int) -> list[int]:
    """Numbers from 0 of heads that are numbered from 1."""
    return [head - 1 for head in numbers_of(heads, there, "head")]


@contextmanager
def capturing(
    model: nn.Module,
    *,
    layers: Sequence[int] | int,
    heads: Sequence[int] | int | None = None,
    kernel: Callable[..., kernels.Sums] = kernels.received,
) -> Generator[Recorder]:
    """Inside the block, forwards of `model` leave their received-attention sums in the yielded `Recorder`.

    Where the model's output is not needed, `Recorder.run(input_ids=…)` stops early. Afterwards, even on error, the model's attention
    implementation and both registries are as before.
    """
    modules = attention_modules(model)
    layers = among(list(modules), [layers] if isinstance(layers, int) else layers, type(model).__name__)
    asked = [heads] if isinstance(heads, int) else heads
    chosen = list(dict.fromkeys(asked)) if asked is not None else None
    recorder = Recorder(frozenset(layers), chosen, kernel)

    def attend(call: Call) -> Tensor:
        if not call.again:
            recorder.passes(call.layer)
        recorded = call.layer in recorder.layers and not call.again
        plain = all(call.score[name] is None for name in ("softcap", "sinks", "bias"))
        out = recorder.jointly(call, recorded=recorded) if plain else None
        if out is None:
            lse: Tensor | None = None
            cached = call.key.shape[2] > call.query.shape[2]
            if not plain:
                out = own_forward(call)
            elif (recorded or cached) and (found := forward_with_lse(call)) is not None:
                out, lse = found
            else:
                out = sdpa_forward(call)
            if recorded:
                recorder(call, lse)
        if recorded and recorder.on_call is not None:
            recorder.on_call(call, out)
        return out

    last = modules.get(max(layers, default=0))
    recorder._runs = (model, last) if last is not None else None  # pyright: ignore[reportPrivateUsage]
    try:
        with attending(model, attend):
            yield recorder
            recorder.finish()
    finally:
        # Do not keep the model alive through the recorder.
        recorder._runs = None  # pyright: ignore[reportPrivateUsage]


def received(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    layers: Sequence[int] | int | str | None = None,
    heads: Sequence[int] | int | str | None = None,
    batch_size: int = 1,
    part: int | None = None,
    kernel: Callable[..., kernels.Sums] = kernels.received,
) -> Iterator[Attention]:
    """Received attention of each prompt, in order. Layers and heads are numbered from 1: one, several, or a text as the command takes it.

    The forward ends with the attention of the last layer asked for. A model's first forward runs to its end, to check that no layer runs
    twice. `mless.load(…, layers=…)` also saves the memory of later layers. Batches are padded on the right; `batch_size` 1, the default,
    makes a prompt's numbers independent of every other prompt. Prompts of more than `part` tokens run alone, `part` tokens at a time with a
    cache, so that memory for activations stays bounded (by default 16,384 at a time from 131,072 on). Their sums are added part by part and
    may differ in the last digits.
    """
    if isinstance(prompts, Prompt):
        raise BadPrompt("received takes several prompts, got one; put it in a list")
    if part is not None and part < 1:
        raise BadStudy(f"a part has at least 1 token, got {part}; leave part out to let it be chosen")
    asked, which = _asked(model, layers, heads)
    with capturing(model.model, layers=asked, heads=None if heads is None else which, kernel=kernel) as recorder:
        for batch in _batches(prompts, batch_size, part or WHOLE_PROMPT):
            _forward(model, recorder, batch, part)
            yield from Pending(recorder, batch, asked, which).rows()


def received_later(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Pending:
    """What `received` gives for these prompts in one batch. On a GPU this returns before the forward ends, and the next one can be started."""
    asked, which = _asked(model, layers, heads)
    with capturing(model.model, layers=asked, heads=None if heads is None else which) as recorder:
        _forward(model, recorder, prompts, None)
        return Pending(recorder, prompts, asked, which)


def _asked(
    model: LoadedModel, layers: Sequence[int] | int | str | None, heads: Sequence[int] | int | str | None
) -> tuple[list[int], list[int]]:
    asked = attention_layers(model.model) if layers is None else model.numbered(layers)
    which = numbers_of("all" if heads is None else heads, model.heads, "head")
    if not asked or not which:
        raise BadStudy("no layer or no head was asked for; leave layers and heads out for all of them")
    return asked, which


def _forward(model: LoadedModel, recorder: Recorder, batch: Sequence[Prompt], part: int | None) -> None:
    """Run some prompts, padded on the right; what they receive is left in the recorder."""
    for prompt in batch:
        if not isinstance(prompt, Prompt):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadPrompt(
                f"a prompt is what mless.prompts(model, items, condition) makes, token ids with spans; got {type(prompt).__name__}"
            )
    check_reach(model, batch)
    longest = max(map(len, batch))
    positions = own_positions(model, batch, longest)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    real = torch.zeros(len(batch), longest, dtype=torch.bool)
    sets = torch.zeros(len(batch), len(QUERY_SETS), longest, dtype=torch.bool)
    spans = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, prompt in enumerate(batch):
        ids[row, : len(prompt)] = torch.tensor(prompt.token_ids)
        real[row, : len(prompt)] = True
        sets[row, 0, : len(prompt)] = True
        sets[row, 1, prompt.original] = True
        spans[row, : len(prompt)] = torch.tensor(prompt.span_ids)
    one = bool((sets[:, 0] == sets[:, 1]).all())
    sets = sent(sets, model.device)  # before it is expanded: a copy to another device would not be
    sets = sets[:, :1].expand(-1, len(QUERY_SETS), -1) if one else sets
    in_parts = longest > (part or WHOLE_PROMPT)
    recorder.expect(sets, sent(spans, model.device), in_parts=in_parts)
    with torch.inference_mode():
        if in_parts:
            _run_in_parts(model, recorder, ids, part or _PART, positions)
            recorder.joined()
        else:
            padding = None if bool(real.all()) and positions is None else sent(real.long(), model.device)
            moved = {} if positions is None else {"position_ids": sent(positions, model.device)}
            recorder.run(input_ids=sent(ids, model.device), attention_mask=padding, use_cache=False, **moved)


def _batches(prompts: Sequence[Prompt], size: int, whole: int) -> Iterator[Sequence[Prompt]]:
    """So many prompts at a time, in order; one that is too long to run whole is alone."""
    batch: list[Prompt] = []
    for prompt in prompts:
        if batch and (len(batch) == size or len(prompt) > whole or len(batch[0]) > whole):
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def _run_in_parts(
    model: LoadedModel,
    recorder: Recorder,
    ids: Int[Tensor, "1 tokens"],
    part: int,
    positions: Int[Tensor, "1 tokens"] | None,
) -> None:
    from transformers import DynamicCache

    _refuse_changing_scales(model, ids.shape[1], part)
    # Without the model's config: sliding layers would drop keys that are still needed.
    cache = DynamicCache()
    for first in range(0, ids.shape[1], part):
        tokens = ids[:, first : first + part].to(model.device)
        moved: dict[str, Tensor] = {}
        if positions is not None:
            every = torch.ones(1, first + tokens.shape[1], dtype=torch.long, device=model.device)
            moved = {"position_ids": positions[:, first : first + part].to(model.device), "attention_mask": every}
        try:
            recorder.run(input_ids=tokens, past_key_values=cache, use_cache=True, **moved)
        except (IndexError, ValueError, AttributeError, TypeError, RuntimeError) as fault:
            # Raised by a model that asks for another kind of cache. Other errors (memory, a kernel) pass unchanged.
            if isinstance(fault, RuntimeError) and "size of tensor" not in str(fault):
                raise
            raise UnsupportedArchitecture(
                f"{model.family!r} keeps more than keys and values between the parts of a long prompt ({first_line(fault)}); "
                f"give part={ids.shape[1]} or more to run it whole, or shorten it"
            ) from fault


def _refuse_changing_scales(model: LoadedModel, tokens: int, part: int) -> None:
    """Refuse models where early parts would have another rotary scale than the whole prompt."""
    config = model.model.config.get_text_config()
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]:
        original = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", tokens)
        kind = rope.get("rope_type")
        if tokens > original and (kind == "dynamic" or (kind == "longrope" and part <= original)):
            raise BadStudy(
                f"{model.label} rotates its keys differently in prompts of more than {original} tokens ({kind}), so {tokens} tokens cannot run in parts "
                f"of {part}; give part={tokens} or more to run it whole"
                + (f", or parts of more than {original}" if kind == "longrope" else "")
            )


class Pending:
    """What a batch's tokens received, on its way from the device. `row` waits for it, in any thread."""

    def __init__(self, recorder: Recorder, prompts: Sequence[Prompt], layers: list[int], heads: list[int]) -> None:
        self._prompts, self._layers, self._heads = list(prompts), layers, heads
        self.computed_by = {layer: recorder.computed_by[layer] for layer in layers}
        totals = recorder.totals()
        self._totals = _stacked(list(totals.values())) if totals else None
        self._finite: bool | None = None
        self._received = _stacked([recorder.sums[layer].apart for layer in layers])
        self._even = _stacked([recorder.uniform[layer].received[:, :, 0] for layer in layers])
        self._n = _stacked([recorder.uniform[layer].counts for layer in layers])
        self._mass = _stacked([recorder.sums[layer].mass for layer in layers])
        sums, even = ([found[layer] for layer in layers] for found in (recorder.sums, recorder.uniform))
        sources = [
            *totals.values(),
            *(one.mass for one in sums),
            *(one.apart for one in sums),
            *(one.counts for one in even),
        ]
        #: The numbers are there once this is done.
        self._copied = Started(sources)

    def rows(self) -> Iterator[Attention]:
        """Each prompt's attention, in order."""
        return (self.row(number) for number in range(len(self._prompts)))

    def row(self, row: int) -> Attention:
        """One prompt's attention."""
        if self._finite is None:
            self._copied.wait()
            self._finite = self._totals is None or bool(torch.isfinite(self._totals).all())
        if not self._finite:
            self._refuse_infinite(row)
        prompt = self._prompts[row]

        def taken(stacked: Tensor) -> np.ndarray:
            return stacked[:, row, ..., : len(prompt)].float().numpy()

        n = self._n[:, row, :, : len(prompt)].numpy().swapaxes(0, 1)
        divisor = np.where(n > 0, n, np.nan).astype(np.float32)
        # Two sets that are one were summed and copied once.
        received = taken(self._received).swapaxes(0, 1) / divisor[:, :, None]
        mass = self._mass[:, row].float().numpy()
        assert mass.shape[-1] == len(MASS_NAMES)
        means = received, n.astype(np.int32), taken(self._even).swapaxes(0, 1) / divisor
        return Attention(prompt, self._layers, self._heads, *means, mass, self.computed_by)

    def _refuse_infinite(self, row: int) -> None:
        """Refuse the row if one of its own numbers is not finite; another one of the batch may be the cause."""
        own = self._received[:, row, ..., : len(self._prompts[row])].float().sum((1, 3)) + self._mass[
            :, row
        ].float().sum(-1)
        refuse_infinite(dict(zip(self._layers, own, strict=True)), self._heads)


def _stacked(layers: Sequence[Tensor]) -> Tensor:
    """All layers' numbers, on their way to the CPU."""
    # Those of a very long prompt are there already.
    layers = [one.cpu() for one in layers] if len({one.device for one in layers}) > 1 else layers
    return leaving(torch.stack(list(layers)))
