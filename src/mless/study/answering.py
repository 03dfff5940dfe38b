"""An accuracy study from its spec to its tables. Answers are stored as they finish; what is stored is never drawn again."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mless import __version__, stats, tasks
from mless.engines.base import OutOfMemory, Reply, Request
from mless.errors import BadData, BadFolder, BadStudy
from mless.prompting import build_messages, build_prompts, resolve_kind, shared_beginning, with_filler_ids
from mless.store import FORMAT, ResultFolder
from mless.study import tables
from mless.study.accuracy import FIRST_PRIMARY
from mless.study.identity import (
    ANALYSIS,
    FETCHING,
    check_same,
    default_folder,
    digest,
    identity_of,
    rerun_command,
    slug,
    versions,
)
from mless.study.judging import JUDGING, REPLIES, write_judged
from mless.study.running import Outcome, Progress, check_arm, check_prompt
from mless.study.spec import AccuracyTable, StudySpec
from mless.values import Condition, Item, Prompt

if TYPE_CHECKING:
    from mless.engines.base import Engine
    from mless.models.loading import Description

TABLES = ("answers", "accuracy")
UNIT_FORMAT = 1
#: A beginning shorter than this is not worth a forward of its own.
_WORTH_SHARING = 16


@dataclass(frozen=True)
class _Asked:
    """Everything there is to ask, of which some may be answered already."""

    task: str
    items: list[Item]
    conditions: list[Condition]
    prompts: dict[str, list[Prompt]] | None
    requests: dict[str, list[Request]]
    kind: str

    @property
    def longest(self) -> int:
        return max((len(r.token_ids) for rows in self.requests.values() for r in rows), default=0)


def run_accuracy(spec: StudySpec, out: Path | None, told: Progress, *, trust_remote_code: bool = False) -> Outcome:
    """Draw what is missing of the study's answers into `out`, judge all of them, and compare the conditions."""
    settings = spec.accuracy
    assert settings is not None
    conditions = spec.conditions_in_order()
    _check_conditions(conditions, settings)
    task, items = spec.load_items()
    _check_answers(items, spec)
    if settings.dev_share:
        _check_split(items, settings, spec.seed)
    opened = _Model.open(spec, settings, told, trust_remote_code=trust_remote_code)
    if opened.layers is not None:
        check_arm(conditions, opened.layers)
    identity = opened.identity(spec, settings, items)
    folder = ResultFolder(out if out is not None else default_folder(spec, opened.label))
    stored = folder.manifest()
    analysis = digest(
        [{key: getattr(settings, key) for key in ANALYSIS}, [item.cluster for item in items], JUDGING, spec.primary]
    )
    if stored is not None:
        check_same(folder, stored, identity)
        _check_slots(folder, stored, settings)
        # An older folder's prompts may be written otherwise; they are compared below, once a tokenizer is loaded.
        current = stored["format"] == FORMAT
        if stored.get("complete") and current and all((folder.path / f"{table}.parquet").exists() for table in TABLES):
            same = stored.get("analysis") == analysis
            if not same:
                about = stored | {"study": spec.model_dump(), "analysis": analysis}
                about |= {"command": rerun_command(spec, folder.path, trust_remote_code)}
                _judge_again(folder, about, items, conditions, settings, told, spec.primary)
            return Outcome(folder.path, 0, stored["units"], fresh=not same)
    elif folder.holds_something_else():
        raise BadFolder(f"{folder.path} is not empty and holds no study.json; choose another --out")
    began = time.monotonic()
    opened.load(told)
    asked = _ask(spec, settings, opened, task, items, conditions)
    told.say(f"prompts: {asked.kind}; system text: {spec.system!r}")
    identity |= {
        "prompts as rendered": digest([_rendered(request) for rows in asked.requests.values() for request in rows])
    }
    identity |= {"unit format": str(UNIT_FORMAT)}
    run = _Run(spec, settings, folder, opened, asked, identity, analysis, told, trust_remote_code, spec.primary)
    return run.finish(began)


