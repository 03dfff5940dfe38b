"""`mless run cause`: who has to see the filler, and through which part of which layer does it act?

Every step of the ladder and every patch is a condition of one likelihood study (and, if asked, of one accuracy study) in an inner folder, so
resuming, workers and row-stability work as in every study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mless import gates, limits, tasks
from mless.changes import IN_ATTENTION, Part
from mless.errors import BadStudy, UnsupportedArchitecture
from mless.prompting import build_prompts, resolve_kind
from mless.results.cause_rows import DIRECTIONS
from mless.results.folder import ResultFolder
from mless.study.bench import Composed, Job, Measurement, Outcome, Run
from mless.study.cause import cells
from mless.study.cause.cells import Moved, Runs
from mless.study.cause.moving import begin_compiling, equal_arm, moved_of
from mless.study.cause.tables import tables_of_changes
from mless.study.cause.words import cause_lines
from mless.study.composed_tables import CAUSE_PARTS
from mless.study.composing import Composition, Readout, changes_in, inner_spec, named_fillers, opened, run_composed
from mless.study.identity import default_folder
from mless.study.spec import AccuracyTable, CauseTable, LikelihoodTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition, Item, Prompt, parse_numbers

if TYPE_CHECKING:
    import pyarrow as pa

#: What study.json calls the two distances of the chain.
_NOTED = "layer_1_moved"


class CauseMeasurement(Composed):
    """Takes the effect of the study's filler apart, as ``[cause]`` says."""

    tables = ("ladder", "cause", "chain")
    needs = ("likelihood", "accuracy")
    figures = ("ladder", "cause", "chain")
    summed_up = ("ladder", "chain")

    def compose(self, job: Job, run: Run, readouts: Mapping[str, type[Measurement]]) -> Outcome:
        spec = job.spec
        settings = spec.cause or CauseTable()
        filler = _one_filler(spec)
        subject = opened(job, weights=True)
        assert subject.layers is not None
        layers = parse_numbers(spec.layers, subject.layers, "layer")[:: settings.every]
        heads = parse_numbers(spec.heads, subject.heads or 0, "head") if settings.by_head else []
        _check_count(settings, layers, heads)
        _check_engines(spec, settings)
        _check_place(filler, resolve_kind(spec.prompt, subject.tokenizer, subject.label))
        attending = _attending(subject, settings, layers)
        noted = _noted(self, job, subject)
        _, items = job.items or spec.load_items()
        moved = _moved(job, subject, filler, items, noted) if "chain" in settings.of else None
        made = _runs_of(filler, settings, layers, attending, heads, moved)
        listed = made.conditions()
        by = cast("list[Readout]", settings.by)
        studies = {name: inner_spec(spec, name, f"What {filler.name} is made of, by {name}", listed) for name in by}

        def tables(inner: Mapping[str, ResultFolder]) -> Mapping[str, pa.Table]:
            about = next(iter(inner.values())).about() or {}
            names = {"model": about["model"]["label"], "task": about["task"]}
            changes = changes_in(inner, about["items"], [one.name for one in listed])
            return tables_of_changes(changes, made, names, seed=spec.seed, flips=spec.flips)

        more = {"layers": spec.layers, "heads": spec.heads if settings.by_head else None}
        more |= {"arm": spec.arm.model_dump()} if "chain" in settings.of else {}
        own = {"cause": settings.measured() | more}
        told: dict[str, Any] = {_NOTED: asdict(moved) if isinstance(moved, Moved) else moved}
        if others := sorted({*range(1, subject.layers + 1)} - {*attending}):
            told["layers_without_attention"] = others
        composition = Composition(studies, [Condition("none", "none"), *listed], tables, own, by, noted=told)
        return run_composed(self, job, run, subject, composition)

    @classmethod
    def figures_of(cls, about: Mapping[str, Any]) -> Sequence[str]:
        asked = ((about.get("study") or {}).get("cause") or {}).get("of") or CAUSE_PARTS
        return [name for name, part in zip(cls.figures, CAUSE_PARTS, strict=True) if part in asked]

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return cause_lines(path)


def _one_filler(spec: StudySpec) -> Condition:
    found = named_fillers(spec, spec.conditions, "cause")
    if len(found) > 1:
        raise BadStudy(
            f"cause takes one filler's effect apart, and the study has {', '.join(one.name for one in found)}; name one: --conditions {found[0].name}"
        )
    if found[0].placement == "anywhere":
        raise BadStudy(
            f"cause: {found[0].name!r} stands anywhere in the prompt, so no span of it sees the filler in every item; use another placement, as before-question"
        )
    return found[0]


