"""Results of lm-eval and Inspect as a folder of answers: the same statistics, pairing by item, and what cannot be compared."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import mless
from judged_answers import pair
from mless import cli, stats
from mless.errors import BadData, BadFolder, BadStudy
from mless.figures import draw
from mless.integrations.filling import recorded
from mless.report import publish
from mless.results.folder import ResultFolder
from mless.study.foreign import Scored
from mless.study.importing import import_results, stated_of
from mless.values import Condition, FigureSpec

BEFORE, AFTER = pair(gained=14, lost=3, n=60)

# ---- files as the programs write them ----------------------------------------------------------------------------------


def said(correct: Sequence[bool] | np.ndarray, **changed: Any) -> list[dict[str, Any]]:
    """lm-eval's samples of a generate_until task, as --log_samples writes them."""
    return [
        {
            "doc_id": n,
            "doc": {"question": f"q{n}"},
            "target": "42",
            "arguments": {"gen_args_0": {"arg_0": f"Question {n}?", "arg_1": {"until": [], "do_sample": False, "max_gen_toks": 32}}},
            "resps": [["it is 42" if right else "it is 7"]],
            "filtered_resps": ["42" if right else "[invalid]" if n % 7 == 0 else "7"],
            "filter": "last-number",
            "metrics": ["exact_match"],
            "doc_hash": hashlib.sha256(f"q{n}".encode()).hexdigest(),
            "exact_match": float(right),
        }
        | changed
        for n, right in enumerate(correct)
    ]  # fmt: skip


def chosen(correct: Sequence[bool] | np.ndarray) -> list[dict[str, Any]]:
    """Those of a multiple_choice task; acc_norm is always right here."""
    return [
        {
            "doc_id": n,
            "doc": {"question": f"q{n}"},
            "target": "1",
            "arguments": {f"gen_args_{k}": {"arg_0": f"Question {n}?", "arg_1": f" choice {k}"} for k in range(2)},
            "resps": [[["-1.5", "False"]], [["-1.0" if right else "-2.0", "False"]]],
            "filtered_resps": [["-1.5", "False"], ["-1.0", "False"]],
            "filter": "none",
            "metrics": ["acc", "acc_norm"],
            "doc_hash": f"hash of {n}",
            "acc": float(right),
            "acc_norm": 1.0,
        }
        for n, right in enumerate(correct)
    ]


def lines(path: Path, samples: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def logged(correct: np.ndarray, **changed: Any) -> dict[str, Any]:
    """An Inspect log; `correct` is items × epochs."""
    matrix = correct[:, None] if correct.ndim == 1 else correct
    samples = [
        {
            "id": f"q{n}",
            "epoch": epoch + 1,
            "input": f"Question {n}?" if n else "attachment://long",
            "target": "42",
            "attachments": {"long": "Question 0?"},
            "output": {
                "choices": [{"message": {"role": "assistant", "content": "it is 42"}, "stop_reason": "max_tokens" if n == 1 else "stop"}],
                "completion": f"it is {42 if right else epoch}",
                "usage": {"output_tokens": 5 + n % 2},
            },
            "scores": {"includes": {"value": "C" if right else "I", "answer": "42"}},
        }
        for (n, epoch), right in np.ndenumerate(matrix)
    ]  # fmt: skip
    return {
        "status": "success",
        "eval": {
            "task": "pkg/sums",
            "model": "mless/smollm2",
            "model_generate_config": {"max_tokens": 8, "temperature": 0.7},
        },
        "plan": {"config": {"max_tokens": 8, "temperature": 0.7}},
        "samples": samples,
    } | changed


def eval_file(path: Path, log: Mapping[str, Any], *, zstd: bool) -> Path:
    """An .eval archive; with zstd, which zipfile cannot write, byte by byte."""
    files = {"header.json": {key: value for key, value in log.items() if key != "samples"}}
    files |= {f"samples/{one['id']}_epoch_{one['epoch']}.json": one for one in log["samples"]}
    if not zstd:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, json.dumps(content))
        return path
    body, directory = b"", b""
    for name, content in files.items():
        raw, label = json.dumps(content).encode(), name.encode()
        packed = pa.Codec("zstd").compress(raw, asbytes=True)
        common = struct.pack("<HHHHHIIIHH", 63, 0, 93, 0, 0, zlib.crc32(raw), len(packed), len(raw), len(label), 0)
        directory += (
            struct.pack("<4sH", b"PK\x01\x02", 63) + common + struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + label
        )
        body += b"PK\x03\x04" + common + label + packed
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(files), len(files), len(directory), len(body), 0)
    path.write_bytes(body + directory + end)
    return path