def _check_conditions(conditions: Sequence[Condition], settings: AccuracyTable) -> None:
    """What could not be compared is told before anything is drawn, not after it."""
    controls = [condition for condition in conditions if condition.again]
    if len(controls) > 1:
        raise BadStudy(
            f"one A/A control expected, got {', '.join(one.name for one in controls)}; leave out all but one, none-again with "
            "--set accuracy.again=false"
        )
    for condition in controls:
        if condition.samples is not None:
            raise BadStudy(
                f"condition {condition.name!r} is none once more (again = true), so it cannot vote; take away its samples = {condition.samples}"
            )
    for condition in conditions:
        if condition.arm is not None and settings.engine == "openai":
            raise BadStudy(
                f"condition {condition.name!r} changes the model's activations (ARM), which a server does not let us reach: it needs the weights; use "
                "--engine hf or vllm, or leave the condition out"
            )
        if condition.arm is not None and condition.arm.scope != "token" and settings.engine in ("hf", "vllm"):
            raise BadStudy(
                f"condition {condition.name!r}: ARM with scope {condition.arm.scope!r} pools the tokens of a call, so answers would depend on neighbours; "
                "use scope token here, or mless.arm around a generate of your own"
            )
        samples = _samples(settings, condition)
        if samples > 1 and settings.decoding(condition.temperature).greedy:
            raise BadStudy(
                f"condition {condition.name!r}: {samples} samples at temperature 0 are all the same answer; give it a temperature above 0, as "
                f"--set condition.{condition.name}.temperature=0.7"
            )


def _check_split(items: Sequence[Item], settings: AccuracyTable, seed: int) -> None:
    """So few items that one side of the split is empty are told before anything is drawn."""
    try:
        stats.split_items([item.cluster or item.id for item in items], settings.dev_share, seed)
    except BadStudy as fault:
        raise BadStudy(f"{fault}, or do without the split: --set accuracy.dev_share=0") from None


def _check_slots(folder: ResultFolder, stored: Mapping[str, Any], settings: AccuracyTable) -> None:
    """A run goes on with the slots it has, be they those it asked for or what memory left of them; others were asked for in vain."""
    used: int | None = stored["engine"].get("slots")
    began_with: int | None = stored["study"]["accuracy"]["slots"]
    if used is not None and settings.slots not in (None, used, began_with):
        raise BadFolder(
            f"{folder.path} holds answers drawn with {used} slots, but {settings.slots} are asked for, and their number is part of the "
            "numbers; leave accuracy.slots out to go on, or choose another --out"
        )


def _check_answers(items: Sequence[Item], spec: StudySpec) -> None:
    missing = [item.id for item in items if item.answer is None or not item.answer.strip()]
    if len(missing) == len(items):
        raise BadData(
            f"{spec.data!r} has no answers to judge by; say which field holds them: --answer-field NAME, or use a task with answers, as arithmetic"
        )
    if missing:
        raise BadData(
            f"{spec.data!r}: {len(missing)} of {len(items)} items have no answer (first: {missing[0]!r}); fill them in, or remove those items"
        )


def _rendered(request: Request) -> list[Any]:
    drawn = [request.key, request.seed, request.token_ids, request.messages, request.position_ids, request.hidden]
    return drawn if request.arm is None else [*drawn, asdict(request.arm)]


# ---- what is asked ---------------------------------------------------------------------------------------------------


def _ask(
    spec: StudySpec,
    settings: AccuracyTable,
    opened: _Model,
    task: str,
    items: list[Item],
    conditions: list[Condition],
) -> _Asked:
    sentences = tasks.filler_sentences()
    requests: dict[str, list[Request]] = {}
    if opened.tokenizer is None:
        if spec.prompt == "raw" and settings.engine == "openai":
            raise BadStudy(
                "raw prompts are token ids, and a server is sent a conversation unless a tokenizer is given: --tokenizer DIR, or --prompt chat"
            )
        for condition in conditions:
            conversations = build_messages(items, condition, system=spec.system, seed=spec.seed, sentences=sentences)
            rows: list[Request] = []
            for item, messages in zip(items, conversations, strict=True):
                for sample in range(_samples(settings, condition)):
                    seed = _seed(spec, condition, item.id, sample)
                    rows.append(Request(condition.name, item.id, sample, seed, messages=messages, arm=condition.arm))
            requests[condition.name] = rows
        return _Asked(task, items, conditions, None, requests, "text")
    kind = resolve_kind(spec.prompt, opened.tokenizer, opened.label)
    prompts: dict[str, list[Prompt]] = {}
    for condition in conditions:
        built = build_prompts(
            opened.tokenizer, items, condition, kind=kind, system=spec.system, seed=spec.seed, sentences=sentences
        )
        prompts[condition.name] = list(built)
        opened.check(prompts[condition.name], settings)
        rows = []
        for prompt in prompts[condition.name]:
            shared = shared_beginning(prompt, condition)
            for sample in range(_samples(settings, condition)):
                rows.append(
                    Request(
                        condition.name,
                        prompt.item,
                        sample,
                        _seed(spec, condition, prompt.item, sample),
                        token_ids=prompt.token_ids,
                        shared=shared if shared >= _WORTH_SHARING and condition.arm is None else 0,
                        arm=condition.arm,
                        position_ids=prompt.position_ids,
                        hidden=_hidden(prompt),
                    )
                )
        requests[condition.name] = rows
    return _Asked(task, items, with_filler_ids(opened.tokenizer, conditions), prompts, requests, kind)


