"""The questions of items: read from the prompts without filler, only those that are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mless.explorer.batches import batches, of_conditions, rows_at
from mless.explorer.folders import Folder
from mless.results.answers import StoredAnswers


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
