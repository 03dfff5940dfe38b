"""Which number, or which choice letter, a text presents as its result, and whether it presents one at all.

Each candidate is read with a short piece of text on either side, and only the last ones of very many. So time grows linearly with the text.
A candidate has a level. 3: the text calls it the answer. 2: the text states it as a result ("= 5", "8 is the sum of"). 1: the same inside a
reason or a check. 0: neither, a guess. The last candidate of the highest level is taken.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Characters of text looked at on either side of a candidate.
_REACH = 90
#: Candidates looked at, counted from the end: a text with more numbers than that states its result among the last, or not at all.
_LOOKED_AT = 400

# The cues are looked for in small letters: `re.IGNORECASE` takes several times as long.
# What may stand between a cue and its result: space, Markdown, quotes, the opening signs of LaTeX, a currency's letters.
_LEAD_SIGNS = " \t\r\n*_\"'“”„‘’«»`$([{~≈|>"
_LEAD = (
    r"(?:\\(?:text|textbf|mathbf|mathrm|bm|left|quad|displaystyle|[(\[,;!])\{?|(?:usd|eur|gbp|us|rs\.?)\s?|"
    r"[\s*_\"'“”„‘’«»`$(\[{~≈|>])*+"
)
# Inside one sentence: a point belongs to it only inside a number.
_IN_SENTENCE = r"(?:[^\n.!?。！？]|\.(?=\d))"
_COPULA = (
    r"(?:is|are|was|be|becomes|equals|comes\s+(?:out\s+)?to|must\s+be|ist|lautet|beträgt|est(?:\s+de)?|vaut|es(?:\s+de)?|son|"
    r"é|è|wynosi|jest|là|adalah|равен|равна|равно|будет|это)"
)
_MARK = r"(?:[=:：→⇒>—]|->|=>)"
_ADVERBS = (
    r"(?:\s*,?\s*(?:therefore|thus|hence|then|simply|just|exactly|about|approximately|approx\.|roughly|only|indeed|also|still|now|clearly|"
    r"equal\s+to|given\s+by|a\s+total\s+of|going\s+to\s+be|actually|donc|also|daher|folglich),?){0,3}"
)
_ANSWER = (
    r"(?:answers?|results?|solutions?|antwort|ergebnis|lösung|resultat|réponse|résultat|respuesta|resultado|solución|resposta|risposta|"
    r"risultato|antwoord|uitkomst|odpowiedź|wynik|ответ|результат|jawaban|jawabannya|đáp\s+án|kết\s+quả|cevap|sonuç)"
)
_AMOUNT = (
    r"(?:sum|total|difference|product|quotient|remainder|value|amount|average|mean|number|summe|differenz|somme|suma|soma|somma|сумма|"
    r"разность)"
)
# From the noun to the number: no second copula in between, or "the answer is 5 when x is 3" would give 3.
_GAP = rf"(?:(?!\b{_COPULA}\b|[:：]){_IN_SENTENCE}){{0,60}}?"

_CALLED_ANSWER = re.compile(
    rf"(?:\b{_ANSWER}\b{_GAP}(?:\b{_COPULA}\b\s?:?|{_MARK}){_ADVERBS}{_LEAD}"
    rf"|\b{_ANSWER}[\s*_#]*\n{_LEAD}"  # a heading "Answer" and the number below it
    rf"|(?:^|\s)a\s?:{_LEAD}|\b(?:odpowiedź|wynik)\s+to\b{_LEAD}"
    r"|(?:答案|结果|结论|得数|正解|答え|答|正确答案)(?:应该|应当|就)?(?:是|为|等于|は|：|:|=)\s{0,3}"
    + _LEAD
    + r"|(?:정답|결과|답)(?:은|는|이|:)\s{0,3}"
    r"|(?:الجواب|الإجابة|الناتج|النتيجة)\s{0,3}(?:هو|هي|:)?\s{0,3}|उत्तर\s{0,3}(?:है|:)?\s{0,3}"
    r")\Z",
)
_NUMBER_WORD = r"[-−–+$€£]?\d[\d.,/]*"
_RESULT_BEFORE = re.compile(
    rf"(?:(?:[=≈→⇒∴]|->|=>|\bequals?(?:\s+to)?\b|\b(?:ergibt|macht|gleich|égale?(?:\s+à)?|font|donne|igual\s+a|равно|получится|получаем)\b"
    rf"|等于|得到|得出|得|共有|一共(?:是|有)?|总共(?:是|有)?|合計は|合計で){_ADVERBS}{_LEAD}"
    rf"|\b{_AMOUNT}\b{_GAP}(?:\b{_COPULA}\b|[:=]){_ADVERBS}{_LEAD}"
    rf"|\btotal\s+of\s+{_LEAD}"
    rf"|\b(?:this|that|which|it)(?:'s|\s+(?:is|was|gives?|leaves?|makes?|means|yields?|totals?|comes\s+to))(?:\s+(?:us|you|her|him|them))?,?"
    rf"{_ADVERBS}{_LEAD}"
    rf"|\b(?:we|you|i|one|they)(?:'ll|\s+(?:will|would|should|can|then|finally)){{0,2}}\s+(?:get|got|obtain|find|arrive\s+at|end\s+up\s+with|are\s+left\s+with)"
    rf"{_ADVERBS}{_LEAD}"
    rf"|\b(?:giving|leaving|yields?|yielding|making|results?\s+in|adds?\s+up\s+to|amounts?\s+to|to\s+get|to\s+give|to\s+obtain)"
    rf"(?:\s+(?:us|you|her|him|them))?{_ADVERBS}{_LEAD}"
    rf"|(?:\b(?:plus|minus|times|and|by|to|from|than|mal|und|más|et|y)|[-−+*×·÷/])\s*{_NUMBER_WORD}\s+(?:is|are|makes?|gives|ist|sind|es|son|est|é|è){_ADVERBS}{_LEAD}"
    rf"|\bnot\s+\S{{1,20}}\s+but\s+(?:rather\s+)?{_LEAD}"
    rf"|\b(?:no,?\s+wait|wait|actually|correction|sorry|scratch\s+that|oops|i\s+mean|make\s+that|or\s+rather)[\s,:.!…—-]*"
    rf"(?:(?:it|that)(?:'s|\s+is|\s+should\s+be))?{_LEAD}"
    r")\Z",
)
# The last word before the number in all of these patterns; with any other word they are not tried.
_LAST_WORD = re.compile(r"([^\W\d_]{1,15})[\s,.:!…—'’-]*\Z")
_CUE_WORDS = frozenset(
    (
        "is are was be becomes equals equal to ist lautet beträgt est de vaut es son é è wynosi jest là adalah равен равна равно будет это therefore "
        "thus hence then simply just exactly about approximately approx roughly only indeed also still now clearly by of actually donc daher folglich "
        "ergibt macht gleich égal égale à font donne a получится получаем s gives give leaves leave makes make means yields yield totals total us you "
        "her him them get got obtain find at with giving leaving yielding making in sind wait correction sorry that oops mean rather but usd eur gbp "
        "rs answer answers result results solution solutions antwort ergebnis lösung resultat réponse résultat respuesta resultado solución resposta "
        "risposta risultato antwoord uitkomst odpowiedź wynik ответ результат jawaban jawabannya án quả cevap sonuç"
    ).split()
)
_CUE_SIGNS = "=≈:：→⇒>—∴"
_UNITS = r"(?:\s?[^\W\d_]{1,15}\b\.?){0,3}?"
_CALLED_AFTER = re.compile(
    rf"{_UNITS}[\s*_$)\]}}\"']*\s(?:is|was|would\s+be|must\s+be)\s+(?:(?:therefore|thus|indeed|then)\s+)?(?:the|my|our)\s+"
    r"(?:(?:final|correct|right|required|desired)\s+){0,2}(?P<noun>answer|result|solution|sum|total|difference|product|quotient|remainder)\b",
    re.IGNORECASE,
)
# "8 = 5 + 3": the sum is on the right, and nothing comes after it.
_SUM_AFTER = re.compile(r"[\s$*]*=\s*\d[\d.]*+(?:\s?(?:[-−+*×·÷/]|\\times|\\cdot)\s?\d[\d.]*+)+[\s$*)]*(?:[.,;!\n]|\Z)")
# "24 times." and "70/quiz" are units; "90 minutes / 450" is a quotient.
_OPERATOR_AFTER = re.compile(
    r"[\s$)\]]*(?:[+×·÷^=>≤≥≈]|<(?!/)|\*\s?[\d(]|[-−–]\s?[\d(]|/\s?[$\d(]|\\(?:times|cdot|div|pm)\b|x\s\d|times(?=\s+[$\d(])|"
    r"(?:plus|minus|divided\s+by|multiplied\s+by)\b)"
    r"|(?:\s[A-Za-z]{1,15}){1,2}\s?[-+*/×÷]\s?[$\d(]"
)
_OPERATOR_BEFORE = re.compile(r"(?:[+×·÷^<>/-]|[\d)\s]\*|\\(?:times|cdot|div))\s*\Z")
_QUESTION_AFTER = re.compile(r"[\s*_$)\]}]*\?")
_CONCLUDES = re.compile(
    r"(?:\A|[.!?。！？\n])[\s*_#>-]*(?:so|thus|therefore|hence|consequently|in\s+total|altogether|in\s+all|finally|in\s+conclusion|overall|"
    r"as\s+a\s+result|(?:that|this|which)\s+means|∴|donc|also|por\s+lo\s+tanto|portanto|quindi|所以|因此|したがって|따라서|значит)(?![A-Za-z])"
    rf"{_IN_SENTENCE}*+\Z",
)
_LEFT_OVER = re.compile(
    rf"{_IN_SENTENCE}{{0,60}}?\b(?:left|remaining|remain|remains|altogether|in\s+total|in\s+all)\b", re.I
)
_SENTENCE_END = re.compile(r"[!?。！？\n]|\.(?!\d)")
_BOLD_BEFORE = re.compile(r"\*\*\s?\$?\Z")
_BOLD_AFTER = re.compile(rf"\$?{_UNITS}\.?\s?\*\*")
_REST_OF_LINE = re.compile(rf"{_UNITS}[\s.!*_$`\"')\]}}。]*")
_LINE_LEAD = re.compile(rf"(?:[-•]\s|\\\()?{_LEAD}")
_INDENT = 9
_LIST_MARK = re.compile(r"^\s{0,8}\d{1,2}[.)](?=\s|\Z)", re.MULTILINE)

_CORRECTION = re.compile(
    r"\b(?:no,?\s+wait|wait[,.!…—-]|actually,|correction:|scratch\s+that|oops|I\s+mean\b|make\s+that\b|or\s+rather\b|"
    r"that(?:'s|\s+is)\s+(?:wrong|not\s+right|incorrect))",
    re.IGNORECASE,
)
_CHECK = re.compile(
    r"\b(?:to\s+check|(?:double[-\s])?check(?:ing)?\s*:|verif(?:y|ication|ying)\b|to\s+confirm\b|proof:|probe:|vérification)",
    re.I,
)
# `finditer` goes on behind what it took, so every character is read once.
_REASON = re.compile(
    rf"\b(?:because|since|denn|weil|car|porque|puisque)\b{_IN_SENTENCE}*+|(?:因为|から){_IN_SENTENCE}*+", re.I
)
# What stands between a reason's first word and the beginning of its sentence, where it opens the sentence.
_OPENS = re.compile(r"(?:\A|[.!?。！？\n])[\s*_#>-]*\Z")
_CLAUSE_END = re.compile(r",\s")
_REFUSAL = re.compile(
    r".{0,60}?\b(?:(?:I|we)(?:'m|\s+am|\s+are)?\s+(?:sorry,?\s+(?:but\s+)?I\s+)?(?:can(?:no|'|’)?t|cannot|(?:not\s+able|unable)\s+to|"
    r"(?:do\s+not|don(?:'|’)t)\s+know|have\s+no\s+idea))",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate's place in the list of candidates, and whether the text states it as its result."""

    at: int
    stated: bool


