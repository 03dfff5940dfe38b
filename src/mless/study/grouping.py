"""Which prompts run together. Fixed by the study, so that a resumed run has the groups of the first."""

from __future__ import annotations

from collections.abc import Sequence

from mless.values import WHOLE_PROMPT


def in_batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of prompts in order, so many at a time; one that is too long to run in one forward is alone."""
    found: list[list[int]] = []
    for number, length in enumerate(lengths):
        alone = length > WHOLE_PROMPT or (found and lengths[found[-1][-1]] > WHOLE_PROMPT)
        if not found or alone or len(found[-1]) == size:
            found.append([])
        found[-1].append(number)
    return found


def in_groups(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Numbers of prompts in groups of like length, the shortest first, with at most so many tokens once padded; a longer prompt is alone.

    Fixed by the lengths alone, so that a resumed run has the groups of the first.
    """
    found: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda at: (lengths[at], at)):
        # The last one taken is the longest.
        if not found or lengths[number] > WHOLE_PROMPT or lengths[number] * (len(found[-1]) + 1) > tokens:
            found.append([])
        found[-1].append(number)
    return found
