"""Items × condition → token ids with spans, and the alignment of two prompts of one item.

Filler is inserted as *ids* into the rendered prompt, never as text: slashes merge ("/////" is one token in most tokenizers), and
only so do both prompts of a pair hold the original tokens with identical ids, which is what makes alignment exact.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    #: Token boundaries strictly inside system text or question, the template's own tokens apart.
    inside: tuple[int, ...]


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
    system = system if condition.system is None else condition.system
    for given in items:
        item = _asked(given, condition)
        rendered = render(tokenizer, item, kind=kind, system=system)
        if condition.kind in ("none", "shift"):
            filler: tuple[int, ...] = ()
        elif repeated is not None:
            filler = (repeated,) * condition.length
        else:
            filler = _natural_text(tokenizer, sentences, condition.length, _rng(seed, "text", item.id))
        at = _insertion_point(rendered, condition, _rng(seed, "anywhere", item.id))
        yield _assemble(tokenizer, item, condition, rendered, filler, at)


def build_messages(
    items: Sequence[Item],
    condition: Condition,
    *,
    system: str = SYSTEM_TEXT,
    seed: int = 0,
    sentences: Sequence[str] = (),
) -> Iterator[tuple[tuple[str, str], ...]]:
    """One conversation per item, (role, text) pairs, for servers that take text only.

    Filler is then text: `length` times the filler, or so many words. How many tokens that is, and whether they merge, is up to the server.
    """
    system = system if condition.system is None else condition.system
    if condition.kind == "shift" or condition.hidden:
        raise BadPrompt(
            f"condition {condition.name!r} changes positions or attention, which no server offers; use --engine hf"
        )
    for given in items:
        item = _asked(given, condition)
        front, question = system, item.question
        if condition.kind != "none":
            if condition.kind == "repeat":
                filler = (condition.filler or "") * condition.length
            else:
                filler = _natural_words(sentences, condition.length, _rng(seed, "text", item.id))
            if condition.placement == "before-system":
                front = f"{filler.strip()} {front}"
            elif condition.placement == "before-question":
                question = f"{filler.strip()} {question}"
            elif condition.placement == "end":
                question = f"{question} {filler.strip()}"
            else:
                words = question.split(" ")
                at = _rng(seed, "anywhere", item.id).randrange(1, len(words)) if len(words) > 1 else 0
                question = " ".join([*words[:at], filler.strip(), *words[at:]])
        yield (("system", front), ("user", question)) if front.strip() else (("user", question),)


def _natural_words(sentences: Sequence[str], length: int, rng: random.Random) -> str:
    if not any(sentence.strip() for sentence in sentences):
        raise BadPrompt("natural-text filler needs sentences, and none were given")
    words: list[str] = []
    while len(words) < length:
        order = list(sentences)
        rng.shuffle(order)
        words += " ".join(order).split()
    return " ".join(words[:length])


def _asked(item: Item, condition: Condition) -> Item:
    """The item as the condition asks it."""
    if condition.question is None:
        return item
    return replace(item, question=condition.question.replace("{question}", item.question))


def shared_beginning(prompt: Prompt, condition: Condition) -> int:
    """How many of a prompt's first tokens every prompt of its condition begins with: all before what is an item's own.

    A function of this prompt alone, so that it does not change with the company it is in.
    """
    if condition.placement == "anywhere" and condition.kind != "none":
        return 0
    own = ("question", "filler") if condition.kind == "text" else ("question",)
    return next((span.start for span in prompt.spans if span.name in own), 0)


def _rng(seed: int, purpose: str, item: str) -> random.Random:
    # A string seed is hashed with sha512 inside `random`, so the draw is the same in every process.
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
    shifted = tuple(n + condition.length * (n >= at) for n in range(len(ids))) if condition.kind == "shift" else None
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    prompt = Prompt(item.id, condition.name, ids, tuple(spans), text, shifted, condition.hidden)
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
        system_at, system_end, question_at, question_end = 0, len(system), len(system) + 1, len(text)
    else:
        text, system_at, system_end, question_at, question_end = _render_chat(tokenizer, item, system)
    _refuse_surrogates(text, f"item {item.id!r}")
    # A chat template writes its own special tokens; raw text gets the tokenizer's.
    encoded = tokenizer(text, add_special_tokens=kind == "raw", return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    extents = _extents(encoded["offset_mapping"])
    marks: list[tuple[int, SpanName]] = [(question_end, "end"), (question_at, "question"), (system_at, "system")]
    names: list[SpanName] = []
    for first, last in extents:
        # The token's last character decides, so a token that straddles two spans belongs to the later one. Special tokens
        # that stand for no text (first == last) belong to what surrounds them.
        where = last - 1 if last > first else first
        found: list[SpanName] = [name for mark, name in marks if where >= mark]
        names.append(found[0] if found else "start")
    _settle_textless(names, extents)
    if "question" not in names:
        raise BadPrompt(
            f"item {item.id!r}: the question has no token of its own in the rendered prompt; use --prompt raw, or leave it out of the data"
        )
    before_question = names.index("question")
    # Raw prompts carry a line break between the two texts; filler goes before it, as published, where that is a token boundary.
    if kind == "raw":
        after = [i for i, (first, last) in enumerate(extents) if last > first and first >= system_end]
        before_question = min(before_question, *after) if after else before_question
    before_system = names.index("system") if "system" in names else before_question
    texts = ((system_at, system_end), (question_at, question_end))
    inside = [
        i
        for i in range(1, len(extents))
        for start, stop in texts
        if start <= extents[i - 1][0] < extents[i - 1][1] <= extents[i][0] < extents[i][1] <= stop
    ]
    return Rendered(tuple(ids), tuple(names), before_system, before_question, tuple(inside))


def _extents(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters each token stands for; first == last where it stands for none.

    Byte-level tokenizers that trim offsets (Llama 3's) leave the blanks out, so a token of blanks would seem to stand for no
    text: the gap since the token before it is what it holds.
    """
    extents: list[tuple[int, int]] = []
    reached = 0
    for first, last in offsets:
        extents.append((reached, last) if first == last > reached else (first, last))
        reached = max(reached, last)
    return extents