def stated_number(text: str, spans: Sequence[tuple[int, int]]) -> Found | None:
    """Which of the numbers at `spans`, in order, is the text's result; None where there is none, or the text refuses to answer."""
    if not spans:
        return None
    if len(spans) == 1 and _alone(text, 0, len(text), spans[0]):
        return Found(0, stated=True)
    first = _after_correction(text, spans)
    for since in dict.fromkeys((first, 0)):
        levels = _levels(text, spans, since)
        if best := max(levels, default=0):
            # the last of the highest level
            at = len(levels) - 1 - levels[::-1].index(best)
            return Found(since + at, stated=True)
    return None if _REFUSAL.match(text) else Found(len(spans) - 1, stated=False)


def called_answer(text: str, spans: Sequence[tuple[int, int]]) -> Found | None:
    """The last of `spans` that the text calls its answer; else, as a guess, the last. All there is in a text is stated too."""
    if not spans:
        return None
    for at in range(len(spans) - 1, max(-1, len(spans) - 1 - _LOOKED_AT), -1):
        before = _before(text, spans[at][0]).lower()
        if _may_be_cue(before) and _CALLED_ANSWER.search(before):
            return Found(at, stated=True)
    return Found(len(spans) - 1, stated=len(spans) == 1 and _alone(text, 0, len(text), spans[0]))


