"""The page of an accuracy study: its table, its pictures, and the items that changed, whatever the answers hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_report import EVIL, VERDICT, Page

from mless.report import draw_standard, publish, summary, write_report
from mless.report.answers import MOST, changes_of
from mless.results.answers import StoredAnswers
from mless.study.accuracy.words import accuracy_lines
from mless.study.spec import AccuracyTable
from mless.values import Condition
from synthetic import write_answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "r"
    return write_answers(path, items=90, effects={"mful": -0.4, "mless": 0.1}, noise=2)


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(publish(folder, fresh=True).read_text(encoding="utf-8"))


def test_sections_and_verdict(folder: Path, page: Page) -> None:
    for line in accuracy_lines(folder):
        assert line in page.text
    for heading in (
        "Verdict",
        "What was run",
        "Figures",
        "Accuracy",
        "Items that changed",
        "One prompt",
        "How it was measured",
        "Run it again",
    ):
        assert heading in page.text
    assert "Retained share" not in page.text
    assert not page.open
    for told in (
        "Greedy, at most 96 new tokens",
        "mode: row-stable; slots: 16",
        "the same bits for any number of live rows",
        "again: yes",
    ):
        assert told in page.text
    assert "again: no" not in page.text


def test_the_table_and_the_pictures(folder: Path, page: Page) -> None:
    assert {path.name for path in (folder / "figures").iterdir()} == {
        f"accuracy.{kind}" for kind in ("png", "svg", "md", "csv", "tex")
    }
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 1
    assert "share of items answered right" in str(images[0]["alt"])
    for row in pq.read_table(folder / "accuracy.parquet").to_pylist():
        assert f"{100 * row['value']:.1f} [{100 * row['lo']:.1f}, {100 * row['hi']:.1f}]" in page.text
    assert "cut off %" in page.text
    assert "no answer %" in page.text


def test_changed_items_stand_side_by_side(folder: Path, page: Page) -> None:
    stored = {row["condition"]: row for row in pq.read_table(folder / "accuracy.parquet").to_pylist()}
    found = changes_of(StoredAnswers.open(folder))
    assert [part.condition for part in found] == ["mless", "mful", "random", "none-again"]  # the control last
    for part in found:
        counts = (stored[part.condition]["gained"], stored[part.condition]["lost"])
        assert (part.gained_count, part.lost_count) == counts  # what the table says
        assert len(part.gained) == min(part.gained_count, MOST)
        assert len(part.lost) == min(part.lost_count, MOST)
        assert all(not one.before.correct and one.after.correct for one in part.gained)
        assert all(one.before.correct and not one.after.correct for one in part.lost)
        assert (
            f"{part.condition}: {part.gained_count} from wrong to right, {part.lost_count} from right to wrong"
            in page.text
        )
    worse = next(part for part in found if part.condition == "mful")
    assert worse.lost_count > MOST
    assert f"{worse.lost_count} items from right to wrong, {MOST} of them shown" in page.text
    one = worse.lost[0]
    for part in (one.question, one.reference, one.before.text, one.after.text, one.after.why):
        assert part in page.text
    assert re.fullmatch(r"What is \d+ \+ \d+\?", one.question)


def test_several_samples_say_how_many_are_right(tmp_path: Path) -> None:
    settings = AccuracyTable(samples=4, temperature=0.5, k=[1, 3])
    given = ("none", "none-again", "mless")
    path = write_answers(tmp_path / "r", items=30, conditions=given, settings=settings, effects={"mless": -0.3})
    text = Page(publish(path, fresh=True).read_text(encoding="utf-8")).text
    assert (path / "figures" / "diversity.png").exists()
    assert re.search(r"\d of 4 samples right", text)
    assert "Further metrics and splits" in text
    row = next(r for r in pq.read_table(path / "accuracy.parquet").to_pylist() if r["condition"] == "mless")
    assert f"mless: {row['gained']} from wrong to right, {row['lost']} from right to wrong" in text


def test_a_vote_changes_what_the_vote_changes(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=40, conditions=("none", "none-again", "self-consistency"))
    row = next(r for r in pq.read_table(path / "accuracy.parquet").to_pylist() if r["condition"] == "self-consistency")
    part = changes_of(StoredAnswers.open(path))[0]
    assert (row["metric"], row["gained"], row["lost"]) == ("maj@5", part.gained_count, part.lost_count)


def test_lengths_are_drawn_where_they_differ(tmp_path: Path) -> None:
    lengths = [Condition(f"mless-{n}", "repeat", " /", n) for n in (10, 40)]
    path = write_answers(tmp_path / "r", items=12, conditions=("none", "none-again", *lengths))
    assert {file.name for file in draw_standard(path, formats=["svg"])} == {
        "accuracy.svg", "accuracy.md", "accuracy.csv", "accuracy.tex", "lengths.svg",
    }  # fmt: skip


def test_summary_for_programs(folder: Path) -> None:
    told = summary(folder)
    assert json.loads(json.dumps(told)) == told
    assert set(told) == {"folder", "report", "verdict", "accuracy"}
    assert told["verdict"] == accuracy_lines(folder)
    assert [row["condition"] for row in told["accuracy"]] == ["none", "none-again", "mless", "mful", "random"]


def test_publishing_draws_what_is_fresh_or_missing(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=12)
    said: list[str] = []
    page = publish(path, fresh=False, say=said.append)
    page.write_text("kept")
    assert publish(path, fresh=False, say=said.append).read_text() == "kept"
    assert said == ["drawing"]


def test_hostile_answers_are_shown_as_text_and_in_part(tmp_path: Path) -> None:
    long = EVIL + "</pre></details>" + "A" * 100_000
    given = ("none", "none-again", "mless")
    path = write_answers(
        tmp_path / "r", items=24, conditions=given, effects={"mless": -0.6}, label=EVIL, task=EVIL, text=long
    )
    table = pq.read_table(path / "answers.parquet")
    rows = table.to_pylist()
    for row in rows:
        row |= {"reference": EVIL + row["reference"], "why": EVIL * 100, "extracted": EVIL * 500, "how": EVIL}
    pq.write_table(table.from_pylist(rows, table.schema), path / "answers.parquet")
    text = write_report(path, verdict=[EVIL]).read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text.lower()
    assert not page.open
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert page.text.count("<script>alert(1)</script>\\x07\\u202e") >= 20
    assert re.search(r"… 9\d,\d{3} characters left out …", page.text)
    assert len(text) < 1_500_000
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "p", "main", "section", "h2", "h3", "div", "dl", "dt", "dd", "table",
        "caption", "thead", "tbody", "tr", "th", "td", "code", "details", "summary", "pre", "figure", "img", "figcaption", "b", "em", "ul",
        "li", "span", "br", "wbr", "footer",
    }  # fmt: skip


def test_loads_nothing_and_runs_nothing(folder: Path, page: Page) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(?i)(src|href|action|data|poster)\s*=\s*[\"']?\s*(https?:|//|file:)", text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}


def test_prompts_sent_as_text_are_shown_as_text(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=40, effects={"mless": -0.5})
    table = pq.read_table(path / "prompts.parquet")
    pq.write_table(table.drop_columns(["spans", "tokens", "token_ids"]), path / "prompts.parquet")
    page = Page(write_report(path, verdict=VERDICT).read_text(encoding="utf-8"))
    assert "Reason step by step. What is" in page.text
    assert "One prompt, as" not in page.text


def test_without_stored_prompts_the_tasks_question_is_shown(tmp_path: Path) -> None:
    asked = {f"sum-{n + 1:03d}": f"{EVIL} How much, number {n}?" for n in range(40)}
    path = write_answers(tmp_path / "r", items=40, effects={"mless": -0.5}, about={"questions": asked})
    (path / "prompts.parquet").unlink()
    text = write_report(path, verdict=VERDICT).read_text(encoding="utf-8")
    worse = changes_of(StoredAnswers.open(path))[0]
    assert worse.lost
    assert all(one.question == asked[one.item] for one in worse.lost)
    assert f"How much, number {int(worse.lost[0].item[4:]) - 1}?" in Page(text).text
    assert "<script" not in text.lower()


@pytest.mark.parametrize("questions", [None, {"sum-999": "?"}], ids=str)
def test_questions_that_are_not_there_are_left_out(questions: object, tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=20, effects={"mless": -0.5}, about={"questions": questions})
    (path / "prompts.parquet").unlink()
    assert {one.question for one in changes_of(StoredAnswers.open(path))[0].lost} == {""}


def test_a_number_of_tokens_that_is_not_known_is_no_zero(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=20, effects={"mless": -0.5}, tokens=False)
    assert changes_of(StoredAnswers.open(path))[0].lost[0].after.n_tokens is None
    text = Page(write_report(path, verdict=VERDICT).read_text(encoding="utf-8")).text
    assert "– tokens" in text
    assert "0 tokens" not in text


def test_answers_that_mean_the_same_vote_together(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "r", items=4, conditions=("none", "none-again", "self-consistency"))
    table = pq.read_table(path / "answers.parquet")
    rows = table.to_pylist()
    for row in rows:
        if (
            row["condition"] == "self-consistency"
        ):  # three that are right, each written otherwise, and twice the same wrong one
            row["extracted"] = ("1/2", "0.5", "\\frac{1}{2}", "3", "3")[row["sample"]]
            row["correct"] = row["sample"] < 3
    pq.write_table(table.from_pylist(rows, table.schema), path / "answers.parquet")
    assert set(StoredAnswers.open(path).scores("self-consistency").values()) == {1.0}


def test_rewrites_whole_and_alike(folder: Path) -> None:
    first = write_report(folder, verdict=VERDICT).read_bytes()
    assert write_report(folder, verdict=VERDICT).read_bytes() == first
