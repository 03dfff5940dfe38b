"""Answers from OpenAI-compatible servers: a real one with faults put before it, and each fault by itself."""

from __future__ import annotations

import contextlib
import email.utils
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_proxy import FAULTS, HTML, Answer, Asked, FaultyServer, completion, forward, loopback_fixture, seeded  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM

import mless.engines.openai as subject
from mless.engines.base import Decoding, Reply, Request
from mless.engines.openai import UNKNOWN_TOKENS, OpenAIEngine
from mless.errors import BadStudy, EngineFault
from mless.models import locate
from tiny import BASE

Loopback = Callable[..., FaultyServer]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_FIRST_WAIT", 0.01)
    for name in ("MLESS_API_KEY", "OPENAI_API_KEY", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 60
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("mless-openai")]:
        assert time.monotonic() < deadline, f"threads left: {left}"
        time.sleep(0.02)


def questions(count: int) -> list[Request]:
    return [
        Request("none", str(n), seed=n, messages=(("user", f"What is {n} plus {n + 3}?"),)) for n in range(1, count + 1)
    ]


def echo(asked: Asked) -> Answer:
    return completion(f"you asked {asked.json['messages'][-1]['content']}")


def ask(engine: OpenAIEngine, requests: list[Request], decoding: Decoding | None = None, **more: Any) -> list[Reply]:
    return list(engine.generate(requests, decoding or Decoding(max_new_tokens=16), **more))


def one(loopback: Loopback, answer: Answer, **settings: Any) -> tuple[Reply, list[str]]:
    """The reply to one question from a server that always gives `answer`, and what the user was told."""
    told: list[str] = []
    decoding = settings.pop("decoding", Decoding(max_new_tokens=16))
    with OpenAIEngine(loopback(lambda asked: answer).url, "m", say=told.append, **settings) as engine:
        (reply,) = ask(engine, questions(1), decoding)
    return reply, told


def fault_of(loopback: Loopback, answer: Answer, request: Request | None = None, **settings: Any) -> str:
    engine = OpenAIEngine(loopback(lambda asked: answer).url, "m", **{"retries": 2, **settings})
    with pytest.raises(EngineFault) as caught:
        ask(engine, [request or questions(1)[0]])
    return str(caught.value)


# ---- a real server ----


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """``transformers serve`` with the embedded model: its address and the model's name there."""
    folder = str(locate("smollm2").folder)
    home = tmp_path_factory.mktemp("hf")
    (home / "hub").mkdir()  # /v1/models lists what lies there, and fails where there is no such folder
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", folder]
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    log = home / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        root, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{root}/health", timeout=5):
                break
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        yield root, folder
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def test_real_server_with_faults_answers_every_item_once(real_server: tuple[str, str], loopback: Loopback):
    root, model = real_server
    requests, decoding = questions(12), Decoding(max_new_tokens=6)
    began = time.monotonic()
    undisturbed = ask(OpenAIEngine(f"{root}/v1", model), requests, decoding)
    # On a busy machine a good answer takes long too; it must not be given up for that.
    patience = max(5.0, 2 * (time.monotonic() - began))
    assert sorted(reply.item for reply in undisturbed) == sorted(request.item for request in requests)
    assert len({reply.text for reply in undisturbed}) > 6, "the model answers each question by itself"

    # A seed with which every kind of fault occurs, the slow one once: the plan depends on the prompts alone, so it is the same everywhere.
    proxy = loopback(forward(root), seeded(1708), slowness=1.25 * patience)
    told: list[str] = []
    with OpenAIEngine(proxy.url, model, concurrency=3, timeout=patience, say=told.append) as engine:
        replies = ask(engine, requests, decoding)
        assert engine.about()["base_url"] == proxy.url
    assert set(proxy.injected) == set(FAULTS), proxy.injected
    assert [reply.key for reply in sorted(replies, key=lambda r: int(r.item))] == [request.key for request in requests]
    assert {reply.key: reply for reply in replies} == {reply.key: reply for reply in undisturbed}
    assert any("each of the 12 was answered once" in text for text in told)
    assert proxy.peak <= 3 + proxy.injected["slow"], "a request given up may still keep the server busy"


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


