"""Which texts are scored after an item's prompt, and what of them becomes a metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mless import tasks
from mless.values import Item, counted

Role = Literal["answer", "other", "option"]

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """What is scored after one item's prompt, as token ids. The same under every condition."""

    solution: Ids = ()
    #: The solution up to where it states its answer; None where it does not.
    reasoning: Ids | None = None
    answer: tuple[str, Ids] | None = None
    others: tuple[tuple[str, Ids], ...] = ()
    options: tuple[tuple[str, Ids], ...] = ()
    #: Which of the options is right, from 0.
    right: int | None = None
    #: Whether whole next-token distributions are known, and not only log p of these tokens.
    distributions: bool = True

    def ids(self) -> list[Ids]:
        """All of them in a fixed order; the solution comes first, also where there is none."""
        after = [] if self.reasoning is None or self.answer is None else [(*self.reasoning, *self.answer[1])]
        candidates = [ids for _, _, ids in self.candidates()]
        return [self.solution, *after, *candidates]

    def candidates(self) -> Iterator[tuple[Role, str, Ids]]:
        """The answer, others' answers, and the options."""
        if self.answer is not None:
            yield ("answer", *self.answer)
        for other in self.others:
            yield ("other", *other)
        for option in self.options:
            yield ("option", *option)

    @property
    def metrics(self) -> tuple[str, ...]:
        """What can be said of this item, in a fixed order."""
        found: list[str] = []
        if self.solution:
            found.append("solution")
        if self.answer is not None:
            found.append("answer")
            found += ["answer-after-solution"] if self.reasoning is not None else []
            found += ["contrast"] if self.others else []
        if self.right is not None:
            found += ["choice", "choice-normalised", "margin", "margin-normalised"]
        if self.solution and self.distributions:
            found += ["kl", "entropy", "top-1 agreement"]
        return tuple(found)

    def __bool__(self) -> bool:
        return bool(self.metrics)


@dataclass
class Counted:
    """Items that lack something, by what they lack."""

    lacks: Counter[str] = field(default_factory=Counter[str])

    def lines(self, items: int) -> list[str]:
        return [f"{counted(n, 'item')} of {items}: {what}" for what, n in self.lacks.items()]


def texts_of(
    task: str,
    items: Sequence[Item],
    tokenizer: Any,
    *,
    system: str,
    others: int,
    seed: int,
    room: Sequence[int | None],
    pool: Sequence[Item] = (),
    distributions: bool = True,
) -> tuple[list[Texts], Counted]:
    """Every item's texts. `room` is how many tokens fit after the item's longest prompt; a text that does not fit is left out. Others'
    answers are drawn from `pool`, which holds the items and more of their kind.
    """
    lacking = Counted()

    def encoded(text: str) -> Ids:
        # By itself, so that its tokens are the same after every prompt.
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)

    drawn = tasks.AnswerPool(task, pool or items, system=system)
    place = {item.id: number for number, item in enumerate(pool or items)}
    found: list[Texts] = []
    for number, item in enumerate(items):
        space = room[number]
        own = tasks.answer_text(task, item, system=system)
        answer = (own, encoded(own)) if own is not None else None
        if answer is None:
            lacking.lacks["no answer, so only its solution is scored"] += 1
        elif space is not None and len(answer[1]) > space:
            lacking.lacks["the answer does not fit into the context, so it is left out under every condition"] += 1
            answer = None
        solution = encoded(item.solution) if item.solution and item.solution.strip() else ()
        before = tasks.reasoning(item)
        reasoning = encoded(before) if before is not None and solution else None
        longest = max(len(solution), len(reasoning or ()) + len(answer[1] if answer else ()))
        if solution and space is not None and longest > space:
            lacking.lacks[
                "the reference solution does not fit into the context, so it is left out under every condition"
            ] += 1
            solution, reasoning = (), None
        if solution and reasoning is None and answer is not None:
            lacking.lacks["the reference solution does not mark its answer, so there is no answer after it"] += 1
        texts = drawn.others(place[item.id], others, seed) if answer is not None else ()
        beside = tuple(
            one for one in ((text, encoded(text)) for text in texts) if space is None or len(one[1]) <= space
        )
        if answer is not None and len(beside) < others and item.choices is None:
            few = (
                f"{counted(len(beside), 'other answer')} of its kind to compare with; {others} were asked for"
                if beside
                else "no other answer of its kind, so no contrast"
            )
            lacking.lacks[few] += 1
        options, right = _options_of(item, encoded, space, lacking)
        found.append(Texts(solution, reasoning, answer, beside, options, right, distributions))
    return found, lacking


def _options_of(
    item: Item, encoded: Callable[[str], Ids], space: int | None, lacking: Counted
) -> tuple[tuple[tuple[str, Ids], ...], int | None]:
    """The item's options, and which is right; none where one of them does not fit, since the others alone are no choice."""
    options = tuple((text, encoded(text)) for text in item.choices or ())
    if space is not None and any(len(ids) > space for _, ids in options):
        lacking.lacks["an option does not fit into the context, so its choices are left out under every condition"] += 1
        return (), None
    return options, item.right


def values_of(
    texts: Texts, logp: Sequence[np.ndarray], along: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, int]]:
    """Each metric of an item with the number of tokens it is about. `logp` is by text in the order of `Texts.ids`, `along` by token of the solution."""
    left = list(logp)
    solution = left.pop(0)
    found: dict[str, tuple[float, int]] = {}
    wanted = set(texts.metrics)
    if "answer-after-solution" in wanted:
        assert texts.answer is not None
        n = len(texts.answer[1])
        found["answer-after-solution"] = float(left.pop(0)[-n:].sum()), n
    sums = {role: [float(one.sum()) for (kind, _, _), one in zip(texts.candidates(), left, strict=True) if kind == role]
            for role in ("answer", "other", "option")}  # fmt: skip
    if "solution" in wanted:
        n = len(solution)
        found["solution"] = float(solution.mean()), n
    if "kl" in wanted:
        n = len(solution)
        found["entropy"] = float(along["entropy"].mean()), n
        found["kl"] = float(along["kl"].mean()), n
        found["top-1 agreement"] = float(along["agree"].mean()), n
    if "answer" in wanted:
        assert texts.answer is not None
        n = len(texts.answer[1])
        found["answer"] = sums["answer"][0], n
        if sums["other"]:
            found["contrast"] = sums["answer"][0] - float(np.mean(sums["other"])), n
    if texts.right is not None:
        lengths = [len(text) for text, _ in texts.options]
        for name, scores in (
            ("", sums["option"]),
            ("-normalised", [s / n for s, n in zip(sums["option"], lengths, strict=True)]),
        ):
            others = [score for at, score in enumerate(scores) if at != texts.right]
            margin = scores[texts.right] - max(others)
            n = len(texts.options[texts.right][1])
            # Two options that are equally likely are half right.
            found["choice" + name] = (1.0 if margin > 0 else 0.5 if margin == 0 else 0.0), n
            found["margin" + name] = margin, n
    return {name: found[name] for name in texts.metrics}


def tokens_after(texts: Sequence[Ids]) -> int:
    """How many tokens these texts have after a prompt in one row: beginnings that they share once, and no last ones that nothing goes on from."""
    known: dict[tuple[int, int], int] = {}
    for text in texts:
        at = 0
        for token in text[:-1]:
            at = known.setdefault((at, token), len(known) + 1)
    return len(known)
