"""Reading an answer: one pass over its tokens, so that its length is all it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

#: Characters of a plain number; beyond, it is text (and Python refuses to read integers of thousands of digits).
MAX_NUMBER = 400

#: A decimal with this many significant digits may stand for a fraction or a root.
APPROXIMATE_DIGITS = 6
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+|[A-Za-z]+|\s+|.", re.DOTALL)


def _table(rows: str) -> dict[str, str]:
    """``a b c → d`` on each line."""
    pairs = [row.split("→") for row in rows.strip().splitlines()]
    return {name: target.strip() for names, target in pairs for name in names.split()}


_COMMANDS = r"\cdot \cdot \cdot \pi \infty \le \ge \le \ge \le \ge \ne \pm \cup \cap \in \sqrt \emptyset".split()
_SIGNS = str.maketrans(
    {
        # The space keeps a command apart from the letter behind it.
        **{sign: f"{command} " for sign, command in zip("×·⋅π∞≤≥⩽⩾≦≧≠±∪∩∈√∅", _COMMANDS, strict=True)},
        **dict(zip("−–÷²³’½¼¾", r"- - / ^2 ^3 ' \frac{1}{2} \frac{1}{4} \frac{3}{4}".split(), strict=True)),
        **dict.fromkeys("\u00a0\u2009\u202f\u3000~", " "),
        # Full-width letters, digits and signs, as Chinese and Japanese texts write them.
        **{chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5E)},
        "、": ",",
        "。": ".",
    }
)
_DROPPED = {rf"\{word}" for word in "left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle limits".split()}
_SPACES = {r"\,", r"\;", r"\:", r"\>", "\\ ", "\\\n", r"\quad", r"\qquad", r"\space", r"\thinspace"}
_TEXTS = {
    rf"\{word}"
    for word in "text mbox hbox textnormal textup textbf textit textrm textsf texttt emph mathrm mathbf mathit mathsf operatorname".split()
}
_UPRIGHT = (r"\mathrm", r"\operatorname", r"\mathit")
_RENAMED = _table(r"""
    \dfrac \tfrac \cfrac → \frac
    \leq \leqslant → \le
    \geq \geqslant → \ge
    \times \ast * → \cdot
    \neq → \ne
    \lbrace → \{
    \rbrace → \}
    \% percent percentage pct → %
    \degree → °
    \gt → >
    \lt → <
    \varnothing → \emptyset
    bmatrix → pmatrix
    sqrt → \sqrt
    pi → \pi
    infinity inf → \infty
""")
_FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp min max lim det".split())
_NO_SOLUTION = frozenset(
    "no solution,no solutions,no real solution,no real solutions,there is no solution,there are no solutions,empty set,the empty set".split(
        ","
    )
)
_SHORT_WORDS = frozenset("no on or if is it up am pm".split())
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# 1.234.567; a single group, 1.234, is a decimal.
_POINTED = re.compile(r"(?<![\w.,])[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}+(?![.,]?[0-9])")
_DEGREE = re.compile(r"\^\s{0,3}(?:\{\s{0,3}\\circ\s{0,3}\}|\\circ(?![A-Za-z]))")
_UNIT_NAMES = _table("""
    $ usd → dollar
    € eur → euro
    £ lb lbs → pound
    ¥ → yen
    ₹ → rupee
    ¢ → cent
    degree deg → °
    feet ft → foot
    inches in → inch
    centimeter centimetre → cm
    millimeter millimetre → mm
    kilometer kilometre → km
    meter metre → m
    kilogram → kg
    gram → g
    liter litre → l
    hr h → hour
    min → minute
    sec s → second
    yr → year
    mi → mile
    yd → yard
    sq → square
    people → person
    mph → mile per hour
