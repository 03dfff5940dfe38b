"""Answers from OpenAI-compatible servers: what is sent, what is read, and a real server with faults put before it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from faulty_proxy import FAULTS, HTML, Answer, Asked, FaultyServer, completion, forward, loopback_fixture, seeded  # noqa: F401
from served import KEY, Loopback, ask, echo, fault_of, no_thread_is_left, one, questions, quick  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from mless.engines.base import Changes, Decoding, Request
from mless.engines.openai import UNKNOWN_TOKENS, OpenAIEngine
from mless.errors import BadStudy, EngineFault
from mless.models import locate
from tiny import BASE, prompt_of

# ---- a real server ----


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """``transformers serve`` with a tiny model that has the embedded one's tokenizer: its address and the model's name there."""
    from transformers.cli.serve import Serve

    folder = str(tmp_path_factory.mktemp("served"))
    tokenizer = AutoTokenizer.from_pretrained(locate("smollm2").folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    # Large weights, so that the answer depends on the question.
    settings = BASE | {"vocab_size": len(tokenizer), "initializer_range": 0.3}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings, **ends)).save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    verbosity = transformers_logging.get_verbosity()
    server = Serve(folder, device="cpu", host="127.0.0.1", port=port, non_blocking=True)
    try:
        root, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{root}/health", timeout=5):
                break
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)
        yield root, folder
    finally:
        server.kill_server()
        transformers_logging.set_verbosity(verbosity)


def test_real_server_with_faults_answers_every_item_once(real_server: tuple[str, str], loopback: Loopback):
    root, model = real_server
    requests, decoding = questions(8), Decoding(max_new_tokens=4)
    undisturbed = ask(OpenAIEngine(f"{root}/v1", model), requests, decoding)
    assert sorted(reply.item for reply in undisturbed) == sorted(request.item for request in requests)
    assert len({reply.text for reply in undisturbed}) > 4, "the model answers each question by itself"

    # A seed with which every kind of fault occurs: the plan depends on the prompts alone, so it is the same everywhere. The slow one is
    # left to test_wire.py: here its deadline would have to be longer than a good answer takes on a busy machine.
    faults = tuple(fault for fault in FAULTS if fault != "slow")
    proxy = loopback(forward(root), seeded(502, faults))
    told: list[str] = []
    with OpenAIEngine(proxy.url, model, concurrency=3, say=told.append) as engine:
        replies = ask(engine, requests, decoding)
        assert engine.about()["base_url"] == proxy.url
    assert set(proxy.injected) == set(faults), proxy.injected
    assert [reply.key for reply in sorted(replies, key=lambda r: int(r.item))] == [request.key for request in requests]
    assert {reply.key: reply for reply in replies} == {reply.key: reply for reply in undisturbed}
    assert any("each of the 8 was answered once" in text for text in told)
    assert proxy.peak <= 3


def test_real_server_stops_at_stop_texts_which_are_no_part_of_the_answer(real_server: tuple[str, str]):
    root, model = real_server
    engine, request = OpenAIEngine(f"{root}/v1", model), questions(1)
    whole = ask(engine, request, Decoding(max_new_tokens=12))[0]
    assert whole.finish in ("stop", "length")
    assert 0 < whole.n_tokens <= 12
    stop = whole.text.split()[2]
    cut = ask(engine, request, Decoding(max_new_tokens=12, stop=(stop,)))[0]
    assert (cut.text, cut.finish) == (whole.text[: whole.text.index(stop)], "stop")
    assert cut.n_tokens <= whole.n_tokens
    short = ask(engine, request, Decoding(max_new_tokens=2))[0]
    assert (short.finish, short.n_tokens) == ("length", 2)


def test_real_server_that_refuses_says_why(real_server: tuple[str, str]):
    root, model = real_server
    with pytest.raises(
        EngineFault, match=r"refuses item '1' of 'none' \(400: prompt must be a string.*without --tokenizer"
    ):
        ask(OpenAIEngine(f"{root}/v1", model), [Request("none", "1", token_ids=(1, 2, 3))])
    with pytest.raises(EngineFault, match=r"400: Server is pinned to .*--model"):
        ask(OpenAIEngine(f"{root}/v1", "another"), questions(1))
    with pytest.raises(EngineFault, match=r"422: Unexpected fields .*does not know top_k; leave it at 0"):
        ask(OpenAIEngine(f"{root}/v1", model), questions(1), Decoding(top_k=5))
    with pytest.raises(EngineFault, match=r"404: Not Found.*ends in /v1"):
        ask(OpenAIEngine(root, model), questions(1))


# ---- token ids, answered by a real model ----


def test_token_ids_go_out_as_ids_and_come_back_as_the_model_s_own(loopback: Loopback):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **BASE)).eval()
    lock = threading.Lock()

    def drawn(ids: list[int], count: int) -> str:
        with lock, torch.no_grad():
            inputs = torch.tensor([ids])
            mask = torch.ones_like(inputs)
            out = model.generate(inputs, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return " ".join(map(str, out[0, len(ids) :].tolist()))

    def answer(asked: Asked) -> Answer:
        assert asked.path == "/v1/completions"
        return completion(drawn(asked.json["prompt"], asked.json["max_tokens"]))

    requests = [Request("mless", str(n), token_ids=tuple((7 * n + k) % 97 for k in range(5 + n))) for n in range(16)]
    faults = tuple(fault for fault in FAULTS if fault != "slow")
    server = loopback(answer, seeded(674, faults))
    with OpenAIEngine(server.url, "tiny", concurrency=3) as engine:
        replies = ask(engine, requests, Decoding(max_new_tokens=6))
    assert set(server.injected) == set(faults), server.injected
    assert {reply.item: reply.text for reply in replies} == {r.item: drawn(list(r.token_ids), 6) for r in requests}
    assert len(replies) == len(requests)


def test_html_before_any_answer_is_a_wrong_address_and_told_soon(loopback: Loopback):
    server = loopback(lambda asked: Answer(200, HTML, {"Content-Type": "text/html"}))
    with pytest.raises(EngineFault, match=r"answers with an HTML page \(Gateway resting\); base_url should be .*/v1"):
        ask(OpenAIEngine(server.url, "m", retries=6), questions(1))
    assert len(server.posts) == 2


def test_html_once_the_server_has_answered_is_a_passing_fault(loopback: Loopback):
    server = loopback(echo, lambda asked: ["html"] * 4 if "2 plus" in asked.prompt else [])
    with OpenAIEngine(server.url, "m", concurrency=1) as engine:
        assert len(ask(engine, questions(3))) == 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{}", "answers without choices"),
        (b'{"choices": []}', "answers without choices"),
        (b'{"choices": ["x"]}', "answers without choices"),
        (b'{"choices": [{"index": 0}]}', "answers without choices"),
        (b'{"error": {"message": "no GPU left"}}', r"answers without choices \(no GPU left\)"),
        (b"[1, 2]", "something that is no JSON object"),
        (b"Ollama is running", r"something that is no JSON object \(Ollama is running\)"),
        (b"", "something that is no JSON object"),
    ],
)
def test_answers_that_are_none_are_named(loopback: Loopback, body: bytes, says: str):
    assert re.search(rf"{says}.*ends in /v1", fault_of(loopback, Answer(body=body)))


# ---- refusals ----


@pytest.mark.parametrize(
    ("status", "message", "ids", "says"),
    [
        (404, "The model `m` does not exist.", False, "it serves: big, small; choose with --model"),
        (404, "The model `Qwen-Instruct` does not exist.", True, "it serves: big, small; choose with --model"),
        (404, "File Not Found", False, "ends in /v1"),
        (405, "Method Not Allowed", False, "ends in /v1"),
        (400, "This model's maximum context length is 2048 tokens", True, "lower max_new_tokens"),
        (400, "Input should be a valid string", True, "run without --tokenizer"),
        (400, "bad luck", False, "400: bad luck"),
        (501, "not here", False, "501: not here"),
    ],
)
def test_refusals_say_the_likely_cause(loopback: Loopback, status: int, message: str, ids: bool, says: str):
    def answer(asked: Asked) -> Answer:
        if asked.path == "/v1/models":
            return Answer(body=b'{"data": [{"id": "small"}, {"id": "big"}, {"id": 3}, 4]}')
        return Answer(status, json.dumps({"error": {"message": message}}).encode())

    server = loopback(answer)
    request = Request("none", "1", token_ids=(1, 2)) if ids else questions(1)[0]
    with pytest.raises(EngineFault) as caught:
        ask(OpenAIEngine(server.url, "m"), [request])
    assert says in str(caught.value)
    assert message in str(caught.value)
    assert len(server.posts) == 1, "a refusal is not tried again"


@pytest.mark.parametrize(
    "changes",
    [{"position_ids": (0, 5)}, {"hidden": (0, 1)}],
)
def test_what_no_server_can_do_is_refused(changes: dict[str, Any]):
    engine = OpenAIEngine("http://localhost:1/v1", "m")
    with pytest.raises(EngineFault, match=r"item '1' of 'shift' asks for shifted positions or hidden tokens.*'hf'"):
        engine.generate([Request("shift", "1", token_ids=(1, 2), **changes)], Decoding())


def test_cuts_and_patches_are_refused():
    prompt = prompt_of(("question", 2))
    request = Request("cut", "1", token_ids=prompt.token_ids, changes=Changes(prompt))
    with pytest.raises(EngineFault, match=r"item '1' of 'cut' has cuts or patches, which no server offers.*'hf'"):
        OpenAIEngine("http://localhost:1/v1", "m").generate([request], Decoding())


def test_a_request_holds_ids_or_messages():
    engine = OpenAIEngine("http://localhost:1/v1", "m")
    with pytest.raises(EngineFault, match="got neither"):
        engine.generate([Request("none", "1")], Decoding())
    with pytest.raises(EngineFault, match="got both"):
        engine.generate([Request("none", "1", token_ids=(1,), messages=(("user", "x"),))], Decoding())


def test_settings_out_of_range_are_refused():
    for settings in ({"concurrency": 0}, {"timeout": 0.0}, {"timeout": float("nan")}, {"retries": -1}):
        with pytest.raises(BadStudy, match="must be"):
            OpenAIEngine("http://localhost:1/v1", "m", **settings)
    with pytest.raises(BadStudy, match="live must be at least 1"):
        OpenAIEngine("http://localhost:1/v1", "m").generate(questions(1), Decoding(), live=0)


def test_key_is_no_part_of_what_is_recorded(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    server = loopback(
        lambda asked: completion("x", system_fingerprint=f"fp-{KEY}") if asked.method == "POST" else Answer(404, b"")
    )
    with OpenAIEngine(server.url, "m") as engine:
        replies = ask(engine, questions(1))
        about = engine.about()
    assert about["server"] == {"fingerprints": ["fp-[key]"]}
    assert KEY not in repr(replies) + repr(about)


def test_server_that_repeats_what_it_is_sent_does_not_get_the_key_into_an_answer(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
):
    """As echo servers and careless gateways do: all headers in the answer's text."""
    server = loopback(lambda asked: completion(f"You sent {json.dumps(asked.headers)}. Stop here.", usage=None))
    told: list[str] = []
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    with OpenAIEngine(server.url, "m", say=told.append) as engine:
        # A stop text inside of the key must not leave half of it.
        replies = ask(engine, questions(2), Decoding(stop=("secret", "Stop")))
    assert all("Bearer [key]" in reply.text and reply.text.endswith("}. ") for reply in replies)
    assert "sk-very" not in repr(replies)
    assert sum("repeats our key in its answers; it is stored as [key]" in text for text in told) == 1


