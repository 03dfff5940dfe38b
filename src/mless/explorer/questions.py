"""The questions of items, read from the prompts without filler, only those that are shown; and how a prompt is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mless.explorer.batches import batches, of_conditions, rows_at
from mless.explorer.folders import Folder
from mless.results.answers import StoredAnswers

#: Characters of a system text that are shown.
_LONGEST = 20_000


#: How a kind of prompt holds the system text.
_KINDS = {
    "raw": "plain text, before the question",
    "chat": "chat template, in the system turn",
    "user": "chat template, at the head of the user's turn",
}


def prompt_of(folder: Folder, condition: str) -> dict[str, str | None]:
    """The system text of a condition's prompts, and where it stands; None where study.json does not say it."""
    study = folder.study
    own = (study.conditions.get(condition) or {}).get("system")
    system = study.study.get("system") if own is None else own
    kind = study.about.get("prompt")
    return {"kind": _KINDS.get(str(kind)), "system": None if system is None else str(system)[:_LONGEST]}


@dataclass(frozen=True, slots=True)
class _Prompted(StoredAnswers):
    """A folder of which some rows of prompts were read already, so that a question does not need the whole table."""

    rows: pa.Table

    def table(self, name: str, columns: Sequence[str], where: Any = None, *, newer: Sequence[str] = ()) -> pa.Table:
        return self.rows.select(list(columns))


def questions(folder: Folder, items: Sequence[str]) -> dict[str, str]:
    """Item → its question, of those that are stored."""
    if not folder.has("prompts"):
        return StoredAnswers(folder.path, folder.about()).questions(items)
    places = folder.kept("asked", lambda: _places(folder), lambda found: 120 * len(found))
    known = [item for item in items if item in places]
    stored = StoredAnswers(folder.path, folder.about())
    columns = ["item", "text", *(["spans", "tokens"] if stored.has_tokens() else [])]
    rows = rows_at(folder, "prompts", columns, [places[item] for item in known])
    return _Prompted(folder.path, folder.about(), rows).questions(items)


def _places(folder: Folder) -> Mapping[str, int]:
    """Item → the row of its prompt without filler."""
    found: dict[str, int] = {}
    first = 0
    for batch in batches(folder, "prompts", ["condition", "item"]):
        mine = np.flatnonzero(np.asarray(of_conditions(["none"])(batch)))
        ids = batch["item"].take(pa.array(mine)).to_pylist()
        found.update((item, first + at) for item, at in zip(ids, mine.tolist(), strict=True))
        first += len(batch)
    return found
