"""The page of a cause study: for each metric the ladder, the cells that matter and the chain, each number as the tables have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_report import Page

from cause_folders import write_cause
from mless.report import publish
from mless.report.cause import MOST
from mless.results.caused import StoredCause, place_of, share_words, shown_at
from mless.results.nats import around, signed

METRICS = ("solution", "contrast", "pass@1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cause(tmp_path_factory.mktemp("cause") / "r", metrics=METRICS, layers=30)


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(publish(folder, fresh=True).read_text(encoding="utf-8"))


def test_sections(page: Page) -> None:
    for heading in ("Verdict", "What was run", "Figures", *METRICS, "The ladder", "The map", "The published chain", "How it was measured"):  # fmt: skip
        assert heading in page.text
    assert not page.open


def test_every_step_and_every_link_has_its_number(folder: Path, page: Page) -> None:
    stored = StoredCause.open(folder)
    steps = [row for row in stored.steps() if row.against == "none" or row.adds_up]
    assert len(steps) > 20
    for row in steps:
        assert signed(row.delta, row.metric) + around(row.lo, row.hi, row.metric) in page.text
    for row in stored.links():
        assert signed(row.effect, row.metric) + around(row.lo, row.hi, row.metric) in page.text
        assert share_words(row) in page.text


def test_cells_that_matter_are_listed_the_largest_first(folder: Path, page: Page) -> None:
    for metric in METRICS:
        own = [row for row in StoredCause.open(folder).cells() if row.metric == metric]
        shown = sorted((row for row in own if shown_at(row.p_adjusted)), key=lambda row: -abs(row.effect))
        assert f"{len(shown)} of {len(own)} cells matter" in page.text
        for row in shown[:MOST]:
            assert place_of(row) in page.text
            assert signed(row.effect, metric) + around(row.lo, row.hi, metric) in page.text


@pytest.mark.parametrize("of", ["ladder", "map", "chain"])
def test_one_of_the_three_alone_has_its_numbers_and_no_empty_table(tmp_path: Path, of: str) -> None:
    folder = write_cause(tmp_path / "r", layers=12, of=(of,))
    page = Page(publish(folder, fresh=True).read_text(encoding="utf-8"))
    stored = StoredCause.open(folder)
    headings = {"ladder": "The ladder: who has to", "map": "The map: parts of layers", "chain": "The published chain"}
    assert {name for name, heading in headings.items() if heading in page.text} == {of}
    links = [signed(row.effect, row.metric) + around(row.lo, row.hi, row.metric) for row in stored.links()]
    cells = [row for row in stored.cells() if shown_at(row.p_adjusted)]
    cells = [signed(row.effect, row.metric) + around(row.lo, row.hi, row.metric) for row in cells]
    steps = [
        signed(row.delta, row.metric) + around(row.lo, row.hi, row.metric) for row in stored.steps() if row.adds_up
    ]
    said = {"ladder": steps, "map": cells, "chain": links}[of]
    assert len(said) > 4
    for number in said:
        assert number in page.text
