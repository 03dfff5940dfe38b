"""`mless tune`: ARM's settings tried on dev items, the chosen one on the untouched test items and on other tasks.

Each rung, the test and each transfer is an accuracy study in its own inner folder. So resuming, units and row-stability work as in every
accuracy study. The choice is made in `mless.study.tuning.choosing`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from mless import stats
from mless.engines import ENGINES
from mless.errors import BadStudy, MlessError
from mless.results.answers import verdict_of
from mless.results.folder import ResultFolder
from mless.results.schemas import ACCURACY, TUNING, table_of_rows
from mless.study.bench import Composed, Job, Measurement, Outcome, Progress, Run
from mless.study.identity import (
    OF_ATTENTION,
    check_age,
    check_same,
    default_folder,
    digest,
    identity_of,
    rerun_command,
    slug,
)
from mless.study.loading import load_study
from mless.study.measuring import manifest
from mless.study.spec import CALCULATOR, AccuracyTable, StudySpec, TuneTable
from mless.study.subject import Subject, check_arm
from mless.study.tuning.choosing import Choice, Plan, Readout, choose, plan_items, report, settings_to_try, tried_rows
from mless.study.tuning.words import tuning_lines
from mless.values import ArmSettings, Condition, Item, arm_words

#: With more settings per dev item than this, the best one is chosen by luck.
_MOST_SETTINGS_PER_ITEM = 1.0


@dataclass(frozen=True)
class _Transfer:
    """Another task that the chosen setting is tried on."""

    data: str
    folder: str
    items: list[str]
    seen: int  # number of its questions left out, because the tuned task has them too


class TuningMeasurement(Composed):
    """Chooses among ``[tune]``'s settings on dev items, and reports the chosen one on the test items and on each transfer task."""

    tables = ("tuning", "tuned")
    needs = ("accuracy",)

    def compose(self, job: Job, run: Run, readouts: Mapping[str, type[Measurement]]) -> Outcome:
        spec, progress = job.spec, job.progress
        settings, tune = spec.accuracy, spec.tune
        assert settings is not None
        assert tune is not None
        if not ENGINES.get(settings.engine).takes_arm:
            raise BadStudy(
                "ARM needs the model's weights, which a server does not give; tune with the engine hf or vllm"
            )
        named = settings_to_try(spec)
        task, items = spec.load_items()
        plan = plan_items(items, tune, len(named), spec.seed)
        transfers = _transfers(spec, items)
        subject = _subject_of(job, settings, named)
        label = subject.label
        identity = _identity(spec, items, subject, progress)
        plain = spec.model_copy(update={"tune": tune.model_copy(update={"transfer": []})})
        folder = ResultFolder(job.out if job.out is not None else default_folder(plain, label))
        stored = folder.about()
        analysis = digest(settings.known_before(settings.model_dump()))
        if stored is not None:
            check_age(folder, stored)
            check_same(folder, stored, identity, spec.name, spec.measured)
            same = stored.get("analysis") == analysis and stored.get("transfers") == tune.transfer
            if same and stored.get("complete") and folder.has_tables(self.tables):
                folder.check_tables(self.tables, stored)
                return Outcome(folder.path, 0, stored["units"], fresh=False)
        else:
            folder.check_free()
        _say_cost(progress, named, plan, transfers, settings.samples)
        command = rerun_command(spec, folder.path, job.trust_remote_code)
        about = manifest(
            job,
            task=task,
            items=items,
            conditions=[
                Condition("none", "none"),
                *(Condition(name, "none", arm=arm) for name, arm in named.items()),
            ],
            identity=identity,
            analysis=analysis,
            transfers=tune.transfer,
            model={"name": spec.model, "label": label},
            command=[command[0], "tune", *command[2:]],
        )
        accuracy = cast("Readout", readouts["accuracy"])
        with folder.writing():
            folder.write_manifest(about)
            try:
                return _Tuning(job, folder, named, plan, transfers, run, accuracy).finish(about)
            except MlessError:
                if stored is None and not (folder.path / "dev-1" / "study.json").exists():
                    # Nothing was drawn, so remove the folder; the inner run has released its lock.
                    shutil.rmtree(folder.path / "dev-1", ignore_errors=True)
                    folder.discard()
                raise

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return tuning_lines(path, cast("Readout", readouts["accuracy"]))


