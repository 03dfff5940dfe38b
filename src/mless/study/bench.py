"""What every measurement gets (`Bench`), what it must offer (`Measurement`), and how progress is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from mless.errors import BadFolder, BadPlugin
from mless.results.folder import ResultFolder
from mless.results.storing import Tables
from mless.study.grouping import in_batches, in_groups
from mless.study.identity import digest, unit_name
from mless.study.spec import CPU_GROUP, GPU_GROUP, StudySpec
from mless.values import Condition, Item, Prompt, Shown

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.models import LoadedModel
    from mless.results.grown import Piece
    from mless.results.units import Expected
    from mless.study.subject import Subject


@runtime_checkable
class Progress(Protocol):
    """Receives messages and progress. The command shows them; a script may ignore them."""

    def say(self, line: str) -> None: ...

    def step(self, what: str, done: int, total: int, workers: str = "") -> None:
        """So much is done. `workers`: what each of them does now, where others measure; it changes often and is worth no line of its own."""
        ...

    def checked(self) -> None:
        """The input has passed its checks; the work begins."""
        ...


class Silent:
    def say(self, line: str) -> None: ...

    def step(self, what: str, done: int, total: int, workers: str = "") -> None: ...

    def checked(self) -> None: ...


@dataclass(frozen=True)
class Outcome(Shown):
    """Where the results are, and whether this call computed any of them; `fresh` where it wrote their tables."""

    folder: Path
    computed: int
    units: int
    fresh: bool = True


@dataclass(frozen=True)
class Workers:
    """Other processes that measure: a number of them on this machine, ``auto``, or those of a Ray cluster, by its head's ``HOST:PORT``."""

    where: str
    #: Threads of each; None for this machine's processors shared out among them, and 4 on a cluster.
    threads: int | None = None
    #: Whether they may differ in device, dtype or versions, and then in the last digits of their numbers.
    mixed: bool = False
    #: Seconds after which one that has not answered is given up.
    limit: float = 3600.0
    #: GPUs of each; more than one only for a model that is spread or divided among them.
    gpus: int | None = None


@dataclass(frozen=True)
class Job:
    """A study to be run: its folder, its progress, and what only the command line may set."""

    spec: StudySpec
    out: Path | None = None
    progress: Progress = field(default_factory=Silent)
    for_figure: bool = False
    trust_remote_code: bool = False
    run_code: bool = False
    #: Who measures; None for this process.
    workers: Workers | None = None
    #: The task's name and its items, where they were read elsewhere.
    items: tuple[str, list[Item]] | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest piece that is computed and stored at once: one item (numbered from 0) under one condition."""

    condition: Condition
    number: int
    prompt: Prompt | None = None

    @property
    def key(self) -> str:
        """The unit's file name."""
        return unit_name(self.condition.name, self.number)


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are computed together; `width` is their number at once where it differs from the usual."""

    units: Sequence[Unit]
    width: int | None = None


@dataclass
class Bench:
    """A study during a run: items, conditions, prompts, the folder, and the model once it is loaded."""

    spec: StudySpec
    folder: ResultFolder
    items: list[Item]
    conditions: list[Condition]
    #: None where a server gets text, or where stored tables are judged again without prompts.
    prompts: dict[str, list[Prompt]] | None
    layers: list[int]
    heads: list[int]
    #: The first columns of every table: model and task.
    names: dict[str, str]
    progress: Progress
    subject: Subject | None = None
    #: Where the model is: known before it is loaded only if workers have loaded it.
    device: str | None = None

    @property
    def has_model(self) -> bool:
        return self.subject is not None and self.subject.loaded is not None

    @property
    def model(self) -> LoadedModel:
        if self.subject is None or self.subject.loaded is None:
            raise BadPlugin(
                "the measurement uses the model, but it was not loaded: its needs_weights() must return True, or its load() must load it"
            )
        return self.subject.loaded

    @property
    def task(self) -> str:
        return self.names["task"]

    def prompts_of(self, condition: str) -> list[Prompt]:
        assert self.prompts is not None
        return self.prompts[condition]

    @property
    def some_heads(self) -> list[int] | None:
        """The heads asked for; None where they are all there are."""
        return self.heads if len(self.heads) < self.model.heads else None

    def texts_of(self, unit: Unit) -> dict[str, str]:
        """What all rows of a unit say. The model may be stored under another name: it is known by its weights."""
        return {"condition": unit.condition.name, "item": self.items[unit.number].id}

    def units(self) -> list[Unit]:
        """All units in the order of the tables: condition by condition, item by item."""
        return [
            Unit(condition, n, None if self.prompts is None else self.prompts[condition.name][n])
            for condition in self.conditions
            for n in range(len(self.items))
        ]

    def read_unit(self, table: str, condition: str, number: int) -> pa.Table:
        """A unit's rows: from its file, or from its table once that is complete."""
        key = unit_name(condition, number)
        if self.folder.has_unit((table,), key):
            return self.folder.read_unit(table, key)
        return self.folder.read_part(table, key, [unit.key for unit in self.units()])

    def each_unit(self, table: str, columns: Sequence[str], use: Callable[[str, int, pa.Table], None]) -> None:
        """Read a finished table of units once, on all cores. `use` gets the condition, the item's number and some of the unit's rows, in any thread
        and any order.
        """
        units = {unit.key: (unit.condition.name, unit.number) for unit in self.units()}

        def used(piece: Piece) -> None:
            for key, rows in piece.apart():
                condition, number = units[key]
                named = {"condition": condition, "item": self.items[number].id}
                if any(rows.column(name).unique().to_pylist() != [text] for name, text in named.items()):
                    raise BadFolder(
                        f"{self.folder.path / table}.parquet holds other rows in the place of item {named['item']!r} under {condition!r}; restore it from a "
                        "copy, or remove it and run the same command again"
                    )
                use(condition, number, rows)

        self.folder.each_piece(table, list(units), ["condition", "item", *columns], used)

    @property
    def group_tokens(self) -> int:
        """The most tokens that run at once."""
        on_gpu = (self.model.device.type if self.has_model else self.device or "cpu") != "cpu"
        return self.spec.group_tokens or (GPU_GROUP if on_gpu else CPU_GROUP)

    def grouped(self, lengths: Sequence[int]) -> list[list[int]]:
        """Numbers of prompts with these lengths, in the groups in which they run."""
        return (
            in_groups(lengths, self.group_tokens)
            if self.spec.batch_size is None
            else in_batches(lengths, self.spec.batch_size)
        )


