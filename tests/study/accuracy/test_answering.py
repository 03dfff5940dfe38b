"""An accuracy study run for real, on a tiny model, a script or a server: its tables, and what a kill, a fault or a second run leaves."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engines.faulty_proxy import Answer, Asked, FaultyServer, completion, loopback_fixture  # noqa: F401
from interrupted import about_changed, take_apart
from mless import tasks, verdict_lines
from mless.engines.base import Decoding, OutOfMemory, Reply, Request
from mless.engines.hf import HfEngine
from mless.engines.scripted import ScriptedEngine
from mless.errors import BadData, BadFolder, BadPrompt, BadStudy, EngineFault
from mless.results.folder import ResultFolder
from mless.results.schemas import ACCURACY, ANSWERS, REPLIES
from mless.study import Outcome, load_study, run_study
from mless.study.accuracy import judging
from mless.study.accuracy.judging import judged
from mless.study.accuracy.measure import AccuracyMeasurement
from mless.study.conditions import conditions_of
from mless.study.identity import default_folder
from mless.study.spec import AccuracyTable
from mless.values import Item
from spelling import CHATML, byte_level, model_folder

TABLES = ("prompts", "answers", "accuracy")


class Heard:
    """Notes what a run tells, and calls `then` at every step of the answers."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[int, int]] = []
        self._then = then

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, what: str, done: int, total: int, workers: str = "") -> None:
        if what.startswith("answers, "):
            self.steps.append((done, total))
            self._then()

    def checked(self) -> None: ...


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpened(model_folder(tmp_path_factory.mktemp("models") / "tiny", template=CHATML))


def sharpened(folder: Path) -> Path:
    """A random Llama's weights made larger, so that its answers hang on the prompt."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight * 12 if weight.ndim > 1 else weight for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def run_tiny(model: Path, out: Path, told: Any = None, **changes: Any) -> Outcome:
    """`accuracy__slots` stands for accuracy.slots."""
    chosen: dict[str, Any] = {
        "model": str(model),
        "data": "arithmetic:1:6",
        "conditions": "none,mless",
        "length": 5,
        "dtype": "float32",
        "accuracy.slots": 8,
        "accuracy.max_new_tokens": 8,
    }
    chosen |= {key.replace("__", "."): value for key, value in changes.items()}
    return run_study(load_study("accuracy", chosen), out, told)


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory, heard: Heard) -> Path:
    """An undisturbed run of the tiny model."""
    out = tmp_path_factory.mktemp("whole") / "results"
    assert run_tiny(tiny, out, heard) == Outcome(out, 18, 18)
    return out


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    def written(answers: dict[str, Any]) -> Path:
        path = tmp_path / "script.json"
        path.write_text(json.dumps(answers))
        return path

    return written


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """A data file of one's own: four sums that are 1, 2, 3, 4, of two kinds."""
    return write_items(tmp_path / "sums.jsonl", *[{"answer": str(n), "kind": "ab"[n % 2]} for n in (1, 2, 3, 4)])


