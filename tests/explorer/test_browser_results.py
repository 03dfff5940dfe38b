"""User stories in a real Chromium: answers, likelihoods, live pictures, folders side by side, an exported file, a notebook's frame."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from browsing import Open, Served, until
from dose_folders import write_dose
from mless.explorer.folders import Folders
from mless.explorer.views import answer
from mless.results.folder import ResultFolder
from mless.values import Condition
from placed_folders import write_placebo
from specified_folders import write_multiverse
from stored_attention import write_attention
from synthetic import write_answers, write_likelihood

#: Playwright's, which is not installed where types are checked.
Browser = Locator = Page = Any

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
OTHER = {"name": "qwen", "label": "Qwen2.5-0.5B", "fingerprint": "ab" * 16, "layers": 24, "heads": 14}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {
        "answers": write_answers(root / "answers", items=120, effects={"mless": 0.08, "mful": -0.2}),
        "answers-b": write_answers(root / "answers-b", items=120, seed=3, label=OTHER["label"], about={"model": OTHER}),
        "likelihood": write_likelihood(root / "likelihood", items=60),
        "likelihood-b": write_likelihood(root / "likelihood-b", items=60, seed=4, label=OTHER["label"], about={"model": OTHER}),
        "likelihood-c": write_likelihood(root / "likelihood-c", items=60, task="math500", about={"model": OTHER | {"fingerprint": "cd" * 16}}),
        "dose": write_dose(root / "dose", points=7),
        "placebo": write_placebo(root / "placebo"),
        "multiverse": write_multiverse(root / "multiverse"),
        "hostile": write_answers(root / "hostile", items=6, text=HOSTILE, label=HOSTILE),
    }  # fmt: skip


@pytest.fixture(scope="module")
def address(paths: dict[str, Path]) -> Iterator[str]:
    from mless.explorer import show

    running = show(list(paths.values()), browser=False)
    yield running.address
    running.stop()


@pytest.fixture
def opened(browser: Browser, address: str, served: Served) -> Iterator[Open]:
    """Opens a view in a page of its own. Any error of a script fails the story."""
    faults: list[str] = []
    contexts: list[Any] = []

    def visit(view: str, *, at: str | None = None, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1200, "height": 900}} | options))
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda fault: faults.append(str(fault)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.goto(f"{at or address}#{view}")
        ready(page)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert faults == []


def ready(page: Page, heading: str | None = None) -> None:
    page.wait_for_selector("main[aria-busy=false] h1")
    if heading is not None:
        until(page, f"document.querySelector('main h1')?.textContent.includes({json.dumps(heading)})")


def texts(found: Locator) -> list[str]:
    return [one.strip() for one in found.all_inner_texts()]


def clipboard(page: Page) -> str:
    return page.evaluate("navigator.clipboard.readText()")


COPY = {"permissions": ["clipboard-read", "clipboard-write"]}


# ---- answers -------------------------------------------------------------------------------------------------------------


def test_find_an_item_that_turned_wrong_and_read_why(opened: Open, paths: dict[str, Path]) -> None:
    page = opened("start")
    page.get_by_role("link", name="Answers").first.click()
    ready(page, "Answers")
    page.get_by_label("Condition", exact=True).select_option("mful")
    until(page, "document.querySelector('main p.soft').textContent.startsWith('mful')")
    page.get_by_role("button", name="turned wrong").click()
    page.wait_for_selector(".tile.wrong[aria-pressed=true]")
    told = answer(Folders([paths["answers"]]), "answers", {"condition": "mful", "turned": "wrong"})
    rows = page.locator("table.answers tbody tr")
    assert rows.count() == told["found"] > 3
    assert set(texts(page.locator("table.answers .badge"))) == {"▼ turned wrong"}
    rows.first.get_by_role("link").click()
    ready(page, "Item")
    assert "turned wrong" in page.locator("main").inner_text()
    sides = page.locator(".two section")
    assert "✓ right – equal" in sides.nth(0).inner_text()
    assert "✗ wrong" in sides.nth(1).inner_text()
    assert "boxed" in sides.nth(0).inner_text()


def test_the_overview_counts_lead_to_the_items(opened: Open) -> None:
    page = opened("answers?folder=1")
    cell = page.locator("table.overview tr", has_text="mful").locator("a.wrong")
    count = int(cell.inner_text())
    cell.click()
    page.wait_for_selector(".tile.wrong[aria-pressed=true]")
    assert page.locator("table.answers tbody tr").count() == count


def test_search_narrows_the_list_and_can_be_cleared(opened: Open) -> None:
    page = opened("answers?folder=1")
    page.keyboard.press("/")
    page.keyboard.type("sum-017")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('table.answers tbody tr').length === 1")
    assert "search=sum-017" in page.url
    page.get_by_role("button", name="Clear").click()
    until(page, "document.querySelectorAll('table.answers tbody tr').length === 50")
    page.locator("#search").fill("no such words")
    page.keyboard.press("Enter")
    page.wait_for_selector(".empty")
    assert "No item fits" in page.locator(".empty").inner_text()


def test_sort_by_length(opened: Open) -> None:
    page = opened("answers?folder=1")
    page.get_by_label("Order").select_option("shortest")
    until(page, "location.hash.includes('sort=shortest')")
    ready(page)
    until(page, "document.querySelector('table.answers tbody tr').textContent.includes('12 tokens')")
    cells = texts(page.locator("table.answers tbody tr td:nth-child(5)"))
    lengths = [int(found[1]) for text in cells if (found := re.search(r"(\d+) token", text))]
    assert lengths == sorted(lengths)
    assert len(lengths) == 50


def test_pages_are_turned_by_key_and_link(opened: Open) -> None:
    page = opened("answers?folder=1")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.pager').textContent.includes('page 2 of 3')")
    page.get_by_role("link", name="after").click()
    until(page, "document.querySelector('.pager').textContent.includes('page 3 of 3')")
    assert page.locator("table.answers tbody tr").count() == 20


def test_the_diff_marks_what_differs(opened: Open) -> None:
    page = opened("answers?folder=1&condition=mful&turned=wrong")
    page.locator("table.answers a.into").nth(1).click()
    ready(page, "Item")
    assert page.locator("del.gone").count() >= 1
    page.keyboard.press("t")
    page.wait_for_selector(".text[aria-label='Both texts in one']")
    both = page.locator(".text[aria-label='Both texts in one']")
    assert both.locator("del.gone").count() >= 1
    assert both.locator("ins.new").count() >= 1
    assert "diff=inline" in page.url


def test_j_and_k_walk_through_the_filtered_list(opened: Open) -> None:
    page = opened("answers?folder=1&condition=mful&turned=wrong")
    items = texts(page.locator("table.answers a.into"))
    page.locator("table.answers a.into").first.click()
    ready(page, items[0])
    page.keyboard.press("j")
    ready(page, items[1])
    page.keyboard.press("k")
    ready(page, items[0])
    page.keyboard.press("Escape")
    ready(page, "Answers")
    assert page.locator(".tile.wrong[aria-pressed=true]").count() == 1


def test_a_link_shows_the_same_view(opened: Open) -> None:
    first = opened("answers?folder=1&condition=mful&turned=wrong&sort=longest")
    first.locator("table.answers a.into").nth(2).click()
    ready(first, "Item")
    shared = first.url.split("#")[1]
    second = opened(shared)
    assert second.locator("main").inner_text() == first.locator("main").inner_text()


def test_which_items_one_model_got_wrong_and_the_other_not(opened: Open) -> None:
    page = opened("between?folder=1")
    page.get_by_role("link", name=re.compile("right in SmolLM2.*wrong in Qwen")).click()
    ready(page, "Answers")
    assert "of SmolLM2-135M-Instruct" in page.locator("main p.soft").first.inner_text()
    page.locator("table.answers a.into").first.click()
    ready(page, "Item")
    sides = page.locator(".two section")
    assert "✓ right" in sides.nth(0).inner_text()
    assert "✗ wrong" in sides.nth(1).inner_text()


def test_answers_are_copied_as_csv(opened: Open) -> None:
    page = opened("answers?folder=1&condition=mful&turned=wrong", **COPY)
    page.get_by_role("region", name="Items").get_by_role("button", name="Copy as CSV").click()
    until(page, "[...document.querySelectorAll('.said')].some((one) => one.textContent === 'copied')")
    lines = clipboard(page).strip().split("\n")
    assert lines[0] == "item,reference,none_extracted,none_score,mful_extracted,mful_score,turned"
    assert all(line.endswith(",wrong") for line in lines[1:])
    assert len(lines) == 1 + page.locator("table.answers tbody tr").count()


def test_all_rows_are_copied_and_not_one_page_of_them(opened: Open) -> None:
    # One of the sixty items has no solution.
    for view, rows in (("answers?folder=1&condition=mful", 120), ("likelihood?folder=3", 59)):
        page = opened(view, **COPY)
        assert "page 1 of" in page.locator(".pager").inner_text()
        page.get_by_role("region", name="Items").get_by_role("button", name="Copy as CSV").click()
        until(page, "[...document.querySelectorAll('.said')].some((one) => one.textContent === 'copied')")
        items = [line.split(",")[0] for line in clipboard(page).strip().split("\n")[1:]]
        assert len(items) == len(set(items)) == rows


def test_numbers_keep_their_sign_in_csv_and_formulas_stay_text(opened: Open) -> None:
    page = opened("start")
    row = ["-5", -0.25, "+3e-2", "-.5", "=1+1", "-1+2", "+A1", "@x", "-", "\tx", 'a "b", c', None]
    written = page.evaluate("async (row) => (await import('./page/formats.js')).csv([row])", row)
    assert next(csv.reader([written])) == [
        "-5", "-0.25", "+3e-2", "-.5", "'=1+1", "'-1+2", "'+A1", "'@x", "'-", "'\tx", 'a "b", c', "",
    ]  # fmt: skip


def test_a_mark_that_was_hovered_leaves_no_tip_in_the_next_view(opened: Open) -> None:
    page = opened("dose?folder=6")
    page.locator("figure.chart").first.locator(".mark").first.hover()
    assert page.locator(".tip").count() == 1
    page.keyboard.press("1")
    ready(page, "result folders")
    assert page.locator(".tip").count() == 0


UNSEEN = "a\u202eb\u200bc\x07d\u2028e"


def test_signs_that_cannot_be_seen_are_shown_in_every_view(opened: Open, served: Served, tmp_path: Path) -> None:
    """An id or a name that would turn the text around, or look like another."""

    folders = [
        renamed(write_likelihood(tmp_path / "likelihood", items=12)),
        renamed(write_answers(tmp_path / "answers", items=12, text=UNSEEN)),
        write_attention(tmp_path / "attention", items=12, layers=1, heads=2, item="{:03d}" + UNSEEN, token=UNSEEN),
    ]
    at = served(folders)
    first = quote(f"sum-001{UNSEEN}")
    for view in (
        "likelihood?folder=1", f"tokens?folder=1&item={first}", "answers?folder=2", f"answer?folder=2&item={first}",
        "head?folder=3&condition=mless&layer=1&head=1", "strip?folder=3&condition=mless&layer=1&head=1&item=1",
    ):  # fmt: skip
        page = opened(view, at=at)
        shown = page.evaluate(
            "document.body.innerText + [...document.querySelectorAll('[aria-label], [title]')].map((one) => `${one.title} ${one.ariaLabel}`)"
        )
        assert not set(shown) & set("\u202e\u200b\x07\u2028"), view
        assert "a\\u202eb\\u200bc\\x07d\\u2028e" in shown, view


def renamed(path: Path) -> Path:
    """The folder with ids of items that end with signs which cannot be seen."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = ResultFolder(path)
    about = folder.about()
    assert about is not None
    about["items"] = [f"{one}{UNSEEN}" for one in about["items"]]
    with folder.writing():
        for file in path.glob("*.parquet"):
            table = pq.read_table(file)
            if "item" in table.column_names:
                ids = pa.array([f"{one}{UNSEEN}" for one in table["item"].to_pylist()], pa.string())
                table = table.set_column(table.column_names.index("item"), "item", ids)
            folder.write_table(file.stem, table)
        folder.write_manifest(about)
    return path


