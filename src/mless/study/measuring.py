"""One loop for every measurement: stored units are kept, missing ones are computed group by group and written by one writer."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any

from mless.errors import BadAttention, BadFolder, BadPlugin, BadStudy
from mless.results.folder import FORMAT, ResultFolder
from mless.results.reading import read_prompts
from mless.results.schemas import prompts_table
from mless.results.storing import PATIENCE, Encoded, Ready, Store, in_parts, made
from mless.results.tables import note_written
from mless.study.bench import Bench, Job, Measurement, Outcome, StartAgain, Unit, Written
from mless.study.changing import check_changes
from mless.study.conditions import conditions_of
from mless.study.halving import class_of, measured, with_arm, with_changes
from mless.study.identity import (
    UNITS_FORMAT,
    check_age,
    check_same,
    default_folder,
    differing,
    identity_of,
    is_circumstance,
    recorded,
    rerun_command,
    versions,
)
from mless.study.rendering import write_prompts
from mless.study.showing import check_figure
from mless.study.subject import Subject, check_arm
from mless.study.writing import Writing
from mless.values import Condition, Item, parse_numbers, stored_condition

if TYPE_CHECKING:
    import pyarrow as pa

#: Stored instead of the tables' digest while they are being written.
_UNFINISHED = "unfinished"


def run(measurement: Measurement, job: Job) -> Outcome:
    """Run what is missing of the study into its folder, and make its tables."""
    bench, identity = opened(measurement, job)
    analysis, folder = measurement.analysis(bench.items), bench.folder
    stored = folder.about()
    if stored is not None:
        check_age(folder, stored)
        measured = bool(stored.get("complete")) and folder.has_tables(measurement.sources)
        check_same(folder, stored, identity, job.spec.name, job.spec.measured, measured=measured)
        measurement.check_stored(folder, stored)
        if measured:
            there = [table for table in (*measurement.sources, *measurement.tables) if folder.has_tables((table,))]
            folder.check_tables(there, stored)
            return _judge_again(measurement, bench, job, stored, analysis)
    else:
        folder.check_free()
    return _compute(measurement, bench, job, identity, analysis)


def opened(measurement: Measurement, job: Job, *, anew: bool = False) -> tuple[Bench, dict[str, str]]:
    """The study with its items and its model, not loaded yet, and its identity so far; with `anew` the weights are hashed again."""
    spec, progress = job.spec, job.progress
    conditions = conditions_of(spec)
    _check_conditions(measurement, conditions, job)
    if "margins" in measurement.judged_by:
        spec.margins_of()
    task, items = job.items or spec.load_items()
    measurement.check(conditions, items)
    measurement.check_code(allowed=job.run_code)
    subject = Subject.open(spec, progress, weights=measurement.needs_weights(), trust_remote_code=job.trust_remote_code)
    layers = measurement.layers(subject) if subject.layers else []
    heads = parse_numbers(spec.heads, subject.heads, "head") if subject.heads else []
    if subject.layers is not None:
        check_arm(conditions, subject.layers)
        check_changes(conditions, subject.layers, subject.heads or 0, answer=measurement.reads_answers)
        _check_is_measured(measurement, conditions, layers)
    if job.for_figure:
        check_figure(spec, subject.layers or 0, subject.heads or 0)
    weights = subject.fingerprint(layers or [1], head=measurement.reads_head, progress=progress, anew=anew)
    identity = measurement.identity(identity_of(spec, subject.described, weights, items), items)
    folder = ResultFolder(job.out or default_folder(spec, subject.label, measurement.judged_by))
    bench = Bench(
        spec, folder, items, conditions, None, layers, heads, {"model": subject.label, "task": task}, progress, subject
    )
    return bench, identity


# ---- checks before anything is loaded ----------------------------------------------------------------------


def _check_conditions(measurement: Measurement, conditions: Sequence[Condition], job: Job) -> None:
    if job.spec.arm.model_dump(exclude_none=True) and not any(one.arm for one in conditions):
        job.progress.say(
            "ARM's parameters are given, but no condition runs with ARM: add arm to the conditions, or leave them out"
        )
    for condition in conditions:
        if condition.arm is not None and not measurement.takes_arm:
            raise BadStudy(
                f"condition {condition.name!r} runs the model with ARM, which {job.spec.measured} does not take"
                f"{measurement.why_no_arm}; leave it out of --conditions, and use mless run activations for it"
            )
        for what, has, takes in (
            ("cuts attention", condition.cut, measurement.takes_cuts),
            ("takes values from another run", condition.patch, measurement.takes_patches),
        ):
            if has and not takes:
                raise BadStudy(
                    f"condition {condition.name!r} {what}, which {job.spec.measured} does not take{measurement.why_no_changes}; leave it out of --conditions, "
                    "and use mless run likelihood for it"
                )
        if condition.for_answers_only and measurement.pairs_tokens:
            raise BadStudy(
                f"condition {condition.name!r} is for answers: attention under it cannot be compared token by token with none; use it in a "
                "study that has [accuracy], such as mless run accuracy"
            )


def _check_is_measured(measurement: Measurement, conditions: Sequence[Condition], layers: Sequence[int]) -> None:
    """ARM, a cut or a patch behind the last measured layer would change nothing that is measured."""
    for condition in conditions if measurement.runs_model else ():
        if condition.arm is not None and min(condition.arm.layers) > max(layers):
            raise BadStudy(
                f"condition {condition.name!r}: ARM in layer {min(condition.arm.layers)} cannot change layers up to {max(layers)}, which are all that is "
                f"measured; add --layers 1-{min(condition.arm.layers)}"
            )
        for one in (*condition.cut, *condition.patch):
            first = 1 if one.layers == "all" else min(parse_numbers(one.layers, 10_000, "layer"))
            if first > max(layers):
                raise BadStudy(
                    f"condition {condition.name!r}: {one.words()} cannot change layers up to {max(layers)}, which are all that is measured; add --layers "
                    f"1-{first}"
                )


# ---- computing -------------------------------------------------------------------------------------------------------


def _compute(measurement: Measurement, bench: Bench, job: Job, identity: dict[str, str], analysis: str) -> Outcome:
    began = time.monotonic()
    subject = bench.subject
    assert subject is not None
    measurement.load(subject, bench.layers, job.progress)
    loaded = time.monotonic()
    written = write_prompts(measurement, bench, subject)
    bench.prompts = written.prompts
    measurement.prepare(bench)
    asked = f" ({bench.spec.prompt})" if bench.spec.prompt != written.kind else ""
    job.progress.say(f"prompts: {written.kind}{asked}; system text: {bench.spec.system!r}")
    identity = identity | measurement.identity_loaded(bench) | {"unit format": str(measurement.unit_format)}
    measurement.check_loaded(bench, identity)
    units = bench.units()
    writer = _Writer(measurement, bench, job, written, identity, analysis, len(units))
    with bench.folder.writing():
        bench.folder.sweep()
        stored = bench.folder.about()
        if stored is not None:
            check_age(bench.folder, stored)
            check_same(bench.folder, stored, identity, bench.spec.name, bench.spec.measured)
        elif bench.folder.has_units():
            place = bench.folder.set_aside(bench.folder.path / "units")
            job.progress.say(
                f"{bench.folder.path} holds units, but no study.json: they are set aside as {place}, and measured anew"
            )
        computed = writer.compute(units, stored)
        measured = time.monotonic()
        job.progress.say(measurement.finishing)
        if written.prompts is not None:
            bench.folder.write_table("prompts", prompts_table(written.prompts, subject.tokenizer, bench.names))
        writer.finish()
        measurement.finish(bench)
        timings = {
            "load_s": round(loaded - began, 2),
            "measure_s": round(measured - loaded, 2),
            "finish_s": round(time.monotonic() - measured, 2),
            "units_computed": computed,
        }
        # Last, because it marks the folder as complete. From here on the tables hold what the units held.
        writer.write(complete=True, timings=timings)
        for table in measurement.merged if computed else ():
            note_written(bench.folder.path / f"{table}.parquet", writer.about)
        bench.folder.drop_units()
    return Outcome(bench.folder.path, computed, len(units))


class _Writer:
    """Writes units and study.json; nothing else does."""

    def __init__(
        self,
        measurement: Measurement,
        bench: Bench,
        job: Job,
        written: Written,
        identity: dict[str, str],
        analysis: str,
        units: int,
    ) -> None:
        self._measurement, self._bench, self._progress = measurement, bench, job.progress
        self._identity = identity
        self._workers_known = 0
        self._store: Store | None = None
        subject = bench.subject
        assert subject is not None
        tokenizer = subject.known("tokenizer_fingerprint") or identity["tokenizer files"]
        self._about = manifest(
            job,
            task=bench.task,
            items=bench.items,
            conditions=written.conditions,
            identity=identity,
            analysis=analysis,
            model=subject.about(),
            tokenizer={"fingerprint": tokenizer, "given": bench.spec.tokenizer},
            prompt=written.kind,
            command=rerun_command(bench.spec, bench.folder.path, job.trust_remote_code),
            units=units,
        )

    @property
    def about(self) -> Mapping[str, Any]:
        return self._about

    def write(self, *, complete: bool, **more: Any) -> None:
        self._about |= self._measurement.about(self._bench)
        self._bench.folder.write_manifest(self._about | {"complete": complete} | more)

    def compute(self, units: Sequence[Unit], stored: dict[str, Any] | None) -> int:
        """Compute and store the units that are missing; how many these were."""
        folder, measurement = self._bench.folder, self._measurement
        fresh = stored is None
        folder.take_units_of((stored or {}).get("identity", {}))
        while True:
            started = False
            self._store = self._recovered(units)
            missing = [unit for unit in units if not self._is_stored(unit)]
            if not missing and stored is not None:
                measurement.resume(self._bench, stored)
                # with what a started instrument had added to it
                self._identity = self._about["identity"] = stored["identity"] | self._identity
                self._about["implementations"] = {**stored.get("implementations", {}), **measurement.judges}
                return 0
            try:
                self._start(units, missing, stored)
                started = True
                return self._measure_all(units, missing)
            except StartAgain:
                # Units of two kinds must not share a table. The folder itself stays: it is held by its lock.
                self._store.close()
                folder.drop_units()
                stored = None
            except BaseException as fault:
                self._store.close()
                # Another dtype, checkpoint or items would make another study, so these units are of no use.
                if fresh and (not started or isinstance(fault, BadAttention)):
                    folder.discard()
                raise
            finally:
                measurement.stop()

    def finish(self) -> None:
        """Complete the tables that hold the units as they are."""
        assert self._store is not None
        with self._writing(self._store) as writing:
            for ready in self._store.ready():  # parts whose units were all stored by an earlier run
                writing.put(ready)
        self._store.finish()

    def _writing(self, store: Store) -> Writing[Ready, Encoded]:
        bench, measurement = self._bench, self._measurement
        units = {unit.key: unit for unit in bench.units()}

        def look(key: str, found: Mapping[str, pa.Table]) -> None:
            _check_tables(measurement, found)
            measurement.seen(bench, units[key], found)

        def encode(ready: Ready) -> Encoded:
            return store.encode(ready, look)

        return Writing(encode, store.put, measuring_here=measurement.measures_here)

    def _recovered(self, units: Sequence[Unit]) -> Store:
        """What an earlier run stored. What is damaged, or another unit in a unit's place, is set aside and measured anew."""
        folder, measurement, bench = self._bench.folder, self._measurement, self._bench
        by_key = {unit.key: unit for unit in units}
        store = Store(folder, measurement.merged, self._parts(by_key))
        said = store.recover(lambda key, table, found: measurement.expected(bench, by_key[key], table, found))
        for unit in units:
            grown = store.in_tables(unit.key)
            needed = [name for name in measurement.unit_tables if not grown or name not in measurement.merged]
            # A kill may leave one of a unit's files, and a measurement may read that one.
            there = [name for name in needed if folder.has_unit((name,), unit.key)]
            ahead = [name for name in needed if store.table_has(name, unit.key)]
            refused = folder.refuse_damaged(there, unit.key, partial(measurement.expected, bench, unit))
            said += refused
            if needed and {*there, *ahead} == {*needed} and not refused:
                store.take_file(unit.key)
        for line in said:
            self._progress.say(f"{line}, and measured anew")
        return store

    def _parts(self, units: Mapping[str, Unit]) -> list[list[str]]:
        """Names of the units in parts of the tables, in the order in which they are measured: few then wait for others."""
        if not self._measurement.merged:
            return []
        groups = self._measurement.groups(self._bench, list(units.values()))
        ordered = {unit.key: unit for group in groups for unit in group.units} | dict(units)
        found: list[list[str]] = []
        for _, some in groupby(ordered.values(), key=partial(self._measurement.stored_with, self._bench)):
            found += in_parts([(unit.key, 0 if unit.prompt is None else len(unit.prompt)) for unit in some])
        return found

    def _is_stored(self, unit: Unit) -> bool:
        measurement = self._measurement
        assert self._store is not None
        return self._store.has(unit.key) and (
            set(measurement.unit_tables) <= set(measurement.merged)
            or self._bench.folder.has_unit(
                [n for n in measurement.unit_tables if n not in measurement.merged], unit.key
            )
        )

    def _start(self, units: Sequence[Unit], missing: Sequence[Unit], stored: dict[str, Any] | None) -> None:
        """Check the instrument, and record in the folder what is being computed."""
        self._identity |= self._measurement.start(self._bench, stored, resumed=len(missing) < len(units))
        if stored is not None:
            spec = self._bench.spec
            check_same(self._bench.folder, stored, self._identity, spec.name, spec.measured)
            self._identity = stored["identity"] | self._identity
        self._bench.folder.take_units_of(self._identity)
        self._progress.checked()
        self._about["identity"] = self._identity
        if halved := (stored or {}).get("groups_halved"):
            self._about["groups_halved"] = halved
        before: Mapping[str, Any] = (stored or {}).get("implementations", {})
        self._about["implementations"] = _together(before, self._measurement.implementations)
        if stored is None or stored.get("complete") or self._measurement.changed(stored):
            self.write(complete=False)

    def _measure_all(self, units: Sequence[Unit], missing: Sequence[Unit]) -> int:
        bench, measurement, store = self._bench, self._measurement, self._store
        assert store is not None
        absent, seen = {unit.key for unit in missing}, set[str]()
        here = partial(measured, measurement, bench, halved=self._halved)
        with self._writing(store) as writing, _keeping(store, writing):
            groups = list(measurement.groups(bench, missing))
            what = measurement.doing

            def show() -> None:
                done = len(units) - len(absent)
                self._progress.step(what, done, len(units), measurement.workers_now())

            def while_idle() -> None:
                show()
                for ready in store.ready():
                    writing.put(ready)

            for group, units_of_it in measurement.run_groups(bench, groups, here, self._halved, while_idle):
                asked_for, last, longest = {unit.key for unit in group.units}, time.monotonic(), 0.0
                for unit, found in units_of_it:
                    _check_asked(measurement, asked_for, unit)
                    now = time.monotonic()
                    longest, last = max(longest, now - last), now
                    self._note()
                    store.add(unit.key, found)
                    seen.add(unit.key)
                    absent.discard(unit.key)
                    # Where units come that slowly, what waits is stored at once.
                    for ready in store.ready(at_once=longest > PATIENCE):
                        writing.put(ready)
                    what = f"{measurement.doing}, {unit.condition.name}"
                    show()
            if left := [unit for unit in missing if unit.key in absent]:
                raise BadPlugin(
                    f"{class_of(measurement)}.measure gave nothing for {len(left)} of {len(missing)} units, the first of them item "
                    f"{bench.items[left[0].number].id!r} under {left[0].condition.name!r}; every unit of a group needs its tables"
                )
        return len(seen)

    def _halved(self, line: str) -> None:
        """A group ran in halves: say it, and record it."""
        self._progress.say(line)
        self._about["groups_halved"] = self._about.get("groups_halved", 0) + 1
        self.write(complete=False)

    def _note(self) -> None:
        """Record what computes, and who, before anything that it computed is stored."""
        used = _together(self._about.get("implementations", {}), self._measurement.implementations)
        known = self._measurement.workers_known()
        if used != self._about.get("implementations") or known != self._workers_known:
            self._about["implementations"], self._workers_known = used, known
            self.write(complete=False)


