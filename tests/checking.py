"""Which modules of mless are type-checked while the tests run."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def checked_modules() -> list[str]:
    """Every module of mless but the files of GPU kernels: Triton compiles a kernel's own source, which must not be wrapped."""
    spec = importlib.util.find_spec("mless")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    rooms = [path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    kernels = [path.stem for path in (root / "kernels").glob("*.py")]
    kept = [name for name in kernels if name != "__init__" and not name.endswith(("_triton", "_hopper"))]
    named = [f"mless.{room}" for room in rooms if room not in ("__init__", "kernels")]
    return sorted([*named, *(f"mless.kernels.{name}" for name in kept)])