def _settle_textless(names: list[SpanName], extents: Sequence[tuple[int, int]]) -> None:
    """Tokens without text at either end (BOS, EOS): the front ones are `start`, the rear ones `end`."""
    real = [i for i, (first, last) in enumerate(extents) if last > first]
    for i in range(len(names)):
        if not real or i < real[0]:
            names[i] = "start"
        elif i > real[-1]:
            names[i] = "end"


def _render_chat(tokenizer: Any, item: Item, system: str) -> tuple[str, int, int, int, int]:
    """The rendered conversation, and where each of its two texts begins and ends."""
    shape, folded = _shape(tokenizer)
    text = (_fold if folded else _converse)(tokenizer, system, item.question)
    head, rest = shape.split(_SYSTEM_MARK)
    middle, tail = rest.split(_QUESTION_MARK)
    if folded and not system.strip():
        system = middle = ""
    # Many templates trim what they are given (Llama's, Gemma's); the texts as they are really shown are looked for.
    for shown_system in _trimmed(system):
        for question in _trimmed(item.question):
            if text == head + shown_system + middle + question + tail:
                question_at = len(head) + len(shown_system) + len(middle)
                return text, len(head), len(head) + len(shown_system), question_at, question_at + len(question)
    raise BadPrompt(f"item {item.id!r}: the chat template changes the question's text; use --prompt raw")


