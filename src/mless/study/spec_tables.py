"""The tables of a study file, such as ``[accuracy]`` and ``[condition.NAME]``, and what their fields may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_serializer,
    model_validator,
)

from mless import limits, tasks
from mless.changes import Cut, Patch
from mless.engines import ENGINES, Decoding, EngineKind
from mless.errors import BadStudy
from mless.limits import Limit
from mless.registry import Registry
from mless.results.figure_kinds import FIGURES
from mless.results.nats import LIKELIHOOD_METRICS
from mless.stats import Margins
from mless.values import (
    USUAL_MARGIN,
    ArmSettings,
    Placement,
    arm_settings,
)

FORBID = ConfigDict(
    extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False
)  # layers = 1 means "1"


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


def at_most(limit: Limit) -> AfterValidator:
    """A number, or the length of a text or list, within its limit."""

    def check(value: Any) -> Any:
        size = len(value) if isinstance(value, str | list | dict) else value
        if size is not None and size > limit.value:
            raise ValueError(f"expected {limit}")
        return value

    return AfterValidator(check)


#: The system text of an accuracy study whose items are sums; all others get the published text.
CALCULATOR = "You are a calculator. Reply with the result and nothing else."
#: And of one whose items are answered with code.
PROGRAMMER = "Complete the Python function. Reply with the whole function in one fenced code block."
#: The most tokens that run at once unless given. A GPU needs more of them to be busy; on a CPU more would only make the steps longer.
GPU_GROUP, CPU_GROUP = 8192, 2048
GROUPS = f"{GPU_GROUP:,} on a GPU, {CPU_GROUP:,} on a CPU"
Names = Annotated[list[str], BeforeValidator(_split_names), at_most(limits.DATA_ROWS)]
Conditions = Annotated[list[str], BeforeValidator(_split_names), at_most(limits.CONDITIONS)]
Name = Annotated[str, at_most(limits.NAME)]
Text = Annotated[str, at_most(limits.TEXT)]
Filler = Annotated[str, at_most(limits.FILLER_TEXT)]
Length = Annotated[int, at_most(limits.FILLER)]
Samples = Annotated[int, at_most(limits.SAMPLES)]
Rows = Annotated[int, at_most(limits.ROWS_AT_ONCE)]
Seed = Annotated[int, at_most(limits.SEED)]
Shares = Annotated[list[float], BeforeValidator(_split_shares), at_most(limits.CONDITIONS)]


def known(table: Registry[Any], name: str) -> None:
    """Refuse a name that a table does not have, as pydantic wants it."""
    try:
        table.check(name)
    except BadStudy as fault:
        raise ValueError(str(fault)) from None


class ArmTable(BaseModel):
    """ARM's parameters: ``[arm]`` for the conditions arm and mless-arm, ``[condition.NAME.arm]`` for your own."""

    model_config = FORBID
    preset: str | None = None  # a model of table 9; what is given beside it wins
    variant: Literal["row-stable", "released", "paper"] | None = None  # whose scope and rule; row-stable unless given
    c: float | None = None  # 0.13 where neither a preset nor a fraction is given
    fraction: float | None = None
    p_min: float | None = None
    p_max: float | None = None
    p1: float | None = None
    layers: Annotated[list[int], BeforeValidator(_split_numbers)] | None = None  # numbered from 1
    scope: Literal["token", "sequence", "tensor"] | None = None
    rule: str | None = None  # a name in `arm_rules.ARM_RULES`
    seed: Seed | None = None

    @model_serializer(mode="wrap")
    def _without_an_unset_variant(self, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Without an unset variant, so that older folders still count as the same study."""
        found: dict[str, Any] = inner(self)
        return found if self.variant is not None else {key: value for key, value in found.items() if key != "variant"}

    def settings(self, fallback: ArmTable | None = None) -> ArmSettings:
        """Resolved settings, with `fallback`'s values for missing fields; bad values are refused by name."""
        given = self.model_dump(exclude_none=True)
        if fallback is not None:
            base = fallback.model_dump(exclude_none=True)
            # A preset replaces everything; a share given here replaces only the fallback's share.
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

    model_config = FORBID


class AffineTable(BaseModel):
    """How attention outputs are compared: ``[affine]``. A study that has it measures the affine map and not received attention."""

    model_config = FORBID
    tokens: Literal["after", "original"] = (
        "after"  # original tokens after the filler, or all of them; those before it cannot move
    )
    holds: float = Field(default=0.9, gt=0, le=1)  # a form holds where the whole interval of its R² is at least this


class EngineTable(BaseModel):
    """What computes: the fields that ``[accuracy]`` and ``[likelihood]`` share."""

    model_config = FORBID
    engine: str = "hf"
    tensor_parallel: Annotated[int, at_most(limits.GPUS)] | None = Field(
        default=None, ge=1
    )  # of vLLM: GPUs that each layer is divided among
    base_url: str | None = None  # the openai engine's server
    concurrency: Annotated[int, at_most(limits.CONNECTIONS)] = Field(default=8, ge=1)
    timeout: Annotated[float, at_most(limits.SECONDS)] = Field(default=120.0, gt=0)
    retries: Annotated[int, at_most(limits.RETRIES)] = Field(default=6, ge=0)

    @model_validator(mode="after")
    def _has_an_engine(self) -> EngineTable:
        known(ENGINES, self.engine)
        kind = ENGINES.get(self.engine)
        self._suits(kind)
        if missing := kind.missing(self):
            raise ValueError(missing)
        if self.tensor_parallel is not None and not kind.takes_tensor_parallel:
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} divides layers among GPUs, which the engine {self.engine} does not; use --engine vllm, or with "
                "--engine hf --device-map auto, which gives whole layers to GPUs"
            )
        return self

    def _suits(self, kind: EngineKind) -> None:
        """Refuse an engine that cannot do what this table is about."""


