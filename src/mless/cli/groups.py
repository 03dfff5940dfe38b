"""Groups of options: one dataclass stands for several options of a command, and may hold other groups."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


class StudyField:
    """Marks an option that sets study fields: those named here, else the one with the option's name."""

    def __init__(self, *names: str) -> None:
        self.names = names


def study_changes(options: object) -> dict[str, Any]:
    """Study field → value, for every option of the group that was given and sets a study field."""
    return {field: value for field, _, value in _given(options)}


def study_options(options: object) -> dict[str, str]:
    """Study field → the option that was given for it, so that an error can name it."""
    return {field: option for field, option, _ in _given(options)}


def _given(options: object) -> Iterator[tuple[str, str, Any]]:
    """Study field, option and value of every option that was given."""
    for parameter in _parameters(type(options)):
        value = getattr(options, parameter.name)
        if _is_group(parameter.annotation):
            yield from _given(value)
        elif value is not None:
            marks = parameter.annotation.__metadata__
            typed = [name for mark in marks for name in getattr(mark, "param_decls", None) or () if name[:2] == "--"]
            option = next(iter(typed), f"--{parameter.name.replace('_', '-')}")
            for mark in marks:
                if isinstance(mark, StudyField):
                    yield from ((name, option, value) for name in mark.names or (parameter.name,))


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer needs it: every option of its groups is one parameter, in the order of declaration."""
    parameters = list(_parameters(command))

    def call(**values: Any) -> None:
        command(**_collected(parameters, values))

    flat = list(_flat(parameters))
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    # typer reads both: the signature for defaults and order, the annotations for types.
    call.__signature__ = inspect.Signature(flat)  # pyright: ignore[reportFunctionMemberAccess]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _parameters(of: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters of a command or of a group's class, with their types resolved."""
    types = get_type_hints(of, include_extras=True)
    for parameter in inspect.signature(of).parameters.values():
        # By keyword, so that one without a default may follow one that has a default.
        yield parameter.replace(annotation=types[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)


def _flat(parameters: list[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    for parameter in parameters:
        if _is_group(parameter.annotation):
            yield from _flat(list(_parameters(parameter.annotation)))
        else:
            yield parameter


def _collected(parameters: list[inspect.Parameter], values: dict[str, Any]) -> dict[str, Any]:
    """The values by parameter, with those of a group put together into one."""
    return {
        one.name: one.annotation(**_collected(list(_parameters(one.annotation)), values))
        if _is_group(one.annotation)
        else values[one.name]
        for one in parameters
    }


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
