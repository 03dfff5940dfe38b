"""Cuts and patches as values: which edges of attention are removed, and which part of a run takes another run's value.

They name spans, layers and heads. Which tokens those are is known once a prompt is there, which layers once a model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from mless.errors import BadStudy
from mless.gates import shown
from mless.registry import near

SpanName = Literal["start", "system", "filler", "question", "end"]
SPAN_NAMES: tuple[SpanName, ...] = get_args(SpanName)
#: What stands after a prompt: a solution's tokens, or those that were generated.
ANSWER = "answer"
#: Spans that cuts and patches may name.
NAMED_SPANS: tuple[str, ...] = (*SPAN_NAMES, ANSWER)
#: Names of several spans. Of these a prompt need not have each, as of a span that is named itself.
GROUPS: dict[str, tuple[str, ...]] = {
    "original": tuple(name for name in SPAN_NAMES if name != "filler"),
    "all": NAMED_SPANS,
}

#: Where the weight of cut edges goes: it is shared by what is left, or sent to the sink.
To = Literal["rest", "sink"]
#: What a patch may take from another run, by layer.
Part = Literal["residual", "attention-output", "mlp-output", "mlp-activation", "keys-values"]
#: Parts that only a layer with softmax attention has.
IN_ATTENTION: tuple[Part, ...] = ("attention-output", "keys-values")
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class Cut:
    """Edges of attention that are removed: from each token of `queries` to each token of `keys`, never from a token to itself.

    Both are names of spans: start, system, filler, question, end, answer; several as ``"question,end"``; ``"original"`` is all of the prompt but
    the filler, ``"all"`` everything. Layers and heads are numbered from 1: ``"all"``, ``"1-4,7"``, ``"2-"`` (from the second on). `to` says
    where the weight goes: ``rest`` (the softmax is renormalised over what is left) or ``sink`` (a learned sink, else the first token).
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    layers: str = "all"
    heads: str | None = None
    to: To = "rest"

    def __init__(
        self, queries: object, keys: object, layers: object = "all", heads: object = None, to: str = "rest"
    ) -> None:
        _set(self, "queries", _spans(queries, "a cut's queries"))
        _set(self, "keys", _spans(keys, "a cut's keys"))
        _set(self, "layers", _numbers(layers, "a cut's layers"))
        _set(self, "heads", None if heads is None else _numbers(heads, "a cut's heads"))
        if to not in get_args(To):
            raise BadStudy(f"a cut's weight goes to one of {', '.join(get_args(To))}; got {shown(to, 60)}")
        _set(self, "to", to)

    def words(self) -> str:
        """``question → filler cut in layers 2-, heads 3``."""
        heads = "" if self.heads is None else f", {_numbered('head', self.heads)}"
        where = "in all layers" if self.layers == "all" else f"in {_numbered('layer', self.layers)}"
        sink = ", weight to the sink" if self.to == "sink" else ""
        return f"{'+'.join(self.queries)} → {'+'.join(self.keys)} cut {where}{heads}{sink}"


@dataclass(frozen=True, slots=True)
class Patch:
    """A part of some layers that takes, at the tokens of the spans `at`, the value it had in another run.

    Parts: ``residual`` (what a layer hands on), ``attention-output`` (the heads' outputs before the output projection; `heads` may be named),
    ``mlp-output``, ``mlp-activation`` (what the non-linearity returns), ``keys-values``. `source` is the condition of the other run, in a study.
    """

    part: Part
    layers: str = "all"
    at: tuple[str, ...] = ("all",)
    heads: str | None = None
    source: str = ""

    def __init__(
        self, part: str, layers: object = "all", at: object = "all", heads: object = None, source: str = ""
    ) -> None:
        if part not in PARTS:
            raise BadStudy(f"no part {shown(part, 60)} to patch{near(part[:60], PARTS)}; there are: {', '.join(PARTS)}")
        _set(self, "part", part)
        _set(self, "layers", _numbers(layers, "a patch's layers"))
        _set(self, "at", _spans(at, "a patch's at"))
        _set(self, "heads", None if heads is None else _numbers(heads, "a patch's heads"))
        _set(self, "source", source)
        if heads is not None and part != "attention-output":
            raise BadStudy(
                f"a patch of {part} has no heads: only attention-output is apart by head; leave heads out, or patch attention-output"
            )

    def words(self) -> str:
        """``attention-output of mless in layer 1 at question``."""
        heads = "" if self.heads is None else f", {_numbered('head', self.heads)}"
        where = "in all layers" if self.layers == "all" else f"in {_numbered('layer', self.layers)}"
        taken = f" of {self.source}" if self.source else ""
        at = "everywhere" if self.at == ("all",) else f"at {'+'.join(self.at)}"
        return f"{self.part}{taken} {where}{heads} {at}"


def _numbered(what: str, numbers: str) -> str:
    """``layer 1``, ``layers 2-``."""
    return f"{what}{'' if numbers.isdigit() else 's'} {numbers}"


def cut_of(stored: Mapping[str, Any]) -> Cut:
    """A cut as study.json has it; what is no field of it is left aside."""
    return Cut(**{one.name: stored[one.name] for one in fields(Cut) if one.name in stored})


def patch_of(stored: Mapping[str, Any]) -> Patch:
    """A patch, likewise."""
    return Patch(**{one.name: stored[one.name] for one in fields(Patch) if one.name in stored})


def spans_of(names: Sequence[str]) -> tuple[str, ...]:
    """The spans that names stand for, in order."""
    found = {span for name in names for span in GROUPS.get(name, (name,))}
    return tuple(name for name in NAMED_SPANS if name in found)


def _set(one: object, name: str, value: object) -> None:
    object.__setattr__(one, name, value)


def _spans(given: object, what: str) -> tuple[str, ...]:
    if isinstance(given, str):
        names = [name.strip() for name in given.replace("+", ",").split(",")]
    elif isinstance(given, Sequence):
        names = [str(name) for name in cast("Sequence[object]", given)]
    else:
        raise BadStudy(f"{what} are names of spans, as 'question,end'; got {given!r}")
    known = (*NAMED_SPANS, *GROUPS)
    for name in names:
        if name not in known:
            raise BadStudy(f"{what}: no span {shown(name, 60)}{near(name[:60], known)}; there are: {', '.join(known)}")
    if not names:
        raise BadStudy(f"{what} name no span; there are: {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _numbers(given: object, what: str) -> str:
    """Numbers as they are written, "1-4,7"; which ones they are depends on the model."""
    if isinstance(given, str):
        return given.strip()
    several = cast("Iterable[object]", given) if isinstance(given, Iterable) else [given]
    found = list(several)
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int):
            raise BadStudy(f"{what} are whole numbers from 1, or a text such as '1-4,7' or '2-'; got {one!r}")
    if not found:
        raise BadStudy(f"{what}: none is named; leave them out for all of them")
    return ",".join(map(str, found))
