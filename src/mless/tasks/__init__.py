"""Data sets: questions from files, generated and bundled ones, and plain sentences for the `random` condition."""

from __future__ import annotations

from mless.tasks.generating import arithmetic
from mless.tasks.reading import filler_sentences, load_items

__all__ = ["arithmetic", "filler_sentences", "load_items"]
