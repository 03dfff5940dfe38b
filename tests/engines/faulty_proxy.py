"""A server on the loopback that goes wrong on purpose: by itself (`answer` is a function) or in front of a real one (`forward`).

A test module that imports `loopback_fixture` has the fixture `loopback`, which makes such servers and stops them.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

#: What can go wrong with one try. `slow` waits `FaultyServer.slowness` seconds before it answers; `cut` ends in mid body.
FAULTS = ("429", "500", "503", "cut", "hang up", "reset", "slow", "html", "broken json")
#: Answers that never end: a byte of the body now and then, one of the head, "100 Continue" again and again, a body without end.
ENDLESS = ("drip", "trickle", "continue", "flood")
HTML = b"<!doctype html><html><head><title>Gateway resting</title></head><body>Come back later</body></html>"


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def prompt(self) -> str:
        """What tells one request from another, whatever the model's folder is called."""
        try:
            return json.dumps(self.json.get("prompt") or self.json.get("messages"))
        except (ValueError, AttributeError):
            return self.path


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    fault: str | None = None


def completion(text: str, **changes: Any) -> Answer:
    """A chat or text completion, as servers give it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "text": text, "finish_reason": "stop"}
    body = {"choices": [choice], "usage": {"completion_tokens": len(text.split())}} | changes
    return Answer(body=json.dumps({name: value for name, value in body.items() if value is not None}).encode())


def forward(url: str) -> Callable[[Asked], Answer]:
    """Hand requests on to the server at `url`, and its answers back."""

    def answer(asked: Asked) -> Answer:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url + asked.path, asked.body or None, headers, method=asked.method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return Answer(response.status, response.read(), {"Content-Type": response.headers["Content-Type"]})
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused.code, refused.read(), {"Content-Type": refused.headers["Content-Type"]})

    return answer


def seeded(seed: int, kinds: Sequence[str] = FAULTS, most: int = 2) -> Callable[[Asked], list[str]]:
    """A plan: which faults a prompt meets before it gets through, 0 to `most` of them. It hangs on the prompt, not on who comes first."""

    def plan(asked: Asked) -> list[str]:
        rng = random.Random(f"{seed}:{asked.prompt}")
        return [rng.choice(kinds) for _ in range(rng.randint(0, most))]

    return plan


class FaultyServer:
    def __init__(
        self,
        answer: Callable[[Asked], Answer],
        plan: Callable[[Asked], list[str]] = lambda asked: [],
        slowness: float = 3.0,
        certificate: Path | None = None,
        tunnel: FaultyServer | None = None,
    ) -> None:
        """With `certificate` (a PEM file with its key) it speaks TLS. As a proxy it takes every CONNECT to `tunnel`."""
        self.answer, self.plan, self.slowness, self.tunnel = answer, plan, slowness, tunnel
        self.asked: list[Asked] = []
        self.connections = 0
        self.injected: Counter[str] = Counter()
        self.busy = self.peak = 0
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._open: set[socket.socket] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept

            def setup(self) -> None:
                super().setup()
                with server._lock:
                    server.connections += 1
                    server._open.add(self.connection)

            def finish(self) -> None:
                with server._lock:
                    server._open.discard(self.connection)
                super().finish()

            def do_CONNECT(self) -> None:
                server._connect(self)

            def do_GET(self) -> None:
                server._serve(self)

            def do_POST(self) -> None:
                server._serve(self)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients hang up here, by design

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.root = f"http{'s' if certificate else ''}://127.0.0.1:{self.port}"
        self.url = f"{self.root}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            with self._lock:
                for connection in self._open:
                    with contextlib.suppress(OSError):  # the client may have closed it
                        connection.shutdown(socket.SHUT_RDWR)

    def rest(self, seconds: float) -> None:
        """Sleep, but not beyond the server's life: for slow answers."""
        self._over.wait(seconds)

    @property
    def posts(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "POST"]

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        asked = Asked(handler.command, handler.path, dict(handler.headers.items()), body)
        with self._lock:
            self.asked.append(asked)
            faults = self.plan(asked) if asked.method == "POST" else []
            at = self._tries[asked.prompt]
            self._tries[asked.prompt] += 1
            fault = faults[at] if at < len(faults) else None
            if fault:
                self.injected[fault] += 1
            self.busy += 1
            self.peak = max(self.peak, self.busy)
        try:
            answer = self._faulty(asked, fault) if fault else self.answer(asked)
        finally:
            # Before the answer leaves: whoever has it may ask again before this thread runs on.
            with self._lock:
                self.busy -= 1
        self._send(handler, answer)

    def _faulty(self, asked: Asked, fault: str) -> Answer:
        if fault == "429":
            return Answer(429, b'{"error": {"message": "slow down"}}', {"Retry-After": "0.2"})
        if fault in ("500", "503"):
            return Answer(int(fault), b"Internal Server Error", {"Content-Type": "text/plain"})
        if fault == "html":
            return Answer(200, HTML, {"Content-Type": "text/html"})
        if fault == "broken json":
            return Answer(200, b'{"choices": [{"text": "half an ans')
        if fault == "slow":
            self.rest(self.slowness)
        answer = self.answer(asked) if fault == "cut" else Answer()
        return Answer(answer.status, answer.body, answer.headers, fault)

    def _connect(self, handler: BaseHTTPRequestHandler) -> None:
        """Hand bytes to and fro, without looking into them."""
        self.asked.append(Asked("CONNECT", handler.path, dict(handler.headers.items()), b""))
        handler.close_connection = True
        assert self.tunnel is not None
        with socket.create_connection(("127.0.0.1", self.tunnel.port)) as inner:
            handler.wfile.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            ways = {handler.connection: inner, inner: handler.connection}
            while not self._over.is_set():
                for source in select.select(list(ways), [], [], 0.1)[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    ways[source].sendall(data)

    def _send_endless(self, handler: BaseHTTPRequestHandler, fault: str) -> None:
        """Until the client hangs up, or for so long that a test without a deadline fails rather than waits for ever."""
        heads = {"trickle": b"HTTP/1.1 200 OK\r\nX-Long: ", "flood": b"HTTP/1.1 200 OK\r\n\r\n"}
        parts = {"trickle": b"x", "flood": bytes(1 << 20), "continue": b"HTTP/1.1 100 Continue\r\n\r\n"}
        handler.close_connection = True
        handler.wfile.write(heads.get(fault, b""))
        until = time.monotonic() + 60
        while time.monotonic() < until and not self._over.is_set():
            handler.wfile.write(parts[fault])
            if fault == "trickle":
                self.rest(0.02)

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer.fault == "hang up":
            handler.close_connection = True
            return
        if answer.fault == "reset":
            # Closed with "no lingering", a socket sends a reset in place of a goodbye.
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.close()
            handler.close_connection = True
            return
        if answer.fault in ENDLESS and answer.fault != "drip":
            self._send_endless(handler, answer.fault)
            return
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        body = answer.body[: len(answer.body) // 2] if answer.fault == "cut" else answer.body
        if answer.fault == "drip":
            for byte in body:
                handler.wfile.write(bytes([byte]))
                self.rest(0.1)
        else:
            handler.wfile.write(body)
        if answer.fault or self._over.is_set():
            handler.close_connection = True


@pytest.fixture(name="loopback")
def loopback_fixture() -> Iterator[Callable[..., FaultyServer]]:
    """Makes `FaultyServer`s that are stopped when the test is over."""
    servers: list[FaultyServer] = []

    def start(*args: Any, **kwargs: Any) -> FaultyServer:
        servers.append(FaultyServer(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
