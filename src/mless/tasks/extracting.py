"""From a model's text to its answer: the last box (or boxes joined by "and"), the number after ####, a number or letter given as result.

Extraction only finds the answer; `grading` judges it. An answer is *stated* where the text presents it as its result. It is *guessed* where
it is only the last number of some prose, or the last letter in brackets (docs/extraction.md). Each rule reads the text in one pass, so 100
kB of braces cost no more than 100 kB of prose, and no text raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from mless.registry import Registry
from mless.tasks.stating import called_answer, stated_letter, stated_number

#: The name of a rule in the table `EXTRACTION_RULES`, which stands below the rules.
Rule = str

#: The rules of each task, first to last. Tasks that ask for a box do not fall back to the last number: in a text cut off while reasoning it
#: could be any number, and would hide the missing answer.
TASK_RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "math500": ("boxed",),
        "aime24": ("boxed",),
        "aime25": ("boxed",),
        "gsm8k": ("hashes", "boxed", "number"),
        "arithmetic": ("boxed", "hashes", "number"),
        "humaneval": ("code",),
    }
)
#: For your own file.
DEFAULT_RULES: tuple[Rule, ...] = ("boxed", "hashes", "number")


@dataclass(frozen=True, slots=True)
class Extracted:
    """The answer found in a text, the rule that found it ("none" without an answer), and where it stands there (characters, without `stop`).

    `stated` tells whether the text presents it as its result; None where there is no answer, or where an answer comes from elsewhere.
    """

    text: str | None
    how: str
    start: int = 0
    stop: int = 0
    stated: bool | None = None


NO_ANSWER = Extracted(None, "none")


def extract(text: str, rules: Sequence[Rule] = DEFAULT_RULES) -> Extracted:
    """The answer by the first of `rules` that finds one."""
    for rule in rules:
        found = EXTRACTION_RULES.get(rule)(text)
        if found.text is not None:
            return found
    return NO_ANSWER


# --- \boxed{…} ---

# Two backslashes before the word are one written as in a program's string. \\. eats escaped braces, so they never count.
_BRACES = re.compile(r"\\\\?(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
# The content of a box without braces: a number, a simple fraction, a word.
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
    cuts = [_cut(text, box.start, box.stop, "boxed", stated=True) for box in reversed(parts)]
    # What is boxed twice is one answer, said twice.
    contents = dict.fromkeys(cut.text or "" for cut in cuts)
    if len(contents) == 1:
        return cuts[-1]
    return Extracted(", ".join(contents), "boxed", cuts[0].start, cuts[-1].stop, stated=True)


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


def answer_begins(text: str) -> int | None:
    """Where the answer of a worked solution begins: at the number's ``####``, else at the last box, else at the last ``####``.

    Boxes that are one answer begin at the first of them, and a box in a box at the outer one.
    """
    if (number := hashes(text)).text is not None:
        return text.rindex("####", 0, number.start)
    if not (boxes := _boxes(text)):
        return match.start() if (match := next(reversed(list(_HASHES.finditer(text))), None)) else None
    first = boxes.pop()
    while boxes and _joined(text[boxes[-1].end : first.begin]):
        first = boxes.pop()
    return _outermost(text, first.begin)


def _outermost(text: str, begin: int) -> int:
    """Where the outermost box begins that is still open at `begin`; else `begin`."""
    open_boxes: list[int | None] = []
    box_brace, box = -1, -1
    for match in _BRACES.finditer(text, 0, begin):
        sign = match[0]
        if sign == "{":
            open_boxes.append(box if match.start() == box_brace else None)
        elif sign == "}":
            if open_boxes:
                open_boxes.pop()
        elif sign.endswith(("boxed", "fbox")):
            after = _SPACE.match(text, match.end())
            box_brace, box = (after.end() if after else match.end()), match.start()
    return next((one for one in open_boxes if one is not None), begin)


# --- numbers ---

# A digit of ASCII, or its full-width form as Chinese and Japanese text has it.
_D = "[0-9０-９]"
_SPACE_IN_NUMBER = "[\u00a0\u2009\u202f]"
_PLAIN = rf"(?:{_D}{{1,3}}(?:,{_D}{{3}})+(?!{_D})(?:\.{_D}+)?|{_D}+(?:\.{_D}+)?|\.{_D}+)"
_DIGITS = "|".join(
    (
        rf"{_D}{{4}}-{_D}{{2}}-{_D}{{2}}(?![\w-])",  # a date
        rf"{_D}+(?::{_D}+){{1,2}}(?![\w:])",  # 10:30, 3:4
        rf"{_D}{{1,6}}[ \u00a0]{_D}{{1,4}}/{_D}{{1,4}}(?![\w/])",  # 3 1/2
        rf"{_D}{{0,6}}[ \u00a0]?[½¼¾⅓⅔⅕⅙⅛]",
        rf"{_D}{{1,3}}(?:(?:\{{,\}}|\\,|{_SPACE_IN_NUMBER}){_D}{{3}})+(?!{_D})(?:\.{_D}+)?",  # 1{,}234 and 1 234 with a space that does not break
        rf"{_D}{{1,3}}(?:[ ]{_D}{{3}}){{2,}}(?!\w|[.,/]{_D})",  # 1 234 567
        rf"{_D}{{1,3}}(?:\.{_D}{{3}}){{2,}}(?!{_D})",  # 1.234.567
        rf"{_D}{{1,2}}(?:,{_D}{{2}})+,{_D}{{3}}(?!{_D})",  # 12,34,567
        rf"(?<![(\[{{,]){_D}+,{_D}{{1,2}}(?![\w,)\]}}]|\.{_D})",  # 3,5 with a decimal comma; in brackets, or in a longer row, it is a list
        rf"{_D}+(?:\.{_D}+)?\s?(?:[×x*·]|\\times|\\cdot)\s?10\s?\^\s?(?:\{{[-−]?{_D}{{1,3}}\}}|[-−]?{_D}{{1,3}})",  # 3 × 10^8
        rf"{_D}+(?:\.{_D}+)?[eE][-+]?{_D}{{1,3}}(?!\w|\.{_D})",  # 1e5
        rf"{_D}+\^(?:\{{[-−]?{_D}{{1,4}}\}}|[-−]?{_D}{{1,4}})",  # 2^10
        rf"{_PLAIN}(?:\s?/\s?{_PLAIN})?",
    )
)


def _number_pattern(currency: str) -> str:
    # Not inside a word (x2, H2O), not behind a point or an exponent; a minus after a number or a bracket is a difference, not a sign.
    sign = r"(?:(?<![\w)\]}.^０-９])[-−–+])?"
    return rf"(?<![\w.^]){sign}(?:{currency}\s?)?(?<![\w.^])(?:{_DIGITS})(?:\s?\\?%)?"


_NUMBER = re.compile(_number_pattern(r"\\?[$€£¥₹]"), re.ASCII)
_FRACTION = r"\\[dtc]?frac\s?(?:\{\s?-?\d{1,40}\s?\}\s?\{\s?-?\d{1,40}\s?\}|\d\s?\d(?!\d))"
# In LaTeX a bare dollar opens mathematics; only an escaped one is money.
_LATEX_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}.^])[-−+])?(?:(?<![\w.^]){_PLAIN}\s?)?{_FRACTION}(?:\s?\\?%)?|"
    + _number_pattern(r"(?:\\[$]|[€£¥₹])"),
    re.ASCII,
)


def number(text: str, *, latex: bool = False) -> Extracted:
    """The number that the text states as its result, else, as a guess, its last one.

    It is taken as it is written: sign, currency, thousands separators, a/b, 3 1/2, 1e5, 10:30, per cent; ``\\frac`` too with `latex`, or
    where the text has one.
    """
    spans = _numbers(text, latex=latex)
    found = stated_number(text, spans)
    return _cut(text, *spans[found.at], "number", stated=found.stated) if found else NO_ANSWER


def _numbers(text: str, *, latex: bool = False) -> list[tuple[int, int]]:
    """Where each number of a text stands."""
    pattern = _LATEX_NUMBER if latex or "frac" in text else _NUMBER
    # Between two dollars it is mathematics, with one it is money.
    return [
        (match.start() + (match[0][0] == "$" == text[match.end() : match.end() + 1]), match.end())
        for match in pattern.finditer(text)
    ]


# The rules of published evaluations, which look at the place of a number and not at what is said of it.


def last_number(text: str) -> Extracted:
    """The last number of the text, whatever is said of it: always a guess."""
    spans = _numbers(text)
    return _cut(text, *spans[-1], "last-number", stated=False) if spans else NO_ANSWER


def first_number(text: str) -> Extracted:
    """The first number of the text, whatever is said of it: always a guess."""
    spans = _numbers(text)
    return _cut(text, *spans[0], "first-number", stated=False) if spans else NO_ANSWER


_ANSWER_IS = re.compile(r"answer\s+is|answer\s*:", re.IGNORECASE)


def answer_is(text: str) -> Extracted:
    """The first number after the last "answer is" or "answer:"."""
    cue = next(reversed(list(_ANSWER_IS.finditer(text))), None)
    found = next((span for span in _numbers(text) if cue is not None and span[0] >= cue.end()), None)
    return _cut(text, *found, "answer-is", stated=True) if found else NO_ANSWER


# --- formulas ---

_DELIMITER = re.compile(r"\\[()\[\]]|\$\$?|\n[ \t]*\n|\\.", re.DOTALL)
_CLOSES = {r"\(": r"\)", r"\[": r"\]", "$": "$", "$$": "$$"}
# A name of something, not a result: n, f(x), ABCD, \alpha, (x, y).
_NAME = re.compile(r"(?:\\?[A-Za-z]{1,12}'?)?(?:\([A-Za-z](?:, ?[A-Za-z])*\))?")
# Two words in a row: the dollars around them are money.
_PROSE = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]{2,} +[A-Za-z]{2,}")


def formula(text: str) -> Extracted:
    """The formula (``$…$``, ``\\(…\\)``, ``\\[…\\]``) or number that the text calls its answer, else, as a guess, its last one."""
    formulas = [(start, stop) for start, stop in _formulas(text) if not _NAME.fullmatch(text[start:stop])]
    spans: list[tuple[int, int]] = []
    at = 0
    for match in _LATEX_NUMBER.finditer(text):
        while at < len(formulas) and formulas[at][0] <= match.start():
            spans.append(formulas[at])
            at += 1
        if not (at and match.start() < formulas[at - 1][1]):
            spans.append(match.span())
    spans += formulas[at:]
    found = called_answer(text, spans)
    return _cut(text, *spans[found.at], "formula", stated=found.stated) if found else NO_ANSWER


def _formulas(text: str) -> Iterator[tuple[int, int]]:
    """Where each formula stands, without its signs, the space around it and the full stop of its sentence."""
    opened, start = "", 0
    for match in _DELIMITER.finditer(text):
        sign = match[0]
        if opened and sign == _CLOSES[opened]:
            inside = text[start : match.start()]
            if sign == "$" and _PROSE.search(inside):
                start = match.end()  # that was an amount of money; this dollar may open a formula
                continue
            if trimmed := inside.rstrip(" \t\r\n.,;:"):
                yield start + len(trimmed) - len(trimmed.lstrip()), start + len(trimmed)
            opened = ""
        elif sign in _CLOSES and opened in ("", "$"):
            opened, start = sign, match.end()
        elif sign[0] == "\n" and opened == "$":
            opened = ""


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
            best = _cut(text, found.start(), found.end(), "hashes", stated=True)
    return best


# --- choice letters ---


def choice(text: str) -> Extracted:
    """The chosen letter: what the text calls its answer ("answer is B", ``\\boxed{B}``), else, as a guess, the last "(B)" that it does not deny."""
    found = stated_letter(text)
    if found is None:
        return NO_ANSWER
    return Extracted(text[found.start : found.stop].upper(), "choice", found.start, found.stop, found.stated)


def _stripped(part: str) -> str:
    """Without the space around it, LaTeX's own behind it included: of ``\\ `` a lone backslash would be left."""
    inner, spaced = part.strip(), part.rstrip() != part
    while spaced and (len(inner) - len(inner.rstrip("\\"))) % 2:
        shorter = inner[:-1]
        inner = shorter.rstrip()
        spaced = inner != shorter
    return inner


