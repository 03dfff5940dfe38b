"""The tables of studies that are made of other studies: ``[placebo]``, ``[dose]``, ``[multiverse]`` and ``[cause]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from mless import limits, tasks
from mless.changes import PARTS, Patch
from mless.conditions import EDITS
from mless.engines import ENGINES
from mless.prompting import PROMPT_KINDS, SYSTEM_TEXT
from mless.registry import near
from mless.study.spec_tables import FORBID, Length, Names, Spans, Text, as_value_error, at_most, known

#: Measurements made of others, and whose settings such a study may hold beside its own.
COMPOSED = {
    "tune": ("accuracy",),
    "placebo": ("likelihood", "accuracy"),
    "dose": ("likelihood",),
    "multiverse": ("likelihood", "accuracy"),
    "cause": ("likelihood", "accuracy"),
}


def _check_readouts(by: list[str], known: tuple[str, ...]) -> list[str]:
    if not by or len(set(by)) < len(by) or not set(by) <= set(known):
        raise ValueError(f"expected one or both of {', '.join(known)}, each once")
    return [name for name in known if name in by]


class PlaceboTable(BaseModel):
    """Which arbitrary edits the named fillers are placed among: ``[placebo]``. They have the study's length and placement."""

    model_config = FORBID
    edits: Annotated[int, at_most(limits.CONDITIONS)] = Field(default=40, ge=2)
    kinds: Names = list(EDITS)  # they take turns
    by: Names = ["likelihood"]  # and accuracy, if asked

    @field_validator("by")
    @classmethod
    def _readouts(cls, by: list[str]) -> list[str]:
        return _check_readouts(by, COMPOSED["placebo"])

    def measured(self) -> dict[str, Any]:
        """The settings that stored numbers depend on."""
        return {"edits": self.edits, "kinds": self.kinds}


class DoseTable(BaseModel):
    """In which lengths and where the study's fillers are tried: ``[dose]``. Length 0 is `none`."""

    model_config = FORBID
    most: Length = Field(default=1000, ge=2)  # the longest
    points: Annotated[int, at_most(limits.CONDITIONS)] = Field(default=11, ge=2)  # lengths from 1, in equal ratios
    placements: Names = ["before-question", "before-answer"]
    dev_share: float = Field(default=0.5, gt=0, lt=1)  # of the items, to choose the best length on

    def measured(self) -> dict[str, Any]:
        """The settings that stored numbers depend on."""
        return self.model_dump(exclude={"dev_share"})


#: What a cause study finds.
CAUSE_PARTS = ("ladder", "map", "chain")


class CauseTable(BaseModel):
    """What the effect of the study's filler is taken apart into: ``[cause]``. The map is of the study's `layers`."""

    model_config = FORBID
    of: Names = list(CAUSE_PARTS)
    parts: Names = ["attention-output", "mlp-output", "residual"]  # of the map
    every: Annotated[int, at_most(limits.LAYERS)] = Field(default=1, ge=1)  # 3: every third layer, from the first on
    by_head: bool = False  # attention outputs head by head, of the study's `heads`
    at: Spans = ["all"]  # spans whose tokens are patched
    by: Names = ["likelihood"]  # and accuracy, if asked

    @field_validator("by")
    @classmethod
    def _readouts(cls, by: list[str]) -> list[str]:
        return _check_readouts(by, COMPOSED["cause"])

    @model_validator(mode="after")
    def _are_known(self) -> CauseTable:
        for field, known_ones in (("of", CAUSE_PARTS), ("parts", PARTS)):
            asked: list[str] = getattr(self, field)
            if not asked or len(set(asked)) < len(asked):
                raise ValueError(f"{field}: name at least one, and each once; got {', '.join(asked) or 'none'}")
            for one in asked:
                if one not in known_ones:
                    raise ValueError(
                        f"{field}: no {one[:60]!r}{near(one[:60], known_ones)}; there are: {', '.join(known_ones)}"
                    )
        as_value_error(lambda: Patch("residual", at=self.at))
        if "keys-values" in self.parts and self.at != ["all"]:
            raise ValueError(
                "at: keys-values are put in and taken out whole; leave at out, or keys-values out of parts"
            )
        if "accuracy" in self.by and ("keys-values" in self.parts or "answer" in self.at):
            raise ValueError(
                "by: answers are patched at the prompt's tokens only, and keys-values (or at = answer) take the answer's too; leave accuracy out of "
                "by, or those out"
            )
        if self.by_head and "attention-output" not in self.parts:
            raise ValueError("by_head: only attention-output is apart by head; add it to parts, or leave by_head out")
        return self

    def measured(self) -> dict[str, Any]:
        """The settings that stored numbers depend on."""
        return self.model_dump(exclude={"by"})


