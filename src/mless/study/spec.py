"""A declared experiment: a TOML file, its defaults, and what the command line changes in it."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_serializer,
    model_validator,
)

from mless import tasks
from mless.engines import Decoding
from mless.errors import BadStudy
from mless.prompting import SYSTEM_TEXT
from mless.stats import Margins
from mless.values import (
    ANSWER_KINDS,
    ArmSettings,
    Condition,
    ConditionKind,
    FigureKind,
    FigureSpec,
    Item,
    Panel,
    Placement,
    arm_settings,
    format_numbers,
    parse_numbers,
    pick_item,
    stand_ins,
)

_FORBID = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)  # layers = 1 means "1"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
#: Pictures of a whole model: of their conditions they show those that were run.
_OVERVIEWS = ("map", "retained", "mass")
#: What a study must not decide, because a study may come from anybody; typed on the command line it is the user's own doing.
_TYPED_ONLY = {"trust_remote_code": "--trust-remote-code"}


def _split_names(value: Any) -> Any:
    """``none,mless``, as a command line has it."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def _split_numbers(value: Any) -> Any:
    """``1,4,8``, as a command line has it, or a single number."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() for part in parts):
            raise ValueError("expected whole numbers, as 1,4,8")
        return [int(part) for part in parts]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _split_shares(value: Any) -> Any:
    """``0.05,0.13``, as a command line has it, or a single number."""
    if isinstance(value, str):
        try:
            return [float(part) for part in value.split(",") if part.strip()]
        except ValueError:
            raise ValueError("expected numbers, as 0.05,0.13") from None
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


#: Prompting baselines that insert nothing: is it the filler, or merely another prompt?
PLAN_AND_SOLVE = (
    "Work out what the problem asks and write down a plan for solving it. Then follow the plan step by step and put your final answer "
    "within \\boxed{}."
)
REPHRASED = "Think the problem through, one step after another. Write the final answer inside \\boxed{}."
#: What an accuracy study says to the model where its items are sums; everything else gets the published text.
CALCULATOR = "You are a calculator. Reply with the result and nothing else."
EngineName = Literal["hf", "vllm", "openai", "scripted"]
Names = Annotated[list[str], BeforeValidator(_split_names)]
Shares = Annotated[list[float], BeforeValidator(_split_shares)]


class ArmTable(BaseModel):
    """ARM's parameters: ``[arm]`` for the conditions arm and mless-arm, ``[condition.NAME.arm]`` for one of one's own."""

    model_config = _FORBID
    preset: str | None = None  # a model of table 9; what is given beside it wins
    variant: Literal["row-stable", "released", "paper"] | None = None  # whose scope and rule; row-stable unless given
    c: float | None = None  # 0.13 where neither a preset nor a fraction is given
    fraction: float | None = None
    p_min: float | None = None
    p_max: float | None = None
    p1: float | None = None
    layers: Annotated[list[int], BeforeValidator(_split_numbers)] | None = None  # numbered from 1
    scope: Literal["token", "sequence", "tensor"] | None = None
    rule: str | None = None  # a name in `arm_rules.rules`
    seed: int | None = None

    @model_serializer(mode="wrap")
    def _without_an_unset_variant(self, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """As before there were variants, so that older folders are still known as the same study."""
        found: dict[str, Any] = inner(self)
        return found if self.variant is not None else {key: value for key, value in found.items() if key != "variant"}

    def settings(self, fallback: ArmTable | None = None) -> ArmSettings:
        """Resolved, with what `fallback` says where this table says nothing; bad values are refused by name."""
        given = self.model_dump(exclude_none=True)
        if fallback is not None:
            base = fallback.model_dump(exclude_none=True)
            # A preset is a whole of its own; a share of one's own takes the place of the other's, and leaves the rest.
            own = (
                ("preset", "c", "fraction", "p1", "p_min", "p_max", "layers")
                if "preset" in given
                else ("preset", "c", "fraction")
            )
            if {"preset", "c", "fraction"} & given.keys():
                base = {key: value for key, value in base.items() if key not in own}
            if "variant" in given:
                base = {key: value for key, value in base.items() if key not in ("variant", "scope", "rule")}
            given = base | given
        return arm_settings(**given)


class ActivationsTable(BaseModel):
    """What is measured of activations: ``[activations]``. A study that has it measures activations and not attention."""

    model_config = _FORBID


class AffineTable(BaseModel):
    """How attention outputs are compared: ``[affine]``. A study that has it measures the affine map and not received attention."""

    model_config = _FORBID
    tokens: Literal["after", "original"] = (
        "after"  # original tokens after the filler, or all of them; those before it cannot move
    )
    holds: float = Field(default=0.9, gt=0, le=1)  # a form holds where the whole interval of its R² is at least this


class TuneTable(BaseModel):
    """Which of ARM's parameters are tried, and on what: ``[tune]``, in a study that has [accuracy]. ``[arm]`` is the grid's centre.

    `c` and `fraction` are alternatives, so that each setting has one of them; they are crossed with `p1` and `layers`. `p_min` and `p_max`
    are crossed with each other at the centre. A list that is empty means the centre's value.
    """

    model_config = _FORBID
    c: Shares = []
    fraction: Shares = []
    p1: Shares = []
    layers: Names = []  # alternatives: "1", "2", "1-3" and "1+5" are four of them
    p_min: Shares = []
    p_max: Shares = []
    settings: list[ArmTable] = []  # further ones, each given in full
    method: Literal["halving", "grid"] = "halving"
    rungs: int = Field(default=3, ge=1)  # of halving; each has twice the dev items of the one before
    dev_share: float = Field(default=0.5, gt=0, lt=1)  # of the items, to choose on
    transfer: Names = []  # other data, on which the chosen setting is then tried


class ConditionTable(BaseModel):
    """A condition of one's own: ``[condition.NAME]``."""

    model_config = _FORBID
    kind: ConditionKind | None = None  # repeat; none where another system text or question is all there is
    filler: str | None = None
    length: int | None = None
    placement: Placement | None = None
    hidden: bool = False
    system: str | None = None
    question: str | None = None
    samples: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    again: bool = False
    arm: ArmTable | None = None