""")

#: Words that are units when they stand bare behind a number; inside \text{…} any short phrase is one.
_BARE_UNITS = frozenset(
    "cm mm km kg mg ml ft inch inches foot feet yard yards mile miles meter meters metre metres centimeter centimeters kilometer kilometers "
    "gram grams kilogram kilograms liter liters litre litres degree degrees deg dollar dollars cent cents euro euros pound pounds unit units "
    "second seconds minute minutes hour hours day days week weeks month months year years square cubic sq mph per people students points "
    "apples coins marbles ways times sides".split()
)

#: In a phrase behind a number these change what is claimed, so the phrase is no unit.
_NO_UNIT = frozenset(
    "or and less more than is are if least most not only for all except when where with over under hundred thousand million billion trillion "
    "dozen odd even mod base plus minus half no none never about".split()
)
_CONSTANTS = frozenset((r"\pi", r"\sqrt", r"\frac"))
_DEC = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBERS = {
    kind: re.compile(rf"(?P<sign>[-+]?){pattern}", re.ASCII)
    for kind, pattern in {
        "plain": rf"(?P<a>{_DEC})",
        "ratio": rf"(?P<a>{_DEC})/(?P<b>{_DEC})",
        "frac": rf"\\frac\{{(?P<a>[-+]?{_DEC})\}}\{{(?P<b>[-+]?{_DEC})\}}",
        "mixed": r"(?P<whole>\d+)\\frac\{(?P<a>\d+)\}\{(?P<b>\d+)\}",
        "mixed ratio": r"(?P<whole>\d+) (?P<a>\d+)/(?P<b>\d+)",
        "scientific": rf"(?P<a>{_DEC})(?:\\cdot10\^(?:\{{(?P<e>-?\d{{1,3}})\}}|(?P<e1>-?\d{{1,3}}))|[eE](?P<e2>[-+]?\d{{1,3}}))",
        "power": r"(?P<a>10)\^(?:\{(?P<e>-?\d{1,3})\}|(?P<e1>\d{1,3}))",
        "repeating": r"(?P<a>\d*)\.(?P<fixed>\d*)\\overline(?:\{(?P<again>\d+)\}|(?P<again1>\d))",
        "spaced": r"(?P<a>\d{1,3}(?: \d{3})+)",
    }.items()
}
_BASED = re.compile(
    r"(?P<digits>[0-9A-Za-z]+)_(?:\{(?P<base>\d{1,2})\}|(?P<base1>\d))(?:\\text\{(?:base)?\})?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A parsed answer: its normalised LaTeX without unit and percent sign, and its simple properties."""

    text: str
    unit: str = ""
    percent: bool = False
    words: str | None = None
    number: Fraction | None = None
    based: tuple[str, str] | None = None
    merged: bool = False  # digits were joined over a thousands separator
    source: str = ""  # what was read

    @property
    def digits(self) -> int:
        """Significant digits of a plain decimal with a point; 0 for anything else."""
        if self.number is None or "." not in self.text or not re.fullmatch(rf"[-+]?{_DEC}", self.text, re.ASCII):
            return 0
        return len(self.text.lstrip("+-").replace(".", "").lstrip("0"))


def read(raw: str, thousands: bool = True) -> Reading:
    tokens, currency = _tokens(raw)
    tokens, merged = _commas(tokens, thousands)
    tokens = _semicolons(tokens)
    tokens = _scaled(tokens)
    tokens, unit, percent = _unit(tokens)
    tokens = _unwrapped(tokens)
    words = _words(tokens)
    text = _joined(_braced(tokens))
    if words in _NO_SOLUTION or text == r"\{\}":
        words, text = None, r"\emptyset"
    return Reading(
        text=text,
        unit=unit or currency,
        percent=percent,
        words=words,
        number=_number(text),
        based=_based(text),
        merged=merged,
        source=raw,
    )