def two(tmp_path: Path) -> list[str]:
    none, mless_file = (
        lines(tmp_path / "samples_none.jsonl", said(BEFORE)),
        lines(tmp_path / "samples_mless.jsonl", said(AFTER)),
    )
    return [str(none), str(mless_file)]


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    table = ResultFolder(folder).read_table("accuracy").to_pylist()
    return {row["condition"]: row for row in table if row["metric"] == "pass@1"}


# ---- the numbers -------------------------------------------------------------------------------------------------------


def test_samples_of_lm_eval_are_paired_by_item_and_tested(tmp_path: Path):
    first, second = two(tmp_path)
    shuffled = said(AFTER)[::-1]  # the order of a file means nothing
    lines(Path(second), shuffled)
    outcome = import_results([first, second], tmp_path / "out", margin=0.05)
    rows = rows_of(outcome.folder)
    change = stats.paired_difference(BEFORE, AFTER)
    assert rows["none"]["value"] == BEFORE.mean()
    found = rows["mless"]
    assert (found["delta"], found["delta_lo"], found["delta_hi"]) == (change.value, change.lo, change.hi)
    assert found["p"] == stats.mcnemar_exact(BEFORE, AFTER)
    assert (found["gained"], found["lost"], found["verdict"]) == (14, 3, "rises")
    assert found["no_answer"] == np.mean([n % 7 == 0 and not right for n, right in enumerate(AFTER)])
    answers = {(a["condition"], a["item"]): a for a in ResultFolder(outcome.folder).read_table("answers").to_pylist()}
    one = answers["mless", "0"]
    assert (one["text"], one["extracted"], one["correct"], one["reference"]) == ("it is 42", "42", True, "42")
    assert one["why"] == "exact_match = 1.0, by lm-eval"
    assert all(a["stated"] is (None if a["extracted"] is None else True) for a in answers.values())


@pytest.mark.parametrize(
    ("text", "extracted", "how", "stated"),
    [
        ("it is 42", "42", "strict-match", True),
        ("it is 42", "42.0", "strict-match", True),
        ("Add 40 and 2.", "2", "flexible-extract", False),
        ("The answer is 42. I used 3 steps.", "3", "flexible-extract", False),  # a guess of theirs, though a result is stated
        ("The answer is 42.", "The answer is 42.", "none", True),
        ("So (b) is correct.", "B", "choice", True),
        ("Paris", "Paris", "none", None),
        ("A: -1.00; B: -2.00", "A", "likeliest", None),
        ("no idea", None, "none", None),
    ],
)  # fmt: skip
def test_an_answer_that_another_program_found_is_stated_or_guessed(
    text: str, extracted: str | None, how: str, stated: bool | None
):
    row = Scored("0", 0, "", "?", "42", text, extracted, how, {"acc": 1})
    assert stated_of(row) is stated


def test_holm_is_over_the_conditions_and_a_control_is_one(tmp_path: Path):
    files = {"none": BEFORE, "none-again": BEFORE, "a": AFTER, "b": AFTER[::-1].copy()}
    given = [f"{name}={lines(tmp_path / f'{name}.jsonl', said(correct))}" for name, correct in files.items()]
    rows = rows_of(import_results(given, tmp_path / "out").folder)
    assert rows["a"]["p_adjusted"] == pytest.approx(2 * rows["a"]["p"])
    assert (rows["none-again"]["verdict"], rows["a"]["aa_delta"]) == (None, 0.0)
    assert any("A/A: none-again differs on 0 of 60 items" in line for line in mless.verdict_lines(tmp_path / "out"))


def test_the_folder_is_like_any_other(tmp_path: Path):
    folder = import_results(two(tmp_path), tmp_path / "out", model="tiny", task="sums").folder
    opening, *verdict = mless.verdict_lines(folder)
    assert opening.startswith("tiny, 60 items of sums, engine lm-eval, greedy, 1 answer per item")
    assert any(line.startswith("mless") and "accuracy rises" in line for line in verdict)
    page = publish(folder, fresh=True).read_text()
    assert "Question 0?" in page  # one of those that became right
    written = draw(FigureSpec("bars", "bars", (), ("none", "mless")), [folder], formats=["png"])
    assert written[0].read_bytes()[:4] == b"\x89PNG"
    again = import_results(two(tmp_path), folder, model="tiny", task="sums")
    assert mless.verdict_lines(again.folder)[0] == opening


