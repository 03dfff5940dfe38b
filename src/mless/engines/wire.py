"""HTTP to an OpenAI-compatible server: addresses, the key, deadlines, retries.

httpx2 does the protocol. A run uses one event loop in its own thread. So a deadline can end an exchange at any point, and the caller's
thread stays free for Ctrl-C.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import email.utils
import functools
import html
import http.cookiejar
import ipaddress
import json
import logging
import os
import queue
import random
import re
import ssl
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import httpx2

from mless.errors import EngineFault

#: The key is read from the first of these that is set, each time a request is sent. No object keeps it.
KEY_VARIABLES = ("MLESS_API_KEY", "OPENAI_API_KEY")
#: Servers that the user names in the environment. They may get the key even if a study file chose them.
SERVER_VARIABLES = ("MLESS_BASE_URL", "OPENAI_BASE_URL")

_FIRST_WAIT = 1.0  # seconds; doubled with every further try of one request
_LONGEST_WAIT = 60.0
_LONGEST_ASKED = 600.0  # a longer wait means a quota, not a busy server
_CONNECT_WITHIN = 10.0
_BODY_LIMIT = 1 << 26
# Common servers close an idle connection after 2 s or more. We close it first, so that a request rarely uses a closing one.
_KEEP_IDLE = 1.0
# Shorter ones ("EMPTY", "none") are placeholders; blanking them would change answers.
_SHORTEST_SECRET = 8

# Steps of an exchange: how the library's names for a new connection end (directly, or through a SOCKS proxy), and ours for headers received.
_CONNECTING = ".connect_tcp.started"
_ANSWERED = "answered"

T = TypeVar("T")


class TryAgain(Exception):
    """Worth another try. `odd` answers, which no working server gives, are retried once, and only before the first proper answer."""

    def __init__(self, kind: str, what: str, *, wait: float | None = None, odd: bool = False) -> None:
        super().__init__(what)
        self.kind, self.what, self.wait, self.odd = kind, what, wait, odd


class Stopped(Exception):
    """Nothing more is sent in this run."""


# ---- the key ----


def key_variable() -> str | None:
    return next((name for name in KEY_VARIABLES if os.environ.get(name, "").strip()), None)


def key_header() -> dict[str, str]:
    name = key_variable()
    if name is None:
        return {}
    key = os.environ[name].strip()
    # The HTTP library would say so itself, and show the key.
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise EngineFault(f"the key in ${name} holds spaces or other characters that no key has; set it again")
    return {"Authorization": f"Bearer {key}"}


def refuse_unnamed(base_url: str) -> None:
    """Refuse to send a key to a server that only a study file names: anyone may have written that file."""
    name = key_variable()
    named = [_origin(os.environ.get(variable, "")) for variable in SERVER_VARIABLES]
    if name is None or _origin(base_url) in named:
        return
    raise EngineFault(
        f"only the study file names the server {base_url}, and a file alone does not decide where the key in ${name} is sent; if you trust that "
        f"server, say so: --base-url {base_url}, or export {SERVER_VARIABLES[0]}={base_url}; if it needs no key: unset {name}"
    )


def _origin(url: str) -> tuple[str, str, int | None]:
    """Who answers at an address. An empty one has no host, so it never equals a checked one."""
    try:
        read = httpx2.URL(url.strip())
    except httpx2.InvalidURL:
        read = httpx2.URL()
    return read.scheme, read.host.lower(), read.port or {"http": 80, "https": 443}.get(read.scheme)


def without_key(text: str, *, shortest: int = 1) -> str:
    """The text with our key blanked, also where it was escaped or encoded. Keys shorter than `shortest` are left."""
    keys = [os.environ.get(name, "").strip() for name in KEY_VARIABLES]
    for key in sorted(keys, key=len, reverse=True):  # one may begin with the other
        if len(key) >= max(shortest, 1):
            for form in _forms(key):
                text = text.replace(form, "[key]")
    return text


@functools.lru_cache(maxsize=8)
def _forms(key: str) -> tuple[str, ...]:
    """How the key may be written: as it is, escaped for Python, JSON, HTML or a URL, and within base64 (as in Basic authorization)."""
    quoted = [urllib.parse.quote(key, safe=""), urllib.parse.quote(key)]
    forms = [key, repr(key)[1:-1], json.dumps(key)[1:-1], html.escape(key), *quoted]
    forms += [re.sub("%..", lambda code: code[0].lower(), one) for one in quoted]
    for shift in range(3):
        # Where the key begins within three bytes decides its letters. Those at the ends depend on its neighbours.
        whole = base64.b64encode(bytes(shift) + key.encode()).decode().rstrip("=")
        inner = whole[(0, 2, 3)[shift] : len(whole) - (0, 1, 1)[(shift + len(key.encode())) % 3]]
        if len(inner) >= _SHORTEST_SECRET:
            forms += [inner, inner.replace("+", "-").replace("/", "_")]
    return tuple(dict.fromkeys(forms))


def answer_without_key(text: str) -> str:
    return without_key(text, shortest=_SHORTEST_SECRET)


def plain(text: str) -> str:
    """A server's text on one short line, without our key (some servers repeat it) and without control characters."""
    text = " ".join("".join(char if char.isprintable() else " " for char in without_key(text)).split())
    return text if len(text) <= 300 else f"{text[:299]}…"


