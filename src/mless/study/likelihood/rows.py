"""Rows of texts after a prompt, run with a condition's cuts and patches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from mless.changes import Cut, Patch
from mless.study.changing import loaded_cuts, loaded_patches
from mless.values import Condition, Prompt, numbers_of

if TYPE_CHECKING:
    from mless.capture.branching import Branches
    from mless.capture.lanes import Lane
    from mless.capture.patching import Place, RecordedRun
    from mless.models import LoadedModel
    from mless.study.bench import Unit

#: Rows on a GPU are padded to one of these lengths: eight of them to a doubling, and multiples of the first.
_STEP = 32


def padded(length: int) -> int:
    """The next of the usual lengths: multiples of 32, and from 512 on eight of them to a doubling."""
    step = max(_STEP, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def changes(condition: Condition) -> bool:
    """Whether forwards under it run with cuts or patches."""
    return bool(condition.cut or condition.patch)


@contextmanager
def cut_rows(model: LoadedModel, cuts: Sequence[Cut], rows: Sequence[Branches], skipped: int = 0) -> Generator[None]:
    """Inside the block a forward of these rows has the cuts; all texts are the answer. `skipped`: so many tokens, the first ones, are not computed."""
    from mless.capture.cutting import cut_attached

    prompts = [row.prompt for row in rows]
    with cut_attached(model, cuts, prompts) as handle:
        handle.rows(prompts, [len(row) for row in rows], skipped)
        yield


@contextmanager
def patched_rows(
    model: LoadedModel,
    patches: Sequence[Patch],
    rows: Sequence[Branches],
    runs: Sequence[RecordedRun],
    by_row: Sequence[Sequence[Patch]] | None = None,
    skipped: int = 0,
) -> Generator[None]:
    """Inside the block a forward of these rows takes values from these runs of the same texts. `by_row`: each row's own of the patches.
    `skipped`: so many tokens, the first ones, are not computed.
    """
    from mless.capture.patching import patch_attached

    prompts = [row.prompt for row in rows]
    with patch_attached(model, patches, prompts, runs, by_row=by_row) as handle:
        handle.rows(prompts, runs, by_row, [len(row) for row in rows], [row.depth for row in rows], skipped)
        yield


class Source(NamedTuple):
    """A row of a condition without changes: what a patched row takes its values from, or what it is before it is patched."""

    condition: str
    number: int
    #: Which of the unit's rows; texts may have a row each.
    at: int


class Recordings:
    """What rows of unchanged conditions compute, recorded once for all changed rows of an item. Several lanes may ask at once.

    `row_of` gives a source's row, `shape_of` how many rows of how many tokens it runs in, `beside` the items whose patches run together.
    `whole`: changed rows run from the first layer on. `skips`: tokens before the first one that a patch or a cut may change are not computed.
    `alone`: each row runs by itself.
    """

    def __init__(
        self,
        model: LoadedModel,
        conditions: Sequence[Condition],
        prompts: Mapping[str, Sequence[Prompt]],
        row_of: Callable[[Source], Branches | None],
        shape_of: Callable[[Branches], tuple[int, int]],
        beside: Callable[[int], Sequence[int]],
        *,
        whole: bool,
        skips: bool,
        alone: bool,
    ) -> None:
        from mless.capture.patching import places_of

        self._alone = alone
        self._model, self._row_of, self._shape_of, self._beside = model, row_of, shape_of, beside
        self._kept: dict[Source, RecordedRun] = {}
        #: Held by the lane that changes what is kept.
        self._changing = RLock()
        #: What is recorded of each condition; emptied where memory is short.
        self._needed: dict[str, dict[Place, None]] = {}
        self._cuts = {one.name: loaded_cuts(one, model) for one in conditions}
        plain = [one for one in conditions if not (changes(one) or one.arm or one.again)]
        by_prompts = {_tokens(prompts[one.name]): one.name for one in reversed(plain)}
        self._plain = {one.name for one in plain}
        unhidden = {one.name for one in plain if not one.hidden}
        #: By changed condition: the one with the same prompts and no changes, and the first layer that differs from it.
        self._bases: dict[str, tuple[str, int]] = {}
        #: The changed conditions whose rows may begin at a later token.
        self._skipping: set[str] = set()
        for one in filter(changes, conditions):
            first, sources = first_changed(one, model.layers), {patch.source for patch in one.patch}
            for source in sources:
                self._need(source, places_of(model.model, loaded_patches(one, model)))
            base = by_prompts.get(_tokens(prompts[one.name]))
            if base is None or one.arm is not None or whole:
                continue
            # Keys that are put in are seen by tokens that have no patch.
            own_tokens = all(patch.part != "keys-values" for patch in one.patch)
            may_skip = skips and own_tokens and not (one.cut and one.patch) and {base, *sources} <= unhidden
            if not (one.patch or may_skip):
                continue
            if may_skip:
                self._skipping.add(one.name)
                self._need(base, self._keys(first))
            if first > 1:
                self._need(base, [("residual", first - 1)])
            if first > 1 or may_skip:
                self._bases[one.name] = base, first

    def _need(self, condition: str, places: Iterable[Place]) -> None:
        self._needed.setdefault(condition, {}).update(dict.fromkeys(places))

    def sparing(self) -> None:
        """Keep nothing. Rows that run together are from now on computed whole, and only what is asked for is recorded; of rows that run alone the bits
        must stay what they are.
        """
        self._kept.clear()
        self._beside = lambda number: [number]
        if self._alone:
            return
        self._needed.clear()
        self._bases.clear()
        self._skipping.clear()

    def base_of(self, condition: Condition) -> tuple[str, int]:
        """The condition that its rows are before they are changed, and the first layer that is computed."""
        return self._bases.get(condition.name, ("", 1))

    def starts_later(self, condition: Condition) -> bool:
        """Whether its rows take what is before their first change from a run without changes."""
        return condition.name in self._bases

    def skipped(self, unit: Unit, at: int, row: Branches) -> int:
        """How many tokens of the unit's row of that number, the first ones, need not be computed. It follows from the row and its condition alone."""
        from mless.capture.cutting import first_cut
        from mless.capture.pairing import first_patched

        if unit.condition.name not in self._skipping:
            return 0
        if not unit.condition.patch:
            return first_cut(loaded_cuts(unit.condition, self._model), row.prompt)
        other = self._row_of(_source_of(unit, at))
        return (
            0 if other is None else first_patched(loaded_patches(unit.condition, self._model), row.prompt, other.prompt)
        )

    def _keys(self, first: int) -> list[Place]:
        """Keys and values of every layer that is computed and has attention."""
        from mless.models.seams import attention_layers

        return [("keys-values", layer) for layer in attention_layers(self._model.model) if layer >= first]

    @contextmanager
    def in_force(
        self, lane: Lane, batch: Sequence[tuple[Unit, int, Branches]], count: int, length: int, skipped: int
    ) -> Generator[None]:
        """Inside the block the lane's forward of these rows has their patches, and the cuts of the first one, which all have. It starts at their first
        change. Each row comes with its unit and its number among the unit's rows. `skipped`: so many tokens, the first ones, are not computed.
        """
        from mless.capture.patching import places_of
        from mless.capture.starting import starting

        model, rows = lane.model, [row for *_, row in batch]
        self._keep_only({number for unit, *_ in batch for number in self._beside(unit.number)})
        by_row = [loaded_patches(unit.condition, model) for unit, *_ in batch]
        patches = list(dict.fromkeys(patch for own in by_row for patch in own))
        runs = [
            self._run(lane, _source_of(unit, at), places_of(model.model, own))
            for (unit, at, _), own in zip(batch, by_row, strict=True)
            if patches
        ]
        first = min(self.base_of(unit.condition)[1] for unit, *_ in batch)
        with ExitStack() as stack:
            if first > 1 or skipped:
                wanted: list[Place] = [("residual", first - 1)] if first > 1 else []
                wanted += self._keys(first) if skipped else []
                before = [
                    self._run(lane, Source(self.base_of(unit.condition)[0], unit.number, at), wanted)
                    for unit, at, _ in batch
                ]
                stack.enter_context(starting(model.model, first, before, count, length, skipped))
            if patches:
                stack.enter_context(patched_rows(model, patches, rows, runs, by_row, skipped))
            if cuts := self._cuts[batch[0][0].condition.name]:
                stack.enter_context(cut_rows(model, cuts, rows, skipped))
            yield

    @contextmanager
    def recording_while_scoring(self, lane: Lane, source: Source, row: Branches) -> Generator[None]:
        """Inside the block the lane's forward of this row alone is recorded, where patches take from it; else nothing happens."""
        from mless.capture.patching import recorded

        places = self._needed.get(source.condition)
        if not places or source.condition not in self._plain:
            yield
            return
        self._keep_only(self._beside(source.number))
        with recorded(lane.model, places, [row.prompt]) as recorder:
            recorder.rows([row.prompt], [len(row)], [row.depth])
            yield
            (run,) = recorder.runs()
        with self._changing:
            self._kept[source] = run

    def _keep_only(self, numbers: Collection[int]) -> None:
        with self._changing:
            self._kept = {source: run for source, run in self._kept.items() if source.number in numbers}

    def _run(self, lane: Lane, source: Source, asked: Sequence[Place]) -> RecordedRun:
        with self._changing:
            run = self._kept.get(source)
            if run is None or not all(place in run.values for place in asked):
                self._record(lane, source, asked)
            return self._kept[source]

    def _record(self, lane: Lane, source: Source, asked: Sequence[Place]) -> None:
        """Its row, and beside it those that are needed next: a forward has room for so many rows, whether they are there or not."""
        row, cuts = self._row_of(source), self._cuts[source.condition]
        assert row is not None
        shape = self._shape_of(row)
        rows = {source: row}
        for number in self._beside(source.number):
            other = source._replace(number=number)
            if len(rows) < shape[0] and other not in self._kept:
                theirs = self._row_of(other)
                if theirs is not None and self._shape_of(theirs) == shape and theirs.own_mask == row.own_mask:
                    rows[other] = theirs
        wanted = list(self._needed.get(source.condition, {}) | dict.fromkeys(asked))
        with cut_rows(lane.model, cuts, list(rows.values())) if cuts else nullcontext():
            found = recorded_rows(lane, wanted, list(rows.values()), *shape)
        self._kept.update(zip(rows, found, strict=True))


