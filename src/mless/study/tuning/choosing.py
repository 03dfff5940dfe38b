"""ARM's parameters chosen on some items and judged on others: the settings, the choice, and the result on the other items.

Everything here is a function of graded answers, so that it can be run on stored ones, and on noise (`on_noise`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mless import stats
from mless.errors import BadStudy
from mless.results.schemas import plain
from mless.study.spec import AccuracyTable, StudySpec, TuneTable
from mless.values import ArmSettings, Condition, Item, format_numbers, parse_numbers


@runtime_checkable
class Readout(Protocol):
    """The functions of the accuracy measurement that are needed here."""

    def compare(
        self, answers: pa.Table, conditions: Mapping[str, Condition], settings: AccuracyTable, *, seed: int
    ) -> pa.Table: ...

    def change_words(self, row: Mapping[str, Any]) -> str: ...

    def lines(self, path: Path, readouts: Mapping[str, Any]) -> list[str]: ...


#: Rung (from 1), its new items, the settings still in the running → their graded answers, and none's.
Draw = Callable[[int, Sequence[str], Sequence[str]], pa.Table]


# ---- what is tried ---------------------------------------------------------------------------------------------------


def settings_to_try(spec: StudySpec) -> dict[str, ArmSettings]:
    """Every setting of ``[tune]`` once, by a name that says it, in the order in which ties are broken."""
    tune = spec.tune or TuneTable()
    centre = spec.arm.settings()
    found: list[ArmSettings] = []
    if tune.c or tune.fraction or tune.p1 or tune.layers:
        shares: list[dict[str, Any]] = [{"c": c, "fraction": None} for c in tune.c]
        shares += [{"c": None, "fraction": fraction} for fraction in tune.fraction]
        shares = shares or [{"c": centre.c, "fraction": centre.fraction}]
        places = [_layers(text) for text in tune.layers] or [centre.layers]
        for layers, share, p1 in itertools.product(places, shares, tune.p1 or [centre.p1]):
            found.append(replace(centre, **share, p1=p1, layers=layers))
    found += _bounded(tune, centre)
    found += [table.settings(spec.arm) for table in tune.settings]
    if not found:
        raise BadStudy(
            "nothing to try: the grid is empty; give --c, --fraction, --p1 or --layers (as --c 0.05,0.13 --p1 90,99.5), or fill in [tune]"
        )
    named: dict[str, ArmSettings] = {}
    for one in dict.fromkeys(found):
        name = _name(one, centre)
        named[name if name not in named else f"{name}-{len(named) + 1}"] = one
    return named


def _bounded(tune: TuneTable, centre: ArmSettings) -> list[ArmSettings]:
    """p_min × p_max only; a pair with p_min > p_max is no setting."""
    if not tune.p_min and not tune.p_max:
        return []
    if centre.c is None:
        raise BadStudy(
            f"p_min and p_max bound the share that follows from c, but [arm] gives fraction = {centre.fraction:g}; set arm.c, or leave them out"
        )
    pairs = itertools.product(tune.p_min or [centre.p_min], tune.p_max or [centre.p_max])
    found = [replace(centre, p_min=low, p_max=high) for low, high in pairs if low <= high]
    if not found:
        raise BadStudy(
            f"every p_min ({', '.join(f'{one:g}' for one in tune.p_min or [centre.p_min])}) is above every p_max "
            f"({', '.join(f'{one:g}' for one in tune.p_max or [centre.p_max])}), so there is nothing to try; p_min is the smaller one"
        )
    return found


def _layers(text: str) -> tuple[int, ...]:
    return tuple(parse_numbers(text.replace("+", ","), 10_000, "layer"))


def _name(one: ArmSettings, centre: ArmSettings) -> str:
    """``c0_13-p99_5``, and what else is not as in the centre. Part of file names and of --set keys, in which a dot divides."""
    parts = [f"c{one.c:.10g}" if one.c is not None else f"f{one.fraction:.10g}", f"p{one.p1:.10g}"]
    if one.layers != (1,):
        parts.append("L" + format_numbers(one.layers).replace("–", "-").replace(", ", "_"))
    if one.c is not None and (one.p_min, one.p_max) != (centre.p_min, centre.p_max):
        parts.append(f"from{one.p_min:.10g}-to{one.p_max:.10g}")
    for own, usual, mark in (
        (one.scope, centre.scope, ""),
        (one.rule, centre.rule, ""),
        (one.seed, centre.seed, "seed"),
    ):
        if own != usual:
            parts.append(f"{mark}{own}")
    return "-".join(parts).replace(".", "_")


@dataclass(frozen=True, slots=True)
class Plan:
    """The dev items that are new in each rung, and the test items; ids."""

    rungs: tuple[tuple[str, ...], ...]
    test: tuple[str, ...]

    @property
    def dev(self) -> tuple[str, ...]:
        return tuple(itertools.chain(*self.rungs))

    def answers(self, settings: int, samples: int = 1) -> int:
        """How many are drawn for so many settings, none's and the A/A control's included."""
        total, left = 0, settings
        for items in self.rungs:
            total += len(items) * (left + 1)
            left = _kept(left)
        return samples * (total + 3 * len(self.test))


def plan_items(items: Sequence[Item], tune: TuneTable, settings: int, seed: int) -> Plan:
    """A choice is made on dev items; related ones (a cluster) are all on one side. Deterministic by seed and ids."""
    try:
        dev = stats.split_items([item.cluster or item.id for item in items], tune.dev_share, seed)
    except BadStudy as fault:
        raise BadStudy(
            f"{fault}; or another share: --dev-share, or --set tune.dev_share=… where there is no such option"
        ) from None
    # ordered by a hash, so that the first rung is a random part of the data set
    first = sorted((item.id for item, here in zip(items, dev, strict=True) if here), key=lambda one: _order(seed, one))
    rungs = min(tune.rungs, max(1, math.ceil(math.log2(settings)))) if tune.method == "halving" else 1
    while rungs > 1 and len(first) >> (rungs - 1) < 2:
        rungs -= 1
    ends = [len(first) >> (rungs - 1 - rung) for rung in range(rungs)]
    parts = [tuple(first[start:stop]) for start, stop in itertools.pairwise([0, *ends])]
    return Plan(tuple(parts), tuple(item.id for item, here in zip(items, dev, strict=True) if not here))


def _order(seed: int, item: str) -> bytes:
    return hashlib.blake2b(f"rung\n{seed}\n{item}".encode(), digest_size=8).digest()


def _kept(settings: int) -> int:
    return math.ceil(settings / 2)


# ---- choosing and reporting ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """A rung: the settings still compared, their answers so far, and the settings kept."""

    answers: pa.Table
    names: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting that the dev items chose, and how it came to it."""

    condition: str
    steps: list[Step]