def test_choices_are_told_with_their_likelihoods(tmp_path: Path):
    given = {"none": lines(tmp_path / "a.jsonl", chosen(BEFORE)), "mless": lines(tmp_path / "b.jsonl", chosen(AFTER))}
    folder = import_results(given, tmp_path / "out", metric="acc").folder
    assert rows_of(folder)["mless"]["gained"] == 14
    one = ResultFolder(folder).read_table("answers").to_pylist()[0]
    assert (one["text"], one["extracted"], one["reference"]) == (
        "choice 0: -1.50; choice 1: -2.00",
        "choice 0",
        "choice 1",
    )
    assert rows_of(import_results(given, tmp_path / "norm", metric="acc_norm").folder)["mless"]["value"] == 1.0


def test_what_lm_eval_wrote_beside_it_names_model_task_and_condition(tmp_path: Path):
    given: list[str] = []
    for name, correct in (("none", BEFORE), ("mless", AFTER)):
        date = "2026-11-15T09-10-11.123456"
        file = lines(tmp_path / name / f"samples_my_sums_{date}.jsonl", said(correct))
        condition = (
            {"name": name, "kind": "repeat", "filler": " /", "length": 9, "placement": "end"}
            if name == "mless"
            else None
        )
        arm = {"arm": {"c": 0.2, "fraction": None, "layers": [1, 2]}}
        config = {"model_args": {"pretrained": "org/Tiny-1B"}, "mless_condition": condition and condition | arm}
        (tmp_path / name / f"results_{date}.json").write_text(json.dumps({"config": config}))
        given.append(str(file) if condition else f"none={file}")
    about = ResultFolder(import_results(given, tmp_path / "out").folder).manifest() or {}
    assert (about["model"]["label"], about["task"]) == ("Tiny-1B", "my_sums")
    told = about["conditions"]["mless"]
    # An older mless wrote it: its `end` was the prompt's last place.
    expected = (9, "before-answer", 0.2, [1, 2])
    assert (told["length"], told["placement"], told["arm"]["c"], told["arm"]["layers"]) == expected
    assert any(line.startswith("mless (9 × ' /', before-answer") for line in mless.verdict_lines(tmp_path / "out"))


def test_what_todays_mless_tells_another_program_means_the_same(tmp_path: Path):
    given: list[str] = []
    for name, correct in (("none", BEFORE), ("mless", AFTER)):
        file = lines(tmp_path / name / "samples_sums_2026-11-15T09-10-11.123456.jsonl", said(correct))
        condition = recorded(Condition(name, "repeat", " /", 9, "end"))
        told = {"config": {"mless_condition": condition if name == "mless" else None}}
        (tmp_path / name / "results_2026-11-15T09-10-11.123456.json").write_text(json.dumps(told))
        given.append(f"{name}={file}")
    about = ResultFolder(import_results(given, tmp_path / "out").folder).manifest() or {}
    assert about["conditions"]["mless"]["placement"] == "end"


def test_results_in_memory_and_one_task_of_several(tmp_path: Path):
    results = {
        name: {"results": {}, "samples": {"sums": said(correct), "other": said(BEFORE)}, "config": {}}
        for name, correct in (("none", BEFORE), ("mless", AFTER))
    }
    assert rows_of(import_results(results, tmp_path / "out", task="sums").folder)["mless"]["gained"] == 14
    with pytest.raises(BadData, match="several tasks: sums, other; choose one with --task"):
        import_results(results, tmp_path / "out2")
    with pytest.raises(BadData, match="no task 'x'; it has: sums, other"):
        import_results(results, tmp_path / "out2", task="x")


@pytest.mark.parametrize("kind", ["json", "deflate", "zstd"])
def test_inspect_logs_with_epochs(tmp_path: Path, kind: str):
    rng = np.random.default_rng(0)
    correct = {"none": rng.random((20, 3)) < 0.4, "mless": rng.random((20, 3)) < 0.6}
    given: dict[str, Path] = {}
    for name, matrix in correct.items():
        if kind == "json":
            given[name] = tmp_path / f"{name}.json"
            given[name].write_text(json.dumps(logged(matrix)))
        else:
            given[name] = eval_file(tmp_path / f"{name}.eval", logged(matrix), zstd=kind == "zstd")
    folder = import_results(given, tmp_path / "out").folder
    row = rows_of(folder)["mless"]
    assert (row["value"], row["samples"], row["n"]) == (pytest.approx(correct["mless"].mean()), 3, 20)
    assert row["delta"] == pytest.approx(correct["mless"].mean() - correct["none"].mean())
    assert (row["truncated"], row["tokens"]) == (pytest.approx(1 / 20), 5.5)
    about = ResultFolder(folder).manifest() or {}
    assert (about["model"]["label"], about["task"], about["questions"]["q0"]) == ("smollm2", "sums", "Question 0?")
    assert "temperature 0.7, 3 samples per item" in mless.verdict_lines(folder)[0]


