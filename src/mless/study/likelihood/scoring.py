"""Runs rows of texts after a prompt: which of them share a forward, with which changes, and what they are compared with."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from mless.capture.branching import branches
from mless.capture.lanes import Lane, Lanes
from mless.capture.scoring import Scores
from mless.study.bench import Bench, Unit
from mless.study.changing import loaded_cuts
from mless.study.likelihood.rows import Recordings, Source, changes, cut_rows, padded
from mless.study.likelihood.texts import Texts
from mless.values import ArmSettings, Condition, arm_seed

if TYPE_CHECKING:
    from torch import Tensor

    from mless.capture.branching import Branches
    from mless.models import LoadedModel
    from mless.redistribution import ArmHandle

#: Rows that are kept once they are made.
_ROWS_KEPT = 64
#: Bytes of states of `none` that are kept to compare with.
_KEPT = 4 << 30

#: A unit's row, and which of its rows it is; texts may have a row each.
Row = tuple[Unit, int, "Branches"]


@dataclass(frozen=True)
class _Forward:
    """Rows that run at once, filled up to so many rows of so many tokens; so many tokens, the first ones, are not computed."""

    rows: Sequence[Row]
    count: int
    length: int
    skipped: int


def begin_compiling(model: LoadedModel, conditions: Sequence[Condition]) -> Thread | None:
    """On a GPU begin to compile what the rows will need. Prompts are rendered meanwhile."""
    from mless import kernels
    from mless.redistribution import compile_redistribution

    if model.device.type != "cuda":
        return None
    arms = dict.fromkeys(one.arm for one in conditions if one.arm is not None)
    calls = [partial(compile_redistribution, model, arm, attached=True) for arm in arms]
    # A head of another kind is read all the same; what it needs is compiled when it is read.
    weight: Tensor | None = getattr(model.model.get_output_embeddings(), "weight", None)
    if weight is not None:
        calls.insert(0, partial(kernels.compile_described, len(weight), weight.dtype, weight.device))
    return kernels.in_background(*calls)


class RowScoring:
    """Scores units' rows with a loaded model. A row's bits depend on the row, its condition and the width alone."""

    def __init__(
        self,
        bench: Bench,
        texts: Sequence[Texts],
        lanes: Lanes,
        *,
        alone: bool,
        at_once: int,
        beside: Callable[[int], Sequence[int]],
        records: bool,
    ) -> None:
        """`alone`: each row runs by itself. `at_once`: tokens of other forwards. `beside`: the items whose patched rows run together. `records`: what
        changed rows take is recorded while it is scored.
        """
        self._bench, self._texts, self.lanes = bench, texts, lanes
        self.alone, self._at_once, self._beside, self._records = alone, at_once, beside, records
        self._patches = any(one.patch for one in bench.conditions)
        #: Whether all texts of a prompt run in one row.
        self.together = True
        #: Whether changed rows run from the first layer on, and whether they begin at the first token that is changed.
        self.whole = self.skips = False
        #: By the number of rows at once.
        self._recorded: dict[int | None, Recordings] = {}
        self._states: OrderedDict[int, Tensor] = OrderedDict()
        #: The last rows that were made.
        self._made: dict[Any, list[Branches]] = {}

    # ---- rows

    def rows(self, unit: Unit, *, together: bool | None = None) -> list[Branches]:
        """The unit's texts in one row, or in a row each; the solution comes first."""
        assert unit.prompt is not None
        joined = self.together if together is None else together
        # Many conditions have the same prompt and differ in what they do to the model.
        key = unit.number, unit.prompt.token_ids, unit.prompt.position_ids, unit.prompt.spans, joined
        if key not in self._made:
            ids = self._texts[unit.number].ids()
            if len(self._made) >= _ROWS_KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[key] = [branches(unit.prompt, some) for some in ([ids] if joined else ([one] for one in ids))]
        return [replace(row, prompt=unit.prompt) for row in self._made[key]]

    def shape(self, row: Branches, width: int | None) -> tuple[int, int]:
        """Rows × tokens of the forward that a row runs in, from the row alone."""
        if self.alone:
            return 1, len(row)
        length = padded(len(row))
        count = max(1, self._at_once // length)
        return count if width is None else min(count, width), length

    # ---- what rows are compared with

    def lacking(self, numbers: set[int]) -> list[int]:
        """Those of these items whose states under `none` are not kept. The others' stay for longest."""
        for number in numbers & self._states.keys():
            self._states.move_to_end(number)
        return sorted(numbers - self._states.keys())

    def forget_oldest(self) -> None:
        """Forget the states that were not used for longest, as many as are too many. Between groups: a group needs all of its own."""
        held = sum(states.numel() * states.element_size() for states in self._states.values())
        while held > _KEPT and len(self._states) > 1:
            _, oldest = self._states.popitem(last=False)
            held -= oldest.numel() * oldest.element_size()

    def _against(self, unit: Unit, at: int) -> Tensor | None:
        if at or unit.condition is self._bench.conditions[0] or not self._texts[unit.number].solution:
            return None
        return self._states[unit.number]

    def spare_memory(self) -> None:
        """Let go of what can be computed again, and keep less of it from now on."""
        self._states.clear()
        self.lanes.forget()
        self.lanes.unpack()
        for one in self._recorded.values():
            one.sparing()

    def record_anew(self) -> None:
        self._recorded.clear()

    def close(self) -> None:
        self._states.clear()  # gigabytes of the device's
        self._recorded.clear()
        self.lanes.close()

    # ---- scoring

    def scored(
        self,
        units: Sequence[Unit],
        width: int | None,
        arm: ArmSettings | None = None,
        *,
        changed: bool = False,
        compared: bool = True,
    ) -> Iterator[tuple[Unit, list[Scores]]]:
        """Every unit with its rows, as they are done. States of `none` are kept.

        `changed`: with the cuts that all units have in common, and each one's patches. `compared`: with the distributions under `none`, which must
        have run.
        """
        recordings = self.recordings(width) if self._patches else None
        # What ARM pools over more than a token would pool over texts and rows that have nothing to do with each other.
        pooled = arm is not None and arm.scope != "token"
        rows: dict[str, list[Branches]] = {
            unit.key: self.rows(unit, together=self.together and not pooled) for unit in units
        }

        def entering(lane: Lane) -> AbstractContextManager[ArmHandle | None]:
            if arm is None:
                return nullcontext()
            from mless.redistribution import attached

            return attached(lane.model.model, arm)

        def run(lane: Lane, handle: ArmHandle | None, forward: _Forward) -> list[Scores]:
            against = [self._against(unit, at) if compared else None for unit, at, _ in forward.rows]
            tell = None if handle is None else self._telling(handle, forward)
            with ExitStack() as stack:
                if changed:
                    stack.enter_context(self._changed(lane, forward, recordings))
                (unit, at, row), *_ = forward.rows
                if recordings is not None and self._records and not unit.condition.patch:
                    source = Source(unit.condition.name, unit.number, at)
                    stack.enter_context(recordings.recording_while_scoring(lane, source, row))
                return lane.scorer(
                    [row for *_, row in forward.rows],
                    against,
                    count=forward.count,
                    length=forward.length,
                    tell=tell,
                    skipped=forward.skipped,
                )

        found: dict[str, dict[int, Scores]] = defaultdict(dict)
        forwards = self._forwards(units, rows, width, recordings if changed else None, alone=self.alone or pooled)
        for forward, scored in self.lanes.each(forwards, run, entering):
            for (unit, at, _), one in zip(forward.rows, scored, strict=True):
                found[unit.key][at] = one
                if at == 0 and unit.condition is self._bench.conditions[0]:
                    self._states[unit.number] = one.states.clone()  # else all that ran beside it would be kept with it
                    self._states.move_to_end(unit.number)
                if len(found[unit.key]) == len(rows[unit.key]):
                    own = found.pop(unit.key)
                    yield unit, [own[at] for at in sorted(own)]

    def _forwards(
        self,
        units: Sequence[Unit],
        rows: dict[str, list[Branches]],
        width: int | None,
        recordings: Recordings | None,
        *,
        alone: bool,
    ) -> list[_Forward]:
        """The units' rows in forwards. `recordings`: where patches are in force."""
        batches: dict[Any, list[Row]] = defaultdict(list)
        for unit in units:
            for at, row in enumerate(rows[unit.key]):
                shape = (1, len(row)) if alone else self.shape(row, width)
                skipped = 0
                if recordings is not None and self.skips and changes(unit.condition):
                    skipped = recordings.skipped(unit, at, row)
                # Rows with a mask of their own run apart from plain ones: what computes a row must not depend on its neighbours.
                batches[shape, skipped, row.own_mask].append((unit, at, row))
        return [
            _Forward(some[first : first + count], count, length, skipped)
            for ((count, length), skipped, _), some in batches.items()
            for first in range(0, len(some), count)
        ]

    @contextmanager
    def _changed(self, lane: Lane, forward: _Forward, recordings: Recordings | None) -> Generator[None]:
        """The cuts that these rows have in common, and each row's patches."""
        conditions = [unit.condition for unit, *_ in forward.rows]
        if recordings is not None and any(one.patch or recordings.starts_later(one) for one in conditions):
            with recordings.in_force(lane, forward.rows, forward.count, forward.length, forward.skipped):
                yield
            return
        cuts = loaded_cuts(conditions[0], lane.model)
        with cut_rows(lane.model, cuts, [row for *_, row in forward.rows]) if cuts else nullcontext():
            yield

    def recordings(self, width: int | None) -> Recordings:
        """Made once for each width: a row has the same bits in both runs only where both run in the same shape."""
        if self.alone:
            width = None  # rows run one by one, in groups of any width
        if width not in self._recorded:
            bench = self._bench

            def row_of(source: Source) -> Branches | None:
                prompt = bench.prompts_of(source.condition)[source.number]
                rows = self.rows(Unit(bench.conditions[0], source.number, prompt))
                return rows[source.at] if source.at < len(rows) else None  # another item may have fewer texts

            self._recorded[width] = Recordings(
                self.lanes.first.model,
                bench.conditions,
                bench.prompts or {},
                row_of,
                lambda row: self.shape(row, width),
                self._beside,
                whole=self.whole,
                skips=self.skips,
                alone=self.alone,
            )
        return self._recorded[width]

    def _telling(self, arm: ArmHandle, forward: _Forward) -> Callable[[Tensor], None]:
        """ARM draws by a token's place in its own text, and by the item."""
        import torch

        items = [self._bench.items[unit.number].id for unit, *_ in forward.rows]
        fill = [0] * (forward.count - len(items))
        seeds = torch.tensor([arm_seed(item, arm.settings.seed) for item in items] + fill)

        def tell(places: Tensor) -> None:
            arm.rows(seeds=seeds.to(places.device), positions=places)

        return tell