def _subject_of(job: Job, settings: AccuracyTable, named: Mapping[str, ArmSettings]) -> Subject:
    """The model; one that is not there, or has no such layer, is refused before anything is written."""
    weights = ENGINES.get(settings.engine).needs_weights
    subject = Subject.open(job.spec, job.progress, weights=weights, trust_remote_code=job.trust_remote_code)
    if subject.layers is not None:
        check_arm([Condition(name, "none", arm=arm) for name, arm in named.items()], subject.layers)
    return subject


def _transfers(spec: StudySpec, items: Sequence[Item]) -> list[_Transfer]:
    """The other tasks, loaded once to check that they exist and differ from the tuned task."""
    asked = {item.question for item in items}
    found: dict[str, _Transfer] = {}
    for data in dict.fromkeys((spec.tune or TuneTable()).transfer):
        name = f"transfer-{slug(data.rsplit('/', 1)[-1])}"
        if taken := next((one for one in found.values() if one.folder.lower() == name.lower()), None):
            raise BadStudy(f"--transfer {data} and {taken.data} would share the folder {name}; rename one file")
        others = _on_other_data(spec, data).load_items()[1]
        new = [item.id for item in others if item.question not in asked]
        if not new:
            raise BadStudy(
                f"--transfer {data}: all of its {len(others)} questions are those of the task that the setting is chosen on; name another task"
            )
        found[name] = _Transfer(data, name, new, len(others) - len(new))
    return list(found.values())


def _identity(spec: StudySpec, items: Sequence[Item], subject: Subject, progress: Progress) -> dict[str, str]:
    """The settings and the items of the choice, and the weights. How answers are drawn belongs to the inner folders' identity."""
    assert spec.tune is not None
    chosen_by = digest(spec.tune.model_dump(exclude={"transfer"}))
    weights = subject.fingerprint([subject.layers or 1], head=True, progress=progress)
    found = identity_of(spec, subject.described, weights, items) | {
        "tune": chosen_by,
        "arm": digest(spec.arm.model_dump()),
    }
    return {key: value for key, value in found.items() if key not in OF_ATTENTION}


def _say_cost(
    progress: Progress, named: Mapping[str, ArmSettings], plan: Plan, transfers: Sequence[_Transfer], samples: int
) -> None:
    cost = plan.answers(len(named), samples) + 3 * samples * sum(len(one.items) for one in transfers)
    progress.say(
        f"{len(named)} settings on {len(plan.dev)} dev items in {len(plan.rungs)} rung(s), the chosen one on {len(plan.test)} test items"
        f"{f' and on {len(transfers)} other task(s)' if transfers else ''}: {cost:,} answers"
    )
    for one in transfers:
        if one.seen:
            progress.say(f"{one.data}: {one.seen} of its questions are left out, because the tuned task has them too")
    if len(named) > _MOST_SETTINGS_PER_ITEM * len(plan.dev):
        progress.say(
            f"warning: {len(named)} settings on {len(plan.dev)} dev items: too few to tell so many apart, so the best will be the luckiest, "
            f"at the cost of {cost:,} answers; try fewer settings, or take more items"
        )


# ---- the inner studies -----------------------------------------------------------------------------------------------


def _inner(spec: StudySpec, named: Mapping[str, ArmSettings], title: str, **changes: Any) -> StudySpec:
    """An accuracy study of none and these settings, with everything else as in `spec`; its command makes its folder again."""
    assert spec.accuracy is not None
    fields = spec.model_dump(exclude={"name", "title", "figure", "tune", "condition", "conditions", "accuracy", "only"})
    tables = {name: {"kind": "none", "arm": {**asdict(arm), "layers": list(arm.layers)}} for name, arm in named.items()}
    fields |= {"title": title, "figure": None, "conditions": ["none", *named], "condition": tables}
    accuracy = spec.accuracy.model_dump() | {"dev_share": 0.0, "again": changes.pop("again", True)}
    return load_study("accuracy", fields | {"accuracy": accuracy} | changes)