def test_placeholder_for_a_key_does_not_change_answers(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    assert one(loopback, completion("The set is EMPTY."))[0].text == "The set is EMPTY."


def test_key_missing_or_refused_names_the_variable(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    refusal = Answer(401, b'{"error": {"message": "who are you?"}}')
    assert "demands a key (401: who are you?), and none is set" in fault_of(loopback, refusal)
    assert "export MLESS_API_KEY=" in fault_of(loopback, refusal)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert "refuses the key in $OPENAI_API_KEY (401: who are you?)" in fault_of(loopback, refusal)
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    assert "refuses the key in $MLESS_API_KEY (403" in fault_of(loopback, Answer(403, b"{}"))


# ---- what is sent, what is read ----


def test_what_is_sent(loopback: Loopback):
    server = loopback(lambda asked: completion("x"))
    engine = OpenAIEngine(server.url, "some-model")
    decoding = Decoding(max_new_tokens=9, temperature=0.5, top_p=0.8, top_k=4, stop=("\n\n",))
    ask(engine, [Request("none", "1", seed=77, messages=(("system", "Be brief."), ("user", "2+2?")))], decoding)
    ask(engine, [Request("none", "1", seed=78, token_ids=(5, 6))])
    first, second = server.posts
    assert first.path == "/v1/chat/completions"
    assert first.json == {
        "model": "some-model",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 4,
        "seed": 77,
        "stop": ["\n\n"],
    }
    assert second.path == "/v1/completions"
    assert second.json == {
        "model": "some-model",
        "prompt": [5, 6],
        "max_tokens": 16,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 78,
    }


@pytest.mark.parametrize(
    ("reason", "finish"), [("stop", "stop"), ("length", "length"), (None, "stop"), ("content_filter", "stop")]
)
def test_finish(loopback: Loopback, reason: str | None, finish: str):
    choices = [{"message": {"content": "x"}, "finish_reason": reason}]
    reply, told = one(loopback, completion("", choices=choices))
    assert reply.finish == finish
    assert any("content_filter" in text for text in told) == (reason == "content_filter")


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ([{"message": {"content": ""}}], ""),
        ([{"message": {"content": None, "reasoning_content": "hm"}}], ""),
        ([{"message": {"content": "first"}}, {"message": {"content": "second"}}], "first"),
        (
            [
                {
                    "message": {
                        "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
                    }
                }
            ],
            "ab",
        ),
        ([{"text": " plain"}], " plain"),
        ([{"message": {"content": "half \ud83d pair"}}], "half � pair"),
    ],
)
def test_text(loopback: Loopback, choices: list[Any], text: str):
    server_says = completion("", choices=choices)
    reply, _ = one(loopback, server_says, retries=0)
    assert reply.text == text
    reply.text.encode()