def _samples(settings: AccuracyTable, condition: Condition) -> int:
    return condition.samples or settings.samples


def _seed(spec: StudySpec, condition: Condition, item: str, sample: int) -> int:
    """A function of study seed, item and sample: conditions share their luck, but the A/A control has luck of its own."""
    text = f"{spec.seed}/{'again' if condition.again else 'first'}/{item}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _hidden(prompt: Prompt) -> tuple[int, int] | None:
    filler = [span for span in prompt.spans if span.name == "filler"]
    return (filler[0].start, filler[0].stop) if prompt.hidden and filler else None


# ---- the model and its engine ----------------------------------------------------------------------------------------


class _Model:
    """What answers: a model of ours, a vLLM, a server, or a script. It is described at once and loaded only when needed."""

    def __init__(self, spec: StudySpec, settings: AccuracyTable, described: Description | None, trust: bool) -> None:
        self._spec, self._settings, self._described, self._trust = spec, settings, described, trust
        self.tokenizer: Any = None
        self._loaded: Any = None
        self.label = described.source.label if described is not None else slug(spec.model)
        self.family = described.family if described is not None else None
        self.context = described.context if described is not None else None
        self.layers = described.layers if described is not None else None

    @classmethod
    def open(cls, spec: StudySpec, settings: AccuracyTable, told: Progress, *, trust_remote_code: bool) -> _Model:
        described = None
        if settings.engine in ("hf", "vllm"):
            from mless.models import describe

            described = describe(spec.model, trust_remote_code=trust_remote_code, say=told.say, step=told.step)
        return cls(spec, settings, described, trust_remote_code)

    def identity(self, spec: StudySpec, settings: AccuracyTable, items: Sequence[Item]) -> dict[str, str]:
        """As far as it is known before anything is loaded."""
        from mless.models.loading import fingerprint

        drawn = {key: value for key, value in settings.model_dump().items() if key not in (*ANALYSIS, *FETCHING)}
        weights = (
            fingerprint(self._described.source, self._described.layers, head=True) if self._described else spec.model
        )
        unused = ("layers", "heads", "batch_size", "margins", "flips")  # of attention
        found = identity_of(spec, self._described, weights, items)
        if settings.script:
            file = Path(settings.script)
            drawn["script"] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        found |= {f"accuracy.{key}": digest(value) for key, value in drawn.items() if key != "slots"}
        return {key: value for key, value in found.items() if key not in unused}

    def load(self, told: Progress) -> None:
        spec = self._spec
        if self._settings.engine == "hf":
            from mless.models import load

            assert self._described is not None
            told.say(f"loading {self.label}, with its language-model head")
            self._loaded = load(
                self._described,
                tokenizer=spec.tokenizer,
                dtype=_answering_dtype(spec),
                device=spec.device,
                head=True,
                trust_remote_code=self._trust,
                say=told.say,
                step=told.step,
            )
            self.tokenizer = self._loaded.tokenizer
        elif self._settings.engine == "vllm":
            from mless.models.loading import load_tokenizer

            assert self._described is not None
            self.tokenizer = load_tokenizer(
                self._described.source, spec.tokenizer, self._described.config, trust_remote_code=self._trust
            )
        elif spec.tokenizer is not None:
            from mless.models.loading import open_tokenizer

            self.tokenizer = open_tokenizer(spec.tokenizer, trust_remote_code=self._trust)

    def check(self, prompts: Sequence[Prompt], settings: AccuracyTable) -> None:
        """None too long for the model with its answer, none without the BOS that the model needs."""
        for prompt in prompts:
            if self._loaded is not None:
                check_prompt(self._loaded, prompt)
            # Shifted positions reach further than there are tokens.
            reach = prompt.position_ids[-1] + 1 if prompt.position_ids is not None else len(prompt)
            room = None if self.context is None else self.context - reach
            if room is not None and settings.max_new_tokens > room:
                way = (
                    f"use --max-new-tokens {room} or fewer, or leave that item out"
                    if room > 0
                    else "leave that item out"
                )
                raise BadStudy(
                    f"item {prompt.item!r} is {reach} tokens under {prompt.condition!r} and may be answered with {settings.max_new_tokens}, but "
                    f"{self.label} takes {self.context} in all; {way}"
                )

    def engine(self, asked: _Asked, slots: int | None, say: Callable[[str], None]) -> Engine:
        settings, spec = self._settings, self._spec
        if settings.engine == "hf":
            from mless.engines.hf import HfEngine

            length = asked.longest + settings.max_new_tokens
            again = {condition.name for condition in asked.conditions if condition.again}
            # Of the whole study, not of what is left of it: their number is part of the numbers.
            most = sum(len(rows) for name, rows in asked.requests.items() if name not in again)
            return HfEngine(self._loaded, length=length, slots=slots, most=most, mode=settings.mode)
        if settings.engine == "vllm":
            from mless.engines.vllm import VllmEngine
            from mless.models.loading import locate_tokenizer, whole_folder

            assert self._described is not None
            return VllmEngine(
                whole_folder(self._described.source),
                tokenizer=locate_tokenizer(spec.tokenizer) if spec.tokenizer else None,
                dtype=spec.dtype,
                max_model_len=asked.longest + settings.max_new_tokens,
                seed=spec.seed,
                batch_invariant=settings.mode == "batch-invariant",
                arm=any(condition.arm is not None for condition in asked.conditions),
                say=say,
            )
        if settings.engine == "openai":
            from mless.engines.openai import OpenAIEngine

            assert settings.base_url is not None
            return OpenAIEngine(
                settings.base_url,
                spec.model,
                tokenizer=self.tokenizer,
                concurrency=settings.concurrency,
                timeout=settings.timeout,
                retries=settings.retries,
                say=say,
            )
        from mless.engines.scripted import ScriptedEngine

        assert settings.script is not None
        return ScriptedEngine.from_file(settings.script, tokenizer=self.tokenizer)

    def about(self) -> dict[str, Any]:
        return {
            "name": self._spec.model,
            "label": self.label,
            "family": self.family,
            "context": self.context,
            "fingerprint": getattr(self._loaded, "fingerprint", None),
            "origin": self._described.source.origin if self._described is not None else None,
        }


