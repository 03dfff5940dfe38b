"""Answers from any OpenAI-compatible server: vLLM, llama.cpp, ``transformers serve``, a hosted one.

Only the standard library is used: one connection per request, so that a stale one is never taken for a dead server, and a socket that can
be shut from outside, so that an answer no longer wanted does not keep a thread waiting.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import json
import os
import queue
import random
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlsplit

from mless.engines.base import Decoding, Finish, Reply, Request
from mless.errors import BadStudy, EngineFault

#: The key is read from the first of these that is set, each time a request is sent. No object keeps it.
KEY_VARIABLES = ("MLESS_API_KEY", "OPENAI_API_KEY")
#: `Reply.n_tokens` where the server does not say it and no tokenizer was given. An estimate would be taken for a count.
UNKNOWN_TOKENS = -1

_FIRST_WAIT = 1.0  # seconds; doubled with every further try of one request
_LONGEST_WAIT = 60.0
_LONGEST_ASKED = 600.0  # a server that asks for more than this has a quota, not a rush
_CONNECT_WITHIN = 10.0
_BODY_LIMIT = 1 << 26
_V1 = "base_url should be the part before /chat/completions, which mostly ends in /v1, as http://localhost:8000/v1"


class _Again(Exception):
    """Worth another try. `odd` answers, which no working server gives, are tried once more only before the first proper one."""

    def __init__(self, kind: str, what: str, *, wait: float | None = None, odd: bool = False) -> None:
        super().__init__(what)
        self.kind, self.what, self.wait, self.odd = kind, what, wait, odd


class _NoLongerWanted(Exception):
    """The run was closed, or another request's fault ended it."""


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


