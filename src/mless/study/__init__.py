"""Spec → units → results: the one place that composes everything."""

from __future__ import annotations

from mless.study.running import Outcome, Progress, run_study
from mless.study.spec import StudySpec, available_studies, load_study
from mless.study.verdict import verdict_lines

__all__ = ["Outcome", "Progress", "StudySpec", "available_studies", "load_study", "run_study", "verdict_lines"]
