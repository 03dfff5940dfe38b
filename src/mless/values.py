"""The values shared by all packages: items, conditions, spans, prompts. Plain and frozen."""

from __future__ import annotations

import importlib
import operator
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, SupportsIndex, cast, get_args

from mless import arm_rules
from mless.changes import SPAN_NAMES, Cut, Patch, SpanName, cut_of, patch_of
from mless.conditions import CONDITION_KINDS, Kind
from mless.errors import BadPrompt, BadStudy
from mless.gates import shown

#: `end` is the end of the user's turn; `before-answer` is after the assistant's header, the prompt's last place. One place in raw prompts.
Placement = Literal["before-system", "before-question", "end", "before-answer", "anywhere"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

#: Where an original query's attention can go: the spans, and a head's learned sink.
MASS_NAMES: tuple[str, ...] = (*SPAN_NAMES, "sink")

QuerySet = Literal["later", "original"]
QUERY_SETS: tuple[QuerySet, ...] = get_args(QuerySet)

#: The longest prompt that runs in one forward; a longer one runs alone, in parts.
WHOLE_PROMPT = 131_072


#: A change of accuracy smaller than this would not matter, as a share: two points.
USUAL_MARGIN = 0.02


class Shown:
    """A value that notebooks show as a page in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # By name: what draws it stands above everything that is shown.
        return importlib.import_module("mless.explorer.notebooks").html_of(self)


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a data set."""

    id: str
    question: str
    answer: str | None = None
    #: What related items have in common; statistics then count it as one unit.
    cluster: str | None = None
    #: A worked solution that ends in the answer.
    solution: str | None = None
    #: The options of a multiple-choice question, A first.
    choices: tuple[str, ...] | None = None
    #: Which of `choices` is right, counted from 0; `answer` is as the data give it.
    right: int | None = None


#: A median absolute deviation times this is the standard deviation, for values that are normally distributed.
MAD_TO_SD = 1.4826

Scope = Literal["token", "sequence", "tensor"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class ArmSettings:
    """What ARM does to the activations of `layers` (numbered from 1); docs/arm.md says each in full.

    The share of redistributed values is `fraction`, or the share below 1.4826 · MAD(|a|) · `c`, kept within `p_min` and `p_max`. Exactly
    one of `fraction` and `c` is given. `p1` is the percentile that bounds the new positive values. `scope` says which values are pooled:
    each token's, those of the row's real tokens in the call, or all of the call. `rule`, a name in `arm_rules.ARM_RULES`, says whether the new
    value replaces the old or is added.
    """

    c: float | None = None
    fraction: float | None = None
    p_min: float = 0.02
    p_max: float = 0.25
    p1: float = 99.5
    layers: tuple[int, ...] = (1,)
    scope: Scope = "token"
    rule: str = "replace"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.c is None) == (self.fraction is None):
            got = "neither" if self.c is None else f"c = {self.c} and fraction = {self.fraction}"
            raise BadStudy(
                f"ARM takes c (the share follows from the data) or fraction (the share itself), got {got}; give one of them"
            )
        if self.c is not None and not 0 <= self.c < float("inf"):
            raise BadStudy(f"ARM's c must be 0 or more, got {self.c}; published values lie between 0.1 and 0.32")
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise BadStudy(
                f"ARM's fraction must lie between 0 and 1, both excluded, got {self.fraction}; published: 0.25"
            )
        if not 0 < self.p_min <= self.p_max < 1:
            raise BadStudy(
                f"ARM needs 0 < p_min ≤ p_max < 1, got p_min = {self.p_min} and p_max = {self.p_max}; published: 0.02 and 0.25"
            )
        if not 0 < self.p1 <= 100:
            raise BadStudy(
                f"ARM's p1 is a percentile above 0 and at most 100, got {self.p1}; published values lie between 85 and 99.5"
            )
        if not self.layers:
            raise BadStudy("ARM needs at least one layer; published: layers = [1]")
        for layer in self.layers:
            if layer < 1:
                raise BadStudy(f"ARM: no layer {layer}: layers are numbered from 1")
        if len(set(self.layers)) < len(self.layers):
            raise BadStudy(f"ARM is named twice for one layer: {list(self.layers)}; name each layer once")
        if self.scope not in SCOPES:
            raise BadStudy(f"ARM: no scope {self.scope!r}; there are: {', '.join(SCOPES)}")
        arm_rules.ARM_RULES.check(self.rule)
        if self.seed < 0:
            raise BadStudy(f"ARM's seed must be 0 or more, got {self.seed}")


#: Table 9 of the paper, for MATH-500: what was published per model, by its name in small letters.
ARM_PRESETS: dict[str, ArmSettings] = {
    "qwen2.5-math-1.5b": ArmSettings(c=0.13, p1=99.5),
    "qwen2.5-math-7b": ArmSettings(c=0.1, p1=95.0),
    "qwen2.5-7b-instruct": ArmSettings(c=0.1, p1=99.5),
    "llama-3.1-8b-instruct": ArmSettings(c=0.32, p1=90.0),
    "gemma-3-4b-it": ArmSettings(fraction=0.25, p1=85.0),
    "gemma-3-27b-it": ArmSettings(fraction=0.25, p1=85.0),
}


#: ARM's two choices that paper, released code and mless make differently, by name. `row-stable` is what mless uses unless told otherwise.
ARM_VARIANTS: dict[str, dict[str, Any]] = {
    "row-stable": {"scope": "token", "rule": "replace"},
    "released": {"scope": "tensor", "rule": "replace"},
    "paper": {"scope": "tensor", "rule": "add"},
}


def arm_variant(one: ArmSettings) -> str | None:
    """The name of the variant that these settings are; None where they are none of them."""
    chosen = {"scope": one.scope, "rule": one.rule}
    return next((name for name, variant in ARM_VARIANTS.items() if variant == chosen), None)


def arm_settings(preset: str | None = None, variant: str | None = None, **given: Any) -> ArmSettings:
    """A preset's parameters, replaced by those `given`; the published c = 0.13 where no share is given.

    `preset` is a model of table 9, `variant` says as whom: row-stable (mless), released (the published code) or paper (its text).
    """
    if variant is not None:
        if variant not in ARM_VARIANTS:
            raise BadStudy(f"no variant {variant!r} of ARM; there are: {', '.join(ARM_VARIANTS)}")
        given = ARM_VARIANTS[variant] | {key: value for key, value in given.items() if value is not None}
    known = [field.name for field in fields(ArmSettings)]
    if unknown := sorted(given.keys() - set(known)):
        raise BadStudy(f"ARM takes no {', '.join(map(repr, unknown))}; it takes preset, variant, {', '.join(known)}")
    layers: Any = given.get("layers")
    if isinstance(layers, str):
        given["layers"] = tuple(parse_numbers(layers.replace("+", ","), 10_000, "layer"))
    elif layers is not None:
        given["layers"] = tuple(layers) if isinstance(layers, Iterable) else (layers,)
    for what in ("c", "fraction", "p_min", "p_max", "p1", "seed"):
        value = given.get(what)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BadStudy(f"ARM's {what} must be a number, got {value!r}")
    for layer in given.get("layers") or ():
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise BadStudy(f"ARM's layers must be whole numbers from 1, got {layer!r}")
    if preset is None:
        if given.get("c") is None and given.get("fraction") is None:
            given["c"] = 0.13
        return ArmSettings(**given)
    published = ARM_PRESETS.get(preset.rsplit("/", 1)[-1].lower())
    if published is None:
        raise BadStudy(f"no preset {preset!r} for ARM; there are, as published in table 9: {', '.join(ARM_PRESETS)}")
    kept = {"c": None, "fraction": None} if {"c", "fraction"} & {k for k, v in given.items() if v is not None} else {}
    return replace(published, **(kept | given))


def arm_of(stored: Mapping[str, Any]) -> ArmSettings:
    """ARM's settings as study.json has them."""
    given: dict[str, Any] = {**stored, "layers": tuple(stored["layers"])}
    return ArmSettings(**given)


def arm_seed(item: str, seed: int) -> int:
    """What ARM draws with in a measurement: it differs from item to item, and is the same in every run."""
    return zlib.crc32(item.encode(errors="surrogatepass")) ^ ((seed << 32) & ((1 << 62) - 1))


def arm_words(one: ArmSettings) -> str:
    """``ARM with c 0.13, p1 99.5, layer 1``, and what else is not usual."""
    usual = ArmSettings(c=0.0)
    parts = [f"c {one.c:g}" if one.c is not None else f"fraction {one.fraction:g}", f"p1 {one.p1:g}"]
    if one.c is not None and (one.p_min, one.p_max) != (usual.p_min, usual.p_max):
        parts.append(f"share kept within {one.p_min:g} to {one.p_max:g}")
    parts.append(named_layers(one.layers))
    parts += [f"scope {one.scope}"] if one.scope != usual.scope else []
    parts += [f"rule {one.rule}"] if one.rule != usual.rule else []
    if (variant := arm_variant(one)) not in (None, "row-stable"):
        parts.append(f"the {variant} variant")
    return f"ARM with {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Condition:
    """How an item's prompt, or the model, is changed.

    ``kind`` is a name in `conditions.CONDITION_KINDS`. ``none``: nothing inserted. ``repeat``: the filler's tokens repeated, cut to `length` tokens.
    ``text``: natural text cut to `length` tokens. ``tokens``: `length` random tokens, different for each item. ``shift``: no token
    inserted, but positions shifted by `length`. ``edit-…``: `length` tokens drawn with the condition's own `seed`, the same for all items. Or one
    from outside mless. `hidden` filler is in the prompt but no other token sees it. The rest is for answers only: another `system` text, a
    `question` template ("{question} {question}"), and `samples` drawn at `temperature` for a vote (self-consistency). `again` repeats the
    same prompts (the A/A control).
    """

    name: str
    kind: str
    filler: str | None = None
    length: int = 0
    placement: Placement = "before-question"
    hidden: bool = False
    system: str | None = None
    question: str | None = None
    samples: int | None = None
    temperature: float | None = None
    again: bool = False
    #: The model is run with ARM; with filler too where the kind inserts some.
    arm: ArmSettings | None = None
    #: Of kinds that draw one filler for all items: what it is drawn with; 0 unless given.
    seed: int | None = None
    #: What one filler is to the tokenizer; known once prompts are written.
    filler_ids: tuple[int, ...] | None = None
    #: Edges of attention that are removed, and parts of layers that take their value from another condition's run.
    cut: tuple[Cut, ...] = ()
    patch: tuple[Patch, ...] = ()

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise BadStudy(
                f"condition {self.name!r}: no placement {self.placement!r}; there are: {', '.join(PLACEMENTS)}"
            )
        CONDITION_KINDS.check(self.kind, f"condition {self.name!r}: ")
        self.of_kind.check(self)
        if self.seed is not None and not self.of_kind.takes_seed:
            raise BadStudy(f"condition {self.name!r}: kind {self.kind!r} takes no seed of its own; leave seed out")
        if self.seed is not None and self.seed < 0:
            raise BadStudy(f"condition {self.name!r}: its seed must be 0 or more, got {self.seed}")
        if self.hidden and not self.inserts:
            raise BadStudy(f"condition {self.name!r} hides its filler, but inserts none; give it a filler")
        if self.question is not None and "{question}" not in self.question:
            raise BadStudy(
                f"condition {self.name!r}: its question template must hold {{question}}, got {self.question!r}"
            )
        if self.again and self.arm is not None:
            raise BadStudy(
                f"condition {self.name!r} is none once more (again = true), so it takes no ARM; leave one of them out"
            )
        if self.again and (self.cut or self.patch):
            raise BadStudy(
                f"condition {self.name!r} is none once more (again = true), so it takes no cut and no patch; leave them out"
            )
        if self.arm is not None and self.patch:
            raise BadStudy(
                f"condition {self.name!r} runs with ARM and takes values from another run, which runs without; leave one of them out"
            )
        sources = {one.source for one in self.patch}
        if "" in sources or len(sources) > 1:
            raise BadStudy(
                f"condition {self.name!r}: all its patches take their values from one other condition, named with from, as "
                f'{{ from = "mless", part = "mlp-output" }}; got {", ".join(repr(one) for one in sorted(sources))}'
            )
        if self.name in sources:
            raise BadStudy(f"condition {self.name!r} takes values from itself; name another condition")
        if self.samples is not None and self.samples < 1:
            raise BadStudy(f"condition {self.name!r}: samples must be at least 1, got {self.samples}")

    @property
    def of_kind(self) -> Kind:
        """What its kind says of itself."""
        return CONDITION_KINDS.get(self.kind)

    @property
    def inserts(self) -> bool:
        """Whether it puts tokens into the prompt."""
        return self.of_kind.inserts

    @property
    def for_answers_only(self) -> bool:
        """Whether attention under it cannot be compared token by token with `none`."""
        return (
            self.hidden or self.again or any(value is not None for value in (self.system, self.question, self.samples))
        )


def condition_of(name: str, stored: Mapping[str, Any]) -> Condition:
    """A condition as study.json has it; what is no field of it is left aside."""
    kept: dict[str, Any] = {field.name: stored[field.name] for field in fields(Condition) if field.name in stored}
    kept["name"] = name
    kept["arm"] = arm_of(stored["arm"]) if stored.get("arm") else None
    kept["filler_ids"] = tuple(stored["filler_ids"]) if stored.get("filler_ids") else None
    kept["cut"] = tuple(cut_of(one) for one in stored.get("cut") or ())
    kept["patch"] = tuple(patch_of(one) for one in stored.get("patch") or ())
    return Condition(**kept)


def stored_condition(condition: Condition) -> dict[str, Any]:
    """The condition as study.json has it; without cuts and patches where there are none, as before there were any."""
    return {key: value for key, value in asdict(condition).items() if key not in ("cut", "patch") or value}


def condition_words(condition: Condition) -> str:
    """What a condition does, as a verdict puts it in brackets."""
    parts = [said] if (said := condition.of_kind.words(condition)) else []
    if condition.arm is not None:
        parts.append(arm_words(condition.arm))
    if condition.hidden:
        parts.append("hidden from the other tokens")
    parts += [one.words() for one in (*condition.cut, *condition.patch)]
    if condition.system is not None:
        parts.append("another system text")
    if condition.question is not None:
        times = condition.question.count("{question}")
        parts.append(f"the question asked {times} times" if times > 1 else "the question put otherwise")
    if condition.again:
        parts.append("the same prompts again")
    at = "" if condition.temperature is None else f"at temperature {condition.temperature:g}"
    if condition.samples is not None:
        parts.append(f"the vote of {condition.samples} samples {at}".rstrip())
    elif at:
        parts.append(at)
    return ", ".join(parts) or "nothing inserted"


@dataclass(frozen=True, slots=True)
class Span:
    """A named run of the token sequence, ``start`` included, ``stop`` not."""

    name: SpanName
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Prompt(Shown):
    """Token ids with the spans that partition them."""

    item: str
    condition: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    text: str
    #: Given where they are not 0, 1, 2, …
    position_ids: tuple[int, ...] | None = None
    #: Whether the filler is seen by no other token.
    hidden: bool = False

    def __post_init__(self) -> None:
        at = 0
        for span in self.spans:
            if span.start != at or span.stop <= span.start:
                raise BadPrompt(f"item {self.item!r}: spans do not partition the prompt: {self.spans}")
            at = span.stop
        if at != len(self.token_ids):
            raise BadPrompt(f"item {self.item!r}: spans cover {at} of {len(self.token_ids)} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def reach(self) -> int:
        """How many positions it takes up; more than it has tokens where positions are moved on."""
        return len(self.token_ids) if self.position_ids is None else max(self.position_ids) + 1

    @property
    def hidden_filler(self) -> tuple[int, int] | None:
        """Where filler lies that no other token sees: start, stop."""
        filler = [span for span in self.spans if span.name == "filler"]
        return (filler[0].start, filler[-1].stop) if self.hidden and filler else None

    def positions(self, *names: SpanName) -> list[int]:
        """Token positions inside the named spans, in order."""
        return [i for span in self.spans if span.name in names for i in range(span.start, span.stop)]

    @property
    def original(self) -> list[int]:
        """Positions of the original tokens: all but the filler."""
        return self.positions("start", "system", "question", "end")

    @property
    def span_ids(self) -> list[int]:
        """For each token the index of its span's name in `SPAN_NAMES`."""
        return [SPAN_NAMES.index(span.name) for span in self.spans for _ in range(len(span))]


def head_name(layer: int, head: int) -> str:
    """``L1H22``; layers and heads are numbered from 1 wherever a person reads them."""
    return f"L{layer}H{head}"


def parse_numbers(text: str, highest: int, what: str, whose: str = "this model's") -> list[int]:
    """``all``, ``3``, ``1-4,7``, ``2-`` → sorted numbers from 1 to `highest`; anything else is an error naming the range."""
    if text.strip() == "all":
        return list(range(1, highest + 1))
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:([-–])\s*(\d{1,9})?\s*)?", part)
        if not match:
            raise BadStudy(
                f"{what}s: cannot read {shown(part.strip(), 60)}; write 'all', a number, or a list such as 1-4,7"
            )
        first = int(match[1])
        last = int(match[3] or (highest if match[2] else first))
        for number in (first, last):
            _refuse_beyond(number, highest, what, whose)
        if last < first:
            raise BadStudy(f"{what}s: {part.strip()!r} runs backwards; write {last}-{first}")
        found.update(range(first, last + 1))
    return sorted(found)


def numbers_of(given: object, highest: int, what: str, whose: str = "this model's") -> list[int]:
    """Numbers from 1 to `highest` as a person may give them: one, several, or a text for `parse_numbers`; each once, in the given order."""
    if isinstance(given, str):
        return parse_numbers(given, highest, what, whose)
    found: dict[int, None] = {}
    several = isinstance(given, Iterable) and getattr(given, "ndim", 1) > 0
    for one in cast("Iterable[object]", given) if several else [given]:
        try:
            number = None if isinstance(one, bool) else operator.index(cast("SupportsIndex", one))
        except TypeError:
            number = None
        if number is None:
            raise BadStudy(f"{what}s are whole numbers, or a text such as '1-4,7'; got {one!r}")
        _refuse_beyond(number, highest, what, whose)
        found[number] = None
    return list(found)


def _refuse_beyond(number: int, highest: int, what: str, whose: str) -> None:
    if not 1 <= number <= highest:
        raise BadStudy(f"no {what} {number}: {whose} {what}s are 1 to {highest} (numbered from 1)")


def format_numbers(numbers: Sequence[int]) -> str:
    """``[2, 3, 4, 7]`` → ``2–4, 7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def counted(number: int, what: str) -> str:
    """``1 item``, ``1,319 items``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def named_layers(numbers: Sequence[int]) -> str:
    """``[1]`` → ``layer 1``, ``[2, 3, 4, 7]`` → ``layers 2–4, 7``."""
    return f"layer{'s' if len(set(numbers)) > 1 else ''} {format_numbers(numbers)}"


#: Bytes of the units that people write memory in.
_UNITS = {"B": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for tail, base in (("B", 1000), ("iB", 1024))
}


def parse_memory(text: str) -> dict[str, int | None]:
    """``cuda:0=20GiB,cpu=60GiB,disk`` → bytes by device. A disk has no bound: that it is named allows its use."""
    found: dict[str, int | None] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        device, sign, size = (one.strip() for one in part.partition("="))
        amount = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B)", size)
        if device in found:
            raise BadStudy(f"device memory names {device!r} twice; name each device once")
        if device == "disk" and not sign:
            found[device] = None
        elif not re.fullmatch(r"cpu|cuda:\d{1,4}", device) or amount is None or amount[2] not in _UNITS:
            raise BadStudy(
                f"device memory is a size by device, as cuda:0=20GiB,cpu=60GiB (B, KB, KiB … TiB), and disk alone to allow it; got {shown(part)}"
            )
        else:
            found[device] = int(float(amount[1]) * _UNITS[amount[2]])
    return found


