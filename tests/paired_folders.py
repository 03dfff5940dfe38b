"""One model's attention and its answers to the same items, in two folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mless.results.folder import SEALED, ResultFolder
from mless.values import Condition
from stored_attention import write_attention
from synthetic import write_answers

SYSTEM = "Please reason step by step."


def change_study(path: Path, **study: Any) -> None:
    """Set fields of the study in a folder's study.json."""
    folder = ResultFolder(path)
    about = folder.about() or {}
    about["study"] |= study
    if about["format"] < SEALED:
        (path / "study.json").write_text(json.dumps(about))
        return
    with folder.writing():
        folder.write_manifest(about)


def write_pair(
    root: Path, *, items: int = 6, model: Mapping[str, Any] | None = None, task: str = "bundled"
) -> tuple[Path, Path]:
    """A folder of attention and one of answers. `model` and `task` are the answers'."""
    attention = write_attention(root / "attention", items=items, layers=2, heads=3, item="sum-{:03d}")
    change_study(attention, system=SYSTEM)
    known = {"name": "smollm2", "label": "SmolLM2-135M-Instruct", "family": "llama", "layers": 2, "heads": 3}
    conditions = (Condition("none", "none"), Condition("mless", "repeat", " /", 20))
    answers = write_answers(
        root / "answers", items=items, task=task, conditions=conditions, about={"model": known | dict(model or {})}
    )
    change_study(answers, system=SYSTEM)
    return attention, answers