# ---- what cannot be compared -------------------------------------------------------------------------------------------


def twice() -> list[dict[str, Any]]:
    return said(AFTER) + said(AFTER)[:1]


def graded() -> list[dict[str, Any]]:
    return said(AFTER, exact_match=0.5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (said(AFTER)[:50], r"item '50' is in .*none.jsonl, but not in .*x.jsonl \(10 such; none has 60, mless 50\)"),
        (said(AFTER) + said([True] * 61)[60:], "item '60' is in .*x.jsonl, but not in .*none.jsonl"),
        (twice(), "item '0' is there twice"),
        (graded(), "'exact_match' is 0.5, and only a score that is 0 or 1 for every item"),
        (
            said(AFTER, doc_hash="another"),
            "item '0' is one thing in .* and another in .*: they are not of the same data",
        ),
        (
            chosen(AFTER),
            "no metric is in every file; choose one with --metric: none: exact_match; mless: acc, acc_norm",
        ),
        ([], "holds no samples"),
        ([{"doc_id": 1}], "a sample has no 'arguments', so it is not lm-eval's"),
    ],
    ids=["fewer", "more", "twice", "graded", "another", "metrics", "empty", "foreign"],
)
def test_unequal_results_are_refused(tmp_path: Path, other: list[dict[str, Any]], message: str):
    none = lines(tmp_path / "none.jsonl", said(BEFORE))
    with pytest.raises(BadData, match=message):
        import_results([str(none), f"mless={lines(tmp_path / 'x.jsonl', other)}"], tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is written of what cannot be compared"


def test_metrics_are_listed_and_filters_told_apart(tmp_path: Path):
    samples = said(BEFORE) + said(AFTER, filter="strict")
    given = {"none": lines(tmp_path / "a.jsonl", samples), "mless": lines(tmp_path / "b.jsonl", samples)}
    there = "exact_match,last-number, exact_match,strict"
    with pytest.raises(BadData, match=f"several metrics are in every file; choose one with --metric: {there}"):
        import_results(given, tmp_path / "out")
    with pytest.raises(BadData, match=f"'exact_match' is there under several filters; there are: {there}"):
        import_results(given, tmp_path / "out", metric="exact_match")
    with pytest.raises(BadData, match=f"'f1' is not in every file; there are: {there}"):
        import_results(given, tmp_path / "out", metric="f1")
    assert (
        rows_of(import_results(given, tmp_path / "out", metric="exact_match,strict").folder)["none"]["value"]
        == AFTER.mean()
    )


def test_names_and_the_baseline(tmp_path: Path):
    first, second = two(tmp_path)
    with pytest.raises(
        BadData, match=r"taken against the condition 'none'; got mless .*: say which file is the baseline, as none=FILE"
    ):
        import_results([second], tmp_path / "out")
    with pytest.raises(BadData, match=r"two results are called 'none': .* tell them apart with NAME=FILE"):
        import_results([first, f"none={second}"], tmp_path / "out")
    with pytest.raises(BadStudy, match="condition name 'a b'"):
        import_results({"none": first, "a b": second}, tmp_path / "out")
    log = tmp_path / "log.json"
    log.write_text(json.dumps(logged(AFTER)))
    with pytest.raises(BadData, match="results of one program can be compared, got inspect and lm-eval"):
        import_results({"none": first, "mless": log}, tmp_path / "out")
    with pytest.raises(BadStudy, match="the margin is a share between 0 and 1, got 2"):
        import_results([first, second], tmp_path / "out", margin=2.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"status": "error", "error": {"message": "it broke\nbadly"}},
            r"status 'error': it broke\); finish it with: inspect eval-retry",
        ),
        ({"samples": []}, "holds no samples; was it written with --no-log-samples"),
    ],
)
def test_unfinished_inspect_logs_are_refused(tmp_path: Path, changed: dict[str, Any], message: str):
    file = tmp_path / "none.json"
    file.write_text(json.dumps(logged(AFTER, **changed)))
    with pytest.raises(BadData, match=message):
        import_results([file], tmp_path / "out")


