"""Items from JSON lines, JSON, CSV and Parquet files, by path or name. Every fault names its line and the way out."""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, NamedTuple, cast

from mless import gates, limits
from mless.errors import BadData
from mless.gates import kind_of as _kind
from mless.gates import shown as _shown
from mless.tasks.extracting import answer_begins
from mless.tasks.generating import arithmetic
from mless.tasks.grading.by_tests import PROBLEM_FIELDS
from mless.values import Item

#: In the order in which a bare name is looked up.
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
QUESTION_FIELDS = ("question", "problem", "prompt")
ANSWER_FIELDS = ("answer", "solution")
SOLUTION_FIELDS = ("solution",)
CHOICES_FIELDS = ("choices", "options")
ID_FIELDS = ("id", "unique_id", "task_id", "item")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _Row:
    """A row as it stood in the file, and what a person calls the place: ``line 7``, ``row 7``."""

    place: str
    fields: Mapping[str, Any]


class _Fields(NamedTuple):
    """The fields that the user named; None where they are to be guessed."""

    question: str | None
    answer: str | None
    solution: str | None
    cluster: str | None


@dataclass(frozen=True)
class _DataFile:
    path: Path
    sha256: str | None = None


#: Where to get the published tasks; we may not ship them.
PUBLISHED = {
    "math500": "HuggingFaceH4/MATH-500",
    "aime24": "the 30 problems of AIME 2024 (HuggingFaceH4/aime_2024)",
    "aime25": "the 30 problems of AIME 2025 (math-ai/aime25)",
    "gsm8k": "the test split of openai/gsm8k",
    "humaneval": "openai/openai_humaneval",
}


def load_items(
    source: str,
    *,
    question_field: str | None = None,
    answer_field: str | None = None,
    solution_field: str | None = None,
    cluster_field: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    data_folder: Path | None = None,
) -> tuple[str, list[Item]]:
    """The task's name and its items.

    `source` is a data file, ``bundled``, ``arithmetic[:difficulty[:count]]``, or a name in `data_folder` (by default
    the folder that the environment variable MLESS_DATA names). `limit` keeps the first items, after the whole file has been checked. `seed`
    is for generated questions. Items with the same value in `cluster_field` are related. `solution_field` holds worked solutions; where it is
    not given they come from a field `solution` beside the answer's, or from an answer that ends in a box or ``####``, as GSM8K's do.
    """
    gates.check_count(limit, "limit", limits.ITEMS, BadData)
    asked = _Fields(question_field, answer_field, solution_field, cluster_field)
    if source == "bundled":
        name, items = "bundled", _items(_bundled_rows(), "bundled", asked)
    elif source == "arithmetic" or source.startswith("arithmetic:"):
        if any(asked):
            raise BadData(
                "arithmetic is generated and has no fields; leave out --question-field, --answer-field, --solution-field and cluster_field"
            )
        name, items = _generated(source, seed)
    else:
        if data_folder is None and os.environ.get("MLESS_DATA"):
            data_folder = Path(os.environ["MLESS_DATA"])
        name, file = _find(source, data_folder)
        items = _items(_rows(file), _shown(file.path), asked)
    # A file name need not be valid Unicode; the task's name is written into tables, so it must be.
    return name.encode("utf-8", "replace").decode(), items[:limit]


def filler_sentences() -> list[str]:
    """Plain sentences unrelated to any question, for the `random` condition."""
    return resources.files("mless.tasks").joinpath("sentences.txt").read_text("utf-8").splitlines()


# --- from a source to a file ---


def _generated(source: str, seed: int) -> tuple[str, list[Item]]:
    match = re.fullmatch(r"arithmetic(?::([0-9]{1,9})(?::([0-9]{1,9}))?)?", source)
    if not match:
        raise BadData(
            f"cannot read {_shown(source)}; write arithmetic, arithmetic:DIFFICULTY or arithmetic:DIFFICULTY:COUNT, "
            "for example arithmetic:2:100"
        )
    difficulty = int(match[1] or 1)
    count = int(match[2] or 200)
    # No colon in the name: it becomes part of file names.
    return f"arithmetic-{difficulty}", arithmetic(count, difficulty, seed)


