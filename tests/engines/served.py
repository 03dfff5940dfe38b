"""Questions for a served model, and what every test of `OpenAIEngine` needs.

A test module that imports `quick` and `no_thread_is_left` has these fixtures for all of its tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faulty_proxy import Answer, Asked, FaultyServer, completion

import mless.engines.wire as subject
from mless.engines.base import Decoding, Reply, Request
from mless.engines.openai import OpenAIEngine
from mless.errors import EngineFault

Loopback = Callable[..., FaultyServer]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_FIRST_WAIT", 0.01)
    proxies = [
        name for scheme in ("http", "https", "all", "no") for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())
    ]
    for name in ("MLESS_API_KEY", "OPENAI_API_KEY", "SSL_CERT_FILE", "SSL_CERT_DIR", *proxies):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 60
    while left := working():
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


def everything(fault: BaseException | None) -> str:
    """All that an exception says, and those it hangs on."""
    texts: list[str] = []
    while fault is not None:
        texts += [str(fault), repr(fault), repr(vars(fault))]
        fault = fault.__cause__ or fault.__context__
    return "\n".join(texts)


def working() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mless-openai")]
