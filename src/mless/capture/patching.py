"""Parts of a run that take the values of another run, at the tokens that both have (docs/cause.md).

`Recorder` keeps what parts of the model compute; `PatchHandle` puts it into other forwards. Both stand at the same places: a layer's output, its
MLP's output, its non-linearity's output (module hooks), and the attention call's keys, values and output (`seam`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from mless.capture.copies import sent
from mless.capture.following import Follower, Places
from mless.capture.forwards import attention_of
from mless.capture.pairing import aligned, check_patch, inserts
from mless.capture.positions import check_reach, own_positions
from mless.capture.seam import Call, Change, GivenMask, LazyMask, Mask, attended, attending, changing, heads_of
from mless.changes import ANSWER, IN_ATTENTION, NAMED_SPANS, PARTS, Part, Patch, spans_of
from mless.errors import BadPrompt, BadStudy, UnsupportedArchitecture
from mless.models import LoadedModel
from mless.models.activations import activation_points, layer_modules, mlp_modules
from mless.models.seams import among, attention_layers
from mless.values import Prompt, numbers_of

Place = tuple[Part, int]


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """What one row of a forward computed: by part and layer, a value for each of its tokens. Of keys-values there are two."""

    prompt: Prompt
    #: The row's tokens, those after the prompt included; None where the forward brought none.
    ids: tuple[int, ...] | None
    length: int
    values: Mapping[Place, tuple[Tensor, ...]]

    def of(self, part: Part, layer: int) -> tuple[Tensor, ...]:
        if (part, layer) not in self.values:
            raise BadStudy(
                f"the other run was recorded without {part} of layer {layer}; record it: mless.recording(model, prompts, parts=…, layers=…)"
            )
        return self.values[part, layer]


# ---- the places in a model ---------------------------------------------------------------------------------------------


def numbered(model: nn.Module, part: Part, layers: str) -> list[int]:
    """The layers of a part, by number; those that the model lacks are refused."""
    if part in IN_ATTENTION:
        there = attention_layers(model)
        asked = there if layers == "all" else numbers_of(layers, max(there), "layer")
        return among(there, asked, type(model).__name__)
    config: Any = getattr(model, "config", None)
    count: int = config.get_text_config().num_hidden_layers
    return numbers_of(layers, count, "layer")


def points_of(model: nn.Module, part: Part, layers: Sequence[int]) -> dict[int, nn.Module]:
    """The modules whose output is the part. A model without the part is refused by name."""
    if part == "residual":
        return layer_modules(model, layers)
    if part == "mlp-output":
        return mlp_modules(model, layers)
    return {point.layer: point.act for point in activation_points(model, list(layers))}


Act = Callable[[Place, Float[Tensor, "rows tokens *width"]], Tensor | None]


def _hook(place: Place, follower: Follower, act: Act) -> Callable[[nn.Module, Any, Any], Any]:
    """Shows a module's output to `act` as rows × tokens, and puts back what it returns."""

    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        several = isinstance(output, tuple | list)
        values = output[0] if several else output
        places = follower.places
        rows = len(places.prompts)
        if not isinstance(values, Tensor) or values.numel() != rows * places.tokens * values.shape[-1]:
            raise UnsupportedArchitecture(
                f"{type(module).__name__}: the {place[0]} of layer {place[1]} does not have one row for each of {rows} × {places.tokens} tokens, so it "
                "cannot be told apart; choose another part or other layers"
            )
        new = act(place, values.reshape(rows, places.tokens, -1))
        if new is None:
            return None
        new = new.reshape(values.shape)
        return type(output)([new, *output[1:]]) if several else new

    return hook


class _Watch(Change):
    """Hooks and a change of the attention calls, on all places that are asked for."""

    def __init__(self, model: nn.Module, places: Iterable[Place], prompts: Sequence[Prompt]) -> None:
        self._places = frozenset(places)
        by_part: dict[Part, list[int]] = {part: [] for part in PARTS}
        for part, layer in sorted(self._places, key=lambda one: one[1]):
            by_part[part].append(layer)
        hooked: list[tuple[nn.Module, Place]] = [
            (module, (part, layer))
            for part, layers in by_part.items()
            if part not in IN_ATTENTION and layers
            for layer, module in points_of(model, part, layers).items()
        ]
        self.in_attention = any(by_part[part] for part in IN_ATTENTION)
        self._follower = Follower(model, prompts)
        self._hooks = [
            module.register_forward_hook(_hook(place, self._follower, self._act)) for module, place in hooked
        ]

    def _act(self, place: Place, values: Float[Tensor, "rows tokens *width"]) -> Tensor | None:
        raise NotImplementedError

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._follower.stop()


