"""What the integrations share: a condition from model arguments, and filler put as ids into a prompt that another program rendered."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mless import tasks
from mless.errors import BadPrompt, BadStudy, EngineFault
from mless.prompting import Points, after_text, boundaries_inside, extents_of, insertion_point
from mless.results.folder import FORMAT
from mless.study.conditions import conditions_of
from mless.study.loading import validated
from mless.study.spec import ArmTable
from mless.values import Condition, parse_numbers, stored_condition

#: Model arguments that say what is done to the prompt; those of ARM are the fields of [arm] with this in front.
PROMPT_OPTIONS = ("condition", "filler", "meaningful", "length", "placement")
_ARM = "arm_"
#: A conversation is rendered with this in a text's place to see where the template puts it. Letters only: nothing escapes or trims them.
_MARK = "MLESSPLACEMARK"

Message = Mapping[str, Any]


def needed(module: str, extra: str, what: str) -> Any:
    """A module of a package that mless does not install; an error says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as fault:
        if (fault.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise EngineFault(f"{what} is not installed; install it with: pip install 'mless[{extra}]'") from None


# ---- the condition ---------------------------------------------------------------------------------------------------


def take_condition(options: dict[str, Any], who: str) -> Condition:
    """The condition that model arguments ask for; its arguments are taken out of `options`, the rest are the model's.

    `condition` names a built-in one (none, mless, mful, random, arm, mless-arm, …); `filler`, `length` and `placement` change it; any
    ``arm_…`` (arm_c, arm_fraction, arm_p1, arm_layers, arm_preset, …) runs it with ARM.
    """
    given = {key: options.pop(key) for key in PROMPT_OPTIONS if key in options}
    arm = {key.removeprefix(_ARM): options.pop(key) for key in list(options) if key.startswith(_ARM)}
    if unknown := [key for key in arm if key not in ArmTable.model_fields]:
        known = ", ".join(_ARM + key for key in ArmTable.model_fields)
        raise BadStudy(f"{who}: no argument {_ARM + unknown[0]!r}; those of ARM are: {known}")
    if isinstance(arm.get("layers"), str):
        # A comma would end the argument, so 1-3 or 1+5.
        arm["layers"] = parse_numbers(arm["layers"].replace("+", ","), 10_000, "layer")
    # Both programs read `none` as nothing.
    name = str(given.pop("condition", None) or "none")
    fields = {key: value for key, value in given.items() if value is not None}
    spec = validated(
        {"name": who, "conditions": [name], "arm": arm, "accuracy": {"again": False}, **fields}, f"of {who}"
    )
    condition = next(one for one in conditions_of(spec) if one.name == name)
    if arm and condition.arm is None:
        # As the built-in ones are called: arm, mless-arm.
        called = "arm" if name == "none" else f"{name}-arm"
        condition = replace(condition, name=called, arm=spec.arm.settings())
    if condition.again or condition.samples is not None:
        way = "ask twice" if condition.again else "ask for several samples there"
        raise BadStudy(
            f"{who}: condition {name!r} is about asking several times, which is up to the program that asks; use none and {way}"
        )
    return condition


def recorded(condition: Condition) -> dict[str, Any]:
    """A condition for another program's log, with the format number that says what its words mean."""
    return stored_condition(condition) | {"format": FORMAT}


# ---- where the texts lie ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """Where a rendered prompt shows its texts, in characters: [first, last). `system` is None where it has none."""

    question: tuple[int, int]
    system: tuple[int, int] | None = None


def find_places(render: Callable[[list[dict[str, Any]]], str], messages: Sequence[Message], rendered: str) -> Places:
    """Where `rendered`, what `render` makes of `messages`, shows the last user message and the first system message."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise BadPrompt(
            f"a conversation without a user message has no question to put filler before (roles: {', '.join(roles)})"
        )
    question = _place_of(render, messages, len(roles) - 1 - roles[::-1].index("user"), rendered)
    if question is None:
        raise BadPrompt("the chat template changes the question's text; ask without a chat template")
    system = _place_of(render, messages, roles.index("system"), rendered) if "system" in roles else None
    return Places(question, system)


def _place_of(
    render: Callable[[list[dict[str, Any]]], str], messages: Sequence[Message], which: int, rendered: str
) -> tuple[int, int] | None:
    marked = [{**message, "content": _MARK} if n == which else dict(message) for n, message in enumerate(messages)]
    shape = render(marked)
    if shape.count(_MARK) != 1:
        return None
    head, tail = shape.split(_MARK)
    text = str(messages[which]["content"])
    # Many templates trim what they are given.
    for shown in dict.fromkeys((text, text.strip(), text.lstrip(), text.rstrip())):
        if rendered == head + shown + tail:
            return len(head), len(head) + len(shown)
    return None


# ---- the filler ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filled:
    """Token ids with the filler at [at, at + count)."""

    token_ids: tuple[int, ...]
    at: int
    count: int
    #: Given where they are not 0, 1, 2, …
    position_ids: tuple[int, ...] | None = None


def key_of(text: str) -> str:
    """An item's id where only its text is known: the same under every condition and in every process."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def fill(
    tokenizer: Any,
    text: str,
    ids: Sequence[int],
    places: Places | None,
    condition: Condition,
    *,
    seed: int,
    key: str,
    extents: Sequence[tuple[int, int]] | None = None,
) -> Filled:
    """`ids`, which are `text` to this tokenizer, with the condition's filler among them; without `places` all of it is the question.

    `extents` are the characters that each id stands for, where the ids are not simply the text's.
    """
    if not condition.of_kind.placed:
        return Filled(tuple(ids), len(ids), 0)
    filler = filler_ids(tokenizer, condition, seed, key)
    at = insertion_point(_points(tokenizer, text, ids, places, extents), condition, seed=seed, item=key)
    merged = (*ids[:at], *filler, *ids[at:])
    return Filled(merged, at, len(filler), condition.of_kind.positions(condition, len(merged), at))