def _after_correction(text: str, spans: Sequence[tuple[int, int]]) -> int:
    """The first number behind the last "no wait" that has one behind it."""
    since = 0
    starts = [start for start, _ in spans]
    for match in _CORRECTION.finditer(text):
        at = bisect.bisect_left(starts, match.end())
        if at < len(spans):
            since = at
    return since


def _levels(text: str, spans: Sequence[tuple[int, int]], since: int) -> list[int]:
    checked = _CHECK.search(text, spans[since][0])
    check = checked.start() if checked else len(text)
    reasons = _reasons(text)
    reason_starts = [start for start, _ in reasons]
    listed = len(_LIST_MARK.findall(text)) > 1
    levels: list[int] = [0] * max(0, len(spans) - _LOOKED_AT - since)
    for at in range(since + len(levels), len(spans)):
        start = spans[at][0]
        level = _level(text, spans, at, listed=listed)
        if level == 2:
            inside = bisect.bisect_right(reason_starts, start) - 1
            if start >= check or (
                inside >= 0
                and start < reasons[inside][1]
                and not _main_clause(text, spans, at, reasons[inside][0], levels, since)
            ):
                level = 1
        levels.append(level)
    return levels


def _reasons(text: str) -> list[tuple[int, int]]:
    """Where each reason begins and ends; one that opens its sentence ends with its clause: "Since 3 are left, 3 + 4 = 7"."""
    found: list[tuple[int, int]] = []
    for match in _REASON.finditer(text):
        start, stop = match.span()
        opens = _OPENS.search(text[max(0, start - 20) : start])
        comma = _CLAUSE_END.search(text, start, stop) if opens else None
        found.append((start, comma.start() if comma else stop))
    return found