# ---- faults, each by itself ----


@pytest.mark.parametrize("fault", FAULTS)
def test_passing_fault_is_tried_again(loopback: Loopback, fault: str):
    server = loopback(echo, lambda asked: [fault], slowness=4.0)
    told: list[str] = []
    with OpenAIEngine(server.url, "m", timeout=1.5 if fault == "slow" else 60.0, say=told.append) as engine:
        replies = ask(engine, questions(4))
    assert sorted(reply.item for reply in replies) == ["1", "2", "3", "4"]
    assert all(reply.text.startswith("you asked What is") for reply in replies)
    assert server.injected[fault] == 4
    assert sum("trying again" in text for text in told) == 1, "told once, not for every request"
    assert any("4 requests had to be sent again" in text for text in told)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("429", "answers 429 and asks to wait 0 s: slow down"),
        ("500", "answers 500: Internal Server Error"),
        ("cut", "cut the connection in mid answer"),
        ("hang up", "cannot be reached or hangs up .*is the server running"),
        ("reset", "cannot be reached or hangs up .*is the server running"),
        ("slow", r"gave no whole answer within 0\.2 s"),
        ("broken json", "answers with broken JSON"),
    ],
)
def test_lasting_fault_ends_with_its_name(loopback: Loopback, fault: str, says: str):
    server = loopback(echo, lambda asked: [fault] * 9, slowness=3.0)
    with pytest.raises(EngineFault, match=rf"{says}.*tried 3 times.*0 of the 1 answers.*goes on from there"):
        ask(OpenAIEngine(server.url, "m", timeout=0.2 if fault == "slow" else 60.0, retries=2), questions(1))
    assert len(server.posts) == 3


def test_no_retries_means_one_try(loopback: Loopback):
    server = loopback(echo, lambda asked: ["500"] * 9)
    with pytest.raises(EngineFault, match="answers 500"):
        ask(OpenAIEngine(server.url, "m", retries=0), questions(1))
    assert len(server.posts) == 1


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


def test_a_drip_does_not_outlast_the_timeout(loopback: Loopback):
    body = completion("x").body
    server = loopback(lambda asked: Answer(body=body, fault="drip"))
    with pytest.raises(EngineFault, match=r"no whole answer within 0\.5 s"):
        ask(OpenAIEngine(server.url, "m", timeout=0.5, retries=0), questions(1))


def test_unreachable_server_is_told_after_the_retries():
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(EngineFault, match=r"Connection refused.*tried 4 times\. 0 of the 5 answers"):
            ask(OpenAIEngine(url, "m", retries=3), questions(5))


def test_server_that_dies_leaves_what_it_answered(loopback: Loopback):
    server, got = loopback(echo), list[Reply]()
    engine = OpenAIEngine(server.url, "m", concurrency=1, retries=1)

    def read() -> None:
        for reply in engine.generate(questions(200), Decoding()):
            got.append(reply)
            if len(got) == 3:
                server.stop()

    with pytest.raises(
        EngineFault, match=r"is the server running.* (\d+) of the 200 answers asked for have come"
    ) as caught:
        read()
    assert f". {len(got)} of the 200" in str(caught.value)
    assert len(got) >= 3


def test_answers_on_the_wire_come_home_before_a_fault_is_raised(loopback: Loopback):
    server: FaultyServer
    all_there, refused = threading.Event(), threading.Event()

    def answer(asked: Asked) -> Answer:
        if len(server.posts) >= 4:
            all_there.set()
        if "1 plus" in asked.prompt:
            all_there.wait(30)
            refused.set()
            return Answer(400, b'{"error": {"message": "I will not"}}')
        refused.wait(30)
        time.sleep(0.3)
        return echo(asked)

    server, got = loopback(answer), list[str]()
    replies = OpenAIEngine(server.url, "m", concurrency=4).generate(questions(20), Decoding())
    with pytest.raises(EngineFault, match=r"refuses item '1' .*I will not.*3 of the 20 answers"):
        got.extend(reply.item for reply in replies)
    assert len(server.posts) == 4, "nothing more was asked for"