def filler_ids(tokenizer: Any, condition: Condition, seed: int, key: str) -> tuple[int, ...]:
    """The filler alone, as a study's prompts have it."""
    return condition.of_kind.ids(tokenizer, condition, item=key, seed=seed, sentences=_sentences())


@functools.cache
def _sentences() -> tuple[str, ...]:
    return tuple(tasks.filler_sentences())


def _points(
    tokenizer: Any,
    text: str,
    ids: Sequence[int],
    places: Places | None,
    extents: Sequence[tuple[int, int]] | None,
) -> Points:
    """Where each placement is in a prompt that another program rendered."""
    # In a prompt without a template nothing follows the question.
    last = places is None or places.question[1] == len(text)
    places = places or Places((0, len(text)))
    try:
        offsets = extents if extents is not None else _extents(tokenizer, text, ids)
    except BadPrompt as fault:
        return Points(len(ids), after_question=len(ids) if last else None, why=str(fault))
    if places.system is not None:
        before_system = _first_after(offsets, places.system[0])
    else:
        # The very beginning, but for what a model must begin with.
        before_system = _first_after(offsets, 0)
        before_system += before_system < len(ids) and ids[before_system] == tokenizer.bos_token_id
    texts = [part for part in (places.system, places.question) if part is not None]
    return Points(
        end=len(ids),
        before_system=before_system,
        before_question=_first_after(offsets, places.question[0]),
        after_question=len(ids) if last else after_text(offsets, places.question[1]),
        inside=tuple(boundaries_inside(offsets, texts)),
    )


def _first_after(offsets: Sequence[tuple[int, int]], place: int) -> int:
    """The first token that shows something at or after a character; one that straddles it belongs to what follows."""
    return next((n for n, (_, last) in enumerate(offsets) if last > place), len(offsets))


def _extents(tokenizer: Any, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """The characters of `text` that each of `ids` stands for, with special tokens or without: as `ids` have them."""
    for special in (False, True):
        try:
            encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        except NotImplementedError:
            raise BadPrompt(
                "this tokenizer does not say which characters its tokens stand for, so filler cannot be placed; use placement before-answer"
            ) from None
        if list(encoded["input_ids"]) == list(ids):
            return extents_of(tokenizer, text, ids, encoded["offset_mapping"])
    raise BadPrompt(
        "the prompt's tokens are not those of its text (was it cut to the model's length?), so filler cannot be placed; leave long items out"
    )