class StartAgain(Exception):
    """The results so far cannot be kept. The measurement has changed its settings and must start again."""


class Measurement:
    """What a study measures on each prompt, and the tables and verdict made from it.

    A measurement gives `measure` (prompts → units), `finish` (units → tables) and `lines` (tables → verdict). Everything else has a default.
    Loading, proving, resuming and storing are the same for all (`mless.study.measuring`).
    """

    #: Tables of a unit; those in `merged` are joined unchanged into tables of the finished folder.
    unit_tables: ClassVar[tuple[str, ...]] = ()
    merged: ClassVar[tuple[str, ...]] = ()
    #: All tables of a finished folder, and those from which the others can be made without a model.
    tables: ClassVar[tuple[str, ...]] = ()
    sources: ClassVar[tuple[str, ...]] = ()
    #: Changed whenever a unit would hold other numbers for the same study; stored units of another format are not taken over.
    unit_format: ClassVar[int] = 1
    #: Measurements whose readout this one needs.
    needs: ClassVar[tuple[str, ...]] = ()
    #: Whether both prompts of a pair must hold the same original tokens, and whether conditions may run the model with ARM.
    pairs_tokens: ClassVar[bool] = True
    takes_arm: ClassVar[bool] = True
    why_no_arm: ClassVar[str] = ""  # follows the refusal, as in ": both prompts run in one forward"
    #: Whether conditions may cut attention, or take parts of layers from another condition's run. `reads_answers`: tokens follow the prompts.
    takes_cuts: ClassVar[bool] = False
    takes_patches: ClassVar[bool] = False
    why_no_changes: ClassVar[str] = ""
    reads_answers: ClassVar[bool] = False
    #: Whether `measure` runs the loaded model itself; ARM is then attached around it.
    runs_model: ClassVar[bool] = True
    #: Whether the language-model head is read too, and whether `measure` attaches ARM by itself, because only some of its forwards take it.
    reads_head: ClassVar[bool] = False
    attaches_arm: ClassVar[bool] = False
    #: Whether it attaches cuts and patches by itself. Else `measure` runs one forward of the group's prompts, in order, and they are around it.
    attaches_changes: ClassVar[bool] = False
    #: Fields that say how stored numbers are judged. They can be changed without a model.
    judged_by: ClassVar[tuple[str, ...]] = ("margins", "flips")
    #: For a measurement without a page of its own: kinds of figures that its page shows, and tables that its summary holds.
    figures: ClassVar[tuple[str, ...]] = ()
    summed_up: ClassVar[tuple[str, ...]] = ()
    #: Whether units of a group give the same numbers when they are measured apart.
    apart: ClassVar[bool] = False
    #: Whether groups are measured in this process.
    measures_here: ClassVar[bool] = True
    #: What the progress says.
    doing: ClassVar[str] = "measuring"
    finishing: ClassVar[str] = "making tables and testing"

    def __init__(self, spec: StudySpec) -> None:
        self.spec = spec
        self.proofs: dict[str, Any] = {}

    # ---- before anything is loaded

    def check(self, conditions: Sequence[Condition], items: Sequence[Item]) -> None:
        """Refuse what could not be measured or compared, before anything is done."""

    def check_code(self, *, allowed: bool) -> None:
        """Refuse to run code of a model that the user did not allow, or that this machine cannot run safely."""

    def needs_weights(self) -> bool:
        return True

    def layers(self, subject: Subject) -> list[int]:
        """The layers measured, numbered from 1."""
        from mless.values import parse_numbers

        return parse_numbers(self.spec.layers, subject.layers or 0, "layer")

    def identity(self, found: dict[str, str], items: Sequence[Item]) -> dict[str, str]:
        """What must agree for stored units to belong to this study; `found` is the part that all studies have."""
        return {key: value for key, value in found.items() if key not in self.judged_by}

    def analysis(self, items: Sequence[Item]) -> str:
        """A digest of how stored numbers are judged."""
        return _judged_by(self.spec.model_dump(), self.judged_by)

    def stored_analysis(self, about: Mapping[str, Any]) -> str:
        """The same for a stored study; for older folders it is computed from their fields."""
        return about.get("analysis") or _judged_by(about.get("study") or {}, self.judged_by)

    def check_stored(self, folder: ResultFolder, about: Mapping[str, Any]) -> None:
        """Refuse to resume a folder that was started with other settings."""

    # ---- with the model

    def load(self, subject: Subject, layers: Sequence[int], progress: Progress) -> None:
        if self.needs_weights():
            subject.load(progress, layers=layers)
        else:
            subject.load_tokenizer()

    def prepare(self, bench: Bench) -> None:
        """Called once prompts are written: refuse those that cannot be measured, and prepare what every run needs."""

    def identity_loaded(self, bench: Bench) -> dict[str, str]:
        """Resolved study fields once a model is loaded: `auto` is another dtype on another machine."""
        found = {"prompts as rendered": rendered(bench)} if bench.prompts is not None else {}
        if not bench.has_model:
            return found
        grouped = {} if bench.spec.batch_size else {"group tokens in use": str(bench.group_tokens)}
        return {**found, **grouped, "dtype in use": bench.model.dtype, "kind of device": bench.model.kind}

    def start(self, bench: Bench, stored: Mapping[str, Any] | None, *, resumed: bool) -> dict[str, str]:
        """Called where units are missing: check the instrument. The result is added to the identity."""
        self.proofs = self.prove(bench)
        return {}

    def to_hand_on(self, bench: Bench) -> dict[str, Any]:
        """What `start` finds by measuring, and all who measure must share: given to workers, whose `take_over` gets it before they start."""
        return {}

    def take_over(self, given: Mapping[str, Any]) -> None:
        """What another process has found; it is not looked for again."""

    def check_loaded(self, bench: Bench, identity: Mapping[str, str]) -> None:
        """Called once this process knows the study's identity, before anything is stored."""

    def to_start_with(self) -> dict[str, Any]:
        """After `StartAgain`: what `start` has to find in study.json, so that other workers start as this one would."""
        return {}

    def prove(self, bench: Bench) -> dict[str, Any]:
        """Check the instrument on this model before anything is stored; what is returned goes into study.json under proofs."""
        return {}

    def resume(self, bench: Bench, stored: Mapping[str, Any]) -> None:
        """Called where no unit is missing: keep what the earlier run recorded."""
        self.proofs = dict(stored.get("proofs") or {})

    def changed(self, stored: Mapping[str, Any]) -> bool:
        """Whether study.json must be written again before a run continues."""
        return False

    def stop(self) -> None:
        """Called after the last unit."""

    def spare_memory(self) -> None:
        """Called where the device's memory was too little: let go of what can be computed again."""

    @property
    def implementations(self) -> Mapping[str, str | list[str]]:
        """What computes; a list collects what has computed `measure` so far."""
        return {}

    @property
    def judges(self) -> Mapping[str, str]:
        """Which of these only judge: they may be others when stored numbers are judged again."""
        return {}

    def groups(self, bench: Bench, missing: Sequence[Unit]) -> Iterator[Group]:
        """What is computed together. By default fixed groups of one condition's prompts of like length, so that a
        resumed run pads as the first one did.
        """
        absent = {unit.key for unit in missing}
        every, count = bench.units(), len(bench.items)
        for first in range(0, len(every), count):
            for numbers in bench.grouped(
                [0 if unit.prompt is None else len(unit.prompt) for unit in every[first : first + count]]
            ):
                units = [every[first + number] for number in numbers]
                if any(unit.key in absent for unit in units):
                    yield Group(units)

    def stored_with(self, bench: Bench, unit: Unit) -> str:
        """Units that follow one another in `groups` and have this text in common are stored together, a few at a time."""
        return unit.condition.name

    def run_groups(
        self,
        bench: Bench,
        groups: Sequence[Group],
        here: Callable[[Group], Iterator[tuple[Unit, Tables]]],
        halved: Callable[[str], None],
        idle: Callable[[], None],
    ) -> Iterator[tuple[Group, Iterator[tuple[Unit, Tables]]]]:
        """Each group with its units as they come. `here` measures a group in this process. For groups that are measured elsewhere: `halved` is
        told where one ran in halves, and `idle` is called while nothing comes.
        """
        return ((group, here(group)) for group in groups)

    def workers_now(self) -> str:
        """What other processes that measure do now, in a line; empty where there are none."""
        return ""

    def workers_known(self) -> int:
        """How many other processes have measured something of this study."""
        return 0

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Tables]]:
        """The tables of each unit of a group, in any order. A function is called for them in another thread, while the next group is measured."""
        raise NotImplementedError

    def seen(self, bench: Bench, unit: Unit, tables: Mapping[str, pa.Table]) -> None:
        """Called in any thread for each unit that was measured, before it is stored. What `finish` needs of it can be kept here, so that the
        tables are not read again.
        """

    def expected(self, bench: Bench, unit: Unit, table: str, found: pa.Table) -> Expected | None:
        """What is known of a stored unit's table before it is read again; None where nothing is. `found` has the columns it should have."""
        return None

    def has_rows(self, folder: ResultFolder, unit: Unit) -> bool:
        """Whether the folder still holds what this unit measured, as a file of its own or in a table."""
        return folder.has_unit(self.unit_tables, unit.key) or bool(self.merged and folder.has_tables(self.merged))

    def rows_of(self, folder: ResultFolder, unit: Unit, units: Sequence[Unit], item: str) -> Mapping[str, pa.Table]:
        """What the folder holds of a unit, one of these."""
        if folder.has_unit(self.unit_tables, unit.key):
            return {table: folder.read_unit(table, unit.key) for table in self.unit_tables}
        return {table: folder.read_part(table, unit.key, [one.key for one in units]) for table in self.merged}

    def finish(self, bench: Bench) -> None:
        """Write the tables that are not merged from units."""

    def judge_again(self, bench: Bench) -> None:
        """The same from stored tables, after margins or rules have changed."""
        self.finish(bench)

    def about(self, bench: Bench) -> dict[str, Any]:
        """What study.json says of this measurement only."""
        found: dict[str, Any] = {"layers": bench.layers, "heads": bench.heads, "proofs": self.proofs}
        if not bench.has_model:
            return found
        model = bench.model
        return found | {
            "omit_first": model.omit_first, "group_tokens": bench.group_tokens, "device": {"kind": str(model.device)} | model.computing()
        }  # fmt: skip

    @classmethod
    def figures_of(cls, about: Mapping[str, Any]) -> Sequence[str]:
        """The figures of a finished folder's page."""
        return cls.figures

    # ---- in words

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        """The verdict on a finished folder, its opening line first."""
        raise NotImplementedError


