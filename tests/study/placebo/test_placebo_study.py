"""`mless run placebo` for real: fillers among edits by two readouts, its tables against the inner ones, resuming, words, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from heard import Heard
from mless.errors import BadFolder, BadPrompt, BadStudy
from mless.report import publish, summary
from mless.results.folder import ResultFolder
from mless.stats.crossed import place_among
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.verifying import verify
from placed_folders import write_placebo
from spelling import model_folder

ITEMS, EDITS, LENGTH = 6, 6, 7
NAMED = ["mless", "mful", "random"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", context=512)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {"question": f"What is {n} + {n + 10}?", "answer": str(2 * n + 10), "solution": f"Add {n}: it is \\boxed{{{2 * n + 10}}}."}
        for n in range(ITEMS)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_tiny(
    model: Path, data: Path, out: Path, sets: Sequence[str] = (), progress: Heard | None = None, **changes: Any
) -> Outcome:
    chosen = {"model": str(model), "data": str(data), "length": LENGTH, "placebo.edits": EDITS, **changes}
    quick = ["likelihood.others=3", "accuracy.max_new_tokens=4", "accuracy.slots=4", "system=Add."]
    return run_study(load_study("placebo", chosen, [*quick, *sets]), out, progress or Heard())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path, task: Path) -> Path:
    """By both readouts: the likelihood first, the answers added afterwards."""
    path = tmp_path_factory.mktemp("placebo") / "results"
    units = ITEMS * (2 + len(NAMED) + EDITS)
    assert run_tiny(tiny, task, path) == Outcome(path, units, units)
    both = ["placebo.by=likelihood,accuracy"]
    assert run_tiny(tiny, task, path, both) == Outcome(path, units, 2 * units)
    assert run_tiny(tiny, task, path, both) == Outcome(path, 0, 2 * units, fresh=False)
    return path


def table(folder: Path, name: str) -> pl.DataFrame:
    return pl.DataFrame(ResultFolder(folder).read_table(name))


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = ("placebo.parquet", "edits.parquet", "likelihood/likelihood.parquet", "likelihood/scores.parquet")
    return {name: (folder / name).read_bytes() for name in files}


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_fillers_are_placed_among_the_edits_of_the_inner_study(folder: Path) -> None:
    values = table(folder / "likelihood", "likelihood").filter(metric="solution")
    by_item = values.pivot("condition", index="item", values="delta", maintain_order=True)
    edits = [name for name in by_item.columns if name.startswith("edit-")]
    assert len(edits) == EDITS
    expected = place_among(
        by_item.select(edits).to_numpy(), {name: by_item[name].to_numpy() for name in NAMED}, np.random.default_rng([0, 0])
    )  # fmt: skip
    found = table(folder, "placebo").filter(metric="solution")
    assert found["condition"].to_list() == NAMED
    for row in found.iter_rows(named=True):
        mine = expected.placed[row["condition"]]
        assert row["specific"] == pytest.approx(mine.specific, abs=1e-12)
        assert row["delta"] == pytest.approx(by_item[row["condition"]].mean(), abs=1e-12)
        ends = row["specific_lo"], row["specific_hi"], row["percentile"], row["percentile_lo"], row["percentile_hi"]
        assert ends == pytest.approx(
            (mine.specific_lo, mine.specific_hi, mine.percentile, mine.percentile_lo, mine.percentile_hi)
        )
        assert row["p"] == mine.p
        assert (row["n"], row["edits"]) == (ITEMS, EDITS)
        assert row["edits_mean"] == pytest.approx(expected.mean)


def test_answers_are_compared_item_by_item(folder: Path) -> None:
    answers = table(folder / "accuracy", "answers")
    right = dict(answers.group_by("condition").agg(pl.col("correct").mean()).iter_rows())
    found = table(folder, "edits").filter(metric="pass@1")
    assert dict(found.select("condition", "delta").iter_rows()) == pytest.approx(
        {name: share - right["none"] for name, share in right.items() if name.startswith("edit-")}
    )


def test_every_edit_is_listed_with_its_ids(folder: Path) -> None:
    about = ResultFolder(folder).about() or {}
    inner = ResultFolder(folder / "likelihood").about() or {}
    assert about["conditions"] == inner["conditions"]
    prompts = table(folder / "likelihood", "prompts")
    for row in table(folder, "edits").filter(metric="contrast").iter_rows(named=True):
        assert len(row["ids"]) == LENGTH
        assert row["ids"] == about["conditions"][row["condition"]]["filler_ids"]
        assert row["kind"] == about["conditions"][row["condition"]]["kind"]
        assert row["lo"] <= row["delta"] <= row["hi"]
        for prompt in prompts.filter(condition=row["condition"]).iter_rows(named=True):
            span = next(one for one in prompt["spans"] if one["name"] == "filler")
            assert prompt["token_ids"][span["start"] : span["stop"]] == row["ids"]


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path, tiny: Path, task: Path) -> None:
    class Stopped(Heard):
        def step(self, what: str, done: int, total: int, workers: str = "") -> None:
            if what.startswith("likelihood") and done > 20:
                raise KeyboardInterrupt

    out, both = tmp_path / "out", ["placebo.by=likelihood,accuracy"]
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tiny, task, out, both, Stopped())
    units = ITEMS * (2 + len(NAMED) + EDITS)
    again = run_tiny(tiny, task, out, both)
    assert units < again.computed < 2 * units
    assert bytes_of(out) == bytes_of(folder)


def test_a_lost_table_is_made_again_from_the_inner_folders(folder: Path) -> None:
    before = bytes_of(folder)
    (folder / "edits.parquet").unlink()
    about = ResultFolder(folder).about() or {}
    spec = load_study("placebo", about["study"])
    assert run_study(spec, folder, Heard()).computed == 0
    assert bytes_of(folder) == before


def test_verify_computes_some_of_the_inner_units_again(folder: Path) -> None:
    found = verify(folder, sample=2)
    assert found.good
    assert [(one.path.name, one.recomputed.units if one.recomputed else 0) for one in found.inner] == [
        ("accuracy", 2),
        ("likelihood", 2),
    ]


def test_another_number_of_edits_is_another_study(folder: Path, tiny: Path, task: Path) -> None:
    with pytest.raises(BadFolder, match=r"holds another study \('placebo'\): it differs in placebo"):
        run_tiny(tiny, task, folder, ["placebo.edits=5"])


# ---- in words --------------------------------------------------------------------------------------------------------


def test_the_verdict_says_what_edits_do_and_where_fillers_lie(folder: Path) -> None:
    lines = verdict_lines(folder)
    assert lines[0] == (
        "tiny, 6 items of sums: mless, mful, random among 6 arbitrary edits of 7 tokens, before-question, by likelihood and accuracy"
    )
    assert [line.split(" by ")[0] for line in lines[1:4]] == [
        f"An arbitrary edit changes {metric}" for metric in ("solution", "contrast", "pass@1")
    ]
    assert lines[4].startswith("mless (7 × ' /', before-question): solution ")
    assert "percentile of 6 edits [" in lines[4]
    assert any(
        "with 6 edits p is never below 0.14, so no filler can stand out; take at least 19 edits" in line
        for line in lines
    )


@pytest.mark.parametrize(
    ("specific", "items", "words"),
    [
        (5.0, 60, "p = 0.024: above what an arbitrary edit does"),
        (-5.0, 60, "p = 0.024: below what an arbitrary edit does"),
        (0.0, 4000, ": no different from an arbitrary edit"),
        (0.0, 20, ": not told apart from an arbitrary edit"),
    ],
)
def test_a_verdict_needs_the_interval_and_p(tmp_path: Path, specific: float, items: int, words: str) -> None:
    path = write_placebo(tmp_path / "x", metrics=["solution"], specific=(specific, 0, 0), items=items)
    assert words in next(line for line in verdict_lines(path) if line.startswith("mless"))


def test_other_metrics_are_said_where_there_is_no_solution(tmp_path: Path) -> None:
    lines = verdict_lines(write_placebo(tmp_path / "x", metrics=["choice"]))
    assert lines[1].startswith("An arbitrary edit changes choice by ")
    assert "points" in lines[1]


def test_the_page_shows_the_picture_and_the_summary_the_rows(folder: Path) -> None:
    page = publish(folder, fresh=True)
    assert (folder / "figures" / "placebo.png").exists()
    assert "among 6 arbitrary edits" in page.read_text("utf-8")
    assert len(summary(folder)["placebo"]) == table(folder, "placebo").height


def test_a_filler_may_be_called_as_edits_are(tiny: Path, task: Path, tmp_path: Path) -> None:
    own = ["conditions=none,edit-mine", "condition.edit-mine.kind=edit-newlines"]
    run_tiny(tiny, task, tmp_path / "r", own)
    assert set(table(tmp_path / "r", "placebo")["condition"]) == {"edit-mine"}
    assert table(tmp_path / "r", "edits")["condition"].n_unique() == EDITS


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["placebo.edits=1"], r"--set placebo.edits: input should be greater than or equal to 2, got 1"),
        (["placebo.kinds=edit-emojis"], r"placebos: no kind of edit 'edit-emojis' \(did you mean 'edit-emoji'\?\); there are: edit-random-tokens"),
        (["placebo.kinds=edit-emoji,edit-emoji"], r"name each kind of edit once, and at least one"),
        (["placebo.by=attention"], r"--set placebo.by: expected one or both of likelihood, accuracy, each once"),
        (["placebo.by=[]"], r"--set placebo.by: expected one or both of likelihood, accuracy"),
        (["conditions=none"], r"placebos: no filler is named; name at least one, as mless"),
        (["conditions=none,position-only"], r"placebos: condition 'position-only' inserts nothing; name fillers, as mless"),
        (["conditions=none,mless-arm"], r"placebos: condition 'mless-arm' has ARM, so it is more than a filler"),
        (["conditions=none,masked-filler"], r"placebos: condition 'masked-filler' has hidden filler, so it is more than a filler"),
        (["conditions=none,own", "condition.own.filler=x", "condition.own.length=3"], r"'own' has the length 3, and the edits have 7"),
        (["conditions=none,own", "condition.own.filler=x", "condition.own.placement=end"], r"'own' has the placement end, and the edits have before-question"),
        (["length=1", "placebo.edits=60", "placebo.kinds=edit-newlines"], r"'edit-01-newlines' and 'edit-\d+-newlines' are the same 1 tokens to this"),
        (["accuracy.cluster_field=passage"], r"accuracy.cluster_field = 'passage': placebo takes items as independent"),
        (["affine.tokens=after"], r"a study measures one thing, and this one has \[placebo\] and \[affine\]"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, tiny: Path, task: Path, sets: list[str], message: str
) -> None:
    with pytest.raises(BadStudy, match=message):
        run_tiny(tiny, task, tmp_path / "out", sets)
    assert not (tmp_path / "out").exists()


def test_edits_longer_than_the_context_leave_no_folder(tmp_path: Path, tiny: Path, task: Path) -> None:
    with pytest.raises(BadPrompt, match=r"\d+ tokens.*512"):
        run_tiny(tiny, task, tmp_path / "out", ["length=600"])
    assert not (tmp_path / "out").exists()
