"""`mless tune`: ARM's settings tried on dev items, the chosen one on the untouched test items and on other tasks.

Each rung, the test and each transfer is an accuracy study in a folder of its own inside the result folder, so that resuming, units and
row-stability are those of every accuracy study. What is chosen and what is said of it is `mless.study.choosing`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mless import __version__, stats
from mless.errors import BadFolder, BadStudy, MlessError
from mless.store import ResultFolder
from mless.study.accuracy import ACCURACY
from mless.study.accuracy_words import accuracy_lines, change_words, points_words
from mless.study.choosing import (
    Choice,
    Noise,
    Plan,
    choose,
    on_noise,
    plan_items,
    report,
    settings_to_try,
    tried_rows,
    with_control,
)
from mless.study.comparing import ALPHA, verdict_of
from mless.study.identity import check_same, default_folder, digest, identity_of, rerun_command, slug, versions
from mless.study.running import Outcome, Progress, Silent, check_arm, run_study
from mless.study.spec import CALCULATOR, AccuracyTable, StudySpec, TuneTable, load_study
from mless.values import ArmSettings, Condition, Item, arm_of, arm_words

#: One row per setting and rung, over all dev items up to that rung. `none` is the baseline's accuracy on the same items; `p_adjusted` is
#: Holm's over all settings that were tried; `kept`: goes on to the next rung, or after the last rung is the one chosen.
TUNING = pa.schema(
    [
        ("model", pa.string()),
        ("task", pa.string()),
        ("condition", pa.string()),
        ("rung", pa.int32()),
        ("c", pa.float64()),
        ("fraction", pa.float64()),
        ("p_min", pa.float64()),
        ("p_max", pa.float64()),
        ("p1", pa.float64()),
        ("layers", pa.list_(pa.int32())),
        ("n", pa.int32()),
        ("none", pa.float64()),
        ("value", pa.float64()),
        ("lo", pa.float64()),
        ("hi", pa.float64()),
        ("delta", pa.float64()),
        ("delta_lo", pa.float64()),
        ("delta_hi", pa.float64()),
        ("p", pa.float64()),
        ("p_adjusted", pa.float64()),
        ("kept", pa.bool_()),
    ]
)
TABLES = ("tuning", "tuned")
#: More settings than this for each dev item, and the best of them is chosen by luck.
_SENSE = 1.0


@dataclass(frozen=True)
class _Transfer:
    """Another task that the chosen setting is tried on."""

    data: str
    folder: str
    items: list[str]
    seen: int  # so many of its questions are left out, because they belong to the task that the setting is chosen on


def run_tuning(
    spec: StudySpec, out: Path | None = None, progress: Progress | None = None, *, trust_remote_code: bool = False
) -> Outcome:
    """Choose among ``[tune]``'s settings on dev items, and report the chosen one on the test items and on each transfer task."""
    told = progress or Silent()
    settings = spec.accuracy
    if spec.tune is None or settings is None:
        raise BadStudy(
            f"study {spec.name!r} has no {'[tune]' if spec.tune is None else '[accuracy]'}, so there is nothing to choose among; use the study tune, or one "
            "that has [tune] and [accuracy]"
        )
    if settings.engine == "openai":
        raise BadStudy("ARM needs the model's weights, which a server does not give; tune with the engine hf or vllm")
    named = settings_to_try(spec)
    task, items = spec.load_items()
    plan = plan_items(items, spec.tune, len(named), spec.seed)
    transfers = _transfers(spec, items)
    label = _checked_model(spec, named, told, trust_remote_code)
    identity = _identity(spec, items)
    plain = spec.model_copy(update={"tune": spec.tune.model_copy(update={"transfer": []})})
    folder = ResultFolder(out if out is not None else default_folder(plain, label))
    stored = folder.manifest()
    if stored is not None:
        check_same(folder, stored, identity)
        same = stored.get("analysis") == digest(settings.model_dump()) and stored.get("transfers") == spec.tune.transfer
        if same and stored.get("complete") and all((folder.path / f"{name}.parquet").exists() for name in TABLES):
            return Outcome(folder.path, 0, stored["units"], fresh=False)
    elif folder.holds_something_else():
        raise BadFolder(f"{folder.path} is not empty and holds no study.json; choose another --out")
    _say_cost(told, named, plan, transfers, settings.samples)
    about: dict[str, Any] = {
        "mless": __version__, "measures": "tune", "identity": identity, "analysis": digest(settings.model_dump()),
        "transfers": spec.tune.transfer, "study": spec.model_dump(), "task": task, "model": {"name": spec.model, "label": label},
        "command": [*rerun_command(spec, folder.path, trust_remote_code)[:1], "tune", *rerun_command(spec, folder.path, trust_remote_code)[2:]],
        "conditions": {"none": asdict(Condition("none", "none"))}
        | {name: asdict(Condition(name, "none", arm=arm)) for name, arm in named.items()},
        "items": [item.id for item in items], "seeds": {"study": spec.seed}, "versions": versions(),
    }  # fmt: skip
    with folder.writing():
        folder.write_manifest(about | {"complete": False})
        try:
            return _Tuning(spec, folder, named, plan, transfers, told, trust_remote_code).finish(about)
        except MlessError:
            if stored is None and not (folder.path / "dev-1" / "study.json").exists():
                # Nothing was drawn, so another try may use the name; the inner run has left its lock.
                shutil.rmtree(folder.path / "dev-1", ignore_errors=True)
                folder.discard()
            raise


