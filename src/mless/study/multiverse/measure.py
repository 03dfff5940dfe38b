"""`mless run multiverse`: does a comparison depend on settings that papers do not state?

A specification is one value of each setting. Those that concern the prompt or the numbers (template, system text, dtype, engine) are inner
studies, each in a folder of its own, so resuming, workers and row-stability work as in every study. Extraction rules and graders judge the
stored answers again; nothing is generated twice for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mless.engines import ENGINES
from mless.errors import BadStudy, MlessError
from mless.prompting import PromptKind, build_messages, render, resolve_kind
from mless.study.bench import Composed, Job, Measurement, Outcome, Run
from mless.study.composed_tables import TASKS_OWN
from mless.study.composing import Composition, Readout, inner_spec, opened, run_composed
from mless.study.conditions import condition_named
from mless.study.multiverse.tables import ENGINES_OWN, Cell, cells_of, multiverse_tables
from mless.study.multiverse.words import multiverse_lines
from mless.study.spec import AccuracyTable, LikelihoodTable, MultiverseTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition, Item

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.results.folder import ResultFolder


class MultiverseMeasurement(Composed):
    """Compares the study's conditions with `none` in every specification of ``[multiverse]``."""

    tables = ("specifications", "specification_tests", "specification_settings")
    needs = ("likelihood", "accuracy")
    figures = ("specification",)
    summed_up = ("specification_tests", "specification_settings", "specifications")

    def compose(self, job: Job, run: Run, readouts: Mapping[str, type[Measurement]]) -> Outcome:
        spec = job.spec
        settings = spec.multiverse or MultiverseTable()
        _check_unused(spec, settings)
        conditions = _compared(spec, settings)
        cells = cells_of(settings)
        task, items = job.items or spec.load_items()
        engines = {cell.engine for cell in cells}
        subject = opened(job, weights=any(ENGINES.get(one).needs_weights for one in engines))
        reasons = _not_possible(subject, cells, settings, spec, items[0])
        studies: dict[str, StudySpec] = {}
        for cell in cells:
            if cell.folder not in reasons and cell.folder not in studies:
                try:
                    studies[cell.folder] = _inner(spec, settings, cell, conditions)
                except BadStudy as fault:
                    reasons[cell.folder] = str(fault)
        if not studies:
            raise BadStudy(_none_possible(reasons))
        judging = cast("Any", readouts["accuracy"]).judge

        def judge(replies: pa.Table, extraction: str, grader: str) -> pa.Table:
            how = (spec.accuracy or AccuracyTable()).model_copy(update={"rules": _rules(extraction), "grader": grader})
            return judging(replies, items, task, how, job.progress)

        def tables(done: Mapping[str, ResultFolder]) -> Mapping[str, pa.Table]:
            names = [one.name for one in conditions]
            given = done, cells, reasons, names, _margins(spec), judge
            return multiverse_tables(*given, seed=spec.seed, flips=spec.flips)

        def goes_on(name: str, fault: MlessError) -> bool:
            reasons[name] = str(fault)
            return True

        listed = [Condition("none", "none"), *conditions]
        # The grid is no part of the identity: inner folders have their own, and another grid leaves those there as they are.
        own = {"multiverse": {}}
        grid = settings.model_dump()
        made = Composition(studies, listed, tables, own, grid, goes_on, facts=("model", "tokenizer"))
        return run_composed(self, job, run, subject, made)

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return multiverse_lines(path)


def _check_unused(spec: StudySpec, settings: MultiverseTable) -> None:
    """Settings are those of [multiverse]; one given otherwise would do nothing."""
    accuracy, likelihood = spec.accuracy or AccuracyTable(), spec.likelihood or LikelihoodTable()
    usual = AccuracyTable()
    if "accuracy" in settings.by and accuracy.runs_code:
        raise BadStudy(
            f"multiverse: the grader {accuracy.grader!r} runs the model's code, and no other grader judges code; use data whose answers are texts or "
            "numbers, or --set multiverse.by=likelihood"
        )
    given = {
        "prompt": (spec.prompt != "auto", "template"),
        "dtype": (spec.dtype != "auto", "dtype"),
        "likelihood.engine": (likelihood.engine != usual.engine, "engine"),
        "accuracy.engine": (accuracy.engine != usual.engine, "engine"),
        "accuracy.rules": (accuracy.rules is not None, "extraction"),
        "accuracy.grader": (accuracy.grader != usual.grader and not accuracy.runs_code, "grader"),
    }
    for name, (there, instead) in given.items():
        if there:
            raise BadStudy(
                f"multiverse: the study gives {name}, but it is tried in the values of [multiverse]; leave it out, and set multiverse.{instead}"
            )


