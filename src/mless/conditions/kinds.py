"""The one table of condition kinds."""

from __future__ import annotations

from mless.conditions.base import Kind
from mless.conditions.none import NONE
from mless.conditions.repeat import REPEAT
from mless.conditions.shift import SHIFT
from mless.conditions.text import TEXT
from mless.conditions.tokens import TOKENS
from mless.registry import Registry

#: Every kind by the name that studies use.
CONDITION_KINDS: Registry[Kind] = Registry(
    "condition_kinds",
    "condition kind",
    {"none": NONE, "repeat": REPEAT, "text": TEXT, "tokens": TOKENS, "shift": SHIFT},
    wants="an object of a class of mless.conditions.Kind",
    fits=lambda one: isinstance(one, Kind),
)


def inserts(name: str | None) -> bool:
    """Whether conditions of that kind put tokens into the prompt. None, where a kind is not known, does not."""
    return name is not None and CONDITION_KINDS.get(name).inserts
