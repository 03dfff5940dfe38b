"""The table of measurements: every one of mless's own can be loaded and says its verdict, and one from outside is run by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import mless
from mless.errors import BadPlugin, BadStudy
from mless.results.folder import ResultFolder
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.bench import Composed, Measurement
from mless.study.kinds import MEASUREMENTS, measured_in, measurement_of, readouts_of
from outside import Outside
from spelling import model_folder

KINDS = [
    "attention",
    "activations",
    "affine",
    "likelihood",
    "accuracy",
    "placebo",
    "dose",
    "multiverse",
    "cause",
    "tune",
]
#: A study of each, and how its verdict begins.
STUDIES = {
    "attention": ("quick", "tiny, 2 items of bundled, raw prompts; retained share λ"),
    "activations": ("activations", "tiny, 2 items of bundled"),
    "affine": ("affine", "tiny, 2 items of bundled"),
    "likelihood": ("likelihood", "tiny, 2 items of bundled: log-probabilities of"),
    "placebo": ("placebo", "tiny, 2 items of bundled: mless among 2 arbitrary edits of 3 tokens"),
    "dose": ("dose", "tiny, 6 items of bundled: mless in 2 lengths from 1 to 3 tokens, before-question, by likelihood"),
    "multiverse": ("multiverse", "tiny, 2 items of bundled: mless against none in 1 specification by likelihood"),
    "cause": (
        "cause",
        "tiny, 2 items of bundled: what the effect of mless (3 × ' /', before-question) is made of, by likelihood",
    ),
    "accuracy": ("accuracy", "tiny, 6 items of arithmetic-1"),
    "tune": ("tune", "2 settings of ARM tried"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_the_table_lists_what_mless_measures() -> None:
    assert MEASUREMENTS.names() == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_measurement_can_be_loaded_and_is_whole(kind: str) -> None:
    found = MEASUREMENTS.get(kind)
    assert issubclass(found, Measurement)
    assert found.lines.__func__ is not Measurement.lines.__func__  # pyright: ignore[reportFunctionMemberAccess]
    assert set(found.sources) <= set(found.tables)
    assert set(found.merged) <= set(found.unit_tables)
    assert readouts_of(found).keys() == set(found.needs)
    if issubclass(found, Composed):
        assert found.compose is not Composed.compose
    else:
        assert found.measure is not Measurement.measure
        assert found.finish is not Measurement.finish
        assert found.sources  # without them nothing could be judged anew
        # What is computed is in the sources, or the units could not be removed.
        assert set(found.merged) <= set(found.sources)


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_is_measured_by_the_table_that_it_has(kind: str) -> None:
    spec = load_study(STUDIES[kind][0])
    assert spec.measured == kind
    assert type(measurement_of(spec)) is MEASUREMENTS.get(kind)


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"measures": "affine"}, "affine"),
        ({"measures": "mine"}, "mine"),
        ({"study": {"accuracy": {"samples": 1}}}, "accuracy"),
        ({"study": {"accuracy": None}}, "attention"),
        ({}, "attention"),
    ],
)
def test_what_a_stored_study_measured(about: dict[str, Any], kind: str) -> None:
    assert measured_in(about) == kind


def changes_for(kind: str, model: Path, here: Path) -> dict[str, Any]:
    if kind not in ("accuracy", "tune"):
        if kind == "dose":
            return {
                "model": str(model),
                "limit": 6,
                "prompt": "raw",
                "dose.most": 3,
                "dose.points": 2,
                "dose.placements": "before-question",
            }
        own: dict[str, Any] = {"prompt": "raw"}
        if kind == "multiverse":
            own = {"multiverse.template": "raw", "multiverse.system": "none"}
        if kind == "placebo":
            own["placebo.edits"] = 2
        return {"model": str(model), "limit": 2, "length": 3, "conditions": "none,mless", **own}
    script = here / "script.json"
    script.write_text(json.dumps({"*": "It is 4."}))
    given = {"model": "tiny", "data": "arithmetic:1:6", "accuracy.engine": "scripted", "accuracy.script": str(script)}
    if kind == "tune":
        return given | {"tune.c": "0.05,0.13", "tune.p1": "95", "tune.p_min": [], "tune.p_max": []}
    return given | {"conditions": "none,mless"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_every_kind_says_its_verdict(kind: str, tiny: Path, tmp_path: Path) -> None:
    study, opening = STUDIES[kind]
    outcome = run_study(load_study(study, changes_for(kind, tiny, tmp_path)), tmp_path / "out")
    assert (ResultFolder(outcome.folder).manifest() or {})["measures"] == kind
    assert not (outcome.folder / "units").exists()
    lines = verdict_lines(outcome.folder)
    assert opening in lines[0]
    assert len(lines) > 1
    assert all(lines)


# ---- from outside --------------------------------------------------------------------------------------------------------

LENGTHS = '''
"""How many tokens a prompt has, in bags of so many."""

import pyarrow as pa

from mless.results.folder import ResultFolder
from mless.study.bench import Measurement


class Lengths(Measurement):
    unit_tables = ("lengths",)
    merged = unit_tables
    tables = ("prompts", "lengths", "longest")
    sources = ("prompts", "lengths")
    doing = "counting"

    def measure(self, bench, group):
        bag = self.spec.options.get("bag", 1)
        for unit in group.units:
            row = {**bench.names, "condition": unit.condition.name, "item": unit.prompt.item, "bags": len(unit.prompt) // bag}
            yield unit, {"lengths": pa.Table.from_pylist([row])}

    def finish(self, bench):
        rows = bench.folder.read_table("lengths").to_pylist()
        bench.folder.write_table("longest", pa.table({"bags": [max(row["bags"] for row in rows)]}))

    @classmethod
    def lines(cls, path, readouts):
        longest = ResultFolder(path).read_table("longest").to_pylist()[0]["bags"]
        return [f"the longest prompt fills {longest} bags"]
'''


@pytest.fixture
def lengths(outside: Outside) -> None:
    outside.write("measuring_lengths", LENGTHS)
    mless.register("measurements", "lengths", "measuring_lengths:Lengths")


@pytest.fixture
def write_study(tmp_path: Path, tiny: Path) -> Callable[..., str]:
    def written(*lines: str) -> str:
        path = tmp_path / "mine.toml"
        conditions = ['conditions = ["none", "mless"]', "limit = 2", "length = 30", 'prompt = "raw"']
        path.write_text("\n".join([f'model = "{tiny}"', *conditions, *lines]) + "\n")
        return str(path)

    return written


@pytest.mark.usefixtures("lengths")
def test_a_study_file_reaches_a_measurement_from_outside(write_study: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    study = write_study('measures = "lengths"', "[options]", "bag = 10")
    assert run_study(load_study(study), out) == Outcome(out, 4, 4)
    about = ResultFolder(out).manifest() or {}
    assert (about["measures"], about["study"]["options"]) == ("lengths", {"bag": 10})
    prompts = pl.read_parquet(out / "prompts.parquet")
    expected = [len(ids) // 10 for ids in prompts["token_ids"].to_list()]
    assert ResultFolder(out).read_table("lengths")["bags"].to_pylist() == expected
    assert verdict_lines(out) == [f"the longest prompt fills {max(expected)} bags"]
    assert not (out / "units").exists()


@pytest.mark.usefixtures("lengths")
def test_it_is_resumed_and_refused_as_any_other(
    write_study: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    study = write_study('measures = "lengths"', "[options]", "bag = 10")
    run_study(load_study(study), out)
    (out / "longest.parquet").unlink()
    monkeypatch.setattr("mless.models.load", None)  # to load a model would fail
    assert run_study(load_study(study), out) == Outcome(out, 0, 4)
    assert run_study(load_study(study), out) == Outcome(out, 0, 4, fresh=False)
    with pytest.raises(
        mless.MlessError, match=r"holds another study \('mine'\): it differs in options; choose another"
    ):
        run_study(load_study(study, {}, ["options.bag=5"]), out)


@pytest.mark.usefixtures("lengths")
def test_it_is_registered_under_any_name(write_study: Callable[..., str], tmp_path: Path) -> None:
    mless.register("measurements", "how-long", "measuring_lengths:Lengths")
    run_study(load_study(write_study('measures = "how-long"')), tmp_path / "out")
    assert verdict_lines(tmp_path / "out")[0].startswith("the longest prompt fills ")


@pytest.mark.usefixtures("lengths")
def test_an_unknown_measurement_is_refused_with_the_nearest(write_study: Callable[..., str], tmp_path: Path) -> None:
    why = rf"no measurement 'lenghts' \(did you mean 'lengths'\?\); there are: {', '.join(KINDS)}, lengths"
    with pytest.raises(BadStudy, match=why):
        run_study(load_study(write_study('measures = "lenghts"')), tmp_path / "out")
    with pytest.raises(BadStudy, match=r"no measurement 'afine' \(did you mean 'affine'\?\)"):
        run_study(load_study(write_study('measures = "afine"')), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_measured_is_said_once(write_study: Callable[..., str]) -> None:
    with pytest.raises(BadStudy, match=r"measures = 'lengths' and \[affine\] both say what is measured; leave one out"):
        load_study(write_study('measures = "lengths"', "[affine]"))
    with pytest.raises(BadStudy, match=r"\[options\] are for a measurement of your own: name it with measures = NAME"):
        load_study(write_study("[options]", "bag = 10"))


#: What a measurement can get wrong: its code with one change, and what is said.
WRONG = {
    "another table": ('{"lengths": pa', '{"lenghts": pa', r"Lengths\.measure gave the tables lenghts; its unit_tables are lengths"),
    "a unit left out": ("group.units:", "group.units[1:]:", r"Lengths\.measure gave nothing for 2 of 4 units, the first of them item 'b"),
    "a unit of another group": ("yield unit,", "yield bench.units()[-1],", r"gave a unit that is not of its group: item number 2 under 'mless'"),
    "the model unloaded": (
        "    def measure(",
        "    def needs_weights(self):\n        return False\n\n    def prepare(self, bench):\n        bench.model\n\n    def measure(",
        r"uses the model, but it was not loaded: its needs_weights\(\) must return True",
    ),
    "ARM mixed": (
        "    def measure(",
        "    def groups(self, bench, missing):\n        from mless.study.bench import Group\n\n        yield Group(missing)\n\n    def measure(",
        r"Lengths\.groups puts conditions with different ARM into one group \(none, mless, arm\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_faulty_measurement_is_named(
    wrong: str, outside: Outside, write_study: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    old, new, why = WRONG[wrong]
    assert old in LENGTHS
    outside.write("measuring_lengths", LENGTHS.replace(old, new))
    mless.register("measurements", "lengths", "measuring_lengths:Lengths")
    study = load_study(write_study('measures = "lengths"', f'tokenizer = "{tiny}"'))
    if wrong == "ARM mixed":
        study = load_study(study.source, {"conditions": "none,mless,arm"})
    with pytest.raises(BadPlugin, match=why):
        run_study(study, tmp_path / "out")


def test_a_measurement_without_weights_gets_its_prompts(
    outside: Outside, write_study: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    light = "    def needs_weights(self):\n        return False\n\n    def measure("
    outside.write("measuring_lengths", LENGTHS.replace("    def measure(", light))
    mless.register("measurements", "lengths", "measuring_lengths:Lengths")
    study = load_study(write_study('measures = "lengths"', f'tokenizer = "{tiny}"'))
    assert run_study(study, tmp_path / "out").computed == 4
    assert "device" not in (ResultFolder(tmp_path / "out").manifest() or {})