def test_inspect_scores_that_are_no_right_or_wrong_are_refused(tmp_path: Path):
    for value, message in (
        ("P", "'includes' is 'P'"),
        (None, "has no score"),
        ({"a": 1, "b": 0.3}, "--metric: includes.a, includes.b"),
    ):
        log = logged(AFTER)
        for sample in log["samples"]:
            sample["scores"] = {"includes": {"value": value, "answer": "4"}} if value is not None else {}
        file = tmp_path / "none.json"
        file.write_text(json.dumps(log))
        with pytest.raises(BadData, match=message):
            import_results([file], tmp_path / "out")


def test_files_that_are_none_are_refused(tmp_path: Path):
    (tmp_path / "broken.eval").write_bytes(b"PK\x03\x04 and nothing more")
    (tmp_path / "no.jsonl").write_text("{not json}\n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "results.json").write_text('{"results": {}, "config": {}}')
    for name, message in (
        ("absent.jsonl", "is not there; give lm-eval's"),
        ("broken.eval", "no Inspect log that can be read"),
        ("no.jsonl", "line 1 is no JSON"),
        ("list.json", "an object was expected, not a list"),
        ("results.json", r"holds no samples \(it has: results, config\); lm-eval writes them with --log_samples"),
        ("", "is a folder, not a file; give"),
    ):
        with pytest.raises(BadData, match=message):
            import_results([f"none={tmp_path / name}"], tmp_path / "out")


def test_another_study_s_folder_is_left_alone(tmp_path: Path):
    files = two(tmp_path)
    folder = import_results(files, tmp_path / "out").folder
    before = (folder / "accuracy.parquet").read_bytes()
    lines(Path(files[1]), said(BEFORE))
    with pytest.raises(BadFolder, match=r"holds another study .*: it differs in imported files; choose another --out"):
        import_results(files, folder)
    assert (folder / "accuracy.parquet").read_bytes() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(BadFolder, match=r"is not empty and holds no study\.json"):
        import_results(files, tmp_path / "full")


# ---- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """The command in this process: its exit code, what it printed and what it said."""

    def ran(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["mless", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        told = capsys.readouterr()
        return left.value.code or 0, told.out, told.err

    return ran


def test_the_command_prints_the_verdict_and_the_table(tmp_path: Path, run: Callable[..., tuple[object, str, str]]):
    asked = ["import", *two(tmp_path), "--out", str(tmp_path / "out"), "--model", "tiny"]
    code, said, err = run(*asked)
    assert code == 0, err
    assert "tiny, 60 items" in said
    assert "(120 answers imported)" in said
    assert (tmp_path / "out" / "report.html").exists()
    told = json.loads(run(*asked, "--json")[1])
    assert {row["condition"] for row in told["accuracy"]} == {"none", "mless"}


def test_a_fault_is_one_line_and_exit_code_2(tmp_path: Path, run: Callable[..., tuple[object, str, str]]):
    code, _, err = run("import", two(tmp_path)[1], "--out", str(tmp_path / "out"))
    assert code == 2
    assert err.startswith("mless: differences are taken against the condition 'none'")
    assert len(err.splitlines()) == 1


def test_a_baseline_alone_is_refused_and_leaves_nothing(tmp_path: Path):
    file = lines(tmp_path / "samples_none.jsonl", said([True, False, True]))
    with pytest.raises(BadData, match=r"only the baseline was given.*mless=FILE"):
        import_results([f"none={file}"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_choice_without_any_likelihood_is_a_choice(tmp_path: Path):
    without, given = chosen(BEFORE), chosen(AFTER)
    given[0]["resps"][0] = [["-inf", "False"]]
    files = [f"none={lines(tmp_path / 'none.jsonl', without)}", f"mless={lines(tmp_path / 'x.jsonl', given)}"]
    assert import_results(files, tmp_path / "out", metric="acc").units == 2 * len(BEFORE)


def test_an_entry_whose_checksum_is_wrong_is_refused(tmp_path: Path):
    file = eval_file(tmp_path / "none.eval", logged(AFTER), zstd=True)
    raw = bytearray(file.read_bytes())
    first = raw.index(b"PK\x01\x02")
    raw[first + 16] ^= 1  # of the directory's first CRC
    file.write_bytes(raw)
    with pytest.raises(BadData, match=r"Bad CRC-32 for file 'header\.json'"):
        import_results([f"none={file}"], tmp_path / "out")


def test_a_name_longer_than_any_file_name_is_refused(tmp_path: Path):
    first, second = two(tmp_path)
    with pytest.raises(BadStudy, match=r"condition name 'nnn.*: expected at most 200 characters .*, got 300"):
        import_results([f"none={first}", f"{'n' * 300}={second}"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