def _find(source: str, folder: Path | None) -> tuple[str, _DataFile]:
    """A path if it looks like one, else a name in the data folder: exact, or the only one that begins so."""
    # os.path, not pathlib: it returns False instead of raising for impossible names (NUL, too long).
    is_path = bool(source) and (PurePath(source).suffix.lower() in SUFFIXES or PurePath(source).name != source)
    if is_path and os.path.isfile(source):
        return PurePath(source).stem, _DataFile(Path(source))

    known = {} if is_path or folder is None else _data_folder(folder)
    if source in known:
        return source, known[source]
    longer = [name for name in known if source and name.lower().startswith(source.lower())]
    if len(longer) == 1:
        return longer[0], known[longer[0]]
    if longer:
        raise BadData(f"{_shown(source)} could be any of {_listed(longer)}; write one of these in full")

    if source and os.path.isdir(source):
        raise BadData(
            f"{_shown(source)} is a folder, not a data file; name a file in it, or set MLESS_DATA to it and give a name"
        )
    if source and os.path.isfile(source):  # neither a known suffix nor a known name
        return PurePath(source).stem, _DataFile(Path(source))
    if source and os.path.lexists(source):  # a pipe, a device, a link that leads nowhere
        gates.check_file(
            Path(source), limits.DATA_BYTES, lambda why: BadData(f"{_shown(source)} {why}; name a data file")
        )
    raise BadData(_not_found(source, folder))


def _not_found(source: str, folder: Path | None) -> str:
    names = ["bundled", "arithmetic"]
    there_are = "there are: bundled, arithmetic"
    if folder is None:
        there_are += "; for more, set MLESS_DATA to a folder of data files, or give the path of a file"
    elif not os.path.isdir(folder):
        there_are += f"; the data folder {_shown(folder)} (MLESS_DATA) is not a folder"
    else:
        found = list(_data_folder(folder))
        names += found
        there_are += f", and in {_shown(folder)}: {_listed(found) if found else 'nothing'}"
    parent = os.path.dirname(source) or "."
    siblings: list[str] = []
    if os.path.isdir(parent) and os.access(parent, os.R_OK):
        siblings = [os.path.join(os.path.dirname(source), name) for name in sorted(os.listdir(parent))]
        siblings = [name for name in siblings if PurePath(name).suffix.lower() in SUFFIXES]
    close = difflib.get_close_matches(source, names + siblings, n=1, cutoff=0.5)
    hint = f"did you mean {_shown(close[0])}? " if close else ""
    if (origin := PUBLISHED.get(source)) is not None:
        return (
            f"no data set {_shown(source)} here: save {origin} as {source}.jsonl (fields question or problem, and answer) in a folder, and name "
            f"that folder in MLESS_DATA; {there_are}"
        )
    return f"no data file or data set {_shown(source)}; {hint}{there_are}"


def _data_folder(folder: Path) -> dict[str, _DataFile]:
    """Name → file for a folder of data sets; its manifest, where there is one, adds names and checksums."""
    if not os.path.isdir(folder):
        return {}
    try:
        present = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    except OSError as fault:
        raise BadData(f"cannot list {_shown(folder)}: {fault.strerror}") from None
    known: dict[str, _DataFile] = {}
    checksums: dict[str, str] = {}
    if (folder / MANIFEST).is_file():
        for entry in _manifest(folder / MANIFEST):
            name, file, checksum = entry["name"], entry["file"], entry.get("sha256")
            if checksum is not None:
                checksums[file] = str(checksum)
            known[name] = _DataFile(folder / file, checksums.get(file))
    for suffix in SUFFIXES:
        for path in present:
            if path.suffix.lower() == suffix and path.stem not in known:
                known[path.stem] = _DataFile(path, checksums.get(path.name))
    return dict(sorted(known.items()))