def _tokens(raw: str) -> tuple[list[str], str]:
    """Tokens without layout, \\text{…} as one of them, and the currency in front."""
    text = bare(_relations(_unescaped(raw.translate(_SIGNS))))
    text = _DEGREE.sub("°", re.sub(r"\\!\s*", "", text).replace("{,}", ","))
    text = _POINTED.sub(lambda match: match[0].replace(".", ""), text)
    pieces: list[str] = TOKEN.findall(text)
    out: list[str] = []
    currency = ""
    begun = False  # whether anything but a sign has been read
    at = 0
    while at < len(pieces):
        piece = pieces[at]
        at += 1
        if piece in _TEXTS:
            content, at = _group(pieces, at)
            word = " ".join("".join(content).split())
            if piece in _UPRIGHT and word in ("e", "i"):  # the numbers, set as names are
                out.append(word)
                begun = True
                continue
            if word.lower() in ("and", "or"):
                out.append(",")
            elif any(sign.isalpha() for sign in word):
                out += [" ", rf"\text{{{word}}}", " "]
            else:
                out += content
        elif piece == r"\overline" and "".join(segment := _group(pieces, at)[0]).isupper():  # the segment AB
            out += segment
            at = _group(pieces, at)[1]
        elif piece in ("$", r"\$", "€", "£", "¥", "₹"):
            currency = currency if begun else _UNIT_NAMES[piece.lstrip("\\")]
            continue
        elif piece in _DROPPED:
            continue
        elif piece.isspace() or piece in _SPACES:
            out.append(" ")
        elif piece.lower() in ("and", "or"):
            out.append(",")
        else:
            out.append(_RENAMED.get(piece, _RENAMED.get(piece.lower(), piece) if len(piece) > 2 else piece))
        begun |= bool(out) and out[-1] not in " -+"
    return out, currency


# Commands that begin no line, so that a doubled backslash before them is no line break.
_COMMON = "[dtc]?frac|sqrt|left|right|text[a-z]{0,6}|mathrm|pi|cdot|times|l[et]q?|g[et]q?|neq?|pm|cup|cap|in|infty|circ|theta|alpha|boxed"
_DOUBLED = re.compile(rf"\\\\(?=(?:{_COMMON})(?![A-Za-z]))")
_GLUED = re.compile(r"(?<=[\d)\]}])(and|or)(?=[A-Z\d(\[-])")  # x=1orX=2
_RELATION = re.compile(r"([<>])=|(?<![\d)!])!=")


def _unescaped(text: str) -> str:
    """Commands with one backslash, where a text was written as in a program's string, with two."""
    if "\\\\" not in text:
        return text
    if all(len(run) % 2 == 0 for run in re.findall(r"\\+", text)) and re.search(r"\\[A-Za-z]{2}", text):
        return text.replace("\\\\", "\\")
    return text if r"\begin" in text else _DOUBLED.sub(r"\\", text)


def _relations(text: str) -> str:
    """``>=``, ``<=`` and ``!=`` as LaTeX has them; after a digit or a bracket the last is a factorial and an equals sign."""
    text = _GLUED.sub(r" \1 ", text)
    return _RELATION.sub(lambda match: {"<": r"\le ", ">": r"\ge ", None: r"\ne "}[match[1]], text)


def bare(text: str) -> str:
    """Without white space, mathematical delimiters, markdown stars, the full stop of its sentence and a last line break."""
    pairs = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
    for _ in range(8):
        before = text
        text = text.strip()
        if not text.endswith(("\\.", "\\,", "\\;", "\\:")):
            text = text.rstrip(".,;:").rstrip()
        if text.endswith("\\") and len(text) > 1:
            text = text.rstrip("\\").rstrip() or text
        for left, right in pairs:
            if len(text) >= len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)]
                break
        if text == before:
            break
    return text


def _group(pieces: Sequence[str], at: int) -> tuple[list[str], int]:
    """The tokens inside the braces that open at `at`, and the place after them; none where no brace opens, or none closes."""
    start = at
    while start < len(pieces) and pieces[start].isspace():
        start += 1
    if start >= len(pieces) or pieces[start] != "{":
        return [], at
    depth = 0
    for stop in range(start, len(pieces)):
        depth += {"{": 1, "}": -1}.get(pieces[stop], 0)
        if depth == 0:
            return list(pieces[start + 1 : stop]), stop + 1
    return [], len(pieces)


