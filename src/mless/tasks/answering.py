"""Answers as a task writes them: an item's own, its reasoning before it, and other items' answers of the same kind to compare it with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mless.errors import BadData
from mless.tasks.extracting import TASK_RULES, answer_begins, extract
from mless.tasks.grading.by_tests import Problem
from mless.tasks.grading.parts import shape, split
from mless.tasks.grading.reading import bare, read, vote_of

if TYPE_CHECKING:
    import numpy as np

    from mless.values import Item

AnswerKind = Literal["integer", "decimal", "fraction", "letter", "tuple", "expression", "text"]

# (B), B, \text{(B)}, \textbf{B.}
_LETTER = re.compile(r"(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox) ?\{ ?)?\(?([A-Z])[.)]?\)?(?: ?\})?")
_WHOLE = re.compile(r"[-+]?\d+(?: \d{3})*", re.ASCII)
_DECIMAL = re.compile(r"[-+]?\d*\.\d*(?:\\overline.*)?", re.ASCII)
#: How quickly an answer of another length becomes unlikely: with 1 / (1 + characters of difference) to this power.
_LENGTH_POWER = 3


def letter_of(number: int) -> str:
    """``A`` for option 0."""
    return chr(ord("A") + number)


def reference_of(item: Item) -> str:
    """The answer itself, where the data give a worked solution that ends in it (GSM8K's ``#### 18``)."""
    answer = (item.answer or "").strip()
    return extract(answer, ("hashes", "boxed")).text or answer


def answer_text(task: str, item: Item, *, system: str | None = None) -> str | None:
    """The answer in the task's own form: ``#### 18`` in GSM8K, else ``\\boxed{18}``; of a multiple-choice question the letter, ``\\boxed{B}``.

    A `system` text that asks for no box gets the answer alone. None where there is no answer, an empty one, or one that is code.
    """
    value = _value(task, item)
    return None if value is None else _Form(task, item, system).around(value)


def reasoning(item: Item) -> str | None:
    """The solution up to its answer: before the last box or ``####``. None where it has neither, or where there is no solution."""
    begins = answer_begins(item.solution) if item.solution is not None else None
    return item.solution[:begins] if item.solution is not None and begins is not None else None


def answer_kind(answer: str) -> AnswerKind:
    """What an answer is, from how it is written: ``1{,}000``, ``$18`` and ``50\\%`` are integers, ``(1, 2]`` and ``1, 2`` are tuples."""
    if _LETTER.fullmatch(bare(answer)):
        return "letter"
    one = read(answer)
    if one.words is not None:
        return "text"
    if one.number is not None:
        if _WHOLE.fullmatch(one.text):
            return "integer"
        if r"\frac" in one.text or "/" in one.text:
            return "fraction"
        if _DECIMAL.fullmatch(one.text):
            return "decimal"
    return "expression" if shape(one.text)[0] == "other" else "tuple"


def other_answers(
    task: str, items: Sequence[Item], number: int, k: int = 16, seed: int = 0, *, system: str | None = None
) -> tuple[str, ...]:
    """`AnswerPool.others` for one item. For many items make the pool once."""
    return AnswerPool(task, items, system=system).others(number, k, seed)


class AnswerPool:
    """The answers of all items of a task, to draw wrong answers of an item from."""

    def __init__(self, task: str, items: Sequence[Item], *, system: str | None = None) -> None:
        self._task, self._items, self._system = task, items, system
        self._answers = [None if (value := _value(task, item)) is None else _Answer.of(value) for item in items]
        by_kind: dict[AnswerKind, dict[str, str]] = {}
        for item, one in zip(items, self._answers, strict=True):
            if one is not None and item.choices is None:
                spellings = by_kind.setdefault(one.kind, {})
                # The shortest spelling, whatever the items' order.
                known = spellings.get(one.value, one.text)
                spellings[one.value] = min(known, one.text, key=lambda text: (len(text), text))
        self._others = {kind: _Others.of(spellings) for kind, spellings in by_kind.items()}

    def others(self, number: int, k: int = 16, seed: int = 0) -> tuple[str, ...]:
        """Up to `k` answers of other items, ready to append: of the same kind as item `number`'s (from 0), in the same form.

        Their values differ from each other and from the item's own. They are drawn at random, those of like length more often. The draw
        depends on `seed`, the item's id and the values there are: not on the items' order. Another item changes one of them at most.
        For a multiple-choice question they are the letters of the other options. Fewer where there are not enough.
        """
        item, own = self._items[number], self._answers[number]
        if own is None or k < 1:
            return ()
        if item.choices is not None:
            there = _Others.of({letter_of(n): letter_of(n) for n in range(len(item.choices))})
        else:
            there = self._others[own.kind]
        form = _Form(self._task, item, self._system)
        return tuple(form.around(text) for text in there.drawn(own, k, f"{seed}/other answers/{item.id}"))


@dataclass(frozen=True, slots=True)
class _Form:
    """What stands around an answer."""

    task: str
    item: Item
    system: str | None

    def around(self, value: str) -> str:
        answer = self.item.answer or ""
        if self.item.choices is None and (self.task.startswith("gsm8k") or extract(answer, ("hashes",)).text):
            return f"#### {value}"
        boxed = self.system is None or "boxed" in self.system
        return f"\\boxed{{{value}}}" if boxed else value


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    kind: AnswerKind
    #: Answers with one value are one answer.
    value: str

    @classmethod
    def of(cls, text: str) -> _Answer:
        if letter := _LETTER.fullmatch(bare(text)):
            return cls(text, "letter", letter[1])
        # What the grader takes for right is no other answer: 50 for 50%, and a list in another order.
        value = vote_of(text).removesuffix("%")
        unordered = shape(value)[0] == "list"
        return cls(text, answer_kind(text), ", ".join(sorted(split(value))) if unordered else value)


@dataclass(frozen=True, slots=True)
class _Others:
    """Distinct answers of one kind, in the order of their values."""

    values: tuple[str, ...]
    texts: tuple[str, ...]
    lengths: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, spellings: dict[str, str]) -> _Others:
        import numpy as np

        values = tuple(sorted(spellings))
        texts = tuple(spellings[value] for value in values)
        lengths = np.array([len(text) for text in texts], np.int64)
        return cls(values, texts, lengths, np.array([_hash(value) for value in values], np.uint64))

    def drawn(self, own: _Answer, k: int, key: str) -> list[str]:
        """Up to `k` of them without `own`, drawn with weights: the k earliest of as many exponential times, each from its own hash."""
        import numpy as np

        shares = (_mixed(self.hashes ^ np.uint64(_hash(key))) + np.float64(0.5)) / 2.0**64
        times = -np.log(shares) * (1.0 + np.abs(self.lengths - len(own.text))) ** _LENGTH_POWER
        order = np.argsort(times, kind="stable")[: k + 1]
        return [self.texts[n] for n in order.tolist() if self.values[n] != own.value][:k]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _mixed(x: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of `x` (the finalizer of SplitMix64)."""
    import numpy as np

    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _value(task: str, item: Item) -> str | None:
    """The answer without what stands around it; None where there is none, or none that could be appended."""
    if item.choices is not None:
        return None if item.right is None else letter_of(item.right)
    if item.answer is None or _is_code(task, item.answer):
        return None
    return reference_of(item) or None


def _is_code(task: str, answer: str) -> bool:
    if any(task.startswith(name) for name, rules in TASK_RULES.items() if rules == ("code",)):
        return True
    try:
        Problem.read(answer)
    except BadData:
        return False
    return True
