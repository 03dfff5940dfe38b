"""Items × condition → token ids with spans, and the alignment of two prompts of one item.

Filler is inserted as *ids* into the rendered prompt, never as text, because slashes merge ("/////" is one token in most tokenizers). So
both prompts of a pair hold the original tokens with identical ids, and alignment is exact.

Where each placement is, for every tokenizer, is shown in docs/method.md.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, get_args

from mless import templates
from mless.conditions.base import decoded, refuse_surrogates, seeded
from mless.errors import BadPrompt
from mless.values import Condition, Item, Prompt, Span, SpanName

SYSTEM_TEXT = "Please reason step by step and put your final answer within \\boxed{}."
#: The model's chat template with a system turn, or with the system text at the head of the user's turn; or plain text.
PromptKind = Literal["chat", "user", "raw"]
PROMPT_KINDS: tuple[PromptKind, ...] = get_args(PromptKind)

# What a template is rendered with to see where it puts the two texts. Letters only, so that no template escapes or trims them.
_SYSTEM_MARK, _QUESTION_MARK = "MLESSSYSTEMMARK", "MLESSQUESTIONMARK"


@dataclass(frozen=True, slots=True)
class Points:
    """Where filler of each placement goes: places between the tokens of a prompt without filler.

    All but `end` are None where they are not known; `why` then gives the reason and the way out.
    """

    #: How many tokens there are.
    end: int
    before_system: int | None = None
    before_question: int | None = None
    #: Where the user's turn ends: after the question, before what the template writes next. In a raw prompt the prompt's end.
    after_question: int | None = None
    #: Token boundaries strictly inside system text or question, the template's own tokens apart.
    inside: tuple[int, ...] | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """An item's original prompt: tokens, each with its span name, and where filler of each placement goes."""

    token_ids: tuple[int, ...]
    names: tuple[SpanName, ...]
    points: Points


def insertion_point(points: Points, condition: Condition, *, seed: int, item: str) -> int:
    """Where the condition's filler goes. The one place that says what a placement means, for mless's prompts and other programs'."""
    by_placement = {
        "before-system": points.before_system,
        "before-question": points.before_question,
        "end": points.after_question,
        "before-answer": points.end,
    }
    if condition.placement == "anywhere":
        if points.inside == ():
            raise BadPrompt("no token boundary lies inside system text or question; use another placement")
        at = seeded(seed, "anywhere", item).choice(points.inside) if points.inside else None
    else:
        at = by_placement[condition.placement]
    if at is None:
        raise BadPrompt(points.why)
    return at


def resolve_kind(asked: str, tokenizer: Any, label: str) -> PromptKind:
    """``auto`` is chat where the tokenizer has a template, else raw."""
    has = bool(getattr(tokenizer, "chat_template", None))
    if asked == "auto":
        return "chat" if has else "raw"
    if asked in ("chat", "user") and not has:
        raise BadPrompt(
            f"{label} has no chat template, but --prompt {asked} asks for one; use --prompt raw, or --tokenizer with a template"
        )
    if asked not in PROMPT_KINDS:
        raise BadPrompt(f"no prompt kind {asked!r}; there are: auto, {', '.join(PROMPT_KINDS)}")
    return asked


def build_prompts(
    tokenizer: Any,
    items: Sequence[Item],
    condition: Condition,
    *,
    kind: PromptKind,
    system: str = SYSTEM_TEXT,
    seed: int = 0,
    sentences: Sequence[str] = (),
    rendered_before: dict[tuple[str, str, str], Rendered] | None = None,
) -> Iterator[Prompt]:
    """One prompt per item. `sentences` are what ``text`` fillers are cut from. `rendered_before` keeps what conditions have in common."""
    kind_of_condition = condition.of_kind
    system = system if condition.system is None else condition.system
    filler: tuple[int, ...] | None = None
    for given in items:
        item = _asked(given, condition)
        key = (item.id, item.question, system)
        rendered = (rendered_before or {}).get(key) or render(tokenizer, item, kind=kind, system=system)
        if rendered_before is not None:
            rendered_before[key] = rendered
        if filler is None or kind_of_condition.own:
            filler = kind_of_condition.ids(tokenizer, condition, item=item.id, seed=seed, sentences=sentences)
        at = insertion_point(rendered.points, condition, seed=seed, item=item.id)
        yield _assemble(tokenizer, item, condition, rendered, filler, at)


