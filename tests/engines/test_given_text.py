"""Log-probabilities of given text from engines: a server that computes them, and servers that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_proxy import FAULTS, Answer, Asked, loopback_fixture, seeded  # noqa: F401
from served import Loopback, no_thread_is_left, quick  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM

from engines import scoring_server as server
from mless.engines import ENGINES, Request, ScoreRequest, ScoringEngine
from mless.engines.echoed import unlike
from mless.engines.openai import OpenAIEngine
from mless.errors import EngineFault
from mless.values import ArmSettings
from spelling import byte_level
from tiny import BASE


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **BASE)).eval()


def asked(count: int, **more: Any) -> list[ScoreRequest]:
    return [
        ScoreRequest(
            Request("mless", str(n), n % 3, token_ids=tuple((7 * n + k) % 97 for k in range(5 + n)), **more),
            tuple((3 * n + k) % 89 for k in range(1 + n % 4)),
        )
        for n in range(count)
    ]


def test_a_server_s_log_probabilities_are_the_model_s_own_whatever_goes_wrong_between(model: Any, loopback: Loopback):
    faults = tuple(fault for fault in FAULTS if fault != "slow")
    proxy = loopback(server.echoing(model), seeded(674, faults))
    requests = asked(16)
    with OpenAIEngine(proxy.url, "tiny", concurrency=3) as engine:
        assert isinstance(engine, ScoringEngine)
        found = {one.key: one.logp for one in engine.score(requests)}
        assert engine.about()["server"]["fingerprints"] == ["fp-7"]
    assert len(proxy.injected) > 4, proxy.injected
    assert proxy.peak <= 3
    assert found.keys() == {request.key for request in requests}
    for request in requests:
        whole = server.log_probabilities(model, list(request.whole))
        assert found[request.key] == pytest.approx(whole[len(request.prompt.token_ids) - 1 :], abs=1e-6)
        assert len(found[request.key]) == len(request.token_ids)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (server.ignore_echo, r"ignores echo: it gives 1 log-probability, of what it drew, and none of the 6 tokens"),
        (server.give_no_logprobs, r"gives no log-probabilities \(no logprobs in its answer\)"),
        (server.make_other_tokens, r"counts 8 tokens where 6 tokens were sent.*makes other tokens of them"),
        (server.add_a_bos, r"counts 7 tokens where 6 tokens were sent"),
        (server.give_nulls, r"gives null as the log-probability of 1 of the 1 tokens asked about"),
        (server.give_zero_probability, r"gives -9999.0 as a log-probability; expected a finite number"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_server_that_does_not_score_is_refused_by_name(
    model: Any, loopback: Loopback, spoil: server.Spoil, message: str
):
    proxy = loopback(server.echoing(model, spoil=spoil))
    with pytest.raises(EngineFault, match=rf"{proxy.url} {message}.*vLLM's does.*--engine hf or vllm.*0 of the 1 log"):
        list(OpenAIEngine(proxy.url, "tiny").score(asked(1)))
    assert sum(one.method == "POST" for one in proxy.asked) == 1, "another try would not help"


def test_more_log_probabilities_than_tokens_are_refused_where_the_server_counts_nothing(model: Any, loopback: Loopback):
    def spoil(whole: dict[str, Any]) -> None:
        server.make_other_tokens(whole)
        del whole["usage"]

    with pytest.raises(EngineFault, match=r"gives 9 log-probabilities where 6 tokens were sent and at most 1 is drawn"):
        list(OpenAIEngine(loopback(server.echoing(model, spoil=spoil)).url, "tiny").score(asked(1)))


@pytest.mark.parametrize(
    ("status", "says", "message"),
    [
        (404, "Not Found", r"404: Not Found\); it may have /chat/completions only: .*vLLM's does.*ends in /v1"),
        (400, "Only no echo is supported", r"400: Only no echo is supported\); log-probabilities of given text need"),
        (500, "Only no echo is supported", r"answers 500: Only no echo is supported; log-probabilities of given text need"),
        (400, "prompt must be a string", r"400: prompt must be a string\); .*takes token ids"),
        (400, "maximum context length is 8", r"may exceed its context: leave such items out"),
        (404, "The model `x` does not exist", r"it serves: tiny; choose with --model"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do(loopback: Loopback, status: int, says: str, message: str):
    def answer(asked: Asked) -> Answer:
        if asked.method == "GET":
            return Answer(body=json.dumps({"data": [{"id": "tiny"}]}).encode())
        return Answer(status, json.dumps({"error": {"message": says}}).encode())

    with pytest.raises(EngineFault, match=message):
        list(OpenAIEngine(loopback(answer).url, "x", retries=0).score(asked(1)))


def test_another_model_s_tokenizer_is_noticed(loopback: Loopback, model: Any, tmp_path: Path):
    class Shifted:
        """The same pieces under other numbers."""

        def decode(self, ids: list[int]) -> str:
            return own.decode([(one + 1) % 97 for one in ids])

    own = byte_level()
    letters = [ScoreRequest(Request("none", "1", token_ids=(40, 41)), (50, 51, 52))]
    proxy = loopback(server.echoing(model, tokenizer=own))
    assert len(list(OpenAIEngine(proxy.url, "tiny", tokenizer=own).score(letters))) == 1
    proxy = loopback(server.echoing(model, tokenizer=Shifted()))
    with pytest.raises(
        EngineFault, match=r"item '1' as '.', which the tokenizer reads as '.': it is not the served model"
    ):
        list(OpenAIEngine(proxy.url, "tiny", tokenizer=own).score(letters))


def test_tokens_may_be_written_in_any_of_the_usual_ways():
    own = byte_level()
    ids = own("a b", add_special_tokens=False).input_ids
    for texts in ([own.decode([one]) for one in ids], own.convert_ids_to_tokens(ids), [f"token_id:{n}" for n in ids]):
        assert unlike(texts, ids, own) is None
    assert unlike([f"token_id:{n + 1}" for n in ids], ids, own) is not None
    assert unlike(["\ufffd"] * len(ids), ids, own) is None, "part of a letter says nothing"


def test_what_a_server_cannot_be_sent_is_refused_before_anything_is_asked(loopback: Loopback, model: Any):
    proxy = loopback(server.echoing(model))
    engine = OpenAIEngine(proxy.url, "tiny")
    plain = Request("none", "1", token_ids=(1, 2))
    refused = {
        r"shifted positions or hidden tokens.*'hf'": ScoreRequest(Request("x", "1", token_ids=(1, 2), position_ids=(0, 5)), (3,)),
        r"the text has no token ids": ScoreRequest(plain, ()),
        r"the prompt has no token ids.*--tokenizer": ScoreRequest(Request("x", "1", messages=(("user", "a"),)), (3,)),
    }  # fmt: skip
    for message, request in refused.items():
        with pytest.raises(EngineFault, match=message):
            engine.score([request])
    with pytest.raises(Exception, match="a server's weights are out of reach"):
        engine.score([ScoreRequest(Request("arm", "1", token_ids=(1,), arm=ArmSettings(c=0.13)), (3,))])
    with pytest.raises(Exception, match="live must be at least 1"):
        engine.score([ScoreRequest(plain, (3,))], live=0)
    assert not proxy.asked


def test_which_engines_score():
    assert {name: ENGINES.get(name).scores for name in ("hf", "vllm", "openai", "scripted")} == {
        "hf": True,
        "vllm": True,
        "openai": True,
        "scripted": False,
    }
