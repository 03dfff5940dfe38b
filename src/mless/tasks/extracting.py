"""From a model's text to its answer: the last box (or boxes joined by "and"), the number after ####, the last number, a choice letter.

Extraction only finds the answer; `grading` judges it. Each rule reads the text in one pass, so 100 kB of braces cost no more than
100 kB of prose, and no text raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from mless.errors import BadStudy

Rule = Literal["boxed", "hashes", "number", "choice"]
RULES: tuple[Rule, ...] = get_args(Rule)
How = Literal["boxed", "hashes", "number", "choice", "none"]

#: The rules of each task, first to last. A task that asks for a box is not given its last number: in a text cut off in the middle of its
#: reasoning that is any number, and the rate of no-answers beside the accuracy would hide it.
TASK_RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "math500": ("boxed",),
        "aime24": ("boxed",),
        "aime25": ("boxed",),
        "gsm8k": ("hashes", "boxed", "number"),
        "arithmetic": ("boxed", "hashes", "number"),
    }
)
#: For a file of one's own.
DEFAULT_RULES: tuple[Rule, ...] = ("boxed", "hashes", "number")


@dataclass(frozen=True, slots=True)
class Extracted:
    """The answer found in a text, the rule that found it, and where it stands there (characters, `stop` not included)."""

    text: str | None
    how: How
    start: int = 0
    stop: int = 0


NO_ANSWER = Extracted(None, "none")


def extract(text: str, rules: Sequence[Rule] = DEFAULT_RULES, *, latex: bool = False) -> Extracted:
    """The answer by the first of `rules` that finds one. `latex` lets the number rule read ``\\frac{1}{2}`` too."""
    for rule in rules:
        if rule == "boxed":
            found = boxed(text)
        elif rule == "hashes":
            found = hashes(text)
        elif rule == "number":
            found = number(text, latex=latex)
        elif rule == "choice":
            found = choice(text)
        else:
            raise BadStudy(f"no extraction rule {rule!r}; there are: {', '.join(RULES)}")
        if found.text is not None:
            return found
    return NO_ANSWER


# --- \boxed{…} ---

# Two backslashes before the word are one written as in a program's string. \\. eats escaped braces, so they never count.
_BRACES = re.compile(r"\\\\?(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
# After a box without braces, as far as a person would read it: a number, a simple fraction, a word.
_BARE = re.compile(r"\s*(-?\\[dt]?frac\s?\{[^{}]{1,60}\}\s?\{[^{}]{1,60}\}|[^\s{}$\\]+)")
_SPACE = re.compile(r"\s*")


def boxed(text: str) -> Extracted:
    """The content of the last complete, non-empty ``\\boxed{…}`` or ``\\fbox{…}``; an unclosed box gives none.

    Boxes that are joined to the last one ("\\boxed{1} and \\boxed{2}") are one answer, its parts separated by commas.
    """
    boxes = _boxes(text)
    if not boxes:
        return NO_ANSWER
    last = first = boxes.pop()
    parts = [last]
    while boxes and _joined(text[boxes[-1].end : first.begin]):
        first = boxes.pop()
        parts.append(first)
    cuts = [_cut(text, box.start, box.stop, "boxed") for box in reversed(parts)]
    # What is boxed twice is one answer, said twice.
    contents = dict.fromkeys(cut.text or "" for cut in cuts)
    if len(contents) == 1:
        return cuts[-1]
    return Extracted(", ".join(contents), "boxed", cuts[0].start, cuts[-1].stop)


class _Box(NamedTuple):
    """Where a box begins and ends, and its content's start and stop."""

    begin: int
    end: int
    start: int
    stop: int


def _boxes(text: str) -> list[_Box]:
    """All complete boxes with something in them, in order; of boxes inside boxes the innermost."""
    found: list[_Box] = []
    # For each open brace: where its box begins and where its content does, or None for any other brace.
    open_at: list[tuple[int, int] | None] = []
    box_brace, begin = -1, -1
    for match in _BRACES.finditer(text):
        sign = match[0]
        if sign == "{":
            open_at.append((begin, match.end()) if match.start() == box_brace else None)
        elif sign == "}":
            opened = open_at.pop() if open_at else None
            if opened is None or (found and found[-1].begin > opened[0]):
                continue
            if _stripped(text[opened[1] : match.start()]):
                found.append(_Box(opened[0], match.end(), opened[1], match.start()))
        elif sign.endswith(("boxed", "fbox")):
            after = _SPACE.match(text, match.end())
            here = after.end() if after else match.end()
            if here < len(text) and text[here] == "{":
                box_brace, begin = here, match.start()
            elif bare := _BARE.match(text, match.end()):
                stop = bare.start(1) + len(bare[1].rstrip(".,;:!?"))
                if stop > bare.start(1):
                    found.append(_Box(match.start(), stop, bare.start(1), stop))
    return found


_BETWEEN = 80  # characters between two boxes that may belong together
_LAYOUT = re.compile(r"\\(?:text[a-z]{0,6}|mbox|mathrm|q?quad|[()\[\],;:! ])|[\s$~*{}]")
_AND = re.compile(
    r"[,;]? ?(?:(?:\(?\w{1,20}\)? ){0,4}(?:and|or|&)(?!\w))?(?: ?[A-Za-z](?:_\w{1,3}| ?\(\w\))? ?=)?", re.ASCII
)
# After these words the second box is a correction or a conclusion, not a second part.
_TURNS = frozenset("is are was were not no so then thus hence therefore but answer check wait wrong correct".split())