class LikelihoodTable(EngineTable):
    """How solutions and answers are scored: ``[likelihood]``. A study that has it measures log-probabilities and not attention."""

    others: Annotated[int, at_most(limits.OTHER_ANSWERS)] = Field(
        default=16, ge=1
    )  # other items' answers in a contrast
    again: bool = True  # run the A/A control, none-again, whether or not it is named among the conditions
    # Changes smaller than these would not matter (equivalence test).
    solution_margin: float = Field(
        default=0.005, gt=0
    )  # nats a token of the solution, and of entropy; nats a character
    answer_margin: float = Field(default=0.1, gt=0)  # nats of an answer, of a contrast, or between options
    choice_margin: float = Field(default=USUAL_MARGIN, gt=0, lt=1)  # share of right choices

    def _suits(self, kind: EngineKind) -> None:
        if not kind.scores:
            raise ValueError(f"engine {self.engine!r} gives no log-probabilities of given text; use --engine hf")

    # What engines ask for besides.

    @property
    def max_new_tokens(self) -> int:
        """The one token that an engine draws after a text, which is thrown away."""
        return 1

    @property
    def mode(self) -> Literal["row-stable"]:
        return "row-stable"

    @property
    def script(self) -> None:
        return None

    @property
    def by_mless(self) -> bool:
        """Whether mless reads the log-probabilities itself, from a model that it has loaded."""
        return self.engine == "hf"

    def measured(self) -> dict[str, Any]:
        """The settings that stored numbers depend on."""
        asked = {name: getattr(self, name) for name in ("engine", "base_url", "tensor_parallel")}
        return {"others": self.others} | ({} if self.by_mless else asked)

    def judged(self) -> dict[str, Any]:
        """The settings that only judge them."""
        return {name: value for name, value in self.model_dump().items() if name.endswith("_margin")}

    def margin_of(self, metric: str) -> float:
        """What would not matter, in the metric's unit."""
        if LIKELIHOOD_METRICS[metric].unit in ("nats a token", "nats a character"):
            return self.solution_margin
        return self.choice_margin if LIKELIHOOD_METRICS[metric].share else self.answer_margin


class TuneTable(BaseModel):
    """Which of ARM's parameters are tried, and on what: ``[tune]``, in a study that has [accuracy]. ``[arm]`` is the grid's centre.

    `c` and `fraction` are alternatives, so that each setting has one of them; they are crossed with `p1` and `layers`. `p_min` and `p_max`
    are crossed with each other at the centre. A list that is empty means the centre's value.
    """

    model_config = FORBID
    c: Shares = []
    fraction: Shares = []
    p1: Shares = []
    layers: Names = []  # alternatives: "1", "2", "1-3" and "1+5" are four of them
    p_min: Shares = []
    p_max: Shares = []
    settings: Annotated[list[ArmTable], at_most(limits.CONDITIONS)] = []  # further ones, each given in full
    method: Literal["halving", "grid"] = "halving"
    rungs: int = Field(default=3, ge=1, le=30)  # of halving; each has twice the dev items of the one before
    dev_share: float = Field(default=0.5, gt=0, lt=1)  # of the items, to choose on
    transfer: Names = []  # other data, on which the chosen setting is then tried


def _split_spans(value: Any) -> Any:
    return value if isinstance(value, list) else _split_names(value)


Spans = Annotated[list[str], BeforeValidator(_split_spans)]


class CutTable(BaseModel):
    """Edges of attention that a condition cuts: one of ``cut = [{ queries = "answer", keys = "filler", layers = "2-" }]``."""

    model_config = FORBID
    queries: (
        Spans  # names of spans: start, system, filler, question, end, answer; original: all but filler and answer; all
    )
    keys: Spans
    layers: str = "all"
    heads: str | None = None
    to: Literal["rest", "sink"] = "rest"  # where the weight goes

    @model_validator(mode="after")
    def _is_a_cut(self) -> CutTable:
        as_value_error(self.value)
        return self

    def value(self) -> Cut:
        return Cut(**self.model_dump())


