"""Kernels under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the test file, run as a program with a path, saves there; with "all" behind it where its slow cases are asked for too.

    In a process of its own, because whether kernels are interpreted is settled when Triton is imported.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; it exists for Linux only")
    path = tmp_path_factory.mktemp("interpreted") / "answers.pt"
    tests = Path(__file__).parent.parent
    places = [str(tests), str(tests / "engines"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "MLESS_PLUGINS": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places),
    }  # fmt: skip
    slow = any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)
    command = [sys.executable, str(request.path), str(path), *(["all"] if slow else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)