def _cut(text: str, start: int, stop: int, how: str, *, stated: bool) -> Extracted:
    """Without the white space around it."""
    part = text[start:stop]
    inner = _stripped(part)
    start += len(part) - len(part.lstrip())
    return Extracted(inner, how, start, start + len(inner), stated) if inner else NO_ANSWER


# --- code ---

_FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")


def code(text: str) -> Extracted:
    """Python code: the last fenced block that defines a function, else the last one, else the whole text, as a completion of its prompt.

    Blocks that name another language are passed over. A block that is cut off reaches to the end. Indentation is kept.
    """
    blocks = [match for match in _FENCE.finditer(text) if match[1].strip().lower() in _PYTHON and match[2].strip()]
    defining = [match for match in blocks if re.search(r"^[ \t]*(?:async )?def\s", match[2], re.MULTILINE)]
    if chosen := (defining or blocks)[-1:]:
        return Extracted(chosen[0][2], "code", chosen[0].start(2), chosen[0].end(2), True)
    return Extracted(text, "code", 0, len(text), True) if text.strip() else NO_ANSWER


# --- the table ---

#: Every rule by name: a function of the text. It gives NO_ANSWER where it finds nothing, and never raises.
EXTRACTION_RULES: Registry[Callable[[str], Extracted]] = Registry(
    "extraction_rules",
    "extraction rule",
    {
        "boxed": boxed,
        "hashes": hashes,
        "formula": formula,
        "number": number,
        "choice": choice,
        "code": code,
        "last-number": last_number,
        "first-number": first_number,
        "answer-is": answer_is,
    },
    wants="a function from a text to an mless.tasks.Extracted",
    fits=callable,
)