def _refuse_second(call: Call) -> None:
    if call.again:
        raise UnsupportedArchitecture(
            f"layer {call.layer}: {type(call.module).__name__} attends twice with the same keys, so its parts are not those of one attention; patch "
            "residual or mlp-output instead"
        )


# ---- reading -----------------------------------------------------------------------------------------------------------


class Recorder(_Watch):
    """Keeps what the named parts compute in the forwards inside its block."""

    def __init__(self, model: nn.Module, places: Iterable[Place], prompts: Sequence[Prompt]) -> None:
        super().__init__(model, places, prompts)
        self._kept: dict[Place, list[tuple[Tensor, ...]]] = {}
        self._seen: list[Places] = []

    def rows(
        self,
        prompts: Sequence[Prompt],
        lengths: Sequence[int] | None = None,
        depths: Sequence[Int64[np.ndarray, " _"]] | None = None,
    ) -> None:
        """The prompts of the forwards to come; what was recorded before is dropped."""
        self._kept.clear()
        self._seen.clear()
        self._follower.rows(prompts, lengths, depths)

    def runs(self) -> list[RecordedRun]:
        """Every row's values. Forwards with a cache, one after another, are one run."""
        if not self._seen:
            raise BadStudy("nothing was recorded: run the model inside the block")
        last = self._seen[-1]
        values = {
            place: [torch.cat(part, dim=1) for part in zip(*parts, strict=True)] for place, parts in self._kept.items()
        }
        known = [one.ids for one in self._seen if one.ids is not None]
        ids = torch.cat(known, dim=1) if len(known) == len(self._seen) else None
        found: list[RecordedRun] = []
        for row, (prompt, start, end) in enumerate(zip(last.prompts, last.starts, last.ends, strict=True)):
            if prompt is None:
                continue
            own = {place: tuple(one[row, start:end].clone() for one in parts) for place, parts in values.items()}
            found.append(
                RecordedRun(prompt, tuple(ids[row, start:end].tolist()) if ids is not None else None, end - start, own)
            )
        return found

    def _note(self, place: Place, values: tuple[Tensor, ...]) -> None:
        places = self._follower.places
        if not self._seen or self._seen[-1] is not places:
            if places.before != (self._seen[-1].total if self._seen else 0):
                # Another forward from the beginning: the last one counts.
                self._kept.clear()
                self._seen.clear()
            self._seen.append(places)
        self._kept.setdefault(place, []).append(tuple(one.detach().clone() for one in values))

    def _act(self, place: Place, values: Float[Tensor, "rows tokens *width"]) -> None:
        self._note(place, (values,))

    def before(self, call: Call) -> Call:
        if ("keys-values", call.layer) in self._places:
            _refuse_second(call)
            tokens = self._follower.places.tokens
            # With a cache the call has earlier tokens' keys too; keys that a patch put in are last.
            last = call.key.shape[2] - call.put_in
            own = (one[:, :, last - tokens : last].transpose(1, 2) for one in (call.key, call.value))
            self._note(("keys-values", call.layer), tuple(own))
        return call

    def after(self, call: Call, out: Float[Tensor, "batch queries heads value_dim"]) -> Tensor:
        if ("attention-output", call.layer) in self._places:
            _refuse_second(call)
            self._note(("attention-output", call.layer), (out,))
        return out


# ---- putting in --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Put:
    """Which tokens of a row of the forward take which values."""

    row: int
    at: Int64[Tensor, " tokens"]
    values: tuple[Tensor, ...]
    heads: Int64[Tensor, " some"] | None

    def into(self, held: Float[Tensor, "rows tokens *width"], which: int = 0, offset: int = 0) -> None:
        at, values = self.at.to(held.device) + offset, self.values[which].to(held.device, held.dtype)
        if self.heads is None:
            held[self.row].index_copy_(0, at, values)
            return
        heads = self.heads.to(held.device)
        held[self.row][at[:, None], heads] = values.index_select(1, heads)