class PatchTable(BaseModel):
    """What a condition takes from another one's run: one of ``patch = [{ from = "mless", part = "mlp-output", layers = "1" }]``."""

    model_config = FORBID
    source: str = Field(validation_alias=AliasChoices("from", "source"))
    part: str
    layers: str = "all"
    at: Spans = ["all"]  # names of spans; all: every token that both prompts have, and the answer
    heads: str | None = None

    @model_validator(mode="after")
    def _is_a_patch(self) -> PatchTable:
        as_value_error(self.value)
        return self

    def value(self) -> Patch:
        return Patch(**self.model_dump())


def as_value_error(make: Callable[[], object]) -> None:
    """Refuse as pydantic wants it."""
    try:
        make()
    except BadStudy as fault:
        raise ValueError(str(fault)) from None


class ConditionTable(BaseModel):
    """A condition of your own: ``[condition.NAME]``."""

    model_config = FORBID
    kind: str | None = None  # repeat; none where another system text or question is all there is
    filler: Filler | None = None
    length: Length | None = None
    placement: Placement | None = None
    hidden: bool = False
    system: Text | None = None
    question: Text | None = None
    samples: Samples | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    again: bool = False
    arm: ArmTable | None = None
    seed: Seed | None = Field(default=None, ge=0)  # of the kinds edit-…: what they are drawn with
    cut: Annotated[list[CutTable], at_most(limits.CONDITIONS)] = []  # edges of attention that are removed
    patch: Annotated[list[PatchTable], at_most(limits.CONDITIONS)] = []  # parts that take another condition's values

    @model_serializer(mode="wrap")
    def _without_what_is_unset(self, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Without an unset seed, cut or patch, so that older folders still count as the same study."""
        found: dict[str, Any] = inner(self)
        unset = {"seed"} if self.seed is None else set[str]()
        unset |= {name for name in ("cut", "patch") if not found[name]}
        return {key: value for key, value in found.items() if key not in unset}


class PanelTable(BaseModel):
    model_config = FORBID
    model: str
    layer: int = 1
    head: int


class FigureTable(BaseModel):
    """Which published figure the study is for: ``[figure]``."""

    model_config = FORBID
    kind: str
    panels: list[PanelTable] = []
    models: Names = []  # published for these, where it has no panels that name them
    conditions: Names = ["none", "mless"]
    heads: str | None = None  # replaces the panels' heads: "2,5" or "most-shifted:3"
    layers: str | None = None  # replaces the panels' layers
    bars: str | None = None  # the accuracy study that makes the figure's other half

    @model_validator(mode="after")
    def _is_known(self) -> FigureTable:
        known(FIGURES, self.kind)
        return self


class MarginTable(BaseModel):
    model_config = FORBID
    drop: float = Margins().drop
    rise: float = Margins().rise
    same: tuple[float, float] = Margins().same


class AccuracyTable(EngineTable):
    """How answers are drawn and judged: ``[accuracy]``. A study that has it measures answers and not attention."""

    mode: Literal["row-stable", "batch-invariant"] = "row-stable"
    slots: Rows | None = Field(
        default=None, ge=1
    )  # rows computed at once; results depend on it; chosen by device where not given
    max_new_tokens: Annotated[int, at_most(limits.NEW_TOKENS)] = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Annotated[int, at_most(limits.WIDTH)] = Field(default=0, ge=0)
    samples: Samples = Field(default=1, ge=1)
    again: bool = True  # run the A/A control, none-again, whether or not it is named among the conditions
    stop: Annotated[list[str], at_most(limits.CONDITIONS)] = []
    k: Annotated[list[int], BeforeValidator(_split_numbers)] = [1]  # pass@k and maj@k
    rules: Names | None = None  # answer extraction, first to last; the task's own where not given
    grader: str = tasks.DEFAULT_GRADER  # what judges an answer against its reference
    cluster_field: str | None = None  # items with the same value are related and count as one unit
    margin: float = Field(
        default=USUAL_MARGIN, gt=0, lt=1
    )  # a change smaller than this would not matter (equivalence test)
    dev_share: float = Field(default=0.0, ge=0, lt=1)  # share of the items that a choice between conditions is made on
    script: str | None = None  # the scripted engine's file of answers

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
        for table, names in ((tasks.EXTRACTION_RULES, self.rules or ()), (tasks.GRADERS, (self.grader,))):
            for name in names:
                known(table, name)
        return self

    @property
    def runs_code(self) -> bool:
        """Whether judging runs what the model wrote."""
        return bool(getattr(tasks.GRADERS.get(self.grader), "runs_code", False))

    def decoding(self, temperature: float | None = None) -> Decoding:
        """How answers are drawn, at another temperature where a condition has its own."""
        asked = self.temperature if temperature is None else temperature
        return Decoding(self.max_new_tokens, asked, self.top_p, self.top_k, tuple(self.stop))

    def known_before(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that judge answers, without the usual grader: folders from before there were others must still count as judged."""
        return {key: value for key, value in fields.items() if key != "grader" or value != tasks.DEFAULT_GRADER}
