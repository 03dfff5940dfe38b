"""Shapes are types: every annotated function of mless is checked while the tests run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A place of its own that outlives a test run: converting the embedded model takes half a minute.
os.environ.setdefault("MLESS_CACHE", str(Path(__file__).parent.parent / ".venv" / "mless-test-cache"))

from checking import check_types

check_types()

# No test may depend on how busy the machine is.
settings.register_profile("mless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mless")


@pytest.fixture(scope="session")
def embedded():
    """The embedded model, whole: every layer and head of a real language model."""
    import mless

    return mless.load("smollm2")


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A place for modules that are no part of mless, on sys.path for the time of a test; mless forgets them afterwards."""
    from outside import Outside

    with Outside(tmp_path, monkeypatch).opened() as made:
        yield made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for what this machine could not test."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {
        "no units for bf16 products": "this processor has no units for bf16 products",
        "no sandbox for code": "no sandbox for code can be made here (bubblewrap)",
    }
    for mark, why in reasons.items():
        if left_out := [one for one in skipped if mark in str(one.longrepr)]:
            terminalreporter.write_line(f"LEFT OUT: {len(left_out)} tests, because {why}")
