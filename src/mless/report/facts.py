"""Values of study.json in words, for pages."""

from __future__ import annotations

from typing import cast


def words_of(value: object) -> str:
    """A value of study.json as a person reads it."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {words_of(part)}" for key, part in cast("dict[object, object]", value).items())
    if isinstance(value, list):
        return ", ".join(words_of(part) for part in cast("list[object]", value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2g}" if abs(value) < 1 else f"{value:g}"
    return "–" if value is None else str(value)