def _manifest(path: Path) -> list[dict[str, Any]]:
    where = _shown(path)
    entries = _json(_text(_bytes(path), where), where)
    if not isinstance(entries, list):
        raise BadData(f'{where}: expected a list of {{"name": …, "file": …}}, found {_kind(entries)}')
    for number, entry in enumerate(cast("list[Any]", entries), 1):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "file")):
            raise BadData(f"{where}: entry {number} needs a name and a file, both text")
        file = PurePath(cast("dict[str, str]", entry)["file"])
        if file.is_absolute() or ".." in file.parts:
            raise BadData(f"{where}: entry {number} leads out of its folder: {_shown(file)}")
    return cast("list[dict[str, Any]]", entries)


# --- from a file to rows ---


def _bundled_rows() -> list[_Row]:
    return _jsonl(resources.files("mless.tasks").joinpath("bundled.jsonl").read_text("utf-8"), "bundled")


def _rows(file: _DataFile) -> list[_Row]:
    where, suffix = _shown(file.path), file.path.suffix.lower()
    if suffix not in SUFFIXES:
        ending = _shown(suffix) if suffix else "no ending"
        raise BadData(f"{where}: cannot read files with {ending}; convert it to one of {', '.join(SUFFIXES)}")
    raw = _bytes(file.path)
    if file.sha256 is not None:
        found = hashlib.sha256(raw).hexdigest()
        if found != file.sha256.lower():
            raise BadData(
                f"{where} is not the file its manifest describes: expected sha256 {_shown(file.sha256)}, "
                f"found '{found}'; fetch it again, or correct the manifest"
            )
    if not raw.strip():
        raise BadData(f"{where} is empty; expected one row per question")
    if suffix == ".parquet":
        rows = _parquet(raw, where)
    else:
        text = _text(raw, where)
        rows = {".json": _json_rows, ".csv": _csv}.get(suffix, _jsonl)(text, where)
    if not rows:
        raise BadData(f"{where} has no rows; expected one per question")
    gates.check_count(len(rows), f"{where}: rows", limits.DATA_ROWS, BadData)
    return rows


def _refusing(where: str, way: str = "") -> gates.Refuse:
    return lambda message: BadData(f"{where} {message}{way}")


def _bytes(path: Path) -> bytes:
    if not os.path.lexists(path):
        raise BadData(f"{_shown(path)} is not there; fetch it, or remove its entry from the manifest")
    return gates.read_bytes(path, limits.DATA_BYTES, _refusing(_shown(path), "; give a data file that can be read"))


def _text(raw: bytes, where: str) -> str:
    return gates.text_of(raw, _refusing(where))  # spreadsheets put a byte order mark before CSV, which is left out


def _json(text: str, where: str, line: int | None = None) -> Any:
    # Python writes NaN into fields that nobody asks for; an answer that is none is refused where it is read.
    return gates.json_of(text, _refusing(where), finite=False, where=None if line is None else f"line {line}")


def _jsonl(text: str, where: str) -> list[_Row]:
    rows: list[_Row] = []
    # Not splitlines(): a question may contain U+2028 and similar characters, which do not end a line of JSON.
    for line, content in enumerate(text.split("\n"), 1):
        if content.strip():
            rows.append(_row(_json(content.strip("\r"), where, line), where, f"line {line}"))
    return rows


def _json_rows(text: str, where: str) -> list[_Row]:
    content = _json(text, where)
    if isinstance(content, dict):
        lists = {key: value for key, value in cast("dict[str, Any]", content).items() if isinstance(value, list)}
        if len(lists) > 1:
            lists = {key: value for key, value in lists.items() if key in ("data", "items", "rows")}
        if len(lists) != 1:
            raise BadData(f"{where}: expected a list of objects, or an object with one list under data, items or rows")
        (content,) = lists.values()
    if not isinstance(content, list):
        raise BadData(f"{where}: expected a list of objects, found {_kind(content)}")
    return [_row(value, where, f"row {number}") for number, value in enumerate(cast("list[Any]", content), 1)]