def test_tokens_are_counted_by_the_server_then_by_the_tokenizer_then_not_at_all(loopback: Loopback):
    class Words:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * (len(text.split()) + add_special_tokens)

    too_many = [{"completion_tokens": count} for count in (2**31, 10**30, 1e300)]  # no column holds them
    assert one(loopback, completion("a b c", usage={"completion_tokens": 2**31 - 1}))[0].n_tokens == 2**31 - 1
    assert one(loopback, completion("a b c", usage={"completion_tokens": 7}), tokenizer=Words())[0].n_tokens == 7
    for usage in (
        None,
        {},
        {"completion_tokens": None},
        {"completion_tokens": -4},
        {"completion_tokens": True},
        "7",
        *too_many,
    ):
        answer = completion("a b c", usage=usage)
        assert one(loopback, answer, tokenizer=Words())[0].n_tokens == 3
        reply, told = one(loopback, answer)
        assert reply.n_tokens == UNKNOWN_TOKENS == -1
        assert sum("does not count its tokens" in text for text in told) == 1


def test_server_that_does_not_keep_to_max_tokens_is_told(loopback: Loopback):
    reply, told = one(loopback, completion("a b c d e f"), decoding=Decoding(max_new_tokens=3))
    assert (reply.text, reply.n_tokens) == ("a b c d e f", 6)
    assert any("gave 6 tokens where at most 3 were asked for" in text for text in told)


