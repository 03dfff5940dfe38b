"""From a name to a loaded model: hub id, folder, GGUF file or the embedded one; only the layers asked for."""

from __future__ import annotations

from mless.models.adapters import FAMILIES, Family, family_of
from mless.models.loading import LoadedModel, describe, load
from mless.models.locating import EMBEDDED, Source, locate

__all__ = ["EMBEDDED", "FAMILIES", "Family", "LoadedModel", "Source", "describe", "family_of", "load", "locate"]