# ---- waiting ----


def test_retry_after_holds_every_request_back(loopback: Loopback):
    times: list[float] = []

    def answer(asked: Asked) -> Answer:
        times.append(time.monotonic())
        return Answer(429, b"", {"Retry-After": "1"}) if len(times) == 1 else echo(asked)

    ask(OpenAIEngine(loopback(answer).url, "m", concurrency=1), questions(3))
    assert len(times) == 4
    assert times[1] - times[0] >= 1.0


def test_retry_after_of_one_request_holds_back_the_others(loopback: Loopback):
    at: dict[str, float] = {}
    refused = threading.Event()

    def answer(asked: Asked) -> Answer:
        number = asked.json["messages"][-1]["content"].split()[2]
        if number == "1" and "1" not in at:
            at["1"] = time.monotonic()
            refused.set()
            return Answer(429, b"", {"Retry-After": "2"})
        if number == "2":
            refused.wait(30)
            time.sleep(1.5)  # so that the refusal has arrived when this worker takes its next question
        at[f"{number} again" if number in at else number] = time.monotonic()
        return echo(asked)

    ask(OpenAIEngine(loopback(answer).url, "m", concurrency=2), questions(3))
    # Question 2 was under way and is not held back; it may take its time on a busy machine.
    assert "2 again" not in at
    assert at["3"] - at["1"] >= 2.0
    assert at["1 again"] - at["1"] >= 2.0


def test_retry_after_may_be_a_date():
    later = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 25 < (subject._retry_after(later) or 0) <= 30
    assert subject._retry_after("Sat, 01 Jan 2000 00:00:00 GMT") == 0
    assert subject._retry_after("soon") is None
    assert subject._retry_after("nan") is None
    assert subject._retry_after("-3") == 0
    assert subject._retry_after(None) is None


def test_a_wait_too_long_and_a_quota_used_up_are_told_at_once(loopback: Loopback):
    long = fault_of(loopback, Answer(429, b'{"error": "daily limit"}', {"Retry-After": "7200"}))
    assert "asks to come back in 120 minutes: daily limit" in long
    spent = b'{"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}'
    assert "quota is used up: You exceeded your quota" in fault_of(loopback, Answer(429, spent))


def test_waits_grow_and_have_a_bound(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subject, "_FIRST_WAIT", 1.0)
    monkeypatch.setattr(subject, "_LONGEST_WAIT", 5.0)
    waits: list[float] = []
    monkeypatch.setattr(subject._Run, "wait", lambda run, seconds: waits.append(seconds))
    server = loopback(echo, lambda asked: ["500"] * 5)
    ask(OpenAIEngine(server.url, "m"), questions(1))
    waits = [wait for wait in waits if wait]
    for wait, most in zip(waits, (1.0, 2.0, 4.0, 5.0, 5.0), strict=True):
        assert 0.5 * most <= wait <= most
    assert len({wait / most for wait, most in zip(waits, (1.0, 2.0, 4.0, 5.0, 5.0), strict=True)}) == 5, "with jitter"


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


def test_redirects_are_not_followed(loopback: Loopback):
    fault = fault_of(loopback, Answer(308, b"", {"Location": "https://elsewhere.invalid/v1"}))
    assert "sends on to https://elsewhere.invalid/v1 (308), which is not followed" in fault


def test_server_s_words_are_kept_short_and_tame(loopback: Loopback):
    fault = fault_of(loopback, Answer(400, ("\x1b[31mred\n\x00" + "x" * 5000).encode(), {"Content-Type": "text/plain"}))
    assert fault.isprintable()
    assert len(fault) < 1000