def test_stop_text_left_in_by_the_server_is_taken_out(loopback: Loopback):
    answer = completion("4. Question: more", choices=[{"text": "4. Question: more", "finish_reason": "length"}])
    reply, _ = one(loopback, answer, decoding=Decoding(stop=("more", " Question:")))
    assert (reply.text, reply.finish) == ("4.", "stop")


def test_warns_that_tokens_are_not_under_control_where_text_is_sent(loopback: Loopback):
    told: list[str] = []
    engine = OpenAIEngine(loopback(lambda asked: completion("x")).url, "m", say=told.append)
    ask(engine, [Request("none", "1", token_ids=(1,))])
    assert not told
    ask(engine, questions(2))
    ask(engine, questions(2))
    assert sum("the server decides how many tokens" in text for text in told) == 1


def test_about_says_what_the_server_says(loopback: Loopback):
    def answer(asked: Asked) -> Answer:
        if asked.path == "/v1/models":
            return Answer(body=json.dumps({"data": [{"id": f"m{n:02}"} for n in range(30)]}).encode())
        return Answer(body=b'{"version": "0.32.0"}') if asked.path == "/version" else completion("x")

    server = loopback(answer)
    about = OpenAIEngine(server.url, "m01").about()
    assert about == {
        "engine": "openai",
        "base_url": server.url,
        "model": "m01",
        "promise": "none: rows may depend on the server's batches",
        "server": {"models": [f"m{n:02}" for n in range(20)], "version": "0.32.0"},
    }