def _main_clause(
    text: str, spans: Sequence[tuple[int, int]], at: int, reason: int, levels: Sequence[int], since: int
) -> bool:
    """Whether a result in the reason that begins at `reason` is the sentence's own result, not only its premise."""
    head = _SENTENCE_END.split(text[max(0, reason - _REACH) : reason])[-1]
    # "8 - 3 = 5, because 5 + 3 = 8": the sentence has its result already.
    first = max(since, bisect.bisect_left(spans, (reason - len(head), 0)))
    if any(levels[n - since] >= 2 for n in range(first, bisect.bisect_left(spans, (reason, 0)))):
        return False
    # "$15, because 5 x 3 = 15": the reason ends in what was said before it.
    said = text[slice(*spans[at])].lstrip("$€£+ ")
    return re.search(rf"(?<![\d.]){re.escape(said)}(?!\d)", head) is not None


def _level(text: str, spans: Sequence[tuple[int, int]], at: int, *, listed: bool) -> int:
    start, stop = spans[at]
    # "1. 7 - 4 = 11": the number of a list's line, with something behind it.
    mark = _LIST_MARK.match(text, text.rfind("\n", max(0, start - _INDENT), start) + 1)
    if mark and start < mark.end() and text[mark.end() : mark.end() + _REACH].partition("\n")[0].strip():
        return 0
    after = text[stop : stop + _REACH]
    if _QUESTION_AFTER.match(after):
        return 0
    before = _before(text, start).lower()
    # A sum's left side, or a part of it, is not its result, whatever is said before it.
    if _OPERATOR_AFTER.match(after):
        return 2 if _SUM_AFTER.match(after) and not _OPERATOR_BEFORE.search(before) else 0
    if _may_be_cue(before):
        if _CALLED_ANSWER.search(before):
            return 3
        if _RESULT_BEFORE.search(before):
            return 2
    if called := _CALLED_AFTER.match(after):
        return 3 if called["noun"].lower() in ("answer", "result", "solution") else 2
    if _OPERATOR_BEFORE.search(before):
        return 0
    if _BOLD_BEFORE.search(before) and _BOLD_AFTER.match(after):
        return 2
    if at == len(spans) - 1:
        line = _last_start(text, start)
        if _alone(text, line, len(text), spans[at]) and not (listed and _LIST_MARK.match(text, line)):
            return 2
    return 2 if _sole_in_sentence(text, spans, at) and (_CONCLUDES.search(before) or _LEFT_OVER.match(after)) else 0


