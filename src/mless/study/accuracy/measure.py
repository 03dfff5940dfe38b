"""An accuracy study: answers are stored as they come, judged all together, and the conditions compared."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from mless import tasks
from mless.engines import ENGINES, Opening
from mless.engines.base import OutOfMemory, Reply, closed
from mless.errors import BadFolder, BadStudy
from mless.results.folder import ResultFolder
from mless.results.schemas import REPLIES
from mless.results.units import Expected, in_order
from mless.study.accuracy import asking
from mless.study.accuracy.judging import JUDGING, judged, write_judged
from mless.study.accuracy.tables import accuracy_table
from mless.study.accuracy.words import FIRST_PRIMARY, accuracy_lines, change_words
from mless.study.bench import Bench, Group, Measurement, Progress, StartAgain, Unit
from mless.study.changing import prove_changes
from mless.study.identity import ANALYSIS, FETCHING, OF_ATTENTION, digest
from mless.study.spec import AccuracyTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition, Item

if TYPE_CHECKING:
    from mless.engines.base import Engine

#: Settings that a stored engine tells (`check_stored`).
_OF_THE_ENGINE = ("slots", "tensor_parallel")


class AccuracyMeasurement(Measurement):
    """A unit is an item's answers under one condition. Judgements are not part of it: they can be made again at any time."""

    doing = "answers"
    finishing = "judging the answers and comparing the conditions"
    unit_tables = ("replies",)
    tables = ("answers", "accuracy")
    sources = ("answers",)
    pairs_tokens = False
    runs_model = False
    reads_head = True
    apart = True
    takes_cuts = True
    takes_patches = True
    attaches_changes = True
    reads_answers = True
    judged_by = ()  # no fields of the study's own, but of [accuracy]: see `analysis`

    def __init__(self, spec: StudySpec) -> None:
        super().__init__(spec)
        self.settings = spec.accuracy or AccuracyTable()
        self._kind = ENGINES.get(self.settings.engine)
        self._slots = self.settings.slots
        self._requests: asking.Requests = {}
        self._engine: Engine | None = None
        #: What the engine says of itself.
        self._engine_about: dict[str, Any] = {}
        #: The primary condition that was named when the first answer was drawn.
        self._first_primary = spec.primary

    # ---- before anything is loaded

    def check(self, conditions: Sequence[Condition], items: Sequence[Item]) -> None:
        asking.check_conditions(conditions, self.settings)
        asking.check_answers(items, self.spec)
        asking.check_amount(conditions, items, self.settings)
        if self.settings.dev_share:
            asking.check_split(items, self.settings, self.spec.seed)

    def check_code(self, *, allowed: bool) -> None:
        if not self.settings.runs_code:
            return
        if not allowed:
            raise BadStudy(
                f"the grader {self.settings.grader!r} runs the code that the model writes, which must be allowed: --run-code (it runs in a sandbox "
                "without network and without your files)"
            )
        cast("Any", tasks.GRADERS.get(self.settings.grader)).require()

    def needs_weights(self) -> bool:
        return self._kind.needs_weights

    def layers(self, subject: Subject) -> list[int]:
        return list(range(1, (subject.layers or 0) + 1))

    def identity(self, found: dict[str, str], items: Sequence[Item]) -> dict[str, str]:
        settings = self.settings
        drawn = {
            key: value
            for key, value in settings.model_dump().items()
            if key not in (*ANALYSIS, *FETCHING, *_OF_THE_ENGINE)
        }
        if settings.script:
            file = Path(settings.script)
            drawn["script"] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        found = found | {f"accuracy.{key}": digest(value) for key, value in drawn.items()}
        return {key: value for key, value in found.items() if key not in OF_ATTENTION}

    def analysis(self, items: Sequence[Item]) -> str:
        by = self.settings.known_before({key: getattr(self.settings, key) for key in ANALYSIS})
        return digest([by, [item.cluster for item in items], JUDGING, self.spec.primary])

    def stored_analysis(self, about: Mapping[str, Any]) -> str:
        return about.get("analysis", "")

    def check_stored(self, folder: ResultFolder, about: Mapping[str, Any]) -> None:
        """Go on with the stored number of slots, whether asked for or reduced to fit memory. Refuse any other number, and another division."""
        divided: int = (about.get("engine") or {}).get("tensor_parallel", 1)
        if divided != (self.settings.tensor_parallel or 1):
            raise BadFolder(
                f"{folder.path} holds answers drawn with tensor parallel {divided}, but {self.settings.tensor_parallel or 1} is asked for, and results "
                f"depend on it; use --set accuracy.tensor_parallel={divided} to go on, or choose another --out"
            )
        used: int | None = about["engine"].get("slots") if about.get("engine") else None
        began_with: int | None = about["study"]["accuracy"]["slots"]
        if used is not None and self.settings.slots not in (None, used, began_with):
            raise BadFolder(
                f"{folder.path} holds answers drawn with {used} slots, but {self.settings.slots} are asked for, and results depend on their number; "
                "leave accuracy.slots out to go on, or choose another --out"
            )

    # ---- with the model

    def load(self, subject: Subject, layers: Sequence[int], progress: Progress) -> None:
        if self._kind.needs_loaded:
            subject.load(progress, head=True, dtype=_answering_dtype(self.spec))
        else:
            subject.load_tokenizer()
        if subject.tokenizer is None and self.spec.prompt == "raw" and self._kind.reads_prompts:
            raise BadStudy(
                "raw prompts are token ids, and a server is sent a conversation unless a tokenizer is given: --tokenizer DIR, or --prompt chat"
            )

    def prepare(self, bench: Bench) -> None:
        assert bench.subject is not None
        for rows in (bench.prompts or {}).values():
            asking.check_room(rows, self.settings, bench.subject.context, bench.subject.label)
        self._requests = asking.write_requests(bench, self.settings)

    def identity_loaded(self, bench: Bench) -> dict[str, str]:
        return {"prompts as rendered": asking.digest_of(self._requests)}

    def start(self, bench: Bench, stored: Mapping[str, Any] | None, *, resumed: bool) -> dict[str, str]:
        if stored is not None:
            if resumed:
                self._first_primary = stored.get(FIRST_PRIMARY)  # folders made before there was a primary had none
            # Results depend on the number of slots, so a resumed run keeps it.
            self._slots = (stored.get("engine") or {}).get("slots") or self._slots
        try:
            return self._start_engine(bench)
        except OutOfMemory as fault:
            self._slots = self._halved(fault, bench.progress)
            raise StartAgain from fault

    def to_start_with(self) -> dict[str, Any]:
        return {"engine": {"slots": self._slots}}

    def _start_engine(self, bench: Bench) -> dict[str, str]:
        """Open the engine and check what it promises. The result is part of the study's identity."""
        if self._kind.needs_loaded:
            # Before the engine takes the memory. It then proves that its slots give the same.
            self.proofs = prove_changes(bench.model, bench.conditions, bench.prompts or {})
        engine = self._engine = self._open(bench).__enter__()
        self._engine_about = engine.about()
        if (refuse := getattr(engine, "check_requests", None)) is not None:
            refuse([request for rows in self._requests.values() for request in rows])
        check = getattr(engine, "self_check", None)
        if check is not None:
            rows = [request for some in self._requests.values() for request in some if request.sample == 0]
            about = self._engine_about
            about["self_check"] = check(rows)
            bench.progress.say(
                f"row-stable: {about['self_check']['logits']} ({about['slots']} slots, {about['dtype']}, {about['device']})"
            )
        kept = ("slots", "length", "dtype", "device", "device_name", "mode", "attention", "torch", "transformers")
        return {f"{key} in use": str(self._engine_about[key]) for key in kept if key in self._engine_about}

    def _open(self, bench: Bench) -> Engine:
        settings, spec, subject = self.settings, bench.spec, bench.subject
        assert subject is not None
        again = {condition.name for condition in bench.conditions if condition.again}
        given = Opening(
            model=spec.model,
            settings=settings,
            longest=max((len(request.token_ids) for rows in self._requests.values() for request in rows), default=0),
            # Counted over the whole study, not over what is missing: results depend on the number of slots.
            most=sum(len(rows) for (name, _), rows in self._requests.items() if name not in again),
            conditions=tuple(bench.conditions),
            described=subject.described,
            loaded=subject.loaded,
            tokenizer=subject.tokenizer,
            tokenizer_name=spec.tokenizer,
            dtype=spec.dtype,
            seed=spec.seed,
            server_named=spec.names_server,
            slots=self._slots,
            say=bench.progress.say,
        )
        return self._kind.open(given)

    def resume(self, bench: Bench, stored: Mapping[str, Any]) -> None:
        super().resume(bench, stored)
        self._engine_about = dict(stored["engine"])
        self._first_primary = stored.get(FIRST_PRIMARY)

    def changed(self, stored: Mapping[str, Any]) -> bool:
        return stored.get(FIRST_PRIMARY) != self._first_primary

    def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self._engine_about |= closed(engine)

    # ---- answers

    def groups(self, bench: Bench, missing: Sequence[Unit]) -> Iterator[Group]:
        """Answers of one temperature together. The A/A control runs separately, in another order and with other neighbours."""
        found: dict[float | None, list[Unit]] = defaultdict(list)
        again: list[Unit] = []
        for unit in missing:
            (again if unit.condition.again else found[unit.condition.temperature]).append(unit)
        yield from (Group(units) for units in found.values())
        if again:
            order = list(dict.fromkeys(bench.items[unit.number].id for unit in again))
            Random(f"{bench.spec.seed}/again").shuffle(order)
            places = {item: place for place, item in enumerate(order)}
            again.sort(key=lambda unit: places[bench.items[unit.number].id])
            width: int = (
                self._engine_about.get("slots") or self._engine_about.get("max_num_seqs") or self.settings.concurrency
            )
            yield Group(again, max(1, width * 3 // 4))

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Mapping[str, pa.Table]]]:
        assert self._engine is not None
        units = {(unit.condition.name, bench.items[unit.number].id): unit for unit in group.units}
        requests = [request for unit in group.units for request in self._requests[unit.condition.name, unit.number]]
        seeds = {request.key: request.seed for request in requests}
        waiting: dict[tuple[str, str], dict[int, Reply]] = defaultdict(dict)
        decoding = self.settings.decoding(group.units[0].condition.temperature)
        try:
            for reply in self._engine.generate(requests, decoding, live=group.width):
                at = reply.condition, reply.item
                waiting[at][reply.sample] = reply
                if len(waiting[at]) == asking.samples_of(self.settings, units[at].condition):
                    got = waiting.pop(at)
                    rows = [_row(got[n], seeds[got[n].key], bench.names) for n in sorted(got)]
                    yield units[at], {"replies": pa.Table.from_pylist(rows, schema=REPLIES)}
        except OutOfMemory as fault:
            self._slots = self._halved(fault, bench.progress)
            raise StartAgain from fault

    def _halved(self, fault: OutOfMemory, progress: Progress) -> int:
        before = fault.slots
        fewer = before // 2
        if self.settings.mode == "batch-invariant":
            from mless.engines.blocks import BLOCK

            fewer -= fewer % BLOCK
        if fewer < 1:
            raise fault
        progress.say(
            f"out of memory with {before} slots: going on with {fewer}; results depend on the number of slots, so answers drawn with "
            f"{before} are drawn again"
        )
        return fewer

    def expected(self, bench: Bench, unit: Unit, table: str, found: pa.Table) -> Expected:
        samples = asking.samples_of(self.settings, unit.condition)
        return Expected(bench.texts_of(unit), in_order(("sample",), range(samples)))

    def has_rows(self, folder: ResultFolder, unit: Unit) -> bool:
        return super().has_rows(folder, unit) or folder.has_tables(self.sources)

    def rows_of(self, folder: ResultFolder, unit: Unit, units: Sequence[Unit], item: str) -> Mapping[str, pa.Table]:
        if folder.has_unit(self.unit_tables, unit.key):
            return super().rows_of(folder, unit, units, item)
        where = [("condition", "==", unit.condition.name), ("item", "==", item)]
        return {"replies": folder.read_table("answers", columns=REPLIES.names, filters=where)}

    # ---- what is made of them

    def finish(self, bench: Bench) -> None:
        self._judge(bench, pa.concat_tables([bench.folder.read_unit("replies", unit.key) for unit in bench.units()]))

    def judge_again(self, bench: Bench) -> None:
        self._judge(bench, bench.folder.read_table("answers", columns=REPLIES.names))

    def _judge(self, bench: Bench, replies: pa.Table) -> None:
        write_judged(bench, replies, self.settings)

    @property
    def implementations(self) -> dict[str, str | list[str]]:
        return {"engine": self._engine_about.get("engine", ""), **self.judges}

    @property
    def judges(self) -> dict[str, str]:
        return {"grading": self.settings.grader}

    def about(self, bench: Bench) -> dict[str, Any]:
        engine = self._engine_about
        return {
            "questions": {item.id: item.question for item in bench.items},
            FIRST_PRIMARY: self._first_primary,
            "engine": dict(engine),
            **({"proofs": self.proofs} if self.proofs else {}),
            "device": {"kind": engine.get("device"), "dtype": engine.get("dtype")} | engine.get("computing", {}),
        }

    # ---- for measurements that are made of answers

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return accuracy_lines(path)

    @classmethod
    def judge(
        cls,
        replies: pa.Table,
        items: Sequence[Item],
        task: str,
        settings: AccuracyTable,
        progress: Progress | None = None,
    ) -> pa.Table:
        """Stored replies judged by the rules and the grader of `settings`: answers.parquet's rows, in the same order."""
        return judged(replies, items, task, settings, progress)

    @classmethod
    def compare(
        cls, answers: pa.Table, conditions: Mapping[str, Condition], settings: AccuracyTable, *, seed: int
    ) -> pa.Table:
        """Judged answers → accuracy.parquet's rows."""
        return accuracy_table(answers, conditions, settings, seed=seed)

    @classmethod
    def change_words(cls, row: Mapping[str, Any]) -> str:
        """``Δ +3.3 points [−1.0, +7.6], p = 0.12``, without a verdict."""
        return change_words(row)


def _row(reply: Reply, seed: int, names: Mapping[str, str]) -> dict[str, Any]:
    kept = ("condition", "item", "sample", "text", "n_tokens", "finish")
    # An engine that cannot count tokens gives a negative number, which must not enter a mean.
    tokens = reply.n_tokens if reply.n_tokens >= 0 else None
    return {**names} | {key: getattr(reply, key) for key in kept} | {"seed": seed, "n_tokens": tokens}


def _answering_dtype(spec: StudySpec) -> str:
    """bfloat16 where it is faster: on a GPU, and on a CPU with matrix units for it."""
    import torch

    from mless.models import processor

    on_cpu = spec.device == "cpu" or (spec.device == "auto" and not torch.cuda.is_available())
    return processor.for_answers() if spec.dtype == "auto" and on_cpu else spec.dtype
