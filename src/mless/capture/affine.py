"""How filler moves what a head puts out, o = P·V before the output projection, token by token and layer by layer.

The prompts of a pair run as the rows of one forward, so both outputs of a layer are at hand together: sums are taken there and then, and one
layer's outputs are all that is held at a time. The definitions are in docs/affine.md.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor, nn

from mless.capture.attention import LazyMask, attention_modules, mask_of, refuse_unknown
from mless.errors import BadAttention, BadPrompt, BadStudy, ProofFailed, UnsupportedArchitecture
from mless.kernels.signature import Visible
from mless.kernels.streaming import BLOCK_ELEMENTS
from mless.models import LoadedModel
from mless.models.seams import own_attention
from mless.prompting import align
from mless.values import Prompt, head_name

#: Whose outputs are compared: the original tokens that come after the filler, or all of them. Those before it cannot see it.
Tokens = Literal["after", "original"]

#: What is summed for every head over an item's tokens; each is defined in docs/affine.md.
SCALARS: tuple[str, ...] = (
    "log_lambda",
    "log_kept",
    "outputs",
    "moves",
    "product",
    "directed",
    "left_measured",
    "left_kept",
    "left_shifted",
    "left_position",
    "moves_position",
)
#: Below this share of the output's size a displacement is rounding and has no direction.
_NO_MOVE = 1e-6

#: A λ above e³⁰⁰ counts as that: scores in the hundreds move so far (Qwen 2's layer 2), and its square must stay a number.
_LARGEST = 300.0

#: What fp32 can hold; a point kept for the picture may be predicted further out than that.
_DRAWN = 1e30

#: Ours and eager start from the same queries, keys and values and both work in fp32, whatever the model's dtype.
_CAPTURED = 1e-4
#: What enters the output projection is rounded to the model's dtype; what two whole forwards may differ by, as a share of a token's size.
_ENTERING = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
_HIDDEN = {"float32": 1e-3, "bfloat16": 2e-1, "float16": 5e-2}
_RESTORED = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
#: Long enough for a whole ordinary prompt, short enough for eager's matrices.
_PROOF_TOKENS = 512


@dataclass(frozen=True)
class Outputs:
    """One attention call: P·V of every query, the log of its softmax's denominator, and of both the filler's part."""

    o: Float32[Tensor, "batch heads queries dim"]
    log_z: Float32[Tensor, "batch heads queries"]
    sigma: Float32[Tensor, "batch heads queries dim"]
    mass: Float32[Tensor, "batch heads queries"]


@dataclass(frozen=True)
class Displacement:
    """What one item's pair of prompts says of every head, as sums over the tokens compared.

    `sums` go by the names in `SCALARS`; NaN where a condition has no such thing. `output`, `displacement` and `direction` are the sums of
    o, of o′ − o and of its unit vectors. `before`, `after` and `measured` (λ_i·o + σ_i) are those vectors themselves for a few tokens.
    """

    prompt: Prompt
    layers: list[int]
    heads: list[int]
    tokens: int
    sums: dict[str, Float64[np.ndarray, "layers heads"]]
    output: Float64[np.ndarray, "layers heads dim"]
    displacement: Float64[np.ndarray, "layers heads dim"]
    direction: Float64[np.ndarray, "layers heads dim"]
    points: Int[np.ndarray, " points"]
    before: Float32[np.ndarray, "layers heads points dim"]
    after: Float32[np.ndarray, "layers heads points dim"]
    measured: Float32[np.ndarray, "layers heads points dim"]


def attention_outputs(
    q: Float[Tensor, "batch heads queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    visible: Visible,
    filler: Bool[Tensor, "batch keys"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None,
) -> Outputs:
    """Softmax attention in fp32, by blocks of query rows; a learned sink enters the denominator and adds nothing to the output."""
    kv_heads, n_queries = k.shape[1], q.shape[2]
    groups = q.shape[1] // kv_heads
    q, values = q.float() * scale, v.float()
    k_t = k.float().transpose(-1, -2)
    from_filler = values * filler[:, None, :, None]
    parts: list[tuple[Tensor, ...]] = []
    rows = max(16, min(n_queries, BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2])))

    def by_key_head(block: Tensor) -> Tensor:
        return block.unflatten(1, (kv_heads, groups)).flatten(2, 3)

    for first in range(0, n_queries, rows):
        last = min(first + rows, n_queries)

        def by_head(block: Tensor, size: int = last - first) -> Tensor:
            return block.unflatten(2, (groups, size)).flatten(1, 2)

        scores = by_head(by_key_head(q[:, :, first:last]) @ k_t)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias[:, :, first:last].float()
        scores = scores.masked_fill(~visible(first, last), float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks.float()[None, :, None, None])
        top = top.clamp(min=torch.finfo(torch.float32).min)  # a row that sees nothing (padding): exp(-inf), not NaN
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.float()[None, :, None, None] - top)
        total = total.clamp(min=torch.finfo(torch.float32).tiny)
        p = weights.div_(total)
        o = by_head(by_key_head(p) @ values)
        if bool(filler.any()):
            sigma = by_head(by_key_head(p) @ from_filler)
            mass = (p * filler[:, None, None]).sum(-1)
        else:
            sigma, mass = torch.zeros_like(o), torch.zeros_like(o[..., 0])
        parts.append((o, (top + total.log()).squeeze(-1), sigma, mass))
    return Outputs(*(torch.cat(part, dim=2) for part in zip(*parts, strict=True)))


#: Told of each measured attention call: layer, module, its outputs, and (query, key, value, mask, keywords) they were computed from.
Watcher = Callable[[int, nn.Module, Outputs, tuple[Any, ...]], None]


@contextmanager
def watching(
    model: nn.Module, layers: Sequence[int], filler: Bool[Tensor, "batch keys"], watcher: Watcher
) -> Generator[None]:
    """Inside the block the model's attention is computed here and shown to `watcher`, for each of `layers`.

    `filler` says which tokens of the rows are filler. The model and transformers' registries are as before once the block is left.
    """
    numbers = {id(module): n for n, module in enumerate(attention_modules(model), start=1)}
    nothing = torch.zeros_like(filler)

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layer = numbers.get(id(module))
        if layer is None:
            raise UnsupportedArchitecture(
                f"{type(module).__name__} computes attention outside the numbered layers; see docs/adding-a-model.md"
            )
        refuse_unknown(module, dropout, others)
        if query.shape[2] != key.shape[2]:
            raise UnsupportedArchitecture(
                f"layer {layer} attends from {query.shape[2]} queries to {key.shape[2]} keys; capture needs the whole prompt in one "
                "forward: call the model with use_cache=False"
            )
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        mask, bias = mask_of(attention_mask, module, query, key)
        asked = layer in layers
        score: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": s_aux, "bias": bias}
        found = attention_outputs(query, key, value, visible=mask, filler=filler if asked else nothing, **score)
        if asked:
            given = {"scaling": scale, "softcap": softcap, "s_aux": s_aux, **others}
            known = {name: what for name, what in given.items() if what is not None}
            watcher(layer, module, found, (query, key, value, mask, known))
        return found.o.to(query.dtype).transpose(1, 2).contiguous(), None

    def mask(**arguments: Any) -> LazyMask:
        return LazyMask(arguments)

    with own_attention(model, attention, mask):
        yield


# ---- one pair --------------------------------------------------------------------------------------------------------


def displacement(
    model: LoadedModel,
    without: Prompt,
    with_filler: Prompt,
    *,
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    tokens: Tokens = "after",
    points: int = 0,
    rng: np.random.Generator | None = None,
) -> Displacement:
    """The displacement of every head's outputs between the two prompts of one item.

    Where tokens are inserted a third row runs beside the two: the original tokens alone, at the positions they have with filler. What it
    differs by from the first is the doing of the positions. `points` tokens, drawn with `rng`, are kept as vectors.
    """
    for layer in layers:
        if not 1 <= layer <= model.loaded_layers:
            raise BadStudy(f"no layer {layer}: layers 1 to {model.loaded_layers} are loaded (numbered from 1)")
    where = align(without, with_filler)
    compared = [n for n, place in enumerate(where) if tokens == "original" or _moved(with_filler, n, place)]
    inserted = len(with_filler) > len(without)
    rows: list[tuple[Prompt, Sequence[int] | None]] = [(without, without.position_ids)]
    if inserted:
        rows.append((without, where))
    rows.append((with_filler, with_filler.position_ids))
    filler = torch.zeros(len(rows), max(len(prompt) for prompt, _ in rows), dtype=torch.bool, device=model.device)
    filler[-1, with_filler.positions("filler")] = True
    kept = [head - 1 for head in heads] if heads is not None else list(range(model.heads))
    shown = np.arange(0)
    if points and compared:
        chooser = rng if rng is not None else np.random.default_rng(0)
        shown = np.sort(chooser.choice(len(compared), min(points, len(compared)), replace=False))
    here = torch.tensor(compared, dtype=torch.long, device=model.device)
    there = torch.tensor([where[n] for n in compared], dtype=torch.long, device=model.device)
    found: dict[int, _Sums] = {}

    def watcher(layer: int, module: nn.Module, outputs: Outputs, _: tuple[Any, ...]) -> None:
        found[layer] = _sums_of(outputs, kept, here, there, inserted, shown)
        bad = next((n for n in range(len(kept)) if not found[layer].finite(n)), None)
        if bad is not None:
            raise BadAttention(
                f"attention outputs are not finite (NaN or infinite) in {head_name(layer, kept[bad] + 1)}; the weights or the dtype break "
                "it: try --dtype float32, or check the checkpoint"
            )

    with watching(model.model, layers, filler, watcher):
        _forward(model, rows)
    missing = sorted(set(layers) - set(found))
    if missing:
        raise UnsupportedArchitecture(
            f"{model.family!r} did not compute layer {missing[0]}'s attention through transformers' attention registry, so it cannot be "
            "measured; see docs/adding-a-model.md"
        )
    by_layer = [found[layer] for layer in layers]
    if len({one.output.shape for one in by_layer}) > 1:
        raise UnsupportedArchitecture(
            f"{model.family!r} has heads of different sizes in different layers; measure those of one size at a time with --layers"
        )

    def stacked(name: str) -> np.ndarray:
        return np.stack([getattr(one, name) for one in by_layer])

    return Displacement(
        prompt=with_filler,
        layers=list(layers),
        heads=[n + 1 for n in kept],
        tokens=len(compared),
        sums={name: np.stack([one.scalars[name] for one in by_layer]) for name in SCALARS},
        output=stacked("output"),
        displacement=stacked("displacement"),
        direction=stacked("direction"),
        points=np.array(compared, dtype=np.int64)[shown],
        before=stacked("before"),
        after=stacked("after"),
        measured=stacked("measured"),
    )


def _moved(prompt: Prompt, number: int, place: int) -> bool:
    """Whether an original token (its number without filler, its place with) can be moved by what was inserted before it."""
    return place > number or (prompt.position_ids is not None and prompt.position_ids[place] != place)


def _forward(model: LoadedModel, rows: Sequence[tuple[Prompt, Sequence[int] | None]]) -> None:
    longest = max(len(prompt) for prompt, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.long)
    positions = torch.arange(longest).repeat(len(rows), 1)
    for row, (prompt, given) in enumerate(rows):
        last = max(given) if given is not None else len(prompt) - 1
        if last >= model.context:
            raise BadPrompt(
                f"item {prompt.item!r} reaches position {last}, but {model.label} takes {model.context} tokens; leave it out (--limit), "
                "shorten it, or use a smaller --length"
            )
        ids[row, : len(prompt)] = torch.tensor(prompt.token_ids)
        real[row, : len(prompt)] = 1
        if given is not None:
            positions[row, : len(prompt)] = torch.tensor(given)
    if "position_ids" not in inspect.signature(model.model.forward).parameters:
        raise UnsupportedArchitecture(
            f"{model.family!r} takes no position ids, so what positions do cannot be told from what filler does; see docs/adding-a-model.md"
        )
    with torch.inference_mode():
        # Always with a mask: without one, transformers takes a jump in the positions for the seam between two packed texts.
        model.model(
            input_ids=ids.to(model.device),
            attention_mask=real.to(model.device),
            position_ids=positions.to(model.device),
            use_cache=False,
        )


@dataclass(frozen=True)
class _Sums:
    """One layer's part of a `Displacement`."""

    scalars: dict[str, Float64[np.ndarray, " heads"]]
    output: Float64[np.ndarray, "heads dim"]
    displacement: Float64[np.ndarray, "heads dim"]
    direction: Float64[np.ndarray, "heads dim"]
    before: Float32[np.ndarray, "heads points dim"]
    after: Float32[np.ndarray, "heads points dim"]
    measured: Float32[np.ndarray, "heads points dim"]

    def finite(self, head: int) -> bool:
        return bool(np.isfinite(self.output[head]).all() and np.isfinite(self.displacement[head]).all())


