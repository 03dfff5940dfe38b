"""Shapes are types: every annotated function of mless is checked while the tests run."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from jaxtyping import install_import_hook

install_import_hook("mless", "beartype.beartype").__enter__()