def write_items(path: Path, *items: dict[str, Any]) -> Path:
    rows = [{"id": f"q{n}", "question": f"What is {n} + 0?", **item} for n, item in enumerate(items, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


RIGHT = {f"q{n}": rf"It is \boxed{{{n}}}." for n in (1, 2, 3, 4)}


def run_script(script: Path, data: Path, out: Path, told: Heard | None = None, **changes: Any) -> Outcome:
    chosen: dict[str, Any] = {"data": str(data), "conditions": "none,mless", "length": 5}
    chosen |= {"accuracy.engine": "scripted", "accuracy.script": str(script)}
    chosen |= {key.replace("__", "."): value for key, value in changes.items()}
    return run_study(load_study("accuracy", chosen), out, told)


def manifest(out: Path) -> dict[str, Any]:
    return json.loads((out / "study.json").read_text())


def without_timings(out: Path) -> dict[str, Any]:
    about = manifest(out)
    del about["timings"], about["sha256"]
    about["command"].remove(str(out))
    return about


def tables_of(out: Path) -> dict[str, bytes]:
    return {name: (out / f"{name}.parquet").read_bytes() for name in TABLES if (out / f"{name}.parquet").exists()}


def everything(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def units(out: Path) -> set[str]:
    """Those that are whole; a name with a dot in front is one still being written."""
    return {path.stem for path in (out / "units").rglob("*.parquet") if not path.name.startswith(".")}


def texts(out: Path, condition: str) -> list[str]:
    rows = pl.read_parquet(out / "answers.parquet").filter(pl.col("condition") == condition)
    return rows.sort("item", "sample")["text"].to_list()


# ---- a whole run ---------------------------------------------------------------------------------------------------------


def test_the_tables_of_a_run(whole: Path) -> None:
    answers, accuracy = (pl.read_parquet(whole / f"{name}.parquet") for name in ("answers", "accuracy"))
    assert answers.columns == ANSWERS.names
    assert accuracy.columns == ACCURACY.names
    always = {"model", "task", "condition"}
    assert always | {"item", "sample", "seed", "text", "extracted", "correct", "why", "n_tokens", "finish"} <= set(
        answers.columns
    )
    assert always | {
        "metric", "n", "value", "lo", "hi", "delta", "delta_lo", "delta_hi", "p", "p_adjusted", "mde", "truncated", "no_answer",
    } <= set(accuracy.columns)  # fmt: skip
    assert answers.group_by("condition", maintain_order=True).len().rows() == [
        ("none", 6),
        ("none-again", 6),
        ("mless", 6),
    ]
    assert answers["why"].null_count() == 0
    assert answers["n_tokens"].is_between(1, 8).all()
    by_name = {row["condition"]: row for row in accuracy.filter(pl.col("metric") == "pass@1").to_dicts()}
    assert by_name.keys() == {"none", "none-again", "mless"}
    for name, row in by_name.items():
        mine = answers.filter(pl.col("condition") == name)
        assert row["value"] == mine["correct"].mean()
        assert row["truncated"] == (mine["finish"] == "length").mean()
        assert row["no_answer"] == mine["extracted"].is_null().mean()
    prompts = pl.read_parquet(whole / "prompts.parquet")
    assert prompts["condition"].unique().sort().to_list() == ["mless", "none", "none-again"]
    assert not (whole / "replies.parquet").exists()


def test_a_model_that_never_ends_is_cut_off_and_counted(tiny: Path, whole: Path, tmp_path: Path) -> None:
    some = pl.read_parquet(whole / "answers.parquet")
    assert set(some["finish"]) == {"stop", "length"}  # this one ends now and then
    endless = tmp_path / "endless"
    shutil.copytree(tiny, endless)
    weights = load_file(endless / "model.safetensors")
    weights["lm_head.weight"][[1, 2]] = 0  # the tokenizer's end and the config's: never the likeliest again
    save_file(weights, endless / "model.safetensors", metadata={"format": "pt"})
    run_tiny(endless, tmp_path / "r", limit=3)
    answers, accuracy = (pl.read_parquet(tmp_path / "r" / f"{name}.parquet") for name in ("answers", "accuracy"))
    assert answers["finish"].unique().to_list() == ["length"]
    assert (answers["n_tokens"] == 8).all()
    assert (accuracy["truncated"] == 1).all()
    assert (accuracy["tokens"] == 8).all()


def test_none_again_gets_the_same_answers_of_a_row_stable_engine(whole: Path) -> None:
    assert texts(whole, "none-again") == texts(whole, "none")
    assert len(set(texts(whole, "none"))) > 3  # the model does heed its prompt, so the above says something
    assert texts(whole, "mless") != texts(whole, "none")
    row = pl.read_parquet(whole / "accuracy.parquet").filter(pl.col("condition") == "none-again").row(0, named=True)
    assert (row["delta"], row["changed_text"]) == (0, 0)


def test_the_manifest_of_a_run(whole: Path) -> None:
    about = manifest(whole)
    assert about["complete"] is True
    assert about["measures"] == "accuracy"
    assert list(about["conditions"]) == ["none", "none-again", "mless"]
    assert (
        about["conditions"]["mless"] | {"filler": " /", "length": 5, "placement": "before-question", "arm": None}
        == (about["conditions"]["mless"])
    )
    assert about["conditions"]["none-again"]["again"] is True
    assert about["engine"] | {"engine": "hf", "mode": "row-stable", "slots": 8, "dtype": "float32"} == about["engine"]
    assert about["engine"]["self_check"]["logits"] == "same bits alone and together, in other slots"
    assert about["study"]["accuracy"]["temperature"] == 0  # every default is spelled out
    assert len(about["items"]) == 6
    assert about["questions"].keys() == set(about["items"])
    assert about["seeds"] == {"study": 0}
    assert about["model"]["fingerprint"]
    assert about["tokenizer"]["fingerprint"]
    assert {"torch", "transformers"} <= about["versions"].keys()
    assert {"device", "implementations", "command"} <= about.keys()
    assert about["timings"]["units_computed"] == about["units"] == 18
    sets = [word for flag, word in itertools.pairwise(about["command"]) if flag == "--set"]
    assert json.loads(json.dumps(load_study(about["command"][2], {}, sets).model_dump())) == about["study"]


def test_progress_is_told(whole: Path, heard: Heard) -> None:
    assert whole.exists()
    assert heard.steps == [(n, 18) for n in range(1, 19)]
    assert "loading tiny, with its language-model head" in heard.lines
    assert any(line.startswith("prompts: chat (auto); system text: 'You are a calculator.") for line in heard.lines)
    assert [line for line in heard.lines if line.startswith("row-stable: same bits alone and together")]


def test_a_second_run_computes_nothing(tiny: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(whole)
    monkeypatch.setattr("mless.models.load", unwanted)
    assert run_tiny(tiny, whole) == Outcome(whole, 0, 18, fresh=False)
    assert everything(whole) == before


def test_an_older_folder_opens_but_is_not_continued(tiny: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "older"
    shutil.copytree(whole, out)
    with about_changed(out, number=2):
        pass
    assert verdict_lines(out) == verdict_lines(whole)
    with pytest.raises(BadFolder, match=r"made by an older mless \(format 2\).*choose another --out"):
        run_tiny(tiny, out)


def unwanted(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nothing was to be loaded or drawn here")


def test_only_what_is_missing_is_drawn_again(tiny: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    folder = take_apart(out)
    folder.unit_path("replies", "mless-00003").unlink()
    folder.unit_path("replies", "none-again-00001").unlink()
    told = Heard()
    assert run_tiny(tiny, out, told) == Outcome(out, 2, 18)
    assert told.steps == [(17, 18), (18, 18)]
    assert tables_of(out) == tables_of(whole)


@pytest.mark.parametrize("units_there", [False, True])
def test_a_missing_table_is_made_again(
    tiny: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units_there: bool
) -> None:
    """From the stored answers, or from the units of a run that ended before its tables."""
    assert not (whole / "units").exists()
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    if units_there:
        take_apart(out)
    else:
        (out / "accuracy.parquet").unlink()
        monkeypatch.setattr("mless.models.load", unwanted)
    monkeypatch.setattr(HfEngine, "generate", unwanted)
    assert run_tiny(tiny, out) == Outcome(out, 0, 18)
    assert tables_of(out) == tables_of(whole)
    assert not (out / "units").exists()
    assert (
        manifest(out)["identity"] == manifest(whole)["identity"]
    )  # with what only the engine knows: slots, dtype, device


# ---- killed --------------------------------------------------------------------------------------------------------------

# Raw, because a chat template is rendered by a process that each killed run would have to start.
MANY = {"data": "arithmetic:1:16", "accuracy__max_new_tokens": 16, "prompt": "raw"}
TOTAL = 48


class Held:
    """Stays for ever at a moment of the run: before the first manifest, or before the tables. A file says that it is there."""

    def __init__(self, moment: str, sign: Path) -> None:
        self._moment, self._sign = moment, sign

    def say(self, line: str) -> None:
        self._hold("judging" if line.startswith("judging") else line)

    def step(self, what: str, done: int, total: int, workers: str = "") -> None: ...

    def checked(self) -> None:
        self._hold("checked")

    def _hold(self, moment: str) -> None:
        if moment == self._moment:
            self._sign.touch()
            time.sleep(600)


def _answer(model: Path, out: Path, moment: str) -> None:
    os.nice(3)  # whoever is to kill it comes first; much more, and a busy machine never lets it begin
    run_tiny(model, out, Held(moment, out.parent / moment), **MANY)


@pytest.fixture(scope="module")
def start() -> Callable[..., Any]:
    """Starts real processes; forked off one that has imported everything and computed nothing, because importing takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "mless.study.accuracy.measure",
            "mless.engines.hf",
            "transformers.models.llama.modeling_llama",
            "test_answering",
        ]
    )

    def started(model: Path, out: Path, moment: str = "never") -> Any:
        process = context.Process(target=_answer, args=(model, out, moment), daemon=True)
        process.start()
        return process

    return started


@pytest.fixture(scope="module")
def many(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("many") / "results"
    assert run_tiny(tiny, out, **MANY).computed == TOTAL
    return out


def wait_until(done: Callable[[], bool], process: Any) -> None:
    until = time.monotonic() + 120
    while not done():
        assert process.is_alive(), "it ended before its moment came"
        assert time.monotonic() < until
        time.sleep(0.004)


def kill(process: Any) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def assert_as_if_nothing_had_happened(out: Path, many: Path) -> None:
    assert tables_of(out) == tables_of(many)
    assert without_timings(out) == without_timings(many)
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("shares", [(0.0, 0.5), pytest.param((0.0, 0.3, 0.6), marks=pytest.mark.slow)])
def test_killed_at_random_moments(
    tiny: Path, many: Path, tmp_path: Path, start: Callable[..., Any], shares: tuple[float, ...]
) -> None:
    out = tmp_path / "killed"
    rng = random.Random(3)
    stored = 0
    for share in shares:
        process = start(tiny, out)
        wait_until(lambda: len(units(out)) > max(stored, share * TOTAL), process)  # noqa: B023
        time.sleep(rng.uniform(0, 0.02))
        kill(process)
        kept = units(out)
        assert stored < len(kept) < TOTAL
        stored = len(kept)
        assert all(ResultFolder(out).read_unit("replies", key).num_rows == 1 for key in kept)
        assert manifest(out)["complete"] is False
    told = Heard()
    assert run_tiny(tiny, out, told, **MANY) == Outcome(out, TOTAL - stored, TOTAL)  # what is stored is not drawn again
    assert told.steps == [(n, TOTAL) for n in range(stored + 1, TOTAL + 1)]
    assert_as_if_nothing_had_happened(out, many)


def test_killed_before_the_first_and_before_the_last_manifest(
    tiny: Path, many: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    out = tmp_path / "killed"
    process = start(tiny, out, "checked")
    wait_until((tmp_path / "checked").exists, process)
    kill(process)
    assert [path.name for path in out.iterdir()] == [".lock"]
    process = start(tiny, out, "judging")
    wait_until((tmp_path / "judging").exists, process)
    kill(process)
    assert len(units(out)) == TOTAL
    assert manifest(out)["complete"] is False
    assert run_tiny(tiny, out, **MANY) == Outcome(out, 0, TOTAL)
    assert_as_if_nothing_had_happened(out, many)


def test_two_runs_on_one_folder(tiny: Path, many: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    out = tmp_path / "shared"
    process = start(tiny, out)
    wait_until(lambda: len(units(out)) > 0, process)
    os.kill(process.pid, signal.SIGSTOP)  # so that it is in the middle of its work for as long as it takes
    try:
        before = units(out)
        with pytest.raises(
            BadFolder, match=r"another mless is writing .*shared; wait for it to end, or choose another --out"
        ):
            run_tiny(tiny, out, **MANY)
        assert before <= units(out)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0
    assert_as_if_nothing_had_happened(out, many)


# ---- memory --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Forwards of more than `most` rows run out of memory while `short` says so; gives back the rows that did."""

    def limited(most: int, short: Callable[[], bool] = lambda: True) -> list[int]:
        real = LlamaForCausalLM.forward
        refused: list[int] = []

        @functools.wraps(real)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            rows = kwargs["input_ids"].shape[0]
            if rows > most and short():
                refused.append(rows)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
        return refused

    return limited


@pytest.fixture(scope="module")
def four(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed, with four slots."""
    out = tmp_path_factory.mktemp("four") / "results"
    run_tiny(tiny, out, accuracy__slots=4)
    return out


def test_out_of_memory_at_the_start_halves_the_slots(
    tiny: Path, four: Path, tmp_path: Path, little_memory: Callable[..., list[int]]
) -> None:
    refused = little_memory(4)
    told = Heard()
    assert run_tiny(tiny, tmp_path / "r", told, accuracy__slots=16).computed == 18
    assert refused == [16, 8]
    said = [line for line in told.lines if "out of memory" in line]
    assert [line.partition(";")[0] for line in said] == [
        "out of memory with 16 slots: going on with 8",
        "out of memory with 8 slots: going on with 4",
    ]
    assert tables_of(tmp_path / "r") == tables_of(four)
    assert manifest(tmp_path / "r")["engine"] == manifest(four)["engine"]


def test_out_of_memory_in_mid_run_begins_anew_with_half_the_slots(
    tiny: Path, four: Path, tmp_path: Path, little_memory: Callable[..., list[int]]
) -> None:
    out = tmp_path / "r"
    held: list[bool] = []

    def is_held() -> None:
        try:
            with ResultFolder(out).writing():
                held.append(False)
        except BadFolder:
            held.append(True)

    refused = little_memory(4, lambda: len(units(out)) > 2)  # those are stored, drawn with 8 slots
    told = Heard(is_held)
    assert run_tiny(tiny, out, told) == Outcome(out, 18, 18)
    assert refused == [8]
    assert [line for line in told.lines if line.startswith("out of memory with 8 slots: going on with 4; ")]
    assert 18 + 2 < len(held) < 18 + 12  # some steps before it ran out, and all 18 after
    assert all(held)  # a second run would have been told so at any time
    assert tables_of(out) == tables_of(four)
    assert manifest(out)["identity"] == manifest(four)["identity"]


def test_a_run_goes_on_with_the_slots_that_memory_left_it(
    tiny: Path, four: Path, tmp_path: Path, little_memory: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    with monkeypatch.context() as scope:
        scope.setattr(AccuracyMeasurement, "finish", unwanted)  # it dies before the tables
        little_memory(4)
        with pytest.raises(AssertionError, match="nothing was to be loaded"):
            run_tiny(tiny, out)
    monkeypatch.undo()  # there is memory again
    ResultFolder(out).unit_path("replies", "mless-00002").unlink()
    with pytest.raises(BadFolder, match=r"drawn with 4 slots, but 2 are asked for.*leave accuracy.slots out to go on"):
        run_tiny(tiny, out, accuracy__slots=2)
    assert run_tiny(tiny, out) == Outcome(out, 1, 18)  # the same command, which asks for 8
    assert manifest(out)["engine"]["slots"] == 4
    assert tables_of(out) == tables_of(four)


@pytest.mark.parametrize(("slots", "mode", "tried"), [(1, "row-stable", [1]), (32, "batch-invariant", [32, 16])])
def test_when_no_smaller_number_is_left(
    tiny: Path, tmp_path: Path, little_memory: Callable[..., list[int]], slots: int, mode: str, tried: list[int]
) -> None:
    refused = little_memory(0)
    with pytest.raises(OutOfMemory, match=f"{tried[-1]} rows of .* tokens do not fit into the memory of cpu"):
        run_tiny(tiny, tmp_path / "r", accuracy__slots=slots, accuracy__mode=mode)
    assert refused == tried


# ---- a server that goes away ---------------------------------------------------------------------------------------------


class Server:
    """Answers until it has answered `until` times; counts what it answered."""

    def __init__(self, loopback: Callable[..., FaultyServer], until: int | None = None, **changes: Any) -> None:
        self.until, self.changes = until, changes
        self.answered: list[str] = []
        self.server = loopback(self._answer, self._plan)

    def _plan(self, asked: Asked) -> list[str]:
        gone = self.until is not None and len(self.answered) >= self.until
        return ["hang up"] * 99 if gone else []

    def _answer(self, asked: Asked) -> Answer:
        if asked.method != "POST":
            return Answer(404)
        self.answered.append(asked.body.decode())
        number = asked.prompt.partition("What is ")[2].partition(" ")[0]
        return completion(rf"So it is \boxed{{{number}}}.", **self.changes)

    def run(self, data: Path, out: Path, told: Heard | None = None, **changes: Any) -> Outcome:
        chosen: dict[str, Any] = {"model": "served", "data": str(data), "conditions": "none,mless", "length": 5}
        chosen |= {"accuracy.engine": "openai", "accuracy.base_url": self.server.url, "accuracy.retries": 0}
        chosen |= {"accuracy.concurrency": 1}
        chosen |= {key.replace("__", "."): value for key, value in changes.items()}
        return run_study(load_study("accuracy", chosen), out, told)


@pytest.fixture
def served(loopback: Callable[..., FaultyServer]) -> Callable[..., Server]:
    return functools.partial(Server, loopback)


def test_a_server_that_goes_away_in_mid_run(served: Callable[..., Server], sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    server = served(until=5)
    kept = r"127\.0\.0\.1.*\. 5 of the 8 answers asked for have come and are kept; the same command goes on from there"
    with pytest.raises(EngineFault, match=kept):
        server.run(sums, out)
    assert len(units(out)) == 5
    assert manifest(out)["complete"] is False
    with pytest.raises(EngineFault, match=r"0 of the 3 answers"):  # still away
        server.run(sums, out)
    server.until = None
    told = Heard()
    # with other manners, which change no answer
    assert server.run(sums, out, told, accuracy__concurrency=2, accuracy__timeout=30, accuracy__retries=1).computed == 7
    assert told.steps[0] == (6, 12)
    assert len(server.answered) == len(set(server.answered)) == 12  # each was answered exactly once
    fresh = served()
    fresh.run(sums, tmp_path / "undisturbed")
    assert tables_of(out) == tables_of(tmp_path / "undisturbed")
    assert pl.read_parquet(out / "answers.parquet")["correct"].all()


def test_a_server_is_sent_text_where_no_tokenizer_is_given(
    served: Callable[..., Server], sums: Path, tmp_path: Path
) -> None:
    server, told = served(system_fingerprint="fp-7"), Heard()
    out = tmp_path / "r"
    assert server.run(sums, out, told).computed == 12
    assert [line for line in told.lines if "prompts are sent as text" in line and "--tokenizer" in line]
    asked = [asked for asked in server.server.posts if asked.json["messages"][-1]["content"].startswith("/")]
    assert {one.path for one in server.server.posts} == {"/v1/chat/completions"}
    assert [one.json["messages"][-1] for one in asked] == [
        {"role": "user", "content": f"/ / / / / What is {n} + 0?"} for n in (1, 2, 3, 4)
    ]
    assert [one.json["messages"][0]["role"] for one in asked] == ["system"] * 4
    assert not (out / "prompts.parquet").exists()
    about = manifest(out)
    assert about["prompt"] == "text"
    assert about["engine"]["base_url"] == server.server.url
    assert about["engine"]["server"]["fingerprints"] == ["fp-7"]


def test_the_key_is_stored_nowhere_even_if_the_server_repeats_it(
    loopback: Callable[..., FaultyServer], sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("MLESS_API_KEY", key)

    def answer(asked: Asked) -> Answer:
        seen = json.dumps(asked.headers)
        usage = {"completion_tokens": 2**31}
        models = Answer(body=json.dumps({"data": [{"id": seen}], "version": seen}).encode())
        return completion(f"{seen} = 4", system_fingerprint=seen, usage=usage) if asked.method == "POST" else models

    server, out = loopback(answer), tmp_path / "r"
    chosen = {"model": "served", "data": str(sums), "conditions": "none,mless", "length": 5}
    engine = {"accuracy.engine": "openai", "accuracy.base_url": server.url}
    run_study(load_study("accuracy", chosen | engine), out)
    answers = pl.read_parquet(out / "answers.parquet")
    assert answers["text"].str.contains("Bearer [key]", literal=True).all()
    assert answers["n_tokens"].is_null().all(), "2**31 tokens are no count"
    files = [path for path in out.rglob("*") if path.is_file()]
    for path in files:
        # Parquet is compressed, so its cells are looked at instead of its bytes.
        stored = (
            str(pl.read_parquet(path).to_dicts()) if path.suffix == ".parquet" else path.read_bytes().decode("latin1")
        )
        assert key not in stored, path
    assert {"answers.parquet", "study.json"} <= {path.name for path in files}


def test_a_strangers_study_file_does_not_get_the_key(
    loopback: Callable[..., FaultyServer], sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    monkeypatch.delenv("MLESS_BASE_URL", raising=False)
    server = loopback(lambda asked: completion("So it is 4."))
    file = tmp_path / "given.toml"
    file.write_text(
        f'model = "served"\ndata = "{sums}"\nconditions = ["none", "mless"]\n[accuracy]\nengine = "openai"\nbase_url = "{server.url}"\nagain = false\n'
    )
    with pytest.raises(EngineFault, match=rf"only the study file names the server {server.url}.*--base-url"):
        run_study(load_study(str(file)), tmp_path / "r")
    assert server.connections == 0
    run_study(load_study(str(file), {"accuracy.base_url": server.url}), tmp_path / "r")
    assert {one.headers["Authorization"] for one in server.posts} == {"Bearer sk-very-secret-0123456789"}
    monkeypatch.delenv("OPENAI_API_KEY")
    run_study(load_study(str(file)), tmp_path / "without")
    assert "Authorization" not in server.posts[-1].headers


def test_a_server_is_sent_token_ids_where_a_tokenizer_is_given(
    served: Callable[..., Server], sums: Path, tiny: Path, tmp_path: Path
) -> None:
    server, told = served(), Heard()
    out = tmp_path / "r"
    server.run(sums, out, told, tokenizer=str(tiny))
    assert {one.path for one in server.server.posts} == {"/v1/completions"}
    assert not [line for line in told.lines if "sent as text" in line]
    prompts = pl.read_parquet(out / "prompts.parquet")
    stored = {tuple(ids) for ids in prompts["token_ids"].to_list()}
    assert {tuple(one.json["prompt"]) for one in server.server.posts} == stored
    assert manifest(out)["prompt"] == "chat"


@pytest.mark.parametrize("condition", ["position-only", "masked-filler"])
def test_what_no_server_can_do_is_said_before_it_is_asked(
    served: Callable[..., Server], sums: Path, tmp_path: Path, condition: str
) -> None:
    server = served()
    with pytest.raises(BadPrompt, match=f"{condition}.*no server offers; use --engine hf"):
        server.run(sums, tmp_path / "r", conditions=f"none,{condition}")
    assert server.server.posts == []


def test_a_server_that_counts_no_tokens(served: Callable[..., Server], sums: Path, tmp_path: Path) -> None:
    served(usage=None).run(sums, tmp_path / "r")
    assert pl.read_parquet(tmp_path / "r" / "answers.parquet")["n_tokens"].null_count() == 12
    assert pl.read_parquet(tmp_path / "r" / "accuracy.parquet")["tokens"].null_count() > 0


def test_answers_with_and_without_a_count_of_tokens_are_all_kept(
    served: Callable[..., Server], sums: Path, tmp_path: Path
) -> None:
    server, out = served(until=3, usage=None), tmp_path / "r"
    with pytest.raises(EngineFault):
        server.run(sums, out)
    server.until, server.changes = 9, {}
    with pytest.raises(EngineFault):
        server.run(sums, out)
    server.until = None
    assert server.run(sums, out).computed == 3
    assert len(server.answered) == len(set(server.answered)) == 12, "a server may be paid for each"
    assert pl.read_parquet(out / "answers.parquet")["n_tokens"].null_count() == 3


def test_a_condition_with_more_samples_than_the_others_is_kept(
    script: Callable[..., Path], sums: Path, tmp_path: Path
) -> None:
    out, told = tmp_path / "r", Heard()
    chosen = {"conditions": "none,mless,self-consistency"}
    assert run_script(script(RIGHT), sums, out, **chosen).computed == 16
    take_apart(out)
    assert run_script(tmp_path / "script.json", sums, out, told, **chosen).computed == 0
    assert not [line for line in told.lines if "refused" in line]


# ---- settings changed ----------------------------------------------------------------------------------------------------

SAMPLED = {"accuracy__samples": 4, "accuracy__temperature": 0.7}


@pytest.fixture
def drawn(script: Callable[..., Path], sums: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Four samples of each answer, some right: run into a folder by its name."""
    path = script({f"q{n}": [rf"\boxed{{{n}}} or {n + 1}", rf"\boxed{{{n + 1}}} or {n}"] for n in (1, 2, 3, 4)})

    def run(name: str, **changes: Any) -> Outcome:
        return run_script(path, sums, tmp_path / name, **(SAMPLED | changes))

    return run


@pytest.mark.parametrize(
    ("setting", "value"),
    [("k", [1, 4]), ("margin", 0.3), ("dev_share", 0.5), ("rules", ["number"]), ("cluster_field", "kind")],
)
def test_changed_judging_draws_nothing(
    drawn: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any
) -> None:
    drawn("r")
    old = tables_of(tmp_path / "r")
    drawn("fresh", **{f"accuracy__{setting}": value})
    monkeypatch.setattr(ScriptedEngine, "generate", unwanted)
    assert drawn("r", **{f"accuracy__{setting}": value}) == Outcome(tmp_path / "r", 0, 12)
    assert tables_of(tmp_path / "r") == tables_of(tmp_path / "fresh") != old
    assert without_timings(tmp_path / "r") == without_timings(tmp_path / "fresh")
    assert drawn("r", **{f"accuracy__{setting}": value}).fresh is False
    assert drawn("r") == Outcome(tmp_path / "r", 0, 12)  # and back
    assert tables_of(tmp_path / "r") == old


def test_judging_anew_loads_no_model(tiny: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    monkeypatch.setattr("mless.models.load", unwanted)
    assert run_tiny(tiny, out, accuracy__rules="number") == Outcome(out, 0, 18)
    assert set(pl.read_parquet(out / "answers.parquet")["how"]) <= {"number", "none"}
    run_tiny(tiny, out)
    assert tables_of(out) == tables_of(whole)


def test_stopped_while_judging_anew(
    drawn: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn("r")
    old = tables_of(tmp_path / "r")
    with monkeypatch.context() as scope:
        scope.setattr(judging, "accuracy_table", unwanted)  # between the two tables
        with pytest.raises(AssertionError):
            drawn("r", accuracy__rules="number")
    assert tables_of(tmp_path / "r") != old
    assert manifest(tmp_path / "r")["complete"] is True  # nothing has to be drawn
    assert drawn("r") == Outcome(tmp_path / "r", 0, 12)  # but no one takes the one table for the other's
    assert tables_of(tmp_path / "r") == old


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"accuracy__temperature": 0.9}, "accuracy.temperature"),
        ({"accuracy__samples": 5}, "accuracy.samples"),
        ({"accuracy__max_new_tokens": 32}, "accuracy.max_new_tokens"),
        ({"accuracy__stop": ["or"]}, "accuracy.stop"),
        ({"accuracy__again": False}, "accuracy.again"),
        ({"model": "another"}, "model's weights"),
        ({"seed": 1}, "seed"),
        ({"length": 6}, "length"),
        ({"conditions": "none,mless,mful"}, "conditions"),
        ({"limit": 3}, "data"),
    ],
)
def test_changed_drawing_is_refused_by_name(
    drawn: Callable[..., Outcome], tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    drawn("r")
    before = everything(tmp_path / "r")
    with pytest.raises(BadFolder, match=f"holds another study .*it differs in .*{named}.*choose another --out"):
        drawn("r", **change)
    assert everything(tmp_path / "r") == before


@pytest.mark.parametrize(
    ("change", "same"),
    [("margin=0.1", True), ("rules=number", True), ("concurrency=2", True), ("top_p=0.9", False), ("slots=4", False)],
)
def test_without_out_a_run_finds_the_answers_it_can_use(change: str, same: bool) -> None:
    plain = default_folder(load_study("accuracy"), "m")
    assert plain == Path("results/accuracy-m")
    assert (default_folder(load_study("accuracy", {}, [f"accuracy.{change}"]), "m") == plain) is same
    sampled = ["accuracy.temperature=0.7", "accuracy.samples=4"]
    once = default_folder(load_study("accuracy", {}, sampled), "m")
    assert once not in (plain, default_folder(load_study("accuracy", {}, [*sampled, "seed=1"]), "m"))
    assert (default_folder(load_study("accuracy", {}, [*sampled, f"accuracy.{change}"]), "m") == once) is same


def test_a_changed_script_is_refused(
    drawn: Callable[..., Outcome], script: Callable[..., Path], tmp_path: Path
) -> None:
    drawn("r")
    script({"*": "other"})
    with pytest.raises(BadFolder, match=r"it differs in accuracy\.script;"):
        drawn("r")


def test_changed_weights_are_refused(tiny: Path, whole: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "tiny", template=CHATML, seed=1)
    with pytest.raises(BadFolder, match=r"it differs in model's weights;"):
        run_tiny(other, whole)


def test_a_folder_of_something_else_is_refused(script: Callable[..., Path], sums: Path, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("mine")
    with pytest.raises(BadFolder, match=r"is not empty and holds no study\.json; choose another --out"):
        run_script(script(RIGHT), sums, tmp_path / "r")
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["thesis.tex"]


# ---- the A/A control -----------------------------------------------------------------------------------------------------


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Request], Decoding, int | None]]:
    """What engines of this process are asked, call by call."""
    calls: list[tuple[list[Request], Decoding, int | None]] = []
    for engine in (ScriptedEngine, HfEngine):

        def generate(
            self: Any,
            requests: list[Request],
            decoding: Decoding,
            *,
            live: int | None = None,
            real: Any = engine.generate,
        ) -> Iterator[Reply]:
            calls.append((list(requests), decoding, live))
            return real(self, requests, decoding, live=live)

        monkeypatch.setattr(engine, "generate", generate)
    return calls


def test_none_again_is_drawn_in_another_order_with_other_company(
    tiny: Path, tmp_path: Path, spied: list[tuple[list[Request], Decoding, int | None]]
) -> None:
    run_tiny(tiny, tmp_path / "r")
    (first, _, all_slots), (again, decoding, live) = spied
    assert {request.condition for request in first} == {"none", "mless"}
    assert {request.condition for request in again} == {"none-again"}
    assert (all_slots, live) == (None, 6)  # of 8 slots
    assert decoding.greedy
    none = [request for request in first if request.condition == "none"]
    assert [request.item for request in again] != [request.item for request in none]
    assert {request.item: request.token_ids for request in again} == {r.item: r.token_ids for r in none}


def test_the_control_can_be_left_out(script: Callable[..., Path], sums: Path, tmp_path: Path) -> None:
    run_script(script(RIGHT), sums, tmp_path / "r", accuracy__again=False)
    assert list(manifest(tmp_path / "r")["conditions"]) == ["none", "mless"]
    accuracy = pl.read_parquet(tmp_path / "r" / "accuracy.parquet")
    assert accuracy["p_again"].null_count() == accuracy["aa_delta"].null_count() == len(accuracy)


def test_with_sampling_the_control_has_seeds_of_its_own_and_conditions_share_theirs(
    drawn: Callable[..., Outcome], tmp_path: Path
) -> None:
    drawn("r")
    answers = pl.read_parquet(tmp_path / "r" / "answers.parquet")
    seeds = {
        name: answers.filter(pl.col("condition") == name).sort("item", "sample")["seed"].to_list()
        for name in ("none", "none-again", "mless")
    }
    assert seeds["none"] == seeds["mless"]
    assert len(set(seeds["none"])) == 16  # one for each item and sample
    assert not set(seeds["none"]) & set(seeds["none-again"])
    assert texts(tmp_path / "r", "none") == texts(tmp_path / "r", "mless")  # a script heeds the seed alone
    assert texts(tmp_path / "r", "none") != texts(tmp_path / "r", "none-again")


def test_the_tiny_model_samples_by_those_seeds(tiny: Path, tmp_path: Path) -> None:
    settings = {"accuracy__samples": 3, "accuracy__temperature": 1.0, "accuracy__k": [1, 3], "limit": 2}
    run_tiny(tiny, tmp_path / "a", **settings)
    run_tiny(tiny, tmp_path / "b", **settings)
    assert tables_of(tmp_path / "a") == tables_of(tmp_path / "b")
    assert len(set(texts(tmp_path / "a", "none"))) == 6
    assert texts(tmp_path / "a", "none") != texts(tmp_path / "a", "none-again")
    metrics = pl.read_parquet(tmp_path / "a" / "accuracy.parquet")["metric"].unique()
    assert {"pass@1", "pass@3", "maj@3", "diversity"} == set(metrics)


# ---- conditions ----------------------------------------------------------------------------------------------------------

BASELINES = (
    "mless,mful,random,plan-and-solve,rephrased,question-twice,position-only,masked-filler,self-consistency,mine"
)


@pytest.fixture(scope="module")
def conditions(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("conditions") / "results"
    own = {"kind": "none", "system": "Answer in one word.", "question": "Now: {question} Be quick."}
    run_tiny(tiny, out, conditions=BASELINES, condition={"mine": own}, limit=3)
    return out


def test_every_condition_runs_on_a_model(conditions: Path) -> None:
    accuracy = pl.read_parquet(conditions / "accuracy.parquet")
    first = accuracy.group_by("condition", maintain_order=True).first()
    assert first["condition"].to_list() == ["none", "none-again", *BASELINES.split(",")]
    metrics = dict(first.select("condition", "metric").rows())
    assert metrics.pop("self-consistency") == "maj@8"
    assert set(metrics.values()) == {"pass@1"}
    answers = pl.read_parquet(conditions / "answers.parquet")
    drawn = dict(answers.group_by("condition").len().rows())
    assert drawn.pop("self-consistency") == 3 * 8
    assert set(drawn.values()) == {3}
    # a vote needs several answers, at the condition's own temperature
    assert len(set(texts(conditions, "self-consistency"))) > 3


def test_what_the_conditions_ask(conditions: Path) -> None:
    prompts = pl.read_parquet(conditions / "prompts.parquet")
    asked = {
        name: prompts.filter(pl.col("condition") == name).sort("item").row(0, named=True)
        for name in prompts["condition"].unique()
    }
    question = manifest(conditions)["questions"][asked["none"]["item"]]
    assert f"{question}\n\n{question}" in asked["question-twice"]["text"]
    assert f"Now: {question} Be quick." in asked["mine"]["text"]
    assert "Answer in one word." in asked["mine"]["text"]
    assert "write down a plan" in asked["plan-and-solve"]["text"]
    assert "inside \\boxed{}" in asked["rephrased"]["text"]
    assert " he he he he he" in asked["mful"]["text"]
    assert asked["position-only"]["token_ids"] == asked["none"]["token_ids"] == asked["self-consistency"]["token_ids"]
    assert asked["masked-filler"]["token_ids"] == asked["mless"]["token_ids"]


def test_hidden_filler_does_what_shifted_positions_do(conditions: Path) -> None:
    """Nothing outside of the filler sees it, so all that is left of it is where the question stands."""
    assert texts(conditions, "masked-filler") == texts(conditions, "position-only")
    assert texts(conditions, "masked-filler") not in (texts(conditions, "none"), texts(conditions, "mless"))


# ---- judging -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("He has 9 eggs and sells them for 2.\n9 * 2 = <<9*2=18>>18\n#### 18", "18"),
        (r"Adding up gives $\boxed{\frac{3}{4}}$.", r"\frac{3}{4}"),
        ("  1,024 ", "1,024"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
    ],
    ids=["gsm8k", "a worked solution", "a number", "a name"],
)
def test_the_reference_in_what_the_data_give(given: str, found: str) -> None:
    assert tasks.reference_of(Item("1", "q", given)) == found


def replies(*given: tuple[str, str]) -> pa.Table:
    rows = [
        {"model": "m", "task": "own", "condition": "none", "item": f"q{n}", "sample": 0, "seed": n, "text": text}
        | {"n_tokens": 4, "finish": finish}
        for n, (text, finish) in enumerate(given, start=1)
    ]
    return pa.Table.from_pylist(rows, schema=REPLIES)


def test_every_answer_keeps_why_it_was_judged_so() -> None:
    given = [
        (r"Clearly \boxed{18}.", "stop"),
        (r"So \boxed{19}", "stop"),
        ("I cannot say.", "stop"),
        ("Let me count: one, two,", "length"),
        (r"\boxed{\frac{1}{2}}", "stop"),
        (r"\boxed{7}", "stop"),
        (r"\boxed{3 4 5}", "stop"),
    ]
    references = ["#### 18", "18", "18", "18", "0.5", "7 8 9", "3 4 5"]
    items = [Item(f"q{n}", "?", answer, f"c{n % 2}") for n, answer in enumerate(references, start=1)]
    found = judged(replies(*given), items, "own", AccuracyTable()).to_pylist()
    assert [row["correct"] for row in found] == [True, False, False, False, True, False, True]
    assert [row["extracted"] for row in found] == ["18", "19", None, None, r"\frac{1}{2}", "7", "3 4 5"]
    assert [row["how"] for row in found] == ["boxed", "boxed", "none", "none", "boxed", "boxed", "boxed"]
    why = [row["why"] for row in found]
    assert why[:4] == ["same text", "other number", "no answer", "no answer"]
    assert "reference not parsed: compared as text" in why[5]
    assert why[6] == "same text"  # cannot be parsed, and need not be
    assert all(why)
    assert [row["reference"] for row in found] == ["18", "18", "18", "18", "0.5", "7 8 9", "3 4 5"]
    assert [row["cluster"] for row in found] == [item.cluster for item in items]
    assert [row["finish"] for row in found] == [finish for _, finish in given]
    assert [row["stated"] for row in found] == [True, True, None, None, True, True, True]


def test_an_answer_is_stated_or_guessed() -> None:
    given = [("3 + 2 = 5", "stop"), ("To add 3 and 2, you simply add them.", "stop"), ("Add them.", "stop")]
    items = [Item(f"q{n}", "What is 3 + 2?", "5") for n in (1, 2, 3)]
    found = judged(replies(*given), items, "arithmetic-1", AccuracyTable()).to_pylist()
    assert [(row["extracted"], row["stated"]) for row in found] == [("5", True), ("2", False), (None, None)]


def test_a_model_that_only_changes_the_form_of_its_answers_gets_a_verdict_that_says_form(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    """Without filler half of the answers are prose whose last number is an operand; with it all state the result."""
    items = tasks.arithmetic(60, 1)
    stated = {item.id: f"{item.question.removeprefix('What is ')[:-1]} = {item.answer}" for item in items}
    operands = {item.id: item.question.split()[-1][:-1] for item in items}
    prose = {name: f"To do this sum, you take the first number and {b}." for name, b in operands.items()}
    wrong = {item.id: f"It is {int(item.answer or 0) + 1}." for item in items[50:]}  # stated, and wrong, under both
    none = stated | {item.id: prose[item.id] for item in items[::2]} | wrong
    path, out = script({"none": none, "none-again": none, "mless": stated | wrong}), tmp_path / "r"
    spec = load_study(
        "accuracy",
        {
            "data": "arithmetic:1:60",
            "conditions": "none,mless",
            "accuracy.engine": "scripted",
            "accuracy.script": str(path),
        },
    )
    run_study(spec, out)
    row = pl.read_parquet(out / "accuracy.parquet").row(by_predicate=pl.col("condition") == "mless", named=True)
    # every second of the first 50 items was guessed, and some of those guesses are right (5 + 0)
    lucky = sum(operands[item.id] == item.answer for item in items[:50:2])
    assert row["delta"] == row["delta_form"] == pytest.approx((25 - lucky) / 60)
    assert (row["delta_both"], row["both_n"], row["both_before"], row["both_after"]) == (0, 35, 25, 25)
    assert (row["stated"], row["stated_delta"], row["mostly_form"]) == (1, pytest.approx(25 / 60), True)
    lines = verdict_lines(out)
    line = next(line for line in lines if line.startswith("mless ("))
    assert "accuracy rises. Most of this Δ is form: +" in line
    assert line.endswith("from the 35 items where both state one: 25 → 25 right, 0.0 points [−9.9, +9.9] among these")
    assert not any("are all that arithmetic-1 has" in line for line in lines)  # 60 of 200
    assert (
        "Answers that state no result, where the last number, letter or formula was taken as a guess: none 41.7 %"
        in "\n".join(lines)
    )


def test_a_folder_judged_by_older_rules_is_judged_anew(script: Callable[..., Path], tmp_path: Path) -> None:
    data = write_items(tmp_path / "sums.jsonl", *[{"answer": str(n)} for n in (1, 2, 3, 4)])
    path, out = script(RIGHT), tmp_path / "r"
    run_script(path, data, out)
    whole = tables_of(out)
    folder = ResultFolder(out)
    about = folder.manifest()
    assert about is not None
    folder.write_manifest(about | {"analysis": "of an older version"})
    folder.write_table("answers", folder.read_table("answers").drop_columns("stated"))
    assert "stated" not in folder.read_table("answers").column_names
    assert run_script(path, data, out).fresh
    assert tables_of(out) == whole
    assert folder.read_table("answers").column("stated").null_count < 4 * 3


def test_a_task_has_its_rules_and_a_study_may_have_others() -> None:
    cut_off = replies(("There are 7 days, so 7 times", "length"))
    items = [Item("q1", "?", "7")]

    def how(task: str, **settings: Any) -> str:
        return judged(cut_off, items, task, AccuracyTable(**settings)).to_pylist()[0]["how"]

    assert how("math500") == "none"  # which asks for a box: any number would do otherwise
    assert how("gsm8k_test") == how("arithmetic-2") == how("my-own") == "number"
    assert how("math500", rules=["boxed", "number"]) == "number"


def test_truncated_and_unanswered_stand_beside_the_accuracy(script: Callable[..., Path], tmp_path: Path) -> None:
    data = write_items(tmp_path / "math500.jsonl", *[{"answer": str(n)} for n in (1, 2, 3, 4)])
    long = "and so on " * 100
    path = script({"none": RIGHT | {"q3": "no idea", "q4": long}, "none-again": RIGHT, "mless": RIGHT | {"q1": long}})
    run_script(path, data, tmp_path / "r", accuracy__max_new_tokens=20)
    rows = pl.read_parquet(tmp_path / "r" / "accuracy.parquet").filter(pl.col("metric") == "pass@1")
    shown = {row["condition"]: (row["value"], row["truncated"], row["no_answer"]) for row in rows.to_dicts()}
    assert shown == {"none": (0.5, 0.25, 0.5), "none-again": (1, 0, 0), "mless": (0.75, 0.25, 0.25)}
    row = rows.filter(pl.col("condition") == "mless").row(0, named=True)
    assert (row["delta"], row["gained"], row["lost"], row["aa_delta"]) == (0.25, 2, 1, 0.5)


# ---- bad input -----------------------------------------------------------------------------------------------------------


def test_a_task_without_answers(script: Callable[..., Path], tmp_path: Path) -> None:
    none = write_items(tmp_path / "none.jsonl", {}, {})
    with pytest.raises(BadData, match=r"has no answers to judge by; say which field holds them: --answer-field NAME"):
        run_script(script(RIGHT), none, tmp_path / "r")
    one = write_items(tmp_path / "one.jsonl", {"answer": "1"}, {"answer": " "}, {"answer": None})
    with pytest.raises(
        BadData, match=r"2 of 3 items have no answer \(first: 'q2'\); fill them in, or remove those items"
    ):
        run_script(script(RIGHT), one, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accuracy.k": [2]}, r"\[accuracy\]: k = 2, but 1 sample\(s\) are drawn per item; .*--samples 2, or a smaller k"),
        ({"accuracy.k": [0]}, r"k = 0, but 1 sample"),
        ({"accuracy.samples": 4}, r"4 samples at temperature 0 are all the same answer; give --temperature, as 0\.7"),
        ({"accuracy.engine": "llamacpp"}, r"\[accuracy\]: no engine 'llamacpp'; there are: hf, vllm, openai, scripted"),
        ({"accuracy.engine": "scripted"}, r"needs its answers: --set accuracy\.script=FILE\.json"),
        ({"accuracy.engine": "openai"}, r"needs a server: --base-url http://HOST:PORT/v1"),
        ({"accuracy.rules": "boxes"}, r"no extraction rule 'boxes' \(did you mean 'boxed'\?\); there are: boxed"),
        ({"accuracy.max_new_tokens": 0}, r"field 'accuracy.max_new_tokens'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadStudy, match=message):
        load_study("accuracy", changes)


def test_an_attention_study_draws_no_answers() -> None:
    with pytest.raises(
        BadStudy, match=r"'quick' measures attention and draws no answers; for answers use mless run accuracy"
    ):
        load_study("quick", {"accuracy.engine": "hf"})


@pytest.mark.parametrize(
    "own",
    [
        {"filler": " /", "hidden": True},
        {"kind": "none", "system": "Be brief."},
        {"kind": "none", "question": "{question}?"},
        {"kind": "none", "samples": 4},
        {"kind": "none", "again": True},
    ],
    ids=lambda own: next(iter(own.keys() - {"kind", "filler"})),
)
def test_conditions_for_answers_are_refused_in_an_attention_study(own: dict[str, Any], tmp_path: Path) -> None:
    spec = load_study("quick", {"conditions": "none,mine", "condition": {"mine": own}})
    with pytest.raises(BadStudy, match=r"condition 'mine' is for answers: .*a study that has \[accuracy\]"):
        run_study(spec, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"again": True}, r"one A/A control expected, got none-again, mine; leave out all but one"),
        ({"samples": 4}, r"'mine': 4 samples at temperature 0 are all the same answer; give it a temperature above 0"),
        ({"question": "twice"}, r"'mine': its question template must hold \{question\}, got 'twice'"),
    ],
)
def test_conditions_that_could_not_be_compared_are_refused_before_the_run(
    script: Callable[..., Path], sums: Path, tmp_path: Path, own: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadStudy, match=message):
        run_script(
            script(RIGHT), sums, tmp_path / "r", conditions="none,mine", condition={"mine": {"kind": "none", **own}}
        )
    assert not (tmp_path / "r").exists()


def test_a_control_of_ones_own_in_place_of_none_again(script: Callable[..., Path], sums: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"conditions": "none,mine,mless", "accuracy__again": False}
    voting = {"mine": {"kind": "none", "again": True, "samples": 3, "temperature": 0.5}}
    with pytest.raises(BadStudy, match=r"'mine' is none once more \(again = true\), so it cannot vote"):
        run_script(script(RIGHT), sums, tmp_path / "r", **changes, condition=voting)
    run_script(script(RIGHT), sums, tmp_path / "r", **changes, condition={"mine": {"kind": "none", "again": True}})
    assert pl.read_parquet(tmp_path / "r" / "accuracy.parquet").filter(condition="mless")["p_again"].to_list() == [1.0]


def test_more_tokens_than_the_model_takes(tiny: Path, tmp_path: Path) -> None:
    longest = r"item .* is \d+ tokens under 'none' and may be answered with 500, but tiny takes 512 in all; use --max-new-tokens \d+"
    with pytest.raises(BadStudy, match=longest):
        run_tiny(tiny, tmp_path / "r", accuracy__max_new_tokens=500)
    # Positions can lie beyond what the tokens alone would reach.
    with pytest.raises(
        BadStudy, match=r"under 'position-only' and may be answered with 100, .* --max-new-tokens \d\d or"
    ):
        run_tiny(tiny, tmp_path / "r", accuracy__max_new_tokens=100, conditions="none,position-only", length=380)
    with pytest.raises(
        BadPrompt, match=r"reaches position \d+ under condition 'position-only', but tiny takes 512; leave it out"
    ):
        run_tiny(tiny, tmp_path / "r", conditions="none,position-only", length=512)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"the scripted answers in '.*': is not there"),
        ("{broken", r"the scripted answers in .*: line 1: broken JSON"),
        ('["a"]', r"should hold an object, not a list; expected"),
    ],
    ids=["missing", "broken", "a list"],
)
def test_scripts_that_cannot_be_read(sums: Path, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "script.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadData, match=message):
        run_script(path, sums, tmp_path / "r")
    path.write_text(json.dumps(RIGHT))
    assert run_script(path, sums, tmp_path / "r").computed == 12  # what the refusal left is no hindrance


def test_an_engine_that_dies_keeps_what_it_answered(
    script: Callable[..., Path],
    sums: Path,
    tmp_path: Path,
    spied: list[tuple[list[Request], Decoding, int | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = script({key: text for key, text in RIGHT.items() if key != "q3"})
    with pytest.raises(EngineFault, match=r"no scripted answer for item 'q3' of condition 'none'"):
        run_script(path, sums, tmp_path / "r")
    assert not (tmp_path / "r").exists()  # a script is checked before anything is stored
    monkeypatch.setattr(ScriptedEngine, "check_requests", lambda self, requests: None)  # as others, which fail later
    with pytest.raises(EngineFault, match=r"no scripted answer for item 'q3' of condition 'none'"):
        run_script(path, sums, tmp_path / "r")
    assert units(tmp_path / "r") == {"none-00001", "none-00002"}
    with pytest.raises(EngineFault, match="no scripted answer"):
        run_script(path, sums, tmp_path / "r")
    assert [request.item for request in spied[-1][0]] == [
        "q3",
        "q4",
        "q1",
        "q2",
        "q3",
        "q4",
    ]  # none's two are not asked again


def test_a_scripted_study_with_a_tokenizer_counts_its_tokens(
    script: Callable[..., Path], sums: Path, tiny: Path, tmp_path: Path
) -> None:
    run_script(script(RIGHT), sums, tmp_path / "r", tokenizer=str(tiny))
    answers = pl.read_parquet(tmp_path / "r" / "answers.parquet")
    count = len(byte_level(CHATML)(RIGHT["q1"], add_special_tokens=False).input_ids)
    assert answers.filter(pl.col("item") == "q1")["n_tokens"].unique().to_list() == [count]
    assert (tmp_path / "r" / "prompts.parquet").exists()


# ---- found in review ---------------------------------------------------------------------------------------------------


def test_an_empty_side_of_the_split_is_told_before_anything_is_drawn(script: Any, sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    with pytest.raises(BadStudy, match=r"none into .*--set accuracy\.dev_share=0"):
        run_script(script(RIGHT), sums, out, **{"accuracy.dev_share": 0.5, "limit": 1})
    assert not out.exists()


def test_answers_of_another_machine_or_version_do_not_go_on(tiny: Path, whole: Path, tmp_path: Path) -> None:
    for name in ("device_name in use", "attention in use", "torch in use", "transformers in use"):
        out = tmp_path / name
        shutil.copytree(whole, out)
        with about_changed(out) as about:
            about["identity"][name] = "another"
        take_apart(out)
        next((out / "units" / "replies").glob("none-0*")).unlink(missing_ok=True)
        with pytest.raises(BadFolder, match=name):
            run_tiny(tiny, out)


def test_the_control_draws_the_samples_of_an_item_one_after_another(
    script: Any, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    real = ScriptedEngine.generate

    def watched(self: ScriptedEngine, requests: Any, decoding: Any, *, live: int | None = None) -> Any:
        seen.append([request.item for request in requests if request.condition == "none-again"])
        return real(self, requests, decoding, live=live)

    monkeypatch.setattr(ScriptedEngine, "generate", watched)
    run_script(script(RIGHT), sums, tmp_path / "r", **{"accuracy.samples": 3, "accuracy.temperature": 0.7})
    order = next(items for items in seen if items)
    assert [len(list(group)) for _, group in itertools.groupby(order)] == [3] * (len(order) // 3)
    assert list(dict.fromkeys(order)) != sorted(set(order))


def test_a_sum_is_asked_for_its_result_and_all_else_as_published() -> None:
    assert "calculator" in load_study("accuracy").system
    assert load_study("accuracy", {"data": "bundled"}).system == load_study("quick").system
    assert load_study("quick", {"data": "arithmetic"}).system == load_study("quick").system
    assert load_study("accuracy", {"system": "Hm."}).system == "Hm."


def test_positions_after_the_end_cannot_be_shifted() -> None:
    with pytest.raises(BadStudy, match="shifts what comes after the prompt's end"):
        conditions_of(load_study("accuracy", {"conditions": "position-only", "placement": "before-answer"}))


# ---- ARM -------------------------------------------------------------------------------------------------------------------


def test_arm_is_a_condition_like_any_other_and_resumes_to_the_same_tables(tiny: Path, tmp_path: Path) -> None:
    strong = {"arm.fraction": 0.4, "arm.p1": 99.0, "conditions": "none,arm,mless-arm", "limit": 3}
    outcome = run_tiny(tiny, tmp_path / "a", **strong)
    answers = ResultFolder(outcome.folder).read_table("answers").to_pylist()
    texts = {(row["condition"], row["item"]): row["text"] for row in answers}
    items = {item for _, item in texts}
    assert any(texts["none", item] != texts["arm", item] for item in items)
    about = json.loads((outcome.folder / "study.json").read_text())
    assert about["conditions"]["arm"]["arm"]["fraction"] == 0.4
    assert about["conditions"]["none"]["arm"] is None
    again = run_tiny(tiny, tmp_path / "b", **strong)
    take_apart(again.folder)
    for unit in sorted((again.folder / "units" / "replies").iterdir())[1::2]:
        unit.unlink()
    run_tiny(tiny, tmp_path / "b", **strong)
    assert (again.folder / "answers.parquet").read_bytes() == (outcome.folder / "answers.parquet").read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accuracy.engine": "openai", "accuracy.base_url": "http://127.0.0.1:9/v1"}, "ARM.*needs the weights; use --engine hf or vllm"),
        ({"arm.scope": "tensor"}, "scope 'tensor' pools.*use scope token"),
        ({"arm.layers": [99]}, "no layer 99 for ARM: this model's layers are 1 to"),
    ],
)  # fmt: skip
def test_arm_that_cannot_be_is_refused_before_a_model_is_loaded(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    spec = load_study("accuracy", {"model": str(tiny), "conditions": "none,arm", "data": "arithmetic:1:4"} | changes)
    with pytest.raises(BadStudy, match=words):
        run_study(spec, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_none_alone_is_refused_before_an_answer_is_drawn(sums: Path, tmp_path: Path) -> None:
    spec = load_study("accuracy", {"data": str(sums), "conditions": "none", "model": "absent"})
    with pytest.raises(BadStudy, match=r"no other condition is asked for; add one, as --conditions none,mless"):
        run_study(spec, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_more_answers_than_memory_holds_are_refused(sums: Path, tmp_path: Path) -> None:
    changes = {"data": str(sums), "accuracy.samples": 10_000, "accuracy.temperature": 1.0, "model": "absent"}
    named = {f"condition.c{n}.filler": " /" for n in range(900)}
    spec = load_study("accuracy", {**changes, **named, "conditions": ["none", *(f"c{n}" for n in range(900))]})
    with pytest.raises(
        BadStudy, match=r"items × conditions × samples: expected at most 10,000,000 answers \(limit answers"
    ):
        run_study(spec, tmp_path / "r")


@pytest.mark.parametrize(("stored", "asked"), [({}, 2), ({"tensor_parallel": 2}, None), ({"tensor_parallel": 4}, 2)])
def test_a_folder_is_not_continued_with_another_division(
    tmp_path: Path, stored: dict[str, int], asked: int | None
) -> None:
    spec = load_study("accuracy", {"accuracy.engine": "vllm", "accuracy.tensor_parallel": asked})
    about = {"engine": {"engine": "vllm", **stored}, "study": {"accuracy": {"slots": None}}}
    measurement = AccuracyMeasurement(spec)
    with pytest.raises(
        BadFolder, match=rf"tensor parallel {stored.get('tensor_parallel', 1)}, but {asked or 1} is asked"
    ):
        measurement.check_stored(ResultFolder(tmp_path), about)
    same = about | {"engine": {"tensor_parallel": asked or 1}}
    measurement.check_stored(ResultFolder(tmp_path), same)
