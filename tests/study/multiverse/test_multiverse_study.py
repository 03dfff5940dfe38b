"""`mless run multiverse` for real: every specification against the inner folders, answers judged again, resuming, what is left out and refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import mless
from engines import scoring_server as server
from engines.faulty_proxy import FaultyServer
from heard import Heard
from mless.errors import BadFolder, BadStudy, EngineFault
from mless.report import publish, summary
from mless.results.folder import ResultFolder
from mless.study import Outcome, load_study, run_study, verdict_lines
from mless.study.bench import Job
from mless.study.composing import inner_spec
from mless.study.conditions import condition_named
from mless.study.identity import default_folder
from mless.study.multiverse.tables import cells_of, tables_of_changes
from mless.study.running import run_job
from mless.study.spec import MultiverseTable
from mless.study.verifying import verify
from mless.tasks import GRADERS, extract
from specified_folders import write_multiverse
from spelling import CHATML, NO_SYSTEM, model_folder

ITEMS = 7
GRID = ["multiverse.template=chat,raw", "multiverse.system=study,none"]
BOTH = [
    "multiverse.by=likelihood,accuracy",
    "multiverse.extraction=task,last-number",
    "multiverse.grader=numeric,exact-match",
]
INNER = [f"{template}-{system}-float32-hf" for template in ("chat", "raw") for system in ("study", "none")]
UNITS = ITEMS * 2 * len(INNER)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", template=CHATML)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {"question": f"What is {n} + {n + 10}?", "answer": str(2 * n + 10), "solution": f"Add {n}: it is \\boxed{{{2 * n + 10}}}."}
        for n in range(ITEMS)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(model: Path | str, data: Path, sets: Sequence[str] = (), **changes: Any) -> Any:
    chosen = {"model": str(model), "data": str(data), "length": 7, **changes}
    quick = ["likelihood.others=3", "accuracy.max_new_tokens=8", "accuracy.slots=4", "system=Add."]
    return load_study("multiverse", chosen, [*quick, *GRID, *sets])


def run_tiny(model: Path | str, data: Path, out: Path, sets: Sequence[str] = (), heard: Heard | None = None) -> Outcome:
    return run_study(spec_of(model, data, sets), out, heard or Heard())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Path, task: Path) -> Path:
    """By likelihood first; the answers are added afterwards, and nothing is computed twice."""
    path = tmp_path_factory.mktemp("multiverse") / "results"
    assert run_tiny(tiny, task, path) == Outcome(path, UNITS, UNITS)
    assert run_tiny(tiny, task, path, BOTH) == Outcome(path, UNITS, 2 * UNITS)
    assert run_tiny(tiny, task, path, BOTH) == Outcome(path, 0, 2 * UNITS, fresh=False)
    return path


def table(folder: Path, name: str) -> pl.DataFrame:
    return pl.DataFrame(ResultFolder(folder).read_table(name))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_every_specification_has_the_numbers_of_its_inner_folder(folder: Path) -> None:
    rows = table(folder, "specifications").filter(metric="solution")
    assert rows["folder"].to_list() == [f"likelihood-{name}" for name in INNER]
    assert rows["specification"].to_list() == [1, 2, 3, 4]
    for row in rows.iter_rows(named=True):
        inner = table(folder / row["folder"], "effects").filter(metric="solution", condition="mless").to_dicts()[0]
        assert (row["n"], row["delta"], row["lo"], row["hi"], row["p"]) == pytest.approx(
            tuple(inner[name] for name in ("n", "delta", "lo", "hi", "p"))
        )
        about = ResultFolder(folder / row["folder"]).about() or {}
        assert (about["prompt"], about["study"]["dtype"]) == (row["template"], "float32")
        assert about["study"]["system"] == {"study": "Add.", "none": ""}[row["system"]]


def test_rules_and_graders_judge_the_same_answers_again(folder: Path, task: Path) -> None:
    rows = table(folder, "specifications").filter(metric="pass@1")
    assert rows.height == len(INNER) * 2 * 2
    references = {f"{n + 1}": row["answer"] for n, row in enumerate(map(json.loads, task.read_text().splitlines()))}
    for row in rows.iter_rows(named=True):
        answers = table(folder / row["folder"], "answers")
        rules = ["boxed", "hashes", "number"] if row["extraction"] == "task" else ["last-number"]
        items = answers["item"].unique(maintain_order=True).to_list()
        by_item = dict(zip(items, references.values(), strict=True))
        with GRADERS.get(row["grader"])() as grader:
            right = [
                grader.grade(extract(one["text"], rules), by_item[one["item"]]).correct
                for one in answers.iter_rows(named=True)
            ]
        shares = answers.with_columns(pl.Series("right", right)).group_by("condition").agg(pl.col("right").mean())
        found = dict(shares.iter_rows())
        assert row["delta"] == pytest.approx(found["mless"] - found["none"])


def test_counts_and_settings_are_those_of_the_specifications(folder: Path) -> None:
    rows, settings = table(folder, "specifications"), table(folder, "specification_settings")
    for test in table(folder, "specification_tests").iter_rows(named=True):
        own = rows.filter(metric=test["metric"])
        assert (test["specifications"], test["left_out"]) == (own.height, 0)
        for verdict in ("rises", "drops", "equivalent", "undecided"):
            assert test[verdict] == own.filter(verdict=verdict).height
        assert test["median"] == pytest.approx(own["delta"].median())
        template = settings.filter(metric=test["metric"], setting="template")
        for value, delta in template.select("value", "delta").iter_rows():
            assert delta == pytest.approx(own.filter(template=value)["delta"].mean(), abs=1e-12)
    by_answers = settings.filter(metric="pass@1")["setting"].unique(maintain_order=True).to_list()
    assert by_answers == ["template", "system", "extraction", "grader"]


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path, tiny: Path, task: Path) -> None:
    class Stopped(Heard):
        def say(self, line: str) -> None:
            if line.startswith("likelihood-raw-study"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tiny(tiny, task, tmp_path / "out", heard=Stopped())
    assert run_tiny(tiny, task, tmp_path / "out").computed == UNITS // 2
    own = table(tmp_path / "out", "specifications")
    assert own.equals(table(folder, "specifications").filter(readout="likelihood"))


def test_another_grid_uses_the_folders_that_are_there(tmp_path: Path, tiny: Path, task: Path) -> None:
    out = tmp_path / "out"
    run_tiny(tiny, task, out, ["multiverse.template=raw"])
    assert run_tiny(tiny, task, out, ["multiverse.template=raw", "multiverse.system=none,steps"]).computed == 2 * ITEMS
    assert table(out, "specifications")["system"].unique(maintain_order=True).to_list() == ["none", "steps"]
    # The grid does not change where a study is looked for; a text of your own does.
    one, other, own = (
        default_folder(spec_of(tiny, task, sets), "tiny")
        for sets in ([], ["multiverse.system=none"], ["multiverse.texts.mine=Go.", "multiverse.system=mine"])
    )
    assert one == other != own
    with pytest.raises(
        BadFolder, match=r"out holds another study \('multiverse'\): it differs in system; choose another"
    ):
        run_tiny(tiny, task, out, ["multiverse.template=raw", "multiverse.system=study", "system=Other."])
    mine = ["multiverse.template=raw", "multiverse.system=mine"]
    run_tiny(tiny, task, out, [*mine, "multiverse.texts.mine=Go."])
    with pytest.raises(BadFolder, match=r"likelihood-raw-mine-float32-hf holds another study.*differs in system"):
        run_tiny(tiny, task, out, [*mine, "multiverse.texts.mine=Stop."])


def test_a_lost_table_is_made_again_without_a_model(folder: Path) -> None:
    before = (folder / "specifications.parquet").read_bytes()
    (folder / "specification_tests.parquet").unlink()
    about = ResultFolder(folder).about() or {}
    assert run_study(load_study("multiverse", about["study"]), folder, Heard()).computed == 0
    assert (folder / "specifications.parquet").read_bytes() == before


def test_verify_computes_some_units_of_one_inner_folder_again(folder: Path) -> None:
    found = verify(folder, sample=1)
    assert found.good
    again = {one.path.name: one.recomputed.units for one in found.inner if one.recomputed}
    assert len(found.inner) == 2 * len(INNER)
    assert again == {"accuracy-chat-none-float32-hf": 1, "likelihood-chat-none-float32-hf": 1}


# ---- what cannot be run ----------------------------------------------------------------------------------------------


def test_what_cannot_be_run_is_listed_with_its_reason(tmp_path: Path, task: Path) -> None:
    model = model_folder(tmp_path / "plain")  # without a chat template
    heard = Heard()
    out = tmp_path / "out"
    sets = ["multiverse.engine=hf,vllm", "multiverse.system=none"]
    first = run_tiny(model, task, out, sets, heard)
    assert first == Outcome(out, 2 * ITEMS, 2 * ITEMS)
    rows = table(out, "specifications").filter(metric="solution")
    reasons = dict(rows.select("folder", "reason").iter_rows())
    assert reasons.pop("likelihood-raw-none-float32-hf") is None
    assert "the engine vllm is not installed" in reasons.pop("likelihood-raw-none-float32-vllm")
    assert all("plain has no chat template" in reason for reason in reasons.values())
    assert rows.filter(pl.col("reason").is_not_null())["delta"].null_count() == 3
    assert any("likelihood-raw-none-float32-vllm: left out: the engine vllm" in line for line in heard.lines)
    lines = verdict_lines(out)
    assert any(line.startswith("left out, 2 specifications (likelihood-chat-none-float32-hf, ") for line in lines)
    assert any("one specification alone was run" in line for line in lines)
    # An engine may be installed by now, so it is tried again; what is there is not computed again.
    assert run_tiny(model, task, out, sets) == Outcome(out, 0, 2 * ITEMS)
    assert verify(out, sample=0).good


def test_equal_prompts_count_once(tmp_path: Path, task: Path) -> None:
    """A template without a system role folds the system text into the user's turn, so chat and user are one."""
    model = model_folder(tmp_path / "folds", template=NO_SYSTEM)
    out = tmp_path / "out"
    run_tiny(model, task, out, ["multiverse.template=chat,user", "multiverse.system=study"])
    rows = table(out, "specifications").filter(metric="solution")
    assert rows["reason"].to_list() == [
        None,
        "the same prompts as template chat, system study; equal specifications count once",
    ]


