"""The page of a likelihood study: a table a metric, what is form, one item's texts, and what was lacking, whatever the texts hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_report import EVIL, Page

from interrupted import table_replaced
from mless.errors import BadFolder
from mless.report import draw_standard, publish, summary, write_report
from mless.report.likelihood import MOST, example_of, forms_of
from mless.results.nats import around, signed, weighed
from mless.results.reading import StoredLikelihood
from mless.study.likelihood.words import likelihood_lines
from mless.values import ArmSettings, Condition
from synthetic import write_likelihood

LACKING = {"only 3 of 16 other answers of its kind": 7, f"no answer {EVIL}": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_likelihood(tmp_path_factory.mktemp("likelihood") / "r", about={"lacking": LACKING})


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(publish(folder, fresh=True).read_text(encoding="utf-8"))


def test_sections_and_verdict(folder: Path, page: Page) -> None:
    for line in likelihood_lines(folder)[:5]:
        assert line in page.text
    for heading in (
        "Verdict", "What was run", "Figures", "Effects", "How much of the answer's change is form", "One item: what was scored",
        "What was lacking", "One prompt", "How it was measured", "Run it again",
    ):  # fmt: skip
        assert heading in page.text
    assert not page.open


def test_a_table_a_metric_with_every_number(folder: Path, page: Page) -> None:
    text = page.text.replace("\n", "")
    length = StoredLikelihood.open(folder).solution_length()
    for row in pq.read_table(folder / "effects.parquet").to_pylist():
        metric = row["metric"]
        assert signed(row["delta"], metric) + around(row["lo"], row["hi"], metric) in text
        words = weighed(metric, row["delta"], length)
        if words:
            assert (words in text) == (row["verdict"] in ("rises", "drops")), (row["condition"], metric)
    assert "solution: reference solution; a change within ±0.0050 nats a token would not matter" in text
    assert "kl: distance of next-token distributions from none's; described, not tested" in text
    cells = [attributes.get("class") for tag, attributes in page.tags if tag == "td"]
    verdicts = [str(one) for one in cells if one in ("rises", "drops", "equivalent")]
    stored = [row["verdict"] for row in pq.read_table(folder / "effects.parquet").to_pylist()]
    assert sorted(verdicts) == sorted(one for one in stored if one in ("rises", "drops", "equivalent"))


def test_the_pictures(folder: Path, page: Page, tmp_path: Path) -> None:
    images = [str(attributes["alt"]) for tag, attributes in page.tags if tag == "img"]
    assert [image.split(":")[0] for image in images] == [
        "Change of log-probabilities by condition",
        "Δ log p along the reference solution",
    ]
    plain = write_likelihood(tmp_path / "plain", items=8, solutions=False)
    assert {file.name for file in draw_standard(plain, ["svg"])} == {"effects.svg"}
    alone = write_likelihood(tmp_path / "alone", items=8, conditions=("none",))
    assert draw_standard(alone, ["svg"]) == []
    assert "How it was measured" in publish(alone, fresh=True).read_text(encoding="utf-8")


def test_form_and_the_answers_own_part_add_up(folder: Path, page: Page) -> None:
    stored = StoredLikelihood.open(folder)
    found = {one.condition: one for one in forms_of(stored, stored.effects())}
    assert list(found) == ["mless", "mful", "random"]  # the control is none of them

    def number(text: str) -> float:
        return float(text.split(" ")[0].replace("−", "-"))

    for one in found.values():
        assert number(one.answer) == pytest.approx(number(one.form) + number(one.own), abs=0.0015)
        for text in (one.answer, one.form, one.own, one.share):
            assert text in page.text
    assert number(found["mless"].form) == pytest.approx(1.0, abs=0.05)  # as the folder was made
    assert found["mless"].share in ("97 %", "98 %", "99 %")
    assert found["mful"].share.endswith(" %")
    assert number(found["mful"].share) > 100  # form and the answer's own part go opposite ways
    assert found["random"].share == "–"


def test_without_other_answers_nothing_is_said_of_form(tmp_path: Path) -> None:
    told = write_likelihood(tmp_path / "r", items=8, answers=False)
    text = Page(write_report(told, verdict=[]).read_text(encoding="utf-8")).text
    assert "How much of the answer" not in text
    assert "what was scored" not in text


def test_the_example_is_the_first_item_with_the_first_filler(folder: Path, page: Page, tmp_path: Path) -> None:
    found = example_of(StoredLikelihood.open(folder))
    assert found is not None
    assert (found["item"], found["condition"]) == ("sum-001", "mless")
    rows = {
        (row["condition"], row["number"]): row
        for row in pq.read_table(folder / "candidates.parquet").to_pylist()
        if row["item"] == "sum-001"
    }
    before, after = rows["none", 0]["logp"], rows["mless", 0]["logp"]
    first = found["shown"][0]
    assert (first.role, first.text) == ("answer", "#### 0")
    assert first.delta == signed(after - before, "answer")
    assert first.before == f"−{-before:.3f}"
    assert len(found["shown"]) == 5
    others = [rows["mless", n]["logp"] - rows["none", n]["logp"] for n in range(1, 5)]
    assert found["changes"]["own"] == signed(after - before - sum(others) / 4, "answer")
    assert f"so {found['changes']['own']} is the answer's own (contrast)" in page.text
    arm = [Condition("own", "none", arm=ArmSettings(c=0.1)), Condition("dots", "repeat", " .", 5)]
    with_filler = example_of(
        StoredLikelihood.open(write_likelihood(tmp_path / "a", items=4, conditions=("none", *arm)))
    )
    assert with_filler is not None
    assert with_filler["condition"] == "dots"
    without = example_of(StoredLikelihood.open(write_likelihood(tmp_path / "b", items=4, conditions=("none", arm[0]))))
    assert without is not None
    assert without["condition"] == "own"


def test_an_item_without_an_answer_is_no_example_and_many_texts_are_shown_in_part(tmp_path: Path) -> None:
    path = write_likelihood(tmp_path / "r", items=4)
    table = pq.read_table(path / "candidates.parquet")
    rows = [row for row in table.to_pylist() if row["item"] != "sum-001"]
    more = [row | {"number": n, "role": "other"} for row in rows if row["number"] == 4 for n in range(5, 40)]
    table_replaced(path, "candidates", table.from_pylist([*rows, *more], table.schema))
    found = example_of(StoredLikelihood.open(path))
    assert found is not None
    assert (found["item"], len(found["shown"]), found["left_out"]) == ("sum-002", MOST, 40 - MOST)
    assert (
        f"{40 - MOST} more in candidates.parquet"
        in Page(write_report(path, verdict=[]).read_text(encoding="utf-8")).text
    )


def test_what_was_lacking_is_listed(page: Page) -> None:
    assert "7 of 30 items: only 3 of 16 other answers of its kind" in page.text
    assert "2 of 30 items: no answer <script>alert(1)</script>\\x07\\u202e" in page.text


def test_options_are_said_in_points(tmp_path: Path) -> None:
    path = write_likelihood(tmp_path / "r", items=12, choices=True)
    text = Page(write_report(path, verdict=[]).read_text(encoding="utf-8")).text
    assert "choice: right option chosen; a change within ±2.0 points would not matter" in text
    assert re.search(r"\d\d\.\d %", text)
    assert "option" in text


def test_summary_for_programs(folder: Path) -> None:
    told = summary(folder)
    assert json.loads(json.dumps(told)) == told
    assert set(told) == {"folder", "report", "verdict", "effects"}
    assert {(row["condition"], row["metric"]) for row in told["effects"]} == {
        (condition, metric)
        for condition in ("none-again", "mless", "mful", "random")
        for metric in ("solution", "contrast", "answer", "kl", "entropy", "top-1 agreement")
    }


def test_hostile_texts_are_shown_as_text_and_in_part(tmp_path: Path) -> None:
    odd = Condition(f"{EVIL}</td>", "repeat", " /", 5)
    long = EVIL + "</code></td>" + "A" * 100_000
    path = write_likelihood(
        tmp_path / "r",
        items=3,
        label=EVIL,
        task=EVIL,
        text=long,
        conditions=("none", "none-again", odd),
        solutions=False,
    )
    text = write_report(path, verdict=[EVIL]).read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text.lower()
    assert not page.open
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert page.text.count("<script>alert(1)</script>\\x07\\u202e") >= 10
    assert re.search(r"… 99,\d{3} characters left out …", page.text)
    assert len(text) < 500_000


def test_a_folder_of_something_else_or_damaged_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    path = write_likelihood(tmp_path / "r", items=4)
    table = pq.read_table(path / "effects.parquet")
    table_replaced(path, "effects", table.slice(0, len(table) - 1))
    with pytest.raises(BadFolder, match=r"effects\.parquet has 23 rows; expected 4 condition × 6 metric = 24"):
        publish(path, fresh=True)
    assert not (path / "figures").exists()


def test_rewrites_whole_and_alike(folder: Path) -> None:
    first = write_report(folder, verdict=["yes"]).read_bytes()
    assert write_report(folder, verdict=["yes"]).read_bytes() == first
