"""A declared experiment: a TOML file, its defaults, and what the command line changes in it."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from mless import limits, tasks
from mless.engines import ENGINES
from mless.errors import BadStudy
from mless.prompting import SYSTEM_TEXT
from mless.stats import Margins
from mless.study.composed_tables import COMPOSED, CauseTable, DoseTable, MultiverseTable, PlaceboTable
from mless.study.spec_tables import (
    CALCULATOR,
    CPU_GROUP,
    FORBID,
    GPU_GROUP,
    GROUPS,
    PROGRAMMER,
    AccuracyTable,
    ActivationsTable,
    AffineTable,
    ArmTable,
    Conditions,
    ConditionTable,
    EngineTable,
    FigureTable,
    Filler,
    Length,
    LikelihoodTable,
    MarginTable,
    Name,
    Names,
    PanelTable,
    Rows,
    Seed,
    Text,
    TuneTable,
    at_most,
)
from mless.values import (
    Item,
    Placement,
    check_device_map,
    pick_item,
)

__all__ = [
    "CALCULATOR",
    "CPU_GROUP",
    "GPU_GROUP",
    "PROGRAMMER",
    "AccuracyTable",
    "ArmTable",
    "CauseTable",
    "ConditionTable",
    "DoseTable",
    "EngineTable",
    "FigureTable",
    "LikelihoodTable",
    "MarginTable",
    "MultiverseTable",
    "PanelTable",
    "PlaceboTable",
    "StudySpec",
    "TuneTable",
]

#: Measurements with a table of their own in a study, the composed ones first.
_WITH_A_TABLE = (*COMPOSED, "accuracy", "activations", "affine", "likelihood")


class StudySpec(BaseModel):
    """Every field has a default and can be changed with ``--set field=value``."""

    model_config = FORBID
    name: Name
    title: str = ""
    model: str = "smollm2"
    tokenizer: str | None = None
    data: str = "bundled"
    question_field: str | None = None
    answer_field: str | None = None
    solution_field: str | None = None  # worked solutions; guessed unless given
    limit: Annotated[int, at_most(limits.ITEMS)] | None = Field(default=None, ge=1)
    only: Names = []  # ids of the items to take; all unless given
    prompt: Literal["auto", "chat", "user", "raw"] = "auto"
    system: Text = SYSTEM_TEXT
    conditions: Conditions = ["none", "mless", "mful", "random"]
    primary: str | None = None  # of answers: the condition that is tested alone, the others by Holm among themselves
    condition: dict[str, ConditionTable] = {}
    filler: Filler = " /"
    meaningful: Filler = " he"
    length: Length = Field(default=55, ge=1)
    placement: Placement = "before-question"
    layers: str = "all"
    heads: str = "all"
    seed: Seed = Field(default=0, ge=0)
    # Prompts that run at once, and the most tokens that these have together.
    batch_size: Rows | None = Field(default=None, ge=1, description="as many as `group_tokens` allows")
    group_tokens: Length | None = Field(default=None, ge=1, description=GROUPS)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: Literal["auto"] | None = None  # layers over all GPUs, CPU memory and disk; on one device unless given
    device_memory: Name | None = None  # its bounds, as cuda:0=20GiB,cpu=60GiB,disk
    margins: MarginTable = MarginTable()
    flips: Annotated[int, at_most(limits.FLIPS)] = Field(default=100_000, ge=100_000)
    figure: FigureTable | None = None
    arm: ArmTable = ArmTable()
    accuracy: AccuracyTable | None = None
    activations: ActivationsTable | None = None
    affine: AffineTable | None = None
    likelihood: LikelihoodTable | None = None
    tune: TuneTable | None = None
    placebo: PlaceboTable | None = None
    dose: DoseTable | None = None
    multiverse: MultiverseTable | None = None
    cause: CauseTable | None = None
    measures: str | None = None  # a measurement without a table of its own here, by the name it is registered by
    options: dict[str, Any] = {}  # what that measurement takes

    @field_validator("options")
    @classmethod
    def _options_can_be_stored(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as fault:
            raise ValueError(
                f"[options] are kept in study.json, which holds texts, numbers, booleans, lists and tables of them; {fault}"
            ) from None
        return options

    @property
    def measured(self) -> str:
        """What the study measures: the one place that decides it."""
        if self.measures is not None:
            return self.measures
        return next((name for name in _WITH_A_TABLE if getattr(self, name) is not None), "attention")

    @property
    def asks(self) -> tuple[str, EngineTable] | None:
        """The table that names an engine, with its name; None where no engine computes."""
        found = (("accuracy", self.accuracy), ("likelihood", self.likelihood))
        return next(((name, table) for name, table in found if table is not None), None)

    @model_validator(mode="after")
    def _can_be_placed(self) -> StudySpec:
        try:
            check_device_map(self.device_map, self.device, self.device_memory)
        except BadStudy as fault:
            raise ValueError(str(fault)) from None
        asks = self.asks
        engine = asks[1].engine if asks is not None and self.device_map is not None else "hf"
        if not ENGINES.get(engine).needs_loaded:
            table = asks[0] if asks is not None else ""
            own = f"divides it by --set {table}.tensor_parallel=N" if engine == "vllm" else "is given no weights"
            raise ValueError(
                f"--device-map places what mless loads itself, and the engine {engine} {own}; leave --device-map out, or use --engine hf"
            )
        return self

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
        asked = [name for name in _WITH_A_TABLE if getattr(self, name) is not None]
        asked = [name for name in asked if name not in COMPOSED.get(self.measured, ())]
        if self.measures is not None and asked:
            raise ValueError(f"measures = {self.measures!r} and [{asked[0]}] both say what is measured; leave one out")
        if self.measures in _WITH_A_TABLE:
            raise ValueError(
                f"measures = {self.measures!r}: write the table [{self.measures}] instead; it holds the settings of that measurement"
            )
        if self.options and self.measures is None:
            raise ValueError(
                "[options] are for a measurement of your own: name it with measures = NAME, or leave them out"
            )
        if len(asked) > 1:
            raise ValueError(
                f"a study measures one thing, and this one has {' and '.join(f'[{name}]' for name in asked)}; make two of it"
            )
        if self.affine is not None and self.batch_size not in (None, 1):
            raise ValueError(
                f"an affine study runs the prompts of a pair together and no others, so it takes no batch_size; got {self.batch_size}, leave it out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_what_its_task_needs(cls, fields: Any) -> Any:
        """Sums ask for the result alone: small models reason their way to wrong answers, and tokens cost time. Code is judged by tests."""
        if not isinstance(fields, dict) or fields.get("accuracy") is None:
            return cast("Any", fields)
        given = cast("dict[str, Any]", fields)
        data = str(given.get("data", ""))
        if data.startswith("arithmetic"):
            return {"system": CALCULATOR} | given
        if PurePath(data).stem.lower().startswith("humaneval") and isinstance(given["accuracy"], dict):
            table = {"grader": tasks.CODE_GRADER} | cast("dict[str, Any]", given["accuracy"])
            return {"system": PROGRAMMER} | given | {"accuracy": table}
        return given

    _source: str | None = PrivateAttr(default=None)
    _as_written: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    _names_server: bool = PrivateAttr(default=False)

    @property
    def names_server(self) -> bool:
        """Whether the user, and not only the study's file, says which server is asked."""
        return self._names_server

    @property
    def source(self) -> str:
        """What to type after ``mless run`` to get this study: its name, or its file."""
        return self._source or self.name

    def changed(self) -> dict[str, Any]:
        """The fields that are not as the study's own file has them."""
        own = self._as_written
        return {key: value for key, value in self.model_dump().items() if own and value != own[key]}

    def margins_of(self) -> Margins:
        return Margins(self.margins.drop, self.margins.rise, self.margins.same)

    def load_items(self) -> tuple[str, list[Item]]:
        """The task's name and the items the study is about."""
        task, items = tasks.load_items(
            self.data,
            question_field=self.question_field,
            answer_field=self.answer_field,
            solution_field=self.solution_field,
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