def _joined(between: str) -> bool:
    """Whether two boxes with this between them are parts of one answer: nothing, a comma, "and", "apples and", "and y ="."""
    if len(between) > _BETWEEN or re.search(r"\n\s*\n", between):
        return False
    plain = " ".join(_LAYOUT.sub(" ", between).split())
    if not plain:
        return "\n" not in between
    return bool(_AND.fullmatch(plain)) and _TURNS.isdisjoint(plain.lower().split())


# --- numbers ---

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"


def _number_pattern(currency: str) -> str:
    # Not inside a word (x2, H2O), not behind a point or an exponent; a minus after a number or a bracket is a difference, not a sign.
    sign = r"(?:(?<![\w)\]}.^])[-−+])?"
    return rf"(?<![\w.^]){sign}(?:{currency}\s?)?(?<![\w.^]){_DIGITS}(?:\s?/\s?{_DIGITS})?(?:\s?\\?%)?"


_NUMBER = re.compile(_number_pattern(r"\\?[$€£¥₹]"), re.ASCII)
_FRACTION = r"\\[dtc]?frac\s?(?:\{\s?-?\d{1,40}\s?\}\s?\{\s?-?\d{1,40}\s?\}|\d\s?\d(?!\d))"
# In LaTeX a bare dollar opens mathematics; only an escaped one is money.
_LATEX_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}.^])[-−+])?(?:(?<![\w.^]){_DIGITS}\s?)?{_FRACTION}(?:\s?\\?%)?|"
    + _number_pattern(r"(?:\\[$]|[€£¥₹])"),
    re.ASCII,
)


def number(text: str, *, latex: bool = False) -> Extracted:
    """The last number as it is written: sign, currency, thousands separators, a/b, per cent; with `latex` also ``\\frac``."""
    last: re.Match[str] | None = None
    for match in (_LATEX_NUMBER if latex else _NUMBER).finditer(text):
        last = match
    return _cut(text, last.start(), last.end(), "number") if last else NO_ANSWER


_HASHES = re.compile(r"####[ \t]*([^\n]*)")
# "#### 3. Then add" is a heading: after the number only a unit of a few words may follow.
_ONLY_UNIT = re.compile(r"(?:\s[A-Za-z]{1,20}){0,3}[\s.*$]{0,5}")


def hashes(text: str) -> Extracted:
    """The number behind the last ``####``, as GSM8K writes its answers; headings of the same sign are passed over."""
    best = NO_ANSWER
    for match in _HASHES.finditer(text):
        start = match.start(1)
        while start < match.end() and text[start] in "*# \t":
            start += 1
        if (found := _NUMBER.match(text, start, match.end())) is None and text.startswith("$", start):
            found = _NUMBER.match(text, start + 1, match.end())
        if found and _ONLY_UNIT.fullmatch(text, found.end(), match.end()):
            best = _cut(text, found.start(), found.end(), "hashes")
    return best


# --- choice letters ---

_SAID = re.compile(
    r"\b(?i:answer|option|choice)(?i:\s+is)?(?i:\s+(?:option|choice))?[\s:=*$]{0,10}"
    r"(?:\\(?:boxed|fbox|text|textbf|mathrm)\{\s?){0,2}(?:\(\s?([A-Ea-e])\s?\)|([A-E])(?![\w'’+/^=-]))"
)
_ALONE = re.compile(r"[\s(\[*$]{0,10}(?:\\(?:text|textbf|mathrm)\{\s?)?\(?([A-Ea-e])\s?[)\].:}*$\s]{0,10}")
_BRACKETED = re.compile(r"\(\s?([A-E])\s?\)")
_LINE = re.compile(r"^[ \t*]{0,10}([A-E])[.):](?![^\s*])", re.MULTILINE)


def choice(text: str) -> Extracted:
    """The chosen letter A to E: "answer is B", then the letter alone, then the last "(B)", then a single line "B. …"."""
    last: re.Match[str] | None = None
    for match in _SAID.finditer(text):
        last = match
    if last is not None:
        return _letter(last, 1 if last[1] else 2)
    # All that may stand around the letter fits into 64 characters; a longer text is not a letter alone.
    stripped = text.strip()
    if len(stripped) <= 64 and (
        alone := _ALONE.fullmatch(text, text.find(stripped), text.find(stripped) + len(stripped))
    ):
        return _letter(alone, 1)
    for match in _BRACKETED.finditer(text):
        last = match
    if last is not None:
        return _letter(last, 1)
    # Several such lines are the options told again, not a choice among them.
    lines = list(_LINE.finditer(text))
    return _letter(lines[0], 1) if len(lines) == 1 else NO_ANSWER


def _letter(match: re.Match[str], group: int) -> Extracted:
    return Extracted(match[group].upper(), "choice", match.start(group), match.end(group))


def _stripped(part: str) -> str:
    """Without the space around it, LaTeX's own behind it included: of ``\\ `` a lone backslash would be left."""
    inner, spaced = part.strip(), part.rstrip() != part
    while spaced and (len(inner) - len(inner.rstrip("\\"))) % 2:
        shorter = inner[:-1]
        inner = shorter.rstrip()
        spaced = inner != shorter
    return inner


def _cut(text: str, start: int, stop: int, how: How) -> Extracted:
    """Without the white space around it."""
    part = text[start:stop]
    inner = _stripped(part)
    start += len(part) - len(part.lstrip())
    return Extracted(inner, how, start, start + len(inner)) if inner else NO_ANSWER
