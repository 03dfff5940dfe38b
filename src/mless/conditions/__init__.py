"""The kinds of condition: what each puts into a prompt or changes about it. One file a kind, and one table (`kinds`)."""

from mless.conditions.base import Kind
from mless.conditions.edits import EDITS
from mless.conditions.kinds import CONDITION_KINDS, inserts, only_moves, repeats

__all__ = ["CONDITION_KINDS", "EDITS", "Kind", "inserts", "only_moves", "repeats"]