def _source_of(unit: Unit, at: int) -> Source:
    """The row that a patched unit's row takes its values from."""
    return Source(unit.condition.patch[0].source, unit.number, at)


def _tokens(prompts: Sequence[Prompt]) -> tuple[Any, ...]:
    return tuple((one.token_ids, one.position_ids, one.hidden) for one in prompts)


def first_changed(condition: Condition, layers: int) -> int:
    """The first of so many layers whose computing differs. A residual stream is patched after its layer, which computes what it did."""

    def first(change: Cut | Patch) -> int:
        after = isinstance(change, Patch) and change.part == "residual"
        return min(numbers_of(change.layers, layers, "layer")) + after

    return min(first(change) for change in (*condition.patch, *condition.cut))


def recorded_rows(
    lane: Lane, places: Iterable[Place], rows: Sequence[Branches], count: int, length: int
) -> list[RecordedRun]:
    """One forward of the rows, filled up to `count` rows of `length` tokens; what the named parts compute in it."""
    from mless.capture.patching import recorded

    prompts = [row.prompt for row in rows]
    with recorded(lane.model, places, prompts) as recorder:
        recorder.rows(prompts, [len(row) for row in rows], [row.depth for row in rows])
        lane.scorer.forward(rows, count=count, length=length)
        return recorder.runs()
