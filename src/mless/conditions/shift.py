"""``shift``: no token is inserted, but positions are counted on as if `length` had been."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mless.conditions.base import Kind, refuse_filler
from mless.errors import BadPrompt, BadStudy

if TYPE_CHECKING:
    from mless.values import Condition


class Shift(Kind):
    """What comes after the placement stands `length` positions later."""

    moves = True

    def check(self, condition: Condition) -> None:
        super().check(condition)
        refuse_filler(condition, "inserts no token")
        if condition.placement == "before-answer":
            raise BadStudy(
                f"condition {condition.name!r} shifts what comes after the prompt's end, which is nothing; choose another placement"
            )

    def positions(self, condition: Condition, count: int, at: int) -> tuple[int, ...]:
        if at == count:
            raise BadPrompt(
                f"condition {condition.name!r} shifts what comes after the question, which is nothing in this prompt; choose another placement, "
                "or a prompt with a chat template (--prompt chat)"
            )
        return tuple(n + condition.length * (n >= at) for n in range(count))

    def words(self, condition: Condition) -> str:
        return f"positions moved on by {condition.length}, {condition.placement}, no token inserted"


SHIFT = Shift()