def choose(names: Sequence[str], rungs: Sequence[Sequence[str]], draw: Draw) -> Choice:
    """Compare the settings with none on the items so far; after each rung keep the better half, after the last the best.

    By paired Δ, of equals the earlier setting. Something is always chosen, even if it is worse than none; the test items will show it.
    """
    left, drawn, steps = list(names), list[pa.Table](), list[Step]()
    for rung, items in enumerate(rungs, 1):
        drawn.append(draw(rung, items, left))
        answers = _of_conditions(pa.concat_tables(drawn), {"none", *left})
        # every setting has the same items and samples, so shares sort like Δ. Rounded, because equal shares may differ in the last digit.
        # sorted() keeps ties in order
        right = answers.group_by("condition").aggregate([("correct", "mean")]).to_pylist()
        share = {row["condition"]: round(row["correct_mean"], 9) for row in right}
        ranked = sorted(left, key=lambda name: -share[name])
        kept = set(ranked[: 1 if rung == len(rungs) else _kept(len(left))])
        steps.append(Step(answers, tuple(left), tuple(name for name in left if name in kept)))
        left = [name for name in left if name in kept]
    return Choice(left[0], steps)


def tried_rows(choice: Choice, accuracy: AccuracyTable, readout: Readout, *, seed: int) -> list[dict[str, Any]]:
    """A row for every rung and setting in it: columns of accuracy.parquet, and `rung`, `kept` and `none`, the baseline's share.

    `p_adjusted` is Holm's over all settings. Dropped ones count as tests with p = 1, so being kept does not make a p smaller.
    """
    rows: list[dict[str, Any]] = []
    tried = len(choice.steps[0].names)
    for rung, step in enumerate(choice.steps, 1):
        found = _rows(step.answers, step.names, accuracy, readout, seed)
        here = {row["condition"]: row for row in found if row["metric"] == "pass@1"}
        p = np.array([_or_nan(here[name]["p"]) for name in step.names] + [1.0] * (tried - len(step.names)))
        for name, adjusted in zip(step.names, stats.holm(p), strict=False):
            own = {"p_adjusted": plain(float(adjusted)), "none": here["none"]["value"]}
            rows.append(here[name] | own | {"rung": rung, "kept": name in step.kept})
    return rows


