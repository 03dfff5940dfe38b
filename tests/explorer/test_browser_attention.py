"""User stories in a real Chromium: from a result folder to a found head, a found item, a token's numbers, a link, a file."""

from __future__ import annotations

import http.server
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mless
from browsing import Served, until
from mless.explorer import exporting
from mless.results.folder import ResultFolder
from mless.results.reading import StoredActivations
from paired_folders import SYSTEM, write_pair
from spelling import model_folder
from stored_attention import EVIL, write_attention
from synthetic import write_folder

pytestmark = pytest.mark.browser

HEAD = "#head?folder=1&condition=mless&layer=1&head=2"
STRIP = "#strip?folder=1&condition=mless&layer=1&head=2&item=5"
Opening = Callable[..., Any]


def test_open_and_read_the_verdict(opened: Opening, address: str) -> None:
    page = opened().go(address)
    assert "SmolLM2-135M-Instruct on bundled" in page.inner_text("h2")
    assert "layer 1" in page.inner_text(".verdict")
    assert page.title() == "Start – mless"


def test_read_conditions_and_where_it_came_from(opened: Opening, address: str) -> None:
    page = opened().go(address)
    page.click("text=3 conditions, 12 items")
    assert "20 × ' /'" in page.inner_text("table")
    page.click("text=Where it came from")
    assert "received: streaming" in page.inner_text("dl")
    assert "mless run quick" in page.inner_text("pre")


def test_from_the_start_to_the_map(opened: Opening, address: str) -> None:
    made = opened()
    page = made.go(address)
    page.click(".links >> text=Map")
    page.wait_for_selector("canvas.map")
    assert page.evaluate("location.hash") == "#map?folder=1"
    assert page.get_attribute("nav a:has-text('Map')", "aria-current") == "page"
    page.wait_for_selector(".readout >> text=L1H1")


def test_the_ends_of_the_maps_scale_say_that_values_beyond_have_its_colour(opened: Opening, address: str) -> None:
    for shown, ends in (("retained", ["0.5 or less", "2 or more"]), ("epsilon", ["1.5 or more", "−1.5 or less"])):
        page = opened(permissions=["clipboard-read", "clipboard-write"]).go(address + f"#map?folder=1&show={shown}")
        drawn = copied_svg(page)
        assert [
            words for words in re.findall(r">([^<]+)</text>", drawn) if " or " in words and "by its" not in words
        ] == ends


def copied_svg(page: Any) -> str:
    page.click("button[aria-label='Copy as SVG']")
    until(page, "navigator.clipboard.readText().then((text) => text.startsWith('<svg'))")
    return page.evaluate("navigator.clipboard.readText()")


@pytest.mark.parametrize(
    ("view", "title"),
    [
        ("#map?folder=1&condition=mless&layer=1&head=2", "SmolLM2-135M-Instruct: retained share λ, by layer and head"),
        (HEAD, "L1H2, mless: attention received by position, mean over items with 95 % band"),
        (
            STRIP,
            "item-005 in L1H2, mless: attention that each token receives, without filler above and with filler below",
        ),
    ],
    ids=["map", "head", "strip"],
)
def test_a_copied_picture_has_its_title_and_no_cursor(opened: Opening, address: str, view: str, title: str) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"]).go(address + view)
    page.hover("figure canvas, canvas.strip", position={"x": 90, "y": 60})
    drawn = copied_svg(page)
    heading = re.search(r'font-weight="600"[^>]*>([^<]+)</text>', drawn)
    assert heading is not None
    assert heading[1] == title
    mark = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--mark').trim()")
    # The line under a filler token has the cursor's colour too, but is filled.
    assert f'stroke="{mark}"' not in drawn


