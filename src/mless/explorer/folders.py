"""The result folders that the explorer shows, known by number, and slices of their tables."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa
import pyarrow.dataset as ds

from mless import gates
from mless.errors import BadFolder
from mless.results.folder import ResultFolder
from mless.results.inspecting import no_result_folder
from mless.results.manifest import measured_in
from mless.results.reading import StoredResults, StoredStudy

T = TypeVar("T")

#: Answers and slices that are kept. The oldest are dropped first.
_KEPT_BYTES = 64 << 20


class Kept:
    """A bounded cache: the least recently used value is dropped first. Threads may share it."""

    def __init__(self, limit: int = _KEPT_BYTES) -> None:
        self._limit, self._used = limit, 0
        self._values: OrderedDict[object, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        #: Values that a thread is making.
        self._made: dict[object, threading.Lock] = {}

    def get(self, key: object, make: Callable[[], T], size: Callable[[T], int] = lambda value: 4096) -> T:
        """The value of a key; made where it is not kept. While a thread makes it, others that want it wait."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return cast("T", self._values[key][0])
            making = self._made.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    return cast("T", self._values[key][0])
            try:
                value = make()
                return self.put(key, value, size(value))
            finally:
                with self._lock:
                    self._made.pop(key, None)

    def put(self, key: object, value: T, cost: int) -> T:
        """Keep a value, unless there is one; the one that is kept."""
        with self._lock:
            if key in self._values:
                return cast("T", self._values[key][0])
            if cost <= self._limit:
                self._values[key] = (value, cost)
                self._used += cost
            while self._used > self._limit:
                _, (_, dropped) = self._values.popitem(last=False)
                self._used -= dropped
        return value


class Folder:
    """One result folder. study.json is read again when it changes, so that a running study is shown as it is now."""

    def __init__(self, number: int, path: Path, kept: Kept, *, patient: bool = False, elsewhere: bool = False) -> None:
        self.number, self.path = number, path
        #: Whether the page is read on another machine: it then names the folder, and no path of this machine.
        self.elsewhere = elsewhere
        #: Whether an answer waits until all of it is read: an export does, a page gets what is there and asks again.
        self.patient = patient
        self._kept = kept

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def place(self) -> str:
        """What the page says of where the folder is."""
        return self.name if self.elsewhere else str(self.path)

    def state(self) -> tuple[object, ...]:
        """What changes when study.json is written anew."""
        try:
            return tuple(gates.state_of(self.path / "study.json"))
        except OSError:
            return ()

    def about(self) -> dict[str, Any]:
        """study.json, checked. A folder without one is refused."""

        def read() -> dict[str, Any]:
            found = ResultFolder(self.path).about()
            if found is None:
                raise no_result_folder(self.path)
            return found

        return self.kept("about", read)

    @property
    def measured(self) -> str:
        return measured_in(self.about())

    @property
    def study(self) -> StoredStudy:
        return StoredStudy(self.path, self.about())

    @property
    def attention(self) -> StoredResults:
        """The folder as one that holds attention."""
        return StoredResults(self.path, self.about())

    def has(self, *tables: str) -> bool:
        """Whether finished tables are there."""
        return all((self.path / f"{table}.parquet").is_file() for table in tables)

    def table(
        self, name: str, columns: Sequence[str], where: ds.Expression | None = None, *, newer: Sequence[str] = ()
    ) -> pa.Table:
        """Columns and rows of a small table, checked as a whole before the first reading."""
        return self.study.table(name, columns, where, newer=newer)

    def kept(self, key: object, make: Callable[[], T], size: Callable[[T], int] = lambda value: 4096) -> T:
        """A value made from this folder; made anew once study.json has changed."""
        return self._kept.get((self.number, self.state(), key), make, size)

    def keep(self, key: object, value: object, cost: int) -> None:
        """Keep a value that was made beside another."""
        self._kept.put((self.number, self.state(), key), value, cost)


class Folders(Sequence[Folder]):
    """The folders of one explorer, in the order they were given. A request names one by its number, from 1; never by a path."""

    def __init__(self, paths: Sequence[Path], *, patient: bool = False, elsewhere: bool = False) -> None:
        if not paths:
            raise BadFolder(
                "no result folder was given; expected one or more, such as results/quick-SmolLM2-135M-Instruct"
            )
        lacking = [no_result_folder(Path(path)) for path in paths if not (Path(path) / "study.json").is_file()]
        if len(lacking) == len(paths):
            raise BadFolder("; ".join(map(str, lacking)))
        #: What was given and is no result folder. The page says so beside the others.
        self.lacking = tuple(map(str, lacking))
        kept = Kept()
        self._folders = [
            Folder(number, Path(path), kept, patient=patient, elsewhere=elsewhere)
            for number, path in enumerate(paths, 1)
        ]

    def only(self, numbers: Collection[int]) -> Folders:
        """Some of the folders, with the numbers they have here."""
        found = object.__new__(Folders)
        found.lacking = self.lacking
        found._folders = [one for one in self._folders if one.number in numbers]
        return found

    def __len__(self) -> int:
        return len(self._folders)

    def __iter__(self) -> Iterator[Folder]:
        return iter(self._folders)

    def __getitem__(self, at: Any) -> Any:
        return self._folders[at]
