"""Which modules of mless are type-checked while the tests run, and how."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Callable
from importlib.util import cache_from_source
from inspect import isgeneratorfunction
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import _import_hook, install_import_hook
from jaxtyping._storage import pop_shape_memo, push_shape_memo

#: Modules whose functions torch compiles, for which it cannot follow the scope below.
_COMPILED = frozenset(("mless.redistribution",))


def check_types() -> None:
    """From now on every annotated function of mless that is imported is checked when it is called.

    jaxtyping's own decorator checks every argument twice and binds them anew at each call. Here beartype checks a function once, in a scope
    of jaxtyping's where an axis has one size. That finds the same faults in a small part of the time.
    """
    by_jaxtyping = jaxtyping.jaxtyped

    def checked(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorate(made: Any) -> Any:
            if not isinstance(
                made, FunctionType
            ):  # a class, whose annotations may be those of a parent in another module
                return by_jaxtyping(typechecker=typechecker)(made)
            if is_inner(made):
                return made
            unknown = _names(made) & {"jaxtyping", *_for_readers(made.__code__.co_filename)}
            # beartype looks at a generator's arguments when it is first asked for a value, which is in another scope.
            if unknown or isgeneratorfunction(made) or made.__module__ in _COMPILED:
                return by_jaxtyping(typechecker=typechecker)(made)
            return with_one_size_an_axis(beartype(made)) if has_shapes(made) else beartype(made)

        return decorate

    jaxtyping.jaxtyped = checked  # what the hook writes above every function is looked up here
    _keep_others_bytecode()
    install_import_hook(checked_modules(), "beartype.beartype").__enter__()


def with_one_size_an_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        push_shape_memo({})
        try:
            return function(*args, **kwargs)
        finally:
            pop_shape_memo()

    return scoped


def _keep_others_bytecode() -> None:
    """While a module of mless is imported, jaxtyping gives all bytecode a name of its own, also that of what is imported from there.

    So torch and transformers were compiled anew, which takes longer than all the rest of importing them.
    """
    marked, own = _import_hook._optimized_cache_from_source, str(_root())

    def named(mark: str, /, path: Any, debug_override: bool | None = None) -> str:
        return (
            marked(mark, path, debug_override) if str(path).startswith(own) else cache_from_source(path, debug_override)
        )

    _import_hook._optimized_cache_from_source = named


def is_inner(function: FunctionType) -> bool:
    """Whether it is made inside another function. These are not checked.

    A check is compiled whenever the outer function runs, a millisecond each time; and beartype keeps what it has wrapped, and with it the
    model in such a function's closure.
    """
    return "<locals>" in function.__qualname__


def has_shapes(function: FunctionType) -> bool:
    """Whether its annotations name something of jaxtyping's."""
    return any(_has_shapes(function.__globals__.get(word)) for word in _names(function))


def _names(function: FunctionType) -> set[str]:
    """Every name in its annotations."""
    return set(re.findall(r"\w+", " ".join(map(str, function.__annotations__.values()))))


def _has_shapes(named: Any) -> bool:
    """Whether it is one of jaxtyping's types, or has one inside, as list[Float[…]] has."""
    inside = get_args(named)
    return str(getattr(named, "__module__", "")).startswith("jaxtyping") or any(map(_has_shapes, inside))


@functools.cache
def _for_readers(file: str) -> frozenset[str]:
    """The names that a module imports under `if TYPE_CHECKING`."""
    blocks = [node for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))) if isinstance(node, ast.If)]
    imports = [
        node for block in blocks if ast.unparse(block.test).endswith("TYPE_CHECKING") for node in ast.walk(block)
    ]  # fmt: skip
    return frozenset(
        alias.asname or alias.name
        for node in imports
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    )


def checked_modules() -> list[str]:
    """Every module of mless but the files of GPU kernels: Triton compiles a kernel's own source, which must not be wrapped."""
    root = _root()
    rooms = [path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    kernels = [path.stem for path in (root / "kernels").glob("*.py")]
    kept = [name for name in kernels if name != "__init__" and not name.endswith(("_triton", "_hopper"))]
    named = [f"mless.{room}" for room in rooms if room not in ("__init__", "kernels")]
    return sorted([*named, *(f"mless.kernels.{name}" for name in kept)])


def _root() -> Path:
    spec = importlib.util.find_spec("mless")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