class PanelTable(BaseModel):
    model_config = _FORBID
    model: str
    layer: int = 1
    head: int


class FigureTable(BaseModel):
    """Which published figure the study is for: ``[figure]``."""

    model_config = _FORBID
    kind: FigureKind
    panels: list[PanelTable] = []
    models: Names = []  # published for these, where it has no panels that name them
    conditions: Names = ["none", "mless"]
    heads: str | None = None  # replaces the panels' heads: "2,5" or "most-shifted:3"
    layers: str | None = None  # replaces the panels' layers
    bars: str | None = None  # the accuracy study that makes the figure's other half


class MarginTable(BaseModel):
    model_config = _FORBID
    drop: float = 0.95
    rise: float = 1.05
    same: tuple[float, float] = (0.9, 1.1)


class AccuracyTable(BaseModel):
    """How answers are drawn and judged: ``[accuracy]``. A study that has it measures answers and not attention."""

    model_config = _FORBID
    engine: EngineName = "hf"
    mode: Literal["row-stable", "batch-invariant"] = "row-stable"
    slots: int | None = Field(
        default=None, ge=1
    )  # rows computed at once, part of the numbers; chosen by device where not given
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    samples: int = Field(default=1, ge=1)
    again: bool = True  # run the A/A control, none-again, whether or not it is named among the conditions
    stop: list[str] = []
    k: Annotated[list[int], BeforeValidator(_split_numbers)] = [1]  # pass@k and maj@k
    rules: Names | None = None  # answer extraction, first to last; the task's own where not given
    cluster_field: str | None = None  # items with the same value are related and count as one unit
    margin: float = Field(default=0.02, gt=0, lt=1)  # a change smaller than this would not matter (equivalence test)
    dev_share: float = Field(default=0.0, ge=0, lt=1)  # share of the items that a choice between conditions is made on
    script: str | None = None  # the scripted engine's file of answers
    base_url: str | None = None  # the openai engine's server
    concurrency: int = Field(default=8, ge=1)
    timeout: float = Field(default=120.0, gt=0)
    retries: int = Field(default=6, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> AccuracyTable:
        for k in self.k:
            if not 1 <= k <= self.samples:
                raise ValueError(
                    f"k = {k}, but {self.samples} sample(s) are drawn per item; pass@k needs 1 ≤ k ≤ samples: --samples {max(k, 1)}, or a smaller k"
                )
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"{self.samples} samples at temperature 0 are all the same answer; give --temperature, as 0.7, or --samples 1"
            )
        if self.engine == "openai" and not self.base_url:
            raise ValueError("the openai engine needs a server: --base-url http://HOST:PORT/v1")
        if self.engine == "scripted" and not self.script:
            raise ValueError("the scripted engine needs its answers: --set accuracy.script=FILE.json")
        if self.rules is not None:
            for rule in self.rules:
                if rule not in tasks.RULES:
                    raise ValueError(f"no extraction rule {rule!r}; there are: {', '.join(tasks.RULES)}")
        return self

    def decoding(self, temperature: float | None = None) -> Decoding:
        """How answers are drawn, at another temperature where a condition has its own."""
        asked = self.temperature if temperature is None else temperature
        return Decoding(self.max_new_tokens, asked, self.top_p, self.top_k, tuple(self.stop))


