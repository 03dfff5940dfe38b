"""`mless tune`: what is tried, who is kept, that the test items stay untouched, and that on noise it claims nothing."""

from __future__ import annotations

import itertools
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from heard import Heard
from interrupted import take_apart
from judged_answers import answers_of
from mless import cli, stats
from mless.engines import Decoding
from mless.engines.base import Request
from mless.engines.scripted import ScriptedEngine
from mless.errors import BadFolder, BadStudy, MlessError
from mless.results.folder import ResultFolder
from mless.results.schemas import ACCURACY, REPLIES, TUNING
from mless.study import load_study, run_study, verdict_lines
from mless.study.accuracy.judging import judged
from mless.study.accuracy.measure import AccuracyMeasurement
from mless.study.direct import tune_on_noise
from mless.study.running import run_tuning
from mless.study.spec import AccuracyTable, StudySpec, TuneTable
from mless.study.tuning.choosing import (
    Plan,
    choose,
    on_noise,
    plan_items,
    report,
    settings_to_try,
    shuffled,
    tried_rows,
    tune_stored,
    with_control,
)
from mless.values import ArmSettings, Item

GOOD = "c0_13-p95"
GRID = {"tune.c": "0.05,0.13", "tune.p1": "95,99.5", "tune.p_min": [], "tune.p_max": []}


def write_script(path: Path, conditions: list[str], data: list[str], effects: dict[str, float]) -> Path:
    """Each item has its own chance, which conditions share but for every fifth answer; `effects` move a condition."""
    rng = random.Random(7)
    script: dict[str, dict[str, str]] = {}
    for condition in conditions:
        script[condition] = {}
        for source in data:
            for item in load_study("accuracy", {"data": source}).load_items()[1]:
                luck = random.Random(item.id).random() if rng.random() < 0.8 else rng.random()
                right = luck < 0.5 + effects.get(condition, 0.0)
                script[condition][item.id] = rf"\boxed{{{item.answer if right else -999}}}"
    path.write_text(json.dumps(script))
    return path


