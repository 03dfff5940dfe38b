"""Data sets: questions from files, generated and bundled ones, plain sentences; answers found in a text, and their grades."""

from __future__ import annotations

from mless.tasks.answering import (
    AnswerKind,
    AnswerPool,
    answer_kind,
    answer_text,
    letter_of,
    other_answers,
    reasoning,
    reference_of,
)
from mless.tasks.extracting import DEFAULT_RULES, EXTRACTION_RULES, TASK_RULES, Extracted, Rule, extract
from mless.tasks.generating import arithmetic, distinct_questions
from mless.tasks.grading import CODE_GRADER, DEFAULT_GRADER, GRADERS, NOTES, AnswerGrader, Grade, Grader, vote_of
from mless.tasks.reading import filler_sentences, load_items

__all__ = [
    "CODE_GRADER",
    "DEFAULT_GRADER",
    "DEFAULT_RULES",
    "EXTRACTION_RULES",
    "GRADERS",
    "NOTES",
    "TASK_RULES",
    "AnswerGrader",
    "AnswerKind",
    "AnswerPool",
    "Extracted",
    "Grade",
    "Grader",
    "Rule",
    "answer_kind",
    "answer_text",
    "arithmetic",
    "distinct_questions",
    "extract",
    "filler_sentences",
    "letter_of",
    "load_items",
    "other_answers",
    "reasoning",
    "reference_of",
    "vote_of",
]
