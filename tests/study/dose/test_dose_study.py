"""`mless run dose` for real: lengths × placements by likelihood, its tables against the inner ones, resuming, words, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dose_folders import write_dose
from heard import Heard
from mless.errors import BadFolder, BadPrompt, BadStudy
from mless.report import publish, summary
from mless.results.folder import ResultFolder
from mless.stats import split_items
from mless.stats.intervals import mean_intervals
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.verifying import verify
from spelling import model_folder

ITEMS, LENGTHS = 8, [1, 4, 16]
CELLS = 2 * len(LENGTHS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", context=256)


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
    chosen = {"model": str(model), "data": str(data), "dose.most": 16, "dose.points": 3, **changes}
    return run_study(
        load_study("dose", chosen, ["likelihood.others=3", "system=Add.", *sets]), out, progress or Heard()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path, task: Path) -> Path:
    path = tmp_path_factory.mktemp("dose") / "results"
    units = ITEMS * (2 + CELLS)
    assert run_tiny(tiny, task, path) == Outcome(path, units, units)
    assert run_tiny(tiny, task, path) == Outcome(path, 0, units, fresh=False)
    return path


def table(folder: Path, name: str) -> pl.DataFrame:
    return pl.DataFrame(ResultFolder(folder).read_table(name))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_points_are_the_means_of_the_inner_study(folder: Path) -> None:
    values = table(folder / "likelihood", "likelihood")
    mean = values.group_by("condition", "metric").agg(pl.col("delta").mean().alias("mean"))
    points = table(folder, "dose")
    both = points.join(mean, on=["condition", "metric"])
    assert both.height == points.height == CELLS * 7
    assert (both["delta"] - both["mean"]).abs().max() < 1e-12  # pyright: ignore[reportOperatorIssue]
    assert points.select("filler", "placement", "length").unique().height == CELLS
    assert sorted(points["length"].unique()) == LENGTHS
    assert set(points["placement"]) == {"before-question", "before-answer"}
    row = points.filter(metric="solution", length=4, placement="before-answer").row(0, named=True)
    mine = values.filter(metric="solution", condition="mless-4-before-answer")["delta"].to_numpy()
    expected = mean_intervals(mine[:, None])
    # Sums over one column and over many are rounded otherwise on some processors.
    assert (row["lo"], row["hi"]) == pytest.approx((float(expected.lo[0]), float(expected.hi[0])), rel=1e-12)
    assert (points["lo_all"] <= points["lo"]).all()
    assert (points["p_adjusted"] >= points["p"]).all()


def test_the_filler_is_where_and_as_long_as_the_row_says(folder: Path) -> None:
    prompts = table(folder / "likelihood", "prompts")
    for row in table(folder, "dose").filter(metric="contrast").iter_rows(named=True):
        prompt = prompts.filter(condition=row["condition"]).row(0, named=True)
        names = [span["name"] for span in prompt["spans"]]
        filler = next(span for span in prompt["spans"] if span["name"] == "filler")
        assert filler["stop"] - filler["start"] == row["length"]
        after = names[names.index("filler") + 1 :]
        assert ("question" in after) == (row["placement"] == "before-question")


def test_a_test_is_of_a_curve_and_the_best_length_of_the_dev_items(folder: Path) -> None:
    about = ResultFolder(folder).about() or {}
    dev = split_items(about["items"], 0.5, 0)
    tests = table(folder, "dose_tests")
    assert tests.height == 2 * 7
    values = table(folder / "likelihood", "likelihood").filter(metric="solution")
    for row in tests.filter(metric="solution").iter_rows(named=True):
        cells = [f"mless-{length}-{row['placement']}" for length in LENGTHS]
        by_item = np.stack([values.filter(condition=name)["delta"].to_numpy() for name in cells], axis=1)
        x = np.log2(1 + np.array([0, *LENGTHS]))
        slopes = [np.polyfit(x, [0, *one], 1)[0] for one in by_item]
        assert row["slope"] == pytest.approx(np.mean(slopes))
        best = int(by_item[dev].mean(axis=0).argmax())
        assert row["best_length"] == LENGTHS[best]
        assert (row["dev_n"], row["test_n"]) == (dev.sum(), (~dev).sum())
        assert row["test_delta"] == pytest.approx(by_item[~dev, best].mean())
    chosen = tests.filter(pl.col("chosen"))
    assert sorted(chosen["metric"].unique()) == sorted(tests["metric"].unique())
    best_of = tests.group_by("metric").agg(pl.col("dev_delta").max())
    assert chosen.join(best_of, on=["metric", "dev_delta"]).height == chosen.height


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path, tiny: Path, task: Path) -> None:
    class Stopped(Heard):
        def step(self, what: str, done: int, total: int, workers: str = "") -> None:
            if what.startswith("likelihood") and done > 20:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tiny(tiny, task, tmp_path / "out", progress=Stopped())
    assert 0 < run_tiny(tiny, task, tmp_path / "out").computed < ITEMS * (2 + CELLS)
    for name in ("dose.parquet", "dose_tests.parquet", "likelihood/likelihood.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_another_share_of_dev_items_is_judged_from_what_is_stored(folder: Path, tiny: Path, task: Path) -> None:
    before = (folder / "dose_tests.parquet").read_bytes()
    again = run_tiny(tiny, task, folder, ["dose.dev_share=0.3"])
    assert (again.computed, again.fresh) == (0, True)
    assert (folder / "dose_tests.parquet").read_bytes() != before
    run_tiny(tiny, task, folder)
    assert (folder / "dose_tests.parquet").read_bytes() == before


def test_verify_and_another_grid(folder: Path, tiny: Path, task: Path) -> None:
    found = verify(folder, sample=2)
    assert found.good
    assert [(one.path.name, one.recomputed.units if one.recomputed else 0) for one in found.inner] == [
        ("likelihood", 2)
    ]
    with pytest.raises(BadFolder, match=r"holds another study \('dose'\): it differs in dose"):
        run_tiny(tiny, task, folder, ["dose.points=2"])


# ---- in words --------------------------------------------------------------------------------------------------------


def test_the_verdict_names_curves_and_the_chosen_cell(folder: Path) -> None:
    lines = verdict_lines(folder)
    assert lines[0] == (
        "tiny, 8 items of sums: mless in 3 lengths from 1 to 16 tokens, before-question and before-answer, by likelihood"
    )
    assert lines[1].startswith("solution, mless (up to 16 × ' /', before-question): ")
    assert lines[2].startswith("solution, mless (up to 16 × ' /', before-answer): ")
    assert lines[3].startswith("solution, the best cell on ")
    assert any(line.startswith("published, by accuracy and not by nats") for line in lines)


def test_words_for_a_slope_a_peak_and_nothing(tmp_path: Path) -> None:
    lines = verdict_lines(write_dose(tmp_path / "x", metrics=["solution"]))
    rising, peaked, flat = lines[1:4]
    assert "rises at 8, 16, 32" in rising
    assert "a doubling, p < 0.001; no length in between is better than both ends" in rising
    assert "and drops at 501, 1,000 tokens" in peaked
    assert "; a peak: 16 tokens against none and the longest, p < 0.001" in peaked
    assert "no length is shown to differ from none" in flat
    assert "no peak shown" in flat
    assert (
        "the best cell on 30 dev items: mless, 16 tokens before-answer (+0.0077, which flatters it); on the 30 other items"
        in lines[5]
    )


def test_the_page_shows_the_picture_and_the_summary_the_rows(folder: Path) -> None:
    page = publish(folder, fresh=True)
    assert (folder / "figures" / "dose.png").exists()
    assert "mless in 3 lengths" in page.read_text("utf-8")
    assert len(summary(folder)["dose_tests"]) == table(folder, "dose_tests").height


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["conditions=none"], r"dose: no filler is named; name at least one, as mless"),
        (["conditions=none,position-only"], r"dose: condition 'position-only' inserts nothing; name fillers, as mless"),
        (["conditions=none,mless-arm"], r"dose: condition 'mless-arm' has ARM, so it is more than a filler"),
        (["dose.placements=before-anwser"], r"dose: no placement 'before-anwser' \(did you mean 'before-answer'\?\)"),
        (["dose.placements=end,end"], r"dose: placement end is named twice"),
        (["dose.points=800", "dose.most=100000"], r"fillers × 2 placements are 1,\d+ conditions besides none; expected at most 1,000"),
        (["dose.points=1"], r"--set dose.points: input should be greater than or equal to 2, got 1"),
        (["dose.most=256"], r"a filler of 256 tokens does not fit into this model's context of 256 .* --set dose.most=64"),
        (["length=5"], r"dose: the study gives a length, but fillers are tried in those of \[dose\]; leave it out, and set dose.most"),
        (["conditions=none,own", "condition.own.filler=x", "condition.own.placement=end"], r"dose: \[condition.own\] gives a placement"),
        (["limit=1"], r"all 1 items fall into the \w+ split"),
        (["accuracy.samples=1"], r"draws no answers"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, tiny: Path, task: Path, sets: list[str], message: str
) -> None:
    with pytest.raises(BadStudy, match=message):
        run_tiny(tiny, task, tmp_path / "out", sets)
    assert not (tmp_path / "out").exists()


def test_prompts_that_do_not_fit_leave_no_folder(tmp_path: Path, tiny: Path, task: Path) -> None:
    with pytest.raises(BadPrompt, match=r"\d+ tokens.*256"):
        run_tiny(tiny, task, tmp_path / "out", ["dose.most=250"])
    assert not (tmp_path / "out").exists()
