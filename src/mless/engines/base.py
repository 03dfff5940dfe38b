"""The interface of text generation: prompts go in as token ids, texts and token counts come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

from mless.changes import Cut, Patch
from mless.errors import BadStudy, EngineFault
from mless.values import ArmSettings, Prompt

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How answers are drawn. Temperature 0 is greedy; `stop` are texts that end an answer (they are not part of it)."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadStudy(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise BadStudy(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise BadStudy(f"top_p must lie above 0 and be at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise BadStudy(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if any(not text for text in self.stop):
            raise BadStudy("an empty stop text would end every answer before it begins; leave it out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Changes:
    """How a prompt's run is changed: edges of attention that are cut, and parts that take the values of another prompt's run (docs/cause.md).

    `source` is that prompt, of the same item, and `source_cut` what is cut in its run.
    """

    prompt: Prompt
    cut: tuple[Cut, ...] = ()
    patch: tuple[Patch, ...] = ()
    source: Prompt | None = None
    source_cut: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be drawn. (condition, item, sample) names it; `seed` belongs to (item, sample), so all conditions draw the same random
    numbers.

    Exactly one of `token_ids` and `messages` is filled. Messages, (role, text) pairs, are for servers that make the tokens themselves.
    `arm` runs the model with ARM. The first `shared` tokens are those that other prompts begin with too. `position_ids` replaces 0, 1, 2,
    …; tokens in `hidden` (start, stop) are seen only by each other. `changes` (`mless.engines.Changes`): cuts and patches of a prompt
    that holds these tokens.
    """

    condition: str
    item: str
    sample: int = 0
    seed: int = 0
    token_ids: tuple[int, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    shared: int = 0
    position_ids: tuple[int, ...] | None = None
    hidden: tuple[int, int] | None = None
    arm: ArmSettings | None = None
    changes: Changes | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.condition, self.item, self.sample


def closed(engine: Any) -> dict[str, Any]:
    """Leave an engine; what it says of itself at the end. A server shows its fingerprint with its answers."""
    try:
        return dict(engine.about())
    finally:
        engine.__exit__(None, None, None)


def by_arm(requests: Sequence[Request]) -> dict[ArmSettings | None, list[Request]]:
    """The requests grouped by their ARM settings, those without ARM first: a model runs with one setting at a time."""
    found: dict[ArmSettings | None, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.arm is not None):
        found.setdefault(request.arm, []).append(request)
    return found


@dataclass(frozen=True, slots=True)
class Way:
    """How the model runs for some requests: with one setting of ARM, the same cuts and the same patches."""

    arm: ArmSettings | None = None
    cut: tuple[Cut, ...] = ()
    patch: tuple[Patch, ...] = ()

    @property
    def changed(self) -> bool:
        return bool(self.cut or self.patch)


def by_way(requests: Sequence[Request]) -> dict[Way, list[Request]]:
    """The requests grouped by how the model runs for them; those that run it as it is come first."""
    found: dict[Way, list[Request]] = {}
    for arm, group in by_arm(requests).items():
        for request in sorted(group, key=lambda request: request.changes is not None):
            changes = request.changes
            way = Way(arm) if changes is None else Way(arm, changes.cut, changes.patch)
            found.setdefault(way, []).append(request)
    return found


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `finish` is ``length`` where it was cut off; `token_ids` are empty where an engine does not give them."""

    condition: str
    item: str
    sample: int
    text: str
    n_tokens: int
    finish: Finish
    token_ids: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        return self.condition, self.item, self.sample


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A given text after a prompt, as token ids: what is the log-probability of each of its tokens? The prompt's `sample` numbers its texts."""

    prompt: Request
    token_ids: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.prompt.key

    @property
    def whole(self) -> tuple[int, ...]:
        """The prompt's tokens and the text's."""
        return (*self.prompt.token_ids, *self.token_ids)


@dataclass(frozen=True, slots=True)
class Scored:
    """log p of each token of a given text, after the prompt and the text's tokens before it, in nats."""

    condition: str
    item: str
    sample: int
    logp: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.condition, self.item, self.sample


def check_scoring(requests: Sequence[ScoreRequest]) -> None:
    """Refuse what has no log-probabilities: a prompt without tokens, or a text without."""
    for request in requests:
        prompt = request.prompt
        if not prompt.token_ids or not request.token_ids:
            lacking = "the prompt" if not prompt.token_ids else "the text"
            raise EngineFault(
                f"item {prompt.item!r} of {prompt.condition!r}: {lacking} has no token ids, and log-probabilities are those of tokens; give a tokenizer "
                "(--tokenizer DIR), and no empty text"
            )


class OutOfMemory(EngineFault):
    """So many `slots` do not fit. Results depend on their number, so the caller halves it and starts again."""

    def __init__(self, message: str, slots: int) -> None:
        super().__init__(message)
        self.slots = slots

    def __reduce__(self) -> tuple[type[OutOfMemory], tuple[str, int]]:
        return type(self), (str(self), self.slots)  # it may come from a worker


@runtime_checkable
class Engine(Protocol):
    """The one small interface. Replies come as they finish, in any order. Each request is answered exactly once, or an error is raised."""

    def generate(self, requests: Sequence[Request], decoding: Decoding, *, live: int | None = None) -> Iterator[Reply]:
        """Answer every request; `live` asks for at most so many rows at once (the A/A control runs with another number)."""
        ...

    def about(self) -> dict[str, Any]:
        """What is recorded of the engine: its name, its mode, what it promises of repeatability, versions. Never a key."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """An engine that also gives log-probabilities of given text. Its `EngineKind` says so: `scores`."""

    def score(self, requests: Sequence[ScoreRequest], *, live: int | None = None) -> Iterator[Scored]:
        """Every request once, in any order, or an error; `live` as in `generate`."""
        ...