def test_hostile_answers_are_text(opened: Open) -> None:
    page = opened("answers?folder=9")
    assert page.title().startswith("Answers")
    page.locator("table.answers a.into").first.click()
    ready(page, "Item")
    assert page.locator("main img, main script").count() == 0
    assert "<img src=x" in page.locator(".two .text").first.inner_text()
    assert page.title().startswith("Answer")


# ---- likelihood ----------------------------------------------------------------------------------------------------------


def test_likelihood_effects_tell_their_numbers(opened: Open) -> None:
    page = opened("likelihood?folder=3")
    mark = page.locator("svg .mark", has_text="mful")
    mark.hover()
    tip = page.locator(".tip").inner_text()
    assert "Δ −0.0" in tip
    assert "after Holm p" in tip
    assert "verdict: drops" in tip
    mark.click()
    until(page, "document.querySelector('main').textContent.includes('Items by Δ solution, mful')")
    page.get_by_label("Metric").select_option("contrast")
    until(page, "document.querySelector('main').textContent.includes('Items by Δ contrast, mful')")


def test_likelihood_tokens_tell_their_numbers_on_hover_and_focus(opened: Open) -> None:
    page = opened("likelihood?folder=3&condition=mful&sort=drops&metric=solution")
    page.locator("table.ranked a.into").first.click()
    ready(page, "Item")
    tokens = page.locator(".token")
    assert tokens.count() >= 8
    tokens.nth(1).hover()
    assert re.search(r"token 2 of \d+: .*\nΔ log p −\d", page.locator(".tip").inner_text())
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "token 3 of " in page.locator(".tip").inner_text()
    page.keyboard.press("Escape")
    ready(page, "Likelihood")


