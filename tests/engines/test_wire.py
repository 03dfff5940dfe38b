"""The way to a server: each fault by itself, deadlines, waits, addresses, keys, proxies, TLS, and how a run ends."""

from __future__ import annotations

import base64
import email.utils
import html
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_proxy import ENDLESS, FAULTS, Answer, Asked, FaultyServer, loopback_fixture  # noqa: F401
from served import KEY, Loopback, ask, echo, everything, fault_of, no_thread_is_left, one, questions, quick, working  # noqa: F401

import mless.engines.wire as subject
from mless.engines.base import Decoding, Reply
from mless.engines.openai import OpenAIEngine
from mless.errors import EngineFault

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


def test_redirects_are_not_followed(loopback: Loopback):
    fault = fault_of(loopback, Answer(308, b"", {"Location": "https://elsewhere.invalid/v1"}))
    assert "sends on to https://elsewhere.invalid/v1 (308), which is not followed" in fault


def test_server_s_words_are_kept_short_and_tame(loopback: Loopback):
    fault = fault_of(loopback, Answer(400, ("\x1b[31mred\n\x00" + "x" * 5000).encode(), {"Content-Type": "text/plain"}))
    assert fault.isprintable()
    assert len(fault) < 1000


def test_redirect_to_another_server_does_not_take_the_key_there(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    other = loopback(echo)
    assert "which is not followed" in fault_of(
        loopback, Answer(307, b"", {"Location": f"{other.url}/chat/completions"})
    )
    assert not other.asked


# ---- deadlines and limits ----


@pytest.mark.parametrize("fault", [fault for fault in ENDLESS if fault != "flood"])
def test_no_answer_outlasts_the_timeout(loopback: Loopback, fault: str):
    server = loopback(lambda asked: Answer(body=b" " * 1000, fault=fault))
    with pytest.raises(EngineFault, match=r"no whole answer within 0\.5 s.*tried 2 times"):
        ask(OpenAIEngine(server.url, "m", timeout=0.5, retries=1), questions(1))
    assert OpenAIEngine(server.url, "m", timeout=0.3).about()["server"] == {}


def test_answer_without_end_is_given_up(loopback: Loopback):
    fault = fault_of(loopback, Answer(fault="flood"), retries=0)
    assert "gives an answer of more than 64 MiB" in fault


# ---- connections ----


def test_connections_are_used_again(loopback: Loopback):
    server = loopback(echo)
    assert len(ask(OpenAIEngine(server.url, "m", concurrency=1), questions(5))) == 5
    assert server.connections == 1


def test_kept_connection_that_the_server_closed_is_no_fault(loopback: Loopback):
    server = loopback(echo, lambda asked: ["hang up"] if "2 plus" in asked.prompt else [])
    told: list[str] = []
    engine = OpenAIEngine(server.url, "m", concurrency=1, retries=0, say=told.append)
    assert [reply.item for reply in ask(engine, questions(3))] == ["1", "2", "3"]
    assert server.injected["hang up"] == 1
    assert not any("again" in text for text in told)


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
    assert 25 < (subject.retry_after(later) or 0) <= 30
    assert subject.retry_after("Sat, 01 Jan 2000 00:00:00 GMT") == 0
    assert subject.retry_after("soon") is None
    assert subject.retry_after("nan") is None
    assert subject.retry_after("-3") == 0
    assert subject.retry_after(None) is None


def test_a_wait_too_long_and_a_quota_used_up_are_told_at_once(loopback: Loopback):
    long = fault_of(loopback, Answer(429, b'{"error": "daily limit"}', {"Retry-After": "7200"}))
    assert "asks to come back in 120 minutes: daily limit" in long
    spent = b'{"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}'
    assert "quota is used up: You exceeded your quota" in fault_of(loopback, Answer(429, spent))


def test_waits_grow_and_have_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subject, "_FIRST_WAIT", 1.0)
    assert [subject.wait_before(tries, None, 1.0) for tries in (1, 2, 3, 6, 7, 5000)] == [1, 2, 4, 32, 60, 60]
    assert [subject.wait_before(tries, None, 0.0) for tries in (1, 2, 7)] == [0.5, 1, 30], "with jitter"
    assert subject.wait_before(3, 7.0, 0.0) == 7
    assert 7 < subject.wait_before(3, 7.0, 0.5) < 7.5, "not everyone at the same instant"


# ---- addresses ----


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


@pytest.mark.parametrize("host", ["127.evil.example", "localhost.example", "10.0.0.1", "0.0.0.0"])
def test_only_this_machine_is_the_loopback(host: str):
    assert not subject.is_loopback(host)
    assert all(map(subject.is_loopback, ("localhost", "127.0.0.1", "127.8.9.1", "::1")))


# ---- keys ----


