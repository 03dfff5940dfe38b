"""Scoped instruments around a loaded model that read and never change it: attention, activations, attention outputs."""

from __future__ import annotations

from mless.capture.activations import Rows, prove_reading, read_activations, watching
from mless.capture.affine import Displacement, displacement
from mless.capture.attention import Attention, LazyMask, Recorder, capturing, received

__all__ = [
    "Attention",
    "Displacement",
    "LazyMask",
    "Recorder",
    "Rows",
    "capturing",
    "displacement",
    "prove_reading",
    "read_activations",
    "received",
    "watching",
]