class Composed(Measurement):
    """A measurement made of inner studies, each in a folder of its own inside the result folder."""

    def compose(self, job: Job, run: Run, readouts: Mapping[str, type[Measurement]]) -> Outcome:
        """Run what is missing. `run` runs an inner study; `readouts` are the measurements that this one `needs`."""
        raise NotImplementedError


#: Runs a study.
Run = Callable[[Job], Outcome]


def rendered(bench: Bench) -> str:
    """A digest of all prompts: a template may write today's date."""
    assert bench.prompts is not None
    return digest([_rendered(prompt) for rows in bench.prompts.values() for prompt in rows])


def _rendered(prompt: Prompt) -> list[Any]:
    """What makes two prompts the same; positions only where they are not 0, 1, 2, …"""
    drawn = [prompt.token_ids, [asdict(span) for span in prompt.spans]]
    return drawn if prompt.position_ids is None else [*drawn, prompt.position_ids]


def _judged_by(study: Mapping[str, Any], names: Sequence[str]) -> str:
    return digest({name: study.get(name) for name in names})


@dataclass(frozen=True)
class Written:
    """Prompts as written: their kind, and the conditions with their fillers' token ids."""

    kind: str
    prompts: dict[str, list[Prompt]] | None
    conditions: list[Condition]