def test_where_along_the_solution_and_which_tokens_change_most(opened: Open) -> None:
    page = opened("likelihood?folder=3&condition=mful")
    page.wait_for_selector("text=Where along the solution, mful")
    mark = page.locator("section[aria-label='Along the solution'] svg .mark").first
    mark.hover()
    assert re.search(r"token 1 of the solution\nΔ log p [+−]0\.\d+ \[", page.locator(".tip").inner_text())
    page.locator("table.ranked a.into").first.click()
    ready(page, "Item")
    most = texts(page.locator("table", has_text="The ten tokens that change most").locator("tbody tr td:last-child"))
    sizes = [abs(float(one.replace("−", "-"))) for one in most]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) >= 8


# ---- live pictures -------------------------------------------------------------------------------------------------------


def test_dose_points_tell_their_numbers(opened: Open) -> None:
    page = opened("dose?folder=6")
    assert page.locator("figure.chart").count() == 2
    page.locator("figure.chart").first.locator(".mark").first.hover()
    tip = page.locator(".tip").inner_text()
    assert "mless, 1 token before-question" in tip
    assert "for all lengths at once [" in tip
    page.get_by_label("Metric").select_option("contrast")
    until(page, "location.hash.includes('metric=contrast')")
    ready(page)


def test_placebo_fillers_and_edits_tell_their_numbers(opened: Open) -> None:
    page = opened("placebo?folder=7")
    page.locator("svg .mark", has_text="mless").hover()
    assert "beyond an arbitrary edit +0.0" in page.locator(".tip").inner_text()
    assert "verdict: rises" in page.locator(".tip").inner_text()
    assert page.locator("svg .mark").count() == 40 + 1 + 3


