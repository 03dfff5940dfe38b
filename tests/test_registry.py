"""Tables of named things, and things that come into them from outside the package."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import mless
from mless import registry
from mless.errors import BadPlugin, BadStudy, MlessError
from outside import Outside

#: A package of one's own: a table, and a module with things for it.
TOYBOX = """
from mless import registry
toys = registry.Registry("toys", "toy", {"ball": "toybox:BALL", "broken": "toybox:NOTHING"}, wants="a number", fits=lambda one: isinstance(one, float))
registry.TABLES["toys"] = "toybox:toys"
BALL = 1.0
"""


@pytest.fixture
def shelf(outside: Outside) -> Path:
    """A folder on sys.path with the table `toys` in it."""
    outside.write("toybox", TOYBOX)
    importlib.import_module("toybox")
    return outside.folder


def toys() -> registry.Registry[Any]:
    return registry.table_of("toys")


def test_built_in_things_are_imported_when_asked_for(shelf: Path) -> None:
    assert toys().names() == ["ball", "broken"]
    assert toys().get("ball") == 1.0
    with pytest.raises(AttributeError):
        toys().get("broken")


def test_unknown_names_are_refused_with_the_nearest(shelf: Path) -> None:
    with pytest.raises(BadStudy, match=r"no toy 'bal' \(did you mean 'ball'\?\); there are: ball, broken"):
        toys().get("bal")
    with pytest.raises(BadStudy, match="no toy 'xyz'; there are: ball, broken"):
        toys().check("xyz")
    with pytest.raises(BadStudy, match=r"no table 'toy' \(did you mean 'toys'\?\); there are: .*toys"):
        mless.register("toy", "kite", 2.0)
    assert "ball" in toys()
    assert "kite" not in toys()
    assert list(toys()) == ["ball", "broken"]


def test_a_thing_or_its_address_is_registered(shelf: Path) -> None:
    mless.register("toys", "kite", 2.0)
    (shelf / "attic.py").write_text("class Old:\n    drum = 3.0\n")
    mless.register("toys", "drum", "attic:Old.drum")
    assert "attic" not in sys.modules
    assert toys().names() == ["ball", "broken", "drum", "kite"]
    assert (toys().get("kite"), toys().get("drum")) == (2.0, 3.0)
    toys().remove("kite")
    assert "kite" not in toys()


def test_a_taken_name_is_refused(shelf: Path) -> None:
    mless.register("toys", "kite", 2.0)
    with pytest.raises(BadPlugin, match=r"toy 'kite' is there already \(a float\); give 'attic:KITE' another name"):
        mless.register("toys", "kite", "attic:KITE")
    with pytest.raises(BadPlugin, match=r"toy 'ball' is there already \(part of mless\)"):
        mless.register("toys", "ball", 2.0)
    mless.register("toys", "drum", "attic:DRUM")
    mless.register("toys", "drum", "attic:DRUM")  # the same again


def test_a_cell_of_a_notebook_may_run_again(shelf: Path, outside: Outside) -> None:
    code = 'import mless, toybox; code = \'mless.register("toys", "kite", %s)\'\nfor n in (2.0, 3.0): exec(code % n)\n'
    code += "print(toybox.toys.get('kite'), repr(__import__('os').environ['MLESS_PLUGINS']))"
    assert outside.in_another_process(code) == "3.0 ''"


def test_only_the_right_sort_of_thing_is_taken(shelf: Path) -> None:
    with pytest.raises(BadPlugin, match="toy 'kite' must be a number, got a list"):
        mless.register("toys", "kite", [])
    (shelf / "attic.py").write_text("KITE = 'paper'\n")
    mless.register("toys", "kite", "attic:KITE")
    with pytest.raises(BadPlugin, match="toy 'kite' must be a number, got 'paper'"):
        toys().get("kite")
    with pytest.raises(BadPlugin, match="expected an object, or a text 'module:attribute'; got 'attic'"):
        mless.register("toys", "drum", "attic")
    for name in ("", "a,b", "a=b", " a"):
        with pytest.raises(BadPlugin, match="cannot be the name of a toy"):
            mless.register("toys", name, 2.0)


PLUGIN = "import mless\nKITE = 2.0\nmless.register('toys', 'kite', KITE)\n"


def test_modules_named_in_the_environment_are_found(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shelf / "plugin.py").write_text(PLUGIN)
    (shelf / "attic.py").write_text("DRUM = 3.0\n")
    monkeypatch.setenv(registry.VARIABLE, "plugin, toys.drum=attic:DRUM,")
    assert toys().get("ball") == 1.0
    assert "plugin" not in sys.modules  # a built-in thing needs no plugin
    assert toys().names() == ["ball", "broken", "drum", "kite"]
    assert (toys().get("kite"), toys().get("drum")) == (2.0, 3.0)
    assert os.environ[registry.VARIABLE] == "plugin, toys.drum=attic:DRUM,"


def test_processes_started_later_find_what_was_registered(shelf: Path, outside: Outside) -> None:
    (shelf / "plugin.py").write_text(PLUGIN)
    importlib.import_module("plugin")
    mless.register("toys", "drum", "attic:DRUM")
    (shelf / "attic.py").write_text("DRUM = 3.0\n")
    assert os.environ[registry.VARIABLE] == "plugin,toys.drum=attic:DRUM"
    assert (
        outside.in_another_process("import toybox; print(toybox.toys.get('kite'), toybox.toys.get('drum'))")
        == "2.0 3.0"
    )
    toys().remove("drum")
    assert os.environ[registry.VARIABLE] == "plugin"


def test_functions_and_classes_are_handed_on_by_their_address(shelf: Path) -> None:
    (shelf / "plugin.py").write_text("import mless\ndef kite(): ...\nmless.register('games', 'kite', kite)\n")
    (shelf / "games.py").write_text("from mless import registry\ngames = registry.Registry('games', 'game', {})\n")
    registry.TABLES["games"] = "games:games"
    importlib.import_module("plugin")
    assert os.environ[registry.VARIABLE] == "games.kite=plugin:kite"


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        ("missing", "ModuleNotFoundError: No module named 'missing'"),
        ("plugin", "ValueError: no good"),
        ("toys.kite", "No module named"),
        ("kite=attic:KITE", "expected a module, or TABLE.NAME=MODULE:ATTRIBUTE"),
        ("games.kite=attic:KITE", "no table 'games'"),
        ("toys.ball=attic:KITE", "toy 'ball' is there already"),
    ],
)
def test_a_broken_plugin_is_named(shelf: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, says: str) -> None:
    (shelf / "plugin.py").write_text("raise ValueError('no good')\n")
    monkeypatch.setenv(registry.VARIABLE, plugin)
    assert toys().get("ball") == 1.0
    for _ in range(2):  # it is told every time, not once
        with pytest.raises(
            MlessError, match=f"the plugin '{plugin}', named in MLESS_PLUGINS, cannot be used"
        ) as caught:
            toys().get("kite")
        assert says in str(caught.value)


def test_a_broken_address_is_named(shelf: Path) -> None:
    mless.register("toys", "kite", "missing:KITE")
    with pytest.raises(
        BadPlugin, match=r"toy 'kite' cannot be imported from 'missing:KITE' .*No module named 'missing'"
    ):
        toys().get("kite")


def installed(shelf: Path, package: str, points: str) -> None:
    folder = shelf / f"{package}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[mless.toys]\n{points}\n")


def test_entry_points_of_installed_packages_are_found(shelf: Path) -> None:
    installed(shelf, "attic", "kite = attic:KITE\ndrum = missing:DRUM")
    (shelf / "attic.py").write_text("KITE = 2.0\n")
    assert toys().names() == ["ball", "broken", "drum", "kite"]
    assert toys().get("kite") == 2.0
    with pytest.raises(BadPlugin, match="toy 'drum' of the package 'attic' cannot be imported from 'missing:DRUM'"):
        toys().get("drum")
    with pytest.raises(BadPlugin, match=r"toy 'drum' is there already \(the package 'attic'\)"):
        mless.register("toys", "drum", 2.0)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (["ball = attic:KITE"], "the package 'p0' brings toy 'ball', but that name is taken by mless"),
        (["kite = attic:KITE", "kite = loft:KITE"], "brings toy 'kite', but that name is taken by the package 'p"),
    ],
)
def test_entry_points_that_clash_are_named(shelf: Path, points: list[str], says: str) -> None:
    for n, point in enumerate(points):
        installed(shelf, f"p{n}", point)
    with pytest.raises(BadPlugin, match=says):
        toys().names()


def test_every_table_is_where_it_is_said_to_be() -> None:
    for what, address in registry.TABLES.items():
        table = registry.table_of(what)
        assert isinstance(table, registry.Registry), address
        assert table.what == what
        for name in table.names():
            table.get(name)


def test_a_plugin_that_fails_half_way_says_the_same_the_second_time(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.write(
        "halfway",
        """
import mless
from mless.arm_rules import ArmRule
mless.register("arm_rules", "half", ArmRule(lambda old, drawn: old))
raise ValueError("no good")
""",
    )
    monkeypatch.setenv("MLESS_PLUGINS", "halfway")
    for _ in range(2):
        with pytest.raises(BadPlugin, match=r"cannot be used \(ValueError: no good\)"):
            registry.table_of("arm_rules").check("unknown")


def test_a_method_is_not_passed_on_as_its_function(outside: Outside) -> None:
    outside.write("holding", "class Holder:\n    def make(self): ...\nheld = Holder()\n")
    held = importlib.import_module("holding").held
    mless.register("graders", "held", held.make)
    assert "Holder.make" not in os.environ.get("MLESS_PLUGINS", "")


def test_an_unknown_name_says_how_a_plugin_is_found(shelf: Path) -> None:
    with pytest.raises(BadStudy, match="needs the plugin: install it, or name its module in MLESS_PLUGINS"):
        toys().check("xyz")


def test_measurements_are_classes_of_measurement() -> None:
    with pytest.raises(
        BadPlugin, match=r"measurement 'mine' must be a class of mless\.study\.bench\.Measurement, got a object"
    ):
        mless.register("measurements", "mine", object())