@pytest.mark.parametrize(
    "changes",
    [{"position_ids": (0, 5)}, {"hidden": (0, 1)}],
)
def test_what_no_server_can_do_is_refused(changes: dict[str, Any]):
    engine = OpenAIEngine("http://localhost:1/v1", "m")
    with pytest.raises(EngineFault, match=r"item '1' of 'shift' asks for shifted positions or hidden tokens.*'hf'"):
        engine.generate([Request("shift", "1", token_ids=(1, 2), **changes)], Decoding())


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


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:8000/v1", "must be an http:// or https:// address"),
        ("ftp://host/v1", "must be an http:// or https:// address"),
        ("http:///v1", "must be an http:// or https:// address"),
        ("", "must be an http:// or https:// address"),
        ("http://host:port/v1", "must be an http:// or https:// address"),
        ("http://ho st/v1", "must be an http:// or https:// address"),
        ("http://[::1/v1", "must be an http:// or https:// address"),
        ("http://host/v1/chat/completions", "must end before /chat/completions"),
        ("http://host/v1/completions/", "must end before /completions"),
    ],
)
def test_bad_addresses_are_refused(url: str, says: str):
    with pytest.raises(EngineFault, match=says):
        OpenAIEngine(url, "m")


def test_addresses_are_tidied():
    assert OpenAIEngine(" http://[::1]:8000/v1/ ", "m").base_url == "http://[::1]:8000/v1"
    assert OpenAIEngine("https://API.host/v1", "m").base_url == "https://api.host/v1"


# ---- keys ----


@pytest.mark.parametrize(
    "url", [f"https://user:{KEY}@host/v1", f"https://{KEY}@host/v1", f"https://host/v1?api-key={KEY}"]
)
def test_address_with_a_secret_is_refused_and_not_repeated(url: str):
    with pytest.raises(EngineFault, match="export MLESS_API_KEY") as caught:
        OpenAIEngine(url, "m")
    assert KEY not in everything(caught.value)


def everything(fault: BaseException | None) -> str:
    """All that an exception says, and those it hangs on."""
    texts: list[str] = []
    while fault is not None:
        texts += [str(fault), repr(fault), repr(vars(fault))]
        fault = fault.__cause__ or fault.__context__
    return "\n".join(texts)


def test_key_comes_from_the_environment(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    server = loopback(echo)
    engine = OpenAIEngine(server.url, "m")
    ask(engine, questions(1))
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    ask(engine, questions(1))
    monkeypatch.setenv("MLESS_API_KEY", f" {KEY}\n")
    ask(engine, questions(1))
    sent = [asked.headers.get("Authorization") for asked in server.posts]
    assert sent == [None, "Bearer second", f"Bearer {KEY}"]


@pytest.mark.parametrize("status", [401, 403, 400, 404, 429, 500, 200, 302])
def test_key_is_never_repeated(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
):
    """The server tells our key back wherever it can: in bodies, headers, its list of models."""
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)

    def answer(asked: Asked) -> Answer:
        told = asked.headers["Authorization"]
        if asked.method == "GET":
            return Answer(body=json.dumps({"data": [{"id": told}], "version": told}).encode())
        body = json.dumps({"error": {"message": f"wrong: {told}"}, "system_fingerprint": told}).encode()
        return Answer(status, body, {"Location": told, "Content-Type": "application/json"})

    told: list[str] = []
    with OpenAIEngine(loopback(answer).url, "m", retries=1, say=told.append) as engine:
        with pytest.raises(EngineFault) as caught:
            ask(engine, questions(2))
        shown = [
            everything(caught.value),
            repr(engine),
            repr(vars(engine)),
            json.dumps(engine.about()),
            caplog.text,
            *told,
        ]
    assert "[key]" in shown[0]
    for text in shown:
        assert KEY not in text


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


