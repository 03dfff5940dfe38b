"""The tests' own type checks leave GPU kernels alone: Triton compiles a kernel's source and would not find the checks' names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from checking import checked_modules


def test_no_file_with_a_kernel_is_checked() -> None:
    spec = importlib.util.find_spec("mless")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    names = {".".join(("mless", *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    kernels = [name for name, path in names.items() if "@triton.jit" in path.read_text(encoding="utf-8")]
    checked = checked_modules()
    assert len(kernels) >= 5
    assert [name for name in kernels if any(name == one or name.startswith(f"{one}.") for one in checked)] == []
    assert {"mless.kernels.streaming", "mless.stats", "mless.values"} <= set(checked)
