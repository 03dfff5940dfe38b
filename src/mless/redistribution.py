"""ARM, activation redistribution: the smallest activations of a layer keep their sign and get a random magnitude (docs/arm.md).

`redistribute` is the pure function. `arm` and `attach_arm` put it after the non-linearity of a transformers model's MLPs with module hooks,
and remove it again. Every number it draws is a function of (row's seed, position among the row's real tokens, unit). With scope ``token``
every statistic is the token's own. So a row's result depends neither on its batch nor on how its tokens are divided into calls.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mless.arm_rules import ARM_RULES, ArmRule
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.kernels import redistributing
from mless.models import LoadedModel
from mless.models.activations import ActivationPoint, activation_points, decoder_of
from mless.values import MAD_TO_SD, ArmSettings, arm_settings

__all__ = ["ArmHandle", "arm", "attach_arm", "attached", "redistribute"]

#: MLPs that have ARM already: a second ARM would redistribute the first one's values.
_PLACED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


# ---- the pure function -----------------------------------------------------------------------------------------------


def redistribute(
    activations: Float[Tensor, "rows tokens units"],
    settings: ArmSettings | None = None,
    *,
    real: Bool[Tensor, "rows tokens"] | None = None,
    positions: Int[Tensor, "rows tokens"] | None = None,
    seeds: Int[Tensor, " rows"] | None = None,
    **parameters: Any,
) -> Float[Tensor, "rows tokens units"]:
    """The activations with the smallest of them redistributed; the input is left as it is.

    Give `settings`, or their fields: ``redistribute(a, c=0.13, p1=99.5, scope="tensor")``. `real` marks the tokens that are not padding (all,
    by default): padding enters no statistic and is returned unchanged. `positions` counts each row's real tokens from 0. `seeds` gives each
    row its own seed instead of the settings'. What is drawn depends on these two only.
    """
    if settings is None:
        settings = arm_settings(**parameters)
    elif parameters:
        raise BadStudy(
            f"redistribute takes settings or their fields, got both: {', '.join(sorted(parameters))}; leave one out"
        )
    return _redistributed(activations, settings, ARM_RULES.get(settings.rule), real, positions, seeds)


def _redistributed(
    activations: Float[Tensor, "rows tokens units"],
    settings: ArmSettings,
    rule: ArmRule,
    real: Bool[Tensor, "rows tokens"] | None,
    positions: Int[Tensor, "rows tokens"] | None,
    seeds: Int[Tensor, " rows"] | None,
) -> Float[Tensor, "rows tokens units"]:
    """`redistribute` with the rule already looked up, because a compiler cannot trace a search for plugins."""
    if not isinstance(activations, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadStudy(f"redistribute takes a tensor of rows × tokens × units, got {type(activations).__name__}")
    if activations.ndim != 3 or not activations.is_floating_point():
        raise BadStudy(
            f"redistribute takes floating-point activations of rows × tokens × units, got {activations.dtype} of shape {tuple(activations.shape)}"
        )
    rows, tokens, units = activations.shape
    if not activations.numel():
        return activations.clone()
    for what, given, shape in (
        ("real", real, (rows, tokens)),
        ("positions", positions, (rows, tokens)),
        ("seeds", seeds, (rows,)),
    ):
        if given is not None and tuple(given.shape) != shape:
            raise BadStudy(f"redistribute: {what} must have the shape {shape}, got {tuple(given.shape)}")
    if redistributing.serves(settings, rule) and redistributing.fits(activations):
        out = redistributing.rows(activations, settings, positions=positions, seeds=seeds)
        return out if real is None else torch.where(real[..., None], out, activations)
    if positions is None:
        positions = torch.arange(tokens, device=activations.device).expand(rows, tokens)
    if seeds is None:
        seeds = torch.full((rows,), settings.seed, dtype=torch.long, device=activations.device)
    shape = {"token": (rows * tokens, units), "sequence": (rows, tokens * units), "tensor": (1, rows * tokens * units)}
    pools = activations.reshape(shape[settings.scope])
    counted = None
    if real is not None and settings.scope != "token":
        counted = real[..., None].expand(-1, -1, units).reshape(pools.shape)
    chosen, top, bottom = _choose(pools, counted, settings)
    share = uniform(seeds, positions, units).reshape(pools.shape)
    values = pools.float()
    drawn = torch.where(values < 0, -share * bottom, share * top)
    out = torch.where(chosen, rule.new(values, drawn).to(pools.dtype), pools).reshape(activations.shape)
    return out if real is None else torch.where(real[..., None], out, activations)


def _choose(
    pools: Float[Tensor, "pools values"], counted: Bool[Tensor, "pools values"] | None, settings: ArmSettings
) -> tuple[Bool[Tensor, "pools values"], Float[Tensor, "pools 1"], Float[Tensor, "pools 1"]]:
    """Which values are the k smallest of each pool, and how far the positive and the negative ones may go.

    By sorting: exact, without a host sync, the same on every device. Values that do not count sort last.
    """
    size = pools.shape[-1]
    n = counted.sum(-1, keepdim=True) if counted is not None else torch.full_like(pools[:, :1], size, dtype=torch.long)
    magnitude = pools.abs()
    if counted is not None:
        magnitude = magnitude.masked_fill(~counted, math.inf)
    ordered = magnitude.sort(-1).values
    last = torch.clamp(n - 1, min=0)
    if settings.fraction is not None:
        k = torch.round(n.double() * settings.fraction).long()
    else:
        assert settings.c is not None
        median = ordered.gather(-1, last // 2)
        # In the activations' own precision, as any other value of theirs.
        deviation = (magnitude - median).abs()
        mad = deviation.sort(-1).values.gather(-1, last // 2)
        below = magnitude.float() < mad.float() * (MAD_TO_SD * settings.c)
        least, most = (torch.round(n.double() * share).long() for share in (settings.p_min, settings.p_max))
        k = torch.minimum(torch.maximum(below.sum(-1, keepdim=True), least), most)
    k = torch.minimum(torch.clamp(k, min=1), n)
    threshold = ordered.gather(-1, torch.clamp(k - 1, min=0))
    less = magnitude < threshold
    equal = magnitude == threshold
    # Of equals the first: cumsum counts them in the order of units.
    chosen = less | (equal & (equal.cumsum(-1) <= k - less.sum(-1, keepdim=True)))
    signed = pools if counted is None else pools.masked_fill(~counted, math.inf)
    signed = signed.sort(-1).values
    place = last.double() * (settings.p1 / 100)
    low = place.floor().long()
    a, b = signed.gather(-1, low).float(), signed.gather(-1, torch.minimum(low + 1, last)).float()
    top = a + (b - a) * (place - low).float()
    if counted is not None:
        chosen &= counted
        top = top.masked_fill(n == 0, 0.0)
    return chosen, top.clamp(min=0), (-signed[:, :1].float()).clamp(min=0)


def uniform(
    seeds: Int[Tensor, " rows"], positions: Int[Tensor, "rows tokens"], units: int
) -> Float[Tensor, "rows tokens units"]:
    """Numbers in [0, 1), each a function of its row's seed, its position and its unit: a counter through a 32-bit mixer, 16 bits for each of two units."""
    seeds = seeds.long()[:, None]
    key = _mix(positions.long() * _STEP + _mix((seeds & _LOW) + _mix(seeds >> 32)))
    pair = torch.arange((units + 1) // 2, device=key.device)
    mixed = _mix(key[..., None] + pair * _STEP)
    return torch.stack([mixed & 0xFFFF, mixed >> 16], dim=-1).flatten(-2)[..., :units].float() * 2.0**-16


_LOW = 0xFFFFFFFF
#: 2³² over the golden ratio: the steps of a Weyl sequence.
_STEP = 0x9E3779B9


def _mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """MurmurHash3's finaliser: every bit of the input reaches every bit of the output. Its 32 bits are held in 64, because torch lacks
    unsigned integers.
    """
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)