def check_device_map(device_map: str | None, device: str, memory: str | None) -> dict[str, int | None] | None:
    """The bounds of a device map; None where none is asked for. What contradicts it is refused."""
    if device_map is None:
        if memory is not None:
            raise BadStudy(
                "--device-memory bounds what --device-map auto places, and none is asked for; add --device-map auto"
            )
        return None
    if device_map != "auto":
        raise BadStudy(f"no device map {shown(device_map)}; there is: auto (bound it with --device-memory)")
    if device not in ("auto", "cuda"):
        raise BadStudy(
            f"--device-map auto chooses devices, and --device {device} names one; leave one of them out (--device-memory bounds what each device takes)"
        )
    return parse_memory(memory or "")


def pick_item(ids: Sequence[str], wanted: str, where: str) -> str:
    """An item's id by its number in the study (from 1) or by its id; `where` says in the error what holds the items."""
    if wanted.isdecimal() and 1 <= int(wanted) <= len(ids):
        return ids[int(wanted) - 1]
    if wanted in ids:
        return wanted
    if not ids:
        raise BadStudy(f"no item {wanted!r}: {where} holds no items")
    raise BadStudy(f"no item {wanted!r} in {where}: give a number from 1 to {len(ids)}, or an id such as {ids[0]!r}")


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve panel of a published figure: which head of which layer of which model."""

    model: str
    layer: int
    head: int


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """What a figure or table shows; its numbers come from stored results only."""

    id: str
    kind: str
    panels: tuple[Panel, ...] = ()
    conditions: tuple[str, ...] = ("none", "mless")


def matched_models(published: Sequence[str], given: Sequence[Sequence[str]]) -> list[str]:
    """For each given model, by its names, the published one whose panels it shows.

    A name counts before a position: Llama gets Llama's panels wherever it stands in the list. Models with other names take the remaining
    ones in order where there are as many models as published ones, else the first one's panels.
    """
    by_name = {_plain_model(model): model for model in reversed(published)}
    named = [next((by_name[key] for key in map(_plain_model, names) if key in by_name), None) for names in given]
    left = iter([model for model in published if model not in named])
    spare = published[0]
    return [one or (next(left, spare) if len(given) == len(published) else spare) for one in named]


def _plain_model(name: str) -> str:
    """``Qwen/Qwen2.5-Math-7B`` and ``qwen2.5-math-7b`` are one model; so are Llama3.1 and Llama-3.1."""
    return re.sub(r"[^a-z0-9.]", "", name.rstrip("/").rsplit("/", 1)[-1].lower())
