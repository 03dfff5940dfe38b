"""A study from its spec to its tables. What is stored already is never computed again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mless import __version__, tasks
from mless.errors import BadAttention, BadFolder, BadStudy, TokenizerFault
from mless.prompting import align, build_prompts, resolve_kind, with_filler_ids
from mless.store import FORMAT, ResultFolder
from mless.study import tables
from mless.study.identity import check_same, default_folder, digest, identity_of, rerun_command, slug, versions
from mless.study.spec import StudySpec
from mless.values import Condition, Item, Prompt, parse_numbers

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.models import LoadedModel
    from mless.models.loading import Description


@runtime_checkable
class Progress(Protocol):
    """Told what happens; the command draws it, a script may ignore it."""

    def say(self, line: str) -> None: ...

    def step(self, what: str, done: int, total: int) -> None: ...

    def checked(self) -> None:
        """The input has passed its checks; from here on it is work."""
        ...


class Silent:
    def say(self, line: str) -> None: ...

    def step(self, what: str, done: int, total: int) -> None: ...

    def checked(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """Where the results are, and whether this call computed any of them; `fresh` where it made their tables anew."""

    folder: Path
    computed: int
    units: int
    fresh: bool = True


@dataclass(frozen=True)
class Bench:
    """A study on its way: the loaded model, the prompts of every condition, and where units go."""

    spec: StudySpec
    folder: ResultFolder
    model: LoadedModel
    items: list[Item]
    conditions: list[Condition]
    prompts: dict[str, list[Prompt]]
    layers: list[int]
    heads: list[int]
    names: dict[str, str]
    told: Progress

    @property
    def some_heads(self) -> list[int] | None:
        """The heads asked for; None where they are all there are."""
        return self.heads if len(self.heads) < self.model.heads else None

    def key(self, condition: str, number: int) -> str:
        """The name of the unit of an item, numbered from 0."""
        return f"{slug(condition)}-{number + 1:05d}"

    def keys(self) -> list[str]:
        return [self.key(condition.name, n) for condition in self.conditions for n in range(len(self.items))]


@runtime_checkable
class Measurement(Protocol):
    """What a study measures on each prompt, and what is made of it in the end. Loading, proving, resuming and storing are the same for all."""

    #: What study.json says was measured, and the tables of a finished folder; `unit_tables` are merged from units.
    measures: str
    unit_tables: tuple[str, ...]
    tables: tuple[str, ...]
    #: Changed whenever a unit would hold other numbers for the same study; stored units of another format are not taken over.
    unit_format: int

    @property
    def implementations(self) -> Mapping[str, str | list[str]]:
        """What computes; a list gathers what `units` was computed by so far."""
        ...

    def prove(self, bench: Bench) -> dict[str, Any]:
        """Check the instrument on this model before anything is stored; what is returned goes into study.json under proofs."""
        ...

    def units(self, bench: Bench, condition: Condition, batch: Sequence[Prompt]) -> Iterator[dict[str, pa.Table]]:
        """The unit tables of each prompt of a batch, in order. The model runs with the condition's ARM, if it has one, while this does."""
        ...

    def finish(self, bench: Bench) -> None:
        """Write the tables that are not merged from units."""
        ...


def measurement_of(spec: StudySpec) -> Measurement:
    if spec.activations is not None:
        from mless.study.activating import ActivationMeasurement

        return ActivationMeasurement(spec.activations)
    if spec.affine is not None:
        from mless.study.affine import AffineMeasurement

        return AffineMeasurement(spec.affine)
    from mless.study.attending import AttentionMeasurement

    return AttentionMeasurement()


