"""The tests' own type checks find what they are for, and leave GPU kernels alone: Triton compiles a kernel's source and would not find the checks' names."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError, _import_hook

from checking import checked_modules, is_inner, is_plain
from mless.engines.slots import SlotCache
from mless.stats import holm
from mless.tasks import vote_of
from mless.values import Item


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


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: vote_of(5), BeartypeCallHintParamViolation),  # pyright: ignore[reportArgumentType]
        (lambda: holm(np.zeros((2, 2))), TypeCheckError),
        (lambda: Item(5, "What is 1 + 1?"), TypeCheckError),  # pyright: ignore[reportArgumentType]
    ],
    ids=["a function", "a shape", "a dataclass"],
)
def test_what_does_not_fit_its_annotation_is_found_out(call: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        call()


def test_shapes_are_left_to_jaxtyping_and_the_rest_is_plain() -> None:
    assert not is_plain(inspect.unwrap(holm))
    assert not is_plain(inspect.unwrap(SlotCache.write))  # by a name for a list of shapes
    assert is_plain(inspect.unwrap(vote_of))


def test_only_bytecode_of_mless_is_kept_apart() -> None:
    """Else torch and transformers, which mless imports, would be compiled anew in every process."""
    for module, apart in ((vote_of, True), (pytest, False)):
        file = inspect.getfile(inspect.unwrap(module))
        kept = _import_hook._optimized_cache_from_source("mark", file)
        assert (kept != importlib.util.cache_from_source(file)) is apart


def test_a_function_inside_another_is_not_checked() -> None:
    def inner() -> None: ...

    assert is_inner(inner)
    assert not is_inner(inspect.unwrap(vote_of))
