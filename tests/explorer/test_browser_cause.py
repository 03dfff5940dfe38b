"""User stories in a real Chromium: the ladder, the map of causes and the chain."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mless
from browsing import Open, until
from cause_folders import write_cause
from mless.results.caused import StoredCause
from stored_attention import EVIL
from synthetic import write_answers

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("causes")
    return [
        write_cause(root / "cause", layers=6, heads=(1, 2, 3)),
        write_cause(root / "nothing", layers=4, whole=0.0, label=EVIL),
        write_cause(root / "deep", layers=80, items=12, activation=False, metrics=("contrast",)),
    ]


@pytest.fixture(scope="module")
def address(paths: list[Path]) -> Iterator[str]:
    running = mless.show(paths, browser=False)
    yield running.address
    running.stop()


def shown(opened: Open, address: str, view: str, **settings: Any) -> Any:
    """A page that shows this view. Any error of a script fails the story."""
    page = opened(**settings).go(f"{address}#{view}")
    page.wait_for_selector("main h1")
    return page


def test_rungs_and_changes_tell_their_numbers(opened: Open, address: str) -> None:
    page = shown(opened, address, "ladder?folder=1")
    assert page.locator("svg .mark").count() == 10
    page.locator("svg .mark", has_text="the question sees it").hover()
    tip = page.locator(".tip").inner_text()
    assert re.search(r"Δ solution \+0\.\d+ \[\+0\.\d+, \+0\.\d+\] nats a token", tip)
    assert "against nobody" in tip
    assert "after Holm p" in tip
    page.get_by_label("Metric").select_option("contrast")
    until(page, "document.querySelector('figcaption').textContent.includes('Δ contrast')")
    page.locator("svg .mark[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".tip .first").inner_text() == "filler there, seen by nobody"


def test_a_cell_shows_its_numbers_by_click_and_by_key(opened: Open, address: str, paths: list[Path]) -> None:
    page = shown(opened, address, "causes?folder=1&metric=contrast", permissions=["clipboard-read", "clipboard-write"])
    stored = [one for one in StoredCause.open(paths[0]).cells() if one.metric == "contrast"]
    assert page.locator("svg .mark[role=button]").count() == len(stored) == 6 * 5 * 2
    page.locator('svg .mark[aria-label^="layer 3, attention output of head 2, put in"]').click()
    said = page.locator(".readout").inner_text()
    [cell] = [one for one in stored if (one.layer, one.head, one.direction) == (3, 2, "in")]
    assert cell.share is not None
    assert f"{100 * cell.share:.0f} % [" in said
    assert f"{cell.effect:+.3f} [" in said
    for words in ("whole effect +0.", "after Holm p < 0.001", "40 items", "base: none"):
        assert words in said
    until(page, "location.hash.includes('layer=3') && location.hash.includes('head=2')")
    # The link shows the same cell; from there by keys to the next layer, and over the end of the row to the other panel.
    again = shown(opened, address, page.url.split("#")[1])
    assert again.locator(".readout").inner_text() == said
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "layer 4, attention output of head 2, put in" in page.locator(".readout").inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert "layer 4, attention output of head 3, put in" in page.locator(".readout").inner_text()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "layer 1, attention output of head 3, taken out" in page.locator(".readout").inner_text()
    page.locator(".readout").get_by_role("button", name="Proof").click()
    row = page.locator("dialog.proof").inner_text()
    assert "cause.parquet" in row
    assert 'layer=1, part="attention-output", head=3, direction="out"' in row


def test_the_map_is_copied_as_svg_and_csv(opened: Open, address: str) -> None:
    page = shown(opened, address, "causes?folder=2", permissions=["clipboard-read", "clipboard-write"])
    figure = page.locator("figure.chart")
    figure.get_by_role("button", name="Copy as SVG").click()
    until(page, "document.querySelector('.chart .said').textContent === 'copied'")
    drawn = page.evaluate("navigator.clipboard.readText()")
    assert drawn.startswith("<svg")
    assert "var(" not in drawn
    assert "class=" not in drawn
    figure.get_by_role("button", name="Copy as CSV").click()
    until(page, "navigator.clipboard.readText().then((text) => text.startsWith('layer,part,head,direction'))")
    rows = list(csv.DictReader(io.StringIO(page.evaluate("navigator.clipboard.readText()"))))
    assert len(rows) == 4 * 3 * 2
    assert {row["share"] for row in rows} == {""}


def test_where_no_share_is_known_it_is_said(opened: Open, address: str) -> None:
    page = shown(opened, address, "causes?folder=2")
    assert "No share is known: the whole effect is" in page.locator(".warning").inner_text()
    assert page.locator("svg .hatch").count() == 1
    page.locator("svg .mark").first.click()
    assert "not known" in page.locator(".readout").inner_text()
    page = shown(opened, address, "chain?folder=2")
    assert "may be 0" in page.locator(".warning").inner_text()
    assert page.locator("figure.chart").count() == 0
    assert page.locator("main table tbody tr").count() == 9
    # The name is markup, and stays text.
    assert page.locator("main script, main img").count() == 0


def test_links_of_the_chain_tell_their_shares(opened: Open, address: str, paths: list[Path]) -> None:
    page = shown(opened, address, "chain?folder=1")
    assert page.locator("svg .mark").count() == 7
    page.locator("svg .mark").last.hover()
    tip = page.locator(".tip").inner_text()
    assert "ARM in layer 1, to compare, put in" in tip
    [note] = {row.note for row in StoredCause.open(paths[0]).links() if row.link == "arm"}
    assert note
    assert note in tip
    page = shown(opened, address, "chain?folder=3")
    assert "cannot be patched, so “elsewhere” holds it too" in page.locator("main").inner_text()


@pytest.mark.parametrize("view", ["ladder?folder=1", "causes?folder=1", "causes?folder=3", "chain?folder=1"])
def test_a_phone_needs_no_sideways_scrolling(opened: Open, address: str, view: str) -> None:
    page = shown(
        opened, address, view, viewport={"width": 360, "height": 780}, has_touch=True, is_mobile=True, color_scheme="dark"
    )  # fmt: skip
    page.wait_for_selector("svg .mark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # No mark lies outside of its picture.
    assert page.evaluate(
        "[...document.querySelectorAll('svg .mark')].every((one) => { const [a, b] = [one, one.ownerSVGElement].map((e) => e.getBoundingClientRect()); "
        "return a.left >= b.left - 2 && a.right <= b.right + 2 && a.bottom <= b.bottom + 2 })"
    )


def test_an_exported_file_holds_the_three(opened: Open, paths: list[Path], tmp_path: Path) -> None:
    from mless.explorer import exporting

    others = write_answers(tmp_path / "answers", items=5)
    exporting.write(exporting.compose([*paths, others]), tmp_path / "page.html")
    for view in ("ladder?folder=1", "causes?folder=3", "chain?folder=1"):
        page = shown(opened, (tmp_path / "page.html").as_uri(), view, offline=True)
        page.wait_for_selector("svg .mark")
        assert page.locator(".refusal[role=alert]").count() == 0
