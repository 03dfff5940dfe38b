"""From each item's change in every specification to specifications.parquet and what is said of them jointly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float64

from mless import limits, stats
from mless.engines import ENGINES
from mless.errors import BadStudy
from mless.results.folder import ResultFolder
from mless.results.nats import METRICS_OF_CHANGE
from mless.results.schemas import REPLIES, table_of_rows
from mless.results.specification_rows import SPECIFICATION_SETTINGS, SPECIFICATION_TESTS, SPECIFICATIONS
from mless.stats.specifications import Specified, each_specification, joint_test, setting_effects
from mless.study.composed_tables import MULTIVERSE_SETTINGS, MultiverseTable
from mless.study.composing import Changes, answered_changes, changes_in

Row = dict[str, Any]

#: The dtype of an engine whose numbers are computed elsewhere.
ENGINES_OWN = "own"
#: What judges stored answers: no part of an inner study.
JUDGING = ("extraction", "grader")


@dataclass(frozen=True, slots=True)
class Cell:
    """One specification; `extraction` and `grader` are None where log-probabilities are read out."""

    readout: str
    template: str
    system: str
    dtype: str
    engine: str
    extraction: str | None = None
    grader: str | None = None

    @property
    def folder(self) -> str:
        """The inner folder with its numbers; specifications that judge the same answers share it."""
        return "-".join((self.readout, self.template, self.system, self.dtype, self.engine))


def cells_of(settings: MultiverseTable) -> list[Cell]:
    """Every specification, likelihood first. An engine that computes elsewhere has its own dtype, so it is there once."""
    found: list[Cell] = []
    for readout in settings.by:
        judging: Iterable[tuple[str | None, str | None]] = (
            itertools.product(settings.extraction, settings.grader) if readout == "accuracy" else [(None, None)]
        )
        for template, system, engine, judged in itertools.product(
            settings.template, settings.system, settings.engine, list(judging)
        ):
            dtypes = settings.dtype if ENGINES.get(engine).needs_weights else [ENGINES_OWN]
            found += [Cell(readout, template, system, dtype, engine, *judged) for dtype in dtypes]
    if len(found) > limits.CONDITIONS.value:
        raise BadStudy(
            f"multiverse: these settings are {len(found):,} specifications; expected at most {limits.CONDITIONS.value:,}; leave out some values"
        )
    return found


#: Judges replies again: the replies of all inner folders, rules joined by +, and a grader → answers in the same order.
Judge = Callable[[pa.Table, str, str], pa.Table]


def multiverse_tables(
    done: Mapping[str, ResultFolder],
    cells: Sequence[Cell],
    reasons: Mapping[str, str],
    conditions: Sequence[str],
    margin_of: Callable[[str], float],
    judge: Judge,
    *,
    seed: int,
    flips: int,
) -> Mapping[str, pa.Table]:
    """The tables of the folders that were run; `reasons` says by folder why the others were not."""
    about = next(iter(done.values())).about() or {}
    names = {"model": about["model"]["label"], "task": about["task"]}
    changes = dict(_changes(done, cells, about["items"], conditions, judge))
    return tables_of_changes(changes, cells, reasons, conditions, names, margin_of, seed=seed, flips=flips)


def _changes(
    done: Mapping[str, ResultFolder],
    cells: Sequence[Cell],
    items: Sequence[str],
    conditions: Sequence[str],
    judge: Judge,
) -> Iterator[tuple[Cell, Changes]]:
    """Each specification's changes by metric, items × conditions."""
    for cell in cells:
        if cell.readout == "likelihood" and cell.folder in done:
            yield cell, changes_in({"likelihood": done[cell.folder]}, items, conditions)
    folders = dict.fromkeys(cell.folder for cell in cells if cell.readout == "accuracy" and cell.folder in done)
    if not folders:
        return
    # All answers at once: a grader starts its processes once, and judges equal answers once.
    replies = {name: done[name].read_table("answers", columns=REPLIES.names) for name in folders}
    every = pa.concat_tables(list(replies.values()))
    ways = dict.fromkeys((cell.extraction, cell.grader) for cell in cells if cell.readout == "accuracy")
    for extraction, grader in ways:
        assert extraction is not None
        assert grader is not None
        answers, start = judge(every, extraction, grader), 0
        for name, own in replies.items():
            part = answers.slice(start, own.num_rows)
            start += own.num_rows
            found = np.full((len(items), len(conditions)), np.nan)
            for _, condition, item, change in answered_changes(part):
                if condition in conditions:
                    found[items.index(item), conditions.index(condition)] = change
            cell = next(one for one in cells if (one.folder, one.extraction, one.grader) == (name, extraction, grader))
            yield cell, {"pass@1": found}


