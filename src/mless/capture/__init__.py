"""Scoped instruments around a loaded model that read and never change it: attention, activations, attention outputs."""

from __future__ import annotations

from mless.capture.activations import Rows, read_activations, watching
from mless.capture.affine import Displacement, displacement
from mless.capture.attention import Attention, Pending, Recorder, capturing, received, received_later
from mless.capture.seam import LazyMask

__all__ = [
    "Attention",
    "Displacement",
    "LazyMask",
    "Pending",
    "Recorder",
    "Rows",
    "capturing",
    "displacement",
    "read_activations",
    "received",
    "received_later",
    "watching",
]