def compile_redistribution(model: LoadedModel, settings: ArmSettings, *, attached: bool) -> None:
    """Launch ARM's kernel once, where it serves the model, as ARM in the model does (`attached`) or as `redistribute` does."""
    point = activation_points(model.model, settings.layers)[0]
    up = getattr(point.owner, "up_proj", None)
    if not isinstance(up, nn.Linear) or not up.weight.is_cuda:
        return
    gate = torch.zeros(1, 1, len(up.weight), dtype=up.weight.dtype, device=up.weight.device)
    if not redistributing.fits(gate) or not redistributing.serves(settings, ARM_RULES.get(settings.rule)):
        return
    seeds, positions = (torch.zeros(shape, dtype=torch.long, device=gate.device) for shape in ((1,), (1, 1)))
    act = redistributing.activation_of(point.act)
    if not attached:
        redistributing.rows(gate, settings, seeds=seeds)
    elif act is not None:
        redistributing.rows(gate, settings, seeds=seeds, positions=positions, up=gate.clone(), act=act)


# ---- in a model ------------------------------------------------------------------------------------------------------


@contextmanager
def arm(model: nn.Module | LoadedModel, **parameters: Any) -> Generator[ArmHandle]:
    """Inside the block `model` runs with ARM: ``with mless.arm(model, c=0.13, p1=99.5, layers=[1]): model.generate(…)``.

    Parameters are those of `ArmSettings` and `preset`, a model's name in table 9. Afterwards, even on error, the model is as before. A
    model from `mless.load` works too; for pipelines give ``pipe.model``. A `torch.compile`d model is compiled again on entering and
    leaving.
    """
    with attached(model, arm_settings(**parameters)) as handle:
        yield handle


