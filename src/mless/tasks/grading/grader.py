"""The grader of mathematical answers: pairs are judged in guarded worker processes, each distinct pair once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mless.errors import BadData, BadStudy
from mless.guarded import Guarded, Replaced, ask_all, usable_cores
from mless.tasks.extracting import Extracted
from mless.tasks.grading.base import AnswerGrader, Grade, text_of
from mless.tasks.grading.comparing import judge
from mless.tasks.grading.worker import started

#: Workers at once, at most: each takes about 150 MB.
_MOST_WORKERS = 32
#: Pairs that are worth another worker: judging them takes about as long as its start.
PAIRS_PER_WORKER = 200
#: So many pairs of plain numbers take as long as one that may need the symbolic rule.
_PLAIN_PER_PAIR = 40
_PLAIN = re.compile(r"\s*[-+]?[\d.,]{1,40}\s*", re.ASCII)
#: Grades that are kept for later calls, at most, and the characters of a pair that is.
_MOST_KNOWN = 200_000
_KNOWN_LENGTH = 10_000
_NO_ANSWER = Grade(False, "no answer", None, None, False)


class _Unsettled(Exception):
    """Text and numbers do not say: the pair needs the symbolic rule."""


@dataclass(slots=True)
class Grader(AnswerGrader):
    """Grades answers in workers, which start when a pair needs one, and again after they were killed.

    ``limit`` is in seconds per pair, ``memory`` in bytes per worker (where the system can limit it). ``workers`` is the most of them that
    `grade_many` starts; None is one for each core that may be used. It starts fewer for few pairs. Verdicts depend neither on the order of
    pairs nor on the number of workers; only whether a pair runs out of time depends on the machine, and ``why`` tells.
    """

    limit: int | float = 5.0
    memory: int = 2 * 1024**3
    symbolic: bool = True
    workers: int | None = None
    _worker: Replaced = field(init=False, repr=False)
    _known: dict[tuple[str, str], Grade] = field(default_factory=dict[tuple[str, str], Grade], init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.limit < 3600:
            raise BadStudy(f"grading: the limit per pair must be between 0 and 3600 seconds, got {self.limit}")
        if self.workers is not None and self.workers < 1:
            raise BadStudy(f"grading: the number of workers must be 1 or more, got {self.workers}")
        self._worker = Replaced(self._start)

    def _start(self) -> Guarded:
        return started(float(self.limit), self.memory)

    def __enter__(self) -> Grader:
        return self

    def close(self) -> None:
        """Ends the worker. The next pair would start another."""
        with self._lock:
            self._worker.end()

    def grade(self, extracted: Extracted | str | None, reference: str) -> Grade:
        """Judges one answer against its reference."""
        pair = text_of(extracted), reference
        if known := self._known_or_empty(pair):
            return known
        try:
            return judge(*pair, _unsettled if self.symbolic else None)
        except _Unsettled:
            with self._lock:
                return self._known.get(pair) or self._grade_of(pair, self._worker.ask(*pair))

    def grade_many(
        self, pairs: Sequence[tuple[Extracted | str | None, str]], progress: Callable[[int, int], None] | None = None
    ) -> list[Grade]:
        """One grade per pair, in order. Each distinct pair is judged once, in several workers where there are many; `progress` counts those.

        The pairs are asked for one by one, and workers start as soon as those seen so far are worth them: where pairs are still being found, that
        goes on meanwhile.
        """
        asked: list[tuple[str, str]] = []
        grades: dict[tuple[str, str], Grade] = {}
        to_judge: dict[tuple[str, str], None] = {}
        workers: list[Replaced] = []
        most = (self.workers or min(usable_cores(), _MOST_WORKERS)) if self.symbolic else 0
        plain = 0

        def keep(pair: tuple[str, str], grade: Grade) -> None:
            grades[pair] = grade
            if progress is not None:
                progress(len(grades), total)

        try:
            for extracted, reference in pairs:
                asked.append(pair := (text_of(extracted), reference))
                if pair in grades or pair in to_judge:
                    continue
                if known := self._known_or_empty(pair):
                    grades[pair] = known
                    continue
                to_judge[pair] = None
                plain += all(_PLAIN.fullmatch(side) for side in pair)
                if len(workers) < min(most, _workers_for(len(to_judge), plain)):
                    workers.append(Replaced(self._start))
                    workers[-1].begin()
            total, judging = len(grades) + len(to_judge), list(to_judge)
            if workers:
                ask_all(workers, judging, lambda n, reply: keep(judging[n], self._grade_of(judging[n], reply)))
            else:
                for pair in judging:
                    keep(pair, self.grade(*pair))
        finally:
            for worker in workers:
                worker.end()
        return [grades[pair] for pair in asked]

    def _known_or_empty(self, pair: tuple[str, str]) -> Grade | None:
        """The grade of a pair that needs no judging."""
        answer, reference = pair
        if not reference.strip():
            raise BadData("grading: the reference answer is empty; remove the item, or say --answer-field NAME")
        return self._known.get(pair) if answer.strip() else _NO_ANSWER

    def _grade_of(self, pair: tuple[str, str], reply: dict[str, Any]) -> Grade:
        """What a worker said of a pair. Where the worker had to be ended, the pair is judged without the symbolic rule, and why is said."""
        grade = Grade(*reply["grade"]) if "grade" in reply else judge(*pair, lambda *_: reply["fault"])
        if len(self._known) < _MOST_KNOWN and sum(map(len, pair)) <= _KNOWN_LENGTH:
            self._known[pair] = grade
        return grade


def _workers_for(pairs: int, plain: int) -> int:
    """How many workers so many pairs are worth, of which some are plain; 0 where this process is as quick, with one for what it cannot settle."""
    work = pairs - plain + plain // _PLAIN_PER_PAIR
    return 0 if work <= PAIRS_PER_WORKER else -(-work // PAIRS_PER_WORKER)


def _unsettled(answer: str, reference: str) -> bool:
    raise _Unsettled
