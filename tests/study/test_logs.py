"""The gate for logs of other programs: what is no log, or holds values that no log can have, is refused by sample and field."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_importing import AFTER, BEFORE, chosen, eval_file, lines, logged, said

from mless import limits
from mless.errors import BadData
from mless.study.importing import import_results
from mless.study.logs import unzipped

Change = Callable[[Any], object]


def refused(none: Path, other: Path, out: Path, why: str) -> None:
    with pytest.raises(BadData, match=why) as fault:
        import_results([f"none={none}", f"mless={other}"], out)
    assert str(other) in str(fault.value)
    assert not out.exists()


def put(where: str, value: Any) -> Change:
    """Set a field; a dot leads inside, and a number into a list."""

    def change(content: Any) -> None:
        *way, last = where.split(".")
        for part in way:
            content = content[int(part)] if isinstance(content, list) else content[part]
        content[int(last) if isinstance(content, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("doc_id", None), r"sample 1: doc_id: expected a valid string, found null"),
        (put("arguments", {}), "at least one request, with its prompt"),
        (put("arguments", [[]]), "at least one request, with its prompt"),
        (put("arguments", 7), "sample 1: arguments"),
        (put("resps", "it is 42"), r"sample 1: resps.*expected a valid list, found 'it is 42'"),
        (put("metrics", [{}]), r"sample 1: metrics\.0: expected a valid string, found an object"),
        (put("metrics", []), "sample 1: metrics: "),
        (put("arguments.gen_args_0.arg_1.temperature", "hot"), "the arguments of sample 1: temperature: "),
        (put("arguments.gen_args_0.arg_1.temperature", -1), "temperature: expected greater than or equal to 0"),
        (put("arguments.gen_args_0.arg_1.max_gen_toks", 2**31), "max_gen_toks: expected less than 2147483648"),
        (put("exact_match", float("nan")), "only a score that is 0 or 1"),
        (put("exact_match", {"a": 1}), "only a score that is 0 or 1"),
    ],
)
def test_a_sample_of_lm_eval_with_something_else(change: Change, why: str, tmp_path: Path) -> None:
    samples = said(AFTER)
    change(samples[0])
    none, other = lines(tmp_path / "none.jsonl", said(BEFORE)), lines(tmp_path / "other.jsonl", samples)
    refused(none, other, tmp_path / "out", why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("resps", [[["-1.5", "False"]]]), r"as many responses as choices \(2\)"),
        (put("resps.0.0.0", "x"), "a log-likelihood for each choice"),
        (put("resps.0.0.0", "inf"), "a log-likelihood for each choice"),
    ],
)
def test_choices_with_something_else(change: Change, why: str, tmp_path: Path) -> None:
    samples = chosen(AFTER)
    change(samples[0])
    none, other = lines(tmp_path / "none.jsonl", chosen(BEFORE)), lines(tmp_path / "other.jsonl", samples)
    refused(none, other, tmp_path / "out", why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("eval", "x"), "eval: expected "),
        (put("samples", {}), "samples: expected a valid list"),
        (put("samples.1", 7), "sample 2: "),
        (put("plan", 3), "plan: expected "),
        (put("plan", {"config": {"temperature": float("inf")}}), "temperature: expected a finite number"),
        (put("samples.0.id", ""), "sample 1: id"),
        (put("samples.0.epoch", 0), "sample 1: epoch: expected greater than or equal to 1, found 0"),
        (put("samples.0.epoch", 2**40), "sample 1: epoch: expected less than 2147483648"),
        (put("samples.0.output.usage.output_tokens", 2**31), "output_tokens: expected less than 2147483648"),
        (put("samples.0.output.choices", [{}]), r"output\.choices\.0\.message is missing"),
        (put("samples.0.scores", ["C"]), "sample 1: scores: expected a valid dictionary, found a list"),
        (put("samples.0.attachments", {"long": 3}), "sample 1: attachments"),
        (put("samples.0.output.metadata", {"mless_condition": {"kind": "repeat"}}), "mless_condition: .*"),
        (put("samples.0.output.metadata", {"mless_condition": [1]}), r"mless_condition\."),
    ],
)
def test_a_log_of_inspect_with_something_else(change: Change, why: str, tmp_path: Path) -> None:
    log = logged(AFTER)
    change(log)
    none, other = tmp_path / "none.json", tmp_path / "other.json"
    none.write_text(json.dumps(logged(BEFORE)))
    other.write_text(json.dumps(log))
    refused(none, other, tmp_path / "out", why)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"eval": {}, "eval": {}}', "stands twice in one object"),
        ('{"x": "\\ud800"}', "half a character"),
        ('{"x": ' + "9" * 5000 + "}", "5,000 digits"),
        ("[]", "an object was expected, not a list"),
    ],
)
def test_texts_that_python_would_stumble_over(text: str, why: str, tmp_path: Path) -> None:
    none, other = lines(tmp_path / "none.jsonl", said(BEFORE)), tmp_path / "other.json"
    other.write_text(text)
    refused(none, other, tmp_path / "out", why)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    none = lines(tmp_path / "none.jsonl", said(BEFORE))
    refused(none, tmp_path / "pipe.jsonl", tmp_path / "out", "is a pipe, not a file")


# ---- archives ----------------------------------------------------------------------------------------------------------


def test_an_archive_that_unpacks_to_too_much_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = eval_file(tmp_path / "a.eval", logged(AFTER), zstd=False)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("samples/bomb_epoch_1.json", b"0" * (1 << 24))
    small = limits.Limit("log-bytes", 1 << 20, "bytes", "a test's")
    monkeypatch.setattr("mless.study.logs.LOG_BYTES", small)
    with pytest.raises(BadData, match=r"unpacks to 16,.* bytes; expected at most 1,048,576 bytes"):
        unzipped(file)


@pytest.mark.parametrize("zstd", [False, True], ids=["deflate", "zstd"])
def test_an_entry_longer_than_it_says_is_refused(zstd: bool, tmp_path: Path) -> None:
    file = eval_file(tmp_path / "a.eval", logged(AFTER), zstd=zstd)
    raw = bytearray(file.read_bytes())
    at = raw.index(b"PK\x01\x02")
    raw[at + 24 : at + 28] = (3).to_bytes(4, "little")  # the directory's length of the first entry
    file.write_bytes(bytes(raw))
    with pytest.raises(BadData, match=r"a\.eval"):
        unzipped(file)


def test_an_entry_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = eval_file(tmp_path / "a.eval", logged(AFTER), zstd=False)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("header.json", "{}")
    with pytest.raises(BadData, match="has an entry twice"):
        unzipped(file)


def test_damaged_entries_are_no_crash(tmp_path: Path) -> None:
    file = eval_file(tmp_path / "a.eval", logged(AFTER), zstd=False)
    raw = bytearray(file.read_bytes())
    for at in range(60, len(raw), max(97, len(raw) // 40)):
        changed = bytearray(raw)
        changed[at] ^= 0xFF
        file.write_bytes(bytes(changed))
        said = str(file)
        try:
            unzipped(file)
        except BadData as fault:
            said = str(fault)
        assert str(file) in said