def attach_arm(model: nn.Module | LoadedModel, **parameters: Any) -> ArmHandle:
    """ARM without a block: it stays until the returned handle's `detach()`."""
    return ArmHandle(model, arm_settings(**parameters))


@contextmanager
def attached(model: nn.Module | LoadedModel, settings: ArmSettings) -> Generator[ArmHandle]:
    """`arm`, for settings that are there already."""
    handle = ArmHandle(model, settings)
    try:
        yield handle
    finally:
        handle.detach()


class _Call(NamedTuple):
    """What the forward under way says of its tokens; None where it says nothing."""

    shape: tuple[int, int]
    positions: Int[Tensor, "rows tokens"] | None
    real: Bool[Tensor, "rows tokens"] | None
    seeds: Int[Tensor, " rows"] | None


class ArmHandle:
    """ARM in a model. `rows` gives rows seeds and positions of their own; `detach` takes it out, once or more often."""

    def __init__(self, model: Any, settings: ArmSettings) -> None:
        if isinstance(model, LoadedModel):
            model = model.model
        if not isinstance(model, nn.Module):
            raise BadStudy(
                f"ARM goes into a transformers model (a torch module), got {type(model).__name__}; for a pipeline give pipe.model"
            )
        self.settings = settings
        self._call: _Call | None = None
        self._given: tuple[Tensor | None, Tensor | None] = (None, None)
        self._compiled = _refuse_captured(model)
        plain: nn.Module = getattr(model, "_orig_mod", model)
        points = activation_points(plain, settings.layers)
        for point in points:
            if point.owner in _PLACED:
                raise BadStudy(
                    f"ARM is in layer {point.layer} already, and a second one would redistribute what the first has drawn; leave its block, or call "
                    "detach() on its handle, first"
                )
        decoder, _ = decoder_of(plain)
        self._names = tuple(inspect.signature(decoder.forward).parameters)
        self._owners = [point.owner for point in points]
        self._hooks = [
            decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            decoder.register_forward_hook(self._end, always_call=True),
        ]
        self._patched: list[nn.Module] = []
        for point in points:
            # Before any other hook, so that other hooks see the values the model uses.
            self._hooks.append(point.act.register_forward_hook(_Hook(self, point), prepend=True))
            if point.gated and "forward" not in vars(point.owner):
                point.owner.forward = _Fused(self, point)
                self._patched.append(point.owner)
        _PLACED.update(self._owners)
        if self._compiled:
            torch.compiler.reset()

    def rows(
        self, *, seeds: Int[Tensor, " rows"] | None = None, positions: Int[Tensor, "rows tokens"] | None = None
    ) -> None:
        """From the next forward on: a seed for each row, and positions where the forward's own arguments do not tell them.

        The tensors are read when a forward runs, so an engine may hand over buffers and fill them between forwards.
        """
        self._given = (seeds, positions)

    def detach(self) -> None:
        """Take ARM out; the model is as it was."""
        for hook in self._hooks:
            hook.remove()
        for owner in self._patched:
            if isinstance(vars(owner).get("forward"), _Fused):
                del owner.forward
        for owner in self._owners:
            _PLACED.discard(owner)
        if self._compiled and self._hooks:
            torch.compiler.reset()
        self._hooks, self._patched, self._owners, self._call = [], [], [], None

    # ---- what the forward under way says of its tokens

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Traced code stays in the compiled model, however it is compiled.
        self._compiled |= torch.compiler.is_compiling()
        kwargs = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        given = kwargs.get("inputs_embeds")
        if given is None:
            given = kwargs.get("input_ids")
        if not isinstance(given, Tensor):
            return
        rows, tokens = int(given.shape[0]), int(given.shape[1])
        mask = kwargs.get("attention_mask")
        positions = self._given[1]
        real: Tensor | None = None
        if isinstance(mask, Tensor) and mask.ndim == 2:
            real = mask[:, -tokens:].bool()
            if positions is None:
                positions = (mask.long().cumsum(-1)[:, -tokens:] - 1).clamp(min=0)
        elif mask is not None and self.settings.scope != "token":
            raise UnsupportedArchitecture(
                f"ARM with scope {self.settings.scope!r} must know which tokens are padding, and this forward brings a ready-made mask "
                f"({type(mask).__name__}); give a 2-D attention_mask, or use scope 'token'"
            )
        if positions is None:
            positions = kwargs.get("position_ids")
            if positions is not None and positions.shape[0] != rows:
                positions = positions.expand(rows, -1)
        cache = kwargs.get("past_key_values")
        if positions is None and cache is not None:
            positions = (torch.arange(tokens, device=given.device) + cache.get_seq_length()).expand(rows, tokens)
        self._call = _Call((rows, tokens), positions, real, self._given[0])

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call = None

    def context(self, activations: Tensor, layer: int) -> _Call:
        """Rows and tokens of what a layer's MLP is given, and what is known of them; an MLP called by itself knows nothing."""
        call = self._call
        shape = activations.shape
        if call is None:
            return _Call((shape[0], shape[1]) if len(shape) == 3 else (1, math.prod(shape[:-1])), None, None, None)
        rows, tokens = call.shape
        if math.prod(shape[:-1]) != rows * tokens:
            raise UnsupportedArchitecture(
                f"ARM: layer {layer}'s MLP was given {math.prod(shape[:-1])} tokens in a forward of {rows} × {tokens}, so they cannot be told "
                "apart; see docs/adding-a-model.md"
            )
        # Layers draw apart; layer 1 as the pure function does.
        seeds = call.seeds if call.seeds is None or layer == 1 else call.seeds + _salt(layer)
        # A model spread over devices has layers elsewhere than its input.
        place = activations.device
        return _Call(call.shape, _at(call.positions, place), _at(call.real, place), _at(seeds, place))