def tables_of_changes(
    changes: Mapping[Cell, Changes],
    cells: Sequence[Cell],
    reasons: Mapping[str, str],
    conditions: Sequence[str],
    names: Mapping[str, str],
    margin_of: Callable[[str], float],
    *,
    seed: int,
    flips: int = 100_000,
) -> Mapping[str, pa.Table]:
    """Each specification by itself, all of them jointly, and what each setting moves."""
    numbers = {cell: number for number, cell in enumerate(cells, 1)}
    rows, tests, settings = list[Row](), list[Row](), list[Row]()
    there = {metric for found in changes.values() for metric in found}
    for number, metric in enumerate(name for name in METRICS_OF_CHANGE if name in there):
        ran = [cell for cell in cells if metric in changes.get(cell, {})]
        readout = ran[0].readout
        left_out = [cell for cell in cells if cell.readout == readout and cell.folder in reasons]
        for at, condition in enumerate(conditions):
            own = {**names, "condition": condition, "metric": metric}
            table = np.stack([changes[cell][metric][:, at] for cell in ran], axis=1)
            known = ~np.isnan(table).all(axis=0)
            used = [ran[one] for one in np.flatnonzero(known).tolist()]
            if not used:
                continue
            table, margin = table[:, known], margin_of(metric)
            rng = np.random.default_rng([seed, number, at])
            found = each_specification(table, margin, rng, flips=flips)
            # no share changes by more than 1, whatever a few skewed items say
            most = 1.0 if METRICS_OF_CHANGE[metric].share else math.inf
            for cell, one in zip(used, found, strict=True):
                ends = {"lo": max(one.lo, -most), "hi": min(one.hi, most)}
                rows.append(own | _named(cell, numbers) | asdict(one) | ends | {"margin": margin})
            rows += [own | _named(cell, numbers) | {"reason": reasons[cell.folder]} for cell in left_out]
            tests.append(own | asdict(joint_test(table, found, rng)) | {"left_out": len(left_out)})
            settings += [own | row for row in _settings(table, used, found, rng)]
    return {
        "specifications": table_of_rows(rows, SPECIFICATIONS),
        "specification_tests": table_of_rows(tests, SPECIFICATION_TESTS),
        "specification_settings": table_of_rows(settings, SPECIFICATION_SETTINGS),
    }


def _named(cell: Cell, numbers: Mapping[Cell, int]) -> Row:
    return asdict(cell) | {"folder": cell.folder, "specification": numbers[cell]}


def _settings(
    table: Float64[np.ndarray, "items specifications"],
    cells: Sequence[Cell],
    found: Sequence[Specified],
    rng: np.random.Generator,
) -> list[Row]:
    chosen = {name: [_value(cell, name) for cell in cells] for name in MULTIVERSE_SETTINGS}
    verdicts = [one.verdict for one in found]
    effects = setting_effects(table, chosen, verdicts, rng)
    adjusted = stats.holm(np.array([one.p for one in effects.values()], np.float64))
    rows: list[Row] = []
    for (name, effect), p in zip(effects.items(), adjusted.tolist(), strict=True):
        shared = {
            "setting": name, "range": effect.range, "range_p": effect.p, "range_p_adjusted": p, "turned": effect.turned, "pairs": effect.pairs,
        }  # fmt: skip
        for value, delta in effect.values.items():
            mine = [verdict for verdict, one in zip(verdicts, chosen[name], strict=True) if one == value]
            counts = {"specifications": len(mine), "rises": mine.count("rises"), "drops": mine.count("drops")}
            rows.append(shared | {"value": value, "delta": delta} | counts)
    return rows


def _value(cell: Cell, setting: str) -> str | None:
    """None where it is no value of this setting: an engine that computes elsewhere has no dtype of ours."""
    value = str(getattr(cell, setting))
    return None if setting == "dtype" and value == ENGINES_OWN else value