def build_messages(
    items: Sequence[Item],
    condition: Condition,
    *,
    system: str = SYSTEM_TEXT,
    seed: int = 0,
    sentences: Sequence[str] = (),
    one_turn: bool = False,
) -> Iterator[tuple[tuple[str, str], ...]]:
    """One conversation per item, (role, text) pairs, for servers that take text only. `one_turn`: the system text opens the user's turn.

    Filler is then text: `length` times the filler, or so many words. How many tokens that is, and whether they merge, is up to the server.
    """
    system = system if condition.system is None else condition.system
    _refuse_as_text(condition)
    for given in items:
        item = _asked(given, condition)
        front, question = system, item.question
        if condition.inserts:
            filler = condition.of_kind.text(condition, item=item.id, seed=seed, sentences=sentences)
            if condition.placement == "before-system":
                front = f"{filler.strip()} {front}"
            elif condition.placement == "before-question":
                question = f"{filler.strip()} {question}"
            elif condition.placement == "end":
                question = f"{question} {filler.strip()}"
            elif condition.placement == "anywhere":
                words = question.split(" ")
                at = seeded(seed, "anywhere", item.id).randrange(1, len(words)) if len(words) > 1 else 0
                question = " ".join([*words[:at], filler.strip(), *words[at:]])
            else:
                raise BadPrompt(
                    f"condition {condition.name!r}: a text conversation has no place {condition.placement!r}; use before-system, before-question, end or "
                    "anywhere"
                )
        if one_turn and front.strip():
            front, question = "", f"{front}\n\n{question}"
        yield (("system", front), ("user", question)) if front.strip() else (("user", question),)


def _refuse_as_text(condition: Condition) -> None:
    """Refuse what the text of a conversation cannot express."""
    way = "use --engine hf or vllm, or --tokenizer DIR if the server takes token ids"
    if condition.of_kind.moves or condition.hidden:
        raise BadPrompt(
            f"condition {condition.name!r} changes positions or attention, which no server offers; use --engine hf"
        )
    if because := condition.of_kind.not_as_text(condition):
        raise BadPrompt(f"condition {condition.name!r}{because}; {way}")
    if condition.inserts and condition.placement == "before-answer":
        raise BadPrompt(
            f"condition {condition.name!r}: placement before-answer is after the assistant's header, which the server writes, so messages cannot hold it; "
            f"use placement end, the end of the user's message, or {way}"
        )


def _asked(item: Item, condition: Condition) -> Item:
    """The item as the condition asks it."""
    if condition.question is None:
        return item
    return replace(item, question=condition.question.replace("{question}", item.question))


def shared_beginning(prompt: Prompt, condition: Condition) -> int:
    """How many of a prompt's first tokens every prompt of its condition begins with: all before what is an item's own.

    A function of this prompt alone, whatever other prompts there are.
    """
    kind = condition.of_kind
    if condition.placement == "anywhere" and kind.placed:
        return 0
    own = ("question", "filler") if kind.own else ("question",)
    return next((span.start for span in prompt.spans if span.name in own), 0)