def _shape(tokenizer: Any) -> tuple[str, bool]:
    """The conversation around the two marks, and whether the system text had to be folded into the user's turn."""
    cause = "it does not show system text and question once each"
    for folded, write in ((False, _converse), (True, _fold)):
        try:
            shape = write(tokenizer, _SYSTEM_MARK, _QUESTION_MARK)
        except Exception as fault:  # noqa: BLE001  (a template may raise anything; some refuse the system role)
            cause = str(fault).partition("\n")[0] or type(fault).__name__
            continue
        once = shape.count(_SYSTEM_MARK) == 1 and shape.count(_QUESTION_MARK) == 1
        if once and shape.index(_SYSTEM_MARK) < shape.index(_QUESTION_MARK):
            return shape, folded
    raise BadPrompt(f"the chat template cannot be used ({cause}); use --prompt raw")


def _trimmed(text: str) -> list[str]:
    return list(dict.fromkeys((text, text.strip(), text.lstrip(), text.rstrip())))


def _converse(tokenizer: Any, system: str, question: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _fold(tokenizer: Any, system: str, question: str) -> str:
    """For templates without a system role: the system text opens the user's turn."""
    content = f"{system}\n\n{question}" if system.strip() else question
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _refuse_surrogates(text: str, what: str) -> None:
    # A tokenizer takes Unicode text only; half a surrogate pair comes in through a script or a mangled command line.
    if half := re.search("[\ud800-\udfff]", text):
        raise BadPrompt(f"{what}: {half[0]!r} is half a character (a lone surrogate), not text; remove it")


# ---- fillers ---------------------------------------------------------------------------------------------------------


_TIMES = 8


def _repeated_token(tokenizer: Any, filler: str) -> int:
    """The one token that `filler` is when it is repeated; else an error that says what it splits into."""
    _refuse_surrogates(filler, f"filler {filler!r}")
    body = _in_a_row(tokenizer, filler)
    if _is_one_token(body):
        return body[0]
    ways = dict.fromkeys((" " + filler.strip(), " /", " he", " the", " a", "\n"))
    fits = (way for way in ways if way != filler and _is_one_token(_in_a_row(tokenizer, way)))
    way = next((f", such as {way!r}" for way in fits), "")
    alone: list[int] = tokenizer(filler, add_special_tokens=False).input_ids
    if len(alone) == 1:
        raise BadPrompt(
            f"filler {filler!r} is one token alone, but {_TIMES} of them in a row become {len(body)}: {_pieces(tokenizer, body)}; "
            f"take one that does not merge{way}"
        )
    raise BadPrompt(
        f"filler {filler!r} is {len(alone)} tokens for this tokenizer ({_pieces(tokenizer, alone)}); "
        f"a filler must be one token when repeated{way}"
    )


def _in_a_row(tokenizer: Any, filler: str) -> list[int]:
    """What `filler` is repeated, after some other text, as it stands in a prompt."""
    carrier: list[int] = tokenizer("a", add_special_tokens=False).input_ids
    ids: list[int] = tokenizer("a" + filler * _TIMES, add_special_tokens=False).input_ids
    return ids[len(carrier) :] if ids[: len(carrier)] == carrier else ids


def _is_one_token(body: Sequence[int]) -> bool:
    return len(body) == _TIMES and len(set(body)) == 1


def _pieces(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(repr(tokenizer.decode([i])) for i in ids[:6]) + ("…" if len(ids) > 6 else "")


def _natural_text(tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random) -> tuple[int, ...]:
    """Sentences in an order of the item's own, cut to exactly `length` tokens; more rounds, in other orders, where they run out."""
    if not any(sentence.strip() for sentence in sentences):
        raise BadPrompt("natural-text filler needs sentences, and none were given")
    ids: list[int] = []
    while len(ids) < length:
        order = list(sentences)
        rng.shuffle(order)
        ids += tokenizer(" " + " ".join(order), add_special_tokens=False).input_ids
    return tuple(ids[:length])


def _insertion_point(rendered: Rendered, condition: Condition, rng: random.Random) -> int:
    if condition.placement == "before-system":
        return rendered.before_system
    if condition.placement == "before-question":
        return rendered.before_question
    if condition.placement == "end":
        return len(rendered.token_ids)
    if not rendered.inside:
        raise BadPrompt("no token boundary lies inside system text or question; use another placement")
    return rng.choice(rendered.inside)


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