def _may_be_cue(before: str) -> bool:
    bare = before.rstrip(_LEAD_SIGNS)
    if not bare:
        return False
    # Scripts without spaces have no last word to look up.
    if before[-1] in _CUE_SIGNS or bare[-1] in _CUE_SIGNS or bare[-1] > "\u0590" or "\\" in bare[-12:]:
        return True
    last = _LAST_WORD.search(bare[-24:])
    return last is not None and last[1] in _CUE_WORDS


def _before(text: str, start: int) -> str:
    """The text in front of a candidate. An ellipsis marks a cut, so that no pattern takes it for the beginning."""
    return text[:start] if start <= _REACH else f"…{text[start - _REACH : start]}"


def _last_start(text: str, start: int) -> int:
    """Where the last sentence or line begins that ends before `start`."""
    return max(text.rfind(sign, 0, start) for sign in ("\n", ". ", "? ", "! ", ": ", "。", "？")) + 1


def _alone(text: str, start: int, stop: int, span: tuple[int, int]) -> bool:
    """Whether the number is all there is between `start` and `stop`, but for layout and a unit of a few words."""
    lead = _LINE_LEAD.match(text, start, span[0])
    return lead is not None and lead.end() == span[0] and _REST_OF_LINE.fullmatch(text, span[1], stop) is not None


def _sole_in_sentence(text: str, spans: Sequence[tuple[int, int]], at: int) -> bool:
    start, stop = spans[at]
    earlier = spans[at - 1][1] if at else None
    later = spans[at + 1][0] if at + 1 < len(spans) else None
    return (earlier is None or _SENTENCE_END.search(text, earlier, start) is not None) and (
        later is None or _SENTENCE_END.search(text, stop, later) is not None
    )


# ---- choice letters --------------------------------------------------------------------------------------------------

