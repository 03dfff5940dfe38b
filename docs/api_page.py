"""docs/api.md from the docstrings of `mless.__all__`; docs/make_pages.py writes it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import mless

# What belongs together, in the order in which one meets it. A name that no part claims stands under "More".
_PARTS: dict[str, tuple[str, ...]] = {
    "Models, items and prompts": ("load", "items", "prompts", "align", "LoadedModel", "Item", "Condition", "Prompt", "Span"),
    "Attention": ("received", "retained", "capturing", "Attention", "Share"),
    "Studies": ("run", "load_study", "verdict_lines", "StudySpec", "Outcome"),
    "Results": ("show", "draw", "compare", "verify", "FigureSpec", "Panel", "Comparison", "Verification"),
    "ARM": ("arm", "attach_arm", "redistribute", "ArmSettings", "ArmHandle"),
    "Answers": ("HfEngine", "Decoding", "Request", "Reply"),
    "Things of your own, and errors": ("register", "MlessError"),
}  # fmt: skip
_WIDTH = 100


def page(note: str) -> str:
    """The whole page, with `note` under its title."""
    claimed = {name for names in _PARTS.values() for name in names}
    parts = {**_PARTS, "More": tuple(name for name in mless.__all__ if name not in claimed)}
    blocks = [
        "# Python",
        note,
        f"`import mless` is quick, and its {len(mless.__all__)} names are all there is to use; whatever else the package holds may change. "
        "[The README](../README.md) has ten lines to begin with, and `examples/` two scripts.",
    ]
    for title, names in parts.items():
        there = [name for name in names if name in mless.__all__]
        if there:
            blocks += [f"## {title}", *(block for name in there for block in _entry(name, getattr(mless, name)))]
    return "\n\n".join(blocks) + "\n"


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}"
    yield f"```python\n{_shape(name, thing)}\n```"
    yield _words(inspect.getdoc(thing))
    members = [] if not inspect.isclass(thing) else list(_members(thing))
    if members:
        yield "\n".join(members)


def _shape(name: str, thing: Any) -> str:
    """How it is called, one parameter a line where they are many."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"class {name}({', '.join(base.__name__ for base in thing.__bases__)})"
    if hasattr(thing, "model_fields"):
        return f"class {name}(*, name, …)  # its fields and their defaults: docs/cli.md, Study fields"
    return ("class " if inspect.isclass(thing) else "") + _call(f"mless.{name}", inspect.signature(thing))


def _call(name: str, signature: inspect.Signature) -> str:
    returned = "" if signature.return_annotation in (signature.empty, "None", None) else signature.return_annotation
    ending = f" -> {_annotation(returned)}" if returned else ""
    given = [_parameter(one) for one in signature.parameters.values() if one.name != "self"]
    kinds = [one.kind for one in signature.parameters.values() if one.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        given.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(given)}){ending}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in given) + f"){ending}"


def _parameter(one: inspect.Parameter) -> str:
    text = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
    if one.annotation is not one.empty:
        text += f": {_annotation(one.annotation)}"
    if one.default is not one.empty:
        # A function's own text has its address in memory.
        text += f" = {one.default.__name__ if callable(one.default) else repr(one.default)}"
    return text


def _annotation(found: Any) -> str:
    return found if isinstance(found, str) else getattr(found, "__name__", str(found))


def _members(thing: type) -> Iterator[str]:
    """Its documented methods and properties."""
    for name, member in vars(thing).items():
        if name.startswith("_") or name == "model_post_init":
            continue
        if isinstance(member, property) and member.__doc__:
            yield f"* `.{name}`: {_first(member.__doc__)}"
        elif inspect.isfunction(member) and member.__doc__:
            given = ", ".join(one for one in inspect.signature(member).parameters if one != "self")
            yield f"* `.{name}({given})`: {_first(member.__doc__)}"


def _first(doc: str) -> str:
    return " ".join(_words(inspect.cleandoc(doc).split("\n\n")[0]).split())


def _words(doc: str | None) -> str:
    """A docstring as Markdown, with links to the pages that it names."""
    text = (doc or "").replace("``", "`")
    return re.sub(r"docs/([a-z-]+\.md)", r"[\1](\1)", text)
