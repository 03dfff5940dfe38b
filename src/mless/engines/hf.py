"""A transformers model in this process. Rows that finish leave, new prompts enter, and no row's answer depends on its neighbours.

**row-stable** (the default): a forward always has S rows, empty ones filled with dummies, and a row's tokens always sit at the same
cache slots. Everything that could change a row's bits (padded length, chunk shapes, shared prefix) is a function of that row's own
prompt, so order, resume and the number of live rows cannot change them.

**batch-invariant**: matrix products go by fixed blocks of rows, so S cannot change a row's bits either.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor

from mless import kernels, limits
from mless.capture import copies
from mless.engines.base import Changes, Decoding, Finish, OutOfMemory, Reply, Request, Way, by_way
from mless.engines.blocks import BLOCK, InBlocks
from mless.engines.checks import check_changes, check_room, gap_of, has_own_forward, slots_of
from mless.engines.cuts import SlotCuts, labels_of
from mless.engines.fitting import default_slots, ends_of, one_scale
from mless.engines.opening import Opening
from mless.engines.patched import Start, layers_put_in, puts_in, started
from mless.engines.prefill import BUCKET, Prefill, arm_seed, positions_of, spans_of
from mless.engines.quick import packed_products, quick_steps, replacing
from mless.engines.slots import (
    Layout,
    SlotCache,
    row_by_row_experts,
    rows_are_apart,
    sent,
    slot_attention,
)
from mless.errors import BadStudy, ProofFailed, UnsupportedArchitecture, first_line, is_out_of_memory
from mless.gates import check_count
from mless.models import LoadedModel
from mless.models.experts import has_experts
from mless.models.placing import is_spread
from mless.redistribution import ArmHandle, attached

Mode = Literal["row-stable", "batch-invariant"]
#: Rows side by side in the self-check; enough to fill a prefill.
_SELF_CHECK_ROWS = 12
#: Tokens of it where there are cuts and patches, of which a study has many.
_CHANGED_TOKENS = 3


@dataclass
class _Row:
    """A request and the slot it is answered in."""

    request: Request
    slot: int
    rng: np.random.Generator
    made: list[int] = field(default_factory=list[int])
    #: Of a patched prompt, whose first token is chosen before the first step.
    first: Float[Tensor, " vocabulary"] | None = None


@dataclass(frozen=True)
class _StartedStep:
    """A started step: its rows, the tensor its tokens go to, and the event to wait for before reading them."""

    rows: dict[int, _Row]
    tokens: Int[Tensor, " rows"]
    done: torch.cuda.Event | None


class HfEngine:
    """`length` is the number of cache slots of a row: the longest prompt and its answer. It is part of what a forward computes, as `slots` is.

    Without `slots` the device decides, and no more are made than `most` requests can fill.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        length: int,
        slots: int | None = None,
        most: int | None = None,
        mode: str = "row-stable",
    ) -> None:
        if mode not in get_args(Mode):
            raise BadStudy(f"no mode {mode!r} of decoding; there are: {', '.join(get_args(Mode))}")
        check_count(slots, "slots", limits.ROWS_AT_ONCE, BadStudy)
        self._model = model
        self._mode: Mode = cast("Mode", mode)
        self._longest = length
        self.length = math.ceil(length / BUCKET) * BUCKET
        self.slots = slots or max(default_slots(model, self.length, most), BLOCK if mode == "batch-invariant" else 1)
        if mode == "batch-invariant" and self.slots % BLOCK:
            raise BadStudy(
                f"batch-invariant decoding works on blocks of {BLOCK} rows, so slots must be a multiple of {BLOCK}, got {self.slots}"
            )
        self._reach = min(model.context, one_scale(model))
        if length > self._reach:
            raise BadStudy(
                f"prompt and answer together take up to {length} tokens, but {model.label} takes {self._reach}; use a smaller "
                "--max-new-tokens, or leave the longest items out"
            )
        self._experts = has_experts(model.model)
        self._spread = is_spread(model.model)
        self._layout = Layout()
        self._ends = ends_of(model)
        self._cache = SlotCache(model.layers, self.length, self._layout)  # allocated by the first forward
        self._prefill = Prefill(model, self._cache)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._arm: ArmHandle | None = None
        self._last_start: tuple[Changes, Start] | None = None
        self._short = False  # whether a step may skip empty cache slots
        self._served = ""  # what computes a step's attention
        # In batch-invariant mode products always go by blocks.
        self._packed = packed_products(model.model, self.slots) if mode == "row-stable" else []
        try:
            with self._memory_named():
                self._allocate()
        except OutOfMemory:
            self.close()
            raise

    # ---- what callers use ---------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], decoding: Decoding, *, live: int | None = None) -> Iterator[Reply]:
        """Answer every request, longest prompts first unless `live` limits the rows: then in the order given. Those for which the model runs in
        another way (ARM, cuts, patches) come last, one way after another.
        """
        self.check_requests(requests)
        check_room(self._model, requests, decoding, self.length, self._reach)
        with self._memory_named():
            for way, group in by_way(requests).items():
                with self._running(way, group):
                    yield from self._generate(group, decoding, live)

    def _generate(self, requests: Sequence[Request], decoding: Decoding, live: int | None) -> Iterator[Reply]:
        most = min(live or self.slots, self.slots)
        order = list(requests) if live is not None else sorted(requests, key=self._prefill.shape, reverse=True)
        rows: dict[int, _Row] = {}
        waiting = deque(order)
        free = list(range(self.slots))[::-1]
        running: _StartedStep | None = None
        while waiting or rows:
            room = most - len(rows)
            # On a GPU prompts are prefilled several at a time, so free slots wait until a group can enter.
            if waiting and (
                room >= min(self._prefill.rows_together(waiting[0]), len(waiting), max(1, most // 2)) or not rows
            ):
                new = list(self._admit(waiting, free, room, decoding))
                rows |= {row.slot: row for row in new}
                # A patched prompt's first token may end its answer.
                yield from self._ended([row for row in new if row.made], rows, free, decoding)
                if not rows:
                    continue
            started = self._start(rows, decoding)
            # A GPU is one step ahead: it computes the next tokens while these are read. A row that has just ended computes one more token,
            # which is dropped.
            finished, running = (running, started) if started.done is not None else (started, None)
            if finished is not None:
                yield from self._finish_rows(finished, rows, free, decoding)

    def about(self) -> dict[str, Any]:
        model = self._model
        invariant = self._mode == "batch-invariant"
        return {
            "engine": "hf",
            "mode": self._mode,
            "slots": self.slots,
            "length": self.length,
            "attention": self._served,
            "decode": "graph-captured" if self._graph is not None else "eager",
            "dtype": model.dtype,
            "computing": model.computing(),
            "device": model.kind,
            "device_name": torch.cuda.get_device_name(model.device)
            if model.device.type == "cuda"
            else torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "promise": "same tokens for any number of live rows, any order and after a resume"
            + (", and for any number of slots" if invariant else f", with {self.slots} slots"),
        }

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Refuse cuts and patches that mean nothing, or that rows in slots cannot have, before anything is drawn."""
        for request in requests:
            check_changes(self._model, request, self._longest)

    def self_check(self, requests: Sequence[Request], tokens: int = 6) -> dict[str, Any]:
        """Check on this machine that a few rows, alone and then together in other slots, give the same bits of logits.

        Done once for the model as it is, once with the first ARM setting where requests have one, and once for all cuts and patches each.
        """
        groups = list(by_way(requests).items())
        chosen = groups[:1] + [one for one in groups[1:] if one[0].arm is not None and not one[0].changed][:1]
        chosen += [one for one in groups[1:] if one[0].changed]
        found: dict[str, Any] = {"prompts": 0, "tokens": 0, "logits": "same bits alone and together, in other slots"}
        with self._memory_named():
            for way, group in chosen:
                with self._running(way, group):
                    shown = self._show(group, min(tokens, _CHANGED_TOKENS) if way.changed else tokens)
                found |= {
                    "prompts": found["prompts"] + shown["prompts"],
                    "tokens": max(found["tokens"], shown["tokens"]),
                }
                found["forward"] = max(found.get("forward", 0.0), shown["forward"])
        return found

    def _show(self, requests: Sequence[Request], tokens: int) -> dict[str, Any]:
        distinct = sorted({r.token_ids: r for r in requests}.values(), key=lambda r: len(r.token_ids))
        chosen = [distinct[0], distinct[len(distinct) // 2], distinct[-1]] if len(distinct) > 3 else distinct
        chosen = chosen[-self.slots :]
        tokens = min([tokens, *(self.length - slots_of(request) + 1 for request in chosen)])
        # Add rows of the same shape, so that prompts are prefilled in groups, as in a run.
        shapes = {self._prefill.shape(request) for request in chosen}
        others = [r for r in distinct if r not in chosen and self._prefill.shape(r) in shapes]
        rows = [*chosen, *others[: max(0, min(_SELF_CHECK_ROWS, self.slots) - len(chosen))]]
        rows.sort(key=self._prefill.shape, reverse=True)
        alone = [self._trace([request], tokens)[0] for request in chosen]
        beside = dict(zip([r.key for r in rows], self._trace(rows, tokens), strict=True))
        together = [beside[request.key] for request in chosen]
        different = sum(not torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        if different:
            other = "--set accuracy.mode=batch-invariant" if self._mode == "row-stable" else "--engine vllm"
            raise ProofFailed(
                f"{self._mode} decoding does not hold here: {different} of {len(chosen)} prompts got other logits with neighbours than alone, on "
                f"{self._model.device} in {self._model.dtype}; try --dtype float32, or {other}"
            )
        gaps = [
            gap_of(self._model, request, trace, step)
            for request, trace in zip(chosen, alone, strict=True)
            for step in range(min(len(trace), 1 if request.changes is None else 2))
            if has_own_forward(request)
        ]
        return {"prompts": len(chosen), "tokens": tokens, "forward": max(gaps, default=0.0)}

    def close(self) -> None:
        self._graph, self._logits, self._packed, self._last_start = None, None, [], None
        self._cache = SlotCache(self._model.layers, self.length, self._layout)
        self._prefill = Prefill(self._model, self._cache)

    def __enter__(self) -> HfEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- start ----------------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        model, device, rows = self._model, self._model.device, self.slots
        self._tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._at = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._hidden = torch.zeros(rows, 2, dtype=torch.long, device=device)
        # Two, because one is being read while the other is filled.
        self._host_tokens = [torch.zeros(rows, dtype=torch.long, pin_memory=device.type == "cuda") for _ in range(2)]
        self._seeds = torch.zeros(rows, dtype=torch.long, device=device)
        self._layout.at, self._layout.hidden = self._at, self._hidden
        fault: Exception | None = None
        try:
            self._forward()  # gives the cache its memory
        except (ValueError, AttributeError) as raised:  # raised by a model that asks for another kind of cache
            fault = raised
        if fault is not None or not self._cache.ready:
            why = f" ({first_line(fault)})" if fault is not None else ""
            raise UnsupportedArchitecture(
                f"{model.family!r} keeps some of its state outside of a key-value cache, which slots cannot hold{why}; use --engine vllm or openai"
            ) from fault
        self._short = device.type == "cpu" and rows_are_apart(self._cache, self._layout.groups)
        if self._short:
            self._forward()
        self._served = self._layout.served
        self._prefill.try_largest(self.length)
        # A spread model's hooks copy weights and inputs between devices, which no graph can record.
        if device.type == "cuda" and not self._spread:
            self._capture()

    def _capture(self) -> None:
        """Record one decoding step as a CUDA graph: launching kernels is most of a small model's step.

        A forward that branches on its own numbers (dynamic RoPE) cannot be recorded. Such a model decodes step by step, and `about` says
        so.
        """
        self._graph = self._logits = None
        stream, here = _side_stream(self._model.device), torch.cuda.current_stream(self._model.device)
        stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        try:
            with quick_steps(self._model.model, self.slots):
                with torch.cuda.stream(stream):
                    self._forward()
                here.wait_stream(stream)
                with torch.cuda.graph(graph, stream=stream):
                    self._logits = self._forward()
        except RuntimeError as fault:
            if is_out_of_memory(fault):
                raise
            self._logits = None
            torch.cuda.synchronize()
            return
        self._graph = graph

    @contextmanager
    def _running(self, way: Way, group: Sequence[Request]) -> Generator[None]:
        """Inside the block the model runs so, with a captured step of its own where steps differ; afterwards the earlier step is used again."""
        cuts = self._cuts(way, group)
        if way.arm is None and cuts is None:
            yield  # patches are in force while a prompt is prefilled, and not in a step
            return
        step = self._graph, self._logits
        with ExitStack() as stack:
            stack.callback(self._as_before, *step)
            if way.arm is not None:
                self._arm = stack.enter_context(attached(self._model.model, way.arm))
            if cuts is not None:
                self._layout.cuts = self._prefill.cuts = cuts
                self._layout.labels = torch.zeros(self.slots, self.length, dtype=torch.int8, device=self._model.device)
            if self._graph is not None:
                self._capture()
            yield

    def _as_before(self, graph: torch.cuda.CUDAGraph | None, logits: Tensor | None) -> None:
        self._arm = self._layout.cuts = self._layout.labels = self._prefill.cuts = None
        self._graph, self._logits = graph, logits

    def _cuts(self, way: Way, group: Sequence[Request]) -> SlotCuts | None:
        """What is cut in the slots; where keys are put in, layers that do not get them must not see them."""
        model = self._model
        put = [one.changes for one in group if one.changes is not None and way.patch and puts_in(one.changes)]
        if not put and not way.cut:
            return None
        return SlotCuts(model.model, way.cut, model.device, layers_put_in(model, put[0]) if put else None)

    @contextmanager
    def _memory_named(self) -> Generator[None]:
        """Memory that is refused inside the block, by a GPU or by the system, becomes one error."""
        try:
            yield
        except (RuntimeError, MemoryError) as fault:
            if not is_out_of_memory(fault):
                raise
            torch.cuda.empty_cache()
            raise OutOfMemory(
                f"{self.slots} rows of {self.length} tokens do not fit into the memory of {self._model.device}; use fewer: "
                f"--set accuracy.slots={max(1, self.slots // 2)}",
                self.slots,
            ) from None

    # ---- prefill ---------------------------------------------------------------------------------------------------------

    def _admit(
        self, waiting: deque[Request], free: list[int], room: int, decoding: Decoding | None = None
    ) -> Iterator[_Row]:
        """Prefill up to `room` prompts, those of one shape together, and give each a slot."""
        while waiting and room > 0:
            shape = self._prefill.shape(waiting[0])
            group: list[Request] = []
            most = min(room, self._prefill.rows_together(waiting[0]))
            while waiting and len(group) < most and self._prefill.shape(waiting[0]) == shape:
                group.append(waiting.popleft())
            room -= len(group)
            slots = [free.pop() for _ in group]
            starts = self._place(group, slots, shape)
            rows: list[_Row] = []
            for request, slot, start in zip(group, slots, starts, strict=True):
                # Counter-based: the n-th token's draw is a function of the seed and n alone.
                rng = np.random.Generator(np.random.Philox(key=request.seed & ((1 << 64) - 1)))
                row = _Row(request, slot, rng)
                if start is not None:
                    row.first = start.logits
                    row.made.append(self._first(row, decoding or Decoding()))
                rows.append(row)
            self._set(rows, starts)
            yield from rows

    def _first(self, row: _Row, decoding: Decoding) -> int:
        assert row.first is not None
        draws = None if decoding.greedy else sent([[row.rng.random()]], self._model.device, torch.float64)
        with torch.inference_mode():
            return int(_chosen(row.first[None], draws, decoding))

    @torch.inference_mode()
    def _set(self, rows: Sequence[_Row], starts: Sequence[Start | None]) -> None:
        """What goes into these slots next: a prompt's last token, or the first one made. From then on each step passes its tokens to the next."""
        last: list[tuple[int, ...]] = []
        spans: list[list[int]] = []
        for row, start in zip(rows, starts, strict=True):
            request = row.request
            spans.append(start.labels if start is not None else spans_of(request))
            at = len(request.token_ids) - 1 if start is None else len(start.labels)
            token = (*request.token_ids, *row.made)[-1]
            position = positions_of(request)[-1] + len(row.made)
            last.append((token, at, position, arm_seed(request), *(request.hidden or (0, 0))))
        at, values = sent([row.slot for row in rows], self._model.device), sent(last, self._model.device)
        for column, target in enumerate((self._tokens, self._at, self._positions)):
            target[at, 0] = values[:, column]
        self._seeds[at] = values[:, 3]
        self._hidden[at] = values[:, 4:]
        if self._layout.labels is not None:
            self._layout.labels[at] = copies.sent(labels_of(spans, self.length), at.device)

    @torch.inference_mode()
    def _leave(self, slots: Sequence[int]) -> None:
        """Empty slots go back to position 0, where there is nothing to attend to."""
        at = sent(slots, self._model.device)
        for target in (self._tokens, self._at, self._positions):
            target.index_fill_(0, at, 0)

    def _place(self, group: Sequence[Request], slots: Sequence[int], shape: tuple[int, int]) -> Sequence[Start | None]:
        """Fill these slots with the prompts' keys and values. A patched prompt's last token is among them, and where it ends is given."""
        self._cache.clear(slots)
        if group[0].changes is not None and group[0].changes.patch:
            starts = [self._patched(request.changes) for request in group if request.changes is not None]
            for slot, start in zip(slots, starts, strict=True):
                self._cache.write(slot, start.beginning)
            return starts
        if shape[0]:  # a prompt of one token needs no prefill
            filled = self._prefill.run(group, shape, self._arm)
            for row, slot in enumerate(slots):
                self._cache.take_over(slot, filled, row, min(shape[0], self.length))
        return [None] * len(group)

    def _patched(self, changes: Changes) -> Start:
        # An item's samples come one after another.
        if self._last_start is None or self._last_start[0] != changes:
            self._last_start = None
            self._last_start = changes, started(self._model, changes)
        return self._last_start[1]

    # ---- decode ----------------------------------------------------------------------------------------------------------

    def _forward(self) -> Float[Tensor, "rows vocabulary"]:
        model = self._model.model
        if self._arm is not None:
            self._arm.rows(seeds=self._seeds, positions=self._at)
        if self._short:
            self._layout.look(self.length)
        experts = row_by_row_experts(model) if self._experts else nullcontext()
        quick = replacing(self._packed)
        with torch.inference_mode(), slot_attention(model, self._layout), experts, self._products(), quick:
            given = {"input_ids": self._tokens, "position_ids": self._positions, "past_key_values": self._cache}
            return model(**given, use_cache=True).logits[:, -1]

    @contextmanager
    def _products(self) -> Generator[None]:
        if self._mode == "batch-invariant":
            with InBlocks():
                yield
        else:
            yield

    def _step(self) -> Float[Tensor, "rows vocabulary"]:
        """The logits of every slot's next token. Those of empty slots are not used."""
        if self._graph is not None:
            self._graph.replay()
            assert self._logits is not None
            return self._logits
        return self._forward()

    @torch.inference_mode()
    def _move(self, chosen: Int[Tensor, " rows"]) -> None:
        """Move one token on, on the device, so that no step waits for the host."""
        self._tokens.copy_(chosen[:, None])
        # Empty slots move too, but never past the end.
        self._at.add_(1).clamp_(max=self.length - 1)
        self._positions.add_(1).clamp_(max=self._reach - 1)

    def _start(self, rows: dict[int, _Row], decoding: Decoding) -> _StartedStep:
        # Sent before the step starts; afterwards they would wait for it.
        draws = None if decoding.greedy else self._draws(rows)
        with torch.inference_mode():
            chosen = _chosen(self._step(), draws, decoding)
        self._move(chosen)
        if not chosen.is_cuda:
            return _StartedStep(dict(rows), chosen, None)
        self._host_tokens.reverse()
        tokens = self._host_tokens[0]
        tokens.copy_(chosen, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(chosen.device))
        return _StartedStep(dict(rows), tokens, done)

    def _finish_rows(
        self, step: _StartedStep, rows: dict[int, _Row], free: list[int], decoding: Decoding
    ) -> Iterator[Reply]:
        if step.done is not None:
            step.done.synchronize()
        tokens: list[int] = step.tokens.tolist()
        # A row that is no longer there had ended before this step was read.
        going = [row for slot, row in step.rows.items() if rows.get(slot) is row]
        for row in going:
            row.made.append(tokens[row.slot])
        yield from self._ended(going, rows, free, decoding)

    def _ended(
        self, going: Sequence[_Row], rows: dict[int, _Row], free: list[int], decoding: Decoding
    ) -> Iterator[Reply]:
        """The answers that their last token ends; these rows leave."""
        replies: list[Reply] = []
        for row in going:
            ended = row.made[-1] in self._ends
            finish: Finish | None = "stop" if ended else None
            text: str | None = None
            if finish is None and decoding.stop:
                text = self._stopped(row.made, decoding.stop)
                finish = "stop" if text is not None else None
            if finish is None and len(row.made) == decoding.max_new_tokens:
                finish = "length"
            if finish is None:
                continue
            del rows[row.slot]
            free.append(row.slot)
            replies.append(self._reply(row, finish, text, ended))
        if replies:
            self._leave(free)
        yield from replies

    def _draws(self, rows: dict[int, _Row]) -> Float[Tensor, "rows 1"]:
        """One number per row and token, from the row's own seed."""
        draws = [0.0] * self.slots
        for slot, row in rows.items():
            draws[slot] = float(row.rng.random())
        return sent(draws, self._model.device, torch.float64)[:, None]

    def _stopped(self, made: Sequence[int], stop: Sequence[str]) -> str | None:
        """The text up to the first stop text, where one has just appeared."""
        # A token holds at least one byte, so a stop text that has just ended lies within this many tokens.
        tail = self._decode(made[-max(32, *(len(text.encode()) + 1 for text in stop)) :])
        if not any(text in tail for text in stop):
            return None
        whole = self._decode(made)
        places = [whole.find(text) for text in stop if text in whole]
        return whole[: min(places)] if places else None

    def _reply(self, row: _Row, finish: Finish, text: str | None, ended: bool) -> Reply:
        made = row.made[:-1] if ended else row.made
        shown = text if text is not None else self._decode(made)
        request = row.request
        return Reply(request.condition, request.item, request.sample, shown, len(row.made), finish, tuple(row.made))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._model.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _trace(self, requests: Sequence[Request], tokens: int) -> list[Tensor]:
        """The logits of some greedy steps of each request, together in the last slots."""
        free = list(range(self.slots))
        rows = {row.request.key: row for row in self._admit(deque(requests), free, len(requests))}
        seen = {key: [] if row.first is None else [row.first] for key, row in rows.items()}
        for _ in range(tokens if all(row.first is None for row in rows.values()) else tokens - 1):
            logits = self._step()
            for key, row in rows.items():
                seen[key].append(logits[row.slot].clone())
            self._move(logits.max(-1).indices)
        return [torch.stack(seen[request.key]) if tokens > 0 else torch.empty(0) for request in requests]


def opened(given: Opening) -> HfEngine:
    """The engine for a study."""
    assert given.loaded is not None
    return HfEngine(given.loaded, length=given.length, slots=given.slots, most=given.most, mode=given.settings.mode)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all engines: cuBLAS keeps a workspace for every stream it has seen and never frees it."""
    return torch.cuda.Stream(device)


def _chosen(
    logits: Float[Tensor, "rows vocabulary"], draws: Float[Tensor, "rows 1"] | None, decoding: Decoding
) -> Int[Tensor, " rows"]:
    if draws is None:
        return logits.max(-1).indices  # ties: the first, as argmax; five times faster on a CPU
    return kernels.drawn(logits, draws, temperature=decoding.temperature, top_k=decoding.top_k, top_p=decoding.top_p)
