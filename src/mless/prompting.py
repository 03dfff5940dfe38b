"""Items × condition → token ids with spans, and the alignment of two prompts of one item.

Filler is inserted as *ids* into the rendered prompt, never as text: slashes merge ("/////" is one token in most tokenizers), and
only so do both prompts of a pair hold the original tokens with identical ids, which is what makes alignment exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mless.errors import BadPrompt
from mless.values import Condition, Item, Prompt, Span, SpanName

SYSTEM_TEXT = "Please reason step by step and put your final answer within \\boxed{}."
PromptKind = Literal["chat", "raw"]

# What a template is rendered with to see where it puts the two texts. Letters only, so that no template escapes or trims them.
_SYSTEM_MARK, _QUESTION_MARK = "MLESSSYSTEMMARK", "MLESSQUESTIONMARK"


@dataclass(frozen=True, slots=True)
class Rendered:
    """An item's original prompt: tokens, each with its span name, and where filler of each placement goes."""

    token_ids: tuple[int, ...]
    names: tuple[SpanName, ...]
    before_system: int
    before_question: int


def resolve_kind(asked: str, tokenizer: Any, label: str) -> PromptKind:
    """``auto`` is chat where the tokenizer has a template, else raw."""
    has = bool(getattr(tokenizer, "chat_template", None))
    if asked == "auto":
        return "chat" if has else "raw"
    if asked == "chat" and not has:
        raise BadPrompt(
            f"{label} has no chat template, but --prompt chat asks for one; use --prompt raw, or --tokenizer with a template"
        )
    if asked not in ("chat", "raw"):
        raise BadPrompt(f"no prompt kind {asked!r}; there are: auto, chat, raw")
    return asked  # pyright: ignore[reportReturnType]


def build_prompts(
    tokenizer: Any,
    items: Sequence[Item],
    condition: Condition,
    *,
    kind: PromptKind,
    system: str = SYSTEM_TEXT,
    seed: int = 0,
    sentences: Sequence[str] = (),
) -> Iterator[Prompt]:
    """One prompt per item. `sentences` are what ``text`` fillers are cut from."""
    repeated = _repeated_token(tokenizer, condition.filler or "") if condition.kind == "repeat" else None
    for item in items:
        rendered = render(tokenizer, item, kind=kind, system=system)
        if condition.kind == "none":
            filler: tuple[int, ...] = ()
        elif repeated is not None:
            filler = (repeated,) * condition.length
        else:
            filler = _natural_text(tokenizer, sentences, condition.length, _rng(seed, "text", item.id))
        at = _insertion_point(rendered, condition, _rng(seed, "anywhere", item.id))
        yield _assemble(tokenizer, item, condition, rendered, filler, at)


def _rng(seed: int, purpose: str, item: str) -> random.Random:
    # A string seed is hashed with sha512 inside `random`, so the draw is the same in every process and version.
    return random.Random(f"{seed}/{purpose}/{item}")


def _assemble(
    tokenizer: Any, item: Item, condition: Condition, rendered: Rendered, filler: tuple[int, ...], at: int
) -> Prompt:
    ids = rendered.token_ids[:at] + filler + rendered.token_ids[at:]
    names = rendered.names[:at] + ("filler",) * len(filler) + rendered.names[at:]
    spans: list[Span] = []
    for position, name in enumerate(names):
        if spans and spans[-1].name == name:
            spans[-1] = Span(name, spans[-1].start, position + 1)
        else:
            spans.append(Span(name, position, position + 1))
    prompt = Prompt(
        item.id, condition.name, ids, tuple(spans), tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    )
    if tuple(ids[i] for i in prompt.original) != rendered.token_ids:
        raise BadPrompt(
            f"item {item.id!r}: inserting filler changed the original tokens; this is a defect, please report it"
        )
    return prompt


# ---- rendering -------------------------------------------------------------------------------------------------------


