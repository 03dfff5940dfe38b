"""Modules that are no part of mless and bring things for its tables, as a user's own would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mless import registry


class Outside:
    """A folder on sys.path."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = patch

    @contextmanager
    def opened(self) -> Generator[Outside]:
        self._patch.syspath_prepend(self.folder)
        self._patch.setattr(registry, "TABLES", dict(registry.TABLES))
        self._patch.setattr(registry, "_READ", set())
        self._patch.setenv(registry.VARIABLE, "")
        before = set(sys.modules)
        tables: list[Any] = [registry.table_of(what) for what in registry.TABLES]
        held = [dict(table._added) for table in tables]
        yield self
        for table, added in zip(tables, held, strict=True):
            table._added = added
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]

    def write(self, module: str, code: str) -> None:
        (self.folder / f"{module}.py").write_text(code, encoding="utf-8")

    def name_plugins(self, *modules: str) -> None:
        """As a user does in the shell, for this process and those it starts."""
        self._patch.setenv(registry.VARIABLE, ",".join(modules))

    def in_another_process(self, code: str) -> str:
        """What a fresh Python prints that inherits this one's environment."""
        given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), *sys.path])}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