@pytest.mark.parametrize(
    "answer", [Answer(500, b""), Answer(200, HTML), Answer(200, b"[]"), Answer(200, b'{"data": 3, "version": 4}')]
)
def test_about_does_without_a_server_that_says_nothing(loopback: Loopback, answer: Answer):
    assert OpenAIEngine(loopback(lambda asked: answer).url, "m").about()["server"] == {}


def test_no_requests_no_replies():
    assert ask(OpenAIEngine("http://127.0.0.1:1/v1", "m"), []) == []


# ---- how many at once, and how it ends ----


@pytest.mark.parametrize(("concurrency", "live", "peak"), [(3, None, 3), (8, 2, 2), (2, 6, 2), (1, None, 1)])
def test_never_more_at_once_than_allowed(loopback: Loopback, concurrency: int, live: int | None, peak: int):
    server: FaultyServer

    def answer(asked: Asked) -> Answer:
        deadline = time.monotonic() + 20
        while server.peak < peak and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # one too many would have the time to come
        return echo(asked)

    server = loopback(answer)
    replies = ask(OpenAIEngine(server.url, "m", concurrency=concurrency), questions(14), live=live)
    assert len(replies) == 14
    assert server.peak == peak


def test_replies_come_as_they_finish(loopback: Loopback):
    others = threading.Semaphore(0)

    def answer(asked: Asked) -> Answer:
        if "1 plus" in asked.prompt:
            assert others.acquire(timeout=60)
            assert others.acquire(timeout=60)
            time.sleep(1.0)  # their replies are on their way
        else:
            others.release()
        return echo(asked)

    engine = OpenAIEngine(loopback(answer).url, "m", concurrency=2)
    assert [reply.item for reply in engine.generate(questions(3), Decoding())] == ["2", "3", "1"]


def test_a_fault_of_ours_is_not_swallowed_in_a_thread(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a slip in the program")

    engine = OpenAIEngine(loopback(echo).url, "m")
    monkeypatch.setattr(engine, "_read", broken)
    with pytest.raises(ZeroDivisionError, match="a slip"):
        ask(engine, questions(3))