def _compared(spec: StudySpec, settings: MultiverseTable) -> list[Condition]:
    """The conditions that are compared with `none`: those to which every setting applies."""
    names = [name for name in dict.fromkeys(spec.conditions) if name not in ("none", "none-again")]
    found = [condition_named(spec, name) for name in names]
    if not found:
        raise BadStudy("multiverse: no condition is compared with none; name at least one, as --conditions none,mless")
    for one in found:
        if one.system is not None:
            raise BadStudy(
                f"multiverse: condition {one.name!r} has a system text of its own, so the system texts of the grid would change none alone; leave it out, "
                "or put its text among multiverse.texts"
            )
        if one.samples is not None:
            raise BadStudy(
                f"multiverse: condition {one.name!r} puts several answers to the vote, which is no setting of one answer; leave it out"
            )
        if one.again:
            raise BadStudy(f"multiverse: condition {one.name!r} is none once more; leave it out")
    return found


def _not_possible(
    subject: Subject, cells: Sequence[Cell], settings: MultiverseTable, spec: StudySpec, item: Item
) -> dict[str, str]:
    """Why some inner folders cannot be run, as far as the first prompt tells. Equal prompts are one specification and not two."""
    reasons: dict[str, str] = {}
    seen: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        if cell.folder in reasons:
            continue
        try:
            prompt = _first_prompt(subject, cell.template, settings.system_text(cell.system, spec.system), item)
        except MlessError as fault:
            reasons[cell.folder] = str(fault)
            continue
        first = seen.setdefault((prompt, cell.readout, cell.dtype, cell.engine), cell)
        if first.folder != cell.folder:
            reasons[cell.folder] = (
                f"the same prompts as template {first.template}, system {first.system}; equal specifications count once"
            )
    return reasons


def _first_prompt(subject: Subject, template: str, system: str, item: Item) -> object:
    if subject.tokenizer is not None:
        kind: PromptKind = resolve_kind(template, subject.tokenizer, subject.label)
        return render(subject.tokenizer, item, kind=kind, system=system).token_ids
    none = Condition("none", "none")
    return template == "raw", next(build_messages([item], none, system=system, one_turn=template == "user"))


def _inner(spec: StudySpec, settings: MultiverseTable, cell: Cell, conditions: Sequence[Condition]) -> StudySpec:
    """The study of an inner folder."""
    changes = {
        "prompt": cell.template,
        "system": settings.system_text(cell.system, spec.system),
        "conditions": ["none", *(one.name for one in conditions)],
        "condition": spec.model_dump(include={"condition"})["condition"],
    }
    if cell.dtype != ENGINES_OWN:
        changes["dtype"] = cell.dtype
    servers = [table.base_url for table in (spec.likelihood, spec.accuracy) if table is not None]
    own: dict[str, Any] = {"engine": cell.engine, "base_url": next(filter(None, servers), None)}
    if cell.extraction is not None and cell.grader is not None:
        # Judged once in the inner folder itself, by the first of the ways; all ways judge its answers again.
        own |= {"rules": _rules(cell.extraction), "grader": cell.grader}
    where = ", ".join((cell.template, f"system {cell.system}", cell.dtype, cell.engine))
    return inner_spec(spec, cast("Readout", cell.readout), f"By {cell.readout}: {where}", conditions, changes, own)


def _rules(extraction: str) -> list[str] | None:
    """The rules of a value of `extraction`, first to last; None leaves them to the task."""
    return None if extraction == TASKS_OWN else extraction.split("+")


def _none_possible(reasons: Mapping[str, str]) -> str:
    folder, reason = next(iter(reasons.items()))
    return f"multiverse: none of the {len(reasons)} inner studies can be run; the first, {folder}: {reason}"


def _margins(spec: StudySpec) -> Any:
    likelihood, accuracy = spec.likelihood or LikelihoodTable(), spec.accuracy or AccuracyTable()
    return lambda metric: accuracy.margin if metric == "pass@1" else likelihood.margin_of(metric)
