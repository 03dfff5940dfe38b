"""A study made of inner studies, each in a folder of its own inside the result folder: what is run, when it is done, and what its items say."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float64

from mless.errors import BadFolder, BadStudy, MlessError
from mless.results.folder import ResultFolder
from mless.results.nats import METRICS_OF_CHANGE
from mless.study.bench import Composed, Job, Outcome, Run
from mless.study.conditions import condition_named, conditions_of
from mless.study.identity import (
    OF_ATTENTION,
    check_age,
    check_same,
    default_folder,
    digest,
    identity_of,
    rerun_command,
)
from mless.study.loading import load_study
from mless.study.measuring import manifest
from mless.study.spec import AccuracyTable, LikelihoodTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition

if TYPE_CHECKING:
    import pyarrow as pa

Readout = Literal["likelihood", "accuracy"]

#: Fields that an inner study does not take over as they are.
_OF_THE_OUTER = frozenset(
    "name title figure primary condition conditions accuracy likelihood placebo dose multiverse cause measures options".split()
)

#: A metric → each item's change against `none` under each condition; NaN where the item has no value.
Changes = dict[str, Float64[np.ndarray, "items conditions"]]


@dataclass(frozen=True)
class Composition:
    """Inner studies by the name of their folder, the conditions that study.json lists, and the tables made of the finished folders."""

    inner: Mapping[str, StudySpec]
    conditions: Sequence[Condition]
    tables: Callable[[Mapping[str, ResultFolder]], Mapping[str, pa.Table]]
    #: What stored numbers depend on beside the fields of every study, by name, and what only judges them.
    measured: Mapping[str, Any]
    judged: Any
    #: Whether an inner study that cannot be run is left out, and the others go on; it is called with the folder's name and the fault.
    goes_on: Callable[[str, MlessError], bool] = lambda name, fault: False
    #: What was found before the inner studies ran, for study.json: a name → anything that JSON holds.
    noted: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: What study.json takes over from the inner folders: what is the same in all of them.
    facts: Sequence[str] = ("engine", "model", "tokenizer", "prompt", "device", "implementations", "lacking")


def opened(job: Job, *, weights: bool) -> Subject:
    """The model with its tokenizer, so that much can be refused before anything is written."""
    subject = Subject.open(job.spec, job.progress, weights=weights, trust_remote_code=job.trust_remote_code)
    subject.load_tokenizer()
    return subject


def named_fillers(spec: StudySpec, names: Sequence[str], what: str) -> list[Condition]:
    """The conditions of these names but `none` and its control; those that do anything else than insert a filler are refused."""
    found = [condition_named(spec, name) for name in dict.fromkeys(names) if name not in ("none", "none-again")]
    for one in found:
        if not one.inserts:
            raise BadStudy(f"{what}: condition {one.name!r} inserts nothing; name fillers, as mless, mful or random")
        more = {"ARM": one.arm, "hidden filler": one.hidden, "a system text of its own": one.system}
        more |= {"a cut": one.cut, "a patch": one.patch}
        more |= {
            "a question of its own": one.question,
            "several samples": one.samples,
            "a temperature": one.temperature,
        }
        if has := [name for name, value in more.items() if value]:
            raise BadStudy(
                f"{what}: condition {one.name!r} has {has[0]}, so it is more than a filler and not compared with fillers; leave it out"
            )
    if not found:
        raise BadStudy(f"{what}: no filler is named; name at least one, as mless")
    return found


def inner_spec(
    spec: StudySpec,
    readout: Readout,
    title: str,
    conditions: Sequence[Condition],
    changes: Mapping[str, Any] | None = None,
    settings_changed: Mapping[str, Any] | None = None,
) -> StudySpec:
    """A study of `none` and these conditions by this readout, with everything else as in `spec`; its command makes its folder again.

    `changes` are other fields of the study, `settings_changed` of the readout's table.
    """
    if spec.accuracy is not None and spec.accuracy.cluster_field is not None:
        raise BadStudy(
            f"accuracy.cluster_field = {spec.accuracy.cluster_field!r}: {spec.name} takes items as independent, so related ones would make its "
            "intervals too narrow; leave it out and give items that are not related, or use `mless run accuracy`, which counts related items as one"
        )
    kept = {name for name in StudySpec.model_fields if getattr(spec, name) is not None} - _OF_THE_OUTER
    settings = (
        (spec.likelihood or LikelihoodTable()).model_dump()
        if readout == "likelihood"
        else (spec.accuracy or AccuracyTable()).model_dump() | {"dev_share": 0.0}
    )
    settings |= settings_changed or {}
    fields = spec.model_dump(include=kept) | {"title": title, readout: settings}
    fields |= {"conditions": ["none", *(one.name for one in conditions)], "condition": _declared(conditions)}
    fields |= changes or {}
    if load_study(readout).figure is not None:
        fields["figure"] = None
    return load_study(readout, fields, server_named=spec.names_server)


def _declared(conditions: Sequence[Condition]) -> dict[str, dict[str, Any]]:
    names = ("kind", "filler", "length", "placement", "seed")
    found: dict[str, dict[str, Any]] = {}
    for one in conditions:
        changed = {"cut": [asdict(cut) for cut in one.cut], "patch": [asdict(patch) for patch in one.patch]}
        arm = {"arm": asdict(one.arm)} if one.arm is not None else {}
        own = {
            name: value
            for name in names
            if (value := getattr(one, name)) is not None and (name, value) != ("length", 0)
        }
        found[one.name] = own | {name: value for name, value in changed.items() if value} | arm
    return found


def run_composed(measurement: Composed, job: Job, run: Run, subject: Subject, made: Composition) -> Outcome:
    """Run what is missing of the inner studies, make the tables, and write study.json last."""
    spec = job.spec
    task, items = job.items or spec.load_items()
    weights = subject.fingerprint([subject.layers or 1], head=True, progress=job.progress)
    found = identity_of(spec, subject.described, weights, items)
    found |= {name: digest(value) for name, value in made.measured.items()}
    identity = {key: value for key, value in found.items() if key not in OF_ATTENTION}
    analysis = digest([made.judged, spec.flips, *(_settings(one) for one in made.inner.values())])
    folder = ResultFolder(job.out or default_folder(spec, subject.label, measurement.judged_by))
    stored = folder.about()
    if stored is not None:
        check_age(folder, stored)
        check_same(folder, stored, identity, spec.name, spec.measured)
        # What was left out is tried again: a server may answer now, and a package be installed.
        same = stored.get("complete") and stored.get("analysis") == analysis and not stored.get("left_out")
        if same and folder.has_tables(measurement.tables):
            folder.check_tables(measurement.tables, stored)
            return Outcome(folder.path, 0, stored["units"], fresh=False)
    else:
        folder.check_free()
    about = manifest(
        job,
        task=task,
        items=items,
        conditions=made.conditions,
        identity=identity,
        analysis=analysis,
        model=subject.about(),
        inner=list(made.inner),
        command=rerun_command(spec, folder.path, job.trust_remote_code),
        **made.noted,
    )
    with folder.writing():
        folder.write_manifest(about)
        began = time.monotonic()
        computed, units, left_out = _run_inner(job, run, made, folder, len(items), begun=stored is not None)
        inner = {name: ResultFolder(folder.path / name) for name in made.inner if name not in left_out}
        for name, table in made.tables(inner).items():
            folder.write_table(name, table)
        timings = {"total_s": round(time.monotonic() - began, 2), "units_computed": computed}
        # Last, because it says that everything else is there.
        found = _of_inner(inner, made.facts) | ({"left_out": left_out} if left_out else {})
        folder.write_manifest(about | found | {"units": units, "complete": True, "timings": timings})
    return Outcome(folder.path, computed, units)


def _run_inner(
    job: Job, run: Run, made: Composition, folder: ResultFolder, items: int, *, begun: bool
) -> tuple[int, int, list[str]]:
    """Units computed, all units, and the inner studies that were left out. `begun`: the folder is not this run's alone, so it is kept."""
    computed, units = 0, 0
    left_out: dict[str, MlessError] = {}
    for name, study in made.inner.items():
        job.progress.say(f"{name}: {len(conditions_of(study))} conditions on {items} items")
        there = (folder.path / name).exists()
        try:
            outcome = run(replace(job, spec=study, out=folder.path / name, for_figure=False))
        except MlessError as fault:
            if not there and not (folder.path / name / "study.json").exists():
                # Nothing of it was measured; the inner run has released its lock.
                shutil.rmtree(folder.path / name, ignore_errors=True)
            # A folder that is damaged, busy or another study's is never passed over.
            passed_over = not isinstance(fault, BadFolder) and made.goes_on(name, fault)
            if passed_over:
                left_out[name] = fault
                job.progress.say(f"{name}: left out: {fault}")
                if len(left_out) < len(made.inner):
                    continue
            if not begun and not any((folder.path / one / "study.json").exists() for one in made.inner):
                folder.discard()
            if passed_over:
                raise left_out[next(iter(left_out))] from None
            raise
        computed, units = computed + outcome.computed, units + outcome.units
    return computed, units, sorted(left_out)


