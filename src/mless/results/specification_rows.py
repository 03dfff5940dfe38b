"""The rows of a multiverse's tables: every column stated once (docs/multiverse.md)."""

from __future__ import annotations

from dataclasses import dataclass

from mless.results.schemas import schema_of


@dataclass(frozen=True, slots=True)
class Specification:
    """One row of ``specifications.parquet``: one condition by one metric in one specification, against `none` (docs/multiverse.md).

    `p` and `verdict` are those of this specification by itself. One that could not be run has a `reason` and no numbers. `folder` is the
    inner folder that holds its items.
    """

    model: str
    task: str
    condition: str
    metric: str
    specification: int
    readout: str
    template: str
    system: str
    dtype: str
    engine: str
    extraction: str | None
    grader: str | None
    folder: str
    n: int | None
    delta: float | None
    lo: float | None
    hi: float | None
    p: float | None
    skewed: bool | None
    margin: float | None
    verdict: str | None  # rises | drops | equivalent | undecided
    reason: str | None


@dataclass(frozen=True, slots=True)
class SpecificationTest:
    """One row of ``specification_tests.parquet``: all specifications of a condition by one metric, jointly.

    `p_rises`: so many or more rise where nothing has an effect; `p_drops` likewise, and `p_either` for the larger of the two.
    `rises_by_chance` is how many rise on average, `rises_limit` in 95 % of cases at most. `p_median` is of the median Δ, both sides. All by
    flipping items' signs in all specifications at once.
    """

    model: str
    task: str
    condition: str
    metric: str
    n: int
    specifications: int
    left_out: int
    rises: int
    drops: int
    equivalent: int
    undecided: int
    median: float
    lowest: float
    highest: float
    p_median: float | None
    p_rises: float | None
    p_drops: float | None
    p_either: float | None
    rises_by_chance: float | None
    rises_limit: int


@dataclass(frozen=True, slots=True)
class SpecificationSetting:
    """One row of ``specification_settings.parquet``: one value of a setting that has several.

    `delta` is the mean Δ at this value with the other settings balanced. `range`, `range_p`, Holm's `range_p_adjusted` over the settings of a
    metric, `turned` and `pairs` are the same for all values of a setting: `turned` of `pairs` specifications that differ in it alone have
    different verdicts.
    """

    model: str
    task: str
    condition: str
    metric: str
    setting: str
    value: str
    specifications: int
    rises: int
    drops: int
    delta: float | None
    range: float | None
    range_p: float | None
    range_p_adjusted: float | None
    turned: int
    pairs: int


SPECIFICATIONS = schema_of(Specification)
SPECIFICATION_TESTS = schema_of(SpecificationTest)
SPECIFICATION_SETTINGS = schema_of(SpecificationSetting)