class StudySpec(BaseModel):
    """Every field has a default and can be changed with ``--set field=value``."""

    model_config = _FORBID
    name: str
    title: str = ""
    model: str = "smollm2"
    tokenizer: str | None = None
    data: str = "bundled"
    question_field: str | None = None
    answer_field: str | None = None
    limit: int | None = Field(default=None, ge=1)
    only: Names = []  # ids of the items to take; all unless given
    prompt: Literal["auto", "chat", "raw"] = "auto"
    system: str = SYSTEM_TEXT
    conditions: Names = ["none", "mless", "mful", "random"]
    primary: str | None = None  # of answers: the condition that is tested alone, the others by Holm among themselves
    condition: dict[str, ConditionTable] = {}
    filler: str = " /"
    meaningful: str = " he"
    length: int = Field(default=55, ge=1)
    placement: Placement = "before-question"
    layers: str = "all"
    heads: str = "all"
    seed: int = Field(default=0, ge=0)
    batch_size: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    margins: MarginTable = MarginTable()
    flips: int = Field(default=100_000, ge=100_000)
    figure: FigureTable | None = None
    arm: ArmTable = ArmTable()
    accuracy: AccuracyTable | None = None
    activations: ActivationsTable | None = None
    affine: AffineTable | None = None
    tune: TuneTable | None = None

    @model_validator(mode="after")
    def _tunes_by_answers(self) -> StudySpec:
        if self.tune is not None and self.accuracy is None:
            raise ValueError("[tune] chooses by accuracy, so the study needs [accuracy] too; add it, or use mless tune")
        if self.tune is not None and self.primary is not None:
            raise ValueError(
                f"primary = {self.primary!r} is for studies that compare conditions; a tuning tests the one setting that it chose: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _measures_one_thing(self) -> StudySpec:
        asked = [name for name in ("accuracy", "activations", "affine") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ValueError(
                f"a study measures one thing, and this one has {' and '.join(f'[{name}]' for name in asked)}; make two of it"
            )
        if self.affine is not None and self.batch_size != 1:
            raise ValueError(
                f"an affine study runs the prompts of a pair together and no others, so it takes no batch_size; got {self.batch_size}, leave it out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_a_system_text(cls, fields: Any) -> Any:
        """A sum is asked for its result alone: small models reason themselves away from it, and their tokens cost time."""
        if isinstance(fields, dict) and fields.get("accuracy") is not None and "system" not in fields:
            given = cast("dict[str, Any]", fields)
            if str(given.get("data", "")).startswith("arithmetic"):
                return given | {"system": CALCULATOR}
        return cast("Any", fields)

    _source: str | None = PrivateAttr(default=None)
    _as_written: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @property
    def source(self) -> str:
        """What to type after ``mless run`` to get this study: its name, or its file."""
        return self._source or self.name

    def changed(self) -> dict[str, Any]:
        """The fields that are not as the study's own file has them."""
        own = self._as_written
        return {key: value for key, value in self.model_dump().items() if own and value != own[key]}

    def conditions_in_order(self) -> list[Condition]:
        """Resolved conditions, `none` first: every share is taken against it."""
        names = list(dict.fromkeys(self.conditions))
        if "none" not in names:
            names.insert(0, "none")
        if self.accuracy is not None and self.accuracy.again and "none-again" not in names:
            names.append("none-again")
        names.sort(key=lambda name: {"none": 0, "none-again": 1}.get(name, 2))
        found = [self._condition(name) for name in names]
        for condition in found if self.affine is not None else ():
            if condition.arm is not None:
                raise BadStudy(
                    f"condition {condition.name!r} runs the model with ARM, but both prompts of a pair run in one forward here, and none must run "
                    "without it; ARM acts behind layer 1's attention: use mless run activations for it, and leave it out of --conditions here"
                )
        for condition in found if self.accuracy is None else ():
            if condition.for_answers_only:
                raise BadStudy(
                    f"condition {condition.name!r} is for answers: attention under it cannot be compared token by token with none; use it in a "
                    "study that has [accuracy], such as mless run accuracy"
                )
        self._check_primary(found)
        return found

    def _check_primary(self, conditions: Sequence[Condition]) -> None:
        """The primary condition is one of those that are compared with none."""
        if self.primary is None:
            return
        if self.accuracy is None:
            raise BadStudy(
                f"primary = {self.primary!r} is for studies that compare answers, and {self.name!r} draws none: leave it out, or use mless run accuracy"
            )
        compared = [one.name for one in conditions if one.name != "none" and not one.again]
        if self.primary not in compared:
            control = any(one.name == self.primary for one in conditions)
            why = "is what the others are compared with" if control else "is no condition of this study"
            raise BadStudy(
                f"primary: {self.primary!r} {why}{_near(self.primary, compared) if not control else ''}; name one of those that are "
                f"compared with none: {', '.join(compared) or '(there is none: add one with --conditions)'}"
            )

    def _condition(self, name: str) -> Condition:
        built_in: dict[str, ConditionTable] = {
            "none": ConditionTable(kind="none"),
            "mless": ConditionTable(kind="repeat", filler=self.filler),
            "mful": ConditionTable(kind="repeat", filler=self.meaningful),
            "random": ConditionTable(kind="text"),
            "random-tokens": ConditionTable(kind="tokens"),
            "position-only": ConditionTable(kind="shift"),
            "arm": ConditionTable(kind="none", arm=self.arm),
            "mless-arm": ConditionTable(kind="repeat", filler=self.filler, arm=self.arm),
        }
        if self.accuracy is not None:
            built_in |= {
                "none-again": ConditionTable(kind="none", again=True),
                "plan-and-solve": ConditionTable(kind="none", system=PLAN_AND_SOLVE),
                "rephrased": ConditionTable(kind="none", system=REPHRASED),
                "question-twice": ConditionTable(kind="none", question="{question}\n\n{question}"),
                "masked-filler": ConditionTable(kind="repeat", filler=self.filler, hidden=True),
                "self-consistency": ConditionTable(kind="none", samples=8, temperature=0.7),
            }
        if name in ("none", "none-again") and name in self.condition:
            raise BadStudy(
                f"condition {name!r} is what every other one is measured against, so [condition.{name}] cannot change it; give yours another name"
            )
        table = self.condition.get(name) or built_in.get(name)
        if table is None:
            known = [*built_in, *self.condition]
            raise BadStudy(
                f"no condition {name!r}{_near(name, known)}; there are: {', '.join(known)}, and those a study declares under [condition.NAME]"
            )
        if not re.fullmatch(_NAME, name):
            raise BadStudy(
                f"condition name {name!r} becomes part of file names: letters, digits, dot, dash and underscore only"
            )
        plain = table.filler is None and (table.system or table.question or table.samples or table.arm)
        kind = table.kind or ("none" if plain else "repeat")
        own: dict[str, Any] = {
            key: getattr(table, key) for key in ("hidden", "system", "question", "samples", "temperature", "again")
        }
        own["arm"] = table.arm.settings(self.arm) if table.arm is not None else None
        if kind == "none":
            return Condition(name, "none", table.filler, table.length or 0, **own)
        length = table.length if table.length is not None else self.length
        return Condition(name, kind, table.filler, length, table.placement or self.placement, **own)

    def margins_of(self) -> Margins:
        return Margins(self.margins.drop, self.margins.rise, self.margins.same)

    def figure_spec(self, highest: int = 10_000) -> FigureSpec:
        """The figure, with the layers asked for in the published ones' place; `highest` is the model's last, where known."""
        if self.figure is None:
            raise BadStudy(f"study {self.name!r} is for no figure; `mless studies` shows which are")
        table = self.figure
        panels = [Panel(panel.model, panel.layer, panel.head) for panel in table.panels]
        if table.layers is not None and panels:
            if table.layers.strip() == "all":
                raise BadStudy(f"{self.name} shows layers side by side; name them, as --layers 1-3")
            chosen = parse_numbers(table.layers, highest, "layer")
            if table.kind == "layers":
                panels = [Panel(panels[0].model, layer, panels[0].head) for layer in chosen]
            elif len(chosen) == 1:
                panels = [Panel(panel.model, chosen[0], panel.head) for panel in panels]
            else:
                raise BadStudy(f"{self.name} shows one layer, got --layers {table.layers}; give one number")
        return FigureSpec(self.name, table.kind, tuple(panels), tuple(table.conditions))

    def single_layer(self, highest: int = 10_000) -> int | None:
        """The one layer shown by a picture that has no published panels: the one asked for, else the study's first."""
        answers = (*ANSWER_KINDS, "sensitivity")
        if self.figure is None or self.figure.panels or self.figure.kind in ("map", "retained", *answers):
            if self.figure is not None and self.figure.layers is not None and self.figure.kind in answers:
                raise BadStudy(
                    f"figure {self.name} takes no --layers: it shows answers and not attention; leave it out"
                )
            return None
        if self.figure.layers is None:
            return parse_numbers(self.layers, highest, "layer")[0]
        chosen = parse_numbers(self.figure.layers, highest, "layer")
        if len(chosen) != 1:
            raise BadStudy(f"{self.name} shows one layer, got --layers {self.figure.layers}; give one number")
        return chosen[0]

    def check_figure(self, layers: int = 0, heads: int = 0) -> None:
        """Fail before the run, not after it, when the study cannot show its figure on a model of that many layers and heads."""
        if self.figure is None or self.tune is not None:  # of a tuning study the settings are shown, not its conditions
            return
        self._check_shown_conditions(self.figure)
        if self.accuracy is not None:
            return
        layer = self.single_layer(layers)
        panels = self.figure_spec(layers).panels
        for shown in [layer] if layer is not None else [panel.layer for panel in panels]:
            if shown > layers:
                raise BadStudy(
                    f"{self.name} shows layer {shown}, but this model's layers are 1 to {layers}; choose with --layers"
                )
            if shown not in (run := parse_numbers(self.layers, 10_000, "layer")):
                raise BadStudy(
                    f"{self.name} shows layer {shown}, but would measure {format_numbers(run)}; choose with --layers"
                )
        if self.figure.kind in _OVERVIEWS:
            return
        if self.figure.heads is None:
            wanted = [panel.head for panel in panels]
        elif re.fullmatch(r"\s*most-shifted(:[1-9]\d*)?\s*", self.figure.heads):
            wanted = []
        else:
            wanted = parse_numbers(self.figure.heads, heads, "head")
        for head in wanted:
            if head > heads:
                count = len(panels) if self.figure.kind == "heads" else 1
                raise BadStudy(
                    f"{self.name} shows head {head}, but this model's heads are 1 to {heads} (numbered from 1); "
                    f"choose some: --heads most-shifted:{count}, or a list such as --heads 1,{heads}"
                )
            if head not in (run := parse_numbers(self.heads, heads, "head")):
                raise BadStudy(
                    f"{self.name} shows head {head}, but would store {format_numbers(run)}; choose with --heads or --set heads={head}"
                )

    def _check_shown_conditions(self, table: FigureTable) -> None:
        run = {condition.name: condition.kind for condition in self.conditions_in_order()}
        shown = list(dict.fromkeys(table.conditions))
        for name in shown:
            self._condition(name)  # a slip of the pen is told apart from a condition that is merely not run
        missing = [name for name in shown if name not in run]
        kept = [name for name in shown if name in run]
        if missing and table.kind not in _OVERVIEWS:
            raise BadStudy(
                f"{self.name} shows {', '.join(map(repr, missing))}, but would run {', '.join(run)} only; add it with --set conditions=…, "
                f"or leave it out: --set figure.conditions={','.join(kept) or ','.join(run)}"
            )
        if table.kind in ANSWER_KINDS:
            return
        # ARM inserts nothing, and changes activations all the same.
        inserting = table.kind not in ("activations", "classes")
        filled = [name for name in kept if (run[name] if inserting else name) != "none"]
        heads = table.heads or ("" if table.panels else "most-shifted")
        compares = table.kind in ("map", "retained", "versus") or (table.kind != "mass" and "most-shifted" in heads)
        if not (filled if compares else kept):
            raise BadStudy(
                f"{self.name} has nothing to show: of its conditions {', '.join(shown) or '(none named)'}, none "
                f"{'with filler ' if compares else ''}is run; name some that are: --set figure.conditions={','.join(run)}"
            )

    def load_items(self) -> tuple[str, list[Item]]:
        """The task's name and the items the study is about."""
        task, items = tasks.load_items(
            self.data,
            question_field=self.question_field,
            answer_field=self.answer_field,
            limit=self.limit,
            seed=self.seed,
            cluster_field=self.accuracy.cluster_field if self.accuracy is not None else None,
        )
        if not self.only:
            return task, items
        known = {item.id for item in items}
        if missing := [one for one in self.only if one not in known]:
            raise BadStudy(
                f"only: no item {missing[0]!r} in {self.data} ({len(missing)} such); ids are expected, as {items[0].id!r}"
            )
        kept = set(self.only)
        return task, [item for item in items if item.id in kept]

    def check_item(self, wanted: str) -> None:
        """Fail before the run where the data holds no such item."""
        _, items = self.load_items()
        pick_item([item.id for item in items], wanted, self.data)

    def for_models(self, models: Sequence[str]) -> list[StudySpec]:
        """The study for each of several models: of a figure, the panels that this one stands for."""
        if self.figure is None or not self.figure.panels:
            return [self.model_copy(update={"model": model}) for model in models]
        found: list[StudySpec] = []
        for model, published in zip(models, stand_ins(self.published_models(), [[m] for m in models]), strict=True):
            panels = [panel for panel in self.figure.panels if panel.model == published]
            figure = self.figure.model_copy(update={"panels": panels})
            found.append(self.model_copy(update={"model": model, "figure": figure}))
        return found

    def published_models(self) -> list[str]:
        """The models a figure was published for, in order."""
        if self.figure is None:
            return []
        return list(dict.fromkeys([*self.figure.models, *(panel.model for panel in self.figure.panels)]))


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def available_studies() -> dict[str, StudySpec]:
    """The studies that come with the package, in reading order."""
    folder = resources.files("mless") / "studies"
    found = {
        entry.name.removesuffix(".toml"): _parse(entry.read_text(encoding="utf-8"), entry.name, {})
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(found.items(), key=lambda pair: (pair[0] != "quick", len(pair[0]), pair[0])))


def load_study(name: str, changes: Mapping[str, Any] | None = None, sets: Sequence[str] = ()) -> StudySpec:
    """A study by name or TOML path; `changes` are fields by name, `sets` are ``key=value`` texts, which win."""
    merged: dict[str, Any] = dict(changes or {})
    for text in sets:
        key, value = _read_set(text)
        merged.pop(key, None)  # so that it is put last, and wins
        merged[key] = value
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BadStudy(f"no study file {name!r}; `mless studies` lists those that come with mless") from None
        except OSError as fault:
            raise BadStudy(f"study file {name!r} cannot be read: {fault.strerror}") from None
        except UnicodeDecodeError:
            raise BadStudy(f"study file {name!r} is not UTF-8 text; save it as UTF-8") from None
        spec = _parse(text, name, merged)
        spec._source = name  # pyright: ignore[reportPrivateUsage]
        return spec
    entry = resources.files("mless") / "studies" / f"{name}.toml"
    if "/" in name or not entry.is_file():
        known = list(available_studies())
        raise BadStudy(f"no study {name!r}{_near(name, known)}; there are: {', '.join(known)}, or give a .toml file")
    return _parse(entry.read_text(encoding="utf-8"), f"{name}.toml", merged)


def _parse(text: str, source: str, changes: Mapping[str, Any]) -> StudySpec:
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise BadStudy(f"study {source} is no valid TOML: {fault}") from None
    fields.setdefault("name", Path(source).stem)
    as_written = validated(fields, source)
    if as_written.figure is None and any(key.partition(".")[0] == "figure" for key in changes):
        as_written.figure_spec()
    if as_written.accuracy is None and any(key.partition(".")[0] == "accuracy" for key in changes):
        raise BadStudy(
            f"study {as_written.name!r} measures attention and draws no answers; for answers use mless run accuracy, or a study file with [accuracy]"
        )
    for key, value in changes.items():
        _put(fields, key, value)
    spec = validated(fields, source)
    spec._as_written = as_written.model_dump()  # pyright: ignore[reportPrivateUsage]
    return spec


def validated(fields: Mapping[str, Any], source: str) -> StudySpec:
    """A spec from its fields; a fault names the field, and the nearest one there is."""
    try:
        return StudySpec.model_validate(dict(fields))
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            *tables, last = map(str, first["loc"])
            if last in _TYPED_ONLY:
                raise BadStudy(
                    f"study {source} has no field {where!r}: only the {_TYPED_ONLY[last]} flag on the command line can do that"
                ) from None
            inside = _fields(tables)
            names = [".".join([*tables, name]) for name in inside]
            near = difflib.get_close_matches(last, inside, n=1)
            hint = f" (did you mean {'.'.join([*tables, near[0]])!r}?)" if near else ""
            raise BadStudy(f"study {source} has no field {where!r}{hint}; its fields are: {', '.join(names)}") from None
        message = first["msg"].removeprefix("Value error, ")
        if (
            isinstance(first.get("input"), dict) and first["type"] == "value_error"
        ):  # a rule of the whole table, which says what it got
            raise BadStudy(f"study {source}, [{where}]: {message}") from None
        raise BadStudy(
            f"study {source}, field {where!r}: {message[:1].lower()}{message[1:]}, got {first.get('input')!r}"
        ) from None


def _fields(tables: Sequence[str]) -> list[str]:
    """The fields of the study, or of the table that lies on the way `tables` in it."""
    place = _annotation(tables)
    return list(place.model_fields) if isinstance(place, type) and issubclass(place, BaseModel) else []


def _annotation(path: Sequence[str]) -> Any:
    """The type that the spec declares for a dotted field; None where it declares none. Optional types count as what they hold."""
    kind: Any = StudySpec
    for name in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(name)
            kind = field.annotation if field is not None else None
        elif get_origin(kind) in (dict, list, tuple):
            kind = get_args(kind)[-1]
        else:
            return None
        inner = [part for part in get_args(kind) if part is not type(None)]
        if get_origin(kind) in (Union, UnionType) and len(inner) == 1:
            kind = inner[0]
    return kind


def _read_set(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise BadStudy(f"--set takes key=value, as --set length=30; got {text!r}")
    kind = _annotation(key.strip().split("."))
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value  # a bare word is text, so that --set data=bundled needs no quotes
    if (kind is str or get_origin(kind) is Literal) and not isinstance(read, str):
        return key.strip(), value  # --set layers=1 and --set filler=0 mean the text
    return key.strip(), read


def write_sets(changed: Mapping[str, Any], inside: str = "") -> list[str]:
    """The ``key=value`` texts that `_read_set` reads back as `changed`."""
    texts: list[str] = []
    for name, value in changed.items():
        key = f"{inside}{name}"
        if isinstance(value, dict):
            texts += write_sets(cast("dict[str, Any]", value), f"{key}.")
        elif isinstance(value, str):
            plain = f"{key}={value}"
            texts.append(plain if _read_set(plain)[1] == value else f"{key}={json.dumps(value, ensure_ascii=False)}")
        elif value is not None:
            texts.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return texts


def _put(fields: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if not rest:
        fields[head] = value
        return
    inner = fields.get(head)
    inner = dict(cast("dict[str, Any]", inner)) if isinstance(inner, dict) else {}
    _put(inner, rest, value)
    fields[head] = inner