def render(tokenizer: Any, item: Item, *, kind: PromptKind, system: str = SYSTEM_TEXT) -> Rendered:
    """The item's prompt without filler."""
    if not item.question.strip():
        raise BadPrompt(f"item {item.id!r} has an empty question; leave it out of the data")
    if kind == "raw":
        text = f"{system}\n{item.question}"
        system_at, system_end, question_at = 0, len(system), len(system) + 1
    else:
        text, system_at, question_at = _render_chat(tokenizer, item, system)
        system_end = question_at
    # A chat template writes its own special tokens; raw text gets the tokenizer's.
    encoded = tokenizer(text, add_special_tokens=kind == "raw", return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    question_end = question_at + len(item.question)
    marks: list[tuple[int, SpanName]] = [(question_end, "end"), (question_at, "question"), (system_at, "system")]
    names: list[SpanName] = []
    for first, last in encoded["offset_mapping"]:
        # The token's last character decides, so a token that straddles two spans belongs to the later one. Special tokens
        # that stand for no text (first == last) belong to what surrounds them.
        where = last - 1 if last > first else first
        found: list[SpanName] = [name for mark, name in marks if where >= mark]
        names.append(found[0] if found else "start")
    _settle_textless(names, encoded["offset_mapping"])
    if "question" not in names:
        raise BadPrompt(f"item {item.id!r}: the question has no token of its own in the rendered prompt")
    before_question = names.index("question")
    # Raw prompts carry a line break between the two texts; filler goes before it, as published, where that is a token boundary.
    inside = [i for i, (first, last) in enumerate(encoded["offset_mapping"]) if last > first and first >= system_end]
    before_question = min(before_question, inside[0]) if inside else before_question
    before_system = names.index("system") if "system" in names else before_question
    return Rendered(tuple(ids), tuple(names), before_system, before_question)


def _settle_textless(names: list[SpanName], offsets: Sequence[tuple[int, int]]) -> None:
    """Tokens without text at either end (BOS, EOS): the front ones are `start`, the rear ones `end`."""
    real = [i for i, (first, last) in enumerate(offsets) if last > first]
    for i in range(len(names)):
        if not real or i < real[0]:
            names[i] = "start"
        elif i > real[-1]:
            names[i] = "end"


def _render_chat(tokenizer: Any, item: Item, system: str) -> tuple[str, int, int]:
    """The rendered conversation and where its two texts begin."""

    def apply(system_text: str, question: str) -> str:
        messages = [{"role": "system", "content": system_text}, {"role": "user", "content": question}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    try:
        shape = apply(_SYSTEM_MARK, _QUESTION_MARK)
        folded = False
    except Exception as fault:  # noqa: BLE001  (a template may raise anything; some refuse the system role)
        folded = True
        try:
            shape = _fold(tokenizer, _SYSTEM_MARK, _QUESTION_MARK)
        except Exception:  # noqa: BLE001
            raise BadPrompt(
                f"the chat template cannot be rendered ({str(fault).splitlines()[0]}); use --prompt raw"
            ) from None
    if shape.count(_SYSTEM_MARK) != 1 or shape.count(_QUESTION_MARK) != 1:
        if not folded:
            shape, folded = _fold(tokenizer, _SYSTEM_MARK, _QUESTION_MARK), True
        if shape.count(_SYSTEM_MARK) != 1 or shape.count(_QUESTION_MARK) != 1:
            raise BadPrompt("the chat template does not show system text and question once each; use --prompt raw")
    text = _fold(tokenizer, system, item.question) if folded else apply(system, item.question)
    head, rest = shape.split(_SYSTEM_MARK)
    middle, tail = rest.split(_QUESTION_MARK)
    if text != head + system + middle + item.question + tail:
        # Templates commonly trim the user's text; then the question that is really shown is looked for instead.
        raise BadPrompt(
            f"item {item.id!r}: the chat template changes the question's text (it may begin or end with blanks); trim it, or use --prompt raw"
        )
    return text, len(head), len(head) + len(system) + len(middle)


def _fold(tokenizer: Any, system: str, question: str) -> str:
    """For templates without a system role: the system text opens the user's turn."""
    messages = [{"role": "user", "content": f"{system}\n\n{question}"}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# ---- fillers ---------------------------------------------------------------------------------------------------------


def _repeated_token(tokenizer: Any, filler: str) -> int:
    """The one token that `filler` is when it is repeated; else an error that says what it splits into."""
    times = 8
    carrier: list[int] = tokenizer("a", add_special_tokens=False).input_ids
    ids: list[int] = tokenizer("a" + filler * times, add_special_tokens=False).input_ids
    body = ids[len(carrier) :] if ids[: len(carrier)] == carrier else ids
    if len(body) == times and len(set(body)) == 1:
        return body[0]
    alone: list[int] = tokenizer(filler, add_special_tokens=False).input_ids
    shown = ", ".join(repr(tokenizer.decode([i])) for i in body[:6]) + ("…" if len(body) > 6 else "")
    if len(alone) == 1:
        way = f"such as {' ' + filler!r}" if not filler[:1].isspace() else "such as ' /'"
        raise BadPrompt(
            f"filler {filler!r} is one token alone, but {times} of them in a row become {len(body)}: {shown}; "
            f"take one that does not merge, {way}"
        )
    parts = ", ".join(repr(tokenizer.decode([i])) for i in alone)
    raise BadPrompt(
        f"filler {filler!r} is {len(alone)} tokens for this tokenizer ({parts}); a filler must be one token when repeated, such as ' /'"
    )


def _natural_text(tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random) -> tuple[int, ...]:
    """Sentences in an order of the item's own, cut to exactly `length` tokens."""
    if not sentences:
        raise BadPrompt("natural-text filler needs sentences, and none were given")
    ids: list[int] = []
    while len(ids) < length:
        order = list(sentences)
        rng.shuffle(order)
        ids = list(tokenizer(" " + " ".join(order), add_special_tokens=False).input_ids) if not ids else ids + ids
    return tuple(ids[:length])


def _insertion_point(rendered: Rendered, condition: Condition, rng: random.Random) -> int:
    if condition.placement == "before-system":
        return rendered.before_system
    if condition.placement == "before-question":
        return rendered.before_question
    if condition.placement == "end":
        return len(rendered.token_ids)
    inner = [
        i
        for i in range(1, len(rendered.names))
        if rendered.names[i] in ("system", "question") and rendered.names[i - 1] == rendered.names[i]
    ]
    if not inner:
        raise BadPrompt("no token boundary lies inside system text or question; use another placement")
    return rng.choice(inner)


# ---- alignment -------------------------------------------------------------------------------------------------------


def align(without: Prompt, with_filler: Prompt) -> list[int]:
    """For each token of `without`, its position in `with_filler`. Raises unless the original tokens are identical."""
    positions = with_filler.original
    same = [with_filler.token_ids[i] for i in positions] == list(without.token_ids)
    if not same or without.item != with_filler.item:
        raise BadPrompt(
            f"prompts of item {without.item!r} ({without.condition}) and {with_filler.item!r} ({with_filler.condition}) do not hold the same original tokens"
        )
    return positions