class PatchHandle(_Watch):
    """Patches in a model. `rows` names the prompts of the forwards to come and the runs their values come from."""

    def __init__(
        self,
        model: nn.Module,
        patches: Sequence[Patch],
        prompts: Sequence[Prompt],
        runs: Sequence[RecordedRun],
        *,
        answer: bool = True,
        by_row: Sequence[Sequence[Patch]] | None = None,
    ) -> None:
        self._heads, self._answer = heads_of(model), answer
        self._layers: dict[Patch, list[int]] = {}
        self._named: dict[Patch, Tensor | None] = {}
        for patch in patches:
            if not isinstance(patch, Patch):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BadStudy(f"a patch is mless.Patch(part, layers=…, at=…), got {type(patch).__name__}")
            self._layers[patch] = numbered(model, patch.part, patch.layers)
            heads = None if patch.heads is None else numbers_of(patch.heads, self._heads, "head")
            self._named[patch] = None if heads is None else torch.tensor([one - 1 for one in heads])
        self._by_row: list[tuple[Patch, ...]] = []
        self._runs: list[RecordedRun] = []
        self._made: tuple[int, dict[Place, list[_Put]], dict[int, _Inserted]] | None = None
        self._known: tuple[Any, ...] = ()
        self._check(prompts, runs, [tuple(one) for one in by_row or [patches] * len(prompts)])
        super().__init__(model, places_of(model, patches), prompts)
        self.rows(prompts, runs, by_row)

    def rows(
        self,
        prompts: Sequence[Prompt],
        runs: Sequence[RecordedRun],
        patches: Sequence[Sequence[Patch]] | None = None,
        lengths: Sequence[int] | None = None,
        depths: Sequence[Int64[np.ndarray, " _"]] | None = None,
        before: int = 0,
    ) -> None:
        """The prompts of the forwards to come and the run each takes its values from; each row has its own of the handle's patches, by default all."""
        by_row = [tuple(one) for one in patches] if patches is not None else [tuple(self._layers)] * len(prompts)
        self._check(prompts, runs, by_row)
        self._by_row, self._runs, self._made = by_row, list(runs), None
        self._follower.rows(prompts, lengths, depths, before)

    def _check(self, prompts: Sequence[Prompt], runs: Sequence[RecordedRun], by_row: Sequence[Sequence[Patch]]) -> None:
        given = list(prompts), list(runs), by_row
        if given == self._known:
            return
        if not len(prompts) == len(runs) == len(by_row):
            raise BadPrompt(
                f"{len(prompts)} prompts are to take values from {len(runs)} runs; give one run for each prompt"
            )
        for prompt, run, patches in zip(prompts, runs, by_row, strict=True):
            for patch in patches:
                if patch not in self._layers:
                    raise BadStudy(f"the patch {patch.words()} is not one that the block was entered with")
                check_patch(patch, prompt, run.prompt, answer=self._answer)
                for layer in self._layers[patch]:
                    run.of(patch.part, layer)
        self._known = given

    # ---- what the forward under way takes

    def _plan(self) -> tuple[dict[Place, list[_Put]], dict[int, _Inserted]]:
        if self._made is None or self._made[0] != self._follower.forwards:
            self._made = (self._follower.forwards, *self._planned(self._follower.places))
        return self._made[1], self._made[2]

    def _planned(self, places: Places) -> tuple[dict[Place, list[_Put]], dict[int, _Inserted]]:
        puts: dict[Place, list[_Put]] = {}
        inserted: dict[int, _Inserted] = {}
        # Rows of one item take the same tokens' values: a copy to the device would wait for what runs there.
        sent_before: dict[Any, tuple[Tensor, Tensor]] = {}
        rows = [row for row, prompt in enumerate(places.prompts) if prompt is not None]
        each = len(rows) // max(1, len(self._runs))
        for row in rows:
            run, patches = self._runs[row // each], self._by_row[row // each]
            prompt = places.prompts[row]
            assert prompt is not None
            for patch in patches:
                for layer in self._layers[patch]:
                    values = run.of(patch.part, layer)
                    key = prompt.token_ids, id(run), places.starts[row], places.ends[row], patch.at, values[0].device
                    if key not in sent_before:
                        pairs = (torch.from_numpy(one.copy()) for one in self._pairs(places, row, run, patch))
                        ours, theirs = (sent(one, values[0].device) for one in pairs)
                        sent_before[key] = ours, theirs
                    ours, theirs = sent_before[key]
                    if len(ours):
                        taken = tuple(one.index_select(0, theirs) for one in values)
                        heads = self._named[patch]
                        named = None if heads is None else sent(heads, values[0].device)
                        puts.setdefault((patch.part, layer), []).append(_Put(row, ours, taken, named))
                    if inserts(patch, prompt, run.prompt):
                        inserted.setdefault(layer, _Inserted(places)).add(row, run, values)
        return puts, inserted

    def _pairs(self, places: Places, row: int, run: RecordedRun, patch: Patch) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of this forward (numbered in it) and the run's tokens whose values they take."""
        prompt = places.prompts[row]
        assert prompt is not None
        ours, theirs = aligned(prompt, run.prompt, spans_of(patch.at))
        if ANSWER in spans_of(patch.at):
            after = min(places.ends[row] - places.starts[row] - len(prompt), run.length - len(run.prompt))
            more = np.arange(max(0, after))
            self._check_answer(places, row, run, len(more))
            ours, theirs = np.concatenate([ours, more + len(prompt)]), np.concatenate([theirs, more + len(run.prompt)])
        ours = ours + places.starts[row] - places.before
        here = (ours >= 0) & (ours < places.tokens) & (theirs < run.length)
        return ours[here], theirs[here]

    def _check_answer(self, places: Places, row: int, run: RecordedRun, count: int) -> None:
        """With a cache a forward holds only the last tokens, and these are compared."""
        prompt = places.prompts[row]
        if places.ids is None or run.ids is None or prompt is None:
            return
        first = places.starts[row] + len(prompt) - places.before
        gone = max(0, -first)
        ours = places.ids[row, max(0, first) : max(0, first + count)].tolist()
        if ours != list(run.ids[len(run.prompt) + gone : len(run.prompt) + count]):
            raise BadPrompt(
                f"item {prompt.item!r}: the tokens after the prompt are not those of the other run, so they have no values to take; run both on the same "
                "tokens, or leave 'answer' out of at"
            )

    def _act(self, place: Place, values: Float[Tensor, "rows tokens *width"]) -> Tensor | None:
        puts = self._plan()[0].get(place)
        if puts is None:
            return None
        values = values.clone()
        for put in puts:
            put.into(values)
        return values

    def before(self, call: Call) -> Call:
        plan, inserted = self._plan()
        puts, extra = plan.get(("keys-values", call.layer)), inserted.get(call.layer)
        if puts is not None or extra is not None:
            _refuse_second(call)
        if puts is not None:
            offset = call.key.shape[2] - self._follower.places.tokens
            both = [one.transpose(1, 2).clone() for one in (call.key, call.value)]
            for put in puts:
                for which, one in enumerate(both):
                    put.into(one, which, offset)
            call = replace(call, key=both[0].transpose(1, 2), value=both[1].transpose(1, 2))
        return call if extra is None else extra.into(call)

    def after(self, call: Call, out: Float[Tensor, "batch queries heads value_dim"]) -> Tensor:
        puts = self._plan()[0].get(("attention-output", call.layer))
        if puts is None:
            return out
        _refuse_second(call)
        out = out.clone()
        for put in puts:
            put.into(out)
        return out


# ---- keys of a filler that is not there --------------------------------------------------------------------------------


class _Inserted:
    """A filler's keys and values for the rows of a forward without it; they stand after the rows' own keys."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._rows: dict[int, tuple[RecordedRun, list[int], tuple[Tensor, ...]]] = {}

    def add(self, row: int, run: RecordedRun, values: tuple[Tensor, ...]) -> None:
        filler = run.prompt.positions("filler")
        at = torch.tensor(filler, device=values[0].device)
        self._rows[row] = run, filler, tuple(one.index_select(0, at) for one in values)

    def into(self, call: Call) -> Call:
        if not call.mask.alike:
            raise BadStudy(
                "a patch that puts keys in cannot be joined with a cut by head or to the sink; leave one of them out"
            )
        if call.score["bias"] is not None:
            raise UnsupportedArchitecture(
                f"layer {call.layer}: {type(call.module).__name__} has a bias for each pair of places, and keys that are put in have none; "
                "leave this patch out"
            )
        most = max(len(filler) for _, filler, _ in self._rows.values())
        both: list[Tensor] = []
        for which, held in enumerate((call.key, call.value)):
            more = held.new_zeros(held.shape[0], held.shape[1], most, held.shape[3])
            for row, (_, filler, values) in self._rows.items():
                more[row, :, : len(filler)] = values[which].transpose(0, 1).to(more.device, more.dtype)
            both.append(torch.cat([held, more], dim=2))
        mask = InsertedMask(call.mask, self, most)
        return replace(call, key=both[0], value=both[1], mask=mask, put_in=call.put_in + most)

    def seen(self, first: int, last: int, most: int, rule: LazyMask | None) -> Bool[np.ndarray, "rows queries filler"]:
        """Which of the filler's tokens each query sees: what the same query sees of it in the prompt that has it."""
        places = self._places
        found = np.zeros((len(places.prompts), last - first, most), bool)
        for row, (run, filler, _) in self._rows.items():
            prompt = places.prompts[row]
            assert prompt is not None
            rel = np.arange(first, last) + places.before - places.starts[row]
            if places.depths is not None:
                depth = places.depths[row]
                rel = np.where(rel < len(depth), depth[np.minimum(rel, len(depth) - 1)], -1)
            theirs = np.full(len(rel), -1)
            ours_at, theirs_at = aligned(prompt, run.prompt, NAMED_SPANS)
            where = dict(zip(ours_at.tolist(), theirs_at.tolist(), strict=True))
            for at, one in enumerate(rel.tolist()):
                inside = places.starts[row] <= first + at + places.before < places.ends[row]
                if inside and one >= 0:
                    theirs[at] = where.get(one, one - len(prompt) + len(run.prompt))
            found[row, :, : len(filler)] = self._rule(rule, row, theirs, np.array(filler))
        return found

    @staticmethod
    def _rule(
        rule: LazyMask | None, row: int, query: np.ndarray, key: np.ndarray
    ) -> Bool[np.ndarray, "queries filler"]:
        causal = query[:, None] >= key
        if rule is None:
            return causal
        places = (torch.tensor(row), torch.tensor(0), torch.from_numpy(query)[:, None], torch.from_numpy(key)[None])
        return causal & rule.rule(*places).numpy()


class InsertedMask(GivenMask):
    """A layer's mask with the keys of a filler after its own."""

    def __init__(self, under: Mask, inserted: _Inserted, most: int) -> None:
        self._under, self._inserted, self._most = under, inserted, most
        self.plain_causal = self.causal_for_real = False

    @property
    def base(self) -> Mask:
        return self._under.base

    def on(self, other: Mask) -> InsertedMask:
        return InsertedMask(self._under.on(other), self._inserted, self._most)

    def windowed(self, size: int) -> InsertedMask:
        return InsertedMask(self._under.windowed(size), self._inserted, self._most)

    def __call__(self, first: int, last: int, /) -> Bool[Tensor, "batch #heads rows keys"]:
        own = self._under(first, last)
        rule = self._under.base if isinstance(self._under.base, LazyMask) else None
        more = torch.from_numpy(self._inserted.seen(first, last, self._most, rule)).to(own.device)[:, None]
        return torch.cat([own.expand(len(more), -1, -1, -1), more.expand(-1, own.shape[1], -1, -1)], dim=-1)


# ---- blocks ------------------------------------------------------------------------------------------------------------


@contextmanager
def _entered(model: nn.Module, watch: _Watch) -> Generator[None]:
    with ExitStack() as stack:
        stack.callback(watch.stop)
        if watch.in_attention:
            stack.enter_context(changing(model, watch))
            if not attended(model):
                stack.enter_context(attending(model, attention_of))
        yield


@contextmanager
def recorded(model: nn.Module | LoadedModel, places: Iterable[Place], prompts: Sequence[Prompt]) -> Generator[Recorder]:
    """Inside the block what the named parts of the named layers compute is kept."""
    whole: nn.Module = model.model if isinstance(model, LoadedModel) else model
    recorder = Recorder(whole, places, prompts)
    with _entered(whole, recorder):
        yield recorder


@contextmanager
def patch_attached(
    model: nn.Module | LoadedModel,
    patches: Sequence[Patch],
    prompts: Sequence[Prompt],
    runs: Sequence[RecordedRun],
    *,
    answer: bool = True,
    by_row: Sequence[Sequence[Patch]] | None = None,
) -> Generator[PatchHandle]:
    """Inside the block the patches are in force in every forward of the model. `by_row`: each row's own of them."""
    whole: nn.Module = model.model if isinstance(model, LoadedModel) else model
    handle = PatchHandle(whole, patches, prompts, runs, answer=answer, by_row=by_row)
    with _entered(whole, handle):
        yield handle


def record_prompts(model: LoadedModel, places: Iterable[Place], prompts: Sequence[Prompt]) -> list[RecordedRun]:
    """One forward of the prompts, padded on the right; what the named parts compute in it."""
    check_reach(model, prompts)
    longest = max(map(len, prompts))
    positions = own_positions(model, prompts, longest)
    ids, real = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], real[row, : len(prompt)] = torch.tensor(prompt.token_ids), 1
    moved = {} if positions is None else {"position_ids": positions.to(model.device)}
    with recorded(model, places, prompts) as recorder, torch.inference_mode():
        recorder.rows(prompts, [len(prompt) for prompt in prompts])
        model.model(input_ids=ids.to(model.device), attention_mask=real.to(model.device), use_cache=False, **moved)
        return recorder.runs()


def places_of(model: nn.Module, patches: Iterable[Patch]) -> list[Place]:
    """What has to be recorded for these patches."""
    found: dict[Place, None] = {}
    for patch in patches:
        places: list[Place] = [(patch.part, layer) for layer in numbered(model, patch.part, patch.layers)]
        found |= dict.fromkeys(places)
    return list(found)
