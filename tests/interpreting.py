"""Triton's interpreter, made quicker for the programs that tests run."""

from __future__ import annotations

from typing import Any


def patch_the_language_once() -> None:
    """For each call of a device function it looks through the whole language for what is not yet its own: half of its time.

    What a launch has replaced stays so until the launch ends, so that within it there is nothing to find.
    """
    from triton import language
    from triton.runtime import interpreter

    module: Any = interpreter
    replaced = module._patch_lang

    def once(function: Any) -> Any:
        seen = list(function.__globals__.values())
        parts = [part for part in (language, language.core) if any(value is part for value in seen)]
        if parts and not any(language.core.is_builtin(part.load) for part in parts):
            return module._LangPatchScope()
        return replaced(function)

    module._patch_lang = once
