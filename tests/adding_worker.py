"""The worker that starts at once, where what it answers is not the point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import guarded_worker


def prepare() -> Callable[[str, str], dict[str, Any]]:
    return guarded_worker.prepare(guarded_worker.by_terms)