@dataclass(frozen=True, slots=True)
class _Told:
    """For the user's ear, once for each kind: with many requests under way, every one would flood the screen."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Drawn:
    request: Request
    text: str
    tokens: int | None
    finish: Finish
    reason: str


@dataclass
class _Run:
    """One `generate` under way: what its threads share. `ended` is at once; `winding_down` lets what is on the wire come home."""

    requests: Iterator[Request]
    decoding: Decoding
    events: queue.SimpleQueue[_Drawn | _Told | BaseException | None] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    winding_down: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    hold_until: float = 0.0
    sockets: set[socket.socket] = field(default_factory=set[socket.socket])
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    repeated: Counter[str] = field(default_factory=Counter[str])

    def next_request(self) -> Request | None:
        with self.lock:
            return None if self.winding_down.is_set() else next(self.requests, None)

    def wait(self, seconds: float) -> None:
        """Wait, and as long as the server asked everyone to; waked when the run is over."""
        until = time.monotonic() + seconds
        while (left := max(until, self.hold_until) - time.monotonic()) > 0:
            if self.winding_down.wait(left):
                break
        if self.winding_down.is_set():
            raise _NoLongerWanted

    def hold(self, seconds: float) -> None:
        with self.lock:
            self.hold_until = max(self.hold_until, time.monotonic() + seconds)

    def enter(self, connection: socket.socket) -> None:
        with self.lock:
            if self.ended:
                raise _NoLongerWanted
            self.sockets.add(connection)

    def leave(self, connection: socket.socket) -> None:
        with self.lock:
            self.sockets.discard(connection)

    def end(self) -> None:
        """Shut every connection and see the threads off. One that is still connecting ends by itself within seconds."""
        self.winding_down.set()
        with self.lock:
            self.ended = True
            for connection in self.sockets:
                with contextlib.suppress(OSError):  # the other side may have closed it already
                    connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + 2.0
        for thread in self.threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


def _silent(told: str) -> None: ...


class OpenAIEngine:
    """An OpenAI-compatible server at `base_url`.

    Requests with token ids go to ``/completions`` (vLLM and llama.cpp accept ids there), requests with messages to ``/chat/completions``.
    At most `concurrency` are under way at once. A request is tried again up to `retries` times, with growing waits, after 429, 5xx, a
    timeout, a cut connection or a broken body; what cannot be mended so raises `EngineFault`. `n_tokens` is what the server counts; where
    it does not, what `tokenizer` counts in the text, and without one `UNKNOWN_TOKENS` (−1): no count at all rather than a guess.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        tokenizer: Any = None,
        concurrency: int = 8,
        timeout: float = 120.0,
        retries: int = 6,
        say: Callable[[str], None] = _silent,
    ) -> None:
        self._base = _checked(base_url)
        self.base_url = self._base.geturl()
        self.model = model
        if concurrency < 1:
            raise BadStudy(f"concurrency must be at least 1 request at a time, got {concurrency}")
        if not 0 < timeout < float("inf"):
            raise BadStudy(f"timeout must be a number of seconds above 0, got {timeout}")
        if retries < 0:
            raise BadStudy(f"retries must be 0 or more, got {retries}")
        self.concurrency, self.timeout, self.retries = concurrency, timeout, retries
        self._tokenizer = tokenizer
        self._say = say
        self._said: set[str] = set()
        self._runs: list[_Run] = []
        self._proven = False  # whether this server has given one proper answer
        self._fingerprints: set[str] = set()
        self._server: dict[str, Any] | None = None
        _key_header()  # a key that cannot be sent is told now

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.base_url!r}, {self.model!r})"

    def generate(self, requests: Sequence[Request], decoding: Decoding, *, live: int | None = None) -> Iterator[Reply]:
        """Answer every request, as answers come; `live` allows fewer at once than `concurrency`."""
        if live is not None and live < 1:
            raise BadStudy(f"live must be at least 1 row, got {live}")
        for request in requests:
            _check_request(request)
        return self._replies(list(requests), decoding, min(self.concurrency, live or self.concurrency))

    def about(self) -> dict[str, Any]:
        """What is recorded. The server is asked for its models and version once; what it does not say is left out."""
        if self._server is None:
            self._server = self._ask_about()
        server = dict(self._server)
        if self._fingerprints:
            server["fingerprints"] = sorted(self._fingerprints)
        return {
            "engine": "openai",
            "base_url": self.base_url,
            "model": self.model,
            "promise": "none: rows may depend on the server's batches",
            "server": server,
        }

    def close(self) -> None:
        """End what is under way. Answers already handed out stay with who has them."""
        for run in list(self._runs):
            run.end()

    def __enter__(self) -> OpenAIEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the run ----

    def _replies(self, requests: list[Request], decoding: Decoding, workers: int) -> Generator[Reply]:
        if not requests:
            return
        self._warn_before(requests)
        run = _Run(iter(requests), decoding)
        run.threads = [
            threading.Thread(target=self._work, args=(run,), name=f"mless-openai-{number}", daemon=True)
            for number in range(min(workers, len(requests)))
        ]
        self._runs.append(run)
        working, done, fault = len(run.threads), 0, None
        try:
            for thread in run.threads:
                thread.start()
            while working:
                try:
                    # A time limit, because on some systems Ctrl-C does not reach a wait without one.
                    event = run.events.get(timeout=0.25)
                except queue.Empty:
                    continue
                if event is None:
                    working -= 1
                elif isinstance(event, _Told):
                    self._say_once(event.kind, event.text)
                elif isinstance(event, _Drawn):
                    done += 1
                    yield self._reply(event, decoding)
                elif fault is None:
                    fault = event
        finally:
            run.end()
            self._runs.remove(run)
        if fault is not None and not isinstance(fault, EngineFault):
            raise fault
        if fault is None and done < len(requests):
            fault = EngineFault("the engine was closed while answers were being drawn")
        if fault is not None:
            raise EngineFault(
                f"{fault}. {done} of the {len(requests)} answers asked for have come and are kept; the same command goes on from there"
            )
        if run.repeated:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(run.repeated.items()))
            self._say(
                f"{run.repeated.total()} requests had to be sent again ({kinds}); each of the {done} was answered once"
            )

    def _work(self, run: _Run) -> None:
        try:
            while (request := run.next_request()) is not None:
                run.events.put(self._drawn(request, run))
        except _NoLongerWanted:
            pass
        except BaseException as fault:  # noqa: BLE001 - raised again in the thread that reads the replies
            run.events.put(fault)
            run.winding_down.set()
        finally:
            run.events.put(None)

    def _drawn(self, request: Request, run: _Run) -> _Drawn:
        """The answer to one request, with as many tries as it takes and is allowed."""
        tries = odd = 0
        while True:
            run.wait(0.0)
            try:
                return self._try(request, run)
            except _Again as again:
                fault = again
            tries, odd = tries + 1, odd + fault.odd
            if tries > self.retries or (odd > 1 and not self._proven):
                raise EngineFault(f"{fault.what}; tried {tries} times" if tries > 1 else fault.what)
            jitter = random.random()
            if fault.wait is None:
                wait = min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT) * (0.5 + 0.5 * jitter)
            else:
                wait = fault.wait + 0.25 * _FIRST_WAIT * jitter  # not everyone at the same instant
                run.hold(fault.wait)
            with run.lock:
                run.repeated[fault.kind] += 1
            run.events.put(_Told(fault.kind, f"{fault.what}; trying again"))
            run.wait(wait)

    def _try(self, request: Request, run: _Run) -> _Drawn:
        path, asked = self._payload(request, run.decoding)
        page = self._call("POST", self._address(path), asked, self.timeout, run)
        if page.status in (408, 409, 425, 429) or (page.status >= 500 and page.status != 501):
            raise self._again(page)
        if not 200 <= page.status < 300:
            raise self._refused(page, request, asked)
        read = self._read(page, request)
        self._proven = True
        return read

    def _payload(self, request: Request, decoding: Decoding) -> tuple[str, dict[str, Any]]:
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "seed": request.seed,
        }
        if decoding.stop:
            asked["stop"] = list(decoding.stop)
        if decoding.top_k > 0:
            asked["top_k"] = decoding.top_k  # not in OpenAI's own interface, so strict servers refuse it
        if request.token_ids:
            return "/completions", asked | {"prompt": list(request.token_ids)}
        return "/chat/completions", asked | {
            "messages": [{"role": role, "content": text} for role, text in request.messages]
        }

    def _reply(self, drawn: _Drawn, decoding: Decoding) -> Reply:
        """Made in the reader's thread: tokenizers do not like to be asked by several."""
        request, text, finish, tokens = drawn.request, drawn.text, drawn.finish, drawn.tokens
        if tokens is not None and tokens > decoding.max_new_tokens:
            self._say_once(
                "max_tokens",
                f"the server gave {tokens} tokens where at most {decoding.max_new_tokens} were asked for: "
                "it does not keep to max_tokens, so shares of cut answers mean little",
            )
        if drawn.reason not in ("stop", "length"):
            self._say_once(
                f"finish {drawn.reason}",
                f"some answers ended with finish_reason {drawn.reason!r}; they count as ended, not as cut",
            )
        if tokens is None and self._tokenizer is not None:
            tokens = len(self._tokenizer.encode(text, add_special_tokens=False))
        if tokens is None:
            self._say_once(
                "n_tokens",
                f"the server does not count its tokens: n_tokens is {UNKNOWN_TOKENS}, not known (give --tokenizer to have them counted)",
            )
            tokens = UNKNOWN_TOKENS
        # Some servers leave the stop text in, some cannot stop at it.
        if found := [at for stop in decoding.stop if (at := text.find(stop)) >= 0]:
            text, finish = text[: min(found)], "stop"
        return Reply(request.condition, request.item, request.sample, text, tokens, finish)

    # ---- what a server answers ----

    def _again(self, page: _Page) -> _Again | EngineFault:
        says = _said_by(page)
        if page.status == 429 and "insufficient_quota" in page.body.decode("utf-8", "replace"):
            return EngineFault(f"{self.base_url} says that the quota is used up: {says}; refill it or wait")
        wait = _retry_after(page.headers.get("Retry-After"))
        if wait is not None and wait > _LONGEST_ASKED:
            return EngineFault(
                f"{self.base_url} answers {page.status} and asks to come back in {wait / 60:.0f} minutes: {says}"
            )
        asks = f" and asks to wait {wait:.0f} s" if wait else ""
        return _Again(str(page.status), f"{self.base_url} answers {page.status}{asks}: {says}", wait=wait)

    def _refused(self, page: _Page, request: Request, asked: dict[str, Any]) -> EngineFault:
        says, status = _said_by(page), page.status
        if status in (401, 403):
            name = _key_variable()
            if name is None:
                return EngineFault(
                    f"{self.base_url} demands a key ({status}: {says}), and none is set; put it into the environment: "
                    f"export {KEY_VARIABLES[0]}=… (or {KEY_VARIABLES[1]})"
                )
            return EngineFault(
                f"{self.base_url} refuses the key in ${name} ({status}: {says}); set {name} to a valid one"
            )
        where = f"item {request.item!r} of {request.condition!r}"
        if 300 <= status < 400:
            target = _plain(page.headers.get("Location") or "elsewhere")
            return EngineFault(
                f"{self.base_url} sends on to {target} ({status}), which is not followed; give the right base_url"
            )
        return EngineFault(f"{self.base_url} refuses {where} ({status}: {says}); {self._likely(page, says, asked)}")

    def _likely(self, page: _Page, says: str, asked: dict[str, Any]) -> str:
        text = says.lower()
        if page.status == 405 or _is_html(page) or re.fullmatch(r"(\w+ )?not found\.?|no words", text):
            return _V1
        if "top_k" in text and "top_k" in asked:
            return "this server does not know top_k; leave it at 0"
        if re.search(r"context|too long|maximum", text):
            return "prompt and max_new_tokens together may exceed its context: lower max_new_tokens"
        if "prompt" in asked and re.search(r"prompt|token|\bstr(ing)?\b|\binput\b", text):
            return "it may not accept prompts as token ids: run without --tokenizer, so that text is sent"
        if page.status == 404 or re.search(r"model|pinned", text):
            served = self._served_models()
            return (
                f"it serves: {', '.join(served)}; choose with --model" if served else "is --model the name it serves?"
            )
        return f"if that does not say it: {_V1}"

    def _read(self, page: _Page, request: Request) -> _Drawn:
        odd = _is_html(page) or not page.body.lstrip().startswith(b"{")
        try:
            body: Any = json.loads(page.body)
        except (ValueError, RecursionError):
            body = None
        if odd and not isinstance(body, dict):
            what = "an HTML page" if _is_html(page) else "something that is no JSON object"
            raise _Again("page", f"{self.base_url} answers with {what} ({_said_by(page)}); {_V1}", odd=True)
        if body is None:
            raise _Again("broken body", f"{self.base_url} answers with broken JSON ({len(page.body)} bytes)")
        choices = body.get("choices")
        first: Any = choices[0] if isinstance(choices, list) and choices else None
        text = _text_of(first)
        if text is None:
            raise _Again("no choices", f"{self.base_url} answers without choices ({_said_by(page)}); {_V1}", odd=True)
        usage = body.get("usage")
        count = cast("dict[str, Any]", usage).get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(fingerprint := body.get("system_fingerprint"), str):
            self._fingerprints.add(_plain(fingerprint))
        reason = _plain(str(first.get("finish_reason") or "stop"))
        return _Drawn(
            request,
            text,
            count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None,
            "length" if reason == "length" else "stop",
            reason,
        )

    # ---- the wire ----

    def _address(self, path: str) -> SplitResult:
        return self._base._replace(path=f"{self._base.path}{path}")

    def _call(
        self, method: str, address: SplitResult, asked: dict[str, Any] | None, timeout: float, run: _Run | None
    ) -> _Page:
        """One exchange. The fault is raised outside of the ``except``, so that no frame that held the key hangs on it."""
        where, body = self.base_url, None if asked is None else json.dumps(asked).encode()
        try:
            return _exchange(method, address, body, timeout, run)
        except ssl.SSLCertVerificationError as error:
            fault: Exception = EngineFault(
                f"{where}: its certificate cannot be trusted ({_plain(error.verify_message)}); set SSL_CERT_FILE to its authority's"
            )
        except TimeoutError:
            fault = _Again(
                "timeout", f"{where} gave no whole answer within {timeout:g} s (raise timeout if it is merely slow)"
            )
        except http.client.IncompleteRead as error:
            fault = _Again("cut", f"{where} cut the connection in mid answer ({_plain(str(error))})")
        except (OSError, http.client.HTTPException) as error:
            why = _plain(getattr(error, "strerror", None) or str(error) or type(error).__name__)
            fault = _Again(
                "no connection",
                f"{where} cannot be reached or hangs up ({why}); is the server running, and base_url right?",
            )
        if run is not None and run.ended:
            fault = _NoLongerWanted()
        raise fault

    # ---- what the server says of itself ----

    def _served_models(self) -> list[str]:
        found = self._get(self._address("/models"))
        data: Any = found.get("data")
        if not isinstance(data, list):
            return []
        ids = (entry.get("id") for entry in cast("list[Any]", data) if isinstance(entry, dict))
        return sorted(_plain(name) for name in ids if isinstance(name, str))[:20]

    def _ask_about(self) -> dict[str, Any]:
        said: dict[str, Any] = {}
        if models := self._served_models():
            said["models"] = models
        if self._base.path.endswith("/v1"):
            outside = self._base._replace(path=f"{self._base.path.removesuffix('/v1')}/version")  # where vLLM says it
            version = self._get(outside).get("version")
            if isinstance(version, str):
                said["version"] = _plain(version)
        return said

    def _get(self, address: SplitResult) -> dict[str, Any]:
        """A JSON object that is nice to have: {} where the server has none."""
        try:
            page = self._call("GET", address, None, min(self.timeout, _CONNECT_WITHIN), None)
            body = json.loads(page.body) if page.status == 200 else None
        except (_Again, EngineFault, ValueError, RecursionError):
            return {}
        return cast("dict[str, Any]", body) if isinstance(body, dict) else {}

    # ---- what the user is told ----

    def _warn_before(self, requests: Sequence[Request]) -> None:
        if any(request.messages for request in requests):
            self._say_once(
                "messages",
                "prompts are sent as text: the server's own chat template and tokenizer make the tokens, so how many tokens the filler "
                "has and where they stand is not under our control; give --tokenizer to send token ids (vLLM and llama.cpp take them)",
            )
        name, host = _key_variable(), cast(str, self._base.hostname)
        if name is None or _is_loopback(host):
            return
        if self._base.scheme == "http":
            self._say_once(
                "key", f"the key in ${name} goes to {host} unencrypted; use https:// where the server has it"
            )
        elif name == KEY_VARIABLES[1] and not host.endswith("openai.com"):
            self._say_once(
                "key", f"the key in ${name} is sent to {host}; set {KEY_VARIABLES[0]} if that server has one of its own"
            )

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


