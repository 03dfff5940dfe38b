"""Marks for tests that multiply real models in a dtype that not every processor has units for."""

from __future__ import annotations

import pytest

from mless.models import processor

NO_UNITS = "this processor has no units for bf16 products"
bf16_units = pytest.mark.skipif(processor.here().bfloat16 is None, reason=NO_UNITS)