@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{KEY}@host/v1",
        f"https://{KEY}@host/v1",
        f"https://host/v1?api-key={KEY}",
        f"https://user:{KEY}@host:port/v1",
    ],
)
def test_address_with_a_secret_is_refused_and_not_repeated(url: str):
    with pytest.raises(EngineFault, match="export MLESS_API_KEY") as caught:
        OpenAIEngine(url, "m")
    assert KEY not in everything(caught.value)


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


@pytest.mark.parametrize("key", ["sk-secret with space", "sk-secret\r\nX-Evil: 1", "sk-secret-é"])
def test_key_that_cannot_be_sent_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.setenv("MLESS_API_KEY", key)
    with pytest.raises(EngineFault, match=r"the key in \$MLESS_API_KEY holds spaces") as caught:
        OpenAIEngine("http://localhost:1/v1", "m")
    assert "sk-secret" not in everything(caught.value)


def test_key_is_blanked_however_it_is_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "ab+c/d=")
    monkeypatch.setenv("MLESS_API_KEY", "ab+c/d=e'f\\g")
    for text in ("ab+c/d=", "ab+c/d=e'f\\g", repr(b"ab+c/d=e'f\\g"), "ab%2Bc%2Fd%3D"):
        assert "ab" not in subject.plain(text)
    assert subject.plain("nothing to hide") == "nothing to hide"


@pytest.mark.parametrize("before", ["", ":", "me:", "Bearer ", '{"Authorization": "Bearer '])
def test_key_is_blanked_within_base64_and_other_escapes(monkeypatch: pytest.MonkeyPatch, before: str):
    key = "sk-very+secret/01&<23"
    monkeypatch.setenv("MLESS_API_KEY", key)
    whole = f"{before}{key}:tail".encode()
    for text in (base64.b64encode(whole).decode(), base64.urlsafe_b64encode(whole).decode()):
        blanked = subject.answer_without_key(f"I got {text}.")
        assert "[key]" in blanked
        assert len(blanked) < len(text) - len(key) + 12
    for text in (html.escape(key), urllib.parse.quote(key), urllib.parse.quote(key, safe="").lower()):
        assert "very" not in subject.answer_without_key(text)


@pytest.mark.parametrize(
    ("environment", "allowed"),
    [
        ({}, False),
        ({"MLESS_BASE_URL": "https://models.invalid/v1"}, True),
        ({"OPENAI_BASE_URL": "HTTPS://Models.invalid:443/"}, True),
        ({"MLESS_BASE_URL": "http://models.invalid/v1"}, False),
        ({"MLESS_BASE_URL": "https://models.invalid.evil.invalid/v1"}, False),
        ({"MLESS_BASE_URL": "https://models.invalid:444/v1"}, False),
        ({"MLESS_BASE_URL": "https://["}, False),
    ],
)
def test_a_server_that_only_a_file_names_gets_no_key(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], allowed: bool
):
    for name in subject.SERVER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    subject.refuse_unnamed("https://models.invalid/v1")  # there is no key to send
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    if allowed:
        subject.refuse_unnamed("https://models.invalid/v1")
        return
    says = r"only the study file names the server https://models\.invalid/v1.*\$OPENAI_API_KEY.*--base-url https://models\.invalid/v1.*unset OPENAI_API_KEY"
    with pytest.raises(EngineFault, match=says) as caught:
        subject.refuse_unnamed("https://models.invalid/v1")
    assert KEY not in everything(caught.value)


# ---- proxies ----