def _together(stored: Mapping[str, str | list[str]], now: Mapping[str, str | list[str]]) -> dict[str, str | list[str]]:
    """What computed a folder's numbers, in all runs that had a part in them."""
    found: dict[str, str | list[str]] = {}
    for what, by in now.items():
        before = stored.get(what, [])
        before = [before] if isinstance(before, str) else before
        found[what] = by if isinstance(by, str) else sorted({*before, *by})
    return found


@contextmanager
def _keeping(store: Store, writing: Writing[Ready, Encoded]) -> Generator[None]:
    """Where the measuring is interrupted, what was measured until then is stored."""
    try:
        yield
    except (StartAgain, BadAttention):
        raise  # it is of no use
    except BaseException:
        with suppress(BaseException):  # the first fault is the one to be said
            for ready in store.ready(at_once=True):
                writing.put(ready)
        raise


def _check_asked(measurement: Measurement, keys: set[str], unit: Unit) -> None:
    """Refuse a unit that was not asked for: nobody would find it."""
    if unit.key not in keys:
        raise BadPlugin(
            f"{class_of(measurement)}.measure gave a unit that is not of its group: item number {unit.number + 1} under {unit.condition.name!r}"
        )


def _check_tables(measurement: Measurement, found: Mapping[str, pa.Table]) -> None:
    """Refuse other tables than were announced."""
    if set(found) != set(measurement.unit_tables):
        raise BadPlugin(
            f"{class_of(measurement)}.measure gave the tables {', '.join(found) or 'none'}; its unit_tables are "
            f"{', '.join(measurement.unit_tables) or 'none'}, and each unit needs these and no others"
        )