def _exchange(method: str, address: SplitResult, body: bytes | None, timeout: float, run: _Run | None) -> _Page:
    deadline = time.monotonic() + timeout
    connection, target, headers = _connection(address, min(timeout, _CONNECT_WITHIN))
    wire: socket.socket | None = None
    try:
        connection.connect()
        wire = connection.sock
        assert wire is not None
        if run is not None:
            run.enter(wire)
        wire.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.request(method, target, body, headers | _key_header())
        with connection.getresponse() as response:
            content = bytearray()
            while not response.isclosed():
                # Against a server that sends a byte now and then, the time left is counted down, not begun anew.
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                wire.settimeout(left)
                part = response.read1(1 << 16)
                content += part
                if not part:
                    break
                if len(content) > _BODY_LIMIT:
                    raise http.client.HTTPException(f"an answer of more than {_BODY_LIMIT >> 20} MiB")
            if response.length:
                raise http.client.IncompleteRead(bytes(content), response.length)
            return _Page(response.status, response.headers, bytes(content))
    finally:
        if wire is not None and run is not None:
            run.leave(wire)
        connection.close()


def _connection(address: SplitResult, timeout: float) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """A connection to the server, through the environment's proxy where there is one; the target; the headers without the key."""
    host, secure = cast(str, address.hostname), address.scheme == "https"
    port = address.port or (443 if secure else 80)
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
    given = None if _is_loopback(host) else urllib.request.getproxies().get(address.scheme)
    if not given or urllib.request.proxy_bypass(f"{host}:{port}"):
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(host, port, timeout=timeout), address.path, headers
    proxy = urlsplit(given if "://" in given else f"http://{given}")
    pass_on: dict[str, str] = {}
    if proxy.username:
        login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        pass_on["Proxy-Authorization"] = f"Basic {base64.b64encode(login).decode()}"
    at, through = proxy.hostname or "localhost", proxy.port or 80
    if secure:
        tunnel = http.client.HTTPSConnection(at, through, timeout=timeout)
        tunnel.set_tunnel(host, port, pass_on)
        return tunnel, address.path, headers
    return http.client.HTTPConnection(at, through, timeout=timeout), address.geturl(), headers | pass_on