def _row(value: Any, where: str, place: str) -> _Row:
    if not isinstance(value, dict):
        raise BadData(f'{where} {place}: expected an object such as {{"question": "…"}}, found {_kind(value)}')
    return _Row(place, cast("dict[str, Any]", value))


def _csv(text: str, where: str) -> list[_Row]:
    # Python's limit of 131,072 characters a cell would refuse a long-context question. It is one for the whole process.
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[_Row] = []
    header: list[str] | None = None
    line = 1
    try:
        for cells in lines:
            if cells and header is None:
                header = cells
                _refuse_repeated(header, where)
            elif cells and header is not None:
                if len(cells) != len(header):
                    raise BadData(
                        f"{where} line {line}: {len(cells)} cells, but the header has {len(header)}; "
                        "put quotes around text that contains commas"
                    )
                rows.append(_Row(f"line {line}", dict(zip(header, cells, strict=True))))
            line = lines.line_num + 1
    except csv.Error as fault:
        raise BadData(
            f"{where} line {line}: broken CSV: {fault}; check the quotes of the row that begins there"
        ) from None
    finally:
        csv.field_size_limit(limit)
    return rows


def _parquet(raw: bytes, where: str) -> list[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(raw))
        # A few bytes may stand for any number of equal rows, so these are counted before they are made.
        gates.check_count(file.metadata.num_rows, f"{where}: rows", limits.DATA_ROWS, BadData, least=0)
        size = sum(file.metadata.row_group(n).total_byte_size for n in range(file.num_row_groups))
        gates.check_count(size, f"{where}: bytes when unpacked", limits.DATA_BYTES, BadData, least=0)
        table = file.read()
        _refuse_repeated(table.column_names, where)
        rows = cast("list[dict[str, Any]]", table.to_pylist())
    # pyarrow raises other errors for values that Python has no room for, such as times far away.
    except (pa.ArrowException, OSError, ValueError, ArithmeticError, TypeError, LookupError) as fault:
        cause = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise BadData(f"{where} cannot be read as Parquet: {ascii(cause)[1:-1]}; write or fetch it again") from None
    return [_Row(f"row {number}", fields) for number, fields in enumerate(rows, 1)]