# ---- computing some of it again --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Again:
    """Units computed again beside their stored rows, and whether device and versions are the same as then."""

    units: list[tuple[Unit, Mapping[str, pa.Table], Mapping[str, pa.Table]]]
    same: bool
    dtype: str


def compute_again(measurement: Measurement, job: Job, folder: ResultFolder, number: int, rng: Random) -> Again:
    """Compute some stored units again, in the groups that they were computed in. Nothing is written; `job.out` names no folder that exists."""
    stored = folder.manifest() or {}
    bench, identity = opened(measurement, job, anew=True)
    _check_comparable(stored, identity)
    assert bench.subject is not None
    measurement.load(bench.subject, bench.layers, job.progress)
    bench.prompts = write_prompts(measurement, bench, bench.subject).prompts
    measurement.prepare(bench)
    loaded = measurement.identity_loaded(bench) | {"unit format": str(measurement.unit_format)}
    _check_comparable(stored, loaded)
    units = bench.units()
    places = [at for at, unit in enumerate(units) if measurement.has_rows(folder, unit)]
    chosen = {units[at].key: at for at in sorted(rng.sample(places, min(number, len(places))))}
    found: list[tuple[Unit, Mapping[str, pa.Table], Mapping[str, pa.Table]]] = []
    try:
        loaded |= measurement.start(bench, stored, resumed=True) if chosen else {}
        job.progress.checked()
        for group in measurement.groups(bench, [units[at] for at in chosen.values()]):
            with with_arm(measurement, bench, group), with_changes(measurement, bench, group):
                for unit, tables in measurement.measure(bench, group):
                    if unit.key in chosen:
                        rows = measurement.rows_of(folder, unit, units, bench.items[unit.number].id)
                        found.append((unit, made(tables), rows))
                        job.progress.step("recomputing", len(found), len(chosen))
        device = measurement.about(bench).get("device")
    finally:
        measurement.stop()
    same = stored.get("versions") == versions() and stored.get("device") == json.loads(json.dumps(device))
    return Again(found, same and not differing(stored, loaded), str((stored.get("device") or {}).get("dtype")))