def _sums_of(
    outputs: Outputs, heads: list[int], here: Tensor, there: Tensor, inserted: bool, shown: Int[np.ndarray, " points"]
) -> _Sums:
    """In fp64 from here on: what is left of a displacement is a small difference of large sums."""

    def of(values: Tensor, row: int, at: Tensor) -> Tensor:
        return values[row][heads][:, at].cpu().double()

    o, after, sigma = of(outputs.o, 0, here), of(outputs.o, -1, there), of(outputs.sigma, -1, there)
    log_z = of(outputs.log_z, -1, there)
    log_lambda = of(outputs.log_z, 0, here) - log_z
    kept = (1 - of(outputs.mass, -1, there)).clamp(min=torch.finfo(torch.float32).tiny)
    move = after - o
    size = move.norm(dim=-1, keepdim=True)
    directed = size > _NO_MOVE * o.norm(dim=-1, keepdim=True)
    unit = torch.where(directed, move / size.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    measured = log_lambda.clamp(max=_LARGEST).exp()[..., None] * o + sigma

    def squares(values: Tensor) -> np.ndarray:
        return values.square().sum((-2, -1)).numpy()

    scalars = {
        "log_lambda": log_lambda.sum(-1).numpy(),
        "log_kept": kept.log().sum(-1).numpy(),
        "outputs": squares(o),
        "moves": squares(move),
        "product": (o * move).sum((-2, -1)).numpy(),
        "directed": directed.double().sum((-2, -1)).numpy(),
        "left_measured": squares(after - measured),
        "left_kept": squares(after - (kept[..., None] * o + sigma)),
    }
    if inserted:
        alone = of(outputs.o, 1, here)
        ratio = (of(outputs.log_z, 1, here) - log_z).clamp(max=_LARGEST).exp()[..., None]
        scalars["left_shifted"] = squares(after - (ratio * alone + sigma))
        scalars["left_position"] = squares(after - alone)
        scalars["moves_position"] = squares(alone - o)
    else:
        nothing = np.full(len(heads), np.nan)
        # Without filler nothing is taken, and the form with its share is the trivial "no change".
        scalars |= dict.fromkeys(("left_kept", "left_shifted", "left_position", "moves_position"), nothing)
    at = torch.from_numpy(shown)
    return _Sums(
        scalars,
        *(values.sum(1).numpy() for values in (o, move, unit)),
        *(values[:, at].clamp(-_DRAWN, _DRAWN).float().numpy() for values in (o, after, measured)),
    )


# ---- checked before anything is measured -----------------------------------------------------------------------------


def prove_outputs(model: LoadedModel, prompt: Prompt, layers: Sequence[int]) -> dict[str, Any]:
    """Checks on the front of a real prompt; raises `ProofFailed`, else says how well each held.

    captured:    our outputs against the family's own eager attention, given the same queries, keys, values and mask
    entering:    what the output projection is really handed, head after head, against the same
    forward:     the model's hidden states are the same with the instrument on as without it
    restoration: after the instrument is taken off, the model's outputs are as before, to the bit where the machine repeats itself
    """
    ids = torch.tensor([prompt.token_ids[:_PROOF_TOKENS]], device=model.device)
    worst = {"captured": 0.0, "entering": 0.0}
    expected: dict[int, Tensor] = {}

    def hidden() -> Tensor:
        with torch.inference_mode():
            return model.model(input_ids=ids, use_cache=False).last_hidden_state.float()

    def watcher(layer: int, module: nn.Module, outputs: Outputs, call: tuple[Any, ...]) -> None:
        eager = _eager_output(model, module, *call)
        ours = outputs.o.transpose(1, 2)
        _hold(model, layer, "the captured attention output", worst, "captured", ours, eager, _CAPTURED)
        expected[layer] = eager.flatten(2)

    def entering(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            # Each layer's matrices go as soon as they are compared.
            theirs, got = expected.pop(layer), given[0].reshape(1, ids.shape[1], -1)
            what = "what enters the output projection"
            if got.shape != theirs.shape:
                raise ProofFailed(
                    f"{model.label} layer {layer}: its output projection takes {got.shape[-1]} numbers per token, but its heads put out "
                    f"{theirs.shape[-1]}; this family needs an adapter, see docs/adding-a-model.md"
                )
            _hold(model, layer, what, worst, "entering", got, theirs, _ENTERING[model.dtype])

        return hook

    before = hidden()
    if not bool(torch.isfinite(before).all()):
        raise BadAttention(
            f"{model.label}'s hidden states are not finite (NaN or infinite) after layer {model.loaded_layers}; the weights or the dtype "
            "break it: try --dtype float32, or check the checkpoint"
        )
    modules = attention_modules(model.model)
    with ExitStack() as stack:
        for layer in layers:
            handle = _output_projection(model, modules[layer - 1]).register_forward_pre_hook(entering(layer))
            stack.callback(handle.remove)
        with watching(model.model, layers, torch.zeros_like(ids, dtype=torch.bool), watcher):
            inside = hidden()
    after = hidden()
    if not (forward := _gap(before, inside)) <= _HIDDEN[model.dtype]:
        raise ProofFailed(
            f"{model.label}: the instrument changes the model's hidden states (by {forward:.2g} of a token's size, "
            f"{_HIDDEN[model.dtype]:g} allowed in {model.dtype}); see docs/adding-a-model.md"
        )
    restored = "same bits"
    if not torch.equal(before, after):
        if not (gap := _gap(before, after)) <= _RESTORED[model.dtype]:
            raise ProofFailed(
                f"{model.label}: taking the instrument off did not give back the model's own outputs (they differ by {gap:.2g} of a token's "
                "size); please report this"
            )
        restored = f"to {gap:.1g} (this machine does not repeat a forward bit for bit)"
    return {**worst, "forward": forward, "restoration": restored, "tokens": ids.shape[1]}


def _output_projection(model: LoadedModel, module: nn.Module) -> nn.Module:
    """The last part of an attention module that multiplies by a matrix; norms have vectors."""
    found = [part for part in module.children() if getattr(getattr(part, "weight", None), "ndim", 0) == 2]
    if not found:
        raise UnsupportedArchitecture(
            f"{model.family!r}: {type(module).__name__} has no output projection of its own, so its heads' outputs cannot be proved; see "
            "docs/adding-a-model.md"
        )
    return found[-1]


def _eager_output(
    model: LoadedModel, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Visible, given: Mapping[str, Any]
) -> Tensor:
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ProofFailed(
            f"{model.family!r} has no eager attention to hold our numbers against, so they cannot be proved; see docs/adding-a-model.md"
        )
    seen = mask(0, q.shape[2])
    additive = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, torch.finfo(torch.float32).min)
    return eager(module, q.float(), k.float(), v.float(), additive, **given)[0]


def _hold(
    model: LoadedModel,
    layer: int,
    what: str,
    worst: dict[str, float],
    name: str,
    ours: Tensor,
    theirs: Tensor,
    allowed: float,
) -> None:
    gap = float((ours.float() - theirs).norm() / theirs.norm().clamp(min=torch.finfo(torch.float32).tiny))
    if not gap <= allowed:
        raise ProofFailed(
            f"{model.label} layer {layer}: {what} differs from eager attention's by {gap:.2g} of its size, more than {allowed:g} allowed; "
            "this family needs an adapter, see docs/adding-a-model.md"
        )
    worst[name] = max(worst[name], gap)


def _gap(first: Tensor, second: Tensor) -> float:
    """The relative change of a token's hidden state, mean over tokens (some have states a hundred times larger than the rest)."""
    change = (first - second).norm(dim=-1)
    return float((change / first.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)).mean())
