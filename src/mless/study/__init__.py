"""Spec → units → results: the one place that composes everything."""

from __future__ import annotations

from mless.study.bench import Outcome, Progress
from mless.study.kinds import verdict_lines
from mless.study.loading import available_studies, load_study
from mless.study.running import run_study
from mless.study.spec import StudySpec

__all__ = ["Outcome", "Progress", "StudySpec", "available_studies", "load_study", "run_study", "verdict_lines"]
