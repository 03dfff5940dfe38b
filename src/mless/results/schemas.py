"""The tables of a result folder: every column stated once, and rows or columns made into a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import pyarrow as pa

from mless.stats import METRICS
from mless.values import Prompt

#: Columns that are no numbers, by name; whatever is not named here is a float64.
_TEXT = frozenset(
    "model task condition item queries verdict tokens metric scale half verdict_measured lambda_verdict".split()
)
_WHOLE = frozenset("layer head token n_items epsilon_items n_tokens n_scored units".split())
_MARKS = frozenset(("skewed", "lambda_skewed"))
#: Every table begins with these.
COMMON = ("model", "task", "condition")


def _kind(name: str) -> pa.DataType:
    if name in _TEXT:
        return pa.string()
    if name in _WHOLE:
        return pa.int32()
    return pa.bool_() if name in _MARKS else pa.float64()


def schema(*columns: str | tuple[str, pa.DataType]) -> pa.Schema:
    """model, task, condition and these columns; a column's type follows from its name unless it is given."""
    named = [(one, _kind(one)) if isinstance(one, str) else one for one in (*COMMON, *columns)]
    return pa.schema(named)


def schema_of(row: type) -> pa.Schema:
    """The columns of a dataclass whose instances are rows."""
    kinds = {str: pa.string(), int: pa.int32(), float: pa.float64(), bool: pa.bool_(), tuple: pa.list_(pa.int32())}
    hints = get_type_hints(row)

    def kind(name: str) -> pa.DataType:
        parts = [part for part in get_args(hints[name]) if part is not type(None)]
        if hints[name] not in kinds and parts and parts[0] in kinds and parts[-1] is not Ellipsis:
            return kinds[parts[0]]
        return kinds.get(hints[name], kinds[tuple])

    return pa.schema([(field.name, kind(field.name)) for field in fields(row)])


def columns_of(row: type, *, newer: bool) -> list[str]:
    """The columns that every folder has, or the `newer` ones, which have a default because older folders lack them."""
    return [field.name for field in fields(row) if (field.default is not MISSING) == newer]


def plain(value: Any) -> Any:
    """NaN and None as None: null in a table."""
    return None if isinstance(value, float) and math.isnan(value) else value


def table_of_rows(rows: Sequence[Mapping[str, Any]], wanted: pa.Schema) -> pa.Table:
    """Rows by column name; a column that a row lacks, and a number that is NaN, are null."""
    return pa.table({name: [plain(row.get(name)) for row in rows] for name in wanted.names}, schema=wanted)


def table_of_columns(columns: Mapping[str, Any], wanted: pa.Schema, rows: int) -> pa.Table:
    """Columns by name, a single text for a column that is the same in every row; a number that is NaN is null."""

    def column(field: pa.Field) -> pa.Array:
        values = columns[field.name]
        if isinstance(values, pa.Array):
            return values
        if isinstance(values, str):
            return pa.repeat(pa.scalar(values, pa.string()), rows)
        if field.type != pa.float64():
            return pa.array(values, field.type)
        numbers = np.asarray(values, np.float64)
        return pa.array(numbers, pa.float64(), mask=np.isnan(numbers))

    return pa.table({field.name: column(field) for field in wanted}, schema=wanted)