def _commas(tokens: list[str], thousands: bool) -> tuple[list[str], bool]:
    """Thousands separators taken out (never inside brackets, where a comma separates); every other comma as ', '."""
    out: list[str] = []
    depth = 0
    merged = False
    at = 0
    while at < len(tokens):
        token = tokens[at]
        depth += 1 if token in ("(", "[", r"\{") else -1 if token in (")", "]", r"\}") else 0
        if thousands and depth <= 0 and token.isdigit() and len(token) <= 3 and not token.startswith("0"):
            stop = at + 1
            while tokens[stop : stop + 1] == [","] and "".join(tokens[stop + 1 : stop + 2]).isdigit():
                stop += 2
            groups = tokens[at:stop:2]
            lengths = [len(group) for group in groups]
            # 1,234,567, and 12,34,567 as it is written in India
            whole = len(groups) > 1 and (
                set(lengths[1:]) == {3} or (lengths[0] < 3 == lengths[-1] and set(lengths[1:-1]) == {2})
            )
            merged |= whole
            # 1,234,56 is no number but a list.
            if whole:
                out.append("".join(groups))
            else:
                out += [part for group in groups for part in (", ", group)][1:]
            at = stop
            continue
        if token == ",":
            while out and out[-1] == " ":
                out.pop()
            if out and out[-1] != ", ":  # "2, and 3" has two separators for one
                out.append(", ")
        elif not (token == " " and out and out[-1] == ", "):
            out.append(token)
        at += 1
    while out and out[-1] in (" ", ", "):
        out.pop()
    return out, merged


def _semicolons(tokens: list[str]) -> list[str]:
    """Semicolons as commas; around groups of them, "5, 2; 7, 2", they separate tuples."""
    if ";" not in tokens:
        return tokens
    depth = 0
    top: set[str] = set()
    groups: list[list[str]] = [[]]
    for token in tokens:
        depth += (token in ("(", "[", r"\{", "{")) - (token in (")", "]", r"\}", "}"))
        if depth == 0 and token in (", ", ";"):
            top.add(token)
        if token == ";" and depth == 0:
            groups.append([])
        elif not (token == " " and groups[-1][-1:] in ([], [", "])):
            groups[-1].append(", " if token == ";" else token)
    if len(top) == 2:
        groups = [["(", *_trimmed(group), ")"] if ", " in group else group for group in groups]
    return [token for group in groups for token in (", ", *_trimmed(group))][1:]


def _scaled(tokens: list[str]) -> list[str]:
    """5 million → 5\\cdot10^{6}."""
    if len(tokens) < 2:
        return tokens
    last = tokens[-1].removeprefix(r"\text{").removesuffix("}").lower()
    if (power := _SCALES.get(last)) and any(token.isdigit() for token in tokens[:-1]):
        return [*_trimmed(tokens[:-1]), r"\cdot", "10", "^", "{", str(power), "}"]
    return tokens


def _unit(tokens: list[str]) -> tuple[list[str], str, bool]:
    """The tokens without a trailing unit or percent sign, the unit by its one name, whether there was a percent sign."""
    tokens = _trimmed(tokens)
    percent = False
    if len(tokens) > 1 and tokens[-1] in ("%", r"\text{percent}", r"\text{percentage}", r"\text{%}"):
        return _trimmed(tokens[:-1]), "", True
    if len(tokens) > 1 and tokens[-1] == "°":
        return _trimmed(tokens[:-1]), "°", percent
    body, power = tokens, ""
    if len(tokens) > 2 and tokens[-2] == "^" and tokens[-1] in ("2", "3"):
        body, power = _trimmed(tokens[:-2]), tokens[-1]
    elif len(tokens) > 4 and tokens[-4:-2] == ["^", "{"] and tokens[-2] in ("2", "3") and tokens[-1] == "}":
        body, power = _trimmed(tokens[:-4]), tokens[-2]
    start = len(body)
    phrase: list[str] = []
    while start > 0 and (
        body[start - 1] == " " or body[start - 1].startswith(r"\text{") or body[start - 1].lower() in _BARE_UNITS
    ):
        start -= 1
        phrase += body[start].removeprefix(r"\text{").removesuffix("}").split()[::-1]
    names = [word.lower().replace(".", "") for word in reversed(phrase)]
    head = _trimmed(body[:start])
    if (
        not names
        or len(names) > 4
        or _NO_UNIT & set(names)
        or not any(token.isdigit() or token in _CONSTANTS for token in head)
    ):
        return tokens, "", percent
    # After an operator or a comma the words belong to the expression.
    if head[-1] in ("+", "-", "=", ", ", "(", "[", r"\cdot", "/", "^", "_"):
        return tokens, "", percent
    return head, _unit_name(names, power), percent


