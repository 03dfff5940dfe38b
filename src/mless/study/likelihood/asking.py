"""Log-probabilities from an engine that has the model itself: vLLM, or a server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np

from mless.engines import ENGINES, Opening, Request, ScoreRequest, ScoringEngine
from mless.engines.base import closed
from mless.errors import BadPlugin, BadStudy
from mless.study.bench import Bench, Group, Unit
from mless.study.identity import digest
from mless.study.likelihood.texts import Texts
from mless.study.spec import LikelihoodTable, StudySpec
from mless.study.subject import Subject
from mless.values import Condition

#: Units that are asked for at once. Workers share out groups, and an engine that is given few texts waits for the last of them.
_UNITS = 64
#: What an engine says of itself that becomes part of the study's identity.
_KEPT = ("dtype", "device", "tensor_parallel")

#: log p of each token, text by text in the order of `Texts.ids`.
LogProbabilities = list[np.ndarray]


class Asking:
    """A likelihood study's engine. It tells of given tokens only: whole distributions, and what compares them, are left out."""

    def __init__(self, spec: StudySpec, settings: LikelihoodTable) -> None:
        self._spec, self._settings = spec, settings
        self._kind = ENGINES.get(settings.engine)
        self._engine: ScoringEngine | None = None
        #: What the engine says of itself.
        self.about: dict[str, Any] = {}

    @property
    def needs_weights(self) -> bool:
        return self._kind.needs_weights

    # ---- before anything is loaded

    def check(self, conditions: Sequence[Condition]) -> None:
        """Refuse what the engine cannot do."""
        name = self._settings.engine
        if not self._kind.needs_weights and self._spec.tokenizer is None:
            raise BadStudy(
                f"log-probabilities are those of tokens, and the engine {name} is sent token ids: give the served model's tokenizer, --tokenizer DIR"
            )
        for condition in conditions:
            self._kind.check_arm(condition)
            self._kind.check_changes(condition, name)
        moved = [one.name for one in conditions if one.of_kind.moves or one.hidden]
        if moved and not self._kind.takes_positions:
            left = ",".join(one.name for one in conditions if one.name not in moved and not one.again)
            raise BadStudy(
                f"condition {moved[0]!r} shifts positions or hides tokens, which the engine {name} cannot do; leave it out, as --conditions {left}, or use "
                "--engine hf"
            )

    # ---- the engine

    def load(self, subject: Subject) -> None:
        subject.load_tokenizer()

    def start(self, bench: Bench, texts: Sequence[Texts]) -> dict[str, str]:
        """Open the engine, and have one text scored, so that a server that cannot do it is refused before anything is stored."""
        subject, spec = bench.subject, bench.spec
        assert subject is not None
        again = {condition.name for condition in bench.conditions if condition.again}
        asked = [one for unit in bench.units() for one in requests_of(bench, unit, texts)]
        given = Opening(
            model=spec.model,
            settings=self._settings,
            longest=max(len(one.whole) for one in asked),
            most=sum(1 for one in asked if one.prompt.condition not in again),
            conditions=tuple(bench.conditions),
            described=subject.described,
            tokenizer=subject.tokenizer,
            tokenizer_name=spec.tokenizer,
            dtype=spec.dtype,
            seed=spec.seed,
            server_named=spec.names_server,
            scoring=True,
            say=bench.progress.say,
        )
        engine = self._kind.open(given).__enter__()
        if not isinstance(engine, ScoringEngine):
            engine.__exit__(None, None, None)
            raise BadPlugin(
                f"engine {self._settings.engine!r} is registered with scores = True, but {type(engine).__name__} has no method score; give it one"
            )
        self._engine = engine
        list(engine.score([min(asked, key=lambda one: len(one.whole))]))
        self.about = engine.about()
        return {f"{key} in use": str(self.about[key]) for key in _KEPT if key in self.about}

    def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self.about |= closed(engine)

    # ---- scoring

    def groups(self, bench: Bench, missing: Sequence[Unit]) -> Iterator[Group]:
        """Units that run the model alike. The A/A control runs in another order, with another number of texts at once."""
        found: dict[tuple[bool, str], list[Unit]] = defaultdict(list)
        for unit in missing:
            arm = digest(repr(unit.condition.arm)) if unit.condition.arm else ""
            found[unit.condition.again, arm].append(unit)
        width: int = self.about.get("max_num_seqs") or self._settings.concurrency
        for (again, _), units in sorted(found.items(), key=lambda pair: pair[0]):
            if again:
                Random(f"{bench.spec.seed}/again").shuffle(units)
            for at in range(0, len(units), _UNITS):
                yield Group(units[at : at + _UNITS], max(1, width * 3 // 4) if again else None)

    def measure(
        self, bench: Bench, group: Group, texts: Sequence[Texts]
    ) -> Iterator[tuple[Unit, LogProbabilities | None]]:
        """Each unit as soon as all of its texts are scored; None where it has none."""
        assert self._engine is not None
        asked: list[ScoreRequest] = []
        waiting: dict[tuple[str, str], tuple[Unit, LogProbabilities, set[int]]] = {}
        for unit in group.units:
            own = requests_of(bench, unit, texts)
            if not own:
                yield unit, None
                continue
            asked += own
            left = {one.prompt.sample for one in own}
            waiting[own[0].key[:2]] = unit, [np.empty(0) for _ in texts[unit.number].ids()], left
        for scored in self._engine.score(asked, live=group.width):
            unit, logp, left = waiting[scored.condition, scored.item]
            logp[scored.sample] = np.array(scored.logp, np.float64)
            left.discard(scored.sample)
            if not left:
                yield unit, logp


def requests_of(bench: Bench, unit: Unit, texts: Sequence[Texts]) -> list[ScoreRequest]:
    """A request for every text of a unit that has tokens, numbered as in `Texts.ids`."""
    prompt, condition = unit.prompt, unit.condition
    assert prompt is not None
    return [
        ScoreRequest(
            Request(
                condition.name,
                bench.items[unit.number].id,
                number,
                token_ids=prompt.token_ids,
                position_ids=prompt.position_ids,
                hidden=prompt.hidden_filler,
                arm=condition.arm,
            ),
            ids,
        )
        for number, ids in enumerate(texts[unit.number].ids())
        if ids and texts[unit.number]
    ]
