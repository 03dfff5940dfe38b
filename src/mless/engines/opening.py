"""What an engine says of itself, and what it is opened with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mless.engines.base import Engine
from mless.errors import BadStudy
from mless.registry import found_at
from mless.values import SCOPES, Condition, Scope

if TYPE_CHECKING:
    from mless.models.loading import Description, LoadedModel


@runtime_checkable
class EngineSettings(Protocol):
    """What a study's ``[accuracy]`` or ``[likelihood]`` says that engines ask for."""

    @property
    def mode(self) -> Literal["row-stable", "batch-invariant"]: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def tensor_parallel(self) -> int | None: ...
    @property
    def base_url(self) -> str | None: ...
    @property
    def script(self) -> str | None: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def retries(self) -> int: ...


def _silent(*said: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Everything that an engine may be made from. Each takes what it needs.

    `described` is there for engines with `needs_weights`, `loaded` for those with `needs_loaded`. `longest` counts the tokens of the longest
    prompt. `most` is the number of requests in the whole study without its A/A control. The number of slots follows from it and changes
    results, so resuming must not change it.
    """

    #: As the study names it.
    model: str
    settings: EngineSettings
    longest: int
    most: int
    conditions: tuple[Condition, ...] = ()
    described: Description | None = None
    loaded: LoadedModel | None = None
    tokenizer: Any = None
    #: The tokenizer as the study names it; None where it is the model's own.
    tokenizer_name: str | None = None
    dtype: str = "auto"
    seed: int = 0
    #: Whether the user chose the server. Otherwise a study file did, and must not get the user's key sent there.
    server_named: bool = False
    #: Rows at once; None lets the engine choose.
    slots: int | None = None
    #: Whether log-probabilities of given texts are asked for, and no answers; `longest` then counts the texts too.
    scoring: bool = False
    say: Callable[[str], None] = _silent

    @property
    def length(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return self.longest + self.settings.max_new_tokens

    @property
    def with_arm(self) -> bool:
        return any(condition.arm is not None for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What an engine needs and what it can do, so that a study is refused before a model is loaded.

    `opens` makes the engine: a function of an `Opening`, or where to find it, as ``module:function``.
    """

    opens: Callable[[Opening], Engine] | str
    #: The model's files are found and described before anything else.
    needs_weights: bool = False
    #: mless loads the model, with its language-model head, into this process.
    needs_loaded: bool = False
    #: The model can be run with ARM.
    takes_arm: bool = False
    #: Its layers can be divided among GPUs (`tensor_parallel` of [accuracy] and [likelihood]).
    takes_tensor_parallel: bool = False
    #: The scopes of ARM whose answers do not depend on what else is in the batch.
    arm_scopes: tuple[Scope, ...] = SCOPES
    #: A conversation may be sent as text. Otherwise prompts are token ids, and a tokenizer is needed.
    takes_text: bool = False
    #: Whether prompts matter to it. A script answers by the item's name.
    reads_prompts: bool = True
    #: Prompts may have position ids of their own, and filler that no other token sees.
    takes_positions: bool = False
    #: Edges of attention can be cut, and parts of layers can take the values of another run (`Request.changes`).
    takes_changes: bool = False
    #: It gives log-probabilities of given text: the engine has `score` (`mless.engines.ScoringEngine`).
    scores: bool = False
    #: Fields of [accuracy] that must be given, each with the message for when it is missing.
    requires: Mapping[str, str] = field(default_factory=dict[str, str])

    def missing(self, settings: object) -> str | None:
        """The message for a required field that the settings lack; None where they are complete."""
        return next((says for name, says in self.requires.items() if not getattr(settings, name, None)), None)

    def check_arm(self, condition: Condition) -> None:
        """Refuse a condition with ARM that the engine cannot run, or whose numbers would depend on the batch."""
        if condition.arm is not None and not self.takes_arm:
            raise BadStudy(
                f"condition {condition.name!r} changes the model's activations (ARM), which a server does not let us reach: it needs the weights; use "
                "--engine hf or vllm, or leave the condition out"
            )
        if condition.arm is not None and condition.arm.scope not in self.arm_scopes:
            raise BadStudy(
                f"condition {condition.name!r}: ARM with scope {condition.arm.scope!r} pools the tokens of a call, so answers would depend on neighbours; "
                "use scope token here, or mless.arm around a generate of your own"
            )

    def check_changes(self, condition: Condition, name: str) -> None:
        """Refuse a condition with cuts or patches that the engine of this name cannot run."""
        if (condition.cut or condition.patch) and not self.takes_changes:
            raise BadStudy(
                f"condition {condition.name!r} cuts attention or takes values from another run, which engine {name!r} cannot do; use --engine hf"
            )

    def open(self, given: Opening) -> Engine:
        opens = found_at(self.opens) if isinstance(self.opens, str) else self.opens
        return opens(given)
