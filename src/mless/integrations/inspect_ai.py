"""The model provider `mless` of Inspect: mless's own engine, with a condition's filler in the prompt and ARM in the model.

    inspect eval task.py --model mless/<model> -M condition=mless -M length=55 -M arm_c=0.13

Inspect finds it by its entry point. Requests that arrive together are answered together, and no answer depends on the others: the engine is
row-stable. What a request asks for and the engine cannot do is refused by name.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mless import templates
from mless.errors import BadPrompt, BadStudy
from mless.integrations.filling import Places, fill, find_places, key_of, needed, recorded, take_condition
from mless.prompting import encode
from mless.values import Condition, Prompt, Span

if TYPE_CHECKING:
    from mless.engines.base import Decoding, Reply, Request
    from mless.engines.hf import HfEngine

# Typed loosely: lint must pass where Inspect is not installed.
_model: Any = needed("inspect_ai.model", "inspect", "Inspect")
_samples: Any = importlib.import_module("inspect_ai.log._samples")  # it has no public name for the current epoch
WHO = "the Inspect provider 'mless'"

#: Tokens of prompt and answer together, unless -M context says otherwise: the size of a row's cache. Results depend on it.
CONTEXT = 2048
MAX_TOKENS = 512
#: Rows of one forward. Results depend on it.
SLOTS = {"cpu": 8}
#: Seconds that the engine waits for further requests, because Inspect sends its samples one after another.
_WAIT_FOR_MORE = 0.05
_POLL = 0.01
#: Options that change what is drawn and that the engine does not have. Those about connections, caching and retries are Inspect's own.
_REFUSED = (
    "best_of", "frequency_penalty", "presence_penalty", "logit_bias", "num_choices", "logprobs", "top_logprobs", "prompt_logprobs", "effort",
    "reasoning_effort", "reasoning_mode", "reasoning_tokens", "response_schema", "extra_body", "modalities", "verbosity", "batch",
)  # fmt: skip


@_model.modelapi(name="mless")
def mless() -> Any:
    """What the entry point registers; torch loads only where the provider is used."""
    return MlessAPI


class MlessAPI(_model.ModelAPI):
    """A model of mless's under a condition.

    Arguments (-M): `condition`, `filler`, `length`, `placement`, `condition_seed` and ARM's, as `arm_c`; `prompt` (auto, chat, raw), `dtype`,
    `device`, `device_map`, `device_memory`, `tokenizer`, `trust_remote_code`; `slots` and `context`, on which results depend.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Any = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or _model.GenerateConfig())
        if base_url is not None:
            raise BadStudy(
                f"{WHO} runs the model in this process and takes no base URL, got {base_url!r}; leave it out"
            )
        self.condition: Condition = take_condition(model_args, WHO)
        asked = _Asked.take(model_args)
        self._seed: int = asked.condition_seed
        self._worker = _Worker(model_name, asked)
        self._kind = self._worker.kind
        self._serial = itertools.count()
        # How often each conversation has been asked: within each of Inspect's samples that runs, and outside of any.
        self._inside: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
        self._outside: Counter[str] = Counter()

    # ---- what Inspect asks a provider ----------------------------------------------------------------------------------

    def max_tokens(self) -> int:
        return MAX_TOKENS

    def max_connections(self) -> int:
        return self._worker.slots

    def collapse_user_messages(self) -> bool:
        return True

    def collapse_system_messages(self) -> bool:
        return True

    def connection_key(self) -> str:
        return self.model_name

    def should_retry(self, ex: Exception) -> bool:
        """Never: the same request would fail in the same way."""
        return False

    def close(self) -> None:
        self._worker.close()

    async def generate(self, input: list[Any], tools: list[Any], tool_choice: Any, config: Any) -> Any:
        """One answer. Its random numbers follow from the seed, the conversation, and Inspect's sample and epoch, in whatever order they run."""
        import anyio

        if tools:
            raise BadStudy(
                f"{WHO} calls no tools, got {', '.join(tool.name for tool in tools)}; use a task without tools"
            )
        _refuse(config)
        messages = self._worded([_plain(message) for message in input])
        decoding = self._decoding(config)
        sample = _samples.sample_active()
        # No two requests under way may have one name.
        name = f"{sample.sample.id if sample is not None else 'request'} #{next(self._serial)}"
        request = self._request(messages, name, self._answer_seed(config.seed, messages, decoding, sample))
        began = time.monotonic()
        future = self._worker.ask(request, decoding)
        try:
            while not future.done():
                await anyio.sleep(_POLL)
        finally:
            future.cancel()  # no longer awaited; a finished one stays finished
        return self._output(future.result(), len(request.token_ids), time.monotonic() - began)

    def _answer_seed(self, seed: int | None, messages: list[dict[str, Any]], decoding: Decoding, sample: Any) -> int:
        """The seed of an answer's random numbers. Each epoch has its own, so a retry of epoch 2 alone draws as epoch 2."""
        place = (str(sample.sample.id), sample.epoch) if sample is not None else ()
        times = self._inside.setdefault(sample, Counter()) if sample is not None else self._outside
        key = key_of(repr((messages, decoding)))
        drawn = hashlib.sha256(repr((seed or 0, key_of(repr(messages)), *place, times[key])).encode()).digest()
        times[key] += 1
        return int.from_bytes(drawn[:8], "big") >> 1

    # ---- from a conversation to a request ------------------------------------------------------------------------------

    def _worded(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as the condition words it."""
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            raise BadPrompt(f"{WHO}: a conversation needs a user message, got {', '.join(roles) or 'nothing'}")
        if self.condition.system is not None:
            system = {"role": "system", "content": self.condition.system}
            messages = [system, *(message for message in messages if message["role"] != "system")]
        if self.condition.question is not None:
            last = max(n for n, message in enumerate(messages) if message["role"] == "user")
            asked = self.condition.question.replace("{question}", messages[last]["content"])
            messages = [{**message, "content": asked} if n == last else message for n, message in enumerate(messages)]
        return messages

    def _request(self, messages: list[dict[str, Any]], item: str, seed: int) -> Request:
        from mless.engines.base import Request
        from mless.study.subject import check_prompt

        tokenizer = self._worker.tokenizer
        if self._kind == "chat":

            def render(some: Sequence[Any]) -> str:
                return templates.render(tokenizer, some)

            text = render(messages)
            places = find_places(render, messages, text)
            ids, extents = tokenizer(text, add_special_tokens=False).input_ids, None
        else:
            roles = [message["role"] for message in messages]
            if roles not in (["user"], ["system", "user"]):
                raise BadPrompt(
                    f"{WHO}: without a chat template a prompt is a system and a user message, got {', '.join(roles)}; put all in one user message"
                )
            text = "\n".join(message["content"] for message in messages)
            # Filler before the question goes before the line break, as in a study's raw prompts; a token such as ".\n" is split there.
            front = len(messages[0]["content"]) if len(messages) > 1 else 0
            places = Places((front, len(text)), (0, front) if front else None)
            ids, extents = encode(tokenizer, text, special=True, split_at=front or None)
        # Of the question alone, so that a filler of natural text is the item's own whatever the condition's system text.
        filled = fill(
            tokenizer,
            text,
            ids,
            places,
            self.condition,
            seed=self._seed,
            key=key_of(messages[-1]["content"]),
            extents=extents,
        )
        whole = Span("question", 0, len(filled.token_ids))
        check_prompt(self._worker.model, Prompt(item, self.condition.name, filled.token_ids, (whole,), text))
        hidden = (filled.at, filled.at + filled.count) if self.condition.hidden else None
        return Request(
            self.condition.name,
            item,
            seed=seed,
            token_ids=filled.token_ids,
            position_ids=filled.position_ids,
            hidden=hidden,
            arm=self.condition.arm,
        )

    def _decoding(self, config: Any) -> Decoding:
        from mless.engines.base import Decoding

        warm = config.temperature if config.temperature is not None else self.condition.temperature
        return Decoding(
            max_new_tokens=config.max_tokens or MAX_TOKENS,
            # Greedy where nothing is asked for, as in a study.
            temperature=warm if warm is not None else 0.0,
            top_p=config.top_p if config.top_p is not None else 1.0,
            top_k=config.top_k or 0,
            stop=tuple(config.stop_seqs or ()),
        )

    def _output(self, reply: Reply, prompt: int, seconds: float) -> Any:
        choice = _model.ChatCompletionChoice(
            message=_model.ChatMessageAssistant(content=reply.text, model=self.model_name, source="generate"),
            stop_reason="stop" if reply.finish == "stop" else "max_tokens",
        )
        usage = _model.ModelUsage(
            input_tokens=prompt, output_tokens=reply.n_tokens, total_tokens=prompt + reply.n_tokens
        )
        # `mless import` reads the condition from Inspect's log.
        about = {"mless_condition": recorded(self.condition), "mless_engine": self._worker.about}
        return _model.ModelOutput(model=self.model_name, choices=[choice], usage=usage, time=seconds, metadata=about)


def _plain(message: Any) -> dict[str, Any]:
    """Role and text; what is not text is refused."""
    if message.role == "tool" or getattr(message, "tool_calls", None):
        raise BadPrompt(
            f"{WHO} calls no tools, so it cannot go on with a conversation that has; use a task without tools"
        )
    if not isinstance(message.content, str):
        for part in message.content:
            if part.type not in ("text", "reasoning"):
                raise BadPrompt(
                    f"{WHO} reads text only, got {part.type!r} in a {message.role} message; use a task of texts"
                )
    return {"role": message.role, "content": message.text}


def _refuse(config: Any) -> None:
    given = [name for name in _REFUSED if getattr(config, name, None) not in (None, False, [], {})]
    if "num_choices" in given and config.num_choices == 1:
        given.remove("num_choices")
    if given:
        raise BadStudy(
            f"{WHO} cannot honour {', '.join(given)}; it has max_tokens, temperature, top_p, top_k, seed and stop_seqs: leave the others out"
        )


# ---- the engine, in a thread of its own ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    """How the model is to be loaded and run."""

    prompt: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    device_memory: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    slots: int | None = None
    context: int | None = None
    mode: Any = "row-stable"
    condition_seed: int = 0

    @classmethod
    def take(cls, options: dict[str, Any]) -> _Asked:
        if unknown := [name for name in options if name not in cls.__slots__]:
            raise BadStudy(
                f"{WHO}: no argument {unknown[0]!r}; there are: condition, filler, length, placement, arm_…, {', '.join(cls.__slots__)}"
            )
        return cls(**options)


class _Worker:
    """Loads the model, and answers what has come together while it was busy. The model is touched by its thread alone, once it runs."""

    def __init__(self, name: str, asked: _Asked) -> None:
        from mless.engines.hf import HfEngine
        from mless.models import load
        from mless.prompting import resolve_kind

        if asked.prompt == "user":
            raise BadStudy(f"{WHO}: which turn holds which text is Inspect's to say; prompt is auto, chat or raw")
        model = load(
            name,
            tokenizer=asked.tokenizer,
            dtype=asked.dtype,
            device=asked.device,
            device_map=asked.device_map,
            device_memory=asked.device_memory,
            head=True,
            trust_remote_code=asked.trust_remote_code,
        )
        self.model = model
        self.tokenizer: Any = model.tokenizer
        self.kind = resolve_kind(asked.prompt, model.tokenizer, model.label)
        self.slots: int = asked.slots or SLOTS.get(model.device.type, 32)
        length = asked.context or min(CONTEXT, model.context)
        self._engine: HfEngine = HfEngine(model, length=length, slots=self.slots, mode=asked.mode)
        self._room = length
        self.about = self._engine.about()
        self._asked: queue.Queue[tuple[Request, Decoding, Future[Reply]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="mless", daemon=True)
        self._thread.start()

    def ask(self, request: Request, decoding: Decoding) -> Future[Reply]:
        need = len(request.token_ids) + decoding.max_new_tokens
        if need > self._room:
            raise BadPrompt(
                f"{WHO}: a prompt of {len(request.token_ids)} tokens and an answer of up to {decoding.max_new_tokens} need {need}, but this model was "
                f"opened for {self._room}; give -M context={need}, or a smaller --max-tokens"
            )
        future: Future[Reply] = Future()
        self._asked.put((request, decoding, future))
        return future

    def close(self) -> None:
        """Answer nothing more, and give the memory back."""
        if self._thread.is_alive():
            self._asked.put(None)
            self._thread.join()
        self._engine.close()

    def _serve(self) -> None:
        while True:
            together: dict[Decoding, list[tuple[Request, Future[Reply]]]] = defaultdict(list)
            closing = not self._gather(together)
            for decoding, asked in together.items():
                self._answer(decoding, asked)
            if closing:
                return

    def _gather(self, together: dict[Decoding, list[tuple[Request, Future[Reply]]]]) -> bool:
        """Wait for a request and for those that come right behind it; False once nothing more will come."""
        one = self._asked.get()
        count = 0
        while one is not None:
            request, decoding, future = one
            if future.set_running_or_notify_cancel():
                together[decoding].append((request, future))
                count += 1
            try:
                # All waiting requests are taken; the engine admits them as rows become free.
                one = self._asked.get(timeout=_WAIT_FOR_MORE if count < self.slots else 0.001)
            except queue.Empty:
                return True
        return False

    def _answer(self, decoding: Decoding, asked: list[tuple[Request, Future[Reply]]]) -> None:
        waiting = {request.key: future for request, future in asked}
        try:
            for reply in self._engine.generate([request for request, _ in asked], decoding):
                waiting.pop(reply.key).set_result(reply)
        except Exception as fault:  # noqa: BLE001 - this thread has no caller: without the error the waiting requests would wait for ever
            for future in waiting.values():
                future.set_exception(fault)
