"""A finished result folder from its study.json and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from mless.results.folder import ResultFolder


def write_folder(path: Path, about: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> Path:
    folder = ResultFolder(path)
    with folder.writing():
        folder.write_manifest(dict(about))
        for name, table in tables.items():
            folder.write_table(name, table)
        folder.write_manifest(dict(about))
    return path