def _answering_dtype(spec: StudySpec) -> str:
    """bfloat16 where it is faster: on a GPU, and on a CPU with matrix units for it."""
    import torch

    from mless.models import processor

    on_cpu = spec.device == "cpu" or (spec.device == "auto" and not torch.cuda.is_available())
    return processor.for_answers() if spec.dtype == "auto" and on_cpu else spec.dtype


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    spec: StudySpec
    settings: AccuracyTable
    folder: ResultFolder
    opened: _Model
    asked: _Asked
    identity: dict[str, str]
    analysis: str
    told: Progress
    trust_remote_code: bool
    #: The primary condition that was named when the first answer was drawn.
    first_primary: str | None

    def finish(self, began: float) -> Outcome:
        with self.folder.writing():
            self.folder.sweep()
            stored = self.folder.manifest()
            if stored is not None:
                check_same(self.folder, stored, self.identity)
                if any(self.folder.has_unit(("replies",), key) for key in self._keys()):
                    self.first_primary = stored.get(FIRST_PRIMARY)  # folders made before there was a primary had none
            # The number of slots is part of the numbers, so a run goes on with what it began with.
            slots: int | None = (stored or {}).get("engine", {}).get("slots") or self.settings.slots
            missing = self._missing()
            about: dict[str, Any] = {}
            computed = 0
            loaded = time.monotonic()
            while True:
                try:
                    if not missing and stored is not None:
                        about = stored["engine"]
                        self.identity = stored["identity"] | self.identity  # with what the engine had added to it
                        break
                    with self.opened.engine(self.asked, slots, self.told.say) as engine:
                        about = engine.about()
                        self._begin(stored, about, engine)
                        computed = self._draw(engine, missing)
                        about |= engine.about()  # a server shows its fingerprint with its answers
                    break
                except OutOfMemory as fault:
                    slots = self._halved(fault)
                    # Answers of two sizes must not share a table. The folder itself stays: it is held by its lock.
                    for key in self._keys():
                        self.folder.unit_path("replies", key).unlink(missing_ok=True)
                    stored, missing = None, self._missing()
            drawn = time.monotonic()
            self._judge(
                about, {"load_s": round(loaded - began, 2), "draw_s": round(drawn - loaded, 2)}, computed, drawn
            )
        return Outcome(self.folder.path, computed, len(self.asked.items) * len(self.asked.conditions))

    def _halved(self, fault: OutOfMemory) -> int:
        before = fault.slots
        fewer = before // 2
        if self.settings.mode == "batch-invariant":
            from mless.engines.hf import BLOCK

            fewer -= fewer % BLOCK
        if fewer < 1:
            raise fault
        self.told.say(
            f"out of memory with {before} slots: going on with {fewer}; the number of slots is part of the numbers, so answers drawn with "
            f"{before} are drawn again"
        )
        return fewer

    def _key(self, condition: Condition, number: int) -> str:
        return f"{slug(condition.name)}-{number + 1:05d}"

    def _keys(self) -> list[str]:
        return [self._key(condition, n) for condition in self.asked.conditions for n in range(len(self.asked.items))]

    def _missing(self) -> dict[str, list[Request]]:
        """By condition, the requests of the items that have no stored unit."""
        found: dict[str, list[Request]] = {}
        for condition in self.asked.conditions:
            absent = {
                item.id
                for number, item in enumerate(self.asked.items)
                if not self.folder.has_unit(("replies",), self._key(condition, number))
            }
            if rows := [request for request in self.asked.requests[condition.name] if request.item in absent]:
                found[condition.name] = rows
        return found

    def _begin(self, stored: dict[str, Any] | None, about: dict[str, Any], engine: Engine) -> None:
        """Prove the engine's promise, and say in the folder what it is that is being drawn."""
        kept = ("slots", "length", "dtype", "device", "device_name", "mode", "attention", "torch", "transformers")
        in_use = {key: str(about[key]) for key in kept if key in about}
        self.identity |= {f"{key} in use": value for key, value in in_use.items()}
        if stored is not None:
            check_same(self.folder, stored, self.identity)
        check = getattr(engine, "self_check", None)
        if check is not None:
            rows = [request for some in self.asked.requests.values() for request in some if request.sample == 0]
            about["self_check"] = check(rows)
            self.told.say(
                f"row-stable: {about['self_check']['logits']} ({about['slots']} slots, {about['dtype']}, {about['device']})"
            )
        self.told.checked()
        if stored is None or stored.get("complete") or stored.get(FIRST_PRIMARY) != self.first_primary:
            self.folder.write_manifest(self._manifest(about) | {"complete": False})

    def _draw(self, engine: Engine, missing: Mapping[str, list[Request]]) -> int:
        total = sum(map(len, self.asked.requests.values()))
        left = sum(map(len, missing.values()))
        done, computed = total - left, 0
        waiting: dict[tuple[str, str], dict[int, Reply]] = defaultdict(dict)
        numbers = {item.id: number for number, item in enumerate(self.asked.items)}
        by_name = {condition.name: condition for condition in self.asked.conditions}
        seeds = {request.key: request.seed for rows in missing.values() for request in rows}
        for group, live in self._groups(missing, by_name, engine):
            decoding = self.settings.decoding(by_name[group[0].condition].temperature)
            for reply in engine.generate(group, decoding, live=live):
                condition = by_name[reply.condition]
                got = waiting[reply.condition, reply.item]
                got[reply.sample] = reply
                done += 1
                if len(got) == _samples(self.settings, condition):
                    rows = [self._unit_row(got[n], seeds[got[n].key]) for n in sorted(got)]
                    table = pa.Table.from_pylist(rows, schema=REPLIES)
                    self.folder.write_unit({"replies": table}, self._key(condition, numbers[reply.item]))
                    del waiting[reply.condition, reply.item]
                    computed += 1
                self.told.step("answers", done, total)
        return computed

    def _groups(
        self, missing: Mapping[str, list[Request]], by_name: Mapping[str, Condition], engine: Engine
    ) -> list[tuple[list[Request], int | None]]:
        """What is drawn in one go: all of one temperature together; the A/A control apart, in another order and with other company."""
        found: dict[float | None, list[Request]] = defaultdict(list)
        again: list[Request] = []
        for name, rows in missing.items():
            (again if by_name[name].again else found[by_name[name].temperature]).extend(rows)
        groups: list[tuple[list[Request], int | None]] = [(rows, None) for rows in found.values()]
        if again:
            # By items: the samples of one stay together, so that its unit is stored soon.
            order = list({request.item: None for request in again})
            Random(f"{self.spec.seed}/again").shuffle(order)
            places = {item: place for place, item in enumerate(order)}
            again.sort(key=lambda request: places[request.item])
            about = engine.about()
            width: int = about.get("slots") or about.get("max_num_seqs") or self.settings.concurrency
            groups.append((again, max(1, width * 3 // 4)))
        return groups

    def _unit_row(self, reply: Reply, seed: int) -> dict[str, Any]:
        names = {"model": self.opened.label, "task": self.asked.task}
        kept = ("condition", "item", "sample", "text", "n_tokens", "finish")
        # An engine that cannot count tokens says so with a number below zero; a mean must not take it for one.
        tokens = reply.n_tokens if reply.n_tokens >= 0 else None
        return names | {key: getattr(reply, key) for key in kept} | {"seed": seed, "n_tokens": tokens}

    def _judge(self, about: dict[str, Any], timings: dict[str, Any], computed: int, drawn: float) -> None:
        self.told.say("judging the answers and comparing the conditions")
        folder, asked = self.folder, self.asked
        folder.merge("replies", self._keys())
        replies = folder.read_table("replies")
        (folder.path / "replies.parquet").unlink()  # answers.parquet will hold all of it
        if asked.prompts is not None:
            names = {"model": self.opened.label, "task": asked.task}
            folder.write_table("prompts", tables.prompts_table(asked.prompts, self.opened.tokenizer, names))
        write_judged(
            folder,
            replies,
            asked.task,
            asked.items,
            asked.conditions,
            self.settings,
            self.spec.seed,
            self.told,
            self.spec.primary,
        )
        timings |= {"judge_s": round(time.monotonic() - drawn, 2), "units_computed": computed}
        # Last, because it says that everything else is there.
        folder.write_manifest(self._manifest(about) | {"complete": True, "timings": timings})

    def _manifest(self, about: Mapping[str, Any]) -> dict[str, Any]:
        spec, asked = self.spec, self.asked
        return {
            "mless": __version__,
            "measures": "accuracy",
            "identity": self.identity,
            "analysis": self.analysis,
            "study": spec.model_dump(),
            "task": asked.task,
            "model": self.opened.about(),
            "tokenizer": {"fingerprint": self.identity["tokenizer files"], "given": spec.tokenizer},
            "prompt": asked.kind,
            "command": rerun_command(spec, self.folder.path, self.trust_remote_code),
            "conditions": {c.name: asdict(c) for c in asked.conditions},
            "items": [item.id for item in asked.items],
            "questions": {item.id: item.question for item in asked.items},
            "seeds": {"study": spec.seed},
            FIRST_PRIMARY: self.first_primary,
            "engine": dict(about),
            "device": {"kind": about.get("device"), "dtype": about.get("dtype")} | about.get("computing", {}),
            "implementations": {"engine": about.get("engine"), "grading": "math-verify, guarded"},
            "trust_remote_code": self.trust_remote_code,
            "versions": versions(),
            "units": len(asked.items) * len(asked.conditions),
        }


# ---- judging ---------------------------------------------------------------------------------------------------------


def _judge_again(
    folder: ResultFolder,
    about: dict[str, Any],
    items: Sequence[Item],
    conditions: Sequence[Condition],
    settings: AccuracyTable,
    told: Progress,
    primary: str | None,
) -> None:
    """Answers that are all there, by other rules or margins: no model is loaded and no server asked for that."""
    told.say("every answer is there: judging them and comparing the conditions anew")
    began = time.monotonic()
    with folder.writing():
        replies = folder.read_table("answers", columns=REPLIES.names)
        folder.write_manifest(about | {"complete": False})
        seed: int = about["seeds"]["study"]
        write_judged(folder, replies, about["task"], items, conditions, settings, seed, told, primary)
        timings = about["timings"] | {"judge_s": round(time.monotonic() - began, 2), "units_computed": 0}
        folder.write_manifest(about | {"complete": True, "timings": timings})
