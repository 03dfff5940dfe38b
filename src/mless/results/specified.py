"""Reading one comparison in many specifications, and how it is said: the same in verdicts and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mless.results.reading import StoredStudy, read_measured
from mless.results.specification_rows import Specification, SpecificationSetting, SpecificationTest

#: The settings of a specification, in the order of tables and pictures: column → in words.
SETTINGS = {
    "template": "template",
    "system": "system text",
    "dtype": "dtype",
    "engine": "engine",
    "extraction": "extraction",
    "grader": "grader",
}


@dataclass(frozen=True, slots=True)
class StoredMultiverse(StoredStudy):
    """A folder that `mless run multiverse` made."""

    @classmethod
    def open(cls, path: Path) -> StoredMultiverse:
        return cls(path, read_measured(path, "multiverse", "specifications"))

    def specifications(self) -> list[Specification]:
        """The rows of ``specifications.parquet``."""
        names = [one.name for one in fields(Specification)]
        return [Specification(**row) for row in self.table("specifications", names).to_pylist()]

    def tests(self) -> list[SpecificationTest]:
        """The rows of ``specification_tests.parquet``."""
        names = [one.name for one in fields(SpecificationTest)]
        return [SpecificationTest(**row) for row in self.table("specification_tests", names).to_pylist()]

    def settings(self) -> list[SpecificationSetting]:
        """The rows of ``specification_settings.parquet``."""
        names = [one.name for one in fields(SpecificationSetting)]
        return [SpecificationSetting(**row) for row in self.table("specification_settings", names).to_pylist()]


def tally(test: SpecificationTest) -> str:
    """``rises in 31 of 96 specifications, drops in 4, undecided in 61``."""
    rest = [f"{word} in {n}" for word, n in (("drops", test.drops), ("equivalent", test.equivalent)) if n]
    rest += [f"undecided in {test.undecided}"] if test.undecided else []
    return ", ".join([f"rises in {test.rises} of {test.specifications} specifications", *rest])


def varied(rows: Sequence[Specification]) -> dict[str, list[str]]:
    """The settings that have several values among these specifications, with their values in the order of the grid."""
    found = {
        name: list(dict.fromkeys(value for row in rows if (value := getattr(row, name)) is not None))
        for name in SETTINGS
    }
    return {name: values for name, values in found.items() if len(values) > 1}