def run_study(
    spec: StudySpec,
    out: Path | None = None,
    progress: Progress | None = None,
    *,
    for_figure: bool = False,
    trust_remote_code: bool = False,
) -> Outcome:
    """Run what is missing of `spec` into `out` (a folder of its own under ``results/`` by default).

    `for_figure` fails before the run where the model cannot show the study's figure. `trust_remote_code` is no field of a study: a
    file from somebody else must not be able to say it.
    """
    told = progress or Silent()
    if spec.tune is not None:
        from mless.study.tuning import run_tuning

        return run_tuning(spec, out, told, trust_remote_code=trust_remote_code)
    if spec.arm.model_dump(exclude_none=True) and not any(one.arm for one in spec.conditions_in_order()):
        told.say(
            "ARM's parameters are given, but no condition runs with ARM: add arm to the conditions, or leave them out"
        )
    if spec.accuracy is not None:
        if for_figure:
            spec.check_figure()
        from mless.study.answering import run_accuracy

        return run_accuracy(spec, out, told, trust_remote_code=trust_remote_code)
    from mless.models import describe
    from mless.models.loading import fingerprint

    conditions = spec.conditions_in_order()
    spec.margins_of()
    task, items = spec.load_items()
    described = describe(spec.model, trust_remote_code=trust_remote_code, say=told.say, step=told.step)
    layers = parse_numbers(spec.layers, described.layers, "layer")
    if spec.activations is None:
        # Not every layer of a hybrid model attends.
        layers = described.attending(None if spec.layers.strip() == "all" else layers)
    heads = parse_numbers(spec.heads, described.heads, "head")
    check_arm(conditions, described.layers)
    for condition in conditions:
        if condition.arm is not None and min(condition.arm.layers) > max(layers):
            raise BadStudy(
                f"condition {condition.name!r}: ARM in layer {min(condition.arm.layers)} cannot change layers up to {max(layers)}, which are all that is "
                f"measured; add --layers 1-{min(condition.arm.layers)}"
            )
    if for_figure:
        spec.check_figure(described.layers, described.heads)
    measurement = measurement_of(spec)
    identity = identity_of(spec, described, fingerprint(described.source, max(layers)), items)
    folder = ResultFolder(out if out is not None else default_folder(spec, described.source.label))
    stored = folder.manifest()
    if stored is not None:
        check_same(folder, stored, identity)
        # An older folder's prompts may be written otherwise; they are compared below, once a tokenizer is loaded.
        current = stored["format"] == FORMAT
        there = all((folder.path / f"{table}.parquet").exists() for table in measurement.tables)
        if stored.get("complete") and current and there:
            return Outcome(folder.path, 0, stored["units"], fresh=False)
    elif folder.holds_something_else():
        raise BadFolder(f"{folder.path} is not empty and holds no study.json; choose another --out")
    return _compute(
        measurement, spec, folder, identity, described, task, items, conditions, layers, heads, told, trust_remote_code
    )


def _compute(
    measurement: Measurement,
    spec: StudySpec,
    folder: ResultFolder,
    identity: dict[str, str],
    described: Description,
    task: str,
    items: list[Item],
    conditions: list[Condition],
    layers: list[int],
    heads: list[int],
    told: Progress,
    trust_remote_code: bool,
) -> Outcome:
    from mless.models import load

    began = time.monotonic()
    first = "layer 1" if max(layers) == 1 else f"layers 1–{max(layers)}"
    told.say(f"loading {described.source.label}, {first} of {described.layers}")
    model = load(
        described,
        layers=layers,
        tokenizer=spec.tokenizer,
        dtype=spec.dtype,
        device=spec.device,
        trust_remote_code=trust_remote_code,
        say=told.say,
        step=told.step,
    )
    loaded = time.monotonic()
    kind = resolve_kind(spec.prompt, model.tokenizer, model.label)
    told.say(f"prompts: {kind}" + (f" ({spec.prompt})" if spec.prompt != kind else ""))
    sentences = tasks.filler_sentences()
    prompts = {
        condition.name: list(
            build_prompts(
                model.tokenizer, items, condition, kind=kind, system=spec.system, seed=spec.seed, sentences=sentences
            )
        )
        for condition in conditions
    }
    check_prompts(model, prompts)
    # What the names above stand for once a model is loaded: a template may write today's date, and auto is another dtype elsewhere.
    identity = identity | {
        "prompts as rendered": digest([_rendered(prompt) for prompt in itertools.chain(*prompts.values())]),
        "dtype in use": model.dtype,
        "kind of device": model.device.type,
        "unit format": str(measurement.unit_format),
    }
    names = {"model": model.label, "task": task}
    bench = Bench(spec, folder, model, items, conditions, prompts, layers, heads, names, told)
    proofs = measurement.prove(bench)
    told.checked()
    keys = bench.keys()
    about: dict[str, Any] = {
        "mless": __version__,
        "measures": measurement.measures,
        "complete": False,
        "identity": identity,
        "study": spec.model_dump(),
        "task": task,
        "model": {
            "name": spec.model,
            "label": model.label,
            "family": model.family,
            "layers": model.layers,
            "heads": model.heads,
            "context": model.context,
            "fingerprint": model.fingerprint,
            "origin": described.source.origin,
        },
        "tokenizer": {"fingerprint": model.tokenizer_fingerprint, "given": spec.tokenizer},
        "prompt": kind,
        "omit_first": model.omit_first,
        "command": rerun_command(spec, folder.path, trust_remote_code),
        "conditions": {c.name: asdict(c) for c in with_filler_ids(model.tokenizer, conditions)},
        "items": [item.id for item in items],
        "layers": layers,
        "heads": heads,
        "seeds": {"study": spec.seed},
        "device": {"kind": str(model.device)} | model.computing(),
        "implementations": dict(measurement.implementations),
        "proofs": proofs,
        "trust_remote_code": trust_remote_code,
        "versions": versions(),
        "units": len(keys),
    }
    with folder.writing():
        folder.sweep()
        again = folder.manifest()
        if again is not None:
            check_same(folder, again, identity)
            about["implementations"] = _together(again.get("implementations", {}), measurement.implementations)
        if again is None or again.get("complete"):
            folder.write_manifest(about)

        def note() -> None:
            used = _together(about["implementations"], measurement.implementations)
            if used != about["implementations"]:
                about["implementations"] = used
                folder.write_manifest(about)

        try:
            computed = _run_units(measurement, bench, note)
        except BadAttention:
            # What would mend it (another dtype, another checkpoint, other items) makes another study, so these units serve nobody.
            if again is None:
                folder.discard()
            raise
        measured = time.monotonic()
        told.say("merging tables and testing")
        folder.write_table("prompts", tables.prompts_table(prompts, model.tokenizer, names))
        for table in measurement.unit_tables:
            folder.merge(table, keys)
        measurement.finish(bench)
        timings = {
            "load_s": round(loaded - began, 2),
            "measure_s": round(measured - loaded, 2),
            "finish_s": round(time.monotonic() - measured, 2),
            "units_computed": computed,
        }
        # Last, because it says that everything else is there.
        folder.write_manifest(about | {"complete": True, "timings": timings})
    return Outcome(folder.path, computed, len(keys))