def test_the_map_says_value_interval_holm_p_and_verdict(opened: Opening, address: str) -> None:
    page = opened().go(address + "#map?folder=1&condition=mless&layer=1&head=2")
    said = page.inner_text(".readout")
    assert re.search(r"mless, L1H2 · retained share λ 0\.\d{3} \[0\.\d{3}, 0\.\d{3}\] · drops · Holm p = 0\.020", said)
    assert "uniform dilution" in said
    assert "natural text" in said


def test_move_in_the_map_with_the_keyboard_and_open_a_head(opened: Opening, address: str) -> None:
    page = opened().go(address + "#map?folder=1")
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".readout >> text=mless, L1H2")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".readout >> text=mless, L2H2")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")  # on to the next panel
    page.wait_for_selector(".readout >> text=random, layer 2")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 >> text=L2H6 under mless")


def test_keys_pressed_while_a_head_is_being_opened_do_not_change_its_address(opened: Opening, address: str) -> None:
    page = opened().go(address + "#map?folder=1")
    page.route("**/api/head?*", lambda route: (time.sleep(1), route.continue_()))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("h1 >> text=L1H2 under mless")
    page.wait_for_timeout(400)
    assert "#head?" in page.url
    assert "head=2" in page.url


def test_click_a_cell_of_the_map(opened: Opening, address: str) -> None:
    page = opened().go(address + "#map?folder=1")
    box = page.locator("canvas.map").bounding_box()
    page.mouse.move(box["x"] + 34 + 26 * 2.5 + 10, box["y"] + 40 + 5)
    page.wait_for_selector(".readout >> text=mless, L1H2")
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("h1 >> text=L1H2 under mless")


def test_choose_what_the_map_shows(opened: Opening, address: str) -> None:
    page = opened().go(address + "#map?folder=1")
    page.select_option("select[aria-label='show']", "epsilon")
    page.wait_for_selector("figcaption >> text=dilution exponent")
    page.select_option("select[aria-label='show']", "mass-filler")
    page.wait_for_selector("figcaption >> text=mass on filler")
    assert "filler 0." in page.inner_text(".readout")
    assert "show=mass-filler" in page.evaluate("location.hash")
    page.go_back()
    page.wait_for_selector("figcaption >> text=dilution exponent")


def test_the_map_of_an_activation_study(opened: Opening, served: Served, tmp_path: Path) -> None:
    """Layer × set of tokens, of a study that was really run on a tiny model."""
    model = str(model_folder(tmp_path / "model"))
    folder = mless.run(
        "activations",
        tmp_path / "moved",
        model=model,
        conditions=["none", "mless", "mful"],
        limit=6,
        prompt="raw",
        length=5,
    ).folder
    at = served(folder)
    page = opened().go(at)
    page.click(".links >> text=Map")
    page.wait_for_selector("h1 >> text=Map of activations")
    row = re.compile(r"mless, layer 1, (\S+).* · (\S+) \S+ → \S+, change (\S+) \[(\S+), (\S+)\], Holm p")
    said = row.search(page.inner_text(".readout"))
    assert said
    stored = StoredActivations(folder, ResultFolder(folder).about() or {})
    wanted = next(
        one for one in stored.changes(metric=said[2])
        if (one["condition"], one["layer"], one["tokens"]) == ("mless", 1, said[1])
    )  # fmt: skip
    assert float(said[3].replace("−", "-")) == pytest.approx(wanted["difference"], rel=0.02)
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".readout >> text=mless, layer 2")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".readout >> text=mful, layer 2")
    other = page.locator("select[aria-label='metric'] option").nth(1).get_attribute("value")
    page.select_option("select[aria-label='metric']", other)
    page.wait_for_selector(f"figcaption >> text={other}: change against none")
    assert f"metric={other}" in page.evaluate("location.hash")
    page.click("text=Proof")
    assert "activations.parquet" in page.inner_text("dialog.proof")


