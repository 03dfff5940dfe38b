"""The table of engines: what each says of itself, how it is opened, and one from outside the package."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_answerers import answering

import mless
from mless.engines import ENGINES, Decoding, EngineKind, Opening, Request
from mless.errors import BadPlugin, BadStudy
from mless.study.spec import AccuracyTable
from mless.values import ArmSettings, Condition
from outside import Outside

ECHO = """
import mless
from mless.engines import EngineKind, Reply

class Echo:
    def __init__(self, given):
        self.given = given
    def generate(self, requests, decoding, *, live=None):
        for request in requests:
            text = request.messages[-1][1]
            yield Reply(request.condition, request.item, request.sample, text, len(text.split()), "stop")
    def about(self):
        return {"engine": "echo", "promise": "exact"}
    def close(self): ...
    def __enter__(self):
        return self
    def __exit__(self, *fault): ...

mless.register("engines", "echo", EngineKind(Echo, takes_text=True, requires={"base_url": "echo needs a hill"}))
"""


def opening(**given: Any) -> Opening:
    settings = given.pop("settings", AccuracyTable(max_new_tokens=5))
    return Opening(model="m", settings=settings, longest=7, most=3, **given)


def test_what_each_engine_says_of_itself() -> None:
    said = {name: ENGINES.get(name) for name in ENGINES}
    assert list(said)[:4] == ["hf", "vllm", "openai", "scripted"]
    assert [name for name, one in said.items() if one.needs_weights] == ["hf", "vllm"]
    assert [name for name, one in said.items() if one.needs_loaded] == ["hf"]
    assert [name for name, one in said.items() if one.takes_arm] == ["hf", "vllm", "scripted"]
    assert [name for name, one in said.items() if one.takes_changes] == ["hf"]
    assert [name for name, one in said.items() if one.takes_tensor_parallel] == ["vllm"]
    assert [name for name, one in said.items() if one.takes_text] == ["openai", "scripted"]
    assert [name for name, one in said.items() if "tensor" not in one.arm_scopes] == ["hf", "vllm"]


def test_what_an_engine_lacks_is_said() -> None:
    nothing = AccuracyTable()
    assert ENGINES.get("hf").missing(nothing) is None
    assert ENGINES.get("openai").missing(nothing) == (
        "the openai engine needs a server: --base-url http://HOST:PORT/v1"
    )
    assert "--set accuracy.script=FILE.json" in (ENGINES.get("scripted").missing(nothing) or "")
    assert ENGINES.get("openai").missing(AccuracyTable(base_url="http://localhost:1/v1")) is None


def test_the_scripted_engine_opens(tmp_path: Path) -> None:
    (tmp_path / "said.json").write_text(json.dumps({"*": "four"}))
    settings = AccuracyTable(engine="scripted", script=str(tmp_path / "said.json"))
    with ENGINES.get("scripted").open(opening(settings=settings)) as engine:
        assert [reply.text for reply in engine.generate([Request("none", "1")], Decoding())] == ["four"]


def test_the_server_engine_opens() -> None:
    settings = AccuracyTable(engine="openai", base_url="http://localhost:1/v1", concurrency=3)
    engine: Any = ENGINES.get("openai").open(opening(settings=settings))
    assert (engine.base_url, engine.model, engine.concurrency) == ("http://localhost:1/v1", "m", 3)
    engine.close()


def test_the_hf_engine_opens_with_room_for_prompt_and_answer() -> None:
    with ENGINES.get("hf").open(opening(loaded=answering("llama"), slots=8)) as engine:
        assert engine.about()["slots"] == 8
        assert engine.length >= 12  # pyright: ignore[reportAttributeAccessIssue]
        (reply,) = engine.generate([Request("none", "1", token_ids=(3, 4, 5))], Decoding(2))
        assert reply.n_tokens <= 2


def test_the_vllm_engine_is_given_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mless.engines import vllm

    seen: dict[str, Any] = {}

    class Fake(vllm.VllmEngine):
        def __init__(self, folder: Any, **options: Any) -> None:
            seen.update(options, folder=folder)

    monkeypatch.setattr(vllm, "VllmEngine", Fake)
    monkeypatch.setattr(vllm, "whole_folder", lambda source: source)
    armed = Condition("arm", "none", arm=ArmSettings(c=0.1))
    given = opening(conditions=(Condition("none", "none"), armed), seed=4, dtype="float32")
    # Built past the check of its fields, as there is no model to describe.
    object.__setattr__(given, "described", SimpleNamespace(source=tmp_path))
    vllm.opened(given)
    assert seen == {
        "folder": tmp_path, "tokenizer": None, "dtype": "float32", "max_model_len": 12, "seed": 4, "batch_invariant": False, "arm": True,
        "prefix_caching": True, "tensor_parallel": 1, "say": given.say,
    }  # fmt: skip
    object.__setattr__(given, "settings", AccuracyTable(engine="vllm", tensor_parallel=4))
    vllm.opened(given)
    assert seen["tensor_parallel"] == 4
    object.__setattr__(given, "scoring", True)
    vllm.opened(given)
    assert seen["prefix_caching"] is False, "a cached prompt would have no log-probabilities"


@pytest.mark.parametrize("engine", ["hf", "scripted"])
def test_tensor_parallel_is_refused_where_an_engine_divides_nothing(engine: str) -> None:
    with pytest.raises(BadStudy, match=rf"the engine {engine} does not; use --engine vllm.*--device-map auto"):
        mless.load_study(
            "accuracy", {"accuracy.engine": engine, "accuracy.script": "s.json", "accuracy.tensor_parallel": 2}
        )


def test_an_engine_from_outside(outside: Outside) -> None:
    outside.write("echoing", ECHO)
    importlib.import_module("echoing")
    echo = ENGINES.get("echo")
    assert echo.missing(AccuracyTable()) == "echo needs a hill"
    with echo.open(opening()) as engine:
        (reply,) = engine.generate([Request("none", "1", messages=(("user", "hello hill"),))], Decoding())
    assert (reply.text, reply.n_tokens) == ("hello hill", 2)
    code = "from mless.engines import ENGINES; print(ENGINES.get('echo').takes_text, ENGINES.names())"
    assert outside.in_another_process(code) == "True ['hf', 'vllm', 'openai', 'scripted', 'echo']"


def test_an_engine_named_in_the_environment(outside: Outside) -> None:
    outside.write("echoing", ECHO)
    outside.name_plugins("echoing")
    assert ENGINES.get("echo").takes_text


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(
        BadStudy, match=r"no engine 'vlm' \(did you mean 'vllm'\?\); there are: hf, vllm, openai, scripted"
    ):
        ENGINES.get("vlm")
    with pytest.raises(BadPlugin, match=r"engine 'mine' must be an mless.engines.EngineKind, got "):
        mless.register("engines", "mine", Decoding)


def test_looking_up_an_engine_loads_no_model_library(outside: Outside) -> None:
    code = "import sys; from mless.engines import ENGINES; [ENGINES.get(n) for n in ENGINES]; print('torch' in sys.modules)"
    assert outside.in_another_process(code) == "False"


def test_a_declaration_can_be_changed_by_copy() -> None:
    slower = dataclasses.replace(ENGINES.get("hf"), takes_arm=False)
    assert isinstance(slower, EngineKind)
    assert not slower.takes_arm