def _refuse_repeated(names: list[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise BadData(f"{where}: two columns are called {_shown(name)}; rename one")


# --- from rows to items ---


def _items(rows: list[_Row], where: str, asked: _Fields) -> list[Item]:
    # Fields are chosen once for the whole file: a row without a question must not use its `prompt` instead.
    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    found = _Fields(
        _choose((asked.question,) if asked.question is not None else QUESTION_FIELDS, names),
        _choose((asked.answer,) if asked.answer is not None else ANSWER_FIELDS, names),
        _choose((asked.solution,) if asked.solution is not None else SOLUTION_FIELDS, names),
        asked.cluster,
    )
    choices_name, id_name = _choose(CHOICES_FIELDS, names), _choose(ID_FIELDS, names)

    items: list[Item] = []
    places: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        at = f"{where} {row.place}"
        _refuse_missing(row, found, asked, at)
        own_id = row.fields.get(id_name) if id_name is not None else None
        if isinstance(own_id, (dict, list)):
            raise BadData(f"{at}: {_shown(id_name)} is neither text nor number but {_kind(own_id)}; give a plain id")
        # CSV cannot tell an empty cell from none, so the empty text counts as none for every format.
        id = str(number) if own_id is None or own_id == "" else str(own_id)
        item = _item(id, row, found, asked, choices_name, at)
        _refuse_surrogates(item, at)
        if id in places:
            raise BadData(f"{where}: duplicate id {_shown(id)} in {places[id]} and {row.place}; ids must be unique")
        places[id] = row.place
        items.append(item)
    return items


def _refuse_missing(row: _Row, found: _Fields, asked: _Fields, at: str) -> None:
    """Refuse a row without its question, or without a field that the user named."""
    for name, given, needed, option in (
        (found.question, asked.question, True, "--question-field"),
        (found.answer, asked.answer, asked.answer is not None, "--answer-field"),
        (found.solution, asked.solution, asked.solution is not None, "--solution-field"),
    ):
        if needed and (name is None or name not in row.fields):
            wanted = given if given is not None else name
            raise BadData(
                f"{at}: no field {_shown(wanted) if wanted is not None else ' or '.join(QUESTION_FIELDS)}; "
                f"fields there: {_listed(row.fields)}; say {option} NAME"
            )


def _item(id: str, row: _Row, found: _Fields, asked: _Fields, choices_name: str | None, at: str) -> Item:
    fields = row.fields
    question = _question(fields[found.question or ""], found.question or "", at)
    answer = _answer(fields.get(found.answer), found.answer, at) if found.answer is not None else _tests_of(fields)
    cluster = fields.get(asked.cluster) if asked.cluster is not None else None
    if asked.cluster is not None and (cluster is None or isinstance(cluster, (dict, list))):
        raise BadData(
            f"{at}: no plain value in {_shown(asked.cluster)}, which is to say what items are related; fields there: {_listed(fields)}"
        )
    beside = fields.get(found.solution) if found.solution is not None else None
    if asked.solution is not None:
        solution = _named_solution(beside, asked.solution, at)
    else:
        solution = _solution(beside if found.solution != found.answer else None, answer)
    options = _options(fields.get(choices_name), choices_name, at) if choices_name is not None else None
    right = None
    if options is not None and found.answer is not None:
        right = _right(fields.get(found.answer), options, found.answer, at)
    choices = None if options is None else tuple(options.values())
    return Item(id, question, answer, None if cluster is None else str(cluster), solution, choices, right)


def _tests_of(fields: Mapping[str, Any]) -> str | None:
    """A problem that is answered with code and judged by its own tests, as HumanEval has them; None where it is no such problem."""
    found = {name: fields.get(name) for name in PROBLEM_FIELDS}
    return json.dumps(found) if all(isinstance(value, str) for value in found.values()) else None


def _question(value: Any, name: str, at: str) -> str:
    if not isinstance(value, str):
        raise BadData(f"{at}: {_shown(name)} is not text but {_kind(value)}; say --question-field NAME")
    if len(value) > limits.QUESTION.value:
        raise BadData(
            f"{at}: {_shown(name)} has {len(value):,} characters; expected {limits.QUESTION}; shorten it, or remove the row"
        )
    if not value.strip():
        raise BadData(f"{at}: {_shown(name)} is empty; fill it in, or remove the row")
    return value


def _answer(value: Any, name: str, at: str) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise BadData(f"{at}: {_shown(name)} is neither text nor number but {_kind(value)}; say --answer-field NAME")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise BadData(f"{at}: {_shown(name)} is {value}, which is no answer; write a number or text")
    return str(value)


# --- solutions ---

# GSM8K's calculator marks, as <<16-3-4=9>>: a person does not write them.
_CALCULATOR = re.compile(r"<<[^\n]*?>>")


def _named_solution(value: Any, name: str, at: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadData(f"{at}: {_shown(name)} is not text but {_kind(value)}; say --solution-field NAME")
    if value is not None and len(value) > limits.TEXT.value:
        raise BadData(
            f"{at}: {_shown(name)} has {len(value):,} characters; expected {limits.TEXT}; shorten it, or remove the row"
        )
    return _cleaned(value or "")


def _solution(value: Any, answer: str | None) -> str | None:
    """The text beside the answer, else the answer's own text where it works up to a box or ``####``."""
    if isinstance(value, str) and len(value) <= limits.TEXT.value and value.strip():
        return _cleaned(value)
    begins = answer_begins(answer) if answer is not None else None
    return _cleaned(answer) if answer is not None and begins is not None and answer[:begins].strip() else None


def _cleaned(text: str) -> str | None:
    # Elsewhere << may be part of a program or a formula.
    return (_CALCULATOR.sub("", text) if "####" in text else text) if text.strip() else None


# --- choices ---

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTER = re.compile(r"\(?([A-Za-z])[.):]?")


def _options(value: Any, name: str, at: str) -> dict[str, str] | None:
    """Label → text: of a list, of an object of labels and texts, or of one with the two lists `label` and `text`, as ARC has it.

    None where there are no options, or only a text about them.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):  # as a cell of CSV has it
        value = gates.json_of(value, _refusing(at), finite=False, where=_shown(name))
    if value is None or isinstance(value, str) or value == [] or value == {}:
        return None
    labels: list[Any] | None = None
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        labels, value = list(pairs), list(pairs.values())
        if set(pairs) == {"label", "text"} and all(isinstance(one, list) for one in pairs.values()):
            labels, value = pairs["label"], pairs["text"]
    texts = cast("list[Any]", value) if isinstance(value, list) else []
    given = list(_LETTERS[: len(texts)]) if labels is None else [str(label) for label in labels]
    if not 2 <= len(texts) <= len(_LETTERS) or len(given) != len(texts) or len(set(given)) < len(given):
        raise BadData(
            f"{at}: {_shown(name)} must be 2 to {len(_LETTERS)} texts, or as many different labels with a text each; found "
            f"{_kind(value)}{f' of {len(texts)}' if texts else ''}; correct it, or rename the field"
        )
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, str | int | float | Decimal) or not str(text).strip():
            raise BadData(
                f"{at}: {_shown(name)} holds {_kind(text) if text != '' else 'an empty text'}, which is no option; write a text, or remove it"
            )
    return dict(zip(given, map(str, texts), strict=True))


def _right(value: Any, options: Mapping[str, str], name: str, at: str) -> int | None:
    """Which option an answer means, from 0: by its label, its text, its letter, or its number counted from 0."""
    if value is None or value == "":
        return None
    said, labels, texts = str(value).strip(), list(options), list(options.values())
    own = labels != list(_LETTERS[: len(labels)])  # 1, 2, 3 as labels are no numbers counted from 0
    if own and said in options:
        return labels.index(said)
    found: set[int] = set()
    if isinstance(value, str):
        found |= {n for n, text in enumerate(texts) if text.strip() == said}
        if letter := _LETTER.fullmatch(said):
            found |= {n for n in [_LETTERS.index(letter[1].upper())] if n < len(texts)}
    if not own and re.fullmatch("[0-9]{1,2}", said) and int(said) < len(texts):
        found.add(int(said))
    if len(found) != 1:
        many = "fits several of them" if found else "is none of them"
        raise BadData(
            f"{at}: {_shown(name)} must say which option is right, by its letter (A to {_LETTERS[len(texts) - 1]}), its number (0 to "
            f"{len(texts) - 1}) or its text; {_shown(said, 60)} {many}; correct it, or say --answer-field NAME"
        )
    return found.pop()


def _choose(wanted: Iterable[str | None], names: list[str]) -> str | None:
    """The first wanted name that is there, in its own spelling before any other."""
    for want in wanted:
        if want in names:
            return want
        for name in names:
            if want is not None and name.lower() == want.lower():
                return name
    return None


def _refuse_surrogates(item: Item, at: str) -> None:
    # JSON can write half of a surrogate pair. No tokenizer or table takes it; replaced, it would be another question.
    for text in (item.id, item.question, item.answer or "", item.solution or "", *(item.choices or ())):
        if half := re.search("[\ud800-\udfff]", text):
            raise BadData(f"{at}: {half[0]!r} is half a character (a lone surrogate), not text; remove or replace it")


def _listed(names: Iterable[str]) -> str:
    shown = [_shown(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "") or "none"
