"""Many answers are judged in several workers: each distinct pair once, with the same tables whatever their number."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import guarded_worker
from guarded_worker import DIES, HANGS, WAITS, kill_waiting
from mless import tasks
from mless.errors import BadStudy, MlessError
from mless.guarded import Guarded
from mless.results import sealing
from mless.results.schemas import REPLIES
from mless.study.accuracy.judging import judged
from mless.study.spec import AccuracyTable
from mless.tasks.grading import NOTES, Grade, Grader, grader, worker
from mless.values import Item

EQUAL = Grade(True, "same value", True, False, True)


class Watched:
    """Keeps the real workers, and what reached them."""

    def __init__(self) -> None:
        self.made: list[Guarded] = []
        self.lines: list[bytes] = []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """With little work for each worker, and workers that can be made to die."""
    seen, start, ask = Watched(), grader.started, Guarded.ask_in_turn

    def started(limit: float, memory: int) -> Guarded:
        seen.made.append(start(limit, memory))
        return seen.made[-1]

    def ask_in_turn(self: Guarded, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        for line, reply in zip(lines, ask(self, lines), strict=False):
            seen.lines.append(line)
            yield reply

    monkeypatch.setattr(grader, "started", started)
    monkeypatch.setattr(Guarded, "ask_in_turn", ask_in_turn)
    monkeypatch.setattr(grader, "PAIRS_PER_WORKER", 10)
    monkeypatch.setattr(worker, "__name__", guarded_worker.__name__)
    return seen


def sums(n: int) -> list[tuple[str, str]]:
    return [(f"{k}+x", f"x+{k}") for k in range(1, n + 1)]


def replies(texts: Sequence[str]) -> pa.Table:
    common = {"model": "m", "task": "own", "condition": "none", "sample": 0, "n_tokens": 4, "finish": "stop"}
    rows = [common | {"item": f"q{n}", "seed": n, "text": text} for n, text in enumerate(texts)]
    return pa.Table.from_pylist(rows, schema=REPLIES)


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_tables_do_not_depend_on_the_number_of_workers(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    answers = [*(f"{k}+x" for k in range(40)), DIES, "7", r"\frac{1}{2}", "five", r"5\text{ m}", "3 4", "x=3", ""]
    texts = [rf"So it is $\boxed{{{answer}}}$." for answer in [*answers, *(one for one in answers if one != DIES), "8"]]
    right = [*(f"x+{k + k % 2}" for k in range(40)), "x+1", "7.0", "0.5", "5", r"5\text{ cm}", "3", "3", "1"]
    items = [Item(f"q{n}", "?", answer, f"c{n % 2}") for n, answer in enumerate([*right, *reversed(right)])]
    tables: dict[int, bytes] = {}
    for cores in range(1, most + 1):
        monkeypatch.setattr(grader, "usable_cores", lambda cores=cores: cores)
        watched.made.clear()
        table = judged(replies(texts), items, "own", AccuracyTable())
        tables[cores] = sealing.encode(table)
        # DIES kills a worker and the one after it; the last may need no other
        assert cores + 1 <= len(watched.made) <= cores + 2
    assert set(tables.values()) == {tables[1]}
    monkeypatch.setattr(grader, "PAIRS_PER_WORKER", 1_000)  # one by one, most of them in this process
    assert sealing.encode(judged(replies(texts), items, "own", AccuracyTable())) == tables[1]
    why = table.column("why").to_pylist()
    assert why[40] == f"other text; {NOTES['crash']}"
    assert {"same value", "other value", "same number", "no answer"} < set(why)


def test_each_distinct_pair_is_judged_once(watched: Watched) -> None:
    pairs = sums(30)
    heard: list[tuple[int, int]] = []
    with Grader(workers=2, limit=20) as one:
        grades = one.grade_many([*pairs, *reversed(pairs), *pairs], lambda done, total: heard.append((done, total)))
        assert grades == [EQUAL] * 90
        assert one.grade_many(pairs[:20]) == [EQUAL] * 20  # known already
        assert one.grade(*pairs[25]) == EQUAL
    assert len(watched.lines) == len(set(watched.lines)) == 30
    assert len(watched.made) == 2
    assert heard == [(done, 30) for done in range(1, 31)]


@pytest.mark.parametrize(
    "bomb", [HANGS, pytest.param(r"9^{9^{9^9}}", marks=pytest.mark.slow)], ids=["sleeps", "computes"]
)
def test_a_bomb_costs_its_own_answer_only(watched: Watched, bomb: str) -> None:
    pairs = sums(40)
    pairs[5] = bomb, "x+1"
    with Grader(workers=2, limit=3) as one:
        grades = one.grade_many(pairs)
    assert grades.pop(5).why == f"other text; {NOTES['time']}"
    assert grades == [EQUAL] * 39
    assert all(one._process.poll() is not None for one in watched.made)


def test_a_killed_worker_is_replaced(watched: Watched, tmp_path: Path) -> None:
    sign = tmp_path / "waits"

    def kill(done: int, total: int) -> None:
        if done == 1:
            kill_waiting(sign)

    with Grader(workers=2, limit=300) as one:
        grades = one.grade_many([(WAITS, str(sign)), *sums(120)], kill)
    assert not grades[0].correct
    assert grades[1:] == [EQUAL] * 120
    assert len(watched.made) == 3


def test_few_pairs_start_one_worker_or_none(watched: Watched) -> None:
    with Grader(workers=3, limit=20) as one:
        assert all(grade.correct for grade in one.grade_many([(f"{k}.0", str(k)) for k in range(300)]))
        assert watched.made == []
        assert one.grade_many(sums(10)) == [EQUAL] * 10
        assert len(watched.made) == 1
        assert one.grade_many([(f"{k}+y", f"y+{k}") for k in range(1, 15)]) == [EQUAL] * 14
        assert len(watched.made) == 3


def test_without_the_symbolic_rule_no_worker_starts(watched: Watched) -> None:
    with Grader(symbolic=False, workers=2) as one:
        assert {grade.why for grade in one.grade_many(sums(50))} == {f"other text; {NOTES['off']}"}
    assert watched.made == []


def test_a_worker_that_does_not_start_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "__name__", "no_such_module_at_all")
    monkeypatch.setattr(grader, "PAIRS_PER_WORKER", 10)
    with Grader(workers=2) as one, pytest.raises(MlessError, match=r"no_such_module_at_all.*pip install math-verify"):
        one.grade_many(sums(50))


def test_a_number_of_workers_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(BadStudy, match="the number of workers must be 1 or more, got 0"):
        Grader(workers=0)


def test_texts_are_not_held_a_second_time_while_they_are_judged() -> None:
    texts = [rf"{'So we go on. ' * 600}It is \boxed{{{n % 50}}}." for n in range(500)]
    table = replies(texts)
    items = [Item(f"q{n}", "?", "7") for n in range(len(texts))]
    of_texts = sum(map(len, texts))
    del texts
    tracemalloc.start()
    try:
        found = judged(table, items, "own", AccuracyTable())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(found.column("correct").to_pylist()) == 10
    assert peak < of_texts / 3


def test_workers_start_while_answers_are_still_being_found(watched: Watched) -> None:
    started: list[int] = []

    class Found(list[tuple[str, str]]):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            for pair in super().__iter__():
                yield pair
                started.append(len(watched.made))

    with Grader(workers=2, limit=20) as one:
        assert one.grade_many(Found(sums(30))) == [EQUAL] * 30
    assert started[9:13] == [0, 1, 2, 2]
    assert len(watched.made) == 2


def test_a_fault_while_answers_are_being_found_leaves_no_worker_behind(watched: Watched) -> None:
    class Found(list[tuple[str, str]]):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            yield from super().__iter__()
            raise KeyboardInterrupt

    with Grader(workers=2, limit=20) as one, pytest.raises(KeyboardInterrupt):
        one.grade_many(Found(sums(30)))
    assert len(watched.made) == 2
    assert all(one._process.poll() is not None for one in watched.made)


def test_a_grader_of_your_own_may_take_any_pair_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Backwards(Grader):
        def grade_many(self, pairs: Sequence[Any], progress: Any = None) -> list[Grade]:
            seen.extend([len(pairs), pairs[-1][1], [pair[1] for pair in pairs[:2]], pairs[0][0].text])
            return [self.grade(*pair) for pair in pairs]

    monkeypatch.setattr(tasks.GRADERS, "get", lambda name: Backwards)
    table = judged(
        replies(["so 4", "so 5", "so 7"]), [Item(f"q{n}", "?", str(n + 4)) for n in range(3)], "own", AccuracyTable()
    )
    assert seen == [3, "6", ["4", "5"], "4"]
    assert table.column("correct").to_pylist() == [True, True, False]
