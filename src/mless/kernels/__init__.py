"""Sums of received attention from queries and keys: one signature, several implementations.

`reference` materialises every matrix in double precision and is the truth the others are held against; `streaming` works in
blocks on any device and never holds more than a block of rows.
"""

from __future__ import annotations

from mless.kernels.signature import Sums, Visible
from mless.kernels.streaming import received

__all__ = ["Sums", "Visible", "received"]
