"""Waiting for a page of the explorer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Opens a view in a page; starts an explorer over folders and gives its address.
Open = Callable[..., Any]
Served = Callable[..., str]


def until(page: Any, script: str) -> None:
    """Wait for a script to be true. Playwright's own way needs eval in the page, which its policy forbids."""
    for _ in range(1200):
        if page.evaluate(script):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not within a minute: {script}")
