"""The tests' own type checks find what they are for, and leave GPU kernels alone: Triton compiles a kernel's source and would not find the checks' names."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float, TypeCheckError, _import_hook

from checking import checked_modules, has_shapes, is_inner, with_one_size_an_axis
from mless.engines.slots import SlotCache
from mless.stats import holm
from mless.stats.ratios import ratios_of_means
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
    "call",
    [
        lambda: vote_of(5),  # pyright: ignore[reportArgumentType]
        lambda: holm(np.zeros((2, 2))),
        lambda: ratios_of_means(np.zeros((3, 2)), np.zeros((3, 1))),
        lambda: Item(5, "What is 1 + 1?"),  # pyright: ignore[reportArgumentType]
    ],
    ids=["a function", "a shape", "an axis with two sizes", "a dataclass"],
)
def test_what_does_not_fit_its_annotation_is_found_out(call: Callable[[], object]) -> None:
    with pytest.raises((BeartypeCallHintParamViolation, TypeCheckError)):
        call()


def test_a_result_that_does_not_fit_the_arguments_axes_is_found_out() -> None:
    def shortened(values: Float[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
        return values[1:]

    with pytest.raises(BeartypeCallHintReturnViolation):
        with_one_size_an_axis(beartype(shortened))(np.zeros(3))


def test_only_annotations_with_shapes_open_a_scope_for_axes() -> None:
    assert has_shapes(inspect.unwrap(holm))
    assert has_shapes(inspect.unwrap(SlotCache.write))  # by a name for a list of shapes
    assert not has_shapes(inspect.unwrap(vote_of))


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