def _rendered(prompt: Prompt) -> list[Any]:
    """What makes two prompts the same; positions only where they are not 0, 1, 2, …"""
    drawn = [prompt.token_ids, [asdict(span) for span in prompt.spans]]
    return drawn if prompt.position_ids is None else [*drawn, prompt.position_ids]


def check_arm(conditions: Sequence[Condition], layers: int) -> None:
    """A layer that the model does not have is told before anything is loaded."""
    for condition in conditions:
        for layer in condition.arm.layers if condition.arm is not None else ():
            if layer > layers:
                raise BadStudy(
                    f"condition {condition.name!r}: no layer {layer} for ARM: this model's layers are 1 to {layers} (numbered from 1)"
                )


def _together(stored: Mapping[str, str | list[str]], now: Mapping[str, str | list[str]]) -> dict[str, str | list[str]]:
    """What computed a folder's numbers, in all runs that had a part in them."""
    found: dict[str, str | list[str]] = {}
    for what, by in now.items():
        before = stored.get(what, [])
        before = [before] if isinstance(before, str) else before
        found[what] = by if isinstance(by, str) else sorted({*before, *by})
    return found


def _run_units(measurement: Measurement, bench: Bench, note: Callable[[], None]) -> int:
    """`note` records what computes, before anything that it computed is stored."""
    total = sum(map(len, bench.prompts.values()))
    done = computed = 0
    size = bench.spec.batch_size
    for condition in bench.conditions:
        rows = bench.prompts[condition.name]
        with _with_arm(bench, condition):
            # A batch is a fixed group of items, so that a resumed run pads as the first one did and gets the same bits.
            for first in range(0, len(rows), size):
                numbers = range(first, min(first + size, len(rows)))
                unit_keys = [bench.key(condition.name, n) for n in numbers]
                if not all(bench.folder.has_unit(measurement.unit_tables, key) for key in unit_keys):
                    batch = [rows[n] for n in numbers]
                    try:
                        for key, unit in zip(unit_keys, measurement.units(bench, condition, batch), strict=True):
                            note()
                            bench.folder.write_unit(unit, key)
                            computed += 1
                    except BadAttention as fault:
                        items = ", ".join(repr(prompt.item) for prompt in batch)
                        raise BadAttention(f"item {items}, condition {condition.name!r}: {fault}") from None
                done += len(unit_keys)
                bench.told.step(f"{measurement.measures}, {condition.name}", done, total)
    return computed


def _with_arm(bench: Bench, condition: Condition) -> AbstractContextManager[Any]:
    """ARM in those of its layers that are loaded: what comes after the last measured one changes nothing."""
    settings = condition.arm
    if settings is None:
        return nullcontext()
    here = tuple(layer for layer in settings.layers if layer <= bench.model.loaded_layers)
    if not here:
        return nullcontext()
    from mless.redistribution import attached

    return attached(bench.model.model, replace(settings, layers=here))


def check_prompts(model: LoadedModel, prompts: Mapping[str, Sequence[Prompt]]) -> None:
    """Both prompts of every pair hold the same original tokens; none is too long, none lacks the BOS its model needs, none has
    positions of its own where the model takes none."""
    for rows in prompts.values():
        for without, prompt in zip(prompts["none"], rows, strict=True):
            align(without, prompt)
            check_prompt(model, prompt)


def check_prompt(model: LoadedModel, prompt: Prompt) -> None:
    """It is not too long for its model, does not lack the BOS that it needs, and has positions of its own only where the model takes them."""
    from mless.capture.positions import check_position_ids, check_reach

    if model.bos is not None and prompt.token_ids[0] != model.bos:
        raise TokenizerFault(
            f"item {prompt.item!r}: the prompt does not begin with the BOS token (id {model.bos}) that {model.label} was trained with; its chat "
            "template leaves it out: give a tokenizer whose template writes it (--tokenizer), or use --prompt raw"
        )
    check_position_ids(model, [prompt])
    check_reach(model, [prompt])
