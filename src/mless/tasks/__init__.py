"""Data sets: questions from files, generated and bundled ones, plain sentences; answers found in a text, and their grades."""

from __future__ import annotations

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
    "Extracted",
    "Grade",
    "Grader",
    "Rule",
    "arithmetic",
    "distinct_questions",
    "extract",
    "filler_sentences",
    "load_items",
    "vote_of",
]