def _at(one: Tensor | None, device: torch.device) -> Tensor | None:
    return one if one is None or one.device == device else one.to(device)


class _Hook:
    """Redistributes what a layer's activation module returns."""

    def __init__(self, handle: ArmHandle, point: ActivationPoint) -> None:
        self._handle, self._layer = handle, point.layer
        self._settings = of_layer(handle.settings, point.layer)
        self._rule = ARM_RULES.get(handle.settings.rule)

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        call = self._handle.context(output, self._layer)
        shaped = output.reshape(*call.shape, output.shape[-1])
        new = _redistributed(shaped, self._settings, self._rule, call.real, call.positions, call.seeds)
        return new.reshape(output.shape)


class _Fused:
    """A gated MLP's forward in one kernel: activation, selection, replacement, times `up`. Where that fails, its own forward with the hook."""

    def __init__(self, handle: ArmHandle, point: ActivationPoint) -> None:
        self._handle, self._point = handle, point
        self._owner: Any = point.owner
        self._settings = of_layer(handle.settings, point.layer)
        self._forward = point.owner.forward
        served = redistributing.serves(handle.settings, ARM_RULES.get(handle.settings.rule))
        self._act: redistributing.Act | None = redistributing.activation_of(point.act) if served else None

    def __call__(self, x: Tensor) -> Tensor:
        owner = self._owner
        # Other hooks on the activation, added at any time, must be called; then it is computed separately.
        if self._act is None or _hooks(self._point.act) != 1 or not redistributing.fits(x):
            return self._forward(x)
        gate, up = owner.gate_proj(x), owner.up_proj(x)
        if not redistributing.fits(gate) or up.requires_grad:
            # Too many units, or projections that are being trained: the kernel knows no gradient.
            return self._forward(x)
        call = self._handle.context(gate, self._point.layer)
        shape = gate.shape
        if shape[:-1] != call.shape:
            gate, up = gate.reshape(*call.shape, shape[-1]), up.reshape(*call.shape, shape[-1])
        # Statistics per token need no padding mask, and the values of padding are not used.
        hidden = redistributing.rows(
            gate, self._settings, positions=call.positions, seeds=call.seeds, up=up, act=self._act
        )  # fmt: skip
        return owner.down_proj(hidden if shape == hidden.shape else hidden.reshape(shape))


def _hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]


def _salt(layer: int) -> int:
    """What sets a layer's seeds apart from layer 1's."""
    return (layer - 1) << 40


def of_layer(settings: ArmSettings, layer: int) -> ArmSettings:
    return replace(settings, seed=settings.seed + _salt(layer))


def _refuse_captured(model: nn.Module) -> bool:
    """Whether the model is compiled. One compiled into captured graphs would go on replaying them without ARM: refused."""
    compiled = False
    for holder in (model, *model.modules()):
        context = getattr(holder, "dynamo_ctx", None)
        call = getattr(holder, "_compiled_call_impl", None) or vars(holder).get("_compiled_call")
        if context is None and call is None:
            continue
        compiled = True
        config: Mapping[str, Any] = getattr(context, "compiler_config", None) or {}
        if call is not None:
            given = getattr(call, "get_compiler_config", None)
            config = cast("Mapping[str, Any]", (given() if callable(given) else None) or {})
        if config.get("triton.cudagraphs"):
            raise UnsupportedArchitecture(
                f"{type(holder).__name__} is compiled with captured graphs (mode reduce-overhead or max-autotune), which would replay without ARM; attach "
                "ARM before compiling, or compile without captured graphs"
            )
    return compiled