def test_a_fault_in_one_folder_does_not_stop_the_others_unless_all_fail(tmp_path: Path, tiny: Path, task: Path) -> None:
    spec = spec_of(tiny, task, ["multiverse.template=raw"])
    from mless.study.kinds import measurement_of, readouts_of

    def run_with(failing: Sequence[str]) -> Any:
        def run(job: Job) -> Outcome:
            if job.out is not None and job.out.name in failing:
                raise EngineFault(f"no answer for {job.out.name}")
            return run_job(job)

        measurement: Any = measurement_of(spec)
        return measurement.compose(Job(spec, tmp_path / "out"), run, readouts_of(measurement))

    every = ["likelihood-raw-study-float32-hf", "likelihood-raw-none-float32-hf"]
    with pytest.raises(EngineFault, match="no answer for likelihood-raw-study"):
        run_with(every)
    assert not (tmp_path / "out").exists()
    run_with(every[:1])
    rows = table(tmp_path / "out", "specifications").filter(metric="solution")
    assert rows["reason"].to_list() == [None, "no answer for likelihood-raw-study-float32-hf"]
    assert (ResultFolder(tmp_path / "out").about() or {})["left_out"] == every[:1]
    # What failed is tried again by the same command.
    assert run_tiny(tiny, task, tmp_path / "out", ["multiverse.template=raw"]).computed == 2 * ITEMS
    assert "left_out" not in (ResultFolder(tmp_path / "out").about() or {})


