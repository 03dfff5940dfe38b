"""Data sets: questions from files, generated and bundled ones, plain sentences; answers found in a text, and their grades."""

from __future__ import annotations

from mless.tasks.extracting import DEFAULT_RULES, RULES, TASK_RULES, Extracted, Rule, extract, extraction_rules
from mless.tasks.generating import arithmetic, distinct_questions
from mless.tasks.grading import DEFAULT_GRADER, NOTES, AnswerGrader, Grade, Grader, graders, vote_of
from mless.tasks.reading import filler_sentences, load_items

__all__ = [
    "DEFAULT_GRADER",
    "DEFAULT_RULES",
    "NOTES",
    "RULES",
    "TASK_RULES",
    "AnswerGrader",
    "Extracted",
    "Grade",
    "Grader",
    "Rule",
    "arithmetic",
    "distinct_questions",
    "extract",
    "extraction_rules",
    "filler_sentences",
    "graders",
    "load_items",
    "vote_of",
]
