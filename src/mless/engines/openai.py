"""Answers from any OpenAI-compatible server: vLLM, llama.cpp, ``transformers serve``, a hosted one."""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, cast

import httpx2

from mless.engines import wire
from mless.engines.base import Decoding, Finish, Reply, Request, Scored, ScoreRequest, check_scoring
from mless.engines.echoed import DRAWN, Echo, NotEchoed, read_echo, unlike
from mless.engines.opening import Opening
from mless.engines.wire import KEY_VARIABLES, Background, Page, Server, Session, Stopped, TryAgain, plain
from mless.errors import BadStudy, EngineFault

#: `Reply.n_tokens` where the server gives no count and there is no tokenizer. An estimate would look like a count.
UNKNOWN_TOKENS = -1

_MOST_TOKENS = 2**31 - 1  # what the column `n_tokens` holds; no answer is so long
_V1 = "base_url should be the part before /chat/completions, which mostly ends in /v1, as http://localhost:8000/v1"
_CAN_SCORE = (
    "log-probabilities of given text need a server whose /completions takes token ids with echo and logprobs, as vLLM's does (llama.cpp's "
    "does not); or use --engine hf or vllm"
)

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Notice:
    """A message for the user, shown once for each kind; otherwise many requests would flood the screen."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Drawn:
    request: Request
    text: str
    tokens: int | None
    finish: Finish
    reason: str


def _silent(said: str) -> None: ...


class OpenAIEngine:
    """An OpenAI-compatible server at `base_url`.

    Requests with token ids go to ``/completions`` (vLLM and llama.cpp accept ids there), requests with messages to ``/chat/completions``.
    At most `concurrency` are under way at once. After 429, 5xx, a timeout, a cut connection or a broken body, a request is tried again up
    to `retries` times, with growing waits. Other faults, and the last one, raise `EngineFault`. `n_tokens` is the server's count, else
    `tokenizer`'s count of the text, else `UNKNOWN_TOKENS` (−1); never a guess.
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
        self.base_url = wire.checked_address(base_url)
        self.model = model
        if concurrency < 1:
            raise BadStudy(f"concurrency must be at least 1 request at a time, got {concurrency}")
        if not 0 < timeout < float("inf"):
            raise BadStudy(f"timeout must be a number of seconds above 0, got {timeout}")
        if retries < 0:
            raise BadStudy(f"retries must be 0 or more, got {retries}")
        self.concurrency = concurrency
        self._server = Server(self.base_url, timeout, retries)
        self._tokenizer = tokenizer
        self._say = say
        self._said: set[str] = set()
        self._runs: list[Background[Any]] = []
        self._fingerprints: set[str] = set()
        self._server_says: dict[str, Any] | None = None
        wire.key_header()  # a key that cannot be sent is refused now

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.base_url!r}, {self.model!r})"

    def generate(self, requests: Sequence[Request], decoding: Decoding, *, live: int | None = None) -> Iterator[Reply]:
        """Answer every request, as answers come; `live` allows fewer at once than `concurrency`."""
        workers = self._workers(live)
        for request in requests:
            _check_request(request)
        return self._replies(list(requests), decoding, workers)

    def score(self, requests: Sequence[ScoreRequest], *, live: int | None = None) -> Iterator[Scored]:
        """log p of every given text, as the server echoes it. A server that does not is refused by name."""
        workers = self._workers(live)
        for request in requests:
            _check_request(request.prompt)
        check_scoring(requests)
        return self._scores(list(requests), workers)

    def about(self) -> dict[str, Any]:
        """What is recorded. The server is asked for its models and version once; what it does not say is left out."""
        if self._server_says is None:
            (self._server_says,) = Background[dict[str, Any]](self._ask_about)
        server = dict(self._server_says)
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
        """Stop all requests. Answers already returned stay valid."""
        for run in list(self._runs):
            run.cancel()

    def __enter__(self) -> OpenAIEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the run ----

    def _workers(self, live: int | None) -> int:
        if live is not None and live < 1:
            raise BadStudy(f"live must be at least 1 row, got {live}")
        return min(self.concurrency, live or self.concurrency)

    def _replies(self, requests: list[Request], decoding: Decoding, workers: int) -> Generator[Reply]:
        async def ask(session: Session, request: Request) -> _Drawn:
            path, asked = self._payload(request, decoding)
            return await session.ask(path, asked, functools.partial(self._read, session, request, asked))

        self._warn_before(requests)
        for drawn in self._answers(requests, ask, workers, "answers"):
            yield self._reply(drawn, decoding)

    def _scores(self, requests: list[ScoreRequest], workers: int) -> Generator[Scored]:
        async def ask(session: Session, request: ScoreRequest) -> tuple[ScoreRequest, Echo]:
            asked = self._score_payload(request)
            read = functools.partial(self._read_scores, session, request, asked)
            try:
                return request, await session.ask("/completions", asked, read)
            except EngineFault as fault:
                # Some servers refuse echo as if they had failed, with a status that is tried again.
                if not re.search(r"\becho\b|logprobs", str(fault)) or _CAN_SCORE in str(fault):
                    raise
                raise EngineFault(f"{fault}; {_CAN_SCORE}") from None

        self._warn_before([request.prompt for request in requests])
        for request, echo in self._answers(requests, ask, workers, "log-probabilities"):
            self._check_tokens(request, echo)
            yield Scored(*request.key, echo.logp)

    def _answers(
        self, requests: list[R], ask: Callable[[Session, R], Awaitable[T]], workers: int, what: str
    ) -> Generator[T]:
        """What `ask` makes of each request, as it comes; at most `workers` are under way."""
        if not requests:
            return
        repeated: Counter[str] = Counter()
        run = Background(functools.partial(self._work, requests, ask, workers, repeated))
        self._runs.append(run)
        done, fault = 0, None
        try:
            for event in run:
                if isinstance(event, _Notice):
                    self._say_once(event.kind, event.text)
                else:
                    done += 1
                    yield cast("T", event)
        except EngineFault as error:
            fault = error
        finally:
            run.cancel()
            self._runs.remove(run)
        if fault is None and done < len(requests):
            fault = EngineFault("the engine was closed while answers were being drawn")
        if fault is not None:
            raise EngineFault(
                f"{fault}. {done} of the {len(requests)} {what} asked for have come and are kept; the same command goes on from there"
            )
        if repeated:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(repeated.items()))
            self._say(
                f"{repeated.total()} requests had to be sent again ({kinds}); each of the {done} was answered once"
            )

    async def _work(
        self,
        requests: list[R],
        ask: Callable[[Session, R], Awaitable[T]],
        workers: int,
        repeated: Counter[str],
        put: Callable[[T | _Notice], None],
    ) -> None:
        """Send all requests, `workers` at a time. After a fault nothing more is sent; answers to sent requests still arrive."""
        left, faults = iter(requests), list[Exception]()

        async def worker(session: Session) -> None:
            try:
                while not session.stopping and (request := next(left, None)) is not None:
                    put(await ask(session, request))
            except Stopped:
                pass
            except Exception as fault:  # noqa: BLE001 - raised below, when the others have ended
                faults.append(fault)
                session.stop()

        async with Session(self._server, lambda kind, text: put(_Notice(kind, text))) as session:
            await asyncio.gather(*(worker(session) for _ in range(min(workers, len(requests)))))
            repeated.update(session.repeated)
        if faults:
            raise faults[0]

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

    def _score_payload(self, request: ScoreRequest) -> dict[str, Any]:
        # At temperature 1 log-probabilities are the model's own, also of a server that scales them. What is drawn is thrown away.
        return {
            "model": self.model,
            "prompt": list(request.whole),
            "max_tokens": DRAWN,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
        }

    def _check_tokens(self, request: ScoreRequest, echo: Echo) -> None:
        """Refuse another tokenizer than the server's: its ids mean other tokens there. Runs in the reader's thread, as `_reply`."""
        if self._tokenizer is None or echo.texts is None:
            return
        if (found := unlike(echo.texts, request.token_ids, self._tokenizer)) is not None:
            raise EngineFault(
                f"{self.base_url} reads a token of item {request.prompt.item!r} as {plain(found[0])!r}, which the tokenizer reads as {plain(found[1])!r}: it "
                "is not the served model's; give that one with --tokenizer"
            )

    def _reply(self, drawn: _Drawn, decoding: Decoding) -> Reply:
        """Runs in the reader's thread: tokenizers are not safe in several."""
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
        if (blanked := wire.answer_without_key(text)) != text:
            text = blanked
            self._say_once("key in answers", "the server repeats our key in its answers; it is stored as [key]")
        # Some servers leave the stop text in, some cannot stop at it.
        if found := [at for stop in decoding.stop if (at := text.find(stop)) >= 0]:
            text, finish = text[: min(found)], "stop"
        return Reply(request.condition, request.item, request.sample, text, tokens, finish)

    # ---- what a server answers ----

    async def _refused(self, session: Session, page: Page, request: Request, asked: dict[str, Any]) -> EngineFault:
        says, status = page.says(), page.status
        if status in (401, 403):
            name = wire.key_variable()
            if name is None:
                return EngineFault(
                    f"{self.base_url} demands a key ({status}: {says}), and none is set; put it into the environment: "
                    f"export {KEY_VARIABLES[0]}=… (or {KEY_VARIABLES[1]})"
                )
            return EngineFault(
                f"{self.base_url} refuses the key in ${name} ({status}: {says}); set {name} to a valid one"
            )
        if 300 <= status < 400:
            target = plain(page.headers.get("Location") or "elsewhere")
            return EngineFault(
                f"{self.base_url} sends on to {target} ({status}), which is not followed; give the right base_url"
            )
        where, likely = (
            f"item {request.item!r} of {request.condition!r}",
            await self._likely(session, page, says, asked),
        )
        return EngineFault(f"{self.base_url} refuses {where} ({status}: {says}); {likely}")

    async def _likely(self, session: Session, page: Page, says: str, asked: dict[str, Any]) -> str:
        text = says.lower()
        if "echo" in asked:
            return await self._likely_of_scores(session, page, text)
        if page.status == 405 or page.is_html or re.fullmatch(r"(\w+ )?not found\.?|no words", text):
            return _V1
        if "top_k" in text and "top_k" in asked:
            return "this server does not know top_k; leave it at 0"
        if re.search(r"context|too long|maximum", text):
            return "prompt and max_new_tokens together may exceed its context: lower max_new_tokens"
        if "prompt" in asked and re.search(r"prompt|token|\bstr(ing)?\b|\binput\b", text):
            return "it may not accept prompts as token ids: run without --tokenizer, so that text is sent"
        if page.status == 404 or re.search(r"model|pinned", text):
            served = await self._served_models(session)
            return (
                f"it serves: {', '.join(served)}; choose with --model" if served else "is --model the name it serves?"
            )
        return f"if that does not say it: {_V1}"

    async def _likely_of_scores(self, session: Session, page: Page, text: str) -> str:
        if re.search(r"context|too long|maximum", text):
            return "prompt and text together may exceed its context: leave such items out"
        if re.search(r"model|pinned", text) and not re.search(r"echo|logprob", text):
            served = await self._served_models(session)
            return f"it serves: {', '.join(served)}; choose with --model" if served else "is --model its name there?"
        if page.status in (404, 405, 501) or page.is_html:
            return f"it may have /chat/completions only: {_CAN_SCORE}; and {_V1}"
        return _CAN_SCORE

    async def _body(self, session: Session, request: Request, asked: dict[str, Any], page: Page) -> dict[str, Any]:
        """The JSON object of an answer. What is none is refused, or tried again."""
        if not 200 <= page.status < 300:
            raise await self._refused(session, page, request, asked)
        body = page.json()
        if not isinstance(body, dict) and (page.is_html or not page.body.lstrip().startswith(b"{")):
            what = "an HTML page" if page.is_html else "something that is no JSON object"
            raise TryAgain("page", f"{self.base_url} answers with {what} ({page.says()}); {_V1}", odd=True)
        if body is None:
            raise TryAgain("broken body", f"{self.base_url} answers with broken JSON ({len(page.body)} bytes)")
        fields = cast("dict[str, Any]", body)
        if isinstance(fingerprint := fields.get("system_fingerprint"), str):
            self._fingerprints.add(plain(fingerprint))
        return fields

    async def _read(self, session: Session, request: Request, asked: dict[str, Any], page: Page) -> _Drawn:
        fields = await self._body(session, request, asked, page)
        choices = fields.get("choices")
        first: Any = choices[0] if isinstance(choices, list) and choices else None
        text = _text_of(first)
        if text is None:
            raise TryAgain("no choices", f"{self.base_url} answers without choices ({page.says()}); {_V1}", odd=True)
        reason = plain(str(first.get("finish_reason") or "stop"))
        return _Drawn(request, text, _count_in(fields), "length" if reason == "length" else "stop", reason)

    async def _read_scores(self, session: Session, request: ScoreRequest, asked: dict[str, Any], page: Page) -> Echo:
        fields = await self._body(session, request.prompt, asked, page)
        if not isinstance(fields.get("choices"), list):
            raise TryAgain("no choices", f"{self.base_url} answers without choices ({page.says()}); {_V1}", odd=True)
        try:
            return read_echo(fields, asked["prompt"], len(request.prompt.token_ids))
        except NotEchoed as why:
            raise EngineFault(f"{self.base_url} {plain(str(why))}; {_CAN_SCORE}") from None

    # ---- what the server says of itself ----

    async def _served_models(self, session: Session) -> list[str]:
        data: Any = (await session.get(f"{self.base_url}/models")).get("data")
        if not isinstance(data, list):
            return []
        ids = (entry.get("id") for entry in cast("list[Any]", data) if isinstance(entry, dict))
        return sorted(plain(name) for name in ids if isinstance(name, str))[:20]

    async def _ask_about(self, put: Callable[[dict[str, Any]], None]) -> None:
        said: dict[str, Any] = {}
        async with Session(self._server) as session:
            if models := await self._served_models(session):
                said["models"] = models
            if self.base_url.endswith("/v1"):
                version = (await session.get(f"{self.base_url.removesuffix('/v1')}/version")).get(
                    "version"
                )  # vLLM's place
                if isinstance(version, str):
                    said["version"] = plain(version)
        put(said)

    # ---- notes to the user ----

    def _warn_before(self, requests: Sequence[Request]) -> None:
        if any(request.messages for request in requests):
            self._say_once(
                "messages",
                "prompts are sent as text, so the server decides how many tokens the filler has and where they stand; "
                "give --tokenizer to send token ids (vLLM and llama.cpp take them)",
            )
        name, url = wire.key_variable(), httpx2.URL(self.base_url)
        host = url.host
        if name is None or wire.is_loopback(host):
            return
        if url.scheme == "http":
            self._say_once(
                "key", f"the key in ${name} goes to {host} unencrypted; use https:// where the server has it"
            )
        elif name == KEY_VARIABLES[1] and not f".{host}".endswith(".openai.com"):
            self._say_once(
                "key", f"the key in ${name} is sent to {host}; set {KEY_VARIABLES[0]} if that server has one of its own"
            )

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


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
    if request.changes is not None:
        raise EngineFault(f"{where} has cuts or patches, which no server offers; use engine 'hf' for that condition")
    if bool(request.token_ids) == bool(request.messages):
        raise EngineFault(f"{where}: expected token ids or messages, got {'both' if request.messages else 'neither'}")


def _count_in(body: dict[str, Any]) -> int | None:
    """The server's token count; None where it is missing or not a number."""
    usage = body.get("usage")
    count = cast("dict[str, Any]", usage).get("completion_tokens") if isinstance(usage, dict) else None
    known = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MOST_TOKENS
    return cast(int, count) if known else None


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
    # Half a surrogate pair is valid in JSON but cannot be written to a file.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def opened(given: Opening) -> OpenAIEngine:
    """The engine for a study."""
    settings = given.settings
    assert settings.base_url is not None
    base_url = wire.checked_address(settings.base_url)
    if not given.server_named:
        wire.refuse_unnamed(base_url)
    return OpenAIEngine(
        base_url,
        given.model,
        tokenizer=given.tokenizer,
        concurrency=settings.concurrency,
        timeout=settings.timeout,
        retries=settings.retries,
        say=given.say,
    )