def test_a_damaged_inner_folder_stops_the_run(tmp_path: Path, tiny: Path, task: Path) -> None:
    out = tmp_path / "out"
    run_tiny(tiny, task, out, ["multiverse.template=raw", "multiverse.system=none"])
    (out / "likelihood-raw-none-float32-hf" / "study.json").write_text("{")
    (out / "specifications.parquet").unlink()
    with pytest.raises(BadFolder, match=r"study.json"):
        run_tiny(tiny, task, out, ["multiverse.template=raw", "multiverse.system=none"])
    assert list(out.glob("likelihood-raw-none-float32-hf/*.parquet"))


def test_a_script_answers_without_weights_and_has_its_own_dtype(tmp_path: Path, task: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"*": "It is 4. The answer is 10."}))
    sets = [
        "multiverse.engine=scripted", "multiverse.dtype=float32,bfloat16", "multiverse.by=likelihood,accuracy", f"accuracy.script={script}",
        "multiverse.template=chat", "multiverse.extraction=first-number,answer-is", "multiverse.grader=numeric",
    ]  # fmt: skip
    run_tiny("any", task, tmp_path / "out", sets)
    rows = table(tmp_path / "out", "specifications")
    assert rows["dtype"].unique().to_list() == ["own"]
    assert rows.filter(metric="pass@1")["extraction"].to_list() == ["first-number", "answer-is"] * 2
    assert (ResultFolder(tmp_path / "out").about() or {})["inner"] == [
        "accuracy-chat-study-own-scripted",
        "accuracy-chat-none-own-scripted",
    ]