def test_a_head_has_its_facts_and_its_items_by_shift(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    facts = page.inner_text(".facts")
    assert "drops" in facts
    assert "uniform dilution" in facts
    first = page.inner_text(".items tbody tr:first-child")
    assert "item-005" in first
    assert page.locator(".items tbody tr").count() == 12


def test_the_curve_tells_its_numbers(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    page.focus("figure canvas")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".readout >> text=position 2")
    assert re.search(r"without filler 0\.\d+ \[", page.inner_text("section .readout"))
    page.hover("figure canvas", position={"x": 600, "y": 150})
    until(page, "!document.querySelector('section .readout').textContent.startsWith('position 2 ')")


def test_find_and_sort_items(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    page.fill("input[type=search]", "011")
    assert page.locator(".items tbody tr").count() == 1
    page.fill("input[type=search]", "")
    page.click("button.sort >> text=item")
    assert "item-001" in page.inner_text(".items tbody tr:first-child")
    page.click("button.sort >> text=item")
    assert "item-012" in page.inner_text(".items tbody tr:first-child")


def test_from_a_head_to_an_item_and_back_again(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    page.click("a >> text=item-005")
    page.wait_for_selector("h1 >> text=item-005 in L1H2 under mless")
    page.go_back()
    page.wait_for_selector("h1 >> text=L1H2 under mless")
    page.go_forward()
    page.wait_for_selector("h1 >> text=item-005")
    page.keyboard.press("Escape")
    page.wait_for_selector("h1 >> text=L1H2 under mless")


def test_walk_from_head_to_head_with_the_arrows(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("h1 >> text=L1H3")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("h1 >> text=L2H3")


def test_the_strip_gives_a_tokens_numbers(opened: Opening, address: str) -> None:
    page = opened().go(address + STRIP)
    said = page.inner_text(".readout")
    assert re.search(
        r"question · receives [\d.e−]+ without, [\d.e−]+ with filler · with / without 0\.\d+ · an even spread 0\.\d+ · natural text 0\.\d+",
        said,
    )
    page.keyboard.press("Home")
    page.wait_for_selector(".readout >> text=token 0")
    assert "<s>" in page.inner_text(".readout")
    page.hover("canvas.strip", position={"x": 80, "y": 30})
    until(page, "!document.querySelector('.readout').textContent.includes('token 0 ')")


def test_filler_tokens_say_so(opened: Opening, address: str) -> None:
    page = opened().go(address + STRIP + "&token=12")
    assert re.search(r"token 12 · filler · filler, receives", page.inner_text(".readout"))


def test_the_system_text_is_shown_with_the_prompt(opened: Opening, served: Served, tmp_path: Path) -> None:
    attention, answers = write_pair(tmp_path)
    at = served([attention, answers])
    for view in (STRIP, "#answer?folder=2&condition=mless&item=sum-005"):
        page = opened().go(at + view)
        assert page.locator("summary", has_text="System text (plain text, before the question)").count() == 1
        assert page.get_by_label("System text").inner_text() == SYSTEM


def test_from_a_strip_to_its_answer_and_back(opened: Opening, served: Served, tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    at = served(pair)
    exporting.write(exporting.compose(pair, items="5"), tmp_path / "page.html")
    for base in (at, (tmp_path / "page.html").as_uri()):
        page = opened().go(base + "#strip?folder=1&condition=mless&layer=1&head=2&item=5")
        page.click("text=Its answer")
        page.wait_for_selector("h1 >> text=Item sum-005")
        page.click("text=What its tokens receive in L1H2")
        page.wait_for_selector("h1 >> text=sum-005 in L1H2 under mless")
    # What a file does not hold is not offered.
    page.evaluate("() => { location.hash = '#answer?folder=2&condition=mless&item=sum-001'; }")
    page.wait_for_selector("h1 >> text=Item sum-001")
    assert page.locator(".beside").count() == 0


def test_an_interval_beyond_all_items_is_explained(opened: Opening, address: str) -> None:
    """In layer 1 the fifth item lies far from the others, and the interval reaches above all of them; in layer 2 it does not."""
    page = opened().go(address + HEAD)
    page.wait_for_selector("text=The 95 % interval reaches beyond all 12 items")
    page = opened().go(address + HEAD.replace("layer=1", "layer=2"))
    page.wait_for_selector("h1 >> text=L2H2")
    assert page.locator("text=interval reaches beyond").count() == 0
    said = page.evaluate(
        """async () => {
            const { beyondItems } = await import("./page/formats.js");
            return [[0.6, 0.8], [0.4, 0.8], [0.6, 0.95], [null, 0.8]].map(([lo, hi]) => Boolean(beyondItems(6, lo, hi, 0.5, 0.9)));
        }"""
    )
    assert said == [False, True, True, False]


@pytest.mark.parametrize("view", ["#map?folder=1", "#map?folder=1&show=epsilon", HEAD], ids=["map", "epsilon", "head"])
def test_no_word_of_a_picture_is_cut_on_a_small_phone(opened: Opening, address: str, view: str) -> None:
    page = opened(viewport={"width": 360, "height": 740}, permissions=["clipboard-read", "clipboard-write"]).go(
        address + view
    )
    outside = page.evaluate(
        """(text) => {
            const drawn = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
            document.body.append(document.adoptNode(drawn));
            const box = drawn.getBoundingClientRect();
            const cut = (own) => own.left < box.left - 1 || own.right > box.right + 1;
            return [...drawn.querySelectorAll("text")].filter((one) => cut(one.getBoundingClientRect())).map((one) => one.textContent);
        }""",
        copied_svg(page),
    )
    assert outside == []


def test_readouts_are_named_as_on_the_other_views(opened: Opening, address: str) -> None:
    for view in ("#forest?folder=1", "#between?folder=1"):
        page = opened().go(address + view)
        options = page.locator("select[aria-label='Readout'] option").all_inner_texts()
        assert options == ["dilution exponent ε", "retained share λ"]
        assert "At 0 the question's tokens lose nothing" in page.inner_text("main p.soft")
        page.select_option("select[aria-label='Readout']", label="retained share λ")
        page.wait_for_selector("main p.soft >> text=at 0.8 the question's tokens keep 80 %")
        assert not re.search(r"epsilon|lambda", re.sub(r"mless compare .*", "", page.inner_text("main")))


def test_the_next_item_and_the_last(opened: Opening, address: str) -> None:
    page = opened().go(address + STRIP)
    page.keyboard.press("n")
    page.wait_for_selector("h1 >> text=item-006")
    page.keyboard.press("b")
    page.wait_for_selector("h1 >> text=item-005")
    page.click("text=item →")
    page.wait_for_selector("h1 >> text=item-006")


def test_a_prompt_of_ten_thousand_tokens_scrolls(opened: Opening, served: Served, tmp_path: Path) -> None:
    folder = write_attention(tmp_path / "long", items=2, layers=1, heads=2, length=100, question=(9_900, 9_990))
    at = served(folder)
    page = opened().go(at + "#strip?folder=1&condition=mless&layer=1&head=1&item=1")
    assert int(page.inner_text(".title").split()[0]) > 10_000
    assert page.evaluate("document.querySelector('canvas.strip').height") < 2_000  # only what is visible is drawn
    page.keyboard.press("End")
    until(page, "document.querySelector('.scroller').scrollTop > 10000")
    # However far it is scrolled, a frame draws what is on the screen and nothing else.
    drawn = page.evaluate(
        """async () => {
            const scroller = document.querySelector(".scroller");
            const real = CanvasRenderingContext2D.prototype.fillText;
            let texts = 0;
            CanvasRenderingContext2D.prototype.fillText = function (...given) { texts += 1; return real.apply(this, given); };
            const counts = [];
            for (let at = 0; at < 20; at += 1) {
                texts = 0;
                scroller.scrollTop = at * 1500;
                await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
                counts.push(texts);
            }
            CanvasRenderingContext2D.prototype.fillText = real;
            return counts;
        }"""
    )
    assert min(drawn[1:]) > 50
    assert max(drawn) < 1_500
    assert page.locator("main *").count() < 300


def test_a_picture_of_a_long_prompt_says_what_is_not_in_it(opened: Opening, served: Served, tmp_path: Path) -> None:
    folder = write_attention(tmp_path / "long", items=2, layers=1, heads=2, length=100, question=(5_000, 5_010))
    at = served(folder)
    page = opened(permissions=["clipboard-read", "clipboard-write"]).go(
        at + "#strip?folder=1&condition=mless&layer=1&head=1&item=1"
    )
    page.click("button[aria-label='Copy as SVG']")
    page.wait_for_selector(".said >> text=/copied: the first 3 9\\d\\d tokens of 5 1\\d\\d/")
    assert re.search(r">the first 3 9\d\d tokens of 5 1\d\d</text>", page.evaluate("navigator.clipboard.readText()"))
    page.click("button[aria-label='Copy as CSV']")
    until(page, "navigator.clipboard.readText().then((text) => text.split('\\n').length > 5100)")


def test_a_link_shows_the_same_view_to_another(opened: Opening, address: str) -> None:
    first = opened().go(address + "#map?folder=1")
    first.keyboard.press("ArrowDown")
    first.keyboard.press("ArrowRight")
    first.wait_for_selector(".readout >> text=mless, L2H2")
    until(first, "location.hash.includes('layer=2') && location.hash.includes('head=2')")  # once it rests
    link = first.evaluate("location.href")
    second = opened().go(link)
    assert second.inner_text(".readout p") == first.inner_text(".readout p")


def test_the_address_is_not_written_with_every_move(opened: Opening, address: str) -> None:
    """Chromium refuses an address that changes too often. What is marked is in it after a rest, or with a click."""
    page = opened().go(address + "#map?folder=1")
    page.evaluate(
        """() => {
            window.written = 0;
            const real = history.replaceState;
            history.replaceState = (...given) => { window.written += 1; real.apply(history, given); };
        }"""
    )
    box = page.locator("canvas.map").bounding_box()
    for at in range(60):
        page.mouse.move(box["x"] + 40 + 2 * at, box["y"] + 45 + at % 30)
    until(page, "location.hash.includes('head=')")
    assert 1 <= page.evaluate("window.written") <= 12
    page.mouse.move(box["x"] + 34 + 26 * 2.5 + 10, box["y"] + 40 + 5)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("h1 >> text=L1H2 under mless")
    page.go_back()
    page.wait_for_selector(".readout >> text=mless, L1H2")


def test_nothing_stays_of_a_view_that_was_left(opened: Opening, address: str) -> None:
    """Neither listeners for the system's colours nor for the page's."""
    made = opened()
    made.page.add_init_script(
        """window.heard = { change: 0, theme: 0, keydown: 0 };
        const known = (target) => target === window || target === document || target instanceof MediaQueryList;
        for (const [name, by] of [["addEventListener", 1], ["removeEventListener", -1]]) {
            const real = EventTarget.prototype[name];
            EventTarget.prototype[name] = function (kind, ...rest) {
                if (kind in window.heard && known(this ?? window)) window.heard[kind] += by;
                return real.call(this ?? window, kind, ...rest);
            };
        }"""
    )
    page = made.go(address)
    before = page.evaluate("({ ...window.heard })")
    for where in ("#map?folder=1", HEAD, STRIP) * 2:
        page.evaluate("(where) => { location.hash = where; }", where)
        page.wait_for_selector(f".view.{where[1:].partition('?')[0]}")
    page.evaluate("() => { location.hash = '#start'; }")
    page.wait_for_selector(".view.start")
    assert page.evaluate("({ ...window.heard })") == before


def test_up_and_down_walk_over_the_items_of_a_head(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    links = page.locator(".items tbody a")
    links.nth(0).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == links.nth(2).inner_text()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.textContent") == links.nth(1).inner_text()
    assert "L1H2" in page.inner_text("h1"), "the layer is the same"
    page.keyboard.press("Enter")
    page.wait_for_selector(".view.strip")


def test_the_proof_of_a_number(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    page.click("text=Proof")
    said = page.inner_text("dialog.proof")
    assert "retained.parquet" in said
    assert 'condition="mless", layer=1, head=2, queries="original"' in said
    assert "received: streaming" in said
    assert "mless verify" in said
    assert "mless run quick --out results/quick" in said
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog.proof")


def test_keys_are_listed(opened: Opening, address: str) -> None:
    page = opened().go(address + "#map?folder=1")
    page.keyboard.press("?")
    page.wait_for_selector("dialog.help[open]")
    assert "move from cell to cell" in page.inner_text("dialog.help")
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    page.wait_for_selector("h1 >> text=Result folder")


def test_dark_by_the_system_and_by_the_switch(opened: Opening, address: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page = opened(color_scheme="dark").go(address)
    assert page.evaluate(colour) == "rgb(22, 24, 27)"
    page.keyboard.press("d")  # light
    assert page.evaluate(colour) == "rgb(255, 255, 255)"
    page.reload()
    page.wait_for_selector("main[aria-busy='false']")
    assert page.evaluate(colour) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("where", ["", "#map?folder=1", HEAD, STRIP])
def test_on_a_phone_nothing_is_wider_than_the_screen(opened: Opening, address: str, where: str) -> None:
    page = opened(viewport={"width": 360, "height": 740}, device_scale_factor=3).go(address + where)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("where", ["#map?folder=1", HEAD, STRIP])
def test_copy_as_csv_svg_and_png(opened: Opening, address: str, where: str) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"]).go(address + where)
    page.click("button[aria-label='Copy as CSV']")
    page.wait_for_selector(".said >> text=copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.count("\n") > 10
    assert {len(line.split(",")) for line in copied.splitlines()[:1]} != {1}
    page.click("button[aria-label='Copy as SVG']")
    until(page, "navigator.clipboard.readText().then((text) => text.startsWith('<svg'))")
    drawn = page.evaluate(
        "navigator.clipboard.readText().then((text) => new DOMParser().parseFromString(text, 'image/svg+xml').querySelectorAll('rect, path').length)"
    )
    assert drawn > 5
    page.click("button[aria-label='Copy as PNG']")
    until(page, "navigator.clipboard.read().then((all) => all[0].types.includes('image/png'))")


def test_what_cannot_be_copied_is_saved(opened: Opening, address: str) -> None:
    page = opened().go(address + HEAD)
    page.evaluate("() => { navigator.clipboard.write = () => Promise.reject(new Error('no')); }")
    with page.expect_download() as saved:
        page.click("button[aria-label='Copy as CSV']")
    assert saved.value.suggested_filename == "curve-L1H2-mless.csv"


def test_an_exported_file_works_from_disk_with_the_network_off(
    opened: Opening, attention: Path, tmp_path: Path
) -> None:
    exporting.write(exporting.compose([attention], items="5", heads=2), tmp_path / "page.html")
    made = opened(offline=True)
    page = made.go((tmp_path / "page.html").as_uri())
    assert "layer 1" in page.inner_text(".verdict")
    page.click(".links >> text=Map")
    page.wait_for_selector("canvas.map")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".readout >> text=Open L1H2")
    # Heads that are not in the file have no way to open them.
    held = [page.locator(".readout a").count()]
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        held.append(page.locator(".readout a").count())
        assert ("This head is not in the file" in page.inner_text(".readout")) == (held[-1] == 0)
    assert 0 in held
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 >> text=L1H2 under mless")
    page.click("a >> text=item-005")
    page.wait_for_selector("h1 >> text=item-005 in L1H2")
    assert "an even spread" in page.inner_text(".readout")
    page.keyboard.press("n")
    page.wait_for_selector("[role=alert] >> text=This file does not hold that part")
    assert all(one.startswith(("file:", "data:", "blob:")) for one in made.requests)


def test_a_hostile_folder_executes_nothing_and_fetches_nothing(opened: Opening, served: Served, tmp_path: Path) -> None:
    folder = write_attention(
        tmp_path / "evil", items=3, layers=2, heads=2, label=EVIL, token=EVIL, name=EVIL, item="{:03d}" + EVIL, conditions=("none", "mless")
    )  # fmt: skip
    at = served(folder)
    exporting.write(exporting.compose([folder], items="1"), tmp_path / "page.html")
    for base in (at, (tmp_path / "page.html").as_uri()):
        made = opened()
        page = made.go(base)
        for where in ("#map?folder=1", HEAD, "#strip?folder=1&condition=mless&layer=1&head=2&item=1"):
            page.evaluate("(where) => { location.hash = where; }", where)
            page.wait_for_selector(f".view.{where[1:].partition('?')[0]}")
            page.wait_for_selector("main[aria-busy='false']")
            page.click(".proof-button")
            page.wait_for_selector("dialog.proof[open]")
            page.keyboard.press("Escape")
            assert "owned" not in page.title()
            assert page.locator("img, main script").count() == 0
        assert all(one.startswith((base, "data:", "blob:", "file:")) for one in made.requests)
        assert EVIL[:20] in page.inner_text("h1")


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Another page on this machine, by another port: another origin."""

    def do_GET(self) -> None:
        content = b"<!doctype html><title>other</title><p>other</p>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_page_on_another_origin_gets_nothing(opened: Opening, address: str, elsewhere: str, name: str) -> None:
    """It even knows the token. It can fetch nothing, run nothing, show nothing in a frame, and learn nothing from a window."""
    other = opened()
    other.page.goto(elsewhere.replace("127.0.0.1", name))
    replies: dict[str, tuple[int, str]] = {}
    other.page.on("response", lambda one: replies.update({one.url: (one.status, one.request.resource_type)}))
    tried = other.page.evaluate(
        """async (address) => {
            const told = {};
            for (const mode of ["cors", "no-cors", "same-origin"]) {
                for (const path of ["api/start", "page/main.js", ""]) {
                    const read = async (reply) => `${reply.type} ${await reply.text()}`;
                    told[`${mode} ${path}`] = await fetch(address + path, { mode }).then(read).catch(() => "refused");
                }
            }
            const loaded = (element, name) => new Promise((done) => {
                element.onload = () => done(`${name} loaded`);
                element.onerror = () => done("refused");
                document.body.append(element);
                setTimeout(() => done("nothing"), 5000);
            });
            for (const path of ["api/start", "page/main.js", "page/views.js"]) {
                const script = document.createElement("script");
                script.src = address + path;
                told[`script ${path}`] = await loaded(script, "script");
                const module = document.createElement("script");
                module.type = "module";
                module.src = address + path;
                told[`module ${path}`] = await loaded(module, "module");
            }
            const style = document.createElement("link");
            style.rel = "stylesheet";
            style.href = `${address}page/style.css`;
            told.style = await loaded(style, "style");
            const frame = document.createElement("iframe");
            frame.src = address;
            await loaded(frame, "frame");
            let inner = "refused";
            try { inner = frame.contentDocument.body.innerText; } catch { /* another origin */ }
            told.frame = inner;
            return told;
        }""",
        address,
    )
    assert set(tried.values()) <= {"refused", "", "nothing", "opaque "}, tried
    # The frame holds the browser's own page of refusal, not the explorer.
    frame = next(one for one in other.page.frames if one != other.page.main_frame)
    assert frame.locator("main, header.top").count() == 0
    assert all(status == 403 for url, (status, _) in replies.items() if "/api/" in url)
    other.errors.clear()  # the browser says itself what it refused


def test_a_running_study_is_followed(opened: Opening, served: Served, tmp_path: Path) -> None:
    path = write_attention(tmp_path / "live", items=4, layers=1, heads=2, complete=False)
    folder = ResultFolder(path)
    at = served(path)
    with folder.writing():
        page = opened().go(at)
        assert "running now" in page.inner_text(".card")
        assert "4 of 12 units stored" in page.inner_text(".live")
        (path / "units" / "attention").mkdir()
        (path / "units" / "attention" / "mless-00001.parquet").write_bytes(b"")
        page.wait_for_selector(".live >> text=5 of 12 units stored")


def test_the_menu_has_the_views_of_a_study_that_ended(opened: Opening, served: Served, tmp_path: Path) -> None:
    path = write_attention(tmp_path / "live", items=4, layers=1, heads=2, complete=False)
    done = write_attention(tmp_path / "done", items=4, layers=1, heads=2)
    at = served(path)
    page = opened().go(at)
    assert page.locator("nav[aria-label=Views] a").count() == 1
    for file in done.glob("*.parquet"):
        shutil.copy(file, path / file.name)
    shutil.copy(done / "study.json", path / "study.json")
    page.wait_for_selector("nav[aria-label=Views] >> text=Map")
    page.wait_for_selector(".card >> text=finished")
    page.keyboard.press("2")
    page.wait_for_selector("canvas.map")


def test_a_damaged_table_is_said_in_an_exported_file(opened: Opening, attention: Path, tmp_path: Path) -> None:
    broken = write_attention(tmp_path / "broken", items=3, layers=1, heads=2)
    content = bytearray((broken / "attention.parquet").read_bytes())
    content[60:1000] = bytes(940)
    (broken / "attention.parquet").write_bytes(content)
    exporting.write(exporting.compose([attention, broken]), tmp_path / "page.html")
    page = opened(offline=True).go((tmp_path / "page.html").as_uri())
    assert page.locator("article").nth(0).locator(".refusal").count() == 0
    assert "broken/attention.parquet" in page.locator("article").nth(1).locator(".refusal").inner_text()
    page.evaluate("() => { location.hash = '#map?folder=2&show=mass-filler'; }")
    page.wait_for_selector("[role=alert] >> text=broken/attention.parquet")


def test_a_folder_of_before_and_a_damaged_one_are_shown_beside_another(
    opened: Opening, served: Served, attention: Path, tmp_path: Path
) -> None:
    old, broken = write_folder(tmp_path / "old"), write_attention(tmp_path / "broken", items=3, layers=1, heads=2)
    (broken / "retained.parquet").write_bytes(b"PAR1 PAR1")
    at = served([attention, old, broken])
    page = opened().go(at)
    assert page.inner_text("h1") == "3 result folders"
    assert "retained.parquet" in page.inner_text(".refusal")
    page.click("article:nth-child(2) >> text=Map")
    page.wait_for_selector("canvas.map")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 >> text=L1H1 under mless")
    assert "items are not ranked" in page.inner_text("main")
    page.keyboard.press("[")
    until(page, "location.hash === '#map?folder=1'")


def test_find_the_token_that_loses_most(opened: Opening, address: str) -> None:
    page = opened().go(address + STRIP)

    def share() -> float:
        return float(re.search(r"with / without ([\d.]+)", page.inner_text(".readout"))[1])  # pyright: ignore[reportOptionalSubscript]

    page.click("text=loses most")
    least = share()
    page.keyboard.press("m")
    assert least <= share()
    page.keyboard.press("Home")
    seen: list[float] = []
    for _ in range(60):
        if "· question ·" in page.inner_text(".readout"):
            seen.append(share())
        page.keyboard.press("ArrowRight")
    assert seen
    assert least == min(seen)
