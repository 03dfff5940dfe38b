"""A likelihood study: what a condition does to the log-probabilities of reference solutions and answers, item by item."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from mless.errors import BadStudy, ProofFailed, first_line, is_out_of_memory
from mless.results.schemas import token_texts
from mless.results.storing import Tables
from mless.results.units import Expected
from mless.study.bench import Bench, Group, Measurement, Progress, Unit
from mless.study.changing import loaded_cuts, prove_changes
from mless.study.identity import digest
from mless.study.likelihood.asking import Asking
from mless.study.likelihood.rows import Recordings, Source, changes, cut_rows, first_changed
from mless.study.likelihood.tables import write_effects
from mless.study.likelihood.texts import Texts, texts_of, tokens_after
from mless.study.likelihood.unit_tables import expected_rows, tables_of_texts
from mless.study.likelihood.words import likelihood_lines, without_distributions
from mless.study.spec import LikelihoodTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition, Item, arm_seed

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from mless.capture.branching import Branches
    from mless.capture.scoring import Scorer, Scores
    from mless.redistribution import ArmHandle

#: Rows on a GPU are padded to one of these lengths: eight of them to a doubling, and multiples of the first.
_STEP = 32
#: Devices on which a row fills the machine by itself, so that it runs alone and needs no padding.
ALONE = frozenset(("cpu",))
#: Tokens that run at once on a GPU unless the study says it. Fewer than for other measurements: groups are always full, and the last one of each
#: length mostly with nothing.
_GPU_TOKENS = 4096
#: The kind of groups of patched rows. On a GPU they come after all others: digests are hexadecimal.
_PATCHED = "patched"
#: Rows that are kept once they are made.
_ROWS_KEPT = 64
#: Bytes of states of `none` that are kept to compare with.
_KEPT = 4 << 30
#: Log-probabilities that differ by less are the same, in float32: products of another number of rows may be rounded otherwise.
_SAME = 1e-4


class LikelihoodMeasurement(Measurement):
    """A unit is an item under one condition: the log-probability of every text that is scored after its prompt."""

    doing = "likelihood"
    unit_tables = ("scores", "tokens", "candidates")
    merged = unit_tables
    tables = ("prompts", *unit_tables, "likelihood", "effects")
    sources = ("prompts", *unit_tables)
    pairs_tokens = False
    reads_head = True
    attaches_arm = True
    attaches_changes = True
    takes_cuts = True
    takes_patches = True
    reads_answers = True
    judged_by = ("margins", "flips")

    def __init__(self, spec: StudySpec) -> None:
        super().__init__(spec)
        self.settings = spec.likelihood or LikelihoodTable()
        self._texts: list[Texts] = []
        #: The text of every token of a solution.
        self._token_texts: dict[int, str] = {}
        self._lacks: dict[str, int] = {}
        #: How many tokens an item's texts have after its prompt, in one row.
        self._after: list[int] = []
        self._scorer: Scorer | None = None
        #: Whether all texts of a prompt run in one row; found by `start`.
        self._together = True
        self._alone = True
        self._states: OrderedDict[int, Tensor] = OrderedDict()
        #: By the number of rows at once, and why patched rows run from the first layer on, where they do.
        self._recorded: dict[int | None, Recordings] = {}
        self._why_whole = ""
        #: Whether patched rows begin at the first token that is changed.
        self._skips = False
        #: Whether conditions of the study have patches.
        self._patches = False
        #: By item: those whose patched rows run beside its own.
        self._chunks: dict[int, list[int]] | None = None
        #: The last rows that were made.
        self._made: dict[Any, list[Branches]] = {}
        #: The engine, where mless does not read the model itself.
        self._asking = None if self.settings.by_mless else Asking(spec, self.settings)

    # ---- before anything is loaded

    def check(self, conditions: Sequence[Condition], items: Sequence[Item]) -> None:
        for condition in conditions:
            if condition.samples is not None or condition.temperature is not None:
                raise BadStudy(
                    f"condition {condition.name!r} draws answers, and likelihood reads those that are given; leave it out of --conditions, or use "
                    "mless run accuracy"
                )
        if self._asking is not None:
            self._asking.check(conditions)
        if not any(item.answer or item.solution for item in items):
            raise BadStudy(
                f"likelihood needs items with an answer or a reference solution, and {self.spec.data} has neither; name their fields with --answer-field "
                "and --solution-field"
            )

    def identity(self, found: dict[str, str], items: Sequence[Item]) -> dict[str, str]:
        given = [[item.solution, item.choices] for item in items]
        own = {"likelihood": digest(self.settings.measured()), "solutions": digest(given)}
        return super().identity(found, items) | own

    def analysis(self, items: Sequence[Item]) -> str:
        return digest([self.spec.flips, self.settings.judged()])

    def stored_analysis(self, about: Mapping[str, Any]) -> str:
        return about.get("analysis", "")

    def needs_weights(self) -> bool:
        return self._asking is None or self._asking.needs_weights

    # ---- with the model

    def layers(self, subject: Subject) -> list[int]:
        return list(range(1, (subject.layers or 0) + 1))

    def load(self, subject: Subject, layers: Sequence[int], progress: Progress) -> None:
        if self._asking is not None:
            self._asking.load(subject)
        else:
            subject.load(progress, head=True)

    def prepare(self, bench: Bench) -> None:
        assert bench.subject is not None
        assert bench.prompts is not None
        self._patches = any(one.patch for one in bench.conditions)
        context = bench.subject.context
        reach = [max(rows[number].reach for rows in bench.prompts.values()) for number in range(len(bench.items))]
        # An engine draws a token after the text.
        drawn = 0 if self._asking is None else self.settings.max_new_tokens
        room = [None if context is None else context - one - drawn for one in reach]
        self._texts, lacking = texts_of(
            bench.task,
            bench.items,
            bench.subject.tokenizer,
            system=bench.spec.system,
            others=self.settings.others,
            seed=bench.spec.seed,
            room=room,
            pool=_whole_task(bench),
            distributions=self._asking is None,
        )
        self._token_texts = token_texts((texts.solution for texts in self._texts), bench.subject.tokenizer)
        self._lacks = dict(lacking.lacks)
        self._after = [tokens_after(texts.ids()) for texts in self._texts]
        for line in lacking.lines(len(bench.items)):
            bench.progress.say(line)
        if self._asking is not None and any(texts.solution for texts in self._texts):
            bench.progress.say(without_distributions(self.settings.engine))
        if not any(self._texts):
            raise BadStudy(f"nothing of {bench.task} can be scored: {'; '.join(lacking.lines(len(bench.items)))}")

    def identity_loaded(self, bench: Bench) -> dict[str, str]:
        found = super().identity_loaded(bench)
        if "group tokens in use" in found:
            found["group tokens in use"] = str(self._at_once(bench))
        return {**found, "scored texts": digest([texts.ids() for texts in self._texts])}

    def start(self, bench: Bench, stored: Mapping[str, Any] | None, *, resumed: bool) -> dict[str, str]:
        if self._asking is not None:
            return self._asking.start(bench, self._texts)
        from mless.capture.scoring import Scorer
        from mless.models.experts import has_experts
        from mless.proofs import prove_scores

        self._scorer = Scorer(bench.model)
        # Rows that choose the same expert share its products, so their number would change their bits.
        self._alone = bench.model.device.type in ALONE or has_experts(bench.model.model)
        none = bench.conditions[0]
        scored = [unit for unit in bench.units() if unit.condition is none and self._texts[unit.number]]
        first = min(scored, key=self._length)  # any will do, and the shortest is the quickest
        rows = self._rows(first), self._rows(first, together=False)
        shape = None if self._alone else self._shape(bench, rows[0][0], None)
        self.proofs = prove_scores(bench.model, self._scorer, *rows, shape)
        self._together = self.proofs["texts"] == "in one row"
        self.proofs |= self._prove_changes(bench)
        patched = {"patched runs in use": self.proofs["patched runs"]} if self._patches else {}
        said = "in one row" if self._together else f"in a row each ({self.proofs['why']})"
        bench.progress.say(
            f"proofs hold: log-probabilities as the model's own forward gives them, the texts after a prompt {said}"
        )
        return {"texts in use": self.proofs["texts"], **patched}

    def _prove_changes(self, bench: Bench) -> dict[str, Any]:
        """Cuts and patches do what they say on this model, and a row that has them has the same bits alone and beside others."""
        from mless.intervening import starts_anywhere

        found = prove_changes(bench.model, bench.conditions, bench.prompts or {})
        if self._patches:
            self._why_whole = starts_anywhere(bench.model.model, bench.model.layers, bench.prompts_of("none")[0])
            why = "" if self._why_whole else self._prove_skipping(bench)
            start = f"start at the first layer{' and token' if self._skips else ''} that is changed"
            found["patched runs"] = self._why_whole or (f"{start}, with all tokens: {why}" if why else start)
        for units in self._beside_each_other(bench) if not self._alone else ():
            # As patched rows are compared with `none`, whose states are not there yet, without distances.
            alone = self._score(bench, units[:1], None, changed=True, compared=False)[units[0].key]
            among = self._score(bench, units[::-1], None, changed=True, compared=False)[units[0].key]
            texts = zip((t for one in alone for t in one.texts), (t for one in among for t in one.texts), strict=True)
            if any((a != b).any() for a, b in texts):
                raise ProofFailed(
                    f"{bench.model.label}: under {units[0].condition.name!r} a row's log-probabilities have other bits beside other rows than alone, on "
                    f"{bench.model.device}; try --set group_tokens=1, which runs rows one by one"
                )
        return found

    def _prove_skipping(self, bench: Bench) -> str:
        """Whether patched rows that begin at the first changed token have the numbers of whole rows; if not, why. Sets `_skips`.

        Asked of the shortest item, in each direction of the row from whose patch most layers are computed.
        """
        model = bench.model
        # On a GPU rows run together anyway. Other dtypes round too much to see whether the numbers are the same.
        if model.device.type not in ALONE or model.dtype != "float32":
            return ""
        patched = [unit for unit in bench.units() if unit.condition.patch and self._texts[unit.number]]
        shortest = min(patched, key=self._length).number if patched else 0
        deepest: dict[str, tuple[int, Unit]] = {}
        self._skips = True
        self._recorded.clear()
        recordings = self._recordings(bench, None)
        for unit in (one for one in patched if one.number == shortest):
            base, first = recordings.base_of(unit.condition)
            skipped = recordings.skipped(unit.condition, _source(unit, 0), self._rows(unit)[0])
            if skipped and (base not in deepest or first < deepest[base][0]):
                deepest[base] = first, unit
        whys = [why for _, unit in deepest.values() if (why := self._why_no_skipping(bench, unit))]
        self._skips = bool(deepest) and not whys
        self._recorded.clear()
        return next(iter(whys), "")

    def _why_no_skipping(self, bench: Bench, unit: Unit) -> str:
        found: list[np.ndarray] = []
        for self._skips in (False, True):
            self._recorded.clear()
            try:
                scored = self._score(bench, [unit], None, changed=True, compared=False)[unit.key]
                found.append(np.concatenate([text for one in scored for text in one.texts]))
            except Exception as fault:  # a layer that needs earlier tokens may fail in any way
                if not self._skips or is_out_of_memory(fault):
                    raise
                return f"without earlier ones a layer fails ({first_line(fault)})"
        apart = float(np.abs(found[1] - found[0]).max(initial=0.0))
        return "" if apart <= _SAME else f"without earlier ones log-probabilities differ by {apart:.1g}"

    def _beside_each_other(self, bench: Bench) -> Iterator[list[Unit]]:
        """Some units of each kind of changes, as they run together: patches of one item, and one condition's cuts. Hundreds of patches are a few kinds."""
        seen: set[Any] = set()
        for group in self.groups(bench, bench.units()):
            first = group.units[0].condition
            kind = (bool(first.cut), tuple(one.part for one in first.patch))
            units = [unit for unit in group.units if self._texts[unit.number]][:4]
            if changes(first) and kind not in seen and len(units) > 1:
                seen.add(kind)
                yield units

    @property
    def implementations(self) -> dict[str, str | list[str]]:
        return {"log-probabilities": self.settings.engine}

    def resume(self, bench: Bench, stored: Mapping[str, Any]) -> None:
        super().resume(bench, stored)
        if self._asking is not None:
            self._asking.about = dict(stored.get("engine") or {})

    def stop(self) -> None:
        self._states.clear()  # gigabytes of the device's
        self._recorded.clear()
        if self._scorer is not None:
            self._scorer.forget()
        if self._asking is not None:
            self._asking.stop()

    # ---- which rows run together

    def groups(self, bench: Bench, missing: Sequence[Unit]) -> Iterator[Group]:
        """Rows of like length, of all conditions that run the model alike. The A/A control runs in another order, with other neighbours.

        A row's bits do not depend on its neighbours, so what is missing may be grouped anew.
        """
        if self._asking is not None:
            yield from self._asking.groups(bench, missing)
            return
        order: dict[Any, list[Unit]] = defaultdict(list)
        again = [unit for unit in missing if unit.condition.again]
        Random(f"{bench.spec.seed}/again").shuffle(again)
        alone = _runs_alone(bench)
        for unit in (*(unit for unit in missing if not unit.condition.again), *again):
            kind = digest(repr(unit.condition.arm)) if unit.condition.arm else ""
            items, length = 0, 0 if alone else padded(self._length(unit))
            if self._by_item(bench, unit):
                # Item by item, so that what patches take is recorded once for all of them. Rows have patches of their own, but cuts in common.
                kind, items = _PATCHED, self._beside(bench, unit.number)[0]
                # On a CPU rows with the same prompt follow each other, after those that are not patched.
                length = length or len(unit.prompt or ()) * bool(unit.condition.patch)
            elif changes(unit.condition):
                kind += digest(repr((unit.condition.cut, unit.condition.patch)))
            # `none` comes first: the others are compared with it. The control comes last of its length, so that they fill one group up.
            order[alone and kind != _PATCHED, kind, items, length].append(unit)
        for (_, kind, _, length), units in sorted(order.items(), key=lambda pair: pair[0]):
            size = 1 if alone else max(1, self._at_once(bench) // length)
            if kind == _PATCHED:
                # Rows of one forward start at the first layer that one of them changes.
                units.sort(
                    key=lambda unit: first_changed(unit.condition, len(bench.layers)) if unit.condition.patch else 0
                )
            yield from (Group(units[at : at + size]) for at in range(0, len(units), size))

    def _beside(self, bench: Bench, number: int) -> Sequence[int]:
        """The items whose patched rows run together: on a GPU those whose rows have the same padded lengths, as many as fit into a forward."""
        if self._chunks is None:
            self._chunks = {}
            alike: dict[Any, list[int]] = defaultdict(list)
            plain = [one.name for one in bench.conditions if not changes(one)]
            for item in range(len(bench.items)):
                lengths = [padded(len(bench.prompts_of(name)[item]) + self._after[item]) for name in plain]
                alike[item if _runs_alone(bench) else tuple(sorted(set(lengths)))].append(item)
            for key, items in alike.items():
                size = 1 if isinstance(key, int) else max(1, self._at_once(bench) // max(key))
                for at in range(0, len(items), size):
                    self._chunks |= dict.fromkeys(items[at : at + size], items[at : at + size])
        return self._chunks[number]

    def _by_item(self, bench: Bench, unit: Unit) -> bool:
        """Whether its rows run beside others of the same item, and not beside other items: patched ones, and on a CPU what they are compared with."""
        if not _runs_alone(bench):
            return bool(unit.condition.patch) and not unit.condition.cut
        return self._patches and not (unit.condition.again or unit.condition.arm)

    def stored_with(self, bench: Bench, unit: Unit) -> str:
        return _PATCHED if self._by_item(bench, unit) else unit.condition.name

    def _at_once(self, bench: Bench) -> int:
        return bench.spec.group_tokens or min(bench.group_tokens, _GPU_TOKENS)

    def _length(self, unit: Unit) -> int:
        """How many tokens its row has."""
        assert unit.prompt is not None
        return len(unit.prompt) + self._after[unit.number]

    def _shape(self, bench: Bench, row: Branches, width: int | None) -> tuple[int, int]:
        """Rows × tokens of the forward that a row runs in, from the row alone."""
        length = padded(len(row))
        count = max(1, self._at_once(bench) // length)
        return count if width is None else min(count, width), length

    def _rows(self, unit: Unit, *, together: bool | None = None) -> list[Branches]:
        """The unit's texts in one row, or in a row each; the solution comes first."""
        from mless.capture.branching import branches

        assert unit.prompt is not None
        joined = self._together if together is None else together
        # Many conditions have the same prompt and differ in what they do to the model.
        key = unit.number, unit.prompt.token_ids, unit.prompt.position_ids, unit.prompt.spans, joined
        if key not in self._made:
            ids = self._texts[unit.number].ids()
            if len(self._made) >= _ROWS_KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[key] = [branches(unit.prompt, some) for some in ([ids] if joined else ([one] for one in ids))]
        return [replace(row, prompt=unit.prompt) for row in self._made[key]]

    # ---- scoring

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Tables]]:
        if self._asking is not None:
            for unit, logp in self._asking.measure(bench, group, self._texts):
                yield unit, partial(self._tables, bench, unit, logp, None)
            return
        none = bench.conditions[0]
        units = [unit for unit in group.units if self._texts[unit.number]]
        # What the group is compared with and nobody has kept runs first, in rows of its own.
        needed = {unit.number for unit in units if unit.condition is not none and self._texts[unit.number].solution}
        for number in needed & self._states.keys():
            self._states.move_to_end(number)  # the last ones stay
        first = [
            Unit(none, number, bench.prompts_of(none.name)[number]) for number in sorted(needed - self._states.keys())
        ]
        found = self._score(bench, first, group.width)
        left = [unit for unit in units if unit.key not in found]
        with self._armed(bench, group) as arm:
            found |= self._score(bench, left, group.width, arm, changed=True)
        self._leave()
        for unit in group.units:
            yield unit, partial(self._scored, bench, unit, found.get(unit.key))

    def _armed(self, bench: Bench, group: Group) -> AbstractContextManager[ArmHandle | None]:
        settings = group.units[0].condition.arm
        if settings is None:
            return nullcontext()
        from mless.redistribution import attached

        return attached(bench.model.model, settings)

    def _score(
        self,
        bench: Bench,
        units: Sequence[Unit],
        width: int | None,
        arm: ArmHandle | None = None,
        *,
        changed: bool = False,
        compared: bool = True,
    ) -> dict[str, list[Scores]]:
        """Every unit's rows, by the unit's name. States of `none` are kept. `changed`: with the cuts that all units have in common, and each one's patches."""
        assert self._scorer is not None
        # What ARM pools over more than a token would pool over texts and rows that have nothing to do with each other.
        pooled = arm is not None and arm.settings.scope != "token"
        alone = self._alone or pooled
        batches: dict[Any, list[tuple[Unit, int, Branches]]] = defaultdict(list)
        for unit in units:
            for at, row in enumerate(self._rows(unit, together=self._together and not pooled)):
                shape = (1, len(row)) if alone else self._shape(bench, row, width)
                skipped = 0
                if changed and self._skips and unit.condition.patch:
                    skipped = self._recordings(bench, width).skipped(unit.condition, _source(unit, at), row)
                # Rows with a mask of their own run apart from plain ones: what computes a row must not depend on its neighbours.
                batches[shape, skipped, row.own_mask].append((unit, at, row))
        ready = [
            (shape, skipped, some[first : first + shape[0]])
            for (shape, skipped, _), some in batches.items()
            for first in range(0, len(some), shape[0])
        ]
        found: dict[str, dict[int, Scores]] = defaultdict(dict)
        for (count, length), skipped, batch in ready:
            against = [self._against(bench, unit, at) if compared else None for unit, at, _ in batch]
            tell = None if arm is None else self._telling(bench, arm, [unit for unit, _, _ in batch], count)
            rows = [row for *_, row in batch]
            with ExitStack() as stack:
                if changed:
                    stack.enter_context(self._changed(bench, batch, width, count, length, skipped))
                (unit, at, row), *_ = batch
                if self._by_item(bench, unit) and not unit.condition.patch:
                    source = Source(unit.condition.name, unit.number, at)
                    stack.enter_context(self._recordings(bench, width).recording_while_scoring(source, row))
                scored = self._scorer(rows, against, count=count, length=length, tell=tell, skipped=skipped)
            for (unit, at, _), one in zip(batch, scored, strict=True):
                found[unit.key][at] = one
                if at == 0 and unit.condition is bench.conditions[0]:
                    self._keep(unit.number, one.states)
        return {key: [rows[at] for at in sorted(rows)] for key, rows in found.items()}

    @contextmanager
    def _changed(
        self,
        bench: Bench,
        batch: Sequence[tuple[Unit, int, Branches]],
        width: int | None,
        count: int,
        length: int,
        skipped: int,
    ) -> Generator[None]:
        """The cuts that these rows have in common, and each row's patches."""
        conditions = [unit.condition for unit, *_ in batch]
        with ExitStack() as stack:
            if any(one.patch for one in conditions):
                rows = [(unit.condition, _source(unit, at), row) for unit, at, row in batch]
                stack.enter_context(self._recordings(bench, width).patched(rows, count, length, skipped))
            if cuts := loaded_cuts(conditions[0], bench.model):
                stack.enter_context(cut_rows(bench.model, cuts, [row for *_, row in batch]))
            yield

    def _recordings(self, bench: Bench, width: int | None) -> Recordings:
        """Made once for each width: a row has the same bits in both runs only where both run in the same shape."""
        if width not in self._recorded:
            assert self._scorer is not None

            def row_of(source: Source) -> Branches | None:
                prompt = bench.prompts_of(source.condition)[source.number]
                one = Unit(bench.conditions[0], source.number, prompt)
                rows = self._rows(one)
                return rows[source.at] if source.at < len(rows) else None  # another item may have fewer texts

            self._recorded[width] = Recordings(
                bench.model,
                bench.conditions,
                bench.prompts or {},
                self._scorer,
                row_of,
                lambda row: self._place(bench, row, width),
                lambda number: self._beside(bench, number),
                whole=bool(self._why_whole),
                skips=self._skips,
            )
        return self._recorded[width]

    def _place(self, bench: Bench, row: Branches, width: int | None) -> tuple[int, int]:
        """Rows × tokens of the forward that a patched row, or one that is recorded, runs in."""
        return (1, len(row)) if self._alone else self._shape(bench, row, width)

    def _telling(self, bench: Bench, arm: ArmHandle, units: Sequence[Unit], count: int) -> Callable[[Tensor], None]:
        """ARM draws by a token's place in its own text, and by the item."""
        import torch

        items = [bench.items[unit.number].id for unit in units]
        seeds = torch.tensor([arm_seed(item, arm.settings.seed) for item in items] + [0] * (count - len(items)))

        def tell(places: Tensor) -> None:
            arm.rows(seeds=seeds.to(places.device), positions=places)

        return tell

    def _against(self, bench: Bench, unit: Unit, number: int) -> Tensor | None:
        if number or unit.condition is bench.conditions[0] or not self._texts[unit.number].solution:
            return None
        return self._states[unit.number]

    def _keep(self, number: int, states: Tensor) -> None:
        self._states[number] = states.clone()  # else all that ran beside it would be kept with it
        self._states.move_to_end(number)

    def _leave(self) -> None:
        """Forget the states that were not used for longest, as many as are too many. Between groups: a group needs all of its own."""
        held = sum(states.numel() * states.element_size() for states in self._states.values())
        while held > _KEPT and len(self._states) > 1:
            _, oldest = self._states.popitem(last=False)
            held -= oldest.numel() * oldest.element_size()

    def spare_memory(self) -> None:
        self._states.clear()
        if self._scorer is not None:
            self._scorer.forget()
        for one in self._recorded.values():
            one.sparing()

    def _scored(self, bench: Bench, unit: Unit, scored: Sequence[Scores] | None) -> Mapping[str, pa.Table]:
        """Called while the next groups run: on a GPU the numbers may not be there before."""
        logp = None if scored is None else [text for one in scored for text in one.texts]
        return self._tables(bench, unit, logp, scored[0] if scored else None)

    def _tables(
        self, bench: Bench, unit: Unit, scored: Sequence[np.ndarray] | None, first: Scores | None
    ) -> Mapping[str, pa.Table]:
        names = {**bench.names, "condition": unit.condition.name, "item": bench.items[unit.number].id}
        plain = unit.condition is bench.conditions[0]
        return tables_of_texts(names, self._texts[unit.number], self._token_texts, scored, first, plain=plain)

    def expected(self, bench: Bench, unit: Unit, table: str, found: pa.Table) -> Expected:
        return Expected(bench.texts_of(unit), expected_rows(self._texts[unit.number], table))

    # ---- what is made of it

    def finish(self, bench: Bench) -> None:
        write_effects(bench, self.settings)

    def about(self, bench: Bench) -> dict[str, Any]:
        found = super().about(bench)
        grouped = {"group_tokens": self._at_once(bench)} if "group_tokens" in found else {}
        own = {**found, **grouped, "lacking": self._lacks}
        if self._asking is None:
            return own
        engine = self._asking.about
        return own | {"engine": dict(engine), "device": {"kind": engine.get("device"), "dtype": engine.get("dtype")}}

    @classmethod
    def lines(cls, path: Path, readouts: Mapping[str, type[Measurement]]) -> list[str]:
        return likelihood_lines(path)


def _source(unit: Unit, at: int) -> Source:
    """The row that a patched unit's row takes its values from."""
    return Source(unit.condition.patch[0].source, unit.number, at)


def _runs_alone(bench: Bench) -> bool:
    return (bench.model.device.type if bench.has_model else bench.device or "cpu") in ALONE


def _whole_task(bench: Bench) -> list[Item]:
    """All items of the data, so that others' answers do not depend on how many items are scored; only these where they came from elsewhere."""
    _, every = bench.spec.model_copy(update={"limit": None, "only": []}).load_items()
    there = {item.id: item for item in every}
    return every if all(there.get(item.id) == item for item in bench.items) else bench.items


def padded(length: int) -> int:
    """The next of the usual lengths: multiples of 32, and from 512 on eight of them to a doubling."""
    step = max(_STEP, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step
