"""Answers from a script instead of a model, to try a study without one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from mless.engines.base import Decoding, Finish, Reply, Request
from mless.engines.opening import Opening
from mless.errors import BadData, EngineFault
from mless.gates import an_object, json_of, read_text, shown, toml_of
from mless.limits import DATA_BYTES

#: item → text or texts, or condition → a table of those; values are checked when the engine is made.
Script = Mapping[str, Any] | Callable[[Request], str]
_FORM = 'expected {"ITEM": "text"} or {"CONDITION": {"ITEM": "text"}}, where a text may be a list of texts and "*" stands for any'


class ScriptedEngine:
    """Answers from `answers`: a function of the request, or a mapping.

    A mapping's entry is an item's text, or a table of them for one condition; ``*`` stands for any item or any condition. What fits best
    counts: (condition, item), then (condition, ``*``), (``*``, item), (``*``, ``*``). Of several texts greedy decoding takes the first, and a
    temperature above 0 draws one by the request's seed. Answers are cut at `max_new_tokens` and stop texts as a model's would be; tokens are
    those of `tokenizer`, else the words between white space. `seen` lists the requests in the order in which they were answered.
    """

    def __init__(self, answers: Script, *, tokenizer: Any = None) -> None:
        self._script = answers if callable(answers) else _lines(answers)
        self._tokenizer = tokenizer
        self.seen: list[Request] = []

    @classmethod
    def from_file(cls, path: str | Path, *, tokenizer: Any = None) -> ScriptedEngine:
        """From a .json or .toml file that holds such a mapping."""
        path = Path(path)

        def refuse(message: str) -> BadData:
            return BadData(f"the scripted answers in {shown(path)}: {message}; {_FORM}")

        text = read_text(path, DATA_BYTES, refuse)
        read = toml_of(text, refuse) if path.suffix == ".toml" else an_object(json_of(text, refuse), refuse)
        return cls(read, tokenizer=tokenizer)

    def generate(self, requests: Sequence[Request], decoding: Decoding, *, live: int | None = None) -> Iterator[Reply]:
        """Answer in the order of the requests; `live` makes no difference to a script."""
        for request in requests:
            text = self._text(request, decoding)
            self.seen.append(request)
            yield self._reply(request, text, decoding)

    def about(self) -> dict[str, Any]:
        return {
            "engine": "scripted",
            "model": None,
            "promise": "exact: the same request has the same answer; no model was asked",
            "tokens": "words" if self._tokenizer is None else "tokenizer",
        }

    def close(self) -> None:
        """Nothing is held open."""

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Refuse a script that lacks an answer, before any answer is stored."""
        if not callable(self._script):
            for request in requests:
                self._texts(request)

    def _text(self, request: Request, decoding: Decoding) -> str:
        if callable(self._script):
            text: Any = self._script(request)
            if not isinstance(text, str):
                raise EngineFault(
                    f"the scripting function must give a text for item {request.item!r} of {request.condition!r}, got {text!r}"
                )
            return text
        texts = self._texts(request)
        # random() of a seeded Random is the same in every Python version; other methods are not.
        return texts[0 if decoding.greedy else int(random.Random(request.seed).random() * len(texts))]

    def _texts(self, request: Request) -> tuple[str, ...]:
        assert not callable(self._script)
        condition, item = request.condition, request.item
        # The A/A control repeats `none`, so unless it is scripted it gives `none`'s answers.
        spoken = [condition, "none", "*"] if condition == "none-again" else [condition, "*"]
        for key in ((name, which) for name in spoken for which in (item, "*")):
            if (texts := self._script.get(key)) is not None:
                return texts
        raise EngineFault(
            f"no scripted answer for item {item!r} of condition {condition!r}; add one, or one for any item under the name '*'"
        )

    def _reply(self, request: Request, text: str, decoding: Decoding) -> Reply:
        finish: Finish = "stop"
        tokens = self._tokens(text)
        if len(tokens) > decoding.max_new_tokens:
            tokens, finish = tokens[: decoding.max_new_tokens], "length"
            text = text[: tokens[-1]] if self._tokenizer is None else self._tokenizer.decode(tokens)
        if found := [at for stop in decoding.stop if (at := text.find(stop)) >= 0]:
            text, finish = text[: min(found)], "stop"
            tokens = self._tokens(text)
        ids = () if self._tokenizer is None else tuple(tokens)
        return Reply(request.condition, request.item, request.sample, text, len(tokens), finish, ids)

    def _tokens(self, text: str) -> list[int]:
        """The tokenizer's ids; without one, where each word ends."""
        if self._tokenizer is None:
            return [word.end() for word in re.finditer(r"\S+", text)]
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def opened(given: Opening) -> ScriptedEngine:
    """The engine for a study: its script is ``accuracy.script``."""
    assert given.settings.script is not None
    return ScriptedEngine.from_file(given.settings.script, tokenizer=given.tokenizer)


def _lines(answers: Mapping[str, Any]) -> dict[tuple[str, str], tuple[str, ...]]:
    """(condition, item) → texts. An item named outside of any condition is one of condition ``*``."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for name, entry in answers.items():
        condition, table = (
            (name, cast("Mapping[str, Any]", entry)) if isinstance(entry, Mapping) else ("*", {name: entry})
        )
        for item, given in table.items():
            texts: list[Any] = (
                [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
            )
            if not texts or not all(isinstance(text, str) for text in texts):
                raise EngineFault(f"scripted answer of item {item!r}: {_FORM}, got {given!r}")
            if (condition, item) in found:
                raise EngineFault(f"item {item!r} is scripted both by itself and under condition '*'; leave one out")
            found[condition, item] = tuple(texts)
    return found