def _settings(spec: StudySpec) -> Any:
    accuracy = spec.accuracy and spec.accuracy.known_before(spec.accuracy.model_dump())
    return [accuracy, spec.likelihood and spec.likelihood.model_dump()]


def _of_inner(inner: Mapping[str, ResultFolder], names: Sequence[str]) -> dict[str, Any]:
    """What the inner folders say of the model and of the conditions; their control is among these."""
    stored = [folder.about() or {} for folder in inner.values()]
    found = {name: one[name] for one in reversed(stored) for name in names if one.get(name) is not None}
    return found | {"conditions": stored[0]["conditions"]}


def changes_in(inner: Mapping[str, ResultFolder], items: Sequence[str], conditions: Sequence[str]) -> Changes:
    """Each item's change against `none` under each of these conditions, by metric in the order of pages."""
    rows, columns = ({name: at for at, name in enumerate(names)} for names in (items, conditions))
    found: Changes = {}
    for name, folder in inner.items():
        for metric, condition, item, change in _changes_of(name, folder):
            if condition in columns:
                table = found.setdefault(metric, np.full((len(items), len(conditions)), np.nan))
                table[rows[item], columns[condition]] = change
    return {name: found[name] for name in METRICS_OF_CHANGE if name in found}


def _changes_of(readout: str, folder: ResultFolder) -> Iterator[tuple[str, str, str, float]]:
    if readout != "accuracy":
        return _scored(folder)
    return answered_changes(folder.read_table("answers", columns=["condition", "item", "correct"]))


def _scored(folder: ResultFolder) -> Iterator[tuple[str, str, str, float]]:
    table = folder.read_table("likelihood", columns=["metric", "condition", "item", "delta"])
    yield from zip(*(column.to_pylist() for column in table.columns), strict=True)


def answered_changes(answers: pa.Table) -> Iterator[tuple[str, str, str, float]]:
    """Metric, condition, item, and the share of the item's samples that are right minus the same under `none`."""
    means = answers.group_by(["condition", "item"]).aggregate([("correct", "mean")]).to_pylist()
    none = {row["item"]: row["correct_mean"] for row in means if row["condition"] == "none"}
    for row in means:
        yield "pass@1", row["condition"], row["item"], row["correct_mean"] - none[row["item"]]
