"""The house: no import circle in any room, and no module that has grown too long to be read at one go."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import grimp

import mless

SOURCE = Path(mless.__file__).parent


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set(), "c": {"a", "b"}}) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too; those that only name types do not."""
    graph = grimp.build_graph("mless", exclude_type_checking_imports=True, cache_dir=None)
    names: Iterable[str] = graph.modules
    assert circles({name: set(graph.find_modules_directly_imported_by(name)) for name in names}) == []


def test_no_module_is_longer_than_600_lines() -> None:
    lengths = {
        str(file.relative_to(SOURCE)): len(file.read_text("utf-8").splitlines()) for file in SOURCE.rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def test_a_function_over_60_lines_says_why() -> None:
    silent: list[str] = []
    for file in SOURCE.rglob("*.py"):
        lines = file.read_text("utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > 60:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if not lines[first - 2].strip().startswith("# Over 60 lines: "):
                    silent.append(f"{file.relative_to(SOURCE)}: {node.name}")
    assert silent == []


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