def test_key_sent_in_the_open_is_told(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    """To a host by name, by way of the environment's proxy: no packet leaves this machine."""
    server = loopback(echo)
    monkeypatch.setenv("http_proxy", server.root.replace("://", "://me:p%40ss@"))
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    told: list[str] = []
    engine = OpenAIEngine("http://models.invalid/v1", "m", say=told.append)
    assert len(ask(engine, questions(2))) == 2
    assert {asked.path for asked in server.posts} == {"http://models.invalid/v1/chat/completions"}
    assert {asked.headers["Proxy-Authorization"] for asked in server.posts} == {"Basic bWU6cEBzcw=="}
    assert sum("goes to models.invalid unencrypted" in text for text in told) == 1


def test_https_goes_through_the_proxy_unseen(loopback: Loopback, monkeypatch: pytest.MonkeyPatch, certificate: Path):
    server = loopback(echo, certificate=certificate)
    proxy = loopback(echo, tunnel=server)
    monkeypatch.setenv("https_proxy", proxy.root.replace("://", "://me:p%40ss@"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    assert len(ask(OpenAIEngine("https://models.invalid/v1", "m", concurrency=1), questions(2))) == 2
    (connect,) = proxy.asked
    assert (connect.method, connect.path) == ("CONNECT", "models.invalid:443")
    assert connect.headers["Proxy-Authorization"] == "Basic bWU6cEBzcw=="
    assert KEY not in str(connect.headers)
    assert [asked.headers["Authorization"] for asked in server.posts] == [f"Bearer {KEY}"] * 2
    assert not any("Proxy-Authorization" in asked.headers for asked in server.posts)


def test_a_socks_proxy_that_is_not_there_is_tried_as_often_as_asked(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as one_port:
        one_port.bind(("127.0.0.1", 0))
        port = one_port.getsockname()[1]
    monkeypatch.setenv("all_proxy", f"socks5://127.0.0.1:{port}")
    monkeypatch.delenv("no_proxy", raising=False)
    engine = OpenAIEngine("http://far.invalid/v1", "m", retries=1, timeout=20.0)
    with pytest.raises(EngineFault, match=r"cannot be reached or hangs up .*tried 2 times"), engine:
        ask(engine, questions(1))


@pytest.mark.parametrize(
    ("no_proxy", "proxied"), [("", 1), ("elsewhere.invalid", 1), ("a.invalid, 0.0.0.0", 0), ("*", 0)]
)
def test_no_proxy_is_heeded(loopback: Loopback, monkeypatch: pytest.MonkeyPatch, no_proxy: str, proxied: int):
    server, proxy = loopback(echo), loopback(echo)
    monkeypatch.setenv("HTTP_PROXY", proxy.root)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    # 0.0.0.0 leads to this machine, but it is not one of the names that are never sent to a proxy.
    ask(OpenAIEngine(server.url.replace("127.0.0.1", "0.0.0.0"), "m"), questions(1))
    assert (len(proxy.posts), len(server.posts)) == (proxied, 1 - proxied)


def test_this_machine_is_asked_without_a_proxy(loopback: Loopback, monkeypatch: pytest.MonkeyPatch):
    server, proxy = loopback(echo), loopback(echo)
    monkeypatch.setenv("HTTP_PROXY", proxy.root)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    ask(OpenAIEngine(server.url, "m"), questions(1))
    assert (len(proxy.posts), len(server.posts)) == (0, 1)


@pytest.mark.parametrize("proxy", [f"ftp://me:{KEY}@host", f"http://me:{KEY}@host:port"])
def test_proxy_that_cannot_be_used_is_named_and_not_repeated(monkeypatch: pytest.MonkeyPatch, proxy: str):
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(
        EngineFault, match=r"proxy that the environment names.*no http://.*correct or unset HTTP_PROXY"
    ) as caught:
        ask(OpenAIEngine("https://models.invalid/v1", "m"), questions(1))
    assert KEY not in everything(caught.value)


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that is its own authority, with its key behind it, for 127.0.0.1 and models.invalid."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl, to make a certificate")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=mless tests", "-addext", "subjectAltName=IP:127.0.0.1,DNS:models.invalid"]
    use = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    key = file.with_name("key.pem")
    subprocess.run(
        ["openssl", "req", *made, *names, *use, "-keyout", key, "-out", file], check=True, capture_output=True
    )
    file.write_text(file.read_text() + key.read_text())
    return file


def test_certificate_of_an_authority_of_our_own(loopback: Loopback, monkeypatch: pytest.MonkeyPatch, certificate: Path):
    server = loopback(echo, certificate=certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert len(ask(OpenAIEngine(server.url, "m"), questions(3))) == 3


def test_certificate_that_cannot_be_trusted_is_told_at_once(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch, certificate: Path
):
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    server = loopback(echo, certificate=certificate)
    says = r"certificate cannot be trusted \({}.*set SSL_CERT_FILE to its authority's\. 0 of the 1"
    with pytest.raises(EngineFault, match=says.format("self.signed certificate")):
        ask(OpenAIEngine(server.url, "m"), questions(1))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(EngineFault, match=says.format("Hostname mismatch")):
        ask(OpenAIEngine(server.url.replace("127.0.0.1", "localhost"), "m"), questions(1))
    assert not server.asked, "the key was not sent"


def test_authorities_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(EngineFault, match=r"SSL_CERT_FILE or SSL_CERT_DIR cannot be read \(No such file"):
        ask(OpenAIEngine("https://models.invalid/v1", "m"), questions(1))


# ---- how it ends ----


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


def test_closing_the_iterator_ends_its_threads(loopback: Loopback):
    _, engine = stuck(loopback)
    replies = engine.generate(questions(9), Decoding())
    next(replies)
    assert working()
    began = time.monotonic()
    replies.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < _LONG / 2
    assert not working()


@pytest.mark.parametrize("fault", ["trickle", "continue"])
def test_answer_without_end_holds_up_no_other_and_ends_with_the_run(loopback: Loopback, fault: str):
    server = loopback(lambda asked: Answer(fault=fault) if "2 plus" in asked.prompt else echo(asked))
    replies = OpenAIEngine(server.url, "m", concurrency=2).generate(questions(6), Decoding())
    assert [next(replies).item for _ in range(5)] == ["1", "3", "4", "5", "6"]
    replies.close()  # type: ignore[attr-defined]
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


def test_nothing_is_written_to_disk(loopback: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLESS_API_KEY", KEY)
    ask(OpenAIEngine(loopback(echo).url, "m"), questions(2))
    assert list(tmp_path.iterdir()) == []
