"""Which tokens two prompts have in common, and which patches between them mean something."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from mless.changes import ANSWER, GROUPS, NAMED_SPANS, Patch, spans_of
from mless.errors import BadPrompt
from mless.values import Prompt, Span


def positions_of(prompt: Prompt) -> Sequence[int]:
    return prompt.position_ids if prompt.position_ids is not None else range(len(prompt))


def aligned(prompt: Prompt, other: Prompt, at: Sequence[str]) -> Int64[np.ndarray, "2 tokens"]:
    """Places in the first prompt, of tokens in the spans `at`, and those of the same tokens in the other. Both must hold the same original tokens."""
    pairs = _pairs_of(prompt.token_ids, prompt.spans, other.token_ids, other.spans, tuple(at))
    if pairs is None or prompt.item != other.item:
        raise BadPrompt(
            f"a patch from item {other.item!r} ({other.condition}) into {prompt.item!r} ({prompt.condition}): the prompts do not hold the same "
            "original tokens, so there are no values to take; patch between conditions that only insert filler or move positions"
        )
    return pairs


@lru_cache(maxsize=256)
def _pairs_of(
    mine: tuple[int, ...],
    spans: tuple[Span, ...],
    theirs: tuple[int, ...],
    other: tuple[Span, ...],
    at: tuple[str, ...],
) -> Int64[np.ndarray, "2 tokens"] | None:
    """None where the original tokens differ. Kept, because one pair of prompts is asked about for every layer and part."""
    original, filler = (
        [
            [i for span in one if (span.name == "filler") == inserted for i in range(span.start, span.stop)]
            for one in (spans, other)
        ]
        for inserted in (False, True)
    )
    if [mine[i] for i in original[0]] != [theirs[i] for i in original[1]]:
        return None
    pairs = list(zip(*original, strict=True))
    if [mine[i] for i in filler[0]] == [theirs[i] for i in filler[1]]:
        pairs += zip(*filler, strict=True)
    names = [span.name for span in spans for _ in range(len(span))]
    found = np.array([pair for pair in sorted(pairs) if names[pair[0]] in at], np.int64).reshape(-1, 2).T
    found.setflags(write=False)
    return found


def first_patched(patches: Sequence[Patch], prompt: Prompt, other: Prompt) -> int:
    """The first token of the prompt that patches from a plain run of the other one may change. 0 where the run has to be whole.

    Tokens that both prompts begin with have the same values in both, so to patch them changes nothing.
    """
    mine, its = ([*zip(one.token_ids, positions_of(one), strict=True)] for one in (prompt, other))
    # Keys that are put in are seen by tokens that have no patch; and a run's own values must not change a bit of it.
    if mine == its or any(patch.part == "keys-values" for patch in patches):
        return 0
    same = next((at for at, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), min(len(mine), len(its)))
    changed = [len(prompt) - 1]  # the answer's first token is predicted from here
    for patch in patches:
        ours, theirs = aligned(prompt, other, spans_of(patch.at))
        changed += ours[(ours != theirs) | (ours >= same)].tolist()
    return min(changed)


def inserts(patch: Patch, prompt: Prompt, other: Prompt) -> bool:
    """Whether the patch puts the other prompt's filler, as keys and values, into a prompt without it."""
    has, lacks = (any(span.name == "filler" for span in one.spans) for one in (other, prompt))
    return patch.part == "keys-values" and "filler" in spans_of(patch.at) and has and not lacks


def check_patch(patch: Patch, prompt: Prompt, other: Prompt, *, answer: bool = True) -> None:
    """Refuse a patch that means nothing between two prompts. `answer`: tokens follow them."""
    where = f"item {prompt.item!r}, condition {prompt.condition!r}"
    ours, theirs = aligned(prompt, other, NAMED_SPANS)
    labels = prompt.span_ids
    there = {*(NAMED_SPANS[labels[at]] for at in ours), *([ANSWER] if answer else [])}
    for name in patch.at:
        if name in there or name in GROUPS or (name == "filler" and inserts(patch, prompt, other)):
            continue
        if name == "filler":
            raise BadPrompt(
                f"{where}: the patch of {patch.part} names at = 'filler', which is not in both prompts, so it has no value to take; only keys-values can be "
                "put into a prompt without it"
            )
        raise BadPrompt(
            f"{where}: the patch of {patch.part} names at = {name!r}, but the prompt has no such span; it has: "
            f"{', '.join(one for one in NAMED_SPANS if one in there)}"
        )
    if patch.part == "keys-values":
        mine, its = positions_of(prompt), positions_of(other)
        moved = next(((a, b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True) if mine[a] != its[b]), None)
        if moved is not None:
            raise BadPrompt(
                f"{where}: keys hold positions, and token {moved[0]} is at position {mine[moved[0]]} here and at {its[moved[1]]} under {other.condition!r}; "
                "patch keys-values into a condition with the same positions (position-only for a filler's)"
            )
