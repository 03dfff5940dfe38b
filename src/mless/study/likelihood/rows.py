"""Rows of texts after a prompt, run with a condition's cuts and patches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mless.changes import Cut, Patch
from mless.values import Condition

if TYPE_CHECKING:
    from mless.capture.branching import Branches
    from mless.capture.patching import Place, RecordedRun
    from mless.capture.scoring import Scorer
    from mless.models import LoadedModel


def changes(condition: Condition) -> bool:
    """Whether forwards under it run with cuts or patches."""
    return bool(condition.cut or condition.patch)


@contextmanager
def cut_rows(model: LoadedModel, cuts: Sequence[Cut], rows: Sequence[Branches]) -> Generator[None]:
    """Inside the block a forward of these rows has the cuts; all texts are the answer."""
    from mless.capture.cutting import cut_attached

    prompts = [row.prompt for row in rows]
    with cut_attached(model, cuts, prompts) as handle:
        handle.rows(prompts, [len(row) for row in rows])
        yield


@contextmanager
def patched_rows(
    model: LoadedModel,
    patches: Sequence[Patch],
    rows: Sequence[Branches],
    runs: Sequence[RecordedRun],
    by_row: Sequence[Sequence[Patch]] | None = None,
) -> Generator[None]:
    """Inside the block a forward of these rows takes values from these runs of the same texts. `by_row`: each row's own of the patches."""
    from mless.capture.patching import patch_attached

    prompts = [row.prompt for row in rows]
    with patch_attached(model, patches, prompts, runs) as handle:
        handle.rows(prompts, runs, by_row, [len(row) for row in rows], [row.depth for row in rows])
        yield


def recorded_rows(
    model: LoadedModel, places: Iterable[Place], rows: Sequence[Branches], scorer: Scorer, count: int, length: int
) -> list[RecordedRun]:
    """One forward of the rows, filled up to `count` rows of `length` tokens; what the named parts compute in it."""
    from mless.capture.patching import recorded

    prompts = [row.prompt for row in rows]
    with recorded(model, places, prompts) as recorder:
        recorder.rows(prompts, [len(row) for row in rows], [row.depth for row in rows])
        scorer.forward(rows, count=count, length=length)
        return recorder.runs()