def test_the_multiverse_tells_each_specification(opened: Open) -> None:
    page = opened("multiverse?folder=8")
    page.locator("svg .mark").last.hover()
    tip = page.locator(".tip").inner_text()
    assert "template: chat" in tip
    assert "dtype: " in tip
    assert "no such template here" in page.locator(".refusal").inner_text()


def test_a_forest_names_the_folder_that_does_not_fit(opened: Open) -> None:
    page = opened("forest?folder=3")
    page.locator("svg .mark", has_text="mean of 2 models").first.hover()
    assert "random-effects mean over 2 models" in page.locator(".tip").inner_text()
    assert "likelihood-c" in page.locator(".refusal").inner_text()
    assert "they differ in task" in page.locator(".refusal").inner_text()
    assert "mless compare" in page.locator("pre").inner_text()


def test_a_picture_is_copied_as_svg_png_and_csv(opened: Open) -> None:
    page = opened("dose?folder=6", **COPY)
    figure = page.locator("figure.chart").first
    figure.get_by_role("button", name="Copy as SVG").click()
    until(page, "document.querySelector('.chart .said').textContent === 'copied'")
    drawn = clipboard(page)
    assert drawn.startswith("<svg")
    assert "var(" not in drawn
    assert "class=" not in drawn
    figure.get_by_role("button", name="Copy as CSV").click()
    until(page, "navigator.clipboard.readText().then((text) => text.startsWith('filler,placement,length'))")
    figure.get_by_role("button", name="Copy as PNG").click()
    until(page, "navigator.clipboard.read().then(([one]) => one.types.includes('image/png'))")


# ---- between -------------------------------------------------------------------------------------------------------------


def test_folders_side_by_side_and_one_refused(opened: Open) -> None:
    page = opened("between?folder=3")
    assert "3 folders measured likelihood" in page.locator("main").inner_text()
    page.locator("svg .mark", has_text="Qwen2.5-0.5B").first.hover()
    assert "Δ contrast" in page.locator(".tip").inner_text()
    refused = page.locator(".refusal").all_inner_texts()
    assert any("likelihood-c" in text and "does not fit" in text for text in refused)


