"""A likelihood study whose numbers come from a server: the same as hf's, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import mless
from engines import scoring_server as server
from engines.faulty_proxy import Answer, Asked, FaultyServer
from heard import Heard
from mless.engines import EngineKind
from mless.errors import BadPlugin, BadStudy, EngineFault
from mless.models import LoadedModel
from mless.report import publish
from mless.results.folder import ResultFolder
from mless.study import load_study, run_study, verdict_lines
from spelling import model_folder

CONDITIONS = ["none", "mless", "random", "question-twice"]
DISTRIBUTIONS = ["kl", "entropy", "top-1 agreement"]
ITEMS = 6


@pytest.fixture(autouse=True)
def without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLESS_API_KEY", "OPENAI_API_KEY", "MLESS_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", context=1024)


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return mless.load(str(tiny), head=True)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "solution": f"{n} twice is \\boxed{{{2 * n}}}."} for n in range(ITEMS)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def good(loaded: LoadedModel) -> Iterator[FaultyServer]:
    made = FaultyServer(server.echoing(loaded.model, loaded.tokenizer))
    yield made
    made.stop()


def run(data: Path, out: Path, said: Heard | None = None, sets: Sequence[str] = (), **changes: Any) -> Path:
    chosen = {"data": str(data), "length": 7, "system": "Answer in \\boxed{}.", "conditions": CONDITIONS, **changes}
    run_study(load_study("likelihood", chosen, ["likelihood.others=4", *sets]), out, said or Heard())
    return out


def served(at: FaultyServer, tokenizer: Path, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "tokenizer": str(tokenizer), "engine": "openai", "base_url": at.url, **more}


def table(folder: Path, name: str) -> pl.DataFrame:
    return pl.DataFrame(ResultFolder(folder).read_table(name))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, good: FaultyServer, tiny: Path, task: Path) -> tuple[Path, Heard]:
    said = Heard()
    return run(task, tmp_path_factory.mktemp("asked") / "r", said, **served(good, tiny)), said


def test_a_server_gives_the_numbers_of_hf(asked: tuple[Path, Heard], tiny: Path, task: Path, tmp_path: Path) -> None:
    own = run(task, tmp_path / "hf", model=str(tiny))
    for name, key in (("scores", "metric"), ("tokens", "position"), ("candidates", "number")):
        theirs = table(asked[0], name)
        ours = table(own, name).filter(~pl.col(key).is_in(DISTRIBUTIONS)) if name == "scores" else table(own, name)
        assert theirs.height == ours.height > 0
        both = theirs.join(ours, on=["condition", "item", key], suffix="_hf")
        assert both.height == theirs.height
        value = "value" if name == "scores" else "logp"
        assert (both[value] - both[f"{value}_hf"]).abs().max() < 1e-4
    theirs, ours = (table(one, "effects").filter(~pl.col("metric").is_in(DISTRIBUTIONS)) for one in (asked[0], own))
    assert theirs["delta"].to_list() == pytest.approx(ours["delta"].to_list(), abs=1e-4)


def test_what_compares_whole_distributions_is_left_out_and_said(asked: tuple[Path, Heard]) -> None:
    folder, said = asked
    assert not set(table(folder, "effects")["metric"]) & set(DISTRIBUTIONS)
    tokens = table(folder, "tokens")
    assert all(tokens[name].null_count() == tokens.height for name in ("entropy", "kl", "agree"))
    assert tokens["logp"].null_count() == 0
    line = "the engine openai tells of given tokens only, so kl, entropy and top-1 agreement are left out"
    assert said.lines.count(line) == 1
    assert any(line in one and "rows may depend on the server's batches" in one for one in verdict_lines(folder))


def test_the_folder_says_who_computed(asked: tuple[Path, Heard], good: FaultyServer) -> None:
    about = json.loads((asked[0] / "study.json").read_text())
    assert about["implementations"] == {"log-probabilities": "openai"}
    assert about["engine"]["base_url"] == good.url
    assert about["engine"]["promise"].startswith("none: rows may depend")
    assert about["engine"]["server"]["fingerprints"] == ["fp-7"]
    page = publish(asked[0], fresh=True, say=lambda line: None)
    assert "What it promises" in page.read_text()
    assert mless.verify(asked[0]).state == "whole"


def test_a_run_that_broke_off_goes_on(loaded: LoadedModel, tiny: Path, task: Path, tmp_path: Path) -> None:
    answer, asked_of, dead = server.echoing(loaded.model), list[Asked](), [True]

    def mortal(asked: Asked) -> Answer:
        asked_of.append(asked)
        return Answer(503, b"{}") if dead[0] and len(asked_of) > 150 else answer(asked)

    made = FaultyServer(mortal)
    try:
        given = served(made, tiny) | {"sets": ["likelihood.retries=0", "likelihood.concurrency=2"]}
        with pytest.raises(EngineFault, match=r"503.* log-probabilities asked for have come and are kept"):
            run(task, tmp_path / "r", **given)
        dead[0], before = False, len(asked_of)
        # How they are fetched is no part of the study.
        run(task, tmp_path / "r", **served(made, tiny))
        assert len(asked_of) - before < 170, "what was stored is not asked for again"
    finally:
        made.stop()
    assert table(tmp_path / "r", "scores").height > 0


@pytest.mark.parametrize("spoil", [server.ignore_echo, server.give_no_logprobs, server.make_other_tokens])
def test_a_server_that_cannot_do_it_is_refused_and_leaves_no_folder(
    loaded: LoadedModel, tiny: Path, task: Path, tmp_path: Path, spoil: server.Spoil
) -> None:
    made = FaultyServer(server.echoing(loaded.model, spoil=spoil))
    try:
        with pytest.raises(EngineFault, match=rf"{made.url} .*vLLM's does.*--engine hf"):
            run(task, tmp_path / "r", **served(made, tiny))
    finally:
        made.stop()
    assert not (tmp_path / "r").exists()


def test_what_the_engine_cannot_do_is_refused_by_name(
    good: FaultyServer, tiny: Path, task: Path, tmp_path: Path
) -> None:
    for name in ("position-only", "masked-filler"):
        with pytest.raises(
            BadStudy, match=f"condition '{name}' shifts.*openai cannot.*--conditions none,mless,.*--engine hf"
        ):
            run(task, tmp_path / "r", **served(good, tiny), conditions=["none", "mless", name])
    with pytest.raises(BadStudy, match=r"condition 'arm'.*needs the weights; use --engine hf or vllm"):
        run(task, tmp_path / "r", **served(good, tiny), conditions=["none", "arm"])
    without = served(good, tiny)
    del without["tokenizer"]
    with pytest.raises(BadStudy, match=r"sent token ids: give the served model's tokenizer, --tokenizer DIR"):
        run(task, tmp_path / "r", **without)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "scripted"}, r"\[likelihood\]: engine 'scripted' gives no log-probabilities of given text; use --engine hf"),
        ({"engine": "llamacpp"}, r"no engine 'llamacpp'; there are: hf, vllm, openai, scripted"),
        ({"engine": "openai"}, r"needs a server: --base-url http://HOST:PORT/v1"),
        ({"likelihood.tensor_parallel": 2}, r"which the engine hf does not"),
        ({"engine": "vllm", "device_map": "auto"}, r"--set likelihood.tensor_parallel=N"),
    ],
)  # fmt: skip
def test_engines_that_do_not_fit_are_refused_when_the_study_is_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadStudy, match=message):
        load_study("likelihood", changes)


def test_the_options_of_an_engine_go_to_the_table_that_has_one() -> None:
    spec = load_study("likelihood", {"engine": "openai", "base_url": "http://localhost:1/v1"})
    assert spec.likelihood is not None
    assert (spec.likelihood.engine, spec.accuracy, spec.names_server) == ("openai", None, True)
    assert load_study("accuracy", {"engine": "vllm"}).accuracy.engine == "vllm"
    with pytest.raises(BadStudy, match="draws no answers"):
        load_study("quick", {"engine": "vllm"})


def test_a_key_is_not_sent_where_only_a_study_file_points(
    good: FaultyServer, tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLESS_API_KEY", "sk-very-secret-0123456789")
    file = tmp_path / "mine.toml"
    file.write_text(
        f'model = "tiny"\ntokenizer = "{tiny}"\ndata = "{task}"\nconditions = ["none", "mless"]\n'
        f'[likelihood]\nengine = "openai"\nbase_url = "{good.url}"\n'
    )
    before = len(good.asked)
    with pytest.raises(EngineFault, match=r"only the study file names the server.*--base-url"):
        run_study(load_study(str(file)), tmp_path / "r", Heard())
    assert len(good.asked) == before


def test_numbers_of_two_engines_do_not_share_a_folder(
    asked: tuple[Path, Heard], good: FaultyServer, tiny: Path, task: Path
) -> None:
    with pytest.raises(mless.MlessError, match="it differs in likelihood"):
        run(task, asked[0], **served(good, tiny, base_url=good.url.replace("127.0.0.1", "localhost")))


def test_an_engine_that_only_says_it_scores_is_refused(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mless.engines.kinds import ENGINES
    from mless.engines.scripted import ScriptedEngine

    kind = EngineKind(lambda given: ScriptedEngine({"*": "a"}), scores=True)
    monkeypatch.setitem(ENGINES._added, "mute", kind)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(
        BadPlugin, match=r"'mute' is registered with scores = True, but ScriptedEngine has no method score"
    ):
        run(task, tmp_path / "r", model="any", tokenizer=str(tiny), engine="mute")