class _KeyFilter(logging.Filter):
    """At level DEBUG the HTTP library logs a server's headers, which may repeat the key."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_key(record.getMessage()), ()
        return True


_key_filter = _KeyFilter()
for _name in ("httpx2", *(f"httpcore2.{part}" for part in ("connection", "http11", "proxy", "socks"))):
    logging.getLogger(_name).addFilter(_key_filter)


# ---- addresses ----


def checked_address(base_url: str) -> str:
    """A base_url that may be written down: one with a login or a query is refused, and not repeated."""
    way_out = f"leave it out and put the key into the environment: export {KEY_VARIABLES[0]}=…"
    if "@" in base_url:
        raise EngineFault(
            f"base_url holds a login (user:password@host), which would be written into the results; {way_out}"
        )
    if "?" in base_url or "#" in base_url:
        raise EngineFault(
            f"base_url holds a query (?…), which may be a key and would be written into the results; {way_out}"
        )
    try:
        url = httpx2.URL(base_url.strip())
    except httpx2.InvalidURL:
        url = httpx2.URL()
    if url.scheme not in ("http", "https") or not url.host or not base_url.isprintable() or " " in base_url.strip():
        raise EngineFault(
            f"base_url must be an http:// or https:// address, as http://localhost:8000/v1, got {base_url[:200]!r}"
        )
    path = url.raw_path.decode().rstrip("/")
    for tail in ("/chat/completions", "/completions", "/models"):
        if path.endswith(tail):
            raise EngineFault(f"base_url must end before {tail}, which is added to it, got {base_url[:200]!r}")
    return f"{url.scheme}://{url.netloc.decode()}{path}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---- exchanges ----


@dataclass(frozen=True, slots=True)
class Page:
    """What a server answered. Not shown as a whole: it may hold our key."""

    status: int
    headers: Mapping[str, str] = field(repr=False)  # names in any case
    body: bytes = field(repr=False)

    @property
    def is_html(self) -> bool:
        return "html" in self.headers.get("Content-Type", "").lower() or self.body.lstrip().startswith(b"<")

    def json(self) -> Any:
        """The body; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def says(self) -> str:
        """The server's own message, from any of the usual fields."""
        text = self.body[:100_000].decode("utf-8", "replace")
        if self.is_html:
            title = re.search(r"<title[^>]*>([^<]*)", text, re.IGNORECASE)
            return plain(title[1]) or "HTML" if title else "HTML"
        body = self.json()
        if body is None:
            return plain(text) or "no words"
        for name in ("error", "message", "detail"):
            if isinstance(body, dict) and (inner := cast("dict[str, Any]", body).get(name)):
                body = inner
        return plain(body if isinstance(body, str) else json.dumps(body, ensure_ascii=False))


@dataclass(slots=True)
class Server:
    """A server's address, and how long and how often to try."""

    base_url: str
    timeout: float  # seconds for one whole exchange
    retries: int
    proven: bool = False  # it has given a proper answer


