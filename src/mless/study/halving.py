"""Runs one group of prompts: with its ARM, in halves where memory is short, and with faults that say where they were."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from mless.errors import BadAttention, BadPlugin, is_out_of_memory
from mless.results.storing import Tables
from mless.study.bench import Bench, Group, Measurement, Unit
from mless.study.changing import changed


def measured(
    measurement: Measurement, bench: Bench, group: Group, halved: Callable[[str], None]
) -> Iterator[tuple[Unit, Tables]]:
    """A group's units. Where its prompts do not fit into memory together, each half of it runs by itself, and `halved` is told."""
    left = {unit.key: unit for unit in group.units}
    try:
        with with_arm(measurement, bench, group), with_changes(measurement, bench, group):
            found = measurement.measure(bench, group)
            while True:
                with _naming(bench, group):
                    unit, tables = next(found, (None, {}))
                if unit is None:
                    return
                left.pop(unit.key, None)
                yield unit, named(bench, unit, tables)
    except Exception as fault:
        if len(left) < 2 or not measurement.runs_model or not is_out_of_memory(fault):
            raise
    measurement.spare_memory()
    _free_device_memory()
    halves = [list(left.values())[: len(left) // 2], list(left.values())[len(left) // 2 :]]
    halved(
        f"out of memory with {len(left)} prompts at once: this group runs in halves. Its numbers may differ in their last digits from those of "
        f"an undivided group; --set group_tokens={max(1, bench.group_tokens // 2)} makes all groups smaller"
    )
    for half in halves:
        yield from measured(measurement, bench, Group(half, max(1, (group.width or len(left)) // 2)), halved)


def class_of(measurement: Measurement) -> str:
    return type(measurement).__name__


def _free_device_memory() -> None:
    """Give back what a failed forward left to the garbage collector."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _naming(bench: Bench, group: Group) -> Generator[None]:
    """An error about attention says where it was."""
    try:
        yield
    except BadAttention as fault:
        items = ", ".join(repr(bench.items[unit.number].id) for unit in group.units)
        where = f"item {items}, condition {group.units[0].condition.name!r}: "
        raise BadAttention(f"{where}{str(fault).removeprefix(where)}") from None


def named(bench: Bench, unit: Unit, tables: Tables) -> Tables:
    """The same; an error while they are made says where it was too."""
    if not callable(tables):
        return tables

    def make() -> Mapping[str, Any]:
        with _naming(bench, Group([unit])):
            return tables()

    return make


def with_arm(measurement: Measurement, bench: Bench, group: Group) -> AbstractContextManager[Any]:
    """ARM in its loaded layers; layers after the last measured one change nothing."""
    if not measurement.runs_model:
        return nullcontext()
    settings = group.units[0].condition.arm
    if any(unit.condition.arm != settings for unit in group.units):
        mixed = ", ".join(dict.fromkeys(unit.condition.name for unit in group.units))
        raise BadPlugin(
            f"{class_of(measurement)}.groups puts conditions with different ARM into one group ({mixed}); ARM is set once for a group, so each "
            "needs a group of its own"
        )
    if settings is None or measurement.attaches_arm:
        return nullcontext()
    here = tuple(layer for layer in settings.layers if layer <= bench.model.loaded_layers)
    if not here:
        return nullcontext()
    from mless.redistribution import attached

    return attached(bench.model.model, replace(settings, layers=here))


def with_changes(measurement: Measurement, bench: Bench, group: Group) -> AbstractContextManager[Any]:
    """The condition's cuts and patches, around one forward of the group's prompts."""
    condition = group.units[0].condition
    if measurement.attaches_changes or not (condition.cut or condition.patch):
        return nullcontext()
    if any(unit.condition is not condition for unit in group.units):
        raise BadPlugin(
            f"{class_of(measurement)}.groups puts {condition.name!r}, which cuts attention or takes values from another run, into a group with other "
            "conditions; it needs a group of its own"
        )
    prompts = [unit.prompt for unit in group.units if unit.prompt is not None]
    source = next((one for one in bench.conditions if condition.patch and one.name == condition.patch[0].source), None)
    theirs = [] if source is None else [bench.prompts_of(source.name)[unit.number] for unit in group.units]
    return changed(bench.model, condition, prompts, theirs, source)
