"""What the tables of a result folder may hold: their keys, the range of each column, and which columns may be missing or null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import pyarrow as pa

from mless.changes import PARTS
from mless.results import cause_rows, schemas
from mless.results import specification_rows as rows
from mless.results.nats import LIKELIHOOD_METRICS, METRICS_OF_CHANGE
from mless.values import MASS_NAMES, QUERY_SETS

_SPANS = pa.list_(pa.struct([("name", pa.string()), ("start", pa.int32()), ("stop", pa.int32())]))
_MASS = pa.struct([(name, pa.float32()) for name in MASS_NAMES])
_VERDICTS = ("rises", "drops", "unchanged", "equivalent", "undecided", "holds", "partly", "fails")


@dataclass(frozen=True, slots=True)
class Shape:
    """A table: its columns, those that name a row, and the newer ones, which older folders lack."""

    columns: pa.Schema
    key: tuple[str, ...]
    newer: frozenset[str] = frozenset()
    #: Columns that may be null. Numbers with a fraction always may: a number that is none is stored as null.
    empty: frozenset[str] = frozenset()
    #: Numbers with a fraction that may not be null.
    filled: frozenset[str] = frozenset()
    #: Whether `condition` and `item` are those of study.json. The table `tuned` holds conditions of inner studies.
    of_study: bool = True
    #: Whether there is a row for every combination of what its key columns hold, and for every condition but `none`.
    grid: bool = True
    #: Columns of lists that are as long as the item's prompt.
    by_token: tuple[str, ...] = ()
    #: Whether no number is infinite. A sum of logarithms may be.
    finite: bool = True
    #: Texts that are one of a few in this table, by column.
    among: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def _optional(row: type) -> frozenset[str]:
    return frozenset(one.name for one in fields(row) if "None" in str(one.type))


def _always(row: type) -> frozenset[str]:
    return frozenset(one.name for one in fields(row)) - _optional(row)


_PROMPTS = schemas.schema(
    "item", ("token_ids", pa.list_(pa.int32())), ("spans", _SPANS), ("text", pa.string()), ("tokens", pa.list_(pa.string()))
)  # fmt: skip
_RECEIVED = ("received", pa.list_(pa.float32()))
_ATTENTION = schemas.schema("item", "layer", "head", "queries", _RECEIVED, ("n", pa.list_(pa.int32())), ("mass", _MASS))
_NEWER_ACCURACY = frozenset(schemas.columns_of(schemas.Accuracy, newer=True))
_ACCURACY = Shape(
    schemas.ACCURACY,
    ("task", "condition", "split", "metric"),
    _NEWER_ACCURACY,
    _optional(schemas.Accuracy),
    filled=frozenset(("value",)),
    grid=False,
)
_LIKELIHOOD = {"metric": tuple(LIKELIHOOD_METRICS)}
_OF_CHANGE = {"metric": tuple(METRICS_OF_CHANGE)}

SHAPES: dict[str, Shape] = {
    "prompts": Shape(_PROMPTS, ("condition", "item"), frozenset(("token_ids", "spans", "tokens"))),
    "attention": Shape(
        _ATTENTION, ("condition", "item", "layer", "head", "queries"), empty=frozenset(("mass",)), by_token=("received", "n")
    ),
    "dilution": Shape(
        schemas.schema("item", "layer", "queries", _RECEIVED), ("condition", "item", "layer", "queries"), by_token=("received",)
    ),
    "retained": Shape(
        schemas.RETAINED,
        ("condition", "layer", "head", "queries"),
        frozenset(("epsilon", "epsilon_lo", "epsilon_hi", "epsilon_items", "skewed")),
        frozenset(("epsilon_items", "skewed")),
    ),
    "shares": Shape(schemas.SHARES, ("condition", "item", "layer", "head", "queries"), frozenset(("epsilon",))),
    "activation_items": Shape(schemas.ACTIVATION_ITEMS, ("condition", "item", "layer", "tokens")),
    "activation_histograms": Shape(schemas.ACTIVATION_HISTOGRAMS, ("condition", "item", "layer")),
    "activations": Shape(schemas.ACTIVATIONS, ("condition", "layer", "tokens", "metric"), empty=frozenset(("verdict",))),
    "affine": Shape(
        schemas.AFFINE, ("condition", "layer", "head"), empty=frozenset(("lambda_skewed", "skewed", "lambda_verdict", "verdict", "verdict_measured"))
    ),
    "affine_items": Shape(schemas.AFFINE_ITEMS, ("condition", "item", "layer", "head")),
    "affine_points": Shape(schemas.AFFINE_POINTS, ("condition", "item", "layer", "head", "token"), grid=False),
    # An item without a solution has no tokens, and one without an answer no candidates, so these are no grids.
    "scores": Shape(
        schemas.SCORES, ("condition", "item", "metric"), filled=frozenset(("value",)), grid=False, among=_LIKELIHOOD
    ),
    "tokens": Shape(
        schemas.SOLUTION_TOKENS, ("condition", "item", "position"), frozenset(("text",)), filled=frozenset(("logp",)), grid=False
    ),
    "candidates": Shape(
        schemas.CANDIDATES, ("condition", "item", "number"), filled=frozenset(("logp",)), grid=False
    ),
    "likelihood": Shape(
        schemas.LIKELIHOOD, ("condition", "item", "metric"), filled=frozenset(("value", "delta")), grid=False, among=_LIKELIHOOD
    ),
    "effects": Shape(
        schemas.EFFECTS, ("condition", "metric"), empty=_optional(schemas.Effect), filled=_always(schemas.Effect), among=_LIKELIHOOD
    ),
    "answers": Shape(
        schemas.ANSWERS,
        ("condition", "item", "sample"),
        frozenset(("stated", "cluster", "how", "reference", "disagree")),
        frozenset(("extracted", "n_tokens", "finish", "reference", "how", "disagree", "cluster", "stated", "seed", "why")), grid=False,
    ),
    "accuracy": _ACCURACY,
    "tuned": replace(_ACCURACY, of_study=False),
    "tuning": Shape(
        schemas.TUNING, ("condition", "rung"), empty=_optional(schemas.Tried), filled=_always(schemas.Tried), grid=False
    ),
    "placebo": Shape(
        schemas.PLACEBO, ("condition", "metric"), empty=_optional(schemas.PlacedFiller), filled=_always(schemas.PlacedFiller), grid=False
    ),
    "dose": Shape(schemas.DOSE, ("condition", "metric"), filled=_always(schemas.DosePoint), grid=False),
    "dose_tests": Shape(
        schemas.DOSE_TESTS, ("filler", "placement", "metric"), filled=_always(schemas.DoseTest), of_study=False, grid=False
    ),
    "specifications": Shape(
        rows.SPECIFICATIONS, ("condition", "metric", "specification"), empty=_optional(rows.Specification),
        filled=_always(rows.Specification), grid=False,
    ),
    "specification_tests": Shape(
        rows.SPECIFICATION_TESTS, ("condition", "metric"), filled=_always(rows.SpecificationTest), grid=False
    ),
    "specification_settings": Shape(
        rows.SPECIFICATION_SETTINGS, ("condition", "metric", "setting", "value"), filled=_always(rows.SpecificationSetting), grid=False
    ),
    "ladder": Shape(
        cause_rows.LADDER, ("metric", "step", "against"), empty=_optional(cause_rows.LadderStep), filled=_always(cause_rows.LadderStep),
        grid=False, among=_OF_CHANGE | {"step": cause_rows.STEPS},
    ),
    "cause": Shape(
        cause_rows.CAUSE, ("metric", "layer", "part", "head", "direction"), empty=_optional(cause_rows.CauseCell),
        filled=_always(cause_rows.CauseCell), grid=False,
        among=_OF_CHANGE | {"direction": cause_rows.DIRECTIONS, "part": PARTS},
    ),
    "chain": Shape(
        cause_rows.CHAIN, ("metric", "link", "direction"), empty=_optional(cause_rows.CauseLink), filled=_always(cause_rows.CauseLink),
        grid=False, among=_OF_CHANGE | {"direction": cause_rows.DIRECTIONS, "link": cause_rows.LINKS},
    ),
    "edits": Shape(
        schemas.EDIT_MEANS, ("condition", "metric"), empty=frozenset(("ids", "text")), filled=frozenset(("delta",)), grid=False
    ),
}  # fmt: skip

#: Texts that are one of a few, by column.
AMONG: dict[str, tuple[str, ...]] = {
    "queries": QUERY_SETS,
    "split": ("all", "dev", "test"),
    "verdict": _VERDICTS,
    "lambda_verdict": _VERDICTS,
    "verdict_measured": _VERDICTS,
    "role": ("answer", "other", "option"),
}
#: Numbers between two bounds, by column; None is no bound. Shares lie between 0 and 1.
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "layer": (1, None), "head": (0, None), "token": (0, None), "sample": (0, None), "n_items": (0, None), "n_tokens": (0, None),
    "n_scored": (0, None), "rung": (1, None), "n": (1, None), "samples": (1, None), "epsilon_items": (0, None),
    **dict.fromkeys(("slope_p", "slope_p_adjusted", "peak_p", "peak_p_adjusted", "test_p"), (0.0, 1.0)),
    **dict.fromkeys(("p_median", "p_rises", "p_drops", "p_either", "range_p", "range_p_adjusted"), (0.0, 1.0)), "specification": (1, None),
    "edits": (1, None), "edits_sd": (0.0, None), **dict.fromkeys(("percentile", "percentile_lo", "percentile_hi"), (0.0, 1.0)),
    **dict.fromkeys(("p", "p_adjusted", "p_again", "equivalence_p", "lambda_p", "lambda_p_adjusted", "equivalent_p"), (0.0, 1.0)),
    "position": (0, None), "number": (0, None), "logp": (None, 0.0), "entropy": (0.0, None), "agree": (0.0, 1.0), "margin": (0.0, None),
    "mde": (0.0, None),
}  # fmt: skip