class Session:
    """The exchanges of one run, over connections that are used again. To be used on one event loop, so nothing needs a lock."""

    def __init__(self, server: Server, notice: Callable[[str, str], None] = lambda kind, text: None) -> None:
        self.server = server
        self.repeated: Counter[str] = Counter()
        self._notice = notice
        self._hold_until = 0.0
        self._stopping = asyncio.Event()
        self._client = _client(server)

    async def __aenter__(self) -> Session:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, fault, trace)

    def stop(self) -> None:
        """Send nothing more. Answers under way still arrive."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def ask(self, path: str, asked: dict[str, Any], read: Callable[[Page], Awaitable[T]]) -> T:
        """Send `asked` until `read` accepts the answer; `read` raises `TryAgain` where another try may help."""
        tries = odd = 0
        while True:
            await self._pause(0.0)
            try:
                page = await self.exchange("POST", f"{self.server.base_url}{path}", asked)
                if page.status in (408, 409, 425, 429) or (page.status >= 500 and page.status != 501):
                    raise self._busy(page)
                answer = await read(page)
                self.server.proven = True
                return answer
            except TryAgain as again:
                fault = again
            tries, odd = tries + 1, odd + fault.odd
            if tries > self.server.retries or (odd > 1 and not self.server.proven):
                raise EngineFault(f"{fault.what}; tried {tries} times" if tries > 1 else fault.what)
            if fault.wait is not None:
                self._hold_until = max(self._hold_until, asyncio.get_running_loop().time() + fault.wait)
            self.repeated[fault.kind] += 1
            self._notice(fault.kind, f"{fault.what}; trying again")
            await self._pause(wait_before(tries, fault.wait, random.random()))

    async def get(self, url: str) -> dict[str, Any]:
        """An optional JSON object: {} where the server has none."""
        try:
            page = await self.exchange("GET", url, within=min(self.server.timeout, _CONNECT_WITHIN))
        except (TryAgain, EngineFault):
            return {}
        body = page.json() if page.status == 200 else None
        return cast("dict[str, Any]", body) if isinstance(body, dict) else {}

    async def exchange(
        self, method: str, url: str, asked: dict[str, Any] | None = None, within: float | None = None
    ) -> Page:
        """One request and its whole answer, within `within` seconds.

        The fault is raised outside the ``except``, so that its traceback holds no frame with the key.
        """
        within, where = within or self.server.timeout, self.server.base_url
        content = None if asked is None else json.dumps(asked).encode()
        passed: set[str] = set()  # the steps that the exchange reached
        try:
            # The library's own limits restart with every byte, so a server that sends slowly would never time out.
            async with asyncio.timeout(within):
                while True:
                    try:
                        return await self._sent(method, url, content, passed)
                    except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                        # An old connection that the server has closed is no fault: take another.
                        if _ANSWERED in passed or any(step.endswith(_CONNECTING) for step in passed):
                            raise
        except httpx2.ConnectTimeout:
            fault: Exception = self._unreachable(f"no connection within {_CONNECT_WITHIN:g} s")
        except TimeoutError:
            fault = TryAgain(
                "timeout", f"{where} gave no whole answer within {within:g} s (raise timeout if it is merely slow)"
            )
        except httpx2.DecodingError as error:
            fault = TryAgain("broken body", f"{where} answers with a broken encoding ({plain(str(error))})")
        except (httpx2.RequestError, OSError, UnicodeError) as error:
            untrusted = next((one for one in _causes(error) if isinstance(one, ssl.SSLCertVerificationError)), None)
            if untrusted is not None:
                fault = EngineFault(
                    f"{where}: its certificate cannot be trusted ({plain(untrusted.verify_message)}); "
                    "set SSL_CERT_FILE to its authority's"
                )
            elif _ANSWERED in passed:
                fault = TryAgain("cut", f"{where} cut the connection in mid answer ({_why(error)})")
            else:
                fault = self._unreachable(_why(error))
        raise fault

    async def _sent(self, method: str, url: str, body: bytes | None, passed: set[str]) -> Page:
        async def trace(step: str, info: dict[str, Any]) -> None:
            passed.add(step)

        headers = {} if body is None else {"Content-Type": "application/json"}
        request = self._client.build_request(
            method, url, content=body, headers=headers | key_header(), extensions={"trace": trace}
        )
        response = await self._client.send(request, stream=True)
        passed.add(_ANSWERED)
        try:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _BODY_LIMIT:
                    raise TryAgain(
                        "too long", f"{self.server.base_url} gives an answer of more than {_BODY_LIMIT >> 20} MiB"
                    )
            return Page(response.status_code, response.headers, bytes(content))
        finally:
            await response.aclose()

    async def _pause(self, seconds: float) -> None:
        """Wait, at least as long as the server asked everyone to. Ends early when the run stops."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while not self.stopping and (left := max(until, self._hold_until) - clock()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stopping.wait()
        if self.stopping:
            raise Stopped

    def _unreachable(self, why: str) -> TryAgain:
        return TryAgain(
            "no connection",
            f"{self.server.base_url} cannot be reached or hangs up ({why}); is the server running, and base_url right?",
        )

    def _busy(self, page: Page) -> TryAgain | EngineFault:
        says, where = page.says(), self.server.base_url
        if page.status == 429 and b"insufficient_quota" in page.body:
            return EngineFault(f"{where} says that the quota is used up: {says}; refill it or wait")
        wait = retry_after(page.headers.get("Retry-After"))
        if wait is not None and wait > _LONGEST_ASKED:
            return EngineFault(
                f"{where} answers {page.status} and asks to come back in {wait / 60:.0f} minutes: {says}"
            )
        asks = f" and asks to wait {wait:.0f} s" if wait else ""
        return TryAgain(str(page.status), f"{where} answers {page.status}{asks}: {says}", wait=wait)


