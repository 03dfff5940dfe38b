"""The one table of condition kinds."""

from __future__ import annotations

from mless.conditions.base import Kind
from mless.conditions.edits import EDITS
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
    {"none": NONE, "repeat": REPEAT, "text": TEXT, "tokens": TOKENS, "shift": SHIFT, **EDITS},
    wants="an object of a class of mless.conditions.Kind",
    fits=lambda one: isinstance(one, Kind),
)


def only_moves(name: str | None) -> bool:
    """Whether conditions of that kind put nothing into the prompt and change positions alone: the control for position."""
    kind = CONDITION_KINDS.get(name) if name is not None else None
    return kind is not None and kind.moves and not kind.inserts


def repeats(name: str | None) -> bool:
    """Whether conditions of that kind put the same filler into every item's prompt."""
    return inserts(name) and name is not None and not CONDITION_KINDS.get(name).own


def inserts(name: str | None) -> bool:
    """Whether conditions of that kind put tokens into the prompt. None, where a kind is not known, does not."""
    return name is not None and CONDITION_KINDS.get(name).inserts