def _check_engines(spec: StudySpec, settings: CauseTable) -> None:
    """Before layer 1 is loaded, and before one readout has run that another would refuse."""
    asked = {"likelihood": spec.likelihood or LikelihoodTable(), "accuracy": spec.accuracy or AccuracyTable()}
    for name in settings.by:
        if asked[name].engine != "hf":
            raise BadStudy(
                f"cause cuts and patches the model, which the engine {asked[name].engine} does not let it do; use {name}.engine=hf"
            )


def _check_place(filler: Condition, kind: str) -> None:
    """Tokens have to stand between the filler and the answer: what the last one of the prompt computes is patched, and predicts the answer."""
    if filler.placement == "before-answer" or (filler.placement == "end" and kind == "raw"):
        raise BadStudy(
            f"cause: {filler.name!r} ends the prompt ({filler.placement}, {kind} prompt), so its own last token predicts the answer and has no value in "
            "a run without it; use --placement before-question"
        )


def _attending(subject: Subject, settings: CauseTable, layers: Sequence[int]) -> list[int]:
    """The model's layers with softmax attention, before anything is loaded. The chain begins in layer 1; a layer asked for by number must have it."""
    assert subject.described is not None
    found = subject.described.attending()
    if "chain" in settings.of and cells.FIRST not in found:
        others = ",".join(part for part in settings.of if part != "chain") or "ladder,map"
        raise BadStudy(
            f"cause: layer 1 of {subject.label} is no softmax attention, so the published chain does not begin there; leave it out: --set cause.of={others}"
        )
    if "map" in settings.of and set(settings.parts) & set(IN_ATTENTION):
        subject.attending(layers)
    return found


def _check_count(settings: CauseTable, layers: Sequence[int], heads: Sequence[int]) -> None:
    """Before anything is measured."""
    a_layer = sum(len(heads) if heads and part == "attention-output" else 1 for part in settings.parts)
    mapped = len(layers) * a_layer * len(DIRECTIONS) if "map" in settings.of else 0
    others = 16  # none and its control, the ladder, the chain
    what = f"cause: {len(layers)} layers × {a_layer} parts and heads × 2 directions, with {others} other runs,"
    gates.check_count(mapped + others, what, limits.CONDITIONS, BadStudy)


def _noted(measurement: CauseMeasurement, job: Job, subject: Subject) -> Any:
    """What an earlier run of the same folder has found about layer 1's activations; a run that goes on must not choose anew."""
    stored = ResultFolder(job.out or default_folder(job.spec, subject.label, measurement.judged_by)).about() or {}
    return stored.get(_NOTED)


def _moved(job: Job, subject: Subject, filler: Condition, items: Sequence[Item], noted: Any) -> Moved | str:
    """How far layer 1's activations move; why it is not known, of a model whose first layer has none."""
    if noted is not None:
        return noted if isinstance(noted, str) else moved_of(noted)
    subject.load(job.progress, layers=[cells.FIRST])
    assert subject.loaded is not None
    settings = job.spec.arm.settings()
    compiling = begin_compiling(subject.loaded, settings)
    try:
        without, prompts = (_prompts(job.spec, subject, one, items) for one in (Condition("none", "none"), filler))
        found = equal_arm(subject.loaded, without, prompts, settings)
    except UnsupportedArchitecture as fault:
        return str(fault)
    finally:
        if compiling is not None:
            compiling.join()
        subject.loaded = None
    job.progress.say(
        f"layer 1's activations: the filler moves them by {found.filler:.3g} a token; ARM with fraction {found.settings.fraction:g} by {found.arm:.3g}"
    )
    return found


def _prompts(spec: StudySpec, subject: Subject, condition: Condition, items: Sequence[Item]) -> list[Prompt]:
    kind = resolve_kind(spec.prompt, subject.tokenizer, subject.label)
    sentences = tasks.filler_sentences()
    return list(
        build_prompts(
            subject.tokenizer, items, condition, kind=kind, system=spec.system, seed=spec.seed, sentences=sentences
        )
    )


def _runs_of(
    filler: Condition,
    settings: CauseTable,
    layers: Sequence[int],
    attending: Sequence[int],
    heads: Sequence[int],
    moved: Moved | str | None,
) -> Runs:
    known = moved if isinstance(moved, Moved) else None
    mapped = cells.cells(filler, layers, cast("list[Part]", settings.parts), heads, settings.at)
    found = Runs(
        filler,
        cells.ladder(filler) if "ladder" in settings.of else {},
        [one for one in mapped if one.part not in IN_ATTENTION or one.layer in attending]
        if "map" in settings.of
        else [],
        cells.chain(filler, settings.at, activation=known is not None) if "chain" in settings.of else {},
        known,
    )
    own = [*found.ladder.values(), *(one.condition for one in found.cells), *found.chain.values()]
    if filler.name in {cells.POSITIONS, cells.ARM, *(one.name for one in own)}:
        raise BadStudy(f"cause: a run of its own is called {filler.name!r} too; give your condition another name")
    return found