# What may follow a bare letter that is a choice: the end of something, or a reason. "A man" and "I think" are none, nor is "A + B".
_ENDS = r"\s{0,3}(?:[.,;:)\]}*$。，；：、\"!\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|\Z|\n)"
_REASONS = r"\s+(?:because|since|as|is|was|seems|fits|for|due|with|which|that|and|or|[-–—(])"
# A letter alone, or in brackets; there it may be small.
_LETTER = re.compile(
    r"(?<![\w'’\\])(?:\(\s?([A-Za-z])\s?\)|\[\s?([A-Z])\s?\]|"
    rf"([B-HJ-Z](?!\s?[+/^=]|-)|[AIa-z](?={_ENDS})|A(?={_REASONS})))(?![\w'’])",
    re.ASCII,
)
_LETTER_NOUN = (
    r"(?:answer|option|choice|selection|letter|antwort|réponse|respuesta|resposta|risposta|antwoord|odpowiedź|ответ)"
)
_LETTER_LEAD = rf"(?:\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\{{\s?){{0,3}}{_LEAD}"
_LETTER_CALLED = re.compile(
    rf"(?:\\(?:boxed|fbox)\s?\{{\s?(?:\\(?:text|textbf|mathrm|mathbf)\{{\s?)?"
    rf"|\b{_LETTER_NOUN}\b{_GAP}(?:\b{_COPULA}\b\s?:?|{_MARK}){_ADVERBS}(?:\s+(?:option|choice|letter))?{_LETTER_LEAD}"
    rf"|\banswer[\s*:]*{_LETTER_LEAD}"
    r"|(?:答案|正解|答え|正确选项|正确答案)(?:应该|应当|就)?(?:是|为|选|は|：|:)?\s{0,3}"
    + _LEAD
    + r"|(?:应选|故选|应该选|选择|选)(?:项)?[：:]?\s{0,3}"
    r"|(?:정답|답)(?:은|는|이|:)\s{0,3}"
    r")\Z",
    re.IGNORECASE,
)
_LETTER_CHOSEN = re.compile(
    r"(?:\b(?:so|thus|therefore|hence|choose|chose|pick|select|going\s+with|go\s+with|must\s+be|leaves(?:\s+us\s+with)?|leaving)\b|[→⇒∴]|=>|->|"
    r"所以|因此|故|\bnot\s+\(?[A-Z]\)?,?\s+but(?:\s+rather)?)"
    rf"\s*,?\s*(?:it(?:'s|\s+is|\s+must\s+be)\s+)?(?:(?:option|choice)\s+)?{_LETTER_LEAD}\Z",
    re.IGNORECASE,
)
_LETTER_NAMED = re.compile(rf"\b(?:option|choice){_LEAD}\Z", re.IGNORECASE)
_LETTER_RIGHT = re.compile(
    r"[\s*_$}\])\"']*(?:(?:is|seems|looks|must\s+be|would\s+be)\s+(?:(?:therefore|thus|clearly|indeed|definitely|then|also)\s+)?(?:the\s+)?"
    r"(?:only\s+|most\s+likely\s+)?(?:correct|right|best|true|answer|one)\b|fits\s+best|是?正确|是?对的|是答案|が正しい|が正解)",
    re.IGNORECASE,
)
_LETTER_DENIED_BEFORE = re.compile(
    rf"(?:\b(?:not|isn't|isn’t|never|neither|nor|eliminate|exclude|reject|rules?\s+out|ruled\s+out|cannot\s+be|can't\s+be|except|than|unlike)"
    rf"(?:\s+(?:the\s+answer|option|choice))?|不是|不选|排除)\s*{_LEAD}\Z",
    re.IGNORECASE,
)
_LETTER_DENIED_AFTER = re.compile(
    r"[\s*_$}\])\"']*(?:(?:(?:is|are|was|would\s+be|seems|looks)\s+(?:also\s+|clearly\s+)?(?:not\b|wrong|incorrect|false|out\b|impossible|ruled\s+out|eliminated)"
    r"|isn(?:'|’)t|does\s+not|doesn(?:'|’)t|can(?:not|(?:'|’)t)|fails)\b|不正确|不对|是?错)",
    re.IGNORECASE,
)
_OPTION = re.compile(r"\(([A-Z])\)")
_GIVES_REASON = re.compile(r"[)\]*\s]*(?:[,;—–]|\.\s|\s(?:because|since|as|for|due)\b)")
_IS_SUBJECT = re.compile(r"\s+(?:is|are|was|and|or|has|can|does|seems|to|through)\b")
_LINE = re.compile(r"^[ \t*]{0,10}\(?([A-Z])[.):](?![^\s*])", re.MULTILINE)
_AROUND_ALONE = re.compile(
    r"(?:(?:option|choice|answer)\s)?[\s(\[*$\"'`]{0,10}(?:\\(?:text|textbf|mathrm)\{\s?)?\(?([A-Za-z])\s?[)\].:}*$\s\"'`。]{0,10}",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Letter:
    """Where the chosen letter stands, and whether the text states it as its choice."""

    start: int
    stop: int
    stated: bool


def stated_letter(text: str) -> Letter | None:
    """The letter that the text calls its answer, else the letter alone, else the last "(B)" that is not denied, else a single line "B. …"."""
    # All that may stand around a letter alone fits into 64 characters; a longer text is none.
    body = text.strip()
    offset = text.find(body)
    if len(body) <= 64 and (alone := _AROUND_ALONE.fullmatch(text, offset, offset + len(body))):
        return Letter(*alone.span(1), stated=True)
    best, best_level = None, -1
    for match in list(_LETTER.finditer(text))[-_LOOKED_AT:]:
        if (level := _letter_level(text, match)) >= max(best_level, 0):
            best, best_level = match, level
    lines = [line for line in _LINE.finditer(text) if not _IS_SUBJECT.match(text, line.end())] if best_level < 2 else []
    # Several such lines repeat the options; they are no choice.
    if len(lines) == 1 and not _denied(text, lines[0].start(1), lines[0].end(1)):
        line = lines[0]
        at_an_end = not text[: line.start()].strip() or "\n" not in text[line.end() :].strip()
        if at_an_end and not _first_of_several(text, line[1], line.end()):
            return Letter(*line.span(1), stated=True)
        if best is None:
            return Letter(*line.span(1), stated=False)
    if best is None:
        return None
    group = next(n for n in (1, 2, 3) if best[n])
    return Letter(*best.span(group), stated=best_level >= 2)


def _letter_level(text: str, match: re.Match[str]) -> int:
    """3 called the answer, 2 chosen or called right, 1 "option B", 0 in brackets, −1 no choice."""
    start, stop = match.span()
    after = text[stop : stop + _REACH]
    if _denied(text, start, stop) or _QUESTION_AFTER.match(after):
        return -1
    before = _before(text, start)
    bracketed = not match[3]
    if _LETTER_CALLED.search(before):
        return 3
    if bracketed or match[3].isupper():
        if _LETTER_CHOSEN.search(before) or _LETTER_RIGHT.match(after):
            return 2
        if _LETTER_NAMED.search(before):
            return 1
        if bracketed and not before.strip(_LEAD_SIGNS) and not _IS_SUBJECT.match(after):
            return 0 if _first_of_several(text, match[1] or match[2], stop) else 2  # the text begins with it
    return 0 if bracketed and match[match.lastindex or 1].isupper() else -1


def _first_of_several(text: str, letter: str, stop: int) -> bool:
    """Whether a list of options starts at this letter, "(A) 3 (B) 4": the next letter in brackets is the next of the alphabet."""
    if _GIVES_REASON.match(text, stop):
        return False
    other = _OPTION.search(text, stop)
    return other is not None and ord(other[1]) == ord(letter.upper()) + 1 and not _denied(text, *other.span())


def _denied(text: str, start: int, stop: int) -> bool:
    return (
        _LETTER_DENIED_BEFORE.search(_before(text, start)) is not None
        or _LETTER_DENIED_AFTER.match(text[stop : stop + _REACH]) is not None
    )
