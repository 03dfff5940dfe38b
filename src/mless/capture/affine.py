"""How filler moves a head's output o = P·V (before the output projection), by token and layer.

The prompts of a pair run as rows of one forward, so both outputs of a layer exist together. Sums are taken at once, and only one layer's
outputs are held at a time. The definitions are in docs/affine.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor, nn

from mless.capture.cutting import cut_attached
from mless.capture.positions import check_reach, own_positions
from mless.capture.seam import Call, attending
from mless.changes import Cut
from mless.errors import BadAttention, UnsupportedArchitecture
from mless.kernels.signature import Visible
from mless.kernels.streaming import BLOCK_ELEMENTS
from mless.models import LoadedModel
from mless.prompting import align
from mless.results.schemas import AFFINE_SCALARS
from mless.values import Prompt, head_name, numbers_of

#: The tokens compared: the original tokens after the filler, or all of them. Those before it cannot see it.
Tokens = Literal["after", "original"]

#: Below this share of the output's size a displacement is rounding and has no direction.
_NO_MOVE = 1e-6

#: Largest λ is e³⁰⁰: scores in the hundreds can move so far (Qwen 2's layer 2), and λ² must stay finite.
_LARGEST = 300.0

#: Largest fp32 number; a predicted point of the picture may lie beyond it.
_DRAWN = 1e30


@dataclass(frozen=True)
class Outputs:
    """One attention call: P·V of every query, the log of its softmax's denominator, and the filler's part of both."""

    o: Float32[Tensor, "batch heads queries dim"]
    log_z: Float32[Tensor, "batch heads queries"]
    sigma: Float32[Tensor, "batch heads queries dim"]
    mass: Float32[Tensor, "batch heads queries"]


@dataclass(frozen=True)
class Displacement:
    """What one item's pair of prompts says of every head, as sums over the tokens compared.

    `sums` go by the names in `AFFINE_SCALARS`; NaN where a condition has no such thing. `output`, `displacement` and `direction` are the sums of
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


@contextmanager
def watching(
    model: nn.Module,
    layers: Sequence[int],
    filler: Bool[Tensor, "batch keys"],
    watcher: Callable[[Call, Outputs], None],
) -> Generator[None]:
    """Inside the block the model's attention is computed here, and each call of `layers` shown to `watcher` with its outputs.

    `filler` says which tokens of the rows are filler. Afterwards the model and transformers' registries are as before.
    """
    nothing = torch.zeros_like(filler)

    def attend(call: Call) -> Tensor:
        call.refuse_other_keys(call.query.shape[2])
        call.refuse_several_softmaxes()
        asked = call.layer in layers
        # A spread model has layers on other devices than its input.
        which = (filler if asked else nothing).to(call.query.device)
        found = attention_outputs(call.query, call.key, call.value, visible=call.mask, filler=which, **call.score)
        if asked:
            watcher(call, found)
        return found.o.to(call.query.dtype).transpose(1, 2).contiguous()

    with attending(model, attend):
        yield


# ---- one pair --------------------------------------------------------------------------------------------------------


# Over 60 lines: one pair of prompts, from forward to sums.
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
    cuts: Sequence[Cut] = (),
) -> Displacement:
    """The displacement of every head's outputs between the two prompts of one item.

    Where tokens are inserted a third row runs beside the two: the original tokens alone, at the positions they have with filler. Its
    difference from the first row is the effect of positions alone. `points` tokens, drawn with `rng`, are kept as vectors. `cuts` are in force in
    the row with the filler, and in no other.
    """
    layers = model.numbered(layers)
    where = align(without, with_filler)
    compared = [n for n, place in enumerate(where) if tokens == "original" or _moved(with_filler, n, place)]
    inserted = len(with_filler) > len(without)
    rows = [without, with_filler]
    if inserted:
        rows.insert(1, replace(without, position_ids=tuple(where)))
    filler = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool, device=model.device)
    filler[-1, with_filler.positions("filler")] = True
    kept = [head - 1 for head in numbers_of("all" if heads is None else heads, model.heads, "head")]
    shown = np.arange(0)
    if points and compared:
        chooser = rng if rng is not None else np.random.default_rng(0)
        shown = np.sort(chooser.choice(len(compared), min(points, len(compared)), replace=False))
    here = torch.tensor(compared, dtype=torch.long, device=model.device)
    there = torch.tensor([where[n] for n in compared], dtype=torch.long, device=model.device)
    found: dict[int, _Sums] = {}

    def watcher(call: Call, outputs: Outputs) -> None:
        sums = found[call.layer] = _sums_of(outputs, kept, here, there, inserted, shown)
        bad = next((n for n in range(len(kept)) if not sums.finite(n)), None)
        if bad is not None:
            raise BadAttention(
                f"attention outputs are not finite (NaN or infinite) in {head_name(call.layer, kept[bad] + 1)}; the weights or the dtype break "
                "it: try --dtype float32, or check the checkpoint"
            )

    with ExitStack() as stack:
        if cuts:
            handle = stack.enter_context(cut_attached(model, cuts, [with_filler], answer=False))
            handle.rows([*[None] * (len(rows) - 1), with_filler], list(map(len, rows)))
        stack.enter_context(watching(model.model, layers, filler, watcher))
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
        sums={name: np.stack([one.scalars[name] for one in by_layer]) for name in AFFINE_SCALARS},
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


def _forward(model: LoadedModel, rows: Sequence[Prompt]) -> None:
    """One forward of all rows, padded on the right."""
    check_reach(model, rows)
    longest = max(map(len, rows))
    positions = own_positions(model, rows, longest)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, prompt in enumerate(rows):
        ids[row, : len(prompt)] = torch.tensor(prompt.token_ids)
        real[row, : len(prompt)] = 1
    moved = {} if positions is None else {"position_ids": positions.to(model.device)}
    with torch.inference_mode():
        model.model(input_ids=ids.to(model.device), attention_mask=real.to(model.device), use_cache=False, **moved)


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
        return values[row][heads][:, at.to(values.device)].cpu().double()

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