def _client(server: Server) -> httpx2.AsyncClient:
    """A client that follows no redirect (the key would go along), keeps no cookie, and takes the environment's proxies."""
    url = httpx2.URL(server.base_url)
    try:
        # An http:// server uses no TLS, so do not read the list of authorities.
        verify = httpx2.create_ssl_context() if url.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    except (OSError, ValueError) as error:
        raise EngineFault(
            f"the authorities in SSL_CERT_FILE or SSL_CERT_DIR cannot be read ({_why(error)}); set it to a PEM file"
        ) from None
    no_cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
    try:
        return httpx2.AsyncClient(
            verify=verify,
            trust_env=not is_loopback(url.host),
            timeout=httpx2.Timeout(None, connect=_CONNECT_WITHIN),
            limits=httpx2.Limits(keepalive_expiry=_KEEP_IDLE),
            headers={"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "mless"},
            cookies=no_cookies,
        )
    except ImportError:
        why = "a SOCKS proxy needs the package socksio"
    except (ValueError, httpx2.InvalidURL):
        why = "it is no http:// or https:// address"
    # Not repeated: a proxy's address may hold a login.
    raise EngineFault(
        f"the proxy that the environment names cannot be used: {why}; correct or unset HTTP_PROXY, HTTPS_PROXY and ALL_PROXY"
    )


def wait_before(tries: int, asked: float | None, jitter: float) -> float:
    """Seconds before the next try: what the server asked for, else doubled with every try. `jitter` in [0, 1) spreads them out."""
    if asked is not None:
        return asked + 0.25 * _FIRST_WAIT * jitter
    return min(_FIRST_WAIT * 2 ** min(tries - 1, 60), _LONGEST_WAIT) * (0.5 + 0.5 * jitter)


def retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date; None where the header is missing or nonsense."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(seconds, 0.0) if seconds == seconds else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        inner = error.__cause__ or error.__context__
        # Where a name has several addresses, each may fail differently; the first reason is enough.
        error = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner


def _why(error: Exception) -> str:
    """The reason in the system's words, which say more than the library's."""
    found = [one for one in _causes(error) if isinstance(one, OSError) and one.errno is not None]
    if not found:
        return plain(str(error) or type(error).__name__)
    cause = found[-1]
    own_numbers = isinstance(cause, ssl.SSLError) or (cause.errno or 0) < 0  # of TLS and of name lookups
    return plain(str(cause.strerror) if own_numbers else os.strerror(cause.errno or 0))


# ---- the thread ----


class Background(Generic[T]):
    """Work on an event loop in a thread of its own. Iterating runs it: values it `put`s come out, then its fault is raised."""

    def __init__(self, work: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._handed: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mless-openai", daemon=True)

    def __iter__(self) -> Iterator[T]:
        self._thread.start()
        try:
            while True:
                try:
                    # A time limit, because on some systems Ctrl-C does not reach a wait without one.
                    handed = self._handed.get(timeout=0.25)
                except queue.Empty:
                    continue
                if handed is None:
                    break
                yield handed[0]
        finally:
            self.cancel()
        if self._fault is not None:
            raise self._fault

    def cancel(self) -> None:
        """End the work at once and wait for its thread. A thread in a name lookup ends by itself within seconds."""
        with self._lock:
            self._cancelled = True
            if self._task is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as fault:  # noqa: BLE001 - raised again in the thread that reads
            self._fault = fault
        finally:
            self._handed.put(None)

    async def _main(self) -> None:
        with self._lock:
            if self._cancelled:
                return
            self._task = asyncio.current_task()
        await self._work(lambda handed: self._handed.put((handed,)))
