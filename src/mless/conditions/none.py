"""``none``: nothing is inserted. Other changes of a condition (system text, ARM, …) do not depend on its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mless.conditions.base import Kind
from mless.errors import BadStudy

if TYPE_CHECKING:
    from mless.values import Condition


class Nothing(Kind):
    """The prompt as it is."""

    def check(self, condition: Condition) -> None:
        if condition.length or condition.filler:
            raise BadStudy(f"condition {condition.name!r} inserts nothing, so it takes no filler and no length")


NONE = Nothing()