def _assemble(
    tokenizer: Any, item: Item, condition: Condition, rendered: Rendered, filler: tuple[int, ...], at: int
) -> Prompt:
    ids = rendered.token_ids[:at] + filler + rendered.token_ids[at:]
    names = rendered.names[:at] + ("filler",) * len(filler) + rendered.names[at:]
    spans: list[Span] = []
    for name, run in groupby(names):
        start = spans[-1].stop if spans else 0
        spans.append(Span(name, start, start + len(list(run))))
    positions = condition.of_kind.positions(condition, len(ids), at)
    text = decoded(tokenizer, ids)
    prompt = Prompt(item.id, condition.name, ids, tuple(spans), text, positions, condition.hidden)
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
        text, system_at, system_end, question_at, question_end = _render_chat(
            tokenizer, item, system, one_turn=kind == "user"
        )
    refuse_surrogates(text, f"item {item.id!r}")
    # A chat template writes its own special tokens; raw text gets the tokenizer's. Raw filler goes before the line break, as published, so a
    # token such as ".\n" is split there in every raw prompt, with filler or without.
    ids, extents = encode(tokenizer, text, special=kind == "raw", split_at=system_end if kind == "raw" else None)
    marks: list[tuple[int, SpanName]] = [(question_end, "end"), (question_at, "question"), (system_at, "system")]
    names: list[SpanName] = []
    for first, last in extents:
        # The token's last character decides, so a token that straddles two spans belongs to the later one. Special tokens
        # that stand for no text (first == last) belong to what surrounds them.
        where = last - 1 if last > first else first
        found: list[SpanName] = [name for mark, name in marks if where >= mark]
        names.append(found[0] if found else "start")
    _name_textless(names, extents)
    if "question" not in names:
        raise BadPrompt(
            f"item {item.id!r}: the question has no token of its own in the rendered prompt; use --prompt raw, or leave it out of the data"
        )
    before_question = names.index("question")
    if kind == "raw":
        before_question = min(before_question, first_from(extents, system_end))
    before_system = names.index("system") if "system" in names else before_question
    texts = ((system_at, system_end), (question_at, question_end))
    inside = boundaries_inside(extents, texts)
    after_question = len(ids) if kind == "raw" else after_text(extents, question_end)
    points = Points(len(ids), before_system, before_question, after_question, tuple(inside))
    return Rendered(tuple(ids), tuple(names), points)


def encode(
    tokenizer: Any, text: str, *, special: bool, split_at: int | None = None
) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of `text`, and the characters that each stands for; a token that reaches across character `split_at` is split there."""
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    extents = extents_of(tokenizer, text, ids, encoded["offset_mapping"])
    for at, (first, last) in enumerate(extents):
        if split_at is not None and first < split_at < last:
            left, right = _split_token(tokenizer, ids, at, text[first:split_at], text[split_at:last])
            ids[at : at + 1] = [*left, *right]
            extents[at : at + 1] = [(first, split_at)] * len(left) + [(split_at, last)] * len(right)
            break
    return ids, extents


#: So many tokens around a split one are decoded to see that the text stays.
_AROUND = 16


def _split_token(tokenizer: Any, ids: Sequence[int], at: int, left: str, right: str) -> tuple[list[int], list[int]]:
    """The ids of the two texts that token `at` stands for, each in as few tokens as the vocabulary allows.

    The token's own spelling is cut, so no tokenizer adds a blank before the second part. Which cut is the right one is seen by decoding.
    """
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", False)
    spelling: str = tokenizer.convert_ids_to_tokens(ids[at])
    before, after = list(ids[max(0, at - _AROUND) : at]), list(ids[at + 1 : at + 1 + _AROUND])
    whole = decoded(tokenizer, [*before, ids[at], *after])
    for cut in range(1, len(spelling) if model else 0):
        front: list[int] = [token.id for token in model.tokenize(spelling[:cut])]
        back: list[int] = [token.id for token in model.tokenize(spelling[cut:])]
        shown = decoded(tokenizer, [*before, *front])
        same = front and back and decoded(tokenizer, [*before, *front, *back, *after]) == whole
        if same and whole.startswith(shown) and _fits(shown, whole[len(shown) :], left, right):
            return front, back
    raise BadPrompt(
        f"token {left + right!r} reaches from the system text into the line break after it, and this tokenizer cannot split it; use --prompt chat, "
        "or a system text that ends otherwise"
    )


def _fits(before: str, after: str, left: str, right: str) -> bool:
    """Whether a text that is cut into `before` and `after` is cut between `left` and `right`. Some tokenizers compose accents (NFC)."""
    before, after, left, right = (unicodedata.normalize("NFC", text) for text in (before, after, left, right))
    return before.endswith(left) and after.startswith(right)


def extents_of(
    tokenizer: Any, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The characters of `text` that each token stands for; first == last where it stands for none.

    Some byte-level tokenizers trim offsets: they leave the spaces at a token's ends out. Such a gap between two tokens belongs to the one
    that shows spaces when decoded. A token of spaces only holds the whole gap.
    """
    extents: list[tuple[int, int]] = []
    reached = 0
    for n, (first, last) in enumerate(offsets):
        visible = last > first
        if first == last > reached:
            first = reached
        elif visible and first > reached and not text[reached:first].strip(" "):
            shown = decoded(tokenizer, [ids[n]])
            first = max(reached, first - (len(shown) - len(shown.lstrip(" "))))
        if visible and text[last : last + 1] == " ":
            # No slice of the offsets: copying them for every token makes a long prompt quadratic.
            further = (offsets[k] for k in range(n + 1, len(offsets)) if offsets[k][1] > last)
            following = next((a if b > a else b for a, b in further), len(text))
            if following > last and not text[last:following].strip(" "):
                shown = decoded(tokenizer, [ids[n]])
                last = min(following, last + len(shown) - len(shown.rstrip(" ")))
        extents.append((first, last))
        reached = max(reached, last)
    return extents