def _unit_name(words: list[str], power: str) -> str:
    names: list[str] = []
    for word in words:
        name = (
            _UNIT_NAMES.get(word)
            or _UNIT_NAMES.get(word.removesuffix("s"))
            or (word[:-1] if len(word) > 3 and word.endswith("s") else word)
        )
        if name in ("square", "cubic"):
            power = "2" if name == "square" else "3"
        else:
            names.append(name)
    if not names or names == ["unit"]:
        return "unit"  # of nothing in particular; agrees with any other
    return " ".join(names) + (f"^{power}" if power else "")


def _unwrapped(tokens: list[str]) -> list[str]:
    """Without parentheses around the whole that hold no list."""
    for _ in range(3):
        if len(tokens) < 3 or tokens[0] != "(" or tokens[-1] != ")" or ", " in tokens:
            return tokens
        depth = 0
        for place, token in enumerate(tokens):
            depth += {"(": 1, ")": -1}.get(token, 0)
            if depth == 0 and place < len(tokens) - 1:
                return tokens
        tokens = _trimmed(tokens[1:-1])
    return tokens


def _words(tokens: list[str]) -> str | None:
    """The text in lower case where it is words rather than mathematics: east is no product of e, a, s and t."""
    found = False
    pure = all(token[0].isalpha() or token[0] in " .,;:()'\"-!?" or token.startswith(r"\text{") for token in tokens)
    for place, token in enumerate(tokens):
        if token.startswith(r"\text{"):
            found = True
        elif token.isalpha() and token.lower() not in _FUNCTIONS:
            # An environment's name, or an index.
            if place > 1 and tokens[place - 1] == "{" and tokens[place - 2] in (r"\begin", r"\end", "_"):
                continue
            spaced = place == 0 or tokens[place - 1] in (" ", ", ")
            found |= (
                len(token) >= 4 or (len(token) == 3 and (pure or spaced)) or (pure and token.lower() in _SHORT_WORDS)
            )
    if not found:
        return None
    return _plain_words(tokens)


def words_of(raw: str) -> str:
    """The text as words alone, in lower case, for a pair of which one side is no mathematics."""
    tokens, _ = _tokens(raw)
    return _plain_words(_commas(tokens, True)[0])


def _plain_words(tokens: Iterable[str]) -> str:
    plain = "".join(token[6:-1] if token.startswith(r"\text{") else token for token in tokens)
    return " ".join(plain.split()).strip(" .()[]\"':").lower()