#: System texts that a multiverse knows by name, besides `study`, the study's own.
SYSTEM_TEXTS = {
    "boxed": SYSTEM_TEXT,
    "helpful": "You are a helpful assistant.",
    "steps": "Let's think step by step.",
    "none": "",
}
#: Dtypes that a multiverse may compute in; `auto` would be another one on another machine.
DTYPES = ("float32", "bfloat16", "float16")
#: The extraction rules that the task itself has.
TASKS_OWN = "task"


class MultiverseTable(BaseModel):
    """The settings that one comparison is repeated in: ``[multiverse]``. Every combination of their values is a specification.

    `extraction` and `grader` judge the same stored answers again, so they are settings of accuracy alone.
    """

    model_config = FORBID
    template: Names = ["chat", "user", "raw"]
    system: Names = ["study", "helpful", "none"]  # names of texts
    texts: dict[str, Text] = {}  # system texts of your own, by name
    dtype: Names = ["float32"]  # and bfloat16, which a CPU without units for it computes slowly
    engine: Names = ["hf"]
    extraction: Names = [TASKS_OWN, "boxed", "last-number", "answer-is"]  # rules tried first to last: boxed+last-number
    grader: Names = [tasks.DEFAULT_GRADER, "numeric", "exact-match"]
    by: Names = ["likelihood"]  # and accuracy, if asked

    @field_validator("by")
    @classmethod
    def _readouts(cls, by: list[str]) -> list[str]:
        return _check_readouts(by, COMPOSED["multiverse"])

    @model_validator(mode="after")
    def _are_known(self) -> MultiverseTable:
        for name in self.texts:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", name):
                raise ValueError(
                    f"texts: {name[:60]!r} becomes part of folder names: at most 40 letters, digits, dashes and underscores expected"
                )
            if name in ("study", *SYSTEM_TEXTS):
                raise ValueError(f"texts: {name!r} is a text already; give yours another name")
        choices: dict[str, Sequence[str]] = {
            "template": PROMPT_KINDS,
            "system": ("study", *SYSTEM_TEXTS, *self.texts),
            "dtype": DTYPES,
        }
        for field in MULTIVERSE_SETTINGS:
            asked: list[str] = getattr(self, field)
            if not asked or len(set(asked)) < len(asked):
                raise ValueError(f"{field}: name at least one value, and each once; got {', '.join(asked) or 'none'}")
            for one in asked:
                if field in choices and one not in choices[field]:
                    raise ValueError(
                        f"{field}: no {one[:60]!r}{near(one, choices[field])}; there are: {', '.join(choices[field])}"
                    )
        for one in self.engine:
            known(ENGINES, one)
        for one in self.extraction:
            for rule in one.split("+") if one != TASKS_OWN else ():
                known(tasks.EXTRACTION_RULES, rule)
        for one in self.grader:
            known(tasks.GRADERS, one)
            if getattr(tasks.GRADERS.get(one), "runs_code", False):
                raise ValueError(
                    f"grader: {one!r} runs code that the model wrote, and no other grader judges code; leave it out"
                )
        return self

    def system_text(self, name: str, own: str) -> str:
        """The text that a name stands for; `own` is the study's."""
        return own if name == "study" else (SYSTEM_TEXTS | self.texts)[name]


#: The settings of a specification, in the order of tables and pictures; the last two judge answers.
MULTIVERSE_SETTINGS = ("template", "system", "dtype", "engine", "extraction", "grader")