def tune_spec(tmp_path: Path, effects: dict[str, float] | None = None, **changes: Any) -> StudySpec:
    given = {"data": "arithmetic:1:80", **GRID} | {key.replace("__", "."): value for key, value in changes.items()}
    given |= {"accuracy.engine": "scripted", "accuracy.script": str(tmp_path / "script.json")}
    spec = load_study("tune", given)
    others = (spec.tune or TuneTable()).transfer
    write_script(tmp_path / "script.json", ["none", *settings_to_try(spec)], [spec.data, *others], effects or {})
    return spec


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Halving over four settings, one of which is better in truth, with another task."""
    here = tmp_path_factory.mktemp("tuned")
    spec = tune_spec(here, {GOOD: 0.4}, tune__transfer="arithmetic:3:40", tune__dev_share=0.5)
    return run_study(spec, here / "out").folder


# ---- what is tried ---------------------------------------------------------------------------------------------------


def tried(**tune: Any) -> dict[str, ArmSettings]:
    fields = {"name": "t", "accuracy": {}, "arm": tune.pop("arm", {}), "tune": tune}
    return settings_to_try(StudySpec.model_validate(fields))


def test_a_grid_crosses_shares_percentiles_and_layers():
    found = tried(c=[0.1, 0.2], fraction=[0.25], p1=[90, 95], layers=["1", "2-3", "1+5"])
    assert len(found) == len(set(found.values())) == 18
    assert found["c0_1-p90"] == ArmSettings(c=0.1, p1=90.0)
    assert found["f0_25-p95-L2-3"] == ArmSettings(fraction=0.25, p1=95.0, layers=(2, 3))
    assert found["c0_2-p95-L1_5"].layers == (1, 5)
    assert all((one.c is None) != (one.fraction is None) for one in found.values())


def test_bounds_are_tried_at_the_centre_and_the_centre_once():
    found = tried(arm={"c": 0.13, "p1": 95, "scope": "sequence"}, c=[0.13], p_min=[0.02, 0.3], p_max=[0.25, 0.5])
    assert list(found) == ["c0_13-p95", "c0_13-p95-from0_02-to0_5", "c0_13-p95-from0_3-to0_5"]
    assert {one.scope for one in found.values()} == {"sequence"}
    assert found["c0_13-p95-from0_3-to0_5"] == ArmSettings(c=0.13, p1=95.0, p_min=0.3, p_max=0.5, scope="sequence")


def test_further_settings_are_given_in_full():
    found = tried(c=[0.1], settings=[{"preset": "gemma-3-4b-it"}, {"c": 0.1, "seed": 3}])
    assert list(found) == ["c0_1-p99_5", "f0_25-p85", "c0_1-p99_5-seed3"]


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({}, r"the grid is empty; give --c, --fraction, --p1 or --layers"),
        ({"settings": [{"c": 0.1, "fraction": 0.2}]}, r"got c = 0\.1 and fraction = 0\.2; give one of them"),
        ({"c": [-1.0]}, r"c must be 0 or more, got -1"),
        ({"layers": ["0"]}, r"no layer 0"),
        ({"arm": {"fraction": 0.2}, "p_max": [0.5]}, r"p_min and p_max bound the share that follows from c"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tune: dict[str, Any], message: str):
    with pytest.raises(BadStudy, match=message):
        tried(**tune)


def test_tuning_without_answers_is_refused():
    with pytest.raises(MlessError, match=r"\[tune\] chooses by accuracy, so the study needs \[accuracy\]"):
        load_study("quick", {"tune.c": "0.1"})
    with pytest.raises(BadStudy, match=r"nothing to choose among"):
        run_tuning(load_study("accuracy"))


# ---- the split -------------------------------------------------------------------------------------------------------


def ids(n: int, clusters: int = 0) -> list[Item]:
    return [Item(f"q{i:03d}", "", "1", f"k{i % clusters}" if clusters else None) for i in range(n)]


def test_rungs_double_and_end_with_every_dev_item():
    items = ids(200)
    plan = plan_items(items, TuneTable(dev_share=0.5), 12, seed=3)
    sizes = list(itertools.accumulate(map(len, plan.rungs)))
    assert sizes == [len(plan.dev) // 4, len(plan.dev) // 2, len(plan.dev)]
    assert sorted([*plan.dev, *plan.test]) == [item.id for item in items]
    dev = stats.split_items([item.id for item in items], 0.5, 3)
    assert set(plan.dev) == {item.id for item, here in zip(items, dev, strict=True) if here}
    assert plan == plan_items(items, TuneTable(dev_share=0.5), 12, seed=3)
    assert plan.rungs != plan_items(items, TuneTable(dev_share=0.5), 12, seed=4).rungs
    grid = plan_items(items, TuneTable(dev_share=0.5, method="grid"), 12, seed=3)
    assert [len(part) for part in grid.rungs] == [len(plan.dev)]
    # two settings need one comparison, and so few items no halving
    assert len(plan_items(items, TuneTable(), 2, seed=3).rungs) == 1
    assert len(plan_items(ids(8), TuneTable(), 12, seed=3).rungs) < 3


def test_related_items_are_on_one_side():
    items = ids(120, clusters=30)
    plan = plan_items(items, TuneTable(), 4, seed=0)
    side = {item.id: item.cluster for item in items}
    assert not {side[one] for one in plan.dev} & {side[one] for one in plan.test}


def test_a_share_that_leaves_a_side_empty_is_refused():
    with pytest.raises(
        BadStudy, match=r"all 4 items fall into the test split and none into dev .* another share: --dev-share"
    ):
        plan_items(ids(4), TuneTable(dev_share=0.001), 3, seed=0)


def test_the_cost_counts_every_answer():
    plan = Plan((tuple("ab"), tuple("cd"), tuple("efgh")), tuple("ijk"))
    # 5 settings and none on 2 items, 3 and none on 2, 2 and none on 4; none, its control and the chosen one on 3
    assert plan.answers(5) == 2 * 6 + 2 * 4 + 4 * 3 + 3 * 3
    assert plan.answers(5, samples=4) == 4 * plan.answers(5)


# ---- choosing --------------------------------------------------------------------------------------------------------


def graded(values: dict[str, list[int]]) -> pa.Table:
    """Answers of conditions that are right so many times out of 16 items, more items the further one goes."""
    table = {name: np.array([n < right for n in range(16)]) for name, (right,) in values.items()}
    answers = answers_of({"none": table["none"]})
    for name, correct in table.items():
        if name != "none":
            rows = answers_of({"mless": correct}).to_pylist()
            answers = pa.concat_tables(
                [answers, pa.Table.from_pylist([row | {"condition": name} for row in rows], schema=answers.schema)]
            )
    return answers


def test_the_better_half_goes_on_and_ties_go_to_the_earlier():
    answers = graded({"none": [4], "a": [8], "b": [6], "c": [8], "d": [3], "e": [2]})
    asked: list[tuple[int, list[str]]] = []

    def draw(rung: int, items: Any, left: Any) -> pa.Table:
        asked.append((rung, list(left)))
        kept = [row for row in answers.to_pylist() if row["item"] in items and row["condition"] in ("none", *left)]
        return pa.Table.from_pylist(kept, schema=answers.schema)

    items = [f"q{n:04d}" for n in (*range(0, 16, 2), *range(1, 16, 2))]
    choice = choose(list("abcde"), [items[:8], items[8:]], draw)
    rows = tried_rows(choice, AccuracyTable(), AccuracyMeasurement, seed=0)
    # on the even items: a +2, b +1, c +2, d 0, e −1; three of five go on; at the end a and c are equal and a was there first
    assert asked == [(1, list("abcde")), (2, list("abc"))]
    assert choice.condition == "a"
    assert [(row["condition"], row["rung"], row["kept"]) for row in rows] == [
        ("a", 1, True), ("b", 1, True), ("c", 1, True), ("d", 1, False), ("e", 1, False),
        ("a", 2, True), ("b", 2, False), ("c", 2, False),
    ]  # fmt: skip
    assert (rows[5]["n"], rows[5]["delta"], rows[5]["none"]) == (16, 0.25, 0.25)


def test_holm_counts_the_settings_that_have_dropped_out():
    rng = np.random.default_rng(0)
    none = rng.random(60) < 0.5
    better = none.copy()
    better[np.flatnonzero(~none)[:9]] = True
    rows = answers_of({"none": none, "mless": better, **dict.fromkeys(("mful", "random", "other"), none)})
    names = ["mless", "mful", "random", "other"]
    items = sorted(set(rows.column("item").to_pylist()))

    def draw(rung: int, some: Any, left: Any) -> pa.Table:
        kept = [row for row in rows.to_pylist() if row["item"] in some and row["condition"] in ("none", *left)]
        return pa.Table.from_pylist(kept, schema=rows.schema)

    choice = choose(names, [items[:30], items[30:]], draw)
    assert choice.condition == "mless"
    last = next(
        row
        for row in tried_rows(choice, AccuracyTable(), AccuracyMeasurement, seed=0)
        if (row["condition"], row["rung"]) == ("mless", 2)
    )
    assert last["p"] == stats.mcnemar_exact(none, better)
    assert last["p_adjusted"] == pytest.approx(4 * last["p"])  # four were tried, though two were left


def test_the_report_is_one_comparison_against_both_runs_of_none():
    rng = np.random.default_rng(1)
    none, again = rng.random(80) < 0.5, rng.random(80) < 0.5
    better = none | (rng.random(80) < 0.3)
    answers = answers_of({"none": none, "none-again": again, "mless": better, "mful": none})
    rows = report(answers, "mless", AccuracyTable(), AccuracyMeasurement, seed=0)
    assert {row["condition"] for row in rows} == {"none", "none-again", "mless"}
    row = next(row for row in rows if row["condition"] == "mless")
    both = max(stats.mcnemar_exact(none, better), stats.mcnemar_exact(again, better))
    assert row["p_adjusted"] == pytest.approx(both)


# ---- noise -----------------------------------------------------------------------------------------------------------

NOISY = [f"c0_{n:02d}-p{p1}" for n in range(1, 9) for p1 in (90, 95, 99)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Answers drawn and judged: 24 settings and both runs of none, each on 120 items."""
    path = tmp_path_factory.mktemp("stored") / "script.json"
    task, items = load_study("accuracy", {"data": "arithmetic:1:120"}).load_items()
    names = ["none", "none-again", *NOISY]
    asked = [Request(name, item.id) for name in names for item in items]
    with ScriptedEngine.from_file(write_script(path, names, ["arithmetic:1:120"], {})) as engine:
        replies = [asdict(reply) for reply in engine.generate(asked, Decoding())]
    rows = [{key: row[key] for key in row if key in REPLIES.names} for row in replies]
    table = pa.Table.from_pylist([row | {"model": "m", "task": task, "seed": 0} for row in rows], schema=REPLIES)
    return judged(table, items, task, AccuracyTable())