def report(
    answers: pa.Table, chosen: str, accuracy: AccuracyTable, readout: Readout, *, seed: int
) -> list[dict[str, Any]]:
    """Rows of accuracy.parquet: none, its A/A control and the chosen setting on items that nothing was chosen on.

    One setting is compared, so its p needs no correction: `p_adjusted` is the larger of p and p_again.
    """
    kept = _of_conditions(answers, {"none", "none-again", chosen})
    return [row for row in _rows(kept, [chosen], accuracy, readout, seed) if row["split"] == "all"]


def claims(row: Mapping[str, Any]) -> bool:
    """Whether the row of a chosen setting says that it changes accuracy."""
    return row["verdict"] in ("rises", "drops")


def _rows(
    answers: pa.Table, names: Sequence[str], accuracy: AccuracyTable, readout: Readout, seed: int
) -> list[dict[str, Any]]:
    conditions = {"none": Condition("none", "none")}
    if "none-again" in answers.column("condition").unique().to_pylist():
        conditions["none-again"] = Condition("none-again", "none", again=True)
    conditions |= {name: Condition(name, "none") for name in names}
    whole = accuracy.model_copy(update={"dev_share": 0.0})
    return readout.compare(answers, conditions, whole, seed=seed).to_pylist()


def _of_conditions(answers: pa.Table, names: Collection[str]) -> pa.Table:
    return answers.filter(pc.field("condition").isin(list(names)))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


# ---- on stored answers, and on noise ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tuned:
    """A choice, and what the test items say of it."""

    choice: Choice
    test: dict[str, Any]


def tune_stored(
    answers: pa.Table,
    names: Sequence[str],
    tune: TuneTable,
    accuracy: AccuracyTable,
    readout: Readout,
    *,
    seed: int,
) -> Tuned:
    """What `mless tune` would have chosen and reported, from the answers of every setting to every item."""
    of_item = dict(zip(answers.column("item").to_pylist(), answers.column("cluster").to_pylist(), strict=True))
    items = [Item(item, "", None, cluster) for item, cluster in sorted(of_item.items())]
    plan = plan_items(items, tune, len(names), seed)

    def draw(rung: int, some: Sequence[str], left: Sequence[str]) -> pa.Table:
        return _of_conditions(_of_items(answers, some), {"none", *left})

    choice = choose(names, plan.rungs, draw)
    rows = report(_of_items(answers, plan.test), choice.condition, accuracy, readout, seed=seed)
    headline = next(row for row in rows if row["condition"] == choice.condition and row["metric"] == "pass@1")
    return Tuned(choice, headline)


def _of_items(answers: pa.Table, items: Sequence[str]) -> pa.Table:
    return answers.filter(pc.field("item").isin(pa.array(list(items), pa.string())))


def shuffled(answers: pa.Table, rng: np.random.Generator) -> pa.Table:
    """The same answers with their grades shuffled over items and conditions, so that no condition is truly better."""
    grades = answers.column("correct").to_numpy()
    at = answers.schema.get_field_index("correct")
    return answers.set_column(at, answers.schema.field(at), pa.array(rng.permutation(grades), pa.bool_()))


def with_control(answers: pa.Table) -> pa.Table:
    """The same with none's answers once more as the A/A control's.

    Only for grades that are `shuffled` afterwards: before that both are the same.
    """
    again = _of_conditions(answers, {"none"})
    at = answers.schema.get_field_index("condition")
    name = pa.array(["none-again"] * again.num_rows, answers.schema.field(at).type)
    return pa.concat_tables([answers, again.set_column(at, answers.schema.field(at), name)])


@dataclass(frozen=True, slots=True)
class Noise:
    """How often an effect was claimed where there is none: by the report, and by a naive test of the best setting on dev."""

    seeds: int
    claimed: int
    naive: int


def on_noise(
    answers: pa.Table,
    names: Sequence[str],
    tune: TuneTable,
    accuracy: AccuracyTable,
    readout: Readout,
    *,
    seeds: Sequence[int],
    seed: int = 0,
) -> Noise:
    """Tune on grades `shuffled` with each of `seeds`; `seed` is the study's, for its split.

    The report should claim an effect in at most about 5 of 100: that is the level of its test.
    """
    claimed = naive = 0
    for deal in seeds:
        found = tune_stored(shuffled(answers, np.random.default_rng(deal)), names, tune, accuracy, readout, seed=seed)
        claimed += claims(found.test)
        last = _of_conditions(found.choice.steps[-1].answers, {"none", found.choice.condition})
        dev = next(
            row
            for row in report(last, found.choice.condition, accuracy, readout, seed=seed)
            if row["delta"] is not None
        )
        naive += claims(dev)
    return Noise(len(seeds), claimed, naive)