def _checked_model(spec: StudySpec, named: Mapping[str, ArmSettings], told: Progress, trust_remote_code: bool) -> str:
    """The model's label; a model that is not there, or has no such layer, is told before anything is written."""
    assert spec.accuracy is not None
    if spec.accuracy.engine not in ("hf", "vllm"):
        return slug(spec.model)
    from mless.models import describe

    described = describe(spec.model, trust_remote_code=trust_remote_code, say=told.say, step=told.step)
    check_arm([Condition(name, "none", arm=arm) for name, arm in named.items()], described.layers)
    return described.source.label


def _transfers(spec: StudySpec, items: Sequence[Item]) -> list[_Transfer]:
    """The other tasks, loaded once to see that they are there, and that they are others."""
    asked = {item.question for item in items}
    found: dict[str, _Transfer] = {}
    for data in dict.fromkeys((spec.tune or TuneTable()).transfer):
        name = f"transfer-{slug(data.rsplit('/', 1)[-1])}"
        if name in found:
            raise BadStudy(f"--transfer {data} and {found[name].data} would share the folder {name}; rename one file")
        others = _on_other_data(spec, data).load_items()[1]
        new = [item.id for item in others if item.question not in asked]
        if not new:
            raise BadStudy(
                f"--transfer {data}: all of its {len(others)} questions are those of the task that the setting is chosen on; name another task"
            )
        found[name] = _Transfer(data, name, new, len(others) - len(new))
    return list(found.values())


def _identity(spec: StudySpec, items: Sequence[Item]) -> dict[str, str]:
    """What was to be chosen among and on; how answers are drawn is the inner folders' own identity."""
    assert spec.tune is not None
    chosen_by = digest(spec.tune.model_dump(exclude={"transfer"}))
    unused = ("layers", "heads", "batch_size", "margins", "flips")  # of attention
    found = identity_of(spec, None, spec.model, items) | {"tune": chosen_by, "arm": digest(spec.arm.model_dump())}
    return {key: value for key, value in found.items() if key not in unused}