def first_from(extents: Sequence[tuple[int, int]], place: int) -> int:
    """The first token that begins at or after a character and stands for some text."""
    return next((n for n, (first, last) in enumerate(extents) if last > first >= place), len(extents))


def after_text(extents: Sequence[tuple[int, int]], end: int) -> int:
    """The place after the last token that shows anything before character `end`; one that reaches further is not cut."""
    return 1 + max((n for n, (first, last) in enumerate(extents) if first < last and first < end), default=-1)


def boundaries_inside(extents: Sequence[tuple[int, int]], texts: Sequence[tuple[int, int]]) -> list[int]:
    """Token boundaries strictly inside the texts, which are given by their first and last character."""
    return [
        n
        for n in range(1, len(extents))
        for start, stop in texts
        if start <= extents[n - 1][0] < extents[n - 1][1] <= extents[n][0] < extents[n][1] <= stop
    ]


def _name_textless(names: list[SpanName], extents: Sequence[tuple[int, int]]) -> None:
    """Tokens without text at either end (BOS, EOS): the front ones are `start`, the rear ones `end`."""
    real = [i for i, (first, last) in enumerate(extents) if last > first]
    for i in range(len(names)):
        if not real or i < real[0]:
            names[i] = "start"
        elif i > real[-1]:
            names[i] = "end"


def _render_chat(tokenizer: Any, item: Item, system: str, *, one_turn: bool = False) -> tuple[str, int, int, int, int]:
    """The rendered conversation, and where each of its two texts begins and ends. `one_turn`: the system text opens the user's turn."""
    shape, folded = _shape(tokenizer, one_turn=one_turn)
    try:
        text = (_fold if folded else _converse)(tokenizer, system, item.question)
    except templates.TemplateRefuses as fault:
        raise BadPrompt(f"item {item.id!r}: the chat template refuses it ({fault}); use --prompt raw") from fault
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


def _shape(tokenizer: Any, *, one_turn: bool = False) -> tuple[str, bool]:
    """The conversation around the two marks, and whether the system text is folded into the user's turn, as asked or because it has to be."""
    cause = "it does not show system text and question once each"
    for folded, write in ((True, _fold),) if one_turn else ((False, _converse), (True, _fold)):
        try:
            shape = write(tokenizer, _SYSTEM_MARK, _QUESTION_MARK)
        except templates.TemplateRefuses as fault:  # some refuse the system role
            cause = str(fault)
            continue
        once = shape.count(_SYSTEM_MARK) == 1 and shape.count(_QUESTION_MARK) == 1
        if once and shape.index(_SYSTEM_MARK) < shape.index(_QUESTION_MARK):
            return shape, folded
    raise BadPrompt(f"the chat template cannot be used ({cause}); use --prompt raw")


def _trimmed(text: str) -> list[str]:
    return list(dict.fromkeys((text, text.strip(), text.lstrip(), text.rstrip())))


def _converse(tokenizer: Any, system: str, question: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return templates.render(tokenizer, messages)


def _fold(tokenizer: Any, system: str, question: str) -> str:
    """For templates without a system role, and for prompts of one turn: the system text opens the user's turn."""
    content = f"{system}\n\n{question}" if system.strip() else question
    messages = [{"role": "user", "content": content}]
    return templates.render(tokenizer, messages)


def with_filler_ids(tokenizer: Any, conditions: Sequence[Condition], sentences: Sequence[str] = ()) -> list[Condition]:
    """The conditions, each filler that is the same for all items with the ids that it is to this tokenizer."""
    listed = [one.of_kind.listed(tokenizer, one, sentences) for one in conditions]
    return [one if ids is None else replace(one, filler_ids=ids) for one, ids in zip(conditions, listed, strict=True)]


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