def test_key_missing_or_refused_names_the_variable(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    refusal = Answer(401, b'{"error": {"message": "who are you?"}}')
    assert "demands a key (401: who are you?), and none is set" in fault_of(loopback, refusal)
    assert "export MLESS_API_KEY=" in fault_of(loopback, refusal)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert "refuses the key in $OPENAI_API_KEY (401: who are you?)" in fault_of(loopback, refusal)
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    assert "refuses the key in $MLESS_API_KEY (403" in fault_of(loopback, Answer(403, b"{}"))


@pytest.mark.parametrize("key", ["sk-secret with space", "sk-secret\r\nX-Evil: 1", "sk-secret-é"])
def test_key_that_cannot_be_sent_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.setenv("MLESS_API_KEY", key)
    with pytest.raises(EngineFault, match=r"the key in \$MLESS_API_KEY holds spaces") as caught:
        OpenAIEngine("http://localhost:1/v1", "m")
    assert "sk-secret" not in everything(caught.value)


def test_key_sent_in_the_open_is_told(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    """To a host by name, by way of the environment's proxy: no packet leaves this machine."""
    server = loopback(echo)
    monkeypatch.setenv("http_proxy", server.root.replace("://", "://me:p%40ss@"))
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    told: list[str] = []
    engine = OpenAIEngine("http://models.invalid/v1", "m", say=told.append)
    assert len(ask(engine, questions(2))) == 2
    assert {asked.path for asked in server.posts} == {"http://models.invalid/v1/chat/completions"}
    assert {asked.headers["Proxy-Authorization"] for asked in server.posts} == {"Basic bWU6cEBzcw=="}
    assert sum("goes to models.invalid unencrypted" in text for text in told) == 1


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

    assert one(loopback, completion("a b c", usage={"completion_tokens": 7}), tokenizer=Words())[0].n_tokens == 7
    for usage in (None, {}, {"completion_tokens": None}, {"completion_tokens": -4}, {"completion_tokens": True}, "7"):
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
    assert sum("not under our control" in text for text in told) == 1


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


#: Seconds that a stuck server would keep us; whoever is woken is gone long before, on a busy machine too.
_LONG = 300.0


def stuck(loopback: Loopback, quick_ones: int = 1) -> tuple[FaultyServer, OpenAIEngine]:
    """A server that answers the first questions and then lets everyone wait."""
    server: FaultyServer

    def answer(asked: Asked) -> Answer:
        if len(server.posts) > quick_ones:
            server.rest(_LONG)
        return echo(asked)

    server = loopback(answer)
    return server, OpenAIEngine(server.url, "m", concurrency=4)


def working() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mless-openai")]


def test_closing_the_iterator_ends_its_threads(loopback: Loopback):
    _, engine = stuck(loopback)
    replies = engine.generate(questions(9), Decoding())
    next(replies)
    assert working()
    began = time.monotonic()
    replies.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < _LONG / 2
    assert not working()


def test_closing_the_engine_ends_its_threads_and_says_so(loopback: Loopback):
    _, engine = stuck(loopback)
    with engine:
        replies = engine.generate(questions(9), Decoding())
        next(replies)
    assert not working()
    with pytest.raises(EngineFault, match="closed while answers were being drawn"):
        list(replies)


def test_closing_wakes_those_that_wait_to_try_again(loopback: Loopback):
    server = loopback(echo, lambda asked: ["429"] * 9 if "1 plus" not in asked.prompt else [])
    server._faulty = lambda asked, fault: Answer(429, b"", {"Retry-After": "300"})  # type: ignore[method-assign]
    replies = OpenAIEngine(server.url, "m", concurrency=3).generate(questions(3), Decoding())
    assert next(replies).item == "1"
    began = time.monotonic()
    replies.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < _LONG / 2
    assert not working()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A process started in the background ignores Ctrl-C, and Python leaves it at that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_gets_through(loopback: Loopback):
    _, engine = stuck(loopback)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))

    def read() -> None:
        for _ in engine.generate(questions(9), Decoding()):
            timer.start()  # the server gives one answer, so the next wait is the one to be broken off

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        read()
    assert time.monotonic() - began < _LONG / 2
    assert not working()


def test_a_fault_of_ours_is_not_swallowed_in_a_thread(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a slip in the program")

    engine = OpenAIEngine(loopback(echo).url, "m")
    monkeypatch.setattr(engine, "_read", broken)
    with pytest.raises(ZeroDivisionError, match="a slip"):
        ask(engine, questions(3))


def test_nothing_is_written_to_disk(loopback: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    ask(OpenAIEngine(loopback(echo).url, "m"), questions(2))
    assert list(tmp_path.iterdir()) == []
