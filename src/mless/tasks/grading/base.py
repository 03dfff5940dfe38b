"""What a grader is: it judges an extracted answer against the reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

from mless.tasks.extracting import Extracted


@dataclass(frozen=True, slots=True)
class Grade:
    """The judgement of one answer. A rule that was not asked, or could not say, is None."""

    correct: bool
    why: str
    symbolic: bool | None = None
    string: bool | None = None
    disagree: bool = False


class AnswerGrader(ABC):
    """Grades answers one by one. A grader of your own only needs `grade`."""

    #: Whether it runs what models write. Then the user must have allowed it (--run-code), and `require` is called before the run.
    runs_code: ClassVar[bool] = False
    #: The extraction rules that its answers are found by; None leaves them to the task.
    rules: ClassVar[tuple[str, ...] | None] = None

    @classmethod  # noqa: B027 - most graders need nothing
    def require(cls) -> None:
        """Raise where this machine lacks what it needs."""

    @abstractmethod
    def grade(self, extracted: Extracted | str | None, reference: str) -> Grade:
        """Judges one answer against its reference; None is no answer."""

    def grade_many(
        self, pairs: Sequence[tuple[Extracted | str | None, str]], progress: Callable[[int, int], None] | None = None
    ) -> list[Grade]:
        """One grade per (answer, reference), in order; `progress` is called with (done, all). A grader may judge equal pairs once."""
        grades: list[Grade] = []
        for extracted, reference in pairs:
            grades.append(self.grade(extracted, reference))
            if progress is not None:
                progress(len(grades), len(pairs))
        return grades

    def close(self) -> None:  # noqa: B027 - most graders hold nothing
        """Frees what it holds; here nothing."""

    def __enter__(self) -> AnswerGrader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def distinct_pairs(pairs: Iterable[tuple[Extracted | str | None, str]]) -> list[tuple[str, str]]:
    """Each pair of texts once, in the order of their first appearance."""
    return list(dict.fromkeys((text_of(extracted), reference) for extracted, reference in pairs))


def text_of(extracted: Extracted | str | None) -> str:
    """The answer's text, empty where there is no answer."""
    return (extracted.text if isinstance(extracted, Extracted) else extracted) or ""