def test_a_server_that_only_a_file_names_is_not_the_users_choice(tmp_path: Path, task: Path) -> None:
    """So that a study from someone else does not get the user's key sent to its server."""
    study = tmp_path / "theirs.toml"
    study.write_text(
        f'data = "{task}"\nconditions = ["none", "mless"]\n[likelihood]\nbase_url = "http://localhost:1/v1"\n[multiverse]\nengine = ["openai"]\n'
    )
    spec = load_study(str(study))
    asked = {"engine": "openai"}
    inner = inner_spec(spec, "likelihood", "", [condition_named(spec, "mless")], None, asked)
    assert (inner.likelihood.base_url if inner.likelihood else "", inner.names_server) == (
        "http://localhost:1/v1",
        False,
    )
    mine = load_study(str(study), {"base_url": "http://localhost:2/v1"})
    assert inner_spec(mine, "likelihood", "", [condition_named(mine, "mless")], None, asked).names_server


def test_a_server_is_one_more_value_of_the_engine(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLESS_API_KEY", "OPENAI_API_KEY", "MLESS_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    loaded = mless.load(str(tiny), head=True)
    served = FaultyServer(server.echoing(loaded.model, loaded.tokenizer))
    sets = ["multiverse.engine=hf,openai", "multiverse.template=raw", "multiverse.dtype=float32,bfloat16"]
    try:
        heard = Heard()
        run_study(spec_of(tiny, task, sets, base_url=served.url, tokenizer=str(tiny)), tmp_path / "out", heard)
        rows = table(tmp_path / "out", "specifications")
        assert rows["reason"].null_count() == rows.height, rows["reason"].unique().to_list()
        # A server has the dtype it has, so it is one specification and not two.
        assert set(rows["folder"]) == {
            f"likelihood-raw-{system}-{rest}"
            for system in ("study", "none")
            for rest in ("float32-hf", "bfloat16-hf", "own-openai")
        }
        means = rows.filter(metric="solution").select("system", "engine", "dtype", "delta")
        whole = means.filter(dtype="float32").join(means.filter(engine="openai"), on="system", suffix="_served")
        assert whole.height == 2
        assert (whole["delta"] - whole["delta_served"]).abs().max() < 1e-4
        again = run_study(spec_of(tiny, task, sets, base_url=served.url, tokenizer=str(tiny)), tmp_path / "out", heard)
        assert again.computed == 0
    finally:
        served.stop()


# ---- in words --------------------------------------------------------------------------------------------------------


def test_the_verdict_counts_specifications_and_names_the_setting(tmp_path: Path) -> None:
    lines = verdict_lines(write_multiverse(tmp_path / "x"))
    assert lines[0] == (
        "SmolLM2-135M-Instruct, 40 items of gsm8k: mless against none in 12 specifications by likelihood (2 templates × 3 system texts × 2 dtypes)"
    )
    assert lines[1].startswith(
        "mless (55 × ' /', before-question), solution: rises in 6 of 12 specifications, equivalent in 6; median Δ +0.0018 nats a token, from "
    )
    assert "; jointly, if it did nothing anywhere: 6 or more go one way with p = 0.0" in lines[1]
    assert (
        "; the setting that moves it most: template (range 0.0032: +0.0001 with raw to +0.0033 with chat, p < 0.001)"
        in lines[1]
    )
    assert lines[1].endswith("alone it turns the verdict in 6 of 6 pairs")
    assert any(
        line.startswith("left out, 6 specifications (") and line.endswith(": no such template here") for line in lines
    )
    assert any("extraction rule and grader concern drawn answers" in line for line in lines)
    assert any("specifications share their items and are no independent studies" in line for line in lines)


def test_a_share_changes_by_no_more_than_all_of_it() -> None:
    """One item of 16 that turns is so skewed that its interval would reach beyond."""
    cell = cells_of(MultiverseTable(by=["accuracy"]))[0]
    changes = {cell: {"pass@1": np.array([[-1.0]] * 3 + [[0.0]] * 13)}}
    names = {"model": "m", "task": "t"}
    found = tables_of_changes(changes, [cell], {}, ["mless"], names, lambda metric: 0.02, seed=0)
    row = found["specifications"].to_pylist()[0]
    assert (row["lo"], row["delta"]) == (-1.0, -3 / 16)


def test_few_items_are_said_to_be_too_few(tmp_path: Path) -> None:
    lines = verdict_lines(write_multiverse(tmp_path / "x", items=5))
    assert any("with 5 items no specification can reach p ≤ 0.05; take at least 6 items" in line for line in lines)


def test_the_page_shows_the_picture_and_the_summary_the_rows(folder: Path) -> None:
    page = publish(folder, fresh=True)
    assert (folder / "figures" / "specification.png").exists()
    assert "against none in 4 specifications by likelihood" in page.read_text("utf-8")
    found = summary(folder)
    assert len(found["specifications"]) == table(folder, "specifications").height
    assert found["specification_tests"][0]["specifications"] == 4


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["multiverse.template=chatty"], r"\[multiverse\]: template: no 'chatty' \(did you mean 'chat'\?\); there are: chat, user, raw"),
        (["multiverse.system=helpfull"], r"system: no 'helpfull' \(did you mean 'helpful'\?\); there are: study, boxed, helpful, steps, none"),
        (["multiverse.dtype=auto"], r"dtype: no 'auto'; there are: float32, bfloat16, float16"),
        (["multiverse.engine=vlm"], r"no engine 'vlm' \(did you mean 'vllm'\?\)"),
        (["multiverse.extraction=boxed+lastnumber"], r"no extraction rule 'lastnumber' \(did you mean 'last-number'\?\)"),
        (["multiverse.grader=numerical"], r"no grader 'numerical'"),
        (["multiverse.grader=python-tests"], r"grader: 'python-tests' runs code that the model wrote, and no other grader judges code"),
        (["multiverse.system=none,none"], r"system: name at least one value, and each once; got none, none"),
        (["multiverse.template=[]"], r"template: name at least one value, and each once; got none"),
        (["multiverse.by=attention"], r"--set multiverse.by: expected one or both of likelihood, accuracy"),
        (["multiverse.texts.none=x"], r"texts: 'none' is a text already; give yours another name"),
        (['multiverse.texts={"a/b" = "x"}'], r"texts: 'a/b' becomes part of folder names"),
        (["prompt=raw"], r"the study gives prompt, but it is tried in the values of \[multiverse\]; leave it out, and set multiverse.template"),
        (["dtype=float32"], r"gives dtype, .* set multiverse.dtype"),
        (["accuracy.engine=vllm"], r"gives accuracy.engine, .* set multiverse.engine"),
        (["accuracy.rules=boxed"], r"gives accuracy.rules, .* set multiverse.extraction"),
        (["accuracy.grader=numeric"], r"gives accuracy.grader, .* set multiverse.grader"),
        (["accuracy.grader=python-tests", "multiverse.by=accuracy"], r"the grader 'python-tests' runs the model's code"),
        (["conditions=none"], r"no condition is compared with none; name at least one, as --conditions none,mless"),
        (["conditions=none,rephrased"], r"condition 'rephrased' has a system text of its own"),
        (["conditions=none,self-consistency"], r"condition 'self-consistency' puts several answers to the vote"),
        (["multiverse.engine=openai"], r"none of the 4 inner studies can be run; the first, .*the openai engine needs a server: --base-url"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, tiny: Path, task: Path, sets: list[str], message: str
) -> None:
    with pytest.raises(BadStudy, match=message):
        run_tiny(tiny, task, tmp_path / "out", sets)
    assert not (tmp_path / "out").exists()


def test_a_grid_too_large_is_refused() -> None:
    texts = {f"t{n}": str(n) for n in range(120)}
    with pytest.raises(
        BadStudy, match=r"these settings are 1,080 specifications; expected at most 1,000; leave out some values"
    ):
        cells_of(MultiverseTable(texts=texts, system=list(texts), dtype=["float32", "bfloat16", "float16"]))