def _check_comparable(stored: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    different = [name for name in differing(stored, identity) if not is_circumstance(name)]
    if different:
        raise BadFolder(
            f"what is at hand here is not what the folder was made from: it differs in {', '.join(different)}"
        )


# ---- judging what is stored ------------------------------------------------------------------------------------------


def _judge_again(measurement: Measurement, bench: Bench, job: Job, stored: dict[str, Any], analysis: str) -> Outcome:
    """All units are stored. Make tables again where one is missing or margins or rules changed; no model is loaded."""
    folder = bench.folder
    same = measurement.stored_analysis(stored) == analysis and folder.has_tables(measurement.tables)
    if not same:
        job.progress.say("everything is stored: judging it again")
        began = time.monotonic()
        with folder.writing():
            bench.prompts = read_prompts(folder) if measurement.pairs_tokens else None
            # Until all tables are written they count as not judged, so a run after a kill judges again.
            # The manifest gets this mless's format; a folder of an older one is still known by how its units ran.
            if stored["format"] < FORMAT:
                stored = {UNITS_FORMAT: stored["format"]} | stored
            folder.write_manifest(stored | {"analysis": _UNFINISHED})
            measurement.judge_again(bench)
            timings = stored.get("timings", {}) | {"finish_s": round(time.monotonic() - began, 2), "units_computed": 0}
            # Judging does not change how the prompts ran.
            ran = {name: stored["study"].get(name) for name in ("batch_size", "group_tokens")}
            spec = bench.spec.model_copy(update=ran)
            command = rerun_command(spec, folder.path, job.trust_remote_code)
            used = {**stored.get("implementations", {}), **measurement.judges}
            now = {"study": spec.model_dump(), "analysis": analysis, "command": command, "timings": timings}
            folder.write_manifest(stored | now | {"implementations": used})
    if folder.has_units():
        with folder.writing():
            folder.drop_units()
    return Outcome(folder.path, 0, stored["units"], fresh=not same)


# ---- study.json ------------------------------------------------------------------------------------------------------


def manifest(
    job: Job, *, task: str, items: Sequence[Item], conditions: Sequence[Condition], **more: Any
) -> dict[str, Any]:
    """What study.json says of every study; `more` is added for this one."""
    return {
        **recorded(job.spec.measured, job.spec.model_dump(), task, [item.id for item in items]),
        "complete": False,
        "conditions": {one.name: stored_condition(one) for one in conditions},
        "trust_remote_code": job.trust_remote_code,
        **more,
    }
