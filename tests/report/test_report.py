"""The report is one file: it loads nothing, runs nothing, and shows whatever the data holds as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mless.errors import BadFolder
from mless.figures import draw
from mless.report import publish, summary, write_report
from mless.values import FigureSpec, Panel
from synthetic import write_folder

EVIL = "<script>alert(1)</script>\x07\u202e&\"'"
VERDICT = ["Layer 1 drops to 0.73.", "From layer 2 on: unchanged."]


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "br", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style"}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_folder(tmp_path_factory.mktemp("results") / "r", layers=2, heads=3, items=4)
    draw(FigureSpec("fig15", "heads", (Panel("x", 1, 2),)), [path])
    draw(FigureSpec("retained", "retained"), [path], formats=["png"])
    draw(FigureSpec("map", "map"), [path], formats=["svg"])
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(write_report(folder, verdict=VERDICT).read_text(encoding="utf-8"))


def test_sections_and_verdict(page: Page) -> None:
    for line in VERDICT:
        assert line in page.text
    for heading in (
        "Verdict",
        "What was run",
        "Figures",
        "Retained share",
        "One prompt",
        "How it was measured",
        "Run it again",
    ):
        assert heading in page.text
    assert not page.open  # every tag is closed


def test_what_was_run(page: Page) -> None:
    told = (
        "SmolLM2-135M-Instruct (smollm2)",
        "2 layers × 3 heads",
        "9f9f",
        "torch: 2.13.0",
        "causality: ok",
        '" /"',
        "before-question",
    )
    for part in told:
        assert part in page.text
    assert "mless run quick --model smollm2" in page.text


def test_each_figure_once_with_words_for_those_who_cannot_see_it(page: Page) -> None:
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [str(image["src"]).split(",")[0] for image in images] == [
        "data:image/png;base64",  # retained first, it answers the question
        "data:image/svg+xml;base64",  # map, of which there is no PNG
        "data:image/png;base64",
    ]
    assert all(image["alt"] for image in images)
    assert "one column per head" in str(images[2]["alt"])


def test_tables_by_layer_and_head(page: Page) -> None:
    assert page.text.count(", by layer") == 3  # mless, mful, random
    rows = [attributes for tag, attributes in page.tags if tag == "td" and attributes.get("class") in {"drops", "unchanged", "undecided", "rises"}]  # fmt: skip
    assert len(rows) == 3 * 2 * (1 + 3)


def test_random_text_stands_beside_uniform_where_it_is_comparable(folder: Path, page: Page) -> None:
    assert page.text.count("random text") >= 4  # layers and heads of mless and mful; not of random itself
    heads = [part.count("random text") for part in page.text.split(", by layer")[1:]]
    assert heads[0] == heads[1] == 4  # its λ and its ε, for layers and for heads
    rows = pq.read_table(folder / "retained.parquet").to_pylist()
    share = {
        (r["condition"], r["layer"], r["head"]): f"{r['retained']:.3f}" for r in rows if r["queries"] == "original"
    }
    first = page.text.split(", by layer")[1]
    assert share["mless", 1, 0] in first
    assert share["random", 1, 0] in first


def test_the_verdict_comes_first_then_the_exponent_and_p_last(page: Page) -> None:
    first = page.text.split(", by layer")[1]
    places = [first.index(word) for word in ("verdict", "exponent ε", "retained λ", "p (λ = 1)", "p (Holm)")]
    assert places == sorted(places)
    assert "exponent ε [95 %]" in first
    assert "a few items decide the row" in page.text
    assert (
        page.text.count(" †") == 2 * 3 * 2 + 1
    )  # both intervals of head 2, three conditions, two layers; and what it means


def test_a_folder_from_before_the_exponent_has_its_page(tmp_path: Path) -> None:
    given = ("none", "mless")
    path = write_folder(
        tmp_path / "r", layers=2, heads=2, items=4, conditions=given, about={"prompt": "raw"}, exponents=False
    )
    text = Page(publish(path, fresh=True).read_text(encoding="utf-8")).text
    assert "retained λ" in text
    assert "exponent ε95 %" not in text.replace("\n", "")  # no such column
    assert "†" not in text
    assert "holds for this model" in text or "hold for this model" in text or "undecided for this model" in text


def test_random_text_of_another_length_is_no_yardstick(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=1, heads=1, items=2)
    about = json.loads((path / "study.json").read_text(encoding="utf-8"))
    about["conditions"]["random"]["length"] = 9
    (path / "study.json").write_text(json.dumps(about), encoding="utf-8")
    text = write_report(path, verdict=[]).read_text(encoding="utf-8")
    assert '<th scope="col" class="n">random text</th>' not in text


def test_publishing_draws_what_is_fresh_or_missing(tmp_path: Path) -> None:
    given = ("none", "mless")
    path = write_folder(tmp_path / "r", layers=1, heads=2, items=2, conditions=given, about={"prompt": "raw"})
    said: list[str] = []
    page = publish(path, fresh=False, say=said.append)
    assert (page, said) == (path / "report.html", ["drawing"])
    assert (path / "figures" / "retained.png").exists()
    page.write_text("kept")
    assert publish(path, fresh=False, say=said.append).read_text() == "kept"
    assert said == ["drawing"]
    assert publish(path, fresh=True).read_text(encoding="utf-8") != "kept"


def test_summary_for_programs(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=2, heads=3, items=2, about={"prompt": "raw"})
    told = summary(path)
    assert json.loads(json.dumps(told)) == told
    assert {(row["layer"], row["head"], row["queries"]) for row in told["layers"]} == {
        (1, 0, "original"),
        (2, 0, "original"),
    }
    assert told["verdict"][1].startswith("mless (55 × ' /', before-question): layer 1 ")


def test_example_prompt_shows_every_token_in_its_span(page: Page) -> None:
    boxes = [
        attributes for tag, attributes in page.tags if tag == "span" and str(attributes.get("class")).startswith("t ")
    ]
    assert sum(attributes["class"] == "t filler" for attributes in boxes) == 55
    assert {attributes["class"] for attributes in boxes} == {
        f"t {n}" for n in ("start", "system", "filler", "question", "end")
    }


def test_loads_nothing_and_runs_nothing(folder: Path, page: Page) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(?i)(src|href|action|data|poster)\s*=\s*[\"']?\s*(https?:|//|file:)", text)
    assert not re.search(r"(?i)@import|url\(", text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    policy = [
        attributes["content"]
        for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "r", name=EVIL, label=EVIL, items=[EVIL, "b"], token=EVIL, layers=1, heads=2,
        about={"device": EVIL, "versions": {EVIL: EVIL}, "study": {"name": EVIL, "title": EVIL}},
    )  # fmt: skip
    draw(FigureSpec("f", "heads", (Panel("x", 1, 1),)), [path], formats=["png"])
    text = write_report(path, verdict=[EVIL]).read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text.lower()
    assert not page.open
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert page.text.count("<script>alert(1)</script>\\x07\\u202e") >= 6
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "p", "main", "section", "h2", "div", "dl", "dt", "dd", "table",
        "caption", "thead", "tbody", "tr", "th", "td", "code", "details", "summary", "pre", "figure", "img", "figcaption", "b", "em", "ul",
        "li", "span", "br", "wbr", "footer",
    }  # fmt: skip


def test_long_prompts_are_shown_in_part(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=1, heads=1, items=1, length=2000, conditions=("none", "mless"))
    text = write_report(path, verdict=[]).read_text(encoding="utf-8")
    assert re.search(r"… \d{4} tokens left out …", text)
    assert text.count('class="t filler"') < 1000


def test_a_folder_without_attention_still_gets_its_page(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "r", layers=1, heads=1, items=1)
    for name in ("attention", "retained", "prompts"):
        (path / f"{name}.parquet").unlink()
    page = Page(write_report(path, verdict=VERDICT).read_text(encoding="utf-8"))
    assert VERDICT[0] in page.text
    assert "One prompt, as" not in page.text


def test_rewrites_whole_and_alike(folder: Path) -> None:
    first = write_report(folder, verdict=VERDICT).read_bytes()
    assert write_report(folder, verdict=VERDICT).read_bytes() == first
    assert not list(folder.glob(".*tmp"))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match="no result folder"):
        write_report(tmp_path / "nowhere", verdict=[])
