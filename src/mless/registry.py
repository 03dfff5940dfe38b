"""Tables of named things: engines, condition kinds, graders and so on. Each table lists what mless has and finds what others add.

A thing from outside the package comes in one of three ways:

* an entry point of an installed package, in the group ``mless.TABLE`` (``mless.engines``);
* `register`, which is `mless.register`;
* the environment variable MLESS_PLUGINS: modules to import, separated by commas, or single things as ``TABLE.NAME=MODULE:ATTRIBUTE``.

Things that come with mless are found first, so plugins are read only when another name is looked up, or when all names are listed.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any, Generic, TypeVar, cast

from mless.errors import BadPlugin, BadStudy, MlessError

T = TypeVar("T")

VARIABLE = "MLESS_PLUGINS"

#: Every table by name, and where it is. A new table needs a row here, so that `register` finds it.
TABLES: dict[str, str] = {
    "arm_rules": "mless.arm_rules:ARM_RULES",
    "condition_kinds": "mless.conditions:CONDITION_KINDS",
    "engines": "mless.engines:ENGINES",
    "extraction_rules": "mless.tasks:EXTRACTION_RULES",
    "graders": "mless.tasks:GRADERS",
    "figures": "mless.results.figure_kinds:FIGURES",
    "measurements": "mless.study.kinds:MEASUREMENTS",
    "pages": "mless.report.kinds:PAGES",
    "readouts": "mless.results.readouts:READOUTS",
}

# Plugins may register things while they are imported, so the lock can be taken twice by one thread.
_LOCK = threading.RLock()
#: Entries of MLESS_PLUGINS that were read.
_READ: set[str] = set()
#: Everything that was added, in order.
_ADDED: list[tuple[Registry[Any], str]] = []


def near(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where a known name is like this one; else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def found_at(address: str) -> Any:
    """What ``module:attribute`` names; the module is imported."""
    module, _, path = address.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def table_of(what: str) -> Registry[Any]:
    """The table by its name."""
    if what not in TABLES:
        raise BadStudy(f"no table {what!r}{near(what, TABLES)}; there are: {', '.join(TABLES)}")
    return found_at(TABLES[what])


def register(what: str, name: str, thing: object) -> None:
    """Add a thing of your own to one of mless's tables: ``mless.register("engines", "mine", "my_package.engine:ENGINE")``.

    `what` is the table (engines, condition_kinds, arm_rules, graders, extraction_rules, …), `name` what studies call the thing. `thing` is the
    object itself, or a text ``module:attribute`` that is imported when it is first needed. A name that is taken is refused.

    Processes started from this one find the thing too: it is added to MLESS_PLUGINS in this process's environment. They import it by its
    module, so its module must be one that they can import. What is defined in ``__main__`` (a script, a notebook) is not passed on.
    """
    caller = _calling_module()
    table_of(what).add(name, thing, caller)
    if entry := _entry(what, name, thing, caller):
        with _LOCK:
            _READ.add(entry)
            given = _entries()
            if entry not in given:
                os.environ[VARIABLE] = ",".join([*given, entry])


def _calling_module() -> str:
    """The module that called `register`, past mless itself and what checks its types in tests."""
    depth = 1
    while (name := str(sys._getframe(depth).f_globals.get("__name__"))).partition(".")[0] in _BETWEEN:  # pyright: ignore[reportPrivateUsage]
        depth += 1
    return name


_BETWEEN = ("mless", "jaxtyping", "beartype")
_MAIN = ("__main__", "__mp_main__")


def _entry(what: str, name: str, thing: object, caller: str) -> str | None:
    """How another process finds the thing; None where it cannot, or does not need it."""
    if caller in _entries():
        return None  # that module is imported there anyway, and registers the thing as it did here
    address = _address(thing)
    # A value without an address, such as ArmRule(…), is made by running the caller's module.
    module = caller if address is None else address.partition(":")[0]
    if module in _MAIN:
        return None
    return module if address is None else f"{what}.{name}={address}"


def _address(thing: object) -> str | None:
    """``module:attribute`` of a thing, where it can be found again by it: a text, a function or a class."""
    if isinstance(thing, str):
        return thing
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or "<" in path:
        return None
    # A bound method has the address of a function that is another thing.
    held: object = sys.modules.get(module)
    for part in path.split("."):
        held = getattr(held, part, None)
    return f"{module}:{path}" if held is thing or held is None else None


def _entries() -> list[str]:
    return [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]


def _read_plugins() -> None:
    """Take in what MLESS_PLUGINS names and was not read before."""
    with _LOCK:
        for entry in _entries():
            if entry in _READ:
                continue
            _READ.add(entry)  # at once: a plugin may look something up while it is imported
            before = len(_ADDED)
            try:
                _read(entry)
            except (Exception, SystemExit) as fault:
                _READ.discard(entry)
                for table, name in _ADDED[before:]:  # else the next try would find its names taken
                    table.remove(name)
                raise BadPlugin(
                    f"the plugin {entry!r}, named in {VARIABLE}, cannot be used ({_fault_words(fault)}); fix it, or take it out of {VARIABLE}"
                ) from fault


def _read(entry: str) -> None:
    named, equals, address = entry.partition("=")
    if not equals:
        importlib.import_module(entry)
        return
    what, dot, name = named.partition(".")
    if not dot or ":" not in address:
        raise BadPlugin("expected a module, or TABLE.NAME=MODULE:ATTRIBUTE")
    table_of(what).add(name, address)


def _fault_words(fault: BaseException) -> str:
    first = str(fault).partition("\n")[0]
    return first if isinstance(fault, MlessError) else f"{type(fault).__name__}: {first}"


class Registry(Generic[T]):
    """A table of named things.

    `what` names the table, `label` one of its things ("engine"). `built_in` things are objects, or texts ``module:attribute``: those are
    imported when first asked for. `wants` says what a thing must be, and `fits` checks it.
    """

    def __init__(
        self,
        what: str,
        label: str,
        built_in: Mapping[str, T | str],
        *,
        wants: str = "",
        fits: Callable[[Any], bool] | None = None,
    ) -> None:
        self.what = what
        self.label = label
        self._built_in: dict[str, T | str] = dict(built_in)
        self._added: dict[str, object] = {}
        self._origins: dict[str, str] = {}
        self._entry_points: dict[str, metadata.EntryPoint] | None = None
        self._wants, self._fits = wants, fits

    def get(self, name: str) -> T:
        """The thing of that name; an unknown name is refused with the nearest one."""
        found: object = self._built_in.get(name)
        if found is None:
            self.check(name)
            found = self._added.get(name)
        if found is None:
            found = self._from_entry_point(name)
        elif isinstance(found, str):
            found = self._imported(name, found)
        return cast("T", found)

    def check(self, name: str, where: str = "") -> None:
        """Refuse an unknown name; nothing is imported but plugins. `where` begins the message: "condition 'x': "."""
        if name not in self:
            known = self.names()
            close = near(name, known) if isinstance(name, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadStudy(
                f"{where}no {self.label} {name!r}{close}; there are: {', '.join(known)}. One that a plugin brings needs the plugin: "
                f"install it, or name its module in {VARIABLE}"
            )

    def names(self) -> list[str]:
        """Every name: first those that come with mless, then added ones in order of the alphabet."""
        _read_plugins()
        return [*self._built_in, *sorted({*self._added, *self._found_entry_points()})]

    def __contains__(self, name: object) -> bool:
        # The check of built-in names comes first and alone, so that it can be made while mless is still being imported.
        if name in self._built_in:
            return True
        _read_plugins()
        return name in self._added or name in self._found_entry_points()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def add(self, name: str, thing: object, origin: str = "") -> None:
        """Take in a thing from outside; `origin` is the module that adds it. `register` also tells processes started from this one."""
        if not name or any(sign in name for sign in ",=\n") or name != name.strip():
            raise BadPlugin(f"{name!r} cannot be the name of {self._one()}: no comma, equals sign or blank end")
        if isinstance(thing, str):
            module, _, path = thing.partition(":")
            if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
                raise BadPlugin(
                    f"{self.label} {name!r}: expected an object, or a text 'module:attribute'; got {thing!r}"
                )
        else:
            self._require(name, thing)
        with _LOCK:
            if taken := self._taken_by(name, thing, origin):
                raise BadPlugin(f"{self.label} {name!r} is there already ({taken}); give {_shown(thing)} another name")
            self._added[name] = thing
            self._origins[name] = origin
            _ADDED.append((self, name))

    def remove(self, name: str) -> None:
        """Forget a thing that was added in this process; what comes with mless or by an entry point stays."""
        self._added.pop(name, None)
        begin = f"{self.what}.{name}="
        if gone := [entry for entry in _entries() if entry.startswith(begin)]:
            _READ.difference_update(gone)
            os.environ[VARIABLE] = ",".join(entry for entry in _entries() if entry not in gone)

    def _taken_by(self, name: str, thing: object, origin: str) -> str | None:
        """What else has the name; None where it is free, or where the same thing is added again."""
        if name in self._built_in:
            return "part of mless"
        held = self._added.get(name)
        if held is not None:
            again = held is thing or (_address(held) is not None and _address(held) == _address(thing))
            # A notebook's cell may run again and make its values again.
            return None if again or origin == self._origins.get(name) == "__main__" else _shown(held)
        point = self._found_entry_points().get(name)
        return _origin(point) if point is not None and point.value != _address(thing) else None

    def _one(self) -> str:
        return f"{'an' if self.label[0] in 'aeiou' else 'a'} {self.label}"

    def _require(self, name: str, thing: object) -> None:
        if self._fits is not None and not self._fits(thing):
            raise BadPlugin(f"{self.label} {name!r} must be {self._wants}, got {_shown(thing)}")

    def _imported(self, name: str, address: str) -> object:
        try:
            thing = found_at(address)
        except Exception as fault:
            if name in self._built_in:
                raise
            raise BadPlugin(
                f"{self.label} {name!r} cannot be imported from {address!r} ({_fault_words(fault)}); fix it, or register another"
            ) from fault
        self._require(name, thing)
        (self._built_in if name in self._built_in else self._added)[name] = cast("T", thing)
        return thing

    # ---- entry points of installed packages

    def _found_entry_points(self) -> dict[str, metadata.EntryPoint]:
        if self._entry_points is None:
            found: dict[str, metadata.EntryPoint] = {}
            for point in metadata.entry_points(group=f"mless.{self.what}"):
                if point.name in self._built_in or found.get(point.name, point) != point:
                    raise BadPlugin(
                        f"{_origin(point)} brings {self.label} {point.name!r}, but that name is taken by "
                        f"{'mless' if point.name in self._built_in else _origin(found[point.name])}; uninstall one of them"
                    )
                found[point.name] = point
            self._entry_points = found
        return self._entry_points

    def _from_entry_point(self, name: str) -> object:
        point = self._found_entry_points()[name]
        try:
            thing: object = point.load()
        except Exception as fault:
            raise BadPlugin(
                f"{self.label} {name!r} of {_origin(point)} cannot be imported from {point.value!r} ({_fault_words(fault)}); fix or uninstall it"
            ) from fault
        self._require(name, thing)
        self._added[name] = thing
        return thing


def _shown(thing: object) -> str:
    return repr(thing) if isinstance(thing, str) else (_address(thing) or f"a {type(thing).__name__}")


def _origin(point: metadata.EntryPoint) -> str:
    return f"the package {point.dist.name!r}" if point.dist is not None else "an installed package"