def _on_other_data(spec: StudySpec, data: str) -> StudySpec:
    """`spec` about another task, whose fields and system text are its own unless a system text was asked for."""
    fields = {"data": data, "question_field": None, "answer_field": None, "solution_field": None, "only": []}
    assert spec.accuracy is not None
    fields |= {"accuracy": spec.accuracy.model_copy(update={"cluster_field": None, "rules": None})}
    by_default = {CALCULATOR, StudySpec.model_fields["system"].default}
    if spec.system in by_default:
        fields |= {"system": CALCULATOR if data.startswith("arithmetic") else StudySpec.model_fields["system"].default}
    return spec.model_copy(update=fields)


@dataclass
class _Tuning:
    job: Job
    folder: ResultFolder
    named: Mapping[str, ArmSettings]
    plan: Plan
    transfers: Sequence[_Transfer]
    run: Run
    accuracy: Readout
    computed: int = 0
    units: int = 0

    @property
    def spec(self) -> StudySpec:
        return self.job.spec

    def finish(self, about: dict[str, Any]) -> Outcome:
        assert self.spec.accuracy is not None
        began = time.monotonic()
        names, seed, accuracy = list(self.named), self.spec.seed, self.spec.accuracy
        choice = choose(names, self.plan.rungs, self._draw)
        chosen = {choice.condition: self.named[choice.condition]}
        self.job.progress.say(f"chosen on the dev items: {choice.condition} ({arm_words(chosen[choice.condition])})")
        answers = self._run("test", _inner(self.spec, chosen, "ARM tuned: the test items", only=list(self.plan.test)))
        rows = [
            row | {"split": "test"} for row in report(answers, choice.condition, accuracy, self.accuracy, seed=seed)
        ]
        for one in self.transfers:
            title = f"ARM tuned on {self.spec.data}: {one.data}"
            new = one.items if one.seen else []
            other = _inner(_on_other_data(self.spec, one.data), chosen, title, only=new)
            rows += report(self._run(one.folder, other), choice.condition, accuracy, self.accuracy, seed=seed)
        self._correct_transfers(rows)
        self.folder.write_table("tuning", self._table(choice, accuracy))
        self.folder.write_table("tuned", pa.Table.from_pylist(rows, schema=ACCURACY))
        inner = ResultFolder(self.folder.path / "test").about() or {}
        about |= {
            key: inner.get(key) for key in ("model", "tokenizer", "prompt", "engine", "device", "implementations")
        }
        about["tuning"] = {
            "chosen": choice.condition,
            "tried": len(names),
            "rungs": [len(part) for part in self.plan.rungs],
            "dev": list(self.plan.dev),
            "test": list(self.plan.test),
            "transfer": {one.data: one.folder for one in self.transfers},
        }
        about["units"] = self.units
        timings = {"total_s": round(time.monotonic() - began, 2), "units_computed": self.computed}
        # Last, because it says that everything else is there.
        self.folder.write_manifest(about | {"complete": True, "timings": timings})
        return Outcome(self.folder.path, self.computed, self.units)

    def _draw(self, rung: int, items: Sequence[str], left: Sequence[str]) -> pa.Table:
        arms = {name: self.named[name] for name in left}
        title = f"ARM tuned: dev items, rung {rung}"
        return self._run(f"dev-{rung}", _inner(self.spec, arms, title, only=list(items), again=False))

    def _run(self, name: str, inner: StudySpec) -> pa.Table:
        self.job.progress.say(f"{name}: {', '.join(inner.conditions)} on {len(inner.load_items()[1])} items")
        outcome = self.run(replace(self.job, spec=inner, out=self.folder.path / name, for_figure=False))
        self.computed += outcome.computed
        self.units += outcome.units
        return ResultFolder(outcome.folder).read_table("answers")

    def _correct_transfers(self, rows: Sequence[dict[str, Any]]) -> None:
        """Several other tasks are several tests of one question: Holm over them. The test items are one test and need no correction."""
        others = [row for row in rows if row["split"] == "all" and row["metric"] == "pass@1" and row["verdict"]]
        known = [row for row in others if row["p_adjusted"] is not None]
        for row, p in zip(known, stats.holm(np.array([row["p_adjusted"] for row in known], np.float64)), strict=True):
            row |= {"p_adjusted": float(p), "verdict": verdict_of(row, float(p))}

    def _table(self, choice: Choice, accuracy: AccuracyTable) -> pa.Table:
        rows = [
            row | asdict(self.named[row["condition"]])
            for row in tried_rows(choice, accuracy, self.accuracy, seed=self.spec.seed)
        ]
        return table_of_rows(rows, TUNING)