def test_two_folders_heads_stand_beside_each_other(opened: Open, served: Served, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_attention(tmp_path / name, items=12, layers=2, heads=3)
    page = opened("between?folder=1", at=served([tmp_path / "one", tmp_path / "other"]))
    page.wait_for_selector(
        "text=6 heads that both folders measured, over the 12 items that both have. 0 differ after Holm"
    )
    mark = page.locator("figure", has_text="Retained share λ of each head").locator("svg .mark").first
    mark.hover()
    assert "second over first 1.000 [1.000, 1.000]" in page.locator(".tip").inner_text()
    page.locator("table", has_text="second / first").locator("tbody a").first.click()
    ready(page, "under mless")


# ---- everywhere ----------------------------------------------------------------------------------------------------------


def test_keyboard_only_from_the_start_to_a_diff(opened: Open) -> None:
    page = opened("answers?folder=1&turned=changed")
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('table.answers a.into')"):
            break
    page.keyboard.press("Enter")
    ready(page, "Item")
    page.keyboard.press("Escape")
    ready(page, "Answers")


def test_marks_are_walked_by_arrows(opened: Open) -> None:
    page = opened("likelihood?folder=3")
    page.locator("svg .mark[tabindex='0']").first.focus()
    first = page.locator(".tip .first").inner_text()
    page.keyboard.press("ArrowDown")
    assert page.locator(".tip .first").inner_text() != first


@pytest.mark.parametrize(
    "view",
    [
        "answers?folder=1",
        "answer?folder=1&item=sum-002",
        "likelihood?folder=3",
        "tokens?folder=3&item=sum-002",
        "dose?folder=6",
        "placebo?folder=7",
        "multiverse?folder=8",
        "forest?folder=3",
        "between?folder=3",
    ],
)
def test_a_phone_needs_no_sideways_scrolling(opened: Open, view: str) -> None:
    """Neither the page nor a table in it, and no word of a picture is cut."""
    page = opened(view, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.wait_for_timeout(200)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    wider = "[...document.querySelectorAll('.wide')].filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)"
    assert page.evaluate(wider) == []
    outside = page.evaluate(
        """[...document.querySelectorAll("svg.drawn text")].filter((one) => {
            const [own, box] = [one.getBoundingClientRect(), one.closest("svg").getBoundingClientRect()];
            return own.left < box.left - 1 || own.right > box.right + 1;
        }).map((one) => one.textContent)"""
    )
    assert outside == []
    assert page.locator("svg.drawn text", has_text="…").count() == 0


@pytest.mark.parametrize("width", [360, 700, 1200])
def test_the_control_is_named_in_full_and_what_must_be_cut_has_a_title(
    opened: Open, served: Served, tmp_path: Path, width: int
) -> None:

    long = Condition("a-name-" + "of-many-words-" * 8, "repeat", " /", 55)
    at = served([write_likelihood(tmp_path / "long", conditions=("none", "none-again", long), items=12)])
    page = opened("likelihood?folder=1", at=at, viewport={"width": width, "height": 800})
    page.wait_for_selector("svg.drawn")
    assert "none-again (A/A)" in page.locator("svg.drawn text.name").all_text_contents()
    cut = page.locator("svg.drawn text.name", has_text="a-name-")
    assert cut.locator("title").text_content() == long.name
    assert (cut.evaluate("(one) => one.firstChild.data")).endswith("…")


def test_a_task_without_solutions_is_promised_none(opened: Open, served: Served, tmp_path: Path) -> None:

    at = served([write_likelihood(tmp_path / "answers-only", items=12, solutions=False)])
    page = opened("likelihood?folder=1", at=at)
    assert "Log-probabilities of the answer, against none." in page.inner_text("main")
    assert "solution" not in page.inner_text("main").lower()
    page.locator("table.ranked a.into").first.click()
    ready(page, "Item")
    assert "solution" not in page.inner_text("main").lower()
    assert "What else was scored" in page.inner_text("main")
    page = opened("tokens?folder=3&item=sum-060")
    assert "This item has no reference solution." in page.inner_text("main")


def test_a_copied_chart_has_its_title_and_its_legend(opened: Open) -> None:
    page = opened("placebo?folder=7", **COPY)
    page.get_by_role("button", name="Copy as SVG").click()
    until(page, "navigator.clipboard.readText().then((text) => text.startsWith('<svg'))")
    assert ">Fillers among 40 arbitrary edits: Δ solution</text>" in clipboard(page)
    for entry in texts(page.locator(".marks-legend li")):
        assert f">{entry}</text>" in clipboard(page)


def test_dark_is_dark_and_can_be_read(opened: Open) -> None:
    page = opened("dose?folder=6", color_scheme="dark")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.querySelector('svg .tick')).fill")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (ground, ink)]
    assert light[0] < 60
    assert light[1] > 120


# ---- without a server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    from mless.explorer import exporting

    out = tmp_path_factory.mktemp("export") / "page.html"
    kept = [paths[name] for name in ("answers", "likelihood", "dose", "placebo", "multiverse", "likelihood-b")]
    exporting.write(exporting.compose(kept), out)
    return out.as_uri()


def test_an_exported_file_filters_searches_and_diffs_offline(opened: Open, exported: str) -> None:
    page = opened("answers?folder=1&condition=mful", at=exported, offline=True)
    page.get_by_role("button", name="turned wrong").click()
    page.wait_for_selector(".tile.wrong[aria-pressed=true]")
    items = texts(page.locator("table.answers a.into"))
    assert len(items) > 3
    page.locator("#search").fill(items[2])
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('table.answers tbody tr').length === 1")
    page.locator("table.answers a.into").click()
    ready(page, items[2])
    assert page.locator("del.gone").count() >= 1


@pytest.mark.parametrize(
    "view",
    [
        "likelihood?folder=2",
        "likelihood?folder=2&metric=contrast",
        "dose?folder=3",
        "placebo?folder=4",
        "multiverse?folder=5",
        "forest?folder=2",
        "between?folder=2",
    ],
)
def test_an_exported_file_holds_every_picture(opened: Open, exported: str, view: str) -> None:
    page = opened(view, at=exported, offline=True)
    page.wait_for_selector("svg .mark")
    assert page.locator(".refusal[role=alert]").count() == 0


def test_a_notebooks_frame_works_and_reaches_nothing(browser: Browser, paths: dict[str, Path], tmp_path: Path) -> None:
    from mless.explorer import notebooks

    frame = notebooks.framed([paths["likelihood"], paths["likelihood-b"]], "forest?folder=1")
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>notebook</title><p>A cell</p>{frame}", "utf-8")
    page = browser.new_context(offline=True).new_page()
    page.goto((tmp_path / "notebook.html").as_uri())
    inner = page.frame_locator("iframe")
    inner.locator("main h1", has_text="Forest of models").wait_for(timeout=10_000)
    inner.get_by_role("link", name="Likelihood", exact=True).click()
    inner.locator("main h1", has_text="Likelihood").wait_for(timeout=10_000)
    assert page.title() == "notebook"
    reached = page.frames[1].evaluate(
        "(() => { try { return parent.document.title } catch (fault) { return fault.name } })()"
    )
    assert reached == "SecurityError"
    page.context.close()


def test_another_view_begins_at_its_top_and_going_back_finds_the_place(opened: Open) -> None:
    page = opened("start")
    link = page.locator(".links a", has_text="Likelihood").first
    link.scroll_into_view_if_needed()
    page.evaluate("scrollBy(0, 40)")
    place = page.evaluate("scrollY")
    assert place > 0
    link.click()
    until(page, "location.hash.startsWith('#likelihood')")
    ready(page)
    assert page.evaluate("scrollY") == 0
    page.go_back()
    until(page, "location.hash.startsWith('#start')")
    ready(page)
    until(page, f"Math.abs(scrollY - {place}) < 2")


def test_the_menu_of_the_start_leads_to_every_view_that_a_folder_has(opened: Open) -> None:
    page = opened("start")
    assert {"Answers", "Likelihood", "Dose", "Placebo", "Multiverse"} <= set(texts(page.locator("nav a")))
    page.click("nav >> text=Dose")
    until(page, "location.hash.startsWith('#dose?folder=6')")
    ready(page)


def test_few_items_that_can_show_nothing_say_so(opened: Open, served: Served, tmp_path: Path) -> None:

    at = served([write_likelihood(tmp_path / "few", items=5)])
    page = opened("likelihood?folder=1", at=at)
    page.wait_for_selector("text=/With 4 items and \\d+ conditions no p can come to 0.05 after Holm/")
    assert page.locator("text=no p can come to 0.05").count() == 1
    many = opened("likelihood?folder=3")
    assert many.locator("text=no p can come to 0.05").count() == 0