def _checked(base_url: str) -> SplitResult:
    """The parts of a base_url that may be written down: one with a login or a query is refused, and not repeated."""
    try:
        parts = urlsplit(base_url.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = SplitResult("", "", "", "", ""), None, None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise EngineFault(
            "base_url holds a login (user:password@host), which would be written into the results; "
            f"leave it out and put the key into the environment: export {KEY_VARIABLES[0]}=…"
        )
    if parts.query or parts.fragment or "?" in base_url or "#" in base_url:
        raise EngineFault(
            "base_url holds a query (?…), which may be a key and would be written into the results; "
            f"leave it out and put the key into the environment: export {KEY_VARIABLES[0]}=…"
        )
    if parts.scheme not in ("http", "https") or not host or not base_url.isprintable() or " " in base_url.strip():
        raise EngineFault(
            f"base_url must be an http:// or https:// address, as http://localhost:8000/v1, got {base_url[:200]!r}"
        )
    path = parts.path.rstrip("/")
    for tail in ("/chat/completions", "/completions", "/models"):
        if path.endswith(tail):
            raise EngineFault(f"base_url must end before {tail}, which is added to it, got {base_url[:200]!r}")
    netloc = f"[{host}]" if ":" in host else host
    return SplitResult(parts.scheme, netloc if port is None else f"{netloc}:{port}", path, "", "")


def _check_request(request: Request) -> None:
    if request.arm is not None:
        raise BadStudy(
            f"condition {request.condition!r} changes the model's activations (ARM), and a server's weights are out of reach; use --engine hf or vllm"
        )
    where = f"item {request.item!r} of {request.condition!r}"
    if request.position_ids is not None or request.hidden is not None:
        raise EngineFault(
            f"{where} asks for shifted positions or hidden tokens, which no server offers; use engine 'hf' for that condition"
        )
    if bool(request.token_ids) == bool(request.messages):
        raise EngineFault(f"{where}: expected token ids or messages, got {'both' if request.messages else 'neither'}")


def _key_variable() -> str | None:
    return next((name for name in KEY_VARIABLES if os.environ.get(name, "").strip()), None)


def _key_header() -> dict[str, str]:
    name = _key_variable()
    if name is None:
        return {}
    key = os.environ[name].strip()
    # http.client would say so itself, and show the key.
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise EngineFault(f"the key in ${name} holds spaces or other characters that no key has; set it anew")
    return {"Authorization": f"Bearer {key}"}


def _plain(text: str) -> str:
    """A stranger's words on one short line, without our key (some servers repeat it) and without control characters."""
    for name in KEY_VARIABLES:
        if key := os.environ.get(name, "").strip():
            text = text.replace(key, "[key]")
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def _is_html(page: _Page) -> bool:
    return "html" in (page.headers.get("Content-Type") or "").lower() or page.body.lstrip().startswith(b"<")


def _said_by(page: _Page) -> str:
    """The server's own message, wherever it keeps it."""
    text = page.body[:100_000].decode("utf-8", "replace")
    if _is_html(page):
        title = re.search(r"<title[^>]*>([^<]*)", text, re.IGNORECASE)
        return _plain(title[1]) or "HTML" if title else "HTML"
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError):
        return _plain(text) or "no words"
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and (inner := cast("dict[str, Any]", body).get(name)):
            body = inner
    return _plain(body if isinstance(body, str) else json.dumps(body, ensure_ascii=False))


def _text_of(choice: Any) -> str | None:
    """A choice's text; empty is an answer, None is no choice. Chat content may be null or come in parts."""
    if not isinstance(choice, dict):
        return None
    fields = cast("dict[str, Any]", choice)
    if isinstance(message := fields.get("message"), dict):
        content: Any = cast("dict[str, Any]", message).get("content")
        if isinstance(content, list):
            parts = [
                cast("dict[str, Any]", part).get("text")
                for part in cast("list[Any]", content)
                if isinstance(part, dict)
            ]
            content = "".join(part for part in parts if isinstance(part, str))
        text: Any = "" if content is None else content
    else:
        text = fields.get("text")
    if not isinstance(text, str):
        return None
    # Half a surrogate pair is valid in JSON and in no file.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date; None where the header is missing or nonsense."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(seconds, 0.0) if seconds == seconds else None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
