"""Whether the items asked are a sample, or all there are."""

from __future__ import annotations

import re

from mless import tasks
from mless.errors import BadData


def population_lines(task: str, n: int) -> list[str]:
    """A line where a generated task was asked whole: no interval then speaks of further questions."""
    match = re.fullmatch(r"arithmetic-([0-9]{1,9})", task)
    if match is None:
        return []
    try:
        distinct = tasks.distinct_questions(int(match[1]))
    except BadData:  # a folder of another version, with a difficulty that is not known here
        return []
    if n < distinct:
        return []
    return [
        f"These {n:,} items are all that {task} has, so there is no larger set of questions that the intervals and p speak of; they say how much the "
        "numbers would vary if the questions were drawn at random from many like these. To sample from a larger set: --data arithmetic:5:COUNT "
        f"({tasks.distinct_questions(5):,} questions)"
    ]
