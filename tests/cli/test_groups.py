"""Groups of options: what typer sees of them, what the command gets, and which study fields they set."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from mless.cli import app
from mless.cli.groups import StudyField, spread, study_changes, study_options


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Annotated[int | None, typer.Option(help="How large."), StudyField()] = None
    quick: Annotated[bool, typer.Option("--quick", help="Do not wait.")] = False


@dataclass(frozen=True, kw_only=True)
class Outer:
    colour: Annotated[str | None, typer.Option("--colour", "-c", help="Which."), StudyField("paint.colour")] = None
    inner: Inner
    last: Annotated[Annotated[str | None, typer.Option(help="Both."), StudyField()], StudyField("paint.last")] = None


def _grouped(seen: list[Any]) -> typer.Typer:
    def command(name: Annotated[str, typer.Argument(help="Whose.")], *, options: Outer) -> None:
        """Say it."""
        seen.append((name, options))

    made = typer.Typer(rich_markup_mode=None)
    made.command()(spread(command))
    return made


def test_a_group_is_typed_as_options_of_their_own() -> None:
    seen: list[Any] = []
    made = _grouped(seen)
    assert CliRunner().invoke(made, ["Ann", "--size", "3", "-c", "red"]).exit_code == 0
    assert CliRunner().invoke(made, ["Bob", "--quick"]).exit_code == 0
    assert seen == [
        ("Ann", Outer(colour="red", inner=Inner(size=3))),
        ("Bob", Outer(inner=Inner(quick=True))),
    ]


def test_the_help_has_the_order_of_declaration() -> None:
    shown = CliRunner().invoke(_grouped([]), ["--help"]).output
    places = [shown.index(word) for word in ("Say it.", "Whose.", "--colour", "How large.", "--quick", "Both.")]
    assert places == sorted(places)


def test_study_fields_are_those_that_were_given() -> None:
    assert study_changes(Outer(inner=Inner())) == {}
    given = Outer(colour="red", inner=Inner(size=0, quick=True), last="x")
    assert study_changes(given) == {"paint.colour": "red", "size": 0, "last": "x", "paint.last": "x"}
    assert study_options(given) == {
        "paint.colour": "--colour",
        "size": "--size",
        "last": "--last",
        "paint.last": "--last",
    }


def test_two_options_of_one_name_are_refused() -> None:
    def command(*, size: Annotated[int, typer.Option()] = 1, inner: Inner) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'size'"):
        spread(command)


def test_no_command_takes_many_parameters() -> None:
    """Options come in groups; what typer sees is the spread form."""
    from mless.cli import _COMMANDS  # pyright: ignore[reportPrivateUsage]

    taken = {name: len(inspect.signature(command).parameters) for name, command in _COMMANDS.items()}
    assert max(taken.values()) <= 3, taken
    assert [one.name for one in app.registered_commands] == list(taken)
