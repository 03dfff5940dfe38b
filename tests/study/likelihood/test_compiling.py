"""Kernels that are compiled while prompts are rendered: which ones, and that the thread has ended when the study has."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mless import kernels, redistribution
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study
from mless.study.likelihood import scoring
from mless.study.likelihood.scoring import begin_compiling
from mless.values import ArmSettings, Condition
from spelling import model_folder
from study.likelihood.test_likelihood_study import write_task
from tiny import tiny


def test_each_kernel_is_asked_for_once_with_the_sizes_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "compile_described", lambda *given: asked.append(given))
    monkeypatch.setattr(
        redistribution, "compile_redistribution", lambda model, arm, *, attached: asked.append((arm, attached))
    )
    model = tiny("llama", head=True)
    arm, other = ArmSettings(c=0.1), ArmSettings(fraction=0.3)
    conditions = [Condition("none", "none"), *(Condition(f"{n}", "none", arm=one) for n, one in enumerate((arm, other, arm)))]  # fmt: skip
    assert begin_compiling(model, conditions) is None
    assert asked == []

    thread = begin_compiling(replace(model, device=torch.device("cuda")), conditions)
    assert thread is not None
    thread.join(timeout=60)
    head = model.model.get_output_embeddings().weight
    assert asked == [(len(head), head.dtype, head.device), (arm, True), (other, True)]

    asked.clear()
    monkeypatch.setattr(model.model, "get_output_embeddings", lambda: None)
    thread = begin_compiling(replace(model, device=torch.device("cuda")), conditions)
    assert thread is not None
    thread.join(timeout=60)
    assert asked == [(arm, True), (other, True)]


def test_the_thread_has_ended_when_the_study_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []

    class Heard(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            joined.append(self.name)

    def begin(model: Any, conditions: Any) -> Heard:
        thread = Heard(name=f"compiling {len(joined)}")
        thread.start()
        return thread

    monkeypatch.setattr(scoring, "begin_compiling", begin)
    model, out = model_folder(tmp_path / "tiny", context=1024), tmp_path / "out"
    task = write_task(tmp_path / "sums.jsonl", 2)
    spec = load_study("likelihood", {"model": str(model), "data": str(task), "conditions": ["none", "mless"]})
    run_study(spec, out)
    assert joined == ["compiling 0"]

    # A study that goes on and finds nothing missing.
    folder = ResultFolder(out)
    folder.write_manifest({**(folder.about() or {}), "complete": False})
    run_study(spec, out)
    assert joined == ["compiling 0", "compiling 1"]