def _braced(tokens: list[str]) -> list[str]:
    """\\frac12 and \\sqrt3 with the braces they leave out."""
    out: list[str] = []
    stack: list[int] = []
    rounds: list[bool] = []  # for each open parenthesis, whether it is the argument of sqrt
    need = 0
    for place, token in enumerate(tokens):
        if token in ("(", ")"):
            of_root = need > 0 and out[-1] == r"\sqrt" if token == "(" else bool(rounds) and rounds.pop()
            if token == "(":
                rounds.append(of_root)
            out.append(("{" if token == "(" else "}") if of_root else token)
            need = 0
        elif token == "{":
            stack.append(max(need - 1, 0))
            need = 0
            out.append(token)
        elif token == "}":
            need = stack.pop() if stack else 0
            out.append(token)
        elif need and token == " ":
            continue
        elif need and (token[0].isdigit() or token.isalpha()):
            for sign in token[:need]:
                out += ["{", sign, "}"]
            rest = token[need:]
            need = max(need - len(token), 0)
            if rest:
                out.append(rest)
        else:
            out.append(token)
            if token == r"\frac":
                need = 2
            elif token == r"\sqrt":
                need = 0 if _next(tokens, place) == "[" else 1
            elif need:
                need = 0 if token.startswith("\\") else need - 1
    return out


def _next(tokens: Sequence[str], place: int) -> str:
    return next((token for token in tokens[place + 1 : place + 3] if token != " "), "")


def _joined(tokens: Sequence[str]) -> str:
    """Spaces only where they separate: two words or numbers, or a command from the letter behind it."""
    out: list[str] = []
    space = False
    for token in tokens:
        if token == " ":
            space = True
            continue
        if out:
            last, first = out[-1], token[0]
            command = last[0] == "\\" and last[-1].isalpha()
            if (first.isalpha() and command) or (space and first.isalnum() and last[-1].isalnum() and not command):
                out.append(" ")
        out.append(token)
        space = False
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", "".join(out)).removeprefix("+")


def _trimmed(tokens: list[str]) -> list[str]:
    start, stop = 0, len(tokens)
    while start < stop and tokens[start] == " ":
        start += 1
    while start < stop and tokens[stop - 1] == " ":
        stop -= 1
    return tokens[start:stop]


def _number(text: str) -> Fraction | None:
    """The exact value of a plain number: integer, decimal, fraction, mixed number, power of ten, repeating decimal."""
    if len(text) > MAX_NUMBER:
        return None
    for kind, pattern in _NUMBERS.items():
        if not (match := pattern.fullmatch(text)):
            continue
        part = match.groupdict()
        if kind == "repeating":
            fixed, again = part["fixed"], part["again"] or part["again1"]
            value = Fraction(
                int(part["a"] + fixed + again) - int(part["a"] + fixed or "0"),
                10 ** len(fixed) * (10 ** len(again) - 1),
            )
        else:
            value = Fraction(part["a"].replace(" ", ""))
            if part.get("b"):
                below = Fraction(part["b"])
                if not below:
                    return None
                value /= below
            if part.get("whole"):
                value += int(part["whole"])
            if power := part.get("e") or part.get("e1") or part.get("e2"):
                value = value * Fraction(10) ** int(power) if kind != "power" else Fraction(10) ** int(power)
        return -value if part["sign"] == "-" else value
    return None


def _based(text: str) -> tuple[str, str] | None:
    """Digits and base; letters alone are digits from base 11 on, else a variable with its index."""
    match = _BASED.fullmatch(text) if len(text) <= MAX_NUMBER else None
    if match is None:
        return None
    digits, base = match["digits"].upper().lstrip("0"), match["base"] or match["base1"]
    if not any(sign.isdigit() for sign in match["digits"]) and (int(base) < 11 or max(digits) > "F"):
        return None
    return digits, base


def vote_of(answer: str) -> str:
    """What an answer counts as in a vote: 1/2, 0.5 and \\frac{1}{2} are one; what is no number counts as its normalised text."""
    one = read(answer)
    if one.number is not None:
        return f"{one.number}{'%' if one.percent else ''}"
    return one.text or answer.strip()


def approximates(answer: Reading, value: Fraction) -> bool:
    """Whether a decimal of enough digits is `value` rounded or cut at its last place."""
    if answer.digits < APPROXIMATE_DIGITS or answer.number is None:
        return False
    unit = 10 ** len(answer.text.split(".")[1])
    return abs(answer.number - value) * unit <= Fraction(1, 2) or answer.number * unit == math.trunc(value * unit)
