"""The doors to cuts and patches: ``with mless.cut(model, …)``, ``mless.recording(…)``, ``mless.patch(…)``, in anybody's forward or generate.

An intervention that is wrong for a model must fail, so each is proved when its block is entered, once for a model: on a short prompt a cut edge
weighs nothing and what is left equals the definition; without a cut, and with a run's own values put in, the model computes what it did.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mless.capture.cutting import CutHandle, Edges, check_cuts, cut_attached, edges_of
from mless.capture.following import decoder, followed
from mless.capture.forwards import attention_of
from mless.capture.patching import PatchHandle, RecordedRun, Recorder, patch_attached, places_of, recorded
from mless.capture.seam import Call, Change, attended, changing, heads_of
from mless.capture.starting import starting, watched
from mless.changes import ANSWER, NAMED_SPANS, PARTS, Cut, Patch
from mless.errors import BadPrompt, BadStudy, ProofFailed, UnsupportedArchitecture
from mless.kernels.reference import probabilities
from mless.models import LoadedModel
from mless.proofs import state_gap
from mless.values import Prompt, Span, named_layers

#: Tokens of each span, and of an answer, in the prompt that interventions are proved on.
_OF_SPAN, _OF_ANSWER = 4, 3
#: How far an attention's output may be from the definition, and a token's state from the plain forward's, as a share of its size, by dtype.
_OUTPUT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_STATES = {torch.float32: 1e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}

#: By model, what has been proved of it.
_PROVED: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[str, float]]] = weakref.WeakKeyDictionary()


# ---- doors -----------------------------------------------------------------------------------------------------------------


@contextmanager
def cut(model: Any, *cuts: Cut, prompts: Any) -> Generator[CutHandle]:
    """Inside the block edges of attention are cut: ``with mless.cut(model, mless.Cut("answer", "filler", layers="2-"), prompts=prompts): …``.

    `model`: a transformers model, or one from `mless.load`. `prompts`: those of the forward's rows, in order; what follows them is the answer.
    The handle's `rows` names those of the next forward. Afterwards, even on error, the model is as before.
    """
    whole, given = _checked(model), _several(prompts)
    for one in given:
        check_cuts(cuts, one)
    if given and not (attended(whole) or followed(whole)):
        prove_cuts(whole, cuts, given[0])
    with cut_attached(whole, cuts, given) as handle:
        yield handle


@contextmanager
def recording(
    model: Any,
    prompts: Any,
    *,
    parts: str | Sequence[str] = PARTS,
    layers: object = "all",
) -> Generator[Recorder]:
    """Inside the block the named parts of the named layers are kept; `runs()` gives them, one run for each row, to be patched into other forwards."""
    whole = _checked(model)
    asked = [parts] if isinstance(parts, str) else parts
    places = places_of(whole, [Patch(part, layers=layers) for part in asked])
    with recorded(whole, places, _several(prompts)) as recorder:
        yield recorder


@contextmanager
def patch(
    model: Any,
    *patches: Patch,
    prompts: Any,
    runs: RecordedRun | Sequence[RecordedRun],
) -> Generator[PatchHandle]:
    """Inside the block parts take another run's values: ``with mless.patch(model, mless.Patch("mlp-output", layers=1), prompts=…, runs=…): …``.

    `runs`: where each row's values come from (`recording`). Rows must hold the same original tokens as their runs. Afterwards, even on error,
    the model is as before.
    """
    given = _several(prompts)
    several = [runs] if isinstance(runs, RecordedRun) else list(runs)
    whole = _checked(model)
    if given and not (attended(whole) or followed(whole)):
        prove_patches(whole, patches, given[0])
    with patch_attached(whole, patches, given, several) as handle:
        yield handle


def _checked(model: object) -> nn.Module:
    whole: object = model.model if isinstance(model, LoadedModel) else model
    if hasattr(whole, "_orig_mod"):
        raise BadStudy(
            "the model is compiled, and what was compiled would go on without cuts and patches; give the model as it was before torch.compile"
        )
    if not isinstance(whole, nn.Module):
        raise BadStudy(
            f"cuts and patches go into a transformers model (a torch module), got {type(model).__name__}; for a pipeline give pipe.model"
        )
    return whole


def _several(prompts: object) -> list[Prompt]:
    found: list[object] = [prompts] if isinstance(prompts, Prompt) else list(cast("Sequence[object]", prompts))
    for one in found:
        if not isinstance(one, Prompt):
            raise BadPrompt(
                f"a prompt is what mless.prompts(model, items, condition) makes, token ids with spans; got {type(one).__name__}"
            )
    return cast("list[Prompt]", found)


# ---- proofs ----------------------------------------------------------------------------------------------------------------


def prove_cuts(model: nn.Module, cuts: Sequence[Cut], prompt: Prompt) -> dict[str, float]:
    """Raises `ProofFailed` where cuts do not do what they say, on a short prompt with this one's spans; else says how well each held.

    edges:   a key's value may be anything, and no query that it is cut from changes by a bit
    output:  the attention against the definition in double precision: weights removed, the rest renormalised or sent to the sink
    uncut:   without cuts the model's states are those of its own forward
    """
    probe = _probe(prompt)
    key = ("cuts", *_where(model), tuple(cuts), tuple(span.name for span in probe.spans))
    known = _PROVED.setdefault(model, {})
    if key not in known:
        plain = _states(model, probe)
        with cut_attached(model, [], [probe]):
            uncut = _states(model, probe)
        gap = _within(model, plain, uncut, "attention without any cut changes the model's states")
        check = _Checked(edges_of(cuts, model, heads_of(model) or 1), probe)
        with cut_attached(model, cuts, [probe]), changing(model, check):
            _states(model, probe)
        _within(model, plain, _states(model, probe), "taking cuts off did not give back the model's own states")
        if missing := sorted(set(check.edges) - check.seen):
            raise ProofFailed(
                f"{type(model).__name__} did not attend in {named_layers(missing)} through transformers' attention registry, so nothing can be cut there; "
                "see docs/adding-a-model.md"
            )
        known[key] = {"edges": 0.0, "output": check.worst, "uncut": gap}
    return known[key]


class _Checked(Change):
    """Compares every cut attention call with the definition."""

    def __init__(self, edges: dict[int, list[Edges]], probe: Prompt) -> None:
        self.edges = edges
        self.worst = 0.0
        self.seen: set[int] = set()
        self._labels = torch.tensor([*probe.span_ids, *[NAMED_SPANS.index(ANSWER)] * _OF_ANSWER])

    def after(self, call: Call, out: Tensor) -> Tensor:
        groups = self.edges.get(call.layer)
        if groups is not None and not call.again:
            self.seen.add(call.layer)
            for one in groups:
                heads = list(range(call.query.shape[1])) if one.heads is None else list(one.heads)
                self._check_output(call, one, heads, out)
                self._check_edges(call, one, heads, out)
        return out

    def _check_output(self, call: Call, one: Edges, heads: list[int], out: Tensor) -> None:
        labels = self._labels.to(call.query.device)
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        rest, sink = (
            torch.from_numpy(table).to(labels.device)[labels][:, labels] & ~itself for table in (one.rest, one.sink)
        )

        def left(first: int, last: int, /) -> Tensor:
            return call.mask.base(first, last) & ~rest[first:last]

        matrix, _ = probabilities(call.query, call.key, visible=left, **call.score)
        if call.score["sinks"] is None:
            first = (matrix.masked_fill(sink, 0.0) > 0).byte().argmax(-1, keepdim=True)
            matrix = matrix.scatter_add(-1, first, (matrix * sink).sum(-1, keepdim=True))
        matrix = matrix.masked_fill(sink, 0.0)
        values = call.value.repeat_interleave(matrix.shape[1] // call.value.shape[1], 1).double()
        wanted = (matrix @ values).transpose(1, 2)[:, :, heads]
        ours = out[:, :, heads].double()
        error = float((ours - wanted).norm() / wanted.norm().clamp(min=1e-30))
        allowed = _OUTPUT.get(out.dtype, 1e-4)
        if not error <= allowed:
            raise ProofFailed(
                f"layer {call.layer}: attention with its edges cut differs from the definition by {error:.2g} of its size, more than {allowed:g} allowed; "
                "this family cannot be cut, see docs/adding-a-model.md"
            )
        self.worst = max(self.worst, error)

    def _check_edges(self, call: Call, one: Edges, heads: list[int], out: Tensor) -> None:
        gone = one.rest | one.sink
        for label in set(self._labels.tolist()):
            keys = torch.from_numpy(gone[label])[self._labels]
            queries = ((self._labels == label) & ~keys).nonzero()[:, 0]
            if not bool(keys.any()) or not len(queries):
                continue
            # Finite, so that a weight of zero takes nothing from it.
            values = call.value.clone()
            values[:, :, keys.to(values.device)] += 100.0
            again = attention_of(replace(call, value=values))[:, queries][:, :, heads]
            if not torch.equal(again, out[:, queries][:, :, heads]):
                raise ProofFailed(
                    f"layer {call.layer}: a cut edge still has weight: {NAMED_SPANS[label]!r} changes with the values of what it is cut from; "
                    "this family cannot be cut, see docs/adding-a-model.md"
                )


def prove_patches(model: nn.Module, patches: Sequence[Patch], prompt: Prompt) -> dict[str, float]:
    """The same for patches.

    own:    a run's own values, put in, change no bit of its states
    values: what was put in is what the part then holds
    """
    probe = _probe(prompt)
    places = places_of(model, patches)
    key = ("patches", *_where(model), tuple(sorted(places)))
    known = _PROVED.setdefault(model, {})
    if key not in known:
        whole = [Patch(part, layers=layer) for part, layer in places]
        with recorded(model, places, [probe]) as recorder:
            plain = _states(model, probe)
        (run,) = recorder.runs()
        other = replace(run, values={place: tuple(one * 1.5 for one in held) for place, held in run.values.items()})
        with patch_attached(model, whole, [probe], [run]):
            again = _states(model, probe)
        if not torch.equal(plain, again):
            raise ProofFailed(
                f"{type(model).__name__}: putting a run's own {', '.join(sorted({part for part, _ in places}))} back changes its states; this family cannot be "
                "patched there, see docs/adding-a-model.md"
            )
        with patch_attached(model, whole, [probe], [other]), recorded(model, places, [probe]) as recorder:
            _states(model, probe)
        (found,) = recorder.runs()
        for part, layer in places:
            if not all(map(torch.equal, found.of(part, layer), other.of(part, layer))):
                raise ProofFailed(
                    f"{type(model).__name__}: the {part} of layer {layer} does not hold what was put there; see docs/adding-a-model.md"
                )
        known[key] = {"own": 0.0, "values": 0.0}
    return known[key]


def starts_anywhere(model: nn.Module, layers: int, prompt: Prompt) -> str:
    """Whether a forward that starts at a later layer (`capture.starting`) has the bits of a whole one; empty if so, else why not."""
    probe = _probe(prompt)
    known = _PROVED.setdefault(model, {})
    key = ("starts", _where(model))
    if key not in known:
        known[key] = {_why_not(model, layers, probe): 0.0}
    return next(iter(known[key]))


def _why_not(model: nn.Module, layers: int, probe: Prompt) -> str:
    places = [("residual", layer) for layer in range(1, layers)]
    try:
        with watched(model, range(1, layers + 1)) as alone, recorded(model, cast("Any", places), [probe]) as recorder:
            plain = _states(model, probe)
    except UnsupportedArchitecture as fault:
        return str(fault)
    if len(alone) < layers or not all(alone.values()):
        return "a layer hands on more than the residual stream"
    runs = recorder.runs()
    for first in range(2, layers + 1):
        try:
            with starting(model, first, runs, 1, runs[0].length):
                same = torch.equal(plain, _states(model, probe))
        except Exception as fault:  # noqa: BLE001 - a layer that misses what an earlier one left may fail in any way
            return f"layer {first} needs more of earlier layers than the residual stream ({type(fault).__name__})"
        if not same:
            return f"layer {first} takes more from earlier layers than the residual stream"
    return ""


def _probe(prompt: Prompt) -> Prompt:
    """A short prompt with the same spans in the same order, and the last tokens of each."""
    ids: list[int] = []
    spans: list[Span] = []
    for span in prompt.spans:
        taken = prompt.token_ids[max(span.start, span.stop - _OF_SPAN) : span.stop]
        spans.append(Span(span.name, len(ids), len(ids) + len(taken)))
        ids += taken
    return Prompt(prompt.item, prompt.condition, tuple(ids), tuple(spans), "")


def _where(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """A model may be moved after it was proved."""
    first = next(model.parameters())
    return first.device, first.dtype


def _states(model: nn.Module, probe: Prompt) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.tensor([[*probe.token_ids, *probe.token_ids[-1:] * _OF_ANSWER]], device=device)
    with torch.inference_mode():
        out = decoder(model)(input_ids=ids, use_cache=False)
    # Some models with pictures have a decoder with its head.
    found: Tensor = out.last_hidden_state if hasattr(out, "last_hidden_state") else out.logits
    return found.clone()


def _within(model: nn.Module, first: Tensor, second: Tensor, what: str) -> float:
    allowed = _STATES.get(first.dtype, 1e-3)
    if not (gap := state_gap(first, second)) <= allowed:
        raise ProofFailed(
            f"{type(model).__name__}: {what} (by {gap:.2g} of a token's size, {allowed:g} allowed); see docs/adding-a-model.md"
        )
    return gap
