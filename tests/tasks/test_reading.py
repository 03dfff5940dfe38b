"""Reading items: every format there and back, every fault by its message."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mless.tasks.reading as reading
from mless.errors import BadData
from mless.tasks import arithmetic, load_items
from mless.values import Item

ROOT = Path(__file__).parents[2]
#: The data sets that come with no clone: $MLESS_DATA, else a folder beside the checkout, if there is one.
DATA = Path(os.environ.get("MLESS_DATA") or ROOT.parent / "shared" / "data")


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLESS_DATA", raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], str]:
    def written(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return written


def fault(source: str, **options: object) -> str:
    """The message of the BadData that `source` must raise; it must be one printable line."""
    with pytest.raises(BadData) as caught:
        load_items(source, **options)  # pyright: ignore
    message = str(caught.value)
    assert message.isprintable(), message
    return message


# --- formats ---


def test_the_formats_agree(write: Callable[[str, str | bytes], str], tmp_path: Path) -> None:
    rows = [{"id": "a", "question": '1 + 1,\n"really"?', "answer": "2"}, {"id": "b", "question": "é?", "answer": "3"}]
    lines = "\n".join(json.dumps(row) for row in rows)
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    expected = ("d", [Item("a", '1 + 1,\n"really"?', "2"), Item("b", "é?", "3")])
    for name, content in [
        ("d.jsonl", lines),
        ("d.ndjson", lines.replace("\n", "\r\n\r\n") + "\r\n"),
        ("d.JSONL", "\ufeff" + lines),
        ("d.json", json.dumps(rows)),
        ("d.json", json.dumps({"version": 1, "items": rows})),
        ("d.json", json.dumps({"tags": ["x"], "data": rows})),
        ("d.csv", table.getvalue()),
        ("d.csv", "\ufeff" + table.getvalue()),
    ]:
        assert load_items(write(name, content)) == expected, (name, content)
    assert load_items(str(tmp_path / "d.parquet")) == expected


@pytest.mark.parametrize(
    ("row", "item"),
    [
        ({"prompt": "p", "problem": "q"}, Item("1", "q")),
        ({"prompt": "p", "Question": "q", "problem": "r"}, Item("1", "q")),
        ({"QUESTION": "Q", "question": "q"}, Item("1", "q")),
        ({"question": "q", "solution": "s", "Answer": "a"}, Item("1", "q", "a", None, "s")),
        ({"question": "q", "solution": "s"}, Item("1", "q", "s")),
        ({"question": "q", "solution": "so \\boxed{5}"}, Item("1", "q", "so \\boxed{5}", None, "so \\boxed{5}")),
        ({"question": "q", "answer": 5, "solution": " "}, Item("1", "q", "5")),
        ({"question": "q", "answer": 5, "solution": 5}, Item("1", "q", "5")),
        ({"question": "q", "answer": "\\boxed{5}"}, Item("1", "q", "\\boxed{5}")),
        ({"question": "q", "answer": "#### 5"}, Item("1", "q", "#### 5")),
        (
            {"question": "q", "answer": 5, "solution": "1 << 2 and 3 >> 1"},
            Item("1", "q", "5", None, "1 << 2 and 3 >> 1"),
        ),
        ({"question": "q", "answer": 18}, Item("1", "q", "18")),
        ({"question": "q", "answer": 0.5}, Item("1", "q", "0.5")),
        ({"question": "q", "answer": None}, Item("1", "q")),
        ({"question": "q", "answer": ""}, Item("1", "q")),
        (
            {"question": "q", "answer": "16 - 7 = <<16-7=9>>9\n#### 9"},
            Item("1", "q", "16 - 7 = <<16-7=9>>9\n#### 9", None, "16 - 7 = 9\n#### 9"),
        ),
        ({"question": "q", "item": 5, "task_id": "t"}, Item("t", "q")),
        ({"question": "q", "task_id": "t", "unique_id": "u"}, Item("u", "q")),
        ({"question": "q", "unique_id": "u", "ID": 7}, Item("7", "q")),
        ({"question": "q", "id": None}, Item("1", "q")),
        (
            {"question": "<script>alert(1)</script>\x00\x1b[31m\u202e\u2028"},
            Item("1", "<script>alert(1)</script>\x00\x1b[31m\u202e\u2028"),
        ),
    ],
)
def test_fields(write: Callable[[str, str | bytes], str], row: dict[str, object], item: Item) -> None:
    # Unescaped, so that the separators U+2028 and the like stand in the file as they are.
    assert load_items(write("d.jsonl", json.dumps(row, ensure_ascii=False)))[1] == [item]


def test_fields_by_name(write: Callable[[str, str | bytes], str]) -> None:
    source = write("d.jsonl", '{"question": "q", "answer": "a", "Body": "b", "key": "k"}')
    assert load_items(source, question_field="body", answer_field="key")[1] == [Item("1", "b", "k")]


def test_a_solution_by_name(write: Callable[[str, str | bytes], str]) -> None:
    source = write("d.jsonl", '{"question": "q", "answer": "a", "solution": "s", "Work": "w"}')
    assert load_items(source, solution_field="work")[1] == [Item("1", "q", "a", None, "w")]
    assert load_items(source, solution_field="answer")[1] == [Item("1", "q", "a", None, "a")]
    assert (
        "line 1: no field 'wrk'; fields there: 'question', 'answer', 'solution', 'Work'; say --solution-field"
        in fault(source, solution_field="wrk")
    )
    source = write(
        "d.jsonl", '{"question": "q", "work": "w"}\n{"question": "q", "work": null}\n{"question": "q", "work": 7}'
    )
    assert "line 3: 'work' is not text but a number; say --solution-field NAME" in fault(source, solution_field="work")
    assert "leave out --question-field, --answer-field, --solution-field" in fault("arithmetic", solution_field="s")


LETTERS = {"A": "three", "B": "four", "C": "five"}
TEXTS = list(LETTERS.values())


@pytest.mark.parametrize(
    ("options", "answer", "right"),
    [
        (TEXTS, "B", 1),
        (TEXTS, "b", 1),
        (TEXTS, "(B)", 1),
        (TEXTS, "B.", 1),
        (TEXTS, 0, 0),
        (TEXTS, "2", 2),
        (TEXTS, "five", 2),
        (TEXTS, " four ", 1),
        (TEXTS, None, None),
        (TEXTS, "", None),
        (LETTERS, "C", 2),
        (LETTERS, 2, 2),
        (json.dumps(TEXTS), "B", 1),
        (json.dumps(LETTERS), "B", 1),
        ({"1": "three", "2": "four", "3": "five"}, 1, 0),
        ({"1": "three", "2": "four", "3": "five"}, "3", 2),
        ({"x": "three", "y": "four", "z": "five"}, "z", 2),
        ({"text": TEXTS, "label": ["A", "B", "C"]}, "C", 2),
        ({"text": TEXTS, "label": ["1", "2", "3"]}, "1", 0),
        ([3, 4.5, "five"], "4.5", 1),
        ([1, 2, 3], 1, 1),  # a number is an index, not one of the texts
    ],
)
@pytest.mark.parametrize("name", ["choices", "Options"])
def test_choices(
    write: Callable[[str, str | bytes], str], name: str, options: Any, answer: object, right: int | None
) -> None:
    (item,) = load_items(write("d.json", json.dumps([{"question": "q", "answer": answer, name: options}])))[1]
    expected = tuple(map(str, options)) if isinstance(options, list) and options != TEXTS else tuple(TEXTS)
    assert (item.choices, item.right) == (expected, right)
    assert item.answer == (None if answer in (None, "") else str(answer))  # as before there were choices


@pytest.mark.parametrize("options", [None, [], {}, "three or four", ""])
def test_no_choices(write: Callable[[str, str | bytes], str], options: object) -> None:
    source = write("d.json", json.dumps([{"question": "q", "answer": "a", "options": options}]))
    assert load_items(source)[1] == [Item("1", "q", "a")]


@pytest.mark.parametrize(
    ("options", "answer", "message"),
    [
        (TEXTS, "D", r"by its letter \(A to C\), its number \(0 to 2\) or its text; 'D' is none of them; correct it"),
        (TEXTS, 3, "'3' is none of them"),
        (TEXTS, -1, "'-1' is none of them"),
        (TEXTS, "six", "'six' is none of them"),
        (TEXTS, 1.0, "'1.0' is none of them"),
        (["1", "2", "3"], "2", "'2' fits several of them"),
        (["B", "A"], "A", "'A' fits several of them"),
        (["x", "x", "y"], "x", "'x' fits several of them"),
        ({"1": "a", "2": "b"}, "0", "'0' is none of them"),
        (["only"], "A", "must be 2 to 26 texts, .* found a list of 1"),
        (list(map(str, range(27))), "A", "found a list of 27"),
        (7, "A", "must be 2 to 26 texts, .* found a number"),
        ({"text": ["a", "b"], "label": ["A"]}, "A", "as many different labels"),
        ({"text": ["a", "b"], "label": ["A", "A"]}, "A", "as many different labels"),
        (["a", ""], "A", "holds an empty text, which is no option"),
        (["a", None], "A", "holds null, which is no option"),
        (["a", ["b"]], "A", "holds a list, which is no option"),
        ("['a', 'b']", "A", "'options': broken JSON"),
        (["a", "\ud800"], "A", "half a character"),
    ],
)
def test_choices_that_do_not_fit(
    write: Callable[[str, str | bytes], str], options: object, answer: object, message: str
) -> None:
    rows = [{"question": "p"}, {"question": "q", "answer": answer, "options": options}]
    found = fault(write("d.jsonl", "\n".join(map(json.dumps, rows))))
    assert re.search(f"line 2.*{message}", found), found


def test_ids_without_a_field_count_rows_not_lines(write: Callable[[str, str | bytes], str]) -> None:
    source = write("d.jsonl", '{"question": "q"}\n\n{"question": "r", "answer": "s"}\n')
    assert load_items(source)[1] == [Item("1", "q"), Item("2", "r", "s")]


def test_limit_keeps_the_first(write: Callable[[str, str | bytes], str]) -> None:
    source = write("d.csv", "question\na\nb\nc\n")
    assert [item.question for item in load_items(source, limit=2)[1]] == ["a", "b"]
    assert len(load_items(source, limit=9)[1]) == 3


def test_a_long_csv_cell_and_the_limit_of_others(write: Callable[[str, str | bytes], str]) -> None:
    before = csv.field_size_limit()
    assert load_items(write("d.csv", "question\n" + "x" * 200_000))[1] == [Item("1", "x" * 200_000)]
    assert csv.field_size_limit() == before


def test_a_file_name_that_is_not_unicode(tmp_path: Path) -> None:
    source = os.fsdecode(os.fsencode(tmp_path) + b"/d\xff.jsonl")
    Path(source).write_text('{"question": "q"}')
    assert load_items(source) == ("d?", [Item("1", "q")])


# Surrogates cannot be written as UTF-8; they have their own test.
texts = st.text(st.characters(exclude_categories=["Cs"]))
questions = texts.filter(str.strip)


@given(rows=st.lists(st.tuples(questions, texts), min_size=1, max_size=5), suffix=st.sampled_from(reading.SUFFIXES))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_unchanged(
    rows: list[tuple[str, str]], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"round{suffix}"
    objects = [{"question": question, "answer": answer} for question, answer in rows]
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(objects), path)
    elif suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("question", "answer"), *rows])
    elif suffix == ".json":
        path.write_text(json.dumps(objects), encoding="utf-8")
    else:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in objects)
        path.write_bytes(lines.encode())
    _, items = load_items(str(path))
    assert [(item.question, item.answer or "") for item in items] == rows


@given(content=st.one_of(st.binary(), texts.map(str.encode)), suffix=st.sampled_from(reading.SUFFIXES))
@settings(max_examples=200, deadline=None)
def test_any_bytes_end_in_items_or_one_line(
    content: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"noise{suffix}"
    path.write_bytes(content)
    try:
        items, message = load_items(str(path))[1], ""
    except BadData as refusal:
        items, message = [], str(refusal)
    assert bool(items) != bool(message)
    assert message.isprintable()


# --- faults in files ---


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.txt", "q", r"cannot read files with '\.txt'; convert it to one of \.jsonl, \.ndjson, \.json, \.csv, \.parquet"),
        ("d.jsonl", "", r"is empty; expected one row per question"),
        ("d.csv", " \n\n", r"is empty"),
        ("d.parquet", "", r"is empty"),
        ("d.json", "[]", r"has no rows"),
        ("d.json", '{"items": []}', r"has no rows"),
        ("d.csv", "question,answer\n", r"has no rows"),
        ("d.jsonl", '{"question": "q"}\n\n{"question": oops}', r"line 3: broken JSON: Expecting value \(column 14\)"),
        ("d.jsonl", '{"question": "q"} {"question": "r"}', r"line 1: broken JSON: Extra data .*one object per line"),
        ("d.jsonl", '{"question": "q"}\n{"question": "cut of', r"line 2: broken JSON: Unterminated string"),
        ("d.jsonl", '{"question": "q"}\n' + "[" * 100_000, r"line 2: broken JSON: nested too deeply"),
        ("d.jsonl", '{"question": ' + "1" * 5000 + "}", r"line 1: broken JSON: a number of 5,000 digits; expected at most 400 digits"),
        ("d.json", '[\n{"question": "q"},\n}]', r"line 3: broken JSON"),
        ("d.json", '{"question": "q"}\n{"question": "r"}', r"Extra data .*belongs into a \.jsonl file"),
        ("d.json", '"text"', r"expected a list of objects, found text"),
        ("d.json", '{"question": "q"}', r"an object with one list under data, items or rows"),
        ("d.json", '{"a": [], "b": []}', r"an object with one list under data, items or rows"),
        ("d.json", '{"data": [], "rows": []}', r"an object with one list under data, items or rows"),
        ("d.jsonl", '{"question": "q"}\n["q"]', r"line 2: expected an object such as .*, found a list"),
        ("d.jsonl", "null", r"line 1: expected an object such as .*, found null"),
        ("d.json", '[{"question": "q"}, 7]', r"row 2: expected an object such as .*, found a number"),
        ("d.jsonl", '{"text": "q", "n": 1}', r"line 1: no field question or problem or prompt; fields there: 'text', 'n'; say --q"),
        ("d.jsonl", '{"question": "q"}\n{"prompt": "q"}', r"line 2: no field 'question'; fields there: 'prompt'; say --q"),
        ("d.jsonl", "{}", r"line 1: no field .*; fields there: none"),
        ("d.csv", "id;question\n1;q\n", r"line 2: no field .*fields there: 'id;question'"),
        ("d.jsonl", '{"a\\nb\\u001b": "q"}', r"fields there: 'a\\nb\\x1b'"),
        ("d.jsonl", '{"question": "q"}\n{"question": ""}', r"line 2: 'question' is empty"),
        ("d.csv", 'question\nq\n" \t"\n', r"line 3: 'question' is empty"),
        ("d.jsonl", '{"question": "\\u2003\\n"}', r"line 1: 'question' is empty"),
        ("d.jsonl", '{"question": 7}', r"line 1: 'question' is not text but a number; say --question-field"),
        ("d.jsonl", '{"question": null}', r"line 1: 'question' is not text but null"),
        ("d.jsonl", '{"question": ["q"]}', r"line 1: 'question' is not text but a list"),
        ("d.jsonl", '{"question": "q", "answer": ["a"]}', r"line 1: 'answer' is neither text nor number but a list; say --ans"),
        ("d.jsonl", '{"question": "q", "answer": true}', r"line 1: 'answer' is neither text nor number but true or false"),
        ("d.jsonl", '{"question": "q", "id": {}}', r"line 1: 'id' is neither text nor number but an object"),
        ("d.jsonl", '{"question": "q", "id": 7}\n\n{"question": "r", "id": "7"}', r"duplicate id '7' in line 1 and line 3"),
        ("d.csv", 'question,id\n"a\nb",x\nc,y\nd,x\n', r"duplicate id 'x' in line 2 and line 5"),
        ("d.jsonl", '{"question": "q", "id": "a\\nb"}\n{"question": "r", "id": "a\\nb"}', r"duplicate id 'a\\nb'"),
        ("d.jsonl", '{"question": "q \\ud800"}', r"line 1: '\\ud800' is half a character"),
        ("d.jsonl", '{"question": "q", "answer": "\\udfff"}', r"line 1: '\\udfff' is half a character"),
        ("d.jsonl", '{"question": "q", "id": "\\udfff"}', r"line 1: '\\udfff' is half a character"),
        ("d.jsonl", b'{"question": "q"}\n{"question": "caf\xe9"}', r"line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("d.csv", b"\xef\xbb\xbfquestion\n\n\xff", r"line 3: byte 0xff is not UTF-8"),
        ("d.json", "[]".encode("utf-16"), r"line 1: byte 0xff is not UTF-8"),
        ("d.csv", "question,answer\nq,a\nwhat, then?,b\n", r"line 3: 3 cells, but the header has 2; put quotes"),
        ("d.csv", 'question\nq\n"never closed\n', r"line 3: broken CSV: unexpected end of data"),
        ("d.csv", "question,question\na,b\n", r"two columns are called 'question'"),
        ("d.parquet", "not parquet at all", r"cannot be read as Parquet: .+; write or fetch it again"),
    ],
)  # fmt: skip
def test_faults(write: Callable[[str, str | bytes], str], name: str, content: str | bytes, message: str) -> None:
    source = write(name, content)
    found = fault(source)
    assert source in found
    assert re.search(message, found), found


def test_a_parquet_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"question": ["q"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "cannot be read as Parquet" in fault(str(path))


def test_parquet_faults_name_the_row(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"question": ["q", None]}), path)
    assert "row 2: 'question' is not text but null" in fault(str(path))
    pq.write_table(pa.table([["q"], ["r"]], names=["question", "question"]), path)
    assert "two columns are called 'question'" in fault(str(path))
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), path)
    assert "has no rows" in fault(str(path))


def test_fields_asked_for_by_name_must_be_there(write: Callable[[str, str | bytes], str]) -> None:
    source = write("d.jsonl", '{"question": "q", "body": "b"}\n{"question": "r"}')
    assert "line 1: no field 'bdy'; fields there: 'question', 'body'; say --q" in fault(source, question_field="bdy")
    assert "line 2: no field 'body'; fields there: 'question'; say --q" in fault(source, question_field="body")
    assert "line 2: no field 'body'; fields there: 'question'; say --a" in fault(source, answer_field="body")
    assert r"no field 'a\nb'" in fault(source, answer_field="a\nb")
    assert "no field ''" in fault(source, question_field="")


def test_a_fault_past_the_limit_is_told(write: Callable[[str, str | bytes], str]) -> None:
    assert "line 2" in fault(write("d.jsonl", '{"question": "q"}\n{'), limit=1)


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one(limit: int) -> None:
    assert f"limit: expected at least 1, got {limit}" in fault("bundled", limit=limit)


def test_a_file_that_may_not_be_read(write: Callable[[str, str | bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    source = write("d.jsonl", '{"question": "q"}')
    monkeypatch.setattr(Path, "read_bytes", refuse)  # a mode would not stop root
    assert f"'{source}' cannot be read (Permission denied); give a data file that can be read" in fault(source)


# --- sources ---


def test_arithmetic_sources() -> None:
    assert load_items("arithmetic", seed=3) == ("arithmetic-1", arithmetic(200, 1, 3))
    assert load_items("arithmetic:2") == ("arithmetic-2", arithmetic(200, 2))
    assert load_items("arithmetic:4:7", limit=5) == ("arithmetic-4", arithmetic(5, 4))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("arithmetic:", "write arithmetic, arithmetic:DIFFICULTY or arithmetic:DIFFICULTY:COUNT"),
        ("arithmetic:hard", "cannot read 'arithmetic:hard'"),
        ("arithmetic:2:-5", "cannot read 'arithmetic:2:-5'"),
        ("arithmetic:\n", r"cannot read 'arithmetic:\\n'"),
        ("arithmetic:9", "difficulties are 1 to 6"),
        ("arithmetic:2:0", "at least 1 question"),
        ("arithmetic:1:201", "only 200 distinct"),
    ],
)
def test_bad_arithmetic_sources(source: str, message: str) -> None:
    assert re.search(message, fault(source))


def test_generated_questions_have_no_fields() -> None:
    assert "has no fields; leave out --question-field" in fault("arithmetic", question_field="q")


@pytest.mark.parametrize("source", ["nothing", "", "x\0y", "x" * 5000, "\ud800", "a\nb.jsonl", "no/such/folder/d.csv"])
def test_not_found(source: str) -> None:
    assert re.match(
        r"no data file or data set '.*'; .*there are: bundled, arithmetic; for more, set MLESS_DATA", fault(source)
    )


def test_did_you_mean(write: Callable[[str, str | bytes], str]) -> None:
    assert "did you mean 'bundled'?" in fault("bundle")
    source = write("questions.jsonl", "")
    assert f"did you mean '{source}'?" in fault(source.replace("questions", "question"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "is a folder, not a data file" in fault(str(tmp_path))


def test_what_is_there_and_no_file_is_called_what_it_is(tmp_path: Path) -> None:
    pipe, link, round_trip = (tmp_path / f"{name}.jsonl" for name in ("pipe", "link", "round"))
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "nowhere.jsonl")
    round_trip.symlink_to(round_trip)
    assert f"{str(pipe)!r} is a pipe, not a file; name a data file" in fault(str(pipe))
    assert "is a device, not a file" in fault("/dev/null")
    assert f"{str(link)!r} is not there" in fault(str(link))
    assert "cannot be read (Too many levels" in fault(str(round_trip))


ROW = '{"question": "q"}'


def test_names_in_the_data_folder(
    write: Callable[[str, str | bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gsm8k_test.jsonl", "aime24.json", "aime25.csv", "both.csv", "both.jsonl", "notes.txt"):
        write(name, "question\nc\n" if name.endswith("csv") else f"[{ROW}]" if name.endswith("json") else ROW)
    expected = [Item("1", "q")]
    assert load_items("gsm8k", data_folder=tmp_path) == ("gsm8k_test", expected)
    monkeypatch.setenv("MLESS_DATA", str(tmp_path))
    assert load_items("gsm8k_test") == ("gsm8k_test", expected)
    assert load_items("GSM8K") == ("gsm8k_test", expected)
    assert load_items("aime25") == ("aime25", [Item("1", "c")])
    assert load_items("both") == ("both", expected)  # .jsonl before .csv
    assert "'aime' could be any of 'aime24', 'aime25'" in fault("aime")
    message = fault("gsm9k")
    assert "did you mean 'gsm8k_test'?" in message
    assert f"and in '{tmp_path}': 'aime24', 'aime25', 'both', 'gsm8k_test'" in message
    assert "notes" not in message
    monkeypatch.setenv("MLESS_DATA", str(tmp_path / "gone"))
    assert "gone' (MLESS_DATA) is not a folder" in fault("gsm8k")


def test_manifest(write: Callable[[str, str | bytes], str], tmp_path: Path) -> None:
    write("raw.jsonl", ROW)
    right, wrong = hashlib.sha256(ROW.encode()).hexdigest(), "0" * 64

    def listing(**entry: object) -> None:
        write("manifest.json", json.dumps([entry]))

    listing(name="short", file="raw.jsonl", rows=1)
    assert load_items("short", data_folder=tmp_path) == ("short", [Item("1", "q")])
    listing(name="short", file="raw.jsonl", sha256=right.upper())
    assert load_items("short", data_folder=tmp_path) == ("short", [Item("1", "q")])
    # The manifest is no data set itself.
    assert "no data file or data set 'manifest'" in fault("manifest", data_folder=tmp_path)
    listing(name="short", file="raw.jsonl", sha256=wrong)
    for name in ("short", "raw"):
        assert f"expected sha256 '{wrong}', found '{right}'" in fault(name, data_folder=tmp_path)
    listing(name="short", file="gone.jsonl")
    assert "gone.jsonl' is not there; fetch it, or remove its entry from the manifest" in fault(
        "short", data_folder=tmp_path
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{]", "manifest.json' line 1: broken JSON"),
        ("{}", "expected a list of .*, found an object"),
        ('[{"name": "a", "file": "a.csv"}, {"name": "b"}]', "entry 2 needs a name and a file"),
        ("[7]", "entry 1 needs a name and a file"),
        ('[{"name": "a", "file": "../a.csv"}]', "entry 1 leads out of its folder"),
        ('[{"name": "a", "file": "/etc/a.csv"}]', "entry 1 leads out of its folder"),
    ],
)
def test_broken_manifests(write: Callable[[str, str | bytes], str], tmp_path: Path, content: str, message: str) -> None:
    write("manifest.json", content)
    assert re.search(message, fault("a", data_folder=tmp_path))


@pytest.mark.parametrize(
    ("source", "name", "count", "first"),
    [
        ("gsm8k", "gsm8k_test", 1319, "1"),
        ("math500", "math500", 500, "test/precalculus/807.json"),
        ("aime24", "aime24", 30, "60"),
        ("aime25", "aime25", 30, "1"),
        ("humaneval", "humaneval", 164, "HumanEval/0"),
    ],
)
def test_the_published_data(source: str, name: str, count: int, first: str) -> None:
    manifest = DATA / "manifest.json"
    if not manifest.is_file() or f'"{name}"' not in manifest.read_text("utf-8"):
        pytest.skip(f"{name} is not here; point MLESS_DATA at a folder that has it")
    found, items = load_items(source, data_folder=DATA)
    assert (found, len(items), items[0].id) == (name, count, first)
    assert all(item.answer is not None for item in items)
    if name == "gsm8k_test":
        assert all("\n#### " in (item.answer or "") for item in items)


# --- what a stranger's file may hold ---


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("d.jsonl", '{"question": "q", "answer": NaN}', "is nan, which is no answer"),
        ("d.jsonl", '{"question": "q", "answer": 1e999}', "line 1: broken JSON: the number 1e999 is too large"),
        ("d.jsonl", '{"question": "q", "question": "r"}', "line 1: 'question' stands twice in one object"),
        ("d.jsonl", '{"question": ' + "[" * 90_000 + "]" * 90_000 + "}", "nested too deeply"),
        (
            "d.jsonl",
            '{"question": "' + "q " * 5_000_000 + '"}',
            "has 10,000,000 characters; expected at most 4,000,000",
        ),
        (
            "d.csv",
            "question,answer\n" + "q" * 4_000_001 + ",1",
            "expected at most 4,000,000 characters (limit question",
        ),
    ],
)
def test_values_that_were_taken(write: Callable[[str, str | bytes], str], name: str, content: str, why: str) -> None:
    assert why in fault(write(name, content))


def test_parquet_values_without_a_place_in_python(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    far = pa.array([2**62], pa.int64()).cast(pa.timestamp("ms"))
    for name, column, why in [
        ("far", far, "cannot be read as Parquet"),
        ("nan", pa.array([float("nan")]), "'answer' is nan, which is no answer"),
    ]:
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"question": ["q"], "answer": column}), path)
        assert why in fault(str(path))


def test_a_parquet_file_of_too_many_rows_is_not_unpacked(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({"question": pa.repeat("q", 1_000_001)}), path, compression="zstd")
    assert "rows: expected at most 1,000,000 rows (limit data-rows" in fault(str(path))


def test_a_link_to_a_device_is_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").symlink_to("/dev/zero")
    assert "is a device, not a file" in fault(str(tmp_path / "d.jsonl"))


def test_nan_in_a_field_that_nobody_asks_for(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2", "rating": NaN}\n')
    assert load_items(str(path))[1][0].answer == "2"
    path.write_text('{"question": "1 + 1?", "answer": NaN}\n')
    with pytest.raises(BadData, match="is nan, which is no answer"):
        load_items(str(path))