def _say_cost(
    told: Progress, named: Mapping[str, ArmSettings], plan: Plan, transfers: Sequence[_Transfer], samples: int
) -> None:
    cost = plan.answers(len(named), samples) + 3 * samples * sum(len(one.items) for one in transfers)
    told.say(
        f"{len(named)} settings on {len(plan.dev)} dev items in {len(plan.rungs)} rung(s), the chosen one on {len(plan.test)} test items"
        f"{f' and on {len(transfers)} other task(s)' if transfers else ''}: {cost:,} answers"
    )
    for one in transfers:
        if one.seen:
            told.say(f"{one.data}: {one.seen} of its questions are left out, because the tuned task has them too")
    if len(named) > _SENSE * len(plan.dev):
        told.say(
            f"warning: {len(named)} settings on {len(plan.dev)} dev items: so many cannot be told apart by so few, the best will be the luckiest, "
            f"and {cost:,} answers are drawn for it; try fewer settings, or take more items"
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
    fields = {"data": data, "question_field": None, "answer_field": None, "only": []}
    assert spec.accuracy is not None
    fields |= {"accuracy": spec.accuracy.model_copy(update={"cluster_field": None, "rules": None})}
    by_default = {CALCULATOR, StudySpec.model_fields["system"].default}
    if spec.system in by_default:
        fields |= {"system": CALCULATOR if data.startswith("arithmetic") else StudySpec.model_fields["system"].default}
    return spec.model_copy(update=fields)


@dataclass
class _Tuning:
    spec: StudySpec
    folder: ResultFolder
    named: Mapping[str, ArmSettings]
    plan: Plan
    transfers: Sequence[_Transfer]
    told: Progress
    trust: bool
    computed: int = 0
    units: int = 0

    def finish(self, about: dict[str, Any]) -> Outcome:
        assert self.spec.accuracy is not None
        began = time.monotonic()
        names, seed, accuracy = list(self.named), self.spec.seed, self.spec.accuracy
        choice = choose(names, self.plan.rungs, self._draw)
        chosen = {choice.condition: self.named[choice.condition]}
        self.told.say(f"chosen on the dev items: {choice.condition} ({arm_words(chosen[choice.condition])})")
        answers = self._run("test", _inner(self.spec, chosen, "ARM tuned: the test items", only=list(self.plan.test)))
        rows = [row | {"split": "test"} for row in report(answers, choice.condition, accuracy, seed=seed)]
        for one in self.transfers:
            title = f"ARM tuned on {self.spec.data}: {one.data}"
            new = one.items if one.seen else []
            other = _inner(_on_other_data(self.spec, one.data), chosen, title, only=new)
            rows += report(self._run(one.folder, other), choice.condition, accuracy, seed=seed)
        self._correct_transfers(rows)
        self.folder.write_table("tuning", self._table(choice, accuracy))
        self.folder.write_table("tuned", pa.Table.from_pylist(rows, schema=ACCURACY))
        inner = ResultFolder(self.folder.path / "test").manifest() or {}
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
        about |= {"units": self.units, "trust_remote_code": self.trust}
        timings = {"total_s": round(time.monotonic() - began, 2), "units_computed": self.computed}
        # Last, because it says that everything else is there.
        self.folder.write_manifest(about | {"complete": True, "timings": timings})
        return Outcome(self.folder.path, self.computed, self.units)

    def _draw(self, rung: int, items: Sequence[str], left: Sequence[str]) -> pa.Table:
        arms = {name: self.named[name] for name in left}
        title = f"ARM tuned: dev items, rung {rung}"
        return self._run(f"dev-{rung}", _inner(self.spec, arms, title, only=list(items), again=False))

    def _run(self, name: str, inner: StudySpec) -> pa.Table:
        self.told.say(f"{name}: {', '.join(inner.conditions)} on {len(inner.load_items()[1])} items")
        outcome = run_study(inner, self.folder.path / name, self.told, trust_remote_code=self.trust)
        self.computed += outcome.computed
        self.units += outcome.units
        return ResultFolder(outcome.folder).read_table("answers")

    def _correct_transfers(self, rows: Sequence[dict[str, Any]]) -> None:
        """Several other tasks are several looks at the same question: Holm over them. The test items are one look, for which none is needed."""
        others = [row for row in rows if row["split"] == "all" and row["metric"] == "pass@1" and row["verdict"]]
        known = [row for row in others if row["p_adjusted"] is not None]
        for row, p in zip(known, stats.holm(np.array([row["p_adjusted"] for row in known], np.float64)), strict=True):
            row |= {"p_adjusted": float(p), "verdict": verdict_of(row, float(p))}

    def _table(self, choice: Choice, accuracy: AccuracyTable) -> pa.Table:
        rows = [
            {
                key: value
                for key, value in {**row, **asdict(self.named[row["condition"]])}.items()
                if key in TUNING.names
            }
            for row in tried_rows(choice, accuracy, seed=self.spec.seed)
        ]
        return pa.Table.from_pylist(rows, schema=TUNING)


# ---- on noise --------------------------------------------------------------------------------------------------------


def tune_on_noise(path: Path | str, *, seeds: Sequence[int] = range(100)) -> Noise:
    """How often choosing among a folder's settings would claim an effect if there were none: `choosing.on_noise` on its dev answers."""
    folder = ResultFolder(Path(path))
    about = folder.manifest()
    if about is None or about.get("measures") != "tune":
        raise BadFolder(f"{path} holds no tuning of ARM's parameters; mless tune --method grid --out DIR makes one")
    if not about.get("complete"):
        raise BadFolder(f"{path}: its tuning is not finished; run the same command again to complete it")
    rungs: list[int] = about["tuning"]["rungs"]
    if len(rungs) > 1:
        raise BadFolder(
            f"{path} was tuned by halving, so of its settings only those that were kept have answers to all dev items (rungs of "
            f"{', '.join(map(str, rungs))}), and noise needs every setting's; tune with --method grid"
        )
    answers = with_control(ResultFolder(folder.path / "dev-1").read_table("answers"))
    tune = TuneTable.model_validate(about["study"]["tune"]).model_copy(update={"method": "grid"})
    accuracy = AccuracyTable.model_validate(about["study"]["accuracy"])
    names = [name for name in about["conditions"] if name != "none"]
    # By the study's own seed all of these are dev items, which is why they were answered.
    return on_noise(answers, names, tune, accuracy, seeds=seeds, seed=about["study"]["seed"] + 1)


# ---- in words --------------------------------------------------------------------------------------------------------


def tuning_lines(path: Path) -> list[str]:
    """How many settings were tried, the choice on dev, what the test items and the other tasks say of it, and how far settings matter."""
    folder = ResultFolder(path)
    rows: list[dict[str, Any]] = folder.read_table("tuning").to_pylist()
    about = folder.manifest() or {}
    told: dict[str, Any] = about["tuning"]
    name, tried = told["chosen"], told["tried"]
    last = next(row for row in reversed(rows) if row["condition"] == name)
    sizes = ", ".join(str(row) for row in dict.fromkeys(row["n"] for row in rows))
    how = f"by successive halving ({sizes})" if len(told["rungs"]) > 1 else "as a grid"
    lines = [
        f"{about['model']['label']}, {about['task']}: {tried} setting{'s' if tried > 1 else ''} of ARM tried {how} on {len(told['dev']):,} dev items; the "
        f"{len(told['test']):,} test items were answered for the chosen one only"
    ]
    arm = arm_words(arm_of(about["conditions"][name]["arm"]))
    beats = "" if last["delta"] > 0 else "; no setting was better than none"
    lines.append(
        f"Chosen on dev: {name} ({arm}): {100 * last['value']:.1f} % against {100 * last['none']:.1f} %, {change_words(last)}, after Holm over the "
        f"{tried} tried {_p(last['p_adjusted'])}{beats}. It was chosen for this number, so the number is no result"
    )
    lines += [f"Test: {line}" for line in accuracy_lines(path / "test")[1:]]
    lines.append("Test: one setting was compared, so its p needs no correction for the settings tried on dev")
    for data, inner in told["transfer"].items():
        said = [line for line in accuracy_lines(path / inner)[1:] if line.startswith((f"{name} (", "A/A"))]
        lines += [f"Transfer to {data}: {line}" for line in said]
    if len(told["transfer"]) > 1:
        lines.append(_over_transfers(folder, name))
    lines.append(_sensitivity(rows, tried))
    return lines


def _over_transfers(folder: ResultFolder, name: str) -> str:
    rows = [
        row for row in folder.read_table("tuned").to_pylist() if row["split"] == "all" and row["metric"] == "pass@1"
    ]
    said = [f"{row['task']} {_p(row['p_adjusted'])}, {row['verdict']}" for row in rows if row["condition"] == name]
    return f"Transfer, after Holm over the {len(said)} other tasks: {'; '.join(said)}"


def _sensitivity(rows: Sequence[Mapping[str, Any]], tried: int) -> str:
    """Over the rung that all settings were in."""
    first = [row for row in rows if row["rung"] == 1]
    low, high = (points_words(end(row["delta"] for row in first)) for end in (min, max))
    sure = [row["condition"] for row in first if row["p_adjusted"] is not None and row["p_adjusted"] <= ALPHA]
    found = (
        f"{', '.join(sure)} differ{'s' if len(sure) == 1 else ''} from none" if sure else "no setting differs from none"
    )
    return f"Sensitivity, {first[0]['n']} dev items, all {tried} settings: Δ from {low} to {high} points; after Holm {found}"


def _p(value: float | None) -> str:
    return "p unknown" if value is None else "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