def lists(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Rows of equal length as a list column; NaN is null."""
    rows, width = values.shape
    flat = values.reshape(-1)
    mask = np.isnan(flat) if flat.dtype.kind == "f" else None
    offsets = np.arange(rows + 1, dtype=np.int32) * width
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind, mask=mask))


def matrix(table: pa.Table, name: str) -> np.ndarray:
    """A list column whose rows are equally long: rows × values, NaN for null."""
    flat = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(table.num_rows, -1)


def _bounded(*names: str) -> tuple[str, ...]:
    return tuple(name + bound for name in names for bound in ("", "_lo", "_hi"))


# ---- prompts ---------------------------------------------------------------------------------------------------------


def prompts_table(prompts: Mapping[str, Sequence[Prompt]], tokenizer: Any, names: Mapping[str, str]) -> pa.Table:
    """prompts.parquet: ids, spans and the tokens' texts of every prompt."""
    rows = [prompt for group in prompts.values() for prompt in group]
    pieces = token_texts((prompt.token_ids for prompt in rows), tokenizer)
    span = pa.struct([("name", pa.string()), ("start", pa.int32()), ("stop", pa.int32())])
    return pa.table(
        {
            "model": pa.array([names["model"]] * len(rows), pa.string()),
            "task": pa.array([names["task"]] * len(rows), pa.string()),
            "condition": pa.array([p.condition for p in rows]),
            "item": pa.array([p.item for p in rows]),
            "token_ids": pa.array([list(p.token_ids) for p in rows], pa.list_(pa.int32())),
            "spans": pa.array(
                [[{"name": s.name, "start": s.start, "stop": s.stop} for s in p.spans] for p in rows], pa.list_(span)
            ),
            "text": pa.array([p.text for p in rows]),
            "tokens": pa.array([[pieces[token] for token in p.token_ids] for p in rows], pa.list_(pa.string())),
        }
    )


def token_texts(sequences: Iterable[Iterable[int]], tokenizer: Any) -> dict[int, str]:
    """Token → its text, for every token that occurs."""
    every = {token for sequence in sequences for token in sequence}
    return {token: tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in every}


# ---- attention -------------------------------------------------------------------------------------------------------

RETAINED = schema(
    "layer", "head", "queries", "retained", "lo", "hi", *_bounded("epsilon"), "epsilon_items", "p", "p_adjusted", "n_items", "uniform",
    "skewed", "verdict",
)  # fmt: skip
SHARES = schema("item", "layer", "head", "queries", "retained", "uniform", "epsilon")

# ---- activations -----------------------------------------------------------------------------------------------------

TokenClass = Literal["digits", "operators", "conjunctions", "other"]
TOKEN_CLASSES: tuple[TokenClass, ...] = get_args(TokenClass)
#: The token sets of a row: all original tokens, those of the question, and the classes, which partition the first.
TOKENS: tuple[str, ...] = ("all", "question", *TOKEN_CLASSES)
#: A row per item, layer and set of tokens; null where the item has no such tokens.
ACTIVATION_ITEMS = schema(
    "item", "layer", "tokens", "n_tokens", "units", "threshold", "width", "median", "mad", *METRICS, "mean", "deviation"
)
#: A row per item and layer: counts of its original tokens' values.
ACTIVATION_HISTOGRAMS = schema(
    "item", "layer", "width", *((kind, pa.list_(pa.int64())) for kind in ("linear", "zoom", "positive", "negative")), ("zeros", pa.int64())
)  # fmt: skip
#: A row per condition, layer, set of tokens and metric, against `none`.
ACTIVATIONS = schema(
    "layer", "tokens", "metric", "scale", "value", "none", "difference", "lo", "hi", "p", "p_adjusted", "n_items", "verdict", "threshold",
    "levene",
)  # fmt: skip

# ---- the affine map --------------------------------------------------------------------------------------------------

#: What is left of the displacement by each prediction: column of affine.parquet → the sum of an item.
FORMS = {
    "r2_measured": "left_measured",
    "r2_kept": "left_kept",
    "r2_shifted": "left_shifted",
    "r2_position": "left_position",
}
AFFINE = schema(
    "layer", "head", *_bounded("lambda"), "lambda_p", "lambda_p_adjusted", "lambda_skewed", "lambda_verdict", *_bounded("kept"),
    "lambda_constant", "sigma_constant", *_bounded("displacement", "r2_measured"), "verdict_measured", *_bounded("r2_kept", "r2_constant"),
    "p", "p_adjusted", "skewed", "verdict", *_bounded("r2_shifted", "r2_position", "position_share", "cosine"), "n_items", "n_scored",
    "n_tokens",
)  # fmt: skip
AFFINE_ITEMS = schema(
    "item",
    "layer",
    "head",
    "half",
    "n_tokens",
    "lambda",
    "kept",
    "moves",
    "outputs",
    "r2_constant",
    *FORMS,
    "position_share",
)
#: What is summed for every head over an item's tokens; each is defined in docs/affine.md.
AFFINE_SCALARS: tuple[str, ...] = (
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
#: Units of these two tables hold other columns: the sums, and vectors of a few tokens.
AFFINE_SUMS = schema(
    "item", "layer", "head", "n_tokens", *AFFINE_SCALARS, *((name, pa.list_(pa.float64())) for name in ("output", "displacement", "direction"))
)  # fmt: skip
AFFINE_VECTORS = schema(
    "item", "layer", "head", "token", *((name, pa.list_(pa.float32())) for name in ("before", "after", "measured"))
)  # fmt: skip
AFFINE_POINTS = schema(
    "item", "layer", "head", "token", "half",
    *(axis + name for name in ("", "_after", "_measured", "_constant", "_outputs", "_moves") for axis in "xy"),
)  # fmt: skip

# ---- likelihood ------------------------------------------------------------------------------------------------------

#: A row per item and metric: sums of log p in nats, or what docs/likelihood.md says of the metric.
SCORES = schema("item", "metric", "value", "n_tokens")
#: A row per token of the reference solution: its log p, and the distribution it is drawn from, beside `none`'s.
SOLUTION_TOKENS = schema(
    "item", ("position", pa.int32()), "token", ("text", pa.string()), "logp", "entropy", "kl", "agree"
)
#: A row per short text scored after the prompt: the answer, other items' answers, options.
CANDIDATES = schema("item", ("number", pa.int32()), ("role", pa.string()), ("text", pa.string()), "logp", "n_tokens")
LIKELIHOOD = schema("item", "metric", "value", "delta", "n_tokens")


@dataclass(frozen=True, slots=True)
class Effect:
    """One row of ``effects.parquet``: what a condition does to one metric, against `none`, over the items that have it.

    `delta` = `value` − `none`, with its 95 % interval. `p` is the sign-flip test's, `p_again` against `none-again`. `p_adjusted` is Holm's over
    the conditions, `alpha` the level where no other condition has an effect, and `mde` the smallest effect that is then found with 80 % power.
    `equivalent_p` is that of the two one-sided tests against ±`margin`. Null for the A/A control, and where a metric is described and not tested.
    """

    model: str
    task: str
    condition: str
    metric: str
    n: int
    value: float
    none: float
    delta: float
    lo: float | None
    hi: float | None
    p: float | None
    p_again: float | None
    p_adjusted: float | None
    alpha: float | None
    equivalent_p: float | None
    margin: float | None
    mde: float | None
    skewed: bool
    verdict: str | None  # rises | drops | equivalent | undecided


EFFECTS = schema_of(Effect)

# ---- placebos --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlacedFiller:
    """One row of ``placebo.parquet``: a named filler among arbitrary edits by one metric, over items and edits (docs/placebo.md).

    `delta` is the filler's change against `none`, with an interval over items. `specific` = `delta` − the edits' mean, and `percentile` the share
    of edits below; both intervals hold over items and edits. `p` = (1 + edits at least as far from their mean) / (edits + 1). The columns
    `edits_…` are the same for all fillers of a metric: the edits' mean with its interval, and their spread without the items' noise.
    """

    model: str
    task: str
    condition: str
    metric: str
    n: int
    edits: int
    delta: float
    delta_lo: float | None
    delta_hi: float | None
    specific: float
    specific_lo: float | None
    specific_hi: float | None
    percentile: float
    percentile_lo: float | None
    percentile_hi: float | None
    p: float
    edits_mean: float | None
    edits_lo: float | None
    edits_hi: float | None
    edits_sd: float | None
    margin: float | None
    verdict: str  # rises | drops: further than an arbitrary edit; equivalent | undecided


PLACEBO = schema_of(PlacedFiller)
#: A row per edit and metric: its mean change against `none`, with an interval over items, and what it is.
EDIT_MEANS = schema(
    ("kind", pa.string()), "metric", ("n", pa.int32()), "delta", "lo", "hi", ("ids", pa.list_(pa.int32())), ("text", pa.string())
)  # fmt: skip

# ---- doses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DosePoint:
    """One row of ``dose.parquet``: a filler in one length at one place by one metric, against `none` (length 0), item by item.

    `lo` and `hi` hold for this row, `lo_all` and `hi_all` for all lengths of its curve at once. `p` is the sign-flip test's, `p_adjusted` Holm's
    over the lengths of the curve. `skewed`: a few items decide the row.
    """

    model: str
    task: str
    condition: str
    filler: str
    placement: str
    length: int
    metric: str
    n: int
    delta: float
    lo: float | None
    hi: float | None
    lo_all: float | None
    hi_all: float | None
    skewed: bool
    p: float | None
    p_adjusted: float | None


@dataclass(frozen=True, slots=True)
class DoseTest:
    """One row of ``dose_tests.parquet``: one curve, a filler at one place by one metric (docs/dose.md). `condition` is the filler's name.

    `slope`: change per doubling of 1 + length. `peak_p`: some length in between is better than none and than the longest; `peak_length` is the
    best one seen. `slope_p_adjusted` and `peak_p_adjusted` are Holm's over the curves of a metric. `best_length` was chosen on the dev items;
    `test_…` is what it does to the others. `chosen`: of all curves of the metric the best on the dev items.
    """

    model: str
    task: str
    condition: str
    filler: str
    placement: str
    metric: str
    n: int
    slope: float
    slope_lo: float | None
    slope_hi: float | None
    slope_p: float | None
    slope_p_adjusted: float | None
    peak_length: int
    peak_p: float | None
    peak_p_adjusted: float | None
    best_length: int
    dev_n: int
    dev_delta: float | None
    test_n: int
    test_delta: float | None
    test_lo: float | None
    test_hi: float | None
    test_p: float | None
    chosen: bool


DOSE = schema_of(DosePoint)
DOSE_TESTS = schema_of(DoseTest)

# ---- answers ---------------------------------------------------------------------------------------------------------

#: One row per answer. `reference` is the task's own answer, `how` the extraction rule that found the answer, `disagree` where the string and
#: the symbolic rule judged differently. `stated`: whether the text presents the answer as its result, or it was guessed (docs/extraction.md);
#: null where there is no answer.
ANSWERS = pa.schema(
    [
        ("model", pa.string()),
        ("task", pa.string()),
        ("condition", pa.string()),
        ("item", pa.string()),
        ("sample", pa.int32()),
        ("seed", pa.int64()),
        ("text", pa.string()),
        ("extracted", pa.string()),
        ("correct", pa.bool_()),
        ("why", pa.string()),
        ("n_tokens", pa.int32()),
        ("finish", pa.string()),
        ("reference", pa.string()),
        ("how", pa.string()),
        ("disagree", pa.bool_()),
        ("cluster", pa.string()),
        ("stated", pa.bool_()),
    ]
)
#: Units hold the answers only. Judgements can be computed again at any time.
REPLIES = pa.schema(
    [
        ANSWERS.field(name)
        for name in ("model", "task", "condition", "item", "sample", "seed", "text", "n_tokens", "finish")
    ]
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One row of ``accuracy.parquet``: a condition's accuracy by one metric on one split, beside `none`'s. Shares are 0…1.

    `p` is against `none`, `p_again` against `none-again` (null where that was not run). `p_adjusted` = Holm over the conditions of max(p,
    p_again); for the primary condition, tested alone, just the maximum. `alpha` is the level for that p where no other condition has an
    effect. `mde` is the smallest effect that this test shows with 80 % power at this number of items. `delta_lo_all` and `delta_hi_all`
    hold for all conditions of the metric at once. `aa_delta` is the A/A difference of the same metric, beside every delta. Null where a
    number has no meaning (delta of `none`).
    """

    model: str
    task: str
    condition: str
    split: str  # all | dev | test
    metric: str  # pass@1, pass@4, maj@8, diversity
    n: int
    value: float | None
    lo: float | None
    hi: float | None
    sd: float | None  # over samples (seeds), null with one
    delta: float | None
    delta_lo: float | None
    delta_hi: float | None
    p: float | None
    p_again: float | None
    p_adjusted: float | None
    mde: float | None
    aa_delta: float | None
    gained: int | None
    lost: int | None
    equivalence_p: float | None
    verdict: str | None  # rises | drops | equivalent | undecided; null for the controls
    truncated: float | None
    no_answer: float | None
    tokens: float | None  # mean number of tokens per answer
    samples: int | None
    changed_text: float | None  # share of answers whose text is not none's
    # Older folders do not have these.
    alpha: float | None = None
    delta_lo_all: float | None = None
    delta_hi_all: float | None = None
    stated: float | None = None  # share of answers that state a result; stated + guessed + no_answer = 1
    guessed: float | None = None
    stated_delta: float | None = None
    stated_delta_lo: float | None = None
    stated_delta_hi: float | None = None
    delta_both: float | None = None  # delta = delta_both + delta_form
    delta_both_lo: float | None = None
    delta_both_hi: float | None = None
    delta_form: float | None = None
    delta_form_lo: float | None = None
    delta_form_hi: float | None = None
    both_n: int | None = None  # pairs of answers stated under both, and how many of them are right before and after
    both_before: int | None = None
    both_after: int | None = None
    both_delta: float | None = None  # (both_after − both_before) / both_n
    both_delta_lo: float | None = None
    both_delta_hi: float | None = None
    mostly_form: bool | None = None  # delta_form has the sign of delta and is larger than delta_both


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as stored, and how it was judged."""

    item: str
    sample: int
    text: str
    extracted: str | None
    correct: bool
    why: str
    how: str
    reference: str
    n_tokens: int | None  # a server may not say
    finish: str


@dataclass(frozen=True, slots=True)
class Tried:
    """One row of ``tuning.parquet``: a setting on all dev items up to a rung, beside `none`. Shares are 0…1.

    `none` is the baseline's accuracy on the same items. `p_adjusted` is Holm's over all settings that were tried. `kept`: the setting goes
    on to the next rung; after the last rung, it is the chosen one.
    """

    model: str
    task: str
    condition: str
    rung: int
    c: float | None
    fraction: float | None
    p_min: float
    p_max: float
    p1: float
    layers: tuple[int, ...]
    n: int
    none: float
    value: float
    lo: float | None
    hi: float | None
    delta: float
    delta_lo: float | None
    delta_hi: float | None
    p: float | None
    p_adjusted: float | None
    kept: bool

    @property
    def bounds(self) -> tuple[float, float]:
        return self.p_min, self.p_max


ACCURACY = schema_of(Accuracy)
TUNING = schema_of(Tried)
