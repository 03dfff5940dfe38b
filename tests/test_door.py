"""The public door: every name of `mless.__all__` is there, and `import mless` is light."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

import mless


@pytest.mark.parametrize("name", mless.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(mless, name) is not None
    assert name in dir(mless)


def test_the_door_is_sorted_and_closed() -> None:
    assert sorted(mless.__all__) == mless.__all__
    with pytest.raises(AttributeError, match="module 'mless' has no attribute 'nothing'; it has: ArmHandle, "):
        _ = mless.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_no_module_bears_the_name_of_a_public_function() -> None:
    modules = [module.name for module in pkgutil.walk_packages(mless.__path__, "mless.")]
    assert "mless.study.direct" in modules
    functions = {name for name in mless.__all__ if not isinstance(getattr(mless, name), type)}
    assert {"load", "prompts", "received", "retained", "run"} <= functions
    assert not {module for module in modules if module.rpartition(".")[2] in functions}
    for module in modules:
        if module.startswith("mless.integrations.") or module.endswith("_triton"):
            continue  # they need packages that are extras
        package: Any = importlib.import_module(module)
        shadowed = {name for name in getattr(package, "__all__", ()) if f"{module}.{name}" in modules}
        assert not shadowed, (module, shadowed)


def test_importing_is_light() -> None:
    heavy = "torch transformers scipy pyarrow matplotlib pydantic numpy typer rich jinja2"
    code = f"import sys, mless; dir(mless); print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