def test_shuffled_grades_keep_their_number_and_nothing_else(stored: pa.Table):
    noise = shuffled(stored, np.random.default_rng(0))
    assert noise.drop_columns(["correct"]).equals(stored.drop_columns(["correct"]))
    grades, before = (table.column("correct").to_pylist() for table in (noise, stored))
    assert sum(grades) == sum(before)
    assert sum(a != b for a, b in zip(grades, before, strict=True)) > 0.3 * len(grades)
    assert noise.equals(shuffled(stored, np.random.default_rng(0)))


@pytest.mark.parametrize("seeds", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_on_noise_no_effect_is_reported_where_the_best_on_dev_would_claim_one(stored: pa.Table, seeds: int):
    found = on_noise(stored, NOISY, TuneTable(c=[0.1]), AccuracyTable(), AccuracyMeasurement, seeds=range(seeds))
    assert found.seeds == seeds
    assert found.claimed <= seeds / 10
    # who takes the best of 24 at its word on the items it was chosen on is wrong several times as often
    assert found.naive >= max(seeds / 10, 3 * found.claimed)


def test_a_true_effect_is_found(stored: pa.Table):
    noise = shuffled(stored, np.random.default_rng(1)).to_pylist()
    for row in noise:
        if row["condition"] == NOISY[4] and random.Random(row["item"]).random() < 0.7:
            row["correct"] = True
    better = pa.Table.from_pylist(noise, schema=stored.schema)
    found = tune_stored(better, NOISY, TuneTable(c=[0.1]), AccuracyTable(), AccuracyMeasurement, seed=0)
    assert found.choice.condition == NOISY[4]
    assert found.test["verdict"] == "rises"


def test_a_grid_folder_can_be_tried_on_noise(tmp_path: Path):
    spec = tune_spec(tmp_path, {GOOD: 0.5}, tune__method="grid", tune__dev_share=0.5)
    folder = run_study(spec, tmp_path / "out").folder
    before = {path: path.read_bytes() for path in folder.rglob("*.parquet")}
    found = tune_on_noise(folder, seeds=range(8))
    # one setting is better in truth, so grades that were not dealt out anew would be claimed every time
    assert (found.seeds, found.claimed <= 2) == (8, True)
    assert tune_on_noise(str(folder), seeds=range(1)) == tune_on_noise(folder, seeds=range(1))
    assert {path: path.read_bytes() for path in folder.rglob("*.parquet")} == before


def test_what_cannot_be_tried_on_noise_is_refused_with_the_reason(tuned: Path, tmp_path: Path):
    with pytest.raises(BadFolder, match=r"by halving .* only the settings kept have answers .* --method grid"):
        tune_on_noise(tuned)
    with pytest.raises(BadFolder, match=r"holds no tuning"):
        tune_on_noise(tuned / "test")
    half = ResultFolder(tmp_path / "half")
    about = {"study": {"name": "tune"}, "conditions": {}, "items": ["1"], "task": "t", "model": {"label": "m"}}
    half.write_manifest(about | {"measures": "tune", "complete": False})
    with pytest.raises(BadFolder, match=r"not finished"):
        tune_on_noise(half.path)


def test_the_control_on_noise_is_dealt_grades_of_its_own(stored: pa.Table):
    drawn = stored.filter(pc.field("condition") != "none-again")
    both = with_control(drawn)
    assert both.schema == drawn.schema
    count = {
        row["condition"]: row["item_count"]
        for row in both.group_by("condition").aggregate([("item", "count")]).to_pylist()
    }
    assert count["none"] == count["none-again"] == 120
    noise = shuffled(both, np.random.default_rng(0)).to_pylist()
    none, again = ([row["correct"] for row in noise if row["condition"] == name] for name in ("none", "none-again"))
    assert none != again


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_the_folder_holds_every_setting_the_choice_and_its_worth(tuned: Path):
    about = json.loads((tuned / "study.json").read_text())
    assert (about["measures"], about["complete"], about["tuning"]["chosen"], about["tuning"]["tried"]) == (
        "tune",
        True,
        GOOD,
        4,
    )
    rows = ResultFolder(tuned).read_table("tuning")
    assert rows.schema == TUNING
    first = [row for row in rows.to_pylist() if row["rung"] == 1]
    assert [(row["c"], row["p1"]) for row in first] == list(itertools.product((0.05, 0.13), (95.0, 99.5)))
    assert {row["n"] for row in rows.to_pylist()} == {len(about["tuning"]["dev"]) // 2, len(about["tuning"]["dev"])}
    test = ResultFolder(tuned).read_table("tuned")
    assert test.schema == ACCURACY
    headline = {(row["task"], row["split"]): row for row in test.to_pylist() if row["condition"] == GOOD}
    assert list(headline) == [("arithmetic-1", "test"), ("arithmetic-3", "all")]
    assert headline["arithmetic-1", "test"]["verdict"] == "rises"
    assert headline["arithmetic-1", "test"]["n"] == len(about["tuning"]["test"])
    inner = ResultFolder(tuned / "test").read_table("accuracy").to_pylist()
    mine = next(row for row in inner if row["condition"] == GOOD)
    assert {**mine, "split": "test"} == headline["arithmetic-1", "test"]


def test_no_test_item_was_answered_before_the_choice(tuned: Path):
    about = json.loads((tuned / "study.json").read_text())["tuning"]
    seen: set[str] = set()
    for rung in sorted(tuned.glob("dev-*")):
        drawn = ResultFolder(rung).read_table("answers")
        assert not seen & set(drawn.column("item").to_pylist())  # nothing is drawn twice
        seen |= set(drawn.column("item").to_pylist())
    assert seen == set(about["dev"])
    test = ResultFolder(tuned / "test").read_table("answers")
    assert set(test.column("item").to_pylist()) == set(about["test"])
    assert set(test.column("condition").to_pylist()) == {"none", "none-again", GOOD}
    settings = json.loads((tuned / "test" / "study.json").read_text())["conditions"][GOOD]["arm"]
    assert (settings["c"], settings["p1"], settings["layers"]) == (0.13, 95.0, [1])


def test_the_verdict_says_how_many_were_tried_and_what_is_corrected(tuned: Path):
    lines = verdict_lines(tuned)
    assert "4 settings of ARM tried by successive halving" in lines[0]
    assert "after Holm over the 4 tried" in lines[1]
    assert "no result" in lines[1]
    told = "\n".join(lines)
    assert "Test: c0_13-p95 (ARM with c 0.13, p1 95, layer 1)" in told
    assert "accuracy rises" in told
    assert "needs no correction for the settings tried on dev" in told
    assert "Transfer to arithmetic:3:40: c0_13-p95" in told
    assert "Sensitivity" in lines[-1]


def test_an_inner_folder_is_made_again_by_its_own_command(tuned: Path, tmp_path: Path):
    command = json.loads((tuned / "test" / "study.json").read_text())["command"]
    sets = [command[at + 1] for at, word in enumerate(command) if word == "--set"]
    again = run_study(load_study(command[2], {}, sets), tmp_path / "again").folder
    for name in ("answers", "accuracy"):
        assert ResultFolder(again).read_table(name).equals(ResultFolder(tuned / "test").read_table(name))


def test_a_run_goes_on_where_it_stopped_and_ends_with_the_same_tables(tmp_path: Path):
    spec = tune_spec(tmp_path, {GOOD: 0.4}, tune__method="grid", data="arithmetic:1:20")
    whole = run_study(spec, tmp_path / "whole")
    again = run_study(spec, tmp_path / "whole")
    assert (again.computed, again.fresh) == (0, False)
    # as a kill leaves it: the dev items half answered, no test
    part = tmp_path / "whole"
    before = {name: (part / f"{name}.parquet").read_bytes() for name in ("tuning", "tuned")}
    for name in ("tuning", "tuned"):
        (part / f"{name}.parquet").unlink()
    for name in ("test", "dev-1"):
        take_apart(part / name)
    for unit in sorted((part / "dev-1" / "units" / "replies").glob("*.parquet"))[::2]:
        unit.unlink()
    resumed = run_study(spec, part)
    assert 0 < resumed.computed < whole.computed
    assert {name: (part / f"{name}.parquet").read_bytes() for name in before} == before
    with pytest.raises(BadFolder, match=r"holds another study .*differs in .*tune"):
        run_study(tune_spec(tmp_path, {}, tune__method="grid", tune__c="0.2,0.3", data="arithmetic:1:20"), part)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"accuracy__engine": "openai", "accuracy__base_url": "http://localhost:1/v1"},
            r"ARM needs the model's weights",
        ),
        ({"tune__transfer": "arithmetic:1:60"}, r"all of its 60 questions are those of the task"),
        ({"tune__transfer": "no-such-file.jsonl"}, r"no-such-file"),
        ({"tune__layers": "31", "accuracy__engine": "hf"}, r"no layer 31 for ARM: this model's layers are 1 to 30"),
    ],
)
def test_what_cannot_be_tuned_is_told_before_anything_is_drawn(tmp_path: Path, changes: dict[str, Any], message: str):
    given = {"data": "arithmetic:1:80", **GRID} | {"accuracy.script": "s", "accuracy.engine": "scripted"}
    spec = load_study("tune", given | {key.replace("__", "."): value for key, value in changes.items()})
    with pytest.raises(MlessError, match=message):
        run_tuning(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_first_run_that_fails_leaves_no_folder_behind(tmp_path: Path):
    spec = tune_spec(tmp_path, {}, data="arithmetic:1:20")
    (tmp_path / "script.json").write_text("{")
    with pytest.raises(MlessError, match=r"script\.json': line 1: broken JSON"):
        run_tuning(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_settings_than_items_are_warned_of_with_their_cost(tmp_path: Path):
    heard = Heard()
    spec = tune_spec(
        tmp_path, {}, data="arithmetic:1:16", tune__c="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9", tune__method="grid"
    )
    (tmp_path / "script.json").write_text("{")
    with pytest.raises(MlessError):
        run_tuning(spec, tmp_path / "out", heard)
    assert any("warning: 18 settings on" in line and "at the cost of" in line for line in heard.lines)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    spec = tune_spec(tmp_path, {GOOD: 0.4}, tune__method="grid", tune__p1="95", data="arithmetic:1:40")
    words = [
        "mless",
        "tune",
        "--data",
        spec.data,
        "--c",
        "0.05,0.13",
        "--p1",
        "95",
        "--method",
        "grid",
        "--engine",
        "scripted",
    ]
    words += ["--set", f"accuracy.script={tmp_path / 'script.json'}"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "out"), "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    told = json.loads(capsys.readouterr().out)
    assert (left.value.code, told["tried"], told["chosen"]["condition"]) == (0, 2, GOOD)
    assert {row["split"] for row in told["accuracy"]} == {"test"}
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert "already stored" in said
    assert f"report: {tmp_path / 'out' / 'report.html'}" in said.replace("\n", "")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "All 2 settings, on dev items" in page
    assert (tmp_path / "out" / "test" / "report.html").exists()
    monkeypatch.setattr(
        sys, "argv", ["mless", "figure", "table9", str(tmp_path / "out"), "--out", str(tmp_path / "tables")]
    )
    with pytest.raises(SystemExit):
        cli.main()
    assert "chosen here" in (tmp_path / "tables" / "table9.md").read_text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--c", "0.05", "--p1", "90"], ["c0_05-p90"]),
        (["--p1", "90,95"], ["c0_13-p90", "c0_13-p95"]),
        (["--fraction", "0.1"], ["f0_1-p99_5"]),
        (["--layers", "1,2"], ["c0_13-p99_5", "c0_13-p99_5-L2"]),
        (["--p-max", "0.5"], ["c0_13-p99_5-from0_02-to0_5"]),
        (["--p-min", "0.1"], ["c0_13-p99_5-from0_1-to0_25"]),
        (["--c", "0.05", "--set", "tune.p1=[90,95]"], ["c0_05-p90", "c0_05-p95"]),
        (["--dev-share", "0.5"], ["c0_2-p90", "c0_2-p95", "c0_13-p99_5-from0_05-to0_25", "f0_25-p85"]),
    ],
)
def test_an_option_is_the_whole_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: list[str]
):
    given: list[list[str]] = []

    def instead(spec: StudySpec, *_: Any, **__: Any) -> None:
        given.append(list(settings_to_try(spec)))
        raise BadStudy("far enough")

    study = tmp_path / "mine.toml"
    study.write_text(
        'conditions = ["none"]\n[accuracy]\n[tune]\nc = [0.2]\np1 = [90, 95]\np_min = [0.05]\n'
        'settings = [{ preset = "gemma-3-4b-it" }]\n'
    )
    monkeypatch.setattr("mless.study.running.run_tuning", instead)
    monkeypatch.setattr(sys, "argv", ["mless", "tune", str(study), *options])
    with pytest.raises(SystemExit):
        cli.main()
    assert given == [expected]
