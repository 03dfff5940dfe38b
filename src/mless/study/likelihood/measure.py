"""A likelihood study: what a condition does to the log-probabilities of reference solutions and answers, item by item."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from mless.errors import BadStudy, ProofFailed, first_line, is_out_of_memory
from mless.results.schemas import token_texts
from mless.results.storing import Tables
from mless.results.units import Expected
from mless.study.bench import Bench, Group, Measurement, Progress, Unit
from mless.study.changing import prove_changes
from mless.study.conditions import conditions_of
from mless.study.identity import digest
from mless.study.likelihood.asking import Asking
from mless.study.likelihood.rows import changes, first_changed, padded
from mless.study.likelihood.tables import write_effects
from mless.study.likelihood.texts import Texts, texts_of, tokens_after
from mless.study.likelihood.unit_tables import expected_rows, tables_of_texts
from mless.study.likelihood.words import likelihood_lines, without_distributions
from mless.study.spec import LikelihoodTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition, Item

if TYPE_CHECKING:
    import pyarrow as pa

    from mless.capture.scoring import Scores
    from mless.study.likelihood.scoring import RowScoring

#: Devices on which a row fills the machine by itself, so that it runs alone and needs no padding.
ALONE = frozenset(("cpu",))
#: Tokens that run at once on a GPU unless the study says it. Fewer than for other measurements: groups are always full, and the last one of each
#: length mostly with nothing.
_GPU_TOKENS = 4096
#: The kind of groups of patched rows. On a GPU they come after all others: digests are hexadecimal.
_PATCHED = "patched"
#: Rows of a group on a CPU for each lane, where patches do not say which run together.
_FOR_EACH_LANE = 4
#: The same where workers measure: it is not known how many lanes they have.
_FOR_WORKERS = 8
#: Log-probabilities that differ by less are the same, in float32: products of another number of rows may be rounded otherwise.
_SAME = 1e-4


class LikelihoodMeasurement(Measurement):
    """A unit is an item under one condition: the log-probability of every text that is scored after its prompt."""

    doing = "likelihood"
    #: 2: on a CPU rows run side by side, and cut ones from a later token on.
    unit_format = 2
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
        #: The thread that compiles kernels, on a GPU.
        self._compiling: Thread | None = None
        #: Runs the rows; made by `start`.
        self._scoring: RowScoring | None = None
        #: Whether conditions of the study have patches.
        self._patches = False
        #: By item: those whose patched rows run beside its own.
        self._chunks: dict[int, list[int]] | None = None
        #: How many rows run side by side on a CPU.
        self._side_by_side: int | None = None
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
            return
        from mless.study.likelihood.scoring import begin_compiling

        subject.load(progress, head=True)
        assert subject.loaded is not None
        self._compiling = begin_compiling(subject.loaded, conditions_of(self.spec))

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
        from mless.capture.lanes import Lanes
        from mless.models.experts import has_experts
        from mless.proofs import prove_scores
        from mless.study.likelihood.scoring import RowScoring

        lanes = Lanes(bench.model)
        self._scoring = scoring = RowScoring(
            bench,
            self._texts,
            lanes,
            # Rows that choose the same expert share its products, so their number would change their bits.
            alone=bench.model.device.type in ALONE or has_experts(bench.model.model),
            at_once=self._at_once(bench),
            beside=lambda number: self._beside(bench, number),
            records=_runs_alone(bench),
        )
        self._lanes(bench)  # before a lane asks
        none = bench.conditions[0]
        scored = [unit for unit in bench.units() if unit.condition is none and self._texts[unit.number]]
        first = min(scored, key=self._length)  # any will do, and the shortest is the quickest
        rows = scoring.rows(first), scoring.rows(first, together=False)
        shape = None if scoring.alone else scoring.shape(rows[0][0], None)
        self.proofs = prove_scores(bench.model, lanes.first.scorer, *rows, shape)
        scoring.together = self.proofs["texts"] == "in one row"
        if _runs_alone(bench):
            lanes.open(scoring.rows(first)[0])
            self.proofs |= {"rows side by side": len(lanes), "weights packed": lanes.packed}
        self.proofs |= self._prove_changes(bench, scoring)
        patched = {"patched runs in use": self.proofs["patched runs"]} if self._patches else {}
        changed = "; cuts and patches do what they say" if any(changes(one) for one in bench.conditions) else ""
        said = "in one row" if scoring.together else f"in a row each ({self.proofs['why']})"
        bench.progress.say(
            f"proofs hold: log-probabilities as the model's own forward gives them, the texts after a prompt {said}{changed}"
        )
        return {"texts in use": self.proofs["texts"], **patched}

    def _prove_changes(self, bench: Bench, scoring: RowScoring) -> dict[str, Any]:
        """Cuts and patches do what they say on this model, and a row that has them has the same bits alone and beside others."""
        from mless.intervening import starts_anywhere

        if any(changes(one) for one in bench.conditions):
            bench.progress.say("checking on this model that cuts and patches do what they say")
        found = prove_changes(bench.model, bench.conditions, bench.prompts or {})
        if self._patches:
            whole = starts_anywhere(bench.model.model, bench.model.layers, bench.prompts_of("none")[0])
            scoring.whole = bool(whole)
            why = "" if whole else self._prove_skipping(bench, scoring)
            start = f"start at the first layer{' and token' if scoring.skips else ''} that is changed"
            found["patched runs"] = whole or (f"{start}, with all tokens: {why}" if why else start)
        for units in self._beside_each_other(bench) if not scoring.alone else ():
            # As patched rows are compared with `none`, whose states are not there yet, without distances.
            ((_, alone),) = scoring.scored(units[:1], None, changed=True, compared=False)
            beside = scoring.scored(units[::-1], None, changed=True, compared=False)
            among = next(scored for unit, scored in list(beside) if unit is units[0])
            texts = zip((t for one in alone for t in one.texts), (t for one in among for t in one.texts), strict=True)
            if any((a != b).any() for a, b in texts):
                raise ProofFailed(
                    f"{bench.model.label}: under {units[0].condition.name!r} a row's log-probabilities have other bits beside other rows than alone, on "
                    f"{bench.model.device}; try --set group_tokens=1, which runs rows one by one"
                )
        return found

    def _prove_skipping(self, bench: Bench, scoring: RowScoring) -> str:
        """Whether patched rows that begin at the first changed token have the numbers of whole rows; if not, why. Sets `scoring.skips`.

        Asked of the shortest item, in each direction of the row from whose patch most layers are computed.
        """
        model = bench.model
        # On a GPU rows run together anyway. Other dtypes round too much to see whether the numbers are the same.
        if model.device.type not in ALONE or model.dtype != "float32":
            return ""
        changed = [unit for unit in bench.units() if changes(unit.condition) and self._texts[unit.number]]
        shortest = min(changed, key=self._length).number if changed else 0
        deepest: dict[Any, tuple[int, Unit]] = {}
        scoring.skips = True
        scoring.record_anew()
        recordings = scoring.recordings(None)
        for unit in (one for one in changed if one.number == shortest):
            base, first = recordings.base_of(unit.condition)
            kind = base, frozenset((cut.to, cut.heads is None) for cut in unit.condition.cut)
            if recordings.skipped(unit, 0, scoring.rows(unit)[0]) and (kind not in deepest or first < deepest[kind][0]):
                deepest[kind] = first, unit
        units = [unit for _, unit in deepest.values()]
        why = _why_no_skipping(scoring, units) if units else ""
        scoring.skips = bool(units) and not why
        scoring.record_anew()
        return why

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
        self._end_compiling()
        if self._asking is not None:
            self._asking.about = dict(stored.get("engine") or {})

    def stop(self) -> None:
        self._end_compiling()
        if self._scoring is not None:
            self._scoring.close()
        if self._asking is not None:
            self._asking.stop()

    def _end_compiling(self) -> None:
        """A study that follows may load its own model and capture graphs, which another thread's launches would break."""
        if self._compiling is not None:
            self._compiling.join()
            self._compiling = None

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
            elif changes(unit.condition):
                kind += digest(repr((unit.condition.cut, unit.condition.patch)))
            # `none` comes first: the others are compared with it. The control comes last of its length, so that they fill one group up.
            order[alone and kind != _PATCHED, kind, items, length].append(unit)
        for (_, kind, _, length), units in sorted(order.items(), key=lambda pair: pair[0]):
            size = self._group_of_lanes(bench) if alone else max(1, self._at_once(bench) // length)
            if kind == _PATCHED:
                units.sort(key=lambda unit: _turn(unit, len(bench.layers), alone=alone))
                size = len(units) if alone else size
            yield from (Group(units[at : at + size]) for at in range(0, len(units), size))

    def _beside(self, bench: Bench, number: int) -> Sequence[int]:
        """The items whose patched rows run together: on a GPU those whose rows have the same padded lengths, as many as fit into a forward; on a CPU
        one for each lane.
        """
        if _runs_alone(bench):
            lanes = self._lanes(bench)
            first = number - number % lanes
            return range(first, min(first + lanes, len(bench.items)))
        if self._chunks is None:
            self._chunks = {}
            alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
            plain = [one.name for one in bench.conditions if not changes(one)]
            for item in range(len(bench.items)):
                each = {padded(len(bench.prompts_of(name)[item]) + self._after[item]) for name in plain}
                alike[tuple(sorted(each))].append(item)
            for lengths, items in alike.items():
                size = max(1, self._at_once(bench) // max(lengths))
                for at in range(0, len(items), size):
                    self._chunks |= dict.fromkeys(items[at : at + size], items[at : at + size])
        return self._chunks[number]

    def _group_of_lanes(self, bench: Bench) -> int:
        """Rows of a group on a CPU: lanes wait for each other at its end."""
        return _FOR_WORKERS if not bench.has_model else self._lanes(bench) * _FOR_EACH_LANE

    def _lanes(self, bench: Bench) -> int:
        """How many rows run side by side on a CPU. `start` asks first: a lane that asked would see its own number of threads."""
        if self._side_by_side is None:
            from mless.capture.lanes import lanes_here

            self._side_by_side = lanes_here() if bench.has_model else 1
        return self._side_by_side

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

    # ---- scoring

    def measure(self, bench: Bench, group: Group) -> Iterator[tuple[Unit, Tables]]:
        if self._asking is not None:
            for unit, logp in self._asking.measure(bench, group, self._texts):
                yield unit, partial(self._tables, bench, unit, logp, None)
            return
        assert self._scoring is not None
        scoring, none = self._scoring, bench.conditions[0]
        left = {unit.key: unit for unit in group.units}
        for unit in group.units:
            if not self._texts[unit.number]:
                yield left.pop(unit.key), partial(self._scored, bench, unit, None)
        units = list(left.values())
        # What the group is compared with and nobody has kept runs first, in rows of its own.
        needed = {unit.number for unit in units if unit.condition is not none and self._texts[unit.number].solution}
        prompts = bench.prompts_of(none.name)
        first = [Unit(none, number, prompts[number]) for number in scoring.lacking(needed)]
        others = [unit for unit in units if unit.key not in {one.key for one in first}]
        # What changed rows take is recorded before rows take it.
        plain = [unit for unit in others if not changes(unit.condition)]
        changed_ones = [unit for unit in others if changes(unit.condition)]
        for some, changed in ((first, False), (plain, True), (changed_ones, True)):
            arm = group.units[0].condition.arm if changed else None
            for unit, scored in scoring.scored(some, group.width, arm, changed=changed):
                if unit.key in left:
                    yield left.pop(unit.key), partial(self._scored, bench, unit, scored)
        scoring.forget_oldest()

    def spare_memory(self) -> None:
        if self._scoring is not None:
            self._scoring.spare_memory()

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


def _why_no_skipping(scoring: RowScoring, units: Sequence[Unit]) -> str:
    found: list[dict[str, np.ndarray]] = []
    # Both ways take from the same recordings.
    for scoring.skips in (False, True):
        try:
            scored = scoring.scored(units, None, changed=True, compared=False)
            found.append(
                {unit.key: np.concatenate([text for one in own for text in one.texts]) for unit, own in scored}
            )
        except Exception as fault:  # a layer that needs earlier tokens may fail in any way
            if is_out_of_memory(fault):
                raise
            if not scoring.skips:
                # Perhaps only because of what rows that begin later take. Without that a fault is the study's.
                scoring.record_anew()
                list(scoring.scored(units, None, changed=True, compared=False))
            return f"without earlier ones a layer fails ({first_line(fault)})"
    whole, later = found
    apart = max(float(np.abs(later[key] - own).max(initial=0.0)) for key, own in whole.items())
    return "" if apart <= _SAME else f"without earlier ones log-probabilities differ by {apart:.1g}"


def _turn(unit: Unit, layers: int, *, alone: bool) -> tuple[int, ...]:
    """When the unit's rows run within their group."""
    # Rows of one forward start at the first layer that one of them changes.
    first = first_changed(unit.condition, layers) if unit.condition.patch else 0
    # On a CPU item by item, as they run: what others take, then rows that have the same prompt.
    return (unit.number, changes(unit.condition), len(unit.prompt or ()), first) if alone else (first,)


def _runs_alone(bench: Bench) -> bool:
    return (bench.model.device.type if bench.has_model else bench.device or "cpu") in ALONE


def _whole_task(bench: Bench) -> list[Item]:
    """All items of the data, so that others' answers do not depend on how many items are scored; only these where they came from elsewhere."""
    _, every = bench.spec.model_copy(update={"limit": None, "only": []}).load_items()
    there = {item.id: item for item in every}
    return every if all(there.get(item.id) == item for item in bench.items) else bench.items
